"""Redrive: send stored records through the broker again, under new routing keys, as new messages. The originals stay.

Used by `kmq redrive` and, for many brokers and with SQL, by kmq.spark.pipelines.redrive.

Source      The records of a queue; or the records that dropped.log names for the ring `durable`, which are in the WAL
            and in no queue.
New key     A template: `{routing_key}`, `{topic}` and `{key}` (without a mark) stand for the parts of the old routing
            key. `{topic}.{key}` is exactly the same topic and key, even if other topics were declared since. `{origin}`
            stands for topic and key that a dead letter came from. `to_sql` turns a template into a SQL expression; Spark
            also accepts any other expression. `record.key_refusal` checks the result before anything is sent.
Line        Producer's time, id, headers and payload as stored, byte by byte, without the headers that name the first
            sender (p, w). Headers of a dead letter, and which letters stay: see letters.py.
Once        With a producer name and a number the broker stores a line once, even if the same redrive runs again;
            records that arrived in between are redriven too. The producer is named after the redrive and the partition.
            The number is the old offset + 1. The old id and seq are kept as the headers orig_id and orig_seq. A
            partition is sent in the order of its offsets. Another selection or another key is another redrive, because
            a producer that has sent number 8 can no longer send number 4. To `{origin}`, letters go back as letters.py
            says, so that every way back knows which letters any other one has sent.
Not covered A producer that was idle for KMQ_PRODUCER_TTL is forgotten: the same redrive then stores its records again.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from kmq.deadletters import letters
from kmq.deadletters.letters import Pace, blocks
from kmq.errors import ConfigError
from kmq.log import dropped, identity, reader, topic_changes, topics
from kmq.message import record
from kmq.message.letters import DLQ, Letter, is_dead_letters, parse_letter
from kmq.message.message import Message
from kmq.message.routing import exact, key_behind, resolve
from kmq.wire import refusals

if TYPE_CHECKING:
    from kmq.client.producer import Producer

_FIRST_SENDER = re.compile(rb";[pw]=[^;]*")  # removed, because a redriven line is a new message
_FIELDS = ("routing_key", "topic", "key", "origin")
SAME = "{topic}.{key}"  # the template that changes nothing
ORIGIN = "{origin}"  # the template that sends dead letters back to where they came from
_ANY_BYTES = "surrogateescape"  # keeps every byte of a key, which is UTF-8 by convention only
_NAME_BYTES = 64  # longest name of a producer

# --- the new key -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def parts(template: str) -> list[tuple[str, str]]:
    """Return a template as pairs (text, field after it); the last field may be "". Raises ConfigError if malformed."""
    try:
        parsed = list(Formatter().parse(template))
        for _, field, spec, conversion in parsed:
            if field is not None and (field not in _FIELDS or spec or conversion):
                raise ValueError(f"unknown field {{{field}}}")
    except ValueError as err:
        raise ConfigError(f"--to {template!r}: {err}; the fields are {{{'}, {'.join(_FIELDS)}}}") from None
    return [(text, field or "") for text, field, _, _ in parsed]


def to_sql(template: str) -> str:
    """Return the template as a SQL expression over columns that are named like its fields, and `exact`."""
    if template in (SAME, ORIGIN):
        return "exact" if template == SAME else "origin"
    terms = []
    for text, field in parts(template):
        terms += ["'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"] if text else []
        terms += [field] if field else []
    return f"concat({', '.join(terms)})" if terms else "''"


def checked(to: str, new: bytes) -> bytes:
    """Return `new`, the result of the template `to`. Raises ConfigError if it is no routing key."""
    if reason := record.key_refusal(new):
        shown, why = new.decode(errors="replace"), refusals.of_key(reason)
        raise ConfigError(f"--to {to!r}: gives {shown!r}, which is no routing key: {why}")
    return new


def rewrite(template: str, topic: str, routing_key: bytes, has_marks: bool = True, origin: bytes = b"") -> bytes:
    """Return the new routing key. Raises ConfigError if the template is malformed or its result is no routing key.

    `has_marks`: marks count in the record. In an older record, text that looks like a mark belongs to the key.
    `origin`: where a dead letter came from.
    """
    name = topic.encode()
    key = key_behind(name, routing_key, has_marks)
    if not has_marks and record.has_mark(routing_key):
        routing_key = exact(name, key)
    if template == SAME:
        return checked(template, exact(name, key))
    old = {"routing_key": routing_key, "topic": name, "key": key or b"", "origin": origin, "": b""}
    new = b"".join(text.encode(errors=_ANY_BYTES) + old[field] for text, field in parts(template))
    return checked(template, new)


# --- the line --------------------------------------------------------------------------------------------------------


def as_sent(line: bytes, new_key: bytes, number: int = 0) -> bytes:
    """Return a stored line as it is sent again, with its newline. A `number` becomes its id, to store it once."""
    seq, _, _, ts, id, payload = record.fields(line)
    letter = parse_letter(line)
    if letter is not None:
        id = b";".join([b"%d" % number if number else id.split(b";")[0], *letters.headers_back(id, letter)])
        return b"%b|%b|%b|%b\n" % (new_key, ts, id, payload)
    id = _FIRST_SENDER.sub(b"", id)
    if number:
        old_id, *headers = id.split(b";")
        if not any(header.startswith(b"orig_seq=") for header in headers):  # a second redrive keeps the first origin
            headers += [b"orig_id=" + old_id] if old_id else []
            headers.append(b"orig_seq=" + seq)
        id = b";".join([b"%d" % number, *headers])
    return b"%b|%b|%b|%b\n" % (new_key, ts, id, payload)


def producer_name(topic: str, partition: int, *redrive: str) -> str:
    """Return the producer name for a partition in one redrive: data directory, selection and new key."""
    digest = sha256("\0".join((topic, str(partition), *redrive)).encode(errors=_ANY_BYTES)).hexdigest()
    end = f"-{partition}"
    return f"redrive-{digest[:12]}-{topic}"[: _NAME_BYTES - len(end)] + end


# --- the source ------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A stored line with its place, the topic of its routing key, and whether that key may have a mark."""

    log: str  # the topic of its queue, or __append for the WAL
    partition: int
    offset: int
    topic: str
    line: bytes
    has_marks: bool = True


