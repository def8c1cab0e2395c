"""Looks up many seqs at once: in ranges, and in the queues where they belong."""

from collections.abc import Iterable

import numpy as np

from kmq.log import dropped
from kmq.spark.audit.findings import SeqRange
from kmq.spark.source.columns import Numbers


class SeqRanges:
    """Ranges of seqs, sorted, and merged where they touch."""

    def __init__(self, ranges: Iterable[SeqRange]) -> None:
        joined: list[list[int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last])
        self.ranges = [dropped.SeqRange(first, last) for first, last in joined]
        self._firsts = np.array([first for first, _ in joined], np.int64)
        self._lasts = np.array([last for _, last in joined], np.int64)

    def hold(self, seqs: Numbers) -> Numbers:
        """Return for each seq whether it lies in one of the ranges."""
        if not self.ranges:
            return np.zeros(len(seqs), bool)
        at = np.searchsorted(self._firsts, seqs, "right") - 1
        held: Numbers = (at >= 0) & (seqs <= self._lasts[at])
        return held


class TargetOfSeq:
    """seq → number of the queue where it belongs."""

    def __init__(self, seqs: Numbers, targets: Numbers) -> None:
        order = np.argsort(seqs, kind="stable")
        self._seqs, self._targets = seqs[order], targets[order]

    def get(self, seqs: Numbers) -> Numbers:
        """Return the target of each seq; -1 for seqs without a target."""
        found = np.full(len(seqs), -1, np.int64)
        if len(self._seqs):
            at = np.minimum(np.searchsorted(self._seqs, seqs), len(self._seqs) - 1)
            same = self._seqs[at] == seqs
            found[same] = self._targets[at[same]]
        return found


def is_first_time(seqs: Numbers) -> Numbers:
    """Return for each seq whether it occurs for the first time."""
    first_time = np.zeros(len(seqs), bool)
    first_time[np.unique(seqs, return_index=True)[1]] = True
    return first_time


def concatenated(parts: Iterable[Numbers]) -> Numbers:
    """Return all parts as one array, which is empty without parts."""
    return np.concatenate([np.empty(0, np.int64), *parts])
