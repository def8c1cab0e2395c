"""Whole blocks of a segment, read at once, for readers that count lines with numpy, which this package must not import.

Invariant   Every block of an extent has the right crc. The caller counts the records. An extent may end early without
            a reason: the caller continues there with kmq/log/reader.py, which raises the error, if any.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise

from kmq.log.damage import DamageError
from kmq.log.index import Entry
from kmq.log.segment_reader import SegmentReader


class Extent:
    """Whole blocks as they lie in a log. Block n begins with record offsets[n] at byte edges[n] of `data`.

    The last pair is the end, and the record that follows it.
    """

    __slots__ = ("data", "edges", "offsets")

    def __init__(self, data: bytes, edges: list[int], offsets: list[int]) -> None:
        self.data, self.edges, self.offsets = data, edges, offsets


def read_extents(segment: SegmentReader, offset: int, end: int, nbytes: int) -> Iterator[Extent]:
    """Yield final blocks, from the block that holds `offset` up to record `end`, about `nbytes` at once.

    Ends in front of a block that differs from the index, of the open block, and of lines that no index line covers.
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


def _runs(segment: SegmentReader, at: int, end: int, nbytes: int) -> Iterator[list[Entry]]:
    """Yield the index entries of runs of final blocks, each with the entry behind it; from byte `at` of the index."""
    run: list[Entry] = []
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


def _read(segment: SegmentReader, entries: list[Entry]) -> Extent:
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
