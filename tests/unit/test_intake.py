"""From the bytes of a connection to whole lines for the framer, however they are cut on the way."""

import contextlib
import random
import socket
from base64 import b64encode

import pytest
from framing_steps import one_by_one
from intake_wire import HELLO, MAX, greeted, read

from kmq.ingress import connection as connection_module
from kmq.ingress import limits, receiving
from kmq.ingress.connection import ACKED, CLOSING, GREETING, PLAIN, REFUSALS_BYTES, Connection
from kmq.message import record


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
    """The framer's staging area ends at its last byte that is not NUL. The lines themselves are not in the FIFO."""
    near, connection = wire.connect()
    wire.send(near, connection, b"a|||\n\0\nb|||\0\0\n\0")
    wire.finish(near, connection)
    assert b"\0" not in wire.text and len(wire.lines) == 4
    assert b"a|||" not in wire.text and wire.text.count(b"!r ") == wire.text.count(b"\n")


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
def test_a_first_line_with_a_bang_that_is_no_hello_is_refused_and_no_message(wire, line, step):
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
    monkeypatch.setattr(receiving, "PARTIAL_BYTES", 10 * MAX)
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
    monkeypatch.setattr(receiving, "PARTIAL_BYTES", 10 * MAX)
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


# --- the acknowledged protocol -----------------------------------------------------------------------------------------


def answers(wire):
    """What the framer makes of it: (stored lines, {(connection, n): reply})."""
    return wire.lines, one_by_one(wire.steps.replies)


SENT_WITH_ACKS = [
    (b"t|1|7|x\nt|1|8|y\n", [b"7", b"8"], [b"ack 1", b"ack 2"]),
    (b"t|1|7|x\r\n", [b"7"], [b"ack 1"]),
    (b"t|1|7|x\n\nt|1|8|y\n", [b"7", b"8"], [b"ack 1", b"err empty_line", b"ack 2"]),
    (b"\n\n", [], [b"err empty_line", b"err empty_line"]),
    (b"t|1|7|\0\nt|1|8|y\n", [b"8"], [b"err nul", b"ack 1"]),
    (b"t|1|7|x\n!hello acks=1\nt|1|8|y\n", [b"7", b"8"], [b"ack 1", b"err control_byte", b"ack 2"]),
    (b"+x\n-y\n!e nul\n!c 1.1 1 1\n", [], [b"err control_byte"] * 4),
    (b"no separator\nt|1|7|x\n", [b"7"], [b"err no_separator", b"ack 1"]),
    (b"t|1|7|x\nt|1|7|x\n", [b"7"], [b"ack 1", b"dup 1"]),
    (
        b"".join(b"t|1|%d|x\n" % n for n in range(17)),
        [b"%d" % n for n in range(17)],
        [b"ack %d" % n for n in range(1, 18)],
    ),
    (b"t|1|7|" + b"x" * 5000 + b"\nt|1|8|y\n", [b"7", b"8"], [b"ack 1", b"ack 2"]),
    (b"t|1|7|" + b"x" * (MAX - 6) + b"\n", [b"7"], [b"ack 1"]),
    (b"t|1|7|" + b"x" * (MAX - 5) + b"\nt|1|8|y\n", [b"8"], [b"err too_long", b"ack 1"]),
    (b"t|1|7|" + b"x" * 50_000 + b"\nt|1|8|y\n", [b"8"], [b"err too_long", b"ack 1"]),
    (b"t|1|7|x\nt|1|8|never ended", [b"7"], [b"ack 1"]),
    (b"x" * 50_000, [], []),
    (b"", [], []),
]


