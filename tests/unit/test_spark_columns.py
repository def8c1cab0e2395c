"""Stored lines as Arrow columns: the same as splitting each line by hand, whatever bytes are in it."""

import random
from base64 import b64encode
from urllib.parse import unquote_to_bytes

import pytest

from kmq.errors import ConfigError
from kmq.message import record
from kmq.message.message import Message
from kmq.message.routing import key_behind
from kmq.message.text import decode_payload

records = pytest.importorskip("kmq.gateway.kafka.records")
columns = pytest.importorskip("kmq.spark.source.columns")
types = pytest.importorskip("pyspark.sql.types")
to_arrow_schema = pytest.importorskip("pyspark.sql.pandas.types").to_arrow_schema
WHERE = columns.Where("here", "orders", 2, "id of here")


def column(lines, name, exact=False, offset=0, by_seq=False):
    block = columns.Block(columns.of_bytes(offset, lines, False), "orders", by_seq)
    made = columns._MAKE[name](block, WHERE, exact)
    return (made.cast("int64") if name == "recv_ts" else made).to_pylist()  # a float of seconds has no microseconds


def by_hand(line):
    """The columns of one stored line, field by field."""
    seq, ts, key, producer_ts, id, payload = line.split(b"|", 5)
    name, *headers = id.split(b";")
    text = lambda raw: raw.decode(errors="replace")  # noqa: E731
    plain = lambda raw: text(unquote_to_bytes(raw)) if b"%" in raw else text(raw)  # noqa: E731
    pairs = [
        each.partition(b"=")
        for each in headers
        if len(each.partition(b"=")[0]) != 1 and each.partition(b"=")[0] != b"enc"
    ]
    # A map has a name once.
    of_name = {plain(name): plain(value) if equals else None for name, equals, value in reversed(pairs)}
    names = list(dict.fromkeys(plain(name) for name, _, _ in pairs))
    value = decode_payload(id, payload)
    key_text = key_behind(b"orders", key)
    return {
        "seq": int(seq),
        "recv_ts": record.parse_ts(ts),
        "key": None if key_text is None else plain(key_text),
        "key_bytes": None if key_text is None else unquote_to_bytes(key_text),
        "routing_key": text(key),
        "producer_ts": text(producer_ts),
        "id": plain(name),
        "headers": [(name, of_name[name]) for name in names],
        "value": value,
        "value_text": None if value is None else text(value),
        "line": line,
        "broker": "here",
        "topic": "orders",
        "partition": 2,
        "timestampType": 1,
        "origin_broker": "id of here",
    }


def any_bytes(rng, longest, without=b"\0\n"):
    pool = rng.choice([bytes(range(97, 123)), bytes(range(256)), "äöü€😀 xyz".encode(), b"%;=41ab"])
    raw = b"".join(bytes([rng.choice(pool)]) for _ in range(rng.randrange(longest)))
    return raw.translate(None, without)


def random_line(rng, seq):
    mark = b".@" + rng.choice([b"", b"3", b"0123456789", b"x", b"1x"])
    key = b"orders" + rng.choice([b"", mark]) + rng.choice([b"", b"." + any_bytes(rng, 12, b"\0\n|")])
    headers = b"".join(
        b";" + any_bytes(rng, 6, b"\0\n|;") + rng.choice([b"", b"=" + any_bytes(rng, 6, b"\0\n|;")])
        for _ in range(rng.randrange(3))
    )
    payload = any_bytes(rng, rng.choice([1, 60]))
    if rng.random() < 0.2:
        headers, payload = headers + b";enc=b64", b64encode(payload)
    id = any_bytes(rng, 8, b"\0\n|;")
    return b"%d|%d.%06d|%b|%b|%b%b|%b" % (
        seq, rng.randrange(10**10), rng.randrange(10**6), key, any_bytes(rng, 9, b"\0\n|"), id, headers, payload,
    )  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_columns_are_what_each_line_says(seed):
    rng = random.Random(seed)
    lines = [random_line(rng, n) if rng.random() < 0.9 else b"" for n in range(1, rng.randrange(2, 200))]
    text = b"\n".join(lines) + b"\n"
    expected = [by_hand(line) for line in lines if line]
    for name in columns._MAKE:
        if name == "offset":
            continue
        found = column(text, name)
        assert found == [row[name] for row in expected], name


