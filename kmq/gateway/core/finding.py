"""Where records are: a seq → its topic, partition and offset, from the WAL and the partition logs.

Cost        `SeqFinder`: O(log n) reads of the WAL and of one partition. The table of topics is read again when a record
            is not found by it, at most once in _TABLE_S. `PlaceFinder`: a partition is read on from where the last read
            ended, about a microsecond for each record; a lookup in its index is only needed for older records, or after
            many records that nobody asked for. Requests that come while a topic is being read are answered together by
            the next read.
Invariant   A place is returned only if the record there has that seq, so an old table of topics gives no wrong place.
Memory      At most _TAILS partitions, each with at most _READ_BYTES of records that were read and not asked for.
Not covered Records that the WAL no longer has: only an audit of all partitions could find them. A record that
            compaction, retention or a deletion has removed has no place any more.
"""

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import NamedTuple

from kmq.broker.stats import StatsPage
from kmq.config.values import KIB, MIB
from kmq.log import identity, reader, topics
from kmq.log.bounds import Bounds
from kmq.log.segment import SEQ, within
from kmq.message import record, routing
from kmq.message.routing import Table, Topic

_TABLE_S = 1.0


class RecordPlace(NamedTuple):
    topic: str
    partition: int
    offset: int


class SeqFinder:
    """The records of a data directory by seq. Reads files: call it in a thread."""

    def __init__(self, data: str, page: StatsPage) -> None:
        self._data = data
        self._numbered, self._durable, self._routed = (page.rows[name] for name in ("framer", "durability", "router"))
        self._newest = 0  # the highest seq seen: a stage that starts again shows 0 until it has recovered
        self._topics = -_TABLE_S, Table()  # when they were read last

    def is_numbered(self, seq: int) -> bool:
        """Return True if a record has been given this seq."""
        newest = max(self._newest, self._numbered.seq, self._durable.seq, self._routed.seq)
        if seq > newest:
            newest = max(newest, reader.wal(self._data).end_offset() - 1)
        self._newest = newest
        return 0 < seq <= newest

    def is_routed(self, seq: int) -> bool:
        """Return True if the router has passed this seq."""
        return self._routed.seq >= seq

    def find(self, seq: int) -> RecordPlace | None:
        """Return the place of a routed record; None if it is not in the WAL or not in its partition (any more).

        Raises DamageError if the files are damaged there.
        """
        wal = reader.wal(self._data)
        if seq < wal.first_offset:
            return None
        line = within(wal.read(seq, 1)[1], seq, seq)
        if not line:
            return None
        while True:
            read_at, table = self._topics
            found = self._find(table, record.routing_key_of(line), seq)
            if found or time.monotonic() - read_at < _TABLE_S:
                return found
            self._topics = time.monotonic(), topics.table(self._data)

    def _find(self, table: Table, routing_key: bytes, seq: int) -> RecordPlace | None:
        route = routing.resolve(table, routing_key, seq)
        if route.topic == routing.DELETED:
            return None
        name = route.topic.decode()
        partition = (table.get(route.topic) or Topic(name, 1, 0)).partition_of(route, seq)
        found = reader.partition(self._data, name, partition).find(seq, SEQ)
        return RecordPlace(name, partition, found.offset) if found and record.seq_of(found.line) == seq else None


# --- records of a known topic ----------------------------------------------------------------------------------------

_THREADS = 2
_TAILS = 256
_READ_BYTES = 64 * KIB  # read at once, and kept; more is read at once for many records
_LINE_BYTES = 256  # guess for one record; a read costs as much as a search in the block that it begins in
_FAR_BYTES = MIB  # of records that nobody asked for: from then on the index is quicker
_SEQ_OF_ROW = itemgetter(0)


class StoredPlace(NamedTuple):
    """A record of a topic. `line`: as it is stored, without newline."""

    partition: int
    offset: int
    line: bytes


Wanted = tuple[bytes, int]  # routing key, seq
Places = dict[int, StoredPlace]  # by seq


