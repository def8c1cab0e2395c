"""All partition logs of a data directory: the interface for the router stage; their retention; segments that were laid out.

Example: `queues.route([block])` appends the lines of a block to topics/orders/0, topics/orders/1, … and returns the
bytes written. `queues.tick()`, once a second, seals and deletes segments and begins checkpoints.

Owner       the router process (lock topics/.owner).
Invariant   Every record up to `routed_seq` is in its partition log, except what dropped.log names and the records of
            deleted topics (sorting.py). The logs on disk are at least what router.ckpt says (recovery.py).
            A segment is deleted only after a checkpoint on disk no longer counts it. Retention never deletes the last
            record of a log. Moving the start offset (a `__kmq.start` record) may delete it; then router.ckpt and that
            record keep its seq.
            A compacted segment replaces only a sealed and synced segment, and covers exactly the same records.
Crash       The logs are copies, and the WAL is the truth. A start of the router examines every log, deletes segments
            that the last checkpoint no longer counts, and replays the WAL from the earliest end of a log (recovery.py).
            remnant.py describes crashes while the last record is kept. A segment that was laid out stays until it is
            installed or discarded (kmq/log/compaction.py, kmq/log/fetched.py).
Memory      A cold partition is one small object, its PartitionState. At most `most_open` logs have a descriptor.
"""

import contextlib
import os
import time
from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import partial

from kmq.files import FULL, WaitForRoom, give_up
from kmq.links.layout import Block
from kmq.log import compaction, fetched, gaps, remnant, segment, topic_changes
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.fetched import FETCHED
from kmq.log.partition import PartitionLog, PartitionState, directory_of
from kmq.log.remnant import Remnant
from kmq.log.segment import COMPACT, Limits, Segment
from kmq.logfmt import Logger
from kmq.message import record
from kmq.router.declarations import MADE_AT_ONCE, Declarations
from kmq.router.in_force import Context, TopicsInForce
from kmq.router.logs import MAX_OPEN, PartitionLogs
from kmq.router.recovery import Checkpoints, Recovery
from kmq.router.sorting import Sorter, Target
from kmq.router.tiering import Tiering
from kmq.router.topic_changes import TopicChanges

# --- retention -------------------------------------------------------------------------------------------------------

ROLL_NS = 10_000_000_000  # between two checks of idle logs against their limits
AT_ONCE = 256  # segments that are sealed or retired in one tick: some ten milliseconds
_KEY_LENGTHS = {*map(len, topic_changes.KEYS)}  # asked for each block
_FUTURE_US = 1 << 62  # a time that no age limit reaches


class _Owed(namedtuple("_Owed", ("offset", "is_postponed"), defaults=(False,))):
    """The offset with which a log is to begin. `is_postponed`: there was no room, and a warning was logged."""

    __slots__ = ()


