"""What a consumer may read: offsets and positions of partitions, batches of checked lines, places of records."""

import os
import shutil
import time
import zlib
from pathlib import Path

import pytest
from log_server import up
from made_data import FIRST_TS, append, write_data
from made_up import block

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.finding import RecordPlace, SeqFinder
from kmq.gateway.core.partitions import IN_MEMORY, MAX_BATCH, Partitions
from kmq.log import deletions, segment, segment_reader, topics
from kmq.log.damage import DamageError
from kmq.log.segment import bad_line
from kmq.log.segment_reader import IndexReader
from kmq.wire.requests import EARLIEST, LATEST, Position

LINES = [b"t.k%d|%d|%d|%b" % (n % 7, n, n, b"x" * (n % 90)) for n in range(1, 2001)]
BLOCK_BYTES = 4096  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "d", LINES, {"t": 1, "spread": 3, "empty": 2}, segment_bytes=40_000)


@pytest.fixture
def log(data):
    return Partitions(data).open("t", 0)


def stored(data, topic="t", number=0):
    paths = sorted(Path(f"{data}/topics/{topic}/{number}").glob("*.log"))
    return b"".join(path.read_bytes() for path in paths).splitlines(keepends=True)


def taken(batch):
    if batch.segment is None:
        lines = batch.text
    else:
        lines = batch.span.read()
        batch.segment.close()
    assert lines.count(b"\n") == batch.lines and lines.endswith(b"\n")
    return batch.offset, lines


def all_batches(log, offset, max_bytes):
    while batch := log.batch(offset, max_bytes):
        yield (first := taken(batch))
        offset = first[0] + first[1].count(b"\n")


# --- partitions ------------------------------------------------------------------------------------------------------


def test_the_end_does_not_go_back_while_a_full_disk_has_part_of_an_append(data):
    """The router cuts that part off, and appends the same records again; readers may have had some of them."""
    log = Partitions(data).open("t", 0)
    assert log.end() == 2000
    path = max(Path(log.directory).glob("*.log"))
    lines = path.read_bytes()
    path.write_bytes(lines[: lines.rindex(b"\n", 0, -1) + 1])
    assert (log.end(), log.locate(Position("offset", 2000))) == (2000, 2000)
    path.write_bytes(lines)
    assert log.end() == 2000


@pytest.fixture
def rolling(tmp_path):
    """A log whose segments have room for four records: its data directory, its only partition, and how to append."""
    made = write_data(tmp_path / "d", [], {"t": 1}, segment_bytes=4500, closed=False)
    yield str(tmp_path / "d"), tmp_path / "d/topics/t/0", lambda count: append(made, [b"t|1||" + b"x" * 1000] * count)
    made[0].close()
    made[1].close()


def test_bounds_follow_a_segment_that_begins_while_they_are_looked_up(rolling, monkeypatch):
    data, directory, add = rolling
    add(3)
    os.utime(directory, (1, 1))
    listing, look, partitions = segment.listing, segment.look, Partitions(data)

    def listed(path):
        monkeypatch.undo()
        found = look(path)
        add(3)
        os.utime(directory, (2, 2))
        return found

    monkeypatch.setattr(segment, "look", listed)
    assert partitions.bounds("t", 0) == (0, 6) and len(listing(str(directory))) == 2
    add(1)
    assert partitions.bounds("t", 0) == (0, 7) and len(listing(str(directory))) == 2


def test_bounds_follow_a_segment_that_begins_within_a_tick_of_the_clock_of_files(rolling, monkeypatch):
    data, directory, add = rolling
    add(3)
    tick, partitions = time.time_ns() + 3600 * 10**9, Partitions(data)  # not over before the test ends
    os.utime(directory, ns=(tick, tick))
    assert partitions.bounds("t", 0) == (0, 3)
    active = directory / f"{3:020}.log"
    active.touch()
    os.utime(directory, ns=(tick, tick))
    assert partitions.bounds("t", 0) == (0, 3)
    active.write_bytes(b"4|1.000000|t|1||x\n")
    assert partitions.bounds("t", 0) == (0, 4)
    os.utime(directory, (1, 1))
    assert partitions.bounds("t", 0) == (0, 4)
    monkeypatch.setattr(segment, "look", None)  # known from now on without a look into the directory
    assert partitions.bounds("t", 0) == (0, 4)


