"""Stored lines → Arrow columns, without Python per line.

    4711|1700000000.000123|orders.42|||hello   → seq 4711, recv_ts, topic "orders", key "42", value b"hello"

A block of lines is one buffer. Its newlines and bars are found once (numpy). A column is then an array of offsets into
that buffer, from which Arrow gathers the bytes. Python handles single lines only to decode them: base64 payloads,
percent-encoded keys and headers, and text that is not UTF-8. The lines come from kmq.log.reader or the gateway, which
have checked them: each has five bars, or is empty (compaction).

Most of a log is final blocks of an index. LogReader.extents gives about 1 MiB of them, their crcs checked; one search
finds their newlines, which count the records (as the index must) and later cut the lines into fields. So each byte is
read once, summed once and searched once.

Invariant   Records and damage are always those that LogReader.read reports. If an extent differs from its index, or
            there is no extent (the open block, the unindexed tail, a segment that is being swapped or was removed),
            LogReader.read continues from there, and serves or raises. Only whole lines of the requested range are
            handed out, in order.
Memory      One extent at a time; a block that was handed out shares no bytes with the next one.
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kmq.errors import ConfigError
from kmq.log.reader import Extent, LogReader
from kmq.log.segment import last_line, within
from kmq.log.segment_reader import READ_BYTES
from kmq.message import record
from kmq.spark.connections import nearest

# --- numbers ---------------------------------------------------------------------------------------------------------
# Decimal numbers in a buffer as integers, eight digits at a time, without a string for each. Eight bytes are one 64-bit
# word. Three multiplications add up its digits for all numbers at once: pairs of digits, pairs of pairs, and the two
# halves. A shorter number is shifted to the end of its word and padded with zeros.

Numbers = np.ndarray[Any, Any]
Mask = npt.NDArray[np.bool_]

_WORD = 8  # digits
_ZEROS = np.uint64(0x3030303030303030)
_UPPER = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIX = np.uint64(0x0606060606060606)  # carries a byte above "9" into its upper half
_ONLY_DIGITS = np.uint64(0x3333333333333333)
_DIGITS = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAIRS, _TENS = np.uint64(0x00FF00FF00FF00FF), np.uint64(2561)  # 10 · 2⁸ + 1
_FOURS, _HUNDREDS = np.uint64(0x0000FFFF0000FFFF), np.uint64(6553601)  # 100 · 2¹⁶ + 1
_THOUSANDS = np.uint64(42949672960001)  # 10,000 · 2³² + 1
_ONE, _4, _8, _16, _32 = (np.uint64(bits) for bits in (1, 4, 8, 16, 32))


def parse_numbers(data: Numbers, begins: Numbers, ends: Numbers) -> Numbers | None:
    """Return the numbers at begins[i]…ends[i]. They must have up to 8 digits each or 9 to 16 each, else None."""
    if not len(begins) or len(data) < 2 * _WORD:
        return None
    widths = ends - begins
    least, most = int(widths.min()), int(widths.max())
    if least < 1 or most > 2 * _WORD or least <= _WORD < most or int(begins.max()) + _WORD > len(data):
        return None
    words = np.ndarray((len(data) - _WORD + 1,), "<u8", data, strides=(1,))
    if most <= _WORD:
        return _parse_words(words[begins], _WORD - widths)
    upper, lower = _parse_words(words[begins], 2 * _WORD - widths), _parse_words(words[ends - _WORD], None)
    return None if upper is None or lower is None else upper * 10**_WORD + lower


def _parse_words(words: Numbers, missing: Numbers | None) -> Numbers | None:
    """Return words as numbers; the last `missing` bytes of a word do not belong to its number."""
    if missing is not None and missing.any():
        bits = missing.astype(np.uint64) * _8
        words = (words << bits) | (_ZEROS & ((_ONE << bits) - _ONE))
    if (((words & _UPPER) | (((words + _SIX) & _UPPER) >> _4)) != _ONLY_DIGITS).any():
        return None
    words = ((words & _DIGITS) * _TENS) >> _8
    words = ((words & _PAIRS) * _HUNDREDS) >> _16
    return (((words & _FOURS) * _THOUSANDS) >> _32).astype(np.int64)


# --- bars ------------------------------------------------------------------------------------------------------------

FIELDS = 6
_BAR = ord("|")
_LONG, _HEAD = 512, 96  # bytes: if lines average _LONG, only their first _HEAD bytes are searched at first


def find_bars(data: Numbers, starts: Numbers, ends: Numbers) -> list[Numbers]:
    """Return where the first five bars of each line are, one array for each bar. Lines are data[starts[i]:ends[i]]."""
    count = len(starts)
    if len(data) > _LONG * count and (near := _find_near(data, starts, ends)):
        return near
    bars = np.flatnonzero(data == _BAR)
    if len(bars) == (FIELDS - 1) * count:  # no payload holds a bar
        return [bars[at :: FIELDS - 1] for at in range(FIELDS - 1)]
    first = np.searchsorted(bars, starts)
    return [bars[first + at] for at in range(FIELDS - 1)]


def _find_near(data: Numbers, starts: Numbers, ends: Numbers) -> list[Numbers] | None:
    """Return the same, from the first bytes of each line only; None if a bar is not among them."""
    count, last = len(starts), len(data) - _HEAD
    if not count or starts[-1] > last:
        return None
    heads = np.ndarray((last + 1, _HEAD), np.uint8, data, strides=(1, 1))[starts]
    places = np.flatnonzero(heads == _BAR)
    rows = np.arange(count + 1) * _HEAD
    first = np.searchsorted(places, rows)
    if (np.diff(first) < FIELDS - 1).any():
        return None
    shift = starts - rows[:-1]
    bars = [places[first[:-1] + at] + shift for at in range(FIELDS - 1)]
    return bars if (bars[-1] < ends).all() else None


# --- lines -----------------------------------------------------------------------------------------------------------

_LINE_BYTES = 512  # an assumed length; longer lines cost more calls of LogReader.read
_NEWLINE = ord("\n")


class Lines:
    """Whole stored lines from record `offset` up to `next_offset`. A bare newline is a compacted record."""

    __slots__ = ("data", "newlines", "next_offset", "offset")

    def __init__(self, offset: int, data: bytes, newlines: npt.NDArray[np.int64], by_seq: bool) -> None:
        self.offset, self.data, self.newlines = offset, data, newlines
        self.next_offset = record.seq_of(last_line(data)) + 1 if by_seq else offset + len(newlines)

    def within(self, low: int, high: int, by_seq: bool) -> "Lines | None":
        """Return the lines with offsets low…high-1, or None."""
        if self.offset >= low and self.next_offset <= high:
            return self
        if by_seq:
            inside = within(self.data, low, high - 1)
            return of_bytes(record.seq_of(inside), inside, by_seq) if inside else None
        first, stop = max(0, low - self.offset), min(len(self.newlines), high - self.offset)
        if first >= stop:
            return None
        begin, end = int(self.newlines[first - 1]) + 1 if first else 0, int(self.newlines[stop - 1]) + 1
        return Lines(self.offset + first, self.data[begin:end], self.newlines[first:stop] - begin, by_seq)


def find_newlines(data: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)


def of_bytes(offset: int, data: bytes, by_seq: bool) -> Lines:
    return Lines(offset, data, find_newlines(data), by_seq)


def read_lines(log: LogReader, start: int, end: int, nbytes: int = READ_BYTES) -> Iterator[Lines]:
    """Yield records start…end-1, checked. They begin later if retention removed the start. They end with the log."""
    offset = start
    while offset < end:
        for lines in _final(log, offset, end, nbytes):
            yield lines
            offset = lines.next_offset
        if offset >= end:
            return
        # For a micro-batch of a few records do not read a whole block.
        first, data = log.read(offset, min(nbytes, (end - offset + 128) * _LINE_BYTES))
        if not data or first >= end:
            return
        found = of_bytes(first, data, log.by_seq)
        offset = found.next_offset
        if inside := found.within(first, end, log.by_seq):
            yield inside


def _final(log: LogReader, offset: int, end: int, nbytes: int) -> Iterator[Lines]:
    """Yield the same records, from the final blocks of one segment."""
    low = offset
    for extent in log.extents(offset, end, nbytes):
        counted = _counted(extent, log.by_seq)
        if counted is None:
            return
        if inside := counted.within(low, end, log.by_seq):
            yield inside
            low = 0  # keep seqs that are out of order visible
        if len(counted.data) < len(extent.data):
            return


def _counted(extent: Extent, by_seq: bool) -> Lines | None:
    """Return the blocks of an extent before the first whose record count in the index is wrong; None if there are
    none.
    """
    newlines = find_newlines(extent.data)
    if by_seq:
        return Lines(extent.offsets[0], extent.data, newlines, by_seq)
    counts = np.searchsorted(newlines, extent.edges)
    wrong = np.flatnonzero(counts != np.array(extent.offsets) - extent.offsets[0])
    good = int(wrong[0]) - 1 if len(wrong) else len(counts) - 1
    if not good:
        return None
    return Lines(extent.offsets[0], extent.data[: extent.edges[good]], newlines[: counts[good]], by_seq)


# --- columns ---------------------------------------------------------------------------------------------------------

# In this order, with Spark's names of types. Columns of TEXT may also be binary: the exact bytes as stored.
COLUMNS = {
    "broker": "string",  # as named in the options
    "topic": "string",  # the topic that was read; __append: the WAL
    "partition": "int",
    "offset": "bigint",  # in the WAL: the seq
    "seq": "bigint",
    "recv_ts": "timestamp",
    "key": "string",  # from the routing key, percent-decoded; null without a key, and in the WAL
    "routing_key": "string",
    "producer_ts": "string",
    "id": "string",  # without headers, percent-decoded
    "headers": "map<string,string>",
    "value": "binary",  # the payload, decoded if enc=b64 or enc=lf; null if it is empty (a tombstone)
    "value_text": "string",  # the same as text; bytes that are not UTF-8 become U+FFFD
    "timestamp": "timestamp",  # recv_ts, as Kafka's connector names it
    "timestampType": "int",  # as in Kafka's connector: 1, LogAppendTime
}
# With option includeOrigin, or if a schema names them: where a record was stored first. The sink makes ids of them.
ORIGIN = {
    "origin_broker": "string",  # the id of the data directory: no two brokers have the same
    "origin_topic": "string",
    "origin_partition": "int",
    "origin_offset": "bigint",
}
LINE = "line"  # binary, on request: the whole stored line
KEY_BYTES = "key_bytes"  # binary, on request: the key percent-decoded, even if it is not UTF-8
ON_REQUEST = {LINE: "binary", KEY_BYTES: "binary", **ORIGIN}
HEADERS_ARRAY = "array<struct<key:string,value:binary>>"  # as in Kafka's connector; null without headers
TEXT = ("key", "routing_key", "producer_ts", "id", "value_text")
_LOG_APPEND_TIME = 1  # of Kafka's timestamp types: the broker's time, not the producer's


def ddl(with_headers: bool = False, with_origin: bool = False) -> str:
    """Return the default schema, for Spark. `with_headers`: column headers has the type of Kafka's connector."""
    kinds = COLUMNS | ({"headers": HEADERS_ARRAY} if with_headers else {}) | (ORIGIN if with_origin else {})
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items())


