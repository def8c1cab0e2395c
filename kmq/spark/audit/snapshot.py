"""Takes the snapshot of a broker that an audit compares, and cuts the audit into tasks.

Order       The router's routed seq, the ends of the queues, the end of the WAL, the routing table, dropped.log. In this
            order every record of a queue is in the part of the WAL that is compared. Records of the WAL above the
            routed seq and beyond the end of their queue were not routed yet: they become a note, not a finding.
Invariant   A task is a range of the WAL's seqs with the offsets of every queue that belong to them. The offsets of each
            queue are always covered exactly once, whatever the queue holds: cuts never go back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kmq.log import identity
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps
from kmq.log.reader import WAL
from kmq.message import record
from kmq.message.routing import Table, Topic, lives, table
from kmq.repair import ledger as ledgers
from kmq.spark.audit.findings import THE_WAL, DamagedBytes, OffsetRange, SeqRange, TopicPartition
from kmq.spark.connections import Access
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import SPLIT_BYTES

BUCKETS = (100_000, 1_000_000, 10_000_000, 60_000_000, 600_000_000, 3_600_000_000)  # µs; each divides an hour
_MOMENTS, _MAX_MOMENTS = 240, 50_000  # about the points in a plot over time; points of all topics together


class BrokerSnapshot(NamedTuple):
    """A broker at one moment, with the topics that are in force."""

    routed: int
    queues: dict[TopicPartition, OffsetRange]
    wal: OffsetRange
    topics: list[Topic]
    compacted: list[str]
    dropped: dict[str, list[SeqRange]]  # by ring
    hidden: dict[str, DamagedBytes]  # topics whose queues' ends are hidden by damage
    marks_from: int = 0  # the first seq whose routing key may have a mark
    deleted: Sequence[tuple[str, int, int]] = ()  # deleted topics: name, from_seq, last_seq
    wal_gaps: Gaps = ()  # of seqs that a fork left out, and no record ever had (kmq/log/gaps.py)

    def table(self) -> Table:
        """Return the routing table."""
        return table(self.topics, lives(self.deleted), self.marks_from)


def take(broker: Broker) -> BrokerSnapshot:
    """Return the broker as it is now."""
    routed = broker.ledger()["routed_seq"]
    queues, hidden = _queues(broker, list(broker.topics()))
    wal = broker.bounds([WAL])[THE_WAL]
    ledger = broker.ledger()
    names = {row["name"] for row in ledger["topics"]}
    return BrokerSnapshot(
        routed=routed,
        queues={place: ends for place, ends in queues.items() if place[0] in names},  # others were deleted since
        wal=wal,
        topics=ledgers.in_force(ledger),
        compacted=[row["name"] for row in ledger["topics"] if row["cleanup"] == "compact"],
        dropped=ledger["dropped"],
        hidden=hidden,
        marks_from=ledger.get("marks_from", identity.NEVER),  # an older gateway does not send it
        wal_gaps=broker.gaps.get(THE_WAL, ()),
        deleted=[(name, from_seq, last_seq) for name, from_seq, last_seq, _ in ledger.get("deleted", ())],
    )


def _queues(broker: Broker, names: list[str]) -> tuple[dict[TopicPartition, OffsetRange], dict[str, DamagedBytes]]:
    """Return (the bounds of the queues, the topics whose bounds are hidden by damage)."""
    try:
        return broker.bounds(names), {}
    except DamageError as err:
        if len(names) == 1:
            return {}, {names[0]: DamagedBytes.of(err)}
    half = len(names) // 2
    one, other = _queues(broker, names[:half]), _queues(broker, names[half:])
    return one[0] | other[0], one[1] | other[1]


class AuditSource(NamedTuple):
    """A broker to audit, with its snapshot. Pickled, so that tasks can open the broker."""

    name: str
    is_path: bool
    access: Access
    tier: str
    snapshot: BrokerSnapshot
    bucket: int  # µs

    def open(self) -> Broker:
        return open_broker(self.name, self.is_path, self.access, tier=self.tier)


def sources(where: dict[str, str]) -> list[AuditSource]:
    """Return the brokers that the options `where` name (path, or kmq.bootstrap.servers and kmq.token)."""
    options = ReadOptions(where | {"subscribe": WAL})
    opened = []
    for name in options.brokers:
        broker = open_broker(name, bool(options.paths), options.access, tier=options.tier)
        taken = take(broker)
        bucket = _bucket(broker, taken)
        opened.append(AuditSource(name, bool(options.paths), options.access, options.tier, taken, bucket))
    return opened


def _bucket(broker: Broker, taken: BrokerSnapshot) -> int:
    """Return the µs of one point in a plot over time: for about 240 points, fewer with very many topics."""
    first, end = taken.wal
    stamps = []
    with contextlib.suppress(DamageError):
        for seq in (first, end - 1):
            for _, lines in broker.read(*THE_WAL, seq, end):
                stamps.append(record.stamp(lines)[1])
                break
    duration = max(stamps) - min(stamps) if stamps else 0
    points = min(_MOMENTS, _MAX_MOMENTS // (len(taken.topics) + 1))
    return next((bucket for bucket in BUCKETS if duration // bucket <= points), BUCKETS[-1])


# --- tasks -----------------------------------------------------------------------------------------------------------

_MAX_LOOKUPS = 20_000  # of a seq in a queue; with very many queues the tasks are larger


class AuditTask(NamedTuple):
    """WAL seqs low…high-1, and the offsets of the queues that belong to them."""

    low: int
    high: int
    queues: dict[TopicPartition, OffsetRange]


class OlderTask(NamedTuple):
    """Queue records that are older than the WAL."""

    place: TopicPartition
    offsets: OffsetRange


def plan(broker: Broker, taken: BrokerSnapshot, nbytes: int = SPLIT_BYTES) -> list[AuditTask | OlderTask]:
    """Return tasks of about `nbytes` of the WAL, with their parts of all queues; then tasks for older queue records."""
    first, end = taken.wal
    try:
        cuts = broker.cuts(*THE_WAL, first, end, nbytes)
    except DamageError:  # in an index; the reader will report it
        cuts = []
    step = 1 + len(cuts) * len(taken.queues) // _MAX_LOOKUPS
    starts = {place: offsets[0] for place, offsets in taken.queues.items()}
    older: list[AuditTask | OlderTask] = []
    if first > 1:
        oldest = _offsets(broker, taken, first, starts) or starts
        older = [
            OlderTask(place, offsets)
            for place, start in starts.items()
            for offsets in _blocks(broker, place, (start, oldest[place]), nbytes)
        ]
        starts = oldest
    tasks: list[AuditTask | OlderTask] = []
    low = first
    for cut in cuts[step - 1 :: step]:
        ends = _offsets(broker, taken, cut, starts)
        if ends is not None:  # else damage hides the offsets, and the task extends to the next cut
            tasks.append(AuditTask(low, cut, {place: (starts[place], ends[place]) for place in starts}))
            low, starts = cut, ends
    rest = {place: (start, taken.queues[place][1]) for place, start in starts.items()}
    if low == end:  # the WAL is empty
        return [*(OlderTask(place, offsets) for place, offsets in rest.items()), *older]
    return [*tasks, AuditTask(low, end, rest), *older]


def _offsets(
    broker: Broker, taken: BrokerSnapshot, seq: int, least: dict[TopicPartition, int]
) -> dict[TopicPartition, int] | None:
    """Return the offset where each queue reaches `seq`, never below `least`; None if damage hides one."""
    found = {}
    for place, (_, end) in taken.queues.items():
        if least[place] == end:
            found[place] = end
            continue
        try:
            found[place] = min(max(broker.offset_of_seq(*place, seq), least[place]), end)
        except DamageError:
            return None
    return found


def _blocks(broker: Broker, place: TopicPartition, offsets: OffsetRange, nbytes: int) -> Iterator[OffsetRange]:
    start, end = offsets
    try:
        cuts = broker.cuts(*place, start, end, nbytes) if end > start else []
    except DamageError:
        cuts = []
    edges = [start, *cuts, end]
    yield from ((low, high) for low, high in pairwise(edges) if low < high)
