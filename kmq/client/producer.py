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
Threads     kmq/client/driver.py. Callbacks run one after the other, in order; a callback that blocks holds up the
            others.
"""

import atexit
from collections.abc import Callable, Iterable
from typing import Unpack

from kmq.client.connection import Address, address_of, local_address, logger
from kmq.client.delivery import Delivery as CoreDelivery
from kmq.client.delivery import in_parts
from kmq.client.driver import Driver
from kmq.client.failures import NotAnswered
from kmq.client.options import Choices, Options
from kmq.client.protocol import Core, as_list
from kmq.errors import KmqError
from kmq.message.text import Headers, as_bytes, make_routing_key


class Delivery(CoreDelivery):
    """A message, or a list, that a Producer has queued."""

    __slots__ = ("_driver",)
    _driver: Driver

    def results(self, timeout: float | None = None) -> list[int]:
        """Wait until all messages are on disk. Returns their seqs; 0: stored too long ago for the seq to be known."""
        self.result(timeout)
        return self.seqs

    def result(self, timeout: float | None = None) -> int:
        """Wait until all messages are on disk. Returns the (first) seq, or raises the first error."""
        self._driver.wait(lambda: self.done, timeout, "the reply to this message")
        if self.error is not None:
            self.seen = self._driver.told = True
            raise self.error
        return self.seq


class Producer:
    """Sends acknowledged messages. `options` are the fields of Options (kmq/client/options.py)."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        """`port`: a number, or a function that is called before each connection."""
        self._start(address_of(host, port), Options(**options))

    @classmethod
    def local(cls, **options: Unpack[Choices]) -> "Producer":
        """Return a producer for the broker of this directory's settings (environment, kmq.toml)."""
        local_address()
        producer = cls.__new__(cls)
        producer._start(local_address, Options(**options))
        return producer

    def _start(self, address: Address, options: Options) -> None:
        self.options = options
        self._core = Core(options)
        self._window, self._pacing = self._core.window, self._core.pacing
        self._driver = Driver(self._core, address)
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
            if driver.resting or not self._pacing.waits_for_reply:
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
            error = self._core.failed or self._core.outcomes.unseen_error()
        self._raise(error)

    def _raise(self, error: KmqError | None) -> None:
        if error is not None:
            self._driver.told = True
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
        told = self._driver.told
        try:
            self.close()
        except KmqError as err:
            if not told:
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


__all__ = ["Delivery", "Producer"]