def check(name: str, kind: str) -> None:
    """Raise ConfigError if there is no column `name` of Spark's type `kind`."""
    named = COLUMNS | ON_REQUEST
    if name not in named:
        raise ConfigError(f"schema: there is no column {name!r}{nearest(name, named)}; there are {', '.join(named)}")
    kinds = [named[name], *(["binary"] if name in TEXT else []), *([HEADERS_ARRAY] if name == "headers" else [])]
    if kind not in kinds:
        raise ConfigError(f"schema: column {name} is {' or '.join(kinds)}, not {kind}")


_ARROW = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    HEADERS_ARRAY: pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
}


class ColumnSelection(NamedTuple):
    """The columns that a query reads. `exact`: as bytes in place of text. `schema`: as Spark's own function makes it."""

    names: list[str]
    exact: list[bool]
    schema: pa.Schema


def select(kinds: Iterable[tuple[str, str]]) -> ColumnSelection:
    """Return the selection of columns by name and type. Raises ConfigError if there is no such column."""
    pairs = list(kinds)
    for name, kind in pairs:
        check(name, kind)
    exact = [kind in ("binary", HEADERS_ARRAY) for _, kind in pairs]
    schema = pa.schema([(name, _ARROW[kind]) for name, kind in pairs])
    return ColumnSelection([name for name, _ in pairs], exact, schema)


