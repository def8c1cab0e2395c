"""A topic with its history in the lake: old records from the table of its archive, the rest from the log.

    orders = kmq.spark.table(spark, "orders", archive="lake", options={"kmq.bootstrap.servers": "a:8082"})

The table's ledger says where its last committed batch ends in each partition. Records before that offset come from the
table's files, read by Spark's own Parquet reader. The others come from the log, and become rows as in the archive:
payloads as columns, without records that the archive rejects as bad.

Owner       This module only reads. The archive may run meanwhile.
Invariant   A record is a row at most once, and exactly once if the table has it, or the log has it and its payload is
            good. Offsets and files are those of one commit. The log is read from these offsets to its end at the call,
            and before the archive's first record.
Refused     Another data directory than the archive's, or an older copy of it; a topic that was deleted and created
            again; records that retention removed before they were archived (failOnDataLoss=false: a warning, and
            without them).
Compacted   The table keeps records that compaction removes from the log; a warning says so.
Retention   of the table, by day: if it has no directory of days before one, records of these days come from the log, as
            far as the log has them.
Not covered Other rows that were deleted from the table, and records that a reset of the archive's checkpoint has
            skipped or archived twice. Records from before an archive with startingOffsets=latest, of a broker that was
            away when it began (onUnreachable=hold): only the first batch is known to say where a broker begins.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from kmq.config.settings import load
from kmq.errors import ConfigError, KmqError, RetryError
from kmq.logfmt import Logger
from kmq.spark import tables
from kmq.spark.connections import nearest
from kmq.spark.pipelines.archive import READ, ArchiveRows, enriching
from kmq.spark.pipelines.options import INFER, NONE, ArchiveOptions, complete
from kmq.spark.pipelines.payloads import read_schema
from kmq.spark.source import ends, plan
from kmq.spark.source.ends import EARLIEST, LATEST
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import Bounds, DataLossError, Offsets, OffsetSpan, StreamPosition
from kmq.spark.source.planner import QueryLogs, begun, check_same_records
from kmq.spark.tables import TableContent, stores
from kmq.spark.tables.base import ICEBERG

_PLACE = ("broker", "topic", "partition", "offset")


class Archive(NamedTuple):
    """The content of an archive at one moment."""

    name: str  # as the user spells it
    table: TableContent
    end: StreamPosition  # of the last committed batch
    begins: Offsets | None  # first offset by (data id, topic, partition); None if unknown

    def topics(self) -> list[str]:
        return sorted({topic for _, topic, _ in self.end.offsets})


def table(
    spark: SparkSession,
    topic: str,
    archive: str,
    options: Mapping[str, str] | None = None,
    catalog: str = "",
    enrich_with: str = "",
) -> DataFrame:
    """Return a topic's rows as of now: archived records from the archive's table, others from the log.

    `archive`: the table's directory. `options`: of format("kmq"), where the log is; default: this directory's broker.
    `catalog`, `enrich_with`: as for the archive. Raises KmqError if table and log do not belong together.
    """
    return rows(spark, topic, look(archive, catalog), options or {"path": load().data}, enrich_with)


def look(archive: str, catalog: str = "") -> Archive:
    """Return the current content of an archive. Raises ConfigError."""
    try:
        found = tables.snapshot(archive, catalog)
    except ConfigError as err:
        raise ConfigError(f"archive={err}") from err
    if lacking := [name for name in _PLACE if name not in found.columns]:
        raise ConfigError(f"archive={archive}: is no table of the archive: it has no column {', '.join(lacking)}")
    if found.offsets is None:
        raise ConfigError(
            f"archive={archive}: keeps no offsets of its last batch, because an earlier release wrote it, or its"
            " checkpoint is in an object store; run the archive again, with a directory as --checkpoint"
        )
    end, first = (StreamPosition.of_json(json.loads(of[0])) if of else None for of in (found.offsets, found.first))
    assert end is not None
    begins = None
    if first is not None and first.cuts is not None:  # format 1 does not say where a batch begins
        begins = first.renamed(first.identities).begins
    return Archive(archive, found, end, begins)


def rows(
    spark: SparkSession, topic: str, archive: Archive, options: Mapping[str, str], enrich_with: str = ""
) -> DataFrame:
    """Return the rows of `table`, given the content of an archive."""
    if topic not in (topics := archive.topics()):
        raise ConfigError(f"archive={archive.name}: has no topic {topic!r}{nearest(topic, topics)}; it has {topics}")
    if given := [name for name in options if name.lower().startswith(("starting", "ending"))]:
        raise ConfigError(f"{given[0]}: the archive says where the log is read; use a filter of offset or recv_ts")
    convert, columns = _conversion(spark, archive, enrich_with)
    logs = QueryLogs(ReadOptions({**options, "subscribe": topic}))
    identities, survey = logs.survey()
    bounds = survey()
    logs.starting(bounds, EARLIEST)  # raises if there is no such topic
    names = _names(archive, identities)
    try:
        seam = _seam(logs, archive, topic, names, bounds)
    except DataLossError as err:
        raise KmqError(f"archive={archive.name}: {err}") from err
    before = _before(
        logs, archive, topic, {key: seam[key] for key in seam if key in bounds}, identities, not enrich_with
    )
    found = [_from_files(spark, archive.table, columns).where(F.col("topic") == topic).select(*columns.names)]
    # Looked up after `before`: retention may have advanced, and then the first remaining record is not the day's first.
    firsts = {key: first for key, (first, _) in logs.bounds().items() if key in before}
    for start, end in ((firsts, {key: before[key] for key in firsts}), (seam, _ends(bounds))):
        if spans := plan.ranges(start, end, bounds, False):
            records = _read(spark, options, topic, spans, bounds)
            named = records.replace({now: then for then, now in names.items()}, subset=["broker"])
            found.append(convert.of(named).select(*columns.names))
    return reduce(DataFrame.unionByName, found)


def history(spark: SparkSession, archive: str) -> Callable[[str, Mapping[str, str]], DataFrame | None]:
    """Return for `kmq sql` a function from a topic and its source's options to its view; None if it is not archived."""

    def view(topic: str, options: Mapping[str, str]) -> DataFrame | None:
        found = look(archive)
        return rows(spark, topic, found, options) if topic in found.topics() else None

    return view


