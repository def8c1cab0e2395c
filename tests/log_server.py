"""A broker that is up, as readers of its logs see it: the stats page, the owner's lock, and the gateway's HTTP in a thread."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from aiohttp import web, web_app
from consuls import free_ports

from kmq.access.tokens import open_tokens
from kmq.broker.overview import Events
from kmq.broker.stats import STATES, Incidents, StatsPage, Strangers
from kmq.config.settings import STAGES, load
from kmq.gateway.access import HttpAccess
from kmq.gateway.core import metrics
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Fetching
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.http import logs, request, server
from kmq.gateway.http.server import KEY as API
from kmq.gateway.http.server import Api
from kmq.links.ownership import FileLock
from kmq.log import identity
from kmq.logfmt import Logger

_number = count()


class Up:
    """`page`: its stats page. `serve` starts the gateway, at `port` from then on."""

    def __init__(self, data: str, synced: int, settings: dict[str, str]) -> None:
        environ = {"KMQ_INSTANCE": f"logs-{os.getpid()}-{next(_number)}", "KMQ_DATA": data, "KMQ_PIPES": data}
        self.settings = load(environ | settings, "/nonexistent.toml")
        self.page = StatsPage(self.settings.instance, identity.open_data(data), data)
        for name in STAGES:
            self.page.rows[name].state = STATES.index("ready")
        self.page.rows["durability"].seq = synced
        self.lock = FileLock(f"{data}/append/.owner")
        self.lock.acquire("this WAL", "a test")
        self.port = free_ports(1)[0]
        self._serving: _Thread | None = None

    def serve(self) -> None:
        self._serving = _Thread(self)

    def stop(self) -> None:
        """As at SIGTERM."""
        if self._serving is not None:
            self._serving.stop()
            self._serving = None

    @property
    def api(self) -> Api:
        """The handlers under /api."""
        assert self._serving is not None
        return self._serving.api

    @property
    def fetching(self) -> Fetching:
        """What reads for the handlers."""
        assert self._serving is not None
        return self._serving.fetching

    @property
    def streams(self) -> int:
        """How many responses with records are being sent."""
        return len(self._serving.logs._sending) if self._serving else 0


def groups_of(core: Core) -> Groups:
    """Groups that nobody has loaded: their calls are refused as not_ready."""
    log = Logger("gateway")
    return Groups(core.settings, OffsetStore(core.settings, core.watermark, log), core.partitions, log)


def _strangers(up: Up) -> Strangers:
    return Strangers(up.page.rows["gateway"], Incidents(lambda *_, **__: None))


class _Thread:
    def __init__(self, up: Up) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended, ready = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(up, ready))
        self._thread.start()
        assert ready.wait(100)

    def _run(self, up: Up, ready: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(up, ready))

    async def _serve(self, up: Up, ready: threading.Event) -> None:
        made: list[logs.LogCalls] = []
        original = logs.LogCalls

        def make(broker: Broker, cold: ColdReads, partitions: Partitions) -> logs.LogCalls:
            made.append(original(broker, cold, partitions))
            return made[0]

        logs.LogCalls = make  # type: ignore[assignment,misc]
        try:
            core = Core(up.settings, up.page, Logger("gateway"))
            app = server.application(core, groups_of(core), metrics.Requests())
        finally:
            logs.LogCalls = original  # type: ignore[misc]
        self.logs, self.api, self.fetching = made[0], app[API], core.fetching
        tokens = open_tokens(up.settings, lambda *_, **__: None)
        access = HttpAccess(up.settings, tokens, _strangers(up), Logger("gateway"), Events())
        app.middlewares.append(access.middleware)
        runner = web.AppRunner(app, **request.RUNNER, access_log=None, shutdown_timeout=60)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", up.port).start()
        ready.set()
        await self._ended.wait()
        core.stop()
        await runner.cleanup()
        await core.close()
        # aiohttp remembers the last 1,024 applications of a process, and with each the files of its broker.
        web_app._cached_build_middleware.cache_clear()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(100)
        assert not self._thread.is_alive()


@contextmanager
def up(data: str | Path, synced: int = 0, **settings: str) -> Iterator[Up]:
    """A broker that is up on `data`, with the WAL synced up to `synced`; its gateway is not yet."""
    made = Up(str(data), synced, settings)
    try:
        yield made
    finally:
        made.stop()
        made.lock.release()
        os.unlink(made.page.path)
