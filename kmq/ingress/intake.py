"""From the bytes of a connection to whole lines in the FIFO, and from its replies back.

Lines go on in blocks as they were received: one search for the last newline, one for a line that begins with a control
byte, then writes of at most PIPE_BUF. Only what cannot be judged further down is looked at line by line here:

    a line longer than one write    goes as pieces when it is complete
    a line over KMQ_MAX_LINE        becomes dead.malformed, cut at the limit, when its newline or the end comes
    no newline at the end           becomes dead.malformed
    a first byte `!`, `+` or `-`    becomes dead.malformed: behind us it would be taken for a control line
    a NUL                           becomes dead.malformed: the framer's staging area ends at its last byte that is none

A connection whose first line begins with `!` speaks the acknowledged protocol (hello.py). Its lines go as groups, what it
should not have sent goes as `!e <reason>` in its place so that the framer's replies stay in order, and a line without
newline at the end was never sent.

Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes; all of them together PARTIAL_BYTES. Over that the connection
            with the longest one is closed, and what it sent so far becomes dead.malformed: nothing is lost unsaid.
            Of a producer that reads no replies, or has MAX_UNANSWERED messages on the way, nothing more is read. Replies that
            nobody reads are bounded too: of refused messages REFUSALS_BYTES are written out at a time, and all replies of
            all connections together take UNREAD_BYTES; over that the connection with the most of them is broken.
"""

import select
import socket
from collections.abc import Callable, Iterable

from kmq import record
from kmq.ingress import hello
from kmq.links.fifo import FifoWriter
from kmq.links.raw import Sender
from kmq.settings import KIB, MIB

TYPE_CHECKING = False
if TYPE_CHECKING:  # ssl would cost every stage some megabytes
    from kmq.broker.tls import TlsSocket

RECEIVE_BYTES = 256 * KIB  # one receive; the buffer is shared by all connections
_LEAST_BYTES = 16 * KIB  # a TLS record fits (tls.py)
PARTIAL_BYTES = 64 * MIB  # all unfinished lines together
MAX_UNANSWERED = 1 << 17  # messages of one connection on the way: far more than the links hold
MAX_UNSAID = MIB  # bytes of replies that a producer may leave unread
UNREAD_BYTES = 32 * MIB  # of replies that all of them together may leave unread
REFUSALS_BYTES = 16 * KIB  # of `!err` replies that are made before the producer reads those before them
_CONTROL = (b"!", b"+", b"-")
LAST = b"!last "  # begins the reply to a hello with last=?, as that to message 0


def _refusal(line: bytes) -> str:
    """Why a whole line must not reach the FIFO as it is; "" for the others, which the framer judges."""
    if line[:1] in _CONTROL:
        return "control_byte"
    return "nul" if 0 in line else ""


