"""Keeps the end of a deleted segment in a small segment of its own, where its last records have to stay.

The last record of a log stays when retention deletes all its segments: the next seq, offset and time follow from it.
When a queue's start lies inside a segment, the records from the start on stay.

Also the spare: a reserve on the disk, released when there is no room for such a copy, or for a checkpoint.

Owner       the owner of the log: durability for the WAL, the router for a queue.
Invariant   A kept record can always be read, and never twice: the copy is ignored while an older segment exists, and
            becomes the first segment the moment that one is removed (segment.listing). Before that the copy is on disk
            (for a queue: and router.ckpt begins with it).
Crash       laid out      `<first>.log.kept` and an index for it lie beside the old segment: the next start removes
                          both, and the copy is made again;
            old removed   (for a queue: and router.ckpt says so) the next start gives the copy its name;
            named         done.
"""

import contextlib
import errno
import os
import zlib
from collections import namedtuple
from collections.abc import Callable

from kmq.config.values import MIB
from kmq.errors import CorruptError
from kmq.files import FULL, find_tail, give_up, sync_directory
from kmq.log import index, reader, segment
from kmq.log.damage import DamageError
from kmq.log.segment import COPY_SUFFIX, Segment, is_stored
from kmq.log.segment_reader import SegmentReader
from kmq.message import record


def lay_out(data: str, last: Segment, first: int, by_seq: bool) -> Segment | None:
    """Copy the last record of the sealed segment `last` into a file of its own, and return that as a segment.

    `first` is the record's seq or offset. `settle` gives the copy its name; the caller syncs `files` before. Returns
    None if the disk is full or the record is damaged: then `last` has to stay.
    """
    path = f"{os.path.dirname(last.path)}/{segment.name(first)}"
    try:
        reader.indexed_end(last.path, last.first, by_seq)  # raises at damage: a copy of it would get a valid crc
        with open(last.path, "rb") as file:
            tail = find_tail(file.fileno(), last.size, is_stored)
    except DamageError:
        return None
    found = record.parse_stored(tail.last)
    if found is None or tail.cut or (by_seq and found[0] != first):
        return None
    line = tail.last + b"\n"
    entry = index.IndexEntry(first, 0, zlib.crc32(line), record.format_ts(found[1]))
    try:
        for name, text in ((segment.index_path(path), index.label(path) + entry.line()), (path + COPY_SUFFIX, line)):
            with open(name, "wb") as file:
                file.write(text)
    except OSError as err:
        _remove(path)
        if err.errno not in FULL:
            raise
        release_spare(data)  # so that the next attempt has room
        return None
    return Segment(first, path, len(line))


class Remnant(namedtuple("Remnant", ("segment", "source", "position"), defaults=("", 0))):
    """A copy that was laid out. It still lacks the bytes of the segment `source` from `position` on, if one is named."""

    __slots__ = ()

    def fill(self) -> None:
        """Copy what the copy lacks, and sync it. May be repeated."""
        if not self.source:
            return
        at, end = self.position, self.position + self.segment.size
        with open(self.source, "rb") as old, open(self.segment.path + COPY_SUFFIX, "r+b") as new:
            while at < end and (sent := os.sendfile(new.fileno(), old.fileno(), at, min(_SYNC_BYTES, end - at))):
                os.fdatasync(new.fileno())
                at += sent
        if at < end:
            raise CorruptError(f"{self.source}: was cut while it was copied")


_SYNC_BYTES = 4 * MIB  # written between two syncs: one sync of a large file would delay the WAL's


def lay_out_rest(part: Segment, offset: int, has_room: Callable[[int], bool]) -> Remnant:
    """Lay out a copy of a queue's sealed segment from record `offset` on, which lies inside it; `fill` completes it.

    It begins later if compaction has removed that record. Raises DamageError, and OSError if the disk is full or
    `has_room` refuses so many bytes.
    """
    with SegmentReader(part.path, part.first, by_seq=False, sealed=True) as old:
        for block in old.checked_lines(offset):
            lines = block.lines.split(b"\n", max(0, offset - block.offset))[-1].lstrip(b"\n")
            if lines:
                break
        else:
            raise old.damage(0, old.size, part.first, offset, "the log ends before the next segment")
    first, position = block.next_offset - record.count_lines(lines), block.end - len(lines)
    path = f"{os.path.dirname(part.path)}/{segment.name(first)}"
    later = [each for each in index.read_entries(segment.index_path(part.path), part.size) if each.position > position]
    if (later[0].position if later else part.size) != block.end:
        raise old.damage(block.position, block.end, block.offset, first, "the index does not name the next block")
    entries = [index.IndexEntry(first, 0, zlib.crc32(lines), record.format_ts(record.stamp(lines)[1]))]
    entries += [index.IndexEntry(each.offset, each.position - position, each.crc, each.recv_ts) for each in later]
    if not has_room(part.size - position):
        give_up(path)
    try:
        with open(segment.index_path(path), "wb") as file:
            file.write(index.label(path) + b"".join(entry.line() for entry in entries))
        with open(path + COPY_SUFFIX, "wb") as file:
            _reserve(file.fileno(), part.size - position)
    except OSError:
        _remove(path)
        raise
    return Remnant(Segment(first, path, part.size - position), part.path, position)


def _reserve(fd: int, size: int) -> None:
    """Reserve room on the disk. A file system that cannot must have it free now; other programs may take it."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as err:
        if err.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        disk = os.fstatvfs(fd)
        if disk.f_bavail * disk.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def files(copy: Segment) -> list[str]:
    """Return the files of the copy: they must be synced before the old segment is removed."""
    return [segment.index_path(copy.path), copy.path + COPY_SUFFIX]


def settle(directory: str) -> None:
    """Give a copy its name if it is the first segment. Remove any other copy: an interrupted attempt left it."""
    there = segment.listing(directory)
    for copy in segment.copies(directory):
        path = copy.removesuffix(COPY_SUFFIX)
        if copy == there[0][1]:
            os.rename(copy, path)
            sync_directory(directory)
        else:
            _remove(path)


def _remove(path: str) -> None:
    leftover = [path + COPY_SUFFIX] if os.path.exists(path) else [path + COPY_SUFFIX, segment.index_path(path)]
    for name in leftover:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


# --- spare -----------------------------------------------------------------------------------------------------------
# A reserve of 1 MiB on the disk, given up when the disk is full, because making room needs some room first.
#
# Retention deletes what a checkpoint no longer needs, and a checkpoint is a new file. An active segment is sealed by
# making another file. The free space that admission keeps (kmq/broker/admission.py) does not serve for this: other
# programs may fill the disk, and producers that write to the FIFO do not ask for admission.
#
# Owner       durability claims the reserve while the disk has plenty of room. Any stage that needs room in order to make
#             room releases it. It is never released for messages: they would use it up before it could help.

_SPARE_BYTES = 1 * MIB  # checkpoints of thousands of topics, or new segments of hundreds
_PLENTY = 16 * _SPARE_BYTES


def claim_spare(data: str) -> None:
    """Claim the reserve if it does not exist and the disk has plenty of room."""
    path, disk = f"{data}/.spare", os.statvfs(data)
    if disk.f_bavail * disk.f_frsize < _PLENTY or os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, _SPARE_BYTES)
        finally:
            os.close(fd)


def release_spare(data: str) -> bool:
    """Release the reserve; return True if there was one, so that an immediate retry may succeed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{data}/.spare")
        return True
    return False
