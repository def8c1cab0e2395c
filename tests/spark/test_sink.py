"""df.write and df.writeStream to format("kmq"): what is stored, what is stored once, and what is refused with which words."""

import os
import threading
from collections import Counter

import fixed_port
import psutil
import pytest
from fixed_port import messages, payloads, routed
from heard import Heard
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from writing import finish, stream, writer

from kmq.message import text


def files_of(tmp_path, *contents):
    """A stream of text files, each a batch of its own; one more file for each call."""
    tmp_path.joinpath("in").mkdir(exist_ok=True)
    for content in contents:
        number = len(list(tmp_path.joinpath("in").iterdir()))
        path = tmp_path / "in" / f"{number}.txt"
        path.write_text("".join(f"{line}\n" for line in content))
        os.utime(path, (number, number))  # Spark takes the oldest first


def read_files(spark, tmp_path):
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(tmp_path / "in"))


# --- what is stored ------------------------------------------------------------------------------------------------------


def test_rows_become_messages_and_come_back_as_they_were(spark, up):
    rows = [
        ("orders", "k.1", "plain", {"host": "a b"}),
        ("orders", None, "two\nlines", None),
        ("jobs", "é|;%", "é", {"reason": "x"}),
        ("jobs", "", "\x1b[31m", {}),
        ("jobs", "eu", "", {}),
        ("jobs.eu", None, None, {}),
    ]
    df = spark.createDataFrame(rows, "topic string, key string, value string, headers map<string,string>")
    writer(df.withColumn("value", F.col("value").cast("binary")), up, kmq_producer="one").save()
    routed(up, len(rows))
    back = spark.read.format("kmq").option("path", str(up.data)).option("subscribePattern", ".*").load().collect()
    got = {(row.topic, row.key, row.value and bytes(row.value).decode()): row.headers for row in back}
    got = {(topic, key, "" if value == b"" else value): headers for (topic, key, value), headers in got.items()}
    assert set(got) == {(topic, key, value) for topic, key, value, _ in rows}
    assert got == {(topic, key, value): headers or {} for topic, key, value, headers in rows}
    names = {line.partition(b";p=")[2].rpartition(b"-")[0] for topic in ("jobs", "jobs.eu") for line in up.lines(topic)}
    assert names == {b"one"}


def test_a_key_does_not_change_the_topic_and_may_be_any_bytes(spark, up):
    assert up.kmq("topics", "create", "orders.eu").returncode == 0
    keys = [b"eu", b"eu.\xff", b"\0|;%", b"@3"]
    rows = spark.createDataFrame([(key, b"v") for key in keys], "key binary, value binary")
    writer(rows.coalesce(1), up, kmq_producer="one", topic="orders").save()
    routed(up, 1 + len(keys))  # the declaration, and they
    back = spark.read.format("kmq").option("path", str(up.data)).option("subscribePattern", ".*")
    found = back.schema("topic string, key string, key_bytes binary").load().collect()
    assert {(row.topic, bytes(row.key_bytes)) for row in found} == {("orders", key) for key in keys}
    assert "eu.\ufffd" in {row.key for row in found}


def test_the_lines_are_those_of_a_client(spark, up):
    df = spark.range(10, numPartitions=1).selectExpr(
        "cast(id as string) value", "'a.b' topic", "'x.' || id key", "'7' producer_ts"
    )
    writer(df, up, kmq_producer="one").save()
    routed(up, 10)
    key = [text.make_routing_key("a.b", f"x.{n}") for n in range(10)]
    stored = [line.split(b"|", 2)[2] for line in up.lines("a.b")]
    assert stored == [b"%b|7|%d;p=one-0|%d" % (key[n], n, n) for n in range(10)]


def test_a_copy_of_a_topic_with_all_its_columns_goes_to_the_topic_that_is_told(spark, up, tmp_path):
    up.send_lines([b"from.k%%2E%d|1|;host=h%d|%d" % (n, n, n) for n in range(20)])
    up.wait_routed(20)
    df = spark.readStream.format("kmq").option("path", str(up.data)).option("subscribe", "from")
    finish(stream(df.option("startingOffsets", "earliest").load(), up, tmp_path / "c", topic="to").start())
    routed(up, 40)
    copied = sorted(line.split(b"|")[2:6:3] for line in up.lines("to"))
    assert copied == sorted([b"to.@.k%%2E%d" % n, b"%d" % n] for n in range(20))
    assert all(b";host=h" in line for line in up.lines("to"))


