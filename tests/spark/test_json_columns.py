"""JSON columns by pyarrow: whatever is sure has the values that the judge gives, and no reason. Nothing else matters."""

import json
import string

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pyspark.sql.types import StructType

from kmq.spark.pipelines import json_columns
from kmq.spark.pipelines.payloads import parse

SCHEMA = "n bigint, i int, x double, user string, ok boolean, tags array<string>, xs array<double>"
SCHEMA += (
    ", deep struct<y:double,z:struct<s:string>>, items array<struct<sku:string,qty:smallint>>, d date, t timestamp"
)
DECIMALS = SCHEMA + ", m decimal(5,2), ms array<decimal(20,3)>"


def lines(payloads):
    return pa.array([payload + b"\n" for payload in payloads], pa.binary())


def sure(schema, payloads):
    """(which payloads are sure, their rows)."""
    columns, found = json_columns.parse(json_columns.of(StructType.fromDDL(schema)), lines(payloads))
    return found.tolist(), in_python(columns)


def in_python(rows):
    """The rows; times as numbers, because Python has no year 10,000."""
    names = rows.schema.names
    numbers = {"d": pa.int32(), "t": pa.int64()}
    times = [rows.column(name).cast(numbers.get(name, rows.schema.field(name).type)) for name in names]
    return type(rows).from_arrays(times, names=names).to_pylist()


def judged(spark, schema, payloads, rest):
    """(reason, rest, row) of each payload, as the judge has them."""
    made = spark.createDataFrame(list(enumerate(payloads)), "no int, value binary").repartition(1)
    found = in_python(parse(made, schema, rest).orderBy("no").drop("no", "value").toArrow())
    return [(row.pop("reason"), row.pop("rest", None), row) for row in found]


def check(spark, schema, payloads, rest):
    """Return how many payloads are sure."""
    found, rows = sure(schema, payloads)
    rows = iter(rows)
    wanted = judged(spark, schema, payloads, rest)
    for is_sure, payload, (reason, others, row) in zip(found, payloads, wanted, strict=True):
        if is_sure:
            assert (reason, others) == (None, None), payload
            assert repr(next(rows)) == repr(row), payload  # 0.0 == -0.0
    assert next(rows, None) is None
    return sum(found)


SURE = [
    b"{}",
    b'{"n":1,"i":-0,"x":1e3,"user":"}{ :","ok":null}',
    b'{"tags":[],"xs":[1,null],"deep":{"z":{}},"items":[{}]}',
]
SURE += ['{"user":"é\\ud83d\\ude00\\n","x":9007199254740991}'.encode(), b'{"deep" : { "y" : 1 } , "d":"2024-02-29"}']
SURE += [
    b'{"t":"2024-01-01T00:30:00.5Z"}',
    b'{"t":"2024-01-01 00:30:00+17:59"}',
    b'{"user":"' + b"9 lives " * 200 + b'"}',
]
# What pyarrow refuses, and what it would take: each would be a wrong row, or the end of the process.
NOT_SURE = [
    b"",
    b"null",
    b" {}",
    b"{}\r",
    b'{"n":1}null',
    b'{"n":1} null{"n":2}',
    b'{"n":1}{"n":2}',
    b'{"n":1}\0}',
    b"{\n}",
]
NOT_SURE += [b'{"n":1.0}', b'{"n":"1"}', b'{"n":9223372036854775808}', b'{"items":[{"qty":32768}]}', b'{"user":1}']
NOT_SURE += [
    b'{"x":NaN}',
    b'{"xs":[1,Infinity]}',
    b'{"x":9007199254740992}',
    b'{"x":-0}',
    b'{"deep":{"y":-0.0}}',
    b'{"x":1e400}',
]
NOT_SURE += [b'{"x":0.' + b"0" * 1000 + b"1}", b'{"user":"' + b"u" * (1 << 20) + b'"}', b'{"user":"\\u0031e400"}']
NOT_SURE += [
    b'{"user":"\xff"}',
    b'{"user":"\xed\xa0\x80"}',
    b'{"user":"\\ud800"}',
    b'{"new":1}',
    b'{"n":1,"n":1}',
    b'{"N":1}',
]
NOT_SURE += [
    b'{"d":"2023-02-29"}',
    b'{"d":"2024-1-2"}',
    b'{"t":"2024-01-01T00:30:00+19:00"}',
    b'{"t":"2024-01-01T00:30:00"}',
]


