"""A producer's options, its pending messages, and their outcomes: `producer.send("orders", b"one")` returns a
Delivery.
"""

import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

from kmq.client.failures import Refused
from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError, KmqError
from kmq.message.ids import NAME_PATTERN
from kmq.message.text import request_line
from kmq.wire.refusals import RETRYABLE

_NONE: Mapping[int, Refused] = MappingProxyType({})  # shared by all messages that are not refused
_Row = TypeVar("_Row")


class Delivery:
    """Messages sent together, one or a list, and their outcomes.

    seq         seq of the message, or of the first stored message of a list; 0: stored too long ago for the broker to
                know the seq
    runs        for a list: (place in the list, seq of that message, length of the run of consecutive seqs), in order
    refused     for a list: place → Refused
    duplicates  (place, seq) of each message that had been stored before, in order
    error       why the delivery failed: the first refusal, or NotAnswered
    """

    __slots__ = (
        "answered",
        "callback",
        "count",
        "data",
        "done",
        "duplicates",
        "error",
        "is_provisional",
        "lines",
        "may_be_stored",
        "missing",
        "refused",
        "runs",
        "seen",
        "seq",
        "since",
        "size",
    )

    data: bytes
    count: int  # messages
    missing: int  # messages of a list in parts that have no outcome yet
    size: int  # bytes
    since: float  # when it was queued, on the monotonic clock

    def __init__(self, callback: "Callable[[Delivery], object] | None" = None) -> None:
        self.callback = callback
        self.answered = 0
        self.lines: list[bytes] | None = None  # the lines of `data`, once `line` was called
        self.done = self.seen = False  # seen: its error was raised, or given to the callback
        self.is_provisional = False  # its ids count from 1 until the broker has told the last id it knows
        self.may_be_stored = False  # it was sent on a connection that broke, or the user chose its id
        self.seq = -1
        self.error: KmqError | None = None
        self.runs: Sequence[tuple[int, int, int]] = ()
        self.refused: Mapping[int, Refused] = _NONE
        self.duplicates: Sequence[tuple[int, int]] = ()

    def line(self, place: int) -> bytes:
        """Return the message at `place` as it was sent."""
        if not self.data:
            return b""
        if self.lines is None:  # split once: many messages of a list may be refused
            self.lines = self.data.split(b"\n")
        return self.lines[place]

    def rest(self) -> bytes:
        """Return the lines that have no reply yet."""
        at = 0
        for _ in range(self.answered):
            at = self.data.index(b"\n", at) + 1
        return self.data[at:]

    def stored(self, count: int, seq: int) -> None:
        """Note that the next `count` messages are stored, from `seq` on."""
        if self.seq < 0:
            self.seq = seq
        if self.count > 1:
            runs = self.runs if isinstance(self.runs, list) else []
            runs.append((self.answered, seq, count))
            self.runs = runs
        self.answered += count

    def repeated(self, seq: int) -> None:
        """Note that the next message had been stored before, as `seq`."""
        duplicates = self.duplicates if isinstance(self.duplicates, list) else []
        duplicates.append((self.answered, seq))
        self.duplicates = duplicates

    def refuse(self, error: Refused) -> None:
        """Note that the next message is refused."""
        refused = self.refused if isinstance(self.refused, dict) else {}
        refused[self.answered] = error
        self.refused = refused
        if self.error is None:
            self.error = error
        self.answered += 1

    @property
    def seqs(self) -> list[int]:
        """Return the seq of each message; 0 if it is not known, or the message was refused."""
        if self.count == 1:
            return [max(self.seq, 0)]
        seqs = [0] * self.count
        for place, seq, count in self.runs:
            if seq:
                seqs[place : place + count] = range(seq, seq + count)
        return seqs


class Part(Delivery):
    """Some messages of a list that is too long to be in flight as a whole. Their outcomes are added to the `whole`
    list.
    """

    __slots__ = ("at", "whole")

    def __init__(self, whole: Delivery, at: int) -> None:
        """`at`: the place of the first of them in the list."""
        super().__init__(_joins)
        self.whole, self.at, self.may_be_stored = whole, at, whole.may_be_stored

    def join(self) -> bool:
        """Add these outcomes to those of the list. Returns True if all of the list is done."""
        whole, at = self.whole, self.at
        runs = self.runs or ([(0, self.seq, 1)] if self.seq >= 0 else ())
        whole.seq = self.seq if whole.seq < 0 else whole.seq
        whole.runs = _extended(whole.runs, [(at + place, seq, count) for place, seq, count in runs])
        whole.duplicates = _extended(whole.duplicates, [(at + place, seq) for place, seq in self.duplicates])
        if self.refused:
            whole.refused = {**whole.refused, **{at + place: error for place, error in self.refused.items()}}
        whole.error = whole.error or self.error
        whole.answered += self.answered
        whole.missing -= self.count
        return not whole.missing


def _joins(_: Delivery) -> None:
    """Stand for a callback: the outcome of a part goes to its list."""


def _extended(rows: Sequence[_Row], more: list[_Row]) -> list[_Row]:
    known = rows if isinstance(rows, list) else []
    known += more
    return known


def in_parts(whole: Delivery, count: int, most: int) -> Iterator[tuple[Delivery, int, int]]:
    """Yield the deliveries to queue for a list of `count` messages, each with its first and its end place in the list.

    That is `whole` itself, or parts of at most `most` messages.
    """
    if count <= most:
        yield whole, 0, count
        return
    whole.data, whole.count, whole.missing = b"", count, count
    for at in range(0, count, most):
        yield Part(whole, at), at, min(count, at + most)


# --- options ---------------------------------------------------------------------------------------------------------

_NAME = re.compile(NAME_PATTERN)


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
