"""From the bytes of a connection to whole lines for the framer.

What one receive brought goes on as one piece (handover.py): one search for the last newline, one copy. The framer
judges the lines. Only what it cannot judge is looked at here:

    a line over KMQ_MAX_LINE     becomes dead.malformed, cut at the limit, when its newline or the end comes
    no newline at the end        becomes dead.malformed

A connection whose first line begins with `!` speaks the acknowledged protocol (hello.py). Its messages are counted, for
the replies. One over KMQ_MAX_LINE goes on cut, one byte longer than the limit, so that the framer refuses it. One
without newline at the end is refused here, or becomes dead.malformed where the hello asked for no replies.

Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes, and all of them together PARTIAL_BYTES (limits.py).
            Over that the connection with the longest line is closed, and what it has sent so far becomes
            dead.malformed.
"""

import time
from collections.abc import Callable

from kmq.config.values import KIB
from kmq.ingress import hello
from kmq.ingress.connection import GREETING, PLAIN, Connection
from kmq.ingress.limits import Errs, PartialBudget
from kmq.links.fifo import Sender
from kmq.links.received import Handover, Part
from kmq.message import record

RECEIVE_BYTES = 256 * KIB  # one receive; the buffer is shared by all connections
_LEAST_BYTES = 16 * KIB  # a TLS record fits (tls.py)