# --- fields ----------------------------------------------------------------------------------------------------------


class Block:
    """Whole stored lines, cut into fields. `offset` is that of the first line; WAL lines have their seq as offset.

    `marks_from`: the first seq whose routing key may have a mark.
    """

    def __init__(self, lines: Lines, topic: str, by_seq: bool, marks_from: int = 0) -> None:
        self.lines, self.offset, self.topic, self.by_seq = lines.data, lines.offset, topic, by_seq
        self.marks_from, self.decoded = marks_from, False
        self._buffer = pa.py_buffer(lines.data)
        self.bytes: Numbers = np.frombuffer(lines.data, np.uint8)
        ends = lines.newlines
        starts = np.empty_like(ends)
        if len(ends):
            starts[0] = 0
            starts[1:] = ends[:-1] + 1
        filled = np.flatnonzero(ends > starts)
        self.places = None if len(filled) == len(ends) else filled  # which lines are records; None: all of them
        if self.places is not None:
            starts, ends = starts[filled], ends[filled]
        self.count = len(ends)
        # Where the six fields of each line begin and end: one array per field.
        self.starts = [starts, *(found + 1 for found in find_bars(self.bytes, starts, ends))]
        self.ends = [*(begin - 1 for begin in self.starts[1:]), ends]

    @cached_property
    def ascii(self) -> bool:
        return self.lines.isascii()

    def only(self, low: int, high: int) -> "Block":
        """Return the records with offsets low…high-1."""
        at = self.offsets()
        first, last = np.searchsorted(at, [low, high])
        if first == 0 and last == self.count:
            return self
        made = object.__new__(Block)
        made.__dict__.update(
            {name: it for name, it in self.__dict__.items() if name not in ("id", "value", "_id_and_pairs", "seqs")}
        )
        made.starts = [each[first:last] for each in self.starts]
        made.ends = [each[first:last] for each in self.ends]
        made.count = int(last - first)
        made.offset = int(at[first]) if made.count else low
        made.places = at[first:last] - made.offset if self.places is not None else None
        return made

    # --- fields ------------------------------------------------------------------------------------------------------

    def span(self, begins: Numbers, ends: Numbers, order: Numbers | None = None) -> pa.Array:
        """Return the bytes begins[i]…ends[i] of the buffer as a binary array. `order`: which i, and in which order."""
        return _cut(self._buffer, begins, ends, order)

    def field(self, number: int) -> pa.Array:
        """Return one field of each record, as stored: 0 (seq) to 5 (payload)."""
        return self.span(self.starts[number], self.ends[number])

    def line(self) -> pa.Array:
        return self.span(self.starts[0], self.ends[-1])

    def numbers(self, begins: Numbers, ends: Numbers) -> Numbers:
        """Return the decimal numbers at the bytes begins[i]…ends[i]. Raises pa.ArrowInvalid if one is not a number."""
        found = parse_numbers(self.bytes, begins, ends)
        if found is None:
            found = self.span(begins, ends).cast(pa.string()).cast(pa.int64()).to_numpy()
        return found

    @cached_property
    def seqs(self) -> Numbers:
        return self.numbers(self.starts[0], self.ends[0])

    def offsets(self) -> Numbers:
        """Return the offset of each record."""
        if self.by_seq:
            return self.seqs
        return self.offset + (np.arange(self.count) if self.places is None else self.places)

    def recv_micros(self) -> Numbers:
        """Return recv_ts in microseconds since the epoch; it always has six decimals."""
        begins, ends = self.starts[1], self.ends[1]
        return self.numbers(begins, ends - 7) * 1_000_000 + self.numbers(ends - 6, ends)

    def key(self) -> pa.Array:
        if self.by_seq:
            return pa.nulls(self.count, pa.binary())
        ends = self.ends[2]
        behind = self.starts[2] + len(self.topic.encode())
        begins = np.minimum(behind + 1, ends)
        has_key = begins < ends
        if self.lines.find(b"@") >= 0 and self.lines.find(b".@") >= 0:
            mark_ends = self._mark_ends(behind)
            has_key = np.where(mark_ends, mark_ends < ends, has_key)
            begins = np.where(mark_ends, np.minimum(mark_ends + 1, ends), begins)
        keys = self.span(begins, ends)
        return keys if has_key.all() else pc.if_else(pa.array(has_key), keys, pa.scalar(None, pa.binary()))

    def _mark_ends(self, begins: Numbers) -> Numbers:
        """Return where the mark after the topic, at `begins`, ends in each routing key; 0 without a mark."""
        data, ends = self.bytes, self.ends[2]
        dots, ats = data[np.minimum(begins, ends)], data[np.minimum(begins + 1, ends)]
        is_mark = (dots == ord(".")) & (ats == ord("@"))
        if self.marks_from:
            is_mark &= self.seqs >= self.marks_from
        at = np.where(is_mark, begins + 2, ends)
        while (digits := (at < ends) & (data[at] >= ord("0")) & (data[at] <= ord("9"))).any():
            at = at + digits
        return np.where(is_mark & ((at == ends) | (data[at] == ord("."))), at, 0)

    @cached_property
    def id(self) -> tuple[pa.Array, pa.Array]:
        """Return (id, headers) of each record: the id before the first `;`, and a map of the headers that its client
        sent.

        If a record has several headers of one name, the map has the first.
        """
        ids, offsets, names, values = self._id_and_pairs
        offsets, names, values = _first_of_each_name(offsets, _text_of(names), _text_of(values))
        return ids, pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values)

    def headers(self) -> pa.Array:
        """Return the headers as structs of name and exact value; null without headers."""
        _, offsets, names, values = self._id_and_pairs
        pairs = pa.StructArray.from_arrays([_text_of(names), decoded_bytes(values)], ["key", "value"])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pairs, mask=pa.array(np.diff(offsets) == 0))

    @cached_property
    def _id_and_pairs(self) -> tuple[pa.Array, Numbers, pa.Array, pa.Array]:
        """Return (id of each record, offsets of the records in the headers, names, values), all as stored.

        These are the headers that text.client_headers yields. A value is null without `=`.
        """
        field = self.field(4)
        nothing = pa.array([], pa.binary())
        if self.lines.find(b";") < 0 or not len(field):
            return field, np.zeros(self.count + 1, np.int32), nothing, nothing
        parts = pc.split_pattern(field, b";")
        starts = parts.offsets.to_numpy()
        texts = parts.flatten()
        first = starts[:-1]
        rest = np.ones(len(texts), bool)
        rest[first] = False
        ids = texts.take(pa.array(first))
        names, values = _name_and_value(texts.filter(pa.array(rest)))
        offsets = (starts - np.arange(len(starts))).astype(np.int32)
        is_sent = ~_is_transport(names)
        return ids, *_only(is_sent, offsets, names, values)

    @cached_property
    def value(self) -> pa.Array:
        """Return the decoded payloads, null if empty. Sets `decoded` to True if any payload was base64."""
        payloads = self.field(5)
        is_empty = self.starts[5] == self.ends[5]
        if is_empty.any():
            payloads = pc.if_else(pa.array(is_empty), pa.scalar(None, pa.binary()), payloads)
        if not self._has_encoded:
            return payloads
        ids = self.field(4)
        are_lines = pc.match_substring_regex(ids, rb";enc=lf(;|$)")
        if pc.any(are_lines).as_py():
            newline, nothing = pa.scalar(b"\n", pa.binary()), pa.scalar(b"", pa.binary())
            payloads = pc.if_else(are_lines, pc.binary_join_element_wise(payloads, newline, nothing), payloads)
        encoded = np.flatnonzero(pc.match_substring_regex(ids, rb";enc=b64(;|$)").to_numpy(zero_copy_only=False))
        if not len(encoded):
            return payloads
        self.decoded = True
        decoded = payloads.to_pylist() if len(encoded) * 4 > self.count else None
        if decoded is None:
            chosen = np.zeros(self.count, bool)
            chosen[encoded] = True
            texts = [_base64(text) for text in payloads.take(pa.array(encoded)).to_pylist()]
            return pc.replace_with_mask(payloads, pa.array(chosen), pa.array(texts, pa.binary()))
        for at in encoded.tolist():
            decoded[at] = _base64(decoded[at])
        return pa.array(decoded, pa.binary())

    @cached_property
    def _has_encoded(self) -> bool:
        """Return False if no payload has a header that says how it is encoded."""
        return self.lines.find(b";") >= 0 and any(self.lines.find(mark) >= 0 for mark in (b";enc=b64", b";enc=lf"))

    def value_lines(self) -> pa.Array:
        """Return the decoded payloads, empty if null, each with a newline at its end."""
        if not self._has_encoded:
            return self.span(self.starts[5], self.ends[5] + 1)
        end = pa.scalar(b"\n")
        return pc.binary_join_element_wise(self.value.fill_null(b""), end, pa.scalar(b""))

    def value_text(self) -> pa.Array:
        payloads = self.value  # sets `decoded`
        return text(payloads, self.ascii and not self.decoded)


