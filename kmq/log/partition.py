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
from kmq.log import gaps, reader, rows, segment, wal
from kmq.log.damage import DamageError
from kmq.log.gaps import Forks, Gap, Gaps
from kmq.log.index import IndexWriter, line_end
from kmq.log.segment import Limits, Segment
from kmq.message import record


class PartitionState:
    """What the router knows of a partition log: its extent and its sealed segments.

    The next record gets `end_offset`; the last one has `last_seq`. The files hold `size` bytes and begin with record
    `start`. `sealed` are all segments except the active one, which begins with record `base`. `gaps` lie between segments.
    """

    __slots__ = ("base", "end_offset", "gaps", "last_seq", "sealed", "size", "start")

    def __init__(self, end_offset: int = 0, last_seq: int = 0, size: int = 0, start: int = 0) -> None:
        self.end_offset, self.last_seq, self.size, self.start = end_offset, last_seq, size, start
        self.base = start
        self.sealed: Sequence[Segment] = ()  # most partitions have none; a list for each would cost memory
        self.gaps: Gaps = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionState) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def values(self) -> tuple[int, int, int, int]:
        """Return what the checkpoint keeps."""
        return self.end_offset, self.last_seq, self.size, self.start

    @property
    def active_bytes(self) -> int:
        return self.size - sum(part.size for part in self.sealed)

    def sealed_ends(self) -> list[int]:
        """Return the end offset of each sealed segment."""
        return gaps.ends([part.first for part in self.sealed[1:]] + [self.base] * bool(self.sealed), self.gaps)

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

    def prepend(self, copy: Segment) -> None:
        """Count `copy` as the first sealed segment: the end of the last retired one (remnant.py), or what was fetched."""
        self.sealed = [copy, *self.sealed]
        self.size, self.start = self.size + copy.size, copy.first


EMPTY = PartitionState()


def directory_of(data: str, topic: str, partition: int) -> str:
    return f"{data}/topics/{topic}/{partition}"


class PartitionPlace(namedtuple("PartitionPlace", ("data", "topic", "number", "link", "life"), defaults=("", 0))):
    """A partition of a topic in a data directory. `link`: the name of its symlink, or "" if it has none.

    `life`: the from_seq of the topic, for the file `tier`.
    """

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
        "_forks",
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
        self,
        place: PartitionPlace,
        state: PartitionState,
        wait_for_room: WaitForRoom,
        limits: Limits | None = None,
        forks: Forks = (),
    ) -> None:
        """Take a log that is not open yet. `state` belongs to the caller, and outlives this object.

        `forks`: of the data directory. An append leaves a gap before the first record after a fork.
        """
        self._place, self._wait_for_room, self._forks = place, wait_for_room, forks
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
        if self.state.gaps and not os.path.exists(rows.path_of(self._directory)):
            self._write_gaps(self.state.gaps)
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
        elif backup := point_symlink(link, target):
            self._warn("set_aside", file=link, now=backup, effect="the symlink is made again")

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
        for fork in self._forks:
            if state.end_offset < fork.offset and last_seq >= fork.seq:
                return self._append_over(fork.seq, fork.offset, bytes(data), first_seq, last_seq)
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

    def _append_over(self, seq: int, offset: int, data: bytes, first_seq: int, last_seq: int) -> int:
        """Append lines of which those from `seq` on belong at `offset` or after it."""
        before, written = wal.within(data, first_seq, seq - 1), 0
        if before:
            written = self.append(before, before.count(b"\n"), first_seq, record.seq_of(wal.last_line(before)))
        self.skip_to(offset)
        after = wal.within(data, seq, last_seq)
        return written + self.append(after, after.count(b"\n"), record.seq_of(after), last_seq)

    def skip_to(self, offset: int) -> None:
        """Leave a gap: the next record gets `offset`. Call it on an open log that ends before that.

        An active segment without records goes: readers would take it for one that has lost its records.
        """
        state, file = self.state, self._file
        assert file is not None
        earlier = [gap for gap in state.gaps if gap.to < offset and gap.first < state.end_offset]
        # Two forks without a record between them leave one gap.
        first = earlier.pop().first if earlier and earlier[-1].to == state.end_offset else state.end_offset
        found = (*earlier, Gap(first, offset))
        self._write_gaps(found)
        empty = None if file.size else Segment(state.base, file.path, 0)
        self.roll(first=offset)
        if empty is not None:
            gone = empty.path, segment.index_path(empty.path)
            self.unsynced = [each for each in self.unsynced if each not in gone]
            state.sealed = state.sealed[:-1]
            state.start = state.sealed[0].first if state.sealed else offset
            segment.remove([empty])

    def _write_gaps(self, found: Gaps) -> None:
        path, life = rows.path_of(self._directory), self._place.life
        with_room(path, self._wait_for_room, lambda: gaps.write(self._directory, life, found))
        self.state.gaps = found

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

    def roll(self, wait_for_room: WaitForRoom | None = None, first: int | None = None) -> None:
        """Seal the active segment and begin a new one, at the end of the log or, after a gap, at offset `first`.

        The log stays as it was until the new segment is complete, so `wait_for_room` may raise.
        """
        state, file, wait = self.state, self._file, wait_for_room or self._wait_for_room
        assert file is not None and self._index is not None
        self._index.seal(wait)
        following = state.end_offset if first is None else first
        path = f"{self._directory}/{segment.name(following)}"
        segment.begin(path, wait, lambda: with_room(path, wait, lambda: self._point_link(path)))
        self.seal()
        file.close()
        state.sealed = [*state.sealed, Segment(state.base, file.path, file.size)]
        state.base = state.end_offset = following
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
    return segment.end_of(segments[-1]), sum(part.size for part in segments)
