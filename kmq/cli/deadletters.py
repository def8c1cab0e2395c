"""`kmq dlq …`: list dead letters, show one, send them back to their topics. `kmq redrive`: send any queue again.

`ls` and `show` read the files, so they also work while the broker is down. Nothing here needs Java.
"""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import quote

import typer

from kmq.cli.elsewhere import ask, elsewhere, need_files
from kmq.cli.output import counted, examples, existing_data, grouped, print_table
from kmq.config import terminal
from kmq.errors import ConfigError, KmqError
from kmq.message import record
from kmq.message.text import MAX_REPLAYS

if TYPE_CHECKING:
    from kmq.deadletters.selection import Dropped, Filter, Found, QueueSource, StoredRecord


dlq_app = typer.Typer(
    no_args_is_help=True,
    help="Dead letters: list them, look at one, send them back to the topics they came from.",
    epilog=examples("kmq dlq ls", "kmq dlq show test", "kmq dlq replay test --dry-run"),
)

_MOST_ERROR = 60  # characters in a table
_REFUSED, _NAMED = "refused", "refused: "  # a refused letter stays for a reason that begins so
_TOPIC = Annotated[str, typer.Argument(help="The topic of dead letters, or the one they came from.")]
_FILTERS = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        help="<field>=<glob>: only letters whose key, value, error, group, topic, attempts, replays, seq or header matches;"
        " may be given several times, and then all must match. seq=<seq>,<seq> names up to 100 letters.",
    ),
]
_JSON = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def _filters(texts: list[str] | None) -> "list[Filter]":
    from kmq.deadletters.selection import Filter

    return [Filter.parse(text) for text in texts or ()]


def _find(data: str, name: str) -> str | None:
    """Return the dead letter topic. Without letters, print that and return None."""
    from kmq.deadletters.selection import find_topic

    topic = find_topic(data, name)
    if topic is None:
        print(f"{name}: no dead letters")
    return topic


# --- ls --------------------------------------------------------------------------------------------------------------


@dlq_app.command(
    "ls", epilog=examples("kmq dlq ls", "kmq dlq ls test", "kmq dlq ls test --filter 'error=*timeout*' --max 20 --json")
)
def ls(
    topic: Annotated[str, typer.Argument(help="The topic of dead letters, or the one they came from.")] = "",
    filters: _FILTERS = None,
    most: Annotated[int, typer.Option("--max", min=0, help="At most so many; 0: all.")] = 100,
    as_json: _JSON = False,
) -> None:
    """List the topics of dead letters, or the letters of one: place, origin, how often tried and sent back, error."""
    chosen = _filters(filters)
    if elsewhere() is not None:
        if not topic or chosen:
            need_files("dlq ls without a topic, or with --filter")
        _list_elsewhere(topic, as_json)
        return
    data = existing_data()
    if not topic:
        _list_topics(data, as_json)
        return
    found = _find(data, topic)
    if found is not None:
        _list_letters(data, found, chosen, most, as_json)


def _list_elsewhere(topic: str, as_json: bool) -> None:
    """Show the letters by reason, from the HTTP API."""
    found = ask("GET", f"/api/topics/{quote(topic)}/letters", topic=topic)
    if as_json:
        for row in found["groups"]:
            print(json.dumps(row, ensure_ascii=False))
        return
    print(f"{found['topic']}: {found['total']:,} letters" + (", and older ones" if found["more"] else ""))
    rows = ((row["count"], _time(str(row["last_at"])), row["reason"][:_MOST_ERROR]) for row in found["groups"])
    print_table((">letters", "newest", "error"), rows)


def _list_topics(data: str, as_json: bool) -> None:
    from kmq.log import topics
    from kmq.log.bounds import measure
    from kmq.message.letters import is_dead_letters

    rows = [
        (name, sum(size.messages for size in measure(data, name, partitions)))
        for name, partitions, _ in topics.listing(data)
        if is_dead_letters(name)
    ]
    if as_json:
        for name, count in rows:
            print(json.dumps({"topic": name, "letters": count}))
        return
    if not rows:
        print("no topics of dead letters (dead, <topic>.dlq)")
        return
    print_table(("topic", ">letters"), rows)


def _list_letters(data: str, topic: str, filters: "list[Filter]", most: int, as_json: bool) -> None:
    from kmq.deadletters.selection import all_of

    every = all_of(data, topic, filters)
    letters = terminal.while_read(islice(every, most or None))
    if as_json:
        for found in letters:
            print(json.dumps(_as_dict(found), ensure_ascii=False))
        _report_more(every)
        return
    if rows := [[*_row(found)] for found in letters]:
        print_table(("letter", "origin", "key", ">attempts", ">replays", "error"), rows)
    else:
        print(f"{topic}: no letters that match")
    _report_more(every)


def _report_more(rest: "Iterator[Found]") -> None:
    if terminal.is_read() and next(rest, None) is not None:
        print("kmq: there are more letters; --max 0 lists all", file=sys.stderr)


