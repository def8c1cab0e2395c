"""One consumer group: its alarms, its members, their partitions, and the steps from one generation to the next.

    group.add(member); group.step({"orders": 2}, now)    → events Assigned("etl", "c1", 1, (orders/0, orders/1))

Invariants  1. A partition has at most one owner in a generation: only `Ownership.give` adds owners, only to partitions
            without an owner, and `step`, which calls it, has raised the generation before.
            2. An owner is taken away only by `Ownership.release`: the member said `revoked`, joined again without the
            partition, left, was ended, was replaced under its static name, or the partition is gone. Asking for a
            partition takes nothing away. So a new owner begins only after the old one has stopped, or can no longer
            commit.
            3. A commit is allowed only to the owner, in a generation that is neither older than the one in which it was
            given the partition, nor older than one that it has shown to know, nor newer than the newest.
            4. Everything that a step leaves to be done has a deadline of some member. So a group whose members all
            answer or end becomes stable.
            5. An alarm never rings later than it was set for, and at most once for each `set`.
Kinds       The broker assigns partitions to members of kind `kmq`. Of members of kind `kafka` (protocol.Opaque) one
            leads, and assigns by bytes that only they understand. A group is of one kind while it has members. Its
            steps are the same: each member of kind `kafka` owns one seat, and is asked for it like a partition by an
            eager assignor. A member that has given up its seat has joined again. A member that has it back is in the
            new generation.
Assignor    The assignor that most members prefer, of those that all members offer. Each step that makes a target finds
            it anew. So members can change to another assignor one by one, while each offers both.
Steps       A change of members or topics makes the target stale. `step` raises the generation, makes the target, asks
            owners for what they must give up (Revoke), gives what is free, and tells everyone (Assigned). Another step
            gives partitions that are given up later to their new owners. An eager assignor asks for everything first,
            and makes its target when everything was given up; cooperative-sticky asks only for what moves.
Cost        A sign of life does not touch the alarms. When an alarm rings and the member's deadline has moved, the alarm
            is set anew: one ring, O(log n), in each of the member's timeouts, whatever it does.
Memory      Two entries for each partition of the subscribed topics. At most two for each alarm that is set, and 64.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.assignors import COOPERATIVE, assign
from kmq.gateway.groups.protocol import (
    Assigned,
    Client,
    Ended,
    Event,
    GroupView,
    HandedOut,
    MemberOptions,
    MemberView,
    Partitions,
    Revoke,
    State,
)
from kmq.wire.requests import TopicPartition

# --- alarms ----------------------------------------------------------------------------------------------------------

NEVER = float("inf")


class Alarms:
    """At most one alarm for each key: a group (name, ""), or a member (group, member)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[str, str]]] = []
        self._at: dict[tuple[str, str], float] = {}  # an entry of the heap that differs from this is void

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, key: tuple[str, str], at: float) -> None:
        """Ring for `key` at `at`, or earlier where an earlier alarm is set already."""
        if at >= self._at.get(key, NEVER):
            return
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    def drop(self, key: tuple[str, str]) -> None:
        """Remove the alarm of `key`."""
        self._at.pop(key, None)

    def next(self) -> float:
        """Return when the next alarm rings; NEVER if there is no alarm."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def pop(self, now: float) -> tuple[str, str] | None:
        """Return a key whose alarm rings at `now` or before; None if no alarm does."""
        if self.next() > now:
            return None
        _, key = heappop(self._heap)
        del self._at[key]
        return key


# --- member ----------------------------------------------------------------------------------------------------------


class Member:
    """One member: its options, its partitions, and its deadlines. Times are of the caller's monotonic clock.

    `revoking` is always part of `owned`. `generation`, the highest one that the member has shown to know, never falls.
    `changed` is the last generation that gave it or asked it for something: a member that knows this one is up to date.
    `has_news`: the next generation will be such a one, too.
    """

    __slots__ = (
        "changed",
        "client",
        "generation",
        "handed_out",
        "has_news",
        "id",
        "last_beat",
        "last_poll",
        "options",
        "owned",
        "revoke_by",
        "revoking",
        "sync_by",
        "topics",
    )

    def __init__(self, id: str, client: Client, options: MemberOptions, generation: int, now: float) -> None:
        self.id, self.client, self.options, self.generation = id, client, options, generation
        self.changed, self.has_news = generation, True
        self.topics = frozenset(options.topics)
        self.last_beat = self.last_poll = now
        self.owned: dict[TopicPartition, int] = {}  # → the generation in which it was given
        self.revoking: dict[TopicPartition, int] = {}  # → the generation in which it was asked for
        self.sync_by = self.revoke_by = NEVER
        self.handed_out = b""  # the leader's assignment

    @property
    def size(self) -> int:
        """Return how many opaque bytes are kept for the member."""
        opaque = self.options.opaque
        return opaque.size + len(self.handed_out) if opaque else 0

    @property
    def order(self) -> tuple[str, str]:
        """Return the member's sort key among the others, which does not depend on the order of joins."""
        return self.options.static_name or "", self.id

    def deadline(self) -> float:
        """Return when the member is overdue without another sign of life."""
        return min(
            self.last_beat + self.options.session_s,
            self.last_poll + self.options.max_poll_s,
            self.sync_by,
            self.revoke_by,
        )

    def overdue(self, now: float) -> str:
        """Return the code that ends the member at `now`; "" if it may stay."""
        if now >= self.last_beat + self.options.session_s:
            return "session_timeout"
        if now >= min(self.sync_by, self.revoke_by):
            return "rebalance_timeout"
        return "poll_timeout" if now >= self.last_poll + self.options.max_poll_s else ""

    def ask(self, partitions: Iterable[TopicPartition], generation: int, now: float) -> None:
        """Note that the member must give up `partitions`. Asking again does not prolong the deadline."""
        self.has_news = True
        self.revoking.update(dict.fromkeys(partitions, generation))
        self.revoke_by = min(self.revoke_by, now + self.options.rebalance_s)

    def give(self, partition: TopicPartition, generation: int) -> None:
        self.has_news = True
        self.owned[partition] = generation

    def expect_sync(self, generation: int, now: float) -> None:
        """Wait for the member's sync of a new generation, if it has news for the member.

        Another generation does not prolong the deadline.
        """
        if self.has_news:
            self.changed, self.has_news = generation, False
            self.sync_by = min(self.sync_by, now + self.options.rebalance_s)

    def answer(self, generation: int, now: float) -> None:
        """Note that the member knows `generation`, which may be older than the newest of the group."""
        self.generation = max(self.generation, generation)
        self.sync_by = NEVER if self.generation >= self.changed else now + self.options.rebalance_s

    def lose(self, partition: TopicPartition) -> None:
        """Take the partition away, whether it was asked for or not."""
        del self.owned[partition]
        self.has_news |= self.revoking.pop(partition, None) is None
        if not self.revoking:
            self.revoke_by = NEVER

    def has_answered(self) -> bool:
        """Return True if the member knows its assignment, and has nothing to give up."""
        return not self.has_news and self.generation >= self.changed and not self.revoking

    def assignment(self) -> Partitions:
        """Return what the member may read: partitions that it owns and need not give up. A seat is not one."""
        if self.options.opaque is not None:
            return ()
        return tuple(sorted(self.owned.keys() - self.revoking.keys()))

    def revocation(self) -> Partitions:
        """Return the partitions that the member must give up."""
        return tuple(sorted(self.revoking))

    def view(self) -> MemberView:
        """Return the member as doors show it."""
        return MemberView(
            id=self.id,
            name=self.client.name,
            host=self.client.host,
            static_name=self.options.static_name,
            topics=tuple(sorted(self.topics)),
            partitions=self.assignment(),
            revoking=() if self.options.opaque else self.revocation(),
            opaque=self.options.opaque,
            handed_out=self.handed_out,
        )


