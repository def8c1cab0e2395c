"""`kmq.AsyncProducer`: acknowledged messages from asyncio.

    async with kmq.AsyncProducer(port=5673) as producer:
        seq = await producer.send("orders", b"one", key="42")            # on disk, as this seq
        replies = [await producer.submit("orders", b"two") for _ in range(64)]
        seqs = await asyncio.gather(*replies)

Promise     As kmq.Producer: nothing waits for ever without saying so. Messages keep the order of the calls.
            A cancelled `send` may be stored all the same.
Loop        All in the loop that entered it. What is queued in one turn of the loop leaves with one write.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Unpack

from kmq.client.lines import no_connection
from kmq.client.producer import CONNECT_S, Address, _log, backoff, keep_alive, local_address
from kmq.client.protocol import Choices, Core, Delivery, NotAnswered, Options, Refused
from kmq.errors import KmqError


class AsyncProducer(asyncio.Protocol):
    """See the module, and Options for what can be told."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        self._address: Address = lambda: (host, port() if callable(port) else port, "")
        self.options = Options(**options)
        self._core = Core(self.options)
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[bytes] | None = None  # while the reply to hello is awaited
        self._said_so_far = b""  # of that reply
        self._order = asyncio.Lock()  # who waits for room is served in order
        self._changed = asyncio.Event()  # set, and replaced, whenever there may be room or an end
        self._over = asyncio.Event()  # the connection is gone
        self._scheduled = False
        self._said = time.monotonic()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def local(cls, **options: Unpack[Choices]) -> "AsyncProducer":
        """Of the broker that this directory's settings (environment, kmq.toml) speak of."""
        producer = cls(**options)
        producer._address = local_address
        return producer

    @property
    def name(self) -> str:
        """As which the broker knows us, "" without producer ids."""
        return self._core.name

    @property
    def unanswered(self) -> int:
        """Messages without outcome."""
        return self._core.unanswered

    @property
    def connected(self) -> bool:
        return self._core.connected

    @property
    def failed(self) -> KmqError | None:
        """Why this producer has ended; None while it goes on."""
        return self._core.failed

    def describe(self) -> str:
        """What is being waited for, in words."""
        return self._core.describe(time.monotonic())

    @property
    def connections(self) -> int:
        """Made so far."""
        return self._core.connections

    @property
    def duplicates(self) -> int:
        """Messages sent again that the broker had stored already."""
        return self._core.duplicates

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        id: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send one message; its seq, once it is on disk."""
        reply = await self.submit(
            topic, payload, key, partition=partition, id=id, headers=headers, ts=ts, timeout=timeout
        )
        return await self._within(reply, timeout, "the reply to this message")

    async def submit(
        self,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        id: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> "asyncio.Future[int]":
        """Queue one message, waiting only while the window is full; the future is its seq."""
        await self._room(timeout)
        delivery, reply = self._delivery()
        self._core.add(delivery, topic, payload, key, id, headers, ts, partition)
        self._queued()
        return reply

    async def send_many(
        self,
        topic: str,
        payloads: Sequence[bytes | None],
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Send a list in one go, for a fraction of the cost of as many sends; their seqs."""
        if len(payloads) > self.options.max_in_flight:
            raise ValueError(f"a list of {len(payloads):,} is over max_in_flight={self.options.max_in_flight:,}")
        if not payloads:
            return []
        await self._room(timeout)
        delivery, reply = self._delivery()
        self._core.add_many(delivery, topic, payloads, key, ts, partition)
        self._queued()
        await self._within(reply, timeout, "the replies to this list")
        return delivery.seqs

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message has its reply."""
        async with self._timeout(timeout, "the replies to all messages"):
            while self._core.unanswered and self._core.failed is None and not self._closed:
                self._core.hurry = True
                self._flush()
                await self._changed.wait()
        if self._core.failed is not None:
            raise self._core.failed

    async def close(self, timeout: float | None = None) -> None:
        """flush, then end. After a timeout, too: what has no reply then is lost to this program, though it may be stored."""
        try:
            if not self._closed:
                await self.flush(timeout)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """End now; what is unanswered fails."""
        self._closed = True
        if self._core.failed is None:
            self._core.fail(NotAnswered("the producer was closed before the reply came"))
        self._tell()
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def __aenter__(self) -> "AsyncProducer":
        self._start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        await (self.close() if kind is None else self.abort())

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kmq-producer")

    async def _room(self, timeout: float | None) -> None:
        if self._core.failed is not None:
            raise self._core.failed
        if self._closed:
            raise KmqError("this producer is closed")
        if not self._core.is_full and not self._order.locked():
            return
        async with self._timeout(timeout, "room among the messages in flight"), self._order:
            if not self._core.is_full:
                return
            while not self._core.has_room_again:
                self._core.hurry = True
                self._flush()
                await self._changed.wait()
        if self._core.failed is not None:
            raise self._core.failed

    async def _within(self, reply: "asyncio.Future[int]", timeout: float | None, what: str) -> int:
        async with self._timeout(timeout, what):
            return await reply

    def _timeout(self, timeout: float | None, what: str) -> "_Timeout":
        return _Timeout(self.options.timeout_s if timeout is None else timeout, what, self.describe)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _delivery(self) -> "tuple[Delivery, asyncio.Future[int]]":
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(delivery: Delivery) -> None:
            if reply.done():
                return  # whoever waited for it has been cancelled
            if delivery.error is None:
                reply.set_result(delivery.seq)
            else:
                reply.set_exception(delivery.error)

        return Delivery(done), reply

    def _queued(self) -> None:
        self._start()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write what may go."""
        self._scheduled = False
        core, transport = self._core, self._transport
        if transport is None or not core.connected:
            return
        now = time.monotonic()
        while taken := core.take(now):
            transport.write(taken)
        linger = core.linger_left(now)
        if linger is not None:
            self._scheduled = True
            asyncio.get_running_loop().call_later(linger, self._flush)

    def _tell(self) -> None:
        done = self._core.done
        while done:
            delivery = done.popleft()
            assert delivery.callback is not None
            delivery.callback(delivery)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- the connection: asyncio.Protocol ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            self._said_so_far += data
            if not self._greeting.done() and self._core.is_greeting(self._said_so_far):
                self._greeting.set_result(self._said_so_far)
            return
        if not self._core.connected:
            return  # given up on
        try:
            self._core.receive(data)
            self._attempt = 0
        except Refused as refused:
            self._lose(str(refused))
        self._tell()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error or ConnectionResetError("closed without a word"))
        elif self._core.connected:
            self._lose(str(error or "the broker closed the connection"))

    def _lose(self, reason: str) -> None:
        self._core.lost(reason)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._over.set()

    # --- the task that keeps it ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Make connections, and look now and then for what is overdue."""
        self._attempt = 0
        pause = 1.0
        if self.options.delivery_timeout_s is not None:
            pause = min(pause, self.options.delivery_timeout_s / 4)
        looking = asyncio.get_running_loop().create_task(self._look(pause))
        try:
            while not self._closed and self._core.failed is None:
                if await self._connect():
                    self._flush()
                    await self._over.wait()
                self._tell()
                if self._core.failed is None:
                    await asyncio.sleep(backoff(self._attempt))
                    self._attempt += 1
        finally:
            looking.cancel()
            self._tell()

    async def _connect(self) -> bool:
        loop, options = asyncio.get_running_loop(), self.options
        self._over.clear()
        self._greeting, self._said_so_far = loop.create_future(), b""
        where = "the broker"
        try:
            host, port, token = self._address()
            where = f"{host}:{port}"
            async with asyncio.timeout(CONNECT_S):
                name = (options.server_hostname or host) if options.tls is not None else None
                transport, _ = await loop.create_connection(
                    lambda: self, host, port, ssl=options.tls, server_hostname=name
                )
                self._transport = transport
                keep_alive(transport.get_extra_info("socket"))
                transport.write(self._core.hello(token))
                greeting = await self._greeting
            self._core.greeted(greeting)
            return True
        except (OSError, KmqError) as err:
            if self._transport is not None:
                self._transport.abort()
                self._transport = None
            self._core.lost(str(err) if isinstance(err, KmqError) else no_connection(where, err))
            return False
        finally:
            if self._greeting.done() and not self._greeting.cancelled():
                self._greeting.exception()  # seen
            self._greeting = None

    async def _look(self, pause: float) -> None:
        """Let messages fail whose time is up; speak up when nothing has come for long."""
        core = self._core
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            core.expire(now)
            if core.done:
                self._tell()
            if core.oldest is not None and now - max(core.oldest, self._said) >= self.options.stall_s:
                self._said = now
                (self.options.on_stall or _log().warning)(core.describe(now))


class _Timeout:
    """asyncio.timeout whose error says what was waited for."""

    def __init__(self, seconds: float, what: str, describe: Callable[[], str]) -> None:
        self._timeout, self._what, self._describe = asyncio.timeout(seconds), what, describe

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, where)
        except TimeoutError as err:
            raise NotAnswered(f"timed out waiting for {self._what}: {self._describe()}") from err


__all__ = ["AsyncProducer"]
