"""format("kmq"), writing: the rows of a batch or a stream as messages; a row that comes again is stored once.

    df.write.format("kmq").mode("append").option("kmq.producers", "a:5673").option("topic", "orders")
        .option("kmq.producer", "backfill-7").option("path", "data").save()
    df.writeStream.format("kmq").option("kmq.producers", "a:5673").option("path", "data").option("checkpointLocation", …)

Columns, by name; others are not looked at:
    value               binary or string; null is a tombstone, which empty is not
    routing_key         binary or string, as in the line; or topic and key; or option `topic`, which wins, and key (null: none)
    producer_ts         string or timestamp; without it now
    headers             map<string,string>, or Kafka's array<struct<key:string,value:binary>>
    partition           int; with usePartition=true the partition of its topic that a row goes to (null: the key decides), else
                        not looked at, which a warning says
    producer and id     both, or neither is looked at: under which name and number the broker knows a row. Numbers have at most 18
                        digits and rise within a producer, whose rows of a batch are in one Spark partition:
                        df.repartition("producer").sortWithinPartitions("producer", "id")
    origin_topic, origin_partition, origin_offset, and origin_broker where rows come from several brokers: of which record a row
                        was made (the source gives them with includeOrigin=true). All or none. One row a record, unshuffled

Options:
    kmq.producers       where ingress listens: host:5673, several with commas. A Spark partition (a producer, where there is that
                        column) always goes to the same one of them: leave the list as it is while a checkpoint lives
    path                data directories of these brokers, or kmq.bootstrap.servers, their gateways, spelled as for the source:
                        there a row that comes again is compared with what is stored
    kmq.replay          what a row does whose number another row has, see Again: stop (default), again, trust
    kmq.token           bearer token, where the broker asks for one
    topic               of all rows
    usePartition        true: column partition decides. A partition that the topic does not have fails the task
    kmq.producer        name of this job. A batch needs one, because nothing else identifies it. Each write of a foreachBatch
                        needs its own
    kmq.timeout         how long to wait for a broker that does not answer, as 30s or in seconds (600), with a warning
                        every 10 s
    kmq.probe           false: do not look first, on the driver, for what no waiting mends: see Before
    kmq.ssl.…           TLS, certificates: kmq/spark/connections.py. With any of these addresses have TLS and port 5443, unless
                        they are tcp://host:5673; without, those do that are tls://host:5443

Numbers     The line of a row carries a producer and a number (numbering.py): those of its columns producer and id; made of its
            origin; or query, Spark partition, batch and row. From the same checkpoint Spark gives a batch that is run again the
            same number.
Invariant   No row is counted as stored because of another one. `!dup`, the broker's word that it has a number, counts only where
            the record there says the same: topic, key, the user's headers and value, to the byte (stored.py). So whatever has
            changed between two runs of a batch, no row of the last one is missing when it ends well. Without `path` or
            kmq.bootstrap.servers the broker compares, by a checksum of 32 bits, and only the last 4,096 numbers of a producer: a
            task that meets an older one stops, and asks for the option.
Crash       of the driver, an executor, a Python worker: the rows come again with the same numbers. If they are the same rows in
            the same Spark partitions and order, each is stored once.
            of the broker: kmq.Producer connects again and sends what has no reply; each row is stored once.
            Writers that a dead driver leaves behind, and speculative attempts: the later one fences the other, which waits and
            takes its turn again, so that none stops the other for ever. What both send is stored once.
Again       Rows that come otherwise than they were stored (another filter, other Spark partitions, a source that was compacted)
            end the task with an error: which row, what is stored, what came. So does a number whose record is in no log any more,
            and one below the last that the broker does not know. Then the user decides. kmq.replay=again: a row whose number
            is taken is stored under the producer's next name, name:1, name:2 …; it may be there twice, but a further replay finds
            each row where this one put it. kmq.replay=trust: the number counts, and a row that has changed is lost.
            Rows that only moved to Spark partitions that did not exist before have numbers of their own: stored again, unnoticed.
            With columns origin_… a row keeps its number whatever the filter passes besides.
Order       So rows must come in the same order again: from files and from KMQ they do; behind a shuffle only after
            sortWithinPartitions by columns that tell all rows apart, or with producer and id of your own.
Before      A batch write, and a stream that has committed nothing yet, connects to each broker on the driver: a host that is not
            known, a certificate or a token that is not taken is one line before any task. A broker that is down is waited for
            in the tasks, and so is a host that is not known there, because a pod that is replaced has no name for a while. In a
            foreachBatch each write looks; kmq.probe=false leaves it to the tasks.
Not covered There is no transaction: rows are readable as they are stored, also those of a batch that fails later, and those
            that a changed batch has no more. Two equal rows cannot be told apart: two equal writes under one name are one.
            Without `path`: what another attempt with other rows stores while a connection is broken counts as this task's own;
            and the broker lets go of checksums where over 64 producers write at a time (a number without one counts).
            A broker forgets a producer that is idle for KMQ_PRODUCER_TTL (30 days): what comes again then is stored again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.settings import KIB
from kmq.spark.sink.lines import RowError, block, pieces, to_lines
from kmq.spark.sink.numbering import BATCH_ID, ORIGIN, ORIGIN_BROKER, QUERY_ID, Counted, Identity, numbering
from kmq.spark.sink.sender import NoPartition, ReplayError, Senders, log
from kmq.spark.sink.targets import check_all, has_begun
from kmq.spark.sink.write_options import WriteOptions

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
_PIECE_BYTES = 256 * KIB  # of one send: what ingress receives at once


class Written(WriterCommitMessage):
    """What a task has written: rows, and how many of them the broker had from an earlier attempt."""

    def __init__(self, rows: int, duplicates: int) -> None:
        self.rows, self.duplicates = rows, duplicates


class _Writer:
    """What batch and stream have in common. Made on the driver, pickled, used in each task."""

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
                f"column {lacking[0]} is missing: ids are made of {', '.join(ORIGIN)}, and {ORIGIN_BROKER} where there are"
                " several brokers; give all of them or none"
            )
        self.options.check()
        if not (self.streaming or self.has_ids or self.options.producer):
            raise ConfigError(
                "a batch write needs option kmq.producer, a name of this job, so that what is tried again is stored once;"
                " or columns producer and id"
            )
        if self.options.probe and not (self.streaming and has_begun(options)):
            check_all(self.options.brokers, self.options.access)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """One task. Returns when the broker has answered for every row."""
        task = TaskContext.get()
        assert task is not None
        if self.passes_partition_over and _is_first(task):
            log().warning(
                "column partition is not used: keys decide on partitions; option usePartition=true writes to those it names"
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
            if not isinstance(number, Counted):
                raise
            row = number.row(err.id)
            if isinstance(err, NoPartition):
                raise RowError(row, "partition", err.problem) from err
            raise ReplayError(err.producer, err.id, err.problem, row) from err

    def _write(self, senders: Senders, batch: pa.RecordBatch, identity: Identity, first_row: int) -> None:
        """All of a batch or, where one of its rows is no message, nothing of it."""
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
    """Whether this is the one task of a write, or of a query in all its batches, that says what holds for all of them."""
    batch = task.getLocalProperty(BATCH_ID) if task.getLocalProperty(QUERY_ID) else None
    return task.partitionId() == 0 and task.attemptNumber() == 0 and batch in (None, "0")


class KmqWriter(_Writer, DataSourceArrowWriter):
    """df.write. See the module."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when all tasks are done; everything has been stored by then."""
        rows, duplicates = _sum(messages)
        if rows and duplicates == rows:
            log().warning(
                "all %d rows had been stored before with kmq.producer=%s: the same job again, or a name used twice",
                rows,
                self.options.producer,
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What has been stored stays; the same job run again stores the rest."""
        log().warning("the write failed: what is stored stays, and the same job run again stores the rest")


class KmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """df.writeStream. See the module."""

    streaming = True

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: everything has been stored, and if Spark forgets this, it is known to the broker."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What has been stored stays; the batch comes again, from the same checkpoint."""


def _sum(messages: Sequence[WriterCommitMessage | None]) -> tuple[int, int]:
    done = [message for message in messages if isinstance(message, Written)]
    return sum(each.rows for each in done), sum(each.duplicates for each in done)
