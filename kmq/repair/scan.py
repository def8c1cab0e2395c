"""Scan: checks one segment byte by byte. It finds blocks that match their index line, bad blocks, and uncovered bytes.

It also finds the records that can still be trusted in bad blocks and uncovered bytes. Read-only. `kmq verify` reports
the result, and `kmq verify --repair` starts from it.
"""

import os
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kmq.files import before_nuls
from kmq.log import topics, wal
from kmq.log.damage import DamageError
from kmq.log.index import IndexEntry, label, lineage_of, parse_label, parse_line, place_of
from kmq.log.segment import bad_line, seqs_of
from kmq.log.segment_reader import SegmentReader
from kmq.log.wal import RING_BYTES
from kmq.message import record, routing

_CHUNK = 1 << 20


class ScannedBlock(NamedTuple):
    """Bytes of a segment: those that one index line covers, or a run that no index line covers."""

    position: int
    end: int
    is_good: bool
    first_seq: int  # of a good block; 0: it has no record
    last_seq: int
    records: int  # of a good block, with those that compaction removed
    what: str = ""  # what is wrong with a bad block
    entry: IndexEntry | None = None  # its index line

    @classmethod
    def good(cls, position: int, data: bytes, entry: IndexEntry | None = None) -> "ScannedBlock":
        seqs = seqs_of(data) or [0]
        return cls(position, position + len(data), True, seqs[0], seqs[-1], data.count(b"\n"), "", entry)

    @classmethod
    def bad(cls, position: int, end: int, what: str, entry: IndexEntry | None = None) -> "ScannedBlock":
        return cls(position, end, False, 0, 0, 0, what, entry)

    @property
    def is_witnessed(self) -> bool:
        """Return True if a checksum confirms the block, so that it does not just look good."""
        return self.is_good and self.entry is not None


class Scan(NamedTuple):
    """The result of scanning one segment."""

    path: str
    first: int  # seq or offset, by its name
    by_seq: bool  # a segment of the WAL
    size: int
    blocks: list[ScannedBlock]  # in order, without a hole; they may reach beyond `size` if the log was cut
    wrong: list[tuple[int, str]]  # (byte, what) of each wrong line of its index
    torn: int = 0  # bytes of a torn end
    unindexed: int = 0  # good bytes that the index does not cover
    misplaced: str = ""  # why it belongs to another place; "": it does not

    @property
    def last_seq(self) -> int:
        """Return the highest seq of a good block, or 0."""
        return max([0, *(block.last_seq for block in self.blocks)])

    def seq_from(self, number: int) -> int:
        """Return the first seq of the first good block with records, from block `number` on, or 0."""
        return next((block.first_seq for block in self.blocks[number:] if block.first_seq), 0)

    def read(self, block: ScannedBlock) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(block.position)
            return file.read(block.end - block.position)


def scan_segment(
    first: int,
    path: str,
    by_seq: bool,
    sealed: bool,
    progress: Callable[[int], None] = lambda _: None,
    ring_bytes: int = RING_BYTES,
) -> Scan:
    """Scan every byte of a segment. `ring_bytes`: RB_BYTES of the broker, from which follows what may be torn."""
    with SegmentReader(path, first, by_seq, sealed, trust=True) as segment:
        entries, wrong = _entries(segment)
        wrong[:0] = label_faults(segment, entries)
        misplaced = "" if wrong[:1] == [(0, DAMAGED_LABEL)] else segment.misplaced()
        if entries and entries[0][1].offset != first and not by_seq:
            wrong.append((entries[0][0], f"does not begin with record {first}"))
        scan = Scan(path, first, by_seq, segment.size, [], wrong, misplaced=misplaced)
        end = 0
        for number, (byte, entry) in enumerate(entries):
            if entry.position != end:
                scan.blocks.append(ScannedBlock.bad(end, entry.position, "no index line for it"))
            following = entries[number + 1][1] if number + 1 < len(entries) else None
            block, fault = _covered_block(segment, entry, following)
            scan.blocks.append(block)
            if fault:
                wrong.append((byte, fault))
            end = block.end
            progress(block.end - block.position)
        # Durability's next start refuses a longer torn end; the router cuts any (partition_recovery.py).
        may_be_torn = wal.torn_bytes(ring_bytes) if by_seq else segment.size
        return _uncovered(segment, end, scan, progress, may_be_torn)


