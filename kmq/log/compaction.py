"""Log compaction of queues: in sealed segments, a record that a later one of its key replaced becomes a bare newline.

Which records go is planned elsewhere (kmq/spark/pipelines/compact.py); here is what may be touched, and how a segment
is swapped under a router that writes, retains and checkpoints, and under readers, so that neither ever meets half of
it.

Owner       topics/ has one owner, the router. A compactor, any process that sees the directory, only lays whole
            segments out:

                topics/.compacted/<topic>-<partition>-<first>-<end>/log    records first…end-1, less those that went
                                                                   /idx    its index

            which appear with one rename and are never changed again. Whoever holds topics/.owner installs them: the
            router within a second, or a compactor that finds the broker down. So no lock is shared with the hot path,
            and retention, checkpoints and compaction cannot cross: one thread does them all. The router installs for
            topics that are declared `cleanup = "compact"`, where `end` is still where the next segment begins, and when
            all that is sealed is synced; it checkpoints at once. One compactor at a time: topics/.compacted/.owner.
Invariant   Offsets stay. The first and the last record of a segment always stay: so each file still says by itself
            which seqs it spans and how old it is, and recovery, retention and repair treat it as any other.
            Only what router.ckpt says is on disk counts as a later record: no power cut takes it back.
            A tombstone (empty payload) goes when nothing of its key is left, neither in the queue nor in the WAL: a
            queue is rebuilt from the WAL, and with it would come what the tombstone had deleted. Rebuilding undoes
            compaction, no more.
Readers     A log has two files. While they change there is no index: the reader opens the index, then the log, then
            looks whether the index is still that one (segment_reader.py). So it has a pair, or a log without an index,
            which it checks line by line. What it holds open stays as it was.
Crash       Installing, what is there after a kill or power cut at each step (each rename is synced before the next):
              laid out       topics/ is untouched; the next owner installs it
              index removed  the old log without an index: read line by line, until it is installed
              log renamed    the new log without an index: likewise; a start makes one: `bytes` in router.ckpt do not fit
              index renamed  done; a start finds by the index what the new `bytes` are
            What was being laid out is hidden (.new-…), and removed by the next compactor.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kmq.errors import BusyError, CorruptError, KmqError
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, segment, topics
from kmq.log.disk import sync_directory
from kmq.log.index import IndexWriter
from kmq.log.partition import directory_of
from kmq.log.segment import COMPACT
from kmq.log.segment_reader import SegmentReader

_MAKING = ".new-"
_POLL_S = 0.05
_PLACE = re.compile(r"([^.].*)-(\d+)-(\d+)-(\d+)")  # what else lies there is nothing to stop a router


class Sealed:
    """Records first…end-1 of one partition: a sealed segment."""

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
    """Where compacted segments wait for the owner of topics/."""
    return f"{data}/topics/.compacted"


def is_compacted(data: str, topic: str) -> bool:
    """Whether records of this topic may have been compacted away: a bare newline in its queues is no loss then."""
    return topics.read(data, topic).limits.get("cleanup") == COMPACT


def synced_ends(data: str) -> dict[tuple[str, int], int]:
    """(topic, partition) → the offset up to which router.ckpt says that the queue is on disk."""
    try:
        return {at: state.end_offset for at, state in checkpoint.load(data)[1].items()}
    except (ValueError, LookupError):
        return {}


def sealed(data: str, topic: str, partition: int, end: int) -> list[Sealed]:
    """The sealed segments of a partition that end at or before the offset `end`."""
    firsts = [first for first, _ in segment.listing(directory_of(data, topic, partition))]
    found = [Sealed(topic, partition, first, end) for first, end in pairwise(firsts)]
    return [each for each in found if each.end <= end]


# --- the compactor's side --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compactor(data: str) -> Iterator[str]:
    """Be the only compactor of a data directory; where it may lay out segments. BusyError where there is another.

    Tasks that a dead compactor has left behind cannot lay out any more: their directory has gone.
    """
    os.makedirs(outbox(data), exist_ok=True)
    lock = FileLock(f"{outbox(data)}/.owner")
    lock.acquire(f"{data}: compaction", describe("compact", data))
    making = f"{outbox(data)}/{_MAKING}{os.urandom(8).hex()}"
    try:
        for name in os.listdir(outbox(data)):
            if name.startswith(_MAKING):
                shutil.rmtree(f"{outbox(data)}/{name}", ignore_errors=True)
        os.mkdir(making)
        yield making
    finally:
        shutil.rmtree(making, ignore_errors=True)
        lock.release()


def lay_out(data: str, which: Sealed, gone: Sequence[int], where: str) -> int:
    """Write a segment anew without the records `gone` (ascending offsets), for the owner of topics/; bytes saved.

    `where`: what compactor() gave. DamageError where the segment is not as it was written: nothing is laid out then.
    """
    making = f"{where}/{which}-{os.urandom(4).hex()}"
    os.mkdir(making)
    try:
        with SegmentReader(which.path(data), which.first, by_seq=False, sealed=True) as old:
            _write(old, f"{making}/log", which, gone)
            saved = old.size - os.path.getsize(f"{making}/log")
        fd = os.open(f"{making}/log", os.O_RDONLY | os.O_CLOEXEC)
        try:
            index = IndexWriter(f"{making}/idx", _no_room, label_of=which.path(data))
            index.resume(fd, os.fstat(fd).st_size, which.first)
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
            if err.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another attempt of the same task was faster
                raise
        sync_directory(outbox(data))
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return saved


def _write(old: SegmentReader, path: str, which: Sealed, gone: Sequence[int]) -> None:
    offset = which.first
    with open(path, "wb") as new:
        for checked in old.checked_lines(which.first):
            low = bisect_left(gone, max(checked.offset, which.first + 1))  # the first and the last record stay
            high = bisect_left(gone, min(checked.next_offset, which.end - 1))
            text = checked.lines
            if low < high:
                lines = text.split(b"\n")
                for number in gone[low:high]:
                    lines[number - checked.offset] = b""
                text = b"\n".join(lines)
            new.write(text)
            offset = checked.next_offset
    if offset != which.end:
        raise CorruptError(f"{old.path}: ends with record {offset - 1}, but the next segment begins with {which.end}")


def _no_room(path: str) -> None:
    raise KmqError(f"{path}: no room on the disk; nothing was changed")


def settle(data: str, timeout_s: float = 30.0) -> None:
    """Return when all that is laid out has been installed: by the router, or by us where there is none."""
    owner, deadline = FileLock(f"{data}/topics/.owner"), time.monotonic() + timeout_s
    while waiting(data):
        if owner.try_acquire(describe("compact", data)):
            try:
                for each in waiting(data):
                    fits = is_compacted(data, each.topic) and each in sealed(data, each.topic, each.partition, each.end)
                    install(data, each) if fits else discard(data, each)
            finally:
                owner.release()
        elif time.monotonic() > deadline:
            raise BusyError(f"{outbox(data)}: the router has not taken compacted segments within {timeout_s:g} s")
        else:
            time.sleep(_POLL_S)


# --- the side of the owner of topics/ ---------------------------------------------------------------------------------


def waiting(data: str) -> list[Sealed]:
    """What is laid out, in order."""
    try:
        names = [match for name in os.listdir(outbox(data)) if (match := _PLACE.fullmatch(name))]
    except FileNotFoundError:
        return []
    found = [Sealed(name[1], int(name[2]), int(name[3]), int(name[4])) for name in names]
    return sorted(found, key=lambda each: (each.topic, each.partition, each.first))


def install(data: str, which: Sealed) -> int:
    """Replace a segment by its compacted form; returns the new size. Resumes where a crash interrupted it."""
    place, log = which.place(data), which.path(data)
    directory, index = os.path.dirname(log), segment.index_path(log)
    if os.path.exists(f"{place}/log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(index)
        sync_directory(directory)  # no power cut may leave the index of one beside the log of the other
        os.rename(f"{place}/log", log)
        sync_directory(directory)
    if os.path.exists(f"{place}/idx") and not os.path.exists(index):  # else a start has made one
        os.rename(f"{place}/idx", index)
        sync_directory(directory)
    shutil.rmtree(place)
    return os.path.getsize(log)


def discard(data: str, which: Sealed) -> None:
    """Drop a compacted segment: the one it was made of has changed or is gone."""
    hidden = f"{outbox(data)}/{_MAKING}{which}-discarded"
    os.rename(which.place(data), hidden)  # at once: half of it would look like a swap to resume
    shutil.rmtree(hidden, ignore_errors=True)
