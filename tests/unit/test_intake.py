"""From the bytes of a connection to whole lines in the FIFO, however they are cut on the way."""

import os
import random
import socket
from base64 import b64encode

import pytest
from test_fifo_writer import read_all
from test_framing import frame

from kmq import record
from kmq.links import hello
from kmq.links import intake as intake_module
from kmq.links.fifo import FifoWriter, Sender, open_fifo
from kmq.links.intake import Connection, Intake

MAX = 8192


class Wire:
    """An Intake with its FIFO, and connections to it."""

    def __init__(self, directory):
        self.raw = open_fifo(str(directory), "raw")
        self.fifo = FifoWriter(self.raw, max_group=5)
        self.intake = Intake(self.fifo, MAX, self.greet)
        self.text = b""
        self.greeted = 0

    def greet(self, connection, line):
        said = hello.parse(line)
        self.greeted += 1
        connection.acks, connection.producer = said.acks, said.producer
        connection.sender = Sender(b"1.%d" % self.greeted, said.tag)

    def connect(self):
        near, far = socket.socketpair()
        far.setblocking(False)
        return near, Connection(far, "test")

    def receive(self, connection):
        alive = self.intake.receive(connection)
        self.drain()
        return alive

    def drain(self):
        self.text += read_all(self.raw)
        while self.fifo.clogged:
            self.fifo.flush()
            self.text += read_all(self.raw)

    def send(self, near, connection, data):
        near.sendall(data)
        assert self.receive(connection)

    def finish(self, near, connection):
        near.close()
        while self.receive(connection):
            pass
        self.intake.finish(connection)
        connection.sock.close()
        self.drain()

    @property
    def lines(self):
        """What the framer makes of it."""
        return frame(self.text)[0] if self.text else []


@pytest.fixture
def wire(tmp_path):
    made = Wire(tmp_path)
    yield made
    os.close(made.raw)


def refused(reason, original, length=None):
    return record.malformed(reason, original, len(original) if length is None else length, MAX)


