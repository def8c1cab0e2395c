"""`AsyncConsumer.run`: drives the rules of handling.py from asyncio.

Handler     A function or a coroutine function. A plain function must not block, because the event loop waits for it.
Letters     A blocking kmq.Producer stores them, in a thread: letters are rare, and there is one way to store them.
Cancelled   The message that is being handled is neither committed nor a failure; it comes again.
"""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Protocol

from kmq.client.consumer_commits import Offsets, OnCommit
from kmq.client.consumer_options import ConsumerOptions, Start
from kmq.client.handling import Attempts, Held, Rules
from kmq.client.letterbox import Letterbox, report
from kmq.client.producer import Producer
from kmq.client.runner import Stop, go_on, hold, not_given_back, put_back
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.replies import Nacked
from kmq.wire.requests import TopicPartition


class AsyncSource(Protocol):
    """What a runner needs of a kmq.AsyncConsumer."""

    options: ConsumerOptions

    @property
    def closed(self) -> bool: ...

    async def poll(self, max_records: int | None = None, timeout: float = 1.0) -> list[Message]: ...

    def assignment(self) -> list[TopicPartition]: ...

    def seek(self, place: tuple[str, int], position: Start) -> None: ...

    def pause(self, *places: tuple[str, int]) -> None: ...

    def resume(self, *places: tuple[str, int]) -> None: ...

    async def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None: ...

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None: ...

    async def nack(
        self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None
    ) -> Nacked: ...


class AsyncRunner:
    """Hands the messages of an asyncio consumer to a handler."""

    def __init__(self, consumer: AsyncSource, rules: Rules, producer: Callable[[str], Producer]) -> None:
        self._consumer, self._rules = consumer, rules
        self._attempts = Attempts(consumer.options, rules)
        self._letters = Letterbox(consumer.options.group_id, producer)

    async def run(self, handler: Callable[[Message], object], stop: Stop) -> None:
        """Handle messages until `stop`, or the consumer is closed or this task is cancelled."""
        consumer = self._consumer
        try:
            while not consumer.closed and not stop.is_set():
                await self._handle_all(handler, await self._poll(), stop)
                if not consumer.closed:
                    go_on(consumer, self._attempts)
        finally:
            try:
                handled = self._attempts.take_handled()
                if handled and not consumer.closed:
                    await consumer.commit(handled)
            finally:
                await asyncio.to_thread(self._letters.close)

    async def _poll(self) -> list[Message]:
        try:
            return await self._consumer.poll(timeout=self._attempts.wait_s(time.monotonic()))
        except KmqError:
            if self._consumer.closed:
                return []
            raise

    async def _handle_all(self, handler: Callable[[Message], object], messages: list[Message], stop: Stop) -> None:
        self._attempts.begin()
        for at, message in enumerate(messages):
            if stop.is_set():
                put_back(self._consumer, messages[at:])
                return
            if not self._attempts.is_turn_of(message):
                continue
            try:
                returned = handler(message)
                if isawaitable(returned):
                    await returned
            except Exception as error:
                outcome = self._attempts.failed(message, error, time.monotonic(), time.time())
                if isinstance(outcome, Held):
                    if message.deliveries > 1:
                        with not_given_back(message):
                            await self._consumer.nack(message, outcome.left_s(time.monotonic()), repr(error))
                    else:
                        hold(self._consumer, message, outcome, error)
                    continue
                if self._rules.dlq is None:
                    raise
                dlq = self._rules.topic_of_letters(message.topic)
                await asyncio.to_thread(self._letters.put, message, dlq, outcome)
            if message.deliveries > 1:
                self._consumer.commit_async(message, report)
            else:
                self._attempts.succeeded(message)


__all__ = ["AsyncRunner"]
