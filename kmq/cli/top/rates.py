"""Counters → per second, over the last seconds.

Memory      One Meter per counter, with at most one sample a step; `Meters` forgets a counter that is no longer fed.
"""

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")

_WINDOW_S = 2.0  # long enough to be readable, short enough to see a stop at once
_SAMPLES = 16


class Meter:
    """One counter. It may begin again at 0: then its rate begins again, too."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def feed(self, at: float, count: int) -> float | None:
        """Add what the counter says at `at` (monotonic seconds); return its rate, None if it is not known yet."""
        samples = self._samples
        if samples and (count < samples[-1][1] or at <= samples[-1][0]):
            samples.clear()
        samples.append((at, count))
        while len(samples) > 2 and at - samples[1][0] >= _WINDOW_S:
            samples.popleft()
        if len(samples) < 2:
            return None
        first_at, first = samples[0]
        return (count - first) / (at - first_at)


class Meters(Generic[_T]):
    """The meters of many counters by name."""

    def __init__(self) -> None:
        self._meters: dict[_T, Meter] = {}

    def feed(self, at: float, counts: dict[_T, int]) -> dict[_T, float | None]:
        """Add what all counters say; return their rates. A counter that is missing here is forgotten."""
        self._meters = {name: self._meters.get(name) or Meter() for name in counts}
        return {name: self._meters[name].feed(at, count) for name, count in counts.items()}
