"""Convert Arrow columns to lines as sent, a column at a time: what kmq/message/text.py does for single messages.

    routing_key                     as it is, or made of topic and key like make_routing_key (null: no key)
    partition                       only with option usePartition: the number in the routing key's mark. Null: the key
                                    decides
    producer_ts                     text as it is, or a timestamp; null or missing: now
    id                              one number per row, given or made
    headers map<string,string>      as a client's: a name that is KMQ's own in a line (one letter, enc) is stored
                                    percent-encoded. reason and len stay, so that a copy of a dead letter keeps its
                                    reason. A null value is a null header.
    headers array<struct<…>>        the same in the shape of Kafka's connector, key string and value binary: repeated
                                    names keep their order. Values are any bytes, percent-encoded if they are not plain
                                    text.
    value                           bytes or text. Null is an empty payload, which compaction treats as a deletion. An
                                    empty value is sent as base64, and is read back as empty.

Invariant   A batch becomes lines as a whole or not at all: a row that no line can hold is a RowError, which names
            column, row and limit, before a byte of the batch is sent. A reader always gets what was written, to the
            byte.
Speed       Python touches single rows only if something in them must be encoded: a value that is not printable text, a
            key with a dot. Everything else is done on whole columns: some 2 million rows/s of 100 bytes.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable
from itertools import repeat
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kmq.errors import EXIT_CONFIG, KmqError
from kmq.message import record
from kmq.message.ids import MAX_ID_DIGITS
from kmq.message.routing import exact
from kmq.message.text import format_header, is_text, is_transport_header, make_routing_key, percent_encode

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class RowError(KmqError):
    """A line cannot hold this row."""

    exit_code = EXIT_CONFIG

    def __init__(self, row: int, column: str, problem: str) -> None:
        super().__init__(f"row {row} of this Spark partition, column {column}: {problem}")


def _bytes_of(*characters: str) -> Mask:
    table = np.zeros(256, bool)
    table[[ord(character) for character in "".join(characters)]] = True
    return table


_SAFE = "".join(chr(c) for c in range(128) if percent_encode(chr(c)) == chr(c))
_BREAKS = _bytes_of("|\n\0")  # bytes that no field before the payload can hold
_ENCODED = ~_bytes_of(_SAFE)  # bytes that are percent-encoded in header values
_ENCODED_IN_KEYS = _ENCODED | _bytes_of(".")
_NO_DIGITS = ~_bytes_of("0123456789")


def to_lines(
    batch: pa.RecordBatch,
    ids: Ints,
    now: float,
    *,
    topic: str = "",
    max_line: int,
    first_row: int = 0,
    use_partition: bool = False,
) -> pa.BinaryArray:
    """Return a line for each row, with its newline. Raises RowError.

    `topic`: the topic of all rows, "" if columns name it. `first_row`: the number of the first row, for errors.
    `use_partition`: column partition decides the partition of a row.
    """
    value, encoded = _payloads(batch)
    parts = [
        *_routing_keys(batch, topic, first_row, use_partition),
        *_producer_ts(batch, now, first_row),
        pa.array(ids).cast(pa.string()).cast(pa.binary()),
        *_headers(batch, first_row),
        *([] if encoded is None else [pc.if_else(encoded, b";enc=b64", b"")]),
        b"|",
        value,
        b"\n",
    ]
    lines = pc.binary_join_element_wise(*(_scalar(part) for part in parts), b"")
    longest = np.diff(_view(lines)[0]) - 1
    if longest.max(initial=0) > max_line:
        row = int(longest.argmax())
        raise RowError(
            first_row + row,
            "value",
            f"its {len(value[row].as_py()):,} bytes as sent make a line of {longest[row]:,}: "
            f"the broker takes {max_line:,} (KMQ_MAX_LINE)",
        )
    return lines


def block(lines: pa.BinaryArray) -> bytes:
    """Return all lines as one bytes object."""
    offsets, data = _view(lines)
    return data[offsets[0] : offsets[-1]].tobytes()


def pieces(lines: pa.BinaryArray, nbytes: int) -> list[pa.BinaryArray]:
    """Split the lines into arrays of about `nbytes`, with at least one line each."""
    offsets, _ = _view(lines)
    starts, at = [0], 0
    while (at := max(at + 1, int(np.searchsorted(offsets, offsets[at] + nbytes, "right")) - 1)) < len(lines):
        starts.append(at)
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def numbers(batch: pa.RecordBatch, first_row: int = 0) -> Ints:
    """Return the ids of column `id`. Raises RowError if one is not a decimal number of at most 18 digits."""
    texts = batch.column("id").cast(pa.string()).cast(pa.binary()).fill_null(b"")
    lengths = np.diff(_view(texts)[0])
    bad = _holding(texts, _NO_DIGITS) | (lengths == 0) | (lengths > MAX_ID_DIGITS)
    if bad.any():
        row = int(bad.argmax())
        why = f"a producer's ids are decimal numbers of at most {MAX_ID_DIGITS} digits"
        raise RowError(first_row + row, "id", f"{texts[row].as_py()!r}: {why}")
    ids: Ints = texts.cast(pa.string()).cast(pa.int64()).to_numpy()
    return ids


# --- columns ---------------------------------------------------------------------------------------------------------


def _routing_keys(batch: pa.RecordBatch, topic: str, first_row: int, use_partition: bool) -> list[object]:
    names = batch.schema.names
    numbers = _partitions(batch, first_row) if use_partition else None
    if not topic and "routing_key" in names:
        column = _required(batch, "routing_key", first_row)
        _refuse_breaks(column, "routing_key", first_row)
        _check_routing_keys(column, first_row)
        return [column if numbers is None else _with_partitions(batch, column, numbers, first_row), b"|"]
    if topic:
        head: object = topic.encode()
        no_key: object = b".@" if "." in topic else b""
    else:
        head = _required(batch, "topic", first_row)
        _check_topics(head, first_row)
        no_key = pc.if_else(pc.match_substring(head, b"."), b".@", b"")
    mark: object = b".@"
    if numbers is not None:  # a row whose number is null is sent as if there were no such column
        no_key = pc.if_else(numbers.is_valid(), pc.binary_join_element_wise(b".@", _digits(numbers), b""), no_key)
        mark = pc.binary_join_element_wise(b".@", _digits(numbers), b"")
    if "key" not in names:
        return [head, no_key, b"|"]
    column = _binary(batch.column("key"))
    key = _escaped(column.fill_null(b""), _ENCODED_IN_KEYS, _key_text)
    mark = pc.binary_join_element_wise(mark, b".", b"")
    return [head, pc.if_else(column.is_valid(), mark, no_key), key, b"|"]


def _partitions(batch: pa.RecordBatch, first_row: int) -> pa.Array:
    """Return the requested partitions, null where a row requests none. Raises RowError for an impossible number."""
    column = batch.column("partition").cast(pa.int64())
    wrong = pc.or_(pc.less(column, 0), pc.greater_equal(column, record.NO_PARTITION)).fill_null(False)
    if pc.any(wrong).as_py():
        row = pc.index(wrong, True).as_py()
        raise RowError(
            first_row + row, "partition", f"{column[row].as_py()}: must be 0 or more, and one that the topic has"
        )
    return column


def _digits(partitions: pa.Array) -> pa.BinaryArray:
    return partitions.cast(pa.string()).cast(pa.binary()).fill_null(b"")


def _with_partitions(batch: pa.RecordBatch, keys: pa.BinaryArray, numbers: pa.Array, first_row: int) -> pa.BinaryArray:
    """Put the requested partitions into the marks of routing keys; without a mark, column topic tells the topic."""
    topics: Iterable[bytes | None] = repeat(None)
    if "topic" in batch.schema.names:
        topics = _binary(batch.column("topic")).to_pylist()
    found: list[bytes] = []
    for row, (routing_key, number, topic) in enumerate(
        zip(keys.to_pylist(), numbers.to_pylist(), topics, strict=False)
    ):
        mark = record.marked(routing_key) if b".@" in routing_key else None
        if mark is not None:
            topic, key = mark.topic, mark.key
        elif number is None:
            found.append(routing_key)
            continue
        elif b"." not in routing_key:
            topic, key = routing_key, None
        elif topic is not None and (routing_key + b".").startswith(topic + b"."):
            key = routing_key[len(topic) + 1 :] or None
        else:
            why = f"{routing_key[:100]!r}: which part is the topic is not said; give columns topic and key in its place"
            raise RowError(first_row + row, "routing_key", f"{why}, or a mark: <topic>.@.<key>")
        found.append(exact(topic, key) if number is None else b".".join([b"%b.@%d" % (topic, number), *_present(key)]))
    return pa.array(found, pa.binary())


def _present(key: bytes | None) -> tuple[bytes, ...]:
    return () if key is None else (key,)


def _check_routing_keys(column: pa.BinaryArray, first_row: int) -> None:
    text = block(pc.binary_join_element_wise(column, pa.scalar(b"|||\n"), pa.scalar(b"")))
    good = record.good_prefix(text)
    if good < len(text):
        row = text.count(b"\n", 0, good)
        key = column[row].as_py()
        raise RowError(first_row + row, "routing_key", f"{key[:100]!r}: {record.refusal(key + b'|')}")
    if record.marks(text) is None:
        row, key = next((row, key) for row, key in enumerate(column.to_pylist()) if record.refusal(key + b"|"))
        raise RowError(first_row + row, "routing_key", f"{key[:100]!r}: {record.refusal(key + b'|')}")


def _check_topics(column: pa.BinaryArray, first_row: int) -> None:
    for topic in pc.unique(column).to_pylist():
        try:
            reason = record.refusal(make_routing_key(topic.decode()) + b"|")
        except ValueError as err:  # also raised for bytes that are not UTF-8
            reason = str(err)
        if reason:
            row = pc.index(column, topic).as_py()
            raise RowError(first_row + row, "topic", f"{topic[:100]!r}: {reason}")


def _producer_ts(batch: pa.RecordBatch, now: float, first_row: int) -> list[object]:
    text = b"%.6f" % now
    if "producer_ts" not in batch.schema.names:
        return [text + b"|"]
    column = batch.column("producer_ts")
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(int(now * 1e6)).to_numpy()
        seconds, rest = (pa.array(part).cast(pa.string()) for part in np.divmod(micros, 1_000_000))
        column = pc.binary_join_element_wise(seconds, pc.utf8_lpad(rest, 6, "0"), ".")
    column = _binary(column).fill_null(text)
    _refuse_breaks(column, "producer_ts", first_row)
    return [column, b"|"]


def _headers(batch: pa.RecordBatch, first_row: int) -> list[object]:
    """Return `;name=value…` of each row: one buffer holds the texts of all headers, and is only cut into rows."""
    if "headers" not in batch.schema.names:
        return []
    column = batch.column("headers")
    offsets = column.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return []
    names, values = (_binary(child[first:last]) for child in _names_and_values(column))
    if names.null_count:  # only in an array: a map's keys are never null
        row = int(np.searchsorted(offsets, first + pc.index(names.is_null(), True).as_py(), "right")) - 1
        raise RowError(first_row + row, "headers", "a header without a name: its key is null")
    codes = names.dictionary_encode()
    starts = pa.array([_stored_name(name) for name in codes.dictionary.to_pylist()], pa.binary()).take(codes.indices)
    has_value = values.is_valid()
    values = _escaped(values.fill_null(b""), _ENCODED, _percent)
    texts = pc.binary_join_element_wise(starts, pc.if_else(has_value, b"=", b""), values, _scalar(b""))
    ends, data = _view(texts)
    cut = ends[offsets - first].astype(np.int32)
    rows = pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(cut), pa.py_buffer(data)])
    return [pc.if_else(column.is_null(), pa.scalar(b""), rows) if column.null_count else rows]


def _stored_name(name: bytes) -> bytes:
    """Return `;name` as it is stored."""
    if is_transport_header(name):
        return format_header(name, None).encode()
    return b";" + percent_encode(name).replace("=", "%3D").encode()


def _names_and_values(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return names and values of all headers of a column, which is a map or an array of structs."""
    if pa.types.is_map(column.type):
        return column.keys, column.items
    headers = column.values
    names, values = headers.field(0), headers.field(1)
    return (pc.if_else(headers.is_valid(), names, None) if headers.null_count else names), values


