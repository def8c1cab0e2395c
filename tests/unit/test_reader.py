"""Lookups and checked reads: whatever is asked, what comes is what was written, or a DamageError."""

import os
import random
import shutil
from itertools import pairwise

import pytest
from made_up import FIRST_TS, no_room, stored

from kmq.files import AppendFile
from kmq.log import reader, segment, segment_reader
from kmq.log.damage import DamageError
from kmq.log.index import IndexWriter
from kmq.log.segment import seqs_of, within

LINES = [b"t.k%d|%d|%d|%b" % (n % 7, n, n, b"x" * (n * 37 % 200)) for n in range(3000)]
SEQS = range(1, 6001, 2)  # of the partition's records: every other record of the WAL


BLOCK_BYTES = 4096  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


def write_log(directory, lines, by_seq, cuts=(), notes=(), unindexed=0):
    """Stored lines as a log in segments that begin at the records `cuts`, with provisional lines after the records `notes`."""
    os.makedirs(directory, exist_ok=True)
    starts = [0, *cuts, len(lines)]
    for number, first in enumerate(starts[:-1]):
        offset = int(lines[first].split(b"|")[0]) if by_seq else first
        path = f"{directory}/{segment.name(offset)}"
        file, writer = AppendFile(path, no_room), IndexWriter(segment.index_path(path), no_room, by_seq)
        for at in range(first, starts[number + 1]):
            if at < len(lines) - unindexed:
                writer.extend(lines[at], file.size, int(lines[at].split(b"|")[0]) if by_seq else at)
            file.append([lines[at]], len(lines[at]))
            if at in notes:
                writer.note_open()
        if not unindexed:
            writer.seal() if hasattr(writer, "seal") else writer.note_open()
        writer.flush()
        file.close()


CUTS = [(), (700, 701, 2200)]
NOTES = [(), (3, 4, 50, 51, 699, 2999)]
WAL_LINES = stored(LINES)
QUEUE_LINES = [line for seq in SEQS for line in stored([LINES[seq % 3000]], seq)]


@pytest.fixture(scope="module")
def written(small_blocks, tmp_path_factory):
    """A function from the arguments of `write_log` to a data directory with both kinds of log; each is written once."""
    kept = {}

    def directory(**how):
        key = tuple(sorted(how.items()))
        if key not in kept:
            kept[key] = str(tmp_path_factory.mktemp("written"))
            write_log(f"{kept[key]}/append", WAL_LINES, True, **how)
            write_log(f"{kept[key]}/topics/t/0", QUEUE_LINES, False, **how)
        return kept[key]

    return directory


def both(data):
    """Both kinds of log, with the lines and the offset of each."""
    yield reader.wal(data), WAL_LINES, range(1, 3001)
    yield reader.partition(data, "t", 0), QUEUE_LINES, range(3000)


@pytest.fixture
def written_logs(written):
    """Logs for reading only: every test has the same."""
    return lambda **how: both(written(**how))