class Intake:
    """Receives from connections and hands whole lines over."""

    def __init__(
        self, handover: Handover, max_line: int, greet: Callable[[Connection, bytes], None] | None = None
    ) -> None:
        """`greet` gets a first line that begins with `!`. It names the connection, or raises Refused."""
        self.handover, self.max_line, self.greet = handover, max_line, greet
        self.hello_required = b""  # code and reason for lines without a hello; b"": they are taken
        self.bytes = self.refused = 0
        self.errs = Errs()
        self.partial = PartialBudget()
        self._buffer = bytearray(max(_LEAST_BYTES, min(RECEIVE_BYTES, max_line)))
        self._view = self._target = memoryview(self._buffer)

    def expect_clogging(self, yes: bool) -> None:
        """Take little at once while `receive` may be called although the way to the framer is clogged."""
        self._target = self._view[:_LEAST_BYTES] if yes else self._view

    def receive(self, connection: Connection) -> bool:
        """Take what has arrived. Returns False when nothing more will come."""
        try:
            count = connection.sock.recv_into(self._target)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not count:
            return False
        connection.was_active = True
        if connection.phase == GREETING:
            if (connection.partial or self._buffer)[:1] == b"!":
                return self._greet(connection, count)
            connection.phase = PLAIN
            if self.hello_required:
                connection.replies.refusal = self.hello_required
                connection.replies.pending += b"!err 0 %b\n" % self.hello_required
                self.errs.count(self.hello_required)
                return False
        self._take(connection, count)
        return True

    def _greet(self, connection: Connection, count: int) -> bool:
        """Take buffer[:count]: a hello, or the next part of one, and the messages behind it."""
        end = self._buffer.find(b"\n", 0, count)
        self._keep(connection, 0, count if end < 0 else end)
        if end < 0 and connection.length <= hello.MAX_BYTES:
            return True
        line = bytes(connection.partial)
        self._forget_partial(connection)
        connection.phase = PLAIN
        try:
            if self.greet is None or len(line) > hello.MAX_BYTES:
                raise hello.Refused(f"bad_hello longer than {hello.MAX_BYTES} bytes")
            self.greet(connection, line)
        except hello.Refused as refused:
            connection.replies.pending += f"!err 0 {refused}\n".encode()
            self.errs.count(str(refused).encode())
            connection.send_replies()
            return False
        connection.replies.pending += b"!ok max_line=%d\n" % self.max_line
        if not connection.send_replies():
            return False
        if connection.replies.asks_last and connection.sender is not None:
            self.handover.say(connection.sender.question())
        if end + 1 < count:
            rest = count - end - 1
            self._buffer[:rest] = self._buffer[end + 1 : count]
            self._take(connection, rest)
        return True

    def _forget_partial(self, connection: Connection) -> None:
        self.partial.bytes -= len(connection.partial)
        connection.partial, connection.length, connection.unfinished_since = bytearray(), 0, 0.0

    def _take(self, connection: Connection, count: int) -> None:
        """Take buffer[:count]: lines, and the parts of lines at both ends."""
        buffer, start = self._buffer, 0
        end = buffer.rfind(b"\n", 0, count) + 1
        if end:
            if connection.length:
                start = self._end_line(connection, buffer.index(b"\n", 0, end) + 1, end)
            if start < end:
                self._forward(connection, start, end)
        if end < count:
            self._keep(connection, end, count)

    def _keep(self, connection: Connection, start: int, end: int) -> None:
        """Add buffer[start:end] to the unfinished line, as far as the limit of a line allows."""
        space = self.max_line + 1 - len(connection.partial)
        kept = min(end - start, max(0, space))
        connection.partial += self._view[start : start + kept]
        connection.length += end - start
        self.partial.bytes += kept

    def _end_line(self, connection: Connection, first: int, end: int) -> int:
        """End the unfinished line with buffer[:first], and take with it what follows, up to `end`, if it may be taken.

        Return where the rest of the buffer begins.
        """
        if connection.length + first - 1 > self.max_line or end > self.max_line:
            self._keep(connection, 0, first - 1)
            self._pass_line(connection, "too_long" if connection.length > self.max_line else "")
            return first
        partial = connection.partial
        self._forget_partial(connection)
        self._pass_on(connection, [partial, self._view[:end]], self._buffer.count(b"\n", 0, end))
        return end

    def _pass_line(self, connection: Connection, reason: str) -> None:
        """Pass on the unfinished line: it is complete, or never will be (`reason`)."""
        line, length = bytes(connection.partial), connection.length
        self._forget_partial(connection)
        self._pass_on(connection, [self._admitted(connection, line, length, reason), b"\n"], 1)

    def _admitted(self, connection: Connection, line: bytes, length: int, reason: str) -> bytes:
        """Return what goes on for a line of `length` bytes that must not go on as it is, if there is a `reason`."""
        if not reason:
            return line
        if connection.sender is not None:
            return line[: self.max_line + 1]  # the framer refuses it, in its place among the replies
        self.refused += 1
        return record.malformed(reason, line, length, self.max_line)

    def _forward(self, connection: Connection, start: int, end: int) -> None:
        """Pass on buffer[start:end], which is whole lines."""
        if end - start > self.max_line:  # only where the limit is very low: the buffer is seldom larger
            for line in bytes(self._view[start : end - 1]).split(b"\n"):
                reason = "too_long" if len(line) > self.max_line else ""
                self._pass_on(connection, [self._admitted(connection, line, len(line), reason), b"\n"], 1)
            return
        count = self._buffer.count(b"\n", start, end) if connection.sender is not None else 0
        self._pass_on(connection, [self._view[start:end]], count)

    def _pass_on(self, connection: Connection, parts: list[Part], count: int) -> None:
        """Hand over whole lines, `count` messages if the connection has a sender; or refuse them if it is refused."""
        sender = connection.sender
        if sender is not None:
            replies = connection.replies
            if replies.refusal:
                replies.refuse(count)
                self.errs.count(replies.refusal, count)
                return
            replies.taken += count
            replies.passed += count
            if not replies.train_at and replies.acks:
                replies.train_end, replies.train_at = replies.taken, time.monotonic()
        self._hand_over(parts, sender, count)

    def _hand_over(self, parts: list[Part], sender: Sender | None, count: int) -> None:
        self.bytes += sum(map(len, parts))
        self.handover.put(parts, sender, count)

    def finish(self, connection: Connection) -> None:
        """Take the end of a connection: its unfinished line is refused, or becomes dead.malformed (connection.py)."""
        line, length, replies = bytes(connection.partial), connection.length, connection.replies
        self._forget_partial(connection)
        if not length or connection.phase == GREETING:
            return
        reason = "too_long" if length > self.max_line else "no_newline"
        if replies.acks:
            replies.refusal = replies.refusal or b"%b the connection ended before the line did" % reason.encode()
            replies.refuse(1)
            self.errs.count(replies.refusal)
        elif not replies.refusal:
            self.refused += 1
            self._hand_over([record.malformed(reason, line, length, self.max_line), b"\n"], None, 0)
