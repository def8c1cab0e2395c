"""Archive: topics → JSON payloads as typed columns → enriched → a Parquet, Delta or Iceberg table, exactly once.

    from kmq.spark.pipelines.archive import enrich, parse
    rows = spark.read.format("kmq").schema(READ).option("path", "data").option("subscribe", "orders").load()
    enrich(parse(rows, "price double, user string NOT NULL")).where("reason is null").show()

A stream of micro-batches. Each is parsed; its bad records go to `<topic>.dlq` of the broker they came from; then the good ones
become part of the table.

Invariant   Every record of the topics is in the table once, or in its dead-letter topic once, with the reason (bad="keep": in the
            table with the reason; bad="drop": counted). No field of a record is dropped without being asked for: what an inferred
            schema does not know, at any depth, is in column `rest`.
Crash       before the table's commit   the batch is run again. Dead letters that went out are known to the broker by producer
                                        (this archive and their partition) and id (offset + 1): not stored again;
            after it, before Spark's    the table has the batch: skipped (kmq/spark/tables).
            A broker that is down stops the archive before the commit, so that nothing is taken for archived that is not.
Bad         What payloads.py says. JSON to the letter: one object, nothing behind it, no NaN, no single quotes.
"""

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructType, VariantType

from kmq.errors import ConfigError, KmqError
from kmq.log import topics as declarations
from kmq.log.disk import replace_file
from kmq.settings import load
from kmq.spark import failures
from kmq.spark.names import nearest
from kmq.spark.pinned import pinned, utc_date, utc_hour
from kmq.spark.pipelines.payloads import infer, parse
from kmq.spark.sink.targets import Target, producer
from kmq.spark.source.brokers import Directory, open_broker
from kmq.spark.source.options import Options
from kmq.spark.tables import Table, follow, open_table

# What the source is asked for. The key as bytes: a dead letter keeps it to the last one.
READ = (
    "broker string, topic string, partition int, offset bigint, seq bigint, recv_ts timestamp, key string,"
    " routing_key binary, producer_ts string, id string, headers map<string,string>, value binary"
)
PARTITION_BY = ("topic", "date", "hour")
BAD = ("dlq", "keep", "drop")
INFER, NONE = "infer", "none"  # schemas that are none
DLQ = ".dlq"  # behind the topic
BATCH_BYTES = "64m"  # of lines in a micro-batch
EVERY = "10 seconds"  # between two of them: each makes a file in each directory that it adds to
SAMPLE = 10_000  # records that a schema is inferred from

_BESIDE = ("routing_key", "producer_ts", "id", "reason")  # what a dead letter's line holds beside headers and payload
_ADOPT_S = 30.0  # how long a router may take to take up a new topic


# --- functions of DataFrames -----------------------------------------------------------------------------------------


def enrich(rows: DataFrame, host: str | None = None, pod: str | None = None) -> DataFrame:
    """`rows` with host, pod, and date and hour (UTC) of recv_ts.

    A message that says host or pod in a header is believed; else they are of the broker: its name where it was read over HTTP, or
    what is given, or what this process knows of itself (NODE_NAME, POD_NAME as Kubernetes' downward API is commonly asked for,
    the host's name).
    """
    here = host or os.environ.get("NODE_NAME") or socket.gethostname()
    mine = pod or os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname()
    remote = F.regexp_extract("broker", r"^([^/]+):\d+$", 1)
    return rows.withColumns(
        {
            "host": F.coalesce(F.col("headers")["host"], F.when(remote != "", remote), F.lit(here)),
            "pod": F.coalesce(F.col("headers")["pod"], F.when(remote == "", F.lit(mine))),
            "date": utc_date("recv_ts"),
            "hour": utc_hour("recv_ts"),
        }
    )


def with_text(rows: DataFrame) -> DataFrame:
    """Payloads as they are, in columns that readers like: `value_text`, and `value` only for those that are not UTF-8."""
    text = F.col("value").cast("string")
    good = F.is_valid_utf8(text)
    return rows.withColumns({"value_text": F.when(good, text), "value": F.when(~good, F.col("value"))})


