"""format("kmq"), reading: batches and streams of topics and of the WAL, from data directories or over HTTP.

    spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load()
    spark.readStream.format("kmq").option("kmq.bootstrap.servers", "a:8082,b:8082").option("subscribePattern", "orders.*").load()

Options     kmq/spark/options.py. Columns: kmq/spark/columns.py; a schema of yours is the projection. Spark prunes no columns of
            Python sources, so give one: what is not asked for is not made.

Invariant   A task is a range of offsets of one partition of one broker, and reading it gives the same rows each time: records
            never change their offset, and only compaction and retention take any away. Where something that was to be read is
            gone, the query stops with its name, or goes on behind it with failOnDataLoss=false. Damage always stops it.
Crash       All state is in Spark's checkpoint: the offsets up to which each batch goes are written there before it is read.
            After a kill the last batch is read again, as the same tasks with the same rows in the same order.
Where       Planning runs in a Python process of the driver, reading in those of the executors: nothing is shared but what is
            pickled.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kmq import record
from kmq.errors import ConfigError
from kmq.log.reader import last_line
from kmq.spark import columns, plan
from kmq.spark.brokers import Broker, open_broker
from kmq.spark.options import EARLIEST, LATEST, WAL, Options
from kmq.spark.plan import Bounds, DataLossError, Key, Offsets, Range

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_BYTES = 1 << 20  # of lines made into one Arrow batch: what stays in the processor's cache


class Task(InputPartition):
    """A range, and what a process that knows nothing else needs to read it."""

    def __init__(self, span: Range, is_path: bool, token: str, fail_on_data_loss: bool) -> None:
        self.broker, self.topic, self.partition = span.key
        self.start, self.end = span.start, span.end
        self.is_path, self.token, self.fail_on_data_loss = is_path, token, fail_on_data_loss


class _Logs:
    """The brokers of a query, as its planner sees them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.brokers: dict[str, Broker] = {
            name: open_broker(name, bool(options.paths), options.token) for name in options.brokers
        }

    def identities(self) -> dict[str, str]:
        return {name: broker.identity() for name, broker in self.brokers.items()}

    def bounds(self) -> Bounds:
        """Of all partitions that were asked for and exist now."""
        options = self.options
        found: Bounds = {}
        for name, broker in self.brokers.items():
            there = [*broker.topics(), WAL] if options.pattern else options.topics
            asked = [topic for topic in there if options.wants(topic)]
            for (topic, partition), edges in broker.bounds(asked).items():
                if options.wants(topic, partition):
                    found[name, topic, partition] = edges
        return found

    def cuts(self, key: Key, start: int, end: int, nbytes: int) -> list[int]:
        return self.brokers[key[0]].cuts(key[1], key[2], start, end, nbytes)

    def begun(self, known: Offsets, bounds: Bounds) -> Offsets:
        """How far a stream has read, with those partitions that it has not seen yet and that begin where deleted ones ended.

        Raises DataLossError where a topic was deleted before all was read, or one that was asked for by name.
        """
        new, lost = bounds.keys() - known.keys(), known.keys() - bounds.keys()
        if not new and not lost:
            return known
        ends: Offsets = {}
        for name, broker in self.brokers.items():
            for topic, _, _, offsets in broker.ledger().get("deleted", ()):
                ends |= {(name, topic, number): end for number, end in enumerate(offsets)}
        for key in sorted(lost & ends.keys()):
            unread = ends[key] > known[key]
            if self.options.fail_on_data_loss and self.options.wants(*key[1:]) and (unread or not self.options.pattern):
                raise DataLossError(key, f"the topic was deleted; it was read up to offset {known[key]} of {ends[key]}")
        return {key: ends[key] for key in new & ends.keys()} | known

    def resolve(self, wanted: int | dict[str, Any] | None, bounds: Bounds, default: int) -> Offsets:
        """Where `wanted` (startingOffsets, endingOffsets) begins, or ends, in each partition."""
        found = {}
        for key, (first, end) in bounds.items():
            asked: Any = default if wanted is None else wanted
            if isinstance(asked, dict):
                asked = asked.get(key[0], {}).get(key[1], {}).get(str(key[2]), default)
            found[key] = {EARLIEST: first, LATEST: end}.get(asked, asked)
        return found

    def starting(self, bounds: Bounds, default: int) -> Offsets:
        micros = self.options.starting_micros
        if micros is None:
            return self.resolve(self.options.starting, bounds, default)
        return {key: self.brokers[key[0]].offset_of_time(key[1], key[2], micros) for key in bounds}

    def tasks(self, spans: Iterable[Range]) -> list[Task]:
        options = self.options
        pieces = plan.split(spans, self.cuts, options.min_partitions)
        return [Task(each, bool(options.paths), options.token, options.fail_on_data_loss) for each in pieces]


