"""A message as JSON: every byte and null comes back, and what does not fit is refused by the name of its field."""

import itertools
import json
import random
from base64 import b64encode

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.producing import NewMessage
from kmq.gateway.http.messages import load, parse_values, writer
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


def there_and_back(given, form):
    """What is shown of a message that was given in this form. It fits the schema, and a second time it is the same."""
    shown = json.loads(writer(form)(stored(load(given, form))))
    check(SCHEMAS["Message"], shown)
    again = {name: value for name, value in shown.items() if name != "offset"}
    assert json.loads(writer(form)(stored(load(again, form)))) == shown
    return shown


def as_base64(value):
    return None if value is None else b64encode(value).decode()


def test_every_byte_and_null_comes_back_as_base64():
    random.seed(7)
    for _ in range(300):
        pick = lambda: random.choice(BYTES)  # noqa: E731
        headers = [(random.choice(NAMES), as_base64(pick())) for _ in range(random.randrange(4))]
        given = {"key": as_base64(pick()), "value": as_base64(pick()), "timestamp": random.randrange(10**13)}
        given["headers"] = as_list = [{"name": name, "value": value} for name, value in headers]
        shown = there_and_back(given, "base64")
        has_all = len(dict(headers)) == len(headers) and None not in dict(headers).values()
        assert {name: shown[name] for name in given} == given | {"headers": dict(headers) if has_all else as_list}


def test_every_byte_and_null_comes_back_in_every_form():
    """What a form cannot show is written otherwise, and says so."""
    for key, value, header in itertools.product(BYTES, [*BYTES, b"null", b'{"a": 1}\r\n', b"1e400", b"[NaN]"], BYTES):
        new = NewMessage(key, value, [("a", header), ("b", b"t")])
        for form in (None, "text", "base64", "json"):
            shown = parse_values(writer(form)(stored(new)).encode())  # with all digits
            check(SCHEMAS["Message"], shown)
            if key is not None and form != "base64" and "keyEncoding" not in shown:
                assert shown["key"] == key.decode()
            again = load({name: each for name, each in shown.items() if name != "offset"}, form)
            assert (again.key, list(again.headers)) == (key, list(new.headers))
            if form == "json" and value == b'{"a": 1}\r\n':
                value = b'{"a":1}'
            assert again.value == value


def test_the_form_without_a_name_has_text_for_the_key_and_base64_for_the_value():
    given = {"key": "user-7", "value": "aGVsbG8=", "headers": {"trace-id": "a1"}}
    shown = there_and_back(given, None)
    assert {name: shown[name] for name in given} == given and len(shown) == 6
    message = load(given, None)
    assert (message.key, message.value, list(message.headers)) == (b"user-7", b"hello", [("trace-id", b"a1")])


@pytest.mark.parametrize(
    ("value", "stored_as"),
    [
        ({"b": [1, 2.50, -0.0, 1e5], "a": {"ü": "\u2028"}}, None),
        ("text", b'"text"'),
        ([], b"[]"),
        (True, b"true"),
        (7, b"7"),
        (None, None),
    ],
)
def test_with_json_a_value_is_any_json(value, stored_as):
    shown = there_and_back({"value": value}, "json")
    assert shown["value"] == value and "encoding" not in shown
    if stored_as is not None:
        assert load({"value": value}, "json").value == stored_as


