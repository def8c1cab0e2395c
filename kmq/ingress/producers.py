"""Producers: their connections are read in turn, greeted, answered, and ended. receiving.py handles their bytes.

Invariant   Every connection with data gets one receive before any gets another, even if the way to the framer clogs
            in between. While it is clogged no connection is read, unless messages are refused: then no data goes there.
            With KMQ_TOKENS nothing is accepted from a connection without a valid token that has the role for it. A
            producer name belongs to the connection that said hello last, and every older one is refused from then on
            (`fenced`). An earlier attempt of the same run that arrives late is itself refused. Attempts are kept with
            their connections: a restart, or a change of leader, ends all of them, so none is left to fence. Only
            a connection that has shown the pod's local token is announced to the framer as one that may write to
            reserved topics.
"""

import select
import time
from collections import deque

from kmq.access.local_token import LocalToken
from kmq.access.roles import LINES_IN
from kmq.broker.stage import Stage
from kmq.broker.stats import Strangers
from kmq.ingress.connection import ACKED, CLOSING, GREETING, PLAIN, Connection, ConnectionTable, close_in_order
from kmq.ingress.hello import HelloRefused, check_epoch, parse
from kmq.ingress.limits import UNREAD, Deadlines, Gate, UnreadBudget, count_err
from kmq.ingress.ports import Entrance
from kmq.ingress.receiving import Intake
from kmq.links.fifo import AckReader, Sender
from kmq.links.received import Handover
from kmq.wire import foreign, refusals

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.access.tokens import Tokens
    from kmq.ingress.hello import Hello
    from kmq.ingress.intakes import RawPort

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
        self.intake = Intake(handover, settings.max_line, stage.row, self._greet, hello_required, settings.http_port)
        self._ack_time = stage.page.histogram("ack")
        self.deadlines = Deadlines(settings.idle, settings.line_deadline)
        self._settings, self._row, self._handover, self._gate = settings, stage.row, handover, gate
        self._tokens, self._strangers = tokens, strangers
        self._local = LocalToken(settings)
        self._start = time.time_ns()  # in connection names: replies for an earlier ingress must not reach ours
        self._epoch = stage.epoch  # of this process; after a change it restarts
        self._greeted = 0
        self._acks = AckReader(stage.acks)
        self._unread = UnreadBudget()
        self._ready: deque[tuple[int, int]] = deque()  # descriptors and events that wait for their turn
        self._datagrams: dict[int, RawPort] = {}  # by descriptor: the intakes that take datagrams

    @property
    def all_had_their_turn(self) -> bool:
        """Return True if all producers that were ready at the last look have been read."""
        return not self._ready

    # --- messages come in ---------------------------------------------------------------------------------------------

    def note_ready(self, fd: int, event: int) -> None:
        """Let the connection or listener with this descriptor have its turn at the next `serve`."""
        self._ready.append((fd, event))

    def serve(self) -> None:
        """Read the producers that have sent data, while the framer takes it, and tell the framer of their lines."""
        while self._ready and (not self._handover.clogged or self._gate.refusal):
            fd, event = self._ready.popleft()
            connection = self.table.at(fd)
            if connection is not None:
                self._serve(connection, event)
            elif fd in self.entrance:
                self.entrance.accept(fd)
            elif fd in self._datagrams and not self._gate.refusal:
                self._receive_datagrams(self._datagrams[fd])
            for connection in self.intake.over_budget(self.table):
                self._strangers.note("unfinished_line_cut", connection.peer, f"of {connection.length} bytes")
                self._drop(connection)
        self._handover.flush()

    def _serve(self, connection: Connection, event: int) -> None:
        refusal = self._gate.refusal
        if refusal and connection.phase == GREETING and self._tokens is None and connection.begins_plain():
            connection.phase = PLAIN  # read it once messages are accepted again
            self._watch(connection)
        elif connection.phase == CLOSING and event & (select.EPOLLHUP | select.EPOLLERR):
            self._drop(connection)  # it has sent all and left, so its replies have no reader
        elif connection.may_receive(refusal) and not self._receive(connection):
            self._end(connection)
        else:
            self._send_replies(connection)

    def _receive(self, connection: Connection) -> bool:
        """Receive once. Return False if no more will come."""
        tls = connection.tls
        if self.intake.receive(connection) and not (tls is not None and tls.over):
            return True
        if tls is not None and tls.failure:
            self._strangers.note("tls_failed", connection.peer, tls.failure)
        if connection.speaks:
            self._strangers.cut_off(connection.peer, foreign.reason(connection.speaks, self._settings.http_port))
        if self.intake.hello_required and connection.replies.refusal == self.intake.hello_required:
            self._strangers.refuse(connection.peer, "lines without a hello", "token")
        return False

    def receive_datagrams_of(self, raw: "RawPort") -> None:
        """Read the datagrams of this intake from now on, as long as messages are accepted."""
        self._datagrams[raw.sock.fileno()] = raw
        self.poll.register(raw.sock, select.EPOLLIN)

    def _receive_datagrams(self, raw: "RawPort") -> None:
        def refused(peer: str) -> None:
            self._strangers.note("intake_refused", peer, f"{raw.spec}: not in KMQ_INTAKES_FROM")

        self.intake.receive_datagrams(raw, self._settings.intakes_from, refused)

    def end_datagrams(self) -> None:
        """Read what waits at the intakes that take datagrams, as far as there is room, and close them."""
        for raw in self._datagrams.values():
            if not self._handover.clogged and not self._gate.refusal:
                self._receive_datagrams(raw)
            self.poll.unregister(raw.sock)
            raw.sock.close()
        self._datagrams.clear()

    def follow_gate(self, before: bytes) -> None:
        """Apply the gate's present refusal, or none, to every connection. `before`: the previous refusal."""
        refusal = self._gate.refusal
        self.intake.expect_clogging(bool(refusal))
        for raw in self._datagrams.values():
            self.poll.modify(raw.sock, 0 if refusal else select.EPOLLIN)
        for connection in self.table:
            connection.replies.follow(before, b"" if connection.spares and self._gate.lacks_room else refusal)
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for the events that can be handled: more messages, room for replies, or neither."""
        interest = select.EPOLLIN if connection.may_receive(self._gate.refusal) else 0
        if connection.replies.pending or (connection.tls is not None and connection.tls.wants_write):
            interest |= select.EPOLLOUT
        interest = interest or select.EPOLLET  # epoll always reports a hang-up: this makes it report that once
        if interest != connection.interest:
            connection.interest = interest
            self.poll.modify(connection.sock, interest)

    # --- a connection says who it is ----------------------------------------------------------------------------------

    def _greet(self, connection: Connection, line: bytes) -> bytes:
        """Apply a hello to its connection; return the reply to `shard=?`, if asked. Raises HelloRefused."""
        hello = parse(line)
        check_epoch(hello, self._epoch)
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
        if not (hello.acks or hello.tag):  # as without a hello: invalid lines become dead.malformed, without a reply
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
        """Take the name from the connection that has it. Raises HelloRefused if that is a later attempt of its run."""
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
        """Bring durability's replies to their connections."""
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
            self._send_replies(connection)

    def _send_replies(self, connection: Connection) -> None:
        """Send replies. End a connection that has sent everything and has all its replies."""
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
        """Receive no more; replies may still have to be sent. `when`: for the refusal of an unfinished hello."""
        if connection.phase == GREETING and connection.length:
            connection.replies.pending += f"!err 0 bad_hello not finished {when}\n".encode()
            count_err(self._row, b"bad_hello")
        self.intake.finish(connection)
        connection.phase = CLOSING
        self._send_replies(connection)

    def _drop(self, connection: Connection) -> None:
        """End a connection: in order, unless that would claim that refused lines were handed over."""
        if connection.replies.refusal and not connection.replies.acks:
            self._break(connection)
            return
        self._forget(connection)
        if connection.speaks:
            self.entrance.dismiss(connection.sock)
            return
        self._handover.flush()  # an orderly end means that each line read is in the FIFO
        close_in_order(connection)

    def _break(self, connection: Connection) -> None:
        """End a connection with a reset, so its producer learns that not every message was answered."""
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
        """End all connections. An unfinished line is lost: its producer sees a reset and sends it again."""
        for connection in self.table:
            if connection.length:
                connection.sock.close()
            else:
                close_in_order(connection)