# --- ownership -------------------------------------------------------------------------------------------------------

Exists = Callable[[TopicPartition], bool]


class Ownership:
    """Present and planned owners of partitions. `members` is the group's own dict: every owner is in it."""

    __slots__ = ("_members", "has_free", "owners", "revoking", "target")

    def __init__(self, members: dict[str, Member]) -> None:
        self._members = members
        self.owners: dict[TopicPartition, str] = {}
        self.target: dict[TopicPartition, str] = {}  # its planned owner, once it is free
        self.has_free = False  # a partition of the target has no owner
        self.revoking: set[str] = set()  # members that were asked to give something up

    def release(self, member: Member, partitions: Iterable[TopicPartition]) -> None:
        """Take `partitions` away from a member that reads them no more, or has ended."""
        for partition in partitions:
            member.lose(partition)
            del self.owners[partition]
            self.has_free |= partition in self.target
        if not member.revoking:
            self.revoking.discard(member.id)

    def drop_gone(self, exists: Exists) -> None:
        """Take away partitions that no longer exist."""
        for partition, owner in list(self.owners.items()):
            if not exists(partition):
                self.release(self._members[owner], [partition])
        self.target = {partition: owner for partition, owner in self.target.items() if exists(partition)}

    def prefer(self, partitions: Iterable[TopicPartition], member: str) -> None:
        """Let the next target prefer `member` for those of `partitions` that are planned for no other member."""
        for partition in partitions:
            self.target.setdefault(partition, member)

    def rename(self, old: str, new: str) -> None:
        """Plan for member `new` the partitions planned for `old`. `old` must own none."""
        for partition, member in self.target.items():
            if member == old:
                self.target[partition] = new
                self.has_free = True

    def clear(self) -> None:
        """Forget all plans: the last member is gone."""
        self.target, self.has_free = {}, False

    def prior(self) -> dict[str, list[TopicPartition]]:
        """Return what each member has as an assignor sees it: partitions planned for it, otherwise those it owns."""
        had = self.owners | {p: member for p, member in self.target.items() if member in self._members}
        prior: dict[str, list[TopicPartition]] = {member: [] for member in self._members}
        for partition, member in had.items():
            prior[member].append(partition)
        return prior

    def ask(self, is_all: bool, generation: int, now: float) -> dict[str, list[TopicPartition]]:
        """Ask owners to give up all partitions, or those planned for others. Returns those that were not asked before."""
        requests: dict[str, list[TopicPartition]] = {}
        for partition, owner in self.owners.items():
            if (is_all or self.target.get(partition) != owner) and partition not in self._members[owner].revoking:
                requests.setdefault(owner, []).append(partition)
        for owner, partitions in requests.items():
            self._members[owner].ask(partitions, generation, now)
            self.revoking.add(owner)
        return requests

    def give(self, generation: int) -> None:
        """Give partitions without an owner to the members planned for them, from `generation` on."""
        for partition, member in self.target.items():
            if partition not in self.owners:
                self.owners[partition] = member
                self._members[member].give(partition, generation)
        self.has_free = False


