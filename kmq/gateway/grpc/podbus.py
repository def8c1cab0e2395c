"""Service podbus.v1.PodBus: a durable bus between the containers of a pod (podbus.proto says what each call answers).

Produce     through ingress' acknowledged protocol, window=podbus: one connection with many in flight. Answered after the fsync;
            what was stored before under the same message_id is answered with that offset.
Consume     from the queue files, never ahead of the router. An offset is a WAL seq. What is durable but not routed yet is waited
            for: NOT_FOUND is said only of what nobody has stored.
Memory      Bounded: the producer's window, and _WAITING_BYTES before it; _STREAMS streams, each with _STREAM_IN_FLIGHT futures or
            one chunk of records; _FEEDS read-ahead chunks, so that a consumer that asks for one record after another costs a
            read per chunk.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from kmq.broker.incidents import Strangers
from kmq.client.aio import AsyncProducer
from kmq.client.failures import NotAnswered, Refused
from kmq.errors import KmqError
from kmq.gateway.core.feed import Feed, Record, Watermark
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.grpc.calls import PATIENCE_S, Budget, Call, longest_message, longest_waiting
from kmq.gateway.grpc.schema import ConsumeResponse, ProduceResponse
from kmq.log.damage import DamageError
from kmq.logfmt import Log
from kmq.settings import Settings

SCOPE = "podbus"  # of the message ids
_ANSWER_S = 5.0  # longest wait for ingress' reply, and for the router; a shorter deadline of the client wins
_STREAMS = 256  # at a time
_WAITING_BYTES = 32 << 20  # of records that wait for room in the producer, which holds as many bytes without a reply
_STREAM_IN_FLIGHT = 1024  # requests of one ProduceStream without a response
_FEEDS = 64  # read-ahead chunks kept for consumers that come back
_KEPT_BYTES = 16 << 20  # of them together
_READING_BYTES = 64 << 20  # of records that have been read from files and not been taken by clients
_COPIES = 4  # of a record on its way out: line, payload, message, and its bytes in gRPC
_MEANING = {"too_long": "with its id, and as base64 unless it is printable text, the record is over KMQ_MAX_LINE bytes"}
_REPLACE_S = 1.0  # a producer that ingress has turned away for good is made anew at most so often


class PodBus:
    """The four methods. They raise RequestRefused, which Service makes a gRPC status."""

    def __init__(self, settings: Settings, watermark: Watermark, log: Log, strangers: Strangers | None = None) -> None:
        self.settings, self.watermark, self.log = settings, watermark, log
        self._longest = longest_message(settings)
        self._reading = Budget(max(_READING_BYTES, _COPIES * self._longest), PATIENCE_S, strangers)
        self._streams: set[Call] = set()
        self._waiting_bytes = 0  # of records for which the producer has no room yet
        self._taking: set[asyncio.Task[None]] = set()  # one for each ProduceStream
        self._feeds: OrderedDict[int, Feed] = OrderedDict()  # by the offset that its next reader will ask for
        self._producer = self._new_producer()
        self._made = time.monotonic()

    def _new_producer(self) -> AsyncProducer:
        return AsyncProducer.local(
            window=SCOPE,
            retry=frozenset(),  # whoever is refused is told at once and may come again: its deadline is not ours
            delivery_timeout_s=_ANSWER_S,
            timeout_s=_ANSWER_S,
            on_stall=lambda text: self.log.warn("produce_stalled", waiting=text),
        )

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self._streams)

    def stop(self) -> None:
        """Streams end; what has been taken is still answered."""
        self.watermark.stop()
        for task in self._taking:
            task.cancel()

    async def close(self) -> None:
        with contextlib.suppress(KmqError):
            await self._producer.close(_ANSWER_S)

    # --- produce -----------------------------------------------------------------------------------------------------

    async def produce(self, request: Any, call: Call | None) -> Any:
        return ProduceResponse(offset=await self._stored(await self._submit(request)))

    async def produce_stream(self, requests: AsyncIterator[Any], call: Call | None) -> AsyncGenerator[Any, None]:
        replies: asyncio.Queue[asyncio.Future[int] | RequestRefused | None] = asyncio.Queue()
        room = asyncio.Semaphore(_STREAM_IN_FLIGHT)

        async def take() -> None:
            end: RequestRefused | None = None
            try:
                async for request in requests:
                    await room.acquire()
                    replies.put_nowait(await self._submit(request))
            except RequestRefused as refused:
                end = refused
            except asyncio.CancelledError:
                end = RequestRefused("stopping", "the gateway is stopping; send again what has no response")
            finally:
                replies.put_nowait(end)

        with self._stream(call or Call()):
            taking = asyncio.create_task(take())
            self._taking.add(taking)
            try:
                while reply := await replies.get():
                    if isinstance(reply, RequestRefused):
                        raise reply
                    yield ProduceResponse(offset=await self._stored(reply))
                    room.release()
            finally:
                self._taking.discard(taking)
                taking.cancel()
                while not replies.empty():
                    _forget(replies.get_nowait())

    async def _submit(self, request: Any) -> "asyncio.Future[int]":
        if not request.message_id:
            raise RequestRefused("empty_id", "message_id must not be empty: a retry is known by it")
        if self._producer.failed and time.monotonic() - self._made > _REPLACE_S:
            self._producer, self._made = self._new_producer(), time.monotonic()
        if self._waiting_bytes > _WAITING_BYTES:
            raise RequestRefused("busy", "too much waits for the broker already")
        size = len(request.record)
        self._waiting_bytes += size
        try:
            return await self._producer.submit(self.settings.podbus_topic, request.record, id=request.message_id)
        except KmqError as err:
            raise _refusal_of(err) from err
        finally:
            self._waiting_bytes -= size

    async def _stored(self, reply: "asyncio.Future[int]") -> int:
        """The offset, once it is durable."""
        try:
            seq = await reply
        except KmqError as err:
            raise _refusal_of(err) from err
        self.watermark.expect(seq)
        return seq

    # --- consume -----------------------------------------------------------------------------------------------------

    async def consume(self, request: Any, call: Call | None) -> Any:
        offset, call = request.offset, call or Call()
        feed = self._feeds.pop(offset, None) or self._feed(offset)
        record = await self._next(feed, call)
        self._keep(record.seq + 1 if record else offset, feed)
        if record is None:
            raise RequestRefused(
                "not_found", f"nothing at offset {offset} or later; the last seq is {self.watermark.durable}"
            )
        return ConsumeResponse(record=record.payload, next_offset=record.seq + 1)

    def _keep(self, offset: int, feed: Feed) -> None:
        """For a consumer that comes back: what it has read ahead, as long as all of them together are small."""
        self._feeds[offset] = feed
        while len(self._feeds) > _FEEDS or sum(kept.weight for kept in self._feeds.values()) > _KEPT_BYTES:
            self._feeds.popitem(last=False)

    async def consume_stream(self, request: Any, call: Call | None) -> AsyncGenerator[Any, None]:
        feed, call = self._feed(request.offset), call or Call()
        with self._stream(call):
            while True:
                routed = self.watermark.routed
                record = await self._next(feed, call)
                if record is not None:
                    yield ConsumeResponse(record=record.payload, next_offset=record.seq + 1)
                elif request.follow:
                    await self.watermark.passed(routed + 1)
                else:
                    return

    def _feed(self, offset: int) -> Feed:
        return Feed(self.settings.data, self.settings.podbus_topic, offset)

    async def _next(self, feed: Feed, call: Call) -> Record | None:
        """The next record, waiting for what is durable already; None where nobody has stored one.

        Reading takes as much as the longest record does, with its copies on the way out; then what it has come to.
        """
        if not feed.ready:
            durable = self.watermark.durable
            if feed.has_more():
                await self._reading.take(call, _COPIES * self._longest)
            if await self._fill(feed) < durable and not feed.ready:
                await self._pass(durable)
                await self._fill(feed)
            longest = max((len(record.payload) for record in feed.ready), default=0)
            self._reading.settle(call, feed.weight + (_COPIES - 1) * longest)
        return feed.ready.popleft() if feed.ready else None

    async def _fill(self, feed: Feed) -> int:
        """Let the feed read what the router has written; how far that was."""
        routed = self.watermark.routed
        if feed.has_more():
            try:
                await asyncio.to_thread(feed.fill, routed)
            except DamageError as err:
                raise RequestRefused("damaged", f"{err}; reading on from seq {feed.next_seq}") from err
        return routed

    async def _pass(self, seq: int) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self.watermark.passed(seq)
        except TimeoutError:
            at = self.watermark.routed
            raise RequestRefused(
                "not_routed", f"seq {seq} is on disk, the router is at {at}: it is down, or behind"
            ) from None

    # --- streams -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stream(self, call: Call) -> Iterator[None]:
        if self.streams >= _STREAMS:
            slow = longest_waiting(self._streams, PATIENCE_S)
            if slow is None:
                raise RequestRefused("too_many", f"{_STREAMS} streams are open already")
            self._streams.discard(slow)
            slow.end("others wanted to open a stream, and its client did not go on")
        self._streams.add(call)
        try:
            yield
        finally:
            self._streams.discard(call)
            call.close()


def _forget(reply: "asyncio.Future[int] | RequestRefused | None") -> None:
    """Nobody waits for it any more, whatever comes."""
    if isinstance(reply, asyncio.Future):
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())


def _refusal_of(err: KmqError) -> RequestRefused:
    """What became of a message that the producer has given up."""
    if isinstance(err, Refused):
        return RequestRefused(err.code, err.reason.partition(" ")[2] or _MEANING.get(err.code, ""))
    return RequestRefused("not_answered" if isinstance(err, NotAnswered) else "stopping", str(err))
