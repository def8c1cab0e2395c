"""Recovery of a partition log after a crash: compares its files with the checkpoint, and cuts what is not whole.

Owner       the router, at its start: nothing else may cut.
Invariant   If the files agree with the checkpoint, only records after it are suspect: the log is cut at the first torn
            or NUL byte after it, because the WAL still has those records. If they disagree, the files were damaged:
            then only torn ends are cut.
Crash       Segments are removed from the last to the first, so a kill never leaves a new gap.
"""

import os
from collections import namedtuple

from kmq.errors import CorruptError
from kmq.files import find_nul, find_tail
from kmq.log import gaps, index, rows, segment
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.gaps import Forks, Gap, Gaps
from kmq.log.index import last_before
from kmq.log.partition import PartitionState
from kmq.log.segment import Segment, count_lines
from kmq.message import record

_LOOK = 4096  # bytes at the end of an unchanged log that a start reads


class WalRange(namedtuple("WalRange", ("first", "last", "has_rest"))):
    """The seqs first…last of the WAL. `has_rest`: the WAL still has every record after the checkpoint."""

    __slots__ = ()


class MissingRange:
    """Missing records first…end - 1, before another segment. The WAL holds them in the range `seqs`."""

    __slots__ = ("end", "first", "into", "seqs")

    def __init__(self, first: int, end: int, seqs: SeqRange, into: Segment | None) -> None:
        self.first, self.end, self.seqs = first, end, seqs
        self.into = into  # the cut segment that they complete; None if whole files are missing


class Remains:
    """What recovery left of a partition log whose files do not match the checkpoint."""

    __slots__ = ("cut", "missing", "segments", "state", "touched")

    def __init__(self, segments: list[Segment], state: PartitionState) -> None:
        self.segments, self.state = segments, state
        self.cut = 0  # bytes cut off: torn, NUL, or after such bytes
        self.missing: list[MissingRange] = []
        self.touched: list[Segment] = []  # sealed segments that may not be synced


def fits(segments: list[Segment], ckpt: PartitionState) -> bool:
    """Return True if the files match the checkpoint `ckpt`, by their sizes and one small read at the end."""
    if sum(part.size for part in segments) != ckpt.size:
        return False
    if not segments:
        return ckpt.end_offset == ckpt.start and not ckpt.last_seq  # it never had a record
    last = segments[-1]
    if not last.size:
        return last.first == ckpt.end_offset
    return segments[0].first == ckpt.start and ends_as(last.path, last.size, ckpt.last_seq)


def ends_as(path: str, size: int, last_seq: int) -> bool:
    """Return True if record `last_seq` ends at byte `size`. One small read, which also reveals a zeroed end."""
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


def recover(
    segments: list[Segment], ckpt: PartitionState, wal: WalRange, start: int, found: Gaps = (), forks: Forks = ()
) -> Remains:
    """Cut the files of a log to what is whole, and return what remains.

    `ckpt` is what the checkpoint says was on disk. Everything after it may be torn or hold NULs after a power cut. So
    if the WAL still has those records, the log is cut at the first such byte. If the files differ from `ckpt`, they
    were damaged: then only torn ends are cut, and records that are missing between two segments, or between record
    `start` and the first segment, are returned as a MissingRange. `found`: the gaps of the log, where no record is missing.

    A last line whose seq is above the end of the WAL is cut in either case: the router did not write it, and would skip
    all later records up to its seq.
    """
    checkpointed = _checkpointed_end(ckpt, segments)
    if checkpointed is not None and wal.has_rest:
        return _cut_after_checkpoint(segments, checkpointed, ckpt, wal.last, found)
    return _cut_torn_ends(segments, wal.last, start, found, forks)


def find_gaps(directory: str, segments: list[Segment], forks: Forks) -> tuple[Gaps, bool]:
    """Return the gaps of a log, and if they have to be written again: the segment after a gap has the offset of a fork."""
    if not forks:
        return (), False
    offsets = {fork.offset for fork in forks}
    cold_end: int | None
    try:
        file = rows.of(directory)
        cold_end = file.end or 0
        found = {to: Gap(first, to) for first, to in file.gaps if to in offsets}
    except DamageError:
        found, cold_end = {}, None if rows.may_exist(rows.label_of(directory)[1]) else 0
    lost = {gap.to: gap for gap in gaps.between(segments, forks, cold_end) if gap.to not in found}
    # A kill came before the segment after a gap was made: what was noted for it is noted again.
    there = [
        gap for gap in found.values() if not any(gap.first < each.to and each.first < gap.to for each in lost.values())
    ]
    return tuple(sorted([*there, *lost.values()])), bool(lost) and cold_end is not None


