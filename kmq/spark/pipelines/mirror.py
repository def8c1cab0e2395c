"""Mirror topics of one or several brokers into another broker, which stores each message exactly once.

    from kmq.spark.pipelines.mirror import READ, messages
    rows = spark.readStream.format("kmq").schema(READ).option("path", "data").option("subscribe", "orders").load()
    messages(rows).writeStream.format("kmq").option("kmq.producers", "b:5673").…

Routing key, producer_ts, payload and the headers that a client sent are copied unchanged, also null values and repeated
names. One exception: if a key stored before marks existed looks like a mark, the copy's routing key gets a mark.
Headers of the copy tell where the record is in the source:

    mirror              id of the source's data directory (its file `id`)
    mirror_partition, mirror_offset, mirror_seq
                        its partition, offset and seq there
    mirror_id           its id there, if it had one: producers with a name number their messages

Invariant   The target knows a message by producer `mirror-<source id>-<topic>-<partition>` and id offset + 1. So a
            message that is sent again is stored once, in order: after a kill of the driver, a task or the target, or
            without the checkpoint. A message with a header `mirror` is a copy and never copied again: two brokers may
            mirror each other without a loop. (Of three brokers each must mirror from both others.)
Partitions  A key keeps its partition number only if both topics have as many partitions, and the same partitioner. So a
            topic that the target lacks is declared there alike (`--to-path`), or the error shows the command that does
            (`--to-brokers`); a different number or partitioner is refused. Without either option nothing is known of
            the target: topics with several partitions or a dot in their name, which a message alone does not create,
            are refused. Messages without a key are spread over the target's partitions.
Again       A record that the target has already is compared with its copy, if the target's logs can be read
            (`--to-path`, `--to-brokers`). A different record (a source restored from an older copy), or a copy removed
            by retention, stops the mirror; `--replay trust` skips the record. Without these options producer and id
            decide.
Not covered The target forgets a producer that is idle for KMQ_PRODUCER_TTL (30 days). If a mirror idles longer and
            loses its checkpoint, it copies everything again. A message that exceeds the target's KMQ_MAX_LINE with
            these headers stops the mirror, and the error names it: allow the target some 300 bytes more.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Unpack

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from kmq.errors import ConfigError
from kmq.log import topics
from kmq.spark.pipelines.options import MIRROR_EVERY, MirrorOptions, complete, value
from kmq.spark.pipelines.table import is_adopted, starting
from kmq.spark.sink.routing import unambiguous
from kmq.spark.sink.targets import TRUST, Target
from kmq.spark.source.broker import Broker, Layout
from kmq.spark.source.brokers import Directory
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.planner import QueryLogs
from kmq.spark.streaming import streams
from kmq.spark.streaming.streams import Trigger

if TYPE_CHECKING:
    from kmq.spark.streaming.streams import Progress

HEADERS = "array<struct<key:string,value:binary>>"
READ = (
    "broker string, topic string, partition int, offset bigint, seq bigint, key binary, routing_key binary,"
    " producer_ts binary, id string, headers "
    f"{HEADERS}, value binary, origin_broker string"
)
ORIGIN = "mirror"
OWN = (ORIGIN, "mirror_partition", "mirror_offset", "mirror_seq", "mirror_id")
_LONGEST_NAME = 39  # characters of a topic in a producer's name, which has at most 64
_ID = 12  # digits of a source's id in a producer's name


def messages(rows: DataFrame, sources: Mapping[str, str] | None = None) -> DataFrame:
    """Return rows of READ as messages for format("kmq"), without copies.

    `sources`: broker → its data id, for rows without origin_broker.
    """
    table = F.create_map(*(F.lit(text) for pair in sources.items() for text in pair)) if sources else None
    origin = F.col("origin_broker") if table is None else table[F.col("broker")]
    digest = F.substring(F.sha2(F.col("topic"), 256), 1, _LONGEST_NAME - 8)
    name = F.when(F.length("topic") <= _LONGEST_NAME, F.col("topic")).otherwise(digest)
    producer = F.concat_ws("-", F.lit("mirror"), F.substring(origin, 1, _ID), name, "partition")
    theirs = F.coalesce("headers", F.array().cast(HEADERS))
    others = F.filter(theirs, lambda header: ~header["key"].isin(*OWN))
    added = [(ORIGIN, origin), *((f"mirror_{column}", F.col(column)) for column in ("partition", "offset", "seq"))]
    place = F.array(*(_header(*pair) for pair in added))
    had_id = F.when(F.col("id") != "", F.array(_header("mirror_id", F.col("id")))).otherwise(F.array().cast(HEADERS))
    found = rows.where(~_is_copy()).select(
        unambiguous(F.col("topic"), F.col("key"), F.col("routing_key")).alias("routing_key"),
        *("producer_ts", "value"),
        F.concat(others, place, had_id).alias("headers"),
        producer.alias("producer"),
        (F.col("offset") + 1).alias("id"),
    )
    return found.repartition("producer").sortWithinPartitions("producer", "id")  # one task per producer, in order


def _header(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def _is_copy() -> Column:
    return F.coalesce(F.exists("headers", lambda header: header["key"] == ORIGIN), F.lit(False))


def producer_of(source: str, topic: str, partition: int) -> str:
    """Return the producer name of a source partition at the target, as `messages` makes it."""
    name = topic if len(topic) <= _LONGEST_NAME else sha256(topic.encode()).hexdigest()[: _LONGEST_NAME - 8]
    return f"mirror-{source[:_ID]}-{name}-{partition}"


# --- the pipeline ----------------------------------------------------------------------------------------------------


class Mirrored(NamedTuple):
    """The result of a run."""

    rows: int  # sent; of a repeated batch the target had stored some before
    skipped: int  # records that are copies themselves
    batches: int


def run(
    spark: SparkSession,
    where: Mapping[str, str],
    to: str,
    target: Broker | None = None,
    *,
    progress: "Progress | None" = None,
    **options: Unpack[MirrorOptions],
) -> Mirrored:
    """Mirror the topics of `where` (options of format("kmq")) to the broker at `to`: all records now, or continuously.

    `connection`: the sink's options for token, TLS and timeout.
    `target`: the same broker's topics and logs, to compare and to declare. `replay`: see Again in the head.
    `checkpoint`: default kmq-mirror-<to> in this directory.
    """
    settings = complete(MirrorOptions, options, every=MIRROR_EVERY)
    sources = QueryLogs(ReadOptions(where))
    identities = sources.planned(lambda: sources.each(lambda name: sources.brokers[name].identity()))
    if target is not None and target.identity() in identities.values():
        raise ConfigError(f"{target.name} is the source: a broker is not mirrored into itself")
    lines_to = Target.of(to, settings["connection"] or {}, "--to")
    lines_to.check()
    sink = _comparing(lines_to, target, settings["replay"])
    sent = skipped = batches = 0

    def copy(batch: DataFrame, batch_id: int) -> None:
        """Copy a micro-batch. Spark calls this for each batch, and again for a batch whose end it did not see."""
        nonlocal sent, skipped, batches
        _agree(sources, target)  # for new topics, which this batch may have
        seen = Observation()
        is_copy = _is_copy()
        counted = batch.observe(seen, F.count("*").alias("rows"), F.count_if(is_copy).alias("copies"))
        writer = messages(counted).write.format("kmq").mode("append").options(**sink)
        writer.option("kmq.probe", "false").save()  # checked at the start; later wait for a target that is down
        sent += seen.get["rows"] - seen.get["copies"]
        skipped += seen.get["copies"]
        batches += 1

    _agree(sources, target)
    rows = spark.readStream.format("kmq").schema(READ).options(**starting(where, takes_letters=True)).load()
    if progress:
        progress.describe(f"mirror to {to}")
    here = f"kmq-mirror-{to.rpartition('/')[2].replace(':', '-')}"
    streams.follow(rows, copy, "mirror", value(Trigger, settings).at(here))
    return Mirrored(sent, skipped, batches)


def _comparing(to: Target, logs: Broker | None, replay: str) -> dict[str, str]:
    """Return the sink's options for comparing. `logs`: where the copies can be read."""
    if logs is None:
        return {**to.options, "kmq.replay": TRUST}
    where = "path" if isinstance(logs, Directory) else "kmq.bootstrap.servers"
    return {**to.options, "kmq.replay": replay, where: logs.name}