class Connection:
    """One producer: its socket, the line it has not finished, and what it is still to be told."""

    __slots__ = (
        "acks",
        "answered",
        "asks_last",
        "awaited",
        "counted",
        "ended",
        "fresh",
        "heard",
        "length",
        "partial",
        "passed",
        "peer",
        "producer",
        "quiet_since",
        "refusing",
        "sender",
        "sock",
        "taken",
        "tls",
        "unfinished_since",
        "unsaid",
    )

    def __init__(self, sock: socket.socket, peer: str, tls: "TlsSocket | None" = None) -> None:
        self.sock, self.peer = sock, peer
        self.tls = tls  # the same socket, where it is one
        self.partial = bytearray()  # at most max_line + 1 bytes of the unfinished line
        self.length = 0  # of the unfinished line, also what is no longer kept
        self.fresh = True  # its first line has not come yet
        self.sender: Sender | None = None  # only with the acknowledged protocol:
        self.producer = b""
        self.acks = False  # wants replies
        self.asks_last = False  # and has not been told yet which id of its name is the last
        self.taken = self.passed = 0  # messages received; of them passed on: all but those refused at the end
        self.answered = 0  # messages that have had their reply
        self.refusing = b""  # code and reason: nothing more is taken from it
        self.unsaid = bytearray()  # replies the socket has not taken yet
        self.counted = 0  # bytes of them that Unread knows of
        self.ended = False  # has sent all
        self.awaited = select.EPOLLIN  # what ingress waits for
        self.heard = True  # has sent something, or taken a reply, since deadlines.py last looked, whose clock the next two are of
        self.quiet_since = 0.0
        self.unfinished_since = 0.0  # 0: this line, or handshake, has not been seen unfinished

    @property
    def is_choked(self) -> bool:
        """Whether it has to read replies, or wait for them, before more is read from it."""
        return len(self.unsaid) > MAX_UNSAID or self.taken - self.answered > MAX_UNANSWERED

    @property
    def is_unfinished(self) -> bool:
        """Whether the rest of a line, of a hello or of a TLS handshake is to come."""
        return self.length > 0 or (self.tls is not None and self.fresh and self.tls.is_shaking)

    @property
    def is_done(self) -> bool:
        """Whether it has sent all and been told all."""
        return self.ended and self.answered >= self.taken and not (self.unsaid or self.asks_last)

    def reply(self, first: int, text: bytes) -> bool:
        """The reply to the messages from `first` on, or the last id to who asks for it; False where one before it is missing."""
        if self.asks_last:
            if not text.startswith(LAST):
                return False
            self.asks_last = False
            self.unsaid += text + b"\n"
            return True
        if first <= self.answered:
            return True  # said again by a durability that was killed in between
        if first != self.answered + 1:
            return False
        self.answered = int(text.split(b" ", 2)[1])
        if self.acks:
            self.unsaid += text + b"\n"
        return True

    def refuse(self, count: int) -> None:
        """`count` more messages will not be taken; they are told so when those before them have had their replies."""
        self.taken += count
        self.say_refused()

    def say_refused(self) -> None:
        """Once all that was passed on has been answered: the rest is refused, as fast as the producer reads it."""
        if not self.refusing or self.answered < self.passed or self.asks_last:
            return
        if not self.acks:
            self.answered = self.taken
        while self.answered < self.taken and len(self.unsaid) < REFUSALS_BYTES:
            self.answered += 1
            self.unsaid += b"!err %d %b\n" % (self.answered, self.refusing)

    def say(self) -> bool:
        """Hand replies to the kernel; False when the connection is over."""
        while True:
            self.say_refused()
            if not self.unsaid:
                return True
            try:
                del self.unsaid[: self.sock.send(self.unsaid)]
                self.heard = True
            except BlockingIOError:
                return True
            except OSError:
                return False


class Unread:
    """Replies that are kept for producers, of all connections together."""

    def __init__(self) -> None:
        self.bytes = 0

    def follow(self, connection: Connection) -> None:
        """Call when its replies have become more, or fewer."""
        self.bytes += len(connection.unsaid) - connection.counted
        connection.counted = len(connection.unsaid)

    def forget(self, connection: Connection) -> None:
        """The connection is over."""
        self.bytes -= connection.counted
        connection.counted = 0

    def over_budget(self, connections: Iterable[Connection]) -> list[Connection]:
        """Connections to break because unread replies take too much memory, the one with the most first."""
        return _largest(connections, self.bytes - UNREAD_BYTES, lambda connection: connection.counted)


def _largest(connections: Iterable[Connection], over: int, size: Callable[[Connection], int]) -> list[Connection]:
    """As few as possible that together have `over` bytes, the largest first."""
    chosen: list[Connection] = []
    if over > 0:
        for connection in sorted(connections, key=size, reverse=True):
            chosen.append(connection)
            over -= size(connection)
            if over <= 0:
                break
    return chosen


