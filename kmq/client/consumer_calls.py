"""What a consumer reads and where it is: the calls of kmq.Consumer and kmq.AsyncConsumer that do not wait."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from kmq.client.consumer_link import Driver
from kmq.client.consumer_options import ConsumerOptions, Start, logger, to_place, to_position, to_topic
from kmq.client.consumer_protocol import Core, Phase
from kmq.client.consumer_state import Owned, Pending
from kmq.client.failures import Fenced, NotAnswered, Refused
from kmq.errors import ConfigError, KmqError
from kmq.message.message import Message
from kmq.message.text import whole_number, wrong_type
from kmq.wire.replies import Nacked, PartitionOffsets
from kmq.wire.requests import MAX_DELAY_MS, MAX_REASON, Nack, TopicPartition


class Mover(Protocol):
    """What moves the bytes of a core. `discovers`: topics whose partitions are all to be read, without a group."""

    discovers: tuple[str, ...]
    closed: bool

    def write(self) -> None: ...

    def drop(self, reason: str) -> None: ...


class Places:
    """The calls of a consumer that concern single partitions, each (topic, number)."""

    options: ConsumerOptions
    _core: Core
    _driver: Mover
    _lock: AbstractContextManager[object]

    @property
    def member(self) -> str:
        """Return the name by which the group knows this consumer."""
        return self._core.member

    @property
    def failed(self) -> KmqError | None:
        """Return the error that ended this consumer; None while it works."""
        return self._core.failed

    def describe(self) -> str:
        """Return a sentence on what the consumer waits for."""
        return self._core.describe(time.monotonic())

    @property
    def closed(self) -> bool:
        return self._driver.closed

    @property
    def connected(self) -> bool:
        return self._core.phase is not Phase.AWAY

    def subscribe(self, *topics: str) -> None:
        """Read these topics instead of what was read before: with a group its share of them, else all partitions."""
        if not topics:
            raise ConfigError("subscribe: give the names of topics, each an argument of its own")
        topics = tuple(dict.fromkeys(to_topic(topic, "subscribe") for topic in topics))
        with self._lock:
            self._core.choose(topics if self.options.group_id else ())
            self._driver.discovers = () if self.options.group_id else topics
            self._driver.drop("subscribed to other topics")

    def assign(self, *places: tuple[str, int], start: Start | None = None) -> None:
        """Read these partitions, (topic, number), without a group's management. `start`: default is the option."""
        if not places:
            raise ConfigError("assign: give at least one partition, as (topic, number)")
        position = self._core.start if start is None else to_position(start)
        wanted = [(to_place(place, "assign"), position) for place in places]
        with self._lock:
            self._core.choose((), wanted)
            self._driver.discovers = ()
            self._driver.drop("other partitions were assigned")

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that this consumer reads now."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if not owned.revoked]

    def seek(self, place: tuple[str, int], position: Start) -> None:
        """Go on at an offset, `earliest`, `latest`, or the first message received at a time or later."""
        owned = self._find(place)
        with self._lock:
            self._core.seek(owned.place, to_position(position), time.monotonic())
            self._driver.write()

    def seek_to_beginning(self, *places: tuple[str, int]) -> None:
        """Go on at the first message of these partitions; without any of all."""
        for place in places or self.assignment():
            self.seek(place, "earliest")

    def seek_to_end(self, *places: tuple[str, int]) -> None:
        """Go on behind the last message of these partitions; without any of all."""
        for place in places or self.assignment():
            self.seek(place, "latest")

    def pause(self, *places: tuple[str, int]) -> None:
        """Give out no messages of these partitions until `resume`; the consumer keeps them."""
        owned = [self._find(place).place for place in places]
        with self._lock:
            self._core.holdings.pause(owned)

    def resume(self, *places: tuple[str, int]) -> None:
        """Give out messages of these partitions again."""
        owned = [self._find(place).place for place in places]
        with self._lock:
            self._core.holdings.resume(owned)
            self._core.is_dry = False

    def paused(self) -> list[TopicPartition]:
        """Return the partitions that are paused, by `pause` or because the broker's files are damaged there."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if owned.paused or owned.is_damaged]

    def _most(self, max_records: int | None) -> int:
        most = self.options.max_poll_records if max_records is None else max_records
        if most < 1:
            raise ValueError(f"max_records={most}: must be at least 1")
        return most

    def _must_read(self) -> None:
        if not self._core.has_something_to_read and not self._driver.discovers:
            raise KmqError("nothing to read: name topics, or call subscribe() or assign()")

    def _has_news(self) -> bool:
        """Return True if there are records, or something to tell the application."""
        core = self._core
        return bool(core.holdings.buffer.chunks or core.holdings.events or core.errors)

    def _rows(self, pending: Pending, wanted: list[TopicPartition]) -> list[PartitionOffsets]:
        """Return the answer to `offsets` in this order. Raises the error that was the answer."""
        if pending.error is not None:
            raise pending.error
        assert isinstance(pending.value, tuple)
        rows = {row.place: row for row in pending.value}
        if missing := next((place for place in wanted if place not in rows), None):
            raise Refused(f"damaged {missing}: its offsets cannot be told; ask for it alone to hear why")
        return [rows[place] for place in wanted]

    def _find(self, place: tuple[str, int]) -> Owned:
        wanted = to_place(place, "partition")
        with self._lock:
            owned = self._core.holdings.owned.get(wanted)
        if owned is None:
            raise KmqError(f"{wanted}: not assigned to this consumer; see assignment()")
        return owned


# --- consumer commits ------------------------------------------------------------------------------------------------
# The commits of a kmq.Consumer: those that the application asks for, and those that the consumer makes by itself.
#
# Invariant   The consumer by itself commits only what the application has come back for: never the message that is being
#             handled, or that has raised an exception.

_MOST_CALLBACKS = 10_000

Offsets = Mapping[tuple[str, int], int]
OnCommit = Callable[[dict[TopicPartition, int], KmqError | None], object]


class Commits(Places):
    """The calls of a consumer that commit."""

    _given: Message | list[Message] | None  # what the application works on
    _committed: deque[tuple[OnCommit, Pending]]  # for callbacks
    _commit_at: float  # when the consumer commits by itself

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None:
        """Commit without waiting. `callback` gets the offsets and the error or None, at a later poll."""
        if len(self._committed) >= _MOST_CALLBACKS:
            raise KmqError(f"commit_async: {_MOST_CALLBACKS:,} callbacks wait already; call poll, which runs them")
        pending = self._commit(offsets)
        if callback is not None:
            self._committed.append((callback, pending))

    def _commit(self, offsets: Message | Offsets | None) -> Pending:
        if isinstance(offsets, Message) and offsets.deliveries > 1:
            return self._ask_commit((), [(TopicPartition(offsets.topic, offsets.partition), offsets.offset)])
        pairs = tuple(self._offsets(offsets))
        with self._lock:
            if offsets is not None and self._core.holdings.have_left(place for place, _ in pairs):
                pending = Pending(b"", time.monotonic(), pairs)
                pending.finish(
                    error=Fenced("fenced another member may have read on meanwhile; poll says what is assigned")
                )
                return pending
        return self._ask_commit(pairs, self._again(()) if offsets is None else ())

    def _ask_commit(
        self, offsets: Iterable[tuple[TopicPartition, int]], again: Iterable[tuple[TopicPartition, int]]
    ) -> Pending:
        """Ask to commit these next offsets, and these messages that came again."""
        with self._lock:
            self._must_have_group("commit")
            pending = self._core.commit(offsets, time.monotonic(), again)
            self._driver.write()
        return pending

    def _commit_handled(self, places: Iterable[TopicPartition]) -> Pending:
        """Ask to commit what was handled of these partitions."""
        wanted = set(places)
        offsets, again = self._handled(wanted), [each for each in self._again(self._working()) if each[0] in wanted]
        return self._ask_commit([(TopicPartition(*place), offset) for place, offset in offsets.items()], again)

    def _again(self, working: Collection[Message]) -> list[tuple[TopicPartition, int]]:
        """Return the messages that came again and were given out, without those that the application works on."""
        busy = {(message.topic, message.partition, message.offset) for message in working}
        return [
            (place, offset)
            for place, owned in self._core.holdings.owned.items()
            for offset in sorted(owned.again)
            if (*place, offset) not in busy
        ]

    def _nack(self, message: Message, delay: float, reason: str) -> Pending:
        if not isinstance(message, Message):
            raise wrong_type("message", message, "a message")
        if not isinstance(reason, str):
            raise wrong_type("reason", reason, "str")
        if not isinstance(delay, int | float):
            raise wrong_type("delay", delay, "a number of seconds")
        if not 0 <= delay <= MAX_DELAY_MS / 1000:
            raise ValueError(f"delay={delay}: must be 0 to {MAX_DELAY_MS // 1000} seconds")
        with self._lock:
            self._must_have_group("nack")
            place, text = to_place((message.topic, message.partition), "nack"), reason[:MAX_REASON]
            text = text.encode(errors="replace").decode()  # of an error's own text, which may be anything
            request = Nack(place, message.offset, round(delay * 1000), text)
            pending = self._core.nack(request, time.monotonic())
            self._driver.write()
        return pending

    def _nacked(self, pending: Pending) -> Nacked:
        """Return the answer to `nack`. Raises the error that was the answer."""
        if pending.error is not None:
            raise pending.error
        assert isinstance(pending.value, Nacked)
        return pending.value

    def _must_have_group(self, what: str) -> None:
        if not self.options.group_id:
            raise KmqError(f"{what}: this consumer has no group that could remember it; give group_id=")
        if self._core.failed is not None:
            raise self._core.failed

    def _offsets(self, offsets: Message | Offsets | None) -> Iterable[tuple[TopicPartition, int]]:
        if isinstance(offsets, Message):
            return [(TopicPartition(offsets.topic, offsets.partition), offsets.offset + 1)]
        if offsets is not None:
            if not isinstance(offsets, Mapping):
                raise wrong_type("offsets", offsets, "a message, or a mapping of (topic, number) to next offsets")
            pairs = offsets.items()
            return [(to_place(place, "commit"), whole_number(offset, "offset")) for place, offset in pairs]
        return [(place, owned.position) for place, owned in self._core.holdings.owned.items() if owned.is_known]

    def _run_callbacks(self) -> None:
        """Tell the application how its commits have ended, in order."""
        while self._committed and self._committed[0][1].done:
            callback, pending = self._committed.popleft()
            callback(dict(pending.offsets), pending.error)

    def _commit_if_due(self, now: float) -> None:
        if self.options.auto_commit and now >= self._commit_at:
            self._commit_at = now + self.options.auto_commit_s
            self.commit_async(callback=_report)

    def _working(self) -> list[Message]:
        """Return what the application works on."""
        return [self._given] if isinstance(self._given, Message) else self._given or []

    def _handled(self, places: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
        """Return the next offsets of these partitions behind what was handled, before others read them."""
        positions = dict(self._offsets(None))
        for message in reversed(self._working()):
            if message.deliveries == 1:
                positions[TopicPartition(message.topic, message.partition)] = message.offset
        return {place: positions[place] for place in places if place in positions}


def _report(offsets: dict[TopicPartition, int], error: KmqError | None) -> None:
    if error is not None:
        logger().warning("not committed, so it comes again unless a later commit succeeds: %s", error)


# --- consumer waits --------------------------------------------------------------------------------------------------
# The calls of kmq.Consumer that wait for an answer of the broker.

LAST_COMMIT_S = 10.0  # longest wait for a commit that the consumer makes by itself


class Waits(Commits):
    """Each call waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered."""

    _driver: Driver

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