class Retention:
    """Seals and deletes segments, by the limits of their topics or because a start offset was moved."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: PartitionLogs,
        checkpoints: Checkpoints,
        tiering: Tiering,
    ) -> None:
        self._context, self._in_force, self._logs, self._checkpoints = context, in_force, logs, checkpoints
        self._tiering = tiering
        self.rolled_at = -ROLL_NS  # when `roll_over` ran last
        self._left: list[tuple[str, int]] = []  # logs that `roll_over` has not looked at yet
        self._postponed, self._has_reported = 0, False  # logs that `roll_over` had no room to seal
        self._owed: dict[PartitionLog, _Owed] = {}  # start offsets to be moved
        self._tried_again_at = 0  # when postponed moves were tried last

    def roll_over_soon(self) -> None:
        """Make the next `roll_over_if_due` roll over."""
        self.rolled_at = -ROLL_NS

    def roll_over_if_due(self) -> None:
        """Roll over every ROLL_NS, or at each call while the disk lacks room. Call it once a second."""
        if self._left:
            self._roll_some()
        elif time.monotonic_ns() - self.rolled_at > ROLL_NS or self._context.lacks_room():
            self.roll_over()

    def roll_over(self) -> None:
        """Roll every log that is over its limits, even an idle one: AT_ONCE now, the rest in the next ticks.

        If the disk has no room, a log stays as it is.
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
        if self._postponed and not self._has_reported:
            effect = "retention waits until the roll succeeds"
            self._context.logger.warn("roll_postponed", queues=self._postponed, reason="no room", effect=effect)
        self._has_reported = bool(self._postponed)
        self.rolled_at = time.monotonic_ns() - ROLL_NS * bool(self._postponed)

    def _written_at(self, topic: str, partition: int, state: PartitionState) -> int:
        """Return when the active segment was last written, in µs. No record is younger. Cheaper than reading one."""
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
            return remnant.release_spare(self._context.data) and self._has_rolled(log)
        return True

    def retire(self) -> bool:
        """Stop counting segments that are too old or too many, at most AT_ONCE; return True if there were any.

        Begins a checkpoint. The segments are deleted once it is on disk.
        """
        # A checkpoint begun now would have copies beside their originals.
        if self._checkpoints.is_busy or self._checkpoints.remnants:
            return False
        gone: list[Segment] = []
        now_s = self._context.now_s()
        for at, state in self._logs.states.items():
            if len(gone) == AT_ONCE:
                break
            may_go = bool(state.sealed) and state.end_offset - state.start > 1
            if may_go or self._tiering.of(*at) is not None:
                limits, most = self._in_force.limits_of(at[0]), (AT_ONCE - len(gone)) * may_go
                count = self._tiering.due(at, state, limits, now_s, most)
                is_all = count == len(state.sealed) and count and not state.active_bytes
                gone += self._retire_all(state) if is_all else state.retire(count)
        gone = gone or self._retire_for_room()
        if gone:
            self._checkpoints.start(gone)
        return bool(gone)

    def _retire_for_room(self) -> list[Segment]:
        """While the disk is short of room, retire segments that KMQ_TIER has, the oldest first, before their limits."""
        gone: list[Segment] = []
        if not self._tiering.has_files or (lacking := self._context.shortage()) <= 0:
            return gone
        covered = self._tiering.covered()
        oldest = [
            (part.newest_ts(), number, at) for at, parts in covered for number, part in enumerate(parts[:AT_ONCE])
        ]
        for *_, at in sorted(oldest)[:AT_ONCE]:
            if lacking <= 0:
                break
            gone += self._logs.states[at].retire(1)
            lacking -= gone[-1].size
        if gone:
            nbytes = sum(part.size for part in gone)
            self._context.logger.info("room_from_tier", log="topics", segments=len(gone), bytes=nbytes)
            self._context.recount()
        return gone

    def _retire_all(self, state: PartitionState) -> list[Segment]:
        """Retire all segments of a log, but keep its last record, because it says where the log ends."""
        last, first = state.sealed[-1], state.sealed_ends()[-1] - 1
        copy = remnant.lay_out(self._context.data, last, first, by_seq=False) if last.first < first else None
        gone = state.retire(len(state.sealed) - (copy is None))
        if copy is not None:
            self._prepend(state, Remnant(copy))
        return gone

    def _prepend(self, state: PartitionState, copy: Remnant) -> None:
        """Make a log begin with a copy. The next checkpoint gives the copy its final name."""
        state.prepend(copy.segment)
        self._checkpoints.remnants.append(copy)
        self._checkpoints.dirty += remnant.files(copy.segment)

    # --- start offsets -----------------------------------------------------------------------------------------------

    def begin_at(self, starts: Iterable[tuple[PartitionLog, int]]) -> None:
        """Move the start of logs to these offsets, at most to their ends. A log that begins later stays as it is.

        Begins a checkpoint; once it is on disk, the files begin there. While another one is running, a tick does it.
        """
        for log, offset in starts:
            self._tiering.set_start(log.topic, log.number, min(offset, log.state.end_offset))
            owed = self._owed.get(log, _Owed(0))
            self._owed[log] = _Owed(max(owed.offset, min(offset, log.state.end_offset)))
        self.begin_owed()

    def begin_owed(self) -> bool:
        """Move the start offsets that are still to be moved; return True if that begins a checkpoint.

        A move for which there was no room is tried again every ROLL_NS.
        """
        is_again = time.monotonic_ns() - self._tried_again_at > ROLL_NS
        self._owed = {log: owed for log, owed in self._owed.items() if self._is_ahead(log, owed.offset)}
        for log, owed in self._owed.items():
            self._tiering.set_start(log.topic, log.number, owed.offset)  # the topic may have tier=on since
        due = [log for log, owed in self._owed.items() if is_again or not owed.is_postponed]
        # Sealing a log may have to wait for room. Making room begins a checkpoint of all logs. So no log may begin with
        # a copy before all logs are sealed.
        for log in due:
            if self._owed[log].offset > log.state.base:
                if not self._has_rolled(log):
                    self._postpone(log, "no room to seal the active segment")
                elif self._owed[log].offset > log.state.base:
                    self._owed[log] = _Owed(log.state.base)  # the active segment is damaged: delete those before it
        if not due or self._checkpoints.is_busy:
            return False
        if is_again:
            self._tried_again_at = time.monotonic_ns()
        gone: list[Segment] = []
        for log in due:
            before = log.state.start
            gone += self._retire_before(log, self._owed[log].offset)
            begin = log.state.start
            if begin > before:
                self._logs.unsynced.add(log)
                self._context.logger.info("start_moved", topic=log.topic, partition=log.number, offset=begin)
            if not self._owed[log].is_postponed:
                del self._owed[log]
        if gone:
            self._checkpoints.start(gone)
        return bool(gone)

    def _is_ahead(self, log: PartitionLog, offset: int) -> bool:
        """Return True if a log begins before `offset`, and its topic was not deleted."""
        return log.state.start < offset and self._logs.states.get((log.topic, log.number)) is log.state

    def _retire_before(self, log: PartitionLog, offset: int) -> list[Segment]:
        """Retire all records before `offset`, in a log that has this offset or ends there. Never waits.

        The segment with `offset` stays whole if it is damaged, or if there is no room to copy its later records.
        """
        state = log.state
        whole = sum(end <= offset for end in state.sealed_ends())
        copy = None
        if whole < len(state.sealed) and state.sealed[whole].first < offset:
            try:
                copy = remnant.lay_out_rest(state.sealed[whole], offset, self._has_room)
            except DamageError as err:
                self._context.logger.error("damaged", file=err.path, reason=err)
                self._context.damaged(err)
            except OSError as err:
                if err.errno not in FULL:
                    raise
                self._postpone(log, "no room for a copy of the rest of a segment")
        gone = state.retire(whole + (copy is not None))
        if copy is not None:
            self._prepend(state, copy)
        return gone

    def _has_room(self, nbytes: int) -> bool:
        """Return True if there is room for a copy, besides the copies that the same checkpoint completes."""
        return self._context.has_room(nbytes + sum(each.segment.size for each in self._checkpoints.remnants))

    def _postpone(self, log: PartitionLog, why: str) -> None:
        offset, is_reported = self._owed[log]
        self._owed[log] = _Owed(offset, is_postponed=True)
        if not is_reported:
            effect = "only whole segments are deleted; the rest when there is room"
            names = {"topic": log.topic, "partition": log.number, "offset": offset}
            self._context.logger.warn("start_postponed", **names, reason=why, effect=effect)

    def make_room(self) -> None:
        """Retire segments. May be called in the middle of an append or a roll."""
        unsynced = set(self._logs.unsynced)
        self.retire()
        self._logs.unsynced |= unsynced  # the append that waits for room comes after this checkpoint


