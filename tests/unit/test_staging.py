"""The staging areas: a framer killed at any instant frames every byte of the FIFO once."""

import os
import random

import pytest
from ring_ends import put, taken

from kmq.config.values import KIB, MIB, PIPE_BUF
from kmq.links.layout import Consumed, Framed, Received, Stamp
from kmq.links.staging import READ_BYTES, StagingAreas, area_bytes

AREA = 8192
DONE = Received(1732190000, 12345)


@pytest.fixture
def pipe():
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.fixture
def ring(rings):
    return rings(extra=2 * AREA, slots=10_000)


def commit(writer, area, consumed):
    writer.commit(writer.last.consuming(Consumed(area, consumed, *DONE)))


def test_what_is_read_waits_as_whole_lines_and_a_rest(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    assert staging.read(pipe[0]) == 0 and staging.lines() == b""
    os.write(pipe[1], b"one\ntwo\nthr")
    assert staging.read(pipe[0]) == 11
    assert (staging.lines(), staging.unfinished()) == (b"one\ntwo\n", b"one\ntwo\nthr")


def test_a_restart_finds_what_was_read_and_not_framed(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"one\ntwo\nthr")
    staging.read(pipe[0])
    again = StagingAreas(ring[0], AREA)
    assert again.unfinished() == b"one\ntwo\nthr"
    commit(ring[0], 0, 4)
    again.adopt(ring[0].last)
    assert again.lines() == b"two\n"
    assert StagingAreas(ring[0], AREA).unfinished() == b"two\nthr"


def test_a_carry_that_was_not_committed_has_not_happened(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"one\ntwo\nthr")
    staging.read(pipe[0])
    assert staging.copy_rest(8) == 1
    again = StagingAreas(ring[0], AREA)
    assert (again.active, again.unfinished()) == (0, b"one\ntwo\nthr")
    commit(ring[0], again.copy_rest(8), 0)
    third = StagingAreas(ring[0], AREA)
    assert (third.active, third.unfinished()) == (1, b"thr")


def test_areas_are_swapped_in_a_commit_without_a_block_that_moves_both_positions(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"one\ntwo\nthr")
    staging.read(pipe[0])
    staging.swap_areas(4, DONE)
    last = ring[0].last
    assert (last.area, last.consumed, last.birth, last.position) == (1, 0, *DONE) and last.next_seq == 1
    assert staging.unfinished() == b"two\nthr" == StagingAreas(ring[0], AREA).unfinished()


def test_room_is_made_once_and_keeps_the_position(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"one\n" + b"x" * 9000)
    staging.read(pipe[0])
    assert staging.is_full and not staging.make_room()
    commit(ring[0], 0, 4)
    staging.adopt(ring[0].last)
    assert staging.make_room() and not staging.is_full and (ring[0].last.birth, ring[0].last.position) == DONE
    assert staging.read(pipe[0]) == 4 and staging.is_full and not staging.make_room()
    assert staging.unfinished() == b"x" * AREA


@pytest.mark.parametrize("swaps", [False, True])
def test_a_block_is_committed_with_the_bytes_and_the_position_it_came_from(ring, pipe, swaps):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"one\ntwo\nthr")
    staging.read(pipe[0])
    staging.append(Framed(b"1|2|one\n", Stamp(1, 1, 0, 5), b"", 4, DONE), swaps)
    last = ring[0].last
    assert (last.next_seq, last.birth, last.position) == (2, *DONE)
    assert (last.area, last.consumed) == ((1, 0) if swaps else (0, 4))
    assert staging.unfinished() == b"two\nthr" == StagingAreas(ring[0], AREA).unfinished()
    assert [data for data, *_ in taken(ring[1])] == [b"1|2|one\n"]


def test_an_area_full_of_an_endless_line_reads_no_more(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    os.write(pipe[1], b"x" * 10_000)
    assert staging.read(pipe[0]) == AREA and staging.read(pipe[0]) == 0
    assert staging.lines() == b"" and len(staging.unfinished()) == AREA


def test_leftovers_of_a_longer_carry_are_never_taken_for_content(ring, pipe):
    staging = StagingAreas(ring[0], AREA)
    for length in (5000, 3000, 10, 4000, 1):
        os.write(pipe[1], b"y" * length + b"\n" + b"z" * (length // 2))
        staging.read(pipe[0])
        waiting = staging.unfinished()
        commit(ring[0], staging.copy_rest(staging.consumed + len(staging.lines())), 0)
        staging.adopt(ring[0].last)
        assert staging.unfinished() == waiting[waiting.rfind(b"\n") + 1 :] == StagingAreas(ring[0], AREA).unfinished()


def test_killed_at_any_instant_every_line_is_framed_exactly_once(ring, pipe):
    """The framer's loop with a restart between any two steps; blocks are committed with the bytes they came from."""
    writer, reader = ring
    rng = random.Random(6)
    sent, framed, made, kills = [], [], b"", 0
    staging = StagingAreas(writer, AREA)

    def survives():
        nonlocal staging, kills
        if rng.randrange(4):
            return True
        staging, kills = StagingAreas(writer, AREA), kills + 1
        return False

    while len(sent) < 1500 or made or staging.unfinished():
        if len(sent) < 1500:
            sent.append(b"%d %b\n" % (len(sent), b"x" * rng.choice([0, 10, 100, 1500])))
            made += sent[-1]
        made = made[os.write(pipe[1], made[: rng.randrange(1, 3000)]) :] if made else made
        staging.read(pipe[0])
        if not survives():
            continue
        text = staging.lines()
        if text:
            lines = text.splitlines(keepends=True)
            part = b"".join(lines[: rng.randrange(1, len(lines) + 1)])
            consumed = staging.consumed + len(part)
            area, consumed = (staging.copy_rest(consumed), 0) if part == text else (staging.active, consumed)
            if not survives():
                continue
            assert writer.has_room(len(part), 1)
            writer.append(Framed(part, Stamp(writer.last.next_seq, 1, 0, 0)), Consumed(area, consumed, *DONE))
            framed += [data for data, *_ in taken(reader)]
            if survives():
                staging.adopt(writer.last)
    assert b"".join(framed) == b"".join(sent) and kills > 300


def test_an_area_holds_the_longest_unfinished_line_and_a_read():
    for max_line in (PIPE_BUF, 64 * KIB, MIB, 16 * MIB):
        assert area_bytes(max_line) >= max_line + READ_BYTES
        assert area_bytes(max_line) % 4096 == 0


def test_the_ring_before_the_areas_is_not_touched(ring, pipe):
    writer, reader = ring
    put(writer, b"block")
    staging = StagingAreas(writer, AREA)
    os.write(pipe[1], b"x" * 9000)
    staging.read(pipe[0])
    staging.copy_rest(0)
    assert [data for data, *_ in taken(reader)] == [b"block"]
