"""The commits of a kmq.Consumer: those that the application asks for, and those that the consumer makes by itself.

Invariant   The consumer by itself commits only what the application has come back for: never the message that is being
            handled, or that has raised an exception.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kmq.client.consumer_options import logger, to_place
from kmq.client.consumer_places import Places
from kmq.client.consumer_wire import Pending
from kmq.client.egress_lines import TopicPartition
from kmq.client.lines import whole_number, wrong_type
from kmq.client.message import Message
from kmq.errors import KmqError

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

    def _handled(self, places: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
        """Return the next offsets of these partitions behind what was handled, before others read them."""
        positions = dict(self._offsets(None))
        given = [self._given] if isinstance(self._given, Message) else self._given or []
        for message in reversed(given):  # the application works on these
            positions[TopicPartition(message.topic, message.partition)] = message.offset
        return {place: positions[place] for place in places if place in positions}


def _report(offsets: dict[TopicPartition, int], error: KmqError | None) -> None:
    if error is not None:
        logger().warning("not committed, so it comes again unless a later commit succeeds: %s", error)


__all__ = ["Commits", "Offsets", "OnCommit"]
