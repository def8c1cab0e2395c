"""What lies in one segment, byte by byte: blocks that are as their index says, blocks that are not, and what it does
not speak of.

Read-only. What `kmq verify` reports and `kmq verify --repair` starts from.
"""

import os
import zlib
from collections.abc import Callable
from typing import NamedTuple

from kmq import record, routing
from kmq.log import topics
from kmq.log.damage import DamageError
from kmq.log.index import Entry, label, lineage_of, parse_label, parse_line, place_of
from kmq.log.lines import bad_line, seqs_of
from kmq.log.reader import Segment

_CHUNK = 1 << 20


class Part(NamedTuple):
    """A stretch of a segment, one block of its index or what the index does not speak of."""

    position: int
    end: int
    is_good: bool
    first_seq: int  # of a good one; 0 where it has no record
    last_seq: int
    records: int  # of a good one, with those that compaction took
    what: str = ""
    entry: Entry | None = None  # its index line

    @property
    def is_witnessed(self) -> bool:
        """Whether a checksum says that it is as it was written, not only that it looks well."""
        return self.is_good and self.entry is not None


class Scan(NamedTuple):
    """What was found in one segment."""

    path: str
    first: int  # by its name
    size: int
    parts: list[Part]  # in order, without a hole; they may reach beyond `size` where the log has been cut
    wrong: list[tuple[int, str]]  # (byte, what) of each line of its index that is
    torn: int  # bytes of a torn end
    unindexed: int  # good bytes that the index does not speak of
    misplaced: str = ""  # why it is another segment than its place says


def scan(first: int, path: str, by_seq: bool, sealed: bool, progress: Callable[[int], None] = lambda _: None) -> Scan:
    """Look at every byte of a segment."""
    with Segment(path, first, by_seq, sealed, trust=True) as held:
        entries, wrong = _entries(held)
        wrong[:0] = label_faults(held, entries)
        misplaced = "" if wrong[:1] == [(0, DAMAGED_LABEL)] else held.misplaced()
        found = Scan(path, first, held.size, [], wrong, 0, 0, misplaced)
        if entries and entries[0][1].offset != first and not by_seq:
            wrong.append((entries[0][0], f"does not begin with record {first}"))
        end = 0
        for number, (at, entry) in enumerate(entries):
            if entry.position != end:
                found.parts.append(Part(end, entry.position, False, 0, 0, 0, "no index line for it"))
            following = entries[number + 1][1] if number + 1 < len(entries) else None
            part = _block(held, entry, following, found, at)
            found.parts.append(part)
            end = part.end
            progress(part.end - part.position)
        return _rest(held, end, found, progress)


