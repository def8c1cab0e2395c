"""Installs the segments that compaction has laid out (kmq/log/compaction.py), for topics that declare compaction.

Owner       the router process, as the owner of topics/.
Invariant   A segment is replaced only while it is sealed and synced, and only by one that covers exactly its records.
Crash       See kmq/log/compaction.py: a segment that is laid out stays until it is installed or discarded.
"""

from itertools import pairwise

from kmq.log import compaction
from kmq.log.partition import State
from kmq.log.segment import COMPACT, Segment
from kmq.message.routing import Topic
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs


class Compacted:
    """The installer of compacted segments."""

    def __init__(self, context: Context, in_force: TopicsInForce, logs: Logs) -> None:
        self._context, self._in_force, self._logs = context, in_force, logs

    def install(self) -> bool:
        """Install the segments that are laid out; return True if a checkpoint has to follow."""
        is_due = False
        for sealed in compaction.waiting(self._context.data):
            topic = self._topic_of(sealed)
            if topic is None:
                self._discard(sealed, "topic.toml did not say compact when the router read it")
                continue
            log = self._logs.log_of(topic, sealed.partition)
            if log.unsynced:  # after a swap, sizes no longer reveal a lost write: a checkpoint must sync first
                is_due = True
                continue
            old = _covering(log.state, sealed)
            if old is None:
                self._discard(sealed, "retained or rebuilt since")
                continue
            saved = old.size - compaction.install(self._context.data, sealed)
            log.state.size -= saved
            old.size -= saved
            self._context.logger.info("segment_compacted", file=old.path, bytes=old.size, saved=saved)
            is_due = True
        return is_due

    def _topic_of(self, sealed: compaction.Sealed) -> Topic | None:
        """Return the topic of a segment; None if it is not in force or not compacted."""
        topic = self._in_force.table.get(sealed.topic.encode())
        if topic is None or sealed.partition >= topic.partitions:
            return None
        return topic if self._in_force.limits_of(topic.name).cleanup == COMPACT else None

    def _discard(self, sealed: compaction.Sealed, why: str) -> None:
        self._context.logger.warn("compacted_discarded", file=sealed.place(self._context.data), reason=why)
        compaction.discard(self._context.data, sealed)


def _covering(state: State, sealed: compaction.Sealed) -> Segment | None:
    """Return the sealed segment with exactly these records; None if there is none."""
    ends = [*(segment.first for segment in state.sealed), state.base]
    spans = zip(state.sealed, pairwise(ends), strict=True)
    return next((segment for segment, span in spans if span == (sealed.first, sealed.end)), None)
