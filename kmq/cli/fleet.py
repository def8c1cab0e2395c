"""`kmq fleet …`: send settings and commands to every broker of a cluster, and see their results. Local commands stay
local.
"""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kmq.cli.output import examples, open_queue, print_table, seconds
from kmq.config.settings import SHARED
from kmq.config.states import DEFAULT, REVOKED, SETTINGS, TOKENS, TOPICS, UNREADABLE, fault
from kmq.errors import EXIT_FAILED, EXIT_OK, ConfigError
from kmq.log.segment import LIMITS, Limits
from kmq.log.topics import MAX_PARTITIONS, check_letters
from kmq.message import record

if TYPE_CHECKING:
    from kmq.cluster.fleet import BrokerReport, CommandResult
    from kmq.cluster.queue import BroadcastQueue
    from kmq.cluster.subscriber import Node

fleet_app = typer.Typer(
    no_args_is_help=True,
    help="Tell every broker of a fleet something: topics, tokens, settings, commands. See docs/fleet.md.",
    epilog=examples("kmq fleet topics create orders --partitions 4", "kmq fleet run verify --wait", "kmq fleet status"),
)
fleet_topics = typer.Typer(
    no_args_is_help=True,
    help="Declare topics on every broker, and change their limits.",
    epilog=examples("kmq fleet topics create orders --partitions 4", "kmq fleet topics set orders retention_age=30d"),
)
fleet_token = typer.Typer(
    no_args_is_help=True,
    help="Revoke bearer tokens on every broker.",
    epilog=examples("kmq fleet token revoke orders"),
)

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[0-9a-f]{12})?")
_SHORT = {"retention": ("retention_age", "retention_bytes"), "quota": ("data_quota",)}
_AWAY = "away"
_AGAIN_S = 0.5  # until Consul is asked again
_LOOK_S = 2.0  # longest watch while waiting for results
_NAME = typer.Argument(help="A topic: [A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_TIMEOUT = typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Wait at most so long for other publishers.")


def _publish(key: str, decide: Callable[[str], str], timeout: float) -> int:
    """Publish a new value of a state, and return the epoch."""
    with open_queue() as queue:
        from kmq.cluster.fleet import publish_state

        return queue.as_publisher(lambda publisher: publish_state(publisher, queue.keys, key, decide), timeout)


# --- topics ----------------------------------------------------------------------------------------------------------


@fleet_topics.command(
    "create",
    epilog=examples(
        "kmq fleet topics create orders --partitions 4", "kmq fleet topics create audit --set retention_age=30d"
    ),
)
def create(
    name: Annotated[str, _NAME],
    partitions: Annotated[int, typer.Option("--partitions", "-p", help="1 to 1024; cannot be changed later.")] = 1,
    own: Annotated[
        list[str] | None, typer.Option("--set", help=f"<limit>=<value>. Limits: {', '.join(LIMITS)}.")
    ] = None,
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Declare a topic on every broker. Print the number of the message that says so."""
    if not record.is_topic(name):
        raise ConfigError(
            f"topic {name!r}: must match [A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}}, and not begin as a log of KMQ"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ConfigError(f"partitions={partitions}: must be between 1 and {MAX_PARTITIONS}")
    limits = _parse_limits(name, own or [])

    def decide(before: str) -> str:
        if "partitions=" in before and UNREADABLE not in before:
            raise ConfigError(f"topic {name}: the fleet has it already ({before}); see: kmq fleet topics set")
        return _topic(str(partitions), limits)

    print(f"message {_publish(TOPICS + name, decide, timeout)}: topic {name}, {partitions} partition(s)")


@fleet_topics.command("set", epilog=examples("kmq fleet topics set orders retention_bytes=10GiB retention_age="))
def set_limits(
    name: Annotated[str, _NAME],
    changes: Annotated[list[str], typer.Argument(help="<limit>=<value>; <limit>= restores the setting.")],
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Change the limits of a topic on every broker. Print the number of the message that says so."""
    limits = _parse_limits(name, changes)

    def decide(before: str) -> str:
        if not before:
            raise ConfigError(f"topic {name!r} is not known to the fleet; declare it with: kmq fleet topics create")
        fields = dict(field.partition("=")[::2] for field in before.split())
        if not fields.get("partitions", "").isdecimal():
            raise ConfigError(f"topic {name!r}: {before!r} is not readable; publish it anew: kmq fleet topics create")
        return _topic(fields.pop("partitions"), fields | limits)

    print(f"message {_publish(TOPICS + name, decide, timeout)}: topic {name}, {' '.join(changes)}")


def _topic(partitions: str, limits: dict[str, str]) -> str:
    return " ".join([f"partitions={partitions}", *(f"{limit}={text}" for limit, text in limits.items())])


def _parse_limits(topic: str, pairs: list[str]) -> dict[str, str]:
    """Return limit → text without blanks, or DEFAULT. Raises ConfigError."""
    limits = {}
    for pair in pairs:
        limit, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r}: expected <limit>=<value>, with one of {', '.join(LIMITS)}")
        limits[limit.strip()] = "".join(text.split()) or DEFAULT
    own = {limit: text for limit, text in limits.items() if text != DEFAULT or limit not in LIMITS}
    Limits().with_changes(own)
    check_letters(topic, own)
    return limits


