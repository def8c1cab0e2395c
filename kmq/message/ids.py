"""The ids of messages: their form, and the table of stored ids, each with its seq and a fingerprint of its content.

A producer's ids are decimal and increasing (`KnownProducer`). The ids of a window are arbitrary text and age (`IdWindow`).

Invariant   An id up to a producer's last is known to be stored exactly while a run or a range holds it. Of the last
            PRINTS ids there is a fingerprint of the content too (record.fingerprint), unless the dedupe table had to
            forget it.
            The ids of a producer's runs rise. Their seqs rise too, except for ids that were stored anew because their
            records had been deleted (`renew`). No id of a range has a higher seq than any id of a run.
Memory      A run gives the seq of each of its ids. Older runs become ranges without seqs, and ranges that adjoin are
            merged. A producer has at most _RANGES ranges; ids below them are unknown. A window is bounded by count and
            age.
"""

import re
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

MAX_NAME = 64  # bytes of a producer's name, or of a window's scope
NAME_PATTERN = rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME}}}"
MAX_ID_DIGITS = 18  # of an increasing id: it fits a signed 64-bit number
MAX_WINDOW_ID = 256  # bytes of an arbitrary id: bounds the memory of a window
MADE_UP = "auto-"  # starts a name that a client generates for one run of a program; the dedupe table forgets it first
# Names that the Kafka door gives to Kafka's producers: `k<pid>.<from_seq>.<partition>`, `auto-k<life>.<partition>` for
# those without a pid. `t<pid>` is for what a transaction writes. A pid has at least 7 digits, so a till `t5` stays a
# till.
KAFKA_NAME = r"k\d{7,18}\.\d{1,18}\.\d{1,9}|auto-k\d{1,18}\.\d{1,9}"
PIDS_PER_LIFE = 10**6  # pids that one life of the gateway may give: 18 digits last for 10^6 epochs of a shard
COPIER_NAME = r"t\d{7,18}"
OWN_NAME = rf"__.*|{COPIER_NAME}"  # of producers of KMQ itself

FORGOTTEN = -1  # answer to a question for the last id of an unknown name, which may have been forgotten

_OF_DOOR = re.compile(f"{KAFKA_NAME}|{COPIER_NAME}".encode())

NEW, TOO_OLD = -1, -2  # what `find` returns besides a seq
PRINTS = 4096  # ids of a producer whose content is remembered
_RANGES = 1 << 16


def is_of_door(name: bytes) -> bool:
    """Return True if the Kafka door writes the lines of this producer, and names the producer in each.

    The fingerprint of such a line covers the whole line (record.fingerprints).
    """
    return _OF_DOOR.fullmatch(name) is not None


def pid_of(name: bytes) -> int:
    """Return the pid of a name that the door gave to a producer of Kafka; 0 for any other name."""
    return int(name[1:].partition(b".")[0]) if name.startswith(b"k") and is_of_door(name) else 0


