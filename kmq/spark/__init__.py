"""KMQ on Spark: the data source and sink `format("kmq")`, and the pipelines built on it. Needs `pip install kmq[spark]`.

spark = kmq.spark.session()                                     # or any session of yours, then kmq.spark.register(spark)
spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load().show()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Make format("kmq") known to `spark`, with filters pushed down to offset ranges.

    Not needed where discovery finds it (pip install kmq[spark] on driver and executors), but then filters are not pushed down:
    Spark does that for Python sources only where its conf says so, and a source cannot ask.
    """
    from kmq.spark.source import PushdownSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PushdownSource)


def session(*args: Any, **kwargs: Any) -> "SparkSession":
    """See kmq.spark.sessions.session."""
    from kmq.spark import sessions

    return sessions.session(*args, **kwargs)


__all__ = ["register", "session"]
