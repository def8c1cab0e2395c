"""`kmq restore`: brings a broker back from the copy that KMQ_TIER has."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from kmq.cli.output import confirm, counting, examples
from kmq.config.settings import Settings, load
from kmq.errors import BusyError, ConfigError, CorruptError
from kmq.log import identity
from kmq.logfmt import Logger
from kmq.tier.commits import CopySource
from kmq.tier.restore import Restore, age_s, check_target, find_source, settle
from kmq.tier.store import Store, StoreError, open_store

_LIVING_S = 3600.0  # a broker whose last commit is younger may still live
_WAIT_S = 5.0
_OF_SHARD = (
    "; now empty the directories of the other brokers, set a new KMQ_SHARD on all, start them, and begin the shard with"
    " kmq cluster init --from <this broker>"
)


def restore(
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL", help="The store: s3://bucket/prefix or file:///directory; default: KMQ_TIER."
        ),
    ] = "",
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="The directory to make; default: KMQ_DATA.")] = "",
    lineage: Annotated[str, typer.Option("--lineage", metavar="HEX", help="Which one, if the store has several.")] = "",
    drill: Annotated[
        bool, typer.Option("--drill", help="A rehearsal beside the living broker, which goes on and does not notice.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Also bring old records of topics back to this disk, all or none.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    if_empty: Annotated[
        bool,
        typer.Option(
            "--if-empty", help="Before a start: make a new directory if the store has nothing, else say what to do."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; the broker that made the copy is gone.")] = False,
) -> None:
    """Make a data directory of the copy in the store: all that was acknowledged up to a minute before the loss.

    The broker is down. The directory gets a new id. The broker that made the copy writes nothing there any more.
    """
    settings = load(dict(os.environ) | {"KMQ_DATA": data}) if data else load()
    url = source or settings.tier
    if not url:
        raise ConfigError("give the store with --from, or set KMQ_TIER")
    if if_empty:
        restore_if_empty(settings, url, yes, download)
        return
    check_target(settings.data)
    if settle(settings.data):
        print(f"{settings.data}: a restore that was interrupted is in place now")
        return
    store = open_store(url)
    found = find_source(store, lineage, _writer())
    if found is None:
        raise CorruptError(f"{url}: has no copy of a broker")
    if dry_run:
        print(f"{_said(found)}; nothing was changed")
        return
    if not drill:
        _ask(found, yes)
    _restore(store, found, settings, drill, download)


def restore_if_empty(settings: Settings, url: str, yes: bool = False, downloads: bool = False) -> None:
    """Leave a directory that has an id alone. Make an empty one a data directory, if the store has no copy.

    Raises CorruptError with the command to type if the store has a copy; with `yes` it is restored. While the store does
    not answer, wait: a broker that begins at offset 0 beside its own history would give offsets out twice.
    """
    if settings.shard or os.path.exists(f"{settings.data}/id"):  # an empty replica joins its shard, as ever
        return
    store, said = open_store(url), False
    while True:
        try:
            check_target(settings.data)
            if settle(settings.data):
                return
            found = find_source(store, "", _writer())
            break
        except StoreError as err:
            if not said:
                print(f"kmq: {url} does not answer ({err}); waits for it, because it may have a copy", file=sys.stderr)
            said = True
            time.sleep(_WAIT_S)
    if found is None:
        identity.open_data(settings.data)
        print(f"{settings.data}: {url} has no copy: a new data directory")
    elif yes:
        _restore(store, found, settings, downloads=downloads)
    else:
        raise CorruptError(
            f"{settings.data} is empty, and {_said(found)}; bring it back with: kmq restore --yes, or set another prefix in"
            " KMQ_TIER to begin anew"
        )


def _restore(
    store: Store, found: CopySource, settings: Settings, is_drill: bool = False, downloads: bool = False
) -> None:
    with counting("restored {task.completed:,.0f} bytes") as progress:
        made = Restore(store, found, settings, Logger("restore"), progress)
        made.run(is_drill, downloads)
    print(
        f"{settings.data}: restored up to seq {made.last_seq}, of {_time(found)}; its id and lineage are {made.id}"
        + ("; a drill: start it with another KMQ_INSTANCE, and without KMQ_TIER" if is_drill else "")
        + (_OF_SHARD if settings.shard and not is_drill else "")
    )
    for why in made.left:
        print(f"not downloaded: {why}; then kmq tier fetch")


def _ask(found: CopySource, yes: bool) -> None:
    """Ask if the broker that made the copy is gone, unless it has been silent for an hour."""
    if yes or age_s(found.state) > _LIVING_S:
        return
    claim = found.state.claim
    what = f"{claim.writer if claim else 'a broker'} has written the copy {age_s(found.state):.0f} s ago, and would be fenced"
    confirm(what, "restore if it is gone for good, or --drill to rehearse beside it", "Is it gone for good?", BusyError)


def _said(found: CopySource) -> str:
    state = found.state
    return (
        f"the store has the lineage {found.lineage} up to seq {state.wal_end - 1}, of {_time(found)}:"
        f" {len(state.rows())} objects with {found.nbytes:,} bytes of lines"
    )


def _time(found: CopySource) -> str:
    """Return when the last message of the copy was received; without a copy of the WAL, the time of the last commit."""
    state = found.state
    ts = state.wal[-1].values["ts"].partition("-")[2] if state.wal else state.ts
    return datetime.fromtimestamp(float(ts), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _writer() -> str:
    return f"restore@{os.uname().nodename}"


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(
        epilog=examples(
            "kmq restore --from file:///mnt/nfs/kmq --dry-run",
            "kmq restore --from s3://my-bucket/kmq --yes",
            "kmq restore --drill --data /tmp/drill",
            "kmq restore --drill --download --data /tmp/drill",
        )
    )(restore)
