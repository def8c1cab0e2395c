"""`kmq pipeline …`: what a person types. Each pipeline is one command, in a section of its own.

A command takes its options in groups (pipeline_options.py), opens a session with `running`, and hands its module's `start` the
values that `run` makes of keyword arguments:

    @run_app.command(epilog=examples("kmq pipeline run audit", "kmq pipeline run audit --path data"))
    @grouped
    def audit(*, origin: From, on: On, …) -> None:
        \"\"\"One line: what it does (shown by `kmq pipeline list`).\"\"\"
        with running("audit", on) as job:
            from kmq.spark.audit import audit  # modules of Spark are imported here, never at the top

            raise typer.Exit(audit.run(job.spark, origin.options(), progress=job.progress))

Importing this module imports neither pyspark nor pyarrow: `kmq up` starts as fast as before.
"""

import sys
from typing import Annotated, NamedTuple

import typer

from kmq.cli.helptext import examples
from kmq.cli.options import grouped
from kmq.cli.pipeline_options import Catalog, Checkpoint, Follow, From, On, Once, Target, Topics, seconds
from kmq.cli.pipeline_session import running
from kmq.errors import ConfigError

pipeline_app = typer.Typer(
    no_args_is_help=True,
    help="Pipelines on Spark: run one, list them, see how far they are.",
    epilog=examples("kmq pipeline list", "kmq pipeline run audit", "kmq pipeline status"),
)
run_app = typer.Typer(no_args_is_help=True, help="Run a pipeline on Spark.", epilog=examples("kmq pipeline list"))
pipeline_app.add_typer(run_app, name="run")

_EVERY_SECOND = Follow(every="1 second")


@pipeline_app.command("list", epilog=examples("kmq pipeline list"))
def list_pipelines() -> None:
    """List the pipelines."""
    for command in run_app.registered_commands:
        function = command.callback
        assert function is not None
        name = command.name or function.__name__.replace("_", "-")
        print(f"{name:10} {(function.__doc__ or '').strip().splitlines()[0]}", file=sys.stdout)


# --- archive -------------------------------------------------------------------------------------------------------


class ArchiveTable(NamedTuple):
    """The table that gets the rows."""

    to: Annotated[
        str, typer.Option("--to", help="Directory of the table, here or on a shared volume; or s3://bucket/prefix.")
    ]
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet"
    partition_by: Annotated[
        str, typer.Option("--partition-by", help="Columns, comma-separated, that name the directories.")
    ] = "topic,date,hour"
    catalog: Catalog = ""

    def columns(self) -> list[str]:
        return [name.strip() for name in self.partition_by.split(",") if name.strip()]


class Payload(NamedTuple):
    """What becomes of payloads."""

    schema: Annotated[
        str,
        typer.Option(
            "--schema", help="Of JSON payloads: DDL, a file of it, infer (once, from a sample), or none: text."
        ),
    ] = "infer"
    bad: Annotated[
        str, typer.Option("--bad", help="Payloads not of the schema: dlq (<topic>.dlq), keep (with reason) or drop.")
    ] = "dlq"
    rest: Annotated[
        bool | None,
        typer.Option("--rest/--no-rest", help="Column of fields the schema lacks. \\[default: where it is inferred]"),
    ] = None
    enrich: Annotated[
        str, typer.Option("--enrich", help="module:function of yours, from a DataFrame to a DataFrame.")
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
    topics: Topics,
    payload: Payload,
    producers: Annotated[
        str,
        typer.Option("--producers", help="For dlq: host:port of each broker's lines, in order; default: this one's."),
    ] = "",
    target: Target,
    follow: Follow,
    on: On,
) -> None:
    """Topics to a Parquet, Delta or Iceberg table: JSON typed, enriched, bad ones to <topic>.dlq, exactly once."""
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


# --- audit ---------------------------------------------------------------------------------------------------------


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
        str, typer.Option("--report", help="Write this HTML file, with plots; empty: none.")
    ] = "kmq-audit.html",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Findings shown one by one; all are counted.")] = 20,
    on: On,
) -> None:
    """Is every record of the WAL in its queue, once, in order, as it was? Exit code 0: all good; 1: findings."""
    # The work is done in Python, in seconds: a JVM that optimises its own code takes more of them than it gives back.
    with running("audit", on, conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}) as job:
        from kmq.spark.audit import audit

        raise typer.Exit(audit.run(job.spark, origin.options(), report, as_json, limit, job.progress))


# --- compact -------------------------------------------------------------------------------------------------------


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
    topics: Topics,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")] = False,
    min_dirty: Annotated[
        float,
        typer.Option(
            "--min-dirty", min=0, max=1, help="Skip partitions that would lose less than this share of their bytes."
        ),
    ] = 0.5,
    tombstones: Annotated[
        str, typer.Option("--tombstones", help="Delete tombstones that are older than this and no longer in the WAL.")
    ] = "24h",
    on: On,
) -> None:
    """Of each key only its latest record stays, in topics declared with cleanup=compact; offsets do not change."""
    where = origin.options() | topics.options(".*")
    with running("compact", on) as job:
        from kmq.spark.pipelines import compact

        done = compact.run(job.spark, where, dry_run, min_dirty, seconds("--tombstones", tombstones), job.progress)
        job.progress.stop()
        if not done:
            print(
                "nothing to compact: no topic that is declared cleanup=compact has a sealed segment that the router's last"
                " checkpoint covers; it writes one within 30 s, and at kmq down"
            )
        for each in done:
            print(
                f"topic={each.topic} partition={each.partition} segments={each.segments} records={each.records}"
                f" bytes={each.bytes} dirty={each.dirty:.2f} compacted={'yes' if each.done else 'no'}"
            )


