"""The increasing ids of one producer: which of them are stored, as which seq, and with what content.

Invariant   An id up to the last is known to be stored exactly while a run or a range holds it. Of the last PRINTS ids there is
            a fingerprint of what was stored too (record.fingerprint), unless the table had to let go of it.
Memory      Runs say the seq; of older ids only ranges remain, and of ids that follow one another one range, however many runs
            they were. At most _RANGES ranges: an id below them is not known any more.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

NEW, TOO_OLD = -1, -2  # what `find` says besides the seq
PRINTS = 4096  # ids of a name whose content is remembered
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
        """Ids first_id… were stored as seq… with these fingerprints, where they are known; returns how many runs that added."""
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
