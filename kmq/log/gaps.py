"""Gaps: offsets that no record has, because the data directory was put back from an older copy (`kmq tier fork`).

    data/restored               one line per fork: the first seq after the copy, the first offset of later records
        21|1000000010|1795276288.490144|<id of the directory before>
        crc32|<crc32 of the lines above>
    topics/orders/0/tier        the gaps of one partition, beside its rows (rows.py)
        kmq-tier 1 lineage=<hex> log=orders/0 life=7
        0 gap orders/0 life=7 from=10 to=1000000010 why=fork

The copy ended with seq 20, and orders/0 with offset 9. The broker had then acknowledged records that the copy lacks, and
consumers have read them. Their offsets are given to no other record: the next one gets offset 1000000010. `life` is the
from_seq of the topic. The 0 stands where a tier names the commit of a line.

Owner       `restored` is written by the command while the broker is down. The router writes `tier` (the command calls it).
Invariant   In every partition of a topic of users the records with a seq from that of a fork on have offsets from that of
            the fork on, and all earlier records have lower ones. So no offset ever means two records, and a partition
            that is rebuilt from the WAL has the same offsets and the same gap again.
            A gap lies between two segments: the later one has the name `to`. No segment, block or answer spans a gap.
            Topics whose names begin with `__` have no gaps: only KMQ reads them, always from the start.
Crash       Every file is replaced atomically. `tier` is on disk before the segment after the gap is made. A start makes
            that segment again, and a lost `tier`, from `restored`. `restored` has a copy, topics/.restored.
Damage      While `tier` is damaged the gaps are those between segments. Before the first segment nobody reads then.
Not covered A segment before a gap that loses its end together with `tier`: the copy in the WAL shows the loss to verify.
"""

import os
from collections import namedtuple
from collections.abc import Iterator, Sequence

from kmq.files import replace_file
from kmq.log import dropped, index, rows, segment, twins
from kmq.log.damage import DamageError
from kmq.log.rows import FILE
from kmq.log.segment import Segment

NAME = "restored"
COPY = "topics/.restored"
INTERNAL = "__"  # topics with such names have no gaps

# --- forks -----------------------------------------------------------------------------------------------------------


class Fork(namedtuple("Fork", ("seq", "offset", "ts", "of"), defaults=("0.000000", ""))):
    """Records from `seq` on have offsets from `offset` on. `ts`: when the directory `of` was forked."""

    __slots__ = ()


Forks = tuple[Fork, ...]


def forks(data: str) -> Forks:
    """Return the forks of a data directory, the oldest first. Raises CorruptError if both copies are damaged."""
    advice = "restore it: it says which offsets were given out before a fork"
    return twins.read(data, (NAME, COPY), _parse, advice)


def _parse(lines: list[str]) -> Forks:
    rows = (line.split("|") for line in lines)
    return tuple(Fork(int(seq), int(offset), ts, of) for seq, offset, ts, of in rows)


def faults(data: str) -> dict[str, str]:
    """Return which of the two copies of `restored` is wrong, and why."""
    return twins.faults(data, (NAME, COPY), _parse)


def write_forks(data: str, found: Sequence[Fork]) -> None:
    """Write both copies of `restored` to disk."""
    content = twins.seal("".join(f"{fork.seq}|{fork.offset}|{fork.ts}|{fork.of}\n" for fork in found).encode())
    for name in (NAME, COPY):
        replace_file(f"{data}/{name}", content)


def forks_of(found: Forks, topic: str) -> Forks:
    """Return the forks that concern a topic: none for an internal topic."""
    return () if topic.startswith(INTERNAL) else found


def least_offset(found: Forks, topic: str, born: int) -> int:
    """Return the offset at which a partition begins at least, if it exists since seq `born`."""
    return max((fork.offset for fork in forks_of(found, topic) if fork.seq <= born), default=0)


# --- the gaps of one partition ---------------------------------------------------------------------------------------


class Gap(namedtuple("Gap", ("first", "to"))):
    """The offsets first…to-1, which no record has."""

    __slots__ = ()


Gaps = tuple[Gap, ...]


def of_wal(data: str) -> Gaps:
    """Return the gaps of seqs that forks have left in the WAL."""
    starts = {fork.seq for fork in forks(data)}
    return tuple(Gap(gone.first, gone.last + 1) for gone in dropped.read(data, "framed", True) if gone.first in starts)


def read(directory: str) -> Gaps:
    """Return the gaps of a partition, in order. If `tier` is damaged, those between its segments: before the first one
    nobody is shown anything then.
    """
    try:
        return tuple(Gap(*pair) for pair in rows.of(directory).gaps)
    except DamageError:
        log, data = rows.label_of(directory)
        found = forks_of(forks(data), log.rpartition("/")[0])
        return tuple(between(segment.survey(directory), found, None)) if found else ()


