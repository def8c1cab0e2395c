"""The options of a producer, and how every client reads and shows its options: `kmq.Producer(linger_ms=5)`."""

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError
from kmq.message.ids import NAME_PATTERN
from kmq.message.text import request_line
from kmq.wire.refusals import RETRYABLE

_NAME = re.compile(NAME_PATTERN)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
T = TypeVar("T")


def choose(call: Callable[..., object], options: Callable[..., T], given: Mapping[str, object]) -> T:
    """Return the options that a call was given. Raises TypeError that names the call, not what is inside it."""
    own = [name for name, each in signature(call).parameters.items() if each.kind in _NAMED]
    names = [*signature(options).parameters, *own]
    for name in given:
        if name not in names:
            like = get_close_matches(name, names, 1)
            advice = f"did you mean {like[0]!r}?" if like else f"it has {', '.join(names)}"
            raise TypeError(f"{call.__qualname__}() has no parameter {name!r}; {advice}")
    return options(**given)


def option(default: object, meaning: str) -> Any:
    """Declare an option of a client: `meaning` stands in help() and in docs/client-options.md."""
    return field(default=default, metadata={"meaning": meaning})


def table_of(options: type) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each option."""
    return [(each.name, _shown(each.default), each.metadata["meaning"]) for each in fields(options)]


def _shown(value: object) -> str:
    return " ".join(sorted(value)) if isinstance(value, frozenset) else repr(value)


def help_text(options: type) -> str:
    """Return the options for the docstring of a client."""
    return "".join(f"\n    {name}={default}\n        {meaning}" for name, default, meaning in table_of(options))


def document(client: type, options: type) -> None:
    """Add the options to the docstring of a client, for help()."""
    client.__doc__ = f"{client.__doc__}\n\n    Options (docs/client-options.md):\n{help_text(options)}\n"


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

    producer: str = option("", "a name of your own, under which ids are remembered over restarts of the program")
    window: str = option("", "ids are any text; the broker remembers the last KMQ_DEDUPE_COUNT of them under this name")
    dedupe: bool = option(True, "False: the broker remembers no ids, so a retry may be stored twice")
    first_id: int | None = option(None, "with producer=: the first generated id; None: after the last that is stored")
    linger_ms: float | None = option(
        None, "how long to gather messages for a write; None: until the next reply, if one is awaited; 0: not at all"
    )
    batch_bytes: int = option(64 * KIB, "so many gathered bytes are written at once, whatever linger_ms says")
    max_in_flight: int = option(100_000, "messages without a reply, unwritten ones included; send() waits at the limit")
    max_in_flight_bytes: int = option(32 * MIB, "the same in bytes")
    timeout_s: float = option(60.0, "of every waiting call that gets no timeout of its own; then NotAnswered")
    delivery_timeout_s: float | None = option(None, "a message without a reply fails after it; None: never")
    retry: frozenset[str] = option(RETRYABLE, "refusals to retry on a new connection; others fail the message")
    token: str = option("", "bearer token")
    tls: ssl.SSLContext | None = option(None, "a context for TLS; None: a plain connection")
    server_hostname: str | None = option(None, "the name to expect in the certificate; None: the host")
    stall_s: float = option(5.0, "how long without a reply until a stall is reported, and between reports")
    on_stall: Callable[[str], None] | None = option(
        None, "called with the report of a stall; None: a warning of the logger kmq.producer"
    )
    reserved: bool = option(False, "for programs of KMQ itself: write to topics that begin with __")

    def __post_init__(self) -> None:
        for name in ("producer", "window"):
            if getattr(self, name) and not _NAME.fullmatch(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        if bool(self.producer) + bool(self.window) + (not self.dedupe) > 1:
            raise ConfigError("producer=, window= and dedupe=False exclude each other")
        if self.first_id is not None and not self.producer:
            raise ConfigError("first_id= needs producer=, a name of your own")
        check_token(self.token)
        if min(self.max_in_flight, self.max_in_flight_bytes, self.batch_bytes) < 1:
            raise ConfigError("max_in_flight, max_in_flight_bytes and batch_bytes must be at least 1")


def check_token(token: str, name: str = "token") -> None:
    """Raise ConfigError for a token that is not one word of a request line. The error does not show the token."""
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
