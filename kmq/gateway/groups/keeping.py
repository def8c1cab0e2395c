"""Keeps the store of committed offsets: loads it, forgets what is over, and lets its topic be compacted.

Owner       the gateway: one task, from its start to its end.
Invariant   No group is forgotten before the gateway has run for _GRACE_S: members come back within their session
            timeout, and until then nobody knows them.
"""

import asyncio
import time
from collections.abc import Callable

from kmq.broker.clock import AgeClock
from kmq.broker.stats import Row
from kmq.errors import KmqError
from kmq.gateway.groups.store import OffsetStore
from kmq.log import wal
from kmq.logfmt import Logger
from kmq.settings import FOREVER, Settings

_TURN_S = 1.0
_IDLE_S = 60.0  # between two looks for idle groups
_GRACE_S = 600.0  # twice the longest session timeout


class OffsetKeeper:
    """The task. `is_alive` says whether a group has members; the coordinator sets it."""

    def __init__(self, settings: Settings, row: Row, store: OffsetStore, log: Logger) -> None:
        self.is_alive: Callable[[str], bool] = lambda group: False
        self._settings, self._row, self._store, self._log = settings, row, store, log
        self._clock: AgeClock | None = None
        self._look_at = time.monotonic() + _GRACE_S
        self._failed = ""

    async def run(self) -> None:
        """Work until cancelled. A failure is logged, once for each reason, and tried again."""
        while True:
            try:
                if self._store.is_loaded:
                    await self._turn()
                else:
                    await self._store.load()
                self._failed = ""
            except (KmqError, OSError) as err:
                if str(err) != self._failed:
                    self._failed = str(err)
                    self._log.warn("offsets_not_kept", reason=err, effect="tried again")
            await asyncio.sleep(_TURN_S)

    async def _turn(self) -> None:
        await self._store.forget_deleted_topics()
        now = await self._now()
        if self._settings.group_retention != FOREVER and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _IDLE_S
            await self._store.forget_idle(self._settings.group_retention, now, self.is_alive)

    async def _now(self) -> float:
        """Return seconds since the epoch by a clock that does not jump. It must be asked every few seconds."""
        if self._clock is None:
            _, last_us = await asyncio.to_thread(wal.last_stored, self._settings.data)
            self._clock = AgeClock(self._row, last_us, self._log)
        return self._clock.now_s()
