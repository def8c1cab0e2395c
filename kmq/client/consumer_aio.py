"""`kmq.AsyncConsumer`: records from asyncio, with the names of kmq.Consumer.

    async with kmq.AsyncConsumer("orders", group_id="billing") as consumer:
        async for message in consumer:
            await handle(message.key, message.value)
            await consumer.commit()

Promise     As for kmq.Consumer.
Loop        Use a consumer only in the event loop that entered it, and one task at a time. Callbacks run in that task; a
            callback may be a coroutine function.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from inspect import isawaitable
from types import TracebackType
from typing import Unpack

from kmq.client.connection import (
    CONNECT_S,
    Address,
    ServerAddress,
    address_of,
    keep_alive,
    local_consumer_address,
)
from kmq.client.consumer_calls import LEAVE_S, SLICE_S, ConsumerCalls, Mover, Result
from kmq.client.consumer_options import PORT, ConsumerChoices, ConsumerOptions
from kmq.client.consumer_protocol import ConsumerCore
from kmq.client.handling import DEFAULT_BACKOFF, OWN_TOPIC, Backoff, Rules
from kmq.client.options import choose, document
from kmq.client.producer import Producer
from kmq.client.runner import Stop, local_producer, makes_producers, run_handler
from kmq.message.message import Message
from kmq.sending.failures import NotAnswered, Refused
from kmq.sending.window import backoff
from kmq.wire.requests import TopicPartition

OnPlaces = Callable[[list[TopicPartition]], Awaitable[object] | object]


class AsyncConsumer(ConsumerCalls):
    """Reads topics. `options` are the fields of ConsumerOptions (kmq/client/consumer_options.py)."""

    def __init__(
        self,
        *topics: str,
        host: str = "127.0.0.1",
        port: int | Callable[[], int] = PORT,
        on_assign: OnPlaces | None = None,
        on_revoke: OnPlaces | None = None,
        on_lost: OnPlaces | None = None,
        **options: Unpack[ConsumerChoices],
    ) -> None:
        """The arguments are those of kmq.Consumer."""
        link = ConsumerLink(ConsumerCore(choose(AsyncConsumer, ConsumerOptions, options)), address_of(host, port))
        super().__init__(link, on_assign, on_revoke, on_lost)
        self._make_producer = makes_producers(host, port, self.options)
        if topics:
            self.subscribe(*topics)

    @classmethod
    def local(
        cls,
        *topics: str,
        on_assign: OnPlaces | None = None,
        on_revoke: OnPlaces | None = None,
        on_lost: OnPlaces | None = None,
        **options: Unpack[ConsumerChoices],
    ) -> "AsyncConsumer":
        """Return a consumer of the broker of this directory's settings (environment, kmq.toml)."""
        consumer = cls(*topics, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost, **options)
        consumer._driver.address = local_consumer_address
        consumer._make_producer = local_producer
        return consumer

    # --- records -----------------------------------------------------------------------------------------------------

    poll = ConsumerCalls._poll

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages one by one until the consumer is closed. Waits for the next message without a limit."""
        while (chunk := await self._next_chunk()) is not None:
            looked_at = time.monotonic()
            for message in chunk.unread:
                if not chunk.deliveries:
                    if message.offset >= chunk.owned.handed_out:
                        self._hand_out(chunk.owned, message.offset + 1)
                    chunk.owned.position = message.offset + 1
                self._given = message
                yield message
                if (now := time.monotonic()) - looked_at >= 1.0:
                    looked_at = now
                    await self._came_back()
            self._core.holdings.finish(chunk)

    async def run(
        self,
        handler: Callable[[Message], object],
        *,
        max_retries: int = 3,
        backoff: Backoff = DEFAULT_BACKOFF,
        dlq: str | None = OWN_TOPIC,
        permanent: tuple[type[Exception], ...] = (),
        producer: Callable[[str], Producer] | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Pass each message to `handler`, which may be a coroutine function. All else is as for kmq.Consumer.run.

        Ends when the consumer is closed or its task is cancelled. Then the message in the handler is delivered again.
        """
        rules = Rules(max_retries, backoff, dlq, permanent)
        await run_handler(self, handler, rules, producer or self._make_producer, stop)

    # --- calls that wait ---------------------------------------------------------------------------------------------
    # Each waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered.

    connect = ConsumerCalls._connect
    position = ConsumerCalls._position
    commit = ConsumerCalls._commit
    nack = ConsumerCalls._nack

    async def committed(self, place: tuple[str, int], timeout: float | None = None) -> int | None:
        """Return the next offset that the group has committed for a partition; None: nothing is committed."""
        return (await self._ask([place], timeout))[0].committed

    async def beginning_offsets(
        self, places: Iterable[tuple[str, int]], timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset of the first record that is stored of each partition."""
        return {row.place: row.start for row in await self._ask(places, timeout)}

    async def end_offsets(
        self, places: Iterable[tuple[str, int]], timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        return {row.place: row.end for row in await self._ask(places, timeout)}

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commit if auto_commit is on, give up the partitions, leave the group, close the connection."""
        self._given = None
        await self._close()

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if kind is None:
            self._given = None  # the block has handled all that it was given
        await self._close()


document(AsyncConsumer, ConsumerOptions)


# --- the connection, and the tasks that keep it and the member alive -------------------------------------------------


class ConsumerLink(Mover, asyncio.Protocol):
    """Moves bytes between a core and its connection, in an event loop."""

    def __init__(self, core: ConsumerCore, address: Address) -> None:
        super().__init__(core, address, contextlib.nullcontext())
        self._changed = asyncio.Event()  # set, and replaced, whenever data has arrived
        self._gone = asyncio.Event()  # there is no connection
        self._used = asyncio.Event()  # the application has called again
        self._transport: asyncio.Transport | None = None
        self._attempts = 0
        self._tasks: list[asyncio.Task[None]] = []

    # --- the application's tasks -------------------------------------------------------------------------------------

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        self._start()
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self.use(now)
            if is_ready() or (self.closed and fetches):
                return True
            if self.core.failed is not None:
                raise self.core.failed
            left_s = deadline - now
            if fetches:
                self.core.fetch(now, max(left_s, 0.001))  # not 0: the application has no records left
            self.write()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, SLICE_S)):
                    await self._changed.wait()

    async def finish(self, returned: object) -> None:
        if isawaitable(returned):
            await returned

    async def aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.to_thread(work)

    def use(self, now: float) -> None:
        self.used_at = now
        if self._is_resting:
            self._is_resting = False
            self._used.set()

    def write(self) -> None:
        if self._transport is not None and (data := self.core.requests.take()):
            self._transport.write(data)

    def drop(self, reason: str, is_written: bool = False) -> None:
        self.core.lost(reason)
        if self._transport is not None:
            if is_written:
                self._transport.close()
            else:
                self._transport.abort()
            self._transport = None
        self._gone.set()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def end(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._transport is not None and self.core.is_managed:
            self.core.leave(time.monotonic())
            self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._gone.wait()
        self.core.fail(NotAnswered("this consumer is closed"))
        self.drop("this consumer is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # given up already
        try:
            self.core.receive(data)
            self._attempts = 0
        except Refused as refused:
            self.drop(str(refused))
            return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self.drop(str(error or "the broker closed the connection"))

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._tasks and not self.closed:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._keep_connected(), name="kmq-consumer"),
                loop.create_task(self._watch(), name="kmq-consumer-beat"),
            ]

    async def _keep_connected(self) -> None:
        while not self.closed and self.core.failed is None:
            if self._is_resting:
                self._used.clear()
                await self._used.wait()
            if await self._attempt(CONNECT_S):
                await self._gone.wait()
            self._wake()
            await asyncio.sleep(backoff(self._attempts))
            self._attempts += 1

    async def _open(self, server: ServerAddress, timeout_s: float) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or server.host) if options.tls is not None else None
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: self, server.host, server.port, ssl=options.tls, server_hostname=name
            )
            self._gone.clear()
            transport.write(self.core.opening(server.token))
            self.core.connected()
            self._transport = transport

    async def _watch(self) -> None:
        """Beat, and notice a broker that does not answer or an application that does not call again."""
        while not self.closed:
            await asyncio.sleep(min(1.0, self.core.options.session_s / 6))
            now = time.monotonic()
            if self._transport is None:
                continue
            self.keep_alive(now)
            if not self._rest_if_idle(now) and self.discovers and now >= self._discover_at:
                await self._look_for_partitions()


__all__ = ["AsyncConsumer"]
