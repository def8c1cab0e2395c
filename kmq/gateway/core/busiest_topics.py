"""Which topics a scrape names: those with the most messages in the last hour. All others are counted together.

Invariant   At most `most` topics are named at a time, and a count never goes back while a topic is named. The named ones
            change only when another topic had a quarter more messages than one of them.
Cost        A look asks for a topic's offsets again only if its files have changed (kmq/log/bounds.py), and takes at most
            _SLICE_S; the next look goes on where it stopped. At most one look in _LOOK_S.
Memory      Two numbers for each topic, and _TIMES counts of the last hour.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator

from kmq.errors import CorruptError
from kmq.log import topics
from kmq.log.bounds import Bounds

OTHER = "other"
_LOOK_S, _SLICE_S = 5.0, 1.0
_HOUR_S, _TIMES = 3600.0, 12
_INCUMBENT = 1.25


class BusiestTopics:
    """The topics of one data directory."""

    def __init__(self, data: str, most: int) -> None:
        self._data, self._most = data, most
        self.bounds = Bounds(data)
        self._totals: dict[str, int] = {}  # topic → messages ever
        self._past: deque[tuple[float, dict[str, int]]] = deque(maxlen=_TIMES + 1)
        self._walk: Iterator[str] | None = None  # the topics that this look has not come to
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
        """Return how many messages each named topic ever had, and then how many came to all others meanwhile."""
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
            names = topics.names(self._data)
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
            partitions, _ = self.bounds.declared(name)
            total = sum(self.bounds.of(name, number)[1] for number in range(partitions))
        except (OSError, CorruptError):  # deleted a moment ago; or a damaged topic would hide all others
            return
        if self._past:  # the first look only learns where everything is
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

        self._named = sorted(self._totals.keys() - {OTHER}, key=order)[
            : self._most
        ]  # a topic of that name is not named
