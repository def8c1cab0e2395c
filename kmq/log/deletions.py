"""data/deletions: which topics were deleted, and after which record. docs/decisions/topic-deletion.md says why.

    topic|from_seq|last_seq|ts|end_offset,…        the topic, in force from `from_seq` on, was deleted after `last_seq`
    crc32|<crc32 of the lines above>

Owner       the router writes the file whole, and then a second copy, topics/.deletions. A repair restores a damaged
            copy from the other one.
Invariant   Records of the topic up to `last_seq` belong to no queue. A later topic of this name is in force from a
            later seq, and each of its partitions begins at the end offset of the deleted partition: no offset ever
            means two records.
Crash       Each file is replaced atomically. The first file counts; if it is missing or damaged, the second.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kmq.files import replace_file, sync_directory
from kmq.log import twins
from kmq.message import record
from kmq.message.routing import Topic, lives

NAME = "deletions"
COPY = "topics/.deletions"
_ASIDE = ".deleted-"


class Deletion:
    """One line."""

    __slots__ = ("ends", "from_seq", "last_seq", "topic", "ts")

    def __init__(self, topic: str, from_seq: int, last_seq: int, ts: str, ends: Sequence[int]) -> None:
        self.topic, self.from_seq, self.last_seq, self.ts, self.ends = topic, from_seq, last_seq, ts, ends

    def line(self) -> str:
        return f"{self.topic}|{self.from_seq}|{self.last_seq}|{self.ts}|{','.join(map(str, self.ends))}\n"


def read(data: str) -> list[Deletion]:
    """Return all deletions, the oldest first. Raises CorruptError if both files are damaged."""
    advice = "restore it, or run kmq verify --repair, which gives up the list of deleted topics"
    return twins.read(data, (NAME, COPY), _parse, advice)


def _parse(lines: list[str]) -> list[Deletion]:
    found = []
    for line in lines:
        topic, from_seq, last_seq, ts, ends = line.split("|")
        found.append(Deletion(topic, int(from_seq), int(last_seq), ts, [int(end) for end in ends.split(",")]))
    return found


def faults(data: str) -> dict[str, str]:
    """Return which of the two files is wrong, and why."""
    return twins.faults(data, (NAME, COPY), _parse)


def write(data: str, deletions: Sequence[Deletion], do: Callable[[str, Callable[[], object]], object]) -> None:
    """Write both files to disk. `do` runs an action that may find the disk full."""
    content = twins.seal("".join(deletion.line() for deletion in deletions).encode())
    for path in (f"{data}/{NAME}", f"{data}/{COPY}"):
        do(path, lambda path=path: replace_file(path, content))  # type: ignore[misc]


class Deleted:
    """The deletions by topic."""

    def __init__(self, deletions: Sequence[Deletion]) -> None:
        self.lives = lives((deletion.topic, deletion.from_seq, deletion.last_seq) for deletion in deletions)
        self._ends: dict[tuple[str, int], int] = {}
        for deletion in deletions:
            for number, end in enumerate(deletion.ends):
                at = deletion.topic, number
                self._ends[at] = max(end, self._ends.get(at, 0))

    @classmethod
    def of(cls, data: str) -> "Deleted":
        return cls(read(data))

    def last_seq(self, topic: str) -> int:
        """Return the seq up to which records of the topic are deleted; 0: it was never deleted."""
        return self.lives[topic][-1][1] if topic in self.lives else 0

    def first_offset(self, topic: str, partition: int) -> int:
        """Return the first offset of a partition."""
        return self._ends.get((topic, partition), 0)


# --- the router's side -----------------------------------------------------------------------------------------------


def detach(data: str, topic: Topic) -> None:
    """Remove the symlinks of a topic and rename its directory. A start repeats this until the directory is renamed."""
    for link in topic.log_names():
        with contextlib.suppress(OSError):
            if os.readlink(f"{data}/{link}").startswith(f"topics/{topic.name}/"):
                os.unlink(f"{data}/{link}")
    os.rename(f"{data}/topics/{topic.name}", f"{data}/topics/{_ASIDE}{time.time_ns()}")
    sync_directory(f"{data}/topics")


def sweep(data: str) -> Iterator[None]:
    """Remove the renamed directories of deleted topics, also any renamed meanwhile; one file per step."""
    while left := [entry for entry in os.listdir(f"{data}/topics") if entry.startswith(_ASIDE)]:
        for path, directories, files in chain.from_iterable(
            os.walk(f"{data}/topics/{entry}", topdown=False) for entry in left
        ):
            for name in files:
                os.unlink(f"{path}/{name}")
                yield
            for name in directories:
                os.rmdir(f"{path}/{name}")
        for entry in left:
            os.rmdir(f"{data}/topics/{entry}")


def now() -> str:
    return record.format_ts(time.time_ns() // 1000).decode()


def last_seq(data: str) -> int:
    """Return the seq of the last record before the latest deletion; 0 if no topic was deleted."""
    return max((deletion.last_seq for deletion in read(data)), default=0)


def changed_ns(data: str) -> int:
    """Return when topics were last deleted, by the file's mtime; 0: never."""
    try:
        return os.stat(f"{data}/{NAME}").st_mtime_ns
    except FileNotFoundError:
        return 0


class DeletedTopics:
    """Which records belong to a topic that was deleted after they were written."""

    def __init__(self, data: str) -> None:
        self._data, self._deleted, self._changed_ns = data, Deleted([]), -1
        self.is_due = False  # a topic was deleted, and records of it may be left

    def look(self) -> None:
        """Read the list of deleted topics, if it has changed."""
        latest_ns = changed_ns(self._data)
        if latest_ns != self._changed_ns:
            self._deleted, self._changed_ns = Deleted.of(self._data), latest_ns
            self.is_due = bool(self._deleted.lives)

    def covers(self, topic: str, seq: int) -> bool:
        return seq <= self._deleted.last_seq(topic)
