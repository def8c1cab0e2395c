"""Following a topic live: a sample of what arrives, and how large a share of it the sample is.

Invariant   At most _LINES_S lines and _ROWS_S messages a second, however fast the topic grows: records are counted by
            offsets and skipped by the index, so a topic of any speed costs the same.
            A reader that is slow gets fewer lines, and nothing is kept for it.
"""

import time
from collections.abc import Sequence
from typing import Any

from kmq.config.values import KIB, MIB
from kmq.gateway.console.messages import shown, told, weight
from kmq.gateway.core.partitions import Partition, Partitions, Signature
from kmq.log import identity
from kmq.log.damage import DamageError
from kmq.message.message import messages

_LINES_S, _ROWS_S = 4, 200
EVERY_S = 1 / _LINES_S
QUIET_S = 5.0  # a line without messages says that the stream lives
_ROWS = _ROWS_S // _LINES_S
_AT_ONCE = 256  # partitions that one turn looks at
_READ_BYTES = 256 * KIB
_LINE_BYTES = 1 * MIB


class _Place:
    """Where one partition was seen last."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.signature: Signature | None = partition.signature()
        self.end = partition.end()


class Follower:
    """A topic that is followed. `look` in a thread, one at a time."""

    def __init__(self, partitions: Partitions, topic: str, only: int | None) -> None:
        """Begin at the end. `only`: one partition. Raises RequestRefused."""
        self._partitions, self._topic, self._only = partitions, topic, only
        self._marks_from = identity.marks_from(partitions.data)
        numbers = range(partitions.count(topic)) if only is None else (only,)
        self._places = [_Place(partitions.open(topic, number)) for number in numbers]
        self._turn = 0
        self.seen = self.shown = 0

    def look(self) -> dict[str, Any] | None:
        """Return the next line, ready for JSON; None if nothing has arrived. Raises RequestRefused."""
        new = [(place, count) for place in self._next_places() if (count := self._count(place))]
        total = sum(count for _, count in new)
        if not total:
            return None
        rows: list[dict[str, Any]] = []
        damage: DamageError | None = None
        for place, count in new:
            room = min(count, max(1, _ROWS * count // total), _ROWS - len(rows))
            if room <= 0:
                break
            try:
                rows += self._last(place, room)
            except DamageError as err:
                damage = err
        rows.sort(key=lambda row: int(row["seq"]))
        return self.line(total, _within(rows), damage)

    def line(
        self, seen: int = 0, rows: Sequence[dict[str, Any]] = (), damage: DamageError | None = None
    ) -> dict[str, Any]:
        """Return a line that shows these of `seen` messages."""
        self.seen += seen
        self.shown += len(rows)
        return {
            "as_of": round(time.time(), 3),
            "seen": seen,
            "shown": len(rows),
            "share": round(len(rows) / seen, 6) if seen else 1.0,
            "messages": [*rows],
            "error": None if damage is None else told(damage),
        }

    def _next_places(self) -> list[_Place]:
        if self._only is None and self._turn == 0:  # the topic may have grown
            for number in range(len(self._places), self._partitions.count(self._topic)):
                grown = _Place(self._partitions.open(self._topic, number))
                grown.end, grown.signature = 0, None
                self._places.append(grown)
        chosen = self._places[self._turn : self._turn + _AT_ONCE]
        self._turn = 0 if self._turn + _AT_ONCE >= len(self._places) else self._turn + _AT_ONCE
        return chosen

    def _count(self, place: _Place) -> int:
        """Return how many messages a partition has got since the last look, and note them as seen."""
        place.partition.check()
        now = place.partition.signature()
        if now == place.signature:
            return 0
        before, place.end, place.signature = place.end, place.partition.end(), now
        return max(0, place.end - before)

    def _last(self, place: _Place, count: int) -> list[dict[str, Any]]:
        partition = place.partition
        begin, lines = partition.read(place.end - count, _READ_BYTES)
        found = messages(partition.topic, partition.number, begin, lines, self._marks_from)
        return [shown(message) for message in found[:count] if message.offset < place.end]


def _within(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the rows as a line may hold, the newest ones."""
    size, kept = 0, len(rows)
    while kept:
        size += weight(rows[kept - 1])
        if size > _LINE_BYTES and kept < len(rows):
            break
        kept -= 1
    return rows[kept:]
