"""The producer and the number of each row of a task: what the broker knows the row by when it comes again.

    columns producer and id     are taken as they are
    columns origin_…            id = origin_offset + 1; producer <kmq.producer, or s>[-<query id>]-<origin>-<Spark partition>
    neither                     id = batch · 10⁹ + row; producer <kmq.producer, or s>[-<query id>]-<Spark partition>

`query id` in a stream, and in what its foreachBatch does. `origin` is a hash of origin_broker, origin_topic and origin_partition.

Invariant   Two rows of a task never get one number of one producer, and the numbers of a producer rise: what does not is a
            RowError before a row of its Arrow batch is sent. Two origins never share a producer: neither two partitions, nor
            two brokers where column origin_broker tells them apart.
Again       A record is known by its origin however many rows are before it, so a filter that takes other records, or a source
            that has lost some, changes no other row's number. For that the slices that the source cuts have to be the same
            again: the Spark partition stands for the slice.
"""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from kmq.errors import ConfigError, KmqError
from kmq.ids import MAX_NAME
from kmq.spark.sink.lines import Ints, RowError, numbers
from kmq.spark.sink.write_options import NAME

# Of what runs a task (Spark's own names, guarded by a test): set in streams, and in what foreachBatch does.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
BATCH_ROWS = BATCHES = 10**9  # numbers of a batch in a Spark partition; batches: 18 digits are all there are
ORIGIN = ("origin_topic", "origin_partition", "origin_offset")  # all of them, and origin_broker or not
ORIGIN_BROKER = "origin_broker"

_MAX_OFFSET = 10**18 - 2
_HASHED = 32  # digits that stand for a name that is too long
_ORIGIN_DIGITS = 16

Identity = tuple[Ints, list[tuple[str, Ints | None]]]  # ids, and whose rows (None: all)
Numbering = Callable[[pa.RecordBatch, int], Identity]


class Counted:
    """Numbers made from the place of a row."""

    def __init__(self, name: str, first: int) -> None:
        self._name, self._first = name, first

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> Identity:
        end = first_row + batch.num_rows
        if end > BATCH_ROWS:
            raise KmqError(f"over {BATCH_ROWS:,} rows in one Spark partition: more partitions, or smaller batches")
        return np.arange(self._first + first_row, self._first + end), [(self._name, None)]

    def row(self, id: int) -> int:
        """The row that got this number."""
        return id - self._first


class Given:
    """Numbers from columns `producer` and `id`. One that is not above the last would count as stored, and be lost: an error."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> Identity:
        ids = numbers(batch, first_row)
        names = batch.column("producer").cast(pa.string())
        if names.null_count:
            raise RowError(first_row + pc.index(names.is_null(), True).as_py(), "producer", "is null")
        owners = _owners(names)
        for name, rows in owners:
            of = slice(None) if rows is None else rows
            self._check(name, ids[of], np.arange(first_row, first_row + len(ids))[of])
        return ids, owners

    def _check(self, name: str, ids: Ints, rows: Ints) -> None:
        if not NAME.fullmatch(name):
            raise RowError(int(rows[0]), "producer", f"{name[:100]!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        at, before = _not_rising(self._last, name, ids)
        if at >= 0:
            why = f"{ids[at]} comes after {before} of the same producer {name}: sortWithinPartitions(producer, id)"
            raise RowError(int(rows[at]), "id", why)


class Origins:
    """Numbers from where a row comes from."""

    def __init__(self, job: str, slice_: int) -> None:
        """`job`: what all names of this write begin with."""
        self._job, self._slice = job, slice_
        self._last: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> Identity:
        offsets = self._offsets(batch, first_row)
        named = [name for name in (ORIGIN_BROKER, *ORIGIN[:2]) if name in batch.schema.names]
        columns = [batch.column(name).cast(pa.string()) for name in named]
        for name, column in zip(named, columns, strict=True):
            if column.null_count:
                raise RowError(first_row + pc.index(column.is_null(), True).as_py(), name, "is null")
        if all(len(pc.unique(column)) == 1 for column in columns):
            owners: list[tuple[str, Ints | None]] = [("|".join(column[0].as_py() for column in columns), None)]
        else:
            owners = _owners(pc.binary_join_element_wise(*columns, "|"))
        for origin, rows in owners:
            of = slice(None) if rows is None else rows
            self._check(origin, offsets[of], np.arange(first_row, first_row + len(offsets))[of])
        return offsets + 1, [(self._name_of(origin), rows) for origin, rows in owners]

    def _offsets(self, batch: pa.RecordBatch, first_row: int) -> Ints:
        column = batch.column("origin_offset").cast(pa.int64())
        bad = np.asarray(column.is_null())
        found: Ints = column.fill_null(0).to_numpy()
        bad |= (found < 0) | (found > _MAX_OFFSET)
        if bad.any():
            row = int(bad.argmax())
            raise RowError(first_row + row, "origin_offset", f"{column[row].as_py()}: must be an offset, from 0 on")
        return found

    def _check(self, origin: str, offsets: Ints, rows: Ints) -> None:
        at, before = _not_rising(self._last, origin, offsets)
        if at >= 0:
            raise RowError(
                int(rows[at]),
                "origin_offset",
                f"{offsets[at]} comes after {before} of the same origin ({origin.replace('|', ', ')}): rows take their ids from"
                " their origin, one row a record and in order. Behind explode or a shuffle drop the columns origin_…, or give"
                " columns producer and id",
            )

    def _name_of(self, origin: str) -> str:
        name = self._names.get(origin)
        if name is None:
            digest = sha256(origin.encode()).hexdigest()[:_ORIGIN_DIGITS]
            name = self._names[origin] = _fitting(self._job, f"-{digest}-{self._slice}")
        return name


def numbering(task: TaskContext, producer: str, is_stream: bool, has_ids: bool, has_origin: bool) -> Numbering:
    """What numbers this task's rows. `producer`: the option."""
    if has_ids:
        return Given()
    query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
    job, first = producer or "s", 0
    if query and batch:
        job, first = f"{job}-{query}", int(batch) * BATCH_ROWS
    elif is_stream:
        raise KmqError(f"Spark does not say which query and batch this is: no {QUERY_ID} or no {BATCH_ID}")
    if has_origin:
        return Origins(job, task.partitionId())
    if first >= BATCHES * BATCH_ROWS:
        raise ConfigError(f"batch {batch}: a query has at most {BATCHES:,}; go on with a new checkpoint")
    return Counted(_fitting(job, f"-{task.partitionId()}"), first)


def _fitting(job: str, rest: str) -> str:
    """A producer's name: a job's name that leaves no room for the rest is hashed."""
    if len(job) + len(rest) > MAX_NAME:
        job = sha256(job.encode()).hexdigest()[:_HASHED]
    return job + rest


def _owners(labels: pa.StringArray) -> list[tuple[str, Ints | None]]:
    """Each label with its rows, in their order; None: all rows."""
    coded = labels.dictionary_encode()
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    texts = coded.dictionary.to_pylist()
    return [(text, rows if len(parts) > 1 else None) for text, rows in zip(texts, parts, strict=True)]


def _not_rising(last: dict[str, int], label: str, ids: Ints) -> tuple[int, int]:
    """(place, number before it) of the first that is not above the one before it, else (-1, 0) and the last one is kept."""
    before = np.concatenate(([last.get(label, -1)], ids[:-1]))
    wrong = ids <= before
    if wrong.any():
        at = int(wrong.argmax())
        return at, int(before[at])
    last[label] = int(ids[-1])
    return -1, 0
