"""The connection of a kmq.AsyncConsumer: everything runs in one event loop; tasks keep the connection and the member."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from kmq.client.connection import CONNECT_S, Address, backoff, keep_alive
from kmq.client.consumer_discovery import DISCOVER_S, discover, take_over
from kmq.client.consumer_options import logger
from kmq.client.consumer_protocol import Core
from kmq.client.failures import NotAnswered, Refused
from kmq.client.lines import no_connection
from kmq.errors import KmqError
from kmq.wire.refusals import find

_SLICE_S = 1.0  # longest wait without a look around
_LEAVE_S = 1.0  # longest wait until the broker has taken the last requests


class Link(asyncio.Protocol):
    """Moves a core's bytes."""

    def __init__(self, core: Core, address: Address) -> None:
        self.core, self.address = core, address
        self.closed = False
        self.discovers: tuple[str, ...] = ()
        self.used_at = time.monotonic()  # when the application last asked for records
        self._changed = asyncio.Event()  # set, and replaced, whenever something has come
        self._gone = asyncio.Event()  # there is no connection
        self._used = asyncio.Event()  # the application has come back
        self._transport: asyncio.Transport | None = None
        self._discover_at = 0.0
        self._attempts = 0
        self._is_resting = False  # the application has not come back for too long: no member until it does
        self._tasks: list[asyncio.Task[None]] = []

    # --- the application's tasks -------------------------------------------------------------------------------------

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Wait until `is_ready`; return False when the time is up. `fetches`: records are what is waited for.

        Raises the error that has ended the consumer.
        """
        self._start()
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self.use(now)
            if is_ready() or (self.closed and fetches):
                return True
            if self.core.failed is not None:
                raise self.core.failed
            left_s = deadline - now
            if fetches:
                self.core.fetch(now, max(left_s, 0.0))
            self.write()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _SLICE_S)):
                    await self._changed.wait()

    def use(self, now: float) -> None:
        """Note that the application has come back."""
        self.used_at = now
        if self._is_resting:
            self._is_resting = False
            self._used.set()

    def write(self) -> None:
        """Write the requests."""
        if self._transport is not None and (data := self.core.requests.take()):
            self._transport.write(data)

    def drop(self, reason: str) -> None:
        """Close the connection; the task makes another one."""
        self.core.lost(reason)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._gone.set()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def end(self) -> None:
        """Leave the group and close the connection."""
        if self.closed:
            return
        self.closed = True
        if self._transport is not None and self.core.is_managed:
            self.core.leave(time.monotonic())
            self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._gone.wait()
        self.core.fail(NotAnswered("this consumer is closed"))
        self.drop("this consumer is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # given up already
        try:
            self.core.receive(data)
            self._attempts = 0
        except Refused as refused:
            self.drop(str(refused))
            return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self.drop(str(error or "the broker closed the connection"))

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._tasks and not self.closed:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._keep_connected(), name="kmq-consumer"),
                loop.create_task(self._keep_alive(), name="kmq-consumer-beat"),
            ]

    async def _keep_connected(self) -> None:
        while not self.closed and self.core.failed is None:
            if self._is_resting:
                self._used.clear()
                await self._used.wait()
            if await self._connect():
                await self._gone.wait()
            self._wake()
            await asyncio.sleep(backoff(self._attempts))
            self._attempts += 1

    async def _connect(self) -> bool:
        """Make one attempt. Returns True if there is a connection."""
        where, reason = "the broker", ""
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            if self.discovers or self.core.lacks_ends:
                await self._discover(host, port, token)
            if self.core.has_something_to_read:
                async with asyncio.timeout(CONNECT_S):
                    await self._open(host, port, token)
                return True
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        self.core.lost(reason)
        return False

    async def _open(self, host: str, port: int, token: str) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or host) if options.tls is not None else None
        transport, _ = await loop.create_connection(lambda: self, host, port, ssl=options.tls, server_hostname=name)
        self._gone.clear()
        transport.write(self.core.opening(token))
        self.core.connected()
        self._transport = transport

    async def _discover(self, host: str, port: int, token: str) -> bool:
        options = self.core.options
        found = await asyncio.to_thread(
            discover,
            self.discovers or self.core.topics,
            host,
            port,
            options.token or token,
            options.tls,
            options.server_hostname,
        )
        self._discover_at = time.monotonic() + DISCOVER_S
        return take_over(self.core, found)

    async def _keep_alive(self) -> None:
        """Beat, and notice a broker that does not answer, and an application that does not come back."""
        while not self.closed:
            await asyncio.sleep(min(1.0, self.core.options.session_s / 6))
            now = time.monotonic()
            if self._transport is None:
                continue
            if why := self.core.overdue(now):
                self.drop(why)
            self.core.beat(now)
            self.write()
            if self.core.is_managed and now - self.used_at > self.core.options.max_poll_interval_s:
                self._rest(now)
            elif self.discovers and now >= self._discover_at:
                await self._look_for_partitions()

    async def _look_for_partitions(self) -> None:
        with contextlib.suppress(OSError, KmqError):
            if await self._discover(*self.address()):
                self.drop("there are new partitions")

    def _rest(self, now: float) -> None:
        """Leave the group until the application comes back: others may be quicker."""
        logger().warning("left the group: no poll for %g s", self.core.options.max_poll_interval_s)
        self._is_resting = True
        self.core.leave(now)
        self.write()
        self.core.holdings.lose(tuple(self.core.holdings.owned))
        if self._transport is not None:
            self._transport.close()  # after what was written
            self._transport = None
        self.core.lost("left the group: no poll within max_poll_interval_s")
        self._gone.set()


__all__ = ["Link"]
