"""Which offsets are read: ranges, splits, limits, and options."""

import json

import pytest

from kmq.errors import ConfigError
from kmq.spark.source import ends, plan
from kmq.spark.source.brokers import Directory
from kmq.spark.source.ends import EARLIEST, LATEST, End
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import DataLossError, OffsetSpan, StreamPosition

A, B, WAL = ("b1", "a", 0), ("b1", "b", 0), ("b1", "__append", 0)


def spans(found):
    return [(each.key, each.start, each.end) for each in found]


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
    ],
)
def test_what_is_gone_is_an_error_or_left_out(start, end, bounds, says, left):
    with pytest.raises(DataLossError, match=says) as caught:
        plan.ranges(start, end, bounds, True)
    assert "b1 a/0" in str(caught.value) and "failOnDataLoss" in str(caught.value)
    assert spans(plan.ranges(start, end, bounds, False)) == left


def test_what_is_gone_of_a_range_leaves_a_task_with_less_or_nothing():
    bounds = {A: (10, 20)}
    pieces = [plan.within(piece, bounds) for piece in plan.cut_up(OffsetSpan(A, 0, 30), [5, 15, 25])]
    assert spans(pieces) == [(A, 5, 5), (A, 10, 15), (A, 15, 20), (A, 25, 25)]
    assert [len(piece) for piece in pieces] == [0, 5, 5, 0]


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_a_position_survives_json_and_keeps_the_order_of_its_tasks():
    offsets = {A: 3, WAL: 7, ("b2", "a", 2): 9, ("b2", "a", 12): 0}
    last = {A: (4711, 1_700_000_000_000_123), WAL: (6, 1)}
    position = StreamPosition(
        dict(sorted(offsets.items())), {"b2": "y", "b1": "x"}, last, {A: [1, 2]}, {("b2", "a", 2): 5}, {"b1": [2, 1]}
    )
    again = StreamPosition.of_json(json.loads(json.dumps(position.to_json())))
    assert again == position and list(again.offsets) == sorted(offsets)


def test_a_position_keeps_its_order_under_other_names():
    position = StreamPosition({A: 3, ("b2", "a", 0): 9}, {"b1": "x", "b2": "y"}, {A: (1, 1)}, {}, {}, {"b2": [2]})
    renamed = StreamPosition.of_json(position.to_json()).renamed({"b1": "z1", "b2": "a2"})
    assert list(renamed.offsets) == [("z1", "a", 0), ("a2", "a", 0)]
    assert renamed.identities == {"z1": "x", "a2": "y"} and renamed.last == {("z1", "a", 0): (1, 1)}
    assert renamed.tasks == {"a2": [2]}


def test_numbers_in_the_json_are_the_offsets_alone():
    table = StreamPosition({A: 30, B: 40}, {"b1": "x"}, {A: (7, 7)}, {A: [10, 20]}, {B: 5}).to_json()
    numbers = [each for topics in table.values() for parts in topics.values() if isinstance(parts, dict)
               for each in parts.values() if isinstance(each, int)]  # fmt: skip
    assert sorted(numbers) == [30, 40]


def test_offsets_of_format_1_are_read():
    """As the release before wrote them."""
    text = '{"/data": {"__id": "84cbf0e1aee53a46ed89d86a8d0316b2", "orders": {"0": 20, "1": 80}}}'
    position = StreamPosition.of_json(json.loads(text))
    assert position.offsets == {("/data", "orders", 0): 20, ("/data", "orders", 1): 80}
    assert position.identities == {"/data": "84cbf0e1aee53a46ed89d86a8d0316b2"}
    assert position.cuts is None and not position.last and not position.begins


def test_only_offsets_of_tasks_that_share_need_this_release():
    position = StreamPosition({A: 3}, {"b1": "x"}, {}, {}, {})
    assert position.to_json()["b1"]["__format"] == "2"
    position.tasks = {"b1": [2, 1]}
    assert (position.to_json()["b1"]["__format"], position.to_json()["b1"]["__tasks"]) == ("3", "2 1")


def test_offsets_of_a_later_format_are_refused():
    with pytest.raises(ConfigError, match="newer version of kmq"):
        StreamPosition.of_json({"/data": {"__id": "x", "__format": "4", "orders": {"0": 20}}})


# --- options ---------------------------------------------------------------------------------------------------------------


def test_defaults():
    options = ReadOptions({"path": "d", "subscribe": "a, b"})
    assert (options.brokers, options.topics, options.start.option, options.fail_on_data_loss) == (
        ["d"],
        ["a", "b"],
        "",
        True,
    )


