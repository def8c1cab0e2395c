"""The ids of messages: what an id may look like, and which ids are stored already, as which seq and with what content.

A producer's ids are decimal and increasing (`Producer`). The ids of a window are arbitrary text and age (`Window`).

Invariant   An id up to a producer's last is known to be stored exactly while a run or a range holds it. Of the last
            PRINTS ids there is a fingerprint of the content too (record.fingerprint), unless the dedupe table had to
            forget it.
Memory      A producer's runs say the seq. Of older ids only ranges remain, one for all ids that follow one another,
            however many runs they were: at most _RANGES ranges, and an id below them is unknown. A window is bounded by
            count and age.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

MAX_NAME = 64  # bytes of a producer's name, or of a window's scope
NAME_PATTERN = rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME}}}"
MAX_ID_DIGITS = 18  # of an increasing id: it fits a signed 64-bit number
MAX_WINDOW_ID = 256  # bytes of an arbitrary id: bounds the memory of a window
MADE_UP = "auto-"  # begins the name that a client makes up for one run of a program; the dedupe table forgets it first

NEW, TOO_OLD = -1, -2  # what `find` returns besides a seq
PRINTS = 4096  # ids of a producer whose content is remembered
_RANGES = 1 << 16


class Producer:
    """The ids of one name: runs of ids that follow one another, stored under seqs that do, and ranges of older ids."""

    __slots__ = ("counts", "firsts", "ids", "last_id", "lasts", "name", "prints", "seconds", "seqs")

    def __init__(self, name: bytes = b"", last_id: int = -1, seconds: int = 0) -> None:
        self.name, self.last_id, self.seconds = name, last_id, seconds
        self.ids: list[int] = []  # first id of each run, rising
        self.seqs: list[int] = []
        self.counts: list[int] = []
        self.firsts = array("q")  # of each range of ids whose seqs are forgotten, below all runs
        self.lasts = array("q")
        self.prints = array("I")  # of the last ids stored, up to twice as many as PRINTS; 0: not known

    def find(self, number: int) -> int:
        """The seq `number` was stored as, 0 where that is forgotten, NEW, or TOO_OLD: not known to be stored."""
        if number > self.last_id:
            return NEW
        at = bisect_right(self.ids, number) - 1
        if at >= 0:
            ahead = number - self.ids[at]
            return self.seqs[at] + ahead if ahead < self.counts[at] else TOO_OLD
        at = bisect_right(self.firsts, number) - 1
        return 0 if at >= 0 and number <= self.lasts[at] else TOO_OLD

    def print_of(self, number: int) -> int:
        """The fingerprint of what was stored as `number`, which `find` finds; 0 where it is forgotten."""
        at = bisect_right(self.ids, number) - 1
        if at < 0:
            return 0
        back = sum(self.counts[at:]) - (number - self.ids[at])
        return self.prints[-back] if back <= min(PRINTS, len(self.prints)) else 0

    def add(self, first_id: int, seq: int, count: int, prints: Sequence[int] = ()) -> int:
        """Remember ids first_id… as stored under seq…, with their fingerprints; return how many runs that added."""
        self.last_id = first_id + count - 1
        self._print(prints, count)
        if self.ids:
            length = self.counts[-1]
            if self.ids[-1] + length == first_id and self.seqs[-1] + length == seq:
                self.counts[-1] += count
                return 0
        self.ids.append(first_id)
        self.seqs.append(seq)
        self.counts.append(count)
        return 1

    def _print(self, prints: Sequence[int], count: int) -> None:
        known = self.prints
        if len(prints) == count:
            known.extend(prints)
        else:
            del known[:]  # they are those of the last ids, without a gap
        if len(known) >= 2 * PRINTS:
            del known[:-PRINTS]

    def trim(self, keep: int) -> int:
        """Forget the seqs of all but the newest `keep` runs; returns how many runs went."""
        gone = len(self.ids) - keep
        if gone <= 0:
            return 0
        for first, count in zip(self.ids[:gone], self.counts[:gone], strict=True):
            if self.lasts and self.lasts[-1] + 1 == first:
                self.lasts[-1] = first + count - 1
            else:
                self.firsts.append(first)
                self.lasts.append(first + count - 1)
        del self.ids[:gone], self.seqs[:gone], self.counts[:gone]
        del self.firsts[:-_RANGES], self.lasts[:-_RANGES]
        return gone

    def forget_ranges(self) -> int:
        """Let go of all ranges; returns how many those were."""
        count = len(self.firsts)
        self.firsts, self.lasts = array("q"), array("q")
        return count

    def forget_prints(self) -> int:
        """Let go of all fingerprints; returns how many those were."""
        count = len(self.prints)
        self.prints = array("I")
        return count


# Of an id in a window, in one integer, a third of what a tuple takes: 32 bits of fingerprint, 34 of seconds, the seq
# above.
_PRINT, _SECONDS = (1 << 32) - 1, (1 << 34) - 1
_SECONDS_SHIFT, _SEQ_SHIFT = 32, 66


def pack(seq: int, seconds: int, print: int) -> int:
    return seq << _SEQ_SHIFT | seconds << _SECONDS_SHIFT | print


def unpack(value: int) -> tuple[int, int, int]:
    """Return (seq, seconds, fingerprint)."""
    return value >> _SEQ_SHIFT, value >> _SECONDS_SHIFT & _SECONDS, value & _PRINT


class Window:
    """The arbitrary ids of all scopes: the youngest `max_ids`, each for `age` seconds."""

    def __init__(self, max_ids: int, age: float) -> None:
        self._max_ids, self._age = max_ids, age
        self.ids: dict[bytes, int] = {}  # scope|id → packed, in order of age
        self._order: deque[bytes] = (
            deque()
        )  # the keys: a dict finds its first key by stepping over all that were deleted

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, scope: bytes, id: bytes, now: int) -> int:
        """Return the seq that `id` was stored as within the window, or NEW."""
        value = self.ids.get(b"%b|%b" % (scope, id))
        if value is None or now - (value >> _SECONDS_SHIFT & _SECONDS) > self._age:
            return NEW
        return value >> _SEQ_SHIFT

    def print_of(self, scope: bytes, id: bytes) -> int:
        """Return the fingerprint of an id that `find` has found; 0 where it is unknown."""
        return self.ids[b"%b|%b" % (scope, id)] & _PRINT

    def add(self, scope: bytes, id: bytes, seq: int, seconds: int, print: int = 0) -> None:
        """Remember that `id` was stored as `seq`, and forget the ids that are too old or too many."""
        ids, order, key = self.ids, self._order, b"%b|%b" % (scope, id)
        if ids.pop(key, None) is not None:
            order.remove(key)  # an aged id that came again is the youngest now; its key is among the first
        ids[key] = pack(seq, seconds, print)
        order.append(key)
        while order:
            oldest = order[0]
            if len(ids) <= self._max_ids and seconds - (ids[oldest] >> _SECONDS_SHIFT & _SECONDS) <= self._age:
                break
            del ids[order.popleft()]

    def restore(self, key: bytes, value: int) -> None:
        """Put back `scope|id` with its packed value, as a checkpoint has it: the oldest first."""
        self.ids[key] = value
        self._order.append(key)

    def clear(self) -> None:
        self.ids.clear()
        self._order.clear()
