"""The connections of producers: read in turn, greeted, answered, and ended; from their bytes to whole lines.

What one receive brought goes on as one piece (kmq/links/received.py): one search for the last newline, one copy. The
framer judges the lines. Only what it cannot judge is looked at here:

    a line over KMQ_MAX_LINE     becomes dead.malformed, cut at the limit, when its newline or the end comes
    no newline at the end        becomes dead.malformed

A connection whose first line begins with `!` speaks the acknowledged protocol (hello.py). Its messages are counted, for
the replies. One over KMQ_MAX_LINE goes on cut, one byte longer than the limit, so that the framer refuses it. One
without newline at the end is refused here, or becomes dead.malformed where the hello asked for no replies. A unit goes
on as one piece when all of it is there and is what it says. Else nothing of it goes on, and the connection ends.

What comes to an intake has no hello and no `!`: its lines get the head of their topic first (intakes.py).

Invariant   Every connection with something to read gets one receive before any gets another, also if the way to the
            framer clogs between. Nobody is read while it is clogged, unless messages are refused: then nothing that is
            read goes there.
            With KMQ_TOKENS nothing is taken from a connection that has not shown a valid token with the role for it. A
            producer name belongs to the connection that said hello last: every older one is refused from then on
            (`fenced`). But an earlier attempt of the same run came late, and is refused itself. Attempts are kept with
            their connections: a restart, or a change of leader, ends them all, so nobody is left to be fenced. Only
            a connection that has shown the pod's local token is announced to the framer as one that may write to
            reserved topics.
Memory      An unfinished line keeps at most KMQ_MAX_LINE bytes, a unit 64 KiB more, and all of them together
            PARTIAL_BYTES. Over that the connection with the longest one is closed, and what it has sent of a line so far
            becomes dead.malformed.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kmq.access.local_token import LocalToken
from kmq.access.roles import LINES_IN
from kmq.broker.stage import Stage
from kmq.broker.stats import Row, Strangers
from kmq.config.values import KIB, MIB
from kmq.ingress.connection import ACKED, CLOSING, GREETING, PLAIN, Connection, ConnectionTable, close_in_order
from kmq.ingress.hello import MAX_BYTES, HelloRefused, Unit, parse, parse_unit
from kmq.ingress.limits import UNREAD, Deadlines, Gate, UnreadBudget, count_err, largest
from kmq.ingress.ports import Entrance
from kmq.links.fifo import AckReader, Sender
from kmq.links.received import Handover, Part
from kmq.message import record
from kmq.wire import refusals

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.access.tokens import Tokens
    from kmq.config.intakes import Network
    from kmq.ingress.hello import Hello
    from kmq.ingress.intakes import RawPort


# --- intake ----------------------------------------------------------------------------------------------------------

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
    ) -> None:
        """`greet` gets a first line that begins with `!`. It names the connection, or raises HelloRefused. It returns what
        follows `!ok`.

        `hello_required`: code and reason for lines without a hello; b"": they are taken.
        """
        self.handover, self.max_line, self.greet, self._row = handover, max_line, greet, row
        self.hello_required = hello_required
        self.bytes = self.refused = 0
        self.partial_bytes = 0  # of all unfinished lines
        self._buffer = bytearray(max(_LEAST_BYTES, min(RECEIVE_BYTES, max_line)))
        self._view = self._target = memoryview(self._buffer)

    def expect_clogging(self, yes: bool) -> None:
        """Take little at once while `receive` may be called although the way to the framer is clogged."""
        self._target = self._view[:_LEAST_BYTES] if yes else self._view

    def receive(self, connection: Connection) -> bool:
        """Take what has arrived. Returns False when nothing more will come."""
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
        if connection.phase == GREETING:
            if (connection.partial or self._buffer)[:1] == b"!":
                return self._greet(connection, count)
            connection.phase = PLAIN
            if self.hello_required:
                connection.replies.refusal = self.hello_required
                connection.replies.pending += b"!err 0 %b\n" % self.hello_required
                count_err(self._row, self.hello_required)
                return False
        return self._take(connection, 0, count)

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
        return self._take(connection, end, count)

    def _control_line(self, connection: Connection, start: int, count: int) -> tuple[bytes | None, int]:
        """Return the control line that begins or goes on at buffer[start:count], None if it is not whole; and its end."""
        newline = self._buffer.find(b"\n", start, count)
        self._keep(connection, start, count if newline < 0 else newline)
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
        # Not the gateway's own: a unit may be longer than any line, and strangers must not have its connection cut.
        strangers = [each for each in connections if each.sender is None or not each.sender.right]
        return largest(strangers, excess, lambda connection: len(connection.partial))

    def _forget_partial(self, connection: Connection) -> None:
        self.partial_bytes -= len(connection.partial)
        connection.partial, connection.length, connection.unfinished_since = bytearray(), 0, 0.0
        connection.unit = None

    def _take(self, connection: Connection, start: int, count: int) -> bool:
        """Take buffer[start:count]: lines and units, and the parts of them at both ends. Returns False after a bad unit."""
        sender, buffer = connection.sender, self._buffer
        if sender is None or not sender.right:
            self._take_lines(connection, start, count)
            return True
        while start < count:
            unit = connection.unit
            if unit is not None:
                stop = min(count, start + unit.nbytes - len(connection.partial))
                is_good = self._take_of_unit(connection, unit, start, stop)
            elif (connection.partial or buffer[start : start + 1])[:1] == b"!":
                line, stop = self._control_line(connection, start, count)
                is_good = line is None or self._begin_unit(connection, sender, line)
            else:
                stop, is_good = buffer.find(b"\n!", start, count) + 1 or count, True
                self._take_lines(connection, start, stop)
            if not is_good:
                return False  # nobody knows where the next line begins
            start = stop
        return True

    def _take_lines(self, connection: Connection, start: int, count: int) -> None:
        """Take buffer[start:count]: lines, and the parts of lines at both ends."""
        buffer = self._buffer
        end = buffer.rfind(b"\n", start, count) + 1
        if end:
            if connection.length:
                start = self._end_line(connection, start, buffer.index(b"\n", start, end) + 1, end)
            if start < end:
                self._forward(connection, start, end)
            start = end
        if start < count:
            self._keep(connection, start, count)

    def _max_line(self, connection: Connection) -> int:
        return self.max_line if connection.raw is None else connection.raw.max_line

    def _keep(self, connection: Connection, start: int, end: int) -> None:
        """Add buffer[start:end] to the unfinished line or unit, as far as the limit of a line allows."""
        most = self._max_line(connection) if connection.unit is None else connection.unit.nbytes
        space = most + 1 - len(connection.partial)
        kept = min(end - start, max(0, space))
        connection.partial += self._view[start : start + kept]
        connection.length += end - start
        self.partial_bytes += kept

    def _end_line(self, connection: Connection, start: int, first: int, end: int) -> int:
        """End the unfinished line with buffer[start:first], and take with it what follows, up to `end`, if it may be taken.

        Return where the rest of the buffer begins.
        """
        most = self._max_line(connection)
        if connection.length + first - 1 - start > most or end - start > most:
            self._keep(connection, start, first - 1)
            line, length = bytes(connection.partial), connection.length
            self._forget_partial(connection)
            self._pass_line(connection, line, length, "too_long" if length > most else "")
            return first
        partial = connection.partial
        self._forget_partial(connection)
        count = record.count_lines(self._buffer[start:end]) if connection.sender is not None else 0
        self._pass_on(connection, [partial, self._view[start:end]], count)
        return end

    def _pass_line(self, connection: Connection, line: bytes, length: int, reason: str) -> None:
        """Pass on one line of `length` bytes, with what stands for it if it must not go on as it is (`reason`)."""
        if not reason:
            self._pass_on(connection, [line, b"\n"], 1)
        elif connection.sender is not None:  # the framer refuses it, in its place among the replies
            self._pass_on(connection, [line[: self.max_line + 1], b"\n"], 1)
        else:
            self._bury(connection.raw, line, length, reason)

    def _bury(self, raw: "RawPort | None", line: bytes, length: int, reason: str) -> None:
        """Hand the dead.malformed over that keeps a line which is no message."""
        self.refused += 1
        if raw is None:
            self._hand_over([record.malformed(reason, line, length, self.max_line), b"\n"], None, 0)
            return
        from kmq.ingress import intakes  # only where there are some

        raw.lines += 1
        raw.bytes += length + 1
        self.bytes += length + 1
        self.handover.put([intakes.letter(raw, reason, line, length)])

    def _hand_over_raw(self, raw: "RawPort", parts: Sequence[Part]) -> None:
        """Hand over whole lines that came to an intake. What arrived counts, and not what goes on: drain compares."""
        from kmq.ingress import intakes

        before, most = raw.bytes, self.max_line + _PIECE_BYTES
        if raw.json is not None:
            parts, wrong = intakes.split_json(raw.json, parts)
            self.refused += len(wrong)
            for piece in intakes.letters(raw, wrong, most):
                self.handover.put(piece)
        for piece in intakes.wrapped(raw, parts, most):
            self.handover.put(piece)
        self.bytes += raw.bytes - before

    def take_datagrams(self, raw: "RawPort", networks: "tuple[Network, ...]", refused: Callable[[str], None]) -> None:
        """Take the datagrams that wait at an intake, some at a time."""
        from kmq.ingress import intakes

        taken, too_long = intakes.read_datagrams(raw, networks, refused)
        if taken:
            self._hand_over_raw(raw, [b"".join(taken)])
        for line in too_long:
            self._bury(raw, line, len(line), "too_long")

    def _forward(self, connection: Connection, start: int, end: int) -> None:
        """Pass on buffer[start:end], which is whole lines."""
        most = self._max_line(connection)
        if end - start > most:  # only where the limit is very low: the buffer is seldom larger
            for line in bytes(self._view[start : end - 1]).split(b"\n"):
                self._pass_line(connection, line, len(line), "too_long" if len(line) > most else "")
            return
        count = record.count_lines(self._buffer[start:end]) if connection.sender is not None else 0
        self._pass_on(connection, [self._view[start:end]], count)

    # --- units -------------------------------------------------------------------------------------------------------

    def _begin_unit(self, connection: Connection, sender: Sender, line: bytes) -> bool:
        """Begin the unit of which this is the first line, or ask what one of 0 lines asks. Returns False after a bad one."""
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

    def _take_of_unit(self, connection: Connection, unit: Unit, start: int, stop: int) -> bool:
        """Take buffer[start:stop], which belongs to the unit. Returns False if it ends there and is not what it said."""
        if len(connection.partial) + stop - start < unit.nbytes:
            self._keep(connection, start, stop)
            return True
        parts = [connection.partial, self._buffer[start:stop]]
        self._forget_partial(connection)
        lines = sum(map(record.count_lines, parts))
        if lines != unit.lines or self._buffer[stop - 1 : stop] != b"\n":
            why = f"its {unit.nbytes} bytes are {lines} lines" + (" and no more" if lines == unit.lines else "")
            return self._refuse(connection, unit.lines, "bad_unit", why)
        self._pass_on(connection, parts, lines, unit.origin)
        return True

    def _refuse(self, connection: Connection, count: int, code: str = "", why: str = "") -> bool:
        """Refuse so many messages, and all after them, for the reason that the connection has, else for this one. False."""
        replies = connection.replies
        replies.refusal = replies.refusal or refusals.reason(code, why).encode()
        replies.refuse(count)
        count_err(self._row, replies.refusal, count)
        return False

    # --- whole lines are handed over ---------------------------------------------------------------------------------

    def _pass_on(self, connection: Connection, parts: Sequence[Part], count: int, origin: bytes = b"") -> None:
        """Hand over whole lines, `count` messages if the connection has a sender; or refuse them if it is refused."""
        if connection.raw is not None:
            self._hand_over_raw(connection.raw, parts)
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
        self._hand_over(parts, sender, count, origin)

    def _hand_over(self, parts: Sequence[Part], sender: Sender | None, count: int, origin: bytes = b"") -> None:
        self.bytes += sum(map(len, parts))
        self.handover.put(parts, sender, count, origin)

    def finish(self, connection: Connection) -> None:
        """Take the end of a connection: its unfinished line is refused, or becomes dead.malformed (connection.py)."""
        line, length, unit = bytes(connection.partial), connection.length, connection.unit
        self._forget_partial(connection)
        if not length or connection.phase == GREETING:
            return
        reason = "too_long" if length > self._max_line(connection) else "no_newline"
        if unit is not None:
            self._refuse(connection, unit.lines, "bad_unit", "the connection ended before the unit did")
        elif connection.replies.acks:
            self._refuse(connection, 1, reason, "the connection ended before the line did")
        elif not connection.replies.refusal:
            self._bury(connection.raw, line, length, reason)


# --- producers -------------------------------------------------------------------------------------------------------

UNAUTHORIZED = refusals.reason(
    "unauthorized", "say: !hello acks=0|1|all token=<token>, with one that `kmq token new` has made"
)
NOT_LOCAL = refusals.reason("unauthorized", "reserved=1 needs the token in KMQ_PIPES/local.token of the broker's pod")


class Producers:
    """All producers. `poll` holds their sockets and their listeners; the loop waits for it while they may be read."""

    def __init__(
        self, stage: Stage, handover: Handover, gate: Gate, tokens: "Tokens | None", strangers: Strangers
    ) -> None:
        settings = stage.settings
        self.poll = select.epoll()
        self.table = ConnectionTable()
        self.entrance = Entrance(stage, self.poll, self.table, strangers)
        hello_required = b"" if tokens is None else UNAUTHORIZED.encode()
        self.intake = Intake(handover, settings.max_line, stage.row, self._greet, hello_required)
        self._ack_time = stage.page.histogram("ack")
        self.deadlines = Deadlines(settings.idle, settings.line_deadline)
        self._settings, self._row, self._handover, self._gate = settings, stage.row, handover, gate
        self._tokens, self._strangers = tokens, strangers
        self._local = LocalToken(settings)
        self._start = time.time_ns()  # replies meant for an earlier ingress must not reach a connection of ours
        self._greeted = 0
        self._acks = AckReader(stage.acks)
        self._unread = UnreadBudget()
        self._ready: deque[tuple[int, int]] = deque()  # descriptors and events that have not had their turn
        self._datagrams: dict[int, RawPort] = {}  # by descriptor: the intakes that take datagrams

    @property
    def all_had_their_turn(self) -> bool:
        """Return True if no producer that was ready at the last look still has to be read."""
        return not self._ready

    # --- messages come in ---------------------------------------------------------------------------------------------

    def note_ready(self, fd: int, event: int) -> None:
        """Let the connection, or the listener, with this descriptor have its turn at the next `serve`."""
        self._ready.append((fd, event))

    def serve(self) -> None:
        """Read the producers that have sent something, as long as the framer takes it, and tell it of their lines."""
        while self._ready and (not self._handover.clogged or self._gate.refusal):
            fd, event = self._ready.popleft()
            connection = self.table.at(fd)
            if connection is not None:
                self._serve(connection, event)
            elif fd in self.entrance:
                self.entrance.accept(fd)
            elif fd in self._datagrams and not self._gate.refusal:
                self._take_datagrams(self._datagrams[fd])
            for connection in self.intake.over_budget(self.table):
                self._strangers.note("unfinished_line_cut", connection.peer, f"of {connection.length} bytes")
                self._drop(connection)
        self._handover.flush()

    def _serve(self, connection: Connection, event: int) -> None:
        refusal = self._gate.refusal
        if refusal and connection.phase == GREETING and self._tokens is None and _begins_plain(connection):
            connection.phase = PLAIN  # it is read when messages are accepted again
            self._watch(connection)
        elif connection.phase == CLOSING and event & (select.EPOLLHUP | select.EPOLLERR):
            self._drop(connection)  # it has sent everything and is gone, so nobody reads its replies
        elif connection.may_receive(refusal) and not self._receive(connection):
            self._end(connection)
        else:
            self._tell(connection)

    def _receive(self, connection: Connection) -> bool:
        """Receive once. Returns False when nothing more will come."""
        tls = connection.tls
        if self.intake.receive(connection) and not (tls is not None and tls.over):
            return True
        if tls is not None and tls.failure:
            self._strangers.note("tls_failed", connection.peer, tls.failure)
        if self.intake.hello_required and connection.replies.refusal == self.intake.hello_required:
            self._strangers.refuse(connection.peer, "lines without a hello", "token")
        return False

    def take_datagrams_of(self, raw: "RawPort") -> None:
        """Read the datagrams of this intake from now on, as long as messages are accepted."""
        self._datagrams[raw.sock.fileno()] = raw
        self.poll.register(raw.sock, select.EPOLLIN)

    def _take_datagrams(self, raw: "RawPort") -> None:
        def refused(peer: str) -> None:
            self._strangers.note("intake_refused", peer, f"{raw.spec}: not in KMQ_INTAKES_FROM")

        self.intake.take_datagrams(raw, self._settings.intakes_from, refused)

    def end_datagrams(self) -> None:
        """Read what waits at the intakes that take datagrams, as far as there is room, and close them."""
        for raw in self._datagrams.values():
            if not self._handover.clogged and not self._gate.refusal:
                self._take_datagrams(raw)
            self.poll.unregister(raw.sock)
            raw.sock.close()
        self._datagrams.clear()

    def follow_gate(self, before: bytes) -> None:
        """Refuse, or accept, on every connection what the gate refuses or accepts now. `before`: its last refusal."""
        refusal = self._gate.refusal
        self.intake.expect_clogging(bool(refusal))
        for raw in self._datagrams.values():
            self.poll.modify(raw.sock, 0 if refusal else select.EPOLLIN)
        for connection in self.table:
            connection.replies.follow(before, b"" if connection.spares and self._gate.lacks_room else refusal)
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for what can be acted on: more messages, room for replies, or neither."""
        interest = select.EPOLLIN if connection.may_receive(self._gate.refusal) else 0
        if connection.replies.pending or (connection.tls is not None and connection.tls.wants_write):
            interest |= select.EPOLLOUT
        interest = interest or select.EPOLLET  # epoll always reports a hang-up: this makes it report that once
        if interest != connection.interest:
            connection.interest = interest
            self.poll.modify(connection.sock, interest)

    # --- a connection says who it is ----------------------------------------------------------------------------------

    def _greet(self, connection: Connection, line: bytes) -> bytes:
        """Give the connection what its hello asks for; return the reply to `shard=?`, if asked. Raises HelloRefused."""
        hello = parse(line)
        if self._tokens is not None:
            self._authorize(connection, hello.token, self._tokens)
        if hello.reserved and not self._local.matches(hello.token):
            self._strangers.refuse(connection.peer, "reserved topics without the local token", "local")
            raise HelloRefused(NOT_LOCAL)
        if (self._settings.policy_framed or self._settings.policy) == "drop_oldest":
            raise HelloRefused(refusals.reason("drop_oldest"))
        if self._gate.refusal and not (hello.spare and self._gate.lacks_room):
            raise HelloRefused(self._gate.refusal.decode())
        self._fence(hello, connection.peer)
        more = self._shard() if hello.asks_shard else b""
        if not (
            hello.acks or hello.tag
        ):  # as without a hello: refused lines become dead.malformed, nobody wants replies
            return more
        self._greeted += 1
        connection.replies.expect(hello)
        connection.spares = hello.spare
        if hello.acks:
            connection.phase = ACKED
        sender = Sender(b"%d.%d" % (self._start, self._greeted), hello.tag, hello.reserved)
        self.table.give_name(connection, sender, hello.producer, hello.attempt)
        return more

    def _shard(self) -> bytes:
        words = ["!shard"]
        if self._settings.shard:
            from kmq.broker import door  # only in a shard
            from kmq.log import identity

            doors = door.advertised(self._settings.pipes, "lines", "lines_tls")
            words += identity.lineage(self._settings.data), *doors
        return " ".join(words).encode() + b"\n"

    def _authorize(self, connection: Connection, token: bytes, tokens: "Tokens") -> None:
        holder = tokens.find(token)
        if holder is None:
            self._strangers.refuse(connection.peer, "no valid token", "" if token else "token")
            raise HelloRefused(UNAUTHORIZED)
        if not holder.may(LINES_IN):
            self._strangers.refuse(connection.peer, f"the token of {holder.name} may not produce")
            raise HelloRefused(refusals.reason("forbidden", holder.refusal(LINES_IN)))

    def _fence(self, hello: "Hello", newcomer: str) -> None:
        """Take the name away from who has it. Raises HelloRefused if that is a later attempt of the same run."""
        later = self.table.later_attempt(hello)
        if later is not None:
            text = f"attempt {later.number} of this run is connected; this one came late"
            raise HelloRefused(refusals.reason("fenced", text))
        older = self.table.take_producer(hello.producer)
        if older is not None:
            self._strangers.note("fenced", older.peer, f"producer={hello.producer.decode()} by={newcomer}")
            older.replies.refusal = refusals.reason("fenced").encode()

    # --- replies go out -----------------------------------------------------------------------------------------------

    def pass_replies(self) -> None:
        """Bring the replies of durability to the connections that they are for."""
        replied: dict[bytes, Connection] = {}
        for line in self._acks.take():
            name, _, rest = line.partition(b" ")
            connection = self.table.of_sender(name)
            if connection is None:
                continue
            first, _, text = rest.partition(b" ")
            if text.startswith(b"!err"):
                count_err(self._row, text.split(b" ", 2)[-1])
            if connection.replies.reply(int(first), text):
                replied[name] = connection
            else:
                self._strangers.note("replies_lost", connection.peer, "the producer sends again")
                self._break(connection)
                replied.pop(name, None)
        now = time.monotonic()
        for connection in replied.values():
            replies = connection.replies
            if replies.train_at and replies.answered >= replies.train_end:
                self._ack_time.observe(now - replies.train_at)
                replies.train_at = 0.0
            replies.write_refusals()
            self._tell(connection)

    def _tell(self, connection: Connection) -> None:
        """Send replies, and end a connection that has sent everything and has all its replies."""
        if not connection.send_replies() or connection.is_done:
            self._drop(connection)
            return
        self._unread.follow(connection)
        self._watch(connection)

    def break_unread(self) -> None:
        """Break connections whose unread replies take too much memory."""
        for connection in self._unread.exceeded_by(self.table):
            self._row.cut_off += 1
            self._strangers.note("replies_unread", connection.peer, f"{connection.replies.counted} bytes")
            self._break(connection)

    # --- connections end ----------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """End the connections that are late."""
        self._row.unanswered = self.table.unanswered
        for connection, reason in self.deadlines.late(self.table).items():
            self._strangers.cut_off(connection.peer, reason)
            if connection.phase == CLOSING or reason == UNREAD:
                self._break(connection)  # it does not read its replies
                continue
            self._end(connection, "within KMQ_LINE_DEADLINE")
        self.entrance.sweep()

    def _end(self, connection: Connection, when: str = "when the connection ended") -> None:
        """Receive nothing more; replies may still have to be sent. `when`: about a hello that is not finished."""
        if connection.phase == GREETING and connection.length:
            connection.replies.pending += f"!err 0 bad_hello not finished {when}\n".encode()
            count_err(self._row, b"bad_hello")
        self.intake.finish(connection)
        connection.phase = CLOSING
        self._tell(connection)

    def _drop(self, connection: Connection) -> None:
        """End a connection: in order, unless that would say that refused lines were handed over."""
        if connection.replies.refusal and not connection.replies.acks:
            self._break(connection)
            return
        self._forget(connection)
        self._handover.flush()  # an orderly end says that the FIFO speaks of every line that was read
        close_in_order(connection)

    def _break(self, connection: Connection) -> None:
        """End a connection with a reset: its producer learns that not every message was answered."""
        self._forget(connection)
        connection.sock.close()

    def _forget(self, connection: Connection) -> None:
        self.intake.finish(connection)
        self._unread.forget(connection)
        if connection.raw is not None:
            connection.raw.connections -= 1
        self.poll.unregister(connection.sock.fileno())
        self.table.remove(connection)

    def let_go(self) -> None:
        """End all connections. A line that is unfinished now is lost: its producer sees a reset and sends it again."""
        for connection in self.table:
            if connection.length:
                connection.sock.close()
            else:
                close_in_order(connection)


def _begins_plain(connection: Connection) -> bool:
    """Return True if the first byte is there and begins no hello. TLS cannot look at a byte without taking it."""
    if connection.tls is not None:
        return False
    with contextlib.suppress(OSError):
        return connection.sock.recv(1, socket.MSG_PEEK) not in (b"!", b"")
    return False
