"""All groups by name: room for them, who watches which topic, and when each of them needs attention.

Invariants  Each group with members that is due, each group without members, and each member has an alarm no later than
            the time at which something happens to it.
            A full bound refuses a newcomer and touches nobody who is there. The one exception are groups without
            members and without commits: nothing of them is remembered, so the longest unused one makes room.
"""

from collections.abc import Collection, Iterable, Mapping

from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.alarms import Alarms
from kmq.gateway.groups.events import Event, Forgotten, TopicPartition
from kmq.gateway.groups.group import Group
from kmq.gateway.groups.member import Member
from kmq.gateway.groups.terms import Limits

PACE_S = 0.001  # a group rebalances at most once in so long for each of its members…
MAX_PACE_S = 1.0  # …and once in so long, however many there are


class Registry:
    """What the coordinator knows. `events`: what the doors are to send, in order. Groups begin above a generation."""

    def __init__(self, limits: Limits, events: list[Event], least_generation: int) -> None:
        self.limits, self.events = limits, events
        self.groups: dict[str, Group] = {}
        self.alarms = Alarms()
        self.partitions_of: dict[str, int] = {}
        self._watchers: dict[str, set[str]] = {}  # topic → groups that subscribe to it, or own a partition of it
        self._unused: dict[str, None] = {}  # groups without members and commits, the longest unused first
        self._members = self._topics = 0  # of all groups: members, topics in their subscriptions
        self._least_generation = least_generation

    # --- room ---------------------------------------------------------------------------------------------------------

    def known(self, group: str, member: str) -> tuple[Group, Member]:
        """Return the group and the member. Raises RequestRefused (unknown_member)."""
        found = self.groups.get(group)
        if found is None:
            raise RequestRefused("unknown_member", f"group {group} has no members; join again")
        return found, found.known(member)

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
        """Return the group, which is made if it is not there. Raises RequestRefused (too_many_groups)."""
        found = self.groups.get(name)
        if found is None:
            self.check_group(name)
            if len(self.groups) >= self.limits.groups:
                self.forget(self.groups[next(iter(self._unused))])
            found = self.put(name, now)
        return found

    def put(self, name: str, now: float) -> Group:
        """Make a group, whatever the bound."""
        found = self.groups[name] = Group(name, self._least_generation, now, self.events)
        self._unused[name] = None
        return found

    def forget(self, group: Group) -> None:
        """Forget a group without members. Groups to come begin above its generation."""
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

    def changed(self, group: Group, members: int = 0) -> None:
        """Note that the group may have other topics, and so many members more."""
        for topic in group.topics.keys() - group.watched:
            self._watchers.setdefault(topic, set()).add(group.name)
            group.watched.add(topic)
        if not group.members:
            self._watch_only(group, set())
        self._members += members
        topics = group.topics.total()
        self._topics += topics - group.counted
        group.counted = topics
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
        """Return the groups that subscribe to any of `topics`, or read it still, sorted by name."""
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
        """Set the alarm of a member whose deadline may have come nearer."""
        self.alarms.set((group.name, member.id), member.deadline())

    def ring(self, group: Group, now: float) -> int:
        """Do what is due for a group whose alarm has rung. Returns how much that was: members and partitions."""
        work = 0
        if not group.members:
            if now >= group.active + self.limits.retention_s:
                self.forget(group)
                return work
        elif group.is_due() and now >= group.not_before:
            group.step(self.partitions_of, now)
            group.not_before = now + min(MAX_PACE_S, PACE_S * len(group.members))
            self._watch_only(group, group.topics_read())
            for member in group.members.values():
                self.watch(group, member)
                work += 1 + len(member.owned)
        self.wake(group)
        return work

    def ring_member(self, group: Group, member: Member, now: float) -> None:
        """End a member whose deadline has passed; else set its alarm anew."""
        code = member.overdue(now)
        if code:
            self.end(group, member, code, now)
        else:
            self.watch(group, member)


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> set[str]:
    """Return the topics whose numbers of partitions differ."""
    return {topic for topic in before.keys() | after.keys() if before.get(topic, 0) != after.get(topic, 0)}
