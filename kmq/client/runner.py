"""`Consumer.run`: drives the rules of handling.py with a blocking consumer.

Stop        `stop`, or SIGTERM, ends a run between two messages, and what was handled is committed. SIGTERM is taken in the
            main thread, where nobody else handles it. A second one ends the process at once.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kmq.client.consumer_commits import Offsets, OnCommit
from kmq.client.consumer_options import ConsumerOptions, Start, logger
from kmq.client.handling import Attempts, Held, Rules
from kmq.client.letterbox import Letterbox, report
from kmq.client.producer import Producer
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.replies import Nacked
from kmq.wire.requests import TopicPartition


class Source(Protocol):
    """What a runner needs of a kmq.Consumer."""

    options: ConsumerOptions

    @property
    def closed(self) -> bool: ...

    def poll(self, max_records: int | None = None, timeout: float = 1.0) -> list[Message]: ...

    def assignment(self) -> list[TopicPartition]: ...

    def seek(self, place: tuple[str, int], position: Start) -> None: ...

    def pause(self, *places: tuple[str, int]) -> None: ...

    def resume(self, *places: tuple[str, int]) -> None: ...

    def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None: ...

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None: ...

    def nack(self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None) -> Nacked: ...


class Stop(Protocol):
    """A threading.Event, or an asyncio.Event."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


@contextlib.contextmanager
def stopping(stop: Stop | None) -> Iterator[Stop]:
    """Yield what ends a run: `stop`, or an event of its own; SIGTERM sets it where nobody else handles that."""
    event: Stop = threading.Event() if stop is None else stop

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # In a thread of its own: the handler may have interrupted whoever holds the lock of the event.
        threading.Thread(target=event.set).start()

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        yield event
    finally:
        if is_main and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Runner:
    """Hands the messages of a consumer to a handler."""

    def __init__(self, consumer: Source, rules: Rules, producer: Callable[[str], Producer]) -> None:
        self._consumer, self._rules = consumer, rules
        self._attempts = Attempts(consumer.options, rules)
        self._letters = Letterbox(consumer.options.group_id, producer)

    def run(self, handler: Callable[[Message], object], stop: Stop) -> None:
        """Handle messages until `stop`, or the consumer is closed. Raises what is no Exception, such as KeyboardInterrupt."""
        consumer = self._consumer
        try:
            while not consumer.closed and not stop.is_set():
                self._handle_all(handler, self._poll(), stop)
                if not consumer.closed:
                    go_on(consumer, self._attempts)
        finally:
            try:
                handled = self._attempts.take_handled()
                if handled and not consumer.closed:
                    consumer.commit(handled)
            finally:
                self._letters.close()

    def _poll(self) -> list[Message]:
        try:
            return self._consumer.poll(timeout=self._attempts.wait_s(time.monotonic()))
        except KmqError:
            if self._consumer.closed:
                return []
            raise

    def _handle_all(self, handler: Callable[[Message], object], messages: list[Message], stop: Stop) -> None:
        self._attempts.begin()
        for at, message in enumerate(messages):
            if stop.is_set():
                put_back(self._consumer, messages[at:])
                return
            if not self._attempts.is_turn_of(message):
                continue
            try:
                handler(message)
            except Exception as error:
                outcome = self._attempts.failed(message, error, time.monotonic(), time.time())
                if isinstance(outcome, Held):
                    if message.deliveries > 1:
                        with not_given_back(message):
                            self._consumer.nack(message, outcome.left_s(time.monotonic()), repr(error))
                    else:
                        hold(self._consumer, message, outcome, error)
                    continue
                if self._rules.dlq is None:
                    raise
                self._letters.put(message, self._rules.topic_of_letters(message.topic), outcome)
            if message.deliveries > 1:
                self._consumer.commit_async(message, report)
            else:
                self._attempts.succeeded(message)


class Places(Protocol):
    """What holding messages and going on need of a consumer."""

    def assignment(self) -> list[TopicPartition]: ...

    def seek(self, place: tuple[str, int], position: Start) -> None: ...

    def pause(self, *places: tuple[str, int]) -> None: ...

    def resume(self, *places: tuple[str, int]) -> None: ...

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None: ...


def hold(consumer: Places, message: Message, held: Held, error: Exception) -> None:
    """Let a partition wait at this message."""
    place = TopicPartition(message.topic, message.partition)
    logger().warning("%s offset %d: attempt %d failed: %.200r", place, message.offset, held.attempts, error)
    with contextlib.suppress(KmqError):  # it is another member's meanwhile
        consumer.seek(place, held.offset)
        consumer.pause(place)


@contextlib.contextmanager
def not_given_back(message: Message) -> Iterator[None]:
    """Go on if a message cannot be given back: it comes again when this member leaves, or comes back."""
    try:
        yield
    except KmqError as err:
        logger().warning("%s/%d offset %d: not given back: %s", message.topic, message.partition, message.offset, err)


def put_back(consumer: Places, messages: Sequence[Message]) -> None:
    """Let messages that were given out and not handled be the next of their partitions, so that nobody commits them."""
    first: dict[TopicPartition, int] = {}
    for message in messages:
        if message.deliveries <= 1:  # what came again is not behind the position
            first.setdefault(TopicPartition(message.topic, message.partition), message.offset)
    for place, offset in first.items():
        with contextlib.suppress(KmqError):  # it is another member's meanwhile
            consumer.seek(place, offset)


def go_on(consumer: Places, attempts: Attempts) -> None:
    """Commit what was handled, and let partitions go on that have waited long enough."""
    if handled := attempts.take_handled():
        consumer.commit_async(handled, report)
    for place in attempts.due(consumer.assignment(), time.monotonic()):
        with contextlib.suppress(KmqError):
            consumer.resume(place)


__all__ = ["Runner", "Stop", "go_on", "hold", "not_given_back", "put_back", "stopping"]
