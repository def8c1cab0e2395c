"""Messages of kmq.v1 (kmq.proto) as the gateway's values, in and out. Every byte and every null stays as it is.

Requests are checked here, and refused by the name of the wrong field (`bad_field`).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import message as protobuf

from kmq.config.values import MIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.fetching import Limit
from kmq.gateway.core.producing import NewMessage, Outcome, Stored
from kmq.gateway.groups.offset_table import MAX_OFFSET
from kmq.gateway.grpc.schema import KMQ
from kmq.message.ids import MAX_ID_DIGITS, MAX_WINDOW_ID, NAME_PATTERN
from kmq.message.message import Message
from kmq.wire.requests import EARLIEST, LATEST, Position, TopicPartition

MOST_MESSAGES = 10_000  # in one ProduceRequest
MOST_BYTES = MIB  # of stored lines in one answer
_MOST_HEADERS = 1_000
_MOST_RECORDS = 10_000
_RECORDS = 500
_MOST_TIMESTAMP = 999_999_999_999_999  # ms
_Error, _Result, _Partitions = (KMQ.messages[name] for name in ("Error", "Result", "Partitions"))
_LATEST = KMQ.messages["Position"].LATEST


def parse(shape: Any, data: bytes) -> Any:
    """Return the request in these bytes. Raises RequestRefused (bad_request)."""
    try:
        return shape.FromString(data)
    except protobuf.DecodeError:
        raise RequestRefused("bad_request", f"not a {shape.DESCRIPTOR.full_name}; see kmq.proto") from None


# --- messages in -----------------------------------------------------------------------------------------------------


def new_messages(request: Any) -> list[NewMessage]:
    """Return the messages of a ProduceRequest."""
    if not 1 <= len(request.messages) <= MOST_MESSAGES:
        raise bad_field("messages", f"must be 1 to {MOST_MESSAGES} messages")
    if request.acks not in request.Acks.values():
        raise bad_field("acks", "must be one of ALL, ONE, NONE")
    if request.producer and not re.fullmatch(NAME_PATTERN, request.producer):
        raise bad_field("producer", f"must match {NAME_PATTERN}")
    return [_new_message(each, n, bool(request.producer)) for n, each in enumerate(request.messages)]


def _new_message(given: Any, number: int, has_producer: bool) -> NewMessage:
    def field(name: str) -> str:
        return f"messages[{number}].{name}"

    if len(given.headers) > _MOST_HEADERS:
        raise bad_field(field("headers"), f"must be at most {_MOST_HEADERS}")
    for place, header in enumerate(given.headers):
        if not header.name:
            raise bad_field(field(f"headers[{place}].name"), "must not be empty")
    if given.timestamp > _MOST_TIMESTAMP:
        raise bad_field(field("timestamp"), f"must be at most {_MOST_TIMESTAMP} ms")
    if len(given.id) > MAX_WINDOW_ID:
        raise bad_field(field("id"), f"must be at most {MAX_WINDOW_ID} characters")
    if has_producer and not (given.id.isascii() and given.id.isdigit() and len(given.id) <= MAX_ID_DIGITS):
        raise bad_field(field("id"), f"must be a number of at most {MAX_ID_DIGITS} digits, rising, because of producer")
    return NewMessage(
        given.key if given.HasField("key") else None,
        given.value if given.HasField("value") else None,
        [(header.name, header.value if header.HasField("value") else None) for header in given.headers],
        given.partition if given.HasField("partition") else None,
        given.id or None,
        given.timestamp / 1000 if given.HasField("timestamp") else None,
    )


def position(given: Any, field: str) -> Position:
    """Return a Position. `field`: its name, for the refusal."""
    kind = given.WhichOneof("at")
    if kind == "offset":
        if given.offset > MAX_OFFSET:
            raise bad_field(f"{field}.offset", f"must be at most {MAX_OFFSET}")
        return Position("offset", given.offset)
    if kind == "timestamp":
        if given.timestamp > _MOST_TIMESTAMP:
            raise bad_field(f"{field}.timestamp", f"must be at most {_MOST_TIMESTAMP} ms")
        return Position("time", given.timestamp * 1000)
    if given.place not in given.Place.values():
        raise bad_field(f"{field}.place", "must be one of EARLIEST, LATEST")
    return LATEST if given.place == _LATEST else EARLIEST


def limit(given: Any, most_wait_ms: int) -> Limit:
    """Return the limit of a FetchRequest or a FetchBatch."""
    if given.wait_ms > most_wait_ms:
        raise bad_field("wait_ms", f"must be at most {most_wait_ms}")
    records = min(given.max_records or _RECORDS, _MOST_RECORDS)
    return Limit(records, min(given.max_bytes or MOST_BYTES, MOST_BYTES), given.wait_ms / 1000)


def places(given: Iterable[Any]) -> tuple[TopicPartition, ...]:
    """Return the places in a list of Partitions."""
    return tuple(TopicPartition(each.topic, number) for each in given for number in each.partitions)


# --- messages out ----------------------------------------------------------------------------------------------------


def fill(records: Any, found: Sequence[Message]) -> int:
    """Append messages to a field of Records; return the bytes of their lines."""
    nbytes = 0
    for message in found:
        # A field that is None stays unset.
        row = records.add(offset=message.offset, key=message.key, value=message.value, timestamp=message.timestamp_ms)
        for name, content in message.headers:
            row.headers.add(name=name, value=content)
        nbytes += message.size
    return nbytes


def result(topic: str, outcome: Outcome) -> Any:
    """Return the Result of one message."""
    if not isinstance(outcome, Stored):
        return _Result(error=error(outcome))
    made = _Result()
    stored = made.stored
    stored.topic, stored.timestamp, stored.duplicate = topic, outcome.timestamp_ms, outcome.is_duplicate
    if outcome.partition is not None and outcome.offset is not None:
        stored.partition, stored.offset = outcome.partition, outcome.offset
    return made


def error(refused: RequestRefused) -> Any:
    """Return the Error of a refusal."""
    fields = {name: refused.fields[name] for name in ("field", "seq", "first", "end") if name in refused.fields}
    return _Error(code=refused.code, message=str(refused), **fields)


def partitions(named: Iterable[tuple[str, int]]) -> list[Any]:
    """Return a list of Partitions."""
    by_topic: dict[str, list[int]] = {}
    for topic, number in named:
        by_topic.setdefault(topic, []).append(number)
    return [_Partitions(topic=topic, partitions=numbers) for topic, numbers in by_topic.items()]
