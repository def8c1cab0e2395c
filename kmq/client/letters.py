"""Dead letters of consumers: messages that a handler could not handle, as records of another topic.

    <dlq>[.@.<key>]|<producer's time>|<group>.<topic>.<partition>.<offset>;<its headers>;origin_topic=…;…|<its payload>

Key, time, headers and payload are those of the message, byte by byte. The headers behind them are KMQ's own
(lines.LETTER_HEADERS): they say where the message is stored, which group failed, how often, when first and last, and
the last error. A message that was a letter before loses the headers of the old letter.

Once        The id names the place of the message. Sent in the window of its group, it is stored once, although a
            consumer that dies behind the letter and before its commit sends it again.
Cut         A letter that is too long for a line keeps the beginning of the payload, and its old length in `len`.
"""

import re
from typing import NamedTuple

from kmq.client.lines import LETTER_HEADERS, key_text, make_routing_key, percent_encode
from kmq.client.message import Message

_MOST_ERROR = 500  # characters of an error
_OLD = re.compile(rb";(?:p|w|%b)(?:=[^;]*)?(?=;|\Z)" % b"|".join(name.encode() for name in LETTER_HEADERS))


class Failure(NamedTuple):
    """What happened to a message: the last error, how often it was tried, and when it failed (seconds)."""

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
    _, _, _, ts, field, payload = message.line.split(b"|", 5)
    _, semicolon, headers = field.partition(b";")
    kept = _OLD.sub(b"", semicolon + headers)
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
    id = letter_id(message, failure.group).encode() + kept + values_of_cut + own.encode()
    return b"%b|%b|%b|%b\n" % (make_routing_key(dlq, message.key), ts, id, payload)


def _text(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"


__all__ = ["Failure", "format_letter", "letter_id"]
