"""A client connection of the gateway, for the protocols that KMQ speaks itself: its task, its limits, its end.

Deadline    Whatever a client begins to send must be whole within KMQ_LINE_DEADLINE. A client that is sent data must
            take some of it within that time. `late` says which deadline is missed. Dead peers are found by TCP
            keepalive.
Half-close  A client that closes its sending half still gets everything it has asked for. TLS of asyncio has no
            half-closed connections: there a client keeps its half open until it has the answer.
Memory      At most HIGH_BYTES of replies, and the rest of the last write.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

HIGH_BYTES = 1 << 16
_DRAIN_S, _PAUSE_S = 2.0, 0.02
_LINGER_S = 1.0  # how long a refused client has to read the refusal and to close
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


async def drain(connections: Collection["ClientConnection"]) -> None:
    """Wait until connections that are ending have ended, at most _DRAIN_S; then close those that are left."""
    until = time.monotonic() + _DRAIN_S
    while connections and time.monotonic() < until:
        await asyncio.sleep(_PAUSE_S)
    for connection in [*connections]:
        connection.force_close()


class ClientConnection(asyncio.Protocol):
    """A connection. `serve` handles it, as a task of its own, and the connection ends with it."""

    unit = "request"  # what a client must finish in time

    def __init__(self, serve: Callable[[Any], Awaitable[None]], siblings: set[Any]) -> None:
        """`siblings`: where the connection stands while it is open."""
        self._serve, self._siblings = serve, siblings
        self.transport: Any = None
        self.peer = ""
        self.is_tls = False
        self.is_admitted = False  # it has made a request, with a valid token if one is required
        self.pending = 0  # requests that are being served while the next one is awaited
        self.is_sending = False  # the client must read before serving continues
        self.needs_look = True  # the sweep must look: it has ended, or part of a request or answer waits
        self._idle_since = self._blocked_since = self._unfinished_since = time.monotonic()
        self._closed_half_at = 0.0  # 0: still open
        self._arrived, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._is_over = self._is_lost = self._is_refused = self._is_ended = False
        self.task: asyncio.Task[None] | None = None

    # --- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.is_tls = transport.get_extra_info("sslcontext") is not None
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else ""
        transport.set_write_buffer_limits(high=HIGH_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._siblings.add(self)
        self.task = asyncio.get_running_loop().create_task(self._run())

    def eof_received(self) -> bool:
        self._is_over, self._unfinished_since, self._closed_half_at = True, 0.0, time.monotonic()
        self._arrived.set()
        return not self.is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        self._siblings.discard(self)
        self._is_lost = self._is_over = self.needs_look = True
        self._arrived.set()
        self._writable.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except OSError:
            self.transport.abort()
        except asyncio.CancelledError:
            if self._is_ended:
                await self._close()
            else:
                self.transport.abort()
        except Exception as err:  # a defect: log it now, not when the task is collected
            self.transport.abort()
            asyncio.get_running_loop().call_exception_handler({"message": "a connection has failed", "exception": err})
        else:
            await self._close()

    # --- the door's side ---------------------------------------------------------------------------------------------

    async def write(self, data: bytes | memoryview) -> None:
        """Send `data`; returns when the client has taken most of it. Raises ConnectionError if the client is gone."""
        if self._is_lost or self.transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self.transport.write(data)
        self.needs_look |= self.transport.get_write_buffer_size() > 0
        if not self._writable.is_set():
            await self._by_client(self._writable.wait())
        if self._is_lost:
            raise ConnectionResetError("the client has gone")

    async def _by_client(self, work: Awaitable[Any]) -> Any:
        """Wait for the client to read, and measure how long that takes."""
        self._blocked_since, self.is_sending, self.needs_look = time.monotonic(), True, True
        result = await work
        self.is_sending = False  # stays True if this is cancelled: part of a line may be unsent
        return result

    async def _close(self) -> None:
        """Close after the client has had time to read. Data that it still sends is discarded."""
        if self.transport.is_closing():
            return
        if self._is_over or not self.transport.can_write_eof():
            self.transport.close()  # sends what is left
            return
        self._is_refused = True
        self.transport.resume_reading()
        self.transport.write_eof()
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self._is_over:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass
        finally:  # also if the gateway ends meanwhile
            self.transport.close()

    # --- the limits --------------------------------------------------------------------------------------------------

    @property
    def waits_since(self) -> float:
        """Return since when the client has kept the gateway waiting; 0 if the client waits for the gateway."""
        if self.is_sending:
            return self._blocked_since
        if self.pending:  # a client that closed its half may be dead, which shows only when it is sent something
            return self._closed_half_at
        return self._idle_since

    def late(self, latest: float) -> str:
        """Return which deadline is missed; "" if none. `latest`: the latest start of a wait that is too long."""
        self.needs_look = bool(self.is_sending or self._unfinished_since or self.transport.get_write_buffer_size())
        if self.is_sending:
            return "the client reads too slowly" if self._blocked_since <= latest else ""
        if self._unfinished_since and not self.transport.is_reading():
            self._unfinished_since = time.monotonic()  # what the client has sent meanwhile is not known
        return f"no whole {self.unit} within KMQ_LINE_DEADLINE" if 0 < self._unfinished_since <= latest else ""

    def force_close(self) -> None:
        """Close as soon as a running sendfile has ended. Unsent bytes are lost.

        A transport must not be aborted earlier: its descriptor could belong to another connection when sendfile
        releases it.
        """
        if self.task is not None and not self.task.done():
            self.task.cancel()
        elif self.transport is not None:
            self.transport.abort()
