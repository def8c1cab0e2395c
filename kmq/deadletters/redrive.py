"""Redrive: send stored records through the broker again, under new routing keys, as new messages. The originals stay.

Used by `kmq redrive`, `kmq dlq replay`, the console's replay and, for many brokers and with SQL, kmq.spark.pipelines.
Which records a redrive selects: selection.py.

New key     A template: `{routing_key}`, `{topic}` and `{key}` (without a mark) stand for the parts of the old routing
            key. `{topic}.{key}` is exactly the same topic and key, even if other topics were declared since. `{origin}`
            stands for topic and key that a dead letter came from. `to_sql` turns a template into a SQL expression; Spark
            also accepts any other expression. `record.key_refusal` checks the result before anything is sent.
Line        Producer's time, id, headers and payload as stored, byte by byte, without the headers that name the first
            sender (p, w). The old id and seq are kept as the headers orig_id and orig_seq. A dead letter has only the
            user's headers, and `replays`, which counts how often its message has gone back. A consumer or pipeline that
            fails again keeps this header in its new letter.
Once        With a producer name and a number the broker stores a line once, even if the same redrive runs again;
            records that arrived in between are redriven too. A name is of one partition and one redrive: its selection
            and its new key. The number is the old offset + 1. Dead letters that go back to `{origin}` are one redrive,
            whatever was selected before and by which command: their names are of the partition alone, and the number
            is the seq. A producer's numbers must rise: the broker refuses an older record that an earlier run left out
            (`id_too_old`), and that record goes under the next name of the same partition. So a record is sent to the
            names in the same order each time, and is found under the name that stored it.
Not covered A name that was idle for KMQ_PRODUCER_TTL is forgotten, and so may be a name with very many gaps. The same
            redrive then stores its records again.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from kmq.config.values import KIB
from kmq.errors import ConfigError, KmqError
from kmq.message import record
from kmq.message.letters import Letter, parse_letter, stored_headers
from kmq.message.routing import exact, key_behind
from kmq.message.text import LETTER_HEADERS, REPLAYS, percent_encode
from kmq.wire import refusals

if TYPE_CHECKING:
    from kmq.client.producer import Delivery, Producer

_ANY_BYTES = "surrogateescape"  # keeps every byte of a key, which is UTF-8 by convention only

# --- the new key -----------------------------------------------------------------------------------------------------

_FIELDS = ("routing_key", "topic", "key", "origin")
SAME = "{topic}.{key}"  # the template that changes nothing
ORIGIN = "{origin}"  # the template that sends dead letters back to where they came from


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
        new = exact(name, key)
    else:
        old = {"routing_key": routing_key, "topic": name, "key": key or b"", "origin": origin, "": b""}
        new = b"".join(text.encode(errors=_ANY_BYTES) + old[field] for text, field in parts(template))
    if reason := record.key_refusal(new):
        shown, why = new.decode(errors="replace"), refusals.of_key(reason)
        raise ConfigError(f"--to {template!r}: gives {shown!r}, which is no routing key: {why}")
    return new


# --- the line --------------------------------------------------------------------------------------------------------

_FIRST_SENDER = re.compile(rb";[pw]=[^;]*")  # removed, because a redriven line is a new message
_SPARK = ("reason", "from", "id", "len", "other")  # headers of a pipeline's letter


def as_sent(line: bytes, new_key: bytes, number: int) -> bytes:
    """Return a stored line as it is sent again, with its newline. `number` becomes its id, to store it once."""
    seq, _, _, ts, field, payload = record.fields(line)
    letter = parse_letter(line)
    if letter is not None:
        headers = _headers_back(field, letter)
    else:
        old_id, *headers = _FIRST_SENDER.sub(b"", field).split(b";")
        if not _has(headers, b"orig_seq"):  # a second redrive keeps the first origin
            headers += [b"orig_id=" + old_id] if old_id else []
            headers.append(b"orig_seq=" + seq)
    return b"%b|%b|%b|%b\n" % (new_key, ts, b";".join([b"%d" % number, *headers]), payload)


def _headers_back(field: bytes, letter: Letter) -> list[bytes]:
    """Return the headers with which a letter is sent again, as stored, given its id field."""
    headers = stored_headers(field)
    is_ours = "origin_topic" in headers
    dropped = {"p", "w", REPLAYS, *(LETTER_HEADERS if is_ours else _SPARK)}
    kept = [
        header for header in field.split(b";")[1:] if header.partition(b"=")[0].decode(errors="replace") not in dropped
    ]
    if not is_ours:
        kept += [f"{name}={percent_encode(value)}".encode() for name, value in _odd(headers.get("other", ""))]
        old_id = percent_encode(headers.get("id", "")).encode()
        kept += [b"orig_id=" + old_id] if old_id and not _has(kept, b"orig_id") else []
    if letter.seq and not _has(kept, b"orig_seq"):
        kept.append(b"orig_seq=" + percent_encode(letter.seq).encode())
    return [*kept, b"%b=%d" % (REPLAYS.encode(), letter.replays + 1)]


def _has(headers: list[bytes], name: bytes) -> bool:
    return any(header.startswith(name + b"=") for header in headers)


def _odd(text: str) -> list[tuple[str, str]]:
    """Return headers whose names only raw lines can have: names as stored, values decoded."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    return [(name, str(value)) for name, value in found.items() if not re.search(r"[|;=\s\0]", name)]


