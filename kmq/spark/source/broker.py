"""What a reader needs of a broker's logs, however it reads them: brokers.py has the two ways.

An implementation keeps no state that matters: each call reads again, on the driver or in a task.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kmq.log import segment_reader

if TYPE_CHECKING:  # blocks.py needs numpy, which `kmq pipeline status` must work without
    from kmq.spark.source.blocks import Lines

BLOCK_BYTES = segment_reader.READ_BYTES  # size of the blocks handed out


class Layout(NamedTuple):
    """How keys lead to the partitions of a topic."""

    partitions: int
    partitioner: str


class Broker(Protocol):
    """One broker's logs: the partitions of its topics, and as topic `__append`, partition 0, its WAL (offset = seq)."""

    name: str  # as the user spells it

    def identity(self) -> str:
        """Return the id of the data directory: another directory at the same place has another id."""
        ...

    def marks_from(self) -> int:
        """Return the first seq whose routing key may have a mark (kmq/log/identity.py)."""
        ...

    def topics(self) -> dict[str, Layout]:
        """Return how keys lead to partitions in each topic, without the WAL."""
        ...

    def bounds(self, topics: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return (topic, partition) → (first offset, next offset to be given). Missing topics are left out."""
        ...

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        """Return the offset of the first record received then (µs since the epoch) or later; without one, the end."""
        ...

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        """Return the offset of the first record with this seq or a later one; without one, the end."""
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