def test_names_are_as_spark_gives_them_and_numbers_may_have_units():
    options = ReadOptions(
        {"kmq.Bootstrap.SERVERS": "h:1,h:2", "SUBSCRIBE": "a", "MaxBytesPerTrigger": "64m", "failondataloss": "False"}
    )
    assert (options.servers, options.max_bytes, options.fail_on_data_loss) == (["h:1", "h:2"], 64 << 20, False)


def test_limits_of_triggers_and_tasks_are_none_without_options():
    options = ReadOptions({"path": "d", "subscribe": "a"})
    assert (options.max_offsets, options.min_offsets, options.max_bytes, options.max_trigger_delay_s) == (0, 0, 0, 900)
    assert (options.min_partitions, options.max_records_per_partition) == (0, 0)
    given = {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "90s", "maxRecordsPerPartition": "7", "minPartitions": "3"}
    options = ReadOptions({"path": "d", "subscribe": "a", "maxBytesPerTrigger": "2 MiB"} | given)
    assert (options.min_offsets, options.max_trigger_delay_s, options.max_bytes) == (5, 90, 2 << 20)
    assert (options.min_partitions, options.max_records_per_partition) == (3, 7)


def test_offsets_by_topic_are_for_every_broker_and_by_broker_for_each():
    given = {"kmq.bootstrap.servers": "h:1,h:2", "subscribe": "a"}
    table = {"a": {"0": 3}}
    assert ReadOptions(given | {"startingOffsets": json.dumps(table)}).start.table == {"h:1": table, "h:2": table}
    assert ReadOptions(given | {"startingOffsets": json.dumps({"h:2": table})}).start.table == {"h:2": table}
    assert ReadOptions(given | {"startingOffsets": "Earliest"}).start.everywhere == EARLIEST
    assert ReadOptions(given | {"endingOffsets": "latest"}).end.everywhere == LATEST


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
        ({"path": "d", "subscribe": "a", "startingOffsets": '{"a": {"x": 3}}'}, "startingOffsets"),
        (
            {"path": "d", "subscribe": "a", "startingOffsets": '{"a": {"0": 1, "0": 2}}'},
            "startingOffsets=.*names '0' twice",
        ),
        ({"path": "d", "subscribe": "a", "startingOffsets": '{"e": {"a": {"0": 3}}}'}, "unknown broker 'e'"),
        ({"path": "d", "subscribe": "a", "endingOffsets": '{"a": {"0": -2}}'}, "endingOffsets=.*: must be latest or"),
        ({"path": "d", "subscribe": "a", "startingTimestamp": "yesterday"}, "startingTimestamp='yesterday': must be"),
        ({"path": "d", "subscribe": "a", "endingTimestamp": "-1"}, "endingTimestamp='-1': must be a whole number"),
        (
            {"path": "d", "subscribe": "a", "startingOffsetsByTimestamp": "earliest"},
            "startingOffsetsByTimestamp='earliest'",
        ),
        (
            {"path": "d", "subscribe": "a", "endingOffsetsByTimestamp": '{"a": {"0": -1}}'},
            "endingOffsetsByTimestamp=.*must be",
        ),
        (
            {"path": "d", "subscribe": "a", "startingOffsetsByTimestampStrategy": "earliest"},
            "startingOffsetsByTimestampStrategy='earliest': must be error or latest",
        ),
        ({"path": "d", "subscribe": ""}, "subscribe='': there is an empty name in it"),
        ({"path": "d", "subscribe": "a, ,b"}, "subscribe='a, ,b': there is an empty name in it"),
        ({"path": "d", "subscribe": "a,b, a"}, "subscribe='a,b, a': names 'a' twice"),
        ({"path": "d", "subscribe": "a.*"}, "subscribe: 'a.*' is no topic name; subscribePattern"),
        ({"path": "d", "subscribe": "a/0"}, "subscribe: 'a/0' is no topic name"),
        ({"path": "d", "subscribePattern": ""}, "subscribePattern='': matches no topic"),
        ({"path": "d", "assign": "{}"}, "assign='{}': names no topic"),
        ({"path": "d", "assign": '{"a": []}'}, "assign: names no partition of 'a'"),
        ({"path": "d", "assign": '{"a": [1, 1]}'}, "assign: names a partition of 'a' twice"),
        ({"path": "d", "assign": '{"a": [1], "a": [2]}'}, "assign=.*names 'a' twice"),
        ({"path": "", "subscribe": "a"}, "path='': there is an empty name in it"),
        ({"path": "d", "paths": '["e", ""]', "subscribe": "a"}, "paths=.*must be a JSON list"),
        ({"path": "d", "topics": "a"}, "unknown reader option topics='a'; did you mean subscribe"),
        ({"path": "d", "subscribe": "a", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"path": "d", "subscribe": "a", "maxOffsetsPerTrigger": "5k"}, "maxOffsetsPerTrigger='5k': must be a whole"),
        ({"path": "d", "subscribe": "a", "maxBytesPerTrigger": "many"}, "maxBytesPerTrigger"),
        ({"path": "d", "subscribe": "a", "maxBytesPerTrigger": "0m"}, "maxBytesPerTrigger='0m': must be over 0"),
        ({"path": "d", "subscribe": "a", "minOffsetsPerTrigger": "-1"}, "minOffsetsPerTrigger"),
        (
            {"path": "d", "subscribe": "a", "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "minOffsetsPerTrigger=9: must be at most maxOffsetsPerTrigger=8",
        ),
        (
            {"path": "d", "subscribe": "a", "minOffsetsPerTrigger": "9", "maxTriggerDelay": "soon"},
            "maxTriggerDelay='soon': expected a whole number with ms, s, m",
        ),
        ({"path": "d", "subscribe": "a", "maxTriggerDelay": "5s"}, "maxTriggerDelay: .* minOffsetsPerTrigger"),
        ({"path": "d", "subscribe": "a", "maxRecordsPerPartition": "0"}, "maxRecordsPerPartition"),
        ({"path": "d", "subscribe": "a", "minPartitions": "x"}, "minPartitions"),
        ({"path": "d", "subscribe": "a", "failOnDataLoss": "yes"}, "failOnDataLoss"),
        (
            {"path": "d", "subscribe": "a", "kmq.bootstrap.server": "h:1"},
            "unknown reader option kmq.bootstrap.server='h:1'; did you mean kmq.bootstrap.servers\\?",
        ),
        (
            {"path": "d", "subscribe": "a", "startingOfsets": "latest"},
            "startingOfsets='latest'; did you mean startingOffsets",
        ),
        ({"path": "d", "subscribe": "a", "token": "geheim"}, "token=…; did you mean kmq.token"),
        ({"path": "d", "kmq.subscribe": "a"}, "kmq.subscribe='a'; did you mean subscribe"),
        ({"path": "d", "subscribe": "a", "xyz": "1"}, "xyz='1'; expected one of path, "),
        ({"path": "d", "subscribe": "a", "includeHeaders": "yes"}, "includeHeaders='yes': must be true or false"),
        ({"path": "/nowhere/*", "subscribe": "a"}, "matches no data directory"),
    ],
)
def test_a_wrong_option_is_named(given, says):
    with pytest.raises(ConfigError, match=says):
        ReadOptions(given)


