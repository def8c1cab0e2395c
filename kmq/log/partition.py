"""A partition log: the lines of one partition of one topic, in order, each once.

    topics/orders/0/00000000000000004711.log    a segment of partition 0 of `orders`: the records from offset 4711 on

Owner       the router is the only writer (lock topics/.owner). Any process may read.
Invariant   The segments are a prefix of the records that the WAL routes here, without those that retention deleted from
            the front. `last_seq` is the seq of the last line: a line whose seq is not above it is already in the log
            and is skipped. A segment ends with the line that reaches `segment_bytes`, no matter how the lines were
            grouped into appends. So a log rebuilt from the WAL has the same files again (except for rolls by age,
            which fall between two appends).
Crash       The files are copies: the router appends whatever is torn, cut or missing again from the WAL.
            partition_recovery.py finds out what is whole.
            On disk: the lines and the index. In memory only: PartitionState, of which the checkpoint keeps `values`.
            A sealed segment is synced by the next checkpoint, not by the roll, so no message waits for that sync.
"""

import os
from collections import namedtuple
from collections.abc import Callable, Sequence

from kmq.errors import RetryError
from kmq.files import AppendFile, Buffer, WaitForRoom, make_directory, point_symlink, with_room
from kmq.log import reader, segment, wal
from kmq.log.damage import DamageError
from kmq.log.index import IndexWriter, last_before, line_end
from kmq.log.segment import Limits, Segment, count_lines
from kmq.message import record


class PartitionState:
    """What the router knows of a partition log: its extent and its sealed segments.

    The next record gets `end_offset`; the last one has `last_seq`. The files hold `size` bytes and begin with record
    `start`. `sealed` are all segments except the active one, which begins with record `base`.
    """

    __slots__ = ("base", "end_offset", "last_seq", "sealed", "size", "start")

    def __init__(self, end_offset: int = 0, last_seq: int = 0, size: int = 0, start: int = 0) -> None:
        self.end_offset, self.last_seq, self.size, self.start = end_offset, last_seq, size, start
        self.base = start
        self.sealed: Sequence[Segment] = ()  # most partitions have none; a list for each would cost memory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionState) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def values(self) -> tuple[int, int, int, int]:
        """Return what the checkpoint keeps."""
        return self.end_offset, self.last_seq, self.size, self.start

    @property
    def active_bytes(self) -> int:
        return self.size - sum(part.size for part in self.sealed)

    def set_segments(self, segments: list[Segment]) -> None:
        """Take `segments` as the files of the log; the last one is the active segment."""
        *self.sealed, active = segments
        self.base = active.first

    def retire(self, count: int) -> list[Segment]:
        """Stop counting the oldest `count` segments, and return them: to be deleted once a checkpoint omits them."""
        gone, self.sealed = list(self.sealed[:count]), list(self.sealed[count:])
        self.size -= sum(part.size for part in gone)
        self.start = self.sealed[0].first if self.sealed else self.base
        return gone

    def keep(self, kept: Segment) -> None:
        """Count `kept` as the first sealed segment: it holds a copy of the end of the last retired one (remnant.py)."""
        self.sealed = [kept, *self.sealed]
        self.size, self.start = self.size + kept.size, kept.first


EMPTY = PartitionState()


def directory_of(data: str, topic: str, partition: int) -> str:
    return f"{data}/topics/{topic}/{partition}"


class PartitionPlace(namedtuple("PartitionPlace", ("data", "topic", "number", "link"), defaults=("",))):
    """A partition of a topic in a data directory. `link`: the name of its symlink, or "" if it has none."""

    __slots__ = ()

    @property
    def directory(self) -> str:
        return directory_of(self.data, self.topic, self.number)


