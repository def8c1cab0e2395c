"""Reading a log, the WAL or a partition, while it grows, rolls and is retained: lookups and checked blocks.

Owner       nobody: read-only, needs no lock.
Invariant   Every byte that is handed out was checked (segment_reader.py). Damage raises DamageError, never before what
            is good in front of it has been handed out.
Numbers     A record's offset is its seq in the WAL, its position in a partition. Lookups are O(log n) reads of a few
            bytes.
Live        Each call looks anew. A log whose open block gets longer, or gets its final line, between two calls is
            looked at again. What retention takes away while it is read is read to its end; what it took before is not
            there: a read that begins below `first_offset` answers from there, and its offset says so. A segment that
            compaction swaps is read as it was, or as it is.
"""

import contextlib
import os
from collections import namedtuple
from collections.abc import Iterator

from kmq import record
from kmq.log import cutting, finding, segment
from kmq.log.damage import DamageError
from kmq.log.disk import find_tail
from kmq.log.extents import Extent, read_extents
from kmq.log.finding import FoundRecord
from kmq.log.index import read_entries
from kmq.log.lines import RECV_TS, SEQ, CheckedLines, is_stored, last_line, within
from kmq.log.segment_reader import READ_BYTES, UNKNOWN, LineStart, SegmentReader, Segments

WAL = "__append"  # what the WAL is called among topics: no topic can have this name
_TAIL = 1 << 12  # bytes in front of a record's end in which its beginning is looked for


class _LastRead(namedtuple("_LastRead", ("inode", "first", "start"))):
    """Where a read ended: inode and first offset of the segment (inodes are reused), the start of the next line."""

    __slots__ = ()


