#!/usr/bin/env python3
"""How fast the data pipeline is: reading, archive, audit and route, beside Spark's own text source in the same run.

    scripts/bench_spark.py [start read batch archive audit route] [--quick] [--json FILE] [--dir DIR] [--memory 1g]

Each part works on directories that a broker of its own has filled over its socket (100-byte and 1-KB messages, one key). Rates
are the best of three turns, the two sides of a ratio in turn: the machine is noisy, and what disturbs one disturbs the other.
`text + split` is what a user would do without KMQ's source: spark.read.text on the same files, split at the bars, no check of
any crc.
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

from bench import Figure, Measure, Pod, fill, pod_in, pss, run, say
from kmq.spark.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTS = ("start", "read", "batch", "archive", "audit", "route")
SIZES = {"100 B": 100, "1 KB": 1000}
MASTER = "local[2]"
COLUMNS = "seq bigint, routing_key string, value_text string"
ROUNDS = 3
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
            self._spark = session(MASTER, "bench", {"spark.driver.memory": self.memory})
        return self._spark

    def records(self, nbytes: int) -> int:
        return (1_000_000 if self.quick else 4_000_000) * 100 // nbytes

    def data(self, nbytes: int, records: int = 0, keys: str = "test.probe") -> tuple[str, int]:
        """(data directory, records in it) of a broker that has taken messages of `nbytes` and was stopped."""
        wanted = records or self.records(nbytes)
        home = self.directory / f"{nbytes}-{wanted}-{keys.count(',')}"
        home.mkdir(exist_ok=True)
        with pod_in(home, up=False) as running:
            fill(running, wanted, "count", keys, min(wanted, 50_000_000 // nbytes), nbytes)
            return str(home / "data"), Pod(home).last_seq()


def best(*works: Callable[[], object]) -> list[float]:
    """The least seconds of each, over ROUNDS turns of all."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, taken in zip(works, times, strict=True):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
    return [min(each) for each in times]


def noop(rows: "DataFrame") -> None:
    """Make all rows, keep none."""
    rows.write.format("noop").mode("overwrite").save()


def kmq(bench: Bench, data: str, columns: str = "", topic: str = "test") -> "DataFrame":
    reader = bench.spark.read.format("kmq").option("path", data).option("subscribe", topic)
    return (reader.schema(columns) if columns else reader).load()


def text(bench: Bench, data: str, split: bool) -> "DataFrame":
    from pyspark.sql import functions as F

    rows = bench.spark.read.text(f"{data}/topics/test/*/*.log")
    if not split:
        return rows
    fields = F.split("value", r"\|", 6)
    return rows.select(
        fields[0].cast("long").alias("seq"), fields[2].alias("routing_key"), fields[5].alias("value_text")
    )


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
        say(f"reading {records:,} records of {name}")
        raw, split, ours, everything = best(
            *(
                partial(noop, rows)
                for rows in (
                    text(bench, data, split=False),
                    text(bench, data, split=True),
                    kmq(bench, data, COLUMNS),
                    kmq(bench, data),
                )
            )
        )
        bar = "≥ 2.5" if nbytes == 100 else ""
        yield Figure("read", f"{name}, kmq, 3 columns", records / ours / 1e6, "M rows/s", bar)
        yield Figure("read", f"{name}, kmq, all 13 columns", records / everything / 1e6, "M rows/s")
        yield Figure("read", f"{name}, text + split", records / split / 1e6, "M rows/s")
        yield Figure("read", f"{name}, text, whole lines", records / raw / 1e6, "M rows/s")
        yield Figure("read", f"{name}, kmq : text + split", 100 * split / ours, "%", "≥ 60" if bar else "")
        yield Figure("read", f"{name}, kmq : text, whole lines", 100 * raw / ours, "%")


def batch(bench: Bench) -> Iterator[Figure]:
    """What a micro-batch costs that has next to nothing to do."""
    data, _ = bench.data(100)
    reader = bench.spark.readStream.format("kmq").schema(COLUMNS).option("path", data).option("subscribe", "test")
    rows = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "100").load()
    place = tempfile.mkdtemp(prefix="checkpoint-", dir=bench.directory)
    query = (
        rows.writeStream.format("noop").option("checkpointLocation", place).trigger(processingTime="0 seconds").start()
    )
    try:
        deadline = time.monotonic() + 120
        while len(query.recentProgress) < BATCHES + 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        taken = [each["durationMs"]["triggerExecution"] for each in query.recentProgress[5:]]
    finally:
        query.stop()
        shutil.rmtree(place)
    note = f"of {len(taken)} batches; least {min(taken)}"
    yield Figure("batch", "micro-batch of 100 records, median", statistics.median(taken), "ms", "≤ 120", note)


def archive(bench: Bench) -> Iterator[Figure]:
    """A topic into a table: JSON payloads are parsed, here none are; the text stays a column."""
    from kmq.spark.pipelines import archive as pipeline

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        for kind in ("parquet", "delta"):
            say(f"archiving {records:,} records of {name} as {kind}")
            to = tempfile.mkdtemp(prefix=f"{kind}-", dir=bench.directory)
            where = {"path": data, "subscribe": "test", "startingOffsets": "earliest"}
            begin = time.perf_counter()
            pipeline.run(bench.spark, where, f"{to}/table", kind, schema=pipeline.NONE, batch_bytes="256m")
            seconds = time.perf_counter() - begin
            shutil.rmtree(to)
            yield Figure("archive", f"{name}, {kind}", records / seconds / 1e6, "M rows/s")


def audit(bench: Bench) -> Iterator[Figure]:
    """The WAL against all queues, every block and every record; the large one as a user runs it, session and all."""
    from kmq.spark.pipelines import audit as pipeline

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        say(f"auditing {records:,} records of {name}")

        def audited(data: str = data) -> None:
            result = pipeline.audit(bench.spark, pipeline.sources({"path": data}))
            assert result.is_good, data

        (seconds,) = best(audited)
        yield Figure("audit", name, records / seconds / 1e6, "M rows/s")
    if bench.quick:
        return
    keys = ",".join(f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "alerts", "metrics") for key in range(4))
    for what, chosen in (("one key", "test.probe"), ("20 keys, 5 topics", keys)):
        data, records = bench.data(100, 10_000_000, chosen)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "kmq.cli", "pipeline", "run", "audit", "--path", data, "--master", MASTER]
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
            to = tempfile.mkdtemp(prefix="route-", dir=bench.directory)
            begin = time.perf_counter()
            pipeline.run(bench.spark, {"path": data}, f"{to}/out", kind)
            seconds = time.perf_counter() - begin
            shutil.rmtree(to)
            yield Figure("route", f"{name}, {kind}", records / seconds / 1e6, "M rows/s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure the data pipeline on Spark, beside Spark's own text source.",
        epilog="examples: scripts/bench_spark.py --quick; scripts/bench_spark.py read --json /tmp/kmq-bench-spark.json",
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
