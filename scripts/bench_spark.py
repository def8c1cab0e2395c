#!/usr/bin/env python3
"""How fast the data pipeline is: reading, archive, micro-batches, sink, audit and route, beside what Spark has itself.

    scripts/bench_spark.py [start read batch archive sink memory audit route] [--only PART] [--quick] [--json FILE]
                           [--dir DIR] [--memory 1g]

Each part works on directories that a broker of its own has filled over its socket (messages of 100 bytes and of 1 KB, one key).
Both sides of a ratio run in turn, after one turn that warms up, and the median of the turns' ratios counts: the machine is
noisy, and what disturbs one side disturbs the other. CPU is that of the JVM and of all Python processes.
`text + split` is what a user would do without KMQ's source: spark.read.text on the same files, split at the bars, no check of
any crc, no offsets.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from spark_gauges import Cost, in_turns, jvm_of, median, peak_of_workers, ratio

from bench.gauges import pss
from bench.pod import Pod, pod_in
from bench.report import Figure, Measure, run, say
from bench.startup import fill
from kmq.client.lines import read_port
from kmq.spark.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTS = ("start", "read", "batch", "archive", "sink", "memory", "audit", "route")
SIZES = {"100 B": 100, "1 KB": 1000}
MASTER = "local[2]"
COLUMNS = {
    "1 column": "value_text string",
    "3 columns": "seq bigint, routing_key string, value_text string",
    "all columns": "",
}
BARS = {"100 B, 3 columns": "≤ 0.8", "1 KB, 3 columns": "≤ 1.6"}  # kmq : text + split
JSON = "user string, price double, n bigint, t string"  # what the payloads of `archive` hold
ROUNDS = 5
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


class Bench:
    """The session, and the directories that have been filled."""

    def __init__(self, directory: Path, quick: bool, memory: str) -> None:
        self.directory, self.quick, self.memory = directory, quick, memory
        self._spark: SparkSession | None = None

    @property
    def spark(self) -> "SparkSession":
        if self._spark is None:
            self._spark = session(MASTER, "bench", {"spark.driver.memory": self.memory}, "fatal", listen=False)
        return self._spark

    def records(self, nbytes: int) -> int:
        return (1_000_000 if self.quick else 4_000_000) * 100 // nbytes

    def data(self, nbytes: int, records: int = 0, keys: str = "test.probe", kind: str = "count") -> tuple[str, int]:
        """(data directory, records in it) of a broker that has taken messages of `nbytes` and was stopped."""
        wanted = records or self.records(nbytes)
        home = self.directory / f"{kind}-{nbytes}-{wanted}-{keys.count(',')}"
        home.mkdir(exist_ok=True)
        with pod_in(home, up=False) as running:
            fill(running, wanted, kind, keys, min(wanted, 50_000_000 // nbytes), nbytes)
            return str(home / "data"), Pod(home).last_seq()

    def in_turns(self, works: dict[str, Callable[[], object]], rounds: int = 0) -> dict[str, list[Cost]]:
        return in_turns(jvm_of(self.spark), works, rounds or (3 if self.quick else ROUNDS), say)


def figures(
    part: str, name: str, records: int, ours: list[Cost], theirs: list[Cost], other: str, bar: str = ""
) -> Iterator[Figure]:
    """What KMQ costs beside `other`."""
    mine, its = median(ours), median(theirs)
    note = f"kmq {mine.jvm:.2f} JVM + {mine.python:.2f} Python s; {other} {its.jvm:.2f} + {its.python:.2f}"
    yield Figure(part, f"{name}, CPU : {other}", ratio(ours, theirs, lambda cost: cost.cpu), "x", bar, note)
    note = f"kmq {records / mine.wall / 1e6:.2f} M rows/s; {other} {records / its.wall / 1e6:.2f}"
    yield Figure(part, f"{name}, wall : {other}", ratio(ours, theirs, lambda cost: cost.wall), "x", bar, note)


def noop(rows: "DataFrame") -> None:
    """Make all rows, keep none."""
    rows.write.format("noop").mode("overwrite").save()


def kmq(bench: Bench, data: str, columns: str) -> "DataFrame":
    reader = bench.spark.read.format("kmq").option("path", data).option("subscribe", "test")
    return (reader.schema(COLUMNS[columns]) if COLUMNS[columns] else reader).load()


def text(bench: Bench, data: str, columns: str) -> "DataFrame":
    """What a user would do without KMQ's source, and as near to its columns as that comes: there are no offsets."""
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
    """A new process: until its session is there, until it has counted something, and what it holds then."""
    data, _ = bench.data(100)
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(data=data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        line = next(each for each in process.stdout if each.startswith("figures"))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        held = sum(pss(each.pid) for each in family) / 1e6
    finally:
        process.communicate("\n", timeout=60)
    ready, counted = map(float, line.split()[1:])
    yield Figure("start", "session ready", ready, "s")
    yield Figure("start", "first query answered", counted, "s")
    yield Figure("start", "memory then", held, "MB PSS", "", f"{len(family)} processes")


def read(bench: Bench) -> Iterator[Figure]:
    """A topic read to noop."""
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
    """What a micro-batch costs that has next to nothing to do, beside the least that Spark needs."""
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
    """Milliseconds of micro-batches to noop, the first ones left out."""
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


def archive(bench: Bench) -> Iterator[Figure]:
    """A topic of JSON objects into typed columns of a table, partitioned by hour."""
    from kmq.spark.pipelines import archive as pipeline

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes, bench.records(nbytes) // 4, kind="json")  # a table costs ten times as much
        say(f"archiving {records:,} records of {name}")

        def archived(kind: str, data: str = data) -> None:
            where = {"path": data, "subscribe": "test", "startingOffsets": "earliest"}
            with directory_in(bench) as to:
                done = pipeline.run(
                    bench.spark, where, f"{to}/table", kind, schema=JSON, bad="keep", batch_bytes="256m"
                )
                assert not done.bad, done

        def by_hand(data: str = data) -> None:
            with directory_in(bench) as to:
                parsed(bench, data).write.partitionBy("topic", "date", "hour").parquet(f"{to}/table")

        works: dict[str, Callable[[], object]] = {"kmq, parquet": partial(archived, "parquet"), "by hand": by_hand}
        ours, theirs = bench.in_turns(works, 3).values()
        yield from figures("archive", f"{name}, parquet", records, ours, theirs, "by hand", "≤ 1.2")
        (delta,) = bench.in_turns({"kmq, delta": partial(archived, "delta")}, 1).values()
        yield Figure("archive", f"{name}, delta", records / median(delta).wall / 1e6, "M rows/s")


def parsed(bench: Bench, data: str) -> "DataFrame":
    """text + split + from_json: the stored fields, those of the JSON object, and what the table is partitioned by."""
    from pyspark.sql import functions as F

    fields = F.split("value", r"\|", 6)
    rows = bench.spark.read.text(f"{data}/topics/test/*/*.log").select(
        fields[0].cast("long").alias("seq"),
        recv_ts(fields[1]),
        F.substring_index(fields[2], ".", 1).alias("topic"),
        F.regexp_extract(fields[2], r"^[^.]*\.(.*)$", 1).alias("key"),
        fields[3].alias("producer_ts"),
        fields[4].alias("id"),
        F.from_json(fields[5], JSON).alias("payload"),
    )
    flat = rows.select(*(name for name in rows.columns if name != "payload"), "payload.*")
    return flat.withColumns({"date": F.to_date("recv_ts"), "hour": F.hour("recv_ts")})


@contextmanager
def directory_in(bench: Bench) -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="table-", dir=bench.directory)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def sink(bench: Bench) -> Iterator[Figure]:
    """Rows written to a broker that is up, until it has answered for all of them."""
    from pyspark.sql import functions as F

    records = 500_000 if bench.quick else 2_000_000
    home = bench.directory / "sink"
    home.mkdir(exist_ok=True)
    say(f"writing {records:,} rows of 100 bytes")
    rows = bench.spark.range(0, records, 1, 2).select(F.rpad(F.col("id").cast("string"), 70, "x").alias("value"))
    with pod_in(home) as running:
        writer = rows.write.format("kmq").mode("append").option("topic", "test")
        writer = writer.option("kmq.producers", f"127.0.0.1:{read_port(running.settings, 'ingress', 0)}")
        names = (f"bench-{number}" for number in range(100))
        costs = bench.in_turns({"sink": lambda: writer.option("kmq.producer", next(names)).save()})["sink"]
    cost = median(costs)
    note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s, without the broker, which runs on the same cores"
    yield Figure("sink", "rows of 100 B", records / cost.wall, "rows/s", "≥ 300000", note)
    shutil.rmtree(home)


