"""One request over HTTP and its answer: how long it keeps the gateway waiting, what it holds, and how it is sent.

Memory      A large answer counts for the budget of all answers (kmq/gateway/core/answers.py) until its client has taken
            it. It is sent piece by piece, so the transport holds no second copy of it.
Wait        A call that waits for messages costs a connection and nothing else. At the limit of connections the one that
            has waited longest is answered at once, and its connection is closed, to make room for a newcomer (doors.py).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from kmq.gateway.core.answers import READER, Budget
from kmq.settings import KIB

_PIECE_BYTES = 64 * KIB  # sent at once; answers of that size are left to aiohttp

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Exchange:
    """A request that is being served or answered. It holds shares of budgets (answers.Holder)."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self._transport = transport
        self.since = 0.0  # when the client was sent a piece that it has not taken; 0: it waits for the gateway
        self.polls_since = 0.0  # when it began to wait for messages; 0: it does not
        self.why_ended = ""
        self.gives_way = False
        self.interrupt = asyncio.Event()  # ends a wait for messages
        self._held: list[Budget] = []

    @property
    def is_over(self) -> bool:
        """Return True if nobody needs more messages: the client has gone, or its place is needed."""
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
        """Answer a call that waits for messages now, and close the connection after that."""
        self.gives_way = True
        self.interrupt.set()

    def has_waited(self, seconds: float) -> bool:
        return self.since > 0 and time.monotonic() - self.since >= seconds

    def hold(self, budget: Budget) -> None:
        if budget not in self._held:
            self._held.append(budget)

    def end(self, why: str) -> None:
        self.why_ended = why
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Give back all shares of budgets, because the answer was sent."""
        while self._held:
            self._held.pop().release(self)

    async def send(self, request: web.Request, response: web.Response) -> None:
        """Send a whole answer; returns when the client has taken most of it. Raises ConnectionError."""
        body, self.polls_since = response.body, 0.0
        await response.prepare(request)
        if isinstance(body, bytes) and request.method != "HEAD":
            view = memoryview(body)
            for begin in range(0, len(body), _PIECE_BYTES):
                self.since = time.monotonic()
                await web.StreamResponse.write(response, view[begin : begin + _PIECE_BYTES])
        self.since = time.monotonic()
        await web.StreamResponse.write_eof(response)
        self.since = 0.0


def exchange() -> Exchange:
    """Return the exchange that this task serves."""
    found = READER.get()
    assert isinstance(found, Exchange), "the middleware has not run"
    return found


def exchanging(answers: Budget) -> Any:
    """Return the middleware that makes an Exchange of each request, and sends large answers. It is the outermost."""

    @web.middleware
    async def exchanged(request: web.Request, handler: Handler) -> web.StreamResponse:
        current = Exchange(request.transport)
        READER.set(current)  # a connection has a task, which serves one request after the other
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