def _agree(sources: QueryLogs, target: Broker | None) -> None:
    """Ensure that keys map to the same partitions at the target; else ConfigError tells what to do."""
    wanted: dict[str, Layout] = {}
    found = sources.planned(lambda: sources.each(lambda name: sources.brokers[name].topics()))
    for name, topics_there in found.items():
        for topic, layout in topics_there.items():
            if sources.options.wants(topic) and (differ := _difference(layout, wanted.setdefault(topic, layout))):
                raise ConfigError(f"topic {topic}: {differ[0]} at {name}, {differ[1]} elsewhere")
    if target is None:
        unsure = [topic for topic, layout in wanted.items() if layout.partitions > 1 or "." in topic]
        if unsure:
            raise ConfigError(
                f"topic {', '.join(unsure)}: whether the target has it with as many partitions is not known;"
                " give --to-path, its data directory, or --to-brokers, its gateway"
            )
        return
    there = target.topics()
    for topic, layout in wanted.items():
        if topic not in there:
            _declare(target, topic, layout)
        elif differ := _difference(layout, there[topic]):
            raise ConfigError(
                f"topic {topic}: {differ[0]} here, {differ[1]} at {target.name}: keys would change places"
            )


def _difference(one: Layout, other: Layout) -> tuple[str, str] | None:
    """Return, for an error, why a key may map to different partitions of two topics; None if it cannot."""
    if one.partitions != other.partitions:
        return f"{one.partitions} partitions", str(other.partitions)
    if one.partitions > 1 and one.partitioner != other.partitioner:
        return f"partitioner {one.partitioner}", other.partitioner
    return None


def _declare(target: Broker, topic: str, layout: Layout) -> None:
    if not isinstance(target, Directory):
        raise ConfigError(
            f"topic {topic} is not known at {target.name};"
            f" there: kmq topics create {topic} -p {layout.partitions} --partitioner {layout.partitioner}"
        )
    topics.declare(target.path, topic, layout.partitions, partitioner=layout.partitioner)
    if not is_adopted(target.path, topic):
        raise ConfigError(f"topic {topic}: the router of {target.name} has not adopted it; is the broker up?")