def test_what_pyarrow_does_not_refuse_is_found_before_and_after(spark):
    for payload in NOT_SURE:
        assert sure(SCHEMA, [SURE[1], payload, SURE[2]])[0] == [True, False, True], payload
    assert sure(SCHEMA, SURE * 50)[0] == [True] * len(SURE) * 50
    assert sure("n bigint NOT NULL", [b'{"n":1}', b"{}", b'{"n":null}'])[0] == [True, False, False]
    many = [b'{"n":1,"m":1.5}', b'{"n":1,"m":-0.0}', b'{"n":1,"m":12345}', b'{"n":1,"m":1.239}', b'{"n":1,"ms":[-0]}']
    assert sure(DECIMALS, many)[0] == [True, False, False, False, False]
    assert sure("n bigint, counts map<string,int>", [b'{"n":1}'])[0] == [False]


def test_payloads_that_are_all_bad_are_left_after_a_few_tries(spark, monkeypatch):
    tried = []
    real = json_columns.pj.read_json
    monkeypatch.setattr(
        json_columns.pj, "read_json", lambda text, *args: tried.append(text.size()) or real(text, *args)
    )
    payloads = [b'{"n":%d.5}' % n for n in range(5000)]
    assert not any(sure(SCHEMA, payloads)[0])
    assert sum(tried) <= json_columns.EFFORT * sum(len(payload) + 1 for payload in payloads)


# --- payloads of every kind ------------------------------------------------------------------------------------------

NUMBERS = ["0", "-0", "-0.0", "1", "-7", "127", "128", "32768", "2147483648", "9007199254740992", "9007199254740993"]
NUMBERS += [
    "9223372036854775807",
    "9223372036854775808",
    "1e3",
    "1E+2",
    "1.0",
    "0.1",
    "-0.5",
    "1e400",
    "-1e-400",
    "5e-324",
]
NUMBERS += ["1.50", "999.99", "1000.00", "1.239", "0.12345678901234567890", "12345678901234567.125", "NaN", "-Infinity"]
NUMBERS += ["01", "+1", ".5", "5.", "1e", "0." + "0" * 1000 + "1", "9" * 1001, "Infinity", "-", "0x1F", "1_000"]
TEXTS = [
    "",
    "u",
    "1.50",
    "1e400",
    "[1, 2]",
    "{}",
    "null",
    "12:30:00",
    "}{",
    "} null",
    "é",
    "😀",
    "\u2028",
    "\x7f",
    "\ufffd",
]
ESCAPES = [
    "\\ud83d\\ude00",
    "\\ud800",
    "\\udc00\\ud800",
    "\\u0000",
    "\\u003a",
    "\\u0031e400",
    "\\u0031.5",
    "\\/",
    "\\x",
    "\\n",
]
DATES = ["2024-02-29", "2023-02-29", "2024-1-2", "1899-12-31", "20240101", "2024-01-01T00:00:00", "2024", "2024-13-01"]
TIMES = [
    "2024-01-01T00:30:00Z",
    "2024-01-01 00:30:00.123456+02:00",
    "2024-01-01T00:30:00",
    "2024-01-01",
    "2024-01-01T24:00:00Z",
]
TIMES += [
    "2024-01-01T00:30:60Z",
    "2024-01-01T00:30:00.1234567Z",
    "2024-01-01T00:30:00+19:00",
    "1970-01-01T00:00:00-00:00",
]
JUNK = [
    b"null",
    b"NaN",
    b"}",
    b"{",
    b"]",
    b"[",
    b'"',
    b",",
    b":",
    b"\\",
    b"\0",
    b"\n",
    b"\r",
    b"\t",
    b" ",
    b"\x01",
    b"\xff",
]
JUNK += [
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"}null{",
    b"} null {",
    b'{"n":1}',
    b'"n":1,',
    b'"new":1,',
    b'"n":null,',
    b"/**/",
]
SPACE = st.sampled_from(["", "", "", " ", "\t", "\r", " \t"])

