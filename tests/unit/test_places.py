"""Where stored messages are: every seq that is asked for is found where it lies, whatever was asked for before."""

import asyncio
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
from made_data import write_data

from kmq.gateway.core import finding
from kmq.gateway.core.finding import PlaceFinder
from kmq.log import compaction

pytestmark = pytest.mark.usefixtures("small_blocks")
PARTITIONS = 3


def lines_of(data, topic="t"):
    """seq → (partition, offset, line), as the files have them."""
    found = {}
    for number in range(PARTITIONS):
        paths = sorted(Path(f"{data}/topics/{topic}/{number}").glob("*.log"))
        for path in paths:
            for offset, line in enumerate(path.read_bytes().splitlines(), int(path.stem)):
                if line:
                    found[int(line.split(b"|")[0])] = (number, offset, line)
    return found


@pytest.fixture(params=[64 * 1024, 500], ids=["large reads", "small reads"])
def data(request, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "_READ_BYTES", request.param)
    monkeypatch.setattr(finding, "_FAR_BYTES", 4 * request.param)
    lines = [b"t.@.k%d|%d|%d|%b" % (n % 5, n, n, b"x" * (n % 90)) for n in range(600)]
    return write_data(tmp_path, lines, {"t": PARTITIONS}, segment_bytes=70_000)


def key(seq):
    return b"t.@.k%d" % ((seq - 1) % 5)


def ask(finder, *batches):
    async def run():
        return await asyncio.gather(*(finder.find("t", [(key(seq), seq) for seq in batch]) for batch in batches))

    return asyncio.run(run())


def test_whatever_is_asked_for_in_whatever_order_is_found_where_it_lies(data):
    there, dice = lines_of(data), random.Random(11)
    with closing(PlaceFinder(data)) as finder:
        for _ in range(200):
            begin = dice.randrange(1, 600)
            step = dice.choice([1, 1, 2, 50])
            batch = [seq for seq in range(begin, begin + dice.choice([1, 3, 200]) * step, step) if seq <= 600]
            (found,) = ask(finder, batch)
            assert {seq: tuple(place) for seq, place in found.items()} == {seq: there[seq] for seq in batch}


def test_requests_at_the_same_time_get_their_own_answers(data):
    there = lines_of(data)
    with closing(PlaceFinder(data)) as finder:
        found = ask(finder, [5, 6], [1], [600, 300], [6])
    assert [[*map(tuple, each.values())] for each in found][1] == [there[1]]
    assert all(tuple(each[seq]) == there[seq] for each in found for seq in each)


def test_records_that_come_later_are_found_where_the_last_read_ended(data):
    with closing(PlaceFinder(data)) as finder:
        ask(finder, [598])
        number, offset, _ = lines_of(data)[600]
        directory = f"{data}/topics/t/{number}"
        name = max(name for name in os.listdir(directory) if name.endswith(".log"))
        with open(f"{directory}/{name}", "ab") as file:
            file.write(b"".join(b"%d|1800000000.000000|%b|0|0|new\n" % (seq, key(600)) for seq in (601, 607)))

        async def run():
            return await finder.find("t", [(key(600), 601), (key(600), 604), (key(600), 607)])

        found = asyncio.run(run())
        assert {seq: place.offset for seq, place in found.items()} == {601: offset + 1, 607: offset + 2}


def test_what_is_not_there_is_left_out(data):
    with closing(PlaceFinder(data)) as finder:
        assert ask(finder, [601]) == [{}]
        assert [*ask(finder, [600, 700])[0]] == [600]

        async def nobody():
            return await finder.find("nobody", [(b"nobody", 3)])

        assert asyncio.run(nobody()) == {}


def test_a_record_in_another_partition_than_its_key_says_is_found_too(data):
    there = lines_of(data)
    with closing(PlaceFinder(data)) as finder:

        async def run():
            return await finder.find("t", [(b"t.@.other%d" % seq, seq) for seq in (17, 18, 19)])

        assert {seq: tuple(place) for seq, place in asyncio.run(run()).items()} == {n: there[n] for n in (17, 18, 19)}


def compacted(data, next_segment, gone):
    """Compact the first segment of a partition: the records `gone` leave blank lines."""
    which = compaction.Sealed("t", 0, 0, next_segment)
    with compaction.compactor(data) as where:
        compaction.lay_out(data, which, gone, where)
    compaction.install(data, which)


@pytest.mark.parametrize("nbytes", [50, 300_000], ids=["short lines", "lines longer than a read"])
def test_the_search_goes_on_in_a_segment_that_compaction_has_replaced_by_a_shorter_one(tmp_path, nbytes):
    count, segment = (600, 20_000) if nbytes == 50 else (12, 1_500_000)
    lines = [b"t.@.k%d|%d|%d|%b" % (n % 5, n, n, b"x" * nbytes) for n in range(count)]
    data = str(write_data(tmp_path, lines, {"t": 1}, segment_bytes=segment))
    second = int(sorted(Path(f"{data}/topics/t/0").glob("*.log"))[1].stem)
    with closing(PlaceFinder(data)) as finder:
        (before,) = ask(finder, [second])  # the last record of the first segment
        compacted(data, second, range(1, second - 1))
        found = [ask(finder, [seq])[0][seq] for seq in (second, second + 1, count)]
    assert [place.offset for place in found] == [second - 1, second, count - 1]
    assert [tuple(place) for place in found] == [lines_of(data)[seq] for seq in (second, second + 1, count)]
    assert before[second].offset == second - 1