def _entries(segment: SegmentReader) -> tuple[list[tuple[int, IndexEntry]], list[tuple[int, str]]]:
    """Return ((byte, entry) of the index lines in force, in order; (byte, what) of the wrong lines)."""
    with open(segment.index.path, "rb") if segment.index.fd >= 0 else open(os.devnull, "rb") as file:
        text = file.read()
    entries: list[tuple[int, IndexEntry]] = []
    wrong: list[tuple[int, str]] = []
    byte = segment.index.begin
    for line in text[byte : text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        entry = parse_line(line)
        if entry is None:
            wrong.append((byte, "not an index line"))
        elif not entries or _follows(entries[-1][1], entry):
            _append_entry(entries, byte, entry)
        # One of the two lines is damaged: the one that does not fit between its neighbours.
        elif len(entries) == 1 or _follows(entries[-2][1], entry):
            wrong.append((entries.pop()[0], "does not fit between its neighbours"))
            _append_entry(entries, byte, entry)
        else:
            wrong.append((byte, "does not follow from the line before it"))
        byte += len(line) + 1
    if text[byte:].strip(b"0123456789.|"):  # digits only: the line is being written, or a kill has torn it
        wrong.append((byte, "not an index line"))
    return entries, wrong


def _append_entry(entries: list[tuple[int, IndexEntry]], byte: int, entry: IndexEntry) -> None:
    if entries and entries[-1][1].offset == entry.offset:
        entries.pop()  # provisional
    entries.append((byte, entry))


DAMAGED_LABEL = "its first line, which says whose it is, is damaged"


def label_faults(segment: SegmentReader, entries: list[tuple[int, IndexEntry]]) -> list[tuple[int, str]]:
    """Return what is wrong with the label of an index, if it is damaged rather than the label of another place."""
    wanted, says = label(segment.path), segment.index.label
    if wanted and says not in (b"", wanted) and claimed(segment, entries[0][1].offset if entries else -1) is None:
        return [(0, DAMAGED_LABEL)]
    return [(0, what)] if (what := segment.unlabelled()) else []


def claimed(segment: SegmentReader, first_entry: int) -> tuple[str, str, int] | None:
    """Return the (lineage, log, base) in a label if it credibly names another place, else None.

    A flipped bit may turn one digit into another. So a different base is credible only if the first block of the index
    begins with it, and a log whose name differs by one bit only if its first record is routed there.
    """
    place, fields = place_of(segment.path), parse_label(segment.index.label)
    if place is None or fields is None:
        return None
    ours, (lineage, log, base) = (lineage_of(place[0]), *place[1:]), fields
    if _bits(lineage, ours[0]) == 1 or (base != ours[2] and base != first_entry):
        return None
    if _bits(log, ours[1]) == 1 and _route(place[0], segment) != log:
        return None
    return None if fields == ours else fields


def _bits(a: str, b: str) -> int:
    """Return the number of bits in which two texts differ."""
    if len(a) != len(b):
        return 8
    return sum((x ^ y).bit_count() for x, y in zip(a.encode(), b.encode(), strict=True))


def _route(data: str, segment: SegmentReader) -> str:
    """Return the partition of a segment's first record, as <topic>/<partition>."""
    first, table = segment.first_record(), topics.table(data)
    if first is None:
        return ""
    route = routing.resolve(table, first.routing_key, first.seq)
    topic = table.get(route.topic)
    return f"{route.topic.decode(errors='replace')}/{topic.partition_of(route, first.seq) if topic else 0}"


def _follows(before: IndexEntry, entry: IndexEntry) -> bool:
    up = (entry.offset > before.offset) == (entry.position > before.position)
    return up and entry.offset >= before.offset and entry.position >= before.position


def _covered_block(segment: SegmentReader, entry: IndexEntry, following: IndexEntry | None) -> tuple[ScannedBlock, str]:
    """Return the block of an index line, and what is wrong with that line; `following`: the line after it."""
    if following is not None:
        end = following.position
    else:
        try:
            end = segment.covered_end(entry)
        except DamageError as err:
            end = max(err.end, entry.position)
            if b"\n" not in os.pread(segment.fd, _CHUNK, end):  # the damage may have hit its last newline
                end = max(end, segment.size)
            return ScannedBlock.bad(entry.position, end, err.what, entry), ""
    data = os.pread(segment.fd, max(0, min(end, segment.size) - entry.position), entry.position)
    if zlib.crc32(data) != entry.crc or len(data) < end - entry.position:
        return ScannedBlock.bad(entry.position, end, _mismatch(data, entry.position), entry), ""
    bad = bad_line(data)
    if bad is not None:  # the crc matches, so it was written like that
        what = f"byte {entry.position + bad}: not a stored line in order of seq"
        return ScannedBlock.bad(entry.position, end, what, entry), ""
    fault = segment.fault(entry, data, following.offset if following else 0)
    return ScannedBlock.good(entry.position, data, entry), fault


def _mismatch(data: bytes, position: int) -> str:
    """Return what is wrong with a block whose crc is wrong: the damaged line, if its syntax reveals it."""
    bad = bad_line(data)
    return "crc mismatch" if bad is None else f"crc mismatch, and byte {position + bad} begins no stored line"


def _uncovered(segment: SegmentReader, end: int, scan: Scan, progress: Callable[[int], None], may_be_torn: int) -> Scan:
    """Add the bytes that the index does not cover, from byte `end` on."""
    unindexed = torn = 0
    want, last_seq = _CHUNK, scan.last_seq
    while end < segment.size:
        data = os.pread(segment.fd, min(want, segment.size - end), end)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and want < segment.size - end:
            want *= 2
            continue
        bad = bad_line(whole, last_seq)
        good = whole[:bad]
        if good:
            block = ScannedBlock.good(end, good)
            scan.blocks.append(block)
            last_seq = max(last_seq, block.last_seq)
            unindexed += len(good)
            end += len(good)
            progress(len(good))
        if bad is not None or not whole:
            rest = os.pread(segment.fd, before_nuls(segment.fd, segment.size) - end, end)
            if segment.sealed or len(rest) > may_be_torn or _holds_records(rest):
                scan.blocks.append(ScannedBlock.bad(end, segment.size, "not a stored line in order of seq"))
            else:
                torn = segment.size - end
            break
    return scan._replace(torn=torn, unindexed=unindexed)


def _holds_records(rest: bytes) -> bool:
    """Return True if good lines follow a bad place: then it is damage, not a torn end."""
    return any(record.parse_stored(line) for line in rest.split(b"\n")[1:-1])


# --- evidence --------------------------------------------------------------------------------------------------------

Records = dict[int, bytes]  # seq → line with its newline


class Candidates:
    """The records of some blocks of a segment, by how well they are confirmed.

    proven      the crc of the block confirms them, after one flipped bit in block or index line is corrected
    unindexed   they look like records, and no index line covers them, so no crc confirms or refutes them
    doubtful    they look like records, but the crc of their block does not match
    """

    def __init__(self, scan: Scan, blocks: Iterable[ScannedBlock], low: int, high: int) -> None:
        """Take only the records low…high."""
        self.proven: Records = {}
        self.unindexed: Records = {}
        self.doubtful: Records = {}
        for block in blocks:
            data = scan.read(block)
            explained = explain(data, block.entry)
            is_unindexed = block.is_good and block.entry is None
            kind = self.proven if explained else self.unindexed if is_unindexed else self.doubtful
            for line in (explained or data).split(b"\n"):
                stamp = record.parse_stored(line)
                if stamp and low <= stamp[0] <= high:
                    kind[stamp[0]] = line + b"\n"

    @property
    def unsure(self) -> Records:
        """Return the records that no crc confirms. They are good if the other copy is the same."""
        return self.doubtful | self.unindexed


def one_bit(data: bytes, crc: int) -> bytes | None:
    """Return `data` with the one bit flipped that makes its crc32 right; None if there is no such bit.

    The crc is linear: a flipped bit changes it by a pattern that depends only on its distance from the end. So the
    difference is followed back byte by byte until it is the pattern of one bit.
    """
    table = [zlib.crc32(bytes([n]), 0xFFFFFFFF) ^ 0xFFFFFFFF for n in range(256)]
    back = {value >> 24: n for n, value in enumerate(table)}
    bits = {table[1 << bit]: 1 << bit for bit in range(8)}
    difference = zlib.crc32(data) ^ crc
    for at in range(len(data) - 1, -1, -1):
        if difference in bits:
            return data[:at] + bytes([data[at] ^ bits[difference]]) + data[at + 1 :]
        low = back[difference >> 24]
        difference = ((difference ^ table[low]) << 8 | low) & 0xFFFFFFFF
    return None


def explain(data: bytes, entry: IndexEntry | None) -> bytes | None:
    """Return the block that `entry` covered, if one flipped bit in it or in its crc explains the mismatch."""
    if entry is None or not data:
        return None
    actual, text = b"%d" % zlib.crc32(data), b"%d" % entry.crc
    for at, bit in ((at, 1 << bit) for at in range(len(text)) for bit in range(8)):
        if text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :] == actual and bad_line(data) is None:
            return data
    mended = one_bit(data, entry.crc)
    return mended if mended is not None and mended.endswith(b"\n") and bad_line(mended) is None else None


