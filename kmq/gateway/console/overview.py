"""The broker as one document for the console: its overview, an hour of it in steps, and how far groups are behind.

Task        `run` looks once a second at the stats page, the links and topics, and every 5 s at groups; at groups also
            once a second while a client asks for the document.
Invariant   A step of the history that was not measured shows null, never the number of another step.
Cost        At most _LAGS_AT_ONCE groups and _PLACES partitions a look, in turn, so thousands of groups take several
            looks. One record is read, for its time, only for each group that is shown, and again only when its offset
            moves. All of this runs in one thread, so the event loop never waits for it. Both it and the event loop
            write and read events.
Memory      _SLOTS numbers for each series, whose names are fixed, and for each of the first _GROUPS groups that got a
            series. A few numbers for each group.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from kmq.broker import status
from kmq.broker.overview import Overview
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.core.topics import UNLIMITED
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import Partition, partition_lag
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps

# --- history ---------------------------------------------------------------------------------------------------------
# An hour of the broker in steps of 5 s: one number a step and series.

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
        """Store the numbers of this step. A name without a number is unknown. `lags`: messages by group."""
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

    def forget(self, groups: set[str]) -> None:
        """Forget groups that are not among `groups`, to make room for others."""
        for group in [group for group in self._lags if group not in groups]:
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


# --- lags ------------------------------------------------------------------------------------------------------------
# From committed offsets and end offsets, without reading records.

_LAGS_AT_ONCE, _PLACES = 200, 2000
_SHOWN = 20


class LagQuery(NamedTuple):
    """A group to find the lag of: its commit in each partition (None: no commit), and messages to deliver again."""

    group: str
    state: str
    members: int
    committed: Mapping[Partition, int | None]
    waiting: Mapping[Partition, list[int]]


class _Lag(NamedTuple):
    query: LagQuery
    messages: int
    oldest: tuple[str, int, int] | None  # the partition with the largest lag, and its first offset not committed
    at: float  # unix seconds


class GroupLags:
    """The groups of one broker. `ask` on the event loop, `look` in a thread, one after the other."""

    def __init__(self, groups: Groups, partitions: Partitions) -> None:
        self._groups, self._partitions = groups, partitions
        self._lags: dict[str, _Lag] = {}
        self._received: dict[tuple[str, int, int], float] = {}  # when a record was received
        self._names: list[str] | None = None  # None: the committed offsets are not loaded yet
        self._turn = 0

    @property
    def names(self) -> list[str] | None:
        """Return the names of all groups; None until they are known."""
        return self._names

    @property
    def total(self) -> int | None:
        """Return the lag of all groups together; None until each was looked at once."""
        is_known = self._names is not None and self._lags.keys() >= {*self._names}
        return sum(lag.messages for lag in self._lags.values()) if is_known else None

    def messages(self) -> dict[str, float]:
        """Return the lag by group, the largest first."""
        found = sorted(self._lags.items(), key=lambda pair: -pair[1].messages)
        return {name: float(lag.messages) for name, lag in found}

    def ask(self) -> list[LagQuery]:
        """Return the groups whose turn it is; [] until the committed offsets are loaded."""
        try:
            self._groups.describe("")
        except RequestRefused:
            self._names = None
            return []
        self._names = self._groups.coordinator.groups()
        self._lags = {name: lag for name in self._names if (lag := self._lags.get(name)) is not None}
        first = self._turn % len(self._names) if self._names else 0
        queries: list[LagQuery] = []
        room = _PLACES
        for name in islice((*self._names[first:], *self._names[:first]), _LAGS_AT_ONCE):
            members, partitions = self._groups.coordinator.read_by(name)
            committed: dict[Partition, int | None] = dict.fromkeys(partitions)
            committed |= self._groups.deliveries.begun(name)
            committed |= {place: row.offset for place, row in self._groups.committed(name).items()}
            some = dict(islice(committed.items(), room))
            waiting = self._groups.store.table.waiting(name)
            queries.append(LagQuery(name, self._groups.coordinator.state(name).value, members, some, waiting))
            room -= len(some)
            self._turn = first = first + 1
            if room <= 0:
                break
        return queries

    def look(self, queries: list[LagQuery]) -> None:
        """Find the lags of these groups."""
        bounds: dict[Partition, tuple[int, int] | None] = {}  # many groups read the same partitions
        found: dict[Partition, Gaps] = {}
        for topic, number in {partition for row in queries for partition in row.committed}:
            try:
                bounds[topic, number] = self._partitions.bounds(topic, number)
                found[topic, number] = self._partitions.gaps(topic, number)
            except (RequestRefused, DamageError, OSError):  # just deleted; damage is reported elsewhere
                bounds[topic, number] = None
        self._lags |= {row.group: _lag_of(row, bounds, found) for row in queries}
        shown = {lag.oldest for lag in self._shown() if lag.oldest is not None}
        self._received = {place: at for place, at in self._received.items() if place in shown}
        for topic, number, offset in shown - self._received.keys():
            with suppress(RequestRefused, DamageError, OSError, ValueError):
                received = self._partitions.open(topic, number).received_at(offset)
                if received is not None:
                    self._received[topic, number, offset] = received

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the groups with the largest lag, ready for JSON. `now`: unix seconds."""
        return [
            {
                "group": lag.query.group,
                "state": lag.query.state,
                "members": lag.query.members,
                "lag": lag.messages,
                "lag_seconds": self._seconds(lag, now),
                "as_of": round(lag.at, 3),
            }
            for lag in self._shown()
        ]

    def _shown(self) -> list[_Lag]:
        return sorted(self._lags.values(), key=lambda lag: (-lag.messages, lag.query.group))[:_SHOWN]

    def _seconds(self, lag: _Lag, now: float) -> float | None:
        if lag.oldest is None:
            return 0.0
        received = self._received.get(lag.oldest)
        return None if received is None else round(max(0.0, now - received), 3)


