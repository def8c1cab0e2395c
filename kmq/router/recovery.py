"""Recovery at a start: what every log holds, and from which seq on the WAL has to be replayed.

Owner       the router process, before it routes anything.
Invariant   After `run` each log is a prefix of what the WAL routes there, without what retention deleted. The replay
            begins at the earliest end of a log. Records that the WAL no longer has are reported, never made up.
Crash       Every step may be repeated. The next checkpoint syncs a log that was mended. After a crash before that, the
            next start mends it again.
"""

import os
from collections.abc import Sequence

from kmq.errors import CorruptError
from kmq.log import checkpoint, lost_index, remnant, segment, wal
from kmq.log.damage import DamageError
from kmq.log.growth import Since
from kmq.log.partition import State, directory_of
from kmq.log.partition_recovery import WalRange, fits
from kmq.log.segment import Segment
from kmq.router.checkpoints import Checkpoints
from kmq.router.context import Context
from kmq.router.declarations import Declarations
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs
from kmq.router.mending import Mender, Row


class Recovery:
    """Examines all logs at a start."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: Logs,
        declarations: Declarations,
        checkpoints: Checkpoints,
        mender: Mender,
    ) -> None:
        self._context, self._in_force, self._logs = context, in_force, logs
        self._declarations, self._checkpoints, self._mender = declarations, checkpoints, mender
        self.checkpoint_seq = 0  # what the checkpoint covers; 0: there is none

    def run(self, high: int) -> int:
        """Examine every log; return the seq from which to replay the WAL. `high`: the last durable seq."""
        data, logger = self._context.data, self._context.logger
        seq, rows, since = self._load_checkpoint()
        self.checkpoint_seq = seq
        if seq > high:
            raise CorruptError(
                f"{data}/router.ckpt has routed up to seq {seq}, but the ring durable has shown up to {high} only:"
                " the WAL was cut, or the ring is older than the WAL; remove the ring while the broker is down"
            )
        begin = wal.first_seq(data)
        wal_range = WalRange(begin, high, has_rest=begin <= seq + 1)
        replay_from = seq + 1
        for topic in self._declarations.load(rows, since):
            for number in range(topic.partitions):
                known = rows.get((topic.name, number)) or self._in_force.first_state(topic.name, number)
                needed = self._examine(Row(topic, number, known), wal_range)
                replay_from = replay_from if needed is None else min(replay_from, needed)
            self._context.check()
        routed = max((state.last_seq for state in self._logs.states.values()), default=0)
        if replay_from < begin and routed + 1 < begin:  # else the queues have the records that the WAL no longer has
            logger.error("unrecoverable", first_seq=replay_from, last_seq=begin - 1, reason="no longer in the WAL")
        replay_from = max(replay_from, begin)
        if replay_from <= high:
            logger.info("replay", from_seq=replay_from, to_seq=high)
        return replay_from

    def _load_checkpoint(self) -> tuple[int, checkpoint.Rows, dict[str, Since]]:
        try:
            return checkpoint.load(self._context.data)
        except (ValueError, LookupError) as err:
            effect = "the whole WAL is replayed"
            self._context.logger.warn("checkpoint_unreadable", reason=err, effect=effect)
            return 0, {}, {}

    def _examine(self, row: Row, wal_range: WalRange) -> int | None:
        """Find the state of one log; return the seq from which it needs a replay, or None."""
        topic, number = row.topic, row.number
        directory = directory_of(self._context.data, topic.name, number)
        segments = _settle(directory, row.known)
        was_there, is_changed = bool(segments), not fits(segments, row.known)
        state, needed = State(*row.known.values()), None
        if is_changed:
            mended = self._mender.mend(row, segments, wal_range)
            state, needed = mended.state, mended.needed
            self._checkpoints.dirty += mended.dirty
            segments = segment.survey(directory)
        if segments:
            state.set_segments(segments)
        self._logs.states[topic.name, number] = state
        if is_changed and segments:  # a process that was killed wrote it, and it may not be synced
            self._logs.unsynced.add(self._logs.log_of(topic, number))
        self._restore_indexes(row, segments, state.end_offset)
        if not was_there or self._lacks_link_or_index(row, state):
            self._logs.restore(self._logs.log_of(topic, number))
        return needed

    def _lacks_link_or_index(self, row: Row, state: State) -> bool:
        active = f"topics/{row.topic.name}/{row.number}/{segment.name(state.base)}"
        try:
            if os.readlink(f"{self._context.data}/{row.topic.log_names()[row.number]}") != active:
                return True
        except OSError:
            return True
        return not os.path.exists(segment.index_path(f"{self._context.data}/{active}"))

    def _restore_indexes(self, row: Row, segments: Sequence[Segment], end: int) -> None:
        """Write the indexes again that are lost or torn: no reader believes a segment without.

        Raises DamageError if the active segment may not get one: an append would give it one.
        """
        context, ends = self._context, [*(part.first for part in segments[1:]), end]
        for number, part in enumerate(segments):
            if not part.size or lost_index.is_whole(part.path):
                continue
            is_active = number == len(segments) - 1
            try:
                self._mender.may_have_index(row, segments, number, ends[number])
                if is_active:
                    log = self._logs.log_of(row.topic, row.number)
                    self._logs.restore(log)
                    self._logs.unsynced.add(log)
                else:
                    self._checkpoints.dirty.append(lost_index.write(part, False, context.wait_for_room, context.check))
            except DamageError as err:
                if is_active:
                    raise
                context.logger.error("damaged", file=part.path, reason=err)
                context.damaged(err)
                continue
            context.logger.warn("index_restored", file=segment.index_path(part.path))


def _settle(directory: str, known: State) -> list[Segment]:
    """Finish a retention that a kill interrupted, and return the segments of the log."""
    segments = segment.survey(directory)
    retired = [part for part in segments if part.first < known.start]
    if retired:  # the kill came after the checkpoint and before their removal
        segment.remove(retired)
        segments = segments[len(retired) :]
    if segments and known.start == segments[0].first - 1 and remnant.settle(directory, known.start):
        segments = segment.survey(directory)  # the kill came after their removal
    segment.settle(directory)
    return segments
