"""spark.read, and what a task of Spark reads. A query is planned once, and limited to what its filters may match.

    spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load()   → tasks of offset ranges

Invariant   A task reads all records of its ranges, or raises DataLossError (failOnDataLoss=false: reads those that
            exist).
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.log.reader import WAL
from kmq.spark.source import ends, plan
from kmq.spark.source.ends import EARLIEST, LATEST
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import Bounds, DataLossError, Key, Offsets
from kmq.spark.source.planner import QueryLogs, Task

if TYPE_CHECKING:
    import pyarrow as pa

    from kmq.spark.source.batches import Blocks


class TaskReader:
    """What a task does, the same for batches and streams: read its ranges of offsets as Arrow batches."""

    def __init__(self, schema: StructType, consume: bytes = b"") -> None:
        """`consume`: see StreamReader."""
        self._names, self._consume = schema.names, consume
        if not consume:  # a reader that consumes reads columns that exist, and its planner needs no Arrow
            from kmq.spark.source import columns

            self._selection = columns.select((field.name, field.dataType.simpleString()) for field in schema.fields)

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        if not isinstance(partition, Task):
            return  # Spark's placeholder if there is nothing to read
        from kmq.spark.source import batches

        broker = partition.open()
        spans, fails = partition.spans, partition.fail_on_data_loss
        if not self._consume:
            yield from batches.read(broker, spans, self._selection, fails)
            return
        consume: Callable[[Blocks], Iterator[pa.RecordBatch]] = pickle.loads(self._consume)
        yield from consume(batches.blocks(broker, spans, self._names, fails))


class BatchReader(TaskReader, DataSourceReader):
    """spark.read: plans on the driver, once per query."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        super().__init__(schema)
        self._options = options
        self._conditions: list[Filter] = []

    def partitions(self) -> Sequence[InputPartition]:
        logs = QueryLogs(self._options)
        bounds = logs.bounds()
        start, end = logs.starting(bounds, EARLIEST), logs.ending(bounds)
        self._check_within(start, end, bounds)
        logs.check_complete(bounds)
        held = {key: edges for key, edges in bounds.items() if all(_may_hold(each, key) for each in self._conditions)}
        start, end = ({key: at[key] for key in held} for at in (start, end))
        for each in self._conditions:
            self._narrow(each, logs, start, end)
        # Never an empty list: Spark would call read(None). Requested records exist, or `_check_within` has raised.
        return logs.tasks(plan.ranges(start, {k: max(start[k], e) for k, e in end.items()}, held, False)) or [
            InputPartition(None)
        ]

    def _check_within(self, start: Offsets, end: Offsets, bounds: Bounds) -> None:
        """Raise if options request records that do not exist, or an end before the start."""
        options = self._options
        for key, (first, stop) in bounds.items():
            value = options.start.value(key)
            if not options.start.is_time and value not in (None, EARLIEST, LATEST):
                if options.fail_on_data_loss and start[key] < first:
                    raise DataLossError(key, f"startingOffsets: {start[key]} is gone, the log begins with {first}")
                if start[key] > stop:
                    raise ConfigError(
                        f"startingOffsets: {plan.name_of(key)} ends at {stop}, which is before {start[key]}"
                    )
            if options.fail_on_data_loss and end[key] > stop:
                raise DataLossError(key, f"endingOffsets: {end[key]} is not there yet, the log ends at {stop}")
            if options.fail_on_data_loss and not options.end.is_time and end[key] < first:
                raise DataLossError(key, f"endingOffsets: all before {end[key]} is gone, the log begins with {first}")
        ends.check_order(options.start, options.end, start, end)

    def _narrow(self, condition: Filter, logs: QueryLogs, start: Offsets, end: Offsets) -> None:
        """Raise starts and lower ends as far as `condition` allows; Spark still checks each row."""
        name, low, high = _span(condition)
        if name == "recv_ts":
            lows = logs.offsets_of_time(start, low) if low is not None else {}
            highs = logs.offsets_of_time(start, high + 1) if high is not None else {}
            for key in start:
                start[key], end[key] = max(start[key], lows.get(key, 0)), min(end[key], highs.get(key, end[key]))
        for key in start:
            if name == "offset" or (name == "seq" and key[1] == WAL):
                start[key] = max(start[key], low) if low is not None else start[key]
                end[key] = min(end[key], high + 1) if high is not None else end[key]


class PushdownReader(BatchReader):
    """A BatchReader that also gets the filters of the query: option pushFilters.

    Spark (4.1 to 4.3) keeps the plan of the last filters with the relation. A later scan without filters of the same
    DataFrame or view uses that plan, and so does another scan in the same statement. So it is not the default.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use the filters to read fewer partitions and segments. Return all of them: Spark still checks each row."""
        self._conditions = list(filters)
        return filters


def _may_hold(condition: Filter, key: Key) -> bool:
    """Return True if rows of this partition may pass, judging by broker, topic and partition only."""
    if not isinstance(condition, (EqualTo, In)) or len(condition.attribute) != 1:
        return True
    mine = dict(zip(("broker", "topic", "partition"), key, strict=True)).get(condition.attribute[0])
    if mine is None:
        return True
    if isinstance(condition, EqualTo):
        return bool(mine == condition.value)
    return mine in condition.value


def _span(condition: Filter) -> tuple[str, int | None, int | None]:
    """Return (column, lowest, highest): the values that may pass; of recv_ts in microseconds."""
    kinds = (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
    if not isinstance(condition, kinds) or len(condition.attribute) != 1:
        return "", None, None
    value: Any = condition.value
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        value = (int(aware.timestamp()) * 1_000_000) + aware.microsecond
    if type(value) is not int:
        return "", None, None
    low = value + isinstance(condition, GreaterThan)
    high = value - isinstance(condition, LessThan)
    if isinstance(condition, (LessThan, LessThanOrEqual)):
        return condition.attribute[0], None, high
    if isinstance(condition, (GreaterThan, GreaterThanOrEqual)):
        return condition.attribute[0], low, None
    return condition.attribute[0], low, high
