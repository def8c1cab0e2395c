"""One turn of the copy: uploads the records of the WAL, the tables and the small files that the store lacks.

    append.log has seqs 1…9001, the store has 1…8011  → an object wal/8012-9001…, then a commit with its row

    wal      every turn, whatever is on disk, in objects of at most KMQ_TIER_OBJECT of lines
    topics   old records of partitions with tier=on (partitions.py)
    tables   topics of KMQ itself and compacted topics, whole from their start: once half of one is new, or once the local
             WAL no longer has what is new
    files    router.ckpt, producers.ckpt and the other small files, hourly; dropped.log and quarantine/log with each row
             of the WAL that they have changed before

Owner       the process `kmq.tier`. It holds no plan: a turn compares files and rows, and does what is missing.
Invariant   Nothing in the store is ahead of the rows of the WAL: a turn first reads the small files, then copies the WAL
            at least that far, then makes tables and files as of those. An object is read back and compared before a
            commit names it. A row of the WAL never goes before the files, tables and the local WAL can do without it.
Hole        While the store is away the local WAL may go before it was copied. Where it goes on, one commit has the rows up
            to router.ckpt with it and the tables: an older one does not say which offsets follow the hole.
Load        What is made as of a router.ckpt stays right when there are later ones: below a checkpoint no log changes. So no
            step waits for a router that writes no checkpoint meanwhile.
Crash       after an object     no commit names it: it is never read;
            after a commit      the next start reads all commits;
            after a drop        the object is deleted in a later turn: deletions repeat.
Orphans     Objects that no commit names and whose key bears the number of a claim before this process's own: only that
            claim could have named them, and it is fenced. A look at all names each day deletes them, unless it also finds
            rows whose object is gone: that is said, and the copy goes on. Names that are no object's count for nothing.
Shard       The leader alone copies, up to the high watermark: what is above it may yet be cut. Its claim bears its epoch.
            A leader that was deposed and does not know it is fenced by the claim of the next one; what it had copied is
            right, because all replicas have the same committed records. A follower writes nothing to the store: it
            reads the commits, and lays out the rows of partitions for its own router.
Same        Before a claim the last line of the last row of the WAL, and of each partition, is compared with the local one.
            A directory that was put back and went on differs there: AheadError, and nothing is written or laid out.
Memory      One object as it is stored.
"""

import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from kmq.config.values import MIB
from kmq.errors import KmqError
from kmq.files import replace_file
from kmq.links.role import FOLLOWING, RolePage
from kmq.log import checkpoint, gaps, identity, passes, reader, topic_changes, topics, wal
from kmq.log.damage import DamageError
from kmq.log.rows import FULL_KEY, full_key
from kmq.log.segment import Limits, last_line, within
from kmq.logfmt import Logger
from kmq.message import record
from kmq.tier import objects
from kmq.tier.commits import AheadError, CommitLine, CommitLog, DamagedError, FencedError, TierState, line
from kmq.tier.objects import MEMBER_BYTES, Packed
from kmq.tier.partitions import PartitionCopier, TierTotals, Uploads
from kmq.tier.store import Store, StoreError, holds, probe

DIRECTORY = "tier"  # below the data directory: what this process remembers
FILES = ("router.ckpt", "producers.ckpt", "deletions", "format", "gateway.starts", "restored")
NAMED = ("dropped.log", "quarantine/log")  # they explain what the WAL lacks, so they go up with its rows
_FILES_S = 3600.0
_TURNS = 5  # times KMQ_TIER_EVERY: after that a turn leaves the rest of the partitions to the next one
_DELETE_S = 3600.0  # between a drop and the deletion: a reader may have planned with the row
_DELETES_AT_ONCE = 200  # of a turn: some ten seconds, for which the WAL waits
_SWEEP_S, _SWEEP_FIRST_S = 86_400.0, 3600.0  # between two looks at all names; the first one is no part of a start
_NAMES_AT_ONCE = 10_000  # of a turn: the WAL does not wait for a whole look
_KINDS = ("wal", "topics", "tables", "files")
_MADE_BY = re.compile(
    r"[0-9a-f]{32}/(?:(?:wal|(?:topics|tables)/[A-Za-z0-9_.-]+/[0-9]+/[0-9]+)/[0-9-]+\.([0-9]{1,20})\.[0-9a-f]{8}\.log\.gz"
    r"|files/[0-9]+\.([0-9]{1,20})\.[0-9a-f]{8}/.+)"
)