class Log:
    """The WAL (`by_seq`) or one partition. Cheap to make and to keep; no descriptor stays open between calls."""

    def __init__(self, directory: str, by_seq: bool) -> None:
        self.directory, self.by_seq = directory, by_seq
        self._last_read = _LastRead(0, 0, UNKNOWN)

    def _segments(self) -> Segments:
        return Segments(self.directory, self.by_seq)

    def segments(self) -> list[tuple[int, str]]:
        """(first offset, path) of the segments, in order."""
        return segment.listing(self.directory)

    @property
    def first_offset(self) -> int:
        """The oldest offset there is, or was, before retention took all."""
        segments = self.segments()
        return segments[0][0] if segments else int(self.by_seq)

    def end_offset(self) -> int:
        """The offset that comes next, also where the last segment lacks a label: `read` refuses that one."""
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
        offset, position = max(start, self._known_in(active))
        while position < active.size:
            data = os.pread(active.fd, READ_BYTES, position)
            offset, position = offset + data.count(b"\n"), position + len(data)
            if data.endswith(b"\n"):
                self._last_read = _LastRead(active.inode, active.first, LineStart(offset, position))
        return offset

    def stamp_at_end(self, offset: int) -> tuple[int, int] | None:
        """(seq, recv_ts) of the record before `offset`, unchecked; None unless the last `end_offset` was `offset`."""
        inode, _, (end, position) = self._last_read
        if end != offset or not position:
            return None
        with contextlib.suppress(FileNotFoundError, IndexError), open(self.segments()[-1][1], "rb", buffering=0) as log:
            if os.fstat(log.fileno()).st_ino == inode:
                start = max(0, position - _TAIL)
                lines = os.pread(log.fileno(), position - start, start).split(b"\n")
                return record.parse_stored(lines[-2]) if len(lines) > 1 + (start > 0) else None
        return None

    def _known_in(self, part: SegmentReader) -> LineStart:
        """Where the last read ended, in the active segment only.

        A sealed segment has an index, and compaction may give it the inode of another one.
        """
        inode, first, start = self._last_read
        is_same = (inode, first) == (part.inode, part.first) and not part.sealed and start.position <= part.size
        return start if is_same else UNKNOWN

    def read(self, offset: int, max_bytes: int = READ_BYTES) -> tuple[int, bytes]:
        """(offset of the first line, whole lines) from `offset` on, at most `max_bytes` or one line; b"" at the end.

        In a partition the next read begins at offset + lines.count(newline); a bare newline is a record that compaction
        removed. In the WAL it begins after the seq of the last line.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):  # retention was faster
                return self._read(self._segments(), offset, max_bytes)

    def _read(self, segments: Segments, offset: int, max_bytes: int) -> tuple[int, bytes]:
        for number in range(segments.holding(offset), len(segments)):
            offset = max(offset, segments.first(number))
            with segments.open(number) as part:
                first, lines = self._take(part, offset, max_bytes)
            if lines:
                return first, lines
            if part.sealed and not self.by_seq:
                following = segments.first(number + 1)
                raise part.damage(part.size, part.size, offset, following, "the log ends before the next segment")
        return offset, b""

    def _take(self, part: SegmentReader, offset: int, max_bytes: int) -> tuple[int, bytes]:
        taken: list[bytes] = []
        length, first, stop = 0, offset, UNKNOWN
        try:
            for checked in part.checked_lines(offset, self._known_in(part)):
                lines = checked.lines
                if not taken:
                    first, lines = self._from(checked, offset)
                    if not lines:
                        continue
                if taken and length + len(lines) > max_bytes:
                    break
                taken.append(lines)
                length, stop = length + len(lines), LineStart(checked.next_offset, checked.end)
                if length >= max_bytes:
                    break
        except DamageError:
            if not taken:
                raise
        text = taken[0] if len(taken) == 1 else b"".join(taken)
        if length > max_bytes:
            text = text[: text.rfind(b"\n", 0, max_bytes) + 1 or text.find(b"\n") + 1]
        elif taken:
            self._last_read = _LastRead(part.inode, part.first, stop)
        return first, text

    def _from(self, checked: CheckedLines, offset: int) -> tuple[int, bytes]:
        """(offset, lines) without the lines before `offset`."""
        if not self.by_seq:
            ahead = max(0, offset - checked.offset)
            if ahead > checked.lines.count(b"\n"):
                return offset, b""
            return checked.offset + ahead, checked.lines.split(b"\n", ahead)[ahead] if ahead else checked.lines
        lines = within(checked.lines, offset, 1 << 63)
        return (record.seq_of(lines) if lines else offset), lines

    def extents(self, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
        """Whole blocks of one segment, from the one that holds `offset` on, for who counts lines faster than `read`.

        Ends early, perhaps without any block, wherever something differs from the index or may be changing. `read`
        continues there, or says what is wrong.
        """
        segments = self._segments()
        if not segments:
            return
        number = segments.holding(offset)
        with contextlib.suppress(FileNotFoundError, DamageError), segments.open(number) as part:
            yield from read_extents(part, max(offset, part.first), end, nbytes)

    def cuts(self, start: int, end: int, nbytes: int) -> list[int]:
        """Offsets that cut the records from `start` to before `end` into runs of about `nbytes`, at ends of blocks."""
        return cutting.cuts(self._segments(), start, end, nbytes)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def offset_of_seq(self, seq: int) -> int:
        """Offset of the first record with this seq or a later one; the end where there is none."""
        return self._offset_of(seq, SEQ)

    def offset_of_time(self, micros: int) -> int:
        """Offset of the first record received at this time (µs) or later; the end where there is none."""
        return self._offset_of(micros, RECV_TS)

    def _offset_of(self, target: int, field: int) -> int:
        end = self.end_offset()  # first: a record that comes during the search must not lie before it
        found = self.find(target, field)
        return found.offset if found else end

    def find(self, target: int, field: int) -> FoundRecord | None:
        """The first record whose SEQ or RECV_TS is at least `target`; None at the end."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # retention was faster
                return finding.find(self._segments(), target, field)


def wal(data: str) -> Log:
    """The WAL of a data directory."""
    return Log(f"{data}/append", by_seq=True)


def partition(data: str, topic: str, partition: int) -> Log:
    """One partition of a topic."""
    return Log(f"{data}/topics/{topic}/{partition}", by_seq=False)


def first_seq(data: str) -> int:
    """The oldest seq the WAL still has; 1 of an empty one."""
    return wal(data).first_offset


def read(data: str, low: int, high: int) -> Iterator[bytes]:
    """The records low…high (inclusive) of the WAL as blocks of whole lines, in order; DamageError at damage.

    The caller knows that `high` is durable; what lies after it in the file is not looked at.
    """
    log = wal(data)
    while low <= high:
        low, lines = log.read(low)
        wanted = within(lines, low, high)
        if not wanted:
            return
        yield wanted
        low = record.seq_of(last_line(lines)) + 1


def indexed_end(path: str, first: int, by_seq: bool) -> int:
    """Up to which byte its index covers the segment at `path`, which begins with record `first`.

    Raises DamageError where the segment differs from its index: a writer must not take that for a torn end, nor append
    to it.
    """
    entries = read_entries(segment.index_path(path), 1 << 62)  # without a torn last line, which a kill leaves
    if not entries:
        return 0
    with SegmentReader(path, first, by_seq, sealed=False, owner=True) as part:
        return part.covered(entries[-1])


def check_place(path: str, first: int, by_seq: bool) -> None:
    """Raise MisplacedError where a segment is not the one its place says; for its owner, before it appends to it."""
    with SegmentReader(path, first, by_seq, sealed=False, owner=True):
        pass
