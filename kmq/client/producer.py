"""`kmq.Producer`: acknowledged messages from ordinary, blocking code; any number of threads may share one.

    with kmq.Producer(port=5673) as producer:
        seq = producer.send("orders", b"one", key="42").result()         # on disk, as this seq
        producer.send("orders", b"two", callback=lambda d: print(d.seq, d.error))
        producer.send_many("orders", [b"three", b"four"])
                                                              # the end of the block waits for all replies, or raises

Promise     No call waits for ever in silence: each has a timeout, whose error names what the call waited for, and a
            producer without replies for stall_s reports it (on_stall). The error of a failed message is raised by its
            result(), or passed to its callback. An error that was shown in neither way is raised by flush() and
            close().
Threads     Callers that wait for replies and one background thread take turns at the socket. A caller that sends and waits
            does both itself, without a switch of threads. The background thread makes connections, and attends to the
            socket when no caller does. Callbacks run in the thread that attends, one after the other, in order; a
            callback that blocks holds up the others.
Locking     One lock guards the core and the channel; no thread waits while holding it. Callbacks and reports run
            without it.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from typing import Unpack

from kmq.client.connection import Address, Channel, Greeted, address_of, dial, local_address, logger
from kmq.client.options import Choices, Options, choose, document
from kmq.client.producer_core import Overdue, ProducerCore, as_list
from kmq.errors import KmqError
from kmq.message.text import Headers, as_bytes, make_routing_key
from kmq.sending.delivery import Delivery as CoreDelivery
from kmq.sending.delivery import in_parts
from kmq.sending.failures import NotAnswered
from kmq.sending.window import backoff


class Delivery(CoreDelivery):
    """A message, or a list, that a Producer has queued."""

    __slots__ = ("_driver",)
    _driver: "ProducerDriver"

    def results(self, timeout: float | None = None) -> list[int]:
        """Wait until all messages are on disk. Returns their seqs; 0: stored too long ago for the seq to be known."""
        self.result(timeout)
        return self.seqs

    def result(self, timeout: float | None = None) -> int:
        """Wait until all messages are on disk. Returns the (first) seq, or raises the first error."""
        self._driver.wait(lambda: self.done, timeout, "the reply to this message")
        if self.error is not None:
            self.seen = self._driver.has_raised = True
            raise self.error
        return self.seq


class Producer:
    """Sends acknowledged messages. `options` are the fields of Options (kmq/client/options.py)."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        """`host`: one host, or those of a shard, `a:5673,b:5673,c:5673`, which are tried in turn until one serves.

        `port`: the port of a host without one; a number, or a function that is called before each connection.
        """
        self._start(address_of(host, port), choose(Producer, Options, options))

    @classmethod
    def local(cls, address: Address = local_address, **options: Unpack[Choices]) -> "Producer":
        """Return a producer for the broker of this directory's settings (environment, kmq.toml).

        `address`: where the broker's own processes find its ingress.
        """
        address()
        producer = cls.__new__(cls)
        producer._start(address, choose(Producer.local, Options, options))
        return producer

    def _start(self, address: Address, options: Options) -> None:
        self.options = options
        self._core = ProducerCore(options)
        self._window = self._core.window
        self._driver = ProducerDriver(self._core, address)
        self._lock = self._driver.lock
        atexit.register(self._at_exit)

    @property
    def name(self) -> str:
        """Return the name by which the broker knows this producer; "" without producer ids."""
        return self._core.ids.name

    @property
    def unanswered(self) -> int:
        """Return how many messages have no outcome yet."""
        return self._window.unanswered

    @property
    def connections(self) -> int:
        """Return how many connections were made so far."""
        return self._core.connections

    @property
    def last_id(self) -> int:
        """Return the id before the next generated one.

        After connecting without first_id, and before the first message, it is the last id that the broker has stored.
        """
        return self._core.ids.last

    @property
    def duplicates(self) -> int:
        """Return how many messages were sent again although the broker had stored them already."""
        return self._core.duplicates

    def connect(self, timeout: float | None = None) -> int:
        """Wait for the first connection. Returns the maximum bytes of a line."""
        self._driver.wait(lambda: self._core.connections > 0, timeout, "a connection")
        self._raise(self._core.failed)
        return self._core.max_line

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        id: str | int | None = None,
        headers: Headers | None = None,
        ts: float | None = None,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue one message; waits only while the window is full. `callback` is called with the delivery.

        A payload of None is a tombstone, text is sent as UTF-8. Without `partition` the key decides; without either,
        partitions take turns. Raises TypeError, which names the parameter, for anything else.
        """
        delivery = Delivery(callback)
        core, driver = self._core, self._driver
        delivery._driver = driver
        if key is None and partition is None and topic.__class__ is str:
            routing_key = core.routing_keys[topic]
        else:
            routing_key = make_routing_key(topic, key, partition)
        with self._lock:
            if self._window.is_full or core.failed or driver.closed:
                driver.wait_for_room(timeout)
            core.add(delivery, routing_key, payload, id, headers, ts)
            if driver.resting or not self._window.waits_for_reply:
                driver.queued()
        return delivery

    def send_many(
        self,
        topic: str,
        payloads: Iterable[bytes | str | None],
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        ts: float | None = None,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue a list as one delivery, with generated ids, for a fraction of the cost of as many sends.

        A list that is longer than max_in_flight is queued in parts, each as soon as there is room for it.
        """
        payloads = as_list(payloads, self.options)
        delivery = Delivery(callback)
        routing_key = make_routing_key(topic, key, partition)

        def add(part: CoreDelivery, at: int, end: int) -> None:
            self._core.add_many(part, routing_key, payloads[at:end], ts)

        return self._queue(delivery, len(payloads), add, timeout)

    def send_lines(
        self,
        lines: bytes,
        *,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue whole lines `routing_key|ts|id|payload` as they are: with producer= or window= the ids are your own."""
        lines = lines if type(lines) is bytes else as_bytes(lines, "lines")
        count = lines.count(b"\n")
        if lines and not lines.endswith(b"\n"):
            raise ValueError("lines: each must end with a newline")
        delivery = Delivery(callback)
        delivery.may_be_stored = True
        each = lines.split(b"\n") if count > self.options.max_in_flight else []

        def add(part: CoreDelivery, at: int, end: int) -> None:
            some = b"\n".join([*each[at:end], b""]) if each else lines
            self._core.add_lines(part, some, end - at)

        return self._queue(delivery, count, add, timeout)

    def _queue(
        self, delivery: Delivery, count: int, add: Callable[[CoreDelivery, int, int], None], timeout: float | None
    ) -> Delivery:
        """Queue `count` messages as one delivery. `add` queues some of them, from one place to another."""
        delivery._driver = self._driver
        for part, at, end in in_parts(delivery, count, self.options.max_in_flight):
            with self._lock:
                try:
                    self._driver.wait_for_room(timeout)
                except NotAnswered as err:
                    raise NotAnswered(f"{err}; {at:,} of these {count:,} messages were sent before") from None
                add(part, at, end)
                self._driver.queued()
        return delivery

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every message has its reply. Raises the error that ended the producer, or the first unseen one."""
        self._driver.wait(lambda: not self._window.unanswered, timeout, "the replies to all messages")
        with self._lock:
            error = self._core.failed or self._core.window.unseen_error()
        self._raise(error)

    def _raise(self, error: KmqError | None) -> None:
        if error is not None:
            self._driver.has_raised = True
            raise error

    def close(self, timeout: float | None = None) -> None:
        """Flush and end, even if the flush times out: messages without a reply then fail, though they may be stored."""
        if self._driver.closed:
            return
        try:
            self.flush(timeout)
        finally:
            self.abort()

    def _at_exit(self) -> None:
        """Close the producer at the end of a program that has not closed it."""
        has_raised = self._driver.has_raised
        try:
            self.close()
        except KmqError as err:
            if not has_raised:
                logger().error("not closed, and at exit: %s", err)

    def abort(self) -> None:
        """End now; messages without a reply fail."""
        atexit.unregister(self._at_exit)
        self._driver.end()

    def __enter__(self) -> "Producer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


document(Producer, Options)


# --- threads and the socket ------------------------------------------------------------------------------------------

_TICK_S = 0.002  # how long callers may leave the socket alone before the background thread attends to it
_REST_S = 0.05  # how long the background thread stays at the socket when nothing is left to wait for
_BUSY_TICK_S = 0.01  # the same while callers do attend: each check costs them a switch of threads
_LINGER_SLACK_S = 0.0005  # added to a wait for linger_ms, so that the time is surely up afterwards
_JOIN_S = 5.0  # longest time that an attempt to connect takes


class Unlocked:
    """`with unlocked:` releases a lock that the caller holds, and acquires it again afterwards."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *error: object) -> None:
        self._lock.acquire()


class ProducerDriver:
    """Moves a core's bytes. `lock` must be held for everything except wait, end and the constructor."""

    def __init__(self, core: ProducerCore, address: Address) -> None:
        self.core, self.address = core, address
        self.lock = threading.Lock()
        self.closed = False
        self.resting = False  # the background thread waits for `_work`
        self.has_raised = False  # an error was raised to a caller
        self._unlocked = Unlocked(self.lock)
        self._changed = threading.Condition(self.lock)  # for callers that wait
        self._work = threading.Condition(self.lock)  # for the background thread
        self._waiting = 0  # callers that wait for `_changed`
        self._attending = 0  # ident of the thread that attends to the socket; 0: none
        self._turns = 0  # how often callers have attended
        self._busy = False  # callers have attended lately
        self._channel = Channel(core.receive, core.take)
        self._overdue = Overdue(core, logger().warning)
        self._thread = threading.Thread(target=self._run, name="kmq-producer", daemon=True)
        self._thread.start()

    # --- callers -----------------------------------------------------------------------------------------------------

    def queued(self) -> None:
        """Write the messages just queued, as far as they should go now."""
        self._write()
        if self.resting:
            self.resting = False
            self._work.notify()

    def wait_for_room(self, timeout: float | None) -> None:
        """Wait until a message or a list may be queued; the lock is released meanwhile."""
        core = self.core
        if core.window.is_full:
            self._wait_locked(lambda: core.window.is_half_free, timeout, "room among the messages in flight")
            core.window.filling = True
        if core.failed is not None:
            self.has_raised = True
            raise core.failed
        if self.closed:
            raise KmqError("this producer is closed")

    def wait(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `is_ready`, or until the producer has ended. Raises NotAnswered when the time is up."""
        with self.lock:
            self._wait_locked(is_ready, timeout, what)

    def _wait_locked(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait, attending to the socket unless another thread does."""
        if is_ready():
            return
        core, me = self.core, threading.get_ident()
        deadline = time.monotonic() + (core.options.timeout_s if timeout is None else timeout)
        while not is_ready() and core.failed is None and not self.closed:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise NotAnswered(f"timed out waiting for {what}: {core.describe(now)}")
            if core.window.queue:
                core.window.hurry = True
                self._write()
            if self._channel.is_open and self._attending in (0, me):
                self._turns += 1
                self._attend(left)
            else:
                self._waiting += 1
                self._changed.wait(min(left, self._overdue.period_s))
                self._waiting -= 1
            if self._overdue.is_due(now):
                self._look()

    def end(self) -> None:
        """Close the connection; messages without a reply fail."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self.core.failed is None:
                self.core.fail(NotAnswered("the producer was closed before the reply came"))
            self._drop()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._call_back()

    # --- the socket --------------------------------------------------------------------------------------------------

    def _attend(self, timeout_s: float) -> None:
        """Read what arrives within that time, and run callbacks. The lock is released meanwhile."""
        before, self._attending = self._attending, threading.get_ident()
        channel = self._channel
        try:
            with self._unlocked:
                has_events = channel.poll(min(timeout_s, self._overdue.period_s))
            if has_events and channel.is_open:
                if why := channel.read():
                    self._lose(why)
                elif channel.has_output or self.core.window.queue:
                    self._write()
            if self.core.window.done:
                with self._unlocked:
                    self._call_back()
        finally:
            self._attending = before
            if self._waiting:
                self._changed.notify_all()

    def _call_back(self) -> None:
        """Call the callbacks of finished messages, in order. Only the thread that attends calls this."""
        done = self.core.window.done
        while done:
            delivery = done.popleft()
            try:
                assert delivery.callback is not None
                delivery.callback(delivery)
            except Exception:
                logger().exception("a delivery callback failed")

    def _look(self) -> None:
        """Let expired messages fail, report a stall, and leave a broker that is silent for too long."""
        if text := self._overdue.look():
            with self._unlocked:
                self._overdue.report(text)
        if self._channel.is_open and (why := self.core.silent()):
            self._lose(why)

    def _write(self) -> None:
        if why := self._channel.write():
            self._lose(why)

    def _lose(self, reason: str) -> None:
        self.core.lost(reason)
        self._drop()

    def _drop(self) -> None:
        """Drop the connection, and wake all waiting threads."""
        self._channel.drop()
        self.resting = False
        self._work.notify()
        self._changed.notify_all()

    # --- the background thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.lock:
            while not self.closed and self.core.failed is None:
                if self._channel.is_open:
                    self._help()
                else:
                    self._connect()
            self._changed.notify_all()
            while self._attending:  # the attending caller notices the end within _overdue.period_s
                self._changed.wait(self._overdue.period_s)
            self._channel.close()
        self._call_back()

    def _connect(self) -> None:
        """Make one attempt, and pause if it failed. The lock is released meanwhile."""
        greeted, reason = None, ""
        try:
            with self._unlocked:
                greeted = dial(self.address, self.core)
            if not self.closed:
                self.core.greeted(greeted.greeting)
        except KmqError as err:
            reason = str(err)
        if self.core.connected and greeted is not None:
            self._channel.open(greeted.sock)
            self._write()
            self._changed.notify_all()
        else:
            self._not_connected(greeted, reason)

    def _not_connected(self, greeted: Greeted | None, reason: str) -> None:
        if greeted is not None:
            greeted.sock.close()
        self.core.lost(reason)
        self._look()
        self._changed.notify_all()
        if self.core.window.done:
            with self._unlocked:
                self._call_back()
        if not self.closed:
            self._work.wait(backoff(self._channel.attempts))
            self._channel.attempts += 1

    def _help(self) -> None:
        """Attend to the socket while no caller does. The lock is released meanwhile."""
        core, turns = self.core, self._turns
        if not core.window.unanswered and not self._busy:
            if self._overdue.is_said:  # its end is logged before this thread rests
                self._look()
                return
            self.resting = True
            self._work.wait()
            return
        self._work.wait(_BUSY_TICK_S if self._busy else _TICK_S)
        self._busy = bool(self._attending) or turns != self._turns
        if core.window.filling and core.window.queue:  # the caller that was filling the window has stopped
            core.window.hurry = True
            self._write()
        if not self._busy:
            self._attend_alone()

    def _attend_alone(self) -> None:
        """Attend until no reply was awaited for _REST_S, or until a caller waits."""
        core = self.core
        until = time.monotonic() + _REST_S
        while self._channel.is_open and not self._waiting and not self.closed and not self._attending:
            now = time.monotonic()
            if core.window.unanswered:
                until = now + _REST_S
            elif now > until:
                return
            linger = core.linger_left(now)
            self._attend(_REST_S if linger is None else min(linger + _LINGER_SLACK_S, _REST_S))
            self._write()
            if self._overdue.is_due(now):
                self._look()
