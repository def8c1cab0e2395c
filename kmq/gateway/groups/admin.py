"""Groups as people look after them: list, describe with lag, move their offsets, delete, and see who stands still.

Lag         In messages: end offset less committed offset. In seconds: how long ago the first record that is not
            committed was received; 0 without one, or if it is damaged. A partition without a commit counts from its
            first record. A partition whose files do not say where it ends is left out.
Stalled     Messages wait for the group, and it commits nothing: kmq/broker/health.py judges `groups`, `groups_stalled`
            and `group_stalled_lag` of the gateway's row. A partition counts only if messages have waited in it for
            KMQ_GROUP_STALLED without a pause, and the group's commit there was the same all that time.
Memory      One entry for each partition in which a group is behind, of at most MOST_LAGS.
Not covered A group that has never committed in a partition cannot stall there: nobody knows what it has read.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import islice
from typing import NamedTuple

from kmq.broker.stats import Row
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Fetching
from kmq.gateway.core.metrics import MOST_LAGS
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import Partition
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.protocol import GroupView
from kmq.log.damage import DamageError
from kmq.wire.requests import Position, TopicPartition


class PartitionLag(NamedTuple):
    """One partition of a group. `committed`: None if the group has committed nothing there.

    `nacked`: messages that members gave back, and that wait to be delivered again or to be committed.
    """

    topic: str
    partition: int
    committed: int | None
    end: int
    lag: int
    lag_s: float
    nacked: int = 0


class GroupAdmin:
    """For all doors. Every method may raise RequestRefused."""

    def __init__(self, groups: Groups, partitions: Partitions, fetching: Fetching) -> None:
        self._groups, self._partitions, self._fetching = groups, partitions, fetching
        self._received: dict[tuple[str, int, int | None], tuple[int, float]] = {}  # of the records last asked for

    def names(self) -> list[str]:
        """Return the names of all groups, sorted."""
        self._groups.ready()
        return self._groups.coordinator.groups()

    def all(self) -> list[tuple[GroupView, int]]:
        """Return all groups by name, each with the number of partitions in which it has committed."""
        views = (self._groups.describe(name) for name in self.names())
        return [(view, len(self._groups.committed(view.name))) for view in views if view is not None]

    async def describe(self, group: str) -> tuple[GroupView, list[PartitionLag]]:
        """Return a group, and how far it is in each partition that it reads or has committed."""
        view = self._known(group)
        committed = {place: row.offset for place, row in self._groups.committed(group).items()}
        places = {TopicPartition(*place) for place in committed}
        places |= {place for member in view.members for place in member.partitions}
        rows = await self._fetching.run(self._lags, sorted(places), committed, self._partitions.bounds)

        def nacked(row: PartitionLag) -> int:
            nacks = self._groups.store.nacks(group, row.topic, row.partition)
            return sum(not nack.letter for nack in nacks.values())

        return view, [row._replace(nacked=nacked(row)) for row in rows]

    async def lags(self) -> list[tuple[str, str, int, int, float]]:
        """Return (group, topic, partition, messages, seconds) of what groups have committed, of MOST_LAGS at most."""
        try:
            names = self.names()
        except RequestRefused:  # the offsets are not loaded yet
            return []
        asked: dict[str, dict[tuple[str, int], int]] = {}
        room = MOST_LAGS
        for name in names:
            rows = islice(self._groups.committed(name).items(), room)
            asked[name] = {place: row.offset for place, row in rows}
            room -= len(asked[name])

        def look() -> list[tuple[str, str, int, int, float]]:
            bounds = cache(self._partitions.bounds)  # many groups read the same partitions
            return [
                (name, row.topic, row.partition, row.lag, row.lag_s)
                for name, committed in asked.items()
                for row in self._lags([TopicPartition(*place) for place in sorted(committed)], committed, bounds)
            ]

        return await self._fetching.run(look)

    def _known(self, group: str) -> GroupView:
        view = self._groups.describe(group)
        if view is None:
            raise RequestRefused("unknown_group", f"group {group!r}: does not exist")
        return view

    def _lags(
        self,
        places: list[TopicPartition],
        committed: Mapping[tuple[str, int], int],
        bounds: Callable[[str, int], tuple[int, int]],
    ) -> list[PartitionLag]:
        rows = []
        for place in places:
            try:
                start, end = bounds(*place)
            except (RequestRefused, DamageError, FileNotFoundError):
                continue  # deleted a moment ago; or one damaged log would hide all others
            offset = committed.get(place)
            first = max(start, start if offset is None else offset)
            lag_s = self._age_of(place, first) if first < end else 0.0
            rows.append(PartitionLag(place.topic, place.partition, offset, end, max(0, end - first), lag_s))
        return rows

    def _age_of(self, partition: TopicPartition, offset: int) -> float:
        """Return how long ago a record was received. A group that stands still costs no further read."""
        try:
            place = *partition, self._partitions.from_seq(partition.topic)
            at, received = self._received.get(place, (-1, 0.0))
            if at != offset:
                received = self._partitions.open(*partition).received_at(offset) or 0.0
        except (RequestRefused, DamageError):  # deleted a moment ago; damage is told elsewhere
            return 0.0
        if at != offset:
            if len(self._received) > 2 * MOST_LAGS:
                self._received.clear()
            if received:
                self._received[place] = offset, received
        return max(0.0, time.time() - received) if received else 0.0

    async def seek(self, group: str, topic: str, to: Position | Mapping[int, int]) -> dict[int, int]:
        """Move the offsets of a group without members, in all partitions of a topic or in those given. Returns them."""
        offsets = await self.plan(group, topic, to)
        rows = {(topic, number): OffsetCommit(offset) for number, offset in offsets.items()}
        await self._groups.commit(group, None, rows)
        store = self._groups.store
        for number in offsets:  # the group reads from there; what it gave back before is not delivered besides
            await store.nack_done(group, topic, number, *store.nacks(group, topic, number))
            self._groups.deliveries.drop(group, (topic, number))
        return offsets

    async def plan(self, group: str, topic: str, to: Position | Mapping[int, int]) -> dict[int, int]:
        """Return the offsets that `seek` would move the group to. Refuses what `seek` refuses."""
        self._groups.coordinator.check_empty(group)
        count = self._partitions.count(topic)
        if isinstance(to, Position):
            offsets = {}
            for number in range(count):
                cursor = await self._fetching.open(topic, number, to)
                offsets[number] = cursor.offset
        else:
            offsets = dict(to)
        for number, offset in offsets.items():
            cursor = await self._fetching.open(topic, number, Position("offset", offset))
            start, end = await self._fetching.run(lambda each=cursor: (each.partition.start(), each.partition.end()))
            if not start <= offset <= end:
                text = f"offset {offset}: {topic}/{number} has {start} to {end}"
                raise RequestRefused("out_of_range", text, field="offset", first=start, end=end)
        return offsets

    async def reset(
        self, group: str, topic: str, to: Position | Mapping[int, int], dry_run: bool
    ) -> list[tuple[int, int | None, int]]:
        """Move the offsets of a known group as `seek` does, or only say where to.

        Returns (partition, offset that was committed or None, new offset).
        """
        self._known(group)
        before = {place: row.offset for place, row in self._groups.committed(group).items()}
        offsets = await (self.plan if dry_run else self.seek)(group, topic, to)
        return [(number, before.get((topic, number)), offset) for number, offset in sorted(offsets.items())]

    async def delete(self, group: str) -> None:
        """Forget a group without members and its offsets; it is forgotten on disk when this returns."""
        self._known(group)
        self._groups.coordinator.check_empty(group)
        self._groups.store.check_complete(group)
        await self._groups.store.delete(group)
        self._groups.forgotten(group)

    async def forget(self, group: str, places: Collection[Partition]) -> set[Partition]:
        """Forget what a known group has committed in some partitions, except in topics that its members subscribe to.

        Returns the partitions of those topics; the others are forgotten on disk when this returns.
        """
        view = self._known(group)
        if view.protocol_type:
            self._groups.coordinator.check_empty(group)  # nobody knows what its members read
        subscribed = {topic for member in view.members for topic in member.topics}
        gone = {place for place in places if place[0] not in subscribed}
        await self._groups.store.delete(group, gone)
        for place in gone:
            self._groups.deliveries.drop(group, place)
        self._groups.forgotten(group)
        return {*places} - gone


# --- stalled groups --------------------------------------------------------------------------------------------------

_LOOK_S = 5.0


class StalledGroups:
    """Looks at all groups again and again."""

    def __init__(self, row: Row, groups: Groups, admin: GroupAdmin, stalled_s: float) -> None:
        self._row, self._groups, self._admin, self._stalled_s = row, groups, admin, stalled_s
        # (group, topic, partition) → the commit, and since when the group is behind there
        self._behind: dict[tuple[str, str, int], tuple[int, float]] = {}

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
