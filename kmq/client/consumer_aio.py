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

from kmq.client.connection import CONNECT_S, Address, address_of, backoff, keep_alive, local_consumer_address
from kmq.client.consumer_calls import DISCOVER_S, FOR_EVER_S, LAST_COMMIT_S, ConsumerCalls, Offsets, discover
from kmq.client.consumer_options import PORT, ConsumerChoices, ConsumerOptions, logger
from kmq.client.consumer_protocol import ConsumerCore, Phase
from kmq.client.consumer_state import Kind, PartitionEvent
from kmq.client.failures import NotAnswered, Refused
from kmq.client.handling import DEFAULT_BACKOFF, OWN_TOPIC, Backoff, Rules
from kmq.client.lines import no_connection
from kmq.client.producer import Producer
from kmq.client.runner import AsyncRunner, Stop, local_producer, makes_producers, stopping
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.refusals import find
from kmq.wire.replies import Nacked, PartitionOffsets
from kmq.wire.requests import TopicPartition

OnPlaces = Callable[[list[TopicPartition]], Awaitable[object] | object]


class AsyncConsumer(ConsumerCalls):
    """Reads topics. `options` are the fields of ConsumerOptions (kmq/client/consumer_options.py)."""

    _driver: "ConsumerLink"

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
        core = ConsumerCore(ConsumerOptions(**options))
        super().__init__(core, ConsumerLink(core, address_of(host, port)), contextlib.nullcontext())
        self._make_producer = makes_producers(host, port, self.options)
        self._callbacks = {Kind.ASSIGNED: on_assign, Kind.REVOKED: on_revoke, Kind.LOST: on_lost or on_revoke}
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

    async def poll(self, max_records: int | None = None, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_records` messages as soon as there are any, or none after `timeout` seconds."""
        count = self._most(max_records)
        deadline = time.monotonic() + timeout
        while True:
            if self._driver.closed:
                raise KmqError("this consumer is closed")
            await self._came_back()
            if taken := self._core.holdings.buffer.collect(count):
                self._given = taken
                self._ask_for_more()
                return taken
            if not await self._wait_for_records(deadline - time.monotonic()):
                return []

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages one by one, waiting for the next one as long as it takes; until the consumer is closed."""
        buffer = self._core.holdings.buffer
        while not self._driver.closed:
            await self._came_back()
            if not buffer.chunks:
                await self._wait_for_records(FOR_EVER_S)
                continue
            chunk = buffer.chunks[0]
            looked_at = time.monotonic()
            for message in chunk.unread:
                if not chunk.deliveries:
                    chunk.owned.position = message.offset + 1
                self._given = message
                yield message
                if (now := time.monotonic()) - looked_at >= 1.0:
                    looked_at = now
                    await self._came_back()
            buffer.finish(chunk)

    def _ask_for_more(self) -> None:
        """Let the next batch come while the application works on this one."""
        self._core.fetch(time.monotonic(), 0.0)
        self._driver.write()

    async def _wait_for_records(self, timeout_s: float) -> bool:
        self._must_read()
        return await self._driver.wait(self._has_news, max(timeout_s, 0.0), fetches=True)

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
        """Hand every message to `handler`, which may be a coroutine function. All else is as for kmq.Consumer.run.

        Ends when the consumer is closed, or its task is cancelled: the message being handled then comes again.
        """
        rules, make = Rules(max_retries, backoff, dlq, permanent), producer or self._make_producer
        rules.check(handler, knows_producers=make is not None)
        with stopping(stop) as event:
            await AsyncRunner(self, rules, make or local_producer).run(
                handler, event
            )  # without letters nobody is asked

    # --- calls that wait ---------------------------------------------------------------------------------------------
    # Each waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered.

    async def connect(self, timeout: float | None = None) -> list[TopicPartition]:
        """Wait until the broker has said which partitions this consumer reads, and return them."""
        self._must_read()
        await self._wait_for(lambda: self._core.phase is Phase.READING, timeout, "an assignment")
        return self.assignment()

    async def position(self, place: tuple[str, int], timeout: float | None = None) -> int:
        """Return the offset of the next message of a partition. Waits while the broker looks for it."""
        owned = self._find(place)
        await self._wait_for(lambda: owned.is_known, timeout, f"the position in {owned.place}")
        return owned.position

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
        """Return the offset behind the last record of each partition."""
        return {row.place: row.end for row in await self._ask(places, timeout)}

    async def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None:
        """Commit and wait until that is durable: all that was given out, or up to a message, or the next offsets.

        Raises Refused: `fenced` if the partition is no longer this member's, so another one handles its records.
        """
        pending = self._commit(offsets)
        await self._wait_for(lambda: pending.done, timeout, "the commit")
        if pending.error is not None:
            raise pending.error

    async def nack(
        self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None
    ) -> Nacked:
        """Give a message back, as Consumer.nack does."""
        pending = self._nack(message, delay, reason)
        await self._wait_for(lambda: pending.done, timeout, "the answer to a nack")
        return self._nacked(pending)

    async def _commit_last(self, places: Iterable[TopicPartition]) -> None:
        pending = self._commit_handled(places)
        try:
            await self._wait_for(lambda: pending.done, LAST_COMMIT_S, "the commit")
            if pending.error is not None:
                raise pending.error
        except KmqError as err:
            logger().warning("not committed, so it comes again: %s", err)

    async def _ask(self, places: Iterable[tuple[str, int]], timeout: float | None) -> list[PartitionOffsets]:
        wanted = [self._find(place).place for place in places]
        if not wanted:
            return []
        pending = self._core.offsets(tuple(wanted), time.monotonic())
        self._driver.write()
        await self._wait_for(lambda: pending.done, timeout, "the offsets")
        return self._rows(pending, wanted)

    async def _wait_for(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not await self._driver.wait(is_ready, self.options.timeout_s if timeout is None else timeout):
            raise NotAnswered(f"timed out waiting for {what}: {self.describe()}")

    # --- what happens between records --------------------------------------------------------------------------------

    async def _came_back(self) -> None:
        """The application has come back for more: run callbacks, commit if that is due."""
        self._given = None
        core, now = self._core, time.monotonic()
        self._driver.use(now)
        self._ask_for_more()
        self._commit_if_due(now)
        self._run_callbacks()
        while core.holdings.events:
            await self._handle(core.holdings.events.popleft())
        if core.errors:
            raise core.errors.popleft()

    async def _handle(self, event: PartitionEvent) -> None:
        """Tell the application what has happened to partitions."""
        try:
            if event.places:
                await self._tell(event.kind, list(event.places))
        finally:
            if event.kind is Kind.REVOKED:
                if self.options.auto_commit:
                    await self._commit_last(event.places)
                self._core.revoked(event, time.monotonic())
                self._driver.write()

    async def _tell(self, kind: Kind, places: list[TopicPartition]) -> None:
        callback = self._callbacks[kind]
        if callback is not None and isawaitable(told := callback(places)):
            await told

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commit if the consumer commits by itself, give the partitions up, leave the group, close the connection."""
        self._given = None
        await self._close()

    async def _close(self) -> None:
        if self._driver.closed:
            return
        try:
            held = tuple(self._core.holdings.owned)
            if held and self.options.group_id:
                if self.options.auto_commit and self._core.failed is None:
                    await self._commit_last(held)
                await self._tell(Kind.REVOKED, list(held))
        finally:
            await self._driver.end()

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if kind is None:
            self._given = None  # the block has handled what it was given
        await self._close()


# --- the connection, and the tasks that keep it and the member alive -------------------------------------------------

_SLICE_S = 1.0  # longest wait without a look around
_LEAVE_S = 1.0  # longest wait until the broker has taken the last requests


class ConsumerLink(asyncio.Protocol):
    """Moves a core's bytes."""

    def __init__(self, core: ConsumerCore, address: Address) -> None:
        self.core, self.address = core, address
        self.closed = False
        self.discovers: tuple[str, ...] = ()
        self.used_at = time.monotonic()  # when the application last asked for records
        self._changed = asyncio.Event()  # set, and replaced, whenever something has come
        self._gone = asyncio.Event()  # there is no connection
        self._used = asyncio.Event()  # the application has come back
        self._transport: asyncio.Transport | None = None
        self._discover_at = 0.0
        self._attempts = 0
        self._is_resting = False  # the application has not come back for too long: no member until it does
        self._tasks: list[asyncio.Task[None]] = []

    # --- the application's tasks -------------------------------------------------------------------------------------

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Wait until `is_ready`; return False when the time is up. `fetches`: records are what is waited for.

        Raises the error that has ended the consumer.
        """
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
                self.core.fetch(now, max(left_s, 0.0))
            self.write()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _SLICE_S)):
                    await self._changed.wait()

    def use(self, now: float) -> None:
        """Note that the application has come back."""
        self.used_at = now
        if self._is_resting:
            self._is_resting = False
            self._used.set()

    def write(self) -> None:
        """Write the requests."""
        if self._transport is not None and (data := self.core.requests.take()):
            self._transport.write(data)

    def drop(self, reason: str) -> None:
        """Close the connection; the task makes another one."""
        self.core.lost(reason)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._gone.set()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def end(self) -> None:
        """Leave the group and close the connection."""
        if self.closed:
            return
        self.closed = True
        if self._transport is not None and self.core.is_managed:
            self.core.leave(time.monotonic())
            self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
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
                loop.create_task(self._keep_alive(), name="kmq-consumer-beat"),
            ]

    async def _keep_connected(self) -> None:
        while not self.closed and self.core.failed is None:
            if self._is_resting:
                self._used.clear()
                await self._used.wait()
            if await self._connect():
                await self._gone.wait()
            self._wake()
            await asyncio.sleep(backoff(self._attempts))
            self._attempts += 1

    async def _connect(self) -> bool:
        """Make one attempt. Returns True if there is a connection."""
        where, reason = "the broker", ""
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            if self.discovers or self.core.lacks_ends:
                await self._discover(host, port, token)
            if self.core.has_something_to_read:
                async with asyncio.timeout(CONNECT_S):
                    await self._open(host, port, token)
                return True
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        self.core.lost(reason)
        return False

    async def _open(self, host: str, port: int, token: str) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or host) if options.tls is not None else None
        transport, _ = await loop.create_connection(lambda: self, host, port, ssl=options.tls, server_hostname=name)
        self._gone.clear()
        transport.write(self.core.opening(token))
        self.core.connected()
        self._transport = transport

    async def _discover(self, host: str, port: int, token: str) -> bool:
        options = self.core.options
        found = await asyncio.to_thread(
            discover,
            self.discovers or self.core.topics,
            host,
            port,
            options.token or token,
            options.tls,
            options.server_hostname,
        )
        self._discover_at = time.monotonic() + DISCOVER_S
        return self.core.discovered(found)

    async def _keep_alive(self) -> None:
        """Beat, and notice a broker that does not answer, and an application that does not come back."""
        while not self.closed:
            await asyncio.sleep(min(1.0, self.core.options.session_s / 6))
            now = time.monotonic()
            if self._transport is None:
                continue
            if why := self.core.overdue(now):
                self.drop(why)
            self.core.beat(now)
            self.write()
            if self.core.is_managed and now - self.used_at > self.core.options.max_poll_interval_s:
                self._rest(now)
            elif self.discovers and now >= self._discover_at:
                await self._look_for_partitions()

    async def _look_for_partitions(self) -> None:
        with contextlib.suppress(OSError, KmqError):
            if await self._discover(*self.address()):
                self.drop("there are new partitions")

    def _rest(self, now: float) -> None:
        """Leave the group until the application comes back: others may be quicker."""
        logger().warning("left the group: no poll for %g s", self.core.options.max_poll_interval_s)
        self._is_resting = True
        self.core.leave(now)
        self.write()
        self.core.holdings.lose(tuple(self.core.holdings.owned))
        if self._transport is not None:
            self._transport.close()  # after what was written
            self._transport = None
        self.core.lost("left the group: no poll within max_poll_interval_s")
        self._gone.set()


__all__ = ["AsyncConsumer"]
