"""Compares the WAL with all queues: is every record in its queue once, in order, with the same bytes, and nothing else?

    kmq pipeline run audit --path data                               a data directory, of a broker that may be running
    kmq pipeline run audit --brokers a:8082,b:8082                   or over HTTP, each broker by itself

Steps       snapshot.py (the brokers at one moment, cut into tasks by seqs), auditor.py with comparison.py (within a
            task), this module (Spark adds up), report.py and page.py (the result). auditor.py says what is audited,
            what cannot be, and why.
Speed       Nothing is shuffled. The WAL and each queue are in order of seq, so a task reads a range of the WAL and the
            part of each queue that belongs to it. Only rows about topics, moments and findings leave the task. They are
            combined with DataFrames, as users can do: `evidence`, `findings`, `by_hour`.

`gaps`, `duplicates` and `out_of_order` find the same in any DataFrame of format("kmq"), by ordinary queries,
which shuffle.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kmq.errors import EXIT_FAILED, EXIT_OK
from kmq.spark.audit import page
from kmq.spark.audit.auditor import audit_task
from kmq.spark.audit.findings import FINDINGS, NOTES, EvidenceRow
from kmq.spark.audit.report import AuditResult, Key, Moment, located, show, sum_by_hour, to_json
from kmq.spark.audit.snapshot import BUCKETS, AuditSource, AuditTask, OlderTask, plan, sources
from kmq.spark.source.plan import SPLIT_BYTES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kmq.spark.streaming.streams import Progress

_WINDOW = 1 << 20  # seqs of a broker that `gaps` sorts at once
_MAX_LISTED = 5_000  # findings, and notes, that are listed one by one; all are counted
_ORDER = ("broker", "topic", "partition", "first_seq", "offset", "byte", "what")

_DDL = "broker string, " + ", ".join(
    f"{name} {'string' if kind is str else 'bigint'}" for name, kind in EvidenceRow.__annotations__.items()
)


# --- evidence --------------------------------------------------------------------------------------------------------


def evidence(spark: "SparkSession", audited: list[AuditSource], nbytes: int = SPLIT_BYTES) -> "DataFrame":
    """Return the evidence of an audit of these brokers: rows (findings.EvidenceRow), each after its broker's name.

    Column `what` is a key of FINDINGS or NOTES, or `records` (WAL records by topic and moment), or `queue` (queue
    records compared). `nbytes`: of the WAL in a task, about.
    """
    tasks = [(source, task) for source in audited for task in plan(source.open(), source.snapshot, nbytes)]
    # Not mapInArrow, which requires pandas. The result has few rows.
    rows = spark.sparkContext.parallelize(tasks, len(tasks)).flatMap(_rows).cache()  # computed once for many queries
    return spark.createDataFrame(rows, _DDL)


def _rows(of: tuple[AuditSource, AuditTask | OlderTask]) -> Iterator[tuple[Any, ...]]:
    source, task = of
    return ((source.name, *row) for row in audit_task(source.open(), source.snapshot, task, source.bucket))


def findings(rows: "DataFrame") -> "DataFrame":
    """Return the findings among the evidence."""
    from pyspark.sql import functions as F

    return rows.filter(F.col("what").isin(list(FINDINGS)))


def over_time(rows: "DataFrame") -> "DataFrame":
    """Return the records and bytes that the WAL received, by broker, topic and moment."""
    from pyspark.sql import functions as F

    counted = rows.filter("what = 'records'").groupBy("broker", "topic", F.timestamp_micros("time").alias("time"))
    return counted.agg(F.sum("records").alias("records"), F.sum("nbytes").alias("bytes"))


def by_hour(rows: "DataFrame") -> "DataFrame":
    """Return records and bytes by broker, topic and hour."""
    from pyspark.sql import functions as F

    # Not date_trunc, which uses the session's time zone.
    hour = F.timestamp_micros(F.expr(f"time - time % {BUCKETS[-1]}")).alias("hour")
    counted = rows.filter("what = 'records'").groupBy("broker", "topic", hour)
    return counted.agg(F.sum("records").alias("records"), F.sum("nbytes").alias("bytes"))


# --- for DataFrames of users -----------------------------------------------------------------------------------------


def gaps(df: "DataFrame") -> "DataFrame":
    """Return the ranges of seqs that are missing in `df`, as (broker, first_seq, last_seq).

    `df`: has columns broker and seq.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    seqs = df.select("broker", "seq", F.floor(F.col("seq") / _WINDOW).alias("bucket"))
    inside = Window.partitionBy("broker", "bucket").orderBy("seq")
    steps = seqs.select("broker", F.lag("seq").over(inside).alias("before"), "seq").filter("before is not null")
    edges = seqs.groupBy("broker", "bucket").agg(F.min("seq").alias("low"), F.max("seq").alias("high"))
    between = Window.partitionBy("broker").orderBy("bucket")
    joints = edges.select("broker", F.lag("high").over(between).alias("before"), F.col("low").alias("seq"))
    both = steps.union(joints.filter("before is not null")).filter("seq > before + 1")
    return both.select("broker", (F.col("before") + 1).alias("first_seq"), (F.col("seq") - 1).alias("last_seq"))


