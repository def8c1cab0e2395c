"""Requests and responses of the Kafka protocol: supported keys and versions, decoding, encoding.

    decode(header(frame), frame)        → the body with kio's fields, such as .topics
    encode(header, {"error_code": 0})   → the bytes of the response

Versions    `Key` is a contract with clients: each row is there because a client needs it (docs/kafka.md).
Codec       kio has the layout of all control messages, made from Apache's own descriptions, and writes responses. It
            does not read requests. 0.5 goes back by a negative length of a string, for ever, and ends at a tagged field
            that it does not know, although Apache adds these without a new version. The native reader of 0.6 allocates
            memory by a length that the client says. Produce and Fetch carry records, and are read and written by hand
            (`Reader`).
Invariant   A request either raises BadRequest or is complete. No memory is allocated by a length that a client says,
            and a request of any size is read in a fraction of a second.
"""

import contextlib
import dataclasses
import datetime
import struct
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from io import BytesIO
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from kmq.gateway.core.broker import RequestRefused


@contextlib.contextmanager
def _not_found(package: str) -> Iterator[None]:
    """Make a package that is not loaded yet look as if it was not installed."""
    is_loaded = package in sys.modules
    if not is_loaded:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_loaded:
            del sys.modules[package]


# kio loads Hypothesis where it is installed, to register its types there: 0.4 s of CPU and 18 MB at each start.
with _not_found("hypothesis"):
    from kio.index import load_request_schema, load_response_schema
    from kio.schema.errors import ErrorCode
    from kio.serial import entity_writer

__all__ = ["ErrorCode"]


class _LateCode(IntEnum):
    """Errors that kio does not know."""

    invalid_regular_expression = 128


INVALID_REGULAR_EXPRESSION = typing.cast(ErrorCode, _LateCode.invalid_regular_expression)


class Key(IntEnum):
    """A kind of request: its number, the lowest and highest version announced, and the lowest that is answered."""

    low: int
    high: int
    served: int

    def __new__(cls, number: int, low: int = 0, high: int = 0, served: int = 0) -> "Key":
        key = int.__new__(cls, number)
        key._value_, key.low, key.high, key.served = number, low, high, max(low, served)
        return key

    # 0 to 2 are announced and refused: without them kcat does not compress, and others take the broker for an old one.
    PRODUCE = 0, 0, 9, 3
    # librdkafka 2.6.0 sends 12, whatever is announced, and reads nothing if the answer is older.
    FETCH = 1, 4, 13
    # Java's and librdkafka's clients ask for the highest time (KIP-734) from 7 on.
    LIST_OFFSETS = 2, 1, 7
    METADATA = 3, 0, 12
    OFFSET_COMMIT = 8, 2, 9
    # 7 and 8 have require_stable, without which exactly-once processing is not exact.
    OFFSET_FETCH = 9, 1, 9
    FIND_COORDINATOR = 10, 0, 4
    JOIN_GROUP = 11, 0, 7
    HEARTBEAT = 12, 0, 4
    LEAVE_GROUP = 13, 0, 4
    SYNC_GROUP = 14, 0, 5
    DESCRIBE_GROUPS = 15, 0, 5
    LIST_GROUPS = 16, 0, 4
    SASL_HANDSHAKE = 17, 0, 1
    API_VERSIONS = 18, 0, 3
    # 5 and later have a list of settings that is null, which crashes Java's client.
    CREATE_TOPICS = 19, 2, 4
    DELETE_TOPICS = 20, 1, 5
    DELETE_RECORDS = 21, 0, 2
    INIT_PRODUCER_ID = 22, 0, 4
    OFFSET_FOR_LEADER_EPOCH = 23, 2, 4
    ADD_PARTITIONS_TO_TXN = 24, 0, 3
    ADD_OFFSETS_TO_TXN = 25, 0, 3
    END_TXN = 26, 0, 3
    TXN_OFFSET_COMMIT = 28, 0, 3
    DESCRIBE_ACLS = 29, 1, 2
    DESCRIBE_CONFIGS = 32, 1, 4
    ALTER_CONFIGS = 33, 0, 1
    DESCRIBE_LOG_DIRS = 35, 1, 4
    SASL_AUTHENTICATE = 36, 0, 2
    CREATE_PARTITIONS = 37, 0, 3
    DELETE_GROUPS = 42, 0, 2
    INCREMENTAL_ALTER_CONFIGS = 44, 0, 1
    OFFSET_DELETE = 47, 0, 0
    DESCRIBE_SCRAM_USERS = 50, 0, 0
    ALTER_SCRAM_USERS = 51, 0, 0
    DESCRIBE_CLUSTER = 60, 0, 0
    DESCRIBE_PRODUCERS = 61, 0, 0
    DESCRIBE_TRANSACTIONS = 65, 0, 0
    LIST_TRANSACTIONS = 66, 0, 0
    CONSUMER_GROUP_HEARTBEAT = 68, 0, 1
    CONSUMER_GROUP_DESCRIBE = 69, 0, 0

    @property
    def act(self) -> str:
        """Return the name of this act in the table of roles (kmq/access/roles.py)."""
        return f"Kafka.{self.name.title().replace('_', '')}"