# --- names -----------------------------------------------------------------------------------------------------------

_NAME_BYTES, _DIGITS = 64, 16
BACK = "dlq-"  # begins each name under which letters go back


class RedrivenPartition(NamedTuple):
    """A partition whose records are sent in the order of their offsets, under names of their own."""

    broker: str  # the id of its data directory
    log: str  # the topic of its queue, or __append for the WAL
    partition: int
    redrive: tuple[str, ...] | None = None  # what identifies the redrive; None: letters go back to their origin

    def name(self, attempt: int = 0) -> str:
        """Return the producer name that is tried as number `attempt`."""
        if self.redrive is None:
            return f"{BACK}{back_digest(*self[:3])}-{attempt}-{self.log}"[:_NAME_BYTES]
        again = (str(attempt),) if attempt else ()
        digest = _digest(self.log, str(self.partition), self.broker, *self.redrive, *again)
        end = f"-{self.partition}"
        return f"redrive-{digest[:12]}-{self.log}"[: _NAME_BYTES - len(end)] + end

    def as_sent(self, offset: int, line: bytes, new_key: bytes) -> bytes:
        """Return the line as it is sent, numbered by its seq if it goes back, else by its offset."""
        return as_sent(line, new_key, record.seq_of(line) if self.redrive is None else offset + 1)


def back_digest(broker: str, topic: str, partition: int) -> str:
    """Return what follows BACK in the names of a partition's letters."""
    return _digest(broker, topic, str(partition))[:_DIGITS]


def _digest(*texts: str) -> str:
    return sha256("\0".join(texts).encode(errors=_ANY_BYTES)).hexdigest()


# --- sending ---------------------------------------------------------------------------------------------------------

_BLOCK_BYTES = 1024 * KIB  # sent at once: each block waits for its replies
_BLOCKS_PER_S = 10  # under a rate: blocks are small enough for an even flow and rare enough to sleep in between
_MOST_NAMES = 64  # of one partition: how many runs may each have left out older records

# A record to send: its partition, offset and line, and its new routing key.
Redriven = tuple[RedrivenPartition, int, bytes, bytes]


class Pace:
    """An even flow of at most `rate` messages per second; 0: no limit."""

    def __init__(self, rate: float = 0) -> None:
        self.rate, self._due = rate, 0.0
        self.block_limit = max(1, int(rate / _BLOCKS_PER_S)) if rate else 1 << 30  # maximum messages in a block

    def wait(self, count: int) -> None:
        """Wait until the next `count` messages may be sent."""
        if self.rate:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + count / self.rate


def blocks(lines: Iterable[bytes], pace: Pace) -> Iterator[bytes]:
    """Yield the lines in blocks of about _BLOCK_BYTES, each block as soon as `pace` allows it."""
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES or len(block) >= pace.block_limit:
            pace.wait(len(block))
            yield b"".join(block)
            block, size = [], 0
    if block:
        pace.wait(len(block))
        yield b"".join(block)


def connect_here(name: str) -> "Producer":
    """Return the producer of this name, which takes the ids that it is given, at the broker of our settings."""
    from kmq.client.producer import Producer

    return Producer.local(producer=name, first_id=0)


def send(records: Iterable[Redriven], rate: float = 0, connect: "Callable[[str], Producer]" = connect_here) -> int:
    """Send records and wait until all are stored. Returns how many of them were stored before.

    The records of a partition follow one another, in the order of their offsets. Raises KmqError at the first refusal.
    """
    pace = Pace(rate)
    return sum(_send(partition, group, connect, pace) for partition, group in groupby(records, itemgetter(0)))


def _send(
    partition: RedrivenPartition, group: Iterable[Redriven], connect: "Callable[[str], Producer]", pace: Pace
) -> int:
    """Store each record of a partition under the first name that takes it. Returns how many were stored before."""
    lines = (partition.as_sent(offset, line, new_key) for _, offset, line, new_key in group)
    with ExitStack() as stack:
        producers: list[Producer] = []

        def begin(block: bytes, attempt: int = 0) -> "Delivery":
            if attempt == len(producers):
                producers.append(stack.enter_context(connect(partition.name(attempt))))
            return producers[attempt].send_lines(block, callback=lambda delivery: None)  # _older looks at its errors

        def end(delivery: "Delivery") -> None:
            for attempt in range(1, _MOST_NAMES + 1):
                producers[attempt - 1].flush()
                if not (older := _older(delivery)):
                    return
                if attempt < _MOST_NAMES:
                    delivery = begin(older, attempt)
            where = f"{partition.log}/{partition.partition}"
            raise KmqError(
                f"{where}: {_MOST_NAMES} replays have left out older letters; no further one can be told apart"
            )

        sent = None
        for block in blocks(lines, pace):  # a block is made while the broker stores the one before it
            if sent is not None:
                end(sent)
            sent = begin(block)
        if sent is not None:
            end(sent)
        return sum(producer.duplicates for producer in producers)


def _older(delivery: "Delivery") -> bytes:
    """Return the lines that the broker refused because their name has passed them. Raises any other refusal."""
    refused = list(delivery.refused.values())
    for error in refused:
        if error.code != "id_too_old":
            raise error
    return b"".join(error.line + b"\n" for error in refused)
