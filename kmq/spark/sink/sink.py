"""format("kmq") for writing: send the rows of a batch or a stream as messages; a row sent again is stored once.

    df.write.format("kmq").mode("append").option("kmq.producers", "a:5673").option("topic", "orders")
        .option("kmq.producer", "backfill-7").option("path", "data").save()
    df.writeStream.format("kmq").option("kmq.producers", "a:5673").option("path", "data")
        .option("checkpointLocation", …)

Columns, by name; other columns are ignored:
    value               binary or string; null is a tombstone, an empty value is not
    routing_key         binary or string, as in the line. Or columns topic and key. Or option `topic`, which overrides
                        both, and column key (null: no key)
    producer_ts         string or timestamp; default: now
    headers             map<string,string>, or Kafka's array<struct<key:string,value:binary>>
    partition           int; with usePartition=true the partition of its topic that a row is sent to (null: the key
                        decides). Otherwise it is ignored, with a warning
    producer and id     the name and the number by which the broker knows a row; used only if both columns exist. Ids
                        have at most 18 digits and rise within a producer, whose rows of a batch are in one Spark
                        partition: df.repartition("producer").sortWithinPartitions("producer", "id")
    origin_topic, origin_partition, origin_offset, and origin_broker if rows come from several brokers
                        the record that a row was made of (the source provides them with includeOrigin=true). All or
                        none. One row per record, not shuffled

Options:
    kmq.producers       where ingress listens: host:5673; several are comma-separated. A Spark partition (with column
                        producer: a producer) always writes to the same broker of the list, a shard's through whichever
                        of its addresses serves. Do not change the list during the life of a checkpoint
    path                data directories of these brokers, or kmq.bootstrap.servers, their gateways, spelled as for the
                        source: there a row that is sent again is compared with the stored record
    kmq.replay          what happens to a row whose id belongs to another row, see Again: stop (default), again, trust
    kmq.token           bearer token, if the broker requires one
    topic               the topic of all rows
    usePartition        true: column partition decides. A partition that the topic does not have fails the task
    kmq.producer        the name of this job. A batch requires it, because nothing else identifies the batch. Each write
                        of a foreachBatch requires a name of its own
    kmq.timeout         how long to wait for a broker that does not reply, as 30s or in seconds (600), with a warning
                        every 10 s
    kmq.probe           false: the driver does not check the brokers for permanent faults first, see Before
    kmq.ssl.…           TLS, certificates: kmq/spark/connections.py. With any of these options an address has TLS and
                        port 5443, unless it is tcp://host:5673; without them only tls://host:5443 has TLS

Ids         By the producer and the id in its line the broker recognizes a row that is sent again. `query id` is there
            in a stream and in its foreachBatch; `origin` is a hash of the columns origin_… except origin_offset:
                columns producer and id   used as they are
                columns origin_…          id = origin_offset + 1
                                          producer <kmq.producer, or s>[-<query id>]-<origin>-<Spark partition>
                neither                   id = batch · 10⁹ + row; if Spark repeats a batch from the same checkpoint, it
                                          gives the batch the same number
                                          producer <kmq.producer, or s>[-<query id>]-<Spark partition>
            Two rows of a task never get the same id of the same producer, and the ids of a producer always rise: an id
            that does not is a RowError before any row of its Arrow batch is sent. Two origins never share a producer:
            neither two partitions, nor two brokers that column origin_broker tells apart.
Invariant   A row never counts as stored because of another row. `!dup` (the broker has this id) counts only if the
            record stored under the id has the same content: topic, key, the user's headers and value, to the byte
            (sender.py). So whatever has changed between two runs of a batch, no row of the last run is missing when it
            succeeds. Without `path` or kmq.bootstrap.servers the broker compares, by a 32-bit checksum, and only the
            last 4,096 ids of a producer. A task that meets an older id stops, and asks for the option.
Crash       of the driver, an executor, a Python worker: Spark sends the rows again with the same ids. If they are the
            same rows in the same Spark partitions and order, each is stored once. of the broker: kmq.Producer
            reconnects and sends the lines without a reply again; each row is stored once. Writers that a dead driver
            leaves behind, and speculative attempts: the later one fences the earlier one, which pauses and tries again,
            so that neither blocks the other forever. A row that both send is stored once.
Again       Rows that differ from what is stored under their ids (another filter, other Spark partitions, a compacted
            source) end the task with an error that shows the row, what is stored and what came. So does an id whose
            record no log holds any more, and an id below the last one that the broker does not know. Then the user
            decides. kmq.replay=again: a row whose id is taken is stored under the producer's next name, name:1, name:2
            … It may be stored twice, but a further replay finds each row where this one put it. kmq.replay=trust: the
            row counts as stored, and a row that has changed is lost. Rows that moved to Spark partitions that did not
            exist before have new ids: they are stored again, unnoticed. With columns origin_… a row keeps its id,
            however many rows come before it: a filter that selects other records, or a source that has lost some,
            changes no other row's id. This needs the source to cut the same slices again, because the number of the
            Spark partition stands for the slice.
Order       A replay must deliver the rows in the same order. Files and KMQ do. After a shuffle this needs
            sortWithinPartitions by columns that tell all rows apart, or columns producer and id.
Before      A batch write, and a stream that has not committed a batch yet, first connects to each broker from the
            driver: an unknown host, or a certificate or token that is refused, is one line before any task. The tasks
            wait for a broker that is down, and for a host they do not know, because a pod that is being replaced has no
            name for a while. In a foreachBatch each write checks; kmq.probe=false leaves it to the tasks.
Not covered There is no transaction: rows are readable as soon as they are stored, even if their batch fails later, or
            if a changed batch no longer contains them. Two equal rows cannot be told apart: two equal writes under one
            name are stored as one. Without `path`, rows that another attempt stores while a connection is broken count
            as this task's own. The broker drops checksums while over 64 producers write at the same time; an id without
            a checksum counts. A broker forgets a producer that is idle for KMQ_PRODUCER_TTL (30 days); its rows are
            then stored again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from kmq.config.values import KIB
from kmq.errors import ConfigError, KmqError
from kmq.message.ids import MAX_NAME
from kmq.spark.sink.lines import Ints, RowError, block, numbers, pieces, to_lines
from kmq.spark.sink.sender import NoPartition, ReplayError, Senders, log
from kmq.spark.sink.targets import NAME, WriteOptions, check_all, has_begun

# --- producers and ids -----------------------------------------------------------------------------------------------

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


class CountedIds:
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


class GivenIds:
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


class OriginIds:
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
        return GivenIds()
    query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
    job, first = producer or "s", 0
    if query and batch:
        job, first = f"{job}-{query}", int(batch) * BATCH_ROWS
    elif is_stream:
        raise KmqError(f"Spark does not say which query and batch this is: no {QUERY_ID} or no {BATCH_ID}")
    if has_origin:
        return OriginIds(job, task.partitionId())
    if first >= BATCHES * BATCH_ROWS:
        raise ConfigError(f"batch {batch}: a query has at most {BATCHES:,}; go on with a new checkpoint")
    return CountedIds(fitting_name(job, f"-{task.partitionId()}"), first)


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


# --- writers ---------------------------------------------------------------------------------------------------------

_TEXT = ("string", "binary")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_COLUMNS = {
    "value": _TEXT,
    "routing_key": _TEXT,
    "topic": _TEXT,
    "key": _TEXT,
    "producer_ts": (*_TEXT, "timestamp"),
    "headers": ("map<string,string>", "array<struct<key:string,value:binary>>"),
    "producer": _TEXT,
    "id": (*_TEXT, *_INTEGERS),
    "partition": _INTEGERS,
    ORIGIN_BROKER: ("string",),
    **dict(zip(ORIGIN, (("string",), _INTEGERS, _INTEGERS), strict=True)),
}
_PIECE_BYTES = 256 * KIB  # of one send: as much as ingress receives at once


class Written(WriterCommitMessage):
    """How many rows a task has written, and how many of them an earlier attempt had stored."""

    def __init__(self, rows: int, duplicates: int) -> None:
        self.rows, self.duplicates = rows, duplicates


class _Writer:
    """The common part of batch and stream. Created on the driver, pickled, used in each task."""

    streaming = False

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        self.options = WriteOptions(options)
        if overwrite:
            raise ConfigError("a log is only ever added to: mode('append'), outputMode append or update")
        kinds = {field.name: field.dataType.simpleString() for field in schema.fields if field.name in _COLUMNS}
        self.passes_partition_over = "partition" in kinds and not self.options.use_partition
        if self.passes_partition_over:
            del kinds["partition"]
        elif self.options.use_partition and "partition" not in kinds:
            raise ConfigError("usePartition=true: column partition is missing: a whole number; null: the key decides")
        for name, kind in kinds.items():
            if kind not in _COLUMNS[name]:
                raise ConfigError(f"column {name}: must be {' or '.join(_COLUMNS[name])}, not {kind}")
        if "value" not in kinds:
            raise ConfigError("column value is missing: the payload, binary or string")
        if not (self.options.topic or "routing_key" in kinds or "topic" in kinds):
            raise ConfigError("where to write to is missing: column routing_key, column topic or option topic")
        self.has_ids = "producer" in kinds and "id" in kinds
        if "producer" in kinds and "id" not in kinds:
            raise ConfigError("column producer needs column id: the number of each row, rising within its producer")
        lacking = [name for name in ORIGIN if name not in kinds]
        self.has_origin = not lacking
        if lacking and not self.has_ids and any(name in kinds for name in (ORIGIN_BROKER, *ORIGIN)):
            raise ConfigError(
                f"column {lacking[0]} is missing: ids are made of {', '.join(ORIGIN)}, and {ORIGIN_BROKER} with several"
                " brokers; give all of them or none"
            )
        self.options.check()
        if not (self.streaming or self.has_ids or self.options.producer):
            raise ConfigError(
                "a batch write needs option kmq.producer, a name of this job, so that rows sent again are stored once;"
                " or columns producer and id"
            )
        self.options.recognise()
        if self.options.probe and not (self.streaming and has_begun(options)):
            check_all(self.options.brokers, self.options.access, self.options.shards)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows of one task; return when the broker has replied to every row."""
        task = TaskContext.get()
        assert task is not None
        if self.passes_partition_over and _is_first(task):
            log().warning(
                "column partition is not used: keys decide on partitions;"
                " option usePartition=true writes to those it names"
            )
        number = numbering(task, self.options.producer, self.streaming, self.has_ids, self.has_origin)
        place = None if self.has_ids else task.partitionId()
        try:
            with Senders(self.options, place) as senders:
                rows = 0
                for batch in batches:
                    if batch.num_rows:
                        self._write(senders, batch, number(batch, rows), rows)
                        rows += batch.num_rows
                return Written(rows, senders.finish())
        except (NoPartition, ReplayError) as err:
            if not isinstance(number, CountedIds):
                raise
            row = number.row(err.id)
            if isinstance(err, NoPartition):
                raise RowError(row, "partition", err.problem) from err
            raise ReplayError(err.producer, err.id, err.problem, row) from err

    def _write(self, senders: Senders, batch: pa.RecordBatch, identity: Identity, first_row: int) -> None:
        """Send a whole Arrow batch, or nothing of it if one of its rows cannot be a message."""
        ids, owners = identity
        limit = min(senders.max_line(name) for name, _ in owners)
        options = self.options
        lines = to_lines(
            batch,
            ids,
            time.time(),
            topic=options.topic,
            max_line=limit,
            first_row=first_row,
            use_partition=options.use_partition,
        )
        for name, rows in owners:
            for piece in pieces(lines if rows is None else lines.take(pa.array(rows)), _PIECE_BYTES):
                senders.send(name, block(piece))


