"""Finds records by seq: their topic, partition and offset, from the WAL and the partition logs.

    SeqFinder.find(501)                                  → the place of seq 501: orders/0, offset 17
    await place_finder.find("orders", [(key, 501)])      → {501: StoredPlace(…, 17, line)}

Cost        `SeqFinder`: O(log n) reads of the WAL and of one partition. The table of topics is read again when a record
            is not found by it, at most once in _TABLE_S. `PlaceFinder`: a partition is read on from the end of the last
            read, and searched for the seqs, not line by line. Its index is only needed for older records, or after
            many records that were not asked for. Requests that arrive while a topic is being read are answered together
            by the next read.
Invariant   A place is returned only if the record there has that seq, so an old table of topics gives no wrong place.
Memory      At most _TAILS partitions, a few numbers each.
Not covered Records that the WAL no longer has: only an audit of all partitions could find them. A record that
            compaction, retention or a deletion has removed has no place any more.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from typing import NamedTuple

from kmq.broker.stats import StatsPage
from kmq.config.values import KIB, MIB
from kmq.log import gaps, identity, reader, topics
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
        self._newest = 0  # the highest seq seen, because a restarted stage shows 0 until it has recovered
        self._topics = -_TABLE_S, Table()  # when they were last read

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
_READ_BYTES = 256 * KIB  # searched at once
_FAR_BYTES = 8 * MIB  # without a record that was asked for: above this the index is faster


class StoredPlace(NamedTuple):
    """A record of a topic. `line`: as it is stored, without newline."""

    partition: int
    offset: int
    line: bytes


Wanted = tuple[bytes, int]  # routing key, seq
Places = dict[int, StoredPlace]  # by seq


class _Tail:
    """A known record near the end of a partition, from which later ones are searched in newly appended bytes.

    Invariant   The record `seq` has the offset `offset`, and its line begins at a byte of a segment: it was found
                through the index, or by counting newlines from such a record. Each search first checks that the record
                is still there, and that the count is right at the beginning of each segment, whose name is an offset.
    Cost        A search for a newline and the seq, and a count of newlines. No line is parsed or checked, because the
                router has just written them. Checking would take five times as long as all else in a produce request.
    """

    def __init__(self, log: reader.LogReader) -> None:
        self._log = log
        self._path, self._byte = "", 0
        self._offset, self._seq = 0, 0

    def find(self, seqs: list[int]) -> dict[int, tuple[int, bytes]]:
        """Return seq → (offset, line) for those of `seqs` (in rising order) that are in this partition."""
        found: dict[int, tuple[int, bytes]] = {}
        waiting = deque(seqs)
        while waiting:
            if (not self._path or waiting[0] < self._seq) and not self._seek(waiting):
                break
            try:
                if waiting and not self._search(waiting, found):
                    break
            except FileNotFoundError:  # retention has deleted the segment
                self._path = ""
        return found

    def _seek(self, waiting: deque[int]) -> bool:
        """Begin at the first record with the first waiting seq, or a later one. Returns False if there is none."""
        hit = self._log.find(waiting[0], SEQ)
        if hit is not None:
            self._path, self._byte, self._offset, self._seq = hit.path, hit.byte, hit.offset, record.seq_of(hit.line)
            while waiting and waiting[0] < self._seq:
                waiting.popleft()
        return hit is not None

    def _search(self, waiting: deque[int], found: dict[int, tuple[int, bytes]]) -> bool:
        """Find the waiting seqs from the last record on. Returns False at the end, True also to ask the index."""
        path, offset = self._path, self._offset
        while path:
            with open(path, "rb", buffering=0) as file:
                if path == self._path and self._byte:
                    file.seek(self._byte - 1)
                    if file.read(1) != b"\n":  # compaction has replaced the segment
                        self._path = ""
                        return True
                offset, is_over = self._search_file(file, path, offset, waiting, found)
            if is_over or not waiting:
                return True
            path, offset = self._segment_after(path, offset)
        return False

    def _segment_after(self, path: str, offset: int) -> tuple[str, int]:
        """Return the segment after `path`, which ends at `offset`, and its first offset; "" if it is the last one."""
        later = [(first, other) for first, other in self._log.segments() if first >= offset and other != path]
        if not later:
            return "", offset
        first, other = later[0]
        return (other, first) if first == offset or gaps.is_gap(self._log.gaps(), offset, first) else ("", offset)

    def _search_file(
        self, file: RawIOBase, path: str, offset: int, waiting: deque[int], found: dict[int, tuple[int, bytes]]
    ) -> tuple[int, bool]:
        """Search from the line at `offset` on, where the file stands. Returns the offset at its end, and if that is all."""
        is_unseen = path == self._path  # the record found last must still be there
        begin, passed, nbytes = file.tell(), 0, _READ_BYTES
        while data := file.read(nbytes):
            text = b"\n" + data[: data.rfind(b"\n") + 1]
            if len(text) == 1 and len(data) == nbytes:
                nbytes *= 2
                file.seek(begin)
                continue
            if is_unseen and not text.startswith(b"\n%d|" % self._seq):
                break  # compaction has replaced the segment
            is_unseen, at = False, 0
            last, last_at = _last_seq(text)
            while waiting and waiting[0] <= last:
                seq = waiting.popleft()
                hit = last_at if seq == last else text.find(b"\n%d|" % seq, at)
                if hit >= 0:
                    offset, at = offset + text.count(b"\n", at, hit), hit
                    found[seq] = offset, text[hit + 1 : text.index(b"\n", hit + 1)]
                    self._path, self._byte, self._offset, self._seq = path, begin + hit, offset, seq
                    passed = 0
            if not waiting or len(text) == 1:  # the rest is a line being written
                return offset, not waiting
            offset += text.count(b"\n", at + 1)
            begin += len(text) - 1
            passed += len(text)
            file.seek(begin)
            if passed > _FAR_BYTES:
                self._path = ""
                return offset, True
        if is_unseen:
            self._path = ""
        return offset, is_unseen


def _last_seq(text: bytes) -> tuple[int, int]:
    """Return the seq of the last of these lines, and the place of the newline before it; 0: compaction removed all."""
    at = text.rfind(b"\n", 0, len(text.rstrip(b"\n")))
    return (record.seq_of(text[at + 1 :]), at) if at >= 0 and b"|" in text[at:] else (0, 0)


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
        """Answer all waiting requests of this topic."""
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
        found = self._tail(topic, number).find(seqs)
        return {seq: StoredPlace(number, *place) for seq, place in found.items()}

    def _tail(self, topic: str, number: int) -> _Tail:
        # What lies in KMQ_TIER alone has no place here: an acknowledgement never waits for the store.
        tail = self._tails.pop((topic, number), None) or _Tail(reader.local(self._data, topic, number))
        self._tails[topic, number] = tail
        while len(self._tails) > _TAILS:
            self._tails.popitem(last=False)
        return tail
