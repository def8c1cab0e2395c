"""gRPC calls that wait for their clients: for the rest of a request, or until the client has read a response.

gRPC itself bounds neither the duration of such a wait nor its memory: it holds a half-received message, or a response
that the client does not read, until the connection ends. So every method is registered as a stream. Then this module
decides when a message is read and written.

Budgets     A call reserves its share of a Budget before gRPC holds a message for it. When the budget is used up, the
            call that has waited longest for its client is evicted, and the new call waits until enough bytes are
            free.
End         A call that is evicted while it waits for its client takes its connection with it (front.py). Otherwise
            gRPC would keep the messages of the call.
Deadline    KMQ_LINE_DEADLINE limits how long the only request of a call, and the reading of each response, may take.
            A stream of requests may be silent for any time.
Listeners   A stream that is answered while it is read (kmq.v1 Subscribe) may be silent for as long as its member's
            session. gRPC may hold an unknown part of its next request. That is at most what its connection has received
            since the stream's last whole request, less the whole requests of other streams. All listeners together:
            at most _UNFINISHED_BYTES. Above that the connection with the largest part is closed.
Streams     At most as many calls as a Streams allows may last for long. A new one evicts the one that has waited
            longest for its client, and is refused if none has.
Bystanders  Health/Watch and reflection: at most _BYSTANDERS calls at a time; a new one evicts the oldest. The evicted
            call gets a status, and the other calls of its connection go on. If it is just waiting for its client, the
            status comes after that, at most _LEAVE_S later and for at most _LEAVING such calls; beyond either limit the
            connection is closed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc

from kmq.broker.stats import Strangers
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.gateway.core.answers import PATIENCE_S, Budget, BudgetHolder, longest_waiting
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.grpc.front import Front, Relay
from kmq.gateway.grpc.schema import refuse

ENVELOPE = 64 * KIB  # bytes of a gRPC message besides the record: the id, and gRPC's own framing
STREAMS = 256  # of all services; fewer than the connections of a port, so that some can always be evicted
CHECK = "/grpc.health.v1.Health/Check"
_BYSTANDERS, _LEAVING = 32, 512
_LEAVE_S = 1.0  # how long an evicted bystander may still wait for its client
_RECEIVING_BYTES = 48 * MIB  # of half-received requests; each counts as the longest message
_UNFINISHED_BYTES = 48 * MIB  # of half-received requests of listeners
_LITTLE_BYTES = 128 * KIB  # of one connection: ignored below this
_IDLE_S = 1.0  # how long a stream of requests may be silent before another call may evict it


def longest_message(settings: Settings) -> int:
    """Return the maximum bytes of a gRPC message."""
    return settings.max_line + ENVELOPE


class GrpcCall(BudgetHolder):
    """One call. At any time either the call waits for its client, or the client waits for the gateway."""

    def __init__(self, relay: Relay | None = None) -> None:
        super().__init__()
        self.task, self.relay = asyncio.current_task(), relay  # `relay`: its connection
        self.is_patient = False  # no deadline applies: between two requests of a stream a client may take any time
        self.has_status = False  # the client gets `why_ended` as a status
        self.why_leaving = ""  # the call ends with this as a status as soon as it no longer waits for its client
        self.reserved = 0  # bytes of a budget for the request that is awaited
        self.listens_from: int | None = None  # `relay.unclaimed` at its last whole request; None: it does not listen

    @property
    def peer(self) -> str:
        """Return the address that the client came from."""
        return self.relay.peer if self.relay is not None else ""

    def end(self, why: str, politely: bool = False) -> None:
        """End the call early, with its connection. `politely`: send a status instead, and keep the connection."""
        if not self.why_ended and self.task is not None:
            self.why_ended, self.has_status = why, politely
            self.task.cancel()
            if self.relay is not None and not politely:
                self.relay.force_close()

    def leave(self, why: str) -> None:
        """End the call with a status, once it no longer waits for its client: gRPC would keep an unread response."""
        self.why_leaving = why
        if not self.since:
            self.end(why, politely=True)

    def arrive(self) -> None:
        """Note that the call no longer waits for its client. Raises RequestRefused if it was evicted meanwhile."""
        self.since = 0.0
        if self.why_leaving:
            raise RequestRefused("too_many", self.why_leaving)


class Streams:
    """The calls that may last: at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[GrpcCall] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def enter(self, call: GrpcCall) -> Iterator[None]:
        """Count a call for as long as the block runs. Raises RequestRefused if there are too many."""
        if len(self._open) >= self._most:
            slow = longest_waiting(self._open, PATIENCE_S)
            if slow is None:
                raise RequestRefused("too_many", f"{self._most} streams are open already")
            self._open.discard(slow)
            slow.end("the stream was evicted for a new one, because its client was slow")
        self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)