def test_each_spark_partition_keeps_to_one_of_several_brokers(spark, new_broker):
    brokers = [new_broker(), new_broker()]
    both = ",".join(fixed_port.up(broker) for broker in brokers)
    df = spark.range(100, numPartitions=4).selectExpr("cast(id as string) value")
    for _ in range(2):
        writer(df, brokers[0], kmq_producers=both, kmq_producer="one", topic="t").save()
    for at, broker in enumerate(brokers):
        routed(broker, 50)
        assert {id.split("/")[0] for id, _ in messages(broker, "t")} == {f"one-{at}", f"one-{at + 2}"}


# --- once ----------------------------------------------------------------------------------------------------------------


def test_a_batch_run_again_under_its_name_stores_nothing_twice_and_says_so(spark, up, capfd):
    df = spark.range(20_000, numPartitions=3).selectExpr("cast(id as string) value")
    heard = Heard(capfd)
    writer(df, up, kmq_producer="one", topic="t").save()
    writer(df, up, kmq_producer="one", topic="t", path=str(up.data)).save()
    routed(up, 20_000)
    heard.wait_for("all 20000 rows had been stored before with kmq.producer=one")
    writer(df, up, kmq_producer="two", topic="t").save()
    routed(up, 40_000)
    assert set(Counter(payloads(up, "t")).values()) == {2}
    assert heard.text.count("had been stored before") == 1


def test_a_batch_that_failed_goes_on_where_it_was(spark, up):
    good = spark.range(30_000, numPartitions=1).selectExpr("cast(id as string) value", "id")
    bad = good.withColumn(
        "value", F.when(F.col("id") == 25_000, F.repeat(F.lit("x"), 1 << 21)).otherwise(F.col("value"))
    )
    with pytest.raises(PySparkException, match=r"row 25000 .*column value: its 2,097,152 bytes"):
        writer(bad.select("value"), up, kmq_producer="one", topic="t").save()
    assert int(up.status()["framer"]["seq"]) <= 20_000  # nothing of the Arrow batch with the bad row
    writer(good.select("value"), up, kmq_producer="one", topic="t", path=str(up.data)).save()
    routed(up, 30_000)
    assert payloads(up, "t") == [b"%d" % n for n in range(30_000)]


def test_a_stream_numbers_its_rows_by_query_batch_and_place(spark, up, tmp_path):
    """Also the guard of Spark's internal names: were they gone, the sink could not tell batches apart."""
    files_of(tmp_path, "abc", "de")
    query = stream(read_files(spark, tmp_path), up, tmp_path / "c", topic="t").start()
    finish(query)
    files_of(tmp_path, "f")
    again = stream(read_files(spark, tmp_path), up, tmp_path / "c", topic="t").start()
    finish(again)
    assert again.id == query.id
    routed(up, 6)
    own = f"s-{query.id}-0"
    ids = [0, 1, 2, 10**9, 10**9 + 1, 2 * 10**9]
    assert messages(up, "t") == [(f"{own}/{id}", b"%c" % letter) for id, letter in zip(ids, b"abcdef", strict=True)]


def test_batches_written_by_foreachbatch_are_told_apart_by_query_and_batch(spark, up, tmp_path):
    files_of(tmp_path, "abc", "de")

    def both(df, batch):
        for _ in range(2):  # the second time as after a crash
            writer(df, up, kmq_producer="good", topic="t").save()
            writer(df, up, kmq_producer="bad", topic="dlq").save()

    df = read_files(spark, tmp_path).writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "c"))
    query = df.trigger(availableNow=True).start()
    finish(query)
    routed(up, 10)
    for topic, name in (("t", "good"), ("dlq", "bad")):
        ids = [f"{name}-{query.id}-0/{id}" for id in (0, 1, 2, 10**9, 10**9 + 1)]
        assert messages(up, topic) == list(zip(ids, (b"a", b"b", b"c", b"d", b"e"), strict=True))


def test_a_batch_of_other_rows_under_a_name_that_was_used_is_an_error_and_not_a_loss(spark, up):
    """Its rows have the numbers of those before them, and counted as stored."""
    writer(spark.range(40, numPartitions=2).selectExpr("'a' || id value"), up, kmq_producer="one", topic="t").save()
    with pytest.raises(PySparkException, match=r"row 0 .*id_reused.*kmq\.producer"):
        writer(spark.range(40, numPartitions=2).selectExpr("'b' || id value"), up, kmq_producer="one", topic="t").save()
    routed(up, 40)


