"""Redrive: messages through the broker again under new routing keys, as new messages. Where they lie nothing is touched.

Used by `kmq redrive` and, for many brokers and with SQL, by kmq.spark.pipelines.redrive.

Which       the records of a queue; or those that dropped.log names for the ring `durable`: they are in the WAL and in no queue.
New key     a template: `{routing_key}`, `{topic}` and `{key}` (without a mark) stand for the old one's parts; `{topic}.{key}` is
            the very same topic and key, whatever has been declared since. `to_sql`
            makes a SQL expression of it, in whose place Spark takes any other. `not_a_key` judges what either gives, before
            anything is sent.
Line        time, id, headers and payload as they are stored, byte by byte, less who sent it first (headers p and w).
Once        With a producer and a number the broker stores a line once, however often the same redrive is run, and what has
            come in between is redriven too. The producer is named after the redrive and the partition, the number is the old
            offset + 1; the old id and seq are kept as headers orig_id and orig_seq.
            A partition goes in the order of its offsets, and another selection or another key is another redrive: a producer
            that had sent number 8 could not send number 4 any more.
Not covered A producer that was idle for KMQ_PRODUCER_TTL is forgotten, and its redrive is a new one.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from kmq import record
from kmq.errors import ConfigError
from kmq.log import dropped, identity, reader, topics
from kmq.routing import exact, key_behind, resolve
from kmq.settings import KIB

if TYPE_CHECKING:
    from kmq.client.producer import Producer

_OWN = re.compile(rb";[pw]=[^;]*")  # who sent it first; it is a new message now
_FIELDS = ("routing_key", "topic", "key")
SAME = "{topic}.{key}"  # the template of what goes where it was
_ANY_BYTES = "surrogateescape"  # a key is UTF-8 by convention only; this way every byte comes out as it went in
_BLOCK_BYTES = 64 * KIB
_BLOCKS_PER_S = 10  # under a rate: short enough to be even, long enough to be slept through
_NAME_BYTES = 64  # of a producer

# --- the new key -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def parts(template: str) -> list[tuple[str, str]]:
    """A template as (text, field behind it) pairs; the last field may be "". Raises ConfigError where it is none."""
    try:
        found = [(text, field, spec, conversion) for text, field, spec, conversion in Formatter().parse(template)]
        for _, field, spec, conversion in found:
            if field is not None and (field not in _FIELDS or spec or conversion):
                raise ValueError(f"there is no field {{{field}}}")
    except ValueError as err:
        raise ConfigError(f"--to {template!r}: {err}; the fields are {{{'}, {'.join(_FIELDS)}}}") from None
    return [(text, field or "") for text, field, _, _ in found]


def to_sql(template: str) -> str:
    """The template as a SQL expression over columns of the same names as its fields, and `exact`."""
    if template == SAME:
        return "exact"
    found = []
    for text, field in parts(template):
        found += ["'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"] if text else []
        found += [field] if field else []
    return f"concat({', '.join(found)})" if found else "''"


def not_a_key(new: bytes) -> str:
    """Why `new` is no routing key; "" where it is one."""
    reason = record.refusal(new + b"|||")
    return reason or ("separator in it" if b"|" in new or b"\n" in new else "")


def checked(to: str, new: bytes) -> bytes:
    """`new`, which `to` has given. Raises ConfigError where it is no routing key."""
    if reason := not_a_key(new):
        raise ConfigError(f"--to {to!r}: gives {new.decode(errors='replace')!r}, which is no routing key ({reason})")
    return new


def rewrite(template: str, topic: str, routing_key: bytes, has_marks: bool = True) -> bytes:
    """The new routing key. Raises ConfigError where the template or what it gives is not one.

    `has_marks`: the record was stored since marks count; what looks like one before is a part of its key.
    """
    name = topic.encode()
    key = key_behind(name, routing_key, has_marks)
    if not has_marks and record.has_mark(routing_key):
        routing_key = exact(name, key)
    if template == SAME:
        return checked(template, exact(name, key))
    old = {"routing_key": routing_key, "topic": name, "key": key or b"", "": b""}
    new = b"".join(text.encode(errors=_ANY_BYTES) + old[field] for text, field in parts(template))
    return checked(template, new)


# --- the line ----------------------------------------------------------------------------------------------------------


def as_sent(line: bytes, new_key: bytes, number: int = 0) -> bytes:
    """A stored line as it is sent again, with its newline; with a number as a producer sends it that wants it stored once."""
    seq, _, _, ts, id, payload = line.split(b"|", 5)
    id = _OWN.sub(b"", id)
    if number:
        own, *headers = id.split(b";")
        if not any(each.startswith(b"orig_seq=") for each in headers):  # else it has been redriven before
            headers += [b"orig_id=" + own] if own else []
            headers.append(b"orig_seq=" + seq)
        id = b";".join([b"%d" % number, *headers])
    return b"%b|%b|%b|%b\n" % (new_key, ts, id, payload)


def producer_name(topic: str, partition: int, *redrive: str) -> str:
    """As whom the records of a partition are sent by one redrive: the data directory, the selection, the new key."""
    digest = sha256("\0".join((topic, str(partition), *redrive)).encode(errors=_ANY_BYTES)).hexdigest()
    end = f"-{partition}"
    return f"redrive-{digest[:12]}-{topic}"[: _NAME_BYTES - len(end)] + end


# --- which -------------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A stored line, where it lies, the topic of its routing key, and whether that may have a mark."""

    log: str  # its topic, or __append: the WAL
    partition: int
    offset: int
    topic: str
    line: bytes
    has_marks: bool = True


