"""`kmq groups …`: look at consumer groups, move their offsets, delete them, through the HTTP API of the gateway."""

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kmq.cli.elsewhere import ask
from kmq.cli.output import examples, print_table
from kmq.errors import ConfigError, KmqError

groups_app = typer.Typer(
    no_args_is_help=True,
    help="Consumer groups: how far they are, who their members are; move their offsets, delete them.",
    epilog=examples("kmq groups list", "kmq groups describe report"),
)

_GROUP = Annotated[str, typer.Argument(help="A group; see kmq groups list.")]
_JSON = Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")]


def _group(name: str) -> Any:
    return ask("GET", f"/api/groups/{quote(name, safe='')}", group=name)


@groups_app.command("list", epilog=examples("kmq groups list", "kmq groups list --json"))
def list_all(as_json: _JSON = False) -> None:
    """List the groups: state, generation, members, and in how many partitions they have committed."""
    rows = ask("GET", "/api/groups")
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("no groups yet; one begins with: kmq consume <topic> --group <name>")
        return
    names = "group", "state", "generation", "members", "committed"
    columns = "group", "state", ">generation", ">members", ">partitions committed"
    print_table(columns, ([row[name] for name in names] for row in rows))


@groups_app.command("describe", epilog=examples("kmq groups describe report", "kmq groups describe report --json"))
def describe(group: _GROUP, as_json: _JSON = False) -> None:
    """Show a group: how far it is in each partition, who reads it, and how much it lags behind."""
    found = _group(group)
    if as_json:
        print(json.dumps(found))
        return
    protocol = f", {found['protocol']}" if found["protocol"] else ""
    print(f"group {group}: {found['state']}, generation {found['generation']}{protocol}")
    owners = {(place["topic"], place["partition"]): row for row in found["members"] for place in row["assignment"]}
    rows = []
    for row in found["partitions"]:
        owner = owners.get((row["topic"], row["partition"]))
        committed = "-" if row["committed"] is None else row["committed"]
        member = f"{owner['id']} ({owner['host']})" if owner else "-"
        numbers = committed, row["end"], row["lag"], f"{row['lagSeconds']:,.1f}"
        rows.append((row["topic"], str(row["partition"]), *numbers, member))
    print_table(("topic", ">partition", ">committed", ">end", ">lag", ">lag seconds", "member"), rows)
    for row in found["partitions"]:
        if row.get("overtaken"):
            text = f"{row['overtaken']:,} messages were deleted before the group had read them"
            print(f"{row['topic']}/{row['partition']}: {text}, since the gateway's start")


@groups_app.command(
    "reset",
    epilog=examples(
        "kmq groups reset report --topic test --to earliest --dry-run",
        "kmq groups reset report --topic test --to latest",
        "kmq groups reset report --topic test --to 1h",
    ),
)
def reset(
    group: _GROUP,
    topic: Annotated[str, typer.Option("--topic", help="The topic whose offsets move, in all its partitions.")],
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, an offset, or a time such as 10m or 2026-11-23T12:00.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
) -> None:
    """Move the committed offsets of a group that has no members now."""
    partitions = ask("GET", f"/api/admin/topics/{quote(topic, safe='')}", topic=topic)["partitions"]
    before = {}
    if group in {row["group"] for row in ask("GET", "/api/groups")}:
        found = _group(group)
        if found["members"]:
            raise KmqError(f"group {group}: has {len(found['members'])} members; end them first")
        before = {row["partition"]: row["committed"] for row in found["partitions"] if row["topic"] == topic}
    offsets = [{"partition": row["partition"], "offset": _target(topic, row, to)} for row in partitions]
    for each in offsets:
        was = before.get(each["partition"])
        print(f"{topic}/{each['partition']}: {'nothing committed' if was is None else was} -> {each['offset']}")
    if dry_run:
        print("nothing was changed")
        return
    ask("POST", f"/api/topics/{quote(topic, safe='')}/seek", {"group": group, "to": {"offsets": offsets}})


def _target(topic: str, partition: dict[str, int], to: str) -> int:
    """Return the offset in one partition that `to` means, never outside the partition. Raises ConfigError."""
    from kmq.log.show import parse_time

    start, end = partition["startOffset"], partition["endOffset"]
    if to in ("earliest", "latest"):
        return start if to == "earliest" else end
    if to.isascii() and to.isdigit():
        return min(max(int(to), start), end)
    try:
        micros = parse_time(to)
    except (ConfigError, OverflowError, ValueError):
        text = f"--to {to!r}: must be earliest, latest, an offset, or a time such as 10m or 2026-11-23T12:00"
        raise ConfigError(text) from None
    query = f"partition={partition['partition']}&timestamp={max(0, -(-micros // 1000))}&maxMessages=1&maxBytes=1"
    found = ask("GET", f"/api/topics/{quote(topic, safe='')}/consume?{query}")
    at = [*found["messages"], *found["positions"]][0]["offset"]
    return min(max(int(at), start), end)


@groups_app.command(
    "delete", epilog=examples("kmq consume test --group trial --count 1", "kmq groups delete trial --yes")
)
def delete(
    group: _GROUP,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget a group that has no members now, with its committed offsets."""
    if not yes:
        typer.confirm(f"Forget group {group} and its committed offsets?", abort=True)
    ask("DELETE", f"/api/groups/{quote(group, safe='')}", group=group)
    print(f"group {group}: forgotten")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(groups_app, name="groups")
