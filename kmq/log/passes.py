"""topics/.compacted/.passes: how far the broker's compactor has compared each partition, and when the next pass is due.

    topic|partition|from_seq|end|bytes_left|young_us|young_seq|at

A pass compared the sealed segments before the record `end`, at the Unix time `at` in seconds, and left `bytes_left`
bytes of records. `young_us|young_seq`: when the first tombstone was received (µs) that was too young to be removed, and
its seq; 0|0 without such a tombstone. `from_seq` is the topic's: a topic that was deleted and created again has another one.

Due         When at least as many bytes were sealed since the last pass as that pass left, as in Kafka. So at most about
            half of a topic is replaced records, and a pass reads at most twice the bytes that came since the last pass.
            Also when that first tombstone may be removed, but not more often than once in `delete_retention`.
Owner       the compactor that holds topics/.compacted/.owner. Any process may read.
Crash       The file is replaced atomically. If it is damaged or gone, every partition is compared once more.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kmq.config.values import FOREVER
from kmq.files import replace_file
from kmq.log import compaction, reader, topics, wal
from kmq.log.compaction import Sealed
from kmq.log.replaced import Horizon, Tombstone
from kmq.log.segment import COMPACT, Limits

_LEAST_S = 60.0  # between two passes because of tombstones

At = tuple[str, int]  # topic, partition


class Pass(NamedTuple):
    """The last pass over a partition: one line of the file."""

    from_seq: int
    end: int
    bytes_left: int
    young: Tombstone | None
    at: int


class CompactedTopic(NamedTuple):
    """A topic in force that is declared to be compacted. `delete_retention` in seconds."""

    name: str
    partitions: int
    from_seq: int
    delete_retention: float


class Clock(NamedTuple):
    """Current time, the time up to which it is trusted (both seconds since the epoch), and the first seq of the WAL."""

    now_s: float
    trusted_s: float
    wal_first: int


class CompactedTopics:
    """The topics that are declared to be compacted; a declaration is read again only when it has changed."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._declarations: dict[str, tuple[tuple[int, int], CompactedTopic | None]] = {}

    def found(self) -> list[CompactedTopic]:
        """Return these topics, first those of KMQ itself."""
        declarations: dict[str, tuple[tuple[int, int], CompactedTopic | None]] = {}
        for name in topics.names(self._data):
            try:
                status = os.stat(topics.toml_path(self._data, name))
            except FileNotFoundError:
                continue
            signature = status.st_ino, status.st_mtime_ns
            before = self._declarations.get(name)
            is_same = before is not None and before[0] == signature
            declarations[name] = (
                before if before is not None and is_same else (signature, _compacted_topic(self._data, name))
            )
        self._declarations = declarations
        tables = [table for _, table in declarations.values() if table is not None]
        return sorted(tables, key=lambda table: (not table.name.startswith("__"), table.name))


def _compacted_topic(data: str, name: str) -> CompactedTopic | None:
    declared = topics.read(data, name)
    if declared.limits.get("cleanup") != COMPACT or declared.from_seq is None:
        return None
    text = declared.limits.get("delete_retention")
    limits = Limits().with_changes({"delete_retention": text}) if text else Limits()
    return CompactedTopic(name, declared.partitions, declared.from_seq, limits.delete_retention)


def clock(data: str, now_s: float, gap_s: float) -> Clock:
    """Return the clock of a data directory: trusted up to `gap_s` after its last record, because it may be wrong."""
    return Clock(now_s, min(now_s, wal.last_stored(data)[1] / 1e6 + gap_s), reader.first_seq(data))


def horizon(clock: Clock, delete_retention: float) -> Horizon:
    """Return which tombstones of a topic may be removed. `delete_retention` in seconds."""
    before_us = 0 if delete_retention == FOREVER else int((clock.trusted_s - delete_retention) * 1e6)
    return Horizon(before_us, clock.wal_first)


# --- what is due -----------------------------------------------------------------------------------------------------


def pending(data: str, at: At, done: Pass | None, end: int) -> tuple[list[Sealed], int]:
    """Return the sealed segments of a partition up to the offset `end`, and the bytes sealed since the pass `done`."""
    sealed = compaction.sealed(data, *at, end)
    new = [segment for segment in sealed if done is None or segment.first >= done.end]
    return sealed, sum(_size(segment.path(data)) for segment in new)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def is_due(data: str, table: CompactedTopic, partition: int, done: Pass | None, end: int, clock: Clock) -> bool:
    """Return True if a partition needs a pass. `end`: the offset up to which it is on disk."""
    sealed, nbytes = pending(data, (table.name, partition), done, end)
    if not sealed:
        return False
    if done is None or nbytes >= max(1, done.bytes_left):
        return True
    if done.young is None or clock.now_s < done.at + max(_LEAST_S, table.delete_retention):
        return False
    removable = horizon(clock, table.delete_retention)
    return done.young.recv_us < removable.before_us and done.young.seq < removable.wal_first


def due(
    data: str, tables: Iterable[CompactedTopic], clock: Clock, now: bool = False
) -> list[tuple[CompactedTopic, int]]:
    """Return (topic, partition) of all partitions that need a pass; with `now`, of all that have sealed segments."""
    found = []
    rows, ends = None, None
    for table in tables:
        if rows is None or ends is None:
            rows, ends = {} if now else read(data), compaction.synced_ends(data)
        for number in range(table.partitions):
            end = ends.get((table.name, number), 0)
            if is_due(data, table, number, of(rows, table, number), end, clock):
                found.append((table, number))
    return found


# --- the file --------------------------------------------------------------------------------------------------------


def of(rows: Mapping[At, Pass], table: CompactedTopic, partition: int) -> Pass | None:
    """Return the last pass over a partition of this topic, not of a deleted topic with its name."""
    done = rows.get((table.name, partition))
    return done if done is not None and done.from_seq == table.from_seq else None


def _path(data: str) -> str:
    return f"{compaction.outbox(data)}/.passes"


def read(data: str) -> dict[At, Pass]:
    """Return the last pass of each partition."""
    try:
        with open(_path(data), encoding="ascii") as file:
            return dict(map(_parse, file.read().splitlines()))
    except (FileNotFoundError, ValueError):
        return {}


def _parse(line: str) -> tuple[At, Pass]:
    topic, *numbers = line.split("|")
    partition, from_seq, end, bytes_left, young_us, young_seq, at = map(int, numbers)
    return (topic, partition), Pass(
        from_seq, end, bytes_left, Tombstone(young_us, young_seq) if young_seq else None, at
    )


def write(data: str, rows: Mapping[At, Pass]) -> None:
    """Replace the file; call it only while holding the compactor's lock."""
    lines = []
    for (topic, partition), row in sorted(rows.items()):
        young = row.young or Tombstone(0, 0)
        lines.append(f"{topic}|{partition}|{row.from_seq}|{row.end}|{row.bytes_left}|{young[0]}|{young[1]}|{row.at}\n")
    replace_file(_path(data), "".join(lines).encode())
