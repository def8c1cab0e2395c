"""A stored line as a consumer sees it: topic, partition, offset, key, value and headers.

    seq|recv_ts|routing_key|producer_ts|id;headers|payload

Key         Bytes, or None without a key. It follows the mark, or without a mark the topic's name
            (kmq/message/record.py). It is percent-decoded.
Value       Bytes, or None for an empty payload (a tombstone). With a header `enc=` it is decoded, so an empty value
            is not null. If the payload is not base64 in spite of this header, the value is the stored payload: a
            mistyped line must not stop the consumers of its partition.
Headers     Name and value in the order in which they are stored, with duplicates; a value is None if there is no `=`.
            The header `enc` and names of one letter are not among them: KMQ writes those for itself.
Cost        A message keeps its line and looks into it on demand: some 0.2 µs to make it, and as much for each property.
            Keeping the fields would take longer than cutting them out again.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import count, repeat
from urllib.parse import unquote_to_bytes

from kmq.message import record
from kmq.message.text import client_headers, decode, decode_payload

Header = tuple[str, bytes | None]

SECONDS = re.compile(rb"\d{1,12}(?:\.\d*)?")
_FIELDS = 6


class Message:
    """A record of a partition. `timestamp` and `recv_timestamp` are seconds since the epoch.

    `deliveries`: how often the message was delivered to the group, including this time; 1: it is new.
    """

    __slots__ = ("line", "marks_from", "offset", "partition", "topic")
    deliveries: int = 1

    def __init__(self, topic: str, partition: int, offset: int, line: bytes, marks_from: int = 0) -> None:
        """`line`: as stored, without newline. `marks_from`: the seq from which a mark in a routing key counts as one."""
        self.topic, self.partition, self.offset, self.line = topic, partition, offset, line
        self.marks_from = marks_from

    @property
    def fields(self) -> list[bytes]:
        """Return the six fields as they are stored. Raises ValueError if this is not a stored line."""
        fields = self.line.split(b"|", _FIELDS - 1)  # hot loop: record.fields, without the names
        if len(fields) != _FIELDS:
            raise ValueError(f"{self.topic}/{self.partition} offset {self.offset}: not a stored line")
        return fields

    @property
    def seq(self) -> int:
        """Return the number of the record in the WAL."""
        return record.seq_of(self.line)

    @property
    def routing_key(self) -> bytes:
        """Return the routing key as it is stored."""
        return self.fields[2]

    @property
    def key(self) -> bytes | None:
        routing_key, topic = self.routing_key, self.topic
        if len(routing_key) <= len(topic) + 1:
            return None  # just the topic, perhaps with a dot
        if routing_key.startswith(b".@", len(topic)) and self.seq >= self.marks_from:
            marked = record.marked(routing_key)
            if marked is not None and len(marked.topic) == len(topic):
                return None if marked.key is None else unquote_to_bytes(marked.key)
        return unquote_to_bytes(routing_key[len(topic) + 1 :])

    @property
    def value(self) -> bytes | None:
        fields = self.line.split(b"|", _FIELDS - 1)
        if len(fields) != _FIELDS:
            _ = self.fields
        return decode_payload(fields[4], fields[5]) if b";enc=" in fields[4] else fields[5] or None

    @property
    def headers(self) -> list[Header]:
        """Return (name, value) of each header, in order."""
        return [*self.each_header()]

    def each_header(self, most: int | None = None) -> Iterator[Header]:
        """Yield (name, value) of each header, decoded one by one; `most`: of a longer one about so many bytes."""
        stored = None if most is None else 3 * (most + 1)  # a byte is stored as three at most
        for name, value in client_headers(self.fields[4], stored):
            yield name.decode(errors="replace"), value

    @property
    def id(self) -> str:
        """Return the producer's id of this message; "" without one."""
        return decode(self.fields[4].partition(b";")[0])

    @property
    def producer(self) -> str:
        """Return the name of the producer whose ids these are; "" if the message was sent without such a name."""
        names = (header[2:] for header in self.fields[4].split(b";")[1:] if header.startswith(b"p="))
        return decode(next(filter(None, names), b""))

    @property
    def timestamp(self) -> float:
        """Return when the producer made the message; without this time, when the broker received it."""
        fields = self.fields
        return float(fields[3]) if SECONDS.fullmatch(fields[3]) else float(fields[1])

    @property
    def timestamp_ms(self) -> int:
        """Return the timestamp in milliseconds. It is exact for clients that send milliseconds."""
        return round(self.timestamp * 1000)

    @property
    def recv_timestamp(self) -> float:
        """Return when the broker received the message."""
        return float(self.fields[1])

    @property
    def size(self) -> int:
        """Return the bytes of the stored line, with its newline."""
        return len(self.line) + 1

    def as_dict(self, text: bool = False) -> dict[str, object]:
        """Return the message for JSON: timestamp in ms; key and values as base64.

        `text`: as text if all of them are UTF-8; else as base64, and `encoding` says so.
        """
        if not text:
            return _shown(self, _as_base64)
        try:
            return _shown(self, _as_text)
        except UnicodeDecodeError:
            return _shown(self, _as_base64) | {"encoding": "base64"}

    def __repr__(self) -> str:
        key, value = self.key, self.value or b""
        more = f"… {len(value)} bytes" if len(value) > 40 else ""
        shown = None if self.value is None else value[:40]
        return f"<Message {self.topic}/{self.partition} offset={self.offset} key={key!r} value={shown!r}{more}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (self.topic, self.partition, self.offset, self.line) == (
            other.topic,
            other.partition,
            other.offset,
            other.line,
        )

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))


