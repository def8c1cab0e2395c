"""Group members that poll, as over HTTP: their cursors, and which answers have reached them.

    member = await pollers.member(group, name, topics…)          joins if it is not a member (any more)
    async with member.lock: …                                    its cursors, in the order of their turns

Positions   A call continues where the last one ended. A partition that is new to the member begins at the committed
            offset. Messages that a member was given and did not commit are delivered again when its session has ended,
            or when it joins again: then its program was killed, and another program has its name.
Lost        An answer that has not arrived is given again by the next call. While its arrival is unknown, later calls
            continue after it. When a commit passes its messages, they will be delivered again (deliveries.Answers).
            autoCommit commits only messages that have arrived.
Revoke      A member that calls again is done with earlier messages, so it then gives up what was revoked. Until then it
            may commit. A call that waits without a message gives up at once.
Invariant   A member's cursors are of partitions that it was assigned and has not been asked to give up.
Memory      One object for each member that the coordinator knows and that joined here; it goes with the member.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Cursor, Fetching
from kmq.gateway.groups.deliveries import Answer
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import MAX_NACKS
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.protocol import Assigned, Client, Ended, Event, MemberOptions, Revoke
from kmq.gateway.groups.reader import Reader
from kmq.gateway.groups.redelivery import Redelivery
from kmq.wire.requests import TopicPartition

_JOIN_S = 3.0  # how long a call waits for its first assignment, on top of its own wait
_LOST = ("unknown_member", "fenced")


class Move(NamedTuple):
    """What one call read of a partition: its cursor moved from `start` to `end`. `overtaken`: as in its answer."""

    place: TopicPartition
    cursor: Cursor
    start: int
    end: int
    overtaken: range


class Poller:
    """A member that polls. `generation` and `assigned` are what it was told last."""

    def __init__(self, groups: Groups, reader: Reader) -> None:
        self._groups, self.reader, self.group = groups, reader, reader.group
        self.topics: set[str] = set()
        self.generation = 0
        self.assigned: list[TopicPartition] = []
        self.delivered: dict[TopicPartition, int] = {}  # arrived with autoCommit: the next call commits it
        self.ended = ""  # the code with which the coordinator ended it
        self.lock = asyncio.Lock()
        self.watchers: set[asyncio.Event] = set()  # of waiting calls: set by each event of the coordinator
        self._has_assignment = asyncio.Event()
        self._revoking = False

    @property
    def id(self) -> str:
        return self.reader.member

    def on_event(self, event: Event) -> None:
        """Handle an event of the coordinator."""
        if isinstance(event, Ended):
            self.ended = event.code
            self._has_assignment.set()
        elif isinstance(event, Revoke):
            self._revoking = True
            gone = set(event.partitions)
            self.assigned = [place for place in self.assigned if place not in gone]
        elif isinstance(event, Assigned):
            self.generation = event.generation
            self.assigned = [*event.partitions]
            self._has_assignment.set()
        for watcher in self.watchers:
            watcher.set()

    def begin_anew(self) -> None:
        """Begin at the committed offsets again: the member's program is new, and lacks its predecessor's messages."""
        self._groups.deliveries.died(self.group, self.id, self._groups.committed(self.group))
        self.reader.cursors.clear()
        self.delivered.clear()

    async def first_assignment(self, wait_s: float) -> None:
        """Wait for the first assignment, as long as that takes or `wait_s`."""
        try:
            async with asyncio.timeout(wait_s + _JOIN_S):
                await self._has_assignment.wait()
        except TimeoutError:
            pass

    async def finish_calls(self) -> None:
        """Commit as the member's last calls asked, and give up revoked partitions: the member is done with both."""
        await self.commit_delivered()
        self.answer()

    def beat(self, generation: int) -> None:
        """Note a sign of life from a client in `generation`. If that is the newest, it has given up what was revoked.

        Raises RequestRefused (unknown_member, fenced).
        """
        if generation == self.generation:
            self.answer()
        else:
            self._groups.beat(self.group, self.id, generation=generation)

    def answer(self) -> None:
        """Tell the coordinator that the member knows its assignment, and has stopped reading what was revoked."""
        self.reader.revoke([place for place in self.reader.cursors if place not in self.assigned])
        if self._revoking:
            self._revoking = False
            self._groups.revoked(self.group, self.id)
        else:
            self._groups.sync(self.group, self.id)

    async def commit_delivered(self) -> None:
        """Commit what was delivered with autoCommit, except in partitions that belong to another member now."""
        rows, self.delivered = self.delivered, {}
        committed = self._groups.committed(self.group)
        for place, offset in rows.items():
            least = committed[place].offset if place in committed else 0  # answers may arrive in any order
            try:
                await self._groups.commit(self.group, self.id, {place: OffsetCommit(max(offset, least))})
            except RequestRefused as err:
                if err.code not in (*_LOST, "unknown_partition", "out_of_range"):
                    raise

    def sent(self, moves: list[Move], answer: Answer, auto_commit: bool = False) -> Callable[[bool], None]:
        """Note that an answer is sent. The caller calls what this returns once it is known whether it has arrived."""
        answers = self._groups.deliveries.answers
        answers.send(self.group, self.id, answer)
        for move in moves:
            move.cursor.overtaken = range(0)

        def settle(has_arrived: bool) -> None:
            if not answers.has(self.group, self.id, answer):
                return  # the member began anew
            if not has_arrived:
                return self._requeue(moves, answer)
            answers.end(self.group, self.id, answer)
            if answer.rows:
                self._groups.in_background(self._forget(answer))
            for move in moves if auto_commit else ():
                self.delivered[move.place] = max(move.end, self.delivered.get(move.place, 0))

        return settle

    async def _forget(self, answer: Answer) -> None:
        """Forget rows made when a commit passed an answer that has now arrived, unless delivered meanwhile."""
        with suppress(RequestRefused):  # otherwise they are delivered again
            for place, offsets in answer.rows.items():
                nacks = self._groups.store.nacks(self.group, *place)
                unsent = [offset for offset in offsets if offset in nacks and not nacks[offset].deliveries]
                await self._groups.forget(self.group, place, unsent)

    def rewind(self, cursors: Mapping[TopicPartition, Cursor]) -> None:
        """Move cursors back where more messages are on the way than there is room for rows."""
        committed, store = self._groups.committed(self.group), self._groups.store
        for place, cursor in cursors.items():
            room = MAX_NACKS - len(store.nacks(self.group, *place))
            done = committed[place].offset if place in committed else 0
            first = self._groups.deliveries.answers.first_on_the_way(self.group, self.id, place, done, room)
            if first is not None:
                cursor.move(min(first, cursor.offset))

    def _requeue(self, moves: Iterable[Move], answer: Answer) -> None:
        """Note that an answer is lost. The next call gets its messages, unless later calls have continued after it."""
        answer.is_lost = True
        committed = self._groups.committed(self.group)
        for place, cursor, start, end, overtaken in moves:
            if cursor.offset == end:
                cursor.overtaken = overtaken
                # Messages before the committed offset have rows already, or will get them.
                done = committed[place].offset if place in committed else 0
                cursor.offset, cursor.seen = min(max(start, done), end), None
                if not answer.is_passed:  # otherwise a later answer has shown its end, which may be committed
                    answer.new.pop(place, None)
        for at, offset in answer.again:
            self._groups.deliveries.give_back(self.group, at, offset)
        answer.again.clear()
        if not any(answer.new.values()):
            self._groups.deliveries.answers.end(self.group, self.id, answer)
        self._groups.wake(self.group)

    def close(self, topic: str) -> None:
        """Forget the cursors of a deleted topic: a new topic may have its name now."""
        self.reader.revoke([place for place in self.reader.cursors if place.topic == topic])
        self.delivered = {place: offset for place, offset in self.delivered.items() if place.topic != topic}

    async def turn(self, topic: str) -> list[Cursor]:
        """Return the cursors of a topic's partitions in the order of their turns; the next turn begins elsewhere.

        The member asks for messages, which is a sign of life. Raises RequestRefused (unknown_member).
        """
        self._groups.beat(self.group, self.id, polled=True)
        cursors = self.reader.cursors
        new = [(place, None) for place in self.assigned if place.topic == topic and place not in cursors]
        cursors |= await self.reader.open(new, {}, may_be_gone=True, is_shown=False)
        turn = [cursor for place, cursor in cursors.items() if place.topic == topic and place in self.assigned]  # still
        if turn:
            self.reader.pass_turn(turn[0])
        return turn


