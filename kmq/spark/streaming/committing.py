"""Commits the offsets of queries with option groupId where the source cannot: after the last batch, and before a long wait.

The source itself commits a batch when Spark asks for the next one (kmq/spark/source/group.py). That is never after
`query.stop()` and Trigger.Once, and an hour late with a trigger of an hour. So the listener commits what is idle for
IDLE_S, and what has ended.

Invariant   Only ends of batches that Spark has reported as finished are committed. Nothing here fails or delays a query.
Memory      The end of the last batch of each running query with a groupId.
Not covered Programs that end before Spark reports the end of their query. The next start commits from the checkpoint.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kmq.spark.source.group import GroupOffsets
from kmq.spark.source.options import Options
from kmq.spark.streaming.lag import positions

IDLE_S = 1.0  # without another batch: then the source does not commit soon
_RELATION = "StreamingDataSourceV2ScanRelation"


class Committer:
    """Commits for one run of a query. `execution`: the JVM's StreamExecution."""

    def __init__(self, execution: Any) -> None:
        self._execution = execution
        self._groups: list[GroupOffsets | None] | None = None  # of each source; None: not looked at yet
        self._ends: list[Any] = []  # of each source, of the last batch
        self._timer: threading.Timer | None = None
        self._turn = threading.Lock()

    def finished(self, sources: list[Mapping[str, Any]]) -> None:
        """Note that a batch has finished. `sources`: of the query's progress."""
        if self._groups is None:
            self._groups = groups_of(self._execution)
        if not any(self._groups) or len(self._groups) != len(sources):
            return
        self._ends = [source.get("endOffset") for source in sources]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(IDLE_S, self._commit)
        self._timer.daemon = True
        self._timer.start()

    def ended(self) -> None:
        """Commit the last batch; takes a few seconds at most."""
        if self._timer is not None:
            self._timer.cancel()
            self._commit(is_last=True)

    def _commit(self, is_last: bool = False) -> None:
        with self._turn:
            for group, end in zip(self._groups or (), self._ends, strict=True):
                if group is not None:
                    group.commit(positions(end), is_last)


def groups_of(execution: Any) -> list[GroupOffsets | None]:
    """Return the group of each source of a query, in the order of its progress; None for a source without one."""
    leaves = execution.logicalPlan().collectLeaves()
    found: dict[int, GroupOffsets | None] = {}
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if not leaf.isStreaming():
            continue
        if leaf.getClass().getSimpleName() != _RELATION:
            return []  # a source of Spark's first interface: its place in the order is not known
        stream = leaf.stream().hashCode()  # a source that is read twice is two leaves and one stream
        if stream not in found:
            found[stream] = _group_of(dict(leaf.relation().options().asCaseSensitiveMap()))
    return list(found.values())


def _group_of(given: Mapping[str, str]) -> GroupOffsets | None:
    if "groupid" not in map(str.lower, given):
        return None
    with suppress(Exception):  # another source's option of this name
        options = Options(given)
        return GroupOffsets(options.group_id, options.servers, options.access, is_second=True)
    return None