class _Reading:
    """What runs in a task; the same for batches and streams."""

    def __init__(self, schema: StructType) -> None:
        for field in schema.fields:
            columns.check(field.name, field.dataType.simpleString())
        self._names = schema.fieldNames()
        self._exact = [field.dataType.simpleString() == "binary" for field in schema.fields]
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        if not isinstance(partition, Task):
            return  # Spark's stand-in where there is nothing to read
        schema = to_arrow_schema(self._schema, timezone="UTC")
        where = columns.Where(partition.broker, partition.topic, partition.partition)
        broker = open_broker(partition.broker, partition.is_path, partition.token)
        needs_marks = not {"key", columns.KEY_BYTES}.isdisjoint(self._names) and partition.topic != WAL
        marks_from = broker.marks_from() if needs_marks else 0
        for offset, lines in _lines(partition, broker):
            block = columns.Block(lines, offset, partition.topic, partition.topic == WAL, marks_from)
            if block.count:
                yield columns.batch(block, where, self._names, self._exact, schema)


def _lines(task: Task, broker: Broker) -> Iterator[tuple[int, bytes]]:
    """(offset of the first line, lines) of a task in blocks. Raises DataLossError where there are fewer than planned."""
    key = (task.broker, task.topic, task.partition)
    by_seq, reached = task.topic == WAL, task.start
    for offset, lines in broker.read(task.topic, task.partition, task.start, task.end):
        if offset > reached:
            _check_not_lost(task, broker, key, reached)
        yield from _in_parts(offset, lines, by_seq)
        reached = record.seq_of(last_line(lines)) + 1 if by_seq else offset + columns.count_lines(lines)
    if reached < task.end:
        _check_not_lost(task, broker, key, reached)


def _check_not_lost(task: Task, broker: Broker, key: Key, reached: int) -> None:
    """There is nothing at `reached`: in the WAL drop_oldest may have left a gap, else it is gone."""
    first, end = broker.bounds([task.topic]).get((task.topic, task.partition), (task.end, task.end))
    if not task.fail_on_data_loss:
        return
    if first > reached:
        raise DataLossError(key, f"offsets {reached} to {first - 1} went while they were to be read: retention")
    if end < task.end or task.topic != WAL:
        raise DataLossError(key, f"the log ends at {min(end, reached)}, but was to be read up to {task.end - 1}")


def _in_parts(offset: int, lines: bytes, by_seq: bool) -> Iterator[tuple[int, bytes]]:
    """The same lines in smaller blocks."""
    at = 0
    while len(lines) - at > 2 * _ROWS_BYTES:
        end = lines.find(b"\n", at + _ROWS_BYTES) + 1
        part = lines[at:end]
        yield offset, part
        at, offset = end, offset if by_seq else offset + columns.count_lines(part)
    yield offset, lines[at:] if at else lines


class BatchReader(_Reading, DataSourceReader):
    """spark.read: plans on the driver, once per query."""

    def __init__(self, schema: StructType, options: Options) -> None:
        super().__init__(schema)
        self._options = options
        self._conditions: list[Filter] = []

    def partitions(self) -> Sequence[InputPartition]:
        logs = _Logs(self._options)
        bounds = logs.bounds()
        self._check_exist(bounds)
        kept = {key: edges for key, edges in bounds.items() if all(_may_hold(each, key) for each in self._conditions)}
        start = logs.starting(kept, EARLIEST)
        end = logs.resolve(self._options.ending, kept, LATEST)
        self._check_within(start, end, kept)
        for each in self._conditions:
            self._narrow(each, logs, start, end)
        # A list, and never an empty one: Spark would call read(None). What is asked for is there, or `_check_within` spoke up.
        return logs.tasks(plan.ranges(start, {k: max(start[k], e) for k, e in end.items()}, kept, False)) or [
            InputPartition(None)
        ]

    def _check_exist(self, bounds: Bounds) -> None:
        """A topic asked for by name must be at one broker at least: a typing error must not look like an empty topic."""
        where = ", ".join(self._options.brokers)
        there = {key[1:] for key in bounds}
        for topic in self._options.topics:
            numbers = self._options.assigned.get(topic)
            for number in [] if numbers is None else numbers:
                if (topic, number) not in there:
                    raise ConfigError(f"assign: there is no partition {number} of topic {topic!r} at {where}")
            if numbers is None and not any(key[0] == topic for key in there):
                raise ConfigError(f"topic {topic!r} does not exist at {where}; subscribePattern takes what there is")

    def _check_within(self, start: Offsets, end: Offsets, bounds: Bounds) -> None:
        for key, (first, stop) in bounds.items():
            if self._options.fail_on_data_loss and isinstance(self._options.starting, dict) and start[key] < first:
                raise DataLossError(key, f"startingOffsets: {start[key]} is gone, the log begins with {first}")
            if start[key] > stop and isinstance(self._options.starting, dict):
                raise ConfigError(f"startingOffsets: {plan.name_of(key)} ends at {stop}, which is before {start[key]}")
            if end[key] > stop and self._options.fail_on_data_loss:
                raise DataLossError(key, f"endingOffsets: {end[key]} is not there yet, the log ends at {stop}")

    def _narrow(self, condition: Filter, logs: _Logs, start: Offsets, end: Offsets) -> None:
        """Move starts and ends to where `condition` may hold; Spark still looks at each row."""
        name, low, high = _span(condition)
        if name == "recv_ts":
            for key in start:
                broker, topic, partition = key
                if low is not None:
                    start[key] = max(start[key], logs.brokers[broker].offset_of_time(topic, partition, low))
                if high is not None:
                    end[key] = min(end[key], logs.brokers[broker].offset_of_time(topic, partition, high + 1))
        for key in start:
            if name == "offset" or (name == "seq" and key[1] == WAL):
                start[key] = max(start[key], low) if low is not None else start[key]
                end[key] = min(end[key], high + 1) if high is not None else end[key]


