"""topics/.request-…: what a command asks of the broker. Only the router changes topics that are in force.

    create orders                    a declaration: its partitions, partitioner and limits
    partitions=4
    set orders                       limits of the topic; one without a value is removed
    retention_bytes=1 GiB
    segment_age=
    grow orders
    partitions=4
    delete orders
    retain                           seal what is over its limits now; the next tick deletes what is due

Owner       a command submits a request; the framer puts a record for it into the WAL (kmq/framing/declarations.py), and
            the router, which carries the record out, removes it. `retain` has no record: the router carries it out.
            If the broker is down, its next start does that.
Invariant   A request is complete and on disk before it has its name. Requests are carried out in the order of their
            names, which begin with the time.
Crash       A request is removed after it was carried out, so it may be carried out twice: that changes nothing.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from kmq.log import topic_records
from kmq.log.disk import replace_file, sync_directory

_PREFIX = ".request-"
_MAKING = ".new"  # the suffix of a file that replace_file has not completed
SET, GROW, DELETE, RETAIN, CREATE = topic_records.SET, topic_records.GROW, topic_records.DELETE, "retain", "create"


class Request:
    """A request: its verb, the topic (RETAIN: ""), and as texts the limits to set, or the partitions to grow to."""

    __slots__ = ("limits", "path", "topic", "verb")

    def __init__(self, path: str, verb: str, topic: str, limits: dict[str, str]) -> None:
        self.path, self.verb, self.topic, self.limits = path, verb, topic, limits

    @property
    def name(self) -> str:
        """Return the name by which its record knows it."""
        return os.path.basename(self.path).removeprefix(_PREFIX)

    @property
    def is_waiting(self) -> bool:
        """Return True if the router has not carried it out yet."""
        return os.path.exists(self.path)

    def remove(self) -> None:
        """Remove the request, because it was carried out."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        sync_directory(os.path.dirname(self.path))


def submit(data: str, verb: str, topic: str, limits: dict[str, str]) -> Request:
    """Submit a request to the router; it is on disk when this returns."""
    path = f"{data}/topics/{_PREFIX}{time.time_ns():020d}-{os.getpid()}"
    lines = [f"{verb} {topic}", *(f"{name}={text}" for name, text in limits.items())]
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    return Request(path, verb, topic, limits)


def named(data: str, name: str) -> Request:
    """Return the request of this name, without its content: to be removed."""
    return Request(f"{data}/topics/{_PREFIX}{name}", "", "", {})


def asks_to_create(data: str, topic: str) -> bool:
    """Return True if a request to create this topic is not carried out yet."""
    return any(request.verb == CREATE and request.topic == topic for request in waiting(data))


def waiting(data: str) -> list[Request]:
    """Return the requests that are not carried out yet, the oldest first."""
    names = sorted(name for name in os.listdir(f"{data}/topics") if name.startswith(_PREFIX))
    return [request for name in names if not name.endswith(_MAKING) and (request := _read(f"{data}/topics/{name}"))]


def _read(path: str) -> Request | None:
    """Return the request in a file; None if it was carried out meanwhile."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            head, *lines = file.read().splitlines() or [""]
    except FileNotFoundError:
        return None
    verb, _, topic = head.partition(" ")
    return Request(path, verb, topic, {name: text for name, _, text in (line.partition("=") for line in lines)})


def apply(own: dict[str, str], changes: dict[str, str]) -> None:
    """Change a topic's own limits; one without a value is removed."""
    for limit, value in changes.items():
        own.pop(limit, None)
        if value:
            own[limit] = value


def limits_to_be(data: str, topic: str, own: dict[str, str], asked: Sequence[Request] | None = None) -> dict[str, str]:
    """Return a topic's own limits as they will be once the router has carried out all requests.

    `asked`: what `waiting` has returned, or those of this topic; without it they are read now.
    """
    for request in waiting(data) if asked is None else asked:
        if request.verb == SET and request.topic == topic:
            apply(own, request.limits)
    return own
