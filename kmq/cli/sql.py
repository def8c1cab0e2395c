"""`kmq sql`: query topics from the command line."""

import sys
from typing import Annotated

import typer

from kmq.cli.options import grouped
from kmq.cli.pipeline_options import From, On
from kmq.cli.pipeline_session import running


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
    on: On,
) -> None:
    """Query topics by SQL: each topic is a table, as it is now. Also `append` (the WAL) and `all_topics`.

    Columns: broker, topic, partition, offset, seq, recv_ts, key, routing_key,
    producer_ts, id, headers, value, value_text.

    `__consumer_offsets` has the consumer groups: group, topic, partition,
    committed, end, lag, member, generation, metadata, time, broker.
    """
    where = origin.options()
    with running("sql", on) as job:
        from kmq.spark.sql import results, shell

        job.progress.stop()  # each query shows progress of its own
        show = results.as_csv if as_csv else results.as_json if as_json else results.as_table(rows)
        topics = shell.Shell(job.spark, where, show)
        if not query and sys.stdin.isatty():
            raise typer.Exit(shell.prompt(topics))
        for statement in shell.statements(query or sys.stdin.read()):
            topics.run(statement)
