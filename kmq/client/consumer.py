"""`kmq.Consumer`: records from ordinary, blocking code.

    with kmq.Consumer("orders", group_id="billing") as consumer:
        for message in consumer:
            handle(message.key, message.value)
            consumer.commit()                      # everything given out so far; consumer.commit(message): up to this one

    with kmq.Consumer("orders", start="latest") as consumer:         # no group: all partitions, nothing is remembered
        for message in consumer.poll(max_records=100, timeout=5):
            print(message.offset, message.value)

Promise     At least once: what was not committed comes again, and nothing is skipped. No call waits for ever in silence,
            except iteration, which waits for records as long as it takes. After an outage a consumer goes on where it
            was, as the same member.
Threads     One thread at a time uses a consumer, and callbacks run in it, inside poll, iteration and close; on_revoke may
            commit. That thread reads and writes in its own calls: a second thread that reads while the application
            computes would wait for the interpreter at every read. The next batch waits in the socket meanwhile. A
            background thread looks in twice a session or more often: it beats, takes in what has come, and reconnects.
Locking     One lock guards the core and the socket. No thread waits while holding it. Callbacks run without it.
"""

import atexit
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

from kmq.client.connection import CONNECT_S, Address, Channel, address_of, backoff, local_consumer_address, open_socket
from kmq.client.consumer_calls import DISCOVER_S, FOR_EVER_S, LAST_COMMIT_S, ConsumerCalls, Offsets, discover
from kmq.client.consumer_options import PORT, ConsumerChoices, ConsumerOptions, logger
from kmq.client.consumer_protocol import ConsumerCore, Phase
from kmq.client.consumer_state import Kind, PartitionEvent
from kmq.client.failures import NotAnswered, Refused
from kmq.client.handling import DEFAULT_BACKOFF, OWN_TOPIC, Backoff, Rules
from kmq.client.lines import no_connection
from kmq.client.producer import Producer
from kmq.client.runner import Runner, Stop, local_producer, makes_producers, stopping
from kmq.config.values import KIB
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.refusals import find
from kmq.wire.replies import Nacked, PartitionOffsets
from kmq.wire.requests import TopicPartition

