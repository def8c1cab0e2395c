"""A checkpoint of Spark's streaming, read as plain files: how far its query is. Needs neither pyspark nor Java.

    offsets/<n>     where batch n ends, written before it runs: a line of version, one of JSON for all, one for each source
    commits/<n>     written when batch n is through
    state/          what windows and the like hold, a version for each batch
    metadata        the query's id

and beside them what kmq/spark/streaming/listener.py leaves. A batch with an offset and no commit is run again at the next start.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kmq.errors import ConfigError
from kmq.links.ownership import FileLock
from kmq.spark.source.plan import IDENTITY, Key
from kmq.spark.streaming.lag import positions

STATUS, OWNER = "kmq-status.json", "kmq-owner"
_VERSION = "v1"
_NAMED = 5  # topics that a text names


class Logged(NamedTuple):
    """One file of offsets/."""

    version: str
    about: dict[str, Any]  # watermark, time, confs
    sources: list[str]  # as written, each


class Checkpoint:
    """The checkpoint in a directory, of a query that runs or not."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(str(path).removeprefix("file://"))
        if not is_checkpoint(self.path):
            raise ConfigError(f"{path}: not found, or no checkpoint of a stream (it has no metadata and offsets)")
        # A table's own checkpoint is in <table>/.kmq, beside the lock of its writer.
        above = os.path.dirname(self.path)
        self.table = os.path.dirname(above) if os.path.basename(above) == ".kmq" else ""

    def id(self) -> str:
        with open(f"{self.path}/metadata", encoding="utf-8") as file:
            return str(json.load(file)["id"])

    def status(self) -> dict[str, Any]:
        """What the listener of the last run wrote; empty where there was none."""
        try:
            with open(f"{self.path}/{STATUS}", encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def seen_age_s(self) -> float | None:
        """Seconds since the listener last wrote: it does with each batch, and every ten seconds or so without any."""
        try:
            return max(0.0, time.time() - os.stat(f"{self.path}/{STATUS}").st_mtime)
        except FileNotFoundError:
            return None

    def locks(self) -> list[FileLock]:
        """Those that a process of this query holds while it runs."""
        return [FileLock(f"{self.path}/{OWNER}"), *([FileLock(f"{self.table}/.kmq/owner")] if self.table else [])]

    def holder(self) -> str:
        """Who runs the query now; "" where nobody holds one of its locks."""
        return next((lock.holder() or "another process" for lock in self.locks() if lock.is_held()), "")

    def batches(self, log: str) -> list[int]:
        """Numbers in offsets/ or commits/, ascending."""
        try:
            names = os.listdir(f"{self.path}/{log}")
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def logged(self, batch: int) -> Logged:
        """One file of offsets/. Raises ConfigError where it is of a format that is not known here."""
        with open(f"{self.path}/offsets/{batch}", encoding="utf-8") as file:
            version, *lines = file.read().splitlines()
        if version != _VERSION or not lines:
            raise ConfigError(f"{self.path}/offsets/{batch}: unknown format {version!r}; expected {_VERSION}")
        return Logged(version, json.loads(lines[0]) if lines[0] else {}, lines[1:])

    def committed(self) -> tuple[int, Logged | None]:
        """(number, offsets) of the last batch that is through; (-1, None) without any."""
        through = set(self.batches("commits"))
        last = max((number for number in self.batches("offsets") if number in through), default=-1)
        return (last, self.logged(last)) if last >= 0 else (-1, None)

    def unfinished(self) -> int | None:
        """The batch that was begun and will be run again, if there is one."""
        planned = self.batches("offsets")
        return planned[-1] if planned and planned[-1] not in self.batches("commits") else None

    def has_state(self) -> bool:
        """Whether the query keeps something from batch to batch."""
        return os.path.isdir(f"{self.path}/state") and bool(os.listdir(f"{self.path}/state"))

    def commit_age_s(self) -> float | None:
        """Seconds since the last batch was through."""
        through = self.batches("commits")
        return max(0.0, time.time() - os.stat(f"{self.path}/commits/{through[-1]}").st_mtime) if through else None

    def size(self) -> tuple[int, int]:
        """(files, bytes)."""
        sizes = []
        for directory, _, names in os.walk(self.path):
            for name in names:
                try:
                    sizes.append(os.stat(f"{directory}/{name}").st_size)
                except FileNotFoundError:
                    pass  # a running query tidies up
        return len(sizes), sum(sizes)


def is_checkpoint(path: str) -> bool:
    return os.path.isfile(f"{path}/metadata") and os.path.isdir(f"{path}/offsets")


def find(paths: list[str]) -> list[Checkpoint]:
    """Checkpoints that these are, or that belong to these tables, or lie directly below; each path must have one."""
    found: list[Checkpoint] = []
    for path in paths:
        here = list(_at(path.removeprefix("file://")))
        if not here:
            raise ConfigError(
                f"{path}: not found, or neither a checkpoint, nor a table of ours with its own, nor a directory of such;"
                " a table that was given --checkpoint is asked for by that directory"
            )
        found += here
    return found


def _at(path: str) -> Iterator[Checkpoint]:
    for candidate in (path, f"{path}/.kmq/checkpoint"):
        if is_checkpoint(candidate):
            yield Checkpoint(candidate)
            return
    for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
        for candidate in (f"{path}/{name}", f"{path}/{name}/.kmq/checkpoint"):
            if is_checkpoint(candidate):
                yield Checkpoint(candidate)


def identities(source: str) -> dict[str, str]:
    """Broker → data id, of one source's line; nothing where it is no stream of format("kmq")."""
    try:
        table = json.loads(source)
    except ValueError:
        return {}
    topics = table.items() if isinstance(table, dict) else ()
    return {broker: each[IDENTITY] for broker, each in topics if isinstance(each, dict) and IDENTITY in each}


def is_ours(source: str) -> bool:
    """Whether a source's line is of format("kmq")."""
    return bool(identities(source))


def offsets_of(logged: Logged | None) -> dict[Key, int]:
    """The next offset of each partition, over all sources that are ours."""
    lines = [line for line in logged.sources if is_ours(line)] if logged else []
    return {key: offset for line in lines for key, offset in positions(line).items()}


def batch_text(path: str, batch: int) -> str:
    """What a batch reads, for people: `orders/0,1 jobs/0: 1,234 records`; "" where its checkpoint is not to be read from here."""
    try:
        log = Checkpoint(path)
        ends = offsets_of(log.logged(batch))
        begun = offsets_of(log.logged(batch - 1)) if batch else {}
    except (OSError, ValueError, ConfigError):
        return ""
    counts = {key: end - begun[key] if key in begun else end for key, end in ends.items()}
    read = sorted(key for key, count in counts.items() if count > 0)
    topics: dict[str, list[str]] = {}
    for _, topic, number in read:
        topics.setdefault(topic, []).append(str(number))
    named = [f"{topic}/{','.join(dict.fromkeys(numbers))}" for topic, numbers in topics.items()]
    more = f" and {len(named) - _NAMED} more topics" if len(named) > _NAMED else ""
    # Of partitions that are new it is not known here with which offset they begin.
    about = "" if all(key in begun for key in read) else "up to "
    return f"{' '.join(named[:_NAMED])}{more}: {about}{sum(counts[key] for key in read):,} records" if named else ""
