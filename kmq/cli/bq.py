"""`kmq bq …`: the Broadcast Queue, which sends every message to all nodes of a fleet."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kmq.cli.output import examples, open_queue, print_table, stop_on_signals
from kmq.config import terminal
from kmq.errors import EXIT_SIGINT, ConfigError

if TYPE_CHECKING:
    from kmq.cluster.consul import KvEntry
    from kmq.cluster.following import Condition
    from kmq.cluster.queue import BroadcastQueue
    from kmq.cluster.subscriber import Item, Node, Status

bq_app = typer.Typer(
    no_args_is_help=True,
    help="The Broadcast Queue: what every node of a fleet is told, over Consul. See docs/broadcast-queue.md.",
    epilog=examples("kmq bq publish greeting hello", "kmq bq follow --json", "kmq bq status"),
)

_EXEC = typer.Option(
    "--exec",
    metavar="CMD",
    help="Run this shell command for each message, with the payload on stdin and BQ_EPOCH, BQ_TYPE, BQ_ID in the"
    " environment. If it fails, it is run again until it succeeds, after 0.5 s at first and at most 30 s.",
)


@bq_app.command(
    epilog=examples(
        "kmq bq publish greeting hello",
        "echo '{\"limit\": 5}' | kmq bq publish limits -",
        "kmq bq publish greeting hello --timeout 30",
    )
)
def publish(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="What kind of message: A-Z a-z 0-9 _ . -")],
    payload: Annotated[str, typer.Argument(help="Its text; - reads it from stdin.")] = "",
    timeout: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Wait at most so long for other publishers.")
    ] = 10.0,
) -> None:
    """Publish a message and print its epoch, the number of the message.

    Exit code 69 if another publisher holds the lock; the error names it.
    """
    with open_queue() as queue:
        from kmq.cluster.fleet import COMMANDS, STATE
        from kmq.cluster.publisher import MAX_BYTES

        if type in (STATE, *COMMANDS):
            how = "kmq fleet set, topics or token" if type == STATE else f"kmq fleet run {type}"
            raise ConfigError(f"type {type!r}: is what a fleet's brokers act on; publish it with: {how}")
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if payload == "-" else os.fsencode(payload)
        print(queue.publish(type, data, timeout))


@bq_app.command(
    epilog=examples(
        "kmq bq follow",
        "kmq bq follow --json --from 1 | head -3",
        "kmq bq follow --exec 'echo \"$BQ_EPOCH $BQ_TYPE\"; cat'",
    )
)
def follow(
    start: Annotated[
        int | None, typer.Option("--from", min=1, metavar="EPOCH", help="Begin with this message, also if it was read.")
    ] = None,
    command: Annotated[str, _EXEC] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as one JSON document.")] = False,
) -> None:
    """Receive all messages as this node, in order, until Ctrl-C or SIGTERM.

    It goes on after the last message that this node has processed. A message
    is marked as processed when it was printed, or when its command succeeded;
    after a crash it may be printed again. A new node, or one away for too
    long, gets a snapshot first: a line with the type snapshot.

    A node has one subscriber: exit code 69 if there is another. If Consul is
    lost, the command goes on when it is back.
    """
    with open_queue() as queue:
        _follow(queue, command, as_json, start=start)


@bq_app.command(
    epilog=examples(
        "consul watch -type=keyprefix -prefix=kmq/dev/bq/ kmq bq receive",
        "consul kv get -recurse kmq/dev/bq/",
    )
)
def receive(command: Annotated[str, _EXEC] = "") -> None:
    """Handle one call of `consul watch -type=keyprefix -prefix=kmq/<cluster>/bq/`.

    The JSON array that Consul gives comes on stdin. What this node has not
    processed yet is printed, a JSON document a line, or given to the command
    of --exec. Ends when all of it was processed.
    """
    with open_queue() as queue:
        from kmq.cluster.consul import given_entries

        try:
            given = given_entries(sys.stdin.buffer.read())
        except ValueError as error:
            raise ConfigError(f"stdin: {error}") from None
        strange = next((entry.key for entry in given if not entry.key.startswith(queue.keys.messages)), None)
        if strange is not None:
            raise ConfigError(f"stdin: key {strange} of another queue; watch -prefix={queue.keys.messages}")
        _follow(queue, command, as_json=True, given=given)


def _follow(
    queue: "BroadcastQueue", command: str, as_json: bool, start: int | None = None, given: "list[KvEntry] | None" = None
) -> None:
    from kmq.cli.bq_items import Printer, run_command
    from kmq.cluster import following

    stop = threading.Event()
    printer = Printer(stop, as_json)

    def handle(item: "Item") -> None:
        if command:
            run_command(item, command, stop)
        if as_json or not command:
            printer(item)

    was_interrupted = stop_on_signals(stop)
    if not command or as_json:
        terminal.when_left(stop.set)
    following.follow(queue, handle, stop, _reporter(), start, given)
    if printer.failed:
        raise printer.failed
    if was_interrupted():
        raise typer.Exit(EXIT_SIGINT)


def _reporter() -> "Callable[[Condition], None]":
    """Return a function that prints changes of the connection on stderr."""
    lost = failing = ""

    def report(condition: "Condition") -> None:
        nonlocal lost, failing
        if condition.failing and condition.failing != failing:
            _say(f"{condition.failing}; it is tried again until it succeeds")
        elif failing and not condition.failing:
            _say("the message was processed at last")
        if condition.lost != lost:
            _say(f"{condition.lost}; tried again until it is back" if condition.lost else "Consul is back")
        lost, failing = condition.lost, condition.failing

    return report


def _say(text: str) -> None:
    print(f"kmq: {text}", file=sys.stderr)


# --- status ----------------------------------------------------------------------------------------------------------


@bq_app.command(epilog=examples("kmq bq status", "kmq bq status --json"))
def status(as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False) -> None:
    """Show the last epoch, who publishes, and for each node how far it is, who subscribes, and what it cannot process.

    A node that is away is shown with the time when it was last heard of. Its
    messages are kept for a day; after that it gets a snapshot.
    """
    with open_queue() as queue:
        found = queue.status()
        if as_json:
            print(json.dumps(_as_json(queue.place.cluster, found)))
        else:
            _print_status(queue.place.cluster, found)


def _as_json(fleet: str, found: "Status") -> dict[str, object]:
    nodes = [node._asdict() | {"away_since": None if node.holder else node.seen or None} for node in found.nodes]
    return {"cluster": fleet, "epoch": found.epoch, "publisher": found.publisher, "nodes": nodes}


def _print_status(fleet: str, found: "Status") -> None:
    print(f"fleet {fleet}: epoch {found.epoch:,}, publisher: {found.publisher or 'nobody now'}")
    if not found.nodes:
        print("no node has subscribed yet; see: kmq bq follow --help")
        return
    print_table(("node", ">last read", ">lag", "subscriber", "error"), map(_row, found.nodes), markup=True)


def _row(node: "Node") -> tuple[str | int, ...]:
    lag = f"[yellow]{node.lag:,}[/]" if node.lag else "0"
    return escape(node.broker), node.read, lag, _subscriber(node), f"[red]{escape(node.error)}[/]"


def _subscriber(node: "Node") -> str:
    if node.holder:
        return escape(node.holder)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(node.seen))
    return f"[yellow]away since {since}[/]" if node.seen else "[yellow]away[/]"


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(bq_app, name="bq")
