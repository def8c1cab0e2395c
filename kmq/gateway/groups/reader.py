"""The reader of one group member, for all doors: chooses what the member gets next, given-back messages first.

    reader = Reader(files, groups, redelivery, group, member)   one for each member that a door serves
    again, fresh = await reader.turn(cursors, limit, is_idle)   messages that are due, each counted on disk; and the
                                                                partitions whose new messages may follow
    reader.pass_turn(cursor)                                    before a batch is written: is its cursor still in force?
    reader.delivered(cursors)                                   up to where the member was given new messages

Push        streaming.py, for lines and gRPC: the client asks on a stream, and the gateway answers when it has messages.
Poll        polling.py, for HTTP: a call returns what is there, or waits for it.
Apart       Messages that a reader had when it died are delivered again in parts, and in the end one at a time, as the
            only message that its reader has. Only there a delivery counts, so a message that kills its readers becomes
            a dead letter, and the messages beside it do not. A part is delivered only to an idle reader: one that has
            polled after all earlier messages, or committed them. In a topic without maxDeliveries no message is put
            aside, so all messages are delivered as before. The size of a part: deliveries.py.
Invariant   A partition is read from its former owner's commit: it is opened when the assignment is passed on, and the
            former owner has given it up before. After a revoke no batch of that partition is sent. After a seek no
            batch from before it is sent. Both replace or remove the cursor that is being read.
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

_OPENED = 500  # partitions opened in one turn of a shared thread: some hundred milliseconds
_LOOK_AGAIN_S = 0.5  # until the next look at partitions that had to wait, or at a message that could not be delivered
_DIED = "in hand when its consumer died"
_NOTHING: frozenset[int] = frozenset()
_numbers = count(1)


class Files(Protocol):
    """What a reader needs of its door: threads for files, how faults are reported, and who is woken by new records."""

    partitions: Partitions
    waking: Waking

    async def run(self, work: Callable[..., T], *arguments: object) -> T: ...


class Turn(NamedTuple):
    """What a member gets next: messages delivered again, and the partitions whose new messages may follow."""

    again: list[DueMessage]
    fresh: list[Cursor]


# --- reader ----------------------------------------------------------------------------------------------------------


class Reader:
    """What one member reads. `member` None: a client of a group without members now. `group` None: no group."""

    def __init__(
        self,
        files: Files,
        groups: Groups,
        redelivery: Redelivery | None,
        group: str | None,
        member: str | None,
        client: str = "member",
    ) -> None:
        """`redelivery` None: no message is delivered again. `client`: what a refusal calls the member."""
        self.files, self.group, self._groups, self._redelivery = files, group or "", groups, redelivery
        self._is_member, self.member = member is not None, member or f"\0{next(_numbers)}"  # no member has this name
        self._client = client
        self.cursors: dict[TopicPartition, Cursor] = {}  # in the order of their turns
        self.changed = asyncio.Event()  # set for another partition, cursor or message to look at
        self.waiter = Waiter(self.changed)

    def close(self) -> None:
        """Stop watching. Messages that a client without membership had in hand are due again."""
        self.files.waking.forget(self.waiter)
        if not self._is_member:
            self._groups.deliveries.release(self.group, self.member)

    @property
    def redelivery(self) -> Redelivery:
        assert self._redelivery is not None, "a gateway has it"
        return self._redelivery

    # --- the partitions ----------------------------------------------------------------------------------------------

    async def assign(self, starts: Sequence[Start], may_be_gone: bool = False) -> None:
        """Make these the reader's partitions. Known ones continue, the others begin at their starts.

        A cursor of a deleted topic does not stay, even if a new topic has the name now. `may_be_gone`: leave out
        partitions that are gone already, because the coordinator will learn of it.
        """
        before = dict(self.cursors)
        found = await self.open(starts, before, may_be_gone)
        stay = {place for place, cursor in found.items() if cursor is before.get(place)}
        opened = {place: cursor for place, cursor in found.items() if place not in stay}
        self.cursors = {place: cursor for place, cursor in self.cursors.items() if place in stay} | opened
        for cursor in self.cursors.values():
            self.waiter.look_again(cursor.partition.directory)
        self.changed.set()

    async def open(
        self,
        starts: Sequence[Start],
        before: Mapping[TopicPartition, Cursor],
        may_be_gone: bool,
        is_shown: bool = True,
    ) -> dict[TopicPartition, Cursor]:
        """Return cursors: those of `before` that may stay, and new ones. Opens in parts, so that others get the thread.

        `is_shown`: the client is told now where it begins. Otherwise the first read checks the committed offset, and
        refuses one beyond the end of the files while the router recovers (not_ready).
        """
        found: dict[TopicPartition, Cursor] = {}
        for at in range(0, len(starts), _OPENED):
            if at and self._is_member:  # its client waits meanwhile, perhaps for seconds
                self._groups.beat(self.group, self.member)
            some = starts[at : at + _OPENED]
            committed = self.committed([place for place, _ in some])
            found |= await self.files.run(self._open, some, before, committed, may_be_gone, is_shown)
        self.report_overtaken(found.values())
        return found

    def _open(
        self,
        starts: Sequence[Start],
        before: Mapping[TopicPartition, Cursor],
        committed: Mapping[TopicPartition, int],
        may_be_gone: bool,
        is_shown: bool,
    ) -> dict[TopicPartition, Cursor]:
        """Open some partitions. Runs in a thread."""
        found: dict[TopicPartition, Cursor] = {}
        for place, start in starts:
            if place in before and before[place].partition.is_current():
                found[place] = before[place]
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
                offset = partition.nearest(cursor.offset) if start is None else partition.locate(start)
                if start is None and place in committed:
                    cursor.overtake(offset)
                cursor.offset = offset
            except DamageError:  # the first fetch reports the damage
                if start is not None:
                    cursor.start = moment(start)
                    cursor.offset = start.value if start.kind == "offset" else cursor.offset
        return found

    def revoke(self, places: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions."""
        for place in places:
            self.cursors.pop(place, None)
        self.changed.set()

    async def seek(self, place: TopicPartition, position: Position) -> int:
        """Continue a partition at a position. Returns its offset."""

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
        """Return False if the cursor's partition was revoked or sought since it was selected."""
        return self.cursors.get(cursor.place) is cursor

    def pass_turn(self, cursor: Cursor) -> bool:
        """Let the other partitions go first at the next fetch. Return False if this cursor is no longer in force."""
        if not self.is_in_force(cursor):
            return False
        self.cursors[cursor.place] = self.cursors.pop(cursor.place)
        return True

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def _has_turns(self) -> bool:
        """Return False if no message may be redelivered or skipped now, so that all new messages may follow."""
        if not self.group or self._redelivery is None:
            return False
        if not self._groups.store.table.has_nacks(self.group) and self._groups.deliveries.is_quiet(self.group):
            return False
        return self._is_member or self._groups.coordinator.state(self.group) in (State.EMPTY, State.DEAD)

    async def turn(self, cursors: list[Cursor], limit: Limit, is_idle: bool) -> Turn:
        """Return what the member gets next of these partitions.

        `is_idle`: it has polled after all that it was given. A member that has committed all of it is idle, too.
        If a row cannot be written now, its partition waits, and others go on.
        """
        group, groups, deliveries = self.group, self._groups, self._groups.deliveries
        for cursor in cursors:
            cursor.skips, cursor.most = _NOTHING, None
        if is_idle:
            deliveries.came_back(group, self.member)
        if not self._has_turns:
            return Turn([], cursors)
        if not is_idle and deliveries.has_one_alone(group, self.member):
            return Turn([], [])
        committed = groups.committed(group)
        is_idle = is_idle or deliveries.has_nothing(
            group, self.member, lambda place: committed[place].offset if place in committed else 0
        )
        again: list[DueMessage] = []
        singles: list[Cursor] = []
        held: set[Partition] = set()
        for cursor in cursors:
            place, position = cursor.place, cursor.offset
            if not groups.store.nacks(group, *place) and deliveries.doubt(group, place, position) is None:
                continue
            try:
                nbytes = sum(each.message.size for each in again)
                room = Limit(limit.messages - len(again), limit.nbytes - nbytes)
                again += await self._several(place, position, room)
            except RequestRefused:
                held.add(place)
            if self._due(place, is_single=True) or deliveries.doubt(group, place, position):
                singles.append(cursor)
        if is_idle and not again:
            while singles:
                cursor = singles.pop()
                try:
                    one = await self._one(cursor.place, cursor.offset)
                except RequestRefused:
                    held.add(cursor.place)
                    continue
                if one is not None:
                    return Turn([one], [])
                if self._is_part(cursor):
                    return Turn([], [cursor])
        if singles:
            return Turn(again, [])  # no new messages, so that the reader becomes idle
        fresh = []
        for cursor in cursors:
            nacks = groups.store.nacks(group, *cursor.place)
            is_trusted = deliveries.doubt(group, cursor.place, cursor.offset) is None
            if cursor.place not in held and is_trusted and not is_paused(nacks):
                cursor.skips = frozenset(nacks)
                fresh.append(cursor)
        return Turn(again, fresh)

    def _due(self, place: Partition, is_single: bool) -> list[int]:
        deliveries, store = self._groups.deliveries, self._groups.store
        due = deliveries.due(self.group, place, store.nacks(self.group, *place), store.now_s())
        return [offset for offset in due if deliveries.is_single(self.group, place, offset) == is_single]

    async def _several(self, place: TopicPartition, position: int, room: Limit) -> list[DueMessage]:
        """Return a partition's due messages, except those that must be delivered singly."""
        deliveries = self._groups.deliveries
        is_single = self._due(place, is_single=True) or deliveries.doubt(self.group, place, position)
        if is_single and not await self.redelivery.max_deliveries(place[0]):
            deliveries.trust(self.group, place)
        due = self._due(place, is_single=False)
        if not due or room.messages <= 0 or room.nbytes <= 0:
            return []
        found = await self.redelivery.redeliver(self.group, place, position, due, room)
        return self._deliver(place, found, position, is_alone=False)

    def _deliver(
        self, place: TopicPartition, found: tuple[list[Message], dict[int, NackRow]], position: int, is_alone: bool
    ) -> list[DueMessage]:
        messages, rows = found
        for message in messages:
            # The member may have read up to here before. So only a commit past that says that it has handled this one.
            self._groups.deliveries.open(
                self.group, place, message.offset, OpenDelivery(self.member, position + 1, is_alone)
            )
        return [DueMessage(place, message, rows[message.offset].deliveries, position) for message in messages]

    async def _one(self, place: TopicPartition, position: int) -> DueMessage | None:
        """Return a message to deliver singly: one that is due, or the next new one in doubt."""
        group, store, deliveries = self.group, self._groups.store, self._groups.deliveries
        due = self._due(place, is_single=True)
        found = await self.redelivery.redeliver(group, place, position, due, Limit(1, 1))
        if found[0]:
            return self._deliver(place, found, position, is_alone=True)[0]
        while (doubt := deliveries.doubt(group, place, position)) is not None and doubt.most == 1:
            try:
                message = await self.redelivery.first(group, place, position)
            except RequestRefused as err:
                if err.code != "damaged":
                    raise
                message = None  # the next read there reports the damage
            if message is None:
                deliveries.trust_new(group, place)
                break
            position = message.offset + 1
            if position > doubt.end:
                deliveries.trust_new(group, place, doubt.end)
                break
            if message.offset not in store.nacks(group, *place):  # its row decides otherwise
                now = store.now_s()
                row = NackRow(2, now, _DIED, first=now)
                await store.nack(group, *place, {message.offset: row})
                return self._deliver(place, ([message], {message.offset: row}), position, is_alone=True)[0]
        return None

    def _is_part(self, cursor: Cursor) -> bool:
        """Return True if the next new messages are a part, which is then all that the member has."""
        doubt = self._groups.deliveries.doubt(self.group, cursor.place, cursor.offset)
        nacks = self._groups.store.nacks(self.group, *cursor.place)
        if doubt is None or doubt.most == 1 or is_paused(nacks):
            return False
        cursor.skips, cursor.most = frozenset(nacks), min(doubt.most, doubt.end - cursor.offset)
        return True

    def report_overtaken(self, cursors: Iterable[Cursor]) -> None:
        """Count deleted messages that the group had not read, each once. Call it whenever cursors have moved."""
        for cursor in cursors:
            if self.group and cursor.overtaken:
                self._groups.overtake(self.group, cursor.place, cursor.overtaken)

    def delivered(self, cursors: Mapping[Cursor, int]) -> None:
        """Note up to where the member was given new messages. `cursors`: each with the first offset."""
        if not self.group:
            return
        deliveries, committed = self._groups.deliveries, self._groups.committed(self.group)
        for cursor, first in cursors.items():
            if cursor.place not in committed:
                deliveries.begin(self.group, cursor.place, first)
        deliveries.read(self.group, self.member, {cursor.place: cursor.offset for cursor in cursors})

    def says_hand_outs(self) -> None:
        """Note that the member's client reports which messages it gives to its program."""
        if self._is_member:
            self._groups.deliveries.says_hand_outs(self.group, self.member)

    def hand_out(self, offsets: Iterable[tuple[TopicPartition, int]]) -> None:
        """Note that the client has given its program messages, up to these next offsets."""
        if self._is_member:
            mine = [(place, offset) for place, offset in offsets if place in self.cursors]
            self._groups.deliveries.hand_out(self.group, self.member, mine)

    def shown(self, again: Iterable[DueMessage], positions: Mapping[TopicPartition, int]) -> None:
        """Note the positions shown with an answer: committing them makes its redelivered messages done."""
        deliveries = self._groups.deliveries
        for each in again:
            deliveries.show(self.group, each.place, each.message.offset, positions[each.place])

    def requeue(self, again: Iterable[DueMessage]) -> None:
        """Note that the member has not received these messages: they are due again."""
        for each in again:
            self._groups.deliveries.give_back(self.group, each.place, each.message.offset)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_s(self, cursors: Iterable[Cursor]) -> float:
        """Return after how many seconds to take a turn again without any news."""
        if not self._has_turns:
            return NEVER
        group, store, deliveries = self.group, self._groups.store, self._groups.deliveries
        due = NEVER
        for cursor in cursors:
            if deliveries.doubt(group, cursor.place, cursor.offset) is not None:
                return _LOOK_AGAIN_S
            due = min(due, deliveries.next_due(group, cursor.place, store.nacks(group, *cursor.place)))
        left = due - store.now_s()
        return left if left > 0 else _LOOK_AGAIN_S

    def watch(self, event: asyncio.Event) -> contextlib.AbstractContextManager[None]:
        """Set the event whenever a message of the group is given back."""
        return self._groups.watch(self.group, event) if self.group else contextlib.nullcontext()

    # --- offsets, giving back, and being done ------------------------------------------------------------------------

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the group's committed offsets in `places`, where it has any."""
        found = self._groups.committed(self.group) if self.group else {}
        return {place: found[place].offset for place in places if place in found}

    async def done(self, messages: Sequence[tuple[Partition, int]]) -> None:
        """Note on disk that the member is done with these redelivered messages.

        Raises RequestRefused (fenced) for a message that it does not have any more: it is or will be redelivered.
        """
        await self._check([place for place, _ in messages])
        for place, offset in messages:
            delivery = self._groups.deliveries.find(self.group, place, offset)
            if delivery is not None and delivery.member == self.member:
                await self.redelivery.done(self.group, place, offset)
            elif (row := self._groups.store.nacks(self.group, *place).get(offset)) and not row.letter:
                where = f"{TopicPartition(*place)} offset {offset}"
                raise RequestRefused(
                    "fenced", f"{where}: is delivered again, because this member does not have it any more"
                )

    async def nack(self, place: Partition, offset: int, reason: str, delay_s: float) -> NackOutcome:
        """Give back a message of a partition that the member owns. Raises RequestRefused."""
        self._groups.check_redelivery(self.group, place)
        await self._check([place])
        return await self.redelivery.nack(self.group, *place, offset, reason, delay_s)

    async def _check(self, places: Iterable[Partition]) -> None:
        """Raise RequestRefused for a partition that the member does not own."""
        member = self.member if self._is_member else None
        await self._groups.check_commit(self.group, member, None, places)
