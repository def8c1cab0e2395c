"""`kmq.BroadcastQueue` and `kmq.AsyncBroadcastQueue`: publish to every node of a fleet, and receive what others publish.

    with kmq.BroadcastQueue() as queue:                    # where: KMQ_CONSUL, KMQ_CLUSTER, KMQ_BROKER
        epoch = queue.publish("greeting", b"hello")
        for item in queue.receive():                       # a Snapshot first on a new node, then every Message
            print(item)                                    # marked as processed when the next one is asked for

    async with kmq.AsyncBroadcastQueue() as queue:         # the same from asyncio
        epoch = await queue.publish("greeting", b"hello")
        async for item in queue.receive():
            print(item)

Promise     An item is marked only after the caller's loop has asked for the next one. If the loop ends with an error,
            or the process is killed, the item is received again. A cancelled asyncio `publish` may have published.
Threads     `BroadcastQueue` runs an asyncio queue in an event loop in a thread of its own, which the first call starts.
            The session in Consul stays alive there, however long an item takes to process. Any thread may call.
Loop        Use an asyncio queue only in the event loop that entered it. A task in that loop keeps the session alive, so
            no code may block the loop for longer than a third of KMQ_SESSION_TTL.
"""

import asyncio
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

from kmq.cluster.consul import ConsulAddress, ConsulError, Steps, T, Transport
from kmq.cluster.presence import Keys, Lock, Presence, SessionLost, check_broker
from kmq.cluster.publisher import Mark, Message, Publisher
from kmq.cluster.subscriber import Item, Status, Subscriber, read_status
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError, Stopped

MARK_S = 0.1  # longest time from processing a message to marking it, while further messages are processed
WAIT_S = 10.0  # longest watch; at its end a lost connection is noticed
BEATS = 3  # within the life of a session


class Place(NamedTuple):
    """A queue (Consul, cluster), and the broker that takes part in it."""

    address: ConsulAddress
    cluster: str
    broker: str
    ttl_s: float

    @classmethod
    def of(cls, settings: Settings) -> "Place":
        """Return the place that the settings name. Raises ConfigError that names missing settings."""
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
    """Return our name as the holder of a lock, which others see: `host/pid`."""
    return f"{socket.gethostname()}/{os.getpid()}"


class Heart:
    """A session in Consul that a task keeps alive until it is stopped. `open` it in an event loop."""

    def __init__(self, transport: Transport, presence: Presence) -> None:
        self.presence = presence
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    @classmethod
    async def open(cls, transport: Transport, ttl_s: float, stop: threading.Event | None = None) -> "Heart":
        """Begin a session. Raises Stopped if `stop` is set before that."""
        presence = Presence(ttl_s)
        await transport.run(presence.open(), stop)
        return cls(transport, presence)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.presence.ttl_s / BEATS)
            try:
                await self._transport.run(self.presence.beat())
            except SessionLost:
                return  # the users of the session notice it themselves
            except ConsulError:
                pass  # try again; after too many failures the session is lost

    @property
    def has_stopped_beating(self) -> bool:
        """Return True once the session is lost."""
        return self._task.done()

    def start(self, steps: Steps[T]) -> Future[T]:
        """Begin to carry out steps that need the session. Call it from other threads than the loop's."""
        return asyncio.run_coroutine_threadsafe(self._transport.run(steps), self._loop)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        with suppress(ConsulError):  # it ends by itself
            await self._transport.run(self.presence.close())


