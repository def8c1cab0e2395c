"""What to read: offsets, ranges of offsets, and how they are cut into tasks. Plain values in, plain values out.

Key      (broker, topic, partition)
Offsets  {key: the next offset to read}; as JSON, in Spark's checkpoint: {broker: {topic: {partition: offset}, "__id": …}}
         where __id names the data directory, so that another one at the same address is noticed
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from kmq.errors import KmqError
from kmq.spark.options import WAL

Key = tuple[str, str, int]
Offsets = dict[Key, int]
Bounds = dict[Key, tuple[int, int]]  # first offset there is, offset that comes next
Cuts = Callable[[Key, int, int, int], list[int]]  # key, start, end, bytes → where to cut

IDENTITY = "__id"
SPLIT_BYTES = 64 << 20  # of lines in one task
_FEW = 10_000  # records that are never looked at for a place to cut


class DataLossError(KmqError):
    """Records that were to be read are not there any more."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(f"{name_of(key)}: {what}; failOnDataLoss=false goes on without them")


def name_of(key: Key) -> str:
    broker, topic, partition = key
    return f"{broker} {topic}" + ("" if topic == WAL else f"/{partition}")


class Range:
    """Offsets start…end-1 of one partition."""

    __slots__ = ("end", "key", "start")

    def __init__(self, key: Key, start: int, end: int) -> None:
        self.key, self.start, self.end = key, start, end

    def __len__(self) -> int:
        return max(0, self.end - self.start)


# --- JSON --------------------------------------------------------------------------------------------------------------------


def to_json(offsets: Offsets, identities: dict[str, str]) -> dict[str, Any]:
    table: dict[str, Any] = {broker: {IDENTITY: identity} for broker, identity in identities.items()}
    for (broker, topic, partition), offset in sorted(offsets.items()):
        table[broker].setdefault(topic, {})[str(partition)] = offset
    return table


def from_json(table: dict[str, Any]) -> tuple[Offsets, dict[str, str]]:
    """(offsets, identities) of what `to_json` made."""
    offsets = {
        (broker, topic, int(number)): offset
        for broker, topics in table.items()
        for topic, numbers in topics.items()
        if topic != IDENTITY
        for number, offset in numbers.items()
    }
    return offsets, {broker: topics[IDENTITY] for broker, topics in table.items() if IDENTITY in topics}


# --- ranges ------------------------------------------------------------------------------------------------------------------


def least(topic: str) -> int:
    """The first offset a partition ever had."""
    return 1 if topic == WAL else 0


def ranges(start: Offsets, end: Offsets, bounds: Bounds, fail_on_data_loss: bool) -> list[Range]:
    """What there is to read, each range within what its partition still has. Raises DataLossError."""
    found = []
    for key, stop in sorted(end.items()):
        begin = start.get(key, least(key[1]))  # a partition that is new begins with its first record
        if begin >= stop:
            if begin > stop and fail_on_data_loss:
                raise DataLossError(key, f"offsets went back from {begin} to {stop}")
            continue
        first, limit = bounds.get(key, (begin, begin))
        lost = None
        if key not in bounds:
            lost = f"offsets {begin} to {stop - 1} are gone with their partition"
        elif first > begin:
            why = f"retention, or their topic was deleted; the log begins with {first}"
            lost = f"offsets {begin} to {min(first, stop) - 1} are gone: {why}"
        elif limit < stop:
            lost = f"offsets {limit} to {stop - 1} are gone: the log ends before {limit}"
        if lost and fail_on_data_loss:
            raise DataLossError(key, lost)
        span = Range(key, max(begin, first), min(stop, limit))
        if len(span):
            found.append(span)
    return found


def split(spans: Iterable[Range], cuts: Cuts, min_partitions: int = 0) -> list[Range]:
    """The ranges cut into tasks: by bytes, and then by records until there are `min_partitions`."""
    pieces = [piece for span in spans for piece in _cut_up(span, _by_bytes(span, cuts))]
    if len(pieces) >= min_partitions or not pieces:
        return pieces
    total = sum(map(len, pieces))
    parts: list[Range] = []
    for piece in pieces:
        count = min(len(piece), max(1, round(min_partitions * len(piece) / total)))
        parts += _cut_up(piece, [piece.start + len(piece) * n // count for n in range(1, count)])
    return parts


def _by_bytes(span: Range, cuts: Cuts) -> list[int]:
    return cuts(span.key, span.start, span.end, SPLIT_BYTES) if len(span) >= _FEW else []


def _cut_up(span: Range, at: list[int]) -> list[Range]:
    edges = [span.start, *at, span.end]
    return [Range(span.key, low, high) for low, high in pairwise(edges)]


def limited(start: Offsets, end: Offsets, max_offsets: int, max_bytes: int, cuts: Cuts) -> Offsets:
    """`end`, or as far as one micro-batch may go from `start`; 0 is no limit. Always goes on somewhere.

    Offsets are shared out in proportion to what each partition has, so that all arrive together; bytes evenly, for a look at
    the index tells where a share ends, but not how much there is.
    """
    spans = [Range(key, start.get(key, least(key[1])), stop) for key, stop in sorted(end.items())]
    spans = [span for span in spans if len(span)]
    reached = dict(end)
    total = sum(map(len, spans))
    if max_offsets and total > max_offsets:
        left = max_offsets
        for span in spans:
            share = min(len(span), left, max(1, max_offsets * len(span) // total))
            reached[span.key] = span.start + share
            left -= share
    if max_bytes and spans:
        share = max(1, max_bytes // len(spans))
        for span in spans:
            stop = reached[span.key]
            if stop > span.start:
                reached[span.key] = next(iter(cuts(span.key, span.start, stop, share)), stop)
    return reached
