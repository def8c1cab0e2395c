"""Saves the dedupe table to producers.ckpt, so that a start has only the last seconds of the WAL to read again.

Owner       the framer.
Invariant   The file never covers a record that is not on disk: a snapshot waits until durability has synced its last
            seq. When all stages die with the rings, ids that were lost with them must be accepted again.
            Between two batches of lines a snapshot is copied for _COPY_S at most, however many names there are.
Crash       Killed while writing: the file is replaced atomically, so the old one stays.
Disk full   The old file stays, and the save is tried again. Until it succeeds, retention keeps what the old file does
            not cover.
"""

import os
import threading
import time
from collections.abc import Callable

from kmq.config.values import MIB
from kmq.errors import RetryError
from kmq.files import FULL, replace_file
from kmq.framing.dedupe import DedupeTable
from kmq.log import dedupe_file, spare
from kmq.log.dedupe_file import Snapshot

CHECKPOINT_BYTES = 32 * MIB  # of framed lines between two saves: a start then reads for at most a third of a second
CHECKPOINT_S = 30.0  # longest time between two saves: the WAL must keep what the file does not cover (retention)
_EMPTY_TIMES = 4  # an empty table is saved after so many times CHECKPOINT_BYTES: a start then reads that much faster
_BEHIND_S = 10.0  # until the first save, if the file that was loaded did not cover the whole table
_RETRY_S = 2.0  # after a save that found the disk full
# A large table is saved after twice its size in lines, or saving would write more than the WAL; and for a tenth of the
# time at most. A start then reads for about as long again as it takes to load the table.
_SHARE, _SHARE_OF_TIME = 2, 10
_COPY_S, _IDLE_COPY_S = 0.002, 0.01  # copying between two batches of lines, and while there are none


class Checkpointer:
    """Takes a snapshot now and then, and a thread writes it once all that it covers is on disk."""

    def __init__(
        self, data: str, table: DedupeTable, beat: Callable[[], None] = lambda: None, is_behind: bool = False
    ) -> None:
        """`is_behind`: the file does not cover the whole table, so save it soon even if nothing is framed."""
        self._path, self._table, self._beat = dedupe_file.path(data), table, beat
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._bytes = int(is_behind)  # framed since the last snapshot
        self._taken_at = time.monotonic() - is_behind * (CHECKPOINT_S - _BEHIND_S)
        self._found_full = False  # whether the last save found the disk full
        self._size, self._took_s = _size(self._path), 0.0  # of the last save

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

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        try:
            parts = snapshot.encode()
            replace_file(self._path, *parts)
            self._size, self._took_s = sum(map(len, parts)), time.monotonic() - began
        except OSError as err:
            if err.errno in FULL:
                self._remove_half()
                self._found_full = True
                spare.release(os.path.dirname(self._path))  # for the next time
            else:
                self._error = err

    def _remove_half(self) -> None:
        try:
            os.unlink(f"{self._path}.new")
        except FileNotFoundError:
            pass


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