class FollowsError(KmqError):
    """Another broker of the shard leads: it makes the copy."""


class Leadership:
    """What the role page says of this broker of a shard."""

    def __init__(self, instance: str, data_id: str, shard: str) -> None:
        self._instance, self._data_id, self.shard = instance, data_id, shard
        self._page: RolePage | None = None

    def _find(self) -> RolePage | None:
        self._page = RolePage.find(self._instance, self._data_id, self._page)
        return self._page

    def epoch(self) -> int | None:
        """Return the epoch that this broker leads with open doors; None if it does not."""
        page = self._find()
        return page.read().epoch if page is not None and page.leads else None

    def follows(self) -> bool:
        """Return True if this broker follows a leader, so that its files are those of a replica."""
        page = self._find()
        return page is not None and page.read().role == FOLLOWING

    def committed(self) -> int:
        """Return the last seq that every replica has which can be elected. Whatever the role is, it is never too high."""
        page = self._find()
        return page.hw if page is not None else 0

    def check(self) -> int:
        """Return the epoch that this broker leads. Raises FollowsError, which names the leader if it is known."""
        epoch = self.epoch()
        if epoch is None:
            leader = (self._page.leader or {}).get("broker") if self._page is not None else None
            name = f"broker {leader}" if leader else "another broker"
            what = "the leader makes the copy, and the others read its commits"
            raise FollowsError(f"{name} leads the shard {self.shard}, or nobody does; {what}")
        return epoch


class TurnOptions(NamedTuple):
    """`durable` returns the last seq to copy. `progress` is called after each request and each block.

    `limits` returns those of topics without their own. `every`: seconds between two copies of the WAL; None: it is not
    copied, and neither are tables and small files. `leadership`: in a shard.
    """

    object_bytes: int
    rate: int
    durable: Callable[[], int]
    progress: Callable[[int], object] = lambda nbytes: None
    limits: Callable[[], Limits] = Limits
    every: float | None = 60.0
    leadership: Leadership | None = None


class SmallFiles(NamedTuple):
    """The small files of one moment, by name, and the seqs that router.ckpt and producers.ckpt cover."""

    contents: dict[str, bytes]
    routed_seq: int
    producers_seq: int

    @classmethod
    def of(cls, data: str, are_all: bool) -> "SmallFiles":
        """Read the two checkpoints, or all small files."""
        more = [*FILES[2:], *NAMED, *(f"topics/{name}/topic.toml" for name in topics.names(data))] if are_all else []
        names = [*FILES[:2], *more]
        contents = {name: content for name in names if (content := _content(f"{data}/{name}")) is not None}
        firsts = (contents.get(name, b"0").split(b"\n")[0].split(b"|")[0] for name in FILES[:2])
        return cls(contents, *(int(first) if first.isdigit() else 0 for first in firsts))


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


class Nonces:
    """data/tier/claim: the nonce of the claim in force and of the one that is made, a line each.

    A nonce is on disk before its claim is created. A claim whose answer was lost is made again with the same nonce, so
    that it is known as this directory's whenever it arrives.
    """

    def __init__(self, data: str) -> None:
        self._path = f"{data}/{DIRECTORY}/claim"
        self.found = (_content(self._path) or b"").decode("ascii", "replace").split()

    def next(self, in_force: str, is_taken_over: bool = False) -> str:
        """Return the nonce for the next claim, which is on disk then. `in_force`: the nonce of the last claim, or "".

        `is_taken_over`: the last claim is another directory's. Then no earlier nonce is used again.
        """
        is_pending = bool(self.found) and self.found[-1] != in_force and not is_taken_over
        nonce = self.found[-1] if is_pending else os.urandom(8).hex()
        self.found = [*([in_force] if in_force else []), nonce]
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        replace_file(self._path, "".join(f"{each}\n" for each in self.found).encode())
        return nonce


