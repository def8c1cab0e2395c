"""`Consumer.run` and `AsyncConsumer.run`: drive the rules of handling.py, and store dead letters.

    consumer.run(handle, dlq="orders.dead")   # handle(message) raises → retries → a record of topic orders.dead

Stop        `stop`, or SIGTERM, ends a run between two messages, and handled messages are committed. SIGTERM is caught
            in the main thread, unless the program has a handler for it. A second SIGTERM ends the process at once.
Letters     A blocking kmq.Producer stores them (kmq/message/letters.py), and each call waits until its letter is on
            disk. asyncio does that in a thread: letters are rare, and so there is only one way to store them.
Async       The handler is a function or a coroutine function. A plain function must not block, because the event loop
            waits for it. If the run is cancelled, the message in the handler is not committed and does not count as
            failed; it is delivered again.
"""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Protocol

from kmq.client.connection import read_hosts
from kmq.client.consumer_calls import ConsumerCalls
from kmq.client.consumer_options import PORT, ConsumerOptions, logger
from kmq.client.handling import Attempts, Held, Rules
from kmq.client.producer import Producer
from kmq.errors import KmqError
from kmq.message.ids import NAME_PATTERN
from kmq.message.letters import Failure, format_letter
from kmq.message.message import Message
from kmq.sending.failures import Refused
from kmq.wire.requests import TopicPartition


class Stop(Protocol):
    """A threading.Event, or an asyncio.Event."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


@contextlib.contextmanager
def stopping(stop: Stop | None) -> Iterator[Stop]:
    """Yield the event that ends a run: `stop`, or a new one; SIGTERM sets it unless the signal has another handler."""
    event: Stop = threading.Event() if stop is None else stop

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # In a thread of its own: the signal may have interrupted the holder of the event's lock.
        threading.Thread(target=event.set).start()

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        yield event
    finally:
        if is_main and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def run_handler(
    consumer: ConsumerCalls,
    handler: Callable[[Message], object],
    rules: Rules,
    make: "MakeProducer | None",
    stop: Stop | None,
) -> None:
    """Implement Consumer.run and AsyncConsumer.run. `make`: None if the address for dead letters is not known."""
    rules.check(handler, knows_producers=make is not None)
    with stopping(stop) as event:
        await Runner(consumer, rules, make or local_producer).run(handler, event)  # connects for letters only


class Runner:
    """Passes the messages of a consumer to a handler."""

    def __init__(self, consumer: ConsumerCalls, rules: Rules, producer: "MakeProducer") -> None:
        self._consumer, self._rules = consumer, rules
        self._attempts = Attempts(consumer.options, rules)
        self._letters = Letterbox(consumer.options.group_id, producer)

    async def run(self, handler: Callable[[Message], object], stop: Stop) -> None:
        """Handle messages until `stop` is set or the consumer is closed. KeyboardInterrupt and the like are not
        caught.
        """
        consumer = self._consumer
        try:
            while not consumer.closed and not stop.is_set():
                await self._handle_all(handler, await self._poll(), stop)
                if not consumer.closed:
                    self._go_on()
        finally:
            try:
                handled = self._attempts.take_handled()
                if handled and not consumer.closed:
                    await consumer._commit(handled)
            finally:
                await consumer._driver.aside(self._letters.close)

    async def _poll(self) -> list[Message]:
        try:
            return await self._consumer._poll(timeout=self._attempts.wait_s(time.monotonic()))
        except KmqError:
            if self._consumer.closed:
                return []
            raise

    async def _handle_all(self, handler: Callable[[Message], object], messages: list[Message], stop: Stop) -> None:
        consumer = self._consumer
        self._attempts.begin()
        for at, message in enumerate(messages):
            if stop.is_set():
                self._put_back(messages[at:])
                return
            if not self._attempts.is_turn_of(message):
                continue
            try:
                await consumer._driver.finish(handler(message))
            except Exception as error:
                outcome = self._attempts.failed(message, error, time.monotonic(), time.time())
                if isinstance(outcome, Held):
                    await self._hold(message, outcome, error)
                    continue
                if self._rules.dlq is None:
                    raise
                dlq, failure = self._rules.topic_of_letters(message.topic), outcome
                await consumer._driver.aside(partial(self._letters.put, message, dlq, failure))
                logger().warning(
                    "%s/%d offset %d went to %s after %d attempts: %.200r",
                    *(message.topic, message.partition, message.offset, dlq, failure.attempts, failure.error),
                )
            if message.deliveries > 1:
                consumer.commit_async(message, report)
            else:
                self._attempts.succeeded(message)

    async def _hold(self, message: Message, held: Held, error: Exception) -> None:
        """Pause a partition at this message until its retry. A redelivered message is given back instead."""
        place = TopicPartition(message.topic, message.partition)
        if message.deliveries > 1:
            try:
                await self._consumer._nack(message, held.left_s(time.monotonic()), repr(error))
            except KmqError as err:  # delivered again when this member leaves or reconnects
                logger().warning("%s offset %d: not given back: %s", place, message.offset, err)
            return
        logger().warning("%s offset %d: attempt %d failed: %.200r", place, message.offset, held.attempts, error)
        with contextlib.suppress(KmqError):  # it belongs to another member meanwhile
            self._consumer.seek(place, held.offset)
            self._consumer.pause(place)

    def _put_back(self, messages: Sequence[Message]) -> None:
        """Seek back to the messages that were handed out and not handled, so that they are not committed."""
        first: dict[TopicPartition, int] = {}
        for message in messages:
            if message.deliveries <= 1:  # a redelivered message is not at the position
                first.setdefault(TopicPartition(message.topic, message.partition), message.offset)
        for place, offset in first.items():
            with contextlib.suppress(KmqError):  # it belongs to another member meanwhile
                self._consumer.seek(place, offset)

    def _go_on(self) -> None:
        """Commit what was handled, and resume partitions whose pause is over."""
        if handled := self._attempts.take_handled():
            self._consumer.commit_async(handled, report)
        for place in self._attempts.due(self._consumer.assignment(), time.monotonic()):
            with contextlib.suppress(KmqError):
                self._consumer.resume(place)


def report(offsets: object, error: KmqError | None) -> None:
    """Log a commit that failed."""
    if error is not None:
        logger().warning("handled, and not committed, so it is delivered again: %s", error)


# --- letters ---------------------------------------------------------------------------------------------------------

_NAME = re.compile(NAME_PATTERN)
PLAIN_PORT, TLS_PORT = 5673, 5443  # for producers
_TLS_CONSUMERS = 5444
MakeProducer = Callable[[str], Producer]  # called with its window
_HEADER_ROOM = 4096  # bytes of a line besides its payload, when a letter has to be cut


class Letterbox:
    """Sends one group's dead letters to the broker. It connects when the first letter is put in."""

    def __init__(self, group: str, make: Callable[[str], Producer]) -> None:
        """`make` is called with a window and returns a producer."""
        self.group, self._make = group, make
        self._producer: Producer | None = None

    def put(self, message: Message, dlq: str, failure: Failure) -> int:
        """Store a message as a dead letter of topic `dlq`. Return its seq; 0: stored before, with an unknown seq.

        Raises KmqError if it cannot be stored.
        """
        if self._producer is None:
            self._producer = self._make(_window(self.group))
        try:
            seq = _send(self._producer, format_letter(message, dlq, failure))
        except Refused as refused:
            if refused.code != "too_long":
                raise
            most = self._producer.connect() - _HEADER_ROOM
            seq = _send(self._producer, format_letter(message, dlq, failure, most))
        return seq

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()


