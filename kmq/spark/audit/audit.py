"""The WAL against all queues: is every record in its queue once, in order, with the same bytes, and nothing else?

    kmq pipeline run audit --path data                               a data directory, of a broker that is up or not
    kmq pipeline run audit --brokers a:8082,b:8082                   or over HTTP, each broker by itself

What is judged, and what cannot be, is argued in judge.py. Here: the snapshot, the cut into tasks, Spark, the report.

Speed       nothing is shuffled. The WAL and each queue are in order of seq, so a task reads a stretch of the WAL and of each
            queue what belongs to it, and only rows about topics, moments and findings leave it. Those are combined with
            DataFrames, as users can do: `evidence`, `findings`, `by_hour`.

`gaps`, `duplicates` and `out_of_order` say the same of any DataFrame of format("kmq"), by ordinary (shuffling) queries.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq.errors import EXIT_FAILED, EXIT_OK
from kmq.log import identity, segment
from kmq.log.damage import DamageError
from kmq.spark.audit.judge import FINDINGS, NOTES, Judge, Place, Row, Snapshot, Span, Task
from kmq.spark.connections import Access
from kmq.spark.source.brokers import Broker, Directory, open_broker
from kmq.spark.source.cutting import SPLIT_BYTES
from kmq.spark.source.options import WAL, Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kmq.spark.streaming.progress import Progress

_MAX_LOOKUPS = 20_000  # of a seq in a queue: with very many queues the stretches are longer
_BUCKETS = (100_000, 1_000_000, 10_000_000, 60_000_000, 600_000_000, 3_600_000_000)  # µs; each divides an hour
_MOMENTS, _MAX_MOMENTS = 240, 50_000  # points in a plot over time, about; those of all topics
_STRETCH = 1 << 20  # seqs of a broker that `gaps` orders at once
_SPANS = 5_000  # findings, and notes, that are looked at one by one; all are counted
_ORDER = ("broker", "topic", "partition", "first_seq", "offset", "byte", "what")

_DDL = "broker string, " + ", ".join(
    f"{name} {'string' if kind is str else 'bigint'}" for name, kind in Row.__annotations__.items()
)


# --- the snapshot ----------------------------------------------------------------------------------------------------


def snapshot(broker: Broker) -> Snapshot:
    """The broker now. The order of these reads is argued in kmq/spark/audit/judge.py."""
    routed = broker.ledger()["routed_seq"]
    queues, hidden = _queues(broker, list(broker.topics()))
    wal = broker.bounds([WAL])[WAL, 0]
    ledger = broker.ledger()
    table = [(row["name"], row["partitions"], row["from_seq"]) for row in ledger["topics"] if row["from_seq"]]
    marks_from = ledger.get("marks_from", identity.NEVER)  # a gateway before this one does not say
    compacted = [row["name"] for row in ledger["topics"] if row["cleanup"] == "compact"]
    names = {row["name"] for row in ledger["topics"]}
    queues = {place: span for place, span in queues.items() if place[0] in names}  # else: deleted in between
    deleted = [(name, from_seq, last_seq) for name, from_seq, last_seq, _ in ledger.get("deleted", ())]
    return Snapshot(routed, queues, wal, table, compacted, ledger["dropped"], hidden, marks_from, deleted)


def _queues(broker: Broker, names: list[str]) -> tuple[dict[Place, Span], dict[str, tuple[str, int, str]]]:
    """The bounds of the queues; where damage hides them, topic by topic: those that have none, and why."""
    try:
        return broker.bounds(names), {}
    except DamageError as err:
        if len(names) == 1:
            return {}, {names[0]: (err.path, err.byte, err.what)}
    half = len(names) // 2
    one, other = _queues(broker, names[:half]), _queues(broker, names[half:])
    return one[0] | other[0], one[1] | other[1]


# --- tasks -------------------------------------------------------------------------------------------------------------


def plan(broker: Broker, taken: Snapshot, nbytes: int = SPLIT_BYTES) -> list[Task]:
    """The WAL in stretches of about `nbytes`, each with its part of every queue; then what is older than the WAL."""
    first, end = taken.wal
    try:
        cuts = broker.cuts(WAL, 0, first, end, nbytes)
    except DamageError:  # of an index; the reader will say so
        cuts = []
    step = 1 + len(cuts) * len(taken.queues) // _MAX_LOOKUPS
    starts = {place: bound[0] for place, bound in taken.queues.items()}
    fronts: list[Task] = []
    if first > 1:
        oldest = _offsets(broker, taken, first, starts) or starts
        fronts = [
            Task(first, first, {place: span})
            for place, start in starts.items()
            for span in _pieces(broker, place, start, oldest[place], nbytes)
        ]
        starts = oldest
    made = []
    low = first
    for cut in cuts[step - 1 :: step]:
        found = _offsets(broker, taken, cut, starts)
        if found is not None:  # else damage is in the way: the stretch goes on to the next cut
            made.append(Task(low, cut, {place: (starts[place], found[place]) for place in starts}))
            low, starts = cut, found
    made.append(Task(low, end, {place: (start, taken.queues[place][1]) for place, start in starts.items()}))
    return made + fronts


def _offsets(broker: Broker, taken: Snapshot, seq: int, least: dict[Place, int]) -> dict[Place, int] | None:
    """Where each queue goes on with `seq`, never before `least`; None where damage hides it."""
    found = {}
    for place, (_, end) in taken.queues.items():
        if least[place] == end:
            found[place] = end
            continue
        try:
            found[place] = min(max(broker.offset_of_seq(*place, seq), least[place]), end)
        except DamageError:
            return None
    return found


def _pieces(broker: Broker, place: Place, start: int, end: int, nbytes: int) -> Iterator[Span]:
    try:
        cuts = broker.cuts(*place, start, end, nbytes) if end > start else []
    except DamageError:
        cuts = []
    edges = [start, *cuts, end]
    yield from ((low, high) for low, high in pairwise(edges) if low < high)


# --- Spark ---------------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A broker to audit: how to open it again in a task, and its snapshot."""

    name: str
    is_path: bool
    access: Access
    snapshot: Snapshot
    bucket: int  # µs

    def open(self) -> Broker:
        return open_broker(self.name, self.is_path, self.access)