@pytest.mark.parametrize("name", columns.TEXT)
def test_text_asked_for_as_binary_is_exact(name):
    line = b"1|2.000000|orders.k\xff%41|\xfets|i\xfd%42;h=1|pay\xff"
    exact = {"key": b"k\xff%41", "routing_key": b"orders.k\xff%41", "producer_ts": b"\xfets", "id": b"i\xfd%42"}
    assert column(line + b"\n", name, exact=True) == [exact.get(name, b"pay\xff")]


def test_offsets_count_what_compaction_took_and_wal_offsets_are_seqs():
    text = b"\n7|1.000000|orders|||a\n\n\n9|1.000000|orders|||b\n"
    assert column(text, "offset", offset=100) == [101, 104]
    assert column(text, "offset", offset=100, by_seq=True) == [7, 9]
    assert column(text, "key", by_seq=True) == [None, None]


def test_a_key_that_was_stored_before_there_were_marks_keeps_what_looks_like_one():
    text = b"".join(b"%d|1.000000|orders.@3.k|||\n" % seq for seq in (8, 9, 10)) + b"11|1.000000|orders.@|||\n"
    block = columns.Block(columns.of_bytes(0, text, False), "orders", False, marks_from=9)
    assert block.key().to_pylist() == [b"@3.k", b"k", b"k", None]


def test_a_key_ends_where_its_field_does():
    text = b"1|1.000000|orders|@|x|\n2|1.000000|orders.|@3|x|\n3|1.000000|orders.@|3|x|\n4|1.000000|orders.@3|4.|.|\n"
    assert column(text, "key", exact=True) == [None] * 4


def test_a_time_keeps_its_microseconds():
    block = columns.Block(columns.of_bytes(0, b"1|9999999999.999999|orders|||\n", False), "orders", False)
    assert block.recv_micros().tolist() == [9_999_999_999_999_999]


@pytest.mark.parametrize("text", [b"", b"\n", b"\n\n\n"])
def test_no_records_are_no_rows(text):
    for name in columns._MAKE:
        assert column(text, name) == []


def test_a_payload_that_says_base64_and_is_none_is_kept():
    assert column(b"1|1.000000|orders||x;enc=b64|abc\n", "value") == [b"abc"]


def test_a_value_that_is_stored_without_its_newline_has_it():
    rows = (b";p=a;enc=lf|one", b";enc=lf;a=1|", b"|;enc=lf|", b";enc=lfx|two", b";enc=b64|YQo=", b"|")
    lines = b"".join(b"%d|1.000000|orders||x%b\n" % (seq, row) for seq, row in enumerate(rows, 1))
    assert column(lines, "value") == [b"one\n", None, b";enc=lf|", b"two", b"a\n", None]
    assert [Message("orders", 0, 0, line).value for line in lines.splitlines()] == column(lines, "value")


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("nothing", "string", "no column 'nothing'"),
        ("seq", "string", "seq is bigint"),
        ("line", "string", "line is binary"),
        ("valu", "binary", "no column 'valu'; did you mean value?"),
        ("headers", "array<string>", "headers is map<string,string> or array<struct<key:string,value:binary>>, not"),
        ("origin_offset", "int", "origin_offset is bigint"),
    ],
)
def test_a_schema_that_cannot_be_had_is_refused(name, kind, says):
    with pytest.raises(ConfigError, match=says):
        columns.check(name, kind)


def batch(lines, **kinds):
    """The columns of these types as rows, as a reader makes them."""
    schema = types.StructType([types.StructField(name, kind) for name, kind in kinds.items()])
    selection = columns.select((name, kind.simpleString()) for name, kind in kinds.items())
    assert selection.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)
    block = columns.Block(columns.of_bytes(40, lines, False), "orders", False)
    return columns.batch(block, WHERE, *selection).to_pylist()