# --- metrics -------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """How records are put into windows of time."""

    window: Annotated[str, typer.Option("--window", help="Length in time: '10 seconds', '1 hour', …")] = "1 minute"
    watermark: Annotated[
        str, typer.Option("--watermark", help="How long a window stays open for records that come later than others.")
    ] = "10 seconds"
    late: Annotated[
        str, typer.Option("--late", help="A batch with records later than that: fail before it is added, or drop them.")
    ] = "fail"


class MetricsTo(NamedTuple):
    """Where windows that are over go; without one, all are shown here."""

    to: Annotated[
        str, typer.Option("--to", help="Add windows that are over to the table here, or s3://bucket/prefix.")
    ] = ""
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet"
    catalog: Catalog = ""
    into: Annotated[str, typer.Option("--into", help="Or send them as JSON to this topic.")] = ""
    producers: Annotated[
        str, typer.Option("--producers", help="host:port of the lines of the broker with --into; default: this one's.")
    ] = ""


@run_app.command(
    epilog=examples(
        "kmq pipeline run metrics --window '5 minutes'",
        "kmq pipeline run metrics --topics orders,jobs --to metrics --continuous",
        "kmq pipeline run metrics --into metrics --checkpoint metrics.at --continuous",
    )
)
@grouped
def metrics(
    *, origin: From, topics: Topics, windows: Windows, output: MetricsTo, target: Target, follow: Follow, on: On
) -> None:
    """Rates, sizes, keys and delays per topic and window of time: as a table here, or as a stream to a table or a topic."""
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
        else:
            table = metrics.as_table(metrics.summary(job.spark, where, windows.window))
            job.progress.stop()
            from kmq.terminal import console

            console().print(table)


# --- mirror --------------------------------------------------------------------------------------------------------


class MirrorTo(NamedTuple):
    """The broker that gets the copies."""

    to: Annotated[str, typer.Option("--to", help="host:port where the target takes lines.")]
    to_path: Annotated[str, typer.Option("--to-path", help="Its data directory: topics are declared there.")] = ""
    to_brokers: Annotated[str, typer.Option("--to-brokers", help="Or its gateway: topics are compared.")] = ""
    replay: Annotated[
        str,
        typer.Option("--replay", help="If the target has another record there, or none any more: stop, again, trust."),
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
    target: Target,
    origin: From,
    topics: Topics,
    follow: Follow = _EVERY_SECOND,
    on: On,
) -> None:
    """Topics of a broker into another one: each message once, where it was in its headers, the same key together."""
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


# --- redrive -------------------------------------------------------------------------------------------------------


class Letters(NamedTuple):
    """Which records are redriven, and under which key."""

    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not touched.")] = ""
    to: Annotated[str | None, typer.Option("--to", help="New routing key; may use {routing_key}, {topic}, {key}.")] = (
        None
    )
    to_sql: Annotated[str, typer.Option("--to-sql", help="Or a SQL expression over the columns of a record.")] = ""
    where: Annotated[str, typer.Option("--where", help="Only records for which this SQL condition holds.")] = ""
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Read from the WALs what drop_oldest dropped, of this queue or of all.")
    ] = False
    name: Annotated[
        str, typer.Option("--name", help="Of this redrive; another name redrives the same records again.")
    ] = ""

    def expression(self) -> str:
        """Return the new routing key as a SQL expression."""
        from kmq.deadletters import redrive as rules

        has_to = self.to is not None
        if not (self.topic or self.dropped) or (has_to and self.to_sql) or not (has_to or self.to_sql or self.dropped):
            raise ConfigError("give the topic to read, and --to or --to-sql, the new routing key; or --dropped")
        return self.to_sql or rules.to_sql("{routing_key}" if self.to is None else self.to)


class Sending(NamedTuple):
    """How the redriven records are sent."""

    rate: Annotated[float, typer.Option("--rate", min=0, help="At most so many messages a second; 0: no limit.")] = 0
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count by new key what would be sent; send nothing.")] = (
        False
    )
    producers: Annotated[
        str,
        typer.Option("--producers", help="host:port of the lines of the broker that gets them; default: this one's."),
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
def redrive(*, letters: Letters, sending: Sending, target: Target, origin: From, on: On) -> None:
    """Dead letters back under new keys, selected and renamed by SQL; the same redrive again stores nothing twice."""
    expression = letters.expression()
    source = origin.options()
    with running("redrive", on) as job:
        from kmq.spark.pipelines import redrive
        from kmq.spark.sink.targets import Destination

        which = letters.topic, expression, letters.where, letters.dropped, letters.name
        how = redrive.Sending(sending.rate, sending.dry_run)
        destination = Destination(sending.producers, target.options(origin))
        found = redrive.start(job.spark, redrive.Redrive(source, *which), how, destination, job.progress)
        job.progress.stop()
        print(redrive.text(found, letters.topic, letters.dropped, sending.dry_run))


# --- route ---------------------------------------------------------------------------------------------------------


class RouteTo(NamedTuple):
    """Where routed records go, and by which table."""

    to: Annotated[
        str, typer.Option("--to", help="Directory, here or on a shared volume; a table: or s3://bucket/prefix.")
    ]
    format: Annotated[
        str,
        typer.Option("--as", help="log: a pod's queues as its router writes them; of many: parquet, delta, iceberg."),
    ] = "log"
    table: Annotated[
        str, typer.Option("--table", help="By the routing table of this data directory, in place of each pod's own.")
    ] = ""
    batch_bytes: Annotated[str, typer.Option("--batch", help="Bytes of WAL that are sorted at a time.")] = "1g"
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
    """WALs sorted into topics and partitions: a pod's queues again, or those of many pods as one table, exactly once."""
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
