"""The ids of messages: their form, and the table of stored ids, each with its seq and a fingerprint of its content.

A producer's ids are decimal and increasing (`KnownProducer`). The ids of a window are arbitrary text and age (`IdWindow`).

Invariant   An id up to a producer's last is known to be stored exactly while a run or a range holds it. Of the last
            PRINTS ids there is a fingerprint of the content too (record.fingerprint), unless the dedupe table had to
            forget it.
Memory      A run gives the seq of each of its ids. Older runs become ranges without seqs, and ranges that adjoin are
            merged. A producer has at most _RANGES ranges; an id below them is unknown. A window is bounded by count and
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
# Names that a door of KMQ gives to Kafka's producers: `k<pid>.<from_seq>.<partition>`, `auto-k<life>.<partition>` for those
# without a pid. `t<pid>` is for what a transaction writes. A pid has at least 7 digits, so a till `t5` stays a till.
KAFKA_NAME = r"k\d{7,18}\.\d{1,18}\.\d{1,9}|auto-k\d{1,18}\.\d{1,9}"
COPIER_NAME = r"t\d{7,18}"
OWN_NAME = rf"__.*|{COPIER_NAME}"  # of producers of KMQ itself

_OF_DOOR = re.compile(f"{KAFKA_NAME}|{COPIER_NAME}".encode())

NEW, TOO_OLD = -1, -2  # what `find` returns besides a seq
PRINTS = 4096  # ids of a producer whose content is remembered
_RANGES = 1 << 16


def is_of_door(name: bytes) -> bool:
    """Return True for a producer whose lines the Kafka door writes, and says in each whose it is.

    So the fingerprint of such a line is of the line as a whole (record.fingerprints).
    """
    return _OF_DOOR.fullmatch(name) is not None


class KnownProducer:
    """The ids of one name: runs of consecutive ids under consecutive seqs, and below them ranges of older ids."""

    __slots__ = (
        *("counts", "firsts", "generation", "ids", "last_id", "lasts", "name", "part", "prints", "seconds", "seqs"),
    )
    part: "TablePart"  # of the dedupe table, once it is there

    def __init__(self, name: bytes = b"", last_id: int = -1, seconds: int = 0) -> None:
        self.name, self.last_id, self.seconds = name, last_id, seconds
        self.generation = 0  # of the last snapshot that has it, or is older than it (kmq/log/dedupe_file.py)
        self.ids: list[int] = []  # first id of each run, rising
        self.seqs: list[int] = []
        self.counts: list[int] = []
        self.firsts = array("q")  # first id of each range of ids whose seqs are forgotten, below all runs
        self.lasts = array("q")
        self.prints = array("I")  # of the last ids stored, up to twice as many as PRINTS; 0: not known

    def find(self, number: int) -> int:
        """Return the seq of id `number`; 0: stored, but its seq is forgotten; NEW; or TOO_OLD: not known as stored."""
        if number > self.last_id:
            return NEW
        at = bisect_right(self.ids, number) - 1
        if at >= 0:
            ahead = number - self.ids[at]
            return self.seqs[at] + ahead if ahead < self.counts[at] else TOO_OLD
        at = bisect_right(self.firsts, number) - 1
        return 0 if at >= 0 and number <= self.lasts[at] else TOO_OLD

    def print_of(self, number: int) -> int:
        """Return the fingerprint of the message with id `number`, which `find` has found; 0 if it is forgotten."""
        at = bisect_right(self.ids, number) - 1
        if at < 0:
            return 0
        back = sum(self.counts[at:]) - (number - self.ids[at])
        return self.prints[-back] if back <= min(PRINTS, len(self.prints)) else 0

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
        known = self.prints
        if len(prints) == count:
            known.extend(prints)
        else:
            del known[:]  # `prints` must belong to the last ids without a gap
        if len(known) >= 2 * PRINTS:
            del known[:-PRINTS]

    def trim(self, keep: int) -> int:
        """Turn all but the newest `keep` runs into ranges, without seqs. Returns how many runs were turned."""
        surplus = len(self.ids) - keep
        if surplus <= 0:
            return 0
        for first, count in zip(self.ids[:surplus], self.counts[:surplus], strict=True):
            if self.lasts and self.lasts[-1] + 1 == first:
                self.lasts[-1] = first + count - 1
            else:
                self.firsts.append(first)
                self.lasts.append(first + count - 1)
        del self.ids[:surplus], self.seqs[:surplus], self.counts[:surplus]
        del self.firsts[:-_RANGES], self.lasts[:-_RANGES]
        return surplus

    def forget_ranges(self) -> int:
        """Forget all ranges. Returns how many there were."""
        count = len(self.firsts)
        self.firsts, self.lasts = array("q"), array("q")
        return count

    def forget_prints(self) -> int:
        """Forget all fingerprints. Returns how many there were."""
        count = len(self.prints)
        self.prints = array("I")
        return count


class TablePart:
    """A part of the names of a dedupe table. When it is full, those of `evictable` that are idle for `idle_s` make room."""

    __slots__ = ("count", "evictable", "idle_s", "most", "setting")

    def __init__(self, setting: str, most: int, idle_s: float) -> None:
        """`most`: so many names may be here, which `setting` says."""
        self.setting, self.most, self.idle_s = setting, most, idle_s
        self.count = 0
        self.evictable: OrderedDict[bytes, KnownProducer] = OrderedDict()  # in the order of their last messages

    @property
    def excess(self) -> int:
        """Return how many names have to go before another one has a place."""
        return self.count + 1 - self.most


_KEYS_IN_LIST = 1024  # of the order of a window: as many are forgotten with one that comes, in some hundred µs

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

    Invariant   One call costs the same however many ids there are: `add` forgets at most _KEYS_IN_LIST, and what is
                too old and still there counts for nothing. `snapshot` takes lists of keys, and no key.
    """

    def __init__(self, max_ids: int, age: float) -> None:
        self._max_ids, self._age = max_ids, age
        self.ids: dict[bytes, int] = {}  # scope|id → packed, in order of age
        # The keys in order of age, in lists that only grow: a dict finds its first key by stepping over all deleted keys.
        self._newest: list[bytes] = []
        self._order = deque([self._newest])
        self._first = 0  # index of the oldest key in the first list
        self._again: dict[bytes, int] = {}  # keys that were added again: so many times `_order` has them for nothing
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
        """Return the fingerprint of an id that `find` has found; 0 where it is unknown."""
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
                self._snapshot.keep(key, self.ids[key])
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

    The window says what it forgets, before it does. So an id that is forgotten meanwhile, or added again, is read as it
    was, without a lock.
    """

    def __init__(self, ids: dict[bytes, int], order: list[list[bytes]], first: int, again: dict[bytes, int]) -> None:
        self._ids, self._order, self._first, self._again = ids, order, first, again
        self._in_last = len(order[-1])  # keys of the last list, which grows
        self._kept: dict[bytes, int] = {}
        self.is_complete = False  # nothing is to be read any more

    def keep(self, key: bytes, value: int) -> None:
        """Note the value of a key that is about to be forgotten."""
        self._kept.setdefault(key, value)

    def rows(self) -> Iterator[tuple[bytes, int]]:
        """Yield each `scope|id` with its packed value, the oldest first."""
        try:
            for number, keys in enumerate(self._order):
                last = self._in_last if number == len(self._order) - 1 else len(keys)
                for key in islice(keys, 0 if number else self._first, last):
                    if self._again.get(key):
                        self._again[key] -= 1
                        continue
                    value = self._ids.get(key, 0)  # 0: it was kept before. So look here first, then at what was kept
                    yield key, self._kept.get(key, value)
        finally:
            self.is_complete = True
            self._kept.clear()
