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
Threads     One thread at a time uses a consumer. Another one, of the consumer's own, keeps the member alive meanwhile
            (kmq/client/consumer_link.py). Callbacks run in the application's thread, inside poll, iteration and
            close; on_revoke may commit.
"""

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Unpack

from kmq.client.connection import Address, address_of, local_consumer_address
from kmq.client.consumer_calls import Waits
from kmq.client.consumer_link import Driver
from kmq.client.consumer_options import PORT, ConsumerChoices, ConsumerOptions
from kmq.client.consumer_protocol import Core
from kmq.client.consumer_state import Chunk, Event, Kind
from kmq.client.handling import DEFAULT_BACKOFF, OWN_TOPIC, Backoff, Rules
from kmq.client.producer import Producer
from kmq.client.runner import Runner, Stop, local_producer, makes_producers, stopping
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.requests import TopicPartition

_FOR_EVER_S = 3600.0  # one wait of an iteration

OnPlaces = Callable[[list[TopicPartition]], object]


class Consumer(Waits):
    """Reads topics. `options` are the fields of ConsumerOptions (kmq/client/consumer_options.py)."""

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
        self._start(address_of(host, port), ConsumerOptions(**options))
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
    ) -> "Consumer":
        """Return a consumer of the broker of this directory's settings (environment, kmq.toml)."""
        local_consumer_address()
        consumer = cls(on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost, **options)
        consumer._driver.address = local_consumer_address
        consumer._make_producer = local_producer
        if topics:
            consumer.subscribe(*topics)
        return consumer

    def _start(self, address: Address, options: ConsumerOptions) -> None:
        self.options = options
        self._core = Core(options)
        self._driver = Driver(self._core, address)
        self._lock = self._driver.lock
        self._given = None
        self._committed = deque()
        self._commit_at = time.monotonic() + options.auto_commit_s
        atexit.register(self._at_exit)

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
            chunk = self._first_chunk()
            if chunk is None:
                self._wait_for_records(_FOR_EVER_S)
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

    def _first_chunk(self) -> Chunk | None:
        with self._lock:
            chunks = self._core.holdings.buffer.chunks
            if chunks:
                self._ask_for_more()
            return chunks[0] if chunks else None

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

    def _handle(self, event: Event) -> None:
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
                self._handle_last(held)
        finally:
            self._driver.end()

    def _handle_last(self, held: tuple[TopicPartition, ...]) -> None:
        if self.options.auto_commit and self._core.failed is None:
            self._commit_last(held)
        callback = self._callbacks[Kind.REVOKED]
        if callback is not None:
            callback(list(held))

    def _at_exit(self) -> None:
        """Leave the group at the end of a program that has not closed its consumer. Nothing is committed."""
        self._driver.end()

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._given = None  # the block has handled what it was given
        self._close()


__all__ = ["Consumer"]
