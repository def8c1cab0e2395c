"""The dedupe table: which ids are stored already, so that a retry gets `!dup` and stores nothing twice.

Owner       the framer, the only process that gives out seqs.
Invariant   The table is a function of the records up to the last seq given out: an id that a record's header claims,
            `;p=` (a producer's increasing ids) or `;w=` (arbitrary ids in a window), is in it. Only the framer writes
            these headers (record.disclaim), and the Kafka door with the pod's token, whose every line is checked to
            have the name of its unit. So no producer can make the table believe that something is stored.
            A message of an acknowledged connection is stored, or known as stored, or refused. It is accepted only if
            its id is new, and the table knows the id from then on. A stored id carries `;p=` or `;w=` of the connection
            it came from, and no header of that kind from anybody else. A message that names a reserved topic is
            accepted only from a connection that ingress has found to be the pod's own.
            producers.ckpt never covers a record that is not on disk: a snapshot waits until durability has synced its
            last seq. When all stages die with the rings, ids that were lost with them must be accepted again.
Crash       A start loads producers.ckpt, then reads the later records from the WAL, then the blocks that still wait in
            the ring `framed`: together exactly the records up to the next seq. A damaged file is ignored (its crc does
            not match), and the whole WAL is read instead. The file is replaced atomically, so a kill while it is
            written leaves the old one.
Disk full   The old file stays, and the save is tried again. Until it succeeds, retention keeps what the old file does
            not cover.
Memory      Bounded: at most `max_names` names, `max_kafka` of Kafka's producers, and those of KMQ itself, each with its
            last id, some runs of (id, seq), ranges of older ids, and fingerprints of its last ids; at most `max_ids` runs
            in all, and as many ids in windows; MAX_RANGES and MAX_PRINTS in all.
            An id that is dropped from the runs is still known to be stored, but not as which seq (`!dup n 0`); an id
            that is dropped from the ranges is unknown (`id_too_old`). What drops out of a window, by count or age, is
            forgotten: KMQ_DEDUPE_COUNT and KMQ_DEDUPE_AGE are the promise. The name under which a commit of Kafka's
            transactions is written has no age: it is forgotten once _MOST_COPIERS others were used since.
Time        A message costs the same however many names and ids there are: what is evicted next stands first in an
            order. Between two batches of lines a snapshot is copied for _COPY_S at most.
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
    KAFKA_NAME,
    MADE_UP,
    MAX_ID_DIGITS,
    MAX_WINDOW_ID,
    NEW,
    OWN_NAME,
    TOO_OLD,
    IdWindow,
    KnownProducer,
    TablePart,
    is_of_door,
)
from kmq.message.record import Starts, fingerprint
from kmq.message.routing import AnyTopic

_RUNS = 1024  # runs remembered per producer
_FORGOTTEN_AT_ONCE = 1024  # idle names: a millisecond; 50,000 took 45
MIN_RUNS = 8  # runs that a producer keeps when all producers together have too many
# A made-up name belongs to one run of a program (`kmq produce --acks` in a loop) and does not come again. This long
# after its last message the program has most likely ended. A made-up name may be forgotten then, but only if the table
# is full.
_MADE_UP_S = 600
# A Kafka producer gets another name when its program starts again. One that is idle for so long has nothing on the way
# that it could send again, and goes on under a name that is forgotten as under a new one.
_KAFKA_S = 3600
_MADE_UP, _KAFKA, _OWN = MADE_UP.encode(), re.compile(KAFKA_NAME.encode()), re.compile(OWN_NAME.encode())
_COPIER = re.compile(COPIER_NAME.encode())
# What writes a commit of Kafka's transactions to its topics has this many names; that is twice as many as there are ids
# of transactions. Who asks for its last id keeps its name.
_MOST_COPIERS = 40_000
MAX_PRINTS = 1 << 19  # fingerprints of all producers together: 2 MiB
MAX_RANGES = 1 << 17  # ranges of all producers together: 2 MiB

# hot loop: one search for all lines of a block
_CLAIM = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|(([^|\n]*)\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)([^|\n]*)\|(.*))")


class DedupeTable:
    """The producers by name, and the window of arbitrary ids."""

    def __init__(self, max_names: int, name_ttl: float, max_ids: int, max_age: float, max_kafka: int) -> None:
        """Forget a name after `name_ttl` s without a message, an id of a window after `max_age` s."""
        self._ttl, self._max_runs = name_ttl, max_ids
        self.names: OrderedDict[bytes, KnownProducer] = OrderedDict()  # in the order of their last messages
        self.common = TablePart("KMQ_PRODUCERS", max_names, _MADE_UP_S)
        self.kafka = TablePart("KMQ_KAFKA_PRODUCERS", max_kafka, _KAFKA_S)
        self.own = TablePart("", sys.maxsize, 0.0)
        self.copiers = TablePart("", _MOST_COPIERS, 0.0)
        self.runs = self.prints = self.ranges = 0  # of all producers together
        self.window = IdWindow(max_ids, max_age)
        self._snapshot: TableSnapshot | None = (
            None  # until it is complete: what it still needs is copied before it changes
        )
        self._generation = 0  # of the last snapshot

    def __bool__(self) -> bool:
        return bool(self.names or self.window.ids)

    # --- increasing ids --------------------------------------------------------------------------------------------

    def producer(self, name: bytes, seconds: int) -> KnownProducer | None:
        """Return the producer of that name, known or new; None if its part of the table is full.

        KMQ's own producers (`__…`, a few, and the last _MOST_COPIERS of `t<pid>`) always have a place: strangers must not
        keep a group from committing.
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
        """Return the part of the table in which this name has its place."""
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
        """Remember that messages first_id… of `producer` got the seqs seq…; `prints` are their fingerprints."""
        self._keep(producer)
        before = len(producer.prints)
        self._use(producer, seconds)
        self.runs += producer.add(first_id, seq, count, prints)
        self.prints += len(producer.prints) - before
        if self.prints > MAX_PRINTS:
            self._shed_prints()
        if len(producer.ids) > _RUNS:
            self._trim(producer, _RUNS // 2)
        elif self.runs > self._max_runs:
            self._trim(producer, MIN_RUNS)

    def _use(self, producer: KnownProducer, seconds: int) -> None:
        """Let others be forgotten before this producer."""
        producer.seconds = seconds
        self.names.move_to_end(producer.name)
        evictable = producer.part.evictable
        if producer.name in evictable:
            evictable.move_to_end(producer.name)

    def _keep(self, producer: KnownProducer) -> None:
        """Let the snapshot copy a producer that is about to change, if it has to."""
        if producer.generation != self._generation and self._snapshot is not None:
            self._snapshot.keep(producer)

    def _trim(self, producer: KnownProducer, keep: int) -> None:
        before = len(producer.firsts)
        self.runs -= producer.trim(keep)
        self.ranges += len(producer.firsts) - before
        if self.ranges > MAX_RANGES:
            self._shed_ranges()

    def _shed_ranges(self) -> None:
        """Forget a quarter of all ranges at once: those of the names that are idle longest."""
        for producer in self.names.values():
            if self.ranges <= MAX_RANGES * 3 // 4:
                return
            self._keep(producer)
            self.ranges -= producer.forget_ranges()

    def _shed_prints(self) -> None:
        """Forget a quarter of all fingerprints at once: those of the names that are idle longest."""
        for producer in self.names.values():
            if self.prints <= MAX_PRINTS * 3 // 4:
                return
            self._keep(producer)
            self.prints -= producer.forget_prints()

    def last_id(self, name: bytes) -> int:
        """Return the last id stored of a name; 0 if the name is unknown."""
        producer = self.names.get(name)
        return producer.last_id if producer is not None else 0

    def ask(self, name: bytes, seconds: int) -> int:
        """Return the same to who asks for it. What commits Kafka's transactions keeps its name by that."""
        producer = self.names.get(name)
        if producer is not None and producer.part is self.copiers:
            self._keep(producer)
            self._use(producer, seconds)
        return self.last_id(name)

    def forget_idle(self, now: int) -> None:
        """Forget some names without a message for the time to live.

        Looks only at names that it forgets: a stranger can cause this with every line.
        """
        self._forget(self.names, now - self._ttl)

    def _forget(self, order: OrderedDict[bytes, KnownProducer], before: float, most: int = _FORGOTTEN_AT_ONCE) -> None:
        for _ in range(min(len(order), most, _FORGOTTEN_AT_ONCE)):
            name, producer = next(iter(order.items()))
            if producer.seconds >= before:
                return
            if order is self.names and producer.part is self.copiers:  # a commit may wait for longer
                self._keep(producer)
                producer.seconds = int(before + self._ttl)
                order.move_to_end(name)
                continue
            del self.names[name]
            producer.part.count -= 1
            producer.part.evictable.pop(name, None)
            self.runs -= len(producer.ids)
            self.prints -= len(producer.prints)
            self.ranges -= len(producer.firsts)

    # --- recovery ----------------------------------------------------------------------------------------------------

    def absorb(self, lines: bytes, now: int) -> None:
        """Take in stored lines, in order of seq, each once.

        `now`: no record counts as younger, whatever its recv_ts says. Otherwise one record from a clock that was ahead
        would make all other ids old.
        """
        if b";p=" not in lines and b";w=" not in lines:
            return
        name, first_id, first_seq, last_seconds, starts, of_door = b"", 0, 0, 0, Starts(), b""
        prints: list[int] = []  # of a run of one producer's ids, to be taken in together
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
                continue  # stored before there were producers: the framer was never asked about this id
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
        producer = self.producer(name, seconds)
        if producer is None:  # the limit was lowered: a stored name stays known, or a retry would be stored twice
            producer = self._add(KnownProducer(name, seconds=seconds))
        self.remember(producer, first_id, seq, len(prints), seconds, prints)

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self, seq: int) -> TableSnapshot:
        """Return the table as it is now, after record `seq`. It is complete once `copy` has returned True."""
        self._generation += 1
        self._snapshot = TableSnapshot(seq, self.names.values(), self.window.snapshot(), self._generation)
        return self._snapshot

    def copy(self, seconds: float) -> bool:
        """Copy producers for the last snapshot for about so long; return True once all are copied."""
        if self._snapshot is not None and self._snapshot.copy(seconds):
            self._snapshot = None
        return self._snapshot is None

    def load(self, data: str, last_seq: int, beat: Callable[[], None] = lambda: None) -> int:
        """Take in producers.ckpt; return the seq that it covers, 0 if there is no file. `beat` is called now and then.

        Raises ValueError, with the table empty, if the file cannot be used or covers more than `last_seq`.
        """
        saved = dedupe_file.read(data)
        if saved is None:
            return 0
        if saved.seq > last_seq:
            raise ValueError(f"it speaks of seq {saved.seq}, the WAL ends at {last_seq}")
        try:
            for number, row in enumerate(saved.rows()):
                if isinstance(row, KnownProducer):
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
        return saved.seq

    def _clear(self) -> None:
        self.names.clear()
        for part in (self.common, self.kafka, self.own, self.copiers):
            part.evictable.clear()
            part.count = 0
        self.window.clear()
        self.runs = self.prints = self.ranges = 0


