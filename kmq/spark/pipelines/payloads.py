"""Parse JSON payloads into typed columns, exactly: with the reason why a payload is bad, and fields without a column.

    rows = spark.read.format("kmq").schema("value binary, …").option("path", "data").option("subscribe", "o").load()
    parse(rows, "price double, user string NOT NULL", rest=True).where("reason is null").show()

Invariant   A row has no reason only if its payload is exactly one JSON object (RFC 8259, UTF-8) and each of its values
            is in its column, at every depth, with the type of the schema. With `rest`, each field that is not in the
            schema, at any depth, is in column `rest` too.
Reason      not_json, not_object, not_utf8 (bytes, or half a surrogate pair as an escape), `wrong_type: fields`,
            `missing: fields` (declared NOT NULL). If a name is given twice, the last one counts. A text beyond
            Jackson's limits (1,000 levels, a number of 1,000 digits) is not_json.
Rest        A map from the name of a top-level field to its text, or to its JSON if the value is not a string. A known
            field with an unknown field inside is in the map as a whole, and in its column. If a copy of the JSON would
            change a number (1e400, 18 digits and a fraction, a whole number beyond 2^53 in a double), `*` maps to the
            whole payload.
Numbers     A number with a fraction becomes the nearest double. A whole number is exact or bad. If a column of doubles
            cannot hold a whole number, it is in `rest`, or (without `rest`) becomes the nearest double. An infinite
            number is bad.
Cost        Most payloads are checked by counting (accounted). from_json has made an object with n names and objects.
            If the text begins with `{`, ends with `}` and holds n colons and closing braces in all, then it holds no
            other name, no name twice and nothing after the object. Colons and braces in the strings are counted too. A
            text whose count differs (an explicit null, an unknown field) is parsed a second time, as one element of a
            list whose next element nobody can guess; this gives an exact answer.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add, or_
from typing import cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from kmq.errors import ConfigError
from kmq.files import replace_file
from kmq.spark.pinned import pinned
from kmq.spark.pipelines.options import INFER
from kmq.spark.pipelines.table import starting
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.planner import QueryLogs
from kmq.spark.tables import Table

# Columns of the source, and those that the archive adds. A payload's field of the same name is renamed.
OWN = ("broker", "topic", "partition", "offset", "seq", "recv_ts", "key", "producer_ts", "id", "headers")
ADDED = ("host", "pod", "date", "hour", "rest", "reason", "value", "value_text", "routing_key")
WHOLE = "*"  # key in `rest` of the whole payload, unchanged

_JSON, _VERDICT = "_json", "_verdict"
_GUESS = secrets.token_hex(16)  # nobody can guess it. One value for all batches: Java compiles their code once
_CORRUPT = "\3corrupt"  # no field has this name
_STRICT = {
    "columnNameOfCorruptRecord": _CORRUPT,
    "mode": "PERMISSIVE",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "timeZone": "UTC",
}
Tests = Mapping[type[DataType], Callable[[Column], Column]]  # per type, a test of its values

_OBJECT = r"^\s*\{"  # how an object begins
_NO_NAMES = set(" ,;{}()\n\t=`")  # in names of columns: readers of Parquet or Delta reject them
_EXACT = float(1 << 53)  # below it a double holds every whole number
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'  # a JSON string
# Numbers that a copy would change: infinite ones, and fractions with more digits than a double can hold.
_FRAGILE = r"[0-9][eE]\+?[0-9]{3}|[0-9]{300}|\.0*+[1-9][0-9]{17}|(?<![0-9.])[1-9](?=[0-9.]{18})[0-9]*+\.[0-9]"
_COPY = r'\A(?:-?[0-9][0-9.eE+-]*|"-?Infinity"|\[(?s:.*)\]|\{(?s:.*)\})\z'  # of values that are not strings
_SCALAR = rf'(?:{_STRING}|[^\[\]{{}}",:]++)'
_CHANGING = (StringType, DoubleType, FloatType, DecimalType)
_PAIR = r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE_PAIRS = rf"\A(?:[^\\]++|\\(?:[^u]|u(?:{_PAIR}|(?![dD][89a-fA-F]))))*+\z"


def parse(rows: DataFrame, schema: StructType | str, rest: bool = False) -> DataFrame:
    """Return `rows` with the fields of the JSON object in `value`, and `reason`: null, or why the payload is bad.

    A field that has the name of a column becomes payload_<name>. `rest`: add a map of the fields outside the schema.
    """
    fields = cast(StructType, StructType.fromDDL(schema)) if isinstance(schema, str) else schema
    columns, document, verdict = rows.columns, F.col(_JSON), F.col(_VERDICT)
    text = F.coalesce(F.col("value").cast("string"), F.lit(""))  # a tombstone is not a JSON object either
    typed = StructType([StructField(field.name, field.dataType) for field in fields])
    # Spark would copy all rows once more for each further column here.
    judged = rows.withColumn(_JSON, F.from_json(text, with_corrupt(typed), _STRICT)).withColumn(
        _VERDICT, F.when(~accounted(text, document, typed), _verdict(text, document, fields, rest))
    )
    is_object = verdict["broken"].isNull()
    named = [
        F.when(is_object, document[field.name]).alias(name)
        for field, name in zip(fields, names(fields, columns), strict=True)
    ]
    if rest:
        named.append(F.when(is_object, verdict["rest"]).alias("rest"))
    absent = [F.when(document[field.name].isNull(), F.lit(field.name)) for field in fields if not field.nullable]
    missing = (
        F.when(reduce(or_, (document[f.name].isNull() for f in fields if not f.nullable)), _listing("missing", absent))
        if absent
        else F.lit(None)
    )
    reason = F.coalesce(verdict["broken"], verdict["wrong_type"], missing)
    return judged.select(*columns, *named, reason.alias("reason"))


def infer(sample: DataFrame) -> StructType:
    """Return the schema of the JSON objects in `value`. If names differ only in case, the first one becomes a field."""
    text = F.col("value").cast("string")
    objects = sample.where(text.rlike(_OBJECT)).select(text.alias("value"))
    inferred = sample.sparkSession.read.options(**_STRICT).json(objects).schema
    fields = StructType([field for field in inferred if field.name != _CORRUPT])
    storable = _storable(fields)
    if storable is None:
        raise ConfigError("--schema infer: there is no JSON object to infer from; give a schema, or --schema none")
    return cast(StructType, storable)


def _storable(kind: DataType) -> DataType | None:
    """Return the type without names that tables reject, at any depth; None if nothing is left. `rest` has them."""
    if isinstance(kind, ArrayType):
        element = _storable(kind.elementType)
        return element and ArrayType(element)
    if not isinstance(kind, StructType):
        return kind
    fields: dict[str, StructField] = {}
    for field in kind:
        inner = _storable(field.dataType)
        if inner is not None and field.name and not _NO_NAMES & set(field.name):
            fields.setdefault(field.name.lower(), StructField(field.name, inner))
    return StructType(list(fields.values())) if fields else None


def names(fields: StructType, taken: Sequence[str]) -> list[str]:
    """Return the columns of the fields beside those `taken`."""
    used, found = {name.lower() for name in (*taken, *OWN, *ADDED)}, []
    for name in fields.names:
        while name.lower() in used:
            name = f"payload_{name}"
        used.add(name.lower())
        found.append(name)
    return found


def with_corrupt(fields: StructType) -> StructType:
    """Return the fields and the column where from_json puts a text that it cannot read."""
    return StructType([*fields, StructField(_CORRUPT, StringType())])


# --- most payloads: checked by counting ------------------------------------------------------------------------------


def accounted(text: Column, document: Column, kind: StructType) -> Column:
    """Return True if `text` is surely one object and `document` holds all of it. Never null."""
    is_whole = F.startswith(text, F.lit("{")) & F.endswith(text, F.lit("}")) & F.is_valid_utf8(text)
    if _has(kind, DecimalType):  # rounding of a decimal cannot be seen
        return F.lit(False)
    # A \u escape may be half a surrogate pair, which from_json turns into a question mark.
    half = F.contains(text, F.lit("\\u")) & (F.contains(text, F.lit("\\ud")) | F.contains(text, F.lit("\\uD")))
    marks, expected = _marks_in(text), cast(Column, _marks(document, kind))
    are_all = marks == expected
    if texts := list(_texts(document, kind)):
        # Marks inside strings (a time of day) are no names. An escaped mark would be in the value but not in the text.
        escaped = F.contains(text, F.lit("\\u003")) | F.contains(text, F.lit("\\u007"))
        are_all |= (marks == expected + _marks_in(F.concat_ws("", *texts))) & ~escaped
    sure = is_whole & document[_CORRUPT].isNull() & are_all & ~half
    return F.coalesce(sure & ~_any(document, kind, _inexact(text)), F.lit(False))


def _marks_in(text: Column) -> Column:
    """Count colons and closing braces."""
    return F.octet_length(text) - F.octet_length(
        F.replace(F.replace(text, F.lit(":"), F.lit("")), F.lit("}"), F.lit(""))
    )


def _texts(value: Column, kind: DataType, lists: int = 0) -> Iterator[Column]:
    """Yield the strings in a value, as texts and lists of texts, except those of maps in lists.

    `lists`: how many lists surround the value.
    """
    if isinstance(kind, StructType):
        for field in kind:
            yield from _texts(value[field.name], field.dataType, lists)
    elif isinstance(kind, ArrayType):
        yield from _texts(value, kind.elementType, lists + 1)
    elif isinstance(kind, MapType) and not lists:
        yield from _texts(F.map_values(value), kind.valueType, 1)
    elif isinstance(kind, StringType):
        yield reduce(lambda nested, _: F.flatten(nested), range(lists - 1), value)


def _marks(value: Column, kind: DataType) -> Column | None:
    """Return how many names and objects the JSON of `value` had at least, null for a null value. None: always 0."""
    if isinstance(kind, StructType):
        counts: Iterator[Column] = (_marks_of_field(value[field.name], field.dataType) for field in kind)
        return reduce(add, counts, F.lit(1))
    if isinstance(kind, ArrayType):
        return _sum(value, kind.elementType)
    if isinstance(kind, MapType):
        inner = _sum(F.map_values(value), kind.valueType)
        return F.lit(1) + F.size(value) + (F.lit(0) if inner is None else inner)
    return None


def _marks_of_field(value: Column, kind: DataType) -> Column:
    inner = _marks(value, kind)
    return F.when(value.isNull(), 0).otherwise(F.lit(1) if inner is None else inner + 1)


def _sum(values: Column, kind: DataType) -> Column | None:
    if not isinstance(kind, StructType | MapType) and not (
        isinstance(kind, ArrayType) and _sum(values, kind.elementType)
    ):
        return None

    def count(so_far: Column, value: Column) -> Column:
        return so_far + F.coalesce(cast(Column, _marks(value, kind)), F.lit(0))

    return F.aggregate(values, F.lit(0), count)


def _inexact(text: Column) -> Tests:
    """Return tests for values that may differ from `text`: large doubles have gaps, copies may have other digits."""

    def may_be_copy(value: Column) -> Column:  # begins like a number, list or object; strings may too
        first = F.ascii(value)
        begins_so = ((first >= ord("-")) & (first <= ord("9"))) | first.isin(*map(ord, '[{"'))
        return begins_so & ~F.contains(text, value)

    return {DoubleType: _has_gaps, FloatType: _has_gaps, StringType: may_be_copy}


def _has_gaps(number: Column) -> Column:
    return F.abs(number) >= _EXACT


def _is_infinite(number: Column) -> Column:
    return F.abs(number) == float("inf")


def _any(value: Column, kind: DataType, tests: Tests) -> Column:
    """Return True if a test holds for a value at any depth. Never null."""
    return reduce(or_, _findings(value, kind, tests), F.lit(False))


def _findings(value: Column, kind: DataType, tests: Tests) -> Iterator[Column]:
    if isinstance(kind, StructType):
        for field in kind:
            yield from _findings(value[field.name], field.dataType, tests)
    elif isinstance(kind, ArrayType | MapType):
        inner = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
        values = value if isinstance(kind, ArrayType) else F.map_values(value)
        if _has(inner, *tests):
            yield F.coalesce(F.exists(values, lambda element: _any(element, inner, tests)), F.lit(False))
    elif type(kind) in tests:
        yield F.coalesce(tests[type(kind)](value), F.lit(False))


def _has(kind: DataType, *kinds: type[DataType]) -> bool:
    if isinstance(kind, StructType):
        return any(_has(field.dataType, *kinds) for field in kind)
    if isinstance(kind, ArrayType | MapType):
        return _has(kind.elementType if isinstance(kind, ArrayType) else kind.valueType, *kinds)
    return isinstance(kind, kinds)


# --- the other payloads: parsed a second time ------------------------------------------------------------------------


def _verdict(text: Column, document: Column, fields: StructType, rest: bool) -> Column:
    """Parse a text a second time; return why it is broken, fields of a wrong type, and fields without a column."""
    parsed = F.from_json(F.concat(F.lit("["), text, F.lit(f',{{"{_GUESS}":1}}]')), "array<map<string,string>>", _STRICT)

    def judged(values: Column, _: Column) -> Column:
        second = _SecondParse(text, document, F.get(values, F.lit(0)), fields)
        named = {"broken": _broken(text, values), "wrong_type": second.wrong_type(rest), "rest": second.rest()}
        return F.struct(*(column.alias(name) for name, column in named.items()))

    # A list with one element gives a value that is used many times a name, without copying all rows to another column.
    # Not by `transform`: Spark's code for it gets new names each time, and Java would compile it again for every batch.
    return F.get(F.zip_with(F.array(parsed), F.array(F.lit(0)), judged), F.lit(0))


def _broken(text: Column, raw: Column) -> Column:
    """Return why a text is not one JSON object, else null."""
    values = F.from_json(F.concat(F.lit("["), text, F.lit(f",{json.dumps(_GUESS)}]")), "array<string>", _STRICT)
    is_one = (F.size(raw) == 2) & F.get(raw, F.lit(1))[_GUESS].isNotNull()
    is_value = (F.size(values) == 2) & (F.get(values, F.lit(1)) == _GUESS)
    reason = F.when(~F.is_valid_utf8(text), "not_utf8").when(
        F.coalesce(is_one, F.lit(False)) & F.get(raw, F.lit(0)).isNotNull(),
        F.when(F.contains(text, F.lit("\\u")) & ~text.rlike(_WHOLE_PAIRS), "not_utf8"),
    )
    return reason.when(F.coalesce(is_value, F.lit(False)), "not_object").otherwise("not_json")


class _SecondParse:
    """Fields that the columns of an object lack. The object was also parsed as a map, `raw`: name → text or JSON."""

    def __init__(self, text: Column, document: Column, raw: Column, fields: StructType) -> None:
        self._text, self._document, self._raw, self._fields = text, document, raw, fields

    def rest(self) -> Column:
        """Return the fields that are not in the schema, else null."""

        def is_unknown(name: Column, value: Column) -> Column:
            scalar = [field.name for field in self._fields if _json_regex(field.dataType) == _SCALAR]
            verdict = F.when(name.isin(scalar), F.lit(False))
            for field in self._fields:
                if field.name not in scalar:
                    held = F.coalesce(value.rlike(rf"\A{_json_regex(field.dataType)}\z"), F.lit(True))
                    verdict = verdict.when(name == field.name, ~held)
            return verdict.otherwise(F.lit(True))

        unknown = F.map_filter(self._raw, is_unknown)
        whole = F.create_map(F.lit(WHOLE), self._text)
        tests = {DoubleType: _has_gaps, FloatType: _has_gaps, StringType: self._is_other_copy}
        lost = _any(self._document, self._fields, tests) | (F.size(unknown) > 0) & self._text.rlike(_FRAGILE)
        return F.when(lost, whole).when(F.size(unknown) > 0, unknown)

    def wrong_type(self, rest: bool) -> Column:
        """Return `wrong_type: fields`, the fields whose values no column holds; else null."""
        failed = [self._failed(field) for field in self._fields]
        changed = [F.when(self._is_changed(field, rest), F.lit(field.name)) for field in self._fields]
        named = [
            column for column, field in zip(changed, self._fields, strict=True) if _has(field.dataType, *_CHANGING)
        ]
        reason = F.when(self._document[_CORRUPT].isNotNull(), _listing("wrong_type", failed))
        if named:
            names = F.concat_ws(",", *named)
            reason = reason.when(names != "", F.concat(F.lit("wrong_type: "), names))
        return reason

    def _failed(self, field: StructField) -> Column:
        """Return the name of a field if from_json could not convert its value."""
        raw, value = self._raw[field.name], self._document[field.name]
        failed = raw.isNotNull() & value.isNull()
        if isinstance(field.dataType, StructType | ArrayType | MapType):
            again = F.concat(F.lit(f"{{{json.dumps(field.name)}:"), raw, F.lit("}"))
            alone = F.from_json(again, with_corrupt(StructType([StructField(field.name, field.dataType)])), _STRICT)
            failed = failed | (raw.isNotNull() & alone[_CORRUPT].isNotNull())
        return F.when(failed, F.lit(field.name))

    def _is_changed(self, field: StructField, rest: bool) -> Column:
        """Return True if from_json silently changed a number in the field's value."""
        value, kind = self._document[field.name], field.dataType
        tests: Tests = {DoubleType: _is_infinite, FloatType: _is_infinite}
        changed = _any(value, kind, tests if rest else {**tests, StringType: self._is_other_copy})
        if not _has(kind, DecimalType):
            return changed
        shell = StructType([StructField(field.name, _replaced(kind, StringType()))])
        as_double = _replaced(kind, DoubleType())
        original = F.from_json(self._text, shell, _STRICT)[field.name].try_cast(as_double)
        pair = (F.to_json(F.struct(number.alias("_"))) for number in (original, value.cast(as_double)))
        return changed | (next(pair) != next(pair))

    def _is_other_copy(self, value: Column) -> Column:
        """Return True if a text copies a number, list or object with other digits than the payload has."""
        return value.rlike(_COPY) & self._text.rlike(_FRAGILE) & ~F.contains(self._text, value)


