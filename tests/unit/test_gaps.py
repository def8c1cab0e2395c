"""Gaps after a fork: no offset is given out twice, and nothing that reads, counts, cuts or rebuilds takes a gap for loss."""

import asyncio
import os
import shutil
import zlib

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored

from kmq.gateway.core.finding import PlaceFinder
from kmq.gateway.core.partitions import MAX_BATCH, Partitions, Range
from kmq.log import compaction, dropped, gaps, reader, rows, segment, topics
from kmq.log.bounds import Bounds, measure
from kmq.log.gaps import Fork, Gap
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.router.queues import Queues

pytestmark = pytest.mark.usefixtures("small_blocks")

TO, JUMP = 1_000_000, 500_000  # the first offset and the first seq after the fork
KEYS = {zlib.crc32(key) % 2: key for key in (b"a", b"b", b"c", b"d")}  # by partition, of two


class Broker:
    """WAL and router of one data directory, without the other stages."""

    def __init__(self, data, limits=None):
        self.data, self.limits, self.logger = data, limits, FakeLogger()
        self.start()

    def start(self):
        self.wal = Wal(self.data, no_room, 1 << 20)
        self.next_seq = max([self.wal.last_seq, *(gone.last for gone in dropped.accounted(self.data))]) + 1
        self.queues = Queues(self.data, no_room, self.logger, self.limits)
        self.queues.recover(self.wal.last_seq)

    def send(self, *lines):
        lines = [*lines]
        text = stored(lines, self.next_seq)
        self.wal.append([(b"".join(text), self.next_seq, len(text), FIRST_TS + self.next_seq + len(text))])
        self.wal.sync()
        self.queues.route([block(lines, self.next_seq)])
        self.queues.make_topics()
        self.next_seq += len(lines)

    def stop(self):
        self.queues.close()
        self.wal.close()

    def kill(self):
        self.wal.close()

    def fork(self):
        """Stop, fork as `kmq tier fork` does, and start."""
        self.stop()
        gaps.write_forks(self.data, [*gaps.forks(self.data), Fork(self.next_seq, TO)])
        dropped.append(self.data, "framed", self.next_seq, JUMP - 1, no_room)
        self.start()


def messages(count, topic=b"t", begin=0):
    return [b"%b|1|%d|m%d" % (topic, n, n) for n in range(begin, begin + count)]


def read_all(data, topic="t", number=0, offset=0):
    """Every record of a partition, by offset."""
    found = {}
    for first, lines in reader.partition(data, topic, number).chunks(offset):
        found |= dict(enumerate(lines.split(b"\n")[:-1], first))
    return found


def names(data, topic="t", number=0):
    return sorted(int(name[:20]) for name in os.listdir(f"{data}/topics/{topic}/{number}") if name.endswith(".log"))


@pytest.fixture
def broker(data):
    made = Broker(data)
    made.send(*messages(10))
    made.fork()
    return made


def test_the_next_record_after_a_fork_has_the_first_offset_after_the_gap(broker, data):
    assert gaps.read(f"{data}/topics/t/0") == (Gap(10, TO),)
    assert Bounds(data).of("t", 0) == (0, TO)
    broker.send(*messages(5, begin=10))
    found = read_all(data)
    assert [*found] == [*range(10), *range(TO, TO + 5)]
    assert [line.rpartition(b"|")[2] for line in found.values()] == [b"m%d" % n for n in range(15)]
    assert names(data) == [0, TO]
    broker.stop()


@pytest.mark.parametrize("offset", [10, 15, TO - 1, TO])
def test_a_reader_in_the_gap_reads_on_after_it(broker, data, offset):
    log = reader.partition(data, "t", 0)
    assert log.read(offset)[1] == b""
    broker.send(*messages(5, begin=10))
    assert log.read(offset)[0] == TO
    partition = Partitions(data).open("t", 0)
    assert partition.batch(offset, MAX_BATCH).offset == TO
    assert partition.batch(offset, MAX_BATCH, 3).offset == TO, "also if it asks for few offsets"
    assert Range(log, offset, TO + 5).first_offset == TO
    broker.stop()


def test_no_answer_spans_the_gap(broker, data):
    broker.send(*messages(5, begin=10))
    log = reader.partition(data, "t", 0)
    assert (log.read(7)[0], log.read(7)[1].count(b"\n")) == (7, 3)
    part = Range(log, 7, TO + 5)
    assert (part.first_offset, part.next_offset, part.next_span().nbytes) == (7, 10, part.length)
    assert part.next_span() is None
    batch = Partitions(data).open("t", 0).batch(7, MAX_BATCH)
    assert (batch.offset, batch.lines) == (7, 3)
    broker.stop()


