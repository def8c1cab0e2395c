"""The broker as one document: what it is now, how fast it goes, and what has happened.

Task        `run` looks once a second at the stats page and the links, and every 5 s at topics and groups.
Invariant   `status` is the document of `kmq status --json`, made by the same code at the moment that `as_of` names.
Cost        A look at the page takes some 0.2 ms; topics and groups have budgets of their own. All of it runs in one
            thread, so the event loop waits for none of it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kmq.broker import status
from kmq.broker import status as links
from kmq.broker.stats import TIMED, Snapshot, StatsPage, difference, quantile
from kmq.config.settings import STAGES
from kmq.gateway.console.events import Events
from kmq.gateway.console.group_lags import Asked, GroupLags
from kmq.gateway.console.history import STEP_S, History
from kmq.gateway.console.topic_rates import TopicRates
from kmq.gateway.console.turns import Turns
from kmq.gateway.core.core import Core
from kmq.gateway.groups.membership import Groups

_LOOK_S = 1.0
_RATES_S = 3  # looks that a rate is measured over
_LATENCY_S = 10  # looks that latencies are measured over
_YOUNG_S = 0.2  # a document of this age is given again, so many callers cost no more than a few
_EVENTS = 50


class _Sample(NamedTuple):
    at: float  # CLOCK_MONOTONIC
    moved: dict[str, tuple[int, int]]  # stage → messages, bytes
    times: dict[str, Snapshot]  # by name of TIMED


class Overview:
    """The document, the history and the events of one gateway."""

    def __init__(self, core: Core, groups: Groups) -> None:
        self._settings, self._page = core.settings, core.broker.page
        self.events, self.history = Events(), History()
        self.topics = TopicRates(core.settings.data, core.partitions)
        self.groups = GroupLags(groups, core.partitions)
        self._turns = Turns(core.settings.data, self.events)
        self._samples: deque[_Sample] = deque(maxlen=_LATENCY_S + 1)
        self._thread = ThreadPoolExecutor(1, "console")
        self._made: tuple[float, dict[str, Any]] = (float("-inf"), {})

    async def run(self) -> None:
        """Look until cancelled. An error of one look is logged, and the next one is tried."""
        step = -1
        while True:
            try:
                now = int(time.monotonic() / STEP_S)
                asked = self.groups.ask() if now != step else None
                await self._run(self._look, asked)
                step = now
            except Exception:
                logging.getLogger(__name__).exception("a look at the broker failed")
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def document(self) -> dict[str, Any]:
        """Return the document, ready for JSON."""
        made: dict[str, Any] = await self._run(self._document)
        return made

    async def _run(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _look(self, asked: list[Asked] | None) -> None:
        """Look at the page; with `asked`, also at topics and groups, and write a step of the history."""
        page = self._page.copy()
        self._samples.append(_sample(page))
        self._turns.follow(page)
        self.events.sweep()
        if asked is None:
            return
        self._turns.follow_files()
        self.topics.look()
        self.groups.look(asked)
        if self.groups.names is not None:
            self.history.forget(set(self.groups.names))
        self.history.put(self._values(), self.groups.messages())

    def _values(self) -> dict[str, float]:
        found = {f"fill.{link.name}": link.fill for link in links.look(self._settings)}
        for stage, rate in self._rates(int(STEP_S)).items():
            found[f"rate.{stage}"], found[f"bytes.{stage}"] = rate["messages"], rate["bytes"]
        if (lag := self.groups.total) is not None:
            found["lag.total"] = float(lag)
        for name, latency in self._latency(int(STEP_S)).items():
            if latency is not None:
                found[f"{name}.p50"], found[f"{name}.p99"] = latency["p50"], latency["p99"]
        return found

    def _document(self) -> dict[str, Any]:
        at, made = self._made
        if time.monotonic() - at < _YOUNG_S:
            return made
        shown = status.as_json(status.collect(self._settings))
        as_of = shown["as_of"]
        made = {
            "as_of": as_of,
            "status": shown,
            "rates": self._rates(_RATES_S),
            "latency": self._latency(_LATENCY_S),
            "topics": self.topics.rows(),
            "topics_total": self.topics.total,
            "groups": self.groups.rows(time.time()),
            "groups_total": None if self.groups.names is None else len(self.groups.names),
            "events": [event.fields() for event in self.events.newest(_EVENTS)],
        }
        self._made = time.monotonic(), made
        return made

    def _span(self, looks: int) -> tuple[_Sample, _Sample] | None:
        """Return the newest sample and the one `looks` before it; None without two."""
        if len(self._samples) < 2:
            return None
        return self._samples[-1], self._samples[max(0, len(self._samples) - 1 - looks)]

    def _rates(self, looks: int) -> dict[str, dict[str, float]]:
        span = self._span(looks)
        if span is None:
            return {}
        new, old = span
        seconds = max(1e-3, new.at - old.at)

        def rate(stage: str, field: int) -> float:
            # A stage that was started again counts from 0.
            return round(max(0, new.moved[stage][field] - old.moved[stage][field]) / seconds, 1)

        return {stage: {"messages": rate(stage, 0), "bytes": rate(stage, 1)} for stage in STAGES}

    def _latency(self, looks: int) -> Mapping[str, dict[str, Any] | None]:
        span = self._span(looks)
        if span is None:
            return dict.fromkeys(TIMED.values())
        new, old = span
        return {name: _quantiles(difference(new.times[name], old.times[name])) for name in TIMED.values()}


def _sample(page: StatsPage) -> _Sample:
    moved = {name: (page.rows[name].messages, page.rows[name].bytes) for name in STAGES}
    return _Sample(time.monotonic(), moved, {name: page.histogram(name).snapshot() for name in TIMED.values()})


def _quantiles(found: Snapshot) -> dict[str, Any] | None:
    if not found.count:
        return None
    return {"p50": quantile(found, 0.5), "p99": quantile(found, 0.99), "count": found.count}
