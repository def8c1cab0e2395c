"""The partitions of one subscription, and its fetches.

Pull        Nothing is sent that was not asked for: each fetch is answered by one batch of one partition. The partitions
            take turns.
Again       What was given back comes before new messages, one a batch (kmq/gateway/groups/redelivery.py). A fetch that
            waits, or follows an empty answer, says that the client has come back from all it was given.
Order       Fetches are answered in order. A response is written whole before the next one.
Invariant   After `revoke` no batch of that partition is sent. After `sought` none from before it is sent. Both put
            another cursor, or none, in the place of the one that is being read.
Memory      At most _MOST_FETCHES fetches wait. One batch is read at a time (reading.py), and released when it is written.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.groups.in_hand import NEVER
from kmq.gateway.groups.redelivery import Again, Reader, Turn
from kmq.gateway.grpc import values
from kmq.gateway.grpc.calls import Call
from kmq.gateway.grpc.reading import Reading
from kmq.gateway.grpc.schema import KMQ
from kmq.log.damage import DamageError
from kmq.message.message import Message
from kmq.wire.requests import Position, TopicPartition

_MOST_FETCHES = 64
_LOOK_AGAIN_S = 0.5  # until partitions are looked at that had to wait
_MOST_WAIT_MS = 300_000
_Response, _Batch = KMQ.messages["SubscribeResponse"], KMQ.messages["Batch"]


class Out:
    """The responses of a stream, one after another."""

    def __init__(self, write: Callable[[Any], Awaitable[None]]) -> None:
        self._write = write
        self.turn = asyncio.Lock()

    async def say(self, request_id: int = 0, **response: Any) -> None:
        """Write a response, after the one that is being written."""
        async with self.turn:
            await self.write(request_id, **response)

    async def write(self, request_id: int, **response: Any) -> None:
        """Write a response. The caller has `turn`."""
        await self._write(_Response(request_id=request_id, **response))


class _Fetch(NamedTuple):
    request_id: int
    limit: Limit
    until: float
    places: Collection[TopicPartition]


class Deliveries:
    """`cursors`: the assigned partitions, in the order of their turns."""

    def __init__(self, core: Core, reading: Reading, call: Call, out: Out, reader: Reader | None) -> None:
        """`reader`: what the group says is to be read next; None: nothing comes again."""
        self._core, self._reading, self._call, self._out, self._reader = core, reading, call, out, reader
        self.cursors: dict[TopicPartition, Cursor] = {}
        self._waiting: deque[_Fetch | None] = deque()  # None: the last one is in front of it
        self._has_fetch, self._changed = asyncio.Event(), asyncio.Event()
        self._is_ending = False
        self._was_empty = True  # the last answer

    # --- the partitions ----------------------------------------------------------------------------------------------

    async def assign(self, places: Iterable[tuple[str, int]], committed: Mapping[tuple[str, int], int]) -> None:
        """Make these the partitions: those that stay go on, the others begin at their committed offsets.

        A cursor of a topic that was deleted does not stay: the topic that has its name now is another one.
        """
        known = dict(self.cursors)
        stay, opened = await self._core.fetching.run(self._open, [TopicPartition(*p) for p in places], known, committed)
        self.cursors = {place: cursor for place, cursor in self.cursors.items() if place in stay} | opened
        self._changed.set()

    def _open(
        self,
        places: Iterable[TopicPartition],
        known: Mapping[TopicPartition, Cursor],
        committed: Mapping[tuple[str, int], int],
    ) -> tuple[set[TopicPartition], dict[TopicPartition, Cursor]]:
        """Return the partitions that stay, and new cursors, in a thread.

        What is gone already is in neither: the coordinator will hear of it.
        """
        stay: set[TopicPartition] = set()
        opened: dict[TopicPartition, Cursor] = {}
        for place in places:
            if place in known and known[place].partition.is_current():
                stay.add(place)
                continue
            try:
                partition = self._core.partitions.open(*place)
                offset = partition.nearest(committed.get(place, 0))
            except DamageError:
                offset = committed.get(place, 0)  # the first fetch says what is damaged
            except RequestRefused as err:
                if err.code not in ("unknown_topic", "unknown_partition"):
                    raise
                continue
            opened[place] = Cursor(partition, offset)
        return stay, opened

    def revoke(self, places: Iterable[tuple[str, int]]) -> None:
        """Send nothing more of these partitions."""
        for place in places:
            self.cursors.pop(TopicPartition(*place), None)
        self._changed.set()

    async def seek(self, place: TopicPartition, position: Position) -> int:
        """Go on at that position. Returns its offset."""

        def located() -> Cursor:
            partition = self._core.partitions.open(*place)
            return Cursor(partition, partition.locate(position))

        self._check([place])
        cursor = await self._core.fetching.run(located)
        self._check([place])  # it may have been revoked meanwhile
        self.cursors[place] = cursor
        self._changed.set()
        return cursor.offset

    def _check(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            if place not in self.cursors:
                raise RequestRefused("unknown_partition", f"{place} is not assigned to this member")

    # --- fetches -----------------------------------------------------------------------------------------------------

    def ask(self, request_id: int, given: Any) -> None:
        """Let a FetchBatch wait for its turn. Raises RequestRefused."""
        limit, places = values.limit(given, _MOST_WAIT_MS), values.places(given.partitions)
        self._check(places)
        if len(self._waiting) >= _MOST_FETCHES:
            raise RequestRefused("too_many", f"{_MOST_FETCHES} fetches of this stream wait already")
        self._waiting.append(_Fetch(request_id, limit, time.monotonic() + limit.wait_s, {*places}))
        self._has_fetch.set()

    def finish(self, at_once: bool) -> None:
        """No fetch comes any more. `at_once`: those that wait are answered now, without messages."""
        self._is_ending |= at_once
        self._waiting.append(None)
        self._has_fetch.set()
        self._changed.set()

    async def serve(self) -> None:
        """Answer the fetches, until the last one is answered."""
        with self._reader.watch(self._changed) if self._reader else nullcontext():
            await self._serve()

    async def _serve(self) -> None:
        while True:
            await self._has_fetch.wait()
            while self._waiting:
                fetch = self._waiting[0]
                if fetch is None:
                    return
                try:
                    await self._answer(fetch)
                except RequestRefused as err:
                    await self._out.say(fetch.request_id, error=values.error(err))
                self._waiting.popleft()
            self._has_fetch.clear()

    async def _answer(self, fetch: _Fetch) -> None:
        while not self._is_ending:
            self._changed.clear()
            cursors = [cursor for place, cursor in self.cursors.items() if not fetch.places or place in fetch.places]
            if fetch.places and not cursors:
                break  # all of them were revoked
            turn = await self._turn(fetch, cursors)
            if turn.again and await self._deliver_again(fetch, turn.again[0]):
                return
            fresh = []
            for cursor in cursors:
                if (skips := turn.skips(_place(cursor))) is None or turn.again:
                    continue
                cursor.skips = skips
                fresh.append(cursor)
                if await self._deliver(fetch, cursor):
                    return
            if self._changed.is_set() or turn.again:
                continue  # what was read was not wanted any more
            if not await self._wait(fetch, cursors, fresh):
                break
        self._was_empty = True
        await self._out.say(fetch.request_id, batch=_Batch())

    async def _turn(self, fetch: _Fetch, cursors: Iterable[Cursor]) -> Turn:
        if self._reader is None or not self._reader.has_turns:
            return Turn([])
        positions: dict[tuple[str, int], int] = {_place(cursor): cursor.offset for cursor in cursors}
        is_idle = fetch.limit.wait_s > 0 or self._was_empty
        return await self._reader.turn(positions, Limit(1, fetch.limit.nbytes), is_idle)

    async def _wait(self, fetch: _Fetch, cursors: Sequence[Cursor], fresh: Sequence[Cursor]) -> bool:
        """Wait for news of those that are `fresh`, or until something is due. Return False if the time is up."""
        due_s = NEVER if len(fresh) == len(cursors) else _LOOK_AGAIN_S
        if self._reader is not None and self._reader.has_turns:
            due_s = min(due_s, self._reader.wait_s({_place(cursor): cursor.offset for cursor in cursors}))
        until = min(fetch.until, time.monotonic() + due_s)
        is_news = await self._core.fetching.wait(fresh, until, self._changed, lambda: False)
        return is_news or (until < fetch.until and not self._core.fetching.is_stopping)

    async def _deliver_again(self, fetch: _Fetch, again: Again) -> bool:
        """Answer a fetch with a message that comes again. Return False if its partition was revoked meanwhile."""
        assert self._reader is not None
        place = TopicPartition(*again.place)
        cursor = self.cursors.get(place)
        async with self._out.turn:
            if cursor is None or not self._take_turn(place, cursor):
                self._reader.take_back([again])
                return False
            cursor.move(again.position)
            self._was_empty = False
            batch = _Batch(topic=place.topic, partition=place.partition, again=True)
            batch.next_offset, batch.end_offset = cursor.offset, max(cursor.end, cursor.offset)
            values.fill(batch.records, [again.message])
            batch.records[0].deliveries = again.deliveries
            await self._out.write(fetch.request_id, batch=batch)
        return True

    async def _deliver(self, fetch: _Fetch, cursor: Cursor) -> bool:
        """Answer a fetch with messages of this partition. Return False if there are none."""
        place = _place(cursor)
        if not cursor.has_news():
            return False

        def shape(found: list[Message]) -> tuple[Any, int]:
            batch = _Batch(topic=place.topic, partition=place.partition)
            batch.next_offset, batch.end_offset = cursor.offset, cursor.end
            return batch, values.fill(batch.records, found)

        try:
            count, batch = await self._reading.read(self._call, cursor, fetch.limit, shape)
        except RequestRefused:
            self._take_turn(place, cursor)
            raise
        try:
            if not count:
                return False
            async with self._out.turn:
                if not self._take_turn(place, cursor):
                    return False  # revoked or sought meanwhile, which has set _changed
                self._was_empty = False
                if self._reader is not None:
                    self._reader.read({place: cursor.offset})
                await self._out.write(fetch.request_id, batch=batch)
            return True
        finally:
            self._reading.release(self._call)

    def _take_turn(self, place: TopicPartition, cursor: Cursor) -> bool:
        """Let the other partitions go first at the next fetch. Return False if this cursor is not in force any more."""
        if self.cursors.get(place) is not cursor:
            return False
        self.cursors[place] = self.cursors.pop(place)
        return True


def _place(cursor: Cursor) -> TopicPartition:
    return TopicPartition(cursor.partition.topic, cursor.partition.number)
