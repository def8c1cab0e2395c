"""The write-ahead log: every message once, in order, numbered without a gap, on disk before it is acknowledged.

    append/00000000000000000001.log                     a segment: the records from seq 1 on
    2|1795276288.490144|orders|1795276288.485765||b      one record; the next one has seq 3

Owner       durability is the only writer (lock append/.owner). Any process may read.
Invariant   A record is acknowledged and shown to the router only after `commit` returned. Under KMQ_FSYNC=always
            `commit` returns after the fdatasync that covers the record. Under `interval:<ms>` and `never` an
            acknowledgement means "written to the page cache": the record survives every kill, not a power cut.
            `synced_seq` is never above the last synced record. A sealed segment, its index and their names are synced
            before the next segment gets a record. Seqs are dense, except for those that dropped.log names.
Crash       inside a line    the next open cuts the torn end. No record in it had been acknowledged;
            power cut        the unsynced end may be torn or NUL (ext4): it is cut back to the last whole, good line;
            inside a roll    the new segment is empty or missing; append.log may still lead to the old segment;
            inside a removal an index without a log may be left, which is never read: of each segment the log is removed
                             before the index, and the oldest segment first. remnant.py describes crashes while all
                             segments are replaced by their last record;
            failed fsync     the process ends. The next start cuts the unsynced records and appends them again from the
                             ring, into a new segment and through a new descriptor. Nothing is appended to the old file;
            ring gone too    (the pod restarted on the same kernel) the page cache may show a tail that a failed fsync
                             has lost. The tail is written again in place, byte for byte, and synced before anything is
                             acknowledged: a rewritten page is dirty again, whatever happened to it before. A copy in
                             a new segment would need a second file and leave `append.log` short after a restart.
                             A crash in the middle changes nothing, because the bytes are the same.
Not covered Damage in the middle (a flipped bit, a zeroed page) is not detected here, and nothing is cut there.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kmq.config.values import MIB
from kmq.errors import CorruptError, RetryError
from kmq.files import (
    FULL,
    AppendFile,
    Buffer,
    WaitForRoom,
    before_nuls,
    find_nul,
    find_tail,
    give_up,
    point_symlink,
    replace_file,
    sync_directory,
    with_room,
)
from kmq.log import dropped, identity, lost_index, reader, remnant, segment, topics
from kmq.log.damage import DamageError
from kmq.log.index import IndexWriter, last_before
from kmq.log.segment import Limits, Segment, is_stored
from kmq.message import record

# (lines, first seq, count, recv_ts in µs of the last line).
Stored = tuple[Buffer, int, int, int]
_READ_BYTES = 1 << 20
RING_BYTES = 4 * MIB  # default of RB_BYTES
RETIRED_AT_ONCE = 8  # segments that are deleted between two commits: some milliseconds, on a busy disk some ten
COPIED = "tier/wal"  # below the data directory: up to which seq KMQ_TIER has the WAL, and of which lineage
_LAX_BYTES = 64 << 20  # without a sync per commit: how far back from the end a power cut may have left NULs


def torn_bytes(ring_bytes: int) -> int:
    """Return how many bytes after the last record a kill or a power cut may leave torn: a group commit has no more."""
    return ring_bytes + 2 * MIB


def last_stored(data: str) -> tuple[int, int]:
    """Return (seq, recv_ts in µs) of the last whole record of the WAL, or (0, 0) if the WAL is empty. Read-only.

    Raises CorruptError if the last segment does not follow the segment before it, because it was put there by mistake.
    """
    segments = segment.listing(f"{data}/append")
    last: tuple[int, int] | None = None
    behind = (0, "")  # first seq and path of the next segment
    for first, path in reversed(segments):
        with contextlib.suppress(FileNotFoundError):  # retention has just deleted it
            begins, ended = _ends(path)
            if ended is not None and behind[1]:
                _check_follows(data, ended[0], *behind)
                if last is not None:
                    break
            last = last or ended
            behind = begins or first, path  # an empty segment begins at the seq in its name
    return last or (segments[-1][0] - 1 if segments else 0, 0)


def last_numbered(data: str) -> tuple[int, int]:
    """Return (last seq, recv_ts of the last record in µs) of the WAL; seqs named as dropped or lost count too."""
    seq, recv_ts = last_stored(data)
    return max([seq, *(gone.last for gone in dropped.accounted(data))]), recv_ts


def _ends(path: str) -> tuple[int, tuple[int, int] | None]:
    """Return (seq of the first record or 0, (seq, recv_ts) of the last record or None) of a segment."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = find_tail(fd, os.fstat(fd).st_size, is_stored)
        return record.stamp(os.pread(fd, 64, 0))[0], record.parse_stored(tail.last)
    finally:
        os.close(fd)


