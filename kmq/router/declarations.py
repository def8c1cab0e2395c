"""Puts topics in force: those declared in topic.toml, named by a message, or known by the checkpoint of the last run.

Example: the first line `17|…|orders|…` names a topic that does not exist. `create(b"orders", 17)` makes topics/orders
with one partition, in force from seq 17 on.
Making such a topic takes six inodes and some milliseconds. Thousands of new topics would delay the lines of all other
topics. So lines of existing topics go first. A topic that is not made yet is a newcomer, with the lines that wait for
it. A few newcomers are made at a time.

Owner       the router process: no other process writes the topic.toml of a topic in force.
Invariant   A topic's `from_seq` is on disk before a record is routed by it, except for topics without a dot in their
            name that a message created. Those have one partition from the start, as their directory shows, and the
            next checkpoint syncs their file.
            A line of a topic is in its newcomer or in its log, never in both. The lines stay in order. All records
            before `first_seq` of the oldest newcomer are in their logs. No checkpoint covers more than these records.
Crash       Every topic.toml is replaced atomically. A kill may leave a topic that a message created half made: the next
            start makes it again from the same message. The checkpoint's row of a topic outlives its directory.
            Waiting lines are in memory only. The next start reads them from the WAL.
Memory      At most MOST_BYTES of waiting lines. If there are more, all topics are made before anything else is routed.
"""

import os
from collections import Counter
from collections.abc import Callable

from kmq.config.values import MIB
from kmq.errors import CorruptError
from kmq.files import make_directory, with_room
from kmq.log import checkpoint, deletions, topic_changes, topics
from kmq.log.topics import Since
from kmq.message.routing import CRC32, Topic
from kmq.router.in_force import Context, TopicsInForce
from kmq.router.logs import PartitionLogs