# --- acceptor --------------------------------------------------------------------------------------------------------
# Messages that name a reserved topic are looked at one by one, but those of the Kafka door that say whose they are: the
# check of all other blocks knows no reserved topic, and stays as fast.


FOLLOWS = -1

Numbered = tuple[Sequence[int], list[bytes], list[tuple[bytes, bytes, bytes, bytes, bytes]]]


def _numbered(body: bytes, name: bytes) -> Numbered | None:
    """Return (ids, lines as they are stored, their fields) of messages of a producer; None unless all are good."""
    fields = record.numbered(body)
    if fields is None:
        return None
    join, tag = b"".join, b";p=" + name
    lines = [join((head, tag, headers, b"|", payload)) for head, _, _, headers, payload in fields]
    return [int(id) for _, _, id, _, _ in fields], lines, fields


def _owned(body: bytes) -> Numbered | None:
    """Return the same of the Kafka door's lines, which say whose they are: so none of them is taken apart.

    The ids of a unit have no gap, as the first and the last one say. None if they say otherwise.
    """
    lines = body.split(b"\n")
    lines.pop()
    first, last = (int(line.split(b"|", 3)[2].partition(b";")[0]) for line in (lines[0], lines[-1]))
    return (range(first, last + 1), lines, []) if last - first == len(lines) - 1 else None


