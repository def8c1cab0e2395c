"""Committed offsets of all groups: in memory as a table, on disk as records of topic `__consumer_offsets`.

    await store.commit("etl", {("orders", 0): OffsetCommit(8)}, member, generation)
    store.committed("etl")     → {("orders", 0): CommittedOffset(8, …)}

Owner       the gateway: one store, its connection to ingress, and one task, from its start to its end. No other client
            may write this topic (kmq/ingress/hello.py, reserved=1).
Invariant   A commit that has returned is on disk, and `committed` shows it. `committed` never shows what is not on
            disk. Of two commits for one partition the one with the higher seq counts, in memory as in the log. If a
            *client* repeats an old commit after a newer one, the coordinator refuses it, because it knows generations.
            Offsets of a deleted topic, stored before its deletion, are never shown again (kmq/log/deletions.py).
            While offsets that a transaction has committed are not stored yet (kafka/transactions.py), their group has
            no members, and no client reads its offsets or commits.
            No group is forgotten before the gateway has run for GRACE_S: members return within their session timeout,
            and until then the gateway does not know them.
Order       Commits get their seqs in the order of the calls, whatever breaks. The producer's name is the same for every
            gateway of a broker: a new connection fences the older one, and its ids continue after the last one stored.
            Lines that an older connection, or a killed gateway, has left in a socket are therefore refused, or
            recognised as stored (`!dup`). They never land after a newer commit. All rows of a commit are one delivery.
            Commits of one turn of the event loop leave with one write, and the broker syncs them together.
Crash       The table is in memory only. `load` waits until the router has routed everything that is in the WAL, so all
            acked commits are in the log that it reads. Killed in the middle of a commit: each row is stored or not.
Size        Compaction (kmq/gateway/core/compactor.py) removes commits that later ones replace, and leaves their
            newlines. When the log is over _LARGE_BYTES, rows whose records lie before its last _RECENT_BYTES are
            written again. Then the front of the log is not needed any more, and the router deletes it by size (LIMITS).
            Only commits make the log grow, and only a gateway writes them. So the router never deletes rows when no
            gateway could write them again.
Memory      The table's (offset_table.py). At most _IN_FLIGHT rows and _IN_FLIGHT_BYTES are being written, and _WAITING
            commits wait; then `busy`.
Not covered With RB_OVERFLOW_POLICY=drop_oldest in force on the ring `durable`, a commit that was dropped there is in
            the WAL alone, and forgotten by the next start. On the ring `framed` it means that no commit is accepted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kmq.broker import stats
from kmq.broker.clock import AgeClock
from kmq.client.options import Options
from kmq.client.producer_aio import ProducerLink
from kmq.client.producer_core import ProducerCore
from kmq.config.settings import Settings
from kmq.config.values import FOREVER, MIB
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, refusal_of
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.ingress import reserved_address
from kmq.gateway.core.topics import declare_own
from kmq.gateway.groups import group_records
from kmq.gateway.groups.offset_table import (
    MAX_OFFSET,
    TOPIC,
    CommittedOffset,
    NackRow,
    OffsetRow,
    OffsetTable,
    Partition,
    RowKey,
    encode_payload,
    read_log,
    routing_key,
)
from kmq.log import reader, segment, topics, wal
from kmq.log.damage import DamageError
from kmq.log.deletions import DeletedTopics
from kmq.log.partition import directory_of
from kmq.logfmt import Logger
from kmq.message import record
from kmq.message.text import format_text
from kmq.sending.delivery import Delivery

# --- connection to ingress -------------------------------------------------------------------------------------------

PRODUCER = "__offsets"
_PATIENCE_S = 15.0  # until a commit fails: a stage that is restarted takes a few seconds
_IN_FLIGHT, _IN_FLIGHT_BYTES = 20_000, 8 * MIB
_WAITING = 1000  # commits that wait for room
_REPLACE_S = 1.0  # shortest time before a connection that ingress refused for good is replaced

Line = tuple[bytes, bytes]  # routing key, payload
Stored = Callable[[Sequence[int]], None]  # called with the seqs of durable lines; 0: the line was refused


class OffsetWriter:
    """Writes records through the WAL, with the protocol core of kmq.client."""

    def __init__(self, settings: Settings, stalled: Callable[[str], None]) -> None:
        """`stalled` is called with a text when no reply comes for some seconds."""
        self._settings, self._stalled = settings, stalled
        self._order = asyncio.Lock()
        self._waiting = 0
        self._open()

    def _open(self) -> None:
        options = Options(
            producer=PRODUCER,
            reserved=True,
            retry=frozenset(),  # report a refusal at once: the door knows how long its client waits
            delivery_timeout_s=_PATIENCE_S,
            max_in_flight=_IN_FLIGHT,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            on_stall=self._stalled,
        )
        self._core = ProducerCore(options)
        self._link = ProducerLink(self._core, partial(reserved_address, self._settings))
        self._opened = time.monotonic()

    async def write(self, lines: Sequence[Line], stored: Stored) -> None:
        """Return once all lines are durable. Raises RequestRefused; even then some of them may be durable.

        If the caller is cancelled, queued lines are written all the same, and `stored` is called for them.
        """
        if self._waiting or self._core.failed is not None or self._core.window.is_full:
            outcome = await self._queue_in_turn(lines, stored)
        else:
            outcome = self._queue(lines, stored)
        await outcome

    async def _queue_in_turn(self, lines: Sequence[Line], stored: Stored) -> "asyncio.Future[None]":
        """Queue lines after those of earlier calls, as soon as there is room. Raises RequestRefused."""
        if self._waiting >= _WAITING:
            raise RequestRefused("busy", f"{_WAITING} commits wait already")
        self._waiting += 1
        try:
            async with asyncio.timeout(_PATIENCE_S), self._order:  # in the order of the calls, row by row
                await self._await_room()
                return self._queue(lines, stored)
        except TimeoutError:
            raise RequestRefused(
                "busy", f"no room for another commit: {self._core.describe(time.monotonic())}"
            ) from None
        finally:
            self._waiting -= 1

    async def _await_room(self) -> None:
        if self._core.failed is not None and time.monotonic() - self._opened > _REPLACE_S:
            await self._link.end()
            self._open()
        if self._core.window.is_full:
            core = self._core
            await self._link.wait(lambda: core.failed is not None or core.window.is_half_free)
        if self._core.failed is not None:
            raise refusal_of(self._core.failed, {})

    def _queue(self, lines: Sequence[Line], stored: Stored) -> "asyncio.Future[None]":
        core, now = self._core, time.time()
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(delivery: Delivery) -> None:
            seqs = delivery.seqs
            if any(seqs):
                stored(seqs)
            if outcome.done():
                return  # the caller was cancelled
            if delivery.error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(refusal_of(delivery.error, {}))

        delivery = Delivery(done)
        data = b"".join(format_text(key, payload or None, core.ids.make(), now) for key, payload in lines)
        delivery.is_provisional = core.ids.is_provisional
        core.add_lines(delivery, data, len(lines))
        self._link.queued()
        return outcome

    async def close(self) -> None:
        """End; commits without a reply fail, although they may be stored."""
        await self._link.end()


# --- store -----------------------------------------------------------------------------------------------------------

MAX_NAME = 200  # bytes of a group's or a member's name
MAX_METADATA = 1024  # bytes
# Small segments, because only sealed ones are compacted. Removed records leave newlines, so the front of the log is
# deleted by size. Rows there that still count have been written again before (see Size above).
LIMITS = {"cleanup": "compact", "segment_bytes": "1 MiB", "retention_bytes": "256 MiB"}
_LOAD_S = 30.0  # longest wait for the router
_TOMBSTONES = 1000  # written at once
_NOWHERE: Mapping[Partition, int] = {}
_AT_ONCE = 200  # groups whose rows are written again at once


class OffsetCommit(NamedTuple):
    """A commit for one partition: the next offset to read, the member's own text, the leader epoch, if it has one."""

    offset: int
    metadata: str = ""
    leader_epoch: int | None = None

    def by(self, member: str, generation: int, ts: float) -> CommittedOffset:
        """Return the row to store."""
        return CommittedOffset(self.offset, ts, member, generation, self.metadata, leader_epoch=self.leader_epoch)


