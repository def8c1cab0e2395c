"""`Consumer.run`: a handler for every message, with retries, and dead letters for what cannot be handled.

    Transient   any exception of the handler: the message is tried again, at most max_retries times, after pauses that
                double and vary at random. Its partition waits meanwhile; the others go on.
    Permanent   kmq.Permanent, or a class named as permanent, or the last retry: the message goes to the topic `dlq`, and
                then the offset is committed.

Invariant   A message is committed only after the handler has returned, or its dead letter is on disk. So a message that
            cannot be handled never blocks its partition, and none is skipped.
Crash       Between the letter and the commit: the letter has the same id the next time and is stored once.
Memory      One message per partition waits for its retry; the messages behind it are read again.
"""

import contextlib
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from kmq.client.consumer_commits import Offsets, OnCommit
from kmq.client.consumer_options import ConsumerOptions, Start, logger
from kmq.client.egress_lines import TopicPartition
from kmq.client.failures import Refused
from kmq.client.letters import Failure, format_letter
from kmq.client.message import Message
from kmq.client.producer import Producer
from kmq.errors import ConfigError, KmqError
from kmq.ids import NAME_PATTERN

_NAME = re.compile(NAME_PATTERN)
_POLL_S = 1.0  # longest wait for records
_HEADER_ROOM = 4096  # bytes that a line takes beside its payload, where a letter has to be cut
OWN_TOPIC = "<topic>.dlq"


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


class Permanent(Exception):
    """Raised by a handler: trying this message again is useless."""


@dataclass(frozen=True)
class Backoff:
    """The pauses before retries, in seconds: from `first`, doubled up to `longest`, each 50 to 100 % of that."""

    first: float = 0.2
    longest: float = 30.0

    def seconds(self, attempt: int) -> float:
        """Return the pause after so many attempts, counted from 1."""
        return min(self.longest, self.first * 2.0 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)


class Rules(NamedTuple):
    """What happens to a message that the handler has refused."""

    max_retries: int = 3
    backoff: Backoff = Backoff()
    dlq: str | None = OWN_TOPIC
    permanent: tuple[type[Exception], ...] = ()


class _Held(NamedTuple):
    """A message that waits for its retry."""

    offset: int
    attempts: int
    first_failure: float
    due: float  # by the monotonic clock


class Runner:
    """Hands the messages of a consumer to a handler."""

    def __init__(self, consumer: Source, rules: Rules, producer: Callable[[str], Producer]) -> None:
        if not consumer.options.group_id:
            raise ConfigError("run: needs group_id=, the group that remembers what was handled")
        if rules.max_retries < 0:
            raise ConfigError(f"max_retries={rules.max_retries}: must be 0 or more")
        self._consumer, self._rules, self._make = consumer, rules, producer
        self._held: dict[TopicPartition, _Held] = {}
        self._handled: dict[tuple[str, int], int] = {}  # next offsets, not committed yet
        self._producer: Producer | None = None

    def run(self, handler: Callable[[Message], object]) -> None:
        """Handle messages until the consumer is closed. Raises what is no Exception, such as KeyboardInterrupt."""
        consumer = self._consumer
        try:
            while not consumer.closed:
                self._handle_all(handler, self._poll())
                if not consumer.closed:
                    self._commit()
                    self._resume()
        finally:
            try:
                if self._handled and not consumer.closed:
                    consumer.commit(self._handled)
            finally:
                if self._producer is not None:
                    self._producer.close()

    def _poll(self) -> list[Message]:
        try:
            return self._consumer.poll(timeout=self._wait_s())
        except KmqError:
            if self._consumer.closed:
                return []
            raise

    def _handle_all(self, handler: Callable[[Message], object], messages: list[Message]) -> None:
        waiting: set[TopicPartition] = set()  # what follows a message that failed is read again
        for message in messages:
            place = TopicPartition(message.topic, message.partition)
            if place in waiting:
                continue
            held = self._held.pop(place, None)
            if held is not None and held.offset != message.offset:
                held = None  # of the time before others read this partition
            self._handle(handler, message, place, held)
            if place in self._held:
                waiting.add(place)

    def _wait_s(self) -> float:
        due = min((held.due for held in self._held.values()), default=math.inf)
        return max(0.0, min(_POLL_S, due - time.monotonic()))

    def _handle(
        self, handler: Callable[[Message], object], message: Message, place: TopicPartition, held: _Held | None
    ) -> None:
        try:
            handler(message)
        except Exception as error:
            attempts = held.attempts + 1 if held else 1
            now = time.time()
            first = held.first_failure if held else now
            is_final = isinstance(error, (Permanent, *self._rules.permanent)) or attempts > self._rules.max_retries
            if not is_final:
                pause_s = self._rules.backoff.seconds(attempts)
                self._hold(place, _Held(message.offset, attempts, first, time.monotonic() + pause_s))
                logger().warning("%s offset %d: attempt %d failed: %.200r", place, message.offset, attempts, error)
                return
            if self._rules.dlq is None:
                raise
            self._bury(message, Failure(self._consumer.options.group_id, error, attempts, first, now))
        self._handled[place] = message.offset + 1

    def _hold(self, place: TopicPartition, held: _Held) -> None:
        """Let a partition wait at this message."""
        self._held[place] = held
        with contextlib.suppress(KmqError):  # it is another member's meanwhile
            self._consumer.seek(place, held.offset)
            self._consumer.pause(place)

    def _resume(self) -> None:
        """Go on with the partitions whose pause is over; forget those that others read now."""
        now, mine = time.monotonic(), set(self._consumer.assignment())
        self._held = {place: held for place, held in self._held.items() if place in mine}
        for place, held in self._held.items():
            if held.due <= now:
                self._held[place] = held._replace(due=math.inf)
                with contextlib.suppress(KmqError):
                    self._consumer.resume(place)

    def _commit(self) -> None:
        if self._handled:
            handled, self._handled = self._handled, {}
            self._consumer.commit_async(handled, _report)

    def _bury(self, message: Message, failure: Failure) -> None:
        """Store a message as a dead letter. Raises KmqError if that is impossible: nothing is committed then."""
        assert self._rules.dlq is not None
        dlq = f"{message.topic}.dlq" if self._rules.dlq == OWN_TOPIC else self._rules.dlq
        if self._producer is None:
            self._producer = self._make(_window(self._consumer.options.group_id))
        line = format_letter(message, dlq, failure)
        try:
            self._send(line)
        except Refused as refused:
            if refused.code != "too_long":
                raise
            self._send(format_letter(message, dlq, failure, self._producer.connect() - _HEADER_ROOM))
        logger().warning(
            "%s/%d offset %d went to %s after %d attempts: %.200r",
            *(message.topic, message.partition, message.offset, dlq, failure.attempts, failure.error),
        )

    def _send(self, line: bytes) -> None:
        assert self._producer is not None
        try:
            self._producer.send_lines(line).result()
        except Refused as refused:
            if refused.code != "id_reused":  # else it was stored before, with an older error
                raise


def _report(offsets: object, error: KmqError | None) -> None:
    if error is not None:
        logger().warning("handled, and not committed, so it comes again: %s", error)


def _window(group: str) -> str:
    """Return the scope in which the ids of a group's letters are remembered."""
    name = f"dlq:{group}"
    return name if _NAME.fullmatch(name) else f"dlq:{sha256(group.encode()).hexdigest()[:40]}"


__all__ = ["OWN_TOPIC", "Backoff", "Permanent", "Rules", "Runner"]
