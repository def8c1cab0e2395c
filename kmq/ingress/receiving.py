"""Receiving: turns the bytes of connections into whole lines, and hands them over.

Example: a receive of lines `a|||1` and `b|||2` and the bytes `c|` hands over two lines and keeps `c|` as unfinished.

The lines of one receive are handed over as one piece (kmq/links/received.py): one search for the last newline, one
copy. The framer checks the lines. Only these cases, which it cannot check, are handled here:

    a line over KMQ_MAX_LINE     becomes dead.malformed, cut at the limit, when its newline or the end arrives
    no newline at the end        becomes dead.malformed
    HTTP, or TLS                 as a connection's first line ends it (kmq/wire/foreign.py), and nothing is stored

A connection whose first line begins with `!` speaks the acknowledged protocol (hello.py). Its messages are counted, for
the replies. A message over KMQ_MAX_LINE is handed over cut to one byte more than the limit, so that the framer refuses
it. A message without newline at the end is refused here, or becomes dead.malformed if the hello asked for no replies. A
unit is handed over as one piece once it is complete and matches its first line. If it does not match, none of it is
handed over, and the connection ends.

Lines at an intake have no hello and no `!`: they first get the head of their topic (intakes.py).

Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes, a unit 64 KiB more, and all of them together
            PARTIAL_BYTES. Over that the connection with the longest one is closed, and its unfinished line becomes
            dead.malformed.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from kmq.broker.stats import Row
from kmq.config.values import KIB, MIB
from kmq.ingress.connection import GREETING, PLAIN, Connection
from kmq.ingress.hello import MAX_BYTES, HelloRefused, Unit, parse_unit
from kmq.ingress.limits import count_err, largest
from kmq.links.fifo import Sender
from kmq.links.received import Handover, Part
from kmq.message import record
from kmq.wire import foreign, refusals

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.config.intakes import Network
    from kmq.ingress.intakes import RawPort


PARTIAL_BYTES = 64 * MIB  # of all unfinished lines together
RECEIVE_BYTES = 256 * KIB  # one receive; the buffer is shared by all connections
_LEAST_BYTES = 16 * KIB  # a TLS record fits (kmq/broker/tls.py)
_PIECE_BYTES = 256 * KIB  # beside the longest line: so much fits into `received` in one piece (received.py)


class Intake:
    """Receives from connections and hands whole lines over."""

    def __init__(
        self,
        handover: Handover,
        max_line: int,
        row: Row,
        greet: Callable[[Connection, bytes], bytes] | None = None,
        hello_required: bytes = b"",
        http_port: int = 0,
    ) -> None:
        """`greet` gets a first line that begins with `!`. It names the connection, or raises HelloRefused, and returns
        the text after `!ok`.

        `hello_required`: code and reason for refusing lines without a hello; b"": they are accepted.
        """
        self.handover, self.max_line, self.greet, self._row = handover, max_line, greet, row
        self.hello_required, self._http_port = hello_required, http_port
        self.bytes = self.refused = 0
        self.partial_bytes = 0  # of all unfinished lines
        self._buffer = bytearray(max(_LEAST_BYTES, min(RECEIVE_BYTES, max_line)))
        self._view = self._target = memoryview(self._buffer)

    def expect_clogging(self, yes: bool) -> None:
        """Receive little at once, because `receive` may be called although the way to the framer is clogged."""
        self._target = self._view[:_LEAST_BYTES] if yes else self._view

    def receive(self, connection: Connection) -> bool:
        """Receive what has arrived. Return False if no more will come."""
        raw, target = connection.raw, self._target
        if raw is not None and raw.receive_bytes < len(target):
            target = target[: raw.receive_bytes]
        try:
            count = connection.sock.recv_into(target)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not count:
            return False
        connection.was_active = True
        if connection.speaks is None and self._is_foreign(connection, count):
            return False
        if connection.phase == GREETING:
            if (connection.partial or self._buffer)[:1] == b"!":
                return self._greet(connection, count)
            connection.phase = PLAIN
            if self.hello_required:
                connection.replies.refusal = self.hello_required
                connection.replies.pending += b"!err 0 %b\n" % self.hello_required
                count_err(self._row, self.hello_required)
                return False
        if not connection.by_lines and connection.raw is not None:
            return self._parse_frames(connection, connection.raw, count)
        return self._parse(connection, 0, count)

    def _is_foreign(self, connection: Connection, count: int) -> bool:
        """Return True if the first line is HTTP or TLS, and drop it. `buffer[:count]` is its next part."""
        newline = self._buffer.find(b"\n", 0, count)
        if (connection.partial or self._buffer)[0] not in foreign.FIRST_BYTES:
            connection.speaks = ""
            return False
        start = bytes(connection.partial) + bytes(self._view[: count if newline < 0 else newline])
        connection.speaks = foreign.spoken(start, newline >= 0)
        if not connection.speaks:
            return False
        self._forget_partial(connection)
        connection.replies.pending += foreign.reply(connection.speaks, self._http_port)
        return True

    def _greet(self, connection: Connection, count: int) -> bool:
        """Parse `buffer[:count]`: all or part of a hello line, then any messages after it."""
        line, end = self._control_line(connection, 0, count)
        if line is None:
            return True
        connection.phase = PLAIN
        try:
            if self.greet is None or len(line) > MAX_BYTES:
                raise HelloRefused(f"bad_hello longer than {MAX_BYTES} bytes")
            more = self.greet(connection, line)
        except HelloRefused as refused:
            connection.replies.pending += f"!err 0 {refused}\n".encode()
            count_err(self._row, str(refused).encode())
            connection.send_replies()
            return False
        connection.replies.pending += b"!ok max_line=%d\n%b" % (self.max_line, more)
        if not connection.send_replies():
            return False
        if connection.replies.questions and connection.sender is not None:
            self.handover.say(connection.sender.question(0))
        return self._parse(connection, end, count)

    def _control_line(self, connection: Connection, start: int, count: int) -> tuple[bytes | None, int]:
        """Return the control line in buffer[start:count], None if it is not complete; and where it ends."""
        newline = self._buffer.find(b"\n", start, count)
        self._append_partial(connection, start, count if newline < 0 else newline)
        if newline < 0 and connection.length <= MAX_BYTES:
            return None, count
        line = bytes(connection.partial)
        self._forget_partial(connection)
        return line, newline + 1 or count

    def over_budget(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to end because unfinished lines take too much memory."""
        excess = self.partial_bytes - PARTIAL_BYTES
        if excess <= 0:
            return []
        # Not the gateway's own: a unit may be longer than any line, and other clients must not cause its end.
        strangers = [each for each in connections if each.sender is None or not each.sender.right]
        return largest(strangers, excess, lambda connection: len(connection.partial))

    def _forget_partial(self, connection: Connection) -> None:
        self.partial_bytes -= len(connection.partial)
        connection.partial, connection.length, connection.unfinished_since = bytearray(), 0, 0.0
        connection.unit = None

    def _parse(self, connection: Connection, start: int, count: int) -> bool:
        """Handle buffer[start:count]: lines and units, perhaps cut at both ends. Return False after a bad unit."""
        sender, buffer = connection.sender, self._buffer
        if sender is None or not sender.right:
            self._parse_lines(connection, start, count)
            return True
        while start < count:
            unit = connection.unit
            if unit is not None:
                stop = min(count, start + unit.nbytes - len(connection.partial))
                is_good = self._parse_unit(connection, unit, start, stop)
            elif (connection.partial or buffer[start : start + 1])[:1] == b"!":
                line, stop = self._control_line(connection, start, count)
                is_good = line is None or self._begin_unit(connection, sender, line)
            else:
                stop, is_good = buffer.find(b"\n!", start, count) + 1 or count, True
                self._parse_lines(connection, start, stop)
            if not is_good:
                return False  # it is unknown where the next line begins
            start = stop
        return True

    def _parse_lines(self, connection: Connection, start: int, count: int) -> None:
        """Handle buffer[start:count]: lines, perhaps incomplete at both ends."""
        buffer = self._buffer
        end = buffer.rfind(b"\n", start, count) + 1
        if end:
            if connection.length:
                start = self._end_line(connection, start, buffer.index(b"\n", start, end) + 1, end)
            if start < end:
                self._forward_lines(connection, start, end)
            start = end
        if start < count:
            self._append_partial(connection, start, count)

    def _max_line(self, connection: Connection) -> int:
        return self.max_line if connection.raw is None else connection.raw.max_line

    def _append_partial(self, connection: Connection, start: int, end: int) -> None:
        """Add buffer[start:end] to the unfinished line or unit, up to the length limit."""
        most = self._max_line(connection) if connection.unit is None else connection.unit.nbytes
        space = most + 1 - len(connection.partial)
        count = min(end - start, max(0, space))
        connection.partial += self._view[start : start + count]
        connection.length += end - start
        self.partial_bytes += count

    def _end_line(self, connection: Connection, start: int, first: int, end: int) -> int:
        """End the unfinished line with buffer[start:first]. Forward the rest up to `end` with it, if that is allowed.

        Return where the unread part of the buffer begins.
        """
        most = self._max_line(connection)
        if connection.length + first - 1 - start > most or end - start > most:
            self._append_partial(connection, start, first - 1)
            line, length = bytes(connection.partial), connection.length
            self._forget_partial(connection)
            self._forward_line(connection, line, length, "too_long" if length > most else "")
            return first
        partial = connection.partial
        self._forget_partial(connection)
        count = record.count_lines(self._buffer[start:end]) if connection.sender is not None else 0
        self._admit(connection, [partial, self._view[start:end]], count)
        return end

    def _forward_line(self, connection: Connection, line: bytes, length: int, reason: str) -> None:
        """Forward one line of `length` bytes, or its replacement if `reason` says why it must not go on as it is."""
        if not reason:
            self._admit(connection, [line, b"\n"], 1)
        elif connection.sender is not None:  # the framer refuses it, in order among the replies
            self._admit(connection, [line[: self.max_line + 1], b"\n"], 1)
        else:
            self._send_dead_letter(connection.raw, line, length, reason)

    def _send_dead_letter(self, raw: "RawPort | None", line: bytes, length: int, reason: str) -> None:
        """Send the dead.malformed record of an invalid line to the framer."""
        if raw is None:
            self.refused += 1
            self._send_to_framer([record.malformed(reason, line, length, self.max_line), b"\n"], None, 0)
            return
        from kmq.ingress import intakes  # only if there are intakes

        self._send_raw(raw, intakes.dead_letter(raw, reason, line, length))

    # --- intakes -----------------------------------------------------------------------------------------------------

    def _parse_frames(self, connection: Connection, raw: "RawPort", count: int) -> bool:
        """Handle buffer[:count] of an intake connection that does not send lines, or of which that is still unknown."""
        from kmq.ingress import intakes

        frames, data = connection.frames, bytes(self._view[:count])
        if frames is None:
            data = bytes(connection.partial) + data
            framing = intakes.LINES if connection.length > raw.max_line else intakes.framing_of(data)
            if framing in (intakes.UNKNOWN, intakes.LINES):
                connection.by_lines = framing == intakes.LINES
                return self._parse(connection, 0, count)
            self._forget_partial(connection)
            connection.frames = frames = intakes.Frames(framing == intakes.COUNTED)
        self.partial_bytes -= len(connection.partial)
        found = frames.feed(connection.partial, data, raw.max_line)
        self.partial_bytes += len(connection.partial)
        connection.length = frames.length
        if found:
            connection.unfinished_since = 0.0
            self._send_raw(raw, intakes.framed(raw, found, self.max_line + _PIECE_BYTES))
        return True

    def _send_raw_lines(self, raw: "RawPort", parts: Sequence[Part]) -> None:
        from kmq.ingress import intakes

        self._send_raw(raw, intakes.messages(raw, parts, self.max_line + _PIECE_BYTES))

    def _send_raw(self, raw: "RawPort", pieces: Iterable[list[Part]]) -> None:
        """Send pieces of an intake to the framer. Count what arrived, not what is sent: drain compares that."""
        before, wrong = raw.bytes, raw.wrong
        for piece in pieces:
            self.handover.put(piece)
        self.bytes += raw.bytes - before
        self.refused += raw.wrong - wrong

    def receive_datagrams(
        self, raw: "RawPort", networks: "tuple[Network, ...]", refused: Callable[[str], None]
    ) -> None:
        """Read the datagrams that wait at an intake, some at a time."""
        from kmq.ingress import intakes

        taken, too_long = intakes.read_datagrams(raw, networks, refused)
        if taken:
            self._send_raw_lines(raw, [b"".join(taken)])
        for line in too_long:
            self._send_dead_letter(raw, line, len(line), "too_long")

    def _forward_lines(self, connection: Connection, start: int, end: int) -> None:
        """Forward buffer[start:end], which is whole lines."""
        most = self._max_line(connection)
        if end - start > most:  # only if the limit is very low: the buffer is seldom larger
            for line in bytes(self._view[start : end - 1]).split(b"\n"):
                self._forward_line(connection, line, len(line), "too_long" if len(line) > most else "")
            return
        count = record.count_lines(self._buffer[start:end]) if connection.sender is not None else 0
        self._admit(connection, [self._view[start:end]], count)

    # --- units -------------------------------------------------------------------------------------------------------

    def _begin_unit(self, connection: Connection, sender: Sender, line: bytes) -> bool:
        """Begin the unit with this first line, or ask what a unit of 0 lines asks. Return False if it is invalid."""
        try:
            unit = parse_unit(line, self.max_line)
        except ValueError as err:
            return self._refuse(connection, 1, "bad_unit", str(err))
        if unit.lines:
            connection.unit, connection.length = unit, len(line) + 1
            return True
        replies = connection.replies
        if not (unit.producer or connection.producer):
            return self._refuse(connection, 1, "bad_unit", "0 lines ask for the last id of a name: p= is missing")
        if replies.refusal:
            self._refuse(connection, 1)
        else:
            self.handover.say(sender.question(replies.ask(), unit.producer))
        return True

    def _parse_unit(self, connection: Connection, unit: Unit, start: int, stop: int) -> bool:
        """Add buffer[start:stop] to the unit. Return False if it ends there and does not match its first line."""
        if len(connection.partial) + stop - start < unit.nbytes:
            self._append_partial(connection, start, stop)
            return True
        parts = [connection.partial, self._buffer[start:stop]]
        self._forget_partial(connection)
        lines = sum(map(record.count_lines, parts))
        if lines != unit.lines or self._buffer[stop - 1 : stop] != b"\n":
            why = f"its {unit.nbytes} bytes are {lines} lines" + (" and no more" if lines == unit.lines else "")
            return self._refuse(connection, unit.lines, "bad_unit", why)
        self._admit(connection, parts, lines, unit.origin)
        return True

    def _refuse(self, connection: Connection, count: int, code: str = "", why: str = "") -> bool:
        """Refuse this many messages and all later ones, for the connection's reason or else this one. Return False."""
        replies = connection.replies
        replies.refusal = replies.refusal or refusals.reason(code, why).encode()
        replies.refuse(count)
        count_err(self._row, replies.refusal, count)
        return False

    # --- whole lines are handed over ---------------------------------------------------------------------------------

    def _admit(self, connection: Connection, parts: Sequence[Part], count: int, origin: bytes = b"") -> None:
        """Send whole lines to the framer, or refuse them if the connection is refused.

        `count`: messages, if the connection has a sender.
        """
        if connection.raw is not None:
            self._send_raw_lines(connection.raw, parts)
            return
        sender = connection.sender
        if sender is not None:
            replies = connection.replies
            if replies.refusal:
                self._refuse(connection, count)
                return
            replies.taken += count
            replies.passed += count
            if not replies.train_at and replies.acks:
                replies.train_end, replies.train_at = replies.taken, time.monotonic()
        self._send_to_framer(parts, sender, count, origin)

    def _send_to_framer(self, parts: Sequence[Part], sender: Sender | None, count: int, origin: bytes = b"") -> None:
        self.bytes += sum(map(len, parts))
        self.handover.put(parts, sender, count, origin)

    def finish(self, connection: Connection) -> None:
        """Handle the end of a connection: its unfinished line is refused, or becomes dead.malformed (connection.py)."""
        line, length, unit = bytes(connection.partial), connection.length, connection.unit
        self._forget_partial(connection)
        if not length or connection.phase == GREETING:
            return
        reason = "too_long" if length > self._max_line(connection) else "no_newline"
        if unit is not None:
            self._refuse(connection, unit.lines, "bad_unit", "the connection ended before the unit did")
        elif connection.replies.acks:
            self._refuse(connection, 1, reason, "the connection ended before the line did")
        elif not connection.by_lines and connection.raw and connection.frames is None and line.endswith(b"\0"):
            from kmq.ingress import intakes

            frames = intakes.Frames(False).feed(bytearray(), line, connection.raw.max_line)
            self._send_raw(connection.raw, intakes.framed(connection.raw, frames, self.max_line + _PIECE_BYTES))
        elif not connection.replies.refusal:
            self._send_dead_letter(connection.raw, line, length, reason)
