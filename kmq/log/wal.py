"""The write-ahead log: every message once, in order, numbered without a gap, on disk before it is acknowledged.

Owner       durability is the only writer (lock append/.owner); anybody may read.
Invariant   A record is acknowledged and shown to the router only after `commit` returned. Under KMQ_FSYNC=always that
            is after the fdatasync that covers it; under `interval:<ms>` and `never` an acknowledgement means "written
            to the page cache": it survives every kill, not a power cut. `synced_seq` never says more than what was
            synced. Sealed segments are synced, with their index and their names, before the next one has a record.
            Seqs are dense, except for what dropped.log names.
Crash       inside a line    the torn end is cut at open; nothing that is cut had been acknowledged;
            power cut        the unsynced end may be torn or NUL (ext4): cut back to the last whole, good line;
            inside a roll    the new segment is empty, or is not there; append.log may still lead to the old one;
            inside a removal an index without a log, which nobody reads; the log goes first, and oldest first. Of the
                             last record see remnant.py;
            failed fsync     the process ends; what it had not synced is cut and appended again from the ring, into a
                             new segment and through a new descriptor. The old file is not trusted with another byte;
            ring gone too    (the pod restarted on the same kernel) the page cache may show a tail that a failed fsync
                             has lost. It is written again in place, byte for byte, and synced before anything is
                             acknowledged: a rewritten page is dirty again, whatever became of it before. In place,
                             and not as a copy in a new segment: that keeps `append.log` whole over every restart and
                             needs no second file, and a crash in the middle changes nothing because the bytes are the
                             same.
Not covered damage in the middle (a flipped bit, a zeroed page) is not looked for here, and never cut at.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kmq import record
from kmq.errors import CorruptError, RetryError
from kmq.log import dropped, lines, reader, remnant, segment, spare
from kmq.log.disk import (
    FULL,
    AppendFile,
    Buffer,
    WaitForRoom,
    find_nul,
    find_tail,
    give_up,
    point_symlink,
    sync_directory,
    with_room,
)
from kmq.log.index import IndexWriter, last_before
from kmq.log.segment import Limits, Segment

_READ_BYTES = 1 << 20
_LAX_BYTES = 64 << 20  # not synced each time: how far back from the end a power cut may have left NULs


def _is_stored(line: bytes) -> bool:
    return record.parse_stored(line) is not None


def last_stored(data: str) -> tuple[int, int]:
    """(seq, recv_ts in µs) of the last whole record of the WAL; (0, 0) of an empty one. Read-only.

    Raises CorruptError where the last segment does not continue where the one before it ends: it belongs elsewhere.
    """
    segments = segment.listing(f"{data}/append")
    last: tuple[int, int] | None = None
    behind = (0, "")  # the segment behind: its first seq and its path
    for first, path in reversed(segments):
        with contextlib.suppress(FileNotFoundError):  # retention was faster
            begins, ended = _ends(path)
            if ended is not None and behind[1]:
                _check_follows(data, ended[0], *behind)
                if last is not None:
                    break
            last = last or ended
            behind = begins or first, path  # one without a record yet begins with what its name says
    return last or (segments[-1][0] - 1 if segments else 0, 0)


def _ends(path: str) -> tuple[int, tuple[int, int] | None]:
    """(seq of the first record or 0, (seq, recv_ts) of the last one or None) of a segment."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = find_tail(fd, os.fstat(fd).st_size, _is_stored)
        return segment.stamp(os.pread(fd, 64, 0))[0], record.parse_stored(tail.last)
    finally:
        os.close(fd)


def _check_follows(data: str, seq: int, first: int, path: str) -> None:
    """Raise CorruptError unless each seq between `seq`, the end of a segment, and `first` is accounted for."""
    if first <= seq or dropped.without(seq + 1, first - 1, dropped.accounted(data)):
        raise CorruptError(
            f"{path}: begins with seq {first}, but the log before it ends with seq {seq}: put there by mistake, or what"
            " lies between is lost; run kmq verify --repair"
        )


