"""Reading one segment, of the WAL or of a partition: whole lines, checked block by block against its index.

Owner       nobody: read-only, needs no lock.
Invariant   No byte of a block is handed out before the block's crc was found right. What no index line covers yet, at
            most the last second of writes, is checked line by line: syntax, no NUL, seqs that rise. Damage raises
            DamageError as soon as it is reached, never before what is good in front of it has been handed out, and
            nothing is skipped in silence.
Live        The index is opened before the log: it may say less than the log holds, never more. What was opened is read
            to its end, also where retention or compaction takes its name away.
"""

import contextlib
import os
import zlib
from collections import namedtuple
from collections.abc import Iterator

from kmq import record
from kmq.log import belonging, segment
from kmq.log.belonging import FirstRecord
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.index import BLOCK_BYTES, Entry
from kmq.log.index_reader import IndexLine, IndexReader
from kmq.log.lines import CheckedLines, bad_line, last_line, seqs_of

READ_BYTES = 1 << 20  # handed out at once, unless one line is longer


class LineStart(namedtuple("LineStart", ("offset", "position"))):
    """A record and the byte of a segment at which its line begins."""

    __slots__ = ()


UNKNOWN = LineStart(0, 0)


class IndexedBlock:
    """A block by its index line, at byte `at` of the index; `following`: the entry of the next block, if any."""

    __slots__ = ("at", "entry", "following")

    def __init__(self, at: int, entry: Entry, following: Entry | None) -> None:
        self.at, self.entry, self.following = at, entry, following