OnPlaces = Callable[[list[TopicPartition]], object]


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
        """`port`: a number, or a function that is called before each connection.

        on_assign: these partitions are read from now on.   on_revoke: they go to another member as soon as the callback
        returns; it may commit.   on_lost: they are gone already; without it on_revoke is called.
        """
        core = ConsumerCore(ConsumerOptions(**options))
        driver = ConsumerDriver(core, address_of(host, port))
        super().__init__(core, driver, driver.lock)
        self._make_producer = makes_producers(host, port, self.options)
        self._callbacks = {Kind.ASSIGNED: on_assign, Kind.REVOKED: on_revoke, Kind.LOST: on_lost or on_revoke}
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
        count = self._most(max_records)
        deadline = time.monotonic() + timeout
        while True:
            if self._driver.closed:
                raise KmqError("this consumer is closed")
            self._came_back()
            with self._lock:
                taken = self._core.holdings.buffer.collect(count)
                if taken:
                    self._given = taken
                    self._ask_for_more()
                    return taken
            if not self._wait_for_records(deadline - time.monotonic()):
                return []

    def __iter__(self) -> Iterator[Message]:
        """Yield messages one by one, waiting for the next one as long as it takes; until the consumer is closed."""
        while not self._driver.closed:
            self._came_back()
            with self._lock:
                chunks = self._core.holdings.buffer.chunks
                chunk = chunks[0] if chunks else None
                if chunk is not None:
                    self._ask_for_more()
            if chunk is None:
                self._wait_for_records(FOR_EVER_S)
                continue
            owned = chunk.owned
            for message in chunk.unread:
                if not chunk.deliveries:
                    owned.position = message.offset + 1
                self._given = message
                yield message
                if self._driver.is_due:
                    self._came_back()
            with self._lock:
                self._core.holdings.buffer.finish(chunk)

    def _ask_for_more(self) -> None:
        """Let the next batch come while the application works on this one."""
        self._core.fetch(time.monotonic(), 0.0)
        self._driver.write()

    def _wait_for_records(self, timeout_s: float) -> bool:
        self._must_read()
        return self._driver.wait(self._has_news, max(timeout_s, 0.0), fetches=True)

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
        """Hand every message to `handler` and commit what it has handled, until `stop` is set or the consumer closed.

        SIGTERM sets `stop` too, if this is the main thread and nobody else handles that signal. Elsewhere a program that
        is sent SIGTERM must set `stop` itself: else it dies, and its partitions wait until its session has ended.

        A message whose handler raises is tried again, at most `max_retries` times; the other partitions go on. Then, or
        if it raises kmq.Permanent or one of `permanent`, the message goes to the topic `dlq`; None: the exception ends
        the run. `producer` makes the producer for dead letters, given its window; default: to port 5673 of the same
        host, over TLS 5443. A consumer at another port than 5674 or 5444 must name it.
        """
        rules, make = Rules(max_retries, backoff, dlq, permanent), producer or self._make_producer
        rules.check(handler, knows_producers=make is not None)
        with stopping(stop) as event:
            Runner(self, rules, make or local_producer).run(handler, event)  # without letters nobody is asked

    # --- calls that wait ---------------------------------------------------------------------------------------------
    # Each waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered.

    def connect(self, timeout: float | None = None) -> list[TopicPartition]:
        """Wait until the broker has said which partitions this consumer reads, and return them."""
        self._must_read()
        self._wait_for(lambda: self._core.phase is Phase.READING, timeout, "an assignment")
        return self.assignment()

    def position(self, place: tuple[str, int], timeout: float | None = None) -> int:
        """Return the offset of the next message of a partition. Waits while the broker looks for it."""
        owned = self._find(place)
        self._wait_for(lambda: owned.is_known, timeout, f"the position in {owned.place}")
        return owned.position

    def committed(self, place: tuple[str, int], timeout: float | None = None) -> int | None:
        """Return the next offset that the group has committed for a partition; None: nothing is committed."""
        return self._ask([place], timeout)[0].committed

    def beginning_offsets(
        self, places: Iterable[tuple[str, int]], timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset of the first record that is stored of each partition."""
        return {row.place: row.start for row in self._ask(places, timeout)}

    def end_offsets(self, places: Iterable[tuple[str, int]], timeout: float | None = None) -> dict[TopicPartition, int]:
        """Return the offset behind the last record of each partition."""
        return {row.place: row.end for row in self._ask(places, timeout)}

    def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None:
        """Commit and wait until that is durable: all that was given out, or up to a message, or the next offsets.

        Raises Refused: `fenced` if the partition is no longer this member's, so another one handles its records.
        """
        pending = self._commit(offsets)
        self._wait_for(lambda: pending.done, timeout, "the commit")
        if pending.error is not None:
            raise pending.error

    def nack(self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None) -> Nacked:
        """Give a message back: the group is given it again after `delay` seconds, before new ones. Durable on return.

        Commits may go beyond it. `.deliveries` of what is returned says how often it was delivered; after the topic's
        max_deliveries it becomes a dead letter instead, with `reason`, and `.letter` says where that is.
        Raises Refused: `fenced` if the partition is no longer this member's, `out_of_range` if the message is gone.
        """
        pending = self._nack(message, delay, reason)
        self._wait_for(lambda: pending.done, timeout, "the answer to a nack")
        return self._nacked(pending)

    def _commit_last(self, places: Iterable[TopicPartition]) -> None:
        """Commit what was handled of these partitions, before others read them."""
        pending = self._commit_handled(places)
        try:
            self._wait_for(lambda: pending.done, LAST_COMMIT_S, "the commit")
            if pending.error is not None:
                raise pending.error
        except KmqError as err:
            logger().warning("not committed, so it comes again: %s", err)

    def _ask(self, places: Iterable[tuple[str, int]], timeout: float | None) -> list[PartitionOffsets]:
        """Return the offsets of these partitions, in this order."""
        wanted = [self._find(place).place for place in places]
        if not wanted:
            return []
        with self._lock:
            pending = self._core.offsets(tuple(wanted), time.monotonic())
            self._driver.write()
        self._wait_for(lambda: pending.done, timeout, "the offsets")
        return self._rows(pending, wanted)

    def _wait_for(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not self._driver.wait(is_ready, self.options.timeout_s if timeout is None else timeout):
            raise NotAnswered(f"timed out waiting for {what}: {self.describe()}")

    # --- what happens between records --------------------------------------------------------------------------------

    def _came_back(self) -> None:
        """The application has come back for more: run callbacks, commit if that is due."""
        self._given = None
        driver, core, now = self._driver, self._core, time.monotonic()
        driver.used_at, driver.is_due = now, False
        with self._lock:
            self._ask_for_more()
        self._commit_if_due(now)
        self._run_callbacks()
        while core.holdings.events:
            self._handle(core.holdings.events.popleft())
        if core.errors:
            raise core.errors.popleft()

    def _handle(self, event: PartitionEvent) -> None:
        """Tell the application what has happened to partitions."""
        callback = self._callbacks[event.kind]
        try:
            if callback is not None and event.places:
                callback(list(event.places))
        finally:
            if event.kind is Kind.REVOKED:
                if self.options.auto_commit:
                    self._commit_last(event.places)
                with self._lock:
                    self._core.revoked(event, time.monotonic())
                    self._driver.write()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit if the consumer commits by itself, give the partitions up, leave the group, close the connection."""
        self._given = None
        self._close()

    def _close(self) -> None:
        if self._driver.closed:
            return
        atexit.unregister(self._at_exit)
        try:
            held = tuple(self._core.holdings.owned)
            if held and self.options.group_id:
                if self.options.auto_commit and self._core.failed is None:
                    self._commit_last(held)
                callback = self._callbacks[Kind.REVOKED]
                if callback is not None:
                    callback(list(held))
        finally:
            self._driver.end()

    def _at_exit(self) -> None:
        """Leave the group at the end of a program that has not closed its consumer. Nothing is committed."""
        self._driver.end()

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._given = None  # the block has handled what it was given
        self._close()


# --- the socket, and the thread that keeps it alive while the application works --------------------------------------

_RECEIVE_BYTES = 256 * KIB
_SLICE_S = 1.0  # longest wait without a look around
_LEAVE_S = 1.0  # longest wait until the broker has taken the last requests
_JOIN_S = 5.0


class ConsumerDriver:
    """Moves a core's bytes."""

    def __init__(self, core: ConsumerCore, address: Address) -> None:
        self.core, self.address = core, address
        self.lock = threading.RLock()
        self.closed = False
        self.used_at = time.monotonic()  # when the application last asked for records
        self.is_due = False  # the background thread wants the application to look around
        self.discovers: tuple[str, ...] = ()  # topics whose partitions are all to be read, without a group
        self._discover_at = 0.0
        self._is_resting = False  # the application has not come back for too long: no member until it does
        self._channel = Channel(core.receive, lambda _: core.requests.take(), _RECEIVE_BYTES)
        self._dialing = threading.Lock()
        self._dial_at = 0.0  # not before, because an attempt has just failed
        self._waiting = 0  # threads of the application that attend to the socket
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the application's thread ------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Attend until `is_ready`; return False when the time is up. `fetches`: records are what is waited for.

        Raises the error that has ended the consumer.
        """
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
                self._pause(min(deadline - now, _SLICE_S))
        finally:
            self._waiting -= 1

    def _turn(self, is_ready: Callable[[], bool], left_s: float, fetches: bool) -> bool:
        """Do what can be done now. Returns True if there is more to wait for."""
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
                self.core.fetch(now, max(left_s, 0.0))
                self.write()
        return True

    def _pause(self, timeout_s: float) -> None:
        """Wait for the socket, or until another attempt to connect."""
        if not self._channel.is_open:
            time.sleep(min(timeout_s, max(0.001, self._dial_at - time.monotonic())))
        else:
            with contextlib.suppress(OSError, ValueError):  # closed by another thread
                self._channel.poll(timeout_s)

    # --- with the lock held ------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Read what has come, beat if that is due, and write."""
        if self._channel.is_open and (why := self._channel.read()):
            self.drop(why)
        if self._channel.is_open:
            if why := self.core.overdue(now):
                self.drop(why)
            self.core.beat(now)
            self.write()

    def write(self) -> None:
        """Write the requests, as far as the kernel accepts them."""
        if why := self._channel.write():
            self.drop(why)

    def drop(self, reason: str) -> None:
        """Close the connection; the next turn makes another one."""
        self.core.lost(reason)
        self._channel.drop()

    # --- connections -------------------------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        """Make one attempt, unless one has just failed, or nothing is to be read."""
        if time.monotonic() < self._dial_at or not self._dialing.acquire(blocking=False):
            return
        try:
            if not self.closed and self.core.failed is None:
                self._dial(min(timeout_s, CONNECT_S))
        finally:
            self._dialing.release()

    def _dial(self, timeout_s: float) -> None:
        where, reason = "the broker", ""
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            if self.discovers or self.core.lacks_ends:
                self._discover(host, port, token)
            if self.core.has_something_to_read:
                options = self.core.options
                self._open(open_socket(host, port, options.tls, options.server_hostname, timeout_s), token)
                return
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        with self.lock:
            self.core.lost(reason)
        self._dial_at = time.monotonic() + backoff(self._channel.attempts)
        self._channel.attempts += 1

    def _open(self, sock: socket.socket, token: str) -> None:
        with self.lock:
            try:
                sock.sendall(self.core.opening(token))
            except OSError:
                sock.close()
                raise
            self._channel.open(sock)
            self.core.connected()

    def _discover(self, host: str, port: int, token: str) -> bool:
        """Ask for partitions and ends. Returns True if there are partitions that are not read yet."""
        options = self.core.options
        found = discover(
            self.discovers or self.core.topics, host, port, options.token or token, options.tls, options.server_hostname
        )
        self._discover_at = time.monotonic() + DISCOVER_S
        with self.lock:
            return self.core.discovered(found)

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
            self._look_for_partitions()
        if self._waiting:
            return
        if not self._channel.is_open and not self._is_resting and self.core.connections:
            self._connect(CONNECT_S)
        now = time.monotonic()
        with self.lock:
            self.is_due = True
            self.look(now)
            if self.core.is_managed and now - self.used_at > self.core.options.max_poll_interval_s:
                self._rest(now)

    def _look_for_partitions(self) -> None:
        with contextlib.suppress(OSError, KmqError):
            if self._discover(*self.address()):
                with self.lock:
                    self.drop("there are new partitions")

    def _rest(self, now: float) -> None:
        """Leave the group until the application comes back: others may be quicker."""
        if self._channel.is_open:
            logger().warning("left the group: no poll for %g s", self.core.options.max_poll_interval_s)
            self.core.leave(now)
            self.write()
            self.core.holdings.lose(tuple(self.core.holdings.owned))
            self.drop("left the group: no poll within max_poll_interval_s")
        self._is_resting = True

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the group and close the connection."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self._channel.is_open:
                self.core.leave(time.monotonic())
                self.write()
                if self.core.is_managed:
                    self._channel.linger(_LEAVE_S)
            self.core.fail(NotAnswered("this consumer is closed"))
            self.drop("this consumer is closed")
        self._wake.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._channel.close()


__all__ = ["Consumer"]
