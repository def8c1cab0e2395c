"""Ingress stage: takes lines from TCP and passes them, block by block, into the FIFO `raw`; brings replies back.

Links       in: TCP lines (KMQ_PORT, over TLS KMQ_TLS_PORT), GET_ACK (KMQ_ACK_PORT), FIFO `acks`   out: FIFO `raw`
Owns        the ports, pipes/ingress.owner; it is the only writer of the FIFO's control lines.

Invariant   What is written to the FIFO is whole lines, each connection's in its order. Memory is bounded: while the FIFO
            is full no producer's socket is read (that is the backpressure), and unfinished lines are bounded (intake.py).
            With KMQ_TOKENS nothing is taken from a connection that has not shown one.
Crash       Lines not yet in the FIFO are unacknowledged, and their producers see the connection break. A long line of
            which only some pieces were written is forgotten by the framer when it sees the next start (`!b`).
            Connections are named by our start and a number, so replies meant for a predecessor's reach nobody.
"""

import contextlib
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

from kmq import descriptors, refusals
from kmq.broker.admission import Room
from kmq.broker.incidents import Incidents, Strangers
from kmq.broker.stage import Stage, main
from kmq.broker.stats import ADMISSIONS
from kmq.errors import ConfigError, Stopped
from kmq.ingress.askers import Askers, most_askers
from kmq.ingress.deadlines import SWEEP_S, UNREAD, Deadlines
from kmq.ingress.hello import Refused
from kmq.ingress.hello import parse as parse_hello
from kmq.ingress.intake import Connection, Intake, Unread
from kmq.links.acks import AckReader
from kmq.links.fifo import FifoWriter, waiting_bytes
from kmq.links.raw import MAX_GROUP, Sender
from kmq.log.disk import replace_file, with_room
from kmq.settings import DRAIN_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ssl import SSLContext

    from kmq.broker.tls import Certificates
    from kmq.tokens import Tokens

_IDLE_S = 0.5  # longest wait: only the heartbeat needs it
_BACKLOG = 1024
# SO_LINGER: a producer's connection ends with a reset unless we close it in order. When we are killed the kernel closes it, and
# an end that looks like ours would tell a producer that waits for it that lines which we had not passed on are safe.
_BREAK, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_OWN_DESCRIPTORS = descriptors.OWN + 8  # not for connections: our own, and those to say no with
_TURNED_AWAY = 16  # connections that stay for a moment, so that they hear why they are not taken
_GRACE_S = 0.2  # when told to stop: how long connected producers may still send
_HANDOVER_S = DRAIN_S / 2  # and how long we take at most what they had sent before; the others have to drain after us
_FULL = 64 << 10  # bytes: where more than this waits in a socket, more may wait in the producer's kernel,
_BEHIND = 8 << 20  # which holds at most this much (tcp_wmem)
_ANSWER_S = 2.0  # and how long we wait for the replies to what was taken
_ROOM_S = 0.1  # while producers are refused: how often we look whether there is room again
_UNAUTHORIZED = refusals.reason(
    "unauthorized", "say: !hello acks=0|1|all token=<token>, with one that `kmq token new` has made"
)


