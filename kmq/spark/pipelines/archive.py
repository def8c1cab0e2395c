"""Archive: topics → JSON payloads as typed columns → enriched → a Parquet, Delta or Iceberg table, exactly once.

    from kmq.spark.pipelines.archive import enrich, parse
    rows = spark.read.format("kmq").schema(READ).option("path", "data").option("subscribe", "orders").load()
    enrich(parse(rows, "price double, user string NOT NULL")).where("reason is null").show()

A stream of micro-batches. Each batch is parsed. Its bad records are sent to `<topic>.dlq` of the broker they came from,
then its good records are added to the table.

Invariant   Every record of the topics is in the table once, or in its dead-letter topic once, with the reason
            (bad="keep": in the table with the reason; bad="drop": only counted). No field of a record is dropped unless
            requested: fields that an inferred schema lacks, at any depth, are in column `rest`.
            A dead letter is always stored once, however often its batch is run: the broker knows it by producer (the
            archive and the record's partition) and id (offset + 1).
Crash       before the table's commit   the batch is repeated; dead letters already sent are not stored again
            after it, before Spark's    the table has the batch: skipped (kmq/spark/tables)
            The dead letters of a batch are sent before its commit. If the broker is down, the archive stops before the
            commit, so that no record counts as archived that is not.
Bad         See payloads.py. Strict JSON: one object, nothing after it, no NaN, no single quotes.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Unpack, cast

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from kmq.config.settings import load
from kmq.errors import ConfigError, KmqError
from kmq.log import topics
from kmq.message.record import DLQ
from kmq.spark import failures
from kmq.spark.connections import have_one_address, nearest
from kmq.spark.pinned import pinned, utc_date, utc_hour
from kmq.spark.pipelines import json_columns, payloads
from kmq.spark.pipelines.archive_task import DIRECT, FORMAT, STAGING, UNSURE, ArchiveJob, source_of
from kmq.spark.pipelines.options import INFER, NONE, PARQUET, ArchiveOptions, complete, value
from kmq.spark.pipelines.payloads import decide_schema, infer, parse, write_schema
from kmq.spark.pipelines.table import ADOPT_S, follow, is_adopted, starting
from kmq.spark.sink.targets import Destination, Target, addresses, producer
from kmq.spark.source.brokers import Directory, open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming.checkpoint import RECORDS
from kmq.spark.streaming.streams import Trigger
from kmq.spark.tables import Table, TableSpec, stores

__all__ = ["BAD", "INFER", "NONE", "READ", "Archived", "dead_letters", "enrich", "infer", "parse", "run", "with_text"]

# The columns that are read. The key as bytes, so that a dead letter keeps it exactly.
READ = (
    "broker string, topic string, partition int, offset bigint, seq bigint, recv_ts timestamp, key string,"
    " routing_key binary, producer_ts string, id string, headers map<string,string>, value binary"
)
BAD = ("dlq", "keep", "drop")

# --- dead letters ----------------------------------------------------------------------------------------------------

MAX_LINE = 1 << 20  # bytes, if the broker does not tell
_OTHER = "other"
_BESIDE = ("routing_key", "producer_ts", "id", "reason")  # parts of a dead letter's line besides headers and payload


def dead_letters(bad: DataFrame, archive: str, max_line: int = MAX_LINE) -> DataFrame:
    """Return rows of `parse` that have a reason as messages to <topic>.dlq, for format("kmq").

    Payload, key, producer_ts and headers are kept. New headers are `reason`, `from` (topic-partition-offset) and the
    old `id`. Headers of a client with these names are in header `other`, as JSON. A payload that becomes too long for a
    line is cut, and header `len` tells its length; its origin has all of it.
    """
    source = F.sha2(F.concat_ws("|", "broker", "topic"), 256).substr(1, 16)
    text, size = F.col("value").cast("string"), F.octet_length("value")
    beside = (F.octet_length(F.coalesce(each, F.lit(""))) for each in (*map(F.col, _BESIDE), F.to_json("headers")))
    room = F.lit(max_line - 1024) - 3 * reduce(add, beside)  # percent-encoded: three bytes for one
    # Payloads that are not plain are sent as base64: four bytes for three.
    plain = F.is_valid_utf8(text) & ~text.rlike(r"[\x00-\x08\x0a-\x1f\x7f]")
    short = F.greatest((room * 3 / 4).cast("int"), F.lit(0))
    cut = size > F.when(plain, room).otherwise(short)
    ours = {
        "reason": F.col("reason"),
        "from": F.concat_ws("-", "topic", "partition", "offset"),
        "id": F.col("id"),
        "len": F.when(cut, size.cast("string")),
    }
    hidden = F.map_filter("headers", lambda name, _: name.isin(*ours, _OTHER))
    ours[_OTHER] = F.when(F.size(hidden) > 0, F.to_json(hidden))
    theirs = F.map_filter("headers", lambda name, _: ~name.isin(*ours))
    why = F.map_filter(
        F.create_map(*(part for name, text in ours.items() for part in (F.lit(name), text))),
        lambda _, text: text.isNotNull(),
    )
    letters = bad.select(
        F.concat(F.concat("topic", F.lit(f"{DLQ}.@")).cast("binary"), _dot_and_key()).alias("routing_key"),
        "producer_ts",
        F.concat_ws("-", F.lit(f"archive-{archive}"), source, "partition").alias("producer"),
        (F.col("offset") + 1).alias("id"),
        F.map_concat(theirs, why).alias("headers"),
        F.when(cut, F.substring("value", F.lit(1), short)).otherwise(F.col("value")).alias("value"),
    )
    return letters.repartition("producer").sortWithinPartitions("producer", "id")


def _dot_and_key() -> Column:
    """Return `.<key>` of a routing key, binary, whether or not a mark precedes the key; empty without a key."""
    behind = F.expr("substring(routing_key, octet_length(topic) + 1)")
    mark = F.regexp_extract(behind.cast("string"), r"\A(\.@[0-9]*)(?:\.|\z)", 1)
    return F.when(mark != "", F.substring(behind, F.length(mark) + 1, F.lit((1 << 31) - 1))).otherwise(behind)


class LetterWriter:
    """Sends dead letters to the brokers their records came from."""

    def __init__(self, options: ReadOptions, to: Destination) -> None:
        """Raise ConfigError if a broker cannot be reached: better at the start than at the first bad record."""
        self._options = options
        self._connection = to.connection_like(options.token)
        addresses("--producers", to.producers)  # check the whole text, because commas may be part of a password
        given = [part.strip() for part in to.producers.split(",") if part.strip()]
        if given and len(options.brokers) == 1:
            given = [",".join(given)]  # several addresses are those of one shard
        hint = "give --producers host:port for each, or --bad keep or drop"
        if given and len(given) != len(options.brokers):
            raise ConfigError(f"--producers {to.producers!r}: there are {len(options.brokers)} brokers; {hint}")
        if not given and not (
            options.paths and list(map(os.path.realpath, options.paths)) == [os.path.realpath(load().data)]
        ):
            raise ConfigError(
                f"bad records go to <topic>{DLQ} at the broker they are from, but where it listens is unknown; {hint}"
            )
        self._max_line = MAX_LINE
        self._addresses = dict(zip(options.brokers, given, strict=True)) if given else {}
        self._declared: set[tuple[str, str]] = set()
        self._check_reachable(hint)

    def _check_reachable(self, hint: str) -> None:
        for name in self._options.brokers:
            target = self._target(name)
            try:
                target.check()
                with producer(target.addresses, target.access) as probe:
                    self._max_line = min(self._max_line, probe.connect(timeout=ADOPT_S))
            except (KmqError, TimeoutError, ValueError) as err:
                if self._options.holds and not isinstance(err, (ConfigError, ValueError)):
                    continue  # its first bad record will wait for it
                raise ConfigError(
                    f"bad records could not be sent to {target}: {err}; start the broker, {hint}"
                ) from err

    def _target(self, broker: str) -> Target:
        """Return the broker's address as it is now: a broker that was restarted may have another port."""
        addresses = (at for name, at in self._addresses.items() if have_one_address(name, broker))
        return Target.of(next(addresses, ""), self._connection)

    def send(self, bad: DataFrame, query: str) -> None:
        """Store these records in their dead-letter topics, each once however often this is called."""
        bad = bad.persist()  # without it each use would parse the whole batch again
        try:
            found = sorted((row.broker, row.topic) for row in bad.select("broker", "topic").distinct().collect())
            for broker, topic in found:
                self._declare(broker, f"{topic}{DLQ}")
            for broker in {broker for broker, _ in found}:
                target = self._target(broker)
                letters = dead_letters(
                    bad.where(F.col("broker") == broker), query.replace("-", "")[:12], self._max_line
                )
                where = "path" if self._options.paths else "kmq.bootstrap.servers"  # to compare repeated letters
                writer = letters.write.format("kmq").mode("append").options(**target.options).option(where, broker)
                writer.option("kmq.probe", "false").save()  # checked at the start; later wait for a broker that is away
        finally:
            bad.unpersist()

    def _declare(self, broker: str, name: str) -> None:
        """Declare a dead-letter topic: without a declaration orders.dlq would be key `dlq` of topic orders."""
        if (broker, name) in self._declared:
            return
        at = open_broker(broker, bool(self._options.paths), self._options.access)
        if isinstance(at, Directory):
            if name not in at.topics():
                topics.declare(at.path, name, 1)
            if not is_adopted(at.path, name):
                raise ConfigError(f"topic {name!r}: the router of {broker} has not adopted it; is the broker up?")
        elif name not in at.topics():
            raise ConfigError(f"topic {name!r} is needed at {broker} for bad records: kmq topics create {name}, there")
        self._declared.add((broker, name))


