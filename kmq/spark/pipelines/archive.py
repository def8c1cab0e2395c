"""Archive: topics → JSON payloads as typed columns → enriched → a Parquet or Delta table, exactly once.

    from kmq.spark.pipelines.archive import enrich, parse
    rows = spark.read.format("kmq").schema(READ).option("path", "data").option("subscribe", "orders").load()
    enrich(parse(rows, "price double, user string NOT NULL")).where("reason is null").show()

A stream of micro-batches. Each is parsed; its bad records go to `<topic>.dlq` of the broker they came from; then the good ones
become part of the table.

Invariant   Every record of the topics is in the table once, or in its dead-letter topic once, with the reason (bad="keep": in the
            table with the reason; bad="drop": counted). No field of a record is dropped without being asked for: what an inferred
            schema does not know is in column `rest`.
Crash       before the table's commit   the batch is run again. Dead letters that went out are known to the broker by producer
                                        (this archive and their partition) and id (offset + 1): not stored again;
            after it, before Spark's    the table has the batch: skipped (kmq/spark/tables.py).
            A broker that is down stops the archive before the commit, so that nothing is taken for archived that is not.
Bad         not_json, not_object, not_utf8, `wrong_type: fields`, `missing: fields` (declared NOT NULL). JSON to the letter: one
            object, nothing behind it, no NaN, no single quotes. Of a name given twice the last counts.
"""

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StringType, StructField, StructType

from kmq.client.producer import Producer, local_address
from kmq.errors import ConfigError, KmqError
from kmq.log import topics as declarations
from kmq.log.disk import replace_file
from kmq.settings import load
from kmq.spark.brokers import Directory, open_broker
from kmq.spark.options import Options
from kmq.spark.tables import Table, follow, open_table

# What the source is asked for. The key as bytes: a dead letter keeps it to the last one.
READ = (
    "broker string, topic string, partition int, offset bigint, seq bigint, recv_ts timestamp, key string,"
    " routing_key binary, producer_ts string, id string, headers map<string,string>, value binary"
)
OWN = ("broker", "topic", "partition", "offset", "seq", "recv_ts", "key", "producer_ts", "id", "headers")
ADDED = ("host", "pod", "date", "hour", "rest", "reason", "value", "value_text", "routing_key")
PARTITION_BY = ("topic", "date", "hour")
BAD = ("dlq", "keep", "drop")
INFER, NONE = "infer", "none"  # schemas that are none
DLQ = ".dlq"  # behind the topic
BATCH_BYTES = "64m"  # of lines in a micro-batch
EVERY = "10 seconds"  # between two of them: each makes a file in each directory that it adds to
SAMPLE = 10_000  # records that a schema is inferred from

