"""Who gets which partition: complete, even, repeatable, and moved as little as can be."""

import itertools
import time

import pytest
from hypothesis import strategies as st
from seeded import examples

from kmq.gateway.groups.assignors import ASSIGNORS, assign
from kmq.gateway.groups.protocol import TopicPartition

TOPICS = "abcd"
STICKY = ("sticky", "cooperative-sticky")


def parts(text):
    """`a0 a1 b0` → partitions."""
    return [TopicPartition(word[0], int(word[1:])) for word in text.split()]


def told(assignments):
    return {member: " ".join(f"{p.topic}{p.partition}" for p in given) for member, given in assignments.items()}


# Bytes are quickly drawn: each says, modulo the choices, which topics a member has, or who had a partition.
one_subscription = st.tuples(st.integers(1, 6), st.integers(1, 15)).map(lambda pair: bytes([pair[1]] * pair[0]))
any_subscriptions = st.binary(min_size=1, max_size=6)


@st.composite
def situations(draw, members=any_subscriptions, largest=6):
    """(subscribers, partitions_of, prior): a prior that names members, topics and partitions that are gone, too."""
    subscribers = {
        f"m{place}": frozenset(topic for bit, topic in enumerate(TOPICS) if byte >> bit & 1)
        for place, byte in enumerate(draw(members))
    }
    partitions_of = {
        topic: byte % (largest + 1) for topic, byte in zip(TOPICS, draw(st.binary(max_size=4)), strict=False)
    }
    everything = [TopicPartition(topic, number) for topic in TOPICS for number in range(largest + 1)]
    names = [*subscribers, "gone", "nobody"]
    prior = {name: [] for name in names[:-1]}
    for partition, byte in zip(everything, draw(st.binary(max_size=len(everything))), strict=False):
        prior.setdefault(names[byte % len(names)], []).append(partition)
    prior.pop("nobody", None)
    return subscribers, partitions_of, prior


def subscribed(subscribers, partitions_of):
    topics = set().union(*subscribers.values())
    return {TopicPartition(topic, n) for topic in topics for n in range(partitions_of.get(topic, 0))}


def moved(assignments, prior, subscribers, partitions_of):
    """How many partitions have an owner that could have kept them, and another now."""
    valid = subscribed(subscribers, partitions_of)
    kept = {p: name for name, given in prior.items() if name in subscribers for p in given}
    now = {p: name for name, given in assignments.items() for p in given}
    return sum(p in valid and p.topic in subscribers[name] and now[p] != name for p, name in kept.items())


def loads(assignments):
    return sorted(len(given) for given in assignments.values())


def least_moves(subscribers, partitions_of, prior):
    """By trying everything: the most even loads, and the fewest moves with which they can be had."""
    partitions = sorted(subscribed(subscribers, partitions_of))
    choices = [[name for name, topics in subscribers.items() if p.topic in topics] for p in partitions]
    best = None
    for owners in itertools.product(*choices):
        given = {name: [] for name in subscribers}
        for partition, owner in zip(partitions, owners, strict=True):
            given[owner].append(partition)
        unevenness = sum(len(g) ** 2 for g in given.values())
        found = unevenness, moved(given, prior, subscribers, partitions_of)
        best = found if best is None else min(best, found)
    return best


@examples(150, situations())
def test_every_partition_has_one_owner_that_subscribes_to_it(situation):
    subscribers, partitions_of, prior = situation
    for name in ASSIGNORS:
        given = assign(name, subscribers, partitions_of, prior)
        assert given.keys() == subscribers.keys()
        everything = [p for mine in given.values() for p in mine]
        assert len(everything) == len(set(everything)) and set(everything) == subscribed(subscribers, partitions_of)
        assert all(p.topic in subscribers[member] for member, mine in given.items() for p in mine)


@examples(100, situations(), st.randoms())
def test_the_same_situation_gives_the_same_assignment_in_whatever_order_it_is_told(situation, rng):
    subscribers, partitions_of, prior = situation

    def shuffled(mapping):
        items = list(mapping.items())
        rng.shuffle(items)
        return dict(items)

    mixed = {name: rng.sample(given, len(given)) for name, given in shuffled(prior).items()}
    for name in ASSIGNORS:
        first = assign(name, subscribers, partitions_of, prior)
        again = assign(name, subscribers, shuffled(partitions_of), mixed)
        assert first == again


@examples(150, situations(one_subscription))
def test_one_subscription_differ_by_at_most_one_partition(situation):
    subscribers, partitions_of, prior = situation
    for name in ("roundrobin", *STICKY):
        found = loads(assign(name, subscribers, partitions_of, prior))
        assert found[-1] - found[0] <= 1
    given = assign("range", subscribers, partitions_of, prior)
    for topic in TOPICS:
        of_topic = sorted(sum(p.topic == topic for p in mine) for mine in given.values())
        assert of_topic[-1] - of_topic[0] <= 1


