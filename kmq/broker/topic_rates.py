"""Topics by rate, and the busiest topics of an hour: from the topics' files alone, so also while the broker is down.

Cost        A look costs a few `stat`s for each partition that has not changed (kmq/log/bounds.py). It begins no topic
            after its budget, so 10,000 topics cost no more than a hundred. First come topics that moved, with at most
            half of the budget, then topics whose routing keys are at the end of the WAL, then all others in turn. So a
            busy topic has its rate within seconds, and an idle one is visited again within minutes.
Invariant   A rate is exact over the time between two visits, which is at least _APART_S.
            At most `most` topics are named at a time, and a count never goes back while a topic is named. A named topic
            is replaced only when another topic had a quarter more messages.
Memory      A few numbers for each topic, and _TIMES counts of the last hour.
Not covered `bytes_rate` is the rate times the mean size of the topic's records.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import nlargest
from itertools import islice
from typing import Any, NamedTuple

from kmq.errors import CorruptError, KmqError
from kmq.log import gaps, reader
from kmq.log.bounds import Bounds
from kmq.log.segment import survey
from kmq.message import record

# --- by rate ---------------------------------------------------------------------------------------------------------

_APART_S = 0.9  # least time between two visits: over less, a rate jumps
_STILL_S = 5.0  # a topic that has not moved for longer is visited in its turn again
_TAIL_S, _TAIL_BYTES = 1.0, 64 << 10
_LARGEST = 100


class TopicVisit(NamedTuple):
    """A topic at its last visit. `end`: messages ever; `records`: messages kept; `rate`: None until visit 2."""

    at: float
    partitions: int
    end: int
    records: int
    nbytes: int
    rate: float | None = None


def _row(name: str, visit: TopicVisit | None) -> dict[str, Any]:
    """Return what JSON shows. Without a visit each number is null."""
    if visit is None:
        return {"topic": name, "rate": None, "bytes_rate": None, "records": None, "bytes": None, "partitions": None}
    rate = visit.rate
    return {
        "topic": name,
        "rate": None if rate is None else round(rate, 1),
        "bytes_rate": None if rate is None else round(rate * visit.nbytes / max(1, visit.records), 1),
        "records": visit.records,
        "bytes": visit.nbytes,
        "partitions": visit.partitions,
    }


class TopicRates:
    """The topics of a data directory. One thread at a time."""

    def __init__(self, data: str) -> None:
        self._data, self._bounds = data, Bounds(data)
        self._names: list[str] = []
        self._topics: dict[str, TopicVisit | None] = {}  # None: not visited yet
        self._waiting: list[str] = []  # of this round, last first
        self._largest: list[str] = []  # at the beginning of this round
        self._moving: dict[str, float] = {}  # topic → when it was last seen to move; the topic visited last is last
        self._tail_at = -_TAIL_S

    @property
    def total(self) -> int:
        return len(self._topics)

    def look(self, budget_s: float) -> None:
        """Visit topics for `budget_s`, each at most once."""
        began = time.monotonic()
        self._list()
        for name in list(self._moving):
            if time.monotonic() - began > budget_s / 2:
                break
            self._moving[name] = self._moving.pop(name)
            self._visit(name, began)
        if began - self._tail_at >= _TAIL_S:
            self._tail_at = began
            for name in self._recent():
                self._visit(name, began)
                if time.monotonic() - began > budget_s:
                    return
        if not self._waiting:
            self._waiting = sorted(self._topics, reverse=True)
            visited = ((visit.records, name) for name, visit in self._topics.items() if visit is not None)
            self._largest = [name for _, name in nlargest(_LARGEST, visited)]
        for _ in range(len(self._topics)):
            if not self._waiting or time.monotonic() - began > budget_s:
                return
            self._visit(self._waiting.pop(), began)

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Return the `most` topics with the highest rates, ready for JSON; idle topics by their number of records."""
        names = dict.fromkeys((*self._moving, *self._largest, *islice(self._topics, most)))
        visited = [(name, visit) for name in names if (visit := self._topics.get(name)) is not None]
        visited.sort(key=lambda pair: (-(pair[1].rate or 0), -pair[1].records, pair[0]))
        return [_row(name, visit) for name, visit in visited[:most]]

    def table(self, budget_s: float) -> dict[str, dict[str, Any]]:
        """Return the rows of all topics by name. Topics that had no visit yet get it now, for `budget_s`."""
        self._list()
        self.visit([name for name, visit in self._topics.items() if visit is None], budget_s)
        return {name: _row(name, visit) for name, visit in self._topics.items()}

    def visit(self, names: Iterable[str], budget_s: float) -> dict[str, dict[str, Any]]:
        """Visit these topics for `budget_s`, and return the rows of all of them by name."""
        began = time.monotonic()
        names = [*names]
        for name in names:
            if time.monotonic() - began > budget_s:
                break
            self._visit(name, began)
        return {name: _row(name, self._topics.get(name)) for name in names}

    def _list(self) -> None:
        try:
            names = self._bounds.names()
        except OSError:  # perhaps another user than the broker's: the rest is shown without its topics
            names = []
        if names is not self._names:
            self._names = names
            self._topics = {name: self._topics.get(name) for name in names if not name.startswith("__")}
            self._moving = {name: at for name, at in self._moving.items() if name in self._topics}

    def _recent(self) -> Iterable[str]:
        """Return the topics that the last routing keys of the WAL may mean."""
        found: dict[str, None] = {}
        with suppress(OSError, IndexError), open(reader.wal(self._data).segments()[-1][1], "rb", buffering=0) as wal:
            size = wal.seek(0, os.SEEK_END)
            lines = os.pread(wal.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).split(b"\n")[1:-1]
            keys = {record.routing_key_of(line) for line in lines if line.count(b"|", 0, 400) >= 3}
            for key in keys:
                for name in _prefixes(key.decode(errors="replace")):
                    if name in self._topics:
                        found[name] = None
        return found

    def _visit(self, name: str, now: float) -> None:
        before = self._topics.get(name)
        if name not in self._topics or (before is not None and now - before.at < _APART_S):
            return
        try:
            self._topics[name] = found = self._measure(name, before)
        except (OSError, KmqError):  # deleted a moment ago; damage is reported elsewhere
            return
        if found.rate:
            self._moving[name] = now
        elif now - self._moving.get(name, now) > _STILL_S:
            del self._moving[name]

    def _measure(self, name: str, before: TopicVisit | None) -> TopicVisit:
        now = time.monotonic()
        offsets = self._bounds.offsets(name)
        end, count = sum(end for _, end in offsets), len(offsets)
        records = end - sum(first for first, _ in offsets) - self._in_gaps(name, offsets)
        if before is not None and (end, records, count) == (before.end, before.records, before.partitions):
            return before._replace(at=now, rate=0.0)
        sizes = (survey(f"{self._data}/topics/{name}/{number}") for number in range(count))
        nbytes = sum(segment.size for found in sizes for segment in found)
        rate = None if before is None else max(0, end - before.end) / (now - before.at)
        return TopicVisit(now, count, end, records, nbytes, rate)

    def _in_gaps(self, name: str, offsets: list[tuple[int, int]]) -> int:
        """Return how many offsets of a topic no record has."""
        return sum(gaps.count(self._bounds.gaps(name, number), *bounds) for number, bounds in enumerate(offsets))


