"""A batch that comes again with other rows than the first time: no row is lost, whatever has changed in between.

What Spark does after a crash between sink and commit is done here without one: the last commit of the checkpoint is removed.
"""

from collections import Counter
from pathlib import Path

import pytest
from compacting import compact
from fixed_port import messages, payloads
from made_data import write_data
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F
from writing import forget_last_commit, stream, writer

from kmq.log import identity, topics

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

COUNT = 8000  # more than the broker remembers the content of, in each Spark partition


@pytest.fixture
def source(tmp_path):
    """A data directory with topic `from`: COUNT records in one partition, in segments of some hundred."""
    data = str(tmp_path / "source")
    identity.open_data(data)
    topics.declare(data, "from", 1, {"cleanup": "compact"})
    lines = [b"from.k%d|0|%d|%d" % (n % 3000, n, n) for n in range(COUNT)]
    return write_data(data, lines, segment_bytes=20_000, group=100)


class Copy:
    """A stream from `source` to topic `to` of a broker."""

    def __init__(self, spark, source, up, work):
        self.spark, self.source, self.up, self.checkpoint = spark, source, up, work / "checkpoint"

    def run(self, plan=lambda rows: rows, read=(), **options):
        """All there is, as `plan` makes it; afterwards Spark has forgotten that the batch was written."""
        reader = self.spark.readStream.format("kmq").option("path", self.source).option("subscribe", "from")
        rows = reader.options(startingOffsets="earliest", failOnDataLoss="false", **dict(read)).load()
        options = {"topic": "to", "path": str(self.up.data), **options}
        query = stream(plan(rows), self.up, self.checkpoint, **options).start()
        query.awaitTermination(200)
        if query.exception():
            raise query.exception()
        forget_last_commit(self.checkpoint)

    def copies(self):
        """Payload → how often it has been stored."""
        self.up.wait_routed(int(self.up.status()["framer"]["seq"]))
        return Counter(int(payload) for payload in payloads(self.up, "to"))


@pytest.fixture
def copy(spark, source, up, tmp_path):
    return Copy(spark, source, up, tmp_path)


def values(rows):
    return rows.select("value")


def rows_but(odd):
    """Of the first 1,000 records the even ones or the odd ones, and all others: as many rows either way."""
    return lambda rows: rows.where(f"offset >= 1000 or offset % 2 = {odd}").select("value")


def test_a_filter_mended_between_two_runs_stops_the_stream_and_loses_nothing(copy):
    copy.run(rows_but(0))
    before = copy.copies()
    says = r"row 0 of this Spark partition, producer s-.*stored is .*\|0'; came .*\|1'; .*kmq.replay=again"
    with pytest.raises(StreamingQueryException, match=says):
        copy.run(rows_but(1))
    assert copy.copies() == before
    copy.run(rows_but(1), kmq_replay="again")
    found = copy.copies()
    assert set(found) == set(range(COUNT)) and sum(found.values()) == COUNT
    copy.run(rows_but(1), kmq_replay="again")  # the replay of a replay
    copy.run(rows_but(1), kmq_replay="trust")
    assert copy.copies() == found


def in_partitions(count):
    """26,000 rows, spread over so many Spark partitions."""

    def plan(rows):
        numbers = rows.where("offset = 0").select(F.explode(F.sequence(F.lit(0), F.lit(25_999))).alias("n"))
        return numbers.selectExpr("cast(n as string) value").repartition(count, "value")

    return plan


def test_rows_in_other_spark_partitions_stop_the_stream_or_are_stored_again(copy):
    copy.run(in_partitions(2))
    with pytest.raises(StreamingQueryException, match=r"stored is .*; came .*kmq.replay=again"):
        copy.run(in_partitions(3))
    copy.run(in_partitions(3), kmq_replay="again")
    found = copy.copies()
    assert set(found) == set(range(26_000)) and max(found.values()) == 2