number = st.one_of(st.sampled_from(NUMBERS), st.integers(-(2**63), 2**63).map(str), st.floats().map(repr))
plain = st.one_of(st.sampled_from(TEXTS), st.text(max_size=6))
quoted = st.one_of(
    st.builds(lambda text, ascii: json.dumps(text, ensure_ascii=ascii), plain, st.booleans()),
    st.builds('"{}{}"'.format, st.sampled_from(["", "a"]), st.sampled_from(ESCAPES)),
)
name = st.text(string.ascii_letters, min_size=1, max_size=3)
odd = st.one_of(
    number, quoted, st.sampled_from(["null", "true", "false", "[]", "{}", "[null]", '{"a":{"b":[1]}}', "nul"])
)


def objects(members):
    """JSON objects of these (name, value), now and then with another name, a name twice, another order, an escaped name."""
    known = [st.tuples(st.just(json.dumps(name)), value) for name, value in members.items()]
    strange = [st.tuples(name.map(json.dumps), odd), st.tuples(st.just('"\\u006e"'), number)]
    chosen = st.lists(
        st.sampled_from(range(12 * len(known))), max_size=len(known), unique_by=lambda at: at % len(known)
    )
    pairs = chosen.flatmap(
        lambda at: st.tuples(*(known[each % len(known)] if each else st.one_of(strange) for each in at))
    )
    return st.builds(
        lambda pairs, space: "{" + f",{space}".join(f"{key}{space}:{value}" for key, value in pairs) + "}", pairs, SPACE
    )


def lists(element):
    return st.lists(element, max_size=3).map(lambda found: f"[{','.join(found)}]")


def usually(value):
    """This, and now and then something else: most payloads of most lists are good, or nothing would be sure."""
    return st.sampled_from(range(24)).flatmap(
        lambda dice: odd if dice == 0 else st.just("null") if dice == 1 else value
    )


whole = usually(st.integers(-(2**31), 2**31).map(str))
double = usually(st.one_of(st.floats(-1e15, 1e15).map(repr), st.integers(-1000, 1000).map(str)))
small = usually(st.integers(-9999, 9999).map(lambda cents: f"{cents / 100}"))
text = usually(quoted)
members = {
    "n": whole,
    "i": whole,
    "x": double,
    "user": text,
    "ok": usually(st.sampled_from(["true", "false"])),
    "tags": usually(lists(text)),
    "xs": usually(lists(double)),
    "deep": usually(objects({"y": double, "z": usually(objects({"s": text}))})),
    "items": usually(lists(usually(objects({"sku": text, "qty": usually(st.sampled_from(["1", "-32768"]))})))),
    "d": usually(st.sampled_from(DATES).map(json.dumps)),
    "t": usually(st.sampled_from(TIMES).map(json.dumps)),
}
decimals = {"m": small, "ms": usually(lists(small))}


@st.composite
def mutants(draw, document):
    made = draw(document)
    at = draw(st.integers(0, len(made)))
    end = at + draw(st.sampled_from([0, 0, 1, 3]))
    return draw(
        st.sampled_from(
            [made[:at], made[at:], made[:at] + draw(st.sampled_from(JUNK)) + made[end:], made[:at] + made[end:]]
        )
    )


def payloads_of(members):
    document = objects(members).map(str.encode)
    payload = st.sampled_from(range(8)).flatmap(lambda dice: document if dice else mutants(document))
    return st.lists(payload, min_size=60, max_size=150)


def property_test(spark, examples, schema, rest, payloads):
    counts = []

    # Not shrunk, because each attempt is a job of Spark; the error names the one payload that matters.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(payloads)
    def is_judged_alike(payloads):
        counts.append((len(payloads), check(spark, schema, payloads, rest)))

    is_judged_alike()
    total, sure = map(sum, zip(*counts, strict=True))
    print(f"{sure} of {total} payloads were sure")
    assert sure > 0.1 * total, "or nothing was tested"


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # PySpark's threads do, meanwhile
@pytest.mark.sampled(1)
@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("schema", "rest"), [(SCHEMA, False), (SCHEMA, True), (DECIMALS, True)])
def test_whatever_is_sure_is_as_the_judge_has_it(spark, examples, schema, rest):
    property_test(spark, examples, schema, rest, payloads_of(members | decimals if "decimal" in schema else members))
