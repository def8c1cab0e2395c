"""One connection of a consumer: lines in, bytes and pieces of files out.

Invariant   A client that does not read costs two socket buffers, one block, and at most 64 KiB of a small batch, because
            a piece of a file is sent by the kernel (sendfile), and nothing else is made while a write waits for the client.
Memory      At most MAX_REQUEST bytes and one receive of a request, and HIGH_BYTES of replies.
Limits      kmq/gateway/core/connection.py: deadlines, half-closed connections, the end.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable

from kmq.gateway.core.connection import HIGH_BYTES, ClientConnection
from kmq.gateway.core.partitions import Span
from kmq.wire import foreign
from kmq.wire.requests import MAX_REQUEST

_SEND_BYTES = 1 << 18  # a client must take as much within the deadline
_MOST_LINES = 64  # requests that wait; above this nothing is received


class TooLong(ValueError):
    """A request line is over MAX_REQUEST bytes."""


class OtherProtocol(ValueError):
    """The first line is one of HTTP, or TLS (kmq/wire/foreign.py): its text says which."""


class LineConnection(ClientConnection):
    """A connection by lines."""

    unit = "line"

    def __init__(self, serve: "Callable[[LineConnection], Awaitable[None]]", siblings: "set[LineConnection]") -> None:
        super().__init__(serve, siblings)
        self._partial = b""
        self._lines: deque[bytes] = deque()
        self._accept: Callable[[bytes], bool] | None = None  # of the task that waits for a line
        self._is_full = False  # too many lines wait, so nothing is received
        self._is_too_long = False
        self._speaks: str | None = None  # according to its first line: "" lines, HTTP or TLS; None: not known yet

    def data_received(self, data: bytes) -> None:
        if self._is_too_long or self._is_refused or self._speaks:
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._speaks is None:
            self._speaks = foreign.spoken(lines[0] if lines else self._partial, bool(lines))
            if self._speaks:
                self._partial = b""
                self._arrived.set()
                return
        self._is_too_long = len(self._partial) > MAX_REQUEST or any(len(line) > MAX_REQUEST for line in lines)
        if lines or not self._partial:
            self._unfinished_since = 0.0
        if self._partial and not self._unfinished_since:
            self._unfinished_since, self.needs_look = time.monotonic(), True
        if self._accept is not None and not self._lines:
            self._idle_since = time.monotonic()
            while lines and self._accept(lines[0]):
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
        return super().eof_received()

    async def read_line(self, accept: Callable[[bytes], bool] | None = None) -> bytes | None:
        """Return the next line without its newline; None when the client has sent its last. Raises TooLong, OtherProtocol.

        A line that `accept` takes as it arrives is not returned: it costs no turn of the caller's task.
        """
        self._idle_since = time.monotonic()
        while not self._lines:
            if self._is_too_long:
                raise TooLong(f"the line is over {MAX_REQUEST} bytes")
            if self._speaks:
                raise OtherProtocol(self._speaks)
            if self._is_over:
                return None
            self._arrived.clear()
            self._accept = accept
            try:
                await self._arrived.wait()
            finally:
                self._accept = None
        self._idle_since = 0.0
        line = self._lines.popleft()
        if len(line) > MAX_REQUEST:
            raise TooLong(f"the line is over {MAX_REQUEST} bytes")
        self._resume()
        return line

    def _resume(self) -> None:
        """Receive again. Never during sendfile: an error there would close the descriptor that it uses."""
        if self._is_full and not self.is_sending and len(self._lines) <= _MOST_LINES // 2 and not self._is_lost:
            self._is_full = False
            self.transport.resume_reading()

    async def send(self, span: Span) -> None:
        """Send a piece of a file. Raises OSError if the client is gone, or the file was cut."""
        end = span.begin + span.nbytes
        if self.is_tls or span.nbytes <= HIGH_BYTES:
            for begin in range(span.begin, end, HIGH_BYTES):
                count = min(HIGH_BYTES, end - begin)
                await self.write(Span(span.fd, begin, count).read())
            return
        loop, at = asyncio.get_running_loop(), span.begin
        if not (self.transport.get_write_buffer_size() or self._is_lost or self.transport.is_closing()):
            with contextlib.suppress(OSError):  # the socket takes this without a wait; an error is raised again below
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
        if not self.is_sending and not self._is_lost and not self._is_refused:  # it has not had its last line
            self.transport.write(last)
            self._is_ended = True
        self.task.cancel()