def _entries(held: Segment) -> tuple[list[tuple[int, Entry]], list[tuple[int, str]]]:
    """((byte, entry) of the index lines in force, in order; (byte, what) of those that make no sense)."""
    with open(held.index.path, "rb") if held.index.fd >= 0 else open(os.devnull, "rb") as file:
        text = file.read()
    kept: list[tuple[int, Entry]] = []
    wrong: list[tuple[int, str]] = []
    at = held.index.begin
    for line in text[at : text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        entry = parse_line(line)
        if entry is None:
            wrong.append((at, "not an index line"))
        else:
            here = at, entry
            if kept and not _follows(kept[-1][1], entry):
                # One of the two has been damaged: the one that does not fit between its neighbours.
                if len(kept) == 1 or _follows(kept[-2][1], entry):
                    wrong.append((kept.pop()[0], "does not fit between its neighbours"))
                else:
                    wrong.append((at, "does not follow from the line before it"))
                    at += len(line) + 1
                    continue
            if kept and kept[-1][1].offset == entry.offset:
                kept.pop()  # provisional
            kept.append(here)
        at += len(line) + 1
    if text[at:].strip(b"0123456789.|"):  # else a line that is being written, or torn by a kill
        wrong.append((at, "not an index line"))
    return kept, wrong


DAMAGED_LABEL = "its first line, which says whose it is, is damaged"


def label_faults(held: Segment, entries: list[tuple[int, Entry]]) -> list[tuple[int, str]]:
    """What is wrong with the first line of an index, where that is damage and no claim to be another's."""
    wanted, says = label(held.path), held.index.label
    if wanted and says not in (b"", wanted) and claimed(held, entries[0][1].offset if entries else -1) is None:
        return [(0, DAMAGED_LABEL)]
    return [(0, what)] if (what := held.unlabelled()) else []


def claimed(held: Segment, first_entry: int) -> tuple[str, str, int] | None:
    """(lineage, log, base) that a segment's index claims, where that is another place and believable; None where it is
    damage.

    One flipped bit may turn a digit into another one. So a base is believed where the first block of the index begins
    with it too, and a log that is one bit away where its first record is routed there.
    """
    place, fields = place_of(held.path), parse_label(held.index.label)
    if place is None or fields is None:
        return None
    ours, (lineage, log, base) = (lineage_of(place[0]), *place[1:]), fields
    if _bits(lineage, ours[0]) == 1 or (base != ours[2] and base != first_entry):
        return None
    if _bits(log, ours[1]) == 1 and _route(place[0], held) != log:
        return None
    return None if fields == ours else fields


def _bits(a: str, b: str) -> int:
    """In how many bits they differ."""
    if len(a) != len(b):
        return 8
    return sum((x ^ y).bit_count() for x, y in zip(a.encode(), b.encode(), strict=True))


def _route(data: str, held: Segment) -> str:
    """To which partition the first record of a segment goes, as <topic>/<partition>."""
    seq, key = held.first_record()
    table = topics.table(data)
    route = routing.resolve(table, key, seq)
    topic = table.get(route.topic)
    return f"{route.topic.decode(errors='replace')}/{topic.partition_of(route, seq) if topic else 0}"


def _follows(before: Entry, entry: Entry) -> bool:
    up = (entry.offset > before.offset) == (entry.position > before.position)
    return up and entry.offset >= before.offset and entry.position >= before.position


def _block(held: Segment, entry: Entry, following: Entry | None, found: Scan, at: int) -> Part:
    """The block of an index line."""
    if following is not None:
        end = following.position
    else:
        try:
            end = held.covered(entry)
        except DamageError as err:
            end = max(err.end, entry.position)
            if b"\n" not in os.pread(held.fd, _CHUNK, end):  # its last newline may be what has been damaged
                end = max(end, held.size)
            return Part(entry.position, end, False, 0, 0, 0, err.what, entry)
    data = os.pread(held.fd, max(0, min(end, held.size) - entry.position), entry.position)
    if zlib.crc32(data) != entry.crc or len(data) < end - entry.position:
        return Part(entry.position, end, False, 0, 0, 0, _where(data, entry.position), entry)
    bad = bad_line(data)
    if bad is not None:  # the crc is right: it was written so
        what = f"byte {entry.position + bad}: not a stored line in order of seq"
        return Part(entry.position, end, False, 0, 0, 0, what, entry)
    seqs = seqs_of(data)
    what = held.fault(entry, data, following.offset if following else 0)
    if what:
        found.wrong.append((at, what))
    return Part(
        entry.position, end, True, seqs[0] if seqs else 0, seqs[-1] if seqs else 0, data.count(b"\n"), "", entry
    )


def _where(data: bytes, position: int) -> str:
    """What is wrong with a block whose crc is: the line, where its syntax tells."""
    bad = bad_line(data)
    return "crc mismatch" if bad is None else f"crc mismatch, and byte {position + bad} begins no stored line"


def _rest(held: Segment, end: int, found: Scan, progress: Callable[[int], None]) -> Scan:
    """What the index does not speak of, from byte `end` on."""
    unindexed = torn = 0
    want, after = _CHUNK, max([0, *(part.last_seq for part in found.parts)])
    while end < held.size:
        data = os.pread(held.fd, min(want, held.size - end), end)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and want < held.size - end:
            want *= 2
            continue
        bad = bad_line(whole, after)
        good = whole[:bad]
        if good:
            seqs = seqs_of(good) or [0]
            found.parts.append(Part(end, end + len(good), True, seqs[0], seqs[-1], good.count(b"\n")))
            after = max(after, seqs[-1])
            unindexed += len(good)
            end += len(good)
            progress(len(good))
        if bad is not None or not whole:
            rest = os.pread(held.fd, held.size - end, end)
            if held.sealed or _holds_records(rest):
                found.parts.append(Part(end, held.size, False, 0, 0, 0, "not a stored line in order of seq"))
            else:
                torn = held.size - end
            break
    return found._replace(torn=torn, unindexed=unindexed)


def _holds_records(rest: bytes) -> bool:
    """Whether good lines follow a bad place, which is no torn end then."""
    return any(record.parse_stored(line) for line in rest.rstrip(b"\0").split(b"\n")[1:-1])
