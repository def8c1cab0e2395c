"""One turn of the copy: what the store lacks of the WAL, of tables and of small files goes up.

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
Crash       after an object     no commit names it: it is never read;
            after a commit      the next start reads all commits;
            after a drop        the object is deleted in a later turn: deletions repeat.
Same        Before a claim the last line of the last row is compared with the local one. A directory that was put back
            and went on differs there: AheadError, and nothing is written.
Memory      One object as it is stored.
"""

import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq.config.values import MIB
from kmq.files import replace_file
from kmq.log import checkpoint, identity, passes, reader, topics, wal
from kmq.log.damage import DamageError
from kmq.log.rows import FULL_KEY
from kmq.log.segment import Limits, last_line, within
from kmq.logfmt import Logger
from kmq.message import record
from kmq.tier import objects
from kmq.tier.commits import AheadError, CommitLine, CommitLog, DamagedError, FencedError, line
from kmq.tier.objects import MEMBER_BYTES, Packed
from kmq.tier.partitions import PartitionCopier, Uploads
from kmq.tier.store import Store, StoreError, holds, probe

DIRECTORY = "tier"  # below the data directory: what this process remembers
FILES = ("router.ckpt", "producers.ckpt", "deletions", "format", "gateway.starts", "restored")
NAMED = ("dropped.log", "quarantine/log")  # they explain what the WAL lacks, so they go up with its rows
_FILES_S = 3600.0
_TURNS = 5  # times KMQ_TIER_EVERY: after that a turn leaves the rest of the partitions to the next one
_DELETE_S = 3600.0  # between a drop and the deletion: a reader may have planned with the row


class TurnOptions(NamedTuple):
    """`durable` returns the last seq on disk. `progress` is called after each request and each block.

    `limits` returns those of topics without their own. `every`: seconds between two copies of the WAL.
    """

    object_bytes: int
    rate: int
    durable: Callable[[], int]
    progress: Callable[[int], object] = lambda nbytes: None
    limits: Callable[[], Limits] = Limits
    every: float = 60.0


def full_key(lineage: str, key: str) -> str:
    """Return where an object lies. Rows name objects of another lineage by their full keys."""
    return key if FULL_KEY.match(key) else f"{lineage}/{key}"


