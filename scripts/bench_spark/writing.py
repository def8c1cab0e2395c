"""Writing: a topic archived into a table, and rows sent to a broker."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from bench.pod import pod_in
from bench.report import Figure, say
from bench_spark.gauges import median
from bench_spark.reading import recv_ts
from bench_spark.session import SIZES, Bench, directory_in, figures
from kmq.client.lines import read_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BARS = {"100 B": "≤ 0.5", "1 KB": "≤ 0.6"}  # of the CPU by hand
FEW = 2000  # records, of which the start of the stream is all that costs
JSON = "user string, price double, n bigint, t string"  # what the payloads of `archive` hold


def archive(bench: Bench) -> Iterator[Figure]:
    """Measure archiving a topic of JSON objects into a table with typed columns, partitioned by hour."""
    from kmq.spark.pipelines import archive as pipeline

    def archived(kind: str, data: str) -> None:
        where = {"path": data, "subscribe": "test", "startingOffsets": "earliest"}
        with directory_in(bench) as to:
            done = pipeline.run(bench.spark, where, f"{to}/table", kind, schema=JSON, bad="keep", batch_bytes="256m")
            assert not done.bad, done

    data, records = bench.data(100, FEW, kind="json")
    (few,) = bench.in_turns({"kmq, few": partial(archived, "parquet", data)}, 5).values()
    cost = median(few)
    note = f"{cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
    yield Figure("archive", f"{records:,} records, CPU", cost.cpu, "s", "≤ 0.7", note)
    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes, bench.records(nbytes) // 4, kind="json")  # a table costs ten times as much
        say(f"archiving {records:,} records of {name}")

        def by_hand(data: str = data) -> None:
            with directory_in(bench) as to:
                parsed(bench, data).write.partitionBy("topic", "date", "hour").parquet(f"{to}/table")

        works: dict[str, Callable[[], object]] = {
            "kmq, parquet": partial(archived, "parquet", data),
            "by hand": by_hand,
        }
        ours, theirs = bench.in_turns(works, 3).values()
        yield from figures("archive", f"{name}, parquet", records, ours, theirs, "by hand", BARS[name])
        (delta,) = bench.in_turns({"kmq, delta": partial(archived, "delta", data)}, 1).values()
        yield Figure("archive", f"{name}, delta", records / median(delta).wall / 1e6, "M rows/s")


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
