"""All partition logs of a data directory: sorting lines into them, and bringing them back after a crash.

Owner       the router process (lock topics/.owner).
Invariant   `routed_seq` and everything before it is in its partition log (in the page cache; the checkpoint says what is on
            disk), but for what dropped.log names and those of deleted topics. Routing depends on the line and on the topics
            in force at its seq only.
Crash       See recover(): the logs are looked at, then the WAL is replayed from where the first of them ends.
Memory      State of a cold partition: one small object. Descriptors: at most `most_open`, the longest unused one closes.
"""

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from kmq import record
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.links.layout import Block
from kmq.log import (
    checkpoint,
    compaction,
    deletions,
    dropped,
    identity,
    reader,
    remnant,
    requests,
    segment,
    spare,
    topics,
    wal,
)
from kmq.log.disk import FULL, Buffer, WaitForRoom, find_tail, give_up, replace_file, sync_file, with_room
from kmq.log.index import IndexWriter, read_entries
from kmq.log.partition import Gap, PartitionLog, State, directory_of, fits, recover
from kmq.log.reader import DamageError, MisplacedError, is_stored
from kmq.log.segment import COMPACT, Limits, Segment
from kmq.logfmt import Log
from kmq.router.newcomers import AT_ONCE, Newcomer, Newcomers
from kmq.routing import DELETED, Table, Topic, resolve
from kmq.settings import MIB

MAX_OPEN = 1024  # logs that are kept open, where the process may have so many files
CHECKPOINT_NS = 30_000_000_000
ROLL_NS = 10_000_000_000  # between two looks whether a log to which nothing comes is over its limits
CHECKPOINT_BYTES = 64 * MIB  # bounds what a restart has to replay: ready in a second also after a kill
_STAMP_BYTES = 64  # a seq and a time before the routing key are shorter
_MAX_ROUTES = 1 << 16  # routing keys remembered; a producer with random keys must not fill the memory,
_MAX_ROUTE = 256  # nor one with long keys: bytes of a routing key that is remembered
_NEVER = 1 << 62  # a seq that no record has
_COARSE_NS = 50_000_000  # two changes of a directory within such a time may have the same mtime

# Where a routing key leads. A Topic: its partition depends on the seq. A Newcomer: it has to be made first.
# None: nowhere, for its topic was deleted after this record.
Target = PartitionLog | Topic | Newcomer | None