# --- functions on DataFrames -----------------------------------------------------------------------------------------


def enrich(rows: DataFrame, host: str | None = None, pod: str | None = None) -> DataFrame:
    """Return `rows` with host, pod, and date and hour (UTC) of recv_ts.

    Host and pod come from a message's headers. Otherwise they are the broker's: its name if it was read over HTTP, or
    the arguments, or what this process knows of itself (NODE_NAME and POD_NAME, commonly set by Kubernetes' downward
    API, or the host's name).
    """
    node, mine = here(host, pod)
    remote = F.regexp_extract("broker", r"^([^/]+):\d+$", 1)
    return rows.withColumns(
        {
            "host": F.coalesce(F.col("headers")["host"], F.when(remote != "", remote), F.lit(node)),
            "pod": F.coalesce(F.col("headers")["pod"], F.when(remote == "", F.lit(mine))),
            "date": utc_date("recv_ts"),
            "hour": utc_hour("recv_ts"),
        }
    )


def here(host: str | None, pod: str | None) -> tuple[str, str]:
    """Return host and pod for records that do not name them: as given, or as this process knows them."""
    return (
        host or os.environ.get("NODE_NAME") or socket.gethostname(),
        pod or os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname(),
    )


def with_text(rows: DataFrame) -> DataFrame:
    """Return payloads unparsed, as column `value_text`; `value` holds only those that are not UTF-8."""
    text = F.col("value").cast("string")
    good = F.is_valid_utf8(text)
    return rows.withColumns({"value_text": F.when(good, text), "value": F.when(~good, F.col("value"))})


