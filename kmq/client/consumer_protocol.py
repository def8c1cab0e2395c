"""The consumer port from the client's side, without I/O: bytes in, records and events out; requests in, bytes out.

    opening → connected → receive … take → lost            (kmq.Consumer and kmq.AsyncConsumer move the bytes)

    consumer_options.py   the options
    consumer_state.py     partitions, waiting records, requests without a reply, the stream of replies

Records     The broker sends records only in reply to a `!fetch`. At most one `!fetch` is pending; the next one is sent
            while the application works on the previous batch. A batch that was requested before a seek is dropped; the
            broker then continues at the new position.
Rebalance   `!assign` and `!revoke` become events for the application's thread. A partition that is to be revoked hands
            out no more records. It belongs to this member until `revoked`.
Outage      The next connection opens with the same member name. A partition that is assigned again within session_s of
            the last request continues at its position, if the group's offset is the one that this member committed
            last. All other partitions are lost and begin at the group's offset: another member may have read on, or an
            operator may have moved the group.
Damage      A partition whose files are damaged is paused, with a log line; the others are read. It is requested again
            after `resume`, a seek, or on the next connection.
Hand-outs   The broker is told which messages the application has before the application gets them. So messages that
            only wait here are not suspected of killing the application. If the application takes messages quickly, up
            to _MOST_AHEAD of them are announced ahead.
Start       If the group has committed nothing, the option `start` is resolved and committed before a message is handed
            out. So for every later member `latest` means the moment of the subscription: the ends that the topics had
            before the first connection. A partition that is not among those is newer, and begins at its first record.

Invariant   No record is skipped: a partition continues where the application is, where it has sought, or where the
            group has committed. Every commit gets exactly one outcome. A commit without a reply is sent again, unless
            another member may have read the partition meanwhile.
Memory      consumer_state.py.
Threads     None: callers lock.
"""

import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from functools import partial
from secrets import token_hex

from kmq.client.consumer_options import ConsumerOptions, logger, made_up_member, to_position
from kmq.client.consumer_state import (
    Decoder,
    Holdings,
    Owned,
    PartitionEvent,
    Pending,
    PendingRequests,
    commit_parts,
    fitting,
    joined,
    nameable,
    opening_of,
    split,
)
from kmq.client.lines import STALL_S
from kmq.errors import KmqError
from kmq.sending.failures import ANSWER_S, ELSEWHERE_S, Fenced, NotAnswered, Refused
from kmq.wire import replies
from kmq.wire import requests as lines
from kmq.wire.attempts import Attempt
from kmq.wire.refusals import REJOIN, find
from kmq.wire.requests import EARLIEST, LATEST, BadLine, Position, TopicPartition

# Shares of the session: how long a `!fetch` waits, and the longest silence, after which a beat keeps the member alive.
_FETCH_WAIT, _BEAT = 0.9, 0.33
_PAUSE_S = 0.2  # before the next fetch, after a fetch that was refused for now
_QUICK_S, _MOST_AHEAD = 0.01, 512  # an application that calls again within this is quick; most messages announced ahead
_ALL = 1 << 62  # no hand-out has to be reported
_POLL_S = 60.0  # a member with unread records still fetches this often: else the broker would end it


class Phase(Enum):
    """The state of the connection."""

    AWAY = "not connected"
    JOINING = "waiting for an assignment"
    READING = "reading"


