"""The event loop of ingress, and its drain at the end.

It waits for one epoll, which holds the sockets of producers, the FIFO `acks`, and a second epoll with everything else.
While producers must not be read, it waits for an epoll without their sockets: that is the backpressure.

Order       At the end ingress first accepts no more connections. Then it reads what producers had sent before, waits
            for the replies, and ends the connections in order. An orderly end means that the framer will have every
            line, so everything must be handed over first.
Time        At the end at most _HANDOVER_S and _REPLIES_S, together less than DRAIN_S, because the other stages drain
            after ingress. If the FIFO stays full the drain ends after DRAIN_S (Stage.check).
"""

import select
import socket
import time
from collections.abc import Callable

from kmq.broker.stage import Stage
from kmq.broker.stats import Incidents, Strangers
from kmq.config.settings import DRAIN_S
from kmq.ingress.limits import SWEEP_S, Gate
from kmq.ingress.ports import Askers, Ports
from kmq.ingress.producers import Producers
from kmq.links.fifo import waiting_bytes
from kmq.links.received import Handover

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.access.tokens import Tokens


_GATE_S = 0.1  # interval of looks at the gate while messages are refused


class Loop:
    """Serves producers, the ack port and the FIFOs, one turn after the other."""

    def __init__(self, stage: Stage, handover: Handover) -> None:
        self.stage, self.handover = stage, handover
        self.incidents = Incidents(stage.log.warn)
        strangers = Strangers(stage.row, self.incidents)
        self.ports = Ports(stage, strangers)
        tokens = self._tokens = _tokens(stage) if stage.settings.tokens else None
        self.gate = Gate(stage)
        self._poll = select.epoll()
        self._askers = Askers(stage, self._poll, tokens, strangers)
        self.producers = Producers(stage, handover, self.gate, tokens, strangers)
        for listener in self.ports.of_producers:
            self.producers.entrance.open(listener)
        for raw in self.ports.raw:
            if raw.sock.type == socket.SOCK_DGRAM:
                self.producers.receive_datagrams_of(raw)
        self._handlers: dict[int, Callable[[], None]] = {
            stage.raw: handover.flush,
            self.ports.questions.sock.fileno(): self._accept_askers,
        }
        for fd in (stage.signalled, self.ports.questions.sock.fileno()):
            self._poll.register(fd, select.EPOLLIN)
        self._without_producers = select.epoll()
        for poll in (self.producers.poll, self._without_producers):
            poll.register(stage.acks, select.EPOLLIN)
            poll.register(self._poll, select.EPOLLIN)
        self._is_reading, self._is_writing = True, False  # whether producers may be read; whether `raw` is full
        self._housekeeping_at = 0.0

    def announce(self) -> None:
        """Tell the framer that bytes of an earlier ingress in `received`, which no control line named, are free."""
        self.handover.say_free()
        self.handover.flush()

    def turn(self, timeout_s: float) -> None:
        """Wait at most this long for events, and handle them."""
        before = self.gate.refusal
        if self.gate.look():
            self.producers.follow_gate(before)
        now = time.monotonic()
        if self._is_reading and self.producers.all_had_their_turn and now >= self.producers.deadlines.due:
            self.producers.sweep()
        if now >= self._housekeeping_at:
            self._keep_house(now)
        self.handover.flush()
        self._follow_handover()
        self._wait(_GATE_S if self.gate.refusal else timeout_s)
        if self._is_reading:
            self.producers.serve()
        self.producers.break_unread()
        row, intake = self.stage.row, self.producers.intake
        row.bytes, row.refused, row.connections = intake.bytes, intake.refused, len(self.producers.table)

    def _wait(self, timeout_s: float) -> None:
        """Wait for events. Replies go out first; producers that have something to read have their turn in `serve`."""
        producers, acks, others = self.producers, self.stage.acks, self._poll.fileno()
        may_note = producers.all_had_their_turn
        poll = producers.poll if self._is_reading else self._without_producers
        for fd, event in poll.poll(timeout_s if may_note or not self._is_reading else 0.0):
            if fd == acks:
                producers.pass_replies()
            elif fd == others:
                self._handle_others()
            elif may_note:
                producers.note_ready(fd, event)

    def _handle_others(self) -> None:
        for fd, _ in self._poll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
            elif fd in self._askers:
                self._askers.serve(fd)

    def _follow_handover(self) -> None:
        """Read producers while the framer takes everything, or while messages are refused: they must be told."""
        if self.handover.is_full != self._is_writing:
            self._is_writing = self.handover.is_full
            if self._is_writing:
                self._poll.register(self.stage.raw, select.EPOLLOUT)
            else:
                self._poll.unregister(self.stage.raw)
        self._is_reading = not self.handover.clogged or bool(self.gate.refusal)

    def _accept_askers(self) -> None:
        for sock, peer in self.ports.questions.accept():
            self._askers.accept(sock, peer)

    def _keep_house(self, now: float) -> None:
        """Do what is due once a second, even while the framer takes nothing: the ack port does not depend on it."""
        self._housekeeping_at = now + SWEEP_S
        self._askers.sweep()
        self.gate.publish()
        if self.ports.raw:
            from kmq.ingress import intakes  # only if there are intakes

            self.stage.page.publish_intakes([intakes.counts(raw) for raw in self.ports.raw])
        if self._tokens is not None:
            self._tokens.look()
            self.stage.row.tokens_missing = int(self._tokens.is_missing)
        self.incidents.say()
        if self.ports.certificates is not None:
            self.ports.certificates.look()

    def stop_accepting(self) -> None:
        """Close all ports."""
        self._poll.unregister(self.stage.signalled)  # it stays readable, so every wait would return at once
        self.producers.entrance.close()
        self.producers.end_datagrams()
        del self._handlers[self.ports.questions.sock.fileno()]
        self.ports.questions.sock.close()


