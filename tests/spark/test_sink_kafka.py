"""Rows in the shapes of Kafka's connector to format("kmq"), and back: null and empty, partitions as targets, headers in order."""

import fixed_port
import pytest
from commands import PATIENCE_S
from fixed_port import routed
from heard import Heard
from pyspark.errors import PySparkException

from kmq.message.routing import murmur2

ROWS = "topic string, partition int, key binary, value binary, headers array<struct<key:string,value:binary>>"


@pytest.fixture
def up(broker):
    fixed_port.up(broker)
    assert broker.kmq("topics", "create", "wide", "-p", "4").returncode == 0
    return broker


def write(df, broker, **options):
    options = {"kmq.producers": fixed_port.address(broker), "kmq.producer": "one", **options}
    df.write.format("kmq").mode("append").options(**options).save()


def read(spark, broker, schema, **options):
    given = {"path": str(broker.data), "subscribePattern": ".*"} | options
    return spark.read.format("kmq").schema(schema).options(**given).load()


def plain(value):
    return value if value is None else bytes(value)


ALL = [
    ("wide", 2, b"k", b"v", [("trace", b"1"), ("at", b"\xff\x00|;"), ("trace", b"2")]),
    ("wide", 3, None, None, None),
    ("wide", 1, b"", b"", []),
    ("wide", None, b"k", None, [("gone", None), ("empty", b""), ("p", b"own")]),
    ("a.b", 0, b"\xff.|", b"\0\n", None),
]


def test_rows_of_kafkas_shape_are_stored_where_sent_and_come_back_to_the_byte(spark, up):
    assert up.kmq("topics", "create", "a.b").returncode == 0
    write(spark.createDataFrame(ALL, ROWS).coalesce(1), up, usePartition="true")
    routed(up, 2 + len(ALL))  # two declarations, and they
    rows = read(
        spark, up, "topic string, partition int, key_bytes binary, value binary, id string, line binary"
    ).collect()
    found = {row.id: row for row in rows}
    for number, (topic, partition, key, value, headers) in enumerate(ALL):
        row = found[str(number)]
        at = (murmur2(key) & 0x7FFFFFFF) % 4 if partition is None else partition
        assert (row.topic, row.partition, plain(row.key_bytes), plain(row.value)) == (topic, at, key, value)
        kept = bytes(row.line).split(b"|", 5)[4].split(b";")[1:]
        wanted = {0: [b"trace=1", b"at=%FF%00%7C%3B", b"trace=2"], 3: [b"gone", b"empty=", b"%70=own"]}.get(number, [])
        assert [each for each in kept if each[:2] not in (b"p=", b"en")] == wanted, headers


def shown(row):
    """A row of Kafka's shape as plain Python."""
    headers = [(each.key, plain(each.value)) for each in row.headers or ()]
    return row.partition, plain(row.key_bytes), plain(row.value), headers


@pytest.mark.parametrize("include_headers", ["true", "false"])
def test_a_copy_of_a_topic_with_its_columns_is_the_same_to_the_byte(spark, up, include_headers):
    lines = [b"wide.@%d.k%%2E%d|1|%d;at=%%FF%%00;trace=2;empty=;null;%%70=own|x" % (n % 4, n, n) for n in range(8)]
    if include_headers == "false":  # a map of texts
        lines = [line.replace(b"%FF%00", b"%C3%A9") for line in lines]
    else:
        lines = [line.replace(b";trace", b";trace=1;trace") for line in lines]
    up.send_lines([*lines, b"wide.@3|1|8|", b"wide.@3.|1|9;enc=b64|", b"wide.\xff|1|10|\xfe"])
    up.wait_routed(1 + 11)  # the declaration, and they
    assert up.kmq("topics", "create", "copy", "-p", "4").returncode == 0
    reader = spark.read.format("kmq").option("path", str(up.data)).option("includeHeaders", include_headers)
    frame = reader.option("subscribe", "wide").load().where("id <> '10'")  # whose key is no text
    write(frame, up, topic="copy", usePartition="true")
    kind = dict(frame.dtypes)["headers"]
    exact = f"topic string, partition int, routing_key binary, value binary, headers {kind}"
    write(reader.schema(exact).load(), up, usePartition="true", **{"kmq.producer": "same"})
    routed(up, 2 + 32)
    schema = (
        "topic string, partition int, key_bytes binary, value binary, headers array<struct<key:string,value:binary>>"
    )
    stored = read(spark, up, schema, subscribePattern="wide|copy", includeHeaders="true").collect()
    wide, copy = (sorted(map(repr, map(shown, (r for r in stored if r.topic == name)))) for name in ("wide", "copy"))
    assert len(wide) == 22 and wide[0::2] == wide[1::2]
    assert len(copy) == 10 and set(copy) < set(wide)


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        (
            "-1 partition",
            {"usePartition": "true"},
            r"row 0 of this Spark partition, column partition: -1: must be 0 or more",
        ),
        ("'1' partition", {"usePartition": "true"}, "column partition: must be .*int.*, not string"),
        ("1 p", {"usePartition": "true"}, "usePartition=true: column partition is missing"),
        ("1 partition", {"usePartition": "yes"}, "usePartition=.yes.: must be true or false"),
    ],
)
def test_what_is_wrong_with_a_target_partition_is_named(spark, columns, options, says, broker):
    given = {"kmq.producers": fixed_port.up(broker), "topic": "t", "kmq.producer": "one", **options}
    with pytest.raises(PySparkException, match=says):
        spark.sql(f"select 'x' value, {columns}").write.format("kmq").mode("append").options(**given).save()


def test_a_partition_that_the_topic_does_not_have_is_named_with_row_and_column(spark, up):
    frame = spark.range(20, numPartitions=1).selectExpr("'x' value", "if(id = 17, 4, 3) partition")
    says = r"row 17 of this Spark partition, column partition: 4: topic wide has no such partition"
    with pytest.raises(PySparkException, match=says):
        write(frame, up, topic="wide", usePartition="true")


def test_a_column_partition_that_is_not_used_is_said_once_a_write_and_once_a_query(spark, up, tmp_path, capfd):
    frame = spark.range(30, numPartitions=3).selectExpr("cast(id as string) value", "7 partition")
    heard = Heard(capfd)
    write(frame, up, topic="t")
    assert heard.wait_for("usePartition=true").count("column partition is not used") == 1
    heard = Heard(capfd)
    tmp_path.joinpath("in").mkdir()
    for number in range(2):
        tmp_path.joinpath("in", f"{number}.txt").write_text("x\n")
    rows = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(tmp_path / "in"))
    stream = rows.selectExpr("value", "7 partition").writeStream.format("kmq").trigger(availableNow=True)
    options = {"kmq.producers": fixed_port.address(up), "topic": "t", "checkpointLocation": str(tmp_path / "c")}
    query = stream.options(**options).start()
    assert query.awaitTermination(PATIENCE_S) and query.exception() is None
    heard.wait_for("usePartition=true")
    routed(up, 1 + 32)
    assert heard.text.count("column partition is not used") == 1