def confirmed_lines(
    blocks: Iterable[ScannedBlock], position: int, lines: Iterable[tuple[int, bytes | None]]
) -> Records:
    """Return the lines that lie in blocks whose crc confirms them.

    `lines` are the (seq, line) from byte `position` on, as far as they are known; a line is None where it is not.
    """
    confirmed: Records = {}
    all_lines = list(lines)
    for block in blocks:
        at, crc, inside = position, 0, Records()
        for seq, line in all_lines:
            if line is None:
                break
            if block.position <= at < block.end:
                crc = zlib.crc32(line, crc)
                inside[seq] = line
            at += len(line)
        if block.entry is not None and crc == block.entry.crc:
            confirmed.update(inside)
    return confirmed


# --- findings --------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One place that is not as it was written. The fields are the keys of `kmq verify --json`."""

    path: str  # under the data directory
    byte: int  # where the damage begins
    first_seq: int  # of the records concerned; 0: it concerns no record
    last_seq: int  # 0: unknown, because the bytes after it are damaged too
    what: str
    is_damage: bool = True  # False: a note, harmless

    @classmethod
    def of_file(cls, path: str, what: str, byte: int = 0, is_damage: bool = True) -> "Finding":
        """Return a finding about a file and not about records."""
        return cls(path, byte, 0, 0, what, is_damage)

    @classmethod
    def of_records(cls, path: str, what: str, seqs: tuple[int, int], byte: int = 0) -> "Finding":
        """Return a finding about the records with these seqs (first, last)."""
        return cls(path, byte, *seqs, what)

    def __str__(self) -> str:
        last = f"to {self.last_seq}" if self.last_seq else "and later"  # of damage at the end of a log
        seqs = f"seq {self.first_seq} {last}: " if self.first_seq else ""
        return f"{self.path}: byte {self.byte}: {seqs}{self.what}"
