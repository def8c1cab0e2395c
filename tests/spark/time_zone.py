"""A session of a user elsewhere."""

from contextlib import contextmanager


@contextmanager
def tokyo(spark):
    """The tests' session, nine hours ahead of UTC."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