PAIRS = types.ArrayType(
    types.StructType([types.StructField("key", types.StringType()), types.StructField("value", types.BinaryType())])
)


def test_headers_are_structs_as_kafkas_connector_has_them_where_asked():
    text = (
        b"1|1.000000|orders||1;p=auto-k2.1;aa=x%FF;aa=;bb;%70=own;enc=b64|dg==\n"
        b"2|1.000000|orders||2;p=me|v\n3|1.000000|orders||3;%C3%BC=\xfe|v\n"
    )
    assert batch(text, headers=PAIRS) == [
        {
            "headers": [
                {"key": "aa", "value": b"x\xff"},
                {"key": "aa", "value": b""},
                {"key": "bb", "value": None},
                {"key": "p", "value": b"own"},
            ]
        },
        {"headers": None},
        {"headers": [{"key": "ü", "value": b"\xfe"}]},
    ]
    for none in (b"1|1.000000|orders||1|v\n", b"\n1|1.000000|orders||1|v\n"):
        assert batch(none, headers=PAIRS) == [{"headers": None}]
    assert batch(b"\n", headers=PAIRS) == []


@pytest.mark.parametrize("seed", range(20))
def test_headers_are_the_same_as_a_consumer_and_a_client_of_kafka_are_given(seed):
    rng = random.Random(seed)
    lines = [random_line(rng, n) for n in range(1, 30)]
    rows = batch(b"\n".join(lines) + b"\n", headers=PAIRS)
    for line, row in zip(lines, rows, strict=True):
        given = Message("orders", 2, 0, line).headers
        assert [(each["key"], each["value"]) for each in row["headers"] or ()] == given
        _, semicolon, field = line.split(b"|", 5)[4].partition(b";")
        kafka = records._stored_headers[semicolon + field][0]
        assert kafka[0] == 2 * len(given) and all((value or b"") in kafka for _, value in given)


def test_columns_of_origin_and_time_are_those_of_the_record(monkeypatch):
    parsed = []
    made = columns.Block.recv_micros
    monkeypatch.setattr(columns.Block, "recv_micros", lambda block: parsed.append(1) or made(block))
    names = ("recv_ts", "timestamp", "origin_broker", "origin_topic", "origin_partition", "origin_offset")
    kinds = {"int": types.IntegerType(), "bigint": types.LongType(), "string": types.StringType()}
    given = {name: kinds.get((columns.COLUMNS | columns.ORIGIN)[name], types.TimestampType()) for name in names}
    (row,) = batch(b"\n7|1.000002|orders||1|v\n", **given)
    assert row["timestamp"] == row["recv_ts"] and row["timestamp"].microsecond == 2
    assert [row[name] for name in names[2:]] == ["id of here", "orders", 2, 41]
    assert parsed == [1], "recv_ts is parsed once"


def test_newlines_are_counted():
    assert len(columns.of_bytes(0, b"\n\nab\nc", False).newlines) == 3


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("key_bytes", [5, 150])
def test_fields_of_long_lines_are_cut_where_the_bars_are(seed, key_bytes):
    """Their heads hold the bars, or do not; short lines between them have the next line's bars in theirs."""
    rng = random.Random(seed)
    payload = lambda: bytes(rng.choice(b"abc|") for _ in range(rng.choice([0, 3, 3000])))  # noqa: E731
    key = b"orders." + b"k" * (key_bytes if seed % 2 else 5)
    lines = [b"%d|1.000000|%b||%d|%b" % (n, key, n, payload()) for n in range(60)]
    lines += [b"60|1.000000|orders|||" + b"z" * (rng.randrange(300))]
    text = b"".join(line + rng.choice([b"\n", b"\n\n"]) for line in lines)
    block = columns.Block(columns.of_bytes(0, text, False), "orders", False)
    for number in range(6):
        assert block.field(number).to_pylist() == [line.split(b"|", 5)[number] for line in lines]