class SegmentReader:
    """One segment as it is at this moment, open for reading; close it. Raises FileNotFoundError where it is gone.

    Raises MisplacedError where it is another segment than its place says, or does not say which one it is. Its `owner`
    gives the latter a label.
    """

    def __init__(
        self, path: str, first: int, by_seq: bool, sealed: bool, owner: bool = False, trust: bool = False
    ) -> None:
        """`trust`: read it as it is, whatever it says of itself."""
        self.path, self.first, self.by_seq, self.sealed = path, first, by_seq, sealed
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
            self.close()  # compaction came in between. It changes the log while there is no index: now they are a pair
        if what:
            self.close()
            following = (start for start, _ in segment.listing(os.path.dirname(path)) if start > first)
            raise MisplacedError(self.path, 0, self.size, first, next(following, 0), what)

    def misplaced(self) -> str:
        """Why this is not the segment that its place speaks of; "" where nothing says so."""
        return belonging.why_misplaced(self.path, self.fd, self.first, self.by_seq, self.index.label)

    def unlabelled(self) -> str:
        """Why it cannot be believed without a label; "" where it has one, or needs none."""
        return "" if self.index.label else belonging.why_unlabelled(self.path, self.fd)

    def first_record(self) -> FirstRecord | None:
        return belonging.first_record(self.fd)

    def __enter__(self) -> "SegmentReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.index.close()
        os.close(self.fd)

    def damage(self, byte: int, end: int, first: int, following: int, what: str) -> DamageError:
        return DamageError(self.path, byte, end, first, following, what)

    # --- what an index line says -------------------------------------------------------------------------------------

    def blocks(self, at: int = 0) -> Iterator[IndexedBlock]:
        """The blocks from the index line at byte `at` on."""
        pending: tuple[int, Entry] | None = None
        for byte, entry in self.index.entries(at):
            if pending is not None:
                yield IndexedBlock(*pending, entry)
            pending = byte, entry
        if pending is not None:
            yield IndexedBlock(*pending, None)

    def fault(self, entry: Entry, data: bytes, following: int) -> str:
        """What in `data`, the whole block, contradicts its entry; "" for none. `following`: the next offset, or 0."""
        if what := self.misfit(entry, data):
            return what
        if following and not self.by_seq and entry.offset + data.count(b"\n") != following:
            return "the index counts other records"
        return ""

    def misfit(self, entry: Entry, data: bytes | memoryview) -> str:
        """As `fault`, without counting records."""
        if zlib.crc32(data) != entry.crc:
            return "crc mismatch"
        head = bytes(data[:64])
        fields = head.split(b"|", 2)
        if head[:1] != b"\n" and (fields[1] != entry.recv_ts or (self.by_seq and int(fields[0]) != entry.offset)):
            return "the index speaks of another record"
        return ""

    def covered(self, entry: Entry) -> int:
        """Up to which byte the provisional line `entry` covers its block; that is the end of a line."""
        data = self._block_from(entry.position)
        if zlib.crc32(data) == entry.crc and data:
            return entry.position + len(data)
        crc, at = 0, 0
        for line in data.split(b"\n")[:-1]:
            at += len(line) + 1
            crc = zlib.crc32(b"\n", zlib.crc32(line, crc))
            if crc == entry.crc:
                return entry.position + at
        what = "crc mismatch" if data else "the log ends before what its index speaks of"
        raise self.damage(entry.position, entry.position + len(data), entry.offset, entry.offset + 1, what)

    def _block_from(self, position: int) -> bytes:
        """The whole lines from `position` until a block is full, or the log ends."""
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

    def checked_lines(self, offset: int, known: LineStart = UNKNOWN) -> Iterator[CheckedLines]:
        """Checked lines from the block that holds `offset` on. `known`: some line start, from an earlier read."""
        begin = self.block_holding(offset)
        hint = known if known.offset <= offset else UNKNOWN
        if begin is None:
            yield from self._unindexed(max(LineStart(self.first, 0), hint))
            return
        for block in self.blocks(begin.start):
            checked = self._checked_block(block)
            yield checked
        yield from self._unindexed(max(LineStart(checked.next_offset, checked.end), hint), checked.lines)

    def block_holding(self, offset: int) -> IndexLine | None:
        """The index line of the block that holds `offset`; None where no index line covers it."""
        line = self.index.last(lambda entry: entry.offset <= offset)
        if line is None and not self.index.is_empty:
            line = self.index.line(self.index.begin)  # drop_oldest may have taken the first records of the WAL
            if line.entry.position or not self.by_seq:
                raise self.index.damage(line.start, f"does not begin with record {self.first}")
        if line is not None:
            self.check_start(line)
        return line

    def _checked_block(self, block: IndexedBlock) -> CheckedLines:
        entry, following = block.entry, block.following
        end = following.position if following else self.covered(entry)
        data = os.pread(self.fd, end - entry.position, entry.position) if end <= self.size else b""
        after = following.offset if following else 0
        what = self.fault(entry, data, after) if len(data) == end - entry.position > 0 else "the log ends in it"
        if what:
            raise self.damage(entry.position, end, entry.offset, after or entry.offset + 1, what)
        return CheckedLines(entry.offset, entry.position, data, after or self._next(entry.offset, data))

    def _next(self, offset: int, lines: bytes) -> int:
        """The offset after those of `lines`, which begin with record `offset`."""
        if self.by_seq:
            return record.seq_of(last_line(lines)) + 1
        return offset + lines.count(b"\n")

    def check_start(self, line: IndexLine) -> None:
        """The offset of the last index line of a partition is checked by the lines of the block before it."""
        entry = line.entry
        if line.start == self.index.begin:
            if (entry.offset, entry.position) != (self.first, 0) and not self.by_seq:
                raise self.index.damage(line.start, f"does not begin with record {self.first}")
        elif line.end == self.index.size and not self.by_seq and entry.offset != self.first:
            before = self.index.last(lambda other: other.offset < entry.offset)
            if before is not None:
                position = before.entry.position
                data = os.pread(self.fd, max(0, min(entry.position, self.size) - position), position)
                if before.entry.offset + data.count(b"\n") != entry.offset:
                    raise self.index.damage(line.start, "does not follow from the line before it")

    def _unindexed(self, start: LineStart, before: bytes = b"\n") -> Iterator[CheckedLines]:
        """What follows `start`, where the index ends; `before` are the lines in front of it."""
        offset, position = start
        after = max([0, *seqs_of(last_line(before))])
        want = READ_BYTES // 4  # checking is slow, and what a read does not take is checked again
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
                return  # a line that is being written, or a torn one

    def stamp_at(self, position: int) -> tuple[int, int] | None:
        """(seq, recv_ts) of the first record from the line start `position` on, unchecked; None without one."""
        while position < self.size:
            data = os.pread(self.fd, 4096, position)
            line = data.lstrip(b"\n")
            if line:
                if len(line) <= 64:
                    line = os.pread(self.fd, 64, position + len(data) - len(line))
                fields = line.split(b"|", 2)
                with contextlib.suppress(ValueError, IndexError):
                    return int(fields[0]), record.parse_ts(fields[1])
                return None
            position += len(data)
        return None


class Segments:
    """The segments of a log as they were listed, in order. They may be gone when they are opened."""

    def __init__(self, directory: str, by_seq: bool) -> None:
        self.by_seq, self.listed = by_seq, segment.listing(directory)

    def __len__(self) -> int:
        return len(self.listed)

    def first(self, number: int) -> int:
        """The first record of a segment."""
        return self.listed[number][0]

    def holding(self, offset: int) -> int:
        """Which segment holds this offset; the first one where none does."""
        return max(0, sum(first <= offset for first, _ in self.listed) - 1)

    def open(self, number: int, owner: bool = False) -> SegmentReader:
        first, path = self.listed[number]
        return SegmentReader(path, first, self.by_seq, number + 1 < len(self.listed), owner)