def _payloads(batch: pa.RecordBatch) -> tuple[pa.BinaryArray, Mask | None]:
    """Return the payloads as sent, and which of them had to be encoded; None if none had to be."""
    column = batch.column("value")
    is_null = np.asarray(column.is_null())
    value = _binary(column).fill_null(b"")
    offsets, data = _view(value)
    used = data[offsets[0] : offsets[-1]]
    suspect = ((used < 32) & (used != 9) & (used != 13)) | (used == 127)
    encoded = _rows(offsets, suspect)
    if not pa.types.is_string(column.type):
        try:
            value.cast(pa.string())  # also detects a character that the end of its row cuts
        except pa.ArrowInvalid:
            for row in np.flatnonzero(~encoded & _rows(offsets, used > 127)):
                encoded[row] = not is_text(value[int(row)].as_py())
    encoded |= (np.diff(offsets) == 0) & ~is_null
    if not encoded.any():
        return value, None
    return _replaced(value, encoded, b64encode), encoded


# --- arrays ----------------------------------------------------------------------------------------------------------


def _view(array: pa.BinaryArray) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Return (offsets of the rows in the data, the data)."""
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return ends.astype(np.int64), np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)


def _rows(offsets: Ints, marked: Mask) -> Mask:
    """Return which rows contain a marked byte; `marked` begins at the first byte of the first row."""
    holding = np.zeros(len(offsets) - 1, bool)
    holding[np.searchsorted(offsets, np.flatnonzero(marked) + offsets[0], "right") - 1] = True
    return holding


def _holding(array: pa.BinaryArray, table: Mask) -> Mask:
    offsets, data = _view(array)
    return _rows(offsets, table[data[offsets[0] : offsets[-1]]])


def _binary(array: pa.Array) -> pa.BinaryArray:
    return array.cast(pa.string() if pa.types.is_large_string(array.type) else array.type).cast(pa.binary())


def _scalar(part: object) -> object:
    return pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part


def _required(batch: pa.RecordBatch, name: str, first_row: int) -> pa.BinaryArray:
    column = batch.column(name)
    if column.null_count:
        raise RowError(first_row + pc.index(column.is_null(), True).as_py(), name, "is null")
    return _binary(column)


def _refuse_breaks(column: pa.BinaryArray, name: str, first_row: int) -> None:
    bad = _holding(column, _BREAKS)
    if bad.any():
        row = int(bad.argmax())
        text = column[row].as_py()
        raise RowError(first_row + row, name, f"{text[:100]!r} holds a |, a newline or a NUL")


def _escaped(array: pa.BinaryArray, table: Mask, encode: Callable[[bytes], bytes]) -> pa.BinaryArray:
    mask = _holding(array, table)
    return _replaced(array, mask, encode) if mask.any() else array


def _replaced(array: pa.BinaryArray, mask: Mask, encode: Callable[[bytes], bytes]) -> pa.BinaryArray:
    chosen = pa.array(mask)
    new = pa.array([encode(item) for item in array.filter(chosen).to_pylist()], pa.binary())
    return pc.replace_with_mask(array, chosen, new)


def _percent(text: bytes) -> bytes:
    return quote(text, safe=_SAFE).encode()


def _key_text(text: bytes) -> bytes:
    return _percent(text).replace(b".", b"%2E")