class Pollers:
    """The members that joined by polling."""

    def __init__(self, groups: Groups, fetching: Fetching, redelivery: Redelivery) -> None:
        self._groups, self._fetching, self._redelivery = groups, fetching, redelivery
        self._members: dict[tuple[str, str], Poller] = {}
        self._joining = asyncio.Lock()

    def find(self, group: str, member: str) -> Poller:
        """Return a member. Raises RequestRefused (unknown_member)."""
        found = self._members.get((group, member))
        if found is None or found.ended:
            raise RequestRefused("unknown_member", f"group {group} has no member {member}; join again")
        return found

    async def member(
        self,
        group: str,
        name: str | None,
        client: Client,
        topics: Iterable[str],
        options: Callable[[MemberOptions], MemberOptions],
    ) -> Poller:
        """Return the member of this name, joined to these topics, and to its earlier ones if `options` keep them.

        `name` None: a new member. `options` changes the options that a consume call asks for.
        """
        wanted = set(topics)
        async with self._joining:
            existing = self._members.get((group, name or ""))
            wish = options(MemberOptions(tuple(sorted(wanted)), keeps_topics=True))
            if existing is not None and not existing.ended and wish.keeps_topics and wanted <= existing.topics:
                return existing
            if existing is not None and not existing.ended:
                poller = existing
            else:
                reader = Reader(self._fetching, self._groups, self._redelivery, group, name or "")
                poller = Poller(self._groups, reader)

            def on_event(event: Event) -> None:
                poller.on_event(event)
                if isinstance(event, Ended) and self._members.get((group, poller.id)) is poller:
                    del self._members[group, poller.id]

            poller.reader.member = await self._groups.join(group, name, client, wish, on_event)
            poller.ended = ""
            poller.topics = poller.topics | wanted if wish.keeps_topics else wanted
            self._members[group, poller.id] = poller
            return poller

    def given_back(self, group: str, place: TopicPartition) -> None:
        """Note that a message was given back, which is a sign of life of the member that reads there."""
        for (name, id), poller in list(self._members.items()):
            if name == group and not poller.ended and place in poller.assigned:
                with suppress(RequestRefused):  # its session ends at this moment
                    self._groups.beat(group, id)

    async def leave(self, group: str, member: str) -> None:
        """End a member after committing what its calls asked to commit. Raises RequestRefused (unknown_member)."""
        found = self._members.get((group, member))
        if found is not None and not found.ended:
            await found.commit_delivered()
        self._groups.leave(group, member)
        self._members.pop((group, member), None)
