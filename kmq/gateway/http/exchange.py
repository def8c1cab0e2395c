"""One HTTP request and its answer: how long the client keeps the gateway waiting, the memory it holds, and sending it.

Memory      A large answer counts in the budget of all answers (kmq/gateway/core/answers.py) until its client has taken
            it. It is sent piece by piece, so the transport holds no second copy of it.
Arrival     An answer is known to have arrived when the client sends its next request on the connection, or closes it in
            order after it has taken every byte (a client that has not read all resets it). It proves nothing that the
            kernel of the client, or of a proxy, has the bytes.
Wait        A call that waits for messages costs only a connection. At the limit of connections the call that has waited
            longest is answered at once, and its connection is closed, to make room for a new one (ports.py).
"""

import asyncio
import fcntl
import struct
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from kmq.config.values import FOREVER, KIB
from kmq.gateway.core.answers import READER, Budget, BudgetHolder

_PIECE_BYTES = 64 * KIB  # sent at once; answers of that size are left to aiohttp
_LINGER_S = 1.0  # how long a client that asked for the end of the connection may take to close it first

WebHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Outcome = Callable[[bool], None]


class HttpConnection(asyncio.Protocol):
    """Stands between a connection and its handler in aiohttp, and notes whether the last answer has arrived."""

    def __init__(self, handler: web.RequestHandler) -> None:
        self.handler = handler
        self._transport: Any = None
        self._outcome: Outcome | None = None

    def answered(self, outcome: Outcome) -> None:
        """Call `outcome` once: True when the answer just sent has arrived, False if the connection ended before."""
        self._outcome = outcome
        if self._transport.is_closing():
            self._settle(False)

    def _settle(self, has_arrived: bool) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            outcome(has_arrived)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._settle(True)  # data received before the whole answer was sent came before `answered`
        self.handler.data_received(data)

    def eof_received(self) -> None:
        if not self._transport.get_write_buffer_size() and not _unacknowledged(self._transport):
            self._settle(True)
        self.handler.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._settle(False)
        self.handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()


def _unacknowledged(transport: Any) -> int:
    """Return how many bytes the kernel of the client has not acknowledged."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int(struct.unpack("i", found)[0])


class Exchange(BudgetHolder):
    """A request being served or answered. `since`: when the client was sent the piece that it has not taken yet."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        super().__init__()
        self._transport = transport
        self.polls_since = 0.0  # when it began to wait for messages; 0: it does not wait
        self.gives_way = False
        self.interrupt = asyncio.Event()  # ends a wait for messages

    @property
    def is_over(self) -> bool:
        """Return True if no more messages are needed: the client has gone, or its connection is needed."""
        return self.gives_way or self._transport is None or self._transport.is_closing()

    @contextmanager
    def polling(self, seconds: float) -> Iterator[None]:
        """Count as a call that may wait for messages, if `seconds` is not 0."""
        self.polls_since = time.monotonic() if seconds else 0.0
        try:
            yield
        finally:
            self.polls_since = 0.0

    def give_way(self) -> None:
        """Answer a call that waits for messages now, and then close the connection."""
        self.gives_way = True
        self.interrupt.set()

    def end(self, why: str) -> None:
        self.why_ended = why
        if self._transport is not None:
            self._transport.abort()

    async def send(self, request: web.Request, response: web.Response, outcome: Outcome | None = None) -> None:
        """Send a whole answer; returns when the client has taken most of it. Raises ConnectionError.

        `outcome` is called as soon as it is known whether the answer has arrived.
        """
        body, self.polls_since = response.body, 0.0
        await response.prepare(request)
        if isinstance(body, bytes) and request.method != "HEAD":
            view = memoryview(body)
            for begin in range(0, len(body), _PIECE_BYTES):
                self.since = time.monotonic()
                await web.StreamResponse.write(response, view[begin : begin + _PIECE_BYTES])
        self.since = time.monotonic()
        await web.StreamResponse.write_eof(response)
        if outcome is not None:
            await self._follow(request, bool(response.keep_alive), outcome)
        self.since = 0.0

    async def _follow(self, request: web.Request, keep_alive: bool, outcome: Outcome) -> None:
        """Report the outcome of an answer. If the connection ends here, the client gets time to close it first."""
        transport = request.transport
        if transport is None:
            return outcome(False)
        connection = transport.get_protocol()
        if not isinstance(connection, HttpConnection):  # its arrival is not observed
            return outcome(True)
        is_known = asyncio.Event()

        def settle(has_arrived: bool) -> None:
            is_known.set()
            outcome(has_arrived)

        connection.answered(settle)
        if not keep_alive:
            if transport.can_write_eof():
                transport.write_eof()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await is_known.wait()


def time_limit(seconds: float) -> asyncio.Timeout:
    """Return a context that raises TimeoutError after `seconds`, such as KMQ_LINE_DEADLINE, which may be never."""
    return asyncio.timeout(None if seconds == FOREVER else seconds)


def exchange() -> Exchange:
    """Return the exchange that this task serves."""
    found = READER.get()
    assert isinstance(found, Exchange), "the middleware has not run"
    return found


def exchanging(answers: Budget) -> Any:
    """Return the middleware that makes an Exchange of each request, and sends large answers. It is the outermost."""

    @web.middleware
    async def exchanged(request: web.Request, handler: WebHandler) -> web.StreamResponse:
        current = Exchange(request.transport)
        READER.set(current)  # a connection has one task, which serves its requests in turn
        try:
            response = await handler(request)
            if current.gives_way:
                response.force_close()
            body = getattr(response, "body", None)
            if not response.prepared and isinstance(body, bytes) and len(body) > _PIECE_BYTES:
                answers.settle(current, len(body))
                try:
                    await current.send(request, response)  # type: ignore[arg-type]  # what has a body is a Response
                except ConnectionError:
                    current.end("the client has gone")
            return response
        finally:
            current.close()

    return exchanged
