"""`kmq pipeline status` and `kmq pipeline reset`: the progress of streaming queries, and where they resume.

Neither needs Java or pyspark.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kmq.cli.helptext import examples
from kmq.cli.options import grouped
from kmq.cli.pipeline_options import From, seconds
from kmq.cli.pipelines import pipeline_app
from kmq.errors import BusyError, ConfigError, KmqError

if TYPE_CHECKING:
    from kmq.spark.streaming.status import Sources


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sources(origin: From, ask: bool = True) -> "Sources":
    """Return where to ask for the ends of logs: --path and --brokers, or else what each checkpoint names."""
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
    )
)
@grouped
def reset(
    *,
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint, or the table that contains it.")],
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, offsets as JSON, or a time: ISO 8601, or ms since 1970.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read again or skipped; change nothing.")
    ] = False,
    origin: From,
) -> None:
    """Make a stopped query resume at other offsets.

    Rows that the query has written stay. So its output may then hold a record twice, or lack it.
    """
    from kmq.spark.streaming import checkpoint as checkpoints
    from kmq.spark.streaming import reset as work

    found = checkpoints.find([checkpoint])
    if len(found) != 1:
        raise ConfigError(
            f"{checkpoint}: holds {len(found)} checkpoints; name one: {', '.join(one.path for one in found)}"
        )
    if not dry_run and (holder := found[0].holder()):
        raise BusyError(f"{found[0].path}: its query is running ({holder}); stop it first")
    sources = _sources(origin)
    plan = work.plan(found[0], to, sources)
    for line in work.text(plan):
        print(line)
    if dry_run:
        print("nothing was changed (--dry-run)")
    else:
        print(f"done; the offsets before and after: {work.apply(plan)}")