class Copier:
    """Copies one data directory to one store."""

    def __init__(self, data: str, store: Store, log: Logger, options: TurnOptions) -> None:
        self.data, self.store, self._log, self._options = data, store, log, options
        self.lineage, self._id = identity.lineage(data), identity.read(data, "id")
        self.commits = CommitLog(store, self.lineage, f"{self._id}@{socket.gethostname()}")
        self.is_claimed = False
        self._is_read = False  # all commits, by a follower
        self._has_all_tables = False  # each has a row: the last look at them has seen this
        self._epoch = 0  # of the claim, in a shard
        self._wal_at, self._files_at = 0.0, -_FILES_S  # monotonic: when the WAL and all files went up last
        uploads = Uploads(self._key, self._upload, self._commit, self._rest)
        self._partitions = PartitionCopier(data, options.limits, options.object_bytes, uploads, log)
        self._dropped_at: dict[str, float] = {}
        self._noted = -1  # the last seq that tier/wal says
        self.orphans = 0  # deleted
        self.missing: list[CommitLine] = []  # rows whose object was not there at the last look at all names
        self._sweep: Sweep | None = None
        self._sweep_at = time.monotonic() + _SWEEP_FIRST_S

    @property
    def copied(self) -> int:
        """The last seq that the store has."""
        return self.commits.state.wal_end - 1

    # --- the claim ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Read all commits and claim the lineage. Raises FencedError, AheadError, RefusedError, DamagedError,
        FollowsError, StoreError; then nothing was written except the probe.
        """
        leadership, self.is_claimed, self._sweep = self._options.leadership, False, None
        self._epoch = leadership.check() if leadership is not None else 0
        probe(self.store, self.lineage)
        state = self.commits.read()
        check_is_whole(self.data, state)
        nonces = Nonces(self.data)
        check_may_claim(state, nonces, leadership, self._epoch)
        compare(self.data, state.wal)
        if (parsed := _parsed(self.data, _content(f"{self.data}/{FILES[0]}"))) is not None:
            self._partitions.compare(self._partitions.found(state, *parsed), leadership is not None)
        nonce = nonces.next(state.claim.nonce if state.claim else "")
        self.commits.claim(claim_line(self._id, leadership, self._epoch), nonce)
        self.is_claimed = True
        self._log.info("tier_claimed", commit=state.number, copied_seq=self.copied)

    # --- a turn ------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what is missing; return True if more is due than a turn does at most.

        Raises what `claim` raises, and DamageError if a block of the WAL is damaged. A follower raises FollowsError once
        its rows are laid out.
        """
        leadership = self._options.leadership
        if leadership is not None:
            if leadership.follows():
                self._follow()
            if leadership.check() != self._epoch:
                self.is_claimed = False  # it was deposed meanwhile, and leads again
        if not self.is_claimed:
            self.claim()
        self.commits.catch_up()
        self.commits.check_claim()
        is_more = self._copy_all()
        self._delete_dropped()
        self._look_at_names()
        self.commits.write_state()
        self._note_cursor()
        return is_more

    def _follow(self) -> None:
        """Read the commits that are new, lay out the rows in force, and note how far the WAL is there."""
        if not self._is_read:
            check_is_whole(self.data, self.commits.read())
            self._is_read = True
        self.commits.catch_up()
        self._options.progress(0)
        if (parsed := _parsed(self.data, _content(f"{self.data}/{FILES[0]}"))) is not None:
            self._partitions.lay_out(self.commits.state, *parsed)
        self._note_cursor()
        self._note_copied()

    def _note_cursor(self) -> None:
        path, cursor = f"{self.data}/{DIRECTORY}/cursor", f"{self.commits.state.number} {self.lineage}\n".encode()
        if _content(path) != cursor:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            replace_file(path, cursor)

    def _copy_all(self) -> bool:
        copies_wal = self._options.every is not None
        are_due = time.monotonic() - self._files_at >= _FILES_S or FILES[0] not in self.commits.state.files
        found = SmallFiles.of(self.data, are_due and copies_wal)
        if copies_wal:
            self._copy_wal(self._options.durable())
            if self.copied < max(found.routed_seq, found.producers_seq):
                return False
            self._copy_tables(found)
        is_more, waiting = self._copy_partitions(found)
        if copies_wal:
            if are_due:
                self._copy_files(found)
            self._drop_wal(waiting)
        return is_more

    def _commit(self, *lines: CommitLine) -> None:
        if self._options.leadership is not None:
            self._options.leadership.check()  # not needed for what the store says: the next leader need not wait for it
        self.commits.commit(lines, os.urandom(8).hex())
        self._options.progress(0)

    def _key(self, path: str) -> str:
        claim = self.commits.state.claim
        return f"{path}.{claim.number if claim else 0}.{os.urandom(4).hex()}"

    def _upload(self, key: str, packed: Packed) -> dict[str, object]:
        """Make an object and read it back; return what its row says of it."""
        where = full_key(self.lineage, key)
        if not self.store.create(where, packed.content) or not holds(self.store, where, packed.content):
            raise StoreError(f"{where}: the store does not give back what was written")
        self._options.progress(len(packed.content))
        return {"bytes": packed.nbytes, "size": len(packed.content), "sha256": packed.sha256, "key": key}

    # --- the WAL -----------------------------------------------------------------------------------------------------

    def _copy_wal(self, high: int) -> None:
        """Copy the WAL up to `high`."""
        self._wal_at = time.monotonic()
        self._copy_wal_up_to(high)
        self._note_copied()

    def _note_copied(self) -> None:
        """Note in tier/wal how far the store has the WAL."""
        if self._noted != self.copied:
            wal.note_copied(self.data, self.copied)
            self._noted = self.copied

    def _copy_wal_up_to(self, high: int) -> None:
        while (begin := self.commits.state.wal_end) <= high:
            if reader.first_seq(self.data) > begin:
                if not self._copy_after_hole(high):
                    return
            elif (row := self._wal_row(begin, high)) is not None:
                self._commit(*self._changed(NAMED), row)
            else:
                return

    def _wal_row(self, begin: int, high: int) -> CommitLine | None:
        """Make the object of the WAL that begins with a seq; None if the disk has nothing from there on."""
        packed = objects.pack(self._blocks(begin, high))
        if not packed.nbytes:
            return None
        last, last_ts = record.stamp(packed.last)
        first_ts = reader.wal(self.data).stamp_of(begin)
        times = f"{_seconds(first_ts[1] if first_ts else last_ts)}-{_seconds(last_ts)}"
        made = self._upload(f"{self._key(f'wal/{begin}-{last}')}.log.gz", packed)
        return line("wal", first=begin, last=last, ts=times, **made, crc=zlib.crc32(packed.last))

    def _copy_after_hole(self, high: int) -> bool:
        """Go on where the local WAL begins: what is missing went before it was copied, because the store was away.

        One commit has the rows after the hole, tables, and small files. With an older router.ckpt a restore would give
        records after the hole the offsets of those in it. Return False if the local WAL went on meanwhile.
        """
        first = at = reader.first_seq(self.data)
        rows = [line("drop", "wal", before=first, why="retention")]
        found = SmallFiles.of(self.data, are_all=True)  # once: under load there is a later checkpoint after each object
        while at <= max(found.routed_seq, found.producers_seq):
            if (row := self._wal_row(at, max(high, self._options.durable()))) is None:
                return False
            rows.append(row)
            at = row.number("last") + 1
            if reader.first_seq(self.data) > first:
                return False
        tables = [*self._table_rows(found)]
        self._commit(*rows, *tables, *self._file_rows(found))
        self._files_at = time.monotonic()
        return True

    def _blocks(self, begin: int, high: int) -> Iterator[bytes]:
        """Yield the lines of the WAL from `begin` on, up to `high` or KMQ_TIER_OBJECT bytes."""
        nbytes = 0
        for first, lines in reader.wal(self.data).chunks(begin, MEMBER_BYTES):
            lines = within(lines, first, high)
            if lines:
                yield lines
                nbytes += len(lines)
                self._options.progress(0)
            if not lines or nbytes >= self._options.object_bytes or record.seq_of(last_line(lines)) >= high:
                return

    def _expired(self) -> list[int]:
        """Return the last seqs of the oldest rows of the WAL that have gone from the local WAL by its limits.

        What went because the disk was short of room stays in the store.
        """
        limits, first, found = self._options.limits(), reader.first_seq(self.data), []
        youngest = time.time() - limits.retention_age
        nbytes = sum(row.number("bytes") for row in self.commits.state.wal)
        for row in self.commits.state.wal:
            is_too_much = bool(limits.retention_bytes) and nbytes > limits.retention_bytes
            is_too_old = float(row.values["ts"].partition("-")[2]) <= youngest
            if row.number("last") >= first or not (is_too_much or is_too_old):
                break
            found.append(row.number("last"))
            nbytes -= row.number("bytes")
        return found

    def _drop_wal(self, waiting: int) -> None:
        """Drop the oldest rows of the WAL that have gone by its limits, and that no file or table needs.

        Those from seq `waiting` on have records of partitions that are in no row yet.
        """
        state = self.commits.state
        covered = [row.number("seq") for row in state.tables.values()]
        covered += [state.files[name].number("seq") if name in state.files else 0 for name in FILES[:2]]
        needed = min(min(covered) + 1, waiting) if self._has_all_tables else 0
        gone = [last for last in self._expired() if last < needed]
        if gone:
            self._commit(line("drop", "wal", before=gone[-1] + 1, why="retention"))

    # --- tables ------------------------------------------------------------------------------------------------------

    def _copy_tables(self, found: SmallFiles) -> None:
        for row in self._table_rows(found):
            self._commit(row)

    def _table_rows(self, found: SmallFiles) -> Iterator[CommitLine]:
        """Copy each table up to the end that router.ckpt says: below it a log is on disk, and does not change."""
        self._has_all_tables = False
        if (parsed := _parsed(self.data, found.contents.get(FILES[0]))) is None:
            return
        rows, lives = parsed
        compacted = {table.name for table in passes.CompactedTopics(self.data).found()}
        wanted = {name for name in lives if name.startswith("__") or name in compacted}
        seen, damaged = set(), set()
        for (topic, number), at in rows.items():
            if topic in wanted:
                seen.add(f"{topic}/{number}")
                try:
                    row = self._table_row(topic, number, lives[topic], at.start, at.end_offset, found.routed_seq)
                except DamageError as err:
                    self._log.error("tier_table_damaged", topic=topic, partition=number, reason=err)
                    damaged.add(f"{topic}/{number}")
                    continue
                if row is not None:
                    yield row
        tables = self.commits.state.tables
        for name, row in [(name, row) for name, row in tables.items() if rows and name not in seen]:
            yield line("drop", name, life=row.values["life"], why="deleted")
        self._has_all_tables = damaged <= tables.keys()

    def _table_row(self, topic: str, number: int, life: int, start: int, end: int, seq: int) -> CommitLine | None:
        """Copy a table, and return its row; None if the row of before will do."""
        name = f"{topic}/{number}"
        before = self.commits.state.tables.get(name)
        found = tuple(gap for gap in gaps.read(f"{self.data}/topics/{name}") if start <= gap.first and gap.to <= end)
        if before is not None and before.number("life") == life and before.gaps == found:
            grown = end - before.number("end")
            holds_wal = before.number("seq") + 1 < reader.first_seq(self.data)  # no row of the WAL may go before it
            if grown * 2 < max(1, end - start - gaps.count(found, start, end)) and not holds_wal:
                return None
            if not grown:
                return before._replace(values={**before.values, "seq": str(seq)})
        packed = objects.pack(self._table_blocks(topic, number, start, end))
        row: dict[str, object] = {"life": life, "base": start, "end": end, "seq": seq}
        row |= {"gaps": "+".join(f"{gap.first}-{gap.to}" for gap in found)} if found else {}
        row |= self._upload(f"{self._key(f'tables/{topic}/{life}/{number}/{end}')}.log.gz", packed)
        return line("table", name, **row)

    def _table_blocks(self, topic: str, number: int, start: int, end: int) -> Iterator[bytes]:
        if start >= end:
            return
        for first, lines in reader.local(self.data, topic, number).chunks(start, MEMBER_BYTES):
            count = record.count_lines(lines)
            if first + count > end:
                lines = record.first_lines(lines, end - first)
            if lines:
                yield lines
                self._rest(len(lines))
            if first + count >= end:
                return

    # --- partitions --------------------------------------------------------------------------------------------------

    def _copy_partitions(self, found: SmallFiles) -> tuple[bool, int]:
        """Copy old records of partitions, and the WAL in between whenever it is due. Return what is left to do.

        That is: if more is due, and the seq of the first record that is in no row yet.
        """
        state, begun, every = self.commits.state, time.monotonic(), self._options.every
        parsed = _parsed(self.data, found.contents.get(FILES[0]))
        if parsed is None:
            return False, 0
        states, lives = parsed
        mine = self._partitions.found(state, states, lives)
        self._partitions.compare(mine, self._options.leadership is not None)
        gone = self._expired()
        needed = gone[-1] if gone else state.wal_first - 1  # no row of the WAL has these, or will have them
        is_more = False
        for each in mine if topic_changes.all_know(self.data, topic_changes.ROWS_LEVEL) else ():
            for _ in self._partitions.copy(each, needed, time.time()):
                if every is not None and time.monotonic() - self._wal_at >= every:
                    self._copy_wal(self._options.durable())
                    self._partitions.lay_out(state, states, lives)
                if is_more := every is not None and time.monotonic() - begun >= _TURNS * every:
                    break
            if is_more:
                break
        if drops := self._partitions.drops(state, mine):
            self._commit(*drops)
        self._partitions.lay_out(state, states, lives)
        return is_more, min(map(self._partitions.waiting_seq, mine), default=identity.NEVER)

    def totals(self) -> TierTotals | None:
        """Return what the store has of partitions, and what waits on this disk. The store is not asked.

        None while router.ckpt is missing or damaged.
        """
        parsed = _parsed(self.data, _content(f"{self.data}/{FILES[0]}"))
        if parsed is None:
            return None
        return self._partitions.totals(self._partitions.found(self.commits.state, *parsed), time.time())

    # --- small files -------------------------------------------------------------------------------------------------

    def _copy_files(self, found: SmallFiles) -> None:
        now, rows = time.monotonic(), self._file_rows(found)
        if rows:
            self._commit(*rows)
        self._files_at = now

    def _file_rows(self, found: SmallFiles) -> list[CommitLine]:
        """Copy those of all small files that have changed, and return their rows."""
        rows = []
        for name, content in found.contents.items():
            if (row := self._file(name, content, found)) is not None:
                rows.append(row)
                self._rest(len(content))
        return rows + [
            line("drop", name, why="deleted") for name in self.commits.state.files if name not in found.contents
        ]

    def _changed(self, names: tuple[str, ...]) -> list[CommitLine]:
        """Upload the files among these that have changed since the last upload, and return their rows."""
        contents = {name: content for name in names if (content := _content(f"{self.data}/{name}")) is not None}
        rows = (self._file(name, content, SmallFiles({}, 0, 0)) for name, content in contents.items())
        return [row for row in rows if row is not None]

    def _file(self, name: str, content: bytes, found: SmallFiles) -> CommitLine | None:
        """Copy a file, and return its row; None if the store has this content, or that of a later checkpoint."""
        seq = {FILES[0]: found.routed_seq, FILES[1]: found.producers_seq}.get(name, 0)
        before, crc = self.commits.state.files.get(name), zlib.crc32(content)
        if before is not None and (before.number("crc"), before.number("bytes")) == (crc, len(content)):
            return None
        if before is not None and seq < before.number("seq"):
            return None  # of the leader before this one: the rows of the WAL up to there may be dropped
        made = self._upload(
            f"{self._key('files/' + str(self.commits.state.number + 1))}/{name}", objects.pack_file(content)
        )
        return line("file", name, seq=seq, crc=crc, **made)

    def _rest(self, nbytes: int) -> None:
        """Wait as KMQ_TIER_RATE says; the WAL never waits."""
        until = time.monotonic() + (nbytes / self._options.rate if self._options.rate else 0.0)
        self._options.progress(0)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self._options.progress(0)  # a long wait is no request that hangs

    # --- what is not needed any more ---------------------------------------------------------------------------------

    def _delete_dropped(self) -> None:
        """Delete dropped objects an hour after this process first saw the drop. Objects of another lineage stay."""
        now, dropped = time.monotonic(), self.commits.state.dropped
        self._dropped_at = {key: self._dropped_at.get(key, now) for key in dropped}
        due = [key for key, since in self._dropped_at.items() if now - since >= _DELETE_S][:_DELETES_AT_ONCE]
        for key in due:
            if not FULL_KEY.match(key):
                self.store.delete([full_key(self.lineage, key)])
            self._options.progress(0)
        if due:
            self._commit(*(line("gone", key) for key in due))

    def _look_at_names(self) -> None:
        """Go on with a look at all names, or begin one each day."""
        if self._sweep is None:
            if time.monotonic() < self._sweep_at:
                return
            self._sweep = Sweep(self.store, self.lineage, self.commits.state)
        try:
            is_over = self._sweep.look_at(_NAMES_AT_ONCE, self.commits.state)
            self._options.progress(0)
            if is_over:
                self._end_sweep(self._sweep)
        except StoreError:
            self._sweep, self._sweep_at = None, time.monotonic() + _SWEEP_FIRST_S  # what it did not see is not missing
            raise

    def _end_sweep(self, sweep: "Sweep") -> None:
        """Delete the orphans, unless an object is missing: then it may be one of them, under another name."""
        self.missing = sweep.missing(self.commits.state)
        for row in self.missing[:10]:
            key, effect = row.values["key"], "records that only it has cannot be read or restored"
            self._log.error("tier_object_missing", what=row.what, key=key, effect=effect)
        if sweep.orphans and not self.missing:
            for key in sweep.orphans:
                self.store.delete([key])
                self.orphans += 1
                self._options.progress(0)
            self._log.info("tier_orphans_deleted", count=len(sweep.orphans), first=sweep.orphans[0])
        self._sweep, self._sweep_at = None, time.monotonic() + _SWEEP_S


