"""spark.readStream.format("kmq"): each record in one batch, over restarts, new partitions, rolls and what retention takes."""

import json
import shutil
from pathlib import Path

import pytest
from commands import PATIENCE_S, wait
from made_data import append, write_data
from pyspark.errors import PySparkException, StreamingQueryException
from stream_runs import as_format_1, forget_last_commit, ids, last_offset, orders, run, run_tasks

from kmq.log import topic_changes, topics
from kmq.spark.streaming import listener


def test_each_record_is_in_one_batch_over_restarts_and_rolls(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 500), {"orders": 2}, segment_bytes=4_000, group=50, closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "orders", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "120"}
    first = run(spark, data, tmp_path, **options)
    assert [len(batch) for batch in first] == [120, 120, 120, 120, 20]
    append(made, orders(500, 800), group=50)
    second = run(spark, data, tmp_path, **options)
    assert sum(map(len, second)) == 300
    assert run(spark, data, tmp_path, **options) == []
    assert ids(spark, tmp_path) == list(range(800))


def test_bytes_limit_a_batch(spark, tmp_path):
    data = write_data(tmp_path / "data", [b"wide|0|%d|%b" % (n, b"x" * 10_000) for n in range(100)], group=5)
    batches = run(spark, data, tmp_path, subscribe="wide", startingOffsets="earliest", maxBytesPerTrigger="200k")
    assert len(batches) >= 4 and max(map(len, batches)) <= 30
    assert ids(spark, tmp_path) == list(range(100))


def test_a_stream_begins_with_what_comes_after_its_start(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    data = str(tmp_path / "data")
    assert not any(run(spark, data, tmp_path, subscribe="orders"))
    append(made, orders(10, 15))
    assert sum(map(len, run(spark, data, tmp_path, subscribe="orders"))) == 5


def test_new_topics_and_partitions_are_read_from_their_first_record(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    data = str(tmp_path / "data")
    options = {"subscribePattern": "orders|later.*", "startingOffsets": "earliest"}
    run(spark, data, tmp_path, **options)
    append(made, [b"later%d.k|0|%d|x" % (n % 3, n) for n in range(10, 30)])
    run(spark, data, tmp_path, **options)
    assert ids(spark, tmp_path) == list(range(30))


def test_the_wal_streams_too(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), segment_bytes=300, group=3, closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "__append", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "7"}
    run(spark, data, tmp_path, **options)
    append(made, [b"other|0|%d|x" % n for n in range(10, 20)], group=3)
    run(spark, data, tmp_path, **options)
    assert ids(spark, tmp_path) == list(range(20))


def remove_first_segments(data, count):
    for path in sorted(Path(data, "topics/orders/0").glob("*.log"))[:count]:
        path.unlink()
        path.with_suffix(".idx").unlink()


def test_what_retention_took_before_it_was_read_stops_the_stream_or_is_passed_over(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 20), segment_bytes=300, group=5, closed=False)
    data = str(tmp_path / "data")
    run(spark, data, tmp_path, subscribe="orders", startingOffsets="earliest")
    append(made, orders(20, 100), group=5)
    left = sorted(Path(data, "topics/orders/0").glob("*.log"))
    remove_first_segments(data, len(left) - 2)
    first_left = int(left[-2].stem)
    assert first_left > 20
    with pytest.raises(StreamingQueryException, match=f"offsets 20 to {first_left - 1} are gone: retention"):
        run(spark, data, tmp_path, subscribe="orders", startingOffsets="earliest")
    run(spark, data, tmp_path, subscribe="orders", startingOffsets="earliest", failOnDataLoss="false")
    assert ids(spark, tmp_path) == [*range(20), *range(first_left, 100)]


def test_a_stream_begins_where_a_start_lets_the_partition_begin(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 20), segment_bytes=300, group=5, closed=False)
    data, behind = str(tmp_path / "data"), tmp_path / "behind"
    topic_changes.begin_at(data, "orders", None, {0: 13})
    made[1].tick()
    made[1].settle()
    append(made, orders(20, 30), group=5)
    options = {"subscribe": "orders", "startingOffsets": "earliest"}
    run(spark, data, tmp_path, **options)
    run(spark, data, behind, **options)
    assert ids(spark, tmp_path) == [*range(13, 30)]
    append(made, orders(30, 40), group=5)
    topic_changes.begin_at(data, "orders", None, {0: 35})
    made[1].tick()
    made[1].settle()
    with pytest.raises(StreamingQueryException, match="offsets 30 to 34 are gone"):
        run(spark, data, behind, **options)