_KEYS: dict[int, Key] = {key: key for key in Key}
MAX_ENTRIES = 20_000  # of all arrays of a request
_MAX_CLIENT = 200  # bytes of a client's name that are kept


class BadRequest(Exception):
    """A request that cannot be read. The text says where."""


class Unsupported(Exception):
    """A key or version that is not served."""

    def __init__(self, header: "Header") -> None:
        super().__init__(f"key {header.key}, version {header.version}")
        self.header = header


class Header(NamedTuple):
    """The beginning of a request. `body`: where the rest begins. `client`: its name for itself, for people."""

    key: int
    version: int
    correlation: int
    client: str
    body: int


# --- requests --------------------------------------------------------------------------------------------------------


class Reader:
    """Reads a request: its strings, arrays and bytes. Flexible versions encode them in another form.

    Every length is checked against the bytes that are left. All arrays of a request have at most MAX_ENTRIES together,
    because an entry of a few bytes costs microseconds, and more than a hundred bytes of memory.
    """

    def __init__(self, data: memoryview, at: int, is_flexible: bool) -> None:
        self.data, self.at, self.is_flexible = data, at, is_flexible
        self._entries = 0  # announced so far

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """Return numbers of a fixed form."""
        at = self.at
        self.at += form.size
        try:
            return form.unpack_from(self.data, at)
        except struct.error:
            raise BadRequest(f"byte {at}: the request ends") from None

    def varint(self) -> int:
        """Return an unsigned number of 7 bits a byte."""
        data, at, number = self.data, self.at, 0
        try:
            for shift in _SHIFTS:
                byte = data[at]
                at += 1
                if byte < 128:
                    self.at = at
                    return number | byte << shift
                number |= (byte & 127) << shift
        except IndexError:
            raise BadRequest(f"byte {at}: the request ends") from None
        raise BadRequest(f"byte {at}: a number of more than 5 bytes")

    def count(self) -> int:
        """Return the number of entries of an array; -1: it is null."""
        count = self.varint() - 1 if self.is_flexible else self.unpack(_INT)[0]
        self._promise(count)
        return int(count)

    def _promise(self, entries: int) -> None:
        self._entries += max(0, entries)
        if not -1 <= entries <= len(self.data) - self.at or self._entries > MAX_ENTRIES:
            raise BadRequest(f"byte {self.at}: an array of {entries} entries; {MAX_ENTRIES} are allowed in a request")

    def text(self) -> str | None:
        """Return a string."""
        found = self._bytes(self.varint() - 1 if self.is_flexible else self.unpack(_SHORT)[0])
        try:
            return None if found is None else bytes(found).decode()
        except UnicodeDecodeError:
            raise BadRequest(f"byte {self.at}: a string that is no UTF-8") from None

    def blob(self) -> memoryview | None:
        """Return bytes."""
        return self._bytes(self.varint() - 1 if self.is_flexible else self.unpack(_INT)[0])

    def _bytes(self, length: int) -> memoryview | None:
        if not -1 <= length <= len(self.data) - self.at:
            raise BadRequest(f"byte {self.at}: {length} bytes, where {len(self.data) - self.at} are left")
        if length < 0:
            return None
        self.at += length
        return self.data[self.at - length : self.at]

    def uuid(self) -> UUID | None:
        """Return an id; None: it is zero."""
        (data,) = self.unpack(_UUID)
        return UUID(bytes=data) if any(data) else None

    def tags(self) -> None:
        """Skip the tagged fields at the end of a structure of a flexible version. None of them is used here."""
        count = self.varint() if self.is_flexible else 0
        self._promise(count)
        for _ in range(count):
            self.varint()
            self._bytes(self.varint())


_SHORT, _INT, _UUID = struct.Struct(">h"), struct.Struct(">i"), struct.Struct("16s")
_SHIFTS = (0, 7, 14, 21, 28)
_HEADER = struct.Struct(">hhi")