class AsyncBroadcastQueue:
    """One node's end of the queue. Only one process a node can receive; any number can publish."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: without it the settings of this directory say (environment, kmq.toml)."""
        self.place = place if place is not None else Place.of(load())
        self.keys = Keys(self.place.cluster)
        self._transport = Transport(self.place.address)
        self.last_processed: Mark | None = None  # the last message that our last subscriber processed
        self._session: tuple[Heart, Publisher] | None = None  # for publishing
        self._lock = asyncio.Lock()
        self._subscribers: dict[Subscriber, Heart] = {}  # of iterations that have not ended

    # --- publishing --------------------------------------------------------------------------------------------------

    async def publish(self, type: str, payload: bytes | str = b"", timeout: float = 10.0) -> int:
        """Publish a message and return its epoch. Waits at most `timeout` seconds for other publishers.

        Raises BusyError that names who holds the lock, ConfigError if the message is too long, and ConsulError.
        """
        data = payload.encode() if isinstance(payload, str) else payload
        return await self.publish_message(Message.new(type, data), timeout)

    async def publish_message(self, message: Message, timeout: float = 10.0) -> int:
        """Publish a message made before."""
        async with self._lock:
            return await self._in_session(
                lambda publisher: self._transport.run(publisher.publish(message, timeout_s=timeout))
            )

    async def _take_lock(self, timeout: float) -> Publisher:
        """Return a publisher that holds the lock until `_give_lock`."""

        async def take(publisher: Publisher) -> Publisher:
            await self._transport.run(publisher.lock.take(timeout))
            return publisher

        await self._lock.acquire()
        try:
            return await self._in_session(take)
        except BaseException:
            self._lock.release()
            raise

    async def _give_lock(self, publisher: Publisher, has_failed: bool) -> None:
        """Give the lock back; if that fails, end the session. Raise no ConsulError: the message may be published."""
        try:
            try:
                await self._transport.run(publisher.lock.give())
            except ConsulError:
                has_failed = True
            if has_failed:
                await self._end_session()
        finally:
            self._lock.release()

    async def _in_session(self, act: Callable[[Publisher], Awaitable[T]]) -> T:
        """Do this in our session. If an old session has ended since its last use, do it in a new one."""
        is_used = self._session is not None
        try:
            return await act(await self._publisher())
        except SessionLost:
            await self._end_session()
            if not is_used:
                raise
        except (ConsulError, asyncio.CancelledError):  # cancelled: it is unknown what was carried out
            await self._end_session()
            raise
        return await self._in_session(act)

    async def _publisher(self) -> Publisher:
        if self._session is None:
            heart = await Heart.open(self._transport, self.place.ttl_s)
            publisher = Publisher(self.keys, Lock(self.keys.coordinator, heart.presence, who_we_are()))
            self._session = heart, publisher
        return self._session[1]

    async def _end_session(self) -> None:
        if self._session is not None:
            (heart, _), self._session = self._session, None
            await heart.stop()

    # --- receiving ---------------------------------------------------------------------------------------------------

    async def receive(self, start: int | None = None, timeout: float | None = None) -> AsyncIterator[Item]:
        """Yield a Snapshot, if this node is new or has missed messages, and every Message; each is marked afterwards.

        `start`: from this epoch on, as far as it still is there. `timeout`: end when nothing has come for so long.
        Raises BusyError if this node has a subscriber already, and ConsulError. A loop that is left early gives the
        place back when the iterator is closed, at the latest with the queue.
        """
        subscriber, _ = await self._subscribe(start)
        try:
            while True:
                items = await self._transport.run(subscriber.fetch(WAIT_S if timeout is None else timeout))
                if not items and timeout is not None:
                    return
                marked_at = time.monotonic()
                for item in items:
                    yield item
                    subscriber.processed(item)
                    if time.monotonic() - marked_at > MARK_S:
                        await self._transport.run(subscriber.mark())
                        marked_at = time.monotonic()
                await self._transport.run(subscriber.mark())
        finally:
            await self._unsubscribe(subscriber)

    async def _subscribe(self, start: int | None, stop: threading.Event | None = None) -> tuple[Subscriber, Heart]:
        """Become this node's subscriber, as BroadcastQueue.subscribed says."""
        heart = await Heart.open(self._transport, self.place.ttl_s, stop)
        try:
            subscriber = Subscriber(self.keys, self.place.broker, heart.presence, who_we_are())
            await self._transport.run(subscriber.open(start, self.last_processed), stop)
        except BaseException:
            await heart.stop()
            raise
        self._subscribers[subscriber] = heart
        return subscriber, heart

    async def _unsubscribe(self, subscriber: Subscriber) -> None:
        heart = self._subscribers.pop(subscriber, None)
        if heart is None:
            return  # the queue was closed
        self.last_processed = subscriber.done or self.last_processed
        try:
            with suppress(ConsulError):  # items that are not marked are received again
                await self._transport.run(subscriber.close())
        finally:
            await heart.stop()

    async def status(self) -> Status:
        """Return the publisher, the epoch, and the progress of each node."""
        return await self._transport.run(read_status(self.keys))

    async def close(self) -> None:
        """End every abandoned iteration, and the session of the publisher."""
        for subscriber in list(self._subscribers):
            await self._unsubscribe(subscriber)
        async with self._lock:
            await self._end_session()
        await self._transport.close()

    async def __aenter__(self) -> "AsyncBroadcastQueue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


