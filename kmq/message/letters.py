"""Dead letters of consumers: messages that a handler could not handle, as records of another topic.

    <dlq>[.@.<key>]|<producer's time>|<group>.<topic>.<partition>.<offset>;<its headers>;origin_topic=…;…|<its payload>

Key, time, headers and payload are the message's, byte by byte. The headers after them are KMQ's own
(text.LETTER_HEADERS): where the message is stored, which group failed, how often, when first and last, and the last
error. A message that was a letter before loses the headers of the old letter.

Once        The id names the place of the message. It is sent in the window of its group, so it is stored once, even if
            a consumer dies after the letter and before its commit, and the letter is sent again.
Read        `parse_letter` also reads the letters of Spark's pipelines (kmq/spark/pipelines/archive.py), which have
            `reason`, `from` (topic-partition-offset), the old `id`, and `other` with headers of odd names. Any other
            record is no letter.
Cut         A letter that is too long for a line keeps the beginning of the payload, and its old length in `len`.
"""

import re
from typing import NamedTuple

from kmq.message import record
from kmq.message.message import Message
from kmq.message.record import DLQ
from kmq.message.text import LETTER_HEADERS, REPLAYS, decode, decode_payload, key_text, make_routing_key, percent_encode

_TOPICS = re.compile(r"dead|.+[._-]dlq")  # `dead` holds malformed lines, which have no origin
_FROM = re.compile(r"(?s)(.+)-(\d{1,9})-(\d{1,18})")
_MOST_ERROR = 500  # characters of an error
_OLD = re.compile(rb";(?:p|w|%b)(?:=[^;]*)?(?=;|\Z)" % b"|".join(name.encode() for name in LETTER_HEADERS))


def is_dead_letters(topic: str) -> bool:
    """Return True if by its name every record of the topic is a dead letter, whatever wrote it."""
    return _TOPICS.fullmatch(topic) is not None


class Failure(NamedTuple):
    """How a message failed: the last error, the number of attempts, and when it failed (seconds)."""

    group: str
    error: BaseException | str
    attempts: int
    first: float
    last: float


def letter_id(message: Message, group: str) -> str:
    """Return the id of the letter for this message: each part percent-encoded, its dots too."""
    return ".".join([key_text(group), key_text(message.topic), str(message.partition), str(message.offset)])


def format_letter(message: Message, dlq: str, failure: Failure, max_payload: int | None = None) -> bytes:
    """Return the line of a dead letter. `max_payload`: cut the payload to so many bytes."""
    _, _, _, ts, field, payload = record.fields(message.line)
    _, semicolon, headers = field.partition(b";")
    others = _OLD.sub(b"", semicolon + headers)
    values = (
        message.topic,
        message.partition,
        message.offset,
        message.seq,
        failure.group,
        _text(failure.error)[:_MOST_ERROR],
        failure.attempts,
        f"{failure.first:.3f}",
        f"{failure.last:.3f}",
    )
    if max_payload is not None and len(payload) > max_payload:
        values_of_cut = f";len={len(payload)}".encode()
        payload = payload[: max_payload // 4 * 4]  # whole groups of base64
    else:
        values_of_cut = b""
    own = "".join(f";{name}={percent_encode(str(value))}" for name, value in zip(LETTER_HEADERS, values, strict=True))
    id = letter_id(message, failure.group).encode() + others + values_of_cut + own.encode()
    return b"%b|%b|%b|%b\n" % (make_routing_key(dlq, message.key), ts, id, payload)


def _text(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"


# --- what a letter says ----------------------------------------------------------------------------------------------


class Letter(NamedTuple):
    """The content of a dead letter: where its message is stored, and why it failed. "": not known."""

    topic: str  # of the origin
    partition: int
    offset: int
    seq: str
    group: str
    why: str
    attempts: str
    first_failure: str  # seconds
    last_failure: str
    replays: int  # how often the message was sent back before
    is_cut: bool  # the letter has only the beginning of the payload

    @property
    def origin(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"

    def obstacle(self, max_replays: int) -> str:
        """Return why the letter must not be sent back; "" if it may be."""
        if self.is_cut:
            return "its payload was cut"
        return f"it came back {self.replays} times" if self.replays >= max_replays else ""


def parse_letter(line: bytes) -> Letter | None:
    """Parse a stored line as a dead letter; return None for any other record."""
    if b";origin_topic=" not in line and b";from=" not in line:
        return None
    _, _, routing_key, _, field, payload = record.fields(line)
    headers = stored_headers(field)
    origin = _origin(headers, routing_key)
    if origin is None:
        return None
    is_ours = "origin_topic" in headers
    own = headers if is_ours else {}
    size = len(payload) if is_ours else len(decode_payload(field, payload) or b"")
    return Letter(
        *origin,
        seq=own.get("origin_seq", ""),
        group=own.get("group", ""),
        why=headers.get("error" if is_ours else "reason", ""),
        attempts=own.get("attempts", ""),
        first_failure=own.get("first_failure", ""),
        last_failure=own.get("last_failure", ""),
        replays=_number(headers.get(REPLAYS, "0")),
        is_cut=_number(headers.get("len", "0")) > size,
    )


def why_dead(line: bytes) -> str:
    """Return in one line why a stored line is among the dead letters: the letter's error, else its header `reason`."""
    letter = parse_letter(line)
    reason = "" if letter else stored_headers(record.fields(line).id).get("reason", "")
    return " ".join((letter.why if letter else reason or "(it says nothing about an origin)").split())


def stored_headers(field: bytes) -> dict[str, str]:
    """Return the headers by their stored names: a user's `error` is stored as `%65rror`, and not taken for KMQ's."""
    pairs = (header.decode(errors="replace").partition("=") for header in field.split(b";")[1:])
    return {name: decode(value) for name, _, value in pairs}


def _origin(headers: dict[str, str], routing_key: bytes) -> tuple[str, int, int] | None:
    if "origin_topic" in headers:
        topic, *numbers = (headers.get(name, "") for name in LETTER_HEADERS[:3])
        if not (record.is_topic(topic) and all(re.fullmatch(r"\d{1,18}", number) for number in numbers)):
            return None
        return topic, int(numbers[0]), int(numbers[1])
    match = _FROM.fullmatch(headers.get("from", ""))
    if match is None or "reason" not in headers or not routing_key.startswith(f"{match[1]}{DLQ}".encode()):
        return None
    return (match[1], int(match[2]), int(match[3])) if record.is_topic(match[1]) else None


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


__all__ = [
    "Failure",
    "Letter",
    "format_letter",
    "is_dead_letters",
    "letter_id",
    "parse_letter",
    "stored_headers",
    "why_dead",
]