class Queue:
    """What a topic holds when this object is made, partition by partition. Later records are not redriven."""

    def __init__(self, data: str, topic: str) -> None:
        if not os.path.isdir(f"{data}/topics/{topic}"):
            raise ConfigError(f"topic {topic!r} does not exist; see: kmq topics list")
        self.topic, self._marks_from = topic, identity.marks_from(data)
        logs = [reader.partition(data, topic, number) for number in range(topics.load(data, topic)[0])]
        self._logs = [(log, log.end_offset()) for log in logs]

    @property
    def text(self) -> str:
        """Return the end of a sentence on records of this source."""
        return f"of {self.topic}"

    def records(self) -> Iterator[Record]:
        """Yield the records in order; compacted records are skipped. Raises DamageError at a damaged record."""
        for partition, (log, end) in enumerate(self._logs):
            offset = log.first_offset
            while offset < end:
                offset, text = log.read(offset)
                if not text:
                    break
                for line in text.split(b"\n")[:-1]:
                    if line and offset < end:
                        has_marks = record.seq_of(line) >= self._marks_from
                        yield Record(self.topic, partition, offset, self.topic, line, has_marks)
                    offset += 1


class Dropped:
    """The records that drop_oldest dropped before they reached their queues; `topic`: "" means all topics."""

    def __init__(self, data: str, topic: str = "") -> None:
        self.topic, self._data = topic, data
        self._table, first = topics.table(data), reader.first_seq(data)
        self.ranges = [(row.first, row.last) for row in dropped.read(data, "durable")]
        lost = [(row.first, row.last) for row in dropped.read(data, "framed")]
        self.never_stored = sum(last - first + 1 for first, last in lost)  # dropped before the WAL
        self.retired = sum(
            max(0, min(last + 1, first) - low) for low, last in self.ranges
        )  # deleted from the WAL since

    @property
    def text(self) -> str:
        """Return the end of a sentence on records of this source."""
        return "of what was dropped" + (f" of {self.topic}" if self.topic else "")

    def records(self) -> Iterator[Record]:
        """Yield the records that are still in the WAL, in order of seq, without those of deleted topics."""
        for low, high in self.ranges:
            for text in reader.read(self._data, low, high):
                for line in text.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    topic = resolve(self._table, record.routing_key_of(line), seq).topic.decode()
                    if topic != topic_changes.TOPIC and topic and self.topic in ("", topic):  # "": deleted since
                        yield Record(reader.WAL, 0, seq, topic, line, seq >= self._table.marks_from)