class Queues:
    """The partition logs, their topics and their checkpoint."""

    def __init__(
        self,
        data: str,
        wait_for_room: WaitForRoom,
        log: Log,
        limits: Limits | None = None,
        wal_is_synced: bool = True,
        most_open: int = MAX_OPEN,
    ) -> None:
        """`wal_is_synced`: what the WAL shows is on disk; else each checkpoint syncs it first, not to be ahead of it.

        `most_open`: logs that are kept open at a time.
        """
        self._most_open = min(most_open, MAX_OPEN)
        self.data, self.log = data, log
        self._limits, self._wal_is_synced = limits or Limits(), wal_is_synced
        self._topic_limits: dict[str, Limits] = {}  # of those topics that have their own
        self._wait_outside = wait_for_room
        self._may_retire = False  # not before all logs are known
        self._check: Callable[[], None] = lambda: None  # what recover() was given
        self.now_s: Callable[[], float] = time.time  # for retention by age: a clock that is trusted (clock.py)
        self.before_topic: Callable[[], object] = lambda: None  # called before a message makes a topic; may wait
        self.topics = Table()  # with those that were deleted
        self._deleted = deletions.Deleted.of(data)
        self.sorted_seq = 0  # up to here every record is in its log, or waits for its topic to be made
        self._newcomers = Newcomers()
        self._making: Newcomer | None = None  # whose lines are on the way to their log
        self._states: dict[tuple[str, int], State] = {}
        self._logs: dict[tuple[str, int], PartitionLog] = {}
        self._open: dict[PartitionLog, None] = {}  # in order of last use
        self._routes: dict[bytes, Target] = {}
        self._unsynced: set[PartitionLog] = set()  # since the last checkpoint
        self._unnoted: set[PartitionLog] = set()  # since the last tick
        self._dirty: list[str] = []  # files mended since the last checkpoint
        self._kept: list[Segment] = []  # last records that outlive their segments with the next checkpoint
        self._checkpointer = checkpoint.Checkpointer(data, wait_for_room, log)
        self._checkpoint_at = time.monotonic_ns()
        self._bytes_since = 0
        self._rolled_at = -ROLL_NS  # when `roll_over` looked last
        self._postponed = 0  # logs that it had no room to seal then
        self._topics_seen = 0  # mtime of topics/ when it was last read

    @property
    def count(self) -> int:
        """How many topics there are."""
        return sum(not topic.is_gone for topic in self.topics.values())

    @property
    def routed_seq(self) -> int:
        """Up to here every record is in its log."""
        oldest = self._making or self._newcomers.oldest
        return oldest.first_seq - 1 if oldest else self.sorted_seq

    # --- routing -------------------------------------------------------------------------------------------------

    def route(self, blocks: list[Block]) -> int:
        """Append consecutive blocks, all after sorted_seq, to their partition logs; bytes written.

        What names a topic that has to be made may wait for the next calls, of this or of `make_topics`.
        """
        written = 0
        mixed: list[bytes] = []
        for block in blocks:
            if block.key_length:  # what came before it first: a topic is in force from its first message on
                written += self._route_lines(mixed)
                mixed = []
            target = self._common_target(block)
            if target is None:
                mixed.append(bytes(block.data))
                continue
            written += self._deliver(target, block.data, block.count, block.first_seq, block.last_seq)
        written += self._route_lines(mixed)
        self._bytes_since += written
        self.sorted_seq = blocks[-1].last_seq
        written += self.make_topics(None if self._newcomers.is_too_much else AT_ONCE)
        if self._bytes_since > CHECKPOINT_BYTES and not self._checkpointer.busy:
            self._checkpoint([])  # not only once a second: that is 160 MB more for a restart to replay
        return written

    def make_topics(self, most: int | None = None) -> int:
        """Make the topics that messages have named, all or the oldest ones, and route what waits for them; bytes written."""
        written = made = 0
        while made != most and (newcomer := self._newcomers.oldest):
            self._check()
            topic = self._create_topic(newcomer.name, newcomer.first_seq)
            self._routes.clear()  # what newer lines have found may not have been in force for these, and the other way round
            self._put_in_force(topic)
            self._making = newcomer
            written += self._route_lines([self._newcomers.remove(newcomer)])
            self._making = None
            self._routes.clear()
            made += 1
        self._bytes_since += written
        return written

    @property
    def has_newcomers(self) -> bool:
        """Whether `make_topics` has something to do."""
        return bool(self._newcomers)

    def _common_target(self, block: Block) -> PartitionLog | None:
        """The one log where all lines of a block go, if the framer saw that they share their routing key."""
        if not block.key_length or block.first_seq < self.topics.marks_from <= block.last_seq:
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
        groups.pop(None, None)
        for target in [target for target in groups if isinstance(target, Newcomer)]:
            self._newcomers.add(target, groups.pop(target))
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
        route = resolve(self.topics, routing_key, seq)
        topic = self.topics.get(route.topic)
        if route.topic == DELETED:
            target = None
        elif topic is None or topic.is_gone or route.topic in self._newcomers:
            return self._newcomer(route.topic, seq)
        elif topic.partitions > 1 and route.is_spread:
            target = topic
        else:
            target = self._log_of(topic, topic.partition_of(route, seq))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        may_change = seq < self.topics.marks_from and b".@" in routing_key  # to the records behind there it is a mark
        if len(routing_key) <= _MAX_ROUTE and not may_change:
            self._routes[routing_key] = target
        return target

    def _newcomer(self, name: bytes, seq: int) -> Newcomer:
        """The topic to be made that a message names. With a dot in its name it is in force for all messages from this one on."""
        topic = self.topics.get(name)
        if b"." in name and (topic is None or topic.is_gone):
            self._put_in_force(Topic(name.decode(), 1, seq))
            self._routes.clear()
        return self._newcomers.named(name, seq)

    def _create_topic(self, name: bytes, seq: int) -> Topic:
        """A topic that a message brings into being: one partition, in force from its first message on.

        Where it has been declared and that message came before we looked, the declaration is adopted with it: routing
        to one partition under a file that says several would make a rebuilt queue another one.
        """
        topic = Topic(name.decode(), 1, seq)
        path = topics.toml_path(self.data, topic.name)
        if os.path.exists(path):
            return self._adopt(topic.name, seq)
        self.before_topic()

        def write() -> None:
            if b"." in name:  # others depend on its from_seq, which nobody could guess after a power cut
                topics.make(self.data, topic.name, topics.Declaration(1, seq))
                return
            os.makedirs(f"{self.data}/topics/{topic.name}/0", exist_ok=True)
            with open(path, "wb") as file:
                file.write(topics.Declaration(1, seq).text())

        with_room(path, self._wait_for_room, write)
        return topic

    def _log_of(self, topic: Topic, partition: int) -> PartitionLog:
        at = topic.name, partition
        log = self._logs.get(at)
        if log is None:
            state = self._states.setdefault(at, self._first_state(*at))
            limits = self._topic_limits.get(topic.name, self._limits)
            log = PartitionLog(self.data, *at, topic.log_names()[partition], state, self._wait_for_room, limits)
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
            if len(self._open) >= self._most_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.close()
            try:
                log.open(self.log.warn, check=self._check)
            except MisplacedError:
                raise  # its bytes may be the only copy of what belongs elsewhere
            except DamageError as err:
                self._heal_end(log, err)
                log.open(self.log.warn, check=self._check)
        self._open[log] = None

    def _heal_end(self, log: PartitionLog, damage: DamageError) -> None:
        """The end of a log is not what its index says: damaged, or a power cut has the index ahead. The WAL knows."""
        state, path, topic = log.state, log.path, self.topics[log.topic.encode()]
        with open(path, "r+b") as file:
            tail = find_tail(file.fileno(), min(damage.byte, state.active_bytes), is_stored)
            position, last = tail.size, tail.last
            every = read_entries(segment.index_path(path), 1 << 62)
            entries = [each for each, following in pairwise(every) if following.position <= position]
            offset, start = (entries[-1].offset, entries[-1].position) if entries else (state.base, 0)
            offset += os.pread(file.fileno(), position - start, start).count(b"\n")
            if not last and state.sealed:
                with open(state.sealed[-1].path, "rb") as sealed:
                    last = find_tail(sealed.fileno(), state.sealed[-1].size, is_stored).last
            low = record.seq_of(last) + 1 if last else topic.from_seq
            if wal.first_seq(self.data) <= low:
                file.seek(position)
                lines = b"".join(self._lines_of(topic, log.number, low, state.last_seq))
                if file.read() != lines:
                    self.log.warn("queue_healed", file=path, byte=position, first_seq=low, last_seq=state.last_seq)
                    file.seek(position)
                    file.write(lines)
                    file.truncate()
                state.size += position + len(lines) - state.active_bytes
                state.end_offset = offset + lines.count(b"\n")
            elif log not in self._unsynced:  # whole when it was last synced: no power cut has done this
                raise damage
        replace_file(segment.index_path(path), b"".join(entry.line() for entry in entries))
        self._unsynced.add(log)

    # --- recovery ------------------------------------------------------------------------------------------------

    def recover(self, high: int, check: Callable[[], None]) -> None:
        """Bring every log to what the WAL says up to `high`, which is durable. `check` is called again and again meanwhile."""
        self._check = check
        self._finish_deletions()
        seq, rows, since = self._load_checkpoint()
        if seq > high:
            raise CorruptError(
                f"{self.data}/router.ckpt has routed up to seq {seq}, but the ring durable has shown up to {high} only:"
                " the WAL was cut, or the ring is older than the WAL; remove the ring while the broker is down"
            )
        replay_from, has = seq + 1, wal.first_seq(self.data)
        for topic in self._load_topics(rows, since):
            for partition in range(topic.partitions):
                known = rows.get((topic.name, partition)) or self._first_state(topic.name, partition)
                replay_from = min(replay_from, self._examine(topic, partition, known, high, has <= seq + 1, has))
            check()
        routed = max((state.last_seq for state in self._states.values()), default=0)
        if replay_from < has and routed + 1 < has:  # else the queues have what is no longer in the WAL
            self.log.error("unrecoverable", first_seq=replay_from, last_seq=has - 1, reason="no longer in the WAL")
        replay_from = max(replay_from, has)
        if replay_from <= high:
            self.log.info("replay", from_seq=replay_from, to_seq=high)
        self.sorted_seq = replay_from - 1
        self.replay(replay_from, high, check)
        self.adopt_declarations()
        self._may_retire = True

    def _load_checkpoint(self) -> tuple[int, checkpoint.Rows, dict[str, int]]:
        try:
            return checkpoint.load(self.data)
        except (ValueError, LookupError) as err:
            self.log.warn("checkpoint_unreadable", reason=err, effect="the whole WAL is replayed")
            return 0, {}, {}

    def _load_topics(self, rows: checkpoint.Rows, since: dict[str, int]) -> list[Topic]:
        """The topics in force, with those whose directory is gone but which the checkpoint still knows."""
        topics.check_names(self.data)
        found: dict[str, Topic] = {}
        guessed: set[str] = set()
        for name in topics.names(self.data):
            declared = topics.read(self.data, name)
            path = topics.toml_path(self.data, name)
            if name not in since and not _is_empty(path) and (what := topics.fault(self.data, name, at_start=True)):
                raise CorruptError(f"{path}: {what}; run kmq verify --repair")  # other partitions would be other queues
            if declared.is_guessed and not _is_empty(path):
                guessed.add(name)
            if declared.from_seq is not None or name in since:
                found[name] = Topic(name, declared.partitions, declared.from_seq or 0)
                self._limit(name, declared)
        counts = Counter(name for name, _ in rows)
        for name, topic in found.items():
            knows = Topic(name, counts[name], since.get(name, topic.from_seq))
            differs = (topic.partitions, topic.from_seq) != (knows.partitions, knows.from_seq)
            if name in since and (differs or name in guessed):
                self.log.warn("topic_mended", topic=name, partitions=knows.partitions, from_seq=knows.from_seq)
                found[name] = knows  # the checkpoint has a crc; other partitions would be another queue
                self._write_toml(
                    knows, topics.Declaration(knows.partitions, knows.from_seq, topics.read(self.data, name).limits)
                )
        for name, partition in rows:
            if name not in found:
                self.log.warn("topic_missing", topic=name, effect="it is rebuilt from the WAL")
                found[name] = Topic(name, 1, since.get(name, 1))
            found[name].partitions = max(found[name].partitions, partition + 1)
        for topic in found.values():
            if _is_empty(topics.toml_path(self.data, topic.name)):  # a kill or a power cut came before its text
                os.makedirs(f"{self.data}/topics/{topic.name}", exist_ok=True)
                self._write_toml(topic, topics.Declaration(topic.partitions, topic.from_seq))
        gone = ((name.encode(), Topic.gone(name, lives)) for name, lives in self._deleted.lives.items())
        self.topics = Table(gone, identity.marks_from(self.data))
        for topic in found.values():
            self._put_in_force(topic)
        return list(found.values())

    def _put_in_force(self, topic: Topic) -> None:
        topic.lives = self._deleted.lives.get(topic.name, ())
        self.topics[topic.name.encode()] = topic

    def _first_state(self, name: str, partition: int) -> State:
        """Of a partition that has had no record yet: it goes on where a deleted one of its name has ended."""
        first = self._deleted.first_offset(name, partition)
        return State(first, 0, 0, first)

    def _limit(self, name: str, declared: topics.Declaration) -> None:
        """Take over the limits that a topic has in place of the settings."""
        try:
            limits = self._limits.but(declared.limits)
            if declared.limits or name in self._topic_limits:
                self._topic_limits[name] = limits
        except ConfigError as err:
            self.log.warn("topic_limits_ignored", file=topics.toml_path(self.data, name), reason=err)

    def _examine(
        self, topic: Topic, partition: int, known: State, high: int, wal_has_rest: bool, wal_first: int
    ) -> int:
        """Find the state of one log; returns the seq from which it needs the WAL (a high one: not at all).

        `wal_has_rest`: the WAL goes on where the checkpoint ends, or earlier.
        """
        directory = directory_of(self.data, topic.name, partition)
        segments = segment.survey(directory)
        retired = [each for each in segments if each.first < known.start]
        if retired:  # a kill came between the checkpoint and their removal
            segment.remove(retired)
            segments = segments[len(retired) :]
        if segments and known.start == segments[0].first - 1 and remnant.settle(directory, known.start):
            segments = segment.survey(directory)  # the kill came behind their removal
        state, needs = State(*known.values()), _NEVER
        was_there, changed = bool(segments), not fits(segments, known)
        if changed:
            state, needs = self._mend(topic, partition, known, segments, high, wal_has_rest, wal_first)
            segments = segment.survey(directory)
        if segments:
            state.holds(segments)
        self._states[topic.name, partition] = state
        if changed and segments:  # written by one who was killed: nobody has synced it
            self._unsynced.add(self._log_of(topic, partition))
        active = f"topics/{topic.name}/{partition}/{segment.name(state.base)}"
        leads = was_there and _leads_to(f"{self.data}/{topic.log_names()[partition]}", active)
        if not leads or (state.active_bytes and not os.path.exists(segment.index_path(f"{self.data}/{active}"))):
            log = self._log_of(topic, partition)
            self._use(log)
            self._unnoted.add(log)
        return needs

    def _mend(
        self,
        topic: Topic,
        partition: int,
        known: State,
        segments: list[Segment],
        high: int,
        wal_has_rest: bool,
        wal_first: int,
    ) -> tuple[State, int]:
        """Cut what is torn and fill what is missing in front of something good; (state, seq from which it needs the WAL)."""
        for each in segments:
            reader.check_place(each.path, each.first, by_seq=False)
        # Without a checkpoint nobody says whether retention took the front; the WAL may still have it then.
        start = known.start if known.last_seq or not segments or wal_first <= topic.from_seq else segments[0].first
        found = recover(segments, known, high, wal_has_rest, start)
        state, gaps, needs = found.state, found.gaps, _NEVER
        directory = directory_of(self.data, topic.name, partition)
        where = found.segments[-1].path if found.segments else f"{directory}/{segment.name(known.start)}"
        if found.cut:
            self.log.warn("torn_tail_cut", file=where, bytes=found.cut, last_seq=state.last_seq)
        for each in found.touched:
            try:  # what is not as its index says gets no new crc: readers refuse it until it is repaired
                reader.indexed_end(each.path, each.first, by_seq=False)
            except DamageError as err:
                self.log.error("damaged", file=each.path, reason=err)
                continue
            IndexWriter.complete(each.path, each.first, self._wait_for_room, self._check)
            self._dirty += [each.path, segment.index_path(each.path)]
        is_short = state.end_offset < known.end_offset
        if is_short:
            needs = state.last_seq + 1 if state.last_seq else topic.from_seq
        if is_short or gaps:
            self.log.warn(
                "queue_short",
                file=where,
                bytes=state.size,
                expected_bytes=known.size,
                rebuilt_from_seq=min([needs, *(gap.first_seq for gap in gaps)]),
            )
        if is_short and needs < wal_first:
            # A replay would go on with the next record that the WAL has, and number it wrongly: count back from the end.
            into = found.segments[-1] if found.segments else None
            gaps.append(Gap(state.end_offset, known.end_offset, needs, known.last_seq, into))
            state.end_offset, state.last_seq, needs = known.end_offset, known.last_seq, _NEVER
        elif is_short and not found.segments:
            state = self._first_state(topic.name, partition)  # from its first record on, also what retention had taken
        for gap in gaps:
            self._fill(topic, partition, gap, is_end=gap.end == state.end_offset)
        if gaps:
            segments = segment.survey(directory)
            state.start, state.size = segments[0].first, sum(each.size for each in segments)
        return state, needs

    def _fill(self, topic: Topic, partition: int, gap: Gap, is_end: bool) -> None:
        """Write from the WAL what is missing between two segments; what it no longer has is reported."""

        def blocks() -> Iterator[bytes]:
            return self._lines_of(topic, partition, gap.first_seq, gap.last_seq)

        has = sum(lines.count(b"\n") for lines in blocks())
        missing = gap.end - gap.first
        lost, skip = max(0, missing - has), max(0, has - missing)
        if lost:
            first_seq = next((record.seq_of(lines) for lines in blocks()), gap.last_seq + 1)
            self.log.error(
                "unrecoverable",
                topic=topic.name,
                partition=partition,
                first_offset=gap.first,
                last_offset=gap.first + lost - 1,
                first_seq=gap.first_seq,
                last_seq=first_seq - 1,
                reason="no longer in the WAL",
            )
        if lost == missing and not is_end:
            return
        state = State(gap.first + lost, gap.first_seq - 1, 0, gap.first + lost)
        if gap.into is not None and not lost:
            state = State(gap.first, gap.first_seq - 1, gap.into.size, gap.into.first)
        limits = self._topic_limits.get(topic.name, self._limits)
        log = PartitionLog(self.data, topic.name, partition, "", state, self._wait_for_room, limits)
        log.open(self.log.warn, was_cut=True)
        for lines in blocks():
            count = lines.count(b"\n")
            if skip >= count:
                skip -= count
                continue
            if skip:  # retention had taken them
                lines, count, skip = b"\n".join(lines.split(b"\n")[skip:]), count - skip, 0
            log.append(lines, count, record.seq_of(lines), record.seq_of(wal.last_line(lines)))
        log.seal()
        log.close()
        self._dirty += log.unsynced

    def _lines_of(self, topic: Topic, partition: int, low: int, high: int) -> Iterator[bytes]:
        """The records low…high of one partition, from the WAL."""
        name = topic.name.encode()
        for first, last in self._wanted(low, high):
            for block in wal.read(self.data, first, last):
                self._check()  # a gap may be a segment of ours and the whole WAL to look through, twice
                mine = []
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = resolve(self.topics, line.split(b"|", 3)[2], seq)
                    if route.topic == name and topic.partition_of(route, seq) == partition:
                        mine.append(line + b"\n")
                if mine:
                    yield b"".join(mine)

    def replay(self, low: int, high: int, check: Callable[[], None] = lambda: None) -> None:
        """Route low…high from the WAL, but for what dropped.log names; each log passes over what it has."""
        for first, last in self._wanted(low, high):
            self._routes.clear()
            for lines in wal.read(self.data, first, last):
                self._bytes_since += self._route_lines([lines])
                self.make_topics()
                check()
        self.sorted_seq = max(self.sorted_seq, high)
        self._routes.clear()

    def _wanted(self, low: int, high: int) -> list[tuple[int, int]]:
        """low…high without the dropped ranges, cut where a topic came into force."""
        changing = [topic for topic in self.topics.values() if topic.partitions > 1 or "." in topic.name or topic.lives]
        cuts = sorted({seq for topic in changing for seq in topic.bounds()})
        wanted = []
        for first, last in dropped.without(low, high, dropped.read(self.data, "durable")):
            starts = [first, *(seq for seq in cuts if first < seq <= last), last + 1]
            wanted += [(a, b - 1) for a, b in pairwise(starts)]
        return wanted

    # --- now and then --------------------------------------------------------------------------------------------

    def adopt_declarations(self) -> None:
        """Carry out what was asked meanwhile, and put topics that were declared in force, from the next seq on."""
        mtime = os.stat(f"{self.data}/topics").st_mtime_ns
        if mtime == self._topics_seen:
            return
        self._topics_seen = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
        for request in requests.waiting(self.data):
            self._carry_out(request)
        for name in topics.names(self.data):
            if self._is_in_force(name) or name.encode() in self._newcomers:
                continue
            self._adopt(name, self.sorted_seq + 1)

    def _is_in_force(self, name: str) -> bool:
        topic = self.topics.get(name.encode())
        return topic is not None and not topic.is_gone

    def _carry_out(self, request: requests.Request) -> None:
        try:
            if request.verb == requests.SET:
                self._set_limits(request.topic, request.limits)
            elif request.verb == requests.DELETE:
                self._delete(request.topic)
            else:
                raise ConfigError(f"unknown request {request.verb!r}")
        except (ConfigError, LookupError, ValueError) as err:
            self.log.warn("request_refused", file=request.path, topic=request.topic, reason=err)
        request.remove()

    def _set_limits(self, name: str, changes: dict[str, str]) -> None:
        """Change the limits in a topic's file, and those of its logs. Raises ConfigError where they cannot be."""
        topic = self._asked_for(name)
        path = topics.toml_path(self.data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_limits(file.read(), changes)
        own = topics.parse(text)
        limits = self._limits.but(own.limits)
        with_room(path, self._wait_for_room, lambda: replace_file(path, text.encode()))
        self._limit(name, own)
        for partition in range(topic.partitions):
            log = self._log_of(topic, partition)
            self._use(log)
            log.take_limits(limits, int(self.now_s() * 1e6))
            self._unsynced.add(log)
        self.log.info("topic_limits_set", topic=name, **{each: value or "unset" for each, value in changes.items()})

    def _asked_for(self, name: str) -> Topic:
        """The topic in force that a request names. Raises ConfigError where there is none."""
        if name in topics.names(self.data) and not self._is_in_force(name):
            self.make_topics()
            if not self._is_in_force(name):  # declared, and not looked at yet
                return self._adopt(name, self.sorted_seq + 1)
        if not self._is_in_force(name):
            raise ConfigError(f"topic {name!r} does not exist")
        return self.topics[name.encode()]

    def _delete(self, name: str) -> None:
        """Delete a topic with all records up to now, for good. Raises ConfigError where there is none."""
        topic = self._asked_for(name)
        self.make_topics()  # what waits for one may be older than the line that is drawn here
        self._checkpointer.finish()  # it syncs files by their names
        last_seq = self.sorted_seq
        ends = [self._log_of(topic, partition).state.end_offset for partition in range(topic.partitions)]
        every = deletions.read(self.data)
        has_had_records = topic.from_seq <= last_seq
        if has_had_records:
            if not self._wal_is_synced:  # else a power cut may give these numbers to other records
                sync_file(os.path.realpath(f"{self.data}/append.log"))
            said = deletions.Deletion(name, topic.from_seq, last_seq, deletions.now(), ends)
            self._write_deletions([*every, said])
        self._forget(topic)
        if not has_had_records:  # there is none by which a line could tell it from a later one of its name
            self._checkpoint([])
            self._checkpointer.finish()
        deletions.remove_files(self.data, topic, self._check)
        if not has_had_records:
            self._write_deletions(every)  # as it was: its time tells the framer that there is something to forget
        self.log.info("topic_deleted", topic=name, from_seq=topic.from_seq, last_seq=last_seq, messages=sum(ends))

    def _write_deletions(self, every: list[deletions.Deletion]) -> None:
        deletions.write(self.data, every, lambda path, action: with_room(path, self._wait_for_room, action))
        self._deleted = deletions.Deleted(every)

    def _forget(self, topic: Topic) -> None:
        """Have nothing of a topic in memory any more."""
        name = topic.name
        for at in [at for at in self._logs if at[0] == name]:
            log = self._logs.pop(at)
            log.close()
            self._open.pop(log, None)
            self._unsynced.discard(log)
            self._unnoted.discard(log)
        for at in [at for at in self._states if at[0] == name]:
            del self._states[at]
        directory = f"{self.data}/topics/{name}/"
        self._dirty = [path for path in self._dirty if not path.startswith(directory)]
        self._kept = [each for each in self._kept if not each.path.startswith(directory)]
        self._topic_limits.pop(name, None)
        del self.topics[name.encode()]
        if name in self._deleted.lives:
            self.topics[name.encode()] = Topic.gone(name, self._deleted.lives[name])
        self._routes.clear()

    def _finish_deletions(self) -> None:
        """What a kill has left of topics that were deleted."""
        every = deletions.read(self.data)
        if deletions.faults(self.data):
            self._write_deletions(every)  # one of the two files may be missing, or damaged
        for name, partitions in topics.left_over(self.data):
            self.log.warn("topic_deleted_again", topic=name, last_seq=self._deleted.last_seq(name))
            deletions.remove_files(self.data, Topic(name, partitions, 0), self._check)
        deletions.sweep(self.data, self._check)

    def _adopt(self, name: str, next_seq: int) -> Topic:
        """Put a declared topic in force: from `next_seq` on, unless its file says already from when."""
        declared = topics.read(self.data, name)
        if declared.is_guessed:
            self.log.warn("topic_guessed", file=topics.toml_path(self.data, name), partitions=declared.partitions)
        if declared.from_seq is None or declared.is_guessed:
            declared.from_seq = next_seq
        topic = Topic(name, declared.partitions, declared.from_seq)
        self._write_toml(topic, declared)
        self._limit(name, declared)
        self._put_in_force(topic)
        self._routes.clear()
        for partition in range(topic.partitions):
            self._check()
            self._use(self._log_of(topic, partition))
        self.log.info("topic_adopted", topic=name, partitions=topic.partitions, from_seq=topic.from_seq)
        return topic

    def _write_toml(self, topic: Topic, declared: topics.Declaration) -> None:
        path, text = topics.toml_path(self.data, topic.name), declared.text()
        with_room(path, self._wait_for_room, lambda: replace_file(path, text))

    def tick(self) -> None:
        """Once a second: provisional index lines, declarations, the checkpoint when it is due."""
        for log in self._unnoted:
            self._check()
            log.note_open_block()
        self._unnoted.clear()
        for log in self._open:
            if log.is_unlinked():
                raise RetryError(f"{log.path}: removed by somebody else; a restart rebuilds it from the WAL")
        self.adopt_declarations()
        if time.monotonic_ns() - self._rolled_at > ROLL_NS:
            self.roll_over()
        if not self._checkpointer.busy:
            compacted = self._install_compacted()
            is_due = time.monotonic_ns() - self._checkpoint_at > CHECKPOINT_NS or self._bytes_since > CHECKPOINT_BYTES
            if not self.retire() and (compacted or (is_due and self._unsynced)):
                self._checkpoint([])

    @property
    def is_checkpointing(self) -> bool:
        """Whether a checkpoint is being written, or waits for room."""
        return self._checkpointer.busy

    def roll_over(self) -> None:
        """Seal what is over its limits now, also where nothing comes. A log that has no room for that goes on as it is."""
        now_s, postponed = self.now_s(), 0
        for (name, partition), state in self._states.items():
            if state.end_offset - state.base < 2:  # of one record alone nothing could go
                continue
            limits = self._topic_limits.get(name, self._limits)
            if limits.is_over(state.active_bytes, partial(self._written_at, name, partition, state), now_s):
                self._check()
                postponed += not self._has_rolled(self._log_of(self.topics[name.encode()], partition))
        if postponed and not self._postponed:
            self.log.warn("roll_postponed", queues=postponed, reason="no room", effect="retention waits; tried again")
        self._postponed = postponed
        self._rolled_at = time.monotonic_ns() - ROLL_NS * bool(postponed)

    def _written_at(self, topic: str, partition: int, state: State) -> int:
        """When the active segment was written last, in µs: no record in it is younger. Cheaper than to read the last one."""
        path = f"{directory_of(self.data, topic, partition)}/{segment.name(state.base)}"
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_mtime_ns // 1000
        return _NEVER

    def _has_rolled(self, log: PartitionLog) -> bool:
        """Seal the active segment of a log; False where there is no room for that now."""
        try:
            self._use(log)
            self._unsynced.add(log)
            log.roll(give_up)
        except DamageError as err:  # it stays until it has been repaired, or somebody writes to it
            self.log.error("damaged", file=log.path, reason=err)
        except OSError as err:
            if err.errno not in FULL:
                raise
            return spare.release(self.data) and self._has_rolled(log)
        return True

    def retire(self) -> bool:
        """Take the segments that are too old or too many out of the books; they are deleted when the checkpoint is written.

        True where that is on its way.
        """
        if self._checkpointer.busy:
            return False
        gone: list[Segment] = []
        now_s = self.now_s()
        for (name, _), state in self._states.items():
            if state.sealed and state.end_offset - state.start > 1:
                count = self._topic_limits.get(name, self._limits).expired(state.sealed, state.active_bytes, now_s)
                is_all = count == len(state.sealed) and not state.active_bytes
                gone += self._retire_all(state) if is_all else state.retire(count)
        if gone:
            self._checkpoint(gone)
        return bool(gone)

    def _retire_all(self, state: State) -> list[Segment]:
        """As `retire`, where nothing would be left: the last record stays, because it says where we are."""
        last, first = state.sealed[-1], state.end_offset - 1
        kept = remnant.lay_out(self.data, last, first, by_seq=False) if last.first < first else None
        gone = state.retire(len(state.sealed) - (kept is None))
        if kept is not None:
            state.keep(kept)
            self._kept.append(kept)
            self._dirty += remnant.files(kept)
        return gone

    def _wait_for_room(self, path: str) -> None:
        """The disk is full, perhaps in the middle of an append: retention may make the room."""
        self.make_room()
        self._wait_outside(path)

    def make_room(self) -> None:
        """`retire`, in the middle of anything."""
        if self._may_retire:
            unsynced = set(self._unsynced)
            self.retire()
            self._unsynced |= unsynced  # what waits for the room has not been written yet
        else:
            spare.release(self.data)  # only by a start that ends does retention begin

    def _install_compacted(self) -> bool:
        """Take in the segments that compaction has laid out for us; whether a checkpoint has to follow."""
        is_due = False
        for each in compaction.waiting(self.data):
            topic = self.topics.get(each.topic.encode())
            is_ours = topic is not None and self._topic_limits.get(topic.name, self._limits).cleanup == COMPACT
            if topic is None or not is_ours or each.partition >= topic.partitions:
                self._discard_compacted(each, "topic.toml did not say compact when the router read it")
                continue
            log = self._log_of(topic, each.partition)
            if log.unsynced:  # after a crash sizes will not tell, so what is sealed has to be on disk: next time it is
                is_due = True
                continue
            bounds = [*(old.first for old in log.state.sealed), log.state.base]
            at = next((n for n, pair in enumerate(pairwise(bounds)) if pair == (each.first, each.end)), -1)
            if at < 0:
                self._discard_compacted(each, "retained or rebuilt meanwhile")
                continue
            old = log.state.sealed[at]
            saved = old.size - compaction.install(self.data, each)
            log.state.size -= saved
            old.size -= saved
            self.log.info("segment_compacted", file=old.path, bytes=old.size, saved=saved)
            is_due = True
        return is_due

    def _discard_compacted(self, which: compaction.Sealed, why: str) -> None:
        self.log.warn("compacted_discarded", file=which.place(self.data), reason=why)
        compaction.discard(self.data, which)

    def _checkpoint(self, retired: list[Segment]) -> None:
        dirty = self._dirty
        for log in self._unsynced:
            dirty += [log.path, *log.unsynced]
            log.unsynced.clear()
        if not self._wal_is_synced:
            dirty.append(os.path.realpath(f"{self.data}/append.log"))
        made = (topic for name, topic in self.topics.items() if name not in self._newcomers)
        content = checkpoint.text(self.routed_seq, self._states, made)
        self._checkpointer.start(content, dirty, retired, self._kept)
        self._unsynced.clear()
        self._dirty, self._kept = [], []
        self._checkpoint_at, self._bytes_since = time.monotonic_ns(), 0

    def close(self) -> None:
        """Everything routed is on disk and the checkpoint says so."""
        self.make_topics()
        self.tick()
        self._checkpointer.finish()
        if self._unsynced:
            self._checkpoint([])
            self._checkpointer.finish()
        for log in self._open:
            log.close()


def _leads_to(link: str, target: str) -> bool:
    try:
        return os.readlink(link) == target
    except OSError:
        return False


def _is_empty(path: str) -> bool:
    """Whether there is no file, or nothing in it."""
    try:
        return os.stat(path).st_size == 0
    except FileNotFoundError:
        return True


def _spread(
    groups: dict[Target, list[bytes]], log_of: Callable[[Topic, int], PartitionLog]
) -> dict[PartitionLog, list[bytes]]:
    """The groups by log alone: lines without a key go to the partition of their seq, in order among the others."""
    logs = {target: lines for target, lines in groups.items() if isinstance(target, PartitionLog)}
    touched: set[PartitionLog] = set()
    for topic, lines in groups.items():
        if isinstance(topic, Topic):
            for line in lines:
                seq = record.seq_of(line)
                log = log_of(topic, seq % topic.partitions)
                logs.setdefault(log, []).append(line)
                touched.add(log)
    for log in touched:
        logs[log].sort(key=record.seq_of)
    return logs