# --- columns ---------------------------------------------------------------------------------------------------------


def _conversion(spark: SparkSession, archive: Archive, enrich_with: str) -> tuple[ArchiveRows, StructType]:
    """Return the conversion of records to rows of the table, and its columns. Raises ConfigError if they differ."""
    found = archive.table
    fields = read_schema(f"{found.path}/.kmq")
    options: ArchiveOptions = {"schema": NONE if fields is None else INFER, "enrich_with": enrich_with}
    options |= {"bad": "keep" if "reason" in found.columns else "drop", "rest": "rest" in found.columns}
    options = complete(ArchiveOptions, options)
    convert = ArchiveRows(options, fields, enriching(enrich_with))
    columns = convert.columns(spark)
    made = stores.described(stores.arrow_schema(columns), widened=found.format == ICEBERG)
    if what := stores.differing(found.columns, made):
        advice = "give enrich_with the module:function that the archive had as --enrich"
        raise ConfigError(f"archive={archive.name}: records would become other rows than the table's: {what}; {advice}")
    return convert, columns


# --- records of the table --------------------------------------------------------------------------------------------


def _from_files(spark: SparkSession, found: TableContent, columns: StructType) -> DataFrame:
    if not found.files:
        return spark.createDataFrame([], columns)
    reader = spark.read.schema(columns)
    if found.format != ICEBERG:  # its files have all columns, the others' directories have some
        reader = reader.option("basePath", found.path)
    return reader.parquet(*map(stores.for_spark, found.files))


# --- records of the log ----------------------------------------------------------------------------------------------


