"""Where a consumer is in its partitions, and how it is sent elsewhere: the part of kmq.Consumer that asks and seeks."""

import threading
import time
from collections.abc import Callable, Iterable

from kmq.client.consumer_driver import Driver
from kmq.client.consumer_options import ConsumerOptions, Start, to_position
from kmq.client.consumer_protocol import Core, Phase
from kmq.client.consumer_state import Owned
from kmq.client.egress_lines import TopicPartition
from kmq.client.egress_replies import PartitionOffsets
from kmq.client.failures import NotAnswered
from kmq.errors import KmqError


class Places:
    """The calls of a consumer that concern single partitions, each (topic, number)."""

    options: ConsumerOptions
    _core: Core
    _driver: Driver
    _lock: threading.RLock

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
    def connected(self) -> bool:
        return self._core.phase is not Phase.AWAY

    def connect(self, timeout: float | None = None) -> list[TopicPartition]:
        """Wait until the broker has said which partitions this consumer reads, and return them."""
        self._wait_for(lambda: self._core.phase is Phase.READING, timeout, "an assignment")
        return self.assignment()

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that this consumer reads now."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if not owned.revoked]

    def position(self, place: tuple[str, int], timeout: float | None = None) -> int:
        """Return the offset of the next message of a partition. Waits while the broker looks for it."""
        owned = self._find(place)
        self._wait_for(lambda: not owned.moving, timeout, f"the position in {owned.place}")
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
        """Return the partitions that are paused."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if owned.paused]

    def _find(self, place: tuple[str, int]) -> Owned:
        with self._lock:
            owned = self._core.holdings.owned.get(TopicPartition(*place))
        if owned is None:
            raise KmqError(f"{place[0]}/{place[1]}: not assigned to this consumer; see assignment()")
        return owned

    def _ask(self, places: Iterable[tuple[str, int]], timeout: float | None) -> list[PartitionOffsets]:
        """Return the offsets of these partitions, in this order."""
        wanted = [self._find(place).place for place in places]
        if not wanted:
            return []
        with self._lock:
            pending = self._core.offsets(tuple(wanted), time.monotonic())
            self._driver.write()
        self._wait_for(lambda: pending.done, timeout, "the offsets")
        if pending.error is not None:
            raise pending.error
        assert isinstance(pending.value, tuple)
        rows = {row.place: row for row in pending.value}
        return [rows[place] for place in wanted]

    def _wait_for(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not self._driver.wait(is_ready, self.options.timeout_s if timeout is None else timeout):
            raise NotAnswered(f"timed out waiting for {what}: {self.describe()}")


__all__ = ["Places"]
