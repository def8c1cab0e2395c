"""What pods know of themselves: their routing tables, and what drop_oldest removed from their queues."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kmq.errors import ConfigError
from kmq.log import identity, topics
from kmq.log.reader import WAL
from kmq.message.routing import Table, Topic, lives, table
from kmq.repair import ledger as ledgers
from kmq.spark.sink.routing import Routing
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import Options

Ranges = Mapping[str, Sequence[tuple[int, int]]]  # broker → (first, last) seqs


class Pods:
    """The brokers of some options, with their routing tables."""

    def __init__(self, where: Mapping[str, str], table: str = "") -> None:
        """`table`: a data directory whose table replaces the tables of all brokers."""
        self.options = Options({**where, "subscribe": WAL})
        self.is_path = bool(self.options.paths)
        self._table = table
        if table and not os.path.isdir(f"{table}/topics"):
            raise ConfigError(f"--table {table!r}: no data directory")
        self.brokers = {name: open_broker(name, self.is_path, self.options.access) for name in self.options.brokers}

    def look(self) -> tuple[Routing, Ranges]:
        """Return the current routing table, and what drop_oldest removed from the queues."""
        stated = {name: broker.ledger() for name, broker in self.brokers.items()}
        dropped = {name: ledger["dropped"]["durable"] for name, ledger in stated.items()}
        if self._table:  # seqs of another broker mean nothing here: all of it is in force from the start
            rows = [topics.read(self._table, name).topic(name, 0) for name in topics.names(self._table)]
            given = [(row.name.encode(), Topic(row.name, row.partitions, 0, (), (), row.partitioner)) for row in rows]
            return Routing({name: Table(given, _marks_from(ledger)) for name, ledger in stated.items()}), dropped
        return Routing({name: in_force(ledger) for name, ledger in stated.items()}), dropped

    def identities(self) -> dict[str, str]:
        """Return broker → id of its data directory."""
        return {name: broker.identity() for name, broker in self.brokers.items()}


def in_force(ledger: Mapping[str, Any]) -> Table:
    """Return the routing table in a ledger."""
    return table(ledgers.in_force(ledger), lives(each[:3] for each in ledger.get("deleted", ())), _marks_from(ledger))


def _marks_from(ledger: Mapping[str, Any]) -> int:
    return int(ledger.get("marks_from", identity.NEVER))  # an older gateway does not send it