_BESIDE = ("routing_key", "producer_ts", "id", "reason")  # what a dead letter's line holds beside headers and payload
_JSON, _CORRUPT, _END = "_json", "_corrupt", "\3"
_STRICT = {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_OBJECT = r"^\s*\{"  # how one begins
_NO_NAMES = set(" ,;{}()\n\t=`")  # in names of columns: some reader of Parquet or Delta takes none of them
_ADOPT_S = 30.0  # how long a router may take to take up a new topic


# --- functions of DataFrames -----------------------------------------------------------------------------------------


def parse(rows: DataFrame, schema: StructType | str, rest: bool = False) -> DataFrame:
    """`rows` with the fields of the JSON object in `value`, and `reason`: null, or why it is none of this schema.

    A field whose name a column has already becomes payload_<name>. `rest`: a map of the fields that the schema does not know.
    """
    fields = cast(StructType, StructType.fromDDL(schema)) if isinstance(schema, str) else schema
    text = F.coalesce(F.col("value").cast("string"), F.lit(""))  # a tombstone is no JSON object either
    # As the one element of an array with something behind it: from_json alone takes no offence at what follows the object.
    wrapped = F.concat(F.lit('{"p":['), text, F.lit('],"\\u0003":1}'))
    kind = StructType([StructField(field.name, field.dataType) for field in fields])
    shell = StructType([StructField("p", ArrayType(kind)), StructField(_END, IntegerType())])
    document = F.from_json(wrapped, shell.add(_CORRUPT, StringType()), _STRICT)
    payload, columns = F.get(F.col(_JSON)["p"], F.lit(0)), rows.columns
    parsed = rows.withColumn(_JSON, document)
    named = [payload[field.name].alias(name) for field, name in zip(fields, _names(fields, columns), strict=True)]
    if rest:
        known = F.map_filter(F.from_json(text, "map<string,string>", _STRICT), lambda key, _: ~key.isin(fields.names))
        named.append(F.when(F.size(known) > 0, known).alias("rest"))
    return parsed.select(*columns, *named, _reason(text, wrapped, payload, fields).alias("reason"))


def _names(fields: StructType, taken: Sequence[str]) -> list[str]:
    used, names = {name.lower() for name in (*taken, *OWN, *ADDED)}, []
    for name in fields.names:
        while name.lower() in used:
            name = f"payload_{name}"
        used.add(name.lower())
        names.append(name)
    return names


def _reason(text: Column, wrapped: Column, payload: Column, fields: StructType) -> Column:
    """Why a payload is bad, else null. Only what is bad is parsed again, to tell why."""
    document = F.col(_JSON)
    raw = F.from_json(text, "map<string,string>", _STRICT)
    wrong = (F.when(raw[field.name].isNotNull() & payload[field.name].isNull(), F.lit(field.name)) for field in fields)
    missing = (F.when(payload[field.name].isNull(), F.lit(field.name)) for field in fields if not field.nullable)
    reason = F.when(~F.is_valid_utf8(text), "not_utf8")
    reason = reason.when(document[_END].isNull() | (F.size(document["p"]) != 1), "not_json")
    reason = reason.when(payload.isNull() & F.try_parse_json(wrapped).isNull(), "not_json")
    reason = reason.when(payload.isNull() & ~text.rlike(_OBJECT), "not_object")
    reason = reason.when(document[_CORRUPT].isNotNull() | payload.isNull(), _listing("wrong_type", wrong))
    absent = _listing("missing", missing)
    return reason.when(absent != "missing", absent)


def _listing(what: str, names: Iterable[Column]) -> Column:
    """`what: a,b` of the names that are not null, `what` without any."""
    return F.concat_ws(": ", F.lit(what), F.nullif(F.concat_ws(",", *names), F.lit("")))


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
            "date": F.to_date("recv_ts"),
            "hour": F.hour("recv_ts"),
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


def infer(sample: DataFrame) -> StructType:
    """The schema of the JSON objects in `value`. Of names that differ in case only, the first is a field of it."""
    text = F.col("value").cast("string")
    objects = sample.where(text.rlike(_OBJECT)).select(text.alias("value"))
    found = sample.sparkSession.read.options(**_STRICT).json(objects)
    fields: dict[str, StructField] = {}
    for field in found.schema.fields:
        if field.name != _CORRUPT and not _NO_NAMES & set(field.name) and field.name:
            fields.setdefault(field.name.lower(), field)
    if not fields:
        raise ConfigError("--schema infer: there is no JSON object to infer from; give a schema, or --schema none")
    return StructType(list(fields.values()))


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
) -> Archived:
    """Archive what `where` (options of format("kmq")) names: all there is now, or on and on.

    `schema`: DDL, a file of it, `infer` (of a sample at the first start, the same ever after) or `none` (payloads as text).
    `enrich_with`: module:function, of a DataFrame with the good rows to the one that is stored. `rest`: None is: where inferred.
    `producers`: host:port of each broker's lines, in the order of `where`; without it that of this directory's settings.
    """
    if bad not in BAD:
        raise ConfigError(f"--bad {bad!r}: is one of {', '.join(BAD)}")
    more = _function(enrich_with) if enrich_with else None
    letters = _Letters(Options(where), producers) if bad == "dlq" and schema != NONE else None
    with open_table(to, format, partition_by) as table:
        fields = None if schema == NONE else _frozen(spark, table, where, schema)
        keeps_rest = rest if rest is not None else schema == INFER
        count = 0

        def store(rows: DataFrame) -> None:
            enriched = enrich(rows.drop("routing_key"), host, pod)
            table.stage(more(enriched) if more else enriched)

        def prepare(batch: DataFrame, query: str) -> None:
            nonlocal count
            if fields is None:
                store(with_text(batch))
                return
            seen = Observation()
            # Between the parsing and the choice, also so that Spark does not parse once for each of them.
            parsed = parse(batch, fields, keeps_rest).observe(seen, F.count("reason").alias("bad"))
            if bad == "keep":
                store(with_text(parsed.withColumn("value", F.when(F.col("reason").isNotNull(), F.col("value")))))
            else:
                store(parsed.where("reason is null").drop("reason", "value"))
            count += seen.get["bad"]
            if letters and seen.get["bad"]:
                letters.send(parsed.where("reason is not null"), query)

        if progress is not None:
            progress.describe(f"archive to {to}")
        rows = spark.readStream.format("kmq").schema(READ).options(**starting(where, batch_bytes)).load()
        done = follow(table, rows, prepare, "archive", once, every, checkpoint)
        return Archived(done.rows, count, done.batches, done.merged)


