"""What has been stored already: the memory behind `!dup`, so that a retry stores nothing twice.

Owner       the framer, the only one that gives out seqs; producers.ckpt is its file.
Invariant   The table is a function of the records up to the last seq given out: what a record's id says in its header, `;p=`
            (a producer's increasing ids) or `;w=` (arbitrary ids in a window), is in it. Only the framer writes those
            headers (record.disclaim), so nobody can make it believe that something is stored.
Crash       A start loads producers.ckpt, then reads what came after it from the WAL, then the blocks that still wait in the
            ring `framed`: together exactly the records up to the next seq. The file never speaks of a record that is not on
            disk (`Checkpointer`): when all stages die with the rings, ids that went down with them must be taken again.
            A damaged file is passed over (its crc says so) and the whole WAL read instead.
Memory      Bounded: at most `producers` names, each with its last id and some runs of (id, seq); at most `dedupe_count` runs
            and as many ids in windows. Over the names those go first that a program made up for itself. What falls out
            of the runs is still known to be stored, but not as which seq: `!dup n 0`. What falls out of a window, by
            count or age, is forgotten: design 2.4 promises no more there.
"""

import os
import re
import threading
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from kmq.errors import RetryError
from kmq.log.disk import FULL, replace_file
from kmq.settings import MIB

CHECKPOINT_BYTES = 32 * MIB  # of framed lines: bounds what a start has to read again to a third of a second;
CHECKPOINT_S = 30.0  # and at least so often, for what the file does not speak of must stay in the WAL (retention);
_EMPTY_TIMES = 4  # and so many times that while there is nobody to remember: looking for nobody is that much faster
_RUNS = 1024  # runs remembered per producer
# Names that a client made up for one run of a program (`kmq produce --acks` in a loop) do not come again. So long after its
# last message such a program has most likely ended; only where the table is full it is not waited for any longer.
MADE_UP, _MADE_UP_S = b"auto-", 600
_ROWS_A_BEAT = 1024  # rows of the file that are loaded between two heartbeats
_MIN_RUNS = 8  # also when all producers together have too many
MAX_WINDOW_ID = 256  # bytes of an arbitrary id: bounds the memory of a window
MAX_ID = 18  # digits of an increasing id: it fits a signed 64-bit number

NEW, OUT_OF_ORDER = -1, -2  # answers of `find` besides the seq

_OWNED = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|[^|\n]*\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)")