# --- without asyncio -------------------------------------------------------------------------------------------------


class LoopThread:
    """An event loop in a thread of its own. The first coroutine starts it, so a queue may be made before a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because the garbage collector may call these methods at any point
        self._has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """Return the result of the coroutine. If this thread is interrupted, cancel the coroutine and wait for its end.

        `undo` reverts its result if it had finished before it could be cancelled.
        """
        tasks: list[asyncio.Task[Any]] = []
        done: list[T] = []

        async def work() -> T:
            if (task := asyncio.current_task()) is not None:
                tasks.append(task)
            done.append(await coroutine)
            return done[0]

        async def stop() -> None:  # the loop runs both in order: if `work` was handed over, it has begun by now
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

        future: Future[T] | None = None
        try:
            with self._lock:  # so that `end` cancels all work begun before it
                if self._is_gone:
                    coroutine.close()
                    raise RuntimeError("this queue is closed, or belongs to the process that this one was forked from")
                future = self._begin(work())
            return future.result()
        except CancelledError:  # by `end`, in another thread
            raise RuntimeError("this queue is closed") from None
        except BaseException:
            # Ctrl-C may come before `future` is assigned, or before the wait for its result.
            if not self._is_gone and (future is None or not future.done()):
                self._begin(stop()).result()
            if done and undo is not None:
                self.run(undo(done[0]))
            raise

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None or self._thread is None:
                self._loop = _Loop()
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="kmq-session", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def _is_gone(self) -> bool:
        """Return True after `end`, and in a process forked from the process that has the thread."""
        with self._lock:
            return self._has_ended or (self._thread is not None and not self._thread.is_alive())

    def finish(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine. In the loop's own thread (called by the garbage collector) do not wait for it."""
        if self._is_gone:
            last.close()
        elif threading.current_thread() is self._thread:
            self._begin(last)
        else:
            self.run(last)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine if the thread was started, then end the thread. Work of other callers is cancelled."""

        async def work() -> None:
            try:
                await last
            finally:
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.stop)  # after the callbacks that report the end of this task

        with self._lock:
            thread, is_gone = self._thread, self._is_gone
            self._has_ended = True
            if thread is None or is_gone:
                last.close()
                return
            future = self._begin(work())
        if threading.current_thread() is not thread:
            try:
                future.result()
            except BaseException:
                future.cancel()
                raise
            finally:
                thread.join()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that can resolve host names while the program ends, when no new thread may start."""

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
        try:
            return await super().getaddrinfo(host, port, **more)
        except RuntimeError:
            return socket.getaddrinfo(host, port, **more)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    async def end_others() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    loop.run_forever()
    loop.run_until_complete(end_others())  # else a thread that waits for such a task would wait for ever
    loop.close()


