"""How fast topics grow, without reading their records: end offsets now against those of the look before.

Cost        A look takes at most _BUDGET_S, so 10,000 topics cost no more than a hundred. First come those that moved at
            the last look, then those whose routing keys stand at the end of the WAL, then all others in turn. So a busy
            topic has its rate within a step or two, and an idle one is looked at again within minutes.
Memory      A few numbers for each topic.
Not covered `bytes_rate` is the rate times the mean size of the topic's records.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.partitions import Partitions
from kmq.log import reader, topics
from kmq.log.damage import DamageError
from kmq.log.segment import survey
from kmq.message import record

_BUDGET_S = 0.025
_TAIL_BYTES = 64 << 10
_SHOWN = 20


class _Topic:
    """A topic at its last look."""

    __slots__ = ("at", "bytes", "end", "partitions", "rate", "records")

    def __init__(self) -> None:
        self.at = 0.0
        self.end = self.records = self.bytes = self.partitions = 0
        self.rate = 0.0


class TopicRates:
    """The topics of one broker. Call `look` in a thread, one at a time."""

    def __init__(self, data: str, partitions: Partitions) -> None:
        self._data, self._partitions = data, partitions
        self._topics: dict[str, _Topic] = {}
        self._listed: tuple[int, list[str]] = (0, [])  # mtime of the directory, and the names that it had
        self._turn = 0  # whose turn among all is next

    @property
    def total(self) -> int:
        return len(self._topics)

    def look(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at as many topics as the time allows."""
        names = self._names()
        until = clock() + _BUDGET_S
        seen: set[str] = set()
        for name in self._in_order(names):
            if name in seen:
                continue
            seen.add(name)
            with suppress(RequestRefused, DamageError, OSError):  # deleted a moment ago; damage is told elsewhere
                self._look_at(name, self._topics[name], clock())
            if clock() > until:
                break

    def rows(self) -> list[dict[str, Any]]:
        """Return the topics with the highest rates, ready for JSON."""
        found = sorted(self._topics.items(), key=lambda pair: (-pair[1].rate, -pair[1].records, pair[0]))[:_SHOWN]
        return [
            {
                "topic": name,
                "rate": round(row.rate, 1),
                "bytes_rate": round(row.rate * row.bytes / row.records if row.records else 0.0, 1),
                "records": row.records,
                "bytes": row.bytes,
                "partitions": row.partitions,
            }
            for name, row in found
        ]

    def _names(self) -> list[str]:
        try:
            changed = os.stat(f"{self._data}/topics").st_mtime_ns
        except FileNotFoundError:
            return []
        if changed != self._listed[0]:
            names = [name for name in topics.names(self._data) if not name.startswith("__")]
            self._listed = changed, names
            known = self._topics
            self._topics = {name: known.get(name) or _Topic() for name in names}
        return self._listed[1]

    def _in_order(self, names: list[str]) -> Iterator[str]:
        yield from [name for name, row in self._topics.items() if row.rate > 0]
        yield from self._recent()
        for _ in names:
            self._turn = (self._turn + 1) % len(names)
            yield names[self._turn]

    def _recent(self) -> Iterable[str]:
        """Return the topics that the last routing keys of the WAL may mean."""
        segments = reader.wal(self._data).segments()
        found: dict[str, None] = {}
        with suppress(FileNotFoundError, IndexError), open(segments[-1][1], "rb", buffering=0) as wal:
            size = wal.seek(0, os.SEEK_END)
            lines = os.pread(wal.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).split(b"\n")[1:-1]
            keys = {record.routing_key_of(line) for line in lines if line.count(b"|", 0, 400) >= 3}
            for key in keys:
                for name in _prefixes(key.decode(errors="replace")):
                    if name in self._topics:
                        found[name] = None
        return found

    def _look_at(self, name: str, row: _Topic, now: float) -> None:
        count = self._partitions.count(name)
        bounds = [self._partitions.bounds(name, number) for number in range(count)]
        end = sum(each[1] for each in bounds)
        if row.at and now > row.at:
            row.rate = max(0, end - row.end) / (now - row.at)
        if not row.at or end != row.end or count != row.partitions:
            sizes = (survey(f"{self._data}/topics/{name}/{number}") for number in range(count))
            row.bytes = sum(segment.size for found in sizes for segment in found)
        row.at, row.end, row.partitions = now, end, count
        row.records = end - sum(each[0] for each in bounds)


def _prefixes(routing_key: str) -> Iterator[str]:
    """Yield the names of topics that a routing key may begin with."""
    at = routing_key.find(".")
    while at >= 0:
        yield routing_key[:at]
        at = routing_key.find(".", at + 1)
    yield routing_key
