"""What a consumer may read: the partitions of topics, their offsets, and records as checked bytes of the files.

Owner       None: it only reads, without a lock. Everything here reads files, so call it in a thread.
Invariant   Only durable and routed records are shown: the router writes a record to its partition after durability has
            synced it. A batch is returned only after each of its blocks was checked; it holds whole lines, in order.
Deletion    No offset ever means two records, also if a topic is deleted and made again (kmq/log/deletions.py). A
            partition that was opened before belongs to the deleted topic, and raises RequestRefused from then on.
Files       A batch keeps two descriptors open until `close`.
Memory      A number for each partition that was read.
Not covered Who may read, and how far a group has come.
"""

import os
import time
from contextlib import suppress

from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.core.spans import PIECE_BYTES, Range, Span
from kmq.log import deletions, reader
from kmq.log.bounds import Bounds
from kmq.log.damage import DamageError
from kmq.message import record
from kmq.wire.requests import Position

END = (1 << 63) - 1  # beyond any offset
MAX_BATCH = PIECE_BYTES  # bytes: so a batch is always one span
Signature = tuple[int, ...]


class Batch:
    """`lines` records from `offset` on, the bytes of `span`. Close it when they have been sent."""

    __slots__ = ("_range", "lines", "offset", "span")

    def __init__(self, found: Range, offset: int, lines: int, span: Span) -> None:
        self._range, self.offset, self.lines, self.span = found, offset, lines, span

    @property
    def next_offset(self) -> int:
        return self.offset + self.lines

    def close(self) -> None:
        self._range.close()