class SmallFiles(NamedTuple):
    """The small files of one moment, by name, and the seqs that router.ckpt and producers.ckpt cover."""

    contents: dict[str, bytes]
    routed: int
    known: int

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
        """Return the nonce for the next claim, which is on disk then. `in_force`: that of the last claim, or "".

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
        self._wal_at, self._files_at = 0.0, -_FILES_S  # monotonic: when the WAL and all files went up last
        uploads = Uploads(self._key, self._upload, self._commit, self._rest)
        self._partitions = PartitionCopier(data, options.limits, options.object_bytes, uploads, log)
        self._dropped_at: dict[str, float] = {}

    @property
    def copied(self) -> int:
        """The last seq that the store has."""
        return self.commits.state.wal_end - 1

    # --- the claim ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Read all commits and claim the lineage. Raises FencedError, AheadError, RefusedError, DamagedError,
        StoreError; then nothing was written except the probe.
        """
        probe(self.store, self.lineage)
        state = self.commits.read()
        self._check_is_whole(state.number)
        nonces = Nonces(self.data)
        if state.successor or (state.claim is not None and state.claim.nonce not in nonces.found):
            assert state.claim is not None
            raise FencedError(state.claim)
        compare(self.data, state.wal)
        nonce = nonces.next(state.claim.nonce if state.claim else "")
        self.commits.claim(line("claim", pod=self._id), nonce)
        self.is_claimed = True
        self._log.info("tier_claimed", commit=state.number, copied_seq=self.copied)

    def _check_is_whole(self, number: int) -> None:
        """Raise DamagedError if the store has fewer commits than it had: it is another one, or some were deleted."""
        cursor = (_content(f"{self.data}/{DIRECTORY}/cursor") or b"").split()
        if len(cursor) == 2 and cursor[1].decode("ascii", "replace") == self.lineage and int(cursor[0]) > number:
            raise DamagedError(
                f"the store has {number} commits of this broker, and had {int(cursor[0])}: it is another store, or some were"
                " deleted"
            )

    # --- a turn ------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what is missing; return True if more is due than a turn does at most.

        Raises what `claim` raises, and DamageError if a block of the WAL is damaged.
        """
        if not self.is_claimed:
            self.claim()
        self.commits.catch_up()
        self.commits.check_claim()
        are_due = time.monotonic() - self._files_at >= _FILES_S or FILES[0] not in self.commits.state.files
        found = SmallFiles.of(self.data, are_due)
        is_more = False
        self._copy_wal(self._options.durable())
        if self.copied >= max(found.routed, found.known):
            self._copy_tables(found)
            is_more, waiting = self._copy_partitions(found)
            if are_due:
                self._copy_files(found)
            self._drop_wal(waiting)
        self._delete_dropped()
        self.commits.write_state()
        cursor = f"{self.commits.state.number} {self.lineage}\n"
        replace_file(f"{self.data}/{DIRECTORY}/cursor", cursor.encode())
        return is_more

    def _commit(self, *lines: CommitLine) -> None:
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
        self._wal_at = time.monotonic()
        while self.commits.state.wal_end <= high:
            begin, lines = self.commits.state.wal_end, []
            if (first := reader.first_seq(self.data)) > begin:
                lines, begin = [line("drop", "wal", before=first, why="retention")], first
            packed = objects.pack(self._blocks(begin, high))
            if not packed.nbytes:
                return
            last, last_ts = record.stamp(packed.last)
            first_ts = reader.wal(self.data).stamp_of(begin)
            name = f"{begin}-{last}"
            row: dict[str, object] = {
                "first": begin,
                "last": last,
                "ts": f"{_seconds(first_ts[1] if first_ts else last_ts)}-{_seconds(last_ts)}",
            }
            row |= self._upload(f"{self._key(f'wal/{name}')}.log.gz", packed)
            self._commit(*lines, *self._changed(NAMED), line("wal", **row, crc=zlib.crc32(packed.last)))

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

    def _drop_wal(self, waiting: int) -> None:
        """Drop the oldest rows of the WAL that the local WAL does not have any more, and that no file or table needs.

        Those from seq `waiting` on have records of partitions that are in no row yet.
        """
        state = self.commits.state
        covered = [row.number("seq") for row in state.tables.values()]
        covered += [state.files[name].number("seq") if name in state.files else 0 for name in FILES[:2]]
        needed = min(min(covered) + 1, reader.first_seq(self.data), waiting)
        gone = [row.number("last") for row in state.wal if row.number("last") < needed]
        if gone:
            self._commit(line("drop", "wal", before=gone[-1] + 1, why="retention"))

    # --- tables ------------------------------------------------------------------------------------------------------

    def _copy_tables(self, found: SmallFiles) -> None:
        """Copy each table up to the end that router.ckpt says: below it a log is on disk, and does not change."""
        rows, lives = _checkpoint(self.data, found)
        compacted = {table.name for table in passes.CompactedTopics(self.data).found()}
        wanted = {name for name in lives if name.startswith("__") or name in compacted}
        seen = set()
        for (topic, number), at in rows.items():
            if topic in wanted:
                seen.add(f"{topic}/{number}")
                try:
                    self._copy_table(topic, number, lives[topic], at.start, at.end_offset, found.routed)
                except DamageError as err:
                    self._log.error("tier_table_damaged", topic=topic, partition=number, reason=err)
        gone = {name: row for name, row in self.commits.state.tables.items() if rows and name not in seen}
        for name, row in gone.items():
            self._commit(line("drop", name, life=row.values["life"], why="deleted"))

    def _copy_table(self, topic: str, number: int, life: int, start: int, end: int, seq: int) -> None:
        name = f"{topic}/{number}"
        before = self.commits.state.tables.get(name)
        if before is not None and before.number("life") == life:
            grown = end - before.number("end")
            holds_wal = before.number("seq") + 1 < reader.first_seq(self.data)  # no row of the WAL may go before it
            if grown * 2 < max(1, end - start) and not holds_wal:
                return
            if not grown:
                self._commit(before._replace(values={**before.values, "seq": str(seq)}))
                return
        packed = objects.pack(self._table_blocks(topic, number, start, end))
        row: dict[str, object] = {"life": life, "base": start, "end": end, "seq": seq}
        row |= self._upload(f"{self._key(f'tables/{topic}/{life}/{number}/{end}')}.log.gz", packed)
        self._commit(line("table", name, **row))

    def _table_blocks(self, topic: str, number: int, start: int, end: int) -> Iterator[bytes]:
        if start >= end:
            return
        for first, lines in reader.local(self.data, topic, number).chunks(start, MEMBER_BYTES):
            count = record.count_lines(lines)
            if first + count > end:
                lines = b"".join(lines.splitlines(keepends=True)[: end - first])
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
        state, begun = self.commits.state, time.monotonic()
        parsed = _parsed(self.data, found)
        if parsed is None:
            return False, 0
        known, lives = parsed
        mine = self._partitions.found(state, known, lives)
        gone = [row.number("last") for row in state.wal if row.number("last") < reader.first_seq(self.data)]
        is_more = False
        for each in mine:
            for _ in self._partitions.copy(each, gone[-1] if gone else 0, time.time()):
                if time.monotonic() - self._wal_at >= self._options.every:
                    self._copy_wal(self._options.durable())
                    self._partitions.lay_out(mine)
                if is_more := time.monotonic() - begun >= _TURNS * self._options.every:
                    break
            if is_more:
                break
        if drops := self._partitions.drops(state, mine):
            self._commit(*drops)
        self._partitions.lay_out(mine)
        return is_more, min(map(self._partitions.waiting_seq, mine), default=identity.NEVER)

    # --- small files -------------------------------------------------------------------------------------------------

    def _copy_files(self, found: SmallFiles) -> None:
        now, rows = time.monotonic(), []
        for name, content in found.contents.items():
            if (row := self._file(name, content, found)) is not None:
                rows.append(row)
                self._rest(len(content))
        rows += [line("drop", name, why="deleted") for name in self.commits.state.files if name not in found.contents]
        if rows:
            self._commit(*rows)
        self._files_at = now

    def _changed(self, names: tuple[str, ...]) -> list[CommitLine]:
        """Return rows of those of these files that have changed since they went up last."""
        contents = {name: content for name in names if (content := _content(f"{self.data}/{name}")) is not None}
        rows = (self._file(name, content, SmallFiles({}, 0, 0)) for name, content in contents.items())
        return [row for row in rows if row is not None]

    def _file(self, name: str, content: bytes, found: SmallFiles) -> CommitLine | None:
        """Copy a file, and return its row; None if the store has this content."""
        seq = {FILES[0]: found.routed, FILES[1]: found.known}.get(name, 0)
        before, crc = self.commits.state.files.get(name), zlib.crc32(content)
        if before is not None and (before.number("crc"), before.number("bytes")) == (crc, len(content)):
            return None
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
        due = [key for key, since in self._dropped_at.items() if now - since >= _DELETE_S]
        if due:
            self.store.delete([full_key(self.lineage, key) for key in due if not FULL_KEY.match(key)])
            self._commit(*(line("gone", key) for key in due))


def _seconds(micros: int) -> str:
    return record.format_ts(micros).decode()


def _checkpoint(data: str, found: SmallFiles) -> tuple[checkpoint.Rows, dict[str, int]]:
    """Return the rows of router.ckpt, and since when each topic is in force; nothing if the file has changed since."""
    is_same = _content(f"{data}/{FILES[0]}") == found.contents.get(FILES[0])
    return (_parsed(data, found) if is_same else None) or ({}, {})


def _parsed(data: str, found: SmallFiles) -> tuple[checkpoint.Rows, dict[str, int]] | None:
    """Return the same, even if the file has changed since: a partition does not change below a checkpoint.

    None if it is damaged, or not there yet.
    """
    try:
        _, rows, since = checkpoint.load(data, found.contents[FILES[0]])
    except (ValueError, LookupError):
        return None
    return rows, {name: each.from_seq for name, each in since.items()}


def compare(data: str, rows: list[CommitLine]) -> None:
    """Raise AheadError unless the last row of the WAL, as far as the disk still has it, says what the local WAL says."""
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
