"""The acknowledged protocol from the producer's side, without I/O: messages in, lines out; replies in, deliveries out.

    add → queue → take → flying → receive → done            (kmq.Producer and kmq.AsyncProducer move the bytes)
            ↑_______ lost ________|

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
from secrets import token_hex

from kmq.client.options import Options
from kmq.config.values import MIB
from kmq.errors import EXIT_CONFIG, KmqError
from kmq.message.ids import MADE_UP, MAX_ID_DIGITS
from kmq.message.text import (
    Headers,
    RoutingKeys,
    as_bytes,
    each_as_bytes,
    format_headers,
    format_many,
    format_text,
    make_id,
    seconds,
    wrong_type,
)
from kmq.sending.delivery import Delivery
from kmq.sending.failures import ELSEWHERE_S, Fenced, Refused, refused_message
from kmq.sending.protocol import ERR, MOST_REPLY, OK, Replies, check_unfinished, format_hello, read_greeting, read_last
from kmq.sending.window import SendWindow
from kmq.wire.attempts import Attempt
from kmq.wire.refusals import RETRYABLE

Outgoing = tuple[bytes, bytes | None, str | int | None, Headers | None, float]  # routing key, payload, id, headers, ts


def as_list(payloads: Iterable[bytes | str | None], options: Options) -> Sequence[bytes | str | None]:
    """Return the payloads of a list to send. Raises TypeError for anything else.

    A list that is sent in parts is checked as a whole first, so that nothing is sent if one of its payloads is wrong.
    """
    if isinstance(payloads, list | tuple):
        found: Sequence[bytes | str | None] = payloads
    elif isinstance(payloads, str | bytes | bytearray | memoryview | Mapping) or not isinstance(payloads, Iterable):
        raise wrong_type("payloads", payloads, "a list of bytes, str or None")
    else:
        found = list(payloads)
    return each_as_bytes(found) if len(found) > options.max_in_flight else found


class ProducerCore:
    """The messages of one producer, and what is known of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.routing_keys = RoutingKeys()
        self.ids = Ids(options)
        self.window = SendWindow(
            max_in_flight=options.max_in_flight,
            max_in_flight_bytes=options.max_in_flight_bytes,
            linger_ms=options.linger_ms,
            batch_bytes=options.batch_bytes,
            delivery_timeout_s=options.delivery_timeout_s,
        )
        self.connections = self.duplicates = 0  # connections made; messages that the broker had stored already
        self.max_line = MIB  # maximum bytes of a line that the broker accepts
        self.failed: KmqError | None = None  # why the producer has ended
        self._away_since: float | None = time.monotonic()  # None: there is a connection
        self._away_reason = "not connected yet"  # why the last connection ended; "": it has answered since
        self._replied_at = 0.0  # when the last reply came on this connection, or its greeting
        self.has_others = False  # this client has other addresses besides that of this connection
        self._replies = Replies()  # of this connection
        self._attempt: Attempt | None = Attempt(token_hex(8), 0)  # the last one; None: the broker is too old for it

    @property
    def connected(self) -> bool:
        return self._away_since is None

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

    def hello(self, token: str = "", epoch: int | None = None) -> bytes:
        """Return the first line of the next connection.

        The line may be delayed and arrive after that of a later connection. So it carries the number of the attempt.
        """
        options, ids = self.options, self.ids
        self._attempt = self._attempt and self._attempt.next()
        sender = (f"producer={ids.name}", f"attempt={self._attempt}" if self._attempt else "") if ids.name else ()
        scope = f"window={options.window}" if options.window else ""
        words = (*sender, scope, "last=?" * ids.asks_last, "reserved=1" * options.reserved)
        return format_hello(*words, epoch=epoch, token=options.token or token)

    def is_greeting(self, data: bytes) -> bool:
        """Return True if `data` is all of the reply to hello: a line `!last` may follow `!ok`. Raises Refused."""
        check_unfinished(data.rpartition(b"\n")[2])
        has_more = self.ids.asks_last and data.startswith(b"!ok")
        return len(data) > 2 * MOST_REPLY or (data.endswith(b"\n") and data.count(b"\n") > has_more)

    def greeted(self, data: bytes) -> None:
        """Accept the reply to hello. Raises Refused if the broker refuses, and sets `failed` if a retry is useless."""
        line, _, more = data.partition(b"\n")
        verb, rest = read_greeting(line)
        if verb == ERR:
            self._refused_connection(Refused(rest))
        elif verb != OK:
            raise Refused(f"not_kmq it answers {line[:100]!r} to !hello")
        if self.ids.asks_last:
            last = read_last(more, self.ids.name)
            self.window.raise_ids(last)
            self.ids.resume(last)
        self._away_reason = self._away_reason if self.connections else ""
        self._away_since, self._replies, self._replied_at = None, Replies(), time.monotonic()
        self.connections += 1
        name, _, value = rest.partition("=")
        if name == "max_line" and value.isdecimal():
            self.max_line = int(value)

    def _refused_connection(self, refusal: Refused) -> None:
        if refusal.reason.startswith("bad_hello 'attempt="):
            self._attempt = None  # the broker is older; the next hello omits it
        elif refusal.code not in RETRYABLE:
            refusal.exit_code = EXIT_CONFIG
            self.fail(refusal)
        elif refusal.code not in self.options.retry:
            self.window.fail_all(refusal)
        raise refusal

    def lost(self, reason: str) -> None:
        """Note that the connection broke or could not be made. Messages without a reply wait for the next, in order."""
        if self._away_since is None:
            self._away_since = time.monotonic()
        self._away_reason = reason
        self.window.requeue()

    # --- lines out ---------------------------------------------------------------------------------------------------

    @property
    def _may_write(self) -> bool:
        return self._away_since is None and not self._replies.refusing

    def take(self, now: float) -> bytes:
        """Return the next bytes to write; b"" if nothing should go yet."""
        if not self._may_write or not self.window.is_due(now):
            return b""
        data = self.window.take()
        self.window.written()
        return data

    def linger_left(self, now: float) -> float | None:
        """Return the seconds until what is queued has waited long enough; None if that does not depend on time."""
        return self.window.linger_left(now) if self._may_write else None

    # --- replies in --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process replies. Raises Refused if the producer has `failed`, or if the caller must reconnect (`lost`)."""
        replies, self._replied_at = self._replies, time.monotonic()
        for line in replies.split(data):
            answered = replies.answered
            try:
                verb, count, text = replies.parse(line)
                if verb == b"!ack":
                    self.window.stored(count, int(text) - count + 1)
                elif count == 1:
                    self._received_one(verb, text)
                else:
                    raise ValueError(count)
            except (ValueError, IndexError):
                raise Refused(f"protocol the broker says {line[:100]!r} after {answered} replies") from None
            self._away_reason = ""
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
            self.window.stored_before(seq)
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

    def silent(self) -> str:
        """Return why to change to another address: replies are awaited, and none arrives; "": stay.

        A broker that only hangs keeps its connections. With a single address there is no other broker to ask.
        """
        oldest = self.window.oldest
        if not self.has_others or oldest is None or not self.connected:
            return ""
        is_late = time.monotonic() - max(oldest, self._replied_at) > ELSEWHERE_S
        return f"no reply within {ELSEWHERE_S:g} s" if is_late else ""

    def describe(self, now: float) -> str:
        """Return a sentence on what the producer waits for."""
        oldest = self.window.oldest
        text = f"{self.window.unanswered:,} messages unanswered"
        if oldest is not None:
            text += f", the oldest for {now - oldest:.1f} s"
        if self._away_since is not None:
            return f"{text}; not connected for {now - self._away_since:.1f} s: {self._away_reason}"
        text += "; the broker is connected and does not answer: it waits for its disk, or a stage of it is down"
        return f"{text}; the connection before ended: {self._away_reason}" if self._away_reason else text


