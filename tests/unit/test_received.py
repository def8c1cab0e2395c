"""The ring `received`: where bytes are put, when there is room again, and what a framer may believe of a line about it."""

import os
import random

import pytest
from fake_logger import FakeLogger
from received_ends import DATA_ID, Way, identity, joined

from kmq.config.values import KIB, MIB
from kmq.errors import BusyError, ConfigError
from kmq.links import layout, received
from kmq.links.layout import READER_SLEEPS, TAIL, WRITER_SLEEPS
from kmq.links.received import NAME, ReceivedReader, ReceivedWriter, ring_bytes

SIZE = 8192


@pytest.fixture
def way():
    made = Way(SIZE)
    made.attach()
    return made


def put(way, nbytes):
    """Put so many bytes, shown at once; return their position, or -1."""
    position = way.writer.put([b"x" * (nbytes - 1), b"\n"], nbytes)
    way.writer.publish()
    return position


def fill(way, nbytes):
    """Put pieces of this size until there is no room; return where the last one ends."""
    while put(way, nbytes) >= 0:
        pass
    return way.writer.head


def signs(way):
    """How often ingress was told that there is room."""
    try:
        data = os.read(way.signs, 1000)
    except BlockingIOError:
        return 0
    assert data.strip(b"\n") == b""
    return len(data)


def test_what_is_put_is_there_once_it_is_published(way):
    assert way.writer.put([b"one\n", bytearray(b"two\n"), memoryview(b"three\n")], 14) == 0
    assert not way.reader.holds(0, 14) and received.waiting_bytes(way.instance) == 0
    way.writer.publish()
    assert way.reader.holds(0, 14) and way.reader.text(0, 14) == b"one\ntwo\nthree\n"
    assert way.reader.text(4, 8) == b"two\n" and received.waiting_bytes(way.instance) == 14
    way.reader.release(14)
    assert received.waiting_bytes(way.instance) == 0


def test_pieces_adjoin_and_one_that_would_pass_the_end_goes_to_the_start(way):
    assert [put(way, 3000), put(way, 3000)] == [0, 3000]
    way.reader.release(3000)
    assert put(way, 2500) == SIZE  # 6000…8192 stays empty
    assert way.reader.holds(SIZE, SIZE + 2500) and not way.reader.holds(6000, SIZE + 2500)
    assert way.reader.text(3000, 6000) == b"x" * 2999 + b"\n"
    assert put(way, 500) == SIZE + 2500 and put(way, 1) == -1


def test_a_piece_may_end_at_the_very_end_and_fill_the_ring(way):
    assert put(way, 8000) == 0 and put(way, 192) == 8000
    assert put(way, 1) == -1
    way.reader.release(8000)
    assert put(way, 8000) == SIZE and put(way, 1) == -1
    assert way.reader.text(8000, SIZE) == b"x" * 191 + b"\n"


def test_an_empty_ring_begins_at_its_start_again(way):
    """The pages at the start are in the cache."""
    for lap in range(5):
        assert put(way, 2000) == lap * SIZE
        way.reader.release(way.writer.head)


@pytest.mark.parametrize("nbytes", [20, 100, 1000])
def test_the_ring_takes_all_its_bytes_less_one_piece_wherever_the_framer_stops(way, nbytes):
    rng = random.Random(nbytes)
    for _ in range(300):
        for _ in range(rng.randrange(5)):  # so that it stops here and there, all read or not
            if put(way, nbytes) >= 0 and rng.randrange(4):
                way.reader.release(way.writer.head)
        fill(way, nbytes)
        begin = max(way.writer.cells[TAIL], way.writer.cells[received._BEGIN])
        assert way.writer.head - begin > SIZE - 2 * nbytes  # a piece fits neither before the end nor before the oldest
        found = layout.filling(way.instance, NAME)
        assert (found.nbytes, found.capacity) == (way.writer.head - begin, SIZE)
        way.reader.release(begin + rng.randrange(way.writer.head - begin + 1))


def test_an_ingress_killed_between_the_two_stores_of_publish_leaves_a_ring_that_is_read_whole(way):
    """The head is stored before begin: begin would otherwise lie beyond it, and free bytes that were never read."""
    put(way, 2000)
    way.reader.release(2000)
    before = way.writer.cells[received._BEGIN]
    start = put(way, 3000)
    way.writer.cells[received._BEGIN] = before
    way.restart_ingress()
    assert start == SIZE and way.reader.text(start, start + 3000) == b"x" * 2999 + b"\n"
    while put(way, 500) >= 0:
        pass
    assert way.reader.text(start, start + 3000) == b"x" * 2999 + b"\n"
    way.reader.release(way.writer.head)
    assert put(way, SIZE) == 2 * SIZE


