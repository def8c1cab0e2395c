"""Both ends of a ring in one process: what fits, what wraps, what is dropped, what a commit puts in force."""

import os
import random
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from ring_ends import put, taken

from kmq.errors import BusyError, ConfigError
from kmq.links import layout, ring
from kmq.links.layout import NOTHING_STAGED, Consumed, Framed, RingCommit, Stamp
from kmq.links.ring import RingObserver, RingReader, RingWriter


def cells(record):
    """What a record of the writer holds."""
    return {name: getattr(record, name) for name in RingCommit.__slots__}


def test_a_block_comes_out_as_it_went_in(rings):
    writer, reader = rings(first_seq=41)
    consumed = Consumed(area=1, offset=99, birth=1732190000, position=12345)
    writer.append(Framed(b"two\nlines\n", Stamp(41, 2, 3, 1234567)), consumed)
    [block] = reader.take()
    assert bytes(block.data) == b"two\nlines\n"
    assert (block.first_seq, block.last_seq, block.count, block.key_length, block.recv_ts) == (41, 42, 2, 3, 1234567)
    assert reader.take() == []
    last = reader.committed()
    assert (last.next_seq, last.last_ts, last.area, last.consumed, last.messages) == (43, 1234567, 1, 99, 2)
    assert (last.birth, last.position) == (1732190000, 12345)
    assert reader.base_seq == 41


@pytest.mark.parametrize(("most", "counts"), [(1, [1] * 5), (20, [2, 2, 1]), (21, [3, 2]), (50, [5]), (1 << 40, [5])])
def test_a_reader_takes_about_as_many_bytes_as_it_asks_for_and_at_least_a_block(rings, most, counts):
    writer, reader = rings()
    for _ in range(5):
        put(writer, b"x" * 10)
    found = [reader.take(most) for _ in (*counts, "none left")]
    assert list(map(len, found)) == [*counts, 0]
    assert [block.first_seq for blocks in found for block in blocks] == [1, 2, 3, 4, 5]


def test_replies_travel_with_their_block_apart_from_its_lines(rings):
    writer, reader = rings(first_seq=41)
    writer.append(Framed(b"two\nlines\n", Stamp(41, 2, 3, 5), b"17.1 1 !ack 2 42\n"))
    writer.append(Framed(b"", Stamp(43, 0, 0, 5), b"17.1 3 !dup 3 7\n"))
    writer.append(Framed(b"x\n", Stamp(43, 1, 0, 5)))
    assert [block.first_seq for block in writer.waiting()] == [41, 43, 43]
    assert [bytes(block.data) for block in writer.waiting()] == [b"two\nlines\n", b"", b"x\n"]
    blocks = reader.take()
    assert [(bytes(block.data), block.replies) for block in blocks] == [
        (b"two\nlines\n", b"17.1 1 !ack 2 42\n"),
        (b"", b"17.1 3 !dup 3 7\n"),
        (b"x\n", b""),
    ]
    assert [(block.first_seq, block.last_seq, block.count) for block in blocks] == [
        (41, 42, 2),
        (43, 42, 0),
        (43, 43, 1),
    ]
    reader.release(blocks[0])
    assert writer.first_waiting_seq() == 43 and len(writer.waiting()) == 2
    reader.release(blocks[-1])
    assert writer.waiting() == [] and layout.is_drained(writer.instance, "framed")


def test_what_waits_is_the_same_at_both_ends_wherever_the_ring_wraps(rings):
    rng = random.Random(2)
    writer, reader = rings(nbytes=8192, slots=10_000)
    skipped = 0
    for _ in range(2000):
        data, replies = (bytes([rng.randrange(256)]) * rng.choice([0, 1, 64, 700, 3000]) for _ in range(2))
        data = data[: writer.limits.nbytes - len(replies)]
        if writer.has_room(len(data) + len(replies), 1):
            before = writer.last.head
            writer.append(Framed(data, Stamp(writer.last.next_seq, 1, 0, 5), replies))
            skipped += writer.last.head - before > layout.block_bytes(len(data) + len(replies))
        else:
            reader.position = reader.tail
            there = [(b.first_seq, bytes(b.data), b.replies, b.end) for b in writer.waiting()]
            blocks = reader.take()
            assert [(b.first_seq, bytes(b.data), b.replies, b.end) for b in blocks] == there
            reader.release(blocks[rng.randrange(len(blocks))])
    assert skipped > 100


def test_a_skip_to_the_start_of_the_ring_does_not_count_as_full(rings):
    writer, reader = rings(nbytes=1 << 16)
    instance = writer.path.rpartition("/")[2].removesuffix(".framed")
    for _ in range(5):  # each begins at the start again, because the ring is empty
        assert put(writer, b"x" * 100)
        found = layout.filling(instance, "framed")
        assert (found.messages, found.nbytes) == (1, layout.block_bytes(100))
        taken(reader)


