"""Subscribe: a member of a consumer group, on one stream, and its fetches (kmq/gateway/groups/streaming.py).

Pull        Each fetch is answered by one batch of one partition, in order. Requests after a fetch do not wait for it.
Again       A redelivered message is a batch of its own, with `again`.
Order       A response is written whole before the next one. When the client leaves, waiting fetches are answered.
Silence     A stream that breaks does not end the member: a client that joins with its id within the session timeout
            continues with its partitions. Only requests are signs of life, not the connection. So a stopped program
            loses its partitions after its session timeout, and its stream ends. `leave` ends the member at once.
Memory      One request of at most _MOST_REQUEST bytes. One batch is read at a time, and released when it is written. A
            read reserves COPIES of what it may return, or of the longest message, before it begins. After that only
            what was found counts, until the client has taken it (core/answers.py).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kmq.config.values import KIB
from kmq.gateway.core.answers import COPIES
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.protocol import Client, Ended, Event, MemberOptions, Resume, Revoke
from kmq.gateway.groups.reader import Reader
from kmq.gateway.groups.redelivery import DueMessage, Redelivery
from kmq.gateway.groups.streaming import Fetches, PendingFetch, Rebalances, serve_until_one_ends
from kmq.gateway.grpc import values
from kmq.gateway.grpc.calls import GrpcCall
from kmq.gateway.grpc.schema import KMQ
from kmq.message.message import Message
from kmq.wire.attempts import attempt_of
from kmq.wire.refusals import by_code
from kmq.wire.requests import TopicPartition

# --- reading ---------------------------------------------------------------------------------------------------------

Shape = Callable[[list[Message]], tuple[Any, int]]  # messages → the response, and the bytes of their lines


async def read(core: Core, longest: int, call: GrpcCall, cursor: Cursor, limit: Limit, shape: Shape) -> tuple[int, Any]:
    """Read on from `cursor`, within the budget of all answers. `longest`: the bytes that one message may have.

    Returns how many messages there are, and what `shape` makes of them. They count until the caller releases the call.
    """
    budget, nbytes = core.fetching.answers, 0
    await budget.reserve(call, COPIES * max(longest, limit.nbytes))
    try:
        count, (made, nbytes) = await core.fetching.read([cursor], limit, shape)
    finally:
        if nbytes:
            budget.settle(call, COPIES * nbytes)
        else:
            budget.release(call)
    return count, made


# --- subscription ----------------------------------------------------------------------------------------------------

_MOST_WAIT_MS = 300_000
_MOST_REQUEST = 64 * KIB
_Request, _Response, _Batch = KMQ.request_of("Subscribe"), KMQ.messages["SubscribeResponse"], KMQ.messages["Batch"]
_TIMES = {"session_ms": "session_s", "rebalance_ms": "rebalance_s", "max_poll_ms": "max_poll_s"}


class Subscription:
    """One Subscribe. `longest`: of a message, bytes. `write`: returns when the client has room for the response."""

    _reader: Reader  # set once the member has joined
    _fetches: Fetches
    _rebalances: Rebalances

    def __init__(
        self,
        core: Core,
        groups: Groups,
        redelivery: Redelivery | None,
        longest: int,
        call: GrpcCall,
        write: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._groups, self._call, self._redelivery = groups, call, redelivery
        self._core, self._longest, self._write = core, longest, write
        self.turn = asyncio.Lock()
        self._has_ended = asyncio.Event()
        self._why_ended: RequestRefused | None = None

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
        served = self._fetches.serve(), self._listen(requests)
        try:
            await serve_until_one_ends(served, self._until_ended(), self._rebalances.forward_events())
        finally:
            self._groups.stop_listening(self._reader.group, self._reader.member, self._on_event)

    async def _until_ended(self) -> None:
        await self._has_ended.wait()
        assert self._why_ended is not None
        raise self._why_ended

    async def _join(self, request: Any) -> None:
        if request.WhichOneof("request") != "join":
            raise RequestRefused("bad_request", "the first request must be join")
        join = request.join
        if not join.topics:
            raise bad_field("join.topics", "must name a topic")
        times = {ours: getattr(join, name) / 1000 for name, ours in _TIMES.items() if getattr(join, name)}
        options = MemberOptions(tuple(sorted({*join.topics})), static_name=join.static_name or None)._replace(**times)
        if join.assignor:
            options = options._replace(assignors=(join.assignor,))
        if join.attempt:
            try:
                options = options._replace(attempt=attempt_of(join.attempt))
            except ValueError as err:
                raise bad_field("join.attempt", str(err)) from None
        resume = Resume(join.generation, values.places(join.owned) if join.generation else None)
        client = Client(join.client or join.member or "grpc", self._call.peer)
        self._reader = Reader(self._core.fetching, self._groups, self._redelivery, join.group, join.member)
        self._rebalances = Rebalances(self._groups, self._reader, self)
        self._fetches = Fetches(self._reader, self, "stream", refuses_revoked=False)
        self._reader.member = await self._groups.join(
            join.group, join.member or None, client, options, self._on_event, resume, is_anew=True
        )
        await self._say(request.request_id, joined={"member": self._reader.member})

    def _on_event(self, event: Event) -> None:
        if self._rebalances.has_left:
            return
        if isinstance(event, Ended):
            self.end(RequestRefused(event.code, f"{by_code(event.code).text}; join again"))
        else:
            self._rebalances.on_event(event)

    # --- what the client says ----------------------------------------------------------------------------------------

    async def _listen(self, requests: AsyncIterator[bytes]) -> None:
        """Serve requests until the client leaves or has sent its last."""
        group, member = self._reader.group, self._reader.member
        async for data in requests:
            request = _parsed(data)
            kind = request.WhichOneof("request")
            self._groups.beat(group, member, polled=kind == "fetch")
            if kind == "leave":
                self._rebalances.leave()
                break
            try:
                await self._serve(kind, request)
            except RequestRefused as err:
                await self._say(request.request_id, error=values.error(err))
        self._fetches.finish(at_once=self._rebalances.has_left)

    async def _serve(self, kind: str | None, request: Any) -> None:
        if kind == "fetch":
            limit = values.limit(request.fetch, _MOST_WAIT_MS)
            places, until = dict.fromkeys(values.places(request.fetch.partitions)), time.monotonic() + limit.wait_s
            self._fetches.put(PendingFetch(limit, places, until, request.request_id))
        elif kind == "commit":
            await self._commit(request.commit)
            await self._say(request.request_id, committed={})
        elif kind == "nack":
            nack = request.nack
            place = TopicPartition(nack.topic, nack.partition)
            given = await self._reader.nack(place, nack.offset, nack.reason, nack.delay_ms / 1000)
            await self._say(request.request_id, nacked={"deliveries": given.deliveries, "letter": given.letter})
        elif kind == "revoked":
            self._rebalances.revoked()
        elif kind == "seek":
            place = TopicPartition(request.seek.topic, request.seek.partition)
            offset = await self._reader.seek(place, values.position(request.seek.to, "seek.to"))
            await self._say(request.request_id, sought={"next_offset": offset})
        elif kind != "heartbeat":
            text = "join comes once" if kind == "join" else "the request is empty, or of a newer kmq.proto"
            raise RequestRefused("bad_request", text)

    async def _commit(self, commit: Any) -> None:
        rows = {(row.topic, row.partition): OffsetCommit(row.next_offset, row.metadata) for row in commit.offsets}
        if not rows and not commit.again:
            raise bad_field("commit.offsets", "must name a partition")
        if rows:
            await self._groups.commit(self._reader.group, self._reader.member, rows)
        if commit.again:
            await self._reader.done([((row.topic, row.partition), row.offset) for row in commit.again])

    # --- what is said to it ------------------------------------------------------------------------------------------

    async def _say(self, request_id: int = 0, **response: Any) -> None:
        """Write a response, after the one that is being written."""
        async with self.turn:
            await self._write(_Response(request_id=request_id, **response))

    async def send_revoke(self, revoke: Revoke) -> None:
        gone = {"generation": revoke.generation, "partitions": values.partitions(revoke.partitions)}
        await self._say(revoke=gone)

    async def send_assigned(self, generation: int) -> None:
        rows = [
            {"topic": topic, "partition": number, "next_offset": offset}
            for (topic, number), offset in self._reader.offsets()
        ]
        await self._say(assigned={"generation": generation, "partitions": rows})

    def note_waiting(self, fetches: int) -> None: ...

    async def send_nothing(self, fetch: PendingFetch) -> None:
        await self._say(fetch.request_id, batch=_Batch())

    async def refuse(self, fetch: PendingFetch, refused: RequestRefused) -> None:
        await self._say(fetch.request_id, error=values.error(refused))

    async def write_again(self, fetch: PendingFetch, cursor: Cursor, again: DueMessage) -> None:
        batch = _Batch(topic=cursor.place.topic, partition=cursor.place.partition, again=True)
        batch.next_offset, batch.end_offset = cursor.offset, max(cursor.end, cursor.offset)
        values.fill(batch.records, [again.message])
        batch.records[0].deliveries = again.deliveries
        await self._write(_Response(request_id=fetch.request_id, batch=batch))

    async def send_batch(self, fetch: PendingFetch, cursor: Cursor) -> bool:
        if not cursor.has_news():
            return False

        def shape(found: list[Message]) -> tuple[Any, int]:
            batch = _Batch(topic=cursor.place.topic, partition=cursor.place.partition)
            batch.next_offset, batch.end_offset = cursor.offset, cursor.end
            batch.overtaken = len(cursor.overtaken)
            return batch, values.fill(batch.records, found)

        first = cursor.offset
        count, batch = await read(self._core, self._longest, self._call, cursor, fetch.limit, shape)
        try:
            self._reader.report_overtaken([cursor])
            if not count:
                return False
            async with self.turn:
                if not self._reader.pass_turn(cursor):
                    return False
                self._reader.delivered({cursor: first})
                cursor.overtaken = range(0)
                await self._write(_Response(request_id=fetch.request_id, batch=batch))
            return True
        finally:
            self._core.fetching.answers.release(self._call)


def _parsed(data: bytes) -> Any:
    if len(data) > _MOST_REQUEST:
        raise RequestRefused("too_large", f"a request of Subscribe is at most {_MOST_REQUEST} bytes")
    return values.parse(_Request, data)
