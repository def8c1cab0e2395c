"""All partition logs: routing is a pure function of the WAL, and whatever is lost comes back byte for byte."""

import os
import pathlib
import random
import shutil
import zlib

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored, write_wal

from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.log import checkpoint, dropped, identity, index, partition, segment, topic_changes, topics
from kmq.log.partition import PartitionState
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.message import record
from kmq.message.routing import Topic
from kmq.router import logs, queues
from kmq.router.declarations import MADE_AT_ONCE
from kmq.router.queues import Queues
from kmq.router.recovery import Recovery

pytestmark = pytest.mark.usefixtures("small_blocks")


def open_queues(data, high, limits=None, log=None, check=lambda: None):
    made = Queues(data, no_room, log or FakeLogger(), limits, check=check)
    made.recover(high)
    return made


def route(made, lines, first_seq, size=7):
    """Route `lines` in blocks of `size`, several at a time."""
    blocks = [block(lines[at : at + size], first_seq + at) for at in range(0, len(lines), size)]
    for at in range(0, len(blocks), 3):
        made.route(blocks[at : at + 3])


def files(data):
    """Every queue file and its content."""
    found = {}
    for directory, _, names in os.walk(f"{data}/topics"):
        for name in names:
            if name.endswith(".log"):
                with open(f"{directory}/{name}", "rb") as file:
                    found[os.path.relpath(f"{directory}/{name}", data)] = file.read()
    return found


def log_of(data, topic, number=0):
    return files(data)[f"topics/{topic}/{number}/{segment.name(0)}"]


KEYS = b"test.probe test jobs.eu.7 jobs.us jobs a.b.c a.b a spread spread.k1 spread.".split()


def messages(rng, count):
    out = []
    while len(out) < count:
        key = rng.choice(KEYS)
        out += [b"%b|1|%d|%b" % (key, len(out), b"x" * rng.randrange(60))] * rng.choice([1, 1, 1, 12])
    return out[:count]


def test_each_line_goes_to_its_topic_in_order(data):
    lines = [b"test.a|||1", b"jobs.x|||2", b"test|||3", b"test.a|||4"]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines, 1)
    assert log_of(data, "test") == b"".join(stored([lines[0]], 1) + stored([lines[2]], 3) + stored([lines[3]], 4))
    assert log_of(data, "jobs") == stored([lines[1]], 2)[0]
    assert os.readlink(f"{data}/test.log") == f"topics/test/0/{segment.name(0)}"
    assert topics.load(data, "test") == (1, 1) and topics.load(data, "jobs") == (1, 2)
    assert made.routed_seq == 4
    made.close()


def test_a_topic_is_in_force_from_its_first_message_on_also_behind_a_mixed_block(data):
    made = open_queues(data, 0)
    made.route([block([b"t|||1", b"a.k|||2"], 1), block([b"a.x|||3"] * 2, 3)])
    assert topics.load(data, "a") == (1, 2)  # a queue that is rebuilt from a later seq on would lack the first message
    made.close()


def test_lines_of_known_topics_do_not_wait_for_new_ones(data):
    looks = []
    made = open_queues(data, 0, check=lambda: looks.append(len(topics.names(data))))
    route(made, [b"known|||1"], 1)
    flood = [b"new-%d|||x" % number for number in range(100)]
    made.route([block([*flood, b"known|||2"], 2)])
    assert log_of(data, "known").count(b"\n") == 2
    assert len(topics.names(data)) == made.routed_seq == 1 + MADE_AT_ONCE
    made.route([block([b"new-99|||y", b"known|||3"], 103)])
    assert log_of(data, "known").count(b"\n") == 3 and made.routed_seq == 1 + 2 * MADE_AT_ONCE
    assert made.make_topics() and made.routed_seq == 104
    assert log_of(data, "new-99") == b"".join(stored([flood[99]], 101) + stored([b"new-99|||y"], 103))
    assert set(range(1, 101)) <= set(looks), "a heartbeat between any two"
    made.close()


