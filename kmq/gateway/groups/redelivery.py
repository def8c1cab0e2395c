"""Messages that members gave back (nack): kept as rows of the group, delivered again, or put aside as dead letters.

    await redelivery.nack(group, topic, partition, offset, reason, delay_s)
    await redelivery.next(group, places, limit)     messages that are due, before new ones
    redelivery.delivered(group, member, found, positions)

Owner       the gateway. The rows are in the store of committed offsets (offset_records.Nack), what is in hand in
            Groups.in_hand: both are the group's, whatever door its members came through.
Invariant   A message that was given back is forgotten only when it is committed, or its dead letter is on disk, or the
            message is gone from its partition. Each delivery is counted on disk before the message is shown, so that a
            message that kills its consumers becomes a letter, too.
Crash       Between the letter and the tombstone: the letter has the same id the next time and is stored once.
Memory      See offset_table.py: at most MAX_NACKS rows a partition. Then its new messages wait (in_hand.is_paused).
Not covered Doors other than HTTP deliver new messages only. What was given back waits for a member over HTTP.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kmq.client.egress_lines import Position
from kmq.client.handling import Rules
from kmq.client.letterbox import Letterbox
from kmq.client.letters import Failure
from kmq.client.message import Message
from kmq.client.producer import Producer
from kmq.errors import KmqError
from kmq.gateway.core.fetching import Fetching, Limit
from kmq.gateway.core.refused import RequestRefused, refusal_of
from kmq.gateway.core.topic_admin import TopicAdmin
from kmq.gateway.core.topic_options import UNLIMITED
from kmq.gateway.groups.in_hand import NEVER, Hand, Partition, given_back, is_paused, is_spent
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_records import Nack

_LETTER_S = 5.0  # longest wait for a dead letter to be on disk
_WINDOW = "http"


class Given(NamedTuple):
    """What became of a message that was given back. `dead_letter`: the topic of its letter; "": it comes again."""

    deliveries: int
    due: float
    dead_letter: str = ""


class Again(NamedTuple):
    """A message that is delivered again, and how often it was delivered with that."""

    message: Message
    deliveries: int


class Redelivery:
    """For all groups. Every method may raise RequestRefused."""

    def __init__(self, groups: Groups, fetching: Fetching, topics: TopicAdmin) -> None:
        self._groups, self._fetching, self._topics = groups, fetching, topics
        self._letters = _Letters()

    async def close(self) -> None:
        await self._letters.close()

    # --- giving back -------------------------------------------------------------------------------------------------

    async def nack(
        self, group: str, topic: str, partition: int, offset: int, reason: str = "", delay_s: float = 0.0
    ) -> Given:
        """Let a message be delivered again after a while, or put it aside. On disk when this returns."""
        place = topic, partition
        if self._groups.describe(group) is None:
            raise RequestRefused("unknown_group", f"group {group!r}: does not exist")
        most = await self._max_deliveries(topic)
        message = await self._read(place, offset)
        known = self._groups.store.nacks(group, topic, partition).get(offset)
        row = given_back(known, time.time(), delay_s, reason)
        if is_spent(row, most):
            dlq = await self._put_aside(group, message, row)
            return Given(row.deliveries, row.due, dlq)
        await self._groups.store.nack(group, topic, partition, {offset: row})
        self._groups.in_hand.give_back(group, place, offset)
        return Given(row.deliveries, row.due)

    async def _max_deliveries(self, topic: str) -> int:
        """Return the topic's own limit; 0: none."""
        most = (await self._topics.describe(topic)).options["maxDeliveries"]
        return 0 if most == UNLIMITED else int(most)

    async def _read(self, place: Partition, offset: int) -> Message:
        """Return one message. Raises RequestRefused (out_of_range) if it is gone, or was never there."""
        cursor = await self._fetching.open(*place, Position("offset", offset))

        def alone(found: list[Message]) -> Message | None:
            return next((message for message in found if message.offset == offset), None)

        _, found = await self._fetching.read([cursor], Limit(1, 1), alone)
        if found is None:
            text = f"offset {offset}: {place[0]}/{place[1]} has no message there"
            first, end = cursor.partition.start(), cursor.end
            raise RequestRefused("out_of_range", text, field="offset", first=first, end=end)
        return found

    async def _put_aside(self, group: str, message: Message, row: Nack) -> str:
        """Store a message as a dead letter, and forget that it was given back. Returns the topic of the letter."""
        now = time.time()
        failure = Failure(group, row.reason or "given back", row.deliveries, row.first or now, now)
        dlq = Rules().topic_of_letters(message.topic)
        await self._letters.put(message, dlq, failure)
        await self._forget(group, (message.topic, message.partition), message.offset)
        return dlq

    async def _forget(self, group: str, place: Partition, offset: int) -> None:
        await self._groups.store.nack_done(group, *place, offset)
        self._groups.in_hand.give_back(group, place, offset)

    # --- delivering again --------------------------------------------------------------------------------------------

    def is_paused(self, group: str, place: Partition) -> bool:
        """Return True if the partition delivers no new messages now, because too many were given back."""
        return is_paused(self._groups.store.nacks(group, *place))

    def waiting(self, group: str, place: Partition) -> frozenset[int]:
        """Return the offsets that were given back: where the group reads anew, they do not come in their turn."""
        return frozenset(self._groups.store.nacks(group, *place))

    def next_due(self, group: str, places: Iterable[Partition]) -> float:
        """Return when (time of day) the next message of these partitions is to be delivered again; NEVER if none."""
        hands, store = self._groups.in_hand, self._groups.store
        return min((hands.next_due(group, place, store.nacks(group, *place)) for place in places), default=NEVER)

    async def next(self, group: str, places: Iterable[Partition], limit: Limit) -> list[Again]:
        """Return messages that are due, those of a partition in order, each counted on disk.

        If that cannot be written now, the messages wait, and new ones go on.
        """
        found: list[Again] = []
        for place in places:
            rows = self._groups.store.nacks(group, *place)
            due = self._groups.in_hand.due(group, place, rows, time.time()) if rows else []
            if not due:
                continue
            with contextlib.suppress(RequestRefused):
                most = await self._max_deliveries(place[0])
                room = Limit(limit.messages - len(found), limit.nbytes - sum(each.message.size for each in found))
                found += await self._of_partition(group, place, due, room, most)
        return found

    async def _of_partition(self, group: str, place: Partition, due: list[int], room: Limit, most: int) -> list[Again]:
        found: dict[int, Message] = {}
        rows: dict[int, Nack] = {}
        nbytes = 0
        for offset in due:
            if len(found) >= room.messages or nbytes >= room.nbytes:
                break
            row = self._groups.store.nacks(group, *place).get(offset)
            try:
                message = await self._read(place, offset)
            except RequestRefused as err:
                if err.code != "out_of_range":
                    raise
                await self._forget(group, place, offset)
                continue
            if row is None:
                continue  # committed, or put aside, meanwhile
            if is_spent(row, most):
                await self._put_aside(group, message, row)
                continue
            found[offset], rows[offset] = message, row._replace(deliveries=row.deliveries + 1)
            nbytes += message.size
        await self._groups.store.nack(group, *place, rows)
        return [Again(message, rows[offset].deliveries) for offset, message in found.items()]

    def delivered(self, group: str, member: str, again: Iterable[Again], positions: Mapping[Partition, int]) -> None:
        """Note that a member has these messages in hand, shown with these positions of its partitions."""
        for message, _ in again:
            place = message.topic, message.partition
            hand = Hand(member, positions[place])
            self._groups.in_hand.take(group, place, message.offset, hand)

    def take_back(self, group: str, again: Iterable[Again]) -> None:
        """Note that the member has not got these messages: they are due again."""
        for message, _ in again:
            self._groups.in_hand.give_back(group, (message.topic, message.partition), message.offset)


class _Letters:
    """The gateway's way of dead letters to the broker: one connection, used by one request at a time, in a thread."""

    def __init__(self) -> None:
        self._box: Letterbox | None = None
        self._order = asyncio.Lock()

    async def put(self, message: Message, dlq: str, failure: Failure) -> None:
        """Store a letter. Raises RequestRefused."""
        async with self._order:
            box = self._box = self._box or Letterbox(_WINDOW, _producer)
            try:
                await asyncio.to_thread(box.put, message, dlq, failure)
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
