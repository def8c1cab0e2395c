"""Checkpoints, and recovery from them at a start: what every log holds, and from which seq on the WAL is replayed.

Example: router.ckpt covers seq 900, but topics/orders/0 ends with seq 850 after a power cut. `Recovery.run(1000)` cuts
a torn last line of that log and returns 851.

Owner       the router process; recovery runs before it routes anything.
Invariant   A file that was written or made since the last checkpoint is synced by the next one, before router.ckpt
            names it. No checkpoint covers more than `routed_seq`. No checkpoint has a topic that is not made yet.
            After recovery each log is a prefix of what the WAL routes there, without what retention deleted. A record
            gets the offset it had. If records are lost for good, their offsets stay empty, and the router logs them
            (`unrecoverable`). If damage rather than a power cut may be the cause, only torn ends are cut.
Crash       router.ckpt is always one whole file, the old or the new. Recovery rebuilds the state that was in memory.
            Each of its steps may be repeated: the next checkpoint syncs the mended files. After a crash before that
            checkpoint, the next start mends them again.
"""

import os
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from kmq.config.values import MIB
from kmq.errors import CorruptError
from kmq.files import with_room
from kmq.log import checkpoint, gaps, lost_index, reader, remnant, rows, segment, wal
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.gaps import Gaps
from kmq.log.index import IndexWriter
from kmq.log.partition import PartitionLog, PartitionPlace, PartitionState, directory_of
from kmq.log.partition_recovery import MissingRange, Remains, WalRange, find_gaps, fits, recover
from kmq.log.remnant import Remnant
from kmq.log.segment import Segment
from kmq.log.topics import Since
from kmq.message import record
from kmq.message.routing import Topic, resolve
from kmq.router import tiering
from kmq.router.declarations import Declarations
from kmq.router.in_force import Context, TopicsInForce
from kmq.router.logs import PartitionLogs
from kmq.router.sorting import Sorter
from kmq.router.tiering import Tiering

# --- checkpoints -----------------------------------------------------------------------------------------------------
# When a checkpoint is due, what it has to sync, and what it says. kmq/log/checkpoint.py writes the file.

CHECKPOINT_NS = 30_000_000_000
CHECKPOINT_BYTES = 64 * MIB  # bounds what a restart has to replay, so that it is ready in a second even after a kill


