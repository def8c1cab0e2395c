"""The state of a consumer: its position in each partition, waiting records, and requests without a reply.

    `!batch` for orders/0 with offsets 23 to 32  →  Chunk  →  10 messages for the application, then position = 33

Invariant   A position only rises past a record that was handed to the application, unless the application seeks.
            Every request gets exactly one outcome; requests of one kind get theirs in the order of sending.
Memory      `Holdings.has_room` is False while a whole batch waits. So at most two batches are kept, with their
            messages. A batch is as large as the client has requested, or one record. At most _MOST_COMMITS commits are
            pending; later ones are joined into one that waits. A reply line has at most MAX_REPLY bytes.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from kmq.errors import KmqError
from kmq.message.message import Message, RedeliveredMessage, each_message
from kmq.sending.failures import Fenced
from kmq.wire import replies
from kmq.wire.requests import MAX_REPLY, MAX_REQUEST, Assign, BadLine, Commit, Fetch, Group, Position, TopicPartition


class Owned:
    """A partition that this consumer reads. `position`: the next offset for the application."""

    __slots__ = (
        "again",
        "committed",
        "handed_out",
        "is_damaged",
        "is_placed",
        "is_starting",
        "moving",
        "paused",
        "place",
        "position",
        "put_by",
        "revoked",
        "stale",
        "start",
    )

    def __init__(self, place: TopicPartition, position: int) -> None:
        self.place, self.position = place, position
        self.start: Position | None = None  # where to begin, if damage hides the offset of that place
        self.committed = position  # the group's offset when it was assigned, or this member's last commit since
        self.handed_out = 0  # from this offset on the broker does not know that the application has the messages
        self.moving = 0  # pending requests that move the broker's read position
        self.stale = False  # the broker reads elsewhere than at `position`
        self.is_placed = True  # `position` is known; else the option `start` may have to resolve it
        self.is_starting = False  # the option `start` is being resolved and committed
        self.paused = self.revoked = False
        self.is_damaged = False  # at `position`: not requested until resume, a seek, or the next connection
        # Redelivered messages: those that the application has and did not commit. `put_by` keeps those that wait
        # because the
        # partition is paused.
        self.again: set[int] = set()
        self.put_by: list[Chunk] = []

    @property
    def next(self) -> Position:
        """Return where the broker has to continue: at `start` as long as no record has been handed out."""
        is_at_start = self.start is not None and self.position == self.committed
        return self.start if is_at_start and self.start else Position("offset", self.position)

    @property
    def is_settled(self) -> bool:
        """Return True if the next batch of this partition begins at `position`, or after the records that wait here."""
        return not self.moving and not self.stale and self.is_placed

    @property
    def is_known(self) -> bool:
        """Return True unless `position` depends on a pending reply."""
        return not self.moving and self.is_placed

    def is_at(self, offsets: Mapping[TopicPartition, int], sent: Container[tuple[TopicPartition, int]]) -> bool:
        """Return True if the group's offset is the one that this member has committed, or is in `sent`."""
        at = offsets.get(self.place, self.committed)
        return at == self.committed or (self.place, at) in sent

    @property
    def is_wanted(self) -> bool:
        return self.is_settled and not self.paused and not self.revoked and not self.is_damaged


class Chunk:
    """A batch that waits for the application. `unread` is one shared iterator: it yields each message once, and ends on
    drop.

    `deliveries`: this is one redelivered message and its number of deliveries; 0: new messages, which move the
    position.
    """

    __slots__ = (
        "_body",
        "_lines",
        "_offset",
        "_unread",
        "deliveries",
        "end",
        "is_dropped",
        "nbytes",
        "owned",
    )

    def __init__(self, owned: Owned, offset: int, lines: int, body: bytes, deliveries: int = 0) -> None:
        self.owned, self.end, self.nbytes = owned, offset + lines, len(body)
        self._offset, self._body = offset, body
        self.deliveries = deliveries
        self._lines: list[bytes] = []
        self._unread: Iterator[Message] | None = None
        self.is_dropped = False

    @property
    def unread(self) -> Iterator[Message]:
        if self._unread is None:
            self._lines, self._body = self._body.split(b"\n")[:-1], b""
            place = self.owned.place
            if self.deliveries:
                line = self._lines[0]
                deliveries = max(2, self.deliveries)  # at least 2: it is a redelivery
                again = RedeliveredMessage(place.topic, place.partition, self._offset, line, deliveries)
                self._unread = iter([again])
                self.owned.again.add(self._offset)
            else:
                self._unread = each_message(place.topic, place.partition, self._offset, self._lines)
        return self._unread

    def take(self, count: int) -> list[Message]:
        """Return up to `count` messages, and move the position past them."""
        taken = list(islice(self.unread, count))
        if not self.is_dropped and not self.deliveries:
            self.owned.position = taken[-1].offset + 1 if len(taken) == count else self.end
        return taken

    def drop(self) -> None:
        """Hand out nothing more: a loop over `unread` ends."""
        self.is_dropped, self._body = True, b""
        self._lines.clear()


