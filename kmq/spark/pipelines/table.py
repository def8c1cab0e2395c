"""Add a stream to a table, batch by batch."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from kmq.spark.streaming import streams
from kmq.spark.streaming.checkpoint import Checkpoint
from kmq.spark.streaming.streams import ONCE, Trigger
from kmq.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Followed(NamedTuple):
    """What a run of a stream added."""

    rows: int
    batches: int
    merged: int  # small files that were merged


def follow(
    table: Table,
    rows: "DataFrame",
    prepare: "Callable[[DataFrame, str], None]",
    name: str,
    trigger: Trigger = ONCE,
) -> Followed:
    """Add a stream to a table, batch by batch. `prepare(batch, query id)` stages the rows to add.

    The checkpoint is the table's own unless the trigger names one.
    """
    trigger = trigger.at(f"{table.state}/checkpoint")
    where = trigger.checkpoint.removeprefix("file://")
    table.stream.check_checkpoint(where)
    added = batches = merged = 0

    def add(batch: "DataFrame", batch_id: int) -> None:
        nonlocal added, batches, merged
        note, offsets = f"{where}/offsets/{batch_id}", None
        if os.path.exists(note):  # not in an object store: there the batch is known by its number
            offsets = Checkpoint(where).logged(batch_id).sources
        count = table.add(batch, batch_id, prepare, offsets, [note] if offsets is not None else [])
        if count is not None:
            added += count
            batches += 1
            merged += table.merge(batch.sparkSession)

    streams.follow(rows, add, name, trigger._replace(checkpoint=where))
    return Followed(added, batches, merged + table.merge(rows.sparkSession, all=True))


# --- following -------------------------------------------------------------------------------------------------------
# The options of a stream that follows topics into a table or a topic.

BATCH_BYTES = "64m"  # of lines in a micro-batch


def starting(where: Mapping[str, str], batch_bytes: str = BATCH_BYTES) -> dict[str, str]:
    """Return the options of a stream from the first record on. A pattern matches no dead letters.

    `batch_bytes`: of lines in a micro-batch.
    """
    lower = {name.lower(): text for name, text in where.items()}
    options = dict(where)
    if "subscribepattern" in lower:
        options = {name: text for name, text in where.items() if name.lower() != "subscribepattern"}
        options["subscribePattern"] = rf"(?!.*\.dlq$)(?:{lower['subscribepattern']})"
    if not {"startingoffsets", "startingtimestamp"} & lower.keys():
        options["startingOffsets"] = "earliest"
    if not {"maxbytespertrigger", "maxoffsetspertrigger"} & lower.keys():
        options["maxBytesPerTrigger"] = batch_bytes
    return options


# --- keywords --------------------------------------------------------------------------------------------------------
# The keyword arguments of a pipeline's `run`, made into the values that travel through it.
#
# def run(spark, where, to, **options: Unpack[Options]) -> Done:
#     keywords = Keywords("run", options)
#     trigger = keywords.value(Trigger, every="1 second")     # a default for this pipeline
#     …
#     keywords.check_all_taken()

T = TypeVar("T", bound=tuple[Any, ...])


class Keywords:
    """Keyword arguments, taken one value at a time."""

    def __init__(self, function: str, given: Mapping[str, Any]) -> None:
        self._function, self._given = function, dict(given)

    def value(self, kind: type[T], **defaults: Any) -> T:
        """Return a NamedTuple of the given arguments; its other fields have these defaults, or its own."""
        fields = kind._fields  # type: ignore[attr-defined]
        taken = {name: self._given.pop(name) for name in fields if name in self._given}
        return kind(**(defaults | taken))

    def check_all_taken(self) -> None:
        """Raise TypeError, as Python does, if an argument is unknown."""
        for name in self._given:
            raise TypeError(f"{self._function}() got an unexpected keyword argument {name!r}")


# --- arrow -----------------------------------------------------------------------------------------------------------
# `DataFrame.mapInArrow` where pandas is not installed.

Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(rows: DataFrame, work: Work, schema: str) -> DataFrame:
    """Return what `rows.mapInArrow(work, schema)` returns, without its need for pandas.

    Does the same as Spark's own method (pyspark.sql.pandas.map_ops, as of 4.2 and 4.3), which requires pandas although
    no part of it uses pandas.
    """
    udf = UserDefinedFunction(work, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = udf(*(rows[name] for name in rows.columns))
    return DataFrame(rows._jdf.mapInArrow(columns._jc, False, None), rows.sparkSession)
