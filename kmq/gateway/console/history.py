"""An hour of the broker in steps of 5 s: one number a step and series.

Invariant   A step that nobody has measured shows null, never the number of another step.
Memory      Fixed: _SLOTS numbers for each series, whose names are fixed, and for each of the _GROUPS groups that were
            given a series first.
"""

import math
import time
from array import array
from collections.abc import Mapping
from typing import Any

STEP_S = 5.0
_SLOTS = 720
_GROUPS = 200
_UNKNOWN = math.nan
SERIES = (
    *("rate.framer", "rate.durability", "rate.router", "bytes.ingress", "bytes.router"),
    *("ack.p50", "ack.p99", "sync.p50", "sync.p99", "routed.p50", "routed.p99"),
    *("fill.raw", "fill.received", "fill.framed", "fill.durable", "lag.total"),
)


class _Series:
    """The last numbers of one name, in a ring."""

    def __init__(self) -> None:
        self._values = array("d", [_UNKNOWN]) * _SLOTS

    def put(self, step: int, value: float) -> None:
        self._values[step % _SLOTS] = value

    def last(self, step: int, count: int) -> list[float | None]:
        """Return the numbers of the `count` steps up to `step`."""
        found = (self._values[at % _SLOTS] for at in range(step - count + 1, step + 1))
        return [None if math.isnan(value) else round(value, 6) for value in found]


class History:
    """The series of the broker, and the lag of its groups."""

    def __init__(self, now: float | None = None) -> None:
        """`now`: CLOCK_MONOTONIC, whose steps are the slots."""
        self._first = self._step = int((time.monotonic() if now is None else now) / STEP_S)
        self._at = time.time()
        self._series = {name: _Series() for name in SERIES}
        self._lags: dict[str, _Series] = {}

    @property
    def count(self) -> int:
        return min(_SLOTS, self._step - self._first + 1)

    def put(self, values: Mapping[str, float], lags: Mapping[str, float], now: float | None = None) -> None:
        """Keep the numbers of this step; a name without a number is unknown. `lags`: messages by group."""
        step = int((time.monotonic() if now is None else now) / STEP_S)
        for group in lags:
            if group not in self._lags and len(self._lags) < _GROUPS:
                self._lags[group] = _Series()
        for at in range(max(self._step + 1, step - _SLOTS + 1), step):
            self._put(at, {}, {})
        self._put(step, values, lags)
        self._step, self._at = step, time.time()

    def _put(self, step: int, values: Mapping[str, float], lags: Mapping[str, float]) -> None:
        for name, series in self._series.items():
            series.put(step, values.get(name, _UNKNOWN))
        for group, series in self._lags.items():
            series.put(step, lags.get(group, _UNKNOWN))

    def forget(self, known: set[str]) -> None:
        """Forget the groups that are not among `known`, so that others have room."""
        for group in [group for group in self._lags if group not in known]:
            del self._lags[group]

    def document(self) -> dict[str, Any]:
        """Return the series as JSON shows them."""
        return self._head() | {"series": {name: row.last(self._step, self.count) for name, row in self._series.items()}}

    def of_group(self, group: str) -> dict[str, Any]:
        """Return the lag of a group; empty if it has no series."""
        series = self._lags.get(group)
        return self._head() | {"lag": series.last(self._step, self.count) if series else []}

    def _head(self) -> dict[str, Any]:
        begin = self._at - (self.count - 1) * STEP_S
        return {"as_of": round(self._at, 3), "step": STEP_S, "times_from": round(begin, 3)}
