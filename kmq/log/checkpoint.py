"""router.ckpt: the seq up to which all partition logs are on disk, and what each log then held.

Also decides which copy counts where files differ: about a topic (records of topic changes), or about the last seq.

    <WAL seq>
    topic|partition|end_offset|last_seq|bytes      one row per partition
    topic|from_seq|first_offset,…                  one row per topic, with the first offset of each partition
    topic|from_seq|first_offset,…|grown            if it has grown: from which seqs on (topics.py)
    topic|partitioner                              one row per topic, if one of them has grown or does not have crc32
    crc32|<crc32 of the lines above>

The rows of a topic that was deleted later are ignored (kmq/log/deletions.py).
A damaged checkpoint is ignored, because one wrong digit would number records wrongly. If a topic has no row for its
partitioner, a release without partitioners and growth may have written the file: `complete` adds both. `bytes` counts
all segments from `first_offset` on, so a start sees by their sizes alone if an earlier one was cut or is missing.
Retention first moves `first_offset` here, then deletes: a segment missing after `first_offset` was lost, not deleted.
`from_seq` and the partitioner are in topic.toml too; here they outlive the directory.

Invariant   Every record up to the WAL seq lies in its partition log, and those logs were fsynced before the file got
            its name. So a start replays the WAL from there, and a log smaller than its row was cut later.
            No seq is given out twice (`agreed_end`).
Crash       The file is replaced atomically: the old or the new is there. If there is none, the WAL is replayed from its
            beginning. The next start deletes segments before `first_offset` that still exist.
Mechanism   The fsyncs run in a thread beside the routing, because they release the interpreter lock. The rows are a
            snapshot; after it the logs only grow.
"""

import os
import threading
import zlib
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby

from kmq.errors import CorruptError, RetryError
from kmq.files import WaitForRoom, replace_file, sync_directory, with_room
from kmq.log import dedupe_file, deletions, reader, remnant, segment, topic_changes, topics, wal
from kmq.log.damage import DamageError
from kmq.log.partition import EMPTY, PartitionState, directory_of
from kmq.log.remnant import Remnant
from kmq.log.segment import Segment
from kmq.log.topics import Since
from kmq.logfmt import Logger
from kmq.message.routing import CRC32, PARTITIONERS, Table, Topic

Rows = dict[tuple[str, int], PartitionState]


def load(data: str, content: bytes | None = None) -> tuple[int, Rows, dict[str, Since]]:
    """Return (WAL seq, rows, since when each topic is in force); empty if there is no file.

    `content`: of the file, if it was read before. Raises ValueError or LookupError if the file is damaged.
    """
    body = _read(data) if content is None else _checked(content)
    if not body:
        return 0, {}, {}
    lines = body.decode("ascii").splitlines()
    rows: Rows = {}
    since: dict[str, Since] = {}
    for line in lines[1:]:
        topic, *fields = line.split("|")
        if len(fields) == 1:
            since[topic] = since[topic]._replace(partitioner=PARTITIONERS[fields[0]])
        elif len(fields) in (2, 3):
            since[topic] = Since(int(fields[0]), topics.decode_growth(fields[2]) if fields[2:] else ())
            for partition, first in enumerate(fields[1].split(",")):
                state = rows[topic, partition]
                rows[topic, partition] = PartitionState(state.end_offset, state.last_seq, state.size, int(first))
        else:
            partition, end_offset, last_seq, size = map(int, fields)
            rows[topic, partition] = PartitionState(end_offset, last_seq, size)
    deleted = deletions.Deleted.of(data)
    since = {topic: each for topic, each in since.items() if each.from_seq > deleted.last_seq(topic)}
    gone = deleted.lives.keys() - since.keys()
    return int(lines[0]), {at: state for at, state in rows.items() if at[0] not in gone}, since


def text(seq: int, states: Rows, table: Iterable[Topic]) -> bytes:
    """Return the content of router.ckpt."""
    rows = [f"{seq}\n"]
    rows += [f"{at[0]}|{at[1]}|{s.end_offset}|{s.last_seq}|{s.size}\n" for at, s in states.items()]
    here = [topic for topic in table if not topic.is_gone]
    are_named = any(topic.is_rerouted for topic in here)
    for topic in here:
        starts = [str(states.get((topic.name, number), EMPTY).start) for number in range(topic.partitions)]
        grown = f"|{topics.encode_growth(topic.grown)}" if topic.grown else ""
        rows.append(f"{topic.name}|{topic.from_seq}|{','.join(starts)}{grown}\n")
        if are_named:
            rows.append(f"{topic.name}|{topic.partitioner.name}\n")
    body = "".join(rows).encode()
    return b"%bcrc32|%d\n" % (body, zlib.crc32(body))


