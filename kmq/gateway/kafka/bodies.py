"""The bodies of Produce and Fetch, read and written by hand, because they carry the records.

    read_produce(reader, 9)    → ([ProducedPart("orders", 0, <bytes of the batch>)], acks=-1)

Other messages have their layout from kio (wire.py). These two are most of the traffic. Their records are a view of the
request, or bytes of the cache, and are not copied here.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from kmq.config.values import MIB
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import Call
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Key, Reader
from kmq.wire.requests import MAX_WAIT_MS, TopicPartition

UNKNOWN = -1
MAX_ANSWER = 4 * MIB  # bytes of records in an answer to a Fetch, or one batch that is longer
_MOST_ASKED = 10_000  # topics and partitions of a request
_INDEX = struct.Struct(">i")

# --- Produce ---------------------------------------------------------------------------------------------------------

_ACKS_TIMEOUT = struct.Struct(">hi")
_ERRORS_FROM, _START_FROM = 8, 5  # versions


class ProducedPart(NamedTuple):
    """The batch of one partition in a request."""

    topic: str
    partition: int
    records: memoryview | None


class Produced(NamedTuple):
    """The outcome for one part."""

    code: ErrorCode = ErrorCode.none
    offset: int = UNKNOWN
    timestamp: int = -1  # given by the broker, in milliseconds; -1: not given
    text: str | None = None
    record: int | None = None  # the index of the wrong record


def read_produce(reader: Reader, version: int) -> tuple[list[ProducedPart], int]:
    """Return the parts of a Produce request, and its acks. Raises BadRequest."""
    reader.text()  # the transactional id, which the batches have, too
    acks, _ = reader.unpack(_ACKS_TIMEOUT)
    parts = []
    for _ in range(reader.count()):
        topic = reader.text()
        for _ in range(reader.count()):
            (number,) = reader.unpack(_INDEX)
            records = reader.blob()
            reader.tags()
            if topic is None:
                raise BadRequest("a topic without a name")
            parts.append(ProducedPart(topic, number, records))
        reader.tags()
    reader.tags()
    return parts, acks


def produce_response(call: Call, parts: list[ProducedPart], produced: list[Produced]) -> bytes:
    """Return the response to a Produce request."""
    version, out = call.version, wire.Writer(wire.is_flexible(Key.PRODUCE, call.version))
    out.begin(call.header.correlation)
    by_topic: dict[str, list[tuple[ProducedPart, Produced]]] = {}
    for part, found in zip(parts, produced, strict=True):
        by_topic.setdefault(part.topic, []).append((part, found))
    out.count(len(by_topic))
    for topic, rows in by_topic.items():
        out.text(topic)
        out.count(len(rows))
        for part, found in rows:
            out.pack(">ihqq", part.partition, found.code, found.offset, found.timestamp)
            if version >= _START_FROM:
                out.pack(">q", UNKNOWN)
            if version >= _ERRORS_FROM:
                out.count(found.record is not None)
                if found.record is not None:
                    out.pack(">i", found.record)
                    out.text(found.text)
                    out.tags()
                out.text(found.text)
            out.tags()
        out.tags()
    out.pack(">i", 0)
    out.tags()
    return out.frame()


# --- Fetch -----------------------------------------------------------------------------------------------------------


class AskedPartition(NamedTuple):
    """A Fetch of one partition. `epoch`: the leader epoch that the client knows; -1: any."""

    epoch: int
    offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    """A Fetch. `ids`: topic → its id, if the client names topics by ids."""

    wait_s: float
    min_bytes: int
    max_bytes: int
    is_incremental: bool  # it continues a session that another broker has begun
    partitions: dict[TopicPartition, AskedPartition]
    ids: dict[str, UUID]


class Row:
    """A partition's part of the answer."""

    __slots__ = ("code", "end", "first", "records")

    def __init__(self, code: ErrorCode = ErrorCode.none, first: int = UNKNOWN, end: int = UNKNOWN) -> None:
        self.code, self.first, self.end = code, first, end
        self.records: list[bytes] = []


class _Form(NamedTuple):
    """The layout of some versions of Fetch, from `version` on.

    `head`: replica, wait, least and most bytes, isolation; session and its epoch. `partition`: number, known epoch,
    offset, epoch of the last record, first offset of the replica, most bytes. `row`: partition, error, end, stable end,
    first offset. `more`: no list of aborted transactions, no preferred replica.
    """

    version: int
    head: struct.Struct
    partition: struct.Struct
    row: str
    more: bytes


