"""JSON payloads → Arrow columns, without Python per record, for payloads that `payloads.parse` is sure to find good.

    json = of(StructType.fromDDL("price double, user string"))
    columns, are_sure = parse(json, payloads)    # payloads: binary, each with a newline at its end

pyarrow reads one JSON object a line, strictly: no other names than the schema's, no name twice, no value of another
type, nothing after an object. Vectorized checks before and after it find the faults that pyarrow accepts. Only the
judge, payloads.py, decides which payloads are bad: it gets each payload that is not surely good.

Invariant   A payload is sure only if payloads.parse gives it no reason, no `rest`, and the same values in its columns.
            A payload that is not sure may still be good.
Before      First and last byte are braces, because pyarrow crashes on a line `null`, and counts text before or after an
            object as rows. No NUL, at which it ends, no newline. Nothing longer than MAX_PAYLOAD, no number of 1,000
            characters, no text that is not UTF-8. No copy of text in a string that the judge takes for a changed
            number.
After       As many rows as payloads. Each payload gives at least one row, because a line that begins with `{` cannot
            continue an object of the line before that ends with `}`: JSON has a comma between the two. So equal numbers
            mean one object each. No double that is not finite, has gaps (2^53) or is a negative zero, no decimal beyond
            its precision, no null in a field that is NOT NULL, no time of another form than the usual ones.
Cost        One pass of pyarrow over the bytes. If pyarrow refuses them, its message may name the row, which is skipped.
            Otherwise the payloads are halved until each refused one is alone. After EFFORT times the bytes the judge
            gets the remaining payloads.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, DecimalType, StructType

from kmq.spark.source.columns import Numbers

MAX_PAYLOAD = 1 << 20  # bytes
EFFORT = 8
_SCALARS = ("boolean", "tinyint", "smallint", "int", "bigint", "double", "string")
_DATE = r"(?:19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-](?:0[0-9]|1[0-7]):[0-5][0-9])"
_TIMES = {  # Spark's type → (the usual form of its text, Arrow's type)
    "date": (f"^{_DATE}$", pa.date32()),
    "timestamp": (f"^{_DATE}[T ]{_TIME}$", pa.timestamp("us", "UTC")),
}
_OPEN, _CLOSE, _NEWLINE, _BACKSLASH = b"{}\n\\"
# One byte is found quickly in a text, several bytes are not.
_MAY_BE_AFTER = np.isin(np.arange(256), list(b"n \t\r"))
_AFTER_OBJECT = re.compile(rb"\}[ \t\r]*n")  # `null` after an object
_MINUS_ZERO = re.compile(rb"-0(?:\.0*)?(?:[eE]|[,\]}\s])")  # in a decimal the judge takes it for another number
# At least what payloads._FRAGILE finds, without Java's extensions.
_FRAGILE = r"[0-9][eE]\+?[0-9]{3}|[0-9]{300}|\.0*[1-9][0-9]{17}|[1-9][0-9.]{18}"
_NUMBER_CHARS = np.isin(np.arange(256), list(b"0123456789.eE+-"))
_LONG = 1000  # characters; the judge accepts no longer number
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % _LONG)
_STEP, _STEPS = 64, 12  # such a number has more than _STEPS of every 64th byte in a row
_EXACT = float(1 << 53)
_NEGATIVE_ZERO = np.iinfo(np.int64).min  # the bits of -0.0
_ROW = re.compile(r" in row ([0-9]+)$")


class JsonColumns(NamedTuple):
    """A schema of payloads, as `parse` needs it. Made by `of`."""

    schema: pa.Schema | None  # None: pyarrow does not read these types like the judge, so no payload is ever sure
    options: pj.ParseOptions
    required: list[str]  # fields that are NOT NULL
    has_decimals: bool
    times: dict[str, str]  # field that is read as text → its type


def of(fields: StructType) -> JsonColumns:
    if not all(_is_able(field.dataType) for field in fields):
        return JsonColumns(None, pj.ParseOptions(), [], False, {})
    schema = to_arrow_schema(fields.toNullable(), timezone="UTC")
    times = {field.name: field.dataType.simpleString() for field in fields if field.dataType.simpleString() in _TIMES}
    read = pa.schema([pa.field(field.name, pa.string()) if field.name in times else field for field in schema])
    return JsonColumns(
        schema,
        pj.ParseOptions(explicit_schema=read, unexpected_field_behavior="error"),
        [field.name for field in fields if not field.nullable],
        any(_has_decimals(field.dataType) for field in fields),
        times,
    )


def parse(json: JsonColumns, payloads: pa.Array) -> tuple[pa.RecordBatch, Numbers]:
    """Return the columns of the sure payloads, and a mask (booleans) of them."""
    are_sure = np.zeros(len(payloads), bool)
    schema = pa.schema([]) if json.schema is None else json.schema
    found = []
    if json.schema is not None and len(payloads):
        lines = _Lines(payloads)
        left = np.flatnonzero(~_odd(json, lines))
        if len(left) < len(payloads):
            lines = _Lines(payloads.take(pa.array(left)))
        for low, high, batch in _pieces(json, lines):
            are_sure[left[low:high]] = True
            found.append(batch)
    if len(found) == 1:
        return found[0], are_sure
    nothing = [pa.array([], field.type) for field in schema]
    return pa.concat_batches([*found, pa.RecordBatch.from_arrays(nothing, schema=schema)]), are_sure


# --- before ----------------------------------------------------------------------------------------------------------


def _odd(json: JsonColumns, lines: "_Lines") -> Numbers:
    """Return a mask of payloads that pyarrow must not see, or reads in another way than the judge."""
    begins, ends, data = lines.begins, lines.ends, lines.bytes
    odd: Numbers = (
        (data[begins] != _OPEN) | (data[np.maximum(ends - 1, begins)] != _CLOSE) | (ends - begins > MAX_PAYLOAD)
    )
    text = data.tobytes()
    if text.find(b"\0") >= 0:
        odd[lines.at(np.flatnonzero(data == 0))] = True
    if np.count_nonzero(data == _NEWLINE) > len(odd):
        odd |= np.bincount(lines.at(np.flatnonzero(data == _NEWLINE)), minlength=len(odd)) > 1
    if _MAY_BE_AFTER[data[np.flatnonzero(data[:-1] == _CLOSE) + 1]].any():
        odd[lines.at(_starts(_AFTER_OBJECT, text))] = True
    if json.has_decimals:
        odd[lines.at(_starts(_MINUS_ZERO, text))] = True
    if not text.isascii():
        odd |= not_utf8(lines.array)
    if len(text) > _LONG and int((ends - begins).max()) >= _LONG:
        odd[_with_long_numbers(lines)] = True
    if text.find(b"\\") >= 0:
        escaped = np.flatnonzero(np.bincount(lines.at(np.flatnonzero(data == _BACKSLASH)), minlength=len(odd)) > 0)
        escaped = escaped[~odd[escaped]]  # only text is left
        fragile = pc.match_substring_regex(lines.array.take(pa.array(escaped)).cast(pa.string()), _FRAGILE)
        odd[escaped[fragile.to_numpy(zero_copy_only=False)]] = True
    return odd


# --- pyarrow, and after ----------------------------------------------------------------------------------------------


def _pieces(json: JsonColumns, lines: "_Lines") -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yield the ranges of lines that are sure, in order, each with its columns."""
    effort = EFFORT * len(lines.bytes)
    waiting = [(0, len(lines.begins))]
    while waiting:
        low, high = waiting.pop()
        size = lines.size(low, high)
        if low == high or size > effort:
            continue
        effort -= size
        refusal = ""
        try:
            batch = _read(json, lines.buffer(low, high), high - low)
        except (pa.ArrowInvalid, UnicodeDecodeError) as err:  # its message quotes bytes that are not UTF-8
            batch, refusal = None, str(err)
        if batch is not None:
            yield low, high, batch
        elif named := _ROW.search(refusal):
            at = min(low + int(named[1]), high - 1)
            waiting += [(at + 1, high), (low, at)]
        elif high - low > 1:
            middle = (low + high) // 2
            waiting += [(middle, high), (low, middle)]


