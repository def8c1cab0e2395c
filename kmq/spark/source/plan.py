"""What a stream has read and what a query reads next: offsets, ranges of offsets, and tasks. Plain values only.

Key       (broker, topic, partition)
Offsets   {key: the next offset to read}
Stamp     (seq, recv_ts in microseconds) of a record; a record keeps it forever, and no other record has it
Position  how far a stream has read, and how the batch that ends there was cut. Spark keeps it in its checkpoint as
          JSON:

    {"pods/0/data": {"__id": "0f…", "__format": "2",
                     "orders": {"0": 1500, "1": 20},
                     "__last": {"orders": {"0": "4711 1700000000.000123"}},
                     "__cuts": {"orders": {"0": "1200 1400"}},
                     "__from": {"orders": {"1": "10"}}}}

by broker   The name is as the query spells it. __id is the data id, and decides: the same directory resumes under
            another name, and another directory under the same name is refused.
__format    2. Without it the JSON is of format 1, which had __id and the offsets only; it stays readable forever.
offsets     by topic and partition, the only numbers in the JSON: their sum tells how far the stream is.
__last      seq and recv_ts of the last record before the offset, where there is one. kmq/spark/source/lineage.py
            compares it.
__cuts      where the batch that ends here is cut into tasks, so that a replay has the same tasks, in the order of this
            JSON.
__from      where the batch begins in a new partition, which has no offset in the batch's start. The first batch has it
            for all partitions, because its start is not in the checkpoint.

Invariant   `partitions` of a batch depends only on its two offsets, never on options, cores, retention or compaction.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kmq.errors import ConfigError, KmqError
from kmq.log.reader import WAL
from kmq.message import record

Key = tuple[str, str, int]
Offsets = dict[Key, int]
Bounds = dict[Key, tuple[int, int]]  # the first offset that exists, the next offset to be given
Cuts = Callable[[Key, int, int, int], list[int]]  # key, start, end, bytes → where to cut
Stamp = tuple[int, int]

IDENTITY, FORMAT, LAST, CUTS, FROM = "__id", "__format", "__last", "__cuts", "__from"
_NOT_TOPICS = (IDENTITY, FORMAT, LAST, CUTS, FROM)
VERSION = "2"
_SKIP = "failOnDataLoss=false continues without them"


class DataLossError(KmqError):
    """Records that were to be read no longer exist."""

    def __init__(self, key: Key, what: str, advice: str = _SKIP) -> None:
        super().__init__(f"{name_of(key)}: {what}; {advice}")


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


# --- JSON -----------------------------------------------------------------------------------------------------------


@dataclass
class Position:
    """See the module. `offsets` has the order of the tasks of a batch that ends here."""

    offsets: Offsets
    identities: dict[str, str]
    last: dict[Key, Stamp] = field(default_factory=dict)
    cuts: dict[Key, list[int]] | None = None  # None: format 1, which has no cuts
    begins: Offsets = field(default_factory=dict)

    @staticmethod
    def of_json(table: dict[str, Any]) -> "Position":
        for broker, topics in table.items():
            if topics.get(FORMAT, VERSION) != VERSION:
                raise ConfigError(
                    f"{broker}: the checkpoint is of a newer version of kmq (format {topics[FORMAT]} of offsets,"
                    f" this one reads up to {VERSION}); upgrade kmq where this query runs"
                )
        offsets, identities = from_json(table)
        if not all(FORMAT in topics for topics in table.values()):
            return Position(dict(sorted(offsets.items())), identities)
        cuts = {key: [int(at) for at in text.split()] for key, text in _texts(table, CUTS)}
        begins = {key: int(text) for key, text in _texts(table, FROM)}
        return Position(offsets, identities, {key: _stamp(text) for key, text in _texts(table, LAST)}, cuts, begins)

    def to_json(self) -> dict[str, Any]:
        table = to_json(self.offsets, {broker: self.identities[broker] for broker in sorted(self.identities)})
        for topics in table.values():
            topics[FORMAT] = VERSION
        for name, texts in (
            (LAST, {key: f"{seq} {record.format_ts(micros).decode()}" for key, (seq, micros) in self.last.items()}),
            (CUTS, {key: " ".join(map(str, at)) for key, at in (self.cuts or {}).items() if at}),
            (FROM, {key: str(at) for key, at in self.begins.items()}),
        ):
            for (broker, topic, partition), text in sorted(texts.items()):
                table[broker].setdefault(name, {}).setdefault(topic, {})[str(partition)] = text
        return table

    def renamed(self, names: Mapping[str, str]) -> "Position":
        """Return the position with other names of brokers, in the same order."""

        def moved(table: dict[Key, Any]) -> dict[Key, Any]:
            return {(names[broker], topic, partition): value for (broker, topic, partition), value in table.items()}

        identities = {names[broker]: identity for broker, identity in self.identities.items()}
        cuts = None if self.cuts is None else moved(self.cuts)
        return Position(moved(self.offsets), identities, moved(self.last), cuts, moved(self.begins))


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


# --- ranges ---------------------------------------------------------------------------------------------------------


def least(topic: str) -> int:
    """Return the first offset that a partition ever had."""
    return 1 if topic == WAL else 0


def wanted(start: Offsets, end: Offsets) -> list[Range]:
    """Return the ranges between two offsets, in the order of `end`, whether or not the records exist."""
    # A new partition begins with its first record.
    spans = [Range(key, start.get(key, least(key[1])), stop) for key, stop in end.items()]
    return [span for span in spans if len(span)]


def lost(span: Range, bounds: Bounds) -> str:
    """Describe which records of a range do not exist; "" if all do."""
    begin, stop = span.start, span.end
    if span.key not in bounds:
        return f"offsets {begin} to {stop - 1} are gone with their partition"
    first, limit = bounds[span.key]
    if first > begin:
        why = f"retention, or their topic was deleted; the log begins with {first}"
        return f"offsets {begin} to {min(first, stop) - 1} are gone: {why}"
    return f"offsets {limit} to {stop - 1} are gone: the log ends before {limit}" if limit < stop else ""


def check_there(spans: Iterable[Range], bounds: Bounds) -> None:
    """Raise DataLossError if a record of the ranges does not exist."""
    for span in spans:
        if what := lost(span, bounds):
            raise DataLossError(span.key, what)


def within(span: Range, bounds: Bounds) -> Range:
    """Return the part of a range that exists, which may be empty."""
    first, limit = bounds.get(span.key, (span.end, span.end))
    start = min(max(span.start, first), span.end)
    return Range(span.key, start, max(start, min(span.end, limit)))


def ranges(start: Offsets, end: Offsets, bounds: Bounds, fail_on_data_loss: bool) -> list[Range]:
    """Return the ranges to read, in order of keys. With `fail_on_data_loss`, raise DataLossError if some are lost."""
    spans = wanted(start, dict(sorted(end.items())))
    if fail_on_data_loss:
        check_there(spans, bounds)
    return [part for span in spans if len(part := within(span, bounds))]


def cut_up(span: Range, at: Iterable[int]) -> list[Range]:
    """Return the range cut at those of the offsets that lie in it."""
    edges = [span.start, *(edge for edge in at if span.start < edge < span.end), span.end]
    return [Range(span.key, low, high) for low, high in pairwise(edges)]