def _tokens(stage: Stage) -> "Tokens":
    from kmq.access.tokens import Tokens

    tokens, host = Tokens(stage.settings, stage.log.warn), stage.settings.host
    if not (host.startswith("127.") or host in ("::1", "localhost")):
        stage.log.warn("tokens_in_clear", KMQ_HOST=host, effect="anyone on the way can read them; use TLS")
    return tokens


# --- drain -----------------------------------------------------------------------------------------------------------

_TURN_S = 0.05
_GRACE_S = 0.2  # how long connected producers may still send
_HANDOVER_S = DRAIN_S / 2  # longest time to read what they had sent before
_REPLIES_S = 2.0  # longest wait for the replies
_FULL = 64 << 10  # bytes: a producer with more than this in its socket may have more in its kernel,
_BEHIND = 8 << 20  # at most this much (tcp_wmem)


def drain(loop: Loop) -> None:
    """Stop accepting, take what connected producers had sent, then end their connections."""
    loop.stop_accepting()
    _take_over(loop)
    producers, until = loop.producers, time.monotonic() + _REPLIES_S
    while producers.table.owes_replies and time.monotonic() < until:
        _turn(loop)
    while loop.handover.clogged:
        _turn(loop)
    loop.incidents.say()
    producers.let_go()


def _take_over(loop: Loop) -> None:
    """Read what producers had sent when we were told to stop, and no more of those that keep sending.

    Many of them have ended, so no program would send it again.
    """
    intake, table = loop.producers.intake, loop.producers.table
    waiting = [waiting_bytes(connection.sock.fileno()) for connection in table]
    most = intake.bytes + sum(waiting) + sum(_BEHIND for nbytes in waiting if nbytes > _FULL)
    quiet, latest = time.monotonic() + _GRACE_S, time.monotonic() + _HANDOVER_S

    def is_sent_before() -> bool:
        if loop.gate.refusal or intake.bytes >= most:
            return False
        return any(waiting_bytes(connection.sock.fileno()) for connection in table)

    while table and (time.monotonic() < quiet or (is_sent_before() and time.monotonic() < latest)):
        _turn(loop)


def _turn(loop: Loop) -> None:
    loop.turn(_TURN_S)
    loop.stage.check()
