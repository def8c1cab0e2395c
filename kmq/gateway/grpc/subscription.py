"""Subscribe: a member of a consumer group, on one stream.

Order       What the coordinator says is passed on in order: `revoke` before the `assigned` of the same generation.
            Requests before `revoked` are served before it counts, so a commit in front of it is always allowed.
Invariant   A partition is read from where its former owner has committed: it is opened when the assignment is passed
            on, and the former owner has given it up before. Nothing of a partition is sent behind its `revoke`.
Silence     A stream that breaks does not end the member: whoever joins with its id within the session timeout goes on
            with its partitions. Only requests are signs of life, not the connection: a program that is stopped loses its
            partitions after its session timeout, and its stream ends. `leave` ends the member at once.
Memory      One event for each kind that follows another, so at most a few while the client does not read; fetches and
            records as in delivering.py; one request of at most _MOST_REQUEST bytes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kmq.config.values import KIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.groups.events import Assigned, Ended, Event, Revoke
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import Commit
from kmq.gateway.groups.redelivery import Reader, Redelivery
from kmq.gateway.groups.terms import Client, Resume, Terms
from kmq.gateway.grpc import values
from kmq.gateway.grpc.calls import Call
from kmq.gateway.grpc.delivering import Deliveries, Out
from kmq.gateway.grpc.reading import Reading
from kmq.gateway.grpc.schema import KMQ
from kmq.wire.refusals import known
from kmq.wire.requests import TopicPartition

_MOST_REQUEST = 64 * KIB
_Request = KMQ.request_of("Subscribe")
_TIMES = {"session_ms": "session_s", "rebalance_ms": "rebalance_s", "max_poll_ms": "max_poll_s"}


class Subscription:
    """One Subscribe. `write`: returns when the client has room for the response."""

    _reader: Reader | None  # both as soon as the member has joined
    _deliveries: Deliveries

    def __init__(
        self,
        core: Core,
        groups: Groups,
        redelivery: Redelivery | None,
        reading: Reading,
        call: Call,
        write: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._groups, self._call, self._redelivery = groups, call, redelivery
        self._core, self._reading, self._out = core, reading, Out(write)
        self._group = self._member = ""
        self._events: deque[Event] = deque()
        self._has_event, self._has_ended = asyncio.Event(), asyncio.Event()
        self._why_ended: RequestRefused | None = None
        self._has_left = False
        self._unanswered: deque[int] = deque()  # generations of `revoke` that the client has not answered
        self._told = 0  # generation of the last `assigned`

    def end(self, why: RequestRefused) -> None:
        """End the stream with this status."""
        self._why_ended = self._why_ended or why
        self._has_ended.set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Join, and serve the member until it leaves or is ended, or its stream ends."""
        first = await anext(requests, None)
        if first is None:
            raise RequestRefused("bad_request", "the stream ended before it began; the first request is join")
        await self._join(_parsed(first))
        served = asyncio.gather(self._deliveries.serve(), self._listen(requests))
        tasks: list[asyncio.Future[Any]] = [
            served,
            asyncio.ensure_future(self._follow()),
            asyncio.ensure_future(self._has_ended.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._why_ended is not None:
                raise self._why_ended
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._groups.stop_listening(self._group, self._member, self._hear)

    async def _join(self, request: Any) -> None:
        if request.WhichOneof("request") != "join":
            raise RequestRefused("bad_request", "the first request must be join")
        join = request.join
        if not join.topics:
            raise bad_field("join.topics", "must name a topic")
        times = {ours: getattr(join, name) / 1000 for name, ours in _TIMES.items() if getattr(join, name)}
        terms = Terms(tuple(sorted({*join.topics})), static_name=join.static_name or None)._replace(**times)
        if join.assignor:
            terms = terms._replace(assignor=join.assignor)
        resume = Resume(join.generation, values.places(join.owned) if join.generation else None)
        client = Client(join.client or join.member or "grpc", self._call.peer)
        self._group = join.group
        self._member = await self._groups.join(
            join.group, join.member or None, client, terms, self._hear, resume, is_anew=True
        )
        self._reader = Reader(self._redelivery, self._group, self._member) if self._redelivery else None
        self._deliveries = Deliveries(self._core, self._reading, self._call, self._out, self._reader)
        await self._out.say(request.request_id, joined={"member": self._member})

    # --- what the coordinator says -----------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.end(RequestRefused(event.code, f"{known(event.code).text}; join again"))
            return
        if self._events and isinstance(event, Assigned) and isinstance(self._events[-1], Assigned):
            self._events.pop()  # only the last one is in force
        self._events.append(event)
        self._has_event.set()

    async def _follow(self) -> None:
        """Pass on what the coordinator says."""
        while True:
            await self._has_event.wait()
            self._has_event.clear()
            while self._events and not self._has_left:
                event = self._events.popleft()
                if isinstance(event, Revoke):
                    await self._revoke(event)
                elif isinstance(event, Assigned):
                    await self._assign(event)

    async def _revoke(self, event: Revoke) -> None:
        self._deliveries.revoke(event.partitions)
        self._unanswered.append(event.generation)
        gone = {"generation": event.generation, "partitions": values.partitions(event.partitions)}
        await self._out.say(revoke=gone)

    async def _assign(self, event: Assigned) -> None:
        committed = {place: row.offset for place, row in self._groups.committed(self._group).items()}
        await self._deliveries.assign(event.partitions, committed)
        cursors = sorted(self._deliveries.cursors.items())
        rows = [
            {"topic": topic, "partition": number, "next_offset": cursor.offset} for (topic, number), cursor in cursors
        ]
        await self._out.say(assigned={"generation": event.generation, "partitions": rows})
        self._told = event.generation
        if not self._unanswered and not self._has_left:
            self._groups.sync(self._group, self._member, event.generation)

    # --- what the client says ----------------------------------------------------------------------------------------

    async def _listen(self, requests: AsyncIterator[bytes]) -> None:
        """Serve requests until the client leaves or has sent its last."""
        async for data in requests:
            request = _parsed(data)
            kind = request.WhichOneof("request")
            self._groups.beat(self._group, self._member, polled=kind == "fetch")
            if kind == "leave":
                self._has_left = True
                self._groups.leave(self._group, self._member)
                break
            try:
                await self._serve(kind, request)
            except RequestRefused as err:
                await self._out.say(request.request_id, error=values.error(err))
        self._deliveries.finish(at_once=self._has_left)

    async def _serve(self, kind: str | None, request: Any) -> None:
        if kind == "fetch":
            self._deliveries.ask(request.request_id, request.fetch)
        elif kind == "commit":
            await self._commit(request.commit)
            await self._out.say(request.request_id, committed={})
        elif kind == "nack":
            nack = request.nack
            place = TopicPartition(nack.topic, nack.partition)
            given = await self._required().nack(place, nack.offset, nack.reason, nack.delay_ms / 1000)
            await self._out.say(request.request_id, nacked={"deliveries": given.deliveries, "letter": given.letter})
        elif kind == "revoked":
            self._revoked()
        elif kind == "seek":
            place = TopicPartition(request.seek.topic, request.seek.partition)
            offset = await self._deliveries.seek(place, values.position(request.seek.to, "seek.to"))
            await self._out.say(request.request_id, sought={"next_offset": offset})
        elif kind != "heartbeat":
            text = "join comes once" if kind == "join" else "the request is empty, or of a newer kmq.proto"
            raise RequestRefused("bad_request", text)

    async def _commit(self, commit: Any) -> None:
        rows = {(row.topic, row.partition): Commit(row.next_offset, row.metadata) for row in commit.offsets}
        if not rows and not commit.again:
            raise bad_field("commit.offsets", "must name a partition")
        if rows:
            await self._groups.commit(self._group, self._member, rows)
        if commit.again:
            await self._required().done([((row.topic, row.partition), row.offset) for row in commit.again])

    def _required(self) -> Reader:
        assert self._reader is not None, "a gateway has one for each member"
        return self._reader

    def _revoked(self) -> None:
        if not self._unanswered:
            return
        generation = self._unanswered.popleft()
        self._groups.revoked(self._group, self._member, generation)
        # The assignment of this generation may not be written yet; then the one that was told is older, and fenced.
        if not self._unanswered and self._told > generation:
            self._groups.sync(self._group, self._member, self._told)


def _parsed(data: bytes) -> Any:
    if len(data) > _MOST_REQUEST:
        raise RequestRefused("too_large", f"a request of Subscribe is at most {_MOST_REQUEST} bytes")
    return values.parse(_Request, data)