@pytest.fixture
def logs(data, written):
    """Logs of the test's own, which it may change."""
    return lambda **how: both(shutil.copytree(written(**how), data, dirs_exist_ok=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("notes", NOTES)
@pytest.mark.parametrize("unindexed", [0, 1, 300])
def test_every_lookup_finds_the_first_record_at_or_after(written_logs, cuts, notes, unindexed):
    rng = random.Random(1)
    for log, lines, offsets in written_logs(cuts=cuts, notes=notes, unindexed=unindexed):
        assert (log.first_offset, log.end_offset()) == (offsets[0], offsets[-1] + 1)
        for at in [0, 1, 699, 700, 701, 2199, 2200, 2999, *(rng.randrange(3000) for _ in range(40))]:
            seq = int(lines[at].split(b"|")[0])
            assert log.offset_of_seq(seq) == offsets[at]
            assert log.offset_of_time(FIRST_TS + seq) == offsets[at]
            first, got = log.read(offsets[at], 1)
            assert (first, got) == (offsets[at], lines[at])
            if at:
                assert log.offset_of_seq(int(lines[at - 1].split(b"|")[0]) + 1) == offsets[at]
        assert log.offset_of_seq(1 << 40) == log.offset_of_time(1 << 60) == log.end_offset()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("max_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("unindexed", [0, 300])
def test_reading_on_and_on_gives_every_line_once(written_logs, cuts, max_bytes, unindexed):
    for log, lines, offsets in written_logs(cuts=cuts, unindexed=unindexed):
        got, offset = [], 0
        while True:
            first, text = log.read(offset, max_bytes)
            if not text:
                break
            assert len(text) <= max_bytes or text.count(b"\n") == 1
            assert first == offsets[len(got)]
            got += text.splitlines(keepends=True)
            offset = offsets[len(got) - 1] + 1
        assert got == lines


@pytest.mark.sampled(6)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("records", [13, 20, 21, 100])  # in a segment: less than a block, and a few blocks
@pytest.mark.parametrize("nbytes", [100, 4096, 10_000, 12_500, 40_000])
def test_cuts_come_about_every_so_many_bytes_however_small_segments_are(written_logs, records, nbytes):
    for log, lines, offsets in written_logs(cuts=tuple(range(records, 3000, records))):
        for start in (0, 700):
            found = log.cuts(offsets[start], offsets[-1] + 1, nbytes)
            edges = [start, *(offsets.index(offset) for offset in found), 3000]
            assert edges == sorted(set(edges))
            sizes = [sum(map(len, lines[low:high])) for low, high in pairwise(edges)]
            block = 4096 + 300
            assert max(sizes) <= nbytes + 2 * block, sizes
            if nbytes >= 10_000:
                assert min(sizes[:-1]) >= nbytes - 2 * block, sizes


def test_a_read_in_front_of_what_retention_left_says_where_it_begins(logs):
    for log, lines, offsets in logs(cuts=(1000, 2000)):
        os.unlink(log.segments()[0][1])
        assert log.first_offset == offsets[1000]
        assert log.read(0, 1) == (offsets[1000], lines[1000])
        assert log.offset_of_seq(1) == offsets[1000]


def test_an_empty_log_has_nothing_and_says_where_it_will_begin(data):
    assert (reader.wal(data).first_offset, reader.wal(data).end_offset()) == (1, 1)
    assert reader.partition(data, "t", 0).read(0) == (0, b"")
    assert reader.partition(data, "t", 0).offset_of_seq(5) == 0


def read_all(log):
    offset, got = 0, b""
    while True:
        first, text = log.read(offset)
        if not text:
            return got
        got += text
        offset = seqs_of(text)[-1] + 1 if log.by_seq else first + text.count(b"\n")


def damaged(text, rng):
    """`text` with one bit flipped, a page zeroed or its end cut off."""
    at = rng.randrange(len(text))
    kind = rng.choice(["flip", "zero", "cut"])
    if kind == "flip":
        return text[:at] + bytes([text[at] ^ 1 << rng.randrange(8)]) + text[at + 1 :]
    if kind == "zero":
        page = at & ~4095
        return text[:page] + bytes(min(4096, len(text) - page)) + text[page + 4096 :]
    return text[:at]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("what", ["log", "idx"])
def test_nothing_damaged_is_ever_served(logs, seed, what):
    """Whatever is read, before and behind the damage: the truth or an error; and all in front of it is there."""
    rng = random.Random(seed)
    for log, lines, offsets in logs(cuts=(1500,), notes=(20, 1600)):
        path = rng.choice(log.segments())[1]
        path = path if what == "log" else segment.index_path(path)
        with open(path, "rb") as file:
            good = file.read()
        bad = damaged(good, rng)
        with open(path, "wb") as file:
            file.write(bad)
        truth = dict(zip(offsets, lines, strict=True))
        if what == "log":  # an index may be cut where a line ends, which looks as if the rest were not indexed yet
            with pytest.raises(DamageError):
                read_all(log)
        for at in [0, *(rng.randrange(3000) for _ in range(30))]:
            try:
                first, text = log.read(offsets[at], 20_000)
            except DamageError as err:
                assert err.path.startswith(log.directory) and 0 <= err.byte <= max(len(good), os.path.getsize(err.path))
                continue
            # A cut index leaves lines unindexed, which are then checked one by one: still nothing but the truth.
            for offset, line in enumerate(text.splitlines(keepends=True), start=first):
                assert truth[offset] == line
        for target in (rng.choice(SEQS) for _ in range(20)):
            seq = target if log.by_seq is False else min(target, 3000)
            for find, key in ((log.offset_of_seq, seq), (log.offset_of_time, FIRST_TS + seq)):
                try:
                    found = find(key)
                except DamageError:
                    continue
                assert lines[offsets.index(found)].startswith(b"%d|" % seq)
        with open(path, "wb") as file:
            file.write(good)


@pytest.mark.parametrize("junk", [b"\0" * 5000, b"no record\n", b"1|1700000000.000001|t|||again\n"])
def test_what_the_index_does_not_speak_of_is_checked_line_by_line(logs, junk):
    for log, lines, offsets in logs(unindexed=10):
        with open(log.segments()[0][1], "ab") as file:
            file.write(junk)
        assert log.read(offsets[-1], 1 << 20) == (offsets[-1], lines[-1])  # what is in front of it is good
        if b"\n" in junk:
            with pytest.raises(DamageError, match="not a stored line in order of seq"):
                log.read(offsets[-1] + 1)


def test_a_line_that_is_just_being_written_is_not_there_yet(logs):
    for log, _, offsets in logs():
        with open(log.segments()[0][1], "ab") as file:
            file.write(b"6001|1700000000.009000|t|")
            file.flush()
            assert log.read(offsets[-1] + 1) == (offsets[-1] + 1, b"")
            assert log.end_offset() == offsets[-1] + 1
            file.write(b"||now\n")
            file.flush()
            assert log.read(offsets[-1] + 1)[1].endswith(b"now\n")


def test_a_lookup_reads_the_index_in_a_few_places_only(data, monkeypatch):
    lines = stored([b"t|||%d" % n for n in range(60_000)])
    write_log(f"{data}/append", lines, True)
    log, reads, pread = reader.wal(data), [], os.pread
    monkeypatch.setattr(reader.os, "pread", lambda fd, size, at: reads.append(size) or pread(fd, size, at))
    assert log.offset_of_time(FIRST_TS + 30_000) == 30_000
    assert sum(size > 4096 for size in reads) <= 4 and len(reads) < 50


def test_the_end_is_counted_on_from_where_it_was_while_the_reader_is_far_behind(data, monkeypatch):
    write_log(f"{data}/topics/t/0", QUEUE_LINES, False, unindexed=2500)
    log, sizes, pread = reader.partition(data, "t", 0), [], os.pread
    assert (log.end_offset(), log.read(600, segment_reader.READ_BYTES // 4 + 1000)[0]) == (3000, 600)
    monkeypatch.setattr(reader.os, "pread", lambda fd, size, at: sizes.append(size) or pread(fd, size, at))
    assert log.end_offset() == 3000
    assert max(sizes) < 10_000 < sum(map(len, QUEUE_LINES[500:]))


def test_reading_past_a_long_line_takes_no_more_memory_than_a_few_such_lines(data, monkeypatch):
    lines = stored([b"t|||" + b"x" * 200_000, *LINES])
    write_log(f"{data}/append", lines, True)
    sizes, pread = [], os.pread
    monkeypatch.setattr(reader.os, "pread", lambda fd, size, at: sizes.append(size) or pread(fd, size, at))
    monkeypatch.setattr(segment_reader, "READ_BYTES", 10_000)
    assert b"".join(reader.read(data, 1, 3001)) == b"".join(lines)
    assert max(sizes) < 600_000


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [(1, 9, range(4, 7)), (4, 6, range(4, 7)), (5, 9, (5, 6)), (1, 5, (4, 5)), (5, 5, (5,)), (7, 9, ()), (1, 3, ())],
)
def test_within(low, high, kept):
    lines = stored(LINES[3:6], 4)
    assert within(b"".join(lines), low, high) == b"".join(lines[seq - 4] for seq in kept)
