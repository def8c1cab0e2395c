"""`kmq fleet status`: how far each broker is, its health, and where it is not as the fleet says."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kmq.cli.output import open_queue
from kmq.config import terminal
from kmq.config.states import SETTINGS, TOKENS, TOPICS
from kmq.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from kmq.cluster.fleet import Report, Result
    from kmq.cluster.queue import BroadcastQueue
    from kmq.cluster.subscriber import Node

_COLOURS = {"ready": "green", "behind": "yellow"}  # by health; every other one is red


def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """Show the last message, and of each broker how far it has come, its health, and what it has found.

    Exit code 1 unless every broker is there, ready, has read everything, is as
    the fleet says, and its last results are good.

    --json: {"epoch", "publisher", "topics", "tokens", "settings", "brokers":
    [{"broker", "read", "lag", "seen", "health", "reasons", "findings", "own",
    "error", "results"}, …]}. health: ready, behind, not_ready or away.
    """
    with open_queue() as queue:
        found = read(queue)
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    raise typer.Exit(EXIT_OK if all(map(_is_well, found["brokers"])) else EXIT_FAILED)


def _is_well(row: dict[str, Any]) -> bool:
    results_are_good = all(result["outcome"] == "ok" for result in row["results"].values())
    return row["health"] == "ready" and not row["findings"] and results_are_good


def read(queue: "BroadcastQueue") -> dict[str, Any]:
    """Return the fleet as a value for JSON."""
    from kmq.cluster.fleet import read_reports, read_results, read_states

    now = queue.status()
    states = queue.run(read_states(queue.keys))
    reports, results = queue.run(read_reports(queue.keys)), queue.run(read_results(queue.keys))
    by_kind = {
        kind: {key.removeprefix(kind): value for key, value in states.items() if key.startswith(kind)}
        for kind in (TOPICS, TOKENS, SETTINGS)
    }
    return {
        "epoch": now.epoch,
        "publisher": now.publisher,
        "topics": by_kind[TOPICS],
        "tokens": sorted(by_kind[TOKENS]),
        "settings": by_kind[SETTINGS],
        "brokers": [_row(node, reports.get(node.broker), results.get(node.broker, {})) for node in now.nodes],
    }


def _row(node: "Node", report: "Report | None", results: "dict[str, Result]") -> dict[str, Any]:
    return {
        "broker": node.broker,
        "read": node.read,
        "lag": node.lag,
        "seen": node.seen,
        "health": _health(node, report),
        "reasons": report.reasons if report is not None else [],
        "findings": report.findings if report is not None else [],
        "own": report.own if report is not None else {},
        "error": node.error,
        "results": {
            name: {"outcome": result.outcome, "findings": result.findings, "ts": result.ts}
            for name, result in sorted(results.items())
        },
    }


def _health(node: "Node", report: "Report | None") -> str:
    if not node.holder:
        return "away"
    if node.error or report is None or not report.ready:
        return "not_ready"
    return "behind" if node.lag else "ready"


def print_results(results: "dict[str, Result]") -> None:
    """Print what each broker made of a command."""
    for broker, result in results.items():
        print(f"{broker}: {result.outcome}")
        for finding in result.findings:
            print(f"    {finding}")


def _print(found: dict[str, Any]) -> None:
    told = [f"message {found['epoch']}", f"{len(found['topics'])} topics", f"{len(found['tokens'])} revoked tokens"]
    told += [f"{name}={text}" for name, text in found["settings"].items()]
    print(", ".join(told))
    table = Table("broker", box=None, pad_edge=False, header_style="bold")
    for title in ("read", "lag"):
        table.add_column(title, justify="right")
    table.add_column("health")
    table.add_column("last seen")
    for row in found["brokers"]:
        seen = f"{max(0, time.time() - row['seen']):,.0f} s ago" if row["health"] == "away" and row["seen"] else ""
        health = f"[{_COLOURS.get(row['health'], 'red')}]{row['health']}[/]"
        table.add_row(escape(row["broker"]), f"{row['read']:,}", f"{row['lag']:,}", health, seen)
    terminal.console().print(table)
    for row in found["brokers"]:
        _print_remarks(row, found["settings"])


def _print_remarks(row: dict[str, Any], settings: dict[str, str]) -> None:
    remarks = [f"cannot process a message: {row['error']}"] if row["error"] else []
    remarks += [f"not ready: {reason}" for reason in row["reasons"]]
    remarks += row["findings"]
    remarks += [
        f"{name}={text} was set there, and wins over the fleet" for name, text in row["own"].items() if name in settings
    ]
    for name, result in row["results"].items():
        if result["outcome"] != "ok":
            remarks += [f"{name}: {result['outcome']}", *result["findings"]]
    for remark in remarks:
        print(f"{row['broker']}: {remark}")
