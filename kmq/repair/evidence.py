"""Which records can still be trusted in bytes that differ from their index, or that no index covers."""

import zlib
from collections.abc import Iterable

from kmq.log.index import Entry
from kmq.log.segment import bad_line
from kmq.message import record
from kmq.repair.scan import Block, Scan

Lines = dict[int, bytes]  # seq → line with its newline


class Evidence:
    """The records of some blocks of a segment, by how well they are confirmed.

    proven      the crc of the block confirms them, after one flipped bit in block or index line is corrected
    unindexed   they look like records, and no index line covers them: nothing confirms or contradicts them
    doubtful    they look like records, but the crc of their block does not match
    """

    def __init__(self, scan: Scan, blocks: Iterable[Block], low: int, high: int) -> None:
        """Take only the records low…high."""
        self.proven: Lines = {}
        self.unindexed: Lines = {}
        self.doubtful: Lines = {}
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
    def unsure(self) -> Lines:
        """Return the records that nothing confirms yet: they are good if the other copy is the same."""
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


def explain(data: bytes, entry: Entry | None) -> bytes | None:
    """Return the block that `entry` covered, if one flipped bit in it or in its crc explains the mismatch."""
    if entry is None or not data:
        return None
    actual, text = b"%d" % zlib.crc32(data), b"%d" % entry.crc
    for at, bit in ((at, 1 << bit) for at in range(len(text)) for bit in range(8)):
        if text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :] == actual and bad_line(data) is None:
            return data
    mended = one_bit(data, entry.crc)
    return mended if mended is not None and mended.endswith(b"\n") and bad_line(mended) is None else None


def confirmed_lines(blocks: Iterable[Block], position: int, lines: Iterable[tuple[int, bytes | None]]) -> Lines:
    """Return the lines that lie in blocks whose crc confirms them.

    `lines` are the (seq, line) from byte `position` on, as far as they are known; a line is None where it is not.
    """
    confirmed: Lines = {}
    known = list(lines)
    for block in blocks:
        at, crc, inside = position, 0, Lines()
        for seq, line in known:
            if line is None:
                break
            if block.position <= at < block.end:
                crc = zlib.crc32(line, crc)
                inside[seq] = line
            at += len(line)
        if block.entry is not None and crc == block.entry.crc:
            confirmed.update(inside)
    return confirmed
