"""Selection of a redrive: which records of a source it sends, by filters, and which letters must stay.

Example: `kmq dlq replay a --filter error=Timeout*` selects the letters of `a.dlq` whose error matches, except those
that have gone back already.

Source      The records of a queue; or the records that dropped.log names for the ring `durable`. drop_oldest dropped
            those: they are in the WAL and in no queue.
Stays       A letter that was sent back `max_replays` times, and a letter whose payload was cut to fit into a line.
Once        `went_back` reads from the disk which letters have gone back (redrive.py). So a limit counts only letters
            that have not, and a dry run reports what the replay would do. If the message was deleted after its letter
            went back, the letter counts as not gone back, and is sent again.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import partial
from typing import Any, NamedTuple

from kmq.deadletters.redrive import BACK, Redriven, RedrivenPartition, SentRecords, back_digest, rewrite, send
from kmq.errors import ConfigError
from kmq.log import checkpoint, dedupe_file, dropped, identity, reader, topic_changes, topics
from kmq.log.committed import readable_seq
from kmq.log.deleted_records import DeletedRecords
from kmq.message import ids, record
from kmq.message.letters import Letter, is_dead_letters, parse_letter
from kmq.message.message import Message
from kmq.message.record import DLQ
from kmq.message.routing import exact, key_behind, resolve
from kmq.message.text import MAX_REPLAYS

# --- the source ------------------------------------------------------------------------------------------------------


class StoredRecord(NamedTuple):
    """A stored line with its place, the topic of its routing key, and whether that key may have a mark."""

    log: str  # the topic of its queue, or __append for the WAL
    partition: int
    offset: int
    topic: str
    line: bytes
    has_marks: bool = True

    @property
    def key(self) -> bytes | None:
        return key_behind(self.topic.encode(), record.routing_key_of(self.line), self.has_marks)


class QueueSource:
    """The records of a topic, partition by partition, up to the end that it has now. Later records are not redriven."""

    def __init__(self, data: str, topic: str) -> None:
        if not os.path.isdir(f"{data}/topics/{topic}"):
            raise topics.unknown(topic, topics.names(data))
        self.data, self.topic, self._marks_from = data, topic, identity.marks_from(data)
        logs = [reader.partition(data, topic, number) for number in range(topics.load(data, topic)[0])]
        self._logs = [(log, log.end_offset()) for log in logs]

    @property
    def text(self) -> str:
        """Return the end of a sentence about records of this source."""
        return f"of {self.topic}"

    def records(self) -> Iterator[StoredRecord]:
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
                        yield StoredRecord(self.topic, partition, offset, self.topic, line, has_marks)
                    offset += 1


class Dropped:
    """The records that drop_oldest dropped before they reached their queues. `topic`: only those of one; "": all."""

    def __init__(self, data: str, topic: str = "") -> None:
        self.data, self.topic = data, topic
        self._table, first = topics.table(data), reader.first_seq(data)
        self.ranges = [(row.first, row.last) for row in dropped.read(data, "durable")]
        self.retired = retired(self.ranges, first)
        self.never_stored = sum(row.last - row.first + 1 for row in dropped.read(data, "framed"))

    @property
    def text(self) -> str:
        """Return the end of a sentence about records of this source."""
        return text_of_dropped(self.topic)

    def records(self) -> Iterator[StoredRecord]:
        """Yield the records that are still in the WAL, in order of seq, without those of deleted topics."""
        for low, high in self.ranges:
            for text in reader.read(self.data, low, high):
                for line in text.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    topic = resolve(self._table, record.routing_key_of(line), seq).topic.decode()
                    if topic != topic_changes.TOPIC and topic and self.topic in ("", topic):  # "": deleted since
                        yield StoredRecord(reader.WAL, 0, seq, topic, line, seq >= self._table.marks_from)


def text_of_dropped(topic: str) -> str:
    return "of what was dropped" + (f" of {topic}" if topic else "")


def retired(ranges: Iterable[tuple[int, int]], first: int) -> int:
    """Return how many records of these seq ranges retention has deleted from a WAL that begins at `first`."""
    return sum(max(0, min(last + 1, first) - low) for low, last in ranges)


def texts_of_lost(never_stored: int, retired: int) -> Iterator[str]:
    """Yield the sentences about dropped records that no redrive can send."""
    if never_stored:
        yield f"{never_stored} were dropped by ring framed, before the WAL: gone for good"
    if retired:
        yield f"{retired} are no longer in the WAL: retention deleted them"


# --- dead letters, selected by filters `<field>=<glob>` --------------------------------------------------------------

FIELDS = ("key", "value", "error", "group", "topic", "attempts", "replays", "seq")
_MOST_NAMED = 100  # letters in one filter `seq=<seq>,<seq>`


class Found(NamedTuple):
    """A record of a dead letter topic. `letter` is None if the record names no origin."""

    record: StoredRecord
    message: Message
    letter: Letter | None


class Filter(NamedTuple):
    """A field or header, and the pattern its text must match: a glob, or for `seq` a list of globs."""

    field: str
    pattern: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Return the filter that a user typed. Raises ConfigError."""
        field, equals, glob = text.partition("=")
        if not (field and equals):
            fields = ", ".join(FIELDS)
            raise ConfigError(
                f"--filter {text!r}: must be <field>=<glob>; fields are {fields}, or the name of a header"
            )
        globs = [seq.strip() for seq in glob.split(",")] if field == "seq" else [glob]
        if len(globs) > _MOST_NAMED:
            raise ConfigError(
                f"--filter seq: names {len(globs)} letters; name at most {_MOST_NAMED}, and the others afterwards"
            )
        return cls(field, re.compile("|".join(map(translate, globs))))

    def accepts(self, found: Found) -> bool:
        return any(map(self.pattern.match, self._texts(found)))

    def _texts(self, found: Found) -> list[str]:
        """Return the record's texts for this field. A header may occur several times."""
        message, letter = found.message, found.letter
        if self.field == "seq":  # never a header named seq: a seq names one letter
            return [str(message.seq)]
        if self.field in ("key", "value"):
            text = message.key if self.field == "key" else message.value
            return [] if text is None else [text.decode(errors="replace")]
        if letter is not None and self.field in FIELDS:
            named = {"error": letter.why, "topic": letter.topic, "replays": str(letter.replays)}
            return [named.get(self.field) or str(getattr(letter, self.field, ""))]
        return [(value or b"").decode(errors="replace") for name, value in message.headers if name == self.field]


