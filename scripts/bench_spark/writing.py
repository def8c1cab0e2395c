"""Writing: a topic archived into a table, rows sent to a broker, what a run of each pipeline costs, and the audit."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from bench.pod import Pod, pod_in
from bench.report import Figure, say
from bench_spark.gauges import median
from bench_spark.reading import kmq, noop, recv_ts
from bench_spark.session import MASTER, SIZES, Bench, directory_in, figures
from kmq.client.lines import read_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BARS = {"100 B": "≤ 0.5", "1 KB": "≤ 0.6"}  # of the CPU by hand
_BESIDE_PAYLOAD = 30  # bytes of a line
FEW = 2000  # records; few, so that only the start of the stream costs
JSON = "user string, price double, n bigint, t string"  # what the payloads of `archive` hold


def archive(bench: Bench) -> Iterator[Figure]:
    """Measure archiving a topic of JSON objects into a table with typed columns, partitioned by hour."""
    data, records = bench.data(100, FEW, kind="json")
    (few,) = bench.in_turns({"kmq, few": partial(archived, bench, "parquet", data)}, 5).values()
    cost = median(few)
    note = f"{cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
    yield Figure("archive", f"{records:,} records, CPU", cost.cpu, "s", "≤ 0.7", note)
    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes, bench.records(nbytes) // 4, kind="json")  # a table costs ten times as much
        say(f"archiving {records:,} records of {name}")
        works: dict[str, Callable[[], object]] = {
            "kmq, parquet": partial(archived, bench, "parquet", data),
            "by hand": partial(by_hand, bench, data),
        }
        ours, theirs = bench.in_turns(works, 3).values()
        yield from figures("archive", f"{name}, parquet", records, ours, theirs, "by hand", BARS[name])
        (delta,) = bench.in_turns({"kmq, delta": partial(archived, bench, "delta", data)}, 1).values()
        yield Figure("archive", f"{name}, delta", records / median(delta).wall / 1e6, "M rows/s")


def archived(bench: Bench, kind: str, data: str) -> None:
    """Archive a topic of JSON objects into a new table."""
    from kmq.spark.pipelines import archive as pipeline

    where = {"path": data, "subscribe": "test", "startingOffsets": "earliest"}
    with directory_in(bench) as to:
        done = pipeline.run(bench.spark, where, f"{to}/table", kind, schema=JSON, bad="keep", batch_bytes="256m")
        assert not done.bad, done


def by_hand(bench: Bench, data: str) -> None:
    """Do the same without KMQ: text + split + from_json → Parquet."""
    with directory_in(bench) as to:
        parsed(bench, data).write.partitionBy("topic", "date", "hour").parquet(f"{to}/table")


def parsed(bench: Bench, data: str) -> "DataFrame":
    """Return text + split + from_json: the stored fields, the fields of the JSON object, and the partition columns."""
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


def sink(bench: Bench) -> Iterator[Figure]:
    """Measure writing rows to a running broker until it has replied to all of them."""
    records = 500_000 if bench.quick else 2_000_000
    home = bench.directory / "sink"
    home.mkdir(exist_ok=True)
    say(f"writing {records:,} rows of 100 bytes")
    with pod_in(home) as running:
        costs = bench.in_turns({"sink": sender(bench, running, records, 100)})["sink"]
    cost = median(costs)
    note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s, without the broker, which runs on the same cores"
    yield Figure("sink", "rows of 100 B", records / cost.wall, "rows/s", "≥ 300000", note)
    shutil.rmtree(home)


def sender(bench: Bench, running: Pod, records: int, nbytes: int) -> Callable[[], None]:
    """Return a function that writes rows to a running broker, as new messages at each call."""
    from pyspark.sql import functions as F

    rows = bench.spark.range(0, records, 1, 2)
    writer = rows.select(F.rpad(F.col("id").cast("string"), nbytes - _BESIDE_PAYLOAD, "x").alias("value")).write
    writer = writer.format("kmq").mode("append").option("topic", "test")
    writer = writer.option("kmq.producers", f"127.0.0.1:{read_port(running.settings, 'ingress', 0)}")
    return lambda: writer.option("kmq.producer", f"bench-{uuid4().hex[:12]}").save()


# --- what each pipeline costs ----------------------------------------------------------------------------------------


def costs(bench: Bench) -> Iterator[Figure]:
    """Measure a run of each pipeline, in turns: over few records, which is its start, and over many."""
    runs = [("100 B", *bench.data(100, FEW, kind="json"))]
    runs += [(name, *bench.data(nbytes, kind="json")) for name, nbytes in SIZES.items()]
    home = bench.directory / "sink"
    home.mkdir(exist_ok=True)
    with pod_in(home) as running:
        for name, data, count in runs:
            say(f"what each pipeline costs: {count:,} records of {name}")
            send = sender(bench, running, count, SIZES[name])
            for what, taken in bench.in_turns(works(bench, data, send), 3).items():
                cost = median(taken)
                note = f"{cost.jvm:.2f} JVM + {cost.python:.2f} Python s; {count / cost.wall / 1e6:.2f} M rows/s"
                yield Figure("costs", f"{what}, {count:,} of {name}", cost.cpu, "CPU s", "", note)


def works(bench: Bench, data: str, send: Callable[[], None]) -> dict[str, Callable[[], object]]:
    """Return each pipeline over the records of JSON in a directory; `send`: the sink's work with as many rows."""
    from kmq.spark.audit import audit as auditing
    from kmq.spark.audit.snapshot import sources
    from kmq.spark.pipelines import metrics, route

    def measured() -> None:
        with directory_in(bench) as to:
            metrics.run(bench.spark, {"path": data, "subscribe": "test"}, f"{to}/table")

    def routed(kind: str) -> None:
        with directory_in(bench) as to:
            route.run(bench.spark, {"path": data}, f"{to}/out", kind, batch_bytes="256m")

    def audited() -> None:
        assert auditing.audit(bench.spark, sources({"path": data})).is_good, data

    return {
        "read, 3 columns": lambda: noop(kmq(bench, data, "3 columns")),
        "archive": partial(archived, bench, "parquet", data),
        "archive by hand": partial(by_hand, bench, data),
        "metrics": measured,
        "route, log": partial(routed, "log"),
        "route, parquet": partial(routed, "parquet"),
        "audit": audited,
        "sink": send,
    }


def audit(bench: Bench) -> Iterator[Figure]:
    """Measure the audit of a large WAL by the command, including the start of its session."""
    keys = ",".join(f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "alerts", "metrics") for key in range(4))
    for what, chosen in (("one key", "test.probe"), ("20 keys, 5 topics", keys)):
        data, records = bench.data(100, 1_000_000 if bench.quick else 10_000_000, chosen)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "kmq", "pipeline", "run", "audit", "--path", data, "--master", MASTER]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=bench.directory)
        seconds = time.perf_counter() - begin
        yield Figure("audit", f"{records:,} records, {what}, as a command", seconds, "s", "< 30")
