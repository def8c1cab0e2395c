"""A stored line as a consumer sees it: whatever a client gave comes back, and no line can stop a consumer."""

import json
from base64 import b64decode

import pytest

from kmq.message import record
from kmq.message import text as message_text
from kmq.message.message import Message, messages


def read(line: bytes, topic: str = "orders", **more) -> Message:
    return Message(topic, 3, 17, line, **more)


def stored(routing_key: bytes, id: bytes = b"7", payload: bytes = b"x", ts: bytes = b"1.5") -> bytes:
    return b"42|1712345678.000250|%b|%b|%b|%b" % (routing_key, ts, id, payload)


def sent(topic, value, key=None, id="7", headers=(), partition=None) -> Message:
    """What a typed client sends, numbered by the broker, read by a consumer."""
    line = message_text.format_text(
        message_text.make_routing_key(topic, key, partition), value, message_text.make_id(id, headers), 1.5
    )
    block, _ = record.number([line[:-1]], 42, b"1712345678.000250")
    assert record.parse_stored(block[:-1]) is not None
    return read(block[:-1], topic)


def test_a_message_knows_where_it_is_stored_and_when_it_was_made():
    message = read(stored(b"orders.eu", b"9;p=shop:1"))
    assert (message.topic, message.partition, message.offset, message.seq) == ("orders", 3, 17, 42)
    assert (message.timestamp, message.recv_timestamp) == (1.5, 1712345678.00025)
    assert (message.id, message.producer, message.routing_key) == ("9", "shop:1", b"orders.eu")
    assert message.size == len(message.line) + 1


@pytest.mark.parametrize(
    ("topic", "routing_key", "key"),
    [
        ("orders", b"orders", None),
        ("orders", b"orders.", None),
        ("orders", b"orders.eu", b"eu"),
        ("orders", b"orders.eu.1", b"eu.1"),
        ("orders", b"orders.eu%2E1", b"eu.1"),
        ("orders", b"orders.@", None),
        ("orders", b"orders.@.", b""),
        ("orders", b"orders.@3", None),
        ("orders", b"orders.@3.", b""),
        ("orders", b"orders.@3.eu", b"eu"),
        ("orders", b"orders.@.@3", b"@3"),
        ("orders", b"orders.@alice", b"@alice"),
        ("orders", b"orders.a.@.b", b"a.@.b"),  # routed before marks were read: the mark names another topic
        ("orders.eu", b"orders.eu.@.k", b"k"),
        ("orders.eu", b"orders.eu", None),
        ("orders.eu", b"orders.eu.k", b"k"),
    ],
)
def test_the_key_is_what_follows_the_topic_or_its_mark(topic, routing_key, key):
    assert read(stored(routing_key), topic).key == key


def test_a_mark_is_a_key_in_records_from_before_marks():
    assert read(stored(b"orders.@.eu"), marks_from=42).key == b"eu"
    assert read(stored(b"orders.@.eu"), marks_from=43).key == b"@.eu"


@pytest.mark.parametrize(
    "value", [None, b"", b"x", b"a|b", b"\0", b"\n", b"\xff\xfe", "größe".encode(), bytes(range(256))]
)
@pytest.mark.parametrize("key", [None, "", "eu", "eu.1", "@3", b"\xff\0|;%\n"])
def test_a_typed_client_gets_exactly_the_bytes_and_nulls_it_gave(value, key):
    message = sent("orders", value, key)
    assert message.value == value
    assert message.key == (key.encode() if isinstance(key, str) else key)


def test_headers_keep_their_order_duplicates_nulls_and_names():
    headers = [
        ("b", b"1"),
        ("a", b"\xff;=|\n"),
        ("b", None),
        ("enc", b"b64"),
        ("", b""),
        ("p", b"x"),
        ("reason", b""),
        ("é=", b"2"),
    ]
    message = sent("orders", b"\0", headers=headers, id="a;b")
    assert message.headers == headers
    assert (message.value, message.id, message.producer) == (b"\0", "a;b", "")