def _read(json: JsonColumns, text: pa.Buffer, count: int) -> pa.RecordBatch | None:
    """Return the columns of `count` payloads; None unless all of them are sure. Raises pa.ArrowInvalid likewise."""
    reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
    found = pj.read_json(pa.BufferReader(text), reading, json.options)
    if found.num_rows != count:
        return None
    arrays = []
    assert json.schema is not None
    for field in json.schema:
        array = found.column(field.name).combine_chunks()
        if kind := json.times.get(field.name):
            form, arrow = _TIMES[kind]
            if pc.all(pc.match_substring_regex(array, form)).as_py() is False:
                return None
            array = array.cast(arrow)
        arrays.append(array)
    if any(found.column(name).null_count for name in json.required):
        return None
    return pa.RecordBatch.from_arrays(arrays, schema=json.schema) if all(map(_is_exact, arrays)) else None


def _is_able(kind: DataType, depth: int = 0) -> bool:
    """Return True if pyarrow reads values of this type like the judge, at least the usual values."""
    if isinstance(kind, StructType):
        names = kind.fieldNames()
        return len(set(names)) == len(names) > 0 and all(_is_able(field.dataType, depth + 1) for field in kind)
    if isinstance(kind, ArrayType):
        return _is_able(kind.elementType, depth + 1)
    name = kind.simpleString()
    return isinstance(kind, DecimalType) or name in _SCALARS or (not depth and name in _TIMES)


