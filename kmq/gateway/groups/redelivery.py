"""What a member of a group reads next, by whatever door: messages that come again, before new ones.

    reader = Reader(redelivery, group, member)                  one for each member that a door serves
    turn = await reader.turn(positions, limit, is_idle)         messages that are due, each counted on disk
    turn.skips(place)                                           which new messages may follow
    reader.read(positions)                                      up to where it was given new ones
    await reader.nack(place, offset, reason, delay_s)           gives one back

Given back  A message that a member gave back is delivered again when it is due, to whoever has its partition then.
Apart       What a reader had when it died comes again one at a time: as the only message that its reader has. Only
            there a delivery is counted for it, so a message that kills its readers becomes a letter, and the messages
            beside it do not. It is asked for by a reader that is idle: one that has come back from all it was given
            before. Where a topic has no maxDeliveries nobody is put aside, so all of it comes as before.
Letters     After maxDeliveries a message is put aside as a dead letter. Then it is behind the group: its row stays
            until the group has committed beyond it, and the group's offset moves over it by itself if it stands there.

Owner       the gateway. The rows are in the store of committed offsets (offset_table.Nack), what is in hand in
            Groups.in_hand: both are the group's, whatever door its members came through.
Invariant   A message that was given back is forgotten only when it is committed, or its dead letter is on disk, or the
            message is gone from its partition. Each delivery that counts is on disk before the message is shown.
Time        Rows are due by the store's clock, which goes evenly while the gateway lives, and after a start of the
            gateway by the broker's trusted clock (kmq/broker/clock.py). So a jump of the time of day delays nothing.
Crash       Between the letter and its row: the letter has the same id the next time and is stored once.
Memory      See offset_table.py: at most MAX_NACKS rows a partition. Then its new messages wait (in_hand.is_paused).
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from kmq.client.handling import Rules
from kmq.client.producer import Producer
from kmq.client.runner import Letterbox
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, bad_field, refusal_of
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Limit
from kmq.gateway.core.topics import UNLIMITED
from kmq.gateway.groups.events import State
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.in_hand import Hand, given_back, is_paused, is_spent
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import DONE, Nack, Partition
from kmq.message.letters import Failure
from kmq.message.message import Message
from kmq.message.text import make_routing_key
from kmq.wire.requests import EARLIEST, Position, TopicPartition

MOST_DELAY_S = 604_800.0
MOST_REASON = 250  # characters
_LETTER_S = 5.0  # longest wait for a dead letter to be on disk
_LOOK_AGAIN_S = 0.5  # until a message is tried again that is due and could not be delivered
_WINDOW = "http"
_DIED = "in hand when its consumer died"
_NOTHING: frozenset[int] = frozenset()
_numbers = count(1)


class NackOutcome(NamedTuple):
    """What became of a message that was given back. `letter`: <topic>/<partition>@<offset>; "": it comes again."""

    deliveries: int
    due_s: float  # from now on
    letter: str = ""


class RedeliveredMessage(NamedTuple):
    """A message that is delivered again, how often it was delivered with that, and where its partition goes on."""

    message: Message
    deliveries: int
    position: int

    @property
    def place(self) -> Partition:
        return self.message.topic, self.message.partition


class Turn(NamedTuple):
    """What a reader is given next. `apart`: what new messages leave out, by partition; None: all may come."""

    again: list[RedeliveredMessage]
    apart: Mapping[Partition, frozenset[int]] | None = None

    def skips(self, place: Partition) -> frozenset[int] | None:
        """Return the offsets that new messages of a partition leave out; None: no new one comes now."""
        return _NOTHING if self.apart is None else self.apart.get(place)


class Redelivery:
    """For all groups. Every method may raise RequestRefused."""

    def __init__(self, groups: Groups, core: Core) -> None:
        self.groups, self._core = groups, core
        self._letters = _Letters()

    async def close(self) -> None:
        await self._letters.close()

    # --- giving back -------------------------------------------------------------------------------------------------

    async def nack(
        self, group: str, topic: str, partition: int, offset: int, reason: str = "", delay_s: float = 0.0
    ) -> NackOutcome:
        """Let a message be delivered again after a while, or put it aside. On disk when this returns."""
        place, groups, store = (topic, partition), self.groups, self.groups.store
        if groups.describe(group) is None:
            raise RequestRefused("unknown_group", f"group {group!r}: does not exist")
        if not 0 <= delay_s <= MOST_DELAY_S:
            raise bad_field("delay", f"must be 0 to {MOST_DELAY_S:.0f} seconds")
        if len(reason) > MOST_REASON:
            raise bad_field("reason", f"must be at most {MOST_REASON} characters")
        most = await self.max_deliveries(topic)
        message = await self._read(place, offset)
        known = store.nacks(group, topic, partition).get(offset)
        if known is not None and known.letter not in ("", DONE):
            return NackOutcome(known.deliveries, 0.0, known.letter)
        row = given_back(known, store.now_s(), delay_s, reason)
        if is_spent(row, most):
            return NackOutcome(row.deliveries, 0.0, await self._put_aside(group, message, row))
        await store.nack(group, topic, partition, {offset: row})
        groups.in_hand.give_back(group, place, offset)
        groups.in_hand.trust(group, place, offset)
        groups.wake(group)
        return NackOutcome(row.deliveries, row.due - store.now_s())

    async def max_deliveries(self, topic: str) -> int:
        """Return the topic's own limit; 0: none."""
        most = (await self._core.topics.describe(topic)).options["maxDeliveries"]
        return 0 if most == UNLIMITED else int(most)

    async def _read(self, place: Partition, offset: int) -> Message:
        """Return one message. Raises RequestRefused (out_of_range) if it is gone, or was never there."""
        cursor = await self._core.fetching.open(*place, Position("offset", offset))

        def alone(found: list[Message]) -> Message | None:
            return next((message for message in found if message.offset == offset), None)

        _, found = await self._core.fetching.read([cursor], Limit(1, 1), alone)
        if found is None:
            text = f"offset {offset}: {place[0]}/{place[1]} has no message there"
            first, end = cursor.partition.start(), cursor.end
            raise RequestRefused("out_of_range", text, field="offset", first=first, end=end)
        return found

    async def first(self, place: Partition, offset: int) -> Message | None:
        """Return the message at this offset, or the next one."""
        cursor = await self._core.fetching.open(*place, Position("offset", offset))
        cursor.is_strict = False
        _, found = await self._core.fetching.read([cursor], Limit(1, 1), lambda found: found[:1])
        return found[0] if found else None

    async def _put_aside(self, group: str, message: Message, row: Nack) -> str:
        """Store a message as a dead letter, and let the group go on behind it. Returns where the letter is."""
        store, place = self.groups.store, (message.topic, message.partition)
        now = store.now_s()
        failure = Failure(group, row.reason or "given back", row.deliveries, row.first or now, now)
        dlq = Rules().topic_of_letters(message.topic)
        seq = await self._letters.put(message, dlq, failure)
        found = await self._core.producing.place_of(dlq, make_routing_key(dlq, message.key), seq)
        letter = f"{TopicPartition(dlq, found[0])}@{found[1]}" if found else dlq
        await store.nack(group, *place, {message.offset: row._replace(letter=letter)})
        self.groups.in_hand.give_back(group, place, message.offset)
        self.groups.in_hand.trust(group, place, message.offset)
        committed = store.committed(group).get(place)
        await self.groups.forget(group, place, (), committed.offset if committed else 0)
        return letter

    async def done(self, group: str, place: Partition, offset: int) -> None:
        """Note that a message which came again was handled. While it is in front of the group, it is not a new one."""
        store, in_hand = self.groups.store, self.groups.in_hand
        row, known = store.nacks(group, *place).get(offset), store.committed(group).get(place)
        if row is None or (known is not None and offset < known.offset):
            await self.groups.forget(group, place, [offset])
            return
        await store.nack(group, *place, {offset: row._replace(letter=DONE)})
        in_hand.give_back(group, place, offset)
        in_hand.trust(group, place, offset)
        await self._pass(group, place)

    async def _pass(self, group: str, place: Partition) -> None:
        """Move the group's offset over messages that are letters, or done."""
        start = await self._core.fetching.open(*place, EARLIEST)
        await self.groups.pass_letters(group, place, start.offset)

    # --- delivering again --------------------------------------------------------------------------------------------

    async def take(
        self, group: str, place: Partition, due: Iterable[int], room: Limit
    ) -> tuple[list[Message], dict[int, Nack]]:
        """Return messages whose rows are due, in order, with their rows, in which this delivery is counted on disk.

        Those that were delivered often enough are put aside, those that are gone are forgotten, those that are damaged
        wait.
        """
        store, in_hand = self.groups.store, self.groups.in_hand
        most = await self.max_deliveries(place[0])
        found: list[Message] = []
        rows: dict[int, Nack] = {}
        for offset in due:
            if len(found) >= room.messages or sum(message.size for message in found) >= room.nbytes:
                break
            row = store.nacks(group, *place).get(offset)
            try:
                message = await self._read(place, offset)
            except RequestRefused as err:
                if err.code == "damaged":
                    continue  # it waits until it is healed, and keeps nothing else back
                if err.code != "out_of_range":
                    raise
                await self.groups.forget(group, place, [offset])
                continue
            if row is None:
                continue  # committed, or put aside, meanwhile
            counts = in_hand.counts(group, place, offset)
            if counts and is_spent(row, most):
                await self._put_aside(group, message, row)
                await self._pass(group, place)
                continue
            found.append(message)
            rows[offset] = row._replace(deliveries=row.deliveries + counts)
        await store.nack(group, *place, rows)
        return found, rows


