"""Routing: sorting stored lines into the partition logs of their topics. The hot path of the router.

Example: the line `17|<ts>|orders.eu|…` goes to topics/orders/<partition of key eu>.

Owner       the router process.
Invariant   Every record up to `routed_seq` is in its log (in the page cache; the checkpoint says what is on disk),
            except what dropped.log names and the records of deleted topics. Every record up to `sorted_seq` is in its
            log, or waits for its topic to be made. Routing depends only on the line and on the topics in force at its
            seq.
Crash       The state here is in memory only. The next start replays the WAL from the checkpoint, and each log skips the
            records that it has.
Memory      At most _MAX_ROUTES cached routing keys of at most _MAX_ROUTE bytes. declarations.py bounds the waiting lines.
"""

from collections import defaultdict
from collections.abc import Callable

from kmq.links.layout import Block
from kmq.log import topic_changes, wal
from kmq.log.dropped import SeqRange
from kmq.log.partition import PartitionLog
from kmq.log.segment import start_of
from kmq.message import record
from kmq.message.routing import DELETED, Topic, resolve
from kmq.router.declarations import Declarations, Newcomer, Newcomers
from kmq.router.in_force import Context, TopicsInForce
from kmq.router.logs import PartitionLogs

_STAMP_BYTES = 64  # a seq and a time before the routing key are shorter
_MAX_ROUTES = 1 << 16  # cached routing keys: a producer with random keys must not fill the memory
_MAX_ROUTE = 256  # bytes of a cached routing key: a producer with long keys must not fill it either

# Where lines with a routing key go. A Topic: the partition depends on the seq. A Newcomer: the topic has to be made
# first. None: nowhere, because the topic was deleted after this record.
Target = PartitionLog | Topic | Newcomer | None


