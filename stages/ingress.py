"""Ingress stage: takes lines from TCP and passes them, block by block, into the FIFO `raw`.

Links       in: TCP lines (KMQ_PORT), GET_ACK (KMQ_ACK_PORT)   out: FIFO `raw`
Owns        the ports, pipes/ingress.owner; it is the only writer of the FIFO's control lines.

Invariant   What is written to the FIFO is whole lines, each connection's in its order. Memory is bounded: while the FIFO
            is full no producer's socket is read (that is the backpressure), and unfinished lines are bounded (intake.py).
Crash       Lines not yet in the FIFO are unacknowledged, and their producers see the connection break. A long line of
            which only some pieces were written is forgotten by the framer when it sees the next start (`!b`).
"""

import contextlib
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import deque

from kmq.errors import ConfigError
from kmq.links.fifo import FifoWriter
from kmq.links.intake import Connection, Intake
from kmq.log.disk import replace_file
from kmq.stage import Stage, main

_IDLE_S = 0.5  # longest wait: only the heartbeat needs it
_BACKLOG = 1024
_MAX_QUESTION = 64  # bytes of a GET_ACK line
# SO_LINGER: a producer's connection ends with a reset unless we close it in order. When we are killed the kernel closes it, and
# an end that looks like ours would tell a producer that waits for it that lines which we had not passed on are safe.
_BREAK, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_GRACE_S = 0.2  # when told to stop: how long connected producers may still hand over what they have sent


def listen(stage: Stage, name: str, setting: str, port: int) -> socket.socket:
    """A listening socket; its port is also written to KMQ_PIPES/<name>.port."""
    settings = stage.settings
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((settings.host, port))
    except OSError as err:
        raise ConfigError(
            f"{setting}={port}: cannot listen on {settings.host}:{port}: {err.strerror};"
            f" stop what uses it or set {setting} (0: any free port)"
        ) from err
    server.listen(_BACKLOG)
    server.setblocking(False)
    replace_file(f"{settings.pipes}/{name}.port", b"%d\n" % server.getsockname()[1])
    return server


