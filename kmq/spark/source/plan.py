"""What a stream has read and what a query reads next: offsets, ranges of offsets, and tasks. Plain values only.

Key       (broker, topic, partition)
Offsets   {key: the next offset to read}
Stamp     (seq, recv_ts in microseconds) of a record; a record keeps it forever, and no other record has it
StreamPosition  how far a stream has read, and how the batch that ends there was cut. Spark keeps it in its checkpoint as
          JSON:

    {"pods/0/data": {"__id": "0f…", "__format": "2",
                     "orders": {"0": 1500, "1": 20},
                     "__last": {"orders": {"0": "4711 1700000000.000123"}},
                     "__cuts": {"orders": {"0": "1200 1400"}},
                     "__tasks": "1 1 2",
                     "__from": {"orders": {"1": "10"}}}}

by broker   The name is as the query spells it. __id is the data id, and decides: the same directory resumes under
            another name, and another directory under the same name is refused. "": a broker that has not answered since
            the stream began. When it does, it begins where startingOffsets says, and not with its first record.
__format    3 with __tasks, else 2. Without it the JSON is of format 1, which had __id and the offsets only. All of them
            stay readable forever. An older release refuses 3: it would cut a replay into other tasks.
offsets     by topic and partition, the only numbers in the JSON: their sum tells how far the stream is.
__last      seq and recv_ts of the last record before the offset, where there is one. kmq/spark/source/planner.py
            compares it.
__cuts      where the batch that ends here is cut into tasks, so that a replay has the same tasks, in the order of this
            JSON.
__tasks     how many pieces of ranges each task of the broker reads, in the same order. Without it each reads one.
__from      where the batch begins in a new partition, which has no offset in the batch's start. The first batch has it
            for all partitions, because its start is not in the checkpoint.

Invariant   The tasks of a stream's batch depend only on its two offsets, never on options, cores, retention or
            compaction. A batch that a limit cuts off always ends at one recv_ts over all partitions of all brokers: no
            partition is read beyond a time that another partition has not reached. So a watermark on an event time that
            follows recv_ts never runs ahead of a slower partition, however different the partitions are in size. The
            records received at exactly that time fill the batch partition by partition, because equal times are never
            late.
Tasks       The size of a task gives every core _TASKS_A_CORE tasks, with at least LEAST_BYTES and at most SPLIT_BYTES
            each. Very much data is cut into MOST_TASKS, however large. Cuts lie at the ends of index blocks, and only
            the index is read: twice for a range of many records, not at all for a range of few.
            Ranges of less than LEAST_BYTES of one broker share tasks, so that there are about _TASKS_A_CORE for each
            core, or fewer with _FEW records each. A task of them has at most MOST_SHARED records, because their bytes
            are not known.
            minPartitions: at least this many tasks if there are as many records. The tasks with the most records are
            cut, after ranges were packed into tasks, so that a large partition is spread. maxRecordsPerPartition: no
            task has more records.
Limits      Never more than maxOffsetsPerTrigger, and exactly as many if they exist. Compacted records count. About
            maxBytesPerTrigger, estimated from the index alone, and at least one record: a batch always advances.
            The search reads the time of a record in the largest partition, near the expected end, and asks each
            partition for the offset of that time. It usually takes two to four rounds, with two requests to each
            broker.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from kmq.errors import ConfigError, KmqError
from kmq.log import gaps
from kmq.log.gaps import Gaps
from kmq.log.reader import WAL
from kmq.logfmt import Logger
from kmq.message import record

Key = tuple[str, str, int]
Offsets = dict[Key, int]
Bounds = dict[Key, tuple[int, int]]  # the first offset that exists, the next offset to be assigned
Stamp = tuple[int, int]

IDENTITY, FORMAT, LAST, CUTS, TASKS, FROM = "__id", "__format", "__last", "__cuts", "__tasks", "__from"
_NOT_TOPICS = (IDENTITY, FORMAT, LAST, CUTS, TASKS, FROM)
_ONE_EACH, _SHARED = _VERSIONS = ("2", "3")
_SKIP = "failOnDataLoss=false continues without them"


class DataLossError(KmqError):
    """Records that were to be read no longer exist."""

    def __init__(self, key: Key, what: str, advice: str = _SKIP) -> None:
        super().__init__(f"{name_of(key)}: {what}; {advice}")


def name_of(key: Key) -> str:
    broker, topic, partition = key
    return f"{broker} {topic}" + ("" if topic == WAL else f"/{partition}")


class OffsetSpan:
    """Offsets start…end-1 of one partition."""

    __slots__ = ("end", "key", "start")

    def __init__(self, key: Key, start: int, end: int) -> None:
        self.key, self.start, self.end = key, start, end

    def __len__(self) -> int:
        return max(0, self.end - self.start)


Cuts = Callable[[Sequence[OffsetSpan], int], dict[Key, list[int]]]  # ranges, bytes → where to cut each


# --- JSON ------------------------------------------------------------------------------------------------------------


@dataclass
class StreamPosition:
    """See the module. The order of `offsets` is that of the tasks of a batch that ends here."""

    offsets: Offsets
    identities: dict[str, str]
    last: dict[Key, Stamp] = field(default_factory=dict)
    cuts: dict[Key, list[int]] | None = None  # None: format 1, which has no cuts
    begins: Offsets = field(default_factory=dict)
    tasks: dict[str, list[int]] = field(default_factory=dict)  # by broker: how many pieces each task reads

    @staticmethod
    def of_json(table: dict[str, Any]) -> "StreamPosition":
        for broker, topics in table.items():
            if topics.get(FORMAT, _ONE_EACH) not in _VERSIONS:
                raise ConfigError(
                    f"{broker}: the checkpoint is of a newer version of kmq (format {topics[FORMAT]} of offsets,"
                    f" this one reads up to {_VERSIONS[-1]}); upgrade kmq where this query runs"
                )
        offsets, identities = from_json(table)
        if not all(FORMAT in topics for topics in table.values()):
            return StreamPosition(dict(sorted(offsets.items())), identities)
        cuts = {key: [int(at) for at in text.split()] for key, text in _texts(table, CUTS)}
        begins = {key: int(text) for key, text in _texts(table, FROM)}
        last = {key: _stamp(text) for key, text in _texts(table, LAST)}
        tasks = {broker: [*map(int, topics[TASKS].split())] for broker, topics in table.items() if TASKS in topics}
        return StreamPosition(offsets, identities, last, cuts, begins, tasks)

    def to_json(self) -> dict[str, Any]:
        table = to_json(self.offsets, {broker: self.identities[broker] for broker in sorted(self.identities)})
        for topics in table.values():
            topics[FORMAT] = _SHARED if self.tasks else _ONE_EACH
        for broker, counts in self.tasks.items():
            table[broker][TASKS] = " ".join(map(str, counts))
        for name, texts in (
            (LAST, {key: f"{seq} {record.format_ts(micros).decode()}" for key, (seq, micros) in self.last.items()}),
            (CUTS, {key: " ".join(map(str, at)) for key, at in (self.cuts or {}).items() if at}),
            (FROM, {key: str(at) for key, at in self.begins.items()}),
        ):
            for (broker, topic, partition), text in sorted(texts.items()):
                table[broker].setdefault(name, {}).setdefault(topic, {})[str(partition)] = text
        return table

    def renamed(self, names: Mapping[str, str]) -> "StreamPosition":
        """Return the position with other names of brokers, in the same order."""

        def moved(table: dict[Key, Any]) -> dict[Key, Any]:
            return {(names[broker], topic, partition): value for (broker, topic, partition), value in table.items()}

        identities = {names[broker]: identity for broker, identity in self.identities.items() if broker in names}
        cuts = None if self.cuts is None else moved(self.cuts)
        tasks = {names[broker]: counts for broker, counts in self.tasks.items()}
        return StreamPosition(moved(self.offsets), identities, moved(self.last), cuts, moved(self.begins), tasks)


def _texts(table: dict[str, Any], name: str) -> list[tuple[Key, str]]:
    return [
        ((broker, topic, int(number)), text)
        for broker, topics in table.items()
        for topic, numbers in topics.get(name, {}).items()
        for number, text in numbers.items()
    ]


def _stamp(text: str) -> Stamp:
    seq, _, ts = text.partition(" ")
    return int(seq), record.parse_ts(ts.encode())


def to_json(offsets: Offsets, identities: dict[str, str]) -> dict[str, Any]:
    """Return the JSON of the offsets alone."""
    table: dict[str, Any] = {broker: {IDENTITY: identity} for broker, identity in identities.items()}
    for (broker, topic, partition), offset in sorted(offsets.items()):
        table[broker].setdefault(topic, {})[str(partition)] = offset
    return table


def from_json(table: dict[str, Any]) -> tuple[Offsets, dict[str, str]]:
    """Return (offsets, identities) of either format."""
    offsets = {
        (broker, topic, int(number)): offset
        for broker, topics in table.items()
        for topic, numbers in topics.items()
        if topic not in _NOT_TOPICS
        for number, offset in numbers.items()
    }
    return offsets, {broker: topics[IDENTITY] for broker, topics in table.items() if IDENTITY in topics}


# --- ranges ----------------------------------------------------------------------------------------------------------


def least(topic: str) -> int:
    """Return the first offset that a partition ever had."""
    return 1 if topic == WAL else 0


def wanted(start: Offsets, end: Offsets) -> list[OffsetSpan]:
    """Return the ranges between two offsets, in the order of `end`, whether or not the records exist."""
    # A new partition begins with its first record.
    spans = [OffsetSpan(key, start.get(key, least(key[1])), stop) for key, stop in end.items()]
    return [span for span in spans if len(span)]


def lost(span: OffsetSpan, bounds: Bounds) -> str:
    """Describe which records of a range do not exist; "" if all do."""
    begin, stop = span.start, span.end
    if span.key not in bounds:
        return f"offsets {begin} to {stop - 1} are gone with their partition"
    first, limit = bounds[span.key]
    if first > begin:
        why = f"retention, or their topic was deleted; the log begins with {first}"
        return f"offsets {begin} to {min(first, stop) - 1} are gone: {why}"
    return f"offsets {limit} to {stop - 1} are gone: the log ends before {limit}" if limit < stop else ""


def gone(span: OffsetSpan, bounds: Bounds) -> list[OffsetSpan]:
    """Return the parts of a range whose records do not exist."""
    there = within(span, bounds)
    parts = (OffsetSpan(span.key, span.start, there.start), OffsetSpan(span.key, there.end, span.end))
    return [part for part in parts if len(part)]


def warn_skipped(part: OffsetSpan) -> None:
    """Log that a query goes on without the records of a range, which do not exist."""
    broker, topic, partition = part.key
    effect = "they are lost to this query: retention, truncation or a deletion took them before it read them"
    Logger("spark").warn(
        "records_skipped",
        broker=broker,
        topic=topic,
        partition=partition,
        first=part.start,
        last=part.end - 1,
        count=len(part),
        effect=effect,
    )


def check_there(spans: Iterable[OffsetSpan], bounds: Bounds) -> None:
    """Raise DataLossError if a record of the ranges does not exist."""
    for span in spans:
        if what := lost(span, bounds):
            raise DataLossError(span.key, what)


def within(span: OffsetSpan, bounds: Bounds) -> OffsetSpan:
    """Return the part of a range that exists, which may be empty."""
    first, limit = bounds.get(span.key, (span.end, span.end))
    start = min(max(span.start, first), span.end)
    return OffsetSpan(span.key, start, max(start, min(span.end, limit)))


def ranges(start: Offsets, end: Offsets, bounds: Bounds, fail_on_data_loss: bool) -> list[OffsetSpan]:
    """Return the ranges to read, in order of keys. With `fail_on_data_loss`, raise DataLossError if some are lost."""
    spans = wanted(start, dict(sorted(end.items())))
    if fail_on_data_loss:
        check_there(spans, bounds)
    return [part for span in spans if len(part := within(span, bounds))]


def without_gaps(spans: Iterable[OffsetSpan], found: Mapping[Key, Gaps]) -> list[OffsetSpan]:
    """Return the ranges without the offsets that lie in gaps, which no record has."""
    parts = []
    for span in spans:
        start = span.start
        for gap in found.get(span.key, ()):
            if start < gap.to and gap.first < span.end:
                parts.append(OffsetSpan(span.key, start, gap.first))
                start = gap.to
        parts.append(OffsetSpan(span.key, start, span.end))
    return [part for part in parts if len(part)]


def up_to_gaps(start: Offsets, end: Offsets, found: Mapping[Key, Gaps]) -> tuple[Offsets, Offsets]:
    """Return where a micro-batch begins and may end, so that none of its ranges spans a gap: the next batch goes on."""
    start, end = dict(start), dict(end)
    for key, mine in found.items():
        if key in end:
            begin = start.get(key, least(key[1]))
            if (resumed := gaps.passed(mine, begin)) != begin:
                start[key] = begin = resumed
            end[key] = min([end[key], *(gap.first for gap in mine if gap.first > begin)])
    return start, end


def cut_up(span: OffsetSpan, at: Iterable[int]) -> list[OffsetSpan]:
    """Return the range, cut at the offsets that lie in it."""
    edges = [span.start, *(edge for edge in at if span.start < edge < span.end), span.end]
    return [OffsetSpan(span.key, low, high) for low, high in pairwise(edges)]


# --- tasks -----------------------------------------------------------------------------------------------------------

SPLIT_BYTES = 64 << 20  # of lines in one task, at most
LEAST_BYTES = 4 << 20  # a task costs some 10 ms, as much as reading this
MOST_TASKS = 1000  # of a batch cut by bytes: a stream keeps its cuts in the checkpoint
_TASKS_A_CORE = 2  # more than one, so that no core idles long
_FEW = 1_000  # records: a smaller range is not cut by bytes
MOST_SHARED = SPLIT_BYTES // 512  # records of a task that ranges share; 512: bytes of a line, where nothing is known


class Cut(NamedTuple):
    """Where ranges are cut, and how many pieces each task of a broker reads. Without an entry in `tasks`: one each."""

    at: dict[Key, list[int]]
    tasks: dict[str, list[int]]


def cut(spans: list[OffsetSpan], cuts: Cuts, cores: int = 1, min_partitions: int = 0, max_records: int = 0) -> Cut:
    """Return where to cut each range, without ranges that stay whole, and which pieces share a task."""
    pieces, large = _by_bytes(spans, cuts, _TASKS_A_CORE * cores)
    if max_records:
        pieces = [part for piece in pieces for part in evenly(piece, -(-len(piece) // max_records))]
    shares = _packed(pieces, large, _TASKS_A_CORE * cores, max_records or MOST_SHARED)
    shares = _at_least(shares, min_partitions)
    found: dict[Key, list[int]] = {}
    counts: dict[str, list[int]] = {}
    starts = {span.key: span.start for span in reversed(spans)}  # a range may be in parts, around a gap
    for share in shares:
        counts.setdefault(share[0].key[0], []).append(len(share))
        for piece in share:
            if piece.start > starts[piece.key]:
                found.setdefault(piece.key, []).append(piece.start)
    return Cut(found, {broker: each for broker, each in counts.items() if max(each) > 1})


def _by_bytes(spans: list[OffsetSpan], cuts: Cuts, tasks: int) -> tuple[list[OffsetSpan], set[Key]]:
    """Return the ranges cut into about `tasks` equal shares of their bytes, and the keys of ranges over LEAST_BYTES."""
    large = [span for span in spans if len(span) >= _FEW]
    edges = cuts(large, SPLIT_BYTES)
    coarse = sum(map(len, edges.values()))
    fine = cuts([span for span in large if coarse < tasks or not edges[span.key]], LEAST_BYTES)
    if coarse < tasks:  # less than SPLIT_BYTES per task: cut more finely
        edges = fine
        total = sum(map(len, edges.values())) + len(edges)  # in LEAST_BYTES
        step = min(-(-total // tasks) or 1, SPLIT_BYTES // LEAST_BYTES)
    else:
        step = -(-coarse // MOST_TASKS)
    pieces = [piece for span in spans for piece in cut_up(span, edges.get(span.key, [])[step - 1 :: step])]
    return pieces, {key for key in edges if edges[key] or fine[key]}


Share = list[OffsetSpan]  # what one task reads


def _packed(pieces: list[OffsetSpan], large: set[Key], tasks: int, most: int) -> list[Share]:
    """Return which pieces each task reads. Neighbours of one broker share a task, except pieces of `large` ranges.

    There are at most `tasks` tasks, unless `most` records a task, large ranges or brokers make more.
    """

    def pack(records: int) -> list[Share]:
        """Return the shares if neighbours share a task of up to `records` records."""
        found: list[Share] = []
        held: int | None = None  # records of the last task; None: it is not shared
        for piece in pieces:
            is_small = piece.key not in large
            if is_small and held is not None and found[-1][0].key[0] == piece.key[0] and held + len(piece) <= records:
                found[-1].append(piece)
                held += len(piece)
            else:
                found.append([piece])
                held = len(piece) if is_small else None
        return found

    few = range(min(_FEW, most), most + 1)
    return pack(few[min(bisect_left(few, -tasks, key=lambda records: -len(pack(records))), len(few) - 1)])


def _at_least(shares: list[Share], count: int) -> list[Share]:
    """Cut the shares with the most records until there are `count` shares, or one for each record."""
    if len(shares) >= count or not shares:
        return shares
    sizes = [sum(map(len, share)) for share in shares]
    parts = [1] * len(shares)
    largest: list[tuple[float, int]] = [(-size, at) for at, size in enumerate(sizes)]
    heapify(largest)
    for _ in range(min(count, sum(sizes)) - len(shares)):
        at = largest[0][1]
        parts[at] += 1
        heapreplace(largest, (-sizes[at] / parts[at], at))
    return [part for share, number in zip(shares, parts, strict=True) for part in _parted(share, number)]


def _parted(share: Share, count: int) -> list[Share]:
    """Split a share into `count` parts whose sizes differ by at most one record."""
    total = sum(map(len, share))
    found: list[Share] = [[]]
    done = 0  # records of the parts before the last one, and of the last one
    for piece in share:
        rest = piece
        while done + len(rest) > (end := total * len(found) // count) and len(found) < count:
            if end > done:
                middle = rest.start + end - done
                found[-1].append(OffsetSpan(piece.key, rest.start, middle))
                rest = OffsetSpan(piece.key, middle, rest.end)
                done = end
            found.append([])
        found[-1].append(rest)
        done += len(rest)
    return found


def shared(pieces: Iterable[OffsetSpan], tasks: Mapping[str, list[int]]) -> list[list[OffsetSpan]]:
    """Return the pieces that each task reads. `tasks`: their numbers of pieces, by broker; one each for other
    brokers.
    """
    left = {broker: iter(counts) for broker, counts in tasks.items()}
    found: list[list[OffsetSpan]] = []
    missing = 0  # pieces of the last task
    for piece in pieces:
        broker = piece.key[0]
        if not missing or found[-1][0].key[0] != broker:
            found.append([])
            missing = next(left[broker], 1) if broker in left else 1
        found[-1].append(piece)
        missing -= 1
    return found


def evenly(span: OffsetSpan, count: int) -> list[OffsetSpan]:
    """Split a range into `count` parts whose sizes differ by at most one record."""
    return cut_up(span, (span.start + len(span) * n // count for n in range(1, count)))


def cut_as_format_1(spans: Iterable[OffsetSpan], cuts: Cuts, min_partitions: int) -> list[OffsetSpan]:
    """Return the pieces of a repeated batch that was planned by a release before format 2 of offsets."""
    spans = list(spans)
    found = cuts([span for span in spans if len(span) >= 10_000], SPLIT_BYTES)
    pieces = [piece for span in spans for piece in cut_up(span, found.get(span.key, ()))]
    if len(pieces) >= min_partitions or not pieces:
        return pieces
    total = sum(map(len, pieces))
    shares = [min(len(piece), max(1, round(min_partitions * len(piece) / total))) for piece in pieces]
    return [part for piece, share in zip(pieces, shares, strict=True) for part in evenly(piece, share)]


# --- the end of a micro-batch ----------------------------------------------------------------------------------------

_LEAST_LINE = 24  # bytes; each stored line is longer
_LINE_BYTES = 512  # assumed if the index does not tell
_MARKS = 16  # places of a partition at which its bytes are known
_BLOCK = 64 << 10  # bytes of lines that an index line covers
_FEW_LINES = 16  # a block with fewer records has long lines

Weigh = Callable[[Key, int], float]  # how much of a partition's range lies before an offset


class Times(Protocol):
    """Lookups by recv_ts, in microseconds, and by offset."""

    def offsets_of_time(self, keys: Sequence[Key], micros: int) -> Offsets:
        """Return the offsets of the first records received at that time or later; without one, the end."""
        ...

    def time_at(self, key: Key, start: int, end: int) -> int | None:
        """Return when the first record of offsets start…end-1 was received; None if all of them were compacted."""
        ...

    def bytes_of(self, key: Key, start: int, end: int) -> int:
        """Return the size of the lines of a few records."""
        ...


def limited(spans: list[OffsetSpan], max_offsets: int, max_bytes: int, cuts: Cuts, times: Times) -> Offsets:
    """Return where each range ends in this batch; 0 is no limit. At least one range advances, unless all are empty."""
    spans = [span for span in spans if len(span)]
    if max_offsets and sum(map(len, spans)) > max_offsets:
        starts = {span.key: span.start for span in spans}
        ends = at_one_time(spans, max_offsets, lambda key, offset: offset - starts[key], times)
        spans = [OffsetSpan(span.key, span.start, ends[span.key]) for span in spans]
    if max_bytes:
        bytes_of = Bytes(spans, max_bytes, cuts, times)
        if sum(bytes_of(span.key, span.end) for span in spans) > max_bytes:
            ends = at_one_time(spans, max_bytes, bytes_of, times)
            spans = [OffsetSpan(span.key, span.start, ends[span.key]) for span in spans]
    return {span.key: span.end for span in spans}


class Bytes:
    """Estimate how many bytes of a range lie before an offset, from the cuts in its index."""

    def __init__(self, spans: list[OffsetSpan], max_bytes: int, cuts: Cuts, times: Times) -> None:
        blocks = max(1, max_bytes // _MARKS // _BLOCK)
        self._places: dict[Key, list[int]] = {}
        self._mark: dict[Key, float] = {}  # bytes between two places
        # Cut no more than a batch can take from a partition: a backlog of years would be cut up each time.
        most = max_bytes // _LEAST_LINE + 1
        near = [OffsetSpan(span.key, span.start, min(span.end, span.start + most)) for span in spans]
        # A block ends with a whole line. With half a block added, a cut covers as many blocks as intended.
        found = cuts(near, blocks * _BLOCK + _BLOCK // 2)
        for span in spans:
            places = [span.start, *found[span.key]]
            self._places[span.key], self._mark[span.key] = places, blocks * _BLOCK
            if len(places) > 1 and places[1] - places[0] < _FEW_LINES:  # a block of long lines is larger than _BLOCK
                self._mark[span.key] = max(blocks * _BLOCK, times.bytes_of(span.key, places[0], places[1]))

    def __call__(self, key: Key, offset: int) -> float:
        places, mark = self._places[key], self._mark[key]
        at = max(1, bisect_right(places, offset)) - 1
        if at + 1 < len(places):
            return mark * (at + (offset - places[at]) / (places[at + 1] - places[at]))
        measured = places[at] - places[0]  # after the last place: assume the same density as before it
        density = mark * at / measured if measured else _LINE_BYTES
        return mark * at + density * (offset - places[at])


def at_one_time(spans: list[OffsetSpan], limit: int, weigh: Weigh, times: Times) -> Offsets:
    """Return where the ranges end at the latest recv_ts up to which they weigh at most `limit`.

    As a whole the ranges must weigh more than `limit`.
    """
    search = _Search([span for span in spans if len(span)], limit, weigh, times)
    return {span.key: span.end for span in spans} | search.run()


class _Search:
    """A search between two times: offsets before `low` are in the batch, offsets from `high` on are not."""

    def __init__(self, spans: list[OffsetSpan], limit: int, weigh: Weigh, times: Times) -> None:
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
        at = self._times.offsets_of_time([key for key, low in self._low.items() if low < self._high[key]], micros)
        return {key: min(max(at.get(key, low), low), self._high[key]) for key, low in self._low.items()}

    def _fill(self, before: Offsets, after: Offsets) -> Offsets:
        """Advance `before` by as many records as the limit permits. All records up to `after` have one recv_ts."""
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
