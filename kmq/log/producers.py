"""What has been stored already: the memory behind `!dup`, so that a retry stores nothing twice.

Owner       the framer, the only one that gives out seqs; producers.ckpt is its file.
Invariant   The table is a function of the records up to the last seq given out: what a record's id says in its header, `;p=`
            (a producer's increasing ids) or `;w=` (arbitrary ids in a window), is in it. Only the framer writes those
            headers (record.disclaim), so nobody can make it believe that something is stored.
Crash       A start loads producers.ckpt, then reads what came after it from the WAL, then the blocks that still wait in the
            ring `framed`: together exactly the records up to the next seq. The file never speaks of a record that is not on
            disk (`Checkpointer`): when all stages die with the rings, ids that went down with them must be taken again.
            A damaged file is passed over (its crc says so) and the whole WAL read instead.
Memory      Bounded: at most `producers` names, each with its last id, some runs of (id, seq), ranges of older ids (ids.py), and
            fingerprints of what its last ids brought; at most `dedupe_count` runs and as many ids in windows; MAX_RANGES and
            MAX_PRINTS in all. Over the names those go first that a program made up for itself. What falls out of the runs is
            still known to be stored, but not as which seq (`!dup n 0`), what falls out of the ranges is not (`id_too_old`).
            What falls out of a window, by count or age, is forgotten: KMQ_DEDUPE_COUNT and KMQ_DEDUPE_AGE are the promise.
Time        A message costs no more however many names and ids there are: what is evicted stands in front of an order.
"""

import os
import re
import sys
import threading
import time
from array import array
from binascii import a2b_base64, b2a_base64
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

from kmq.errors import RetryError
from kmq.ids import NEW, PRINTS, Producer
from kmq.log import spare
from kmq.log.disk import FULL, replace_file
from kmq.record import Starts, fingerprint
from kmq.settings import MIB

CHECKPOINT_BYTES = 32 * MIB  # of framed lines: bounds what a start has to read again to a third of a second;
CHECKPOINT_S = 30.0  # and at least so often, for what the file does not speak of must stay in the WAL (retention);
_EMPTY_TIMES = 4  # and so many times that while there is nobody to remember: looking for nobody is that much faster
_BEHIND_S = 10.0  # after a start for which the file did not say all
_RETRY_S = 2.0  # after one that found no room
_RUNS = 1024  # runs remembered per producer
# Names that a client made up for one run of a program (`kmq produce --acks` in a loop) do not come again. So long after its
# last message such a program has most likely ended; only where the table is full it is not waited for any longer.
MADE_UP, _MADE_UP_S = b"auto-", 600
_VERSION = 2  # of the file; the first one is read too
MAX_PRINTS = 1 << 19  # fingerprints of all producers together: 2 MiB
MAX_RANGES = 1 << 17  # ranges of all producers together: 2 MiB
_ROWS_A_BEAT = 1024  # rows of the file that are loaded between two heartbeats
_MIN_RUNS = 8  # also when all producers together have too many
MAX_WINDOW_ID = 256  # bytes of an arbitrary id: bounds the memory of a window
MAX_ID = 18  # digits of an increasing id: it fits a signed 64-bit number

_OWNED = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|([^|\n]*)\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)([^|\n]*)\|(.*)")


