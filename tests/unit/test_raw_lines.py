"""What an intake makes of raw lines: each a message of its topic, whatever bytes it has and however they are cut."""

import json
import os
import random
import socket
from base64 import b64decode

import pytest
from fifo_reading import read_all
from framing_steps import Steps, table
from received_ends import Way
from stats_rows import row_of

from kmq.config.intakes import IntakePort, is_among, parse_intakes, parse_sources
from kmq.gateway.http import messages
from kmq.ingress import intakes, receiving
from kmq.ingress.connection import Connection
from kmq.ingress.intakes import RawPort
from kmq.ingress.receiving import Intake
from kmq.links.fifo import open_fifo
from kmq.links.received import Handover
from kmq.message import record
from kmq.message.message import Message

MAX = 8192
NASTY = [
    b"!hello acks=1",
    b"!r 1 2 3",
    b"!c 1.1 1 1 1 0 9",
    b"+12",
    b"-12",
    b"other|1|2|3",
    b"other.@3.key|||x",
    b"|||",
    b"app|||",
    b"__kmq|||x",
    b"x;p=till|7|8;w=y|z",
    b"a line\r",
    b"\r",
    b"\xff\xfe\x80 is no UTF-8 \xc3",
    b"\0",
    b"a NUL\0in the middle\r",
    b"",
    b"",
    b"   ",
    b"x" * (MAX // 2),
]


class Shipper:
    """A connection to an intake, and the framer behind it."""

    def __init__(self, directory, topic="app", is_json=False, max_line=MAX):
        self.raw_fd, self.way = open_fifo(str(directory), "raw"), Way(1 << 20)
        self.handover = Handover(self.raw_fd, self.way.writer)
        self.intake = Intake(self.handover, max_line, row_of("ingress"), hello_required=b"unauthorized")
        self.steps = Steps(table(), max_line=max_line, way=self.way)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.raw = RawPort(IntakePort(0, "tcp", topic, is_json), max_line, sock)
        self.near, far = socket.socketpair()
        far.setblocking(False)
        self.connection = Connection(far, "test", None, self.raw)

    def send(self, data):
        """Send it all, in receives as they come."""
        view = memoryview(data)
        while view:
            view = view[self.near.send(view[:MAX]) :]
            self.receive()
        self.receive()

    def receive(self):
        alive = self.intake.receive(self.connection)
        while True:
            self.handover.flush()
            self.steps.read(read_all(self.raw_fd))
            if not self.handover.clogged:
                return alive

    def end(self):
        self.near.close()
        while self.receive():
            pass
        self.intake.finish(self.connection)
        self.connection.sock.close()
        self.handover.flush()
        self.steps.read(read_all(self.raw_fd))

    @property
    def messages(self):
        """(routing key, headers, payload as a reader has it) of each message."""
        found = []
        for line in self.steps.lines:
            key, _, id, payload = line.split(b"|", 3)
            found.append((key, id, b64decode(payload) if b";enc=b64" in id else payload))
        return found


@pytest.fixture
def ship(tmp_path):
    """A function that makes a Shipper to the intake of a topic."""
    made = []

    def make(topic, is_json=False):
        made.append(Shipper(tmp_path, topic, is_json))
        return made[-1]

    yield make
    for each in made:
        each.near.close()
        each.connection.sock.close()
        os.close(each.raw_fd)


@pytest.fixture
def shipper(ship):
    return ship("app")


@pytest.mark.parametrize("seed", range(8))
def test_nasty_lines_arrive_byte_for_byte_however_they_are_cut(shipper, seed):
    rng = random.Random(seed)
    lines = [
        *rng.sample(NASTY, len(NASTY)),
        *(rng.randbytes(rng.randrange(90)).replace(b"\n", b"") for _ in range(200)),
    ]
    data, done = b"".join(line + b"\n" for line in lines), 0
    while done < len(data):
        size = rng.choice((1, 7, 300, 5000))
        shipper.send(data[done : done + size])
        done += size
    shipper.end()
    assert [payload for _, _, payload in shipper.messages] == lines
    assert {key for key, _, _ in shipper.messages} == {b"app"}
    assert (shipper.raw.lines, shipper.raw.bytes) == (len(lines), len(data))
    assert all(id in (b"", b";enc=b64") for _, id, _ in shipper.messages)
    assert all(payload for line in shipper.steps.lines for payload in [line.split(b"|", 3)[3]] if b"enc" not in line)


def test_one_large_receive_is_taken_as_a_whole_but_for_lines_with_a_nul(shipper, monkeypatch):
    looked, encoded = [], intakes._encoded
    monkeypatch.setattr(intakes, "_encoded", lambda raw, match: looked.append(match[1]) or encoded(raw, match))
    lines = [b"line %d with | and ; and !" % n for n in range(1000)]
    lines[3] = lines[4] = lines[5] = b""
    lines[7] = b"a\0b"
    shipper.send(b"".join(line + b"\n" for line in lines))
    assert [payload for _, _, payload in shipper.messages] == lines and shipper.raw.lines == 1000
    assert looked == [b"a\0b"]


@pytest.mark.parametrize("data", [b"\n", b"\na\n", b"a\n\n", b"a\n\nb\n", b"a\n\n\n\nb\n"])
def test_an_empty_line_is_an_empty_value_and_not_null(shipper, data):
    shipper.send(data)
    assert [payload for _, _, payload in shipper.messages] == data[:-1].split(b"\n")
    assert [id for _, id, payload in shipper.messages if not payload] == [b";enc=b64"] * data[:-1].split(b"\n").count(
        b""
    )


def test_no_declared_topic_changes_what_the_head_of_a_dotted_topic_means(ship):
    shipper = ship("app.web")
    shipper.send(b"one\ntwo\n")
    keys = [record.marked(key) for key, _, _ in shipper.messages]
    assert keys == [(b"app.web", None, None)] * 2


@pytest.mark.parametrize("fill", [b"x", b"\0", b"\xff"])
@pytest.mark.parametrize("over", [0, 1, MAX, 40 * MAX])
def test_a_line_over_the_limit_leaves_its_first_bytes_and_the_next_line_is_whole(shipper, fill, over):
    limit = MAX - len(b"app|||")
    line = fill * (limit + over)
    shipper.send(b"before\n" + line + b"\nafter\n")
    shipper.end()
    (_, _, before), (key, id, payload), (_, _, after) = shipper.messages
    assert (before, after) == (b"before", b"after")
    if over or fill == b"\0":  # in base64 it is over the limit in any case
        assert key == b"dead.malformed" and b";reason=too_long;len=%d;topic=app" % len(line) in id
        assert line.startswith(payload) and len(payload) >= limit // 4 * 3 - 3
    else:
        assert (key, payload) == (b"app", line)
    assert max(map(len, shipper.steps.lines)) <= MAX + record.MALFORMED_OVERHEAD
    assert shipper.raw.lines == 3 and shipper.raw.bytes == len(line) + 14


def test_a_line_without_newline_at_the_end_is_a_dead_letter_of_its_own(shipper):
    shipper.send(b"whole\n!cut |in the mid")
    shipper.end()
    assert shipper.messages == [
        (b"app", b"", b"whole"),
        (b"dead.malformed", b";reason=no_newline;len=16;topic=app", b"!cut |in the mid"),
    ]


@pytest.mark.parametrize("is_json", [False, True])
def test_a_flood_of_newlines_takes_little_memory_and_loses_none(ship, is_json):
    shipper = ship("t" * 200, is_json)
    longest = intakes.letter(shipper.raw, "not_json", b"", 0) if is_json else shipper.raw.encoded + b"\n"
    assert shipper.raw.receive_bytes * len(longest) <= 5 << 20
    shipper.send(b"\n" * 30_000)
    assert [payload for _, _, payload in shipper.messages] == [b""] * 30_000


JSON = [
    *(b'{"a":1}', b"[1, 2]", b"7", b'"x"', b"null", b' {"a": [true]}\t\r', b"-1.5e999", b'"\\ud800"', b'{"a":1,"a":2}'),
    *(
        b"9" * 4300,
        b"0." + b"9" * 5000,
        '"\u00e9"'.encode(),
        b'[{"a":' * 250 + b"1" + b"}]" * 250,
        b"[" + b"[]," * 900 + b"0]",
    ),
    b'["' + b'[{\\"' * 900 + b'"]',  # in a string, brackets are no levels
]
NO_JSON = [
    *(
        b"",
        b" ",
        b"{",
        b"{} {}",
        b"1,2",
        b"[1",
        b"2]",
        b"NaN",
        b"[-Infinity]",
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        b'"\0"',
        b"'a'",
    ),
    *(
        b'"\x01"',
        b"\xff\xfe7\0",
        b"!hello acks=1",
        b"other|||{}",
        b"9" * 4301,
        b"[" * 501 + b"]" * 501,
        b"[" * 3000 + b"]" * 3000,
    ),
]


@pytest.mark.parametrize("seed", range(4))
def test_where_json_is_wanted_any_other_line_is_a_dead_letter_and_whole(ship, seed):
    shipper, rng = ship("app", is_json=True), random.Random(seed)
    lines = rng.sample(JSON + NO_JSON, len(JSON + NO_JSON)) + [b'{"n":%d}' % n for n in range(50)]
    data, done = b"".join(line + b"\n" for line in lines), 0
    while done < len(data):
        size = rng.choice((1, 7, 300, 5000))
        shipper.send(data[done : done + size])
        done += size
    letters = [(id, line) for key, id, line in shipper.messages if key == b"dead.malformed"]
    assert [payload for key, _, payload in shipper.messages if key == b"app"] == [x for x in lines if x not in NO_JSON]
    assert [line for _, line in letters] == [line for line in lines if line in NO_JSON]
    assert all(b";reason=not_json;len=%d;topic=app" % len(line) in id for id, line in letters)
    assert (shipper.raw.lines, shipper.raw.bytes, shipper.intake.refused) == (len(lines), len(data), len(letters))


def test_what_counts_as_json_is_shown_as_json_over_http():
    show = messages.writer("json")
    shown = [show(Message("app", 0, 0, b"1|1.0|app|1.0||" + line)) for line in JSON if line != b"null"]
    assert [text for text in shown if "encoding" in json.loads(text)] == []


def test_lines_that_are_no_json_are_handed_over_together(ship, monkeypatch):
    shipper = ship("app", is_json=True)
    pieces, put = [], shipper.handover.put
    monkeypatch.setattr(shipper.handover, "put", lambda parts, *more: (pieces.append(sum(map(len, parts))), put(parts)))
    for _ in range(2):
        shipper.send(b"\n" * 4000 + b"{}\n" * 50)
    assert len(shipper.messages) == 8100 and shipper.intake.refused == 8000
    assert len(pieces) <= 8 and max(pieces) <= MAX + receiving._PIECE_BYTES


def test_json_is_looked_at_only_where_it_is_wanted(shipper, monkeypatch):
    monkeypatch.setattr(intakes, "split_json", None)
    shipper.send(b"{\n")
    assert shipper.messages == [(b"app", b"", b"{")]


def test_a_flood_of_newlines_in_datagrams_takes_little_memory_and_loses_none():
    with socket.socket(type=socket.SOCK_DGRAM) as ours, socket.socket(type=socket.SOCK_DGRAM) as theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        ours.bind(("127.0.0.1", 0))
        ours.setblocking(False)
        raw = RawPort(IntakePort(0, "udp", "t" * 200), 1 << 20, ours)
        theirs.connect(ours.getsockname())
        sent = taken = 0
        while sent < 200_000:  # what one turn brings and what the next, sent while there is room
            sent += theirs.send(b"\n" * 10_000)
            if sent % 100_000 == 0:
                while lines := b"".join(intakes.read_datagrams(raw, (), lambda _: None)[0]):
                    made = sum(len(part) for piece in intakes.messages(raw, [lines], 1 << 21) for part in piece)
                    assert made <= 6 << 20
                    taken += len(lines)
        assert taken == sent - intakes.dropped(raw) * 10_000


def test_datagrams_are_lines_and_a_missing_newline_is_added():
    with socket.socket(type=socket.SOCK_DGRAM) as ours, socket.socket(type=socket.SOCK_DGRAM) as theirs:
        ours.bind(("127.0.0.1", 0))
        ours.setblocking(False)
        raw = RawPort(IntakePort(0, "udp", "net"), MAX, ours)
        for data in (b"<13>one", b"two\nthree\n", b"", b"y" * (MAX + 1) + b"\nfour\r\n"):
            theirs.sendto(data, ours.getsockname())
        refused = []
        taken, too_long = intakes.read_datagrams(raw, parse_sources("127.0.0.0/8"), refused.append)
        assert b"".join(taken) == b"<13>one\ntwo\nthree\nfour\r\n" and too_long == [b"y" * (MAX + 1)]
        theirs.sendto(b"from elsewhere", ours.getsockname())
        raw.may_send.clear()
        assert intakes.read_datagrams(raw, parse_sources("10.0.0.0/8"), refused.append) == ([], [])
        assert raw.refused == len(refused) == 1
    assert intakes.dropped(raw) == 0  # closed


# --- settings --------------------------------------------------------------------------------------------------------


def test_sources_know_both_families_and_mapped_addresses():
    networks = parse_sources("10.0.0.0/8, fd00::/8 192.0.2.7")
    assert [is_among(networks, address) for address in ("10.9.9.9", "::ffff:192.0.2.7", "fd00::1", "fd00::1%eth0")] == [
        True
    ] * 4
    assert not is_among(networks, "192.0.2.8") and not is_among(networks, "::1")


def test_entries_name_port_kind_and_topic():
    text = "5140=app,5142/udp=net\t6514/tls=a.b:json "
    assert parse_intakes(text) == (
        (5140, "tcp", "app", False),
        (5142, "udp", "net", False),
        (6514, "tls", "a.b", True),
    )
    assert " ".join(map(str, parse_intakes(text))) == "5140=app 5142/udp=net 6514/tls=a.b:json"


# --- frames that are no lines ------------------------------------------------------------------------------------------

SYSLOG = [
    b"<34>1 2026-11-29T00:00:00Z host app - - - one",
    b"<13>two |!| \xff",
    b"<11>Traceback\n  in a\n  in b",
    b"<9>four",
]


def counted(frames):
    return b"".join(b"%d %b" % (len(frame), frame) for frame in frames)


@pytest.mark.parametrize("step", [1, 7, 60, 1 << 16])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (counted(SYSLOG), SYSLOG),
        (counted(frame + b"\n" for frame in SYSLOG), SYSLOG),
        (b"\n".join(map(counted, ([frame] for frame in SYSLOG))), SYSLOG),
        (counted(SYSLOG[:1]) + b"no count\n" + counted(SYSLOG[1:]), [SYSLOG[0], b"no count", *SYSLOG[1:]]),
        (b"".join(frame + b"\0" for frame in SYSLOG), SYSLOG),
        (b'{"version":"1.1"}\0{"a":\n1}\0{}\0', [b'{"version":"1.1"}', b'{"a":\n1}', b"{}"]),
        (b"plain\0text\0", [b"plain", b"text"]),
        (b"only one\0", [b"only one"]),
        (b"12 lines\n<13>c\n", [b"12 lines", b"<13>c"]),
    ],
    ids=[
        "count",
        "count, newline",
        "count, newline after",
        "no count",
        "NUL",
        "GELF",
        "plain",
        "one",
        "digits",
    ],
)
def test_frames_are_read_by_the_first_bytes_of_a_connection_however_they_are_cut(shipper, data, expected, step):
    for at in range(0, len(data), step):
        shipper.send(data[at : at + step])
    shipper.end()
    assert [(key, payload) for key, _, payload in shipper.messages] == [(b"app", frame) for frame in expected]
    assert shipper.raw.lines == len(expected)


