"""Topic admission: decides which topics a message may name, and numbers the requests to change topics.

Example: message `orders.k|||x` is admitted if topic `orders` exists. If it does not, it is admitted only while there
are fewer than KMQ_MAX_TOPICS topics and KMQ_AUTO_CREATE_TOPICS is on.

For each request to change a topic the framer puts a record into the WAL. Commands write requests under topics/. The
router removes a request after it has carried out its record (kmq/log/topic_changes.py).

Owner       The framer decides before it numbers a message. A message with a seq is stored and routed, whatever the
            settings are by then.
Invariant   An admitted topic counts until the router has made it. So messages never make more than KMQ_MAX_TOPICS
            topics, nor more than the file system has inodes for, and the router never blocks all lines to wait for a
            topic. `dead` is always admitted. A declared topic is never refused, but it counts. A dead letter makes
            <topic>.dlq of its topic whatever KMQ_AUTO_CREATE_TOPICS is.
            A waiting request gets a record. Records of one topic come in the order of their requests. A record is
            numbered only when the router is past the one before, so it names the incarnation that is in force then.
            A request that was written before a line reached the framer is numbered before that line, unless another
            one of its topic is in progress, or there are thousands of topics.
Crash       A start finds the records that the router is not past in the WAL and in the ring (recovery.py).
Dropped     If the router is past a record and its request is still there, drop_oldest dropped the record. The request
            is numbered again.
Mechanism   `names` begins with the directories under topics/ and the labels of records that are numbered but not
            routed. An unknown name is looked up on disk: one stat for its label. A declared name with a dot needs a
            listing, which takes at most a tenth of the time. Deleted topics are also noticed by a listing: one stat in
            50 ms tells when it is needed.
Marks       `orders.eu.@.k` names exactly the topic `orders.eu`, and `orders.@3` a partition. The message is refused if
            the topic does not have it. A block with marks is accepted as a whole if all names in it are known, and
            otherwise line by line.
Cost        A block that names only some of the last _FEW topics is checked by the regular expression that also checks
            the shape of its lines. Otherwise one pass finds the labels of all lines (measured: 130 ns a line).
            Requests cost one stat a turn. topics/ is listed if it has changed, and ten times a second while a request
            waits.
Memory      One name per topic. Names that the router has never made (drop_oldest) are forgotten at the next listing.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf

from kmq.broker.admission import TOPIC_INODES
from kmq.log import deletions, topic_changes, topics
from kmq.log.deleted_records import DeletedRecords
from kmq.log.topic_changes import TopicChange, TopicRequest
from kmq.message import record
from kmq.message.record import Marked
from kmq.message.routing import AnyTopic, Table, Topic, resolve

_DEAD = record.MALFORMED.partition(b".")[0]
_DLQ = record.DLQ.encode()
_CHANGES = topic_changes.TOPIC.encode()  # the framer's own topic is not counted
_LABELS = re.compile(rb"\n([A-Za-z0-9_-]+)")
_KEYS = re.compile(rb"\n([^|\n]+)")
# hot loop: one search for all lines
_STORED_LABELS = re.compile(rb"(?m)^\d+\|[^|\n]*\|([A-Za-z0-9_-]+)")
_STORED_KEYS = re.compile(rb"(?m)^\d+\|[^|\n]*\|([^|\n]+)")
_FEW = 32  # most names in the pattern, which tries them one by one
_LISTING, _COMPILING = 10, 100  # each takes at most this fraction of the time: 1/10, 1/100
_DELETED_LOOK_S = 0.05  # how often to check whether topics were deleted


Head = tuple[bytes, bytes | None]  # a topic, and the digits of its mark, if there is one


def _pattern(heads: list[bytes]) -> bytes:
    """Return the pattern of any of these names. A longer name comes before its own beginning."""
    return b"(?:" + b"|".join(map(re.escape, sorted(heads, reverse=True))) + b")(?=[.|])"


class _Sparing:
    """A limit for costly work: it takes at most 1/`part` of the time, however often it is due."""

    def __init__(self, part: int) -> None:
        self._part, self._due = part, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    @contextmanager
    def measured(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        now = time.monotonic()
        self._due = now + self._part * (now - started)


class Catalog(AnyTopic):
    """The topics of a data directory, and those that the router is about to make."""

    def __init__(
        self,
        data: str,
        most: int,
        may_create: bool,
        routed_seq: Callable[[], int],
        spare_inodes: Callable[[], float] = lambda: inf,
        past_seq: Callable[[], int] = lambda: 0,
    ) -> None:
        """`routed_seq`: the router has made all topics up to this seq. `past_seq`: it is surely past this one."""
        self._data, self._most, self._may_create, self._routed_seq = data, most, may_create, routed_seq
        self._spare_inodes = spare_inodes
        self._removed = DeletedRecords(data, past_seq)
        self.names: set[bytes] = set()  # of topics on disk or admitted
        self._coming: dict[bytes, int] = {}  # admitted, not seen on disk: the last seq that names it
        self._dotted = Table()  # topics in force now, or from the message that named them on
        self._partitions: dict[bytes, int] = {}  # of topics that a mark has named
        self._listing, self._compiling = _Sparing(_LISTING), _Sparing(_COMPILING)
        self._few: frozenset[Head] = frozenset()
        self._shape = record.Shape()
        self._deleted_ns, self._look_at = deletions.changed_ns(data), time.monotonic() + _DELETED_LOOK_S
        self._list()

    def takes(self, text: bytes, next_seq: int, producer: bytes = b"") -> bool:
        if time.monotonic() > self._look_at:
            self._forget_deleted()
        if self._few and self._shape.fits(text, producer):
            return True
        if not (record.own_shape if producer else record.any_shape).fits(text, producer):
            return False
        marks = record.marks(text)
        if marks is None or not all(map(self._takes_mark, marks)):
            return False
        lines = b"\n" + text[:-1]
        named = set(_LABELS.findall(lines))
        if self._dotted and not named <= self.names:
            named = {resolve(self._dotted, key, next_seq).topic for key in set(_KEYS.findall(lines))}
        unknown = {name for name in named - self.names if not self._is_on_disk(name)}
        if unknown:
            if not self._may_take_new(len(unknown)):
                return False
            self._count_in(unknown, next_seq + text.count(b"\n"))
        if not any(name.startswith(b"__") for name in named):  # the pattern is used for all senders
            self._expect(named, marks)
        return True

    def _forget_deleted(self) -> None:
        """Forget deleted topics. A message that names one needs a new topic, which may be refused."""
        self._look_at = time.monotonic() + _DELETED_LOOK_S
        changed_ns = deletions.changed_ns(self._data)
        if changed_ns != self._deleted_ns:
            self._deleted_ns = changed_ns
            self._list()

    def refusal(self, line: bytes, seq: int) -> str:
        routing_key = line[: line.index(b"|")]
        mark = record.marked(routing_key) if b".@" in routing_key else None
        name = mark.topic if mark else routing_key.partition(b".")[0]
        is_known = self._is_known(name, routing_key, seq)
        if not is_known and not self._may_take_new() and self._listing.is_due:
            self._list()
            is_known = self._is_known(name, routing_key, seq)
        if not is_known and not (self._may_create or self._is_letter(name, line, seq)):
            return "unknown_topic"
        if not is_known and not self._has_room():
            return "too_many_topics"
        if mark and not self._has_partition(mark):
            return "unknown_partition"
        if not is_known:
            self._count_in([name], seq)
        return ""

    def begin(self) -> None:
        self._removed.begin()

    def has_deleted(self, routing_key: bytes, seq: int, is_exact: bool = True, is_same: bool | None = True) -> bool:
        topic = resolve(self._dotted, routing_key, seq).topic
        if not self._removed.has(topic.decode(), routing_key, seq, is_exact):
            return False
        if is_same:
            return True
        # Another record was stored under this id, perhaps in another topic.
        then = self._removed.routing_key(seq) if is_exact else None
        if then is None:
            return is_same is None
        return bool(resolve(self._dotted, then, seq).topic == topic)

    def _takes_mark(self, mark: tuple[bytes, bytes]) -> bool:
        """Return True if the topic and partition of a mark are known. Names with a dot are not looked up on disk."""
        topic, digits = mark
        if b"." in topic:
            is_known = topic in self._dotted
        else:
            is_known = topic in self.names or self._is_on_disk(topic)
        number = record.partition_number(digits) if digits else None
        return is_known and self._has_partition(Marked(topic, number, None))

    def _has_partition(self, mark: Marked) -> bool:
        """Return True if the topic has the partition of the mark. An undeclared topic has one partition."""
        wanted: int | None = mark.partition
        topic: bytes = mark.topic
        if wanted is None or wanted < self._partitions.get(topic, 1):
            return True
        name = topic.decode()
        if os.path.isdir(f"{self._data}/topics/{name}"):
            self._partitions[topic] = topics.load(self._data, name)[0]
        return wanted < self._partitions.get(topic, 1)

    def _may_take_new(self, count: int = 1) -> bool:
        return self._may_create and self._has_room(count)

    def _has_room(self, count: int = 1) -> bool:
        has_inodes = TOPIC_INODES * (len(self._coming) + count) <= self._spare_inodes()
        return has_inodes and len(self.names) + count <= self._most

    def _is_letter(self, name: bytes, line: bytes, seq: int) -> bool:
        """Return True for a dead letter (kmq/message/letters.py) of a known topic, in <topic>.dlq."""
        topic = name.removesuffix(_DLQ)
        is_of_topic = topic != name and b";origin_topic=%b;" % topic in record.sent_fields(line).id
        return is_of_topic and self._is_known(topic, topic, seq)

    def absorb(self, lines: bytes) -> None:
        """Count the topics of numbered records, which the router may not have made yet."""
        last_seq = record.seq_of(lines[lines.rfind(b"\n", 0, -1) + 1 :])
        labels = set(_STORED_LABELS.findall(lines))
        if b".@" in lines:
            labels |= {mark.topic for key in _STORED_KEYS.findall(lines) if (mark := record.marked(key)) is not None}
        new = labels - self.names - {_CHANGES}
        self._count_in([label for label in new if not self._is_on_disk(label)], last_seq)

    def _is_known(self, name: bytes, routing_key: bytes, seq: int) -> bool:
        """`name`: the name in the mark, or the first label."""
        if b"." in name:
            return name in self._dotted or self._is_declared(name, seq)
        if name in self.names or self._is_on_disk(name):
            return True
        return bool(self._dotted) and resolve(self._dotted, routing_key, seq).topic in self._dotted

    def _is_declared(self, name: bytes, seq: int) -> bool:
        """Look up a topic with a dot in its name again. A message that names it by a mark puts it in force."""
        text = name.decode()
        if not os.path.isdir(f"{self._data}/topics/{text}"):
            return False
        partitions, since = topics.load(self._data, text)
        self._dotted[name] = Topic(text, partitions, seq if since is None else since)
        self.names.add(name)
        return True

    def _is_on_disk(self, name: bytes) -> bool:
        """Look up a topic again: it may have been declared. A name with a dot counts only once it is in force."""
        if b"." in name or not os.path.isdir(f"{self._data}/topics/{name.decode()}"):
            return name in self.names
        self.names.add(name)
        self._coming.pop(name, None)
        return True

    def _count_in(self, names: Iterable[bytes], seq: int) -> None:
        for name in names:
            self.names.add(name)
            self._coming[name] = seq
            if b"." in name and name not in self._dotted:
                self._dotted[name] = Topic(name.decode(), 1, seq)

    def _expect(self, named: set[bytes], marks: set[tuple[bytes, bytes]]) -> None:
        """Add the names and marks of this block to the pattern; if that is too many, let it find only these."""
        heads = {(name, None) for name in named} | marks
        if heads <= self._few or len(heads) > _FEW or not self._compiling.is_due:
            return
        together = self._few | heads
        self._few = frozenset(together if len(together) <= _FEW else heads)
        with self._compiling.measured():
            # A mark that was not checked may follow a bare name, hence no @ there.
            names = _pattern([topic for topic, digits in self._few if digits is None]), b"@"
            keys = [b"%b.@%b" % (topic, digits) for topic, digits in self._few if digits is not None]
            self._shape = record.Shape(*([(_pattern(keys), b"")] if keys else []), names)

    def _list(self) -> None:
        """List the topics, to find names with a dot, and to forget names that were never made."""
        with self._listing.measured():
            routed = self._routed_seq()  # read this first: topics up to it have their directories in the listing
            names = topics.names(self._data)
            dotted = [Topic(name, parts, since) for name, parts, since in self._declared(names) if since is not None]
            coming = self._dotted
            self._dotted = Table((topic.name.encode(), topic) for topic in dotted)
            self._partitions.clear()
            there = {name.encode() for name in names} - {_CHANGES}
            self._coming = {name: seq for name, seq in self._coming.items() if name not in there and seq > routed}
            self._dotted |= {name: coming[name] for name in self._coming if b"." in name}
            pending = {name for name in there if b"." in name and name not in self._dotted}
            self.names = (there - pending) | self._coming.keys() | {_DEAD}
        if not {topic for topic, _ in self._few} <= self.names:
            self._few, self._shape = frozenset(), record.Shape()

    def _declared(self, names: list[str]) -> Iterator[tuple[str, int, int | None]]:
        return ((name, *topics.load(self._data, name)) for name in names if "." in name)


# --- requests --------------------------------------------------------------------------------------------------------

_WAITING_S = 0.1  # between two looks while a request waits for the router
_REQUESTS_LOOK_S = 1.0  # between two looks in any case
_COARSE_NS = 50_000_000  # two changes of a directory within this time may have the same mtime
_MANY, _PART = 2000, 10  # with more topics, listings take at most 1/10 of the time


class TopicRequests:
    """The waiting requests, and the records of those in progress."""

    def __init__(self, data: str, routed_seq: Callable[[], int], numbered: dict[str, int]) -> None:
        """`routed_seq`: the router is past this. `numbered`: request → seq of its record, for those after that."""
        self._data, self._routed_seq, self._numbered = data, routed_seq, numbered
        self._directory = f"{data}/topics"
        self._seen_ns = 0  # mtime of topics/ when it was listed
        self._due = self._not_before = 0.0

    def due(self) -> list[TopicChange]:
        """Return the changes to number now, in order. Call `numbered` for each of them."""
        now = time.monotonic()
        try:
            found = os.stat(self._directory)
        except FileNotFoundError:
            return []
        mtime = found.st_mtime_ns
        if (mtime == self._seen_ns and now < self._due) or now < self._not_before:
            return []
        routed = self._routed_seq()  # read this first: requests up to it are gone from the listing
        waiting = [request for request in topic_changes.waiting(self._data) if request.is_recorded]
        self._seen_ns = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
        self._due = now + (_WAITING_S if waiting else _REQUESTS_LOOK_S)
        changes = self._next(waiting, routed)
        self._not_before = now + _PART * (time.monotonic() - now) if found.st_nlink > _MANY else 0.0
        return changes

    def _next(self, found: list[TopicRequest], routed: int) -> list[TopicChange]:
        """Return the oldest change of each topic that has no change in progress."""
        self._numbered = {each.name: self._numbered[each.name] for each in found if each.name in self._numbered}
        busy = {each.topic for each in found if self._numbered.get(each.name, 0) > routed}
        changes = []
        for request in found:
            if request.topic in busy:
                continue
            busy.add(request.topic)
            incarnation = 0 if request.verb == topic_changes.CREATE else request.incarnation
            if incarnation is None:
                incarnation = self._incarnation(request.topic)
            if incarnation is not None:
                changes.append(TopicChange(request.verb, request.topic, incarnation, request.values, request.name))
        return changes

    def numbered(self, change: TopicChange, seq: int) -> None:
        """Remember that the record of a change is in the ring."""
        self._numbered[change.request] = seq

    def _incarnation(self, topic: str) -> int | None:
        """Return the from_seq of the topic in force, 0 if it does not exist; None while the router decides."""
        declared = topics.read(self._data, topic)
        if declared.is_guessed:
            return None
        if declared.from_seq is None and os.path.isdir(f"{self._data}/topics/{topic}"):
            return None
        return declared.from_seq or 0
