"""Times in buckets of doubling width, in words of shared memory: one writer, any number of readers.

Layout      21 counts, one per bucket; then the sum of all times in microseconds, their number, and a spare word. Bucket
            i has the times of at most 64 µs * 2^i that no smaller bucket has; the last one has all longer times.
Invariant   The sum and the number are written last, so that a reader finds at most as many times in them as in the
            buckets.
"""

from collections.abc import Sequence

_FIRST_US = 64
_SHIFT = 6  # log2 of _FIRST_US
BUCKETS = 21
WORDS = 24
_LAST = BUCKETS - 1
_SUM, _COUNT = BUCKETS, BUCKETS + 1
BOUNDS_S = tuple((_FIRST_US << at) / 1e6 for at in range(_LAST))  # upper bounds of all buckets except the last


class Snapshot:
    """A histogram at one instant. `counts`: by bucket, not cumulative."""

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self, counts: tuple[int, ...], sum_s: float, count: int) -> None:
        self.counts, self.sum_s, self.count = counts, sum_s, count


EMPTY = Snapshot((0,) * BUCKETS, 0.0, 0)


class Histogram:
    """A histogram in WORDS words of 8 bytes."""

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

    def snapshot(self) -> Snapshot:
        """Return the counts as they are now."""
        sum_us, count = self._words[_SUM], self._words[_COUNT]
        return Snapshot(tuple(self._words[:BUCKETS].tolist()), sum_us / 1e6, count)

    def wipe(self) -> None:
        """Forget all times."""
        for at in range(WORDS):
            self._words[at] = 0

    def words(self) -> list[int]:
        """Return a copy of all words."""
        return self._words.tolist()

    def take(self, words: Sequence[int]) -> None:
        """Copy these words, which are those of another histogram."""
        for at, word in enumerate(words):
            self._words[at] = word


def quantile(snapshot: Snapshot, q: float) -> float | None:
    """Return the time in seconds that a share `q` of the events did not exceed; None without an event.

    Within a bucket the events are taken to be spread evenly. The last bucket has no upper bound: its lower one is given.
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


def difference(new: Snapshot, old: Snapshot) -> Snapshot:
    """Return what was counted between two snapshots; all of `new` if the process was restarted in between."""
    counts = tuple(later - earlier for later, earlier in zip(new.counts, old.counts, strict=True))
    if new.count < old.count or min(counts) < 0:
        return new
    return Snapshot(counts, new.sum_s - old.sum_s, new.count - old.count)