def _has_decimals(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_decimals(field.dataType) for field in kind)
    return _has_decimals(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, DecimalType)


def _is_exact(array: pa.Array) -> bool:
    """Return True if the judge would read the same numbers, at every depth."""
    kind = array.type
    if pa.types.is_struct(kind):
        return all(_is_exact(array.field(number)) for number in range(kind.num_fields))
    if pa.types.is_list(kind):
        return _is_exact(array.values)
    if pa.types.is_floating(kind) and len(array):
        numbers = (array.fill_null(0) if array.null_count else array).to_numpy()
        is_small = np.abs(numbers).max() < _EXACT  # False for NaN
        return bool(is_small) and not (numbers.view(np.int64) == _NEGATIVE_ZERO).any()
    if pa.types.is_decimal(kind):
        array.validate(full=True)  # else a number may have more digits than its type
    return True


class _Lines:
    """Payloads in one buffer, each with a newline at its end."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array
        edges = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1].astype(
            np.int64
        )
        self._data = array.buffers()[2].slice(int(edges[0]), int(edges[-1] - edges[0]))
        self._edges = edges - edges[0]
        self.bytes: Numbers = np.frombuffer(self._data, np.uint8)
        self.begins, self.ends = self._edges[:-1], self._edges[1:] - 1

    def at(self, places: Any) -> Numbers:
        """Return the numbers of the payloads in which these bytes are."""
        found: Numbers = np.searchsorted(self._edges, places, side="right") - 1
        return found

    def size(self, low: int, high: int) -> int:
        return int(self._edges[high] - self._edges[low])

    def buffer(self, low: int, high: int) -> pa.Buffer:
        return self._data.slice(int(self._edges[low]), self.size(low, high))


def _starts(pattern: re.Pattern[bytes], text: bytes) -> Numbers:
    return np.array([found.start() for found in pattern.finditer(text)], np.int64)


def not_utf8(array: pa.Array) -> Numbers:
    """Return a mask of the values that are not UTF-8; null counts as UTF-8."""
    try:
        array.view(pa.string()).validate(full=True)
        return np.zeros(len(array), bool)
    except pa.ArrowInvalid:
        return np.array([not _is_utf8(payload) for payload in array.to_pylist()])


def _is_utf8(payload: bytes | None) -> bool:
    try:
        (payload or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _with_long_numbers(lines: _Lines) -> list[int]:
    """Return the payloads with a number that is too long for the judge. A few bytes of each show where one may be."""
    of_number = _NUMBER_CHARS[lines.bytes[::_STEP]].astype(np.int32)
    sums = np.concatenate([[0], np.cumsum(of_number)])
    places = np.flatnonzero(sums[_STEPS:] - sums[:-_STEPS] == _STEPS) * _STEP
    found = np.unique(lines.at(places))
    return [at for at in found.tolist() if _LONG_NUMBER.search(lines.array[at].as_py())]
