"""One connection of a Kafka client: frames in, frames out, in order.

Order       Responses leave in the order of their requests. Produce requests are worked on side by side, because clients
            send several and wait for none; every other request waits until all before it are answered.
Invariant   No memory is taken by a length that a client says. A request that is too long, or is none, ends the connection.
Memory      At most MAX_FRAME bytes of a request that carries records, MAX_CONTROL of another one, and MAX_UNKNOWN before
            the client has shown who it is. All requests together: _PARTIAL_BYTES that are not whole, over which the
            longest one's connection ends; and _WHOLE_BYTES that are. Over these the connection ends that has most behind a
            request that may wait for minutes; where there is none, nobody is read until some are answered.
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
_LENGTH = 4  # bytes in front of a request
_KEY = 2  # bytes that say of which kind it is
_LEAST = 8  # bytes of a request
_HTTP, _TLS = (b"GET", b"PUT", b"POS", b"HEA", b"OPT", b"DEL", b"PRI"), b"\x16\x03"
_PARTIAL_BYTES = _WHOLE_BYTES = 64 * MIB
_MOST_FRAMES = 64  # whole requests of a connection that wait; beyond that nothing is received
_AT_ONCE = 32  # topics, groups … of a request that are worked on side by side: some wait for the router
_PIPELINED = 16  # produce requests of a connection that are worked on at a time


class Requests:
    """The requests of all connections, as far as they have come and are not answered."""

    def __init__(self, strangers: Strangers) -> None:
        self.strangers = strangers
        self.connections: set[Connection] = set()
        self._partial = self._whole = 0
        self.is_paused = False

    def grow(self, partial: int, whole: int) -> None:
        """Note how much more, or less, there is. Ends and pauses connections if it is too much."""
        self._partial += partial
        self._whole += whole
        if self._partial > _PARTIAL_BYTES:
            longest = max(self.connections, key=lambda connection: connection.partial_bytes)
            self.strangers.cut_off(longest.peer, f"{longest.partial_bytes} bytes of a request that is not whole")
            longest.force_close()
        if self._whole > _WHOLE_BYTES and (most := max([each.behind for each in self.connections], default=0)):
            largest = next(connection for connection in self.connections if connection.behind == most)
            self.strangers.cut_off(largest.peer, f"{most} bytes of requests behind one that may wait for minutes")
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
        """`is_open`: a client need not show who it is."""
        super().__init__(serve, requests.connections)
        self._requests, self.is_known = requests, is_open
        self.holder: Holder | None = None  # whose token it has shown
        self._partial = bytearray()
        self._counted = 0  # of `partial`, that `requests` knows of
        self._frames: deque[bytes] = deque()
        self._unanswered = 0  # bytes of whole requests
        self._queued = 0  # of these, bytes of those that are not served yet
        self.may_wait = False  # what is served now is no Produce: a Fetch or a JoinGroup may take minutes
        self._answers: deque[asyncio.Future[bytes | None]] = deque()  # of produce requests, in order
        self._flushing: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self.bad = ""  # why nothing more is received
        self._failed: Exception | None = None  # what has ended the responses

    @property
    def partial_bytes(self) -> int:
        return len(self._partial)

    @property
    def behind(self) -> int:
        """Return how many bytes of requests lie behind one that may wait for long."""
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
        """Return why a request is not received, as far as it has begun; "" if it is."""
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
        """Return the next request, without its length; None when there are no more. Raises what ended the responses."""
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
        self._partial = bytearray()  # at once: the garbage collector comes when it likes
        self._frames.clear()
        self._queued = 0
        if self._flushing is not None:
            self._flushing.cancel()
        for answer in self._answers:
            answer.cancel()

    # --- responses ---------------------------------------------------------------------------------------------------

    async def answer(self, frame: bytes, response: bytes | None) -> None:
        """Send the response to a request; None: it gets none."""
        if response is not None:
            await self.write(response)
        if not self._is_lost:
            self._release(len(frame))

    async def answer_later(self, frame: bytes, work: Awaitable[bytes | None]) -> None:
        """Send what `work` returns in its turn, and go on at once, unless too many such requests are worked on."""
        answer = asyncio.ensure_future(work)
        self._answers.append(answer)
        self.pending = 1
        answer.add_done_callback(lambda done: None if done.cancelled() or self._is_lost else self._release(len(frame)))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        while len(self._answers) >= _PIPELINED:
            await self._one_answered()

    async def all_answered(self) -> None:
        """Wait until the responses to all requests before are sent."""
        while self._answers:
            await self._one_answered()
        self.pending = 0

    async def _one_answered(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._answered.clear()
        await self._answered.wait()

    async def _flush(self) -> None:
        """Send the responses of produce requests as they come, in order. What goes wrong ends the connection's task."""
        try:
            while self._answers:
                response = await self._answers[0]
                if response is not None:
                    await self.write(response)
                self._answers.popleft()
                self._answered.set()
            self.pending, self._idle_since = 0, time.monotonic()
        except Exception as err:
            self._failed = err.with_traceback(None)  # which would hold the request as long as the connection is there
            self._answered.set()
            self._arrived.set()

    def end(self) -> None:
        """End the connection; what it has asked for and is not answered is not answered any more."""
        if self.task is not None and not self.task.done():
            self._is_ended = not self.is_sending
            self.task.cancel()


class Call(NamedTuple):
    """A request on its way. `body`: what wire.decode returns; of Produce and Fetch a wire.Reader."""

    header: Header
    body: Any
    connection: Connection
    errors: list[ErrorCode]  # that the answer has, for the metrics

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def holder(self) -> Holder | None:
        """Return whose token the client has shown; None: it needs none."""
        return self.connection.holder

    def may(self, key: Key) -> bool:
        """Return True if this client may ask for that."""
        return self.holder is None or self.holder.may(key.act)

    async def each(
        self,
        asked: Iterable[Any],
        name: Callable[[Any], dict[str, Any]],
        work: Callable[[Any], Awaitable[Fields | None]],
        code_of: Callable[[RequestRefused], ErrorCode],
        at_once: int = _AT_ONCE,
    ) -> list[Fields]:
        """Do what is asked of each topic, group or the like, and return what each is answered, in order.

        `name`: how an answer names it. `work` returns what the answer says besides, or raises RequestRefused.
        """

        async def answer(each: Any) -> Fields:
            try:
                return name(each) | dict(await work(each) or {})
            except RequestRefused as err:
                self.errors.append(code_of(err))
                return name(each) | {"error_code": self.errors[-1], "error_message": str(err)}

        rows, waiting = list[Fields](), [*asked]
        for first in range(0, len(waiting), at_once):
            rows += await asyncio.gather(*map(answer, waiting[first : first + at_once]))
        return rows


Handler = Callable[[Call], Awaitable[Fields | bytes | None]]


class Chapter(Protocol):
    """A part of the protocol, which serves some keys. Most keep nothing of a connection, and have nothing to end."""

    handlers: dict[Key, Handler]

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        return

    async def close(self) -> None:
        """End: the gateway stops."""
        return
