"""Where lines stay between the FIFO and the ring: two staging areas in the ring's own shared memory.

Invariant   What has been read from the FIFO is in shared memory, and is either framed (it lies before `consumed` of the
            active area, covered by the ring's commit) or will be. Nothing is framed twice.
Mechanism   The FIFO is read straight into the active area (os.readv). Lines are framed from `consumed` on; each block's
            commit moves `consumed` in the same instant as the ring's head. When the area holds no more whole lines, the
            areas are swapped: zero the other area, copy the unfinished rest there, and commit with that area in force.
Crash       The content of the active area ends at its last byte that is not NUL, so its length need not be stored.
            Killed after the read      the restart finds the bytes by that rule and frames them;
            killed before the commit   the same bytes are framed again, in the place of the uncommitted block;
            killed while copying       the other area is not in force yet, and the start zeroes it again;
            all killed, with the FIFO  the rest of a partly read line never arrives: forget_unfinished.
            With one area instead of two, a copy would overwrite bytes whose commit is not in force yet, and a
            kill right then would frame them twice or not at all.
Not covered A write whose last byte is NUL, cut off by a full area and then by a kill, loses that NUL: no legal line has
one.
"""

import mmap
import os

from kmq.config.values import KIB
from kmq.links.layout import BLOCKS, Consumed, Framed, Received, RingCommit
from kmq.links.ring import RingWriter

_CHUNK = 64 * KIB  # searched or zeroed at once: small enough not to fragment the heap
READ_BYTES = 256 * KIB  # read from the FIFO at once: fits the second-level cache, some blocks of short lines

_ZEROS = memoryview(bytes(_CHUNK))


def area_bytes(max_line: int) -> int:
    """Return the size of one area: the longest unfinished line, and room to continue reading."""
    return max_line + 2 * READ_BYTES + 4095 & ~4095


class StagingAreas:
    """The two areas after the blocks of the ring `framed`."""

    def __init__(self, ring: RingWriter, size: int) -> None:
        self.ring, self.size = ring, size
        self.mm, self._view = ring.mm, ring.view
        self.active = ring.last.area
        self._zero(1 - self.active, size)
        self.consumed = ring.last.consumed
        self.filled = max(self._content(self.active), self.consumed)
        self._used_other = 0
        # Zeroing and searching touched every page. Give the mapping back; the content stays in shared memory.
        page = mmap.PAGESIZE
        first = self._start(0) // page * page
        self.mm.madvise(mmap.MADV_DONTNEED, first, len(self.mm) - first)

    def _start(self, area: int) -> int:
        return BLOCKS + self.ring.size + area * self.size

    def _content(self, area: int) -> int:
        """Return how many bytes there are up to the last that is not NUL (see Crash)."""
        start = self._start(area)
        for end in range(self.size, 0, -_CHUNK):
            first = max(0, end - _CHUNK)
            found = len(self.mm[start + first : start + end].rstrip(b"\0"))
            if found:
                return first + found
        return 0

    def _zero(self, area: int, length: int) -> None:
        start = self._start(area)
        for at in range(0, length, _CHUNK):
            count = min(_CHUNK, length - at)
            self.mm[start + at : start + at + count] = _ZEROS[:count]

    def read(self, fd: int) -> int:
        """Read from the FIFO into the active area; return how many bytes, 0 if the FIFO is empty or the area full."""
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
        """Return the whole lines that wait to be framed; they end with a newline, or are b""."""
        start = self._start(self.active)
        end = self.mm.rfind(b"\n", start + self.consumed, start + self.filled) + 1
        return self.mm[start + self.consumed : end] if end else b""

    @property
    def has_lines(self) -> bool:
        """Return True if whole lines wait to be framed."""
        start = self._start(self.active)
        return self.mm.find(b"\n", start + self.consumed, start + self.filled) >= 0

    def unfinished(self) -> bytes:
        """Return everything that waits to be framed, whole lines or not."""
        start = self._start(self.active)
        return self.mm[start + self.consumed : start + self.filled]

    def forget_unfinished(self) -> int:
        """Drop the unfinished line, because its rest will never arrive; return how many bytes it had."""
        start = self._start(self.active)
        end = self.consumed + len(self.lines())
        forgotten = self.filled - end
        self.mm[start + end : start + self.filled] = bytes(forgotten)
        self.filled = end
        return forgotten

    @property
    def is_full(self) -> bool:
        return self.filled == self.size

    def copy_rest(self, consumed: int) -> int:
        """Copy what follows `consumed` to the other area; return the number of that area, to be committed.

        Before that commit the copy has no effect; call `adopt` after it.
        """
        other = 1 - self.active
        start, there = self._start(self.active), self._start(other)
        rest = self.mm[start + consumed : start + self.filled]
        self._zero(other, max(self._used_other, len(rest)))
        if rest:
            self.mm[there : there + len(rest)] = rest
        self._copied = len(rest)
        return other

    def adopt(self, record: RingCommit) -> None:
        """Use the area and the place in it that a commit has put in force."""
        if record.area != self.active:
            self._used_other = self.filled
            self.active, self.filled = record.area, self._copied
        self.consumed = record.consumed

    def swap_areas(self, consumed: int, done: Received) -> None:
        """Move what follows `consumed` to the start of the other area, in a commit without a block."""
        self.ring.commit(self.ring.last.consuming(Consumed(self.copy_rest(consumed), 0, *done)))
        self.adopt(self.ring.last)

    def make_room(self) -> bool:
        """Move what is unfinished to the start of an area, so that its rest fits; return False if it is there."""
        if not self.consumed:
            return False
        last = self.ring.last
        self.swap_areas(self.consumed, Received(last.birth, last.position))
        return True

    def append(self, framed: Framed, swaps: bool) -> None:
        """Append a block that fits, and commit what it came from; `swaps`: swap the areas in the same commit."""
        offset = self.consumed + framed.consumed
        area, offset = (self.copy_rest(offset), 0) if swaps else (self.active, offset)
        self.ring.append(framed, Consumed(area, offset, *framed.received))
        self.adopt(self.ring.last)