class Declarations:
    """Puts topics in force, and writes their declarations."""

    def __init__(
        self, context: Context, in_force: TopicsInForce, logs: PartitionLogs, before_topic: Callable[[], object]
    ) -> None:
        """Take the parts of the router. `before_topic` is called before a message makes a topic, and may wait."""
        self._context, self._in_force, self._logs, self._before_topic = context, in_force, logs, before_topic
        self._refused: set[str] = set()

    def create(self, name: bytes, seq: int) -> Topic:
        """Make a topic that a message named: one partition, in force from that message on.

        If the topic is declared without a record, the declaration is adopted with that message: routing to one
        partition under a file that says several would make a rebuilt queue differ. A declaration whose record is still
        to come is too late and is replaced. In a shard every declaration is replaced, because the other replicas do not
        have it.
        """
        topic = Topic(name.decode(), 1, seq)
        data = self._context.data
        path = topics.toml_path(data, topic.name)
        is_there = os.path.exists(path)
        is_late = is_there and self._context.are_recorded and topic_changes.asks_to_create(data, topic.name)
        if is_there and not is_late and self._context.in_shard:
            self.refuse(topic.name)
            is_late = True
        if is_there and not is_late:
            return self.adopt(topic.name, seq)
        self._before_topic()

        def write() -> None:
            # Synced, because other topics depend on its from_seq, which cannot be guessed after a power cut; and because
            # a file that a message replaces must not come back.
            if b"." in name or is_late:
                topics.make(data, topic.name, topics.Declaration(1, seq))
                return
            make_directory(f"{data}/topics/{topic.name}/0")
            with open(path, "wb") as file:
                file.write(topics.Declaration(1, seq).text())

        with_room(path, self._context.wait_for_room, write)
        self._in_force.put(topic)
        self._logs.log_of(topic, 0).unsynced.append(path)
        return topic

    def adopt(self, name: str, next_seq: int) -> Topic:
        """Put a declared topic in force, from `next_seq` on unless its file already has a from_seq."""
        logger = self._context.logger
        declared = topics.read(self._context.data, name)
        if declared.is_guessed:
            path = topics.toml_path(self._context.data, name)
            logger.warn("topic_guessed", file=path, partitions=declared.partitions)
        if declared.from_seq is None or declared.is_guessed:
            declared.from_seq = next_seq
        return self.put_in_force(name, declared)

    def put_in_force(self, name: str, declared: topics.Declaration) -> Topic:
        """Put a topic in force as declared, with its from_seq. Its directory may exist already."""
        logger, data = self._context.logger, self._context.data
        topic = declared.topic(name)
        self._in_force.raise_format_for(topic)
        with_room(
            topics.toml_path(data, name),
            self._context.wait_for_room,
            lambda: topics.make(data, name, declared),
        )
        self._in_force.set_limits(name, declared)
        self._in_force.put(topic)
        for log in self._logs.of_topic(topic):
            self._context.check()
            self._logs.use(log)
        logger.info("topic_adopted", topic=name, partitions=topic.partitions, from_seq=topic.from_seq)
        return topic

    def refuse(self, name: str) -> None:
        """Report, once, a topic.toml written by hand in a shard. Remove it if its directory has no other file."""
        path = topics.toml_path(self._context.data, name)
        if name not in self._refused and not self._is_blank(name):
            self._refused.add(name)
            reason = "in a shard a topic is declared by its record only; run kmq topics create where the leader is"
            self._context.logger.warn("request_refused", file=path, topic=name, reason=reason)
        declared = topics.read(self._context.data, name)
        if declared.from_seq is None and os.listdir(os.path.dirname(path)) == ["topic.toml"]:
            self._refused.discard(name)
            deletions.detach(self._context.data, Topic(name, 1, 0))

    def mend(self, name: str) -> None:
        """Write the file of a topic in force again if it cannot be read; without it nothing could change the topic."""
        if topics.read(self._context.data, name).is_guessed:
            self._mend(self._in_force.table[name.encode()])

    def _mend(self, topic: Topic) -> None:
        self._write_again(topic, checkpoint.recorded_topics(self._context.data))
        self._context.logger.warn(
            "topic_mended", topic=topic.name, partitions=topic.partitions, from_seq=topic.from_seq
        )

    def _write_again(self, topic: Topic, recorded: checkpoint.RecordedTopics) -> None:
        """Write the file of a topic again. Keep its limits; if it cannot be read, take the limits from the records."""
        data, name = self._context.data, topic.name
        declared = topics.read(data, name)
        record = recorded.get((name, topic.from_seq)) if declared.is_guessed else None
        limits = record.limits if record else {} if declared.is_guessed else declared.limits
        declared = topics.Declaration.of(topic, limits)
        self._context.replace(topics.toml_path(data, name), declared.text())
        self._in_force.set_limits(name, declared)

    # --- at a start --------------------------------------------------------------------------------------------------

    def load(self, rows: checkpoint.Rows, since: dict[str, Since], seq: int) -> list[Topic]:
        """Put all topics in force, also topics whose directory is gone and that only the checkpoint still knows.

        `seq`: the last seq that the checkpoint covers. In a shard the checkpoint has all topics in force at that seq. A
        file with an earlier from_seq whose topic is not in the checkpoint was written by hand.
        """
        topics.check_names(self._context.data)
        recorded = checkpoint.recorded_topics(self._context.data)
        since, in_checkpoint = checkpoint.complete(self._context.data, rows, since, recorded), since
        found: dict[str, Topic] = {}
        guessed: set[str] = set()
        for name in topics.names(self._context.data):
            declared = self._read(name, is_known=name in in_checkpoint)
            if declared.is_guessed and not self._is_blank(name):
                guessed.add(name)
            from_seq = declared.from_seq
            is_early = from_seq is not None and from_seq <= seq and not declared.is_guessed
            if self._context.in_shard and is_early and name not in in_checkpoint:
                self.refuse(name)
            elif from_seq is not None or name in since:
                found[name] = declared.topic(name, 0)
                self._in_force.set_limits(name, declared)
        self._correct(found, guessed, rows, since)
        self._restore_missing(found, rows, since)
        blank = [topic for topic in found.values() if self._is_blank(topic.name)]
        for topic in blank:  # a kill or a power cut prevented the write of its text
            make_directory(f"{self._context.data}/topics/{topic.name}")
            self._write_again(topic, recorded)
        for topic in found.values():
            if topic.grown:  # a kill may have prevented this
                topics.drop_single_link(self._context.data, topic)
        self._in_force.load(found.values())
        return list(found.values())

    def _read(self, name: str, is_known: bool) -> topics.Declaration:
        """Return a topic's declaration. Raises CorruptError if it is damaged and the checkpoint does not know it."""
        data = self._context.data
        declared = topics.read(data, name)
        if not is_known and not self._is_blank(name) and (what := topics.fault(data, name, at_start=True)):
            path = topics.toml_path(data, name)
            # A guessed number of partitions would route keys to other queues.
            raise CorruptError(f"{path}: {what}; run kmq verify --repair")
        return declared

    def _is_blank(self, name: str) -> bool:
        """Return True if a topic's file is missing, empty, or all NULs (a power cut may leave an unsynced file so)."""
        try:
            with open(topics.toml_path(self._context.data, name), "rb") as file:
                return not file.read().strip(b"\0")
        except FileNotFoundError:
            return True

    def _correct(
        self, found: dict[str, Topic], guessed: set[str], rows: checkpoint.Rows, since: dict[str, Since]
    ) -> None:
        """Correct each file that differs from the checkpoint: the checkpoint is right, because it has a crc.

        `since`: what the checkpoint says, completed by the records. If the topic has grown since the checkpoint, the
        file is right: that part of it has a crc, too.
        """
        counts = Counter(name for name, _ in rows)
        for name in [name for name in found if name in since]:
            topic = found[name]
            recorded = Topic(name, counts[name] or topic.partitions, since[name].from_seq, (), *since[name][1:])
            is_same = topic.from_seq == recorded.from_seq and topic.partitioner == recorded.partitioner
            is_same &= topic.partitions == recorded.partitions and list(topic.grown) == list(recorded.grown)
            if name in guessed or not (is_same or topics.has_grown(recorded, topic)):
                found[name] = recorded  # a wrong number of partitions would route keys to other queues
                self._mend(recorded)

    def _restore_missing(self, found: dict[str, Topic], rows: checkpoint.Rows, since: dict[str, Since]) -> None:
        for name, partition in rows:
            if name not in found:
                self._context.logger.warn("topic_missing", topic=name, effect="it is rebuilt from the WAL")
                recorded = since.get(name, Since(1, (), CRC32))
                found[name] = Topic(name, 1, recorded.from_seq, (), recorded.grown, recorded.partitioner)
            found[name].partitions = max(found[name].partitions, partition + 1)