class Kind(Enum):
    """What has happened to partitions."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"  # to be given up; they belong to this consumer until `Holdings.surrender`
    LOST = "lost"  # they belong to another member already, or may do so


class PartitionEvent(NamedTuple):
    """An event for the application's thread. `connection`: the number of the connection that it belongs to."""

    kind: Kind
    places: tuple[TopicPartition, ...]
    connection: int = 0


class Holdings:
    """The partitions that are read, their waiting records, and events that the application has not seen yet."""

    def __init__(self, most_bytes: int) -> None:
        self.owned: dict[TopicPartition, Owned] = {}
        self.chunks: deque[Chunk] = deque()  # they wait for the application, in the order of arrival
        self._bytes, self._most = 0, most_bytes
        self.events: deque[PartitionEvent] = deque()
        self.moved: set[Owned] = set()  # partitions whose position the last `collect` moved
        self.overtaken: dict[TopicPartition, int] = {}  # messages that were deleted before the group had read them

    def grant(self, offsets: dict[TopicPartition, int]) -> None:
        """Add these partitions to those that are read."""
        for place, offset in offsets.items():
            self.owned[place] = Owned(place, offset)
        if offsets:
            self.events.append(PartitionEvent(Kind.ASSIGNED, tuple(offsets)))

    def lose(self, places: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions at once: they are no longer this consumer's."""
        gone = tuple(places)
        self._forget(gone)
        if gone:
            self.events.append(PartitionEvent(Kind.LOST, gone))

    def have_left(self, places: Iterable[TopicPartition]) -> bool:
        """Return True if a loss of one of these, or a revocation and new assignment, was not reported to the
        application yet.
        """
        wanted, revoked = set(places), set[TopicPartition]()
        for event in self.events:
            found = wanted.intersection(event.places)
            if found and (event.kind is Kind.LOST or (event.kind is Kind.ASSIGNED and found & revoked)):
                return True
            if event.kind is Kind.REVOKED:
                revoked |= found
        return False

    def revoke(self, places: Iterable[TopicPartition], connection: int) -> None:
        """Hand out no more records of these partitions, and tell the application to give them up."""
        mine = tuple(place for place in places if place in self.owned)
        for place in mine:
            self.owned[place].revoked = True
        self._drop(lambda chunk: chunk.owned.revoked)
        self.events.append(PartitionEvent(Kind.REVOKED, mine, connection))

    def surrender(self, places: Iterable[TopicPartition]) -> None:
        """Remove revoked partitions, because the application has given them up."""
        self._forget(tuple(place for place in places if place in self.owned and self.owned[place].revoked))

    def _forget(self, places: tuple[TopicPartition, ...]) -> None:
        for place in places:
            self.owned.pop(place).revoked = True
        self._drop(lambda chunk: chunk.owned.revoked)

    def deliver(self, place: TopicPartition, offset: int, lines: int, body: bytes) -> None:
        """Keep a batch for the application, unless it is not wanted any more."""
        owned = self.owned.get(place)
        if owned is not None and owned.is_wanted:
            self._add(Chunk(owned, offset, lines, body))
        elif owned is not None and not owned.moving and not owned.is_starting:
            owned.stale = True

    def deliver_again(self, place: TopicPartition, offset: int, deliveries: int, body: bytes) -> None:
        """Keep a redelivered message. It does not change where the partition is read next."""
        owned = self.owned.get(place)
        if owned is None or owned.revoked:
            return  # the partition's next owner gets it
        chunk = Chunk(owned, offset, 1, body, deliveries)
        if owned.paused:
            owned.put_by.append(chunk)
        else:
            self._add(chunk)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        """Hand out no records of these partitions until `resume`. Raises KeyError for a partition that is not owned."""
        for place in places:
            self.owned[place].paused = True
        for chunk in self._remove(lambda chunk: chunk.owned.paused and bool(chunk.deliveries)):
            chunk.owned.put_by.append(chunk)
        self._drop(lambda chunk: chunk.owned.paused)

    def drop_new(self, owned: Owned) -> None:
        """Drop the waiting new messages of a partition: a seek fetches them again. It would not fetch redelivered
        ones.
        """
        self._drop(lambda chunk: chunk.owned is owned and not chunk.deliveries)

    def resume(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            owned = self.owned[place]
            if owned.is_damaged:  # a seek to the position lets the broker check the files again
                self.drop_new(owned)
                owned.stale = True
            owned.paused = owned.is_damaged = False
            for chunk in owned.put_by:
                self._add(chunk)
            owned.put_by.clear()

    def disconnected(self) -> None:
        """Drop all waiting records: the next connection reads from the positions on."""
        self._drop()
        for owned in self.owned.values():
            owned.moving, owned.stale, owned.is_starting, owned.is_damaged = 0, True, False, False
            owned.put_by.clear()
            owned.again.clear()  # the broker delivers them again

    # --- what waits for the application ------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self._bytes <= self._most

    def _add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._bytes += chunk.nbytes

    def finish(self, chunk: Chunk) -> None:
        """Remove the first chunk when all of it was handed out."""
        if self.chunks and self.chunks[0] is chunk:
            self.chunks.popleft()
            self._bytes -= chunk.nbytes
            if not chunk.deliveries:
                chunk.owned.position = chunk.end

    def _drop(self, which: Callable[[Chunk], bool] = lambda _: True) -> None:
        """Drop some chunks. Their partitions are read again from their positions."""
        for chunk in self._remove(which):
            chunk.owned.stale |= not chunk.deliveries
            chunk.drop()

    def _remove(self, which: Callable[[Chunk], bool]) -> list[Chunk]:
        """Remove some chunks without dropping their messages."""
        gone = [chunk for chunk in self.chunks if which(chunk)]
        self.chunks = deque(chunk for chunk in self.chunks if not which(chunk))
        self._bytes -= sum(chunk.nbytes for chunk in gone)
        return gone

    def collect(self, count: int) -> list[Message]:
        """Return up to `count` messages, and move the positions past them. `moved` then has the partitions that
        moved.
        """
        taken: list[Message] = []
        self.moved = set()
        while self.chunks and len(taken) < count:
            chunk = self.chunks[0]
            taken += chunk.take(count - len(taken))
            if not chunk.deliveries:
                self.moved.add(chunk.owned)
            if len(taken) < count:
                self.finish(chunk)
        return taken


# --- requests, and the stream of replies -----------------------------------------------------------------------------

Item = TypeVar("Item")

_MOST_COMMITS = 8  # pending; later commits wait, joined into one


class Pending:
    """A request without a reply yet. `value` is the reply, once `done` and without `error`."""

    __slots__ = ("callback", "done", "error", "line", "offsets", "since", "value")

    def __init__(self, line: bytes, since: float, offsets: tuple[tuple[TopicPartition, int], ...] = ()) -> None:
        self.line, self.since, self.offsets = line, since, offsets
        self.done = False
        self.error: KmqError | None = None
        self.value: object = None
        self.callback: Callable[[Pending], object] | None = None

    def then(self, callback: "Callable[[Pending], object]") -> None:
        """Call back when it is done, after the callbacks that were added before."""
        before = self.callback
        self.callback = callback if before is None else lambda pending: (before(pending), callback(pending))

    def finish(self, value: object = None, error: KmqError | None = None) -> None:
        self.value, self.error, self.done = value, error, True
        if self.callback is not None:
            self.callback(self)


def split(whole: Pending, items: tuple[Item, ...], ask: Callable[[tuple[Item, ...]], Pending]) -> list[Pending]:
    """Return the requests that cover `items`: several if one line would be over MAX_REQUEST bytes.

    `whole` is done as soon as all of them are: with the first error, or with the rows of all replies.
    """
    if len(whole.line) <= MAX_REQUEST:
        return [whole]
    return joined(whole, [ask(part) for part in fitting(items, lambda some: ask(some).line)])


def joined(whole: Pending, parts: list[Pending]) -> list[Pending]:
    """Let `whole` be done as soon as all its parts are: with the first error, or with the rows of all replies."""
    missing, rows, error = len(parts), list[object](), None

    def answered(part: Pending) -> None:
        nonlocal missing, error
        missing, error = missing - 1, error or part.error
        rows.extend(part.value if isinstance(part.value, tuple) else ())
        if not missing:
            whole.finish(tuple(rows), error)

    for part in parts:
        if part.done:
            answered(part)
        else:
            part.then(answered)
    return parts


def fitting(items: tuple[Item, ...], encode: Callable[[tuple[Item, ...]], bytes]) -> Iterator[tuple[Item, ...]]:
    """Yield the items in order, in parts whose lines the broker accepts."""
    if len(items) < 2 or len(encode(items)) <= MAX_REQUEST:
        yield items
        return
    half = len(items) // 2
    yield from fitting(items[:half], encode)
    yield from fitting(items[half:], encode)


def opening_of(request: Group | Assign) -> bytes:
    """Return the first lines of a connection: several if one would be over MAX_REQUEST bytes."""

    def line_of(some: tuple[Any, ...], more: bool = True) -> bytes:
        if isinstance(request, Group):
            return request._replace(topics=some, more=more).encode()
        return request._replace(partitions=some, more=more).encode()

    names: tuple[Any, ...] = request.topics if isinstance(request, Group) else request.partitions
    *others, last = fitting(names, line_of)
    return b"".join([*map(line_of, others), line_of(last, more=False)])


def nameable(wanted: tuple[TopicPartition, ...], last: TopicPartition | None) -> tuple[TopicPartition, ...]:
    """Return as many partitions as one `!fetch` can name, beginning after `last`, the last one that was named."""
    at = wanted.index(last) + 1 if last in wanted else 0
    return next(fitting((*wanted[at:], *wanted[:at]), lambda some: Fetch(1 << 62, 99_999, some).encode()))


def commit_parts(whole: Pending) -> list[Pending]:
    """Return the requests that make up a commit."""
    return split(whole, whole.offsets, lambda some: _commit_of(some, whole.since))


def _commit_of(pairs: tuple[tuple[TopicPartition, int], ...], now: float) -> Pending:
    return Pending(Commit(pairs).encode(), now, pairs)


class PendingRequests:
    """Output not yet written, and requests without a reply: `seek`, `offsets`, `commit` and `nack`, each kind in
    order.
    """

    def __init__(self, session_s: float) -> None:
        self.written_at = 0.0  # when the last request was made; each request counts as a beat
        self.was_silent = False  # this connection was silent for so long that the broker has ended the member
        self._session_s = session_s
        self._out: list[bytes] = []
        self._pending: dict[str, deque[Pending]] = {name: deque() for name in ("seek", "offsets", "commit", "nack")}
        self.next_commit: Pending | None = None  # waits until a pending commit has its reply

    def connected(self, now: float) -> None:
        """Note that a connection was opened."""
        self.written_at, self.was_silent = now, False

    def write(self, line: bytes, now: float) -> None:
        self._out.append(line)
        self.was_silent = self.was_silent or now - self.written_at >= self._session_s
        self.written_at = now

    @property
    def expires_at(self) -> float:
        """When the broker ends the member for its silence, or 0 if it may have done so already."""
        return 0.0 if self.was_silent else self.written_at + self._session_s

    def take(self) -> bytes:
        """Return the bytes to write now."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def expect(self, name: str, pending: Pending) -> Pending:
        self._pending[name].append(pending)
        return pending

    def commit(self, offsets: dict[TopicPartition, int], now: float) -> Pending | None:
        """Return a commit to send, or None if it was joined to the waiting commit, `next_commit`."""
        if len(self._pending["commit"]) < _MOST_COMMITS:
            return _commit_of(tuple(offsets.items()), now)
        joined = dict(self.next_commit.offsets) | offsets if self.next_commit else offsets
        if self.next_commit is None:
            self.next_commit = _commit_of(tuple(joined.items()), now)
        self.next_commit.offsets = tuple(joined.items())
        return None

    def pending_commits(self) -> set[tuple[TopicPartition, int]]:
        """Return the (partition, offset) pairs of commits without a reply."""
        return {pair for pending in self._pending["commit"] for pair in pending.offsets}

    def take_next_commit(self, now: float) -> Pending | None:
        """Return the commit that has waited for the reply to another one, or None."""
        waiting, self.next_commit = self.next_commit, None
        if waiting is not None:
            waiting.line, waiting.since = Commit(waiting.offsets).encode(), now
        return waiting

    def answered(self, name: str) -> Pending:
        """Return the request to which this reply belongs. Raises BadLine if there is none."""
        if not self._pending[name]:
            raise BadLine(f"!{name}: an answer to nothing")
        return self._pending[name].popleft()

    def is_pending(self, name: str) -> bool:
        """Return True while a request of this kind has no reply."""
        return bool(self._pending[name])

    def forget_written(self) -> None:
        """Discard output that was not written, because the connection is gone."""
        self._out.clear()

    def fence(self, owned: Collection[TopicPartition]) -> None:
        """Fail commits for other partitions than these: sent again, they could undo what a later owner has committed."""
        commits = [*self._pending["commit"], *([self.next_commit] if self.next_commit else [])]
        gone = [pending for pending in commits if any(place not in owned for place, _ in pending.offsets)]
        self._pending["commit"] = deque(pending for pending in self._pending["commit"] if pending not in gone)
        if self.next_commit in gone:
            self.next_commit = None
        for pending in gone:
            pending.finish(error=Fenced("fenced another member may have read on meanwhile"))

    def write_again(self, now: float) -> None:
        """Write the requests without a reply again, on a new connection."""
        for requests in self._pending.values():
            for pending in requests:
                pending.since = now
                self.write(pending.line, now)

    def fail(self, error: KmqError, *names: str) -> None:
        """Fail the requests of these kinds; without names, all requests."""
        if not names and (waiting := self.take_next_commit(0.0)) is not None:
            waiting.finish(error=error)
        for name in names or tuple(self._pending):
            requests = self._pending[name]
            while requests:
                requests.popleft().finish(error=error)

    def oldest(self, otherwise: float) -> float:
        """Return when the oldest request without a reply was made."""
        return min((requests[0].since for requests in self._pending.values() if requests), default=otherwise)


class Decoder:
    """Cuts a stream into replies, each with the stored lines that follow it."""

    def __init__(self) -> None:
        self._line = b""  # an unfinished reply
        self._batch: replies.Batch | None = None  # whose lines are arriving
        self._parts: list[bytes] = []
        self._missing = 0

    def feed(self, data: bytes) -> Iterator[tuple[replies.Reply, bytes]]:
        """Yield the replies that are complete now. Raises BadLine for an invalid reply."""
        at = 0
        while at < len(data):
            if self._batch is not None:
                part = data[at : at + self._missing] if at or self._missing < len(data) else data
                self._parts.append(part)
                at += len(part)
                self._missing -= len(part)
                if not self._missing:
                    batch, body = self._batch, b"".join(self._parts)
                    self._batch, self._parts = None, []
                    if body.count(b"\n") != batch.lines or not body.endswith(b"\n"):
                        raise BadLine(f"{batch}: its lines are others")
                    yield batch, body
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            at = end or len(data)
            if len(self._line) > MAX_REPLY:
                raise BadLine("a reply is too long")
            if not end:
                return
            line, self._line = self._line, b""
            reply = replies.reply(line)
            if isinstance(reply, replies.Batch) and reply.nbytes:
                self._batch, self._missing = reply, reply.nbytes
            else:
                yield reply, b""