def _read(data: str) -> bytes:
    """Return the lines except the last; b"" if there is no file. Raises ValueError if the crc is wrong."""
    try:
        with open(f"{data}/router.ckpt", "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return b""
    return _checked(content)


def _checked(content: bytes) -> bytes:
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if not body or content != b"%bcrc32|%d\n" % (body, zlib.crc32(body)):
        raise ValueError("its crc does not match")
    return body


def routed_seq(data: str) -> int:
    """Return the WAL seq of the checkpoint on disk; 0 if there is no readable checkpoint."""
    try:
        return int(_read(data).partition(b"\n")[0] or b"0")
    except ValueError:
        return 0


def wal_is_free_up_to(data: str) -> int:
    """Return the seq up to which neither the router nor the dedupe table needs the WAL after a crash."""
    return min(routed_seq(data), dedupe_file.checkpoint_seq(data))


# --- the writer ------------------------------------------------------------------------------------------------------


_CHECK_S = 0.5


class Checkpointer:
    """Writes router.ckpt in a thread, one checkpoint at a time."""

    def __init__(self, data: str, wait_for_room: WaitForRoom, log: Logger) -> None:
        self._data, self._wait_for_room, self._log = data, wait_for_room, log
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Return True while a checkpoint is being written. Raises RetryError if the last one failed."""
        if self._error is not None:
            raise RetryError(f"checkpoint failed: {self._error}") from self._error
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: bytes, dirty: list[str], retired: list[Segment], remnants: Sequence[Remnant] = ()) -> None:
        """In a thread: sync the files `dirty`, write `content`, then delete the segments `retired`.

        `remnants`: copies of the ends of such segments, which then get their names (remnant.py).
        """
        self._thread = threading.Thread(target=self.run, args=(content, dirty, retired, remnants), daemon=True)
        self._thread.start()

    def finish(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the checkpoint is written; `check` is called meanwhile. Raises RetryError if that failed."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_CHECK_S)
            check()
        _ = self.busy

    def _wait(self, path: str) -> None:
        if not remnant.release_spare(self._data):
            self._wait_for_room(path)

    def run(self, content: bytes, dirty: list[str], retired: list[Segment], remnants: Sequence[Remnant] = ()) -> None:
        """Do in this thread what `start` does in another. An error is raised by `busy` and `finish`."""
        try:
            for copy in remnants:
                with_room(copy.segment.path, self._wait, copy.fill)
            for path in dirty:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            directories = {os.path.dirname(path) for path in dirty}
            for directory in directories | {os.path.dirname(d) for d in directories}:
                sync_directory(directory)
            if dirty:
                sync_directory(f"{self._data}/topics")
            path = f"{self._data}/router.ckpt"
            with_room(path, self._wait, lambda: replace_file(path, content))
            for _, group in groupby(retired, lambda part: os.path.dirname(part.path)):
                segment.remove(gone := list(group))
                for part in gone:
                    self._log.info("segment_deleted", file=part.path, first_offset=part.first, bytes=part.size)
            for copy in remnants:
                remnant.settle(os.path.dirname(copy.segment.path))
        except Exception as err:
            self._error = err


# --- what the records of topic changes say ---------------------------------------------------------------------------
# Which copy counts, for the partitioner and the growth of a topic:
#
#     router.ckpt     if it names the partitioner of the topic
#     the records     else: such a checkpoint may be of a release that knew neither, and that release or the one after it
#                     may have written topic.toml again
#     topic.toml      if there is no record of the topic's declaration


class RecordedTopic:
    """What the records say of one topic, which is in force from one seq on."""

    __slots__ = ("grown", "limits", "partitioner", "partitions")

    def __init__(self, change: topic_changes.TopicChange) -> None:
        self.partitions, self.limits = change.partitions, change.limits
        self.partitioner = PARTITIONERS[change.values.get("partitioner", CRC32.name)]
        self.grown: list[tuple[int, int]] = []


RecordedTopics = Mapping[tuple[str, int], RecordedTopic]  # topic, from_seq


def recorded_topics(data: str) -> RecordedTopics:
    """Return every topic that a record has declared, deleted topics too; {} if the records are damaged."""
    found: dict[tuple[str, int], RecordedTopic] = {}
    try:
        for change in _recorded_changes(data, topic_changes.KEY):
            at = change.topic, change.incarnation
            try:
                if change.verb == topic_changes.CREATE:
                    found.setdefault((change.topic, change.seq), RecordedTopic(change))
                elif change.verb == topic_changes.SET and at in found:
                    topic_changes.apply(found[at].limits, change.limits)
                elif change.verb == topic_changes.GROW and at in found and change.partitions > found[at].partitions:
                    found[at].grown.append((change.seq, found[at].partitions))
                    found[at].partitions = change.partitions
            except (LookupError, ValueError):  # the router has refused it
                continue
    except DamageError:
        return {}
    return found


class RecordedStart(namedtuple("RecordedStart", ("offset", "seq"))):
    """The offset at which a record lets a partition begin (or at its end, if that is lower); the record's seq."""

    __slots__ = ()


def recorded_starts(data: str) -> dict[tuple[str, int, int], list[RecordedStart]]:
    """Return (topic, from_seq, partition) → where the records let it begin; {} if the records are damaged.

    A later record with a lower offset is listed after the earlier ones, because their offsets may have been above the
    end.
    """
    found: dict[tuple[str, int, int], list[RecordedStart]] = {}
    try:
        for change in _recorded_changes(data, topic_changes.START_KEY):
            with suppress(ValueError):  # the router has refused it
                for number, offset in change.starts.items():
                    starts = found.setdefault((change.topic, change.incarnation, number), [])
                    while starts and starts[-1].offset <= offset:
                        starts.pop()
                    starts.append(RecordedStart(offset, change.seq))
    except DamageError:
        return {}
    return found


def highest(starts: Sequence[RecordedStart]) -> int:
    """Return the highest offset among the starts of a partition; 0 without a start."""
    return starts[0].offset if starts else 0


def emptied_at(starts: Sequence[RecordedStart], end: int) -> int:
    """Return the seq of the last start that leaves nothing before `end`; 0 if there is none."""
    return max((start.seq for start in starts if start.offset >= end), default=0)


def _recorded_changes(data: str, key: bytes) -> Iterator[topic_changes.TopicChange]:
    log = reader.partition(data, topic_changes.TOPIC, 0)
    for _, lines in log.chunks(log.first_offset):
        yield from topic_changes.changes(lines, (key,))


def complete(data: str, rows: Rows, since: Mapping[str, Since], recorded: RecordedTopics) -> dict[str, Since]:
    """Return `since` completed from records and topic.toml: missing partitioners and growth, and topics that it lacks.

    `rows`, `since`: what router.ckpt says.
    """
    counts = Counter(name for name, _ in rows)
    found = dict(since)
    for name in {*since, *topics.names(data)}:
        stated = since.get(name)
        if stated and stated.partitioner:
            continue
        declared = topics.read(data, name)
        from_seq = stated.from_seq if stated else declared.from_seq
        if from_seq is None or (declared.is_guessed and not stated):
            continue
        record = recorded.get((name, from_seq))
        if record is None and not stated:
            continue
        grown = stated.grown if stated else ()
        is_life = not declared.is_guessed and declared.from_seq == from_seq
        partitioner = record.partitioner if record else PARTITIONERS[declared.partitioner] if is_life else CRC32
        # A growth to another number of partitions than the checkpoint has came later, or was refused.
        partitions = counts[name] or declared.partitions
        sources = [each for each in (declared if is_life else None, record) if each and each.partitions == partitions]
        longer = [each.grown for each in sources if list(each.grown[: len(grown)]) == list(grown)]
        found[name] = Since(from_seq, max([grown, *longer], key=len), partitioner)
    return found


def next_table(data: str) -> Table:
    """Return the routing table that the next start uses, while no router has mended topic.toml."""
    table = topics.table(data)
    try:
        _, rows, since = load(data)
    except (ValueError, LookupError):
        rows, since = {}, {}
    for name, stated in complete(data, rows, since, recorded_topics(data)).items():
        topic = table.get(name.encode())
        if topic is not None and topic.from_seq == stated.from_seq:
            topic.grown, topic.partitioner = stated.grown, stated.partitioner
    return table


# --- the last seq that was given out ---------------------------------------------------------------------------------
# A framer without a ring continues after it. The WAL has every record that was acknowledged or shown to the router. So
# no other file may know of a later seq: neither router.ckpt, producers.ckpt, deletions nor a queue. If one does, the end
# of the WAL was lost (a file deleted, an old copy restored), and to continue from there would give the seqs of the lost
# records to other messages.
#
# Lax fsync   With a KMQ_FSYNC other than `always` a power cut may leave a queue ahead of the WAL. Records that neither
#             checkpoint covers were not promised to survive that. So queues are not read then; the router cuts them.
# Cost        A few reads, and for each partition the sizes of its files: if they match router.ckpt, so does its last seq.


def agreed_end(data: str, ask_queues: bool) -> tuple[int, int]:
    """Return `wal.last_numbered`. Raises CorruptError if another file knows of a later seq.

    `ask_queues`: read queues too.
    """
    seq, recv_ts = wal.last_numbered(data)
    others = {
        "router.ckpt": routed_seq(data),
        "producers.ckpt": dedupe_file.checkpoint_seq(data),
        deletions.NAME: deletions.last_seq(data),
    }
    if ask_queues:
        others |= queue_end(data)
    name, later = max(others.items(), key=lambda item: item[1])
    if later > seq:
        raise CorruptError(
            f"{data}/append: the WAL ends at seq {seq}, but {name} knows of seq {later}: its end was lost, and the seqs"
            " of that end must not be given out again; run kmq verify --repair, which restores it from the queues"
        )
    return seq, recv_ts


def queue_end(data: str) -> dict[str, int]:
    """Return the queue with the latest seq, and that seq, of the queues whose sizes do not match router.ckpt."""
    try:
        rows = load(data)[1]
    except (ValueError, LookupError):
        rows = {}
    found = {"no queue": 0}
    for topic in topics.names(data):
        for number in (entry for entry in os.listdir(f"{data}/topics/{topic}") if entry.isdigit()):
            segments = segment.survey(directory_of(data, topic, int(number)))
            if sum(part.size for part in segments) != rows.get((topic, int(number)), EMPTY).size:
                found[f"topics/{topic}/{number}"] = next(filter(None, map(segment.last_seq, reversed(segments))), 0)
    last = max(found, key=lambda name: found[name])
    return {last: found[last]}
