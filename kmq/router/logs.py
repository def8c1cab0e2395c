"""The partition logs of a data directory: the state of each, and the few that are open for writing.

Owner       the router process (lock topics/.owner).
Invariant   At most `most_open` logs are open; the least recently used log is closed first. A log that has been written
            is in `unsynced` until a checkpoint that syncs it has begun.
Crash       In memory only. A start examines every log (recovery.py).
Memory      A cold partition is one small object, its State.
"""

from kmq.errors import RetryError
from kmq.files import Buffer
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.partition import PartitionLog, PartitionPlace, State
from kmq.message.routing import Topic
from kmq.router.context import Context
from kmq.router.healing import EndHealer
from kmq.router.in_force import TopicsInForce

MAX_OPEN = 1024  # maximum of open logs, if the process may open that many files


class Logs:
    """The partition logs, by topic and partition."""

    def __init__(self, context: Context, in_force: TopicsInForce, healer: EndHealer, most_open: int = MAX_OPEN) -> None:
        self._context, self._in_force, self._healer = context, in_force, healer
        self._most_open = min(most_open, MAX_OPEN)
        self.states: dict[tuple[str, int], State] = {}
        self.unsynced: set[PartitionLog] = set()  # since the last checkpoint
        self._unnoted: set[PartitionLog] = set()  # since the last tick
        self._logs: dict[tuple[str, int], PartitionLog] = {}
        self._open: dict[PartitionLog, None] = {}  # in order of last use

    def log_of(self, topic: Topic, partition: int) -> PartitionLog:
        at = topic.name, partition
        log = self._logs.get(at)
        if log is None:
            state = self.states.setdefault(at, self._in_force.first_state(*at))
            place = PartitionPlace(self._context.data, *at, topic.log_names()[partition])
            limits = self._in_force.limits_of(topic.name)
            log = self._logs[at] = PartitionLog(place, state, self._context.wait_for_room, limits)
        return log

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
            raise  # its bytes may be the only copy of records that belong elsewhere
        except DamageError as err:
            self._healer.heal(log, err, is_unsynced=log in self.unsynced)
            self.unsynced.add(log)
            log.open(warn, check=check)

    def restore(self, log: PartitionLog) -> None:
        """Make the directory, file, symlink and index of a log, where they are missing."""
        self.use(log)
        self._unnoted.add(log)

    def relink(self, topic: Topic) -> None:
        """Open the logs of a topic that has grown, each behind the symlink that it has now."""
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
