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
    from kmq.spark.connections import SECRETS
    from kmq.spark.source.source import source_for

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    # Spark's own pattern (spark.redaction.regex) has both, but whoever sets another one thinks of names of their own.
    redacted = spark.conf.get("spark.sql.redaction.options.regex") or ""
    if SECRETS not in redacted:
        spark.conf.set("spark.sql.redaction.options.regex", f"{redacted}|{SECRETS}" if redacted else SECRETS)
    try:
        cores = spark.sparkContext.defaultParallelism
    except AttributeError:  # over Spark Connect nobody says
        cores = 0
    spark.dataSource.register(source_for(cores))


def session(*args: Any, **kwargs: Any) -> "SparkSession":
    """See kmq.spark.sessions.session."""
    from kmq.spark import sessions

    return sessions.session(*args, **kwargs)


__all__ = ["register", "session"]