def test_a_record_after_the_gap_is_found_from_one_before_it(broker, data):
    """As for the reply to a producer, after one that was told the old offset of a message sent again."""

    async def places(finder, *seqs):
        found = await finder.find("t", [(b"t", seq) for seq in seqs])
        return {seq: place.offset for seq, place in found.items()}

    async def story():
        finder = PlaceFinder(data)
        assert await places(finder, 4) == {4: 3}
        broker.send(*messages(5, begin=10))
        assert await places(finder, 10, JUMP, JUMP + 4) == {10: 9, JUMP: TO, JUMP + 4: TO + 4}
        finder.close()

    asyncio.run(story())
    broker.stop()


def test_a_gap_counts_as_no_record(broker, data):
    broker.send(*messages(5, begin=10))
    [size] = measure(data, "t", 1)
    assert (size.first_offset, size.end_offset, size.messages) == (0, TO + 5, 15)
    found = Bounds(data).gaps("t", 0)
    assert found == (Gap(10, TO),)
    assert gaps.count(found, 8, TO + 2) == TO - 10 and gaps.count(found, 0, 10) == 0 == gaps.count(found, TO, TO + 5)
    assert (gaps.passed(found, 9), gaps.passed(found, 10), gaps.passed(found, TO)) == (9, TO, TO)
    assert (gaps.before(found, 9), gaps.before(found, TO), gaps.before(found, TO + 1)) == (9, 10, TO + 1)
    assert gaps.range_of(found, 12, TO) == range(12, 12) and gaps.range_of(found, 5, TO) == range(5, 10)
    assert gaps.range_of(found, 5, TO + 2) == range(TO, TO + 2) and gaps.range_of(found, 2, 5) == range(2, 5)
    broker.stop()


def test_so_many_records_back_are_counted_without_gaps():
    found = (gaps.Gap(10, 100), gaps.Gap(105, 200))
    assert [gaps.back((), 10, count) for count in (0, 3, 12)] == [10, 7, -2]
    assert [gaps.back(found, 203, count) for count in (0, 2, 3, 4, 8, 9, 18, 19)] == [203, 201, 200, 104, 100, 9, 0, -1]
    assert gaps.back(found[:1], 100, 2) == 8, "no record follows the gap yet"


def test_a_directory_without_a_fork_has_no_new_file(data):
    made = Broker(data)
    made.send(*messages(10))
    made.stop()
    assert not [name for _, _, found in os.walk(data) for name in found if name in (gaps.NAME, rows.FILE, ".restored")]


def test_a_restart_changes_nothing(broker, data):
    for begin in (10, 15):
        broker.stop()
        broker.start()
        broker.send(*messages(5, begin=begin))
    assert [*read_all(data)] == [*range(10), *range(TO, TO + 10)]
    assert names(data) == [0, TO]
    broker.stop()


def test_a_topic_made_after_the_fork_begins_after_every_offset_that_was_given_out(broker, data):
    topics.make(data, "declared", topics.Declaration(1, broker.next_seq))
    broker.queues.adopt_declarations()
    assert Bounds(data).of("declared", 0) == (TO, TO)
    broker.send(*messages(3, b"new"))
    assert [*read_all(data, "new")] == [TO, TO + 1, TO + 2]
    assert Partitions(data).open("new", 0).passed(2) == TO, "a consumer of the lost topic of that name reads on, too"
    broker.stop()
    shutil.rmtree(f"{data}/topics/new/0")
    broker.start()
    assert [*read_all(data, "new")] == [TO, TO + 1, TO + 2]
    assert Partitions(data).open("new", 0).passed(2) == TO
    broker.stop()


def test_a_partition_without_records_begins_after_the_gap(data):
    made = Broker(data)
    topics.make(data, "t", topics.Declaration(2, 1))
    made.queues.adopt_declarations()
    made.send(*messages(3, b"t." + KEYS[0]))
    made.fork()
    assert [Bounds(data).of("t", number) for number in (0, 1)] == [(0, TO), (TO, TO)]
    assert Partitions(data).open("t", 1).passed(5) == TO
    made.send(*messages(3, b"t." + KEYS[1]))
    made.stop()
    made.start()
    assert [*read_all(data, "t", 1)] == [TO, TO + 1, TO + 2]
    made.stop()


@pytest.mark.parametrize("lost", ["queue", "checkpoint", "both", "tier", "before", "after", "tier and after"])
def test_a_rebuild_gives_the_same_offsets_and_the_same_gap(broker, data, lost):
    broker.send(*messages(5, begin=10))
    broker.stop()
    before, directory = read_all(data), f"{data}/topics/t/0"
    if lost in ("queue", "both"):
        shutil.rmtree(directory)
    if lost in ("checkpoint", "both"):
        os.unlink(f"{data}/router.ckpt")
    if "tier" in lost:
        os.unlink(f"{directory}/{rows.FILE}")
    if lost == "before":
        os.unlink(f"{directory}/{segment.name(0)}")
    if "after" in lost:
        os.unlink(f"{directory}/{segment.name(TO)}")
    broker.start()
    assert read_all(data) == before
    assert gaps.read(directory) == (Gap(10, TO),)
    broker.send(*messages(1, begin=15))
    assert [*read_all(data)][-1] == TO + 5
    broker.stop()


