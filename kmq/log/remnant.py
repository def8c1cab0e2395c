"""The last record of a log when all its segments are due: retention keeps it, alone in a segment of its own.

Also the spare: a reserve on the disk, which retention releases when there is no room for that, or for a checkpoint.

The next seq, offset and time follow from the last record, so it has to stay. The records in front of it need not.

Owner       the owner of the log: durability for the WAL, the router for a queue.
Invariant   A record always marks the end of the log: before this, after it, and once a start has finished what a kill
            interrupted. A reader never sees the record twice: until the old segment is removed, the copy has a name
            that readers ignore.
Crash       laid out      `<first>.kept` and an index for it lie beside the old segment: the next start removes both,
                          and retention tries again;
            old removed   (for a queue: and router.ckpt says so) the next start gives the copy its name;
            named         done.
"""

import contextlib
import os
import zlib

from kmq.config.values import MIB
from kmq.files import FULL, find_tail, sync_directory
from kmq.log import index, reader, segment
from kmq.log.damage import DamageError
from kmq.log.segment import Segment, is_stored
from kmq.message import record

_SUFFIX = ".kept"


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
        for name, text in ((segment.index_path(path), index.label(path) + entry.line()), (path + _SUFFIX, line)):
            with open(name, "wb") as file:
                file.write(text)
    except OSError as err:
        _remove(path)
        if err.errno not in FULL:
            raise
        release_spare(data)  # so that the next attempt has room
        return None
    return Segment(first, path, len(line))


def files(kept: Segment) -> list[str]:
    """Return the files of the copy: they must be synced before the old segment is removed."""
    return [segment.index_path(kept.path), kept.path + _SUFFIX]


def settle(directory: str, first: int) -> bool:
    """Give the copy of record `first` its name, after the old segments are removed; return True if there was a copy.

    Any other copy is left from an interrupted attempt, and is removed.
    """
    settled = False
    for name in [each.removesuffix(_SUFFIX) for each in os.listdir(directory) if each.endswith(_SUFFIX)]:
        path = f"{directory}/{name}"
        if name == segment.name(first):
            os.rename(path + _SUFFIX, path)
            settled = True
        else:
            _remove(path)
    if settled:
        sync_directory(directory)
    return settled


def _remove(path: str) -> None:
    leftover = [path + _SUFFIX] if os.path.exists(path) else [path + _SUFFIX, segment.index_path(path)]
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
