"""Writes for transactions: their states, held-back offsets, and the copies of a commit.

    copy of `__transactions` offsets 40…43    → the lines with the transaction's key in their topics, ids from `copy` on

Names       States and offsets are written under one name of the door, copies under `t<pid>`. So a connection that broke
            stores nothing twice, and a repeated copy is recognised as stored (transactions.py). An abort frees
            held-back lines, so its state has a connection of its own, which is not refused when the disk is full.
Order       Lines of one name reach ingress in the order of their ids. Of copies one unit is sent at a time: if a later
            one were stored and an earlier one refused, the ids of the earlier one would be too old.
Size        Compaction leaves a newline for each state that a later one replaces. When `__transaction_state` has more
            than _MOST_SEGMENTS, states before the last _RECENT_SEGMENTS are written again, and the router deletes that
            part.
"""

import asyncio
import time
from collections.abc import Mapping

from kmq.config.settings import Settings
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.topics import declare_own
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import CommittedOffset, Partition, RowKey
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.kafka.transaction import Transaction
from kmq.gateway.kafka.transaction_log import (
    EMPTY,
    HELD,
    LIMITS,
    PARTITIONS,
    READ_BYTES,
    STATES,
    Copied,
    TransactionState,
    held_routing_key,
    render_copies,
)
from kmq.gateway.kafka.units import SPARE, UNIT_BYTES, Units, split
from kmq.log import reader, segment, topic_changes, topics, wal
from kmq.log.deletions import DeletedTopics
from kmq.logfmt import Logger
from kmq.message import record
from kmq.message.text import make_routing_key

_OWN = b"__transactions"  # the name under which states and offsets are written
_OWN_SPARE = b"__transactions-spare"  # of states that free room
_IN_FORCE_S, _LOOK_S = 5.0, 0.01
_MOST_SEGMENTS, _RECENT_SEGMENTS = 8, 4
_AT_ONCE = 200  # states that are written again at once


def _copier(pid: int) -> bytes:
    """Return the name under which a producer's copies are written."""
    return b"t%d" % pid


class _OwnName:
    """A producer name of the door itself, and its connection."""

    def __init__(self, name: bytes, units: Units) -> None:
        self._name, self.units = name, units
        self._turn, self._last = asyncio.Lock(), -1  # the last id; -1: not asked for yet

    async def ask(self) -> None:
        """Ask for the last stored id, of this life or a former one."""
        self._last = await self.units.last_id(self._name)

    async def write(self, lines: list[tuple[bytes, bytes]], most: int) -> int:
        """Write lines. Returns the last seq, once all are durable. `most`: bytes at once."""
        async with self._turn:
            if self._last < 0:
                await self.ask()
            await self.units.room()
            ids = range(self._last + 1, self._last + 1 + len(lines))
            rows = zip(ids, lines, strict=True)
            text = b"".join(b"%b||%d|%b\n" % (key, id, payload) for id, (key, payload) in rows)
            self._last += len(lines)
            sent = [self.units.send(self._name, *unit, lambda _: None) for unit in split(text, len(lines), most)]
        runs = [run for unit in sent for run in await asyncio.shield(unit)]
        return max(run.seq + run.lines - 1 for run in runs)


