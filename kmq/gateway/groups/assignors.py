"""Assignors: which member gets which partition. range, roundrobin, sticky and cooperative-sticky, as pure functions.

    assign("range", {"a": {"orders"}, "b": {"orders"}}, {"orders": 3}, {})    → {"a": [orders/0, orders/1], "b":
    [orders/2]}

Invariants  Every partition of a subscribed topic has exactly one owner, which subscribes to the topic.
            The result depends only on the arguments' values, not on the order of a dict or a set.
            roundrobin and the sticky ones: members of equal subscriptions differ by at most one partition.
            The sticky ones leave the most even loads that the subscriptions allow: no partition can be moved, directly
            or along a chain of members, from a member to another with at least two fewer. (A search along all
            such chains that finds nothing proves it.)
            With equal subscriptions no assignment that is as even moves fewer partitions than the sticky ones do. With
            different subscriptions a partition moves only where that makes loads more even.
Bound       The sticky ones count the steps of their searches, to BUDGET in all: a quarter of a second. Above it the
            result is complete, but less even. Only thousands of partitions and hundreds of different subscriptions
            reach it.
Not covered Racks; weights of partitions.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import cycle

from kmq.wire.requests import TopicPartition

# --- sticky ----------------------------------------------------------------------------------------------------------

BUDGET = 1_000_000

Assignments = dict[str, list[TopicPartition]]


def assign_sticky(
    subscribers: Mapping[str, frozenset[str]],
    members_of: Mapping[str, list[str]],
    partitions_of: Mapping[str, int],
    prior: Mapping[str, Collection[TopicPartition]],
) -> Assignments:
    """Return the assignments. `members_of`: topic → its subscribers, for topics with partitions and subscribers."""
    plan: Assignments = {}
    free = {TopicPartition(topic, n): None for topic in members_of for n in range(partitions_of[topic])}
    for member, topics in subscribers.items():
        plan[member] = [p for p in sorted(prior.get(member, ())) if p in free and p.topic in topics]
        for partition in plan[member]:
            del free[partition]
    if len(set(subscribers.values())) <= 1:
        return _level(plan, list(free))
    home = {partition: member for member in plan for partition in plan[member]}
    _fill(plan, list(free), members_of)
    return _Chains(plan, home, subscribers, members_of).shorten()


def _level(plan: Assignments, free: list[TopicPartition]) -> Assignments:
    """Level loads when all members subscribe to all topics. The remainder goes to the members with most partitions."""
    if not plan:
        return plan
    share, extra = divmod(sum(map(len, plan.values())) + len(free), len(plan))
    for member in sorted(plan, key=lambda member: -len(plan[member])):  # sorted is stable: then by place
        quota = share + (extra > 0)
        extra -= 1
        free += plan[member][quota:]
        del plan[member][quota:]
    _fill(plan, sorted(free), {})
    return {member: sorted(partitions) for member, partitions in plan.items()}


def _fill(plan: Assignments, free: list[TopicPartition], members_of: Mapping[str, list[str]]) -> None:
    """Give each free partition to the least loaded of its topic's subscribers. Topics with few subscribers first."""
    place = {member: number for number, member in enumerate(plan)}
    free.sort(key=lambda partition: (len(members_of.get(partition.topic, plan)), partition))
    heaps: dict[str, list[tuple[int, int, str]]] = {}  # by topic: load when pushed, place, member
    for partition in free:
        topic = partition.topic if members_of else ""
        if topic not in heaps:
            heaps[topic] = [(len(plan[member]), place[member], member) for member in members_of.get(topic, plan)]
            heapify(heaps[topic])
        heap = heaps[topic]
        load, number, member = heappop(heap)
        while load != len(plan[member]):  # it has more now, through another topic
            heappush(heap, (len(plan[member]), number, member))
            load, number, member = heappop(heap)
        plan[member].append(partition)
        heappush(heap, (load + 1, number, member))


class _Held:
    """One member's partitions of one topic: `home` were its own before, `guests` were not."""

    __slots__ = ("guests", "home")

    def __init__(self) -> None:
        self.home: list[TopicPartition] = []
        self.guests: list[TopicPartition] = []

    @property
    def next(self) -> list[TopicPartition]:
        """Return the partitions to move from here: guests first, because they cost no move."""
        return self.guests or self.home


