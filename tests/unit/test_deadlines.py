"""Who is cut off, and who is not: deadlines count only time in which a producer could have been heard."""

import select
import socket
import time
from math import inf

import pytest
from received_ends import Way
from stats_rows import row_of

from kmq.ingress.connection import ACKED, CLOSING, Connection
from kmq.ingress.limits import Deadlines
from kmq.ingress.receiving import Intake
from kmq.links.fifo import Sender, open_fifo
from kmq.links.received import Handover


@pytest.fixture
def intake(tmp_path):
    return Intake(Handover(open_fifo(str(tmp_path), "raw"), Way(4 << 20).writer), 1 << 20, row_of("ingress"))


@pytest.fixture
def connection():
    near, far = socket.socketpair()
    far.setblocking(False)
    yield near, Connection(far, "test")
    near.close()
    far.close()


def sweep(deadlines, connection, times=1):
    """What the last of so many sweeps says of it."""
    for _ in range(times):
        why = deadlines.late([connection]).get(connection)
    return why


def send(intake, connection, data):
    near, far = connection
    near.sendall(data)
    assert intake.receive(far)


def test_a_connection_that_sends_nothing_is_late_and_one_that_sends_is_not(intake, connection):
    deadlines = Deadlines(idle=3, line=inf)
    _, far = connection
    assert sweep(deadlines, far, 3) is None
    send(intake, connection, b"t|||\n")
    assert sweep(deadlines, far, 3) is None
    assert sweep(deadlines, far) == "idle"


def test_an_unfinished_line_is_late_and_one_that_is_finished_in_time_is_not(intake, connection):
    deadlines = Deadlines(idle=inf, line=3)
    _, far = connection
    for _ in range(5):  # never finished when looked at, and yet never late: it is another line each time
        send(intake, connection, b"\nt|||unfin")
        assert sweep(deadlines, far, 3) is None
    for _ in range(2):  # the same line, however many bytes of it come
        send(intake, connection, b"x")
        why = sweep(deadlines, far)
    assert why == "unfinished"


def test_a_finished_line_leaves_nothing_to_be_late(intake, connection):
    deadlines = Deadlines(idle=inf, line=3)
    _, far = connection
    send(intake, connection, b"t|||unfin")
    assert sweep(deadlines, far, 3) is None
    send(intake, connection, b"ished\n")
    assert sweep(deadlines, far, 20) is None
    send(intake, connection, b"t|||next")
    assert sweep(deadlines, far, 3) is None


def test_an_unfinished_hello_is_late(intake, connection):
    deadlines = Deadlines(idle=inf, line=2)
    send(intake, connection, b"!hello ac")
    assert sweep(deadlines, connection[1], 3) == "unfinished"


def test_a_handshake_is_late_until_it_is_done(connection):
    class Shaking:
        is_shaking = True

    deadlines = Deadlines(idle=inf, line=2)
    _, far = connection
    far.tls = Shaking()
    assert sweep(deadlines, far, 2) is None and sweep(deadlines, far) == "unfinished"
    Shaking.is_shaking = False
    assert sweep(deadlines, far, 9) is None
    far.length = 1  # a first line that begins now is as old as it is, not as the handshake
    assert sweep(deadlines, far, 2) is None


def test_a_producer_that_reads_no_replies_is_late(intake, connection):
    deadlines = Deadlines(idle=inf, line=2)
    _, far = connection
    far.phase = ACKED
    far.replies.pending += b"!err 1 fenced\n"
    assert sweep(deadlines, far, 3) == "reads no replies"
    far.was_active = True  # has taken some of them
    assert sweep(deadlines, far, 2) is None
    assert sweep(deadlines, far, 2) == "reads no replies"


def test_who_waits_for_us_is_not_late(intake, connection):
    deadlines = Deadlines(idle=2, line=2)
    _, far = connection
    far.sender, far.phase = Sender(b"1.1"), ACKED
    far.replies.taken = far.replies.passed = 5  # messages that have had no replies
    assert sweep(deadlines, far, 9) is None
    far.replies.answered = 5
    assert sweep(deadlines, far, 2) == "idle"
    far.was_active = True
    far.interest = select.EPOLLET  # no room: we do not read it, and only want to know of a hang-up
    far.length = 9
    assert sweep(deadlines, far, 9) is None


def test_who_takes_no_replies_is_late_and_who_takes_them_slowly_is_not(connection):
    deadlines = Deadlines(idle=2, line=inf)
    near, far = connection
    far.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    far.replies.pending += b"x" * (1 << 20)
    far.phase, far.interest = CLOSING, select.EPOLLOUT
    assert far.send_replies() and far.replies.pending
    for _ in range(5):
        assert near.recv(1 << 16)
        assert far.send_replies() and sweep(deadlines, far) is None
    assert sweep(deadlines, far, 3) == "idle"


def test_a_sweep_over_ten_thousand_connections_takes_few_milliseconds(connection):
    made = [Connection(connection[1].sock, "test") for _ in range(10_000)]
    deadlines = Deadlines(idle=60, line=60)
    took = []
    for _ in range(5):
        begin = time.process_time()
        assert not deadlines.late(made)
        took.append(time.process_time() - begin)
    assert min(took) < 0.005
