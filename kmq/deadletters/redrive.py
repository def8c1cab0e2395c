"""Redrive: send stored records through the broker again, as new messages under new routing keys. The originals stay.

Example: record `7||a.dlq.k|…` with the template `{origin}` is sent as a message of topic `a` with key `k`.
Used by `kmq redrive`, `kmq dlq replay` and the console's replay. kmq.spark.pipelines does the same for many brokers
and with SQL. selection.py selects the records of a redrive.

New key     A template. `{routing_key}`, `{topic}` and `{key}` (without a mark) stand for the parts of the old routing
            key. `{topic}.{key}` is exactly the same topic and key, even if other topics were declared since. `{origin}`
            stands for the topic and key that a dead letter came from. `to_sql` turns a template into a SQL expression;
            Spark also accepts any other expression. `record.key_refusal` checks each new key before it is sent.
Line        The producer's time, id, headers and payload are sent as stored, byte by byte, without the headers that name
            the first sender (p, w). The headers orig_id and orig_seq keep the old id and seq. A dead letter is sent
            with only the user's headers and `replays`, which counts how often its message was sent back. A consumer or
            pipeline that fails again copies `replays` into its new letter.
Once        The broker stores a line once, because it has a producer name and a number. The same redrive can run again:
            it stores only records that arrived since. A name belongs to one partition and one redrive, which is
            identified by its selection and its new key. The number is the old offset + 1.
            Letters that go back to `{origin}` are all one redrive, whichever command selected them: the name depends
            on the partition alone, and the number is the seq. A producer's numbers must rise, so the broker refuses a
            record older than those of an earlier run (`id_too_old`). That record is sent under the next name of the
            same partition. Names are tried in the same order each time, so a repeated record meets the name that
            stored it.
Refused     A record that the broker refuses for good stays where it is. It is counted and named, and the others are
            sent. Example: `too_long`, for a dead letter of the greatest length plus its new headers.
Not covered A name that was idle for KMQ_PRODUCER_TTL is forgotten, and so may be a name with very many gaps. The same
            redrive then stores its records again.
"""

import json
import re
import time
from collections import Counter, deque
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
from kmq.message.text import LETTER_HEADERS, REPLAYS, format_header, percent_encode
from kmq.wire import refusals
from kmq.wire.refusals import RETRYABLE

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
    """Return the template as a SQL expression over the columns `exact` and those named like the template's fields."""
    if template in (SAME, ORIGIN):
        return "exact" if template == SAME else "origin"
    terms = []
    for text, field in parts(template):
        terms += ["'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"] if text else []
        terms += [field] if field else []
    return f"concat({', '.join(terms)})" if terms else "''"


def rewrite(template: str, topic: str, routing_key: bytes, has_marks: bool = True, origin: bytes = b"") -> bytes:
    """Return the new routing key. Raises ConfigError if the template is malformed or its result is no routing key.

    `has_marks`: a mark in this record's key is a mark. In an older record the same text is part of the key.
    `origin`: the routing key that a dead letter came from.
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
    """Return the line to send for a stored one, with its newline. `number` becomes its id, so it is stored once."""
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
    """Return the headers to send for a letter, in stored form. `field` is the letter's id field."""
    headers = stored_headers(field)
    is_ours = "origin_topic" in headers
    dropped = {"p", "w", REPLAYS, *(LETTER_HEADERS if is_ours else _SPARK)}
    original = [
        header for header in field.split(b";")[1:] if header.partition(b"=")[0].decode(errors="replace") not in dropped
    ]
    if not is_ours:
        original += _other(headers.get("other", ""))
        old_id = percent_encode(headers.get("id", "")).encode()
        original += [b"orig_id=" + old_id] if old_id and not _has(original, b"orig_id") else []
    if letter.seq and not _has(original, b"orig_seq"):
        original.append(b"orig_seq=" + percent_encode(letter.seq).encode())
    return [*original, b"%b=%d" % (REPLAYS.encode(), letter.replays + 1)]


def _has(headers: list[bytes], name: bytes) -> bool:
    return any(header.startswith(name + b"=") for header in headers)


def _other(text: str) -> list[bytes]:
    """Return, in stored form, the user's headers that the letter could not keep under their own names."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    pairs = ((name.encode(), None if value is None else str(value)) for name, value in found.items())
    return [format_header(*pair).removeprefix(";").encode() for pair in pairs]


# --- names -----------------------------------------------------------------------------------------------------------

_NAME_BYTES, _DIGITS = 64, 16
BACK = "dlq-"  # begins each producer name that sends letters back


class RedrivenPartition(NamedTuple):
    """A partition whose records are sent in order of offset, under producer names of its own."""

    broker: str  # the id of its data directory
    log: str  # the topic of its queue, or __append for the WAL
    partition: int
    redrive: tuple[str, ...] | None = None  # what identifies the redrive; None: letters go back to their origins

    def name(self, attempt: int = 0) -> str:
        """Return the producer name to try; `attempt` counts from 0."""
        if self.redrive is None:
            return f"{BACK}{back_digest(*self[:3])}-{attempt}-{self.log}"[:_NAME_BYTES]
        again = (str(attempt),) if attempt else ()
        digest = _digest(self.log, str(self.partition), self.broker, *self.redrive, *again)
        end = f"-{self.partition}"
        return f"redrive-{digest[:12]}-{self.log}"[: _NAME_BYTES - len(end)] + end

    def as_sent(self, offset: int, line: bytes, new_key: bytes) -> bytes:
        """Return the line to send. Its number is its seq if it goes back to its origin, else its offset + 1."""
        return as_sent(line, new_key, record.seq_of(line) if self.redrive is None else offset + 1)


def back_digest(broker: str, topic: str, partition: int) -> str:
    """Return the part after BACK of the producer names of a partition's letters."""
    return _digest(broker, topic, str(partition))[:_DIGITS]


