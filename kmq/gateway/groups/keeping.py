"""Keeps the store of committed offsets: loads it, forgets what is over, and lets its topic be compacted.

Owner       the gateway: one task, from its start to its end.
Invariant   No group is forgotten before the gateway has run for GRACE_S: members come back within their session
            timeout, and until then nobody knows them.
Compaction  When the sealed segments of the topic hold twice what its rows take, and one more was sealed since the last
            time, a process at idle priority compacts it (compactor.py). At most one runs. It ends with the gateway; if
            the gateway is killed, it ends by itself, at the latest after its own deadline.
Size        A removed record leaves its newline. When the log is over _LARGE_BYTES, rows whose records lie in front of
            its last _RECENT_BYTES are written again. The router then deletes the front by size (store.LIMITS), which
            nobody needs any more. Only commits make the log grow, and only a gateway writes them: so the router never
            deletes what no gateway could write again.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

from kmq import record
from kmq.broker.clock import AgeClock
from kmq.broker.stats import Row
from kmq.errors import KmqError
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.offset_records import TOPIC
from kmq.gateway.groups.store import OffsetStore
from kmq.log import reader, segment, wal
from kmq.log.partition import directory_of
from kmq.logfmt import Logger
from kmq.settings import FOREVER, MIB, Settings

_TURN_S = 1.0
_IDLE_S = 60.0  # between two looks for idle groups
GRACE_S = 600.0  # twice the longest session timeout
_COMPACT_S = 10.0  # between two looks whether compaction is worth it
_RECORD_BYTES = 180  # of a commit in the log, with short names
_LARGE_BYTES, _RECENT_BYTES = 192 * MIB, 96 * MIB  # the router deletes from 256 MiB on
_COMPACTOR = "kmq.gateway.groups.compactor"


class OffsetKeeper:
    """The task. `is_alive` says whether a group has members; until the gateway sets it, no group is forgotten.

    `forgotten` is called for each group that was forgotten.
    """

    def __init__(self, settings: Settings, row: Row, store: OffsetStore, log: Logger) -> None:
        self.is_alive: Callable[[str], bool] = lambda group: True
        self.forgotten: Callable[[str], None] = lambda group: None
        self._settings, self._row, self._store, self._log = settings, row, store, log
        self._clock: AgeClock | None = None
        self._look_at = time.monotonic() + GRACE_S
        self._failed = ""
        self._compactor: asyncio.subprocess.Process | None = None
        self._compact_at = 0.0
        self._compacted_up_to = 0  # the first record behind the segments that were sealed when it last ran

    async def run(self) -> None:
        """Work until cancelled. A failure is logged, once for each reason, and tried again."""
        try:
            while True:
                try:
                    if self._store.is_loaded:
                        await self._turn()
                    else:
                        await self._store.load()
                    self._failed = ""
                except (KmqError, OSError) as err:
                    if isinstance(err, RequestRefused) and err.code == "stopping":
                        return
                    if str(err) != self._failed:
                        self._failed = str(err)
                        self._log.warn("offsets_not_kept", reason=err, effect="tried again")
                await asyncio.sleep(_TURN_S)
        finally:
            await self._end_compactor()

    async def _turn(self) -> None:
        await self._store.forget_deleted_topics()
        await self._compact()
        now = await self._now()
        if self._settings.group_retention != FOREVER and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _IDLE_S
            await self._store.forget_idle(self._settings.group_retention, now, self.is_alive, self.forgotten)

    async def _now(self) -> float:
        """Return seconds since the epoch by a clock that does not jump. It must be asked every few seconds."""
        if self._clock is None:
            _, last_us = await asyncio.to_thread(wal.last_stored, self._settings.data)
            self._clock = AgeClock(self._row, last_us, self._log)
        return self._clock.now_s()

    async def _compact(self) -> None:
        """Start the compactor if it is worth it, and none runs."""
        if self._compactor is not None and self._compactor.returncode is None:
            return
        self._compactor = None
        if time.monotonic() < self._compact_at:
            return
        self._compact_at = time.monotonic() + _COMPACT_S
        if not self._store.rows:
            return  # an idle gateway reads no directory
        segments = await asyncio.to_thread(segment.survey, directory_of(self._settings.data, TOPIC, 0))
        await self._write_again(segments)
        if len(segments) < 2 or segments[-1].first == self._compacted_up_to:
            return
        if sum(part.size for part in segments[:-1]) >= 2 * _RECORD_BYTES * self._store.rows:
            self._compacted_up_to = segments[-1].first
            environment = os.environ | self._settings.environment()
            self._compactor = await asyncio.create_subprocess_exec(sys.executable, "-m", _COMPACTOR, env=environment)

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

    async def _end_compactor(self) -> None:
        if self._compactor is not None:
            with contextlib.suppress(ProcessLookupError):
                self._compactor.kill()
            await self._compactor.wait()
