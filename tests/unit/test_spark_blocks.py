"""Blocks with their newlines, read through LogReader.extents: the same records, and the same damage, as LogReader.read gives."""

import random
from pathlib import Path

import pytest
from made_data import write_data

from kmq.log import index, reader
from kmq.log.damage import DamageError
from kmq.message import record

np = pytest.importorskip("numpy")
columns = pytest.importorskip("kmq.spark.source.columns")

LINES = [b"t.k%d|%d|%d|%b" % (n % 7, n, n, b"x" * (n * 37 % 300)) for n in range(700)]


BLOCK_BYTES = 4096  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def data(tmp_path):
    """Three segments; the index of the last one does not speak of its tail."""
    write_data(tmp_path, LINES, segment_bytes=50_000, group=100, closed=False)
    return str(tmp_path)


@pytest.fixture(params=["partition", "wal"])
def log(request, data):
    return reader.wal(data) if request.param == "wal" else reader.partition(data, "t", 0)


def records(found, by_seq):
    """Offset → line of blocks, each checked for what it says of itself."""
    got = {}
    for lines in found:
        each = lines.data.splitlines(keepends=True)
        offsets = [record.seq_of(line) for line in each] if by_seq else range(lines.offset, lines.offset + len(each))
        assert offsets[0] == lines.offset and offsets[-1] + 1 == lines.next_offset
        assert (lines.newlines == columns.find_newlines(lines.data)).all()
        got.update(zip(offsets, each, strict=True))
    return got


def one_by_one(log):
    """Offset → line, by LogReader.read alone."""
    got, offset = {}, int(log.by_seq)
    while lines := log.read(offset, 1)[1]:
        got[offset] = lines
        offset += 1
    return got


def test_any_range_is_read_in_any_size_as_log_read_gives_it(log):
    plain, rng = one_by_one(log), random.Random(1)
    assert len(plain) == len(LINES)
    for _ in range(40):
        low, high = sorted(rng.sample(range(min(plain), max(plain) + 50), 2))
        got = records(columns.read_lines(log, low, high, rng.choice([1, 5000, 50_000, 1 << 20])), log.by_seq)
        assert got == {at: line for at, line in plain.items() if low <= at < high}


def test_all_but_the_end_of_a_segment_comes_from_few_extents(log):
    end = log.end_offset()
    extents = list(log.extents(int(log.by_seq), end, 20_000))
    assert sum(len(extent.data) for extent in extents) > 40_000
    assert max(len(extent.data) for extent in extents[:-1]) > 20_000
    assert all(len(extent.edges) == len(extent.offsets) for extent in extents)


def rewritten(path, change):
    """The index at `path` with its entries changed."""
    label, *lines = Path(path).read_bytes().splitlines(keepends=True)
    entries = [index.parse_line(line[:-1]) for line in lines]
    change(entries)
    Path(path).write_bytes(label + b"".join(entry.line() for entry in entries))


def test_an_index_that_counts_other_records_is_damage_behind_what_it_counts_right(data):
    log = reader.partition(data, "t", 0)
    plain, segment = one_by_one(log), log.segments()[0][1]
    wrong = {}

    def change(entries):
        wrong["from"], wrong["to"] = entries[5].offset, entries[6].offset + 1
        for entry in entries[6:]:
            entry.offset += 1

    rewritten(segment.replace(".log", ".idx"), change)
    got = []
    with pytest.raises(DamageError, match="the block and the index count different numbers of records") as raised:
        got.extend(columns.read_lines(log, 0, 2000))
    assert (raised.value.first_offset, raised.value.next_offset) == (wrong["from"], wrong["to"])
    assert records(got, False) == {at: plain[at] for at in range(wrong["from"])}


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_bad_crc_ends_an_extent_in_front_of_its_block_and_is_damage_there(log, number):
    plain, (first, path) = one_by_one(log), log.segments()[0]
    entries = index.read_entries(path.replace(".log", ".idx"), 1 << 40)
    with open(path, "r+b") as file:
        file.seek(entries[number].position + 2000)
        file.write(b"~")
    bad = entries[number].offset
    assert sum(len(extent.data) for extent in log.extents(first, 9999, 1 << 20)) == entries[number].position
    got = []
    with pytest.raises(DamageError, match="crc mismatch") as raised:
        got.extend(columns.read_lines(log, first, 9999))
    assert raised.value.first_offset == bad
    assert records(got, log.by_seq) == {at: line for at, line in plain.items() if at < bad}


def test_a_segment_that_goes_while_it_is_read_is_read_to_its_end(log):
    plain, (first, path) = one_by_one(log), log.segments()[0]
    source = columns.read_lines(log, first, log.end_offset(), 8_000)
    got = [next(source)]
    Path(path).unlink()
    Path(path.replace(".log", ".idx")).unlink()
    got += source
    left = log.first_offset
    assert set(range(left, max(plain) + 1)) <= records(got, log.by_seq).keys() <= plain.keys()
    assert sum(at < left for at in records(got, log.by_seq)) > 100