def test_an_offset_that_another_leader_may_have_shown_is_asked_for_again(data):
    """A leader that was paused past its session knows an older end, until it notices; its readers may know more."""
    is_unsure = True
    log = Partitions(data, lambda: is_unsure).open("t", 0)
    with pytest.raises(RequestRefused) as refused:
        log.locate(Position("offset", 2001))
    assert refused.value.code == "not_ready" and log.locate(Position("offset", 2000)) == 2000
    is_unsure = False
    with pytest.raises(RequestRefused) as refused:
        log.locate(Position("offset", 2001))
    assert refused.value.code == "out_of_range"


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_topic_that_is_just_being_made_does_not_become_another_one(data, is_empty):
    """The router makes the directory, then the file that says since when the topic is in force."""
    os.makedirs(f"{data}/topics/young/0")
    path = Path(topics.toml_path(data, "young"))
    if is_empty:
        path.touch()
    partitions = Partitions(data)
    log = partitions.open("young", 0)
    assert partitions.declared("young") == (1, None)
    path.write_bytes(topics.Declaration(1, 2001).text())
    log.check()
    assert partitions.declared("young") == (1, 2001)


def test_topics_and_partitions_that_are_not_there_are_refused(data):
    partitions = Partitions(data)
    assert (partitions.count("t"), partitions.count("spread"), partitions.bounds("t", 0)) == (1, 3, (0, 2000))
    for topic, number, code in (
        ("none", 0, "unknown_topic"),
        ("../topics/t", 0, "unknown_topic"),
        (".", 0, "unknown_topic"),
    ):
        with pytest.raises(RequestRefused) as refused:
            partitions.open(topic, number)
        assert refused.value.code == code
    with pytest.raises(RequestRefused, match="spread has 3 partitions, so there is no 3"):
        partitions.open("spread", 3)


def test_a_position_is_an_offset(log):
    assert (log.start(), log.end()) == (0, 2000)
    for position, offset in (
        (EARLIEST, 0),
        (LATEST, 2000),
        (Position("offset", 17), 17),
        (Position("offset", 2000), 2000),
        (Position("time", 1500 * 10**6), 1499),  # as it is shown: the time of its producer
        (Position("received", FIRST_TS + 1500), 1499),
        (Position("time", FIRST_TS + 10**9), 2000),
        (Position("time", 0), 0),
    ):
        assert log.locate(position) == offset
    with pytest.raises(RequestRefused) as refused:
        log.locate(Position("offset", 2001))
    assert (refused.value.code, refused.value.refusal.http) == ("out_of_range", 416)


def test_an_empty_partition_begins_where_a_deleted_one_ended(data):
    partitions = Partitions(data)
    log = partitions.open("empty", 1)
    assert (log.start(), log.end(), log.batch(0, 100)) == (0, 0, None) and partitions.bounds("empty", 1) == (0, 0)
    shutil.rmtree(f"{data}/topics/empty/1")
    deletions.write(data, [deletions.Deletion("empty", 1, 5, "1.000000", [3, 9])], lambda _, action: action())
    assert (log.start(), log.end()) == partitions.bounds("empty", 1) == (9, 9)
    with pytest.raises(RequestRefused, match="so there is no 7"):
        partitions.bounds("empty", 7)


def test_a_data_directory_that_goes_during_a_look_has_deleted_nothing(data, monkeypatch):
    partitions = Partitions(data)
    log, declared = partitions.open("t", 0), partitions._bounds.declared

    def declared_of_none(topic):
        if os.path.isdir(data):
            os.rename(data, f"{data}.away")
        return declared(topic)

    for look in (log.check, lambda: partitions.declared_of(["t", "none"])):
        with monkeypatch.context() as patch:
            patch.setattr(partitions._bounds, "declared", declared_of_none)
            with pytest.raises(RequestRefused) as refused:
                look()
        assert refused.value.code == "not_ready"
        os.rename(f"{data}.away", data)
        log.check()
    assert partitions.declared_of(["t", "none"]) == {"t": partitions.declared("t")}


