"""What readers say of options that do not fit what is there: over real data directories, as Spark's planner asks them."""

import json

import pytest
from made_data import FIRST_TS, write_data

from kmq.errors import ConfigError
from kmq.spark.source.options import ReadOptions

types = pytest.importorskip("pyspark.sql.types")
BatchReader = pytest.importorskip("kmq.spark.source.batch_reader").BatchReader
StreamReader = pytest.importorskip("kmq.spark.source.stream_reader").StreamReader
SCHEMA = types.StructType([types.StructField("offset", types.LongType())])
THEN = FIRST_TS // 1000 + 1  # milliseconds: seq 1000 and all later ones were received then or later


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """1,000 orders in three partitions, then 20 jobs."""
    lines = [b"orders.k%d||%d|x" % (n % 5, n) for n in range(1000)] + [b"jobs||%d|x" % n for n in range(20)]
    return write_data(tmp_path_factory.mktemp("starts") / "data", lines, {"orders": 3})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribe": "order"}, "topic 'order' does not exist .* did you mean orders"),
        (
            {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 5}}'},
            "says nothing of .* orders/1, .* orders/2",
        ),
        (
            {"subscribe": "jobs", "startingOffsets": '{"jobs": {"0": 5, "1": 5}}'},
            "there is no partition 1 of topic 'jobs'",
        ),
        (
            {"subscribe": "jobs", "endingOffsets": '{"jobs": {"0": 5}, "orders": {"0": 5}}'},
            "orders/0 was not asked for",
        ),
        (
            {"subscribe": "jobs", "startingOffsets": '{"jobs": {"0": 9}}', "endingOffsets": '{"jobs": {"0": 3}}'},
            "startingOffsets=9 is behind endingOffsets=3",
        ),
        (
            {
                "subscribe": "jobs",
                "startingTimestamp": str(FIRST_TS // 1000 + 1),
                "endingTimestamp": str(FIRST_TS // 1000),
            },
            "startingTimestamp=[0-9]+ is behind endingTimestamp=[0-9]+: ",
        ),
        (
            {"subscribe": "jobs", "startingTimestamp": str(10**14)},
            "has no record of that time or later, which is in the future",
        ),
        (
            {"subscribe": "jobs", "startingTimestamp": str(10**13 // 2), "startingOffsetsByTimestampStrategy": "error"},
            "startingOffsetsByTimestampStrategy=latest begins at its end",
        ),
    ],
)
def test_a_batch_that_does_not_fit_what_is_there_is_refused(data, options, says):
    with pytest.raises(ConfigError, match=says):
        BatchReader(SCHEMA, ReadOptions({"path": data} | options)).partitions()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribe": "order"}, "topic 'order' does not exist at .*; did you mean orders"),
        ({"assign": '{"orders": [0, 3]}'}, "assign: there is no partition 3 of topic 'orders' at .*; it has 0, 1, 2"),
        (
            {"startingOffsets": '{"orders": {"0": 5}}'},
            "startingOffsets: says nothing of .* orders/1, .* orders/2: name every partition",
        ),
        ({"startingOffsets": '{"order": {"0": 5, "1": 5}}'}, "startingOffsets: order/0 was not asked for"),
        (
            {"startingOffsets": '{"orders": {"0": 5, "1": 5, "2": 5, "7": 5}}'},
            "there is no partition 7 of topic 'orders'; it has 0, 1, 2",
        ),
        ({"startingTimestamp": str(10**14)}, "startingTimestamp=1[0]+: .* which is in the future"),
        ({"endingOffsets": "latest"}, "endingOffsets='latest': a stream has no end"),
        (
            {"startingOfsets": "earliest"},
            "(?i)unknown reader option startingOfsets='earliest'; did you mean startingOffsets",
        ),
    ],
)
def test_a_stream_that_does_not_fit_what_is_there_does_not_start(data, options, says):
    asked = {} if "assign" in options else {"subscribe": "orders"}
    with pytest.raises(ConfigError, match=says):
        asked_for = ReadOptions({"path": data} | asked | options)
        asked_for.check_stream()
        StreamReader(SCHEMA, asked_for).initialOffset()


def count(data, **options):
    reader = BatchReader(SCHEMA, ReadOptions({"path": data} | options))
    return sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task))


def test_times_bound_what_is_read(data):
    at = {name: f'{{"jobs": {{"0": {ms}}}}}' for name, ms in {"before": THEN - 1, "then": THEN}.items()}
    assert count(data, subscribe="jobs", startingOffsetsByTimestamp=at["then"]) == 20
    assert (
        count(data, subscribe="jobs", startingOffsetsByTimestamp=at["before"], endingOffsetsByTimestamp=at["then"]) == 0
    )
    assert count(data, subscribe="orders", startingTimestamp=str(THEN - 1), endingTimestamp=str(THEN)) == 999
    assert count(data, subscribe="orders", startingTimestamp=str(THEN), startingOffsets="earliest") == 1


def begins(data, text, **more):
    options = ReadOptions({"path": data, "subscribe": "orders,jobs", "startingOffsets": text, **more})
    tasks = BatchReader(SCHEMA, options).partitions()
    return {span.key[1:]: span.start for task in tasks for span in task.spans}


def test_a_word_stands_for_all_partitions_of_a_topic(data):
    first = begins(data, '{"orders": "earliest", "jobs": {"0": 5}}')
    assert first == {("orders", 0): 0, ("orders", 1): 0, ("orders", 2): 0, ("jobs", 0): 5}
    assert begins(data, '{"orders": "Latest", "jobs": "earliest"}') == {("jobs", 0): 0}
    by_broker = json.dumps({data: {"orders": "latest", "jobs": {"0": -2}}})
    assert begins(data, by_broker) == {("jobs", 0): 0}
    assert begins(
        data, '{"orders": "latest", "jobs": "earliest"}', endingOffsets='{"orders": "latest", "jobs": {"0": 3}}'
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"orders": "latest"}', "says nothing of .* jobs/0"),
        ('{"orders": "latest", "jobs": "now"}', "must be earliest, latest or"),
        ('{"orders": "latest", "jobs": "latest", "job": "latest"}', "startingOffsets: job was not asked for"),
        ('{"orders": {"*": 5}, "jobs": "latest"}', "must be earliest, latest or"),
        ('{"orders": {"0": "latest"}, "jobs": "latest"}', "must be earliest, latest or"),
    ],
)
def test_a_word_that_does_not_fit_is_refused(data, text, says):
    with pytest.raises(ConfigError, match=says):
        begins(data, text)


def test_earliest_is_no_end_of_a_topic_either(data):
    with pytest.raises(ConfigError, match=r"endingOffsets=.*must be latest or"):
        begins(data, "earliest", endingOffsets='{"orders": "earliest", "jobs": "latest"}')
