"""Topics by rate, from their files alone: also for thousands of topics, and without a gateway.

Mechanism   `sweep` visits the topics that move, then goes on with the others where it stopped: one `stat` per partition,
            of the link to its active segment. Only a partition that has changed is measured (end offset, bytes).
Invariant   A sweep begins no further topic after `budget_s`, and of the topics that move at most half of that. A rate
            is exact over the time between two visits.
Memory      Some numbers per topic and partition.
"""

import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from kmq.errors import KmqError
from kmq.log import topics
from kmq.log.partition import directory_of, end_offset

_LIST_S = 2.0  # how often it looks for new topics
_APART_S = 1.0  # least time between two visits: over less, a rate jumps
_STILL_S = 5.0  # a topic that has not moved for longer is visited in its turn again
_FEW = 200  # the partitions of so many topics are measured at the first look; of more, those that change


class _PartitionVisit(NamedTuple):
    """A partition at its last visit. `end`, `nbytes`: None until it is measured."""

    mark: tuple[int, int]  # inode and size of the active segment
    at: float
    end: int | None = None
    nbytes: int | None = None
    rate: float | None = None
    byte_rate: float | None = None


class TopicRates:
    """Visits the topics of a data directory in turn."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._topics: dict[str, list[_PartitionVisit]] = {}
        self._waiting: list[str] = []  # of this round, last first
        self._moving: dict[str, float] = {}  # topic → when it was last seen to move; who was visited last is last
        self._listed_at = -_LIST_S
        self._listed_as = 0

    @property
    def total(self) -> int:
        return len(self._topics)

    def sweep(self, budget_s: float) -> None:
        """Visit topics for `budget_s`, each at most once."""
        began = time.monotonic()
        self._list(began)
        for name in list(self._moving):
            if time.monotonic() - began > budget_s / 2:
                break
            self._moving[name] = self._moving.pop(name)
            self._visit(name, began)
        if not self._waiting:
            self._waiting = sorted(self._topics, reverse=True)
        for _ in range(len(self._topics)):
            if not self._waiting or time.monotonic() - began > budget_s:
                return
            self._visit(self._waiting.pop(), began)

    def _list(self, now: float) -> None:
        if now - self._listed_at < _LIST_S:
            return
        self._listed_at = now
        try:
            changed = os.stat(f"{self._data}/topics").st_mtime_ns
            if changed == self._listed_as:
                return
            names = [name for name in topics.names(self._data) if not name.startswith("__")]
        except OSError:  # no data directory yet, or it went away
            self._topics, self._moving, self._listed_as = {}, {}, 0
            return
        self._listed_as = changed
        self._topics = {name: self._topics.get(name, []) for name in names}
        self._moving = {name: at for name, at in self._moving.items() if name in self._topics}

    def _visit(self, name: str, now: float) -> None:
        before = self._topics.get(name)
        if before is None or (before and now - before[0].at < _APART_S):
            return
        try:
            parts = [self._look(name, number, link, before) for number, link in self._links(name)]
        except (OSError, KmqError):  # deleted a moment ago
            return
        self._topics[name] = parts
        if any(part.byte_rate or part.rate for part in parts):
            self._moving[name] = now
        elif now - self._moving.get(name, now) > _STILL_S:
            del self._moving[name]

    def _links(self, name: str) -> Iterator[tuple[int, os.stat_result | None]]:
        """Yield each partition with its active segment, or None if it has no link."""
        alone = _stat(f"{self._data}/{name}.log")
        if alone is not None:
            yield 0, alone
            return
        count = sum(entry.isdigit() for entry in os.listdir(f"{self._data}/topics/{name}"))
        for number in range(count):
            yield number, _stat(f"{self._data}/{name}-{number}.log") if count > 1 else None

    def _look(
        self, name: str, number: int, active: os.stat_result | None, before: list[_PartitionVisit]
    ) -> _PartitionVisit:
        now = time.monotonic()
        if active is not None:
            mark = (active.st_ino, active.st_size)
        else:  # the directory says at least when a segment came or went
            mark = (0, os.stat(directory_of(self._data, name, number)).st_mtime_ns)
        old = before[number] if number < len(before) else None
        if old is not None and old.mark == mark:
            return old._replace(at=now, rate=0.0, byte_rate=0.0)
        if old is None and len(self._topics) > _FEW:
            return _PartitionVisit(mark, now)
        end, nbytes = end_offset(self._data, name, number)
        if old is None:
            return _PartitionVisit(mark, now, end, nbytes)
        rate = None if old.end is None else max(0, end - old.end) / (now - old.at)
        grown = mark[1] - old.mark[1] if mark[0] == old.mark[0] else mark[1]
        return _PartitionVisit(mark, now, end, nbytes, rate, max(0, grown) / (now - old.at))

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Return the `most` topics with the highest rate, as /api/overview has them."""
        rows = [_row(name, self._topics[name]) for name in self._moving]
        rows.sort(key=lambda row: (-(row["rate"] or 0), -(row["bytes_rate"] or 0), row["topic"]))
        others = (name for name, parts in self._topics.items() if parts and name not in self._moving)
        rows += [_row(name, self._topics[name]) for name in islice(others, max(0, most - len(rows)))]
        return rows[:most]


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _row(name: str, parts: list[_PartitionVisit]) -> dict[str, Any]:
    return {
        "topic": name,
        "rate": _sum(part.rate for part in parts),
        "bytes_rate": _sum(part.byte_rate for part in parts),
        "records": _total(part.end for part in parts),
        "bytes": _total(part.nbytes for part in parts),
        "partitions": len(parts),
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if None in found else sum(value for value in found if value is not None)
