"""`kmq.Consumer`: records from ordinary, blocking code.

    with kmq.Consumer("orders", group_id="billing") as consumer:
        for message in consumer:
            handle(message.key, message.value)
            consumer.commit()                      # everything handed out so far; consumer.commit(message): up to this
            one

    with kmq.Consumer("orders", start="latest") as consumer:         # no group: all partitions, nothing is remembered
        for message in consumer.poll(max_records=100, timeout=5):
            print(message.offset, message.value)

Promise     At least once: a message that was not committed is delivered again, and no message is skipped. Every call
            has a timeout and says what it waited for, except iteration, which waits for records without a limit. After
            an outage a consumer continues at its positions, as the same member.
Threads     One thread at a time uses a consumer. Callbacks run in that thread, inside poll, iteration and close;
            on_revoke may commit. The thread reads and writes the socket in its own calls, because a second thread that
            reads while the application computes would wait for the interpreter at every read. Meanwhile the next batch
            waits in the socket. A background thread runs at least twice per session: it beats, reads replies, and
            reconnects.
Locking     One lock guards the core and the socket. No thread waits while holding it. Callbacks run without it.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

from kmq.client.connection import (
    CONNECT_S,
    Address,
    Channel,
    ServerAddress,
    address_of,
    local_consumer_address,
    open_socket,
)
from kmq.client.consumer_calls import LEAVE_S, SLICE_S, ConsumerCalls, Mover, Offsets, OnPlaces, Result, at_once
from kmq.client.consumer_options import PORT, ConsumerChoices, ConsumerOptions, logger
from kmq.client.consumer_protocol import ConsumerCore
from kmq.client.handling import DEFAULT_BACKOFF, OWN_TOPIC, Backoff, Rules
from kmq.client.options import choose, document
from kmq.client.producer import Producer
from kmq.client.runner import Stop, local_producer, makes_producers, run_handler
from kmq.config.values import KIB
from kmq.message.message import Message
from kmq.sending.failures import NotAnswered
from kmq.sending.window import backoff
from kmq.wire.replies import Nacked
from kmq.wire.requests import TopicPartition


class Consumer(ConsumerCalls):
    """Reads topics. `options` are the fields of ConsumerOptions (kmq/client/consumer_options.py)."""

    _driver: "ConsumerDriver"

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
        """`host`: one host, or those of a shard, `a:5674,b:5674,c:5674`, which are tried in turn until one serves.

        `port`: the port of a host without one; a number, or a function that is called before each connection.
        on_assign: the consumer reads these partitions from now on.   on_revoke: they go to another member when the
        callback
        returns; it may commit.   on_lost: they are gone already; without it on_revoke is called.
        """
        driver = ConsumerDriver(ConsumerCore(choose(Consumer, ConsumerOptions, options)), address_of(host, port))
        super().__init__(driver, on_assign, on_revoke, on_lost)
        self._make_producer = makes_producers(host, port, self.options)
        atexit.register(self._at_exit)
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
    ) -> "Consumer":
        """Return a consumer of the broker of this directory's settings (environment, kmq.toml)."""
        local_consumer_address()
        consumer = cls(*topics, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost, **options)
        consumer._driver.address = local_consumer_address
        consumer._make_producer = local_producer
        return consumer

    # --- records -----------------------------------------------------------------------------------------------------

    def poll(self, max_records: int | None = None, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_records` messages as soon as there are any, or none after `timeout` seconds."""
        return at_once(self._poll(max_records, timeout))

    def __iter__(self) -> Iterator[Message]:
        """Yield messages one by one until the consumer is closed. Waits for the next message without a limit."""
        while (chunk := at_once(self._next_chunk())) is not None:
            owned = chunk.owned
            for message in chunk.unread:
                if not chunk.deliveries:
                    if message.offset >= owned.handed_out:
                        self._hand_out(owned, message.offset + 1)
                    owned.position = message.offset + 1
                self._given = message
                yield message
                if self._driver.is_due:
                    at_once(self._came_back())
            with self._lock:
                self._core.holdings.finish(chunk)

    def run(
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
        """Pass each message to `handler` and commit handled messages, until `stop` is set or the consumer is closed.

        SIGTERM sets `stop` too, if this is the main thread and the signal has no other handler. Elsewhere a program
        that is sent SIGTERM must set `stop` itself: else it dies, and its partitions wait until its session has ended.

        A message whose handler raises is retried at most `max_retries` times; other partitions are not held up. After
        that, or at once for kmq.Permanent or one of `permanent`, the message goes to the topic `dlq`; with None the
        exception ends the run. `producer` makes the producer for dead letters, given its window; default: port 5673 of
        the same host, over TLS 5443. A consumer at another port than 5674 or 5444 must pass `producer`.
        """
        rules = Rules(max_retries, backoff, dlq, permanent)
        at_once(run_handler(self, handler, rules, producer or self._make_producer, stop))

    # --- calls that wait ---------------------------------------------------------------------------------------------
    # Each waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered.

    def connect(self, timeout: float | None = None) -> list[TopicPartition]:
        """Wait until the broker has said which partitions this consumer reads, and return them."""
        return at_once(self._connect(timeout))

    def position(self, place: tuple[str, int], timeout: float | None = None) -> int:
        """Return the offset of the next message of a partition. Waits while the broker looks for it."""
        return at_once(self._position(place, timeout))

    def committed(self, place: tuple[str, int], timeout: float | None = None) -> int | None:
        """Return the next offset that the group has committed for a partition; None: nothing is committed."""
        return at_once(self._ask([place], timeout))[0].committed

    def beginning_offsets(
        self, places: Iterable[tuple[str, int]], timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset of the first record that is stored of each partition."""
        return {row.place: row.start for row in at_once(self._ask(places, timeout))}

    def end_offsets(self, places: Iterable[tuple[str, int]], timeout: float | None = None) -> dict[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        return {row.place: row.end for row in at_once(self._ask(places, timeout))}

    def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None:
        """Commit and wait until it is durable: all that was handed out, or up to a message, or these next offsets.

        Raises Refused: `fenced` if the partition now belongs to another member, which handles its records.
        """
        at_once(self._commit(offsets, timeout))

    def nack(self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None) -> Nacked:
        """Give a message back: the group gets it again after `delay` seconds, before new messages. Durable on return.

        Commits of later messages do not commit it. The result has `.deliveries`, how often it was delivered. After the
        topic's max_deliveries it becomes a dead letter instead, with `reason`, and `.letter` says where that is.
        Raises Refused: `fenced` if the partition is no longer this member's, `out_of_range` if the message is gone.
        """
        return at_once(self._nack(message, delay, reason, timeout))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit if auto_commit is on, give up the partitions, leave the group, close the connection."""
        self._given = None
        self._end()

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        at_once(self._close())

    def _at_exit(self) -> None:
        """Leave the group at the end of a program that has not closed its consumer. Nothing is committed."""
        at_once(self._driver.end())

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._given = None  # the block has handled all that it was given
        self._end()


document(Consumer, ConsumerOptions)


# --- the socket, and the thread that keeps it alive while the application works --------------------------------------

_RECEIVE_BYTES = 256 * KIB
_JOIN_S = 5.0


class ConsumerDriver(Mover):
    """Moves bytes between a core and its connection, in blocking calls."""

    def __init__(self, core: ConsumerCore, address: Address) -> None:
        super().__init__(core, address, threading.RLock())
        self.is_due = False  # the background thread wants the application's thread to look at the socket
        self._channel = Channel(core.receive, lambda _: core.requests.take(), _RECEIVE_BYTES)
        self._dialing = threading.Lock()
        self._dial_at = 0.0  # earliest time of the next attempt, because one has just failed
        self._waiting = 0  # threads of the application that attend to the socket
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the application's thread ------------------------------------------------------------------------------------

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        self._start()
        deadline = time.monotonic() + timeout_s
        self._waiting += 1
        try:
            while True:
                now = time.monotonic()
                if not self._turn(is_ready, deadline - now, fetches):
                    return True
                if now >= deadline:
                    return False
                self._pause(min(deadline - now, SLICE_S))
        finally:
            self._waiting -= 1

    def _turn(self, is_ready: Callable[[], bool], left_s: float, fetches: bool) -> bool:
        """Do what can be done without waiting. Return True if the caller has to wait."""
        if not self._channel.is_open:
            self._connect(max(left_s, 0.1))
        with self.lock:
            self._is_resting = False
            self.used_at = now = time.monotonic()
            self.look(now)
            if is_ready() or (self.closed and fetches):
                return False
            if self.core.failed is not None:
                raise self.core.failed
            if fetches:
                self.core.fetch(now, max(left_s, 0.001))  # not 0: the application has no records left
                self.write()
        return True

    def _pause(self, timeout_s: float) -> None:
        """Wait for the socket, or until another attempt to connect."""
        if not self._channel.is_open:
            time.sleep(min(timeout_s, max(0.001, self._dial_at - time.monotonic())))
        else:
            with contextlib.suppress(OSError, ValueError):  # closed by another thread
                self._channel.poll(timeout_s)

    async def finish(self, returned: object) -> None:
        """Return at once: a callback of blocking code is done when it returns."""

    async def aside(self, work: Callable[[], Result]) -> Result:
        return work()

    def use(self, now: float) -> None:
        self.used_at, self.is_due = now, False

    # --- with the lock held ------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Read replies, beat if that is due, and write."""
        if self._channel.is_open and (why := self._channel.read()):
            self.drop(why)
        if self._channel.is_open:
            self.keep_alive(now)

    def write(self) -> None:
        """Write the requests, as far as the kernel accepts them."""
        if why := self._channel.write():
            self.drop(why)

    def drop(self, reason: str, is_written: bool = False) -> None:
        """Close the connection; the next turn opens another one."""
        self.core.lost(reason)
        self._channel.drop()

    # --- connections -------------------------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        """Make one attempt, unless one has just failed, or there is nothing to read."""
        if time.monotonic() < self._dial_at or not self._dialing.acquire(blocking=False):
            return
        try:
            if not self.closed and self.core.failed is None and not at_once(self._attempt(min(timeout_s, CONNECT_S))):
                self._dial_at = time.monotonic() + backoff(self._channel.attempts)
                self._channel.attempts += 1
        finally:
            self._dialing.release()

    async def _open(self, server: ServerAddress, timeout_s: float) -> None:
        options = self.core.options
        sock = open_socket(server.host, server.port, options.tls, options.server_hostname, timeout_s)
        with self.lock:
            try:
                sock.sendall(self.core.opening(server.token))
            except OSError:
                sock.close()
                raise
            self._channel.open(sock)
            self.core.connected()

    # --- the background thread ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kmq-consumer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        tick_s = min(1.0, self.core.options.session_s / 6)
        while not self._wake.wait(tick_s):
            if self.core.failed is not None:
                return
            try:
                self._watch()
            except Exception:
                logger().exception("the consumer's background thread goes on after an error")

    def _watch(self) -> None:
        """Look for new partitions, and keep the member alive while the application works."""
        now = time.monotonic()
        if self.discovers and now >= self._discover_at and self._channel.is_open:
            at_once(self._look_for_partitions())
        if self._waiting:
            return
        if not self._channel.is_open and not self._is_resting and self.core.connections:
            self._connect(CONNECT_S)
        now = time.monotonic()
        with self.lock:
            self.is_due = True
            self.look(now)
            self._rest_if_idle(now)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self._channel.is_open:
                self.core.leave(time.monotonic())
                self.write()
                if self.core.is_managed:
                    self._channel.linger(LEAVE_S)
            self.core.fail(NotAnswered("this consumer is closed"))
            self.drop("this consumer is closed")
        self._wake.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._channel.close()


__all__ = ["Consumer"]
