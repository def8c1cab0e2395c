"""Keys, payloads, headers and ids as the text of a line, and back.

Payloads    Tools that pass on lines of text (`kmq produce`, the demo) encode only a payload with NUL or newline, which
            no line can hold, or an empty one, and leave other bytes as they are. The Python clients encode every payload
            that is not printable text. Text here is UTF-8 without control characters other than tab and carriage return, so that
            `tail -F` of a queue cannot disturb a terminal. An encoded payload is base64 with the header `enc=b64`;
            `decode_payload` restores the exact bytes.
            Programs that send lines often send the newline too. If a value is text except for one newline at its end,
            the Kafka door stores it without that newline and with the header `enc=lf`. So the stored line stays
            readable.
Null        No value (None) is sent as an empty payload, a tombstone under `cleanup=compact`. An empty value is sent as
            an empty payload with the header `enc=b64`.
Keys        Text or bytes, percent-encoded, after a mark (kmq/message/record.py). With a mark the message goes to the
            named topic, whichever topics are declared now or later. Dots are encoded too, so that a key has the same
            text and the same partition as before marks existed. `decode` restores the text, `decode_bytes` the bytes.
"""

import contextlib
import math
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import SupportsFloat, SupportsIndex, cast
from urllib.parse import quote, unquote, unquote_to_bytes

Headers = Mapping[str, str] | Iterable[tuple[str, str | bytes | None]]  # pairs keep order and duplicates

# Headers of a dead letter of a consumer (letters.py), in this order.
LETTER_HEADERS = (
    *("origin_topic", "origin_partition", "origin_offset", "origin_seq"),
    *("group", "error", "attempts", "first_failure", "last_failure"),
)
REPLAYS = "replays"  # how often a dead letter was sent back to its origin (kmq/deadletters)
MAX_REPLAYS = 3  # a letter that was sent back so often stays, unless the user sets another limit
# Reserved for KMQ, as are all names of one letter.
_OWN_HEADERS = frozenset(name.encode() for name in ("enc", "reason", "len", *LETTER_HEADERS, REPLAYS))

_MAX_TOPICS = 10_000  # routing keys remembered as bytes
_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_:@/=+-]*")
_KEY_SAFE = "".join(chr(c) for c in range(33, 127) if chr(c) not in "%|;")
_KEY_SAFE_BYTES = _KEY_SAFE.encode()
_CONTROL_FREE = bytes(byte for byte in range(256) if (byte >= 32 and byte != 127) or byte in b"\t\r")
_LOW = [b"%03d|" % n for n in range(1000)]  # last digits of an id: a list slot instead of a format call per message


