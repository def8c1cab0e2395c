"""Runs in a Spark task: read a range of offsets of one partition as Arrow batches; the same for batches and streams."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmq.log.reader import WAL
from kmq.spark.connections import Access
from kmq.spark.source import columns
from kmq.spark.source.brokers import Broker, open_broker
from kmq.spark.source.columns import Lines
from kmq.spark.source.plan import DataLossError, Key, Range

if TYPE_CHECKING:
    import pyarrow as pa


class Task(InputPartition):
    """A range, and all that another process needs to read it."""

    def __init__(self, span: Range, is_path: bool, access: Access, fail_on_data_loss: bool) -> None:
        self.broker, self.topic, self.partition = span.key
        self.start, self.end = span.start, span.end
        self.is_path, self.access, self.fail_on_data_loss = is_path, access, fail_on_data_loss


class Reading:
    """Reads a task's range; the same for batches and streams."""

    def __init__(self, schema: StructType) -> None:
        for field in schema.fields:
            columns.check(field.name, field.dataType.simpleString())
        self._names = schema.fieldNames()
        self._exact = [columns.is_exact(field.dataType.simpleString()) for field in schema.fields]
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        if not isinstance(partition, Task):
            return  # Spark's placeholder if there is nothing to read
        schema = to_arrow_schema(self._schema, timezone="UTC")
        broker = open_broker(partition.broker, partition.is_path, partition.access)
        origin = broker.identity() if "origin_broker" in self._names else ""
        where = columns.Where(partition.broker, partition.topic, partition.partition, origin)
        needs_marks = not {"key", columns.KEY_BYTES}.isdisjoint(self._names) and partition.topic != WAL
        marks_from = broker.marks_from() if needs_marks else 0
        for lines in _lines(partition, broker):
            block = columns.Block.of(lines, partition.topic, partition.topic == WAL, marks_from)
            if block.count:
                yield columns.batch(block, where, self._names, self._exact, schema)


def _lines(task: Task, broker: Broker) -> Iterator[Lines]:
    """Yield the lines of a task in blocks. Raises DataLossError if there are fewer than planned."""
    key = (task.broker, task.topic, task.partition)
    reached = task.start
    for lines in broker.blocks(task.topic, task.partition, task.start, task.end):
        if lines.offset > reached:
            _check_not_lost(task, broker, key, reached)
        yield lines
        reached = lines.next_offset
    if reached < task.end:
        _check_not_lost(task, broker, key, reached)


def _check_not_lost(task: Task, broker: Broker, key: Key, reached: int) -> None:
    """Raise DataLossError if the records at `reached` are lost; in the WAL drop_oldest may have left a gap."""
    first, end = broker.bounds([task.topic]).get((task.topic, task.partition), (task.end, task.end))
    if not task.fail_on_data_loss:
        return
    if first > reached:
        raise DataLossError(key, f"offsets {reached} to {first - 1} went while they were to be read: retention")
    if end < task.end or task.topic != WAL:
        raise DataLossError(key, f"the log ends at {min(end, reached)}, but was to be read up to {task.end - 1}")
