"""`kmq.AsyncBroadcastQueue`: the Broadcast Queue from asyncio.

    async with kmq.AsyncBroadcastQueue() as queue:         # where: KMQ_CONSUL, KMQ_CLUSTER, KMQ_BROKER
        epoch = await queue.publish("greeting", b"hello")
        async for item in queue.receive():                 # a Snapshot first on a new node, then every Message
            print(item)                                    # marked as processed when the next one is asked for

Promise     As for kmq.BroadcastQueue. A `publish` that was cancelled may have published.
Loop        Use a queue only in the event loop that entered it. A task of its own keeps the session in Consul alive, so
            nothing may hold the loop for longer than a third of KMQ_SESSION_TTL.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import NamedTuple

from kmq.cluster.consul import ConsulError, Steps, T
from kmq.cluster.keys import Keys
from kmq.cluster.lock import Lock
from kmq.cluster.message import Message
from kmq.cluster.presence import Presence, SessionLost
from kmq.cluster.publisher import Publisher
from kmq.cluster.queue import BEATS, MARK_S, WAIT_S, Place, who_we_are
from kmq.cluster.status import Status, read_status
from kmq.cluster.subscriber import Item, Subscriber
from kmq.cluster.transport import AsyncTransport
from kmq.cluster.trimming import Mark
from kmq.config.settings import load


class Sending(NamedTuple):
    """The session in which we publish."""

    presence: Presence
    heart: "asyncio.Task[None]"
    publisher: Publisher


class AsyncBroadcastQueue:
    """One node's end of the queue. Only one process a node can receive; any number can publish."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: without it the settings of this directory say (environment, kmq.toml)."""
        self.place = place if place is not None else Place.of(load())
        self.keys = Keys(self.place.cluster)
        self._transport = AsyncTransport(self.place.address)
        self._known: Mark | None = None  # what the last `receive` has processed
        self._sending: Sending | None = None
        self._lock = asyncio.Lock()
        self._receiving: set[AsyncGenerator[Item, None]] = set()

    async def publish(self, type: str, payload: bytes | str = b"", timeout: float = 10.0) -> int:
        """Publish a message and return its epoch. Waits at most `timeout` seconds for other publishers.

        Raises BusyError that names who holds the lock, ConfigError if the message is too long, and ConsulError.
        """
        data = payload.encode() if isinstance(payload, str) else payload
        return await self.publish_message(Message.new(type, data), timeout)

    async def publish_message(self, message: Message, timeout: float = 10.0) -> int:
        """Publish a message made before."""
        async with self._lock:
            try:
                return await self._published(message, timeout)
            except (ConsulError, asyncio.CancelledError):  # cancelled: nobody knows what of it was carried out
                await self._end_sending()
                raise

    async def _published(self, message: Message, timeout: float) -> int:
        """Publish in our session. One that ended while nothing was published is replaced by a new one."""
        is_used = self._sending is not None
        try:
            publisher = await self._publisher()
            return await self._run(publisher.publish(message, timeout_s=timeout))
        except SessionLost:
            if not is_used:
                raise
        await self._end_sending()
        return await self._published(message, timeout)

    async def _run(self, steps: Steps[T]) -> T:
        return await self._transport.run(steps)

    async def _publisher(self) -> Publisher:
        if self._sending is None:
            presence = Presence(self.place.ttl_s)
            await self._run(presence.open())
            publisher = Publisher(self.keys, Lock(self.keys.coordinator, presence, who_we_are()))
            self._sending = Sending(presence, asyncio.create_task(self._beat(presence)), publisher)
        return self._sending.publisher

    async def _beat(self, presence: Presence) -> None:
        while True:
            await asyncio.sleep(presence.ttl_s / BEATS)
            try:
                await self._run(presence.beat())
            except SessionLost:
                return  # whoever uses the session finds that out
            except ConsulError:
                pass  # beaten again; if that goes on too long the session is lost

    async def _end(self, presence: Presence, heart: "asyncio.Task[None]") -> None:
        heart.cancel()
        with suppress(asyncio.CancelledError):
            await heart
        with suppress(ConsulError):  # it ends by itself
            await self._run(presence.close())

    async def _end_sending(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await self._end(sending.presence, sending.heart)

    def receive(self, start: int | None = None, timeout: float | None = None) -> AsyncIterator[Item]:
        """Yield a Snapshot, if this node is new or has missed messages, and every Message; each is marked afterwards.

        `start`: from this epoch on, as far as it still is there. `timeout`: end when nothing has come for so long.
        Raises BusyError if this node has a subscriber already, and ConsulError. A loop that is left early gives the
        place back when the iterator is closed, at the latest with the queue.
        """
        items = self._items(start, timeout)
        self._receiving = {each for each in self._receiving if getattr(each, "ag_frame", None)} | {items}  # not ended
        return items

    async def _items(self, start: int | None, timeout: float | None) -> AsyncGenerator[Item, None]:
        async with self._subscribed(start) as subscriber:
            while True:
                items = await self._run(subscriber.fetch(WAIT_S if timeout is None else timeout))
                if not items and timeout is not None:
                    return
                marked_at = time.monotonic()
                for item in items:
                    yield item
                    subscriber.processed(item)
                    if time.monotonic() - marked_at > MARK_S:
                        await self._run(subscriber.mark())
                        marked_at = time.monotonic()
                await self._run(subscriber.mark())

    @asynccontextmanager
    async def _subscribed(self, start: int | None) -> AsyncIterator[Subscriber]:
        presence = Presence(self.place.ttl_s)
        await self._run(presence.open())
        heart = asyncio.create_task(self._beat(presence))
        try:
            subscriber = Subscriber(self.keys, self.place.broker, presence, who_we_are())
            await self._run(subscriber.open(start, self._known))
            try:
                yield subscriber
            finally:
                self._known = subscriber.done or self._known
                with suppress(ConsulError):  # what is not marked is received again
                    await self._run(subscriber.close())
        finally:
            await self._end(presence, heart)

    async def status(self) -> Status:
        """Return who publishes, the epoch, and how far each node is."""
        return await self._run(read_status(self.keys))

    async def close(self) -> None:
        """End every iteration that was left early, and the session of the publisher."""
        for items in self._receiving:
            await items.aclose()
        self._receiving.clear()
        async with self._lock:
            await self._end_sending()
        await self._transport.close()

    async def __aenter__(self) -> "AsyncBroadcastQueue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