def _base64(text: bytes | None) -> bytes:
    try:
        return b64decode(text or b"", validate=True)
    except ValueError:  # not base64 although its producer marked it so: keep it as it is
        return text or b""


def _cut(data: pa.Buffer, begins: Numbers, ends: Numbers, order: Numbers | None = None) -> pa.Array:
    """Return the bytes begins[i]…ends[i] of `data` as a binary array. `order`: which i, and in which order.

    One array of offsets cuts the buffer into wanted and unwanted parts, without a copy; `take` gathers the wanted ones.
    """
    cuts = np.empty(2 * len(begins) + 1, np.int32)
    cuts[0:-1:2], cuts[1:-1:2] = begins, ends
    cuts[-1] = cuts[-2] if len(begins) else 0
    pieces = pa.Array.from_buffers(pa.binary(), len(cuts) - 1, [None, pa.py_buffer(cuts), data])
    return pieces.take(pa.array(2 * (np.arange(len(begins), dtype=np.int32) if order is None else order)))


def _name_and_value(pairs: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Split `name=value` texts into names and values; without `=` the value is null."""
    at = np.frombuffer(pairs.buffers()[1], np.int32)[pairs.offset : pairs.offset + len(pairs) + 1]
    sign = pc.find_substring(pairs, b"=").to_numpy()
    begins, ends = at[:-1], at[1:]
    middle = np.where(sign < 0, ends, begins + sign)
    data = pairs.buffers()[2]
    values = _cut(data, np.minimum(middle + 1, ends), ends)
    if (sign < 0).any():
        values = pc.if_else(pa.array(sign < 0), pa.scalar(None, pa.binary()), values)
    return _cut(data, begins, middle), values


def _is_transport(names: pa.Array) -> Mask:
    """Return which names, as stored, text.is_transport_header knows as KMQ's own."""
    own = pc.or_(pc.equal(pc.binary_length(names), 1), pc.equal(names, pa.scalar(b"enc")))
    return np.asarray(own.to_numpy(zero_copy_only=False), bool)


def _only(selected: Mask, offsets: Numbers, names: pa.Array, values: pa.Array) -> tuple[Numbers, pa.Array, pa.Array]:
    """Return the headers that are kept, and where those of each record begin among them."""
    if selected.all():
        return offsets, names, values
    before = np.concatenate(([0], np.cumsum(selected))).astype(np.int32)
    mask = pa.array(selected)
    return before[offsets], names.filter(mask), values.filter(mask)


def _first_of_each_name(offsets: Numbers, names: pa.Array, values: pa.Array) -> tuple[Numbers, pa.Array, pa.Array]:
    codes = names.dictionary_encode()
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    _, first = np.unique(rows * max(1, len(codes.dictionary)) + codes.indices.to_numpy(), return_index=True)
    selected = np.zeros(len(names), bool)
    selected[first] = True
    return _only(selected, offsets, names, values)


def _text_of(stored: pa.Array) -> pa.Array:
    return decoded(text(stored)) if len(stored) else pa.array([], pa.string())


# --- text ------------------------------------------------------------------------------------------------------------


def text(array: pa.Array, ascii: bool = False) -> pa.Array:
    """Return bytes as UTF-8 text, with U+FFFD for invalid bytes."""
    made = array.view(pa.string()) if array.type == pa.binary() else array
    if not ascii:
        try:
            made.validate(full=True)
        except pa.ArrowInvalid:
            return pa.array(
                [each if each is None else each.decode(errors="replace") for each in array.to_pylist()], pa.string()
            )
    return made


def decoded(array: pa.Array) -> pa.Array:
    """Return text, percent-decoded."""
    found = np.flatnonzero(pc.match_substring(array, "%").fill_null(False).to_numpy(zero_copy_only=False))
    if not len(found):
        return array
    chosen = np.zeros(len(array), bool)
    chosen[found] = True
    texts = [unquote_to_bytes(each).decode(errors="replace") for each in array.take(pa.array(found)).to_pylist()]
    return pc.replace_with_mask(array, pa.array(chosen), pa.array(texts, pa.string()))


def decoded_bytes(array: pa.Array) -> pa.Array:
    """Return bytes, percent-decoded."""
    if not pc.any(pc.match_substring(array, b"%")).as_py():
        return array
    return pa.array([each if each is None else unquote_to_bytes(each) for each in array.to_pylist()], pa.binary())


def _same(value: str, count: int) -> pa.Array:
    """Return one text `count` times."""
    data = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * len(data)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


# --- columns ---------------------------------------------------------------------------------------------------------


class Where(NamedTuple):
    """The values of a block's columns that are not in its lines."""

    broker: str
    topic: str
    partition: int
    origin: str = ""  # id of the data directory


_MAKE: dict[str, Callable[[Block, Where, bool], pa.Array]] = {
    "broker": lambda block, where, exact: _same(where.broker, block.count),
    "topic": lambda block, where, exact: _same(where.topic, block.count),
    "partition": lambda block, where, exact: pa.array(np.full(block.count, where.partition, np.int32)),
    "offset": lambda block, where, exact: pa.array(block.offsets(), pa.int64()),
    "seq": lambda block, where, exact: pa.array(block.seqs),
    "recv_ts": lambda block, where, exact: pa.array(block.recv_micros()).cast(pa.timestamp("us", "UTC")),
    "key": lambda block, where, exact: block.key() if exact else decoded(text(block.key(), block.ascii)),
    "routing_key": lambda block, where, exact: block.field(2) if exact else text(block.field(2), block.ascii),
    "producer_ts": lambda block, where, exact: block.field(3) if exact else text(block.field(3), block.ascii),
    "id": lambda block, where, exact: block.id[0] if exact else decoded(text(block.id[0], block.ascii)),
    "headers": lambda block, where, exact: block.headers() if exact else block.id[1],
    "value": lambda block, where, exact: block.value,
    "value_text": lambda block, where, exact: block.value if exact else block.value_text(),
    KEY_BYTES: lambda block, where, exact: decoded_bytes(block.key()),
    LINE: lambda block, where, exact: block.line(),
    "timestampType": lambda block, where, exact: pa.array(np.full(block.count, _LOG_APPEND_TIME, np.int32)),
    "origin_broker": lambda block, where, exact: _same(where.origin, block.count),
}
# Columns equal to another column, which is made only once.
_ALIASES = {
    "timestamp": "recv_ts",
    "origin_topic": "topic",
    "origin_partition": "partition",
    "origin_offset": "offset",
}


def batch(block: Block, where: Where, names: Sequence[str], exact: Sequence[bool], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns `names` of a block; `exact[i]`: as bytes. Spark expects `schema`."""
    wanted = [(_ALIASES.get(name, name), as_bytes) for name, as_bytes in zip(names, exact, strict=True)]
    made = {(name, as_bytes): _MAKE[name](block, where, as_bytes) for name, as_bytes in dict.fromkeys(wanted)}
    arrays = [made[column] for column in wanted]
    return pa.RecordBatch.from_arrays(
        [
            array if array.type == kind.type else array.cast(kind.type)
            for array, kind in zip(arrays, schema, strict=True)
        ],
        schema=schema,
    )
