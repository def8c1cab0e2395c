"""Which offsets are read: ranges, splits, limits, and options."""

import json

import pytest

from kmq.errors import ConfigError
from kmq.spark import plan
from kmq.spark.brokers import Directory
from kmq.spark.options import EARLIEST, LATEST, Options
from kmq.spark.plan import DataLossError, Range

A, B, WAL = ("b1", "a", 0), ("b1", "b", 0), ("b1", "__append", 0)


def spans(found):
    return [(each.key, each.start, each.end) for each in found]


def no_cuts(key, start, end, nbytes):
    return []


def ten_bytes_each(key, start, end, nbytes):
    return list(range(start + nbytes // 10, end, nbytes // 10))


def test_ranges_lie_between_starts_and_ends():
    bounds = {A: (0, 50), B: (10, 20)}
    assert spans(plan.ranges({A: 5, B: 10}, {A: 30, B: 10}, bounds, True)) == [(A, 5, 30)]


def test_a_partition_that_is_new_begins_with_its_first_record():
    assert spans(plan.ranges({}, {A: 3, WAL: 3}, {A: (0, 9), WAL: (1, 9)}, True)) == [(WAL, 1, 3), (A, 0, 3)]


@pytest.mark.parametrize(
    ("start", "end", "bounds", "says", "left"),
    [
        ({A: 5}, {A: 30}, {A: (10, 50)}, "offsets 5 to 9 are gone: retention", [(A, 10, 30)]),
        ({A: 5}, {A: 30}, {A: (40, 50)}, "offsets 5 to 29 are gone", []),
        ({A: 5}, {A: 30}, {}, "gone with their partition", []),
        ({A: 5}, {A: 30}, {A: (0, 20)}, "the log ends before 20", [(A, 5, 20)]),
        ({A: 30}, {A: 5}, {A: (0, 5)}, "went back from 30 to 5", []),
    ],
)
def test_what_is_gone_is_an_error_or_left_out(start, end, bounds, says, left):
    with pytest.raises(DataLossError, match=says) as caught:
        plan.ranges(start, end, bounds, True)
    assert "b1 a/0" in str(caught.value) and "failOnDataLoss" in str(caught.value)
    assert spans(plan.ranges(start, end, bounds, False)) == left


def test_tasks_cover_each_offset_once_however_they_are_split():
    for least in (0, 1, 3, 7, 1000):
        pieces = plan.split([Range(A, 5, 30_000), Range(B, 0, 3)], no_cuts, least)
        covered = sorted((piece.key, n) for piece in pieces for n in range(piece.start, piece.end))
        assert covered == sorted([(A, n) for n in range(5, 30_000)] + [(B, n) for n in range(3)])
        assert len(pieces) >= min(least, 1000)


def test_large_ranges_are_cut_by_bytes():
    def every(key, start, end, nbytes):
        assert nbytes == plan.SPLIT_BYTES
        return [10_000, 15_000]

    assert [(p.start, p.end) for p in plan.split([Range(A, 0, 20_000)], every)] == [
        (0, 10_000), (10_000, 15_000), (15_000, 20_000),
    ]  # fmt: skip


def test_offsets_of_a_batch_are_shared_in_proportion():
    reached = plan.limited({A: 0, B: 100}, {A: 900, B: 200}, 100, 0, no_cuts)
    assert reached == {A: 90, B: 110}


def test_a_limit_smaller_than_the_number_of_partitions_goes_on_all_the_same():
    start, ends = {A: 0, B: 0}, {A: 5, B: 5}
    turns = 0
    while start != ends:
        after = plan.limited(start, ends, 1, 0, no_cuts)
        assert sum(after.values()) == sum(start.values()) + 1
        start, turns = after, turns + 1
    assert turns == 10


def test_bytes_of_a_batch_are_shared_evenly():
    assert plan.limited({A: 0, B: 0}, {A: 90, B: 5}, 0, 200, ten_bytes_each) == {A: 10, B: 5}


def test_both_limits_hold():
    assert plan.limited({A: 0}, {A: 90}, 5, 200, ten_bytes_each) == {A: 5}
    assert plan.limited({A: 0}, {A: 90}, 50, 200, ten_bytes_each) == {A: 20}


def test_no_limit_is_no_limit():
    assert plan.limited({A: 0}, {A: 90}, 0, 0, no_cuts) == {A: 90}


def test_offsets_survive_json():
    offsets, ids = {A: 3, WAL: 7, ("b2", "a", 12): 0}, {"b1": "x", "b2": "y"}
    assert plan.from_json(json.loads(json.dumps(plan.to_json(offsets, ids)))) == (offsets, ids)


# --- options ---------------------------------------------------------------------------------------------------------------


def test_defaults():
    options = Options({"path": "d", "subscribe": "a, b"})
    assert (options.brokers, options.topics, options.starting, options.fail_on_data_loss) == (
        ["d"],
        ["a", "b"],
        None,
        True,
    )


def test_names_are_as_spark_gives_them_and_numbers_may_have_units():
    options = Options(
        {"kmq.Bootstrap.SERVERS": "h:1,h:2", "SUBSCRIBE": "a", "MaxBytesPerTrigger": "64m", "failondataloss": "False"}
    )
    assert (options.servers, options.max_bytes, options.fail_on_data_loss) == (["h:1", "h:2"], 64 << 20, False)


def test_offsets_by_topic_are_for_every_broker_and_by_broker_for_each():
    given = {"kmq.bootstrap.servers": "h:1,h:2", "subscribe": "a"}
    table = {"a": {"0": 3}}
    assert Options(given | {"startingOffsets": json.dumps(table)}).starting == {"h:1": table, "h:2": table}
    assert Options(given | {"startingOffsets": json.dumps({"h:2": table})}).starting == {"h:2": table}
    assert Options(given | {"startingOffsets": "earliest"}).starting == EARLIEST
    assert Options(given | {"endingOffsets": "latest"}).ending == LATEST


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subscribe": "a"}, "path"),
        ({"path": "d", "kmq.bootstrap.servers": "h:1", "subscribe": "a"}, "one of them"),
        ({"path": "d,d", "subscribe": "a"}, "twice"),
        ({"path": "d"}, "subscribe, subscribePattern, assign"),
        ({"path": "d", "subscribe": "a", "assign": "{}"}, "one of subscribe"),
        ({"path": "d", "subscribePattern": "("}, "subscribePattern"),
        ({"path": "d", "assign": "[1]"}, "assign"),
        ({"path": "d", "assign": '{"a": ["0"]}'}, "assign"),
        ({"path": "d", "subscribe": "a", "startingOffsets": "first"}, "startingOffsets"),
        ({"path": "d", "subscribe": "a", "startingOffsets": '{"a": 3}'}, "startingOffsets"),
        ({"path": "d", "subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "startingOffsets"),
        ({"path": "d", "subscribe": "a", "endingOffsets": "earliest"}, "endingOffsets"),
        ({"path": "d", "subscribe": "a", "startingOffsets": "latest", "startingTimestamp": "1"}, "one of them"),
        ({"path": "d", "subscribe": "a", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"path": "d", "subscribe": "a", "maxBytesPerTrigger": "many"}, "maxBytesPerTrigger"),
        ({"path": "d", "subscribe": "a", "failOnDataLoss": "yes"}, "failOnDataLoss"),
        ({"path": "d", "subscribe": "a", "kmq.bootstrap.server": "h:1"}, "kmq.bootstrap.server: is none"),
        ({"path": "/nowhere/*", "subscribe": "a"}, "matches no data directory"),
    ],
)
def test_a_wrong_option_is_named(given, says):
    with pytest.raises(ConfigError, match=says):
        Options(given)


def test_a_path_that_is_no_data_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no data directory"):
        Directory(str(tmp_path)).topics()


def test_a_pattern_takes_kmqs_own_topics_only_if_it_names_them():
    everything, own = (Options({"path": "d", "subscribePattern": each}) for each in (".*", "__.*"))
    assert everything.wants("a", 0) and not everything.wants("__append", 0) and not everything.wants("__x", 1)
    assert own.wants("__append", 0) and not own.wants("a", 0)


def test_assigned_partitions_are_all_that_is_wanted():
    options = Options({"path": "d", "assign": '{"a": [0, 2], "b": [1]}'})
    assert [options.wants("a", n) for n in range(3)] == [True, False, True]
    assert not options.wants("c", 0) and options.topics == ["a", "b"]
