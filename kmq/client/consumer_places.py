"""What a consumer reads and where it is: the calls of kmq.Consumer and kmq.AsyncConsumer that do not wait."""

import time
from contextlib import AbstractContextManager
from typing import Protocol

from kmq.client.consumer_options import ConsumerOptions, Start, to_place, to_position, to_topic
from kmq.client.consumer_protocol import Core, Phase
from kmq.client.consumer_state import Owned
from kmq.client.consumer_wire import Pending
from kmq.client.failures import Refused
from kmq.errors import ConfigError, KmqError
from kmq.wire.replies import PartitionOffsets
from kmq.wire.requests import TopicPartition


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


__all__ = ["Places"]
