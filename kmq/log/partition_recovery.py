"""What of a partition log is whole after a crash: its files against what the checkpoint says of them.

Owner       the router, at a start: only it may cut.
Invariant   Beyond what the checkpoint says was on disk, a log is cut at the first doubt, with all that follows: the WAL
            has it. Where the files differ from the checkpoint, somebody has damaged them: then nothing is cut but torn
            ends.
Crash       Segments are removed from the last to the first, so no kill leaves a gap that was not there before.
"""

import os
from collections import namedtuple

from kmq import record
from kmq.errors import CorruptError
from kmq.log import index, segment
from kmq.log.disk import find_nul, find_tail
from kmq.log.dropped import SeqRange
from kmq.log.index import last_before
from kmq.log.lines import count_lines
from kmq.log.partition import State
from kmq.log.segment import Segment

_LOOK = 4096  # bytes of an unchanged log's end that are looked at on a start


class WalRange(namedtuple("WalRange", ("first", "last", "has_rest"))):
    """The seqs first…last of the WAL. `has_rest`: it has all records after the checkpoint, or some before them too."""

    __slots__ = ()


class Gap:
    """The records first…end - 1 are missing in front of another segment. In the WAL they lie in `seqs`."""

    __slots__ = ("end", "first", "into", "seqs")

    def __init__(self, first: int, end: int, seqs: SeqRange, into: Segment | None) -> None:
        self.first, self.end, self.seqs = first, end, seqs
        self.into = into  # the segment that was cut, which has to be whole again; None where whole files are missing


class Remains:
    """What a start finds of a partition whose files do not fit the checkpoint."""

    __slots__ = ("cut", "gaps", "segments", "state", "touched")

    def __init__(self, segments: list[Segment], state: State) -> None:
        self.segments, self.state = segments, state
        self.cut = 0  # bytes taken off: torn, NUL, or behind one of these
        self.gaps: list[Gap] = []
        self.touched: list[Segment] = []  # sealed segments that nobody may have synced


def fits(segments: list[Segment], known: State) -> bool:
    """Return True if these files are as the checkpoint knows them, by their sizes and one small read at the end."""
    if sum(each.size for each in segments) != known.size:
        return False
    if not segments:
        return known.end_offset == known.start and not known.last_seq  # it never had a record
    last = segments[-1]
    if not last.size:
        return last.first == known.end_offset
    return segments[0].first == known.start and ends_as(last.path, last.size, known.last_seq)


def ends_as(path: str, size: int, last_seq: int) -> bool:
    """Return True if record `last_seq` ends at byte `size`: one small read, which sees a zeroed end."""
    start = max(0, size - _LOOK)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = os.pread(fd, size - start, start)
    finally:
        os.close(fd)
    at = tail.rfind(b"\n", 0, -1) + 1
    if not tail.endswith(b"\n") or 0 in tail[at:]:
        return not size
    return tail.startswith(b"%d|" % last_seq, at) or (not at and len(tail) == _LOOK)


def recover(segments: list[Segment], known: State, wal: WalRange, start: int) -> Remains:
    """Cut the files of a log to what is whole, and say what that is.

    A last line whose seq is above the end of the WAL was not written by the router: it would hide all later records.
    `known` is what the checkpoint says was on disk. The rest may be torn or have NULs in it after a power cut, so it is
    looked through and cut at the first doubt, with all that follows, if the WAL has it. Where the files differ from
    `known`, somebody has damaged them: then nothing is cut but torn ends, and what is missing between two segments, or
    in front of the first one from record `start` on, is a Gap.
    """
    checkpointed = _checkpointed_end(known, segments)
    if checkpointed is not None and wal.has_rest:
        return _look_through(segments, checkpointed, known, wal.last)
    return _walk(segments, wal.last, start)


class FilePlace(namedtuple("FilePlace", ("number", "byte"))):
    """A place in a log's files: which segment, and where in it."""

    __slots__ = ()


