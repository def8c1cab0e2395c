"""Columns to lines in the shapes of Kafka's connector: a target partition, and headers as an array of structs."""

import pytest

pa = pytest.importorskip("pyarrow")

from made_batches import batch, random_, some_bytes, some_text, written  # noqa: E402

from kmq.message import text  # noqa: E402
from kmq.spark.sink.lines import RowError  # noqa: E402
from kmq.spark.source import columns  # noqa: E402

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def structs(headers):
    return None if headers is None else [{"key": name, "value": value} for name, value in headers]


def with_headers(*rows):
    return batch(value=["x"] * len(rows), headers=([structs(row) for row in rows], HEADERS))


def headers_of(line):
    return line.split(b"|")[2].partition(b";")[2]


@pytest.mark.parametrize("round", range(30))
def test_headers_of_any_bytes_and_order_are_those_of_a_client(round):
    rows = [
        [
            (random_.choice(("a1", "host", "é", "p", "enc", "")), random_.choice((None, some_bytes())))
            for _ in range(random_.randrange(4))
        ]
        for _ in range(random_.randrange(1, 30))
    ]
    rows = [None if random_.random() < 0.1 else row for row in rows]
    made = written(with_headers(*rows), topic="t")
    for line, row in zip(made, rows, strict=True):
        assert headers_of(line) == text.format_headers(row or ()).removeprefix(b";")
        assert [*text.client_headers(line.split(b"|")[2])] == [(name.encode(), value) for name, value in row or ()]
    low = random_.randrange(len(rows))
    assert written(with_headers(*rows)[low:], range(low, len(rows)), topic="t") == made[low:]


def test_a_header_without_a_name_is_named_with_its_row():
    says = "a header without a name: its key is null"
    with pytest.raises(RowError, match=f"row 12 of this Spark partition, column headers: {says}"):
        written(with_headers([], [("ok", b"")], [(None, b"x")]), topic="t", first_row=10)


def test_a_header_that_is_null_itself_is_an_error():
    rows = batch(value=["x"], headers=([[None]], HEADERS))
    with pytest.raises(RowError, match="its key is null"):
        written(rows, topic="t")


# --- the target partition ------------------------------------------------------------------------------------------------


def keys_of(lines):
    return [line.split(b"|")[0] for line in lines]


@pytest.mark.parametrize("round", range(30))
def test_a_partition_and_any_key_make_the_routing_key_that_a_client_makes(round):
    count = random_.randrange(1, 40)
    topics = [random_.choice(("orders", "a.b")) for _ in range(count)]
    keys = [random_.choice((None, "", some_text())) for _ in range(count)]
    asked = [random_.choice((None, 0, 3, 12)) for _ in range(count)]
    given = {"key": (keys, pa.string()), "partition": (asked, pa.int32()), "value": ["x"] * count}
    wanted = [text.make_routing_key(*row) for row in zip(topics, keys, asked, strict=True)]
    assert keys_of(written(batch(topic=topics, **given), use_partition=True)) == wanted
    wanted = [text.make_routing_key("a.b", *row) for row in zip(keys, asked, strict=True)]
    assert keys_of(written(batch(**given), topic="a.b", use_partition=True)) == wanted
    given.pop("key")
    wanted = [text.make_routing_key(topic, None, number) for topic, number in zip(topics, asked, strict=True)]
    assert keys_of(written(batch(topic=topics, **given), use_partition=True)) == wanted


@pytest.mark.parametrize(
    ("routing_key", "topic", "asked", "made"),
    [
        (b"orders", None, 2, b"orders.@2"),
        (b"orders", None, None, b"orders"),
        (b"orders.@.k.1", None, 2, b"orders.@2.k.1"),
        (b"orders.@1.k", None, 2, b"orders.@2.k"),
        (b"orders.@1.k", None, None, b"orders.@.k"),
        (b"orders.@1", None, None, b"orders"),
        (b"orders.@1.", None, 0, b"orders.@0."),
        (b"or.ders.@", None, 0, b"or.ders.@0"),
        (b"orders.eu", None, None, b"orders.eu"),
        (b"orders.eu", b"orders", 2, b"orders.@2.eu"),
        (b"orders.eu", b"orders.eu", 2, b"orders.eu.@2"),
        (b"orders.@alice", b"orders", 2, b"orders.@2.@alice"),
        (b"orders.\xff", b"orders", 2, b"orders.@2.\xff"),
        (b"orders.", b"orders", 2, b"orders.@2"),
    ],
)
def test_a_partition_takes_the_place_of_the_one_in_a_routing_key(routing_key, topic, asked, made):
    topics = {} if topic is None else {"topic": ([topic], pa.binary())}
    given = batch(routing_key=([routing_key], pa.binary()), partition=([asked], pa.int64()), value=["x"], **topics)
    assert keys_of(written(given, use_partition=True)) == [made]
    assert keys_of(written(given)) == [routing_key]


def test_a_partition_for_a_routing_key_whose_topic_is_not_said_is_an_error():
    given = batch(routing_key=["orders.@.eu", "orders.eu"], partition=[1, 1], value=["x", "x"])
    with pytest.raises(
        RowError, match=r"row 11 .*column routing_key: b'orders.eu': which part is the topic is not said"
    ):
        written(given, use_partition=True, first_row=10)


@pytest.mark.parametrize("number", [-1, 10**9, -(1 << 40)])
def test_a_partition_that_no_topic_can_have_is_named_with_its_row(number):
    given = batch(partition=([0, None, number], pa.int64()), value=["x"] * 3)
    with pytest.raises(RowError, match=f"row 12 .*column partition: {number}: must be 0 or more"):
        written(given, topic="t", use_partition=True, first_row=10)


def test_headers_of_any_bytes_come_back_to_the_byte():
    values = [bytes(range(256)), b"", b"\xff", b"plain"]
    lines = written(with_headers([("a1", value) for value in values]), topic="t")
    block = columns.Block(columns.of_bytes(0, b"1|1.000000|" + lines[0] + b"\n", False), "t", False)
    field = block.field(4)[0].as_py()
    assert [text.decode_bytes(each.partition(b"=")[2]) for each in field.split(b";")[1:]] == values