# --- tokens, settings ------------------------------------------------------------------------------------------------


@fleet_token.command(
    "revoke", epilog=examples("kmq fleet token revoke orders", "kmq fleet token revoke orders.0a1b2c3d4e5f")
)
def revoke(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A name: all its tokens, for good; or one token's id: kmq token list.")
    ],
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Let every broker turn a token away, although its token file has it. A new hello or request is refused."""
    if not _TOKEN.fullmatch(id) or id == "local":
        raise ConfigError(f"token {id!r}: must be a name, or the id of a token (kmq token list), and not local")
    print(f"message {_publish(TOKENS + id, lambda _: REVOKED, timeout)}: token {id} is revoked")


@fleet_app.command("set", epilog=examples("kmq fleet set retention=30d", "kmq fleet set retention_bytes=10GiB quota="))
def set_settings(
    changes: Annotated[
        list[str],
        typer.Argument(
            help=f"<setting>=<value>, with one of {', '.join(SHARED)}; retention= takes an age or a size, quota= a size."
            " <setting>= leaves it to each broker again."
        ),
    ],
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Set a limit for every broker that was not given one itself. It is in force within seconds, without a restart."""
    for name, text in [_setting(pair) for pair in changes]:  # check all before the first is published
        print(f"message {_publish(SETTINGS + name, partial(_value, text), timeout)}: {name}={text}")


def _value(text: str, before: str) -> str:
    return text


def _setting(pair: str) -> tuple[str, str]:
    """Return name and text of a setting. Raises ConfigError."""
    short, equals, text = pair.partition("=")
    names, value = _SHORT.get(short, (short,)), "".join(text.split()) or DEFAULT
    if not equals or any(name not in SHARED for name in names):
        raise ConfigError(f"{pair!r}: expected <setting>=<value>, with retention, quota, {', '.join(SHARED)}")
    fitting = [name for name in names if not fault(name, value)]
    if len(fitting) > 1:
        raise ConfigError(f"{pair!r}: may be an age or a size; say {' or '.join(f'{name}={text}' for name in fitting)}")
    if not fitting:
        raise ConfigError(f"{pair!r}: {fault(names[0], value)}")
    return fitting[0], value


# --- commands --------------------------------------------------------------------------------------------------------


