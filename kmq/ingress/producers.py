"""The connections of producers: read in turn, answered, and ended.

Invariant   Every connection with something to read gets one receive before any gets another, also if the way to the
            framer clogs between. Nobody is read while it is clogged, unless messages are refused: then nothing that is
            read goes there.
"""

import contextlib
import select
import socket
import time
from collections import deque

from kmq.access.local_token import LocalToken
from kmq.access.roles import LINES_IN
from kmq.broker.stage import Stage
from kmq.broker.stats import Strangers
from kmq.ingress.connection import ACKED, CLOSING, GREETING, PLAIN, Connection, ConnectionTable, close_in_order
from kmq.ingress.hello import Refused, parse
from kmq.ingress.intake import Intake
from kmq.ingress.limits import UNREAD, Deadlines, Errs, Gate, UnreadBudget
from kmq.ingress.ports import Entrance
from kmq.links.fifo import AckReader, Sender
from kmq.links.received import Handover
from kmq.wire import refusals

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.access.tokens import Tokens


# --- greeter ---------------------------------------------------------------------------------------------------------
# The hello of a connection: who may send, and under which name its replies come back.
#
# Invariant   With KMQ_TOKENS nothing is taken from a connection that has not shown a valid token with the role for it. A
#             producer name belongs to the connection that said hello last: every older one is refused from then on
#             (`fenced`).
#             Only a connection that has shown the pod's local token is announced to the framer as one that may write to
#             reserved topics.

UNAUTHORIZED = refusals.reason(
    "unauthorized", "say: !hello acks=0|1|all token=<token>, with one that `kmq token new` has made"
)
NOT_LOCAL = refusals.reason("unauthorized", "reserved=1 needs the token in KMQ_PIPES/local.token of the broker's pod")


class Greeter:
    """Answers hellos."""

    def __init__(
        self, stage: Stage, gate: Gate, tokens: "Tokens | None", table: ConnectionTable, strangers: Strangers
    ) -> None:
        self.tokens = tokens  # None: no token is required
        self._settings, self._gate, self._table, self._strangers = stage.settings, gate, table, strangers
        self._local = LocalToken(stage.settings)
        self._start = time.time_ns()  # replies meant for an earlier ingress must not reach a connection of ours
        self._greeted = 0

    def greet(self, connection: Connection, line: bytes) -> None:
        """Give the connection what its hello asks for. Raises Refused."""
        hello = parse(line)
        if self.tokens is not None:
            self._authorize(connection, hello.token, self.tokens)
        if hello.reserved and not self._local.matches(hello.token):
            self._strangers.refuse(connection.peer, "reserved topics without the local token", "local")
            raise Refused(NOT_LOCAL)
        if (self._settings.policy_framed or self._settings.policy) == "drop_oldest":
            raise Refused(refusals.reason("drop_oldest"))
        if self._gate.refusal:
            raise Refused(self._gate.refusal.decode())
        self._fence(hello.producer, connection.peer)
        if not (hello.acks or hello.tag):
            return  # as without a hello: refused lines become dead.malformed, because the producer wants no replies
        self._greeted += 1
        connection.replies.expect(hello)
        if hello.acks:
            connection.phase = ACKED
        sender = Sender(b"%d.%d" % (self._start, self._greeted), hello.tag, hello.reserved)
        self._table.give_name(connection, sender, hello.producer)

    def _authorize(self, connection: Connection, token: bytes, tokens: "Tokens") -> None:
        holder = tokens.find(token)
        if holder is None:
            self._strangers.refuse(connection.peer, "no valid token", "" if token else "token")
            raise Refused(UNAUTHORIZED)
        if not holder.may(LINES_IN):
            self._strangers.refuse(connection.peer, f"the token of {holder.name} may not produce")
            raise Refused(refusals.reason("forbidden", holder.refusal(LINES_IN)))

    def _fence(self, producer: bytes, newcomer: str) -> None:
        older = self._table.take_producer(producer)
        if older is not None:
            self._strangers.note("fenced", older.peer, f"producer={producer.decode()} by={newcomer}")
            older.replies.refusal = refusals.reason("fenced").encode()


# --- producers -------------------------------------------------------------------------------------------------------


class Producers:
    """All producers. `poll` holds their sockets and their listeners; the loop waits for it while they may be read."""

    def __init__(
        self, stage: Stage, handover: Handover, gate: Gate, tokens: "Tokens | None", strangers: Strangers
    ) -> None:
        settings = stage.settings
        self.poll = select.epoll()
        self.table = ConnectionTable()
        self.entrance = Entrance(stage, self.poll, self.table, strangers)
        self.greeter = Greeter(stage, gate, tokens, self.table, strangers)
        self.intake = Intake(handover, settings.max_line, self.greeter.greet)
        self._errs = self.intake.errs = Errs(stage.row)
        self._ack_time = stage.page.histogram("ack")
        if tokens is not None:
            self.intake.hello_required = UNAUTHORIZED.encode()
        self.deadlines = Deadlines(settings.idle, settings.line_deadline)
        self._row, self._handover, self._gate, self._strangers = stage.row, handover, gate, strangers
        self._acks = AckReader(stage.acks)
        self._unread = UnreadBudget()
        self._ready: deque[tuple[int, int]] = deque()  # descriptors and events that have not had their turn

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
            for connection in self.intake.partial.exceeded_by(self.table):
                self._strangers.note("unfinished_line_cut", connection.peer, f"of {connection.length} bytes")
                self._drop(connection)
        self._handover.flush()

    def _serve(self, connection: Connection, event: int) -> None:
        refusal = self._gate.refusal
        if refusal and connection.phase == GREETING and self.greeter.tokens is None and _begins_plain(connection):
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

    def follow_gate(self, before: bytes) -> None:
        """Refuse, or accept, on every connection what the gate refuses or accepts now. `before`: its last refusal."""
        refusal = self._gate.refusal
        self.intake.expect_clogging(bool(refusal))
        for connection in self.table:
            connection.replies.follow(before, refusal)
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
                self._errs.count_reply(text)
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
            self._errs.count(b"bad_hello")
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