class _Letters:
    """The way of dead letters back to the brokers their records came from."""

    def __init__(self, options: Options, producers: str) -> None:
        """Raises ConfigError where one cannot be reached: better at the start than at the first bad record."""
        self._options = options
        self._token = options.token
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
            address, token = self._address(name)
            at, port = address.rsplit(":", 1)
            try:
                with Producer(at, int(port), token=token) as producer:
                    self._max_line = min(self._max_line, producer.connect(timeout=_ADOPT_S))
            except (KmqError, TimeoutError, ValueError) as err:
                raise ConfigError(
                    f"bad records could not be sent to {address}: {err}; start the broker, {hint}"
                ) from err

    def _address(self, broker: str) -> tuple[str, str]:
        """host:port and token, asked for each time: a broker that was started again may have another port."""
        if self._addresses:
            return self._addresses[broker], self._token
        host, port, token = local_address()
        return f"{host}:{port}", token

    def send(self, bad: DataFrame, query: str) -> None:
        """Store these records in their dead-letter topics, each once however often this is called."""
        bad = bad.persist()  # to find them is to parse the whole batch
        try:
            found = sorted((row.broker, row.topic) for row in bad.select("broker", "topic").distinct().collect())
            for broker, topic in found:
                self._declare(broker, f"{topic}{DLQ}")
            for broker in {broker for broker, _ in found}:
                address, token = self._address(broker)
                letters = dead_letters(
                    bad.where(F.col("broker") == broker), query.replace("-", "")[:12], self._max_line
                )
                writer = letters.write.format("kmq").mode("append").option("kmq.producers", address)
                (writer.option("kmq.token", token) if token else writer).save()
        finally:
            bad.unpersist()

    def _declare(self, broker: str, name: str) -> None:
        """An undeclared orders.dlq would be key `dlq` of topic orders, and its letters records of that."""
        if (broker, name) in self._known:
            return
        at = open_broker(broker, bool(self._options.paths), self._options.token)
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


def _frozen(spark: SparkSession, table: Table, where: Mapping[str, str], schema: str) -> StructType:
    """The schema of this table, decided at its first start: batches that are run again must come out the same."""
    path = f"{table.state}/schema.json"
    known = None
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = StructType.fromJson(json.load(file))
    if schema == INFER:
        found = known or infer(_sample(spark, where))
    else:
        found = _given(schema)
    if known is None:
        replace_file(path, json.dumps(found.jsonValue(), indent=1).encode())
    elif known != found:
        raise ConfigError(f"--schema: {path} has another one for this table: {known.simpleString()}")
    return found


def _given(schema: str) -> StructType:
    """DDL, or the DDL in a file."""
    text = schema
    if os.path.isfile(schema):
        with open(schema, encoding="utf-8") as file:
            text = file.read()
    try:
        return cast(StructType, StructType.fromDDL(text))
    except Exception as err:  # Spark's parser has several
        raise ConfigError(
            f"--schema {schema[:80]!r}: is neither a file nor DDL like 'price double, user string'"
        ) from err


def _sample(spark: SparkSession, where: Mapping[str, str]) -> DataFrame:
    """The first records of each topic."""
    options = Options(starting(where, BATCH_BYTES))
    brokers = [open_broker(name, bool(options.paths), options.token) for name in options.brokers]
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
    made: Callable[[DataFrame], DataFrame] = found
    return made
