"""Reading one segment, of the WAL or of a partition: whole lines, checked block by block against its index.

Owner       none: read-only, needs no lock.
Invariant   No byte of a block is returned before the block's crc was verified. Lines that no index line covers yet, at
            most the last second of writes, are checked one by one: syntax, no NUL, rising seqs. Damage raises
            DamageError when it is reached, after all good lines before it were returned. Nothing is skipped silently.
            An index line that is still being written is never read.
            A segment is trusted only if its index and its first record agree with its place: lineage, log, first
            record. A file that a restore has put in a wrong place is damage, not data.
Live        The index is opened before the log: it may cover less than the log holds, never more. An opened segment is
            read to its end, even if retention or compaction removes its name meanwhile.
"""

import contextlib
import os
import zlib
from bisect import bisect_left, bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence

from kmq.log import identity, rows, segment
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.index import BLOCK_BYTES, LABEL, MAX_LABEL, IndexEntry, label, parse_line, place_of, read_label
from kmq.log.rows import NotHereError, TierRow
from kmq.log.segment import CheckedLines, bad_line, last_line, seqs_of
from kmq.message import record

# --- the index -------------------------------------------------------------------------------------------------------
# Its format is in index.py.

_LINE_BYTES = 256  # an index line is shorter
_FIRST, _WINDOW = 1 << 10, 1 << 14  # bytes read at once in order: first of some 20 blocks, then of some 300


class IndexLine:
    """An entry and where its line lies in the index file: the bytes start…end-1."""

    __slots__ = ("end", "entry", "start")

    def __init__(self, start: int, end: int, entry: IndexEntry) -> None:
        self.start, self.end, self.entry = start, end, entry


class IndexReader:
    """The label and lines of one index file as they are when it is opened; a missing file is an empty one."""

    def __init__(self, path: str) -> None:
        self.path, self.fd, self.size = path, -1, 0
        self.label = b""  # the line that says which segment it belongs to
        with contextlib.suppress(FileNotFoundError):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self.fd).st_size
            start = max(0, size - _LINE_BYTES)
            whole = start + os.pread(self.fd, _LINE_BYTES, start).rfind(b"\n") + 1
            # Without a newline there the last line is too long: reading it will raise DamageError.
            self.size = whole if whole > start or not start else size
            self.label = read_label(os.pread(self.fd, MAX_LABEL, 0))
        self.begin = min(len(self.label), self.size)  # of the first entry

    @property
    def is_empty(self) -> bool:
        return self.size <= self.begin

    def is_in_force(self) -> bool:
        """Return True if the path still leads to this index, or still to no index."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return self.fd < 0
        return self.fd >= 0 and os.path.samestat(now, os.fstat(self.fd))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def line(self, at: int) -> IndexLine:
        """Return the line that holds byte `at`. Raises DamageError if it is no index line."""
        base = max(0, at - _LINE_BYTES)
        data = os.pread(self.fd, 2 * _LINE_BYTES, base)
        start = data.rfind(b"\n", 0, at - base) + 1
        stop = data.find(b"\n", at - base)
        entry = self._entry(data[start:stop] if stop >= 0 else b"", base + start)
        return IndexLine(base + start, base + stop + 1, entry)

    def _entry(self, line: bytes, at: int) -> IndexEntry:
        entry = parse_line(line)
        if entry is None:
            raise self.damage(at, f"not an index line: {line[:40]!r}")
        return entry

    def damage(self, at: int, what: str) -> DamageError:
        return DamageError(self.path, at, self.size, 0, 0, what)

    def last(self, holds: Callable[[IndexEntry], bool], near: int = 0) -> IndexLine | None:
        """Return the last line for whose entry `holds` is true; it must be true up to some line, and false after it.

        `near`: the byte at which a line begins that may be the last match, or the line before it. Both are tried first.
        """
        best, low, high = None, self.begin, self.size
        if low < near < high and (line := self.line(near)).start == near and holds(line.entry):
            best, low = line, line.end
            for _ in range(2):
                if low >= high or not holds((line := self.line(low)).entry):
                    return best
                best, low = line, line.end
        if low < high:  # most readers are at the end
            line = self.line(high - 1)
            if holds(line.entry):
                return line
            high = line.start
        while low < high:
            line = self.line((low + high) // 2)
            if holds(line.entry):
                best, low = line, line.end
            else:
                high = line.start
        return best

    def entries(self, at: int = 0) -> Iterator[tuple[int, IndexEntry]]:
        """Yield (byte, entry) of the lines in force, the last for each offset, from the line at byte `at` on."""
        pending: tuple[int, IndexEntry] | None = None
        at, window = max(at, self.begin), _FIRST
        while at < self.size:
            data = os.pread(self.fd, min(window, self.size - at), at)
            window = _WINDOW
            whole = data.rfind(b"\n") + 1
            if not whole:
                raise self.damage(at, "no end of line")
            for line in data[: whole - 1].split(b"\n"):
                entry = self._entry(line, at)
                if pending is not None:
                    if not _may_follow(pending[1], entry):
                        raise self.damage(at, "does not follow from the line before it")
                    if entry.offset > pending[1].offset:
                        yield pending
                pending = at, entry
                at += len(line) + 1
        if pending is not None:
            yield pending


def _may_follow(before: IndexEntry, entry: IndexEntry) -> bool:
    """Return True if `entry` is of the same block as the line before it, or of a later one."""
    is_later = entry.offset > before.offset
    return entry.offset >= before.offset and is_later == (entry.position > before.position)


# --- one segment -----------------------------------------------------------------------------------------------------

READ_BYTES = 1 << 20  # returned at once, unless one line is longer
_HEAD = 1 << 12  # bytes of a segment that its first record's topic lies in


class LineStart(namedtuple("LineStart", ("offset", "position"))):
    """A record's offset, and the byte of the segment at which its line begins."""

    __slots__ = ()