def _row(found: "Found") -> Iterator[str]:
    from kmq.message.letters import why_dead

    message, letter = found.message, found.letter
    yield f"{message.partition}@{message.offset}"
    yield letter.origin if letter else "-"
    yield "-" if message.key is None else message.key.decode(errors="replace")
    yield (letter.attempts if letter else "") or "-"
    yield str(letter.replays) if letter else "-"
    why = why_dead(message.line)
    yield why if len(why) <= _MOST_ERROR else f"{why[: _MOST_ERROR - 1]}…"


def _as_dict(found: "Found") -> dict[str, object]:
    letter = found.letter
    return {**found.message.as_dict(text=True), "letter": None if letter is None else letter._asdict()}


# --- show ------------------------------------------------------------------------------------------------------------


@dlq_app.command("show", epilog=examples("kmq dlq show test", "kmq dlq show test 0 --partition 0 --json"))
def show(
    topic: _TOPIC,
    offset: Annotated[int | None, typer.Argument(help="The offset of the letter; default: the newest letter.")] = None,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition of the letter.")] = 0,
    as_json: _JSON = False,
) -> None:
    """Show one dead letter: where it came from, why it is here, its headers and its value."""
    from kmq.deadletters.selection import all_of

    need_files("dlq show")
    data = existing_data()
    name = _find(data, topic)
    if name is None:
        return
    mine = (found for found in all_of(data, name) if found.record.partition == partition)
    if offset is not None:
        found = next((each for each in mine if each.record.offset == offset), None)
    else:
        found = max(mine, key=lambda each: each.record.offset, default=None)
    if found is None:
        raise KmqError(
            f"{name}/{partition}: no letter{'' if offset is None else f' at offset {offset}'}; see kmq dlq ls"
        )
    if as_json:
        print(json.dumps(_as_dict(found), ensure_ascii=False))
        return
    for title, text in _lines(found):
        print(f"{title:14}{text}".rstrip())
    print((found.message.value or b"").decode(errors="replace"))


def _lines(found: "Found") -> Iterator[tuple[str, str]]:
    message, letter = found.message, found.letter
    yield "letter", f"{message.topic}/{message.partition}@{message.offset}"
    if letter is not None:
        yield "origin", letter.origin
        yield "group", letter.group or "-"
        yield "error", letter.why
        yield "attempts", letter.attempts or "-"
        yield "first failure", _time(letter.first_failure)
        yield "last failure", _time(letter.last_failure)
        yield "replays", str(letter.replays)
        if letter.is_cut:
            yield "cut", "only the beginning of the value is here"
    yield "time", _time(str(message.timestamp))
    yield "key", "-" if message.key is None else message.key.decode(errors="replace")
    for name, value in message.headers:
        yield "header", name if value is None else f"{name}={value.decode(errors='replace')}"


def _time(seconds: str) -> str:
    try:
        return datetime.fromtimestamp(float(seconds)).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return "-"


# --- replay ----------------------------------------------------------------------------------------------------------


class ReplayOptions(NamedTuple):
    """Which letters go back, and how fast."""

    filters: _FILTERS = None
    rate: Annotated[float, typer.Option("--rate", min=0, help="Maximum messages per second; 0: no limit.")] = 0
    most: Annotated[int, typer.Option("--max", min=0, help="At most so many letters, the oldest first; 0: all.")] = 0
    max_replays: Annotated[int, typer.Option("--max-replays", min=0, help="Letters that came back so often stay.")] = (
        MAX_REPLAYS
    )


@dlq_app.command(
    "replay",
    epilog=examples(
        "kmq dlq replay test --dry-run",
        "kmq dlq replay test --filter 'error=*timeout*' --max 1000 --rate 100",
        "kmq dlq replay test --filter seq=1041,1043,1077",
        "kmq dlq replay test",
    ),
)
@grouped
def replay(
    topic: _TOPIC,
    sending: ReplayOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
) -> None:
    """Send dead letters back to the topics they came from, as new messages.

    The topic of the letters stays as it is. Each letter is sent back once,
    however often the command runs and whatever it selects; --max and
    --dry-run leave out those that were sent back before.
    """
    is_here = elsewhere() is None
    found = _replay(topic, sending, dry_run) if is_here else _ask_to_replay(topic, sending, dry_run)
    if found is None:
        return
    name, stayed = found["topic"], found["stayed"]
    refused = {reason: count for reason, count in stayed.items() if reason.startswith(_REFUSED)}
    parts = [f"{found['repeated']} were replayed before"] if found["repeated"] else []
    parts += [] if found["complete"] else ["more are left, with which the same replay goes on"]
    parts += [f"{count} stay: {reason}" for reason, count in stayed.items() if reason not in refused or not is_here]
    if is_here and found["strangers"]:
        where = f"kmq redrive {name} --to '<topic>.{{key}}'"
        parts.append(f"{found['strangers']} say nothing about an origin; send them where they belong with: {where}")
    what = f"would replay {found['would_replay']}" if dry_run else f"replayed {found['replayed']}"
    print(f"{what} of {name}" + "".join(f"; {part}" for part in parts))
    named = [reason.removeprefix(_NAMED) for reason in refused if reason.startswith(_NAMED)] if is_here else None
    _fail_if(sum(refused.values()), named)


