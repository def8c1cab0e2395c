"""Service kmq.v1.Kmq: topics, messages and consumer groups (kmq.proto says what each call returns).

Produce     As over HTTP: core/producing.py, and the same windows of ids.
Fetch       As over HTTP: core/fetching.py.
Subscribe   A member of a group: subscription.py.
Memory      At most _HELD_BYTES of requests whose messages are being stored, what `read` allows of records that clients
            have not taken yet, and the streams that may be open. A Fetch that waits counts as a stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from kmq.config.values import MIB
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.cold import refusal
from kmq.gateway.core.core import Core
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.redelivery import Redelivery
from kmq.gateway.grpc import values
from kmq.gateway.grpc.calls import Calls, GrpcCall, Streams
from kmq.gateway.grpc.schema import KMQ
from kmq.gateway.grpc.subscription import Subscription, read
from kmq.message.message import Message

_HELD_BYTES = 64 * MIB
_MESSAGE, _HEADER = 600, 200  # bytes of memory that each takes besides its content
_MOST_WAIT_MS = 60_000
_Produced, _Fetched = KMQ.messages["ProduceResponse"], KMQ.messages["FetchResponse"]


class KmqV1:
    """The three methods. They raise RequestRefused, which service.py turns into a gRPC status."""

    def __init__(
        self, core: Core, groups: Groups, calls: Calls, streams: Streams, redelivery: Redelivery | None = None
    ) -> None:
        """`redelivery` None: no message can be given back or is delivered again."""
        self._core, self._groups, self._streams, self._redelivery = core, groups, streams, redelivery
        self._longest = calls.longest
        self._held = 0
        self._members: set[Subscription] = set()

    def stop(self) -> None:
        """End the subscriptions; requests that were accepted still get their responses."""
        for member in self._members:
            member.end(RequestRefused("stopping", "the gateway is stopping; join again"))

    # --- produce -----------------------------------------------------------------------------------------------------

    async def produce(self, data: bytes, call: GrpcCall) -> Any:
        request = values.parse(KMQ.request_of("Produce"), data)
        headers = sum(len(message.headers) for message in request.messages)
        weight = len(data) + _MESSAGE * len(request.messages) + _HEADER * headers
        if request.acks == request.NONE:
            messages = values.new_messages(request)
            self._hold(weight)  # until the broker has replied
            self._core.producing.send(request.topic, messages, request.producer, partial(self._release, weight))
            return _Produced()
        self._hold(weight)
        try:
            messages = values.new_messages(request)
            outcomes = await self._core.producing.produce(request.topic, messages, request.producer)
        finally:
            self._release(weight)
        refused = [outcome for outcome in outcomes if isinstance(outcome, RequestRefused)]
        codes = {each.code for each in refused}
        if len(refused) == len(outcomes) and len(codes) == 1 and refused[0].refusal.is_retryable:
            raise refused[0]
        return _Produced(results=[values.result(request.topic, outcome) for outcome in outcomes])

    def _hold(self, nbytes: int) -> None:
        """Count a request as held. Raises RequestRefused (busy)."""
        if self._held and self._held + nbytes > _HELD_BYTES:
            raise RequestRefused("busy", "other requests hold the memory for messages; send this one again")
        self._held += nbytes

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes

    # --- fetch -------------------------------------------------------------------------------------------------------

    async def fetch(self, data: bytes, call: GrpcCall) -> Any:
        request = values.parse(KMQ.request_of("Fetch"), data)
        limit = values.limit(request, _MOST_WAIT_MS)
        fetching, begin = self._core.fetching, values.position(getattr(request, "from"), "from")
        cursor = await fetching.open(request.topic, request.partition, begin)

        def shape(found: list[Message]) -> tuple[Any, int]:
            response = _Fetched(next_offset=cursor.offset, end_offset=cursor.end)
            return response, values.fill(response.records, found)

        until = time.monotonic() + limit.wait_s
        count, response = await read(self._core, self._longest, call, cursor, limit, shape)
        if not count and limit.wait_s:
            with self._streams.enter(call):
                while not count and await fetching.wait([cursor], until, asyncio.Event(), lambda: False):
                    count, response = await read(self._core, self._longest, call, cursor, limit, shape)
        if not count and cursor.cold is not None:
            raise refusal(cursor.cold)  # an empty response would say that there is nothing more
        return response

    # --- subscribe ---------------------------------------------------------------------------------------------------

    async def subscribe(
        self, requests: AsyncIterator[bytes], call: GrpcCall, write: Callable[[Any], Awaitable[None]]
    ) -> None:
        with self._streams.enter(call):
            member = Subscription(self._core, self._groups, self._redelivery, self._longest, call, write)
            self._members.add(member)
            try:
                await member.run(requests)
            finally:
                self._members.discard(member)
