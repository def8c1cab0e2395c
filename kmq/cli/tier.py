"""`kmq tier …`: the copy of the WAL in KMQ_TIER, and a data directory that was put back from an older copy (`fork`)."""

import json
import os
import time
from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any

import typer

from kmq.broker.stats import TIER
from kmq.cli.output import counting, examples, existing_data, is_wanted, print_table, table
from kmq.config import terminal
from kmq.config.settings import Settings, load
from kmq.errors import EXIT_FAILED, ConfigError
from kmq.log import identity
from kmq.log.rows import TierFile, TierRow, cached_path, full_key
from kmq.repair.objects import NO_TIER, TierAccess
from kmq.tier import objects
from kmq.tier.cache import TierCache
from kmq.tier.commits import CommitLine, CommitLog, DamagedError, TierState
from kmq.tier.store import MissingError, Store, open_store
from kmq.tier.turn import DIRECTORY, Leadership, Nonces, check_is_whole, claim_line, compare

tier_app = typer.Typer(
    no_args_is_help=True,
    help="The copy of the WAL off this machine, in KMQ_TIER; and a data directory that was put back from a copy.",
    epilog=examples("kmq tier status", "kmq tier verify --deep", "kmq tier fork --dry-run"),
)
_INSTALL_S, _POLL_S = 60.0, 0.1  # longest wait for the router
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _open() -> tuple[Settings, Store, CommitLog]:
    """Return the store and the commits of this directory's lineage, read to the end."""
    settings = load()
    if not settings.tier:
        raise ConfigError("KMQ_TIER is not set; set it to s3://<bucket>/<prefix> or file:///<directory>")
    data = existing_data()
    store = open_store(settings.tier)
    commits = CommitLog(store, identity.lineage(data), f"{identity.read(data, 'id')}@{os.uname().nodename}")
    check_is_whole(data, commits.read())
    return settings, store, commits


def access(settings: Settings) -> TierAccess:
    """Return what `kmq verify --repair` needs of KMQ_TIER, which is opened once something is needed of it."""
    if not settings.tier:
        return NO_TIER

    @cache
    def opened() -> tuple[Store, TierCache]:
        store = open_store(settings.tier)
        return store, TierCache(settings.data, store, settings.tier_cache)

    checked: set[str] = set()  # what the gateway has left there may be damaged, so it is fetched anew

    def fetch(directory: str, life: int, row: TierRow) -> None:
        path = os.path.dirname(cached_path(directory, life, row))
        try:
            if path not in checked:
                opened()[1].remove(path)
            opened()[1].fetch(directory, life, row)
            checked.add(path)
        except MissingError as err:  # the store answers, and has not lost all
            raise objects.ObjectError(str(err)) from err

    def logs() -> Mapping[tuple[str, int], TierFile]:
        state = CommitLog(opened()[0], identity.lineage(settings.data), "").read()
        check_is_whole(settings.data, state)
        return state.logs

    return TierAccess(fetch, logs)


@tier_app.command(epilog=examples("kmq tier status", "kmq tier status --json"))
def status(as_json: _Json = False) -> None:
    """Show how far the copy is, who writes it, and why nothing is copied if that is so."""
    from kmq.broker.status import page_of

    settings, _, commits = _open()
    state, page = commits.state, page_of(settings)
    row = page.rows[TIER] if page is not None else None
    try:
        with open(f"{settings.data}/{DIRECTORY}/status", encoding="utf-8") as file:
            words = file.read().strip()
    except FileNotFoundError:
        words = ""
    shown: dict[str, Any] = {
        "url": settings.tier,
        "lineage": commits.lineage,
        "commits": state.number,
        "last_commit": float(state.ts) if state.ts else None,
        "writer": state.claim.writer if state.claim else None,
        "first_seq": state.wal_first,
        "last_seq": state.wal_end - 1,
        "objects": len(state.rows()),
        "bytes": sum(each.number("size") for each in state.rows()),
        "partitions": len({log.log for log in state.logs.values() if log.rows}),
        "rows": len(rows := [each for log in state.logs.values() for each in log.rows]),
        "row_bytes": sum(each.nbytes for each in rows),
        "behind_bytes": row.behind_bytes if row is not None else 0,
        "age": page.tier_lacks()[1] if page is not None else 0.0,
        "problem": words,
    }
    if as_json:
        print(json.dumps(shown))
        return
    for name, value in shown.items():
        if value not in (None, ""):
            print(f"{name:12} {value}")


