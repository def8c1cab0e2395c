"""Reading a log, the WAL or a partition, while it grows, rolls and is retained: lookups and checked blocks.

    partition(data, "orders", 0).read(4711) → (4711, b"9044|1795276288.490144|orders|1795276288.485765||b\\n…")

Owner       none: read-only, needs no lock.
Invariant   Every byte that is returned was checked (segment_reader.py). Damage raises DamageError, but only after all
            good lines before it have been returned. Every hit from an index line is checked against the data: a damaged
            index line causes an error or a longer search, never a wrong result.
            Every block of an extent has the right crc; the caller counts the records. An extent may end early and not
            say why: a `read` from there continues, or raises the error.
Numbers     A record's offset is its seq in the WAL, its position in a partition. Lookups are O(log n) reads of a few
            bytes.
Live        Each call reads the directory again, and reads an open block again if it has grown or got its final index
            line since the last call. A segment that retention deletes during a read is read to its end. A read that
            begins below `first_offset` returns records from `first_offset` on, and the offset that it returns says so.
            A segment that compaction swaps is read either as it was or as it is, never as a mixture.
Rows        Of a partition, the records before the first segment may lie in the store (rows.py). They are read from what was
            fetched in, as any segment; else NotHereError says which row is needed. Offsets, lookups and cuts know them.
Gaps        A read that begins in a gap (gaps.py) returns the records after it. No result spans a gap.
"""

import contextlib
import os
from collections import namedtuple
from collections.abc import Iterator
from itertools import pairwise

from kmq.files import find_tail
from kmq.log import gaps, identity, rows, segment
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps
from kmq.log.index import IndexEntry, read_entries
from kmq.log.rows import LogRows, NotHereError
from kmq.log.segment import RECV_TS, SEQ, CheckedLines, first_at, is_stored, last_line, within
from kmq.log.segment_reader import READ_BYTES, UNKNOWN, LineStart, SegmentReader, Segments
from kmq.message import record

# --- finding a record by its seq or its time -------------------------------------------------------------------------


class FoundRecord:
    """A record, with its offset, the path of its segment, and the byte in that file."""

    __slots__ = ("byte", "line", "offset", "path")

    def __init__(self, offset: int, path: str, byte: int, line: bytes) -> None:
        self.offset, self.path, self.byte, self.line = offset, path, byte, line


def find(segments: Segments, target: int, field: int) -> FoundRecord | None:
    """Return the first record whose SEQ or RECV_TS is at least `target`. FileNotFoundError if it was deleted."""
    low, high = 0, len(segments)  # the segments before `low` begin before the target, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        if row := segments.row(middle):
            head: tuple[int, int] | None = (row.seqs[0], row.times[0])
        else:
            with segments.open(middle) as segment:
                head = segment.stamp_at(0)
        if head is not None and head[field] < target:
            low = middle + 1
        else:
            high = middle
    for number in range(max(0, low - 1), len(segments)):
        if (row := segments.row(number)) and (row.seqs[1], row.times[1])[field] < target:
            continue
        with segments.open(number) as segment:
            found = _find_in(segment, target, field)
            if found is not None and found.offset < segments.begin:
                found = next(_hits(segment, segments.begin, target, field, segments.begin), (False, None))[1]
        if found is not None:
            return found
    return None


def _find_in(segment: SegmentReader, target: int, field: int) -> FoundRecord | None:
    def is_before(entry: IndexEntry) -> bool:
        stamp = segment.stamp_at(entry.position)
        return stamp is not None and stamp[field] < target

    probe = segment.index.last(is_before)
    if probe is not None and probe.entry.offset != segment.first:
        is_first_line, found = next(_hits(segment, probe.entry.offset, target, field), (False, None))
        if not is_first_line:
            return found
        # That block should begin before the target: a damaged index led too far. Search from the beginning.
    return next(_hits(segment, segment.first, target, field), (False, None))[1]


