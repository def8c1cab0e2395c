"""From the bytes of a connection to whole lines in the FIFO.

Lines go on in blocks as they were received: one search for the last newline, one for a line that begins with a control
byte, then writes of at most PIPE_BUF. Only what cannot be judged further down is looked at line by line here:

    a line longer than one write    goes as pieces when it is complete
    a line over KMQ_MAX_LINE        becomes dead.malformed, cut at the limit, when its newline or the end comes
    no newline at the end           becomes dead.malformed
    a first byte `!`, `+` or `-`    becomes dead.malformed: behind us it would be taken for a control line
    a NUL                           becomes dead.malformed: the framer's staging area ends at its last byte that is none

Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes; all of them together PARTIAL_BYTES. Over that the connection
            with the longest one is closed, and what it sent so far becomes dead.malformed: nothing is lost unsaid.
"""

import socket
from collections.abc import Iterable

from kmq import record
from kmq.links.fifo import FifoWriter
from kmq.settings import KIB, MIB

RECEIVE_BYTES = 256 * KIB  # one receive; the buffer is shared by all connections
PARTIAL_BYTES = 64 * MIB  # all unfinished lines together
_HELLO = b"!hello"
_CONTROL = (b"!", b"+", b"-")


def _refusal(line: bytes) -> str:
    """Why a whole line must not reach the FIFO as it is; "" for the others, which the framer judges."""
    if line[:1] in _CONTROL:
        return "control_byte"
    return "nul" if 0 in line else ""


class Connection:
    """One producer: its socket and the line it has not finished."""

    __slots__ = ("fresh", "length", "partial", "peer", "sock")

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer
        self.partial = bytearray()  # at most max_line + 1 bytes of the unfinished line
        self.length = 0  # of the unfinished line, also what is no longer kept
        self.fresh = True  # nothing received yet


class Intake:
    """Receives from connections and puts whole lines into the FIFO."""

    def __init__(self, fifo: FifoWriter, max_line: int) -> None:
        self.fifo, self.max_line = fifo, max_line
        self.bytes = self.refused = 0
        self._buffer = bytearray(min(RECEIVE_BYTES, max_line))
        self._view = memoryview(self._buffer)
        self._partial_bytes = 0

    def receive(self, connection: Connection) -> bool:
        """Take what has arrived; False when the connection is over. Call only while the FIFO is not clogged."""
        try:
            count = connection.sock.recv_into(self._view)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not count:
            return False
        if connection.fresh:
            connection.fresh = False
            if self._buffer.startswith(_HELLO, 0, count):
                return self._refuse_hello(connection)
        self._take(connection, count)
        return True

    def _refuse_hello(self, connection: Connection) -> bool:
        """The acknowledged protocol is not spoken yet: say so rather than store a greeting as a message."""
        try:
            connection.sock.send(b"!err 0 this version speaks the plain protocol only: send lines without !hello\n")
        except OSError:
            pass
        return False

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
            self._forward(start, end)
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
        self._partial_bytes -= len(connection.partial)
        connection.partial, connection.length = bytearray(), 0
        if not reason and length > self.max_line:
            reason = "too_long"
        reason = reason or _refusal(line)
        if reason:
            line = record.malformed(reason, line, length, self.max_line)
            self.refused += 1
        self._put(line)

    def _put(self, line: bytes) -> None:
        """One line of any length."""
        self.fifo.put(line + b"\n", 0, len(line) + 1)
        self.bytes += len(line) + 1

    def _forward(self, start: int, end: int) -> None:
        """buffer[start:end] is whole lines, none over max_line: the buffer is not larger."""
        buffer = self._buffer
        if buffer.find(0, start, end) >= 0 or record.has_control_line(buffer, start, end):
            for line in bytes(self._view[start : end - 1]).split(b"\n"):
                reason = _refusal(line)
                if reason:
                    line = record.malformed(reason, line, len(line), self.max_line)
                    self.refused += 1
                self._put(line)
            return
        self.bytes += end - start
        self.fifo.put(buffer, start, end)

    def finish(self, connection: Connection) -> None:
        """The connection is over: an unfinished line becomes dead.malformed."""
        if connection.length:
            self._end_line(connection, "too_long" if connection.length > self.max_line else "no_newline")

    def over_budget(self, connections: Iterable[Connection]) -> list[Connection]:
        """Connections to close because unfinished lines take too much memory, longest line first."""
        over, chosen = self._partial_bytes - PARTIAL_BYTES, []
        if over > 0:
            for connection in sorted(connections, key=lambda connection: len(connection.partial), reverse=True):
                chosen.append(connection)
                over -= len(connection.partial)
                if over <= 0:
                    break
        return chosen