def header(frame: memoryview) -> Header:
    """Return the beginning of a request. Raises BadRequest, and Unsupported for a key or version that is not served."""
    reader = Reader(frame, 0, False)
    key, version, correlation = reader.unpack(_HEADER)
    name = reader._bytes(reader.unpack(_SHORT)[0])  # in the old form in every version
    client = "" if name is None else bytes(name[:_MAX_CLIENT]).decode(errors="replace")
    row = _KEYS.get(key)
    if row is None or not row.served <= version <= row.high:
        raise Unsupported(Header(key, version, correlation, client, 0))
    reader.is_flexible = is_flexible(row, version)
    reader.tags()
    return Header(key, version, correlation, client, reader.at)


@cache
def request_class(key: int, version: int) -> Any:
    """Return kio's description of a request. kio itself searches for it each time."""
    if (key, version) != (Key.CONSUMER_GROUP_HEARTBEAT, 1):
        return load_request_schema(key, version)
    # kio knows only version 0. The next one has a pattern type after the names of topics.
    former = load_request_schema(key, 0)
    rows = [(each.name, each.type, dataclasses.field(metadata=each.metadata)) for each in dataclasses.fields(former)]
    pattern = ("subscribed_topic_regex", str | None, dataclasses.field(metadata={"kafka_type": "string"}))
    rows.insert(1 + [name for name, *_ in rows].index("subscribed_topic_names"), pattern)
    private = {name: value for name, value in vars(former).items() if name in former.__annotations__ and name[0] == "_"}
    return dataclasses.make_dataclass("ConsumerGroupHeartbeatRequest", rows, namespace=private)


@cache
def response_class(key: int, version: int) -> Any:
    return load_response_schema(key, 0 if key == Key.CONSUMER_GROUP_HEARTBEAT else version)


def is_flexible(key: Key, version: int) -> bool:
    """Return True if that version has compact strings and arrays, and tagged fields."""
    return bool(request_class(key, version).__flexible__)


def decode(found: Header, frame: memoryview) -> Any:
    """Return the body of a control message: an object with kio's fields of that version. Raises BadRequest.

    Bytes after the body are ignored, as by Apache's broker: librdkafka's Metadata 9 of all topics is three bytes too
    long. Two of these are a tagged field, the last one has no meaning.
    """
    reader = Reader(frame, found.body, is_flexible(Key(found.key), found.version))
    try:
        return _object(reader, request_class(found.key, found.version))
    except BadRequest as err:
        raise BadRequest(f"{Key(found.key).name}, version {found.version}: {err}") from None


def _object(reader: Reader, cls: Any) -> SimpleNamespace:
    values = {}
    for name, read in _steps(cls):
        values[name] = read(reader)
    reader.tags()
    return SimpleNamespace(**values)


@cache
def _steps(cls: Any) -> list[tuple[str, Callable[[Reader], Any]]]:
    """Return the reader of each field of a structure, in order."""
    return [(field.name, _array(field) if field.is_array else _single(field)) for field in _fields(cls)]


def _single(field: "_Field") -> Callable[[Reader], Any]:
    def number(reader: Reader) -> Any:
        return reader.unpack(form)[0]

    def time(reader: Reader) -> datetime.timedelta:
        number = reader.unpack(form)[0]
        try:
            return datetime.timedelta(milliseconds=number)
        except OverflowError:
            raise BadRequest(f"byte {reader.at}: a time of {number} ms") from None

    def blob(reader: Reader) -> bytes | None:
        found = reader.blob()
        return None if found is None else bytes(found)

    def never_null(reader: Reader) -> Any:
        value = read(reader)
        if value is None:
            raise BadRequest(f"byte {reader.at}: {field.name} is null")
        return value

    if field.entry is not None:
        return lambda reader: _object(reader, field.entry)
    if field.kind == "uuid":
        return Reader.uuid
    form = _NUMBERS.get(field.kind, _INT)
    if field.kind in _NUMBERS:
        return time if field.kind.startswith("timedelta") else number
    read = Reader.text if field.kind == "string" else blob
    return read if field.is_nullable and not field.is_array else never_null


def _array(field: "_Field") -> Callable[[Reader], Any]:
    read = _single(field)

    def entries(reader: Reader) -> Any:
        count = reader.count()
        if count < 0 and not field.is_nullable:
            raise BadRequest(f"byte {reader.at}: {field.name} is null")
        return None if count < 0 else tuple([read(reader) for _ in range(count)])

    return entries


_LONG = struct.Struct(">q")
_NUMBERS = {"bool": struct.Struct(">?"), "int8": struct.Struct(">b"), "int16": _SHORT, "int32": _INT, "int64": _LONG}
_NUMBERS |= {"timedelta_i32": _INT, "timedelta_i64": _LONG}