class Selected:
    """The records that a redrive selects, each with its new routing key. Each iteration reads the source again.

    `stayed`: how many of them the last iteration left out, because letters.py says that they stay.
    """

    def __init__(
        self,
        source: Queue | Dropped,
        template: str,
        key_glob: str = "*",
        from_seq: int = 1,
        max_replays: int = letters.MAX_REPLAYS,
    ) -> None:
        self.source, self.template, self.key_glob, self.from_seq = source, template, key_glob, from_seq
        self.max_replays, self.stayed = max_replays, 0

    def __iter__(self) -> Iterator[tuple[Record, bytes]]:
        """Yield (record, new routing key) in order. Raises ConfigError at the first record without a good new key."""
        self.stayed = 0
        for found in self.source.records():
            routing_key = record.routing_key_of(found.line)
            key = (key_behind(found.topic.encode(), routing_key, found.has_marks) or b"").decode(errors=_ANY_BYTES)
            if record.seq_of(found.line) < self.from_seq or not fnmatchcase(key, self.key_glob):
                continue
            if letters.stays(found.line, self.max_replays):
                self.stayed += 1
                continue
            origin = letters.origin_key(found.line, found.topic, found.has_marks) or b""
            yield found, rewrite(self.template, found.topic, routing_key, found.has_marks, origin)


def numbered(chosen: Iterable[tuple[Record, bytes]], data: str, *redrive: str) -> Iterator[tuple[str, bytes]]:
    """Yield (producer name, line as sent) of records to store once. `redrive`: what identifies this redrive."""
    redrive_id = (identity.read(data, "id"), *redrive)
    for (log, partition), group in groupby(chosen, lambda pair: pair[0][:2]):
        name = producer_name(log, partition, *redrive_id)
        for found, new_key in group:
            yield name, as_sent(found.line, new_key, found.offset + 1)


def sent_back(chosen: Iterable[tuple[Record, bytes]], data: str) -> Iterator[tuple[letters.LetterOrigin, bytes]]:
    """Yield (place, line as sent) of dead letters that go back to their origin, for letters.send."""
    broker = identity.read(data, "id")
    for found, new_key in chosen:
        place = letters.LetterOrigin(broker, found.log, found.partition)
        yield place, as_sent(found.line, new_key, record.seq_of(found.line))


# --- sending ---------------------------------------------------------------------------------------------------------


def send(lines: Iterable[tuple[str, bytes]], connect: "Callable[[str], Producer]", pace: Pace) -> int:
    """Send (producer name, line) pairs and wait until all are stored. Returns how many of them were stored before.

    The pairs of one producer follow one another. `connect` opens a producer by its name. Raises KmqError at the first
    refusal.
    """
    repeated = 0
    for name, group in groupby(lines, itemgetter(0)):
        with connect(name) as producer:
            for block in blocks((line for _, line in group), pace):
                producer.send_lines(block)
        repeated += producer.duplicates
    return repeated


# --- dead letters, selected by filters `<field>=<glob>` --------------------------------------------------------------

_REASONS = 100  # a letter names a number in its reason, and anybody can write a letter
FIELDS = ("key", "value", "error", "group", "topic", "attempts", "replays")


class Found(NamedTuple):
    """A record of a dead letter topic. `letter` is None if it says nothing about an origin."""

    record: Record
    message: Message
    letter: Letter | None