class Overdue:
    """Fails messages whose time is up, and reports when no reply has come for a long time."""

    def __init__(self, core: ProducerCore, report: Callable[[str], None]) -> None:
        """`report` is called with a text on a stall, unless the options name on_stall."""
        options = core.options
        self.period_s = min(1.0, options.stall_s / 4, (options.delivery_timeout_s or 1.0) / 4)  # between two checks
        self._core = core
        self.report = options.on_stall or report
        self._stall_s = options.stall_s
        self._repeats = options.on_stall is not None  # a log gets one line when a stall begins, and one when it ends
        self._since = 0.0  # the begin of a stall that was reported
        self._look_at = self._reported = time.monotonic()

    def is_due(self, now: float) -> bool:
        return now >= self._look_at

    @property
    def is_said(self) -> bool:
        """Return True while the log has the begin of a stall but not its end."""
        return self._since > 0

    def look(self) -> str:
        """Fail expired messages. Returns what to `report` without holding a lock, "" for nothing."""
        core, now = self._core, time.monotonic()
        self._look_at = now + self.period_s
        core.window.expire(now, core.describe(now))
        oldest = core.window.oldest
        is_stalled = oldest is not None and now - oldest >= self._stall_s
        if self._repeats:
            if not is_stalled or now - self._reported < self._stall_s:
                return ""
            self._reported = now
            return core.describe(now)
        if is_stalled == bool(self._since):
            return ""
        since, self._since = self._since, (oldest or now) if is_stalled else 0.0
        return core.describe(now) if is_stalled else f"the broker replies again, after {now - since:.0f} s"


