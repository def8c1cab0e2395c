"""What a reader needs of a broker: the partitions of its topics, and its WAL.

    broker.bounds(["orders"])  → {("orders", 0): (first offset, next offset), …}

Three implement it: a data directory and a gateway (brokers.py), and a lineage in a store (store.py). They keep only caches:
each call reads again, on the driver or in a task.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kmq.log.gaps import Gaps

if TYPE_CHECKING:
    from kmq.spark.source.columns import Lines

LogBounds = dict[tuple[str, int], tuple[int, int]]  # (topic, partition) → first offset, next offset to be assigned


class Layout(NamedTuple):
    """How keys map to the partitions of a topic."""

    partitions: int
    partitioner: str
    is_compacted: bool = False


class Broker(Protocol):
    """One broker's logs: the partitions of its topics, and as topic `__append`, partition 0, its WAL (offset = seq)."""

    name: str  # as the user spells it
    gaps: dict[tuple[str, int], Gaps]  # of the partitions, at the last look at their bounds (kmq/log/gaps.py)

    def ancestors(self) -> list[str]:
        """Return the ids that the data directory had before it was forked."""
        ...

    def identity(self) -> str:
        """Return the id of the data directory: another directory at the same place has another id."""
        ...

    def marks_from(self) -> int:
        """Return the first seq whose routing key may have a mark (kmq/log/identity.py)."""
        ...

    def topics(self) -> dict[str, Layout]:
        """Return how keys map to partitions in each topic, without the WAL."""
        ...

    def bounds(self, topics: Sequence[str]) -> LogBounds:
        """Return (topic, partition) → (first offset, next offset to be assigned). Missing topics are left out."""
        ...

    def survey(self, topics: Sequence[str], wants: Callable[[str], bool]) -> tuple[str, Callable[[], LogBounds]]:
        """Return `identity`, and a function that returns `bounds` of these topics; if empty, of all that `wants`
        accepts.
        """
        ...

    def stamp_at_end(self, topic: str, partition: int, offset: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts in µs) of the record before `offset`, if `offset` was the end at the last look at the
        bounds.
        """
        ...

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        """Return the offset of the first record received then (µs since the epoch) or later; without one, the end."""
        ...

    def offsets_of_time(self, logs: Sequence[tuple[str, int]], micros: int) -> dict[tuple[str, int], int]:
        """Return the offset of that time in each of several partitions."""
        return {log: self.offset_of_time(*log, micros) for log in logs}

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        """Return the offset of the first record with this seq or a higher one; without one, the end."""
        ...

    def ledger(self) -> dict[str, Any]:
        """Return the broker's own accounts beside its logs: see kmq.repair.ledger.read."""
        ...

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        """Return ascending offsets that cut the records from `start` to `end` into ranges of about `nbytes`."""
        ...

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        """Yield the whole stored lines of the offsets start…end-1, in order, checked, in blocks.

        A bare newline is a compacted record. The blocks begin later if retention has removed the start, and end early
        if the log does: callers check the offsets. Raises DamageError at bytes that must not be served.
        """
        ...

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the same blocks as (offset of the first line, lines)."""
        return ((lines.offset, lines.data) for lines in self.blocks(topic, partition, start, end))
