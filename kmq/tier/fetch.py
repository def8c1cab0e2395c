"""`kmq tier fetch`: old records of a topic go back to the disk, below what it has.

    orders/3 begins with offset 0 in the store and with 1512 on the disk, KMQ_SEGMENT_BYTES has room for two rows
        → topics/.fetched/orders-3-1000-1512, then orders-3-0-1000 (kmq/log/fetched.py)

Promise     All of it, or a refusal before anything is written: for lack of room, and where the topic's local limits would
            delete it at once.
Invariant   A segment has the lines of its rows from the start of the partition on, and before what the disk has.
            Each object is compared with its row before the router sees the segment.
Crash       It holds no plan: what is laid out or installed is not fetched again.
Memory      A piece and a member of an object.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq.broker.admission import Admission
from kmq.config.settings import Settings
from kmq.config.states import InForce
from kmq.errors import ConfigError, CorruptError, KmqError
from kmq.files import give_up
from kmq.log import identity, rows, segment, topics
from kmq.log.compaction import Sealed, box_writer, hand_over
from kmq.log.fetched import FETCHED, waiting_of
from kmq.log.index import IndexWriter
from kmq.log.partition import directory_of
from kmq.log.rows import TierFile, TierRow
from kmq.log.segment import Limits
from kmq.message import record
from kmq.tier.cache import lines_of
from kmq.tier.store import Store

_SYNC_BYTES = 4 << 20  # written between two syncs: one sync of a large file would delay the WAL's


class NoRoomError(KmqError):
    """The disk has no room for what is to be fetched."""


class FetchedSegment(NamedTuple):
    """A segment to be made of these rows."""

    which: Sealed
    rows: list[TierRow]

    @property
    def nbytes(self) -> int:
        return rows.nbytes_before(self.rows, self.which.end) - rows.nbytes_before(self.rows[:1], self.which.first)


def plan(data: str, topic: str, number: int, segment_bytes: int) -> list[FetchedSegment]:
    """Return what a partition has in the store alone, the newest first, as segments of about `segment_bytes`."""
    directory = directory_of(data, topic, number)
    found, listed = rows.of(directory), segment.listing(directory)
    if not listed:
        return []
    local = listed[0][0]
    for each in waiting_of(data, topic, number):
        if each.end == _end_before(local, found):
            local = each.first
    begin, end, made, group = found.begin(local), _end_before(local, found), list[FetchedSegment](), list[TierRow]()
    for row in reversed(found.cold(local)):
        if group and (row.next != group[0].base or sum(each.nbytes for each in group) + row.nbytes > segment_bytes):
            made.append(FetchedSegment(Sealed(topic, number, group[0].base, min(group[-1].next, end)), group))
            group = []
        group = [row, *group]
    if group:
        made.append(FetchedSegment(Sealed(topic, number, max(group[0].base, begin), min(group[-1].next, end)), group))
    return made


def _end_before(local: int, found: TierFile) -> int:
    """Return where the records before a first local offset end: there, or where the gap before it begins."""
    return next((first for first, to in found.gaps if to == local), local)


def limits_of(settings: Settings, data: str, topic: str) -> Limits:
    """Return the limits in force of a topic of this data directory."""
    return Limits.of(InForce(settings).settings).with_changes(topics.read(data, topic).limits)


def check_limits(data: str, topic: str, limits: Limits, planned: list[FetchedSegment], now_s: float) -> None:
    """Raise ConfigError if the local limits of a topic would delete what is planned for a partition."""
    if not (planned and limits.is_tiered):
        return
    which, wanted = planned[0].which, []
    there = sum(part.size for part in segment.survey(directory_of(data, topic, which.partition)))
    total, most = there + sum(each.nbytes for each in planned), limits.local_retention_bytes
    if most and total > most:
        wanted.append(f"local_retention_bytes={total + limits.segment_bytes}")
    if planned[-1].rows[0].times[1] <= (now_s - limits.local_retention_age) * 1e6:
        days = int((now_s - planned[-1].rows[0].times[0] / 1e6) // 86400) + 2
        wanted.append(f"local_retention_age={days}d")
    if wanted:
        raise ConfigError(
            f"topic {topic}: its local limits would delete at once what is fetched; first"
            f" kmq topics set {topic} {' '.join(wanted)}, or tier=off"
        )


def check_room(settings: Settings, nbytes: int) -> None:
    """Raise NoRoomError unless so many bytes can be written, and messages still be accepted."""
    room = max(0, -Admission(settings, lambda: 0).shortage())
    if nbytes > room:
        raise NoRoomError(
            f"{settings.data}: {nbytes:,} bytes are to be fetched, and {room:,} are free beside the reserve for messages;"
            " make room, or raise KMQ_DATA_QUOTA"
        )


def lay_out(
    data: str, store: Store, lineage: str, planned: FetchedSegment, where: str, progress: Callable[[int], object]
) -> None:
    """Make a segment, and lay it out for the router. `where`: the directory of `box_writer`.

    Raises StoreError; ObjectError if an object is not what its row says; KmqError if the disk is full.
    """
    which, unsynced = planned.which, 0
    making = f"{where}/{which}"
    os.mkdir(making)
    try:
        with open(f"{making}/log", "wb") as file:
            for lines in _lines(store, lineage, planned):
                file.write(lines)
                progress(len(lines))
                unsynced += len(lines)
                if unsynced >= _SYNC_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
        fd = os.open(f"{making}/log", os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = IndexWriter(f"{making}/idx", give_up, label_of=which.path(data))
            writer.begin()
            writer.resume(fd, os.fstat(fd).st_size, which.first)
            writer.seal()
        finally:
            os.close(fd)
        hand_over(data, which, making, FETCHED)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _lines(store: Store, lineage: str, planned: FetchedSegment) -> Iterator[bytes]:
    first, end, seen = planned.which.first, planned.which.end, 0
    for row in planned.rows:
        offset = row.base
        for lines in lines_of(store, lineage, row):
            count = record.count_lines(lines)
            low, high = max(0, first - offset), min(count, end - offset)
            if high < count:
                lines = record.first_lines(lines, max(0, high))
            if low:
                lines = b"\n".join(lines.split(b"\n")[low:])
            if lines:
                yield lines
                seen += record.count_lines(lines)
            offset += count
    if seen != end - first:
        raise CorruptError(f"{planned.which}: its objects have {seen} records")


def fetch(
    data: str,
    store: Store,
    planned: list[FetchedSegment],
    progress: Callable[[int], object],
    check: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Lay out segments, the newest of each partition first. `check` is called with the bytes of each, and may raise."""
    if planned:
        with box_writer(data, FETCHED, "fetch") as where:
            for each in planned:
                check(each.nbytes)
                lay_out(data, store, identity.lineage(data), each, where, progress)
