"""How far a micro-batch goes: maxOffsetsPerTrigger and maxBytesPerTrigger, and where in time it ends.

Invariant   A batch that a limit ends, ends at one recv_ts over all partitions of all brokers: no partition is read beyond a time
            up to which another one was not read. So no watermark of an event time that follows recv_ts runs ahead of a
            partition that is behind, however different they are in size. Of the records received at exactly that time
            partitions are filled in order: equal times are never late.
Offsets     Never more than maxOffsetsPerTrigger, and exactly so many where there are as many. What compaction took counts.
Bytes       About maxBytesPerTrigger, by the index alone, and at least one record: a batch is never stuck.
Cost        The time is found by looking at a record of the largest partition where the end is expected, and asking each
            partition where that time is. Two to four rounds of two questions to each partition are usual.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from kmq.spark.source.plan import Cuts, Key, Offsets, Range

_LEAST_LINE = 24  # bytes; a stored line has more
_LINE_BYTES = 512  # a guess where the index says nothing
_MARKS = 16  # places of a partition at which its bytes are known
_BLOCK = 64 << 10  # bytes of lines that an index line speaks of
_FEW = 16  # records in so many bytes are long

Weigh = Callable[[Key, int], float]  # how much lies before this offset, in the range of that partition


class Times(Protocol):
    """Lookups by recv_ts, in microseconds, and what there is at an offset."""

    def offset_of_time(self, key: Key, micros: int) -> int:
        """The offset of the first record received then or later; the end where there is none."""
        ...

    def time_at(self, key: Key, start: int, end: int) -> int | None:
        """When the first record of offsets start…end-1 was received; None where compaction took all of them."""
        ...

    def bytes_of(self, key: Key, start: int, end: int) -> int:
        """How many bytes the lines of a few records have."""
        ...


def limited(spans: list[Range], max_offsets: int, max_bytes: int, cuts: Cuts, times: Times) -> Offsets:
    """Where each range ends in this batch; 0 is no limit. Goes on somewhere, if there is anything."""
    spans = [span for span in spans if len(span)]
    if max_offsets and sum(map(len, spans)) > max_offsets:
        starts = {span.key: span.start for span in spans}
        ends = at_one_time(spans, max_offsets, lambda key, offset: offset - starts[key], times)
        spans = [Range(span.key, span.start, ends[span.key]) for span in spans]
    if max_bytes:
        bytes_of = Bytes(spans, max_bytes, cuts, times)
        if sum(bytes_of(span.key, span.end) for span in spans) > max_bytes:
            ends = at_one_time(spans, max_bytes, bytes_of, times)
            spans = [Range(span.key, span.start, ends[span.key]) for span in spans]
    return {span.key: span.end for span in spans}


class Bytes:
    """About how many bytes of a range lie before an offset, by the cuts in its index."""

    def __init__(self, spans: list[Range], max_bytes: int, cuts: Cuts, times: Times) -> None:
        blocks = max(1, max_bytes // _MARKS // _BLOCK)
        self._places: dict[Key, list[int]] = {}
        self._mark: dict[Key, float] = {}  # bytes from place to place
        for span in spans:
            # No more than a batch can have of this partition, so that a backlog of years is not cut up each time.
            end = min(span.end, span.start + max_bytes // _LEAST_LINE + 1)
            # A block has its last line whole: with half a block more, these are as many blocks as are meant.
            places = [span.start, *cuts(span.key, span.start, end, blocks * _BLOCK + _BLOCK // 2)]
            self._places[span.key], self._mark[span.key] = places, blocks * _BLOCK
            if len(places) > 1 and places[1] - places[0] < _FEW:  # a block of long lines is as long as these
                self._mark[span.key] = max(blocks * _BLOCK, times.bytes_of(span.key, places[0], places[1]))

    def __call__(self, key: Key, offset: int) -> float:
        places, mark = self._places[key], self._mark[key]
        at = max(1, bisect_right(places, offset)) - 1
        if at + 1 < len(places):
            return mark * (at + (offset - places[at]) / (places[at + 1] - places[at]))
        known = places[at] - places[0]  # behind the last place: as dense as in front of it
        dense = mark * at / known if known else _LINE_BYTES
        return mark * at + dense * (offset - places[at])


def at_one_time(spans: list[Range], limit: int, weigh: Weigh, times: Times) -> Offsets:
    """The ends of the ranges at the latest recv_ts up to which they weigh no more than `limit`; they weigh more in all."""
    search = _Search([span for span in spans if len(span)], limit, weigh, times)
    return {span.key: span.end for span in spans} | search.run()


class _Search:
    """All that lies before `low` goes into the batch, nothing from `high` on does; both are at one time each."""

    def __init__(self, spans: list[Range], limit: int, weigh: Weigh, times: Times) -> None:
        self._limit, self._weigh, self._times = limit, weigh, times
        self._low = {span.key: span.start for span in spans}
        self._high = {span.key: span.end for span in spans}
        self._starts = dict(self._low)

    def run(self) -> Offsets:
        turn = 0
        while any(self._low[key] < self._high[key] for key in self._low):
            turn += 1
            micros = self._look(halve=turn % 3 == 0)
            if micros is None:
                if self._weight(self._high) <= self._limit:
                    return self._high
                continue
            before = self._at(micros)
            if self._weight(before) > self._limit:
                self._high = before
                continue
            after = self._at(micros + 1)
            if self._weight(after) > self._limit:
                return self._fill(before, after)
            self._low = after
        return self._low

    def _weight(self, offsets: Offsets) -> float:
        return sum(self._weigh(key, offset) for key, offset in offsets.items())

    def _look(self, halve: bool) -> int | None:
        """The recv_ts of a record about where the end is to be expected; None: those behind it are left out now."""
        low, high = self._low, self._high
        key = max(low, key=lambda each: high[each] - low[each])
        light = self._weight(low)
        share = 0.5 if halve else (self._limit - light) / max(1.0, self._weight(high) - light)
        width = high[key] - low[key]
        at = low[key] + min(width - 1, max(0, int(width * share)))
        micros = self._times.time_at(key, at, high[key])
        if micros is None:
            self._high = high | {key: at}
        return micros

    def _at(self, micros: int) -> Offsets:
        """Where in each range this time is."""
        found = {}
        for key, low in self._low.items():
            high = self._high[key]
            found[key] = min(max(self._times.offset_of_time(key, micros), low), high) if low < high else low
        return found

    def _fill(self, before: Offsets, after: Offsets) -> Offsets:
        """`before`, and of the records from there to `after`, all received at one time, as many as the limit lets in."""
        reached = dict(before)
        left = self._limit - self._weight(before)
        for key, start in before.items():
            # The last offset that does not weigh too much.
            room = self._weigh(key, start) + left
            candidates = range(start, after[key] + 1)
            reached[key] = start + max(0, bisect_right(candidates, room, key=lambda at: self._weigh(key, at)) - 1)
            left = room - self._weigh(key, reached[key])
        if reached == self._starts:
            key = next(key for key in before if after[key] > before[key])
            reached[key] += 1
        return reached