def moment(position: Position) -> Position:
    """Return a position for later. `latest` is the time now: damage hides the end, and what comes from now on is meant."""
    return Position("time", time.time_ns() // 1000) if position.kind == "latest" else position


class Partition:
    """One partition of a topic. One thread at a time may use it."""

    def __init__(self, owner: "Partitions", topic: str, number: int) -> None:
        self.topic, self.number = topic, number
        self._owner, self._from_seq = owner, owner.from_seq(topic)
        self._log = reader.partition(owner.data, topic, number)
        self._active: tuple[Signature, str] = ((), "")  # signature of the directory, path of the active segment

    @property
    def directory(self) -> str:
        return self._log.directory

    def signature(self) -> Signature:
        """Return numbers that change when records are added. Cheap. Take it before a read that may find nothing."""
        with suppress(FileNotFoundError):
            found = os.stat(self.directory)
            seen = found.st_ino, found.st_mtime_ns
            if self._active[0] != seen:
                segments = self._log.segments()
                self._active = seen, segments[-1][1] if segments else ""
            if self._active[1]:
                return *seen, os.stat(self._active[1]).st_size
            return seen
        return ()

    def check(self) -> None:
        """Raise RequestRefused if the topic has been deleted since this partition was opened."""
        now = self._owner.from_seq(self.topic)
        if self._from_seq is None:
            self._from_seq = now
        if now != self._from_seq:
            raise RequestRefused("unknown_topic", f"topic {self.topic} was deleted; what has its name now is another")

    def is_current(self) -> bool:
        """Return False if the topic has been deleted since this partition was opened."""
        try:
            self.check()
        except RequestRefused as err:
            return err.code == "not_ready"
        return True

    def start(self) -> int:
        """Return the offset of the first record that is still there, or, if there is none, of the next one."""
        return min(self._log.first_offset, self.end()) if self._log.segments() else self._owner.empty_at(self)

    def end(self) -> int:
        """Return the offset that the next record gets."""
        end = self._log.end_offset() if self._log.segments() else self._owner.empty_at(self)
        self._owner.reach(self, end)
        return end

    def nearest(self, offset: int) -> int:
        """Return this offset, or the first or the end offset if it lies outside."""
        end = self.end()
        start = min(self._log.first_offset, end) if self._log.segments() else end
        return min(max(start, offset), end)

    def locate(self, position: Position) -> int:
        """Return the offset that a position means now. Raises RequestRefused for an offset beyond the end."""
        if position.kind == "earliest":
            return self.start()
        if position.kind == "latest":
            return self.end()
        if position.kind == "time":
            return self._log.offset_of_time(position.value)
        start, end = self.start(), self.end()
        if position.value > end:
            text = f"{self.topic}/{self.number}: offset {position.value} is beyond first={start} end={end}"
            raise RequestRefused("out_of_range", text, field="offset", first=start, end=end)
        return max(start, position.value)

    def range(self, start: int, end: int = END, max_bytes: int = 0) -> Range:
        """Return the records start…end-1, as far as they exist. Raises DamageError."""
        self.check()
        while True:
            with suppress(FileNotFoundError):  # retention or compaction removed a segment meanwhile: look again
                return Range(self._log, start, end, max_bytes)

    def batch(self, offset: int, max_bytes: int, most: int = END) -> Batch | None:
        """Return the next records from `offset` on: at most `max_bytes`, or one longer line. None: there are none.

        `most`: offsets at most. Records before the first offset are gone: the batch then begins at the first offset.
        Raises DamageError once all good records in front of the damage were returned.
        """
        while True:
            found = self.range(offset, min(END, offset + most), min(max_bytes, MAX_BATCH))
            try:
                span = found.take()
            except FileNotFoundError:
                found.close()
                continue
            except DamageError:
                found.close()
                raise
            if span is not None:
                batch = _cut(found, span, max_bytes)
                self._owner.reach(self, batch.next_offset)
                return batch
            found.close()
            if most == END or (first := self.start()) <= offset:
                return None
            offset = first  # more than `most` offsets are gone

    def read(self, offset: int, max_bytes: int) -> tuple[int, bytes]:
        """Return (offset of the first line, whole checked lines): as `batch` does, in memory."""
        self.check()
        first, lines = self._log.read(offset, max_bytes)
        self._owner.reach(self, first + lines.count(b"\n"))
        return first, lines


def _cut(found: Range, span: Span, max_bytes: int) -> Batch:
    """Return the batch of at most `max_bytes` at the start of `span`."""
    if span.nbytes <= max_bytes:
        return Batch(found, found.first_offset, found.reached - found.first_offset, span)
    lines = os.pread(span.fd, span.nbytes, span.begin)  # whole blocks: a small request was for less than one
    keep = lines.rfind(b"\n", 0, max_bytes) + 1 or lines.find(b"\n") + 1
    count = lines.count(b"\n", 0, keep)
    found.note_read(found.first_offset + count, span.begin + keep)
    return Batch(found, found.first_offset, count, span._replace(nbytes=keep))


class Partitions:
    """All partitions of a data directory."""

    def __init__(self, data: str) -> None:
        self.data = data
        self._bounds = Bounds(data)
        self._reached: dict[tuple[str, int], int] = {}

    def reach(self, partition: Partition, end: int) -> None:
        """Note that a partition has records up to `end`. Ends only grow, also in a second life of a topic."""
        place = partition.topic, partition.number
        if end > self._reached.get(place, 0):
            self._reached[place] = end

    def reached(self, place: tuple[str, int]) -> int:
        """Return up to which offset a partition is known to have records, without a look at its files."""
        return self._reached.get(place, 0)

    def count(self, topic: str) -> int:
        """Return how many partitions a topic has. Raises RequestRefused if there is no such topic."""
        if not (record.is_topic_name(topic) and os.path.isdir(f"{self.data}/topics/{topic}")):
            self._check_data()
            raise RequestRefused("unknown_topic", f"there is no topic {topic}; a first message makes it")
        return self._bounds.declared(topic)[0]

    def _check_data(self) -> None:
        """Raise RequestRefused if all topics are missing: then what is not there has not been deleted."""
        if not os.path.isdir(f"{self.data}/topics"):
            raise RequestRefused("not_ready", "the data directory is missing; kmq status says what to do")

    def declared(self, topic: str) -> tuple[int, int | None]:
        """Return (partitions, from_seq) of a topic that exists; from_seq is None while its declaration is pending."""
        return self._bounds.declared(topic)

    def first_count(self, topic: str) -> int:
        """Return how many partitions a topic that exists had before it grew for the first time."""
        found = self._bounds.declaration(topic)
        return found.grown[0][1] if found.grown else found.partitions

    def from_seq(self, topic: str) -> int | None:
        """Return the seq from which on the topic is in force; None while its declaration is pending."""
        self.count(topic)
        return self._bounds.declared(topic)[1]

    def open(self, topic: str, number: int) -> Partition:
        """Return a partition. Raises RequestRefused if it does not exist."""
        count = self.count(topic)
        if number >= count:
            raise RequestRefused("unknown_partition", f"topic {topic} has {count} partitions, so there is no {number}")
        return Partition(self, topic, number)

    def bounds(self, topic: str, number: int) -> tuple[int, int]:
        """Return (first offset, end offset), cached until a file changes."""
        self.count(topic)
        return self._bounds.of(topic, number)

    def empty_at(self, partition: Partition) -> int:
        """Return where a partition without segments begins."""
        self._check_data()
        return deletions.Deleted.of(self.data).first_offset(partition.topic, partition.number)