class KnownProducer:
    """The ids of one name: runs of consecutive ids under consecutive seqs, and ranges of ids that were stored earlier."""

    __slots__ = (
        *("counts", "firsts", "generation", "ids", "last_id", "lasts", "name", "part", "prints", "seconds", "seqs"),
    )
    part: "TablePart"  # of the dedupe table, once the producer is in it

    def __init__(self, name: bytes = b"", last_id: int = -1, seconds: int = 0) -> None:
        self.name, self.last_id, self.seconds = name, last_id, seconds
        self.generation = 0  # of the last snapshot that copied it, or was older than it (kmq/log/dedupe_file.py)
        self.ids: list[int] = []  # first id of each run, rising
        self.seqs: list[int] = []
        self.counts: list[int] = []
        self.firsts = array("q")  # first id of each range of ids whose seqs are forgotten, rising
        self.lasts = array("q")
        self.prints = array("I")  # of the last ids stored, up to twice as many as PRINTS; 0: not known

    def find(self, number: int) -> int:
        """Return the seq of id `number`; 0: stored, but its seq is forgotten; NEW; or TOO_OLD: not known as stored."""
        if number > self.last_id:
            return NEW
        at = bisect_right(self.ids, number) - 1
        if at >= 0 and (ahead := number - self.ids[at]) < self.counts[at]:
            return self.seqs[at] + ahead
        at = bisect_right(self.firsts, number) - 1
        return 0 if at >= 0 and number <= self.lasts[at] else TOO_OLD

    def most_forgotten(self) -> int:
        """Return the highest seq that an id with a forgotten seq may have."""
        return min(self.seqs, default=1) - 1

    def print_of(self, number: int) -> int:
        """Return the fingerprint of the message with id `number`, which `find` has found; 0 if it is forgotten."""
        back = self._print_place(number)
        return self.prints[-back] if back else 0

    def _print_place(self, number: int) -> int:
        """Return the index of an id's fingerprint, counted from the end; 0 if it is forgotten, or the id in no run."""
        at = bisect_right(self.ids, number) - 1
        if at < 0 or number - self.ids[at] >= self.counts[at]:
            return 0
        back = sum(self.counts[at:]) - (number - self.ids[at])
        for above in range(bisect_right(self.firsts, number), len(self.firsts)):  # only after `renew`
            back += self.lasts[above] - self.firsts[above] + 1
        return back if back <= min(PRINTS, len(self.prints)) else 0

    def add(self, first_id: int, seq: int, count: int, prints: Sequence[int] = ()) -> int:
        """Remember `count` ids from first_id on as stored from `seq` on, with fingerprints. Returns the runs added."""
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
        all_prints = self.prints
        if len(prints) == count:
            all_prints.extend(prints)
        else:
            del all_prints[:]  # `prints` must belong to the last ids without a gap
        if len(all_prints) >= 2 * PRINTS:
            del all_prints[:-PRINTS]

    def renew(self, number: int, seq: int, print: int) -> None:
        """Remember that id `number`, at most the last one, is stored as `seq` now: its older record was deleted."""
        index = self.find(number)
        if index > 0:
            self._cut_run(bisect_right(self.ids, number) - 1, number)
        elif index == 0:
            self._cut_range(bisect_right(self.firsts, number) - 1, number)
        else:
            del self.prints[:]  # they are counted by the known ids
        at = bisect_right(self.ids, number)
        if at and self.ids[at - 1] + self.counts[at - 1] == number and self.seqs[at - 1] + self.counts[at - 1] == seq:
            self.counts[at - 1] += 1
        else:
            self.ids.insert(at, number)
            self.seqs.insert(at, seq)
            self.counts.insert(at, 1)
        if back := self._print_place(number):
            self.prints[-back] = print

    def _cut_run(self, at: int, number: int) -> None:
        """Take one id out of a run, which may leave a part on both sides."""
        first, seq, count = self.ids[at], self.seqs[at], self.counts[at]
        ahead = number - first
        parts = [(first, seq, ahead), (number + 1, seq + ahead + 1, count - ahead - 1)]
        left = [part for part in parts if part[2]]
        self.ids[at : at + 1] = [part[0] for part in left]
        self.seqs[at : at + 1] = [part[1] for part in left]
        self.counts[at : at + 1] = [part[2] for part in left]

    def _cut_range(self, at: int, number: int) -> None:
        first, last = self.firsts[at], self.lasts[at]
        left = [ends for ends in ((first, number - 1), (number + 1, last)) if ends[0] <= ends[1]]
        self.firsts[at : at + 1] = array("q", [ends[0] for ends in left])
        self.lasts[at : at + 1] = array("q", [ends[1] for ends in left])

    def trim(self, keep: int) -> int:
        """Turn all but the `keep` runs with the highest seqs into ranges, without seqs. Returns how many were turned."""
        surplus = len(self.ids) - keep
        if surplus <= 0:
            return 0
        oldest = sorted(range(len(self.seqs)), key=self.seqs.__getitem__)[:surplus]
        for at in sorted(oldest):
            self._add_range(self.ids[at], self.ids[at] + self.counts[at] - 1)
        for at in sorted(oldest, reverse=True):
            del self.ids[at], self.seqs[at], self.counts[at]
        if len(self.firsts) > _RANGES:
            self._forget_ranges(len(self.firsts) - _RANGES)
        return surplus

    def _add_range(self, first: int, last: int) -> None:
        """Add ids that are in no range. Adjoining ranges are merged."""
        at = bisect_right(self.firsts, first)
        if at and self.lasts[at - 1] + 1 == first:
            at -= 1
            self.lasts[at] = last
        else:
            self.firsts.insert(at, first)
            self.lasts.insert(at, last)
        if at + 1 < len(self.firsts) and self.firsts[at + 1] == last + 1:
            self.lasts[at] = self.lasts[at + 1]
            del self.firsts[at + 1], self.lasts[at + 1]

    def forget_ranges(self) -> int:
        """Forget all ranges. Returns how many there were."""
        count = len(self.firsts)
        self._forget_ranges(count)
        return count

    def _forget_ranges(self, count: int) -> None:
        """Forget the lowest ranges."""
        if count and self.ids and self.lasts[count - 1] > self.ids[0]:
            del self.prints[:]  # they are counted by the known ids
        del self.firsts[:count], self.lasts[:count]

    def forget_prints(self) -> int:
        """Forget all fingerprints. Returns how many there were."""
        count = len(self.prints)
        self.prints = array("I")
        return count


