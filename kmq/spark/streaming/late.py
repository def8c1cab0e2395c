"""Finds rows that a streaming query dropped because they came later than its watermark. In a pipeline that is an error.

Spark counts these rows per operator (numRowsDroppedByWatermark) and continues, so that the result is silently wrong. Of
the counters that Spark 4.3 has for operators with state, only this one means lost rows. numDroppedDuplicateRows counts
rows that the query was told to drop. skippedNullValueCount counts nulls in a join, which never match anything.

Numbers     Rows may be aggregates of several records (of one task, topic and window). The number is Spark's count of
            rows, so at least so many records were dropped.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kmq.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DROPPED = "numRowsDroppedByWatermark"
FAIL, DROP = "fail", "drop"  # what a pipeline does about late rows
ADVICE = (
    "begin again with a new table or topic, a new checkpoint and a longer --watermark,"
    " or leave them out with --late drop"
)


class LateError(KmqError):
    """Raised when rows came later than the watermark, so that they are in no result."""

    def __init__(self, query: str, batch: int, rows: int, kept: str) -> None:
        super().__init__(
            f"{query}: batch {batch} has records that came later than the watermark ({rows} or more): {kept}; {ADVICE}"
        )


def check_mode(mode: str) -> None:
    """Raise ConfigError if --late is neither `fail` nor `drop`."""
    if mode not in (FAIL, DROP):
        raise ConfigError(f"--late {mode!r}: must be {FAIL} or {DROP}")


def dropped(progress: Mapping[str, Any]) -> int:
    """Return how many late rows a batch has dropped. `progress`: a StreamingQueryProgress, parsed from JSON."""
    return sum(int(operator.get(DROPPED, 0)) for operator in progress.get("stateOperators", ()))


def dropped_so_far(spark: "SparkSession", query: str) -> int:
    """Return how many late rows the batch in `foreachBatch` has dropped, as far as its jobs have ended.

    Call it after all rows of the batch were written and before they are committed. It asks the JVM, because Python
    hears of the number only after the batch, when it is too late to hold the commit back.
    """
    running = spark._jsparkSession.streams().get(query)
    return _of_plan(running.streamingQuery().lastExecution().executedPlan())


def _of_plan(plan: Any) -> int:
    metric, below = plan.metrics().get(DROPPED), plan.children()
    mine = int(metric.get().value()) if metric.isDefined() else 0
    return mine + sum(_of_plan(below.apply(number)) for number in range(below.size()))
