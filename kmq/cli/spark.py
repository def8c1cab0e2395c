"""`kmq sql`, `kmq audit`, and `kmq pipeline list|status|reset`. pipelines.py has `kmq pipeline run …`.

`list`, `status` and `reset` need neither Java nor pyspark.
"""

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from kmq.cli import pipelines
from kmq.cli.output import examples, grouped, seconds
from kmq.cli.pipelines import pipeline_app, run_app
from kmq.cli.spark_options import From, On, running
from kmq.errors import BusyError, ConfigError, KmqError, pip_install

if TYPE_CHECKING:
    from kmq.spark.sql.shell import Shell
    from kmq.spark.streaming.status import Sources


@grouped
def sql(
    *,
    query: Annotated[
        str, typer.Argument(help="One statement; default: read stdin, or show a prompt on a terminal.")
    ] = "",
    origin: From,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV, values in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON objects, one per line.")] = False,
    rows: Annotated[int, typer.Option("--rows", help="Maximum rows in a table; 0: all.")] = 1000,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="spark, or duckdb: here, without Java. \\[default: spark where it is installed]",
            show_default=False,
        ),
    ] = "",
    archive: Annotated[
        str,
        typer.Option(
            "--archive", help="Table of kmq pipeline run archive: topics have its columns, and its history (Spark)."
        ),
    ] = "",
    on: On,
) -> None:
    """Query topics by SQL: each topic is a table, as it is now. Also `append` (the WAL) and `all_topics`.

    Columns: broker, topic, partition, offset, seq, recv_ts, key, routing_key,
    producer_ts, id, headers, value, value_text.

    `__consumer_offsets` has the consumer groups: group, topic, partition,
    committed, end, lag, member, generation, metadata, time, broker.
    """
    where = origin.options()
    from kmq.spark.sql import shell

    show = shell.as_csv if as_csv else shell.as_json if as_json else shell.as_table(rows)
    if _engine(engine, on) == "duckdb":
        if archive:
            raise ConfigError(
                f"--archive {archive!r}: is for Spark: give --engine spark ({pip_install('spark')}). Without Spark leave"
                " it out, which asks the log alone; if the table is one of Parquet, ask its files by DuckDB itself:"
                f" from read_parquet('{archive}/*=*/**/*.parquet')"
            )
        from kmq.spark.sql import duckdb_engine

        with duckdb_engine.opened(where, on.confs()) as opened:
            _run(shell.Shell(opened, where, show), query)
        return
    with running("sql", on) as job:
        from kmq.spark import lake
        from kmq.spark.sql import spark_engine

        job.progress.stop()  # each query shows progress of its own
        history = lake.history(job.spark, archive) if archive else spark_engine.no_history
        _run(shell.Shell(spark_engine.engine(job.spark, where, history), where, show), query)


def _engine(name: str, on: On) -> str:
    """Return the engine to use. Raises ConfigError if it is not installed, or if options are not for it."""
    has_duckdb = all(map(find_spec, ("duckdb", "pyarrow", "numpy")))
    if name not in ("", "spark", "duckdb"):
        raise ConfigError(f"--engine {name!r}: must be spark or duckdb")
    if not name and not find_spec("pyspark"):
        if not has_duckdb:
            least = pip_install("duckdb")
            raise ConfigError(f"this needs Spark or DuckDB: {pip_install('spark')}, or for this machine {least}")
        name = "duckdb"
    if name == "duckdb":
        if not has_duckdb:
            raise ConfigError(f"--engine duckdb: this needs DuckDB: {pip_install('duckdb')}")
        for option, value in (("--master", on.master), ("--py-files", on.py_files)):
            if value:
                raise ConfigError(f"{option} {value!r}: is for Spark; leave it out, or give --engine spark")
    return name or "spark"


def _run(topics: "Shell", query: str) -> None:
    """Run the statements of the command line or of stdin, or show a prompt."""
    from kmq.spark.sql import shell

    if not query and sys.stdin.isatty():
        raise typer.Exit(shell.prompt(topics))
    for statement in shell.statements(query or sys.stdin.read()):
        topics.run(statement)


# --- pipelines -------------------------------------------------------------------------------------------------------


@pipeline_app.command("list", epilog=examples("kmq pipeline list", "kmq pipeline list --json"))
def list_pipelines(
    as_json: Annotated[bool, typer.Option("--json", help='{"pipelines": [{"name", "help"}, …]}')] = False,
) -> None:
    """List the pipelines."""
    rows = []
    for command in run_app.registered_commands:
        function = command.callback
        assert function is not None
        name = command.name or function.__name__.replace("_", "-")
        rows.append({"name": name, "help": (function.__doc__ or "").strip().splitlines()[0]})
    if as_json:
        print(json.dumps({"pipelines": rows}))
    else:
        for row in rows:
            print(f"{row['name']:10} {row['help']}")