UNKNOWN = LineStart(0, 0)


class FirstRecord:
    """The seq of a segment's first record, and its routing key, or the first bytes of a long one."""

    __slots__ = ("routing_key", "seq")

    def __init__(self, seq: int, routing_key: bytes) -> None:
        self.seq, self.routing_key = seq, routing_key


class IndexedBlock:
    """A block and its index line, at byte `at` of the index. `following`: the entry of the next block, if any."""

    __slots__ = ("at", "entry", "following")

    def __init__(self, at: int, entry: IndexEntry, following: IndexEntry | None) -> None:
        self.at, self.entry, self.following = at, entry, following


class SegmentReader:
    """A segment as it is when it is opened. The caller closes it.

    Raises FileNotFoundError if the segment is gone, and MisplacedError if it belongs to another place or has no label.
    `owner`: a missing label is no error, because the caller owns the segment and will write the label.
    """

    def __init__(
        self, path: str, first: int, by_seq: bool, sealed: bool, owner: bool = False, trust: bool = False
    ) -> None:
        """Open the segment. `trust`: read it even if its label or first record belongs to another place."""
        self.path, self.first, self.by_seq, self.sealed = path, first, by_seq, sealed
        self.at = 0  # of the index line whose block was read last; 0: no block was read
        while True:
            self.index = IndexReader(segment.index_path(path))
            try:
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self.index.close()
                raise
            status = os.fstat(self.fd)
            self.size, self.inode = status.st_size, status.st_ino
            what = "" if trust else self.misplaced() or ("" if owner else self.unlabelled())
            if self.index.is_in_force():
                break
            self.close()  # compaction swapped the segment meanwhile: open again, for a log and an index that match
        if what:
            self.close()
            following = (start for start, _ in segment.listing(os.path.dirname(path)) if start > first)
            raise MisplacedError(self.path, 0, self.size, first, next(following, 0), what)

    def __enter__(self) -> "SegmentReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.index.close()
        os.close(self.fd)

    def damage(self, byte: int, end: int, first: int, following: int, what: str) -> DamageError:
        return DamageError(self.path, byte, end, first, following, what)

    # --- does it belong where it lies? -------------------------------------------------------------------------------

    def misplaced(self) -> str:
        """Return how this segment contradicts its place; "" if it does not."""
        wanted, says = label(self.path), self.index.label
        if not wanted:
            return ""
        if says not in (b"", wanted):
            return f"its index belongs to another segment: {says[len(LABEL) :].decode(errors='replace').strip()!r}"
        begin = self.first_record()
        if begin is None:
            return ""
        if self.by_seq:
            return f"begins with seq {begin.seq}" if begin.seq < self.first else ""
        place, key = place_of(self.path), begin.routing_key
        topic = place[1].rpartition("/")[0].encode() if place else b""
        belongs = key.startswith(topic) and key[len(topic) : len(topic) + 1] in (b"", b".")
        return "" if belongs else f"begins with a record of {key[:100].decode(errors='replace')!r}"

    def unlabelled(self) -> str:
        """Return why the segment cannot be trusted without a label; "" if it has one or needs none.

        A segment of format 1 needs no label. While compaction swaps a segment it has no index.
        """
        if self.index.label or not os.fstat(self.fd).st_size or not label(self.path):
            return ""
        begin = self.first_record()
        if begin is None or begin.seq < identity.labelled_from(self.path) or segment.is_being_swapped(self.path):
            return ""
        return "no index says which segment it is"

    def first_record(self) -> FirstRecord | None:
        """Return the first record; None if it cannot be read."""
        head = os.pread(self.fd, _HEAD, 0)
        fields = head.lstrip(b"\n").split(b"|", 3)  # not record.fields: its line may end after the head
        is_torn = len(fields) == 3 and len(head) < _HEAD
        if len(fields) < 3 or is_torn or not fields[0].isdigit():
            return None
        return FirstRecord(int(fields[0]), fields[2])

    # --- the index ---------------------------------------------------------------------------------------------------

    def blocks(self, at: int = 0) -> Iterator[IndexedBlock]:
        """Yield the blocks, from the index line at byte `at` on."""
        pending: tuple[int, IndexEntry] | None = None
        for byte, entry in self.index.entries(at):
            if pending is not None:
                yield IndexedBlock(*pending, entry)
            pending = byte, entry
        if pending is not None:
            yield IndexedBlock(*pending, None)

    def fault(self, entry: IndexEntry, data: bytes, following: int) -> str:
        """Return how `data`, a whole block, contradicts its entry, or "". `following`: the next offset; 0: unknown."""
        if what := self.misfit(entry, data):
            return what
        if following and not self.by_seq and entry.offset + record.count_lines(data) != following:
            return "the block and the index count different numbers of records"
        return ""

    def misfit(self, entry: IndexEntry, data: bytes | memoryview) -> str:
        """Return what `fault` returns, but do not count the records."""
        if zlib.crc32(data) != entry.crc:
            return "crc mismatch"
        head = bytes(data[: record.STAMP_BYTES])
        fields = head.split(b"|", 2)  # hot loop: record.stamp would parse the time
        if head[:1] != b"\n" and (fields[1] != entry.recv_ts or (self.by_seq and int(fields[0]) != entry.offset)):
            return "the index line describes another record"
        return ""

    def covered_end(self, entry: IndexEntry) -> int:
        """Return the byte up to which the provisional line `entry` covers its block. It is the end of a line."""
        data = self._block_from(entry.position)
        if zlib.crc32(data) == entry.crc and data:
            return entry.position + len(data)
        crc, at = 0, 0
        for line in data.split(b"\n")[:-1]:
            at += len(line) + 1
            crc = zlib.crc32(b"\n", zlib.crc32(line, crc))
            if crc == entry.crc:
                return entry.position + at
        what = "crc mismatch" if data else "the log ends before the records that its index covers"
        raise self.damage(entry.position, entry.position + len(data), entry.offset, entry.offset + 1, what)

    def _block_from(self, position: int) -> bytes:
        """Return the whole lines from `position` until a block is full or the log ends."""
        want = BLOCK_BYTES
        while True:
            data = os.pread(self.fd, max(0, min(want, self.size - position)), position)
            end = data.find(b"\n", BLOCK_BYTES - 1) + 1 if len(data) >= BLOCK_BYTES else 0
            if end:
                return data[:end]
            if position + len(data) >= self.size:
                return data[: data.rfind(b"\n") + 1]
            want *= 2

    # --- reading -----------------------------------------------------------------------------------------------------

    def checked_lines(self, offset: int, start: LineStart = UNKNOWN, near: int = 0) -> Iterator[CheckedLines]:
        """Yield checked lines, from the block that holds `offset` on.

        `start` (a line start) and `near` (its `at`) come from an earlier read, and save the search.
        """
        begin = self.block_holding(offset, near)
        hint = start if start.offset <= offset else UNKNOWN
        if begin is None:
            yield from self._unindexed(max(LineStart(self.first, 0), hint))
            return
        for block in self.blocks(begin.start):
            checked, self.at = self._checked_block(block), block.at
            yield checked
        yield from self._unindexed(max(LineStart(checked.next_offset, checked.end), hint), checked.lines)

    def block_holding(self, offset: int, near: int = 0) -> IndexLine | None:
        """Return the index line of the block that holds `offset`; None if no index line covers it."""
        line = self.index.last(lambda entry: entry.offset <= offset, near)
        if line is None and not self.index.is_empty:
            line = self.index.line(self.index.begin)  # drop_oldest may have dropped the first seqs of this segment
            if line.entry.position or not self.by_seq:
                raise self.index.damage(line.start, f"does not begin with record {self.first}")
        if line is not None:
            self.check_start(line)
        return line

    def _checked_block(self, block: IndexedBlock) -> CheckedLines:
        entry, following = block.entry, block.following
        end = following.position if following else self.covered_end(entry)
        data = os.pread(self.fd, end - entry.position, entry.position) if end <= self.size else b""
        after = following.offset if following else 0
        what = (
            self.fault(entry, data, after) if len(data) == end - entry.position > 0 else "the log ends inside the block"
        )
        if what:
            raise self.damage(entry.position, end, entry.offset, after or entry.offset + 1, what)
        return CheckedLines(entry.offset, entry.position, data, after or self._next(entry.offset, data))

    def _next(self, offset: int, lines: bytes) -> int:
        """Return the offset that follows `lines`, which begin with record `offset`."""
        if self.by_seq:
            return record.seq_of(last_line(lines)) + 1
        return offset + record.count_lines(lines)

    def check_start(self, line: IndexLine) -> None:
        """Raise DamageError if `line` has a wrong offset. In a partition, count the lines of the block before it."""
        entry = line.entry
        if line.start == self.index.begin:
            if (entry.offset, entry.position) != (self.first, 0) and not self.by_seq:
                raise self.index.damage(line.start, f"does not begin with record {self.first}")
        elif line.end == self.index.size and not self.by_seq and entry.offset != self.first:
            before = self.index.last(lambda other: other.offset < entry.offset)
            if before is not None:
                position = before.entry.position
                data = os.pread(self.fd, max(0, min(entry.position, self.size) - position), position)
                if before.entry.offset + record.count_lines(data) != entry.offset:
                    raise self.index.damage(line.start, "does not follow from the line before it")

    def _unindexed(self, start: LineStart, before: bytes = b"\n") -> Iterator[CheckedLines]:
        """Yield the lines after `start`, where the index ends. `before`: the lines before it."""
        offset, position = start
        after = max([0, *seqs_of(last_line(before))])
        want = READ_BYTES // 4  # checking is slow, and lines that a read does not return are checked again
        while position < self.size:
            data = os.pread(self.fd, min(want, self.size - position), position)
            data = data[: data.rfind(b"\n") + 1]
            if not data and want < self.size - position:
                want *= 2
                continue
            bad = bad_line(data, after)
            data = data[:bad]
            if data:
                following = self._next(offset, data)
                yield CheckedLines(record.seq_of(data) if self.by_seq else offset, position, data, following)
                after = max([after, *seqs_of(data[data.rstrip(b"\n").rfind(b"\n") + 1 :])])
                offset, position = following, position + len(data)
            if bad is not None:
                first = after + 1 if self.by_seq else offset
                raise self.damage(position, self.size, first, first + 1, "not a stored line in order of seq")
            if not data:
                return  # the rest is a line that is being written, or a torn one

    def stamp_at(self, position: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts) of the first record from the line start `position` on, unchecked; None at the end."""
        while position < self.size:
            data = os.pread(self.fd, 4096, position)
            line = data.lstrip(b"\n")
            if line:
                if len(line) <= record.STAMP_BYTES:
                    line = os.pread(self.fd, record.STAMP_BYTES, position + len(data) - len(line))
                stamp = record.stamp(line)
                return stamp if stamp[0] else None
            position += len(data)
        return None


class Segments:
    """The segments of a log as they were listed, in order. They may be gone by the time they are opened.

    Before them lie the rows of the store (rows.py), if they were asked for: their segments are what was fetched in.
    `begin`: no reader is shown a record before it. `cold_reads`: how often this process has opened what was fetched in.
    """

    cold_reads = 0

    def __init__(self, directory: str, by_seq: bool, has_rows: bool = False) -> None:
        self.directory, self.by_seq = directory, by_seq
        self._local, has_tier = segment.look(directory)
        self._has_tier = has_tier and has_rows
        self._cold: Sequence[TierRow] = ()
        self._life = self.begin = 0

    def with_rows(self, offset: int = 0) -> "Segments":
        """Put the rows before the segments if a reader of `offset` needs them. A reader of later records pays nothing."""
        if self._has_tier and self._local and offset < self._local[0][0]:
            found, local = rows.of(self.directory), self._local[0][0]
            self._cold, self._life, self.begin = found.cold(local), found.life, found.begin(local)
        return self

    def first_offset(self) -> int:
        """Return the offset at which the log begins for readers. Call it before `with_rows`, and not without a segment."""
        local = self._local[0][0]
        return rows.of(self.directory).begin(local) if self._has_tier else local

    def row_from(self, target: int, field: int) -> int | None:
        """Return the offset of the first record whose stamp is at least `target`, if rows tell it: it begins one."""
        at = bisect_left(self._cold, target, key=lambda row: (row.seqs[1], row.times[1])[field])
        row = self.row(at)
        is_first = row is not None and (row.seqs[0], row.times[0])[field] >= target and row.base >= self.begin
        return row.base if row is not None and is_first else None

    @property
    def last_row(self) -> TierRow | None:
        return self._cold[-1] if self._cold else None

    def row(self, number: int) -> TierRow | None:
        """Return the row that a number stands for; None for a segment of this disk."""
        return self._cold[number] if number < len(self._cold) else None

    def __len__(self) -> int:
        return len(self._cold) + len(self._local)

    def first(self, number: int) -> int:
        """Return the first record of a segment."""
        row = self.row(number)
        return self._local[number - len(self._cold)][0] if row is None else row.base

    def path(self, number: int) -> str:
        row = self.row(number)
        if row is None:
            return self._local[number - len(self._cold)][1]
        return rows.cached_path(self.directory, self._life, row)

    def holding(self, offset: int) -> int:
        """Return the number of the segment that holds `offset`; 0 if no segment does."""
        if self._cold and offset < self._local[0][0]:
            return max(0, bisect_right(self._cold, offset, key=lambda row: row.base) - 1)
        return max(0, len(self._cold) + sum(first <= offset for first, _ in self._local) - 1)

    def open(self, number: int, owner: bool = False) -> SegmentReader:
        """Open a segment. Raises NotHereError for a row that was not fetched in."""
        row, path = self.row(number), self.path(number)
        try:
            found = SegmentReader(path, self.first(number), self.by_seq, number + 1 < len(self), owner)
        except FileNotFoundError:
            if row is None:
                raise
            raise NotHereError(self.directory, self._life, row) from None
        if row is not None:
            Segments.cold_reads += 1
            with contextlib.suppress(OSError):  # another user's: then it does not stay for longer
                os.utime(os.path.dirname(path))
        return found
