"""`kmq log …` and `kmq verify`: read and check the files of the WAL and of the queues."""

import json
import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq.cli.output import counting, examples, existing_data, print_table
from kmq.config import terminal
from kmq.config.settings import load
from kmq.errors import EXIT_FAILED, EXIT_OK, ConfigError
from kmq.logfmt import pairs

if TYPE_CHECKING:
    from kmq.log.show import Stat

log_app = typer.Typer(
    no_args_is_help=True,
    help="Read the WAL and the queues: lines, places, sizes. Nothing is changed; the broker may run.",
    epilog=examples("kmq log stat", "kmq log cat append --count 3", "kmq log find append --seq 1"),
)

_LOG = typer.Argument(help="append (the WAL), <topic> or <topic>/<partition>.")
_MB = 1e6


# --- log -------------------------------------------------------------------------------------------------------------


@log_app.command("cat", epilog=examples("kmq log cat append --count 3", "kmq log cat test --since 10m"))
def cat(
    log: Annotated[str, _LOG] = "append",
    from_seq: Annotated[int, typer.Option("--from-seq", help="Only records with this seq or a later one.")] = 0,
    offset: Annotated[
        int | None, typer.Option("--offset", help="Only records with this offset or a later one; needs one partition.")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", help="Only records received at this time or later: 10m (ago), or a time.")
    ] = "",
    until: Annotated[str, typer.Option("--until", help="Only records received before this time.")] = "",
    count: Annotated[int, typer.Option("--count", "-n", help="Print at most this many records; 0: all.")] = 0,
) -> None:
    """Print stored lines, each checked against the index. A damaged line is never printed: an error names its place."""
    from kmq.log import show

    lines = islice(show.cat(existing_data(), log, from_seq, offset, since, until), count or None)
    for line in terminal.while_read(lines):
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


@log_app.command("find", epilog=examples("kmq log find append --seq 1", "kmq log find test --time 10m"))
def find(
    log: Annotated[str, _LOG] = "append",
    seq: Annotated[int | None, typer.Option("--seq", help="The record with this seq, or else the next one.")] = None,
    offset: Annotated[
        int | None,
        typer.Option("--offset", help="The record with this offset, or else the next one; needs one partition."),
    ] = None,
    at: Annotated[
        str, typer.Option("--time", help="The first record received at this time or later: 10m (ago), or a time.")
    ] = "",
) -> None:
    """Print where a record is: file, byte, offset and the line. Takes a few small reads, even in a long log."""
    from kmq.log import show

    if (seq is not None) + (offset is not None) + bool(at) != 1:
        raise ConfigError("give one of --seq, --offset, --time")
    places = list(show.find(existing_data(), log, seq, offset, at))
    for name, found in places:
        number = "seq" if name == "append" else "offset"
        text = found.line.decode(errors="replace")
        print(f"log={name} file={found.path} byte={found.byte} {number}={found.offset}\n{text}")
    if not places:
        wanted = f"time {at}" if at else f"seq {seq}" if seq is not None else f"offset {offset}"
        print(f"kmq: {log}: no record at {wanted} or later; kmq log stat {log} shows what it has", file=sys.stderr)
    raise typer.Exit(EXIT_OK if places else EXIT_FAILED)


@log_app.command("stat", epilog=examples("kmq log stat", "kmq log stat append --logfmt", "kmq log stat --json"))
def stat(
    log: Annotated[str, typer.Argument(help="append, <topic> or <topic>/<partition>; default: all logs.")] = "",
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per log.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """Show the size of each log: segments, first and last record, bytes, blocks, ages in seconds.

    --json: {"logs": [{"log", "segments", "first", "last", "bytes", "blocks",
    "oldest_s", "newest_s"}, …]}. first and last are seqs of the WAL, offsets
    of a partition. A log without records has last = first - 1 and ages of -1.
    """
    from kmq.log import show

    rows = [_stat_row(found) for found in show.stat(existing_data(), log)]
    if as_json:
        print(json.dumps({"logs": rows}))
    elif as_logfmt:
        for row in rows:
            print(pairs(**row))
    else:
        columns = "log", ">segments", ">first", ">last", ">bytes", ">blocks", ">oldest s", ">newest s"
        print_table(columns, ([*row.values()] for row in rows))


def _stat_row(found: "Stat") -> dict[str, Any]:
    return {
        "log": found.name,
        "segments": found.segments,
        "first": found.first,
        "last": found.end - 1,
        "bytes": found.bytes,
        "blocks": found.blocks,
        "oldest_s": round(found.oldest_s, 1),
        "newest_s": round(found.newest_s, 1),
    }


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(
    only: Annotated[
        list[str] | None, typer.Argument(help="Topics to check, or append for the WAL; default: everything.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair the damage found; the broker must be down.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per finding or repaired file, each on a line.")
    ] = False,
) -> None:
    """Check every byte on disk, also of a running broker. Exit code 0: no damage; 1: damage; 65: damage beyond repair.

    --repair rebuilds the WAL from the queues, queues from the WAL, and indexes
    from the data; the rebuilt files equal the lost ones byte by byte. What the
    WAL does not have any more of old records comes from KMQ_TIER. Records
    that no copy holds any more are named by seq in the directory quarantine.
    """
    from kmq.broker import damage
    from kmq.cli import tier
    from kmq.repair import verify as check

    data, settings = existing_data(), load()
    with counting("checked {task.completed:,.0f} MB") as advance:
        checked = check.run(
            data,
            only or [],
            repair,
            as_json,
            lambda nbytes: advance(nbytes / _MB),
            settings.ring_bytes,
            tier.access(settings),
        )
    damage.report(settings, checked.damage, checked.is_complete)
    raise typer.Exit(checked.code)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(epilog=examples("kmq verify", "kmq verify append", "kmq verify --repair"))(verify)
    app.add_typer(log_app, name="log")
