"""dropped.log: the seqs that `drop_oldest` dropped, `ring|first_seq|last_seq|count|ts`, one line per range.

    framed|17|19|3|1795276288.490144    seqs 17 to 19, three messages, were dropped from the ring `framed`

Writers     the reader of each ring: durability for `framed`, the router for `durable`. One line is one append, synced.
Invariant   A range is in the file, on disk, before its reader continues after it. So no record after a gap is
            stored before the gap is named.
Crash       The next writer cuts a torn last line, finds its range in the ring again, and names it again.
"""

import contextlib
import fcntl
import os
import re
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence

from kmq.errors import CorruptError
from kmq.files import QUARANTINE, AppendFile, WaitForRoom, sync_directory
from kmq.message import record

_LINE_BYTES = 256  # a line is shorter
_LINE = re.compile(rb"(?:framed|durable)\|(\d+)\|(\d+)\|(\d+)\|\d+\.\d{6}")


class SeqRange(namedtuple("SeqRange", ("first", "last"))):
    """The seqs first…last, both included."""

    __slots__ = ()


def lines(data: str) -> Iterator[tuple[int, bytes]]:
    """Yield (byte, line) of the whole lines."""
    with contextlib.suppress(FileNotFoundError), open(f"{data}/dropped.log", "rb") as file:
        byte = 0
        for line in file.read().split(b"\n")[:-1]:
            yield byte, line
            byte += len(line) + 1


def read(data: str, ring: str, skips_damaged: bool = False) -> list[SeqRange]:
    """Return the named ranges of one ring, in order.

    `skips_damaged`: for reports only. Code that acts on an incomplete list would take dropped records for lost, or
    bring them back.
    """
    ranges = []
    for byte, line in lines(data):
        if is_range(line):
            name, first, last = line.split(b"|")[:3]
            ranges += [SeqRange(int(first), int(last))] if name.decode() == ring else []
        elif not skips_damaged:
            raise CorruptError(f"{data}/dropped.log: damaged at byte {byte}: {line[:60]!r}; run kmq verify --repair")
    return ranges


def accounted(data: str) -> list[SeqRange]:
    """Return the seqs that the WAL may lack, in order: dropped from the ring framed, or named lost by a repair."""
    return sorted([*read(data, "framed"), *quarantined(data)], key=lambda gone: gone.first)


def quarantined(data: str, where: str = "append/") -> list[SeqRange]:
    """Return the seqs that the WAL lost for good, as quarantine/log says; with `where` = "topics/", of queues.

    A line of that file is file|byte|first_seq|last_seq|count|ts.
    """
    try:
        with open(f"{data}/{QUARANTINE}/log", "rb") as file:
            rows = [line.split(b"|") for line in file.read().splitlines()]
    except FileNotFoundError:
        return []
    return [SeqRange(int(row[2]), int(row[3])) for row in rows if row[0].startswith(where.encode())]


def is_range(line: bytes) -> bool:
    """Return True if a line names a range; the count reveals a damaged digit."""
    match = _LINE.fullmatch(line)
    return match is not None and 0 < int(match[1]) <= int(match[2]) == int(match[1]) + int(match[3]) - 1


def append(data: str, ring: str, first: int, last: int, wait_for_room: WaitForRoom) -> None:
    """Name the seqs first…last as dropped from `ring`; the line is on disk when this returns."""
    path = f"{data}/dropped.log"
    file = AppendFile(path, wait_for_room)
    try:
        # The other ring's reader appends too. On a full disk each cuts the file back to the size it knows.
        fcntl.flock(file.fd, fcntl.LOCK_EX)
        file.size = os.fstat(file.fd).st_size
        start = max(0, file.size - _LINE_BYTES)
        torn = file.size - start - (os.pread(file.fd, _LINE_BYTES, start).rfind(b"\n") + 1)
        if torn:
            file.truncate(file.size - torn)
        stamp = record.format_ts(time.time_ns() // 1000)
        line = b"%b|%d|%d|%d|%b\n" % (ring.encode(), first, last, last - first + 1, stamp)
        is_new = not file.size
        file.append([line], len(line))
        file.sync()
        if is_new:
            sync_directory(data)
    finally:
        file.close()


def without(first: int, last: int, ranges: Sequence[SeqRange]) -> list[SeqRange]:
    """Return the parts of first…last that are in none of `ranges` (in order)."""
    rest = []
    for gone in ranges:
        if gone.last < first or gone.first > last:
            continue
        if gone.first > first:
            rest.append(SeqRange(first, gone.first - 1))
        first = max(first, gone.last + 1)
    if first <= last:
        rest.append(SeqRange(first, last))
    return rest
