"""The records of ranges of offsets as Arrow batches, for a task of Spark and for a query of DuckDB. Imports neither.

    read(broker, [OffsetSpan(("data", "orders", 0), 0, 1500)], selection)   → Arrow batches with the selected columns

Invariant   All records of the ranges are handed out, in order, or DataLossError is raised (`fail_on_data_loss` false:
            only those that exist are handed out).
Memory      One block of lines, and the batch that is made of it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kmq.log.reader import WAL
from kmq.spark.source import columns
from kmq.spark.source.broker import Broker
from kmq.spark.source.columns import KEY_BYTES, ColumnSelection, Lines
from kmq.spark.source.plan import DataLossError, OffsetSpan, warn_skipped

if TYPE_CHECKING:
    import pyarrow as pa

Blocks = Iterator[tuple[columns.Block, columns.Where]]


def read(
    broker: Broker, spans: Sequence[OffsetSpan], selection: ColumnSelection, fail_on_data_loss: bool = True
) -> Iterator["pa.RecordBatch"]:
    """Yield the columns of `selection` of the records of these ranges, one after the other."""
    for block, where in blocks(broker, spans, selection.names, fail_on_data_loss):
        yield columns.batch(block, where, selection.names, selection.exact, selection.schema)


def blocks(broker: Broker, spans: Sequence[OffsetSpan], names: Sequence[str], fail_on_data_loss: bool = True) -> Blocks:
    """Yield the records of these ranges in blocks that are not empty, ready for the columns `names`."""
    origin = broker.identity() if "origin_broker" in names else ""
    needs_marks = not {"key", KEY_BYTES}.isdisjoint(names) and any(span.key[1] != WAL for span in spans)
    marks_from = broker.marks_from() if needs_marks else 0
    for span in spans:
        _, topic, partition = span.key
        where = columns.Where(broker.name, topic, partition, origin)
        for lines in _lines(broker, span, fail_on_data_loss):
            block = columns.Block(lines, topic, topic == WAL, marks_from)
            if block.count:
                yield block, where


def _lines(broker: Broker, span: OffsetSpan, fail_on_data_loss: bool) -> Iterator[Lines]:
    """Yield the lines of a range in blocks. Raises DataLossError if there are fewer than planned."""
    _, topic, partition = span.key
    reached = span.start
    for lines in broker.blocks(topic, partition, span.start, span.end):
        if lines.offset > reached:
            _check_not_lost(broker, span, reached, fail_on_data_loss)
        yield lines
        reached = lines.next_offset
    if reached < span.end:
        _check_not_lost(broker, span, reached, fail_on_data_loss)


def _check_not_lost(broker: Broker, span: OffsetSpan, reached: int, fails: bool) -> None:
    """Raise DataLossError, or only log, if the records at `reached` are lost; in the WAL drop_oldest may leave a gap."""
    _, topic, partition = span.key
    first, end = broker.bounds([topic]).get((topic, partition), (span.end, span.end))
    if not fails:
        if first > reached:
            warn_skipped(OffsetSpan(span.key, reached, min(first, span.end)))
        elif end < span.end:
            warn_skipped(OffsetSpan(span.key, min(end, reached), span.end))
        return
    if first > reached:
        gone = f"offsets {reached} to {first - 1} went while they were to be read: retention"
        raise DataLossError(span.key, gone)
    if end < span.end or topic != WAL:
        short = f"the log ends at {min(end, reached)}, but was to be read up to {span.end - 1}"
        raise DataLossError(span.key, short)