class Producers:
    """The table."""

    def __init__(self, producers: int, producer_ttl: float, dedupe_count: int, dedupe_age: float) -> None:
        """At most `producers` names, forgotten after `producer_ttl` s; `dedupe_count` ids in windows, for `dedupe_age` s."""
        self._max_names, self._ttl = producers, producer_ttl
        self._max_ids, self._age = dedupe_count, dedupe_age
        self.names: OrderedDict[bytes, Producer] = OrderedDict()  # in the order of their last messages
        self._made_up: OrderedDict[bytes, Producer] = (
            OrderedDict()
        )  # those of them that were made up, in the same order
        self._runs = self._prints = self._ranges = 0
        # scope|id → seq, seconds and fingerprint in one integer (_packed), in order of age: that costs a third of a tuple
        self.window: dict[bytes, int] = {}
        self._order: deque[bytes] = deque()  # its keys: a dict finds its first one by passing over all that have gone

    def __bool__(self) -> bool:
        return bool(self.names or self.window)

    # --- increasing ids --------------------------------------------------------------------------------------------

    def producer(self, name: bytes, seconds: int) -> Producer | None:
        """The producer of that name, new or not; None where the table is full."""
        found = self.names.get(name)
        if found is None:
            if len(self.names) >= self._max_names:
                self.forget_idle(seconds)
            if len(self.names) >= self._max_names:
                return None
            found = self._add(Producer(name, seconds=seconds))
        return found

    def _add(self, producer: Producer) -> Producer:
        self.names[producer.name] = producer
        if producer.name.startswith(MADE_UP):
            self._made_up[producer.name] = producer
        return producer

    def stored(
        self, producer: Producer, first_id: int, seq: int, count: int, seconds: int, prints: Sequence[int] = ()
    ) -> None:
        """Messages first_id… of `producer` got the seqs seq…; `prints`: their fingerprints."""
        name, before = producer.name, len(producer.prints)
        producer.seconds = seconds
        self.names.move_to_end(name)
        if name in self._made_up:
            self._made_up.move_to_end(name)
        self._runs += producer.add(first_id, seq, count, prints)
        self._prints += len(producer.prints) - before
        if self._prints > MAX_PRINTS:
            self._shed_prints()
        if len(producer.ids) > _RUNS:
            self._trim(producer, _RUNS // 2)
        elif self._runs > self._max_ids:
            self._trim(producer, _MIN_RUNS)

    def _trim(self, producer: Producer, keep: int) -> None:
        before = len(producer.firsts)
        self._runs -= producer.trim(keep)
        self._ranges += len(producer.firsts) - before
        if self._ranges > MAX_RANGES:
            self._shed_ranges()

    def _shed_ranges(self) -> None:
        """Too many ranges: those of the names that are idle longest go, a quarter of all at once."""
        for producer in self.names.values():
            if self._ranges <= MAX_RANGES * 3 // 4:
                return
            self._ranges -= producer.forget_ranges()

    def _shed_prints(self) -> None:
        """Too many fingerprints: those of the names that are idle longest go, a quarter of all at once."""
        for producer in self.names.values():
            if self._prints <= MAX_PRINTS * 3 // 4:
                return
            self._prints -= producer.forget_prints()

    def last_id(self, name: bytes) -> int:
        """The last id that is stored of a name; 0 where it is not known."""
        producer = self.names.get(name)
        return producer.last_id if producer is not None else 0

    def forget_idle(self, now: int) -> None:
        """Forget producers that have stored nothing for the time to live; of a full table, names that were made up sooner.

        Looks at none but those that go: a stranger can ask for this with every line.
        """
        self._forget(self.names, now - self._ttl)
        if len(self.names) >= self._max_names:
            self._forget(self._made_up, now - min(self._ttl, _MADE_UP_S))

    def _forget(self, order: OrderedDict[bytes, Producer], before: float) -> None:
        while order:
            name, producer = next(iter(order.items()))
            if producer.seconds >= before:
                return
            del self.names[name]
            self._made_up.pop(name, None)
            self._runs -= len(producer.ids)
            self._prints -= len(producer.prints)
            self._ranges -= len(producer.firsts)

    # --- arbitrary ids ----------------------------------------------------------------------------------------------

    def seen(self, scope: bytes, id: bytes, now: int) -> int:
        """The seq that `id` was stored as within the window, or NEW."""
        value = self.window.get(b"%b|%b" % (scope, id))
        if value is None or now - _seconds(value) > self._age:
            return NEW
        return value >> _SEQ_SHIFT

    def print_of(self, scope: bytes, id: bytes) -> int:
        """The fingerprint of what was stored as `id`, which `seen` has seen; 0 where it is not known."""
        return self.window[b"%b|%b" % (scope, id)] & _PRINT

    def remember(self, scope: bytes, id: bytes, seq: int, seconds: int, print: int = 0) -> None:
        """`id` was stored as `seq`."""
        window, order, key = self.window, self._order, b"%b|%b" % (scope, id)
        if window.pop(key, None) is not None:
            order.remove(key)  # an aged one that came again is the youngest now; it is among the first
        window[key] = _packed(seq, seconds, print)
        order.append(key)
        while order:
            oldest = order[0]
            if len(window) <= self._max_ids and seconds - _seconds(window[oldest]) <= self._age:
                break
            del window[order.popleft()]

    # --- recovery ----------------------------------------------------------------------------------------------------

    def absorb(self, lines: bytes, now: int) -> None:
        """Take in stored lines, in order of seq, each once.

        `now`: no record is younger, whatever its recv_ts says. A clock that was ahead for a while would else make all ids old.
        """
        if b";p=" not in lines and b";w=" not in lines:
            return
        name, first_id, first_seq, last_seconds, starts = b"", 0, 0, 0, Starts()
        prints: list[int] = []  # of a run of one producer's ids, to be taken in together
        for match in _OWNED.finditer(lines):
            seq_text, seconds_text, routing_key, id, kind, whose, headers, payload = match.groups()
            seq, seconds = int(seq_text), min(int(seconds_text), now)
            print = fingerprint(routing_key, headers, payload) if headers else crc32(payload, starts[routing_key])
            if kind == b"w":
                self.remember(whose, id, seq, seconds, print)
                continue
            if not id.isdigit():
                continue  # stored before there were producers: it claims what nobody asked the framer for
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
        if producer is None:  # the limit was lowered: who is stored stays known, or a retry would be stored twice
            producer = self._add(Producer(name, seconds=seconds))
        self.stored(producer, first_id, seq, len(prints), seconds, prints)

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self, beat: Callable[[], None] = lambda: None) -> "Snapshot":
        """The table as it is now; costs a few copies of lists. Its rows are made later, beside the framing."""
        return Snapshot(self, beat)

    def load(self, data: str, last_seq: int, beat: Callable[[], None] = lambda: None) -> tuple[int, str]:
        """Take in producers.ckpt. Returns (seq up to which it speaks, why it does not where that is 0).

        `beat` is called now and then: how long it takes depends on the limits.
        """
        try:
            with open(path(data), "rb") as file:
                head, _, body = file.read().partition(b"\n")
        except FileNotFoundError:
            return 0, ""
        try:
            seq, crc, version = (int(field) for field in (head + b"|1" * (head.count(b"|") == 1)).split(b"|"))
            if _crc(seq, body) != crc:
                raise ValueError("its crc does not match")
            if version not in (1, _VERSION):
                raise ValueError(f"format {version} is not known here")
            if seq > last_seq:
                raise ValueError(f"it speaks of seq {seq}, the WAL ends at {last_seq}")
            for number, row in enumerate(body.splitlines()):
                self._load_row(row)
                if number % _ROWS_A_BEAT == 0:
                    beat()
        except ValueError as err:
            self._clear()
            return 0, str(err)
        for producer in sorted(self.names.values(), key=lambda producer: producer.seconds):  # older files: by first use
            self.names.move_to_end(producer.name)
            if producer.name in self._made_up:
                self._made_up.move_to_end(producer.name)
        return seq, ""

    def _clear(self) -> None:
        self.names.clear()
        self._made_up.clear()
        self.window.clear()
        self._order.clear()
        self._runs = self._prints = self._ranges = 0

    def _load_row(self, row: bytes) -> None:
        """A row of this version, or of the first one, which knew no fingerprints and ranges."""
        kind, name, *fields = row.split(b"|")
        if kind == b"w":
            id, seq, seconds, print = fields if len(fields) == 4 else (*fields, b"0")
            key = b"%b|%b" % (name, id)
            self.window[key] = _packed(int(seq), int(seconds), int(print))
            self._order.append(key)
            return
        last_id, seconds, ranges, runs, prints = fields if len(fields) == 5 else (*fields[:2], b"", fields[3], b"")
        producer = self._add(Producer(name, int(last_id), int(seconds)))
        for span in ranges.split(b",") if ranges else ():
            first, last = map(int, span.split(b":"))
            producer.firsts.append(first)
            producer.lasts.append(last)
        for run in runs.split(b",") if runs else ():
            first_id, first_seq, count = map(int, run.split(b":"))
            producer.ids.append(first_id)
            producer.seqs.append(first_seq)
            producer.counts.append(count)
        producer.prints.frombytes(a2b_base64(prints))
        if sys.byteorder == "big":
            producer.prints.byteswap()
        self._runs += len(producer.ids)
        self._prints += len(producer.prints)
        self._ranges += len(producer.firsts)


