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
from collections import deque
from collections.abc import Iterator

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
_MIN_RUNS = 8  # also when all producers together have too many
MAX_WINDOW_ID = 256  # bytes of an arbitrary id: bounds the memory of a window
MAX_ID = 18  # digits of an increasing id: it fits a signed 64-bit number

NEW, OUT_OF_ORDER = -1, -2  # answers of `find` besides the seq

_OWNED = re.compile(rb"(?m)^(\d+)\|(\d+)\.\d+\|[^|\n]*\|[^|\n]*\|([^|;\n]*);([pw])=([^|;\n]*)")


class Producer:
    """The increasing ids of one name: runs of ids that follow one another, stored under seqs that do."""

    __slots__ = ("counts", "ids", "last_id", "seconds", "seqs", "trimmed")

    def __init__(self, last_id: int = -1, seconds: int = 0) -> None:
        self.last_id, self.seconds = last_id, seconds
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
        self.names: dict[bytes, Producer] = {}
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
            found = self.names[name] = Producer(seconds=seconds)
        return found

    def stored(self, producer: Producer, first_id: int, seq: int, count: int, seconds: int) -> None:
        """Messages first_id… of `producer` got the seqs seq…."""
        producer.seconds = seconds
        self._runs += producer.add(first_id, seq, count)
        if len(producer.ids) > _RUNS:
            self._runs -= producer.trim(_RUNS // 2)
        elif self._runs > self._max_ids:
            self._runs -= producer.trim(_MIN_RUNS)

    def forget_idle(self, now: int) -> None:
        """Forget producers that have stored nothing for the time to live; of a full table, names that were made up sooner."""
        is_full = len(self.names) >= self._max_names
        for name, producer in list(self.names.items()):
            made_up = is_full and name.startswith(MADE_UP)
            if now - producer.seconds > (min(self._ttl, _MADE_UP_S) if made_up else self._ttl):
                self._runs -= len(self.names.pop(name).ids)

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

    def absorb(self, lines: bytes) -> None:
        """Take in stored lines, in order of seq, each once."""
        if b";p=" not in lines and b";w=" not in lines:
            return
        run: tuple[bytes, int, int, int, int] | None = None  # name, first id, first seq, count, seconds
        for seq_text, seconds_text, id, kind, name in _OWNED.findall(lines):
            seq, seconds = int(seq_text), int(seconds_text)
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
            producer = self.names[name] = Producer(seconds=seconds)
        self.stored(producer, first_id, seq, count, seconds)

    # --- the file ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> "Snapshot":
        """The table as it is now; costs a few copies of lists. Its rows are made later, beside the framing."""
        return Snapshot(self)

    def load(self, data: str, last_seq: int) -> tuple[int, str]:
        """Take in producers.ckpt. Returns (seq up to which it speaks, why it does not where that is 0)."""
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
            for row in body.splitlines():
                self._load_row(row)
        except ValueError as err:
            self.names.clear()
            self.window.clear()
            self._order.clear()
            self._runs = 0
            return 0, str(err)
        return seq, ""

    def _load_row(self, row: bytes) -> None:
        kind, name, *fields = row.split(b"|")
        if kind == b"w":
            id, seq, seconds = fields
            key = b"%b|%b" % (name, id)
            self.window[key] = int(seq) << 34 | int(seconds)
            self._order.append(key)
            return
        last_id, seconds, trimmed, runs = fields
        producer = self.names[name] = Producer(int(last_id), int(seconds))
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

    def framed(self, nbytes: int, next_seq: int, synced: int | None) -> None:
        """After each turn, also an idle one: `nbytes` more were framed, durability has `synced` on disk."""
        self._bytes += nbytes
        if self._snapshot is not None:
            self._write_if(synced)
            return
        much = self._bytes >= CHECKPOINT_BYTES * (1 if self._table else _EMPTY_TIMES)
        if (much or (self._bytes and time.monotonic() - self._taken_at > CHECKPOINT_S)) and not self.busy:
            self.take(next_seq - 1)

    def take(self, seq: int) -> None:
        """Snapshot the table as of `seq`."""
        self._bytes, self._taken_at = 0, time.monotonic()
        self._table.forget_idle(int(time.time()))
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
