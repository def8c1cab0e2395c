"""A range of a log's records as bytes of its files: checked span by span, then sent from the files themselves.

Owner       None: it only reads, without a lock. One thread at a time may use a range.
Invariant   A span is returned only after each of its blocks was read and checked (kmq.log.reader). It holds whole
            lines, in order; all spans together are the records first_offset…next_offset-1, `length` bytes.
End         Fixed at the start; later records are not part of the range. If damage hides the end, the range ends with
            good records in front of the damage. A reader that resumes at next_offset then reaches the damage.
Files       One segment is open at a time, so a range of any length costs two descriptors. An open segment is read to
            its end even if retention deletes it. A segment that is deleted, or replaced by compaction, before its
            turn raises FileNotFoundError.
Not covered A disk that returns other bytes the second time: checked bytes are sent from the page cache a moment later.
"""

from collections.abc import Generator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from kmq.log.damage import DamageError
from kmq.log.reader import LogReader
from kmq.log.segment import CheckedLines, within
from kmq.log.segment_reader import LineStart, SegmentReader
from kmq.message import record

PIECE_BYTES = 2 << 20  # in a span: checking takes a few milliseconds
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
    file: tuple[int, int]  # inode, size: in a sealed segment they change only if it is replaced
    offset: int
    begin: int
    next_offset: int
    stop: int


class Range:
    """The records start…end-1 of a log, as far as they exist."""

    def __init__(self, log: LogReader, start: int, end: int, max_bytes: int = 0) -> None:
        """`max_bytes`: end with a block after about that many bytes of one segment; 0: no limit."""
        self.first_offset = self.next_offset = start
        self._log = log
        self._parts: list[_Part] = []
        self._locate(end, max_bytes)
        self.length = sum(part.stop - part.begin for part in self._parts)
        self.reached = self.first_offset  # behind the records of the spans that were taken
        self._segment: SegmentReader | None = None  # that the last span is of
        self._spans = self._check()

    def take(self) -> Span | None:
        """Return the next span; None at the end. Raises DamageError once all good records in front are taken."""
        return next(self._spans, None)

    def note_read(self, offset: int, position: int) -> None:
        """Note that the reader goes on with record `offset`, at byte `position` of the segment of the last span."""
        if self._segment is not None:
            self._log.note_read(self._segment, LineStart(offset, position))

    def close(self) -> None:
        self._spans.close()

    # --- locating ----------------------------------------------------------------------------------------------------

    def _locate(self, end: int, max_bytes: int) -> None:
        segments = self._log.segments()
        number = max(0, sum(first <= self.first_offset for first, _ in segments) - 1)
        for (first, path), (following, _) in pairwise([*segments[number:], (_NEVER, "")]):
            if first >= end:
                return
            try:
                segment = SegmentReader(path, first, self._log.by_seq, following < _NEVER)
            except DamageError:
                if self._parts:
                    return  # a shorter range: the good records in front of the damage
                raise
            with segment:
                offset, begin, piece = first, 0, None
                if not self._parts:
                    piece = _holding(segment, max(self.first_offset, first), self._log.known_in(segment))
                    if piece is None:
                        _check_whole(segment, max(self.first_offset, first), following)
                        continue
                    offset, begin = piece.offset, piece.position
                    self.first_offset = self.next_offset = offset
                    if max_bytes:
                        end = min(end, following, _cut(segment, piece, begin + max_bytes))
                    if offset >= end:
                        return
                stop, self.next_offset = segment.size, following
                if piece is not None and piece.end == segment.size and piece.next_offset <= end < following:
                    self.next_offset = piece.next_offset  # who follows gets few lines: they need no second look
                elif end < following:
                    stop, self.next_offset = _end(segment, LineStart(offset, begin), end)
                if stop > begin or segment.sealed:
                    file = segment.inode, segment.size
                    self._parts.append(_Part(first, path, segment.sealed, file, offset, begin, self.next_offset, stop))

    # --- checking ----------------------------------------------------------------------------------------------------

    def _check(self) -> Generator[Span, None, None]:
        for part in self._parts:
            with SegmentReader(part.path, part.first, self._log.by_seq, part.is_sealed) as segment:
                if part.is_sealed and (segment.inode, segment.size) != part.file:
                    raise FileNotFoundError(f"{part.path}: has been replaced")
                yield from self._check_part(segment, part)

    def _check_part(self, segment: SegmentReader, part: _Part) -> Generator[Span, None, None]:
        at, offset = part.begin, part.offset
        is_over = False
        while not is_over:
            end, offset, is_over, damage = _checked(segment, LineStart(offset, at), part.stop)
            if end > at:
                self.reached = part.next_offset if end == part.stop else offset
                if damage is None:
                    self._segment = segment
                    self.note_read(self.reached, end)
                yield Span(segment.fd, at, end - at)
                at = end
            if damage is not None:
                raise damage
        if at < part.stop:
            raise segment.damage(at, part.stop, offset, offset + 1, "the log ends inside the block")
        _check_whole(segment, offset, part.next_offset)


