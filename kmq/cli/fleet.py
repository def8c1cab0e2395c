"""`kmq fleet …`: tell every broker of a cluster something, and see what they made of it. Local commands stay local."""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kmq.cli.fleet_status import print_results, status
from kmq.cli.output import examples, open_queue
from kmq.config.settings import SHARED
from kmq.config.states import DEFAULT, REVOKED, SETTINGS, TOKENS, TOPICS, UNREADABLE, fault
from kmq.config.values import parse_duration
from kmq.errors import EXIT_FAILED, EXIT_OK, ConfigError
from kmq.log.segment import LIMITS, Limits
from kmq.log.topics import MAX_PARTITIONS
from kmq.message import record

if TYPE_CHECKING:
    from kmq.cluster.fleet import Result
    from kmq.cluster.queue import BroadcastQueue

fleet_app = typer.Typer(
    no_args_is_help=True,
    help="Tell every broker of a cluster something: topics, tokens, settings, commands.",
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
_LOOK_S = 2.0  # longest watch while we wait for results
_NAME = typer.Argument(help="A topic: [A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_TIMEOUT = typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Wait at most so long for other publishers.")


def _publish(key: str, decide: Callable[[str], str], timeout: float) -> int:
    """Publish a new value of a state, and return the epoch."""
    with open_queue() as queue:
        from kmq.cluster.fleet import publish_state

        return queue.as_publisher(lambda publisher: publish_state(publisher, queue.keys, key, decide), timeout)


# --- topics -----------------------------------------------------------------------------------------------------------


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
    limits = _parse_limits(own or [])

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
    limits = _parse_limits(changes)

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


def _parse_limits(pairs: list[str]) -> dict[str, str]:
    """Return limit → text without blanks, or DEFAULT. Raises ConfigError."""
    limits = {}
    for pair in pairs:
        limit, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r}: expected <limit>=<value>, with one of {', '.join(LIMITS)}")
        limits[limit.strip()] = "".join(text.split()) or DEFAULT
    Limits().with_changes({limit: text for limit, text in limits.items() if text != DEFAULT or limit not in LIMITS})
    return limits


# --- tokens, settings -------------------------------------------------------------------------------------------------


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
    for name, text in [_setting(pair) for pair in changes]:  # all are looked at before the first is published
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


# --- commands ---------------------------------------------------------------------------------------------------------


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
    try:
        lasts_s = parse_duration(within)
    except ValueError as error:
        raise ConfigError(f"--within {within!r}: {error}") from None
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
        print_results(results)
    raise typer.Exit(
        EXIT_OK if all(result.is_ok or result.outcome == _AWAY for result in results.values()) else EXIT_FAILED
    )


def _results(queue: "BroadcastQueue", id: str, until: float) -> "dict[str, Result]":
    """Return the result of each broker; wait for those that are there. A Consul that does not answer is asked again."""
    from kmq.cluster.consul import Unanswered
    from kmq.cluster.fleet import Result, watch_results
    from kmq.cluster.subscriber import Node

    position, found, nodes = 0, dict[str, Result](), list[Node]()
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
    absent = {name: Result("", why, [], 0.0) for name, why in missing.items() if name not in found}
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


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    fleet_app.add_typer(fleet_topics, name="topics")
    fleet_app.add_typer(fleet_token, name="token")
    fleet_app.command("status", epilog=examples("kmq fleet status", "kmq fleet status --json"))(status)
    app.add_typer(fleet_app, name="fleet")