def sources(where: dict[str, str]) -> list[Source]:
    """The brokers that the options `where` name (path, or kmq.bootstrap.servers and kmq.token), each with its snapshot."""
    options = Options(where | {"subscribe": WAL})
    made = []
    for name in options.brokers:
        broker = open_broker(name, bool(options.paths), options.access)
        taken = snapshot(broker)
        made.append(Source(name, bool(options.paths), options.access, taken, _bucket(broker, taken)))
    return made


def _bucket(broker: Broker, taken: Snapshot) -> int:
    """How finely to count over time: a plot has some 240 points; with very many topics fewer."""
    first, end = taken.wal
    stamps = []
    with contextlib.suppress(DamageError):
        for seq in (first, end - 1):
            for _, lines in broker.read(WAL, 0, seq, end):
                stamps.append(segment.stamp(lines)[1])
                break
    span = max(stamps) - min(stamps) if stamps else 0
    points = min(_MOMENTS, _MAX_MOMENTS // (len(taken.topics) + 1))
    return next((each for each in _BUCKETS if span // each <= points), _BUCKETS[-1])


def evidence(spark: "SparkSession", found: list[Source], nbytes: int = SPLIT_BYTES) -> "DataFrame":
    """All that an audit of these brokers sees, as rows (see kmq.spark.audit.judge.Row) with the broker's name.

    `what` is one of FINDINGS or NOTES; `records`: WAL records by topic and moment; `queue`: queue records looked at.
    """
    tasks = [(each, task) for each in found for task in plan(each.open(), each.snapshot, nbytes)]
    # Not mapInArrow: it asks for pandas. What comes out is few rows.
    judged = spark.sparkContext.parallelize(tasks, len(tasks)).flatMap(_judge).cache()  # judged once, asked often
    return spark.createDataFrame(judged, _DDL)


def _judge(of: tuple[Source, Task]) -> Iterator[tuple[Any, ...]]:
    source, task = of
    return ((source.name, *row) for row in Judge(source.open(), source.snapshot, task, source.bucket).run())


def findings(rows: "DataFrame") -> "DataFrame":
    """The findings among the evidence."""
    from pyspark.sql import functions as F

    return rows.filter(F.col("what").isin(list(FINDINGS)))


def over_time(rows: "DataFrame") -> "DataFrame":
    """Records and bytes by broker, topic and moment, as they came into the WAL."""
    from pyspark.sql import functions as F

    counted = rows.filter("what = 'records'").groupBy("broker", "topic", F.timestamp_micros("time").alias("time"))
    return counted.agg(F.sum("records").alias("records"), F.sum("nbytes").alias("bytes"))


def by_hour(rows: "DataFrame") -> "DataFrame":
    """Records and bytes by broker, topic and hour."""
    from pyspark.sql import functions as F

    hour = F.timestamp_micros(F.expr(f"time - time % {_BUCKETS[-1]}")).alias(
        "hour"
    )  # not date_trunc: a session's time zone
    counted = rows.filter("what = 'records'").groupBy("broker", "topic", hour)
    return counted.agg(F.sum("records").alias("records"), F.sum("nbytes").alias("bytes"))


# --- for DataFrames of users ---------------------------------------------------------------------------------------------


def gaps(df: "DataFrame") -> "DataFrame":
    """(broker, first_seq, last_seq): the seqs that are missing between those of `df`, which has columns broker and seq."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    seqs = df.select("broker", "seq", F.floor(F.col("seq") / _STRETCH).alias("bucket"))
    inside = Window.partitionBy("broker", "bucket").orderBy("seq")
    steps = seqs.select("broker", F.lag("seq").over(inside).alias("before"), "seq").filter("before is not null")
    edges = seqs.groupBy("broker", "bucket").agg(F.min("seq").alias("low"), F.max("seq").alias("high"))
    between = Window.partitionBy("broker").orderBy("bucket")
    joints = edges.select("broker", F.lag("high").over(between).alias("before"), F.col("low").alias("seq"))
    both = steps.union(joints.filter("before is not null")).filter("seq > before + 1")
    return both.select("broker", (F.col("before") + 1).alias("first_seq"), (F.col("seq") - 1).alias("last_seq"))


def duplicates(df: "DataFrame") -> "DataFrame":
    """(broker, seq, times): the seqs that are in `df` more than once."""
    from pyspark.sql import functions as F

    return df.groupBy("broker", "seq").agg(F.count("*").alias("times")).filter("times > 1")


def out_of_order(df: "DataFrame") -> "DataFrame":
    """The records of `df` (broker, topic, partition, offset, seq) whose seq is not above that of the offset before."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    each = Window.partitionBy("broker", "topic", "partition").orderBy("offset")
    return df.withColumn("before", F.lag("seq").over(each)).filter("seq <= before")


def missing(wal: "DataFrame", queues: "DataFrame") -> "DataFrame":
    """The records of `wal` (broker, seq) that are in none of `queues`."""
    return wal.join(queues.select("broker", "seq"), ["broker", "seq"], "left_anti")


# --- the result ------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A finding, or a note that has a place; `file` under the data directory, where it can be told."""

    broker: str
    row: Row
    file: str


class Moment(NamedTuple):
    """Records and bytes of a topic that came in at a time (µs since the epoch)."""

    broker: str
    topic: str
    time: int
    records: int
    nbytes: int


Key = tuple[str, str, int]  # broker, topic, partition


class Result(NamedTuple):
    """What an audit found."""

    sources: list[Source]
    totals: dict[str, dict[Key, int]]  # finding or note → where → records
    found: list[Found]  # findings, the first ones
    noted: list[Found]
    moments: list[Moment]  # in order of time
    hours: list[Moment]

    @property
    def findings(self) -> dict[str, int]:
        """Those there are, with the number of records, or places, each is about."""
        return {what: sum(self.totals[what].values()) for what in FINDINGS if what in self.totals}

    @property
    def notes(self) -> dict[str, int]:
        """The same of the notes."""
        return {what: sum(self.totals[what].values()) for what in NOTES if what in self.totals}

    @property
    def is_good(self) -> bool:
        """Whether there is no finding."""
        return not self.findings


def audit(spark: "SparkSession", audited: list[Source], nbytes: int = SPLIT_BYTES) -> Result:
    """Audit these brokers."""
    from pyspark.sql import functions as F

    rows = evidence(spark, audited, nbytes)
    totals: dict[str, dict[Key, int]] = {}
    moments: list[Moment] = []
    # One query for all that is counted: each more takes the JVM a second of its own.
    counted = rows.groupBy("what", "broker", "topic", "partition", "time")
    for what, broker, topic, partition, time, records, size in counted.agg(F.sum("records"), F.sum("nbytes")).collect():
        if what == "records":
            moments.append(Moment(broker, topic, time, records, size))
        else:
            totals.setdefault(what, {})[broker, topic, partition] = records
    found, noted = (
        [_found(audited, each) for each in _some(rows, kinds)] if totals.keys() & kinds.keys() else []
        for kinds in (FINDINGS, NOTES)
    )
    moments.sort(key=lambda each: (each.time, each.broker, each.topic))
    return Result(audited, totals, found, noted, moments, _by_hour(moments))


def _some(rows: "DataFrame", kinds: dict[str, str]) -> list[Any]:
    from pyspark.sql import functions as F

    return rows.filter(F.col("what").isin(list(kinds))).orderBy(*_ORDER).limit(_SPANS).collect()


def _by_hour(moments: list[Moment]) -> list[Moment]:
    """The moments of each hour as one, in order of time: each lies within an hour."""
    sums: dict[tuple[str, str, int], Moment] = {}
    for each in moments:
        hour = each._replace(time=each.time - each.time % _BUCKETS[-1])
        so_far = sums.get(hour[:3])
        more = (so_far.records, so_far.nbytes) if so_far else (0, 0)
        sums[hour[:3]] = hour._replace(records=hour.records + more[0], nbytes=hour.nbytes + more[1])
    return list(sums.values())


def _found(audited: list[Source], fields: Sequence[Any]) -> Found:
    broker, row = fields[0], Row(*fields[1:])
    source = next(each for each in audited if each.name == broker)
    return Found(broker, row, _file(source, row))


def _file(source: Source, row: Row) -> str:
    """The file under the data directory where it is."""
    if not source.is_path:
        return row.path
    data = Directory(source.name).path
    if row.path:
        return os.path.relpath(row.path, data)
    directory, at = (
        ("append", row.first_seq) if row.topic == WAL else (f"topics/{row.topic}/{row.partition}", row.offset)
    )
    held = [path for first, path in segment.listing(f"{data}/{directory}") if first <= at]
    return os.path.relpath(held[-1], data) if held else ""


def run(
    spark: "SparkSession",
    where: dict[str, str],
    report: str = "",
    as_json: bool = False,
    limit: int = 20,
    progress: "Progress | None" = None,
) -> int:
    """Audit the brokers that `where` names, print what there is to say, write the HTML file `report`; 0: all good, 1: not."""
    from kmq.spark.audit import report as reports

    if progress:
        progress.describe("comparing the WAL with the queues")
    result = audit(spark, sources(where))
    if progress:
        progress.stop()
    if as_json:
        print(json.dumps(reports.table(result, limit), indent=1))
    else:
        reports.show(result, limit)
    if report:
        reports.write(result, report)
        if not as_json:
            print(f"report: {report}")
    return EXIT_OK if result.is_good else EXIT_FAILED
