"""Decides when a checkpoint is due, what it has to sync, and what it says. kmq/log/checkpoint.py writes the file.

Owner       the router process.
Invariant   A file that was written or made since the last checkpoint is synced by the next one, before router.ckpt
            names it. No checkpoint covers more than `routed_seq`, and none has a topic that is not made yet.
Crash       router.ckpt is the old or the new one, whole. Recovery finds again what was in memory here.
"""

import os
import time
from collections.abc import Sequence

from kmq.config.values import MIB
from kmq.log import checkpoint
from kmq.log.segment import Segment
from kmq.message.routing import Topic
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs
from kmq.router.sorting import Sorter

CHECKPOINT_NS = 30_000_000_000
CHECKPOINT_BYTES = 64 * MIB  # bounds what a restart has to replay, so that it is ready in a second even after a kill


class Checkpoints:
    """The router's side of router.ckpt: files to sync, and when to write the next one."""

    def __init__(self, context: Context, in_force: TopicsInForce, logs: Logs, sorter: Sorter) -> None:
        self._context, self._in_force, self._logs, self._sorter = context, in_force, logs, sorter
        # The writer's thread only waits for room: making room changes the logs, which belong to the routing thread.
        self.writer = checkpoint.Checkpointer(context.data, context.wait_outside, context.logger)
        self.dirty: list[str] = []  # files repaired or made since the last checkpoint, besides those in `logs.unsynced`
        self.kept: list[Segment] = []  # last records that outlive their segments with the next checkpoint
        self.started_at = time.monotonic_ns()
        self._bytes_then = 0

    @property
    def is_busy(self) -> bool:
        """Return True while a checkpoint is written or waits for room. Raises RetryError if the last one failed."""
        return self.writer.busy

    @property
    def is_due_by_bytes(self) -> bool:
        return self._sorter.routed_bytes - self._bytes_then > CHECKPOINT_BYTES

    @property
    def is_due(self) -> bool:
        """Return True if something was written, and a checkpoint is due by time or by bytes."""
        is_time = time.monotonic_ns() - self.started_at > CHECKPOINT_NS
        return bool(self._logs.unsynced) and (is_time or self.is_due_by_bytes)

    def start(self, retired: Sequence[Segment] = ()) -> None:
        """Begin to write a checkpoint; the segments `retired` are deleted once it is on disk."""
        for log in self._logs.unsynced:
            self.dirty += log.take_unsynced()
        if not self._context.wal_is_synced:
            self.dirty.append(os.path.realpath(f"{self._context.data}/append.log"))
        made = (topic for name, topic in self._in_force.table.items() if name not in self._sorter.newcomers)
        content = checkpoint.text(self._sorter.routed_seq, self._logs.states, made)
        self.writer.start(content, self.dirty, list(retired), self.kept)
        self._logs.unsynced.clear()
        self.dirty, self.kept = [], []
        self.started_at, self._bytes_then = time.monotonic_ns(), self._sorter.routed_bytes

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is on disk. Raises RetryError if it failed."""
        self.writer.finish()

    def forget(self, topic: Topic) -> None:
        """Drop the files of a topic from those to sync, because they are about to be deleted."""
        directory = f"{self._context.data}/topics/{topic.name}/"
        self.dirty = [path for path in self.dirty if not path.startswith(directory)]
        self.kept = [segment for segment in self.kept if not segment.path.startswith(directory)]