class TransactionWriter:
    """Writes through the door's connection to ingress. Every call may raise RequestRefused."""

    def __init__(self, settings: Settings, core: Core, groups: Groups, units: Units, log: Logger) -> None:
        self._settings, self._core, self._groups, self._units = settings, core, groups, units
        self._own, self._spare = _OwnName(_OWN, units), _OwnName(_OWN_SPARE, Units(settings, log, SPARE))
        self._declaring, self._is_declared = asyncio.Lock(), False
        self._deleted = DeletedTopics(settings.data)

    async def take_over(self) -> None:
        """Fence the former gateway, and wait until all that it has sent is routed. Then it writes nothing more."""
        await self._spare.ask()
        await self._own.ask()
        await self.settled()

    async def settled(self) -> None:
        """Wait until all that is on disk is routed."""
        stored, _ = await asyncio.to_thread(wal.last_stored, self._settings.data)
        await self._core.watermark.passed(stored)

    async def write_state(self, txn: Transaction, state: TransactionState, *, frees: bool = False) -> None:
        """Write the next state of an id, and put it in force once it is durable. `frees`: the state makes room."""
        before = self._core.watermark.durable  # in case the seq is no longer known
        lines, most = [(make_routing_key(STATES, state.id), state.encode())], self._settings.max_line + UNIT_BYTES
        seq = await (self._spare if frees else self._own).write(lines, most)
        txn.last = state._replace(seq=seq or before)

    async def write(self, lines: list[tuple[bytes, bytes]]) -> int:
        """Write lines under the door's own name. Returns the last seq, once all are durable."""
        return await self._own.write(lines, self._settings.max_line + UNIT_BYTES)

    async def close(self) -> None:
        await self._spare.units.close()

    async def declare(self) -> None:
        """Declare both topics before their first records, and wait until they are in force."""
        data = self._settings.data
        if self._is_declared:
            return
        async with self._declaring:
            for name, partitions in ((HELD, PARTITIONS), (STATES, 1)):
                await declare_own(data, name, partitions, LIMITS[name])
            until = time.monotonic() + _IN_FORCE_S
            while any(topics.load(data, name)[1] is None for name in (HELD, STATES)):
                if time.monotonic() > until:
                    raise RequestRefused("not_ready", "the router has not made the topics of transactions yet")
                await asyncio.sleep(_LOOK_S)
            self._is_declared = True

    async def renew_states(self, transactions: Mapping[str, Transaction]) -> None:
        """Write the states at the front of a long log again, and let the router delete that front.

        An id in the middle of a change soon has its next state. Until it has, its old state is needed, and nothing is
        deleted.
        """
        data = self._settings.data
        segments = await asyncio.to_thread(segment.listing, f"{data}/topics/{STATES}/0")
        if len(segments) <= _MOST_SEGMENTS:
            return
        front = segments[-_RECENT_SEGMENTS][0]
        _, lines = await asyncio.to_thread(reader.partition(data, STATES, 0).read, front, 1)
        front_seq = record.seq_of(lines)
        old = [txn for txn in transactions.values() if txn.last.seq < front_seq]

        async def renew(txn: Transaction) -> None:
            if transactions.get(txn.id) is txn and not txn.is_changing:
                async with txn.turn():
                    await self.write_state(txn, txn.next_state(EMPTY))

        for at in range(0, len(old), _AT_ONCE):
            await asyncio.gather(*map(renew, old[at : at + _AT_ONCE]))
        if all(txn.last.seq >= front_seq for txn in transactions.values()):
            await asyncio.to_thread(topic_changes.begin_at, data, STATES, None, {0: front})

    # --- the copy --------------------------------------------------------------------------------------------------------

    async def copy(self, decided: TransactionState) -> Copied:
        """Write the lines of a decided transaction to their topics; all are durable when this returns."""
        log = self._core.partitions.open(HELD, decided.partition)
        key, name = held_routing_key(decided.partition, decided.held_key), _copier(decided.pid)
        at, max_line = decided.first, self._settings.max_line
        copied = Copied(decided.copy, {}, 0, 0)
        while at < decided.end:
            first, found = await asyncio.to_thread(log.read, at, READ_BYTES)
            if first != at or not found:
                text = f"{HELD}/{decided.partition}: offsets {at} to {first} are missing; {decided.id} is torn"
                raise RequestRefused("damaged", text)
            self._deleted.look()
            lines = found[:-1].split(b"\n")[: decided.end - at]
            copies, copied = await asyncio.to_thread(render_copies, lines, key, name, copied, self._deleted, max_line)
            at += len(lines)
            count = record.count_lines(copies)
            for unit in split(copies, count, max_line + UNIT_BYTES) if count else ():
                seq, left_out = await self._store(name, *unit)  # one at a time, because ids must rise
                copied = copied._replace(too_long=copied.too_long + left_out, last_seq=max(copied.last_seq, seq))
        return copied

    async def _store(self, name: bytes, text: bytes, count: int) -> tuple[int, int]:
        """Store copies, except those that can never be stored. Returns the last seq, and the number of those left out.

        A former life has left some out as too long, and has stored later ones. Halving the unit finds them.
        """
        await self._units.room()
        try:
            runs = await self._units.send(name, text, count, lambda _: None)
        except RequestRefused as err:
            if err.code != "id_too_old":
                raise
            if count == 1:
                return 0, 1
            lines = text[:-1].split(b"\n")
            halves = lines[: count // 2], lines[count // 2 :]
            found = [await self._store(name, b"\n".join(half) + b"\n", len(half)) for half in halves]
            return max(seq for seq, _ in found), sum(left_out for _, left_out in found)
        return max(run.seq + run.lines - 1 for run in runs), 0

    async def touch_name(self, pid: int) -> None:
        """Ask for the last id of a waiting commit's name, so that it is not forgotten before others (dedupe.py)."""
        await self._units.last_id(_copier(pid))

    async def store_offsets(self, offsets: Mapping[RowKey, CommittedOffset], decided_seq: int) -> None:
        """Commit offsets, except where the group has committed since: they were stored already, or are outdated."""
        table = self._groups.store.table
        by_group: dict[tuple[str, str, int], dict[Partition, CommittedOffset]] = {}
        for row, offset in offsets.items():
            stored = table.row_at(row)
            if not (isinstance(stored, CommittedOffset) and stored.committed_seq > decided_seq):
                rows = by_group.setdefault((row.group, offset.member, offset.generation), {})
                rows[row.topic, row.partition] = offset
        for (group, member, generation), rows in by_group.items():
            commits = {at: OffsetCommit(each.offset, each.metadata, each.leader_epoch) for at, each in rows.items()}
            again = {at: self._groups.read_again(group, member, at, each.offset) for at, each in rows.items()}
            await self._groups.store.commit(group, commits, member, generation, decided=True)
            if self._groups.is_ready:  # otherwise a restore finds them
                self._groups.coordinator.committed(group, time.monotonic())
                for at, each in rows.items():
                    await self._groups.forget(group, at, again[at], each.offset)