def _hits(
    segment: SegmentReader, start: int, target: int, field: int, least: int = 0
) -> Iterator[tuple[bool, FoundRecord]]:
    """Yield (True if it is the first line read, record) for the first hit in each run of lines from `start` on.

    `least`: records before this offset are no hits.
    """
    for number, checked in enumerate(segment.checked_lines(start)):
        lines = checked.lines.split(b"\n")[:-1]
        at = first_at(lines, target, field)
        if at is not None and checked.offset < least:
            at = max(at, least - checked.offset)
        if at is not None and at < len(lines):
            offset = record.seq_of(lines[at]) if segment.by_seq else checked.offset + at
            byte = checked.position + sum(map(len, lines[:at])) + at
            yield not number and not at, FoundRecord(offset, segment.path, byte, lines[at])


# --- cutting into runs of blocks -------------------------------------------------------------------------------------
# From the indexes alone: readers check the data.


def cuts(segments: Segments, start: int, end: int, nbytes: int) -> list[int]:
    """Return the offsets that cut the records start…end-1 into runs of about `nbytes`, at ends of blocks."""
    offsets: list[int] = []
    offset, seen = start, 0  # of the last cut, and the bytes since then
    for number in range(len(segments)):
        if segments.first(number) >= end:
            break
        if number + 1 < len(segments) and segments.first(number + 1) <= start:
            continue
        if row := segments.row(number):  # cut between objects, because nothing is known inside of them
            if seen and seen + row.nbytes > nbytes:
                offsets.append(row.base)
                seen = 0
            offset, seen = max(offset, row.base), seen + row.nbytes
            continue
        with contextlib.suppress(FileNotFoundError), segments.open(number) as segment:
            if seen >= nbytes:  # a cut is overdue since the last block of the segment before
                offsets.append(segment.first)
                seen = 0
            offset = max(offset, segment.first)
            begin = segment.index.last(lambda entry: entry.offset <= offset)  # noqa: B023 (called at once)
            position = begin.entry.position if begin else 0
            want = nbytes - seen
            while position + want < segment.size:
                line = segment.index.last(lambda entry: entry.position <= position + want)  # noqa: B023
                if line is None or line.entry.offset <= offset:
                    want *= 2  # a block of long lines is larger than that
                    continue
                if line.entry.offset >= end:
                    break
                offset, position = line.entry.offset, line.entry.position
                offsets.append(offset)
                seen, want = 0, nbytes
            seen += max(0, segment.size - position)
    return offsets


# --- extents ---------------------------------------------------------------------------------------------------------
# Whole blocks of a segment, read at once, for readers that count lines with numpy, which this package must not import.


class Extent:
    """Whole blocks as they lie in a log. Block n begins with record offsets[n] at byte edges[n] of `data`.

    The last pair is the end, and the record that follows it.
    """

    __slots__ = ("data", "edges", "offsets")

    def __init__(self, data: bytes, edges: list[int], offsets: list[int]) -> None:
        self.data, self.edges, self.offsets = data, edges, offsets


