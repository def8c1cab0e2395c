"""A partition log: the lines of one partition of one topic, in order, each once.

Owner       the router is the only writer (lock topics/.owner); anybody may read.
Invariant   What is in the segments is a prefix of what the WAL routes here, less what retention took from its front; `last_seq`
            is the seq of its last line, so a line with a seq not above it is there already and is passed over.
            A segment ends with the line that reaches `segment_bytes`, however the lines came, so a log rebuilt from the WAL has
            the same files again (but for cuts by age, which fall between two appends).
Crash       The files are copies: whatever is torn, cut or missing comes again from the WAL. `recover` finds what is whole.
            On disk: the lines, the index. In memory only: State; the checkpoint keeps what it has to.
            A sealed segment is synced by the next checkpoint, not by the roll: no message waits for that.
"""

import os
from collections.abc import Callable, Sequence

from kmq import record
from kmq.errors import CorruptError, RetryError
from kmq.log import index, reader, segment, wal
from kmq.log.disk import AppendFile, Buffer, WaitForRoom, find_nul, find_tail, point_symlink, with_room
from kmq.log.index import IndexWriter, last_before, line_end
from kmq.log.reader import DamageError
from kmq.log.segment import Limits, Segment

_CHUNK = 1 << 20
_LOOK = 4096  # bytes of an unchanged log's end that are looked at on a start


class State:
    """What is known of a partition log: `end_offset` records up to `last_seq`; `size` bytes from record `start` on.

    `sealed` are the segments but the last, which begins with record `base`.
    """

    __slots__ = ("base", "end_offset", "last_seq", "sealed", "size", "start")

    def __init__(self, end_offset: int = 0, last_seq: int = 0, size: int = 0, start: int = 0) -> None:
        self.end_offset, self.last_seq, self.size, self.start = end_offset, last_seq, size, start
        self.base = start
        self.sealed: Sequence[Segment] = ()  # of most: one object less for each of many cold partitions

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
        """Count the oldest `count` segments as gone; returns them, to be deleted when the checkpoint says so too."""
        gone, self.sealed = list(self.sealed[:count]), list(self.sealed[count:])
        self.size -= sum(each.size for each in gone)
        self.start = self.sealed[0].first if self.sealed else self.base
        return gone

    def keep(self, last: Segment) -> None:
        """Of what was retired, count this as sealed again: a segment with the last record alone (remnant.py)."""
        self.sealed, self.size, self.start = [last], last.size, last.first


EMPTY = State()


def directory_of(data: str, topic: str, partition: int) -> str:
    return f"{data}/topics/{topic}/{partition}"


class Gap:
    """Records first…end - 1 are missing, and another segment follows: they lie between these seqs in the WAL."""

    __slots__ = ("end", "first", "first_seq", "into", "last_seq")

    def __init__(self, first: int, end: int, first_seq: int, last_seq: int, into: Segment | None) -> None:
        self.first, self.end, self.first_seq, self.last_seq = first, end, first_seq, last_seq
        self.into = into  # the segment that was cut, which has to be whole again; None where whole files are missing


class Found:
    """What a start finds of a partition whose checkpoint does not fit its files."""

    __slots__ = ("cut", "gaps", "segments", "state", "touched")

    def __init__(self, segments: list[Segment], state: State) -> None:
        self.segments, self.state = segments, state
        self.cut = 0  # bytes taken off: torn, NUL, or behind something that was
        self.gaps: list[Gap] = []
        self.touched: list[Segment] = []  # sealed segments that nobody may have synced


def fits(segments: list[Segment], known: State) -> bool:
    """Whether these files are those that the checkpoint knows: sizes, and one small read at the end."""
    if sum(each.size for each in segments) != known.size:
        return False
    if not segments:
        return known.end_offset == known.start and not known.last_seq  # it never had a record
    last = segments[-1]
    if not last.size:
        return last.first == known.end_offset
    return segments[0].first == known.start and ends_as(last.path, last.size, known.last_seq)


