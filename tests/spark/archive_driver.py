"""A driver that archives and is killed at one place: python archive_driver.py <point> <batch> <with its JVM> <arguments of run>.

It stands in for `kmq pipeline run archive`, whose code has no such places.
"""

import json
import os
import signal
import sys
import warnings
from typing import Any

from pyspark import SparkContext
from pyspark.errors import StreamingQueryException

from kmq.spark.pipelines import archive, archive_task
from kmq.spark.pipelines.archive import LetterWriter
from kmq.spark.sessions import session
from kmq.spark.tables import Delta, Iceberg, Parquet, Table
from kmq.spark.tables.base import BoundStream, Staging

point, batch, with_jvm, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "group", json.loads(sys.argv[4])


def kill() -> None:
    """This process; or the JVM, which is in a session of its own, and then this process."""
    if with_jvm:
        os.killpg(SparkContext._gateway.proc.pid, signal.SIGKILL)  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner: type, name: str, before: bool) -> None:
    """Die in `owner.name` in that batch, before it does its work or after."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before and begun:
            kill()
        done = real(self, *args, **kwargs)
        if begun:
            kill()
        return done

    setattr(owner, name, method)


begun: list[int] = []
real_bind = BoundStream.bind


def bind(self: BoundStream, query: str, batch_id: int) -> None:
    real_bind(self, query, batch_id)
    if batch_id == batch:
        begun.append(batch_id)


def die(*_: Any) -> Any:
    """In the process of a task: in place of what it does with its records."""
    os.kill(os.getpid(), signal.SIGKILL)


BoundStream.bind = bind  # type: ignore[method-assign]
if point == "worker":
    archive_task.write_part = die  # type: ignore[assignment]
elif point == "tasks":  # have written all parts, of which none is a part of the batch yet
    dying(Staging, "accept", True)
elif point == "accepted":  # some parts are
    dying(Staging, "accept", False)
elif point == "letters":  # sent, and not yet in the table
    dying(LetterWriter, "send", False)
elif point == "judged":  # the records that are not surely good are written
    dying(Table, "write", False)
elif point == "sealed":  # none of its files is moved
    dying(Table, "_publish", True)
elif point == "moved":  # all of its files are; Delta's log and the batch's number are not written
    dying(Delta, "_record", True)
    dying(Iceberg, "_record", True)
    dying(Parquet, "_record", True)
elif point == "committed":  # and Spark does not know
    dying(Table, "commit", False)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spark = session("local[2]", "archive", {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
try:
    archive.run(spark, **arguments)
except StreamingQueryException:
    assert point == "worker"
    kill()
