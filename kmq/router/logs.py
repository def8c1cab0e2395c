"""The partition logs of a data directory: the state of each, the few that are open for writing, and their WAL records.

Example: `deliver(log, line, 1, 17, 17)` opens topics/orders/0 if it is closed, and appends the line with seq 17.
When a log is opened, its end may differ from its index: the log is damaged, or a power cut left the index ahead. Then
the log is healed: the lines are written again from the WAL.

Owner       the router process (lock topics/.owner). It reads the WAL only.
Invariant   At most `most_open` logs are open; the least recently used log is closed first. A log that has been written
            is in `unsynced` until a checkpoint that syncs it has begun.
            Healing cuts only what the WAL can restore. The exception is a log that was not synced: a power cut may have
            torn its end.
            A record that dropped.log names is never read from the WAL. A range of the WAL that is read ends where a
            topic came into force, grew or was deleted, so within a range every routing key leads to the same log.
Crash       In memory only: a start examines every log (recovery.py). Healing writes the lines in place, then the index.
            If a kill leaves either half done, the next start heals the log again.
Memory      A cold partition is one small object, its PartitionState.
"""

import os
from collections import namedtuple
from collections.abc import Iterator
from itertools import pairwise

from kmq.errors import RetryError
from kmq.files import Buffer, find_tail, replace_file
from kmq.log import dropped, segment, wal
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.dropped import SeqRange
from kmq.log.index import read_entries
from kmq.log.partition import PartitionLog, PartitionPlace, PartitionState
from kmq.log.segment import is_stored
from kmq.message import record
from kmq.message.routing import Topic, resolve
from kmq.router.in_force import Context, TopicsInForce

MAX_OPEN = 1024  # maximum of open logs, if the process may open that many files


