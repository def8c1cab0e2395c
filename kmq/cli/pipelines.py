"""`kmq sql` and `kmq pipeline …`: what a person types. Each pipeline is one command, in a section of its own.

A command takes options that several have as one of the classes below, opens a session with `running`, calls its module's `run`:

    @run_app.command(epilog=examples("kmq pipeline run audit", "kmq pipeline run audit --path data"))
    @grouped
    def audit(*, origin: From, on: On, …) -> None:
        \"\"\"One line: what it does (shown by `kmq pipeline list`).\"\"\"
        with running("audit", on) as job:
            from kmq.spark.pipelines import audit  # modules of Spark are imported here, never at the top

            raise typer.Exit(audit.run(job.spark, origin.options(), progress=job.progress))

Importing this module imports neither pyspark nor pyarrow: `kmq up` starts as fast as before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kmq.cli.helptext import examples
from kmq.cli.options import grouped
from kmq.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq.spark.streaming.progress import Progress

pipeline_app = typer.Typer(
    no_args_is_help=True,
    help="Pipelines on Spark: run one, list them, see how far they are.",
    epilog=examples("kmq pipeline list", "kmq pipeline run audit", "kmq pipeline status"),
)
run_app = typer.Typer(no_args_is_help=True, help="Run a pipeline on Spark.", epilog=examples("kmq pipeline list"))
pipeline_app.add_typer(run_app, name="run")


# --- options that several have -------------------------------------------------------------------------------------

Once = Annotated[bool, typer.Option("--once/--continuous", help="All there is now, then end; or on and on.")]
Every = Annotated[str, typer.Option("--every", help="Between two batches of --continuous.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="Directory of how far it is; a restart goes on there.")]
Catalog = Annotated[
    str,
    typer.Option(
        "--catalog", help="Iceberg: name[.namespace.table] in pyiceberg's configuration; default: SQLite there."
    ),
]


class From(NamedTuple):
    """Where to read: directories, or brokers over HTTP."""

    path: Annotated[str, typer.Option("--path", help="Data directories, comma-separated; default: KMQ_DATA.")] = ""
    brokers: Annotated[str, typer.Option("--brokers", help="Read over HTTP instead: host:port[,host:port].")] = ""
    token_file: Annotated[str, typer.Option("--token-file", help="File with the bearer token that these ask for.")] = ""
    ca: Annotated[str, typer.Option("--ca", help="PEM file of the authorities to trust, for https:// and TLS.")] = ""
    cert: Annotated[str, typer.Option("--cert", help="PEM file of the client certificate to show.")] = ""
    key: Annotated[str, typer.Option("--key", help="PEM file of its key, where the other file has none.")] = ""
    patience: Annotated[
        str, typer.Option("--patience", help="How long a gateway may be away. \\[default: 30s]", show_default=False)
    ] = ""

    def options(self) -> dict[str, str]:
        """Of format("kmq")."""
        from kmq.settings import load

        if self.path and self.brokers:
            raise ConfigError("give --path or --brokers, not both")
        if self.brokers:
            patience = {"kmq.patience": self.patience} if self.patience else {}
            return {"kmq.bootstrap.servers": self.brokers} | self.connection() | patience
        if self.patience:
            raise ConfigError("--patience: is how long a gateway may be away; give --brokers, or leave it out")
        return {"path": self.path or load().data}

    def connection(self) -> dict[str, str]:
        """Options of token and TLS."""
        return _connection(self.token_file, self.ca, self.cert, self.key)


class Target(NamedTuple):
    """How the broker that gets what a pipeline writes is connected to."""

    to_token_file: Annotated[
        str, typer.Option("--to-token-file", help="File with the bearer token of the broker that is written to.")
    ] = ""
    to_ca: Annotated[str, typer.Option("--to-ca", help="PEM file of the authorities to trust, for its tls://.")] = ""
    to_cert: Annotated[str, typer.Option("--to-cert", help="PEM file of the client certificate to show to it.")] = ""
    to_key: Annotated[str, typer.Option("--to-key", help="PEM file of its key, where the other file has none.")] = ""
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", help="How long it is waited for when it does not answer. \\[default: 10m]", show_default=False
        ),
    ] = ""

    def options(self, like: From | None = None) -> dict[str, str]:
        """Of format("kmq") for writing. `like`: where nothing else is said, the same token and certificates."""
        own = _connection(self.to_token_file, self.to_ca, self.to_cert, self.to_key)
        timeout = {"kmq.timeout": self.timeout} if self.timeout else {}
        return (own or (like.connection() if like else {})) | timeout


class Topics(NamedTuple):
    """Which topics."""

    topics: Annotated[str, typer.Option("--topics", help="Topics, comma-separated; or --pattern.")] = ""
    pattern: Annotated[str, typer.Option("--pattern", help="A regular expression that whole topic names match.")] = ""

    def options(self, default: str = "") -> dict[str, str]:
        """Of format("kmq"). `default`: a pattern for when neither is given."""
        if bool(self.topics) + bool(self.pattern) > 1 or not (self.topics or self.pattern or default):
            raise ConfigError("give --topics or --pattern")
        return {"subscribe": self.topics} if self.topics else {"subscribePattern": self.pattern or default}


class On(NamedTuple):
    """The session a command runs on."""

    master: Annotated[str, typer.Option("--master", help="Spark master; default: all cores of this machine.")] = ""
    conf: Annotated[list[str] | None, typer.Option("--conf", help="name=value for Spark; may be given again.")] = None
    py_files: Annotated[str, typer.Option("--py-files", help="Python files for executors that lack them.")] = ""
    verbose: Annotated[bool, typer.Option("--verbose", help="Spark's own log and whole traces.")] = False

    def confs(self) -> dict[str, str]:
        """For Spark."""
        confs = dict(_pair(text) for text in self.conf or ())
        return confs | ({"spark.submit.pyFiles": self.py_files} if self.py_files else {})


_HERE = On()


def _token(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path!r}: {error.strerror}") from None


def _connection(token_file: str, ca: str, cert: str, key: str) -> dict[str, str]:
    from kmq.spark.connections import CA, CERTIFICATE, KEY

    given = {"kmq.token": _token(token_file) if token_file else "", CA: ca, CERTIFICATE: cert, KEY: key}
    return {name: text for name, text in given.items() if text}


class Job(NamedTuple):
    """What a command gets to work with."""

    spark: "SparkSession"
    progress: "Progress"


@contextmanager
def running(name: str, on: On = _HERE, continuous: bool = False, conf: dict[str, str] | None = None) -> Iterator[Job]:
    """A session with progress for one command, stopped at its end; errors of Spark become one line and an exit code.

    Ctrl-C and SIGTERM stop the streams and the session in order, what is half done is done again at the next start. For a
    continuous run that is the way to end it (exit code 0), another has not done its work (128 + signal). Again: at once. After
    a minute the process ends anyway (kmq/spark/streaming/stopping.py).
    `conf`: what suits this command, where the user says nothing else.
    """
    from kmq.spark import failures, sessions
    from kmq.spark.streaming.progress import Progress
    from kmq.spark.streaming.stopping import Stop

    confs = (conf or {}) | on.confs()
    spark = None
    stop = Stop()
    try:
        spark = sessions.session(on.master or None, f"kmq {name}", confs, "warn" if on.verbose else "fatal")
        stop.begin(spark)
        with Progress(spark, name) as progress:
            yield Job(spark, progress)
    except Exception as error:
        cause = None if on.verbose else failures.explain(error)
        if stop.number:
            pass  # what was cancelled says so
        elif cause is None:
            raise
        else:
            raise cause from error
    finally:
        stop.done()
        if spark:
            spark.stop()
    if stop.number:
        raise typer.Exit(EXIT_OK if continuous else 128 + stop.number)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ConfigError(f"--conf {text!r}: must be name=value")
    return name, value


def seconds(option: str, text: str) -> float:
    """The duration that was given with an option."""
    from kmq.settings import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None


@pipeline_app.command("list", epilog=examples("kmq pipeline list"))
def list_pipelines() -> None:
    """List the pipelines."""
    for command in run_app.registered_commands:
        function = command.callback
        assert function is not None
        name = command.name or function.__name__.replace("_", "-")
        print(f"{name:10} {(function.__doc__ or '').strip().splitlines()[0]}", file=sys.stdout)


# --- sql -----------------------------------------------------------------------------------------------------------


@grouped
def sql(
    *,
    query: Annotated[str, typer.Argument(help="One statement; without: stdin, or a prompt on a terminal.")] = "",
    origin: From,
    as_csv: Annotated[bool, typer.Option("--csv", help="All rows, values in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same, a JSON object a line.")] = False,
    rows: Annotated[int, typer.Option("--rows", help="At most so many in a table; 0: all.")] = 1000,
    on: On,
) -> None:
    """Ask topics in SQL: each is a table under its name, as it is now. Also `append` (the WAL) and `all_topics`.

    Columns: broker, topic, partition, offset, seq, recv_ts, key, routing_key,
    producer_ts, id, headers, value, value_text.
    """
    where = origin.options()
    with running("sql", on) as job:
        from kmq.spark import sql

        job.progress.stop()  # each query has one of its own
        show = sql.as_csv if as_csv else sql.as_json if as_json else sql.as_table(rows)
        shell = sql.Shell(job.spark, where, show)
        if not query and sys.stdin.isatty():
            raise typer.Exit(sql.prompt(shell))
        for statement in sql.statements(query or sys.stdin.read()):
            shell.run(statement)


# --- archive -------------------------------------------------------------------------------------------------------


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
    origin: From,
    topics: Topics,
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet",
    schema: Annotated[
        str,
        typer.Option(
            "--schema", help="Of JSON payloads: DDL, a file of it, infer (once, from a sample), or none: text."
        ),
    ] = "infer",
    enrich: Annotated[
        str, typer.Option("--enrich", help="module:function of yours, from a DataFrame to a DataFrame.")
    ] = "",
    bad: Annotated[
        str, typer.Option("--bad", help="Payloads not of the schema: dlq (<topic>.dlq), keep (with reason) or drop.")
    ] = "dlq",
    producers: Annotated[
        str,
        typer.Option("--producers", help="For dlq: host:port of each broker's lines, in order; default: this one's."),
    ] = "",
    target: Target,
    partition_by: Annotated[
        str, typer.Option("--partition-by", help="Columns, comma-separated, that name the directories.")
    ] = "topic,date,hour",
    rest: Annotated[
        bool | None,
        typer.Option("--rest/--no-rest", help="Column of fields the schema lacks. \\[default: where it is inferred]"),
    ] = None,
    once: Once = True,
    every: Every = "10 seconds",
    checkpoint: Checkpoint = "",
    catalog: Catalog = "",
    on: On,
) -> None:
    """Topics to a Parquet, Delta or Iceberg table: JSON typed, enriched, bad ones to <topic>.dlq, exactly once."""
    where = origin.options() | topics.options()
    with running("archive", on, continuous=not once) as job:
        from kmq.spark.pipelines import archive

        columns = [name.strip() for name in partition_by.split(",") if name.strip()]
        done = archive.run(
            *(job.spark, where, to, format, schema, enrich, bad, producers, once, checkpoint, columns, rest, every),
            progress=job.progress,
            catalog=catalog,
        )
        job.progress.stop()
        print(f"archived {done.rows:,} rows in {done.batches} batches to {to} ({format}); bad: {done.bad:,}, {bad}")


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; change nothing.")] = False,
    min_dirty: Annotated[
        float,
        typer.Option("--min-dirty", min=0, max=1, help="Leave partitions of whose bytes less than this would go."),
    ] = 0.5,
    tombstones: Annotated[
        str, typer.Option("--tombstones", help="Tombstones go when they are older than this and the WAL has gone past.")
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


@run_app.command(
    epilog=examples(
        "kmq pipeline run metrics --window '5 minutes'",
        "kmq pipeline run metrics --topics orders,jobs --to metrics --continuous",
        "kmq pipeline run metrics --into metrics --checkpoint metrics.at --continuous",
    )
)
@grouped
def metrics(
    *,
    origin: From,
    topics: Topics,
    window: Annotated[str, typer.Option("--window", help="Of time: '10 seconds', '1 hour', …")] = "1 minute",
    to: Annotated[
        str, typer.Option("--to", help="Add windows that are over to the table here, or s3://bucket/prefix.")
    ] = "",
    format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet",
    into: Annotated[str, typer.Option("--into", help="Or send them, as JSON, to this topic.")] = "",
    producers: Annotated[
        str, typer.Option("--producers", help="host:port of the lines of the broker with --into; default: this one's.")
    ] = "",
    target: Target,
    watermark: Annotated[
        str, typer.Option("--watermark", help="How long a window stays open for records that come later than others.")
    ] = "10 seconds",
    late: Annotated[
        str, typer.Option("--late", help="Of a batch with records behind that: fail, before it is added, or drop them.")
    ] = "fail",
    once: Once = True,
    every: Every = "10 seconds",
    checkpoint: Checkpoint = "",
    catalog: Catalog = "",
    on: On,
) -> None:
    """Rates, sizes, keys and delays per topic and window of time: as a table here, or as a stream to a table or a topic."""
    where = origin.options() | topics.options(".*")
    with running("metrics", on, continuous=not once) as job:
        from kmq.spark.pipelines import metrics

        if to or into:
            connection = target.options(origin)
            rows = metrics.run(
                *(job.spark, where, to, format, into, producers, window, once, checkpoint, every, connection),
                watermark=watermark,
                on_late=late,
                catalog=catalog,
            )
            job.progress.stop()
            if to:
                print(f"added {rows:,} rows to {to} ({format})")
        else:
            table = metrics.as_table(metrics.summary(job.spark, where, window))
            job.progress.stop()
            from kmq.terminal import console

            console().print(table)


# --- mirror --------------------------------------------------------------------------------------------------------


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
    to: Annotated[str, typer.Option("--to", help="host:port where the target takes lines.")],
    to_path: Annotated[str, typer.Option("--to-path", help="Its data directory: topics are declared there.")] = "",
    to_brokers: Annotated[str, typer.Option("--to-brokers", help="Or its gateway: topics are compared.")] = "",
    target: Target,
    replay: Annotated[
        str,
        typer.Option(
            "--replay", help="What a copy does that the target has otherwise, or has no more: stop, again, trust."
        ),
    ] = "stop",
    origin: From,
    topics: Topics,
    once: Once = True,
    every: Every = "1 second",
    checkpoint: Checkpoint = "",
    on: On,
) -> None:
    """Topics of a broker into another one: each message once, where it was in its headers, the same key together."""
    where = origin.options() | topics.options()
    connection = target.options()
    if to_path and to_brokers:
        raise ConfigError("give --to-path or --to-brokers, not both")
    with running("mirror", on, continuous=not once) as job:
        from kmq.spark.connections import Access
        from kmq.spark.pipelines import mirror
        from kmq.spark.source.brokers import open_broker

        asked = {name: text for name, text in connection.items() if name != "kmq.timeout"}
        there = open_broker(to_path or to_brokers, bool(to_path), Access.of(asked)) if to_path or to_brokers else None
        done = mirror.run(job.spark, where, to, there, connection, once, checkpoint, every, job.progress, replay)
        job.progress.stop()
        print(f"mirrored {done.rows:,} messages in {done.batches} batches to {to}; copies left out: {done.skipped:,}")


# --- redrive -------------------------------------------------------------------------------------------------------


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
    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not touched.")] = "",
    to: Annotated[
        str | None, typer.Option("--to", help="New routing key; may use {routing_key}, {topic}, {key}.")
    ] = None,
    to_sql: Annotated[str, typer.Option("--to-sql", help="Or a SQL expression over the columns of a record.")] = "",
    where: Annotated[str, typer.Option("--where", help="Only records for which this SQL condition holds.")] = "",
    dropped: Annotated[
        bool, typer.Option("--dropped", help="From the WALs what drop_oldest took from the queue, or from all.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Under another name what was redriven before is again.")] = "",
    rate: Annotated[float, typer.Option("--rate", min=0, help="At most so many messages a second; 0: no limit.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count by new key what would be sent; send nothing.")
    ] = False,
    producers: Annotated[
        str,
        typer.Option("--producers", help="host:port of the lines of the broker that gets them; default: this one's."),
    ] = "",
    target: Target,
    origin: From,
    on: On,
) -> None:
    """Dead letters back under new keys, selected and renamed by SQL; the same redrive again stores nothing twice."""
    from kmq.deadletters import redrive as rules

    if not (topic or dropped) or (to is not None and to_sql) or (to is None and not to_sql and not dropped):
        raise ConfigError("give the topic to read, and --to or --to-sql, the new routing key; or --dropped")
    expression = to_sql or rules.to_sql("{routing_key}" if to is None else to)
    source = origin.options()
    with running("redrive", on) as job:
        from kmq.spark.pipelines import redrive

        found = redrive.run(
            *(job.spark, source, topic, expression, where, dropped, name, rate, dry_run, producers, job.progress),
            connection=target.options(origin),
        )
        job.progress.stop()
        print(redrive.text(found, topic, dropped, dry_run))


# --- route ---------------------------------------------------------------------------------------------------------


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
        str, typer.Option("--to", help="Directory, here or on a shared volume; a table: or s3://bucket/prefix.")
    ],
    origin: From,
    format: Annotated[
        str,
        typer.Option("--as", help="log: a pod's queues as its router writes them; of many: parquet, delta, iceberg."),
    ] = "log",
    table: Annotated[
        str, typer.Option("--table", help="By the routing table of this data directory, in place of each pod's own.")
    ] = "",
    once: Once = True,
    batch_bytes: Annotated[str, typer.Option("--batch", help="Bytes of WAL that are sorted at a time.")] = "1g",
    checkpoint: Checkpoint = "",
    catalog: Catalog = "",
    on: On,
) -> None:
    """WALs sorted into topics and partitions: a pod's queues again, or those of many pods as one table, exactly once."""
    where = origin.options()
    with running("route", on, continuous=not once) as job:
        from kmq.spark.pipelines import route

        records = route.run(
            *(job.spark, where, to, format, table, once, checkpoint, batch_bytes, job.progress), catalog=catalog
        )
        job.progress.stop()
        print(f"routed {records:,} records to {to} ({format})")