def test_kmqs_own_headers_of_transport_are_hidden_and_reasons_shown():
    message = read(stored(b"dead.malformed", b";reason=nul;len=3;enc=b64;p=x;w", b"AAAA"), "dead")
    assert message.headers == [("reason", b"nul"), ("len", b"3")]
    assert (message.key, message.value) == (b"malformed", b"\0\0\0")


@pytest.mark.parametrize(
    ("field", "ts", "ms"),
    [
        (b"1712345678.123", 1712345678.123, 1712345678123),
        (b"0", 0.0, 0),
        (b"", 1712345678.00025, 1712345678000),
        (b"now", 1712345678.00025, 1712345678000),
        (b"nan", 1712345678.00025, 1712345678000),
        (b"1e400", 1712345678.00025, 1712345678000),
        (b"-1", 1712345678.00025, 1712345678000),
    ],
)
def test_without_a_producers_time_the_brokers_counts(field, ts, ms):
    message = read(stored(b"orders", ts=field))
    assert (message.timestamp, message.timestamp_ms) == (ts, ms)


def test_every_millisecond_of_a_second_comes_back_exact():
    for ms in range(1000):
        message = read(stored(b"orders", ts=b"1712345678.%03d" % ms))
        assert message.timestamp_ms == 1712345678000 + ms


def test_a_line_that_somebody_typed_wrong_stops_nobody():
    message = read(stored(b"orders.100%|".rstrip(b"|"), b"%;enc=b64;%zz=%", b"no base64!"))
    assert (message.key, message.value, message.headers) == (b"100%", b"no base64!", [("%zz", b"%")])
    assert json.dumps(message.as_dict()) and json.dumps(message.as_dict(text=True))


def test_what_is_no_stored_line_is_an_error_that_names_the_place():
    with pytest.raises(ValueError, match="orders/3 offset 17"):
        _ = read(b"1|2|3").value


def test_a_bare_newline_takes_an_offset_and_is_no_message():
    block = stored(b"orders", payload=b"a") + b"\n\n" + stored(b"orders", payload=b"b") + b"\n"
    assert [(m.offset, m.value) for m in messages("orders", 0, 5, block)] == [(5, b"a"), (7, b"b")]
    assert messages("orders", 0, 5, b"") == []


def test_json_has_base64_or_text_and_keeps_nulls():
    message = sent("orders", b"hi", "eu", headers=[("a-b", b"1"), ("none", None)])
    assert message.as_dict() == {
        "topic": "orders",
        "partition": 3,
        "offset": 17,
        "seq": 42,
        "timestamp": 1500,
        "key": "ZXU=",
        "value": "aGk=",
        "headers": [{"name": "a-b", "value": "MQ=="}, {"name": "none", "value": None}],
    }
    text = message.as_dict(text=True)
    assert (text["key"], text["value"], text["headers"][1]) == ("eu", "hi", {"name": "none", "value": None})
    assert sent("orders", None).as_dict(text=True)["value"] is None
    assert "encoding" not in text


@pytest.mark.parametrize("key, value, header", [(b"\xff\0", b"v", b"h"), (b"k", b"\xff", b"h"), (b"k", b"v", b"\xff")])
def test_json_of_what_is_no_text_has_base64_and_says_so(key, value, header):
    shown = sent("orders", value, key, headers=[("a", header)]).as_dict(text=True)
    assert shown["encoding"] == "base64"
    given = (b64decode(text) for text in (shown["key"], shown["value"], shown["headers"][0]["value"]))
    assert tuple(given) == (key, value, header)


def test_messages_compare_by_place_and_content():
    assert sent("orders", b"x") == sent("orders", b"x") != sent("orders", b"y")
    assert len({sent("orders", b"x"), sent("orders", b"x")}) == 1
    assert "orders/3 offset=17 key=None value=b'x'" in repr(sent("orders", b"x"))
