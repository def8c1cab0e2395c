"""The router's job on a cluster: the records of WALs sorted into topics and partitions, by the routing table of their pods.

    log         the queues of one pod, file by file and byte by byte what its router writes: topics/<topic>/<partition>/…, with
                index, symlinks, topic.toml and router.ckpt, in a data directory with the pod's id. What for: queues from a WAL
                that was shipped elsewhere; a pod whose queues are lost and whose WAL takes too long for one router; a second
                opinion. `kmq log`, `kmq verify` and format("kmq") read it, a pod may continue with it.
    parquet,    the queues of many pods as one table, partitioned by topic and partition, each file in the order of
    delta,      (broker, seq). What for: to ask all pods at once, also for what no queue has any more; with `--table` under
    iceberg     another table than theirs: how would it spread over 64 partitions?

Invariant   A record is in the output once, where kmq.routing puts it under the table in force at its seq; what dropped.log
            names for ring `durable` is not, as in the pod. The stream's checkpoint says up to which seq.
Crash       Spark runs the batch again whose end it has not seen.
            log             each log skips what it has: its last line says up to which seq. A torn end is cut first, as by
                            the router. Files are synced before the batch ends, and router.ckpt then says how long they are.
            tables          see kmq.spark.tables: a batch is in the table whole, once, or not at all.
Owner       of topics/ in `log`: one run at a time, and no router (lock topics/.owner).
Not covered A stream that runs ahead of a pod's router cannot know what that will drop, nor from which seq on it will put in
            force what is being declared, or named by a mark, just now. Cuts of segments by age: they fall where the router
            appended. Within a table, order is that of a file; files are numbered by batch.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kmq.errors import ConfigError
from kmq.spark.pipelines.keywords import Keywords
from kmq.spark.pipelines.pods import Pods, Ranges
from kmq.spark.pipelines.queue_files import QueueFiles
from kmq.spark.sink.routing import Routing
from kmq.spark.source.options import WAL
from kmq.spark.streaming import streams
from kmq.spark.streaming.streams import Trigger
from kmq.spark.tables import FORMATS, TableSpec
from kmq.spark.tables import Table as Files

LOG = "log"
PARTITION_BY = ("topic", "partition")  # of a table
SCHEMA = "broker string, seq bigint, recv_ts timestamp, routing_key binary, line binary"  # what is read of the WALs
EVERY = "1 second"
BATCH_BYTES = "1g"  # of WAL in a batch; it is sorted on disk where memory does not hold it
_BLOCK = 4096  # seqs; ranges are looked up by the block of a seq

# --- of DataFrames -----------------------------------------------------------------------------------------------------


def route(rows: DataFrame, routing: Routing) -> DataFrame:
    """Rows of WALs with topic, partition and key (binary) of each, without those of deleted topics.

    Needs broker, seq and routing_key (best as binary).
    """
    of = ("routing_key", "seq")
    found = rows.withColumns(
        {"topic": routing.topic(*of), "partition": routing.partition(*of), "key": routing.key(*of)}
    )
    return found.where(F.col("topic") != "") if routing.knows_deleted else found


def among(rows: DataFrame, ranges: Ranges, inside: bool = True) -> DataFrame:
    """The rows whose seq lies in the ranges of their broker, or those whose does not. However many ranges: they are hashed."""
    spans = [(broker, first, last) for broker, mine in ranges.items() for first, last in mine]
    if not spans:
        return rows.limit(0) if inside else rows
    table = rows.sparkSession.createDataFrame(spans, "of string, first bigint, last bigint").withColumn(
        "block", F.explode(F.sequence(F.expr(f"first div {_BLOCK}"), F.expr(f"last div {_BLOCK}")))
    )
    lies_in = F.expr(f"broker = of and seq div {_BLOCK} = block and seq between first and last")
    return rows.join(F.broadcast(table), lies_in, "left_semi" if inside else "left_anti")


# --- targets -----------------------------------------------------------------------------------------------------------


class Target(Protocol):
    """Where routed rows go, batch by batch."""

    def __enter__(self) -> "Target": ...
    def __exit__(self, *error: object) -> None: ...
    def add(self, rows: DataFrame, batch_id: int) -> int:
        """Add a batch, unless it is there; how many records that was."""
        ...

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError where a stream cannot go on from there."""
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


# --- the pipeline ------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """A route as it is asked for."""

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
    """Route the WALs that `where` (options of format("kmq")) names: all there is now, or on and on. Returns how many records.

    `table`: a data directory whose routing table is used in place of each pod's own; with `log` there is none but the pod's.
    """
    given = Keywords("run", options)
    output = given.value(TableSpec, to=to, format=format, partition_by=PARTITION_BY)
    asked = given.value(Route, where=where, output=output, trigger=given.value(Trigger, every=EVERY))
    given.check_all_taken()
    return start(spark, asked, progress)


def start(spark: SparkSession, asked: Route, progress: Any = None) -> int:
    """Run a route; return how many records."""
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
