"""`kmq redrive`: send the records of a queue through the broker again, under new routing keys."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kmq.cli.data import existing_data
from kmq.cli.helptext import examples
from kmq.cli.obstacle import obstacle
from kmq.cli.options import grouped
from kmq.cli.produce import line_sender
from kmq.cli.progress import counted
from kmq.client.lines import Patience
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError
from kmq.message import record

if TYPE_CHECKING:
    from kmq.deadletters import redrive as rules


class Selection(NamedTuple):
    """Which records to send again."""

    key: Annotated[str, typer.Option("--key", help="Only records whose key matches this glob.")] = "*"
    from_seq: Annotated[int, typer.Option("--from-seq", help="Only records with this seq or a later one.")] = 1
    dropped: Annotated[
        bool,
        typer.Option(
            "--dropped",
            help="Read from the WAL the records that drop_oldest dropped from the queue; without a topic, from all"
            " queues. Implies --idempotent.",
        ),
    ] = False

    max_replays: Annotated[
        int, typer.Option("--max-replays", min=0, help="Dead letters that came back so often stay.")
    ] = 3


class Sending(NamedTuple):
    """How the selected records are sent."""

    idempotent: Annotated[
        bool,
        typer.Option(
            "--idempotent",
            help="Store each record once, however often the same redrive runs; wait until all are on disk.",
        ),
    ] = False
    name: Annotated[
        str,
        typer.Option("--name", help="Name of an idempotent redrive: under another name it stores all records again."),
    ] = ""
    rate: Annotated[float, typer.Option("--rate", min=0, help="Maximum messages per second; 0: no limit.")] = 0


@grouped
def redrive(
    *,
    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not changed.")] = "",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="New routing key; may use {routing_key}, {topic}, {key}, or {origin}, where a dead letter came from."
            " With --dropped the default is the old key.",
        ),
    ] = None,
    selection: Selection,
    sending: Sending,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
) -> None:
    """Send the records of a queue through the broker again, under new routing keys, as new messages.

    See `kmq pipeline run redrive` for many brokers, selection and new keys by SQL.
    """
    from kmq.deadletters import redrive as rules

    settings = load()
    if not (topic or selection.dropped) or (to is None and not selection.dropped):
        raise ConfigError("give the topic to read and --to, the new routing key; or --dropped")
    template = "{routing_key}" if to is None else to
    source = _open(existing_data(), topic, selection.dropped)
    chosen = rules.Selected(source, template, selection.key, selection.from_seq, selection.max_replays)
    total = _check(chosen, _print_change if dry_run else None)
    if chosen.stayed:
        print(f"kmq: {chosen.stayed} stay: their payload was cut, or they came back too often", file=sys.stderr)
    if dry_run:
        print(f"would redrive {total} {source.text}")
    elif sending.idempotent or selection.dropped:
        repeated = _send_once(settings, chosen, sending)
        print(f"redriven {total} {source.text}" + (f"; {repeated} of them were stored before" if repeated else ""))
    else:
        _send(settings, chosen, sending.rate)
        print(f"redriven {total} {source.text}")


def _open(data: str, topic: str, dropped: bool) -> "rules.Queue | rules.Dropped":
    """Return the records to read, as they are now. Later ones do not count: sent records may enter the same queue."""
    from kmq.deadletters import redrive as rules

    if not dropped:
        return rules.Queue(data, topic)
    found = rules.Dropped(data, topic)
    if found.never_stored:
        print(f"kmq: {found.never_stored} were dropped by ring framed, before the WAL: gone for good", file=sys.stderr)
    if found.retired:
        print(f"kmq: {found.retired} are no longer in the WAL: retention deleted them", file=sys.stderr)
    return found


def _check(chosen: "rules.Selected", show: "Callable[[rules.Record, bytes], None] | None") -> int:
    """Count the records. Raises ConfigError at the first bad new key, before any record is sent."""
    total = 0
    for found, new_key in chosen:
        total += 1
        if show:
            show(found, new_key)
    return total


def _print_change(found: "rules.Record", new_key: bytes) -> None:
    old_key = record.routing_key_of(found.line)
    print(f"{old_key.decode(errors='replace')} -> {new_key.decode(errors='replace')}")


def _send_once(settings: Settings, chosen: "rules.Selected", sending: Sending) -> int:
    """Send the records under producer names, and return how many of them were stored before."""
    from kmq.client.producer import Producer
    from kmq.deadletters import letters
    from kmq.deadletters import redrive as rules
    from kmq.deadletters.letters import Pace

    def connect(name: str) -> Producer:
        return Producer.local(producer=name, first_id=0)

    pace = Pace(sending.rate)
    if chosen.template == rules.ORIGIN and not sending.name:
        return letters.send(counted(rules.sent_back(chosen, settings.data), "redriving"), connect, pace)
    redrive_id = (sending.name, chosen.template, chosen.key_glob, str(chosen.from_seq))
    return rules.send(counted(rules.numbered(chosen, settings.data, *redrive_id), "redriving"), connect, pace)


def _send(settings: Settings, chosen: "Iterable[tuple[rules.Record, bytes]]", rate: float) -> None:
    """Send the records without acknowledgement."""
    from kmq.deadletters import redrive as rules
    from kmq.deadletters.letters import Pace, blocks

    lines = (rules.as_sent(found.line, new_key) for found, new_key in chosen)
    with line_sender(settings, Patience(lambda: obstacle(settings))) as sender:
        for block in blocks(counted(lines, "redriving"), Pace(rate)):
            sender.send(block)
            if rate:
                sender.flush()


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(
        epilog=examples(
            "kmq redrive dead --to 'test.recovered_{key}' --dry-run",
            "kmq redrive dead --to 'test.recovered_{key}' --key 'letter_*' --from-seq 1",
            "kmq redrive dead --to 'test.{key}' --idempotent --rate 1000",
            "kmq redrive --dropped --dry-run",
        )
    )(redrive)