def _checked(segment: SegmentReader, start: LineStart, stop: int) -> tuple[int, int, bool, DamageError | None]:
    """Check the lines from `start` on, a span at most. Return (byte, offset) where they end, and why they end there.

    Nothing of them is kept: a client may take its time to read a span, and a line may have KMQ_MAX_LINE.
    """
    offset, end = start
    try:
        for piece in segment.checked_lines(start.offset, start):
            following = min(piece.position + len(piece.lines), stop)
            if following <= start.position:
                continue  # the block in front, which an unindexed start is checked against
            end, offset = following, piece.next_offset
            if end == stop or end - start.position >= PIECE_BYTES:
                return end, offset, end == stop, None
    except DamageError as err:
        return end, offset, True, err
    return end, offset, True, None


def _check_whole(segment: SegmentReader, offset: int, following: int) -> None:
    """Raise DamageError if the end of a sealed segment is missing; the WAL may have gaps, from drop_oldest."""
    if segment.sealed and not segment.by_seq and offset < following:
        raise segment.damage(segment.size, segment.size, offset, following, "the log ends before the next segment")


def _holding(segment: SegmentReader, offset: int, known: LineStart) -> CheckedLines | None:
    """Return the lines of the block with the first record at `offset` or later, from that record on."""
    for piece in segment.checked_lines(offset, known):
        if piece.next_offset > offset:
            lines = _rest(piece, offset, segment.by_seq)
            first = record.seq_of(lines) if segment.by_seq else max(offset, piece.offset)
            return CheckedLines(first, piece.position + len(piece.lines) - len(lines), lines, piece.next_offset)
    return None


def _rest(piece: CheckedLines, offset: int, by_seq: bool) -> bytes:
    """Return the lines of a block from record `offset` on."""
    if by_seq:
        return within(piece.lines, offset, _NEVER)
    ahead = offset - piece.offset
    return piece.lines.split(b"\n", ahead)[ahead] if ahead > 0 else piece.lines


def _cut(segment: SegmentReader, piece: CheckedLines, limit: int) -> int:
    """Return the offset behind the last block up to byte `limit`, or behind `piece` if that is later."""
    if limit >= segment.size:
        return _NEVER
    with suppress(DamageError):
        last = segment.index.last(lambda entry: entry.position <= limit)
        return max(piece.next_offset, last.entry.offset if last else 0)
    return piece.next_offset


def _end(segment: SegmentReader, known: LineStart, end: int) -> tuple[int, int]:
    """Return (byte, offset) where the records before `end` stop, given the start of an earlier line."""
    with suppress(DamageError):
        return _stop(segment, end, known, end)
    return _stop(segment, known[0], known, end, known[1] + PIECE_BYTES)


def _stop(segment: SegmentReader, offset: int, known: LineStart, end: int, limit: int = _NEVER) -> tuple[int, int]:
    """Return the same by reading from record `offset` on, at most to byte `limit` or to damage."""
    following, stop = known
    found = False
    try:
        for piece in segment.checked_lines(offset, known):
            found, following, stop = True, piece.next_offset, piece.position + len(piece.lines)
            if following >= end:
                return stop - (len(_rest(piece, end, segment.by_seq)) if following > end else 0), end
            if stop >= limit:
                break
    except DamageError:
        if not found:
            raise
    return stop, following