def delete(made, data, topic):
    topic_changes.submit(data, topic_changes.DELETE, topic, {})
    made[1].tick()
    assert topic not in topics.names(data)


def test_a_deleted_topic_stops_its_stream_and_its_successor_is_read_from_the_start(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    data = str(tmp_path / "data")
    of_name, of_pattern = tmp_path / "name", tmp_path / "pattern"
    by_name = {"subscribe": "orders", "startingOffsets": "earliest"}
    by_pattern = {"subscribePattern": "orders|more", "startingOffsets": "earliest"}
    run(spark, data, of_name, **by_name)
    append(made, [b"more|0|%d|x" % n for n in range(10, 15)])
    delete(made, data, "more")
    run(spark, data, of_pattern, **by_pattern)
    append(made, orders(15, 20))
    delete(made, data, "orders")
    for work, options in ((of_name, by_name), (of_pattern, by_pattern)):
        with pytest.raises(
            StreamingQueryException, match="orders/0: the topic was deleted; it was read up to offset 10 of 15"
        ):
            run(spark, data, work, **options)
        run(spark, data, work, failOnDataLoss="false", **options)
    append(made, orders(20, 23))
    append(made, [b"more|0|%d|x" % n for n in range(23, 25)])
    with pytest.raises(StreamingQueryException, match="read up to offset 10 of 15; another topic has its name now"):
        run(spark, data, of_name, **by_name)
    run(spark, data, of_name, failOnDataLoss="false", **by_name)
    run(spark, data, of_pattern, failOnDataLoss="false", **by_pattern)
    delete(made, data, "orders")
    append(made, orders(25, 27))
    with pytest.raises(StreamingQueryException, match="read up to offset 18 of 18; another topic has its name now"):
        run(spark, data, of_name, **by_name)
    run(spark, data, of_name, failOnDataLoss="false", **by_name)
    run(spark, data, of_pattern, **by_pattern)  # all of the deleted one was read
    assert ids(spark, of_name) == [*range(10), *range(20, 23), 25, 26]
    assert ids(spark, of_pattern) == [*range(10), *range(20, 27)]


def test_a_stream_reads_the_partitions_that_its_topic_gets_from_their_first_record_on(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 10), closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "orders", "startingOffsets": "latest"}
    run(spark, data, tmp_path, **options)
    topic_changes.submit(data, topic_changes.GROW, "orders", {"partitions": "3"})
    made[1].tick()
    append(made, orders(10, 22))
    assert topics.load(data, "orders")[0] == 3
    run(spark, data, tmp_path, **options)
    assert ids(spark, tmp_path) == [*range(10, 22)]


def test_a_checkpoint_of_another_directory_is_refused(spark, tmp_path):
    data = write_data(tmp_path / "data", orders(0, 10))
    run(spark, data, tmp_path, subscribe="orders", startingOffsets="earliest")
    shutil.rmtree(data)
    write_data(tmp_path / "data", orders(0, 20))
    with pytest.raises((StreamingQueryException, PySparkException), match="another data directory"):
        run(spark, data, tmp_path, subscribe="orders", startingOffsets="earliest")


def test_a_batch_that_is_read_again_has_the_same_rows_in_the_same_order(spark, tmp_path):
    """What comes between the first try of a batch and the next one does not get into it."""
    made = write_data(tmp_path / "data", orders(0, 100), {"orders": 2}, closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "orders", "startingOffsets": "earliest", "minPartitions": "4"}
    (first,) = run(spark, data, tmp_path, **options)
    append(made, orders(100, 150))
    forget_last_commit(tmp_path)
    again = run(spark, data, tmp_path, **options)
    assert again[0] == first and sum(map(len, again[1:])) == 50


