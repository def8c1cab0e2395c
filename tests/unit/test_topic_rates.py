"""Topics by rate, from their files; and which topics a scrape names: a stable set, and the rest as one number."""

import json

import pytest

from kmq.broker import topic_rates
from kmq.broker.topic_rates import OTHER, BusiestTopics, TopicRates
from kmq.log import topics

# --- the busiest of an hour ---


class Offsets:
    """How many messages topics have, each in one partition."""

    def __init__(self, **totals):
        self.totals = totals

    def names(self):
        return sorted(self.totals)

    def offsets(self, name):
        if self.totals[name] is None:
            raise FileNotFoundError(name)
        return [(0, self.totals[name])]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(topic_rates.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def rates(clock):
    offsets = Offsets(a=100, b=50, c=10, d=0)
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

    def offsets(name):
        read.append(name)
        clock.now += 0.45
        return [(0, totals[name])]

    made.bounds.offsets = offsets
    assert made.counts() == [(OTHER, 0)] and read == ["a", "b", "c"]
    clock.now += 6
    assert made.counts() == [("a", 100), ("b", 50), (OTHER, 0)] and read == ["a", "b", "c", "d"]


# --- by rate ---


@pytest.fixture
def data(tmp_path):
    (tmp_path / "topics").mkdir()
    return tmp_path


def swept(found, clock, monkeypatch):
    clock[0] += 2.0
    monkeypatch.setattr("kmq.broker.topic_rates.time.monotonic", lambda: clock[0])
    found.look(1.0)
    return {row["topic"]: row for row in found.rows(100)}


def append(data, topic, count, partition=0):
    directory = data / "topics" / topic / str(partition)
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{0:020}.log", "ab") as file:
        file.write(f"1|1.0|{topic}|1.0||x\n".encode() * count)


def test_topics_are_rated_by_their_files_and_follow_what_comes_and_goes(data, monkeypatch):
    clock, found = [100.0], TopicRates(str(data))
    for name, partitions in (("busy", 2), ("idle", 1)):
        topics.make(str(data), name, topics.Declaration(partitions, 1))
        for partition in range(partitions):
            append(data, name, 5, partition)
    first = swept(found, clock, monkeypatch)
    assert first["busy"]["records"] == 10 and first["busy"]["rate"] is None and found.total == 2
    append(data, "busy", 10)
    append(data, "busy", 30, 1)
    rated = swept(found, clock, monkeypatch)
    assert rated["busy"]["rate"] == 20 and rated["busy"]["bytes_rate"] == 20 * 18 and rated["busy"]["records"] == 50
    assert rated["idle"]["rate"] == 0 and next(iter(rated)) == "busy"
    assert swept(found, clock, monkeypatch)["busy"]["rate"] == 0
    (data / "topics" / "busy").rename(data / "topics" / ".gone")
    assert list(swept(found, clock, monkeypatch)) == ["idle"]


def test_a_sweep_over_many_topics_ends_in_time_and_goes_on_where_it_stopped(data, monkeypatch):
    for number in range(300):
        topics.make(str(data), f"t{number:03}", topics.Declaration(1, 1))
        append(data, f"t{number:03}", 1)
    ticks = iter(range(10_000))
    monkeypatch.setattr("kmq.broker.topic_rates.time.monotonic", lambda: float(next(ticks)))
    found = TopicRates(str(data))
    seen = set()
    for _ in range(300):
        found.look(10.0)
        now = {row["topic"] for row in found.rows(1000)}
        assert 0 < len(now - seen) < 30 or len(now) == 300
        seen |= now
        if len(seen) == 300:
            break
    assert len(seen) == 300 and len(json.dumps(found.rows(20))) < 10_000


def test_records_that_retention_has_deleted_are_not_counted(data, monkeypatch):
    topics.make(str(data), "kept", topics.Declaration(1, 1))
    append(data, "kept", 5)
    directory = data / "topics" / "kept" / "0"
    (directory / f"{0:020}.log").rename(directory / f"{7:020}.log")
    shown = swept(TopicRates(str(data)), [100.0], monkeypatch)
    assert (shown["kept"]["records"], shown["kept"]["bytes"]) == (5, 5 * 18)


def test_no_data_directory_has_no_topics(tmp_path):
    found = TopicRates(str(tmp_path / "none"))
    found.look(1.0)
    assert found.rows(9) == [] and found.total == 0


@pytest.mark.parametrize("name", ["topics", "append"])
def test_what_may_not_be_looked_into_has_no_topics_and_no_error(tmp_path, name):
    """`kmq top` as another user, or before the broker's first start. Root may look into all, so a file stands there."""
    tmp_path.joinpath(name).write_text("")
    rates = TopicRates(str(tmp_path))
    rates.look(1.0)
    assert rates.rows(10) == []
