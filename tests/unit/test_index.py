"""The sparse index: from any offset to a line at or before it, whatever was cut, torn or missing."""

import random
import zlib
from itertools import pairwise

import pytest
from made_up import no_room, stored

from kmq.files import AppendFile
from kmq.log.index import IndexEntry, IndexWriter, last_before, parse_line, read_entries

BLOCK = BLOCK_BYTES = 512  # of the index, see small_blocks


pytestmark = pytest.mark.usefixtures("small_blocks")


class Log:
    """A log with its index, as durability and the router write them."""

    def __init__(self, path, first=0):
        self.path, self.index_path = f"{path}/x.log", f"{path}/x.idx"
        self.file = AppendFile(self.path, no_room)
        self.first = self.next = first
        self.open_index()

    def open_index(self):
        self.index = IndexWriter(self.index_path, no_room)
        self.index.resume(self.file.fd, self.file.size, self.first)

    def append(self, payloads):
        data = b"".join(stored([b"t|||" + payload for payload in payloads], self.next))
        position = self.file.size
        self.file.append([data], len(data))
        self.index.extend(data, position, self.next)
        self.next += len(payloads)

    def note(self):
        self.index.note_open()
        self.index.flush()

    def content(self):
        with open(self.path, "rb") as file:
            return file.read()

    def cut(self, lines):
        """Keep only the first `lines` lines, and open the index anew."""
        kept = self.content().split(b"\n")[:lines]
        self.file.truncate(sum(len(line) + 1 for line in kept))
        self.next = self.first + lines
        self.open_index()

    def check(self):
        """Every entry tells the truth, and every offset is found within one block."""
        content, size = self.content(), self.file.size
        starts, at = [], 0
        for line in content.split(b"\n")[:-1]:
            starts.append(at)
            at += len(line) + 1
        entries = read_entries(self.index_path, size)
        for number, entry in enumerate(entries):
            assert entry.position == starts[entry.offset - self.first]
            end = entries[number + 1].position if number + 1 < len(entries) else size
            covered = content[entry.position : end]
            crcs = {zlib.crc32(covered[: at + 1]) for at in range(len(covered)) if covered[at] == 10}
            assert entry.crc in (crcs if number + 1 == len(entries) else {zlib.crc32(covered)})
            assert content[entry.position :].split(b"|", 2)[1] == entry.recv_ts
        for offset in range(self.first, self.next + 2):
            found, position = last_before(self.index_path, size, offset)
            best = max((e.offset for e in entries if e.offset <= offset), default=-1)
            assert found == best
            assert position == (starts[found - self.first] if found >= 0 else 0)
        return entries


def payloads(rng, count):
    return [b"x" * rng.choice([0, 5, 30, 100, 700, 3000]) for _ in range(count)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, 1, 12345])
def test_every_offset_is_found_while_a_log_grows(tmp_path, first):
    rng = random.Random(first)
    log = Log(tmp_path, first)
    log.check()
    for _ in range(60):
        log.append(payloads(rng, rng.randrange(1, 12)))
        if rng.randrange(2):
            log.index.flush()
        if rng.randrange(3) == 0:
            log.note()
        log.check()
    log.note()
    assert len(log.check()) > 20


def test_blocks_close_at_the_first_line_end_past_their_size(tmp_path):
    log = Log(tmp_path)
    log.append([b"x" * 20] * 100)
    log.note()
    entries = log.check()
    sizes = [b.position - a.position for a, b in pairwise(entries)]
    assert sizes and all(BLOCK <= size < BLOCK + 60 for size in sizes)


def test_an_open_block_is_known_from_its_provisional_line_on(tmp_path):
    log = Log(tmp_path)
    log.append([b"a"])
    log.index.flush()
    assert read_entries(log.index_path, log.file.size) == []
    assert log.index.has_open_news
    log.note()
    assert [e.offset for e in log.check()] == [0]
    assert not log.index.has_open_news
    log.note()
    log.append([b"b"])
    log.note()
    with open(log.index_path, "rb") as file:
        assert file.read().count(b"\n") == 2  # the last line for an offset wins; no news, no line
    assert [e.offset for e in log.check()] == [0]