class OffsetStore:
    """The committed offsets. Use it in one event loop; `load` once before anything else."""

    def __init__(self, settings: Settings, watermark: Watermark, log: Logger) -> None:
        self.is_loaded = False
        self.incomplete: Collection[str] = ()  # groups whose transaction has committed offsets not stored yet
        self.records = 0  # number in the log: read by `load`, and written since
        self.members: dict[str, tuple[int, bytes]] = {}  # group → seq and payload of its record (group_records.py)
        self.epoch_s = time.time() - time.monotonic()  # OffsetKeeper sets a better value
        self.watermark = watermark
        self._data, self._log = settings.data, log
        self._table = OffsetTable()
        self._writing = Counter[str]()  # group → writes without an outcome
        self._deleted = DeletedTopics(settings.data)
        self._is_declared, self._declaring = False, asyncio.Lock()
        self._writer = OffsetWriter(settings, lambda text: log.warn("commits_stalled", waiting=text))

    async def load(self) -> None:
        """Read the log. Raises RequestRefused (not_routed) if the router does not catch up with the WAL in time.

        Raises DamageError if the log cannot be read. Then the store stays as it is: no group seems to have no offsets.
        """
        stored, _ = await asyncio.to_thread(wal.last_stored, self._data)
        try:
            async with asyncio.timeout(_LOAD_S):
                await self.watermark.passed(stored)
        except TimeoutError:
            raise RequestRefused(
                "not_routed", f"offsets up to seq {stored} are on disk, but the router is at {self.watermark.routed}"
            ) from None
        started = time.monotonic()
        self._deleted.look()
        rows, self.records, self.members = await asyncio.to_thread(read_log, self._data, self._log, group_records.scan)
        self._table.clear()
        for place, row in rows:
            if not self._deleted.covers(place.topic, row.seq):
                self._table.put(place, row)
                if isinstance(row, NackRow):
                    # While recv_ts is held (kmq/broker/clock.py) the clock of each gateway begins at the same time.
                    # Without this, rows of the last gateway would wait for as long as that gateway had lived.
                    self.epoch_s = max(self.epoch_s, row.first - time.monotonic())
        self.is_loaded = True
        took = round(time.monotonic() - started, 3)
        self._log.info("offsets_loaded", groups=len(self._table.groups), records=self.records, seconds=took)

    async def close(self) -> None:
        """End; commits without a reply fail, although they may be stored."""
        await self._writer.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> OffsetTable:
        """Return all rows; do not change them. Like all other calls, raises RequestRefused before `load` has ended."""
        if not self.is_loaded:
            raise RequestRefused("not_ready", "the gateway has not read the committed offsets yet")
        return self._table

    def committed(self, group: str) -> Mapping[Partition, CommittedOffset]:
        """Return (topic, partition) → the group's commit; {} for an unknown group. Do not change it."""
        return self.table.commits_of(group)

    def nacks(self, group: str, topic: str, partition: int) -> Mapping[int, NackRow]:
        """Return offset → row of each message given back by the group in a partition. Do not change it."""
        return self.table.nacks_of(group, (topic, partition))

    def now_s(self) -> float:
        """Return seconds since the epoch, by a clock that runs evenly while this gateway lives. Rows are due by it."""
        return time.monotonic() + self.epoch_s

    def check_complete(self, group: str) -> None:
        """Raise RequestRefused while offsets that a transaction of the group has committed are not stored yet."""
        if group in self.incomplete:
            text = f"group {group}: offsets that a transaction has committed are not stored yet"
            raise RequestRefused("not_ready", text)

    def is_writing(self, group: str) -> bool:
        """Return True if a write of this group has no outcome yet."""
        return group in self._writing

    def groups(self) -> list[str]:
        """Return the names of the groups that have committed something, in order."""
        return self.table.groups

    def generations(self) -> dict[str, int]:
        """Return group → the highest generation in its commits."""
        rows = {group: self.committed(group).values() for group in self.groups()}
        return {group: max((0, *(row.generation for row in each))) for group, each in rows.items()}

    @property
    def rows(self) -> int:
        """Return how many rows all groups have: about as many records as compaction would leave."""
        return self.table.rows

    # --- writing -----------------------------------------------------------------------------------------------------

    async def commit(
        self,
        group: str,
        rows: Mapping[Partition, OffsetCommit],
        member: str = "",
        generation: int = 0,
        *,
        decided: bool = False,
        anew: Mapping[Partition, int] = _NOWHERE,
    ) -> None:
        """Commit for some partitions. Returns once all rows are durable, and visible in `committed`.

        The caller checks that this member may commit. Raises RequestRefused: then any row may be stored or not, and
        repeating the commit is safe. Cancelling the caller does not undo the commit. `decided`: a transaction has
        decided it, so it is written even without room. `anew`: partition → offset from which the group forgets what it
        gave back, in the same write after the commit. If a kill cuts that write, those rows stay, and nothing is lost.
        """
        if not decided:
            self.check_complete(group)
        self.check(group, member, rows)
        now = round(time.time(), 3)  # as it is stored
        new: dict[RowKey, OffsetRow] = {}
        for (topic, partition), commit in rows.items():
            new[RowKey(group, topic, partition)] = commit.by(member, generation, now)
        old = [
            RowKey(group, *place, offset)
            for place, least in anew.items()
            for offset in self.nacks(group, *place)
            if offset >= least
        ]
        await self._write(group, new, decided, old)

    def check(self, group: str, member: str, rows: Mapping[Partition, OffsetCommit]) -> None:
        """Raise RequestRefused for rows that `commit` does not store."""
        _check_name("group", group)
        _check_name("member", member, least=0)
        for (_, partition), commit in rows.items():
            _check_row(partition, commit.offset, commit.metadata)

    async def write_members(self, group: str, payload: bytes) -> None:
        """Write the record of a group's members, or a tombstone when the last one has left. Raises RequestRefused."""
        if not payload and group not in self.members:
            return
        self.members[group] = 0, payload  # a row that is written again, or removed, is always the newest

        def stored(seqs: Sequence[int]) -> None:
            self.records += bool(seqs[0])
            if self.members.get(group, (0, b""))[1] == payload:
                if payload:
                    self.members[group] = seqs[0], payload
                else:
                    del self.members[group]

        await self._declare()
        await self._writer.write([(group_records.routing_key(group), payload)], stored)

    async def nack(self, group: str, topic: str, partition: int, given: Mapping[int, NackRow]) -> None:
        """Store rows of given-back messages (offset → row), new or changed. Durable when this returns."""
        _check_name("group", group)
        for offset, row in given.items():
            _check_row(partition, offset, row.reason)
        await self._write(group, {RowKey(group, topic, partition, offset): row for offset, row in given.items()})

    async def nack_done(self, group: str, topic: str, partition: int, *offsets: int) -> None:
        """Forget given-back messages that were committed, became dead letters, or are gone."""
        nacks = self.nacks(group, topic, partition)
        await self._write_tombstones(
            group, [RowKey(group, topic, partition, offset) for offset in offsets if offset in nacks]
        )

    async def delete(self, group: str, partitions: Collection[Partition] | None = None) -> None:
        """Forget a group, or its rows of some partitions. Durable when this returns.

        The caller checks that no member reads there.
        """
        rows = [place for place, _ in self.table.rows_of(group)]
        await self._write_tombstones(
            group, [row for row in rows if partitions is None or (row.topic, row.partition) in partitions]
        )

    async def forget_deleted_topics(self) -> int:
        """Forget offsets of deleted topics; return how many rows. Call it regularly.

        `committed` does not show them from now on. Tombstones let compaction remove their records.
        """
        table = self.table
        self._deleted.look()
        count = left = 0
        for number, group in enumerate(table.groups if self._deleted.is_due else ()):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn
            rows = table.rows_of(group)
            gone = [place for place, row in rows if self._deleted.covers(place.topic, row.seq)]
            if gone and self._writing[group]:  # a tombstone might delete a commit that is being written
                left += len(gone)
            elif gone:
                count += len(gone)
                await self._write_tombstones(group, gone)
        self._deleted.is_due = self._deleted.is_due and left > 0
        return count

    async def forget_idle(
        self,
        retention_s: float,
        now: float,
        is_alive: Callable[[str], bool],
        forgotten: Callable[[str], None] = lambda group: None,
    ) -> int:
        """Forget groups that committed nothing for so long and are not alive (have members); return how many.

        `now`: seconds since the epoch, of a clock that does not jump. `forgotten` is called for each of them.
        """
        table = self.table
        count = 0
        for number, group in enumerate(table.groups):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn
            times = [row.ts if isinstance(row, CommittedOffset) else row.due for _, row in table.rows_of(group)]
            if times and max(times) < now - retention_s and not self._writing[group] and not is_alive(group):
                count += 1
                await self.delete(group)
                forgotten(group)
                self._log.info("group_forgotten", group=group, reason="KMQ_GROUP_RETENTION")
        return count

    async def write_again(self, before_seq: int) -> int:
        """Write rows whose records lie before `before_seq` again, unchanged; return how many were left out.

        A group with a commit being written is left out: its old offset must not land after the new one.
        """
        table = self.table

        async def again(group: str) -> int:
            old = [(place, _as_before(row)) for place, row in table.rows_of(group) if row.seq < before_seq]
            if self._writing[group]:
                return len(old)
            if old:  # without an await, so no commit can come between reading the rows and queueing them
                await self._send(group, old)
            return 0

        for group, (seq, payload) in [*self.members.items()]:
            if seq < before_seq:
                await self.write_members(group, payload)
        groups, left = table.groups, 0
        for at in range(0, len(groups), _AT_ONCE):
            left += sum(await asyncio.gather(*map(again, groups[at : at + _AT_ONCE])))
        return left

    async def _write(
        self, group: str, rows: Mapping[RowKey, OffsetRow], decided: bool = False, gone: Sequence[RowKey] = ()
    ) -> None:
        if rows:
            if not decided:
                self.table.check_room(group, rows)
            await self._declare()
            await self._send(group, [*rows.items(), *((place, None) for place in gone)])

    async def _write_tombstones(self, group: str, places: Sequence[RowKey]) -> None:
        for at in range(0, len(places), _TOMBSTONES):
            await self._send(group, [(place, None) for place in places[at : at + _TOMBSTONES]])

    async def _send(self, group: str, rows: Sequence[tuple[RowKey, OffsetRow | None]]) -> None:
        """Write rows of a group. A row of None is a tombstone."""
        lines = [(routing_key(place), encode_payload(row) if row else b"") for place, row in rows]
        self._writing[group] += 1
        try:
            await self._writer.write(lines, partial(self._apply, rows))
        finally:
            self._writing[group] -= 1
            if not self._writing[group]:
                del self._writing[group]

    def _apply(self, rows: Sequence[tuple[RowKey, OffsetRow | None]], seqs: Sequence[int]) -> None:
        """Put rows that are durable into the table. `seqs`: 0 for a row that was refused."""
        for (place, row), seq in zip(rows, seqs, strict=True):
            if not seq:
                continue
            self.records += 1
            if row is None:
                self._table.drop(place, seq)
            elif not self._deleted.covers(place.topic, seq):
                self._table.put(place, row._replace(seq=seq))

    # --- rules -------------------------------------------------------------------------------------------------------

    async def _declare(self) -> None:
        """Declare the topic before its first record. Otherwise that record would create it without compaction."""
        if self._is_declared:
            return
        async with self._declaring:  # keeps the order of the first commits
            await declare_own(self._data, TOPIC, 1, LIMITS)
            self._is_declared = True