class FilePlace(namedtuple("FilePlace", ("number", "byte"))):
    """A byte in the segment of that number, counted from the oldest segment."""

    __slots__ = ()


def _checkpointed_end(ckpt: PartitionState, segments: list[Segment]) -> FilePlace | None:
    """Return where the records of the checkpoint end in the files; None if the files do not match it."""
    if not segments or segments[0].first != ckpt.start:
        return None
    at = max(number for number, part in enumerate(segments) if part.first <= ckpt.end_offset)
    floor = ckpt.size - sum(part.size for part in segments[:at])
    if floor == 0:
        return FilePlace(at, 0) if segments[at].first == ckpt.end_offset else None
    is_there = 0 < floor <= segments[at].size and ends_as(segments[at].path, floor, ckpt.last_seq)
    return FilePlace(at, floor) if is_there else None


def _cut_after_checkpoint(
    segments: list[Segment], checkpointed: FilePlace, ckpt: PartitionState, high: int, found: Gaps
) -> Remains:
    """Keep everything up to `checkpointed`, and cut at the first bad byte after it."""
    at, floor = checkpointed
    remains = Remains(segments[:at], PartitionState(*ckpt.values()))
    state = remains.state
    for part in segments[at:]:
        if not floor and part.first != state.end_offset:
            if not gaps.is_gap(found, state.end_offset, part.first):
                break
            state.end_offset = part.first
        whole = _cut_to_whole(part, floor, high, look_for_nul=True)
        state.end_offset += whole.lines
        state.size += whole.size - floor
        state.last_seq = whole.last_seq or state.last_seq
        floor = 0
        remains.cut += part.size - whole.size
        remains.segments.append(Segment(part.first, part.path, whole.size))
        if whole.size < part.size:
            break
    gone = segments[len(remains.segments) :]
    remains.cut += sum(part.size for part in gone)
    segment.remove(gone[::-1])  # the last segment first, so that a crash leaves no gap
    remains.touched = remains.segments[at:-1]
    return remains


def _cut_torn_ends(segments: list[Segment], high: int, start: int, found: Gaps, forks: Forks) -> Remains:
    """Cut the torn end of each segment, and find the records that are missing between segments."""
    remains = Remains([], PartitionState(start, 0, 0, start))
    state = remains.state
    for part in segments:
        is_last = part is segments[-1]
        whole = _cut_to_whole(part, 0, high, look_for_nul=is_last)
        remains.cut += part.size - whole.size
        before_gap = gaps.ends([part.first], found)[0]
        is_next = state.end_offset in (before_gap, part.first)
        if not whole.size and not (is_last and is_next):
            segment.remove([part])  # it has no record; the next segment's name tells how many are missing
            continue
        if part.first < state.end_offset:
            raise CorruptError(
                f"{part.path}: begins with record {part.first}, but the segment before it ends with record"
                f" {state.end_offset - 1}; run kmq verify --repair"
            )
        _check_order(part, state.last_seq)
        if min(part.first, before_gap) > state.end_offset:
            remains.missing.append(_missing_before(remains, part, before_gap, forks))
        state.end_offset = part.first + whole.lines
        state.size += whole.size
        state.last_seq = whole.last_seq or state.last_seq
        remains.segments.append(Segment(part.first, part.path, whole.size))
    remains.touched = remains.segments[:-1]
    return remains


def _first_seq(of: Segment) -> int:
    with open(of.path, "rb") as file:
        return record.stamp(file.read(64))[0]


def _check_order(later: Segment, before: int) -> None:
    """Raise CorruptError if a segment is older than the segment before it, which ends with seq `before`.

    Such a segment is misplaced: an append after it would lose the records that belong in its place.
    """
    seq = _first_seq(later)
    if 0 < seq <= before:
        raise CorruptError(
            f"{later.path}: begins with seq {seq}, but the segment before it ends with seq {before};"
            " run kmq verify --repair"
        )


def _missing_before(remains: Remains, after: Segment, end: int, forks: Forks) -> MissingRange:
    """Return the records up to offset `end` that are missing before the segment `after`."""
    into = remains.segments[-1] if remains.segments else None
    if into is not None and index.is_whole(into.path):
        into = None
    last = next((fork.seq for fork in forks if end < fork.offset == after.first), 0) or _first_seq(after)
    return MissingRange(remains.state.end_offset, end, SeqRange(remains.state.last_seq + 1, last - 1), into)


class WholePart(namedtuple("WholePart", ("size", "lines", "last_seq"))):
    """The whole part of a segment: bytes, lines after those of the checkpoint, and last seq (0: no line)."""

    __slots__ = ()


def _cut_to_whole(part: Segment, floor: int, high: int, look_for_nul: bool) -> WholePart:
    """Cut a segment to its whole lines with seqs up to `high`; never below byte `floor`."""

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
