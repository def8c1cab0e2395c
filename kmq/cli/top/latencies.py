"""How long things took in the last seconds: ack, sync, routed, from the histograms of the stats page.

Memory      One sample a second, for at most _SPAN_S.
"""

from collections import deque

from kmq.broker.stats import TIMED, Snapshot, StatsPage, difference, quantile
from kmq.cli.top.snapshot import Document

_SPAN_S = 10
_STEP_S = 1.0


class Latencies:
    """p50 and p99 of the last _SPAN_S seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, Snapshot]]] = deque(maxlen=_SPAN_S + 1)

    def feed(self, at: float, page: StatsPage) -> Document:
        """Look at the page at `at` (monotonic seconds); return what /api/overview has as `latency`."""
        now = {what: page.histogram(what).snapshot() for what in TIMED.values()}
        if not self._samples or at - self._samples[-1][0] >= _STEP_S:
            self._samples.append((at, now))
        before = self._samples[0][1]
        return {what: _quantiles(difference(now[what], before[what])) for what in now}


def _quantiles(times: Snapshot) -> Document | None:
    if not times.count:
        return None
    return {"p50": quantile(times, 0.5), "p99": quantile(times, 0.99), "count": times.count}
