"""router.ckpt: the seq up to which all partition logs are on disk, and what each log then held.

    <WAL seq>
    topic|partition|end_offset|last_seq|bytes      one row per partition
    topic|from_seq|first_offset,…                  one row per topic, with the first offset of each partition
    topic|from_seq|first_offset,…|grown            if it has grown: from which seqs on (kmq/log/growth.py)
    topic|partitioner                              one row per topic, if one of them has grown or does not have crc32
    crc32|<crc32 of the lines above>

The rows of a topic that was deleted later are ignored (kmq/log/deletions.py).
A damaged checkpoint is ignored, because one wrong digit would number records wrongly. A topic without a row for its
partitioner: its checkpoint may be of a release that knew neither partitioners nor growth (recorded.py completes it).
`bytes` counts all segments from `first_offset` on, so a start sees by their sizes alone if an earlier one was cut or is
missing. Retention first moves `first_offset` here, and deletes afterwards: a segment that is missing behind it was
lost, not deleted. `from_seq` and the partitioner are in topic.toml too; here they outlive the directory.

Invariant   Every record up to the WAL seq lies in its partition log, and those logs were fsynced before the file got
            its name. So a start replays the WAL from there, and a log smaller than its row was cut later.
Crash       The file is replaced atomically: the old or the new is there. If there is none, the WAL is replayed from its
            beginning. The next start deletes segments in front of `first_offset` that still exist.
Mechanism   The fsyncs run in a thread beside the routing, because they release the interpreter lock. The rows are a
            snapshot, and the logs only grow beyond it.
"""

import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby

from kmq.errors import RetryError
from kmq.files import WaitForRoom, replace_file, sync_directory, with_room
from kmq.log import dedupe_file, growth, remnant, segment
from kmq.log.deletions import Deleted
from kmq.log.growth import Since
from kmq.log.partition import EMPTY, State
from kmq.log.segment import Segment
from kmq.logfmt import Logger
from kmq.message.routing import PARTITIONERS, Topic

Rows = dict[tuple[str, int], State]


def load(data: str) -> tuple[int, Rows, dict[str, Since]]:
    """Return (WAL seq, rows, since when each topic is in force); empty if there is no file.

    Raises ValueError or LookupError if the file is damaged.
    """
    body = _read(data)
    if not body:
        return 0, {}, {}
    lines = body.decode("ascii").splitlines()
    rows: Rows = {}
    since: dict[str, Since] = {}
    for line in lines[1:]:
        topic, *fields = line.split("|")
        if len(fields) == 1:
            since[topic] = since[topic]._replace(partitioner=PARTITIONERS[fields[0]])
        elif len(fields) in (2, 3):
            since[topic] = Since(int(fields[0]), growth.decode(fields[2]) if fields[2:] else ())
            for partition, first in enumerate(fields[1].split(",")):
                state = rows[topic, partition]
                rows[topic, partition] = State(state.end_offset, state.last_seq, state.size, int(first))
        else:
            partition, end_offset, last_seq, size = map(int, fields)
            rows[topic, partition] = State(end_offset, last_seq, size)
    deleted = Deleted.of(data)
    since = {topic: known for topic, known in since.items() if known.from_seq > deleted.last_seq(topic)}
    gone = deleted.lives.keys() - since.keys()
    return int(lines[0]), {at: state for at, state in rows.items() if at[0] not in gone}, since


def text(seq: int, states: Rows, topics: Iterable[Topic]) -> bytes:
    """Return the content of router.ckpt."""
    rows = [f"{seq}\n"]
    rows += [f"{at[0]}|{at[1]}|{s.end_offset}|{s.last_seq}|{s.size}\n" for at, s in states.items()]
    here = [topic for topic in topics if not topic.is_gone]
    are_named = any(topic.needs_newest for topic in here)
    for topic in here:
        starts = [str(states.get((topic.name, number), EMPTY).start) for number in range(topic.partitions)]
        grown = f"|{growth.encode(topic.grown)}" if topic.grown else ""
        rows.append(f"{topic.name}|{topic.from_seq}|{','.join(starts)}{grown}\n")
        if are_named:
            rows.append(f"{topic.name}|{topic.partitioner.name}\n")
    body = "".join(rows).encode()
    return b"%bcrc32|%d\n" % (body, zlib.crc32(body))


def _read(data: str) -> bytes:
    """Return the lines except the last; b"" if there is no file. Raises ValueError if the crc is wrong."""
    try:
        with open(f"{data}/router.ckpt", "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return b""
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if not body or content != b"%bcrc32|%d\n" % (body, zlib.crc32(body)):
        raise ValueError("its crc does not match")
    return body


def routed_seq(data: str) -> int:
    """Return the WAL seq of the checkpoint on disk; 0 if there is no readable checkpoint."""
    try:
        return int(_read(data).partition(b"\n")[0] or b"0")
    except ValueError:
        return 0


def wal_is_free_up_to(data: str) -> int:
    """Return up to which seq neither the router nor the dedupe table needs the WAL after a crash."""
    return min(routed_seq(data), dedupe_file.checkpoint_seq(data))


class Checkpointer:
    """Writes router.ckpt in a thread, one checkpoint at a time."""

    def __init__(self, data: str, wait_for_room: WaitForRoom, log: Logger) -> None:
        self._data, self._wait_for_room, self._log = data, wait_for_room, log
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Return True while a checkpoint is being written. Raises RetryError if the last one failed."""
        if self._error is not None:
            raise RetryError(f"checkpoint failed: {self._error}") from self._error
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: bytes, dirty: list[str], retired: list[Segment], kept: Sequence[Segment] = ()) -> None:
        """In a thread: sync the files `dirty`, write `content`, then delete the segments `retired`.

        `kept`: copies of last records, which then get their names (remnant.py).
        """
        self._thread = threading.Thread(target=self.run, args=(content, dirty, retired, kept), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises RetryError if that failed."""
        if self._thread is not None:
            self._thread.join()
        _ = self.busy

    def _wait(self, path: str) -> None:
        if not remnant.release(self._data):
            self._wait_for_room(path)

    def run(self, content: bytes, dirty: list[str], retired: list[Segment], kept: Sequence[Segment] = ()) -> None:
        """Do in this thread what `start` does in another. An error is raised by `busy` and `finish`."""
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
            with_room(path, self._wait, lambda: replace_file(path, content))
            for _, group in groupby(retired, lambda part: os.path.dirname(part.path)):
                segment.remove(gone := list(group))
                for part in gone:
                    self._log.info("segment_deleted", file=part.path, first_offset=part.first, bytes=part.size)
            for part in kept:
                remnant.settle(os.path.dirname(part.path), part.first)
        except Exception as err:
            self._error = err
