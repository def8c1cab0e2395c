"""A range of a log's records as bytes of its files, checked piece by piece, to be sent from the files themselves.

Owner       nobody: read-only, needs no lock. One thread at a time.
Invariant   A span is named after each of its blocks was read and found right (kmq.log.reader). It holds whole lines, in order;
            all spans together are the records first_offset…next_offset-1, `length` bytes.
End         Decided at the start; what is written later is not part of it. Where the end cannot be looked up for damage, the
            range is a piece of what is good in front of it: whoever goes on at next_offset comes to the damage.
Files       One segment is open at a time: a range of any length costs two descriptors. What retention takes while it is open
            is read to its end; one that is gone before its turn, or replaced by a compacted one, is a FileNotFoundError.
Not covered A disk that answers differently the second time: what has been checked is sent from the page cache, a moment later.
"""

from collections.abc import Generator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from kmq import record
from kmq.log.damage import DamageError
from kmq.log.lines import CheckedLines, within
from kmq.log.reader import LogReader
from kmq.log.segment_reader import LineStart, SegmentReader

PIECE_BYTES = 2 << 20  # checked, then sent: a few milliseconds of work
_NEVER = 1 << 63


class Span(NamedTuple):
    """`nbytes` bytes from byte `begin` of the file that is open as `fd` until the next span is taken."""

    fd: int
    begin: int
    nbytes: int


class _Part(NamedTuple):
    """The bytes begin…stop-1 of one segment: the records offset…next_offset-1."""

    first: int
    path: str
    is_sealed: bool
    file: tuple[int, int]  # inode, size: of a sealed one they stay, unless it is replaced
    offset: int
    begin: int
    next_offset: int
    stop: int


class Range:
    """The records start…end-1 of a log, or as many of them as there are."""

    def __init__(self, log: LogReader, start: int, end: int, max_bytes: int = 0) -> None:
        """`max_bytes`, 0: any: cut at the end of a block, to about so many bytes of one segment."""
        self.first_offset = self.next_offset = start
        self._log = log
        self._parts: list[_Part] = []
        self._locate(end, max_bytes)
        self.length = sum(part.stop - part.begin for part in self._parts)
        self._spans = self._check()

    def take(self) -> Span | None:
        """The next span; None at the end. Raises DamageError once all that is good in front of the damage has been taken."""
        return next(self._spans, None)

    def close(self) -> None:
        self._spans.close()

    # --- where it is -------------------------------------------------------------------------------------------------

    def _locate(self, end: int, max_bytes: int) -> None:
        segments = self._log.segments()
        number = max(0, sum(first <= self.first_offset for first, _ in segments) - 1)
        for (first, path), (following, _) in pairwise([*segments[number:], (_NEVER, "")]):
            if first >= end:
                return
            try:
                held = SegmentReader(path, first, self._log.by_seq, following < _NEVER)
            except DamageError:
                if self._parts:
                    return  # a piece: what is good in front of it
                raise
            with held:
                offset, begin = first, 0
                if not self._parts:
                    piece = _holding(held, max(self.first_offset, first))
                    if piece is None:
                        _check_whole(held, max(self.first_offset, first), following)
                        continue
                    offset, begin = piece.offset, piece.position
                    self.first_offset = self.next_offset = offset
                    if max_bytes:
                        end = min(end, following, _cut(held, piece, begin + max_bytes))
                    if offset >= end:
                        return
                stop, self.next_offset = held.size, following
                if end < following:
                    stop, self.next_offset = _end(held, LineStart(offset, begin), end)
                if stop > begin or held.sealed:
                    file = held.inode, held.size
                    self._parts.append(_Part(first, path, held.sealed, file, offset, begin, self.next_offset, stop))

    # --- what it holds -----------------------------------------------------------------------------------------------

    def _check(self) -> Generator[Span, None, None]:
        for part in self._parts:
            with SegmentReader(part.path, part.first, self._log.by_seq, part.is_sealed) as held:
                if part.is_sealed and (held.inode, held.size) != part.file:
                    raise FileNotFoundError(f"{part.path}: has been replaced")
                yield from self._check_part(held, part)

    def _check_part(self, held: SegmentReader, part: _Part) -> Generator[Span, None, None]:
        at = end = part.begin
        offset = part.offset
        try:
            for piece in held.checked_lines(part.offset, LineStart(part.offset, part.begin)):
                end, offset = min(piece.position + len(piece.lines), part.stop), piece.next_offset
                if end == part.stop:
                    break
                if end - at >= PIECE_BYTES:
                    yield Span(held.fd, at, end - at)
                    at = end
        except DamageError:
            if end > at:
                yield Span(held.fd, at, end - at)
            raise
        if end > at:
            yield Span(held.fd, at, end - at)
        if end < part.stop:
            raise held.damage(end, part.stop, offset, offset + 1, "the log ends in it")
        _check_whole(held, offset, part.next_offset)


def _check_whole(held: SegmentReader, offset: int, following: int) -> None:
    """Records of a partition have no gaps; the WAL has, under drop_oldest."""
    if held.sealed and not held.by_seq and offset < following:
        raise held.damage(held.size, held.size, offset, following, "the log ends before the next segment")


def _holding(held: SegmentReader, offset: int) -> CheckedLines | None:
    """The piece that holds the first record at `offset` or later, without what lies in front of that."""
    for piece in held.checked_lines(offset):
        if piece.next_offset > offset:
            lines = _rest(piece, offset, held.by_seq)
            first = record.seq_of(lines) if held.by_seq else max(offset, piece.offset)
            return CheckedLines(first, piece.position + len(piece.lines) - len(lines), lines, piece.next_offset)
    return None


def _rest(piece: CheckedLines, offset: int, by_seq: bool) -> bytes:
    """The lines of a piece from record `offset` on."""
    if by_seq:
        return within(piece.lines, offset, _NEVER)
    ahead = offset - piece.offset
    return piece.lines.split(b"\n", ahead)[ahead] if ahead > 0 else piece.lines


def _cut(held: SegmentReader, piece: CheckedLines, limit: int) -> int:
    """The offset at which a range that begins in `piece` ends with a block, up to byte `limit`, but not before the piece does."""
    if limit >= held.size:
        return _NEVER
    with suppress(DamageError):
        found = held.index.last(lambda entry: entry.position <= limit)
        return max(piece.next_offset, found.entry.offset if found else 0)
    return piece.next_offset


def _end(held: SegmentReader, known: LineStart, end: int) -> tuple[int, int]:
    """(byte, offset) where the records before `end` stop, which begin at `known`, (offset, byte)."""
    with suppress(DamageError):
        return _stop(held, end, known, end)
    return _stop(held, known[0], known, end, known[1] + PIECE_BYTES)


def _stop(held: SegmentReader, offset: int, known: LineStart, end: int, limit: int = _NEVER) -> tuple[int, int]:
    """The same, found by reading from record `offset` on, to byte `limit` or damage at most."""
    following, stop = known
    found = False
    try:
        for piece in held.checked_lines(offset, known):
            found, following, stop = True, piece.next_offset, piece.position + len(piece.lines)
            if following >= end:
                return stop - (len(_rest(piece, end, held.by_seq)) if following > end else 0), end
            if stop >= limit:
                break
    except DamageError:
        if not found:
            raise
    return stop, following