class Filter(NamedTuple):
    """A field, or a header, and the glob that its text must match."""

    field: str
    glob: str

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Return the filter that a user typed. Raises ConfigError."""
        field, equals, glob = text.partition("=")
        if not (field and equals):
            fields = ", ".join(FIELDS)
            raise ConfigError(
                f"--filter {text!r}: must be <field>=<glob>; fields are {fields}, or the name of a header"
            )
        return cls(field, glob)

    def accepts(self, found: Found) -> bool:
        return any(fnmatchcase(text, self.glob) for text in self._texts(found))

    def _texts(self, found: Found) -> list[str]:
        """Return what the record says in this field; a header may come several times."""
        message, letter = found.message, found.letter
        if self.field in ("key", "value"):
            text = message.key if self.field == "key" else message.value
            return [] if text is None else [text.decode(errors="replace")]
        if letter is not None and self.field in FIELDS:
            named = {"error": letter.why, "topic": letter.topic, "replays": str(letter.replays)}
            return [named.get(self.field) or str(getattr(letter, self.field, ""))]
        return [(value or b"").decode(errors="replace") for name, value in message.headers if name == self.field]


def find_topic(data: str, name: str) -> str | None:
    """Return the dead letter topic that a user means by its own or its origin's name; None: there are no letters yet.

    Raises ConfigError if there is no topic of that name either.
    """
    known = topics.names(data)
    if not name.endswith(DLQ) and f"{name}{DLQ}" in known:
        return f"{name}{DLQ}"
    if name in known:
        return name if is_dead_letters(name) or any(each.letter for each in all_of(data, name)) else None
    raise ConfigError(f"topic {name!r} does not exist; kmq dlq ls shows all topics of dead letters")


def all_of(
    data: str, topic: str, filters: Sequence[Filter] = (), tick: Callable[[], None] = lambda: None
) -> Iterator[Found]:
    """Yield the records of a topic that all filters accept, partition by partition, in order.

    `tick` is called for each record, and may raise to end the search.
    """
    marks_from = identity.marks_from(data)
    for each in Queue(data, topic).records():
        tick()
        message = Message(topic, each.partition, each.offset, each.line, marks_from)
        found = Found(each, message, parse_letter(each.line))
        if all(filter.accepts(found) for filter in filters):
            yield found


class Replay:
    """The letters of a topic that have not gone back yet, each with its new routing key.

    Each iteration reads the topic again. After it `before` counts the letters that went back before, `stayed` has the
    reasons of letters that stay, and how often each, `strangers` counts records that are no letters, and `is_complete`
    says that the limit has left out none.
    """

    def __init__(
        self,
        data: str,
        topic: str,
        filters: Sequence[Filter] = (),
        most: int = 0,
        max_replays: int = letters.MAX_REPLAYS,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`most`: at most so many letters, the oldest of each partition first; 0: all.

        `tick` is called now and then, and may raise to end an iteration.
        """
        self._data, self._topic, self._filters = data, topic, filters
        self._most, self._max_replays, self._tick = most, max_replays, tick
        self.stayed: dict[str, int] = {}
        self.strangers = self.before = 0
        self.is_complete = False

    def __iter__(self) -> Iterator[tuple[Record, bytes]]:
        self.stayed, self.strangers, self.before, self.is_complete = {}, 0, 0, False
        partitions, _ = topics.load(self._data, self._topic)
        sent_back = letters.SentBack(self._data, self._topic, partitions, self._tick)
        count = 0
        for found in all_of(self._data, self._topic, self._filters, self._tick):
            if found.letter is None:
                self.strangers += 1
                continue
            if reason := found.letter.obstacle(self._max_replays):
                if len(self.stayed) >= _REASONS and reason not in self.stayed:
                    reason = "other reasons"
                self.stayed[reason] = self.stayed.get(reason, 0) + 1
                continue
            if sent_back.has(found.record.partition, record.seq_of(found.record.line)):
                self.before += 1
                continue
            if self._most and count >= self._most:
                return
            new_key = letters.origin_key(found.record.line, self._topic, found.record.has_marks)
            assert new_key is not None
            yield found.record, new_key
            count += 1
        self.is_complete = True
