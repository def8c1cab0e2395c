"""gRPC calls that wait for their clients: for the rest of a request, or until a response has been read.

gRPC itself bounds neither how long that takes nor the memory of it: a message that has begun, or that nobody reads, is held until
the connection ends. So every method is registered as a stream, which leaves it to us when a message is read and written.

Budgets     A call takes its share of a Budget before it makes gRPC hold something for it. Where a budget is used up, the call
            that has kept us waiting for longest gives way, and the newcomer waits until there is room.
End         A call that keeps us waiting and has to end takes its connection with it (front.py): gRPC would keep its messages.
Deadline    KMQ_LINE_DEADLINE for a request of one message, and for each response to be read. A stream may be silent.
Bystanders  Health/Watch and reflection: at most _BYSTANDERS at a time, the oldest gives way.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from kmq.broker.incidents import Strangers
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.grpc.front import Front, Relay
from kmq.gateway.grpc.statuses import refuse
from kmq.settings import KIB, MIB, Settings

ENVELOPE = 64 * KIB  # of a gRPC message around the record: the id, and gRPC's own framing
CHECK = "/grpc.health.v1.Health/Check"
_BYSTANDERS = 32
_RECEIVING_BYTES = 48 * MIB  # of requests that are not whole; each may become as long as the longest
PATIENCE_S = 0.1  # so long a call may wait for its client before it gives way to another
_IDLE_S = 1.0  # so long a stream of requests may be silent before it gives way
_LOOK_S = 0.05  # while waiting for room
_LONGEST_WAIT_S = 5.0  # for room


def longest_message(settings: Settings) -> int:
    """Bytes of the longest gRPC message."""
    return settings.max_line + ENVELOPE


class Call:
    """One call. It waits for its client, or the client waits for us."""

    def __init__(self, relay: Relay | None = None) -> None:
        self.task, self._relay = asyncio.current_task(), relay
        self.since = 0.0  # when it began to wait for its client; 0: it does not
        self.is_patient = False  # no deadline: a client may take its time between the messages of a stream
        self.why_ended = ""
        self.is_told = False  # why
        self._held: list[Budget] = []

    def has_waited(self, seconds: float) -> bool:
        return self.since > 0 and time.monotonic() - self.since >= seconds

    def end(self, why: str, politely: bool = False) -> None:
        """Others, or the deadline, want it to be over. Politely: it gets a status, and its connection stays."""
        if not self.why_ended and self.task is not None:
            self.why_ended, self.is_told = why, politely
            self.task.cancel()
            if self._relay is not None and not politely:
                self._relay.force_close()

    def hold(self, budget: "Budget") -> None:
        if budget not in self._held:
            self._held.append(budget)

    def close(self) -> None:
        """It is over: what it has held is free."""
        while self._held:
            self._held.pop().release(self)


def longest_waiting(calls: Iterable[Call], seconds: float) -> Call | None:
    """The call that has waited for its client for longest, and for at least so long."""
    late = [call for call in calls if call.has_waited(seconds) and not call.why_ended]
    return min(late, key=lambda call: call.since, default=None)


class Budget:
    """Bytes that calls may hold together."""

    def __init__(self, most: int, patience_s: float, strangers: Strangers | None = None) -> None:
        self.most, self.used = most, 0
        self._patience_s, self._strangers = patience_s, strangers
        self._held: dict[Call, int] = {}

    async def take(self, call: Call, nbytes: int) -> None:
        """Have it hold so many bytes, once there is room. Raises RequestRefused where there is none for long."""
        begin = time.monotonic()
        while self.used > self._held.get(call, 0) and self.used - self._held.get(call, 0) + nbytes > self.most:
            slow = longest_waiting(self._held, self._patience_s)
            if slow is not None:
                slow.end("others had to wait for it")
                if self._strangers is not None:
                    self._strangers.turn_away("", f"a call whose client is slow held {self._held[slow]} bytes")
                self.release(slow)
                continue
            if time.monotonic() - begin > _LONGEST_WAIT_S:
                raise RequestRefused("too_many", "too many calls have messages on the way")
            await asyncio.sleep(_LOOK_S)
        self.settle(call, nbytes)

    def settle(self, call: Call, nbytes: int) -> None:
        """It holds so many bytes now."""
        self.used += nbytes - self._held.get(call, 0)
        self._held[call] = nbytes
        call.hold(self)

    def release(self, call: Call) -> None:
        self.used -= self._held.pop(call, 0)


class Calls:
    """All calls there are."""

    def __init__(self, settings: Settings, strangers: Strangers) -> None:
        self.longest = longest_message(settings)
        self.receiving = Budget(max(_RECEIVING_BYTES, 4 * self.longest), PATIENCE_S, strangers)
        self.streaming = Budget(max(_RECEIVING_BYTES, 4 * self.longest), _IDLE_S, strangers)
        self._deadline_s, self._strangers = settings.line_deadline, strangers
        self.front: Front | None = None
        self.tls_front: Front | None = None
        self._all: set[Call] = set()
        self._bystanders: dict[Call, None] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def begin(self, context: Any) -> AsyncIterator[Call]:
        """A call, from its first byte to its end."""
        peer = context.peer()
        relay = next((found for front in (self.front, self.tls_front) if front and (found := front.find(peer))), None)
        call = Call(relay)
        self._all.add(call)
        if relay is not None:
            relay.calls.add(call)
        try:
            yield call
        except RequestRefused as refused:
            await refuse(context, refused)
        except asyncio.CancelledError:
            if call.task is None or not call.is_told:
                raise
            why, call.why_ended, call.since = (
                call.why_ended,
                "",
                time.monotonic(),
            )  # the deadline is also one for the status
            call.task.uncancel()
            await refuse(context, RequestRefused("too_many", why))
        finally:
            if relay is not None:
                relay.calls.discard(call)
                relay.idle_since = time.monotonic()
            self._all.discard(call)
            self._bystanders.pop(call, None)
            call.close()

    async def read(self, call: Call, context: Any) -> Any:
        """The only request of a call."""
        await self.receiving.take(call, self.longest)
        call.since = time.monotonic()
        request = await context.read()
        call.since = 0.0
        self.receiving.settle(call, 0)
        if request is grpc.aio.EOF:
            raise RequestRefused("bad_request", "a request is missing")
        return request

    async def stream(self, call: Call, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The requests of a stream."""
        await self.streaming.take(call, self.longest)
        call.since, call.is_patient = time.monotonic(), True
        async for request in requests:
            call.since = time.monotonic()
            yield request

    async def write(self, call: Call, context: Any, response: Any) -> None:
        """One response, until the client has room for it."""
        is_patient = call.is_patient
        call.since, call.is_patient = time.monotonic(), False
        await context.write(response)  # a call that is cancelled in here stays as it is to its end
        call.since, call.is_patient = time.monotonic() if is_patient else 0.0, is_patient

    def stand_by(self, call: Call) -> None:
        """It is nobody's business how long it takes: it gives way to the next of its kind where there are many."""
        if len(self._bystanders) >= _BYSTANDERS:
            oldest = next(iter(self._bystanders))
            del self._bystanders[oldest]
            self._strangers.turn_away("", f"{_BYSTANDERS} calls of Health/Watch and reflection are open")
            oldest.end("newer calls of its kind came", politely=not oldest.since)
        self._bystanders[call] = None

    async def drain(self) -> None:
        """Call when gRPC has stopped."""
        await asyncio.gather(*(front.drain() for front in (self.front, self.tls_front) if front))

    def sweep(self) -> None:
        """End those that have kept us waiting for too long. Call some times a second."""
        for call in list(self._all):
            if not call.is_patient and call.has_waited(self._deadline_s) and not call.why_ended:
                self._strangers.cut_off("", "a call whose client did not go on within KMQ_LINE_DEADLINE")
                call.end("the client did not go on within KMQ_LINE_DEADLINE")


class Bystanders(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Puts health and reflection, whose methods are gRPC's own, under the same rules."""

    def __init__(self, calls: Calls, service: str) -> None:
        self._calls, self._service = calls, f"/{service}/"

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._service):
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
        async def serve(requests: Any, context: Any) -> None:
            async with self._calls.begin(context) as call:
                self._calls.stand_by(call)
                if handler.unary_stream:
                    request = await self._calls.read(call, context)
                    await handler.unary_stream(request, context)
                    return
                async for response in handler.stream_stream(requests, context):
                    await self._calls.write(call, context, response)

        return serve
