"""The commits of a kmq.Consumer: those that the application asks for, and those that the consumer makes by itself.

Invariant   The consumer by itself commits only what the application has come back for: never the message that is being
            handled, or that has raised an exception.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from kmq.client.consumer_options import logger, to_place
from kmq.client.consumer_places import Places
from kmq.client.consumer_wire import Pending
from kmq.client.failures import Fenced
from kmq.errors import KmqError
from kmq.message.message import Message
from kmq.message.text import whole_number, wrong_type
from kmq.wire.replies import Nacked
from kmq.wire.requests import MAX_DELAY_MS, MAX_REASON, Nack, TopicPartition

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


__all__ = ["Commits", "Offsets", "OnCommit"]
