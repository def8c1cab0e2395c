"""Metrics: how many messages, how large, of how many keys, how late, per topic and window of time.

    from kmq.spark.pipelines.metrics import READ, measure
    measure(spark.read.format("kmq").schema(READ).option("path", "data").option("subscribePattern", ".*").load()).show()

`measure` is a function of a DataFrame, of a batch or of a stream: there a window is told once, when records of WATERMARK later
have come, and what comes later still is not counted. `run` shows a table, or adds rows to a Parquet or Delta table (exactly
once, kmq/spark/tables.py) or to a topic, as JSON (exactly once by query and batch, kmq/spark/sink.py).
"""

import re
from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.table import Table

from kmq.client.producer import local_address
from kmq.errors import ConfigError
from kmq.spark import streams
from kmq.spark.pipelines.archive import starting
from kmq.spark.tables import follow, open_table

READ = "topic string, recv_ts timestamp, routing_key binary, producer_ts string, value binary"
WINDOW = "1 minute"
WATERMARK = (
    "10 seconds"  # recv_ts never decreases within a broker: this covers partitions that are read one behind the other
)
QUANTILE_ERROR = 1000  # approx_percentile is within count / this of the right rank
MOST_SHOWN = 1000  # rows on a terminal
_DAY_S = 86_400  # a producer_ts further from recv_ts is no clock's
_JSON = r"^\s*[\[{]"  # looks like an object or a list: only then is it parsed


def measure(rows: DataFrame, window: str = WINDOW, watermark: str = WATERMARK) -> DataFrame:
    """One row per topic and window: its start, messages, bytes of payload, msg/s, sizes, keys, share of JSON, delay in seconds.

    The delay is recv_ts - producer_ts, of the messages where producer_ts is a time of that day (in s, ms or µs).
    """
    seconds = _seconds(window)
    value = F.coalesce("value", F.lit(b""))  # of a tombstone
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
    """Seconds between producer_ts and recv_ts, null where producer_ts is no such time."""
    given = F.col("producer_ts").try_cast("double")
    # The unit shows in the number: seconds have ten digits now, milliseconds three more, microseconds six.
    seconds = F.when(given >= 1e14, given / 1e6).when(given >= 1e11, given / 1e3).otherwise(given)
    delay = F.unix_micros("recv_ts") / 1e6 - seconds
    return F.when(F.abs(delay) <= _DAY_S, delay)


def _seconds(window: str) -> int:
    match = re.fullmatch(r"(\d+) (second|minute|hour|day)s?", window)
    if not match or not int(match[1]):
        raise ConfigError(f"--window {window!r}: is a number of seconds, minutes, hours or days: '1 minute'")
    return int(match[1]) * {"second": 1, "minute": 60, "hour": 3600, "day": _DAY_S}[match[2]]


# --- the pipeline ----------------------------------------------------------------------------------------------------


def summary(spark: SparkSession, where: Mapping[str, str], window: str = WINDOW) -> DataFrame:
    """All there is now, in order of time."""
    rows = spark.read.format("kmq").schema(READ).options(**where).load()
    return measure(rows, window).orderBy("start", "topic")


def as_table(figures: DataFrame) -> Table:
    """What `summary` found, for a terminal; at most MOST_SHOWN rows, the last ones."""
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
    for row in figures.withColumn("start", F.date_format("start", "yyyy-MM-dd HH:mm:ss")).tail(MOST_SHOWN):
        values = (f"{each:,}" if isinstance(each, (int, float)) else each or "" for each in row[1:9])
        delays = ("" if each is None else f"{each:.3f}" for each in row[10:])
        shown.add_row(row.start, *values, f"{row.json:.1%}", *delays)
    return shown


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str = "",
    format: str = "parquet",
    topic: str = "",
    producers: str = "",
    window: str = WINDOW,
    once: bool = True,
    checkpoint: str = "",
    every: str = streams.EVERY,
    token: str = "",
) -> int:
    """Measure as a stream, to a table (`to`) or as JSON to `topic` of the broker at `producers` (default: the one of this
    directory's settings); returns rows added to the table.

    `once`: windows that are not over are left to the next run, which goes on from the checkpoint.
    """
    if bool(to) == bool(topic):
        raise ConfigError("give --to or --topic, one of them")
    if topic and not checkpoint:
        raise ConfigError("--topic needs --checkpoint: a directory where it is written down how far the metrics are")
    rows = spark.readStream.format("kmq").schema(READ).options(**starting(where, "64m")).load()
    measured = measure(rows, window)
    if to:
        with open_table(to, format, ["date"]) as table:

            def prepare(batch: DataFrame, query: str) -> None:
                table.stage(batch.coalesce(1).withColumn("date", F.to_date("start")))

            return follow(table, measured, prepare, "metrics", once, every, checkpoint).rows
    lines = measured.select(F.col("topic").alias("key"), F.to_json(F.struct("*")).alias("value"))
    stream = lines.writeStream.format("kmq").queryName("metrics").option("checkpointLocation", checkpoint)
    if not producers:
        host, port, token = local_address()
        producers = f"{host}:{port}"
    stream = stream.option("kmq.producers", producers).option("topic", topic)
    stream = stream.option("kmq.token", token) if token else stream
    streams.run(stream, once, every)
    return 0
