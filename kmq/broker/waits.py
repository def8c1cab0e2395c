"""What a stage tells of its own delays, so that one look at the stats page can judge them (concerns.py).

Words       RoomWaits: since when the ring behind this stage has been full (`full_since`), since when the present block
            waits (`waits_since`), and when the last wait ended (`waited_at`).
            SlowSyncs: how many of the last 16 syncs were slow, and when the last of those returned.
"""

import time
from collections.abc import Callable

from kmq.broker.stats import Row
from kmq.links.ring import RingWriter

SLOW_NS = 1_000_000_000  # of a sync: a disk for a database takes 1 to 30 ms, a network disk up to 100
_PAUSE_NS = 2_000_000_000  # a ring that had room for so long is not full any more
_LAST = (1 << 16) - 1


class RoomWaits:
    """Waits for room in a ring, and notes it."""

    def __init__(self, row: Row, check: Callable[[], None]) -> None:
        self._row, self._check = row, check

    def wait(self, ring: RingWriter, nbytes: int, count: int) -> None:
        """Return when a block of this size fits. Call only if it does not fit now."""
        row = self._row
        row.waits_since = now = time.monotonic_ns()
        if now - row.waited_at > _PAUSE_NS:
            row.full_since = now
        ring.wait_for_room(nbytes, count, self._check)
        row.waits_since, row.waited_at = 0, time.monotonic_ns()


class SlowSyncs:
    """Remembers which of the last syncs were slow."""

    def __init__(self, row: Row) -> None:
        self._row, self._slow = row, 0

    def observe(self, seconds: float) -> None:
        """Count one sync."""
        is_slow = seconds * 1e9 > SLOW_NS
        self._slow = (self._slow << 1 | is_slow) & _LAST
        self._row.slow_syncs = self._slow.bit_count()
        if is_slow:
            self._row.slow_sync_at = time.monotonic_ns()