def test_a_number_keeps_its_digits():
    text = b'{"value": {"price": 1.10, "long": 12345678901234567890.123456789012345678, "huge": 1e400, "n": [0.10]}}'
    assert load(parse_values(text), "json").value == (
        b'{"price":1.10,"long":12345678901234567890.123456789012345678,"huge":1e400,"n":[0.10]}'
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b'{"value": {"a": {"b": 1, "b": 2}}}', "value"),
        (b'{"value": 1, "value": 2}', "value"),
        (b'{"value": 1, "headers": {"a": "1", "a": "2"}}', "headers.a"),
        (b'{"value": "\\ud800"}', "value"),
        (b'{"value": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "value"),
    ],
)
def test_json_that_is_not_one_value_is_refused_by_the_name_of_its_field(text, field):
    with pytest.raises(RequestRefused) as raised:
        load(parse_values(text), "json")
    assert (raised.value.code, raised.value.fields["field"]) == ("bad_field", field)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('"value": 1, "key": 1.5', "key"),
        ('"value": 1, "id": 1.5', "id"),
        ('"value": 1, "timestamp": 1.5', "timestamp"),
        ('"value": 1, "headers": {"a": 1.5}', "headers[0].value"),
        ('"value": 1, "headers": [{"name": 1.5}]', "headers[0].name"),
        ('"encoding": "base64", "value": 1e55', "value"),
        ('"encoding": "text", "value": 1.5', "value"),
    ],
)
def test_a_number_is_no_text(more, field):
    with pytest.raises(RequestRefused) as raised:
        load(parse_values(f"{{{more}}}".encode()), "json")
    assert (raised.value.code, raised.value.fields["field"]) == ("bad_field", field)


@pytest.mark.parametrize("text", ["", "plain", 'q"\\\n\u2028', "ü€😀", None])
def test_every_text_comes_back_as_text(text):
    shown = there_and_back({"key": text, "value": text}, "text")
    assert (shown["key"], shown["value"]) == (text, text) and "encoding" not in shown


def test_what_is_no_text_is_base64_and_says_so_both_ways():
    header = {"name": "h", "value": "/w==", "encoding": "base64"}
    given = {"key": "/w==", "keyEncoding": "base64", "value": "/w==", "encoding": "base64", "headers": [header]}
    shown = there_and_back(given, "text")
    assert {name: shown[name] for name in given} == given
    del given["encoding"]  # the value is base64 where no form is named
    shown = there_and_back(given, None)
    assert {name: shown[name] for name in given} == given and "encoding" not in shown
    plain = there_and_back({"key": "k", "value": "/w==", "encoding": "base64"}, "text")
    assert (plain["key"], plain["value"], plain["encoding"]) == ("k", "/w==", "base64")


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
        ({"value": "", "keyEncoding": "hex"}, "keyEncoding"),
        ({"value": "", "headers": 7}, "headers"),
        ({"value": "", "headers": {"a": 1}}, "headers[0].value"),
        ({"value": "", "headers": {"a": None}}, "headers.a"),
        ({"value": "", "headers": {"": "YQ=="}}, "headers[0].name"),
        ({"value": "", "headers": {str(n): "" for n in range(1001)}}, "headers"),
        ({"value": "", "headers": [{"name": "a", "encoding": "hex"}]}, "headers[0].encoding"),
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
        load(given, "base64")
    assert (raised.value.code, raised.value.fields["field"]) == ("bad_field", field)
    assert str(raised.value).startswith(f"{field}: ")


def test_half_a_surrogate_pair_is_refused_as_text():
    with pytest.raises(RequestRefused, match="value: must be text that UTF-8 can write"):
        load({"value": "\ud83d"}, "text")


def test_a_field_of_a_batch_is_named_with_its_place():
    with pytest.raises(RequestRefused, match=r"^messages\[3\]\.headers\[0\]\.name: is missing"):
        load({"value": "", "headers": [{}]}, None, "messages[3]")


def test_headers_that_are_kmqs_own_names_are_the_users_all_the_same():
    assert format_headers([("p", b"x"), ("enc", None)]) == b";%70=x;%65nc"


def test_a_mark_is_one_only_from_the_seq_on_from_which_it_counts():
    dump = writer("text")
    lines = [b"%d|1.000000|t.@.eu|1|0|x" % seq for seq in (5, 12)]
    shown = [json.loads(dump(Message("t", 0, offset, line, 10))) for offset, line in enumerate(lines)]
    assert [message["key"] for message in shown] == ["@.eu", "eu"]
