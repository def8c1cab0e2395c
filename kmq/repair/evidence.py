"""What can still be believed of bytes that are not as their index says, or that no index speaks of."""

import zlib
from collections.abc import Iterable

from kmq import record
from kmq.log.index import Entry
from kmq.log.lines import bad_line
from kmq.repair.scan import Part, Scan

Lines = dict[int, bytes]  # seq → line with its newline


class Evidence:
    """The records of some parts of a segment, by what speaks for them.

    own         the block's crc, once a single flipped bit in block or index line is taken back
    unindexed   nothing but that they look like records: no index line speaks of them, so none contradicts them either
    doubtful    nothing but that: the crc of their block says that something in it is wrong
    """

    def __init__(self, found: Scan, parts: Iterable[Part], low: int, high: int) -> None:
        """Of records low…high only."""
        self.own: Lines = {}
        self.unindexed: Lines = {}
        self.doubtful: Lines = {}
        for part in parts:
            data = bytes_of(found, part)
            block = explained(data, part.entry)
            kind = self.own if block else self.unindexed if part.is_good and part.entry is None else self.doubtful
            for line in (block or data).split(b"\n"):
                stamp = record.parse_stored(line)
                if stamp and low <= stamp[0] <= high:
                    kind[stamp[0]] = line + b"\n"

    @property
    def unsure(self) -> Lines:
        """What nobody vouches for: good where the other copy says the same."""
        return self.doubtful | self.unindexed


def bytes_of(found: Scan, part: Part) -> bytes:
    with open(found.path, "rb") as file:
        file.seek(part.position)
        return file.read(part.end - part.position)


def one_bit(data: bytes, crc: int) -> bytes | None:
    """`data` with the one bit flipped that makes its crc32 right; None where there is no such bit.

    The crc is linear: a flipped bit changes it by a pattern that depends only on how far the bit is from the end. So
    the difference is taken back byte by byte until it is that of one bit.
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


def explained(data: bytes, entry: Entry | None) -> bytes | None:
    """The block that `entry` spoke of, if one flipped bit, in it or in the crc of its index line, explains why they differ."""
    if entry is None or not data:
        return None
    found, text = zlib.crc32(data), b"%d" % entry.crc
    for at, bit in ((at, 1 << bit) for at in range(len(text)) for bit in range(8)):
        if text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :] == b"%d" % found and bad_line(data) is None:
            return data
    mended = one_bit(data, entry.crc)
    return mended if mended is not None and mended.endswith(b"\n") and bad_line(mended) is None else None


def agreed(parts: Iterable[Part], position: int, lines: Iterable[tuple[int, bytes | None]]) -> Lines:
    """Those of `lines`, all that lies from byte `position` on as far as anybody can tell, in blocks whose crc is right so."""
    found: Lines = {}
    known = list(lines)
    for part in parts:
        at, crc, inside = position, 0, Lines()
        for seq, line in known:
            if line is None:
                break
            if part.position <= at < part.end:
                crc = zlib.crc32(line, crc)
                inside[seq] = line
            at += len(line)
        if part.entry is not None and crc == part.entry.crc:
            found.update(inside)
    return found