def memory(bench: Bench) -> Iterator[Figure]:
    """The largest that a Python worker gets while it reads."""
    for name, nbytes in SIZES.items():
        data, _ = bench.data(nbytes, (100 if bench.quick else 1000) * 1_000_000 // nbytes)
        for columns in ("3 columns", "all columns"):
            say(f"memory of a worker, {name}, {columns}")
            with peak_of_workers(jvm_of(bench.spark)) as peak:
                noop(kmq(bench, data, columns))
            note = f"PSS {peak.pss / 1e6:.0f} MB; {peak.workers} Python processes"
            yield Figure("memory", f"{name}, {columns}, peak of a worker", peak.rss / 1e6, "MB RSS", "< 250", note)


def audit(bench: Bench) -> Iterator[Figure]:
    """The WAL against all queues, every block and every record; the large one as a user runs it, session and all."""
    from kmq.spark.audit import audit as pipeline
    from kmq.spark.audit.snapshot import sources

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        say(f"auditing {records:,} records of {name}")

        def audited(data: str = data) -> None:
            result = pipeline.audit(bench.spark, sources({"path": data}))
            assert result.is_good, data

        cost = median(bench.in_turns({"audit": audited}, 3)["audit"])
        note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
        yield Figure("audit", name, records / cost.wall / 1e6, "M rows/s", "", note)
    if bench.quick:
        return
    keys = ",".join(f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "alerts", "metrics") for key in range(4))
    for what, chosen in (("one key", "test.probe"), ("20 keys, 5 topics", keys)):
        data, records = bench.data(100, 10_000_000, chosen)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "kmq", "pipeline", "run", "audit", "--path", data, "--master", MASTER]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=bench.directory)
        seconds = time.perf_counter() - begin
        yield Figure("audit", f"{records:,} records, {what}, as a command", seconds, "s", "< 30")


