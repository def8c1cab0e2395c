"""One group: its members, its generations, and the steps from one to the next.

Invariants  1. A partition has at most one owner in a generation, and a new owner only after the old one has stopped or
            is fenced: kmq/gateway/groups/ownership.py, because `step` alone gives, and raises the generation first.
            2. A commit is allowed only to the owner, in a generation that is neither older than the one in which it was
            given the partition, nor older than one that it has shown to know, nor newer than the newest.
            3. What a step leaves to be done is waited for under a deadline of some member. So a group whose members
            all answer or end becomes stable.
Steps       A change of members or topics makes the target stale. `step` raises the generation, makes the target, asks
            owners for what they must give up (Revoke), gives what is free, and tells everyone (Assigned). What is given
            up later is given to its new owner by another step. An eager assignor asks for everything first, and makes
            its target when everything was given up; cooperative-sticky asks only for what moves.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.assignors import COOPERATIVE, assign
from kmq.gateway.groups.events import Assigned, Ended, Event, GroupView, Revoke, State, TopicPartition
from kmq.gateway.groups.member import Member
from kmq.gateway.groups.ownership import Exists, Ownership


class Group:
    """Changed by the coordinator alone. `now` is the caller's monotonic clock, in seconds."""

    __slots__ = (
        "_events",
        "_is_stale",
        "_ownership",
        "active",
        "assignor",
        "counted",
        "generation",
        "has_commits",
        "least",
        "left",
        "members",
        "name",
        "not_before",
        "statics",
        "topics",
        "watched",
    )

    def __init__(self, name: str, generation: int, now: float, events: list[Event]) -> None:
        self.name = name
        self.generation = self.least = generation  # the next generation is above both
        self.assignor = ""
        self.members: dict[str, Member] = {}
        self.statics: dict[str, str] = {}  # static name → member
        self.topics: Counter[str] = Counter()  # → how many members subscribe to it
        self.counted = 0  # what the registry has counted of `topics`
        self.watched: set[str] = set()  # topics of whose changes the group is told
        self.active = self.not_before = now  # last leave or commit; the next step comes no earlier
        self.left = float("-inf")  # when the last member left
        self.has_commits = False
        self._events = events
        self._ownership = Ownership(self.members)
        self._is_stale = False  # the target does not know the present members, subscriptions and partitions

    # --- members ------------------------------------------------------------------------------------------------------

    def add(self, member: Member, claims: Iterable[TopicPartition] = ()) -> None:
        """Add a member, which owns nothing yet. `claims`: what it read before; it gets that first, where it is free."""
        self._enter(member)
        self._ownership.prefer(claims, member.id)
        self._is_stale = True

    def replace(self, old: str, member: Member) -> None:
        """Put `member` in the place of `old`, its former self: it gets the same partitions, in a new generation."""
        former = self.members[old]
        self._remove(former)
        self._events.append(Ended(self.name, old, "fenced"))
        self._is_stale |= former.topics != member.topics or self.assignor != member.terms.assignor
        self._enter(member)
        self._ownership.rename(old, member.id)

    def update(self, member: Member, new: Member, owned: Collection[tuple[str, int]] | None) -> None:
        """Let a member that joins again ask for what `new` asks for. `owned`: all that it has not given up, if said."""
        if (member.topics, member.terms.assignor, member.place) != (new.topics, new.terms.assignor, new.place):
            self._is_stale = True
        self._leave_lists(member)
        member.client, member.terms, member.topics = new.client, new.terms, new.topics
        member.beaten, member.polled = new.beaten, new.polled
        self._enter(member)
        if owned is not None:
            self._ownership.release(member, [partition for partition in member.owned if partition not in owned])

    def end(self, member: Member, code: str, now: float) -> None:
        """Take a member out. `code`: what it is told; "" if it left by itself."""
        self._remove(member)
        self.active = self.left = now
        self._is_stale = bool(self.members)
        if code:
            self._events.append(Ended(self.name, member.id, code))
        if not self.members:
            self._ownership.clear()

    def _enter(self, member: Member) -> None:
        self.members[member.id] = member
        self.assignor = member.terms.assignor
        self.topics.update(member.topics)
        if member.terms.static_name is not None:
            self.statics[member.terms.static_name] = member.id

    def _leave_lists(self, member: Member) -> None:
        self.topics -= Counter(member.topics)
        if member.terms.static_name is not None:
            self.statics.pop(member.terms.static_name, None)

    def _remove(self, member: Member) -> None:
        self._ownership.release(member, list(member.owned))
        self._leave_lists(member)
        del self.members[member.id]

    # --- what members say ---------------------------------------------------------------------------------------------

    def known(self, member: str) -> Member:
        """Return the member. Raises RequestRefused (unknown_member)."""
        found = self.members.get(member)
        if found is None:
            raise RequestRefused("unknown_member", f"group {self.name} has no member {member}; join again")
        return found

    def fence(self, member: Member, generation: int | None) -> int:
        """Return the generation that the member speaks in; None: the door vouches that it is the newest one.

        Raises RequestRefused (fenced) if the member has shown a newer one, or if there is no such generation yet.
        """
        if generation is None:
            return self.generation
        if not member.generation <= generation <= self.generation:
            text = f"generation {generation} is not in force; group {self.name} is in generation {self.generation}"
            raise RequestRefused("fenced", text)
        return generation

    def give_up(self, member: Member, generation: int, now: float) -> None:
        """Take away what the member was asked for up to `generation`."""
        self._ownership.release(member, [p for p, asked in member.revoking.items() if asked <= generation])
        if member.revoking:
            member.revoke_by = now + member.terms.rebalance_s

    def check_commit(
        self, member: Member, generation: int | None, partitions: Iterable[TopicPartition], exists: Exists
    ) -> None:
        """Raise RequestRefused unless the member may commit all of `partitions` in `generation`.

        A member that has not yet heard of the newest generation may commit what it owned before and owns still.
        """
        generation = self.fence(member, generation)
        for partition in partitions:
            check_exists(partition, exists)
            name = f"{partition.topic}/{partition.partition}"
            since = member.owned.get(partition)
            if since is None:
                raise RequestRefused("fenced", f"{name}: not assigned to {member.id} in generation {self.generation}")
            if generation < since:
                raise RequestRefused("fenced", f"{name}: assigned anew in generation {since}; {generation} is older")

    # --- steps --------------------------------------------------------------------------------------------------------

    def topics_changed(self, exists: Exists) -> None:
        """Partitions came or went: those that are gone have no owner from now on."""
        self._ownership.drop_gone(exists)
        self._is_stale = bool(self.members)

    def topics_read(self) -> set[str]:
        """Return the topics that members subscribe to, and those of which they own a partition still."""
        return {*self.topics, *(partition.topic for partition in self._ownership.owners)}

    def is_due(self) -> bool:
        """Return True if `step` would change anything."""
        can_step = self.assignor == COOPERATIVE or not self._ownership.revoking
        return can_step and (self._is_stale or self._ownership.has_free)

    def step(self, partitions_of: Mapping[str, int], now: float) -> None:
        """Begin a generation: ask for what has to be given up, give what is free, tell all members."""
        ownership = self._ownership
        self.generation = max(self.generation, self.least) + 1
        asks_all = self._is_stale and self.assignor != COOPERATIVE and bool(ownership.owners)
        if self._is_stale and not asks_all:
            subscribers = {member.id: member.topics for member in sorted(self.members.values(), key=_place)}
            wanted = assign(self.assignor, subscribers, partitions_of, ownership.prior())
            ownership.target = {partition: member for member, partitions in wanted.items() for partition in partitions}
            self._is_stale = False
        for name, asked in sorted(ownership.ask(asks_all, self.generation, now).items()):
            self._events.append(Revoke(self.name, name, self.generation, tuple(sorted(asked))))
        if not asks_all:
            ownership.give(self.generation)
        for member in self.members.values():
            member.tell(now)
            self._events.append(Assigned(self.name, member.id, self.generation, member.assignment()))

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What the group waits for (State)."""
        if not self.members:
            return State.EMPTY
        if self._is_stale:
            return State.PREPARING
        has_answers = all(member.has_answered(self.generation) for member in self.members.values())
        return State.STABLE if has_answers and not self._ownership.has_free else State.COMPLETING

    def view(self) -> GroupView:
        """Return the group as doors show it, its members in the order in which assignors prefer them."""
        members = tuple(member.view() for member in sorted(self.members.values(), key=_place))
        return GroupView(self.name, self.state, self.generation, self.assignor, members, self.left)


def check_exists(partition: TopicPartition, exists: Exists) -> None:
    """Raise RequestRefused (unknown_partition) unless the partition is there."""
    if not exists(partition):
        name = f"{partition.topic}/{partition.partition}"
        raise RequestRefused("unknown_partition", f"{name}: the topic has no such partition")


def _place(member: Member) -> tuple[str, str]:
    return member.place