class Sweep:
    """A look at the names of all objects of a lineage, in parts. `orphans`: the keys that were found."""

    def __init__(self, store: Store, lineage: str, state: TierState) -> None:
        self._lineage, self._claim = lineage, state.claim.number if state.claim else 0
        self.orphans: list[str] = []
        self._unseen = self._named(state)  # what is made later is not looked for
        prefixes = (f"{lineage}/{kind}" for kind in _KINDS)
        self._names = (key for prefix in prefixes for key in store.names(prefix))

    def _named(self, state: TierState) -> set[str]:
        return {full_key(self._lineage, row.values["key"]) for row in state.rows()}

    def look_at(self, count: int, state: TierState) -> bool:
        """Look at the next `count` names. Return True if these were the last ones."""
        names = list(islice(self._names, count))
        self._unseen.difference_update(names)
        committed = self._named(state) | {full_key(self._lineage, key) for key in state.dropped}
        made_by = ((key, _claim_of(key)) for key in names if key not in committed)
        self.orphans += [key for key, claim in made_by if claim is not None and claim < self._claim]
        return len(names) < count

    def missing(self, state: TierState) -> list[CommitLine]:
        """Return the rows in force whose objects had no name. Objects of another lineage are not looked for."""
        return [row for row in state.rows() if f"{self._lineage}/{row.values['key']}" in self._unseen]


