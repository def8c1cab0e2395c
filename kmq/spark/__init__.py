"""KMQ on Spark: the data source and sink `format("kmq")`, and the pipelines built on it.

Needs the extra `spark`.

    spark = kmq.spark.session()                        # or any session of yours, then kmq.spark.register(spark)
    spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load().show()
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: "SparkSession") -> None:
    """Make format("kmq") known to `spark`, with the number of its cores and with what option pushFilters needs.

    Spark finds the format without this call if kmq[spark] is installed on the driver and the executors.
    """
    from kmq.spark import failures

    failures.require_pyspark()
    from kmq.spark import format

    format.register(spark)


def session(
    master: str | None = None,
    app: str = "kmq",
    conf: Mapping[str, str] | None = None,
    log_level: str = "error",
    listen: bool = True,
) -> "SparkSession":
    """Return a session with format("kmq") registered; see kmq.spark.sessions.session."""
    from kmq.spark import sessions

    return sessions.session(master, app, conf, log_level, listen)


def table(
    spark: "SparkSession",
    topic: str,
    archive: str,
    options: Mapping[str, str] | None = None,
    catalog: str = "",
    enrich_with: str = "",
) -> "DataFrame":
    """Return a topic's rows as of now: old records from the table of its archive, the rest from the log.

    See kmq.spark.lake.table.
    """
    from kmq.spark import lake

    return lake.table(spark, topic, archive, options, catalog, enrich_with)


__all__ = ["register", "session", "table"]
