"""`kmq pipeline …`: the commands. Each pipeline is one command, in a section of its own.

A command takes its options in groups (spark_options.py, and those that pipelines declare in
kmq/spark/pipelines/options.py), opens a session with `running`, and calls the `run` of its module.

    @run_app.command(epilog=examples("kmq pipeline run audit", "kmq pipeline run audit --path data"))
    @grouped
    def audit(*, origin: From, on: On, …) -> None:
        \"\"\"One line: what it does (shown by `kmq pipeline list`).\"\"\"
        with running("audit", on) as job:
            from kmq.spark.audit import audit  # modules of Spark are imported here, never at the top

            raise typer.Exit(audit.run(job.spark, origin.options(), progress=job.progress))

Importing this module imports neither pyspark nor pyarrow: `kmq up` starts as fast as before.
"""

from typing import Annotated

import typer

from kmq.cli.output import examples, grouped, seconds
from kmq.cli.spark_options import From, On, TargetOptions, TopicOptions, Unreachable, running
from kmq.errors import ConfigError
from kmq.spark.pipelines.options import (
    LOG,
    MIN_DIRTY,
    MIRROR_EVERY,
    PARQUET,
    ArchiveLetters,
    ArchiveTable,
    Follow,
    MetricsTo,
    Payloads,
    RedriveSelection,
    RedriveSending,
    Replay,
    RouteFollow,
    RouteTo,
    Windows,
)

pipeline_app = typer.Typer(
    no_args_is_help=True,
    help="Pipelines on Spark: run one, list them, see their progress.",
    epilog=examples("kmq pipeline list", "kmq pipeline run audit", "kmq pipeline status"),
)
run_app = typer.Typer(no_args_is_help=True, help="Run a pipeline on Spark.", epilog=examples("kmq pipeline list"))
pipeline_app.add_typer(run_app, name="run")

_EVERY_SECOND: Follow = {"every": MIRROR_EVERY}
_Format = Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")]


# --- archive ---------------------------------------------------------------------------------------------------------


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
    to: Annotated[
        str, typer.Option("--to", help="Directory of the table, here or on a shared volume; or s3://bucket/prefix.")
    ],
    format: _Format = PARQUET,
    table: ArchiveTable,
    origin: From,
    topics: TopicOptions,
    unreachable: Unreachable,
    payload: Payloads,
    letters: ArchiveLetters,
    target: TargetOptions,
    follow: Follow,
    on: On,
) -> None:
    """Write topics to a Parquet, Delta or Iceberg table, exactly once. JSON is typed; bad JSON goes to <topic>.dlq."""
    where = origin.options() | topics.options() | unreachable.options()
    with running("archive", on, continuous=not follow["once"]) as job:
        from kmq.spark.pipelines import archive

        done = archive.run(
            job.spark,
            where,
            to,
            format,
            progress=job.progress,
            connection=target.options(origin) or None,
            **table,
            **payload,
            **letters,
            **follow,
        )
        job.progress.stop()
        added = f"{done.rows:,} rows in {done.batches} batches to {to} ({format})"
        print(f"archived {added}; bad: {done.bad:,}, {payload['bad']}")


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
    ] = MIN_DIRTY,
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
    unreachable: Unreachable,
    windows: Windows,
    to: Annotated[
        str, typer.Option("--to", help="Add closed windows to the table in this directory, or s3://bucket/prefix.")
    ] = "",
    format: _Format = PARQUET,
    output: MetricsTo,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each window as one JSON object, in place of the table.")
    ] = False,
    target: TargetOptions,
    follow: Follow,
    on: On,
) -> None:
    """Compute rates, sizes, keys and delays per topic and time window. Print them, or add them to a table or topic."""
    where = origin.options() | topics.options(".*") | unreachable.options()
    with running("metrics", on, continuous=not follow["once"]) as job:
        from kmq.spark.pipelines import metrics

        if to or output["topic"]:
            connection = target.options(origin)
            rows = metrics.run(job.spark, where, to, format, connection=connection, **windows, **output, **follow)
            job.progress.stop()
            if to:
                print(f"added {rows:,} rows to {to} ({format})")
        elif as_json:
            from kmq.spark.sql import shell, spark_engine

            shell.as_json(spark_engine.result(metrics.summary(job.spark, where, windows["window"]), job.progress))
        else:
            table = metrics.as_table(metrics.summary(job.spark, where, windows["window"]))
            job.progress.stop()
            from kmq.config.terminal import console

            console().print(table)


