"""The queues of one pod, in the same files and bytes that its router writes. Promises: see route.py, target `log`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.files import replace_file, sync_directory
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, deletions, dropped, identity, reader, segment, topics
from kmq.log.index import IndexWriter
from kmq.log.partition import EMPTY, PartitionLog, PartitionPlace, State, directory_of
from kmq.log.partition_recovery import WalRange, fits, recover
from kmq.log.segment import Limits
from kmq.message.routing import Table, Topic
from kmq.spark.arrow import map_in_arrow
from kmq.spark.pipelines.pods import Pods
from kmq.spark.tables import checks

_STATES = "topic string, partition int, end_offset bigint, last_seq bigint, size bigint, start bigint, records bigint"
_ANY_SEQ = 1 << 62


class QueueFiles:
    """The queues of one pod, as its router writes them."""

    def __init__(self, to: str, pods: Pods) -> None:
        if not pods.is_path or len(pods.options.brokers) > 1:
            raise ConfigError(
                "--as log: is for the WAL of one data directory; parquet, delta and iceberg take many brokers"
            )
        self.to, (self._pod,) = os.path.abspath(to), pods.options.brokers
        self._table = Table()
        self._lock = FileLock(f"{self.to}/topics/.owner")
        self._limits = Limits.of(load())

    def __enter__(self) -> "QueueFiles":
        mine = identity.read(self._pod, "id")
        checks.usable("--to", f"{self.to}/topics")
        if not os.path.exists(f"{self.to}/id"):
            replace_file(f"{self.to}/lineage", f"{identity.lineage(self._pod)}\n".encode())
            replace_file(f"{self.to}/id", f"{mine}\n".encode())
        if (found := identity.open_data(self.to)) != mine:
            raise ConfigError(f"--to {self.to}: holds another pod's queues (id {found}, not {mine})")
        if (marks_from := identity.marks_from(self._pod)) != identity.marks_from(self.to):
            text = identity.format_text(1, None if marks_from == identity.NEVER else marks_from)
            replace_file(f"{self.to}/format", f"{text}\n".encode())
        self._lock.acquire(f"--to {self.to}", describe("route", self.to))
        try:
            if deletions.read(self._pod):
                raise ConfigError(f"--as log: topics of {self._pod} were deleted; use --as parquet, delta or iceberg")
            self._seq, self._known, _ = checkpoint.load(self.to)
            self._check_whole()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _check_whole(self) -> None:
        """Check that retention has removed no unrouted record from the WAL: later records would get wrong offsets."""
        first = reader.first_seq(self._pod)
        if dropped.without(self._seq + 1, first - 1, dropped.read(self._pod, "framed")):
            raise ConfigError(
                f"{self._pod}: its WAL begins with seq {first}, but what comes after {self._seq} is needed"
            )

    def add(self, rows: DataFrame, batch_id: int) -> int:
        if batch_id and not self._seq:
            raise ConfigError(f"--to {self.to}: the checkpoint is of other files; begin with a new one")
        self._table = topics.table(self._pod)
        in_order = rows.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "seq")
        write = partial(_append, to=self.to, known=self._known, table=self._table, limits=self._topic_limits())
        states = map_in_arrow(in_order.select("topic", "partition", "seq", "line"), write, _STATES).collect()
        for topic, number, *values, _ in states:
            self._known[topic, number] = State(*values)
            self._seq = max(self._seq, values[1])
        known = [self._topic(name) for name in sorted({name for name, _ in self._known})]
        if any(topic.needs_newest for topic in known) and (text := identity.routed_text(self.to)):
            replace_file(f"{self.to}/format", f"{text}\n".encode())
        self._write_tomls(sorted({topic for topic, _ in self._known}))
        for topic in known:  # a checkpoint has a row for each partition, also for one without records
            self._known = {(topic.name, number): State() for number in range(topic.partitions)} | self._known
        replace_file(f"{self.to}/router.ckpt", checkpoint.text(self._seq, self._known, known))
        return sum(row.records for row in states)

    def check_checkpoint(self, path: str) -> None:
        if "://" not in path:
            checks.usable("--checkpoint", path)

    def _topic(self, name: str) -> Topic:
        return self._table.get(name.encode()) or Topic(name, 1, self._first_seq(name))

    def _first_seq(self, name: str) -> int:
        """Return the first seq of a topic that a message created and that the pod's router has not seen yet."""
        with open(segment.listing(directory_of(self.to, name, 0))[0][1], "rb") as file:
            return segment.stamp(file.read(64))[0]

    def _topic_limits(self) -> dict[str, Limits]:
        """Return when a log begins a new segment: by our settings under "", and by topics with their own settings."""
        own = {name: topics.read(self._pod, name).limits for name in topics.names(self._pod)}
        return {"": self._limits} | {name: self._limits.with_changes(texts) for name, texts in own.items() if texts}

    def _write_tomls(self, names: Iterable[str]) -> None:
        """Write the declarations that are new, or have more partitions."""
        for name in names:
            path, declared = topics.toml_path(self.to, name), self._declared(name)
            if not os.path.exists(path) or declared.partitions > topics.read(self.to, name).partitions:
                replace_file(path, declared.text())
                topics.drop_single_link(self.to, declared.topic(name))

    def _declared(self, name: str) -> topics.Declaration:
        if os.path.isdir(f"{self._pod}/topics/{name}"):
            declared = topics.read(self._pod, name)
            if declared.from_seq is not None:
                return declared
        return topics.Declaration(1, self._first_seq(name))


