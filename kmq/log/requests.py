"""topics/.request-…: what a command asks of the broker. Only the router changes topics that are in force.

    create orders                    a declaration: its partitions, partitioner and limits
    partitions=4
    set orders                       limits of the topic; one without a value is removed
    retention_bytes=1 GiB
    segment_age=
    grow orders
    partitions=4
    delete orders
    incarnation=17                   the from_seq of the topic that is meant; without it, of the topic in force by then
    retain                           seal what is over its limits now; the next tick deletes what is due

Owner       a command submits a request; the framer puts a record for it into the WAL (kmq/framing/topics.py), and
            the router, which carries the record out, removes it. `retain` has no record: the router carries it out.
            If the broker is down, its next start does that.
Invariant   A request is complete and on disk before it has its name. Requests are carried out in the order of their
            names, which begin with the time.
Crash       A request is removed after it was carried out, so it may be carried out twice: that changes nothing.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Sequence

from kmq.config.values import KIB
from kmq.files import replace_file, sync_directory
from kmq.log import topic_records
from kmq.message import record

_PREFIX = ".request-"
_NAME = re.compile(re.escape(_PREFIX) + r"\d{20}-\d{1,10}")  # a name becomes part of a record
_MOST_BYTES = 64 * KIB  # of a request: its record must fit into a ring
_INCARNATION, _SEQ = "incarnation", re.compile(r"[0-9]{1,18}")
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
    def is_recorded(self) -> bool:
        """Return True if a record can say it. The framer numbers these; others are for the router alone."""
        return self.verb in topic_records.VERBS and record.is_topic_name(self.topic)

    @property
    def incarnation(self) -> int | None:
        """Return the from_seq of the topic that is meant, if the request says it."""
        text = self.limits.get(_INCARNATION, "")
        return int(text) if _SEQ.fullmatch(text) else None

    @property
    def values(self) -> dict[str, str]:
        """Return what its record says beside topic and incarnation."""
        return {name: text for name, text in self.limits.items() if name != _INCARNATION}

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


def delete(data: str, topic: str, from_seq: int | None) -> Request:
    """Ask to delete the topic that is in force from `from_seq` on; None: it is not known, so whatever has the name then.

    Whoever asks again after a timeout must not delete the topic that a message has made meanwhile.
    """
    return submit(data, DELETE, topic, {} if from_seq is None else {_INCARNATION: str(from_seq)})


def named(data: str, name: str) -> Request:
    """Return the request of this name, without its content: to be removed."""
    return Request(f"{data}/topics/{_PREFIX}{name}", "", "", {})


def asks_to_create(data: str, topic: str) -> bool:
    """Return True if a request to create this topic is not carried out yet."""
    return any(request.verb == CREATE and request.topic == topic for request in waiting(data))


def waiting(data: str) -> list[Request]:
    """Return the requests that are not carried out yet, the oldest first."""
    names = sorted(name for name in os.listdir(f"{data}/topics") if _NAME.fullmatch(name))
    return [request for name in names if (request := _read(f"{data}/topics/{name}"))]


def _read(path: str) -> Request | None:
    """Return the request in a file; None if it was carried out meanwhile, or is no file.

    A stray file must not stop the framer, and with it all producers: what cannot be read is a request that is refused.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return Request(path, "that cannot be read", "", {})
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _MOST_BYTES:
        return Request(path, f"of more than {_MOST_BYTES} bytes", "", {})
    head, *lines = text.decode(errors="replace").split("\n")
    verb, _, topic = head.partition(" ")
    pairs = (line.partition("=") for line in lines if line)
    return Request(path, verb, topic, {name: text for name, _, text in pairs})


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