_PRINT, _SECONDS_SHIFT, _SEQ_SHIFT = (1 << 32) - 1, 32, 66


def _packed(seq: int, seconds: int, print: int) -> int:
    return seq << _SEQ_SHIFT | seconds << _SECONDS_SHIFT | print


def _seconds(value: int) -> int:
    return value >> _SECONDS_SHIFT & (1 << 34) - 1


_Name = tuple[bytes, int, int, "array[int]", "array[int]", list[int], list[int], list[int], "array[int]"]


class Snapshot:
    """A table at one moment."""

    def __init__(self, table: Producers, beat: Callable[[], None] = lambda: None) -> None:
        """`beat` is called now and then: how long it takes depends on the limits."""
        self._names: list[_Name] = []
        for number, p in enumerate(table.names.values()):
            lists = p.firsts[:], p.lasts[:], p.ids[:], p.seqs[:], p.counts[:], p.prints[-PRINTS:]
            self._names.append((p.name, p.last_id, p.seconds, *lists))
            if number % _ROWS_A_BEAT == 0:
                beat()
        self._window = list(table.window.items())

    def rows(self) -> Iterator[bytes]:
        """`p|name|last_id|seconds|first:last,…|id:seq:count,…|fingerprints` and `w|scope|id|seq|seconds|fingerprint`.

        The fingerprints of a name are base64 of 32-bit words, the lower byte first.
        """
        for name, last_id, seconds, firsts, lasts, ids, seqs, counts, prints in self._names:
            ranges = b",".join(b"%d:%d" % span for span in zip(firsts, lasts, strict=True))
            runs = b",".join(b"%d:%d:%d" % run for run in zip(ids, seqs, counts, strict=True))
            if sys.byteorder == "big":
                prints.byteswap()
            known = b2a_base64(prints, newline=False)
            yield b"p|%b|%d|%d|%b|%b|%b\n" % (name, last_id, seconds, ranges, runs, known)
        for key, value in self._window:
            yield b"w|%b|%d|%d|%d\n" % (key, value >> _SEQ_SHIFT, _seconds(value), value & _PRINT)