def _claim_of(key: str) -> int | None:
    """Return the number of the claim whose process made this object; None if the key is no object's."""
    found = _MADE_BY.fullmatch(key)
    return int(found[1] or found[2]) if found else None


def _seconds(micros: int) -> str:
    return record.format_ts(micros).decode()


def _parsed(data: str, content: bytes | None) -> tuple[checkpoint.Rows, dict[str, int]] | None:
    """Return the rows of this router.ckpt, and since when each topic is in force. None if it is damaged, or not there yet.

    The file may have changed since: below a checkpoint no partition changes.
    """
    if content is None:
        return None
    try:
        _, rows, since = checkpoint.load(data, content)
    except (ValueError, LookupError):
        return None
    return rows, {name: each.from_seq for name, each in since.items()}


def check_may_claim(state: TierState, nonces: Nonces, leadership: Leadership | None, epoch: int) -> None:
    """Raise FencedError unless the last claim lets this broker claim the lineage.

    A pod may whose disk has the nonce of that claim. The leader of a shard may if that claim is a pod's, or one of the
    same shard in no higher epoch: the directory of a pod may have become a shard.
    """
    claim = state.claim
    if claim is None:
        return
    values = claim.values
    if leadership is None:
        is_ours = claim.nonce in nonces.found
    elif "shard" in values:
        is_ours = values["shard"] == leadership.shard and int(values["epoch"]) <= epoch
    else:
        is_ours = "pod" in values
    if state.successor or not is_ours:
        raise FencedError(claim)


