"""A partition log: the lines of one partition of one topic, in order, each once.

Owner       the router is the only writer (lock topics/.owner); anybody may read.
Invariant   What is in the segments is a prefix of what the WAL routes here, less what retention took from its front;
            `last_seq` is the seq of its last line, so a line with a seq not above it is there already and is skipped.
            A segment ends with the line that reaches `segment_bytes`, however the lines came, so a log rebuilt
            from the WAL has the same files again (except for cuts by age, which fall between two appends).
Crash       The files are copies: whatever is torn, cut or missing comes again from the WAL. partition_recovery.py finds
            what is whole.
            On disk: the lines, the index. In memory only: State; the checkpoint keeps what it has to.
            A sealed segment is synced by the next checkpoint, not by the roll: no message waits for that.
"""

import os
from collections import namedtuple
from collections.abc import Callable, Sequence

from kmq.errors import RetryError
from kmq.log import reader, segment, wal
from kmq.log.damage import DamageError
from kmq.log.disk import AppendFile, Buffer, WaitForRoom, point_symlink, with_room
from kmq.log.index import IndexWriter, last_before, line_end
from kmq.log.lines import count_lines
from kmq.log.segment import Limits, Segment


class State:
    """What is known of a partition log: `end_offset` records up to `last_seq`; `size` bytes from record `start` on.

    `sealed` are all segments except the last one, which begins with record `base`.
    """

    __slots__ = ("base", "end_offset", "last_seq", "sealed", "size", "start")

    def __init__(self, end_offset: int = 0, last_seq: int = 0, size: int = 0, start: int = 0) -> None:
        self.end_offset, self.last_seq, self.size, self.start = end_offset, last_seq, size, start
        self.base = start
        self.sealed: Sequence[Segment] = ()  # most have none: one object less for each of many cold partitions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def values(self) -> tuple[int, int, int, int]:
        """What the checkpoint keeps."""
        return self.end_offset, self.last_seq, self.size, self.start

    @property
    def active_bytes(self) -> int:
        return self.size - sum(each.size for each in self.sealed)

    def holds(self, segments: list[Segment]) -> None:
        """These are the files."""
        *self.sealed, active = segments
        self.base = active.first

    def retire(self, count: int) -> list[Segment]:
        """Stop counting the oldest `count` segments; returns them, to be deleted when the checkpoint says so too."""
        gone, self.sealed = list(self.sealed[:count]), list(self.sealed[count:])
        self.size -= sum(each.size for each in gone)
        self.start = self.sealed[0].first if self.sealed else self.base
        return gone

    def keep(self, last: Segment) -> None:
        """Count this as sealed again: a segment with the last record alone, of those that were retired (remnant.py)."""
        self.sealed, self.size, self.start = [last], last.size, last.first


EMPTY = State()


def directory_of(data: str, topic: str, partition: int) -> str:
    return f"{data}/topics/{topic}/{partition}"


