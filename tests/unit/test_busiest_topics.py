"""Which topics a scrape names: a stable set of the largest, and the rest as one number that never goes back."""

import pytest

from kmq.gateway.core import busiest_topics
from kmq.gateway.core.busiest_topics import OTHER, BusiestTopics


class Offsets:
    """How many messages topics have, each in one partition."""

    def __init__(self, **totals):
        self.totals = totals

    def declared(self, name):
        return 1, 1

    def of(self, name, number):
        if self.totals[name] is None:
            raise FileNotFoundError(name)
        return 0, self.totals[name]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(busiest_topics.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def rates(monkeypatch, clock):
    offsets = Offsets(a=100, b=50, c=10, d=0)
    monkeypatch.setattr(busiest_topics.topics, "names", lambda data: sorted(offsets.totals))
    made = BusiestTopics("nowhere", 2)
    made.bounds = offsets  # type: ignore[assignment]
    return made, offsets.totals


def test_the_first_look_names_the_topics_with_the_most_messages(rates):
    made, _ = rates
    assert made.counts() == [("a", 100), ("b", 50), (OTHER, 0)]
    assert made.named() == ["a", "b"] and made.rank(["d", "c", "b"], 2) == ["b", "c"]


def test_a_topic_with_more_messages_takes_the_place_of_the_one_with_the_fewest(rates, clock):
    made, totals = rates
    made.named()
    totals["a"] += 10
    totals["c"] += 8
    clock.now += 6
    assert made.counts() == [("a", 110), ("c", 18), (OTHER, 0)]
    totals["b"] += 9  # not a quarter more than c had
    clock.now += 6
    assert made.counts() == [("a", 110), ("c", 18), (OTHER, 9)]
    totals["b"] += 2
    clock.now += 6
    assert made.counts() == [("a", 110), ("b", 61), (OTHER, 9)]


def test_what_was_more_than_an_hour_ago_does_not_count(rates, clock):
    made, totals = rates
    made.named()
    totals["c"] += 1000
    for _ in range(13):
        clock.now += 301
        made.named()
    assert made.named() == ["a", "c"]
    totals["b"] += 1
    totals["d"] += 2
    clock.now += 301
    assert made.named() == ["b", "d"]


def test_a_deleted_topic_leaves_and_one_named_other_is_never_named(rates, clock):
    made, totals = rates
    made.named()
    del totals["a"]
    totals[OTHER] = 5000
    clock.now += 6
    assert made.counts() == [("b", 50), ("c", 10), (OTHER, 5000)]
    totals["b"] = None  # deleted between the two looks at it
    clock.now += 6
    assert made.counts() == [("b", 50), ("c", 10), (OTHER, 5000)]


def test_a_look_that_takes_too_long_goes_on_with_the_next(rates, clock):
    made, totals = rates
    read = []

    def of(name, number):
        read.append(name)
        clock.now += 0.45
        return 0, totals[name]

    made.bounds.of = of
    assert made.counts() == [(OTHER, 0)] and read == ["a", "b", "c"]
    clock.now += 6
    assert made.counts() == [("a", 100), ("b", 50), (OTHER, 0)] and read == ["a", "b", "c", "d"]
