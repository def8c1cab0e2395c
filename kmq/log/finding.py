"""Finding a record of a log by its seq or its time, in O(log n) reads of a few bytes: by segment, then by index line.

Invariant   Every hit from an index line is checked against the data: a damaged index line causes an error or a longer
            search, never a wrong result.
"""

from collections.abc import Iterator

from kmq.log.index import Entry
from kmq.log.lines import first_at
from kmq.log.segment_reader import SegmentReader, Segments
from kmq.message import record


class FoundRecord:
    """A record, with its offset, the path of its segment, and the byte in that file."""

    __slots__ = ("byte", "line", "offset", "path")

    def __init__(self, offset: int, path: str, byte: int, line: bytes) -> None:
        self.offset, self.path, self.byte, self.line = offset, path, byte, line


def find(segments: Segments, target: int, field: int) -> FoundRecord | None:
    """Return the first record whose SEQ or RECV_TS is at least `target`. FileNotFoundError if it was deleted."""
    low, high = 0, len(segments)  # the segments before `low` begin before the target, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        with segments.open(middle) as segment:
            head = segment.stamp_at(0)
        if head is not None and head[field] < target:
            low = middle + 1
        else:
            high = middle
    for number in range(max(0, low - 1), len(segments)):
        with segments.open(number) as segment:
            found = _find_in(segment, target, field)
        if found is not None:
            return found
    return None


def _find_in(segment: SegmentReader, target: int, field: int) -> FoundRecord | None:
    def is_before(entry: Entry) -> bool:
        stamp = segment.stamp_at(entry.position)
        return stamp is not None and stamp[field] < target

    probe = segment.index.last(is_before)
    if probe is not None and probe.entry.offset != segment.first:
        is_first_line, found = next(_hits(segment, probe.entry.offset, target, field), (False, None))
        if not is_first_line:
            return found
        # That block should begin before the target: a damaged index led too far. Search from the beginning.
    return next(_hits(segment, segment.first, target, field), (False, None))[1]


def _hits(segment: SegmentReader, start: int, target: int, field: int) -> Iterator[tuple[bool, FoundRecord]]:
    """Yield (is it the first line read, record) for the first hit in each run of lines from `start` on."""
    for number, checked in enumerate(segment.checked_lines(start)):
        lines = checked.lines.split(b"\n")[:-1]
        at = first_at(lines, target, field)
        if at is not None:
            offset = record.seq_of(lines[at]) if segment.by_seq else checked.offset + at
            byte = checked.position + sum(map(len, lines[:at])) + at
            yield not number and not at, FoundRecord(offset, segment.path, byte, lines[at])