def find_topic(data: str, name: str) -> str | None:
    """Return the dead letter topic for a topic name, or for its own name; None if that topic has no letters yet.

    Example: `a` and `a.dlq` give `a.dlq`. Raises ConfigError if there is no topic `name`.
    """
    names = topics.names(data)
    if not name.endswith(DLQ) and f"{name}{DLQ}" in names:
        return f"{name}{DLQ}"
    if name in names:
        return name if is_dead_letters(name) or any(each.letter for each in all_of(data, name)) else None
    raise topics.unknown(name, names)


def all_of(data: str, topic: str, filters: Sequence[Filter] = ()) -> Iterator[Found]:
    """Yield the records of a topic that all filters accept, partition by partition, in order."""
    return (found for found in map(_found, QueueSource(data, topic).records()) if _accepted(found, filters))


def _found(stored: StoredRecord) -> Found:
    marks_from = 0 if stored.has_marks else identity.NEVER
    message = Message(stored.topic, stored.partition, stored.offset, stored.line, marks_from)
    return Found(stored, message, parse_letter(stored.line))


def _accepted(found: Found, filters: Sequence[Filter]) -> bool:
    return all(filter.accepts(found) for filter in filters)


# --- which letters have gone back ------------------------------------------------------------------------------------

_CLAIM = b";p=" + BACK.encode()
# hot loop: one search for all lines of a block
_WENT_BACK = re.compile(rb"^(\d+)\|[^|\n]*\|[^|\n]*\|[^|\n]*\|(\d+);p=(%b[^;|\n]+)" % BACK.encode(), re.MULTILINE)


