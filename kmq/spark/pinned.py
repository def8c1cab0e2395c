"""Keeps stored data independent of the confs of a user's session, such as `spark.sql.session.timeZone`.

    with pinned(batch.sparkSession):
        rows.write.partitionBy("date").parquet(path)
    rows.withColumn("date", utc_date("recv_ts"))

Invariant   Dates, hours, names of partition directories, times in JSON and the format of Parquet files never depend on
            the session's confs. A user's own function (`--enrich`) always runs under the user's confs, in every batch:
            they are restored before the function is called again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

IN_UTC = {"timeZone": "UTC"}  # an option of JSON
_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000
_STORED = {
    "spark.sql.session.timeZone": "UTC",  # names of directories of a timestamp
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # other readers do not support INT96
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",  # which texts from_json accepts as times
    "spark.sql.legacy.json.allowEmptyString.enabled": "false",  # an empty text is not a number
    "spark.sql.json.enablePartialResults": "true",  # one wrong field does not discard the others
}


@contextmanager
def pinned(spark: "SparkSession") -> Iterator[None]:
    """Set the confs above for the `with` block, and restore the session's own after it."""
    before = {name: spark.conf.get(name, None) for name in _STORED}
    try:
        for name, value in _STORED.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, was in before.items():
            if was is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, was)


def utc_date(column: str) -> "Column":
    """Return the day of a timestamp in UTC. to_date would use the session's time zone."""
    from pyspark.sql import functions as F

    return F.expr(f"date_from_unix_date(int(unix_micros({column}) div {_DAY_US}))")


def utc_hour(column: str) -> "Column":
    """Return the hour of a timestamp in UTC, 0 to 23."""
    from pyspark.sql import functions as F

    return F.expr(f"int(unix_micros({column}) % {_DAY_US} div {_HOUR_US})")