class PushdownReader(BatchReader):
    """The same, told what the query filters by."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Used to read less: partitions and segment ranges. All are given back, for Spark to look at each row."""
        self._conditions = list(filters)
        return filters


def _may_hold(condition: Filter, key: Key) -> bool:
    """Whether rows of this partition may pass, by what the partition alone says."""
    if not isinstance(condition, (EqualTo, In)) or len(condition.attribute) != 1:
        return True
    mine = dict(zip(("broker", "topic", "partition"), key, strict=True)).get(condition.attribute[0])
    if mine is None:
        return True
    if isinstance(condition, EqualTo):
        return bool(mine == condition.value)
    return mine in condition.value


def _span(condition: Filter) -> tuple[str, int | None, int | None]:
    """(column, lowest, highest) value that may pass; for recv_ts in microseconds."""
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


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """spark.readStream: one object lives in the driver's planner as long as its query; reading is elsewhere."""

    def __init__(self, schema: StructType, options: Options) -> None:
        super().__init__(schema)
        self._options = options
        self._logs = _Logs(options)
        self._target: Offsets | None = None  # where Trigger.AvailableNow ends
        self._latest: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return plan.to_json(self._logs.starting(self._logs.bounds(), LATEST), self._logs.identities())

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {key: end for key, (_, end) in self._logs.bounds().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begun, known = plan.from_json(start)
        identities = self._logs.identities()
        self._check_same(known, identities)
        bounds = self._logs.bounds()
        begun = self._logs.begun(begun, bounds)
        there = {key: end for key, (_, end) in bounds.items()}
        self._latest = plan.to_json(there, identities)
        if self._target is not None:
            there = {key: min(there.get(key, 0), end) for key, end in self._target.items()}
        # An end never goes back: while a broker recovers it knows less than it did, and says so later by an error, or not at all.
        ends = {key: max(end, begun.get(key, 0)) for key, end in there.items()}
        if not isinstance(limit, ReadAllAvailable):
            ends = plan.limited(begun, ends, self._options.max_offsets, self._options.max_bytes, self._logs.cuts)
        return plan.to_json(begun | ends, identities)

    def getDefaultReadLimit(self) -> ReadLimit:
        """That there is a limit; `latestOffset` obeys both options, of which Spark has a word for one only."""
        if self._options.max_offsets:
            return ReadMaxRows(self._options.max_offsets)
        return ReadMaxBytes(self._options.max_bytes) if self._options.max_bytes else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begun, known = plan.from_json(start)
        ends, identities = plan.from_json(end)
        self._check_same(known, identities)
        bounds = self._logs.bounds()
        spans = plan.ranges(self._logs.begun(begun, bounds), ends, bounds, self._options.fail_on_data_loss)
        return self._logs.tasks(spans)

    def _check_same(self, known: dict[str, str], now: dict[str, str]) -> None:
        """Offsets of one data directory mean nothing in another."""
        for broker, identity in known.items():
            if broker not in now:
                raise ConfigError(f"{broker} is in the checkpoint, but not among the brokers of this query")
            if now[broker] != identity:
                raise ConfigError(
                    f"{broker} has another data directory (id {now[broker]}) than the one this checkpoint is of ({identity}):"
                    " start with a new checkpoint"
                )


class KmqDataSource(DataSource):
    """See the module. Writing: kmq/spark/sink.py."""

    @classmethod
    def name(cls) -> str:
        return "kmq"

    def schema(self) -> str:
        return columns.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(schema, Options(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(schema, Options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink import KmqWriter

        return KmqWriter(schema, self.options, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink import KmqStreamWriter

        return KmqStreamWriter(schema, self.options, overwrite)


class PushdownSource(KmqDataSource):
    """For sessions whose conf has Spark push filters down to Python sources: elsewhere a reader that takes any is refused."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return PushdownReader(schema, Options(self.options))
