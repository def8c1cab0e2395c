"""What every way to a broker's logs does alike: from its data directory, and over HTTP from its gateway."""

import os
import random
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

import pytest
from log_server import up
from made_data import FIRST_TS, append, write_data

from kmq.gateway.core import partitions
from kmq.log import index, reader, segment_reader, topics
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.source import brokers
from kmq.spark.source.brokers import Directory, Remote

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

LINES = [b"%b.k%d|%d|%d|%b" % ((b"a", b"b", b"c")[n % 3], n % 7, n, n, b"x" * (n * 37 % 300)) for n in range(3000)]
DECLARED = {"a": 1, "b": 4, "empty": 3}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a few hundred KB have many blocks, pieces and segments."""
    for module in (index, segment_reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    for module in (brokers, brokers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(partitions, "PIECE_BYTES", 10_000)


@pytest.fixture(params=["directory", "remote"])
def access_to(request):
    """access_to(data, synced): a way to the logs of the broker that is up there."""
    running = []

    def start(data, synced=3000):
        broker = up(data, synced)
        running.append(broker)
        found = broker.__enter__()
        if request.param == "directory":
            return Directory(str(data))
        found.serve()
        return Remote(f"127.0.0.1:{found.port}")

    yield start
    for broker in running:
        broker.__exit__(None, None, None)


@pytest.fixture
def made(tmp_path):
    """A directory that is not closed: its tail is not in the index, its active segments have begun."""
    return write_data(tmp_path, LINES, DECLARED, segment_bytes=30_000, group=200, closed=False)


@pytest.fixture
def data(tmp_path, made):
    return str(tmp_path)


def logs_of(data):
    """(topic, partition) → lines by offset, read plainly."""
    found = {(WAL, 0): dict(enumerate(plain(f"{data}/append"), 1))}
    for name in topics.names(data):
        for number in range(topics.load(data, name)[0]):
            found[name, number] = dict(enumerate(plain(f"{data}/topics/{name}/{number}")))
    return found


def plain(directory):
    return b"".join(path.read_bytes() for path in sorted(Path(directory).glob("*.log"))).splitlines(keepends=True)


def read(access, topic, partition, start, end):
    """Offset → line, of all that is read, with what must hold of each block."""
    found = {}
    for first, lines in access.read(topic, partition, start, end):
        assert lines.endswith(b"\n")
        each = lines.splitlines(keepends=True)
        offsets = [record.seq_of(line) for line in each] if topic == WAL else range(first, first + len(each))
        assert offsets[0] == first >= max(start, max(found, default=-1) + 1)
        found.update(zip(offsets, each, strict=True))
    assert not found or max(found) < end
    return found


# --- what there is ---------------------------------------------------------------------------------------------------


def test_topics_are_named_with_their_partitions(access_to, data):
    access = access_to(data)
    assert {name: found.partitions for name, found in access.topics().items()} == DECLARED | {"c": 1}
    assert access.identity() == Path(f"{data}/id").read_text().strip()


def test_bounds_are_those_of_the_files_in_one_answer(access_to, data):
    expected = {key: (min(lines), max(lines) + 1) for key, lines in logs_of(data).items() if lines}
    expected |= {("empty", number): (0, 0) for number in range(3)}
    assert access_to(data).bounds(["a", "b", "c", "empty", "nobody's", WAL]) == expected


def test_nothing_asked_is_nothing_answered(access_to, data):
    assert access_to(data).bounds([]) == {}


def test_the_bounds_of_very_many_topics_are_one_answer_too(access_to, data):
    names = [f"a-topic-with-a-rather-long-name-{number}" for number in range(500)]
    assert set(access_to(data).bounds([*names, "a"])) == {("a", 0)}


def test_the_wal_ends_with_what_is_durable_not_with_what_is_written(access_to, data):
    access = access_to(data, synced=2345)
    assert access.bounds([WAL]) == {(WAL, 0): (1, 2346)}


def test_an_empty_wal_begins_and_ends_at_seq_1(access_to, tmp_path):
    write_data(tmp_path, [])
    assert access_to(tmp_path, synced=0).bounds([WAL]) == {(WAL, 0): (1, 1)}


def test_topics_and_records_that_come_are_seen_at_once(access_to, data, made):
    access = access_to(data)
    before = access.bounds(["a", "new", "declared"])
    assert before == {("a", 0): (0, 1000)}
    topics.declare(data, "declared", 2)
    append(made, [b"new|||1", b"a.k|||2"])
    assert access.bounds(["a", "new"]) == {("a", 0): (0, 1001), ("new", 0): (0, 1)}
    assert {name: found.partitions for name, found in access.topics().items()} == DECLARED | {
        "c": 1,
        "new": 1,
        "declared": 2,
    }
    assert access.bounds(["declared"]) == {("declared", 0): (0, 0), ("declared", 1): (0, 0)}
    assert read(access, "new", 0, 0, 1)[0].endswith(b"|new|||1\n")
    assert read(access, "a", 0, 1000, 1001)[1000].endswith(b"|a.k|||2\n")


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_range_of_every_log_is_read_to_the_record(access_to, data):
    access, rng = access_to(data), random.Random(4)
    for (topic, partition), lines in logs_of(data).items():
        first, end = min(lines, default=0), max(lines, default=-1) + 1
        assert read(access, topic, partition, first, end) == lines
        for _ in range(12):
            low, high = sorted(rng.choices(range(first, end + 1), k=2)) if lines else (0, 0)
            assert read(access, topic, partition, low, high) == {at: lines[at] for at in range(low, high)}


def test_beyond_the_end_there_is_nothing(access_to, data):
    access = access_to(data)
    assert read(access, "a", 0, 990, 2000).keys() == set(range(990, 1000))
    assert read(access, "a", 0, 1000, 2000) == read(access, "a", 0, 5000, 6000) == read(access, "empty", 1, 0, 10) == {}
    assert read(access, "a", 0, 7, 7) == read(access, "a", 0, 8, 7) == {}


def test_cuts_lie_within_the_range_in_order_and_make_pieces_of_about_the_size(access_to, data):
    access = access_to(data)
    for (topic, partition), lines in logs_of(data).items():
        first, end = min(lines, default=0), max(lines, default=-1) + 1
        for low, high in ((first, end), (first + 7, max(0, end - 7)), (first, first)):
            cuts = access.cuts(topic, partition, low, high, 12_000)
            places = [low, *cuts, high] if high > low else [low]
            assert all(a < b for a, b in pairwise(places))
            sizes = [sum(len(lines[at]) for at in range(a, b)) for a, b in pairwise(places)]
            assert all(size < 30_000 for size in sizes) and len(sizes) >= sum(sizes) // 30_000


def test_the_offset_of_a_time_is_that_of_the_first_record_then_or_later(access_to, data):
    access = access_to(data)
    for (topic, partition), lines in logs_of(data).items():
        times = [record.parse_ts(line.split(b"|")[1]) for line in lines.values()]
        first = min(lines, default=0)
        for at in (0, *range(FIRST_TS, FIRST_TS + len(LINES), 333), times[-1] if times else 1, 1 << 60):
            expected = first + bisect_left(times, at)
            assert access.offset_of_time(topic, partition, at) == expected


def test_a_read_goes_on_while_others_are_begun_and_given_up(access_to, data):
    access, lines = access_to(data), logs_of(data)
    slow = access.read("a", 0, 0, 1000)
    got = next(slow)[1]
    for _ in range(3):
        given_up = access.read(WAL, 0, 1, 3001)
        next(given_up)
        given_up.close()
        assert access.bounds(["a"]) == {("a", 0): (0, 1000)}
    got += b"".join(text for _, text in slow)
    assert got == b"".join(lines["a", 0].values())


def test_a_line_that_is_being_written_is_not_shown(access_to, data, made):
    made[0].close(), made[1].close()
    access, lines = access_to(data), logs_of(data)
    for link in ("a.log", "append.log"):
        with open(f"{data}/{link}", "ab") as file:
            file.write(b"3001|1700000000.003001|a.k|0|0|torn")
    assert access.bounds(["a"]) == {("a", 0): (0, 1000)}
    assert read(access, "a", 0, 0, 5000) == lines["a", 0]
    assert read(access, WAL, 0, 1, 3001) == lines[WAL, 0]


# --- retention, compaction, gaps -------------------------------------------------------------------------------------


def remove_segments(directory, number):
    """As retention does."""
    for path in sorted(Path(directory).glob("*.log"))[:number]:
        path.unlink()
        path.with_suffix(".idx").unlink()


@pytest.mark.parametrize(("topic", "directory"), [("a", "topics/a/0"), (WAL, "append")])
def test_what_retention_has_taken_is_not_there_and_the_offset_says_so(access_to, data, topic, directory):
    access, lines = access_to(data), logs_of(data)[topic, 0]
    remove_segments(f"{data}/{directory}", 2)
    first, end = access.bounds([topic])[topic, 0]
    assert min(lines) < first < end == max(lines) + 1
    assert read(access, topic, 0, min(lines), end) == {at: lines[at] for at in range(first, end)}
    assert read(access, topic, 0, min(lines), first) == {}


@pytest.mark.parametrize(("topic", "directory"), [("a", "topics/a/0"), (WAL, "append")])
def test_retention_in_the_middle_of_a_read_leaves_a_hole_and_no_wrong_record(access_to, data, topic, directory):
    access, lines = access_to(data), logs_of(data)[topic, 0]
    source = access.read(topic, 0, min(lines), max(lines) + 1)
    first, text = next(source)
    remove_segments(f"{data}/{directory}", 4)
    left = access.bounds([topic])[topic, 0][0]
    got = dict(enumerate(text.splitlines(keepends=True), first))
    for first, text in source:
        got.update(enumerate(text.splitlines(keepends=True), first))
    assert all(lines[at] == line for at, line in got.items())
    assert got.keys() >= set(range(left, max(lines) + 1))


def compact(path, keep):
    """The sealed segment at `path` with only the records for which keep(number) is true, and its new index."""
    lines = path.read_bytes().splitlines(keepends=True)
    text = b"".join(line if keep(at) else b"\n" for at, line in enumerate(lines))
    path.with_suffix(".new").write_bytes(text)
    path.with_suffix(".idx").unlink()
    path.with_suffix(".new").rename(path)
    index.IndexWriter.complete(str(path), int(path.stem), lambda path: None)


def test_records_that_compaction_took_away_keep_their_offsets_as_bare_newlines(access_to, data):
    access = access_to(data)
    for path in sorted(Path(f"{data}/topics/a/0").glob("*.log"))[:-1]:
        compact(path, lambda at: at % 50 == 0)
    lines = logs_of(data)["a", 0]
    assert sum(line == b"\n" for line in lines.values()) > 500
    assert access.bounds(["a"]) == {("a", 0): (0, 1000)}
    assert read(access, "a", 0, 0, 1000) == lines
    for low, high in ((1, 49), (49, 51), (333, 777)):
        assert read(access, "a", 0, low, high) == {at: lines[at] for at in range(low, high)}


def test_compaction_in_the_middle_of_a_read_shows_each_record_or_its_newline(access_to, data):
    access, lines = access_to(data), logs_of(data)["a", 0]
    source = access.read("a", 0, 0, 1000)
    got = dict(enumerate(next(source)[1].splitlines(keepends=True)))
    for path in sorted(Path(f"{data}/topics/a/0").glob("*.log"))[:-1]:
        compact(path, lambda at: at % 10 == 0)
    for first, text in source:
        got.update(enumerate(text.splitlines(keepends=True), first))
    assert got.keys() == lines.keys()
    assert all(got[at] in (line, b"\n") for at, line in lines.items())


def test_a_gap_that_drop_oldest_left_in_the_wal_is_passed_over(access_to, tmp_path):
    made = write_data(tmp_path, LINES[:500], segment_bytes=30_000, group=200, closed=False)
    made[2] = 700
    append(made, LINES[700:], group=200)
    access = access_to(tmp_path, synced=2999)
    lines = {record.seq_of(line): line for line in plain(tmp_path / "append")}
    assert read(access, WAL, 0, 1, 3000) == lines and 600 not in lines
    for low, high in ((1, 600), (600, 650), (450, 701), (650, 720)):
        assert read(access, WAL, 0, low, high) == {at: line for at, line in lines.items() if low <= at < high}


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("suffix", ["log", "idx"])
@pytest.mark.parametrize(("topic", "directory"), [("a", "topics/a/0"), (WAL, "append")])
def test_nothing_damaged_is_served_and_nothing_good_in_front_of_it_is_held_back(
    access_to, data, topic, directory, suffix, seed
):
    rng = random.Random(seed)
    lines = logs_of(data)[topic, 0]
    path = str(rng.choice(sorted(Path(f"{data}/{directory}").glob(f"*.{suffix}"))[:-1]))
    flip(path, rng.randrange(os.path.getsize(path)))
    access, reference = access_to(data), reader.wal(data) if topic == WAL else reader.partition(data, topic, 0)
    for start in (min(lines), *rng.sample(list(lines), 3)):
        got, damage = until_damage(access.read(topic, 0, start, max(lines) + 1))
        assert all(lines[at] == line for at, line in got.items())
        assert damage or got.keys() == set(range(start, max(lines) + 1))
        # Whoever reads on in order meets a bad line of the index later than who looks up each place.
        assert got.keys() >= until_damage(block_by_block(reference, start))[0].keys()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("topic", "directory"), [("a", "topics/a/0"), (WAL, "append")])
def test_a_range_that_ends_behind_damage_is_served_up_to_it(access_to, data, topic, directory, seed):
    rng = random.Random(seed)
    lines = logs_of(data)[topic, 0]
    path = rng.choice(sorted(Path(f"{data}/{directory}").glob("*.log"))[:-1])
    flip(path, rng.randrange(5000, os.path.getsize(path)))
    access = access_to(data)
    good, damage = until_damage(access.read(topic, 0, min(lines), max(lines) + 1))
    for end in range(max(good), damage.next_offset + 5):
        got, found = until_damage(access.read(topic, 0, int(path.stem), end))
        assert got == {at: line for at, line in good.items() if int(path.stem) <= at < end}
        assert (found is None) == (end <= damage.first_offset)


def until_damage(source):
    """(offset → line, the DamageError that ended it or None)."""
    got = {}
    try:
        for first, text in source:
            got.update(enumerate(text.splitlines(keepends=True), first))
    except DamageError as err:
        return got, err
    return got, None


def block_by_block(log, offset):
    """All there is from `offset` on, by a lookup for each block."""
    while True:
        first, lines = log.read(offset, 4096)
        if not lines:
            return
        yield first, lines
        offset = first + lines.count(b"\n")


def test_a_sealed_segment_that_ends_too_early_is_damage_behind_its_last_record(access_to, data):
    lines, path = logs_of(data)["a", 0], sorted(Path(f"{data}/topics/a/0").glob("*.log"))[1]
    first, kept = int(path.stem), path.read_bytes().splitlines(keepends=True)[:-9]
    path.write_bytes(b"".join(kept))
    path.with_suffix(".idx").unlink()
    index.IndexWriter.complete(str(path), first, lambda path: None)
    access = access_to(data)
    for start in (0, first + 3, first + len(kept), first + len(kept) + 4):
        got, damage = until_damage(access.read("a", 0, start, 1000))
        assert got == {at: lines[at] for at in range(start, first + len(kept))}
        assert damage is not None and damage.path.endswith(str(path))


def test_damage_is_named_by_file_and_byte(access_to, data):
    path = sorted(Path(f"{data}/topics/a/0").glob("*.log"))[1]
    flip(path, 9000)
    with pytest.raises(DamageError) as raised:
        list(access_to(data).read("a", 0, 0, 1000))
    assert raised.value.path.endswith(str(path)) and raised.value.byte <= 9000 < raised.value.end
    assert "crc mismatch" in str(raised.value) and "kmq verify --repair" in str(raised.value)
