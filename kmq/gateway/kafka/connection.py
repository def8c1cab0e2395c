"""One connection of a Kafka client: receives requests (frames) and sends responses, in order.

    00 00 00 1a <26 bytes>    → next_frame() returns the 26 bytes; answer(frame, response) sends the response

Order       Responses leave in the order of their requests. Produce requests are served side by side, because clients
            send several without waiting. Every other request waits until all earlier ones are answered.
Invariant   Memory is never allocated by a length that a client says. A request that is too long, or invalid, ends the
            connection.
Memory      At most MAX_FRAME bytes of a request that carries records, MAX_CONTROL of another one, and MAX_UNKNOWN
            before the client has shown its token. Over all connections: _PARTIAL_BYTES of incomplete requests (above it
            the connection with the longest one ends) and _WHOLE_BYTES of complete ones. Above that the connection ends
            that has most bytes after a request that may wait for minutes. Without such a one, no connection is read
            until some requests are answered.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

from kmq.access.roles import Holder
from kmq.broker.stats import Strangers
from kmq.config.values import KIB, MIB
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.connection import ClientConnection
from kmq.gateway.kafka.wire import ErrorCode, Fields, Header, Key

MAX_FRAME, MAX_CONTROL, MAX_UNKNOWN = 32 * MIB, 2 * MIB, 16 * KIB
_LENGTH = 4  # before a request
_KEY = 2  # bytes of its key
_LEAST = 8  # bytes of a request
_HTTP, _TLS = (b"GET", b"PUT", b"POS", b"HEA", b"OPT", b"DEL", b"PRI"), b"\x16\x03"
_PARTIAL_BYTES = _WHOLE_BYTES = 64 * MIB
_MOST_FRAMES = 64  # whole requests of a connection that wait; above that it is not read
_AT_ONCE = 32  # topics, groups … of a request that are served side by side: some wait for the router
_PIPELINED = 16  # produce requests of a connection that are served at a time


class Requests:
    """Sizes of the requests of all connections that are received and not answered."""

    def __init__(self, strangers: Strangers) -> None:
        self.strangers = strangers
        self.connections: set[Connection] = set()
        self._partial = self._whole = 0
        self.is_paused = False

    def grow(self, partial: int, whole: int) -> None:
        """Note a change of these sizes. Ends and pauses connections if there is too much."""
        self._partial += partial
        self._whole += whole
        if self._partial > _PARTIAL_BYTES:
            longest = max(self.connections, key=lambda connection: connection.partial_bytes)
            self.strangers.cut_off(longest.peer, f"{longest.partial_bytes} bytes of a request that is not whole")
            longest.force_close()
        if self._whole > _WHOLE_BYTES and (most := max([each.behind for each in self.connections], default=0)):
            largest = next(connection for connection in self.connections if connection.behind == most)
            self.strangers.cut_off(largest.peer, f"{most} bytes of requests after one that may wait for minutes")
            largest.force_close()
        elif self._whole > _WHOLE_BYTES and not self.is_paused:
            self.is_paused = True
            for connection in self.connections:
                connection.transport.pause_reading()
        elif self.is_paused and self._whole <= _WHOLE_BYTES // 2:
            self.is_paused = False
            for connection in self.connections:
                connection.read_on()


class Connection(ClientConnection):
    """A connection of a Kafka client."""

    def __init__(self, serve: "Callable[[Connection], Awaitable[None]]", requests: Requests, is_open: bool) -> None:
        """`is_open`: clients need no token."""
        super().__init__(serve, requests.connections)
        self._requests, self.is_known = requests, is_open
        self.holder: Holder | None = None  # the holder of the token that it has shown
        self._partial = bytearray()
        self._counted = 0  # bytes of `partial` that `requests` counts
        self._frames: deque[bytes] = deque()
        self._unanswered = 0  # bytes of whole requests
        self._queued = 0  # bytes of these that are not being served yet
        self.may_wait = False  # the request being served may take minutes: a Fetch or a JoinGroup
        self._answers: deque[asyncio.Future[bytes | None]] = deque()  # of produce requests, in order
        self._flushing: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self.bad = ""  # why nothing more is received
        self._failed: Exception | None = None  # the error that ended the responses

    @property
    def partial_bytes(self) -> int:
        return len(self._partial)

    @property
    def behind(self) -> int:
        """Return how many bytes of requests wait after one that may take long."""
        return self._queued if self.may_wait else 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.bad or self._is_refused:
            return
        partial = self._partial
        partial += data
        whole = 0
        while len(partial) >= _LENGTH:
            length = int.from_bytes(partial[:_LENGTH], signed=True)
            self.bad = self._judge(bytes(partial[: _LENGTH + _KEY]), length)
            if self.bad:
                del partial[:]
                break
            if len(partial) < _LENGTH + length:
                break
            self._frames.append(bytes(memoryview(partial)[_LENGTH : _LENGTH + length]))
            del partial[: _LENGTH + length]
            whole += length
        if whole or not partial:
            self._unfinished_since = 0.0
        if partial and not self._unfinished_since:
            self._unfinished_since, self.needs_look = time.monotonic(), True
        self._unanswered += whole
        self._queued += whole
        grown, self._counted = len(partial) - self._counted, len(partial)
        if len(self._frames) >= _MOST_FRAMES or self._queued > MAX_CONTROL or self._requests.is_paused:
            self.transport.pause_reading()
        self._requests.grow(grown, whole)
        if self._frames or self.bad:
            self._arrived.set()

    def _judge(self, begin: bytes, length: int) -> str:
        """Return why a request that has begun is not received; "" if it is."""
        if begin[:3] in _HTTP:
            return "HTTP was spoken to the port for Kafka's protocol"
        if begin[:2] == _TLS:
            return "TLS was spoken to the port without it; see KMQ_KAFKA_TLS_PORT"
        if length < _LEAST:
            return f"a request of {length} bytes"
        if len(begin) < _LENGTH + _KEY:
            return ""
        key = int.from_bytes(begin[_LENGTH:], signed=True)
        most = MAX_UNKNOWN if not self.is_known else MAX_FRAME if key == Key.PRODUCE else MAX_CONTROL
        return f"a request of {length} bytes, where {most} are allowed" if length > most else ""

    async def next_frame(self) -> bytes | None:
        """Return the next request, without its length; None at the end. Raises the error that ended the responses."""
        if not self._answers:
            self._idle_since = time.monotonic()
        while not self._frames or self._failed is not None:
            if self._failed is not None:
                raise self._failed
            if self.bad or self._is_over:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        self._idle_since = 0.0
        frame = self._frames.popleft()
        self._queued -= len(frame)
        if len(self._frames) <= _MOST_FRAMES // 2:
            self.read_on()
        return frame

    def read_on(self) -> None:
        """Receive again, unless too much waits."""
        is_full = len(self._frames) >= _MOST_FRAMES or self._queued > MAX_CONTROL
        if not (is_full or self._requests.is_paused or self._is_lost or self.bad):
            self.transport.resume_reading()

    def _release(self, nbytes: int) -> None:
        self._unanswered -= nbytes
        self._requests.grow(0, -nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._requests.grow(-self._counted, -self._unanswered)
        self._counted = self._unanswered = 0
        self._partial = bytearray()  # free it now, not when the garbage collector runs
        self._frames.clear()
        self._queued = 0
        if self._flushing is not None:
            self._flushing.cancel()
        for answer in self._answers:
            answer.cancel()

    # --- responses ---------------------------------------------------------------------------------------------------

    async def answer(self, frame: bytes, response: bytes | None) -> None:
        """Send the response to a request. None: send nothing."""
        if response is not None:
            await self.write(response)
        if not self._is_lost:
            self._release(len(frame))

    async def answer_later(self, frame: bytes, work: Awaitable[bytes | None]) -> None:
        """Send the result of `work` in its turn. Returns at once, unless too many such requests are being served."""
        answer = asyncio.ensure_future(work)
        self._answers.append(answer)
        self.pending = 1
        answer.add_done_callback(lambda done: None if done.cancelled() or self._is_lost else self._release(len(frame)))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        while len(self._answers) >= _PIPELINED:
            await self._one_answered()

    async def all_answered(self) -> None:
        """Wait until all earlier requests are answered."""
        while self._answers:
            await self._one_answered()
        self.pending = 0

    async def _one_answered(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._answered.clear()
        await self._answered.wait()

    async def _flush(self) -> None:
        """Send the responses of produce requests in order. An error ends the connection's task."""
        try:
            while self._answers:
                response = await self._answers[0]
                if response is not None:
                    await self.write(response)
                self._answers.popleft()
                self._answered.set()
            self.pending, self._idle_since = 0, time.monotonic()
        except Exception as err:
            self._failed = err.with_traceback(None)  # a traceback would keep the request in memory
            self._answered.set()
            self._arrived.set()

    def end(self) -> None:
        """End the connection. Its open requests are not answered."""
        if self.task is not None and not self.task.done():
            self._is_ended = not self.is_sending
            self.task.cancel()


