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

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kmq.cli.output import examples, grouped
from kmq.cli.spark_options import From, Loss, On, TargetOptions, TopicOptions, Unreachable, running
from kmq.errors import ConfigError, KmqError
from kmq.spark.pipelines.options import (
    LOG,
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


class _Pipelines(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "compact":  # a pipeline of earlier releases
            raise ConfigError("compact: no longer a pipeline; the broker compacts topics with cleanup=compact itself")
        return super().resolve_command(ctx, args)


run_app = typer.Typer(
    cls=_Pipelines, no_args_is_help=True, help="Run a pipeline on Spark.", epilog=examples("kmq pipeline list")
)
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
    loss: Loss,
    payload: Payloads,
    letters: ArchiveLetters,
    target: TargetOptions,
    follow: Follow,
    on: On,
) -> None:
    """Write topics to a Parquet, Delta or Iceberg table, exactly once. JSON is typed; bad JSON goes to <topic>.dlq."""
    where = origin.options() | topics.options() | unreachable.options() | loss.options()
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
    loss: Loss,
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
    where = origin.options() | topics.options(".*") | unreachable.options() | loss.options()
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
    loss: Loss,
    follow: Follow = _EVERY_SECOND,
    on: On,
) -> None:
    """Copy topics to another broker: each message once, its origin in headers, messages of a key together."""
    where = origin.options() | topics.options() | unreachable.options() | loss.options()
    connection = target.options()
    if to_path and to_brokers:
        raise ConfigError("give --to-path or --to-brokers, not both")
    with running("mirror", on, continuous=not follow["once"]) as job:
        from kmq.spark.connections import Access
        from kmq.spark.paths import directory_here
        from kmq.spark.pipelines import mirror
        from kmq.spark.source.brokers import open_broker, recognised

        access = Access.of({name: text for name, text in connection.items() if name != "kmq.timeout"})
        if len(recognised(to_brokers.split(","), access)) > 1:
            raise ConfigError(f"--to-brokers {to_brokers}: must be one broker, or the addresses of one shard")
        logs = (
            open_broker(directory_here(to_path, "--to-path") or to_brokers, bool(to_path), access)
            if to_path or to_brokers
            else None
        )
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
    loss: Loss,
    on: On,
) -> None:
    """Send dead letters again under new keys, selected and renamed by SQL. A repeated redrive stores nothing twice."""
    has_to, dropped = to is not None, letters["dropped"]
    if not (topic or dropped) or (has_to and to_sql) or not (has_to or to_sql or dropped):
        raise ConfigError("give the topic to read, and --to or --to-sql, the new routing key; or --dropped")
    from kmq.deadletters import redrive as rules

    expression = to_sql or rules.to_sql("{routing_key}" if to is None else to)
    source = origin.options() | loss.options()
    with running("redrive", on) as job:
        from kmq.spark.pipelines import redrive

        connection, progress = target.options(origin), job.progress
        found = redrive.run(
            job.spark, source, topic, expression, where, progress=progress, connection=connection, **letters, **sending
        )
        job.progress.stop()
        print(redrive.text(found, topic, dropped, sending["dry_run"]))
        if found.refused:
            raise KmqError(
                f"{found.refused} records were refused and stay where they are; too_long: raise KMQ_MAX_LINE"
            )


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
    loss: Loss,
    follow: RouteFollow,
    on: On,
) -> None:
    """Sort WALs into topics and partitions, exactly once: rebuild a pod's queues, or make one table of many pods."""
    where = origin.options() | loss.options()
    with running("route", on, continuous=not follow["once"]) as job:
        from kmq.spark.pipelines import route

        records = route.run(job.spark, where, to, format, progress=job.progress, **output, **follow)
        job.progress.stop()
        print(f"routed {records:,} records to {to} ({format})")
