"""The rules of `run`: a handler for every message, with retries, and dead letters for what cannot be handled. Pure
code.

    Transient   any exception of the handler: the message is retried at most max_retries times, after pauses that
                double and vary at random. Its partition waits meanwhile; other partitions are not held up.
    Permanent   kmq.Permanent, or a class named as permanent, or the last retry: the message goes to the topic `dlq`,
    and
                then the offset is committed.

Consumer.run and AsyncConsumer.run (runner.py) drive `Attempts`: they read, call the handler, pause partitions and
commit. runner.py stores the letters.

    Redelivered If the broker delivers a message again (Consumer.nack, a reader that died), its deliveries count as
    attempts.
                A retry of such a message is another nack, with the pause as its delay, so its partition does not wait.

Invariant   A message is committed only after the handler has returned, or its dead letter is on disk. So a message that
            cannot be handled never blocks its partition, and no message is skipped.
Crash       Between the letter and the commit: the letter has the same id the next time and is stored once.
Memory      One message per partition waits for its retry; the messages after it are read again.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kmq.client.consumer_options import ConsumerOptions
from kmq.errors import ConfigError
from kmq.message import record
from kmq.message.letters import Failure
from kmq.message.message import Message
from kmq.message.record import DLQ
from kmq.wire.requests import TopicPartition

POLL_S = 1.0  # longest wait for records
OWN_TOPIC = f"<topic>{DLQ}"


class Permanent(Exception):
    """Raised by a handler: a retry of this message is useless."""


@dataclass(frozen=True)
class Backoff:
    """The pauses before retries, in seconds: from `first`, doubled up to `longest`, each 50 to 100 % of that."""

    first: float = 0.2
    longest: float = 30.0

    def seconds(self, attempt: int) -> float:
        """Return the pause after this many attempts, counted from 1."""
        return min(self.longest, self.first * 2.0 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)


class Rules(NamedTuple):
    """What happens to a message whose handler raised."""

    max_retries: int = 3
    backoff: Backoff = Backoff()
    dlq: str | None = OWN_TOPIC
    permanent: tuple[type[Exception], ...] = ()

    def check(self, handler: object, knows_producers: bool) -> None:
        """Raise ConfigError for rules that would fail only at the first message that cannot be handled.

        `knows_producers`: the address for dead letters is known.
        """
        first, longest = self.backoff.first, self.backoff.longest
        if not callable(handler):
            raise ConfigError(f"handler={handler!r}: must be a function, which gets a message")
        if not (0 <= first < math.inf and 0 <= longest < math.inf):  # all comparisons with nan are False
            raise ConfigError(f"backoff: first={first} and longest={longest} must be seconds, 0 or more")
        if self.dlq is None:
            return
        if self.dlq != OWN_TOPIC and not record.is_topic(self.dlq):
            raise ConfigError(f"dlq={self.dlq!r}: must be a topic, {OWN_TOPIC!r} or None")
        if not knows_producers:
            raise ConfigError(
                "producer: must be given, because the port of this consumer is not 5674 or 5444, so that of the same broker "
                "for producers is not known: producer=lambda window: kmq.Producer(host, port, window=window), or dlq=None"
            )

    def topic_of_letters(self, topic: str) -> str:
        """Return the topic for dead letters of a topic."""
        assert self.dlq is not None
        return f"{topic}{DLQ}" if self.dlq == OWN_TOPIC else self.dlq


DEFAULT_BACKOFF = Backoff()


class Held(NamedTuple):
    """A message that waits for its retry."""

    offset: int
    attempts: int
    first_failure: float
    due: float  # on the monotonic clock

    def left_s(self, now: float) -> float:
        """Return the seconds until its retry."""
        return max(0.0, self.due - now)


class Attempts:
    """The messages that one consumer has handled, and those that wait for a retry. Callers pass the time."""

    def __init__(self, options: ConsumerOptions, rules: Rules) -> None:
        """Raise ConfigError if a consumer with these options cannot run a handler under these rules."""
        if not options.group_id:
            raise ConfigError("run: needs group_id=, the group that remembers what was handled")
        if rules.max_retries < 0:
            raise ConfigError(f"max_retries={rules.max_retries}: must be 0 or more")
        self._group, self._rules = options.group_id, rules
        self._held: dict[TopicPartition, Held] = {}
        self._handled: dict[tuple[str, int], int] = {}  # next offsets, not committed yet
        self._behind: set[TopicPartition] = set()

    def wait_s(self, now: float) -> float:
        """Return how long to wait for records: at most until the next retry."""
        due = min((held.due for held in self._held.values()), default=math.inf)
        return max(0.0, min(POLL_S, due - now))

    def begin(self) -> None:
        """Note that a new list of messages was read."""
        self._behind = set()

    def is_turn_of(self, message: Message) -> bool:
        """Return False for messages after one that failed: they are read again."""
        return message.deliveries > 1 or _partition_of(message) not in self._behind

    def succeeded(self, message: Message) -> None:
        """Note that a message was handled, or its dead letter is on disk. The caller commits a redelivered message
        itself.
        """
        self._held.pop(_partition_of(message), None)
        self._handled[_partition_of(message)] = message.offset + 1

    def failed(self, message: Message, error: Exception, now: float, wall: float) -> Held | Failure:
        """Return Held if the message waits for a retry, else what its dead letter says. `wall`: the time of day."""
        place, is_again = _partition_of(message), message.deliveries > 1
        held = None if is_again else self._held.pop(place, None)
        if held is not None and held.offset != message.offset:
            held = None  # left from before another member read this partition
        attempts = held.attempts + 1 if held else message.deliveries
        first = held.first_failure if held else wall
        if isinstance(error, (Permanent, *self._rules.permanent)) or attempts > self._rules.max_retries:
            return Failure(self._group, error, attempts, first, wall)
        waits = Held(message.offset, attempts, first, now + self._rules.backoff.seconds(attempts))
        if not is_again:
            self._held[place] = waits
            self._behind.add(place)
        return waits

    def due(self, mine: Iterable[TopicPartition], now: float) -> list[TopicPartition]:
        """Return the partitions whose pause is over, each once; forget those that are not `mine` any more."""
        owned = set(mine)
        self._held = {place: held for place, held in self._held.items() if place in owned}
        over = [place for place, held in self._held.items() if held.due <= now]
        for place in over:
            self._held[place] = self._held[place]._replace(due=math.inf)
        return over

    def take_handled(self) -> dict[tuple[str, int], int]:
        """Return the next offsets to commit. They count as committed from now on."""
        handled, self._handled = self._handled, {}
        return handled


def _partition_of(message: Message) -> TopicPartition:
    return TopicPartition(message.topic, message.partition)


__all__ = ["DEFAULT_BACKOFF", "OWN_TOPIC", "Attempts", "Backoff", "Held", "Permanent", "Rules"]
