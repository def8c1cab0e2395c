"""Keeps the store of committed offsets: loads it, and forgets what is over.

Owner       the gateway: one task, from its start to its end.
Invariant   No group is forgotten before the gateway has run for GRACE_S: members come back within their session
            timeout, and until then nobody knows them.
Size        Compaction (kmq/gateway/core/compacting.py) removes commits that later ones replace, and leaves their
            newlines. When the log is over _LARGE_BYTES, rows whose records lie in front of its last _RECENT_BYTES are
            written again. The router then deletes the front by size (store.LIMITS), which nobody needs any more. Only
            commits make the log grow, and only a gateway writes them: so the router never deletes what no gateway could
            write again.
"""

import asyncio
import time
from collections.abc import Callable

from kmq.broker.clock import AgeClock
from kmq.broker.stats import Row
from kmq.config.settings import Settings
from kmq.config.values import FOREVER, MIB
from kmq.errors import KmqError
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.offset_records import TOPIC
from kmq.gateway.groups.store import OffsetStore
from kmq.log import reader, segment, wal
from kmq.log.damage import DamageError
from kmq.log.partition import directory_of
from kmq.logfmt import Logger
from kmq.message import record

_TURN_S = 1.0
_IDLE_S = 60.0  # between two looks for idle groups
GRACE_S = 600.0  # twice the longest session timeout
_SIZE_S = 10.0  # between two looks at the size of the log
_LARGE_BYTES, _RECENT_BYTES = 192 * MIB, 96 * MIB  # the router deletes from 256 MiB on


class OffsetKeeper:
    """The task. `is_alive` says whether a group has members; until the gateway sets it, no group is forgotten.

    `forgotten` is called for each group that was forgotten.
    """

    def __init__(self, settings: Settings, row: Row, store: OffsetStore, log: Logger) -> None:
        self.is_alive: Callable[[str], bool] = lambda group: True
        self.forgotten: Callable[[str], None] = lambda group: None
        self._settings, self._row, self._store, self._log = settings, row, store, log
        self._clock: AgeClock | None = None
        self._last_s = 0.0  # when the last record was stored
        self._look_at = time.monotonic() + GRACE_S
        self._failed = ""
        self._size_at = 0.0

    async def run(self) -> None:
        """Work until cancelled. A failure is logged, once for each reason, and tried again."""
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
            await self._store.forget_idle(self._settings.group_retention, now, self.is_alive, self.forgotten)

    async def _now(self) -> float:
        """Return seconds since the epoch by a clock that does not jump. It must be asked every few seconds."""
        if self._clock is None:
            _, last_us = await asyncio.to_thread(wal.last_stored, self._settings.data)
            self._clock = AgeClock(self._row, last_us, self._log)
            self._last_s = last_us / 1_000_000
        return max(self._clock.now_s(), self._last_s)  # a machine may start with a date that lies in the past

    async def _bound_size(self) -> None:
        if time.monotonic() < self._size_at:
            return
        self._size_at = time.monotonic() + _SIZE_S
        if self._store.rows:  # an idle gateway reads no directory
            await self._write_again(
                await asyncio.to_thread(segment.survey, directory_of(self._settings.data, TOPIC, 0))
            )

    async def _write_again(self, segments: list[segment.Segment]) -> None:
        """Write the rows in the front of a large log again."""
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
