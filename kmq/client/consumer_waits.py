"""The calls of kmq.Consumer that wait for an answer of the broker."""

import time
from collections.abc import Callable, Iterable

from kmq.client.consumer_commits import Commits, Offsets
from kmq.client.consumer_driver import Driver
from kmq.client.consumer_options import logger
from kmq.client.consumer_protocol import Phase
from kmq.client.failures import NotAnswered
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.wire.replies import Nacked, PartitionOffsets
from kmq.wire.requests import TopicPartition

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


__all__ = ["LAST_COMMIT_S", "Waits"]