@examples(150, situations())
def test_sticky_members_of_each_subscription_differ_by_at_most_one_partition(situation):
    subscribers, partitions_of, prior = situation
    given = assign("sticky", subscribers, partitions_of, prior)
    for topics in set(subscribers.values()):
        found = sorted(len(given[member]) for member in subscribers if subscribers[member] == topics)
        assert found[-1] - found[0] <= 1
    for giver, receiver in itertools.permutations(subscribers, 2):  # no partition can simply be handed on
        if len(given[giver]) - len(given[receiver]) >= 2:
            assert not any(p.topic in subscribers[receiver] for p in given[giver])


@examples(150, situations(one_subscription))
def test_sticky_moves_the_fewest_partitions_that_evenness_allows(situation):
    subscribers, partitions_of, prior = situation
    given = assign("sticky", subscribers, partitions_of, prior)
    total = len(subscribed(subscribers, partitions_of))
    share, extra = divmod(total, len(subscribers))
    kept = sorted(
        (sum(p in subscribed(subscribers, partitions_of) for p in prior[member]) for member in subscribers),
        reverse=True,
    )
    fewest = sum(max(0, had - share - (place < extra)) for place, had in enumerate(kept))
    assert moved(given, prior, subscribers, partitions_of) == fewest


@examples(150, situations())
def test_sticky_moves_nothing_where_everything_is_even(situation):
    subscribers, partitions_of, prior = situation
    given = assign("sticky", subscribers, partitions_of, prior)
    assert assign("sticky", subscribers, partitions_of, given) == given
    half = {member: mine[::2] for member, mine in given.items()}  # some have given up, and not got yet
    again = assign("sticky", subscribers, partitions_of, half)
    assert moved(again, half, subscribers, partitions_of) == 0


small = st.binary(min_size=1, max_size=3)


@examples(60, situations(small, largest=2))
def test_sticky_is_as_even_as_anything_that_subscriptions_allow(situation):
    subscribers, partitions_of, prior = situation
    given = assign("sticky", subscribers, partitions_of, prior)
    evenest, fewest = least_moves(subscribers, partitions_of, prior)
    assert sum(len(mine) ** 2 for mine in given.values()) == evenest
    assert moved(given, prior, subscribers, partitions_of) <= fewest + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("range", {"m0": "a0 a1 b0", "m1": "a2 a3 b1", "m2": "a4"}),
        ("roundrobin", {"m0": "a0 a3 b1", "m1": "a1 a4", "m2": "a2 b0"}),
    ],
)
def test_range_and_roundrobin_as_their_names_say(name, expected):
    subscribers = {f"m{i}": frozenset("ab") for i in range(3)}
    assert told(assign(name, subscribers, {"a": 5, "b": 2}, {})) == expected


def test_who_does_not_subscribe_is_passed_over():
    subscribers = {"m0": frozenset("a"), "m1": frozenset("ab"), "m2": frozenset("b")}
    counts = {"a": 3, "b": 3}
    assert told(assign("roundrobin", subscribers, counts, {})) == {"m0": "a0 a2", "m1": "a1 b0 b2", "m2": "b1"}
    assert told(assign("range", subscribers, counts, {})) == {"m0": "a0 a1", "m1": "a2 b0 b1", "m2": "b2"}


def test_a_chain_of_members_makes_loads_even():
    """m0 can only help m1, and only m1 can help m2."""
    subscribers = {"m0": frozenset("a"), "m1": frozenset("ab"), "m2": frozenset("b")}
    prior = {"m0": parts("a0 a1 a2 a3"), "m1": parts("b0 b1"), "m2": []}
    given = assign("sticky", subscribers, {"a": 4, "b": 2}, prior)
    assert loads(given) == [2, 2, 2]
    assert moved(given, prior, subscribers, {"a": 4, "b": 2}) == 4  # two links, two partitions each


def test_guests_go_home_although_others_have_to_pass_theirs_on():
    """Each member holds half of an even assignment: the other halves fit in without moving what was kept."""
    subscribers = {
        "m0": frozenset("a"),
        "m1": frozenset("bc"),
        "m2": frozenset("abc"),
        "m3": frozenset("cd"),
        "m4": frozenset("bd"),
    }
    partitions_of = {"a": 4, "b": 2, "c": 6, "d": 3}
    given = assign("sticky", subscribers, partitions_of, {})
    half = {member: mine[::2] for member, mine in given.items()}
    again = assign("sticky", subscribers, partitions_of, half)
    assert moved(again, half, subscribers, partitions_of) == 0 and loads(again) == loads(given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(ASSIGNORS))
def test_the_largest_group_is_assigned_in_bounded_time(name):
    """10,000 partitions of 200 topics; a member in ten subscribes to something of its own."""
    topics = [f"t{n}" for n in range(200)]
    subscribers = {f"m{n:03}": frozenset(topics[n % 10 :] if n % 10 else topics) for n in range(500)}
    partitions_of = dict.fromkeys(topics, 50)
    given = assign(name, subscribers, partitions_of, {})
    first = next(iter(subscribers))
    begun = time.process_time()
    given = assign(name, subscribers | {"new": frozenset(topics)}, partitions_of, given | {first: []})
    assert sum(map(len, given.values())) == 10_000
    assert time.process_time() - begun < 10.0  # a second where nothing else runs