class Reader:
    """What one member of a group reads next. `member` None: a client of a group that has no members now."""

    def __init__(self, redelivery: Redelivery, group: str, member: str | None) -> None:
        self._redelivery, self._groups, self.group = redelivery, redelivery.groups, group
        self._is_member, self.member = member is not None, member or f"\0{next(_numbers)}"  # no member's name

    def close(self) -> None:
        """Note that a client that is no member has gone: what it had in hand is due again."""
        if not self._is_member:
            self._groups.in_hand.release(self.group, self.member)

    @property
    def _is_in_force(self) -> bool:
        return self._is_member or self._groups.coordinator.state(self.group) in (State.EMPTY, State.DEAD)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def has_turns(self) -> bool:
        """Return True if something may come again, or may be left out, now: else all new messages may come."""
        is_plain = not self._groups.store.table.has_nacks(self.group) and self._groups.in_hand.is_quiet(self.group)
        return not is_plain and self._is_in_force

    async def turn(self, positions: Mapping[Partition, int], limit: Limit, is_idle: bool) -> Turn:
        """Return what the member is given next of partitions that go on at these positions.

        `is_idle`: it has come back from all that it was given before; one that has committed all that is idle, too.
        If something cannot be written now, the partition waits, and others go on.
        """
        group, groups, in_hand = self.group, self._groups, self._groups.in_hand
        if is_idle:
            in_hand.came_back(group, self.member)
        elif in_hand.has_one_alone(group, self.member):
            return Turn([], {})
        if not self.has_turns:
            return Turn([])
        known = groups.committed(group)
        is_idle = is_idle or in_hand.has_nothing(
            group, self.member, lambda place: known[place].offset if place in known else 0
        )
        again: list[RedeliveredMessage] = []
        apart: list[Partition] = []
        held: set[Partition] = set()
        for place, position in positions.items():
            if not groups.store.nacks(group, *place) and position >= in_hand.doubted(group, place):
                continue
            try:
                nbytes = sum(each.message.size for each in again)
                room = Limit(limit.messages - len(again), limit.nbytes - nbytes)
                again += await self._several(place, position, room)
            except RequestRefused:
                held.add(place)
            if self._due(place, is_apart=True) or position < in_hand.doubted(group, place):
                apart.append(place)
        if is_idle and not again:
            while apart:
                place = apart.pop()
                try:
                    one = await self._one(place, positions[place])
                except RequestRefused:
                    held.add(place)
                    continue
                if one is not None:
                    return Turn([one], {})
        if apart:
            return Turn(again, {})  # no new ones, so that the reader becomes idle
        rows = {place: groups.store.nacks(group, *place) for place in positions if place not in held}
        return Turn(
            again,
            {
                place: frozenset(nacks)
                for place, nacks in rows.items()
                if not is_paused(nacks) and positions[place] >= in_hand.doubted(group, place)
            },
        )

    def _due(self, place: Partition, is_apart: bool) -> list[int]:
        in_hand, store = self._groups.in_hand, self._groups.store
        due = in_hand.due(self.group, place, store.nacks(self.group, *place), store.now_s())
        return [offset for offset in due if in_hand.is_apart(self.group, place, offset) == is_apart]

    async def _several(self, place: Partition, position: int, room: Limit) -> list[RedeliveredMessage]:
        """Return the messages of a partition that are due and need not come apart."""
        in_hand = self._groups.in_hand
        is_apart = bool(self._due(place, is_apart=True)) or position < in_hand.doubted(self.group, place)
        if is_apart and not await self._redelivery.max_deliveries(place[0]):
            in_hand.trust(self.group, place)
        due = self._due(place, is_apart=False)
        if not due or room.messages <= 0 or room.nbytes <= 0:
            return []
        return self._take(place, await self._redelivery.take(self.group, place, due, room), position, is_alone=False)

    def _take(
        self, place: Partition, found: tuple[list[Message], dict[int, Nack]], position: int, is_alone: bool
    ) -> list[RedeliveredMessage]:
        messages, rows = found
        for message in messages:
            # Only a commit that goes beyond what the member may have read before says that it has handled this one.
            self._groups.in_hand.take(self.group, place, message.offset, Hand(self.member, position + 1, is_alone))
        return [RedeliveredMessage(message, rows[message.offset].deliveries, position) for message in messages]

    async def _one(self, place: Partition, position: int) -> RedeliveredMessage | None:
        """Return a message that comes apart: one that is due, else the next new one that is in doubt."""
        group, store, in_hand = self.group, self._groups.store, self._groups.in_hand
        due = self._due(place, is_apart=True)
        found = await self._redelivery.take(group, place, due, Limit(1, 1))
        if found[0]:
            return self._take(place, found, position, is_alone=True)[0]
        while position < in_hand.doubted(group, place):
            try:
                message = await self._redelivery.first(place, position)
            except RequestRefused as err:
                if err.code != "damaged":
                    raise
                message = None  # whoever reads on there hears of it
            if message is None:
                break
            position = message.offset + 1
            if position > in_hand.doubted(group, place):
                break
            if message.offset not in store.nacks(group, *place):  # else it comes when it is due, or was put aside
                now = store.now_s()
                row = Nack(2, now, _DIED, first=now)
                await store.nack(group, *place, {message.offset: row})
                return self._take(place, ([message], {message.offset: row}), position, is_alone=True)[0]
        in_hand.trust_new(group, place)
        return None

    def read(self, positions: Mapping[Partition, int]) -> None:
        """Note up to where the member was given new messages."""
        self._groups.in_hand.read(self.group, self.member, positions)

    def shown(self, again: Iterable[RedeliveredMessage], positions: Mapping[Partition, int]) -> None:
        """Note that the answer shows these positions: to commit them is to be done with what came again in it."""
        in_hand = self._groups.in_hand
        for each in again:
            in_hand.show(self.group, each.place, each.message.offset, positions[each.place])

    def take_back(self, again: Iterable[RedeliveredMessage]) -> None:
        """Note that the member has not got these messages: they are due again."""
        for each in again:
            self._groups.in_hand.give_back(self.group, each.place, each.message.offset)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_s(self, positions: Mapping[Partition, int]) -> float:
        """Return after how many seconds to ask for a turn again, without any news."""
        group, store, in_hand = self.group, self._groups.store, self._groups.in_hand
        if not self.has_turns:
            return NEVER
        if any(at < in_hand.doubted(group, place) for place, at in positions.items()):
            return _LOOK_AGAIN_S
        due = min((in_hand.next_due(group, at, store.nacks(group, *at)) for at in positions), default=NEVER)
        left = due - store.now_s()
        return left if left > 0 else _LOOK_AGAIN_S

    def watch(self, event: asyncio.Event) -> contextlib.AbstractContextManager[None]:
        """Set the event whenever a message of the group was given back."""
        return self._groups.watch(self.group, event)

    # --- giving back, and being done --------------------------------------------------------------------------------

    async def done(self, messages: Sequence[tuple[Partition, int]]) -> None:
        """Note on disk that the member is done with these messages, which had come again.

        Raises RequestRefused (fenced) for one that the member has not: it comes once more, or another one has it.
        """
        await self._check([place for place, _ in messages])
        for place, offset in messages:
            hand = self._groups.in_hand.hand(self.group, place, offset)
            if hand is not None and hand.member == self.member:
                await self._redelivery.done(self.group, place, offset)
            elif (row := self._groups.store.nacks(self.group, *place).get(offset)) and not row.letter:
                where = f"{TopicPartition(*place)} offset {offset}"
                raise RequestRefused("fenced", f"{where}: comes again, because this member does not have it any more")

    async def nack(self, place: Partition, offset: int, reason: str, delay_s: float) -> NackOutcome:
        """Give a message of a partition that the member owns back. Raises RequestRefused."""
        await self._check([place])
        return await self._redelivery.nack(self.group, *place, offset, reason, delay_s)

    async def _check(self, places: Iterable[Partition]) -> None:
        """Raise RequestRefused for a partition that the member does not own."""
        member = self.member if self._is_member else None
        await self._groups.check_commit(self.group, member, None, places)


class _Letters:
    """The gateway's way of dead letters to the broker: one connection, used by one request at a time, in a thread."""

    def __init__(self) -> None:
        self._box: Letterbox | None = None
        self._order = asyncio.Lock()

    async def put(self, message: Message, dlq: str, failure: Failure) -> int:
        """Store a letter, and return its seq; 0: not known. Raises RequestRefused."""
        async with self._order:
            box = self._box = self._box or Letterbox(_WINDOW, _producer)
            try:
                return await asyncio.to_thread(box.put, message, dlq, failure)
            except KmqError as err:
                await self._end()  # a connection that was refused is not used again
                raise refusal_of(err) from err

    async def close(self) -> None:
        async with self._order:
            await self._end()

    async def _end(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(KmqError):
                await asyncio.to_thread(box.close)


def _producer(window: str) -> Producer:
    return Producer.local(window=window, retry=frozenset(), timeout_s=_LETTER_S, delivery_timeout_s=_LETTER_S)
