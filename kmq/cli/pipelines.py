"""`kmq pipeline …`: the commands. Each pipeline is one command, in a section of its own.

A command takes its options in groups (spark_options.py), opens a session with `running`, and calls the `start` of
its module. `start` takes values; the module's `run` makes the same values of keyword arguments, for callers in Python.

    @run_app.command(epilog=examples("kmq pipeline run audit", "kmq pipeline run audit --path data"))
    @grouped
    def audit(*, origin: From, on: On, …) -> None:
        \"\"\"One line: what it does (shown by `kmq pipeline list`).\"\"\"
        with running("audit", on) as job:
            from kmq.spark.audit import audit  # modules of Spark are imported here, never at the top

            raise typer.Exit(audit.run(job.spark, origin.options(), progress=job.progress))

Importing this module imports neither pyspark nor pyarrow: `kmq up` starts as fast as before.
"""

from typing import Annotated, NamedTuple

import typer

from kmq.cli.output import examples, grouped, seconds
from kmq.cli.spark_options import (
    Catalog,
    Checkpoint,
    Follow,
    From,
    On,
    Once,
    TargetOptions,
    TopicOptions,
    running,
)
from kmq.errors import ConfigError

pipeline_app = typer.Typer(
    no_args_is_help=True,
    help="Pipelines on Spark: run one, list them, see their progress.",
    epilog=examples("kmq pipeline list", "kmq pipeline run audit", "kmq pipeline status"),
)
run_app = typer.Typer(no_args_is_help=True, help="Run a pipeline on Spark.", epilog=examples("kmq pipeline list"))
pipeline_app.add_typer(run_app, name="run")

_EVERY_SECOND = Follow(every="1 second")


# --- archive ---------------------------------------------------------------------------------------------------------


class ArchiveTable(NamedTuple):
    """The table that the archive writes."""

    to: Annotated[
        str, typer.Option("--to", help="Directory of the table, here or on a shared volume; or s3://bucket/prefix.")
    ]
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet"
    partition_by: Annotated[
        str, typer.Option("--partition-by", help="Columns that name the directories, comma-separated.")
    ] = "topic,date,hour"
    catalog: Catalog = ""

    def columns(self) -> list[str]:
        return [name.strip() for name in self.partition_by.split(",") if name.strip()]


class Payload(NamedTuple):
    """How the archive treats payloads."""

    schema: Annotated[
        str,
        typer.Option(
            "--schema", help="Schema of JSON payloads: DDL, a file of it, infer (once, by a sample), none (text)."
        ),
    ] = "infer"
    bad: Annotated[
        str, typer.Option("--bad", help="Payloads that do not fit: dlq (to <topic>.dlq), keep (with reason) or drop.")
    ] = "dlq"
    rest: Annotated[
        bool | None,
        typer.Option("--rest/--no-rest", help="Column for fields that the schema lacks. \\[default: if inferred]"),
    ] = None
    enrich: Annotated[
        str, typer.Option("--enrich", help="module:function of yours; takes and returns a DataFrame.")
    ] = ""


@run_app.command(
    epilog=examples(
        "kmq pipeline run archive --topics orders --to archive",
        "kmq pipeline run archive --pattern '.*' --to all --schema none",
        "kmq pipeline run archive --topics orders --to lake --format delta \\",
        "    --schema 'price double, user string NOT NULL' --continuous",
        "kmq pipeline run archive --topics orders --to lake/orders --format iceberg --catalog prod.sales.orders",
    )
)
@grouped
def archive(
    *,
    table: ArchiveTable,
    origin: From,
    topics: TopicOptions,
    payload: Payload,
    producers: Annotated[
        str,
        typer.Option("--producers", help="For dlq: host:port of each broker's ingress, in order; default: this one."),
    ] = "",
    target: TargetOptions,
    follow: Follow,
    on: On,
) -> None:
    """Write topics to a Parquet, Delta or Iceberg table, exactly once. JSON is typed; bad JSON goes to <topic>.dlq."""
    where = origin.options() | topics.options()
    with running("archive", on, continuous=not follow.once) as job:
        from kmq.spark.pipelines import archive
        from kmq.spark.sink.targets import Destination
        from kmq.spark.tables import TableSpec

        asked = archive.Archive(
            where,
            TableSpec(table.to, table.format, table.columns(), table.catalog),
            archive.Payloads(*payload),
            Destination(producers, target.options(origin) or None),
            follow.trigger(),
        )
        done = archive.start(job.spark, asked, job.progress)
        job.progress.stop()
        added = f"{done.rows:,} rows in {done.batches} batches to {table.to} ({table.format})"
        print(f"archived {added}; bad: {done.bad:,}, {payload.bad}")