def _digest(*texts: str) -> str:
    return sha256("\0".join(texts).encode(errors=_ANY_BYTES)).hexdigest()


# --- sending ---------------------------------------------------------------------------------------------------------

_BLOCK_BYTES = 1024 * KIB  # sent at once; each block waits for its replies
_BLOCKS_PER_S = 10  # under a rate: small blocks give an even flow, and few blocks leave time to sleep in between
MOST_NAMED = 20  # refused records that a redrive names
_MOST_NAMES = 64  # for one partition: the number of runs that may each have left out older records

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
    """Return a producer of this name at the broker of our settings. Its ids are those of the lines."""
    from kmq.client.producer import Producer

    return Producer.local(producer=name, first_id=0)


class SentRecords(NamedTuple):
    """The result of a redrive: how many records were stored before or refused, and the first refused ones."""

    repeated: int
    refused: int
    named: list[str]  # <topic>/<partition>@<offset>: <why>


def send(
    records: Iterable[Redriven], rate: float = 0, connect: "Callable[[str], Producer]" = connect_here
) -> SentRecords:
    """Send records. Return when each is stored, or refused for good. A refused record stays where it is.

    Records of one partition must come together, in order of offset. Raises KmqError if the broker accepts no more.
    """
    pace, named = Pace(rate), list[str]()
    repeated = refused = 0
    for partition, group in groupby(records, itemgetter(0)):
        before, stuck = _send(partition, group, connect, pace)
        repeated, refused = repeated + before, refused + stuck.total()
        named += list(stuck)[: MOST_NAMED - len(named)]
    return SentRecords(repeated, refused, [each for each in named if each])


def _send(
    partition: RedrivenPartition, group: Iterable[Redriven], connect: "Callable[[str], Producer]", pace: Pace
) -> tuple[int, "Counter[str]"]:
    """Store each record of a partition under the first name that accepts it.

    Return how many were stored before, and a count for each refused record, by its place and reason. "" counts the
    refusals after the first MOST_NAMED.
    """
    waiting = deque[int]()  # offsets of lines that are not in a block yet
    stuck = Counter[str]()
    where = f"{partition.log}/{partition.partition}"

    def lines() -> Iterator[bytes]:
        for _, offset, line, new_key in group:
            waiting.append(offset)
            yield partition.as_sent(offset, line, new_key)

    def refuse(offset: int, reason: str) -> None:
        stuck[f"{where}@{offset}: {reason}" if len(stuck) < MOST_NAMED else ""] += 1

    with ExitStack() as stack:
        producers: list[Producer] = []

        def begin(block: bytes, attempt: int = 0) -> "Delivery":
            if attempt == len(producers):
                producers.append(stack.enter_context(connect(partition.name(attempt))))
            return producers[attempt].send_lines(block, callback=lambda delivery: None)  # _older reads its errors

        def end(delivery: "Delivery", offsets: list[int]) -> None:
            for attempt in range(1, _MOST_NAMES + 1):
                producers[attempt - 1].flush()
                older = _older(delivery, offsets, refuse)
                if not older:
                    return
                if attempt < _MOST_NAMES:
                    delivery, offsets = begin(b"".join(line for line, _ in older), attempt), [at for _, at in older]
            raise KmqError(
                f"{where}: {_MOST_NAMES} replays have left out older letters; no further one can be told apart"
            )

        sent: tuple[Delivery, list[int]] | None = None
        for block in blocks(lines(), pace):  # make a block while the broker stores the one before it
            offsets = [waiting.popleft() for _ in range(block.count(b"\n"))]
            if sent is not None:
                end(*sent)
            sent = begin(block), offsets
        if sent is not None:
            end(*sent)
        return sum(producer.duplicates for producer in producers), stuck


def _older(delivery: "Delivery", offsets: list[int], refuse: Callable[[int, str], None]) -> list[tuple[bytes, int]]:
    """Return the lines refused because their name already has a higher id, each with its offset.

    Calls `refuse` for a record that is refused for good. Raises a refusal that concerns more than one message.
    """
    older = []
    for place, error in delivery.refused.items():
        if error.code == "id_too_old":
            older.append((error.line + b"\n", offsets[place]))
        elif error.code in RETRYABLE:
            raise error
        else:
            refuse(offsets[place], error.reason)
    if delivery.answered < delivery.count:
        raise delivery.error or KmqError("the broker ended the connection")
    return older
