"""The producer and id of each row of a task: by them the broker recognizes the row when it is sent again.

    columns producer and id     used as they are
    columns origin_…            id = origin_offset + 1; producer <kmq.producer, or s>[-<query id>]-<origin>-<Spark
                                partition>
    neither                     id = batch · 10⁹ + row; producer <kmq.producer, or s>[-<query id>]-<Spark partition>

`query id` is there in a stream and in its foreachBatch. `origin` is a hash of the other columns origin_…

Invariant   Two rows of a task never get the same id of the same producer, and the ids of a producer always rise: an id
            that does not is a RowError before any row of its Arrow batch is sent. Two origins never share a producer:
            neither two partitions, nor two brokers that column origin_broker tells apart.
Again       An id made of an origin does not depend on how many rows come before it. So a filter that selects other
            records, or a source that has lost some, changes no other row's id. This needs the source to cut the same
            slices again, because the number of the Spark partition stands for the slice.
"""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from kmq.errors import ConfigError, KmqError
from kmq.message.ids import MAX_NAME
from kmq.spark.sink.lines import Ints, RowError, numbers
from kmq.spark.sink.targets import NAME

# Local properties of a task (Spark's own names, guarded by a test): set in streams, and inside foreachBatch.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
BATCH_ROWS = BATCHES = 10**9  # ids of a batch in a Spark partition, and batches of a query: an id has 18 digits
ORIGIN = ("origin_topic", "origin_partition", "origin_offset")  # all three are required; origin_broker is optional
ORIGIN_BROKER = "origin_broker"

_MAX_OFFSET = 10**18 - 2
_HASHED = 32  # hex digits that replace a name that is too long
_ORIGIN_DIGITS = 16

Identity = tuple[Ints, list[tuple[str, Ints | None]]]  # the ids, and each producer with its rows; None: all rows
Numbering = Callable[[pa.RecordBatch, int], Identity]


class Counted:
    """Make ids from the place of a row in its Spark partition."""

    def __init__(self, name: str, first: int) -> None:
        self._name, self._first = name, first

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> Identity:
        end = first_row + batch.num_rows
        if end > BATCH_ROWS:
            raise KmqError(f"over {BATCH_ROWS:,} rows in one Spark partition: more partitions, or smaller batches")
        return np.arange(self._first + first_row, self._first + end), [(self._name, None)]

    def row(self, id: int) -> int:
        """Return the row that got this id."""
        return id - self._first


class Given:
    """Take ids from columns `producer` and `id`.

    An id must be above the previous one: the broker would count it as stored already, and the row would be lost.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> Identity:
        ids = numbers(batch, first_row)
        names = batch.column("producer").cast(pa.string())
        if names.null_count:
            raise RowError(first_row + pc.index(names.is_null(), True).as_py(), "producer", "is null")
        owners = _owners(names)
        for name, rows in owners:
            own = slice(None) if rows is None else rows
            self._check(name, ids[own], np.arange(first_row, first_row + len(ids))[own])
        return ids, owners

    def _check(self, name: str, ids: Ints, rows: Ints) -> None:
        if not NAME.fullmatch(name):
            raise RowError(int(rows[0]), "producer", f"{name[:100]!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        at, before = _not_rising(self._last, name, ids)
        if at >= 0:
            why = f"{ids[at]} comes after {before} of the same producer {name}: sortWithinPartitions(producer, id)"
            raise RowError(int(rows[at]), "id", why)


class Origins:
    """Make ids from the record that a row was made of."""

    def __init__(self, job: str, slice_: int) -> None:
        """`job`: the prefix of all producer names of this write."""
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
            own = slice(None) if rows is None else rows
            self._check(origin, offsets[own], np.arange(first_row, first_row + len(offsets))[own])
        return offsets + 1, [(self._name_of(origin), rows) for origin, rows in owners]

    def _offsets(self, batch: pa.RecordBatch, first_row: int) -> Ints:
        column = batch.column("origin_offset").cast(pa.int64())
        bad = np.asarray(column.is_null())
        offsets: Ints = column.fill_null(0).to_numpy()
        bad |= (offsets < 0) | (offsets > _MAX_OFFSET)
        if bad.any():
            row = int(bad.argmax())
            raise RowError(first_row + row, "origin_offset", f"{column[row].as_py()}: must be an offset, from 0 on")
        return offsets

    def _check(self, origin: str, offsets: Ints, rows: Ints) -> None:
        at, before = _not_rising(self._last, origin, offsets)
        if at >= 0:
            raise RowError(
                int(rows[at]),
                "origin_offset",
                f"{offsets[at]} comes after {before} of the same origin ({origin.replace('|', ', ')}): rows take"
                " their ids from their origin, one row a record and in order. After explode or a shuffle drop the"
                " columns origin_…, or give columns producer and id",
            )

    def _name_of(self, origin: str) -> str:
        name = self._names.get(origin)
        if name is None:
            digest = sha256(origin.encode()).hexdigest()[:_ORIGIN_DIGITS]
            name = self._names[origin] = fitting_name(self._job, f"-{digest}-{self._slice}")
        return name


def numbering(task: TaskContext, producer: str, is_stream: bool, has_ids: bool, has_origin: bool) -> Numbering:
    """Return what gives this task's rows their producers and ids. `producer`: option kmq.producer."""
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
    return Counted(fitting_name(job, f"-{task.partitionId()}"), first)


def fitting_name(job: str, rest: str) -> str:
    """Return a producer's name; a job name that leaves no room for the rest is hashed."""
    if len(job) + len(rest) > MAX_NAME:
        job = sha256(job.encode()).hexdigest()[:_HASHED]
    return job + rest


def _owners(labels: pa.StringArray) -> list[tuple[str, Ints | None]]:
    """Return each label with its rows in order; None stands for all rows."""
    coded = labels.dictionary_encode()
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    texts = coded.dictionary.to_pylist()
    return [(text, rows if len(parts) > 1 else None) for text, rows in zip(texts, parts, strict=True)]


def _not_rising(last: dict[str, int], label: str, ids: Ints) -> tuple[int, int]:
    """Return (place, previous id) of the first id that is not above the previous one.

    Without such an id return (-1, 0), and remember the last id in `last`.
    """
    before = np.concatenate(([last.get(label, -1)], ids[:-1]))
    wrong = ids <= before
    if wrong.any():
        at = int(wrong.argmax())
        return at, int(before[at])
    last[label] = int(ids[-1])
    return -1, 0
