"""Columns to lines: what the functions of kmq/message/text.py say of each message, column by column."""

from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

from made_batches import batch, random_, some_bytes, some_text, written  # noqa: E402

from kmq.message import text as message_text  # noqa: E402
from kmq.spark.sink.lines import RowError, block, numbers, pieces, to_lines  # noqa: E402

HEADERS = pa.map_(pa.string(), pa.string())


def some_headers():
    names = random_.sample(("host", "pod-1", "p", "enc", "a b", "x=y", "reason", "len"), random_.randrange(4))
    return None if random_.random() < 0.1 else [(name, random_.choice((None, some_text()))) for name in names]


def expected(topic, key, id, headers, value):
    """What a Python client makes of a message."""
    kept = {name: text for name, text in headers or () if name not in ("reason", "len")}
    line = message_text.format_text(
        message_text.make_routing_key(topic, key), value, message_text.make_id(str(id), kept), 1.5
    )
    return line[:-1]


# --- like a client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round", range(50))
def test_any_message_becomes_the_line_that_a_client_makes(round):
    count = random_.randrange(1, 60)
    topics = [random_.choice(("orders", "a.b", "_x-1")) for _ in range(count)]
    keys = [random_.choice((None, "", some_text())) for _ in range(count)]
    headers = [some_headers() for _ in range(count)]
    headers = [h and [(name, text) for name, text in h if name not in ("reason", "len")] for h in headers]
    values = [random_.choice((None, some_bytes(), some_bytes())) for _ in range(count)]
    ids = sorted(random_.sample(range(10**18), count))
    given = batch(topic=topics, key=(keys, pa.string()), headers=(headers, HEADERS), value=(values, pa.binary()))
    made = written(given, ids)
    assert made == [expected(*row) for row in zip(topics, keys, ids, headers, values, strict=True)]
    low = random_.randrange(count)  # a part of a batch lies in the same memory
    assert written(given[low:], ids[low:]) == made[low:]


@pytest.mark.parametrize("round", range(50))
def test_any_value_comes_back_as_it_was(round):
    values = [some_bytes(40) for _ in range(100)]
    for line, value in zip(written(batch(value=(values, pa.binary())), topic="t"), values, strict=True):
        *_, id, payload = line.split(b"|", 3)
        assert message_text.decode_payload(id, payload) == value


def test_a_character_cut_by_the_end_of_a_row_is_no_text_though_the_whole_column_is():
    first, second = written(batch(value=([b"\xc3", b"\xa9"], pa.binary())), topic="t")
    assert first.endswith(b"|0;enc=b64|ww==") and second.endswith(b"|1;enc=b64|qQ==")


def test_text_is_taken_like_binary():
    texts = ["plain", "é", "two\nlines", ""]
    as_text = written(batch(value=(texts, pa.string())), topic="t")
    assert as_text == written(batch(value=([text.encode() for text in texts], pa.binary())), topic="t")
    assert as_text == written(batch(value=(texts, pa.large_string())), topic="t")


# --- columns -------------------------------------------------------------------------------------------------------------


def test_a_routing_key_goes_as_it_is_also_one_that_is_no_text():
    given = batch(routing_key=([b"a.k%2E1", b"a.\xff\x01", b"b"], pa.binary()), value=["x"] * 3)
    assert [line.split(b"|")[0] for line in written(given)] == [b"a.k%2E1", b"a.\xff\x01", b"b"]


def test_the_topic_option_wins_over_the_columns_of_a_copy():
    given = batch(routing_key=["a.k"], topic=["a"], key=["k"], value=["x"])
    assert written(given, topic="b") == [b"b.@.k|1.500000|0|x"]
    assert written(given) == [b"a.k|1.500000|0|x"]


def test_a_key_may_be_any_bytes_and_a_topic_with_a_dot_is_said_exactly():
    given = batch(topic=["a", "a.b", "a.b", "a"], key=([b"\xff.1", None, b"", None], pa.binary()), value=["x"] * 4)
    assert [line.split(b"|")[0] for line in written(given)] == [b"a.@.%FF%2E1", b"a.b.@", b"a.b.@.", b"a"]
    assert [line.split(b"|")[0] for line in written(given.select(["value"]), topic="c.d")] == [b"c.d.@"] * 4


