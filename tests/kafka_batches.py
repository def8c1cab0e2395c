"""Kafka's record batches written and read in the plainest way, number by number: what the gateway's are compared with."""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from crc32c import crc32c

Header = tuple[bytes, bytes | None]
START, COVERED = struct.Struct(">qiibI"), struct.Struct(">hiqqqhii")
HEADER_BYTES = START.size + COVERED.size


class Sent(NamedTuple):
    """A record as a client has it."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


def varint(number: int) -> bytes:
    left, out = number * 2 if number >= 0 else -number * 2 - 1, b""
    while left > 127:
        out, left = out + bytes([left % 128 + 128]), left // 128
    return out + bytes([left])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record_of(sent: Sent, base: int, offset_delta: int, attributes: int = 0) -> bytes:
    body = bytes([attributes]) + varint(sent.timestamp - base) + varint(offset_delta) + sized(sent.key)
    body += sized(sent.value) + varint(len(sent.headers))
    return sized(body + b"".join(sized(name) + sized(value) for name, value in sent.headers))


def records_of(sent: Iterable[Sent], base: int, offset_deltas: Iterable[int] | None = None) -> bytes:
    rows = list(sent)
    deltas = range(len(rows)) if offset_deltas is None else offset_deltas
    return b"".join(record_of(row, base, delta) for row, delta in zip(rows, deltas, strict=True))


def framed(
    records: bytes,
    count: int,
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    attributes: int = 0,
    last_delta: int | None = None,
    base: int = 0,
    latest: int = 0,
    producer: tuple[int, int, int] = (-1, -1, -1),
) -> bytes:
    """A batch of these records, compressed already if `attributes` say so."""
    last = count - 1 if last_delta is None else last_delta
    covered = COVERED.pack(attributes, last, base, latest, *producer, count) + records
    return START.pack(base_offset, HEADER_BYTES - 12 + len(records), leader_epoch, 2, crc32c(covered)) + covered


def batch_of(sent: Iterable[Sent], base_offset: int = 0) -> bytes:
    """An uncompressed batch as a client sends it."""
    rows = list(sent)
    base = rows[0].timestamp
    latest = max(row.timestamp for row in rows)
    return framed(records_of(rows, base), len(rows), base_offset=base_offset, base=base, latest=latest)


def with_right_crc(batch: bytes) -> bytes:
    return batch[:17] + crc32c(batch[START.size :]).to_bytes(4) + batch[START.size :]


class Fetched(NamedTuple):
    """A batch as a consumer reads it. `records`: (offset, record)."""

    base_offset: int
    next_offset: int
    leader_epoch: int
    attributes: int
    max_timestamp: int
    producer: tuple[int, int, int]
    records: list[tuple[int, Sent]]


def fetched(batch: bytes, records: bytes | None = None) -> Fetched:
    """Read one batch. `records`: what its records are decompressed. Raises ValueError unless everything is right."""
    base_offset, length, leader_epoch, magic, crc = START.unpack_from(batch)
    attributes, last_delta, base, latest, *producer, count = COVERED.unpack_from(batch, START.size)
    if length != len(batch) - 12 or magic != 2 or crc != crc32c(batch[START.size :]):
        raise ValueError("length, magic or crc")
    data = batch[HEADER_BYTES:] if records is None else records
    at, rows = 0, []

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise ValueError("cut")
        at += size
        return data[at - size : at]

    def number(most: int = 5) -> int:
        stored = 0
        for place in range(most):
            byte = take(1)[0]
            stored += (byte % 128) << (7 * place)
            if byte < 128:
                return stored // 2 if stored % 2 == 0 else -(stored + 1) // 2
        raise ValueError("a number is too long")

    def maybe() -> bytes | None:
        return None if (size := number()) == -1 else take(size)

    for _ in range(count):
        size = number()
        end = at + size
        if take(1) != b"\0":
            raise ValueError("attributes")
        timestamp = base + number(10)
        offset = base_offset + number()
        key, value = maybe(), maybe()
        if (header_count := number()) < 0:
            raise ValueError("headers")
        headers = tuple((take(number()), maybe()) for _ in range(header_count))
        if at != end:
            raise ValueError("size of a record")
        rows.append((offset, Sent(timestamp, key, value, headers)))
    if at != len(data):
        raise ValueError("bytes behind the last record")
    first, second, third = producer
    next_offset = base_offset + last_delta + 1
    return Fetched(base_offset, next_offset, leader_epoch, attributes, latest, (first, second, third), rows)
