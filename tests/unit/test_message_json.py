"""A message as JSON: every byte and null comes back, and what does not fit is refused by the name of its field."""

import json
import random
from base64 import b64encode

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.http.messages import Writer, load
from kmq.gateway.http.schema import SCHEMAS, check
from kmq.message.message import Message
from kmq.message.text import format_headers, format_text, make_id, make_routing_key

BYTES = [None, b"", b"a", b"\0", b"\xff\xfe", "ü|;=%\n".encode(), b"enc=b64", bytes(range(256))]
NAMES = ["a", "p", "enc", "reason", "x-y", "ä", "a=b", "a;b", "%41", " "]


def stored(new, offset=0):
    """The message as the broker stores it, read again."""
    key = make_routing_key("t", new.key, new.partition)
    id = make_id(new.id or "", new.headers)
    line = format_text(key, new.value, id, new.timestamp if new.timestamp is not None else 1.0)
    return Message("t", 0, offset, b"1|1.000000|" + line[:-1])


def dump(message, is_text):
    return Writer(is_text).dump(message)


def as_base64(value):
    return None if value is None else b64encode(value).decode()


def test_every_byte_and_null_comes_back_as_base64():
    random.seed(7)
    for _ in range(300):
        pick = lambda: random.choice(BYTES)  # noqa: E731
        headers = [(random.choice(NAMES), pick()) for _ in range(random.randrange(4))]
        given = {"key": as_base64(pick()), "value": as_base64(pick()), "timestamp": random.randrange(10**13)}
        given["headers"] = [{"name": name, "value": as_base64(value)} for name, value in headers]
        shown = json.loads(dump(stored(load(given, is_text=False)), is_text=False))
        check(SCHEMAS["Message"], shown)
        assert {name: shown[name] for name in given} == given


@pytest.mark.parametrize("text", ["", "plain", 'q"\\\n\u2028', "ü€😀", None])
def test_every_text_comes_back_as_text(text):
    shown = json.loads(dump(stored(load({"key": text, "value": text}, is_text=True)), is_text=True))
    assert (shown["key"], shown["value"]) == (text, text) and "encoding" not in shown


def test_what_is_no_text_is_base64_and_says_so_both_ways():
    shown = json.loads(dump(stored(load({"key": "aw==", "value": "/w==", "encoding": "base64"}, True)), True))
    assert (shown["key"], shown["value"], shown["encoding"]) == ("aw==", "/w==", "base64")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "value"),
        ([], "body"),
        (None, "body"),
        ({"value": 1}, "value"),
        ({"value": True}, "value"),
        ({"value": {"a": 1}}, "value"),
        ({"value": "*"}, "value"),
        ({"value": "YQ"}, "value"),
        ({"value": "YQ==YQ=="}, "value"),
        ({"value": "Y Q=="}, "value"),
        ({"value": "", "key": 7}, "key"),
        ({"value": "", "key": "*"}, "key"),
        ({"value": "", "other": 1}, "other"),
        ({"value": "", "partition": -1}, "partition"),
        ({"value": "", "partition": "0"}, "partition"),
        ({"value": "", "partition": True}, "partition"),
        ({"value": "", "partition": 1.0}, "partition"),
        ({"value": "", "partition": None}, "partition"),
        ({"value": "", "partition": 1 << 63}, "partition"),
        ({"value": "", "timestamp": -1}, "timestamp"),
        ({"value": "", "timestamp": 10**15}, "timestamp"),
        ({"value": "", "timestamp": "now"}, "timestamp"),
        ({"value": "", "id": ""}, "id"),
        ({"value": "", "id": 7}, "id"),
        ({"value": "", "id": "x" * 257}, "id"),
        ({"value": "", "id": "\ud800"}, "id"),
        ({"value": "", "encoding": "utf-8"}, "encoding"),
        ({"value": "", "headers": {}}, "headers"),
        ({"value": "", "headers": [1]}, "headers[0]"),
        ({"value": "", "headers": [{"value": ""}]}, "headers[0].name"),
        ({"value": "", "headers": [{"name": ""}]}, "headers[0].name"),
        ({"value": "", "headers": [{"name": "\udfff"}]}, "headers[0].name"),
        ({"value": "", "headers": [{"name": "a"}, {"name": "a", "value": "*"}]}, "headers[1].value"),
        ({"value": "", "headers": [{"name": "a", "more": 1}]}, "headers[0].more"),
        ({"value": "", "headers": [{"name": "a"}] * 1001}, "headers"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_field(given, field):
    with pytest.raises(RequestRefused) as raised:
        load(given, is_text=False)
    assert (raised.value.code, raised.value.fields["field"]) == ("bad_field", field)
    assert str(raised.value).startswith(f"{field}: ")


def test_half_a_surrogate_pair_is_refused_as_text():
    with pytest.raises(RequestRefused, match="value: must be text that UTF-8 can write"):
        load({"value": "\ud83d"}, is_text=True)


def test_a_field_of_a_batch_is_named_with_its_place():
    with pytest.raises(RequestRefused, match=r"^messages\[3\]\.headers\[0\]\.name: is missing"):
        load({"value": "", "headers": [{}]}, False, "messages[3]")


def test_headers_that_are_kmqs_own_names_are_the_users_all_the_same():
    assert format_headers([("p", b"x"), ("enc", None)]) == b";%70=x;%65nc"


def test_a_mark_is_one_only_from_the_seq_on_from_which_it_counts():
    writer = Writer(is_text=True)
    lines = [b"%d|1.000000|t.@.eu|1|0|x" % seq for seq in (5, 12)]
    shown = [json.loads(writer.dump(Message("t", 0, offset, line, 10))) for offset, line in enumerate(lines)]
    assert [message["key"] for message in shown] == ["@.eu", "eu"]
