"""Messages that members of groups gave back: they come again when they are due, or are put aside as dead letters.

Given back  A message that a member gave back is delivered again when it is due, to whoever has its partition then.
            Which one a member is given next: reader.py.
Letters     After maxDeliveries a message is put aside as a dead letter. Then it is behind the group: its row stays
            until the group has committed beyond it, and the group's offset moves over it by itself if it stands there.

Owner       the gateway. The rows are in the store of committed offsets (offset_table.NackRow), what is in hand in
            Groups.deliveries: both are the group's, whatever door its members came through.
Invariant   A message that was given back is forgotten only when it is committed, or its dead letter is on disk, or the
            message is gone from its partition. Each delivery that counts is on disk before the message is shown.
Time        Rows are due by the store's clock, which goes evenly while the gateway lives, and after a start of the
            gateway by the broker's trusted clock (kmq/broker/clock.py). So a jump of the time of day delays nothing.
Crash       Between the letter and its row: the letter has the same id the next time and is stored once.
Memory      See offset_table.py: at most MAX_NACKS rows a partition. Then its new messages wait (deliveries.is_paused).
"""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from kmq.client.handling import Rules
from kmq.client.producer import Producer
from kmq.client.runner import Letterbox
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, bad_field, refusal_of
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Limit
from kmq.gateway.core.topics import UNLIMITED
from kmq.gateway.groups.deliveries import given_back, is_spent
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import DONE, NackRow, Partition
from kmq.message.letters import Failure
from kmq.message.message import Message
from kmq.message.text import make_routing_key
from kmq.wire.requests import EARLIEST, Position, TopicPartition

MOST_DELAY_S = 604_800.0
MOST_REASON = 250  # characters
_LETTER_S = 5.0  # longest wait for a dead letter to be on disk
_WINDOW = "http"


class NackOutcome(NamedTuple):
    """What became of a message that was given back. `letter`: <topic>/<partition>@<offset>; "": it comes again."""

    deliveries: int
    due_s: float  # from now on
    letter: str = ""


class DueMessage(NamedTuple):
    """A message that is delivered again, how often it was delivered with that, and where its partition goes on."""

    place: TopicPartition
    message: Message
    deliveries: int
    position: int


class Redelivery:
    """For all groups. Every method may raise RequestRefused."""

    def __init__(self, groups: Groups, core: Core) -> None:
        self.groups, self._core = groups, core
        # The gateway's way of dead letters to the broker: one connection, used by one request at a time, in a thread.
        self._letterbox: Letterbox | None = None
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        async with self._turn:
            await self._close_letterbox()

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
        groups.deliveries.give_back(group, place, offset)
        groups.deliveries.trust(group, place, offset)
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

    async def _put_aside(self, group: str, message: Message, row: NackRow) -> str:
        """Store a message as a dead letter, and let the group go on behind it. Returns where the letter is."""
        store, place = self.groups.store, (message.topic, message.partition)
        now = store.now_s()
        failure = Failure(group, row.reason or "given back", row.deliveries, row.first or now, now)
        dlq = Rules().topic_of_letters(message.topic)
        seq = await self._store_letter(message, dlq, failure)
        found = await self._core.producing.place_of(dlq, make_routing_key(dlq, message.key), seq)
        letter = f"{TopicPartition(dlq, found[0])}@{found[1]}" if found else dlq
        await store.nack(group, *place, {message.offset: row._replace(letter=letter)})
        self.groups.deliveries.give_back(group, place, message.offset)
        self.groups.deliveries.trust(group, place, message.offset)
        committed = store.committed(group).get(place)
        await self.groups.forget(group, place, (), committed.offset if committed else 0)
        return letter

    async def _store_letter(self, message: Message, dlq: str, failure: Failure) -> int:
        """Store a letter, and return its seq; 0: not known. Raises RequestRefused."""
        async with self._turn:
            box = self._letterbox = self._letterbox or Letterbox(_WINDOW, _producer)
            try:
                return await asyncio.to_thread(box.put, message, dlq, failure)
            except KmqError as err:
                await self._close_letterbox()  # a connection that was refused is not used again
                raise refusal_of(err) from err

    async def _close_letterbox(self) -> None:
        box, self._letterbox = self._letterbox, None
        if box is not None:
            with contextlib.suppress(KmqError):
                await asyncio.to_thread(box.close)

    async def done(self, group: str, place: Partition, offset: int) -> None:
        """Note that a message which came again was handled. While it is in front of the group, it is not a new one."""
        store, deliveries = self.groups.store, self.groups.deliveries
        row, known = store.nacks(group, *place).get(offset), store.committed(group).get(place)
        if row is None or (known is not None and offset < known.offset):
            await self.groups.forget(group, place, [offset])
            return
        await store.nack(group, *place, {offset: row._replace(letter=DONE)})
        deliveries.give_back(group, place, offset)
        deliveries.trust(group, place, offset)
        await self._pass(group, place)

    async def _pass(self, group: str, place: Partition) -> None:
        """Move the group's offset over messages that are letters, or done."""
        start = await self._core.fetching.open(*place, EARLIEST)
        await self.groups.pass_letters(group, place, start.offset)

    # --- delivering again --------------------------------------------------------------------------------------------

    async def take(
        self, group: str, place: Partition, due: Iterable[int], room: Limit
    ) -> tuple[list[Message], dict[int, NackRow]]:
        """Return messages whose rows are due, in order, with their rows, in which this delivery is counted on disk.

        Those that were delivered often enough are put aside, those that are gone are forgotten, those that are damaged
        wait.
        """
        store, deliveries = self.groups.store, self.groups.deliveries
        most = await self.max_deliveries(place[0])
        found: list[Message] = []
        rows: dict[int, NackRow] = {}
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
            counts = deliveries.counts(group, place, offset)
            if counts and is_spent(row, most):
                await self._put_aside(group, message, row)
                await self._pass(group, place)
                continue
            found.append(message)
            rows[offset] = row._replace(deliveries=row.deliveries + counts)
        await store.nack(group, *place, rows)
        return found, rows


def _producer(window: str) -> Producer:
    return Producer.local(window=window, retry=frozenset(), timeout_s=_LETTER_S, delivery_timeout_s=_LETTER_S)