def _replaced(kind: DataType, by: DataType) -> DataType:
    """Return the type with `by` in place of decimals."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _replaced(field.dataType, by)) for field in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_replaced(kind.elementType, by))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _replaced(kind.valueType, by))
    return by if isinstance(kind, DecimalType) else kind


def _json_regex(kind: DataType) -> str:
    """Return a Java regex, without backtracking, for JSON as Jackson writes it that has only the type's names."""
    if isinstance(kind, StructType):
        names = (_quoted(json.dumps(field.name, ensure_ascii=False)) for field in kind)
        members = (f"{name}:{_json_regex(field.dataType)}" for name, field in zip(names, kind, strict=True))
        return rf"(?:null|\{{(?:(?:{'|'.join(members)})(?:,|(?=\}})))*+\}})"
    if isinstance(kind, ArrayType):
        return rf"(?:null|\[(?:{_json_regex(kind.elementType)}(?:,|(?=\])))*+\])"
    if isinstance(kind, MapType):
        return rf"(?:null|\{{(?:{_STRING}:{_json_regex(kind.valueType)}(?:,|(?=\}})))*+\}})"
    return _SCALAR


def _quoted(text: str) -> str:
    r"""Quote every character for a regex; \Q…\E would end at an \E in the text."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _listing(what: str, names: Iterable[Column]) -> Column:
    """Return `what: a,b` with the names that are not null, or `what` if all are null."""
    return F.concat_ws(": ", F.lit(what), F.nullif(F.concat_ws(",", *names), F.lit("")))


# --- the schema ------------------------------------------------------------------------------------------------------

# Given as DDL, or inferred from a sample at the first start; then fixed.
SAMPLE = 10_000  # records that a schema is inferred from


def decide_schema(spark: SparkSession, table: Table, where: Mapping[str, str], schema: str) -> StructType:
    """Return the schema of this table, as decided at its first start: a repeated batch must give the same rows."""
    path, stored = _schema_file(table.state), read_schema(table.state)
    if schema == INFER:
        with pinned(spark):
            found = stored or infer(_sample(spark, where))
    else:
        found = _given(schema)
    if stored not in (None, found):
        raise ConfigError(f"--schema: {path} has another one for this table: {stored.simpleString()}")
    return found


def write_schema(table: Table, fields: StructType | None) -> None:
    """Keep the schema for all later starts."""
    if fields is not None and not os.path.exists(_schema_file(table.state)):
        replace_file(_schema_file(table.state), json.dumps(fields.jsonValue(), indent=1).encode())


def read_schema(state: str) -> StructType | None:
    """Return the schema of a table's payloads, None before the first start and of payloads as text.

    `state`: the directory of the table's state.
    """
    if not os.path.exists(_schema_file(state)):
        return None
    with open(_schema_file(state), encoding="utf-8") as file:
        return StructType.fromJson(json.load(file))


def _schema_file(state: str) -> str:
    return f"{state}/schema.json"


def _given(schema: str) -> StructType:
    """Return the schema of DDL, or of the DDL in a file."""
    text, wrong = schema, "must be DDL like 'price double, user string', or a file of it"
    if os.path.isfile(schema):
        wrong = "the file must hold DDL like 'price double, user string'"
        try:
            with open(schema, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--schema {schema!r}: {wrong}: {err}") from err
    try:
        found = StructType.fromDDL(text)
    except Exception as err:  # Spark's parser raises several types
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}") from err
    if not isinstance(found, StructType) or not found.names:
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}")
    return found


def _sample(spark: SparkSession, where: Mapping[str, str]) -> DataFrame:
    """Return the first records of each topic."""
    logs = QueryLogs(ReadOptions(starting(where)))
    found = logs.planned(lambda: logs.each(lambda name: logs.brokers[name].topics()))
    names = sorted({topic for topics in found.values() for topic in topics if logs.options.wants(topic)})
    if not names:
        raise ConfigError("--schema infer: none of these topics exists yet; give a schema, or --schema none")
    unsampled = ("subscribe", "assign", "onunreachable")
    at = {name: text for name, text in where.items() if not name.lower().startswith(unsampled)}
    if logs.away:
        at = {name: text for name, text in at.items() if name.lower() != "kmq.bootstrap.servers"}
        at["kmq.bootstrap.servers"] = ",".join(found)
    reader = spark.read.format("kmq").schema("value binary").options(**at)
    parts = [reader.option("subscribe", topic).load().limit(max(100, SAMPLE // len(names))) for topic in names]
    return reduce(DataFrame.union, parts)
