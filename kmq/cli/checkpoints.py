"""`kmq pipeline status` and `kmq pipeline reset`: how far streaming queries are, and where they resume.

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
    """Where to ask: without --path and --brokers as each checkpoint names its own."""
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
        typer.Argument(help="Checkpoints, tables, or directories of such. \\[default: this directory]"),
    ] = None,
    origin: From,
    partitions: Annotated[bool, typer.Option("--partitions", help="Offset and lag of each partition, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each query.")] = False,
    alive: Annotated[
        str,
        typer.Option("--alive", help="Exit code 1 unless each query runs and reported within this time: for a probe."),
    ] = "",
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no broker: read the files only, without lags.")
    ] = False,
) -> None:
    """How far behind each streaming query is, when it last committed, whether it runs; from its checkpoint and the brokers.

    Without --path and --brokers, those are asked that each checkpoint names.
    """
    from kmq.spark.streaming import checkpoint
    from kmq.spark.streaming import status as report
    from kmq.terminal import console

    limit = seconds("--alive", alive) if alive else 0.0
    sources = _sources(origin, not offline)
    found = [report.of(each, sources) for each in checkpoint.find(checkpoints or ["."])]
    if as_json:
        for each in found:
            print(json.dumps(each))
    else:
        console().print(report.as_table(found))
        for each in found:
            if partitions:
                console().print("", report.as_offsets(each), sep="\n")
            for note in report.notes(each):
                print(note, file=sys.stderr)
    dead = [why for each in found if (why := report.not_alive(each, limit))] if alive else []
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
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint, or the table that has it.")],
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, JSON of offsets, or a time: ISO 8601, or ms since 1970.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read again or skipped; change nothing.")
    ] = False,
    origin: From,
) -> None:
    """Let a stopped query resume at other offsets. What it has written stays, so a record may be there twice or never."""
    from kmq.spark.streaming import checkpoint as checkpoints
    from kmq.spark.streaming import reset as work

    found = checkpoints.find([checkpoint])
    if len(found) != 1:
        raise ConfigError(
            f"{checkpoint}: has {len(found)} checkpoints; name one: {', '.join(each.path for each in found)}"
        )
    if not dry_run and (holder := found[0].holder()):
        raise BusyError(f"{found[0].path}: its query runs ({holder}); stop it first")
    sources = _sources(origin)
    plan = work.plan(found[0], to, sources)
    for line in work.text(plan):
        print(line)
    if dry_run:
        print("nothing was changed (--dry-run)")
    else:
        print(f"done; the offsets before and after: {work.apply(plan)}")