class Producer:
    """The increasing ids of one name: runs of ids that follow one another, stored under seqs that do."""

    __slots__ = ("counts", "ids", "last_id", "name", "seconds", "seqs", "trimmed")

    def __init__(self, name: bytes = b"", last_id: int = -1, seconds: int = 0) -> None:
        self.name, self.last_id, self.seconds = name, last_id, seconds
        self.ids: list[int] = []  # first id of each run, rising
        self.seqs: list[int] = []
        self.counts: list[int] = []
        self.trimmed = False  # older runs have been forgotten

    def find(self, number: int) -> int:
        """The seq `number` was stored as, 0 where that is forgotten, NEW, or OUT_OF_ORDER: passed over and never stored."""
        if number > self.last_id:
            return NEW
        at = bisect_right(self.ids, number) - 1
        if at < 0:
            return 0 if self.trimmed or not self.ids else OUT_OF_ORDER
        ahead = number - self.ids[at]
        return self.seqs[at] + ahead if ahead < self.counts[at] else OUT_OF_ORDER

    def add(self, first_id: int, seq: int, count: int) -> int:
        """Ids first_id… were stored as seq…; returns how many runs that added."""
        self.last_id = first_id + count - 1
        if self.ids:
            length = self.counts[-1]
            if self.ids[-1] + length == first_id and self.seqs[-1] + length == seq:
                self.counts[-1] += count
                return 0
        self.ids.append(first_id)
        self.seqs.append(seq)
        self.counts.append(count)
        return 1

    def trim(self, keep: int) -> int:
        """Forget all but the newest `keep` runs; returns how many went."""
        gone = len(self.ids) - keep
        if gone <= 0:
            return 0
        del self.ids[:gone], self.seqs[:gone], self.counts[:gone]
        self.trimmed = True
        return gone


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
        self._runs = 0
        # scope|id → seq << 34 | seconds, in order of age: one integer costs a third of a tuple
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

    def stored(self, producer: Producer, first_id: int, seq: int, count: int, seconds: int) -> None:
        """Messages first_id… of `producer` got the seqs seq…."""
        name = producer.name
        producer.seconds = seconds
        self.names.move_to_end(name)
        if name in self._made_up:
            self._made_up.move_to_end(name)
        self._runs += producer.add(first_id, seq, count)
        if len(producer.ids) > _RUNS:
            self._runs -= producer.trim(_RUNS // 2)
        elif self._runs > self._max_ids:
            self._runs -= producer.trim(_MIN_RUNS)

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

    # --- arbitrary ids ----------------------------------------------------------------------------------------------

    def seen(self, scope: bytes, id: bytes, now: int) -> int:
        """The seq that `id` was stored as within the window, or NEW."""
        value = self.window.get(b"%b|%b" % (scope, id))
        if value is None or now - (value & (1 << 34) - 1) > self._age:
            return NEW
        return value >> 34

    def remember(self, scope: bytes, id: bytes, seq: int, seconds: int) -> None:
        """`id` was stored as `seq`."""
        window, order, key = self.window, self._order, b"%b|%b" % (scope, id)
        if window.pop(key, None) is not None:
            order.remove(key)  # an aged one that came again is the youngest now; it is among the first
        window[key] = seq << 34 | seconds
        order.append(key)
        while order:
            oldest = order[0]
            if len(window) <= self._max_ids and seconds - (window[oldest] & (1 << 34) - 1) <= self._age:
                break
            del window[order.popleft()]

    # --- recovery ----------------------------------------------------------------------------------------------------

    def absorb(self, lines: bytes, now: int) -> None:
        """Take in stored lines, in order of seq, each once.

        `now`: no record is younger, whatever its recv_ts says. A clock that was ahead for a while would else make all ids old.
        """
        if b";p=" not in lines and b";w=" not in lines:
            return
        run: tuple[bytes, int, int, int, int] | None = None  # name, first id, first seq, count, seconds
        for seq_text, seconds_text, id, kind, name in _OWNED.findall(lines):
            seq, seconds = int(seq_text), min(int(seconds_text), now)
            if kind == b"w":
                self.remember(name, id, seq, seconds)
                continue
            if not id.isdigit():
                continue  # stored before there were producers: it claims what nobody asked the framer for
            number = int(id)
            if run and run[0] == name and run[1] + run[3] == number and run[2] + run[3] == seq:
                run = name, run[1], run[2], run[3] + 1, seconds
                continue
            self._absorb_run(run)
            run = name, number, seq, 1, seconds
        self._absorb_run(run)

    def _absorb_run(self, run: tuple[bytes, int, int, int, int] | None) -> None:
        if run is None:
            return
        name, first_id, seq, count, seconds = run
        producer = self.producer(name, seconds)
        if producer is None:  # the limit was lowered: who is stored stays known, or a retry would be stored twice
            producer = self._add(Producer(name, seconds=seconds))
        self.stored(producer, first_id, seq, count, seconds)

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> "Snapshot":
        """The table as it is now; costs a few copies of lists. Its rows are made later, beside the framing."""
        return Snapshot(self)

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
            seq, crc = (int(field) for field in head.split(b"|"))
            if _crc(seq, body) != crc:
                raise ValueError("its crc does not match")
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
        self._runs = 0

    def _load_row(self, row: bytes) -> None:
        kind, name, *fields = row.split(b"|")
        if kind == b"w":
            id, seq, seconds = fields
            key = b"%b|%b" % (name, id)
            self.window[key] = int(seq) << 34 | int(seconds)
            self._order.append(key)
            return
        last_id, seconds, trimmed, runs = fields
        producer = self._add(Producer(name, int(last_id), int(seconds)))
        producer.trimmed = trimmed == b"1"
        for run in runs.split(b",") if runs else ():
            first_id, first_seq, count = map(int, run.split(b":"))
            producer.ids.append(first_id)
            producer.seqs.append(first_seq)
            producer.counts.append(count)
        self._runs += len(producer.ids)


class Snapshot:
    """A table at one moment."""

    def __init__(self, table: Producers) -> None:
        self._names = [
            (name, p.last_id, p.seconds, p.trimmed, p.ids[:], p.seqs[:], p.counts[:]) for name, p in table.names.items()
        ]
        self._window = list(table.window.items())

    def rows(self) -> Iterator[bytes]:
        """`p|name|last_id|seconds|trimmed|id:seq:count,…` and `w|scope|id|seq|seconds`."""
        for name, last_id, seconds, trimmed, *runs in self._names:
            listed = b",".join(b"%d:%d:%d" % run for run in zip(*runs, strict=True))
            yield b"p|%b|%d|%d|%d|%b\n" % (name, last_id, seconds, trimmed, listed)
        for key, value in self._window:
            yield b"w|%b|%d|%d\n" % (key, value >> 34, value & (1 << 34) - 1)


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
    """The file: `<seq>|<crc32 of the seq and the rest>`, then the rows of the snapshot."""
    body = b"".join(snapshot.rows())
    return b"%d|%d\n%b" % (seq, _crc(seq, body), body)


def _crc(seq: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(b"%d" % seq))


class Checkpointer:
    """Writes producers.ckpt: a snapshot now and then, put on disk when what it speaks of is.

    Until durability has synced the snapshot's last seq it only waits; then a thread makes the text and replaces the file.
    """

    def __init__(self, data: str, table: Producers) -> None:
        self._path, self._table = path(data), table
        self._snapshot: tuple[int, Snapshot] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._bytes, self._taken_at = 0, time.monotonic()  # framed since the last snapshot, and when that was

    def framed(self, nbytes: int, next_seq: int, synced: int | None, now: int) -> None:
        """After each turn, also an idle one: `nbytes` more were framed, durability has `synced` on disk, it is `now`."""
        self._bytes += nbytes
        if self._snapshot is not None:
            self._write_if(synced)
            return
        much = self._bytes >= CHECKPOINT_BYTES * (1 if self._table else _EMPTY_TIMES)
        if (much or (self._bytes and time.monotonic() - self._taken_at > CHECKPOINT_S)) and not self.busy:
            self.take(next_seq - 1, now)

    def take(self, seq: int, now: int) -> None:
        """Snapshot the table as of `seq`."""
        self._bytes, self._taken_at = 0, time.monotonic()
        self._table.forget_idle(now)
        self._snapshot = seq, self._table.snapshot()

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
            if err.errno in FULL:  # the old file stays right: a start only has more to read
                self._remove_half()
            else:
                self._error = err

    def _remove_half(self) -> None:
        try:
            os.unlink(f"{self._path}.new")
        except FileNotFoundError:
            pass