def route(bench: Bench) -> Iterator[Figure]:
    """The WAL sorted into queues, and into a table."""
    from kmq.spark.pipelines import route as pipeline

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        for kind in (pipeline.LOG, "parquet"):
            say(f"routing {records:,} records of {name} as {kind}")

            def routed(kind: str = kind, data: str = data) -> None:
                with directory_in(bench) as to:
                    pipeline.run(bench.spark, {"path": data}, f"{to}/out", kind)

            cost = median(bench.in_turns({kind: routed}, 1)[kind])
            note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
            yield Figure("route", f"{name}, {kind}", records / cost.wall / 1e6, "M rows/s", "", note)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure the data pipeline on Spark, beside Spark's own text source.",
        epilog="examples: scripts/bench_spark.py --quick; scripts/bench_spark.py --only read --json /tmp/kmq-bench.json",
    )
    parser.add_argument("--memory", default="1g", help="of the driver's JVM (default: 1g)")
    return run(parser, PARTS, "a million records, not four; no audit of ten million", prepare)


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    directory = Path(tempfile.mkdtemp(prefix="spark-", dir=options.dir))
    bench = Bench(directory, options.quick, options.memory)
    measures: dict[str, Callable[[Bench], Iterator[Figure]]] = {name: globals()[name] for name in PARTS}

    def measure(part: str) -> Iterator[Figure]:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # what the pipelines print
            yield from measures[part](bench)

    try:
        yield measure
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
