"""The acknowledged protocol from the producer's side, without I/O: messages in, lines out; replies in, deliveries out.

    add → queue → take → flying → receive → done            (kmq.Producer and kmq.AsyncProducer move the bytes)
            ↑_______ lost ________|

Invariant   Messages leave in the order in which they came, and what has no reply stays here: `lost` puts all that was flying
            back in front of the queue, with the same ids, so that the next connection sends it again and the broker answers
            `!dup` for what it had stored. Every message gets exactly one outcome: a seq, or an error.
Memory      Bounded by max_in_flight and max_in_flight_bytes: `is_full` until replies come. A message, or one list of them, is
            let in whole where there is any room.
Threads     None: who calls, locks.
"""

import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from types import MappingProxyType
from typing import TypedDict

from kmq.client.lines import format_many, format_text, make_id, make_routing_key, renumber
from kmq.errors import EXIT_CONFIG, ConfigError, KmqError, RetryError
from kmq.ids import MADE_UP, MAX_ID_DIGITS, NAME_PATTERN
from kmq.refusals import RETRYABLE
from kmq.settings import KIB, MIB

CHUNK_BYTES = 256 * KIB  # of one write: what ingress receives at once
_NAME = re.compile(NAME_PATTERN)
_MAX_TOPICS = 10_000  # routing keys remembered as bytes
_NONE: Mapping[int, "Refused"] = MappingProxyType({})  # shared by all messages that are not refused
_MAX_UNTOLD = 1000  # failed messages kept until somebody is told


class Refused(KmqError):
    """The broker refused a message, or the connection: nothing of it was stored. `code` is the first word of `reason`."""

    def __init__(self, reason: str, line: bytes = b"") -> None:
        self.code, self.reason, self.line = reason.partition(" ")[0], reason, line
        message = f": {line[:200]!r}" if line else ""
        super().__init__(f"refused by the broker: {reason}{message}")


_ADVICE = {
    "id_reused": "id {id} was stored before, as seq {rest}, with other content, so this is no retry;"
    " give this message an id above the last one",
    "id_too_old": "id {id} is below the last one stored, and not known as stored itself, because a producer's ids must rise;"
    " give this message an id above the last one, unless it is a late retry",
}


def _refused(reason: str, line: bytes) -> Refused:
    """The error for a message: of what concerns its id, with the id and what to do."""
    code, _, rest = reason.partition(" ")
    if code in _ADVICE:
        id = line.split(b"|", 3)[2].partition(b";")[0].decode(errors="replace") if line.count(b"|") > 1 else ""
        reason = f"{code} {_ADVICE[code].format(id=id, rest=rest)}"
    return Refused(reason, line)


class Fenced(Refused):
    """A newer producer of the same name has said hello: this one has ended."""


