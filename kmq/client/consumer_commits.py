"""The commits of a kmq.Consumer: those that the application asks for, and those that the consumer makes by itself.

Invariant   The consumer by itself commits only what the application has come back for: never the message that is being
            handled, or that has raised an exception.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kmq.client.consumer_driver import logger
from kmq.client.consumer_places import Places
from kmq.client.consumer_wire import Pending
from kmq.client.egress_lines import TopicPartition
from kmq.client.message import Message
from kmq.errors import KmqError

_LAST_COMMIT_S = 10.0  # longest wait for a commit that the consumer makes by itself

Offsets = Mapping[tuple[str, int], int]
OnCommit = Callable[[dict[TopicPartition, int], KmqError | None], object]


class Commits(Places):
    """The calls of a consumer that commit."""

    _given: Message | list[Message] | None  # what the application works on
    _committed: deque[tuple[OnCommit, Pending]]  # for callbacks
    _commit_at: float  # when the consumer commits by itself

    def commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None:
        """Commit and wait until that is durable: all that was given out, or up to a message, or the next offsets.

        Raises Refused: `fenced` if the partition is no longer this member's, so another one handles its records.
        """
        pending = self._commit(offsets)
        self._wait_for(lambda: pending.done, timeout, "the commit")
        if pending.error is not None:
            raise pending.error

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None:
        """Commit without waiting. `callback` gets the offsets and the error or None, at a later poll."""
        pending = self._commit(offsets)
        if callback is not None:
            self._committed.append((callback, pending))

    def _commit(self, offsets: Message | Offsets | None) -> Pending:
        if not self.options.group_id:
            raise KmqError("commit: this consumer has no group that could remember it; give group_id=")
        with self._lock:
            if self._core.failed is not None:
                raise self._core.failed
            pending = self._core.commit(self._offsets(offsets), time.monotonic())
            self._driver.write()
        return pending

    def _offsets(self, offsets: Message | Offsets | None) -> Iterable[tuple[TopicPartition, int]]:
        if isinstance(offsets, Message):
            return [(TopicPartition(offsets.topic, offsets.partition), offsets.offset + 1)]
        if offsets is not None:
            return [(TopicPartition(*place), offset) for place, offset in offsets.items()]
        return [(place, owned.position) for place, owned in self._core.holdings.owned.items() if not owned.moving]

    def _run_callbacks(self) -> None:
        """Tell the application how its commits have ended, in order."""
        while self._committed and self._committed[0][1].done:
            callback, pending = self._committed.popleft()
            callback(dict(pending.offsets), pending.error)

    def _commit_if_due(self, now: float) -> None:
        if self.options.auto_commit and now >= self._commit_at:
            self._commit_at = now + self.options.auto_commit_s
            self.commit_async(callback=_report)

    def _commit_last(self, places: Iterable[TopicPartition]) -> None:
        """Commit what was handled of these partitions, before others read them."""
        positions = dict(self._offsets(None))
        given = [self._given] if isinstance(self._given, Message) else self._given or []
        for message in reversed(given):  # the application works on these
            positions[TopicPartition(message.topic, message.partition)] = message.offset
        try:
            self.commit({place: positions[place] for place in places if place in positions}, _LAST_COMMIT_S)
        except KmqError as err:
            logger().warning("not committed, so it comes again: %s", err)


def _report(offsets: dict[TopicPartition, int], error: KmqError | None) -> None:
    if error is not None:
        logger().warning("not committed, so it comes again unless a later commit succeeds: %s", error)


__all__ = ["Commits", "Offsets", "OnCommit"]