@tier_app.command("ls", epilog=examples("kmq tier ls", "kmq tier ls orders", "kmq tier ls --json"))
def list_objects(
    topic: Annotated[str, typer.Argument(help="Only those of this topic.")] = "", as_json: _Json = False
) -> None:
    """List the objects in force: the WAL, old records of topics, whole tables, small files."""
    _, _, commits = _open()
    found = [each for each in commits.state.rows() if topic in ("", each.name.rpartition("/")[0])]
    rows = [_shown(commits.lineage, each) for each in found]
    if as_json:
        print(json.dumps(rows))
        return
    made = table("what", "from", "to", ">bytes", ">stored", "key")
    made.columns[-1].overflow = "fold"  # a key can be pasted whole
    for row in rows:
        made.add_row(row["what"], row["from"], row["to"], f"{row['bytes']:,}", f"{row['size']:,}", row["key"])
    terminal.console().print(made)


def _shown(lineage: str, row: CommitLine) -> dict[str, Any]:
    values = row.values
    first, last = values.get("first", values.get("base", "")), values.get("last", values.get("end", ""))
    if row.verb == "add":
        last = str(row.number("next") - 1)
    sizes = {"bytes": row.number("bytes"), "size": row.number("size")}
    what = " ".join(filter(None, [row.verb, row.name]))
    return {"what": what, "from": first, "to": last, **sizes, "key": full_key(lineage, values["key"])}


@tier_app.command(epilog=examples("kmq tier verify", "kmq tier verify --deep"))
def verify(
    deep: Annotated[bool, typer.Option("--deep", help="Read every object and compare it with its commit.")] = False,
) -> None:
    """Check that each object that counts is there; with --deep, that it is what its commit says. Exit code 1 if not."""
    _, store, commits = _open()
    faults = 0
    for row in commits.state.rows():
        if fault := _fault(store, commits.lineage, row, deep):
            faults += 1
            print(f"{row.what}: {fault}")
    state: TierState = commits.state
    print(f"{len(state.rows())} objects up to seq {state.wal_end - 1}: {faults or 'no'} damaged or missing")
    if faults:
        raise typer.Exit(EXIT_FAILED)


@tier_app.command(epilog=examples("kmq tier fetch orders", "kmq tier fetch orders --partition 3"))
def fetch(
    topic: Annotated[str, typer.Argument(help="A topic with old records in KMQ_TIER; see kmq tier ls.")],
    partition: Annotated[int | None, typer.Option("--partition", help="Only this partition.")] = None,
) -> None:
    """Make old records of a topic local: they come back to this disk, if there is room for all of them.

    The store keeps them until retention deletes them. The broker may be up or
    down; if it is down, its next start finishes. A command that was killed is
    run again, and fetches what is missing.
    """
    from kmq.log import topics
    from kmq.tier import fetch as fetching

    settings = load()
    data = existing_data()
    if topic not in topics.names(data):
        raise topics.unknown(topic, topics.names(data))
    limits, count = fetching.limits_of(settings, data, topic), topics.read(data, topic).partitions
    if partition is not None and not 0 <= partition < count:
        raise ConfigError(f"topic {topic}: has partitions 0 to {count - 1}")
    numbers = [*range(count)] if partition is None else [partition]
    planned = [fetching.plan(data, topic, number, limits.segment_bytes) for number in numbers]
    parts = [part for of_partition in planned for part in of_partition]
    if parts:
        if not settings.tier:
            raise ConfigError("KMQ_TIER is not set: there is no store to fetch from")
        for of_partition in planned:
            fetching.check_limits(data, topic, limits, of_partition, time.time())
        fetching.check_room(settings, sum(part.nbytes for part in parts))
        with counting("fetched {task.completed:,.0f} bytes") as progress:
            check = partial(fetching.check_room, settings)
            fetching.fetch(data, open_store(settings.tier), parts, progress, check)
    is_installed = _are_installed(settings, topic, numbers)
    nbytes = sum(part.nbytes for part in parts)
    print(
        f"topic {topic}: {nbytes:,} bytes were fetched"
        + ("" if is_installed else "; the router puts them in place when it is ready, see kmq topics show")
    )