class PartitionLog:
    """The writing end of one partition. The descriptor is opened when needed and may be closed at any time."""

    __slots__ = (
        "_directory",
        "_file",
        "_first_ts",
        "_index",
        "_limits",
        "_place",
        "_wait_for_room",
        "_warn",
        "number",
        "state",
        "topic",
        "unsynced",
    )

    def __init__(
        self, place: PartitionPlace, state: PartitionState, wait_for_room: WaitForRoom, limits: Limits | None = None
    ) -> None:
        """Take a log that is not open yet. `state` belongs to the caller, and outlives this object."""
        self._place, self._wait_for_room = place, wait_for_room
        self.topic, self.number, self.state = place.topic, place.number, state
        self.unsynced: list[str] = []  # files beside the active segment that the next checkpoint has to sync
        self._limits = limits or Limits()
        self._directory = place.directory
        self._file: AppendFile | None = None
        self._index: IndexWriter | None = None
        self._first_ts = 0  # of the active segment

    @property
    def path(self) -> str:
        """Return the path of the active segment."""
        return f"{self._directory}/{segment.name(self.state.base)}"

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, warn: Callable[..., None], was_cut: bool = False, check: Callable[[], None] = lambda: None) -> None:
        """Open the active segment; make the directory, the log and the symlink if they are missing.

        Raises DamageError if the segment differs from its index. `was_cut`: recovery has cut the segment, so a
        difference is expected, and the index is cut too.
        """
        self._warn = warn
        path = self.path
        with_room(path, self._wait_for_room, lambda: make_directory(self._directory))
        self._file = AppendFile(path, self._wait_for_room)
        expected = self.state.active_bytes
        if self._file.size != expected:  # changed while it was closed; an append would hide the gap for ever
            raise RetryError(f"{path}: changed by another process (expected {expected} bytes)")
        self._first_ts = record.stamp(os.pread(self._file.fd, 64, 0))[1]
        with_room(path, self._wait_for_room, lambda: self._point_link(path))
        if self._index is None:
            try:  # an append would give the damage a valid crc
                if expected and not was_cut:
                    reader.indexed_end(path, self.state.base, by_seq=False)
            except DamageError:
                self.close()
                raise
            self._index = IndexWriter(segment.index_path(path), self._wait_for_room)
            self._index.resume(self._file.fd, self._file.size, self.state.base, check)

    def _point_link(self, path: str) -> None:
        """Point the symlink to this segment, unless it leads to another queue."""
        data, name = self._place.data, self._place.link
        if not name:
            return
        link, target = f"{data}/{name}", os.path.relpath(path, data)
        if os.path.islink(link) and os.path.dirname(os.readlink(link)) != os.path.dirname(target):
            self._warn("symlink_taken", symlink=name, topic=self.topic, file=target)
        elif kept := point_symlink(link, target):
            self._warn("set_aside", file=link, now=kept, effect="the symlink is made again")

    def use_link(self, name: str) -> None:
        """Use another name for the symlink, from the next `open` on."""
        self._place = self._place._replace(link=name)

    def take_unsynced(self) -> list[str]:
        """Return the files written since the last checkpoint, for the next one to sync: each log before its index."""
        files = [*self.unsynced, self.path, segment.index_path(self.path)]
        self.unsynced.clear()
        return files

    def append(self, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        """Append `data`, the `count` lines first_seq…last_seq, and return the bytes written.

        Lines that the log has already are skipped.
        """
        state = self.state
        assert self._file is not None
        if first_seq <= state.last_seq:
            first_seq = state.last_seq + 1
            data = wal.within(bytes(data), first_seq, last_seq)
            count = data.count(b"\n")
        if not data:
            return 0
        if self._file.moved_under_us():
            raise RetryError(f"{self.path}: changed by another process (expected {self._file.size} bytes)")
        written = len(data)
        dense = last_seq - first_seq + 1 == count
        next_ts = record.stamp(data)[1]
        while True:
            if self._limits.is_full(self._file.size, self._first_ts, next_ts):
                self.roll()
            room = self._limits.segment_bytes - self._file.size
            if len(data) <= room:
                break
            end = line_end(data, room - 1)
            if end == len(data):
                break
            lines = bytes(data[:end]).count(b"\n")
            self._write(data[:end], lines, first_seq if dense else 0, next_ts)
            data, count = data[end:], count - lines
            first_seq, next_ts = record.stamp(data)
            state.last_seq = first_seq - 1  # an upper bound: the seqs written so far are lower
        self._write(data, count, first_seq if dense else 0, next_ts)
        state.last_seq = last_seq
        # Only now: it may wait for room, and making room writes a checkpoint of the state.
        if self._index is not None and self._index.is_behind:
            self._index.flush()
        return written

    def _write(self, data: Buffer, count: int, first_seq: int, first_ts: int) -> None:
        """Write lines to the active segment. `first_seq`: seq of the first line if all seqs are consecutive, else 0."""
        state, file, entries = self.state, self._file, self._index
        assert file is not None and entries is not None
        position = file.size
        if not position:
            self._first_ts = first_ts
        file.append([data], len(data))
        entries.extend(data, position, state.end_offset, first_seq)
        state.end_offset += count
        state.size += len(data)

    def roll(self, wait_for_room: WaitForRoom | None = None) -> None:
        """Seal the active segment and begin a new one.

        The log stays as it was until the new segment is complete, so `wait_for_room` may raise.
        """
        state, file, wait = self.state, self._file, wait_for_room or self._wait_for_room
        assert file is not None and self._index is not None
        self._index.seal(wait)
        path = f"{self._directory}/{segment.name(state.end_offset)}"
        segment.begin(path, wait, lambda: with_room(path, wait, lambda: self._point_link(path)))
        self.seal()
        file.close()
        state.sealed = [*state.sealed, Segment(state.base, file.path, file.size)]
        state.base = state.end_offset
        self._file = AppendFile(path, self._wait_for_room)
        self._index = IndexWriter(segment.index_path(path), self._wait_for_room)

    def set_limits(self, limits: Limits, now_ts: int) -> None:
        """Use `limits` from now on. An open log rolls at once if its segment is over them at `now_ts` (µs)."""
        self._limits = limits
        if self._file is not None and self._file.size and limits.is_full(self._file.size, self._first_ts, now_ts):
            self.roll()

    def seal(self) -> None:
        """Complete the index of the active segment; the next checkpoint syncs both files."""
        assert self._index is not None
        self._index.seal()
        self.unsynced += [self.path, self._index.path]

    def note_open_block(self) -> None:
        """Write a provisional index line for the block still open; call once a second while there are writes."""
        if self._index is not None:
            self._index.note_open()
            self._index.flush()

    def is_unlinked(self) -> bool:
        return self._file is not None and self._file.is_unlinked()

    def close(self) -> None:
        """Close the descriptor; state and index stay in memory."""
        if self._file is not None:
            self._file.close()
            self._file = None


def end_offset(data: str, topic: str, partition: int) -> tuple[int, int]:
    """Return (end offset, bytes) of a partition as its files are now; read-only, also while the router writes."""
    segments = segment.survey(directory_of(data, topic, partition))
    if not segments:
        return 0, 0
    active = segments[-1]
    fd = os.open(active.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, position = last_before(segment.index_path(active.path), active.size, 1 << 62)
        if offset < 0:
            offset, position = active.first, 0
        return offset + count_lines(fd, position, active.size), sum(part.size for part in segments)
    finally:
        os.close(fd)
