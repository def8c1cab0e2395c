"""All consumer groups of a broker, whatever door their members came through. Calls go in, events come out.

    coordinator = Coordinator(GroupLimits(), "a3f", starts=7)        one for the gateway; no I/O, clock or thread of its
    own coordinator.restore(group, generation, now)                 at the start, for each group with committed offsets
    coordinator.topics_changed({"orders": 8}, now)              all topics with their partitions, before the first join
    member = coordinator.join(group, None, Client("etl", "10.0.0.7"), MemberOptions(("orders",)), now)
    due = coordinator.tick(now)                                 after every batch of calls, and at `due` at the latest
    for event in coordinator.take_events(): …                   Revoke, Assigned, Ended, Forgotten: send them, in order

What a door does with a member
    after a join        awaits the member's first Assigned (after the next tick, at most a second later in large groups)
    Revoke(partitions)  asks the member to stop reading them and to commit; `revoked` with this generation when it says
                        so
    Assigned(partitions) tells the member; `sync` when the member knows (on a connection of lines: when it is written),
                        but not before it has answered every Revoke of an older generation
    an HTTP request     `revoked(…, generation as the member gives it)`: a member that shows the newest generation has
                        seen its assignment, and reads nothing else. Then the request itself. A fetch is
                        `beat(…, polled=True)`
    a commit            `check_commit`, then it is stored, then `committed`
    Kafka's protocol    JoinGroup is `join`, then `revoked` if the member says that it has stopped reading what was
                        revoked. The reply waits until no step `is_due`, and names no leader, so that no client assigns.
                        SyncGroup is `sync`. A heartbeat of a generation before `changed` gets REBALANCE_IN_PROGRESS
`generation` may be None where the door knows that the member knows the newest one.

Owner       The gateway's event loop; no call may interrupt another one.
Invariant   No partition of a group has two owners in one generation, over all lives of the gateway. Within one life see
            kmq/gateway/groups/group.py. Each life of the gateway has generations of its own: `starts` counts lives,
            durably, and life n begins above n * GENERATIONS (20,000). A group that used more continues above the
            highest generation in the records of its offsets (`restore`) or in the memory of its members (Resume). When
            a group is forgotten or deleted, later groups begin above its generation.
            In a shard lives are numbered by epoch and start (`least_starts`), so those of two brokers never meet.
            A call that raises RequestRefused has changed nothing. At a limit a new member is refused, and existing
            members stay. Each group can have `own_members` members, whatever other groups do. Only groups without
            members and commits are different: they hold nothing, so the longest unused one makes room.
Crash       Nothing is kept here. In a shard the caller keeps members (`take_changes`, `restore_members`). Elsewhere
            members join again with their old id and generation, and get the partitions that they say they had
            (Resume.owned). Until then they are unknown members, and their commits are refused.
            `restore` gets the highest generation in the records of the group's offsets.
Memory      Bounded by GroupLimits: about 1 KiB for a member, 200 bytes for each topic in its subscription, 1.5 KiB for
            a group, 200 to 650 bytes for an assigned partition. Events are kept until they are taken.
Cost        A sign of life is O(1). An idle member costs one alarm in each of its session timeouts (group.py), and
            alarms of members ring together, at most twice a second. A group of n members rebalances at most once in n
            milliseconds (at most a second), however many join and leave. One `tick` does about WORK steps, or one
            rebalance: then other groups, and requests, have their turn.
Not covered A caller that does not count its starts: two kills with no commit between them then give generations twice.
            A group with more than GENERATIONS in one life that committed in none of the last UNSEEN (1,000) of them, of
            which no member returns. More than LIVES (4) starts in one epoch of a shard, without a commit of any group
            in the last of them before another broker leads. Permissions to join. An attempt that arrives after the
            member of a later attempt has left: it becomes a member for one session, although no client reads for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.group import Alarms, Group, Member, check_exists
from kmq.gateway.groups.protocol import (
    SHARED,
    Assignment,
    Client,
    Event,
    Forgotten,
    GroupLimits,
    GroupView,
    MemberOptions,
    Resume,
    State,
    check_name,
    check_options,
    check_resume,
)
from kmq.wire.requests import TopicPartition

# --- registry --------------------------------------------------------------------------------------------------------
# All groups by name: room for them, which groups watch which topic, and when each of them needs attention.
# Each group with members that is due, each group without members, and each member has an alarm. It rings no later than
# the time at which something happens to the group or member.

TOGETHER_S = 0.5  # alarms of members within this time ring as one
PACE_S = 0.001  # a group rebalances at most once in this time for each member…
MAX_PACE_S = 1.0  # …but need not wait longer than this, however many there are


class Registry:
    """The coordinator's groups. `events`: for the doors, in order. New groups begin above `least_generation`."""

    def __init__(self, limits: GroupLimits, events: list[Event], least_generation: int) -> None:
        self.limits, self.events = limits, events
        self.groups: dict[str, Group] = {}
        self.alarms = Alarms()
        self.partitions_of: dict[str, int] = {}
        self._watchers: dict[str, set[str]] = {}  # topic → groups that subscribe to it, or own a partition of it
        self._unused: dict[str, None] = {}  # groups without members and commits, the longest unused first
        # Of all groups: members, topics in their subscriptions, opaque bytes.
        self._members = self._topics = self._opaque = 0
        self._least_generation = least_generation
        self.changes: dict[str, None] = {}  # groups whose record must be written again

    # --- room ---------------------------------------------------------------------------------------------------------

    def find(self, group: str, member: str) -> tuple[Group, Member]:
        """Return the group and the member. Raises RequestRefused (unknown_member)."""
        found = self.groups.get(group)
        if found is None:
            raise RequestRefused("unknown_member", f"group {group} has no members; join again")
        return found, found.member(member)

    def check_group(self, group: str) -> None:
        """Raise RequestRefused (too_many_groups) unless the group is there or there is room for it."""
        if group not in self.groups and len(self.groups) >= self.limits.groups and not self._unused:
            raise RequestRefused("too_many_groups", f"{self.limits.groups} groups are known already; delete some")

    def check_member(self, group: Group | None) -> None:
        """Raise RequestRefused (too_many_members) unless one more may join."""
        count = len(group.members) if group else 0
        if count >= self.limits.members:
            raise RequestRefused("too_many_members", f"the group has {count} members already")
        if self._members >= self.limits.all_members and count >= self.limits.own_members:
            raise RequestRefused("too_many_members", f"all groups together have {self._members} members already")

    def check_topics(self, topics: Collection[str], topics_before: int) -> None:
        """Raise RequestRefused (subscription_too_large) if a member that had so many topics may not have `topics`."""
        total = self._topics - topics_before + len(topics)
        if len(topics) > max(self.limits.own_topics, topics_before) and total > self.limits.all_topics:
            text = (
                f"topics: all members together subscribe to {self._topics} already; {self.limits.own_topics} are free"
            )
            raise RequestRefused("subscription_too_large", text)

    def check_opaque(self, nbytes: int, nbytes_before: int) -> None:
        """Raise RequestRefused (subscription_too_large) if members that had so many bytes may not have `nbytes`."""
        if self._opaque - nbytes_before + nbytes > self.limits.all_opaque:
            text = f"metadata: all members together have {self._opaque} bytes already"
            raise RequestRefused("subscription_too_large", text)

    def check_partitions(self, group: Group | None, topics: Iterable[str]) -> None:
        """Raise RequestRefused (subscription_too_large) if new topics make the group larger than one rebalance may be."""
        subscribed = group.topics if group else {}
        new = {topic for topic in topics if topic not in subscribed and self.partitions_of.get(topic)}
        count = sum(self.partitions_of.get(topic, 0) for topic in new.union(subscribed)) if new else 0
        if count > self.limits.partitions:
            text = f"topics: {count} partitions in all; at most {self.limits.partitions} for a group"
            raise RequestRefused("subscription_too_large", text)

    def exists(self, partition: TopicPartition) -> bool:
        """Return True if there is such a partition."""
        return 0 <= partition.partition < self.partitions_of.get(partition.topic, 0)

    # --- changes ------------------------------------------------------------------------------------------------------

    def make(self, name: str, now: float) -> Group:
        """Return the group, and create it if needed. Raises RequestRefused (too_many_groups)."""
        found = self.groups.get(name)
        if found is None:
            self.check_group(name)
            if len(self.groups) >= self.limits.groups:
                self.forget(self.groups[next(iter(self._unused))])
            found = self.put(name, now)
        return found

    def put(self, name: str, now: float) -> Group:
        """Create a group, even above the limit."""
        found = self.groups[name] = Group(name, self._least_generation, now, self.events)
        self._unused[name] = None
        return found

    def forget(self, group: Group) -> None:
        """Forget a group without members. Later groups begin above its generation."""
        self._least_generation = max(self._least_generation, group.generation, group.least)
        del self.groups[group.name]
        self._unused.pop(group.name, None)
        self.alarms.drop((group.name, ""))
        self.events.append(Forgotten(group.name))

    def end(self, group: Group, member: Member, code: str, now: float) -> None:
        """End a member; see Group.end."""
        group.end(member, code, now)
        self.alarms.drop((group.name, member.id))
        self.changed(group, -1)
        if not group.members:
            self.changes[group.name] = None

    def settled(self, group: Group) -> None:
        """Note that members have answered. Once all have, the record of the group must say so."""
        if not group.is_kept and group.state is State.STABLE:
            group.is_kept = True
            self.changes[group.name] = None

    def changed(self, group: Group, members: int = 0) -> None:
        """Note that the group's topics may have changed, and its number of members by `members`."""
        for topic in group.topics.keys() - group.watched:
            self._watchers.setdefault(topic, set()).add(group.name)
            group.watched.add(topic)
        if not group.members:
            self._watch_only(group, set())
        self._members += members
        topics = group.topics.total()
        self._topics += topics - group.counted
        self._opaque += group.size - group.counted_size
        group.counted, group.counted_size = topics, group.size
        if group.members or group.has_commits:
            self._unused.pop(group.name, None)
        else:
            self._unused[group.name] = None
        self.wake(group)

    def _watch_only(self, group: Group, topics: set[str]) -> None:
        for topic in group.watched - topics:
            self._watchers[topic].discard(group.name)
            if not self._watchers[topic]:
                del self._watchers[topic]
        group.watched &= topics

    def watchers(self, topics: Iterable[str]) -> list[Group]:
        """Return the groups that subscribe to any of `topics`, or still read it, sorted by name."""
        names = {name for topic in topics for name in self._watchers.get(topic, ())}
        return [self.groups[name] for name in sorted(names)]

    # --- alarms -------------------------------------------------------------------------------------------------------

    def wake(self, group: Group) -> None:
        """Set the alarm of a group that may have become due, or empty."""
        if not group.members:
            self.alarms.set((group.name, ""), group.active + self.limits.retention_s)
        elif group.is_due():
            self.alarms.set((group.name, ""), group.not_before)

    def watch(self, group: Group, member: Member) -> None:
        """Set the alarm of a member whose deadline may have come nearer.

        Alarms close to one another ring as one, early. A member that gave a sign of life meanwhile gets another alarm.
        """
        self.alarms.set((group.name, member.id), member.deadline() // TOGETHER_S * TOGETHER_S)

    def ring(self, group: Group, now: float) -> int:
        """Do what is due for a group whose alarm has rung. Returns the amount of work: members and partitions."""
        work = 0
        if not group.members:
            if now >= group.active + self.limits.retention_s:
                self.forget(group)
                return work
        elif group.is_due() and now >= group.not_before:
            group.step(self.partitions_of, now)
            self.changes[group.name] = None
            self.settled(group)
            group.not_before = now + min(MAX_PACE_S, PACE_S * len(group.members))
            self._watch_only(group, group.topics_read())
            for member in group.members.values():
                self.watch(group, member)
                work += 1 + len(member.owned)
        self.wake(group)
        return work

    def ring_member(self, group: Group, member: Member, now: float) -> None:
        """End a member whose deadline has passed, or set its alarm anew."""
        code = member.overdue(now)
        if code:
            self.end(group, member, code, now)
        elif member.deadline() < now + TOGETHER_S:  # it rang early, and no sign of life came meanwhile
            self.alarms.set((group.name, member.id), member.deadline())
        else:
            self.watch(group, member)


# --- coordinator -----------------------------------------------------------------------------------------------------

GENERATIONS = 20_000  # of a group in one life: 32 bits are enough for 100,000 lives
LIVES = 4  # of the gateway in one epoch of a shard with numbers of their own, even if no group commits in them
EPOCH_LIVES = 10**6  # the same for numbers that need not fit a generation's 32 bits: lives never meet
UNSEEN = 1_000  # generations that a former life may have begun after the last one that left a trace
WORK = 1_000  # alarms, members told and partitions given in one tick: a few milliseconds
_NOTHING = Resume()


def least_starts(highest: int, epoch: int) -> int:
    """Return the least number of former lives, according to records. `highest`: the highest of their generations.

    In a shard (`epoch` above 0) other brokers count their lives in their own directories. So each epoch has its share
    of the numbers, and the count continues above the last life in which a group has committed.
    """
    life = highest // GENERATIONS
    return max(epoch * LIVES, life + 1) if epoch else life


class Coordinator:
    """In all calls `now` is in seconds, of one monotonic clock."""

    def __init__(self, limits: GroupLimits | None = None, life: str = "", starts: int = 0) -> None:
        """`life`: a text for ids that no former life of the gateway had. `starts`: the number of former lives."""
        self._limits, self._life = limits or GroupLimits(), life
        self._events: list[Event] = []
        self._registry = Registry(self._limits, self._events, starts * GENERATIONS)
        self._ids = 0

    # --- members ------------------------------------------------------------------------------------------------------

    def join(
        self,
        group: str,
        member: str | None,
        client: Client,
        options: MemberOptions,
        now: float,
        resume: Resume = _NOTHING,
    ) -> str:
        """Make the caller a member, or change what a member asks for. Returns the member's id.

        `member`: None for a new one; an id that the caller was given, also by a former life of the gateway; SHARED; or
        a name that it chose. A member that asks for what it has already causes no rebalance.
        Raises RequestRefused: bad_name, bad_topic, bad_timeout, bad_request, unknown_assignor, assignor_differs,
        group_kind, fenced (a newer member has its static name, or there was a later attempt of its run),
        subscription_too_large, too_many_groups, too_many_members.
        """
        found = self._registry.groups.get(group)
        existing = found.members.get(member) if found and member else None
        if existing and options.keeps_topics:
            options = options._replace(topics=tuple(sorted(existing.topics.union(options.topics))))
        self._check_join(group, member, options, resume)
        if existing:
            _check_attempt(existing, options)
        holder = _holder(found, member, options, resume.takes_name)
        if holder and found:
            _check_attempt(found.members[holder], options)
        if existing is None and holder is None:
            self._registry.check_member(found)
        self._registry.check_topics(options.topics, len(existing.topics) if existing else 0)
        self._registry.check_opaque(options.opaque.size if options.opaque else 0, existing.size if existing else 0)
        self._registry.check_partitions(found, options.topics)
        found = self._registry.make(group, now)
        client = Client(client.name[: self._limits.name_bytes], client.host[: self._limits.name_bytes])
        id = member or self.new_id(options.static_name or client.name, found.members)
        new = Member(id, client, options, found.generation, now)
        count = len(found.members)
        if existing:
            found.update(existing, new, resume.owned)
        elif holder:
            self._registry.alarms.drop((group, holder))
            found.replace(holder, new)
        else:
            claims = (TopicPartition(*partition) for partition in resume.owned or ())
            found.add(new, filter(self._registry.exists, claims))
            if resume.generation > found.generation:  # of a former life: no member of this life can know it
                found.least = max(found.least, resume.generation + UNSEEN)
        self._registry.changed(found, len(found.members) - count)
        self._registry.watch(found, found.members[id])
        return id

    def _check_join(self, group: str, member: str | None, options: MemberOptions, resume: Resume) -> None:
        check_name("group", group, self._limits)
        if member is not None:
            check_name("member", member, self._limits)
        check_options(options, self._limits)
        check_resume(resume, self._limits)
        self._registry.check_group(group)

    def new_id(self, stem: str, taken: Collection[str] = ()) -> str:
        """Return an id that was never given before: the name where it is valid in an id, the life, a number.

        `taken`: ids that members have chosen for themselves.
        """
        stem = "".join(char for char in stem if char.isascii() and char.isprintable() and char != " ") or "member"
        while True:
            self._ids += 1
            tail = f"-{self._life}{self._ids}"
            id = stem[: max(0, self._limits.name_bytes - len(tail))] + tail
            if id not in taken:
                return id

    def beat(self, group: str, member: str, generation: int | None, now: float, polled: bool = False) -> None:
        """Note a sign of life; `polled`: the member asked for records. Raises RequestRefused: unknown_member, fenced."""
        found, entry = self._registry.find(group, member)
        found.fence(entry, generation)
        entry.last_beat = now
        if polled:
            entry.last_poll = now

    def sync(self, group: str, member: str, generation: int | None, now: float) -> None:
        """Note that the member knows its assignment of `generation`. Counts as a beat, and raises what `beat` raises."""
        found, entry = self._registry.find(group, member)
        entry.answer(found.fence(entry, generation), now)
        entry.last_beat = now
        self._registry.watch(found, entry)
        self._registry.settled(found)

    def hand_out(self, group: str, member: str, generation: int, assignments: Mapping[str, bytes]) -> None:
        """Store the assignments made by the leader of a group of kind `kafka`, if it leads in the newest generation.

        Raises RequestRefused: unknown_member, fenced, subscription_too_large.
        """
        found, entry = self._registry.find(group, member)
        found.fence(entry, generation)
        if member != found.leader or generation != found.generation or found.waits():
            return  # another member assigns, or the leader will assign later
        given = {id: assignments.get(id, b"") for id in found.members}
        if max(map(len, given.values())) > self._limits.opaque:
            text = f"assignments: at most {self._limits.opaque} bytes for a member"
            raise RequestRefused("subscription_too_large", text)
        before = sum(len(each.handed_out) for each in found.members.values())
        self._registry.check_opaque(sum(map(len, given.values())), before)
        found.hand_out(given)
        self._registry.changed(found)
        self._registry.settled(found)

    def revoked(self, group: str, member: str, generation: int | None, now: float) -> None:
        """Note that the member has stopped reading what was revoked up to `generation`. Counts as `sync`."""
        found, entry = self._registry.find(group, member)
        found.give_up(entry, found.fence(entry, generation), now)
        self.sync(group, member, generation, now)
        self._registry.wake(found)

    def leave(self, group: str, member: str, now: float) -> None:
        """End a member at once, without an event for it. Raises RequestRefused: unknown_member."""
        found, entry = self._registry.find(group, member)
        self._registry.end(found, entry, "", now)

    # --- commits ------------------------------------------------------------------------------------------------------

    def check_commit(
        self, group: str, member: str | None, generation: int | None, partitions: Iterable[tuple[str, int]], now: float
    ) -> None:
        """Return if all of `partitions` may be committed, else raise RequestRefused and allow none. Counts as a beat.

        `member` None, or SHARED if there is no such member: allowed while the group has no members, and only in its
        last generation if the caller names one, because members may have come and gone meanwhile. Generation 0 means
        that the caller never was a member, so it names none.
        Raises: unknown_member, fenced (an old generation, or not the member's partition), unknown_partition,
        bad_name, too_many_groups.
        """
        wanted = [TopicPartition(*partition) for partition in partitions]
        found = self._registry.groups.get(group)
        if member is None or (member == SHARED and not (found and SHARED in found.members)):
            check_name("group", group, self._limits)
            self._registry.check_group(group)
            if found and found.members:
                text = f"group {group} has members; only they may commit"
                raise RequestRefused("unknown_member", text)
            last = found.generation if found else 0
            if generation and generation != last:
                text = f"generation {generation} is not in force; group {group} is in generation {last}"
                raise RequestRefused("fenced", text)
            for partition in wanted:
                check_exists(partition, self._registry.exists)
            self._registry.changed(self._registry.make(group, now))
            return
        found, entry = self._registry.find(group, member)
        found.check_commit(entry, generation, wanted, self._registry.exists)
        entry.last_beat = now

    def committed(self, group: str, now: float) -> None:
        """Note that offsets of the group are stored, after `check_commit`. From now on the group is remembered."""
        found = self._registry.groups.get(group) or self._registry.put(group, now)
        found.has_commits, found.active = True, now
        self._registry.changed(found)

    def restore(self, group: str, generation: int, now: float, idle_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Restore a group that has committed offsets, before the first join. It is never refused.

        `generation`: the highest in its records; the group continues UNSEEN above it. `idle_s`: the age of its last
        commit. `wait_s`: delay the first rebalance, so that all returning members take part in it.
        """
        found = self._registry.groups.get(group) or self._registry.put(group, now)
        found.least = max(found.least, generation + UNSEEN)
        found.has_commits, found.active, found.not_before = True, now - idle_s, now + wait_s
        self._registry.changed(found)

    def restore_members(self, group: str, take_over: Callable[[Group], None], now: float) -> None:
        """Restore the members that a group had under the shard's former leader, before the first join.

        Their generation stays; the next one is above those of this life, as after `restore`. Their sessions begin now.
        """
        registry = self._registry
        found = registry.groups.get(group) or registry.put(group, now)
        take_over(found)
        found.least = max(found.least, found.generation + UNSEEN)
        found.not_before = now
        owned, named = {*found.owned()}, found.topics
        there = {TopicPartition(topic, n) for topic in named for n in range(registry.partitions_of.get(topic, 0))}
        if not found.protocol_type and owned != there:  # topics were added, deleted or extended meanwhile
            found.topics_changed(registry.exists)
        registry.changed(found, len(found.members))
        for member in found.members.values():
            registry.watch(found, member)

    def take_changes(self) -> list[Group]:
        """Return the groups whose record must be written again, since the last call."""
        registry = self._registry
        changed = [registry.groups.get(name) or Group(name, 0, 0.0, []) for name in registry.changes]
        registry.changes.clear()
        return changed

    # --- topics, time, events -----------------------------------------------------------------------------------------

    def topics_changed(self, partitions_of: Mapping[str, int], now: float, again: Iterable[str] = ()) -> None:
        """Replace all topics and their numbers of partitions. `again`: names that were deleted and declared anew.

        A partition that is gone has no owner from now on. The next rebalance assigns new partitions.
        """
        registry, reborn = self._registry, set(again)
        before = registry.partitions_of
        names = before.keys() | partitions_of.keys()
        changed = {name for name in names if before.get(name, 0) != partitions_of.get(name, 0)} | reborn
        registry.partitions_of = dict(partitions_of)
        for found in registry.watchers(changed):
            found.topics_changed(lambda partition: partition.topic not in reborn and registry.exists(partition))
            registry.wake(found)

    def tick(self, now: float) -> float:
        """Do what is due. Returns the latest time for the next call (`inf`: never); not after `now` if more is due."""
        registry, work = self._registry, 0
        while work < WORK and (key := registry.alarms.pop(now)) is not None:
            work += 1
            found = registry.groups.get(key[0])
            member = found.members.get(key[1]) if found else None
            if found and member:
                registry.ring_member(found, member, now)
            elif found and not key[1]:
                work += registry.ring(found, now)
        return registry.alarms.next()

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in the order to send them."""
        events = self._events[:]
        self._events.clear()
        return events

    # --- views --------------------------------------------------------------------------------------------------------

    def generation(self, group: str, member: str | None) -> int | None:
        """Return the newest generation of a member's group; None if it is no member."""
        found = self._registry.groups.get(group)
        return found.generation if found and member in found.members else None

    def options(self, group: str, member: str) -> MemberOptions | None:
        """Return what a member asks for; None if it is no member."""
        found = self._registry.groups.get(group)
        return found.members[member].options if found and member in found.members else None

    def protocol_type(self, group: str) -> str:
        """Return the protocol type of a group of kind `kafka`; "" if the broker assigns or there are no members."""
        found = self._registry.groups.get(group)
        return found.protocol_type if found and found.members else ""

    def static_member(self, group: str, static_name: str) -> str | None:
        """Return the id of the member that has a static name."""
        found = self._registry.groups.get(group)
        return found.statics.get(static_name) if found else None

    def assignment(self, group: str, member: str) -> Assignment:
        """Return the newest generation and what the member may read in it. Raises RequestRefused: unknown_member."""
        found, entry = self._registry.find(group, member)
        return Assignment(
            generation=found.generation,
            partitions=entry.assignment(),
            changed=entry.changed,
            revoking=entry.revocation(),
            is_due=found.waits(),
            protocol=found.assignor,
            leader=found.leader,
            handed_out=entry.handed_out if found.has_handed_out() else None,
        )

    def groups(self) -> list[str]:
        """Return the names of all groups, sorted."""
        return sorted(self._registry.groups)

    def describe(self, group: str) -> GroupView | None:
        """Return the group as doors show it; None if there is no such group (its state is `dead`)."""
        found = self._registry.groups.get(group)
        return found.view() if found else None

    def read_by(self, group: str) -> tuple[int, Collection[TopicPartition]]:
        """Return how many members a group has, and the partitions they own. Cheaper than `describe`."""
        found = self._registry.groups.get(group)
        return (len(found.members), found.owned()) if found else (0, ())

    def is_read_by_kafka(self, group: str, partition: tuple[str, int]) -> bool:
        """Return True if a member that came through the Kafka door owns a partition."""
        found = self._registry.groups.get(group)
        return found is not None and found.is_read_by_kafka(TopicPartition(*partition))

    def subscribers(self, topic: str) -> list[str]:
        """Return the names of the groups whose members read a topic. The topic need not exist yet."""
        return [group.name for group in self._registry.watchers([topic])]

    def state(self, group: str) -> State:
        """Return the group's state; DEAD if there is no group of this name."""
        found = self._registry.groups.get(group)
        return found.state if found else State.DEAD

    def check_empty(self, group: str) -> None:
        """Raise RequestRefused (group_not_empty) while the group has members: only they may move its offsets."""
        found = self._registry.groups.get(group)
        if found and found.members:
            count = len(found.members)
            raise RequestRefused("group_not_empty", f"group {group} has {count} members; end them first")

    def delete(self, group: str) -> None:
        """Forget a group without members. Raises RequestRefused: unknown_group, group_not_empty."""
        found = self._registry.groups.get(group)
        if found is None:
            raise RequestRefused("unknown_group", f"group {group}: not found")
        self.check_empty(group)
        self._registry.forget(found)


def _check_attempt(member: Member, options: MemberOptions) -> None:
    """Raise RequestRefused (fenced) if a later attempt of the same run has joined: the client has given up this one."""
    last, this = member.options.attempt, options.attempt
    if last and this and this.is_before(last):
        text = f"member {member.id}: attempt {last.number} of this run has joined; {this.number} came late"
        raise RequestRefused("fenced", text)


def _holder(group: Group | None, member: str | None, options: MemberOptions, takes_name: bool) -> str | None:
    """Return the member that a new member replaces under its static name, if there is one.

    Raises RequestRefused: fenced if a newer member has the name already; group_kind and assignor_differs if the other
    members are of another kind, or offer no common assignor.
    """
    if group is None:
        return None
    holder = group.statics.get(options.static_name) if options.static_name is not None else None
    takes_name &= member not in group.members
    if holder is not None and member is not None and holder != member and not takes_name:
        raise RequestRefused("fenced", f"member {options.static_name} of group {group.name}: a newer one has this name")
    replaced = group.members.get(holder or member or "")
    if not group.has_kind(options, replaced):
        text = f"group {group.name}: its members are of kind {'kafka' if group.protocol_type else 'kmq'}"
        raise RequestRefused("group_kind", text)
    if not group.can_agree(options.assignors, replaced):
        text = f"assignor: the members of group {group.name} have agreed on {group.assignor}"
        raise RequestRefused("assignor_differs", text)
    return None if holder == member else holder
