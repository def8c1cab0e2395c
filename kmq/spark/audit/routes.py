"""Finds the queues where records belong, by the routing table in force at their seqs."""

from collections import defaultdict

import numpy as np

from kmq.message.routing import DELETED, Topic, resolve
from kmq.spark.audit.findings import Place
from kmq.spark.audit.snapshot import Snapshot
from kmq.spark.source.columns import Block, Numbers

_MAX_KEYS = 1 << 18  # routing keys remembered


class Routes:
    """Numbers the queues (`places[number]`), and finds for each record the number of its queue."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.places: list[Place] = []
        self._numbers: dict[Place, int] = {}
        self._table = snapshot.table()
        changing = [topic for topic in self._table.values() if "." in topic.name or topic.lives or topic.grown]
        changes = {seq for topic in changing for seq in topic.changes()}
        self._epochs = np.array(sorted(changes | {snapshot.marks_from}), np.int64)
        self._memo: defaultdict[int, dict[bytes, tuple[int, int, int]]] = defaultdict(dict)
        for topic in snapshot.topics:
            self._number(topic.name, topic.partitions)
        for name, partition in snapshot.queues:
            self._number(name, partition + 1)
        self.deleted = self._number("(deleted)", 1) if snapshot.deleted else -1

    def number_of(self, place: Place) -> int:
        return self._numbers[place]

    def _number(self, topic: str, partitions: int) -> int:
        """Return the number of a topic's first partition; the others follow it."""
        if (topic, partitions - 1) not in self._numbers:
            base = len(self.places)
            self.places += [(topic, number) for number in range(partitions)]
            self._numbers |= {(topic, number): base + number for number in range(partitions)}
        return self._numbers[topic, 0]

    def targets(self, block: Block, seqs: Numbers) -> Numbers:
        """Return for each record the number of the queue where it belongs. Each key is looked up once per block."""
        coded = block.field(2).dictionary_encode()
        keys, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy()
        epochs = np.searchsorted(self._epochs, seqs, "right")
        targets = np.empty(len(seqs), np.int64)
        for epoch in np.unique(epochs).tolist() if len(self._epochs) else [0]:
            found = np.array([self._target(key, epoch) for key in keys], np.int64).reshape(-1, 3)
            chosen = epochs == epoch
            first, partitions, run = found[codes[chosen]].T
            targets[chosen] = first + seqs[chosen] // run % partitions
        return targets

    def _target(self, key: bytes, epoch: int) -> tuple[int, int, int]:
        """Return (target, 1, 1), or (first target, partitions, run) if the seq decides on the partition.

        `epoch`: how many changes of the table precede the seq.
        """
        memo = self._memo[epoch]
        if key in memo:
            return memo[key]
        seq = int(self._epochs[epoch - 1]) if epoch else 0
        route = resolve(self._table, key, seq)
        topic = self._table.get(route.topic) or Topic(route.topic.decode(errors="replace"), 1, 0)
        base = self.deleted if route.topic == DELETED else self._number(topic.name, topic.partitions)
        partitions, run = topic.partitions_at(seq), topic.partitioner.run
        found = (base, partitions, run) if route.is_spread else (base + topic.partition_of(route, seq), 1, 1)
        if len(memo) >= _MAX_KEYS:
            memo.clear()
        memo[key] = found
        return found