def read_extents(segment: SegmentReader, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
    """Yield final blocks, from the block that holds `offset` up to record `end`, about `nbytes` at once.

    Ends before a block that differs from the index, before the open block, and before lines that no index line covers.
    """
    line = segment.index.last(lambda entry: entry.offset <= offset)
    if line is None:
        return
    segment.check_start(line)
    for run in _runs(segment, line.start, end, nbytes):
        extent = _read(segment, run)
        if extent.data:
            yield extent
        if len(extent.edges) < len(run):
            return


def _runs(segment: SegmentReader, at: int, end: int, nbytes: int) -> Iterator[list[IndexEntry]]:
    """Yield the index entries of runs of final blocks, each with the entry after it; from byte `at` of the index."""
    run: list[IndexEntry] = []
    with contextlib.suppress(DamageError):
        for block in segment.blocks(at):
            if block.following is None or block.entry.offset >= end:
                break
            run = [*(run or [block.entry]), block.following]
            if block.following.position - run[0].position >= nbytes:
                yield run
                run = []
    if run:
        yield run


def _read(segment: SegmentReader, entries: list[IndexEntry]) -> Extent:
    """Return the blocks that begin with `entries`, up to a bad block; the last entry only marks the end."""
    position = entries[0].position
    edges = [entry.position - position for entry in entries if entry.position <= segment.size] or [0]
    data = os.pread(segment.fd, edges[-1], position)
    good = 0
    with memoryview(data) as view:
        for entry, (low, high) in zip(entries, pairwise(edges), strict=False):
            if high > len(data) or segment.misfit(entry, view[low:high]):
                break
            good += 1
    offsets = [entry.offset for entry in entries[: good + 1]]
    return Extent(data[: edges[good]], edges[: good + 1], offsets)


# --- a log -----------------------------------------------------------------------------------------------------------

WAL = "__append"  # the name of the WAL among topics; no topic can have it
_TAIL = 1 << 12  # bytes read before the end of a record to find its start


class _Reached(namedtuple("_Reached", ("inode", "first", "start", "at"))):
    """How far a segment is known: its inode and first offset (inodes are reused), the start of the next line, and the byte
    of the index line whose block was read last.
    """

    __slots__ = ()


NEVER = 1 << 63  # the end of the active segment


class ListedSegment(namedtuple("ListedSegment", ("segments", "number", "end", "is_last"))):
    """A segment or a row as it was listed. `end`: its end offset. `is_last`: no answer goes on after it."""

    __slots__ = ()

    @property
    def first(self) -> int:
        found: int = self.segments.first(self.number)
        return found

    @property
    def path(self) -> str:
        found: str = self.segments.path(self.number)
        return found

    def open(self) -> SegmentReader:
        """Open it. Raises FileNotFoundError, NotHereError, DamageError."""
        found: SegmentReader = self.segments.open(self.number)
        return found


class LogReader:
    """A reader of the WAL (`by_seq`) or of one partition. No descriptor stays open between calls."""

    def __init__(self, directory: str, by_seq: bool, has_rows: bool = False) -> None:
        """`has_rows`: read a partition with the rows before its segments."""
        self.directory, self.by_seq, self.has_rows = directory, by_seq, has_rows
        # Where the last read ended, and where the end was last. A reader far behind the end needs both. With one
        # variable each call would overwrite the other's, and count all lines without an index again.
        self._last_read = self._last_end = _Reached(0, 0, UNKNOWN, 0)

    def _segments(self) -> Segments:
        return Segments(self.directory, self.by_seq, self.has_rows)

    def segments(self) -> list[tuple[int, str]]:
        """Return (first offset, path) of the segments of this disk, in order."""
        return segment.listing(self.directory)

    @property
    def first_offset(self) -> int:
        """Return the oldest offset of the log, or, if retention has deleted everything, the next one."""
        segments = self._segments()
        if not len(segments):
            return int(self.by_seq)
        return segments.first_offset()

    def first_readable(self) -> int:
        """Return `first_offset`; where the file `tier` is damaged, the first offset of this disk. Before it, reads fail."""
        try:
            return self.first_offset
        except DamageError:
            found = self.segments()
            return found[0][0] if found else 0

    def last_cold(self) -> tuple[int, int] | None:
        """Return (recv_ts of the last record in a row, first local offset); None without a row that readers need."""
        segments = self._segments()
        local = segments.first(0) if len(segments) else 0
        row = segments.with_rows().last_row
        return None if row is None else (row.times[1], local)

    def rows(self, start: int = 0, end: int = 1 << 63) -> LogRows:
        """Return the rows in force that have records of start…end-1, and what of the partition they are for.

        Reads the file `tier` only if `start` lies before the first segment.
        """
        segments = self._segments()
        local = segments.first(0) if len(segments) else 0
        if start >= local or not self.has_rows:
            return LogRows(0, local, local, [])
        found, first = rows.of(self.directory), segments.first_offset()
        lineage = identity.lineage(rows.label_of(self.directory)[1])
        wanted = [row for row in found.rows if row.base < end and row.next > start]
        return LogRows(found.life, first, local, [row._replace(key=rows.full_key(lineage, row.key)) for row in wanted])

    def gaps(self) -> Gaps:
        """Return the gaps of a partition, in order; almost every partition has none."""
        return () if self.by_seq else gaps.read(self.directory)

    def end_offset(self) -> int:
        """Return the offset of the next record, even if the last segment has no label and `read` refuses it."""
        while True:
            segments = self._segments()
            if not segments:
                return int(self.by_seq)
            with contextlib.suppress(FileNotFoundError), segments.open(len(segments) - 1, owner=True) as active:
                return self._end_of_wal(active) if self.by_seq else self._end_of_partition(active)

    def _end_of_wal(self, active: SegmentReader) -> int:
        tail = find_tail(active.fd, active.size, is_stored)
        return record.seq_of(tail.last) + 1 if tail.last else active.first

    def _end_of_partition(self, active: SegmentReader) -> int:
        line = active.index.last(lambda _: True)
        start = LineStart(line.entry.offset, line.entry.position) if line else LineStart(active.first, 0)
        offset: int
        offset, position = max(start, self._start_in(active, self._last_end))
        while position < active.size:
            data = os.pread(active.fd, READ_BYTES, position)
            offset, position = offset + record.count_lines(data), position + len(data)
            if data.endswith(b"\n"):
                self._last_end = _Reached(active.inode, active.first, LineStart(offset, position), 0)
        return offset

    def back(self, end: int, nbytes: int) -> int:
        """Return where to read the last `nbytes` before record `end`, from the index alone: the start of a block.

        At most at the start of the segment; `end` if that segment has gone. Blocks at both ends may add to `nbytes`.
        """
        segments = self._segments()
        if not segments:
            return end
        segments.with_rows(end - 1)
        with contextlib.suppress(FileNotFoundError), segments.open(segments.holding(end - 1)) as part:
            last = part.index.last(lambda entry: entry.offset < end)
            stop = last.entry.position if last else 0
            begin = part.index.last(lambda entry: entry.position <= stop - nbytes)
            return begin.entry.offset if begin else part.first
        return end

    def stamp_at_end(self, offset: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts) of the last record, unchecked; None unless the last `end_offset` returned `offset`."""
        inode, _, (end, position), _ = self._last_end
        if end != offset or not position:
            return None
        with contextlib.suppress(FileNotFoundError, IndexError), open(self.segments()[-1][1], "rb", buffering=0) as log:
            if os.fstat(log.fileno()).st_ino == inode:
                start = max(0, position - _TAIL)
                lines = os.pread(log.fileno(), position - start, start).split(b"\n")
                return record.parse_stored(lines[-2]) if len(lines) > 1 + (start > 0) else None
        return None

    def stamp_of(self, offset: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts) of the record at `offset`; None if compaction took it, or it is not readable."""
        try:
            first, lines = self.read(offset, 1)
        except DamageError:
            return None
        except NotHereError as err:
            if (stamp := err.row.stamp_of(offset)) is None:
                raise
            return stamp
        return record.stamp(lines) if first == offset and lines.strip() else None

    def note_read(self, part: SegmentReader, start: LineStart) -> None:
        """Note where in `part` a read has ended: the next read need not check the lines before it again."""
        self._last_read = _Reached(part.inode, part.first, start, part.at or self.near_in(part))

    def near_in(self, part: SegmentReader) -> int:
        """Return where in the index of `part` to look first: a hint from any earlier read of this segment."""
        return self._last_read.at if self._last_read.first == part.first else 0

    def resume_point(self, part: SegmentReader, offset: int) -> LineStart:
        """Return the last start of a line that is known in `part`, up to `offset`; UNKNOWN if there is none.

        A sealed segment needs no such hint, because it has an index; and compaction may replace it by a file that
        reuses its inode.
        """
        starts = [self._start_in(part, reached) for reached in (self._last_read, self._last_end)]
        return max((start for start in starts if start.offset <= offset), default=UNKNOWN)

    def _start_in(self, part: SegmentReader, reached: _Reached) -> LineStart:
        inode, first, start, _ = reached
        is_same = (inode, first) == (part.inode, part.first) and not part.sealed and start.position <= part.size
        return start if is_same else UNKNOWN

    def read(self, offset: int, max_bytes: int = READ_BYTES) -> tuple[int, bytes]:
        """Return (offset of the first line, whole lines) from `offset` on: at most `max_bytes`, or one longer line.

        The lines are b"" at the end of the log. In a partition the next read begins at offset + lines.count(newline); a
        bare newline is a record that compaction removed. In the WAL the next read begins after the seq of the last
        line.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):  # retention has just deleted it
                return self._read(self._segments(), offset, max_bytes)

    def listed(self, offset: int) -> tuple[int, Iterator["ListedSegment"]]:
        """Return the segments from the one with `offset` on, and the offset at which a reader of `offset` begins."""
        segments = self._segments().with_rows(offset)
        offset = max(offset, segments.begin)
        return offset, self._listed(segments, offset)

    def _listed(self, segments: Segments, offset: int) -> Iterator["ListedSegment"]:
        number = segments.holding(offset) if len(segments) else 0
        while (row := segments.row(number)) is not None:
            if offset < row.next:
                yield ListedSegment(segments, number, row.next, True)
            number += 1
        followers = [segments.first(later) for later in range(number + 1, len(segments))]
        ends = gaps.ends(followers, self.gaps()) if followers else []
        for later, end, follower in zip(
            range(number, len(segments)), [*ends, NEVER], [*followers, NEVER], strict=False
        ):
            yield ListedSegment(segments, later, end, end < follower)

    def _read(self, segments: Segments, offset: int, max_bytes: int) -> tuple[int, bytes]:
        offset = max(offset, segments.with_rows(offset).begin)
        for number in range(segments.holding(offset), len(segments)):
            offset, row = max(offset, segments.first(number)), segments.row(number)
            if row is not None and offset >= row.next:
                continue
            with segments.open(number) as part:
                first, lines = self._read_segment(part, offset, max_bytes)
            if lines:
                return first, lines
            if part.sealed and not self.by_seq:
                following = segments.first(number + 1) if row is None else row.next
                if gaps.is_gap(self.gaps(), offset, following):
                    continue
                raise part.damage(part.size, part.size, offset, following, "the log ends before the next segment")
        return offset, b""

    def _read_segment(self, part: SegmentReader, offset: int, max_bytes: int) -> tuple[int, bytes]:
        chunks: list[bytes] = []
        length, first, stop = 0, offset, UNKNOWN
        try:
            for checked in part.checked_lines(offset, self.resume_point(part, offset), self.near_in(part)):
                lines = checked.lines
                if not chunks:
                    first, lines = self._skip_before(checked, offset)
                    if not lines:
                        continue
                if chunks and length + len(lines) > max_bytes:
                    break
                chunks.append(lines)
                length, stop = length + len(lines), LineStart(checked.next_offset, checked.end)
                if length >= max_bytes:
                    break
        except DamageError:
            if not chunks:
                raise
        text = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if length > max_bytes:
            text = text[: text.rfind(b"\n", 0, max_bytes) + 1 or text.find(b"\n") + 1]
        elif chunks:
            self.note_read(part, stop)
        return first, text

    def _skip_before(self, checked: CheckedLines, offset: int) -> tuple[int, bytes]:
        """Return (offset, lines) without the lines before `offset`."""
        if not self.by_seq:
            if offset > checked.next_offset:
                return offset, b""
            ahead = max(0, offset - checked.offset)
            return checked.offset + ahead, checked.lines.split(b"\n", ahead)[ahead] if ahead else checked.lines
        lines = within(checked.lines, offset, 1 << 63)
        return (record.seq_of(lines) if lines else offset), lines

    def chunks(self, offset: int, max_bytes: int = READ_BYTES) -> Iterator[tuple[int, bytes]]:
        """Yield what `read` returns, from `offset` on, up to the end of the log at the time it is reached."""
        while (found := self.read(offset, max_bytes))[1]:
            yield found
            first, lines = found
            offset = record.seq_of(last_line(lines)) + 1 if self.by_seq else first + record.count_lines(lines)

    def extents(self, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
        """Yield whole blocks of one segment, beginning with the block that holds `offset`.

        For callers that count lines faster than `read` does. Ends early, possibly without any block, if something
        differs from the index or may be changing: call `read` from there, which continues or says what is wrong.
        """
        segments = self._segments()
        if not segments:
            return
        number = segments.with_rows(offset).holding(offset)
        if number + 1 < len(segments):
            number = segments.holding(offset := gaps.passed(self.gaps(), max(offset, segments.begin)))
        with contextlib.suppress(FileNotFoundError, DamageError, NotHereError), segments.open(number) as part:
            yield from read_extents(part, max(offset, part.first), end, nbytes)

    def cuts(self, start: int, end: int, nbytes: int) -> list[int]:
        """Return the offsets that cut the records start…end-1 into runs of about `nbytes`, at ends of blocks."""
        return cuts(self._segments().with_rows(start), start, end, nbytes)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def offset_of_seq(self, seq: int) -> int:
        """Return the offset of the first record with this seq or a later one; the end offset if there is none."""
        return self._offset_of(seq, SEQ)

    def offset_of_time(self, micros: int) -> int:
        """Return the offset of the first record received at this time (µs) or later; the end offset if none was."""
        return self._offset_of(micros, RECV_TS)

    def _offset_of(self, target: int, field: int) -> int:
        end = self.end_offset()  # before the search, because a record that arrives during it must not be skipped
        if (base := self._segments().with_rows().row_from(target, field)) is not None:
            return base
        found = self.find(target, field)
        return found.offset if found else end

    def find(self, target: int, field: int) -> FoundRecord | None:
        """Return the first record whose SEQ or RECV_TS is at least `target`; None if there is none."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # retention has just deleted it
                return find(self._segments().with_rows(), target, field)


def wal(data: str) -> LogReader:
    """Return a reader of the WAL of a data directory."""
    return LogReader(f"{data}/append", by_seq=True)


def partition(data: str, topic: str, partition: int) -> LogReader:
    """Return a reader of one partition of a topic."""
    return LogReader(f"{data}/topics/{topic}/{partition}", by_seq=False, has_rows=True)


def local(data: str, topic: str, partition: int) -> LogReader:
    """Return a reader of what this disk has of one partition of a topic."""
    return LogReader(f"{data}/topics/{topic}/{partition}", by_seq=False)


def first_seq(data: str) -> int:
    """Return the oldest seq the WAL still has; 1 if the WAL is empty."""
    return wal(data).first_offset


def read(data: str, low: int, high: int) -> Iterator[bytes]:
    """Yield the records low…high (inclusive) of the WAL as blocks of whole lines, in order.

    Raises DamageError at damage. The caller must know that `high` is durable; the file is not read beyond it.
    """
    if low > high:
        return
    for first, lines in wal(data).chunks(low):
        wanted = within(lines, first, high)
        if wanted:
            yield wanted
        if record.seq_of(last_line(lines)) >= high:
            return


def indexed_end(path: str, first: int, by_seq: bool) -> int:
    """Return the byte up to which the index covers the segment at `path`, which begins with record `first`.

    Raises DamageError if the segment differs from its index: a writer must neither cut such a segment as if its end
    were torn, nor append to it.
    """
    entries = read_entries(segment.index_path(path), 1 << 62)  # omits a torn last line, which a kill may leave
    if not entries:
        return 0
    with SegmentReader(path, first, by_seq, sealed=False, owner=True) as part:
        return part.covered_end(entries[-1])


def check_place(path: str, first: int, by_seq: bool) -> None:
    """Raise MisplacedError if a segment lies in the wrong place; for its owner, before an append."""
    with SegmentReader(path, first, by_seq, sealed=False, owner=True):
        pass