def _prefixes(routing_key: str) -> Iterator[str]:
    """Yield the names of topics that a routing key may begin with."""
    at = routing_key.find(".")
    while at >= 0:
        yield routing_key[:at]
        at = routing_key.find(".", at + 1)
    yield routing_key


# --- the busiest of an hour ------------------------------------------------------------------------------------------
# A scrape names the topics with the most messages in the last hour. All others are counted together.

OTHER = "other"
_LOOK_S, _SLICE_S = 5.0, 1.0  # at most one look in _LOOK_S, which takes at most _SLICE_S; the next one resumes it
_HOUR_S, _TIMES = 3600.0, 12
_INCUMBENT = 1.25


class BusiestTopics:
    """The topics of one data directory."""

    def __init__(self, data: str, most: int) -> None:
        self._most = most
        self.bounds = Bounds(data)
        self._totals: dict[str, int] = {}  # topic → messages ever
        self._past: deque[tuple[float, dict[str, int]]] = deque(maxlen=_TIMES + 1)
        self._walk: Iterator[str] | None = None  # the topics that this look has not visited yet
        self._looked_at = 0.0
        self._new: dict[str, int] = {}  # topic → messages since the last complete look
        self._others = 0  # messages that came to topics while they were not named
        self._named: list[str] = []
        self._lock = threading.Lock()  # two scrapes at a time

    def named(self) -> list[str]:
        """Return the topics with the most messages in the last hour, by name."""
        with self._lock:
            self._look()
            return sorted(self._named)

    def counts(self) -> list[tuple[str, int]]:
        """Return the messages that each named topic ever had; and last, those of topics that were not named then."""
        with self._lock:
            self._look()
            return [*((name, self._totals[name]) for name in sorted(self._named)), (OTHER, self._others)]

    def rank(self, names: list[str], most: int) -> list[str]:
        """Return at most `most` of these topics, the named ones first."""
        with self._lock:
            self._look()
            return sorted(names, key=lambda name: (name not in self._named, name))[:most]

    def _look(self) -> None:
        now = time.monotonic()
        if self._looked_at and now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if self._read(now):
            self._choose(now)
            self._others += sum(count for name, count in self._new.items() if name not in self._named)
            self._new = {}

    def _read(self, now: float) -> bool:
        """Bring the totals up to date; return False if not all could be read in the time."""
        if self._walk is None:
            names = self.bounds.names()
            for name in self._totals.keys() - set(names):
                del self._totals[name]
            self._named = [name for name in self._named if name in self._totals]
            self._walk = iter(names)
        for name in self._walk:
            self._count(name)
            if time.monotonic() - now > _SLICE_S:
                return False
        self._walk = None
        return True

    def _count(self, name: str) -> None:
        try:
            total = sum(end for _, end in self.bounds.offsets(name))
        except (OSError, CorruptError):  # deleted a moment ago; or a damaged topic would hide all others
            return
        if self._past:  # the first look only takes the totals
            self._new[name] = self._new.get(name, 0) + max(0, total - self._totals.get(name, 0))
        self._totals[name] = total

    def _choose(self, now: float) -> None:
        """Name the topics with the most messages since an hour ago, or since the first look."""
        past = self._past
        if not past or now - past[-1][0] >= _HOUR_S / _TIMES:
            past.append((now, dict(self._totals)))
        while len(past) > 1 and now - past[0][0] > _HOUR_S:
            past.popleft()
        before, named = past[0][1], set(self._named)

        def order(name: str) -> tuple[float, bool, int, str]:
            total = self._totals[name]
            recent = total - min(before.get(name, 0), total)
            is_named = name in named
            return -recent * (_INCUMBENT if is_named else 1.0), not is_named, -total, name

        # A topic that is called `other` is not named.
        self._named = sorted(self._totals.keys() - {OTHER}, key=order)[: self._most]
