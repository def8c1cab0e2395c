"""A partition log: the lines of one partition of one topic, in order, each once.

Owner       the router is the only writer (lock topics/.owner); anybody may read.
Invariant   What is in the file is a prefix of what the WAL routes here; `last_seq` is the seq of its last line, so a
            line with a seq not above it is there already and is passed over.
Crash       The file is a copy: whatever is torn, cut or missing comes again from the WAL. `recover` finds what is whole.
            On disk: the lines, the index. In memory only: end_offset, last_seq, size; the checkpoint keeps them.
"""

import os
from collections.abc import Callable

from kmq import record
from kmq.errors import RetryError
from kmq.log import segment, wal
from kmq.log.disk import AppendFile, Buffer, WaitForRoom, find_nul, find_tail, point_symlink, with_room
from kmq.log.index import IndexWriter, last_before

_CHUNK = 1 << 20
_LOOK = 4096  # bytes of an unchanged log's end that are looked at on a start


class State:
    """What is known of a partition log: `end_offset` records, the last of them `last_seq`, in `size` bytes."""

    __slots__ = ("end_offset", "last_seq", "size")

    def __init__(self, end_offset: int, last_seq: int, size: int) -> None:
        self.end_offset, self.last_seq, self.size = end_offset, last_seq, size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def values(self) -> tuple[int, int, int]:
        return self.end_offset, self.last_seq, self.size


EMPTY = State(0, 0, 0)


def log_path(data: str, topic: str, partition: int) -> str:
    """Path of the (only, in this version) segment of a partition."""
    return f"{data}/topics/{topic}/{partition}/{segment.name(0)}"


def size_of(path: str) -> int:
    """Size of a log in bytes, -1 where there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def recover(path: str, known: State, high: int) -> tuple[State, int]:
    """What of the log at `path` is whole, and how many bytes were cut off its end.

    A last line whose seq is above `high`, the end of the WAL, was not written by us: it would hide all that is to come.
    `known` is what the checkpoint says was on disk. What goes beyond it may be torn or have NULs in it after a power
    cut, so it is looked through; what falls short of it has been cut by somebody and is counted anew.
    """

    def is_ours(line: bytes) -> bool:
        found = record.parse_stored(line)
        return found is not None and found[0] <= high

    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        floor = known.size if size >= known.size else 0
        nul = find_nul(fd, floor, size)
        tail = find_tail(fd, size if nul < 0 else nul, is_ours, floor)
        if tail.size < size:
            os.ftruncate(fd, tail.size)
        if tail.size == known.size:
            return known, size - tail.size
        last_seq = record.seq_of(tail.last) if tail.last else known.last_seq if floor else 0
        if floor:
            offset, position = known.end_offset, known.size
        else:
            offset, position = last_before(segment.index_path(path), tail.size, 1 << 62)
            offset, position = (offset, position) if offset >= 0 else (0, 0)
        return State(offset + _count_lines(fd, position, tail.size), last_seq, tail.size), size - tail.size
    finally:
        os.close(fd)


def ends_as(path: str, known: State) -> bool:
    """Whether the last line of a log of the known size is the known one: one small read, which sees a zeroed end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = os.pread(fd, _LOOK, max(0, known.size - _LOOK))
    finally:
        os.close(fd)
    if not tail.endswith(b"\n") or 0 in tail:
        return not known.size
    start = tail.rfind(b"\n", 0, -1) + 1
    return tail.startswith(b"%d|" % known.last_seq, start) or (not start and len(tail) == _LOOK)


def _count_lines(fd: int, position: int, end: int) -> int:
    return sum(os.pread(fd, min(_CHUNK, end - at), at).count(b"\n") for at in range(position, end, _CHUNK))


class PartitionLog:
    """The writing end of one partition. The descriptor is opened when needed and may be closed at any time."""

    __slots__ = ("_data", "_file", "_index", "_wait_for_room", "link", "number", "path", "state", "topic")

    def __init__(self, data: str, topic: str, number: int, link: str, state: State, wait_for_room: WaitForRoom) -> None:
        self._data, self._wait_for_room = data, wait_for_room
        self.topic, self.number, self.link = topic, number, link
        self.state = state  # shared with Queues, which keeps it when this object is cold
        self.path = log_path(data, topic, number)
        self._file: AppendFile | None = None
        self._index: IndexWriter | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, warn: Callable[..., None]) -> None:
        """Open the file, making what is missing: directory, log, symlink."""
        with_room(self.path, self._wait_for_room, lambda: self._make_names(warn))
        self._file = AppendFile(self.path, self._wait_for_room)
        if self._file.size != self.state.size:  # while it was closed; to append now would hide the hole for ever
            raise RetryError(f"{self.path}: changed by somebody else (expected {self.state.size} bytes)")
        if self._index is None:
            self._index = IndexWriter(segment.index_path(self.path), self._wait_for_room)
            self._index.resume(self._file.fd, self._file.size, 0)

    def _make_names(self, warn: Callable[..., None]) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        link, target = f"{self._data}/{self.link}", os.path.relpath(self.path, self._data)
        if os.path.lexists(link) and os.readlink(link) != target:
            warn("symlink_taken", symlink=self.link, topic=self.topic, file=target)
        else:
            point_symlink(link, target)

    def append(self, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        """Append `data`, the `count` lines first_seq…last_seq, less those it has already; bytes written."""
        state, file, index = self.state, self._file, self._index
        assert file is not None and index is not None
        if first_seq <= state.last_seq:
            first_seq = state.last_seq + 1
            data = wal.within(bytes(data), first_seq, last_seq)
            count = data.count(b"\n")
        if not data:
            return 0
        if file.moved_under_us():
            raise RetryError(f"{self.path}: changed by somebody else (expected {file.size} bytes)")
        position = file.size
        file.append([data], len(data))
        index.extend(data, position, state.end_offset, first_seq if last_seq - first_seq + 1 == count else 0)
        state.end_offset += count
        state.last_seq, state.size = last_seq, file.size
        return len(data)

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
    """(records, bytes) of a partition as its file is now; read-only, may be read while the router writes."""
    path = log_path(data, topic, partition)
    size = max(0, size_of(path))
    if not size:
        return 0, 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, position = max((0, 0), last_before(segment.index_path(path), size, 1 << 62))
        return offset + _count_lines(fd, position, size), size
    finally:
        os.close(fd)
