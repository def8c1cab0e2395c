"""The router's job on a cluster: sort the records of WALs into topics and partitions by their pods' routing tables.

    log         the queues of one pod, file by file and byte by byte what its router writes:
                topics/<topic>/<partition>/…, with index, symlinks, topic.toml and router.ckpt, in a data directory with
                the pod's id. Uses: queues from a WAL that was shipped elsewhere; a pod that lost its queues and whose
                WAL takes one router too long; a second opinion. `kmq log`, `kmq verify` and format("kmq") read it, and
                a pod may continue with it.
    parquet,    the queues of many pods as one table, partitioned by topic and partition, each file in the order of
    delta,      (broker, seq). Uses: to query all pods at once, even for records that no queue has any more; with
                `--table` to try
    iceberg     another routing table: how would records spread over 64 partitions?

Invariant   A record is in the output once, where kmq.message.routing puts it by the table in force at its seq. As in the pod,
            records that dropped.log names for ring `durable` are left out. The stream's checkpoint tells the seq
            reached.
Crash       Spark repeats a batch whose end it has not seen.
            log             each log skips the records it has, as its last line tells. A torn end is cut first, as by
                            the router. Files are synced before the batch ends; then router.ckpt records their lengths.
            tables          see kmq.spark.tables: a batch is in the table whole, once, or not at all.
Owner       of topics/ in `log`: one run at a time, and no router (lock topics/.owner).
Not covered A stream that runs ahead of a pod's router cannot know what the router will drop, nor the seq from which a
topic
            that is being declared, or named by a mark, will be in force. Segments cut by age: these cuts depend on when
            the router appended. A table is ordered only within a file; files are numbered by batch.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kmq.errors import ConfigError
from kmq.log.reader import WAL
from kmq.spark.pipelines.keywords import Keywords
from kmq.spark.pipelines.pods import Pods, Ranges
from kmq.spark.pipelines.queue_files import QueueFiles
from kmq.spark.sink.routing import Routing
from kmq.spark.streaming import streams
from kmq.spark.streaming.streams import Trigger
from kmq.spark.tables import FORMATS, TableSpec
from kmq.spark.tables import Table as Files

LOG = "log"
PARTITION_BY = ("topic", "partition")  # of the table
SCHEMA = "broker string, seq bigint, recv_ts timestamp, routing_key binary, line binary"  # the columns read from WALs
EVERY = "1 second"
BATCH_BYTES = "1g"  # of WAL in a batch, which is sorted on disk if memory is too small
_BLOCK = 4096  # seqs; ranges are looked up by the block of a seq

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


# --- targets --------------------------------------------------------------------------------------------------------


class Target(Protocol):
    """Where routed rows go, batch by batch."""

    def __enter__(self) -> "Target": ...
    def __exit__(self, *error: object) -> None: ...
    def add(self, rows: DataFrame, batch_id: int) -> int:
        """Add a batch unless it was added before; return how many records were added."""
        ...

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError if a stream cannot resume from this checkpoint."""
        ...


class Tables:
    """A table: broker, seq, recv_ts, key and line of each record, partitioned by topic and partition."""

    def __init__(self, output: TableSpec, checkpoint: str = "") -> None:
        self._files: Files = output.open(checkpoint)

    def __enter__(self) -> "Tables":
        self._files.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def add(self, rows: DataFrame, batch_id: int) -> int:
        return self._files.add(rows, batch_id, self._stage) or 0

    def check_checkpoint(self, path: str) -> None:
        self._files.stream.check_checkpoint(path)

    def _stage(self, rows: DataFrame, query: str) -> None:
        order = ("topic", "partition", "broker", "seq")
        in_order = rows.repartition("topic", "partition").sortWithinPartitions(*order)
        self._files.stage(in_order.select("topic", "partition", "broker", "seq", "recv_ts", "key", "line"))


# --- the pipeline ---------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """A route as requested."""

    where: Mapping[str, str]  # options of format("kmq")
    output: TableSpec  # its format may be `log`
    table: str = ""  # a data directory whose routing table is used in place of each pod's own
    trigger: Trigger = Trigger(every=EVERY)
    batch_bytes: str = BATCH_BYTES


class Options(TypedDict, total=False):
    """The keyword arguments of `run`: fields of Route, Trigger and TableSpec."""

    table: str
    once: bool
    checkpoint: str
    batch_bytes: str
    catalog: str


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str,
    format: str = LOG,
    *,
    progress: Any = None,
    **options: Unpack[Options],
) -> int:
    """Route the WALs of `where` (options of format("kmq")): all there is now, or continuously. Return how many records.

    `table`: a data directory whose routing table replaces each pod's own; not with `log`.
    """
    given = Keywords("run", options)
    output = given.value(TableSpec, to=to, format=format, partition_by=PARTITION_BY)
    asked = given.value(Route, where=where, output=output, trigger=given.value(Trigger, every=EVERY))
    given.check_all_taken()
    return start(spark, asked, progress)


def start(spark: SparkSession, asked: Route, progress: Any = None) -> int:
    """Run a route; return how many records were routed."""
    output = asked.output
    if output.format not in (LOG, *FORMATS):
        raise ConfigError(f"--as {output.format!r}: must be one of {', '.join((LOG, *FORMATS))}")
    if asked.table and output.format == LOG:
        raise ConfigError("--table: not with --as log, which is what the pod's own router writes")
    pods = Pods(asked.where, asked.table)
    target: Target = QueueFiles(output.to, pods) if output.format == LOG else Tables(output, asked.trigger.checkpoint)
    records = 0

    def add(batch: DataFrame, batch_id: int) -> None:
        nonlocal records
        routing, dropped = pods.look()
        records += target.add(route(among(batch, dropped, inside=False), routing), batch_id)

    trigger = asked.trigger.at(f"{os.path.abspath(output.to)}/.kmq/checkpoint")
    with target:
        target.check_checkpoint(trigger.checkpoint)
        if progress is not None:
            progress.describe(f"route to {output.to}")
        options = {"subscribe": WAL, "startingOffsets": "earliest", "maxBytesPerTrigger": asked.batch_bytes}
        rows = spark.readStream.format("kmq").schema(SCHEMA).options(**{**asked.where, **options}).load()
        streams.follow(rows, add, "route", trigger)
    return records