def _check_follows(data: str, seq: int, first: int, path: str) -> None:
    """Raise CorruptError unless each seq between `seq`, a segment's last, and `first` is named as dropped or lost."""
    if first <= seq or dropped.without(seq + 1, first - 1, dropped.accounted(data)):
        raise CorruptError(
            f"{path}: begins with seq {first}, but the segment before it ends with seq {seq}: the file was put there by"
            " mistake, or the records between them are lost; run kmq verify --repair"
        )


class Wal:
    """The writing end. After open, the file ends with the whole record `last_seq`."""

    def __init__(
        self,
        data: str,
        wait_for_room: WaitForRoom,
        unindexed_bytes: int,
        limits: Limits | None = None,
        fsync: float = 0.0,
        check: Callable[[], None] = lambda: None,
        on_sync: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Open the WAL of `data`: cut a torn end, and write lost indexes again (`restored`; not of `misplaced`).

        `unindexed_bytes`: how many bytes at the end are searched for NULs; must cover at least one group commit.
        `fsync`: seconds between two syncs; 0: every commit; FOREVER: only at a roll and at the end.
        `wait_for_room` is called while the disk is full, also inside an append; it may call `retain`.
        `check` is called repeatedly while a missing index is rebuilt, `on_sync` with the time that an fdatasync took.
        """
        self.data = data
        self.directory = f"{data}/append"
        self._wait_for_room, self._on_sync = wait_for_room, on_sync
        self.limits = limits or Limits()  # may be replaced; in force from the next `roll_if_over` and `retain` on
        self._fsync = fsync
        self._synced_at = time.monotonic()
        settle(self.directory)
        *self._sealed, active = segment.survey(self.directory) or [Segment(1, f"{self.directory}/{segment.name(1)}", 0)]
        self.restored, self.misplaced = self._restore_indexes([*self._sealed, active], check)
        self.cut_bytes = 0
        if active.size:
            reader.check_place(active.path, active.first, by_seq=True)
        self._open_segment(active.first, active.path)
        if not self._file.size:
            self._index.begin()
        self._point_link(active.path, self._wait_for_room)
        self._cut_tail(unindexed_bytes)
        self.last_seq, self.last_ts = last_stored(data)
        self.synced_seq = 0  # not known yet
        self._first_ts = record.stamp(os.pread(self._file.fd, 64, 0))[1]
        self._index.resume(self._file.fd, self._file.size, active.first, check)

    def _restore_indexes(
        self, segments: Sequence[Segment], check: Callable[[], None]
    ) -> tuple[list[str], list[DamageError]]:
        """Write the lost indexes of sealed segments again. Return them, and why others may not have one."""
        restored: list[str] = []
        misplaced: list[DamageError] = []
        for number, part in enumerate(segments[:-1]):
            if not part.size or lost_index.is_whole(part.path):
                continue
            contradiction = partial(lost_index.queue_contradiction, self.data, topics.table(self.data))
            try:
                lost_index.check(segments, number, True, segments[number + 1].first, contradiction, check)
                restored.append(lost_index.write(part, True, self._wait_for_room, check))
                _sync_path(restored[-1])
            except DamageError as err:
                misplaced.append(err)
        return restored, misplaced

    def _open_segment(self, first: int, path: str) -> None:
        self._file = AppendFile(path, self._wait_for_room)
        self._index = IndexWriter(segment.index_path(path), self._wait_for_room, by_seq=True)
        self._first, self._first_ts = first, 0

    def _point_link(self, path: str, wait_for_room: WaitForRoom) -> None:
        # Sync the directory even if the file existed: the process that made it may have died before its own sync. Sync
        # before the link is made, because the link must not lead to a file that a power cut removes.
        sync_directory(self.directory)
        link, target = f"{self.data}/append.log", os.path.relpath(path, self.data)
        self.set_aside = with_room(link, wait_for_room, lambda: point_symlink(link, target))
        sync_directory(self.data)

    def _cut_tail(self, unindexed_bytes: int) -> None:
        # A file system may leave any number of NULs at the end. They hold nothing, so they do not count: kmq verify
        # calls them a torn end too (scan.py).
        file = self._file
        size = before_nuls(file.fd, file.size)
        floor = 0
        if self._fsync:  # the index may have reached the disk before the log
            unindexed_bytes = max(unindexed_bytes, _LAX_BYTES)
        else:  # all that the index covers was synced: a difference there is damage, which must not be cut
            floor = reader.indexed_end(file.path, self._first, by_seq=True)
        floor = max(floor, size - unindexed_bytes)
        nul = find_nul(file.fd, floor, size)
        end = size if nul < 0 else nul
        tail = find_tail(file.fd, end, is_stored)
        if end - tail.size > unindexed_bytes:
            raise CorruptError(f"{file.path}: no good record in the last {unindexed_bytes} bytes before byte {end}")
        self.cut_bytes = file.size - tail.size
        if self.cut_bytes:
            file.truncate(tail.size)

    @property
    def path(self) -> str:
        return self._file.path

    def append(self, blocks: Sequence[Stored]) -> None:
        """Write blocks of lines and note them in the index."""
        self.index(blocks, self.write(blocks))

    def write(self, blocks: Sequence[Stored]) -> int:
        """Append blocks in one write, rolling first if that is due; not durable. Return the byte at which they begin.

        `index` has to follow, before the next write and while the data is valid.
        """
        first_ts = blocks[0][3]
        if self.limits.is_full(self._file.size, self._first_ts, first_ts):
            self.roll()
        file = self._file
        if file.moved_under_us():  # by a second owner (the lock file was deleted): never write between its records
            raise RetryError(f"{file.path}: changed by another process (expected {file.size} bytes)")
        position = file.size
        file.append([data for data, *_ in blocks], sum(len(data) for data, *_ in blocks))
        if not position:
            self._first_ts = first_ts
        _, first_seq, count, self.last_ts = blocks[-1]
        self.last_seq = first_seq + count - 1
        return position

    def index(self, blocks: Sequence[Stored], position: int) -> None:
        """Note in the index what `write` has put at `position`. It may lag behind the log: a start completes it."""
        for data, first_seq, *_ in blocks:
            self._index.extend(data, position, first_seq, first_seq)
            position += len(data)
        self._index.flush()

    def commit(self) -> None:
        """Make everything appended as durable as KMQ_FSYNC says: the commit point. On RetryError the process must end.

        Call it also when nothing new was appended: under `interval:<ms>` the sync of earlier records may be due by now.
        """
        if self.synced_seq < self.last_seq and time.monotonic() - self._synced_at >= self._fsync:
            self.sync()

    def sync(self) -> None:
        """Sync everything appended. On RetryError the process must end."""
        begun = time.monotonic()
        self._file.sync()
        self._on_sync(time.monotonic() - begun)
        self._index.flush()
        self.synced_seq, self._synced_at = self.last_seq, time.monotonic()

    def note_open_block(self) -> None:
        """Write a provisional index line for the block still open; call once a second while there are writes."""
        self._index.note_open()
        self._index.flush()

    def cut_after(self, seq: int) -> None:
        """Cut every record after `seq`: none was acknowledged, and the ring still holds them all."""
        keep = end_of(seq, self._index.path, self._file.fd, self._file.size)
        self._index.cut(keep)  # index first: a framer that reads now would take the missing records for damage
        self._file.truncate(keep)
        self.last_seq, self.last_ts = last_stored(self.data)
        self._index.resume(self._file.fd, keep, self._first)

    def roll(self, wait_for_room: WaitForRoom | None = None) -> None:
        """Seal the active segment and begin a new one.

        The WAL stays as it was until the new segment is complete, so `wait_for_room` may raise.
        """
        wait = wait_for_room or self._wait_for_room
        self.sync()  # also after a cut: a power cut must not bring back the records that were cut
        self._index.seal(wait)
        old = Segment(self._first, self._file.path, self._file.size)
        path = f"{self.directory}/{segment.name(self.last_seq + 1)}"
        if old.size:
            _sync_path(self._index.path)
        else:  # the new segment has the same name, and a file that failed is not used again, not even an empty one
            segment.remove([old])
        segment.begin(path, wait, lambda: self._point_link(path, wait))
        self._file.close()
        self._sealed += [old] if old.size else []
        self._open_segment(self.last_seq + 1, path)

    def roll_if_over(self, now_s: float, lacks_room: bool = False) -> bool:
        """Roll if the active segment is over its limits, even if it is idle; call now and then, not inside `append`.

        `lacks_room`: the disk or the quota is full. Return True if the disk had no room for the roll: then the active
        segment stays.
        """
        is_over = self.limits.is_over(self._file.size, lambda: self.last_ts, now_s, lacks_room)
        if self.last_seq <= self._first or not is_over:
            return False  # a roll would free nothing, because the last record of a log always stays
        try:
            self.roll(give_up)
        except OSError as err:
            if err.errno not in FULL:
                raise
            return not remnant.release_spare(self.data) or self.roll_if_over(now_s, lacks_room)
        return False

    def retain(self, needed_after: Callable[[], int], now_s: float) -> list[Segment]:
        """Delete sealed segments that are too old or too many, the oldest RETIRED_AT_ONCE at most, and return them.

        Call it about once a second, while waiting for room, and again soon if so many were deleted. If all segments are
        due, the last record of the last segment stays. `needed_after` returns the seq up to which the WAL is no longer
        needed; it is called only if a segment is due.
        """
        sealed = self._sealed
        due = self.limits.expired(sealed, self._file.size, now_s, RETIRED_AT_ONCE)
        is_all = due == len(sealed) and not self._file.size
        if is_all and sealed and sealed[-1].first == self.last_seq:
            due -= 1  # it holds only the last record, from which the next seq and time follow
        if due <= 0:
            return []
        ends = [*(each.first for each in sealed[1 : due + 1]), self._first]  # a segment ends where the next one begins
        free = needed_after()
        gone = [each for each, end in zip(sealed[:due], ends, strict=False) if end <= free + 1]
        last = gone.pop() if is_all and len(gone) == len(sealed) else None
        segment.remove(gone)
        del sealed[: len(gone)]
        return [*gone, last] if last and self._shrink_to_record(last) else gone

    def make_room(self, needed_after: Callable[[], int], nbytes: int) -> list[Segment]:
        """Delete the oldest sealed segments that KMQ_TIER has, about `nbytes`, and return them. For a disk short of room.

        At most RETIRED_AT_ONCE. What is needed after `needed_after()` stays, and the last record of the log.
        """
        free = min(copied_seq(self.data), needed_after())
        most, gone = min(RETIRED_AT_ONCE, len(self._sealed) - (not self._file.size)), 0
        ends = [*(each.first for each in self._sealed[1:]), self._first]
        while gone < most and ends[gone] <= free + 1 and nbytes > 0:
            nbytes, gone = nbytes - self._sealed[gone].size, gone + 1
        found = self._sealed[:gone]
        segment.remove(found)
        del self._sealed[:gone]
        return found

    def _shrink_to_record(self, last: Segment) -> bool:
        """Replace the only segment with records by its last record; return False if that is not possible now."""
        copy = remnant.lay_out(self.data, last, self.last_seq, by_seq=True)
        if copy is None:
            return False
        for path in remnant.files(copy):
            _sync_path(path)
        sync_directory(self.directory)
        segment.remove([last])
        remnant.settle(self.directory)
        self._sealed = [copy]
        return True

    def rewrite_after(self, seq: int) -> None:
        """Write all records after `seq` again in place, as `rewrite_tail` does."""
        size = self._file.size
        self.rewrite_tail(size - end_of(seq, self._index.path, self._file.fd, size))

    def rewrite_tail(self, nbytes: int) -> None:
        """Write the last `nbytes` again in place, so that the next sync covers them (see Crash: ring gone too)."""
        start = max(0, self._file.size - nbytes)
        fd = os.open(self._file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for at in range(start, self._file.size, _READ_BYTES):
                data = os.pread(fd, min(_READ_BYTES, self._file.size - at), at)
                if os.pwrite(fd, data, at) != len(data):
                    raise RetryError(f"{self._file.path}: short write at byte {at}")
        except OSError as err:
            raise RetryError(f"{self._file.path}: cannot be written: {err.strerror}") from err
        finally:
            os.close(fd)

    def close(self) -> None:
        """Sync everything, whatever KMQ_FSYNC says, and close the file."""
        if self.synced_seq < self.last_seq:
            self.sync()
        self.note_open_block()
        with contextlib.suppress(FileNotFoundError):  # it is written again at the next start
            _sync_path(self._index.path)
        self._file.close()


def copied_seq(data: str) -> int:
    """Return the seq up to which KMQ_TIER has the WAL of this lineage, as kmq.tier has noted it; 0 without a note."""
    try:
        with open(f"{data}/{COPIED}", "rb") as file:
            seq, _, lineage = file.read().partition(b" ")
    except FileNotFoundError:
        return 0
    return int(seq) if seq.isdigit() and lineage == f"{identity.lineage(data)}\n".encode() else 0


def note_copied(data: str, seq: int) -> None:
    """Note that KMQ_TIER has the WAL up to `seq`: a commit names it. For kmq.tier."""
    replace_file(f"{data}/{COPIED}", f"{seq} {identity.lineage(data)}\n".encode())


def settle(directory: str) -> None:
    """Finish a retention that a kill interrupted, also before the copy of the last record got its name (remnant.py)."""
    remnant.settle(directory)
    segment.settle(directory)


def end_of(seq: int, index: str, fd: int, size: int) -> int:
    """Return the byte at which the good records up to `seq` end, in a segment of `size` bytes."""
    _, position = last_before(index, size, seq)
    end = position
    for at, line in _lines_from(fd, position, size):
        if not 0 < record.stamp(line)[0] <= seq:
            break
        end = at + len(line) + 1
    return end


def _sync_path(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as err:
        raise RetryError(f"{path}: fsync failed: {err.strerror}") from err
    finally:
        os.close(fd)


def _lines_from(fd: int, position: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, line without newline) of the whole lines in [position, size)."""
    rest = b""
    while position + len(rest) < size:
        data = rest + os.pread(fd, _READ_BYTES, position + len(rest))
        end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n")[:-1]:
            yield position, line
            position += len(line) + 1
        rest = data[end:]


first_seq, read = reader.first_seq, reader.read  # most callers of this module need them
last_line, within = segment.last_line, segment.within
