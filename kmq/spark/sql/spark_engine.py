"""Spark as the engine of `kmq sql`.

Only the columns that a statement names are read, if its text shows for certain which these are; otherwise all columns.
If it has one scan of one topic, its filters become ranges of offsets. With two scans Spark would use them for both.

Topics in an archive (--archive) are views of the archive's table and the log together, with the table's columns.
kmq/spark/lake.py makes these views.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kmq.spark.sql.shell import GROUPS_VIEW, Engine, QueryResult, Views, group_rows, unknown_topic, words
from kmq.spark.streaming.streams import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ISO = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "tinyint", "smallint", "int", "bigint")
GROUPS_SCHEMA = (
    "`group` string, topic string, `partition` int, committed bigint, `end` bigint, lag bigint, member string,"
    " generation int, metadata string, time timestamp, broker string"
)
# Syntax that uses columns without naming them: a star, a natural join, a pipe, a statement other than a plain SELECT.
_UNNAMED = re.compile(
    r"\*|\bnatural\b|\btable\b|\blateral\b|\|>|^\s*(?!select\b|with\b|\s)"
    r"|\b(?:union|except|intersect|minus|all|distinct)\s+from\b",
    re.IGNORECASE,
)


History = Callable[[str, Mapping[str, str]], "DataFrame | None"]  # (topic, options of its source) → its view


def no_history(topic: str, options: Mapping[str, str]) -> None:
    """Return no view: all topics are read from the log."""


def engine(spark: "SparkSession", source: Mapping[str, str], history: History = no_history) -> Engine:
    """Return the engine over a session. `source`: the options that name brokers. `history`: see lake.history."""

    def cancel() -> None:  # in a thread, because the query occupies the main thread's connection to Spark
        threading.Thread(target=spark.sparkContext.cancelAllJobs).start()

    return Engine(partial(_query, spark, source, history), cancel)


@contextmanager
def _query(
    spark: "SparkSession", source: Mapping[str, str], history: History, text: str, views: Views
) -> Iterator[QueryResult]:
    with Progress(spark, "sql") as progress:
        began = time.monotonic()
        yield result(frame(spark, source, text, views, history), progress, began)


def frame(
    spark: "SparkSession", source: Mapping[str, str], text: str, views: Views, history: History = no_history
) -> "DataFrame":
    """Return the result of a statement over views of the topics that it names."""
    if views.has_cases:
        spark.conf.set("spark.sql.caseSensitive", "true")
    columns = needed(text)
    push = {"pushFilters": "true"} if is_one_scan(text, views) else {}
    for view, subscription in views.named.items():
        if (archived := history(view, {**source, **push})) is not None:
            archived.createOrReplaceTempView(f"`{view}`")
            continue
        reader = spark.read.format("kmq").options(**source, **subscription, **push)
        (reader.schema(columns) if columns else reader).load().createOrReplaceTempView(f"`{view}`")
    if views.has_groups:
        groups = spark.createDataFrame(list(group_rows(source)), GROUPS_SCHEMA)
        groups.createOrReplaceTempView(f"`{GROUPS_VIEW}`")
    try:
        return spark.sql(text)
    except Exception as error:
        if missing := re.match(r"\[TABLE_OR_VIEW_NOT_FOUND\] The table or view (\S+)", str(error)):
            raise unknown_topic(missing[1], views.topics) from None
        raise


def result(found: "DataFrame", progress: Progress, began: float = 0.0) -> QueryResult:
    """Return the result for the shell. `progress` ends before the first row is handed out."""

    def rows(limit: int) -> Iterator[Sequence[str | None]]:
        texts = _texts(found)
        taken = iter(texts.take(limit)) if limit else texts.toLocalIterator(prefetchPartitions=True)
        progress.stop()
        return taken

    def lines() -> Iterator[str]:
        from pyspark.sql.functions import struct, to_json

        objects = found.select(to_json(struct("*"), {"ignoreNullFields": "false", "timestampFormat": _ISO}))
        taken = objects.toLocalIterator(prefetchPartitions=True)
        progress.stop()
        return (line for (line,) in taken)

    kinds = [field.dataType.typeName() for field in found.schema.fields]
    numbers = [kind in _NUMBERS or kind.startswith("decimal") for kind in kinds]
    return QueryResult(found.columns, numbers, rows, lines, began)


def _texts(found: "DataFrame") -> "DataFrame":
    """Return every column as text: times in the session's zone, bytes as UTF-8. Two columns may have the same name."""
    from pyspark.sql.functions import col

    names = [f"c{number}" for number in range(len(found.columns))]
    return found.toDF(*names).select(*(col(name).cast("string") for name in names))


def is_one_scan(text: str, views: Views) -> bool:
    """Return True if a statement surely has one scan: it is one SELECT, and names one topic once."""
    found = [word.lower() for word in words(text)]
    return (
        len(views.named) == 1
        and not views.has_groups
        and found[0] == "select"
        and not {"with", "join", "view", "table"} & set(found)
        and all(found.count(word) == 1 for word in ("select", "from", next(iter(views.named)).lower()))
    )


def needed(text: str) -> str:
    """Return the schema of the columns that a query names; "" for all, if its text does not name all that it needs."""
    from kmq.spark.source.columns import COLUMNS

    text = re.sub(r"'[^']*'", "''", re.sub(r"count\s*\(\s*\*\s*\)", "count(1)", text, flags=re.IGNORECASE))
    found = [word.lower() for word in words(text)]
    if _UNNAMED.search(text) or found.count("from") > found.count("select"):
        return ""
    return ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items() if name.lower() in found) or "offset bigint"
