"""Service podbus.v1.PodBus: a durable bus between the containers of a pod (podbus.proto says what each call returns).

Produce     Goes through ingress' acknowledged protocol, window=podbus: one connection with many messages in flight.
            The response comes after the fsync. For a message_id that was stored before, it names the old offset.
Consume     Reads the queue files, never ahead of the router. An offset is a WAL seq. A call waits for records that
            are durable but not routed yet. So NOT_FOUND always means that no such record was stored.
Memory      At most: the producer's window, and _WAITING_BYTES in front of it; _STREAMS streams, each with
            _STREAM_IN_FLIGHT futures or one chunk of records; _FEEDS read-ahead chunks. The chunks let a consumer
            that asks for one record after another cost one file read per chunk.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from kmq.client.producer_aio import AsyncProducer
from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.gateway.core.answers import ANSWER_BYTES, COPIES, Budget
from kmq.gateway.core.broker import RequestRefused, refusal_of
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.feed import Feed, Record, Watermark
from kmq.gateway.core.ingress import own_address
from kmq.gateway.grpc.calls import GrpcCall, Streams, longest_message
from kmq.gateway.grpc.schema import PODBUS
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError
from kmq.logfmt import Logger

SCOPE = "podbus"  # in which message ids are unique
_ANSWER_S = 5.0  # longest wait for ingress' reply, and for the router; the client may have a shorter deadline
_WAITING_BYTES = 32 << 20  # of records that wait for room in the producer's window, which holds as many bytes again
_STREAM_IN_FLIGHT = 1024  # requests of one ProduceStream without a response
_FEEDS = 64  # read-ahead chunks kept for the next call of a consumer
_KEPT_BYTES = 16 << 20  # of all these chunks together
ConsumeResponse, ProduceResponse = PODBUS.messages["ConsumeResponse"], PODBUS.messages["ProduceResponse"]
_REPLACE_S = 1.0  # shortest time before a producer that ingress refused for good is replaced


class PodBus:
    """The four methods. They raise RequestRefused, which Service turns into a gRPC status."""

    def __init__(
        self,
        settings: Settings,
        watermark: Watermark,
        log: Logger,
        streams: Streams,
        answers: Budget | None = None,
        cold: ColdReads | None = None,
        removed: Callable[[DamageError], bool] = lambda err: False,
    ) -> None:
        """`removed`: see Partitions.removed_from_cache."""
        self._removed, self._cold = removed, cold or ColdReads(settings.data, lambda directory: None)
        self.settings, self.watermark, self.log = settings, watermark, log
        self._longest = longest_message(settings)
        self._answers = answers or Budget(ANSWER_BYTES)
        self._streams = streams
        self._waiting_bytes = 0  # of records that wait for room in the producer's window
        self._submitting: set[asyncio.Task[None]] = set()  # one task for each ProduceStream
        self._feeds: OrderedDict[int, Feed] = OrderedDict()  # by the offset where each continues; the oldest first
        self._producer = self._new_producer()
        self._made = time.monotonic()

    def _new_producer(self) -> AsyncProducer:
        return AsyncProducer.local(
            own_address,
            window=SCOPE,
            retry=frozenset(),  # the client hears of a refusal at once, because only the client knows how long to retry
            delivery_timeout_s=_ANSWER_S,
            timeout_s=_ANSWER_S,
            on_stall=lambda text: self.log.warn("produce_stalled", waiting=text),
        )

    def stop(self) -> None:
        """End the streams; requests that were accepted still get their responses."""
        self.watermark.stop()
        for task in self._submitting:
            task.cancel()

    async def close(self) -> None:
        with contextlib.suppress(KmqError):
            await self._producer.close(_ANSWER_S)

    # --- produce -----------------------------------------------------------------------------------------------------

    async def produce(self, request: Any, call: GrpcCall | None) -> Any:
        return ProduceResponse(offset=await self._stored(await self._submit(request)))

    async def produce_stream(self, requests: AsyncIterator[Any], call: GrpcCall | None) -> AsyncGenerator[Any, None]:
        replies: asyncio.Queue[asyncio.Future[int] | RequestRefused | None] = asyncio.Queue()
        room = asyncio.Semaphore(_STREAM_IN_FLIGHT)

        async def submit_all() -> None:
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

        with self._stream(call or GrpcCall()):
            submitting = asyncio.create_task(submit_all())
            self._submitting.add(submitting)
            try:
                while reply := await replies.get():
                    if isinstance(reply, RequestRefused):
                        raise reply
                    yield ProduceResponse(offset=await self._stored(reply))
                    room.release()
            finally:
                self._submitting.discard(submitting)
                submitting.cancel()
                while not replies.empty():
                    _forget(replies.get_nowait())

    async def _submit(self, request: Any) -> "asyncio.Future[int]":
        if not request.message_id:
            raise RequestRefused("empty_id", "message_id must not be empty: a retry is recognised by it")
        if self._producer.failed and time.monotonic() - self._made > _REPLACE_S:
            self._producer, self._made = self._new_producer(), time.monotonic()
        if self._waiting_bytes > _WAITING_BYTES:
            raise RequestRefused("busy")
        size = len(request.record)
        self._waiting_bytes += size
        try:
            return await self._producer.submit(self.settings.podbus_topic, request.record, id=request.message_id)
        except KmqError as err:
            raise refusal_of(err) from err
        finally:
            self._waiting_bytes -= size

    async def _stored(self, reply: "asyncio.Future[int]") -> int:
        """Return the offset of a record once it is durable."""
        try:
            seq = await reply
        except KmqError as err:
            raise refusal_of(err) from err
        self.watermark.expect(seq)
        return seq

    # --- consume -----------------------------------------------------------------------------------------------------

    async def consume(self, request: Any, call: GrpcCall | None) -> Any:
        offset, call = request.offset, call or GrpcCall()
        feed = self._feeds.pop(offset, None) or self._feed(offset)
        record = await self._next(feed, call)
        self._cache_feed(record.seq + 1 if record else offset, feed)
        if record is None:
            raise RequestRefused(
                "not_found", f"nothing at offset {offset} or later; the last seq is {self.watermark.durable}"
            )
        return ConsumeResponse(record=record.payload, next_offset=record.seq + 1)

    def _cache_feed(self, offset: int, feed: Feed) -> None:
        """Keep the read-ahead records for the consumer's next call, within _FEEDS and _KEPT_BYTES."""
        self._feeds[offset] = feed
        while len(self._feeds) > _FEEDS or sum(each.weight for each in self._feeds.values()) > _KEPT_BYTES:
            self._feeds.popitem(last=False)

    async def consume_stream(self, request: Any, call: GrpcCall | None) -> AsyncGenerator[Any, None]:
        feed, call = self._feed(request.offset), call or GrpcCall()
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

    async def _next(self, feed: Feed, call: GrpcCall) -> Record | None:
        """Return the next record, waiting until all durable records are routed; None if no such record is stored.

        Reserves memory for the longest record and its copies before reading; afterwards only what the records need.
        """
        if not feed.ready:
            durable = self.watermark.durable
            if feed.has_more():
                await self._answers.reserve(call, COPIES * self._longest)
            if await self._fill(feed) < durable and not feed.ready:
                await self._pass(durable)
                await self._fill(feed)
            longest = max((len(record.payload) for record in feed.ready), default=0)
            self._answers.settle(call, feed.weight + (COPIES - 1) * longest)
        return feed.ready.popleft() if feed.ready else None

    async def _fill(self, feed: Feed) -> int:
        """Let the feed read the files, and return the seq up to which the router had written them."""
        routed = self.watermark.routed
        while feed.has_more():
            try:
                await asyncio.to_thread(feed.fill, routed)
                break
            except DamageError as err:
                if await asyncio.to_thread(self._removed, err):
                    continue
                raise RequestRefused("damaged", f"{err}; found while reading from seq {feed.next_seq}") from err
            except NotHereError as err:
                await self._cold.wait(err)
        return routed

    async def _pass(self, seq: int) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self.watermark.passed(seq)
        except TimeoutError:
            at = self.watermark.routed
            raise RequestRefused(
                "not_routed", f"seq {seq} is on disk, but the router is at seq {at}: the router is down, or behind"
            ) from None

    @contextlib.contextmanager
    def _stream(self, call: GrpcCall) -> Iterator[None]:
        try:
            with self._streams.enter(call):
                yield
        finally:
            call.close()


def _forget(reply: "asyncio.Future[int] | RequestRefused | None") -> None:
    """Retrieve the outcome of a reply that is no longer needed, so that asyncio reports no unhandled error."""
    if isinstance(reply, asyncio.Future):
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())
