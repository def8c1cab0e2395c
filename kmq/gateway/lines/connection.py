"""One connection of a consumer: lines in, bytes and pieces of files out.

Invariant   A client that does not read costs two socket buffers, one block, and at most 64 KiB of a small batch, because
            a piece of a file is sent by the kernel (sendfile), and nothing else is made while a write waits for the client.
Deadline    A request line must be whole within KMQ_LINE_DEADLINE, and a client that is sent something must take some of
            it within that time; `late` says which is missed. Dead peers are found by TCP keepalive.
Half-close  A client that closes its sending half gets everything it has asked for. TLS of asyncio has no half-closed
            connections: there a client keeps its half open until it has the answer.
Memory      At most MAX_REQUEST bytes and one receive of a request, and _HIGH_BYTES of replies.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from kmq.gateway.core.partitions import Span
from kmq.wire.requests import MAX_REQUEST

_HIGH_BYTES = 1 << 16
_SEND_BYTES = 1 << 18  # a client must take as much within the deadline
_MOST_LINES = 64  # requests that wait; beyond that nothing is received
_LINGER_S = 1.0  # how long a refused client has to read the refusal and to close
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class TooLong(ValueError):
    """A request line is over MAX_REQUEST bytes."""


class Connection(asyncio.Protocol):
    """A connection. `serve` handles it, as a task of its own, and the connection ends with it."""

    def __init__(self, serve: "Callable[[Connection], Awaitable[None]]", siblings: "set[Connection]") -> None:
        """`siblings`: where the connection stands while it is open."""
        self._serve, self._siblings = serve, siblings
        self.transport: Any = None
        self.peer = ""
        self.is_tls = False
        self.is_admitted = False  # it has asked for something, with a valid token if one is required
        self.pending = 0  # requests that are being served while the next line is awaited
        self.is_sending = False  # the client has to read before anything goes on
        self.needs_look = True  # by the sweep: it has ended, or part of a line or of an answer waits
        self._idle_since = self._blocked_since = self._unfinished_since = time.monotonic()
        self._closed_half_at = 0.0  # 0: it has not
        self._partial = b""
        self._lines: deque[bytes] = deque()
        self._take: Callable[[bytes], bool] | None = None  # of who waits for a line
        self._arrived, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._is_full = False  # so many lines wait that nothing is received
        self._is_over = self._is_too_long = self._is_lost = self._is_refused = self._is_ended = False
        self.task: asyncio.Task[None] | None = None

    # --- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.is_tls = transport.get_extra_info("sslcontext") is not None
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else ""
        transport.set_write_buffer_limits(high=_HIGH_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._siblings.add(self)
        self.task = asyncio.get_running_loop().create_task(self._run())

    def data_received(self, data: bytes) -> None:
        if self._is_too_long or self._is_refused:
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._is_too_long = len(self._partial) > MAX_REQUEST or any(len(line) > MAX_REQUEST for line in lines)
        if lines or not self._partial:
            self._unfinished_since = 0.0
        if self._partial and not self._unfinished_since:
            self._unfinished_since, self.needs_look = time.monotonic(), True
        if self._take is not None and not self._lines:
            self._idle_since = time.monotonic()
            while lines and self._take(lines[0]):
                del lines[0]
        self._lines.extend(lines)
        if len(self._lines) >= _MOST_LINES:
            self._is_full = True
            self.transport.pause_reading()
        if self._lines or self._is_too_long:
            self._arrived.set()

    def eof_received(self) -> bool:
        if self._partial and not self._is_too_long:  # printf without a newline
            self._lines.append(self._partial)
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
        else:
            await self._close()

    # --- the door's side ---------------------------------------------------------------------------------------------

    async def read_line(self, take: Callable[[bytes], bool] | None = None) -> bytes | None:
        """Return the next line without its newline; None when the client has sent its last. Raises TooLong.

        A line that `take` accepts as it arrives is not returned: it costs no turn of the caller's task.
        """
        self._idle_since = time.monotonic()
        while not self._lines:
            if self._is_too_long:
                raise TooLong(f"the line is over {MAX_REQUEST} bytes")
            if self._is_over:
                return None
            self._arrived.clear()
            self._take = take
            try:
                await self._arrived.wait()
            finally:
                self._take = None
        self._idle_since = 0.0
        line = self._lines.popleft()
        if len(line) > MAX_REQUEST:
            raise TooLong(f"the line is over {MAX_REQUEST} bytes")
        self._resume()
        return line

    def _resume(self) -> None:
        """Receive again. Never during sendfile: an error there would take the descriptor from under it."""
        if self._is_full and not self.is_sending and len(self._lines) <= _MOST_LINES // 2 and not self._is_lost:
            self._is_full = False
            self.transport.resume_reading()

    async def write(self, data: bytes) -> None:
        """Send `data`; returns when the client has taken most of it. Raises ConnectionError if the client is gone."""
        if self._is_lost or self.transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self.transport.write(data)
        self.needs_look |= self.transport.get_write_buffer_size() > 0
        if not self._writable.is_set():
            await self._by_client(self._writable.wait())
        if self._is_lost:
            raise ConnectionResetError("the client has gone")

    async def send(self, span: Span) -> None:
        """Send a piece of a file. Raises OSError if the client is gone, or the file was cut."""
        end = span.begin + span.nbytes
        if self.is_tls or span.nbytes <= _HIGH_BYTES:
            for begin in range(span.begin, end, _HIGH_BYTES):
                count = min(_HIGH_BYTES, end - begin)
                await self.write(Span(span.fd, begin, count).read())
            return
        loop, at = asyncio.get_running_loop(), span.begin
        if not (self.transport.get_write_buffer_size() or self._is_lost or self.transport.is_closing()):
            with contextlib.suppress(OSError):  # what the socket takes at once is not waited for; errors: below, again
                at += os.sendfile(self.transport.get_extra_info("socket").fileno(), span.fd, at, span.nbytes)
        with open(span.fd, "rb", buffering=0, closefd=False) as file:
            for begin in range(at, end, _SEND_BYTES):
                if self._is_lost or self.transport.is_closing():
                    raise ConnectionResetError("the client has gone")
                count = min(_SEND_BYTES, end - begin)
                if await self._by_client(loop.sendfile(self.transport, file, begin, count)) != count:
                    raise ConnectionAbortedError("the file has been cut")
        self._resume()

    def end(self, last: bytes) -> None:
        """End the connection with this line, or without it if part of another line or batch is under way."""
        if self.task is None or self.task.done():
            return
        if not self.is_sending and not self._is_lost and not self._is_refused:  # it has had its last line
            self.transport.write(last)
            self._is_ended = True
        self.task.cancel()

    async def _by_client(self, work: Awaitable[Any]) -> Any:
        """Wait for the client to read, and measure how long that takes."""
        self._blocked_since, self.is_sending, self.needs_look = time.monotonic(), True, True
        result = await work
        self.is_sending = False  # not if this is cancelled: then part of a line may be under way
        return result

    async def _close(self) -> None:
        """Close after the client has had time to read; what it still sends is discarded."""
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
        if self.pending:  # a client that has closed its half may have died: nobody can tell before it is sent something
            return self._closed_half_at
        return self._idle_since

    def late(self, latest: float) -> str:
        """Return which deadline is missed; "" for none. `latest`: since when a client may have been waited for."""
        self.needs_look = bool(self.is_sending or self._unfinished_since or self.transport.get_write_buffer_size())
        if self.is_sending:
            return "the client reads too slowly" if self._blocked_since <= latest else ""
        if self._unfinished_since and not self.transport.is_reading():
            self._unfinished_since = time.monotonic()  # what the client has sent meanwhile is not known
        return "no whole line within KMQ_LINE_DEADLINE" if 0 < self._unfinished_since <= latest else ""

    def force_close(self) -> None:
        """Close as soon as a running sendfile has ended. Bytes that were not sent are lost.

        A transport must not be aborted before: its descriptor would be another connection's when sendfile lets it go.
        """
        if self.task is not None and not self.task.done():
            self.task.cancel()
        elif self.transport is not None:
            self.transport.abort()
