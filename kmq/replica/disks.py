"""What an operator does with the directories of a shard while their brokers are down: reset, detach, compare.

    reset       the content is moved into KMQ_DATA/reset-<time>/: the next start makes a new, empty replica
    detach      the directory becomes a broker of its own: a new id, and a new lineage in the label of each index
    compare     which ranges of seqs or offsets differ between directories

Owner       the command; it holds the locks of the broker and of its logs.
Invariant   No start ever goes on with a directory that is half reset or half detached: meanwhile its file `replica` names
            no shard, so each start is refused (identity.py). Nothing is deleted but what says whose replica it was.
            The old rings are never read again, because the directory gets another id.
Crash       The file `replica` says what was begun. The same command, run again, finishes it.
Memory      Compare reads one range of each log at once.
"""

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from kmq.errors import BusyError, ConfigError
from kmq.files import make_directory, replace_file, sync_directory
from kmq.links.ownership import FileLock, describe
from kmq.log import committed, identity, index, reader, topics, wal
from kmq.log.segment import within
from kmq.message import record
from kmq.replica.files import ReplicaFiles

_BEGUN = re.compile(r"(resetting|detaching) ([0-9a-z-]+)\n")
_STAYS = ("replica", "lost+found")  # `replica` to the end; the other one belongs to the file system
_STEP = 10_000  # records of a range


@contextlib.contextmanager
def broker_is_down(data: str, pipes: str) -> Iterator[None]:
    """Keep the broker of this directory down. Raises BusyError, naming the holder, if it runs."""
    os.makedirs(pipes, exist_ok=True)
    paths = [f"{pipes}/supervisor.owner", f"{pipes}/replica.owner"]
    paths += [f"{data}/{name}/.owner" for name in ("append", "topics") if os.path.isdir(f"{data}/{name}")]
    with contextlib.ExitStack() as held:
        for lock in map(FileLock, paths):
            if not lock.try_acquire(describe("cluster", data)):
                raise BusyError(f"{lock.path} is held by {lock.holder()}: the broker must be down; see: kmq down")
            held.callback(lock.release)
        yield


class DirectoryState(NamedTuple):
    """What a directory knows of its shard. `begun`: the step that was interrupted, and its argument; else None."""

    text: str  # what its owner should know before it goes
    begun: tuple[str, str] | None = None


def look(data: str, shard: str) -> DirectoryState:
    """Return what a directory knows of its shard. Raises ConfigError if it is no replica of it, CorruptError."""
    try:
        with open(f"{data}/replica", encoding="latin-1") as file:
            match = _BEGUN.fullmatch(file.read())
    except FileNotFoundError:
        raise ConfigError(f"KMQ_DATA={data!r}: is no replica of a shard: it has no file `replica`") from None
    if match is not None:
        return DirectoryState(f"{match[1]} it was interrupted, and goes on", (match[1], match[2]))
    files = ReplicaFiles(data, shard)
    end, known = wal.last_stored(data)[0], committed.shown_seq(data)
    text = f"replica {files.identity.id} of the shard {shard}: records up to seq {end}"
    text += f", of which {end - known} are not known to be committed" if end > known else ", all committed"
    promised = files.promised
    if promised is None:
        return DirectoryState(f"{text}; it was never let in")
    role = "in" if files.identity.id in promised.isr else "not in"
    text += f"; {role} the ISR of version {promised.version.number}, epoch {promised.epoch}, the last it has promised"
    return DirectoryState(text)


def _begin(data: str, state: DirectoryState, what: str, argument: str) -> str:
    """Note on disk what is begun, and return its argument: that of a run before, if one was interrupted."""
    if state.begun is None:
        replace_file(f"{data}/replica", f"{what} {argument}\n".encode())
        return argument
    if state.begun[0] != what:
        raise ConfigError(f"KMQ_DATA={data!r}: {state.begun[0]} it was interrupted; run that again first")
    return state.begun[1]


def _finish(data: str) -> None:
    """Take away what refuses each start."""
    os.unlink(f"{data}/replica")
    sync_directory(data)


def reset(data: str, state: DirectoryState) -> str:
    """Move all content aside, and return the directory that has it."""
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
    for top in ("append", "topics"):
        for directory, _, names in os.walk(f"{data}/{top}"):
            for path in (f"{directory}/{name}" for name in names if name.endswith(".idx")):
                _label(path, lineage)
    for name in ("lineage", "id"):
        replace_file(f"{data}/{name}", f"{lineage}\n".encode())
    for name in ("register", "committed"):  # of a shard that it has left
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{data}/{name}")
    _finish(data)
    return lineage


def _label(path: str, lineage: str) -> None:
    """Put another lineage into the label of an index; an index without a label stays as it is."""
    with open(path, "rb") as file:
        text = file.read()
    head = index.read_label(text)
    fields = index.parse_label(head)
    if fields is not None and fields[0] != lineage:
        replace_file(path, head.replace(fields[0].encode(), lineage.encode(), 1), text[len(head) :])


# --- comparing -------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A log, and its first and last record that all directories have; last < first: they share none."""

    log: str  # "append", or "<topic>/<partition>"
    first: int
    last: int
    differences: list[str]  # ranges, and between whom


def compare(directories: Sequence[str]) -> Iterator[Compared]:
    """Compare the committed WAL and all partition logs of directories of one shard, where they have both.

    A topic under compaction is left out: each replica blanks replaced records in its own time. Raises ConfigError for
    directories of different lineages, DamageError.
    """
    for one, other in pairwise(directories):
        if identity.lineage(one) != identity.lineage(other):
            raise ConfigError(f"{one} and {other}: are of different lineages, so not of one shard")
    end = min(map(committed.shown_seq, directories)) + 1
    yield _compare(directories, "append", [reader.wal(each) for each in directories], end)
    shared = set.intersection(*({*topics.names(each)} for each in directories))
    for topic in sorted(shared):
        if any(topics.is_compacted(each, topic) for each in directories):
            continue
        numbers = [{int(n) for n in os.listdir(f"{each}/topics/{topic}") if n.isdigit()} for each in directories]
        for number in sorted(set.intersection(*numbers)):
            logs = [reader.partition(each, topic, number) for each in directories]
            yield _compare(directories, f"{topic}/{number}", logs, min(log.end_offset() for log in logs))


def _compare(directories: Sequence[str], log: str, logs: Sequence[reader.LogReader], end: int) -> Compared:
    first = max(each.first_offset for each in logs)
    differences: list[str] = []
    for start in range(first, end, _STEP):
        last = min(start + _STEP, end) - 1
        found = [(name, _crc(each, start, last)) for name, each in zip(directories, logs, strict=True)]
        pairs = [(one, other) for (one, crc), (other, second) in pairwise(found) if crc != second]
        differences += [f"{log}: {start} to {last} differ between {one} and {other}" for one, other in pairs]
    return Compared(log, first, end - 1, differences)


def _crc(log: reader.LogReader, first: int, last: int) -> int:
    """Return the crc32 of the bytes of these records."""
    crc = 0
    for start, chunk in log.chunks(first):
        is_end = (record.seq_of(wal.last_line(chunk)) if log.by_seq else start + chunk.count(b"\n") - 1) >= last
        if is_end:
            lines = chunk.splitlines(keepends=True)
            chunk = within(chunk, first, last) if log.by_seq else b"".join(lines[: last - start + 1])
        crc = zlib.crc32(chunk, crc)
        if is_end:
            break
    return crc