class Acceptor:
    """Adds messages to a batch, or says what to reply instead.

    Messages come from a producer (`kind` is `p`) or a window (`w`) of that name, or from a connection without either.
    `after`: the id of this producer that must be stored before them, or FOLLOWS: the id before their first one. None: they
    need not follow. Messages that must have ids without a gap, so of a unit nothing is stored without its beginning.
    """

    def __init__(self, max_line: int, table: DedupeTable, topics: AnyTopic) -> None:
        self.max_line, self.table, self.topics = max_line, table, topics
        self.duplicates = 0
        self._window = table.window
        self._start_of = record.Starts().__getitem__

    def begin(self, batch: LineBatch, seconds: int) -> None:
        """Add to this batch from now on; `seconds` since the epoch is now."""
        self._batch, self._seconds = batch, seconds

    def accept_all(
        self, body: bytes, kind: bytes, name: bytes, after: int | None = None, reserved: bool = False
    ) -> bool:
        """Add these messages if all are good and new; return False if each must be looked at.

        One check of them all, and one call of the table for ids without a gap.
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
        """Add message n if it is good and new, and return b""; otherwise return the reply.

        `reserved`: it may name a reserved topic.
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
            reply = self._remember_increasing(id, n, name, seq, print, after == FOLLOWS)
        else:
            reply = self._remember_arbitrary(id, n, name, seq, print)
        if not reply:
            batch.lines.append(stored)
        return reply

    def _remember_increasing(self, id: bytes, n: int, name: bytes, seq: int, print: int, follows: bool) -> bytes:
        if not id.isdigit() or len(id) > MAX_ID_DIGITS:
            return b"!err %d bad_id a producer's ids are decimal numbers of at most %d digits" % (n, MAX_ID_DIGITS)
        if follows and self.table.last_id(name) < int(id) - 1:
            return b"!err %d id_gap %d is not stored" % (n, int(id) - 1)
        producer = self.table.producer(name, self._seconds)
        if producer is None:
            setting = self.table.part_of(name).setting.encode()
            return b"!err %d producers_full %b names are remembered already" % (n, setting)
        number = int(id)
        stored = producer.find(number)
        if stored == NEW:
            self.table.remember(producer, number, seq, 1, self._seconds, (print,))
            return b""
        if stored == TOO_OLD:
            return b"!err %d id_too_old" % n
        return self._stored_before(n, stored, print, producer.print_of(number))

    def _remember_arbitrary(self, id: bytes, n: int, scope: bytes, seq: int, print: int) -> bytes:
        if not 0 < len(id) <= MAX_WINDOW_ID:
            return b"!err %d bad_id a message in a window needs an id of 1 to %d bytes" % (n, MAX_WINDOW_ID)
        stored = self._window.find(scope, id, self._seconds)
        if stored == NEW:
            self._window.add(scope, id, seq, self._seconds, print)
            return b""
        return self._stored_before(n, stored, print, self._window.print_of(scope, id))

    def _stored_before(self, n: int, seq: int, print: int, print_then: int) -> bytes:
        """Return the reply to an id stored as `seq`; `print_then`: the fingerprint of what was stored, 0 if unknown."""
        if print_then not in (0, print):
            return b"!err %d id_reused %d" % (n, seq)
        self.duplicates += 1
        return b"!dup %d %d" % (n, seq)