class _Chains:
    """Moves partitions along chains of members, until no chain makes loads more even."""

    def __init__(
        self,
        plan: Assignments,
        home: Mapping[TopicPartition, str],
        subscribers: Mapping[str, frozenset[str]],
        members_of: Mapping[str, list[str]],
    ) -> None:
        self._home, self._subscribers, self._members_of = home, subscribers, members_of
        self._load = {member: len(partitions) for member, partitions in plan.items()}
        self._held: dict[str, dict[str, _Held]] = {member: {} for member in plan}
        for member, partitions in plan.items():
            for partition in sorted(partitions, reverse=True):
                self._put(member, partition)
        self._steps = BUDGET

    def shorten(self) -> Assignments:
        """Shorten the longest loads first, until a pass changes nothing. Then return guests where loads stay even."""
        self._give_directly()
        changed = True
        while changed and self._steps > 0:
            changed = False
            for member in sorted(self._load, key=lambda member: -self._load[member]):
                while self._hand_on(member):
                    changed = True
        self._bring_home()
        return {
            member: sorted(p for held in topics.values() for p in (*held.home, *held.guests))
            for member, topics in self._held.items()
        }

    def _give_directly(self) -> None:
        """Move partitions from the most loaded members to the least loaded ones, while that evens loads.

        Chains would find the same moves by one search for each; here a move costs one step in a heap.
        """
        for giver in sorted(self._load, key=lambda member: -self._load[member]):
            receivers = [(load, member) for member, load in self._load.items() if load <= self._load[giver] - 2]
            heapify(receivers)
            sources = {member: self._sources(giver, member) for _, member in receivers}
            while receivers and receivers[0][0] <= self._load[giver] - 2 and self._steps > 0:
                load, receiver = receivers[0]
                source = next(sources[receiver], None)
                if source is None:
                    heappop(receivers)
                    continue
                self._put(receiver, source.pop())
                self._load[giver] -= 1
                self._load[receiver] += 1
                heapreplace(receivers, (load + 1, receiver))

    def _sources(self, giver: str, receiver: str) -> Iterator[list[TopicPartition]]:
        """Yield lists with a partition that `giver` can pass to `receiver`, as long as there is one."""
        for topic, held in self._held[giver].items():
            self._steps -= 1
            if topic in self._subscribers[receiver]:
                while held.next:
                    yield held.next

    def _hand_on(self, giver: str) -> bool:
        """Find the cheapest chain from `giver` to a member with at least two fewer, and move partitions along it."""
        limit = self._load[giver] - 2
        came: dict[str, tuple[str, str]] = {giver: ("", "")}  # member → its giver, and of which topic
        done, free, paid = set[str](), set[str](), set[str]()  # members; topics whose subscribers are reached
        queue = deque([giver])
        while queue and self._steps > 0:
            member = queue.popleft()
            if member in done:
                continue
            done.add(member)
            if self._load[member] <= limit:
                self._carry_out(giver, member, came)
                return True
            for topic, held in self._held[member].items():
                if topic in free or not held.next or (topic in paid and not held.guests):
                    continue
                (free if held.guests else paid).add(topic)
                self._steps -= len(self._members_of[topic])
                for other in self._members_of[topic]:
                    if other not in done and (held.guests or other not in came):
                        came[other] = member, topic
                        (queue.appendleft if held.guests else queue.append)(other)
        return False

    def _carry_out(self, giver: str, last: str, came: Mapping[str, tuple[str, str]]) -> None:
        """Move as many as make the two ends even, at most as many as each link of the chain has."""
        links: list[tuple[str, str, str]] = []
        member = last
        while member != giver:
            before, topic = came[member]
            links.append((before, topic, member))
            member = before
        count = min(len(self._held[before][topic].next) for before, topic, _ in links)
        count = min(count, (self._load[giver] - self._load[last]) // 2)
        for before, topic, after in links:
            source = self._held[before][topic].next
            for _ in range(count):
                self._put(after, source.pop())
        self._load[giver] -= count
        self._load[last] += count

    def _put(self, member: str, partition: TopicPartition) -> None:
        held = self._held[member].setdefault(partition.topic, _Held())
        (held.home if self._home.get(partition) == member else held.guests).append(partition)

    def _bring_home(self) -> None:
        """Return guests to their former owners, as far as the loads stay as even as they are."""
        while self._steps > 0 and any(self._give_back(member, topic) for member, topic in self._away()):
            pass

    def _away(self) -> list[tuple[str, str]]:
        """Return (member, topic) of guests that had another owner before."""
        return [
            (member, topic)
            for member, topics in self._held.items()
            for topic, held in topics.items()
            if any(partition in self._home for partition in held.guests)
        ]

    def _give_back(self, member: str, topic: str) -> bool:
        """Return the guests of `topic` home, one by one. Return True if one went home."""
        guests, any_went = self._held[member][topic].guests, False
        for partition in [partition for partition in guests if partition in self._home]:
            home = self._home[partition]
            way = self._way(home, member) if partition in guests else None
            if way is None:
                continue
            guests.remove(partition)
            self._put(home, partition)
            self._load[member] -= 1
            self._load[home] += 1
            for giver, of_topic, receiver in way:
                if of_topic:
                    self._put(receiver, self._held[giver][of_topic].guests.pop())
                    self._load[giver] -= 1
                    self._load[receiver] += 1
            any_went = True
        return any_went

    def _way(self, start: str, end: str) -> list[tuple[str, str, str]] | None:
        """Find a chain that keeps loads even when `start` gets a partition from `end`: links, or None.

        A link is (giver, topic, receiver): a guest of that topic moves. Topic "": the giver keeps one more and the
        receiver has one less, which is as even if it had just one more.
        """
        came: dict[str, tuple[str, str]] = {start: ("", "")}
        topics = set[str]()  # whose subscribers are reached
        queue = deque([start])
        while queue and end not in came and self._steps > 0:
            giver = queue.popleft()
            reached = [("", other) for other, load in self._load.items() if load == self._load[giver] + 1]
            for topic, held in self._held[giver].items():
                if held.guests and topic not in topics:
                    topics.add(topic)
                    reached += [(topic, other) for other in self._members_of[topic]]
            self._steps -= len(reached) + 1
            for topic, other in reached:
                if other not in came:
                    came[other] = giver, topic
                    queue.append(other)
        if end not in came:
            return None
        links: list[tuple[str, str, str]] = []
        while end != start:
            giver, topic = came[end]
            links.append((giver, topic, end))
            end = giver
        return links


# --- assignors -------------------------------------------------------------------------------------------------------

Topics = Mapping[str, frozenset[str]]  # member → the topics that it subscribes to
Prior = Mapping[str, Collection[TopicPartition]]  # member → its former partitions

COOPERATIVE = "cooperative-sticky"
DEFAULT = COOPERATIVE


def assign(name: str, subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    """Return the assignments by the assignor `name`.

    `subscribers`: member → topics, the preferred member first (the caller sorts them). `partitions_of`: topic → number
    of partitions; a missing topic has none. `prior`: the partitions that each member had, for the sticky ones.
    """
    return ASSIGNORS[name](subscribers, partitions_of, prior)


def _subscribed(subscribers: Topics, partitions_of: Mapping[str, int]) -> dict[str, list[str]]:
    """Return topic → its subscribers, in the order of topics and of members. Topics without partitions are left out."""
    found: dict[str, list[str]] = {topic: [] for topic in sorted(frozenset().union(*subscribers.values()))}
    for member, topics in subscribers.items():
        for topic in topics:
            found[topic].append(member)
    return {topic: members for topic, members in found.items() if partitions_of.get(topic)}


def _range(subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    """By topic, give each member a run of consecutive partitions. The first members get one more."""
    given: Assignments = {member: [] for member in subscribers}
    for topic, members in _subscribed(subscribers, partitions_of).items():
        share, extra = divmod(partitions_of[topic], len(members))
        begin = 0
        for place, member in enumerate(members):
            end = begin + share + (place < extra)
            given[member] += [TopicPartition(topic, number) for number in range(begin, end)]
            begin = end
    return given


def _roundrobin(subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    """Deal all partitions to all members in turn. A member that does not subscribe to the topic is skipped."""
    given: Assignments = {member: [] for member in subscribers}
    turns = cycle(subscribers)
    for topic in _subscribed(subscribers, partitions_of):
        for number in range(partitions_of[topic]):
            member = next(member for member in turns if topic in subscribers[member])
            given[member].append(TopicPartition(topic, number))
    return given


def _sticky(subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    return assign_sticky(subscribers, _subscribed(subscribers, partitions_of), partitions_of, prior)


_Assignor = Callable[[Topics, Mapping[str, int], Prior], Assignments]
ASSIGNORS: dict[str, _Assignor] = {
    "range": _range,
    "roundrobin": _roundrobin,
    "sticky": _sticky,
    COOPERATIVE: _sticky,
}