class NotAnswered(RetryError, TimeoutError):
    """Time is up and there is no reply: the message may or may not be stored. Sending it again with the same id is safe."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What kmq.Producer and kmq.AsyncProducer can be told.

    Who is sending, and so what a retry does:
        (nothing)       a generated name: a message is stored once however often the connection breaks.
        producer=       a name of your own, whose ids the broker remembers over restarts of your program. Then
                          - give each message its number, send(…, id=n), from something that you can come back to (a line
                            number, a key of your database): what you repeat after a crash is stored once. Or
                          - let ids be made: they go on from the last one that the broker knows of this name, which the first
                            connection asks for, or from `first_id`. A made id that turns out to be stored already is an
                            error (code id_reused), never taken for a success.
                        An id that comes again with other content fails (id_reused), so does one below the last that the broker
                        does not know as stored (id_too_old): neither is stored.
        Two programs with one name: the later one fences the earlier one.
        window=         ids are any text, known to be stored while the broker's KMQ_DEDUPE_COUNT and _AGE let it remember.
        dedupe=False    no memory at all: what had no reply when a connection broke is stored again.
    """

    producer: str = ""
    window: str = ""
    dedupe: bool = True
    first_id: int | None = None
    # None: what comes while a reply is awaited goes with the next write. 0: a write per message. Else gather for so long.
    linger_ms: float | None = None
    batch_bytes: int = 64 * KIB  # gathered so far: written whatever linger_ms says
    max_in_flight: int = 100_000  # messages without a reply, those not yet written included
    max_in_flight_bytes: int = 32 * MIB
    timeout_s: float = 60.0  # of every call that waits and is not given a timeout of its own
    delivery_timeout_s: float | None = None  # a message without a reply for so long fails (NotAnswered); None: never
    retry: frozenset[str] = RETRYABLE  # refusals that pass: reconnect and send again. Others fail the message.
    token: str = ""  # bearer token
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    stall_s: float = 5.0  # whoever waits so long says so, and again each time so much more has passed
    on_stall: Callable[[str], None] | None = None  # how; None: a warning of logger kmq.producer

    def __post_init__(self) -> None:
        for field in ("producer", "window"):
            if getattr(self, field) and not _NAME.fullmatch(getattr(self, field)):
                raise ConfigError(f"{field}={getattr(self, field)!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        if bool(self.producer) + bool(self.window) + (not self.dedupe) > 1:
            raise ConfigError("producer=, window= and dedupe=False exclude each other")
        if self.first_id is not None and not self.producer:
            raise ConfigError("first_id= is for a producer= with a name of its own")
        if min(self.max_in_flight, self.max_in_flight_bytes, self.batch_bytes) < 1:
            raise ConfigError("max_in_flight, max_in_flight_bytes and batch_bytes must be at least 1")


class Choices(TypedDict, total=False):
    """The fields of Options as keyword arguments, for type checkers."""

    producer: str
    window: str
    dedupe: bool
    first_id: int | None
    linger_ms: float | None
    batch_bytes: int
    max_in_flight: int
    max_in_flight_bytes: int
    timeout_s: float
    delivery_timeout_s: float | None
    retry: frozenset[str]
    token: str
    tls: ssl.SSLContext | None
    server_hostname: str | None
    stall_s: float
    on_stall: Callable[[str], None] | None


class Delivery:
    """Messages sent together, one or a list, and what became of them.

    seq         of the message, or of the first stored one of a list; 0: stored before, too long ago for the broker to say which
    runs        of a list: (place in the list, seq there, how many go on like this), in order
    refused     of a list: place → Refused
    duplicates  (place, seq) of each message that had been stored before, in order
    error       why it failed: the first refusal, or that there was no reply
    """

    __slots__ = (
        "answered",
        "callback",
        "count",
        "data",
        "done",
        "duplicates",
        "error",
        "is_provisional",
        "lines",
        "may_be_stored",
        "refused",
        "runs",
        "seen",
        "seq",
        "since",
        "size",
    )

    data: bytes
    count: int
    size: int
    since: float  # by the monotonic clock

    def __init__(self, callback: "Callable[[Delivery], object] | None" = None) -> None:
        self.callback = callback
        self.answered = 0
        self.lines: list[bytes] | None = None  # of `data`, where single ones are looked at
        self.done = self.seen = False
        self.is_provisional = False  # its ids count from 1, until the last one is known
        self.may_be_stored = False  # it has been on a connection that broke, or brings an id that may have been
        self.seq = -1
        self.error: KmqError | None = None
        self.runs: Sequence[tuple[int, int, int]] = ()
        self.refused: Mapping[int, Refused] = _NONE
        self.duplicates: Sequence[tuple[int, int]] = ()

    def line(self, place: int) -> bytes:
        """The message at `place` as it was sent."""
        if not self.data:
            return b""
        if self.lines is None:  # many of a list may be refused
            self.lines = self.data.split(b"\n")
        return self.lines[place]

    def rest(self) -> bytes:
        """The lines that have no reply yet."""
        at = 0
        for _ in range(self.answered):
            at = self.data.index(b"\n", at) + 1
        return self.data[at:]

    def stored(self, count: int, seq: int) -> None:
        """The next `count` messages are stored from `seq` on."""
        if self.seq < 0:
            self.seq = seq
        if self.count > 1:
            runs = self.runs if isinstance(self.runs, list) else []
            runs.append((self.answered, seq, count))
            self.runs = runs
        self.answered += count

    def repeated(self, seq: int) -> None:
        """The next message had been stored before, as `seq`."""
        duplicates = self.duplicates if isinstance(self.duplicates, list) else []
        duplicates.append((self.answered, seq))
        self.duplicates = duplicates

    def refuse(self, error: Refused) -> None:
        """The next message is refused."""
        refused = self.refused if isinstance(self.refused, dict) else {}
        refused[self.answered] = error
        self.refused = refused
        if self.error is None:
            self.error = error
        self.answered += 1

    @property
    def seqs(self) -> list[int]:
        """The seq of each message; 0 where it is not known, or refused."""
        if self.count == 1:
            return [max(self.seq, 0)]
        seqs = [0] * self.count
        for place, seq, count in self.runs:
            if seq:
                seqs[place : place + count] = range(seq, seq + count)
        return seqs


class Core:
    """One producer's messages and what is known of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._gathers = options.linger_ms is None
        self.done: deque[Delivery] = deque()  # those with a callback, to be told
        self.unanswered = self.bytes = 0  # messages without outcome, and the bytes they hold
        self.connections = self.duplicates = 0  # made so far; messages that the broker had stored already
        self.failed: KmqError | None = None  # the producer has ended
        self.connected = False
        self.hurry = False  # somebody waits: what is queued goes now
        self.filling = (
            False  # the window was full: the next group goes when it is full again, or somebody is in a hurry
        )
        self.last_error = "not connected yet"
        self.disconnected_since = time.monotonic()
        self.max_line = MIB
        self._queue: deque[Delivery] = deque()
        self._queued_bytes = 0
        self._flying: deque[Delivery] = deque()  # on this connection, without reply
        self._flown = 0  # messages answered on this connection
        self._refusing = ""  # the connection is of no more use: the code that all further messages get
        self._rest = b""
        self._untold: list[Delivery] = []  # failed, and perhaps nobody has been told
        self._keys: dict[str, bytes] = {}
        self._window_prefix, self._next_id, self._ids_are_made = "", 0, False
        # A name of the user's own, whose ids we make: they go on from its last one. What is queued before that is known has
        # provisional ids, from 1 on, unless one of the user's own came before.
        self._asks_last = self._is_provisional = bool(options.producer) and options.first_id is None
        self._made = 0  # provisional ids
        self.name = options.producer
        if options.window:
            self._window_prefix = token_hex(8)
        elif options.dedupe:
            self._ids_are_made = options.first_id is None
            if self.name:
                self._next_id = 1 if options.first_id is None else options.first_id
            else:
                self.name, self._next_id = f"{MADE_UP}{token_hex(12)}", 1  # the broker forgets such names first

    @property
    def last_id(self) -> int:
        """Below the id that is made next: after a connection that asked for it, the last one that the broker has of this name."""
        return self._next_id - 1

    # --- messages in -------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.unanswered >= self.options.max_in_flight or self.bytes >= self.options.max_in_flight_bytes

    @property
    def has_room_again(self) -> bool:
        """Half of a window that was full is free: who waited goes on then, so that messages travel in few, large groups.

        What a group costs the broker hardly depends on its size: at 64 in flight this more than doubles the throughput.
        """
        options = self.options
        return self.unanswered <= options.max_in_flight // 2 and self.bytes <= options.max_in_flight_bytes // 2

    def add(
        self,
        delivery: Delivery,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        id: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        ts: float | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue one message."""
        if key is None and partition is None:
            routing_key = self._keys.get(topic) or self._routing_key(topic)
        else:
            routing_key = make_routing_key(topic, key, partition)
        if payload.__class__ is not bytes and payload is not None:
            payload = payload.encode() if isinstance(payload, str) else bytes(payload)
        if id is None and not headers and not self._window_prefix:
            id_field = b"%d" % self._make_id() if self.name else b""
        else:
            id_field = self._id_field(delivery, id, headers)
        line = format_text(routing_key, payload, id_field, time.time() if ts is None else ts)
        if self._is_provisional:
            delivery.is_provisional, self._made = True, self._next_id - 1
        self._enqueue(delivery, line, 1)

    def _make_id(self) -> int:
        made = self._next_id
        self._next_id += 1
        return made

    def _id_field(self, delivery: Delivery, id: str | int | None, headers: Mapping[str, str] | None) -> bytes:
        if id is None:
            number = self._make_id() if self.name or self._window_prefix else ""
            id = f"{self._window_prefix}-{number}" if self._window_prefix else number
        else:
            delivery.may_be_stored = True
            if self.name:
                if not str(id).isdecimal() or not str(id).isascii() or len(str(id)) > MAX_ID_DIGITS:
                    raise ValueError(
                        f"id {id!r}: those of a producer are numbers of at most {MAX_ID_DIGITS} digits, each above the last"
                    )
                self._next_id, self._is_provisional = max(self._next_id, int(id) + 1), False
        return make_id(str(id), headers)

    def _routing_key(self, topic: str) -> bytes:
        if len(self._keys) >= _MAX_TOPICS:
            self._keys.clear()
        key = self._keys[topic] = make_routing_key(topic)
        return key

    def add_many(
        self,
        delivery: Delivery,
        topic: str,
        payloads: Sequence[bytes | None],
        key: str | bytes | None = None,
        ts: float | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue a list."""
        routing_key = make_routing_key(topic, key, partition)
        ts = time.time() if ts is None else ts
        if self._window_prefix:
            data = b"".join(
                format_text(routing_key, payload, self._id_field(delivery, None, None), ts) for payload in payloads
            )
        else:
            data = format_many(routing_key, payloads, ts, self._next_id if self.name else None)
            self._next_id += len(payloads)
            if self._is_provisional:
                delivery.is_provisional, self._made = True, self._next_id - 1
        self.add_lines(delivery, data, len(payloads))

    def add_lines(self, delivery: Delivery, lines: bytes, count: int) -> None:
        """Queue `count` whole lines as they are, with ids of their own."""
        if count:
            self._enqueue(delivery, lines, count)
        else:
            delivery.count, delivery.done = 0, True

    def _enqueue(self, delivery: Delivery, data: bytes, count: int) -> None:
        size = len(data)
        delivery.data, delivery.count, delivery.size, delivery.since = data, count, size, time.monotonic()
        self._queue.append(delivery)
        self._queued_bytes += size
        self.bytes += size
        self.unanswered += count

    @property
    def waits_for_reply(self) -> bool:
        """Whether what is queued goes with the next write, after a reply: the quick way to know that nothing goes now."""
        return bool(
            self._gathers
            and (self._flying or self.filling)
            and self._queued_bytes < self.options.batch_bytes
            and not self.hurry
        )

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    # --- a connection ------------------------------------------------------------------------------------------------

    def hello(self, token: str = "") -> bytes:
        """What a connection begins with."""
        token = self.options.token or token
        words = ["!hello acks=1"]
        words += [f"producer={self.name}"] if self.name else []
        words += [f"window={self.options.window}"] if self.options.window else []
        words += ["last=?"] if self._asks_last else []
        words += [f"token={token}"] if token else []
        return " ".join(words).encode() + b"\n"

    def is_greeting(self, data: bytes) -> bool:
        """Whether `data` is all that comes in reply to hello."""
        return data.endswith(b"\n") and (not self._asks_last or not data.startswith(b"!ok") or data.count(b"\n") > 1)

    def greeted(self, greeting: bytes) -> None:
        """The reply to hello. Raises Refused where the connection is of no use; `failed` says whether any other is."""
        line, _, more = greeting.partition(b"\n")
        verb, _, rest = line.decode(errors="replace").strip().partition(" ")
        if verb == "!ok":
            if self._asks_last:
                self._go_on_from(more)
            self.connected, self._flown, self._refusing, self._rest = True, 0, "", b""
            self.connections += 1
            name, _, value = rest.partition("=")
            if name == "max_line" and value.isdecimal():
                self.max_line = int(value)
            return
        if verb != "!err":
            raise Refused(f"not_kmq it answers {line[:100]!r} to !hello")
        error = Refused(rest.removeprefix("0 "))
        if error.code not in RETRYABLE:
            error.exit_code = EXIT_CONFIG
            self.fail(error)
        elif error.code not in self.options.retry:
            self._fail_all(error)
        raise error

    def _go_on_from(self, line: bytes) -> None:
        """`!last <id>`: what is queued with provisional ids gets those behind it."""
        verb, _, id = line.strip().partition(b" ")
        if verb != b"!last" or not id.isdigit():
            raise Refused(f"protocol the broker says {line[:100]!r} where the last id of {self.name} was asked for")
        last = int(id)
        for delivery in self._queue:
            if delivery.is_provisional and not delivery.done:
                data = renumber(delivery.data, last)
                self.bytes += len(data) - delivery.size
                self._queued_bytes += len(data) - delivery.size
                delivery.data, delivery.size = data, len(data)
        self._next_id = max(self._next_id, last + self._made + 1)
        self._asks_last = self._is_provisional = False

    def lost(self, reason: str) -> None:
        """The connection is gone, or could not be made: what has no reply waits for the next one, in order."""
        if self.connected:
            self.disconnected_since = time.monotonic()
        self.connected, self.last_error = False, reason
        again: list[Delivery] = []
        for delivery in self._flying:
            if delivery.done:  # its time was up
                self._release(delivery)
                continue
            delivery.may_be_stored = True
            again.append(delivery)
        self._flying.clear()
        self._queue.extendleft(reversed(again))
        self._queued_bytes = sum(delivery.size for delivery in self._queue)

    # --- lines out ---------------------------------------------------------------------------------------------------

    def may_write(self, now: float) -> bool:
        """Whether something is queued that should not wait for more."""
        queue = self._queue
        if not queue or not self.connected or self._refusing:
            return False
        linger = self.options.linger_ms
        return (
            self.hurry
            or self._queued_bytes >= self.options.batch_bytes
            or (not self._flying and not self.filling if linger is None else now - queue[0].since >= linger / 1000)
        )

    def linger_left(self, now: float) -> float | None:
        """Seconds until what is queued has waited long enough; None where that does not depend on time."""
        linger = self.options.linger_ms
        if linger is None or not self._queue or not self.connected or self._refusing:
            return None
        return max(0.0, self._queue[0].since + linger / 1000 - now)

    def take(self, now: float) -> bytes:
        """The next bytes to write, b"" where nothing should go yet."""
        if not self.may_write(now):
            return b""
        queue, flying = self._queue, self._flying
        parts: list[bytes] = []
        size = 0
        while queue and size < CHUNK_BYTES:
            delivery = queue.popleft()
            self._queued_bytes -= delivery.size
            data = delivery.rest() if delivery.answered else delivery.data
            flying.append(delivery)
            parts.append(data)
            size += len(data)
        self.filling = False
        if not queue:
            self.hurry = False
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # --- replies in --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Replies. Raises Refused where the connection must be replaced (call `lost`), or the producer has `failed`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                verb, number, rest = line.split(b" ", 2)
                count = int(number) - self._flown
                if count < 1:
                    raise ValueError(number)
                if verb == b"!ack":
                    self._stored(count, int(rest) - count + 1)
                elif count > 1:
                    raise ValueError(number)
                elif verb == b"!dup":
                    self._stored_before(int(rest))
                elif verb == b"!err":
                    self._refused(rest.decode(errors="replace"))
                else:
                    raise ValueError(verb)
            except (ValueError, IndexError):
                raise Refused(f"protocol the broker says {line[:100]!r} after {self._flown} replies") from None
        if self._refusing and not self._flying:
            raise Refused(self._refusing)  # all it had of ours has been answered: the next connection may do better

    def _stored(self, count: int, seq: int) -> None:
        flying = self._flying
        self._flown += count
        self.unanswered -= count
        while count:
            delivery = flying[0]
            if delivery.count == 1:
                delivery.seq, delivery.answered = seq, 1
                flying.popleft()
                self.bytes -= delivery.size
                self._finish(delivery)
                count -= 1
                seq += 1
                continue
            part = min(count, delivery.count - delivery.answered)
            delivery.stored(part, seq)
            if delivery.answered == delivery.count:
                flying.popleft()
                self.bytes -= delivery.size
                self._finish(delivery)
            count -= part
            seq += part

    def _stored_before(self, seq: int) -> None:
        delivery = self._flying[0]
        self.duplicates += 1
        if delivery.may_be_stored or not self._ids_are_made:
            delivery.repeated(seq)
            self._stored(1, seq)
        else:
            line = delivery.line(delivery.answered)
            self._refuse(
                Refused(f"id_reused seq {seq} has this id already: it was used before this producer began", line)
            )

    def _refused(self, reason: str) -> None:
        code = reason.partition(" ")[0]
        if code == "fenced":
            self.fail(Fenced(reason))
            raise Fenced(reason)
        if code in self.options.retry:
            raise Refused(reason)
        if code in RETRYABLE:
            self._refusing = reason
        delivery = self._flying[0]
        self._refuse(_refused(reason, delivery.line(delivery.answered)))

    def _refuse(self, error: Refused) -> None:
        delivery = self._flying[0]
        self._flown += 1
        self.unanswered -= 1
        delivery.refuse(error)
        if delivery.answered == delivery.count:
            self._flying.popleft()
            self.bytes -= delivery.size
            self._finish(delivery)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def _finish(self, delivery: Delivery) -> None:
        delivery.data, delivery.lines = b"", None
        if delivery.done:  # its time was up before
            return
        delivery.done = True
        if delivery.callback is not None:
            delivery.seen = True
            self.done.append(delivery)
        elif delivery.error is not None:
            if len(self._untold) >= _MAX_UNTOLD:
                self._untold = [untold for untold in self._untold if not untold.seen][:_MAX_UNTOLD]
            self._untold.append(delivery)

    def _release(self, delivery: Delivery) -> None:
        """It is on no connection and goes on none."""
        self.unanswered -= delivery.count - delivery.answered
        self.bytes -= delivery.size

    def _fail_all(self, error: KmqError) -> None:
        for delivery in (*self._flying, *self._queue):
            if not delivery.done and delivery.error is None:
                delivery.error = error
            self._release(delivery)
            self._finish(delivery)
        self._flying.clear()
        self._queue.clear()
        self._queued_bytes = 0

    def fail(self, error: KmqError) -> None:
        """The producer has ended, and with it everything that has no reply."""
        self.failed = error
        self._fail_all(error)

    def expire(self, now: float) -> None:
        """Fail what has waited longer than delivery_timeout_s."""
        limit = self.options.delivery_timeout_s
        if limit is None:
            return
        for delivery in (*self._flying, *self._queue):
            if now - delivery.since < limit:
                break
            if not delivery.done:
                delivery.error = NotAnswered(f"no reply within {limit:g} s: {self.describe(now)}")
                self._finish(delivery)
        while self._queue and self._queue[0].done:  # one that is flying holds its place among the replies
            self._drop_queued()

    def _drop_queued(self) -> None:
        delivery = self._queue.popleft()
        self._queued_bytes -= delivery.size
        self._release(delivery)

    def unseen_error(self) -> KmqError | None:
        """What failed and neither a callback nor result() has shown to anybody; shown now."""
        unseen = [delivery for delivery in self._untold if not delivery.seen]
        self._untold.clear()
        for delivery in unseen:
            delivery.seen = True
        return unseen[0].error if unseen else None

    # --- what to say -------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> float | None:
        """Since when the oldest message waits for its reply."""
        waiting = self._flying or self._queue
        return waiting[0].since if waiting else None

    def describe(self, now: float) -> str:
        """What is being waited for."""
        oldest = self.oldest
        text = f"{self.unanswered:,} messages unanswered"
        if oldest is not None:
            text += f", the oldest for {now - oldest:.1f} s"
        if not self.connected:
            return f"{text}; not connected for {now - self.disconnected_since:.1f} s: {self.last_error}"
        return f"{text}; the broker is connected and does not answer: it waits for its disk, or a stage of it is down"


__all__ = ["Core", "Delivery", "Fenced", "NotAnswered", "Options", "Refused"]
