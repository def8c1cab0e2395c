"""What a reader needs of a broker's logs, whichever way it reads them: brokers.py has the ways.

An implementation keeps no state that matters: each call looks anew, on the driver or in a task.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kmq.log import segment_reader

if TYPE_CHECKING:  # blocks.py needs numpy, which `kmq pipeline status` must work without
    from kmq.spark.source.blocks import Lines

BLOCK_BYTES = segment_reader.READ_BYTES  # of lines handed out at once


class Broker(Protocol):
    """One broker's logs: the partitions of its topics, and as topic `__append`, partition 0, its WAL (offset = seq)."""

    name: str  # as the user names it

    def identity(self) -> str:
        """Which data directory this is: another one at the same place has another identity."""
        ...

    def marks_from(self) -> int:
        """The first seq whose routing key may have a mark (kmq/log/identity.py)."""
        ...

    def topics(self) -> dict[str, int]:
        """Topics and how many partitions each has; without the WAL."""
        ...

    def bounds(self, topics: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic, partition) → (first offset there is, offset that comes next). Topics that do not exist are left out."""
        ...

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        """Offset of the first record received then (µs since the epoch) or later; the end where there is none."""
        ...

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        """Offset of the first record with this seq or a later one; the end where there is none."""
        ...

    def ledger(self) -> dict[str, Any]:
        """What it says of itself beside its logs: see kmq.repair.ledger.read."""
        ...

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        """Ascending offsets between `start` and `end` that cut what lies there into pieces of about `nbytes`."""
        ...

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        """The whole stored lines of the offsets start…end-1, in order, checked, in blocks.

        A bare newline is a record that compaction took away. Begins later where retention took the start, and ends early where
        the log does: whoever asks looks at the offsets. Raises DamageError at what must not be served.
        """
        ...

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The same as (offset of the first line, lines)."""
        return ((lines.offset, lines.data) for lines in self.blocks(topic, partition, start, end))
