"""Compact topics declared `cleanup = "compact"`: keep the latest record of each key, in place, with the same offset.

    from kmq.spark.pipelines.compact import latest
    users = spark.read.format("kmq").option("path", "data").option("subscribe", "users").load()
    latest(users).show()    # a topic as a table

Spark finds the records that have been replaced; it reads as far as router.ckpt says the logs are on disk. Tasks rewrite
each sealed segment that has such records, and the owner of topics/ swaps the segments. kmq/log/compaction.py explains
why nothing is lost, whatever is killed.

Invariant   These records are never removed: the latest record of each key of a partition; records without a key; the
            first and the last record of each segment; the active segment. The key is compared as stored, with or
            without a mark before it. A tombstone (an empty payload; with enc=b64 it is an empty value instead) is
            removed only if it is older than `tombstones_s` (None: the topic's `delete_retention`), no other record of
            its key is left, and the WAL begins after it.
Beside      The broker compacts in the background too. It gives way: the run waits until it has, some seconds at most.
Again       A killed run has changed nothing, or whole segments. The next run does what is left; after a complete run
            nothing.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from kmq.broker.clock import GAP_S
from kmq.config.values import FOREVER
from kmq.errors import ConfigError
from kmq.log import compaction, passes, reader, topics, wal
from kmq.log.compaction import Sealed
from kmq.spark.pipelines.options import MIN_DIRTY
from kmq.spark.source.options import ReadOptions

if TYPE_CHECKING:
    from kmq.spark.streaming.streams import Progress

READ = "topic string, partition int, offset bigint, seq bigint, recv_ts timestamp, key binary, line binary"
_TOMBSTONE = r"\A[^|]*(\|[^|]*){3}\|(?![^|]*;enc=b64[;|])[^|]*\|\z"
_LIST = 1 << 16  # offsets
_PLACE = ("broker", "topic", "partition")


class Compacted(NamedTuple):
    """What a run found in one partition, and whether it was compacted."""

    topic: str
    partition: int
    segments: int  # sealed segments with records to remove
    records: int  # to remove
    bytes: int  # of these records; their newlines stay
    of_bytes: int  # in all sealed segments
    done: bool

    @property
    def dirty(self) -> float:
        """Return the share of the sealed bytes that can be removed."""
        return self.bytes / self.of_bytes if self.of_bytes else 0.0


# --- functions on DataFrames -----------------------------------------------------------------------------------------


def latest(rows: DataFrame) -> DataFrame:
    """Return the topic as a table: the latest record of each key, without keys deleted by a tombstone."""
    by = [name for name in _PLACE if name in rows.columns]
    found = rows.where(F.col("key").isNotNull()).groupBy(*by, "key").agg(F.max_by(F.struct("*"), "offset").alias("row"))
    return found.select("row.*").where(F.col("value").isNotNull())


def replaced(rows: DataFrame, deleted_before: datetime | Column, wal_first: int) -> DataFrame:
    """Return (topic, partition, offset, bytes) of the rows that may be removed: see the module.

    `deleted_before`: a time, or a column of times (null: never), before which a tombstone must have been received.
    """
    line = F.col("line")
    is_tombstone = F.endswith(line, F.lit(b"|")) & line.cast("string").rlike(_TOMBSTONE)
    before = deleted_before if isinstance(deleted_before, Column) else F.lit(deleted_before)
    is_old = F.coalesce(F.col("recv_ts") < before, F.lit(False)) & (F.col("seq") < wal_first)
    slim = rows.where(F.col("key").isNotNull()).select(
        *("topic", "partition", "key", "offset"),
        F.octet_length(line).cast("bigint").alias("bytes"),
        (is_old & is_tombstone).alias("deletes"),
    )
    same_key = Window.partitionBy("topic", "partition", "key")
    counted = slim.withColumns({"last": F.max("offset").over(same_key), "count": F.count("*").over(same_key)})
    gone = (F.col("offset") < F.col("last")) | (F.col("deletes") & (F.col("count") == 1))
    return counted.where(gone).select("topic", "partition", "offset", "bytes")


# --- the pipeline ----------------------------------------------------------------------------------------------------


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    dry_run: bool = False,
    min_dirty: float = MIN_DIRTY,
    tombstones_s: float | None = None,
    progress: "Progress | None" = None,
) -> list[Compacted]:
    """Compact the topics that `where` (options of format("kmq")) names, directory by directory."""
    if where.get("kmq.bootstrap.servers"):
        raise ConfigError("compact rewrites files: it needs --path, where it sees them; --brokers only reads")
    options = ReadOptions(where)
    found = []
    for path in options.paths:
        data = os.path.abspath(path)
        wanted = _topics(data, options)
        if not wanted:
            continue
        if progress:
            progress.describe(f"compact {', '.join(wanted)} in {path}")
        if dry_run:
            found += _compact(spark, data, wanted, None, min_dirty, tombstones_s)
            continue
        with compaction.compactor(data) as place:
            compaction.settle(data)  # segments that a killed run had prepared
            found += _compact(spark, data, wanted, place, min_dirty, tombstones_s)
            compaction.settle(data)
    return found


def _topics(data: str, options: ReadOptions) -> list[str]:
    """Return the requested topics. Raises ConfigError if one requested by name is not declared compact."""
    asked = [name for name in topics.names(data) if options.wants(name)]
    other = [name for name in asked if not topics.is_compacted(data, name)]
    if other and not options.pattern:
        raise ConfigError(
            f"topic {', '.join(other)}: not declared to be compacted;"
            " kmq topics create --set cleanup=compact,"
            ' or cleanup = "compact" in its topic.toml before the router starts'
        )
    return [name for name in asked if name not in other]


def _compact(
    spark: SparkSession,
    data: str,
    wanted: Sequence[str],
    place: str | None,
    min_dirty: float,
    tombstones_s: float | None,
) -> list[Compacted]:
    """Compact one directory. `place`: where new segments are prepared; None: a dry run."""
    ends = {at: end for at, end in compaction.synced_ends(data).items() if at[0] in wanted}
    segments = [each for at, end in ends.items() for each in compaction.sealed(data, *at, end)]
    if not segments:
        return []
    rows = _rows(spark, data, ends, {(each.topic, each.partition) for each in segments})
    before = _deleted_before(data, wanted, tombstones_s)
    gone = _in_segments(replaced(rows, before, reader.first_seq(data)), segments).persist()
    try:
        counts = gone.groupBy("segment").agg(F.count("*").alias("records"), F.sum("bytes").alias("bytes")).collect()
        stats = {row["segment"]: (row["records"], row["bytes"]) for row in counts}
        found = [_assess(data, at, segments, stats, min_dirty, place) for at in sorted(ends)]
        found = [each for each in found if each.of_bytes]
        worth = {(each.topic, each.partition) for each in found if each.done}
        chosen = [n for n in stats if (segments[n].topic, segments[n].partition) in worth]
        if place and chosen:
            lists = _lists(gone.where(F.col("segment").isin(chosen)), len(chosen))
            ranges = [(each.topic, each.partition, each.first, each.end) for each in segments]
            lists.rdd.mapPartitions(partial(_rewrite, data=data, place=place, segments=ranges)).count()
        return found
    finally:
        gone.unpersist()


def _deleted_before(data: str, wanted: Sequence[str], tombstones_s: float | None) -> Column:
    """Return, by topic, before when a tombstone must have been received; null: none is removed."""
    now, before = _now(data), F.lit(None).cast("timestamp")
    for name in wanted:
        age = passes.delete_retention(topics.read(data, name)) if tombstones_s is None else tombstones_s
        if age != FOREVER:
            before = F.when(F.col("topic") == name, F.lit(now - timedelta(seconds=age))).otherwise(before)
    return before


def _now(data: str) -> datetime:
    """Return the current time, at most GAP_S after the last record: a wrong clock would delete every tombstone."""
    last_record = wal.last_stored(data)[1] / 1e6
    return datetime.fromtimestamp(min(time.time(), last_record + GAP_S), UTC)


def _rows(
    spark: SparkSession, data: str, ends: Mapping[tuple[str, int], int], wanted: set[tuple[str, int]]
) -> DataFrame:
    """Return the records of these partitions that are on disk."""
    assigned: dict[str, list[int]] = {}
    ending: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(wanted):
        assigned.setdefault(topic, []).append(partition)
        ending.setdefault(topic, {})[str(partition)] = ends[topic, partition]
    options = {"path": data, "assign": json.dumps(assigned), "endingOffsets": json.dumps(ending)}
    return spark.read.format("kmq").schema(READ).options(**options).load()


def _in_segments(gone: DataFrame, segments: Sequence[Sealed]) -> DataFrame:
    """Return (segment, offset, bytes) of records in sealed segments, except the first and last record of each."""
    spans = gone.sparkSession.createDataFrame(
        [(n, each.topic, each.partition, each.first, each.end - 1) for n, each in enumerate(segments)],
        "segment int, topic string, partition int, first bigint, last bigint",
    )
    inside = (F.col("offset") > F.col("first")) & (F.col("offset") < F.col("last"))
    joined = gone.join(F.broadcast(spans), ["topic", "partition"]).where(inside)
    return joined.select("segment", "offset", "bytes")


def _lists(gone: DataFrame, tasks: int) -> DataFrame:
    """Return (segment, offsets) in order, in small rows. Not with Arrow: Spark would need pandas for it here."""
    lists = gone.groupBy("segment", F.floor(F.col("offset") / _LIST).alias("number"))
    sorted_lists = lists.agg(F.sort_array(F.collect_list("offset")).alias("offsets"))
    return sorted_lists.repartition(tasks, "segment").sortWithinPartitions("segment", "number")


def _assess(
    data: str,
    at: tuple[str, int],
    segments: Sequence[Sealed],
    stats: Mapping[int, tuple[int, int]],
    min_dirty: float,
    place: str | None,
) -> Compacted:
    mine = [n for n, each in enumerate(segments) if (each.topic, each.partition) == at]
    of_bytes = sum(os.path.getsize(segments[n].path(data)) for n in mine)
    counted = [stats[n] for n in mine if n in stats]
    records, nbytes = sum(each[0] for each in counted), sum(each[1] for each in counted)
    worth = bool(place and records and nbytes >= min_dirty * of_bytes)
    return Compacted(*at, len(counted), records, nbytes, of_bytes, worth)


def _rewrite(
    rows: Iterable[Row], data: str, place: str, segments: Sequence[tuple[str, int, int, int]]
) -> Iterator[int]:
    """Prepare the new segments from sorted lists of the records to remove: what a task does."""
    for number, lists in groupby(rows, itemgetter("segment")):
        gone = [offset for row in lists for offset in row["offsets"]]
        yield compaction.lay_out(data, Sealed(*segments[number]), gone, place)
