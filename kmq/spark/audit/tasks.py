"""Cuts an audit into tasks: ranges of the WAL's seqs, each with the offsets of every queue that belong to them.

Invariant   The offsets of each queue are always covered exactly once, whatever the queue holds: cuts never go back.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from kmq.log.damage import DamageError
from kmq.spark.audit.findings import THE_WAL, OffsetRange, Place
from kmq.spark.audit.snapshot import Snapshot
from kmq.spark.source.broker import Broker
from kmq.spark.source.cutting import SPLIT_BYTES

_MAX_LOOKUPS = 20_000  # of a seq in a queue; with very many queues the tasks are larger


class Task(NamedTuple):
    """WAL seqs low…high-1, and the offsets of the queues that belong to them."""

    low: int
    high: int
    queues: dict[Place, OffsetRange]


class OlderTask(NamedTuple):
    """Queue records that are older than the WAL."""

    place: Place
    offsets: OffsetRange


def plan(broker: Broker, taken: Snapshot, nbytes: int = SPLIT_BYTES) -> list[Task | OlderTask]:
    """Return tasks of about `nbytes` of the WAL, with their parts of all queues; then tasks for older queue records."""
    first, end = taken.wal
    try:
        cuts = broker.cuts(*THE_WAL, first, end, nbytes)
    except DamageError:  # in an index; the reader will report it
        cuts = []
    step = 1 + len(cuts) * len(taken.queues) // _MAX_LOOKUPS
    starts = {place: offsets[0] for place, offsets in taken.queues.items()}
    older: list[Task | OlderTask] = []
    if first > 1:
        oldest = _offsets(broker, taken, first, starts) or starts
        older = [
            OlderTask(place, offsets)
            for place, start in starts.items()
            for offsets in _blocks(broker, place, (start, oldest[place]), nbytes)
        ]
        starts = oldest
    tasks: list[Task | OlderTask] = []
    low = first
    for cut in cuts[step - 1 :: step]:
        ends = _offsets(broker, taken, cut, starts)
        if ends is not None:  # else damage hides the offsets, and the task extends to the next cut
            tasks.append(Task(low, cut, {place: (starts[place], ends[place]) for place in starts}))
            low, starts = cut, ends
    rest = {place: (start, taken.queues[place][1]) for place, start in starts.items()}
    if low == end:  # the WAL is empty
        return [*(OlderTask(place, offsets) for place, offsets in rest.items()), *older]
    return [*tasks, Task(low, end, rest), *older]


def _offsets(broker: Broker, taken: Snapshot, seq: int, least: dict[Place, int]) -> dict[Place, int] | None:
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


def _blocks(broker: Broker, place: Place, offsets: OffsetRange, nbytes: int) -> Iterator[OffsetRange]:
    start, end = offsets
    try:
        cuts = broker.cuts(*place, start, end, nbytes) if end > start else []
    except DamageError:
        cuts = []
    edges = [start, *cuts, end]
    yield from ((low, high) for low, high in pairwise(edges) if low < high)
