"""Stored lines in blocks whose newlines are known: each byte is read once, summed once and searched once.

Most of a log is final blocks of an index. LogReader.extents gives about 1 MiB of them, their crcs checked; one search
finds their newlines, which count the records (as the index must) and later cut the lines into fields (columns.Block).

Invariant   Records and damage are always those that LogReader.read reports. If an extent differs from its index, or
            there is no extent (the open block, the unindexed tail, a segment that is being swapped or was removed),
            LogReader.read continues from there, and serves or raises. Only whole lines of the requested range are
            handed out, in order.
Memory      One extent at a time; a block that was handed out shares no bytes with the next one.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kmq.log.reader import Extent, LogReader
from kmq.log.segment import last_line, within
from kmq.message import record

BLOCK_BYTES = 1 << 20  # size of the blocks handed out: they stay in the processor's cache
_LINE_BYTES = 512  # an assumed length; longer lines cost more calls of LogReader.read
_NEWLINE = ord("\n")


class Lines:
    """Whole stored lines from record `offset` up to `next_offset`. A bare newline is a compacted record."""

    __slots__ = ("data", "newlines", "next_offset", "offset")

    def __init__(self, offset: int, data: bytes, newlines: npt.NDArray[np.int64], by_seq: bool) -> None:
        self.offset, self.data, self.newlines = offset, data, newlines
        self.next_offset = record.seq_of(last_line(data)) + 1 if by_seq else offset + len(newlines)

    def within(self, low: int, high: int, by_seq: bool) -> "Lines | None":
        """Return the lines with offsets low…high-1, or None."""
        if self.offset >= low and self.next_offset <= high:
            return self
        if by_seq:
            kept = within(self.data, low, high - 1)
            return of_bytes(record.seq_of(kept), kept, by_seq) if kept else None
        first, stop = max(0, low - self.offset), min(len(self.newlines), high - self.offset)
        if first >= stop:
            return None
        begin, end = int(self.newlines[first - 1]) + 1 if first else 0, int(self.newlines[stop - 1]) + 1
        return Lines(self.offset + first, self.data[begin:end], self.newlines[first:stop] - begin, by_seq)


def find_newlines(data: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)


def of_bytes(offset: int, data: bytes, by_seq: bool) -> Lines:
    return Lines(offset, data, find_newlines(data), by_seq)


def read(log: LogReader, start: int, end: int, nbytes: int = BLOCK_BYTES) -> Iterator[Lines]:
    """Yield records start…end-1, checked. They begin later if retention removed the start. They end with the log."""
    offset = start
    while offset < end:
        for lines in _final(log, offset, end, nbytes):
            yield lines
            offset = lines.next_offset
        if offset >= end:
            return
        # For a micro-batch of a few records do not read a whole block.
        first, data = log.read(offset, min(nbytes, (end - offset + 128) * _LINE_BYTES))
        if not data or first >= end:
            return
        found = of_bytes(first, data, log.by_seq)
        offset = found.next_offset
        if kept := found.within(first, end, log.by_seq):
            yield kept


def _final(log: LogReader, offset: int, end: int, nbytes: int) -> Iterator[Lines]:
    """Yield the same from the final blocks of one segment."""
    low = offset
    for extent in log.extents(offset, end, nbytes):
        counted = _counted(extent, log.by_seq)
        if counted is None:
            return
        if kept := counted.within(low, end, log.by_seq):
            yield kept
            low = 0  # do not hide seqs that are out of order
        if len(counted.data) < len(extent.data):
            return


def _counted(extent: Extent, by_seq: bool) -> Lines | None:
    """Return the blocks of an extent before the first whose record count in the index is wrong; None without any."""
    newlines = find_newlines(extent.data)
    if by_seq:
        return Lines(extent.offsets[0], extent.data, newlines, by_seq)
    counts = np.searchsorted(newlines, extent.edges)
    wrong = np.flatnonzero(counts != np.array(extent.offsets) - extent.offsets[0])
    good = int(wrong[0]) - 1 if len(wrong) else len(counts) - 1
    if not good:
        return None
    return Lines(extent.offsets[0], extent.data[: extent.edges[good]], newlines[: counts[good]], by_seq)