# --- newcomers -------------------------------------------------------------------------------------------------------

MADE_AT_ONCE = 16  # topics made between two reads of the ring
MOST_BYTES = 8 * MIB


class Newcomer:
    """A topic to be made, and its waiting lines."""

    __slots__ = ("first_seq", "lines", "name")

    def __init__(self, name: bytes, first_seq: int) -> None:
        self.name, self.first_seq = name, first_seq
        self.lines: list[bytes] = []


class Newcomers:
    """All newcomers, in the order of their first messages."""

    def __init__(self) -> None:
        self._by_name: dict[bytes, Newcomer] = {}
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    @property
    def oldest(self) -> Newcomer | None:
        return next(iter(self._by_name.values()), None)

    @property
    def is_too_much(self) -> bool:
        """Return True if so many bytes wait that all newcomers must be made now."""
        return self._nbytes > MOST_BYTES

    def named(self, name: bytes, seq: int) -> Newcomer:
        """Return the newcomer of this name; make it if it is new, with `seq` as its first record."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Newcomer(name, seq)
        return found

    def add(self, newcomer: Newcomer, lines: list[bytes]) -> None:
        """Add lines that wait for a newcomer."""
        newcomer.lines += lines
        self._nbytes += sum(map(len, lines))

    def remove(self, newcomer: Newcomer) -> bytes:
        """Remove a newcomer whose topic is made; return its lines as one text."""
        del self._by_name[newcomer.name]
        self._nbytes -= sum(map(len, newcomer.lines))
        return b"\n".join([*newcomer.lines, b""])
