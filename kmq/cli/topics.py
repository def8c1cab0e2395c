"""`kmq topics set|show|delete`: a topic's own limits, what there is of it, and its end."""

import difflib
import json
import os
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kmq.broker import status as statuses
from kmq.cli.helptext import examples as _examples
from kmq.errors import ConfigError, KmqError
from kmq.log import reader, requests, topics
from kmq.log.requests import Request
from kmq.log.segment import LIMITS, Limits, survey
from kmq.settings import SETTINGS, Settings, load

_TAKE_UP_S = 5.0  # how long the router may take to carry out what it is asked
_POLL_S = 0.02
_ENV = {row.attribute: row.env for row in SETTINGS}
_BYTES = ((" GiB", 1 << 30), (" MiB", 1 << 20), (" KiB", 1 << 10), (" B", 1))
_AGES = (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
_NAME = typer.Argument(help="A topic; see kmq topics list.")

out = Console()


def _existing(settings: Settings, name: str) -> None:
    """Raise ConfigError, with the nearest name there is, where there is no such topic."""
    names = topics.names(settings.data) if os.path.isdir(f"{settings.data}/topics") else []
    if name in names:
        return
    nearest = difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "see: kmq topics list"
    raise ConfigError(f"topic {name!r} does not exist; {hint}")


def _is_carried_out(settings: Settings, request: Request) -> bool:
    """Wait as long as there is a router that may carry it out, some seconds at most."""
    deadline = time.monotonic() + _TAKE_UP_S
    while request.is_waiting:
        if not statuses.collect(settings).ready or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# --- set ---------------------------------------------------------------------------------------------------------


def set_limits(
    name: Annotated[str, _NAME],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(LIMITS)}: <limit>=<value>; without a value the setting is in force again."),
    ] = None,
    unset: Annotated[list[str] | None, typer.Option("--unset", help="A limit to take away; as <limit>= does.")] = None,
) -> None:
    """Change a topic's own limits, in place of the settings. A living broker takes them up at once, without a restart.

    Lowering retention deletes: whole sealed segments, oldest first, within seconds.
    """
    settings = load()
    _existing(settings, name)
    asked = _parse_changes(name, [*(changes or []), *(f"{each}=" for each in unset or [])])
    own = _with_pending(settings.data, name, topics.read(settings.data, name).limits)
    _apply(own, asked)
    Limits().but(own)
    request = requests.lay_down(settings.data, requests.SET, name, asked)
    said = " ".join(f"{limit}={value}" if value else f"{limit} unset" for limit, value in asked.items())
    if not _is_carried_out(settings, request):
        print(f"topic {name}: {said}, in force when the router has taken it up")
        return
    now = topics.read(settings.data, name).limits if name in topics.names(settings.data) else {}
    if any(now.get(limit, "") != value for limit, value in asked.items()):
        raise KmqError(
            f"topic {name}: was not changed as asked; the log of the broker says why (event request_refused)"
        )
    print(f"topic {name}: {said}, in force")


def _parse_changes(name: str, pairs: list[str]) -> dict[str, str]:
    """Limit → text, "" to take it away. Raises ConfigError where there is none, or at what is no limit."""
    asked = {}
    for pair in pairs:
        limit, equals, value = (part.strip() for part in pair.partition("="))
        if limit == "partitions":
            raise ConfigError(
                f"topic {name}: partitions cannot be changed: the partition of a key would be another one than that of its"
                f" stored records; create a new topic with them, and send the records there:"
                f" kmq topics create <new> --partitions {value or 'n'}, kmq redrive {name} --to '<new>.{{key}}'"
            )
        if not equals:
            raise ConfigError(f"{pair!r}: expected <limit>=<value>, with one of {', '.join(LIMITS)}")
        if limit not in LIMITS:
            raise ConfigError(f"{limit}: unknown limit; expected one of {', '.join(LIMITS)}")
        asked[limit] = value
    if not asked:
        raise ConfigError(f"topic {name}: nothing to change; give <limit>=<value>, with one of {', '.join(LIMITS)}")
    return asked


def _apply(own: dict[str, str], changes: dict[str, str]) -> None:
    for limit, value in changes.items():
        own.pop(limit, None)
        if value:
            own[limit] = value


def _with_pending(data: str, name: str, own: dict[str, str]) -> dict[str, str]:
    """A topic's own limits as they will be when the router has carried out what it has been asked."""
    for request in requests.waiting(data):
        if request.verb == requests.SET and request.topic == name:
            _apply(own, request.limits)
    return own


# --- show --------------------------------------------------------------------------------------------------------