def _shown(message: Message, show: Callable[[bytes | None], str | None]) -> dict[str, object]:
    shown: dict[str, object] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "seq": message.seq,
        "timestamp": message.timestamp_ms,
        "key": show(message.key),
        "value": show(message.value),
        "headers": [{"name": name, "value": show(value)} for name, value in message.headers],
    }
    return shown | {"deliveries": message.deliveries} if message.deliveries > 1 else shown


def _as_base64(value: bytes | None) -> str | None:
    return None if value is None else b64encode(value).decode()


def _as_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def messages(topic: str, partition: int, first_offset: int, lines: bytes, marks_from: int = 0) -> list[Message]:
    """Return the messages in whole stored lines. A bare newline takes an offset, but is no message."""
    return list(each_message(topic, partition, first_offset, lines.split(b"\n")[:-1], marks_from))


def highest_ms(lines: bytes) -> int | None:
    """Return the highest `timestamp_ms` of whole stored lines; None if they hold no message."""
    rows = [line.split(b"|", 4) for line in lines.split(b"\n") if line]
    # hot loop: what Message.timestamp does
    times = [row[3] if SECONDS.fullmatch(row[3]) else row[1] for row in rows]
    return round(max(map(float, times)) * 1000) if times else None


class RedeliveredMessage(Message):
    """A redelivered message. A class of its own, because one more word in each new message costs 5 %."""

    __slots__ = ("deliveries",)

    def __init__(self, topic: str, partition: int, offset: int, line: bytes, deliveries: int) -> None:
        super().__init__(topic, partition, offset, line)
        self.deliveries = deliveries


def each_message(
    topic: str, partition: int, first_offset: int, lines: list[bytes], marks_from: int = 0
) -> Iterator[Message]:
    """Yield the messages in stored lines without newline, each made when it is asked for. Clearing `lines` ends it."""
    if b"" in lines:
        numbered = enumerate(lines, first_offset)
        return (Message(topic, partition, offset, line, marks_from) for offset, line in numbered if line)
    return map(Message, repeat(topic), repeat(partition), count(first_offset), lines, repeat(marks_from))