def ends_as(path: str, size: int, last_seq: int) -> bool:
    """Whether the line that ends at byte `size` is record `last_seq`: one small read, which sees a zeroed end."""
    start = max(0, size - _LOOK)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = os.pread(fd, size - start, start)
    finally:
        os.close(fd)
    at = tail.rfind(b"\n", 0, -1) + 1
    if not tail.endswith(b"\n") or 0 in tail[at:]:
        return not size
    return tail.startswith(b"%d|" % last_seq, at) or (not at and len(tail) == _LOOK)


def recover(segments: list[Segment], known: State, high: int, wal_has_rest: bool, start: int) -> Found:
    """What of a log is whole, with the files cut to that.

    A last line whose seq is above `high`, the end of the WAL, was not written by us: it would hide all that is to come.
    `known` is what the checkpoint says was on disk. What goes beyond it may be torn or have NULs in it after a power cut, so
    it is looked through and cut at the first doubt, with all that follows: `wal_has_rest`. Where the files are not what
    `known` says, somebody has damaged them: then nothing is cut but torn ends, and what is missing between two, or in front
    of the first one from record `start` on, is a Gap.
    """
    place = _place_of(known, segments)
    if place is not None and wal_has_rest:
        return _look_through(segments, *place, known, high)
    return _walk(segments, high, start)


def _place_of(known: State, segments: list[Segment]) -> tuple[int, int] | None:
    """(segment, byte) up to which the files are what the checkpoint knows; None where they are not."""
    if not segments or segments[0].first != known.start:
        return None
    at = max(number for number, each in enumerate(segments) if each.first <= known.end_offset)
    floor = known.size - sum(each.size for each in segments[:at])
    if floor == 0:
        return (at, 0) if segments[at].first == known.end_offset else None
    there = 0 < floor <= segments[at].size and ends_as(segments[at].path, floor, known.last_seq)
    return (at, floor) if there else None


def _look_through(segments: list[Segment], at: int, floor: int, known: State, high: int) -> Found:
    found = Found(segments[:at], State(*known.values()))
    state = found.state
    for here in segments[at:]:
        if not floor and here.first != state.end_offset:
            break
        size, lines, last_seq = _measure(here, floor, high, look_for_nul=True)
        state.end_offset += lines
        state.size += size - floor
        state.last_seq = last_seq or state.last_seq
        floor = 0
        found.cut += here.size - size
        found.segments.append(Segment(here.first, here.path, size))
        if size < here.size:
            break
    gone = segments[len(found.segments) :]
    found.cut += sum(each.size for each in gone)
    segment.remove(gone[::-1])  # the last one first: a crash leaves no hole
    found.touched = found.segments[at:-1]
    return found


def _walk(segments: list[Segment], high: int, start: int) -> Found:
    found = Found([], State(start, 0, 0, start))
    state = found.state
    for here in segments:
        is_last = here is segments[-1]
        size, lines, last_seq = _measure(here, 0, high, look_for_nul=is_last)
        found.cut += here.size - size
        if not size and not (is_last and here.first == state.end_offset):
            segment.remove([here])  # it cannot say which records come after it; the next one can
            continue
        if here.first < state.end_offset:
            raise CorruptError(f"{here.path}: the segment before it has records up to {state.end_offset - 1}")
        _check_order(here, state.last_seq)
        if here.first > state.end_offset:
            found.gaps.append(_gap(found, here))
        state.end_offset = here.first + lines
        state.size += size
        state.last_seq = last_seq or state.last_seq
        found.segments.append(Segment(here.first, here.path, size))
    found.touched = found.segments[:-1]
    return found


def _check_order(here: Segment, before: int) -> None:
    """A segment whose records are older than those in front of it is another one: to go on behind it would lose the rest."""
    with open(here.path, "rb") as file:
        seq = segment.stamp(file.read(64))[0]
    if 0 < seq <= before:
        raise CorruptError(
            f"{here.path}: begins with seq {seq}, but the segment before it ends with seq {before}; run kmq verify --repair"
        )


def _gap(found: Found, after: Segment) -> Gap:
    """What is missing in front of `after`."""
    with open(after.path, "rb") as file:
        first_seq = segment.stamp(file.read(64))[0]
    into = found.segments[-1] if found.segments else None
    if into is not None and index.is_whole(into.path):
        into = None
    return Gap(found.state.end_offset, after.first, found.state.last_seq + 1, first_seq - 1, into)