def _names(archive: Archive, identities: Mapping[str, str]) -> dict[str, str]:
    """Return the archive's name of each broker → its name here. Raises ConfigError if the brokers differ."""
    if silent := [name for name, identity in archive.end.identities.items() if not identity]:
        raise RetryError(
            f"archive={archive.name}: {', '.join(silent)} has not answered the archive since it began"
            " (onUnreachable=hold), so the table does not say where its records begin; ask again when the archive has"
            " read it, or ask the log alone"
        )
    here = {identity: name for name, identity in identities.items()}
    there = {identity: name for name, identity in archive.end.identities.items()}
    if here.keys() != there.keys():
        said = (", ".join(f"{name} (data id {each})" for each, name in of.items()) for of in (there, here))
        raise ConfigError(
            f"archive={archive.name}: is of {next(said)}, and the log here is of {next(said)}: other records have the"
            " same offsets; name all brokers that were archived, and no others"
        )
    return {name: here[identity] for identity, name in there.items()}


def _seam(logs: QueryLogs, archive: Archive, topic: str, names: Mapping[str, str], bounds: Bounds) -> Offsets:
    """Return where the archive's last batch ends. Raises DataLossError if the log is not the one that the archive
    read.
    """
    read = archive.end.renamed(names)
    read.offsets = {key: offset for key, offset in read.offsets.items() if key[1] == topic}
    read.last = {key: stamp for key, stamp in read.last.items() if key[1] == topic}
    check_same_records(logs, read, bounds)
    seam = begun(logs, read, bounds)
    for span in plan.wanted(seam, _ends(bounds)):
        if what := plan.lost(span, bounds):
            if logs.options.fail_on_data_loss:
                raise DataLossError(span.key, f"{what}, before they were archived")
            _warn(archive, topic, f"{plan.name_of(span.key)}: {what}, before they were archived", "they are in no row")
    if any(broker.topics()[topic].is_compacted for broker in logs.brokers.values() if topic in broker.topics()):
        what = "compaction removes records from the log, and the table keeps all that were archived"
        _warn(archive, topic, what, "keys have rows that the log does not have any more")
    return seam


def _ends(bounds: Bounds) -> Offsets:
    return {key: end for key, (_, end) in bounds.items()}


def _before(
    logs: QueryLogs, archive: Archive, topic: str, seam: Offsets, identities: Mapping[str, str], is_dated: bool
) -> Offsets:
    """Return the offset in each partition before which the table has no record.

    `is_dated`: column `date` is that of recv_ts. A table without files from before a day has no record that was
    received before it, because recv_ts never goes back.
    """
    begins_of = archive.begins or {}
    begins = {key: begins_of.get((identities[key[0]], *key[1:]), plan.least(topic)) for key in seam}
    found = archive.table
    places = [stores.partition_values(file.removeprefix(found.path)) for file in found.files]
    dates = [place.get("date") for place in places if place.get("topic", topic) == topic]
    if not dates:
        return seam  # no file has a record of the topic
    if not is_dated or None in dates:
        return begins
    day = min(date for date in dates if date)
    since = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1_000_000
    for key, offset in logs.offsets_of_time(seam, since).items():
        begins[key] = max(begins[key], min(offset, seam[key]))
    return begins


def _read(
    spark: SparkSession, options: Mapping[str, str], topic: str, spans: Sequence[OffsetSpan], bounds: Bounds
) -> DataFrame:
    """Return the records of these ranges."""
    edges_of = {span.key: (span.start, span.end) for span in spans}
    edges: tuple[ends.Table, ends.Table] = ({}, {})
    for broker, name, partition in bounds:
        for table, offset in zip(edges, edges_of.get((broker, name, partition), (LATEST, LATEST)), strict=True):
            address = broker.split(",")[0]  # of a shard
            table.setdefault(address, {}).setdefault(name, {})[str(partition)] = offset
    starting, ending = map(json.dumps, edges)
    numbers = sorted({number for _, _, number in bounds})
    return (
        spark.read.format("kmq")
        .schema(READ)
        .options(**options, assign=json.dumps({topic: numbers}))
        .options(startingOffsets=starting, endingOffsets=ending)
        .load()
    )


def _warn(archive: Archive, topic: str, what: str, effect: str) -> None:
    Logger("spark").warn("archive_differs", archive=archive.name, topic=topic, what=what, effect=effect)
