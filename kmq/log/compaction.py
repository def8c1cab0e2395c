"""Log compaction of queues: in sealed segments, a record that a later one of its key replaced becomes a bare newline.

kmq/spark/pipelines/compact.py plans which records are removed. This module says what may be touched, and how a segment
is swapped under a router that writes, retains and checkpoints, and under readers, so that no process sees half a swap.

Owner       topics/ has one owner, the router. A compactor, any process that sees the directory, only lays out whole
            segments:

                topics/.compacted/<topic>-<partition>-<first>-<end>/log    records first…end-1, without the removed ones
                                                                   /idx    its index

            Each directory appears with one rename and never changes again. The holder of topics/.owner installs it: the
            router within a second, or a compactor that finds the broker down. So no lock is shared with the hot path,
            and compaction never overlaps with retention or a checkpoint, because one thread does all three. The router
            installs a segment if its topic is declared `cleanup = "compact"`, if the next segment still begins at
            `end`, and if everything sealed is synced; then it checkpoints at once. topics/.compacted/.owner admits one
            compactor at a time. The broker's own gives way to one that holds topics/.compacted/.wanted.
Invariant   Offsets never change. The first and the last record of a segment always stay. So each file still says by
            itself which seqs it spans and how old it is, and recovery, retention and repair treat it as any other.
            A record is removed only because of later records that router.ckpt says are on disk: no power cut takes
            those back. A tombstone (empty payload) is removed only when nothing of its key is left, neither in the
            queue nor in the WAL: a queue rebuilt from the WAL would bring back what the tombstone had deleted. All
            that a rebuild changes is that it undoes compaction.
Readers     A log has two files. While they are swapped there is no index. A reader opens the index, then the log, then
            checks that the index is still the same (segment_reader.py). So it gets a matching pair, or a log without an
            index, which it checks line by line. Files that a reader holds open do not change.
Crash       Each rename is synced before the next. What a kill or power cut leaves after each step of an installation:
              laid out       topics/ is untouched; the next owner installs the segment
              index removed  the old log without an index: read line by line, until the segment is installed
              log renamed    the new log without an index: likewise. A start makes an index, because `bytes` in
                             router.ckpt do not match
              index renamed  done; a start reads the new `bytes` from the index
            A layout that was not complete has a hidden name (.new-…), and the next compactor removes it.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kmq.errors import BusyError, CorruptError, KmqError
from kmq.files import make_directory, sync_directory
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, segment, topics
from kmq.log.index import IndexWriter
from kmq.log.partition import directory_of
from kmq.log.segment_reader import SegmentReader

_MAKING = ".new-"
_POLL_S = 0.05
_SYNC_BYTES = 4 << 20  # written between two syncs: one sync of a large file would delay the WAL's
GIVE_WAY_S = 30.0  # within this time the compactor in the background gives way to another one
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

    def place(self, data: str) -> str:
        return f"{outbox(data)}/{self}"


def outbox(data: str) -> str:
    """Return the directory in which compacted segments wait for the owner of topics/."""
    return f"{data}/topics/.compacted"


def synced_ends(data: str) -> dict[tuple[str, int], int]:
    """Return (topic, partition) → the offset up to which the queue is on disk, as router.ckpt says."""
    try:
        return {at: state.end_offset for at, state in checkpoint.load(data)[1].items()}
    except (ValueError, LookupError):
        return {}


def sealed(data: str, topic: str, partition: int, end: int) -> list[Sealed]:
    """Return the sealed segments of a partition that end at or before the offset `end`."""
    firsts = [first for first, _ in segment.listing(directory_of(data, topic, partition))]
    found = [Sealed(topic, partition, first, end) for first, end in pairwise(firsts)]
    return [candidate for candidate in found if candidate.end <= end]


# --- the compactor's side --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compactor(data: str, in_background: bool = False) -> Iterator[str]:
    """Become the only compactor of a data directory, and yield the directory for `lay_out`.

    `in_background`: it has to ask `is_wanted` now and then, and end if so. Any other compactor waits until it has.
    Raises BusyError if another compactor is at work. The directories of dead compactors are removed, so that tasks
    they left running can no longer lay out a segment.
    """
    make_directory(outbox(data))
    what, who = f"{data}: compaction", describe("compact", data)
    wanted, lock = FileLock(_wanted(data)), FileLock(f"{outbox(data)}/.owner")
    if in_background and is_wanted(data):
        raise BusyError(f"{what} is held by {wanted.holder()}")
    if not in_background:
        wanted.acquire(what, who)
    making = f"{outbox(data)}/{_MAKING}{os.urandom(8).hex()}"
    try:
        _acquire(lock, what, who, 0.0 if in_background else GIVE_WAY_S)
        for name in os.listdir(outbox(data)):
            if name.startswith(_MAKING):
                shutil.rmtree(f"{outbox(data)}/{name}", ignore_errors=True)
        os.mkdir(making)
        yield making
    finally:
        shutil.rmtree(making, ignore_errors=True)
        lock.release()
        wanted.release()


def _acquire(lock: FileLock, what: str, who: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not lock.try_acquire(who):
        if time.monotonic() >= deadline:
            raise BusyError(f"{what} is held by {lock.holder() or 'another process'}")
        time.sleep(_POLL_S)


def _wanted(data: str) -> str:
    return f"{outbox(data)}/.wanted"


def is_wanted(data: str) -> bool:
    """Return True if a compactor waits for the one in the background to end, or is at work."""
    return FileLock(_wanted(data)).is_held()


def lay_out(
    data: str, which: Sealed, removed: Iterable[int], where: str, pace: Callable[[int], None] = lambda nbytes: None
) -> int:
    """Lay out a copy of a segment without the records `removed` (ascending offsets); return the bytes saved.

    `where`: the directory from `compactor`. `pace` is called with the bytes that were written, and may raise. Raises
    DamageError if the segment is damaged: then nothing is laid out.
    """
    making = f"{where}/{which}-{os.urandom(4).hex()}"
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
        for name in ("log", "idx"):
            with open(f"{making}/{name}", "rb") as file:
                os.fsync(file.fileno())
        sync_directory(making)
        try:
            os.rename(making, which.place(data))
        except OSError as err:
            if err.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another attempt of the same task has finished first
                raise
        sync_directory(outbox(data))
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return saved


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


def settle(data: str, timeout_s: float = 30.0) -> None:
    """Wait until all segments laid out are installed: by the router, or by this process if no router runs."""
    owner, deadline = FileLock(f"{data}/topics/.owner"), time.monotonic() + timeout_s
    while waiting(data):
        if owner.try_acquire(describe("compact", data)):
            try:
                for which in waiting(data):
                    originals = sealed(data, which.topic, which.partition, which.end)
                    fits = topics.is_compacted(data, which.topic) and which in originals
                    install(data, which) if fits else discard(data, which)
            finally:
                owner.release()
        elif time.monotonic() > deadline:
            raise BusyError(
                f"{outbox(data)}: the router has not installed the compacted segments within {timeout_s:g} s"
            )
        else:
            time.sleep(_POLL_S)


# --- the side of the owner of topics/ --------------------------------------------------------------------------------


def waiting(data: str) -> list[Sealed]:
    """Return the segments that are laid out, by topic, partition and first record."""
    try:
        names = [match for name in os.listdir(outbox(data)) if (match := _PLACE.fullmatch(name))]
    except FileNotFoundError:
        return []
    found = [Sealed(name[1], int(name[2]), int(name[3]), int(name[4])) for name in names]
    return sorted(found, key=lambda which: (which.topic, which.partition, which.first))


def install(data: str, which: Sealed) -> int:
    """Replace a segment by its compacted form, and return the new size. Resumes where a crash interrupted it."""
    place, log = which.place(data), which.path(data)
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


def discard(data: str, which: Sealed) -> None:
    """Remove a compacted segment whose original has changed or is gone."""
    hidden = f"{outbox(data)}/{_MAKING}{which}-discarded"
    os.rename(which.place(data), hidden)  # in one step, because a half-removed directory looks like a swap to resume
    shutil.rmtree(hidden, ignore_errors=True)