def _checkpointed_end(known: State, segments: list[Segment]) -> FilePlace | None:
    """Up to where the files are what the checkpoint knows; None where they are not."""
    if not segments or segments[0].first != known.start:
        return None
    at = max(number for number, each in enumerate(segments) if each.first <= known.end_offset)
    floor = known.size - sum(each.size for each in segments[:at])
    if floor == 0:
        return FilePlace(at, 0) if segments[at].first == known.end_offset else None
    is_there = 0 < floor <= segments[at].size and ends_as(segments[at].path, floor, known.last_seq)
    return FilePlace(at, floor) if is_there else None


def _look_through(segments: list[Segment], checkpointed: FilePlace, known: State, high: int) -> Remains:
    at, floor = checkpointed
    remains = Remains(segments[:at], State(*known.values()))
    state = remains.state
    for each in segments[at:]:
        if not floor and each.first != state.end_offset:
            break
        whole = _cut_to_whole(each, floor, high, look_for_nul=True)
        state.end_offset += whole.lines
        state.size += whole.size - floor
        state.last_seq = whole.last_seq or state.last_seq
        floor = 0
        remains.cut += each.size - whole.size
        remains.segments.append(Segment(each.first, each.path, whole.size))
        if whole.size < each.size:
            break
    gone = segments[len(remains.segments) :]
    remains.cut += sum(each.size for each in gone)
    segment.remove(gone[::-1])  # the last one first: a crash leaves no gap
    remains.touched = remains.segments[at:-1]
    return remains


def _walk(segments: list[Segment], high: int, start: int) -> Remains:
    remains = Remains([], State(start, 0, 0, start))
    state = remains.state
    for each in segments:
        is_last = each is segments[-1]
        whole = _cut_to_whole(each, 0, high, look_for_nul=is_last)
        remains.cut += each.size - whole.size
        if not whole.size and not (is_last and each.first == state.end_offset):
            segment.remove([each])  # it cannot say which records come after it; the next one can
            continue
        if each.first < state.end_offset:
            raise CorruptError(f"{each.path}: the segment before it has records up to {state.end_offset - 1}")
        _check_order(each, state.last_seq)
        if each.first > state.end_offset:
            remains.gaps.append(_gap(remains, each))
        state.end_offset = each.first + whole.lines
        state.size += whole.size
        state.last_seq = whole.last_seq or state.last_seq
        remains.segments.append(Segment(each.first, each.path, whole.size))
    remains.touched = remains.segments[:-1]
    return remains


def _first_seq(of: Segment) -> int:
    with open(of.path, "rb") as file:
        return segment.stamp(file.read(64))[0]


def _check_order(later: Segment, before: int) -> None:
    """Raise CorruptError where a segment is older than the one before it: appending to it would lose the rest."""
    seq = _first_seq(later)
    if 0 < seq <= before:
        raise CorruptError(
            f"{later.path}: begins with seq {seq}, but the segment before it ends with seq {before};"
            " run kmq verify --repair"
        )


def _gap(remains: Remains, after: Segment) -> Gap:
    """What is missing in front of `after`."""
    into = remains.segments[-1] if remains.segments else None
    if into is not None and index.is_whole(into.path):
        into = None
    seqs = SeqRange(remains.state.last_seq + 1, _first_seq(after) - 1)
    return Gap(remains.state.end_offset, after.first, seqs, into)


class WholePart(namedtuple("WholePart", ("size", "lines", "last_seq"))):
    """What is whole in a segment: its bytes, the lines behind what the checkpoint covers, its last seq (0: no line)."""

    __slots__ = ()


def _cut_to_whole(part: Segment, floor: int, high: int, look_for_nul: bool) -> WholePart:
    """Cut a segment to what is whole; not below byte `floor`, nor with a seq above `high`."""

    def is_ours(line: bytes) -> bool:
        stamp = record.parse_stored(line)
        return stamp is not None and stamp[0] <= high

    fd = os.open(part.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        nul = find_nul(fd, floor, part.size) if look_for_nul else -1
        tail = find_tail(fd, part.size if nul < 0 else nul, is_ours, floor)
        if tail.size < part.size:
            os.ftruncate(fd, tail.size)
        offset, position = last_before(segment.index_path(part.path), tail.size, 1 << 62)
        if floor or offset < part.first:
            offset, position = part.first, floor
        lines = offset - part.first + count_lines(fd, position, tail.size)
        return WholePart(tail.size, lines, record.seq_of(tail.last) if tail.last else 0)
    finally:
        os.close(fd)