def went_back(data: str, topic: str, tick: Callable[[], None]) -> list[dict[bytes, ids.KnownProducer]]:
    """Return per partition the producer names that sent letters of a topic back, with the ids stored under each.

    Read from producers.ckpt and from the WAL after it. The broker is not asked (`!hello … last=?`): that would fence a
    replay that is running, and gives only the last id of a name, not the ids that were left out before it. `tick` is
    called now and then, and may raise to end the search.
    """
    broker, count = identity.of_records(data), topics.load(data, topic)[0]
    partitions: list[dict[bytes, ids.KnownProducer]] = [{} for _ in range(count)]
    digests = (back_digest(broker, topic, number).encode() for number in range(count))
    of_prefix = {BACK.encode() + digest: names for digest, names in zip(digests, partitions, strict=True)}

    def names_like(name: bytes) -> dict[bytes, ids.KnownProducer] | None:
        """Return the names of the partition that this name belongs to; None if it is not of this topic."""
        return of_prefix.get(b"-".join(name.split(b"-", 2)[:2]))

    try:
        saved = dedupe_file.read(data)
    except ValueError:  # damaged: read the whole WAL instead, as the framer does
        saved = None
    for row in saved.rows(b"p|" + BACK.encode()) if saved is not None else ():
        if isinstance(row, ids.KnownProducer) and (names := names_like(row.name)) is not None:
            names[row.name] = row
    log = reader.wal(data)
    first = max(log.first_offset, saved.seq + 1 if saved is not None else 0)
    last = readable_seq(data)  # records that are not committed may be cut off, and would then never have gone back
    for lines in reader.read(data, first, log.end_offset() - 1 if last is None else last):
        tick()
        for match in _WENT_BACK.finditer(lines) if _CLAIM in lines else ():
            seq, id, name = match.groups()
            if (names := names_like(name)) is not None:
                producer = names.setdefault(name, ids.KnownProducer(name))
                if int(id) > producer.last_id:
                    producer.add(int(id), int(seq), 1)
                else:
                    producer.renew(int(id), int(seq), 0)
    return partitions


# --- the selection ---------------------------------------------------------------------------------------------------

_REASONS = 100  # most reasons counted apart: a reason may contain a number, and anybody can write a letter


def stays(line: bytes, max_replays: int, only_letters: bool = False) -> str:
    """Return why a stored line must not be sent back; "" if it may. `only_letters`: other records must stay."""
    letter = parse_letter(line)
    if letter is None:
        return "it is no letter" if only_letters else ""
    return letter.obstacle(max_replays)


def origin_key(stored: StoredRecord, letter: Letter | None) -> bytes:
    """Return the routing key under which a letter goes back; b"" if the record is no letter."""
    return b"" if letter is None else exact(letter.topic.encode(), stored.key)


