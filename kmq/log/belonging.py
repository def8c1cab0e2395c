"""Checks that a segment belongs where it lies: a file that a restore has put in a wrong place is damage, not data.

Invariant   A segment is trusted only if its index and its first record agree with its place: lineage, log, first
            record.
"""

import os

from kmq.log import identity, segment
from kmq.log.index import LABEL, label

_HEAD = 1 << 12  # bytes of a segment that its first record's topic lies in


class FirstRecord:
    """The seq of a segment's first record, and its routing key, or the first bytes of a long one."""

    __slots__ = ("routing_key", "seq")

    def __init__(self, seq: int, routing_key: bytes) -> None:
        self.seq, self.routing_key = seq, routing_key


def first_record(fd: int) -> FirstRecord | None:
    """Return the first record of a segment; None if it cannot be read."""
    head = os.pread(fd, _HEAD, 0)
    fields = head.lstrip(b"\n").split(b"|", 3)
    is_torn = len(fields) == 3 and len(head) < _HEAD
    if len(fields) < 3 or is_torn or not fields[0].isdigit():
        return None
    return FirstRecord(int(fields[0]), fields[2])


def why_misplaced(path: str, fd: int, first: int, by_seq: bool, says: bytes) -> str:
    """Return how a segment contradicts its place; "" if it does not. `says`: the label of its index."""
    wanted = label(path)
    if not wanted:
        return ""
    if says not in (b"", wanted):
        return f"its index belongs to another segment: {says[len(LABEL) :].decode(errors='replace').strip()!r}"
    begin = first_record(fd)
    if begin is None:
        return ""
    if by_seq:
        return f"begins with seq {begin.seq}" if begin.seq < first else ""
    topic, key = os.path.basename(os.path.dirname(os.path.dirname(path))).encode(), begin.routing_key
    belongs = key.startswith(topic) and key[len(topic) : len(topic) + 1] in (b"", b".")
    return "" if belongs else f"begins with a record of {key[:100].decode(errors='replace')!r}"


def why_unlabelled(path: str, fd: int) -> str:
    """Return why a segment whose index has no label cannot be trusted; "" if it can.

    A segment of format 1 needs no label. While compaction swaps a segment it has no index.
    """
    if not os.fstat(fd).st_size or not label(path):
        return ""
    begin = first_record(fd)
    if begin is None or begin.seq < identity.labelled_from(path) or segment.is_being_swapped(path):
        return ""
    return "no index says which segment it is"
