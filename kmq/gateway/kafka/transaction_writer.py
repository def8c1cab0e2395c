"""What the door writes for transactions: their states, the offsets that they hold back, and the copies of a commit.

Names       States and offsets are written under one name of our own, copies under `t<pid>`. So a connection that broke stores
            nothing twice, and a copy that is made again finds what is there (transactions.py).
Order       Lines of one name reach ingress in the order of their ids. Of copies one unit is on its way at a time: were a later
            one stored and an earlier one refused, the ids of the earlier one would be too old.
"""

import asyncio
import os
import time
from collections.abc import Mapping

from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import CommittedOffset, Partition, RowKey
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.kafka.transaction_log import (
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
from kmq.gateway.kafka.units import UNIT_BYTES, Units, split
from kmq.log import deletions, topics, wal
from kmq.log.deletions import Deleted
from kmq.message import record
from kmq.message.text import make_routing_key

_OWN = b"__transactions"  # the name under which states and offsets are written
_IN_FORCE_S, _LOOK_S = 5.0, 0.01


class TransactionWriter:
    """Writes through the door's connection to ingress. Every call may raise RequestRefused."""

    def __init__(self, settings: Settings, core: Core, groups: Groups, units: Units) -> None:
        self._settings, self._core, self._groups, self._units = settings, core, groups, units
        self._turn, self._last = asyncio.Lock(), -1  # the last id under _OWN; -1: to be asked for
        self._declaring, self._is_declared = asyncio.Lock(), False
        self._deleted, self._deleted_ns = Deleted([]), -1

    async def take_over(self) -> None:
        """Fence the gateway before this one, and wait until what it has sent is routed: it writes nothing any more."""
        self._last = await self._units.last_id(_OWN)
        await self.settled()

    async def settled(self) -> None:
        """Wait until what is on disk is routed."""
        stored, _ = await asyncio.to_thread(wal.last_stored, self._settings.data)
        await self._core.watermark.passed(stored)

    async def write_state(self, state: TransactionState) -> int:
        """Write a state. Returns its seq once it is durable."""
        return await self.write([(make_routing_key(STATES, state.id), state.encode())])

    async def write(self, lines: list[tuple[bytes, bytes]]) -> int:
        """Write lines of our own. Returns the last seq, once all are durable. Raises RequestRefused."""
        most = self._settings.max_line + UNIT_BYTES
        async with self._turn:
            if self._last < 0:
                self._last = await self._units.last_id(_OWN)
            await self._units.room()
            ids = range(self._last + 1, self._last + 1 + len(lines))
            rows = zip(ids, lines, strict=True)
            text = b"".join(b"%b||%d|%b\n" % (key, id, payload) for id, (key, payload) in rows)
            self._last += len(lines)
            sent = [self._units.send(_OWN, *unit, lambda: None) for unit in split(text, len(lines), most)]
        runs = [run for unit in sent for run in await asyncio.shield(unit)]
        return max(run.seq + run.lines - 1 for run in runs)

    async def declare(self) -> None:
        """Declare both topics before their first records, and wait until they are in force."""
        data = self._settings.data
        if self._is_declared:
            return
        async with self._declaring:
            try:
                for name, partitions in ((HELD, PARTITIONS), (STATES, 1)):
                    if not os.path.isdir(f"{data}/topics/{name}"):
                        await asyncio.to_thread(topics.declare, data, name, partitions, LIMITS[name], own=True)
            except KmqError as err:
                raise RequestRefused("internal", str(err)) from err
            until = time.monotonic() + _IN_FORCE_S
            while any(topics.load(data, name)[1] is None for name in (HELD, STATES)):
                if time.monotonic() > until:
                    raise RequestRefused("not_ready", "the router has not made the topics of transactions yet")
                await asyncio.sleep(_LOOK_S)
            self._is_declared = True

    # --- the copy --------------------------------------------------------------------------------------------------------

    async def copy(self, decided: TransactionState) -> "Copied":
        """Write the lines of a decided transaction to their topics. Returns the offsets among them."""
        log = self._core.partitions.open(HELD, decided.partition)
        key, name = held_routing_key(decided.partition, decided.held_key), b"t%d" % decided.pid
        at, id, dropped, last_seq = decided.first, decided.copy, 0, 0
        offsets: dict[RowKey, CommittedOffset] = {}
        while at < decided.end:
            first, lines = await asyncio.to_thread(log.read, at, READ_BYTES)
            if first != at or not lines:
                text = f"{HELD}/{decided.partition}: offsets {at} to {first} are missing; {decided.id} is torn"
                raise RequestRefused("damaged", text)
            part = await asyncio.to_thread(render_copies, lines, decided.end - at, key, id, self._deletions())
            at, id = at + part.lines, part.next_id
            dropped += part.dropped
            offsets |= part.offsets
            count = record.count_lines(part.text)
            for unit in split(part.text, count, self._settings.max_line + UNIT_BYTES) if count else ():
                await self._units.room()
                runs = await self._units.send(name, *unit, lambda: None)  # one at a time: ids must rise
                last_seq = max(last_seq, *(run.seq + run.lines - 1 for run in runs))
        await self._core.watermark.passed(last_seq)  # so that who hears of the commit finds its records
        return Copied(id, offsets, dropped)

    def _deletions(self) -> Deleted:
        changed_ns = deletions.changed_ns(self._settings.data)
        if changed_ns != self._deleted_ns:
            self._deleted, self._deleted_ns = Deleted.of(self._settings.data), changed_ns
        return self._deleted

    async def store_offsets(self, offsets: Mapping[RowKey, CommittedOffset], decided_seq: int) -> None:
        """Commit offsets, except where the group has committed since the decision: they were stored, or are overtaken."""
        table = self._groups.store.table
        by_group: dict[tuple[str, str, int], dict[Partition, CommittedOffset]] = {}
        for row, offset in offsets.items():
            known = table.row_at(row)
            # A row of before may have been written again since, with its old time (OffsetStore.write_again).
            is_later = isinstance(known, CommittedOffset) and known.seq > decided_seq and known.ts >= offset.ts
            if not is_later:
                rows = by_group.setdefault((row.group, offset.member, offset.generation), {})
                rows[row.topic, row.partition] = offset
        for (group, member, generation), rows in by_group.items():
            commits = {at: OffsetCommit(each.offset, each.metadata, each.leader_epoch) for at, each in rows.items()}
            await self._groups.store.commit(group, commits, member, generation, decided=True)
            if self._groups.is_ready:  # else it finds them when it is restored
                self._groups.coordinator.committed(group, time.monotonic())
                for at, each in rows.items():
                    await self._groups.forget(group, at, (), each.offset)