def show(
    name: Annotated[str, _NAME],
    as_json: Annotated[bool, typer.Option("--json", help="One object, for programs.")] = False,
) -> None:
    """Show a topic: its limits and where each comes from, and what there is of each partition."""
    settings = load()
    _existing(settings, name)
    found = describe(settings, name)
    if as_json:
        print(json.dumps(found))
        return
    since = "pending" if found["from_seq"] is None else f"in force from seq {found['from_seq']}"
    print(f"topic {name}: {found['partitions']} partition(s), {since}")
    limits = Table("limit", "value", "from", box=None, pad_edge=False, header_style="bold")
    for limit, row in found["limits"].items():
        limits.add_row(limit, _text(limit, row["value"]), row["from"])
    logs = Table("partition", box=None, pad_edge=False, header_style="bold")
    for title in ("messages", "bytes", "first offset", "last offset"):
        logs.add_column(title, justify="right")
    for number, row in enumerate(found["logs"]):
        last = "" if row["last_offset"] is None else f"{row['last_offset']:,}"
        logs.add_row(str(number), f"{row['messages']:,}", f"{row['bytes']:,}", f"{row['first_offset']:,}", last)
    out.print(limits)
    out.print(logs)


def describe(settings: Settings, name: str) -> dict[str, Any]:
    """A topic, ready for JSON; null: no limit, no message."""
    declared = topics.read(settings.data, name)
    pending = _with_pending(settings.data, name, dict(declared.limits))
    limits = Limits.of(settings).but(pending)
    rows = {}
    for limit in LIMITS:
        value = getattr(limits, limit)
        source = _source(limit, pending, limits)
        if pending.get(limit) != declared.limits.get(limit):
            source += ", when the router has taken it up"
        rows[limit] = {"value": None if value in (0, float("inf")) else value, "from": source}
    logs = [_log(settings.data, name, number) for number in range(declared.partitions)]
    return {
        "name": name,
        "partitions": declared.partitions,
        "from_seq": declared.from_seq,
        "limits": rows,
        "messages": sum(log["messages"] for log in logs),
        "bytes": sum(log["bytes"] for log in logs),
        "logs": logs,
    }


def _source(limit: str, own: dict[str, str], limits: Limits) -> str:
    if limit in own:
        return "topic.toml"
    if limit == "cleanup":
        return "default"
    is_table = limits.cleanup == "compact" and limit.startswith("retention")
    return "cleanup=compact: settings do not count" if is_table else _ENV[limit]


def _log(data: str, name: str, number: int) -> dict[str, int | None]:
    log = reader.partition(data, name, number)
    end = log.end_offset()  # first: what retention takes in between is then seen as taken
    first = min(log.first_offset, end)
    nbytes = sum(each.size for each in survey(f"{data}/topics/{name}/{number}"))
    last = end - 1 if end > first else None
    return {"messages": end - first, "bytes": nbytes, "first_offset": first, "last_offset": last}


def _text(limit: str, value: str | float | None) -> str:
    """A limit as a person writes it."""
    if value is None:
        return "none" if limit == "retention_bytes" else "never"
    if isinstance(value, str):
        return value
    units = _BYTES if limit.endswith("bytes") else _AGES
    unit, size = next((unit, size) for unit, size in units if value % size == 0 or size < 1)
    return f"{value / size:,.0f}{unit}"


# --- delete ------------------------------------------------------------------------------------------------------


def delete(
    name: Annotated[str, _NAME],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a topic with its records, for good. Its queue files go at once, and their space is free.

    The WAL is never rewritten: it keeps the records until its own retention takes them, and no rebuild brings them back.
    A message that comes later makes the topic anew; its offsets go on.
    """
    settings = load()
    if name.startswith("__"):
        raise ConfigError(f"topic {name}: is KMQ's own and cannot be deleted")
    _existing(settings, name)
    found = describe(settings, name)
    what = f"topic {name}: {found['messages']:,} messages, {found['bytes']:,} bytes, {found['partitions']} partition(s)"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{what}: give --yes to delete it; there is no terminal to ask on")
        typer.confirm(f"{what}. Delete it for good?", abort=True)
    request = requests.lay_down(settings.data, requests.DELETE, name, {})
    if not _is_carried_out(settings, request):
        print(f"{what}; deleted when the router has taken it up: at the next kmq up, if it is down")
        return
    if name in topics.names(settings.data):
        if topics.load(settings.data, name)[1] == found["from_seq"]:
            raise KmqError(f"topic {name}: was not deleted; the log of the broker says why (event request_refused)")
        what += "; a message has made it anew"
    print(f"{what}: deleted, and their space is free. The WAL keeps the messages until its retention takes them")


def add_to(app: typer.Typer) -> None:
    """Make these commands of `kmq topics`."""
    app.command(
        "set",
        epilog=_examples(
            "kmq topics set orders retention_bytes=10GiB retention_age=30d",
            "kmq topics set orders --unset retention_age",
            "kmq topics set orders cleanup=compact",
        ),
    )(set_limits)
    app.command("show", epilog=_examples("kmq topics show orders", "kmq topics show orders --json"))(show)
    app.command("delete", epilog=_examples("kmq topics delete audit --yes"))(delete)