def listen(stage: Stage, name: str, setting: str, host: str, port: int) -> socket.socket:
    """A listening socket; its port is also written to KMQ_PIPES/<name>.port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as err:
        raise ConfigError(
            f"{setting}={port}: cannot listen on {host}:{port}: {err.strerror};"
            f" stop what uses it or set {setting} (0: any free port)"
        ) from err
    server.listen(_BACKLOG)
    server.setblocking(False)
    path, text = f"{stage.settings.pipes}/{name}.port", b"%d\n" % server.getsockname()[1]

    def wait_for_room(path: str) -> None:
        if stage.stopping:
            raise Stopped("stopped before there was room to begin")
        stage.wait_for_room(path)

    with_room(path, wait_for_room, lambda: replace_file(path, text))
    return server


class Ingress:
    """The event loop. Two epolls: one holds the producers' sockets and is itself left out while the FIFO is full."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        settings = stage.settings
        self.lines = listen(stage, "ingress", "KMQ_PORT", settings.host, settings.port)
        self.questions = listen(stage, "ack", "KMQ_ACK_PORT", settings.host, settings.ack_port)
        self.doors: dict[int, tuple[socket.socket, SSLContext | None]] = {self.lines.fileno(): (self.lines, None)}
        self.certificates: Certificates | None = None
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            self._open_tls()
        self.fifo = FifoWriter(stage.raw, max(1, min(MAX_GROUP, settings.ring_slots // 4)))
        self.intake = Intake(self.fifo, settings.max_line, self._greet)
        self.tokens: Tokens | None = None
        if settings.tokens:
            self._ask_for_tokens()
        self.deadlines = Deadlines(settings.idle, settings.line_deadline)
        self.turned_away: list[socket.socket] = []  # since the last sweep
        self.told: list[socket.socket] = []  # before it, and closed by the next one
        self.incidents = Incidents(stage.log.warn)
        self.strangers = Strangers(stage.row, self.incidents)
        self.say_incidents = 0.0  # when they are said next
        self.unread = Unread()
        self.replies = AckReader(stage.acks)
        self.boot = time.time_ns()
        self.producers: dict[int, Connection] = {}
        self.acknowledged: dict[bytes, Connection] = {}  # by the name of their sender
        self.by_name: dict[bytes, Connection] = {}  # by producer=
        self.greeted = 0
        durability = stage.page.rows["durability"]
        self.room = Room(settings, lambda: durability.bytes)
        self.refusing = b""  # why nothing more is taken: code and reason
        self.poll = select.epoll()
        self.askers = Askers(
            self.poll, most_askers(stage.most_files), settings.line_deadline, stage.row, durability, self.strangers
        )
        self.askers.tokens = self.tokens
        self.most = min(settings.connections, max(1, stage.most_files - _OWN_DESCRIPTORS - self.askers.most))
        self.producer_poll = select.epoll()
        self.poll.register(stage.signalled, select.EPOLLIN)
        self.poll.register(self.questions, select.EPOLLIN)
        self.poll.register(stage.acks, select.EPOLLIN)
        self.poll.register(self.producer_poll, select.EPOLLIN)
        for fd in self.doors:
            self.producer_poll.register(fd, select.EPOLLIN)
        self.reading, self.clogged = True, False
        self.ready: deque[tuple[int, int]] = deque()  # producers with something to receive that have not had their turn

    def _open_tls(self) -> None:
        from kmq.broker import tls  # only where it is used: ssl costs a stage memory and start-up time

        settings = self.stage.settings
        self.certificates = tls.certificates(settings, self.stage.log, self.stage.row)
        assert self.certificates is not None
        server = listen(self.stage, "tls", "KMQ_TLS_PORT", settings.tls_host, settings.tls_port)
        self.doors[server.fileno()] = (server, self.certificates.context())
        self.stage.log.info("tls_ready", port=server.getsockname()[1])

    def _ask_for_tokens(self) -> None:
        from kmq.tokens import Tokens

        self.tokens = Tokens(self.stage.settings, self.stage.log.warn)
        self.intake.only_hello = _UNAUTHORIZED
        host = self.stage.settings.host
        if not (host.startswith("127.") or host in ("::1", "localhost")):
            self.stage.log.warn("tokens_in_clear", KMQ_HOST=host, effect="anyone on the way can read them; use TLS")

    def announce(self) -> None:
        """Tell the framer that a long line of our predecessor will not be finished."""
        boot = b"!b %d\n" % self.boot
        self.fifo.put(boot, 0, len(boot))

    def turn(self, timeout_s: float) -> bool:
        """Wait for something to do and do it; whether there was anything."""
        self._follow_disk()
        self._follow_fifo()
        if self.reading and not self.ready and time.monotonic() >= self.deadlines.due:
            self._sweep()
        if time.monotonic() >= self.say_incidents:
            self._sweep_askers()
        events = self.poll.poll(_ROOM_S if self.refusing else timeout_s)
        for fd, _ in events:
            if fd == self.producer_poll.fileno():
                self._serve_producers()
            elif fd == self.stage.raw:
                self.fifo.flush()
            elif fd == self.stage.acks:
                self._pass_replies()
            elif fd == self.questions.fileno():
                self._accept_asker()
            elif fd in self.askers:
                self.askers.serve(fd)
        for connection in self.unread.over_budget(self.producers.values()):
            self.stage.row.cut_off += 1
            self.incidents.note("replies_unread", connection.peer, f"{connection.counted} bytes")
            self._break(connection)
        row = self.stage.row
        row.bytes, row.refused, row.connections = self.intake.bytes, self.intake.refused, len(self.producers)
        return bool(events)

    def _follow_fifo(self) -> None:
        """Read producers exactly while the FIFO takes everything, or nothing may go there anyhow: whom we refuse is told."""
        clogged = self.fifo.clogged
        if clogged != self.clogged:
            self.clogged = clogged
            if clogged:
                self.poll.register(self.stage.raw, select.EPOLLOUT)
            else:
                self.poll.unregister(self.stage.raw)
        reading = not clogged or bool(self.refusing)
        if reading != self.reading:
            self.reading = reading
            if reading:
                self.poll.register(self.producer_poll, select.EPOLLIN)
            else:
                self.poll.unregister(self.producer_poll)

    def _follow_disk(self) -> None:
        """Refuse exactly while there is no room for more than what is on the way."""
        reason = self.room.refusal() or self.stage.page.rows["durability"].admission_name
        refusing = refusals.reason(reason).encode() if reason else b""
        if refusing == self.refusing:
            return
        before, self.refusing = self.refusing, refusing
        self.stage.row.admission = ADMISSIONS.index(reason)
        self.intake.expect_clogging(bool(reason))
        if reason:
            self.stage.log.warn("refusing", reason=reason, effect="acknowledged producers are told, others wait")
        else:
            self.stage.log.info("taking_again")
        for connection in self.producers.values():
            if connection.acks and not connection.refusing:
                connection.refusing = refusing
            elif connection.refusing == before and connection.taken == connection.passed:
                connection.refusing = refusing  # it has sent nothing meanwhile: no gap can pass
            self._listen_to(connection)

    def _listen_to(self, connection: Connection) -> None:
        """Wait for what can be acted on: more messages, room for replies, or neither."""
        wants = 0 if connection.ended or connection.is_choked else select.EPOLLIN
        if self.refusing and not connection.acks and not connection.fresh:
            wants = 0
        if connection.unsaid or (connection.tls is not None and connection.tls.wants_write):
            wants |= select.EPOLLOUT
        wants = wants or select.EPOLLET  # a hang-up is told whatever we ask for: once, not again and again
        if wants != connection.awaited:
            connection.awaited = wants
            self.producer_poll.modify(connection.sock, wants)

    def _serve_producers(self) -> None:
        """Everyone who has something gets one receive before anyone gets another, also when the FIFO clogs between."""
        if not self.ready:
            self.ready.extend(self.producer_poll.poll(0))
        while self.ready and (not self.fifo.clogged or self.refusing):
            fd, event = self.ready.popleft()
            if fd in self.producers:
                self._serve(self.producers[fd], event)
            elif fd in self.doors:
                self._accept_producers(*self.doors[fd])
            for connection in self.intake.over_budget(self.producers.values()):
                self.incidents.note("unfinished_line_cut", connection.peer, f"of {connection.length} bytes")
                self._drop_producer(connection)

    def _serve(self, connection: Connection, event: int) -> None:
        if connection.fresh and self.refusing and self.tokens is None and _is_plain(connection):
            connection.fresh = False  # its turn comes when there is room
            self._listen_to(connection)
            return
        if connection.ended and event & (select.EPOLLHUP | select.EPOLLERR):
            self._drop_producer(connection)  # has sent all and is gone: there is nobody to tell
            return
        if self.refusing and not connection.acks and not connection.fresh:
            return  # waits until there is room
        tls = connection.tls
        if not (connection.ended or connection.is_choked) and (
            not self.intake.receive(connection) or (tls is not None and tls.over)
        ):
            if tls is not None and tls.failure:
                self.incidents.note("tls_failed", connection.peer, tls.failure)
            if connection.refusing and connection.sender is None:
                self.strangers.refuse(connection.peer, "lines without a hello")
            self._end(connection)
        else:
            self._tell(connection)

    def _end(self, connection: Connection) -> None:
        """Nothing more will be received from it; it may still have replies to come."""
        self.intake.finish(connection)
        connection.ended = True
        self._tell(connection)

    def _sweep(self) -> None:
        """Cut off those who keep us waiting too long."""
        self.stage.row.unanswered = sum(c.taken - c.answered for c in self.acknowledged.values())
        for connection, why in self.deadlines.late(self.producers.values()).items():
            self.strangers.cut_off(connection.peer, why)
            if connection.ended or why == UNREAD:
                self._break(connection)  # does not take its replies
                continue
            if connection.fresh and connection.length:
                connection.unsaid += b"!err 0 bad_hello not finished within KMQ_LINE_DEADLINE\n"
            self._end(connection)
        for sock in self.told:
            sock.close()
        self.told, self.turned_away = self.turned_away, []

    def _tell(self, connection: Connection) -> None:
        """Hand over replies; end a connection that has sent all and been told all."""
        if not connection.say() or connection.is_done:
            self._drop_producer(connection)
            return
        self.unread.follow(connection)
        self._listen_to(connection)

    def _accept(self, door: socket.socket) -> Iterator[tuple[socket.socket, str]]:
        """Connections that wait, one after the other: each is taken or turned away before the next one costs a descriptor."""
        for _ in range(_BACKLOG):
            try:
                sock, address = door.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone again before we looked
            except OSError as err:  # out of descriptors: those we have go on
                self.incidents.note("accept_failed", "", err.strerror or str(err))
                self.stage.pause(0.05)
                return
            sock.setblocking(False)
            yield sock, f"{address[0]}:{address[1]}"

    def _accept_producers(self, door: socket.socket, context: "SSLContext | None") -> None:
        for sock, peer in self._accept(door):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BREAK)
            if len(self.producers) >= self.most:
                reason = f"{self.most} are open already (KMQ_CONNECTIONS, ulimit -n)"
                self.stage.row.turned_away += 1
                self.incidents.note("connection_refused", peer, reason)
                if context is None:  # over TLS that would take the handshake that the limit is to spare us
                    self._turn_away(sock, f"!err 0 connections {reason}\n".encode())
                else:
                    sock.close()
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is None:
                connection = Connection(sock, peer)
            else:
                from kmq.broker import tls

                secure = tls.accept(context, sock)
                if secure is None:
                    continue
                connection = Connection(secure, peer, secure)
            fd = connection.sock.fileno()
            self.producers[fd] = connection
            self.producer_poll.register(fd, select.EPOLLIN)

    def _turn_away(self, sock: socket.socket, why: bytes) -> None:
        """Say why, and break the connection, for an orderly end would say that its lines are in the FIFO.

        Not at once, where few wait: of a reset on the heels of its connection the producer would see nothing else.
        """
        with contextlib.suppress(OSError):
            sock.send(why)
        if len(self.turned_away) < _TURNED_AWAY:
            self.turned_away.append(sock)
        else:
            sock.close()

    def _greet(self, connection: Connection, line: bytes) -> None:
        """The hello of a connection: it gets a name for its replies. Raises Refused."""
        hello = parse_hello(line)
        if self.tokens is not None and not self.tokens.check(hello.token):
            self.strangers.refuse(connection.peer, "no valid token")
            raise Refused(_UNAUTHORIZED)
        if (self.stage.settings.policy_framed or self.stage.settings.policy) == "drop_oldest":
            raise Refused(refusals.reason("drop_oldest"))
        if self.refusing:
            raise Refused(self.refusing.decode())
        older = self.by_name.pop(hello.producer, None)
        if older is not None:
            self.incidents.note("fenced", older.peer, f"producer={hello.producer.decode()} by={connection.peer}")
            older.refusing = refusals.reason("fenced").encode()
            older.producer = b""
        if not (hello.acks or hello.tag):
            return  # goes on as if it had not said hello: what is refused becomes dead.malformed, for nobody would be told
        self.greeted += 1
        connection.acks, connection.producer, connection.asks_last = hello.acks, hello.producer, hello.asks_last
        connection.sender = Sender(b"%d.%d" % (self.boot, self.greeted), hello.tag)
        self.acknowledged[connection.sender.name] = connection
        if hello.producer:
            self.by_name[hello.producer] = connection

    def _pass_replies(self) -> None:
        """Replies from durability to the connections they are for."""
        told: dict[bytes, Connection] = {}
        for line in self.replies.take():
            name, _, rest = line.partition(b" ")
            connection = self.acknowledged.get(name)
            if connection is None:
                continue  # gone, or a predecessor's
            first, _, text = rest.partition(b" ")
            if connection.reply(int(first), text):
                told[name] = connection
            else:
                self.incidents.note("replies_lost", connection.peer, "the producer sends again")
                self._break(connection)
                told.pop(name, None)
        for connection in told.values():
            connection.say_refused()
            self._tell(connection)

    def _drop_producer(self, connection: Connection) -> None:
        if connection.refusing and not connection.acks:
            self._break(connection)  # an orderly end would say that its lines are in the FIFO
            return
        self._forget(connection)
        _close_in_order(connection)

    def _break(self, connection: Connection) -> None:
        """End a connection so that its producer sees that not all was answered."""
        self._forget(connection)
        connection.sock.close()

    def _forget(self, connection: Connection) -> None:
        self.intake.finish(connection)
        self.unread.forget(connection)
        fd = connection.sock.fileno()
        del self.producers[fd]
        self.producer_poll.unregister(fd)
        if connection.sender is not None:
            del self.acknowledged[connection.sender.name]
            if self.by_name.get(connection.producer) is connection:
                del self.by_name[connection.producer]

    def _accept_asker(self) -> None:
        for sock, peer in self._accept(self.questions):
            self.askers.take(sock, peer)

    def _sweep_askers(self) -> None:
        """Also while the FIFO is full: nobody on the ack port waits for it."""
        self.say_incidents = time.monotonic() + SWEEP_S
        self.askers.sweep()
        self.incidents.say()
        if self.certificates is not None:
            self.certificates.look()

    def close(self) -> None:
        """Stop accepting, take what connected producers have already sent, then let them go.

        A line that is unfinished then is not one: its producer sees the connection break and sends it again.
        """
        self.poll.unregister(self.stage.signalled)  # it has been heard; left in, every wait would end at once
        for door, context in self.doors.values():
            self._accept_producers(door, context)  # who is connected and has waited for that since the FIFO was full
            self.producer_poll.unregister(door)
            door.close()
        self.doors.clear()
        self.questions.close()
        self._take_over()
        until = time.monotonic() + _ANSWER_S
        while any(c.answered < c.taken or c.asks_last for c in self.acknowledged.values()) and time.monotonic() < until:
            self.turn(_GRACE_S / 4)
            self.stage.check()
        while self.fifo.clogged:  # before we let them go: an orderly end says that all of it is in the FIFO
            self.turn(_IDLE_S)
            self.stage.check()
        self.incidents.say()
        for connection in self.producers.values():
            if connection.length:
                connection.sock.close()
            else:
                _close_in_order(connection)
        self.producers.clear()

    def _take_over(self) -> None:
        """Take what producers had sent when we were told to stop: many of them have ended, and nobody would send it again.

        Of those that go on sending, no more than that.
        """
        waiting = [waiting_bytes(fd) for fd in self.producers]
        most = self.intake.bytes + sum(waiting) + sum(_BEHIND for nbytes in waiting if nbytes > _FULL)
        quiet, latest = time.monotonic() + _GRACE_S, time.monotonic() + _HANDOVER_S

        def is_sent_before() -> bool:
            return not self.refusing and self.intake.bytes < most and any(map(waiting_bytes, self.producers))

        while self.producers and (time.monotonic() < quiet or (is_sent_before() and time.monotonic() < latest)):
            self.turn(_GRACE_S / 4)
            self.stage.check()


def _is_plain(connection: Connection) -> bool:
    """Whether the first byte that has come, if any, is not that of a hello. Over TLS we cannot look without taking it."""
    if connection.tls is not None:
        return False
    with contextlib.suppress(OSError):
        return connection.sock.recv(1, socket.MSG_PEEK) not in (b"!", b"")
    return False


def _close_in_order(connection: Connection) -> None:
    """End a connection whose every whole line is in the FIFO."""
    if connection.tls is not None:
        connection.tls.say_end()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
    connection.sock.close()


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → ports → loop → drain."""
    settings = stage.settings
    os.makedirs(settings.pipes, exist_ok=True)
    owner = stage.own(f"{settings.pipes}/ingress.owner", f"FIFO {settings.pipes}/raw (ingress)")
    if settings.unused:  # one stage says it, for all
        stage.log.warn("setting_unused", names=",".join(settings.unused), effect="none: nobody listens there yet")
    ingress = Ingress(stage)
    ingress.announce()
    stage.ready(port=ingress.lines.getsockname()[1], ack_port=ingress.questions.getsockname()[1])
    while not stage.stopping:
        ingress.turn(_IDLE_S)
        stage.beat()
    stage.state("draining")
    ingress.close()
    owner.release()


if __name__ == "__main__":
    sys.exit(main("ingress", run))
