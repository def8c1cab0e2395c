"""Disk commands of a shard, for an operator while the brokers are down: reset, detach.

    reset       moves the content into KMQ_DATA/reset-<time>/; the next start makes a new, empty replica
    detach      makes the directory a broker of its own: a new id, and a new lineage in the label of each index

Owner       The command. It holds the locks of the broker and of its logs.
Invariant   No start ever continues with a directory that is half reset or half detached. Until the command is done the
            file `replica` names no shard, so each start is refused (identity.py). Only the files that name the replica
            are deleted. The old rings are never read again, because the directory gets another id.
Crash       The file `replica` records which step was begun. The same command, run again, finishes it.
"""

import contextlib
import os
import re
import time
from itertools import count
from typing import NamedTuple

from kmq.errors import ConfigError
from kmq.files import make_directory, replace_file, sync_directory
from kmq.log import committed, gaps, wal
from kmq.replica.files import ReplicaFiles

_BEGUN = re.compile(r"(resetting|detaching) ([0-9a-z-]+)\n")
_STAYS = ("replica", "lost+found")  # `replica` stays until the end; lost+found belongs to the file system


class DirectoryState(NamedTuple):
    """What a directory knows about its shard. `begun`: the interrupted step and its argument; None: no step."""

    text: str  # what its owner should know before the command runs
    begun: tuple[str, str] | None = None


def look(data: str, shard: str) -> DirectoryState:
    """Return what a directory knows about its shard. Raises CorruptError, ConfigError if it is of another shard."""
    try:
        with open(f"{data}/replica", encoding="latin-1") as file:
            match = _BEGUN.fullmatch(file.read())
    except FileNotFoundError:
        raise ConfigError(f"KMQ_DATA={data!r}: is no replica of a shard: it has no file `replica`") from None
    if match is not None:
        return DirectoryState(f"{match[1]} it was interrupted, and goes on", (match[1], match[2]))
    files = ReplicaFiles(data, shard)
    end, shown = wal.last_stored(data)[0], committed.shown_seq(data)
    text = f"replica {files.identity.id} of the shard {shard}: records up to seq {end}"
    text += f", of which {end - shown} are not known to be committed" if end > shown else ", all committed"
    promised = files.promised
    if promised is None:
        return DirectoryState(f"{text}; it was never let in")
    role = "in" if files.identity.id in promised.isr else "not in"
    text += f"; {role} the ISR of version {promised.version.number}, epoch {promised.epoch}, the last it has promised"
    return DirectoryState(text)


def _begin(data: str, state: DirectoryState, what: str, argument: str) -> str:
    """Record on disk which step begins, and return its argument, or that of the interrupted run if there was one."""
    if state.begun is None:
        replace_file(f"{data}/replica", f"{what} {argument}\n".encode())
        return argument
    if state.begun[0] != what:
        raise ConfigError(f"KMQ_DATA={data!r}: {state.begun[0]} it was interrupted; run that again first")
    return state.begun[1]


def _finish(data: str) -> None:
    """Remove the record that makes each start fail."""
    os.unlink(f"{data}/replica")
    sync_directory(data)


def reset(data: str, state: DirectoryState) -> str:
    """Move all content aside, and return the directory that now has it."""
    if state.begun is not None:
        place = f"{data}/{state.begun[1]}"
    else:
        now = time.strftime("%Y%m%dt%H%M%Sz", time.gmtime())
        names = (f"{data}/reset-{now}-{number}" for number in count(1))
        place = next(name for name in names if not os.path.exists(name))
        make_directory(place)
        with open(f"{data}/replica", "rb") as file:
            replace_file(f"{place}/replica", file.read())
        sync_directory(data)
    _begin(data, state, "resetting", os.path.basename(place))
    for each in os.listdir(data):
        if each not in _STAYS and not each.startswith("reset-"):
            os.rename(f"{data}/{each}", f"{place}/{each}")
    sync_directory(place)
    sync_directory(data)
    _finish(data)
    return place


def detach(data: str, state: DirectoryState) -> str:
    """Make the directory a broker of its own, and return its new lineage."""
    lineage = _begin(data, state, "detaching", os.urandom(16).hex())
    gaps.name_records(data, lineage)
    for name in ("register", "committed"):  # these belong to the shard that it has left
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{data}/{name}")
    _finish(data)
    return lineage