# --- audit -----------------------------------------------------------------------------------------------------------


@run_app.command(
    epilog=examples(
        "kmq pipeline run audit",
        "kmq pipeline run audit --path data --report audit.html",
        "kmq pipeline run audit --brokers 127.0.0.1:8082 --json",
    )
)
@grouped
def audit(
    *,
    origin: From,
    report: Annotated[
        str, typer.Option("--report", help="HTML file to write, with plots; empty: none.")
    ] = "kmq-audit.html",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the tables.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum findings to show; all are counted.")] = 20,
    on: On,
) -> None:
    """Check that every WAL record is in its queue, once, in order, unchanged. Exit code 0: all good; 1: findings."""
    # The work is done in Python and takes seconds. Optimising the JVM's code would cost more time than it saves.
    with running("audit", on, conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}) as job:
        from kmq.spark.audit import audit

        raise typer.Exit(audit.run(job.spark, origin.options(), report, as_json, limit, job.progress))


# --- compact ---------------------------------------------------------------------------------------------------------


@run_app.command(
    epilog=examples(
        "kmq topics create users --set cleanup=compact",
        "kmq pipeline run compact --dry-run",
        "kmq pipeline run compact --topics users --min-dirty 0.2",
    )
)
@grouped
def compact(
    *,
    origin: From,
    topics: TopicOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")] = False,
    min_dirty: Annotated[
        float,
        typer.Option(
            "--min-dirty",
            min=0,
            max=1,
            help="Skip partitions that would shrink by less than this share.",
        ),
    ] = 0.5,
    tombstones: Annotated[
        str,
        typer.Option(
            "--tombstones",
            help="Delete tombstones older than this, once the WAL no longer has them; default: the topic's"
            " delete_retention.",
        ),
    ] = "",
    on: On,
) -> None:
    """Keep only the latest record of each key, in topics declared with cleanup=compact. Offsets do not change."""
    where = origin.options() | topics.options(".*")
    with running("compact", on) as job:
        from kmq.spark.pipelines import compact

        age = seconds("--tombstones", tombstones) if tombstones else None
        done = compact.run(job.spark, where, dry_run, min_dirty, age, job.progress)
        job.progress.stop()
        if not done:
            print(
                "nothing to compact: no topic with cleanup=compact has a sealed segment that the router's last"
                " checkpoint covers; the router writes a checkpoint within 30 s, and at kmq down"
            )
        for log in done:
            print(
                f"topic={log.topic} partition={log.partition} segments={log.segments} records={log.records}"
                f" bytes={log.bytes} dirty={log.dirty:.2f} compacted={'yes' if log.done else 'no'}"
            )


# --- metrics ---------------------------------------------------------------------------------------------------------


class WindowOptions(NamedTuple):
    """How records are assigned to time windows."""

    window: Annotated[str, typer.Option("--window", help="Length of a window: '10 seconds', '1 hour', …")] = "1 minute"
    watermark: Annotated[
        str, typer.Option("--watermark", help="How long a window stays open for records that arrive late.")
    ] = "10 seconds"
    late: Annotated[
        str, typer.Option("--late", help="Records later than --watermark: fail before their batch is added, or drop.")
    ] = "fail"


class MetricsTo(NamedTuple):
    """Where closed windows are written; without an output, all windows are printed."""

    to: Annotated[
        str, typer.Option("--to", help="Add closed windows to the table in this directory, or s3://bucket/prefix.")
    ] = ""
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet"
    catalog: Catalog = ""
    into: Annotated[str, typer.Option("--into", help="Send closed windows to this topic, as JSON.")] = ""
    producers: Annotated[
        str, typer.Option("--producers", help="host:port of the ingress of the broker with --into; default: this one.")
    ] = ""
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each window as one JSON object, in place of the table.")
    ] = False