# --- mirror ----------------------------------------------------------------------------------------------------------


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
    to: Annotated[str, typer.Option("--to", help="host:port of the ingress of the target.")],
    to_path: Annotated[str, typer.Option("--to-path", help="Data directory of the target, to declare topics.")] = "",
    to_brokers: Annotated[str, typer.Option("--to-brokers", help="Or gateway of the target, to compare topics.")] = "",
    replay: Replay,
    target: TargetOptions,
    origin: From,
    topics: TopicOptions,
    unreachable: Unreachable,
    follow: Follow = _EVERY_SECOND,
    on: On,
) -> None:
    """Copy topics to another broker: each message once, its origin in headers, messages of a key together."""
    where = origin.options() | topics.options() | unreachable.options()
    connection = target.options()
    if to_path and to_brokers:
        raise ConfigError("give --to-path or --to-brokers, not both")
    with running("mirror", on, continuous=not follow["once"]) as job:
        from kmq.spark.connections import Access
        from kmq.spark.pipelines import mirror
        from kmq.spark.source.brokers import open_broker, recognised

        access = Access.of({name: text for name, text in connection.items() if name != "kmq.timeout"})
        if len(recognised(to_brokers.split(","), access)) > 1:
            raise ConfigError(f"--to-brokers {to_brokers}: must be one broker, or the addresses of one shard")
        logs = open_broker(to_path or to_brokers, bool(to_path), access) if to_path or to_brokers else None
        done = mirror.run(job.spark, where, to, logs, progress=job.progress, connection=connection, **replay, **follow)
        job.progress.stop()
        print(f"mirrored {done.rows:,} messages in {done.batches} batches to {to}; copies left out: {done.skipped:,}")


# --- redrive ---------------------------------------------------------------------------------------------------------


@run_app.command(
    epilog=examples(
        "kmq pipeline run redrive dead --to 'test.{key}' --dry-run",
        "kmq pipeline run redrive dead --to-sql \"concat('test.', key)\" \\",
        "    --where \"headers['reason'] is null and value_text like 'lost%'\"",
        "kmq pipeline run redrive --dropped --rate 1000",
    )
)
@grouped
def redrive(
    *,
    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not changed.")] = "",
    to: Annotated[str | None, typer.Option("--to", help="New key, of {routing_key}, {topic}, {key}, {origin}.")] = None,
    to_sql: Annotated[str, typer.Option("--to-sql", help="New routing key as a SQL expression over columns.")] = "",
    where: Annotated[str, typer.Option("--where", help="Only records for which this SQL condition holds.")] = "",
    letters: RedriveSelection,
    sending: RedriveSending,
    target: TargetOptions,
    origin: From,
    on: On,
) -> None:
    """Send dead letters again under new keys, selected and renamed by SQL. A repeated redrive stores nothing twice."""
    has_to, dropped = to is not None, letters["dropped"]
    if not (topic or dropped) or (has_to and to_sql) or not (has_to or to_sql or dropped):
        raise ConfigError("give the topic to read, and --to or --to-sql, the new routing key; or --dropped")
    from kmq.deadletters import redrive as rules

    expression = to_sql or rules.to_sql("{routing_key}" if to is None else to)
    source = origin.options()
    with running("redrive", on) as job:
        from kmq.spark.pipelines import redrive

        connection, progress = target.options(origin), job.progress
        found = redrive.run(
            job.spark, source, topic, expression, where, progress=progress, connection=connection, **letters, **sending
        )
        job.progress.stop()
        print(redrive.text(found, topic, dropped, sending["dry_run"]))


# --- route -----------------------------------------------------------------------------------------------------------


@run_app.command(
    epilog=examples(
        "kmq pipeline run route --to rebuilt",
        "kmq pipeline run route --to all --as parquet",
        "kmq pipeline run route --path 'pods/*/data' --to lake --as delta --continuous",
    )
)
@grouped
def route(
    *,
    to: Annotated[
        str, typer.Option("--to", help="Directory, here or on a shared volume; for a table also s3://bucket/prefix.")
    ],
    format: Annotated[
        str,
        typer.Option("--as", help="log: one pod's queues as its router writes them; a table: parquet, delta, iceberg."),
    ] = LOG,
    output: RouteTo,
    origin: From,
    follow: RouteFollow,
    on: On,
) -> None:
    """Sort WALs into topics and partitions, exactly once: rebuild a pod's queues, or make one table of many pods."""
    where = origin.options()
    with running("route", on, continuous=not follow["once"]) as job:
        from kmq.spark.pipelines import route

        records = route.run(job.spark, where, to, format, progress=job.progress, **output, **follow)
        job.progress.stop()
        print(f"routed {records:,} records to {to} ({format})")
