"""A session of a user elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tokyo(spark: Any) -> Iterator[None]:
    """The tests' session, nine hours ahead of UTC."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