# --- responses -------------------------------------------------------------------------------------------------------


class Writer:
    """Writes a response by hand, in the form of its version."""

    def __init__(self, is_flexible: bool) -> None:
        self._is_flexible = is_flexible
        self._parts: list[bytes | memoryview] = []

    def begin(self, correlation: int) -> None:
        self._parts.append(_INT.pack(correlation))
        self.tags()

    def pack(self, form: str, *values: int) -> None:
        """Write numbers of a fixed form."""
        self._parts.append(struct.pack(form, *values))

    def raw(self, data: bytes) -> None:
        self._parts.append(data)

    def count(self, entries: int) -> None:
        """Write how many entries an array has."""
        self._parts.append(varint(entries + 1) if self._is_flexible else _INT.pack(entries))

    def text(self, text: str | None) -> None:
        data = None if text is None else text.encode()
        length = -1 if data is None else len(data)
        self._parts.append(varint(length + 1) if self._is_flexible else _SHORT.pack(length))
        self._parts.append(data or b"")

    def blobs(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write bytes that lie in several pieces."""
        length = sum(map(len, parts))
        self._parts.append(varint(length + 1) if self._is_flexible else _INT.pack(length))
        self._parts += parts

    def tags(self) -> None:
        """Write an empty list of tagged fields."""
        if self._is_flexible:
            self._parts.append(b"\0")

    def pieces(self, least: int) -> Iterator[bytes | memoryview]:
        """Yield the response with its length first. Parts of at least `least` bytes stay single, others are joined."""
        small: list[bytes | memoryview] = [_INT.pack(sum(map(len, self._parts)))]
        for part in self._parts:
            if len(part) >= least:
                yield b"".join(small)
                yield part
                small = []
            else:
                small.append(part)
        yield b"".join(small)

    def frame(self) -> bytes:
        """Return the response with its length first."""
        return b"".join([_INT.pack(sum(map(len, self._parts))), *self._parts])

    def body(self) -> bytes:
        """Return what was written."""
        return b"".join(self._parts)


def varint(number: int) -> bytes:
    """Return an unsigned number of 7 bits a byte."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


Fields = Mapping[str, Any]  # by kio's names, of all versions together


def encode(found: Header, fields: Fields) -> bytes:
    """Return the response to a control message, with its length first. Fields unknown to its version are left out."""
    cls = response_class(found.key, found.version)
    # Clients must be able to read this response before they know the versions.
    out, body = Writer(cls.__flexible__ and found.key != Key.API_VERSIONS), BytesIO()
    out.begin(found.correlation)
    _writer(cls)(body, entity(cls, fields))
    out.raw(body.getvalue())
    return out.frame()


def refusal(found: Header, body: Any, code: ErrorCode, text: str | None = None) -> Fields:
    """Return a response that refuses a control message, in the error field of the whole or of each entry."""
    return _refused(response_class(found.key, found.version), body, code, text)


# The entries that a refused request names; the response has one for each.
_NAMED: tuple[str, ...] = ("topics", "partitions", "partition_indexes", "resources", "groups", "coordinator_keys")
_NAMED += ("topic_names", "groups_names", "group_ids", "users", "deletions", "upsertions", "v3_and_below_topics")
_NAMED += ("transactional_ids",)
# The field of an entry that a request names by one word.
_NAMES = ("name", "group_id", "key", "partition_index", "user", "transactional_id")


def _refused(cls: Any, item: Any, code: ErrorCode, text: str | None) -> Fields:
    found: dict[str, Any] = {"error_message": text, "protocol_name": "", "metadata": ""}
    fields = _fields(cls)
    is_whole = any(field.kind == "error_code" for field in fields)
    for field in fields:
        if field.kind == "error_code":
            found[field.name] = code
        elif field.is_array:
            found[field.name] = [] if is_whole else [_refused(field.entry, each, code, text) for each in _named(item)]
        elif field.name in _NAMES and isinstance(item, str | int):
            found[field.name] = item
        elif hasattr(item, field.name):
            found[field.name] = getattr(item, field.name)
        elif field.name == "user":
            found[field.name] = item.name
    return found


def _named(item: Any) -> Iterator[Any]:
    for name in _NAMED:
        yield from getattr(item, name, None) or ()


class _Field(NamedTuple):
    """A field of one version. `kind`: the type of a plain field; `entry`: the class of its entries otherwise.

    `blank`: its value if a response does not give one.
    """

    name: str
    kind: str
    entry: Any
    is_array: bool
    is_nullable: bool
    blank: Any


NO_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) - datetime.timedelta(milliseconds=1)  # means no time
_BLANK = {"string": "", "bytes": b"", "bool": False, "error_code": ErrorCode.none, "datetime_i64": NO_TIME}
_BLANK |= dict.fromkeys(("timedelta_i32", "timedelta_i64"), datetime.timedelta(0))