# --- in a task: lines to logs ---------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Consecutive lines of one partition."""

    at: tuple[str, int]
    lines: bytes
    records: int
    first_seq: int
    last_seq: int


def _runs(batches: Iterable[pa.RecordBatch]) -> Iterator[_Run]:
    for batch in batches:
        topic, partition, seq, line = batch.columns
        code, number = topic.dictionary_encode().indices.to_numpy(), partition.to_numpy()
        changes = np.flatnonzero((np.diff(code) != 0) | (np.diff(number) != 0)) + 1
        for low, high in pairwise([0, *changes.tolist(), len(code)]):
            if low < high:
                joined = pc.binary_join(pa.ListArray.from_arrays([low, high], line), b"\n")[0].as_py()
                at = topic[low].as_py(), int(number[low])
                yield _Run(at, joined + b"\n", high - low, seq[low].as_py(), seq[high - 1].as_py())


def _append(
    batches: Iterable[pa.RecordBatch], to: str, known: checkpoint.Rows, table: Table, limits: Mapping[str, Limits]
) -> Iterator[pa.RecordBatch]:
    """Append sorted lines to their logs; yield the state of each log when it is on disk."""
    for (topic, number), runs in groupby(_runs(batches), itemgetter(0)):
        before = known.get((topic, number), EMPTY)
        log = _open_log(to, topic, number, before, table, limits)
        for run in runs:
            if run.last_seq > log.state.last_seq:
                log.append(run.lines, run.records, run.first_seq, run.last_seq)
        log.note_open_block()
        log.close()
        _sync([*log.unsynced, log.path, segment.index_path(log.path)])
        # Count from the known state: an interrupted attempt of this batch may have written some lines already.
        row = (topic, number, *log.state.values(), log.state.end_offset - before.end_offset)
        names = [name.split()[0] for name in _STATES.split(", ")]
        types = [pa.string(), pa.int32(), *[pa.int64()] * 5]
        columns = [pa.array([value], kind) for value, kind in zip(row, types, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names)


def _open_log(
    to: str, topic: str, number: int, known: State, table: Table, limits: Mapping[str, Limits]
) -> PartitionLog:
    """Open a log for appending; cut off what an earlier attempt has left torn."""
    directory = directory_of(to, topic, number)
    segments, state = segment.survey(directory), State(*known.values())
    is_whole = fits(segments, known)
    if not is_whole:
        found = recover(segments, known, WalRange(1, _ANY_SEQ, has_rest=True), known.start)
        state = found.state
        if found.gaps or state.end_offset < known.end_offset:
            raise CorruptError(f"{directory}: is not what router.ckpt says; remove {to} and begin again")
        for each in found.touched:
            IndexWriter.complete(each.path, each.first, _no_room)
        segments = segment.survey(directory)
    if segments:
        state.set_segments(segments)
    link = (table.get(topic.encode()) or Topic(topic, 1, 0)).log_names()[number]
    log = PartitionLog(PartitionPlace(to, topic, number, link), state, _no_room, limits.get(topic, limits[""]))
    log.open(lambda *_, **__: None, was_cut=not is_whole)
    return log


def _no_room(path: str) -> None:
    raise RetryError(f"{path}: the disk is full; run again when there is room")


def _sync(paths: Sequence[str]) -> None:
    for path in paths:
        if os.path.exists(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    directory = os.path.dirname(paths[0])
    for each in (directory, os.path.dirname(directory), os.path.dirname(os.path.dirname(directory))):
        sync_directory(each)