# --- the pipeline ----------------------------------------------------------------------------------------------------


class Archived(NamedTuple):
    """The result of a run."""

    rows: int  # added to the table
    bad: int  # records that did not match the schema
    batches: int
    merged: int  # small files that were merged


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str,
    format: str = PARQUET,
    *,
    progress: Any = None,
    **options: Unpack[ArchiveOptions],
) -> Archived:
    """Archive the topics of `where` (options of format("kmq")): all records there are now, or continuously.

    `schema`, `bad`, `rest`, `enrich_with`: see options.Payloads. `partition_by`, `catalog`: see TableSpec. `once`,
    `every`, `checkpoint`: see Trigger.
    `producers`: host:port for lines of each broker, in the order of `where`; default: this directory's broker.
    `connection`: the sink's options for token, TLS and timeout; default: the token of `where`.
    """
    settings = complete(ArchiveOptions, options)
    trigger, bad, schema = value(Trigger, settings), settings["bad"], settings["schema"]
    if bad not in BAD:
        raise ConfigError(f"--bad {bad!r}: must be one of {', '.join(BAD)}")
    function = enriching(settings["enrich_with"])
    letters = (
        LetterWriter(ReadOptions(where), value(Destination, settings)) if bad == "dlq" and schema != NONE else None
    )
    with value(TableSpec, settings, to=to, format=format).open(trigger.checkpoint) as table:
        fields = None if schema == NONE else decide_schema(spark, table, where, schema)
        batches = _Batches(settings, table, ArchiveRows(settings, fields, function), letters)
        batches.check(spark)
        write_schema(table, fields)
        if progress is not None:
            progress.describe(f"archive to {to}")
        done = follow(table, batches.source(spark, where), batches.stage, "archive", trigger)
        return Archived(done.rows, batches.bad, done.batches, done.merged)


