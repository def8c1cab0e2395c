"""Kafka's record batches (magic 2) as KMQ's lines, and back.

    produce   read_batches → render    a batch of a Produce request → lines as they are sent
    fetch     encode                   stored lines → a batch; patched: a batch kept as it came, with its place

Line        `<topic>.@<partition>[.<key>]|<seconds.mmm>|<id>;p=<producer>[;headers]|<payload>` (kmq/message/record.py).
            A null key is no second dot, an empty one a dot at the end. A null value is an empty payload; an empty value
            and one that is not printable text have the header `enc=b64`; text that ends with a newline is stored
            without that newline, with `enc=lf`. A timestamp of -1 is an empty field, which is read as the time of
            receipt.
Invariant   Key, value, names and values of headers come back byte for byte, whichever bytes they are. A batch is
            rendered as a whole or refused: no line of a bad batch exists.
Memory      At most MAX_BATCH for a batch decompressed, checked before memory is taken, and as much as it has compressed. Its
            lines: at most MAX_TEXT and three times MAX_BATCH, and that twice while they are joined. Caches are bounded.
Cost        The loops read numbers of one or two bytes themselves, and look up what repeats: keys, headers, times. Per
            record of 100 bytes some 1 µs in each direction.
Not covered Whether the records may be stored (sequence numbers, size of a request), and where: the door decides.
"""

import struct
from binascii import b2a_base64
from collections.abc import Iterator
from mmap import mmap
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import cramjam
from crc32c import crc32c

from kmq.gateway.kafka.wire import ErrorCode
from kmq.message import record
from kmq.message.message import SECONDS, Message
from kmq.message.text import (
    are_lines_of_text,
    client_headers,
    decode_payload,
    format_header,
    is_text,
    is_text_line,
    key_text,
    make_routing_key,
)

MAX_BATCH = 16 << 20  # bytes of a batch's records, decompressed
MAX_TEXT = 32 << 20  # bytes of a batch's lines without keys, headers and values
MAX_TIME = 10**15 - 1  # ms: the seconds of a line have twelve digits

# A batch begins with its base offset, the length of what follows, leader epoch, magic and crc. The crc covers the rest:
# attributes, last offset delta, base timestamp, max timestamp, producer id, its epoch, base sequence, count; the records.
_START, _COVERED = struct.Struct(">qiibI"), struct.Struct(">hiqqqhii")
_HEADER_BYTES = _START.size + _COVERED.size
_LENGTH_FROM, _MAGIC_AT = 12, 16
_PLACE, _EPOCH = struct.Struct(">q"), struct.Struct(">i")
_CODEC, _LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20

_RUN, _PARTS = 1000, 5  # records that are rendered at a time, and parts of each line
_CACHED, _CACHED_BYTES = 4096, 128  # a cache holds so many entries, of so many bytes
_IS_BASE64, _IS_LINE = b";enc=b64|", b";enc=lf|"
_PLAIN = bytes(
    byte for byte in range(128) if key_text(bytes([byte])) == chr(byte)
)  # they stand for themselves in a key


class BatchRefused(Exception):
    """A produced batch is refused. `index`: of the wrong record; None if the batch itself is wrong."""

    def __init__(self, code: ErrorCode, text: str, index: int | None = None) -> None:
        super().__init__(text if index is None else f"record {index}: {text}")
        self.code, self.index = code, index


def _invalid(text: str, index: int | None = None) -> BatchRefused:
    return BatchRefused(ErrorCode.invalid_record, text, index)


class RecordBatch(NamedTuple):
    """A produced batch whose header is right. Without a producer id the three numbers of a producer are -1."""

    data: memoryview  # the whole batch, as received
    codec: int
    is_transactional: bool
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int


class BatchProducer(NamedTuple):
    """The producer of a batch, according to its header, which may be damaged."""

    id: int
    epoch: int
    sequence: int


class RenderedLines(NamedTuple):
    """A batch as lines. `is_exact`: the batch shows the same as its lines, so it may be served unchanged."""

    text: bytes
    is_exact: bool


# --- the header of a produced batch ----------------------------------------------------------------------------------


def read_batches(records: bytes | memoryview) -> list[RecordBatch]:
    """Return the batches that a producer sent for one partition. Raises BatchRefused."""
    left = memoryview(records)
    batches = []
    while left:
        batches.append(_read_header(left))
        left = left[len(batches[-1].data) :]
    return batches


