"""The connection of a kmq.AsyncProducer: one task maintains it, and everything runs in one event loop."""

import asyncio
import time
from collections.abc import Callable

from kmq.client.connection import CONNECT_S, Address, backoff, keep_alive, logger
from kmq.client.failures import NotAnswered, Refused
from kmq.client.lines import no_connection
from kmq.client.protocol import Core, Overdue
from kmq.errors import KmqError


class Link(asyncio.Protocol):
    """Moves a core's bytes. Messages queued in one turn of the loop leave with one write."""

    def __init__(self, core: Core, address: Address) -> None:
        self.core, self.address = core, address
        self.closed = False
        self.changed = asyncio.Event()  # set, and replaced, whenever there may be room or an end
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[bytes] | None = None  # while the reply to hello is awaited
        self._greeting_so_far = b""
        self._lost = asyncio.Event()  # the connection is gone
        self._is_scheduled = False  # a flush
        self._attempts = 0  # to connect, since the broker last replied
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that connects and reconnects, unless it runs already. Call inside the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kmq-producer")

    def queued(self) -> None:
        """Write at the end of this turn of the loop the queued messages that should go now."""
        self.start()
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over`, writing all queued messages at once."""
        while not is_over():
            self.core.pacing.hurry = True
            self._flush()
            await self.changed.wait()

    async def end(self) -> None:
        """Close the connection; messages without a reply fail."""
        self.closed = True
        if self.core.failed is None:
            self.core.fail(NotAnswered("the producer was closed before the reply came"))
        self._call_back()
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _flush(self) -> None:
        """Write the messages that should go now."""
        self._is_scheduled = False
        core, transport = self.core, self._transport
        if transport is None or not core.connected:
            return
        now = time.monotonic()
        while taken := core.take(now):
            transport.write(taken)
        linger = core.linger_left(now)
        if linger is not None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(linger, self._flush)

    def _call_back(self) -> None:
        """Call the callbacks of finished messages, in order, and wake all waiting tasks."""
        done = self.core.outcomes.done
        while done:
            delivery = done.popleft()
            assert delivery.callback is not None
            delivery.callback(delivery)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            self._greeting_so_far += data
            if not self._greeting.done() and self.core.is_greeting(self._greeting_so_far):
                self._greeting.set_result(self._greeting_so_far)
            return
        if not self.core.connected:
            return  # the core has already given up this connection
        try:
            self.core.receive(data)
            self._attempts = 0
        except Refused as refused:
            self._lose(str(refused))
        self._call_back()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error or ConnectionResetError("closed without a word"))
        elif self.core.connected:
            self._lose(str(error or "the broker closed the connection"))

    def _lose(self, reason: str) -> None:
        self.core.lost(reason)
        self._drop()
        self._lost.set()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- the task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep a connection, and check regularly for overdue messages."""
        looking = asyncio.get_running_loop().create_task(self._look())
        try:
            while not self.closed and self.core.failed is None:
                if await self._connect():
                    self._flush()
                    await self._lost.wait()
                self._call_back()
                if self.core.failed is None:
                    await asyncio.sleep(backoff(self._attempts))
                    self._attempts += 1
        finally:
            looking.cancel()
            self._call_back()

    async def _connect(self) -> bool:
        """Connect and say hello. Returns True if the broker accepted the connection."""
        self._lost.clear()
        greeting = self._greeting = asyncio.get_running_loop().create_future()
        self._greeting_so_far = b""
        where = "the broker"
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            async with asyncio.timeout(CONNECT_S):
                await self._say_hello(host, port, token)
                data = await greeting
            self.core.greeted(data)
            return True
        except (OSError, KmqError) as err:
            self._drop()
            self.core.lost(str(err) if isinstance(err, KmqError) else no_connection(where, err))
            return False
        finally:
            if greeting.done() and not greeting.cancelled():
                greeting.exception()  # otherwise asyncio would report an exception that was never retrieved
            self._greeting = None

    async def _say_hello(self, host: str, port: int, token: str) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or host) if options.tls is not None else None
        transport, _ = await loop.create_connection(lambda: self, host, port, ssl=options.tls, server_hostname=name)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        transport.write(self.core.hello(token))

    async def _look(self) -> None:
        """Let expired messages fail, and report stalls."""
        overdue = Overdue(self.core, logger().warning)
        while True:
            await asyncio.sleep(overdue.period_s)
            text = overdue.look()
            if self.core.outcomes.done:
                self._call_back()
            if text:
                overdue.report(text)


__all__ = ["Link"]
