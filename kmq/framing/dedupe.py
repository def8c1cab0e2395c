"""The dedupe table: which ids are stored already, so that a retry gets `!dup` and stores nothing twice.

Owner       the framer, the only process that gives out seqs.
Invariant   The table is a function of the records up to the last seq given out: an id that a record's header claims,
            `;p=` (a producer's increasing ids) or `;w=` (arbitrary ids in a window), is in it. Only the framer writes
            these headers (record.disclaim), so no producer can make the table believe that something is stored.
Crash       A start loads producers.ckpt, then reads the later records from the WAL, then the blocks that still wait in
            the ring `framed`: together exactly the records up to the next seq. A damaged file is ignored (its crc does
            not match), and the whole WAL is read instead.
Memory      Bounded: at most `max_names` names and those of KMQ itself, each with its last id, some runs of (id, seq),
            ranges of older ids, and fingerprints of its last ids; at most `max_ids` runs in all, and as many ids in
            windows; MAX_RANGES and MAX_PRINTS in all.
            An id that is dropped from the runs is still known to be stored, but not as which seq (`!dup n 0`); an id
            that is dropped from the ranges is unknown (`id_too_old`). What drops out of a window, by count or age, is
            forgotten: KMQ_DEDUPE_COUNT and KMQ_DEDUPE_AGE are the promise.
Time        A message costs the same however many names and ids there are: what is evicted next stands first in an
            order.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from zlib import crc32

from kmq.log import dedupe_file
from kmq.log.dedupe_file import ROWS_PER_BEAT, Snapshot
from kmq.message.ids import MADE_UP, Producer, Window
from kmq.message.record import Starts, fingerprint

_RUNS = 1024  # runs remembered per producer
_FORGOTTEN_AT_ONCE = 1024  # idle names: a millisecond; 50,000 took 45
MIN_RUNS = 8  # runs that a producer keeps when all producers together have too many
# A made-up name belongs to one run of a program (`kmq produce --acks` in a loop) and does not come again. This long
# after its last message the program has most likely ended. A made-up name may be forgotten then, but only if the table
# is full.
_MADE_UP_S = 600
_MADE_UP = MADE_UP.encode()
MAX_PRINTS = 1 << 19  # fingerprints of all producers together: 2 MiB
MAX_RANGES = 1 << 17  # ranges of all producers together: 2 MiB

_CLAIM = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|([^|\n]*)\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)([^|\n]*)\|(.*)")


class DedupeTable:
    """The producers by name, and the window of arbitrary ids."""

    def __init__(self, max_names: int, name_ttl: float, max_ids: int, max_age: float) -> None:
        """Forget a name after `name_ttl` s without a message, an id of a window after `max_age` s."""
        self._max_names, self._ttl, self._max_runs = max_names, name_ttl, max_ids
        self.names: OrderedDict[bytes, Producer] = OrderedDict()  # in the order of their last messages
        self.made_up: OrderedDict[bytes, Producer] = OrderedDict()  # those among `names`, in the same order
        self.runs = self.prints = self.ranges = 0  # of all producers together
        self.window = Window(max_ids, max_age)
        self._snapshot: Snapshot | None = None  # until it is complete: what it still needs is copied before it changes
        self._generation = 0  # of the last snapshot

    def __bool__(self) -> bool:
        return bool(self.names or self.window.ids)

    # --- increasing ids --------------------------------------------------------------------------------------------

    def producer(self, name: bytes, seconds: int) -> Producer | None:
        """Return the producer of that name, known or new; None if the table is full.

        KMQ's own producers (`__…`, a few) always have a place: strangers must not keep a group from committing.
        """
        producer = self.names.get(name)
        if producer is None:
            if len(self.names) >= self._max_names:
                self.forget_idle(seconds)
            if len(self.names) >= self._max_names and not name.startswith(b"__"):
                return None
            producer = self._add(Producer(name, seconds=seconds))
        return producer

    def _add(self, producer: Producer) -> Producer:
        producer.generation = self._generation
        self.names[producer.name] = producer
        if producer.name.startswith(_MADE_UP):
            self.made_up[producer.name] = producer
        return producer

    def remember(
        self, producer: Producer, first_id: int, seq: int, count: int, seconds: int, prints: Sequence[int] = ()
    ) -> None:
        """Remember that messages first_id… of `producer` got the seqs seq…; `prints` are their fingerprints."""
        self._keep(producer)
        name, before = producer.name, len(producer.prints)
        producer.seconds = seconds
        self.names.move_to_end(name)
        if name in self.made_up:
            self.made_up.move_to_end(name)
        self.runs += producer.add(first_id, seq, count, prints)
        self.prints += len(producer.prints) - before
        if self.prints > MAX_PRINTS:
            self._shed_prints()
        if len(producer.ids) > _RUNS:
            self._trim(producer, _RUNS // 2)
        elif self.runs > self._max_runs:
            self._trim(producer, MIN_RUNS)

    def _keep(self, producer: Producer) -> None:
        """Let the snapshot copy a producer that is about to change, if it has to."""
        if producer.generation != self._generation and self._snapshot is not None:
            self._snapshot.keep(producer)

    def _trim(self, producer: Producer, keep: int) -> None:
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

    def forget_idle(self, now: int) -> None:
        """Forget some names without a message for the time to live; if the table is full, made-up names sooner.

        Looks only at names that it forgets: a stranger can cause this with every line.
        """
        self._forget(self.names, now - self._ttl)
        if len(self.names) >= self._max_names:
            self._forget(self.made_up, now - min(self._ttl, _MADE_UP_S))

    def _forget(self, order: OrderedDict[bytes, Producer], before: float) -> None:
        for _ in range(min(len(order), _FORGOTTEN_AT_ONCE)):
            name, producer = next(iter(order.items()))
            if producer.seconds >= before:
                return
            del self.names[name]
            self.made_up.pop(name, None)
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
        name, first_id, first_seq, last_seconds, starts = b"", 0, 0, 0, Starts()
        prints: list[int] = []  # of a run of one producer's ids, to be taken in together
        for match in _CLAIM.finditer(lines):
            seq_text, seconds_text, routing_key, id, kind, whose, headers, payload = match.groups()
            seq, seconds = int(seq_text), min(int(seconds_text), now)
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
            producer = self._add(Producer(name, seconds=seconds))
        self.remember(producer, first_id, seq, len(prints), seconds, prints)

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self, seq: int) -> Snapshot:
        """Return the table as it is now, after record `seq`. It is complete once `copy` has returned True."""
        self._generation += 1
        self._snapshot = Snapshot(seq, self.names.values(), self.window.snapshot(), self._generation)
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
                if isinstance(row, Producer):
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
            if producer.name in self.made_up:
                self.made_up.move_to_end(producer.name)
        return saved.seq

    def _clear(self) -> None:
        self.names.clear()
        self.made_up.clear()
        self.window.clear()
        self.runs = self.prints = self.ranges = 0