def _is_first(task: TaskContext) -> bool:
    """Return True in the one task that logs what holds for all tasks of a write, or for all batches of a query."""
    batch = task.getLocalProperty(BATCH_ID) if task.getLocalProperty(QUERY_ID) else None
    return task.partitionId() == 0 and task.attemptNumber() == 0 and batch in (None, "0")


class KmqWriter(_Writer, DataSourceArrowWriter):
    """The writer of df.write: see the module."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the counts, on the driver, when all tasks are done; by then every row is stored."""
        rows, duplicates = _sum(messages)
        if rows and duplicates == rows:
            log().warning(
                "all %d rows had been stored before with kmq.producer=%s: the same job again, or a name used twice",
                rows,
                self.options.producer,
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Keep what is stored; running the same job again stores the rest."""
        log().warning("the write failed: what is stored stays, and the same job run again stores the rest")


class KmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of df.writeStream: see the module."""

    streaming = True

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: every row is stored, and if Spark repeats the batch the broker recognizes its rows."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Keep what is stored; Spark repeats the batch from the same checkpoint."""


def _sum(messages: Sequence[WriterCommitMessage | None]) -> tuple[int, int]:
    done = [message for message in messages if isinstance(message, Written)]
    return sum(each.rows for each in done), sum(each.duplicates for each in done)
