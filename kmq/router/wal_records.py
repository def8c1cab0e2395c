"""Reads the WAL for the queues: records to be routed, and the records of one partition.

Owner       the router process; it reads the WAL only.
Invariant   A record that dropped.log names is never returned. The ranges end where a topic came into force, grew or
            was deleted, so within a range every routing key leads to the same place.
"""

from collections.abc import Iterator
from itertools import pairwise

from kmq.log import dropped, wal
from kmq.log.dropped import SeqRange
from kmq.message import record
from kmq.message.routing import Table, Topic, resolve
from kmq.router.context import Context


class WalRecords:
    """The records of the WAL, by seqs or by partition."""

    def __init__(self, context: Context, table: Table) -> None:
        self._context, self._table = context, table

    def ranges(self, seqs: SeqRange) -> list[SeqRange]:
        """Return `seqs` without dropped ones, split where a topic came into force, grew or was deleted."""
        changing = [topic for topic in self._table.values() if topic.partitions > 1 or "." in topic.name or topic.lives]
        cuts = sorted({seq for topic in changing for seq in topic.changes()})
        wanted = []
        for first, last in dropped.without(*seqs, dropped.read(self._context.data, "durable")):
            starts = [first, *(seq for seq in cuts if first < seq <= last), last + 1]
            wanted += [SeqRange(low, high - 1) for low, high in pairwise(starts)]
        return wanted

    def of_partition(self, topic: Topic, partition: int, seqs: SeqRange) -> Iterator[bytes]:
        """Yield the records of one partition, as blocks of whole lines."""
        name = topic.name.encode()
        for first, last in self.ranges(seqs):
            for block in wal.read(self._context.data, first, last):
                self._context.check()  # even a small gap may mean reading the whole WAL, twice
                mine = []
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = resolve(self._table, record.routing_key_of(line), seq)
                    if route.topic == name and topic.partition_of(route, seq) == partition:
                        mine.append(line + b"\n")
                if mine:
                    yield b"".join(mine)
