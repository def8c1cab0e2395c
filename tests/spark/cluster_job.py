"""The driver of test_cluster.py: pipelines over several brokers on a given master, what each came to as a JSON line.

    python cluster_job.py <master> <host:port,…> <host:port,… of their lines> <directory> [gate]

With `gate` a job more, whose tasks each leave a file there and wait until there is one named `open`.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from kmq.spark import session
from kmq.spark.audit import audit
from kmq.spark.audit.snapshot import sources
from kmq.spark.pipelines import archive

PATIENCE_S = 300


def say(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def figures(rows: DataFrame) -> Row:
    """What is the same for the same records in any order."""
    found = rows.agg(
        F.count("*").alias("rows"), F.count_distinct("broker", "seq").alias("records"), F.sum("seq").alias("seqs")
    ).first()
    return cast(Row, found)


def main(master: str, servers: str, lines: str, directory: str, gate: str = "") -> None:
    quick = dict.fromkeys(
        (f"spark.{who}.extraJavaOptions" for who in ("driver", "executor")), "-XX:TieredStopAtLevel=1"
    )
    spark = session(master, "cluster", {"spark.executor.memory": "512m"} | quick, "fatal")
    spark.sparkContext.setLogLevel("FATAL")
    where = {"kmq.bootstrap.servers": servers, "subscribe": "orders"}
    rows = (
        spark.read.format("kmq").schema("broker string, seq bigint, key string, value binary").options(**where).load()
    )
    say(job="count", **figures(rows).asDict(), workers=len(where_tasks_run(spark)))
    copies = rows.select("value", F.lit("copies").alias("topic"), "key")
    copies.write.format("kmq").mode("append").option("kmq.producers", lines.split(",")[0]).option(
        "kmq.producer", "copy"
    ).save()
    say(job="write", rows=rows.count())
    done = archive.run(spark, where, f"{directory}/archive", schema="n int", producers=lines)
    say(job="archive", rows=done.rows, bad=done.bad, **figures_of(spark, f"{directory}/archive"))
    say(job="audit", findings=audit.audit(spark, sources({"kmq.bootstrap.servers": servers})).findings)
    if gate:
        through_gate(rows, gate).write.parquet(f"{directory}/gated")
        say(job="gated", **figures_of(spark, f"{directory}/gated"))
    spark.stop()


def figures_of(spark: SparkSession, path: str) -> dict[str, Any]:
    return {f"table_{name}": value for name, value in figures(spark.read.parquet(path)).asDict().items()}


def where_tasks_run(spark: SparkSession) -> set[str]:
    """The processes that tasks run in, of a few tasks that wait for each other's executor."""

    def process(tasks: Iterable[int]) -> Iterator[str]:
        time.sleep(0.5)  # long enough for each executor to take one
        yield open("/proc/self/stat").read().split()[3]

    return set(spark.sparkContext.parallelize(range(4), 4).mapPartitions(process).collect())


def through_gate(rows: DataFrame, gate: str) -> DataFrame:
    def wait(seq: int) -> int:
        task = TaskContext.get()
        assert task is not None
        here = Path(gate, f"task-{task.taskAttemptId()}")
        if not here.exists():
            here.touch()
            deadline = time.monotonic() + PATIENCE_S
            while not Path(gate, "open").exists():
                assert time.monotonic() < deadline, "the gate was never opened"
                time.sleep(0.02)
        return seq

    # Of a function with annotations Spark would infer a kind of UDF, and warn that this needs pandas.
    waits = F.udf(lambda seq: wait(seq), "bigint")
    return rows.select("broker", waits("seq").alias("seq"))


if __name__ == "__main__":
    main(*sys.argv[1:])
