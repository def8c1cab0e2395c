"""Where lines rest between the FIFO and the ring: two areas in the ring's own shared memory.

Invariant   What has been read from the FIFO is in shared memory, and is either framed (before `consumed` of the active
            area, covered by the ring's commit) or will be. Nothing is framed twice.
Mechanism   The FIFO is read straight into the active area (os.readv). Lines are framed from `consumed` on; each block's
            commit moves `consumed` in the same instant as the ring's head. When the area holds nothing more to frame,
            the unfinished rest moves to the other area: zero that one, copy the rest, commit with the areas swapped.
Crash       The content of the active area ends at its last byte that is not NUL, so it needs no length of its own:
            killed after the read      the bytes are there, found by that rule, framed after the restart;
            killed before the commit   the same bytes are framed again, in the place of the uncommitted block;
            all killed, and the FIFO with them: the rest of what was half read never comes; forget_unfinished;
            killed while carrying      the other area is not in force yet and is zeroed again at the start.
            With one area instead of two a carry would overwrite bytes whose commit is not in force yet, and a
            kill right then would frame them twice or not at all.
Not covered A write whose last byte is NUL, cut off by a full area and then by a kill, loses that NUL: no legal line has one.
"""

import mmap
import os
from collections.abc import Callable

from kmq.links.layout import BLOCKS, Commit
from kmq.links.ring import RingWriter
from kmq.settings import KIB

_LOOK_BYTES = 64 * KIB  # looked at or zeroed at once: small enough to leave no hole in the heap behind
READ_BYTES = 256 * KIB  # taken from the FIFO at once: fits the second-level cache, some blocks of short lines

_ZEROS = memoryview(bytes(_LOOK_BYTES))


def area_bytes(max_line: int) -> int:
    """Size of one area: the longest unfinished line with its pieces' marks, and room to go on reading."""
    return max_line + max_line // 1024 + 2 * READ_BYTES + 4095 & ~4095


class Staging:
    """The two areas behind the blocks of the ring `framed`."""

    def __init__(self, ring: RingWriter, size: int) -> None:
        self.ring, self.size = ring, size
        self.mm, self._view = ring.mm, ring.view
        self.active = ring.last.area
        self._zero(1 - self.active, size)
        self.consumed = ring.last.consumed
        self.filled = max(self._content(self.active), self.consumed)
        self._used_other = 0
        # Zeroing and looking touched every page; give the mapping back, the content stays in shared memory.
        page = mmap.PAGESIZE
        first = self._start(0) // page * page
        self.mm.madvise(mmap.MADV_DONTNEED, first, len(self.mm) - first)

    def _start(self, area: int) -> int:
        return BLOCKS + self.ring.size + area * self.size

    def _content(self, area: int) -> int:
        """Bytes up to the last that is not NUL (see Crash)."""
        start = self._start(area)
        for end in range(self.size, 0, -_LOOK_BYTES):
            first = max(0, end - _LOOK_BYTES)
            found = len(self.mm[start + first : start + end].rstrip(b"\0"))
            if found:
                return first + found
        return 0

    def _zero(self, area: int, length: int) -> None:
        start = self._start(area)
        for at in range(0, length, _LOOK_BYTES):
            count = min(_LOOK_BYTES, length - at)
            self.mm[start + at : start + at + count] = _ZEROS[:count]

    def read(self, fd: int) -> int:
        """Read from the FIFO into the active area; bytes read, 0 where it is empty or the area is full."""
        start = self._start(self.active) + self.filled
        room = min(READ_BYTES, self.size - self.filled)
        if room <= 0:
            return 0
        try:
            count = os.readv(fd, [self._view[start : start + room]])
        except BlockingIOError:
            return 0
        self.filled += count
        return count

    def lines(self) -> bytes:
        """The whole lines that wait to be framed (they end with a newline), or b""."""
        start = self._start(self.active)
        end = self.mm.rfind(b"\n", start + self.consumed, start + self.filled) + 1
        return self.mm[start + self.consumed : end] if end else b""

    def unfinished(self) -> bytes:
        """All that waits, whole lines or not."""
        start = self._start(self.active)
        return self.mm[start + self.consumed : start + self.filled]

    def forget_unfinished(self, whole: Callable[[bytes], int]) -> int:
        """Drop what follows the first `whole` bytes, whose rest will never come; returns how many bytes that was."""
        start = self._start(self.active)
        end = self.consumed + whole(self.unfinished())
        forgotten = self.filled - end
        self.mm[start + end : start + self.filled] = bytes(forgotten)
        self.filled = end
        return forgotten

    def carried(self, consumed: int, lines: bytes = b"") -> tuple[int, int]:
        """Copy `lines` and what follows `consumed` to the other area; returns (area, consumed) for the commit.

        The caller commits the result, then calls `follow`. Until then nothing has happened.
        """
        other = 1 - self.active
        start, there = self._start(self.active), self._start(other)
        rest = lines + self.mm[start + consumed : start + self.filled]
        self._zero(other, max(self._used_other, len(rest)))
        self.mm[there : there + len(rest)] = rest
        self._carried = len(rest)
        return other, 0

    def follow(self, record: Commit) -> None:
        """Take over what a commit put in force."""
        if record.area != self.active:
            self._used_other = self.filled
            self.active, self.filled = record.area, self._carried
        self.consumed = record.consumed
