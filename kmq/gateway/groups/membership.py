"""Consumer groups as doors use them: coordinator, committed offsets, topics and clock, joined in one event loop.

    member = await groups.join(group, member, client, options, listener)
    listener(event)                       Revoke | Assigned | Ended, in the order to send them; it must not block
    groups.sync | revoked | beat | leave  as in coordinator.py
    await groups.commit(group, member, rows)

Owner       the gateway: one task, from its start to its end. It writes data/gateway.starts once, at its start.
Invariant   Each member has at most one listener: who joins under the name of a member takes its place, and the listener
            before it is told Ended(fenced). An earlier attempt of the same run, which arrives late, never does: it is
            refused. A commit is stored only after the coordinator has allowed it, and never
            beyond the end of a partition; the coordinator hears of it only after it is durable. What it goes beyond,
            though the answer with it is not known to have arrived, comes again (deliveries.py): on disk before the commit.
            The commits of a group are judged and stored in the order of the calls: one that has to wait for the router
            never lands behind a later one.
            A partition younger than a group's subscription is given to nobody before the group has begun there: with
            offset 0, on disk.
            Committed offsets are forgotten only when the group had no members for KMQ_GROUP_RETENTION, or when somebody
            deletes it. What was committed after that stays.
            `count_start` never returns a number twice, because the next one is on disk before it returns.
Crash       Groups that have committed offsets are restored from the store, and the start is counted; nobody joins
            before that is done. How old the offsets are is for offsets.py to judge, whose clock does not jump, and who
            gives members the time to come back. So a start forgets nothing. gateway.starts is replaced atomically;
            where it is missing or damaged, as after a restore, counting goes on from the records' generations.
Cost        A stat each second; a look at every topic when one came or went, and every _TOPICS_S.
Memory      As coordinator.py and offsets.py say, and a listener for each member that is connected.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import NamedTuple
from weakref import WeakValueDictionary

from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.files import replace_file
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups.coordinator import EPOCH_LIVES, Coordinator, least_starts
from kmq.gateway.groups.deliveries import Deliveries
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.offset_table import MAX_OFFSET, CommittedOffset, NackRow, Partition
from kmq.gateway.groups.offsets import GRACE_S, OffsetCommit, OffsetStore
from kmq.gateway.groups.protocol import (
    Assigned,
    Client,
    Ended,
    Event,
    Forgotten,
    GroupLimits,
    GroupView,
    MemberOptions,
    Resume,
    Revoke,
    State,
)
from kmq.log import topics
from kmq.log.damage import DamageError
from kmq.logfmt import Logger
from kmq.wire.requests import Position

# --- starts ----------------------------------------------------------------------------------------------------------
# data/gateway.starts: one line with the decimal number of the lives of gateways up to now (coordinator.py).

STARTS = "gateway.starts"
_MOST_DIGITS = 9


def count_start(data: str, least: int = 0) -> int:
    """Return the number of former starts, at least `least`, and count this one. Raises OSError if it cannot."""
    try:
        with open(f"{data}/{STARTS}", "rb") as file:
            text = file.read(_MOST_DIGITS + 2).strip()
    except FileNotFoundError:
        text = b""
    former = max(least, int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0)
    replace_file(f"{data}/{STARTS}", b"%d\n" % (former + 1))
    return former


# --- topics -----------------------------------------------------------------------------------------------------------

_TOPICS_S = 5.0  # between two looks whether a topic has more partitions
_Declared = dict[str, tuple[int, int | None]]  # topic → partitions, from_seq


class TopicChange(NamedTuple):
    """What a look has found.

    partitions_of   all topics with their partitions
    again           names that were deleted and declared anew
    young           topics that came or grew since the last look → how many partitions they had before; at the first look
                    topics that have grown → how many they had at first
    """

    partitions_of: dict[str, int]
    again: list[str]
    young: dict[str, int]


class DeclaredTopics:
    """Followed on disk, and looked at when somebody names one. `changed` is called with each change."""

    def __init__(self, data: str, partitions: Partitions, changed: Callable[[TopicChange], None], log: Logger) -> None:
        self._data, self._partitions, self._changed, self._log = data, partitions, changed, log
        self._declared: _Declared = {}
        self._first: dict[str, int] = {}  # of the first look: topic → partitions before it grew
        self._has_looked = False
        self._seen, self._at = 0, 0.0
        self._why = ""  # why the last look has failed, so that the log says it once

    def __contains__(self, topic: str) -> bool:
        return topic in self._declared

    async def follow(self) -> None:
        """Look whether topics came, went, or have more partitions. Call about once a second."""
        try:
            seen = os.stat(f"{self._data}/topics").st_mtime_ns
            if seen == self._seen and time.monotonic() < self._at:
                return
            declared = await asyncio.to_thread(self._look_at_all)
        except (KmqError, OSError) as err:
            if self._why != str(err):
                self._log.warn("topics_not_read", reason=err, effect="groups keep the topics that they know")
            self._why = str(err)
            return
        self._why = ""
        self._seen, self._at = seen, time.monotonic() + _TOPICS_S
        self._take(declared)
        self._has_looked = True
        self._first.clear()

    async def know(self, names: Iterable[str]) -> None:
        """Look at topics that are named now, because they may be younger than the last look."""
        found = await asyncio.to_thread(self._partitions.declared_of, names)
        self._take(self._declared | found)  # not before the look: meanwhile another one may have found more

    def _look_at_all(self) -> _Declared:
        names = topics.names(self._data)
        if not self._has_looked:
            self._first = {name: self._partitions.first_count(name) for name in names}
        return self._partitions.declared_of(names)

    def _take(self, declared: _Declared) -> None:
        # A topic that is pending keeps its former from_seq: else the router's next word would be its first life.
        since_of = {name: since for name, (_, since) in self._declared.items()}
        declared = {
            name: (count, since_of.get(name) if since is None else since) for name, (count, since) in declared.items()
        }
        if declared == self._declared:
            return
        again = [name for name, (_, since) in declared.items() if since_of.get(name) not in (None, since)]
        partitions_of = {name: count for name, (count, _) in declared.items()}
        if self._has_looked:
            before = {name: count for name, (count, _) in self._declared.items() if name not in again}
        else:
            before = partitions_of | self._first
        self._declared = declared
        young = {name: before.get(name, 0) for name, count in partitions_of.items() if before.get(name, 0) < count}
        self._changed(TopicChange(partitions_of, again, young))


# --- membership ------------------------------------------------------------------------------------------------------

_ROUTED_S = 5.0  # longest wait of a commit for the router
_ARRIVAL_S = 2.0  # until messages come again whose answer may have arrived
_ON_THE_WAY = "in an answer that is not known to have arrived"
_LOOK_S = 1.0  # between two looks whether topics came or went
_LOAD_S = 0.05  # between two looks whether the offsets are loaded
_COME_BACK_S = 2.0  # how long the members of a former life of the gateway are waited for

Listener = Callable[[Event], None]


class Beginning(NamedTuple):
    """A topic whose partitions from number `before` on no member is given yet: groups are to begin there first."""

    topic: str
    before: int


class Groups:
    """All groups of the broker. Every call may raise RequestRefused (not_ready) until the offsets are loaded."""

    def __init__(self, settings: Settings, store: OffsetStore, partitions: Partitions, log: Logger) -> None:
        self.life = 0  # of the gateway: no other one of this broker, or of its shard, has this number; 0: not known yet
        self.store, self.epoch = store, 0  # the epoch in which this broker leads its shard; 0: no shard
        self.deliveries = Deliveries()
        self.coordinator = Coordinator()  # without groups, until they are restored
        self._settings, self._partitions, self._log = settings, partitions, log
        self._judging: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # group → its commits' turn
        self._topics = DeclaredTopics(settings.data, partitions, self._topics_changed, log)
        self.partitions_of: dict[str, int] = {}  # of all topics; another dict after each change
        self._beginning: list[Beginning] = []
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}  # group → of readers that wait for what members give back
        self._attended = Counter[tuple[str, str]]()  # group, member → answers that it waits for, and cannot beat
        self.is_ready = False
        self._timer: asyncio.TimerHandle | None = None
        self._forgetting: set[asyncio.Task[None]] = set()

    # --- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Restore the groups, and follow the topics until cancelled."""
        try:
            while not self.store.is_loaded:
                await asyncio.sleep(_LOAD_S)
            while not await self._restore():
                await asyncio.sleep(_LOOK_S)
            self.is_ready = True
            while True:
                self._turn()
                await asyncio.sleep(_LOOK_S)
                await self._topics.follow()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _restore(self) -> bool:
        """Make all groups with committed offsets known; return False if that has to be tried again."""
        least = least_starts(max(self.store.generations().values(), default=0), self.epoch)
        try:
            starts = await asyncio.to_thread(count_start, self._settings.data, least)
        except OSError as err:
            self._log.warn("groups_not_ready", reason=err, effect="no member can join; tried again")
            return False
        limits = GroupLimits(retention_s=max(self._settings.group_retention, GRACE_S))
        self.coordinator = Coordinator(limits, token_hex(3), starts)
        self.life = self.epoch * EPOCH_LIVES + starts + 1
        await self._topics.follow()
        now = time.monotonic()
        for group, generation in self.store.generations().items():  # commits that were decided may be stored meanwhile
            self.coordinator.restore(group, generation, now, wait_s=_COME_BACK_S)
        return True

    # --- topics ------------------------------------------------------------------------------------------------------

    def _topics_changed(self, change: TopicChange) -> None:
        self.partitions_of = change.partitions_of
        self.deliveries.forget_topics(change.again)
        for topic, before in change.young.items():
            if rows := self._begin_at_start(topic, before):
                beginning = Beginning(topic, before)
                self._beginning.append(beginning)
                self.in_background(self._begin(beginning, rows))
        self._tell_topics(change.again)

    def _tell_topics(self, again: Iterable[str] = ()) -> None:
        """Tell the coordinator of all topics, except of partitions in which groups are still to begin."""
        counts = dict(self.partitions_of)
        for topic, before in self._beginning:
            counts[topic] = min(before, counts.get(topic, 0))
        self.coordinator.topics_changed({name: n for name, n in counts.items() if n}, time.monotonic(), again)
        self._arm()

    def _begin_at_start(self, topic: str, before: int) -> dict[str, dict[Partition, OffsetCommit]]:
        """Return what groups that subscribed to a topic earlier commit in its partitions from number `before` on.

        Those are younger than the subscription, so all that is in them came after it. A member that joins later with
        `latest` would take its own beginning for the group's. A group has subscribed if members of it read the topic, or
        if it has committed in all of the older partitions, except where its beginning is on its way to the disk.
        """
        groups = set(self.coordinator.subscribers(topic))
        known = min([before, *(each.before for each in self._beginning if each.topic == topic)])
        older = [(topic, number) for number in range(known)]
        if older:
            found = ((group, self.store.committed(group)) for group in self.store.groups())
            groups |= {group for group, rows in found if all(place in rows for place in older)}
        young = [(topic, number) for number in range(before, self.partitions_of[topic])]
        asked = {group: [p for p in young if p not in self.store.committed(group)] for group in sorted(groups)}
        return {group: {place: OffsetCommit(0) for place in places} for group, places in asked.items() if places}

    async def _begin(self, beginning: Beginning, rows: dict[str, dict[Partition, OffsetCommit]]) -> None:
        """Commit the beginning of groups in young partitions. Nobody is given those before that is on disk."""
        try:
            for group, offsets in rows.items():
                is_first = True
                while not await self._has_begun(group, offsets, is_first):
                    is_first = False
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._beginning.remove(beginning)
        self._tell_topics()

    async def _has_begun(self, group: str, rows: dict[Partition, OffsetCommit], is_first: bool) -> bool:
        """Try to commit, and return False if that is to be tried again, which the log says at the first try alone."""
        try:
            await self.store.commit(group, rows)
        except RequestRefused as err:
            is_lasting = not err.refusal.is_retryable
            effect = "its members begin there at their own start" if is_lasting else "tried again"
            if is_first or is_lasting:
                self._log.warn("beginning_not_committed", group=group, reason=err, effect=effect)
            return is_lasting
        self.coordinator.committed(group, time.monotonic())
        return True

    # --- the coordinator's clock and events --------------------------------------------------------------------------

    def _arm(self, seconds: float = 0.0) -> None:
        """Let the coordinator work in so many seconds; 0: as soon as the event loop is free."""
        if self._timer is not None:
            self._timer.cancel()
        if self.is_ready:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._turn)

    def _turn(self) -> None:
        """Let the coordinator do what is due, and pass its events on."""
        for attended in self._attended:
            self._beat_if_member(*attended)
        due = self.coordinator.tick(time.monotonic())
        for event in self.coordinator.take_events():
            if isinstance(event, Forgotten):
                self.deliveries.drop(event.group)
                self._forget(event.group)
                continue
            listener = self._listeners.get((event.group, event.member))
            if isinstance(event, Ended):
                self.deliveries.died(event.group, event.member)
                self._listeners.pop((event.group, event.member), None)
            if listener is not None:
                listener(event)
        if due != NEVER:
            self._arm(max(0.0, due - time.monotonic()))

    def _forget(self, group: str) -> None:
        async def delete() -> None:
            try:
                if self.store.committed(group) and self.coordinator.state(group) is State.DEAD:  # not made anew
                    await self.store.delete(group)
            except KmqError as err:
                self._log.warn("group_not_forgotten", group=group, reason=err)

        self.in_background(delete())

    # --- members -----------------------------------------------------------------------------------------------------

    def ready(self) -> Coordinator:
        """Return the coordinator. Raises RequestRefused before groups can be served."""
        if not self.is_ready:
            raise RequestRefused("not_ready", "the gateway has not read the committed offsets yet")
        return self.coordinator

    async def join(
        self,
        group: str,
        member: str | None,
        client: Client,
        options: MemberOptions,
        listener: Listener,
        resume: Resume | None = None,
        is_anew: bool = False,
    ) -> str:
        """Join, or come back as `member`. Returns the member's id. `listener` hears the assignment in any case.

        `is_anew`: the member's program has started, or lost its connection, so what it had in hand comes again.
        Raises what Coordinator.join raises.
        """
        self.ready()
        self.store.check_complete(group)
        await self._topics.know(options.topics)
        now = time.monotonic()
        is_back = self.coordinator.generation(group, member) is not None
        id = self.coordinator.join(group, member, client, options, now, resume or Resume())
        if is_anew:
            self.deliveries.died(group, id)
        has_heard = False

        def first(event: Event) -> None:
            nonlocal has_heard
            has_heard |= isinstance(event, Assigned)
            listener(event)

        self.listen(group, id, first)
        self._turn()
        if self._listeners.get((group, id)) is first:
            self._listeners[group, id] = listener
            if is_back and not has_heard:
                _tell_again(self.coordinator, group, id, listener)
        return id

    def listen(self, group: str, member: str, listener: Listener) -> None:
        """Let `listener` hear what becomes of a member. Who heard it before is told that it does no more."""
        former = self._listeners.get((group, member))
        if former is not None:
            former(Ended(group, member, "fenced"))
        self._listeners[group, member] = listener

    def stop_listening(self, group: str, member: str, listener: Listener) -> None:
        """Note that a connection has ended. The member stays until its session timeout, and may come back."""
        if self._listeners.get((group, member)) == listener:
            del self._listeners[group, member]

    def beat(self, group: str, member: str, polled: bool = False, generation: int | None = None) -> None:
        self.ready().beat(group, member, generation, time.monotonic(), polled)

    def sync(self, group: str, member: str, generation: int | None = None) -> None:
        self.ready().sync(group, member, generation, time.monotonic())
        self._arm()

    def hand_out(self, group: str, member: str, generation: int, assignments: Mapping[str, bytes]) -> None:
        self.ready().hand_out(group, member, generation, assignments)
        self._arm()

    def revoked(self, group: str, member: str, generation: int | None = None) -> None:
        coordinator = self.ready()
        coordinator.revoked(group, member, generation, time.monotonic())
        self.deliveries.release(group, member, coordinator.assignment(group, member).partitions)
        self._arm()

    def leave(self, group: str, member: str) -> None:
        self.ready().leave(group, member, time.monotonic())
        self.deliveries.release(group, member)
        listener = self._listeners.pop((group, member), None)
        if listener is not None:  # which another door may have said on its behalf
            listener(Ended(group, member, "unknown_member"))
        self._arm()

    # --- offsets -----------------------------------------------------------------------------------------------------

    def committed(self, group: str) -> Mapping[Partition, CommittedOffset]:
        """Return what a group has committed: the table itself, so do not change it, nor read it in a thread."""
        self.ready()
        return self.store.committed(group)

    def has_committed(self, place: Partition, offset: int, group: str | None) -> bool:
        """Return True if the group, or any, has committed past this record, and has not given it back."""
        table = self.store.table
        return table.is_handled(place, offset) if group is None else table.has_handled(group, place, offset)

    async def commit(
        self, group: str, member: str | None, rows: Mapping[Partition, OffsetCommit], generation: int | None = None
    ) -> None:
        """Commit; durable when this returns. Raises what Coordinator.check_commit and OffsetStore.commit raise."""
        coordinator, deadline = self.ready(), time.monotonic() + _ROUTED_S
        turn = self._judging.setdefault(group, asyncio.Lock())
        async with turn:
            await self.check_commit(group, member, generation, rows)
            name = member if member and coordinator.generation(group, member) is not None else ""  # SHARED may be none
            has_waited = await self.check_ends(rows, deadline)
            if await self._keep_on_the_way(group, name, rows) or has_waited:
                # Meanwhile the member may have lost the partition.
                coordinator.check_commit(group, member, generation, rows, time.monotonic())
        if generation is None:
            generation = coordinator.generation(group, name) or 0
        known = self.store.committed(group)
        ahead = {
            place: row._replace(offset=self._after_letters(group, place, row.offset))
            for place, row in rows.items()
            if place not in known
            or row.offset >= known[place].offset
            or not self._is_of_one(group, place, row.offset - 1)
        }
        # What is delivered while the commit is on its way is not done by it.
        done = {place: self.deliveries.done_by(group, place, row.offset) for place, row in rows.items()}
        lost = [
            (place, offset)
            for place, row in rows.items()
            for offset in self.deliveries.lost_by(group, place, row.offset)
        ]
        if ahead:
            # Its heir would begin in front of this commit, and go back.
            with self.attending(group, name):
                await self.store.commit(group, ahead, name, generation)
        coordinator.committed(group, time.monotonic())
        for place, row in rows.items():
            mine = [offset for offset in done[place] if self.deliveries.has(group, place, offset)]
            await self.forget(group, place, mine, row.offset if place in ahead else 0)
        for place, offset in lost:
            self.deliveries.give_back(group, place, offset)
        if lost:
            self.wake(group)

    async def check_commit(
        self, group: str, member: str | None, generation: int | None, places: Iterable[Partition]
    ) -> None:
        """Raise what Coordinator.check_commit raises. Topics may be younger than the last look at them."""
        places = tuple(places)
        if unknown := {topic for topic, _ in places if topic not in self._topics}:
            await self._topics.know(unknown)
        self.ready().check_commit(group, member, generation, places, time.monotonic())

    @contextmanager
    def attending(self, group: str, member: str) -> Iterator[None]:
        """Keep the session of a member that waits for an answer."""
        self._attended[group, member] += 1
        try:
            yield
        finally:
            self._attended[group, member] -= 1
            if not self._attended[group, member]:
                del self._attended[group, member]
            self._beat_if_member(group, member)

    def _beat_if_member(self, group: str, member: str) -> None:
        with suppress(RequestRefused):  # it has left
            self.beat(group, member)

    async def _keep_on_the_way(self, group: str, member: str, rows: Mapping[Partition, OffsetCommit]) -> bool:
        """Let messages come again that a commit goes beyond, though their answer may never have arrived.

        They are given time to show that it has (polling.py). Return True if there are such messages.
        """
        known, is_any = self.store.committed(group), False
        for place, row in rows.items():
            first = known[place].offset if place in known else 0
            for answer, offsets in self.deliveries.answers.commit(group, member, place, row.offset):
                nacks, now = self.store.nacks(group, *place), self.store.now_s()
                kept = [offset for offset in offsets if first <= offset < row.offset and offset not in nacks]
                nack = NackRow(0, now + _ARRIVAL_S, _ON_THE_WAY, first=now)
                await self.store.nack(group, *place, dict.fromkeys(kept, nack))
                answer.new.pop(place, None)
                answer.rows[place] = [*answer.rows.get(place, ()), *kept]
                is_any |= bool(kept)
        if is_any:
            self.wake(group)
        return is_any

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do this beside what goes on."""
        task = asyncio.get_running_loop().create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def check_ends(self, rows: Mapping[Partition, OffsetCommit], deadline: float) -> bool:
        """Raise RequestRefused (out_of_range) for an offset beyond the end: the group would skip what comes there.

        What somebody has read is there, so an ordinary commit costs no look at a file. Return True if there was one.
        A log may end earlier than it did while the router recovers. So whoever is ahead of the files is judged when all
        that is durable now is routed, and no honest commit is refused. If that takes too long, it is `not_ready`.
        """
        reached = self._partitions.reached
        ahead = [(place, row.offset) for place, row in rows.items() if reached(place) < row.offset <= MAX_OFFSET]
        if not ahead or await asyncio.to_thread(self._first_beyond, ahead) is None:
            return bool(ahead)
        watermark, durable = self.store.watermark, self.store.watermark.durable
        while not (watermark.is_followed and watermark.routed >= durable):
            if time.monotonic() >= deadline:
                raise RequestRefused("not_ready", "the router is down or recovers, so the end is unknown; commit again")
            await asyncio.sleep(_LOAD_S)
        if (refused := await asyncio.to_thread(self._first_beyond, ahead)) is not None:
            raise refused
        return True

    def _first_beyond(self, offsets: Iterable[tuple[Partition, int]]) -> RequestRefused | None:
        for place, offset in offsets:
            try:
                self._partitions.open(*place).locate(Position("offset", offset))
            except RequestRefused as err:
                if err.code in ("out_of_range", "not_ready"):
                    return err
            except DamageError:
                pass  # nobody knows where it ends
        return None

    def _is_of_one(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if a commit behind this message, with which the group goes back, concerns just the message.

        It came again to who commits it. If that one does not have it any more, as after a start of the gateway, the
        message comes once more, and the group stays where it is.
        """
        row = self.store.nacks(group, *place).get(offset)
        return row is not None and not row.letter

    @contextmanager
    def watch(self, group: str, event: asyncio.Event) -> Iterator[None]:
        """Set the event whenever a message of the group was given back."""
        self._watchers.setdefault(group, set()).add(event)
        try:
            yield
        finally:
            self._watchers[group].discard(event)
            if not self._watchers[group]:
                del self._watchers[group]

    def wake(self, group: str) -> None:
        """Let the group's readers look again."""
        for event in self._watchers.get(group, ()):
            event.set()

    async def forget(self, group: str, place: Partition, offsets: Iterable[int], committed: int = 0) -> None:
        """Forget messages of a partition that the group has done with, and letters that it has committed beyond."""
        nacks = self.store.nacks(group, *place)
        letters = [offset for offset, row in nacks.items() if row.letter and offset < committed] if nacks else []
        done = [*offsets, *letters]
        if done:
            await self.store.nack_done(group, *place, *done)
            for offset in done:
                self.deliveries.give_back(group, place, offset)
                self.deliveries.trust(group, place, offset)
            self.wake(group)
        self.deliveries.committed(group, place, committed)

    async def pass_letters(self, group: str, place: Partition, start: int) -> None:
        """Move the group's offset over messages that were put aside, if it stands in front of one.

        `start`: the first offset of the partition, where a group without a commit stands. While another commit is on
        its way the offset stays: the next commit moves it. The rows stay, too, until a member has committed beyond
        them: it may stand in front of them still.
        """
        known = self.store.committed(group).get(place)
        begin = known.offset if known else start
        offset = self._after_letters(group, place, begin)
        if offset > begin and not self.store.is_writing(group):
            moved = OffsetCommit(offset, known.metadata, known.leader_epoch) if known else OffsetCommit(offset)
            await self.store.commit(group, {place: moved}, generation=known.generation if known else 0)
            self.coordinator.committed(group, time.monotonic())

    def _after_letters(self, group: str, place: Partition, offset: int) -> int:
        """Return the first offset from this one on whose message was not put aside."""
        nacks = self.store.nacks(group, *place)
        while offset in nacks and nacks[offset].letter:
            offset += 1
        return offset

    # --- views -------------------------------------------------------------------------------------------------------

    def describe(self, group: str) -> GroupView | None:
        return self.ready().describe(group)

    def is_alive(self, group: str) -> bool:
        """Return True if the group has members, may have some, or had some within KMQ_GROUP_RETENTION."""
        if not self.is_ready:
            return True
        view = self.coordinator.describe(group)
        return view is not None and (
            bool(view.members) or time.monotonic() < view.left + self._settings.group_retention
        )

    def forgotten(self, group: str) -> None:
        """Note that the committed offsets of a group were deleted: it is gone, unless somebody uses it again."""
        if self.coordinator.state(group) is State.EMPTY and not self.store.committed(group):
            self.deliveries.drop(group)
            self.coordinator.delete(group)


def _tell_again(coordinator: Coordinator, group: str, member: str, listener: Listener) -> None:
    """Tell a member that came back what it has and is to give up. If that is nothing yet, the next generation tells it."""
    found = coordinator.assignment(group, member)
    if found.revoking:
        listener(Revoke(group, member, found.generation, found.revoking))
    if found.partitions or found.revoking or coordinator.state(group) is not State.PREPARING:
        listener(Assigned(group, member, found.generation, found.partitions))