class Queue:
    """What a topic holds when this is made, partition by partition. What comes later is not redriven."""

    def __init__(self, data: str, topic: str) -> None:
        if not os.path.isdir(f"{data}/topics/{topic}"):
            raise ConfigError(f"topic {topic!r} does not exist; kmq topics list shows those that do")
        self.topic, self._marks_from = topic, identity.marks_from(data)
        logs = [reader.partition(data, topic, number) for number in range(topics.load(data, topic)[0])]
        self._held = [(log, log.end_offset()) for log in logs]

    def records(self) -> Iterator[Record]:
        """In order, without what compaction took away. DamageError at what is not good."""
        for partition, (log, end) in enumerate(self._held):
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
    """What drop_oldest has taken from the queues; of one topic, or of all of them with ""."""

    def __init__(self, data: str, topic: str = "") -> None:
        self.topic, self._data = topic, data
        self._table, first = topics.table(data), reader.first_seq(data)
        self.ranges = [(each.first, each.last) for each in dropped.read(data, "durable")]
        lost = [(each.first, each.last) for each in dropped.read(data, "framed")]
        self.never_stored = sum(last - first + 1 for first, last in lost)  # gone before the WAL
        self.retired = sum(max(0, min(last + 1, first) - low) for low, last in self.ranges)  # gone from the WAL since

    def records(self) -> Iterator[Record]:
        for low, high in self.ranges:
            for text in reader.read(self._data, low, high):
                for line in text.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    topic = resolve(self._table, record.routing_key_of(line), seq).topic.decode()
                    if topic and self.topic in ("", topic):  # without a name: it was deleted since
                        yield Record(reader.WAL, 0, seq, topic, line, seq >= self._table.marks_from)


def select(records: Iterable[Record], template: str, key_glob: str, from_seq: int) -> Iterator[tuple[Record, bytes]]:
    """(record, new routing key) of those to redrive, in order. ConfigError at the first that cannot have one."""
    for each in records:
        routing_key = record.routing_key_of(each.line)
        key = (key_behind(each.topic.encode(), routing_key, each.has_marks) or b"").decode(errors=_ANY_BYTES)
        if record.seq_of(each.line) >= from_seq and fnmatchcase(key, key_glob):
            yield each, rewrite(template, each.topic, routing_key, each.has_marks)


def numbered(chosen: Iterable[tuple[Record, bytes]], data: str, *redrive: str) -> Iterator[tuple[str, bytes]]:
    """(producer, line as sent) of what is to be stored once. `redrive`: what tells this one from others."""
    who = (identity.read(data, "id"), *redrive)
    for (log, partition), group in groupby(chosen, lambda each: each[0][:2]):
        name = producer_name(log, partition, *who)
        for each, new in group:
            yield name, as_sent(each.line, new, each.offset + 1)


# --- sending -----------------------------------------------------------------------------------------------------------


class Pace:
    """Lets at most `rate` messages a second go, evenly; 0: as many as will."""

    def __init__(self, rate: float = 0) -> None:
        self.rate, self._due = rate, 0.0
        self.most = max(1, int(rate / _BLOCKS_PER_S)) if rate else 1 << 30  # messages in a block

    def wait(self, count: int) -> None:
        """Until `count` messages may go."""
        if self.rate:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + count / self.rate


def blocks(lines: Iterable[bytes], pace: Pace) -> Iterator[bytes]:
    """The lines, some at a time, each block when it may go."""
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES or len(block) >= pace.most:
            pace.wait(len(block))
            yield b"".join(block)
            block, size = [], 0
    if block:
        pace.wait(len(block))
        yield b"".join(block)


def send(lines: Iterable[tuple[str, bytes]], connect: "Callable[[str], Producer]", pace: Pace) -> int:
    """Send (producer, line) pairs, those of a producer together, and wait until all are stored; how many had been before.

    `connect` opens a producer by its name. Raises KmqError naming the first line that was refused.
    """
    repeated = 0
    for name, group in groupby(lines, itemgetter(0)):
        with connect(name) as producer:
            for block in blocks((line for _, line in group), pace):
                producer.send_lines(block)
        repeated += producer.duplicates
    return repeated