def read_producer(records: bytes | memoryview) -> BatchProducer | None:
    """Return the producer of the first batch, even of a refused one; None: it has none, or there is no batch."""
    if len(records) < _HEADER_BYTES or records[_MAGIC_AT] != 2:
        return None
    *_, id, epoch, sequence, _ = _COVERED.unpack_from(records, _START.size)
    return BatchProducer(id, epoch, sequence) if min(id, epoch, sequence) >= 0 else None


def _read_header(data: memoryview) -> RecordBatch:
    """Return the batch at the beginning of `data`. Raises BatchRefused for a forbidden or inconsistent header."""
    if len(data) > _MAGIC_AT and data[_MAGIC_AT] < 2:
        text = f"magic {data[_MAGIC_AT]}: only batches of magic 2 are read"
        raise BatchRefused(ErrorCode.unsupported_for_message_format, text)
    if len(data) < _HEADER_BYTES:
        raise BatchRefused(ErrorCode.corrupt_message, f"{len(data)} bytes: a batch has {_HEADER_BYTES} or more")
    _, length, _, magic, crc = _START.unpack_from(data)
    end = _LENGTH_FROM + length
    if magic != 2 or not _HEADER_BYTES <= end <= len(data):
        raise BatchRefused(ErrorCode.corrupt_message, f"magic {magic}, {end} bytes, of which {len(data)} are there")
    if crc32c(data[_START.size : end]) != crc:
        raise BatchRefused(ErrorCode.corrupt_message, "the crc is wrong")
    attributes, last_delta, *covered = _COVERED.unpack_from(data, _START.size)
    is_transactional = bool(attributes & _TRANSACTIONAL)
    batch = RecordBatch(data[:end], attributes & _CODEC, is_transactional, *covered)
    if batch.codec > 4:
        raise BatchRefused(ErrorCode.unsupported_compression_type, f"codec {batch.codec}: 0 to 4 are known")
    if attributes & _CONTROL:
        raise _invalid("a control batch, which only a broker may write")
    if attributes & _LOG_APPEND_TIME:
        raise BatchRefused(ErrorCode.invalid_timestamp, "LogAppendTime, which only a broker may set")
    if batch.record_count < 1 or last_delta != batch.record_count - 1:
        raise _invalid(f"{batch.record_count} records with a last offset delta of {last_delta}")
    is_named = batch.producer_id >= 0
    if (is_named and min(batch.producer_epoch, batch.base_sequence) < 0) or (is_transactional and not is_named):
        raise _invalid(f"producer {batch.producer_id}, epoch {batch.producer_epoch}, sequence {batch.base_sequence}")
    return batch


# --- decompression ---------------------------------------------------------------------------------------------------


_DECOMPRESS_INTO = {1: cramjam.gzip.decompress_into, 3: cramjam.lz4.decompress_into, 4: cramjam.zstd.decompress_into}


def _decompress(batch: RecordBatch) -> bytes:
    """Return the records of a batch, of at most MAX_BATCH bytes. Raises BatchRefused."""
    data = batch.data[_HEADER_BYTES:]
    if not batch.codec:
        if len(data) > MAX_BATCH:
            raise _too_large()
        return bytes(data)
    try:
        if batch.codec == 2:
            return _snappy(data)
        # A page of this mapping takes memory when it is written: a small batch costs little, a bomb at most MAX_BATCH.
        with mmap(-1, MAX_BATCH) as output:
            return output[: _DECOMPRESS_INTO[batch.codec](data, output)]
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error):
            raise _too_large() from None
        raise _invalid(f"codec {batch.codec}: {error}") from None


def _snappy(data: memoryview) -> bytes:
    """Decompress one block, or the blocks that the Java library xerial frames. A block begins with its length."""
    if bytes(data[:8]) != b"\x82SNAPPY\0":
        return _snappy_block(data, MAX_BATCH)
    output, at = bytearray(), 16  # two versions follow the name, and have never changed
    while at < len(data):
        start = at + 4
        at = start + int.from_bytes(data[at:start])
        if at > len(data):
            raise _invalid("codec 2: the last block is cut")
        output += _snappy_block(data[start:at], MAX_BATCH - len(output))
    return bytes(output)