# --- segments that other processes lay out ---------------------------------------------------------------------------


def install_compacted(context: Context, in_force: TopicsInForce, logs: PartitionLogs) -> bool:
    """Install the segments that compaction has written; return True if a checkpoint has to follow."""
    is_due = False
    for sealed in compaction.waiting(context.data):
        topic = in_force.table.get(sealed.topic.encode())
        is_in_force = topic is not None and sealed.partition < topic.partitions
        if topic is None or not is_in_force or in_force.limits_of(topic.name).cleanup != COMPACT:
            _discard(context, sealed, "topic.toml did not say compact when the router read it")
            continue
        log = logs.log_of(topic, sealed.partition)
        if log.unsynced:  # after a swap, sizes no longer reveal a lost write: a checkpoint must sync first
            is_due = True
            continue
        old = _covering(log.state, sealed)
        if old is None:
            _discard(context, sealed, "retained or rebuilt since")
            continue
        saved = old.size - compaction.install(context.data, sealed)
        log.state.size -= saved
        old.size -= saved
        context.logger.info("segment_compacted", file=old.path, bytes=old.size, saved=saved)
        is_due = True
    return is_due


def install_fetched(context: Context, logs: PartitionLogs, tiering: Tiering) -> bool:
    """Install old records that `kmq tier fetch` has laid out; return True if a checkpoint has to follow."""
    is_due = False
    for sealed in reversed(compaction.waiting(context.data, FETCHED)):  # the newest first: each becomes the first one
        at = sealed.topic, sealed.partition
        found, state = tiering.of(*at), logs.states.get(at)
        fits = found is not None and state is not None and sealed.first >= found.begin(state.start)
        if not fits or state is None or sealed.end != gaps.ends([state.start], state.gaps)[0]:
            reason = "the partition, or what this disk has of it, begins elsewhere now"
        elif not fetched.is_whole(context.data, sealed):
            reason = "the router was killed while it installed it"
        else:
            part = fetched.install(context.data, sealed)
            state.prepend(part)
            context.logger.info("segment_fetched", file=part.path, first_offset=part.first, bytes=part.size)
            is_due = True
            continue
        context.logger.warn("fetched_discarded", file=sealed.outbox_path(context.data, FETCHED), reason=reason)
        compaction.discard(context.data, sealed, FETCHED)
    return is_due