class Selection:
    """The records that a redrive sends, each with its new routing key. Each iteration reads the source again.

    Without a template: the letters that have not gone back yet, each with the key of its origin.

    After an iteration `stayed` counts the letters that must stay, by reason. Without a template `before` counts the
    letters that had gone back, `strangers` the records that are no letters, and `is_complete` is True if the limit
    left out no letter.
    """

    def __init__(
        self,
        source: QueueSource | Dropped,
        template: str | None = None,
        accepts: Callable[[StoredRecord], bool] = lambda stored: True,
        max_replays: int = MAX_REPLAYS,
        most: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`accepts`: which records are wanted. `most`: the greatest number of records, the first ones; 0: no limit.

        `tick` is called now and then, and may raise to end an iteration.
        """
        self.source, self._template, self._accepts = source, template, accepts
        self._max_replays, self._most, self._tick = max_replays, most, tick
        self.stayed: dict[str, int] = {}
        self.strangers = self.before = 0
        self.is_complete = False

    @classmethod
    def of_letters(
        cls,
        data: str,
        topic: str,
        filters: Sequence[Filter],
        max_replays: int = MAX_REPLAYS,
        most: int = 0,
        **more: Any,
    ) -> "Selection":
        """Return the letters of a topic that all filters accept and that have not gone back."""
        return cls(
            QueueSource(data, topic), None, lambda stored: _accepted(_found(stored), filters), max_replays, most, **more
        )

    def __iter__(self) -> Iterator[tuple[StoredRecord, bytes]]:
        """Yield (record, new routing key) in order. Raises ConfigError at the first invalid new key."""
        self.stayed, self.strangers, self.before, self.is_complete = {}, 0, 0, False
        names = went_back(self.source.data, self.source.topic, self._tick) if self._template is None else None
        removed = DeletedRecords(self.source.data, partial(checkpoint.routed_seq, self.source.data))
        count = 0
        for stored in self.source.records():
            self._tick()
            if not self._accepts(stored):
                continue
            letter = parse_letter(stored.line)
            if letter is None and names is not None:
                self.strangers += 1
                continue
            if letter is not None and (reason := letter.obstacle(self._max_replays)):
                if len(self.stayed) >= _REASONS and reason not in self.stayed:
                    reason = "other reasons"
                self.stayed[reason] = self.stayed.get(reason, 0) + 1
                continue
            if letter is not None and names is not None:
                key = origin_key(stored, letter)
                if _is_back(names[stored.partition].values(), record.seq_of(stored.line), letter.topic, key, removed):
                    self.before += 1
                    continue
            if self._most and count >= self._most:
                return
            new_key = origin_key(stored, letter)
            if self._template is not None:
                old_key = record.routing_key_of(stored.line)
                new_key = rewrite(self._template, stored.topic, old_key, stored.has_marks, new_key)
            yield stored, new_key
            count += 1
        self.is_complete = True


def _is_back(
    names: Iterable[ids.KnownProducer], seq: int, topic: str, routing_key: bytes, removed: DeletedRecords
) -> bool:
    """Return True if letter `seq` was sent back under one of these names, and its record was not deleted since."""
    for name in names:
        found = name.find(seq)
        if found >= 0 and not removed.has(topic, routing_key, found or name.most_forgotten(), is_exact=found > 0):
            return True
    return False


def to_send(
    chosen: Iterable[tuple[StoredRecord, bytes]], data: str, redrive: tuple[str, ...] | None = None
) -> Iterator[Redriven]:
    """Yield the rows for redrive.send. `redrive`: its identity; None: letters go back to their origins."""
    broker = identity.of_records(data)
    for stored, new_key in chosen:
        partition = RedrivenPartition(broker, stored.log, stored.partition, redrive)
        yield partition, stored.offset, stored.line, new_key


def replay(
    chosen: Selection, letters: Iterable[tuple[StoredRecord, bytes]], rate: float, dry_run: bool
) -> dict[str, Any]:
    """Send letters back to their topics, or only count them. Return the answer of POST /api/topics/{topic}/replay.

    `letters`: those of `chosen`, which the caller may watch, or end early.
    """
    total, sent = 0, SentRecords(0, 0, [])

    def counted() -> Iterator[tuple[StoredRecord, bytes]]:
        nonlocal total
        for pair in letters:
            total += 1
            yield pair

    if dry_run:
        for _ in counted():
            pass
    else:
        sent = send(to_send(counted(), chosen.source.data), rate)
    unnamed = sent.refused - len(sent.named)
    refused = {f"refused: {each}": 1 for each in sent.named} | ({"refused, and not named": unnamed} if unnamed else {})
    return {
        "dryRun": dry_run,
        "topic": chosen.source.topic,
        "would_replay" if dry_run else "replayed": total - sent.repeated - sent.refused,
        "repeated": chosen.before + sent.repeated,  # another replay may have sent some at the same time
        "stayed": chosen.stayed | refused,
        "strangers": chosen.strangers,
        "complete": chosen.is_complete,
    }