class ArchiveRows:
    """The columns of a table's rows, and the conversion of records with the columns READ to such rows."""

    def __init__(
        self, options: ArchiveOptions, fields: StructType | None, function: Callable[[DataFrame], DataFrame] | None
    ) -> None:
        """`fields`: of the payloads; None stores payloads as text. `function`: the user's, see `enriching`."""
        self.fields, self.function = fields, function
        self._enrich_with = options["enrich_with"]
        self._keeps_bad = options["bad"] == "keep"
        self._keeps_rest = options["schema"] == INFER if options["rest"] is None else options["rest"]
        self.host, self.pod = here(options["host"], options["pod"])
        self.read = cast(StructType, StructType.fromDDL(READ))
        self.names = payloads.names(fields, self.read.names) if fields else []
        self.before = self._columns()  # passed to the user's function

    def _columns(self) -> StructType:
        names = [field.name for field in self.read if field.name not in ("routing_key", "value")]
        kinds = {name: self.read[name].dataType for name in names}
        has_text = self.fields is None or self._keeps_bad
        if has_text:
            kinds["value"] = BinaryType()
        if self.fields is not None:
            kinds |= zip(self.names, (field.dataType for field in self.fields.toNullable()), strict=True)
            kinds |= {"rest": MapType(StringType(), StringType())} if self._keeps_rest else {}
            kinds |= {"reason": StringType()} if self._keeps_bad else {}
        kinds |= {"value_text": StringType()} if has_text else {}
        kinds |= {"host": StringType(), "pod": StringType(), "date": DateType(), "hour": IntegerType()}
        return StructType([StructField(name, kind) for name, kind in kinds.items()])

    def columns(self, spark: SparkSession) -> StructType:
        """Return the columns of the rows; the user's function is tried with an empty DataFrame. Raises ConfigError."""
        if self.function is None:
            return self.before
        made = self.function(spark.createDataFrame([], self.before))
        if not isinstance(made, DataFrame):
            raise ConfigError(f"--enrich {self._enrich_with!r}: must return a DataFrame, not {type(made).__name__}")
        return made.schema

    def judged(self, records: DataFrame) -> DataFrame:
        """Return the records with the columns of their payloads, and `reason`."""
        assert self.fields is not None
        return parse(records, self.fields, self._keeps_rest)

    def good(self, judged: DataFrame) -> DataFrame:
        """Return the table's rows made of judged records, before the user's function."""
        if self._keeps_bad:
            rows = with_text(judged.withColumn("value", F.when(F.col("reason").isNotNull(), F.col("value"))))
        else:
            rows = judged.where("reason is null")
        return self._enriched(rows)

    def of(self, records: DataFrame) -> DataFrame:
        """Return the table's rows made of records."""
        rows = self._enriched(with_text(records)) if self.fields is None else self.good(self.judged(records))
        return self.function(rows) if self.function else rows

    def _enriched(self, rows: DataFrame) -> DataFrame:
        return enrich(rows, self.host, self.pod).select(*self.before.names)