class Call(NamedTuple):
    """A request being served. `body`: what wire.decode returns; of Produce and Fetch a wire.Reader."""

    header: Header
    body: Any
    connection: Connection
    errors: list[ErrorCode]  # errors of the answer, for the metrics

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def holder(self) -> Holder | None:
        """Return the holder of the client's token; None if no token is needed."""
        return self.connection.holder

    def may(self, key: Key) -> bool:
        """Return True if this client may send requests of this kind."""
        return self.holder is None or self.holder.may(key.act)

    async def each(
        self,
        items: Iterable[Any],
        name: Callable[[Any], dict[str, Any]],
        work: Callable[[Any], Awaitable[Fields | None]],
        code_of: Callable[[RequestRefused], ErrorCode],
        at_once: int = _AT_ONCE,
    ) -> list[Fields]:
        """Serve each topic, group or other entry of a request, and return their answers in order.

        `name`: the field that names an entry in the answer. `work` returns its other fields, or raises RequestRefused.
        """

        async def answer(each: Any) -> Fields:
            try:
                return name(each) | dict(await work(each) or {})
            except RequestRefused as err:
                self.errors.append(code_of(err))
                return name(each) | {"error_code": self.errors[-1], "error_message": str(err)}

        rows, waiting = list[Fields](), [*items]
        for first in range(0, len(waiting), at_once):
            rows += await asyncio.gather(*map(answer, waiting[first : first + at_once]))
        return rows


Handler = Callable[[Call], Awaitable[Fields | bytes | None]]


class ApiHandler(Protocol):
    """Serves related API keys, with one handler each. Most keep no state of a connection, and have nothing to end."""

    handlers: dict[Key, Handler]

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        return

    async def close(self) -> None:
        """End: the gateway stops."""
        return
