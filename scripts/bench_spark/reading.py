"""Reading: the start of a session, a topic read at once, micro-batches, and the memory of a worker."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import psutil

from bench.gauges import pss
from bench.report import Figure, say
from bench_spark.gauges import jvm_of, peak_of_workers
from bench_spark.session import ROUNDS, SIZES, Bench, figures

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COLUMNS = {
    "1 column": "value_text string",
    "3 columns": "seq bigint, routing_key string, value_text string",
    "all columns": "",
}
BARS = {"100 B, 3 columns": "≤ 0.8", "1 KB, 3 columns": "≤ 1.6"}  # kmq : text + split
BATCHES = 30  # micro-batches whose median counts
START = """
import time
begin = time.monotonic()
from kmq.spark.sessions import session
spark = session("local[2]", "bench")
ready = time.monotonic()
rows = spark.read.format("kmq").schema("seq bigint").option("path", {data!r}).option("subscribe", "test").load()
count = rows.limit(1000).count()
print("figures", ready - begin, time.monotonic() - begin, flush=True)
input()
"""


def noop(rows: "DataFrame") -> None:
    """Read all rows and discard them."""
    rows.write.format("noop").mode("overwrite").save()


def kmq(bench: Bench, data: str, columns: str) -> "DataFrame":
    reader = bench.spark.read.format("kmq").option("path", data).option("subscribe", "test")
    return (reader.schema(COLUMNS[columns]) if COLUMNS[columns] else reader).load()


def text(bench: Bench, data: str, columns: str) -> "DataFrame":
    """Return what a user would read without KMQ's source: the same columns as far as possible, without offsets."""
    from pyspark.sql import functions as F

    fields = F.split("value", r"\|", 6)
    rows = bench.spark.read.text(f"{data}/topics/test/*/*.log")
    seq, key, payload = fields[0].cast("long").alias("seq"), fields[2].alias("routing_key"), fields[5]
    if columns == "1 column":
        return rows.select(payload.alias("value_text"))
    if columns == "3 columns":
        return rows.select(seq, key, payload.alias("value_text"))
    where = F.split("_metadata.file_path", "/")
    return rows.select(
        F.lit(data).alias("broker"),
        F.element_at(where, -3).alias("topic"),
        F.element_at(where, -2).cast("int").alias("partition"),
        seq,
        recv_ts(fields[1]),
        F.regexp_extract(fields[2], r"^[^.]*\.(.*)$", 1).alias("key"),
        key,
        fields[3].alias("producer_ts"),
        F.substring_index(fields[4], ";", 1).alias("id"),
        F.str_to_map(F.regexp_replace(fields[4], "^[^;]*;?", ""), F.lit(";"), F.lit("=")).alias("headers"),
        payload.cast("binary").alias("value"),
        payload.alias("value_text"),
    )


def recv_ts(text: "Column") -> "Column":
    from pyspark.sql import functions as F

    return F.timestamp_micros((text.cast("decimal(20,6)") * 1_000_000).cast("long")).alias("recv_ts")


def start(bench: Bench) -> Iterator[Figure]:
    """Measure a new process: the time to its session, the time to its first result, and its memory then."""
    data, _ = bench.data(100)
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(data=data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        line = next(text for text in process.stdout if text.startswith("figures"))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        held = sum(pss(each.pid) for each in family) / 1e6
    finally:
        process.communicate("\n", timeout=60)
    ready, counted = map(float, line.split()[1:])
    yield Figure("start", "session ready", ready, "s")
    yield Figure("start", "first query answered", counted, "s")
    yield Figure("start", "memory then", held, "MB PSS", "", f"{len(family)} processes")


def read(bench: Bench) -> Iterator[Figure]:
    """Measure reading a topic, rows discarded."""
    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        for columns in COLUMNS:
            say(f"reading {records:,} records of {name}, {columns}")
            works = {"kmq": kmq(bench, data, columns), "text + split": text(bench, data, columns)}
            costs = bench.in_turns({what: partial(noop, rows) for what, rows in works.items()})
            what = f"{name}, {columns}"
            ours, theirs = costs.values()
            yield from figures("read", what, records, ours, theirs, "text + split", BARS.get(what, ""))


def batch(bench: Bench) -> Iterator[Figure]:
    """Measure a micro-batch of few records, beside the minimum that Spark needs."""
    data, _ = bench.data(100)
    stream = bench.spark.readStream
    reader = stream.format("kmq").schema(COLUMNS["3 columns"]).option("path", data).option("subscribe", "test")
    works = {
        "kmq": reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "100").load(),
        "rate source": bench.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load(),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1 + (2 if bench.quick else ROUNDS)):
        for name, rows in works.items():
            ms = statistics.median(durations(bench, rows))
            say(f"  {f'turn {turn}' if turn else 'warm-up'}: micro-batches of {name}: {ms:.0f} ms")
            if turn:
                taken[name].append(ms)
    ours, rate = (statistics.median(each) for each in taken.values())
    note = f"medians of {BATCHES} batches; rate source {rate:.0f} ms"
    yield Figure("batch", "micro-batch of 100 records", ours, "ms", "≤ 100", note)
    beside = statistics.median(a / b for a, b in zip(*taken.values(), strict=True))
    yield Figure("batch", "micro-batch : rate source of the JVM", beside, "x")


def durations(bench: Bench, rows: "DataFrame") -> list[int]:
    """Return the milliseconds of each micro-batch, without the first five, rows discarded."""
    place = tempfile.mkdtemp(prefix="checkpoint-", dir=bench.directory)
    writer = rows.writeStream.format("noop").option("checkpointLocation", place)
    query = writer.trigger(processingTime="0 seconds").start()
    try:
        deadline = time.monotonic() + 120
        while len(query.recentProgress) < BATCHES + 5 and time.monotonic() < deadline and query.isActive:
            time.sleep(0.05)
        return [each["durationMs"]["triggerExecution"] for each in query.recentProgress[5:]]
    finally:
        query.stop()
        shutil.rmtree(place)


def memory(bench: Bench) -> Iterator[Figure]:
    """Measure the peak memory of a Python worker that reads."""
    for name, nbytes in SIZES.items():
        data, _ = bench.data(nbytes, (100 if bench.quick else 1000) * 1_000_000 // nbytes)
        for columns in ("3 columns", "all columns"):
            say(f"memory of a worker, {name}, {columns}")
            with peak_of_workers(jvm_of(bench.spark)) as peak:
                noop(kmq(bench, data, columns))
            note = f"PSS {peak.pss / 1e6:.0f} MB; {peak.workers} Python processes"
            yield Figure("memory", f"{name}, {columns}, peak of a worker", peak.rss / 1e6, "MB RSS", "< 250", note)