@fleet_app.command(
    "run", epilog=examples("kmq fleet run verify --wait", "kmq fleet run compact --within 6h", "kmq fleet run retain")
)
def run(
    command: Annotated[str, typer.Argument(help="verify, compact or retain (delete at once what is over its limits).")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result of every broker that is there.")] = False,
    within: Annotated[str, typer.Option(help="A broker that has not begun by then does not do it.")] = "1h",
    as_json: Annotated[
        bool, typer.Option("--json", help='{"epoch", "id", "results": {<broker>: {"outcome", "findings"}}}')
    ] = False,
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Let every broker do something once. With --wait, exit code 1 unless every broker that is there has done it well.

    A broker that is away is named, and not waited for; one that goes away meanwhile has not done it.
    """
    lasts_s = seconds("--within", within)
    if not lasts_s:
        raise ConfigError(f"--within {within!r}: must not be 0; how long may a broker take to begin, such as 1h?")
    with open_queue() as queue:
        from kmq.cluster.fleet import publish_command

        message = queue.as_publisher(
            lambda publisher: publish_command(publisher, queue.keys, command, lasts_s), timeout
        )
        if not as_json:
            print(f"message {message.epoch}: {command}, id {message.id}", flush=True)
        results = _results(queue, message.id, time.monotonic() + lasts_s) if wait else {}
    if as_json:
        found = {broker: {"outcome": row.outcome, "findings": row.findings} for broker, row in results.items()}
        print(json.dumps({"epoch": message.epoch, "id": message.id, "results": found}))
    elif wait:
        _print_results(results)
    raise typer.Exit(
        EXIT_OK if all(result.is_ok or result.outcome == _AWAY for result in results.values()) else EXIT_FAILED
    )


def _print_results(results: "dict[str, CommandResult]") -> None:
    """Print each broker's result of a command."""
    for broker, result in results.items():
        print(f"{broker}: {result.outcome}")
        for finding in result.findings:
            print(f"    {finding}")


def _results(queue: "BroadcastQueue", id: str, until: float) -> "dict[str, CommandResult]":
    """Return the result of each broker, waiting for those that are present. If Consul does not answer, ask it again."""
    from kmq.cluster.consul import Unanswered
    from kmq.cluster.fleet import CommandResult, watch_results
    from kmq.cluster.subscriber import Node

    position, found, nodes = 0, dict[str, CommandResult](), list[Node]()
    were_here = set[str]()
    while time.monotonic() < until:
        try:
            nodes = queue.status().nodes
            were_here |= {node.broker for node in nodes if node.holder}
            found, position = queue.run(watch_results(queue.keys, id, position, _LOOK_S))
        except Unanswered:
            time.sleep(_AGAIN_S)
            continue
        if {node.broker for node in nodes if node.holder} <= found.keys():
            break
    missing = {node.broker: "no result in time" for node in nodes}
    missing |= {
        node.broker: "went away before" if node.broker in were_here else _AWAY for node in nodes if not node.holder
    }
    absent = {name: CommandResult("", why, [], 0.0) for name, why in missing.items() if name not in found}
    return dict(sorted({**found, **absent}.items()))


@fleet_app.command("forget", epilog=examples("kmq fleet forget node-9   # it is gone for good"))
def forget(
    broker: Annotated[str, typer.Argument(help="A broker that is away, as kmq fleet status names it.")],
    timeout: Annotated[float, _TIMEOUT] = 10.0,
) -> None:
    """Take a broker that is gone for good out of the status. If it comes back it is there again."""
    with open_queue() as queue:
        from kmq.cluster.fleet import forget as steps
        from kmq.cluster.presence import check_broker

        queue.as_publisher(lambda publisher: steps(publisher, queue.keys, check_broker(broker)), timeout)
    print(f"broker {broker} is forgotten")


# --- status ----------------------------------------------------------------------------------------------------------

_COLOURS = {"ready": "green", "behind": "yellow"}  # by health; every other one is red


@fleet_app.command("status", epilog=examples("kmq fleet status", "kmq fleet status --json"))
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


def _row(node: "Node", report: "BrokerReport | None", results: "dict[str, CommandResult]") -> dict[str, Any]:
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


def _health(node: "Node", report: "BrokerReport | None") -> str:
    if not node.holder:
        return "away"
    if node.error or report is None or not report.ready:
        return "not_ready"
    return "behind" if node.lag else "ready"


def _print(found: dict[str, Any]) -> None:
    parts = [f"message {found['epoch']}", f"{len(found['topics'])} topics", f"{len(found['tokens'])} revoked tokens"]
    parts += [f"{name}={text}" for name, text in found["settings"].items()]
    print(", ".join(parts))
    rows = []
    for row in found["brokers"]:
        seen = f"{max(0, time.time() - row['seen']):,.0f} s ago" if row["health"] == "away" and row["seen"] else ""
        health = f"[{_COLOURS.get(row['health'], 'red')}]{row['health']}[/]"
        rows.append((escape(row["broker"]), row["read"], row["lag"], health, seen))
    print_table(("broker", ">read", ">lag", "health", "last seen"), rows, markup=True)
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


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    fleet_app.add_typer(fleet_topics, name="topics")
    fleet_app.add_typer(fleet_token, name="token")
    app.add_typer(fleet_app, name="fleet")
