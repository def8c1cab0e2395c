"""Whole stored lines, and checks of them without an index. A bare newline is a record that compaction removed.

Invariant   A line is good when it has the syntax of a stored line, without NUL, and its seq is above the one before it.
"""

import os
import re
from bisect import bisect_left
from itertools import pairwise

from kmq.message import record

SEQ, RECV_TS = 0, 1  # the fields of a stamp, (seq, recv_ts in µs), by which a record is looked up
_CHUNK = 1 << 20

# Possessive: a bad line must not be tried twice. The dot is several times as fast as a set of characters, and most bytes
# are payload; so NUL is looked for before.
_LINES = re.compile(rb"(?:(?:\d{1,19}\|\d{1,12}\.\d{6}\|[^|\n]++\|[^|\n]*+\|[^|\n]*+\|.*+)?+\n)*+")
_SEQS = re.compile(rb"(?m)^(\d+)\|")


class CheckedLines:
    """Checked whole lines of a segment: the records from `offset` to before `next_offset`, at byte `position`."""

    __slots__ = ("lines", "next_offset", "offset", "position")

    def __init__(self, offset: int, position: int, lines: bytes, next_offset: int) -> None:
        self.offset, self.position, self.lines, self.next_offset = offset, position, lines, next_offset

    @property
    def end(self) -> int:
        """Return the byte behind the lines."""
        return self.position + len(self.lines)


def is_stored(line: bytes) -> bool:
    """Return True if this is a stored line, without its newline."""
    return record.parse_stored(line) is not None


def seqs_of(lines: bytes) -> list[int]:
    """Return the seqs of whole stored lines, without the records that compaction removed."""
    return [int(line[: line.index(b"|")]) for line in lines.split(b"\n") if line]


def bad_line(lines: bytes, after: int = 0) -> int | None:
    """Return the byte at which the first line begins that is not a stored line, or whose seq does not rise.

    None if all are good. `after` is the seq before them.
    """
    nul = lines.find(b"\0")
    match = _LINES.match(lines, 0, len(lines) if nul < 0 else lines.rfind(b"\n", 0, nul) + 1)
    end = match.end() if match else 0
    seqs = [after, *seqs_of(lines[:end])]
    if any(a >= b for a, b in pairwise(seqs)):
        last = after
        for number in _SEQS.finditer(lines):
            if int(number[1]) <= last:
                return number.start()
            last = int(number[1])
    return end if end < len(lines) else None


def last_line(lines: bytes) -> bytes:
    """Return the last of whole `lines`."""
    return lines[lines.rfind(b"\n", 0, -1) + 1 :]


def within(lines: bytes, low: int, high: int) -> bytes:
    """Return the lines with seqs low…high. `lines` must be whole and in order of seq."""
    if not lines or (record.seq_of(lines) >= low and record.seq_of(last_line(lines)) <= high):
        return lines
    kept = [line for line in lines.split(b"\n")[:-1] if low <= record.seq_of(line) <= high]
    return b"\n".join(kept) + b"\n" if kept else b""


def start_of(lines: bytes, seq: int, low: tuple[int, int], high: tuple[int, int]) -> int:
    """Return the byte at which record `seq` begins, in whole lines with consecutive seqs.

    `low`, `high`: (byte, seq) of known beginnings, low at or before it and high at or behind it. Lines of equal length are
    found at once, others by interpolation; to split all lines would take many times as long.
    """
    (begin, first), (end, after) = low, high
    if seq == after:
        return end
    while first < seq:
        guess = begin + (end - begin) * (seq - first) // (after - first)
        at = max(begin, lines.rfind(b"\n", begin, guess) + 1)
        there = record.seq_of(lines[at : at + 20])
        if there > seq:
            end, after = at, there
        elif there > first:
            begin, first = at, there
        else:
            begin, first = lines.index(b"\n", begin) + 1, first + 1
    return begin


def first_at(lines: list[bytes], target: int, field: int) -> int | None:
    """Return the first of checked lines whose SEQ or RECV_TS is at least `target`; None if there is none."""

    def stamp(at: int) -> int:
        parsed = record.parse_stored(lines[at])
        return parsed[field] if parsed else -1

    kept = [at for at, line in enumerate(lines) if line]
    first = bisect_left(kept, target, key=stamp)
    return kept[first] if first < len(kept) else None


def count_lines(fd: int, position: int, end: int) -> int:
    """Return how many lines end between two bytes of a file."""
    return sum(os.pread(fd, min(_CHUNK, end - at), at).count(b"\n") for at in range(position, end, _CHUNK))
