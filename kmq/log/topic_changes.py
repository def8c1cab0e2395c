"""Changes of topics: requests for them, and the records that the framer makes of requests.

A request is a file topics/.request-…, by which a command asks the broker for a change. Only the router changes topics
that are in force.

    create orders                    a declaration: its partitions, partitioner and limits
    partitions=4
    set orders                       limits of the topic; one without a value is removed
    retention_bytes=1 GiB
    segment_age=
    grow orders
    partitions=4
    delete orders
    incarnation=17                   the from_seq of the topic that is meant; without it, the topic in force by then
    start orders                     its partitions begin with these offsets: records before them are deleted
    incarnation=17
    3=4711
    retain                           seal segments over their limits now; the next tick deletes those due

A record has the routing key `__kmq.topic`, or `__kmq.start`. docs/decisions/topic-records.md says why changes are
records.

    __kmq.topic|<ts>|;request=<name>|create orders incarnation=0 partitions=4 partitioner=murmur2 retention_age=30d
    __kmq.topic|<ts>|;request=<name>|set orders incarnation=17 retention_bytes=10%20GiB segment_age=
    __kmq.topic|<ts>|;request=<name>|grow orders incarnation=17 partitions=8
    __kmq.topic|<ts>|;request=<name>|delete orders incarnation=17
    __kmq.start|<ts>|;request=<name>|orders incarnation=17 3=4711

    incarnation   the from_seq of the topic that is changed; 0: no topic of this name may be in force
    request       the request that asked for the change
    values        percent-encoded

Owner       a command submits a request; the framer puts a record for it into the WAL (kmq/framing/topics.py), and
            the router, which carries the record out, removes it. `retain` has no record: the router carries it out.
            If the broker is down, its next start does that.
Invariant   A request is complete and on disk before it has its name. Requests are carried out in the order of their
            names, which begin with the time.
            The framer alone writes records of changes, one in a block of its own, and refuses this key from everybody
            else. The meaning of a record depends on its text alone, so a replay of the WAL carries out the same
            changes.
Crash       A request is removed after it was carried out, so it may be carried out twice. The second time changes
            nothing.
"""

import contextlib
import os
import re
import stat
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence

from kmq.config.values import KIB
from kmq.errors import RetryError
from kmq.files import replace_file, sync_directory
from kmq.logfmt import Logger
from kmq.message import record

# --- records ---------------------------------------------------------------------------------------------------------

TOPIC = "__kmq"  # the topic of these records; nobody may declare it or write to it
KEY = b"__kmq.topic"
START_KEY = b"__kmq.start"
KEYS = (KEY, START_KEY)
CREATE, SET, GROW, DELETE, START = "create", "set", "grow", "delete", "start"
VERBS = (CREATE, SET, GROW, DELETE, START)

_OWN = b"|__kmq."
_LINE = re.compile(rb"(?m)^\d+\|[^|\n]*\|(__kmq\.[^|\n]*)\|[^\n]*\n")
_PLAIN = re.compile(r"[A-Za-z0-9._:+-]*")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")


class TopicChange(
    namedtuple("TopicChange", ("verb", "topic", "incarnation", "values", "request", "seq", "ts"), defaults=(0, ""))
):
    """A change. `values` are texts by name. `seq` and `ts`: of the stored record."""

    __slots__ = ()

    @property
    def partitions(self) -> int:
        """Return the number of partitions that it asks for. Raises ValueError if it names no number."""
        return int(self.values.get("partitions", ""))

    @property
    def limits(self) -> dict[str, str]:
        """Return the limits among the values."""
        return {name: text for name, text in self.values.items() if name not in ("partitions", "partitioner")}

    @property
    def starts(self) -> dict[int, int]:
        """Return the offset with which each partition begins. Raises ValueError if one is not a number."""
        if not all(text.isdecimal() for pair in self.values.items() for text in pair):
            raise ValueError(f"{self.values}: expected <partition>=<offset>")
        return {int(partition): int(offset) for partition, offset in self.values.items()}


