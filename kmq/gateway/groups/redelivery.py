"""Redelivery: messages that members gave back are delivered again when due, or stored as dead letters.

    await redelivery.nack("etl", "orders", 0, 7, "no such user", delay_s=30)    → NackOutcome(1, 30.0, "")
    the same after the last delivery that is allowed                            → letter "orders.dlq/0@12"

Given back  A message that was given back is delivered again when due, to the member that owns its partition then
            (reader.py). A Kafka member is never redelivered a message, so no message of its partitions is given back.
            Rows from before that wait for another owner, and are lag (admin.py). If the Kafka member reads and commits
            such a message in its turn, it is done (Groups.commit).
Letters     After maxDeliveries a message is put aside as a dead letter. Its row stays until the group has committed
            past it. If the group's offset stands at the message, it moves past it by itself.

Owner       the gateway. The rows are in the store of committed offsets (offset_table.NackRow), open deliveries in
            Groups.deliveries. Both belong to the group, whatever door its members came through.
Invariant   A message that was given back is forgotten only when it is committed, or its dead letter is on disk, or the
            message is gone from its partition. Each delivery that counts is on disk before the message is shown.
Time        Rows are due by the store's clock, which runs evenly while the gateway lives, and after a start of the
            gateway by the broker's trusted clock (kmq/broker/clock.py). So a jump of the time of day delays nothing.
Crash       Between the letter and its row: the letter gets the same id on the next try, so it is stored once.
Memory      See offset_table.py: at most MAX_NACKS rows a partition. Then its new messages wait (deliveries.is_paused).
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import NamedTuple

from kmq.client.handling import Rules
from kmq.client.producer import Producer
from kmq.client.runner import Letterbox
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, bad_field, refusal_of
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Limit
from kmq.gateway.core.ingress import own_address
from kmq.gateway.core.topics import UNLIMITED
from kmq.gateway.groups.deliveries import after_letters, given_back, is_spent
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import DONE, NackRow, Partition
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.message.letters import Failure
from kmq.message.message import Message
from kmq.message.text import make_routing_key
from kmq.wire import refusals
from kmq.wire.requests import EARLIEST, Position, TopicPartition

MOST_DELAY_S = 604_800.0
MOST_REASON = 250  # characters
_REFUSED_S = 60.0  # until a refused letter is retried: an operator may have fixed the cause
_LETTER_S = 5.0  # longest wait for a dead letter to be on disk


class NackOutcome(NamedTuple):
    """The fate of a given-back message. `letter`: <topic>/<partition>@<offset>; "": it will be delivered again."""

    deliveries: int
    due_s: float  # from now on
    letter: str = ""


class DueMessage(NamedTuple):
    """A redelivered message, its number of deliveries including this one, and where its partition resumes."""

    place: TopicPartition
    message: Message
    deliveries: int
    position: int


class Redelivery:
    """Redelivery for all groups. Every method may raise RequestRefused."""

    def __init__(self, groups: Groups, core: Core) -> None:
        self.groups, self._core = groups, core
        # The connection that stores dead letters: used by one request at a time, in a thread.
        self._letterbox: Letterbox | None = None
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        async with self._turn:
            await self._close_letterbox()

    # --- giving back -------------------------------------------------------------------------------------------------

    async def nack(
        self, group: str, topic: str, partition: int, offset: int, reason: str = "", delay_s: float = 0.0
    ) -> NackOutcome:
        """Schedule a message for redelivery after a delay, or put it aside. On disk when this returns."""
        place, groups, store = (topic, partition), self.groups, self.groups.store
        if groups.describe(group) is None:
            raise RequestRefused("unknown_group", f"group {group!r}: does not exist")
        if not 0 <= delay_s <= MOST_DELAY_S:
            raise bad_field("delay", f"must be 0 to {MOST_DELAY_S:.0f} seconds")
        if len(reason) > MOST_REASON:
            raise bad_field("reason", f"must be at most {MOST_REASON} characters")
        most = await self.max_deliveries(topic)
        message = await self._read(place, offset)
        before = store.nacks(group, topic, partition).get(offset)
        if before is not None and before.letter not in ("", DONE):
            return NackOutcome(before.deliveries, 0.0, before.letter)
        row = given_back(before, store.now_s(), delay_s, reason)
        if is_spent(row, most):
            letter = await self._try_aside(group, message, row)
            return NackOutcome(row.deliveries, 0.0 if letter else _REFUSED_S, letter or "")
        await store.nack(group, topic, partition, {offset: row})
        groups.deliveries.give_back(group, place, offset)
        groups.deliveries.trust(group, place, offset)
        groups.wake(group)
        return NackOutcome(row.deliveries, row.due - store.now_s())

    async def max_deliveries(self, topic: str) -> int:
        """Return the topic's own limit; 0: no limit."""
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

    async def first(self, group: str, place: Partition, offset: int) -> Message | None:
        """Return the message at the group's offset, or the next one."""
        cursor = await self._core.fetching.open(*place, Position("offset", offset))
        cursor.is_strict = False
        _, found = await self._core.fetching.read([cursor], Limit(1, 1), lambda found: found[:1])
        self.groups.overtake(group, place, cursor.overtaken)
        return found[0] if found else None

    async def _put_aside(self, group: str, message: Message, row: NackRow) -> str:
        """Store a message as a dead letter, and let the group continue after it. Returns where the letter is."""
        store, place = self.groups.store, (message.topic, message.partition)
        now = store.now_s()
        failure = Failure(group, row.reason or "given back", row.deliveries, row.first or now, now)
        dlq = Rules().topic_of_letters(message.topic)
        if not self._core.topics.exists(dlq):  # even with KMQ_AUTO_CREATE_TOPICS=off, because KMQ writes the letter
            await self._core.topics.create(dlq, 1, {})
        seq = await self._store_letter(message, dlq, failure)
        found = await self._core.producing.place_of(dlq, make_routing_key(dlq, message.key), seq)
        letter = f"{TopicPartition(dlq, found[0])}@{found[1]}" if found else dlq
        await store.nack(group, *place, {message.offset: row._replace(letter=letter)})
        where = f"{TopicPartition(*place)}@{message.offset} of group {group}"
        if self._core.strangers is not None:
            text = f"{where} is {letter} now, after {row.deliveries} deliveries: {failure.error}"
            self._core.strangers.note("letter_stored", "", text)
        self.groups.deliveries.give_back(group, place, message.offset)
        self.groups.deliveries.trust(group, place, message.offset)
        committed = store.committed(group).get(place)
        await self.groups.forget(group, place, (), committed.offset if committed else 0)
        return letter

    async def _try_aside(self, group: str, message: Message, row: NackRow) -> str | None:
        """Put a message aside, and return where its letter is. None: the letter is refused for good, so it waits.

        Raises RequestRefused if a retry may succeed.
        """
        place, store = (message.topic, message.partition), self.groups.store
        try:
            return await self._put_aside(group, message, row)
        except RequestRefused as err:
            if refusals.find(err.code).is_retryable:
                raise
            later = row._replace(due=store.now_s() + _REFUSED_S)
            await store.nack(group, *place, {message.offset: later})
            refused, this = self.groups.deliveries.refused, (group, place, message.offset)
            if this not in refused:
                where = {"group": group, "topic": place[0], "partition": place[1], "offset": message.offset}
                effect = "the message waits, and is not delivered again; others go on"
                self._core.log.error("letter_refused", **where, code=err.code, reason=str(err), effect=effect)
            refused.add(this)
            self.groups.deliveries.give_back(group, place, message.offset)
            return None

    async def _store_letter(self, message: Message, dlq: str, failure: Failure) -> int:
        """Store a letter, and return its seq; 0: not known. Raises RequestRefused."""
        group = failure.group  # its letters are stored once whoever writes them: its members do so, too, in its window
        async with self._turn:
            if self._letterbox is not None and self._letterbox.group != group:
                await self._close_letterbox()
            box = self._letterbox = self._letterbox or Letterbox(group, _producer)
            try:
                return await asyncio.to_thread(box.put, message, dlq, failure)
            except KmqError as err:
                await self._close_letterbox()  # a refused connection is not used again
                raise refusal_of(err) from err

    async def _close_letterbox(self) -> None:
        box, self._letterbox = self._letterbox, None
        if box is not None:
            with contextlib.suppress(KmqError):
                await asyncio.to_thread(box.close)

    async def done(self, group: str, place: Partition, offset: int) -> None:
        """Note that a redelivered message was handled. If the group's offset is lower, it is not delivered as new."""
        store, deliveries = self.groups.store, self.groups.deliveries
        row, committed = store.nacks(group, *place).get(offset), store.committed(group).get(place)
        if row is None or (committed is not None and offset < committed.offset):
            await self.groups.forget(group, place, [offset])
            return
        await store.nack(group, *place, {offset: row._replace(letter=DONE)})
        deliveries.give_back(group, place, offset)
        deliveries.trust(group, place, offset)
        await self._pass(group, place)

    async def _pass(self, group: str, place: Partition) -> None:
        """Move the group's offset past messages that were put aside, if it stands at one.

        While another commit is being written the offset stays, and the next commit moves it. The rows also stay until a
        member has committed past them, because the member may still be before them.
        """
        start = await self._core.fetching.open(*place, EARLIEST)  # where a group without a commit stands
        store = self.groups.store
        committed = store.committed(group).get(place)
        begin = committed.offset if committed else start.offset
        offset = after_letters(store.nacks(group, *place), begin)
        if offset > begin and not store.is_writing(group):
            moved = (
                OffsetCommit(offset, committed.metadata, committed.leader_epoch) if committed else OffsetCommit(offset)
            )
            await store.commit(group, {place: moved}, generation=committed.generation if committed else 0)
            self.groups.coordinator.committed(group, time.monotonic())

    # --- delivering again --------------------------------------------------------------------------------------------

    async def redeliver(
        self, group: str, place: Partition, position: int, due: Iterable[int], room: Limit
    ) -> tuple[list[Message], dict[int, NackRow]]:
        """Return due messages in order, and their rows with this delivery counted. The rows are on disk.

        A message without deliveries left is put aside, a deleted one is forgotten, a damaged one waits. `position`: the
        next offset of the group's reader. Deleted messages at or after it are not counted as overtaken here.
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
                    continue  # it waits until it is repaired, and delays no other message
                if err.code != "out_of_range":
                    raise
                begin = int(err.fields["first"])
                if row is not None and offset < min(position, begin):  # otherwise compaction removed it
                    self.groups.overtake(group, place, range(offset, offset + 1), is_again=True)
                await self.groups.forget(group, place, [offset])
                continue
            if row is None:
                continue  # it was committed or put aside meanwhile
            counts = deliveries.counts(group, place, offset)
            if counts and is_spent(row, most):
                if await self._try_aside(group, message, row) is not None:
                    await self._pass(group, place)
                continue
            found.append(message)
            rows[offset] = row._replace(deliveries=row.deliveries + counts)
        await store.nack(group, *place, rows)
        return found, rows


def _producer(window: str) -> Producer:
    return Producer.local(
        own_address, window=window, retry=frozenset(), timeout_s=_LETTER_S, delivery_timeout_s=_LETTER_S
    )
