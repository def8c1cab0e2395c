"""Retention of the queues: seals segments of logs that are over their limits, and deletes their oldest segments.

Owner       the router process.
Invariant   A segment is deleted only after a checkpoint on disk no longer counts it. The last record of a log always
            stays.
Crash       After a crash between that checkpoint and the deletion, the next start deletes (recovery.py). remnant.py has
            the crashes while the last record is kept.
"""

import contextlib
import os
import time
from functools import partial

from kmq.files import FULL, give_up
from kmq.log import remnant, segment, spare
from kmq.log.damage import DamageError
from kmq.log.partition import PartitionLog, State, directory_of
from kmq.log.segment import Segment
from kmq.router.checkpoints import Checkpoints
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs

ROLL_NS = 10_000_000_000  # between two checks of idle logs against their limits
AT_ONCE = 256  # segments that are sealed or retired in one tick: some ten milliseconds
_FUTURE_US = 1 << 62  # a time that no age limit reaches


class Retention:
    """Seals and deletes segments."""

    def __init__(self, context: Context, in_force: TopicsInForce, logs: Logs, checkpoints: Checkpoints) -> None:
        self._context, self._in_force, self._logs, self._checkpoints = context, in_force, logs, checkpoints
        self.rolled_at = -ROLL_NS  # when `roll_over` ran last
        self._left: list[tuple[str, int]] = []  # logs that `roll_over` has not looked at yet
        self._postponed, self._told_postponed = 0, False  # logs that `roll_over` had no room to seal

    def roll_over_soon(self) -> None:
        """Let the next `roll_over_if_due` do it."""
        self.rolled_at = -ROLL_NS

    def roll_over_if_due(self) -> None:
        """Call it once a second. While there is no room it rolls over each time."""
        if self._left:
            self._roll_some()
        elif time.monotonic_ns() - self.rolled_at > ROLL_NS or self._context.lacks_room():
            self.roll_over()

    def roll_over(self) -> None:
        """Roll every log that is over its limits, even an idle one: AT_ONCE now, the rest in the next ticks.

        Without room on the disk a log stays as it is.
        """
        self._left, self._postponed = list(reversed(self._logs.states)), 0
        self._roll_some()

    def _roll_some(self) -> None:
        now_s, lacks_room, rolled = self._context.now_s(), self._context.lacks_room(), 0
        while self._left and rolled < AT_ONCE:
            name, partition = at = self._left.pop()
            state = self._logs.states.get(at)
            # a roll would free nothing, because the last record of a log always stays
            if state is None or state.end_offset - state.base < 2:
                continue
            limits = self._in_force.limits_of(name)
            written_at = partial(self._written_at, name, partition, state)
            if limits.is_over(state.active_bytes, written_at, now_s, lacks_room):
                self._context.check()
                topic = self._in_force.table[name.encode()]
                self._postponed += not self._has_rolled(self._logs.log_of(topic, partition))
                rolled += 1
        if self._left:
            return
        if self._postponed and not self._told_postponed:
            effect = "retention waits until the roll succeeds"
            self._context.logger.warn("roll_postponed", queues=self._postponed, reason="no room", effect=effect)
        self._told_postponed = bool(self._postponed)
        self.rolled_at = time.monotonic_ns() - ROLL_NS * bool(self._postponed)

    def _written_at(self, topic: str, partition: int, state: State) -> int:
        """Return when the active segment was last written, in µs: no record is younger. Cheaper than a read."""
        path = f"{directory_of(self._context.data, topic, partition)}/{segment.name(state.base)}"
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_mtime_ns // 1000
        return _FUTURE_US

    def _has_rolled(self, log: PartitionLog) -> bool:
        """Roll a log; return False if the disk has no room for that now."""
        try:
            self._logs.use(log)
            self._logs.unsynced.add(log)
            log.roll(give_up)
        except DamageError as err:  # the segment stays until it is repaired
            self._context.logger.error("damaged", file=log.path, reason=err)
            self._context.damaged(err)
        except OSError as err:
            if err.errno not in FULL:
                raise
            return spare.release(self._context.data) and self._has_rolled(log)
        return True

    def retire(self) -> bool:
        """Stop counting segments that are too old or too many, AT_ONCE at most; return True if there were any.

        Begins a checkpoint, after which they are deleted.
        """
        if self._checkpoints.is_busy:
            return False
        gone: list[Segment] = []
        now_s = self._context.now_s()
        for (name, _), state in self._logs.states.items():
            if len(gone) == AT_ONCE:
                break
            if state.sealed and state.end_offset - state.start > 1:
                limits, most = self._in_force.limits_of(name), AT_ONCE - len(gone)
                count = limits.expired(state.sealed, state.active_bytes, now_s, most)
                is_all = count == len(state.sealed) and not state.active_bytes
                gone += self._retire_all(state) if is_all else state.retire(count)
        if gone:
            self._checkpoints.start(gone)
        return bool(gone)

    def _retire_all(self, state: State) -> list[Segment]:
        """Retire all segments of a log, but keep its last record, because it says where the log ends."""
        last, first = state.sealed[-1], state.end_offset - 1
        kept = remnant.lay_out(self._context.data, last, first, by_seq=False) if last.first < first else None
        gone = state.retire(len(state.sealed) - (kept is None))
        if kept is not None:
            state.keep(kept)
            self._checkpoints.kept.append(kept)
            self._checkpoints.dirty += remnant.files(kept)
        return gone

    def make_room(self) -> None:
        """Retire segments. May be called in the middle of an append or a roll."""
        unsynced = set(self._logs.unsynced)
        self.retire()
        self._logs.unsynced |= unsynced  # the append that waits for room comes after this checkpoint