def test_what_is_not_released_is_seen_again_by_the_next_reader(rings):
    writer, reader = rings()
    for data in (b"a\n", b"b\n", b"c\n"):
        put(writer, data)
    blocks = reader.take()
    reader.release(blocks[0])
    assert writer.first_waiting_seq() == 2
    reader.lock.release()
    again = RingReader.attach(reader.instance, "framed", reader.identity, "another")
    assert again.first_waiting_seq() == 2
    assert [data for data, *_ in taken(again)] == [b"b\n", b"c\n"]
    again.lock.release()


def test_the_next_writer_goes_on_where_the_last_one_stopped(rings):
    writer, reader = rings()
    put(writer, b"a\n")
    writer.lock.release()
    again = RingWriter(writer.instance, "framed", writer.identity, "another", lambda: pytest.fail("not new"), None)
    assert not again.created and again.last.next_seq == 2
    put(again, b"b\n")
    assert taken(reader) == [(b"a\n", 1, 1), (b"b\n", 2, 1)]
    again.lock.release()


def test_blocks_of_every_size_wrap_around_and_stay_in_order(rings):
    rng = random.Random(1)
    writer, reader = rings(nbytes=8192, slots=10_000)
    sent, got, waited = [], [], 0
    while len(sent) < 3000:
        data = bytes([rng.randrange(256)]) * rng.choice([0, 1, 63, 64, 65, 500, writer.limits.nbytes])
        if put(writer, data):
            sent.append(data)
        else:
            waited += 1
            blocks = reader.take()
            block = blocks[rng.randrange(len(blocks))]  # release some of them, as a reader that is killed may
            got += [bytes(b.data) for b in blocks if b.end <= block.end]
            reader.release(block)
            reader.position = reader.tail
    got += [data for data, *_ in taken(reader)]
    assert got == sent and waited > 100
    assert reader.committed().head > 50 * writer.size