def test_a_producer_ts_is_text_or_a_time_and_now_where_it_is_null():
    moment = datetime(2026, 1, 2, 3, 4, 5, 60, UTC)
    for given, stamps in (
        (["17.25", "", None], [b"17.25", b"", b"1.500000"]),
        (([moment, None, datetime(1969, 12, 31, 23, 59, 59, 1, UTC)], pa.timestamp("us", "UTC")),
         [b"%d.000060" % moment.timestamp(), b"1.500000", b"-1.000001"]),
    ):  # fmt: skip
        made = written(batch(producer_ts=given, value=["x"] * 3), topic="t")
        assert [line.split(b"|")[1] for line in made] == stamps


def test_a_clients_own_names_stay_its_own_and_headers_of_dead_letters_keep_their_names():
    rows = [[("p", "other"), ("enc", "b64"), ("reason", "bad json")], [("a b", "x")], [("len", "7"), ("null", None)]]
    made = written(batch(headers=(rows, HEADERS), value=(["x"] * 3)), topic="t")
    assert [line.split(b"|")[2] for line in made] == [
        b"0;%70=other;%65nc=b64;reason=bad%20json",
        b"1;a%20b=x",
        b"2;len=7;null",
    ]


def test_ids_are_numbers_whatever_their_type():
    for ids in ([1, 999_999_999_999_999_999], ["1", "999999999999999999"], [b"1", b"999999999999999999"]):
        assert numbers(batch(id=ids)).tolist() == [1, 10**18 - 1]


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "row", "column", "says"),
    [
        ({"value": ["x"] * 3, "routing_key": ["a.@", "a.@.b", "a.ü.@"]}, 2, "routing_key", "bad_topic"),
        ({"value": ["x"] * 3, "topic": ["t", "t", "a b"]}, 2, "topic", "a b"),
        ({"value": ["x"] * 2, "topic": ["t", "__consumer_offsets"]}, 1, "topic", "reserved_topic"),
        ({"value": ["x"] * 2, "topic": (["t", None], pa.string())}, 1, "topic", "null"),
        ({"value": ["x"] * 2, "topic": ["t", "x" * 201]}, 1, "topic", "bad_topic"),
        ({"value": ["x"], "topic": ([b"\xff"], pa.binary())}, 0, "topic", "xff"),
        ({"value": ["x"] * 3, "routing_key": ["a.b", "a", ".b"]}, 2, "routing_key", "bad_topic"),
        ({"value": ["x"] * 3, "routing_key": ["a.b", "", "b"]}, 1, "routing_key", "empty_routing_key"),
        ({"value": ["x"] * 2, "routing_key": ["a.b", "a.|b"]}, 1, "routing_key", "newline"),
        ({"value": ["x"] * 2, "routing_key": ["a.b", "a\nb"]}, 1, "routing_key", "newline"),
        ({"value": ["x"] * 2, "routing_key": ["a", "!b"]}, 1, "routing_key", "control_byte"),
        ({"value": ["x"] * 2, "topic": ["a", "a"], "producer_ts": ["", "1|2"]}, 1, "producer_ts", "newline"),
        ({"value": ["x", "y" * 3000], "topic": ["a"] * 2}, 1, "value", "KMQ_MAX_LINE"),
    ],
)  # fmt: skip
def test_a_row_that_no_line_can_hold_is_named_with_its_column_and_limit(columns, row, column, says):
    with pytest.raises(RowError, match=rf"row {100 + row} .*column {column}:.*{says}"):
        written(batch(**columns), first_row=100, max_line=2000)


def test_a_line_of_just_the_limit_is_taken():
    made = written(batch(value=["x" * 70]), topic="t", max_line=83)
    assert len(made[0]) == 83
    with pytest.raises(RowError, match="84"):
        written(batch(value=["x" * 71]), topic="t", max_line=83)


@pytest.mark.parametrize("bad", ["", "x", "-1", "1" * 19, "0x1F", "1.0", " 1", None])
def test_an_id_that_is_no_number_of_18_digits_is_named(bad):
    with pytest.raises(RowError, match=r"row 6 .*column id: .*18 digits"):
        numbers(batch(id=(["7", bad], pa.string())), first_row=5)


# --- pieces --------------------------------------------------------------------------------------------------------------


def test_pieces_are_the_same_lines_in_order_each_of_about_so_many_bytes():
    for sizes in ([5] * 100, [5000, 1, 1, 5000, 1], [1], [0] * 7):
        made = to_lines(batch(value=["x" * n for n in sizes]), np.arange(len(sizes)), 1.5, topic="t", max_line=9999)
        cut = pieces(made, 100)
        assert b"".join(map(block, cut)) == block(made)
        assert all(len(piece) == 1 or 0 < len(block(piece)) <= 100 for piece in cut)
        assert all(len(block(a)) + len(block(b[:1])) > 100 for a, b in pairwise(cut))