class BroadcastQueue:
    """One node's end of the queue. Only one process a node can receive; any number can publish."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: without it the settings of this directory say (environment, kmq.toml)."""
        self._queue, self._thread = AsyncBroadcastQueue(place), LoopThread()
        self.place, self.keys = self._queue.place, self._queue.keys
        # Ends the queue at the latest when the program ends, or when the last reference to the queue is gone.
        self._end = weakref.finalize(self, lambda queue, thread: thread.end(queue.close()), self._queue, self._thread)

    def publish(self, type: str, payload: bytes | str = b"", timeout: float = 10.0) -> int:
        """Publish a message and return its epoch. Waits at most `timeout` seconds for other publishers.

        Raises BusyError that names who holds the lock, ConfigError if the message is too long, and ConsulError.
        """
        return self._thread.run(self._queue.publish(type, payload, timeout))

    def publish_message(self, message: Message, timeout: float = 10.0) -> int:
        """Publish a message made before."""
        return self._thread.run(self._queue.publish_message(message, timeout))

    def as_publisher(self, work: Callable[[Publisher], Steps[T]], timeout: float = 10.0) -> T:
        """Carry out steps while we hold the publisher's lock, so that no other publisher changes anything meanwhile."""
        has_failed = False
        publisher = self._thread.run(
            self._queue._take_lock(timeout), lambda publisher: self._queue._give_lock(publisher, has_failed=True)
        )
        try:
            return self.run(work(publisher))
        except ConsulError:
            has_failed = True
            raise
        finally:
            self._thread.run(self._queue._give_lock(publisher, has_failed))

    def run(self, steps: Steps[T], stop: threading.Event | None = None) -> T:
        """Carry out steps that the modules of this package return. Raises Stopped when `stop` is set.

        The steps run in the caller's thread, because they may call back. Their requests are sent in the loop's thread.
        """
        try:
            step = next(steps)
            while True:
                if stop is not None and stop.is_set():
                    raise Stopped("told to stop")
                try:
                    answer = self._thread.run(self._queue._transport.ask(step))
                except ConsulError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def receive(self, start: int | None = None, timeout: float | None = None) -> Iterator[Item]:
        """Yield a Snapshot, if this node is new or has missed messages, and every Message; each is marked afterwards.

        `start`: from this epoch on, as far as it still is there. `timeout`: end when nothing has come for so long.
        Raises BusyError if this node has a subscriber already, and ConsulError.
        """
        with self.subscribed(start) as (subscriber, _):
            while True:
                items = self.run(subscriber.fetch(WAIT_S if timeout is None else timeout))
                if not items and timeout is not None:
                    return
                marked_at = time.monotonic()
                for item in items:  # in the caller's thread: one request to the loop's thread brings all of them
                    yield item
                    subscriber.processed(item)
                    if time.monotonic() - marked_at > MARK_S:
                        self.run(subscriber.mark())
                        marked_at = time.monotonic()
                self.run(subscriber.mark())

    @contextmanager
    def subscribed(
        self, start: int | None = None, stop: threading.Event | None = None
    ) -> Iterator[tuple[Subscriber, Heart]]:
        """Be this node's subscriber. At the end the processed items are marked, if Consul answers.

        Raises BusyError if this node has a subscriber already, and Stopped if `stop` is set before we are subscriber.
        """
        subscriber, heart = self._thread.run(
            self._queue._subscribe(start, stop), lambda found: self._queue._unsubscribe(found[0])
        )
        try:
            yield subscriber, heart
        finally:
            if self._end.alive:  # else `close` has done it
                self._thread.finish(self._queue._unsubscribe(subscriber))

    def status(self) -> Status:
        """Return the publisher, the epoch, and the progress of each node."""
        return self._thread.run(self._queue.status())

    def close(self) -> None:
        """End the session of the publisher."""
        self._end()

    def __enter__(self) -> "BroadcastQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
