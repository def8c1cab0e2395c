"""Fetch, ListOffsets and OffsetForLeaderEpoch: the records of partitions as batches, and their offsets.

    Fetch of orders/0 from offset 17    → high watermark 20, one batch with the records 17 to 19
    steps: in the cache: answer → look at the partitions → no records: wait → read → answer

Invariant   A record that is shown is in its partition, so it is durable, routed and, in a shard, committed
            (core/partitions.py). No answer says that an offset is out of range while a later end may be known, because
            consumers would begin anew. A partition that cannot be read is an error of its own, and the others are
            served.
Wait        A waiting fetch is woken by the kernel (core/fetching.py). A partition without an event since the last look
            is not looked at again. An error that the last answer had does not end a wait: a client that repeats its
            fetch is answered when its time is up.
Memory      An answer has at most bodies.MAX_ANSWER, or one batch that is longer. Batches are made of _CHUNK_BYTES of
            lines. All answers count in the budget of all doors until their clients have taken them; a waiting fetch
            holds nothing. At most _MOST_VIEWS partitions are remembered, of all connections.
Not covered Sessions: every answer says session 0, so clients name all their partitions each time. Followers' fetches.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from kmq.broker.stats import Incidents
from kmq.config.values import KIB, MIB
from kmq.gateway.core.answers import COPIES, BudgetHolder
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.cold import ColdObject
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Waiter
from kmq.gateway.core.metrics import Requests as RequestCounts
from kmq.gateway.core.partitions import Partition, Signature
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.bodies import MAX_ANSWER, UNKNOWN, FetchRequest, Row, fetch_response, read_fetch
from kmq.gateway.kafka.cache import KeptBatch, TailCache
from kmq.gateway.kafka.connection import Call, Connection, Handler
from kmq.gateway.kafka.records import encode, patched
from kmq.gateway.kafka.topic_ids import TopicIds
from kmq.gateway.kafka.wire import ErrorCode, Fields, KafkaRefused, Key
from kmq.log import gaps
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.gaps import Gaps
from kmq.log.rows import NotHereError
from kmq.message.record import count_lines
from kmq.wire.requests import TopicPartition

_FEW = 16  # partitions that are looked at in the event loop
_MOMENT_S = 1.0  # a known end may be this old in an answer
_CHUNK_BYTES = MIB  # of lines that become a batch
_ENOUGH_BYTES = 512 * KIB  # less room than this is not worth another batch: small ones cost more a record
_PIECE_BYTES = 64 * KIB  # given to the transport at once
_REST_S = 5.0  # until an unreadable offset is read again
_MOST_VIEWS = 20_000
_WITH_SIZE = 3  # numbers of the signature of a partition that has a segment
_SPARE_WATCHES = 64  # directories that a connection may watch besides those that it asks for
_ZSTD_FROM = 10  # version of Fetch whose clients know zstd
_LATEST, _EARLIEST, _HIGHEST = -1, -2, -3  # times of ListOffsets: an end of the partition, and its highest time
T = TypeVar("T")


class _PartitionView:
    """A partition as a connection reads it. `first` and `end`: as its files were `seen`; `end` may have risen."""

    __slots__ = (
        *("cold", "damage", "directory", "end", "first", "gaps", "needs", "offset"),
        *("partition", "rests_until", "seen", "seen_at"),
    )

    def __init__(self, partition: Partition, offset: int) -> None:
        self.partition, self.directory, self.offset = partition, partition.directory, offset
        self.first = self.end = UNKNOWN
        self.seen: Signature | None = None
        self.damage: DamageError | None = None
        self.needs: NotHereError | None = None  # what the last read lacked, until it is asked for
        self.cold: ColdObject | None = None  # what is being fetched in
        self.gaps: Gaps = ()
        self.rests_until = self.seen_at = 0.0

    def move(self, offset: int) -> None:
        if offset != self.offset:
            self.offset, self.rests_until, self.cold = offset, 0.0, None

    def look(self) -> None:
        """Find the beginning and end of the partition. Raises DamageError; RequestRefused if its topic was deleted."""
        seen, self.seen_at = self.partition.signature(), time.monotonic()
        if seen != self.seen:
            self.partition.check()
            try:
                self.gaps = self.partition.gaps()
                self.first, self.end = self.partition.bounds()
            except DamageError as err:
                self.rest(err)
                raise
            self.seen = seen

    def resumed(self, offset: int) -> int:
        """Return the offset at which a client at `offset` resumes: after the gap in which it lies, else there."""
        return gaps.passed(self.gaps, offset) if self.gaps else offset

    def rest(self, damage: DamageError) -> None:
        """Pause reading. A misplaced record is retried at once, because the router may be writing its index."""
        if not isinstance(damage, MisplacedError):
            self.damage, self.rests_until = damage, time.monotonic() + _REST_S

    def begins_as_seen(self) -> bool:
        """Return True if it is still the same partition, with the same beginning as a moment ago. Reads no file."""
        if self.seen is None or time.monotonic() - self.seen_at > _MOMENT_S:
            return False
        now, seen = self.partition.signature(), self.seen
        is_same = len(now) == _WITH_SIZE and now[:-1] == seen[:-1] and now[-1] >= seen[-1]
        return is_same and self.partition.is_current()

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self.rests_until

    def growth(self) -> int:
        """Return how many bytes the partition has grown since it was seen. A new segment counts as a whole answer."""
        if self.cold is not None:
            return MAX_ANSWER if self.cold.has_news() else 0
        now, seen = self.partition.signature(), self.seen
        if now == seen or self.is_resting:
            return 0
        if seen is None or now[:-1] != seen[:-1] or len(now) != _WITH_SIZE or now[-1] < seen[-1]:
            return MAX_ANSWER
        return now[-1] - seen[-1]


class _Row(Row):
    """A partition's part of the answer, and the partition as the connection sees it."""

    __slots__ = ("view",)

    def __init__(self, code: ErrorCode = ErrorCode.none, view: _PartitionView | None = None) -> None:
        first, end = (UNKNOWN, UNKNOWN) if view is None else (view.first, view.end)
        super().__init__(code, first, end)
        self.view = view

    def has_records(self, offset: int) -> bool:
        """Return True if there are records at or after `offset`."""
        return self.code == ErrorCode.none and (self.view.resumed(offset) if self.view else offset) < self.end


