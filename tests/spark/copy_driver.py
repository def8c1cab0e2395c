"""A Spark driver that copies topic `from` to topic `to` and kills itself where it is told. Its argument is the plan, as JSON.

point       read: in the source, behind the first rows of a task       write: in the sink, behind so many rows of a task
            written: in the sink, when a task has stored all its rows   commit: between sink and Spark's commit
            plan: when the next batch is planned                        fail: as write, but only the task's first attempt fails
batch       in which micro-batch
rows        of a task before it happens (write, fail)
orphans     kill driver and JVM, and let Python workers live on; else everything that this driver has started
filter      SQL that says which records are copied          slices, cores: how many tasks there are for them
replay      kmq.replay, and rows that come again are compared with what is stored; without it the broker compares
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition, WriterCommitMessage

from kmq.spark.format import KmqDataSource
from kmq.spark.sessions import session
from kmq.spark.sink.sink import BATCH_ID, KmqStreamWriter, KmqWriter
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.stream_reader import StreamReader

Plan = dict[str, Any]


def die(plan: Plan) -> None:
    """SIGKILL for the driver. Of its workers orphans may remain; this process then goes on as one."""
    driver, jvm = map(int, Path(plan["pids"]).read_text().split())
    if plan.get("orphans"):
        daemon = psutil.Process(
            os.getppid()
        )  # it would end them; another orphan may have killed it, then this is not it
        victims = [daemon.pid] * ("pyspark.daemon" in daemon.cmdline()) + [jvm, driver]
    else:
        session_id = os.getsid(0)
        others = [each.pid for each in psutil.process_iter() if os.getsid(each.pid) == session_id]
        victims = [jvm, driver, *(pid for pid in others if pid not in (jvm, driver, os.getpid())), os.getpid()]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def is_now(plan: Plan, point: str, batch: int | None = None) -> bool:
    """Whether this is the time; in a task Spark says which batch it is, elsewhere the caller."""
    if batch is None:
        task = TaskContext.get()
        assert task is not None
        batch = int(task.getLocalProperty(BATCH_ID) or 0)
    return bool(plan["point"] == point and batch == plan["batch"])


class Reader(StreamReader):
    plan: Plan

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch
            if is_now(self.plan, "read"):
                die(self.plan)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        at = sum(int(n) for n in _numbers(start))
        if self.plan["point"] == "plan" and at >= self.plan["batch"] * self.plan["max"]:
            die(self.plan)
        return super().partitions(start, end)


def _numbers(offsets: Any) -> Iterator[int]:
    if isinstance(offsets, dict):
        for each in offsets.values():
            yield from _numbers(each)
    elif isinstance(offsets, int):
        yield offsets


class Writing:
    """Around the iterator of a task's rows."""

    plan: Plan

    def write(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        written = super().write(self._until(batches))  # type: ignore[misc]
        if is_now(self.plan, "written"):
            die(self.plan)
        return written  # type: ignore[no-any-return]

    def _until(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in batches:
            if rows >= self.plan["rows"]:
                self._now()
            yield batch
            rows += batch.num_rows

    def _now(self) -> None:
        if is_now(self.plan, "write"):
            die(self.plan)
        task = TaskContext.get()
        if is_now(self.plan, "fail") and task is not None and not task.attemptNumber():
            raise RuntimeError("as told")


class StreamWriter(Writing, KmqStreamWriter):  # type: ignore[misc]
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().commit(messages, batchId)
        if is_now(self.plan, "commit", batchId):
            die(self.plan)


class Writer(Writing, KmqWriter):  # type: ignore[misc]
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        super().commit(messages)
        if is_now(self.plan, "commit", 0):
            die(self.plan)


class Source(KmqDataSource):
    """The product, with the product's classes but for what is above."""

    @classmethod
    def name(cls) -> str:
        return "kmq-killed"

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__({name: text for name, text in options.items() if name != "plan"})
        self.plan = json.loads(options["plan"])

    def streamReader(self, schema: Any) -> Any:
        return self._told(Reader(schema, ReadOptions(self.options)))

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return self._told(StreamWriter(schema, self.options, overwrite))

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return self._told(Writer(schema, self.options, overwrite))

    def _told(self, what: Any) -> Any:
        what.plan = self.plan
        return what


def main() -> None:
    plan: Plan = {"point": "", "batch": 0, "rows": 0, "max": 1000, "cores": 2} | json.loads(sys.argv[1])
    # Small Arrow batches, so that there is much between two of them; the third attempt of a task succeeds.
    # A JVM that lives for some seconds is better off without its second compiler.
    conf = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    spark = session(f"local[{plan['cores']},3]", conf=conf)
    jvm = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    Path(plan["pids"]).write_text(f"{os.getpid()} {jvm}")
    spark.dataSource.register(Source)
    told = {"plan": json.dumps(plan)}
    to = told | {"kmq.producers": plan["producers"], "topic": "to"}
    if plan.get("replay"):
        to |= {"kmq.replay": plan["replay"], "path": plan["data"]}
    if plan.get("lines"):
        df = spark.read.text(plan["lines"])
        df.write.format("kmq-killed").mode("append").options(**to).option("kmq.producer", "batch").save()
        return
    reader = (
        spark.readStream.format("kmq-killed").options(**told).option("path", plan["data"]).option("subscribe", "from")
    )
    reader = reader.option("minPartitions", plan.get("slices", 1)).option("maxOffsetsPerTrigger", plan["max"])
    df = reader.option("startingOffsets", "earliest").load().where(plan.get("filter", "true"))
    query = df.writeStream.format("kmq-killed").options(**to).option("checkpointLocation", plan["checkpoint"])
    (query if plan.get("forever") else query.trigger(availableNow=True)).start().awaitTermination()


if __name__ == "__main__":
    main()
