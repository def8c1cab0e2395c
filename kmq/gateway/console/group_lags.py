"""How far the groups are behind, from committed offsets and end offsets, without reading records.

Cost        At most _GROUPS groups and _PLACES partitions a look, in turn, so thousands of groups take several looks. Only
            for the groups that are shown one record each is read, for its time, and again only when its offset moves.
Memory      A few numbers for each group.
"""

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups.membership import Groups
from kmq.log.damage import DamageError
from kmq.message.message import Message

_GROUPS, _PLACES = 200, 2000
_SHOWN = 20
Place = tuple[str, int]


class Asked(NamedTuple):
    """A group whose lag is to be found: by partition what it has committed; None: nothing there."""

    group: str
    state: str
    members: int
    committed: Mapping[Place, int | None]


class _Lag(NamedTuple):
    asked: Asked
    messages: int
    oldest: tuple[str, int, int] | None  # the partition with the largest lag, and its first offset not committed


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
        """Return the messages that all groups together have not committed; None until each was looked at once."""
        is_known = self._names is not None and self._lags.keys() >= {*self._names}
        return sum(lag.messages for lag in self._lags.values()) if is_known else None

    def messages(self) -> dict[str, float]:
        """Return the lag by group, the largest first."""
        found = sorted(self._lags.items(), key=lambda pair: -pair[1].messages)
        return {name: float(lag.messages) for name, lag in found}

    def ask(self) -> list[Asked]:
        """Return the groups whose turn it is; none until the committed offsets are loaded."""
        try:
            self._groups.describe("")
        except RequestRefused:
            self._names = None
            return []
        self._names = self._groups.coordinator.groups()
        self._lags = {name: lag for name in self._names if (lag := self._lags.get(name)) is not None}
        first = self._turn % len(self._names) if self._names else 0
        asked: list[Asked] = []
        room = _PLACES
        for name in islice((*self._names[first:], *self._names[:first]), _GROUPS):
            view = self._groups.describe(name)
            if view is not None:
                committed: dict[Place, int | None] = {
                    (place.topic, place.partition): None for member in view.members for place in member.partitions
                }
                committed |= {place: row.offset for place, row in self._groups.committed(name).items()}
                some = dict(islice(committed.items(), room))
                asked.append(Asked(name, view.state.value, len(view.members), some))
                room -= len(some)
            self._turn = first = first + 1
            if room <= 0:
                break
        return asked

    def look(self, asked: list[Asked]) -> None:
        """Find the lags of these groups."""
        bounds: dict[Place, tuple[int, int] | None] = {}  # many groups read the same partitions
        for topic, number in {partition for row in asked for partition in row.committed}:
            try:
                bounds[topic, number] = self._partitions.bounds(topic, number)
            except (RequestRefused, DamageError, OSError):  # deleted a moment ago; damage is told elsewhere
                bounds[topic, number] = None
        self._lags |= {row.group: _lag_of(row, bounds) for row in asked}
        shown = {lag.oldest for lag in self._shown() if lag.oldest is not None}
        self._received = {place: at for place, at in self._received.items() if place in shown}
        for place in shown - self._received.keys():
            with suppress(RequestRefused, DamageError, OSError, ValueError):
                self._received[place] = self._time_of(*place)

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the groups with the largest lag, ready for JSON. `now`: unix seconds."""
        return [
            {
                "group": lag.asked.group,
                "state": lag.asked.state,
                "members": lag.asked.members,
                "lag": lag.messages,
                "lag_seconds": self._seconds(lag, now),
            }
            for lag in self._shown()
        ]

    def _shown(self) -> list[_Lag]:
        return sorted(self._lags.values(), key=lambda lag: (-lag.messages, lag.asked.group))[:_SHOWN]

    def _seconds(self, lag: _Lag, now: float) -> float | None:
        if lag.oldest is None:
            return 0.0
        received = self._received.get(lag.oldest)
        return None if received is None else round(max(0.0, now - received), 3)

    def _time_of(self, topic: str, number: int, offset: int) -> float:
        begin, lines = self._partitions.open(topic, number).read(offset, 1)
        line = next((line for line in lines.split(b"\n") if line), b"")
        return Message(topic, number, begin, line).recv_timestamp


def _lag_of(asked: Asked, bounds: Mapping[Place, tuple[int, int] | None]) -> _Lag:
    total, largest, oldest = 0, 0, None
    for place, offset in asked.committed.items():
        found = bounds[place]
        if found is None:
            continue
        start, end = found
        first = start if offset is None else max(start, offset)
        lag = max(0, end - first)
        total += lag
        if lag > largest:
            largest, oldest = lag, (place[0], place[1], first)
    return _Lag(asked, total, oldest)
