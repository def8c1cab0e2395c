"""Rows that a streaming query dropped because they came later than its watermark: reported, and an error in our pipelines.

Spark counts them per operator (numRowsDroppedByWatermark) and continues: the result is silently wrong. Of what Spark 4.3 counts
in operators with state, this alone means lost rows: numDroppedDuplicateRows is what was asked for, and skippedNullValueCount
counts nulls in a join that match nothing by definition.

Numbers     What is dropped may have been added up before (records of one task, topic and window are then one row): the number is
            what Spark says, and at least so many records.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kmq.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DROPPED = "numRowsDroppedByWatermark"
FAIL, DROP = "fail", "drop"  # what a pipeline does about late rows
ADVICE = "begin again with a new table or topic, a new checkpoint and a longer --watermark, or leave them out with --late drop"


class LateError(KmqError):
    """Rows came later than the watermark, and are in no result."""

    def __init__(self, query: str, batch: int, rows: int, kept: str) -> None:
        super().__init__(
            f"{query}: batch {batch} has records that came later than the watermark ({rows} or more): {kept}; {ADVICE}"
        )


def check_mode(mode: str) -> None:
    """Raise ConfigError where --late is neither of the two."""
    if mode not in (FAIL, DROP):
        raise ConfigError(f"--late {mode!r}: must be {FAIL} or {DROP}")


def dropped(progress: Mapping[str, Any]) -> int:
    """Return how many rows the batch of a StreamingQueryProgress, as JSON, has left out."""
    return sum(int(operator.get(DROPPED, 0)) for operator in progress.get("stateOperators", ()))


def dropped_so_far(spark: "SparkSession", query: str) -> int:
    """Return how many rows the batch that now runs in `foreachBatch` has left out, as far as its jobs have ended.

    Asked after all rows of the batch were written and before they are committed. By way of the JVM: Python is told after the
    batch, when it is too late to hold it back.
    """
    running = spark._jsparkSession.streams().get(query)
    return _of_plan(running.streamingQuery().lastExecution().executedPlan())


def _of_plan(plan: Any) -> int:
    metric, below = plan.metrics().get(DROPPED), plan.children()
    mine = int(metric.get().value()) if metric.isDefined() else 0
    return mine + sum(_of_plan(below.apply(number)) for number in range(below.size()))
