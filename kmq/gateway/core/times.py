"""Shown times: the first message of a partition that is shown with a time or a later one, and the highest time.

    first(begin, read, 1_714_500_000_123)  ->  DatedRecord(timestamp=1714500000456, offset=4711)

A message shows the time that its producer gave, or, without such a time, when it was received (`Message.timestamp_ms`).
Producers' clocks differ, and history may be loaded at any time. So shown times do not rise with offsets, and the sparse
index, which knows when records were received, cannot find them. The first lookup reads the partition up to its answer
and keeps the highest time of each run of records. Later lookups read one run, and what was appended meanwhile.

Owner       `Partitions` has one `ShownTimes` for each partition that was asked for; its lock admits one lookup at a time.
Invariant   No message of a run is shown with a later time than its `highest`. Compaction and retention only remove
            messages, and no offset ever means two records (kmq/log/deletions.py).
Crash       Only in memory: the next gateway reads the partition again.
Memory      Two numbers for about a MiB of records: 16 MB for a TB.
Limit       A lookup that has to read more than `READ_S` allows is refused as `not_ready` and keeps what it has read, so
            the client's repeated request goes on from there.
Damage      Messages in a damaged block cannot be shown, so a lookup goes on after the block.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.log.damage import DamageError
from kmq.message import record
from kmq.message.message import highest_ms, messages

READ_S = 10.0  # below the time that clients wait for a response
_RUN_BYTES = 1 << 20


# From an offset, at most so many bytes: (offset of the first line, whole checked lines).
Read = Callable[[int, int], tuple[int, bytes]]


class DatedRecord(NamedTuple):
    """A message's shown time in ms, and its offset."""

    timestamp: int
    offset: int


class ShownTimes:
    """The highest shown time of each run of records in one partition, as far as it was read."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._starts = array("q")  # first offset of each run; a run ends where the next one begins
        self._highest = array("q")
        self._end = 0  # of the last run
        self._last_bytes = 0  # of the last run, which grows

    def first(self, begin: int, read: Read, target: int) -> DatedRecord | None:
        """Return the first message that is shown with `target` (ms) or a later time; None if there is none.

        `begin`: the first offset of the partition.
        """
        with self._lock:
            self._forget_before(begin)
            for number, highest in enumerate(self._highest):
                if highest >= target:
                    low, high = self._starts[number], self._end_of(number)
                    found = _first_in(read, max(low, begin), high, target)
                    if found is not None:
                        return found
            return self._read_on(read, target)

    def highest(self, begin: int, read: Read) -> DatedRecord | None:
        """Return the first of the messages with the highest shown time; None if the partition is empty."""
        with self._lock:
            self._forget_before(begin)
            self._read_on(read, None)
            # A run's number may be of a message that is gone, so each candidate is read; the highest comes first.
            best: DatedRecord | None = None
            for number in sorted(range(len(self._starts)), key=lambda each: (-self._highest[each], each)):
                if best is not None and self._highest[number] < best.timestamp:
                    break
                found = _highest_in(read, max(self._starts[number], begin), self._end_of(number))
                if found and (best is None or (found.timestamp, -found.offset) > (best.timestamp, -best.offset)):
                    best = found
            return best

    def _end_of(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self._end

    def _forget_before(self, begin: int) -> None:
        """Forget the runs that end at or before this offset."""
        gone = 0
        while gone < len(self._starts) and self._end_of(gone) <= begin:
            gone += 1
        del self._starts[:gone], self._highest[:gone]
        if not self._starts:
            self._end, self._last_bytes = max(self._end, begin), 0

    def _read_on(self, read: Read, target: int | None) -> DatedRecord | None:
        """Read on to the first message with `target`, or to the end. Notes the runs."""
        deadline = time.monotonic() + READ_S
        for first, lines in _runs(read, self._end):
            highest = highest_ms(lines)
            self._note(first, first + record.count_lines(lines), len(lines), highest)
            if target is not None and highest is not None and highest >= target:
                return _first_in(read, first, self._end, target)
            if time.monotonic() > deadline:
                text = f"the times of {self._place} are being read, up to {self._end}; ask again"
                raise RequestRefused("not_ready", text)
        return None

    def _note(self, first: int, end: int, nbytes: int, highest: int | None) -> None:
        time_ms = -1 if highest is None else highest
        if self._starts and self._last_bytes + nbytes <= _RUN_BYTES:
            self._highest[-1] = max(self._highest[-1], time_ms)
            self._last_bytes += nbytes
        else:
            self._starts.append(first)
            self._highest.append(time_ms)
            self._last_bytes = nbytes
        self._end = end


def _runs(read: Read, offset: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (first offset, lines) from `offset` on, at most about a MiB at once. Damaged blocks are left out."""
    damaged_at = -1
    while end is None or offset < end:
        try:
            first, lines = read(offset, _RUN_BYTES)
        except DamageError as err:
            if err.byte == damaged_at:  # the end of the damage is unknown
                raise
            damaged_at, offset = err.byte, max(err.next_offset, offset + 1)
            continue
        if not lines:
            return
        yield first, lines
        offset = first + record.count_lines(lines)


def _first_in(read: Read, offset: int, end: int, target: int) -> DatedRecord | None:
    for first, lines in _runs(read, offset, end):
        for message in messages("", 0, first, lines):
            if message.timestamp_ms >= target:
                return DatedRecord(message.timestamp_ms, message.offset)
    return None


def _highest_in(read: Read, offset: int, end: int) -> DatedRecord | None:
    best: DatedRecord | None = None
    for first, lines in _runs(read, offset, end):
        for message in messages("", 0, first, lines):
            if message.offset < end and (best is None or message.timestamp_ms > best.timestamp):
                best = DatedRecord(message.timestamp_ms, message.offset)
    return best
