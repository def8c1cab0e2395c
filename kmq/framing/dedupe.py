"""The dedupe table: which ids are stored already, so that a retry gets `!dup` and stores nothing twice.

Example: producer `a` sends id 5 again. The table knows id 5 as seq 105, so the reply to message n is `!dup <n> 105`.

Owner       The framer, the only process that assigns seqs.
Invariant   The table always holds each id that a record up to the last assigned seq claims: `;p=` (a producer's
            increasing ids) or `;w=` (arbitrary ids in a window). Only two write these headers: the framer
            (record.disclaim), and the Kafka door with the pod's token, whose every line is checked for the name of its
            unit. So no producer can make the table believe that something is stored.
            A message of an acknowledged connection is stored, or known as stored, or refused. It is accepted only if
            its id is new, or if the record that had its id was deleted (kmq/log/deleted_records.py). From then on the
            table has the id as of the new record. A stored id carries `;p=` or `;w=` of its own connection, and no such
            header from another sender. A message that names a reserved topic is accepted only from a connection that
            ingress has found to be the pod's own.
            producers.ckpt never covers a record that is not on disk: a snapshot waits until durability has synced its
            last seq. Otherwise, if all stages die and the rings are lost, ids that were lost with them would count as
            stored.
Crash       A start loads producers.ckpt, then reads the later records from the WAL, then the blocks that wait in the
            ring `framed`. Together these are exactly the records up to the next seq. A damaged file (its crc does not
            match) is ignored, and the whole WAL is read instead. The file is replaced atomically: after a kill during
            the write the old file is still there.
Disk full   The old file stays, and the save is retried. Until it succeeds, retention keeps the records that the old
            file does not cover.
Memory      Bounded: at most `max_names` names, `max_kafka` names of Kafka producers, and KMQ's own names. Each has its
            last id, some runs of (id, seq), ranges of older ids, and fingerprints of its last ids. There are at most
            `max_ids` runs in all, as many ids in windows, MAX_RANGES ranges and MAX_PRINTS fingerprints.
            An id that is dropped from the runs is still known as stored, but its seq is not (`!dup n 0`). An id that is
            dropped from the ranges is unknown (`id_too_old`). An id that leaves a window, by count or age, is
            forgotten: KMQ_DEDUPE_COUNT and KMQ_DEDUPE_AGE are the promise. A copier's name (`t<pid>`, which writes the
            commit of a Kafka transaction) has no age: it is forgotten once _MOST_COPIERS others were used since.
Forgotten   A Kafka producer whose name is unknown has stored nothing, or its name was forgotten. The door must tell
            these apart (kmq/gateway/kafka/producing.py). Pids rise, so one number is enough: the highest forgotten pid.
            An unknown name with a higher pid has never stored anything.
Time        A message costs the same however many names and ids there are: the next name or id to evict is always the
            first of an ordered table. Between two batches a snapshot is copied for at most _COPY_S.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import lt
from zlib import crc32

from kmq.config.values import MIB
from kmq.errors import RetryError
from kmq.files import FULL, replace_file
from kmq.framing.blocks import LineBatch
from kmq.log import dedupe_file, remnant
from kmq.log.dedupe_file import ROWS_PER_BEAT, TableSnapshot
from kmq.message import record
from kmq.message.ids import (
    COPIER_NAME,
    FORGOTTEN,
    KAFKA_NAME,
    MADE_UP,
    MAX_ID_DIGITS,
    MAX_WINDOW_ID,
    NEW,
    OWN_NAME,
    PIDS_PER_LIFE,
    TOO_OLD,
    IdWindow,
    KnownProducer,
    TablePart,
    is_of_door,
    pid_of,
)
from kmq.message.record import Starts, fingerprint
from kmq.message.routing import AnyTopic

_RUNS = 1024  # runs remembered per producer
_FORGOTTEN_AT_ONCE = 1024  # idle names: takes 1 ms; 50,000 took 45 ms
MIN_RUNS = 8  # runs that a producer keeps when all producers together have too many
# A made-up name belongs to one run of a program (`kmq produce --acks` in a loop) and is not used again. This long after
# its last message the program has most likely ended. The name may be forgotten then, but only if the table is full.
_MADE_UP_S = 600
# A Kafka producer gets a new name when its program restarts. After this idle time it has no request left to retry, so
# it may continue under a forgotten name as under a new one.
_KAFKA_S = 3600
_MADE_UP, _KAFKA, _OWN = MADE_UP.encode(), re.compile(KAFKA_NAME.encode()), re.compile(OWN_NAME.encode())
_COPIER = re.compile(COPIER_NAME.encode())
# Names of copiers, which write the commits of Kafka transactions: twice as many as there are transactional ids. A
# copier that asks for its last id keeps its name.
_MOST_COPIERS = 40_000
MAX_PRINTS = 1 << 19  # fingerprints of all producers together: 2 MiB
MAX_RANGES = 1 << 17  # ranges of all producers together: 2 MiB

# hot loop: one search for all lines of a block
_CLAIM = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|(([^|\n]*)\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)([^|\n]*)\|(.*))")


class DedupeTable:
    """The producers by name, and the window of arbitrary ids."""

    def __init__(self, max_names: int, name_ttl: float, max_ids: int, max_age: float, max_kafka: int) -> None:
        """Forget a name after `name_ttl` s without a message, and an id of a window after `max_age` s."""
        self._ttl, self._max_runs = name_ttl, max_ids
        self.names: OrderedDict[bytes, KnownProducer] = OrderedDict()  # in order of their last messages
        self.common = TablePart("KMQ_PRODUCERS", max_names, _MADE_UP_S)
        self.kafka = TablePart("KMQ_KAFKA_PRODUCERS", max_kafka, _KAFKA_S)
        self.own = TablePart("", sys.maxsize, 0.0)
        self.copiers = TablePart("", _MOST_COPIERS, 0.0)
        self.runs = self.prints = self.ranges = 0  # of all producers together
        self.window = IdWindow(max_ids, max_age)
        self.forgotten = 0  # the highest pid of all Kafka names that were forgotten
        self._snapshot: TableSnapshot | None = None  # until it is complete, a producer is copied before it changes
        self._generation = 0  # of the last snapshot

    def __bool__(self) -> bool:
        return bool(self.names or self.window.ids)

    # --- increasing ids --------------------------------------------------------------------------------------------

    def producer(self, name: bytes, seconds: int) -> KnownProducer | None:
        """Return the producer of that name, known or new; None if its part of the table is full.

        KMQ's own names always have a place: `__…`, of which there are few, and the last _MOST_COPIERS of `t<pid>`.
        Other clients must not be able to stop a group from committing.
        """
        producer = self.names.get(name)
        if producer is None:
            part = self.part_of(name)
            if part.excess > 0:
                self.forget_idle(seconds)
                self._forget(part.evictable, seconds - min(self._ttl, part.idle_s), part.excess)
            if part.excess > 0:
                return None
            producer = self._add(KnownProducer(name, seconds=seconds))
        return producer

    def part_of(self, name: bytes) -> TablePart:
        """Return the part of the table that this name belongs to."""
        if _OWN.fullmatch(name):
            return self.copiers if _COPIER.fullmatch(name) else self.own
        return self.kafka if _KAFKA.fullmatch(name) else self.common

    def _add(self, producer: KnownProducer) -> KnownProducer:
        name, part = producer.name, self.part_of(producer.name)
        producer.generation, producer.part = self._generation, part
        self.names[name] = producer
        part.count += 1
        if part in (self.kafka, self.copiers) or name.startswith(_MADE_UP):
            part.evictable[name] = producer
        return producer

    def remember(
        self, producer: KnownProducer, first_id: int, seq: int, count: int, seconds: int, prints: Sequence[int] = ()
    ) -> None:
        """Remember that `count` ids from `first_id` on got the seqs from `seq` on; `prints`: their fingerprints."""
        self._copy_to_snapshot(producer)
        before = len(producer.prints)
        self._use(producer, seconds)
        self.runs += producer.add(first_id, seq, count, prints)
        self.prints += len(producer.prints) - before
        if self.prints > MAX_PRINTS:
            self._shed_prints()
        self._bound(producer)

    def renew(self, producer: KnownProducer, number: int, seq: int, seconds: int, print: int) -> None:
        """Remember that an old id of `producer` was stored again, because its record had been deleted."""
        self._copy_to_snapshot(producer)
        self._use(producer, seconds)
        before = len(producer.ids), len(producer.firsts), len(producer.prints)
        producer.renew(number, seq, print)
        self.runs += len(producer.ids) - before[0]
        self.ranges += len(producer.firsts) - before[1]
        self.prints += len(producer.prints) - before[2]
        self._bound(producer)

    def _bound(self, producer: KnownProducer) -> None:
        if len(producer.ids) > _RUNS or self.runs > self._max_runs:
            self._trim(producer, _RUNS // 2 if len(producer.ids) > _RUNS else MIN_RUNS)

    def _use(self, producer: KnownProducer, seconds: int) -> None:
        """Move this producer to the end of the order in which names are forgotten."""
        producer.seconds = seconds
        self.names.move_to_end(producer.name)
        evictable = producer.part.evictable
        if producer.name in evictable:
            evictable.move_to_end(producer.name)

    def _copy_to_snapshot(self, producer: KnownProducer) -> None:
        """Copy a producer into the pending snapshot, if it is not there yet, before it changes."""
        if producer.generation != self._generation and self._snapshot is not None:
            self._snapshot.add(producer)

    def _trim(self, producer: KnownProducer, keep: int) -> None:
        ranges, prints = len(producer.firsts), len(producer.prints)
        self.runs -= producer.trim(keep)
        self.ranges += len(producer.firsts) - ranges
        self.prints += len(producer.prints) - prints
        if self.ranges > MAX_RANGES:
            self._shed_ranges()

    def _shed_ranges(self) -> None:
        """Forget the ranges of the longest idle names, until at most three quarters of the limit are left."""
        for producer in self.names.values():
            if self.ranges <= MAX_RANGES * 3 // 4:
                return
            self._copy_to_snapshot(producer)
            prints = len(producer.prints)
            self.ranges -= producer.forget_ranges()
            self.prints += len(producer.prints) - prints

    def _shed_prints(self) -> None:
        """Forget the fingerprints of the longest idle names, until at most three quarters of the limit are left."""
        for producer in self.names.values():
            if self.prints <= MAX_PRINTS * 3 // 4:
                return
            self._copy_to_snapshot(producer)
            self.prints -= producer.forget_prints()

    def last_id(self, name: bytes) -> int:
        """Return the last stored id of a name; 0 if the name is unknown."""
        producer = self.names.get(name)
        return producer.last_id if producer is not None else 0

    def ask(self, name: bytes, seconds: int) -> int:
        """Return the last stored id of a name in reply to a client's question; FORGOTTEN if a Kafka name was forgotten.

        A question counts as a use of a copier's name, so that it is not forgotten.
        """
        producer = self.names.get(name)
        if producer is None and 0 < pid_of(name) <= self.forgotten:
            return FORGOTTEN
        if producer is not None and producer.part is self.copiers:
            self._copy_to_snapshot(producer)
            self._use(producer, seconds)
        return self.last_id(name)

    def forget_idle(self, now: int) -> None:
        """Forget some names that had no message for the time to live.

        It looks only at names that it forgets, because any client can cause this call with every line.
        """
        self._forget(self.names, now - self._ttl)

    def _forget(self, order: OrderedDict[bytes, KnownProducer], before: float, most: int = _FORGOTTEN_AT_ONCE) -> None:
        for _ in range(min(len(order), most, _FORGOTTEN_AT_ONCE)):
            name, producer = next(iter(order.items()))
            if producer.seconds >= before:
                return
            if order is self.names and producer.part is self.copiers:  # a commit may wait longer than the time to live
                self._copy_to_snapshot(producer)
                producer.seconds = int(before + self._ttl)
                order.move_to_end(name)
                continue
            self._drop(producer)

    def _drop(self, producer: KnownProducer) -> None:
        del self.names[producer.name]
        self.forgotten = max(self.forgotten, pid_of(producer.name))
        producer.part.count -= 1
        producer.part.evictable.pop(producer.name, None)
        self.runs -= len(producer.ids)
        self.prints -= len(producer.prints)
        self.ranges -= len(producer.firsts)

    # --- recovery ----------------------------------------------------------------------------------------------------

    def absorb(self, lines: bytes, now: int) -> None:
        """Add stored lines to the table, in order of seq, each once.

        A record counts as at least as old as `now`, whatever its recv_ts. Otherwise one record from a clock that was
        ahead would make all other ids look old.
        """
        if b";p=" not in lines and b";w=" not in lines:
            return
        name, first_id, first_seq, last_seconds, starts, of_door = b"", 0, 0, 0, Starts(), b""
        prints: list[int] = []  # of a run of one producer's ids, added together
        for match in _CLAIM.finditer(lines):
            seq_text, seconds_text, sent, routing_key, id, kind, whose, headers, payload = match.groups()
            seq, seconds = int(seq_text), min(int(seconds_text), now)
            if kind == b"p" and (whose == of_door or is_of_door(whose)):
                of_door, (print,) = whose, record.fingerprints([sent])
            else:
                print = fingerprint(routing_key, headers, payload) if headers else crc32(payload, starts[routing_key])
            if kind == b"w":
                self.window.add(whose, id, seq, seconds, print)
                continue
            if not id.isdigit():
                continue  # stored before producers existed: the framer never checked this id
            number, count = int(id), len(prints)
            if not (whose == name and first_id + count == number and first_seq + count == seq):
                self._absorb_run(name, first_id, first_seq, prints, last_seconds)
                name, first_id, first_seq, prints = whose, number, seq, []
            prints.append(print)
            last_seconds = seconds
        self._absorb_run(name, first_id, first_seq, prints, last_seconds)

    def _absorb_run(self, name: bytes, first_id: int, seq: int, prints: list[int], seconds: int) -> None:
        if not prints:
            return
        entry = self.names.get(name)
        if entry is not None and entry.seconds < seconds - self._ttl and entry.part is not self.copiers:
            self._drop(entry)  # forgotten when this record was stored; kept, its lower ids would count as stored again
        producer = self.producer(name, seconds)
        if producer is None:  # the limit was lowered: keep a stored name, or a retry would be stored twice
            producer = self._add(KnownProducer(name, seconds=seconds))
        anew = min(len(prints), max(0, producer.last_id - first_id + 1))  # ids whose older records had been deleted
        for ahead in range(anew):
            self.renew(producer, first_id + ahead, seq + ahead, seconds, prints[ahead])
        if anew < len(prints):
            self.remember(producer, first_id + anew, seq + anew, len(prints) - anew, seconds, prints[anew:])

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self, seq: int) -> TableSnapshot:
        """Begin a snapshot of the table as of record `seq`. It is complete once `copy` returns True."""
        self._generation += 1
        producers = [*self.names.values(), KnownProducer(dedupe_file.FORGOTTEN_NAME, self.forgotten)]
        self._snapshot = TableSnapshot(seq, producers, self.window.snapshot(), self._generation)
        return self._snapshot

    def copy(self, seconds: float) -> bool:
        """Copy producers for the last snapshot for about `seconds`; return True once all are copied."""
        if self._snapshot is not None and self._snapshot.copy(seconds):
            self._snapshot = None
        return self._snapshot is None

    def load(self, data: str, last_seq: int, beat: Callable[[], None] = lambda: None) -> int:
        """Load producers.ckpt; return the seq that it covers, 0 if there is no file. `beat` is called now and then.

        Raises ValueError, and leaves the table empty, if the file is unusable or covers more than `last_seq`.
        """
        saved = dedupe_file.read(data)
        if saved is None:
            return 0
        if saved.seq > last_seq:
            raise ValueError(f"it speaks of seq {saved.seq}, the WAL ends at {last_seq}")
        forgotten = None
        try:
            for number, row in enumerate(saved.rows()):
                if isinstance(row, KnownProducer) and row.name == dedupe_file.FORGOTTEN_NAME:
                    forgotten = row.last_id
                elif isinstance(row, KnownProducer):
                    self._add(row)
                    self.runs += len(row.ids)
                    self.prints += len(row.prints)
                    self.ranges += len(row.firsts)
                else:
                    self.window.restore(*row)
                if number % ROWS_PER_BEAT == 0:
                    beat()
        except ValueError:
            self._clear()
            raise
        for producer in sorted(self.names.values(), key=lambda producer: producer.seconds):  # older files: by first use
            self.names.move_to_end(producer.name)
            if producer.name in producer.part.evictable:
                producer.part.evictable.move_to_end(producer.name)
        if forgotten is None:  # the file is of an older release
            self.assume_forgotten()
        else:
            self.forgotten = forgotten
        return saved.seq

    def assume_forgotten(self) -> None:
        """Assume that all pids up to the last one of the youngest broker life in the table may be forgotten."""
        life = max(map(pid_of, self.names), default=0) // PIDS_PER_LIFE
        if life:
            self.forgotten = max(self.forgotten, (life + 1) * PIDS_PER_LIFE - 1)

    def _clear(self) -> None:
        self.names.clear()
        for part in (self.common, self.kafka, self.own, self.copiers):
            part.evictable.clear()
            part.count = 0
        self.window.clear()
        self.runs = self.prints = self.ranges = self.forgotten = 0


# --- acceptor --------------------------------------------------------------------------------------------------------
# Messages that name a reserved topic are checked one by one, except the Kafka door's lines, which carry their producer.
# So the check of all other blocks need not know reserved topics, and stays as fast.


FOLLOWS = -1

Sent = tuple[int, int, bytes]  # of a message that may be stored: its future seq, its fingerprint, its routing key
Numbered = tuple[Sequence[int], list[bytes], list[tuple[bytes, bytes, bytes, bytes, bytes]]]


def _numbered(body: bytes, name: bytes) -> Numbered | None:
    """Return (ids, lines as they will be stored, their fields) of a producer's messages; None unless all are valid."""
    fields = record.numbered(body)
    if fields is None:
        return None
    join, tag = b"".join, b";p=" + name
    lines = [join((head, tag, headers, b"|", payload)) for head, _, _, headers, payload in fields]
    return [int(id) for _, _, id, _, _ in fields], lines, fields


