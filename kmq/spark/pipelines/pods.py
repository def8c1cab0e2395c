"""What pods know of themselves: their routing tables, and what drop_oldest took from their queues."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kmq.errors import ConfigError
from kmq.log import identity, topics
from kmq.routing import Table, Topic, lives, table
from kmq.spark.sink.routing import Routing
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import WAL, Options

Ranges = Mapping[str, Sequence[tuple[int, int]]]  # broker → seqs, first and last


class Pods:
    """The brokers of some options, with their routing tables."""

    def __init__(self, where: Mapping[str, str], table: str = "") -> None:
        """`table`: a data directory whose table is for all of them, in place of their own."""
        self.options = Options({**where, "subscribe": WAL})
        self.is_path = bool(self.options.paths)
        self._table = table
        if table and not os.path.isdir(f"{table}/topics"):
            raise ConfigError(f"--table {table!r}: no data directory")
        self.brokers = {name: open_broker(name, self.is_path, self.options.access) for name in self.options.brokers}

    def look(self) -> tuple[Routing, Ranges]:
        """The routing table, and what drop_oldest took from the queues: as of now."""
        ledgers = {name: broker.ledger() for name, broker in self.brokers.items()}
        dropped = {name: ledger["dropped"]["durable"] for name, ledger in ledgers.items()}
        if self._table:  # its seqs are not theirs: in force from the start
            rows = topics.listing(self._table)
            given = [(name.encode(), Topic(name, partitions, 0)) for name, partitions, _ in rows]
            return Routing({name: Table(given, _marks_from(ledger)) for name, ledger in ledgers.items()}), dropped
        return Routing({name: in_force(ledger) for name, ledger in ledgers.items()}), dropped

    def identities(self) -> dict[str, str]:
        """Broker → which data directory it has."""
        return {name: broker.identity() for name, broker in self.brokers.items()}


def in_force(ledger: Mapping[str, Any]) -> Table:
    """The table that a ledger speaks of."""
    rows = [
        (row["name"], row["partitions"], row["from_seq"]) for row in ledger["topics"] if row["from_seq"] is not None
    ]
    return table(rows, lives(each[:3] for each in ledger.get("deleted", ())), _marks_from(ledger))


def _marks_from(ledger: Mapping[str, Any]) -> int:
    return int(ledger.get("marks_from", identity.NEVER))  # a gateway before this one does not say