class Checkpoints:
    """The router's side of router.ckpt: files to sync, and when to write the next one."""

    def __init__(self, context: Context, in_force: TopicsInForce, logs: PartitionLogs, sorter: Sorter) -> None:
        self._context, self._in_force, self._logs, self._sorter = context, in_force, logs, sorter
        # The writer's thread only waits for room: making room changes the logs, which belong to the routing thread.
        self.writer = checkpoint.Checkpointer(context.data, context.wait_outside, context.logger)
        self.dirty: list[str] = []  # files repaired or made since the last checkpoint, besides those in `logs.unsynced`
        self.remnants: list[
            Remnant
        ] = []  # copies of the ends of segments; the next checkpoint replaces the segments by them
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
        self.writer.start(content, self.dirty, list(retired), self.remnants)
        self._logs.unsynced.clear()
        self.dirty, self.remnants = [], []
        self.started_at, self._bytes_then = time.monotonic_ns(), self._sorter.routed_bytes

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is on disk. Raises RetryError if it failed."""
        self.writer.finish(self._context.check)

    def forget(self, topic: Topic) -> None:
        """Drop the files of a topic from those to sync, because they are about to be deleted."""
        directory = f"{self._context.data}/topics/{topic.name}/"
        self.dirty = [path for path in self.dirty if not path.startswith(directory)]
        self.remnants = [each for each in self.remnants if not each.segment.path.startswith(directory)]


# --- recovery --------------------------------------------------------------------------------------------------------


class CheckpointRow(namedtuple("CheckpointRow", ("topic", "number", "ckpt", "gaps", "floor"), defaults=((), None))):
    """A partition, what the checkpoint says of it (`ckpt`), and its gaps.

    `floor`: the state after its rows in the tier, below which nothing is rebuilt; None without rows.
    """

    __slots__ = ()


class Recovery:
    """Examines all logs at a start."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: PartitionLogs,
        declarations: Declarations,
        checkpoints: Checkpoints,
        tiering: Tiering,
    ) -> None:
        self._context, self._in_force, self._logs, self._tiering = context, in_force, logs, tiering
        self._declarations, self._checkpoints = declarations, checkpoints
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
        for topic in self._declarations.load(rows, since, seq):
            for number in range(topic.partitions):
                ckpt = rows.get((topic.name, number))
                floor = tiering.floor(self._tiering.load(topic, number, ckpt))
                ckpt = ckpt or floor or self._in_force.first_state(topic.name, number)
                needed = self._examine(CheckpointRow(topic, number, ckpt, floor=floor), wal_range)
                replay_from = replay_from if needed is None else min(replay_from, needed)
            self._context.check()
        routed = max((state.last_seq for state in self._logs.states.values()), default=0)
        if replay_from < begin and routed + 1 < begin:  # else the logs have the records that the WAL no longer has
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

    def _examine(self, row: CheckpointRow, wal_range: WalRange) -> int | None:
        """Find the state of one log; return the seq from which it needs a replay, or None."""
        topic, number = row.topic, row.number
        directory = directory_of(self._context.data, topic.name, number)
        # Without a checkpoint nothing says that a segment was deleted: the rows are copies of what is there.
        segments = _settle(directory, 0 if row.ckpt is row.floor else row.ckpt.start)
        if not segments and not row.ckpt.last_seq and self._may_have_cold(row, wal_range):
            raise CorruptError(
                f"{directory}: its segments and router.ckpt are lost, and its file {rows.FILE} does not say which records lie"
                " in KMQ_TIER; set KMQ_TIER and run kmq verify --repair, which writes that file again"
            )
        row = row._replace(gaps=self._gaps_of(row, segments))
        segments = _without_emptied(segments, row.gaps)
        was_there, is_changed = bool(segments), not fits(segments, row.ckpt)
        state, needed = PartitionState(*row.ckpt.values()), None
        if is_changed:
            state, needed = self._mend(row, segments, wal_range)
            segments = segment.survey(directory)
        if segments:
            state.set_segments(segments)
        state.gaps = row.gaps or state.gaps or row.ckpt.gaps
        if row.gaps and segments:
            state.start = segments[0].first
        self._logs.states[topic.name, number] = state
        if is_changed and segments:  # written by a process that was killed, so perhaps not synced
            self._logs.unsynced.add(self._logs.log_of(topic, number))
        self._restore_indexes(row, segments, [*state.sealed_ends(), state.end_offset])
        if not was_there or self._lacks_link_or_index(row, state):
            self._logs.restore(self._logs.log_of(topic, number))
        return needed

    def _may_have_cold(self, row: CheckpointRow, wal_range: WalRange) -> bool:
        """Return True if it is not known where a partition without segments goes on: after its rows, if there are some."""
        name, number = row.topic.name, row.number
        is_whole = wal_range.first <= row.topic.exists_since(number)
        return self._tiering.is_unknown(name, number) or (not is_whole and self._tiering.may_be_lost(name, number))

    def _gaps_of(self, row: CheckpointRow, segments: list[Segment]) -> Gaps:
        """Return the gaps of a log; make a lost `tier` again."""
        directory = directory_of(self._context.data, row.topic.name, row.number)
        found, is_lost = find_gaps(directory, segments, self._in_force.forks_of(row.topic.name))
        if is_lost:
            path, life = rows.path_of(directory), row.topic.from_seq
            with_room(path, self._context.wait_for_room, lambda: gaps.write(directory, life, found))
            self._context.logger.warn("gaps_restored", file=path, gaps=len(found))
        return found

    # --- a log that differs from the checkpoint ----------------------------------------------------------------------

    def _mend(
        self, row: CheckpointRow, segments: list[Segment], wal_range: WalRange
    ) -> tuple[PartitionState, int | None]:
        """Cut torn ends. Where records before a whole segment are missing, write them from the WAL.

        Return the state, and the seq from which the log needs a replay (None: no replay needed).
        """
        for part in segments:
            reader.check_place(part.path, part.first, by_seq=False)
        ckpt = row.ckpt
        # Without a checkpoint: the first records are missing because retention deleted them, or because they were lost.
        # The WAL may still have them.
        may_begin = ckpt.last_seq or not segments or wal_range.first <= row.topic.from_seq
        begin = ckpt.start if may_begin else segments[0].first
        if segments and not ckpt.last_seq:
            begin = max(begin, min(checkpoint.highest(self._starts_of(row)), segments[0].first))
            if self._tiering.is_unknown(row.topic.name, row.number):
                begin = segments[0].first
        if row.floor is not None:
            begin = max(begin, min(row.floor.end_offset, segments[0].first if segments else ckpt.end_offset))
            begin = min(begin, segments[0].first) if segments else begin
        forks = self._in_force.forks_of(row.topic.name)
        remains = recover(segments, ckpt, wal_range, begin, row.gaps, forks)
        if row.floor is not None and not segments and begin == row.floor.end_offset:
            remains.state.last_seq = row.floor.last_seq
        where = self._path_of(row, remains)
        if remains.cut:
            self._context.logger.warn("torn_tail_cut", file=where, bytes=remains.cut, last_seq=remains.state.last_seq)
        self._checkpoints.dirty += self._complete_indexes(remains.touched)
        state, needed = self._find_missing_end(row, remains, wal_range)
        for missing in remains.missing:
            self._checkpoints.dirty += self._fill(row, missing, is_end=missing.end == state.end_offset)
        if remains.missing:
            segments = segment.survey(directory_of(self._context.data, row.topic.name, row.number))
            state.start, state.size = segments[0].first, sum(part.size for part in segments)
        return state, needed

    def _path_of(self, row: CheckpointRow, remains: Remains) -> str:
        """Return the file that a warning about a log names."""
        if remains.segments:
            return remains.segments[-1].path
        directory = directory_of(self._context.data, row.topic.name, row.number)
        return f"{directory}/{segment.name(row.ckpt.start)}"

    def _complete_indexes(self, touched: list[Segment]) -> list[str]:
        """Complete the indexes of sealed segments; return the files to be synced."""
        dirty = [part.path for part in touched]
        for part in touched:
            if not lost_index.is_whole(part.path):
                continue  # `_restore_indexes` decides whether it may get an index again
            try:  # a damaged segment must not get a new crc: readers must refuse it until it is repaired
                reader.indexed_end(part.path, part.first, by_seq=False)
            except DamageError as err:
                self._context.logger.error("damaged", file=part.path, reason=err)
                self._context.damaged(err)
                continue
            IndexWriter.complete(part.path, part.first, self._context.wait_for_room, self._context.check)
            dirty.append(segment.index_path(part.path))
        return dirty

    def _find_missing_end(
        self, row: CheckpointRow, remains: Remains, wal_range: WalRange
    ) -> tuple[PartitionState, int | None]:
        """Decide how a short log gets its missing end: as one more gap, or by a replay. Return what `_mend` returns."""
        state, ckpt = remains.state, row.ckpt
        is_short = state.end_offset < ckpt.end_offset
        if not state.last_seq and not is_short:
            state.last_seq = self._last_seq_before(row, state.end_offset)
        needed = state.last_seq + 1 if state.last_seq else row.topic.from_seq
        if is_short or remains.missing:
            starts = [missing.seqs.first for missing in remains.missing]
            self._context.logger.warn(
                "queue_short",
                file=self._path_of(row, remains),
                bytes=state.size,
                expected_bytes=ckpt.size,
                rebuilt_from_seq=min([*starts, needed] if is_short else starts),
            )
        if not is_short:
            return state, None
        never_had = self._in_force.first_state(row.topic.name, row.number).end_offset
        is_after_start = remains.segments and not state.last_seq and state.end_offset > never_had
        # What lies before the first segment of a topic with tier=on is in rows, or was deleted.
        is_cold = ckpt.start > never_had and self._in_force.limits_of(row.topic.name).is_tiered
        if needed < wal_range.first or is_after_start or (is_cold and not remains.segments and not state.last_seq):
            # A replay would begin with the oldest record of the WAL, or with records deleted when the start offset was
            # moved. These would get wrong offsets. In a missing range, records are numbered back from its end.
            remains.missing += self._missing_end(row, remains, needed)
            state.end_offset, state.last_seq = ckpt.end_offset, ckpt.last_seq
            return state, None
        if not remains.segments and not state.last_seq:  # rebuild all records, also those that retention had deleted
            state = self._in_force.first_state(row.topic.name, row.number)
        return state, needed

    def _missing_end(self, row: CheckpointRow, remains: Remains, seq: int) -> Iterator[MissingRange]:
        """Yield the missing records from `seq` on, up to the end that the checkpoint knows: a range for each side of a gap."""
        ckpt, offset = row.ckpt, remains.state.end_offset
        into = remains.segments[-1] if remains.segments else None
        for fork in self._in_force.forks_of(row.topic.name):
            if offset < fork.offset <= ckpt.end_offset:
                end = next((gap.first for gap in row.gaps if gap.to == fork.offset), offset)
                if offset < end:
                    yield MissingRange(offset, end, SeqRange(seq, fork.seq - 1), into)
                offset, seq, into = fork.offset, max(seq, fork.seq), None
        yield MissingRange(offset, ckpt.end_offset, SeqRange(seq, ckpt.last_seq), into)

    def _last_seq_before(self, row: CheckpointRow, end: int) -> int:
        """Return the last seq that an empty log with end offset `end` has had; 0 if it never had a record."""
        ckpt: PartitionState = row.ckpt
        if end == ckpt.end_offset:
            return ckpt.last_seq
        before_fork = max(
            (fork.seq - 1 for fork in self._in_force.forks_of(row.topic.name) if fork.offset == end), default=0
        )
        return checkpoint.emptied_at(self._starts_of(row), end) or before_fork

    def _starts_of(self, row: CheckpointRow) -> list[checkpoint.RecordedStart]:
        return self._recorded_starts.get((row.topic.name, row.topic.from_seq, row.number), [])

    @cached_property
    def _recorded_starts(self) -> dict[tuple[str, int, int], list[checkpoint.RecordedStart]]:
        return checkpoint.recorded_starts(self._context.data)

    def _fill(self, row: CheckpointRow, missing: MissingRange, is_end: bool) -> list[str]:
        """Write missing records from the WAL; return the files to be synced.

        Report the records that the WAL no longer has.
        """

        def blocks() -> Iterator[bytes]:
            return self._logs.wal_records(row.topic, row.number, missing.seqs)

        has = sum(lines.count(b"\n") for lines in blocks())
        count = missing.end - missing.first
        lost, skip = max(0, count - has), max(0, has - count)
        if lost:
            has_from = next((record.seq_of(lines) for lines in blocks()), missing.seqs.last + 1)
            self._context.logger.error(
                "unrecoverable",
                topic=row.topic.name,
                partition=row.number,
                first_offset=missing.first,
                last_offset=missing.first + lost - 1,
                first_seq=missing.seqs.first,
                last_seq=has_from - 1,
                reason="no longer in the WAL",
            )
        if lost == count and not is_end:
            return []
        log = self._log_into(row, missing, lost)
        log.open(self._context.logger.warn, was_cut=True)
        for lines in _without_first(blocks(), skip):  # retention had deleted the first ones
            log.append(lines, lines.count(b"\n"), record.seq_of(lines), record.seq_of(wal.last_line(lines)))
        log.seal()
        log.close()
        return log.unsynced

    def _log_into(self, row: CheckpointRow, missing: MissingRange, lost: int) -> PartitionLog:
        """Return a log that writes missing records: into the segment that was cut, or a new one after the lost records."""
        begin = missing.first + lost
        state = PartitionState(begin, missing.seqs.first - 1, 0, begin)
        if missing.into is not None and not lost:
            state = PartitionState(missing.first, missing.seqs.first - 1, missing.into.size, missing.into.first)
        place = PartitionPlace(self._context.data, row.topic.name, row.number)
        limits = self._in_force.limits_of(row.topic.name)
        return PartitionLog(place, state, self._context.wait_for_room, limits)

    # --- links and indexes -------------------------------------------------------------------------------------------

    def _restore_indexes(self, row: CheckpointRow, segments: Sequence[Segment], ends: Sequence[int]) -> None:
        """Write lost or torn indexes again, because readers refuse a segment without an index. `ends`: of the segments.

        Raises DamageError if the active segment may not get an index again: the next append would write one.
        """
        context = self._context
        for number, part in enumerate(segments):
            if not part.size or lost_index.is_whole(part.path):
                continue
            is_active = number == len(segments) - 1
            try:
                self._check_index_may_be_made(row, segments, number, ends[number])
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

    def _check_index_may_be_made(self, row: CheckpointRow, segments: Sequence[Segment], number: int, end: int) -> None:
        """Raise DamageError if a segment that has lost its index may not get a new one. `end`: its end offset."""
        table, name, data = self._in_force.table, row.topic.name.encode(), self._context.data

        def contradiction(line: bytes) -> str:
            seq = record.seq_of(line)
            route = resolve(table, record.routing_key_of(line), seq)
            if route.topic != name or row.topic.partition_of(route, seq) != row.number:
                return f"its record {seq} belongs to another queue"
            return lost_index.wal_contradiction(data, line)

        lost_index.check(segments, number, False, end, contradiction, self._context.check)

    def _lacks_link_or_index(self, row: CheckpointRow, state: PartitionState) -> bool:
        active = f"topics/{row.topic.name}/{row.number}/{segment.name(state.base)}"
        try:
            if os.readlink(f"{self._context.data}/{row.topic.log_names()[row.number]}") != active:
                return True
        except OSError:
            return True
        return not os.path.exists(segment.index_path(f"{self._context.data}/{active}"))


def _settle(directory: str, start: int) -> list[Segment]:
    """Finish a deletion of segments before offset `start` that a kill interrupted; return the segments of the log."""
    # The kill may have come between the checkpoint and the removal of the segments, or before the copy got its name.
    segment.remove([part for part in segment.survey(directory) if part.first < start])
    remnant.settle(directory)
    segment.settle(directory)
    return segment.survey(directory)


def _without_emptied(segments: list[Segment], found: Gaps) -> list[Segment]:
    """Remove segments without records before a gap: a kill came between the segment after the gap and their removal."""
    tos = {gap.to for gap in found}
    gone = [part for part, after in pairwise(segments) if not part.size and after.first in tos]
    segment.remove(gone)
    return [part for part in segments if part not in gone]


def _without_first(blocks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, without the first `skip` lines."""
    for lines in blocks:
        count = lines.count(b"\n")
        if skip < count:
            yield lines if not skip else b"\n".join(lines.split(b"\n")[skip:])
        skip = max(0, skip - count)