def _as_before(row: OffsetRow) -> OffsetRow:
    """Return the row to write again. A commit keeps the seq of its first record."""
    return row if isinstance(row, NackRow) else row._replace(first_seq=row.committed_seq)


def _check_name(what: str, name: str, least: int = 1) -> None:
    if not least <= _size(what, name) <= MAX_NAME:
        raise RequestRefused("bad_request", f"{what}: must be {least} to {MAX_NAME} bytes")


def _check_row(partition: int, offset: int, text: str) -> None:
    if not 0 <= offset <= MAX_OFFSET:
        raise RequestRefused("bad_request", f"offset {offset}: must be 0 to {MAX_OFFSET}")
    if not 0 <= partition < topics.MAX_PARTITIONS:
        raise RequestRefused("bad_request", f"partition {partition}: must be 0 to {topics.MAX_PARTITIONS - 1}")
    if _size("metadata", text) > MAX_METADATA:
        raise RequestRefused("bad_request", f"metadata: must be at most {MAX_METADATA} bytes")


def _size(what: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestRefused("bad_request", f"{what}: must be text") from None


# --- task ------------------------------------------------------------------------------------------------------------

_TURN_S = 1.0
_IDLE_S = 60.0  # between two looks for idle groups
GRACE_S = 3600.0  # twice the longest session timeout
_SIZE_S = 10.0  # between two looks at the size of the log
_LARGE_BYTES, _RECENT_BYTES = 192 * MIB, 96 * MIB  # the router deletes from 256 MiB on


class OffsetKeeper:
    """The task that loads the store, and forgets idle groups and deleted topics."""

    def __init__(
        self,
        settings: Settings,
        row: stats.Row,
        store: OffsetStore,
        log: Logger,
        is_alive: Callable[[str], bool] = lambda group: True,
        forgotten: Callable[[str], None] = lambda group: None,
    ) -> None:
        """`is_alive` says whether a group has members. `forgotten` is called for each group that was forgotten."""
        self.is_alive, self._forgotten = is_alive, forgotten
        self._settings, self._row, self._store, self._log = settings, row, store, log
        self._clock: AgeClock | None = None
        self._last_s = 0.0  # when the last record was stored
        self._look_at = time.monotonic() + GRACE_S
        self._failed = ""
        self._size_at = 0.0

    async def run(self) -> None:
        """Work until cancelled. A failure is retried, and logged once for each reason."""
        while True:
            try:
                if self._store.is_loaded:
                    await self._turn()
                else:
                    self._store.epoch_s = await self._now() - time.monotonic()
                    await self._store.load()
                    self._row.failing = 0
                self._failed = ""
            except DamageError as err:
                self._row.failing = 1
                if str(err) != self._failed:
                    self._failed = str(err)
                    effect = "no group is served until they are healed; tried again"
                    self._log.error("offsets_damaged", reason=err, effect=effect)
            except (KmqError, OSError) as err:
                if isinstance(err, RequestRefused) and err.code == "stopping":
                    return
                if str(err) != self._failed:
                    self._failed = str(err)
                    self._log.warn("offsets_not_kept", reason=err, effect="tried again")
            await asyncio.sleep(_TURN_S)

    async def _turn(self) -> None:
        await self._store.forget_deleted_topics()
        await self._bound_size()
        now = await self._now()
        if self._settings.group_retention != FOREVER and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _IDLE_S
            await self._store.forget_idle(self._settings.group_retention, now, self.is_alive, self._forgotten)

    async def _now(self) -> float:
        """Return seconds since the epoch by a clock that does not jump. Call it every few seconds."""
        if self._clock is None:
            _, last_us = await asyncio.to_thread(wal.last_stored, self._settings.data)
            self._clock = AgeClock(self._row, last_us, self._log)
            self._last_s = last_us / 1_000_000
        return max(self._clock.now_s(), self._last_s)  # a machine may start with a date in the past

    async def _bound_size(self) -> None:
        if time.monotonic() < self._size_at:
            return
        self._size_at = time.monotonic() + _SIZE_S
        if self._store.rows:  # an idle gateway reads no directory
            await self._write_again(
                await asyncio.to_thread(segment.survey, directory_of(self._settings.data, TOPIC, 0))
            )

    async def _write_again(self, segments: list[segment.Segment]) -> None:
        """Write the rows at the front of a large log again."""
        size = sum(part.size for part in segments)
        if size <= _LARGE_BYTES:
            return
        before = 0
        for part in segments:
            if size <= _RECENT_BYTES:
                break
            size, before = size - part.size, part.first
        log = reader.partition(self._settings.data, TOPIC, 0)
        found = await asyncio.to_thread(log.read, before, 1)
        if found[1]:
            await self._store.write_again(record.seq_of(found[1]))