@pytest.mark.parametrize("cut", [0, TO])
def test_a_torn_segment_on_either_side_of_the_gap_is_completed(broker, data, cut):
    broker.send(*messages(5, begin=10))
    broker.stop()
    before, path = read_all(data), f"{data}/topics/t/0/{segment.name(cut)}"
    os.truncate(path, os.path.getsize(path) - 30)
    broker.start()
    assert read_all(data) == before
    broker.stop()


def test_two_forks_leave_two_gaps(broker, data):
    broker.send(*messages(5, begin=10))
    broker.stop()
    gaps.write_forks(data, [*gaps.forks(data), Fork(broker.next_seq, 3 * TO)])
    broker.start()
    broker.send(*messages(2, begin=15))
    expected = [*range(10), *range(TO, TO + 5), *range(3 * TO, 3 * TO + 2)]
    assert [*read_all(data)] == expected
    broker.stop()
    shutil.rmtree(f"{data}/topics/t/0")
    os.unlink(f"{data}/router.ckpt")
    broker.start()
    assert [*read_all(data)] == expected and gaps.read(f"{data}/topics/t/0") == (Gap(10, TO), Gap(TO + 5, 3 * TO))
    broker.stop()


def test_compaction_takes_the_true_end_of_the_segment_before_the_gap(broker, data):
    broker.send(*messages(5, begin=10))
    broker.queues.checkpoints.start()
    broker.queues.settle()
    [sealed] = compaction.sealed(data, "t", 0, TO + 5)
    assert (sealed.first, sealed.end) == (0, 10)
    broker.stop()


def test_retention_deletes_up_to_the_gap_and_keeps_the_last_record(broker, data):
    broker.queues.use_limits(Limits(retention_bytes=1))
    for _ in range(4):
        broker.queues.tick()
        broker.queues.settle()
    assert [*read_all(data)] == [9]
    broker.send(*messages(5, begin=10))
    broker.stop()
    broker.start()
    assert [*read_all(data)][-5:] == [*range(TO, TO + 5)]
    broker.stop()


@pytest.mark.parametrize("start", [5, 10, 12, TO, TO + 2])
def test_a_start_may_lie_on_either_side_of_the_gap_or_in_it(broker, data, start):
    broker.send(*messages(5, begin=10))
    broker.queues.retention.begin_at([(broker.queues.logs.log_of(broker.queues.in_force.table[b"t"], 0), start)])
    for _ in range(3):
        broker.queues.tick()
        broker.queues.settle()
    expected = [offset for offset in [*range(10), *range(TO, TO + 5)] if offset >= start]
    assert [*read_all(data)] == expected
    broker.stop()
    broker.start()
    assert [*read_all(data)] == expected
    broker.stop()


@pytest.mark.parametrize("step", ["tier", "segment"])
def test_a_kill_while_a_gap_is_made_is_finished_by_the_next_start(data, step):
    made = Broker(data)
    made.send(*messages(10))
    made.send(*messages(3, b"u"))
    made.stop()
    gaps.write_forks(data, [Fork(made.next_seq, TO)])
    dropped.append(data, "framed", made.next_seq, JUMP - 1, no_room)
    for topic, end in (("t", 10), ("u", 3)):
        gaps.write(f"{data}/topics/{topic}/0", 1, [Gap(end, TO)])
        if step == "segment":
            segment.begin(f"{data}/topics/{topic}/0/{segment.name(TO)}", no_room)
    made.start()
    made.send(*messages(2, begin=10), *messages(2, b"u", begin=3))
    made.stop()
    made.start()
    assert [*read_all(data)] == [*range(10), TO, TO + 1]
    assert [*read_all(data, "u")] == [*range(3), TO, TO + 1]
    made.stop()


def test_a_damaged_tier_is_no_gap(data):
    good = b"kmq-tier 1 lineage=ab log=t/0 life=1\n0 gap t/0 life=1 from=10 to=20 why=fork\n"
    assert gaps.parse(good, "t/0") == (Gap(10, 20),)
    assert gaps.parse(good[:-1], "t/0") == ()  # the line is not there yet
    bad = [good.replace(b"t/0", b"t/1"), good.replace(b"from=10", b"from=21"), b"", good + b"\0\n"]
    assert [gaps.parse(each, "t/0") for each in bad] == [None] * 4


def test_a_lost_copy_of_the_forks_does_not_count(data):
    gaps.write_forks(data, [Fork(11, TO)])
    for name in (gaps.NAME, gaps.COPY):
        with open(f"{data}/{name}", "r+b") as file:
            kept = file.read()
            file.seek(0)
            file.write(b"9")
        assert gaps.forks(data) == (Fork(11, TO),) and list(gaps.faults(data)) == [name]
        with open(f"{data}/{name}", "wb") as file:
            file.write(kept)
