"""Send dead letters, or records that drop_oldest removed from queues, through a broker again; select and rename by SQL.

    redrive.run(spark, {"path": "data"}, "dead", "concat('test.', key)", condition="value_text like '%timeout%'")

The rules are those of `kmq redrive` (kmq.deadletters): which new keys are valid, how a record becomes a line, under
which producer and id it is sent, and which dead letters stay. A template ({topic}, {key}, …) is short for an
expression: kmq.deadletters.redrive.to_sql. With the expression `origin` letters are sent back as by `kmq dlq replay`.
Either command knows the letters that the other one has sent back.

Columns     those of format("kmq") and `line`, the whole stored line. The routing table gives topic, partition and key
            of a dropped record. key and routing_key are the stored bytes, not percent-decoded, and text to SQL.
            `origin` is the routing key of a dead letter's original record; null for other records.
Invariant   A record is always stored once, however often the same redrive is run or a task is retried: see `Once`
            there. So one task sends a whole partition, in the order of its offsets; with a rate one task sends all
            partitions.
Before      anything is sent, the new keys of exactly the rows to send are checked. These rows are kept (on disk, if
            memory is too small), so that an expression like uuid() is not evaluated twice. Later records are not
            redriven.
No sink     format("kmq") would encode the values again. Here the stored bytes are sent, and duplicates are counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from kmq.client.producer import Producer
from kmq.deadletters import redrive, selection
from kmq.deadletters.redrive import Redriven, RedrivenPartition
from kmq.errors import ConfigError
from kmq.log import topic_changes
from kmq.log.reader import WAL
from kmq.message import record
from kmq.message.letters import parse_letter
from kmq.spark.pipelines.options import RedriveOptions, complete, value
from kmq.spark.pipelines.route import RoutedPods, among, map_in_arrow, route
from kmq.spark.sink.routing import exact, unambiguous
from kmq.spark.sink.targets import Destination, Target, producer
from kmq.spark.source import columns
from kmq.wire import refusals

_EXACT = ("key", "routing_key")  # read as stored, not decoded
SCHEMA = ", ".join(
    f"{name} {'binary' if name in _EXACT else kind}"
    for name, kind in (*columns.COLUMNS.items(), (columns.LINE, "binary"))
)
_COLUMNS = ("broker", "log", "number", "offset", "routing_key", "new_key", "line")
SHOWN = 20  # new keys in a summary


class NewKey(NamedTuple):
    """A new routing key, how many records get it, and the old key of one of these records."""

    new: bytes
    records: int
    old: bytes


class Summary(NamedTuple):
    """What a redrive selects, and what it has done."""

    records: int
    keys: int  # different new keys
    most: list[NewKey]  # the keys with most records
    never_stored: int  # dropped by ring framed, before the WAL
    retired: int  # no longer in the WAL
    before: int = 0  # how many of `records` had been stored before
    stayed: int = 0  # dead letters that were sent back too often, or are cut
    refused: int = 0  # records that the broker refused for good
    named: tuple[str, ...] = ()  # the first of them: <topic>/<partition>@<offset>: <why>


def rewritten(rows: DataFrame, to: str, where: str = "") -> DataFrame:
    """Return the rows that `where` selects, with `new_key` (binary), the result of expression `to`."""
    place = F.col("topic"), F.col("key")
    origin = F.udf(_origin_topic, "string", useArrow=False)("line")
    old = {
        "exact": exact(*place),
        "origin": F.when(origin.isNotNull(), exact(origin, F.col("key"))),
        "key": F.coalesce("key", F.lit(b"")),
        "routing_key": unambiguous(*place, F.col("routing_key")),
    }
    rows = rows.withColumns({name: it.cast("string") for name, it in old.items()})  # Spark keeps the bytes as they are
    if where:
        rows = _sql("--where", where, lambda: rows.where(where))
    found = _sql("--to", to, lambda: rows.withColumn("new_key", F.expr(to)))
    if found.schema["new_key"].dataType.simpleString() not in ("string", "binary"):
        raise ConfigError(f"--to {to!r}: must be a text")
    return found.withColumns({name: F.col(name).cast("binary") for name in (*_EXACT, "new_key")})


def _origin_topic(line: bytes) -> str | None:
    letter = parse_letter(bytes(line))
    return None if letter is None else letter.topic


def _judged(rows: DataFrame, max_replays: int, only_letters: bool) -> DataFrame:
    """Return the rows with `stays`: why a letter must not be sent back, or ""."""

    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reasons = [selection.stays(line, max_replays, only_letters) for line in batch.column("line").to_pylist()]
            columns = [*batch.columns, pa.array(reasons, pa.string())]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, "stays"])

    schema = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in rows.schema)
    return map_in_arrow(rows, judge, f"{schema}, stays string")


def _sql(option: str, text: str, make: Callable[[], DataFrame]) -> DataFrame:
    try:
        return make()
    except (AnalysisException, ParseException) as err:
        raise ConfigError(f"{option} {text!r}: {str(err).strip().splitlines()[0]}") from None


# --- selection -------------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    rows: DataFrame  # with `log` and `number`: where each row was read
    never_stored: int = 0
    retired: int = 0


def _queue(spark: SparkSession, where: Mapping[str, str], pods: RoutedPods, topic: str) -> _Source:
    if not any(broker.bounds([topic]) for broker in pods.brokers.values()):
        raise ConfigError(f"topic {topic!r} does not exist at {', '.join(pods.brokers)}")
    return _Source(_read(spark, where, topic))


def _dropped(spark: SparkSession, where: Mapping[str, str], pods: RoutedPods, topic: str) -> _Source:
    ledgers = {name: broker.ledger() for name, broker in pods.brokers.items()}
    ranges = {name: ledger["dropped"]["durable"] for name, ledger in ledgers.items()}
    firsts = {name: broker.bounds([WAL])[WAL, 0][0] for name, broker in pods.brokers.items()}
    retired = sum(selection.retired(mine, firsts[name]) for name, mine in ranges.items())
    lost = sum(last - low + 1 for ledger in ledgers.values() for low, last in ledger["dropped"]["framed"])
    edges = [seq for mine in ranges.values() for span in mine for seq in span] or [0]
    # Read no more of the WAL than needed. All later steps keep this filter, so it may be pushed down.
    rows = _read(spark, {**where, "pushFilters": "true"}, WAL).where(F.col("offset").between(min(edges), max(edges)))
    rows = route(among(rows, ranges), pods.look()[0])
    rows = rows.where(F.col("topic") != topic_changes.TOPIC)  # the framer numbers it again
    return _Source(rows.where(F.col("topic") == topic) if topic else rows, lost, retired)


def _read(spark: SparkSession, where: Mapping[str, str], topic: str) -> DataFrame:
    rows = spark.read.format("kmq").schema(SCHEMA).options(**where, subscribe=topic).load()
    return rows.withColumns({"log": F.col("topic"), "number": F.col("partition")})


# --- summary ---------------------------------------------------------------------------------------------------------


def _summary(chosen: DataFrame, to: str, source: _Source) -> Summary:
    """Count records by new key. Raises ConfigError if a new key is not valid."""
    fault = F.udf(lambda new: "it is null" if new is None else record.key_refusal(bytes(new)), "string")
    keys = chosen.groupBy("new_key").agg(F.count("*").alias("records"), F.min("routing_key").alias("old")).cache()
    bad = keys.withColumn("fault", fault("new_key")).where("fault <> ''").first()
    if bad is not None:
        new = None if bad.new_key is None else bytes(bad.new_key).decode(errors="replace")
        why = bad.fault if new is None else refusals.of_key(bad.fault)
        raise ConfigError(f"--to {to!r}: gives {new!r} for {_shown(bad.old)!r}, which is no routing key: {why}")
    total = keys.agg(F.sum("records").alias("records"), F.count("*").alias("keys")).first()
    assert total is not None
    most = keys.orderBy(F.desc("records"), "new_key").limit(SHOWN)
    shown = [NewKey(bytes(row.new_key), row.records, bytes(row.old)) for row in most.collect()]
    keys.unpersist()
    return Summary(total.records or 0, total.keys, shown, source.never_stored, source.retired)


# --- in a task -------------------------------------------------------------------------------------------------------


_OUTCOME = "before bigint, refused bigint, named array<string>"


def _send(
    batches: Iterable[pa.RecordBatch],
    identities: Mapping[str, str],
    which: tuple[str, ...] | None,
    target: Target,
    rate: float,
) -> Iterator[pa.RecordBatch]:
    """Send rows, those of a partition together and in order; yield how many had been stored before or refused.

    `which`: what identifies the redrive; None: dead letters that are sent back.
    """

    def records() -> Iterator[Redriven]:
        for batch in batches:
            for broker, log, number, offset, new, line in zip(*(each.to_pylist() for each in batch), strict=True):
                yield RedrivenPartition(identities[broker], log, number, which), offset, line, new

    def connect(who: str) -> Producer:
        return producer(target.addresses, target.access, producer=who, first_id=0, timeout_s=target.timeout_s)

    sent = redrive.send(records(), rate, connect)
    columns = [
        pa.array([sent.repeated], pa.int64()),
        pa.array([sent.refused], pa.int64()),
        pa.array([sent.named], pa.list_(pa.string())),
    ]
    yield pa.RecordBatch.from_arrays(columns, ["before", "refused", "named"])


# --- the pipeline ----------------------------------------------------------------------------------------------------


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    topic: str,
    to: str,
    condition: str = "",
    *,
    progress: Any = None,
    **options: Unpack[RedriveOptions],
) -> Summary:
    """Redrive the records of `topic` at the brokers of `where` (options of format("kmq")) that match `condition` (SQL).

    `to`: SQL expression of the new key. `dropped`: the records that dropped.log names, of one topic or of all. `name`:
    of the redrive; under another name the same records are redriven again. `max_replays`: dead letters that were sent
    back so often stay. `producers`: host:port of the target; default: the broker of our settings. `connection`: the
    sink's options for its token, TLS and timeout; None: the token of `where`.
    """
    settings = complete(RedriveOptions, options)
    describe = progress.describe if progress is not None else lambda what: None
    pods = RoutedPods(where)
    is_back = to == redrive.to_sql(redrive.ORIGIN) and not settings["name"]  # dead letters, to where they came from
    destination = value(Destination, settings)
    connection = destination.connection_like(pods.options.token)
    target = None if settings["dry_run"] else Target.of(destination.producers, connection)
    source = (_dropped if settings["dropped"] else _queue)(spark, where, pods, topic)
    all_rows = rewritten(source.rows, to, condition).select(*_COLUMNS)
    judged = _judged(all_rows, settings["max_replays"], is_back).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        describe(f"looking at {'what was dropped' if settings['dropped'] else topic}")
        chosen = judged.where("stays = ''").drop("stays")
        found = _summary(chosen, to, source)._replace(stayed=judged.where("stays <> ''").count())
        if target is None or not found.records:
            return found
        target.check()
        describe(f"sending {found.records:,} records")
        place = ("broker", "log", "number")
        rows = chosen.drop("routing_key")
        parted = rows.repartition(1) if settings["rate"] else rows.repartition(*place)
        which = None if is_back else (settings["name"], to, condition, topic if settings["dropped"] else "")
        send = partial(_send, identities=pods.identities(), which=which, target=target, rate=settings["rate"])
        sent = map_in_arrow(parted.sortWithinPartitions(*place, "offset"), send, _OUTCOME).collect()
        named = tuple(text for row in sent for text in row.named)[: redrive.MOST_NAMED]
        sums = {name: sum(row[name] for row in sent) for name in ("before", "refused")}
        return found._replace(named=named, **sums)
    finally:
        judged.unpersist()


def text(found: Summary, topic: str, dropped: bool, dry_run: bool) -> str:
    """Return what the command prints."""
    count = found.records - found.refused
    what = f"{count} {selection.text_of_dropped(topic) if dropped else f'of {topic}'}"
    lines = [*selection.texts_of_lost(found.never_stored, found.retired)]
    if found.stayed:
        lines.append(f"{found.stayed} stay: they came back too often, are cut, or are no letters")
    if not dry_run:
        again = f"; {found.before} of them were stored before" if found.before else ""
        lines += [f"refused: {each}" for each in found.named]
        return "\n".join([*lines, f"redriven {what}{again}"])
    lines += [f"{each.records:10,}  {_shown(each.old)} -> {_shown(each.new)}" for each in found.most]
    if found.keys > len(found.most):
        lines.append(f"{'…':>10}  and {found.keys - len(found.most):,} more new keys")
    return "\n".join([*lines, f"would redrive {what}"])


def _shown(key: bytes) -> str:
    return bytes(key).decode(errors="replace")