def test_a_deleted_topic_is_another_when_it_comes_back(data):
    partitions = Partitions(data)
    log = partitions.open("t", 0)
    shutil.rmtree(f"{data}/topics/t")
    with pytest.raises(RequestRefused, match="there is no topic t"):
        log.batch(0, 100)
    topics.make(data, "t", topics.Declaration(1, 5000))
    with pytest.raises(RequestRefused, match="was deleted"):
        log.batch(0, 100)
    assert partitions.open("t", 0).batch(0, 100) is None


def test_a_segment_that_begins_in_the_tick_in_which_the_others_were_listed_is_seen(tmp_path):
    """The clock of mtimes goes in ticks of some milliseconds: a directory may change twice with one mtime."""
    log = Partitions(write_data(tmp_path / "d", LINES[:100], {"t": 1})).open("t", 0)
    tick = time.time_ns()
    os.utime(log.directory, ns=(tick, tick))
    log.signature()
    new = Path(log.directory, f"{100:020d}.log")
    new.touch()
    os.utime(log.directory, ns=(tick, tick))
    before = log.signature()
    new.write_bytes(b"x")
    assert log.signature() != before


def test_a_signature_changes_with_every_write_and_with_nothing_else(tmp_path):
    made = write_data(tmp_path / "d", LINES[:100], {"t": 1}, closed=False)
    log = Partitions(str(tmp_path / "d")).open("t", 0)
    seen = [log.signature()]
    for line in LINES[100:150]:
        assert log.signature() == seen[-1]
        append(made, [line])
        seen.append(log.signature())
    assert len(set(seen)) == 51
    made[0].close()
    made[1].close()


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 100, 1000, 5000, 30_000, 10**9])
def test_batches_are_every_line_once_whatever_their_size(data, log, max_bytes):
    lines = stored(data)
    for start in (0, 1, 999, 1990) if max_bytes > 100 else (1600, 1990):
        got = []
        for offset, batch in all_batches(log, start, max_bytes):
            assert offset == start + len(got)
            assert len(batch) <= max(max_bytes, len(lines[offset])) and len(batch) <= MAX_BATCH
            got += batch.splitlines(keepends=True)
        assert got == lines[start:]


@pytest.mark.parametrize("max_bytes", [300, 10**9])
def test_a_follower_checks_what_comes_and_not_again_what_it_has_had(tmp_path, monkeypatch, max_bytes):
    """The index gets its lines once a second, and until then each look would begin where they end."""
    wal, queues, _ = write_data(tmp_path / "d", LINES[:100], {"t": 1}, closed=False)
    log, offset, checked = Partitions(str(tmp_path / "d")).open("t", 0), 100, list[int]()

    def counted(lines, after=0):
        checked.append(len(lines))
        return bad_line(lines, after)

    monkeypatch.setattr(segment_reader, "bad_line", counted)
    came = 0
    for at in range(100, 2000, 10):
        routed = block(LINES[at : at + 10], at + 1)
        queues.route([routed])
        came += len(routed.data)
        for first, lines in all_batches(log, offset, max_bytes):
            offset = first + lines.count(b"\n")
    assert offset == 2000
    assert sum(checked) < 10 * came
    wal.close()
    queues.close()


def test_a_batch_holds_at_most_the_lines_that_are_asked_for(data, log):
    lines = stored(data)
    for start, most in ((0, 1), (0, 700), (123, 50), (1999, 5)):
        got = b"".join(batch for _, batch in [taken(log.batch(start, 10**9, most))])
        assert lines[start : start + most][: got.count(b"\n")] == got.splitlines(keepends=True)
        assert 0 < got.count(b"\n") <= most


def test_a_small_batch_is_in_memory_and_its_files_are_closed_and_a_large_one_is_a_piece_of_a_file(tmp_path):
    data = write_data(tmp_path / "d", LINES, {"t": 1})
    log, lines, before = Partitions(data).open("t", 0), b"".join(stored(data)), os.listdir("/proc/self/fd")
    small = log.batch(100, IN_MEMORY)
    assert small.segment is None and small.text in lines and os.listdir("/proc/self/fd") == before
    large = log.batch(100, IN_MEMORY + 5000)
    assert not large.text and large.span.nbytes > IN_MEMORY
    large.segment.close()


def test_a_batch_is_the_same_whatever_was_read_before(data):
    """What was read before is where the search begins: before the next batch, behind it, or in another segment."""
    log = Partitions(data).open("t", 0)
    for start in (number * 739 % 2000 for number in range(60)):
        for max_bytes in (100, 9000):
            assert taken(log.batch(start, max_bytes)) == taken(Partitions(data).open("t", 0).batch(start, max_bytes))


