"""The ring `received`: one writer and one reader at a time, room only behind what is framed, and no ring of anybody else."""

import os

import pytest
from fake_logger import FakeLogger

from kmq.errors import EXIT_BUSY, EXIT_CONFIG, BusyError, ConfigError
from kmq.links import layout, ownership, received
from kmq.links.layout import BASE_SEQ, TAIL, WRITER_SLEEPS
from kmq.links.received import ReceivedReader, ReceivedWriter

SIZE = 1 << 16


def identity(data_id="contract", size=SIZE):
    return layout.make_identity(data_id, 0, size, 0, "block")


@pytest.fixture
def log():
    return FakeLogger()


@pytest.fixture
def acks():
    """(reading end, writing end) of the FIFO that wakes ingress."""
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.fixture
def writer(instance, log):
    end = ReceivedWriter(instance, identity(), "pid=1 stage=ingress", log)
    yield end
    end.close()


@pytest.fixture
def reader(instance, writer, acks):
    end = ReceivedReader.attach(instance, "contract", "pid=2 stage=framer", acks[1])
    yield end
    end.close()


def test_a_second_writer_is_refused_and_told_who_writes(instance, writer, log, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", 0.05)
    with pytest.raises(BusyError, match=rf"ring {instance}\.received \(writer\) is held by pid=1 stage=ingress") as err:
        ReceivedWriter(instance, identity(), "another", log)
    assert err.value.exit_code == EXIT_BUSY


def test_a_second_reader_is_refused_and_told_who_reads(instance, reader, acks, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", 0.05)
    with pytest.raises(BusyError, match=rf"ring {instance}\.received \(reader\) is held by pid=2 stage=framer") as err:
        ReceivedReader.attach(instance, "contract", "another", acks[1])
    assert err.value.exit_code == EXIT_BUSY


def test_both_ends_are_free_once_they_are_given_back(instance, log, acks):
    for _ in range(2):
        writer = ReceivedWriter(instance, identity(), "one", log)
        reader = ReceivedReader.attach(instance, "contract", "two", acks[1])
        birth = writer.birth
        for end in (writer, reader):
            end.close()
    assert log.names == ["ring_created"] and birth == writer.birth


def test_the_next_writer_goes_on_where_the_ring_was_shown(instance, log):
    first = ReceivedWriter(instance, identity(), "one", log)
    first.put([b"shown\n"], 6)
    first.publish()
    first.put([b"not shown\n"], 10)
    first.close()
    second = ReceivedWriter(instance, identity(), "two", log)
    assert second.head == 6 and second.put([b"next\n"], 5) == 6
    second.close()


def test_nothing_is_read_of_a_ring_of_another_data_directory(instance, writer, acks):
    assert ReceivedReader.attach(instance, "another", "the framer", acks[1]) is None


@pytest.mark.parametrize("at", [layout.IDENTITY, layout.BLOCKS + SIZE - 1], ids=["another version", "cut off"])
def test_nothing_is_read_of_a_ring_of_another_layout_or_size(instance, writer, acks, at):
    with open(writer.path, "r+b") as file:
        if at:
            file.truncate(at)
        else:
            text = layout.read_text(file.fileno(), layout.IDENTITY)
            file.write(text.replace("layout=", "layout=9").encode().ljust(layout.TEXT, b"\0"))
    assert ReceivedReader.attach(instance, "contract", "the framer", acks[1]) is None
    os.truncate(writer.path, layout.BLOCKS + SIZE)


@pytest.mark.parametrize("other", [identity("another"), identity(size=SIZE * 2)], ids=["data directory", "size"])
def test_an_empty_ring_of_another_kind_is_made_anew_with_another_birth(instance, log, other):
    old = ReceivedWriter(instance, other, "one", log)
    old.close()
    new = ReceivedWriter(instance, identity(), "two", log)
    assert log.names == ["ring_created", "ring_recreated", "ring_created"]
    assert new.birth > old.birth and new.head == 0 == new.cells[TAIL]
    new.close()


def test_a_ring_of_another_data_directory_that_holds_lines_is_made_anew(instance, log):
    old = ReceivedWriter(instance, identity("another"), "one", log)
    old.put([b"theirs\n"], 7)
    old.publish()
    old.close()
    new = ReceivedWriter(instance, identity(), "two", log)
    assert log.of("ring_recreated")[0]["discarded_bytes"] == 7 and new.head == 0
    new.close()


def test_a_ring_of_another_size_that_holds_lines_is_refused_and_kept(instance, log):
    old = ReceivedWriter(instance, identity(size=SIZE * 2), "one", log)
    old.put([b"ours\n"], 5)
    old.publish()
    old.close()
    with pytest.raises(ConfigError, match="holds 5 bytes of messages under other settings") as err:
        ReceivedWriter(instance, identity(), "two", log)
    assert err.value.exit_code == EXIT_CONFIG
    again = ReceivedWriter(instance, identity(size=SIZE * 2), "three", log)
    assert again.head == 5
    again.close()


def test_room_comes_back_with_the_tail_and_a_sign_wakes_the_writer_that_asked(writer, reader, acks):
    piece = b"x" * (SIZE // 4 - 1) + b"\n"
    assert [writer.put([piece], len(piece)) for _ in range(4)] == [n * len(piece) for n in range(4)]
    writer.publish()
    reader.release(len(piece) // 2)
    with pytest.raises(BlockingIOError):
        os.read(acks[0], 10)  # nobody has asked yet
    assert writer.put([piece], len(piece)) == -1
    assert writer.cells[WRITER_SLEEPS]
    reader.release(len(piece))
    assert os.read(acks[0], 10) == b"\n"
    assert writer.put([piece], len(piece)) == 4 * len(piece)
    assert not writer.cells[WRITER_SLEEPS]
    assert reader.text(len(piece), 2 * len(piece)) == piece, "what is not framed has been overwritten"


def test_what_is_put_is_not_there_before_it_is_published(writer, reader):
    writer.put([b"one\n"], 4)
    assert not reader.holds(0, 4)
    writer.publish()
    assert reader.holds(0, 4) and reader.text(0, 4) == b"one\n"
    assert not reader.holds(0, 5) and not reader.holds(4, 0)


def test_a_full_fifo_of_signs_stops_nobody(writer, reader, acks):
    while True:
        try:
            os.write(acks[1], b"\n" * 4096)
        except BlockingIOError:
            break
    writer.put([b"x" * SIZE], SIZE)
    writer.publish()
    assert writer.put([b"y"], 1) == -1
    reader.release(SIZE)
    assert writer.put([b"y"], 1) == SIZE


def test_who_asks_for_waiting_bytes_gets_those_between_tail_and_head(instance, writer, reader):
    assert received.waiting_bytes(instance) == 0 == received.waiting_bytes("no-such-instance")
    writer.put([b"one\n"], 4)
    writer.publish()
    assert received.waiting_bytes(instance) == 4
    reader.release(4)
    assert received.waiting_bytes(instance) == 0
    assert writer.cells[BASE_SEQ] == writer.birth == reader.birth
