"""All partition logs of a data directory: the interface for the router stage. Each job has a module of its own.

    sorting         lines into logs: the hot path                wal_records    the WAL's records for a queue
    logs            states, and the open logs                    recovery       a start: which log needs a replay
    in_force        topics, their limits, deleted topics         mending        a log that differs from the checkpoint
    declarations    how a topic comes into force                 healing        an end that differs from its index
    topic_changes   changes of topics: records                    checkpoints    when, and what they sync
    newcomers       topics that are not made yet                 retention, compacted

Owner       the router process (lock topics/.owner).
Invariant   Every record up to `routed_seq` is in its partition log, except what dropped.log names and the records of
            deleted topics (sorting.py). The logs on disk are at least what router.ckpt says (checkpoints.py).
Crash       The logs are copies, and the WAL is the truth. A start examines every log, then replays the WAL from the
            earliest end of a log (recovery.py).
Memory      A cold partition is one small object, its State. At most `most_open` logs have a descriptor.
"""

from collections.abc import Callable

from kmq.files import WaitForRoom
from kmq.links.layout import Block
from kmq.log import topic_records
from kmq.log.dropped import SeqRange
from kmq.log.segment import Limits
from kmq.logfmt import Logger
from kmq.message import record
from kmq.router.checkpoints import Checkpoints
from kmq.router.compacted import Compacted
from kmq.router.context import Context
from kmq.router.declarations import Declarations
from kmq.router.healing import EndHealer
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import MAX_OPEN, Logs
from kmq.router.mending import Mender
from kmq.router.newcomers import AT_ONCE
from kmq.router.recovery import Recovery
from kmq.router.retention import Retention
from kmq.router.sorting import Sorter
from kmq.router.topic_changes import TopicChanges
from kmq.router.wal_records import WalRecords


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
    ) -> None:
        """Join the parts of the router. `recover` must be called before anything is routed.

        `wal_is_synced`: False if the WAL may show records that are not on disk; then each checkpoint syncs the WAL
        first, because it must never be ahead of the WAL. `most_open`: maximum of open logs.
        """
        context = self.context = Context(data, wait_for_room, log, wal_is_synced)
        in_force = self.in_force = TopicsInForce(context, limits or Limits())
        records = WalRecords(context, in_force.table)
        logs = self.logs = Logs(context, in_force, EndHealer(context, records, in_force.table), most_open)
        self.declarations = Declarations(context, in_force, logs)
        self.sorter = Sorter(context, in_force, logs, self.declarations, records)
        self.checkpoints = Checkpoints(context, in_force, logs, self.sorter)
        self.retention = Retention(context, in_force, logs, self.checkpoints)
        self._compacted = Compacted(context, in_force, logs)
        self._changes = TopicChanges(context, in_force, logs, self.declarations, self.sorter, self.checkpoints)
        self._changes.retain = self.retention.roll_over
        self.sorter.change = self._changes.apply
        mender = Mender(context, in_force, records)
        self._recovery = Recovery(context, in_force, logs, self.declarations, self.checkpoints, mender)

    @property
    def count(self) -> int:
        """Return the number of topics in force."""
        return self.in_force.count

    @property
    def sorted_seq(self) -> int:
        """Return the seq up to which every record is in its log, or waits for its topic to be made."""
        return self.sorter.sorted_seq

    @property
    def routed_seq(self) -> int:
        """Return the seq up to which every record is in its log."""
        return self.sorter.routed_seq

    @property
    def has_newcomers(self) -> bool:
        """Return True if `make_topics` has something to do."""
        return bool(self.sorter.newcomers)

    @property
    def is_checkpointing(self) -> bool:
        """Return True while a checkpoint is written or waits for room."""
        return self.checkpoints.is_busy

    def recover(self, high: int, check: Callable[[], None]) -> None:
        """Complete every log from the WAL, up to the durable seq `high`. `check` is called during all long work."""
        self.context.check = check
        self._changes.finish_deletions()
        replay_from = self._recovery.run(high)
        self._changes.recovered(self._recovery.checkpoint_seq)
        self.sorter.sorted_seq = replay_from - 1
        self.sorter.replay(SeqRange(replay_from, high))
        self.adopt_declarations()
        self.context.make_room = self._make_room

    def route(self, blocks: list[Block]) -> int:
        """Append consecutive blocks, all after sorted_seq, to their partition logs; return the bytes written.

        Lines whose topic has to be made may wait for later calls of this method or of `make_topics`.
        """
        written, begin = 0, 0
        for at, block in enumerate(blocks):
            if _is_change(block):  # between the lines before it and those behind it
                written += self._route(blocks[begin:at]) + self.sorter.make_topics()
                self._changes.apply(bytes(block.data))
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
            None if self.sorter.newcomers.is_too_much else AT_ONCE
        )

    def make_topics(self, most: int | None = None) -> int:
        """Make the topics that messages have named, all or the `most` oldest; return the bytes of their lines."""
        return self.sorter.make_topics(most)

    def replay(self, first: int, last: int) -> None:
        """Route the records first…last from the WAL, without dropped ones; each log skips what it has."""
        self.sorter.replay(SeqRange(first, last))

    def set_limits_early(self) -> None:
        """Set the limits that were asked for since the last call, before their records come."""
        self._changes.set_early()

    def adopt_declarations(self) -> None:
        """Carry out the requests and adopt the declarations that were made since the last call."""
        self._changes.carry_out()

    def tick(self) -> None:
        """Do the periodic work: index lines, declarations, sealing, retention, checkpoints; call once a second."""
        self.logs.note_open_blocks()
        self.logs.check_names()
        self.adopt_declarations()
        self.retention.roll_over_if_due()
        if not self.checkpoints.is_busy:
            compacted = self._compacted.install()
            if not self.retention.retire() and (compacted or self.checkpoints.is_due):
                self.checkpoints.start()

    def use_limits(self, limits: Limits) -> None:
        """Use other limits for every topic without limits of its own, and act on them in the next `tick`."""
        self.in_force.set_default_limits(limits)
        self.retention.roll_over_soon()

    def make_room(self) -> None:
        """Delete what retention may delete. May be called in the middle of any other method."""
        self.context.make_room()

    def _make_room(self) -> None:
        self.retention.make_room()
        while self._changes.sweep():
            self.context.check()

    def sweep(self) -> bool:
        """Remove some files of deleted topics; return True if more are left."""
        return self._changes.sweep()

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        self.checkpoints.finish()

    def close(self) -> None:
        """Route the waiting lines, write a checkpoint of everything, and close all logs."""
        self.make_topics()
        self.tick()
        self.settle()
        if self.logs.unsynced:
            self.checkpoints.start()
            self.settle()
        self.logs.close()


def _is_change(block: Block) -> bool:
    """Return True if a block is the record of a change of a topic, which has a block of its own."""
    is_key = block.count == 1 and block.key_length == len(topic_records.KEY)
    return is_key and record.routing_key_of(bytes(block.data)) == topic_records.KEY