class Wal:
    """The writing end. After open, the file ends with a whole record and `last_seq` says which."""

    def __init__(
        self,
        data: str,
        wait_for_room: WaitForRoom,
        unindexed_bytes: int,
        limits: Limits | None = None,
        fsync: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`unindexed_bytes`: how far back from the end NULs are looked for, at most; one group commit and more.

        `fsync`: seconds between two syncs; 0: every commit; FOREVER: only at a roll and at the end.
        `check` is called again and again while a missing index is made anew.
        """
        self.data = data
        self.directory = f"{data}/append"
        self._wait_outside = wait_for_room
        # Called while there is no room, also within an append; at first what a start needs.
        self.while_full: Callable[[], object] = partial(spare.release, data)
        self._limits = limits or Limits()
        self._fsync = fsync
        self._synced_at = time.monotonic()
        _settle(self.directory)
        *self._sealed, active = segment.survey(self.directory) or [Segment(1, f"{self.directory}/{segment.name(1)}", 0)]
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
        self._first_ts = segment.stamp(os.pread(self._file.fd, 64, 0))[1]
        self._index.resume(self._file.fd, self._file.size, active.first, check)

    def _open_segment(self, first: int, path: str) -> None:
        self._file = AppendFile(path, self._wait_for_room)
        self._index = IndexWriter(segment.index_path(path), self._wait_for_room, by_seq=True)
        self._first, self._first_ts = first, 0

    def _wait_for_room(self, path: str) -> None:
        self.while_full()
        self._wait_outside(path)

    def _point_link(self, path: str, wait_for_room: WaitForRoom) -> None:
        # Also for a file that was there: who made it may have ended before this, or by its failure. And before the
        # link, which must not lead to what a power cut takes away.
        sync_directory(self.directory)
        link, target = f"{self.data}/append.log", os.path.relpath(path, self.data)
        self.set_aside = with_room(link, wait_for_room, lambda: point_symlink(link, target))
        sync_directory(self.data)

    def _cut_tail(self, unindexed_bytes: int) -> None:
        file = self._file
        floor = 0
        if self._fsync:  # the disk may have got the index before the log
            unindexed_bytes = max(unindexed_bytes, _LAX_BYTES)
        else:  # what the index speaks of was synced: where that is not as it was, it has been damaged, and is not cut
            floor = reader.indexed_end(file.path, self._first, by_seq=True)
        floor = max(floor, file.size - unindexed_bytes)
        nul = find_nul(file.fd, floor, file.size)
        end = file.size if nul < 0 else nul
        tail = find_tail(file.fd, end, _is_stored)
        if end - tail.size > unindexed_bytes:
            raise CorruptError(f"{file.path}: no good record in the last {unindexed_bytes} bytes before byte {end}")
        self.cut_bytes = file.size - tail.size
        if self.cut_bytes:
            file.truncate(tail.size)

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, blocks: Sequence[tuple[Buffer, int, int, int]]) -> None:
        """Append (lines, first seq, count, recv_ts) blocks in one write, rolling first where due; not yet durable."""
        first_ts = blocks[0][3]
        if self._limits.is_full(self._file.size, self._first_ts, first_ts):
            self.roll()
        file = self._file
        if (
            file.moved_under_us()
        ):  # by a second owner, if somebody deletes the lock file: never write between its records
            raise RetryError(f"{file.path}: changed by somebody else (expected {file.size} bytes)")
        position = file.size
        file.append([data for data, *_ in blocks], sum(len(data) for data, *_ in blocks))
        if not position:
            self._first_ts = first_ts
        for data, first_seq, count, recv_ts in blocks:
            self._index.extend(data, position, first_seq, first_seq)
            position += len(data)
            self.last_seq, self.last_ts = first_seq + count - 1, recv_ts

    def commit(self) -> None:
        """The commit point: everything appended is as durable as KMQ_FSYNC says, or RetryError and the process must
        end.

        Also when nothing new came: what came before may be due by now.
        """
        if self.synced_seq < self.last_seq and time.monotonic() - self._synced_at >= self._fsync:
            self.sync()

    def sync(self) -> None:
        """Everything appended is on disk, or RetryError and the process must end."""
        self._file.sync()
        self._index.flush()
        self.synced_seq, self._synced_at = self.last_seq, time.monotonic()

    def note_open_block(self) -> None:
        """Once a second while there are writes: let the index speak of the block that is still open."""
        self._index.note_open()
        self._index.flush()

    def cut_after(self, seq: int) -> None:
        """Forget every record after `seq`: they were never acknowledged and come again from the ring."""
        keep = self._end_of(seq)
        self._index.cut(keep)  # first: the framer may be reading, and would take what is missing for damage
        self._file.truncate(keep)
        self.last_seq, self.last_ts = last_stored(self.data)
        self._index.resume(self._file.fd, keep, self._first)

    def _end_of(self, seq: int) -> int:
        """Where the records up to `seq` end in the active segment."""
        _, position = last_before(self._index.path, self._file.size, seq)
        end = position
        for at, line in _lines_from(self._file.fd, position, self._file.size):
            if record.seq_of(line) > seq:
                break
            end = at + len(line) + 1
        return end

    def roll(self, wait_for_room: WaitForRoom | None = None) -> None:
        """Seal the active segment and begin a new one. Until that is whole, all stays as it was: a wait may give up."""
        wait = wait_for_room or self._wait_for_room
        self.sync()  # also for what was cut off: it must not come back after a power cut
        self._index.seal(wait)
        old = Segment(self._first, self._file.path, self._file.size)
        path = f"{self.directory}/{segment.name(self.last_seq + 1)}"
        if old.size:
            _sync_path(self._index.path)
        else:  # the new one has the same name; a file that failed is not trusted, not even an empty one
            segment.remove([old])
        segment.begin(path, wait, lambda: self._point_link(path, wait))
        self._file.close()
        self._sealed += [old] if old.size else []
        self._open_segment(self.last_seq + 1, path)

    def roll_if_over(self, now_s: float) -> bool:
        """Roll where the active segment is over its limits, also if nothing comes; call now and then, not within
        `append`.

        True where there was no room for that: then the active segment stays.
        """
        if self.last_seq <= self._first or not self._limits.is_over(self._file.size, lambda: self.last_ts, now_s):
            return False  # retention could take nothing of one record alone
        try:
            self.roll(give_up)
        except OSError as err:
            if err.errno not in FULL:
                raise
            return not spare.release(self.data) or self.roll_if_over(now_s)
        return False

    def retain(self, needed_after: Callable[[], int], now_s: float) -> list[Segment]:
        """Delete the sealed segments that are too old or too many; call about once a second, and while waiting for
        room.

        Returns the deleted segments. Where all are due, the last record of the last one stays.

        `needed_after` says up to which seq the WAL is not needed any more; it is asked only where a segment is due.
        """
        sealed = self._sealed
        due = self._limits.expired(sealed, self._file.size, now_s)
        is_all = due == len(sealed) and not self._file.size
        if is_all and sealed and sealed[-1].first == self.last_seq:
            due -= 1  # it is only the last record: the next seq and time follow from it
        if due <= 0:
            return []
        ends = [*(each.first for each in sealed[1:]), self._first]  # each ends before the next one's first record
        free = needed_after()
        gone = [each for each, end in zip(sealed[:due], ends, strict=False) if end <= free + 1]
        last = gone.pop() if is_all and len(gone) == len(sealed) else None
        segment.remove(gone)
        del sealed[: len(gone)]
        return [*gone, last] if last and self._keep_record_of(last) else gone

    def _keep_record_of(self, last: Segment) -> bool:
        """Replace the only segment with records by its last record; False where that is not possible now."""
        kept = remnant.lay_out(self.data, last, self.last_seq, by_seq=True)
        if kept is None:
            return False
        for path in remnant.files(kept):
            _sync_path(path)
        sync_directory(self.directory)
        segment.remove([last])
        remnant.settle(self.directory, kept.first)
        self._sealed = [kept]
        return True

    def rewrite_after(self, seq: int) -> None:
        """`rewrite_tail` for all records after `seq`."""
        self.rewrite_tail(self._file.size - self._end_of(seq))

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
        """Everything is on disk, whatever KMQ_FSYNC says."""
        if self.synced_seq < self.last_seq:
            self.sync()
        self.note_open_block()
        self._file.close()


def _settle(directory: str) -> None:
    """Finish a retention that a kill interrupted before the copy of the last record got its name (remnant.py)."""
    there = segment.listing(directory)
    remnant.settle(directory, there[0][0] - 1 if there else 0)


def _sync_path(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as err:
        raise RetryError(f"{path}: fsync failed: {err.strerror}") from err
    finally:
        os.close(fd)


def _lines_from(fd: int, position: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(position, line without newline) of the whole lines in [position, size)."""
    rest = b""
    while position + len(rest) < size:
        data = rest + os.pread(fd, _READ_BYTES, position + len(rest))
        end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n")[:-1]:
            yield position, line
            position += len(line) + 1
        rest = data[end:]


first_seq, read = reader.first_seq, reader.read  # what most callers need of it
last_line, within = lines.last_line, lines.within
