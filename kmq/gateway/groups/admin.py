"""Group administration: list, describe with lag, move offsets, delete, and find groups that are stalled.

    await admin.describe("etl")                                → GroupView, [PartitionLag(orders/0, committed=8, …)]
    await admin.seek("etl", "orders", Position("offset", 0))   → {0: 0, 1: 0}

Lag         In messages: end offset minus committed offset, plus earlier messages that were given back and wait to be
            delivered again. In seconds: how long ago the first of them was received; 0 if there is none, or if it is
            damaged. A partition without a commit counts from its first record, or from the group's first message there.
            A partition whose files do not say where it ends is left out.
Stalled     Messages wait for the group, and it commits nothing: kmq/broker/health.py judges `groups`, `groups_stalled`
            and `group_stalled_lag` of the gateway's row. A partition counts only if messages have waited in it for
            KMQ_GROUP_STALLED without a pause, and the group's commit there was the same all that time. Messages given
            back do not count, here and in growth, because they may wait for a delay.
Waiting     Messages given back are not delivered to Kafka members. `nacked_waiting` of the row: messages that wait in
            partitions that such members own; event nacked_waiting names the groups.
Memory      One entry for each partition in which a group is behind, at most MOST_LAGS.
Overtaken   Messages were deleted before the group had read them. Readers count them when they come to their place
            (reader.py). Here they are counted for groups without members: what the groups had not committed.
Crashing    The group's members die again and again with messages that they have not committed: CRASHES times within
            CRASHED_S without a commit. `groups_crashing` of the row; event group_crashing names the group.
Growing     The lag of a group in a topic was higher at each look of the last GROWS_S / 2 than at all looks of the
            GROWS_S / 2 before, and its oldest message has waited for GROWS_S. This is the trend `lag_grows` of the
            stats page; event lag_grows names the group.
Letters     `letters_refused` of the row: messages that wait because the broker refuses their dead letters for good.
Before it   A group that has committed nothing in a partition counts from its first message there (deliveries.py). That
commits     is in memory: after a start of the gateway, from the first message that it is given then.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from itertools import islice
from typing import NamedTuple

from kmq.broker.stats import StatsPage
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Fetching
from kmq.gateway.core.metrics import MOST_LAGS, Lag
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.core.trends import HOLD_S
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import Partition, partition_lag
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.protocol import GroupView, State
from kmq.log import gaps
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError
from kmq.logfmt import Logger
from kmq.wire.requests import Position, TopicPartition


class PartitionLag(NamedTuple):
    """One partition of a group. `committed`: None if the group has committed nothing there.

    `new` and `new_s`: the lag without given-back messages before the committed offset. `nacked`: number of given-back
    messages that wait to be delivered again or committed. `start`: of the partition. `overtaken`: messages that were
    deleted before the group had read them.
    """

    topic: str
    partition: int
    committed: int | None
    end: int
    lag: int
    lag_s: float
    start: int
    new: int
    new_s: float
    nacked: int = 0
    overtaken: int = 0


class GroupAdmin:
    """Group administration for all doors. Every method may raise RequestRefused."""

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
        """Return a group, and its lag in each partition that it reads or has committed."""
        view = self._view(group)
        committed = {place: row.offset for place, row in self._groups.committed(group).items()}
        places = {TopicPartition(*place) for place in committed}
        begun = self._groups.deliveries.begun(group)
        places |= {place for member in view.members for place in member.partitions}
        places |= {TopicPartition(*place) for place in begun}
        waiting = self._groups.store.table.waiting(group)
        rows = await self._fetching.run(self._lags, sorted(places), begun | committed, waiting, self._partitions.bounds)

        def nacked(row: PartitionLag) -> int:
            nacks = self._groups.store.nacks(group, row.topic, row.partition)
            return sum(not nack.letter for nack in nacks.values())

        return view, [
            row._replace(nacked=nacked(row), committed=committed.get((row.topic, row.partition)))
            for row in self._with_overtaken(group, rows)
        ]

    async def lags(self) -> list[Lag]:
        """Return the lags of groups, for the metrics."""
        return [
            (name, row.topic, row.partition, row.lag, row.lag_s, row.overtaken) for name, row in await self.all_lags()
        ]

    async def all_lags(self) -> list[tuple[str, PartitionLag]]:
        """Return (group, lag) for each committed partition, at most MOST_LAGS."""
        try:
            names = self.names()
        except RequestRefused:  # the offsets are not loaded yet
            return []
        groups: dict[str, tuple[dict[Partition, int], dict[Partition, list[int]]]] = {}
        room = MOST_LAGS
        for name in names:
            committed = {place: row.offset for place, row in self._groups.committed(name).items()}
            some = dict(islice((self._groups.deliveries.begun(name) | committed).items(), room))
            groups[name] = some, self._groups.store.table.waiting(name)
            room -= len(some)

        def look() -> list[tuple[str, list[PartitionLag]]]:
            bounds = cache(self._partitions.bounds)  # many groups read the same partitions
            return [
                (name, self._lags([TopicPartition(*place) for place in sorted(committed)], committed, waiting, bounds))
                for name, (committed, waiting) in groups.items()
            ]

        found = await self._fetching.run(look)
        return [(name, row) for name, rows in found for row in self._with_overtaken(name, rows)]

    def _with_overtaken(self, group: str, rows: list[PartitionLag]) -> list[PartitionLag]:
        """Return the rows with their overtaken messages. For a group without members they are counted now.

        Its next member begins at the committed offset. If that is a Kafka member, no reader would count them.
        """
        deliveries, committed = self._groups.deliveries, self._groups.committed(group)
        is_empty = self._groups.coordinator.state(group) is State.EMPTY
        for row in rows:
            place = row.topic, row.partition
            if is_empty and place in committed and committed[place].offset == row.committed:
                first = max(committed[place].offset, deliveries.read_to(group, place))
                found = self._partitions.gaps(*place) if first < row.start else ()
                self._groups.overtake(group, place, gaps.range_of(found, first, row.start))
        return [row._replace(overtaken=deliveries.overtaken(group, (row.topic, row.partition))) for row in rows]

    def _view(self, group: str) -> GroupView:
        view = self._groups.describe(group)
        if view is None:
            raise RequestRefused("unknown_group", f"group {group!r}: does not exist")
        return view

    def _lags(
        self,
        places: list[TopicPartition],
        committed: Mapping[Partition, int],
        waiting: Mapping[Partition, list[int]],
        bounds: Callable[[str, int], tuple[int, int]],
    ) -> list[PartitionLag]:
        rows = []
        for place in places:
            try:
                start, end = bounds(*place)
            except (RequestRefused, DamageError, FileNotFoundError):
                continue  # just deleted; or damaged: one damaged log must not hide all others
            offset = committed.get(place)
            found = self._partitions.gaps(*place)
            lag, first = partition_lag((start, end), offset, waiting.get(place, ()), found)
            new, position = partition_lag((start, end), offset, (), found)
            lag_s = self._age_of(place, first) if first < end else 0.0
            new_s = lag_s if position == first else self._age_of(place, position) if position < end else 0.0
            rows.append(PartitionLag(*place, offset, end, lag, lag_s, start, new, new_s))
        return rows

    def _age_of(self, partition: TopicPartition, offset: int) -> float:
        """Return how long ago a record was received. While a group does not move, this reads no file again."""
        try:
            place = *partition, self._partitions.from_seq(partition.topic)
            at, received = self._received.get(place, (-1, 0.0))
            if at != offset:
                received = self._partitions.open(*partition).received_at(offset) or 0.0
        except NotHereError as err:
            received = err.row.times[0] / 1e6  # of the first record of its object: at least as old
        except (RequestRefused, DamageError):  # just deleted; damage is reported elsewhere
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
        await self._groups.commit(group, None, rows, is_seek=True)
        return offsets

    async def plan(self, group: str, topic: str, to: Position | Mapping[int, int]) -> dict[int, int]:
        """Return the offsets to which `seek` would move the group. Refuses what `seek` refuses."""
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
        self._view(group)
        before = {place: row.offset for place, row in self._groups.committed(group).items()}
        offsets = await (self.plan if dry_run else self.seek)(group, topic, to)
        return [(number, before.get((topic, number)), offset) for number, offset in sorted(offsets.items())]

    async def delete(self, group: str) -> None:
        """Forget a group without members and its offsets; it is forgotten on disk when this returns."""
        self._view(group)
        self._groups.coordinator.check_empty(group)
        self._groups.store.check_complete(group)
        await self._groups.store.delete(group)
        self._groups.forgotten(group)

    async def forget(self, group: str, places: Collection[Partition]) -> set[Partition]:
        """Forget a known group's commits in some partitions, except in topics that its members subscribe to.

        Returns the partitions of those topics. The others are forgotten on disk when this returns.
        """
        view = self._view(group)
        if view.protocol_type:
            self._groups.coordinator.check_empty(group)  # only Kafka members know what they read
        subscribed = {topic for member in view.members for topic in member.topics}
        gone = {place for place in places if place[0] not in subscribed}
        await self._groups.store.delete(group, gone)
        for place in gone:
            self._groups.deliveries.drop(group, place)
        self._groups.forgotten(group)
        return {*places} - gone


# --- stalled groups --------------------------------------------------------------------------------------------------

_LOOK_S = 5.0
CRASHES, CRASHED_S = 3, 600.0
GROWS_S = 60.0


class StalledGroups:
    """The task that looks for groups that are stalled, crash, or fall behind."""

    def __init__(self, page: StatsPage, groups: Groups, admin: GroupAdmin, stalled_s: float, log: Logger) -> None:
        self._page, self._row = page, page.rows["gateway"]
        self._groups, self._admin, self._stalled_s, self._log = groups, admin, stalled_s, log
        self._crashing: set[str] = set()
        self._waiting: set[str] = set()
        # (group, topic, partition) → the commit, and since when the group has lag there
        self._behind: dict[tuple[str, str, int], tuple[int, float]] = {}
        # (group, topic) → (time, messages) of the last GROWS_S
        self._lags: dict[tuple[str, str], deque[tuple[float, int]]] = {}
        self._grew: dict[tuple[str, str], float] = {}  # when it grew last

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(min(_LOOK_S, self._stalled_s))

    async def look(self, now: float) -> None:
        """Look once, and write what was found into the row."""
        try:
            rows = await self._admin.all_lags()
            committed = {name: self._groups.committed(name) for name, _ in rows}
            count = len(self._admin.names())
        except RequestRefused:  # the offsets are not loaded yet
            return
        before, self._behind = self._behind, {}
        stalled: dict[str, int] = {}
        for name, row in rows:
            commit = committed[name].get((row.topic, row.partition))
            if not row.new:
                continue
            place, at = (name, row.topic, row.partition), -1 if commit is None else commit.offset
            offset, since = before.get(place, (at, now))
            since = since if offset == at else now
            self._behind[place] = at, since
            if now - since >= self._stalled_s:
                stalled[name] = stalled.get(name, 0) + row.new
        self._look_for_waiting(rows)
        self._look_for_crashes()
        self._look_for_letters()
        self._look_for_growth(rows, now)
        mine = self._row
        mine.groups, mine.groups_stalled, mine.group_stalled_lag = count, len(stalled), sum(stalled.values())

    def _look_for_waiting(self, rows: Iterable[tuple[str, PartitionLag]]) -> None:
        """Write into the row how many given-back messages wait in partitions of Kafka members."""
        is_read_by_kafka, waiting = self._groups.coordinator.is_read_by_kafka, Counter[str]()
        for name, row in rows:
            if row.lag > row.new and is_read_by_kafka(name, (row.topic, row.partition)):
                waiting[name] += row.lag - row.new
        for name in waiting.keys() - self._waiting:
            effect = "members by Kafka's protocol own their partitions, and are not given them"
            self._log.warn("nacked_waiting", group=name, messages=waiting[name], effect=effect)
        self._waiting, self._row.nacked_waiting = {*waiting}, waiting.total()

    def _look_for_crashes(self) -> None:
        """Write into the row how many groups lose one member after another."""
        now = time.monotonic()
        deaths = self._groups.deliveries.deaths.items()
        crashing = {name for name, at in deaths if len(at) >= CRASHES and now - at[0] < CRASHED_S}
        for name in crashing - self._crashing:
            self._log.warn("group_crashing", group=name, deaths=CRASHES, effect="it commits nothing")
        self._crashing, self._row.groups_crashing = crashing, len(crashing)

    def _look_for_letters(self) -> None:
        """Write into the row how many messages wait because their dead letters are refused."""
        refused, store = self._groups.deliveries.refused, self._groups.store

        def waits(group: str, place: Partition, offset: int) -> bool:
            row = store.nacks(group, *place).get(offset)
            return row is not None and not row.letter

        refused -= {each for each in refused if not waits(*each)}
        self._row.letters_refused = len(refused)

    def _look_for_growth(self, rows: Iterable[tuple[str, PartitionLag]], now: float) -> None:
        """Publish how many groups fall behind, and their lag."""
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for group, row in rows:
            before, longest_s = found.get((group, row.topic), (0, 0.0))
            found[group, row.topic] = before + row.new, max(longest_s, row.new_s)
        self._lags = {place: self._lags.get(place, deque()) for place in found}
        grew = {place: at for place, at in self._grew.items() if place in found and now - at <= HOLD_S}
        for place, (messages, waits_s) in found.items():
            seen = self._lags[place]
            seen.append((now, messages))
            while now - seen[0][0] > GROWS_S:
                seen.popleft()
            if waits_s >= GROWS_S and _grows(seen):
                if place not in grew:
                    group, topic = place
                    self._log.warn("lag_grows", group=group, topic=topic, messages=messages, waits_s=round(waits_s))
                grew[place] = now
        self._grew = grew
        lag = sum(found[place][0] for place in grew)
        self._page.publish_trend("lag_grows", len({group for group, _ in grew}) if lag else 0, lag)


def _grows(seen: Collection[tuple[float, int]]) -> bool:
    """Return True if each of the later numbers is above all earlier ones. A lag that swings does not grow."""
    now = max(at for at, _ in seen)
    late = [messages for at, messages in seen if now - at < GROWS_S / 2]
    early = [messages for at, messages in seen if now - at >= GROWS_S / 2]
    is_known = now - min(at for at, _ in seen) >= GROWS_S - 2 * _LOOK_S
    return is_known and min(late) > max(early)
