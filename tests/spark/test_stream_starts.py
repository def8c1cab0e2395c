"""spark.readStream: where a stream begins, and what is said before it begins anywhere else than asked for."""

import pytest
from made_data import FIRST_TS, append, write_data
from pyspark.errors import PySparkException
from stream_runs import forget_last_commit, ids, orders, run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """1,000 orders in two partitions."""
    return write_data(tmp_path_factory.mktemp("starts") / "data", orders(0, 1000), {"orders": 2})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribe": "order"}, "topic 'order' does not exist at .*; did you mean orders"),
        (
            {"startingOffsets": '{"orders": {"0": 5}}'},
            "startingOffsets: says nothing of .* orders/1: name every partition",
        ),
    ],
)
def test_a_stream_that_would_pass_records_over_does_not_start(spark, data, tmp_path, options, says):
    with pytest.raises(PySparkException, match=says):
        run(spark, data, tmp_path, **{"subscribe": "orders"} | options)


def test_a_first_batch_that_is_read_again_begins_where_it_did(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    path = str(tmp_path / "data")
    assert not any(run(spark, path, tmp_path, subscribe="orders"))
    forget_last_commit(tmp_path)  # Spark asks for the start once more, and `latest` is another one
    append(made, orders(10, 15))
    run(spark, path, tmp_path, subscribe="orders")
    assert ids(spark, tmp_path) == list(range(10, 15))


def test_a_pattern_may_match_nothing_yet(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    path = str(tmp_path / "data")
    assert not any(run(spark, path, tmp_path, subscribePattern="later.*"))
    append(made, [b"later.k|0|%d|x" % n for n in range(10, 15)])
    run(spark, path, tmp_path, subscribePattern="later.*")
    assert ids(spark, tmp_path) == list(range(10, 15))


def test_a_stream_begins_at_a_time_of_each_partition(spark, data, tmp_path):
    then = FIRST_TS // 1000 + 1  # of the last record, that with seq 1000 and id 999
    times = f'{{"orders": {{"0": {then}, "1": {then}}}}}'
    run(spark, data, tmp_path, subscribe="orders", startingOffsetsByTimestamp=times, startingOffsets="earliest")
    assert ids(spark, tmp_path) == [999]