def _replay(topic: str, sending: ReplayOptions, dry_run: bool) -> dict[str, Any] | None:
    """Send the letters of this directory back. Without letters, print that and return None."""
    from kmq.deadletters.selection import Selection, replay

    data = existing_data()
    name = _find(data, topic)
    if name is None:
        return None
    chosen = Selection.of_letters(data, name, _filters(sending.filters), sending.max_replays, sending.most)

    def shown() -> "Iterator[tuple[StoredRecord, bytes]]":
        for stored, new_key in terminal.while_read(chosen):
            print(f"{stored.partition}@{stored.offset} -> {new_key.decode(errors='replace')}")
            yield stored, new_key

    return replay(chosen, shown() if dry_run else counted(chosen, "replaying"), sending.rate, dry_run)


def _ask_to_replay(topic: str, sending: ReplayOptions, dry_run: bool) -> Any:
    if sending.max_replays != MAX_REPLAYS:
        need_files("dlq replay --max-replays")
    body = {"filter": sending.filters or [], "rate": round(sending.rate), "dryRun": dry_run}
    if sending.most:
        body["max"] = sending.most
    return ask("POST", f"/api/topics/{quote(topic)}/replay", body, topic=topic)


def _fail_if(refused: int, named: list[str] | None) -> None:
    """Raise KmqError if the broker has refused records. `named`: some of them, to be printed."""
    for each in named or ():
        print(f"kmq: {each}", file=sys.stderr)
    unnamed = 0 if named is None else refused - len(named)
    if refused:
        more = f"; {unnamed} of them are not named" if unnamed else ""
        raise KmqError(
            f"{refused} records were refused and stay where they are{more};"
            " too_long: raise KMQ_MAX_LINE, then run it again"
        )


# --- redrive ---------------------------------------------------------------------------------------------------------


class RedriveRecords(NamedTuple):
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
    ] = MAX_REPLAYS


class SendOptions(NamedTuple):
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
    selection: RedriveRecords,
    sending: SendOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
) -> None:
    """Send the records of a queue through the broker again, under new routing keys, as new messages.

    Each record is stored once, however often the same redrive runs: it may
    be killed and run again. --idempotent, once needed for this, changes
    nothing.

    See `kmq pipeline run redrive` for many brokers, selection and new keys by SQL.
    """
    from kmq.deadletters import redrive as rules
    from kmq.deadletters.selection import Selection, to_send

    if not (topic or selection.dropped) or (to is None and not selection.dropped):
        raise ConfigError("give the topic to read and --to, the new routing key; or --dropped")
    template = "{routing_key}" if to is None else to
    data = existing_data()
    source = _open(data, topic, selection.dropped)
    chosen = Selection(source, template, _accepts(selection), selection.max_replays)
    total = 0
    for stored, new_key in chosen:  # the first bad new key ends the command before any record is sent
        total += 1
        if dry_run:
            old_key = record.routing_key_of(stored.line)
            print(f"{old_key.decode(errors='replace')} -> {new_key.decode(errors='replace')}")
    if stayed := sum(chosen.stayed.values()):
        print(f"kmq: {stayed} stay: their payload was cut, or they came back too often", file=sys.stderr)
    if dry_run:
        print(f"would redrive {total} {source.text}")
        return
    is_back = template == rules.ORIGIN and not sending.name
    redrive_id = (sending.name, template, selection.key, str(selection.from_seq))
    records = counted(to_send(chosen, data, None if is_back else redrive_id), "redriving")
    sent = rules.send(records, sending.rate)
    before = f"; {sent.repeated} of them were stored before" if sent.repeated else ""
    print(f"redriven {total - sent.refused} {source.text}{before}")
    _fail_if(sent.refused, sent.named)


def _open(data: str, topic: str, dropped: bool) -> "QueueSource | Dropped":
    """Return the records to read, as they are now. Later records are left out, because sent ones may enter the same
    queue.
    """
    from kmq.deadletters.selection import Dropped, QueueSource, texts_of_lost

    if not dropped:
        return QueueSource(data, topic)
    found = Dropped(data, topic)
    for text in texts_of_lost(found.never_stored, found.retired):
        print(f"kmq: {text}", file=sys.stderr)
    return found


def _accepts(selection: RedriveRecords) -> "Callable[[StoredRecord], bool]":
    def accepts(stored: "StoredRecord") -> bool:
        if record.seq_of(stored.line) < selection.from_seq:
            return False
        return fnmatchcase((stored.key or b"").decode(errors="surrogateescape"), selection.key)

    return accepts


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(dlq_app, name="dlq")
    app.command(
        epilog=examples(
            "kmq redrive dead --to 'test.recovered_{key}' --dry-run",
            "kmq redrive dead --to 'test.recovered_{key}' --key 'letter_*' --from-seq 1",
            "kmq redrive dead --to 'test.{key}' --rate 1000",
            "kmq redrive --dropped --dry-run",
        )
    )(redrive)
