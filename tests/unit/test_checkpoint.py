"""router.ckpt and dropped.log: small text files that decide what a restart does."""

import os
import zlib

import pytest
from fake_logger import FakeLogger
from made_up import no_room

from kmq.errors import RetryError
from kmq.log import checkpoint, dropped
from kmq.log.checkpoint import Checkpointer
from kmq.log.dropped import SeqRange, without
from kmq.log.partition import PartitionState
from kmq.log.topics import Since
from kmq.message.routing import Topic


def test_without_a_checkpoint_everything_is_replayed(data):
    assert checkpoint.load(data) == (0, {}, {}) and checkpoint.routed_seq(data) == 0


def test_a_checkpoint_is_read_as_it_was_written(data):
    os.makedirs(f"{data}/topics/jobs.eu/3")
    path = f"{data}/topics/jobs.eu/3/x.log"
    with open(path, "w"):
        pass
    states = {
        ("jobs.eu", 0): PartitionState(5, 16, 400),
        ("jobs.eu", 1): PartitionState(9, 12, 70, 3),
        ("t", 0): PartitionState(1, 17, 80),
    }
    writer = Checkpointer(data, no_room, FakeLogger())
    writer.start(checkpoint.text(17, states, [Topic("jobs.eu", 2, 11), Topic("t", 1, 17)]), [path], [])
    writer.finish()
    with open(f"{data}/router.ckpt") as file:
        body, crc = file.read().split("crc32|")
    assert body == "17\njobs.eu|0|5|16|400\njobs.eu|1|9|12|70\nt|0|1|17|80\njobs.eu|11|0,3\nt|17|0\n"
    assert int(crc) == zlib.crc32(body.encode())
    assert checkpoint.load(data) == (17, states, {"jobs.eu": Since(11), "t": Since(17)})
    assert checkpoint.routed_seq(data) == 17


def write(data, body):
    with open(f"{data}/router.ckpt", "wb") as file:
        file.write(b"%bcrc32|%d\n" % (body, zlib.crc32(body)))


@pytest.mark.parametrize("at", range(len(b"17\nt|0|1|17|80\nt|17|0\ncrc32|2021978473\n")))
def test_one_flipped_bit_or_a_cut_anywhere_makes_it_no_checkpoint(data, at):
    write(data, b"17\nt|0|1|17|80\nt|17|0\n")
    with open(f"{data}/router.ckpt", "rb") as file:
        text = file.read()
    for damaged in (text[:at], text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]):
        with open(f"{data}/router.ckpt", "wb") as file:
            file.write(damaged)
        with pytest.raises(ValueError, match="crc"):
            checkpoint.load(data)
        assert checkpoint.routed_seq(data) == 0


@pytest.mark.parametrize(
    "text",
    ["x\n", "5\nt|0|1\n", "5\nt|0|1|2|3\nt|1|0,0\n", "5\nt|0|1|2\n", "5\nt|0|1|2|3|4\n", "5\nt|0|a|2|3\n", "5\n\n"],
)
def test_what_is_no_checkpoint_is_said_to_be_none(data, text):
    write(data, text.encode())
    with pytest.raises((ValueError, LookupError)):
        checkpoint.load(data)


def test_a_checkpoint_that_failed_is_told_and_leaves_the_old_one(data):
    writer = Checkpointer(data, no_room, FakeLogger())
    writer.start(checkpoint.text(1, {}, []), [], [])
    writer.finish()
    writer.start(b"2\n", [f"{data}/topics/gone.log"], [])
    with pytest.raises(RetryError, match="checkpoint failed"):
        writer.finish()
    assert checkpoint.load(data)[0] == 1
    with pytest.raises(RetryError):
        _ = writer.busy


def ranges(data, ring):
    return [(r.first, r.last) for r in dropped.read(data, ring)]


def test_a_dropped_range_is_one_line_of_its_ring(data):
    dropped.append(data, "framed", 5, 9, no_room)
    dropped.append(data, "durable", 20, 20, no_room)
    dropped.append(data, "framed", 30, 31, no_room)
    assert ranges(data, "framed") == [(5, 9), (30, 31)] and ranges(data, "durable") == [(20, 20)]
    with open(f"{data}/dropped.log") as file:
        rows = [line.rstrip("\n").split("|") for line in file]
    assert [row[:4] for row in rows] == [
        ["framed", "5", "9", "5"],
        ["durable", "20", "20", "1"],
        ["framed", "30", "31", "2"],
    ]
    assert all(float(row[4]) > 1.7e9 for row in rows)


def test_a_torn_range_is_not_read_and_cut_by_the_next_writer(data):
    dropped.append(data, "framed", 5, 9, no_room)
    with open(f"{data}/dropped.log", "a") as file:
        file.write("framed|30|3")
    assert ranges(data, "framed") == [(5, 9)]
    dropped.append(data, "framed", 30, 35, no_room)
    assert ranges(data, "framed") == [(5, 9), (30, 35)]


def test_nothing_was_dropped_where_there_is_no_file(data):
    assert dropped.read(data, "framed") == []


@pytest.mark.parametrize(
    ("first", "last", "gone", "left"),
    [
        (1, 10, [], [(1, 10)]),
        (1, 10, [(20, 30)], [(1, 10)]),
        (11, 15, [(1, 10)], [(11, 15)]),
        (1, 10, [(1, 10)], []),
        (1, 10, [(0, 99)], []),
        (1, 10, [(1, 3)], [(4, 10)]),
        (1, 10, [(8, 12)], [(1, 7)]),
        (1, 10, [(4, 6)], [(1, 3), (7, 10)]),
        (1, 10, [(2, 2), (3, 3), (9, 9)], [(1, 1), (4, 8), (10, 10)]),
        (1, 10, [(2, 5), (4, 6), (2, 5)], [(1, 1), (7, 10)]),
        (5, 4, [(1, 2)], []),
    ],
)
def test_without_leaves_what_was_not_dropped(first, last, gone, left):
    assert without(first, last, [SeqRange(a, b) for a, b in gone]) == left