def between(segments: Sequence[Segment], found: Forks, cold_end: int | None) -> Iterator[Gap]:
    """Yield the gaps of a log by its segments: the segment after a gap has the offset of a fork.

    `cold_end`: where the rows before the first segment end; 0 without rows, None if that is not known.
    """
    offsets = {fork.offset for fork in found}
    for number, part in enumerate(segments if found else ()):
        end = segment.end_of(segments[number - 1]) if number else cold_end
        if part.first in offsets and end is not None and end < part.first:
            yield Gap(end, part.first)


def parse(content: bytes, log: str) -> Gaps | None:
    """Return the gaps in the content of `tier`; None if it is damaged, or of another partition than `log`."""
    found = rows.parse(content, log)
    return None if found is None else tuple(Gap(*pair) for pair in found.gaps)


def write(directory: str, life: int, found: Sequence[Gap]) -> None:
    """Put these gaps into `tier`, which keeps its rows; it is on disk when this returns.

    A damaged file stays if it may have had rows: it is laid out again, and `restored` has the gaps.
    """
    log, data = rows.label_of(directory)
    content = rows.content_of(directory)
    before = None if content is None else rows.parse(content, log)
    if content is not None and before is None and rows.may_exist(data):
        return
    if before is None or before.life != life:
        before = rows.empty(index.lineage_of(data), log, life)
    before.gaps = tuple((gap.first, gap.to) for gap in found)
    replace_file(rows.path_of(directory), before.text())


def relabel(path: str, lineage: str) -> None:
    """Put another lineage into a file `tier`. Its rows name objects of the lineage before: by full keys from then on."""
    with open(path, "rb") as file:
        found = rows.parse(file.read())
    if found is not None and found.lineage != lineage:
        replace_file(path, found.relabelled(lineage).text())


def name_records(data: str, lineage: str) -> None:
    """Make the directory another one: `lineage` becomes its id and lineage, also in each index and each `tier`.

    The broker is down. Call it again after a kill: until `id` is replaced some files have the old lineage.
    """
    for top in ("append", "topics"):
        for directory, _, names in os.walk(f"{data}/{top}"):
            for name in names:
                if name.endswith(".idx") or name == "idx":  # `idx`: of a compacted segment that is not installed yet
                    index.relabel(f"{directory}/{name}", lineage)
                elif name == FILE:
                    relabel(f"{directory}/{name}", lineage)
    for name in ("lineage", "id"):
        replace_file(f"{data}/{name}", f"{lineage}\n".encode())


# --- offsets and gaps ------------------------------------------------------------------------------------------------


def ends(followers: Sequence[int], found: Gaps) -> list[int]:
    """Return where segments end. `followers`: with which offsets the segments after them begin, or the log ends."""
    if not found:
        return list(followers)
    first_of = {gap.to: gap.first for gap in found}
    return [first_of.get(offset, offset) for offset in followers]


def is_gap(found: Gaps, offset: int, to: int) -> bool:
    """Return True if a gap reaches from `offset`, or from before it, to the offset `to`."""
    return any(gap.first <= offset and gap.to == to for gap in found)


def passed(found: Gaps, offset: int) -> int:
    """Return the offset at which a reader resumes: `offset`, or, if that lies in a gap, the end of the gap."""
    for gap in found:  # one may follow another
        if gap.first <= offset < gap.to:
            offset = gap.to
    return offset


def before(found: Gaps, end: int) -> int:
    """Return the offset after the last record before `end`: `end`, or, if a gap ends there, its first offset."""
    return next((gap.first for gap in found if gap.first <= end <= gap.to), end)


def back(found: Gaps, end: int, count: int) -> int:
    """Return the offset `count` records before the offset `end`; it may be negative."""
    offset = end - count
    for gap in reversed(found):
        if offset < gap.to <= end:
            offset -= gap.to - gap.first
    return offset


def range_of(found: Gaps, start: int, end: int) -> range:
    """Return the offsets start…end-1 without a gap: the part before a gap that reaches the end, else the part after it."""
    for gap in found:
        if gap.first < end <= gap.to:
            end = max(start, gap.first)
        elif start < gap.to < end:
            start = gap.to
    return range(start, end)


def count(found: Gaps, start: int, end: int) -> int:
    """Return how many of the offsets start…end-1 lie in gaps."""
    return sum(max(0, min(gap.to, end) - max(gap.first, start)) for gap in found)