class _Batches:
    """Handles each batch, and counts the bad records so far."""

    def __init__(self, options: ArchiveOptions, table: Table, rows: ArchiveRows, letters: LetterWriter | None) -> None:
        self._options, self._table, self._rows, self._letters = options, table, rows, letters
        self._schema = rows.before  # then of the user's function
        self._is_direct = rows.function is None and DIRECT.issuperset(options["partition_by"])
        self.bad = 0

    def check(self, spark: SparkSession) -> None:
        """Raise ConfigError if rows cannot be stored, before the stream starts."""
        options, rows = self._options, self._rows
        self._schema = rows.columns(spark)
        given = rows.before.names if rows.function else None
        _check_partitions(options["partition_by"], self._schema, given, options["enrich_with"])
        self._table.expect(self._schema)

    def source(self, spark: SparkSession, where: Mapping[str, str]) -> DataFrame:
        """Return the stream: a row for each task that has written its part of a batch."""
        rows = self._rows
        job = ArchiveJob(
            json=None if rows.fields is None else json_columns.of(rows.fields),
            names=rows.names,
            read=rows.read,
            stored=rows.before,
            partition_by=self._options["partition_by"] if self._is_direct else None,
            keeps_partitions=self._table.keeps_partitions,
            host=rows.host,
            pod=rows.pod,
        )
        spark.dataSource.register(source_of(job, spark.sparkContext.defaultParallelism))
        options = starting(where, self._options["batch_bytes"])
        tasks = spark.readStream.format(FORMAT).options(**options).load()
        return tasks.observe(RECORDS, F.sum(F.expr("rows + unsure")).alias("rows"), F.sum("bytes").alias("bytes"))

    def stage(self, batch: DataFrame, query: str) -> None:
        """Stage the good rows of a batch, and send its dead letters."""
        spark, table, convert = batch.sparkSession, self._table, self._rows
        parts = table.begin_parts(self._schema)
        spark.sparkContext.setLocalProperty(STAGING, parts)
        with table.writing(spark):
            done = batch.collect()
        unsure = _files(parts, (f"{row.part}/{UNSURE}" for row in done if row.unsure))
        judged, seen = None, Observation()
        if unsure:
            # Observe between parsing and filtering; this also keeps Spark from parsing once for good and once for bad.
            records = spark.read.schema(convert.read).parquet(*unsure)
            judged = convert.judged(records).observe(seen, F.count("reason").alias("bad"))
        written = [convert.good(judged)] if judged is not None else []
        if self._is_direct:
            for row in done:
                table.staging.accept(row.part)
        elif files := _files(parts, (row.part for row in done if row.rows)):
            written.append(spark.read.schema(convert.before).parquet(*files))
        if written:
            rows = reduce(DataFrame.unionByName, written)
            table.write(convert.function(rows) if convert.function else rows, f"{parts}/judged")
            table.staging.accept("judged")
        bad = seen.get["bad"] if judged is not None else 0
        self.bad += bad
        if self._letters and judged is not None and bad:
            with pinned(spark):
                self._letters.send(judged.where("reason is not null"), query)


def _files(root: str, directories: Iterable[str]) -> list[str]:
    """Return the Parquet files in these directories, as Spark takes names: without patterns."""
    found = (f"{root}/{directory}/{name}" for directory in directories for name in os.listdir(f"{root}/{directory}"))
    return [stores.for_spark(name) for name in found if name.endswith(".parquet")]


def _check_partitions(
    partition_by: Sequence[str], stored: StructType, given: Sequence[str] | None, enrich_with: str
) -> None:
    """Raise ConfigError for impossible partition columns. `given`: the columns passed to the function of --enrich."""
    kinds = {field.name.lower(): field.dataType for field in stored}
    before = [name.lower() for name in given or ()]
    for name in partition_by:
        kind = kinds.get(name.lower())
        if kind is None and name.lower() in before:
            raise ConfigError(f"--enrich {enrich_with!r}: leaves out column {name}, which --partition-by names")
        if kind is None:
            raise ConfigError(
                f"--partition-by: unknown column {name}{nearest(name, stored.names)};"
                f" expected one of {', '.join(stored.names)}"
            )
        if isinstance(kind, StructType | ArrayType | MapType | VariantType):
            raise ConfigError(f"--partition-by: column {name} is a {kind.typeName()}; a partition needs a single value")
    if len(set(partition_by)) >= len(kinds):
        raise ConfigError("--partition-by: names every column; at least one must be left to store")


def enriching(name: str) -> Callable[[DataFrame], DataFrame] | None:
    """Return the function named as `module:function`; None for "". Raises ConfigError."""
    if not name:
        return None
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())  # an installed command does not search the current directory
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(f"--enrich {name!r}: must be module:function that can be imported: {err}") from err
    if not callable(found):
        raise ConfigError(f"--enrich {name!r}: must be a function")

    def made(rows: DataFrame) -> DataFrame:
        try:
            return cast(DataFrame, found(rows))
        except Exception as err:
            cause = " ".join(str(failures.explain(err) or err).split())[:400]
            raise ConfigError(f"--enrich {name!r}: fails: {type(err).__name__}: {cause}") from err

    return made