class Sorter:
    """Routes lines, with a cache of routing keys."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: PartitionLogs,
        declarations: Declarations,
        routes: dict[bytes, Target],
    ) -> None:
        """Take the parts of the router. `routes`: the cache, which `in_force` clears when its topics have changed."""
        self._context, self._in_force, self._logs, self._routes = context, in_force, logs, routes
        self._create = declarations.create
        self._table, self._log_of, self._deliver = in_force.table, logs.log_of, logs.deliver
        self.newcomers = Newcomers()
        self._making: Newcomer | None = None  # its lines are being written to their log
        self.sorted_seq = 0
        self.routed_bytes = 0  # since the start of the process, with the replay

    @property
    def routed_seq(self) -> int:
        """Return the seq up to which every record is in its log."""
        oldest = self._making or self.newcomers.oldest
        return oldest.first_seq - 1 if oldest else self.sorted_seq

    @property
    def remembered_bytes(self) -> int:
        """Return the bytes of all cached routing keys."""
        return sum(map(len, self._routes))

    def route(self, blocks: list[Block]) -> int:
        """Append consecutive blocks, all after sorted_seq, to their partition logs; return the bytes written.

        Lines of a topic that has to be made wait in `newcomers`.
        """
        written = 0
        mixed: list[bytes] = []
        for block in blocks:
            if block.key_length:  # earlier lines first, because a topic is in force from its first message on
                written += self._route_lines(mixed)
                mixed = []
            target = self._common_target(block)
            if isinstance(target, PartitionLog):
                written += self._deliver(target, block.data, block.count, block.first_seq, block.last_seq)
            elif isinstance(target, Topic) and target.partitioner.run > 1:
                written += self._take_turns(target, block)
            else:
                mixed.append(bytes(block.data))
        written += self._route_lines(mixed)
        self.routed_bytes += written
        self.sorted_seq = blocks[-1].last_seq
        return written

    def make_topics(self, most: int | None = None) -> int:
        """Make the topics that messages have named, all or the `most` oldest; return the bytes of their lines."""
        written = made = 0
        while made != most and (newcomer := self.newcomers.oldest):
            self._context.check()
            self._create(newcomer.name, newcomer.first_seq)
            self._making = newcomer
            written += self._route_lines([self.newcomers.remove(newcomer)])
            self._making = None
            self._routes.clear()  # cached routes of older lines may be wrong for newer lines, and the reverse
            made += 1
        self.routed_bytes += written
        return written

    def replay(self, seqs: SeqRange, change: Callable[[bytes], object]) -> None:
        """Route records from the WAL, except dropped records. Each log skips the records that it has.

        `change` carries out the record of a change of a topic.
        """
        for first, last in self._logs.wal_ranges(seqs):
            self._routes.clear()
            for lines in wal.read(self._context.data, first, last):
                for part, key in topic_changes.parts(lines):
                    if key in topic_changes.KEYS:
                        self.make_topics()  # named by lines that are older than the change
                        change(part)
                    self._route_lines([part])
                    # Bytes that a log has already count, too: until the next checkpoint every start reads them again.
                    self.routed_bytes += len(part)
                    self.make_topics()
                self._context.check()
        self.sorted_seq = max(self.sorted_seq, seqs.last)
        self._routes.clear()

    def _common_target(self, block: Block) -> Target:
        """Return the target of all lines of a block if the framer saw that they share a routing key; else None."""
        if not block.key_length or block.first_seq < self._table.marks_from <= block.last_seq:
            return None
        head = bytes(block.data[: _STAMP_BYTES + block.key_length])
        # hot loop: record.routing_key_of, without a copy of the line
        at = head.index(b"|", head.index(b"|") + 1) + 1
        return self._target(head[at : at + block.key_length], block.first_seq)

    def _take_turns(self, topic: Topic, block: Block) -> int:
        """Append a block of lines without a key, cut where the next partition's turn begins."""
        data, run, last_seq = bytes(block.data), topic.partitioner.run, block.last_seq
        turns: dict[int, list[bytes]] = {}
        seqs: dict[int, list[int]] = {}  # count, first and last seq by partition
        seq, at, whole_end = block.first_seq, 0, (len(data), last_seq + 1)
        while seq <= last_seq:
            following = min(seq - seq % run + run, last_seq + 1)
            end = start_of(data, following, (at, seq), whole_end)
            number = topic.turn_of(seq)
            turns.setdefault(number, []).append(data[at:end])
            mine = seqs.setdefault(number, [0, seq, 0])
            mine[0] += following - seq
            mine[2] = following - 1
            seq, at = following, end
        return sum(
            self._deliver(self._log_of(topic, number), b"".join(turns[number]), *mine) for number, mine in seqs.items()
        )

    def _route_lines(self, chunks: list[bytes]) -> int:
        """Sort consecutive stored lines by partition. This is the only loop over single messages."""
        if not chunks:
            return 0
        lines = b"".join(chunks).split(b"\n")
        lines.pop()
        routes = self._routes
        groups: defaultdict[Target, list[bytes]] = defaultdict(list)
        for line in lines:
            key = line.split(b"|", 3)[2]  # hot loop: record.routing_key_of, without the call
            try:
                target = routes[key]
            except KeyError:
                target = self._target(key, record.seq_of(line))
            groups[target].append(line)
        written = 0
        groups.pop(None, None)
        for target in [target for target in groups if isinstance(target, Newcomer)]:
            self.newcomers.add(target, groups.pop(target))
        for log, queued in _spread(groups, self._log_of).items():
            first, last = record.seq_of(queued[0]), record.seq_of(queued[-1])
            count = len(queued)
            queued.append(b"")  # the newline of the last line
            written += self._deliver(log, b"\n".join(queued), count, first, last)
        return written

    def _target(self, routing_key: bytes, seq: int) -> Target:
        target = self._routes.get(routing_key)
        if target is not None:
            return target
        route = resolve(self._table, routing_key, seq)
        topic = self._table.get(route.topic)
        if route.topic == DELETED:
            target = None
        elif topic is None or topic.is_gone or route.topic in self.newcomers:
            return self._newcomer(route.topic, seq)
        elif topic.partitions > 1 and route.is_spread:
            target = topic
        else:
            target = self._log_of(topic, topic.partition_of(route, seq))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        may_change = seq < self._table.marks_from and b".@" in routing_key  # in later records `.@` is a mark
        if len(routing_key) <= _MAX_ROUTE and not may_change:
            self._routes[routing_key] = target
        return target

    def _newcomer(self, name: bytes, seq: int) -> Newcomer:
        """Return the newcomer for a topic that record `seq` names.

        A topic with a dot in its name is in force at once, for all records from `seq` on.
        """
        topic = self._table.get(name)
        if b"." in name and (topic is None or topic.is_gone):
            self._in_force.put(Topic(name.decode(), 1, seq))
        return self.newcomers.named(name, seq)


def _spread(
    groups: dict[Target, list[bytes]], log_of: Callable[[Topic, int], PartitionLog]
) -> dict[PartitionLog, list[bytes]]:
    """Return all lines by log: lines without a key go to the partition of their seq, in order with the others."""
    logs = {target: lines for target, lines in groups.items() if isinstance(target, PartitionLog)}
    for topic, lines in groups.items():
        if isinstance(topic, Topic):
            turns: defaultdict[int, list[bytes]] = defaultdict(list)
            for line in lines:
                turns[topic.turn_of(int(line[: line.index(b"|")]))].append(line)  # hot loop: seq_of
            for number, mine in turns.items():
                log = log_of(topic, number)
                logs[log] = sorted(logs[log] + mine, key=record.seq_of) if log in logs else mine
    return logs