def _owned(body: bytes) -> Numbered | None:
    """Do the same for lines of the Kafka door. They already carry their producer, so no line is taken apart.

    The ids of a unit have no gap. Return None if its first and last id show one.
    """
    lines = body.split(b"\n")
    lines.pop()
    first, last = (int(line.split(b"|", 3)[2].partition(b";")[0]) for line in (lines[0], lines[-1]))
    return (range(first, last + 1), lines, []) if last - first == len(lines) - 1 else None


class Acceptor:
    """Adds messages to a batch, or returns the reply to a message that is not added.

    Messages come from the producer (`kind` is `p`) or the window (`w`) of that name, or from a connection with
    neither.

    `after`: the id of this producer that must be stored before them. FOLLOWS: the id just before their first one. None:
    no such condition. With FOLLOWS or an id, the messages must have ids without a gap, so that no part of a unit is
    stored without its beginning.
    """

    def __init__(self, max_line: int, table: DedupeTable, topics: AnyTopic) -> None:
        self.max_line, self.table, self.topics = max_line, table, topics
        self.duplicates = 0
        self._window = table.window
        self._start_of = record.Starts().__getitem__

    def begin(self, batch: LineBatch, seconds: int) -> None:
        """Add to this batch from now on. `seconds`: the present time, since the epoch."""
        self._batch, self._seconds = batch, seconds
        self.topics.begin()

    def accept_all(
        self, body: bytes, kind: bytes, name: bytes, after: int | None = None, reserved: bool = False
    ) -> bool:
        """Add these messages if all are valid and new; return False if each must be checked alone.

        This takes one check of the whole text, and for ids without a gap one call of the table.
        """
        batch = self._batch
        seq = batch.next_seq + len(batch.lines)
        if len(body) > self.max_line and max(map(len, body.split(b"\n"))) > self.max_line:
            return False
        is_owned = reserved and is_of_door(name) and self.topics.takes(body, seq, name)
        if not (is_owned or self.topics.takes(body, seq)):
            return False
        if not kind:
            if record.claims(body):
                return False
            batch.lines += body.split(b"\n")[:-1]
            return True
        numbered = _owned(body) if is_owned else _numbered(body, name) if kind == b"p" else None
        if numbered is None:
            return False
        numbers, lines, fields = numbered
        first, count = numbers[0], len(numbers)
        if after is not None and self.table.last_id(name) < (first - 1 if after == FOLLOWS else after):
            return False
        producer = self.table.producer(name, self._seconds)  # only now: a name that stores nothing takes no place
        if producer is None or first <= producer.last_id:
            return False
        if is_of_door(name):
            prints = record.fingerprints(lines)
        else:
            start_of = self._start_of
            prints = [
                crc32(text, start_of(b"%b|%b" % (key, more) if more else key)) for _, key, _, more, text in fields
            ]
        if is_owned or numbers == list(range(first, first + count)):
            self.table.remember(producer, first, seq, count, self._seconds, prints)
        elif after is None and all(map(lt, numbers, numbers[1:])):
            for ahead, number in enumerate(numbers):
                self.table.remember(producer, number, seq + ahead, 1, self._seconds, prints[ahead : ahead + 1])
        else:
            return False
        batch.lines += lines
        return True

    def accept(
        self, line: bytes, n: int, kind: bytes, name: bytes, after: int | None = None, reserved: bool = False
    ) -> bytes:
        """Add message n if it is valid and new, and return b""; otherwise return the reply.

        `reserved`: the message may name a reserved topic.
        """
        if after is not None and self.table.last_id(name) < after:
            return b"!err %d id_gap %d is not stored" % (n, after)
        reason = "too_long" if len(line) > self.max_line else record.refusal(line, reserved)
        if reason:
            return b"!err %d %b" % (n, reason.encode())
        batch = self._batch
        seq = batch.next_seq + len(batch.lines)
        if reason := self.topics.refusal(line, seq):
            return b"!err %d %b" % (n, reason.encode())
        routing_key, ts, id_field, payload = record.padded(line).split(b"|", 3)  # hot loop: record.sent_fields
        id, *headers = id_field.split(b";")
        rest = b"".join(b";" + header for header in headers if header != b"%b=%b" % (kind, name))
        if kind and record.claims(b"||%b|" % rest):
            return b"!err %d bad_id the headers p= and w= are KMQ's own" % n
        if not kind:
            batch.lines.append(record.disclaim(record.padded(line)))
            return b""
        stored = b"%b|%b|%b;%b=%b%b|%b" % (routing_key, ts, id, kind, name, rest, payload)
        if kind == b"p" and is_of_door(name):
            (print,) = record.fingerprints([stored])
        else:
            print = crc32(payload, record.fingerprint_start(routing_key, rest) if rest else self._start_of(routing_key))
        if kind == b"p":
            reply = self._remember_increasing(id, n, name, (seq, print, routing_key), after == FOLLOWS)
        else:
            reply = self._remember_arbitrary(id, n, name, (seq, print, routing_key))
        if not reply:
            batch.lines.append(stored)
        return reply

    def _remember_increasing(self, id: bytes, n: int, name: bytes, sent: Sent, follows: bool) -> bytes:
        if not id.isdigit() or len(id) > MAX_ID_DIGITS:
            return b"!err %d bad_id a producer's ids are decimal numbers of at most %d digits" % (n, MAX_ID_DIGITS)
        if follows and self.table.last_id(name) < int(id) - 1:
            return b"!err %d id_gap %d is not stored" % (n, int(id) - 1)
        producer = self.table.producer(name, self._seconds)
        if producer is None:
            setting = self.table.part_of(name).setting.encode()
            return b"!err %d producers_full %b names are remembered already" % (n, setting)
        number, (seq, print, routing_key) = int(id), sent
        stored = producer.find(number)
        if stored == NEW:
            self.table.remember(producer, number, seq, 1, self._seconds, (print,))
            return b""
        if stored == TOO_OLD:
            return b"!err %d id_too_old" % n
        print_then = producer.print_of(number)
        last = stored or producer.most_forgotten()
        if self.topics.has_deleted(routing_key, last, stored > 0, print == print_then if print_then else None):
            self.table.renew(producer, number, seq, self._seconds, print)
            return b""
        return self._stored_before(n, stored, print, print_then)

    def _remember_arbitrary(self, id: bytes, n: int, scope: bytes, sent: Sent) -> bytes:
        if not 0 < len(id) <= MAX_WINDOW_ID:
            return b"!err %d bad_id a message in a window needs an id of 1 to %d bytes" % (n, MAX_WINDOW_ID)
        seq, print, routing_key = sent
        stored = self._window.find(scope, id, self._seconds)
        print_then = 0 if stored == NEW else self._window.print_of(scope, id)
        if stored == NEW or self.topics.has_deleted(
            routing_key, stored, is_same=print == print_then if print_then else None
        ):
            self._window.add(scope, id, seq, self._seconds, print)
            return b""
        return self._stored_before(n, stored, print, print_then)

    def _stored_before(self, n: int, seq: int, print: int, print_then: int) -> bytes:
        """Return the reply to an id stored as `seq`. `print_then`: fingerprint of the stored message, 0: unknown."""
        if print_then not in (0, print):
            return b"!err %d id_reused %d" % (n, seq)
        self.duplicates += 1
        return b"!dup %d %d" % (n, seq)


