"""Where the record with a seq is: its topic, partition and offset. Reads files, so call it in a thread.

Cost        O(log n) reads of the WAL and of one partition. The table of topics is read again when a record is not found
            by it, at most once in _TABLE_S.
Invariant   A place is returned only if the record there has that seq, so an old table of topics gives no wrong place.
Not covered Records that the WAL no longer has: only an audit of all partitions could find them.
"""

import time
from typing import NamedTuple

from kmq.broker.stats import StatsPage
from kmq.log import reader, topics
from kmq.log.segment import SEQ, within
from kmq.message import record, routing
from kmq.message.routing import Table, Topic

_TABLE_S = 1.0


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int


class Locator:
    """The records of a data directory by seq."""

    def __init__(self, data: str, page: StatsPage) -> None:
        self._data = data
        self._numbered, self._durable, self._routed = (page.rows[name] for name in ("framer", "durability", "router"))
        self._newest = 0  # the highest seq seen: a stage that starts again shows 0 until it has recovered
        self._topics = -_TABLE_S, Table()  # when they were read last

    def is_numbered(self, seq: int) -> bool:
        """Return True if a record has been given this seq."""
        newest = max(self._newest, self._numbered.seq, self._durable.seq, self._routed.seq)
        if seq > newest:
            newest = max(newest, reader.wal(self._data).end_offset() - 1)
        self._newest = newest
        return 0 < seq <= newest

    def is_routed(self, seq: int) -> bool:
        """Return True if the router has passed this seq."""
        return self._routed.seq >= seq

    def find(self, seq: int) -> Place | None:
        """Return the place of a routed record; None if it is not in the WAL or not in its partition (any more).

        Raises DamageError if the files are damaged there.
        """
        wal = reader.wal(self._data)
        if seq < wal.first_offset:
            return None
        line = within(wal.read(seq, 1)[1], seq, seq)
        if not line:
            return None
        while True:
            read_at, table = self._topics
            found = self._find(table, record.routing_key_of(line), seq)
            if found or time.monotonic() - read_at < _TABLE_S:
                return found
            self._topics = time.monotonic(), topics.table(self._data)

    def _find(self, table: Table, routing_key: bytes, seq: int) -> Place | None:
        route = routing.resolve(table, routing_key, seq)
        if route.topic == routing.DELETED:
            return None
        name = route.topic.decode()
        partition = (table.get(route.topic) or Topic(name, 1, 0)).partition_of(route, seq)
        found = reader.partition(self._data, name, partition).find(seq, SEQ)
        return Place(name, partition, found.offset) if found and record.seq_of(found.line) == seq else None