class Ingress:
    """The event loop. Two epolls: one holds the producers' sockets and is itself left out while the FIFO is full."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        settings = stage.settings
        self.lines = listen(stage, "ingress", "KMQ_PORT", settings.port)
        self.questions = listen(stage, "ack", "KMQ_ACK_PORT", settings.ack_port)
        self.fifo = FifoWriter(stage.raw)
        self.intake = Intake(self.fifo, settings.max_line)
        self.producers: dict[int, Connection] = {}
        self.askers: dict[int, tuple[socket.socket, bytearray]] = {}
        _raise_descriptor_limit()
        self.poll = select.epoll()
        self.producer_poll = select.epoll()
        self.poll.register(stage.signalled, select.EPOLLIN)
        self.poll.register(self.questions, select.EPOLLIN)
        self.poll.register(self.producer_poll, select.EPOLLIN)
        self.producer_poll.register(self.lines, select.EPOLLIN)
        self.reading = True
        self.ready: deque[int] = deque()  # producers with something to receive that have not had their turn

    def announce(self) -> None:
        """Tell the framer that a long line of our predecessor will not be finished."""
        boot = b"!b %d\n" % time.time_ns()
        self.fifo.put(boot, 0, len(boot))

    def turn(self, timeout_s: float) -> bool:
        """Wait for something to do and do it; whether there was anything."""
        self._follow_fifo()
        events = self.poll.poll(timeout_s)
        for fd, _ in events:
            if fd == self.producer_poll.fileno():
                self._serve_producers()
            elif fd == self.stage.raw:
                self.fifo.flush()
            elif fd == self.questions.fileno():
                self._accept_asker()
            elif fd in self.askers:
                self._answer(fd)
        row = self.stage.row
        row.bytes, row.refused, row.connections = self.intake.bytes, self.intake.refused, len(self.producers)
        return bool(events)

    def _follow_fifo(self) -> None:
        """Read producers exactly while the FIFO takes everything."""
        if self.fifo.clogged == self.reading:
            self.reading = not self.fifo.clogged
            if self.reading:
                self.poll.unregister(self.stage.raw)
                self.poll.register(self.producer_poll, select.EPOLLIN)
            else:
                self.poll.unregister(self.producer_poll)
                self.poll.register(self.stage.raw, select.EPOLLOUT)

    def _serve_producers(self) -> None:
        """Everyone who has something gets one receive before anyone gets another, also when the FIFO clogs between."""
        if not self.ready:
            self.ready.extend(fd for fd, _ in self.producer_poll.poll(0))
        while self.ready and not self.fifo.clogged:
            fd = self.ready.popleft()
            if fd == self.lines.fileno():
                self._accept_producer()
            elif fd in self.producers and not self.intake.receive(self.producers[fd]):
                self._drop_producer(fd)
            for connection in self.intake.over_budget(self.producers.values()):
                self.stage.log.warn("unfinished_line_cut", peer=connection.peer, bytes=connection.length)
                self._drop_producer(connection.sock.fileno())

    def _accept_producer(self) -> None:
        for sock, peer in _accept(self.lines, self.stage):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BREAK)
            connection = Connection(sock, f"{peer[0]}:{peer[1]}")
            self.producers[sock.fileno()] = connection
            self.producer_poll.register(sock, select.EPOLLIN)

    def _drop_producer(self, fd: int) -> None:
        connection = self.producers.pop(fd)
        self.producer_poll.unregister(fd)
        self.intake.finish(connection)
        _close_in_order(connection)

    def _accept_asker(self) -> None:
        for sock, _ in _accept(self.questions, self.stage):
            self.askers[sock.fileno()] = (sock, bytearray())
            self.poll.register(sock, select.EPOLLIN)

    def _answer(self, fd: int) -> None:
        """`GET_ACK <seq>` → ACK or PENDING, from durability's cursor in the stats page."""
        sock, waiting = self.askers[fd]
        with contextlib.suppress(OSError):  # gone, or reads no replies: nothing may follow half a reply
            data = sock.recv(4096)
            *questions, rest = bytes(waiting + data).split(b"\n")
            waiting[:] = rest
            if questions:
                durable = self.stage.page.rows["durability"].seq
                sock.sendall(b"".join(answer(question, durable) for question in questions))
            if data and len(rest) <= _MAX_QUESTION:
                return
        self.poll.unregister(fd)
        del self.askers[fd]
        sock.close()

    def close(self) -> None:
        """Stop accepting, take what connected producers have already sent, then let them go.

        A line that is unfinished then is not one: its producer sees the connection break and sends it again.
        """
        self.poll.unregister(self.stage.signalled)  # it has been heard; left in, every wait would end at once
        self.producer_poll.unregister(self.lines)
        self.lines.close()
        self.questions.close()
        until = time.monotonic() + _GRACE_S
        while self.producers and time.monotonic() < until:
            self.turn(_GRACE_S / 4)
            self.stage.check()
        while self.fifo.clogged:  # before we let them go: an orderly end says that all of it is in the FIFO
            self.turn(_IDLE_S)
            self.stage.check()
        for connection in self.producers.values():
            if connection.length:
                connection.sock.close()
            else:
                _close_in_order(connection)
        self.producers.clear()


def _close_in_order(connection: Connection) -> None:
    """End a connection whose every whole line is in the FIFO."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
    connection.sock.close()


def _raise_descriptor_limit() -> None:
    """One descriptor per producer: take as many as the system allows us."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def answer(question: bytes, durable_seq: int) -> bytes:
    """The reply to one line on the ack port."""
    verb, _, number = question.strip().partition(b" ")
    if verb != b"GET_ACK" or not number.isdigit():
        return b"ERR expected: GET_ACK <seq>\n"
    return b"ACK\n" if 0 < int(number) <= durable_seq else b"PENDING\n"


def _accept(server: socket.socket, stage: Stage) -> list[tuple[socket.socket, tuple[str, int]]]:
    """All connections that wait."""
    accepted: list[tuple[socket.socket, tuple[str, int]]] = []
    while True:
        try:
            sock, peer = server.accept()
        except BlockingIOError:
            return accepted
        except ConnectionError:
            continue  # gone again before we looked
        except OSError as err:
            stage.log.warn("accept_failed", reason=err.strerror)  # out of descriptors: those we have go on
            stage.pause(0.05)
            return accepted
        sock.setblocking(False)
        accepted.append((sock, peer))


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → ports → loop → drain."""
    settings = stage.settings
    os.makedirs(settings.pipes, exist_ok=True)
    owner = stage.own(f"{settings.pipes}/ingress.owner", f"FIFO {settings.pipes}/raw (ingress)")
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
