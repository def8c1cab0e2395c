"""Carries out changes of topics: declarations, limits, growth, new start offsets, deletion.

Each change is a record of the WAL (kmq/log/topic_changes.py). Example: `__kmq.start|<ts>|;request=…|orders 3=4711`
deletes what partition 3 of orders has before offset 4711.

Owner       the router process. Commands only submit requests, and the framer makes records of them.
Invariant   A change is carried out after the lines before its record and before the lines after it, with the seq of the
            record, at first and in a replay. A deleted topic's last seq is on disk in `deletions` before any of its
            files is removed, and no record after that seq is in the deleted queue. A grown topic's first seq with
            more partitions is on disk in topic.toml before a record is routed by it. A request is removed after its
            record was carried out.
            Records deleted by a new start offset never return, in a replay or in a rebuild that has its record.
Crash       Carrying out a record again changes nothing. If a kill comes after the write of `deletions`, the next start
            removes the rest of the directory (`finish_deletions`); the removal takes many turns (`sweep`). If a kill
            comes after the write of topic.toml, the next start makes the new partitions (declarations.py).
No record   Topics that messages make, and declarations of releases before these records; a shard refuses the latter.
"""

import os
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kmq.errors import ConfigError
from kmq.files import sync_file
from kmq.log import checkpoint, deletions, identity, reader, topic_changes, topics
from kmq.log.damage import DamageError
from kmq.log.partition import PartitionLog
from kmq.log.segment import COMPACT, LIMITS
from kmq.log.topic_changes import TopicChange
from kmq.message import record
from kmq.message.routing import Topic
from kmq.router.declarations import Declarations
from kmq.router.in_force import Context, TopicsInForce
from kmq.router.logs import PartitionLogs
from kmq.router.recovery import Checkpoints
from kmq.router.sorting import Sorter
from kmq.router.tiering import Tiering

_COARSE_NS = 50_000_000  # two changes of a directory within this time may have the same mtime
_STARTS = "starts of partitions"
_SWEPT_AT_ONCE = 16  # files of deleted topics between two batches of lines: eight segments, as many as the WAL deletes


class _When(namedtuple("_When", ("first", "last", "ts"))):
    """`first`: first seq for which a change holds; `last`: last seq of what the change ends; `ts`: as stored."""

    __slots__ = ()


