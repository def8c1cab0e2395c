"""Consumer groups as doors use them: coordinator, committed offsets, topics and clock, joined in one event loop.

    member = await groups.join(group, member, client, options, listener)
    listener(event)                       Revoke | Assigned | Ended, in the order to send them; it must not block
    groups.sync | revoked | beat | leave  as in coordinator.py
    await groups.commit(group, member, rows)

Owner       the gateway: one task, from its start to its end. It writes data/gateway.starts once, at its start.
Invariant   Each member has at most one listener. A client that joins under the name of a member takes its place, and
            the former listener gets Ended(fenced). An earlier attempt of the same run that arrives late is refused.
            A commit is stored only after the coordinator has allowed it, and never beyond the end of a partition. The
            coordinator is told of it only when it is durable. If a commit passes messages whose answer is not known to
            have arrived, they are delivered again (deliveries.py): their rows are on disk before the commit.
            The commits of a group are judged and stored in the order of the calls: a commit that has to wait for the
            router never lands after a later one.
            A partition younger than a group's subscription is assigned only after the group has begun there: offset 0
            is committed, on disk.
            Committed offsets are forgotten only when the group had no members for KMQ_GROUP_RETENTION, or when a user
            deletes it. Later commits stay.
            `count_start` never returns a number twice, because the next one is on disk before it returns.
Crash       A start restores groups with committed offsets from the store, and counts itself. No member joins before
            that is done. In a shard the members of a group are restored, too (group_records.py).
            offsets.py judges how old the offsets are: its clock does not jump, and it gives members time to return. So
            a start forgets nothing. gateway.starts is replaced atomically. If it is missing or damaged, as after a
            restore, counting continues from the generations of the records.
Memory      As coordinator.py and offsets.py say, and a listener for each member that is connected.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from secrets import token_hex
from weakref import WeakValueDictionary

from kmq.broker.data_directory import read_starts, write_starts
from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups import group_records
from kmq.gateway.groups.coordinator import EPOCH_LIVES, Coordinator, least_starts
from kmq.gateway.groups.declared_topics import Beginning, DeclaredTopics, TopicChange
from kmq.gateway.groups.deliveries import Deliveries, after_letters
from kmq.gateway.groups.group import NEVER, Group
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
from kmq.log import gaps
from kmq.logfmt import Logger
from kmq.wire.requests import TopicPartition

# --- starts ----------------------------------------------------------------------------------------------------------
# data/gateway.starts: one line with the decimal number of the lives of gateways up to now (coordinator.py).


def count_start(data: str, least: int = 0) -> int:
    """Return the number of former starts, at least `least`, and count this one. Raises OSError if it cannot."""
    former = max(least, read_starts(data))
    write_starts(data, former + 1)
    return former


# --- membership ------------------------------------------------------------------------------------------------------

_ROUTED_S = 5.0  # longest wait of a commit for the router
_ARRIVAL_S = 2.0  # until messages are delivered again if their answer may have arrived
_ON_THE_WAY = "in an answer that is not known to have arrived"
_LOOK_S = 1.0  # between two looks whether topics came or went
_LOAD_S = 0.05  # between two looks whether the offsets are loaded
_COME_BACK_S = 2.0  # how long to wait for the members of the gateway's former life

Listener = Callable[[Event], None]


class Groups:
    """All groups of the broker. Every call may raise RequestRefused (not_ready) until the offsets are loaded."""

    def __init__(self, settings: Settings, store: OffsetStore, partitions: Partitions, log: Logger) -> None:
        self.life = 0  # of the gateway: its number, unique in this broker and its shard; 0: not known yet
        self.store, self.epoch = store, 0  # the epoch in which this broker leads its shard; 0: no shard
        self.deliveries = Deliveries()
        self.coordinator = Coordinator()  # without groups, until they are restored
        self._settings, self._partitions, self._log = settings, partitions, log
        self._judging: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # group → its commits' turn
        self._topics = DeclaredTopics(settings.data, partitions, self._topics_changed, log)
        self.partitions_of: dict[str, int] = {}  # of all topics; another dict after each change
        self._beginning: list[Beginning] = []
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}  # group → its readers that wait for given-back messages
        self._too_large: set[str] = set()  # groups already logged as too large to keep their members
        self._attended = Counter[tuple[str, str]]()  # group, member → answers it waits for, unable to beat
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
        """Restore all groups with committed offsets. Return False if that must be retried."""
        records = self._records()
        generations = [*self.store.generations().values(), *(generation for generation, _ in records.values())]
        least = least_starts(max(generations, default=0), self.epoch)
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
        for group, (_, take_over) in records.items():
            self.coordinator.restore_members(group, take_over, now)
        return True

    def _records(self) -> dict[str, tuple[int, Callable[[Group], None]]]:
        """Return, by group, the members that the shard's former leader recorded; {} without a shard."""
        found = {}
        for group, (seq, payload) in self.store.members.items() if self.epoch else ():
            try:
                found[group] = group_records.decode(payload)
            except (ValueError, LookupError, TypeError) as err:
                reason, effect = f"seq {seq}: {err!r}", "its members join again"
                self._log.warn("members_not_kept", group=group, reason=reason, effect=effect)
        return found

    def _write_changed_groups(self) -> None:
        """In a shard, write the members of each changed group before its members hear of the new generation."""
        for group in self.coordinator.take_changes():
            if self.epoch:
                payload = group_records.encode(group)
                if len(payload) > min(group_records.MAX_BYTES, self._settings.max_line // 2):
                    if group.name not in self._too_large:
                        reason, effect = f"{len(group.members):,} members, {len(payload):,} bytes", "they join again"
                        self._log.warn("members_not_kept", group=group.name, reason=reason, effect=effect)
                    self._too_large.add(group.name)
                    payload = b""
                else:
                    self._too_large.discard(group.name)
                self.in_background(self._write_members(group.name, payload))

    async def _write_members(self, group: str, payload: bytes) -> None:
        try:
            await self.store.write_members(group, payload)
        except KmqError as err:
            if not (isinstance(err, RequestRefused) and err.code == "stopping"):
                effect = "if another broker leads before the next change, its members join again"
                self._log.warn("members_not_kept", group=group, reason=err, effect=effect)

    # --- topics ------------------------------------------------------------------------------------------------------

    def _topics_changed(self, change: TopicChange) -> None:
        self.partitions_of = change.partitions_of
        self.deliveries.forget_topics(change.again)
        for topic, before in change.young.items():
            if rows := self._begin_at_start(topic, before):
                beginning = Beginning(topic, before)
                self._beginning.append(beginning)
                self.in_background(self._begin(beginning, rows))
        self._announce_topics(change.again)

    def _announce_topics(self, again: Iterable[str] = ()) -> None:
        """Tell the coordinator of all topics, except of partitions in which groups have yet to begin."""
        counts = dict(self.partitions_of)
        for topic, before in self._beginning:
            counts[topic] = min(before, counts.get(topic, 0))
        self.coordinator.topics_changed({name: n for name, n in counts.items() if n}, time.monotonic(), again)
        self._arm()

    def _begin_at_start(self, topic: str, before: int) -> dict[str, dict[Partition, OffsetCommit]]:
        """Return the first commits of a topic's subscribed groups, in its partitions from number `before` on.

        These partitions are younger than the subscription, so every record in them came after it. A member that joins
        later with `latest` would take its own beginning for the group's. A group has subscribed if its members read the
        topic, or if it has committed in all older partitions, except where its first commit is still being written.
        """
        groups = set(self.coordinator.subscribers(topic))
        oldest = min([before, *(each.before for each in self._beginning if each.topic == topic)])
        older = [(topic, number) for number in range(oldest)]
        if older:
            found = ((group, self.store.committed(group)) for group in self.store.groups())
            groups |= {group for group, rows in found if all(place in rows for place in older)}
        young = [(topic, number) for number in range(before, self.partitions_of[topic])]
        uncommitted = {group: [p for p in young if p not in self.store.committed(group)] for group in sorted(groups)}
        return {group: {place: OffsetCommit(0) for place in places} for group, places in uncommitted.items() if places}

    async def _begin(self, beginning: Beginning, rows: dict[str, dict[Partition, OffsetCommit]]) -> None:
        """Commit offset 0 for groups in young partitions. No member is assigned them before that is on disk."""
        try:
            for group, offsets in rows.items():
                is_first = True
                while not await self._has_begun(group, offsets, is_first):
                    is_first = False
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._beginning.remove(beginning)
        self._announce_topics()

    async def _has_begun(self, group: str, rows: dict[Partition, OffsetCommit], is_first: bool) -> bool:
        """Try to commit. Return False if that must be retried. The log has a line for the first failure only."""
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
        """Run the coordinator in so many seconds; 0: as soon as the event loop is free."""
        if self._timer is not None:
            self._timer.cancel()
        if self.is_ready:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._turn)

    def _turn(self) -> None:
        """Run what is due in the coordinator, and pass its events on."""
        for attended in self._attended:
            self._beat_if_member(*attended)
        due = self.coordinator.tick(time.monotonic())
        self._write_changed_groups()
        for event in self.coordinator.take_events():
            if isinstance(event, Forgotten):
                self.deliveries.drop(event.group)
                self._forget(event.group)
                continue
            listener = self._listeners.get((event.group, event.member))
            if isinstance(event, Ended):
                self.deliveries.died(event.group, event.member, self.store.committed(event.group))
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
        """Join, or return as `member`. Returns the member's id. `listener` gets the assignment in any case.

        `is_anew`: the member's program was started, or lost its connection, so messages it had are delivered again.
        Raises what Coordinator.join raises.
        """
        self.ready()
        self.store.check_complete(group)
        await self._topics.know(options.topics)
        now = time.monotonic()
        is_back = self.coordinator.generation(group, member) is not None
        id = self.coordinator.join(group, member, client, options, now, resume or Resume())
        if is_anew:
            self.deliveries.died(group, id, self.store.committed(group))
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
                _notify(self.coordinator, group, id, listener)
        return id

    def listen(self, group: str, member: str, listener: Listener) -> None:
        """Send a member's events to `listener`. A former listener gets Ended(fenced)."""
        former = self._listeners.get((group, member))
        if former is not None:
            former(Ended(group, member, "fenced"))
        self._listeners[group, member] = listener

    def stop_listening(self, group: str, member: str, listener: Listener) -> None:
        """Note that a connection has ended. The member stays until its session timeout, and may return."""
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
        if listener is not None:  # another door may have asked on the member's behalf
            listener(Ended(group, member, "unknown_member"))
        self._arm()

    # --- offsets -----------------------------------------------------------------------------------------------------

    def committed(self, group: str) -> Mapping[Partition, CommittedOffset]:
        """Return a group's committed offsets: the table itself, so do not change it, and do not read it in a thread."""
        self.ready()
        return self.store.committed(group)

    def has_committed(self, place: Partition, offset: int, group: str | None) -> bool:
        """Return True if the group (None: any group) has committed past this record, and has not given it back."""
        table = self.store.table
        return table.is_handled(place, offset) if group is None else table.has_handled(group, place, offset)

    async def commit(
        self,
        group: str,
        member: str | None,
        rows: Mapping[Partition, OffsetCommit],
        generation: int | None = None,
        may_exceed: bool = False,
        is_seek: bool = False,
    ) -> None:
        """Commit; durable when this returns. Raises what Coordinator.check_commit and OffsetStore.commit raise.

        `may_exceed`: accept offsets beyond the end, as Kafka does; the others begin at the end. `is_seek`: the group
        reads anew and forgets what it gave back. If it has no members and is set back, it forgets that from this offset
        on.
        """
        coordinator, deadline = self.ready(), time.monotonic() + _ROUTED_S
        turn = self._judging.setdefault(group, asyncio.Lock())
        async with turn:
            await self.check_commit(group, member, generation, rows)
            name = member if member and coordinator.generation(group, member) is not None else ""  # SHARED: no member
            has_waited = not may_exceed and await self.check_ends(rows, deadline)
            if await self._write_on_the_way(group, name, rows) or has_waited:
                # The member may have lost the partition while this waited.
                coordinator.check_commit(group, member, generation, rows, time.monotonic())
        if generation is None:
            generation = coordinator.generation(group, name) or 0
        committed = self.store.committed(group)
        anew = {
            place: 0 if is_seek else row.offset
            for place, row in rows.items()
            if is_seek or (member is None and (place not in committed or row.offset < committed[place].offset))
        }
        ahead = {
            place: row
            if place in anew
            else row._replace(offset=after_letters(self.store.nacks(group, *place), row.offset))
            for place, row in rows.items()
            if place not in committed
            or place in anew
            or row.offset >= committed[place].offset
            or not self._is_of_one(group, name, place, row.offset - 1)
        }
        # A message delivered while the commit is being written is not done by it.
        done = {place: self.deliveries.done_by(group, place, row.offset) for place, row in rows.items()}
        again = {place: self.read_again(group, name, place, row.offset) for place, row in rows.items()}
        lost = [(place, at) for place, row in rows.items() for at in self.deliveries.lost_by(group, place, row.offset)]
        if ahead:
            # The partition's next owner would begin before this commit, and go back.
            with self.attending(group, name):
                await self.store.commit(group, ahead, name, generation, anew=anew)
        for place in anew:
            self.deliveries.drop(group, place)
        coordinator.committed(group, time.monotonic())
        for place, row in rows.items():
            mine = [offset for offset in done[place] if self.deliveries.has(group, place, offset)]
            await self.forget(group, place, [*mine, *again[place]], row.offset if place in ahead else 0)
        for place, offset in lost:
            self.deliveries.give_back(group, place, offset)
        if lost:
            self.wake(group)

    def check_redelivery(self, group: str, place: Partition) -> None:
        """Raise RequestRefused (kafka_owner) if a Kafka member owns the partition: it gets no message again."""
        if self.ready().is_read_by_kafka(group, place):
            text = f"{TopicPartition(*place)}: a member by Kafka's protocol owns it, and what is given back does not come to it"
            raise RequestRefused("kafka_owner", text)

    def read_again(self, group: str, member: str, place: Partition, offset: int) -> list[int]:
        """Return the given-back messages that are done when a Kafka member commits this next offset.

        It reads everything from the group's offset on, in order. Given-back messages before that offset wait.
        """
        committed, rows = self.store.committed(group).get(place), self.store.nacks(group, *place)
        if not rows or committed is None or not self._is_kafka(group, member):
            return []
        return [at for at, row in rows.items() if committed.offset <= at < offset and not row.letter]

    def _is_kafka(self, group: str, member: str) -> bool:
        options = self.coordinator.options(group, member)
        return options is not None and options.is_kafka

    async def check_commit(
        self, group: str, member: str | None, generation: int | None, places: Iterable[Partition]
    ) -> None:
        """Raise what Coordinator.check_commit raises. Looks again for topics that are not known yet."""
        places = tuple(places)
        if unknown := {topic for topic, _ in places if topic not in self._topics}:
            await self._topics.know(unknown)
        self.ready().check_commit(group, member, generation, places, time.monotonic())

    @contextmanager
    def attending(self, group: str, member: str) -> Iterator[None]:
        """Keep the session of a member alive while it waits for an answer."""
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

    async def _write_on_the_way(self, group: str, member: str, rows: Mapping[Partition, OffsetCommit]) -> bool:
        """Write rows for messages on the way that this commit passes: their answer may never have arrived.

        Until they are due, the member can show that it has them (polling.py). Return True if there are any.
        """
        committed, is_any = self.store.committed(group), False
        for place, row in rows.items():
            first = committed[place].offset if place in committed else 0
            for answer, offsets in self.deliveries.answers.commit(group, member, place, row.offset):
                nacks, now = self.store.nacks(group, *place), self.store.now_s()
                unconfirmed = [offset for offset in offsets if first <= offset < row.offset and offset not in nacks]
                nack = NackRow(0, now + _ARRIVAL_S, _ON_THE_WAY, first=now)
                await self.store.nack(group, *place, dict.fromkeys(unconfirmed, nack))
                answer.new.pop(place, None)
                answer.rows[place] = [*answer.rows.get(place, ()), *unconfirmed]
                is_any |= bool(unconfirmed)
        if is_any:
            self.wake(group)
        return is_any

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task, and keep a reference until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def check_ends(self, rows: Mapping[Partition, OffsetCommit], deadline: float) -> bool:
        """Raise RequestRefused (out_of_range) for an offset beyond the end: the group would skip messages yet to come.

        A member has read below the end, so an ordinary commit reads no file. Return True if a file was read.
        While the router recovers a log may end earlier than before. So a commit ahead of the files is judged only when
        all that is durable now is routed, and no honest commit is refused. If that takes too long, it is `not_ready`.
        """
        reached = self._partitions.reached
        ahead = [(place, row.offset) for place, row in rows.items() if reached(place) < row.offset <= MAX_OFFSET]
        if not ahead or await asyncio.to_thread(self._partitions.first_beyond, ahead) is None:
            return bool(ahead)
        watermark, durable = self.store.watermark, self.store.watermark.durable
        while not (watermark.is_followed and watermark.routed >= durable):
            if time.monotonic() >= deadline:
                raise RequestRefused("not_ready", "the router is down or recovers, so the end is unknown; commit again")
            await asyncio.sleep(_LOAD_S)
        if (refused := await asyncio.to_thread(self._partitions.first_beyond, ahead)) is not None:
            raise refused
        return True

    def _is_of_one(self, group: str, member: str, place: Partition, offset: int) -> bool:
        """Return True if a commit of `offset` + 1, lower than the group's offset, is for this one redelivered message.

        If the member does not have the message in hand any more, as after a start of the gateway, the message is
        delivered once more. The group's offset stays in any case.
        """
        row = self.store.nacks(group, *place).get(offset)
        return row is not None and not row.letter and not self._is_kafka(group, member)

    @contextmanager
    def watch(self, group: str, event: asyncio.Event) -> Iterator[None]:
        """Set the event whenever a message of the group is given back."""
        self._watchers.setdefault(group, set()).add(event)
        try:
            yield
        finally:
            self._watchers[group].discard(event)
            if not self._watchers[group]:
                del self._watchers[group]

    def wake(self, group: str) -> None:
        """Wake the group's readers to look again."""
        for event in self._watchers.get(group, ()):
            event.set()

    async def forget(self, group: str, place: Partition, offsets: Iterable[int], committed: int = 0) -> None:
        """Forget given-back messages of a partition that are done, and dead letters before the committed offset."""
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

    def overtake(self, group: str, place: Partition, gone: range, is_again: bool = False) -> None:
        """Count and log offsets that were deleted before the group read them.

        If the first of these offsets was counted before, the rest is counted without another log line.
        """
        counted = self.deliveries.overtake(group, place, gone, is_again)
        if counted and counted.start == gone.start:
            last, effect = counted[-1], "lost to the group, which goes on after them"
            where = {"group": group, "topic": place[0], "partition": place[1]}
            self._log.warn("group_overtaken", **where, first=counted[0], last=last, count=len(counted), effect=effect)

    def resume_at(self, place: Partition, offset: int) -> int:
        """Return where a group with a committed offset resumes: after the gap in which the offset lies, else there."""
        return gaps.passed(self._partitions.gaps(*place), offset)

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
        """Note that a group's committed offsets were deleted: the group is gone, unless a client uses it again."""
        if self.coordinator.state(group) is State.EMPTY and not self.store.committed(group):
            self.deliveries.drop(group)
            self.coordinator.delete(group)


def _notify(coordinator: Coordinator, group: str, member: str, listener: Listener) -> None:
    """Send a returning member its assignment and revocations. If it has neither yet, the next generation does."""
    found = coordinator.assignment(group, member)
    if found.revoking:
        listener(Revoke(group, member, found.generation, found.revoking))
    if found.partitions or found.revoking or coordinator.state(group) is not State.PREPARING:
        listener(Assigned(group, member, found.generation, found.partitions))
