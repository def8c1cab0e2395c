"""Watch for consumer groups that stand still: messages wait for them, and they commit nothing.

Words       `groups`, `groups_stalled` and `group_stalled_lag` of the gateway's row (kmq/broker/concerns.py judges them).
Invariant   A partition counts only if messages have waited in it for KMQ_GROUP_STALLED without a pause, and the
            group's commit there was the same all that time.
Memory      One entry for each partition in which a group is behind, of at most MOST_LAGS.
Not covered A group that has never committed in a partition: nobody knows what it has read.
"""

import asyncio
import time

from kmq.broker.stats import Row
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.admin import GroupAdmin
from kmq.gateway.groups.membership import Groups

_LOOK_S = 5.0
_Place = tuple[str, str, int]  # group, topic, partition


class StalledGroups:
    """Looks at all groups again and again."""

    def __init__(self, row: Row, groups: Groups, admin: GroupAdmin, stalled_s: float) -> None:
        self._row, self._groups, self._admin, self._stalled_s = row, groups, admin, stalled_s
        self._behind: dict[_Place, tuple[int, float]] = {}  # → the commit, and since when it is behind there

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(min(_LOOK_S, self._stalled_s))

    async def look(self, now: float) -> None:
        """Look once, and write what was found into the row."""
        try:
            rows = await self._admin.lags()
            names = {name for name, *_ in rows}
            committed = {name: self._groups.committed(name) for name in names}
            count = len(self._admin.names())
        except RequestRefused:  # the offsets are not loaded yet
            return
        before, self._behind = self._behind, {}
        stalled: dict[str, int] = {}
        for name, topic, number, messages, _ in rows:
            commit = committed[name].get((topic, number))
            if not messages or commit is None:
                continue
            place = name, topic, number
            offset, since = before.get(place, (commit.offset, now))
            since = since if offset == commit.offset else now
            self._behind[place] = commit.offset, since
            if now - since >= self._stalled_s:
                stalled[name] = stalled.get(name, 0) + messages
        row = self._row
        row.groups, row.groups_stalled, row.group_stalled_lag = count, len(stalled), sum(stalled.values())