def encode(change: TopicChange, now: bytes) -> bytes:
    """Return the record as sent, without newline. `now`: its producer_ts."""
    words = [] if change.verb == START else [change.verb]
    words += [change.topic, f"incarnation={change.incarnation}"]
    words += [f"{_quote(name)}={_quote(text)}" for name, text in change.values.items()]
    return b"%b|%b|;request=%b|%b" % (_key_of(change.verb), now, change.request.encode(), " ".join(words).encode())


def decode(line: bytes) -> TopicChange:
    """Return the change in a stored record. Raises ValueError for any other record."""
    stored = record.fields(line.rstrip(b"\n"))
    words = stored.payload.decode("ascii").split(" ")
    verb, topic, *words = [START, *words] if stored.routing_key == START_KEY else words
    pairs = [word.partition("=") for word in words]
    values = {_unquote(name): _unquote(text) for name, _, text in pairs}
    is_known = verb in VERBS and stored.routing_key == _key_of(verb)
    if not is_known or not record.is_topic_name(topic) or "incarnation" not in values:
        raise ValueError(f"{stored.payload[:80]!r}: is no change of a topic")
    incarnation, request = int(values.pop("incarnation")), stored.id.partition(b";request=")[2].decode("ascii")
    return TopicChange(verb, topic, incarnation, values, request, int(stored.seq), stored.recv_ts.decode("ascii"))


def _key_of(verb: str) -> bytes:
    return START_KEY if verb == START else KEY


def are_own(lines: bytes) -> bool:
    """Return True if whole stored lines, which share a routing key, are records of the framer's own."""
    return _OWN in lines[: lines.find(b"\n")]