def wrong_type(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{name}: must be {wanted}, not {type(value).__name__}")


def as_bytes(value: object, name: str) -> bytes:
    """Return `value` as bytes. Raises TypeError that names the parameter.

    `bytes(value)` would be wrong: it makes NULs of a number, and bytes of a list of numbers.
    """
    if isinstance(value, str):
        return value.encode()
    try:
        view = memoryview(cast("bytes", value))
    except TypeError:
        raise wrong_type(name, value, "bytes, str or None") from None
    if not view.ndim:  # a number of numpy
        raise wrong_type(name, value, "bytes, str or None")
    return view.tobytes()


def whole_number(value: object, name: str) -> int:
    """Return `value`, a whole number from 0 on. Raises TypeError or ValueError that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise wrong_type(name, value, "int")
    if (number := value.__index__()) < 0:
        raise ValueError(f"{name} {number}: must be 0 or more")
    return number


def seconds(value: object, name: str) -> float:
    """Return `value`, a time in seconds. Raises TypeError or ValueError that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise wrong_type(name, value, "a number of seconds")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{name} {number}: must be a number of seconds")
    return number


def request_line(*words: object) -> bytes:
    """Return a line of a protocol, made of these words; "" is left out.

    Everything that a client sends besides messages is made here. Raises ValueError for a word that the other side would
    read as several words, or as a line. The error does not show the word, because it may be a token.
    """
    said = [text for word in words if (text := str(word))]
    line = " ".join(said)
    if line.count(" ") != len(said) - 1 or not (line.isascii() and line.isprintable()):
        bad = next(word for word in said if " " in word or not (word.isascii() and word.isprintable()))
        name, equals, _ = bad.partition("=")
        name = name if equals and name.isidentifier() else "a word of a request"
        raise ValueError(f"{name}: must be printable ASCII without spaces")
    return line.encode() + b"\n"


def percent_encode(text: str | bytes) -> str:
    """Encode a key or id for a field of a line: without `|`, `;`, `%`, space and control bytes."""
    exact = text.encode() if isinstance(text, str) else text
    if not exact.translate(
        None, _KEY_SAFE_BYTES
    ):  # most texts need no encoding; `quote` takes three times as long to find that out
        return exact.decode()
    return quote(exact, safe=_KEY_SAFE)


def format_message(routing_key: bytes, payload: bytes | None, id: bytes = b"", ts: float | None = None) -> bytes:
    """Return a line with its newline. An empty payload, or one with NUL or newline, gets the header `enc=b64`."""
    if payload is None:
        payload = b""
    elif not payload or b"\0" in payload or b"\n" in payload:
        payload, id = b64encode(payload), id + b";enc=b64"
    stamp = b"%.6f" % (time.time() if ts is None else ts)
    return b"%b|%b|%b|%b\n" % (routing_key, stamp, id, payload)


def is_text(payload: bytes) -> bool:
    """Return True if a payload is printable text, which is sent unencoded."""
    return not payload.translate(None, _CONTROL_FREE) and (payload.isascii() or _is_utf8(payload))


def are_lines_of_text(data: bytes, count: int) -> bool:
    """Return True if `data` is `count` lines of printable text: its only control characters are their newlines.

    `data`: so many lines or more, each with its newline.
    """
    return len(data.translate(None, _CONTROL_FREE)) == count and (data.isascii() or _is_utf8(data))


def is_text_line(payload: bytes) -> bool:
    """Return True for printable text that ends with its only newline."""
    return payload.endswith(b"\n") and len(payload) > 1 and is_text(payload[:-1])


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode_payload(id: bytes, payload: bytes) -> bytes | None:
    """Return the payload as it was sent, given the id field of its record; None for a tombstone.

    A payload that is not base64 although its id field says so is returned as it is.
    """
    headers = id.split(b";")[1:]
    if b"enc=b64" in headers:
        with contextlib.suppress(ValueError):
            return b64decode(payload, validate=True)
        return payload
    if not payload:
        return None
    return payload + b"\n" if b"enc=lf" in headers else payload


def decode_bytes(field: bytes | str) -> bytes:
    """Return the bytes of a key before `percent_encode`, which need not be UTF-8."""
    return unquote_to_bytes(field)


def decode(field: bytes | str) -> str:
    """Return the text of a key, id or header value before `percent_encode`."""
    return unquote(field)


def make_routing_key(topic: str, key: str | bytes | None = None, partition: int | None = None) -> bytes:
    """Return `<topic>.@[<partition>][.<key>]`, or just `<topic>` if that is enough. Raises ValueError."""
    if not isinstance(topic, str):
        raise wrong_type("topic", topic, "str")
    topic = str.__str__(topic)  # a member of an enum of texts is written as its value
    if not _TOPIC.fullmatch(topic):
        raise ValueError(f"topic {topic!r}: must be letters, digits, _ . - and begin with none of the last two")
    if partition is not None:
        partition = whole_number(partition, "partition")
    if key is None and partition is None and "." not in topic:
        return topic.encode()
    head = f"{topic}.@{'' if partition is None else partition}"
    return (head if key is None else f"{head}.{key_text(key)}").encode()


class RoutingKeys(dict[str, bytes]):
    """The routing keys of topics without key or partition, made once each: `keys[topic]`."""

    def __missing__(self, topic: str) -> bytes:
        if len(self) >= _MAX_TOPICS:
            self.clear()
        key = self[topic] = make_routing_key(topic)
        return key


def key_text(key: str | bytes) -> str:
    """Return a key in the form that it has in a routing key."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return key
    return percent_encode(as_bytes(key, "key")).replace(".", "%2E")


def make_id(id: str, headers: Headers = ()) -> bytes:
    """Return the id field: the id and its headers."""
    return percent_encode(id).encode() + format_headers(headers)


def format_headers(headers: Headers) -> bytes:
    """Return what follows the id in its field: each header as `format_header` writes it."""
    field = ""
    for name, value in headers.items() if isinstance(headers, Mapping) else _pairs(headers):
        if not isinstance(name, str):
            raise wrong_type("headers: a name", name, "str")
        exact = value if value is None or type(value) is str else as_bytes(value, "headers: a value")
        field += format_header(name.encode(), exact)
    return field.encode()


def _pairs(headers: object) -> Iterable[tuple[str, str | bytes | None]]:
    """Return the headers. Raises TypeError unless they are pairs: the letters of a text would become headers."""
    if isinstance(headers, Iterable) and not isinstance(headers, str | bytes | bytearray):
        pairs = tuple(headers)
        if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            return pairs
    raise wrong_type("headers", headers, "a mapping, or a list of (name, value)")


def format_header(name: bytes, value: str | bytes | None) -> str:
    """Return `;name=value`, or `;name` for a null value.

    The first letter of a name that KMQ reserves is percent-encoded, so the name differs until it is decoded.
    """
    if len(name) == 1 or name in _OWN_HEADERS:
        field = f";%{name[0]:02X}{name[1:].decode()}"
    else:
        field = f";{percent_encode(name).replace('=', '%3D')}"
    return field if value is None else f"{field}={percent_encode(value)}"


def is_transport_header(name: bytes) -> bool:
    """Return True if KMQ wrote the header with this stored name for itself: a message's headers leave it out."""
    return len(name) == 1 or name == b"enc"


def client_headers(id: bytes, most: int | None = None) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield name and value of each header that a client sent, given the id field of its record; the value may be null.

    In order, with duplicates. `most`: decode only so many stored bytes of each name and value.
    A client's own `p` is stored as `%70`, so it is not taken for KMQ's.
    """
    for header in id.split(b";")[1:]:
        name, equals, value = header.partition(b"=")
        if not is_transport_header(name):
            yield unquote_to_bytes(name[:most]), unquote_to_bytes(value[:most]) if equals else None


def format_text(routing_key: bytes, payload: bytes | None, id: bytes, ts: float) -> bytes:
    """Return one line as a Python client sends it."""
    if payload is None:
        payload = b""
    elif not payload or not is_text(payload):
        payload, id = b64encode(payload), id + b";enc=b64"
    return b"%b|%.6f|%b|%b\n" % (routing_key, ts, id, payload)


def format_many(
    routing_key: bytes, payloads: Sequence[bytes | str | None], ts: float, first_id: int | None = None
) -> bytes:
    """Return many such lines, numbered from `first_id` on if given: some 70 ns per message if all are text."""
    if not payloads:
        return b""
    head = b"%b|%.6f|" % (routing_key, ts)
    data = b""
    if all(payloads):  # no payload is None or empty
        texts = cast("Sequence[bytes]", payloads)
        with contextlib.suppress(TypeError, BufferError):  # not all are bytes
            if first_id is None:
                separator = b"\n" + head + b"|"
                data = b"".join((head, b"|", separator.join(texts), b"\n"))
            else:
                data = _numbered(head, texts, first_id)
    if data and are_lines_of_text(data, len(payloads)):
        return data
    ids: Iterable[bytes] = (b"" for _ in payloads)
    if first_id is not None:
        ids = (b"%d" % id for id in range(first_id, first_id + len(payloads)))
    exact = each_as_bytes(payloads)
    return b"".join(format_text(routing_key, payload, id, ts) for payload, id in zip(exact, ids, strict=True))


def each_as_bytes(payloads: Iterable[bytes | str | None]) -> list[bytes | None]:
    """Return the bytes of each payload. Raises TypeError that names the first one that has none."""
    return [
        payload if payload is None or type(payload) is bytes else as_bytes(payload, f"payloads[{n}]")
        for n, payload in enumerate(payloads)
    ]


def _numbered(head: bytes, payloads: Sequence[bytes], first_id: int) -> bytes:
    parts: list[bytes] = []
    done, count = 0, len(payloads)
    while done < count:
        high, low = divmod(first_id + done, 1000)
        run = min(count - done, 1000 - low)
        if high:
            triples = [b"\n%b%d" % (head, high)] * (3 * run)
            triples[1::3] = _LOW[low : low + run]
        else:
            triples = [b"\n" + head] * (3 * run)
            triples[1::3] = [b"%d|" % n for n in range(low, low + run)]
        triples[2::3] = payloads[done : done + run]
        parts += triples
        done += run
    parts[0] = parts[0][1:]  # every line except the first begins with the newline of the line before
    parts.append(b"\n")
    return b"".join(parts)


def renumber(lines: bytes, ahead: int) -> bytes:
    """Return `lines` with `ahead` added to each line's id, which is a number."""
    out: list[bytes] = []
    for line in lines.split(b"\n")[:-1]:
        routing_key, ts, id, payload = line.split(b"|", 3)  # hot loop: record.sent_fields, without the names
        number, semicolon, headers = id.partition(b";")
        out.append(b"%b|%b|%d%b%b|%b\n" % (routing_key, ts, int(number) + ahead, semicolon, headers, payload))
    return b"".join(out)
