"""All partition logs of a data directory: sorting lines into them, and bringing them back after a crash.

Owner       the router process (lock topics/.owner).
Invariant   `routed_seq` and everything before it is in its partition log (in the page cache; the checkpoint says what is on
            disk), but for what dropped.log names. Routing depends on the line and on the topics in force at its seq only.
Crash       See recover(): the logs are looked at, then the WAL is replayed from where the first of them ends.
Memory      State of a cold partition: one small object. Descriptors: at most MAX_OPEN, the longest unused one closes.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from kmq import record
from kmq.errors import CorruptError, RetryError
from kmq.links.layout import Block
from kmq.log import checkpoint, dropped, segment, topics, wal
from kmq.log.disk import Buffer, WaitForRoom, replace_file, with_room
from kmq.log.partition import EMPTY, PartitionLog, State, ends_as, log_path, recover, size_of
from kmq.logfmt import Log
from kmq.routing import Topic, resolve
from kmq.settings import MIB

MAX_OPEN = 256  # descriptors; far below the 1024 that a process has by default
CHECKPOINT_NS = 30_000_000_000
CHECKPOINT_BYTES = 64 * MIB  # bounds what a restart has to replay: ready in a second also after a kill
_STAMP_BYTES = 64  # a seq and a time before the routing key are shorter
_MAX_ROUTES = 1 << 16  # routing keys remembered; a producer with random keys must not fill the memory,
_MAX_ROUTE = 256  # nor one with long keys: bytes of a routing key that is remembered

Target = PartitionLog | Topic  # where a routing key leads; a Topic: its partition depends on the seq (no key)


class Queues:
    """The partition logs, their topics and their checkpoint."""

    def __init__(self, data: str, wait_for_room: WaitForRoom, log: Log) -> None:
        self.data, self.log = data, log
        self._wait_for_room = wait_for_room
        self.topics: dict[bytes, Topic] = {}
        self.routed_seq = 0
        self._states: dict[tuple[str, int], State] = {}
        self._logs: dict[tuple[str, int], PartitionLog] = {}
        self._open: dict[PartitionLog, None] = {}  # in order of last use
        self._routes: dict[bytes, Target] = {}
        self._unsynced: set[PartitionLog] = set()  # since the last checkpoint
        self._unnoted: set[PartitionLog] = set()  # since the last tick
        self._checkpointer = checkpoint.Checkpointer(data, wait_for_room)
        self._checkpoint_at = time.monotonic_ns()
        self._bytes_since = 0
        self._topics_seen = 0  # mtime of topics/ when it was last read

    # --- routing -------------------------------------------------------------------------------------------------

    def route(self, blocks: list[Block]) -> int:
        """Append consecutive blocks, all after routed_seq, to their partition logs; bytes written."""
        written = 0
        mixed: list[bytes] = []
        for block in blocks:
            target = self._common_target(block)
            if target is None:
                mixed.append(bytes(block.data))
                continue
            written += self._route_lines(mixed)
            mixed = []
            written += self._deliver(target, block.data, block.count, block.first_seq, block.last_seq)
        written += self._route_lines(mixed)
        self.routed_seq = blocks[-1].last_seq
        self._bytes_since += written
        return written

    def _common_target(self, block: Block) -> PartitionLog | None:
        """The one log where all lines of a block go, if the framer saw that they share their routing key."""
        if not block.key_length:
            return None
        head = bytes(block.data[: _STAMP_BYTES + block.key_length])
        at = head.index(b"|", head.index(b"|") + 1) + 1
        target = self._target(head[at : at + block.key_length], block.first_seq)
        return target if isinstance(target, PartitionLog) else None

    def _route_lines(self, chunks: list[bytes]) -> int:
        """Sort stored lines, which follow one another, by partition; the one loop over single messages."""
        if not chunks:
            return 0
        lines = b"".join(chunks).split(b"\n")
        lines.pop()
        routes = self._routes
        groups: defaultdict[Target, list[bytes]] = defaultdict(list)
        for line in lines:
            key = line.split(b"|", 3)[2]
            try:
                target = routes[key]
            except KeyError:
                target = self._target(key, record.seq_of(line))
            groups[target].append(line)
        written = 0
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
        name, key = resolve(self.topics, routing_key, seq)
        topic = self.topics.get(name) or self._create_topic(name, seq)
        if topic.partitions > 1 and not key:
            target = topic
        else:
            target = self._log_of(topic, topic.partition_of(key, seq))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        if len(routing_key) <= _MAX_ROUTE:
            self._routes[routing_key] = target
        return target

    def _create_topic(self, name: bytes, seq: int) -> Topic:
        """A topic that a message brings into being: one partition, in force from its first message on.

        Where it has been declared and that message came before we looked, the declaration is adopted with it: routing
        to one partition under a file that says several would make a rebuilt queue another one.
        """
        topic = Topic(name.decode(), 1, seq)
        path = topics.toml_path(self.data, topic.name)
        if os.path.exists(path):
            return self._adopt(topic.name, seq)

        def write() -> None:
            os.makedirs(f"{self.data}/topics/{topic.name}/0", exist_ok=True)
            with open(path, "wb") as file:
                file.write(topics.text(1, seq))

        with_room(path, self._wait_for_room, write)
        self.topics[name] = topic
        return topic

    def _log_of(self, topic: Topic, partition: int) -> PartitionLog:
        at = topic.name, partition
        log = self._logs.get(at)
        if log is None:
            state = self._states.setdefault(at, State(*EMPTY.values()))
            log = PartitionLog(self.data, *at, topic.log_names()[partition], state, self._wait_for_room)
            self._logs[at] = log
        return log

    def _deliver(self, log: PartitionLog, data: Buffer, count: int, first_seq: int, last_seq: int) -> int:
        if last_seq <= log.state.last_seq:
            return 0
        self._use(log)
        self._unsynced.add(log)
        self._unnoted.add(log)
        return log.append(data, count, first_seq, last_seq)

    def _use(self, log: PartitionLog) -> None:
        """Have it open, closing the longest unused one where there are too many."""
        if self._open.pop(log, self) is self:
            if len(self._open) >= MAX_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.close()
            log.open(self.log.warn)
        self._open[log] = None

    # --- recovery ------------------------------------------------------------------------------------------------

    def recover(self, high: int, check: Callable[[], None]) -> None:
        """Bring every log to what the WAL says up to `high`, which is durable. `check` is called now and then."""
        seq, rows = self._load_checkpoint()
        if seq > high:
            raise CorruptError(
                f"{self.data}/router.ckpt has routed up to seq {seq}, but the ring durable has shown up to {high} only:"
                " the WAL was cut, or the ring is older than the WAL; remove the ring while the broker is down"
            )
        replay_from = seq + 1
        for topic in self._load_topics(rows):
            for partition in range(topic.partitions):
                replay_from = min(replay_from, self._examine(topic, partition, rows, high))
            check()
        has = wal.first_seq(self.data)
        if replay_from < has:
            self.log.error("unrecoverable", first_seq=replay_from, last_seq=has - 1, reason="no longer in the WAL")
        if replay_from <= high:
            self.log.info("replay", from_seq=replay_from, to_seq=high)
        self.routed_seq = replay_from - 1
        self.replay(replay_from, high, check)
        self.adopt_declarations()

    def _load_checkpoint(self) -> tuple[int, checkpoint.Rows]:
        try:
            return checkpoint.load(self.data)
        except (ValueError, IndexError) as err:
            self.log.warn("checkpoint_unreadable", reason=err, effect="the whole WAL is replayed")
            return 0, {}

    def _load_topics(self, rows: checkpoint.Rows) -> list[Topic]:
        """The topics in force, with those whose directory is gone but which the checkpoint still knows."""
        found = {name: Topic(name, count, at) for name, count, at in topics.listing(self.data) if at is not None}
        for name, partition in rows:
            if name not in found:
                self.log.warn("topic_missing", topic=name, effect="it is rebuilt from the WAL")
                found[name] = Topic(name, 1, 1)
            found[name].partitions = max(found[name].partitions, partition + 1)
        for topic in found.values():
            if size_of(topics.toml_path(self.data, topic.name)) <= 0:  # 0: a kill or a power cut came before its text
                os.makedirs(f"{self.data}/topics/{topic.name}", exist_ok=True)
                self._write_toml(topic)
        self.topics = {topic.name.encode(): topic for topic in found.values()}
        return list(found.values())

    def _examine(self, topic: Topic, partition: int, rows: checkpoint.Rows, high: int) -> int:
        """Find the state of one log; returns the seq from which it needs the WAL (a high one: not at all)."""
        known = rows.get((topic.name, partition), EMPTY)
        path = log_path(self.data, topic.name, partition)
        size = size_of(path)
        state, needs = known, 1 << 62
        if size < 0:
            state = EMPTY
            if known.size:
                needs = topic.from_seq
        elif size != known.size or not ends_as(path, known):
            state, cut = recover(path, known if size != known.size else EMPTY, high)
            if cut:
                self.log.warn("torn_tail_cut", file=path, bytes=cut, last_seq=state.last_seq)
            if state.size < known.size:
                needs = state.last_seq + 1
        self._states[topic.name, partition] = State(*state.values())
        if state is not known and size >= 0:  # written by one who was killed: nobody has synced it
            self._unsynced.add(self._log_of(topic, partition))
        if needs <= known.last_seq:
            self.log.warn(
                "queue_short", file=path, bytes=max(size, 0), expected_bytes=known.size, rebuilt_from_seq=needs
            )
        link, index = f"{self.data}/{topic.log_names()[partition]}", segment.index_path(path)
        if size < 0 or not os.path.lexists(link) or (size and not os.path.exists(index)):
            log = self._log_of(topic, partition)
            self._use(log)
            self._unnoted.add(log)
        return needs

    def replay(self, low: int, high: int, check: Callable[[], None] = lambda: None) -> None:
        """Route low…high from the WAL, but for what dropped.log names; each log passes over what it has."""
        for first, last in self._wanted(low, high):
            self._routes.clear()
            for lines in wal.read(self.data, first, last):
                self._bytes_since += self._route_lines([lines])
                check()
        self.routed_seq = max(self.routed_seq, high)
        self._routes.clear()

    def _wanted(self, low: int, high: int) -> list[tuple[int, int]]:
        """low…high without the dropped ranges, cut where a topic came into force."""
        cuts = sorted({t.from_seq for t in self.topics.values() if t.partitions > 1 or "." in t.name})
        wanted = []
        for first, last in dropped.without(low, high, dropped.read(self.data, "durable")):
            starts = [first, *(seq for seq in cuts if first < seq <= last), last + 1]
            wanted += [(a, b - 1) for a, b in pairwise(starts)]
        return wanted

    # --- now and then --------------------------------------------------------------------------------------------

    def adopt_declarations(self) -> None:
        """Put topics that were declared meanwhile in force, from the next seq on."""
        mtime = os.stat(f"{self.data}/topics").st_mtime_ns
        if mtime == self._topics_seen:
            return
        self._topics_seen = mtime
        for name in topics.names(self.data):
            if name.encode() in self.topics:
                continue
            self._adopt(name, self.routed_seq + 1)

    def _adopt(self, name: str, next_seq: int) -> Topic:
        """Put a declared topic in force: from `next_seq` on, unless its file says already from when."""
        partitions, from_seq = topics.load(self.data, name)
        topic = Topic(name, partitions, next_seq if from_seq is None else from_seq)
        self._write_toml(topic)
        self.topics[name.encode()] = topic
        self._routes.clear()
        for partition in range(partitions):
            self._use(self._log_of(topic, partition))
        self.log.info("topic_adopted", topic=name, partitions=partitions, from_seq=topic.from_seq)
        return topic

    def _write_toml(self, topic: Topic) -> None:
        path = topics.toml_path(self.data, topic.name)
        text = topics.text(topic.partitions, topic.from_seq)
        with_room(path, self._wait_for_room, lambda: replace_file(path, text))

    def tick(self) -> None:
        """Once a second: provisional index lines, declarations, the checkpoint when it is due."""
        for log in self._unnoted:
            log.note_open_block()
        self._unnoted.clear()
        for log in self._open:
            if log.is_unlinked():
                raise RetryError(f"{log.path}: removed by somebody else; a restart rebuilds it from the WAL")
        self.adopt_declarations()
        due = time.monotonic_ns() - self._checkpoint_at > CHECKPOINT_NS or self._bytes_since > CHECKPOINT_BYTES
        if due and self._unsynced and not self._checkpointer.busy:
            self._checkpoint()

    def _checkpoint(self) -> None:
        rows = [b"%b|%d|%d|%d|%d\n" % (at[0].encode(), at[1], *state.values()) for at, state in self._states.items()]
        self._checkpointer.start(self.routed_seq, rows, [log.path for log in self._unsynced])
        self._unsynced.clear()
        self._checkpoint_at, self._bytes_since = time.monotonic_ns(), 0

    def close(self) -> None:
        """Everything routed is on disk and the checkpoint says so."""
        self.tick()
        self._checkpointer.finish()
        if self._unsynced:
            self._checkpoint()
            self._checkpointer.finish()
        for log in self._open:
            log.close()


def _spread(
    groups: dict[Target, list[bytes]], log_of: Callable[[Topic, int], PartitionLog]
) -> dict[PartitionLog, list[bytes]]:
    """The groups by log alone: lines without a key go to the partition of their seq, in order among the others."""
    logs = {target: lines for target, lines in groups.items() if isinstance(target, PartitionLog)}
    touched: set[PartitionLog] = set()
    for topic, lines in groups.items():
        if isinstance(topic, Topic):
            for line in lines:
                log = log_of(topic, topic.partition_of(b"", record.seq_of(line)))
                logs.setdefault(log, []).append(line)
                touched.add(log)
    for log in touched:
        logs[log].sort(key=record.seq_of)
    return logs