def test_lines_that_wait_for_their_topic_survive_a_kill_behind_a_checkpoint(data):
    lines = [b"new-%d|||x" % number for number in range(100)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    made.route([block(lines, 1)])
    assert made.sorter.newcomers
    made.checkpoints.start()
    made.settle()
    del made  # killed: nothing is closed, and the ring has been given back
    again = open_queues(data, 100)
    assert len(topics.names(data)) == again.routed_seq == 100
    assert all(log_of(data, f"new-{n}") == stored([line], n + 1)[0] for n, line in enumerate(lines))
    again.close()


def test_a_topic_that_is_declared_while_its_lines_wait_gets_them_by_its_partitions(data):
    made = open_queues(data, 0)
    route(made, [*(b"new-%d|||x" % number for number in range(50)), b"late.a|||1", b"late.b|||2", b"late.c|||3"], 1)
    topics.declare(data, "late", 3)
    made.adopt_declarations()
    made.make_topics()
    assert topics.load(data, "late") == (3, 51)
    assert sum(log_of(data, "late", number).count(b"\n") for number in range(3)) == 3
    made.close()


def build(data, lines, seed, limits=None):
    """Route `lines` with declarations midway and ranges that drop_oldest took; returns the files."""
    rng = random.Random(seed)
    write_wal(data, lines).close()
    made = open_queues(data, 0, limits)
    declared = {120: ("a.b", 2), 300: ("spread", 3), 410: ("jobs.eu", 1)}
    grown = {200: ("test", 3), 350: ("spread", 4), 480: ("test", 5)}
    at = 0
    while at < len(lines):
        if grown and at >= min(grown):
            name, partitions = grown.pop(min(grown))
            topic_changes.submit(data, topic_changes.GROW, name, {"partitions": str(partitions)})
            made.adopt_declarations()
        if declared and at >= min(declared):
            name, partitions = declared.pop(min(declared))
            if not os.path.isdir(f"{data}/topics/{name}"):
                topics.declare(data, name, partitions)
            made.adopt_declarations()
        size = rng.randrange(1, 25)
        if at > 50 and rng.randrange(6) == 0:
            gone = min(len(lines), at + size) - at
            dropped.append(data, "durable", at + 1, at + gone, no_room)
        else:
            route(made, lines[at : at + size], at + 1)
        at += size
        made.sorter.sorted_seq = min(at, len(lines))
    made.close()
    return files(data)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lost", ["logs", "logs and checkpoint", "one log", "half of each", "indexes"])
def test_what_is_rebuilt_from_the_wal_is_the_same_byte_for_byte(data, seed, lost, monkeypatch):
    monkeypatch.setattr(queues, "AT_ONCE", [0, 1, 16][seed % 3])  # how many new topics are made before others go on
    lines = messages(random.Random(seed), 600)
    lines = [line for line in lines if seed % 2 or not line.startswith(b"spread")] or lines
    before = build(data, lines, seed)
    assert len(before) >= 5
    rng = random.Random(seed)
    for number, name in enumerate(sorted(before)):
        path = f"{data}/{name}"
        if lost.startswith("logs") or (lost == "one log" and number == seed):
            os.unlink(path)
        elif lost == "half of each":
            os.truncate(path, rng.randrange(len(before[name]) + 1))
        elif lost == "indexes":
            pathlib.Path(segment.index_path(path)).unlink(missing_ok=True)
            os.truncate(path, len(before[name]) // 2)
    if lost == "logs and checkpoint":
        os.unlink(f"{data}/router.ckpt")
    open_queues(data, len(lines)).close()
    assert files(data) == before
    for name, content in before.items():
        _, topic, number, _ = name.split("/")
        assert partition.end_offset(data, topic, int(number)) == (content.count(b"\n"), len(content))


SMALL = Limits(segment_bytes=900)


def gone(path, rng):
    os.unlink(path)


def shortened(path, rng):
    os.truncate(path, rng.randrange(os.path.getsize(path)))


def emptied(path, rng):
    os.truncate(path, 0)


def without_index(path, rng):
    shortened(path, rng)
    pathlib.Path(segment.index_path(path)).unlink()


SEED, SENT = 2, 800


@pytest.fixture(scope="module")
def small_segments(small_blocks, tmp_path_factory):
    """A data directory whose queues have many segments."""
    data = str(tmp_path_factory.mktemp("small"))
    for name in ("append", "topics"):
        os.mkdir(f"{data}/{name}")
    build(data, messages(random.Random(SEED), SENT), SEED, SMALL)
    return data


@pytest.mark.sampled(12)
@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("damage", [gone, shortened, emptied, without_index])
@pytest.mark.parametrize("which", ["first", "middle", "last", "last two", "all", "some"])
def test_a_segment_is_rebuilt_from_the_wal_with_the_same_name_and_bytes(
    data, small_segments, has_checkpoint, damage, which
):
    rng = random.Random(SEED)
    shutil.copytree(small_segments, data, symlinks=True, dirs_exist_ok=True)
    before = files(data)
    assert all(len(content) < 900 + 100 for content in before.values())
    for name in {os.path.dirname(name) for name in before}:
        paths = [path for _, path in segment.listing(f"{data}/{name}")]
        chosen = {
            "first": paths[:1],
            "middle": paths[1:-1][:1],
            "last": paths[-1:],
            "last two": paths[-2:],
            "all": paths,
            "some": rng.sample(paths, len(paths) // 2),
        }[which]
        for path in chosen:
            if os.path.getsize(path):
                damage(path, rng)
    if not has_checkpoint:
        os.unlink(f"{data}/router.ckpt")
    open_queues(data, SENT, SMALL).close()
    assert files(data) == before
    check_logs(data)
    heard = FakeLogger()
    open_queues(data, SENT, SMALL, heard).close()
    assert not heard.events and files(data) == before


def check_logs(data):
    """Names, links and indexes of every partition fit its lines."""
    for directory in {os.path.dirname(name) for name in files(data)}:
        found = segment.survey(f"{data}/{directory}")
        _, topic, number = directory.split("/")
        offset = found[0].first
        for each in found:
            assert each.first == offset
            with open(each.path, "rb") as file:
                offset += file.read().count(b"\n")
            if each is not found[-1]:
                assert index.is_whole(each.path)
        assert partition.end_offset(data, topic, int(number)) == (offset, sum(each.size for each in found))
        names = Topic(topic, topics.load(data, topic)[0], 1).log_names()
        assert os.path.realpath(f"{data}/{names[int(number)]}") == os.path.realpath(found[-1].path)


@pytest.mark.parametrize("seed", range(3))
def test_a_router_killed_anywhere_among_its_segments_goes_on(data, seed):
    """Power cuts: what came after the checkpoint is there, torn, NUL or missing, file by file."""
    rng = random.Random(seed)
    lines = messages(rng, 900)
    write_wal(data, lines).close()
    made, at = open_queues(data, 0, SMALL), 0
    while at < 900:
        size = min(900 - at, rng.randrange(1, 120))
        route(made, lines[at : at + size], at + 1)
        at += size
        made.tick()
        if rng.randrange(4) == 0:
            made.checkpoints.start()
        made.settle()
        if rng.randrange(3) == 0:  # killed: no close; then the power goes
            _, rows, _ = checkpoint.load(data)
            for directory in {os.path.dirname(name) for name in files(data)}:
                _, topic, number = directory.split("/")
                cut_power(rng, segment.survey(f"{data}/{directory}"), rows.get((topic, int(number)), PartitionState()))
            made = open_queues(data, at, SMALL)
            check_logs(data)
    made.close()
    check_logs(data)
    text = b"".join(files(data).values())
    assert sorted(text.splitlines(keepends=True), key=record.seq_of) == stored(lines)


def cut_power(rng, segments, known):
    """Do to the bytes that the checkpoint does not know what a file system may do to bytes that nobody synced."""
    synced = known.size
    for each in segments:
        keep, synced = min(each.size, synced), max(0, synced - each.size)
        if keep == each.size:
            continue
        size = rng.randrange(keep, each.size + 1)
        os.truncate(each.path, size)
        if rng.randrange(2):
            os.truncate(each.path, each.size)  # its length got there, its bytes did not
        if rng.randrange(3) == 0:
            pathlib.Path(segment.index_path(each.path)).unlink(missing_ok=True)
        if not keep and each.first > known.end_offset and rng.randrange(3) == 0:
            os.unlink(each.path)


def test_a_restart_in_the_middle_writes_nothing_twice(data):
    lines = messages(random.Random(3), 400)
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines[:200], 1)  # and then killed: no close, no checkpoint
    again = open_queues(data, 300)
    assert again.routed_seq == 300
    route(again, lines[250:], 251)  # the ring begins with what the WAL gave already
    again.close()
    everything = sorted(b"".join(files(data).values()).splitlines(keepends=True), key=record.seq_of)
    assert everything == stored(lines)


def test_a_checkpoint_syncs_what_a_killed_router_had_written(data, monkeypatch):
    lines = [b"test.a|||x", b"jobs.b|||y"] * 20
    write_wal(data, lines).close()
    route(open_queues(data, 0), lines, 1)  # and then killed: the logs are in the page cache only
    synced, fsync = set(), os.fsync

    def note(fd):
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    open_queues(data, len(lines)).close()  # writes nothing itself
    made = [f"{data}/topics/{topic}/0/{segment.name(0)}" for topic in ("test", "jobs")]
    assert {*made, *map(segment.index_path, made)} <= synced
    assert checkpoint.load(data)[0] == len(lines)


def test_an_empty_segment_whose_index_a_power_cut_took_gets_it_again(data):
    """A checkpoint syncs both files of a log that changed since the last one."""
    lines = [b"test.a|||x"] * 20
    write_wal(data, lines).close()
    made = open_queues(data, 0, Limits(segment_bytes=1 << 20))
    route(made, lines, 1)
    made.logs.log_of(made.in_force.table[b"test"], 0).roll()  # and then killed
    lost = f"{data}/topics/test/0/{segment.name(len(lines))}".replace(".log", ".idx")
    os.unlink(lost)
    open_queues(data, len(lines)).close()
    assert checkpoint.load(data)[0] == len(lines) and os.path.exists(lost)


def test_a_dotted_topic_takes_messages_only_from_its_declaration_on(data):
    lines = [b"a.b.k|||%d" % n for n in range(20)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines[:10], 1)
    topics.declare(data, "a.b", 1)
    made.adopt_declarations()
    route(made, lines[10:], 11)
    made.close()
    assert log_of(data, "a") == b"".join(stored(lines[:10])) and log_of(data, "a.b") == b"".join(stored(lines[10:], 11))
    assert topics.load(data, "a.b") == (1, 11)


def test_a_message_before_the_adoption_of_its_topic_is_partitioned_as_declared(data):
    lines = [b"t.%d|||x" % n for n in range(30)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    topics.declare(data, "t", 3)
    route(made, lines, 1)
    made.close()
    before = files(data)
    assert len(before) == 3 and all(before.values()) and topics.load(data, "t") == (3, 1)
    shutil.rmtree(f"{data}/topics/t/1")
    os.unlink(f"{data}/router.ckpt")
    open_queues(data, 30).close()
    assert files(data) == before


@pytest.mark.parametrize(("partitioner", "run"), [("crc32", 1), ("murmur2", 64)])
def test_messages_without_a_key_are_spread_by_seq_and_stay_in_order_among_the_keyed(data, partitioner, run):
    rng = random.Random(2)
    lines = [rng.choice([b"t|||x", b"t.k%d|||x" % rng.randrange(5)]) for _ in range(300)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    topics.declare(data, "t", 3, partitioner=partitioner)
    made.adopt_declarations()
    route(made, lines, 1, size=40)
    made.close()
    for number in range(3):
        seqs = [record.seq_of(line) for line in log_of(data, "t", number).splitlines()]
        assert seqs == sorted(seqs)
        assert {seq for seq in range(1, 301) if lines[seq - 1] == b"t|||x" and seq // run % 3 == number} <= set(seqs)


def test_more_topics_than_descriptors(data, monkeypatch):
    monkeypatch.setattr(logs, "MAX_OPEN", 8)
    rng = random.Random(1)
    lines = [b"t%d|||%d" % (rng.randrange(60), n) for n in range(2000)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    before = len(os.listdir("/proc/self/fd"))
    route(made, lines[:1500], 1)
    made.tick()
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    route(made, lines[1500:], 1501)
    made.close()
    whole = files(data)
    assert len(whole) == 60
    for topic in range(60):
        name = b"t%d|" % topic
        expected = [line for n, line in enumerate(stored(lines)) if lines[n].startswith(name)]
        assert log_of(data, f"t{topic}") == b"".join(expected)
        assert partition.end_offset(data, f"t{topic}", 0)[0] == len(expected)
    for name in whole:
        os.unlink(f"{data}/{name}")
    open_queues(data, 2000).close()
    assert files(data) == whole


def test_a_producer_of_long_routing_keys_does_not_fill_the_memory(data):
    lines = [b"t.%d.%b|||x" % (n, b"k" * 4000) for n in range(100)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines, 1)
    assert made.sorter.remembered_bytes < 50_000
    made.close()


def test_a_queue_that_drop_oldest_left_short_is_not_filled_up_behind_its_back(data):
    lines = [b"t|||%d" % n for n in range(30)]
    write_wal(data, lines).close()
    dropped.append(data, "durable", 11, 20, no_room)
    open_queues(data, 30).close()
    assert log_of(data, "t") == b"".join(stored(lines)[:10] + stored(lines)[20:])


def test_a_checkpoint_ahead_of_the_wal_is_refused(data):
    lines = [b"t|||%d" % n for n in range(30)]
    write_wal(data, lines).close()
    open_queues(data, 30).close()
    with pytest.raises(CorruptError, match="has routed up to seq 30, but the ring durable has shown up to 20 only"):
        open_queues(data, 20)


def test_a_log_removed_under_the_router_ends_it(data):
    lines = [b"t|||%d" % n for n in range(30)]
    write_wal(data, lines).close()
    made = open_queues(data, 30)
    os.unlink(f"{data}/topics/t/0/{segment.name(0)}")
    with pytest.raises(RetryError, match="removed by another process"):
        made.tick()
    open_queues(data, 30).close()
    assert log_of(data, "t") == b"".join(stored(lines))


@pytest.mark.parametrize(
    ("name", "partitions", "said"),
    [
        ("../t", 1, "must match"),
        ("append", 1, "must match"),
        ("t", 0, "must be between 1 and 1024"),
        ("t", 1025, "must be between 1 and 1024"),
        ("there", 1, "already exists with 2 partition"),
        ("there-0", 1, r"its symlink there-0.log already exists"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_and_leaves_nothing(data, name, partitions, said):
    topics.declare(data, "there", 2)
    open_queues(data, 0).close()
    before = sorted(os.listdir(f"{data}/topics"))
    with pytest.raises(ConfigError, match=said):
        topics.declare(data, name, partitions)
    assert sorted(os.listdir(f"{data}/topics")) == before


def test_a_rebuild_of_any_length_gives_signs_of_life(data, monkeypatch):
    """A lost segment of a quiet topic is looked for in much of the WAL: who is silent meanwhile is taken for dead, and killed."""
    lines = [b"t|||%d" % n for n in range(400)]
    wal = Wal(data, no_room, 1 << 20, Limits(segment_bytes=200))  # which is read segment by segment
    for at in range(0, 400, 5):
        wal.append([(block(lines[at : at + 5], at + 1).data, at + 1, 5, FIRST_TS + at)])
    wal.close()
    made = open_queues(data, 0, Limits(segment_bytes=2000))
    route(made, lines, 1)
    made.close()
    _, lost, *_ = segment.survey(f"{data}/topics/t/0")
    os.unlink(lost.path)
    signs, before_and_after, fill = [], [], Recovery._fill

    def counted(*args, **named):
        before_and_after.append(len(signs))
        filled = fill(*args, **named)
        before_and_after.append(len(signs))
        return filled

    monkeypatch.setattr(Recovery, "_fill", counted)
    open_queues(data, 400, Limits(segment_bytes=2000), check=lambda: signs.append(None)).close()
    before, after = before_and_after
    assert after - before >= 2 * (lost.size // 250)  # read twice: to count, and to copy
    assert b"".join(files(data)[name] for name in sorted(files(data))) == b"".join(stored(lines))


def test_indexes_that_are_made_anew_give_signs_of_life(data):
    """One a piece of 16 blocks, in the WAL and in a queue."""
    lines = [b"t|||%d" % n for n in range(3000)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines, 1)
    made.close()
    pieces = len(log_of(data, "t")) // (16 * index.BLOCK_BYTES)
    signs = []
    os.unlink(segment.index_path(f"{data}/append/{segment.name(1)}"))
    Wal(data, no_room, 1 << 20, check=lambda: signs.append(None)).close()
    assert len(signs) >= pieces > 2
    signs.clear()
    os.unlink(segment.index_path(f"{data}/topics/t/0/{segment.name(0)}"))
    open_queues(data, 3000, check=lambda: signs.append(None)).close()
    assert len(signs) >= pieces


# --- marks -----------------------------------------------------------------------------------------------------------

MARKED = b"jobs.eu.@.k jobs.eu.x jobs.x jobs jobs.eu.de.@ jobs.eu.de.x jobs.@.eu wide wide.@ wide.@. wide.@2 wide.@2.k wide.k"
MARKED += b" a.b.c.@.k a.b.c a.b.@1 wide.@9 x.y.@4.k x.y"


@pytest.mark.parametrize("seed", range(12))
def test_queues_of_lines_with_marks_are_the_same_however_they_were_routed(data, seed):
    rng = random.Random(seed)
    identity.open_data(data)
    topics.declare(data, "wide", 4)
    lines = [b"%b|1|%d|x" % (rng.choice(MARKED.split()), n) for n in range(500)]
    write_wal(data, lines).close()
    made = open_queues(data, 0)
    route(made, lines, 1, rng.choice([1, 7, 100]))
    made.make_topics()
    made.close()
    before, declared = files(data), topics.listing(data)
    named = {"a.b", "a.b.c", "jobs", "jobs.eu", "jobs.eu.de", "wide", "x.y"}
    assert (
        named <= {name for name, *_ in declared} <= named | {"a", "x"}
    )  # those, where a line without a mark came first
    everywhere = rng.random() < 0.5
    for name, *_ in declared:
        if everywhere or rng.random() < 0.5:
            shutil.rmtree(f"{data}/topics/{name}/0")
    open_queues(data, 500).close()
    assert files(data) == before and topics.listing(data) == declared
    shutil.rmtree(f"{data}/topics")
    for name in os.listdir(data):
        if name.endswith((".ckpt", ".log")):
            os.unlink(f"{data}/{name}")
    os.mkdir(f"{data}/topics")
    topics.declare(data, "wide", 4)
    open_queues(data, 0).close()
    again = open_queues(data, 500)
    again.close()
    assert files(data) == before and topics.listing(data) == declared


def test_a_topic_named_by_a_mark_has_the_lines_behind_it_also_before_it_is_made(data):
    identity.open_data(data)
    made = open_queues(data, 0)
    flood = [b"new-%d|||x" % number for number in range(2 * MADE_AT_ONCE)]
    lines = [*flood, b"jobs.eu.x|||1", b"jobs.eu.@.k|||2", b"jobs.eu.x|||3"]
    write_wal(data, lines).close()
    made.route([block(lines, 1)])
    first = len(flood) + 1
    assert not os.path.exists(f"{data}/topics/jobs.eu")
    made.checkpoints.start()
    made.settle()
    with open(f"{data}/router.ckpt") as file:
        assert "jobs.eu" not in file.read()
    made.route([block([b"jobs.eu.y|||4"], first + 3)])
    made.make_topics()
    assert topics.load(data, "jobs.eu") == (1, first + 1)
    assert log_of(data, "jobs") == stored([lines[first - 1]], first)[0]
    assert log_of(data, "jobs.eu").count(b"\n") == 3
    made.close()


def test_a_declared_topic_that_a_mark_names_is_adopted_with_that_line(data):
    identity.open_data(data)
    made = open_queues(data, 0)
    route(made, [b"jobs.eu.k|||1"], 1)
    topics.declare(data, "jobs.eu", 3)
    route(made, [b"jobs.eu.@2.k|||2", b"jobs.eu.@1|||3"], 2)
    assert topics.load(data, "jobs.eu") == (3, 2)
    assert [log_of(data, "jobs.eu", number).count(b"\n") for number in range(3)] == [0, 1, 1]
    made.close()


@pytest.mark.parametrize("size", [1, 7, 40])
def test_the_same_routing_key_leads_elsewhere_from_the_seq_on_where_marks_count(data, size):
    identity.open_data(data)
    with open(f"{data}/format", "w") as file:
        file.write(identity.format_text(1, 14))
    topics.declare(data, "wide", 4, partitioner="crc32")
    made = open_queues(data, 0)
    lines = [b"wide.@1.k|||x"] * 40 if size == 40 else [b"wide.@%d.k|||x" % (n % 2) for n in range(40)]
    write_wal(data, lines).close()
    route(made, lines, 1, size)
    made.close()
    before = files(data)
    keys = [line.split(b"|")[0].partition(b".")[2] for line in lines]
    asked = [zlib.crc32(key) % 4 if seq < 14 else int(key[1:2]) for seq, key in enumerate(keys, 1)]
    for number in range(4):
        there = [seq for seq, wanted in enumerate(asked, 1) if wanted == number]
        assert [record.seq_of(line) for line in log_of(data, "wide", number).splitlines()] == there
    shutil.rmtree(f"{data}/topics/wide")
    open_queues(data, 40).close()
    assert files(data) == before
