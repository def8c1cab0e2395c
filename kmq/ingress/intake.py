"""From the bytes of a connection to whole lines in the FIFO.

Lines go on in blocks as they were received: one search for the last newline, one for a line that begins with a control
byte, then writes of at most PIPE_BUF. Only what the framer cannot judge is looked at line by line here:

    a line longer than one write    goes as pieces when it is complete
    a line over KMQ_MAX_LINE        becomes dead.malformed, cut at the limit, when its newline or the end comes
    no newline at the end           becomes dead.malformed
    a first byte `!`, `+` or `-`    becomes dead.malformed: the framer would take it for a control line
    a NUL                           becomes dead.malformed: the framer's staging area ends at its last other byte

A connection whose first line begins with `!` speaks the acknowledged protocol (hello.py). Its lines go as groups. A
line that it should not have sent goes as `!e <reason>` in its place, so that the framer's replies stay in order. A line
without newline at the end was never sent.

Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes, and all of them together PARTIAL_BYTES (budgets.py).
            Over that the connection with the longest line is closed, and what it has sent so far becomes
            dead.malformed.
"""

from collections.abc import Callable

from kmq import record
from kmq.ingress import hello
from kmq.ingress.budgets import PartialBudget
from kmq.ingress.connection import GREETING, PLAIN, Connection
from kmq.links.fifo import FifoWriter
from kmq.settings import KIB

RECEIVE_BYTES = 256 * KIB  # one receive; the buffer is shared by all connections
_LEAST_BYTES = 16 * KIB  # a TLS record fits (tls.py)
_CONTROL = (b"!", b"+", b"-")


def _refusal(line: bytes) -> str:
    """Return why a whole line must not reach the FIFO as it is; "" if the framer judges it."""
    if line[:1] in _CONTROL:
        return "control_byte"
    return "nul" if 0 in line else ""


class Intake:
    """Receives from connections and puts whole lines into the FIFO."""

    def __init__(
        self, fifo: FifoWriter, max_line: int, greet: Callable[[Connection, bytes], None] | None = None
    ) -> None:
        """`greet` gets a first line that begins with `!`. It names the connection, or raises Refused."""
        self.fifo, self.max_line, self.greet = fifo, max_line, greet
        self.hello_required = b""  # code and reason for lines without a hello; b"": they are taken
        self.bytes = self.refused = 0
        self.partial = PartialBudget()
        self._buffer = bytearray(max(_LEAST_BYTES, min(RECEIVE_BYTES, max_line)))
        self._view = self._target = memoryview(self._buffer)
        self._copies = False

    def expect_clogging(self, yes: bool) -> None:
        """Allow `receive` while the FIFO is clogged, or forbid it. If allowed, it copies the little that it takes."""
        self._target, self._copies = self._view[:_LEAST_BYTES] if yes else self._view, yes
        if yes:
            self.fifo.copy()

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
            connection.send_replies()
            return False
        connection.replies.pending += b"!ok max_line=%d\n" % self.max_line
        if not connection.send_replies():
            return False
        if connection.replies.asks_last and connection.sender is not None:
            question = connection.sender.question()
            self.fifo.put(question, 0, len(question))
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
        buffer = self._buffer
        start = 0
        if connection.length:
            start = buffer.find(b"\n", 0, count) + 1
            if not start:
                self._keep(connection, 0, count)
                return
            self._keep(connection, 0, start - 1)
            self._end_line(connection)
        end = buffer.rfind(b"\n", start, count) + 1
        if end:
            self._forward(connection, start, end)
        else:
            end = start
        if end < count:
            self._keep(connection, end, count)

    def _keep(self, connection: Connection, start: int, end: int) -> None:
        """Add buffer[start:end] to the unfinished line, as far as the limit of a line allows."""
        space = self.max_line + 1 - len(connection.partial)
        kept = min(end - start, max(0, space))
        connection.partial += self._view[start : start + kept]
        connection.length += end - start
        self.partial.bytes += kept

    def _end_line(self, connection: Connection, reason: str = "") -> None:
        """Pass on the unfinished line: it is complete, or never will be (`reason`)."""
        line, length = bytes(connection.partial), connection.length
        self._forget_partial(connection)
        if not reason and length > self.max_line:
            reason = "too_long"
        self._put(connection, line, length, reason or _refusal(line))

    def _put(self, connection: Connection, line: bytes, length: int, reason: str) -> None:
        """Pass on one line of any length, or its refusal if there is a `reason`."""
        if reason:
            self.refused += 1
            if connection.sender is None:
                line = record.malformed(reason, line, length, self.max_line)
            else:
                line = f"!e {reason}".encode()
        self._pass_on(connection, line + b"\n", 0, len(line) + 1)

    def _forward(self, connection: Connection, start: int, end: int) -> None:
        """Pass on buffer[start:end], which is whole lines."""
        buffer = self._buffer
        if (
            end - start > self.max_line  # only where the limit is very low: the buffer is seldom larger
            or buffer.find(0, start, end) >= 0
            or record.has_control_line(buffer, start, end)
        ):
            for line in bytes(self._view[start : end - 1]).split(b"\n"):
                reason = "too_long" if len(line) > self.max_line else _refusal(line)
                self._put(connection, line, len(line), reason)
            return
        self._pass_on(connection, buffer, start, end)

    def _pass_on(self, connection: Connection, data: bytes | bytearray, start: int, end: int) -> None:
        """Write data[start:end], whole lines that the FIFO may hold, or refuse them if the connection is refused."""
        sender = connection.sender
        if sender is not None:
            replies, count = connection.replies, data.count(b"\n", start, end)
            if replies.refusal:
                replies.refuse(count)
                return
            replies.taken += count
            replies.passed += count
        self.bytes += end - start
        self.fifo.put(data, start, end, sender)
        if self._copies:
            self.fifo.copy()

    def finish(self, connection: Connection) -> None:
        """Take the end of a connection: its unfinished line becomes dead.malformed, or is forgotten (connection.py)."""
        if connection.length and connection.sender is None and connection.phase != GREETING:
            self._end_line(connection, "too_long" if connection.length > self.max_line else "no_newline")
        else:
            self._forget_partial(connection)
