"""`kmq restore`: makes a data directory of the copy that the store has.

    <data>/restoring/       a whole data directory, built here: WAL, tables, small files, indexes
    <data>/restoring/whole  written when it is complete; then its entries get their places, `id` as the last one

Order       1 a claim in the old lineage, so that its broker writes nothing more   2 all objects of the rows in force
            3 the router's own recovery, which rebuilds every queue from the WAL    4 a fork (kmq/router/fork.py)
            5 with --download the objects of rows, laid out for the router (kmq/tier/fetch.py)
            6 commits of the new lineage, by which it can itself be restored        7 `begins successor=…` in the old one
            8 `whole`, and the places
Invariant   A restore gives one state that the broker had: the WAL up to its last row, and tables and files as of it or
            before. Every object is compared with its row. The broker may have acknowledged more after the last row, so
            by the fork the directory gets a new id and lineage, and no seq, offset, name or producer id is used twice.
Crash       Without `whole` the next call begins anew; no stage starts in a directory that has `restoring` and no `id`.
            With it the next call puts the rest in place. A lineage that was claimed and not begun may be restored again.
Drill       claims nothing and makes no commits: the living broker does not notice.
Not covered Objects of the old lineage stay in the store, because the new one names them; nobody deletes them.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator

from kmq.config.settings import Settings
from kmq.errors import ConfigError, CorruptError, DataExistsError
from kmq.files import give_up, make_directory, replace_file, sync_directory, sync_file
from kmq.log import deletions, gaps, identity, rows, segment, topics
from kmq.log.identity import RESTORING
from kmq.log.index import IndexWriter
from kmq.log.rows import full_key
from kmq.logfmt import Logger
from kmq.message import record
from kmq.router import fork
from kmq.tier import fetch, objects
from kmq.tier.commits import CommitLine, CommitLog, CopySource, TierState, copies, line, numbered
from kmq.tier.store import Store
from kmq.tier.turn import DIRECTORY, Nonces

_WHOLE = "whole"
_MAY_BE_THERE = {RESTORING, "lost+found"}
_COPIES = {deletions.NAME: deletions.COPY, gaps.NAME: gaps.COPY}  # files that lie there twice
_WRITTEN_BYTES = 8 << 20  # between two calls of `progress`


def find_source(store: Store, lineage: str, writer: str) -> CopySource | None:
    """Return the lineage to restore, the only one without a successor; None if the store has none.

    Raises CorruptError if there are several, or `lineage` is not there.
    """
    found = copies(store, writer, lineage)
    if lineage and not found:
        raise CorruptError(f"the store has no lineage {lineage}")
    if len(found) > 1:
        names = ", ".join(f"{each.lineage} (last commit at {each.state.ts})" for each in found)
        raise CorruptError(f"the store has several lineages: {names}; choose one with --lineage")
    if found and found[0].state.successor:
        raise CorruptError(f"the lineage {lineage} went on as {found[0].state.successor}: restore that one")
    return found[0] if found else None


def check_target(data: str) -> None:
    """Raise DataExistsError unless `data` may be restored into: missing, empty, or with a restore that was killed."""
    entries = set(os.listdir(data)) if os.path.isdir(data) else set()
    if os.path.exists(f"{data}/{RESTORING}/{_WHOLE}") and "id" not in entries:
        return
    if entries - _MAY_BE_THERE:
        names = ", ".join(sorted(entries - _MAY_BE_THERE)[:3])
        raise DataExistsError(f"{data}: is not empty ({names}); restore into an empty directory, or move this one away")


def settle(data: str) -> bool:
    """Put a whole restore in place. Return False if there is none."""
    coming = f"{data}/{RESTORING}"
    if not os.path.exists(f"{coming}/{_WHOLE}"):
        return False
    names = sorted(set(os.listdir(coming)) - {_WHOLE, "id"})
    for name in [*names, "id"]:
        if os.path.lexists(f"{coming}/{name}"):
            if name == "id":
                sync_directory(data)  # everything else has its place before the directory can be started
            os.rename(f"{coming}/{name}", f"{data}/{name}")
    sync_directory(data)
    shutil.rmtree(coming)
    return True


class Restore:
    """One restore, in its order. `progress` is called with the bytes that were written."""

    def __init__(
        self, store: Store, source: CopySource, settings: Settings, log: Logger, progress: Callable[[int], object]
    ) -> None:
        self._store, self._source, self._settings, self._log, self._progress = store, source, settings, log, progress
        self.data = settings.data
        self.path = f"{self.data}/{RESTORING}"
        self.id = os.urandom(16).hex()
        self.last_seq = 0
        self.left: list[str] = []  # why old records of topics stay in the store alone, in spite of `downloads`

    def run(self, is_drill: bool, downloads: bool = False) -> None:
        """Restore everything. `downloads`: also what lies in the store alone.

        Raises ObjectError, StoreError, FencedError; the directory then has no `id`. NoRoomError before anything is done.
        """
        make_directory(self.data)
        if downloads:
            self._check_room()
        shutil.rmtree(self.path, ignore_errors=True)
        os.mkdir(self.path)
        sync_directory(self.data)
        if not is_drill:
            commits = self._source.commits
            commits.claim(line("claim", successor=self.id), os.urandom(8).hex())
        self._write_files()
        self._write_wal()
        self._write_rows()
        for name, row in self._source.state.tables.items():
            self._write_table(f"topics/{name}", row)
        self._recover()
        if downloads:
            self._download(is_drill)
        if not is_drill:
            self._begin_lineage()
            self._source.commits.commit([line("begins", successor=self.id)], os.urandom(8).hex())
        for directory, _, names in os.walk(self.path):
            for name in names:
                if not os.path.islink(f"{directory}/{name}"):
                    sync_file(f"{directory}/{name}")
            sync_directory(directory)
        replace_file(f"{self.path}/{_WHOLE}", b"")
        settle(self.data)

    # --- what the store has ------------------------------------------------------------------------------------------

    def _lines(self, *rows: CommitLine) -> Iterator[bytes]:
        for row in rows:
            key = full_key(self._source.lineage, row.values["key"])
            pieces = objects.CheckedPieces(self._store.get(key), key, row.number("size"), row.values["sha256"])
            yield from objects.unpack(pieces, key)

    def _write_files(self) -> None:
        for name in ("append", "topics"):
            os.mkdir(f"{self.path}/{name}")
        for name in ("id", "lineage"):
            replace_file(f"{self.path}/{name}", f"{self._source.lineage}\n".encode())
        replace_file(f"{self.path}/format", f"{identity.format_text(1, 1)}\n".encode())
        for name, row in self._source.state.files.items():
            path = f"{self.path}/{name}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            content = b"".join(self._lines(row))
            replace_file(path, content)
            if name in _COPIES:
                replace_file(f"{self.path}/{_COPIES[name]}", content)

    def _write_rows(self) -> None:
        """Write the file `tier` of each partition that has rows. Its records stay where they are: they are read cold.

        It has the new lineage at once, and is synced with everything else: for a thousand partitions that is seconds.
        """
        for (name, _), log in self._source.state.logs.items():
            if log.end is not None:
                directory = f"{self.path}/topics/{name}"
                os.makedirs(directory, exist_ok=True)
                found = log.copy()
                found.head = rows.empty(self._source.lineage, name, log.life).head
                with open(rows.path_of(directory), "wb") as file:
                    file.write(found.relabelled(self.id).text())

    def _write_wal(self) -> None:
        """Write the rows of the WAL as segments, each with as many rows as KMQ_SEGMENT_BYTES takes."""
        rows: list[CommitLine] = []
        for row in self._source.state.wal:
            rows.append(row)
            if sum(each.number("bytes") for each in rows) >= self._settings.segment_bytes:
                self._write_segment("append", rows[0].number("first"), self._lines(*rows), by_seq=True)
                rows = []
        if rows:
            self._write_segment("append", rows[0].number("first"), self._lines(*rows), by_seq=True)

    def _write_table(self, directory: str, row: CommitLine) -> None:
        """Write the segments of a table: a new one begins after each gap."""
        first, lines = row.number("base"), self._lines(row)
        for gap in row.gaps:
            self._write_segment(directory, first, _records(lines, gap.first - first, row.what), by_seq=False)
            first = gap.to
        self._write_segment(directory, first, lines, by_seq=False)

    def _write_segment(self, directory: str, first: int, blocks: Iterable[bytes], by_seq: bool) -> None:
        """Write a segment of these lines, with its index."""
        os.makedirs(f"{self.path}/{directory}", exist_ok=True)
        path = f"{self.path}/{directory}/{segment.name(first)}"
        with open(path, "xb") as file:
            for lines in blocks:
                file.write(lines)
                self._progress(len(lines))
        writer = IndexWriter(segment.index_path(path), give_up, by_seq)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer.begin()
            writer.resume(fd, os.fstat(fd).st_size, first)
            writer.seal()
        finally:
            os.close(fd)

    # --- what lies in the store alone --------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """Raise NoRoomError unless the disk has room for all lines, and for the queues that the WAL makes."""
        needed = self._source.nbytes + sum(row.number("bytes") for row in self._source.state.wal)
        fetch.check_room(self._settings, needed)

    def _download(self, is_drill: bool) -> None:
        """Lay out the old records of every partition, which the first start of the router puts in place."""
        for name in topics.names(self.path):
            limits = fetch.limits_of(self._settings, self.path, name)
            for number in range(topics.read(self.path, name).partitions):
                planned = fetch.plan(self.path, name, number, limits.segment_bytes)
                try:
                    if not is_drill:  # without KMQ_TIER local limits delete nothing
                        fetch.check_limits(self.path, name, limits, planned, time.time())
                except ConfigError as err:
                    self.left.append(str(err))
                    break
                fetch.fetch(self.path, self._store, planned, self._progress)

    # --- the broker's side -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Complete every queue from the WAL, and leave gaps, so that no offset that was acknowledged is given out again."""
        made = fork.plan(self.path)._replace(id=self.id)
        self.last_seq = made.last_seq
        fork.carry_out(self.path, made, self._settings, self._log)

    def _begin_lineage(self) -> None:
        """Make the first commits of the new lineage: all rows in force, by the full keys of their objects."""
        state, commits = self._source.state, CommitLog(self._store, self.id, f"{self.id}@{os.uname().nodename}")
        nonce = Nonces(self.path).next("")
        commits.claim(line("claim", pod=self.id, origin=self._source.lineage), nonce)
        before = [line("drop", "wal", before=state.wal_first, why="restore")] if state.wal_first > 1 else []
        lines = [*state.wal, *state.tables.values(), *state.files.values(), *numbered(state.lines_of_logs())]
        mine = [
            each._replace(values={**each.values, "key": full_key(self._source.lineage, each.values["key"])})
            if "key" in each.values
            else each
            for each in lines
        ]
        commits.commit([*before, *mine], os.urandom(8).hex())
        cursor = f"{commits.state.number} {self.id}\n"
        replace_file(f"{self.path}/{DIRECTORY}/cursor", cursor.encode())


def _records(blocks: Iterator[bytes], count: int, what: str) -> Iterator[bytes]:
    """Yield the next `count` records, which end with a block."""
    while count > 0 and (lines := next(blocks, b"")):
        yield lines
        count -= record.count_lines(lines)
    if count:
        raise objects.ObjectError(f"{what}: its object has other records than its commit says")


def age_s(state: TierState) -> float:
    """Return the seconds since the last commit."""
    return time.time() - float(state.ts)
