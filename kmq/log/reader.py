"""Reading a log, the WAL or a partition, while it grows, rolls and is retained: lookups and checked blocks.

Owner       nobody: read-only, needs no lock.
Invariant   No byte of a block is handed out before the block's crc was found right. What the index does not speak of yet, at
            most the last second of writes, is checked line by line: syntax, no NUL, seqs that rise. Damage raises
            DamageError as soon as it is reached, never before what is good in front of it has been handed out, and nothing
            is ever passed over in silence.
Numbers     A record's offset is its seq in the WAL, its position in a partition. Lookups are O(log n) reads of a few bytes:
            over the names (or first lines) of the segments, then over the lines of one index. What they find is checked
            against the data, so a damaged index line leads to an error or to a longer search, not to a wrong answer.
Extents     `Log.extents` gives final blocks of an index for who counts lines faster than this module may (it imports no numpy):
            their crcs are right, their records are counted by the caller. It never says why it ends: `Log.read` goes on there.
Live        Each call looks anew. The index is opened before the log: it may say less than the log holds, never more. A log
            whose open block gets longer, or gets its final line, meanwhile is looked at again. What retention takes away while
            it is read is read to its end; what it has taken before is not there: a read that begins below `first_offset`
            answers from there, and its offset says so. A segment that compaction swaps is read as it was, or as it is.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise

from kmq import record
from kmq.log import identity, segment
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.disk import find_tail
from kmq.log.index import BLOCK_BYTES, LABEL, MAX_LABEL, Entry, label, parse_line, read_entries, read_label
from kmq.log.lines import CheckedLines, bad_line, first_at, is_stored, last_line, seqs_of, within

WAL = "__append"  # what the WAL is called among topics: no topic can be
READ_BYTES = 1 << 20  # handed out at once, unless one line is longer
_INDEX_LINE = 256  # bytes; an index line is shorter
_TAIL = 1 << 12  # bytes in front of a record's end in which its beginning is looked for
_HEAD = 1 << 12  # bytes of a segment that its first record's topic lies in
_WINDOW = 1 << 14  # bytes of an index read at once in order: some 300 blocks


class Extent:
    """Whole blocks as they lie in a log, read at once. Their crcs are right; how many records they hold is still to be counted.

    Block n begins with record offsets[n] at byte edges[n] of `data`; the last pair is the end, and what follows it.
    """

    __slots__ = ("data", "edges", "offsets")

    def __init__(self, data: bytes, edges: list[int], offsets: list[int]) -> None:
        self.data, self.edges, self.offsets = data, edges, offsets


class Index:
    """The lines of one index file as they are now; one that is just being written is not among them."""

    def __init__(self, path: str) -> None:
        self.path, self.fd, self.size = path, -1, 0
        self.label = b""  # the line that says whose it is
        with contextlib.suppress(FileNotFoundError):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self.fd).st_size
            start = max(0, size - _INDEX_LINE)
            whole = start + os.pread(self.fd, _INDEX_LINE, start).rfind(b"\n") + 1
            self.size = (
                whole if whole > start or not start else size
            )  # no line is so long: found bad when it is reached
            self.label = read_label(os.pread(self.fd, MAX_LABEL, 0))
        self.begin = min(len(self.label), self.size)  # of the first entry

    @property
    def is_empty(self) -> bool:
        return self.size <= self.begin

    def is_in_force(self) -> bool:
        """Whether its name still leads to it, or still to no index."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return self.fd < 0
        return self.fd >= 0 and os.path.samestat(now, os.fstat(self.fd))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def line(self, at: int) -> tuple[int, int, Entry]:
        """(start, end, entry) of the line that holds byte `at`. Raises DamageError where it is none."""
        base = max(0, at - _INDEX_LINE)
        data = os.pread(self.fd, 2 * _INDEX_LINE, base)
        start = data.rfind(b"\n", 0, at - base) + 1
        stop = data.find(b"\n", at - base)
        return base + start, base + stop + 1, self._entry(data[start:stop] if stop >= 0 else b"", base + start)

    def _entry(self, line: bytes, at: int) -> Entry:
        entry = parse_line(line)
        if entry is None:
            raise self.damage(at, f"not an index line: {line[:40]!r}")
        return entry

    def damage(self, at: int, what: str) -> DamageError:
        return DamageError(self.path, at, self.size, 0, 0, what)

    def last(self, holds: Callable[[Entry], bool]) -> tuple[int, int, Entry] | None:
        """(start, end, entry) of the last line that `holds`, where all before it do and none after it."""
        best, low, high = None, self.begin, self.size
        while low < high:
            start, end, entry = self.line((low + high) // 2)
            if holds(entry):
                best, low = (start, end, entry), end
            else:
                high = start
        return best

    def entries(self, at: int = 0) -> Iterator[tuple[int, Entry]]:
        """(byte, entry) of the lines in force, the last for each offset, from the line at byte `at` on."""
        held: tuple[int, Entry] | None = None
        at = max(at, self.begin)
        while at < self.size:
            data = os.pread(self.fd, min(_WINDOW, self.size - at), at)
            whole = data.rfind(b"\n") + 1
            if not whole:
                raise self.damage(at, "no end of line")
            for line in data[: whole - 1].split(b"\n"):
                entry = self._entry(line, at)
                if held is not None:
                    before = held[1]
                    if (entry.offset > before.offset) != (
                        entry.position > before.position
                    ) or entry.offset < before.offset:
                        raise self.damage(at, "does not follow from the line before it")
                    if entry.offset > before.offset:
                        yield held
                held = at, entry
                at += len(line) + 1
        if held is not None:
            yield held


class Segment:
    """One segment as it is at this moment, open for reading; close it. Raises FileNotFoundError where it has gone.

    MisplacedError where it is another segment than its place says, or does not say whose it is. Its `owner` mends the latter.
    """

    def __init__(
        self, path: str, first: int, by_seq: bool, sealed: bool, owner: bool = False, trust: bool = False
    ) -> None:
        """`trust`: it is looked at as it is, whatever it says."""
        self.path, self.first, self.by_seq, self.sealed = path, first, by_seq, sealed
        while True:
            self.index = Index(segment.index_path(path))
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
            self.close()  # compaction came in between: it changes the log while there is no index, so now they are a pair
        if what:
            self.close()
            following = (start for start, _ in segment.listing(os.path.dirname(path)) if start > first)
            raise MisplacedError(self.path, 0, self.size, first, next(following, 0), what)

    def misplaced(self) -> str:
        """Why this is not the segment that its place speaks of; "" where nothing says so."""
        wanted, says = label(self.path), self.index.label
        if not wanted:
            return ""
        if says not in (b"", wanted):
            return f"its index says that it is another one: {says[len(LABEL) :].decode(errors='replace').strip()!r}"
        seq, key = self.first_record()
        if seq < 0:
            return ""
        if self.by_seq:
            return f"begins with seq {seq}" if seq < self.first else ""
        topic = os.path.basename(os.path.dirname(os.path.dirname(self.path))).encode()
        belongs = key.startswith(topic) and key[len(topic) : len(topic) + 1] in (b"", b".")
        return "" if belongs else f"begins with a record of {key[:100].decode(errors='replace')!r}"

    def unlabelled(self) -> str:
        """The same where an index should say whose it is, and none does. While compaction swaps it there is none."""
        if self.index.label or not self.size or not label(self.path):
            return ""
        if self.first_record()[0] < identity.labelled_from(self.path) or segment.is_being_swapped(self.path):
            return ""
        return "no index says whose it is"

    def first_record(self) -> tuple[int, bytes]:
        """(seq, routing key or its first bytes) of the first record; (-1, b"") where there is none that can be read."""
        head = os.pread(self.fd, _HEAD, 0)
        fields = head.lstrip(b"\n").split(b"|", 3)
        is_torn = len(fields) == 3 and len(head) < _HEAD
        if len(fields) < 3 or is_torn or not fields[0].isdigit():
            return -1, b""
        return int(fields[0]), fields[2]

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.index.close()
        os.close(self.fd)

    def damage(self, byte: int, end: int, first: int, following: int, what: str) -> DamageError:
        return DamageError(self.path, byte, end, first, following, what)

    # --- what an index line says -------------------------------------------------------------------------------------

    def blocks(self, at: int = 0) -> Iterator[tuple[int, Entry, Entry | None]]:
        """(byte, entry, the next one) of the blocks from the index line at byte `at` on; the last has none after it."""
        held: tuple[int, Entry] | None = None
        for here, entry in self.index.entries(at):
            if held is not None:
                yield *held, entry
            held = here, entry
        if held is not None:
            yield *held, None

    def fault(self, entry: Entry, data: bytes, following: int) -> str:
        """What contradicts the entry in `data`, the whole block; `following`: offset of the next one, 0: not known."""
        if what := self._misfit(entry, data):
            return what
        if following and not self.by_seq and entry.offset + data.count(b"\n") != following:
            return "the index counts other records"
        return ""

    def _misfit(self, entry: Entry, data: bytes | memoryview) -> str:
        """The same without counting records."""
        if zlib.crc32(data) != entry.crc:
            return "crc mismatch"
        head = bytes(data[:64])
        fields = head.split(b"|", 2)
        if head[:1] != b"\n" and (fields[1] != entry.recv_ts or (self.by_seq and int(fields[0]) != entry.offset)):
            return "the index speaks of another record"
        return ""

    def covered(self, entry: Entry) -> int:
        """Where what the provisional line `entry` speaks of ends: somewhere in its block, at the end of a line."""
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

    def pieces(self, offset: int, known: tuple[int, int] = (0, 0)) -> Iterator[CheckedLines]:
        """Checked lines from the block that holds `offset` on. `known`: (offset, position) of some line start."""
        found = self.index.last(lambda entry: entry.offset <= offset)
        if found is None and not self.index.is_empty:
            found = self.index.line(self.index.begin)  # drop_oldest may have taken the first records of the WAL
            if found[2].position or not self.by_seq:
                raise self.index.damage(found[0], f"does not begin with record {self.first}")
        if found is None:
            yield from self._unindexed(max((self.first, 0), known if known[0] <= offset else (0, 0)))
            return
        self._check_start(*found)
        yield from self.pieces_from(found[0], offset, known)

    def pieces_from(self, at: int, offset: int = 0, known: tuple[int, int] = (0, 0)) -> Iterator[CheckedLines]:
        """The same from the index line at byte `at` on."""
        for _, entry, following in self.blocks(at):
            end = following.position if following else self.covered(entry)
            data = os.pread(self.fd, end - entry.position, entry.position) if end <= self.size else b""
            after = following.offset if following else 0
            what = self.fault(entry, data, after) if len(data) == end - entry.position > 0 else "the log ends in it"
            if what:
                raise self.damage(entry.position, end, entry.offset, after or entry.offset + 1, what)
            after = after or self._next(entry.offset, data)
            yield CheckedLines(entry.offset, entry.position, data, after)
        counted = (after, end)
        yield from self._unindexed(known if counted < known and known[0] <= offset else counted, data)

    def extents(self, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
        """Blocks from the one that holds `offset` to before record `end`, about `nbytes` at once, as far as they are final.

        Ends in front of what is not as the index says, of the block that is still open, and of what no index speaks of.
        """
        found = self.index.last(lambda entry: entry.offset <= offset)
        if found is None:
            return
        self._check_start(*found)
        for run in self._runs(found[0], end, nbytes):
            made = self._extent(run)
            if made.data:
                yield made
            if len(made.edges) < len(run):
                return

    def _runs(self, at: int, end: int, nbytes: int) -> Iterator[list[Entry]]:
        """Entries of final blocks from the index line at byte `at` on, together of about `nbytes`, and the one behind them."""
        run: list[Entry] = []
        with contextlib.suppress(DamageError):
            for _, entry, following in self.blocks(at):
                if following is None or entry.offset >= end:
                    break
                run = [*(run or [entry]), following]
                if following.position - run[0].position >= nbytes:
                    yield run
                    run = []
        if run:
            yield run

    def _extent(self, entries: list[Entry]) -> Extent:
        """The blocks that begin with `entries`, up to one that is not good; the last entry is only where they end."""
        position = entries[0].position
        edges = [entry.position - position for entry in entries if entry.position <= self.size] or [0]
        data = os.pread(self.fd, edges[-1], position)
        good = 0
        with memoryview(data) as view:
            for entry, (low, high) in zip(entries, pairwise(edges), strict=False):
                if high > len(data) or self._misfit(entry, view[low:high]):
                    break
                good += 1
        offsets = [entry.offset for entry in entries[: good + 1]]
        return Extent(data[: edges[good]], edges[: good + 1], offsets)

    def _next(self, offset: int, lines: bytes) -> int:
        """The offset after those of `lines`, which begin with record `offset`."""
        if self.by_seq:
            return record.seq_of(last_line(lines)) + 1
        return offset + lines.count(b"\n")

    def _check_start(self, start: int, end: int, entry: Entry) -> None:
        """The offset of the last index line of a partition is checked by the lines of the block before it."""
        if start == self.index.begin:
            if (entry.offset, entry.position) != (self.first, 0) and not self.by_seq:
                raise self.index.damage(start, f"does not begin with record {self.first}")
        elif end == self.index.size and not self.by_seq and entry.offset != self.first:
            before = self.index.last(lambda each: each.offset < entry.offset)
            if before is not None:
                position = before[2].position
                data = os.pread(self.fd, max(0, min(entry.position, self.size) - position), position)
                if before[2].offset + data.count(b"\n") != entry.offset:
                    raise self.index.damage(start, "does not follow from the line before it")

    def _unindexed(self, start: tuple[int, int], before: bytes = b"\n") -> Iterator[CheckedLines]:
        """What follows `start`, (offset, position), where the index ends; `before` are the lines in front of it."""
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
        """(seq, recv_ts) of the first record at or after the line start `position`, unchecked; None where there is none."""
        while position < self.size:
            data = os.pread(self.fd, 4096, position)
            line = data.lstrip(b"\n")
            if line:
                fields = (line if len(line) > 64 else os.pread(self.fd, 64, position + len(data) - len(line))).split(
                    b"|", 2
                )
                with contextlib.suppress(ValueError, IndexError):
                    return int(fields[0]), record.parse_ts(fields[1])
                return None
            position += len(data)
        return None


class Log:
    """The WAL (`by_seq`) or one partition. Cheap to make and to keep; no descriptor stays open between calls."""

    def __init__(self, directory: str, by_seq: bool) -> None:
        self.directory, self.by_seq = directory, by_seq
        # Where the last read ended: inode and first offset of the segment (an inode is used again), offset, position of a line.
        self._known = (0, 0, 0, 0)

    def segments(self) -> list[tuple[int, str]]:
        """(first offset, path) of the segments, in order."""
        return segment.listing(self.directory)

    @property
    def first_offset(self) -> int:
        """The oldest offset there is, or was, before retention took all."""
        segments = self.segments()
        return segments[0][0] if segments else int(self.by_seq)

    def end_offset(self) -> int:
        """The offset that comes next, also where no index says whose the last segment is: `read` refuses that one."""
        while True:
            segments = self.segments()
            if not segments:
                return int(self.by_seq)
            with contextlib.suppress(FileNotFoundError), self._open(segments, len(segments) - 1, owner=True) as active:
                if self.by_seq:
                    tail = find_tail(active.fd, active.size, is_stored)
                    return record.seq_of(tail.last) + 1 if tail.last else active.first
                found = active.index.last(lambda _: True)
                start = (found[2].offset, found[2].position) if found else (active.first, 0)
                offset, position = max(start, self._known_in(active))
                while position < active.size:
                    data = os.pread(active.fd, READ_BYTES, position)
                    offset, position = offset + data.count(b"\n"), position + len(data)
                    if data.endswith(b"\n"):
                        self._known = active.inode, active.first, offset, position
                return offset

    def stamp_at_end(self, offset: int) -> tuple[int, int] | None:
        """(seq, recv_ts) of the record before `offset`, unchecked, where the last `end_offset` was that; None elsewhere."""
        inode, _, end, position = self._known
        if end != offset or not position:
            return None
        with contextlib.suppress(FileNotFoundError, IndexError), open(self.segments()[-1][1], "rb", buffering=0) as log:
            if os.fstat(log.fileno()).st_ino == inode:
                start = max(0, position - _TAIL)
                lines = os.pread(log.fileno(), position - start, start).split(b"\n")
                return record.parse_stored(lines[-2]) if len(lines) > 1 + (start > 0) else None
        return None

    def _known_in(self, held: Segment) -> tuple[int, int]:
        """Of the active segment only: what is sealed has an index, and compaction may give it another's inode."""
        inode, first, offset, position = self._known
        is_same = (inode, first) == (held.inode, held.first) and not held.sealed and position <= held.size
        return (offset, position) if is_same else (0, 0)

    def _open(self, segments: list[tuple[int, str]], number: int, owner: bool = False) -> Segment:
        first, path = segments[number]
        return Segment(path, first, self.by_seq, number + 1 < len(segments), owner)

    def read(self, offset: int, max_bytes: int = READ_BYTES) -> tuple[int, bytes]:
        """(offset of the first line, whole lines) from `offset` on, at most `max_bytes` or one line; b"" at the end.

        In a partition the next read begins at offset + lines.count(newline); a bare newline is a record that compaction took
        away. In the WAL it begins after the seq of the last line.
        """
        while True:
            segments = self.segments()
            number = max(0, sum(first <= offset for first, _ in segments) - 1)
            try:
                return self._read(segments, number, offset, max_bytes)
            except FileNotFoundError:  # retention was faster
                continue

    def _read(self, segments: list[tuple[int, str]], number: int, offset: int, max_bytes: int) -> tuple[int, bytes]:
        for at in range(number, len(segments)):
            offset = max(offset, segments[at][0])
            with self._open(segments, at) as held:
                first, lines = self._take(held, offset, max_bytes)
            if lines:
                return first, lines
            if held.sealed and not self.by_seq:
                raise held.damage(
                    held.size, held.size, offset, segments[at + 1][0], "the log ends before the next segment"
                )
        return offset, b""

    def _take(self, held: Segment, offset: int, max_bytes: int) -> tuple[int, bytes]:
        taken: list[bytes] = []
        length, first, end, following = 0, offset, 0, offset
        try:
            for piece in held.pieces(offset, self._known_in(held)):
                lines = piece.lines
                if not taken:
                    first, lines = self._from(piece, offset)
                    if not lines:
                        continue
                if taken and length + len(lines) > max_bytes:
                    break
                taken.append(lines)
                length, end, following = length + len(lines), piece.position + len(piece.lines), piece.next_offset
                if length >= max_bytes:
                    break
        except DamageError:
            if not taken:
                raise
        text = taken[0] if len(taken) == 1 else b"".join(taken)
        if length > max_bytes:
            text = text[: text.rfind(b"\n", 0, max_bytes) + 1 or text.find(b"\n") + 1]
        elif taken:
            self._known = held.inode, held.first, following, end
        return first, text

    def _from(self, piece: CheckedLines, offset: int) -> tuple[int, bytes]:
        """(offset, lines) of a piece less the lines before `offset`."""
        if not self.by_seq:
            ahead = max(0, offset - piece.offset)
            if ahead > piece.lines.count(b"\n"):
                return offset, b""
            return piece.offset + ahead, piece.lines.split(b"\n", ahead)[ahead] if ahead else piece.lines
        lines = within(piece.lines, offset, 1 << 63)
        return (record.seq_of(lines) if lines else offset), lines

    def extents(self, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
        """Whole blocks from the one that holds `offset` on, for who counts lines faster than `read`; of one segment.

        Ends early, also with nothing at all, wherever something is not as it should be, or may be changing: `read` serves what
        can be served there, or says what is wrong.
        """
        segments = self.segments()
        if not segments:
            return
        number = max(0, sum(first <= offset for first, _ in segments) - 1)
        with contextlib.suppress(FileNotFoundError, DamageError), self._open(segments, number) as held:
            yield from held.extents(max(offset, held.first), end, nbytes)

    def cuts(self, start: int, end: int, nbytes: int) -> list[int]:
        """Offsets between `start` and `end` that cut what lies there into pieces of about `nbytes`, at the ends of blocks.

        From the index alone; what it says is checked when a piece is read.
        """
        found: list[int] = []
        segments = self.segments()
        taken, offset = 0, start  # bytes since the last cut
        for at, (first, _) in enumerate(segments):
            if first >= end:
                break
            if at + 1 < len(segments) and segments[at + 1][0] <= start:
                continue
            with contextlib.suppress(FileNotFoundError), self._open(segments, at) as held:
                if taken >= nbytes:  # a cut was due in the last block of the segment before
                    found.append(first)
                    taken = 0
                taken, offset = self._cuts_in(held, max(offset, first), end, taken, nbytes, found)
        return found

    def _cuts_in(
        self, held: Segment, offset: int, end: int, taken: int, nbytes: int, found: list[int]
    ) -> tuple[int, int]:
        """Adds the cuts in one segment to `found`; (bytes since the last, offset of the last). `taken` is below `nbytes`."""
        begin = held.index.last(lambda entry: entry.offset <= offset)
        position = begin[2].position if begin else 0
        want = nbytes - taken
        while position + want < held.size:
            block = held.index.last(lambda entry: entry.position <= position + want)  # noqa: B023 (called at once)
            if block is None or block[2].offset <= offset:
                want *= 2  # one block, of long lines, is more than that
                continue
            if block[2].offset >= end:
                break
            offset, position = block[2].offset, block[2].position
            found.append(offset)
            taken, want = 0, nbytes
        return taken + max(0, held.size - position), offset

    # --- lookups -----------------------------------------------------------------------------------------------------

    def offset_of_seq(self, seq: int) -> int:
        """Offset of the first record with this seq or a later one; the end where there is none."""
        return self.find(seq, 0)[0]

    def offset_of_time(self, micros: int) -> int:
        """Offset of the first record received at this time (µs) or later; the end where there is none."""
        return self.find(micros, 1)[0]

    def find(self, target: int, field: int) -> tuple[int, str, int, bytes]:
        """(offset, path, byte, line) of the first record whose seq (field 0) or recv_ts (field 1) is at least `target`.

        At the end: (end offset, "", 0, b"").
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                end = self.end_offset()  # first: a record that comes while we look must not lie before it
                return self._find(self.segments(), target, field) or (end, "", 0, b"")

    def _find(self, segments: list[tuple[int, str]], target: int, field: int) -> tuple[int, str, int, bytes] | None:
        low, high = 0, len(segments)  # the segments before `low` begin before the target, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            with self._open(segments, middle) as held:
                head = held.stamp_at(0)
            if head is not None and head[field] < target:
                low = middle + 1
            else:
                high = middle
        for at in range(max(0, low - 1), len(segments)):
            with self._open(segments, at) as held:
                found = self._find_in(held, target, field)
            if found is not None:
                return found
        return None

    def _find_in(self, held: Segment, target: int, field: int) -> tuple[int, str, int, bytes] | None:
        def is_before(entry: Entry) -> bool:
            stamp = held.stamp_at(entry.position)
            return stamp is not None and stamp[field] < target

        found = held.index.last(is_before)
        for start in (found[2].offset if found else held.first, held.first):
            for number, piece in enumerate(held.pieces(start)):
                lines = piece.lines.split(b"\n")[:-1]
                at = first_at(lines, target, field)
                if at is None:
                    continue
                if not number and not at and start != held.first:
                    break  # a damaged probe led too far: from the beginning
                stamp = record.parse_stored(lines[at])
                offset = stamp[0] if self.by_seq and stamp else piece.offset + at
                return offset, held.path, piece.position + sum(map(len, lines[:at])) + at, lines[at]
            else:
                return None
        return None


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
    """The records low…high (inclusive) of the WAL as blocks of whole lines, in order; DamageError at what is not good.

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
    """Where in the segment at `path`, which begins with record `first`, that ends what its index speaks of.

    Raises DamageError where it is not as it was: a writer must not take that for a torn end, nor go on behind it.
    """
    entries = read_entries(segment.index_path(path), 1 << 62)  # without a torn last line, which a kill leaves
    if not entries:
        return 0
    with Segment(path, first, by_seq, sealed=False, owner=True) as held:
        return held.covered(entries[-1])


def check_place(path: str, first: int, by_seq: bool) -> None:
    """MisplacedError where a segment is another one than its place says; for its owner, before it goes on with it."""
    with Segment(path, first, by_seq, sealed=False, owner=True):
        pass
