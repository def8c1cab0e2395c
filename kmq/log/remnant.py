"""The last record of a log whose every segment is due: retention leaves it alone in a segment of its own.

What goes on behind it follows from it: the next seq, offset and time. So it has to stay, but not all that lies in front
of it.

Owner       who owns the log: durability for the WAL, the router for a queue.
Invariant   The log always says by a record where it ends, before, after, and once a start has settled what a kill left.
            A reader never meets the record twice: until the old segment has gone, its copy has no name that readers
            know.
Crash       laid out      `<first>.kept` and an index for it lie beside the old segment: undone, and tried again;
            old one gone  (for a queue: and router.ckpt says so) the start gives the copy its name;
            named         done.
"""

import contextlib
import os
import zlib

from kmq import record
from kmq.log import index, reader, segment, spare
from kmq.log.damage import DamageError
from kmq.log.disk import FULL, find_tail, sync_directory
from kmq.log.lines import is_stored
from kmq.log.segment import Segment

_SUFFIX = ".kept"


def lay_out(data: str, last: Segment, first: int, by_seq: bool) -> Segment | None:
    """Copy the last record of a log's last sealed segment; it becomes a segment, `first`, by `settle`. Not synced yet.

    None where there is no room for it, or where the record is damaged: then `last` has to stay.
    """
    path = f"{os.path.dirname(last.path)}/{segment.name(first)}"
    try:
        reader.indexed_end(last.path, last.first, by_seq)  # what is damaged gets no crc of its own
        with open(last.path, "rb") as file:
            tail = find_tail(file.fileno(), last.size, is_stored)
    except DamageError:
        return None
    found = record.parse_stored(tail.last)
    if found is None or tail.cut or (by_seq and found[0] != first):
        return None
    line = tail.last + b"\n"
    entry = index.Entry(first, 0, zlib.crc32(line), record.format_ts(found[1]))
    try:
        for name, text in ((segment.index_path(path), index.label(path) + entry.line()), (path + _SUFFIX, line)):
            with open(name, "wb") as file:
                file.write(text)
    except OSError as err:
        _remove(path)
        if err.errno not in FULL:
            raise
        spare.release(data)  # for the next time
        return None
    return Segment(first, path, len(line))


def files(kept: Segment) -> list[str]:
    """What has been laid out: to be synced before the old segment goes."""
    return [segment.index_path(kept.path), kept.path + _SUFFIX]


def settle(directory: str, first: int) -> bool:
    """The old segments have gone: give the copy of record `first` its name. True if it was there.

    Any other copy is of an attempt that was interrupted, and is removed.
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