@run_app.command(
    epilog=examples(
        "kmq pipeline run metrics --window '5 minutes'",
        "kmq pipeline run metrics --json",
        "kmq pipeline run metrics --topics orders,jobs --to metrics --continuous",
        "kmq pipeline run metrics --into metrics --checkpoint metrics.at --continuous",
    )
)
@grouped
def metrics(
    *,
    origin: From,
    topics: TopicOptions,
    windows: WindowOptions,
    output: MetricsTo,
    target: TargetOptions,
    follow: Follow,
    on: On,
) -> None:
    """Compute rates, sizes, keys and delays per topic and time window. Print them, or add them to a table or topic."""
    where = origin.options() | topics.options(".*")
    with running("metrics", on, continuous=not follow.once) as job:
        from kmq.spark.pipelines import metrics
        from kmq.spark.sink.targets import Destination
        from kmq.spark.tables import TableSpec

        if output.to or output.into:
            asked = metrics.Metrics(
                where,
                TableSpec(output.to, output.format, metrics.PARTITION_BY, output.catalog),
                output.into,
                Destination(output.producers, target.options(origin)),
                metrics.Windows(*windows),
                follow.trigger(),
            )
            rows = metrics.start(job.spark, asked)
            job.progress.stop()
            if output.to:
                print(f"added {rows:,} rows to {output.to} ({output.format})")
        elif output.as_json:
            from kmq.spark.sql import shell

            shell.as_json(metrics.summary(job.spark, where, windows.window), job.progress)
        else:
            table = metrics.as_table(metrics.summary(job.spark, where, windows.window))
            job.progress.stop()
            from kmq.config.terminal import console

            console().print(table)


# --- mirror ----------------------------------------------------------------------------------------------------------


class MirrorTo(NamedTuple):
    """The target: the broker that gets the copies."""

    to: Annotated[str, typer.Option("--to", help="host:port of the ingress of the target.")]
    to_path: Annotated[str, typer.Option("--to-path", help="Data directory of the target, to declare topics.")] = ""
    to_brokers: Annotated[str, typer.Option("--to-brokers", help="Or gateway of the target, to compare topics.")] = ""
    replay: Annotated[
        str,
        typer.Option("--replay", help="If the target holds another record, or none any more: stop, again, trust."),
    ] = "stop"


@run_app.command(
    epilog=examples(
        "kmq pipeline run mirror --topics orders --to 127.0.0.1:5673",
        "kmq pipeline run mirror --brokers a:8082 --pattern '.*' --to b:5673 \\",
        "    --to-brokers b:8082 --continuous",
    )
)
@grouped
def mirror(
    *,
    copies: MirrorTo,
    target: TargetOptions,
    origin: From,
    topics: TopicOptions,
    follow: Follow = _EVERY_SECOND,
    on: On,
) -> None:
    """Copy topics to another broker: each message once, its origin in headers, messages of a key together."""
    where = origin.options() | topics.options()
    connection = target.options()
    if copies.to_path and copies.to_brokers:
        raise ConfigError("give --to-path or --to-brokers, not both")
    with running("mirror", on, continuous=not follow.once) as job:
        from kmq.spark.connections import Access
        from kmq.spark.pipelines import mirror
        from kmq.spark.source.brokers import open_broker

        asked = {name: text for name, text in connection.items() if name != "kmq.timeout"}
        named = copies.to_path or copies.to_brokers
        logs = open_broker(named, bool(copies.to_path), Access.of(asked)) if named else None
        to = mirror.To(copies.to, logs, connection, copies.replay)
        done = mirror.start(job.spark, where, to, follow.trigger(), job.progress)
        job.progress.stop()
        sent = f"{done.rows:,} messages in {done.batches} batches to {copies.to}"
        print(f"mirrored {sent}; copies left out: {done.skipped:,}")


# --- redrive ---------------------------------------------------------------------------------------------------------