def _lag_of(
    query: LagQuery, bounds: Mapping[Partition, tuple[int, int] | None], gaps: Mapping[Partition, Gaps]
) -> _Lag:
    total, largest, oldest = 0, 0, None
    for place, offset in query.committed.items():
        found = bounds[place]
        if found is None:
            continue
        lag, first = partition_lag(found, offset, query.waiting.get(place, ()), gaps[place])
        total += lag
        if lag > largest:
            largest, oldest = lag, (place[0], place[1], first)
    return _Lag(query, total, oldest, time.time())


# --- overview --------------------------------------------------------------------------------------------------------

_LOOK_S, _BUDGET_S = 1.0, 0.005  # how often it looks, and for how long at topics
_YOUNG_S = 0.2  # a document of this age is returned again, so many callers cost little more than one
_WATCHED_S = 5.0  # for this time after a document another request is expected
_TOPICS = 20
TABLE_OPTIONS = ("retentionMs", "cleanupPolicy")  # that the table of topics shows
_TABLE_S = 0.5  # for topics not looked at since the gateway began: 2,000 of them take about this long


class ConsoleOverview:
    """The document, the history and the events of one gateway."""

    def __init__(self, core: Core, groups: Groups) -> None:
        self._settings, self._topics = core.settings, core.topics
        self._broker = Overview(core.settings)
        self.events, self.history = self._broker.events, History()
        self.groups = GroupLags(groups, core.partitions)
        self._thread = ThreadPoolExecutor(1, "console")
        self._made: tuple[float, dict[str, Any]] = (float("-inf"), {})

    async def run(self) -> None:
        """Look until cancelled. An error of one look is logged, and the next one is tried."""
        step = -1
        while True:
            try:
                now = int(time.monotonic() / STEP_S)
                is_watched = time.monotonic() - self._made[0] < _WATCHED_S
                queries = self.groups.ask() if now != step or is_watched else None
                await self._run(self._look, queries)
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

    async def topics(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return a page of the table of topics, ready for JSON. `wanted`: the query of GET /api/overview/topics."""
        made: dict[str, Any] = await self._run(self._topics_page, wanted)
        return made

    async def _run(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _look(self, queries: list[LagQuery] | None) -> None:
        """Look at the broker; with `queries`, also at groups and files, and write a step of the history."""
        self._broker.look(_BUDGET_S)
        if queries is None:
            return
        self._broker.follow_files()
        self.groups.look(queries)
        if self.groups.names is not None:
            self.history.forget(set(self.groups.names))
        self.history.put(self._values(), self.groups.messages())

    def _values(self) -> dict[str, float]:
        found = {f"fill.{link.name}": link.fill for link in status.look(self._settings)}
        for stage, rate in self._broker.pace.rates(STEP_S).items():
            found[f"rate.{stage}"], found[f"bytes.{stage}"] = rate["messages"], rate["bytes"]
        if (lag := self.groups.total) is not None:
            found["lag.total"] = float(lag)
        for name, latency in self._broker.pace.latency(STEP_S).items():
            if latency is not None:
                found[f"{name}.p50"], found[f"{name}.p99"] = latency["p50"], latency["p99"]
        return found

    def _document(self) -> dict[str, Any]:
        at, made = self._made
        if time.monotonic() - at < _YOUNG_S:
            return made
        made = self._broker.document(status.collect(self._settings), _TOPICS)
        for row in made["topics"]:  # the API has a number for each
            row["rate"], row["bytes_rate"] = row["rate"] or 0.0, row["bytes_rate"] or 0.0
        made["groups"] = self.groups.rows(time.time())
        made["groups_total"] = None if self.groups.names is None else len(self.groups.names)
        self._made = time.monotonic(), made
        return made

    def _topics_page(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        table = self._broker.topics.table(_TABLE_S)
        part, column = wanted["contains"].lower(), wanted["sort"]
        names = [name for name in table if part in name.lower()]
        options = self._options(names) if column in TABLE_OPTIONS else {}
        values = {name: (options or table)[name][column] for name in names}
        names = _ordered(values, wanted["order"] == "desc")
        shown = names[wanted["first"] : wanted["first"] + wanted["limit"]]
        rows = self._broker.topics.visit(shown, _BUDGET_S * 10)
        options = options or self._options(shown)
        return {
            "as_of": round(time.time(), 3),
            "total": len(table),
            "found": len(names),
            "topics": [rows[name] | {option: options[name][option] for option in TABLE_OPTIONS} for name in shown],
        }

    def _options(self, names: list[str]) -> dict[str, dict[str, int | str]]:
        return {state.name: state.options for state in self._topics.states(names)}


def _ordered(values: Mapping[str, Any], is_descending: bool) -> list[str]:
    """Return the names in the order of their values, then of the names; those without a value come last."""
    present = sorted(name for name, value in values.items() if value is not None)
    unknown = sorted(values.keys() - set(present))
    # no limit is more than any limit
    present.sort(key=lambda name: math.inf if values[name] == UNLIMITED else values[name], reverse=is_descending)
    return present + unknown