def test_the_first_of_time_times_and_offsets_wins_as_in_kafkas_connector():
    given = {"path": "d", "subscribe": "a", "startingOffsets": "latest", "endingOffsets": "latest"}
    times = {"startingOffsetsByTimestamp": '{"a": {"0": 5}}', "endingoffsetsbytimestamp": '{"a": {"0": 7}}'}
    options = ReadOptions(given | times)
    assert (options.start.value(("d", "a", 0)), options.start.is_time) == (5, True)
    assert (options.end.value(("d", "a", 0)), options.end.option) == (7, "endingOffsetsByTimestamp")
    options = ReadOptions(given | times | {"STARTINGTIMESTAMP": "9"})
    assert options.start == End("startingTimestamp", everywhere=9, is_time=True)


def test_a_list_of_paths_is_read_as_spark_hands_it_on():
    assert ReadOptions({"paths": '["d", "e,f"]', "subscribe": "a"}).paths == ["d", "e,f"]


def test_options_that_end_a_query_are_refused_in_a_stream():
    for name, value in {"endingOffsets": "latest", "endingTimestamp": "5"}.items():
        with pytest.raises(ConfigError, match=f"{name}='{value}': a stream has no end"):
            ReadOptions({"path": "d", "subscribe": "a", name: value}).check_stream()


# --- where a query begins and ends -----------------------------------------------------------------------------------

HERE = {("b1", "a", 0): (2, 10), ("b1", "a", 1): (0, 5), ("b2", "a", 0): (0, 7)}


def end_of(text, side="starting", name="Offsets"):
    return ends.parse({f"{side}{name}".lower(): text}, side, ["b1", "b2"])


def test_what_offsets_say_is_resolved_for_every_broker_or_for_each():
    found = ends.resolve(end_of('{"a": {"0": 3, "1": -1}}'), HERE, EARLIEST, None)
    assert found == {("b1", "a", 0): 3, ("b1", "a", 1): 5, ("b2", "a", 0): 3}
    each = end_of('{"b1": {"a": {"0": -2, "1": 4}}, "b2": {"a": {"0": -1}}}')
    assert ends.resolve(each, HERE, EARLIEST, None) == {("b1", "a", 0): 2, ("b1", "a", 1): 4, ("b2", "a", 0): 7}
    assert ends.resolve(End(), HERE, LATEST, None) == {key: end for key, (_, end) in HERE.items()}