class TopicChanges:
    """Carries out the records of changes, and requests that have no record."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: PartitionLogs,
        declarations: Declarations,
        sorter: Sorter,
        checkpoints: Checkpoints,
        tiering: Tiering,
        retain: Callable[[], None],
        begin_at: Callable[[Iterable[tuple[PartitionLog, int]]], None],
    ) -> None:
        """Take the parts of the router. `retain` seals and deletes segments over their limits, at once.

        `begin_at` takes logs, each with its new start offset.
        """
        self._context, self._in_force, self._logs, self._retain = context, in_force, logs, retain
        self._begin_at = begin_at
        self._declarations, self._sorter, self._checkpoints = declarations, sorter, checkpoints
        self._tiering = tiering
        self._read_mtime = 0  # mtime of topics/ when it was last read
        self._final = self._last_seq = 0  # see `recovered`
        self._early: set[str] = set()  # requests whose limits are set before their record
        self._sweeping: Iterator[None] | None = None  # removes the files of deleted topics, one a step

    def recovered(self, checkpoint_seq: int) -> None:
        """Note what a start of the router has found; `checkpoint_seq`: the last seq that the checkpoint covers.

        Changes up to that seq are final. A change whose record is in the queue of changes was carried out. Without a
        checkpoint files may be missing, so a replay carries out every change again, except limits: these may have been
        edited by hand since.
        """
        changes = self._logs.states.get((topic_changes.TOPIC, 0))
        self._last_seq = max(checkpoint_seq, changes.last_seq if changes else 0)
        self._final = self._last_seq if checkpoint_seq else 0

    # --- records -----------------------------------------------------------------------------------------------------

    def apply(self, line: bytes) -> None:
        """Carry out the record of a change, unless that was done before a kill."""
        try:
            change = topic_changes.decode(line)
        except ValueError as err:
            self._context.logger.warn("request_refused", file="append", topic=topic_changes.TOPIC, reason=err)
            return
        is_done = change.seq <= (self._last_seq if change.verb == topic_changes.SET else self._final)
        if change.verb == topic_changes.START:  # a rebuilt log has the deleted records again
            is_done = is_done and not self._is_in_force(change)
        if not is_done:
            self._sync_wal()
            self._carry_out(change, _When(change.seq, change.seq, change.ts))
        self._early.discard(change.request)
        request = topic_changes.named(self._context.data, change.request)
        if request.is_waiting:
            request.remove()

    def carry_out(self) -> None:
        """Carry out requests that need no record. Put declarations without a record in force from the next seq on."""
        data = self._context.data
        mtime = os.stat(f"{data}/topics").st_mtime_ns
        if mtime == self._read_mtime:
            return
        self._read_mtime = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
        pending = [name for name in topics.names(data) if not self._is_known(name)]
        waiting = topic_changes.waiting(data)  # after the names: a declaration submits its request first
        numbered = [each for each in waiting if self._context.are_recorded and each.is_recorded]
        # The framer waits for a file that says from which seq on the topic is in force.
        for name in sorted({each.topic for each in numbered if self._in_force.has(each.topic)}):
            self._declarations.mend(name)
        for request in waiting:
            if request not in numbered:
                next_seq = self._sorter.sorted_seq + 1
                when = _When(next_seq, next_seq - 1, deletions.now())
                self._carry_out(TopicChange(request.verb, request.topic, None, request.values, request.name), when)
                request.remove()
        coming = {request.topic for request in numbered if request.verb == topic_changes.CREATE}
        for name in pending:
            if name not in coming and not self._is_known(name) and os.path.isdir(f"{data}/topics/{name}"):
                if self._context.in_shard:
                    self._declarations.refuse(name)
                else:
                    self._declarations.adopt(name, self._sorter.sorted_seq + 1)

    def set_early(self) -> None:
        """Set requested limits early: their record may wait for the room that a lower limit makes. It sets them again.

        Skip a topic that is not in force yet: the record that says from which seq on it is in force is still to come.
        """
        for request in topic_changes.waiting(self._context.data):
            is_new = request.verb == topic_changes.SET and request.name not in self._early
            if is_new and self._in_force.has(request.topic):
                self._early.add(request.name)
                when = _When(0, 0, "")  # limits need no seq
                self._carry_out(TopicChange(request.verb, request.topic, None, request.limits, request.name), when)

    def _is_known(self, name: str) -> bool:
        return self._in_force.has(name) or name.encode() in self._sorter.newcomers

    def _carry_out(self, change: TopicChange, when: _When) -> None:
        """Carry out a change. A change without a record has the incarnation None, and is for the topic in force."""
        try:
            if change.verb == topic_changes.CREATE:
                self._create(change, when.first)
            elif change.verb == topic_changes.SET:
                self._set_limits(change)
            elif change.verb == topic_changes.GROW:
                self._grow(change, when.first)
            elif change.verb == topic_changes.DELETE:
                self._delete(change, when)
            elif change.verb == topic_changes.RETAIN:
                self._retain()
            elif change.verb == topic_changes.START:
                self._start(change)
            else:
                raise ConfigError(f"unknown request {change.verb!r}")
        except (ConfigError, LookupError, ValueError) as err:
            path = topic_changes.named(self._context.data, change.request).path
            self._context.logger.warn("request_refused", file=path, topic=change.topic, reason=err)

    def _topic_of(self, change: TopicChange) -> Topic:
        """Return the topic in force that is to be changed. Raises ConfigError if there is no such topic."""
        name = change.topic
        if name == topic_changes.TOPIC:
            raise ConfigError(f"topic {name!r}: keeps everything, and never changes")
        if change.incarnation is None and name in topics.names(self._context.data) and not self._in_force.has(name):
            self._sorter.make_topics()
            if not self._in_force.has(name):  # declared since the last look
                return self._declarations.adopt(name, self._sorter.sorted_seq + 1)
        if not self._in_force.has(name):
            raise ConfigError(f"topic {name!r} does not exist")
        topic: Topic = self._in_force.table[name.encode()]
        if change.incarnation not in (None, topic.from_seq):
            raise ConfigError(f"topic {name!r}: is another one, in force from seq {topic.from_seq}")
        return topic

    def _create(self, change: TopicChange, seq: int) -> None:
        """Put a declared topic in force from `seq` on. Raises ConfigError if it exists already or is invalid."""
        name, data = change.topic, self._context.data
        if not record.is_topic_name(name):
            raise ConfigError(f"topic {name[:80]!r}: is no name of a topic")
        if change.incarnation is None:
            self._sorter.make_topics()
            if self._in_force.has(name):  # a message has adopted it
                return
        topic = self._in_force.table.get(name.encode())
        if topic is not None and seq in topic.bounds()[::2]:
            return  # carried out before a kill
        if topic is not None and (not topic.is_gone or topic.lives[-1][1] >= seq):
            raise ConfigError(f"topic {name!r} exists, in force from seq {topic.bounds()[0]}")
        try:
            declared = topics.Declaration(
                change.partitions, seq, change.limits, (), change.values.get("partitioner", topics.CRC32)
            )
            topics.check(name, declared, is_own=record.is_own_topic(name))
            topics.check_links(data, Topic(name, declared.partitions, seq))
            self._declarations.put_in_force(name, declared)
        except (ConfigError, ValueError):
            self._remove_pending(name)
            raise

    def _remove_pending(self, name: str) -> None:
        """Remove a refused declaration, because else a message could adopt it."""
        data = self._context.data
        if os.path.isdir(f"{data}/topics/{name}") and topics.load(data, name)[1] is None:
            self._remove(Topic(name, 1, 0))

    def _set_limits(self, change: TopicChange) -> None:
        """Change the limits in a topic's file and of its logs. Raises ConfigError if a limit is invalid."""
        topic, name, changes = self._topic_of(change), change.topic, change.limits
        if unknown := changes.keys() - {*LIMITS}:
            raise ConfigError(f"{min(unknown)!r}: unknown limit; expected one of {', '.join(LIMITS)}")
        path = topics.toml_path(self._context.data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_limits(file.read(), changes)
        declared = topics.parse(text)
        limits = self._in_force.default_limits.with_changes(declared.limits)
        has_rows = any((found := self._tiering.of(name, n)) and found.rows for n in range(topic.partitions))
        if limits.cleanup == COMPACT and has_rows:
            raise ConfigError(f"topic {name!r}: cannot be compacted while old records lie in KMQ_TIER")
        self._context.replace(path, text.encode())
        self._in_force.set_limits(name, declared)
        for log in self._logs.of_topic(topic):
            self._logs.use(log)
            log.set_limits(limits, int(self._context.now_s() * 1e6))
            self._logs.unsynced.add(log)
        texts = {limit: value or "unset" for limit, value in changes.items()}
        self._context.logger.info("topic_limits_set", topic=name, **texts)

    def _grow(self, change: TopicChange, next_seq: int) -> None:
        """Give a topic more partitions from `next_seq` on. Raises ConfigError if that is not possible."""
        self._sorter.make_topics()  # waiting lines may be of this topic, and older than the seq written below
        topic, data = self._topic_of(change), self._context.data
        name, partitions = change.topic, change.partitions
        if change.incarnation is not None and topic.grown and topic.grown[-1][0] >= next_seq:
            return  # carried out before a kill
        topics.check_growth(data, name, topic.partitions, partitions)
        if partitions == topic.partitions:  # carried out before a kill
            return
        self._sync_wal()
        grown = Topic(
            name, partitions, topic.from_seq, (), [*topic.grown, (next_seq, topic.partitions)], topic.partitioner
        )
        self._in_force.raise_format_for(grown)
        path = topics.toml_path(data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_growth(file.read(), grown)
        self._context.replace(path, text.encode())
        self._in_force.put(grown)
        self._logs.relink(grown)
        removed = [f"{name}.log"] if topics.drop_single_link(data, grown) else []
        self._logs.unsynced.update(self._logs.of_topic(grown))
        if not self._checkpoints.is_busy:  # else the next one, because there is something to sync
            self._checkpoints.start()  # it has a second copy of the growth
        self._context.logger.info(
            "topic_grown", topic=name, partitions=partitions, from_seq=next_seq, removed=",".join(removed) or "none"
        )

    def _start(self, change: TopicChange) -> None:
        """Delete the records before the given offsets of partitions. Raises ConfigError if a partition is missing."""
        self._sorter.make_topics()  # waiting lines may be of this topic, and older
        topic, starts = self._topic_of(change), change.starts
        if max(starts, default=0) >= topic.partitions:
            raise ConfigError(f"topic {topic.name!r}: has {topic.partitions} partition(s), and no {max(starts)}")
        self._in_force.raise_format(identity.STARTED, topic, _STARTS)
        logs = {self._logs.log_of(topic, number): offset for number, offset in starts.items()}
        self._begin_at([(log, self._end_then(log, offset, change.seq)) for log, offset in logs.items()])

    def begin_recorded(self) -> None:
        """Move the start offsets that have a record but were not moved; call it when the router starts.

        The moves were postponed before that, or an older release that does not know such records skipped them.
        """
        undone: list[tuple[PartitionLog, int]] = []
        for (name, from_seq, number), starts in checkpoint.recorded_starts(self._context.data).items():
            topic = self._in_force.table.get(name.encode())
            if name == topic_changes.TOPIC or topic is None or topic.from_seq != from_seq or number >= topic.partitions:
                continue
            log = self._logs.log_of(topic, number)
            offset = max(self._end_then(log, start.offset, start.seq) for start in starts)
            if min(offset, log.state.end_offset) > log.state.start:
                self._in_force.raise_format(identity.STARTED, topic, _STARTS)
            undone.append((log, offset))  # also where the tier has what lies before the segments
        self._begin_at(undone)

    def _end_then(self, log: PartitionLog, offset: int, seq: int) -> int:
        """Return `offset`, limited to the end offset that a log had at record `seq`.

        If `seq` is 0, the change is of now. If the log is damaged, that end is unknown: return 0, so the log stays.
        """
        if not seq or log.state.last_seq < seq:
            return offset
        if (end := self._tiering.end_at(log.topic, log.number, seq)) is not None:
            return min(offset, end)
        if offset <= log.state.start:
            return offset
        try:
            return min(offset, reader.local(self._context.data, log.topic, log.number).offset_of_seq(seq))
        except DamageError as err:
            self._context.logger.error("damaged", file=err.path, reason=err)
            self._context.damaged(err)
            return 0

    def _is_in_force(self, change: TopicChange) -> bool:
        topic = self._in_force.table.get(change.topic.encode())
        return topic is not None and change.incarnation == topic.from_seq

    def _sync_wal(self) -> None:
        """Sync the WAL. Else, after a power cut, other records could get seqs that were sorted already."""
        if not self._context.wal_is_synced:
            sync_file(os.path.realpath(f"{self._context.data}/append.log"))

    def _delete(self, change: TopicChange, when: _When) -> None:
        """Delete a topic with all its records, for good. Raises ConfigError if there is no such topic."""
        name, data, last_seq = change.topic, self._context.data, when.last
        lives = self._in_force.deleted.lives.get(name, ())
        if change.incarnation is not None and last_seq in (last for _, last in lives):
            return  # carried out before a kill
        topic = self._topic_of(change)
        self._sorter.make_topics()  # waiting lines may be older than the last seq written below
        self._checkpoints.finish()  # a running checkpoint syncs files by name, and these are about to be removed
        ends = [log.state.end_offset for log in self._logs.of_topic(topic)]
        all_deletions = deletions.read(data)
        has_had_records = topic.from_seq <= last_seq
        if has_had_records:
            self._sync_wal()
            deletion = deletions.Deletion(name, topic.from_seq, last_seq, when.ts, ends)
            self._in_force.write_deletions([*all_deletions, deletion])
        self._logs.forget(topic)
        self._checkpoints.forget(topic)
        self._in_force.forget(topic)
        if not has_had_records:  # no seq distinguishes it from a later topic of its name
            self._checkpoints.start()
            self._checkpoints.finish()
        self._remove(topic)
        if not has_had_records:
            # The content is unchanged, but its new mtime makes the framer read the topics again.
            self._in_force.write_deletions(all_deletions)
        self._context.logger.info(
            "topic_deleted", topic=name, from_seq=topic.from_seq, last_seq=last_seq, messages=sum(ends)
        )

    def _remove(self, topic: Topic) -> None:
        """Remove the directory of a topic: its name and some of its files now, the rest by `sweep`."""
        deletions.detach(self._context.data, topic)
        if self._sweeping is None:
            self._sweeping = deletions.sweep(self._context.data)
            self.sweep()

    def finish_deletions(self) -> None:
        """Remove the rest of topics whose deletion a kill interrupted; call at a start, before anything else."""
        data = self._context.data
        all_deletions = deletions.read(data)
        if deletions.faults(data):
            self._in_force.write_deletions(all_deletions)  # one of the two files may be missing, or damaged
        for name, partitions in topics.left_over(data):
            last_seq = self._in_force.deleted.last_seq(name)
            self._context.logger.warn("topic_deleted_again", topic=name, last_seq=last_seq)
            deletions.detach(data, Topic(name, partitions, 0))
        for _ in deletions.sweep(data):
            self._context.check()

    def sweep(self) -> bool:
        """Remove some files of deleted topics; return True if more are left. Call it between two batches of lines."""
        if self._sweeping is None:
            return False
        removed = sum(1 for _ in islice(self._sweeping, _SWEPT_AT_ONCE))
        if removed < _SWEPT_AT_ONCE:
            self._sweeping = None
        return self._sweeping is not None