def _measure(here: Segment, floor: int, high: int, look_for_nul: bool) -> tuple[int, int, int]:
    """(size, lines behind `floor`, last seq or 0) of what is whole in a segment, cutting what is not."""

    def is_ours(line: bytes) -> bool:
        found = record.parse_stored(line)
        return found is not None and found[0] <= high

    fd = os.open(here.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        nul = find_nul(fd, floor, here.size) if look_for_nul else -1
        tail = find_tail(fd, here.size if nul < 0 else nul, is_ours, floor)
        if tail.size < here.size:
            os.ftruncate(fd, tail.size)
        offset, position = last_before(segment.index_path(here.path), tail.size, 1 << 62)
        if floor or offset < here.first:
            offset, position = here.first, floor
        lines = offset - here.first + _count_lines(fd, position, tail.size)
        return tail.size, lines, record.seq_of(tail.last) if tail.last else 0
    finally:
        os.close(fd)


def _count_lines(fd: int, position: int, end: int) -> int:
    return sum(os.pread(fd, min(_CHUNK, end - at), at).count(b"\n") for at in range(position, end, _CHUNK))


class PartitionLog:
    """The writing end of one partition. The descriptor is opened when needed and may be closed at any time."""

    __slots__ = (
        "_data",
        "_directory",
        "_file",
        "_first_ts",
        "_index",
        "_limits",
        "_wait_for_room",
        "_warn",
        "link",
        "number",
        "state",
        "topic",
        "unsynced",
    )

    def __init__(
        self,
        data: str,
        topic: str,
        number: int,
        link: str,
        state: State,
        wait_for_room: WaitForRoom,
        limits: Limits | None = None,
    ) -> None:
        """`link`: name of the symlink; "" for none."""
        self._data, self._wait_for_room = data, wait_for_room
        self.topic, self.number, self.link = topic, number, link
        self.state = state  # shared with Queues, which keeps it when this object is cold
        self.unsynced: list[str] = []  # files sealed since the last checkpoint
        self._limits = limits or Limits()
        self._directory = directory_of(data, topic, number)
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

        DamageError where its index says that it was another; `was_cut`: it was, and the index follows.
        """
        self._warn = warn
        path = self.path
        with_room(path, self._wait_for_room, lambda: os.makedirs(self._directory, exist_ok=True))
        self._file = AppendFile(path, self._wait_for_room)
        expected = self.state.active_bytes
        if self._file.size != expected:  # while it was closed; to append now would hide the hole for ever
            raise RetryError(f"{path}: changed by somebody else (expected {expected} bytes)")
        self._first_ts = segment.stamp(os.pread(self._file.fd, 64, 0))[1]
        with_room(path, self._wait_for_room, lambda: self._point_link(path))
        if self._index is None:
            try:  # to go on behind what is damaged would give the damage a crc of its own
                if expected and not was_cut:
                    reader.indexed_end(path, self.state.base, by_seq=False)
            except DamageError:
                self.close()
                raise
            self._index = IndexWriter(segment.index_path(path), self._wait_for_room)
            self._index.resume(self._file.fd, self._file.size, self.state.base, check)

    def _point_link(self, path: str) -> None:
        """Let the symlink lead to this segment, unless it is somebody else's."""
        if not self.link:
            return
        link, target = f"{self._data}/{self.link}", os.path.relpath(path, self._data)
        if os.path.islink(link) and os.path.dirname(os.readlink(link)) != os.path.dirname(target):
            self._warn("symlink_taken", symlink=self.link, topic=self.topic, file=target)
        elif kept := point_symlink(link, target):
            self._warn("set_aside", file=link, now=kept, effect="the symlink is made again")

    def append(self, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        """Append `data`, the `count` lines first_seq…last_seq, less those it has already; bytes written."""
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
            state.last_seq = first_seq - 1  # at most: what is written so far lies below
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
        """Seal the active segment and go on in a new one. Until that is whole, all stays as it was: a wait may give up."""
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

    def take_limits(self, limits: Limits, now_ts: int) -> None:
        """Other limits from now on (µs): an open log whose active segment is over them goes on in a new one at once."""
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
        return offset + _count_lines(fd, position, active.size), sum(each.size for each in segments)
    finally:
        os.close(fd)