def _discard(context: Context, sealed: compaction.Sealed, why: str) -> None:
    context.logger.warn("compacted_discarded", file=sealed.outbox_path(context.data), reason=why)
    compaction.discard(context.data, sealed)


def _covering(state: PartitionState, sealed: compaction.Sealed) -> Segment | None:
    """Return the sealed segment with exactly these records; None if there is none."""
    spans = zip(state.sealed, state.sealed_ends(), strict=True)
    return next((part for part, end in spans if (part.first, end) == (sealed.first, sealed.end)), None)


# --- queues ----------------------------------------------------------------------------------------------------------


class Queues:
    """The partition logs, their topics and their checkpoint."""

    def __init__(
        self,
        data: str,
        wait_for_room: WaitForRoom,
        log: Logger,
        limits: Limits | None = None,
        wal_is_synced: bool = True,
        most_open: int = MAX_OPEN,
        are_recorded: bool = False,
        in_shard: bool = False,
        damaged: Callable[[DamageError], object] = lambda err: None,
        check: Callable[[], None] = lambda: None,
        lacks_room: Callable[[], bool] = lambda: False,
        has_room: Callable[[int], bool] = lambda nbytes: True,
        shortage: Callable[[], int] = lambda: 0,
        recount: Callable[[], object] = lambda: None,
        has_store: bool = True,
        now_s: Callable[[], float] = time.time,
        before_topic: "Callable[[Queues], object]" = lambda queues: None,
    ) -> None:
        """Join the parts of the router. `recover` must be called before anything is routed.

        `wal_is_synced`: False if the WAL may show records that are not on disk; then each checkpoint syncs the WAL
        first, because it must never be ahead of the WAL. `most_open`: maximum of open logs. `are_recorded`: changes of
        topics are records of the WAL; False (no framer): requests are carried out at once. `in_shard`: a declaration
        without a record is refused, because other replicas would not have it. `damaged` is called with each damage
        found, `check` repeatedly during long work, as a sign of life. `lacks_room`: is the disk or the quota full?
        `has_room`: may a copy of so many bytes be made? `shortage`: bytes to be freed before messages are refused;
        `recount` is called after a deletion. `has_store`: False without KMQ_TIER; then local limits delete nothing.
        `now_s`: the clock for ages. After the start, `before_topic` is called before a message makes a topic; it may
        wait, and make room meanwhile.
        """
        of_stage = (
            wait_for_room,
            log,
            wal_is_synced,
            are_recorded,
            in_shard,
            damaged,
            check,
            lacks_room,
            has_room,
            now_s,
        )
        context = self.context = Context(data, *of_stage, self.make_room, shortage, recount, has_store)
        self._is_recovered, self._before_topic = False, before_topic
        routes: dict[bytes, Target] = {}
        in_force = self.in_force = TopicsInForce(context, limits or Limits(), routes.clear)
        logs = self.logs = PartitionLogs(context, in_force, most_open)
        self.declarations = Declarations(context, in_force, logs, self._wait_before_topic)
        self.sorter = Sorter(context, in_force, logs, self.declarations, routes)
        self.checkpoints = Checkpoints(context, in_force, logs, self.sorter)
        self.tiering = Tiering(context, in_force, logs.states)
        self.retention = Retention(context, in_force, logs, self.checkpoints, self.tiering)
        retention = self.retention.roll_over, self.retention.begin_at
        self.changes = TopicChanges(
            context, in_force, logs, self.declarations, self.sorter, self.checkpoints, self.tiering, *retention
        )

    @property
    def routed_seq(self) -> int:
        """Return the seq up to which every record is in its log."""
        return self.sorter.routed_seq

    def recover(self, high: int) -> None:
        """Complete every log from the WAL, up to the durable seq `high`."""
        self.changes.finish_deletions()
        parts = self.in_force, self.logs, self.declarations, self.checkpoints
        recovery = Recovery(self.context, *parts, self.tiering)
        replay_from = recovery.run(high)
        self.changes.recovered(recovery.checkpoint_seq)
        self.sorter.sorted_seq = replay_from - 1
        self.replay(replay_from, high)
        self.settle()  # a start that was moved has begun a checkpoint, and an empty segment that it syncs may go
        self.logs.skip_forks()
        self.adopt_declarations()
        self._is_recovered = True
        self.changes.begin_recorded()

    def route(self, blocks: list[Block]) -> int:
        """Append consecutive blocks, all after sorted_seq, to their partition logs; return the bytes written.

        Lines whose topic has to be made may wait for later calls of this method or of `make_topics`.
        """
        written, begin = 0, 0
        for at, block in enumerate(blocks):
            if _is_change(block):  # after the lines before it, and before the lines after it
                written += self._route(blocks[begin:at]) + self.sorter.make_topics()
                self.changes.apply(bytes(block.data))
                written += self._route([block])
                begin = at + 1
        written += self._route(blocks[begin:])
        if self.checkpoints.is_due_by_bytes and not self.checkpoints.is_busy:
            self.checkpoints.start()  # at once: to wait for the tick would add 160 MB to what a restart has to replay
        return written

    def _route(self, blocks: list[Block]) -> int:
        if not blocks:
            return 0
        return self.sorter.route(blocks) + self.sorter.make_topics(
            None if self.sorter.newcomers.is_too_much else MADE_AT_ONCE
        )

    def make_topics(self, most: int | None = None) -> int:
        """Make the topics that messages have named, all or the `most` oldest; return the bytes of their lines."""
        return self.sorter.make_topics(most)

    def replay(self, first: int, last: int) -> None:
        """Route the records first…last from the WAL, without dropped ones; each log skips what it has."""
        self.sorter.replay(SeqRange(first, last), self.changes.apply)

    def adopt_declarations(self) -> None:
        """Carry out the requests and adopt the declarations that were made since the last call."""
        self.changes.carry_out()

    def tick(self) -> None:
        """Do the periodic work: index lines, declarations, sealing, retention, checkpoints; call once a second."""
        self.logs.note_open_blocks()
        self.logs.check_names()
        if self.context.are_recorded and self.context.lacks_room():
            self.changes.set_early()
        self.adopt_declarations()
        self.tiering.install()
        self.retention.roll_over_if_due()
        if not self.checkpoints.is_busy:
            installed = install_compacted(self.context, self.in_force, self.logs)
            installed |= install_fetched(self.context, self.logs, self.tiering)
            is_begun = self.retention.begin_owed() or self.retention.retire()
            if not is_begun and (installed or self.checkpoints.is_due):
                self.checkpoints.start()

    def use_limits(self, limits: Limits) -> None:
        """Use other limits for every topic without limits of its own, and act on them in the next `tick`."""
        self.in_force.set_default_limits(limits)
        self.retention.roll_over_soon()

    def make_room(self) -> None:
        """Delete what retention may delete. May be called in the middle of any other method."""
        if not self._is_recovered:  # retention must not delete anything before all logs are known
            remnant.release_spare(self.context.data)
            return
        self.retention.make_room()
        while self.changes.sweep():
            self.context.check()

    def _wait_before_topic(self) -> None:
        if self._is_recovered:
            self._before_topic(self)

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        self.checkpoints.finish()

    def close(self) -> None:
        """Route the waiting lines, write a checkpoint of everything, and close all logs."""
        self.make_topics()
        self.settle()  # so that the tick moves the start offsets that wait for a checkpoint
        self.tick()
        self.settle()
        if self.logs.unsynced:
            self.checkpoints.start()
            self.settle()
        self.logs.close()


def _is_change(block: Block) -> bool:
    """Return True if a block is the record of a change of a topic. Each such record is a block of its own."""
    is_key = block.count == 1 and block.key_length in _KEY_LENGTHS
    return is_key and record.routing_key_of(bytes(block.data)) in topic_changes.KEYS