# --- ids -------------------------------------------------------------------------------------------------------------


class Ids:
    """The ids of one producer or window.

    Provisional   A producer with a name chosen by the user may queue messages before its first connection has told the
                  last id that the broker knows. These ids count from 1, and are raised by that last id on connecting.
                  Once the user gives an id, ids continue after it and are final.
    """

    def __init__(self, options: Options) -> None:
        self.name = options.producer
        self.prefix = ""  # of the generated ids of a window
        self.are_made = False  # all ids are generated, according to the options
        self.asks_last = self.is_provisional = bool(options.producer) and options.first_id is None
        self._next = 0
        self._provisional = 0  # number of provisional ids, once is_provisional is False
        if options.window:
            self.prefix = token_hex(8)
        elif options.dedupe:
            self.are_made = options.first_id is None
            self._next = 1 if options.first_id is None else options.first_id
            self.name = self.name or f"{MADE_UP}{token_hex(12)}"  # the broker forgets generated names first

    @property
    def last(self) -> int:
        """Return the id before the next one that is made."""
        return self._next - 1

    def make(self) -> bytes:
        """Return the next id; b"" if messages have none."""
        number = self._next
        if self.name:
            self._next = number + 1
            return b"%d" % number
        if not self.prefix:
            return b""
        self._next = number + 1
        return f"{self.prefix}-{number}".encode()

    @property
    def next_number(self) -> int | None:
        """Return the number that a producer's next message gets; None if messages have no numbers."""
        return self._next if self.name else None

    def skip(self, count: int) -> None:
        """Continue after `count` more numbers, which were given to messages."""
        self._next += count

    def make_field(self, id: str | int | None, headers: Headers | None) -> bytes:
        """Return the id field with its headers, for the user's `id` or a generated id."""
        if id is None:
            return self.make() + format_headers(headers or ())
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise wrong_type("id", id, "str or int")
        if self.name:
            text = str(id)
            if not text.isdecimal() or not text.isascii() or len(text) > MAX_ID_DIGITS:
                raise ValueError(
                    f"id {id!r}: a producer's id must be a number of at most {MAX_ID_DIGITS} digits, above the last one"
                )
            if self.is_provisional:
                self.is_provisional, self._provisional = False, self.last
            self._next = max(self._next, int(id) + 1)
        return make_id(str(id), headers or ())

    def resume(self, last: int) -> None:
        """Continue after the broker's `last` id plus the provisional ids, which are raised by `last`."""
        made = self.last if self.is_provisional else self._provisional
        self._next = max(self._next, last + made + 1)
        self.asks_last = self.is_provisional = False