# --- group -----------------------------------------------------------------------------------------------------------


class Group:
    """Changed only by the coordinator. `now` is the caller's monotonic clock, in seconds."""

    __slots__ = (
        "_events",
        "_is_stale",
        "_ownership",
        "active",
        "assignor",
        "counted",
        "counted_size",
        "generation",
        "handed_out_in",
        "has_commits",
        "is_kept",
        "least",
        "left",
        "members",
        "name",
        "not_before",
        "offers",
        "protocol_type",
        "size",
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
        self.offers: Counter[str] = Counter()  # assignor → how many members offer it
        self.protocol_type = ""  # of kind `kafka`; "" if it is of kind `kmq`
        self.size, self.handed_out_in = (
            0,
            -1,
        )  # opaque bytes of all members; the generation in which the leader assigned
        self.topics: Counter[str] = Counter()  # → how many members subscribe to it
        self.counted = self.counted_size = 0  # what the registry has counted of `topics` and `size`
        self.watched: set[str] = set()  # topics whose changes the group must be told
        self.active = self.not_before = now  # last leave or commit; the next step comes no earlier
        self.left = float("-inf")  # when the last member left
        self.has_commits = False
        self.is_kept = False  # its record says that it is stable in this generation (group_records.py)
        self._events = events
        self._ownership = Ownership(self.members)
        self._is_stale = False  # members, subscriptions or partitions have changed since the target was made

    # --- members ------------------------------------------------------------------------------------------------------

    def add(self, member: Member, claims: Iterable[TopicPartition] = ()) -> None:
        """Add a member, which owns nothing yet. `claims`: what it read before, and is given first if it is free."""
        self._enter(member)
        self._ownership.prefer(claims, member.id)
        self._is_stale = True

    def replace(self, old: str, member: Member) -> None:
        """Put `member` in the place of `old`, its former self: it gets the same partitions, in a new generation."""
        former = self.members[old]
        self._remove(former)
        self._events.append(Ended(self.name, old, "fenced"))
        before, now = former.options, member.options
        self._is_stale |= (former.topics, before.assignors, before.opaque) != (member.topics, now.assignors, now.opaque)
        if self.protocol_type:
            self._is_stale |= not self.has_handed_out()  # the leader would still assign to `old`
            member.handed_out = former.handed_out
        self._enter(member)
        self._ownership.rename(old, member.id)

    def take_over(self, members: list[Member], generation: int, assignor: str, is_stable: bool) -> None:
        """Put the members and owners recorded by a former leader into this empty group, in the same generation.

        Without `is_stable` another generation begins, because requests that were being answered then are not recorded.
        """
        for member in members:
            owned, member.owned = member.owned, {}
            self._enter(member)
            member.owned = owned
            for partition in owned:
                self._ownership.owners[partition] = self._ownership.target[partition] = member.id
        self.generation, self.assignor = generation, assignor
        self._is_stale = not is_stable
        self.is_kept = is_stable
        if self.protocol_type and is_stable:
            self.handed_out_in = generation

    def update(self, member: Member, new: Member, owned: Collection[tuple[str, int]] | None) -> None:
        """Give a rejoining member the options of `new`. `owned`: all partitions that it still has, if it names them."""
        if (member.topics, member.options.assignors, member.order) != (new.topics, new.options.assignors, new.order):
            self._is_stale = True
        if new.options.opaque is not None:
            # A leader that joins again wants to assign again, unless it is about to assign anyway.
            wants_to_assign = member.id == self.leader and self.state is State.STABLE
            self._is_stale |= wants_to_assign or member.options.opaque != new.options.opaque
        self._leave_lists(member)
        member.client, member.options, member.topics = new.client, new.options, new.topics
        member.last_beat, member.last_poll = new.last_beat, new.last_poll
        self._enter(member)
        if owned is not None:
            self._ownership.release(member, [partition for partition in member.owned if partition not in owned])

    def end(self, member: Member, code: str, now: float) -> None:
        """Remove a member. `code`: what it is told; "" if it left by itself."""
        self._remove(member)
        self.active = self.left = now
        self._is_stale = bool(self.members)
        if code:
            self._events.append(Ended(self.name, member.id, code))
        if not self.members:
            self._ownership.clear()

    def _enter(self, member: Member) -> None:
        self.members[member.id] = member
        self.offers.update({*member.options.assignors})
        self.size += member.size
        if len(self.members) == 1:
            self.assignor = member.options.assignors[0]
            self._be_of_kind(member)
        self.topics.update(member.topics)
        if member.options.static_name is not None:
            self.statics[member.options.static_name] = member.id

    def _leave_lists(self, member: Member) -> None:
        self.topics -= Counter(member.topics)
        self.offers -= Counter({*member.options.assignors})
        self.size -= member.size
        if member.options.static_name is not None:
            self.statics.pop(member.options.static_name, None)

    def _remove(self, member: Member) -> None:
        self._ownership.release(member, list(member.owned))
        self._leave_lists(member)
        del self.members[member.id]

    def _be_of_kind(self, member: Member) -> None:
        """Take over the kind of the only member. If the kind changes, all ownership ends."""
        protocol_type = member.options.opaque.protocol_type if member.options.opaque else ""
        if protocol_type != self.protocol_type:
            self.protocol_type = protocol_type
            self._ownership.release(member, list(member.owned))
            self._ownership.clear()
            self._is_stale = True

    def has_kind(self, options: MemberOptions, instead_of: Member | None) -> bool:
        """Return True if all members (without the replaced `instead_of`) are of the kind that `options` ask for."""
        others = len(self.members) - (instead_of is not None)
        return not others or self.protocol_type == (options.opaque.protocol_type if options.opaque else "")

    @property
    def leader(self) -> str | None:
        """The member of a group of kind `kafka` that has been there longest."""
        return next(iter(self.members), None) if self.protocol_type else None

    def can_agree(self, assignors: Iterable[str], instead_of: Member | None) -> bool:
        """Return True if all members (without the replaced `instead_of`) offer one of `assignors`."""
        others = len(self.members) - (instead_of is not None)
        former = instead_of.options.assignors if instead_of else ()
        return not others or any(self.offers[name] - (name in former) == others for name in assignors)

    def _vote(self) -> str:
        """Return the assignor that most members prefer, of those that all offer. On a tie the present one wins."""
        shared = {name for name, count in self.offers.items() if count == len(self.members)}
        votes = Counter(next(filter(shared.__contains__, member.options.assignors)) for member in self.members.values())
        return max(votes, key=lambda name: (votes[name], name == self.assignor, name))

    # --- what members say ---------------------------------------------------------------------------------------------

    def member(self, member: str) -> Member:
        """Return the member. Raises RequestRefused (unknown_member)."""
        found = self.members.get(member)
        if found is None:
            raise RequestRefused("unknown_member", f"group {self.name} has no member {member}; join again")
        return found

    def fence(self, member: Member, generation: int | None) -> int:
        """Return the generation of the member's request. None: the door vouches that it is the newest one.

        Raises RequestRefused (fenced) if the member has shown a newer one, or if there is no such generation yet.
        """
        if generation is None:
            return self.generation
        if not member.generation <= generation <= self.generation:
            text = f"generation {generation} is not in force; group {self.name} is in generation {self.generation}"
            raise RequestRefused("fenced", text)
        return generation

    def give_up(self, member: Member, generation: int, now: float) -> None:
        """Take away the partitions that the member was asked for up to `generation`."""
        self._ownership.release(member, [p for p, since in member.revoking.items() if since <= generation])
        if member.revoking:
            member.revoke_by = now + member.options.rebalance_s

    def check_commit(
        self, member: Member, generation: int | None, partitions: Iterable[TopicPartition], exists: Exists
    ) -> None:
        """Raise RequestRefused unless the member may commit all of `partitions` in `generation`.

        A member that does not know the newest generation yet may commit what it owned before and still owns.
        """
        generation = self.fence(member, generation)
        for partition in partitions:
            check_exists(partition, exists)
            if self.protocol_type:
                continue  # only the leader knows the owner
            name = f"{partition.topic}/{partition.partition}"
            since = member.owned.get(partition)
            if since is None:
                raise RequestRefused("fenced", f"{name}: not assigned to {member.id} in generation {self.generation}")
            if generation < since:
                raise RequestRefused("fenced", f"{name}: assigned anew in generation {since}; {generation} is older")

    # --- steps --------------------------------------------------------------------------------------------------------

    def topics_changed(self, exists: Exists) -> None:
        """Note that partitions came or went: those that are gone have no owner from now on."""
        self._ownership.drop_gone(exists)
        self._is_stale = bool(self.members)

    def topics_read(self) -> set[str]:
        """Return the topics that members subscribe to, and those of partitions that they still own."""
        return {*self.topics, *(partition.topic for partition in self._ownership.owners)}

    def is_due(self) -> bool:
        """Return True if `step` would change anything."""
        return self.waits() and (self._is_cooperative() or not self._ownership.revoking)

    def _is_cooperative(self) -> bool:
        return self.assignor == COOPERATIVE and not self.protocol_type

    def waits(self) -> bool:
        """Return True if a step will come: now, or when others have given up what they were asked for."""
        return self._is_stale or self._ownership.has_free

    def step(self, partitions_of: Mapping[str, int], now: float) -> None:
        """Begin a generation: ask for what must be given up, give what is free, tell all members."""
        ownership, self.is_kept = self._ownership, False
        keeps_handed_out = self.has_handed_out() and not self._is_stale
        self.generation = max(self.generation, self.least) + 1
        if keeps_handed_out:
            self.handed_out_in = self.generation
        if self._is_stale:
            self.assignor = self._vote()
        asks_all = self._is_stale and not self._is_cooperative() and bool(ownership.owners)
        if self._is_stale and not asks_all:
            ownership.target = self._target(partitions_of)
            self._is_stale = False
        for name, revoked in sorted(ownership.ask(asks_all, self.generation, now).items()):
            self._events.append(Revoke(self.name, name, self.generation, tuple(sorted(revoked))))
        if not asks_all:
            ownership.give(self.generation)
        for member in self.members.values():
            member.expect_sync(self.generation, now)
            self._events.append(Assigned(self.name, member.id, self.generation, member.assignment()))

    def _target(self, partitions_of: Mapping[str, int]) -> dict[TopicPartition, str]:
        """Return the planned owner of each partition, or in kind `kafka` of each seat."""
        if self.protocol_type:
            return {TopicPartition(member, 0): member for member in self.members}
        preferred = sorted(self.members.values(), key=lambda member: member.order)
        subscribers = {member.id: member.topics for member in preferred}
        wanted = assign(self.assignor, subscribers, partitions_of, self._ownership.prior())
        return {partition: member for member, partitions in wanted.items() for partition in partitions}

    def hand_out(self, assignments: Mapping[str, bytes]) -> None:
        """Store the leader's assignments for the newest generation."""
        self.handed_out_in = self.generation
        for member in self.members.values():
            self.size -= member.size
            member.handed_out = assignments.get(member.id, b"")
            self.size += member.size
            self._events.append(HandedOut(self.name, member.id, self.generation))

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Return what the group waits for (State)."""
        if not self.members:
            return State.EMPTY
        if self._is_stale:
            return State.PREPARING
        has_answers = all(member.has_answered() for member in self.members.values())
        is_complete = not self._ownership.has_free and (not self.protocol_type or self.has_handed_out())
        return State.STABLE if has_answers and is_complete else State.COMPLETING

    def has_handed_out(self) -> bool:
        """Return True if the leader has assigned in the newest generation."""
        return self.handed_out_in == self.generation

    def is_read_by_kafka(self, partition: TopicPartition) -> bool:
        """Return True if the owner of a partition came through the Kafka door. In kind `kafka` it may be any member."""
        owner = self.leader or self._ownership.owners.get(partition)
        return owner is not None and self.members[owner].options.is_kafka

    def owned(self) -> Collection[TopicPartition]:
        """Return the partitions that have an owner. Do not keep the result."""
        return () if self.protocol_type else self._ownership.owners.keys()

    def view(self) -> GroupView:
        """Return the group as doors show it, its members in the order in which assignors prefer them."""
        members = tuple(member.view() for member in sorted(self.members.values(), key=lambda member: member.order))
        return GroupView(
            self.name, self.state, self.generation, self.assignor, members, self.protocol_type, self.leader, self.left
        )


def check_exists(partition: TopicPartition, exists: Exists) -> None:
    """Raise RequestRefused (unknown_partition) unless the partition is there."""
    if not exists(partition):
        name = f"{partition.topic}/{partition.partition}"
        raise RequestRefused("unknown_partition", f"{name}: the topic has no such partition")
