"""Starts the compactor when a pass over some topic is due, one at a time.

Owner       the gateway: one task, from its start to its end.
Load        While no topic is declared to be compacted, it reads a directory and one file status for each topic, every
            _LOOK_S. A look at a topic reads file sizes; kmq/log/passes.py says when a pass is due.
Crash       The compactor ends with the gateway, however that ends. What it does is safe at every call (compactor.py).
"""

import asyncio
import contextlib
import os
import sys
import time

from kmq.broker.clock import GAP_S
from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.log import compaction, passes
from kmq.log.passes import Tables
from kmq.logfmt import Logger

_LOOK_S = 15.0  # between two looks; the router's checkpoints, which say what may be compacted, come every 30 s
_FAILED_S = 600.0  # after a compactor that has failed
_COMPACTOR = "kmq.gateway.core.compactor"


class Compacting:
    """The task."""

    def __init__(self, settings: Settings, log: Logger, look_s: float = _LOOK_S) -> None:
        self._settings, self._log, self._look_s = settings, log, look_s
        self._tables = Tables(settings.data)
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                pause = self._look_s
                try:
                    if await asyncio.to_thread(self._is_due) and await self._compact():
                        pause = _FAILED_S
                except (KmqError, OSError) as err:
                    pause = _FAILED_S
                    self._log.warn("not_compacted", reason=err, effect="tried again later")
                await asyncio.sleep(pause)
        finally:
            await self._end()

    def _is_due(self) -> bool:
        tables = self._tables.found()
        if self._settings.compact == "off":
            tables = [table for table in tables if table.name.startswith("__")]
        data = self._settings.data
        if not tables or compaction.waiting(data) or compaction.is_wanted(data):
            return False
        return bool(passes.due(data, tables, passes.clock(data, time.time(), GAP_S)))

    async def _compact(self) -> int:
        """Let a compactor make every pass that is due; return its exit code."""
        environment = os.environ | self._settings.environment()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _COMPACTOR, "--with", str(os.getpid())), env=environment
        )
        code = await self._process.wait()
        if code < 0:
            self._log.warn("not_compacted", reason=f"ended by signal {-code}", effect="tried again later")
        return code

    async def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
