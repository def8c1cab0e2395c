"""Metrics per topic and time window: the number of messages, their sizes, keys and delays.

    from kmq.spark.pipelines.metrics import READ, measure
    measure(spark.read.format("kmq").schema(READ).option("path", "data").option("subscribePattern", ".*").load()).show()

`measure` works on a DataFrame of a batch or of a stream. In a stream a window is written once, when records of
WATERMARK later have arrived; records that arrive even later are counted in no window. `run` then ends with an error
(streaming/checkpoint.py), or drops such records if requested. It shows a table, or adds rows to a Parquet, Delta or
Iceberg table (exactly once, kmq/spark/tables) or to a topic, as JSON (exactly once per query and batch,
kmq/spark/sink/sink.py).
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Unpack

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.table import Table

from kmq.errors import ConfigError
from kmq.spark.pinned import IN_UTC, utc_date
from kmq.spark.pipelines.options import PARQUET, WATERMARK, WINDOW, MetricsOptions, complete, value
from kmq.spark.pipelines.table import follow, starting
from kmq.spark.sink.targets import Target
from kmq.spark.streaming import streams
from kmq.spark.streaming.checkpoint import FAIL, LateError, check_mode, dropped_so_far
from kmq.spark.streaming.streams import Trigger
from kmq.spark.tables import TableSpec

READ = "topic string, recv_ts timestamp, routing_key binary, producer_ts string, value binary"
PARTITION_BY = ("date",)  # of the table
QUANTILE_ERROR = 1000  # approx_percentile is within count / this of the right rank
MOST_SHOWN = 1000  # rows on a terminal
_DAY_S = 86_400  # a producer_ts further from recv_ts is not a time
_JSON = r"^\s*[\[{]"  # begins like an object or a list; other payloads are not parsed


def measure(rows: DataFrame, window: str = WINDOW, watermark: str = WATERMARK) -> DataFrame:
    """Return a row per topic and window: start, messages, bytes, msg/s, sizes, keys, share of JSON, delay in seconds.

    The delay is recv_ts - producer_ts of messages whose producer_ts is a time within a day (in s, ms or µs).
    """
    seconds = _seconds(window)
    value = F.coalesce("value", F.lit(b""))  # null: a tombstone
    text, size = value.cast("string"), F.octet_length(value)
    is_json = text.rlike(_JSON) & F.is_valid_utf8(text) & F.try_parse_json(text).isNotNull()
    of_rows = rows.select(
        "topic",
        "recv_ts",
        "routing_key",
        size.alias("size"),
        is_json.cast("int").alias("json"),
        _delay().alias("delay"),
    )
    sizes, delays = _quantiles("size"), _quantiles("delay")
    return (
        of_rows.withWatermark("recv_ts", watermark)
        .groupBy("topic", F.window("recv_ts", window).alias("window"))
        .agg(
            F.count("*").alias("messages"),
            F.sum("size").alias("bytes"),
            *(sizes[n].alias(f"size_{name}") for n, name in enumerate(("p50", "p99"))),
            F.max("size").alias("size_max"),
            F.approx_count_distinct("routing_key").alias("keys"),
            F.round(F.avg("json"), 3).alias("json"),
            *(F.round(delays[n], 6).alias(f"delay_{name}") for n, name in enumerate(("p50", "p99"))),
        )
        .select(
            *(F.col("window.start").alias("start"), "topic", "messages", "bytes"),
            *(F.round(F.col("messages") / seconds, 3).alias("msg_per_s"), "size_p50", "size_p99", "size_max"),
            *("keys", "json", "delay_p50", "delay_p99"),
        )
    )


def _quantiles(column: str) -> Column:
    return F.approx_percentile(column, [0.5, 0.99], QUANTILE_ERROR)


def _delay() -> Column:
    """Return the seconds between producer_ts and recv_ts, null if producer_ts is not a time near recv_ts."""
    given = F.col("producer_ts").try_cast("double")
    # The size of the number tells its unit: seconds have ten digits now, milliseconds three more, microseconds six.
    seconds = F.when(given >= 1e14, given / 1e6).when(given >= 1e11, given / 1e3).otherwise(given)
    delay = F.unix_micros("recv_ts") / 1e6 - seconds
    return F.when(F.abs(delay) <= _DAY_S, delay)


def _seconds(window: str, option: str = "--window") -> int:
    match = re.fullmatch(r"(\d+) (second|minute|hour|day)s?", window)
    if not match or not int(match[1]):
        raise ConfigError(f"{option} {window!r}: must be a number of seconds, minutes, hours or days: '1 minute'")
    return int(match[1]) * {"second": 1, "minute": 60, "hour": 3600, "day": _DAY_S}[match[2]]


# --- on a terminal ---------------------------------------------------------------------------------------------------


def summary(spark: SparkSession, where: Mapping[str, str], window: str = WINDOW) -> DataFrame:
    """Measure all records there are now; return the windows in order of time."""
    rows = spark.read.format("kmq").schema(READ).options(**where).load()
    return measure(rows, window).orderBy("start", "topic")


def as_table(figures: DataFrame) -> Table:
    """Return the result of `summary` as a table for a terminal: the last rows, at most MOST_SHOWN."""
    titles = (
        "start (UTC)",
        "topic",
        "messages",
        "bytes",
        "msg/s",
        "size p50",
        "p99",
        "max",
        "keys",
        "JSON",
        "delay p50 s",
        "p99 s",
    )
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        shown.add_column(title, justify="left" if title in titles[:2] else "right", no_wrap=title == titles[0])
    for row in figures.withColumn("start", F.unix_seconds("start")).tail(MOST_SHOWN):
        values = (f"{each:,}" if isinstance(each, (int, float)) else each or "" for each in row[1:9])
        delays = ("" if each is None else f"{each:.3f}" for each in row[10:])
        shown.add_row(
            f"{datetime.fromtimestamp(row.start, UTC):%Y-%m-%d %H:%M:%S}", *values, f"{row.json:.1%}", *delays
        )
    return shown


# --- the pipeline ----------------------------------------------------------------------------------------------------


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str = "",
    format: str = PARQUET,
    **options: Unpack[MetricsOptions],
) -> int:
    """Measure a stream, to a table (`to`) or as JSON to `topic`; return the rows added to the table.

    `producers`: the topic's broker; default: the broker of this directory's settings. `connection`: the sink's options
    for token, TLS and timeout.
    `once`: open windows are left to the next run, which resumes from the checkpoint. `on_late`: what happens to a batch
    with records later than `watermark`. fail: raise LateError and add nothing of that batch to a table (a topic has it
    already); drop: count the records in no window, and log that.
    """
    settings = complete(MetricsOptions, options)
    trigger, on_late, topic = value(Trigger, settings), settings["on_late"], settings["topic"]
    check_mode(on_late)
    _seconds(settings["watermark"], "--watermark")
    if bool(to) == bool(topic):
        raise ConfigError("give --to or --into, one of them")
    if topic and not trigger.checkpoint:
        raise ConfigError("--into needs --checkpoint: a directory that keeps how far the metrics are")
    rows = spark.readStream.format("kmq").schema(READ).options(**starting(where)).load()
    measured = measure(rows, settings["window"], settings["watermark"])
    if to:
        spec = value(TableSpec, settings, to=to, format=format, partition_by=PARTITION_BY)
        return _to_table(measured, spec, trigger, on_late)
    streams.check_checkpoint(trigger.checkpoint, "metrics")
    lines = measured.select(F.col("topic").alias("key"), F.to_json(F.struct("*"), IN_UTC).alias("value"))
    stream = lines.writeStream.format("kmq").queryName("metrics").option("checkpointLocation", trigger.checkpoint)
    target = Target.of(settings["producers"], settings["connection"] or {})
    if len(target.addresses) > 1:
        target.check()
    streams.run(stream.options(**target.options, topic=topic), trigger, on_late)
    return 0


def _to_table(measured: DataFrame, spec: TableSpec, trigger: Trigger, on_late: str) -> int:
    with spec.open(trigger.checkpoint) as table:
        day = utc_date("start")
        table.expect(measured.withColumn("date", day).schema)

        def prepare(batch: DataFrame, query: str) -> None:
            table.stage(batch.coalesce(1).withColumn("date", day))
            spark = measured.sparkSession
            missing = dropped_so_far(spark, query) if on_late == FAIL else 0
            if missing:
                batch_id = int(spark.sparkContext.getLocalProperty("streaming.sql.batchId") or 0)
                raise LateError("metrics", batch_id, missing, f"nothing of it was added to {spec.to}")

        return follow(table, measured, prepare, "metrics", trigger).rows