def test_lines_of_syslog_may_have_a_nul(shipper):
    shipper.send(b"<13>a\0b\n<13>c\n")
    assert [payload for _, _, payload in shipper.messages] == [b"<13>a\0b", b"<13>c"]


def test_the_first_message_that_ends_in_nul_is_there_at_once(shipper):
    for number in range(1, 4):
        shipper.send(b"<13>%d\0" % number)
        assert [payload for _, _, payload in shipper.messages] == [b"<13>%d" % each for each in range(1, number + 1)]
    assert shipper.intake.partial_bytes == 0 and not shipper.connection.is_unfinished


@pytest.mark.parametrize("over", [1, 40 * MAX])
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_frame_over_the_limit_leaves_its_first_bytes_and_the_next_one_is_whole(shipper, is_counted, over):
    limit = MAX - len(b"app|||")
    frames = [b"<1>before", b"<2>" + b"x" * (limit - 3 + over), b"<3>" + b"y" * (limit - 3), b"<4>after"]
    shipper.send(counted(frames) if is_counted else b"".join(frame + b"\0" for frame in frames))
    shipper.end()
    first, (key, id, payload), *rest = shipper.messages
    assert first[2] == frames[0] and [each[2] for each in rest] == frames[2:]
    assert key == b"dead.malformed" and b";reason=too_long;len=%d" % (limit + over) in id
    assert frames[1].startswith(payload) and len(payload) > limit // 2


def test_a_frame_that_is_cut_at_the_end_is_a_dead_letter(shipper):
    shipper.send(b"7 <1>abcd9 <2>ab")
    shipper.end()
    assert [(key, payload) for key, _, payload in shipper.messages] == [
        (b"app", b"<1>abcd"),
        (b"dead.malformed", b"<2>ab"),
    ]


def test_at_an_intake_of_json_a_frame_is_one_value(ship):
    shipper = ship("app", is_json=True)
    shipper.send(b'{"a":1}\0{"b":\n2}\0{no\njson}\0{}\0')
    assert [(key, payload) for key, _, payload in shipper.messages] == [
        (b"app", b'{"a":1}'),
        (b"app", b'{"b":\n2}'),
        (b"dead.malformed", b"{no\njson}"),
        (b"app", b"{}"),
    ]


@pytest.mark.parametrize("end", [b"", b"\n", b"\0", b"\n\0", b"\0\n", b"\0\0"])
def test_what_ends_a_datagram_is_no_payload(end):
    assert intakes.trimmed(b"<13>a\0b\r" + end) == b"<13>a\0b\r"