class _Tail:
    """Where the last read of a partition ended. Every record that is not behind it has at most the seq `seq`."""

    def __init__(self, log: reader.LogReader) -> None:
        self.log = log
        self.seq = 0
        self._next = -1  # offset; -1: nothing was read yet
        self._rest: list[tuple[int, int, bytes]] = []  # (seq, offset, line) that were read and not asked for

    def seek(self, seq: int) -> bool:
        """Continue at the first record of this seq or a later one. Returns False if there is none."""
        hit = self.log.find(seq, SEQ)
        self._rest = []
        if hit is not None:
            self._next, self.seq = hit.offset, seq - 1
        return hit is not None

    @property
    def is_new(self) -> bool:
        return self._next < 0

    def take(self, count: int) -> list[tuple[int, int, bytes]]:
        """Return the next records, some `count` of them; [] at the end."""
        nbytes = min(max(_READ_BYTES, count * _LINE_BYTES), _FAR_BYTES)
        rows, self._rest = self._rest, []
        lines = b"\n"
        while lines and not rows:  # what compaction has removed is a bare newline
            first, lines = self.log.read(self._next, nbytes)
            numbered = enumerate(lines.split(b"\n")[:-1], first)
            rows = [(record.seq_of(line), offset, line) for offset, line in numbered if line]
            self._next = first + lines.count(b"\n")
        if rows:
            self.seq = rows[-1][0]
        return rows

    def give_back(self, rows: list[tuple[int, int, bytes]]) -> None:
        """Keep records for the next call, unless they are too large."""
        if sum(len(line) for _, _, line in rows) <= _READ_BYTES:
            self._rest = rows
            self.seq = rows[0][0] - 1 if rows else self.seq


class PlaceFinder:
    """Finds records that the router has passed."""

    def __init__(self, data: str) -> None:
        self._data, self._bounds = data, Bounds(data)
        self._marks_from = identity.marks_from(data)
        self._threads = ThreadPoolExecutor(_THREADS, "places")
        self._tails: OrderedDict[tuple[str, int], _Tail] = OrderedDict()
        self._waiting: dict[str, list[tuple[Sequence[Wanted], asyncio.Future[Places]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def find(self, topic: str, wanted: Sequence[Wanted]) -> Places:
        """Return the places of these records of one topic; a record that is not there is left out."""
        future: asyncio.Future[Places] = asyncio.get_running_loop().create_future()
        if topic in self._waiting:
            self._waiting[topic].append((wanted, future))
        else:
            self._waiting[topic] = [(wanted, future)]
            task = asyncio.get_running_loop().create_task(self._drain(topic))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _drain(self, topic: str) -> None:
        """Answer everything that waits for this topic."""
        while batch := self._waiting[topic]:
            self._waiting[topic] = []
            everything = [each for wanted, _ in batch for each in wanted]
            error: Exception | None = None
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look, topic, everything)
            except Exception as err:  # each caller gets it
                error = err
            for wanted, future in batch:
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result({seq: found[seq] for _, seq in wanted if seq in found})
        del self._waiting[topic]

    def _look(self, name: str, wanted: Iterable[Wanted]) -> Places:
        declared = self._bounds.declaration(name)
        partitions, topic = declared.partitions, declared.topic(name, 0)
        table = Table({name.encode(): topic}, self._marks_from)
        by_partition: dict[int, list[int]] = {}
        for routing_key, seq in wanted:
            number = topic.partition_of(routing.resolve(table, routing_key, seq), seq) if partitions > 1 else 0
            by_partition.setdefault(number, []).append(seq)
        found: Places = {}
        for number, seqs in by_partition.items():
            found |= self._in_partition(name, number, sorted({*seqs}))
        missing = sorted({seq for seqs in by_partition.values() for seq in seqs} - found.keys())
        for number in range(partitions) if missing and partitions > 1 else ():
            found |= self._in_partition(name, number, missing)
        return found

    def _in_partition(self, topic: str, number: int, seqs: list[int]) -> Places:
        """Return the places of those records of `seqs`, in order, that are in this partition."""
        tail = self._tail(topic, number)
        found: Places = {}
        if (tail.is_new or seqs[0] <= tail.seq) and not tail.seek(seqs[0]):
            return found
        wanted, at, passed = {*seqs}, 0, 0
        while at < len(seqs):
            rows = tail.take(len(seqs) - at)
            if not rows:
                break
            before = len(found)
            found |= {seq: StoredPlace(number, offset, line) for seq, offset, line in rows if seq in wanted}
            at = bisect_right(seqs, rows[-1][0])
            passed = 0 if len(found) > before else passed + sum(len(line) for _, _, line in rows)
            if at == len(seqs):
                tail.give_back(rows[bisect_right(rows, seqs[-1], key=_SEQ_OF_ROW) :])
            elif passed > _FAR_BYTES and not tail.seek(seqs[at]):
                break
        return found

    def _tail(self, topic: str, number: int) -> _Tail:
        tail = self._tails.pop((topic, number), None) or _Tail(reader.partition(self._data, topic, number))
        self._tails[topic, number] = tail
        while len(self._tails) > _TAILS:
            self._tails.popitem(last=False)
        return tail
