"""The options of kmq.Producer and kmq.AsyncProducer, and their limits."""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError
from kmq.message.ids import NAME_PATTERN
from kmq.message.text import request_line
from kmq.wire.refusals import RETRYABLE

_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a producer.

    The first ones say who sends, and so what happens to a retry:
        (nothing)       a generated name: a message is stored once however often the connection breaks.
        producer=       a name of your own, whose ids the broker remembers over restarts of your program. Then
                          - give each message its number, send(…, id=n), from a source that survives a crash (a line
                            number, a key of your database): a message repeated after the crash is stored once. Or
                          - let ids be generated: they continue from `first_id`, or after the last id that the broker
                            knows for this name, which the first connection asks for. If the broker has stored a
                            generated id already, that is an error (code id_reused), never a success.
                        A repeated id with other content fails (id_reused). An id below the last one fails too, unless
                        the broker knows it as stored (id_too_old). Neither message is stored.
        Two programs with one name: the later one fences the earlier one.
        window=         ids are any text; the broker remembers KMQ_DEDUPE_COUNT of them, each for KMQ_DEDUPE_AGE.
        dedupe=False    the broker remembers no ids: a message that had no reply when a connection broke may be stored
                        twice.
    """

    producer: str = ""
    window: str = ""
    dedupe: bool = True
    first_id: int | None = None
    # How long to gather messages for a write. None: until the next reply, if one is awaited. 0: a write per message.
    linger_ms: float | None = None
    batch_bytes: int = 64 * KIB  # this many gathered bytes are written at once, whatever linger_ms says
    max_in_flight: int = 100_000  # maximum number of messages without a reply, including those not yet written
    max_in_flight_bytes: int = 32 * MIB
    timeout_s: float = 60.0  # of every waiting call that gets no timeout of its own
    delivery_timeout_s: float | None = None  # a message without a reply fails after it (NotAnswered); None: never
    retry: frozenset[str] = RETRYABLE  # refusals to retry on a new connection; others fail the message
    token: str = ""  # bearer token
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    stall_s: float = 5.0  # how long without a reply until the producer reports a stall, and between reports
    on_stall: Callable[[str], None] | None = None  # called with the report; None: logger kmq.producer warns
    reserved: bool = False  # for KMQ's own programs: write to topics that begin with __, with the pod's local token

    def __post_init__(self) -> None:
        for field in ("producer", "window"):
            if getattr(self, field) and not _NAME.fullmatch(getattr(self, field)):
                raise ConfigError(f"{field}={getattr(self, field)!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        if bool(self.producer) + bool(self.window) + (not self.dedupe) > 1:
            raise ConfigError("producer=, window= and dedupe=False exclude each other")
        if self.first_id is not None and not self.producer:
            raise ConfigError("first_id= needs producer=, a name of your own")
        check_token(self.token)
        if min(self.max_in_flight, self.max_in_flight_bytes, self.batch_bytes) < 1:
            raise ConfigError("max_in_flight, max_in_flight_bytes and batch_bytes must be at least 1")


def check_token(token: str, name: str = "token") -> None:
    """Raise ConfigError for a token that is no single word of a request line. The error does not show it."""
    try:
        request_line(f"token={token}")
    except ValueError as err:
        raise ConfigError(str(err).replace("token", name, 1)) from None


class Choices(TypedDict, total=False):
    """The fields of Options as keyword arguments, for type checkers."""

    producer: str
    window: str
    dedupe: bool
    first_id: int | None
    linger_ms: float | None
    batch_bytes: int
    max_in_flight: int
    max_in_flight_bytes: int
    timeout_s: float
    delivery_timeout_s: float | None
    retry: frozenset[str]
    token: str
    tls: ssl.SSLContext | None
    server_hostname: str | None
    stall_s: float
    on_stall: Callable[[str], None] | None
    reserved: bool


__all__ = ["Choices", "Options", "check_token"]
