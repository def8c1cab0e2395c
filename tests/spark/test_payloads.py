"""Payloads: what is one JSON object of a schema is told as Python's strict json tells it, and nothing of it is lost."""

import json
import random
from contextlib import nullcontext
from decimal import Decimal

import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from time_zone import tokyo

from kmq.spark.pipelines import payloads
from kmq.spark.pipelines.payloads import WHOLE, infer, parse

SCHEMA = "n bigint, x double, user string, ok boolean, tags array<string>, at struct<x:int,deep:struct<y:double>>"
SCHEMA += ", items array<struct<sku:string,qty:int>>, counts map<string,bigint>"
TYPED = "`a` bigint, d double, s string, st struct<x:int>, l array<bigint>, ls array<struct<x:int>>, m map<string,int>"


def of_values(spark, payloads, schema, rest=False):
    """The rows of these payloads, in order."""
    made = [(n, text.encode() if isinstance(text, str) else text) for n, text in enumerate(payloads)]
    return parse(spark.createDataFrame(made, "no int, value binary"), schema, rest).orderBy("no").collect()


# --- the oracle: Python's json, strict ---------------------------------------------------------------------------------


def refuse(constant):
    raise ValueError(constant)


def verdict(payload):
    """(reason, object) as Python's json has it."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return "not_utf8", None
    try:
        found = json.loads(text, parse_constant=refuse, parse_float=Decimal)
    except (ValueError, RecursionError):
        return "not_json", None
    if not isinstance(found, dict):
        return "not_object", None
    try:
        json.dumps(found, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return "not_utf8", None
    return None, found


def document(dice):
    """A good object of SCHEMA."""
    whole = {
        "n": dice.choice([0, -1, 7, 2**53 + 1, 2**63 - 1]),
        "x": dice.choice([0.5, -1e-7, 3, 1.7976931348623157e308, 48.94178698926073]),
        "user": dice.choice(["", "u", "a:b", "}{", '"', "\\", "é", "😀", "\u2028", "\x7f", "1.50", "[1, 2]", "null"]),
        "ok": dice.choice([True, False, None]),
        "tags": [dice.choice(["a", "b:", "}", None, "7"]) for _ in range(dice.randrange(3))],
        "at": {"x": 1, "deep": {"y": 2.5}},
        "items": [{"sku": "s", "qty": n} for n in range(dice.randrange(3))],
        "counts": {"a": 1, "b:": 2},
    }
    fields = dice.sample(sorted(whole), dice.randrange(len(whole) + 1))
    text = json.dumps(
        {name: whole[name] for name in fields},
        ensure_ascii=dice.random() < 0.5,
        separators=dice.choice([(",", ":"), (", ", ": ")]),
    )
    return text.encode()


PIECES = [b"]}", b"}", b"{", b"]", b"[", b'"', b"'", b",", b":", b"\\", b"\0", b"\x01", b"\n", b"\r", b"\t", b" "]
PIECES += [b"NaN", b"Infinity", b"-", b"01", b"1e5", b"1e400", b"9" * 25, b"null", b"true", b"/*c*/", b"//c", b"#"]
PIECES += [
    "\ufeff".encode(),
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\\u0000",
    b"\\x",
    "\ufffd".encode(),
]
PIECES += [b'"n":1,', b'"n":"x",', b'"new":{"a":[1]},', b'{"a":1}', b'],"p":[{"n":1}', b'}],"x":[{"n":1}', b"[" * 1200]


def mutant(dice):
    text = document(dice)
    for _ in range(dice.choice([0, 1, 1, 1, 2])):
        at = dice.randrange(len(text) + 1)
        end = dice.choice([at, at, at, at + 1, at + 3])
        text = dice.choice([text[:at], text[at:], text[:at] + dice.choice(PIECES) + text[end:], text[:at] + text[end:]])
    return text.replace(b"\n", b" ") if dice.random() < 0.5 else text


def value_of(kind, value):
    """`value` of JSON as a column of this type has it; Bad where it has it not."""
    name = kind.typeName()
    if value is None:
        return None
    if name == "struct" and isinstance(value, dict):
        return {field.name: value_of(field.dataType, value.get(field.name)) for field in kind}
    if name == "array" and isinstance(value, list):
        return [value_of(kind.elementType, each) for each in value]
    if name == "map" and isinstance(value, dict):
        return {key: value_of(kind.valueType, each) for key, each in value.items()}
    if name == "boolean" and isinstance(value, bool):
        return value
    if name == "string":
        return value if isinstance(value, str) else ...
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    bits = {"integer": 31, "long": 63}.get(name)
    if bits and is_number and isinstance(value, int) and -(2**bits) <= value < 2**bits:
        return value
    if name == "double" and is_number and abs(float(value)) != float("inf"):
        return float(value)
    raise ValueError(f"{value!r} as {name}")


def is_alike(found, wanted):
    """Whether a column holds what it should; `...`: a text of whatever spelling."""
    if wanted is ...:
        return isinstance(found, str)
    if isinstance(wanted, dict):
        found = found.asDict() if hasattr(found, "asDict") else found
        return (
            found is not None
            and found.keys() == wanted.keys()
            and all(map(is_alike, found.values(), map(wanted.get, found)))
        )
    if isinstance(wanted, list):
        return found is not None and len(found) == len(wanted) and all(map(is_alike, found, wanted))
    return found == wanted


def unknown_in(kind, value):
    """Whether an object has a field, at some depth, that the type does not know."""
    name = kind.typeName()
    if name == "struct" and isinstance(value, dict):
        known = {field.name: field.dataType for field in kind}
        return any(key not in known or unknown_in(known[key], each) for key, each in value.items())
    if name == "array" and isinstance(value, list):
        return any(unknown_in(kind.elementType, each) for each in value)
    if name == "map" and isinstance(value, dict):
        return any(unknown_in(kind.valueType, each) for each in value.values())
    return False


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.soak)])
def test_whatever_is_done_to_documents_is_told_as_pythons_strict_json_tells_it(spark, count):
    dice = random.Random(13)
    payloads = [mutant(dice) for _ in range(count)]
    kind = StructType.fromDDL(SCHEMA)
    reasons = set()
    for payload, row in zip(payloads, of_values(spark, payloads, SCHEMA, rest=True), strict=True):
        reason, found = verdict(payload)
        reasons.add(reason)
        if reason is not None:
            assert row.reason == reason, payload
            assert not any(row[field.name] is not None for field in kind), payload
            continue
        try:
            wanted = value_of(kind, found)
        except (ValueError, OverflowError):
            assert row.reason and row.reason.startswith("wrong_type"), payload
            continue
        if (row.reason or "").startswith("wrong_type"):  # also where a name's first value was wrong
            assert payload.count(b'"n"') > 1, payload
            continue
        assert row.reason is None, payload
        assert all(is_alike(row[name], each) for name, each in wanted.items()), (payload, row)
        assert (row.rest is not None) or not unknown_in(kind, found), (payload, row)
        if row.rest and WHOLE not in row.rest:
            tops = {name for name in found if name not in kind.names or unknown_in(kind[name].dataType, found[name])}
            assert tops <= row.rest.keys() <= found.keys(), (payload, row)
    assert reasons == {None, "not_json", "not_object", "not_utf8"}


@pytest.mark.parametrize("count", [1, 3])
def test_an_object_that_closes_a_list_around_it_is_no_json(spark, count):
    breaking = [
        '{"a":1}],"x":[{"a":5}',
        '{"a":1}],"p":[{"a":5}',
        '{"a":1}]',
        '{"a":1},{"a":2}',
        '{"a":1},{"b":',
        "{}{}",
    ]
    breaking += [
        '{"a":1}],"\\u0003":1,"p":[{"a":5}',
        '{"a":1},1]',
        '{"a":":}"} ',
        '{"a":1}:}',
        '{"s":"x"}}',
        '{"s":"x"}:',
    ]
    found = of_values(spark, [text * count for text in breaking], TYPED, rest=True)
    good = [count == 1 and text == '{"a":":}"} ' for text in breaking]
    assert [row.reason for row in found] == ["wrong_type: a" if each else "not_json" for each in good]


def test_what_is_new_inside_objects_and_lists_is_kept_as_a_whole(spark):
    payloads = [
        '{"st":{"x":1,"new":[1,{"deep":2}]},"a":1}',
        '{"ls":[{"x":1},{"x":2,"new":"text"}],"l":[1]}',
        '{"st":{"x":1},"top":{"b":1}}',
        '{"st":{"x":1},"ls":[{"x":1},{}],"m":{"whatever":1}}',
        '{"st":null,"ls":[null],"m":null}',
        '{"st":{"new":null}}',
        '{"st":{"x":1},"st":{"x":2,"new":3}}',
    ]
    found = of_values(spark, payloads, TYPED, rest=True)
    assert [row.reason for row in found] == [None] * len(payloads)
    assert [row.rest for row in found] == [
        {"st": '{"x":1,"new":[1,{"deep":2}]}'},
        {"ls": '[{"x":1},{"x":2,"new":"text"}]'},
        {"top": '{"b":1}'},
        None,
        None,
        {"st": '{"new":null}'},
        {"st": '{"x":2,"new":3}'},
    ]
    assert found[0].st.x == 1 and [each.x for each in found[1].ls] == [1, 2]


def test_what_looks_like_a_name_inside_a_string_hides_no_unknown_field(spark):
    hidden = [
        r'{"s":"\u003a","x":1}',
        r'{"s":"\u003A\u003a","x":{}}',
        r'{"s":"\u007D","x":1}',
        r'{"ls":[{"x":1}],"s":"a\u003ab","x":"\u007d"}',
        '{"s":"12:30:00","x":"12:30:00"}',
        '{"s":"}:","s":"::","x":1}',
        '{"s":{"x":1},"x":":"}',
        '{"m":{":":1},"x":1}',
    ]
    found = of_values(spark, hidden, TYPED, rest=True)
    assert [row.reason for row in found] == [None] * len(hidden)
    assert [row.rest["x"] for row in found] == ["1", "{}", "1", "}", "12:30:00", "1", ":", "1"]


def test_times_in_strings_are_told_by_counting_and_odd_ones_are_not(spark):
    kind = StructType.fromDDL(TYPED + ", names array<struct<tags:array<string>>>")
    plain = [
        '{"s":"2026-11-22T12:30:00Z","a":1}',
        '{"s":"{a: b}} }"}',
        '{"names":[{"tags":["a:b","}"]},{"tags":["c"]}],"s":":"}',
        '{"s":{"a":1.5}}',
        r'{"s":"\u003a"}',
    ]
    odd = [r'{"s":"\u003a","new":1}', '{"s":null}', '{"s":":","new":1}', '{"s":{"a":1.50000000000000000000000000001}}']
    rows = spark.createDataFrame([(text,) for text in [*plain, *odd]], "text string")
    document = F.from_json("text", payloads.with_corrupt(kind))
    told = rows.withColumn("made", document).select(payloads.accounted(F.col("text"), F.col("made"), kind)).collect()
    assert [each[0] for each in told] == [True] * len(plain) + [False] * len(odd)


def test_a_value_that_a_column_cannot_hold_is_bad_and_never_null(spark):
    wrong = {
        '{"a":1.5}': "a",
        '{"a":1.0}': "a",
        '{"a":1e3}': "a",
        '{"a":1180591620717411303424}': "a",
        '{"a":"12"}': "a",
        '{"a":true}': "a",
        '{"a":""}': "a",
        '{"d":"1.5"}': "d",
        '{"d":1e400}': "d",
        '{"d":-1e400,"a":1}': "d",
        '{"st":{"x":1.5}}': "st",
        '{"st":{"x":4294967296},"a":1}': "st",
        '{"st":[1]}': "st",
        '{"st":"{}"}': "st",
        '{"l":[1,2.5]}': "l",
        '{"l":[1,"2"],"st":{"x":1}}': "l",
        '{"ls":[{"x":1},{"x":"1"}]}': "ls",
        '{"ls":{"x":1}}': "ls",
        '{"ls":[5]}': "ls",
        '{"m":{"k":1.5},"a":"x"}': "a,m",
    }
    for rest in (False, True):
        found = of_values(spark, list(wrong), TYPED, rest)
        assert [row.reason for row in found] == [f"wrong_type: {name}" for name in wrong.values()]


def test_a_number_that_would_change_is_kept_as_it_came_or_bad(spark):
    exact = [
        '{"d":0.1}',
        '{"d":48.941786989260734}',
        '{"d":9007199254740991}',
        '{"s":12345678901234567890123}',
        '{"s":1.5}',
    ]
    exact += ['{"s":[1, 2]}', '{"s":"0.12345678901234567890"}', '{"s":"\\u00e9 \\ud83d\\ude00"}', '{"s":"[1, 2]"}']
    changed = ['{"d":9007199254740993}', '{"d":36893488147419103233}', '{"s":0.12345678901234567890}']
    changed += ['{"s":[0.12345678901234567890]}', '{"s":{"k":1e400}}', '{"s":1e400}', '{"new":[1e400]}']
    assert [(row.reason, row.rest) for row in of_values(spark, exact, TYPED, rest=True)] == [(None, None)] * len(exact)
    for text, row in zip(changed, of_values(spark, changed, TYPED, rest=True), strict=True):
        assert (row.reason, row.rest) == (None, {WHOLE: text})
    bare = [row.reason for row in of_values(spark, [*exact, *changed], TYPED)]
    assert bare == [None] * (len(exact) + 2) + ["wrong_type: s"] * 4 + [None]


def test_a_decimal_is_the_number_that_came_or_bad(spark):
    schema = "m decimal(5,2), l array<struct<m:decimal(5,2)>>, k map<string,decimal(3,1)>"
    good = ['{"m":1.5}', '{"m":"1.50"}', '{"m":100}', '{"m":1e2}', '{"l":[{"m":0.25},{"m":null}],"k":{"a":1.5}}', "{}"]
    bad = {'{"m":1.239}': "m", '{"m":12345}': "m", '{"l":[{"m":1.5},{"m":1.005}]}': "l", '{"k":{"a":1.55}}': "k"}
    found = of_values(spark, [*good, *bad], schema)
    assert [row.reason for row in found] == [None] * len(good) + [f"wrong_type: {name}" for name in bad.values()]
    assert found[0].m == found[1].m == Decimal("1.50")


def test_depth_and_length_that_nobody_reads_are_bad_and_long_lists_are_good(spark):
    deep, digits = '{"new":' + "[" * 1100 + "]" * 1100 + "}", '{"a":' + "9" * 1200 + "}"
    long = json.dumps({"ls": [{"x": n} for n in range(30_000)], "new": [{"y": n} for n in range(30_000)]})
    strings = json.dumps({"s": 'a":}\\' * 100_000})
    found = of_values(spark, [deep, digits, long, strings], TYPED, rest=True)
    assert [row.reason for row in found] == ["not_json", "not_json", None, None]
    assert len(found[2].ls) == 30_000 and found[2].rest.keys() == {"new"} and found[3].s == 'a":}\\' * 100_000


def test_names_that_no_column_has_are_left_to_rest_at_any_depth(spark):
    payload = '{"a":1,"A":2,"o":{"x":1,"X":2,"no name":3},"e":{},"l":[{"b c":1}],"n":[{}]}'
    rows = spark.createDataFrame([(payload.encode(),)], "value binary")
    found = infer(rows)
    assert found.simpleString().lower() == "struct<a:bigint,o:struct<x:bigint>>"
    row = parse(rows, found, rest=True).first()
    assert row.reason is None and row.rest.keys() - {"a", "A"} == {"o", "e", "l", "n"} and len(row.rest) == 5


def test_times_and_texts_do_not_depend_on_the_session(spark):
    found = []
    for elsewhere in (nullcontext(), tokyo(spark)):
        with elsewhere:
            payloads = ['{"t":"2024-01-01T00:30:00"}', '{"t":"2024-01-01"}', '{"t":"2024-01-01T00:30:00+02:00"}']
            made = spark.createDataFrame([(text.encode(),) for text in payloads], "value binary")
            found.append([row[0] for row in parse(made, "t timestamp").selectExpr("unix_micros(t)").collect()])
    assert found[0] == found[1]