class Calls:
    """All open calls, and the budgets they share."""

    def __init__(self, settings: Settings, strangers: Strangers) -> None:
        self.longest = longest_message(settings)
        self.receiving = Budget(max(_RECEIVING_BYTES, 4 * self.longest), PATIENCE_S, strangers)
        self.streaming = Budget(max(_RECEIVING_BYTES, 4 * self.longest), _IDLE_S, strangers)
        self._deadline_s, self.strangers = settings.line_deadline, strangers
        self.fronts: list[Front] = []  # one for each port
        self._open: set[GrpcCall] = set()
        self._bystanders: dict[GrpcCall, None] = {}  # in the order in which they began
        self._leaving: dict[GrpcCall, None] = {}  # evicted bystanders that are not over, in the order of their eviction

    @contextlib.asynccontextmanager
    async def begin(self, context: Any) -> AsyncIterator[GrpcCall]:
        """Register a call for as long as the block runs, and end it with a status if it is refused."""
        peer = context.peer()
        relay = next((hit for front in self.fronts if (hit := front.find(peer))), None)
        call = GrpcCall(relay)
        self._open.add(call)
        if relay is not None:
            relay.calls.add(call)
        try:
            yield call
        except RequestRefused as refused:
            await refuse(context, refused)
        except asyncio.CancelledError:
            if call.task is None or not call.has_status:
                raise
            why, call.why_ended = call.why_ended, ""
            call.since = time.monotonic()  # the deadline applies to the status too
            call.task.uncancel()
            await refuse(context, RequestRefused("too_many", why))
        finally:
            if relay is not None:
                relay.calls.discard(call)
                relay.idle_since = time.monotonic()
            self._open.discard(call)
            self._bystanders.pop(call, None)
            self._leaving.pop(call, None)
            call.close()

    async def read(self, call: GrpcCall, context: Any) -> Any:
        """Return the only request of a call."""
        await self.receiving.reserve(call, self.longest)
        call.since, call.reserved = time.monotonic(), self.longest
        request = await context.read()
        self.receiving.release(call)
        call.reserved = 0
        call.arrive()
        if request is grpc.aio.EOF:
            raise RequestRefused("bad_request", "a request is missing")
        _claim(call, request)
        return request

    async def stream(self, call: GrpcCall, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the requests of a stream."""
        await self.streaming.reserve(call, self.longest)
        call.since, call.is_patient, call.reserved = time.monotonic(), True, self.longest
        async for request in requests:
            call.since = time.monotonic()
            _claim(call, request)
            yield request

    async def listen(self, call: GrpcCall, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the requests of a stream that is answered meanwhile. The deadline applies to the first one alone."""
        call.since, is_first = time.monotonic(), True
        self._mark(call)
        async for request in requests:
            _claim(call, request)
            if is_first:
                is_first, call.since = False, 0.0  # from now on only a write waits for the client
            self._mark(call)
            yield request

    def _mark(self, call: GrpcCall) -> None:
        call.listens_from = call.relay.unclaimed if call.relay is not None else 0

    def look(self, relay: Relay) -> None:
        """Close a connection if listeners may have too many bytes of unfinished requests. Relays call it as they grow."""
        if _unfinished(relay) <= _LITTLE_BYTES:
            return
        relays = {call.relay for call in self._open if call.relay is not None and call.listens_from is not None}
        sizes = {each: _unfinished(each) for each in relays}
        if sum(sizes.values()) > _UNFINISHED_BYTES:
            largest = max(sizes, key=lambda each: sizes[each])
            self.strangers.cut_off(largest.peer, f"{sizes[largest]} bytes of unfinished requests")
            largest.force_close()

    async def write(self, call: GrpcCall, context: Any, response: Any) -> None:
        """Write one response, waiting until the client has room for it."""
        is_patient = call.is_patient
        call.since, call.is_patient = time.monotonic(), False
        await context.write(response)  # a call that is cancelled here stays marked as waiting until it is over
        call.arrive()
        call.since, call.is_patient = time.monotonic() if is_patient else 0.0, is_patient

    def stand_by(self, call: GrpcCall) -> None:
        """Let the call last for any time, until too many such calls are open: then a new one evicts the oldest."""
        if len(self._bystanders) >= _BYSTANDERS:
            oldest = next(iter(self._bystanders))
            del self._bystanders[oldest]
            self._leaving[oldest] = None
            self.strangers.turn_away("", f"{_BYSTANDERS} calls of Health/Watch and reflection are open")
            oldest.leave("the call was evicted for a newer one of its kind")
        if len(self._leaving) > _LEAVING:
            self._close_leaving(next(iter(self._leaving)))
        self._bystanders[call] = None

    def _close_leaving(self, call: GrpcCall) -> None:
        """Close the connection of an evicted bystander that still waits for its client."""
        del self._leaving[call]
        call.end("the call was evicted, and its client did not read on")

    async def drain(self) -> None:
        """Wait until the clients have received their last bytes. Call when gRPC has stopped."""
        await asyncio.gather(*(front.drain() for front in self.fronts))

    def sweep(self) -> None:
        """End calls that have waited for their client past the deadline. Call several times a second."""
        for call in [call for call in self._leaving if call.has_waited(_LEAVE_S)]:
            self._close_leaving(call)
        for call in list(self._open):
            if not call.is_patient and call.has_waited(self._deadline_s) and not call.why_ended:
                self.strangers.cut_off("", "a call whose client did not continue within KMQ_LINE_DEADLINE")
                call.end("the client did not continue within KMQ_LINE_DEADLINE")


def _claim(call: GrpcCall, request: Any) -> None:
    """Note that a request is whole, if listeners on its connection must know."""
    relay = call.relay
    if relay is not None and any(each.listens_from is not None for each in relay.calls):
        relay.claimed += len(request) if isinstance(request, bytes) else request.ByteSize()


def _unfinished(relay: Relay) -> int:
    """Return how many bytes of unfinished requests the listeners of a connection may have at most."""
    marks = [call.listens_from for call in relay.calls if call.listens_from is not None]
    if not marks:
        return 0
    return max(0, int(relay.unclaimed - min(marks) - sum(call.reserved for call in relay.calls)))


class Bystanders(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Applies the same rules to health and reflection, whose methods come from gRPC's own packages."""

    def __init__(self, calls: Calls, services: Iterable[str]) -> None:
        """`services`: the others, whose methods do it themselves."""
        self._calls, self._others = calls, tuple(f"/{service}/" for service in services)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._others):
            return handler
        serve = self._check(handler) if handler.unary_unary else self._watch(handler)
        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    def _check(self, handler: Any) -> Any:
        async def serve(_: Any, context: Any) -> None:
            async with self._calls.begin(context) as call:
                request = await self._calls.read(call, context)
                await self._calls.write(call, context, await handler.unary_unary(request, context))

        return serve

    def _watch(self, handler: Any) -> Any:
        watch = handler.unary_stream or handler.stream_stream

        async def serve(requests: Any, context: Any) -> None:
            async with self._calls.begin(context) as call:
                self._calls.stand_by(call)
                if handler.unary_stream:
                    requests = await self._calls.read(call, context)
                async with contextlib.aclosing(watch(requests, context)) as responses:
                    async for response in responses:
                        await self._calls.write(call, context, response)

        return serve
