"""`kmq.AsyncProducer`: acknowledged messages from asyncio.

    async with kmq.AsyncProducer(port=5673) as producer:
        seq = await producer.send("orders", b"one", key="42")            # on disk, as this seq
        replies = [await producer.submit("orders", b"two") for _ in range(64)]
        seqs = await asyncio.gather(*replies)

Promise     As for kmq.Producer: no call waits for ever in silence. Messages keep the order of the calls.
            The message of a cancelled `send` may be stored all the same.
Loop        Use a producer only in the event loop that entered it. Messages queued in one turn of the loop leave with
            one write.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Unpack

from kmq.client.aio_link import Link
from kmq.client.connection import address_of, local_address
from kmq.client.delivery import Delivery, in_parts
from kmq.client.failures import NotAnswered
from kmq.client.options import Choices, Options
from kmq.client.protocol import Core, Outgoing, as_list
from kmq.errors import KmqError
from kmq.message.text import Headers, make_routing_key


class AsyncProducer:
    """Sends acknowledged messages. `options` are the fields of Options (kmq/client/options.py)."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        """`port`: a number, or a function that is called before each connection."""
        self.options = Options(**options)
        self._core = Core(self.options)
        self._link = Link(self._core, address_of(host, port))
        self._order = asyncio.Lock()  # so that senders waiting for room proceed in order

    @classmethod
    def local(cls, **options: Unpack[Choices]) -> "AsyncProducer":
        """Return a producer for the broker of this directory's settings (environment, kmq.toml)."""
        producer = cls(**options)
        producer._link.address = local_address
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
        is_done = asyncio.Event()
        delivery = Delivery(lambda _: is_done.set())
        for part, at, end in in_parts(delivery, len(messages), self.options.max_in_flight):
            await self._wait_for_room(timeout)
            self._core.add_each(part, messages[at:end])
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


__all__ = ["AsyncProducer"]
