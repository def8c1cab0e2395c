"""Log compaction of queues: in sealed segments, a record that a later one of its key replaced becomes a bare newline.

kmq/log/replaced.py plans which records are removed. This module swaps the segments. Meanwhile the router writes,
retains and checkpoints, and readers read; no process sees half a swap.

Owner       topics/ has one owner, the router. A compactor, a process of its own, only lays out whole segments:

                topics/.compacted/<topic>-<partition>-<first>-<end>/log    records first…end-1, without the removed ones
                                                                   /idx    its index

            Each directory appears with one rename and never changes again. The router installs it within a second, or
            after its next start. So no lock is shared with the hot path, and compaction never overlaps with retention
            or a checkpoint, because one thread does all three. The router installs a segment if its topic is declared
            `cleanup = "compact"`, if the next segment still begins at `end`, and if everything sealed is synced; then
            it checkpoints at once. topics/.compacted/.owner admits one compactor at a time.
Invariant   Offsets never change. The first and the last record of a segment always stay. So each file still says by
            itself which seqs it spans and how old it is, and recovery, retention and repair treat it as any other.
            A record is removed only because of later records that are on disk by router.ckpt, so no power cut takes
            those back. A tombstone (empty payload) is removed only when nothing of its key is left, neither in the
            queue nor in the WAL: a queue rebuilt from the WAL would bring back what the tombstone had deleted. So a
            rebuild only undoes compaction.
Readers     A log has two files. While they are swapped there is no index. A reader opens the index, then the log, then
            checks that the index is still the same (segment_reader.py). So it gets a matching pair, or a log without an
            index, which it checks line by line. Files that a reader holds open do not change.
Crash       Each rename is synced before the next. What a kill or power cut leaves after each step of an installation:
              laid out       topics/ is untouched; the next router installs the segment
              index removed  the old log without an index: read line by line, until the segment is installed
              log renamed    the new log without an index: likewise. A start makes an index, because `bytes` in
                             router.ckpt do not match
              index renamed  done; a start reads the new `bytes` from the index
            A layout that was not complete has a hidden name (.new-…), and the next compactor removes it.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator

from kmq.errors import BusyError, CorruptError, KmqError
from kmq.files import make_directory, sync_directory
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, gaps, segment
from kmq.log.index import IndexWriter
from kmq.log.partition import directory_of
from kmq.log.segment_reader import SegmentReader

COMPACTED = ".compacted"  # below topics/
_MAKING = ".new-"
_POLL_S = 0.05
_SYNC_BYTES = 4 << 20  # written between two syncs: one sync of a large file would delay the WAL's
_PLACE = re.compile(r"([^.].*)-(\d+)-(\d+)-(\d+)")  # other names are ignored: they must not stop a router


class Sealed:
    """A sealed segment of a partition: its records first…end-1."""

    __slots__ = ("end", "first", "partition", "topic")

    def __init__(self, topic: str, partition: int, first: int, end: int) -> None:
        self.topic, self.partition, self.first, self.end = topic, partition, first, end

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}-{self.first}-{self.end}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sealed) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]

    def path(self, data: str) -> str:
        return f"{directory_of(data, self.topic, self.partition)}/{segment.name(self.first)}"

    def outbox_path(self, data: str, box: str = COMPACTED) -> str:
        return f"{outbox(data, box)}/{self}"


def outbox(data: str, box: str = COMPACTED) -> str:
    """Return the directory in which compacted segments wait for the router, or those of another `box`."""
    return f"{data}/topics/{box}"


def synced_ends(data: str) -> dict[tuple[str, int], int]:
    """Return (topic, partition) → the offset up to which the queue is on disk, as router.ckpt says."""
    try:
        return {at: state.end_offset for at, state in checkpoint.load(data)[1].items()}
    except (ValueError, LookupError):
        return {}


def sealed(data: str, topic: str, partition: int, end: int) -> list[Sealed]:
    """Return the sealed segments of a partition that end at or before the offset `end`."""
    directory = directory_of(data, topic, partition)
    firsts = [first for first, _ in segment.listing(directory)]
    ends = gaps.ends(firsts[1:], gaps.read(directory) if firsts[1:] else ())
    found = [Sealed(topic, partition, *span) for span in zip(firsts, ends, strict=False)]
    return [candidate for candidate in found if candidate.end <= end]


# --- the compactor's side --------------------------------------------------------------------------------------------


def compactor(data: str, waits: bool = False) -> contextlib.AbstractContextManager[str]:
    """Become the only compactor of a data directory, and yield the directory for `lay_out`.

    `waits`: until another compactor has ended; else raises BusyError. Unfinished files of a dead compactor are removed.
    """
    return box_writer(data, COMPACTED, "compaction", waits)


@contextlib.contextmanager
def box_writer(data: str, box: str, role: str, waits: bool = False) -> Iterator[str]:
    """Become the only writer of a box, in which segments wait for the router, and yield a directory to make them in."""
    place = outbox(data, box)
    make_directory(place)
    lock = _lock(data, box)
    while not lock.try_acquire(describe(role, data)):
        if not waits:
            raise BusyError(f"{data}: {role} is held by {lock.holder() or 'another process'}")
        time.sleep(_POLL_S)
    making = f"{place}/{_MAKING}{os.urandom(8).hex()}"
    try:
        for name in os.listdir(place):
            if name.startswith(_MAKING):
                shutil.rmtree(f"{place}/{name}", ignore_errors=True)
        os.mkdir(making)
        yield making
    finally:
        shutil.rmtree(making, ignore_errors=True)
        lock.release()


def _lock(data: str, box: str = COMPACTED) -> FileLock:
    return FileLock(f"{outbox(data, box)}/.owner")


def is_at_work(data: str) -> bool:
    """Return True if a compactor runs."""
    return _lock(data).is_held()


def lay_out(
    data: str, which: Sealed, removed: Iterable[int], where: str, pace: Callable[[int], None] = lambda nbytes: None
) -> int:
    """Lay out a copy of a segment without the records `removed` (ascending offsets); return the bytes saved.

    `where`: the directory from `compactor`. `pace` is called with the bytes that were written, and may raise. Raises
    DamageError if the segment is damaged: then nothing is laid out.
    """
    making = f"{where}/{which}"
    os.mkdir(making)
    try:
        with SegmentReader(which.path(data), which.first, by_seq=False, sealed=True) as old:
            _write(old, f"{making}/log", which, removed, pace)
            saved = old.size - os.path.getsize(f"{making}/log")
        fd = os.open(f"{making}/log", os.O_RDONLY | os.O_CLOEXEC)
        try:
            index = IndexWriter(f"{making}/idx", _no_room, label_of=which.path(data))
            index.resume(fd, os.fstat(fd).st_size, which.first, lambda: pace(0))
            index.seal()
        finally:
            os.close(fd)
        hand_over(data, which, making)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return saved


def hand_over(data: str, which: Sealed, making: str, box: str = COMPACTED) -> None:
    """Let the router see a segment that is complete in the directory `making`."""
    for name in ("log", "idx"):
        with open(f"{making}/{name}", "rb") as file:
            os.fsync(file.fileno())
    sync_directory(making)
    os.rename(making, which.outbox_path(data, box))
    sync_directory(outbox(data, box))


def _write(old: SegmentReader, path: str, which: Sealed, removed: Iterable[int], pace: Callable[[int], None]) -> None:
    offset, unsynced = which.first, 0
    inside = (number for number in removed if which.first < number < which.end - 1)  # the first and the last stay
    following = next(inside, which.end)
    with open(path, "wb") as new:
        for checked in old.checked_lines(which.first):
            text = checked.lines
            if following < checked.next_offset:
                lines = text.split(b"\n")
                while following < checked.next_offset:
                    lines[following - checked.offset] = b""
                    following = next(inside, which.end)
                text = b"\n".join(lines)
            new.write(text)
            offset, unsynced = checked.next_offset, unsynced + len(text)
            if unsynced >= _SYNC_BYTES:
                new.flush()
                os.fdatasync(new.fileno())
                pace(unsynced)
                unsynced = 0
    if offset != which.end:
        raise CorruptError(f"{old.path}: ends with record {offset - 1}, but the next segment begins with {which.end}")


def _no_room(path: str) -> None:
    raise KmqError(f"{path}: the disk is full; nothing was changed")


# --- the router's side ------------------------------------------------------------------------------------------------


def waiting(data: str, box: str = COMPACTED) -> list[Sealed]:
    """Return the segments that are laid out, by topic, partition and first record."""
    try:
        names = [match for name in os.listdir(outbox(data, box)) if (match := _PLACE.fullmatch(name))]
    except FileNotFoundError:
        return []
    found = [Sealed(name[1], int(name[2]), int(name[3]), int(name[4])) for name in names]
    return sorted(found, key=lambda which: (which.topic, which.partition, which.first))


def install(data: str, which: Sealed) -> int:
    """Replace a segment by its compacted form, and return the new size. Resumes where a crash interrupted it."""
    place, log = which.outbox_path(data), which.path(data)
    directory, index = os.path.dirname(log), segment.index_path(log)
    if os.path.exists(f"{place}/log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(index)
        sync_directory(directory)  # a power cut must not leave the old index beside the new log
        os.rename(f"{place}/log", log)
        sync_directory(directory)
    if os.path.exists(f"{place}/idx") and not os.path.exists(index):  # else a start has made an index
        os.rename(f"{place}/idx", index)
        sync_directory(directory)
    shutil.rmtree(place)
    return os.path.getsize(log)


def discard(data: str, which: Sealed, box: str = COMPACTED) -> None:
    """Remove a segment that waits and no longer fits, such as a compacted one whose original has changed or is gone."""
    hidden = f"{outbox(data, box)}/{_MAKING}{which}-discarded"
    os.rename(
        which.outbox_path(data, box), hidden
    )  # in one step, because a half-removed directory looks like a swap to resume
    shutil.rmtree(hidden, ignore_errors=True)
