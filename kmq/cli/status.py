"""`kmq status|clock`: what the broker does, and what is wrong with it."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq.broker import status as statuses
from kmq.broker import supervisor
from kmq.broker.stats import INTAKE_FIELDS, REPLICA, TIER
from kmq.broker.status import BrokerStatus, StageStatus
from kmq.cli.output import examples, table
from kmq.config import terminal
from kmq.config.settings import STAGES, Settings, load
from kmq.errors import EXIT_FAILED, EXIT_OK, KmqError

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {  # by state; every other state is red
    **dict.fromkeys(("ready", "following"), "green"),
    **dict.fromkeys(("draining", "recovering", "unled"), "yellow"),
}
_COLUMNS = ("stage", ">pid", "state", ">restarts", ">msg/s", ">messages", ">last seq", "waits before it")


def status(
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per stage, for scripts; no rates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs; no rates.")] = False,
) -> None:
    """Show each stage (pid, state, restarts, rate), what waits in each link, and what is wrong.

    Exit code 1 unless the broker is ready. A broker that refuses messages is not ready. /readyz (HTTP) says the same.
    """
    settings = load()
    if as_logfmt or as_json:
        found = statuses.collect(settings)
        print(json.dumps(statuses.as_json(found)) if as_json else statuses.logfmt(found))
    else:
        found = statuses.collect_with_rates(settings)
        _print_status(settings, found)
    raise typer.Exit(EXIT_OK if found.ready else EXIT_FAILED)


def _print_status(settings: Settings, found: BrokerStatus) -> None:
    if found.stages:
        show_table(found)
    if found.stages or found.supervisor == "up":  # up without stages: of another name or directory, with these pipes
        _print_remarks(found)
    if found.supervisor == "killed":
        _print(supervisor.KILLED, "yellow")
    elif found.supervisor == "down":
        if not supervisor.taken(settings):
            where = f"data in {os.path.abspath(settings.data)}, pipes in {os.path.abspath(settings.pipes)}"
            print(f"kmq: instance {settings.instance} is down ({where})")
        if reason := supervisor.why_not_here(settings):
            print(f"kmq: {reason}")


def show_table(found: BrokerStatus) -> None:
    """Print a row for each process, with less space between the columns on a narrow terminal."""
    console, shown = terminal.console(), _as_table(found)
    unbounded = console.options.update(max_width=10_000)
    shown.collapse_padding = console.measure(shown, options=unbounded).maximum > console.width
    console.print(shown)


def _as_table(found: BrokerStatus) -> "Table":
    shown = table(*_COLUMNS)
    waiting = {
        "ingress": f"{found.stages[0].connections} producers",
        "framer": f"raw {found.backlog['raw_bytes']:,} B",
        "durability": f"framed {found.backlog['framed_messages']:,} msg",
        "router": f"durable {found.backlog['durable_messages']:,} msg",
        REPLICA: found.role,
        TIER: "" if found.copy is None else _copied(found.copy),
    }
    for stage in found.processes:
        shown.add_row(*_cells(stage), waiting.get(stage.name, ""))
    return shown


def _copied(copy: dict[str, Any]) -> str:
    topics = f"; {copy['bytes'] >> 20:,} MiB of topics, {copy['behind_bytes'] >> 20:,} MiB behind"
    is_tiered = copy["objects"] or copy["behind_bytes"]
    return f"copied to seq {copy['seq']:,}, {copy['behind']:,} msg behind" + (topics if is_tiered else "")


def _cells(stage: StageStatus) -> list[str]:
    # Ingress has no counts, because it passes blocks on unread. The framer is the first stage that counts messages.
    counts = [f"{stage.rate:,.0f}", f"{stage.messages:,}", f"{stage.seq:,}"] if stage.name in STAGES[1:] else [""] * 3
    state = f"[{_COLOURS.get(stage.state, 'red')}]{stage.state}[/]"
    return [stage.name, str(stage.pid), state, str(stage.restarts), *counts]


def _print_remarks(found: BrokerStatus) -> None:
    for intake in found.intakes:
        counts = "   ".join(f"{name}: {intake[name]:,}" for name in INTAKE_FIELDS[1:])
        _print(f"intake {intake['port']}/{intake['kind']} -> {intake['topic']}   {counts}")
    if found.kafka is not None and any(value for name, value in found.kafka.items() if name != "port"):
        port, connections, producers, cached, rendered, _ = found.kafka.values()
        _print(
            f"kafka {port}   connections: {connections:,}   producers: {producers:,}"
            f"   from cache: {cached:,}   from lines: {rendered:,}"
        )
    for each in found.followers:
        delay = "-" if each["ack_delay"] is None else f"{each['ack_delay']:.3f} s"
        place = "in the ISR" if each["in_isr"] else "out of the ISR"
        away = "" if each["connected"] else "   does not follow"
        _print(f"follower {each['broker']}   {place}   ack delay: {delay}{away}", "yellow" if each["slow"] else None)
    refused, dropped = sum(stage.refused for stage in found.stages), sum(stage.dropped for stage in found.stages)
    if refused or dropped:
        _print(f"refused: {refused:,}   dropped (see dropped.log): {dropped:,}")
    for reason in found.verdict.reasons:
        _print(f"not ready: {reason}; {reason.advice}", "red")
    for warning in found.verdict.warnings:
        _print(f"{warning}; {warning.advice}", "yellow")


def _print(text: str, style: str | None = None) -> None:
    terminal.console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def clock(
    trust: Annotated[bool, typer.Option("--trust", help="Confirm that the time of day is right now.")] = False,
) -> None:
    """Show whether the time of day is trusted. Exit code 1 if it is not.

    After a jump of more than a minute, or at a start more than a day after
    the last record, nothing is deleted or forgotten by age until the time of
    day has been steady for ten minutes.
    """
    found = statuses.collect(load())
    if not found.stages:
        raise KmqError("the broker is down: no process watches the time of day")
    if trust:
        statuses.trust_clock(load())
    elif found.clock:
        print(found.clock)
        raise typer.Exit(EXIT_FAILED)
    print("the time of day is trusted")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(
        epilog=examples("kmq status", "kmq status --logfmt | awk '$1 == \"stage=router\"'", "kmq status --json")
    )(status)
    app.command(epilog=examples("kmq clock", "kmq clock --trust"))(clock)
