"""The router's job on a cluster: sort the records of WALs into topics and partitions by their pods' routing tables.

    log         the queues of one pod, file by file and byte by byte what its router writes:
                topics/<topic>/<partition>/…, with index, symlinks, topic.toml and router.ckpt, in a data directory with
                the pod's id. Uses: queues from a WAL that was shipped elsewhere; a pod that lost its queues and whose
                WAL takes one router too long; a check of the pod's own queues. `kmq log`, `kmq verify` and
                format("kmq") read it, and a pod may continue with it.
    parquet, delta, iceberg
                the queues of many pods as one table, partitioned by topic and partition, each file in the order of
                (broker, seq). Uses: to query all pods at once, even for records that no queue has any more; with
                `--table` to try another routing table: how would records spread over 64 partitions?

Invariant   A record is in the output once, where kmq.message.routing puts it by the table in force at its seq. As in
            the pod, records that dropped.log names for ring `durable` are left out. The stream's checkpoint has the
            last seq that was routed.
Crash       Spark repeats a batch whose end it has not seen.
            log             each log skips the records up to its last line. A torn end is cut first, as by the router.
                            Files are synced before the batch ends; then router.ckpt records their lengths.
            tables          see kmq.spark.tables: a batch is in the table whole, once, or not at all.
Owner       of topics/ in `log`: one run at a time, and no router (lock topics/.owner).
Not covered A stream that runs ahead of a pod's router cannot know what the router will drop, nor the seq from which a
            topic that is being declared, or named by a mark, will be in force. Segments cut by age: these cuts depend
            on when the router appended. A table is ordered only within a file; files are numbered by batch.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.files import replace_file, sync_directory
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, deletions, dropped, identity, reader, segment, topics
from kmq.log.index import IndexWriter
from kmq.log.partition import EMPTY, PartitionLog, PartitionPlace, PartitionState, directory_of
from kmq.log.partition_recovery import WalRange, fits, recover
from kmq.log.reader import WAL
from kmq.log.segment import Limits
from kmq.message import record
from kmq.message.routing import Table, Topic, lives, table
from kmq.repair import ledger
from kmq.spark.paths import directory_here, local_path
from kmq.spark.pipelines.options import LOG, RouteOptions, complete, value
from kmq.spark.sink.routing import Routing
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming import streams
from kmq.spark.streaming.streams import Trigger
from kmq.spark.tables import FORMATS, TableSpec, base

PARTITION_BY = ("topic", "partition")  # of the table
SCHEMA = "broker string, seq bigint, recv_ts timestamp, routing_key binary, line binary"  # the columns read from WALs
EVERY = "1 second"
_BLOCK = 4096  # seqs; ranges are looked up by the block of a seq

# --- pods ------------------------------------------------------------------------------------------------------------

Ranges = Mapping[str, Sequence[tuple[int, int]]]  # broker → (first, last) seqs


class RoutedPods:
    """The brokers of some options, with their routing tables."""

    def __init__(self, where: Mapping[str, str], table: str = "") -> None:
        """`table`: a data directory whose table replaces the tables of all brokers."""
        self.options = ReadOptions({**where, "subscribe": WAL})
        if self.options.holds:
            raise ConfigError("onUnreachable=hold: records are routed by the table of their broker, which must answer")
        self.is_path = bool(self.options.paths)
        self._table = table = directory_here(table, "--table")
        if table and not os.path.isdir(f"{table}/topics"):
            raise ConfigError(f"--table {table!r}: no data directory")
        self.brokers = {name: open_broker(name, self.is_path, self.options.access) for name in self.options.brokers}

    def look(self) -> tuple[Routing, Ranges]:
        """Return the current routing table, and what drop_oldest removed from the queues."""
        ledgers = {name: broker.ledger() for name, broker in self.brokers.items()}
        dropped = {name: stated["dropped"]["durable"] for name, stated in ledgers.items()}
        if self._table:  # seqs of another broker mean nothing here: the whole table is in force from the start
            rows = [topics.read(self._table, name).topic(name, 0) for name in topics.names(self._table)]
            given = [(row.name.encode(), Topic(row.name, row.partitions, 0, (), (), row.partitioner)) for row in rows]
            return Routing({name: Table(given, _marks_from(stated)) for name, stated in ledgers.items()}), dropped
        return Routing({name: in_force(stated) for name, stated in ledgers.items()}), dropped

    def identities(self) -> dict[str, str]:
        """Return broker → id of its data directory."""
        return {name: broker.identity() for name, broker in self.brokers.items()}


def in_force(stated: Mapping[str, Any]) -> Table:
    """Return the routing table in a broker's ledger."""
    return table(ledger.in_force(stated), lives(each[:3] for each in stated.get("deleted", ())), _marks_from(stated))


