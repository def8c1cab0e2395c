"""KMQ on Spark: the data source and sink `format("kmq")`, and the pipelines built on it. Needs `pip install kmq[spark]`.

spark = kmq.spark.session()                                     # or any session of yours, then kmq.spark.register(spark)
spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load().show()
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Make format("kmq") known to `spark`, with filters pushed down to offset ranges.

    Not needed where discovery finds it (pip install kmq[spark] on driver and executors), but then filters are not pushed down:
    Spark pushes filters to Python sources only if its conf says so, and a source cannot ask for it.
    """
    from kmq.spark import format

    format.register(spark)


def session(
    master: str | None = None,
    app: str = "kmq",
    conf: Mapping[str, str] | None = None,
    log_level: str = "error",
    listen: bool = True,
) -> "SparkSession":
    """Return a session with format("kmq") registered: see kmq.spark.sessions.session."""
    from kmq.spark import sessions

    return sessions.session(master, app, conf, log_level, listen)


__all__ = ["register", "session"]