@pytest.mark.parametrize(("sent", "ids", "replies"), SENT_WITH_ACKS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_each_line_after_the_hello_is_numbered_and_answered_however_it_arrives(wire, sent, ids, replies, step):
    sent = HELLO + sent
    if step == 1 and len(sent) > 500:
        step = len(sent) // 500
    near, connection = wire.connect()
    for at in range(0, len(sent), step):
        wire.send(near, connection, sent[at : at + step])
    assert read(near) == b"!ok max_line=%d\n" % MAX
    wire.finish(near, connection)
    lines, said = answers(wire)
    assert [line.split(b"|")[2] for line in lines] == [id + b";p=me" for id in ids]
    assert said == {(b"1.1", n): reply for n, reply in enumerate(replies, start=1)}
    is_unfinished = not sent.endswith(b"\n")  # that line is refused by ingress itself
    assert connection.replies.passed == len(replies) == connection.replies.taken - is_unfinished
    assert (b"the connection ended before the line did" in connection.replies.refusal) == is_unfinished


def test_messages_of_plain_and_acknowledged_connections_stay_apart(wire):
    """Each has its own numbers, whoever else sends between."""
    rng = random.Random(3)
    open_connections = [greeted(wire, b"!hello acks=1 producer=p%d\n" % n) for n in range(4)]
    plain = wire.connect()
    count = [0] * 4
    for turn in range(300):
        n = rng.randrange(5)
        if n == 4:
            wire.send(*plain, b"u|1|%d|x\n" % turn)
        else:
            more = rng.randrange(1, 9)
            text = b"".join(b"t|1|%d|x\n" % (count[n] + k) for k in range(more))
            wire.send(*open_connections[n], text)
            count[n] += more
    _, said = answers(wire)
    for n in range(4):
        mine = {number for conn, number in said if conn == b"1.%d" % (n + 1)}
        assert mine == set(range(1, count[n] + 1)) and open_connections[n][1].sender.sent == count[n]
    assert {reply.split()[0] for reply in said.values()} == {b"ack"} and len(said) == sum(count)
    for each in (plain, *open_connections):
        wire.finish(*each)


def test_an_endless_hello_is_refused_at_its_limit_and_a_cut_hello_is_no_message(wire):
    near, connection = wire.connect()
    for _ in range(4):
        wire.send(near, connection, b"!" + b"x" * 1000)
    near.sendall(b"x" * 1000)
    assert not wire.receive(connection) and near.recv(100).startswith(b"!err 0 bad_hello longer than 4096 bytes")
    wire.finish(near, connection)
    near, connection = wire.connect()
    wire.send(near, connection, b"!hello acks=1 token=secret")
    wire.finish(near, connection)
    assert wire.text == b"" and wire.intake.partial_bytes == 0


def test_replies_go_to_the_producer_in_order_and_those_said_again_are_passed_over(wire):
    near, connection = greeted(wire)
    wire.send(near, connection, b"".join(b"t|1|%d|x\n" % n for n in range(1, 6)))
    for first, text in ((1, b"!ack 2 102"), (1, b"!ack 2 102"), (3, b"!dup 3 7"), (1, b"!ack 2 102"), (3, b"!dup 3 7")):
        assert connection.replies.reply(first, text)
    assert connection.replies.reply(4, b"!err 4 bad_id") and connection.replies.reply(5, b"!ack 5 103")
    assert connection.send_replies() and read(near) == b"!ack 2 102\n!dup 3 7\n!err 4 bad_id\n!ack 5 103\n"
    assert connection.replies.answered == connection.replies.taken == 5
    wire.finish(near, connection)


def test_a_hole_in_the_replies_is_seen(wire):
    near, connection = greeted(wire)
    wire.send(near, connection, b"t|1|1|x\n" * 5)
    assert connection.replies.reply(1, b"!ack 1 101")
    assert not connection.replies.reply(3, b"!ack 4 103")
    connection.send_replies()
    assert read(near) == b"!ack 1 101\n" and connection.replies.answered == 1
    wire.finish(near, connection)


def test_who_asks_for_its_last_id_is_told_that_first_and_once(wire):
    """The question goes to the framer in its place: behind what older connections of this name have sent."""
    near, connection = greeted(wire, HELLO.replace(b"\n", b" last=?\n") + b"t|1|5|x\n")
    assert wire.text.startswith(b"!l %b 0 p=me\n!c %b 1 1 " % (connection.sender.name, connection.sender.name))
    assert wire.steps.replies == [b"1.1 0 !last 0", b"1.1 1 !ack 1 1"]
    assert connection.replies.questions and not connection.replies.reply(1, b"!ack 1 101")  # it was lost on the way
    connection.replies.refusal = b"fenced a newer one"
    wire.send(near, connection, b"t|1|6|x\n")
    assert read(near) == b"" and not connection.is_done
    assert all(connection.replies.reply(0, b"!last 4") for _ in range(2))
    assert connection.replies.reply(1, b"!ack 1 101")
    connection.replies.write_refusals()
    assert connection.send_replies() and read(near) == b"!last 4\n!ack 1 101\n!err 2 fenced a newer one\n"
    near.close()
    assert not wire.receive(connection)
    connection.phase = CLOSING
    assert connection.is_done
    wire.finish(near, connection)


def test_with_acks_0_replies_are_counted_and_not_said(wire):
    near, connection = greeted(wire, b"!hello acks=0 producer=me\n")
    wire.send(near, connection, b"t|1|1|x\nt|1|2|x\n")
    assert connection.replies.reply(1, b"!ack 2 102") and connection.replies.answered == 2
    connection.replies.refusal = b"busy later"
    wire.send(near, connection, b"t|1|3|x\n")
    assert (
        connection.send_replies() and read(near) == b"" and connection.replies.answered == connection.replies.taken == 3
    )
    wire.finish(near, connection)


def test_what_is_refused_is_told_behind_what_was_taken_and_stores_nothing(wire):
    near, connection = greeted(wire)
    wire.send(near, connection, b"t|1|1|x\nt|1|2|x\n")
    taken = wire.text
    connection.replies.refusal = b"disk_full no room"
    wire.send(near, connection, b"t|1|3|x\n\nt|1|4|x\n")
    wire.send(near, connection, b"t|1|5|" + b"x" * 9000 + b"\n")
    connection.send_replies()
    assert read(near) == b"" and wire.text == taken  # the first two are still on their way
    connection.replies.reply(1, b"!ack 1 101")
    connection.replies.write_refusals()
    connection.replies.reply(2, b"!ack 2 102")
    connection.replies.write_refusals()
    connection.send_replies()
    refused = b"".join(b"!err %d disk_full no room\n" % n for n in range(3, 7))
    assert read(near) == b"!ack 1 101\n!ack 2 102\n" + refused
    wire.send(near, connection, b"t|1|6|x\n")
    connection.send_replies()
    assert read(near) == b"!err 7 disk_full no room\n" and wire.text == taken
    assert connection.replies.answered == connection.replies.taken == 7 and connection.replies.passed == 2
    wire.finish(near, connection)


def test_refusals_are_made_as_fast_as_they_are_read_and_all_of_them(wire):
    near, connection = greeted(wire)
    connection.replies.refusal = b"fenced by another"
    wire.send(near, connection, b"\n" * 100_000)
    while connection.replies.taken < 100_000:
        assert wire.receive(connection)
    told, most = b"", 0
    while connection.replies.answered < connection.replies.taken or connection.replies.pending:
        assert connection.send_replies()
        most = max(most, len(connection.replies.pending))
        told += near.recv(1 << 16)
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while data := near.recv(1 << 16):
            told += data
    assert told == b"".join(b"!err %d fenced by another\n" % n for n in range(1, 100_001))
    assert most < REFUSALS_BYTES + 100
    wire.finish(near, connection)


def test_the_connection_with_the_most_unread_replies_is_broken_when_all_take_much(wire, monkeypatch):
    monkeypatch.setattr(limits, "UNREAD_BYTES", 1000)
    unread, wires = limits.UnreadBudget(), [wire.connect() for _ in range(3)]
    connections = [connection for _, connection in wires]
    for connection, size in zip(connections, (300, 500, 200), strict=True):
        connection.replies.pending += b"x" * size
        unread.follow(connection)
    assert unread.exceeded_by(connections) == []
    connections[2].replies.pending += b"x"
    unread.follow(connections[2])
    assert unread.exceeded_by(connections) == [connections[1]]
    unread.forget(connections[1])
    assert unread.bytes == 501 and unread.exceeded_by(connections) == []
    for near, connection in wires:
        connection.sock.close()
        near.close()


def test_a_producer_that_has_too_much_on_the_way_or_reads_no_replies_is_not_read(wire, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_UNANSWERED", 10)
    monkeypatch.setattr(connection_module, "MAX_PENDING", 1000)
    near, connection = greeted(wire)
    wire.send(near, connection, b"t|1|1|x\n" * 10)
    assert connection.may_receive(b"")
    wire.send(near, connection, b"t|1|1|x\n")
    assert not connection.may_receive(b"")
    connection.replies.reply(1, b"!ack 1 101")
    assert connection.may_receive(b"")
    connection.replies.pending += b"x" * 1000
    assert not connection.may_receive(b"")
    assert connection.send_replies() and connection.may_receive(b"")
    wire.finish(near, connection)


def test_a_connection_that_has_sent_all_is_done_when_it_has_been_told_all(wire):
    near, connection = greeted(wire)
    wire.send(near, connection, b"t|1|1|x\nt|1|2|x\nt|1|3|cut off")
    near.shutdown(socket.SHUT_WR)
    assert not wire.receive(connection)
    wire.intake.finish(connection)
    connection.phase = CLOSING
    assert not connection.is_done
    connection.replies.reply(1, b"!ack 2 102")
    assert not connection.is_done
    assert connection.send_replies() and connection.is_done
    wire.finish(near, connection)


def test_a_producer_that_is_gone_cannot_be_told(wire):
    near, connection = greeted(wire)
    wire.send(near, connection, b"t|1|1|x\n")
    near.close()
    connection.replies.reply(1, b"!ack 1 101")
    assert not connection.send_replies()
    connection.sock.close()


def test_where_a_hello_is_asked_for_other_lines_are_refused_and_stored_nowhere(wire):
    wire.intake.hello_required = b"unauthorized say hello with a token"
    near, connection = wire.connect()
    near.sendall(b"t|1|1|x\n")
    assert not wire.receive(connection)
    connection.send_replies()
    assert near.recv(100) == b"!err 0 unauthorized say hello with a token\n"
    assert wire.text == b""
    connection.sock.close()
    near.close()
    wire.finish(*greeted(wire))


# --- what may be received ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "while_accepted", "while_refused"),
    [(GREETING, True, True), (PLAIN, True, False), (ACKED, True, True), (CLOSING, False, False)],
)
def test_what_may_be_received_depends_on_the_phase_and_on_the_admission(wire, phase, while_accepted, while_refused):
    _, connection = wire.connect()
    connection.phase = phase
    assert connection.may_receive(b"") is while_accepted
    assert connection.may_receive(b"disk_full no room") is while_refused


@pytest.mark.parametrize(
    ("acks", "refusal", "taken", "passed", "then"),
    [
        (True, b"", 5, 5, b"quota"),  # the next message is the first that is refused
        (False, b"", 0, 0, b"quota"),
        (True, b"fenced", 5, 5, b"fenced"),
        (True, b"disk_full", 5, 5, b"quota"),
        (True, b"disk_full", 6, 5, b"disk_full"),  # one was refused, so all behind it are
        (False, b"disk_full", 0, 0, b"quota"),
    ],
)
def test_a_change_of_the_admission_reaches_connections_without_refused_messages(
    wire, acks, refusal, taken, passed, then
):
    replies = wire.connect()[1].replies
    replies.acks, replies.refusal, replies.taken, replies.passed = acks, refusal, taken, passed
    replies.follow(b"disk_full" if refusal else b"", b"quota")
    assert replies.refusal == then


# --- HTTP and TLS on a port of lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    "sent",
    [
        b"POST /x?a=b|c HTTP/1.1\r\nHost: 127.0.0.1:5673\r\nCookie: a=b\r\n\r\nt|||forged\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"x" * 6000 + b" HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x0a\x01\x00\x00t|||\n",
    ],
    ids=lambda sent: sent[:6].decode(errors="replace"),
)
def test_a_connection_that_begins_with_http_or_tls_ends_and_nothing_of_it_is_stored(wire, sent, step):
    near, connection = wire.connect()
    for at in range(0, len(sent), step):
        near.sendall(sent[at : at + step])
        if not wire.receive(connection):
            break
    else:
        raise AssertionError("it goes on")
    is_tls = sent.startswith(b"\x16")
    assert connection.speaks == ("TLS" if is_tls else "HTTP")
    assert connection.replies.pending.startswith(b"\x15\x03" if is_tls else b"HTTP/1.1 400 Bad Request\r\n")
    wire.finish(near, connection)
    assert wire.lines == []


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize(
    "line",
    [b"GET|1|2|x", b"POST|||/ HTTP/1.1\r", b"GET", b"HEAD.key|||x", b"PATCH.a b|||", b"GET / HTTP/1.1", b"DELETE x\r"],
)
def test_a_line_that_only_begins_like_http_is_a_line(wire, line, step):
    near, connection = wire.connect()
    sent = line + b"\nu|||\n"
    for at in range(0, len(sent), step):
        wire.send(near, connection, sent[at : at + step])
    wire.send(near, connection, b"POST / HTTP/1.1\r\n")  # not the first line
    wire.finish(near, connection)
    assert len(wire.lines) == 3 and wire.lines[1] == b"u|||"
