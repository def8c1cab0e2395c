"""The messages of a sender that have no outcome yet, when queued messages are written, and when to connect again."""

import random
from collections import deque
from time import monotonic

from kmq.config.values import KIB
from kmq.errors import KmqError
from kmq.message.text import renumber
from kmq.sending.delivery import Delivery, Part
from kmq.sending.failures import NotAnswered, Refused

_MAX_UNSEEN = 1000  # failed messages kept until an error of one of them is shown
BACKOFF_S = (0.01, 0.5)  # wait between attempts to connect: starts at the first value, doubles up to the second
CHUNK_BYTES = 256 * KIB  # of one write: as much as ingress receives at once


class SendWindow:
    """Messages without an outcome, in the order in which they were added: those in flight, then those queued.

    kmq.Producer queues messages and lists; the Kafka door queues units, and questions for a last id as units of 0 lines.

    Invariant   A message leaves the window only with an outcome. `requeue` puts the messages in flight back in front of
                the queue, in order.
    Memory      At most max_in_flight messages and max_in_flight_bytes, plus the one message or list that filled it.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        max_in_flight_bytes: int,
        linger_ms: float | None = 0,
        batch_bytes: int = 1,
        delivery_timeout_s: float | None = None,
    ) -> None:
        """The arguments are options of a producer (kmq/client/options.py)."""
        self.unanswered = self.bytes = 0  # messages, and the bytes they hold
        self.queued_bytes = 0
        self.queue: deque[Delivery] = deque()  # not yet written
        self.flying: deque[Delivery] = deque()  # written on this connection
        self.done: deque[Delivery] = deque()  # their callbacks are called next, in this order
        self._unseen: list[Delivery] = []  # failed, and their errors were not shown yet
        self.hurry = False  # a caller waits: write queued messages now
        self.filling = False  # the window was full: write the next group when it is full again, or on `hurry`
        self._gathers = linger_ms is None
        self._linger_s = (linger_ms or 0) / 1000
        self._batch_bytes = batch_bytes
        self._max_messages, self._max_bytes = max_in_flight, max_in_flight_bytes
        self._expiry_s = delivery_timeout_s

    @property
    def is_full(self) -> bool:
        return self.unanswered >= self._max_messages or self.bytes >= self._max_bytes

    @property
    def is_half_free(self) -> bool:
        """Return True if senders that a full window blocked may resume.

        They wait for half of the window so that messages travel in few, large groups: the broker's cost of a group
        hardly depends on its size. With 64 messages in flight this more than doubles the throughput.
        """
        return self.unanswered <= self._max_messages // 2 and self.bytes <= self._max_bytes // 2

    @property
    def oldest(self) -> float | None:
        """Return when the oldest message without a reply was queued; None if all have replies."""
        waiting = self.flying or self.queue
        return waiting[0].since if waiting else None

    # --- messages in and out -----------------------------------------------------------------------------------------

    def enqueue(self, delivery: Delivery, data: bytes, count: int, extra: int = 0) -> None:
        """Add the `count` lines of `data`, which hold so many `extra` bytes of memory. A count of 0 is a question."""
        size = len(data) + extra
        delivery.data, delivery.count, delivery.size, delivery.since = data, count, size, monotonic()
        self.queue.append(delivery)
        self.queued_bytes += size
        self.bytes += size
        self.unanswered += count

    def take(self) -> bytes:
        """Return queued lines, up to about CHUNK_BYTES. From now on they are in flight."""
        queue, flying = self.queue, self.flying
        parts: list[bytes] = []
        size = 0
        while queue and size < CHUNK_BYTES:
            delivery = queue.popleft()
            self.queued_bytes -= delivery.size
            data = delivery.rest() if delivery.answered else delivery.data
            flying.append(delivery)
            parts.append(data)
            size += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def next(self) -> Delivery:
        """Return the first delivery that is queued. From now on it is in flight."""
        delivery = self.queue.popleft()
        self.queued_bytes -= delivery.size
        self.flying.append(delivery)
        return delivery

    def requeue(self, whole: bool = False) -> None:
        """Put all messages in flight back in front of the queue, because their connection is gone.

        `whole`: a delivery is sent again from its first line, so its replies are forgotten.
        """
        again: list[Delivery] = []
        for delivery in self.flying:
            if delivery.done:  # the delivery has expired
                self._release(delivery)
                continue
            delivery.may_be_stored = True
            if whole:
                self.unanswered += delivery.answered
                delivery.forget()
            again.append(delivery)
        self.flying.clear()
        self.queue.extendleft(reversed(again))
        self.queued_bytes = sum(delivery.size for delivery in self.queue)

    def raise_ids(self, last: int) -> None:
        """Add `last` to all provisional ids. They are all queued: nothing is sent before the greeting."""
        for delivery in self.queue:
            if delivery.is_provisional and not delivery.done:
                data = renumber(delivery.data, last)
                self.bytes += len(data) - delivery.size
                self.queued_bytes += len(data) - delivery.size
                delivery.data, delivery.size = data, len(data)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def stored(self, count: int, seq: int) -> None:
        """Note that the next `count` messages are stored, from `seq` on. Raises IndexError if fewer are in flight, and
        ValueError if a question is before them.
        """
        flying, finish = self.flying, self._finish
        self.unanswered -= count
        freed = 0  # bytes
        try:
            while count:
                delivery = flying[0]
                if delivery.count == 1:
                    delivery.seq, delivery.answered = seq, 1
                    flying.popleft()
                    freed += delivery.size
                    finish(delivery)
                    count -= 1
                    seq += 1
                    continue
                part = min(count, delivery.count - delivery.answered)
                if not part:
                    raise ValueError("a question has another reply")
                delivery.stored(part, seq)
                self._finish_if_answered(delivery)
                count -= part
                seq += part
        finally:
            self.bytes -= freed
            self.unanswered += count  # 0, unless fewer are in flight

    def stored_before(self, seq: int) -> None:
        """Note that the next message had been stored before, as `seq`. Raises IndexError if none is in flight."""
        self.flying[0].repeated(seq)
        self.stored(1, seq)

    def refuse(self, error: Refused) -> None:
        """Note that the next message in flight is refused."""
        delivery = self.flying[0]
        if delivery.count:
            self.unanswered -= 1
            delivery.refuse(error)
        else:
            delivery.error = error
        self._finish_if_answered(delivery)

    def answer(self, number: int) -> None:
        """Note that `number` is the reply to a question. Raises ValueError if none is next, or nothing is in flight."""
        delivery = self.flying[0] if self.flying else None
        if delivery is None or delivery.count:
            raise ValueError(number)
        delivery.seq = number
        self._finish_if_answered(delivery)

    def _finish_if_answered(self, delivery: Delivery) -> None:
        if delivery.answered == delivery.count:
            self.flying.popleft()
            self.bytes -= delivery.size
            self._finish(delivery)

    def fail_all(self, error: KmqError) -> None:
        """Fail every message with `error`."""
        for delivery in (*self.flying, *self.queue):
            if not delivery.done and delivery.error is None:
                delivery.error = error
            self._release(delivery)
            self._finish(delivery)
        self.flying.clear()
        self.queue.clear()
        self.queued_bytes = 0

    def expire(self, now: float, what: str) -> None:
        """Fail messages that have waited longer than delivery_timeout_s; `what` describes the wait."""
        limit = self._expiry_s
        if limit is None:
            return
        for delivery in (*self.flying, *self.queue):
            if now - delivery.since < limit:
                break
            if not delivery.done:
                delivery.error = NotAnswered(f"no reply within {limit:g} s: {what}")
                self._finish(delivery)
        while self.queue and self.queue[0].done:  # one in flight keeps its place, because its reply is still to come
            delivery = self.queue.popleft()
            self.queued_bytes -= delivery.size
            self._release(delivery)

    def _release(self, delivery: Delivery) -> None:
        """Stop counting a delivery that is on no connection and will not be sent."""
        self.unanswered -= delivery.count - delivery.answered
        self.bytes -= delivery.size

    def _finish(self, delivery: Delivery) -> None:
        """Mark `delivery` as done and queue its callback, unless it is done already."""
        delivery.data, delivery.lines = b"", None
        if delivery.done:  # the delivery had expired
            return
        delivery.done = True
        if delivery.callback is not None:
            delivery.seen = True
            if not isinstance(delivery, Part):
                self.done.append(delivery)
            elif delivery.join():
                self._finish(delivery.whole)
        elif delivery.error is not None:
            if len(self._unseen) >= _MAX_UNSEEN:
                self._unseen = [other for other in self._unseen if not other.seen][:_MAX_UNSEEN]
            self._unseen.append(delivery)

    def call_back(self) -> None:
        """Call the callbacks of finished deliveries, in order."""
        done = self.done
        while done:
            delivery = done.popleft()
            assert delivery.callback is not None
            delivery.callback(delivery)

    def unseen_error(self) -> KmqError | None:
        """Return the first error that neither a callback nor result() has shown. From then on all count as seen."""
        unseen = [delivery for delivery in self._unseen if not delivery.seen]
        self._unseen.clear()
        for delivery in unseen:
            delivery.seen = True
        return unseen[0].error if unseen else None

    # --- pacing ------------------------------------------------------------------------------------------------------
    # When queued messages are written: at once, or gathered into fewer and larger writes.

    @property
    def waits_for_reply(self) -> bool:
        """Return True if nothing is written before the next reply. Called for each message, so it must be quick."""
        return bool(
            self._gathers and (self.flying or self.filling) and self.queued_bytes < self._batch_bytes and not self.hurry
        )

    def is_due(self, now: float) -> bool:
        """Return True if something is queued that should not wait for more."""
        if not self.queue:
            return False
        if self.hurry or self.queued_bytes >= self._batch_bytes:
            return True
        if self._gathers:
            return not self.flying and not self.filling
        return now - self.queue[0].since >= self._linger_s

    def linger_left(self, now: float) -> float | None:
        """Return the seconds until what is queued has waited long enough; None if that does not depend on time."""
        if self._gathers or not self.queue:
            return None
        return max(0.0, self.queue[0].since + self._linger_s - now)

    def written(self) -> None:
        """Note that a group has been taken."""
        self.filling = False
        if not self.queue:
            self.hurry = False


def backoff(attempt: int) -> float:
    """Return the seconds before another attempt; random, so that clients do not all reconnect at once."""
    first, longest = BACKOFF_S
    return float(min(longest, first * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0))


__all__ = ["CHUNK_BYTES", "SendWindow", "backoff"]
