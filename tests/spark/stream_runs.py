"""Streams of format("kmq") run to the end of what there is, and their checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import PATIENCE_S
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id


def orders(low: int, high: int) -> list[bytes]:
    return [b"orders.k%d|0|%d|payload %d" % (n % 5, n, n) for n in range(low, high)]


def stream(spark: SparkSession, data: str, work: Path, keep: Callable[[DataFrame, int], None], **options: str) -> None:
    """All there is, handed to `keep` batch by batch; `data`: a directory, or host:port of a gateway."""
    where = "kmq.bootstrap.servers" if ":" in data else "path"
    reader = (
        spark.readStream.format("kmq")
        .schema("topic string, partition int, offset bigint, id string")
        .options(**{where: data} | options)
    )
    query = reader.load().writeStream.foreachBatch(keep).option("checkpointLocation", f"{work}/checkpoint")
    started = query.trigger(availableNow=True).start()
    started.awaitTermination(int(PATIENCE_S))
    if error := started.exception():
        raise error
    assert not started.isActive


def run(spark: SparkSession, data: str, work: Path, **options: str) -> list[list[str]]:
    """All there is, appended to a Parquet table; the ids of each batch, in order of batches."""
    batches: list[list[str]] = []

    def keep(df: DataFrame, number: int) -> None:
        batches.append([row.id for row in df.collect()])
        df.write.mode("append").parquet(f"{work}/table")

    stream(spark, data, work, keep, **options)
    return batches


def run_tasks(spark: SparkSession, data: str, work: Path, **options: str) -> list[dict[int, list[tuple[int, int]]]]:
    """All there is: of each batch, of each of its tasks, partition and offsets."""
    batches: list[dict[int, list[tuple[int, int]]]] = []

    def keep(df: DataFrame, number: int) -> None:
        tasks = dict[int, list[tuple[int, int]]]()
        for row in df.withColumn("task", spark_partition_id()).collect():
            tasks.setdefault(row.task, []).append((row.partition, row.offset))
        batches.append(tasks)

    stream(spark, data, work, keep, **options)
    return batches


def forget_last_commit(work: Path) -> None:
    """As a kill between the write and the commit leaves it."""
    max((work / "checkpoint/commits").glob("[0-9]*"), key=lambda path: int(path.name)).unlink()


def last_offset(work: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the last batch's end, and that end."""
    path = max((work / "checkpoint/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return path, json.loads(path.read_text().splitlines()[-1])


def ids(spark: SparkSession, work: Path) -> list[int]:
    return sorted(int(row.id) for row in spark.read.parquet(f"{work}/table").collect())


def as_format_1(work: Path) -> None:
    """The checkpoint's last offset as the release before format 2 wrote it."""
    path, table = last_offset(work)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    table = {
        broker: {name: topics[name] for name in topics if name == "__id" or not name.startswith("__")}
        for broker, topics in table.items()
    }
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], json.dumps(table)]))