class Letters(NamedTuple):
    """Which records are redriven, and under which key."""

    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not changed.")] = ""
    to: Annotated[str | None, typer.Option("--to", help="New key, of {routing_key}, {topic}, {key}, {origin}.")] = None
    to_sql: Annotated[str, typer.Option("--to-sql", help="New routing key as a SQL expression over columns.")] = ""
    where: Annotated[str, typer.Option("--where", help="Only records for which this SQL condition holds.")] = ""
    dropped: Annotated[
        bool,
        typer.Option("--dropped", help="Read from the WALs what drop_oldest dropped, from this queue or all."),
    ] = False
    name: Annotated[
        str, typer.Option("--name", help="Name of this redrive; another name redrives the same records again.")
    ] = ""
    max_replays: Annotated[int, typer.Option("--max-replays", min=0, help="Letters that came back so often stay.")] = 3

    def expression(self) -> str:
        """Return the new routing key as a SQL expression."""
        from kmq.deadletters import redrive as rules

        has_to = self.to is not None
        if not (self.topic or self.dropped) or (has_to and self.to_sql) or not (has_to or self.to_sql or self.dropped):
            raise ConfigError("give the topic to read, and --to or --to-sql, the new routing key; or --dropped")
        return self.to_sql or rules.to_sql("{routing_key}" if self.to is None else self.to)


class RedriveSpeed(NamedTuple):
    """How the redriven records are sent."""

    rate: Annotated[float, typer.Option("--rate", min=0, help="Maximum messages per second; 0: no limit.")] = 0
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the messages per new key; send nothing.")] = False
    producers: Annotated[
        str, typer.Option("--producers", help="host:port of the ingress of the target broker; default: this one.")
    ] = ""


@run_app.command(
    epilog=examples(
        "kmq pipeline run redrive dead --to 'test.{key}' --dry-run",
        "kmq pipeline run redrive dead --to-sql \"concat('test.', key)\" \\",
        "    --where \"headers['reason'] is null and value_text like 'lost%'\"",
        "kmq pipeline run redrive --dropped --rate 1000",
    )
)
@grouped
def redrive(*, letters: Letters, sending: RedriveSpeed, target: TargetOptions, origin: From, on: On) -> None:
    """Send dead letters again under new keys, selected and renamed by SQL. A repeated redrive stores nothing twice."""
    expression = letters.expression()
    source = origin.options()
    with running("redrive", on) as job:
        from kmq.spark.pipelines import redrive
        from kmq.spark.sink.targets import Destination

        which = letters.topic, expression, letters.where, letters.dropped, letters.name, letters.max_replays
        how = sending.rate, sending.dry_run, Destination(sending.producers, target.options(origin))
        found = redrive.start(job.spark, redrive.Redrive(source, *which, *how), job.progress)
        job.progress.stop()
        print(redrive.text(found, letters.topic, letters.dropped, sending.dry_run))


# --- route -----------------------------------------------------------------------------------------------------------


class RouteTo(NamedTuple):
    """Where routed records go, and by which table."""

    to: Annotated[
        str, typer.Option("--to", help="Directory, here or on a shared volume; for a table also s3://bucket/prefix.")
    ]
    format: Annotated[
        str,
        typer.Option("--as", help="log: one pod's queues as its router writes them; a table: parquet, delta, iceberg."),
    ] = "log"
    table: Annotated[
        str, typer.Option("--table", help="Data directory whose routing table is used, in place of each pod's own.")
    ] = ""
    batch_bytes: Annotated[str, typer.Option("--batch", help="Bytes of the WAL to sort at a time.")] = "1g"
    catalog: Catalog = ""


@run_app.command(
    epilog=examples(
        "kmq pipeline run route --to rebuilt",
        "kmq pipeline run route --to all --as parquet",
        "kmq pipeline run route --path 'pods/*/data' --to lake --as delta --continuous",
    )
)
@grouped
def route(*, output: RouteTo, origin: From, once: Once = True, checkpoint: Checkpoint = "", on: On) -> None:
    """Sort WALs into topics and partitions, exactly once: rebuild a pod's queues, or make one table of many pods."""
    where = origin.options()
    with running("route", on, continuous=not once) as job:
        from kmq.spark.pipelines import route
        from kmq.spark.streaming.streams import Trigger
        from kmq.spark.tables import TableSpec

        asked = route.Route(
            where,
            TableSpec(output.to, output.format, route.PARTITION_BY, output.catalog),
            output.table,
            Trigger(once, route.EVERY, checkpoint),
            output.batch_bytes,
        )
        records = route.start(job.spark, asked, job.progress)
        job.progress.stop()
        print(f"routed {records:,} records to {output.to} ({output.format})")
