"""Who gets which partition: range, roundrobin, sticky, cooperative-sticky. Pure functions of what they are given.

    assign(name, subscribers, partitions_of, prior)        each partition of a subscribed topic, once

Invariants  Every partition of a topic that somebody subscribes to has exactly one owner, and that one subscribes to it.
            The result depends on nothing but the arguments' values: not on the order of a dict or a set.
            roundrobin and the sticky ones: members of equal subscriptions differ by at most one partition.
            The sticky ones: see kmq/gateway/groups/sticky.py.
Not covered Racks; weights of partitions.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import cycle

from kmq.gateway.groups.events import TopicPartition
from kmq.gateway.groups.sticky import assign_sticky

Topics = Mapping[str, frozenset[str]]  # member → the topics that it subscribes to
Prior = Mapping[str, Collection[TopicPartition]]  # member → what it had
Assignments = dict[str, list[TopicPartition]]  # member → what it gets; every member has an entry

COOPERATIVE = "cooperative-sticky"
DEFAULT = COOPERATIVE


def assign(name: str, subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    """Return who gets what by the assignor `name`.

    `subscribers`: in the order in which the first of them is preferred (the caller sorts it). `partitions_of`: topic →
    number of partitions; a topic that is missing there has none. `prior`: what each member had, for the sticky ones.
    """
    return ASSIGNORS[name](subscribers, partitions_of, prior)


def _subscribed(subscribers: Topics, partitions_of: Mapping[str, int]) -> dict[str, list[str]]:
    """Return topic → its subscribers, in the order of topics and of members; topics without partitions left out."""
    found: dict[str, list[str]] = {topic: [] for topic in sorted(frozenset().union(*subscribers.values()))}
    for member, topics in subscribers.items():
        for topic in topics:
            found[topic].append(member)
    return {topic: members for topic, members in found.items() if partitions_of.get(topic)}


def _range(subscribers: Topics, partitions_of: Mapping[str, int], prior: Prior) -> Assignments:
    """Topic by topic a run of neighbours for each member; the first members get one more."""
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
    """All partitions in turn to all members in turn; who does not subscribe to the topic is passed over."""
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
