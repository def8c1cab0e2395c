"""The options of kmq.Consumer and kmq.AsyncConsumer, and their limits."""

import logging
import os
import secrets
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypedDict

from kmq.client.options import check_token, option
from kmq.config.values import MIB
from kmq.errors import ConfigError
from kmq.message.record import NO_PARTITION, is_topic_name
from kmq.wire.requests import ASSIGNORS, MAX_NAME, Position, TopicPartition, position_of

PORT = 5674

Start = str | int | datetime


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """The options of a consumer.

    group_id=   the members of a group share the partitions of its topics, and the group remembers what was committed.
                Without a group the consumer reads all partitions of its topics, and remembers nothing.
    start=      where to begin in a partition of which the group has committed nothing, or without a group: `earliest`,
                `latest`, an offset, or a time (datetime, or text such as 2026-11-23T12:00:00Z).
    member=     a name of your own keeps a program's partitions over a quick restart. A second program with this name
                fences the first one. Without it every consumer has a name of its own.
    auto_commit=  every auto_commit_s, and at the end, commit the messages after which the application has called again.
                Off by default: the program may have collected messages without processing them, and if it dies, such a
                commit skips them. Without any commit messages are delivered again, which is noticed.
    """

    group_id: str = option("", "the group to join; without one all partitions are read, and nothing is committed")
    member: str = option("", "a name of your own keeps a program's partitions over a quick restart")
    assignor: str = option(ASSIGNORS[0], f"how a group shares partitions: {', '.join(ASSIGNORS)}")
    start: Start = option("earliest", "where nothing is committed: earliest, latest, an offset or a time")
    session_s: float = option(30.0, "after so long without a sign of life a member's partitions go to others")
    max_poll_interval_s: float = option(
        300.0, "longest time between two polls: then the member leaves until the next one"
    )
    auto_commit: bool = option(
        False, "commit what the application has come back for, every auto_commit_s and at the end"
    )
    auto_commit_s: float = option(5.0, "time between two such commits")
    max_poll_records: int = option(500, "messages that one poll returns at most")
    fetch_max_bytes: int = option(MIB, "of one batch; two of them are in memory, one given out and one on its way")
    timeout_s: float = option(60.0, "of every waiting call that gets no timeout of its own, except poll and iteration")
    token: str = option("", "bearer token")
    tls: ssl.SSLContext | None = option(None, "a context for TLS; None: a plain connection")
    server_hostname: str | None = option(None, "the name to expect in the certificate; None: the host")

    def __post_init__(self) -> None:
        for field in ("group_id", "member"):
            name = getattr(self, field)
            if len(name) > MAX_NAME or "/" in name or not name.isprintable():
                raise ConfigError(f"{field}={name!r}: must be 1 to {MAX_NAME} printable characters without /")
        if self.assignor not in ASSIGNORS:
            raise ConfigError(f"assignor={self.assignor!r}: must be one of {', '.join(ASSIGNORS)}")
        if self.auto_commit and not self.group_id:
            raise ConfigError("auto_commit= needs group_id=, the group that remembers what was committed")
        if min(self.session_s, self.max_poll_interval_s, self.auto_commit_s, self.timeout_s) <= 0:
            raise ConfigError("session_s, max_poll_interval_s, auto_commit_s and timeout_s must be above 0")
        sizes = self.max_poll_records, self.fetch_max_bytes
        if not all(isinstance(size, int) for size in sizes) or min(sizes) < 1:
            raise ConfigError("max_poll_records and fetch_max_bytes must be whole numbers from 1 on")
        to_position(self.start)
        check_token(self.token)


class ConsumerChoices(TypedDict, total=False):
    """The fields of ConsumerOptions as keyword arguments, for type checkers."""

    group_id: str
    member: str
    assignor: str
    start: Start
    session_s: float
    max_poll_interval_s: float
    auto_commit: bool
    auto_commit_s: float
    max_poll_records: int
    fetch_max_bytes: int
    timeout_s: float
    token: str
    tls: ssl.SSLContext | None
    server_hostname: str | None


def logger() -> logging.Logger:
    return logging.getLogger("kmq.consumer")


def to_position(start: Start) -> Position:
    """Return a position in the protocol's form. A datetime without a zone is local time. Raises ConfigError."""
    if isinstance(start, datetime):
        start = start.astimezone(UTC).isoformat()
    try:
        return position_of(str(start))
    except ValueError as err:
        raise ConfigError(str(err)) from None


def to_topic(name: object, call: str) -> str:
    """Return the name of a topic that an application has given to `call`. Raises ConfigError."""
    if isinstance(name, str) and is_topic_name(name):
        return str.__str__(name)
    raise ConfigError(f"{call}: topic {name!r}: must be a topic's name, of letters, digits, _ . and -")


def to_place(place: object, call: str) -> TopicPartition:
    """Return a partition that an application has given. Raises ConfigError."""
    if isinstance(place, tuple | list) and len(place) == 2:
        topic, number = place
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < NO_PARTITION:
            return TopicPartition(to_topic(topic, call), number)
    raise ConfigError(f"{call}: {place!r}: must be (topic, number)")


def made_up_member() -> str:
    """Return a name that no other consumer has, and that shows people where the consumer runs."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


__all__ = [
    "PORT",
    "ConsumerChoices",
    "ConsumerOptions",
    "Start",
    "logger",
    "made_up_member",
    "to_place",
    "to_position",
    "to_topic",
]
