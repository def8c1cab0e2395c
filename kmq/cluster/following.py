"""Follows the Broadcast Queue until it is told to stop: through errors of processing, lost sessions and a lost Consul.

    follow(queue, handler, stop)      # handler(item): a Snapshot or a Message; an exception: it could not be processed

Invariant   An item is marked only after `handler` has returned for it. Until then it is handed out again.
            No item is handed out before the item ahead of it was processed.
Crash       As in subscriber.py: items that were processed but not marked are handed out again to the next follower.
Memory      The entries of one watch: all messages of the queue (publisher.py).
Not covered A handler that never returns: no more items are received, and the place in Consul is kept.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import NamedTuple

from kmq.cluster.consul import ConsulError, KvEntry, Unanswered
from kmq.cluster.presence import SessionLost
from kmq.cluster.queue import MARK_S, WAIT_S, BroadcastQueue, Heart, who_we_are
from kmq.cluster.subscriber import Displaced, Item, Snapshot, Subscriber
from kmq.errors import BusyError, Stopped

FIRST_WAIT_S = 0.5  # after the first failure; each further failure doubles it
LONGEST_WAIT_S = 30.0  # between two attempts to process an item
LONGEST_LOST_S = 5.0  # between two attempts to reach Consul
_LOOK_S = 0.5  # while nothing comes, a stop or a lost session is noticed after at most so long


class Condition(NamedTuple):
    """Problems now. `lost`: why we hold no place in Consul; `failing`: why an item cannot be processed; "": none."""

    lost: str = ""
    failing: str = ""


def follow(
    queue: BroadcastQueue,
    handler: Callable[[Item], None],
    stop: threading.Event,
    on_change: Callable[[Condition], None] = lambda condition: None,
    start: int | None = None,
    given: Sequence[KvEntry] | None = None,
) -> None:
    """Give each item to `handler`, in order, until `stop` is set. Then mark the processed items, and leave the place.

    If `handler` raises an Exception, the item is handed out again after a pause; others see the reason in the status.
    If it raises one while `stop` is set, the item only counts as not processed. `on_change` is called once per change,
    in this thread. `start`: begin with this epoch. `given`: all entries under `bq/`, as read just now; then return once
    all messages that are there were processed.

    Raises BusyError if another process is the subscriber of this node, ConfigError, and ConsulError if Consul refuses
    the first requests. Later refusals, and a Consul that does not answer, are retried until Consul answers.
    """
    _Following(queue, handler, stop, on_change, start, given).run()


class _Following:
    def __init__(
        self,
        queue: BroadcastQueue,
        handler: Callable[[Item], None],
        stop: threading.Event,
        on_change: Callable[[Condition], None],
        start: int | None,
        given: Sequence[KvEntry] | None,
    ) -> None:
        self._queue, self._handler, self._stop, self._on_change = queue, handler, stop, on_change
        self._start, self._given, self._is_drain = start, given, given is not None
        self._condition = Condition()
        self._lost_wait_s = self._failed_wait_s = FIRST_WAIT_S
        self._had_place = False

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._queue.subscribed(self._start, self._stop) as (subscriber, heart):
                    self._had_place, self._start = True, None
                    self._receive(subscriber, heart)
                    return
            except Stopped:
                return
            except BusyError as error:  # our own old session may not have ended yet, because its Consul agent is away
                if not self._had_place or not str(error).endswith(f" {who_we_are()}"):
                    raise
                self._wait_for_consul(error)
            except ConsulError as error:
                may_end = isinstance(error, Unanswered | SessionLost | Displaced)
                if not self._had_place and not may_end:
                    raise
                self._wait_for_consul(error)

    def _wait_for_consul(self, error: Exception) -> None:
        self._change(lost=str(error))
        self._stop.wait(self._lost_wait_s)
        self._lost_wait_s = min(2 * self._lost_wait_s, LONGEST_LOST_S)

    def _change(self, **words: str) -> None:
        condition = self._condition._replace(**words)
        if condition != self._condition:
            self._condition = condition
            self._on_change(condition)

    # --- with a place ------------------------------------------------------------------------------------------------

    def _receive(self, subscriber: Subscriber, heart: Heart) -> None:
        while not self._stop.is_set():
            try:
                items = self._next(subscriber, heart)
            except ValueError as error:  # the next entry is not a message
                self._fail(subscriber, str(error))
                continue
            self._change(lost="")
            self._lost_wait_s = FIRST_WAIT_S
            if not items:
                if self._is_drain:
                    return
                heart.start(heart.presence.check()).result()
                self._recover(subscriber)  # nothing is left to process
            self._process_all(subscriber, items)

    def _next(self, subscriber: Subscriber, heart: Heart) -> list[Item]:
        """Return what Subscriber.fetch returns. Raises what it raises, SessionLost, and Stopped."""
        if self._given is not None:
            given, self._given = self._given, None
            return self._queue.run(subscriber.choose(given))
        if self._is_drain:
            subscriber.again()
        fetching = heart.start(subscriber.fetch(WAIT_S))
        try:
            while not wait([fetching], _LOOK_S).done:
                if self._stop.is_set():
                    raise Stopped("told to stop")
                if heart.has_stopped_beating:
                    raise SessionLost("our session in Consul has ended")
            return fetching.result()
        finally:
            fetching.cancel()

    def _process_all(self, subscriber: Subscriber, items: list[Item]) -> None:
        marked_at = time.monotonic()
        for item in items:
            if self._stop.is_set():
                break
            try:
                self._handler(item)
            except Exception as error:
                if not self._stop.is_set():
                    self._fail(subscriber, f"{_name(item)}: {str(error) or type(error).__name__}")
                subscriber.again()
                break
            subscriber.processed(item)
            self._recover(subscriber)
            if time.monotonic() - marked_at > MARK_S:
                self._queue.run(subscriber.mark())
                marked_at = time.monotonic()
        self._queue.run(subscriber.mark())

    def _fail(self, subscriber: Subscriber, reason: str) -> None:
        self._change(failing=reason)
        self._queue.run(subscriber.mark())
        self._queue.run(subscriber.report(reason))
        self._stop.wait(self._failed_wait_s)
        self._failed_wait_s = min(2 * self._failed_wait_s, LONGEST_WAIT_S)

    def _recover(self, subscriber: Subscriber) -> None:
        self._failed_wait_s = FIRST_WAIT_S
        if self._condition.failing:
            self._change(failing="")
            self._queue.run(subscriber.report(""))


def _name(item: Item) -> str:
    return f"snapshot {item.epoch}" if isinstance(item, Snapshot) else f"message {item.epoch} ({item.type})"