# --- saving ----------------------------------------------------------------------------------------------------------
# Saves the table to producers.ckpt, so that a start has only the last seconds of the WAL to read again.

CHECKPOINT_BYTES = 32 * MIB  # of framed lines between two saves: a start then reads for at most a third of a second
CHECKPOINT_S = 30.0  # longest time between two saves: the WAL must keep what the file does not cover (retention)
_EMPTY_TIMES = 4  # an empty table is saved after so many times CHECKPOINT_BYTES: a start then reads that much faster
_BEHIND_S = 10.0  # until the first save, if the file that was loaded did not cover the whole table
_RETRY_S = 2.0  # after a save that found the disk full
# A large table is saved after twice its size in lines, or saving would write more than the WAL; and for a tenth of the
# time at most. A start then reads for about as long again as it takes to load the table.
_SHARE, _SHARE_OF_TIME = 2, 10
_COPY_S, _IDLE_COPY_S = 0.002, 0.01  # copying between two batches of lines, and while there are none


class DedupeSaver:
    """Takes a snapshot now and then, and a thread writes it once all that it covers is on disk."""

    def __init__(
        self, data: str, table: DedupeTable, beat: Callable[[], None] = lambda: None, is_behind: bool = False
    ) -> None:
        """`is_behind`: the file does not cover the whole table, so save it soon even if nothing is framed."""
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
        """Call after each turn, also an idle one: `nbytes` were framed, all up to `synced` is on disk, it is `now`."""
        self._bytes += nbytes
        if self._snapshot is not None:
            if self._table.copy(_COPY_S if nbytes else _IDLE_COPY_S):
                self._write_if(synced)
            return
        much = max(CHECKPOINT_BYTES * (1 if self._table else _EMPTY_TIMES), _SHARE * self._size)
        age_s, rest_s = time.monotonic() - self._taken_at, max(CHECKPOINT_S, _SHARE_OF_TIME * self._took_s)
        is_due = self._bytes >= much or (self._bytes and age_s > rest_s) or (self._found_full and age_s > _RETRY_S)
        if is_due and not self.busy:
            self.take(next_seq - 1, now)

    def take(self, seq: int, now: int) -> None:
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
        """Whether the file is being written. Raises RetryError if that failed."""
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
                remnant.release_spare(os.path.dirname(self._path))  # for the next time
            else:
                self._error = err
