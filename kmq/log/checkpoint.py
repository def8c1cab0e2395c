"""router.ckpt: up to which seq the partition logs are known to be on disk, and what each then held.

    <WAL seq>
    topic|partition|end_offset|last_seq|bytes      one row per partition

Invariant   Every record up to the WAL seq lies in its partition log, and those logs were fsynced before the file got its
            name. So a start replays the WAL from there, and a log smaller than its row has been cut since.
Crash       The file is replaced atomically: the old or the new. Without one the WAL is replayed from its beginning.
Mechanism   The fsyncs run in a thread beside the routing (they give up the interpreter lock): the rows are a snapshot,
            and the logs only grow beyond it.
"""

import os
import threading

from kmq.errors import RetryError
from kmq.log import producers
from kmq.log.disk import WaitForRoom, replace_file, sync_directory, with_room
from kmq.log.partition import State

Rows = dict[tuple[str, int], State]


def load(data: str) -> tuple[int, Rows]:
    """(WAL seq, rows); (0, {}) where there is no checkpoint. Raises ValueError where it is not one."""
    try:
        with open(f"{data}/router.ckpt", encoding="ascii") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0, {}
    rows: Rows = {}
    for line in lines[1:]:
        topic, partition, *numbers = line.split("|")
        end_offset, last_seq, size = map(int, numbers)
        rows[topic, int(partition)] = State(end_offset, last_seq, size)
    return int(lines[0]), rows


def routed_seq(data: str) -> int:
    """The WAL seq of the checkpoint on disk; 0 where there is none that can be read."""
    try:
        with open(f"{data}/router.ckpt", "rb") as file:
            return int(file.readline())
    except (FileNotFoundError, ValueError):
        return 0


def wal_is_free_up_to(data: str) -> int:
    """Up to this seq nobody would need the WAL again after a crash: not the router, not the framer's memory of producers."""
    seqs = [routed_seq(data)]
    if os.path.exists(producers.path(data)):
        seqs.append(producers.checkpoint_seq(data))
    return min(seqs)


class Checkpointer:
    """Writes router.ckpt, one at a time."""

    def __init__(self, data: str, wait_for_room: WaitForRoom) -> None:
        self._data, self._wait_for_room = data, wait_for_room
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether one is being written. Raises RetryError where the last one failed."""
        if self._error is not None:
            raise RetryError(f"checkpoint failed: {self._error}") from self._error
        return self._thread is not None and self._thread.is_alive()

    def start(self, seq: int, rows: list[bytes], dirty: list[str]) -> None:
        """Sync the logs at the paths `dirty`, then write the file, beside the caller."""
        content = b"%d\n" % seq + b"".join(rows)
        self._thread = threading.Thread(target=self._run, args=(content, dirty), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until it is written. Raises RetryError where it failed."""
        if self._thread is not None:
            self._thread.join()
        _ = self.busy

    def _run(self, content: bytes, dirty: list[str]) -> None:
        try:
            for path in dirty:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            directories = {os.path.dirname(path) for path in dirty}
            for directory in directories | {os.path.dirname(d) for d in directories}:
                sync_directory(directory)
            if dirty:
                sync_directory(f"{self._data}/topics")
            path = f"{self._data}/router.ckpt"
            with_room(path, self._wait_for_room, lambda: replace_file(path, content))
        except Exception as err:
            self._error = err
