"""Retention of the queues: sealing logs that are over their limits, and deleting their oldest segments.

Owner       the router process.
Invariant   A segment is deleted only after a checkpoint on disk no longer counts it. The last record of a log always
            stays.
Crash       Between that checkpoint and the deletion, the next start deletes (recovery.py). For the last record see
            remnant.py.
"""

import contextlib
import os
import time
from functools import partial

from kmq.log import remnant, segment, spare
from kmq.log.damage import DamageError
from kmq.log.disk import FULL, give_up
from kmq.log.partition import PartitionLog, State, directory_of
from kmq.log.segment import Segment
from kmq.router.checkpoints import Checkpoints
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs

ROLL_NS = 10_000_000_000  # between two looks whether an idle log is over its limits
_FUTURE_US = 1 << 62  # a time that no limit by age reaches


class Retention:
    """See the module."""

    def __init__(self, context: Context, in_force: TopicsInForce, logs: Logs, checkpoints: Checkpoints) -> None:
        self._context, self._in_force, self._logs, self._checkpoints = context, in_force, logs, checkpoints
        self.rolled_at = -ROLL_NS  # when `roll_over` looked last
        self._postponed = 0  # logs that it had no room to seal then

    def roll_over_if_due(self) -> None:
        if time.monotonic_ns() - self.rolled_at > ROLL_NS:
            self.roll_over()

    def roll_over(self) -> None:
        """Seal every log that is over its limits now, also an idle one. A log without room for that stays as it is."""
        now_s, postponed = self._context.now_s(), 0
        for (name, partition), state in self._logs.states.items():
            if state.end_offset - state.base < 2:  # retention could take nothing of one record alone
                continue
            limits = self._in_force.limits_of(name)
            if limits.is_over(state.active_bytes, partial(self._written_at, name, partition, state), now_s):
                self._context.check()
                topic = self._in_force.table[name.encode()]
                postponed += not self._has_rolled(self._logs.log_of(topic, partition))
        if postponed and not self._postponed:
            effect = "retention waits; tried again"
            self._context.logger.warn("roll_postponed", queues=postponed, reason="no room", effect=effect)
        self._postponed = postponed
        self.rolled_at = time.monotonic_ns() - ROLL_NS * bool(postponed)

    def _written_at(self, topic: str, partition: int, state: State) -> int:
        """When the active segment was last written, in µs: no record in it is younger. Cheaper than reading it."""
        path = f"{directory_of(self._context.data, topic, partition)}/{segment.name(state.base)}"
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_mtime_ns // 1000
        return _FUTURE_US

    def _has_rolled(self, log: PartitionLog) -> bool:
        """Seal the active segment of a log; False where there is no room for that now."""
        try:
            self._logs.use(log)
            self._logs.unsynced.add(log)
            log.roll(give_up)
        except DamageError as err:  # it stays until it has been repaired, or somebody writes to it
            self._context.logger.error("damaged", file=log.path, reason=err)
        except OSError as err:
            if err.errno not in FULL:
                raise
            return spare.release(self._context.data) and self._has_rolled(log)
        return True

    def retire(self) -> bool:
        """Stop counting the segments that are too old or too many. They are deleted when the checkpoint is written.

        Returns True where that has begun.
        """
        if self._checkpoints.is_busy:
            return False
        gone: list[Segment] = []
        now_s = self._context.now_s()
        for (name, _), state in self._logs.states.items():
            if state.sealed and state.end_offset - state.start > 1:
                count = self._in_force.limits_of(name).expired(state.sealed, state.active_bytes, now_s)
                is_all = count == len(state.sealed) and not state.active_bytes
                gone += self._retire_all(state) if is_all else state.retire(count)
        if gone:
            self._checkpoints.start(gone)
        return bool(gone)

    def _retire_all(self, state: State) -> list[Segment]:
        """As `retire`, where nothing would be left: the last record stays, because it says where the log ends."""
        last, first = state.sealed[-1], state.end_offset - 1
        kept = remnant.lay_out(self._context.data, last, first, by_seq=False) if last.first < first else None
        gone = state.retire(len(state.sealed) - (kept is None))
        if kept is not None:
            state.keep(kept)
            self._checkpoints.kept.append(kept)
            self._checkpoints.dirty += remnant.files(kept)
        return gone

    def make_room(self) -> None:
        """`retire`, in the middle of anything."""
        unsynced = set(self._logs.unsynced)
        self.retire()
        self._logs.unsynced |= unsynced  # what waits for the room has not been written yet
