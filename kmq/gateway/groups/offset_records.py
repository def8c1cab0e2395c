"""The records of topic `__consumer_offsets`: committed offsets, and messages to deliver again. Encoder and decoder.

    key      <group>.<topic>.<partition>             each part percent-encoded, its dots too
    payload  offset=<n> ts=<unix> member=<m> generation=<g> metadata=<…>
             offset: the next to read. ts: seconds with three decimals. member, metadata: percent-encoded

    key      <group>.<topic>.<partition>.<offset>    a message that a member gave back (nack)
    payload  deliveries=<n> due=<unix> reason=<…>    how often it was delivered, and when it may be delivered again;
             first=<unix>                            when it was first given back
             letter=<topic>/<partition>@<offset>     of a message that was put aside: where its dead letter is

    The empty payload is a tombstone: nothing is known of that key any more. The last record of a key counts.

A reader is tolerant: a record that is none of these is skipped and counted. Somebody may have brought it back from an
older release, or a later release may have written it. So fields may be added at the end of a payload, and only there.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from kmq.message import routing

TOPIC = "__consumer_offsets"
MAX_OFFSET = (1 << 63) - 1
_TEXT = rb"[A-Za-z0-9_~%-]*"
_FIELD = rb"[^ |\n]*"
_COMMIT = rb"offset=\d{1,19} ts=\d{1,11}\.\d{3} member=%b generation=-?\d{1,10} metadata=%b(?: [^\n]*)?" % (
    _FIELD,
    _FIELD,
)
_NACK = rb"deliveries=\d{1,9} due=\d{1,11}\.\d{3} reason=%b(?: [^\n]*)?" % _FIELD
_PAYLOAD = re.compile(
    r"offset=(\d+) ts=(\S+) member=(\S*) generation=(-?\d+) metadata=(\S*)"
    r"|deliveries=(\d+) due=(\S+) reason=(\S*)(?: first=(\d{1,11}\.\d{3})(?= |\Z))?(?: letter=(\S+))?"
)
_PLAIN = re.compile(r"[A-Za-z0-9_~-]*")  # stands for itself; most names do
_PLACE = rb"%b\.%b\.\d{1,5}" % (_TEXT, rb"[A-Za-z0-9_~%-]+")
# seq, key and payload of a stored record: a commit, a nack or a tombstone.
_STORED = re.compile(
    rb"(?m)^(\d+)\|[^|\n]*\|%b\.(?:@\d*\.)?(?:(%b)\|[^|\n]*\|[^|\n]*\|(%b|)|(%b\.\d{1,19})\|[^|\n]*\|[^|\n]*\|(%b|))$"
    % (TOPIC.encode(), _PLACE, _COMMIT, _PLACE, _NACK)
)


class Place(NamedTuple):
    """What a key names: a partition of a topic, or, with an offset, one message of it, for one group."""

    group: str
    topic: str
    partition: int
    offset: int | None = None


class Committed(NamedTuple):
    """A committed offset: the next to read. `ts`: seconds since the epoch. `seq`: of its record in the WAL; 0: none."""

    offset: int
    ts: float
    member: str = ""
    generation: int = 0
    metadata: str = ""
    seq: int = 0


DONE = "done"  # in place of a letter


class Nack(NamedTuple):
    """A message that a member gave back, or that its reader died of. Times in seconds since the epoch.

    `due`: from when on it may be delivered again. `first`: when it was first given back; 0: not known. `letter`: it was
    put aside, or DONE: handled. It is not delivered any more, and the row goes as soon as the group has committed beyond it.
    """

    deliveries: int
    due: float
    reason: str = ""
    seq: int = 0
    first: float = 0.0
    letter: str = ""


Row = Committed | Nack


def encode_key(place: Place) -> bytes:
    """Return the key of a record. Raises UnicodeEncodeError for a name that is no text."""
    parts = [_encode(place.group), _encode(place.topic), str(place.partition)]
    return ".".join(parts if place.offset is None else [*parts, str(place.offset)]).encode()


def decode_key(key: bytes) -> Place:
    """Return what a key names. Raises ValueError if it is none, or not in the form that `encode_key` gives it."""
    group, topic, *numbers = key.decode("ascii").split(".")
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"key {key[:100]!r} must be <group>.<topic>.<partition>[.<offset>]")
    place = Place(_decode(group), _decode(topic), *map(int, numbers))
    if encode_key(place) != key:  # two keys of one place would be two rows to compaction
        raise ValueError(f"key {key[:100]!r} is not encoded as KMQ does it")
    return place


def routing_key(place: Place) -> bytes:
    """Return the routing key of a record."""
    return routing.exact(TOPIC.encode(), encode_key(place))


def encode_payload(row: Row) -> bytes:
    """Return the payload of a record."""
    if isinstance(row, Nack):
        text = f"deliveries={row.deliveries} due={row.due:.3f} reason={_encode(row.reason)}"
        text += f" first={row.first:.3f}" if row.first else ""
        text += f" letter={row.letter}" if row.letter else ""
    else:
        text = (
            f"offset={row.offset} ts={row.ts:.3f} member={_encode(row.member)}"
            f" generation={row.generation} metadata={_encode(row.metadata)}"
        )
    return text.encode()


def decode_payload(payload: bytes, seq: int = 0) -> Row:
    """Return what a payload says. Raises ValueError if it is damaged or empty."""
    match = _PAYLOAD.match(payload.decode("ascii"))
    if match is None:
        raise ValueError(f"payload {payload[:100]!r} is neither a commit nor a nack")
    offset, ts, member, generation, metadata, deliveries, due, reason, first, letter = match.groups()
    if deliveries is not None:
        return Nack(int(deliveries), float(due), _decode(reason), seq, float(first or 0), letter or "")
    if int(offset) > MAX_OFFSET:
        raise ValueError(f"offset {offset} is over {MAX_OFFSET}")
    return Committed(int(offset), float(ts), _decode(member), int(generation), _decode(metadata), seq)


def scan(lines: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (seq, key, payload) of the records among stored lines; b"" is a tombstone. Others are left out."""
    for seq, key, payload, nack_key, nack in _STORED.findall(lines):
        yield int(seq), key or nack_key, payload or nack


def _encode(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else quote(text, safe="").replace(".", "%2E")


def _decode(text: str) -> str:
    return unquote_to_bytes(text).decode() if "%" in text else text