def claim_line(data_id: str, leadership: Leadership | None, epoch: int) -> CommitLine:
    """Return the claim of a pod, or of the leader of a shard."""
    return line("claim", shard=leadership.shard, epoch=epoch) if leadership is not None else line("claim", pod=data_id)


def check_is_whole(data: str, state: TierState) -> None:
    """Raise DamagedError if the store has fewer commits than it had: it is another store, or some were deleted."""
    cursor = (_content(f"{data}/{DIRECTORY}/cursor") or b"").split()
    is_ours = len(cursor) == 2 and cursor[1].decode("ascii", "replace") == identity.lineage(data)
    if is_ours and int(cursor[0]) > state.number:
        raise DamagedError(
            f"the store has {state.number} commits of this broker, and had {int(cursor[0])}: it is another store, it is not"
            " mounted, or some were deleted"
        )


def compare(data: str, rows: list[CommitLine]) -> None:
    """Raise AheadError if the last row of the WAL differs from the local WAL, where the disk still has its records."""
    if not rows:
        return
    seq, (last, _) = rows[-1].number("last"), wal.last_numbered(data)
    if seq > last:
        raise AheadError(
            f"the store has records up to seq {seq}, this directory up to {last}: an older state was put back"
        )
    if seq >= reader.first_seq(data):
        first, lines = reader.wal(data).read(seq, MIB)
        here = lines[: lines.find(b"\n") + 1]
        if first != seq or zlib.crc32(here) != rows[-1].number("crc"):
            raise AheadError(f"the store has another record with seq {seq} than this directory: it went on elsewhere")