def test_producers_and_ids_of_ones_own_are_stored_once_each_however_rows_are_spread(spark, up):
    df = spark.range(3000).selectExpr("'m-' || id % 20 producer", "id + 1 id", "cast(id as string) value")
    for partitions in (2, 3):  # 20 producers: more than a task keeps connected
        ready = df.repartition(partitions, "producer").sortWithinPartitions("producer", "id")
        writer(ready, up, topic="t").save()
    routed(up, 3000)
    assert sorted(messages(up, "t")) == sorted((f"m-{n % 20}/{n + 1}", b"%d" % n) for n in range(3000))


def test_ids_that_do_not_rise_are_an_error_and_not_a_loss(spark, up):
    df = spark.createDataFrame([("a", 1), ("b", 1), ("a", 3), ("a", 3)], "producer string, id long").coalesce(1)
    with pytest.raises(PySparkException, match=r"row 3 .*column id: 3 comes after 3 of the same producer a"):
        writer(df.withColumn("value", F.lit("x")), up, topic="t").save()
    routed(up, 0)


# --- brokers that come and go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [("framer",), ("ingress",), ()], ids=["framer", "ingress", "all"])
def test_a_broker_killed_in_mid_batch_gets_each_row_once(spark, up, killed):
    df = spark.range(60_000, numPartitions=2).selectExpr("repeat('x', 100) || id value")
    durability = psutil.Process(up.pids()["durability"])
    durability.suspend()  # the write cannot end before the kill

    def kill():
        up.wait(lambda: int(up.status()["framer"]["seq"]) > 5_000, "the first rows")
        up.kill(*killed)
        if killed:
            durability.resume()
        else:
            fixed_port.up(up)

    killer = threading.Thread(target=kill)
    killer.start()
    # Without path the sink would ask for its last id first, which durability answers.
    writer(df, up, kmq_producer="one", topic="t", path=str(up.data)).save()
    killer.join()
    routed(up, 60_000)
    assert set(payloads(up, "t")) == {b"x" * 100 + b"%d" % n for n in range(60_000)}


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ("value", {"kmq.producer": ""}, "option kmq.producer, a name of this job"),
        ("value", {"topic": ""}, "column routing_key, column topic or option topic"),
        ("'x' payload", {}, "column value is missing"),
        ("1 value", {}, "column value: must be string or binary, not int"),
        ("value, 1 topic", {}, "column topic: must be string or binary, not int"),
        ("value, array('a') headers", {}, "column headers: must be map<string,string>"),
        ("value, 'a' producer", {}, "column producer needs column id"),
        ("value", {"kmq.producers": ""}, "kmq.producers: where to write to is missing"),
        ("value", {"kmq.producers": "host:port"}, "kmq.producers='host:port': must be host:port"),
        ("value", {"kmq.producer": "a b"}, "kmq.producer='a b': must be 1 to 64"),
        ("value", {"kmq.replay": "maybe"}, "kmq.replay='maybe': must be one of stop, again, trust"),
        ("value", {"path": "/nope"}, "path='/nope': no data directory"),
        ("value", {"path": "/nope", "kmq.bootstrap.servers": "a:1"}, "one of them"),
        ("value, 't' origin_topic", {}, "column origin_partition is missing"),
        ("value, 1 origin_topic", {}, "column origin_topic: must be string, not int"),
        ("value", {"kmq.timeout": "1w"}, "kmq.timeout='1w': expected a whole number"),
        ("value", {"tpic": "to"}, "unknown writer option tpic='to'; did you mean topic"),
    ],
)
def test_what_is_wrong_with_a_write_is_named(spark, columns, options, says):
    df = spark.sql("select 'x' value").selectExpr(*columns.split(", "))
    given = {"kmq.producers": "127.0.0.1:1", "topic": "t", "kmq.producer": "one", **options}
    with pytest.raises(PySparkException, match=says.replace("'", ".")):
        df.write.format("kmq").mode("append").options(**{k: v for k, v in given.items() if v}).save()


def test_a_log_is_not_overwritten(spark):
    df = spark.sql("select 'x' value")
    options = {"kmq.producers": "127.0.0.1:1", "topic": "t", "kmq.producer": "one"}
    with pytest.raises(PySparkException, match="only ever added to"):
        df.write.format("kmq").mode("overwrite").options(**options).save()


def test_a_row_too_long_for_this_broker_is_refused_with_its_whole_batch(spark, broker):
    fixed_port.up(broker, KMQ_MAX_LINE="8192")
    df = spark.range(100, numPartitions=1).selectExpr("if(id = 60, repeat('x', 9000), 'x') value")
    with pytest.raises(PySparkException, match=r"row 60 .*column value: its 9,000 bytes .*8,192 .KMQ_MAX_LINE"):
        writer(df, broker, kmq_producer="one", topic="t").save()
    routed(broker, 0)
