"""`kmq.BroadcastQueue` and `kmq.AsyncBroadcastQueue`: publish to every node of a cluster, and receive what others publish.

    with kmq.BroadcastQueue() as queue:                    # where: KMQ_CONSUL, KMQ_CLUSTER, KMQ_BROKER
        epoch = queue.publish("greeting", b"hello")
        for item in queue.receive():                       # a Snapshot first on a new node, then every Message
            print(item)                                    # marked as processed when the next one is asked for

    async with kmq.AsyncBroadcastQueue() as queue:         # the same from asyncio
        epoch = await queue.publish("greeting", b"hello")
        async for item in queue.receive():
            print(item)

Promise     An item is marked only after the loop has come back for the next one. If the loop ends with an error, or the
            process is killed, the item is received again. An asyncio `publish` that was cancelled may have published.
Threads     One more thread keeps the session in Consul alive, whatever the processing of an item takes.
Loop        Use an asyncio queue only in the event loop that entered it. A task of its own keeps the session alive, so
            nothing may hold the loop for longer than a third of KMQ_SESSION_TTL.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import NamedTuple

from kmq.cluster.consul import AsyncTransport, ConsulAddress, ConsulError, Steps, T, Transport
from kmq.cluster.presence import Keys, Lock, Presence, SessionLost, check_broker
from kmq.cluster.publisher import Mark, Message, Publisher
from kmq.cluster.subscriber import Item, Status, Subscriber, read_status
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError

MARK_S = 0.1  # at most so long after its processing a message is marked, while others are processed
WAIT_S = 10.0  # longest watch: after it a lost connection is noticed
BEATS = 3  # within the life of a session


class Place(NamedTuple):
    """Which queue, and as whom."""

    address: ConsulAddress
    cluster: str
    broker: str
    ttl_s: float

    @classmethod
    def of(cls, settings: Settings) -> "Place":
        """Return the place that the settings name. Raises ConfigError that says what is missing."""
        missing = [
            name for name, text in (("KMQ_CONSUL", settings.consul), ("KMQ_CLUSTER", settings.cluster)) if not text
        ]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set; for development: consul agent -dev, then"
                " export KMQ_CONSUL=127.0.0.1:8500 KMQ_CLUSTER=dev"
            )
        address = ConsulAddress.of(settings.consul, settings.consul_token, settings.consul_ca)
        broker = check_broker(settings.broker or socket.gethostname())
        return cls(address, settings.cluster, broker, settings.session_ttl)


def who_we_are() -> str:
    """Return what others are told who holds a lock."""
    return f"{socket.gethostname()}/{os.getpid()}"


class Heart:
    """A thread that beats for a Presence until it is stopped."""

    def __init__(self, transport: Transport, presence: Presence) -> None:
        self._transport, self._presence = transport, presence
        self._stopped = threading.Event()
        self.has_stopped_beating = False  # the session is lost
        self._thread = threading.Thread(target=self._run, name="kmq-session", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._presence.ttl_s / BEATS):
            try:
                self._transport.run(self._presence.beat())
            except SessionLost:
                self.has_stopped_beating = True
                return
            except ConsulError:
                pass  # beaten again; if that goes on too long the session is lost

    def check(self) -> None:
        """Raise SessionLost if Consul does not have the session any more."""
        self._transport.run(self._presence.check())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class PublisherSession(NamedTuple):
    """The session in which we publish."""

    presence: Presence
    heart: Heart
    publisher: Publisher


class BroadcastQueue:
    """One node's end of the queue. Only one process a node can receive; any number can publish."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: without it the settings of this directory say (environment, kmq.toml)."""
        self.place = place if place is not None else Place.of(load())
        self.keys = Keys(self.place.cluster)
        self._transport = Transport(self.place.address)
        self._session: PublisherSession | None = None
        self._known: Mark | None = None  # what the last `receive` has processed
        self._lock = threading.Lock()

    def publish(self, type: str, payload: bytes | str = b"", timeout: float = 10.0) -> int:
        """Publish a message and return its epoch. Waits at most `timeout` seconds for other publishers.

        Raises BusyError that names who holds the lock, ConfigError if the message is too long, and ConsulError.
        """
        data = payload.encode() if isinstance(payload, str) else payload
        return self.publish_message(Message.new(type, data), timeout)

    def publish_message(self, message: Message, timeout: float = 10.0) -> int:
        """Publish a message made before."""
        with self._lock:
            return self._in_session(lambda publisher: self.run(publisher.publish(message, timeout_s=timeout)))

    def as_publisher(self, work: Callable[[Publisher], Steps[T]], timeout: float = 10.0) -> T:
        """Carry out steps while we hold the publisher's lock: nobody else decides anything meanwhile."""
        with self._lock:
            publisher = self._in_session(lambda publisher: self._taken(publisher, timeout))
            try:
                try:
                    return self.run(work(publisher))
                finally:
                    self._give(publisher)
            except ConsulError:
                self._end_session()
                raise

    def _in_session(self, act: Callable[[Publisher], T]) -> T:
        """Do this in our session. One that ended while nothing was published is replaced by a new one."""
        is_used = self._session is not None
        try:
            return act(self._publisher())
        except SessionLost:
            self._end_session()
            if not is_used:
                raise
        except ConsulError:
            self._end_session()
            raise
        return self._in_session(act)

    def _taken(self, publisher: Publisher, timeout: float) -> Publisher:
        self.run(publisher.lock.take(timeout))
        return publisher

    def _give(self, publisher: Publisher) -> None:
        """Give the lock back, if need be with the session: what was published must not be taken for failed."""
        try:
            self.run(publisher.lock.give())
        except ConsulError:
            self._end_session()

    def run(self, steps: Steps[T], stop: threading.Event | None = None) -> T:
        """Carry out steps that the modules of this package return. Raises Stopped when `stop` is set."""
        return self._transport.run(steps, stop)

    def _publisher(self) -> Publisher:
        if self._session is None:
            presence = Presence(self.place.ttl_s)
            self.run(presence.open())
            publisher = Publisher(self.keys, Lock(self.keys.coordinator, presence, who_we_are()))
            self._session = PublisherSession(presence, Heart(self._transport, presence), publisher)
        return self._session.publisher

    def _end_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.heart.stop()
            with suppress(ConsulError):  # it ends by itself
                self.run(session.presence.close())

    def receive(self, start: int | None = None, timeout: float | None = None) -> Iterator[Item]:
        """Yield a Snapshot, if this node is new or has missed messages, and every Message; each is marked afterwards.

        `start`: from this epoch on, as far as it still is there. `timeout`: end when nothing has come for so long.
        Raises BusyError if this node has a subscriber already, and ConsulError.
        """
        with self.subscribed(start) as (subscriber, _):
            yield from self._items(subscriber, timeout)

    @contextmanager
    def subscribed(
        self, start: int | None = None, stop: threading.Event | None = None
    ) -> Iterator[tuple[Subscriber, Heart]]:
        """Be this node's subscriber. At the end what was processed is marked, as far as Consul answers.

        Raises BusyError if this node has a subscriber already, and Stopped if `stop` is set before it is ours.
        """
        presence = Presence(self.place.ttl_s)
        self.run(presence.open(), stop)
        heart = Heart(self._transport, presence)
        try:
            subscriber = Subscriber(self.keys, self.place.broker, presence, who_we_are())
            self.run(subscriber.open(start, self._known), stop)
            try:
                yield subscriber, heart
            finally:
                self._known = subscriber.done or self._known
                with suppress(ConsulError):  # what is not marked is received again
                    self.run(subscriber.close())
        finally:
            heart.stop()
            with suppress(ConsulError):  # it ends by itself
                self.run(presence.close())

    def _items(self, subscriber: Subscriber, timeout: float | None) -> Iterator[Item]:
        while True:
            items = self.run(subscriber.fetch(WAIT_S if timeout is None else timeout))
            if not items and timeout is not None:
                return
            marked_at = time.monotonic()
            for item in items:
                yield item
                subscriber.processed(item)
                if time.monotonic() - marked_at > MARK_S:
                    self.run(subscriber.mark())
                    marked_at = time.monotonic()
            self.run(subscriber.mark())

    def status(self) -> Status:
        """Return who publishes, the epoch, and how far each node is."""
        return self.run(read_status(self.keys))

    def close(self) -> None:
        """End the session of the publisher."""
        with self._lock:
            self._end_session()
        self._transport.close()

    def __enter__(self) -> "BroadcastQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- asyncio ---------------------------------------------------------------------------------------------------------


class AsyncPublisherSession(NamedTuple):
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
        self._session: AsyncPublisherSession | None = None
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
                await self._end_session()
                raise

    async def _published(self, message: Message, timeout: float) -> int:
        """Publish in our session. One that ended while nothing was published is replaced by a new one."""
        is_used = self._session is not None
        try:
            publisher = await self._publisher()
            return await self._run(publisher.publish(message, timeout_s=timeout))
        except SessionLost:
            if not is_used:
                raise
        await self._end_session()
        return await self._published(message, timeout)

    async def _run(self, steps: Steps[T]) -> T:
        return await self._transport.run(steps)

    async def _publisher(self) -> Publisher:
        if self._session is None:
            presence = Presence(self.place.ttl_s)
            await self._run(presence.open())
            publisher = Publisher(self.keys, Lock(self.keys.coordinator, presence, who_we_are()))
            self._session = AsyncPublisherSession(presence, asyncio.create_task(self._beat(presence)), publisher)
        return self._session.publisher

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

    async def _end_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await self._end(session.presence, session.heart)

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
            await self._end_session()
        await self._transport.close()

    async def __aenter__(self) -> "AsyncBroadcastQueue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