def path(data: str) -> str:
    return f"{data}/producers.ckpt"


def checkpoint_seq(data: str) -> int:
    """The seq up to which producers.ckpt speaks; 0 where there is none. What comes after it must stay in the WAL."""
    try:
        with open(path(data), "rb") as file:
            return int(file.readline().split(b"|")[0])
    except (FileNotFoundError, ValueError):
        return 0


def text(seq: int, snapshot: Snapshot) -> bytes:
    """The file: `<seq>|<crc32 of the seq and the rest>|<version>`, then the rows of the snapshot."""
    body = b"".join(snapshot.rows())
    return b"%d|%d|%d\n%b" % (seq, _crc(seq, body), _VERSION, body)


def _crc(seq: int, body: bytes) -> int:
    return crc32(body, crc32(b"%d" % seq))


class Checkpointer:
    """Writes producers.ckpt: a snapshot now and then, put on disk when what it speaks of is.

    Until durability has synced the snapshot's last seq it only waits; then a thread makes the text and replaces the file.
    """

    def __init__(
        self, data: str, table: Producers, beat: Callable[[], None] = lambda: None, is_behind: bool = False
    ) -> None:
        """`is_behind`: the file does not say all of the table, so one is due also if nobody writes: retention waits for it."""
        self._path, self._table, self._beat = path(data), table, beat
        self._snapshot: tuple[int, Snapshot] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._bytes = int(is_behind)  # framed since the last snapshot
        self._taken_at = time.monotonic() - is_behind * (CHECKPOINT_S - _BEHIND_S)  # when that was
        self._failed = False  # the last one found no room

    def framed(self, nbytes: int, next_seq: int, synced: int | None, now: int) -> None:
        """After each turn, also an idle one: `nbytes` more were framed, durability has `synced` on disk, it is `now`."""
        self._bytes += nbytes
        if self._snapshot is not None:
            self._write_if(synced)
            return
        much = self._bytes >= CHECKPOINT_BYTES * (1 if self._table else _EMPTY_TIMES)
        age_s = time.monotonic() - self._taken_at
        is_due = much or (self._bytes and age_s > CHECKPOINT_S) or (self._failed and age_s > _RETRY_S)
        if is_due and not self.busy:
            self.take(next_seq - 1, now)

    def take(self, seq: int, now: int) -> None:
        """Snapshot the table as of `seq`."""
        self._bytes, self._taken_at, self._failed = 0, time.monotonic(), False
        self._table.forget_idle(now)
        self._snapshot = seq, self._table.snapshot(self._beat)

    @property
    def pending(self) -> bool:
        return self._snapshot is not None

    @property
    def busy(self) -> bool:
        """Whether the file is being written. Raises RetryError where that failed."""
        if self._error is not None:
            raise RetryError(f"{self._path}: cannot be written: {self._error}") from self._error
        return self._thread is not None and self._thread.is_alive()

    def _write_if(self, synced: int | None) -> None:
        assert self._snapshot is not None
        seq, snapshot = self._snapshot
        if synced is None or synced < seq or self.busy:
            return
        self._snapshot = None
        self._thread = threading.Thread(target=self._write, args=(seq, snapshot), daemon=True)
        self._thread.start()

    def finish(self, synced: int | None) -> bool:
        """Whether nothing is left to do; call again until it says so."""
        if self._snapshot is not None:
            self._write_if(synced)
        return not self.pending and not self.busy

    def _write(self, seq: int, snapshot: Snapshot) -> None:
        try:
            replace_file(self._path, text(seq, snapshot))
        except OSError as err:
            if err.errno in FULL:  # the old file stays right; but until there is a new one, retention waits
                self._remove_half()
                self._failed = True
                spare.release(os.path.dirname(self._path))  # for the next time
            else:
                self._error = err

    def _remove_half(self) -> None:
        try:
            os.unlink(f"{self._path}.new")
        except FileNotFoundError:
            pass