def _send(producer: Producer, line: bytes) -> int:
    try:
        return producer.send_lines(line).result()
    except Refused as refused:
        if refused.code != "id_reused":  # else it was stored before, with an older error
            raise
        seq = re.search(r"as seq (\d+)", refused.reason)
        return int(seq[1]) if seq else 0


def makes_producers(host: str, port: object, options: ConsumerOptions) -> MakeProducer | None:
    """Return a function that makes producers for the broker that a consumer at this address reads.

    None at another port than the usual ones: then the usual port for producers may belong to another broker.
    """
    tls = options.tls
    usual, other = (_TLS_CONSUMERS, TLS_PORT) if tls else (PORT, PLAIN_PORT)
    hosts = list(read_hosts(host))
    if any((own or port) != usual for _, own in hosts):
        return None
    host = ",".join(f"[{name}]" if ":" in name else name for name, _ in hosts)

    def make(window: str) -> Producer:
        name = options.server_hostname
        return Producer(host, other, window=window, token=options.token, tls=tls, server_hostname=name)

    return make


def local_producer(window: str) -> Producer:
    """Return a producer of the broker of this directory's settings."""
    return Producer.local(window=window)


def _window(group: str) -> str:
    """Return the scope in which the ids of a group's letters are remembered."""
    name = f"dlq:{group}"
    return name if _NAME.fullmatch(name) else f"dlq:{sha256(group.encode()).hexdigest()[:40]}"
