"""Cutting a range of a log into runs of blocks of about one size, from the indexes alone. Readers check the data."""

import contextlib

from kmq.log.segment_reader import SegmentReader, Segments


def cuts(segments: Segments, start: int, end: int, nbytes: int) -> list[int]:
    """Return the offsets that cut the records start…end-1 into runs of about `nbytes`, at ends of blocks."""
    cutter = _Cutter(start, end, nbytes)
    for number in range(len(segments)):
        first = segments.first(number)
        if first >= end:
            break
        if number + 1 < len(segments) and segments.first(number + 1) <= start:
            continue
        with contextlib.suppress(FileNotFoundError), segments.open(number) as segment:
            cutter.add(segment)
    return cutter.offsets


class _Cutter:
    """Goes through the segments in order. Since the last cut, at record `_offset`, it has seen `_seen` bytes."""

    def __init__(self, start: int, end: int, nbytes: int) -> None:
        self.offsets: list[int] = []
        self._end, self._nbytes = end, nbytes
        self._offset, self._seen = start, 0

    def add(self, segment: SegmentReader) -> None:
        if self._seen >= self._nbytes:  # a cut is overdue since the last block of the segment before
            self.offsets.append(segment.first)
            self._seen = 0
        offset = max(self._offset, segment.first)
        begin = segment.index.last(lambda entry: entry.offset <= offset)
        position = begin.entry.position if begin else 0
        want = self._nbytes - self._seen
        while position + want < segment.size:
            limit = position + want
            line = segment.index.last(lambda entry: entry.position <= limit)  # noqa: B023 (called at once)
            if line is None or line.entry.offset <= offset:
                want *= 2  # a block of long lines is larger than that
                continue
            if line.entry.offset >= self._end:
                break
            offset, position = line.entry.offset, line.entry.position
            self.offsets.append(offset)
            self._seen, want = 0, self._nbytes
        self._seen += max(0, segment.size - position)
        self._offset = offset
