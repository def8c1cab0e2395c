"""From ingress to the framer: the order is kept whatever is full, and each line of the FIFO speaks of bytes that are there."""

import contextlib
import os
import random
import threading

import pytest
from fifo_reading import read_all
from framing_steps import Steps, one_by_one, table
from received_ends import Way, joined

from kmq.config.values import KIB, PIPE_BUF
from kmq.errors import ConfigError
from kmq.links import fifo, received
from kmq.links.fifo import LINES, MESSAGES, Sender, open_fifo, waiting_bytes
from kmq.links.layout import BlockLimits
from kmq.links.received import Handover

MAX = 1 << 16


@pytest.fixture
def raw(tmp_path):
    fd = open_fifo(f"{tmp_path}/pipes", "raw")
    yield fd
    os.close(fd)


@pytest.fixture
def writes(monkeypatch, raw):
    """Everything written to the FIFO, write by write."""
    seen, write = [], os.write

    def record(fd, data):
        written = write(fd, data)
        if fd == raw:
            seen.append((bytes(data), written))
        return written

    monkeypatch.setattr(received.os, "write", record)
    return seen


class Ends:
    """A handover, and the framer that reads behind it."""

    def __init__(self, raw, nbytes=1 << 20):
        self.raw, self.way = raw, Way(nbytes)
        self.steps = Steps(table(count=1 << 20), max_line=MAX, way=self.way)
        self.hand = Handover(raw, self.way.writer)

    def put(self, lines, sender=None):
        self.hand.put([joined(lines)], sender, len(lines) if sender is not None else 0)

    def frame(self, most=1 << 20):
        """Let the framer read so many bytes of the FIFO."""
        with contextlib.suppress(BlockingIOError):
            self.steps.read(os.read(self.raw, most))

    def finish(self):
        """Flush and frame until nothing waits; return how often it was clogged."""
        clogs = 0
        self.hand.flush()
        self.frame()
        while self.hand.clogged or waiting_bytes(self.raw):
            clogs += 1
            assert clogs < 100_000
            self.hand.flush()
            self.frame()
        assert not self.steps.waiting
        return clogs

    def restart(self):
        """As an ingress that was killed and starts again."""
        self.way.restart_ingress()
        self.hand = Handover(self.raw, self.way.writer)
        self.hand.say_free()


@pytest.fixture
def ends(raw):
    return Ends(raw)


def line(n):
    return b"t|||%b" % (b"x" * n)


def control_lines(text):
    return [(LINES.fullmatch(each) or MESSAGES.fullmatch(each)) for each in text.splitlines(keepends=True)]


def are_atomic(writes):
    return all(len(data) == done <= PIPE_BUF and data.endswith(b"\n") for data, done in writes)


@pytest.mark.parametrize("size", [PIPE_BUF - 5, PIPE_BUF - 4, PIPE_BUF * 2, 60_000])
@pytest.mark.parametrize("sender", [None, Sender(b"17.1", b"")], ids=["plain", "acknowledged"])
def test_a_line_of_any_length_goes_in_one_piece_with_its_neighbours(ends, writes, size, sender):
    lines = [line(1), line(size), line(2)]
    ends.put(lines, sender)
    ends.hand.flush()
    [(text, _)] = writes
    assert text.count(b"\n") == 1 and len(text) < PIPE_BUF
    ends.finish()
    assert ends.steps.lines == lines


def test_what_was_put_is_told_with_the_next_flush_and_not_before(ends, raw):
    ends.put([line(1)])
    assert waiting_bytes(raw) == 0 and not ends.hand.clogged
    ends.hand.flush()
    birth = ends.way.writer.birth
    assert read_all(raw) == b"!r %d 0 6\n" % birth
    ends.hand.flush()
    assert waiting_bytes(raw) == 0