class Intake:
    """Receives from connections and puts whole lines into the FIFO."""

    def __init__(
        self, fifo: FifoWriter, max_line: int, greet: Callable[[Connection, bytes], None] | None = None
    ) -> None:
        """`greet` is given the first line of a connection that begins with `!`; it sets the sender, or raises Refused."""
        self.fifo, self.max_line, self.greet = fifo, max_line, greet
        self.only_hello = ""  # code and reason for those who send lines without a hello, where one is asked for
        self.bytes = self.refused = 0
        self._buffer = bytearray(max(_LEAST_BYTES, min(RECEIVE_BYTES, max_line)))
        self._view = self._room = memoryview(self._buffer)
        self._copies = False
        self._partial_bytes = 0

    def expect_clogging(self, yes: bool) -> None:
        """Whether `receive` may be called while the FIFO is clogged. Then it takes little at a time, for that must be copied."""
        self._room, self._copies = self._view[:_LEAST_BYTES] if yes else self._view, yes
        if yes:
            self.fifo.copy()

    def receive(self, connection: Connection) -> bool:
        """Take what has arrived; False when the connection is over. Call only while the FIFO is not clogged, unless expected."""
        try:
            count = connection.sock.recv_into(self._room)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not count:
            return False
        connection.heard = True
        if connection.fresh:
            if (connection.partial or self._buffer)[:1] == b"!":
                return self._greet(connection, count)
            connection.fresh = False
            if self.only_hello:
                connection.refusing = self.only_hello.encode()
                connection.unsaid += b"!err 0 %b\n" % connection.refusing
                return False
        self._take(connection, count)
        return True

    def _greet(self, connection: Connection, count: int) -> bool:
        """buffer[:count] is, or goes on with, a hello; whatever follows it are messages."""
        end = self._buffer.find(b"\n", 0, count)
        self._keep(connection, 0, count if end < 0 else end)
        if end < 0 and connection.length <= hello.MAX_BYTES:
            return True
        line = bytes(connection.partial)
        self._forget_partial(connection)
        connection.fresh = False
        try:
            if self.greet is None or len(line) > hello.MAX_BYTES:
                raise hello.Refused(f"bad_hello longer than {hello.MAX_BYTES} bytes")
            self.greet(connection, line)
        except hello.Refused as refused:
            connection.unsaid += f"!err 0 {refused}\n".encode()
            connection.say()
            return False
        connection.unsaid += b"!ok max_line=%d\n" % self.max_line
        if not connection.say():
            return False
        if connection.asks_last and connection.sender is not None:
            question = connection.sender.question()
            self.fifo.put(question, 0, len(question))
        if end + 1 < count:
            rest = count - end - 1
            self._buffer[:rest] = self._buffer[end + 1 : count]
            self._take(connection, rest)
        return True

    def _forget_partial(self, connection: Connection) -> None:
        self._partial_bytes -= len(connection.partial)
        connection.partial, connection.length, connection.unfinished_since = bytearray(), 0, 0.0

    def _take(self, connection: Connection, count: int) -> None:
        """buffer[:count] has arrived."""
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
        """buffer[start:end] belongs to the unfinished line."""
        room = self.max_line + 1 - len(connection.partial)
        kept = min(end - start, max(0, room))
        connection.partial += self._view[start : start + kept]
        connection.length += end - start
        self._partial_bytes += kept

    def _end_line(self, connection: Connection, reason: str = "") -> None:
        """The unfinished line is complete, or will never be (`reason`)."""
        line, length = bytes(connection.partial), connection.length
        self._forget_partial(connection)
        if not reason and length > self.max_line:
            reason = "too_long"
        self._put(connection, line, length, reason or _refusal(line))

    def _put(self, connection: Connection, line: bytes, length: int, reason: str) -> None:
        """One line of any length, refused where there is a `reason`."""
        if reason:
            self.refused += 1
            if connection.sender is None:
                line = record.malformed(reason, line, length, self.max_line)
            else:
                line = f"!e {reason}".encode()
        self._pass_on(connection, line + b"\n", 0, len(line) + 1)

    def _forward(self, connection: Connection, start: int, end: int) -> None:
        """buffer[start:end] is whole lines."""
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
        """data[start:end], whole lines that may stand in the FIFO."""
        sender = connection.sender
        if sender is not None:
            count = data.count(b"\n", start, end)
            if connection.refusing:
                connection.refuse(count)
                return
            connection.taken += count
            connection.passed += count
        self.bytes += end - start
        self.fifo.put(data, start, end, sender)
        if self._copies:
            self.fifo.copy()

    def finish(self, connection: Connection) -> None:
        """The connection is over: an unfinished line becomes dead.malformed, or, with acks, nothing: it was never asked for.

        Nor was an unfinished hello, which may hold a token.
        """
        if connection.length and connection.sender is None and not connection.fresh:
            self._end_line(connection, "too_long" if connection.length > self.max_line else "no_newline")
        else:
            self._forget_partial(connection)

    def over_budget(self, connections: Iterable[Connection]) -> list[Connection]:
        """Connections to close because unfinished lines take too much memory, longest line first."""
        return _largest(connections, self._partial_bytes - PARTIAL_BYTES, lambda connection: len(connection.partial))
