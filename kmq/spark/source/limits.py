"""Where a micro-batch ends: the limits maxOffsetsPerTrigger and maxBytesPerTrigger, and the time at which they cut.

Invariant   A batch that a limit cuts off always ends at one recv_ts over all partitions of all brokers: no partition is
            read beyond a time that another partition has not reached. So a watermark on an event time that follows
            recv_ts never runs ahead of a slower partition, however different the partitions are in size. The records
            received at exactly that time fill the batch partition by partition, because equal times are never late.
Offsets     Never more than maxOffsetsPerTrigger, and exactly as many if they exist. Compacted records count.
Bytes       About maxBytesPerTrigger, estimated from the index alone, and at least one record: a batch always advances.
Cost        The search reads the time of a record in the largest partition, near the expected end, and asks each
            partition for the offset of that time. It usually takes two to four rounds, with two requests to each
            partition.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from kmq.spark.source.plan import Cuts, Key, Offsets, Range

_LEAST_LINE = 24  # bytes; each stored line is longer
_LINE_BYTES = 512  # assumed where the index does not tell
_MARKS = 16  # places of a partition at which its bytes are known
_BLOCK = 64 << 10  # bytes of lines that an index line covers
_FEW = 16  # a block with fewer records has long lines

Weigh = Callable[[Key, int], float]  # how much of a partition's range lies before an offset


class Times(Protocol):
    """Lookups by recv_ts, in microseconds, and by offset."""

    def offset_of_time(self, key: Key, micros: int) -> int:
        """Return the offset of the first record received at that time or later; without one, the end."""
        ...

    def time_at(self, key: Key, start: int, end: int) -> int | None:
        """Return when the first record of offsets start…end-1 was received; None if all of them were compacted."""
        ...

    def bytes_of(self, key: Key, start: int, end: int) -> int:
        """Return the size of the lines of a few records."""
        ...


def limited(spans: list[Range], max_offsets: int, max_bytes: int, cuts: Cuts, times: Times) -> Offsets:
    """Return where each range ends in this batch; 0 is no limit. At least one range advances, unless all are empty."""
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
    """Estimate how many bytes of a range lie before an offset, from the cuts in its index."""

    def __init__(self, spans: list[Range], max_bytes: int, cuts: Cuts, times: Times) -> None:
        blocks = max(1, max_bytes // _MARKS // _BLOCK)
        self._places: dict[Key, list[int]] = {}
        self._mark: dict[Key, float] = {}  # bytes between two places
        for span in spans:
            # Cut no more than a batch can take from this partition: a backlog of years would be cut up each time.
            end = min(span.end, span.start + max_bytes // _LEAST_LINE + 1)
            # A block ends with a whole line. With half a block added, a cut covers as many blocks as intended.
            places = [span.start, *cuts(span.key, span.start, end, blocks * _BLOCK + _BLOCK // 2)]
            self._places[span.key], self._mark[span.key] = places, blocks * _BLOCK
            if len(places) > 1 and places[1] - places[0] < _FEW:  # a block of long lines is larger than _BLOCK
                self._mark[span.key] = max(blocks * _BLOCK, times.bytes_of(span.key, places[0], places[1]))

    def __call__(self, key: Key, offset: int) -> float:
        places, mark = self._places[key], self._mark[key]
        at = max(1, bisect_right(places, offset)) - 1
        if at + 1 < len(places):
            return mark * (at + (offset - places[at]) / (places[at + 1] - places[at]))
        known = places[at] - places[0]  # after the last place: assume the same density as before it
        density = mark * at / known if known else _LINE_BYTES
        return mark * at + density * (offset - places[at])


def at_one_time(spans: list[Range], limit: int, weigh: Weigh, times: Times) -> Offsets:
    """Return where the ranges end at the latest recv_ts up to which they weigh at most `limit`.

    As a whole the ranges must weigh more than `limit`.
    """
    search = _Search([span for span in spans if len(span)], limit, weigh, times)
    return {span.key: span.end for span in spans} | search.run()


class _Search:
    """A search between two times: offsets before `low` are in the batch, offsets from `high` on are not."""

    def __init__(self, spans: list[Range], limit: int, weigh: Weigh, times: Times) -> None:
        self._limit, self._weigh, self._times = limit, weigh, times
        self._low = {span.key: span.start for span in spans}
        self._high = {span.key: span.end for span in spans}
        self._starts = dict(self._low)

    def run(self) -> Offsets:
        turn = 0
        while any(self._low[key] < self._high[key] for key in self._low):
            turn += 1
            micros = self._probe(halve=turn % 3 == 0)
            if micros is None:
                if self._weight(self._high) <= self._limit:
                    return self._high
                continue
            before = self._offsets_at(micros)
            if self._weight(before) > self._limit:
                self._high = before
                continue
            after = self._offsets_at(micros + 1)
            if self._weight(after) > self._limit:
                return self._fill(before, after)
            self._low = after
        return self._low

    def _weight(self, offsets: Offsets) -> float:
        return sum(self._weigh(key, offset) for key, offset in offsets.items())

    def _probe(self, halve: bool) -> int | None:
        """Return the recv_ts of a record near the expected end.

        None if there is no such record: `high` has then moved down to the offset looked at.
        """
        low, high = self._low, self._high
        key = max(low, key=lambda candidate: high[candidate] - low[candidate])
        low_weight = self._weight(low)
        share = 0.5 if halve else (self._limit - low_weight) / max(1.0, self._weight(high) - low_weight)
        width = high[key] - low[key]
        at = low[key] + min(width - 1, max(0, int(width * share)))
        micros = self._times.time_at(key, at, high[key])
        if micros is None:
            self._high = high | {key: at}
        return micros

    def _offsets_at(self, micros: int) -> Offsets:
        """Return the offset of this time in each range."""
        offsets = {}
        for key, low in self._low.items():
            high = self._high[key]
            offsets[key] = min(max(self._times.offset_of_time(key, micros), low), high) if low < high else low
        return offsets

    def _fill(self, before: Offsets, after: Offsets) -> Offsets:
        """Return `before`, moved on by as many records as the limit permits; those up to `after` share one recv_ts."""
        reached = dict(before)
        left = self._limit - self._weight(before)
        for key, start in before.items():
            # Take the last offset whose weight is within the limit.
            room = self._weigh(key, start) + left
            candidates = range(start, after[key] + 1)
            reached[key] = start + max(0, bisect_right(candidates, room, key=lambda at: self._weigh(key, at)) - 1)
            left = room - self._weigh(key, reached[key])
        if reached == self._starts:
            key = next(key for key in before if after[key] > before[key])
            reached[key] += 1
        return reached