def test_whatever_fits_half_the_ring_fits_once_the_framer_has_read_all():
    """Or ingress would wait for ever: the rings of all settings hold twice the longest line and one receive."""
    rng = random.Random(3)
    way = Way(SIZE)
    way.attach()
    for _ in range(5000):
        assert put(way, rng.choice([rng.randrange(1, SIZE // 2 + 1), SIZE // 2, 1])) >= 0
        way.reader.release(way.writer.head)
    for max_line in (4096, MIB, 256 * MIB):
        assert ring_bytes(max_line) >= 2 * (max_line + 256 * KIB + 2) and ring_bytes(max_line) >= MIB


def test_random_pieces_are_read_as_they_were_put_however_late_they_are_released(way):
    rng, waiting, wraps, fulls = random.Random(1), [], 0, 0
    for n in range(5000):
        nbytes = rng.choice([1, 10, 200, 1500, 4000])
        data = bytes([33 + n % 90]) * (nbytes - 1) + b"\n"
        position = way.writer.put([data[:3], data[3:]], nbytes)
        if position >= 0:
            way.writer.publish()
            wraps += bool(waiting) and position > waiting[-1][0] + len(waiting[-1][1])
            waiting.append((position, data))
        for _ in range(rng.choice([0, 0, 1, 2, 9]) if position >= 0 else 1):
            if waiting:
                start, data = waiting.pop(0)
                assert way.reader.holds(start, start + len(data)) and way.reader.text(start, start + len(data)) == data
                way.reader.release(start + len(data))
        fulls += position < 0
    assert wraps > 100 and fulls > 100


def test_a_full_ring_asks_for_a_sign_and_the_next_release_gives_it(way):
    assert put(way, 100) == 0 and way.writer.cells[WRITER_SLEEPS] == 0
    way.reader.release(50)
    assert signs(way) == 0
    fill(way, 1000)
    assert way.writer.cells[WRITER_SLEEPS] == 1 and signs(way) == 0
    way.reader.release(1100)
    assert signs(way) == 1
    way.reader.release(1100)
    assert signs(way) == 0  # nothing became free
    assert put(way, 1000) >= 0 and way.writer.cells[WRITER_SLEEPS] == 0
    way.reader.release(2100)
    assert signs(way) == 0


def test_room_that_came_between_two_looks_is_seen_without_a_sign(way, monkeypatch):
    """The writer asks first and looks again then: a release between the two would have given no sign."""
    end = fill(way, 1000)
    way.writer.cells[WRITER_SLEEPS] = 0
    monkeypatch.setattr(received, "fence", lambda: way.reader.cells.__setitem__(TAIL, end))
    assert put(way, 1000) >= 0 and way.writer.cells[WRITER_SLEEPS] == 0


def test_a_sign_that_does_not_fit_the_fifo_is_not_needed(way):
    """Ingress is awake as long as there is something to read."""
    try:
        while True:
            os.write(way.acks, b"17.1 1 !ack 1 1\n" * 256)
    except BlockingIOError:
        pass
    fill(way, 1000)
    way.reader.release(1000)
    assert put(way, 1000) >= 0


def test_a_new_ingress_goes_on_behind_what_was_published_and_knows_that_it_may_be_waited_for(way):
    put(way, 100)
    way.writer.put([b"never published"], 15)
    way.restart_ingress()
    assert way.writer.head == 100 and put(way, 10) == 100
    fill(way, 1000)
    way.restart_ingress()
    assert way.writer.cells[WRITER_SLEEPS] == 1
    way.reader.release(way.writer.head)
    assert signs(way) == 1 and put(way, 1000) >= 0 and way.writer.cells[WRITER_SLEEPS] == 0


def test_a_release_never_goes_back(way):
    put(way, 3000)
    way.reader.release(2000)
    for position in (0, 1999, 2000):
        way.reader.release(position)
        assert way.writer.cells[TAIL] == 2000


@pytest.mark.parametrize(
    ("start", "end", "is_held"),
    [
        (6000, 7000, True),
        (6000, 6000, True),
        (SIZE, SIZE + 1000, True),
        (SIZE + 1000, SIZE + 1000, True),
        (7000, 6000, False),  # backwards
        (SIZE, SIZE + 1001, False),  # past the head
        (SIZE + 1001, SIZE + 1001, False),
        (10**18, 10**18 + 5, False),
        (7000, SIZE + 10, False),  # not in one piece
        (0, SIZE + 1000, False),  # more than the ring
    ],
)
def test_a_range_is_held_only_if_ingress_may_have_put_it_in_one_piece(way, start, end, is_held):
    put(way, 6000)
    way.reader.release(6000)
    put(way, 1000)
    assert way.writer.head == SIZE + 1000
    assert way.reader.holds(start, end) is is_held


def test_the_birth_is_that_of_the_ring_and_both_ends_and_a_restart_know_it(way):
    birth = way.writer.birth
    assert birth == way.reader.birth > 1_600_000_000 * 10**9
    way.restart_ingress()
    assert way.writer.birth == birth == way.attach().birth
    assert Way(SIZE).writer.birth != birth


def test_there_is_no_reading_end_until_ingress_has_made_the_ring(tmp_path):
    assert ReceivedReader.attach(f"unit-{os.getpid()}-none", DATA_ID, "framer", -1) is None
    assert received.waiting_bytes(f"unit-{os.getpid()}-none") == 0


def test_the_ring_of_another_data_directory_is_never_read_and_made_anew(way):
    put(way, 100)
    birth = way.writer.birth
    way.reader.close()
    way.reader = None
    assert ReceivedReader.attach(way.instance, "other", "framer", -1) is None
    way.writer.close()
    other, log, made = layout.make_identity("other", 0, SIZE, 0, "block"), FakeLogger(), []
    way.writer = ReceivedWriter(way.instance, other, "ingress", log, lambda: made.append(1))
    assert way.writer.birth != birth and way.writer.head == 0 and made == [1]
    assert log.names == ["ring_recreated", "ring_created"]
    assert way.attach() is None


def test_a_ring_of_another_size_is_read_as_it_is_and_made_anew_only_when_it_is_empty(way):
    """KMQ_MAX_LINE was changed: the framer must first read what waits, under the settings of that time."""
    put(way, 100)
    way.reader.close()
    way.reader = None
    way.writer.close()

    def larger():
        return ReceivedWriter(way.instance, identity(2 * SIZE), "ingress", FakeLogger())

    with pytest.raises(ConfigError, match="holds 100 bytes of messages under other settings"):
        larger()
    assert way.attach().size == SIZE
    way.reader.release(100)
    way.reader.close()
    way.reader = None
    way.writer = larger()
    assert way.writer.size == 2 * SIZE == way.attach().size


def test_each_end_belongs_to_one_process(way, monkeypatch):
    monkeypatch.setattr("kmq.links.ownership.OWNER_WAIT_S", 0.05)
    with pytest.raises(BusyError, match=r"\(writer\) is held by ingress"):
        way.new_writer()
    with pytest.raises(BusyError, match=r"\(reader\) is held by framer"):
        ReceivedReader.attach(way.instance, DATA_ID, "another", -1)


def test_a_ring_whose_file_is_gone_is_written_again_with_what_waits(way):
    """By its writer, or by its reader once the writer is gone."""
    put(way, 100)
    way.reader.release(40)
    os.unlink(way.writer.path)
    assert not way.writer.is_in_place() and not way.reader.is_in_place()
    assert way.writer.may_write_again() and not way.reader.may_write_again()
    assert way.writer.write_again()
    birth = way.writer.birth
    way.restart_ingress()
    reader = way.attach()
    assert (reader.birth, way.writer.head, way.writer.cells[TAIL]) == (birth, 100, 40)
    assert reader.text(40, 100) == b"x" * 59 + b"\n" and reader.is_in_place()
    os.unlink(way.writer.path)
    way.writer.close()
    assert reader.may_write_again() and reader.write_again()
    way.writer = way.new_writer()
    assert way.writer.birth == birth and way.writer.head == 100


def test_the_two_processes_write_no_cell_of_the_other(way):
    """The reader's cells lie behind the writer's; a release changes the tail alone."""
    put(way, 100)
    before = way.writer.cells.tolist()
    way.reader.release(60)
    changed = [cell for cell, value in enumerate(way.writer.cells.tolist()) if value != before[cell]]
    assert changed == [TAIL] and TAIL // 8 not in {cell // 8 for cell in (*layout.RECORD, WRITER_SLEEPS)}
    assert way.writer.cells[READER_SLEEPS] == 0


def test_lines_joined_come_out_as_lines(way):
    start, end = way.put([b"a", b"b"])
    assert way.reader.text(start, end) == joined([b"a", b"b"])
    assert layout.shm_path(way.instance, NAME) == way.writer.path