def _marks_from(stated: Mapping[str, Any]) -> int:
    return int(stated.get("marks_from", identity.NEVER))  # an older gateway does not send it


# --- queue files -----------------------------------------------------------------------------------------------------

_STATES = "topic string, partition int, end_offset bigint, last_seq bigint, size bigint, start bigint, records bigint"
_ANY_SEQ = 1 << 62


class QueueFiles:
    """The queues of one pod, as its router writes them."""

    def __init__(self, to: str, pods: RoutedPods) -> None:
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
        base.usable("--to", f"{self.to}/topics")
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
            self._seq, self._partitions, _ = checkpoint.load(self.to)
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
        write = partial(_append, to=self.to, ckpt=self._partitions, table=self._table, limits=self._topic_limits())
        states = map_in_arrow(in_order.select("topic", "partition", "seq", "line"), write, _STATES).collect()
        for topic, number, *values, _ in states:
            self._partitions[topic, number] = PartitionState(*values)
            self._seq = max(self._seq, values[1])
        routed = [self._topic(name) for name in sorted({name for name, _ in self._partitions})]
        if any(topic.is_rerouted for topic in routed) and (text := identity.raised_text(self.to, identity.ROUTED)):
            replace_file(f"{self.to}/format", f"{text}\n".encode())
        self._write_tomls(sorted({topic for topic, _ in self._partitions}))
        for topic in routed:  # a checkpoint has a row for each partition, also for one without records
            self._partitions = {
                (topic.name, number): PartitionState() for number in range(topic.partitions)
            } | self._partitions
        replace_file(f"{self.to}/router.ckpt", checkpoint.text(self._seq, self._partitions, routed))
        return sum(row.records for row in states)

    def _topic(self, name: str) -> Topic:
        return self._table.get(name.encode()) or Topic(name, 1, self._first_seq(name))

    def _first_seq(self, name: str) -> int:
        """Return the first seq of a topic that a message created and that the pod's router has not seen yet."""
        with open(segment.listing(directory_of(self.to, name, 0))[0][1], "rb") as file:
            return record.stamp(file.read(64))[0]

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


# --- in a task: lines to logs ----------------------------------------------------------------------------------------


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
    batches: Iterable[pa.RecordBatch], to: str, ckpt: checkpoint.Rows, table: Table, limits: Mapping[str, Limits]
) -> Iterator[pa.RecordBatch]:
    """Append sorted lines to their logs; yield the state of each log when it is on disk."""
    for (topic, number), runs in groupby(_runs(batches), itemgetter(0)):
        before = ckpt.get((topic, number), EMPTY)
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
    to: str, topic: str, number: int, ckpt: PartitionState, table: Table, limits: Mapping[str, Limits]
) -> PartitionLog:
    """Open a log for appending; cut off what an earlier attempt has left torn."""
    directory = directory_of(to, topic, number)
    segments, state = segment.survey(directory), PartitionState(*ckpt.values())
    is_whole = fits(segments, ckpt)
    if not is_whole:
        found = recover(segments, ckpt, WalRange(1, _ANY_SEQ, has_rest=True), ckpt.start)
        state = found.state
        if found.missing or state.end_offset < ckpt.end_offset:
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


# --- functions on DataFrames -----------------------------------------------------------------------------------------


def route(rows: DataFrame, routing: Routing) -> DataFrame:
    """Return rows of WALs with their topic, partition and key (binary), without rows of deleted topics.

    Needs broker, seq and routing_key (best as binary).
    """
    of = ("routing_key", "seq")
    found = rows.withColumns(
        {"topic": routing.topic(*of), "partition": routing.partition(*of), "key": routing.key(*of)}
    )
    return found.where(F.col("topic") != "") if routing.knows_deleted else found