@pytest.mark.parametrize("nbytes", [4096, 4160, 8192, 64 * 129])
def test_a_block_of_half_the_ring_fits_an_empty_ring_at_every_position(rings, nbytes):
    writer, reader = rings(nbytes=nbytes)
    for _ in range(writer.size // 64):
        place = writer.last.head % writer.size
        assert put(writer, b"x" * writer.limits.nbytes), place
        assert len(taken(reader)) == 1
        writer.commit(
            RingCommit(writer.last.head + 64 + (place - writer.last.head) % writer.size, 0, 0, 0, *NOTHING_STAGED, 0)
        )
        reader.cells[layout.TAIL] = reader.position = writer.last.head
    places = {(place + 64) % writer.size for place in range(0, writer.size, 64)}
    assert len(places) == writer.size // 64


@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
@pytest.mark.parametrize("slots", [64, 10_000])
def test_a_ring_takes_its_slots_or_its_bytes_less_one_block_wherever_its_reader_stops(rings, policy, slots):
    rng = random.Random(slots)
    writer, reader = rings(nbytes=8192, slots=slots, policy=policy)
    for _ in range(300):
        for _ in range(rng.randrange(5)):
            put(writer, b"x" * rng.randrange(300))
            if rng.randrange(4):
                taken(reader)
        while writer.fits(
            writer._position_for(100)[0] + layout.block_bytes(100), 1
        ):  # under drop_oldest: without dropping
            put(writer, b"x" * 100)
        found = layout.filling(writer.instance, "framed")
        # Or a block fits neither before the end nor before the oldest.
        assert found.messages == slots or found.nbytes > found.capacity - 2 * layout.block_bytes(100)
        blocks = reader.take()
        if rng.randrange(2):
            reader.release(blocks[rng.randrange(len(blocks))])
            reader.position = reader.tail
        else:
            reader.release(blocks[-1])


def test_an_empty_ring_begins_at_its_start_again(rings):
    """The pages at the start are in the cache. Its reader, and the next one, go there."""
    writer, reader = rings(nbytes=8192)
    for lap in range(5):
        assert put(writer, b"%d" % lap * 500) and writer.last.begin == lap * 8192
        if lap % 2:
            reader.lock.release()
            reader = RingReader.attach(reader.instance, "framed", reader.identity, "another")
        assert [data for data, *_ in taken(reader)] == [b"%d" % lap * 500]
    reader.lock.release()


def test_two_blocks_of_half_the_ring_fill_it_when_they_start_at_its_beginning(rings):
    writer, reader = rings(nbytes=8192)
    assert put(writer, b"x" * writer.limits.nbytes) and put(writer, b"y" * writer.limits.nbytes)
    assert not put(writer, b"")
    assert len(taken(reader)) == 2


def test_capacity_in_messages(rings):
    writer, reader = rings(slots=8)
    assert writer.limits.count == 2
    for _ in range(4):
        assert put(writer, b"x", 2)
    assert not writer.has_room(1, 1)
    [first, *_] = reader.take()
    reader.release(first)
    assert writer.has_room(1, 2) and not writer.has_room(1, 3)


def test_a_block_of_more_messages_than_slots_fits_an_empty_ring(rings):
    writer, _ = rings(slots=4)
    assert writer.has_room(1, 1000)


def test_capacity_in_bytes(rings):
    writer, _ = rings(nbytes=4096, slots=10_000)
    count = 0
    while put(writer, b"x" * 64):
        count += 1
    assert count == 4096 // 128


def test_wait_room_says_whether_there_is_any(rings):
    writer, reader = rings(slots=4)
    for _ in range(4):
        put(writer, b"x")
    assert not writer.wait_room(1, 1)
    taken(reader)
    assert writer.wait_room(1, 1)
    assert writer.cells[layout.WRITER_SLEEPS] == 0


def dropping(rings, **sizes):
    return rings(policy="drop_oldest", **sizes)


def test_drop_oldest_never_blocks_and_the_reader_sees_a_gap_at_the_head_of_a_list(rings):
    writer, reader = dropping(rings, slots=8)
    for n in range(20):
        assert put(writer, b"%d\n" % n)
    blocks = reader.take()
    assert reader.jumped
    assert [block.first_seq for block in blocks] == list(range(13, 21))
    assert [bytes(block.data) for block in blocks] == [b"%d\n" % n for n in range(12, 20)]
    reader.release(blocks[-1])
    put(writer, b"next\n")
    assert len(reader.take()) == 1 and not reader.jumped


def test_a_gap_begins_a_list_of_its_own(rings, monkeypatch):
    writer, reader = dropping(rings, slots=4)
    for _ in range(4):
        put(writer, b"x")
    look, looked = ring.block_at, []

    def overtaken(ring, position, head):
        block = look(ring, position, head)
        looked.append(position)
        if len(looked) == 1:
            for _ in range(3):
                put(writer, b"y")  # drops what the reader has, and two more
        return block

    monkeypatch.setattr(ring, "block_at", overtaken)
    first = reader.take()
    assert [block.first_seq for block in first] == [1] and not reader.jumped
    second = reader.take()
    assert [block.first_seq for block in second] == [4, 5, 6, 7] and reader.jumped


def test_a_block_that_is_overwritten_while_it_is_read_is_not_trusted(rings, monkeypatch):
    writer, reader = dropping(rings, slots=1000, nbytes=4096)
    put(writer, b"old" * 100)
    raced = []

    def overtake():
        """Between the copy and the look at the floor."""
        if not raced:
            raced.append(True)
            while writer.cells[layout.FLOOR] == 0:
                put(writer, b"new" * 100)

    monkeypatch.setattr("kmq.links.ring.fence", overtake)
    blocks = reader.take() or reader.take()
    assert raced and reader.jumped
    assert blocks[0].first_seq > 1 and {bytes(block.data) for block in blocks} == {b"new" * 100}


def test_a_gap_made_while_no_reader_lived_is_told_to_the_next_one(rings):
    writer, reader = dropping(rings, slots=4)
    put(writer, b"x")
    assert len(taken(reader)) == 1
    reader.lock.release()
    for _ in range(10):
        put(writer, b"x")
    again = RingReader.attach(reader.instance, "framed", reader.identity, "another")
    assert again.take()[0].first_seq == 8 and again.jumped
    again.lock.release()


def test_the_floor_never_passes_the_head_while_the_reader_empties_a_full_ring(rings, monkeypatch):
    """The writer finds no room; before it drops anything the reader releases all. There is nothing left to drop."""
    writer, reader = dropping(rings, slots=1000, nbytes=4096)
    for _ in range(10):  # more than a lap: the bytes at the head look like the header of a block
        put(writer, b"x" * 500)
    fits, raced = writer.fits, []

    def reader_is_faster(end, count):
        room = fits(end, count)
        if not room and not raced:
            raced.append(taken(reader))
        return room

    monkeypatch.setattr(writer, "fits", reader_is_faster)
    assert writer.has_room(4, 1)
    assert raced and writer.cells[layout.FLOOR] <= writer.last.head
    put(writer, b"last")
    assert [data for data, *_ in taken(reader)] == [b"last"]


def test_a_commit_is_in_force_as_a_whole_or_not_at_all(rings):
    """A writer that dies anywhere before the counter store leaves the record that was in force."""
    writer, reader = rings()
    put(writer, b"a")
    before = cells(reader.committed())
    spare = layout.RECORD[writer.cells[layout.COUNTER] + 1 & 1]
    for at in range(len(RingCommit.__slots__)):
        writer.cells[spare + at] = 12345
        assert cells(reader.committed()) == before
    put(writer, b"b")
    assert reader.committed().next_seq == 3


def test_a_commit_without_a_block_moves_only_the_staging_cells(rings):
    writer, reader = rings()
    put(writer, b"a")
    last = writer.last
    writer.commit(last.consuming(Consumed(1, 77, 1732190000, 12345)))
    moved = {"area": 1, "consumed": 77, "birth": 1732190000, "position": 12345}
    assert cells(reader.committed()) == {**cells(last), **moved}
    assert len(taken(reader)) == 1


def test_synced_and_failed_are_said_by_the_reader_and_survive_it(rings):
    _, reader = rings()
    assert reader.synced_seq is None and not reader.sync_failed
    reader.set_synced(0)
    reader.sync_failed = True
    reader.lock.release()
    again = RingReader.attach(reader.instance, "framed", reader.identity, "another")
    assert again.synced_seq == 0 and again.sync_failed
    again.lock.release()


@pytest.mark.parametrize("change", ["data_id", "slots", "ring_bytes", "extra", "policy"])
def test_a_ring_that_is_not_ours_is_never_read(rings, change):
    writer, reader = rings()
    put(writer, b"a")
    reader.lock.release()
    other = layout.make_identity("unit", 64, 1 << 16, 0, "block")
    setattr(other, change, {"data_id": "other", "policy": "drop_oldest"}.get(change, 8192))
    assert RingReader.attach(reader.instance, "framed", other, "stranger") is None


def reopen(writer, identity, log):
    writer.lock.release()
    return RingWriter(writer.instance, "framed", identity, "another", lambda: (100, 0), log)


def test_a_writer_refuses_to_throw_away_what_waits_under_other_settings(rings):
    writer, reader = rings()
    put(writer, b"a")
    reader.lock.release()
    with pytest.raises(ConfigError, match="holds 128 bytes of messages under other settings"):
        reopen(writer, layout.make_identity("unit", 32, 1 << 16, 0, "block"), FakeLogger())


@pytest.mark.parametrize("data_id", ["unit", "other"])
def test_an_empty_ring_or_one_of_another_directory_is_made_anew(rings, data_id):
    writer, reader = rings()
    put(writer, b"a")
    if data_id == "unit":
        taken(reader)
    reader.lock.release()
    logger = FakeLogger()
    again = reopen(writer, layout.make_identity(data_id, 32, 1 << 16, 0, "block"), logger)
    assert again.created and again.last.next_seq == 100 and logger.names == ["ring_recreated", "ring_created"]
    again.lock.release()


def test_a_ring_is_not_recreated_under_its_living_reader(rings, monkeypatch):
    monkeypatch.setattr("kmq.links.ownership.OWNER_WAIT_S", 0.05)
    writer, _ = rings()
    with pytest.raises(BusyError, match="is held by the reader"):
        reopen(writer, layout.make_identity("other", 64, 1 << 16, 0, "block"), FakeLogger())


def test_an_observer_that_is_closed_gives_its_file_back_once_nobody_looks_at_its_blocks(rings):
    writer, _ = rings()
    put(writer, b"x")

    def count():
        return sum(os.readlink(entry) == writer.path for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())

    before = count()
    observer = RingObserver.find(writer.instance, "framed", writer.identity)
    [(_, block)] = observer.take()
    observer.close()
    assert bytes(block.data) == b"x"
    del observer, block
    assert count() == before


def test_backlog_and_is_drained_look_from_outside(rings):
    writer, reader = rings()
    name = writer.instance
    assert layout.is_drained(name, "framed", "durable") and layout.backlog(name, "framed") == 0
    put(writer, b"x", 3)
    assert not layout.is_drained(name, "framed") and layout.backlog(name, "framed") == 3
    taken(reader)
    assert layout.is_drained(name, "framed") and layout.backlog(name, "framed") == 0
    assert layout.backlog(name, "durable") == 0


def test_the_cells_of_the_two_processes_share_no_cache_line():
    writers = {
        layout.COUNTER,
        *layout.RECORD,
        layout.FLOOR,
        layout.FLOOR_MESSAGES,
        layout.WRITER_SLEEPS,
        layout.BASE_SEQ,
    }
    readers = {layout.TAIL, layout.TAIL_MESSAGES, layout.READER_SLEEPS, layout.SYNCED, layout.SYNC_FAILED}
    assert not {cell // 8 for cell in writers} & {cell // 8 for cell in readers}
    assert max(writers | readers) < (layout.BLOCKS - layout.CELLS) // 8
    assert layout.RECORD[1] - layout.RECORD[0] >= len(RingCommit.__slots__)
