"""The FIFO: every write is whole lines and atomic, a clogged pipe keeps the order, long lines go as pieces."""

import contextlib
import os
import random
import threading

import pytest
from fifo_reading import read_all
from framing_steps import Steps, one_by_one, table

from kmq.errors import ConfigError
from kmq.links import fifo
from kmq.links.fifo import FifoWriter, open_fifo, waiting_bytes
from kmq.links.raw import Sender, fragments
from kmq.settings import PIPE_BUF


@pytest.fixture
def raw(tmp_path):
    fd = open_fifo(f"{tmp_path}/pipes", "raw")
    yield fd
    os.close(fd)


@pytest.fixture
def writes(monkeypatch, raw):
    """Everything written to the FIFO, write by write."""
    seen, write, writev = [], os.write, os.writev

    def record(fd, data):
        written = write(fd, data)
        if fd == raw:
            seen.append((bytes(data), written))
        return written

    def record_parts(fd, parts):
        written = writev(fd, parts)
        seen.append((b"".join(parts), written))
        return written

    monkeypatch.setattr(fifo.os, "write", record)
    monkeypatch.setattr(fifo.os, "writev", record_parts)
    return seen


def put_all(writer, raw, chunks, sender=None, margin=0):
    """Put, as ingress does: nothing more while it is clogged. Returns what came through, and how often it was."""
    got, clogs = b"", 0
    for chunk in chunks:
        writer.put(chunk, margin, len(chunk) - margin, sender)
        while writer.clogged:
            clogs += 1
            got += os.read(raw, random.Random(clogs).randrange(1, 100_000))
            writer.flush()
    return got + read_all(raw), clogs


def line(n):
    return b"t|||%b\n" % (b"x" * n)


@pytest.mark.parametrize(
    "size", [PIPE_BUF - 6, PIPE_BUF - 5, PIPE_BUF - 4, PIPE_BUF * 2, 3 * (PIPE_BUF - 2) - 4, 100_000]
)
def test_a_line_around_every_limit_comes_through(raw, writes, size):
    text = line(1) + line(size) + line(2)
    got, _ = put_all(FifoWriter(raw), raw, [text])
    whole = len(line(size)) <= PIPE_BUF
    assert got == (text if whole else line(1) + fragments(line(size)[:-1]) + line(2))
    assert all(len(data) <= PIPE_BUF and data.endswith(b"\n") and len(data) == done for data, done in writes)


def test_pieces_put_together_are_the_line():
    for size in (PIPE_BUF, PIPE_BUF + 1, 2 * (PIPE_BUF - 2), 2 * (PIPE_BUF - 2) + 1, 1 << 20):
        text = os.urandom(size).replace(b"\n", b" ")
        cut = fragments(text).split(b"\n")
        assert cut.pop() == b""
        assert b"".join(piece[1:] for piece in cut) == text
        assert [piece[:1] for piece in cut] == [b"+"] * (len(cut) - 1) + [b"-"]
        assert all(len(piece) + 1 <= PIPE_BUF for piece in cut)


def test_a_clogged_pipe_resumes_in_order(raw, writes):
    rng = random.Random(3)
    chunks = []
    for n in range(400):
        sizes = rng.choices([5, 80, 4000, 4092, 5000, 60_000], [20, 20, 3, 2, 2, 1], k=rng.randrange(1, 40))
        chunks.append(b"".join(b"%d %b\n" % (n, bytes([33 + rng.randrange(90)]) * size) for size in sizes))
    got, clogs = put_all(FifoWriter(raw), raw, chunks)
    expected = b"".join(
        text + b"\n" if len(text) < PIPE_BUF else fragments(text) for text in b"".join(chunks).split(b"\n")[:-1]
    )
    assert got == expected and clogs > 20
    assert all(len(data) <= PIPE_BUF and data.endswith(b"\n") and len(data) == done for data, done in writes)