def among(rows: DataFrame, ranges: Ranges, inside: bool = True) -> DataFrame:
    """Return the rows whose seq lies in a range of their broker, or outside. Fast for many ranges: they are hashed."""
    spans = [(broker, first, last) for broker, mine in ranges.items() for first, last in mine]
    if not spans:
        return rows.limit(0) if inside else rows
    table = rows.sparkSession.createDataFrame(spans, "of string, first bigint, last bigint").withColumn(
        "block", F.explode(F.sequence(F.expr(f"first div {_BLOCK}"), F.expr(f"last div {_BLOCK}")))
    )
    lies_in = F.expr(f"broker = of and seq div {_BLOCK} = block and seq between first and last")
    return rows.join(F.broadcast(table), lies_in, "left_semi" if inside else "left_anti")


# --- the pipeline ----------------------------------------------------------------------------------------------------


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str,
    format: str = LOG,
    *,
    progress: Any = None,
    **options: Unpack[RouteOptions],
) -> int:
    """Route the WALs of `where` (options of format("kmq")): all there is now, or continuously. Return how many records.

    `table`: a data directory whose routing table replaces each pod's own; not with `log`.
    """
    settings = complete(RouteOptions, options)
    output = value(TableSpec, settings, to=to, format=format, partition_by=PARTITION_BY)
    if format not in (LOG, *FORMATS):
        raise ConfigError(f"--as {format!r}: must be one of {', '.join((LOG, *FORMATS))}")
    if settings["table"] and format == LOG:
        raise ConfigError("--table: not with --as log, which is what the pod's own router writes")
    pods = RoutedPods(where, settings["table"])
    records = 0

    def add(batch: DataFrame, batch_id: int) -> None:
        nonlocal records
        routing, dropped = pods.look()
        routed = route(among(batch, dropped, inside=False), routing)
        if isinstance(target, QueueFiles):
            records += target.add(routed, batch_id)
        else:
            records += target.add(routed, batch_id, partial(_stage, target)) or 0

    if format == LOG:
        to = directory_here(to, "--to")
    given = value(Trigger, settings, every=EVERY)
    trigger = given.at(f"{os.path.abspath(local_path(to) or to)}/.kmq/checkpoint")
    with QueueFiles(to, pods) if format == LOG else output.open(given.checkpoint) as target:
        if not isinstance(target, QueueFiles):
            target.stream.check_checkpoint(trigger.checkpoint)
        elif local_path(trigger.checkpoint) is not None:
            base.usable("--checkpoint", trigger.checkpoint)
        if progress is not None:
            progress.describe(f"route to {to}")
        reading = {"subscribe": WAL, "startingOffsets": "earliest", "maxBytesPerTrigger": settings["batch_bytes"]}
        rows = spark.readStream.format("kmq").schema(SCHEMA).options(**{**where, **reading}).load()
        streams.follow(rows, add, "route", trigger)
    return records


def _stage(files: base.Table, rows: DataFrame, query: str) -> None:
    """Stage broker, seq, recv_ts, key and line of each record, partitioned by topic and partition."""
    order = ("topic", "partition", "broker", "seq")
    in_order = rows.repartition("topic", "partition").sortWithinPartitions(*order)
    files.stage(in_order.select("topic", "partition", "broker", "seq", "recv_ts", "key", "line"))


# --- mapInArrow without pandas ---------------------------------------------------------------------------------------

Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(rows: DataFrame, work: Work, schema: str) -> DataFrame:
    """Return what `rows.mapInArrow(work, schema)` returns, without its need for pandas.

    Does the same as Spark's own method (pyspark.sql.pandas.map_ops, as of 4.2 and 4.3), which requires pandas although
    no part of it uses pandas.
    """
    udf = UserDefinedFunction(work, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = udf(*(rows[name] for name in rows.columns))
    return DataFrame(rows._jdf.mapInArrow(columns._jc, False, None), rows.sparkSession)