def test_progress_tells_what_is_behind(spark, tmp_path):
    data = write_data(tmp_path / "data", orders(0, 100))
    df = (
        spark.readStream.format("kmq")
        .option("path", data)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
    )
    query = (
        df.option("maxOffsetsPerTrigger", "40").load().writeStream.format("noop")
        .option("checkpointLocation", f"{tmp_path}/c").trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination(PATIENCE_S)
    (source,) = query.recentProgress[0]["sources"]
    assert json.loads(source["latestOffset"])[data]["orders"]["0"] == 100
    assert json.loads(source["endOffset"])[data]["orders"]["0"] == 40


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_live_broker_is_followed_and_a_group_shows_how_far_a_query_is(spark, broker, tmp_path):
    """Records produced while the stream runs, over a roll of every segment: each once, none before it is durable."""
    broker.gateway = True
    broker.up(KMQ_SEGMENT_BYTES="65536")
    reader = spark.readStream.format("kmq").schema("offset bigint, id string").option("path", str(broker.data))
    seen = []
    query = (
        reader.option("subscribe", "__append").option("startingOffsets", "earliest").load()
        .writeStream.foreachBatch(lambda df, n: seen.extend(int(row.id) for row in df.collect()))
        .option("checkpointLocation", f"{tmp_path}/c").trigger(processingTime="0 seconds").start()
    )  # fmt: skip
    try:
        for turn in range(5):
            broker.send_lines([b"orders.k|0|%d|%b" % (n, b"x" * 50) for n in range(turn * 1000, turn * 1000 + 1000)])
            wait(lambda n=turn: len(seen) >= 1000 * n, lambda: f"the stream keeps up: {len(seen)}")
        wait(lambda: len(seen) >= 5000, lambda: f"all records: {len(seen)}")
    finally:
        query.stop()
    assert seen == list(range(5000))
    check_group(spark, broker, tmp_path)


def check_group(spark, broker, work):
    """Commits after all batches with AvailableNow, and after the last one of a query that is stopped before the next."""
    port = (broker.pipes / "http.port").read_text().strip()
    where = {"kmq.bootstrap.servers": f"127.0.0.1:{port}", "groupId": "lag", "startingOffsets": "earliest"}
    rows = spark.readStream.format("kmq").schema("id string").options(**where, subscribe="orders").load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", f"{work}/of-group")
    writer.trigger(availableNow=True).start().awaitTermination(PATIENCE_S)
    broker.wait(lambda: committed(broker) == (5000, 0), "the commit")
    broker.send_lines([b"orders.k|0|%d|x" % n for n in range(5000, 5010)])
    broker.wait(lambda: len(broker.lines("orders")) == 5010, "all records routed")
    query = writer.trigger(processingTime="1 hour").start()
    try:
        wait(lambda: query.lastProgress is not None, lambda: "a batch")
    finally:
        query.stop()
    listener.settle(spark, str(query.runId))
    broker.wait(lambda: committed(broker) == (5010, 0), "the commit")  # settle() gives up after a few seconds


def committed(broker):
    """(offset, lag) of the group in the one partition; None: it has committed nothing."""
    shown = broker.kmq("groups", "describe", "lag", "--json")
    if shown.returncode:
        return None
    [row] = json.loads(shown.stdout)["partitions"]
    return row["committed"], row["lag"]


def test_a_replayed_batch_has_the_same_tasks_whatever_options_say_now(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 100), {"orders": 2}, closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "orders", "startingOffsets": "earliest"}
    (first,) = run_tasks(spark, data, tmp_path, minPartitions="5", **options)
    assert len(first) == 5
    append(made, orders(100, 150))
    forget_last_commit(tmp_path)
    again, rest = run_tasks(spark, data, tmp_path, minPartitions="2", **options)
    assert again == first and len(rest) == 2
    forget_last_commit(tmp_path)
    assert run_tasks(spark, data, tmp_path, maxRecordsPerPartition="3", **options) == [rest]


def test_a_checkpoint_of_the_release_before_goes_on(spark, tmp_path):
    made = write_data(tmp_path / "data", orders(0, 100), {"orders": 2}, closed=False)
    data = str(tmp_path / "data")
    options = {"subscribe": "orders", "startingOffsets": "earliest", "minPartitions": "4"}
    run(spark, data, tmp_path, **options)
    forget_last_commit(tmp_path)
    as_format_1(tmp_path)
    path, _ = last_offset(tmp_path)
    identity = Path(data, "id").read_text().strip()
    assert path.read_text().endswith(f'{{"{data}": {{"__id": "{identity}", "orders": {{"0": 20, "1": 80}}}}}}')
    append(made, orders(100, 150))
    replayed, rest = run_tasks(spark, data, tmp_path, **options)
    assert [(tasks[0], tasks[-1]) for tasks in replayed.values()] == [
        ((0, 0), (0, 19)), ((1, 0), (1, 25)), ((1, 26), (1, 52)), ((1, 53), (1, 79)),
    ]  # fmt: skip
    assert sum(map(len, rest.values())) == 50
    assert last_offset(tmp_path)[1][data]["__format"] in ("2", "3")  # 3: pieces share a task


def test_a_stream_with_nothing_new_runs_no_batch(spark, tmp_path):
    data = write_data(tmp_path / "data", orders(0, 100), {"orders": 2})
    options = {"subscribe": "orders", "startingOffsets": "earliest"}
    run(spark, data, tmp_path, **options)
    assert run(spark, data, tmp_path, **options) == []
    as_format_1(tmp_path)
    assert run(spark, data, tmp_path, **options) == []