_SESSION_FROM, _EPOCH_FROM, _FIRST_FROM, _RACK_FROM, _IDS_FROM = 7, 9, 5, 11, 13
_NULL = b"\xff" * 4  # an array that is null; or -1
_FORMS = [
    _Form(4, struct.Struct(">iiiib"), struct.Struct(">iqi"), ">ihqq", _NULL),
    _Form(5, struct.Struct(">iiiib"), struct.Struct(">iqqi"), ">ihqqq", _NULL),
    _Form(7, struct.Struct(">iiiibii"), struct.Struct(">iqqi"), ">ihqqq", _NULL),
    _Form(9, struct.Struct(">iiiibii"), struct.Struct(">iiqqi"), ">ihqqq", _NULL),
    _Form(11, struct.Struct(">iiiibii"), struct.Struct(">iiqqi"), ">ihqqq", _NULL + _NULL),
    _Form(12, struct.Struct(">iiiibii"), struct.Struct(">iiqiqi"), ">ihqqq", b"\0" + _NULL),
]


def _form(version: int) -> _Form:
    return next(form for form in reversed(_FORMS) if form.version <= version)


def read_fetch(reader: Reader, version: int) -> FetchRequest:
    """Return a Fetch. Raises BadRequest."""
    form, left = _form(version), _MOST_ASKED

    def entries() -> range:
        nonlocal left
        count = max(0, reader.count())
        left -= count
        if left < 0:
            raise BadRequest(f"more than {_MOST_ASKED} topics and partitions")
        return range(count)

    def topic_name() -> str:
        if version < _IDS_FROM:
            name = reader.text()
        elif (id := reader.uuid()) is None:
            name = None
        else:
            name = str(id)
            ids[name] = id
        if name is None:
            raise BadRequest("a topic without a name")
        return name

    _, wait_ms, min_bytes, max_bytes, _, *session = reader.unpack(form.head)
    partitions: dict[TopicPartition, AskedPartition] = {}
    ids: dict[str, UUID] = {}
    for _ in entries():
        topic = topic_name()
        for _ in entries():
            number, *rest, most = reader.unpack(form.partition)
            epoch = rest.pop(0) if version >= _EPOCH_FROM else UNKNOWN
            partitions[TopicPartition(topic, number)] = AskedPartition(epoch, rest[0], max(0, most))
            reader.tags()
        reader.tags()
    if version >= _SESSION_FROM:
        for _ in entries():
            topic_name()
            for _ in entries():
                reader.unpack(_INDEX)
            reader.tags()
    if version >= _RACK_FROM:
        reader.text()
    reader.tags()
    if reader.at != len(reader.data):
        raise BadRequest(f"{len(reader.data) - reader.at} bytes more than a Fetch has")
    wait_s = min(max(0, wait_ms), MAX_WAIT_MS) / 1000
    max_bytes = max(0, max_bytes)
    is_incremental = bool(session) and session[0] != 0 and session[1] > 0
    min_bytes = min(min_bytes, max(1, max_bytes), MAX_ANSWER)
    return FetchRequest(wait_s, min_bytes, max_bytes, is_incremental, partitions, ids)


def fetch_response(
    call: Call,
    rows: Mapping[TopicPartition, Row],
    code: ErrorCode = ErrorCode.none,
    ids: Mapping[str, UUID] | None = None,
) -> wire.Writer:
    """Return the response to a Fetch. `code`: an error of the whole request. `ids`: of the topics in `rows`."""
    form, out = _form(call.version), wire.Writer(wire.is_flexible(Key.FETCH, call.version))
    out.begin(call.header.correlation)
    out.pack(">i", 0)
    if call.version >= _SESSION_FROM:
        out.pack(">hi", code, 0)
    by_topic: dict[str, list[tuple[int, Row]]] = {}
    for place, row in rows.items():
        by_topic.setdefault(place.topic, []).append((place.partition, row))
    out.count(len(by_topic))
    for topic, found in by_topic.items():
        if call.version >= _IDS_FROM:
            out.raw((ids or {})[topic].bytes)
        else:
            out.text(topic)
        out.count(len(found))
        for number, row in found:
            ends = (row.end, row.end, row.first) if call.version >= _FIRST_FROM else (row.end, row.end)
            out.pack(form.row, number, row.code, *ends)
            out.raw(form.more)
            out.blobs(row.records)
            out.tags()
        out.tags()
    out.tags()
    return out