def test_while_clogged_more_may_be_put_and_comes_later(raw):
    os.set_blocking(raw, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(raw, b"f" * 4095 + b"\n")
    writer = FifoWriter(raw)
    writer.put(b"one\n", 0, 4)
    writer.put(b"__two\n__", 2, 6)
    writer.put(b"three\n", 0, 6)
    assert writer.clogged
    read_all(raw)
    writer.flush()
    assert not writer.clogged and read_all(raw) == b"one\ntwo\nthree\n"


def test_lines_of_other_writers_never_mix_with_ours(raw, tmp_path):
    def echo(name):
        fd = os.open(f"{tmp_path}/pipes/raw", os.O_WRONLY)
        for n in range(300):
            os.write(fd, b"other.%d|%d||%b\n" % (name, n, b"y" * (n * 13 % 4000)))
        os.close(fd)

    threads = [threading.Thread(target=echo, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    writer, got, sent = FifoWriter(raw), b"", 0
    while sent < 300 or writer.clogged or any(thread.is_alive() for thread in threads) or waiting_bytes(raw):
        with contextlib.suppress(BlockingIOError):
            got += os.read(raw, 50_000)
        if writer.clogged:
            writer.flush()
        elif sent < 300:
            text = b"ours|%d||%b\n" % (sent, b"z" * (sent * 97 % 9000))
            writer.put(text, 0, len(text))
            sent += 1
    assert got.endswith(b"\n")
    by_writer = {}
    for text in got.split(b"\n")[:-1]:
        by_writer.setdefault(text.split(b"|")[0] if text[:1] == b"o" else b"pieces", []).append(text)
    for name in range(3):
        assert by_writer[b"other.%d" % name] == [
            b"other.%d|%d||%b" % (name, n, b"y" * (n * 13 % 4000)) for n in range(300)
        ]
    joined, held = [], b""
    for text in got.split(b"\n")[:-1]:
        if text[:1] in b"+-":
            held += text[1:]
            if text[:1] == b"-":
                joined, held = [*joined, held], b""
        elif text.startswith(b"ours"):
            joined.append(text)
    assert joined == [b"ours|%d||%b" % (n, b"z" * (n * 97 % 9000)) for n in range(300)]


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_group", [1, 5, 128])
@pytest.mark.parametrize("tag", [b"", b"p=me", b"w=" + b"A" * 64])
def test_groups_are_atomic_say_what_they_hold_and_count_on(raw, writes, max_group, tag):
    writer, sender = FifoWriter(raw, max_group), Sender(b"1732190000000000000.123456", tag)
    lines = [b"t|1|%d|%b" % (n, b"x" * (n * 37 % 700)) for n in range(300)]
    for at in range(0, 300, 60):
        text = b"".join(line + b"\n" for line in lines[at : at + 60])
        put_all(writer, raw, [b"__" + text + b"__"], sender, margin=2)
    assert sender.sent == 300
    got, n = [], 1
    for data, done in writes:
        assert len(data) == done <= PIPE_BUF
        header, _, body = data.partition(b"\n")
        count = body.count(b"\n")
        said = b"!c 1732190000000000000.123456 %d %d l=%d" % (n, count, len(body))
        assert header == (said + b" " + tag if tag else said) and 0 < count <= max_group
        assert len(header) + 1 <= sender.header_room
        n += count
        got += body.split(b"\n")[:-1]
    assert got == lines
    if max_group == 128:  # as many as one write takes, not fewer
        assert len(writes) < 1.15 * sum(map(len, lines)) / (PIPE_BUF - sender.header_room) + 5


def test_a_long_message_goes_as_pieces_with_its_group_around_the_last_one(raw, writes):
    writer, sender = FifoWriter(raw, 128), Sender(b"17.1", b"p=me")
    room = PIPE_BUF - sender.header_room
    for size in (room - 1, room, room + 1, PIPE_BUF, PIPE_BUF + 1, 2 * PIPE_BUF - sender.header_room, 100_000):
        writes.clear()
        sender.sent = 6  # 7 and 9 are short
        line = b"t|1|7|" + b"y" * (size - 6)
        text = b"t|1|6|x\n" + line + b"\nt|1|8|x\n"
        got, _ = put_all(writer, raw, [text], sender)
        assert all(len(data) == done <= PIPE_BUF for data, done in writes), size
        assert sender.sent == 9
        if size < room:
            assert b"+" not in got
            continue
        *firsts, last, after = [data for data, _ in writes][1:]
        assert after == b"!c 17.1 9 1 l=8 p=me\nt|1|8|x\n"
        header, mark_and_end = last.split(b"\n", 1)
        assert header == b"!c 17.1 8 1 l=%d p=me" % len(mark_and_end) and mark_and_end[:1] == b"-"
        assert all(first[:1] == b"+" and first[-1:] == b"\n" for first in firsts)
        assert b"".join(first[1:-1] for first in firsts) + mark_and_end[1:-1] == line


def test_a_clogged_pipe_keeps_the_order_and_the_numbers_of_every_sender(raw, writes):
    """Whatever was read between, the framer finds each connection's messages whole, in order and numbered on."""
    rng = random.Random(8)
    writer, got, clogs = FifoWriter(raw, 7), b"", 0
    senders = [Sender(b"17.%d" % n, tag) for n, tag in enumerate([b"", b"p=a", b"w=b"], start=1)]
    sent = {sender: [] for sender in (*senders, None)}
    for turn in range(600):
        sender = rng.choice([*senders, None])
        sizes = rng.choices([5, 80, 4000, 4092, 5000, 60_000], [20, 20, 3, 2, 2, 1], k=rng.randrange(1, 30))
        lines = [b"t|%d|%d|%b" % (turn, turn * 30 + n, b"z" * size) for n, size in enumerate(sizes)]
        sent[sender] += lines
        more, clogged = put_all(writer, raw, [b"".join(line + b"\n" for line in lines)], sender)
        got, clogs = got + more, clogs + clogged
    assert all(len(data) == done <= PIPE_BUF for data, done in writes) and clogs > 100
    steps = Steps(table(count=1 << 20), max_line=1 << 16)
    steps.read(got)
    answers, stored = one_by_one(steps.replies), dict(enumerate(steps.lines, start=1))
    for sender in senders:
        said = [answers.pop((sender.name, n)) for n in range(1, len(sent[sender]) + 1)]
        found = [stored.pop(int(reply.removeprefix(b"ack "))) for reply in said]
        assert [line.replace(b";" + sender.tag[1:], b"") if sender.tag else line for line in found] == sent[sender]
        assert sender.sent == len(sent[sender])
    assert not answers and list(stored.values()) == sent[None] and not steps.waiting


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
