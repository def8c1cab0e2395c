"""What the comparisons of one task share: the logs as they are read, the targets of records, and counts of arrivals.

Checked     The broker's reader compares the crc of every block with the index; damage and malformed lines become
            evidence. The records in damage, and those that a damaged index hides, are not audited further, and are
            counted as such.
Limit       A block of the WAL that begins with a seq out of order misleads lookups: it is found, but reported as a gap.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kmq.log import dropped
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.message.routing import DELETED, Topic, resolve
from kmq.spark.audit.findings import (
    THE_WAL,
    DamagedBytes,
    Evidence,
    EvidenceRow,
    OffsetRange,
    SeqRange,
    TopicPartition,
)
from kmq.spark.audit.snapshot import AuditTask, BrokerSnapshot
from kmq.spark.source.broker import Broker
from kmq.spark.source.columns import Block, Lines, Numbers, of_bytes

# --- reading ---------------------------------------------------------------------------------------------------------


class UnreadableOffsets(NamedTuple):
    """Offsets first…end-1 that cannot be read."""

    first: int
    end: int


class AuditReader:
    """Reads the logs of a broker, and adds errors in their bytes to the evidence."""

    def __init__(self, broker: Broker, evidence: Evidence) -> None:
        self.broker, self._evidence = broker, evidence
        self.malformed: defaultdict[TopicPartition, list[int]] = defaultdict(list)  # offsets

    def read(
        self, place: TopicPartition, offsets: OffsetRange, is_second: bool = False
    ) -> Iterator[Block | UnreadableOffsets]:
        """Yield blocks in order, and UnreadableOffsets for damage. Resume after the damage if its end is known.

        `is_second`: the bytes are read again, and their errors are in the evidence already.
        """
        at, end = offsets
        resumed = at
        while at < end:
            led_back = False
            try:
                for lines in self.broker.blocks(*place, at, end):
                    block = self._block(place, lines, is_second)
                    if place != THE_WAL:
                        at = lines.next_offset
                    elif block.count:
                        seqs = block.offsets()
                        led_back = at != resumed and int(seqs[0]) < at
                        if led_back:
                            break  # a seq out of order at the end of the last read misled the lookup; do not repeat it
                        at = max(at, int(seqs.max()) + 1)
                    yield block
            except DamageError as err:
                after = err.next_offset if err.next_offset > at else end
                if not is_second:
                    self._evidence.add(EvidenceRow.of_damage(place, DamagedBytes.of(err)))
                yield UnreadableOffsets(at, after)
                at = after
            else:
                if not led_back:
                    return
            resumed = at

    def _block(self, place: TopicPartition, lines: Lines, is_second: bool) -> Block:
        """Return lines as a block without malformed ones. A crc proves only that the bytes are as they were written."""
        topic, is_wal = place[0], place[0] == WAL
        try:
            block = Block(lines, topic, is_wal)
            if not block.count or _is_sound(block):
                return block
        except (IndexError, pa.ArrowInvalid):
            pass
        found = []
        for number, line in enumerate(lines.data.split(b"\n")[:-1]):
            is_good = not line or record.parse_stored(line) is not None
            found.append(line if is_good else b"")
            if not is_good and not is_second:
                offset = -1 if is_wal else lines.offset + number
                self.malformed[place].append(offset)
                self._evidence.add(EvidenceRow.of_malformed(place, offset, line))
        return Block(of_bytes(lines.offset, b"\n".join([*found, b""]), False), topic, is_wal)


def _is_sound(block: Block) -> bool:
    """Return True if each line has its five bars and begins with a number."""
    begins, ends = block.starts, block.ends
    return bool((begins[1] > begins[0]).all() and (begins[5] <= ends[5]).all() and len(block.seqs))


# --- routes ----------------------------------------------------------------------------------------------------------

_MAX_KEYS = 1 << 18  # routing keys remembered


class Routes:
    """Numbers the queues (`places[number]`), and finds the queue of each record by the routing table at its seq."""

    def __init__(self, snapshot: BrokerSnapshot) -> None:
        self.places: list[TopicPartition] = []
        self._numbers: dict[TopicPartition, int] = {}
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

    def number_of(self, place: TopicPartition) -> int:
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
        targets: Numbers = np.zeros(len(seqs), np.int64)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            firsts, partitions, runs = np.array([self._target(key, epoch) for key in keys], np.int64).T
            found = firsts[codes]
            if (partitions > 1).any():
                found += seqs // runs[codes] % partitions[codes]
            targets = np.where(epochs == epoch, found, targets)
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


# --- seqs ------------------------------------------------------------------------------------------------------------


class SeqRanges:
    """Ranges of seqs, sorted, and merged where they touch."""

    def __init__(self, ranges: Iterable[SeqRange]) -> None:
        joined: list[list[int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last])
        self.ranges = [dropped.SeqRange(first, last) for first, last in joined]
        self._firsts = np.array([first for first, _ in joined], np.int64)
        self._lasts = np.array([last for _, last in joined], np.int64)

    def hold(self, seqs: Numbers) -> Numbers:
        """Return for each seq whether it lies in one of the ranges."""
        if not self.ranges:
            return np.zeros(len(seqs), bool)
        at = np.searchsorted(self._firsts, seqs, "right") - 1
        held: Numbers = (at >= 0) & (seqs <= self._lasts[at])
        return held


def target_of_seq(seqs: Numbers, targets: Numbers) -> Callable[[Numbers], Numbers]:
    """Return a function of seqs that returns the target of each; -1 for seqs without a target."""
    order = np.argsort(seqs, kind="stable")
    ordered, target = seqs[order], targets[order]

    def find(wanted: Numbers) -> Numbers:
        found = np.full(len(wanted), -1, np.int64)
        if len(ordered):
            at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            same = ordered[at] == wanted
            found[same] = target[at[same]]
        return found

    return find


def is_first_time(seqs: Numbers) -> Numbers:
    """Return for each seq whether it occurs for the first time."""
    first_time = np.zeros(len(seqs), bool)
    first_time[np.unique(seqs, return_index=True)[1]] = True
    return first_time


def concatenated(parts: Iterable[Numbers]) -> Numbers:
    """Return all parts as one array, which is empty without parts."""
    return np.concatenate([np.empty(0, np.int64), *parts])


# --- arrivals --------------------------------------------------------------------------------------------------------

TopicTime = tuple[str, int]  # µs since the epoch, rounded down to a bucket


class Arrivals:
    """Count the records and bytes that the WAL received so far, by topic and moment."""

    def __init__(self, bucket: int) -> None:
        """`bucket`: µs of one moment."""
        self._bucket = bucket
        self._counts: Counter[TopicTime] = Counter()
        self._sizes: Counter[TopicTime] = Counter()

    def add(self, block: Block, times: Numbers, targets: Numbers, places: list[TopicPartition]) -> None:
        """Count the records of a block. `times`: when each was received; `targets`: index of its queue in `places`."""
        lengths = block.ends[-1] + 1 - block.starts[0]
        moments = times // self._bucket
        cuts = [0, *(np.flatnonzero(np.diff(moments)) + 1).tolist(), block.count]
        for low, high in pairwise(cuts):
            number = np.bincount(targets[low:high])
            nbytes = np.bincount(targets[low:high], lengths[low:high])
            for target in np.flatnonzero(number).tolist():
                key = places[target][0], int(moments[low]) * self._bucket
                self._counts[key] += int(number[target])
                self._sizes[key] += int(nbytes[target])

    def rows(self) -> Iterator[EvidenceRow]:
        for (topic, time), count in self._counts.items():
            yield EvidenceRow("records", topic, records=count, nbytes=self._sizes[topic, time], time=time)


# --- comparison ------------------------------------------------------------------------------------------------------


class Comparison:
    """The comparison of one task: the WAL's seqs low…high-1 with the offsets of all queues that belong to them."""

    def __init__(self, broker: Broker, snapshot: BrokerSnapshot, task: AuditTask, evidence: Evidence) -> None:
        self.snapshot, self.task, self.evidence = snapshot, task, evidence
        self.low, self.high = task.low, task.high  # `low` grows if retention removes records during the audit
        self.reader = AuditReader(broker, evidence)
        self.routes = Routes(snapshot)
        self.dropped = SeqRanges(snapshot.dropped["durable"])
        self.unreadable: list[SeqRange] = []  # of the WAL

    def is_inside(self, seqs: Numbers) -> Numbers:
        """Return for each seq whether the task covers it."""
        inside: Numbers = (seqs >= self.low) & (seqs < self.high)
        return inside
