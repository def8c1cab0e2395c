"""The acknowledged protocol from the producer's side, without I/O: messages in, lines out; replies in, deliveries out.

    add → queue → take → flying → receive → done            (kmq.Producer and kmq.AsyncProducer move the bytes)
            ↑_______ lost ________|

    ids.py       which id the next message gets        window.py    messages without an outcome, and their pacing
    wire.py      hello, its reply, replies             delivery.py  a message on its way, and its outcome
    options.py   the options of a producer             failures.py  why a message was not stored

Invariant   Messages always leave in the order in which they were added. A message without a reply is kept: `lost` puts
            all messages in flight back in front of the queue, with the same ids. The next connection sends them again,
            and the broker replies `!dup` to those it had stored. Every message gets exactly one outcome: a seq, or an
            error.
Memory      At most max_in_flight messages and max_in_flight_bytes: then `window.is_full` until replies come. A message,
            or one list of messages, is accepted whole as long as the window is not full.
Threads     None: callers lock.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kmq.client.delivery import Delivery, Outcomes
from kmq.client.failures import Fenced, Refused, refused_message
from kmq.client.ids import Ids
from kmq.client.options import Options
from kmq.client.window import Pacing, Window
from kmq.client.wire import Greeting, Replies, format_hello
from kmq.config.values import MIB
from kmq.errors import EXIT_CONFIG, KmqError
from kmq.message.text import (
    Headers,
    RoutingKeys,
    as_bytes,
    each_as_bytes,
    format_many,
    format_text,
    seconds,
    wrong_type,
)
from kmq.wire.refusals import RETRYABLE

Outgoing = tuple[bytes, bytes | None, str | int | None, Headers | None, float]  # routing key, payload, id, headers, ts


def as_list(payloads: Iterable[bytes | str | None], options: Options) -> Sequence[bytes | str | None]:
    """Return the payloads of a list to send. Raises TypeError for what is no list of them.

    A list that is sent in parts is checked as a whole, so that none of it is sent if one of its payloads is wrong.
    """
    if isinstance(payloads, list | tuple):
        found: Sequence[bytes | str | None] = payloads
    elif isinstance(payloads, str | bytes | bytearray | memoryview | Mapping) or not isinstance(payloads, Iterable):
        raise wrong_type("payloads", payloads, "a list of bytes, str or None")
    else:
        found = list(payloads)
    return each_as_bytes(found) if len(found) > options.max_in_flight else found


class Outage:
    """Since when there is no connection, and why."""

    __slots__ = ("reason", "since")

    def __init__(self, reason: str) -> None:
        self.reason, self.since = reason, time.monotonic()


class Core:
    """The messages of one producer, and what is known of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.routing_keys = RoutingKeys()
        self.ids = Ids(options)
        self.outcomes = Outcomes()
        self.window = Window(options, self.outcomes)
        self.pacing = Pacing(options, self.window)
        self.connections = self.duplicates = 0  # connections made; messages that the broker had stored already
        self.max_line = MIB  # maximum bytes of a line that the broker accepts
        self.failed: KmqError | None = None  # why the producer has ended
        self._outage: Outage | None = Outage("not connected yet")
        self._replies = Replies()  # of this connection

    @property
    def connected(self) -> bool:
        return self._outage is None

    # --- messages in -------------------------------------------------------------------------------------------------

    def add(
        self,
        delivery: Delivery,
        routing_key: bytes,
        payload: bytes | str | None,
        id: str | int | None = None,
        headers: Headers | None = None,
        ts: float | None = None,
    ) -> None:
        """Queue one message. Raises TypeError that names the parameter which is of another type."""
        if payload.__class__ is not bytes and payload is not None:
            payload = as_bytes(payload, "payload")
        ids = self.ids
        if id is None and not headers:
            field = ids.make()
        else:
            delivery.may_be_stored = id is not None
            field = ids.make_field(id, headers)
        if ids.is_provisional:
            delivery.is_provisional = True
        line = format_text(routing_key, payload, field, time.time() if ts is None else seconds(ts, "ts"))
        self.window.enqueue(delivery, line, 1)

    def add_many(
        self, delivery: Delivery, routing_key: bytes, payloads: Sequence[bytes | str | None], ts: float | None = None
    ) -> None:
        """Queue a list, with generated ids."""
        ids = self.ids
        ts = time.time() if ts is None else seconds(ts, "ts")
        if ids.prefix:
            exact = each_as_bytes(payloads)
            data = b"".join(format_text(routing_key, payload, ids.make(), ts) for payload in exact)
        else:
            data = format_many(routing_key, payloads, ts, ids.next_number)
            ids.skip(len(payloads))
            delivery.is_provisional = ids.is_provisional
        self.add_lines(delivery, data, len(payloads))

    def add_each(self, delivery: Delivery, messages: Sequence[Outgoing]) -> None:
        """Queue a list of messages that have routing keys, ids and times of their own."""
        ids, parts = self.ids, []
        for routing_key, payload, id, headers, ts in messages:
            field = ids.make() if id is None and not headers else ids.make_field(id, headers)
            parts.append(format_text(routing_key, payload, field, ts))
            delivery.may_be_stored |= id is not None
        delivery.is_provisional = self.ids.is_provisional
        self.add_lines(delivery, b"".join(parts), len(messages))

    def add_lines(self, delivery: Delivery, lines: bytes, count: int) -> None:
        """Queue `count` whole lines as they are, with ids of their own."""
        if count:
            self.window.enqueue(delivery, lines, count)
        else:
            delivery.count, delivery.done = 0, True

    # --- a connection ------------------------------------------------------------------------------------------------

    def hello(self, token: str = "") -> bytes:
        """Return the first line of a connection."""
        options = self.options
        return format_hello(self.ids, options.window, options.token or token, options.reserved)

    def is_greeting(self, data: bytes) -> bool:
        """Return True if `data` is all of the reply to hello."""
        return Greeting.is_whole(data, self.ids.asks_last)

    def greeted(self, data: bytes) -> None:
        """Accept the reply to hello. Raises Refused if the broker refuses, and sets `failed` if a retry is useless."""
        greeting = Greeting(data)
        if greeting.refusal is not None:
            self._refused_connection(greeting.refusal)
        if self.ids.asks_last:
            last = greeting.read_last(self.ids.name)
            self.window.raise_ids(last)
            self.ids.resume(last)
        self._outage, self._replies = None, Replies()
        self.connections += 1
        self.max_line = greeting.max_line or self.max_line

    def _refused_connection(self, refusal: Refused) -> None:
        if refusal.code not in RETRYABLE:
            refusal.exit_code = EXIT_CONFIG
            self.fail(refusal)
        elif refusal.code not in self.options.retry:
            self.window.fail_all(refusal)
        raise refusal

    def lost(self, reason: str) -> None:
        """Note that the connection broke or could not be made. Messages without a reply wait for the next, in order."""
        if self._outage is None:
            self._outage = Outage(reason)
        self._outage.reason = reason
        self.window.requeue()

    # --- lines out ---------------------------------------------------------------------------------------------------

    @property
    def _may_write(self) -> bool:
        return self._outage is None and not self._replies.refusing

    def take(self, now: float) -> bytes:
        """Return the next bytes to write; b"" if nothing should go yet."""
        if not self._may_write or not self.pacing.is_due(now):
            return b""
        data = self.window.take()
        self.pacing.written()
        return data

    def linger_left(self, now: float) -> float | None:
        """Return the seconds until what is queued has waited long enough; None if that does not depend on time."""
        return self.pacing.linger_left(now) if self._may_write else None

    # --- replies in --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process replies. Raises Refused if the producer has `failed`, or if the caller must reconnect (`lost`)."""
        replies = self._replies
        for line in replies.split(data):
            answered = replies.answered
            try:
                verb, number, text = line.split(b" ", 2)
                count = replies.count_to(int(number))
                if verb == b"!ack":
                    self.window.stored(count, int(text) - count + 1)
                elif count == 1:
                    self._received_one(verb, text)
                else:
                    raise ValueError(number)
            except (ValueError, IndexError):
                raise Refused(f"protocol the broker says {line[:100]!r} after {answered} replies") from None
        if replies.refusing and not self.window.flying:
            raise Refused(replies.refusing)  # the next connection may be accepted

    def _received_one(self, verb: bytes, text: bytes) -> None:
        """Process a reply that concerns only the next message."""
        if verb == b"!dup":
            self._stored_before(int(text))
        elif verb == b"!err":
            self._refused(text.decode(errors="replace"))
        else:
            raise ValueError(verb)

    def _stored_before(self, seq: int) -> None:
        delivery = self.window.flying[0]
        self.duplicates += 1
        if delivery.may_be_stored or not self.ids.are_made:
            delivery.repeated(seq)
            self.window.stored(1, seq)
        else:
            line = delivery.line(delivery.answered)
            reason = f"id_reused seq {seq} has this id already: it was used before this producer began"
            self.window.refuse(Refused(reason, line))

    def _refused(self, reason: str) -> None:
        code = reason.partition(" ")[0]
        if code == "fenced":
            self.fail(Fenced(reason))
            raise Fenced(reason)
        if code in self.options.retry:
            raise Refused(reason)
        if code in RETRYABLE:
            self._replies.refusing = reason
        delivery = self.window.flying[0]
        self.window.refuse(refused_message(reason, delivery.line(delivery.answered)))

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, error: KmqError) -> None:
        """End the producer, and fail every message without a reply."""
        self.failed = error
        self.window.fail_all(error)

    def describe(self, now: float) -> str:
        """Return a sentence on what the producer waits for."""
        oldest, outage = self.window.oldest, self._outage
        text = f"{self.window.unanswered:,} messages unanswered"
        if oldest is not None:
            text += f", the oldest for {now - oldest:.1f} s"
        if outage is not None:
            return f"{text}; not connected for {now - outage.since:.1f} s: {outage.reason}"
        return f"{text}; the broker is connected and does not answer: it waits for its disk, or a stage of it is down"


class Overdue:
    """Fails messages whose time is up, and reports when no reply has come for a long time."""

    def __init__(self, core: Core, report: Callable[[str], None]) -> None:
        """`report` is called with a text on a stall, unless the options name on_stall."""
        options = core.options
        self.period_s = min(1.0, options.stall_s / 4, (options.delivery_timeout_s or 1.0) / 4)  # between two checks
        self._core = core
        self.report = options.on_stall or report
        self._stall_s = options.stall_s
        self._look_at = self._reported = time.monotonic()

    def is_due(self, now: float) -> bool:
        return now >= self._look_at

    def look(self) -> str:
        """Fail expired messages. Returns what to `report` without holding a lock, "" for nothing."""
        core, now = self._core, time.monotonic()
        self._look_at = now + self.period_s
        core.window.expire(now, core.describe(now))
        oldest = core.window.oldest
        if oldest is None or now - max(oldest, self._reported) < self._stall_s:
            return ""
        self._reported = now
        return core.describe(now)


__all__ = ["Core", "Outgoing", "Overdue", "as_list"]