def test_a_writer_resumes_wherever_the_last_one_was_killed(tmp_path):
    rng = random.Random(8)
    log = Log(tmp_path, 1)
    for _ in range(80):
        log.append(payloads(rng, rng.randrange(1, 8)))
        if rng.randrange(2):
            log.index.flush()
        if rng.randrange(3) == 0:
            log.note()
        if rng.randrange(2):
            log.open_index()
            log.check()
    log.note()
    entries = log.check()
    assert entries[-1].crc == zlib.crc32(log.content()[entries[-1].position :])


def test_an_index_follows_its_log_when_that_is_cut(tmp_path):
    rng = random.Random(9)
    log = Log(tmp_path)
    for _ in range(40):
        log.append(payloads(rng, rng.randrange(1, 30)))
        log.note()
        log.cut(rng.randrange(log.next + 1))
        log.note()
        log.check()
        with open(log.index_path, "rb") as file:
            assert all(parse_line(line).position < log.file.size for line in file.read().splitlines())


@pytest.mark.parametrize("damage", [b"17|4", b"no line\n", b"\0" * 40, b"1|2|3|4|5\n", b"99|999999999|1|1.000000\n"])
def test_what_is_no_entry_is_passed_over_and_removed_at_open(tmp_path, damage):
    log = Log(tmp_path)
    log.append([b"x" * 50] * 100)
    log.note()
    before = [e.line() for e in log.check()]
    with open(log.index_path, "ab") as file:
        file.write(damage)
    assert [e.line() for e in read_entries(log.index_path, log.file.size)] == before
    log.open_index()
    log.note()
    assert [e.line() for e in log.check()] == before


def test_an_index_is_cut_when_the_disk_has_room_for_the_shorter_one(tmp_path):
    log = Log(tmp_path)
    log.append([b"x" * 100] * 50)
    log.note()
    before, full = (tmp_path / "x.idx").read_bytes().splitlines(), tmp_path / "x.idx.new"
    full.symlink_to("/dev/full")
    IndexWriter(log.index_path, lambda path: full.unlink()).cut(log.file.size)
    assert (tmp_path / "x.idx").read_bytes().splitlines() == before[:-1] != []
    assert not full.exists()


def test_a_lost_index_is_made_again(tmp_path):
    log = Log(tmp_path)
    log.append([b"x" * 50] * 100)
    log.note()
    before = [e.line() for e in log.check()]
    (tmp_path / "x.idx").unlink()
    log.open_index()
    log.note()
    assert [e.line() for e in log.check()] == before


def test_a_line_longer_than_what_resume_reads_at_once_is_indexed_like_any_other(tmp_path):
    log = Log(tmp_path)
    log.append([b"before", b"x" * BLOCK * 40])
    log.append([b"after"])
    log.note()
    before = [e.line() for e in log.check()]
    log.open_index()
    log.append([b"later"])
    log.note()
    entries = log.check()
    assert [e.line() for e in entries[:-1]] == before[:-1]
    assert entries[-1].crc == zlib.crc32(log.content()[entries[-1].position :])


def test_there_is_no_lookup_without_an_index(tmp_path):
    assert last_before(f"{tmp_path}/none.idx", 100, 5) == (-1, 0)
    assert read_entries(f"{tmp_path}/none.idx", 100) == []


@pytest.mark.parametrize("line", [b"", b"1|2|3", b"1|2|3|x", b"a|2|3|1.000000", b"1|2|3|1.000000|5", b"\0\0"])
def test_parse_line_takes_only_entries(line):
    assert parse_line(line) is None


def test_an_entry_is_read_as_it_was_written():
    entry = IndexEntry(7, 65536, 4294967295, b"1700000000.000001")
    again = parse_line(entry.line()[:-1])
    assert (again.offset, again.position, again.crc, again.recv_ts) == (7, 65536, 4294967295, b"1700000000.000001")