Rows = dict[TopicPartition, _Row]


class _Consumer(BudgetHolder):
    """A connection that fetches: its partitions, its wake-up event, and the errors of its last answer."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self.event = asyncio.Event()
        self.waiter = Waiter(self.event)
        self.views: dict[TopicPartition, _PartitionView] = {}
        self.counted = 0  # how many of them are counted in `FetchHandler._view_count`
        self.errors: dict[TopicPartition, ErrorCode] = {}

    def end(self, why: str) -> None:
        self.why_ended = why
        self._connection.force_close()

    def is_quiet(self, place: TopicPartition) -> bool:
        """Return True if a partition has had no event since the last look."""
        view = self.views.get(place)
        return view is not None and view.seen is not None and self.waiter.is_quiet(view.directory)

    def is_behind(self, place: TopicPartition, offset: int) -> bool:
        """Return True if the record at `offset` was there a moment ago, and the partition has not changed."""
        view = self.views.get(place)
        return view is not None and view.first <= view.resumed(offset) < view.end and view.begins_as_seen()

    def finds(self, cache: TailCache, place: TopicPartition, offset: int) -> bool:
        """Return True if the cache has a batch that holds the record at `offset`."""
        view = self.views.get(place)
        return view is not None and cache.find(*place, view.resumed(offset), view.partition.from_seq) is not None

    def may_have(self, place: TopicPartition, offset: int) -> bool:
        """Return False if a partition had no record at or after `offset` at the last look."""
        view = self.views.get(place)
        return view is None or view.resumed(offset) < view.end

    def resumed(self, place: TopicPartition, offset: int) -> int:
        """Return the offset at which a fetch of `offset` resumes, as far as the partition is known."""
        view = self.views.get(place)
        return offset if view is None else view.resumed(offset)

    async def send(self, answer: wire.Writer) -> None:
        """Send an answer; returns when the client has taken most of it. Raises ConnectionError."""
        for part in answer.pieces(_PIECE_BYTES):
            view = memoryview(part)
            for begin in range(0, len(part), _PIECE_BYTES):
                self.since = time.monotonic()
                await self._connection.write(view[begin : begin + _PIECE_BYTES])
        self.since = 0.0


class FetchHandler:
    """Fetch requests and offset queries of all connections."""

    def __init__(
        self,
        core: Core,
        ids: TopicIds,
        cache: TailCache,
        counts: RequestCounts,
        incidents: Incidents,
        epoch: Callable[[], int],
    ) -> None:
        self._core, self._ids, self._cache, self._counts, self._incidents = core, ids, cache, counts, incidents
        self._partitions, self._epoch = core.partitions, epoch
        self._consumers: OrderedDict[Connection, _Consumer] = OrderedDict()  # least recently served first
        self._view_count = 0  # of all consumers
        self.handlers: dict[Key, Handler] = {
            Key.FETCH: self.fetch,
            Key.LIST_OFFSETS: self._list_offsets,
            Key.OFFSET_FOR_LEADER_EPOCH: self._offset_for_leader_epoch,
        }

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        consumer = self._consumers.pop(connection, None)
        if consumer is not None:
            self._core.waking.forget(consumer.waiter)
            self._view_count -= consumer.counted
            consumer.close()

    async def close(self) -> None:
        """End. The threads that read files belong to the core."""

    # --- Fetch -------------------------------------------------------------------------------------------------------

    async def fetch(self, call: Call) -> bytes | None:
        """Answer a Fetch: with the records that are there, or when there are enough, or when its time is up."""
        request = read_fetch(call.body, call.version)
        if request.is_incremental:
            return fetch_response(call, {}, ErrorCode.fetch_session_id_not_found).frame()
        if request.ids:
            request = await self._named(request)
        consumer = self._consumer(call.connection, len(request.partitions))
        try:
            rows = await self._rows(call, consumer, request)
            call.errors.extend(consumer.errors.values())
            await consumer.send(fetch_response(call, rows, ids=request.ids))
        finally:
            consumer.close()
        return None

    async def _named(self, request: FetchRequest) -> FetchRequest:
        """Replace the topic ids of a request by names. An unknown topic keeps its id as its name."""
        names = {text: await self._ids.topic(id) or text for text, id in request.ids.items()}
        partitions = {TopicPartition(names[topic], number): row for (topic, number), row in request.partitions.items()}
        return request._replace(partitions=partitions, ids={names[text]: id for text, id in request.ids.items()})

    def _consumer(self, connection: Connection, count: int) -> _Consumer:
        consumer = self._consumers.get(connection)
        if consumer is None:
            consumer = self._consumers[connection] = _Consumer(connection)
        self._consumers.move_to_end(connection)
        if len(consumer.waiter.watches) > count + _SPARE_WATCHES:
            self._core.waking.forget(consumer.waiter)
            consumer.waiter = Waiter(consumer.event)
        return consumer

    async def _rows(self, call: Call, consumer: _Consumer, request: FetchRequest) -> Rows:
        """Return the records once there are enough, or the time is up."""
        until, is_first = time.monotonic() + request.wait_s, True
        while True:
            positions = [(place, consumer.resumed(place, part.offset)) for place, part in request.partitions.items()]
            if not any(consumer.may_have(place, offset) for place, offset in positions):
                await self._cache.wait(positions, until - time.monotonic())
            is_over = time.monotonic() >= until
            if cached := await self._cached_rows(call, consumer, request):
                return cached
            rows = await self._looked_at(call, consumer, request, is_first)
            nbytes, is_first = 0, False
            wanted = [part for place, part in request.partitions.items() if rows[place].has_records(part.offset)]
            if wanted:
                most = min(request.max_bytes, MAX_ANSWER, sum(part.max_bytes for part in wanted))
                try:
                    await self._core.answers.reserve(consumer, most + COPIES * _CHUNK_BYTES)
                except RequestRefused:  # the answers' budget is used up: this answer is empty
                    return rows
                nbytes, is_full = await self._core.fetching.run(self._read, call, request, rows)
                self._core.answers.settle(consumer, nbytes)
                is_over |= is_full
                self._ask_for_cold(rows, is_over)
            before = consumer.errors
            consumer.errors = {place: row.code for place, row in rows.items() if row.code != ErrorCode.none}
            is_new = any(before.get(place) != code for place, code in consumer.errors.items())
            if is_over or is_new or nbytes >= request.min_bytes:
                return rows
            consumer.close()
            partitions = [row.view for row in rows.values() if row.view is not None]
            if not await self._wait(consumer, partitions, until, request.min_bytes - nbytes) and not nbytes:
                self._ask_for_cold(rows, is_over=True)
                return rows
            del rows

    def _ask_for_cold(self, rows: Rows, is_over: bool) -> None:
        """Have what lies in KMQ_TIER fetched in. Its partitions are empty until the wait of the fetch is over.

        Then they have an error if the store has failed: an empty answer would only be repeated.
        """
        for row in rows.values():
            view = row.view
            if view is not None and view.needs is not None:
                view.cold, view.needs = self._core.cold.want(view.needs), None
            if is_over and view is not None and view.cold is not None and view.cold.failure and not row.records:
                row.code = ErrorCode.kafka_storage_error

    async def _cached_rows(self, call: Call, consumer: _Consumer, request: FetchRequest) -> Rows | None:
        """Return cached batches if they answer the request; None if files must be read.

        Uses no thread, because a thread waits long for its turn while producers keep the gateway busy. A consumer that
        waits for two threads in each fetch falls behind the cache, and reading lines costs it ten times as much.
        """
        parts = request.partitions
        if len(parts) > _FEW or not any(
            consumer.finds(self._cache, place, each.offset) for place, each in parts.items()
        ):
            return None
        with suppress(RequestRefused):  # then files are read, and refused again if need be
            most = min(request.max_bytes, MAX_ANSWER, sum(each.max_bytes for each in parts.values()))
            await self._core.answers.reserve(consumer, most + COPIES * _CHUNK_BYTES)
            rows, nbytes = self._rows_in_cache(call, consumer, request)
            if nbytes >= max(1, request.min_bytes):
                self._core.answers.settle(consumer, nbytes)
                consumer.errors = {}
                return rows
        consumer.close()
        return None

    def _rows_in_cache(self, call: Call, consumer: _Consumer, request: FetchRequest) -> tuple[Rows, int]:
        """Return each partition's cached records, and their bytes. Return nothing if one may have lines instead."""
        rows, nbytes, left = Rows(), 0, min(request.max_bytes, MAX_ANSWER)
        for place, part in request.partitions.items():
            view, id = consumer.views.get(place), request.ids.get(place.topic)
            if view is None or view.is_resting:
                return Rows(), 0
            if id is not None and id != self._ids.of_life(place.topic, view.partition.from_seq):
                return Rows(), 0
            code, is_same = self._tried(call, place, part.epoch, view.begins_as_seen)
            if code != ErrorCode.none or not is_same:
                return Rows(), 0
            view.move(part.offset)
            most = min(part.max_bytes, left)
            offset = view.resumed(part.offset)
            records = self._records(view, offset, most, not nbytes, call.version, has_lines=False)
            has_none = not records and self._find_cached(view, offset, call.version) is None  # else it lacks room
            if has_none and (offset != view.end or view.growth()):
                return Rows(), 0
            view.end = max(view.end, self._cache.end(place) or 0)
            row = rows[place] = _Row(view=view)
            row.records, found = records, sum(map(len, records))
            nbytes, left = nbytes + found, left - found
        return rows, nbytes

    async def _looked_at(self, call: Call, consumer: _Consumer, request: FetchRequest, is_first: bool) -> Rows:
        """Return the state of the requested partitions, without records. `is_first`: the request has not waited yet."""
        parts = request.partitions
        if all(map(consumer.is_quiet, parts)):
            return self._look(call, consumer, request)  # reads no files
        few = parts.items() if is_first and len(parts) <= _FEW else ()
        if few and all(consumer.is_behind(place, each.offset) for place, each in few):
            return self._look(call, consumer, request, are_known=True)
        rows = await self._core.fetching.run(self._look, call, consumer, request)
        self._view_count += len(consumer.views) - consumer.counted
        consumer.counted = len(consumer.views)
        while self._view_count > _MOST_VIEWS:
            oldest = next(each for each in self._consumers.values() if each.counted)
            self._view_count -= oldest.counted
            oldest.counted, oldest.views = 0, {}
        return rows

    async def _wait(self, consumer: _Consumer, partitions: list[_PartitionView], until: float, missing: int) -> bool:
        """Wait until they have grown by about `missing` bytes, or the time is up. Return True if any has grown."""
        grown: dict[str, int] = {}

        def look(view: _PartitionView) -> bool:
            grown[view.directory] = nbytes = view.growth()
            return nbytes > 0 and is_enough()

        def is_enough() -> bool:
            return sum(grown.values()) >= missing

        looks = {view.directory: partial(look, view) for view in partitions}
        try:
            while not is_enough():
                if not await self._core.waking.next_news(consumer.waiter, looks, until - time.monotonic()):
                    break
                consumer.event.clear()
        except RequestRefused as err:
            raise ConnectionAbortedError("the gateway stops") from err
        has_grown = [directory for directory, nbytes in grown.items() if nbytes]
        for directory in has_grown:
            consumer.waiter.look_again(directory)
        return bool(has_grown)

    # --- looking and reading, in threads -----------------------------------------------------------------------------

    def _look(self, call: Call, consumer: _Consumer, request: FetchRequest, are_known: bool = False) -> Rows:
        """Return the beginning and end of each partition, or its error. `are_known`: they are as a moment ago."""
        rows = Rows()
        for place, part in request.partitions.items():
            work = self._look_at, consumer, place, part.offset, request.ids.get(place.topic), are_known
            code, row = self._tried(call, place, part.epoch, *work)
            rows[place] = _Row(code) if row is None else row
        return rows

    def _tried(
        self, call: Call, place: TopicPartition, epoch: int, work: Callable[..., T], *arguments: object
    ) -> tuple[ErrorCode, T | None]:
        """Return the result of work on a partition, or its error. `epoch`: of the leader as the client knows it."""
        if not call.may(Key(call.header.key)):
            return ErrorCode.topic_authorization_failed, None
        if epoch not in (UNKNOWN, self._epoch()):
            is_old = epoch < self._epoch()
            return (ErrorCode.fenced_leader_epoch if is_old else ErrorCode.unknown_leader_epoch), None
        try:
            return ErrorCode.none, work(*arguments)
        except RequestRefused as err:
            return wire.code_of(err), None
        except DamageError as err:
            if isinstance(err, MisplacedError) and not self._core.watermark.is_followed:
                return ErrorCode.not_leader_or_follower, None  # the router may be about to write its index
            if self._core.fetching.damaged.note(err):
                self._incidents.note("kafka_not_read", call.connection.peer, f"{place}: {err}")
            return ErrorCode.kafka_storage_error, None

    def _look_at(
        self, consumer: _Consumer, place: TopicPartition, offset: int, id: UUID | None, is_known: bool
    ) -> _Row:
        """Look at a partition, unless it is known to be unchanged. `id`: the topic id of the request.

        Raises RequestRefused, DamageError.
        """
        if id is not None and place.topic == str(id):
            raise KafkaRefused(ErrorCode.unknown_topic_id, f"no topic has the id {id}")
        is_quiet = consumer.is_quiet(place)
        view = consumer.views.get(place)
        if view is not None:
            view.move(offset)
            if view.is_resting and view.damage is not None:
                raise view.damage
            try:
                # The client may know an end whose event has not arrived here yet.
                if not is_known and (offset > view.end or not is_quiet):
                    view.look()
            except RequestRefused as err:
                if err.code != "unknown_topic":
                    raise
                view = None  # it was deleted, and perhaps declared again
        if view is None:
            consumer.views.pop(place, None)
            view = consumer.views[place] = _PartitionView(self._partitions.open(*place), offset)
            view.look()
        if id is not None and id != self._ids.of_life(place.topic, view.partition.from_seq):
            del consumer.views[place]
            raise KafkaRefused(ErrorCode.unknown_topic_id, f"topic {place.topic} was made again, and has another id")
        row = _Row(view=view)
        if not view.first <= view.resumed(offset) <= view.end:
            view.partition.begin(offset)
            row.code = wire.code_of(self._out_of_range(offset, view.end))
        return row

    def _out_of_range(self, offset: int, end: int) -> RequestRefused:
        """Return the refusal of an offset out of range. Raises RequestRefused if another broker may know the offset."""
        gateway = self._core.broker.page.rows["gateway"]
        if not self._core.watermark.is_followed or gateway.state_name != "ready":
            return RequestRefused("not_ready", "the broker recovers, so first and end offset are unknown")
        if offset > end:
            self._partitions.check_ends()
        return RequestRefused("out_of_range")

    def _read(self, call: Call, request: FetchRequest, rows: Rows) -> tuple[int, bool]:
        """Fill rows with records. Return their number of bytes, and whether the room is used up."""
        nbytes, left = 0, min(request.max_bytes, MAX_ANSWER)
        for place, part in request.partitions.items():
            row = rows[place]
            if not row.has_records(part.offset) or row.view is None:
                continue
            if nbytes and left <= 0:
                break
            most = min(part.max_bytes, left)
            work = self._records, row.view, part.offset, most, not nbytes, call.version
            row.code, records = self._tried(call, place, UNKNOWN, *work)
            row.records, row.first, row.end = records or [], row.view.first, row.view.end
            found = sum(map(len, row.records))
            nbytes, left = nbytes + found, left - found
        return nbytes, left <= 0

    def _records(
        self, view: _PartitionView, offset: int, most: int, is_first: bool, version: int, has_lines: bool = True
    ) -> list[bytes]:
        """Return the batches from `offset` on, at most so many bytes. `is_first`: one batch may be larger.

        `has_lines`: also batches that must be made from lines.
        """
        found: list[bytes] = []
        while not found or most >= _ENOUGH_BYTES:
            try:
                data, following = self._batch(view, offset, most, version, has_lines)
            except NotHereError as err:
                if not found:
                    view.needs = err
                break
            except DamageError as err:
                if found:
                    break  # the next fetch reports it
                view.rest(err)
                raise
            if not data or (len(data) > most and (found or not is_first)):
                break
            found.append(data)
            most, offset = most - len(data), following
        return found

    def _batch(self, view: _PartitionView, offset: int, most: int, version: int, has_lines: bool) -> tuple[bytes, int]:
        """Return a batch that holds `offset`, and the offset after it; b"" if there is none."""
        partition, offset = view.partition, view.resumed(offset)
        topic, number = partition.topic, partition.number
        cached = self._find_cached(view, offset, version)
        if not has_lines and cached is not None:  # the files were looked at earlier
            view.end = max(view.end, cached.last + 1)
        if cached is not None and cached.last < view.end:
            self._counts.count_batch("cache")
            return patched(cached.data, cached.first, self._epoch()), cached.last + 1
        if not has_lines or offset >= view.end:
            return b"", offset
        if (cold := view.cold) is not None:
            if not cold.has_news():
                return b"", offset
            view.cold = None
            if cold.damage is not None:
                raise cold.damage
        first, lines = partition.read(offset, min(max(1, most), _CHUNK_BYTES))
        if first != offset:  # retention has deleted it, which causes no event
            view.first, view.seen = first, None
            raise self._out_of_range(offset, view.end)
        marks_from, is_receipt = self._partitions.marks_from, self._partitions.shows_receipt(topic)
        batch = encode(
            *(topic, number, first, lines),
            marks_from=marks_from,
            leader_epoch=self._epoch(),
            log_append_time=is_receipt,
        )
        self._counts.count_batch("lines")
        following = first + count_lines(lines)
        view.end = max(view.end, following)
        return batch, following

    def _find_cached(self, view: _PartitionView, offset: int, version: int) -> KeptBatch | None:
        """Return the batch as it was produced, if it is in memory and shows this client the same as its lines.

        A compacted topic is always read from its lines: compaction removes lines, and the cache does not know which.
        """
        partition, topic = view.partition, view.partition.topic
        cached = self._cache.find(topic, partition.number, offset, partition.from_seq)
        if cached is None or cached.first < view.first or (cached.is_zstd and version < _ZSTD_FROM):
            return None
        if self._partitions.shows_receipt(topic) or self._partitions.is_compacted(topic):
            return None
        return cached

    # --- ListOffsets, OffsetForLeaderEpoch ---------------------------------------------------------------------------

    async def _list_offsets(self, call: Call) -> Fields:
        turn = asyncio.Lock()

        async def look_up(place: TopicPartition, part: Any) -> Fields:
            epoch = getattr(part, "current_leader_epoch", UNKNOWN)
            work = self._tried, call, place, epoch, self._offset_at, place, part.timestamp
            try:
                code, found = await self._core.fetching.run(*work, turn=turn)
            except RequestRefused as err:  # its records lie in KMQ_TIER, which takes too long
                code, found = wire.code_of(err), None
            timestamp, offset = found or (UNKNOWN, UNKNOWN)
            row = {"partition_index": place.partition, "error_code": code, "timestamp": timestamp, "offset": offset}
            return row | {"leader_epoch": self._epoch() if offset >= 0 else UNKNOWN}

        async def of_topic(topic: Any) -> Fields:
            rows = (look_up(TopicPartition(topic.name, part.partition_index), part) for part in topic.partitions)
            return {"name": topic.name, "partitions": await asyncio.gather(*rows)}

        return {"topics": await asyncio.gather(*map(of_topic, call.body.topics))}

    def _offset_at(self, place: TopicPartition, timestamp: int) -> tuple[int, int]:
        """Return (timestamp, offset) of the first record with this time or a later one; -1 if there is none."""
        first, end = self._partitions.bounds(*place)
        if timestamp == _EARLIEST and first:
            first = self._partitions.open(*place).begin()
        if timestamp in (_EARLIEST, _LATEST):
            return UNKNOWN, first if timestamp == _EARLIEST else end
        if timestamp < 0 and timestamp != _HIGHEST:
            raise RequestRefused("bad_field", f"{timestamp} is no time")
        partition = self._partitions.open(*place)
        found = partition.highest_shown() if timestamp == _HIGHEST else partition.first_shown(timestamp)
        return found or (UNKNOWN, UNKNOWN)

    async def _offset_for_leader_epoch(self, call: Call) -> Fields:
        topics = []
        for topic in call.body.topics:
            rows = []
            for part in topic.partitions:
                place = TopicPartition(topic.topic, part.partition)
                work = self._tried, call, place, part.current_leader_epoch, self._end_of, place, part.leader_epoch
                code, found = await self._core.fetching.run(*work)
                epoch, end = found or (UNKNOWN, UNKNOWN)
                rows.append(
                    {"error_code": code, "partition": place.partition, "leader_epoch": epoch, "end_offset": end}
                )
            topics.append({"topic": topic.topic, "partitions": rows})
        return {"topics": topics}

    def _end_of(self, place: TopicPartition, epoch: int) -> tuple[int, int]:
        """Return (our epoch, end) for an epoch up to ours: shown records are never cut. (-1, -1) for a later epoch."""
        _, end = self._partitions.bounds(*place)
        return (self._epoch(), end) if 0 <= epoch <= self._epoch() else (UNKNOWN, UNKNOWN)