class TablePart:
    """A part of the names of a dedupe table. When it is full, it evicts names of `evictable` idle for `idle_s`."""

    __slots__ = ("count", "evictable", "idle_s", "most", "setting")

    def __init__(self, setting: str, most: int, idle_s: float) -> None:
        """`most`: how many names it may have, by `setting`."""
        self.setting, self.most, self.idle_s = setting, most, idle_s
        self.count = 0
        self.evictable: OrderedDict[bytes, KnownProducer] = OrderedDict()  # in the order of their last messages

    @property
    def excess(self) -> int:
        """Return how many names must be evicted before another one can be added."""
        return self.count + 1 - self.most


_KEYS_IN_LIST = 1024  # per list of a window's order: each added key forgets at most so many, in some hundred µs

# An id of a window is packed into one integer, which takes a third of the memory of a tuple: 32 bits of fingerprint,
# 34 bits of seconds, and the seq above them.
_PRINT, _SECONDS = (1 << 32) - 1, (1 << 34) - 1
_SECONDS_SHIFT, _SEQ_SHIFT = 32, 66


def pack(seq: int, seconds: int, print: int) -> int:
    return seq << _SEQ_SHIFT | seconds << _SECONDS_SHIFT | print


def unpack(value: int) -> tuple[int, int, int]:
    """Return (seq, seconds, fingerprint)."""
    return value >> _SEQ_SHIFT, value >> _SECONDS_SHIFT & _SECONDS, value & _PRINT


