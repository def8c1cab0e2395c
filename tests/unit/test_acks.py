"""The FIFO `acks`: whole lines, in order, and a reader that stands still never stops the writer."""

import os

import pytest

from kmq.config.values import PIPE_BUF
from kmq.links import fifo
from kmq.links.fifo import AckReader, AckWriter, open_fifo


@pytest.fixture
def fd(tmp_path):
    made = open_fifo(str(tmp_path), "acks")
    yield made
    os.close(made)


@pytest.fixture
def writes(monkeypatch):
    """Everything that is written, write by write."""
    seen, write = [], os.write

    def record(fd, data):
        written = write(fd, data)
        seen.append((bytes(data), written))
        return written

    monkeypatch.setattr(fifo.os, "write", record)
    return seen


def replies(first, count):
    return [b"17.1 %d !ack %d %d" % (n, n, n + 1000) for n in range(first, first + count)]


def text(lines):
    return b"".join(line + b"\n" for line in lines)


def take_all(reader):
    lines = []
    while more := reader.take():
        lines += more
    return lines


def fill(fd):
    """Lines of a kilobyte until it takes no more; how many."""
    count = 0
    try:
        while True:
            os.write(fd, b"f" * 1023 + b"\n")
            count += 1
    except BlockingIOError:
        return count


def test_replies_come_out_as_they_went_in(fd):
    writer, reader = AckWriter(fd), AckReader(fd)
    assert reader.take() == []
    writer.put(text(replies(1, 3)))
    writer.put(text(replies(4, 1)))
    assert reader.take() == replies(1, 4)
    assert not writer.waiting and writer.lost == 0


def test_every_write_is_whole_lines_and_atomic(fd, writes):
    AckWriter(fd).put(text(replies(1, 5000)))
    assert len(writes) > 10
    assert all(len(data) == done <= PIPE_BUF and data.endswith(b"\n") for data, done in writes)
    assert take_all(AckReader(fd)) == replies(1, 5000)


def test_what_a_full_fifo_does_not_take_waits_and_comes_in_order(fd):
    writer, reader = AckWriter(fd), AckReader(fd)
    filled = fill(fd)
    assert filled == fifo.CAPACITY >> 10
    for first in range(1, 40_000, 1000):
        writer.put(text(replies(first, 1000)))
    assert writer.waiting and writer.lost == 0
    got = []
    while writer.waiting:
        got += reader.take()
        writer.flush()
    got += take_all(reader)
    assert got[filled:] == replies(1, 40_000)


def test_what_nobody_reads_is_lost_beyond_a_bound_and_counted(fd, monkeypatch):
    monkeypatch.setattr(fifo, "KEEP_BYTES", 10_000)
    writer, reader = AckWriter(fd), AckReader(fd)
    filled = fill(fd)
    fits, falls_out, small = (text(replies(*which)) for which in ((1, 300), (301, 200), (501, 5)))
    assert len(fits) < 10_000 < len(fits) + len(falls_out) and len(fits) + len(small) < 10_000
    for each in (fits, falls_out, small):
        writer.put(each)
    assert writer.lost == len(falls_out)
    got = take_all(reader)
    writer.flush()
    assert (got + take_all(reader))[filled:] == replies(1, 300) + replies(501, 5)
    writer.put(falls_out)  # there is room again, also by our own count
    assert take_all(reader) == replies(301, 200) and writer.lost == len(falls_out)


def test_what_a_flood_of_empty_lines_is_answered_waits_for_a_slow_ingress(fd):
    """Six connections had 18 MiB of refusals on their way. What does not fit is lost, whoever waits for it."""
    writer, reader = AckWriter(fd), AckReader(fd)
    filled = fill(fd)
    refused = [b"1795276288490144000.1 %d !err %d empty_line" % (n, n) for n in range(1, 400_001)]
    for at in range(0, len(refused), 8192):
        writer.put(text(refused[at : at + 8192]))
    assert writer.lost == 0
    got = take_all(reader)
    while writer.waiting:
        writer.flush()
        got += take_all(reader)
    assert got[filled:] == refused


def test_a_line_that_is_read_in_two_parts_is_one(fd):
    reader = AckReader(fd)
    os.write(fd, b"17.1 1 !ack 1 5\n17.1 2 !a")
    assert reader.take() == [b"17.1 1 !ack 1 5"]
    assert reader.take() == []
    os.write(fd, b"ck 2 6\n")
    assert reader.take() == [b"17.1 2 !ack 2 6"]