@cache
def _fields(cls: Any) -> list[_Field]:
    found = []
    for each in dataclasses.fields(cls):
        kinds = {each.type, *typing.get_args(each.type)}
        array = next((kind for kind in kinds if typing.get_origin(kind) is tuple), None)
        inner = typing.get_args(array) if array else kinds
        entry = next((kind for kind in inner if dataclasses.is_dataclass(kind)), None)
        kind = each.metadata.get("kafka_type", "")
        is_array, is_nullable = array is not None, type(None) in kinds
        blank = each.default
        if blank is dataclasses.MISSING:
            blank = None if is_nullable else () if is_array else _BLANK.get(kind, -1)
        found.append(_Field(each.name, kind, entry, is_array, is_nullable, blank))
    return found


def entity(cls: Any, fields: Fields) -> Any:
    """Return the kio object of one version. A field without a value gets Apache's default, otherwise empty or -1."""
    values = {}
    for field in _fields(cls):
        value = fields.get(field.name, field.blank)
        if field.entry is not None and value is not None:
            value = tuple(entity(field.entry, each) for each in value) if field.is_array else entity(field.entry, value)
        elif field.is_array and value is not None:
            value = tuple(value)
        elif field.kind == "error_code" and not isinstance(value, _LateCode):
            value = ErrorCode(value)
        values[field.name] = value
    return cls(**values)


@cache
def _writer(cls: Any) -> Any:
    return entity_writer(cls)


# --- refusals --------------------------------------------------------------------------------------------------------

# Kafka error codes for refusals of the core. Clients retry those that they take for retriable.
_CODES = {
    "unauthorized": ErrorCode.sasl_authentication_failed,
    "forbidden": ErrorCode.topic_authorization_failed,
    "unknown_topic": ErrorCode.unknown_topic_or_partition,
    "unknown_partition": ErrorCode.unknown_topic_or_partition,
    "bad_topic": ErrorCode.invalid_topic_exception,
    "reserved_topic": ErrorCode.invalid_topic_exception,
    "too_many_topics": ErrorCode.policy_violation,
    "topic_exists": ErrorCode.topic_already_exists,
    "too_long": ErrorCode.message_too_large,
    "too_large": ErrorCode.message_too_large,
    "out_of_range": ErrorCode.offset_out_of_range,
    "cold": ErrorCode.kafka_storage_error,
    "damaged": ErrorCode.kafka_storage_error,
    "disk_full": ErrorCode.kafka_storage_error,
    "quota": ErrorCode.kafka_storage_error,
    "not_enough_replicas": ErrorCode.not_enough_replicas,
    "no_leader": ErrorCode.not_leader_or_follower,
    "not_ready": ErrorCode.not_leader_or_follower,
    "stopping": ErrorCode.not_leader_or_follower,
    "producers_full": ErrorCode.not_leader_or_follower,
    "id_gap": ErrorCode.not_leader_or_follower,
    "busy": ErrorCode.request_timed_out,
    "too_many": ErrorCode.request_timed_out,
    "not_answered": ErrorCode.request_timed_out,
    "stored_not_routed": ErrorCode.request_timed_out,
    "not_routed": ErrorCode.request_timed_out,
    "id_reused": ErrorCode.invalid_record,
    "id_too_old": ErrorCode.out_of_order_sequence_number,
    "bad_field": ErrorCode.invalid_request,
    "bad_request": ErrorCode.invalid_request,
}


class KafkaRefused(RequestRefused):
    """A refusal for Kafka clients only, with a Kafka error code."""

    def __init__(self, error: ErrorCode, text: str) -> None:
        super().__init__("bad_request", text)
        self.error = error


def code_of(refused: RequestRefused, codes: Mapping[str, ErrorCode] = _CODES) -> ErrorCode:
    """Return the Kafka error code for a refusal."""
    if isinstance(refused, KafkaRefused):
        return refused.error
    return codes.get(refused.code, ErrorCode.unknown_server_error)


def milliseconds(time: datetime.timedelta | None) -> int:
    """Return a time of kio in milliseconds; -1: none."""
    return -1 if time is None else time // datetime.timedelta(milliseconds=1)