@pytest.mark.parametrize(
    ("sent", "lines"),
    [
        (b"", []),
        (b"t|1|2|x\n", [b"t|1|2|x"]),
        (b"t|1|2|x\r\n", [b"t|1|2|x\r"]),
        (b"t|x\n\nu|y\n", [b"t|x||", refused("empty_line", b""), b"u|y||"]),
        (b"t|1|2|no newline", [refused("no_newline", b"t|1|2|no newline")]),
        (b"a|||\nt\0", [b"a|||", refused("no_newline", b"t\0")]),
        (b"t|1|2|\0\nu|||\n", [refused("nul", b"t|1|2|\0"), b"u|||"]),
        (b"t|||\n!b 1\nt|||\n", [b"t|||", refused("control_byte", b"!b 1"), b"t|||"]),
        (b"t|||\n+x\n-y\nu|||\n", [b"t|||", refused("control_byte", b"+x"), refused("control_byte", b"-y"), b"u|||"]),
        (b"x!|+|-|!\n", [refused("bad_topic", b"x!|+|-|!")]),
        (b"t|||" + b"x" * 5000 + b"\n", [b"t|||" + b"x" * 5000]),
        (b"t|||" + b"x" * (MAX - 4) + b"\n", [b"t|||" + b"x" * (MAX - 4)]),
        (b"t|||" + b"x" * (MAX - 3) + b"\nu|||\n", [refused("too_long", b"t|||" + b"x" * (MAX - 3)), b"u|||"]),
        (b"t|||" + b"x" * 50_000 + b"\n", [refused("too_long", b"t|||" + b"x" * MAX, 50_004)]),
        (b"x" * 50_000, [refused("too_long", b"x" * MAX, 50_000)]),
        (b"t|||\n" + b"!" * 50_000 + b"\nu|||\n", [b"t|||", refused("too_long", b"!" * MAX, 50_000), b"u|||"]),
        (b"+" + b"x" * 5000 + b"\n", [refused("control_byte", b"+" + b"x" * 5000)]),
        (b"\0" * 50_000 + b"\n", [refused("too_long", b"\0" * (MAX + 1), 50_000)]),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_bytes_become_lines_however_they_arrive(wire, sent, lines, step):
    if step == 1:
        step = max(1, len(sent) // 500)
    near, connection = wire.connect()
    for at in range(0, len(sent), step):
        wire.send(near, connection, sent[at : at + step])
    wire.finish(near, connection)
    assert wire.lines == lines


def test_what_has_a_nul_is_kept_as_base64(wire):
    near, connection = wire.connect()
    wire.send(near, connection, b"t|1|2|\0\xff\n")
    assert wire.lines == [b"dead.malformed||;reason=nul;len=8;enc=b64|" + b64encode(b"t|1|2|\0\xff")]
    wire.finish(near, connection)


def test_no_byte_in_the_fifo_is_a_nul(wire):
    """The framer's staging area ends at its last byte that is not NUL."""
    near, connection = wire.connect()
    wire.send(near, connection, b"a|||\n\0\nb|||\0\0\n\0")
    wire.finish(near, connection)
    assert b"\0" not in wire.text and len(wire.lines) == 4


def test_lines_of_many_connections_stay_in_order_and_apart(wire):
    rng = random.Random(12)
    streams = []
    for n in range(12):
        lines = [b"c%d.k|1|%d|%b" % (n, i, b"x" * rng.choice([0, 20, 3000, 4090, 6000])) for i in range(40)]
        streams.append([*wire.connect(), b"".join(line + b"\n" for line in lines), lines])
    waiting = {n: data for n, (_, _, data, _) in enumerate(streams)}
    while waiting:
        n = rng.choice(list(waiting))
        step = rng.choice([1, 100, 5000])
        near, connection = streams[n][:2]
        wire.send(near, connection, waiting[n][:step])
        waiting[n] = waiting[n][step:]
        if not waiting[n]:
            del waiting[n]
            wire.finish(near, connection)
    for n, (*_, lines) in enumerate(streams):
        assert [line for line in wire.lines if line.startswith(b"c%d." % n)] == lines
    assert len(wire.lines) == 12 * 40


@pytest.mark.parametrize(
    "line",
    [b"!", b"!b 1", b"!c 1.1 1 1", b"!hello", b"!hello acks=2", b"!hello acks=1 me", b"!helo acks=1", b"!" * 4097],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_a_first_line_that_begins_with_a_bang_and_is_no_hello_is_refused_and_no_message(wire, line, step):
    near, connection = wire.connect()
    if step == 1:
        step = max(1, len(line) // 100)
    sent = line + b"\nt|||x\n"
    for at in range(0, len(sent), step):
        near.sendall(sent[at : at + step])
        if not wire.receive(connection):
            break
    else:
        pytest.fail("it was taken")
    assert near.recv(1000).startswith(b"!err 0 bad_hello ")
    wire.finish(near, connection)
    assert wire.lines == [] and connection.sender is None


def test_a_connection_that_breaks_is_over_and_its_rest_is_kept(wire):
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    connection = Connection(far, "test")
    near.sendall(b"t|||unfinished")
    assert wire.receive(connection)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    near.close()  # a reset
    assert not wire.receive(connection)
    wire.intake.finish(connection)
    wire.drain()
    assert wire.lines == [refused("no_newline", b"t|||unfinished")]
    far.close()
    server.close()


def test_an_unfinished_line_keeps_no_more_than_the_limit(wire):
    near, connection = wire.connect()
    for _ in range(100):
        wire.send(near, connection, b"x" * 4000)
    assert len(connection.partial) == MAX + 1 and connection.length == 400_000
    wire.send(near, connection, b"\nt|||\n")
    assert wire.lines == [refused("too_long", b"x" * MAX, 400_000), b"t|||"]
    wire.finish(near, connection)


def test_unfinished_lines_together_stay_within_their_budget(wire, monkeypatch):
    monkeypatch.setattr(intake_module, "PARTIAL_BYTES", 10 * MAX)
    open_connections = []
    for n in range(40):
        near, connection = wire.connect()
        near.sendall(b"x" * (MAX - 100 + n))
        assert wire.receive(connection)
        open_connections.append(connection)
        for over in wire.intake.over_budget(open_connections):
            wire.intake.finish(over)
            open_connections.remove(over)
            over.sock.close()
        near.close()
        assert sum(len(c.partial) for c in open_connections) <= 10 * MAX
    wire.drain()
    assert len(wire.lines) == 40 - len(open_connections)
    assert all(b"reason=no_newline" in line for line in wire.lines)
    for connection in open_connections:
        connection.sock.close()


def test_a_thousand_unfinished_lines_at_once_are_cut_back_to_the_budget(wire, monkeypatch):
    """They may all arrive between two looks at the budget."""
    monkeypatch.setattr(intake_module, "PARTIAL_BYTES", 10 * MAX)
    open_connections = []
    for _ in range(60):
        near, connection = wire.connect()
        near.sendall(b"x" * MAX)
        assert wire.receive(connection)
        near.close()
        open_connections.append(connection)
    over = wire.intake.over_budget(open_connections)
    for connection in over:
        wire.intake.finish(connection)
    assert sum(len(c.partial) for c in open_connections) <= 10 * MAX
    assert len(over) == 50
    for connection in open_connections:
        connection.sock.close()