class ConsumerCore:
    """The state of one consumer: its partitions, its requests, and its connection."""

    def __init__(self, options: ConsumerOptions) -> None:
        self.options = options
        self.member = options.member or made_up_member()
        self.start = to_position(options.start)
        self.topics: tuple[str, ...] = ()  # subscribed to, as a member of the group
        self.wanted: dict[TopicPartition, Position] = {}  # assigned by the application, and not read yet
        self.ends: dict[TopicPartition, int | None] | None = None  # of its topics, when it subscribed; None: not known
        self.subscribed_us = 0  # since the epoch, by the clock of this machine
        self._attempt: Attempt | None = Attempt(token_hex(8), 0)  # the last one; None: the broker is too old for it
        self._says_hand_outs = self._hears_overtaken = True  # until the broker turns out to be too old for them
        self._ahead, self._handed_out_at = 0, 0.0
        self.holdings = Holdings(options.fetch_max_bytes)
        self.requests = PendingRequests(options.session_s)
        self.expires_at = 0.0  # when the broker ends this member, as of the last connection
        self.generation = self.connections = 0
        self.has_others = False  # this client has other addresses besides that of this connection
        self.phase = Phase.AWAY
        self.away_since, self.away_reason = time.monotonic(), "not connected yet"
        self.is_outage_logged = False
        self.errors: deque[KmqError] = deque()  # of fetches and seeks, for the application
        self.failed: KmqError | None = None  # why the consumer has ended
        self.fetch_until: float | None = None  # when the reply to the pending fetch is overdue
        self.is_dry = False  # the last reply was that there are no more records
        self._fetched_at = 0.0
        self.fetched: tuple[Owned, ...] = ()  # named in the pending fetch
        self.fetch_from = 0.0  # earliest time of the next fetch: the broker was too busy
        self._decoder = Decoder()

    @property
    def is_managed(self) -> bool:
        """Return True if the group decides which partitions this consumer reads."""
        return bool(self.topics)

    @property
    def lacks_ends(self) -> bool:
        """Return True if the ends of the topics must be looked up, because `latest` means those ends."""
        return self.is_managed and self.start == LATEST and self.ends is None

    def start_of(self, place: TopicPartition) -> Position:
        """Return where to begin in a partition of which the group has committed nothing."""
        if self.start != LATEST or self.ends is None:
            return self.start
        end = self.ends.get(place, 0)  # newer than the subscription: from its first record on
        return Position("received", self.subscribed_us) if end is None else Position("offset", end)

    @property
    def has_something_to_read(self) -> bool:
        return bool(self.topics or self.wanted or self.holdings.owned)

    # --- a connection ------------------------------------------------------------------------------------------------

    def choose(self, topics: tuple[str, ...], places: Iterable[tuple[TopicPartition, Position]] = ()) -> None:
        """Read these topics as a member of the group, or these partitions. The caller reconnects."""
        self.holdings.lose(tuple(self.holdings.owned))
        self.topics, self.wanted, self.ends = topics, dict(places), None
        if self.phase is Phase.AWAY:
            self.away_since = time.monotonic()  # until now there was nothing to connect for

    def discovered(self, found: dict[TopicPartition, int | None]) -> bool:
        """Read these partitions too, if there is no group. Return True if some are new.

        A partition that is newer than the subscription begins at its first record, also with `latest`.
        """
        is_first = self.ends is None
        if self.ends is None:
            self.ends, self.subscribed_us = found, time.time_ns() // 1000
        if self.is_managed:
            return False
        read = {*self.holdings.owned, *self.wanted}
        topics = {place.topic for place in read}
        is_young = self.start == LATEST and not is_first
        new = [place for place in found if place not in read]
        for place in new:
            if is_young or place.topic in topics:
                self.wanted[place] = EARLIEST
            else:
                self.wanted[place] = self.start if found[place] is not None else self.start_of(place)
        return bool(new)

    def opening(self, token: str = "") -> bytes:
        """Return the first lines of the next connection.

        The lines may be delayed and arrive after those of a later connection. So they carry the number of the attempt.
        """
        options, token = self.options, self.options.token or token
        if self.is_managed:
            self._attempt = self._attempt and self._attempt.next()
            who = options.group_id, self.member, self.topics
            group = lines.Group(*who, options.assignor, options.session_s, token, attempt=self._attempt)
            says, hears = self._says_hand_outs, self._hears_overtaken
            return opening_of(group._replace(says_hand_outs=says, hears_overtaken=hears))
        places: dict[TopicPartition, Position | None] = {
            place: owned.next for place, owned in self.holdings.owned.items()
        }
        places.update(self.wanted)
        hears = self._hears_overtaken and bool(options.group_id)
        return opening_of(lines.Assign(options.group_id or None, tuple(places.items()), token, hears_overtaken=hears))

    def connected(self) -> None:
        """Note that a connection was made and its opening written."""
        self.phase, self._decoder = Phase.JOINING, Decoder()
        self.connections += 1
        self._fetched_at = time.monotonic()
        self.requests.connected(self._fetched_at)

    def lost(self, reason: str) -> None:
        """Note that the connection broke or could not be made."""
        if self.phase is Phase.READING:
            self.expires_at = self.requests.expires_at
        if self.phase is not Phase.AWAY:
            self.phase, self.away_since = Phase.AWAY, time.monotonic()
        self.away_reason = reason
        away_s = time.monotonic() - self.away_since
        if away_s >= STALL_S and not self.is_outage_logged and self.failed is None:
            self.is_outage_logged = True
            logger().warning("not connected for %.0f s, and tries again: %s", away_s, reason)
        self.fetch_until, self.is_dry = None, False
        self.holdings.disconnected()
        self.requests.forget_written()
        self.requests.fail(NotAnswered(f"the connection broke before the answer came: {reason}"), "seek", "offsets")

    def fail(self, error: KmqError) -> None:
        """End the consumer."""
        self.failed = self.failed or error
        self.requests.fail(error)

    def overdue(self, now: float) -> str:
        """Return why the connection must be replaced, because the broker does not answer; "" if it is fine."""
        if self.phase is Phase.JOINING:  # a rebalance may take long: other members have to give up partitions
            is_late = self.has_others and now - self._fetched_at > ANSWER_S
            return f"no assignment within {ANSWER_S:g} s" if is_late else ""
        is_late = self.fetch_until is not None and now > self.fetch_until
        if self.phase is Phase.READING and (is_late or now - self.requests.oldest(now) > self._patience_s):
            return f"no answer within {self._patience_s:g} s"
        return ""

    @property
    def _patience_s(self) -> float:
        return ELSEWHERE_S if self.has_others else ANSWER_S

    def describe(self, now: float) -> str:
        """Return a sentence on what the consumer waits for."""
        if self.phase is Phase.AWAY:
            return f"not connected for {now - self.away_since:.1f} s: {self.away_reason}"
        if self.phase is Phase.JOINING:
            return "connected, and waiting for an assignment"
        damaged = [str(place) for place, owned in self.holdings.owned.items() if owned.is_damaged]
        text = f"connected, reading {len(self.holdings.owned)} partitions"
        return f"{text}; paused because of damage: {', '.join(damaged)}" if damaged else text

    # --- requests ----------------------------------------------------------------------------------------------------

    def fetch(self, now: float, wait_s: float) -> None:
        """Request a batch unless a fetch is pending. `wait_s`: how long the application waits, 0 if it has records.

        A fetch of all partitions may wait longer than the application, which will call again: so an idle consumer sends
        few fetches. A fetch that names its partitions does not cover partitions that are resumed meanwhile, so it waits
        less.
        """
        if self.phase is not Phase.READING or self.fetch_until is not None or now < self.fetch_from:
            return
        holdings, has_room = self.holdings, self.holdings.has_room
        is_late = self.is_managed and now - self._fetched_at > _POLL_S
        if not is_late and (not has_room or (self.is_dry and not wait_s)):
            return
        self._begin_at_start(now)  # for partitions whose offsets the broker could not tell before
        for owned in holdings.owned.values():
            if owned.stale and owned.is_placed and not owned.paused and not owned.revoked and not owned.is_damaged:
                self.move(owned, owned.next, now)
        wanted = tuple(place for place, owned in holdings.owned.items() if owned.is_wanted)
        if not wanted and holdings.owned and not is_late:
            return
        is_moving = any(owned.moving or owned.is_starting for owned in holdings.owned.values())
        named = (
            ()
            if len(wanted) == len(holdings.owned)
            else nameable(wanted, self.fetched[-1].place if self.fetched else None)
        )
        if is_moving or 0 < len(named) < len(wanted):
            wait_s = 0.0  # sought partitions need a fetch soon, and the others are named in the next one
        elif named:
            wait_s = min(wait_s, self.options.session_s * _BEAT)
        elif wait_s:
            wait_s = self.options.session_s * _FETCH_WAIT
        most = self.options.fetch_max_bytes if has_room else 1
        self.requests.write(lines.Fetch(most, round(wait_s * 1000), named).encode(), now)
        self.fetch_until, self._fetched_at = now + wait_s + self._patience_s, now
        self.fetched = tuple(holdings.owned[place] for place in named)

    def seek(self, place: TopicPartition, position: Position, now: float) -> None:
        """Continue a partition at `position`. Raises KeyError if the partition is not this consumer's."""
        owned = self.holdings.owned[place]
        if position.kind != "offset" and self.phase is not Phase.READING:
            raise NotAnswered(f"{place}: cannot seek to {position} now: {self.describe(now)}")
        self.holdings.drop_new(owned)
        owned.stale, owned.is_damaged, owned.start = True, False, None
        if position.kind == "offset":
            owned.position, owned.is_placed = position.value, True
        if self.phase is Phase.READING:
            self.move(owned, position, now)

    def move(self, owned: Owned, position: Position, now: float) -> Pending:
        """Tell the broker where to continue reading a partition."""
        pending = Pending(lines.Seek(owned.place, position).encode(), now)
        pending.value = owned
        owned.moving, owned.stale = owned.moving + 1, False
        self.ask("seek", pending)
        return pending

    def ask(self, name: str, *pendings: Pending) -> None:
        """Send requests that have a reply, now or on the next connection."""
        for pending in pendings:
            self.requests.expect(name, pending)
            if self.phase is Phase.READING:
                self.requests.write(pending.line, pending.since)

    def offsets(self, places: tuple[TopicPartition, ...], now: float) -> Pending:
        """Request the offsets of these partitions."""

        def ask(some: tuple[TopicPartition, ...]) -> Pending:
            return Pending(lines.Offsets(some).encode(), now)

        whole = ask(places)
        self.ask("offsets", *split(whole, places, ask))
        return whole

    def commit(
        self,
        offsets: Iterable[tuple[TopicPartition, int]],
        now: float,
        again: Iterable[tuple[TopicPartition, int]] = (),
    ) -> Pending:
        """Request a commit of the next offsets of these partitions; an empty commit is done at once.

        `again`: redelivered messages. Each is committed alone, which does not commit other messages.
        While many commits are pending, several calls share one request and its outcome.
        """
        pairs = dict(offsets)
        if alone := [self._commit_again(*each, now) for each in again]:
            whole = Pending(b"", now, tuple(pairs.items()))
            joined(whole, [*alone, self.commit(pairs.items(), now)] if pairs else alone)
            return whole
        if not pairs:
            pending = Pending(b"", now)
            pending.finish()
            return pending
        request = self.requests.commit(pairs, now)
        if request is not None:
            self.ask("commit", *commit_parts(request))
            return request
        assert self.requests.next_commit is not None
        return self.requests.next_commit

    def _commit_again(self, place: TopicPartition, offset: int, now: float) -> Pending:
        """Request a commit of a redelivered message."""
        owned = self.holdings.owned.get(place)
        if owned:
            owned.again.discard(offset)

        def answered(pending: Pending) -> None:
            if owned and pending.error is not None and not isinstance(pending.error, Fenced):
                owned.again.add(offset)  # not committed; a fenced one is delivered again

        pending = Pending(lines.Commit(((place, offset),), is_again=True).encode(), now)
        pending.then(answered)
        self.ask("commit", pending)
        return pending

    def nack(self, request: lines.Nack, now: float) -> Pending:
        """Request that the broker takes a message back."""
        if owned := self.holdings.owned.get(request.place):
            owned.again.discard(request.offset)
        pending = Pending(request.encode(), now)
        self.ask("nack", pending)
        return pending

    def hand_out(self, offsets: Iterable[tuple[Owned, int]], now: float) -> None:
        """Tell the broker that the application gets messages of these partitions, up to at least these next offsets."""
        if not (self.is_managed and self._says_hand_outs):
            for owned, _ in offsets:
                owned.handed_out = _ALL
            return
        if self.phase is not Phase.READING:
            return
        unsaid = [(owned, offset) for owned, offset in offsets if offset > owned.handed_out]
        if unsaid:
            is_quick = now - self._handed_out_at < _QUICK_S
            self._ahead, self._handed_out_at = min(2 * self._ahead + 1, _MOST_AHEAD) if is_quick else 0, now
            for owned, offset in unsaid:
                owned.handed_out = offset + self._ahead
            pairs = tuple((owned.place, owned.handed_out) for owned, _ in unsaid)
            for some in fitting(pairs, lambda part: lines.Given(part).encode()):
                self.requests.write(lines.Given(some).encode(), now)

    def beat(self, now: float) -> None:
        """Send a sign of life of the member, if that is due."""
        is_due = now - self.requests.written_at >= self.options.session_s * _BEAT
        if is_due and self.is_managed and self.phase is not Phase.AWAY:
            self.requests.write(lines.BEAT.encode(), now)

    def revoked(self, event: PartitionEvent, now: float) -> None:
        """Give up these partitions, as the broker has requested."""
        self.holdings.surrender(event.places)
        if self.phase is Phase.READING and event.connection == self.connections:
            self.requests.write(lines.REVOKED.encode(), now)

    def leave(self, now: float) -> None:
        """Leave the group. The caller closes the connection as soon as the request is written."""
        if self.phase is not Phase.AWAY and self.is_managed:
            self.requests.write(lines.LEAVE.encode(), now)

    # --- replies -----------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process replies. Raises Refused if the connection must be replaced, or if the consumer has `failed`."""
        now = time.monotonic()
        try:
            for reply, body in self._decoder.feed(data):
                self._received(reply, body, now)
        except BadLine as err:
            raise Refused(f"protocol the broker's reply does not fit: {err}") from None

    def _received(self, reply: replies.Reply, body: bytes, now: float) -> None:
        """Process a reply. Raises BadLine if it does not fit, Refused if it ends the connection."""
        requests = self.requests
        if isinstance(reply, replies.Batch):
            self._batch(reply, body)
        elif isinstance(reply, replies.Assigned):
            self._assigned(reply, now)
        elif isinstance(reply, replies.Revoke):
            self.holdings.revoke(reply.partitions, self.connections)
        elif isinstance(reply, replies.Sought):
            self._sought(reply)
        elif isinstance(reply, replies.Committed):
            self._committed(requests.answered("commit"), now)
        elif isinstance(reply, replies.OffsetsReply):
            requests.answered("offsets").finish(reply.rows)
        elif isinstance(reply, replies.Nacked):
            requests.answered("nack").finish(reply)
        elif isinstance(reply, replies.Failed):
            self._refused(reply, now)
        else:
            raise BadLine(f"{reply}: belongs to another protocol")

    def _batch(self, batch: replies.Batch, body: bytes) -> None:
        self.fetch_until, self.is_dry = None, batch.place is None
        if batch.place is not None and batch.deliveries:
            self.holdings.deliver_again(batch.place, batch.offset, batch.deliveries, body)
        elif batch.place is not None:
            if batch.overtaken:
                overtaken, group = self.holdings.overtaken, self.options.group_id
                overtaken[batch.place] = overtaken.get(batch.place, 0) + batch.overtaken
                text = "%s: %d messages were deleted before group %s had read them"
                logger().warning(text, batch.place, batch.overtaken, group)
            self.holdings.deliver(batch.place, batch.offset, batch.lines, body)

    def _assigned(self, assigned: replies.Assigned, now: float) -> None:
        holdings, offsets = self.holdings, dict(assigned.offsets)
        is_first = self.phase is Phase.JOINING
        if is_first:
            self.phase = Phase.READING
            if self.is_outage_logged:
                self.is_outage_logged = False
                logger().warning("connected again, after %.0f s", now - self.away_since)
            if self.is_managed:
                is_late, sent = now >= self.expires_at, self.requests.pending_commits()
                holdings.lose([p for p, owned in holdings.owned.items() if is_late or not owned.is_at(offsets, sent)])
        holdings.lose(place for place, owned in holdings.owned.items() if place not in offsets and not owned.revoked)
        if is_first and self.is_managed:
            self.requests.fence(holdings.owned)
        stay = {place: owned for place, owned in holdings.owned.items() if place in offsets and not owned.revoked}
        for place, owned in stay.items():
            if is_first and not self.is_managed:
                owned.position = offsets[place]  # as the opening named it, unless retention has moved it
            if is_first:
                owned.stale = owned.position != offsets[place]
        if is_first:
            for owned in stay.values():
                owned.handed_out = 0
            self.hand_out([(owned, owned.position) for owned in stay.values() if owned.position > owned.committed], now)
        new = {place: offset for place, offset in offsets.items() if place not in stay}
        holdings.grant(new)
        if not self.is_managed:
            hidden = [place for place in new if (self.ends or {}).get(place, 0) is None]
            for place in hidden:
                holdings.owned[place].start = self.wanted.get(place)
        self.generation, self.wanted = assigned.generation, {}
        if is_first:
            self.requests.write_again(now)
        if self.is_managed and self.start != EARLIEST:
            for place in new:
                holdings.owned[place].is_placed = False
            self._begin_at_start(now)

    def _begin_at_start(self, now: float) -> None:
        """Begin at the option `start` in partitions of which the group has committed nothing."""
        waiting = [
            owned
            for owned in self.holdings.owned.values()
            if not (owned.is_placed or owned.is_starting or owned.revoked or owned.moving or owned.is_damaged)
        ]
        if waiting:
            self._find_start(waiting, now)

    def _find_start(self, waiting: list[Owned], now: float) -> None:
        for owned in waiting:
            owned.is_starting = True

        def answered(pending: Pending) -> None:
            rows = pending.value if isinstance(pending.value, tuple) else ()
            has_committed = {row.place: row.committed is not None for row in rows}
            fresh: list[Owned] = []
            for owned in waiting:
                is_asked = owned.is_starting and not owned.revoked and owned.place in has_committed
                if is_asked and not has_committed[owned.place] and not owned.is_placed and not owned.moving:
                    fresh.append(owned)
                    continue
                if is_asked and not owned.is_placed:
                    owned.is_placed = True
                    owned.stale |= not owned.moving  # a batch may have arrived meanwhile, and was dropped
                owned.is_starting = False
            self._begin(fresh, now)
            if any(owned.revoked for owned in waiting):
                self._begin_at_start(now)  # refused, because one of the partitions had just been revoked
            elif isinstance(pending.error, Refused):
                self._report(pending.error, waiting[0] if len(waiting) == 1 else None)
            elif pending.error is None:
                for owned in waiting:
                    if owned.place not in has_committed:  # damaged: a request for it alone reports how
                        self._find_start([owned], now)

        self.offsets(tuple(owned.place for owned in waiting), now).then(answered)

    def _begin(self, fresh: list[Owned], now: float) -> None:
        """Move these partitions to the option `start`, and commit that. They are read as soon as the commit is
        durable.
        """
        found = dict[Owned, int]()
        missing = len(fresh)

        def committed(pending: Pending) -> None:
            for owned in found:
                owned.is_placed |= pending.error is None
                owned.is_starting = False
            if isinstance(pending.error, Refused):
                self.fetch_from = time.monotonic() + _PAUSE_S
                if not find(pending.error.code).is_retryable and not any(owned.revoked for owned in found):
                    self.errors.append(pending.error)

        def sought(owned: Owned, pending: Pending) -> None:
            nonlocal missing
            missing -= 1
            if isinstance(pending.value, int) and not owned.revoked:
                found[owned] = pending.value
            else:
                owned.is_starting = False
                if isinstance(pending.error, Refused) and pending.error.code == "out_of_range" and self.ends:
                    self.ends.pop(owned.place, None)  # the topic was deleted and created again meanwhile
            if not missing and found:
                self.commit([(owned.place, at) for owned, at in found.items()], now).then(committed)

        for owned in fresh:
            self.move(owned, self.start_of(owned.place), now).then(partial(sought, owned))

    def _sought(self, sought: replies.Sought) -> None:
        pending = self.requests.answered("seek")
        owned = pending.value
        if not isinstance(owned, Owned) or sought.place != owned.place:
            raise BadLine(f"{sought.place}: another partition was sought")
        owned.moving -= 1
        self.is_dry = False
        if not owned.moving and not owned.stale:
            owned.position = sought.offset
        owned.is_placed |= pending.callback is None  # with a callback it is the start, which must be committed first
        pending.finish(sought.offset)

    def _committed(self, pending: Pending, now: float, error: Refused | None = None) -> None:
        for place, offset in pending.offsets if error is None else ():
            if owned := self.holdings.owned.get(place):
                owned.committed = offset
        pending.finish(error=error)
        if waiting := self.requests.take_next_commit(now):
            self.ask("commit", *commit_parts(waiting))

    def _refused(self, failed: replies.Failed, now: float) -> None:
        reason = f"{failed.code} {failed.text}".rstrip()
        refused = Fenced(reason) if failed.code == "fenced" else Refused(reason)
        if not failed.request:
            self._ended(refused)
        elif failed.request == "fetch":
            self.fetch_until = None
            if find(refused.code).is_retryable:
                self.fetch_from = now + _PAUSE_S
            elif not any(owned.revoked for owned in self.fetched):  # else the fetch crossed with the revocation
                self._report(refused, self.holdings.owned.get(failed.place) if failed.place else None)
        elif failed.request == "commit":
            self._committed(self.requests.answered("commit"), now, refused)
        else:
            pending = self.requests.answered(failed.request)
            if isinstance(pending.value, Owned):
                pending.value.moving -= 1
                if not pending.value.moving:  # else a later pending seek decides
                    pending.value.stale = True
                if not pending.value.revoked:  # else the request crossed with the revocation
                    self._report(refused, pending.value)
            pending.finish(error=refused)

    def _report(self, refused: Refused, owned: Owned | None) -> None:
        """Raise a refusal in the application's next call. A damaged partition only pauses, because the others can be
        read.
        """
        if owned is None or refused.code != "damaged":
            self.errors.append(refused)
        elif not owned.is_damaged:
            owned.is_damaged = True
            logger().error("paused, and others go on: %s", refused)

    def _ended(self, refused: Refused) -> None:
        """Process an error that ends the connection. Raises Refused."""
        meaning = find(refused.code)
        if refused.code == "bad_request" and refused.reason.startswith("bad_request 'more': unknown option"):
            text = "the broker is too old for so many names: it takes only what fits into one line of 64 KiB"
            refused = Refused(f"bad_request {text}")
        if refused.code == "bad_request" and refused.reason.startswith("bad_request 'attempt="):
            self._attempt = None  # the broker is older; the next opening omits it
            raise refused
        if refused.code == "bad_request" and refused.reason.startswith("bad_request 'given="):
            self._says_hand_outs = False  # the broker is older
            raise refused
        if refused.code == "bad_request" and refused.reason.startswith("bad_request 'overtaken="):
            self._hears_overtaken = False  # the broker is older
            raise refused
        # An error that this client does not know is no end for a member: it was admitted before, so it joins again.
        is_known = meaning.code == refused.code or self.phase is Phase.JOINING
        if refused.code in REJOIN:
            self.holdings.lose(tuple(self.holdings.owned))
        elif refused.code == "bad_request" and self.requests.is_pending("nack"):
            too_old = Refused("bad_request the broker is too old for this client, and takes no message back")
            self.requests.fail(too_old, "nack")
        elif is_known and not meaning.is_retryable:
            refused.exit_code = meaning.exit_code
            self.fail(refused)
        raise refused


__all__ = ["ANSWER_S", "ConsumerCore", "Phase"]