def _are_installed(settings: Settings, topic: str, numbers: list[int]) -> bool:
    """Wait for the router. Return False if it is not there, or does not come to it."""
    from kmq.broker.status import collect
    from kmq.log.fetched import waiting_of

    deadline = time.monotonic() + _INSTALL_S
    while any(waiting_of(settings.data, topic, number) for number in numbers):
        if time.monotonic() > deadline or not collect(settings).ready:
            return False
        time.sleep(_POLL_S)
    return True


def _fault(store: Store, lineage: str, row: CommitLine, deep: bool) -> str:
    """Return what is wrong with an object; "" if nothing is."""
    key = full_key(lineage, row.values["key"])
    try:
        if not deep:
            next(iter(store.get(key)), b"")
            return ""
        pieces = objects.CheckedPieces(store.get(key), key, row.number("size"), row.values["sha256"])
        nbytes = sum(map(len, objects.unpack(pieces, key)))
        return "" if nbytes == row.number("bytes") else f"{key}: has {nbytes} bytes of lines"
    except MissingError:
        return f"{key}: is missing"
    except objects.ObjectError as err:
        return str(err)


@tier_app.command(epilog=examples("kmq tier claim --yes"))
def claim(
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it only say what it would do.")] = False,
) -> None:
    """Let this directory write the copy from now on, although another one has claimed it, which is gone for good.

    Refused (65) if the histories differ: then this directory is an older state, or went on elsewhere.
    """
    settings, _, commits = _open()
    state = commits.state
    if state.successor:
        raise DamagedError(f"the lineage {commits.lineage} has ended: it was restored as {state.successor}")
    compare(settings.data, state.wal)
    nonces = Nonces(settings.data)
    other = state.claim.writer if state.claim else "nobody"
    if state.claim is not None and state.claim.nonce in nonces.found:
        print(f"this directory has the claim already (commit {state.claim.number})")
        return
    when = f", last commit {state.number} at {state.ts}" if state.number else ""
    if not yes:
        print(f"{other} has the claim{when}; if it is gone for good: kmq tier claim --yes")
        raise typer.Exit(EXIT_FAILED)
    data_id, shard = identity.read(settings.data, "id"), settings.shard
    leadership = Leadership(settings.instance, data_id, shard) if shard else None
    epoch = leadership.check() if leadership is not None else 0
    nonce = nonces.next("", is_taken_over=True)
    commits.claim(claim_line(data_id, leadership, epoch), nonce)
    print(f"claimed by commit {commits.state.number}, after {other}{when}; kmq.tier goes on within a minute")


@tier_app.command(epilog=examples("kmq tier fork --dry-run", "kmq tier fork --data restored --yes"))
def fork(
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="The data directory; default: KMQ_DATA.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: _Json = False,
) -> None:
    """Continue with a copy that was put back, and give no offset out twice.

    The broker is down. What it acknowledged after the copy was made is gone,
    but consumers may have read it. So new records get seqs and offsets far
    above all that were given out, and consumers skip nothing. The directory
    gets a new id and lineage. A command that was killed is run again.
    """
    from kmq.broker.data_directory import broker_is_down
    from kmq.broker.supervisor import is_data
    from kmq.logfmt import Logger
    from kmq.router import fork as forking

    settings = load(dict(os.environ) | {"KMQ_DATA": data}) if data else load()
    directory = settings.data
    if not is_data(directory):
        raise ConfigError(
            f"{os.path.abspath(directory)} is no data directory; give the one that was put back: --data DIR"
        )
    with broker_is_down(directory, settings.pipes, "fork"):
        made = forking.begun(directory) or forking.plan(directory)
        what = (
            f"{directory}: the copy ends with seq {made.last_seq}; new records get seq {made.next_seq} and offset"
            f" {made.offset} or higher, under a new id"
        )
        if not is_wanted(what, dry_run, yes):
            return
        found = forking.carry_out(directory, made, settings, Logger("fork"))
    if as_json:
        partitions = [row._asdict() for row in found]
        print(json.dumps({"id": made.id, "next_seq": made.next_seq, "partitions": partitions}))
        return
    print(f"{directory}: forked; its id and lineage are {made.id}, its next seq is {made.next_seq}")
    if found:
        columns = "topic", ">partition", ">records end at", ">goes on at"
        print_table(columns, ([row.topic, *map(str, row[1:])] for row in found))


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(tier_app, name="tier")
