"""`kmq.AsyncProducer`: acknowledged messages from asyncio.

    async with kmq.AsyncProducer(port=5673) as producer:
        seq = await producer.send("orders", b"one", key="42")            # on disk, as this seq
        replies = [await producer.submit("orders", b"two") for _ in range(64)]
        seqs = await asyncio.gather(*replies)

Promise     As for kmq.Producer: no call waits for ever in silence. Messages keep the order of the calls.
            The message of a cancelled `send` may be stored all the same.
Loop        Use a producer only in the event loop that entered it. One task maintains the connection. Messages queued
            in one turn of the loop leave with one write.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Unpack

from kmq.client.connection import (
    CONNECT_S,
    Address,
    ServerAddress,
    address_of,
    keep_alive,
    local_address,
    logger,
)
from kmq.client.lines import no_connection
from kmq.client.options import Choices, Options, choose, document
from kmq.client.producer_core import Outgoing, Overdue, ProducerCore, as_list
from kmq.errors import KmqError
from kmq.message.text import Headers, make_routing_key
from kmq.sending.delivery import Delivery, in_parts
from kmq.sending.failures import NotAnswered, Refused
from kmq.sending.window import backoff


class AsyncProducer:
    """Sends acknowledged messages. `options` are the fields of Options (kmq/client/options.py)."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        """`host`: one, or several as `a:5673,b:5673`. `port`: of hosts without one; a function is called each time."""
        self.options = choose(AsyncProducer, Options, options)
        self._core = ProducerCore(self.options)
        self._link = ProducerLink(self._core, address_of(host, port))
        self._order = asyncio.Lock()  # so that senders waiting for room proceed in order

    @classmethod
    def local(cls, address: Address = local_address, **options: Unpack[Choices]) -> "AsyncProducer":
        """Return a producer for the broker of this directory's settings (environment, kmq.toml).

        `address`: where the broker's own processes find its ingress.
        """
        producer = cls(**options)
        producer._link.address = address
        return producer

    @property
    def name(self) -> str:
        """Return the name by which the broker knows this producer; "" without producer ids."""
        return self._core.ids.name

    @property
    def unanswered(self) -> int:
        """Return how many messages have no outcome yet."""
        return self._core.window.unanswered

    @property
    def connected(self) -> bool:
        return self._core.connected

    @property
    def failed(self) -> KmqError | None:
        """Return the error that ended this producer; None while it works."""
        return self._core.failed

    def describe(self) -> str:
        """Return a sentence on what the producer waits for."""
        return self._core.describe(time.monotonic())

    @property
    def connections(self) -> int:
        """Return how many connections were made so far."""
        return self._core.connections

    @property
    def duplicates(self) -> int:
        """Return how many messages were sent again although the broker had stored them already."""
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
        headers: Headers | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send one message. Returns its seq once the message is on disk."""
        reply = await self.submit(
            topic, payload, key, partition=partition, id=id, headers=headers, ts=ts, timeout=timeout
        )
        async with self._timeout(timeout, "the reply to this message"):
            return await reply

    async def submit(
        self,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        id: str | int | None = None,
        headers: Headers | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> "asyncio.Future[int]":
        """Queue one message, waiting only while the window is full. Returns a future of its seq."""
        await self._wait_for_room(timeout)
        if key is None and partition is None and topic.__class__ is str:
            routing_key = self._core.routing_keys[topic]
        else:
            routing_key = make_routing_key(topic, key, partition)
        delivery, reply = _expect()
        self._core.add(delivery, routing_key, payload, id, headers, ts)
        self._link.queued()
        return reply

    async def send_many(
        self,
        topic: str,
        payloads: Iterable[bytes | str | None],
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        ts: float | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Send a list in one go, for a fraction of the cost of as many sends. Returns their seqs.

        A list that is longer than max_in_flight is sent in parts, each as soon as there is room for it.
        """
        payloads = as_list(payloads, self.options)
        routing_key = make_routing_key(topic, key, partition)
        if not payloads:
            return []
        delivery, reply = _expect()
        for part, at, end in in_parts(delivery, len(payloads), self.options.max_in_flight):
            await self._wait_for_room(timeout)
            self._core.add_many(part, routing_key, payloads[at:end], ts)
            self._link.queued()
        async with self._timeout(timeout, "the replies to this list"):
            await reply
        return delivery.seqs

    async def send_each(self, messages: Sequence[Outgoing], timeout: float | None = None) -> Delivery:
        """Send messages with routing keys and ids of their own in one go, for the gateway.

        Returns when each has an outcome: what was refused or not answered is in the Delivery, and raises nothing.
        """
        return await self._each(
            len(messages), timeout, lambda part, at, end: self._core.add_each(part, messages[at:end])
        )

    async def send_lines(self, lines: Sequence[bytes], timeout: float | None = None) -> Delivery:
        """Send whole lines, as they are, in the same way."""
        return await self._each(
            len(lines), timeout, lambda part, at, end: self._core.add_lines(part, b"".join(lines[at:end]), end - at)
        )

    async def _each(self, count: int, timeout: float | None, add: Callable[[Delivery, int, int], None]) -> Delivery:
        is_done = asyncio.Event()
        delivery = Delivery(lambda _: is_done.set())
        for part, at, end in in_parts(delivery, count, self.options.max_in_flight):
            await self._wait_for_room(timeout)
            add(part, at, end)
            self._link.queued()
        if not delivery.done:
            async with self._timeout(timeout, "the replies to these messages"):
                await is_done.wait()
        return delivery

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message has its reply."""
        async with self._timeout(timeout, "the replies to all messages"):
            await self._link.wait(lambda: not self.unanswered or self.failed is not None or self._link.closed)
        if self._core.failed is not None:
            raise self._core.failed

    async def close(self, timeout: float | None = None) -> None:
        """Flush and end, even if the flush times out: messages without a reply then fail, though they may be stored."""
        try:
            if not self._link.closed:
                await self.flush(timeout)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """End now; messages without a reply fail."""
        await self._link.end()

    async def __aenter__(self) -> "AsyncProducer":
        self._link.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        await (self.close() if kind is None else self.abort())

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def _wait_for_room(self, timeout: float | None) -> None:
        core = self._core
        if core.failed is not None:
            raise core.failed
        if self._link.closed:
            raise KmqError("this producer is closed")
        if not core.window.is_full and not self._order.locked():
            return
        async with self._timeout(timeout, "room among the messages in flight"), self._order:
            if not core.window.is_full:
                return
            await self._link.wait(lambda: core.window.is_half_free)
        if core.failed is not None:
            raise core.failed

    def _timeout(self, timeout: float | None, what: str) -> "_Timeout":
        return _Timeout(self.options.timeout_s if timeout is None else timeout, what, self.describe)


document(AsyncProducer, Options)


def _expect() -> "tuple[Delivery, asyncio.Future[int]]":
    """Return a delivery and the future of its seq."""
    reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def done(delivery: Delivery) -> None:
        if reply.done():
            return  # the waiting task was cancelled
        if delivery.error is None:
            reply.set_result(delivery.seq)
        else:
            reply.set_exception(delivery.error)

    return Delivery(done), reply


class _Timeout:
    """An asyncio.timeout whose error names what the caller waited for."""

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


# --- the connection --------------------------------------------------------------------------------------------------


class ProducerLink(asyncio.Protocol):
    """Moves a core's bytes."""

    def __init__(self, core: ProducerCore, address: Address) -> None:
        self.core, self.address = core, address
        self.closed = False
        self.changed = asyncio.Event()  # set, and replaced, whenever there may be room or an end
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[bytes] | None = None  # while the reply to hello is awaited
        self._greeting_so_far = b""
        self._lost = asyncio.Event()  # the connection is gone
        self._is_scheduled = False  # a flush
        self._attempts = 0  # to connect, since the broker last replied
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that connects and reconnects, unless it runs already. Call inside the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kmq-producer")

    def queued(self) -> None:
        """Write at the end of this turn of the loop the queued messages that should go now."""
        self.start()
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over`, writing all queued messages at once."""
        while not is_over():
            self.core.window.hurry = True
            self._flush()
            await self.changed.wait()

    async def end(self) -> None:
        """Close the connection; messages without a reply fail."""
        self.closed = True
        if self.core.failed is None:
            self.core.fail(NotAnswered("the producer was closed before the reply came"))
        self._call_back()
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _flush(self) -> None:
        """Write the messages that should go now."""
        self._is_scheduled = False
        core, transport = self.core, self._transport
        if transport is None or not core.connected:
            return
        now = time.monotonic()
        while taken := core.take(now):
            transport.write(taken)
        linger = core.linger_left(now)
        if linger is not None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(linger, self._flush)

    def _call_back(self) -> None:
        """Call the callbacks of finished messages, in order, and wake all waiting tasks."""
        self.core.window.call_back()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            self._greeting_so_far += data
            try:
                if not self._greeting.done() and self.core.is_greeting(self._greeting_so_far):
                    self._greeting.set_result(self._greeting_so_far)
            except Refused as refused:
                self._greeting.set_exception(refused)
            return
        if not self.core.connected:
            return  # the core has already given up this connection
        try:
            self.core.receive(data)
            self._attempts = 0
        except Refused as refused:
            self._lose(str(refused))
        self._call_back()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error or ConnectionResetError("closed without a word"))
        elif self.core.connected:
            self._lose(str(error or "the broker closed the connection"))

    def _lose(self, reason: str) -> None:
        self.core.lost(reason)
        self._drop()
        self._lost.set()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- the task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep a connection, and check regularly for overdue messages."""
        looking = asyncio.get_running_loop().create_task(self._look())
        try:
            while not self.closed and self.core.failed is None:
                if await self._connect():
                    self._flush()
                    await self._lost.wait()
                self._call_back()
                if self.core.failed is None:
                    await asyncio.sleep(backoff(self._attempts))
                    self._attempts += 1
        finally:
            looking.cancel()
            self._call_back()

    async def _connect(self) -> bool:
        """Connect and say hello. Returns True if the broker accepted the connection."""
        self._lost.clear()
        greeting = self._greeting = asyncio.get_running_loop().create_future()
        self._greeting_so_far = b""
        where = "the broker"
        try:
            server = self.address()
            where, self.core.has_others = str(server), bool(server.among)
            async with asyncio.timeout(CONNECT_S):
                await self._say_hello(server)
                data = await greeting
            self.core.greeted(data)
            return True
        except (OSError, KmqError) as err:
            self._drop()
            self.core.lost(str(err) if isinstance(err, KmqError) else no_connection(where, err))
            return False
        finally:
            if greeting.done() and not greeting.cancelled():
                greeting.exception()  # otherwise asyncio would report an exception that was never retrieved
            self._greeting = None

    async def _say_hello(self, server: ServerAddress) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or server.host) if options.tls is not None else None
        transport, _ = await loop.create_connection(
            lambda: self, server.host, server.port, ssl=options.tls, server_hostname=name
        )
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        transport.write(self.core.hello(server.token, server.epoch))

    async def _look(self) -> None:
        """Let expired messages fail, report stalls, and leave a broker that is silent for too long."""
        overdue = Overdue(self.core, logger().warning)
        while True:
            await asyncio.sleep(overdue.period_s)
            text = overdue.look()
            if self.core.window.done:
                self._call_back()
            if text:
                overdue.report(text)
            if why := self.core.silent():
                self._lose(why)