def test_a_time_found_behind_the_known_end_moves_the_end():
    bounds = dict(HERE)
    found = ends.resolve(
        end_of("5", name="Timestamp"), bounds, EARLIEST, lambda keys, micros: dict.fromkeys(keys, 6 + (micros == 5000))
    )
    assert set(found.values()) == {7} and bounds[("b1", "a", 1)] == (0, 7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": {"0": 1, "1": 1, "2": 1}}', "there is no partition 2 of topic 'a'; it has 0, 1"),
        ('{"a": {"0": 1, "1": 1}, "b": {"0": 1}}', "startingOffsets: b/0 was not asked for"),
        ('{"b2": {"a": {"1": 1}}}', "there is no partition 1 of topic 'a' at b2; it has 0"),
    ],
)
def test_offsets_that_name_what_is_not_there_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        ends.check_named(end_of(text), HERE, lambda topic, partition: topic == "a")


def test_offsets_name_every_partition_that_is_read():
    ends.check_complete(end_of('{"a": {"0": 1, "1": 1}}'), HERE)
    with pytest.raises(ConfigError, match=r"startingOffsets: says nothing of b1 a/1: name every .*; -2 is its first"):
        ends.check_complete(end_of('{"a": {"0": 1}}'), HERE)
    with pytest.raises(ConfigError, match="says nothing of b1 a/0, b1 a/1: name every"):
        ends.check_complete(end_of('{"b2": {"a": {"0": 1}}}'), HERE)


def test_a_start_behind_its_end_is_refused_with_both():
    for low, high in (("5", "4"), ("9", "8")):
        start, end = end_of(low, name="Timestamp"), end_of(high, "ending", "Timestamp")
        with pytest.raises(ConfigError, match=f"startingTimestamp={low} is behind endingTimestamp={high}: b1 a/0"):
            ends.check_order(start, end, dict.fromkeys(HERE, 3), dict.fromkeys(HERE, 3))
    start, end = end_of('{"a": {"0": 3, "1": 4}}'), end_of('{"a": {"0": 3, "1": 2}}', "ending")
    starts, stops = ends.resolve(start, HERE, EARLIEST, None), ends.resolve(end, HERE, LATEST, None)
    with pytest.raises(
        ConfigError, match="startingOffsets=4 is behind endingOffsets=2: b1 a/1 would be read from 4 to 2"
    ):
        ends.check_order(start, end, starts, stops)


def test_a_time_that_no_record_matches_is_an_error_by_strategy_or_in_the_future():
    starts = {key: end for key, (_, end) in HERE.items()}
    past, future = end_of("5", name="Timestamp"), end_of(str(10**14), name="Timestamp")
    ends.check_matches(past, starts, HERE, "")
    ends.check_matches(future, starts, HERE, "latest")
    for end, strategy, says in ((past, "error", "no record of that time or later; "), (future, "", "in the future; ")):
        with pytest.raises(
            ConfigError, match=rf"startingTimestamp=\d+: b1 a/0 .*{says}startingOffsetsByTimestampStrategy"
        ):
            ends.check_matches(end, starts, HERE, strategy)


def test_a_path_that_is_no_data_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no data directory of KMQ: it has no file `id`"):
        Directory(str(tmp_path)).topics()
    with pytest.raises(ConfigError, match=r"path='.*/nope': no data directory of KMQ: it does not exist"):
        Directory(f"{tmp_path}/nope").bounds(["a"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/id").write_text("1")
    with pytest.raises(ConfigError, match=f"did you mean {tmp_path}/data"):
        Directory(str(tmp_path)).bounds([])
    with pytest.raises(ConfigError, match=f"matches no data directory; {tmp_path}/data is none"):
        ReadOptions({"path": f"{tmp_path}/*", "subscribe": "a"})


def test_a_pattern_takes_kmqs_own_topics_only_if_it_names_them():
    everything, own = (ReadOptions({"path": "d", "subscribePattern": each}) for each in (".*", "__.*"))
    assert everything.wants("a", 0) and not everything.wants("__append", 0) and not everything.wants("__x", 1)
    assert own.wants("__append", 0) and not own.wants("a", 0)


def test_assigned_partitions_are_all_that_is_wanted():
    options = ReadOptions({"path": "d", "assign": '{"a": [0, 2], "b": [1]}'})
    assert [options.wants("a", n) for n in range(3)] == [True, False, True]
    assert not options.wants("c", 0) and options.topics == ["a", "b"]