# --- checkpoints -----------------------------------------------------------------------------------------------------
# The progress of streaming queries, and where they resume.


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sources(origin: From, ask: bool = True) -> "Sources":
    """Return the brokers to ask for the ends of logs: --path and --brokers, or else those that each checkpoint
    names.
    """
    from kmq.spark.connections import Access
    from kmq.spark.streaming.status import PATIENCE, Sources

    given = {"kmq.patience": origin.patience or PATIENCE, "kmq.timeout": PATIENCE} | origin.connection()
    return Sources(_list(origin.path), _list(origin.brokers), Access.of(given), ask)


@pipeline_app.command(
    epilog=examples(
        "kmq pipeline status",
        "kmq pipeline status archive --partitions",
        "kmq pipeline status archive kmq-mirror-127.0.0.1-5673 --json",
    )
)
@grouped
def status(
    *,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(help="Checkpoints, tables, or directories of them. \\[default: this directory]"),
    ] = None,
    origin: From,
    partitions: Annotated[
        bool, typer.Option("--partitions", help="Also show offset and lag of each partition.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per query, each on a line.")] = False,
    alive: Annotated[
        str,
        typer.Option("--alive", help="For probes: exit code 1 unless each query runs and reported within this time."),
    ] = "",
    offline: Annotated[bool, typer.Option("--offline", help="Read only the files, ask no broker: no lags.")] = False,
) -> None:
    """Show the lag of each streaming query, its last commit, and if it runs; from its checkpoint and the brokers.

    Without --path and --brokers, the brokers that each checkpoint names are asked.
    """
    from kmq.config.terminal import console
    from kmq.spark.streaming import checkpoint
    from kmq.spark.streaming import status as report

    limit = seconds("--alive", alive) if alive else 0.0
    sources = _sources(origin, not offline)
    queries = [report.of(found, sources) for found in checkpoint.find(checkpoints or ["."])]
    if as_json:
        for query in queries:
            print(json.dumps(query))
    else:
        console().print(report.as_table(queries))
        for query in queries:
            if partitions:
                console().print("", report.as_offsets(query), sep="\n")
            for note in report.notes(query):
                print(note, file=sys.stderr)
    dead = [why for query in queries if (why := report.not_alive(query, limit))] if alive else []
    if dead:
        raise KmqError("; ".join(dead))


@pipeline_app.command(
    epilog=examples(
        "kmq pipeline reset archive --to earliest --dry-run",
        "kmq pipeline reset archive --to 2026-11-22T10:00 --dry-run",
        """kmq pipeline reset archive --to '{"orders": {"0": 0}}' --dry-run""",
        "kmq pipeline reset archive --forget kmq-2.kmq:8082 --dry-run",
    )
)
@grouped
def reset(
    *,
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint, or the table that contains it.")],
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, offsets as JSON, or a time: ISO 8601, or ms since 1970.")
    ] = "",
    forget: Annotated[
        str, typer.Option("--forget", help="Or take this broker out, as the checkpoint names it: host:port, or a path.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read again or skipped; change nothing.")
    ] = False,
    origin: From,
) -> None:
    """Make a stopped query resume at other offsets, or without one of its brokers.

    Rows that the query has written stay. So its output may then hold a record twice, or lack it.
    """
    from kmq.spark.streaming import checkpoint as checkpoints
    from kmq.spark.streaming import reset as work

    if bool(to) == bool(forget):
        raise ConfigError("give --to or --forget, one of them")
    found = checkpoints.find([checkpoint])
    if len(found) != 1:
        raise ConfigError(
            f"{checkpoint}: holds {len(found)} checkpoints; name one: {', '.join(one.path for one in found)}"
        )
    if not dry_run and (holder := found[0].holder()):
        raise BusyError(f"{found[0].path}: its query is running ({holder}); stop it first")
    sources = _sources(origin)
    plan = work.plan(found[0], to, sources, forget)
    for line in work.text(plan):
        print(line)
    if dry_run:
        print("nothing was changed (--dry-run)")
    else:
        print(f"done; the offsets before and after: {work.apply(plan)}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(
        epilog=examples(
            'kmq sql "select topic, count(*) from all_topics group by topic"',
            'kmq sql "select max(recv_ts), max(length(value)) from append"',
            """kmq sql "select get_json_object(value_text, '$.user') from test" """.strip(),
            "kmq sql --engine duckdb \"select value_text->>'$.user' from test\"",
            "kmq sql",
        )
    )(sql)
    app.command("audit", epilog=examples("kmq audit", "kmq audit --path data --report audit.html"))(pipelines.audit)
    app.add_typer(pipelines.pipeline_app, name="pipeline")