def dead_letters(bad: DataFrame, archive: str, max_line: int = 1 << 20) -> DataFrame:
    """Rows of `parse` with a reason as messages to <topic>.dlq, for format("kmq").

    Payload, key, producer_ts and headers are kept. Headers tell the reason, `from` (topic-partition-offset) and the `id` it had.
    Headers with names that only raw lines can have (one letter, or what must be encoded) are in header `other`, as JSON.
    A payload that these make too long for a line is cut; header `len` is then its length. Where it is from, all of it is.
    """
    source = F.sha2(F.concat_ws("|", "broker", "topic"), 256).substr(1, 16)
    text, size = F.col("value").cast("string"), F.octet_length("value")
    beside = (F.octet_length(F.coalesce(each, F.lit(""))) for each in (*map(F.col, _BESIDE), F.to_json("headers")))
    room = F.lit(max_line - 1024) - 3 * reduce(add, beside)  # percent-encoded: three bytes for one
    plain = F.is_valid_utf8(text) & ~text.rlike(
        r"[\x00-\x08\x0a-\x1f\x7f]"
    )  # all else goes as base64: four bytes for three
    short = F.greatest((room * 3 / 4).cast("int"), F.lit(0))
    cut = size > F.when(plain, room).otherwise(short)
    odd = F.map_filter(
        "headers", lambda name, _: ~_is_plain(name) & ~name.isin("p", "w", "enc")
    )  # of how it was stored
    ours = {
        "reason": F.col("reason"),
        "from": F.concat_ws("-", "topic", "partition", "offset"),
        "id": F.col("id"),
        "len": F.when(cut, size.cast("string")),  # a header that is null is not sent
        "other": F.when(F.size(odd) > 0, F.to_json(odd)),
    }
    names = F.array_distinct(F.map_keys("headers"))  # a name may come twice
    kept = F.filter(names, lambda name: _is_plain(name) & ~name.isin("enc", *ours))
    theirs = F.map_from_arrays(kept, F.transform(kept, lambda name: F.element_at("headers", name)))
    why = F.create_map(*(part for name, text in ours.items() for part in (F.lit(name), text)))
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
    """`.<key>` of a routing key, binary, whether there is a mark between topic and key or not; empty without a key."""
    behind = F.expr("substring(routing_key, octet_length(topic) + 1)")
    mark = F.regexp_extract(behind.cast("string"), r"\A(\.@[0-9]*)(?:\.|\z)", 1)
    return F.when(mark != "", F.substring(behind, F.length(mark) + 1, F.lit((1 << 31) - 1))).otherwise(behind)


def _is_plain(name: Column) -> Column:
    return name.rlike("^[A-Za-z0-9_.-]{2,}$")


# --- the pipeline ----------------------------------------------------------------------------------------------------


class Archived(NamedTuple):
    """What a run did."""

    rows: int  # added to the table
    bad: int  # that were none of the schema
    batches: int
    merged: int  # small files that became few


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str,
    format: str = "parquet",
    schema: str = INFER,
    enrich_with: str = "",
    bad: str = "dlq",
    producers: str = "",
    once: bool = True,
    checkpoint: str = "",
    partition_by: Sequence[str] = PARTITION_BY,
    rest: bool | None = None,
    every: str = EVERY,
    batch_bytes: str = BATCH_BYTES,
    host: str | None = None,
    pod: str | None = None,
    progress: Any = None,
    catalog: str = "",
    connection: Mapping[str, str] | None = None,
) -> Archived:
    """Archive what `where` (options of format("kmq")) names: all there is now, or on and on.

    `schema`: DDL, a file of it, `infer` (of a sample at the first start, the same ever after) or `none` (payloads as text).
    `enrich_with`: module:function, of a DataFrame with the good rows to the one that is stored. `rest`: None is: where inferred.
    `producers`: host:port of each broker's lines, in the order of `where`; without it that of this directory's settings.
    `connection`: options of the sink for their token, TLS and timeout; None: the token of `where`.
    `catalog`: of Iceberg, see kmq/spark/tables/iceberg.py.
    """
    if bad not in BAD:
        raise ConfigError(f"--bad {bad!r}: is one of {', '.join(BAD)}")
    more = _function(enrich_with) if enrich_with else None
    letters = _Letters(Options(where), producers, connection) if bad == "dlq" and schema != NONE else None
    with open_table(to, format, partition_by, catalog, checkpoint) as table:
        fields = None if schema == NONE else _decided(spark, table, where, schema)
        keeps_rest = rest if rest is not None else schema == INFER
        count = 0

        def enriched(rows: DataFrame) -> DataFrame:
            return enrich(rows.drop("routing_key"), host, pod)

        def stored(rows: DataFrame) -> DataFrame:
            """The good rows, as they become part of the table."""
            if fields is None or bad == "keep":
                rows = with_text(rows)
            else:
                rows = rows.drop("reason", "value")
            return more(enriched(rows)) if more else enriched(rows)

        def check() -> None:
            """With no rows, so that what cannot be stored is told before the stream starts."""
            rows = spark.createDataFrame([], READ)
            parsed = rows if fields is None else parse(rows, fields, keeps_rest)
            given = enriched(parsed).columns if more else None
            _check_partitions(partition_by, stored(parsed), given, enrich_with)
            table.expect(stored(parsed))

        def prepare(batch: DataFrame, query: str) -> None:
            nonlocal count
            if fields is None:
                table.stage(stored(batch))
                return
            seen = Observation()
            # Between the parsing and the choice, also so that Spark does not parse once for each of them.
            parsed = parse(batch, fields, keeps_rest).observe(seen, F.count("reason").alias("bad"))
            if bad == "keep":
                table.stage(stored(parsed.withColumn("value", F.when(F.col("reason").isNotNull(), F.col("value")))))
            else:
                table.stage(stored(parsed.where("reason is null")))
            count += seen.get["bad"]
            if letters and seen.get["bad"]:
                with pinned(batch.sparkSession):
                    letters.send(parsed.where("reason is not null"), query)

        check()
        _freeze(table, fields)
        if progress is not None:
            progress.describe(f"archive to {to}")
        rows = spark.readStream.format("kmq").schema(READ).options(**starting(where, batch_bytes)).load()
        done = follow(table, rows, prepare, "archive", once, every, checkpoint)
        return Archived(done.rows, count, done.batches, done.merged)