def parts(lines: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Cut whole stored lines into (lines, b"") and (a record of the framer's own, its routing key), in order.

    Such a record, a change or an epoch (committed.py), is a block of its own in every ring.
    """
    at = 0
    for match in _LINE.finditer(lines) if _OWN in lines else ():
        if match.start() > at:
            yield lines[at : match.start()], b""
        yield match[0], match[1]
        at = match.end()
    if at < len(lines):
        yield lines[at:], b""


def changes(lines: bytes, keys: Sequence[bytes] = KEYS) -> Iterator[TopicChange]:
    """Yield the changes in whole stored lines, those with one of `keys`; unreadable records are skipped."""
    for text, key in parts(lines):
        if key in keys:
            try:
                yield decode(text)
            except ValueError:
                continue


def _quote(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text
    )


def _unquote(text: str) -> str:
    return _ENCODED.sub(lambda match: bytes([int(match[1], 16)]), text.encode()).decode()


# --- requests --------------------------------------------------------------------------------------------------------

_PREFIX = ".request-"
_NAME = re.compile(re.escape(_PREFIX) + r"\d{20}-\d{1,10}")  # a name becomes part of a record
_MOST_BYTES = 64 * KIB  # of a request: its record must fit into a ring
_LEVEL, _STARTS_LEVEL = re.compile(rb" level=([0-9]+) "), 2  # of a register: which brokers carry out starts
_INCARNATION, _SEQ = "incarnation", re.compile(r"[0-9]{1,18}")
RETAIN = "retain"


class TopicRequest:
    """A request: its verb, the topic (RETAIN: ""), and as texts the limits to set, the partitions to grow to, or an
    offset for each partition.
    """

    __slots__ = ("limits", "path", "topic", "verb")

    def __init__(self, path: str, verb: str, topic: str, limits: dict[str, str]) -> None:
        self.path, self.verb, self.topic, self.limits = path, verb, topic, limits

    @property
    def name(self) -> str:
        """Return the name by which its record knows it."""
        return os.path.basename(self.path).removeprefix(_PREFIX)

    @property
    def is_recorded(self) -> bool:
        """Return True if the framer makes a record of it; other requests are for the router alone."""
        return self.verb in VERBS and record.is_topic_name(self.topic)

    @property
    def incarnation(self) -> int | None:
        """Return the from_seq of the topic that is meant, if the request says it."""
        text = self.limits.get(_INCARNATION, "")
        return int(text) if _SEQ.fullmatch(text) else None

    @property
    def values(self) -> dict[str, str]:
        """Return the values of its record, without topic and incarnation."""
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


def submit(data: str, verb: str, topic: str, limits: dict[str, str]) -> TopicRequest:
    """Submit a request to the router; it is on disk when this returns."""
    path = f"{data}/topics/{_PREFIX}{time.time_ns():020d}-{os.getpid()}"
    lines = [f"{verb} {topic}", *(f"{name}={text}" for name, text in limits.items())]
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    return TopicRequest(path, verb, topic, limits)


def delete(data: str, topic: str, from_seq: int | None) -> TopicRequest:
    """Ask to delete the topic in force from `from_seq` on; None: not known, so the topic that has the name by then.

    A repeated request after a timeout must not delete a topic that a message has created meanwhile.
    """
    return submit(data, DELETE, topic, {} if from_seq is None else {_INCARNATION: str(from_seq)})


def begin_at(data: str, topic: str, from_seq: int | None, starts: Mapping[int, int]) -> TopicRequest:
    """Ask that partitions of the topic that is in force from `from_seq` on (see `delete`) begin with these offsets.

    Raises RetryError while a broker of this shard may run a release that would keep the records before them.
    """
    with contextlib.suppress(FileNotFoundError), open(f"{data}/register", "rb") as file:
        level = _LEVEL.search(file.read())
        if level is not None and int(level[1]) < _STARTS_LEVEL:
            raise RetryError(
                f"topic {topic}: cannot be truncated while a broker of the shard is away, or of an older release, which"
                " would bring back what is deleted; upgrade all of them, then try again (kmq cluster status)"
            )
    incarnation = {} if from_seq is None else {_INCARNATION: str(from_seq)}
    return submit(data, START, topic, incarnation | {str(number): str(offset) for number, offset in starts.items()})


def named(data: str, name: str) -> TopicRequest:
    """Return the request of this name, without its content: to be removed."""
    return TopicRequest(f"{data}/topics/{_PREFIX}{name}", "", "", {})


def asks_to_create(data: str, topic: str) -> bool:
    """Return True if a request to create this topic is not carried out yet."""
    return any(request.verb == CREATE and request.topic == topic for request in waiting(data))


def waiting(data: str) -> list[TopicRequest]:
    """Return the requests that are not carried out yet, the oldest first."""
    names = sorted(name for name in os.listdir(f"{data}/topics") if _NAME.fullmatch(name))
    return [request for name in names if (request := _read(f"{data}/topics/{name}"))]


def refuse_requests(data: str, log: Logger) -> None:
    """Refuse the waiting requests: a follower has no framer to make records of them. `retain` needs no record."""
    for request in waiting(data) if os.path.isdir(f"{data}/topics") else ():
        if request.verb != RETAIN:
            reason = "this broker follows in its shard; ask the one that leads (kmq cluster status)"
            log.warn("request_refused", file=request.path, topic=request.topic, reason=reason)
            request.remove()


def _read(path: str) -> TopicRequest | None:
    """Return the request in a file; None if it was carried out meanwhile, or is no file.

    A stray file must not stop the framer, and with it all producers: an unreadable file counts as a request to refuse.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return TopicRequest(path, "that cannot be read", "", {})
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _MOST_BYTES:
        return TopicRequest(path, f"of more than {_MOST_BYTES} bytes", "", {})
    head, *lines = text.decode(errors="replace").split("\n")
    verb, _, topic = head.partition(" ")
    pairs = (line.partition("=") for line in lines if line)
    return TopicRequest(path, verb, topic, {name: text for name, _, text in pairs})


def apply(own: dict[str, str], changes: dict[str, str]) -> None:
    """Change a topic's own limits; one without a value is removed."""
    for limit, value in changes.items():
        own.pop(limit, None)
        if value:
            own[limit] = value


def limits_to_be(
    data: str, topic: str, own: dict[str, str], requests: Sequence[TopicRequest] | None = None
) -> dict[str, str]:
    """Return a topic's own limits as they will be once the router has carried out all requests.

    `requests`: what `waiting` has returned, or those of this topic; without it they are read now.
    """
    for request in waiting(data) if requests is None else requests:
        if request.verb == SET and request.topic == topic:
            apply(own, request.limits)
    return own