def test_much_is_told_at_once(ends, raw):
    """The framer works while ingress receives the next."""
    for _ in range(128 * KIB // 1024):
        ends.put([line(1019)])
        assert waiting_bytes(raw) == 0
    ends.put([line(1)])
    assert waiting_bytes(raw) > 0
    told = waiting_bytes(raw)
    ends.put([line(1)])
    assert waiting_bytes(raw) == told


def test_parts_of_a_line_lie_together(ends):
    view = memoryview(b"..st|||b\n..")
    ends.hand.put([bytearray(b"t|||fir"), view[2:9]], None, 0)
    ends.finish()
    assert ends.steps.lines == [b"t|||first|||b"]


def test_adjoining_pieces_that_nobody_waits_for_become_one_and_others_do_not(ends, raw):
    sender = Sender(b"17.1", b"p=me")
    birth = ends.way.writer.birth
    ends.put([line(0)])  # 5 bytes each
    ends.put([line(0), line(0)])
    ends.put([b"t|1|1|"], sender)  # 7 bytes
    ends.put([line(0)])
    ends.hand.say(sender.question(0))
    ends.put([line(0)])
    ends.put([line(0)])
    ends.put([b"t|1|2|"], sender)
    ends.put([b"t|1|3|", b"t|1|4|"], sender)
    ends.hand.flush()
    assert read_all(raw).splitlines() == [
        b"!r %d 0 15" % birth,
        b"!c 17.1 1 1 %d 15 22 p=me" % birth,
        b"!r %d 22 27" % birth,
        b"!l 17.1 0 p=me",
        b"!r %d 27 37" % birth,
        b"!c 17.1 2 1 %d 37 44 p=me" % birth,
        b"!c 17.1 3 2 %d 44 58 p=me" % birth,
    ]
    assert sender.sent == 4


def test_a_piece_ends_where_the_ring_does(raw):
    ends = Ends(raw, 8192)
    ends.put([line(3995)])
    ends.hand.flush()
    ends.put([line(995)])
    ends.frame()  # the first, so that there is room at the start
    ends.put([line(1995)])
    ends.put([line(2995)])
    ends.hand.flush()
    text = read_all(raw)
    assert [match.groups()[1:] for match in control_lines(text)] == [(b"4000", b"7000"), (b"8192", b"11192")]
    ends.steps.read(text)
    assert ends.steps.lines == [line(3995), line(995), line(1995), line(2995)]


def test_the_ring_shows_the_bytes_before_the_fifo_speaks_of_them(ends, raw, monkeypatch):
    reader, write, seen = ends.way.attach(), os.write, []

    def look(fd, data):
        if fd == raw:
            for match in control_lines(bytes(data)):
                start, end = (int(match[at]) for at in ((2, 3) if match.re is LINES else (5, 6)))
                assert reader.holds(start, end) and reader.text(end - 1, end) == b"\n"
                seen.append(end)
        return write(fd, data)

    monkeypatch.setattr(received.os, "write", look)
    sender = Sender(b"17.1")
    for n in range(50):
        ends.put([line(n * 100)], sender if n % 3 else None)
        if n % 2:
            ends.hand.flush()
    ends.hand.flush()
    assert seen == sorted(seen) and len(seen) > 40 and seen[-1] == ends.way.writer.head


@pytest.mark.parametrize("max_bytes", [4096, 5000])
def test_many_control_lines_go_in_atomic_writes_of_whole_lines(ends, writes, max_bytes):
    sender = Sender(b"1732190000000000000.123456", b"p=" + b"A" * 64)
    for n in range(300):
        ends.put([b"t|1|%d|" % n], sender)
    ends.hand.flush()
    assert are_atomic(writes) and len(writes) > 5
    text = b"".join(data for data, _ in writes)
    assert len(writes) <= 1 + len(text) // (PIPE_BUF - 200)  # as much as one write takes, not less
    assert [int(match[2]) for match in control_lines(text)] == list(range(1, 301))


def fill(raw):
    """Fill the FIFO with lines of a shell; return how many."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(raw, b"u|||" + b"f" * 1019 + b"\n")
            count += 1
    return count


def test_a_full_fifo_clogs_and_keeps_the_order(ends, raw, writes):
    fill(raw)
    writes.clear()
    sender = Sender(b"17.1")
    ends.put([b"t|||1"], sender)
    ends.hand.flush()
    assert ends.hand.is_full and ends.hand.clogged
    ends.put([b"t|||2"])  # what was received before it was clogged
    ends.hand.say(b"!l 17.1 0 p=me\n")
    ends.put([b"t|||3"], sender)
    ends.hand.flush()
    assert ends.hand.clogged and not writes
    ends.finish()
    assert not ends.hand.clogged
    assert [each for each in ends.steps.lines if each[:1] == b"t"] == [b"t|||1", b"t|||2", b"t|||3"]
    assert [reply.split(b" ")[2] for reply in ends.steps.replies] == [b"!ack", b"!last", b"!ack"]
    assert are_atomic(writes)


def test_a_full_ring_clogs_and_keeps_the_order_also_of_what_speaks_of_no_bytes(raw):
    ends = Ends(raw, 8192)
    sender = Sender(b"17.1", b"p=me")
    ends.put([line(4000)])
    ends.put([line(4000)])
    ends.put([b"t|1|1|" + b"x" * 4000], sender)
    assert ends.hand.clogged and not ends.hand.is_full
    ends.put([b"t|1|2|x"], sender)  # it would fit, but it has to wait for its turn
    ends.hand.say(sender.question(0))
    ends.put([line(1)])
    ends.put([b"t|1|3|x"], sender)
    assert sender.sent == 0 and ends.hand.clogged  # they are numbered when they are told of
    ends.hand.flush()
    assert read_all(ends.way.signs) == b""
    ends.frame()
    assert read_all(ends.way.signs)
    ends.finish()
    assert read_all(ends.way.signs).strip(b"\n") == b"" and sender.sent == 3 and not ends.hand.clogged
    stored = [b"t|1|1;p=me|" + b"x" * 4000, b"t|1|2;p=me|x", line(1), b"t|1|3;p=me|x"]
    assert ends.steps.lines == [line(4000), line(4000), *stored]
    assert ends.steps.replies == [b"17.1 1 !ack 2 4", b"17.1 0 !last 2", b"17.1 3 !ack 3 6"]


def test_both_full_at_once_keep_the_order(raw):
    ends = Ends(raw, 8192)
    count = fill(raw)
    lines = [b"t|||%d" % n + b"x" * 3000 for n in range(9)]
    for each in lines:
        ends.put([each])
        ends.hand.flush()
    assert ends.hand.is_full and ends.hand.clogged
    assert ends.finish() > 2
    assert ends.steps.lines[count:] == lines


def test_a_clogged_way_keeps_the_order_and_the_numbers_of_every_sender(raw, writes):
    """Whatever was read between, the framer finds each connection's messages whole, in order and numbered on."""
    rng, clogs, shells = random.Random(8), 0, 0
    ends = Ends(raw, 400_000)
    senders = [Sender(b"17.%d" % n, tag) for n, tag in enumerate([b"", b"p=a", b"w=b"], start=1)]
    sent = {sender: [] for sender in (*senders, None)}
    for turn in range(1500):
        sender = rng.choice([*senders, None])
        sizes = rng.choices([5, 80, 4000, 4092, 5000, 60_000], [20, 20, 3, 2, 2, 1], k=rng.choice([1, 1, 2, 29]))
        lines = [b"t|%d|%d|%b" % (turn, turn * 30 + n, b"z" * size) for n, size in enumerate(sizes)]
        sent[sender] += lines
        ends.put(lines, sender)
        while ends.hand.clogged:
            clogs += 1
            ends.frame(rng.choice([20, 100, 5000]))
            ends.hand.flush()
        if not rng.randrange(4):
            ends.hand.flush()
        if not rng.randrange(50):  # a shell fills the FIFO
            shells += fill(raw)
    ends.finish()
    assert are_atomic(writes) and clogs > 100
    answers, stored = one_by_one(ends.steps.replies), dict(enumerate(ends.steps.lines, start=1))
    for sender in senders:
        said = [answers.pop((sender.name, n)) for n in range(1, len(sent[sender]) + 1)]
        found = [stored.pop(int(reply.removeprefix(b"ack "))) for reply in said]
        assert [line.replace(b";" + sender.tag[1:], b"") if sender.tag else line for line in found] == sent[sender]
        assert sender.sent == len(sent[sender])
    others = [each for each in stored.values() if not each.startswith(b"u|||f")]
    assert not answers and others == sent[None] and len(stored) == len(others) + shells


def test_lines_of_other_writers_never_mix_with_ours(raw, tmp_path):
    def echo(name):
        fd = os.open(f"{tmp_path}/pipes/raw", os.O_WRONLY)
        for n in range(300):
            os.write(fd, b"other.%d|%d||%b\n" % (name, n, b"y" * (n * 13 % 4000)))
        os.close(fd)

    ends = Ends(raw, 1 << 16)
    threads = [threading.Thread(target=echo, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    sent = 0
    while sent < 300 or ends.hand.clogged or any(thread.is_alive() for thread in threads) or waiting_bytes(raw):
        ends.frame(50_000)
        if sent < 300 and not ends.hand.clogged:
            ends.put([b"ours|%d||%b" % (sent, b"z" * (sent * 97 % 9000))])
            sent += 1
        ends.hand.flush()
    assert not ends.steps.waiting and len(ends.steps.lines) == 4 * 300
    for name, letter, factor, most in [(b"other.%d" % n, b"y", 13, 4000) for n in range(3)] + [
        (b"ours", b"z", 97, 9000)
    ]:
        found = [each for each in ends.steps.lines if each.startswith(name + b"|")]
        assert found == [b"%b|%d||%b" % (name, n, letter * (n * factor % most)) for n in range(300)]


# --- ingress dies ------------------------------------------------------------------------------------------------------


def test_a_new_ingress_frees_what_nobody_speaks_of(raw):
    ends = Ends(raw, 8192)
    ends.put([line(4000)])
    ends.way.writer.publish()  # killed before it wrote the line
    ends.restart()
    ends.put([line(4091)])
    assert not ends.hand.clogged
    ends.put([line(3000)])
    assert ends.hand.clogged
    assert ends.finish() > 0
    assert ends.steps.lines == [line(4091), line(3000)]


def test_the_first_line_of_a_new_ingress_speaks_of_no_bytes(ends, raw):
    ends.put([line(1)])
    ends.finish()
    ends.restart()
    ends.hand.flush()
    text = read_all(raw)
    assert text == b"!r %d 6 6\n" % ends.way.writer.birth
    ends.steps.read(text)
    assert ends.steps.lines == [line(1)] and not ends.steps.waiting


class Killed(Exception):
    pass


def test_an_ingress_killed_between_any_two_steps_loses_only_what_was_never_told(raw, monkeypatch):
    """What it told of is framed once and in order; what it had not is lost as a whole rest, and its room is free again."""
    rng, kills, lost = random.Random(4), 0, 0
    ends, write = Ends(raw, 1 << 15), os.write
    armed = [False]

    def die():
        if armed[0] and not rng.randrange(12):
            raise Killed

    def dying_write(fd, data):
        if fd != raw:
            return write(fd, data)
        die()
        written = write(fd, data)
        die()
        return written

    class DyingWriter:
        """The writing end, with a chance to be killed before and after each of its steps."""

        def __init__(self, writer):
            self.writer = writer
            self.birth = writer.birth

        @property
        def head(self):
            return self.writer.head

        def put(self, parts, nbytes):
            die()
            position = self.writer.put(parts, nbytes)
            die()
            return position

        def publish(self):
            die()
            self.writer.publish()
            die()

    monkeypatch.setattr(received.os, "write", dying_write)
    for life in range(400):
        ends.hand.ring = DyingWriter(ends.way.writer)
        sender = Sender(b"17.%d" % (life + 1))
        given, armed[0] = [], life > 0
        try:
            for n in range(rng.randrange(1, 60)):
                lines = [
                    b"t|%d|%d.%d|%b" % (life, n, k, b"x" * rng.choice([0, 9, 3000])) for k in range(rng.randrange(1, 4))
                ]
                whose = sender if rng.randrange(2) else None
                given += lines
                ends.put(lines, whose)
                if not rng.randrange(3):
                    ends.hand.flush()
                if not rng.randrange(4):
                    ends.frame(rng.choice([30, 200, 5000]))
            ends.hand.flush()
            assert not ends.hand.is_full
            told_all = not ends.hand.clogged
        except Killed:
            told_all, kills = False, kills + 1
        armed[0] = False
        before_all = [each for each in ends.steps.lines if each.startswith(b"t|%d|" % life)]
        ends.frame()
        stored = [each for each in ends.steps.lines if each.startswith(b"t|%d|" % life)]
        assert stored == given[: len(stored)] and stored[: len(before_all)] == before_all
        assert not told_all or stored == given
        lost += len(stored) < len(given)
        ends.restart()
    assert kills > 200 and lost > 150
    assert set(one_by_one(ends.steps.replies).values()) > {b"ack 1"}


# --- the FIFO itself ---------------------------------------------------------------------------------------------------


def test_open_fifo_makes_one_that_a_group_may_write_and_takes_one_that_is_there(tmp_path):
    first = open_fifo(str(tmp_path), "raw")
    os.write(first, b"kept\n")
    second = open_fifo(str(tmp_path), "raw")
    assert os.stat(tmp_path / "raw").st_mode & 0o777 == 0o660
    assert waiting_bytes(second) == 5 and os.read(second, 10) == b"kept\n"
    os.close(first)
    os.close(second)


def test_something_else_in_the_place_of_the_fifo_is_refused(tmp_path):
    (tmp_path / "raw").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a FIFO"):
        open_fifo(str(tmp_path), "raw")


def test_a_mark_lives_and_dies_with_the_pipe_and_not_with_its_name(tmp_path):
    first = open_fifo(str(tmp_path), "raw")
    assert not fifo.is_marked(first) and fifo.mark(first) and fifo.is_marked(first)
    second = open_fifo(str(tmp_path), "raw")
    assert fifo.is_marked(second)
    os.close(first)
    assert fifo.is_marked(second)
    os.close(second)
    third = open_fifo(str(tmp_path), "raw")
    assert not fifo.is_marked(third)
    os.close(third)


def test_the_messages_of_a_large_piece_are_numbered_on_across_blocks(raw):
    ends = Ends(raw)
    ends.steps.limits, ends.steps.cut = BlockLimits(16, 4096), range
    sender = Sender(b"17.1", b"p=me")
    for n in range(0, 3000, 1000):
        ends.put([b"t|1|%d|x" % (n + k) for k in range(1000)], sender)
    ends.finish()
    assert len(ends.steps.replies) >= 3000 // 2
    assert one_by_one(ends.steps.replies) == {(b"17.1", n): b"ack %d" % n for n in range(1, 3001)}