# --- saving ----------------------------------------------------------------------------------------------------------
# Saves the table to producers.ckpt, so that a start has to read only the last seconds of the WAL.

CHECKPOINT_BYTES = 32 * MIB  # of framed lines between two saves: a start reads these in at most a third of a second
CHECKPOINT_S = 30.0  # longest time between two saves: retention keeps the WAL records that the file does not cover
_EMPTY_TIMES = 4  # an empty table is saved after 4 * CHECKPOINT_BYTES: a start reads such lines that much faster
_BEHIND_S = 10.0  # until the first save, if the loaded file did not cover the whole table
_RETRY_S = 2.0  # after a save that met a full disk
# A large table is saved after twice its size in lines, or saving would write more than the WAL does. Saving takes at
# most a tenth of the time. A start then reads for about as long again as it takes to load the table.
_SHARE, _SHARE_OF_TIME = 2, 10
_COPY_S, _IDLE_COPY_S = 0.002, 0.01  # longest copy between two batches; and while there are none


class DedupeSaver:
    """Takes a snapshot now and then. A thread writes it once all records that it covers are on disk."""

    def __init__(
        self, data: str, table: DedupeTable, beat: Callable[[], None] = lambda: None, is_behind: bool = False
    ) -> None:
        """`is_behind`: the loaded file did not cover the whole table, so save it soon even if nothing is framed."""
        self._path, self._table, self._beat = dedupe_file.path(data), table, beat
        self._snapshot: TableSnapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._bytes = int(is_behind)  # framed since the last snapshot
        self._taken_at = time.monotonic() - is_behind * (CHECKPOINT_S - _BEHIND_S)
        self._found_full = False  # whether the last save found the disk full
        self._size, self._took_s = 0, 0.0  # of the last save
        with contextlib.suppress(FileNotFoundError):
            self._size = os.stat(self._path).st_size

    def framed(self, nbytes: int, next_seq: int, synced: int | None, now: int) -> None:
        """Call after each turn, also an idle one. `nbytes` were framed, `synced` is the last seq on disk."""
        self._bytes += nbytes
        if self._snapshot is not None:
            if self._table.copy(_COPY_S if nbytes else _IDLE_COPY_S):
                self._write_if(synced)
            return
        much = max(CHECKPOINT_BYTES * (1 if self._table else _EMPTY_TIMES), _SHARE * self._size)
        age_s, rest_s = time.monotonic() - self._taken_at, max(CHECKPOINT_S, _SHARE_OF_TIME * self._took_s)
        is_due = self._bytes >= much or (self._bytes and age_s > rest_s) or (self._found_full and age_s > _RETRY_S)
        if is_due and not self.busy:
            self.begin_snapshot(next_seq - 1, now)

    def begin_snapshot(self, seq: int, now: int) -> None:
        """Begin a snapshot of the table as of `seq`."""
        self._bytes, self._taken_at, self._found_full = 0, time.monotonic(), False
        self._table.forget_idle(now)
        self._snapshot = self._table.snapshot(seq)

    @property
    def pending(self) -> bool:
        """Whether a snapshot waits for durability."""
        return self._snapshot is not None

    @property
    def busy(self) -> bool:
        """Whether the file is being written. Raises RetryError if writing it failed."""
        if self._error is not None:
            raise RetryError(f"{self._path}: cannot be written: {self._error}") from self._error
        return self._thread is not None and self._thread.is_alive()

    def _write_if(self, synced: int | None) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        if synced is None or synced < snapshot.seq or self.busy:
            return
        self._snapshot = None
        self._thread = threading.Thread(target=self._write, args=(snapshot,), daemon=True)
        self._thread.start()

    def finish(self, synced: int | None) -> bool:
        """Return True if nothing is left to write. Call again until then."""
        if self._snapshot is not None:
            while not self._table.copy(_IDLE_COPY_S):
                self._beat()
            self._write_if(synced)
        return not self.pending and not self.busy

    def _write(self, snapshot: TableSnapshot) -> None:
        began = time.monotonic()
        try:
            parts = snapshot.encode()
            replace_file(self._path, *parts)
            self._size, self._took_s = sum(map(len, parts)), time.monotonic() - began
        except OSError as err:
            if err.errno in FULL:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._path}.new")
                self._found_full = True
                remnant.release_spare(os.path.dirname(self._path))  # makes room for the next try
            else:
                self._error = err