def _snappy_block(block: memoryview, most: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > most:
        raise _too_large()
    return bytes(cramjam.snappy.decompress_raw(block))


def _too_large() -> BatchRefused:
    return BatchRefused(ErrorCode.message_too_large, f"the batch is over {MAX_BATCH} bytes decompressed")


# --- produced records as lines ---------------------------------------------------------------------------------------


def render(
    batch: RecordBatch,
    topic: str,
    partition: int,
    producer: bytes,
    first_id: int,
    max_line: int,
    *,
    requires_key: bool = False,
    held: bytes = b"",
) -> RenderedLines:
    """Return the records of a batch as lines of `producer` with rising ids. Raises BatchRefused.

    The framer adds the producer to a line without one; adding it here is cheaper. `max_line`: bytes of a line without
    its newline. `requires_key`: refuse a null key. `held`: for a transaction, the routing key of lines of
    `__transactions` whose payloads are these lines without their ids (transactions.py); otherwise b"".
    """
    routing_key = make_routing_key(topic, partition=partition)
    if batch.record_count * (len(routing_key) + len(held) + 100) > MAX_TEXT:
        text = f"{batch.record_count} records would be over {MAX_TEXT} bytes as lines"
        raise BatchRefused(ErrorCode.message_too_large, text)
    body = _decompress(batch)
    heads, stamps = _Heads(routing_key, requires_key), _Stamps(batch.base_timestamp)
    at, texts = 0, []
    for first in range(0, batch.record_count, _RUN):
        parts: list[bytes] = []
        try:
            at = _parse(body, at, range(first, min(first + _RUN, batch.record_count)), heads, stamps, parts)
        except IndexError:
            raise _invalid("it ends before it should", first + len(parts) // _PARTS) from None
        except BatchRefused as error:
            raise BatchRefused(error.code, str(error), first + len(parts) // _PARTS) from None
        lines = _joined(parts, producer, first_id + first, held)
        if len(lines) > max_line:
            _check_lengths(lines, max_line, first)
        texts.append(lines)
    if at != len(body):
        raise _invalid(f"its records say that they take {at} bytes; they take {len(body)}")
    is_exact = stamps.latest == batch.max_timestamp and not stamps.has_absent
    return RenderedLines(b"".join(texts), is_exact)


class _Heads(dict[bytes | None, bytes]):
    """key → how its lines begin: newline, routing key, separator."""

    def __init__(self, routing_key: bytes, requires_key: bool) -> None:
        self.start = b"\n" + routing_key
        if not requires_key:
            self[None] = self.start + b"|"

    def __missing__(self, key: bytes | None) -> bytes:
        if key is None:
            raise _invalid("its key is null, and the topic is compacted")
        text = key if not key.translate(None, _PLAIN) else key_text(key).encode()
        head = b"%b.%b|" % (self.start, text)
        if len(self) < _CACHED:
            self[key] = head
        return head


class _Stamps(dict[int, bytes]):
    """Time of a record as its delta is stored → its field. `latest`: the largest of them in ms; -1 is no time."""

    def __init__(self, base: int) -> None:
        self.base, self.latest, self.has_absent = base, -1, False

    def __missing__(self, delta: int) -> bytes:
        ms = self.base + (delta >> 1 ^ -(delta & 1))
        if not -1 <= ms <= MAX_TIME:
            raise BatchRefused(ErrorCode.invalid_timestamp, f"its timestamp is {ms}; it may be -1 to {MAX_TIME}")
        stamp = b"%d.%03d|" % divmod(ms, 1000) if ms >= 0 else b"|"
        self.latest, self.has_absent = max(self.latest, ms), self.has_absent or ms < 0
        if len(self) < _CACHED:
            self[delta] = stamp
        return stamp


class _SentHeaders(dict[bytes, bytes]):
    """Headers of a Kafka record → what follows the id in its line, with the separator."""

    def __missing__(self, stored: bytes) -> bytes:
        count, at = _number(stored, 0)
        field, odd = "", count
        for _ in range(count >> 1):
            size, at = _number(stored, at)
            name = stored[at : at + (size >> 1)]
            at, odd = at + (size >> 1), odd | size
            size, at = _number(stored, at)
            if size == 1:
                field += format_header(name, None)
            else:
                field += format_header(name, stored[at : at + (size >> 1)])
                at, odd = at + (size >> 1), odd | size
        if odd & 1 or at != len(stored):
            raise _invalid("its headers are not as long as it says")
        headers = field.encode() + b"|"
        if len(stored) <= _CACHED_BYTES:
            if len(self) >= _CACHED:
                self.clear()
            self[stored] = headers
        return headers


_sent_headers = _SentHeaders({b"\0": b"|"})


def _parse(body: bytes, at: int, indices: range, heads: _Heads, stamps: _Stamps, parts: list[bytes]) -> int:
    """Add five parts of each record to `parts`: routing key, time, room for the id, headers, value. Return their end.

    A length is stored as twice its value, -1 as 1. A slice past its record leaves no bytes for the headers: refused.
    """
    stamp, stamped = b"", -1
    for index in indices:
        if (size := body[at]) < 128:
            at += 1
        elif (high := body[at + 1]) < 128:
            size += (high << 7) - 128
            at += 2
        else:
            size, at = _number(body, at)
        end = at + (size >> 1)
        odd = 1 if body[at] else size  # no record has attributes
        if (delta := body[at + 1]) < 128:
            at += 2
        elif (high := body[at + 2]) < 128:
            delta += (high << 7) - 128
            at += 3
        else:
            delta, at = _number(body, at + 1, 10)
        if (offset := body[at]) < 128:
            at += 1
        elif (high := body[at + 1]) < 128:
            offset += (high << 7) - 128
            at += 2
        else:
            offset, at = _number(body, at)
        if (key_size := body[at]) < 128:
            at += 1
        else:
            key_size, at = _number(body, at)
        key = None
        if key_size != 1:
            key = body[at : at + (key_size >> 1)]
            at += key_size >> 1
            odd |= key_size
        if (value_size := body[at]) < 128:
            at += 1
        elif (high := body[at + 1]) < 128:
            value_size += (high << 7) - 128
            at += 2
        else:
            value_size, at = _number(body, at)
        value = body[at : at + (value_size >> 1)]
        at += value_size >> 1
        headers = _sent_headers[body[at:end]]
        if value_size != 1:
            odd |= value_size
            if not value_size:
                headers = headers[:-1] + _IS_BASE64
        if odd & 1 or offset != index << 1:
            raise _invalid("a length is negative, it has attributes, or its offset delta is not its index")
        if delta != stamped:
            stamp, stamped = stamps[delta], delta
        parts += (heads[key], stamp, b"", headers, value)
        at = end
    return at


def _number(data: bytes, at: int, most: int = 5) -> tuple[int, int]:
    """Return the stored number at `at` (its sign in the last bit), and where it ends.

    Raises BatchRefused above `most` bytes, which no client reads; IndexError at the end of `data`.
    """
    number = shift = 0
    while (byte := data[at]) > 127:
        number |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift == 7 * most:
            raise _invalid(f"it has a number of over {most} bytes")
    return number | byte << shift, at + 1


def _joined(parts: list[bytes], producer: bytes, first_id: int, held: bytes) -> bytes:
    """Return the lines of parsed records."""
    count = len(parts) // _PARTS
    owned = b"%%d;p=%b" % producer
    ids = [owned % id for id in range(first_id, first_id + count)]
    if held:
        heads = zip(ids, parts[0::_PARTS], strict=True)
        parts[0::_PARTS] = [b"\n%b||%b|%b" % (held, id, head[1:]) for id, head in heads]
    else:
        parts[2::_PARTS] = ids
    parts[0] = parts[0][1:]  # each line begins with the newline of the line before
    parts.append(b"\n")
    if is_text(parts[4]):
        text = b"".join(parts)
        if are_lines_of_text(text, count):
            return text
    for at in range(4, count * _PARTS, _PARTS):
        if is_text_line(parts[at]):
            parts[at] = parts[at][:-1]
            parts[at - 1] = parts[at - 1][:-1] + _IS_LINE
        elif not is_text(parts[at]):
            parts[at] = b2a_base64(parts[at], newline=False)
            parts[at - 1] = parts[at - 1][:-1] + _IS_BASE64
    return b"".join(parts)


def _check_lengths(lines: bytes, max_line: int, first: int) -> None:
    for index, line in enumerate(lines.split(b"\n"), first):
        if len(line) > max_line:
            text = f"its line has {len(line)} bytes, KMQ_MAX_LINE is {max_line}"
            raise BatchRefused(ErrorCode.message_too_large, text, index)


# --- stored lines as a batch -----------------------------------------------------------------------------------------


class _Varints(dict[int, bytes]):
    """A number → its form in Kafka's records."""

    def __missing__(self, number: int) -> bytes:
        left, stored = number << 1 ^ number >> 63, bytearray()
        while left > 127:
            stored.append(left & 127 | 128)
            left >>= 7
        stored.append(left)
        varint = bytes(stored)
        if -1 <= number < 1 << 13:  # those of two bytes
            self[number] = varint
        return varint


class _StoredHeaders(dict[bytes, tuple[bytes, bool]]):
    """What follows the id of a stored line → headers of a Kafka record, and whether the payload is encoded."""

    def __missing__(self, field: bytes) -> tuple[bytes, bool]:
        count, parts = 0, [b""]
        for count, (name, value) in enumerate(client_headers(field), 1):  # noqa: B007
            parts += (_varints[len(name)], name, _varints[-1 if value is None else len(value)], value or b"")
        parts[0] = _varints[count]
        found = b"".join(parts), b";enc=" in field
        if len(field) <= _CACHED_BYTES:
            if len(self) >= _CACHED:
                self.clear()
            self[field] = found
        return found


_varints = _Varints()
_stored_headers = _StoredHeaders()


def encode(
    topic: str,
    partition: int,
    first_offset: int,
    lines: bytes,
    *,
    marks_from: int = 0,
    leader_epoch: int = 0,
    log_append_time: bool = False,
) -> bytes:
    """Return whole stored lines as a batch, uncompressed. Without lines, return nothing.

    A line that is only a newline, left by compaction, has an offset and no record. A fetch should not return only a
    batch without records: librdkafka takes it for a record that did not fit, and doubles the bytes that it asks for.
    `marks_from`: the seq from which a mark in a routing key counts. `log_append_time`: show when the lines were
    received, in a batch for each millisecond, because clients show one time for all records of such a batch.
    """
    rows = lines.split(b"\n")[:-1]
    runs = _receipts(rows) if log_append_time else [(0, len(rows), None)]
    attributes = _LOG_APPEND_TIME if log_append_time else 0
    batches: list[bytes] = []
    for first, end, received in runs if rows else ():
        offset = first_offset + first
        records, base, latest, count = _records(topic, partition, offset, rows[first:end], marks_from, received)
        covered = _COVERED.pack(attributes, end - first - 1, base, latest, -1, -1, -1, count)
        length = _HEADER_BYTES - _LENGTH_FROM + len(records)
        start = _START.pack(offset, length, leader_epoch, 2, crc32c(records, crc32c(covered)))
        batches += (start, covered, records)
    return b"".join(batches)


def _receipts(rows: list[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, ms) of lines received in the same millisecond. Blank lines belong to the lines before them."""
    first, ms = 0, -1
    for index, row in enumerate(rows):
        if row:
            received = record.parse_ts(row.split(b"|", 2)[1]) // 1000
            if ms not in (-1, received):
                yield first, index, ms
                first = index
            ms = received
    yield first, len(rows), ms


def _records(
    topic: str, partition: int, first_offset: int, rows: list[bytes], marks_from: int, received: int | None
) -> tuple[bytes, int, int, int]:
    """Return the records of a batch, their first and latest time in ms (-1: no record), and their number.

    `received`: the time of every record; None: the time that its producer gave.
    """
    first_row = next(filter(None, rows), b"")
    is_settled = not first_row or record.seq_of(first_row) >= marks_from  # a routing key always means the same key
    prefix = make_routing_key(topic, b"", partition)
    keys: dict[bytes, bytes] = {}
    times: dict[bytes, bytes] = {}
    parts: list[bytes] = []
    fixed_time = None if received is None else b"\0\0"
    base = latest = -1 if received is None else received
    count = 0
    for delta, row in enumerate(rows):
        if not row:
            continue
        _, receipt, routing_key, sent, id, payload = row.split(b"|", 5)  # hot loop: what Message does, remembered
        time = fixed_time or times.get(sent)
        if time is None:
            is_time = SECONDS.fullmatch(sent)
            ms = round(float(sent if is_time else receipt) * 1000)
            base, latest = base if count else ms, max(latest, ms)
            time = b"\0" + _varints[ms - base]
            if is_time:
                times[sent] = time
        key = keys.get(routing_key)
        if key is None:
            if is_settled and routing_key.startswith(prefix):
                exact: bytes | None = unquote_to_bytes(routing_key[len(prefix) :])
            else:
                exact = Message(topic, partition, first_offset + delta, row, marks_from).key
            key = _varints[-1] if exact is None else _varints[len(exact)] + exact
            if is_settled:
                keys[routing_key] = key
        headers, value = b"\0", payload or None
        headers_at = id.find(b";")
        if headers_at >= 0:
            headers, is_encoded = _stored_headers[id[headers_at:]]
            if is_encoded:
                value = decode_payload(id, payload)
        value_size = _varints[-1 if value is None else len(value)]
        offset = _varints[delta]
        size = len(time) + len(offset) + len(key) + len(value_size) + len(value or b"") + len(headers)
        parts += (_varints[size], time, offset, key, value_size, value or b"", headers)
        count += 1
    return b"".join(parts), base, latest, count


def patched(batch: bytes | memoryview, base_offset: int, leader_epoch: int) -> bytes:
    """Return a batch with another offset and leader epoch, which its crc does not cover."""
    place, epoch = _PLACE.pack(base_offset), _EPOCH.pack(leader_epoch)
    return b"".join((place, batch[len(place) : _LENGTH_FROM], epoch, batch[_MAGIC_AT:]))