class IdWindow:
    """The arbitrary ids of all scopes: the youngest `max_ids`, each for `age` seconds.

    Invariant   One call costs the same however many ids there are: `add` forgets at most _KEYS_IN_LIST ids, and expired
                ids that remain are ignored. `snapshot` copies lists of keys, not single keys.
    """

    def __init__(self, max_ids: int, age: float) -> None:
        self._max_ids, self._age = max_ids, age
        self.ids: dict[bytes, int] = {}  # scope|id → packed, in order of age
        # The keys in order of age, in lists that only grow: a dict finds its first key by stepping over all deleted keys.
        self._newest: list[bytes] = []
        self._order = deque([self._newest])
        self._first = 0  # index of the oldest key in the first list
        self._again: dict[bytes, int] = {}  # keys that were added again: how many outdated entries `_order` has of each
        self._snapshot: WindowSnapshot | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, scope: bytes, id: bytes, now: int) -> int:
        """Return the seq that `id` was stored as within the window, or NEW."""
        value = self.ids.get(b"%b|%b" % (scope, id))
        if value is None or now - (value >> _SECONDS_SHIFT & _SECONDS) > self._age:
            return NEW
        return value >> _SEQ_SHIFT

    def print_of(self, scope: bytes, id: bytes) -> int:
        """Return the fingerprint of an id that `find` has found; 0 if it is unknown."""
        return self.ids[b"%b|%b" % (scope, id)] & _PRINT

    def add(self, scope: bytes, id: bytes, seq: int, seconds: int, print: int = 0) -> None:
        """Remember that `id` was stored as `seq`, and forget ids that are too old or too many."""
        ids, again, key = self.ids, self._again, b"%b|%b" % (scope, id)
        if key in ids:
            self._forget(key)
            again[key] = again.get(key, 0) + 1
        ids[key] = seq << _SEQ_SHIFT | seconds << _SECONDS_SHIFT | print  # as `restore`, without a call: a hot path
        if len(self._newest) == _KEYS_IN_LIST:
            self._begin_list()
        self._newest.append(key)
        if self._first == len(self._order[0]) and len(self._order) > 1:
            self._order.popleft()
            self._first = 0
        keys, first = self._order[0], self._first
        while first < len(keys):
            oldest = keys[first]
            if oldest in again:
                again[oldest] -= 1
                if not again[oldest]:
                    del again[oldest]
            elif len(ids) > self._max_ids or seconds - (ids[oldest] >> _SECONDS_SHIFT & _SECONDS) > self._age:
                if self._snapshot is None:
                    del ids[oldest]
                else:
                    self._forget(oldest)
            else:
                break
            first += 1
        self._first = first

    def _forget(self, key: bytes) -> None:
        if self._snapshot is not None:
            if self._snapshot.is_complete:
                self._snapshot = None
            else:
                self._snapshot.save(key, self.ids[key])
        del self.ids[key]

    def restore(self, key: bytes, value: int) -> None:
        """Restore `scope|id` with its packed value from a checkpoint. Call for the oldest first."""
        self.ids[key] = value
        if len(self._newest) == _KEYS_IN_LIST:
            self._begin_list()
        self._newest.append(key)

    def _begin_list(self) -> None:
        self._newest = []
        self._order.append(self._newest)

    def snapshot(self) -> "WindowSnapshot":
        """Return the ids as they are now. Only the last snapshot may be read."""
        self._snapshot = WindowSnapshot(self.ids, list(self._order), self._first, dict(self._again))
        return self._snapshot

    def clear(self) -> None:
        self.ids.clear()
        self._newest = []
        self._order, self._first = deque([self._newest]), 0
        self._again.clear()


class WindowSnapshot:
    """The ids of a window at one moment, for another thread, which reads them once.

    The window calls `save` before it forgets an id. So an id that is forgotten or added again meanwhile is read as it
    was at that moment, without a lock.
    """

    def __init__(self, ids: dict[bytes, int], order: list[list[bytes]], first: int, again: dict[bytes, int]) -> None:
        self._ids, self._order, self._first, self._again = ids, order, first, again
        self._in_last = len(order[-1])  # keys of the last list, which grows
        self._values: dict[bytes, int] = {}
        self.is_complete = False  # all rows were read

    def save(self, key: bytes, value: int) -> None:
        """Save the value of a key that the window is about to forget."""
        self._values.setdefault(key, value)

    def rows(self) -> Iterator[tuple[bytes, int]]:
        """Yield each `scope|id` with its packed value, the oldest first."""
        try:
            for number, keys in enumerate(self._order):
                last = self._in_last if number == len(self._order) - 1 else len(keys)
                for key in islice(keys, 0 if number else self._first, last):
                    if self._again.get(key):
                        self._again[key] -= 1
                        continue
                    value = self._ids.get(key, 0)  # 0: `save` has it by now. So look here first, then there
                    yield key, self._values.get(key, value)
        finally:
            self.is_complete = True
            self._values.clear()