def duplicates(df: "DataFrame") -> "DataFrame":
    """Return the seqs that are in `df` more than once, as (broker, seq, times)."""
    from pyspark.sql import functions as F

    return df.groupBy("broker", "seq").agg(F.count("*").alias("times")).filter("times > 1")


def out_of_order(df: "DataFrame") -> "DataFrame":
    """Return the records of `df` whose seq is not above the seq at the previous offset.

    `df`: has columns broker, topic, partition, offset and seq.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    log = Window.partitionBy("broker", "topic", "partition").orderBy("offset")
    return df.withColumn("before", F.lag("seq").over(log)).filter("seq <= before")


def missing(wal: "DataFrame", queues: "DataFrame") -> "DataFrame":
    """Return the records of `wal` (broker, seq) that are in none of `queues`."""
    return wal.join(queues.select("broker", "seq"), ["broker", "seq"], "left_anti")


# --- the result ------------------------------------------------------------------------------------------------------


def audit(spark: "SparkSession", audited: list[AuditSource], nbytes: int = SPLIT_BYTES) -> AuditResult:
    """Audit these brokers, and return the result."""
    from pyspark.sql import functions as F

    rows = evidence(spark, audited, nbytes)
    totals: dict[str, dict[Key, int]] = {}
    moments: list[Moment] = []
    # One query for all counts, because each further query takes the JVM another second.
    counted = rows.groupBy("what", "broker", "topic", "partition", "time")
    for what, broker, topic, partition, time, records, size in counted.agg(F.sum("records"), F.sum("nbytes")).collect():
        if what == "records":
            moments.append(Moment(broker, topic, time, records, size))
        else:
            totals.setdefault(what, {})[broker, topic, partition] = records
    shown, noted = (
        [located(audited, row) for row in _listed(rows, kinds)] if totals.keys() & kinds.keys() else []
        for kinds in (FINDINGS, NOTES)
    )
    moments.sort(key=lambda moment: (moment.time, moment.broker, moment.topic))
    return AuditResult(audited, totals, shown, noted, moments, sum_by_hour(moments))


def _listed(rows: "DataFrame", kinds: dict[str, str]) -> list[Any]:
    from pyspark.sql import functions as F

    return rows.filter(F.col("what").isin(list(kinds))).orderBy(*_ORDER).limit(_MAX_LISTED).collect()


def run(
    spark: "SparkSession",
    where: dict[str, str],
    report: str = "",
    as_json: bool = False,
    limit: int = 20,
    progress: "Progress | None" = None,
) -> int:
    """Audit the brokers that the options `where` name, print the result, and write the HTML file `report` if given.

    `limit`: findings to list. Returns the exit code: 0 without findings, 1 with findings.
    """
    if progress:
        progress.describe("comparing the WAL with the queues")
    result = audit(spark, sources(where))
    if progress:
        progress.stop()
    if as_json:
        print(json.dumps(to_json(result, limit), indent=1))
    else:
        show(result, limit)
    if report:
        page.write(result, report)
        if not as_json:
            print(f"report: {report}")
    return EXIT_OK if result.is_good else EXIT_FAILED
