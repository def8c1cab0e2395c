"""What a member of a group reads next, by whatever door: its partitions in turn, and first what comes again.

    reader = Reader(files, groups, redelivery, group, member)   one for each member that a door serves
    again, fresh = await reader.turn(cursors, limit, is_idle)   messages that are due, each counted on disk; and the
                                                                partitions whose new messages may follow
    reader.pass_turn(cursor)                                    before a batch is written: is its cursor still in force?
    reader.delivered(cursors)                                   up to where the member was given new messages

Push        streaming.py, for lines and gRPC: the client asks on a stream, and the gateway answers when there is something.
Poll        polling.py, for HTTP: a call is given what is there, or waits for it.
Apart       What a reader had when it died comes again one at a time: as the only message that its reader has. Only
            there a delivery is counted for it, so a message that kills its readers becomes a letter, and the messages
            beside it do not. It is asked for by a reader that is idle: one that has come back from all it was given
            before. Where a topic has no maxDeliveries nobody is put aside, so all of it comes as before.
Invariant   A partition is read from where its former owner has committed: it is opened when the assignment is passed
            on, and the former owner has given it up before. After a revoke no batch of that partition is sent; after
            a seek none from before it is sent. Both put another cursor, or none, in the place of the cursor that is
            being read.
Memory      A cursor for each partition.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol, TypeVar

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Cursor, Limit, Waiter, Waking
from kmq.gateway.core.partitions import Partitions, moment
from kmq.gateway.groups.deliveries import OpenDelivery, is_paused
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import NackRow, Partition
from kmq.gateway.groups.protocol import State
from kmq.gateway.groups.redelivery import DueMessage, NackOutcome, Redelivery
from kmq.log.damage import DamageError
from kmq.message.message import Message
from kmq.wire.refusals import GONE
from kmq.wire.requests import Position, TopicPartition

T = TypeVar("T")
Start = tuple[TopicPartition, Position | None]  # where to begin; None: at the committed offset

_OPENED = 500  # partitions opened in one turn of a thread, which others wait for: some hundred milliseconds
_LOOK_AGAIN_S = 0.5  # until partitions are looked at that had to wait, and a message that could not be delivered
_DIED = "in hand when its consumer died"
_NOTHING: frozenset[int] = frozenset()
_numbers = count(1)


class Files(Protocol):
    """Where a door reads: its threads, what they make of faults, and what wakes who waits for records."""

    partitions: Partitions
    waking: Waking

    async def run(self, work: Callable[..., T], *arguments: object) -> T: ...


class Turn(NamedTuple):
    """What a member is given next: messages that come again, and the partitions whose new messages may follow."""

    again: list[DueMessage]
    fresh: list[Cursor]


# --- reader ----------------------------------------------------------------------------------------------------------


class Reader:
    """What one member reads. `member` None: a client of a group that has no members now. `group` None: of no group."""

    def __init__(
        self,
        files: Files,
        groups: Groups,
        redelivery: Redelivery | None,
        group: str | None,
        member: str | None,
        client: str = "member",
    ) -> None:
        """`redelivery` None: nothing comes again. `client`: what a refusal calls the member."""
        self.files, self.group, self._groups, self._redelivery = files, group or "", groups, redelivery
        self._is_member, self.member = member is not None, member or f"\0{next(_numbers)}"  # no member's name
        self._client = client
        self.cursors: dict[TopicPartition, Cursor] = {}  # in the order of their turns
        self.changed = asyncio.Event()  # set when there is another partition, cursor or message to look at
        self.waiter = Waiter(self.changed)

    def close(self) -> None:
        """Watch nothing more. What a client that is no member had in hand is due again."""
        self.files.waking.forget(self.waiter)
        if not self._is_member:
            self._groups.deliveries.release(self.group, self.member)

    @property
    def redelivery(self) -> Redelivery:
        assert self._redelivery is not None, "a gateway has it"
        return self._redelivery

    # --- the partitions ----------------------------------------------------------------------------------------------

    async def assign(self, starts: Sequence[Start], may_be_gone: bool = False) -> None:
        """Make these the partitions: those that stay go on, the others begin at their starts.

        A cursor of a topic that was deleted does not stay: the topic that has its name now is another one.
        `may_be_gone`: what is gone already is left out, because the coordinator will hear of it.
        """
        known = dict(self.cursors)
        found = await self.open(starts, known, may_be_gone)
        stay = {place for place, cursor in found.items() if cursor is known.get(place)}
        opened = {place: cursor for place, cursor in found.items() if place not in stay}
        self.cursors = {place: cursor for place, cursor in self.cursors.items() if place in stay} | opened
        for cursor in self.cursors.values():
            self.waiter.look_again(cursor.partition.directory)
        self.changed.set()

    async def open(
        self,
        starts: Sequence[Start],
        known: Mapping[TopicPartition, Cursor],
        may_be_gone: bool,
        is_shown: bool = True,
    ) -> dict[TopicPartition, Cursor]:
        """Return cursors: those of `known` that may stay, and new ones. Others have their turn of the thread meanwhile.

        `is_shown`: the client is told now where it begins; else the first read judges a committed offset, and refuses
        one that is beyond the end of files whose router recovers (not_ready).
        """
        found: dict[TopicPartition, Cursor] = {}
        for at in range(0, len(starts), _OPENED):
            if at and self._is_member:  # the client waits for the gateway meanwhile, which may take seconds
                self._groups.beat(self.group, self.member)
            some = starts[at : at + _OPENED]
            committed = self.committed([place for place, _ in some])
            found |= await self.files.run(self._open, some, known, committed, may_be_gone, is_shown)
        return found

    def _open(
        self,
        starts: Sequence[Start],
        known: Mapping[TopicPartition, Cursor],
        committed: Mapping[TopicPartition, int],
        may_be_gone: bool,
        is_shown: bool,
    ) -> dict[TopicPartition, Cursor]:
        """Do it, in a thread."""
        found: dict[TopicPartition, Cursor] = {}
        for place, start in starts:
            if place in known and known[place].partition.is_current():
                found[place] = known[place]
                continue
            try:
                partition = self.files.partitions.open(*place)
            except RequestRefused as err:
                if may_be_gone and err.code in GONE:
                    continue
                raise
            cursor = found[place] = Cursor(partition, committed.get(place, 0))
            if place in committed and not is_shown:
                continue
            try:
                cursor.offset = partition.nearest(cursor.offset) if start is None else partition.locate(start)
            except DamageError:  # the first fetch says what is damaged
                if start is not None:
                    cursor.start = moment(start)
                    cursor.offset = start.value if start.kind == "offset" else cursor.offset
        return found

    def revoke(self, places: Iterable[TopicPartition]) -> None:
        """Read nothing more of these partitions."""
        for place in places:
            self.cursors.pop(place, None)
        self.changed.set()

    async def seek(self, place: TopicPartition, position: Position) -> int:
        """Go on at that position. Returns its offset."""

        def located() -> Cursor:
            partition = self.files.partitions.open(*place)
            return Cursor(partition, partition.locate(position))

        self.select([place])
        cursor = await self.files.run(located)
        self.select([place])  # it may have been revoked meanwhile
        self.cursors[place] = cursor
        self.waiter.look_again(cursor.partition.directory)
        self.changed.set()
        return cursor.offset

    def select(self, places: Collection[TopicPartition]) -> list[Cursor]:
        """Return the cursors of these partitions, or all, in the order of their turns. Raises RequestRefused."""
        for place in places:
            if place not in self.cursors:
                raise RequestRefused("unknown_partition", f"{place} is not assigned to this {self._client}")
        return [cursor for place, cursor in self.cursors.items() if not places or place in places]

    def offsets(self) -> list[tuple[TopicPartition, int]]:
        """Return the partitions, sorted, each with its next offset."""
        return [(place, cursor.offset) for place, cursor in sorted(self.cursors.items())]

    def is_in_force(self, cursor: Cursor) -> bool:
        """Return False if the cursor's partition was revoked, or sought, since it was selected."""
        return self.cursors.get(cursor.place) is cursor

    def pass_turn(self, cursor: Cursor) -> bool:
        """Let the other partitions go first at the next fetch. Return False if this cursor is not in force any more."""
        if not self.is_in_force(cursor):
            return False
        self.cursors[cursor.place] = self.cursors.pop(cursor.place)
        return True

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def _has_turns(self) -> bool:
        """Return True if something may come again, or may be left out, now: else all new messages may come."""
        if not self.group or self._redelivery is None:
            return False
        if not self._groups.store.table.has_nacks(self.group) and self._groups.deliveries.is_quiet(self.group):
            return False
        return self._is_member or self._groups.coordinator.state(self.group) in (State.EMPTY, State.DEAD)

    async def turn(self, cursors: list[Cursor], limit: Limit, is_idle: bool) -> Turn:
        """Return what the member is given next of these partitions.

        `is_idle`: it has come back from all that it was given before; one that has committed all that is idle, too.
        If something cannot be written now, the partition waits, and others go on.
        """
        group, groups, deliveries = self.group, self._groups, self._groups.deliveries
        for cursor in cursors:
            cursor.skips = _NOTHING
        if is_idle:
            deliveries.came_back(group, self.member)
        if not self._has_turns:
            return Turn([], cursors)
        if not is_idle and deliveries.has_one_alone(group, self.member):
            return Turn([], [])
        known = groups.committed(group)
        is_idle = is_idle or deliveries.has_nothing(
            group, self.member, lambda place: known[place].offset if place in known else 0
        )
        again: list[DueMessage] = []
        apart: list[Cursor] = []
        held: set[Partition] = set()
        for cursor in cursors:
            place, position = cursor.place, cursor.offset
            if not groups.store.nacks(group, *place) and position >= deliveries.doubted(group, place):
                continue
            try:
                nbytes = sum(each.message.size for each in again)
                room = Limit(limit.messages - len(again), limit.nbytes - nbytes)
                again += await self._several(place, position, room)
            except RequestRefused:
                held.add(place)
            if self._due(place, is_apart=True) or position < deliveries.doubted(group, place):
                apart.append(cursor)
        if is_idle and not again:
            while apart:
                cursor = apart.pop()
                try:
                    one = await self._one(cursor.place, cursor.offset)
                except RequestRefused:
                    held.add(cursor.place)
                    continue
                if one is not None:
                    return Turn([one], [])
        if apart:
            return Turn(again, [])  # no new ones, so that the reader becomes idle
        fresh = []
        for cursor in cursors:
            nacks = groups.store.nacks(group, *cursor.place)
            is_trusted = cursor.offset >= deliveries.doubted(group, cursor.place)
            if cursor.place not in held and is_trusted and not is_paused(nacks):
                cursor.skips = frozenset(nacks)
                fresh.append(cursor)
        return Turn(again, fresh)

    def _due(self, place: Partition, is_apart: bool) -> list[int]:
        deliveries, store = self._groups.deliveries, self._groups.store
        due = deliveries.due(self.group, place, store.nacks(self.group, *place), store.now_s())
        return [offset for offset in due if deliveries.is_apart(self.group, place, offset) == is_apart]

    async def _several(self, place: TopicPartition, position: int, room: Limit) -> list[DueMessage]:
        """Return the messages of a partition that are due and need not come apart."""
        deliveries = self._groups.deliveries
        is_apart = bool(self._due(place, is_apart=True)) or position < deliveries.doubted(self.group, place)
        if is_apart and not await self.redelivery.max_deliveries(place[0]):
            deliveries.trust(self.group, place)
        due = self._due(place, is_apart=False)
        if not due or room.messages <= 0 or room.nbytes <= 0:
            return []
        return self._take(place, await self.redelivery.take(self.group, place, due, room), position, is_alone=False)

    def _take(
        self, place: TopicPartition, found: tuple[list[Message], dict[int, NackRow]], position: int, is_alone: bool
    ) -> list[DueMessage]:
        messages, rows = found
        for message in messages:
            # Only a commit that goes beyond what the member may have read before says that it has handled this one.
            self._groups.deliveries.take(
                self.group, place, message.offset, OpenDelivery(self.member, position + 1, is_alone)
            )
        return [DueMessage(place, message, rows[message.offset].deliveries, position) for message in messages]

    async def _one(self, place: TopicPartition, position: int) -> DueMessage | None:
        """Return a message that comes apart: one that is due, else the next new one that is in doubt."""
        group, store, deliveries = self.group, self._groups.store, self._groups.deliveries
        due = self._due(place, is_apart=True)
        found = await self.redelivery.take(group, place, due, Limit(1, 1))
        if found[0]:
            return self._take(place, found, position, is_alone=True)[0]
        while position < deliveries.doubted(group, place):
            try:
                message = await self.redelivery.first(place, position)
            except RequestRefused as err:
                if err.code != "damaged":
                    raise
                message = None  # whoever reads on there hears of it
            if message is None:
                break
            position = message.offset + 1
            if position > deliveries.doubted(group, place):
                break
            if message.offset not in store.nacks(group, *place):  # else it comes when it is due, or was put aside
                now = store.now_s()
                row = NackRow(2, now, _DIED, first=now)
                await store.nack(group, *place, {message.offset: row})
                return self._take(place, ([message], {message.offset: row}), position, is_alone=True)[0]
        deliveries.trust_new(group, place)
        return None

    def delivered(self, cursors: Iterable[Cursor]) -> None:
        """Note up to where the member was given new messages."""
        if self.group:
            self._groups.deliveries.read(self.group, self.member, {cursor.place: cursor.offset for cursor in cursors})

    def shown(self, again: Iterable[DueMessage], positions: Mapping[TopicPartition, int]) -> None:
        """Note that the answer shows these positions: to commit them is to be done with what came again in it."""
        deliveries = self._groups.deliveries
        for each in again:
            deliveries.show(self.group, each.place, each.message.offset, positions[each.place])

    def take_back(self, again: Iterable[DueMessage]) -> None:
        """Note that the member has not got these messages: they are due again."""
        for each in again:
            self._groups.deliveries.give_back(self.group, each.place, each.message.offset)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_s(self, cursors: Iterable[Cursor]) -> float:
        """Return after how many seconds to ask for a turn again, without any news."""
        if not self._has_turns:
            return NEVER
        group, store, deliveries = self.group, self._groups.store, self._groups.deliveries
        due = NEVER
        for cursor in cursors:
            if cursor.offset < deliveries.doubted(group, cursor.place):
                return _LOOK_AGAIN_S
            due = min(due, deliveries.next_due(group, cursor.place, store.nacks(group, *cursor.place)))
        left = due - store.now_s()
        return left if left > 0 else _LOOK_AGAIN_S

    def watch(self, event: asyncio.Event) -> contextlib.AbstractContextManager[None]:
        """Set the event whenever a message of the group was given back."""
        return self._groups.watch(self.group, event) if self.group else contextlib.nullcontext()

    # --- offsets, giving back, and being done ------------------------------------------------------------------------

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the next offsets that the group has committed, of those of `places` that have one."""
        found = self._groups.committed(self.group) if self.group else {}
        return {place: found[place].offset for place in places if place in found}

    async def done(self, messages: Sequence[tuple[Partition, int]]) -> None:
        """Note on disk that the member is done with these messages, which had come again.

        Raises RequestRefused (fenced) for one that the member has not: it comes once more, or another one has it.
        """
        await self._check([place for place, _ in messages])
        for place, offset in messages:
            delivery = self._groups.deliveries.find(self.group, place, offset)
            if delivery is not None and delivery.member == self.member:
                await self.redelivery.done(self.group, place, offset)
            elif (row := self._groups.store.nacks(self.group, *place).get(offset)) and not row.letter:
                where = f"{TopicPartition(*place)} offset {offset}"
                raise RequestRefused("fenced", f"{where}: comes again, because this member does not have it any more")

    async def nack(self, place: Partition, offset: int, reason: str, delay_s: float) -> NackOutcome:
        """Give a message of a partition that the member owns back. Raises RequestRefused."""
        await self._check([place])
        return await self.redelivery.nack(self.group, *place, offset, reason, delay_s)

    async def _check(self, places: Iterable[Partition]) -> None:
        """Raise RequestRefused for a partition that the member does not own."""
        member = self.member if self._is_member else None
        await self._groups.check_commit(self.group, member, None, places)
