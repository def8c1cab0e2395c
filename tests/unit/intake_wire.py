"""Connections to an Intake with its ring and FIFO, and a framer that reads both."""

import os
import socket
from pathlib import Path

from fifo_reading import read_all
from framing_steps import Steps, table
from received_ends import Way
from stats_rows import row_of

from kmq.ingress import hello
from kmq.ingress.connection import ACKED, PLAIN, Connection
from kmq.ingress.receiving import Intake
from kmq.links.fifo import Sender, open_fifo
from kmq.links.received import Handover

MAX = 8192
HELLO = b"!hello acks=1 producer=me\n"


class Wire:
    """An Intake with its ring and FIFO, connections to it, and a framer that reads both."""

    def __init__(self, directory: Path, ring_bytes: int = 1 << 16) -> None:
        self.raw = open_fifo(str(directory), "raw")
        self.way = Way(ring_bytes)
        self.handover = Handover(self.raw, self.way.writer)
        self.intake = Intake(self.handover, MAX, row_of("ingress"), self.greet)
        self.steps = Steps(table(), max_line=MAX, way=self.way)
        self.text = b""  # of the FIFO
        self.greeted = 0
        self.sockets: list[socket.socket] = []

    def greet(self, connection: Connection, line: bytes) -> bytes:
        said = hello.parse(line)
        self.greeted += 1
        connection.producer = said.producer
        connection.replies.expect(said)
        connection.phase = ACKED if said.acks else PLAIN
        connection.sender = Sender(b"1.%d" % self.greeted, said.tag, said.reserved)
        return b""

    def connect(self) -> tuple[socket.socket, Connection]:
        near, far = socket.socketpair()
        self.sockets += near, far
        far.setblocking(False)
        return near, Connection(far, "test")

    def receive(self, connection: Connection) -> bool:
        alive = self.intake.receive(connection)
        self.drain()
        return alive

    def drain(self) -> None:
        self.handover.flush()
        self._frame()
        while self.handover.clogged:
            self.handover.flush()
            self._frame()

    def _frame(self) -> None:
        text = read_all(self.raw)
        self.text += text
        self.steps.read(text)

    def send(self, near: socket.socket, connection: Connection, data: bytes) -> None:
        near.sendall(data)
        assert self.receive(connection)

    def finish(self, near: socket.socket, connection: Connection) -> None:
        near.close()
        while self.receive(connection):
            pass
        self.intake.finish(connection)
        connection.sock.close()
        self.drain()

    @property
    def lines(self) -> list[bytes]:
        """What the framer makes of it."""
        assert not self.steps.waiting
        return self.steps.lines

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        os.close(self.raw)


def greeted(wire: Wire, said: bytes = HELLO) -> tuple[socket.socket, Connection]:
    """A connection that has said hello, and been told so."""
    near, connection = wire.connect()
    near.sendall(said)
    assert wire.receive(connection)
    assert near.recv(100) == b"!ok max_line=%d\n" % MAX
    return near, connection


def read(near: socket.socket) -> bytes:
    near.setblocking(False)
    try:
        return near.recv(1 << 20)
    except BlockingIOError:
        return b""
