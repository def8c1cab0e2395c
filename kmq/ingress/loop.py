"""The event loop of ingress.

Two epolls: one holds the sockets of producers (producers.py). The other holds everything else, and the first one only
while producers may be read: leaving it out is the backpressure.
"""

import select
import time
from collections.abc import Callable

from kmq.broker.incidents import Incidents, Strangers
from kmq.broker.stage import Stage
from kmq.ingress.askers import Askers
from kmq.ingress.deadlines import SWEEP_S
from kmq.ingress.gate import Gate
from kmq.ingress.ports import Ports
from kmq.ingress.producers import Producers
from kmq.links.fifo import FifoWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.tokens import Tokens

_GATE_S = 0.1  # while messages are refused: how often the gate is looked at


class Loop:
    """Serves producers, the ack port and the FIFOs, one turn after the other."""

    def __init__(self, stage: Stage, fifo: FifoWriter) -> None:
        self.stage, self.fifo = stage, fifo
        self.incidents = Incidents(stage.log.warn)
        strangers = Strangers(stage.row, self.incidents)
        self.ports = Ports(stage, strangers)
        tokens = _tokens(stage) if stage.settings.tokens else None
        self.gate = Gate(stage)
        self._poll = select.epoll()
        self._askers = Askers(stage, self._poll, tokens, strangers)
        self.producers = Producers(stage, fifo, self.gate, tokens, strangers)
        for listener in self.ports.of_producers:
            self.producers.entrance.open(listener)
        self._handlers: dict[int, Callable[[], None]] = {
            self.producers.poll.fileno(): self.producers.serve,
            stage.raw: fifo.flush,
            stage.acks: self.producers.pass_replies,
            self.ports.questions.sock.fileno(): self._accept_askers,
        }
        for fd in (stage.signalled, self.ports.questions.sock.fileno(), stage.acks, self.producers.poll.fileno()):
            self._poll.register(fd, select.EPOLLIN)
        self._is_reading, self._is_writing = True, False  # producers are in the epoll, and so is the clogged FIFO
        self._housekeeping_at = 0.0

    def announce(self) -> None:
        """Tell the framer that an unfinished line of an earlier ingress will never be finished."""
        line = self.producers.greeter.announcement
        self.fifo.put(line, 0, len(line))

    def turn(self, timeout_s: float) -> None:
        """Wait at most this long for something to do, and do it."""
        before = self.gate.refusal
        if self.gate.look():
            self.producers.follow_gate(before)
        self._follow_fifo()
        now = time.monotonic()
        if self._is_reading and self.producers.all_had_their_turn and now >= self.producers.deadlines.due:
            self.producers.sweep()
        if now >= self._housekeeping_at:
            self._keep_house(now)
        for fd, _ in self._poll.poll(_GATE_S if self.gate.refusal else timeout_s):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
            elif fd in self._askers:
                self._askers.serve(fd)
        self.producers.break_unread()
        row, intake = self.stage.row, self.producers.intake
        row.bytes, row.refused, row.connections = intake.bytes, intake.refused, len(self.producers.table)

    def _follow_fifo(self) -> None:
        """Read producers while the FIFO takes everything, or while messages are refused: producers must be told."""
        is_clogged = self.fifo.clogged
        if is_clogged != self._is_writing:
            self._is_writing = is_clogged
            if is_clogged:
                self._poll.register(self.stage.raw, select.EPOLLOUT)
            else:
                self._poll.unregister(self.stage.raw)
        may_read = not is_clogged or bool(self.gate.refusal)
        if may_read != self._is_reading:
            self._is_reading = may_read
            if may_read:
                self._poll.register(self.producers.poll, select.EPOLLIN)
            else:
                self._poll.unregister(self.producers.poll)

    def _accept_askers(self) -> None:
        for sock, peer in self.ports.questions.accept():
            self._askers.take(sock, peer)

    def _keep_house(self, now: float) -> None:
        """Do what is due once a second, also while the FIFO is full: the ack port does not depend on the FIFO."""
        self._housekeeping_at = now + SWEEP_S
        self._askers.sweep()
        self.incidents.say()
        if self.ports.certificates is not None:
            self.ports.certificates.look()

    def stop_accepting(self) -> None:
        """Close all ports."""
        self._poll.unregister(self.stage.signalled)  # it stays readable, so every wait would end at once
        self.producers.entrance.close()
        del self._handlers[self.ports.questions.sock.fileno()]
        self.ports.questions.sock.close()


def _tokens(stage: Stage) -> "Tokens":
    from kmq.tokens import Tokens

    tokens, host = Tokens(stage.settings, stage.log.warn), stage.settings.host
    if not (host.startswith("127.") or host in ("::1", "localhost")):
        stage.log.warn("tokens_in_clear", KMQ_HOST=host, effect="anyone on the way can read them; use TLS")
    return tokens