class _Letters:
    """The way of dead letters back to the brokers their records came from."""

    def __init__(self, options: Options, producers: str, connection: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError where one cannot be reached: better at the start than at the first bad record."""
        self._options = options
        self._connection = dict(connection or ({"kmq.token": options.token} if options.token else {}))
        given = [part.strip() for part in producers.split(",") if part.strip()]
        hint = "give --producers host:port for each, or --bad keep or drop"
        if given and len(given) != len(options.brokers):
            raise ConfigError(f"--producers {producers!r}: there are {len(options.brokers)} brokers; {hint}")
        if not given and not (options.paths and list(map(os.path.realpath, options.paths)) == [_own_data()]):
            raise ConfigError(
                f"bad records go to <topic>{DLQ} at the broker they are from, but where it listens is unknown; {hint}"
            )
        self._max_line = 1 << 20
        self._addresses = dict(zip(options.brokers, given, strict=True)) if given else {}
        self._known: set[tuple[str, str]] = set()
        for name in options.brokers:
            target = self._target(name)
            try:
                target.check()
                with producer(target.address, target.access) as probe:
                    self._max_line = min(self._max_line, probe.connect(timeout=_ADOPT_S))
            except (KmqError, TimeoutError, ValueError) as err:
                raise ConfigError(
                    f"bad records could not be sent to {target.address}: {err}; start the broker, {hint}"
                ) from err

    def _target(self, broker: str) -> Target:
        """Asked for each time: a broker that was started again may have another port."""
        return Target.of(self._addresses.get(broker, ""), self._connection)

    def send(self, bad: DataFrame, query: str) -> None:
        """Store these records in their dead-letter topics, each once however often this is called."""
        bad = bad.persist()  # to find them is to parse the whole batch
        try:
            found = sorted((row.broker, row.topic) for row in bad.select("broker", "topic").distinct().collect())
            for broker, topic in found:
                self._declare(broker, f"{topic}{DLQ}")
            for broker in {broker for broker, _ in found}:
                target = self._target(broker)
                letters = dead_letters(
                    bad.where(F.col("broker") == broker), query.replace("-", "")[:12], self._max_line
                )
                where = "path" if self._options.paths else "kmq.bootstrap.servers"  # to compare those that come again
                writer = letters.write.format("kmq").mode("append").options(**target.options).option(where, broker)
                writer.option("kmq.probe", "false").save()  # the start has looked: one that is away now is waited for
        finally:
            bad.unpersist()

    def _declare(self, broker: str, name: str) -> None:
        """An undeclared orders.dlq would be key `dlq` of topic orders, and its letters records of that."""
        if (broker, name) in self._known:
            return
        at = open_broker(broker, bool(self._options.paths), self._options.access)
        if isinstance(at, Directory):
            if name not in at.topics():
                declarations.declare(at.path, name, 1)
            deadline = time.monotonic() + _ADOPT_S
            while declarations.load(at.path, name)[1] is None:
                if time.monotonic() > deadline:
                    raise ConfigError(f"topic {name!r}: the router of {broker} does not take it up; is the broker up?")
                time.sleep(0.05)
        elif name not in at.topics():
            raise ConfigError(f"topic {name!r} is needed at {broker} for bad records: kmq topics create {name}, there")
        self._known.add((broker, name))


def _own_data() -> str:
    return os.path.realpath(load().data)


def starting(where: Mapping[str, str], batch_bytes: str) -> dict[str, str]:
    """The options of the stream: from the first record on, in batches of a size; a pattern takes in no dead letters."""
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


def _decided(spark: SparkSession, table: Table, where: Mapping[str, str], schema: str) -> StructType:
    """The schema of this table, as decided at its first start: batches that are run again must come out the same."""
    path = _schema_file(table)
    known = None
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = StructType.fromJson(json.load(file))
    if schema == INFER:
        with pinned(spark):
            found = known or infer(_sample(spark, where))
    else:
        found = _given(schema)
    if known not in (None, found):
        raise ConfigError(f"--schema: {path} has another one for this table: {known.simpleString()}")
    return found


def _freeze(table: Table, fields: StructType | None) -> None:
    """Note the schema for all later starts."""
    if fields is not None and not os.path.exists(_schema_file(table)):
        replace_file(_schema_file(table), json.dumps(fields.jsonValue(), indent=1).encode())


def _schema_file(table: Table) -> str:
    return f"{table.state}/schema.json"


def _check_partitions(partition_by: Sequence[str], stored: Any, given: Sequence[str] | None, enrich_with: str) -> None:
    """`given`: the columns that the function of --enrich was given, where there is one."""
    if not isinstance(stored, DataFrame):
        raise ConfigError(f"--enrich {enrich_with!r}: must return a DataFrame, not {type(stored).__name__}")
    kinds = {field.name.lower(): field.dataType for field in stored.schema}
    before = [name.lower() for name in given or ()]
    for name in partition_by:
        kind = kinds.get(name.lower())
        if kind is None and name.lower() in before:
            raise ConfigError(f"--enrich {enrich_with!r}: leaves out column {name}, which --partition-by names")
        if kind is None:
            raise ConfigError(
                f"--partition-by: unknown column {name}{nearest(name, stored.columns)};"
                f" expected one of {', '.join(stored.columns)}"
            )
        if isinstance(kind, StructType | ArrayType | MapType | VariantType):
            raise ConfigError(f"--partition-by: column {name} is a {kind.typeName()}; a partition needs a single value")
    if len(set(partition_by)) >= len(kinds):
        raise ConfigError("--partition-by: names every column; at least one must be left to store")


def _given(schema: str) -> StructType:
    """DDL, or the DDL in a file."""
    text, wrong = schema, "must be DDL like 'price double, user string', or a file of it"
    if os.path.isfile(schema):
        wrong = "the file must hold DDL like 'price double, user string'"
        try:
            with open(schema, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--schema {schema!r}: {wrong}: {err}") from err
    try:
        found = StructType.fromDDL(text)
    except Exception as err:  # Spark's parser has several
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}") from err
    if not isinstance(found, StructType) or not found.names:
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}")
    return found


def _sample(spark: SparkSession, where: Mapping[str, str]) -> DataFrame:
    """The first records of each topic."""
    options = Options(starting(where, BATCH_BYTES))
    brokers = [open_broker(name, bool(options.paths), options.access) for name in options.brokers]
    names = sorted({topic for broker in brokers for topic in broker.topics() if options.wants(topic)})
    if not names:
        raise ConfigError("--schema infer: none of these topics exists yet; give a schema, or --schema none")
    at = {name: text for name, text in where.items() if not name.lower().startswith(("subscribe", "assign"))}
    reader = spark.read.format("kmq").schema("value binary").options(**at)
    each = [reader.option("subscribe", topic).load().limit(max(100, SAMPLE // len(names))) for topic in names]
    rows = each[0]
    for other in each[1:]:
        rows = rows.union(other)
    return rows


def _function(name: str) -> Callable[[DataFrame], DataFrame]:
    """The function `module:function` names."""
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())  # a command installed elsewhere does not look here
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(f"--enrich {name!r}: must be module:function that can be imported: {err}") from err
    if not callable(found):
        raise ConfigError(f"--enrich {name!r}: is no function")

    def made(rows: DataFrame) -> DataFrame:
        try:
            return cast(DataFrame, found(rows))
        except Exception as err:
            cause = " ".join(str(failures.explain(err) or err).split())[:400]
            raise ConfigError(f"--enrich {name!r}: fails: {type(err).__name__}: {cause}") from err

    return made