def test_what_compaction_and_retention_of_the_source_took_in_between_loses_nothing(copy):
    copy.run(values)
    assert compact(copy.source, min_dirty=0) > 3
    with pytest.raises(StreamingQueryException, match=r"stored is .*; came .*kmq.replay=again"):
        copy.run(values)
    copy.run(values, kmq_replay="again")
    assert set(copy.copies()) == set(range(COUNT))
    for path in sorted(Path(copy.source, "topics/from/0").glob("*.log"))[:-2]:
        path.unlink()
        path.with_suffix(".idx").unlink()
    with pytest.raises(StreamingQueryException, match=r"stored is .*; came .*kmq.replay=again"):
        copy.run(values)
    copy.run(values, kmq_replay="again")
    assert set(copy.copies()) == set(range(COUNT))


@pytest.mark.soak
def test_more_slices_in_a_replay_lose_nothing(copy):
    copy.run(values, read={"minPartitions": "1"})
    copy.run(values, read={"minPartitions": "4"}, kmq_replay="again")
    assert set(copy.copies()) == set(range(COUNT))


def test_records_with_their_origin_are_stored_once_whatever_the_filter_passes(copy):
    origin = ["value", "origin_broker", "origin_topic", "origin_partition", "origin_offset"]
    read = {"includeOrigin": "true"}
    copy.run(lambda rows: rows.where("offset % 2 = 0").select(origin), read)
    copy.run(lambda rows: rows.where("offset % 4 = 0").select(origin), read)
    assert copy.copies() == Counter(range(0, COUNT, 2))
    with pytest.raises(StreamingQueryException, match=r"id 2: ids above it are stored.*kmq.replay=again"):
        copy.run(lambda rows: rows.select(origin), read)
    copy.run(lambda rows: rows.select(origin), read, kmq_replay="again")
    assert copy.copies() == Counter(range(COUNT))
    copy.run(lambda rows: rows.select(origin), read, kmq_replay="again")
    assert copy.copies() == Counter(range(COUNT))
    with pytest.raises(
        StreamingQueryException, match=r"row 1 .*origin_offset: 0 comes after 0 of the same origin .*explode"
    ):
        copy.run(lambda rows: rows.select(*origin, F.explode(F.array(F.lit(1), F.lit(2)))), read)


def test_two_writes_of_one_batch_under_one_name_stop_the_stream(spark, up, tmp_path, source):
    def both(rows, batch):
        options = {"kmq_producer": "one", "path": str(up.data)}
        writer(rows.select("value"), up, topic="a", **options).save()
        writer(rows.select("value").limit(1000), up, topic="b", **options).save()

    rows = spark.readStream.format("kmq").option("path", source).option("subscribe", "from")
    query = rows.option("startingOffsets", "earliest").load().writeStream.foreachBatch(both)
    query = query.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    with pytest.raises(
        StreamingQueryException, match=r"stored is .*a\|.*; came .*b\|.*two writes share a kmq.producer"
    ):
        query.awaitTermination(200)


def test_other_rows_under_a_used_name_fail_a_batch_write(spark, up):
    rows = spark.range(COUNT, numPartitions=1).selectExpr("cast(id as string) value")
    writer(rows, up, kmq_producer="one", topic="to").save()
    other = spark.range(1000, numPartitions=1).selectExpr("'x' || id value")
    for options, says in (
        ({"path": str(up.data)}, r"row 0 of this Spark partition.*stored is .*\|0'; came .*\|x0'"),
        ({}, r"row 0 .*stored already, and 7,999 ids below the last one.*Give option path"),
    ):
        with pytest.raises(PySparkException, match=says):
            writer(other, up, kmq_producer="one", topic="to", **options).save()
    writer(other, up, kmq_producer="one", topic="to", path=str(up.data), kmq_replay="again").save()
    up.wait_routed(COUNT + 1000)
    assert [id for id, _ in messages(up, "to")][COUNT:] == [f"one-0:1/{n}" for n in range(1000)]
    assert payloads(up, "to")[COUNT:] == [b"x%d" % n for n in range(1000)]