class PartitionPlace(namedtuple("PartitionPlace", ("data", "topic", "number", "link"), defaults=("",))):
    """Which partition of which data directory. `link`: the name of its symlink; "" for none."""

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
        self, place: PartitionPlace, state: State, wait_for_room: WaitForRoom, limits: Limits | None = None
    ) -> None:
        """`state` stays the caller's: it outlives this object while the partition is cold."""
        self._place, self._wait_for_room = place, wait_for_room
        self.topic, self.number, self.state = place.topic, place.number, state
        self.unsynced: list[str] = []  # files sealed since the last checkpoint
        self._limits = limits or Limits()
        self._directory = place.directory
        self._file: AppendFile | None = None
        self._index: IndexWriter | None = None
        self._first_ts = 0  # of the active segment

    @property
    def path(self) -> str:
        """Of the active segment."""
        return f"{self._directory}/{segment.name(self.state.base)}"

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, warn: Callable[..., None], was_cut: bool = False, check: Callable[[], None] = lambda: None) -> None:
        """Open the file, making what is missing: directory, log, symlink.

        Raises DamageError where it differs from its index. `was_cut`: it does, and the index is to be cut as well.
        """
        self._warn = warn
        path = self.path
        with_room(path, self._wait_for_room, lambda: os.makedirs(self._directory, exist_ok=True))
        self._file = AppendFile(path, self._wait_for_room)
        expected = self.state.active_bytes
        if self._file.size != expected:  # changed while it was closed; to append now would hide the gap for ever
            raise RetryError(f"{path}: changed by somebody else (expected {expected} bytes)")
        self._first_ts = segment.stamp(os.pread(self._file.fd, 64, 0))[1]
        with_room(path, self._wait_for_room, lambda: self._point_link(path))
        if self._index is None:
            try:  # to append to a damaged log would give the damage a crc of its own
                if expected and not was_cut:
                    reader.indexed_end(path, self.state.base, by_seq=False)
            except DamageError:
                self.close()
                raise
            self._index = IndexWriter(segment.index_path(path), self._wait_for_room)
            self._index.resume(self._file.fd, self._file.size, self.state.base, check)

    def _point_link(self, path: str) -> None:
        """Let the symlink lead to this segment, unless it leads to another queue."""
        data, name = self._place.data, self._place.link
        if not name:
            return
        link, target = f"{data}/{name}", os.path.relpath(path, data)
        if os.path.islink(link) and os.path.dirname(os.readlink(link)) != os.path.dirname(target):
            self._warn("symlink_taken", symlink=name, topic=self.topic, file=target)
        elif kept := point_symlink(link, target):
            self._warn("set_aside", file=link, now=kept, effect="the symlink is made again")

    def append(self, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        """Append `data`, the `count` lines first_seq…last_seq, less those that the log has already; bytes written."""
        state = self.state
        assert self._file is not None
        if first_seq <= state.last_seq:
            first_seq = state.last_seq + 1
            data = wal.within(bytes(data), first_seq, last_seq)
            count = data.count(b"\n")
        if not data:
            return 0
        if self._file.moved_under_us():
            raise RetryError(f"{self.path}: changed by somebody else (expected {self._file.size} bytes)")
        written = len(data)
        dense = last_seq - first_seq + 1 == count
        next_ts = segment.stamp(data)[1]
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
            first_seq, next_ts = segment.stamp(data)
            state.last_seq = first_seq - 1  # at most: the seqs written so far are lower
        self._write(data, count, first_seq if dense else 0, next_ts)
        state.last_seq = last_seq
        return written

    def _write(self, data: Buffer, count: int, first_seq: int, first_ts: int) -> None:
        """`first_seq`: of `data`, where its seqs follow one another."""
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
        """Seal the active segment and begin a new one. Until that is whole, all stays as it was: a wait may give up."""
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
        """Use other limits from now on (µs). An open log whose active segment is over them rolls at once."""
        self._limits = limits
        if self._file is not None and self._file.size and limits.is_full(self._file.size, self._first_ts, now_ts):
            self.roll()

    def seal(self) -> None:
        """The active segment is complete."""
        assert self._index is not None
        self._index.seal()
        self.unsynced += [self.path, self._index.path]

    def note_open_block(self) -> None:
        """Once a second while there are writes: let the index speak of the block that is still open."""
        if self._index is not None:
            self._index.note_open()
            self._index.flush()

    def is_unlinked(self) -> bool:
        return self._file is not None and self._file.is_unlinked()

    def close(self) -> None:
        """Give the descriptor back; state and index stay in memory."""
        if self._file is not None:
            self._file.close()
            self._file = None


def end_offset(data: str, topic: str, partition: int) -> tuple[int, int]:
    """(end offset, bytes) of a partition as its files are now; read-only, may be read while the router writes."""
    segments = segment.survey(directory_of(data, topic, partition))
    if not segments:
        return 0, 0
    active = segments[-1]
    fd = os.open(active.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, position = last_before(segment.index_path(active.path), active.size, 1 << 62)
        if offset < 0:
            offset, position = active.first, 0
        return offset + count_lines(fd, position, active.size), sum(each.size for each in segments)
    finally:
        os.close(fd)