class PartitionLogs:
    """The partition logs, by topic and partition."""

    def __init__(self, context: Context, in_force: TopicsInForce, most_open: int = MAX_OPEN) -> None:
        self._context, self._in_force = context, in_force
        self._most_open = min(most_open, MAX_OPEN)
        self.states: dict[tuple[str, int], PartitionState] = {}
        self.unsynced: set[PartitionLog] = set()  # since the last checkpoint
        self._unnoted: set[PartitionLog] = set()  # since the last tick
        self._logs: dict[tuple[str, int], PartitionLog] = {}
        self._open: dict[PartitionLog, None] = {}  # in order of last use

    def log_of(self, topic: Topic, partition: int) -> PartitionLog:
        at = topic.name, partition
        log = self._logs.get(at)
        if log is None:
            state = self.states.setdefault(at, self._in_force.first_state(*at))
            place = PartitionPlace(self._context.data, *at, topic.log_names()[partition], topic.from_seq)
            limits, forks = self._in_force.limits_of(topic.name), self._in_force.forks_of(topic.name)
            log = self._logs[at] = PartitionLog(place, state, self._context.wait_for_room, limits, forks)
        return log

    def skip_forks(self) -> None:
        """Leave a gap at the end of each partition that ends before the offset of the last fork.

        Call it when every record from before the fork is in its log.
        """
        for name, partition in [*self.states]:
            forks = self._in_force.forks_of(name)
            if forks and self.states[name, partition].end_offset < forks[-1].offset:
                self._context.check()
                log = self.log_of(self._in_force.table[name.encode()], partition)
                self.use(log)
                self.unsynced.add(log)
                log.skip_to(forks[-1].offset)

    def of_topic(self, topic: Topic) -> list[PartitionLog]:
        return [self.log_of(topic, partition) for partition in range(topic.partitions)]

    def deliver(self, log: PartitionLog, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        """Append lines, without those that the log has already; return the bytes written."""
        if last_seq <= log.state.last_seq:
            return 0
        self.use(log)
        self.unsynced.add(log)
        self._unnoted.add(log)
        return log.append(data, count, first_seq, last_seq)

    def use(self, log: PartitionLog) -> None:
        """Open the log if it is closed; close the least recently used log if too many are open."""
        if self._open.pop(log, self) is self:
            if len(self._open) >= self._most_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.close()
            self._reopen(log)
        self._open[log] = None

    def _reopen(self, log: PartitionLog) -> None:
        warn, check = self._context.logger.warn, self._context.check
        try:
            log.open(warn, check=check)
        except MisplacedError:
            raise  # its bytes may be the only copy of records that belong to another log
        except DamageError as err:
            self._heal(log, err)
            self.unsynced.add(log)
            log.open(warn, check=check)

    def _heal(self, log: PartitionLog, damage: DamageError) -> None:
        """Write the end of the active segment again, from the WAL. Raises `damage` if the WAL lacks those records.

        If the log was written since its last sync, a power cut explains the damage. Then missing records in the WAL are
        no error.
        """
        state, path, topic = log.state, log.path, self._in_force.table[log.topic.encode()]
        with open(path, "r+b") as file:
            end = _good_end(file.fileno(), path, state, damage.byte)
            low = record.seq_of(end.last) + 1 if end.last else topic.from_seq
            if wal.first_seq(self._context.data) <= low:
                lines = b"".join(self.wal_records(topic, log.number, SeqRange(low, state.last_seq)))
                if not end.last:  # the WAL may also have records from before the start of the log
                    lines = _last_lines(lines, state.end_offset - state.base)
                file.seek(end.position)
                if file.read() != lines:
                    self._context.logger.warn(
                        "queue_healed", file=path, byte=end.position, first_seq=low, last_seq=state.last_seq
                    )
                    file.seek(end.position)
                    file.write(lines)
                    file.truncate()
                state.size += end.position + len(lines) - state.active_bytes
                state.end_offset = end.offset + lines.count(b"\n")
            elif log not in self.unsynced:
                raise damage
        replace_file(segment.index_path(path), b"".join(entry.line() for entry in end.entries))

    def restore(self, log: PartitionLog) -> None:
        """Make the directory, file, symlink and index of a log, where they are missing."""
        self.use(log)
        self._unnoted.add(log)

    def relink(self, topic: Topic) -> None:
        """Open the logs of a topic that has grown, with the symlinks that they have now."""
        for log, link in zip(self.of_topic(topic), topic.log_names(), strict=True):
            self._context.check()
            if self._open.pop(log, self) is not self:
                log.close()
            log.use_link(link)
            self.use(log)

    def note_open_blocks(self) -> None:
        """Write a provisional index line for the open block of every log written since the last call."""
        for log in self._unnoted:
            self._context.check()
            log.note_open_block()
        self._unnoted.clear()

    def check_names(self) -> None:
        """Raise RetryError if an open file was removed: further lines written to it would be lost."""
        for log in self._open:
            if log.is_unlinked():
                raise RetryError(f"{log.path}: removed by another process; a restart rebuilds it from the WAL")

    def forget(self, topic: Topic) -> None:
        """Close and forget the logs of a deleted topic."""
        name = topic.name
        for at in [at for at in self._logs if at[0] == name]:
            log = self._logs.pop(at)
            log.close()
            self._open.pop(log, None)
            self.unsynced.discard(log)
            self._unnoted.discard(log)
        for at in [at for at in self.states if at[0] == name]:
            del self.states[at]

    def close(self) -> None:
        for log in self._open:
            log.close()

    # --- the WAL -----------------------------------------------------------------------------------------------------

    def wal_ranges(self, seqs: SeqRange) -> list[SeqRange]:
        """Return `seqs` without dropped seqs, cut where a topic came into force, grew or was deleted."""
        topics = self._in_force.table.values()
        changing = [topic for topic in topics if topic.partitions > 1 or "." in topic.name or topic.lives]
        cuts = sorted({seq for topic in changing for seq in topic.changes()})
        wanted = []
        for first, last in dropped.without(*seqs, dropped.read(self._context.data, "durable")):
            starts = [first, *(seq for seq in cuts if first < seq <= last), last + 1]
            wanted += [SeqRange(low, high - 1) for low, high in pairwise(starts)]
        return wanted

    def wal_records(self, topic: Topic, partition: int, seqs: SeqRange) -> Iterator[bytes]:
        """Yield the records that the WAL has of one partition, as blocks of whole lines."""
        name, table = topic.name.encode(), self._in_force.table
        for first, last in self.wal_ranges(seqs):
            for block in wal.read(self._context.data, first, last):
                self._context.check()  # even a small gap may mean reading the whole WAL, twice
                mine = []
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = resolve(table, record.routing_key_of(line), seq)
                    if route.topic == name and topic.partition_of(route, seq) == partition:
                        mine.append(line + b"\n")
                if mine:
                    yield b"".join(mine)


class _GoodEnd(namedtuple("_GoodEnd", ("position", "offset", "last", "entries"))):
    """End of the whole part of an active segment: byte, next offset, last line, index entries of its blocks."""

    __slots__ = ()


def _last_lines(lines: bytes, count: int) -> bytes:
    """Return the last `count` of whole lines."""
    return b"\n".join(lines.split(b"\n")[-count - 1 :])


def _good_end(fd: int, path: str, state: PartitionState, damaged_at: int) -> _GoodEnd:
    tail = find_tail(fd, min(damaged_at, state.active_bytes), is_stored)
    last = tail.last
    indexed = read_entries(segment.index_path(path), 1 << 62)
    entries = [entry for entry, following in pairwise(indexed) if following.position <= tail.size]
    offset, start = (entries[-1].offset, entries[-1].position) if entries else (state.base, 0)
    offset += os.pread(fd, tail.size - start, start).count(b"\n")
    if not last and state.sealed:
        with open(state.sealed[-1].path, "rb") as sealed:
            last = find_tail(sealed.fileno(), state.sealed[-1].size, is_stored).last
    return _GoodEnd(tail.size, offset, last, entries)