def test_a_batch_opens_its_files_once_checks_each_block_once_and_searches_only_where_the_last_one_ended(
    tmp_path, monkeypatch
):
    data = write_data(tmp_path / "d", LINES, {"t": 1})
    log, size = Partitions(data).open("t", 0), len(b"".join(stored(data)))
    asked = {"files": 0, "searched": 0, "bytes": 0}

    def counted(name, function, amount=lambda *_: 1):
        def count(*arguments, **options):
            asked[name] += amount(*arguments)
            return function(*arguments, **options)

        return count

    monkeypatch.setattr(segment_reader.os, "open", counted("files", os.open))
    monkeypatch.setattr(IndexReader, "line", counted("searched", IndexReader.line))
    monkeypatch.setattr(zlib, "crc32", counted("bytes", zlib.crc32, lambda data, *_: len(data)))
    batches = len([None for _ in all_batches(log, 0, 3 * BLOCK_BYTES)])
    assert batches > 10 and size > 30 * BLOCK_BYTES
    assert asked["files"] == 2 * (batches + 1)  # and the look that finds nothing
    assert asked["searched"] <= 4 * (batches + 1)
    assert asked["bytes"] <= size + 2 * BLOCK_BYTES * (
        batches + 1
    )  # of the last block a batch takes what it has room for
    asked["bytes"] = 0
    for start in (900, 1900):
        taken(log.batch(start, 100))
    assert asked["bytes"] <= 6 * BLOCK_BYTES, "nothing of what lies between"


def test_a_batch_begins_at_the_first_record_that_retention_has_left(data, log):
    first, second = sorted(name for name in os.listdir(log.directory) if name.endswith(".log"))[:2]
    for name in (first, first.replace(".log", ".idx")):
        os.unlink(f"{log.directory}/{name}")
    left = int(second[:20])
    assert (log.start(), taken(log.batch(5, 1000))[0], taken(log.batch(5, 1000, 3))[0]) == (left, left, left)


def test_damage_ends_the_batches_behind_the_last_good_record(data, log):
    lines = stored(data)
    path = sorted(name for name in os.listdir(log.directory) if name.endswith(".log"))[1]
    with open(f"{log.directory}/{path}", "r+b") as file:
        file.seek(20_000)
        file.write(b"\0")
    got = []
    with pytest.raises(DamageError) as damage:
        for _, batch in all_batches(log, 0, 10**9):
            got += batch.splitlines(keepends=True)
    assert got == lines[: len(got)] and len(got) == damage.value.first_offset > int(path[:20])
    with pytest.raises(DamageError):
        log.batch(len(got), 100)


def test_closed_batches_leave_no_descriptors(log):
    before = len(os.listdir("/proc/self/fd"))
    for max_bytes in (1, 10**9):
        assert sum(batch.count(b"\n") for _, batch in all_batches(log, 1700, max_bytes)) == 300
    assert len(os.listdir("/proc/self/fd")) == before


# --- places ----------------------------------------------------------------------------------------------------------


def test_every_record_is_found_by_its_seq(data, tmp_path):
    with up(data) as broker:
        broker.page.rows["router"].seq = 2000
        places = SeqFinder(data, broker.page)
        for seq in (1, 2, 999, 1000, 1001, 2000):
            assert places.is_numbered(seq) and places.is_routed(seq)
            assert places.find(seq) == RecordPlace("t", 0, seq - 1)
        assert not places.is_numbered(0) and not places.is_numbered(2001)


def test_a_record_that_is_gone_has_no_place(tmp_path):
    lines = [b"spread|0||%d" % n for n in range(30)] + [b"gone|0||1"]
    data = write_data(tmp_path / "s", lines, {"spread": 3})
    with up(data) as broker:
        places = SeqFinder(data, broker.page)
        for seq in range(1, 31):
            place = places.find(seq)
            assert stored(data, "spread", place.partition)[place.offset].startswith(b"%d|" % seq)
        assert places.find(31) == RecordPlace("gone", 0, 0)
        shutil.rmtree(f"{data}/topics/gone")
        assert places.find(31) is None
