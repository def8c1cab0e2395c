"""Times in buckets of doubling width, in words of shared memory: one for each of TIMED on the stats page.

    observe(0.0001): 100 µs are counted in bucket 1, which has times above 64 µs and up to 128 µs

A histogram has 21 counts, one per bucket; then the sum of all times in microseconds, their number, and a spare word.
Bucket i counts times of at most 64 µs * 2^i, and more than the bucket before; the last counts all longer times.

Invariant   A histogram has one writer, which writes the sum and the number last: a reader never finds a higher number
            there than in the buckets.
"""

from collections.abc import Sequence

_FIRST_US = 64
_SHIFT = 6  # log2 of _FIRST_US
BUCKETS = 21
WORDS = 24
_LAST = BUCKETS - 1
_SUM, _COUNT = BUCKETS, BUCKETS + 1
BOUNDS_S = tuple((_FIRST_US << at) / 1e6 for at in range(_LAST))  # upper bounds of all buckets except the last


class HistogramSnapshot:
    """A histogram at one instant. `counts`: by bucket, not cumulative."""

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self, counts: tuple[int, ...], sum_s: float, count: int) -> None:
        self.counts, self.sum_s, self.count = counts, sum_s, count


class Histogram:
    """Times in buckets of doubling width: WORDS words of shared memory."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview | None = None) -> None:
        if words is not None:
            self.lie_in(words)

    def lie_in(self, words: memoryview) -> None:
        """Use these words from now on."""
        self._words = words

    def observe(self, seconds: float, n: int = 1) -> None:
        """Count `n` events that took this long each."""
        us = int(seconds * 1e6) if seconds > 0 else 0  # a clock that was set back takes no time
        at = ((us - 1) >> _SHIFT).bit_length() if us > 0 else 0
        words = self._words
        words[at if at < _LAST else _LAST] += n
        words[_SUM] += us * n
        words[_COUNT] += n

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts as they are now."""
        sum_us, count = self._words[_SUM], self._words[_COUNT]
        return HistogramSnapshot(tuple(self._words[:BUCKETS].tolist()), sum_us / 1e6, count)

    def wipe(self) -> None:
        """Forget all times."""
        for at in range(WORDS):
            self._words[at] = 0

    def words(self) -> list[int]:
        """Return a copy of all words."""
        return self._words.tolist()

    def copy_from(self, words: Sequence[int]) -> None:
        """Copy the words of another histogram."""
        for at, word in enumerate(words):
            self._words[at] = word


def quantile(snapshot: HistogramSnapshot, q: float) -> float | None:
    """Return the time in seconds that a share `q` of the events did not exceed; None without an event.

    Within a bucket the events are taken to be spread evenly. The last bucket has no upper bound, so its lower bound is
    returned.
    """
    total = sum(snapshot.counts)
    if not total:
        return None
    rank, below = q * total, 0
    for at, count in enumerate(snapshot.counts):
        if count and below + count >= rank:
            low = BOUNDS_S[at - 1] if at else 0.0
            high = BOUNDS_S[at] if at < _LAST else low
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return BOUNDS_S[-1]


def difference(new: HistogramSnapshot, old: HistogramSnapshot) -> HistogramSnapshot:
    """Return what was counted between two snapshots; all of `new` if the process was restarted in between."""
    counts = tuple(later - earlier for later, earlier in zip(new.counts, old.counts, strict=True))
    if new.count < old.count or min(counts) < 0:
        return new
    return HistogramSnapshot(counts, new.sum_s - old.sum_s, new.count - old.count)
