"""What a stream's planner makes of offsets and brokers, without Spark: names, copies, recoveries, limits, waiting."""

import json
import shutil
import time

import made_data
import made_up
import pytest
from made_data import FIRST_TS, append, write_data
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMinRows
from pyspark.sql.types import IntegerType, LongType, StructField, StructType
from waiting import until

from kmq.errors import ConfigError
from kmq.log import topic_changes, topics
from kmq.log.reader import WAL
from kmq.spark.source.batch_reader import BatchReader
from kmq.spark.source.brokers import Directory
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import DataLossError
from kmq.spark.source.planner import partition_has, stamp_before, wal_has
from kmq.spark.source.stream_reader import StreamReader

ALL = ReadAllAvailable()


BLOCK_BYTES = 512  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


def lines(low, high, topic=b"t"):
    return [b"%b.k%d|0|%d|payload %d" % (topic, n % 5, n, n) for n in range(low, high)]


def planner(path, **options):
    given = {"path": str(path), "subscribe": "t", "startingOffsets": "earliest"} | options
    return StreamReader(StructType([]), ReadOptions(given))


def through_json(offset):
    return json.loads(json.dumps(offset))


def next_offset(stream, start, limit=None):
    return through_json(stream.latestOffset(start, limit or stream.getDefaultReadLimit()))


def read_all(path, **options):
    """The offset of a stream that has read all there is."""
    stream = planner(path, **options)
    return next_offset(stream, through_json(stream.initialOffset()), ALL)


def numbers(offset, topic="t"):
    (topics,) = offset.values()
    return topics[topic]


def spans(stream, start, end):
    return [(*span.key[1:], span.start, span.end) for task in stream.partitions(start, end) for span in task.spans]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_of_the_data_id_however_path_is_spelt(tmp_path, monkeypatch):
    made = write_data(tmp_path / "data", lines(0, 10), closed=False)
    start = read_all(tmp_path / "data")
    append(made, lines(10, 15))
    (tmp_path / "link").symlink_to("data")
    shutil.copytree(tmp_path / "data", tmp_path / "moved", symlinks=True)
    monkeypatch.chdir(tmp_path)
    for spelt in ("data", "./data", f"file://{tmp_path}/data", tmp_path / "link", tmp_path / "moved"):
        stream = planner(spelt)
        end = next_offset(stream, start, ALL)
        assert spans(stream, start, end) == [("t", 0, 10, 15)]
        assert next_offset(planner(tmp_path / "data"), end, ALL) == end  # nothing new, so nothing else


def test_another_directory_at_the_same_place_is_refused(tmp_path):
    write_data(tmp_path / "data", lines(0, 10))
    start = read_all(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    write_data(tmp_path / "data", lines(0, 10))
    with pytest.raises(ConfigError, match="has another data directory"):
        next_offset(planner(tmp_path / "data"), start)
    write_data(tmp_path / "other", lines(0, 10))
    with pytest.raises(ConfigError, match="not among the brokers"):
        next_offset(planner(tmp_path / "other"), start)


def test_a_stream_goes_on_at_another_replica_of_its_shard(tmp_path):
    made = write_data(tmp_path / "a", lines(0, 10), closed=False)
    (tmp_path / "a" / "replica").write_text("0c1d4f2a9be87356 shard=s\n")
    start = read_all(tmp_path / "a")
    append(made, lines(10, 15))
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    (tmp_path / "b" / "id").write_text("another\n")
    stream = planner(tmp_path / "b")
    assert spans(stream, start, next_offset(stream, start, ALL)) == [("t", 0, 10, 15)]
    (tmp_path / "b" / "lineage").write_text("detached\n")
    with pytest.raises(ConfigError, match="not among the brokers"):
        next_offset(planner(tmp_path / "b"), start)


def test_two_names_of_one_directory_are_refused(tmp_path):
    write_data(tmp_path / "data", lines(0, 10))
    (tmp_path / "link").symlink_to("data")
    with pytest.raises(ConfigError, match=r"/data and .*/link are the same data directory"):
        planner(f"{tmp_path}/data,{tmp_path}/link").initialOffset()


# --- is it the same data ---------------------------------------------------------------------------------------------


def test_a_partition_that_is_being_rebuilt_is_waited_for(tmp_path):
    """As after a power cut: the router writes it again from the WAL."""
    made = write_data(tmp_path / "data", lines(0, 100), {"t": 2}, segment_bytes=600, group=5, closed=False)
    start = read_all(tmp_path / "data")
    read = numbers(start)["0"]
    append(made, lines(100, 110, b"t.@0"))
    partition, whole = tmp_path / "data/topics/t/1", tmp_path / "whole"
    shutil.copytree(partition, whole)
    for path in sorted(partition.glob("*"))[-6:]:
        path.unlink()
    stream = planner(tmp_path / "data")
    end = next_offset(stream, start)
    assert spans(stream, start, end) == [("t", 0, read, read + 10)]
    assert next_offset(stream, end) == end
    shutil.rmtree(partition)
    whole.rename(partition)
    assert next_offset(stream, end) == end


@pytest.fixture
def without_wal(tmp_path, monkeypatch):
    """(lineage's question, offset): a partition of 100 records; retention has taken the WAL of all of them."""
    made = write_data(tmp_path / "data", lines(0, 100), segment_bytes=600, group=5, closed=False)
    broker = Directory(str(tmp_path / "data"))
    stamp = stamp_before(broker, "t", 0, 0, 50)
    assert stamp == (50, FIRST_TS + 50)
    append(made, lines(0, 20, b"other"), group=5)
    for path in sorted(tmp_path.glob("data/append/*"))[:-2]:
        path.unlink()
    assert wal_has(broker, stamp) is None
    return broker, stamp


def test_a_partition_tells_what_the_wal_has_no_more(without_wal):
    broker, (seq, micros) = without_wal

    def has(stamp):
        return partition_has(broker, "t", 0, stamp, 50, 100)

    assert has((seq, micros))
    assert not has((seq, micros + 1))  # its seq has another record
    assert not has((seq + 1, micros))  # lies behind what was read
    assert not has((seq - 1, micros - 1))  # what was read goes on behind it
    assert not has((seq + 1000, micros))  # all there is came before it


def test_records_around_one_that_compaction_took_tell_for_it(without_wal, monkeypatch):
    broker, (seq, micros) = without_wal

    def compacted(topic, partition, start, end):
        yield from ((at, b"\n" if at == 49 else b"%d|%d.%06d|t|0||\n" % (at + 1, *divmod(FIRST_TS + at + 1, 10**6)))
                    for at in range(start, end))  # fmt: skip

    def offset_of_seq(topic, partition, wanted):
        return max(wanted - 1, 0) + (wanted == 50)

    monkeypatch.setattr(broker, "read", compacted)
    monkeypatch.setattr(broker, "offset_of_seq", offset_of_seq)
    assert partition_has(broker, "t", 0, (seq, micros), 50, 100)
    assert not partition_has(broker, "t", 0, (seq + 1, micros), 50, 100)
    assert stamp_before(broker, "t", 0, 0, 50) == (49, FIRST_TS + 49)


def test_what_retention_took_must_have_come_before_what_there_is(without_wal, tmp_path):
    broker, (seq, micros) = without_wal
    segments = sorted(tmp_path.glob("data/topics/t/0/*.log"))
    for path in segments[: len(segments) * 3 // 4]:
        path.unlink()
        path.with_suffix(".idx").unlink()
    first, end = broker.bounds(["t"])["t", 0]
    assert first > 50
    assert partition_has(broker, "t", 0, (seq, micros), 50, end)
    assert not partition_has(broker, "t", 0, (seq + first, micros), 50, end)


def test_a_wal_that_ends_before_what_was_read_is_another_one(without_wal):
    broker, _ = without_wal
    _, end = broker.bounds([WAL])[WAL, 0]
    assert wal_has(broker, (end, 1)) is False
    last = stamp_before(broker, WAL, 0, end - 1, end)
    assert wal_has(broker, last) is True
    assert wal_has(broker, (last[0], last[1] + 1)) is False


def test_a_topic_that_an_older_copy_does_not_have_is_missed(tmp_path):
    copy = write_data(tmp_path / "data", lines(0, 10, b"other"), closed=False)
    shutil.copytree(tmp_path / "data", tmp_path / "copy", symlinks=True)
    append(copy, lines(0, 10))
    start = read_all(tmp_path / "data")
    with pytest.raises(DataLossError, match=r"t/0: .*restored from an older copy"):
        next_offset(planner(tmp_path / "copy"), start)


def changed(made, data, submit):
    """Let the router carry out a change of topics: `submit()`."""
    submit()
    made[1].tick()
    made[1].settle()


def made_again(tmp_path):
    """A topic of 100 records, its stream that has read 60 of them, the topic deleted; another of 30 records has its name."""
    data = str(tmp_path / "data")
    made = write_data(tmp_path / "data", lines(0, 60), closed=False)
    start = read_all(tmp_path / "data")
    append(made, lines(60, 100))
    changed(made, data, lambda: topic_changes.submit(data, topic_changes.DELETE, "t", {}))
    append(made, lines(100, 130))
    return made, data, start


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_strict_stream_goes_on_after_a_lenient_one_has_accepted_a_topic_made_again(tmp_path, is_truncated):
    made, data, start = made_again(tmp_path)
    with pytest.raises(DataLossError, match="read up to offset 60 of 100; another topic has its name now"):
        next_offset(planner(data), start, ALL)
    if is_truncated:
        changed(made, data, lambda: topic_changes.begin_at(data, "t", None, {0: 130}))
    start = next_offset(planner(data, failOnDataLoss="false"), start, ALL)
    assert numbers(start) == {"0": 130}
    append(made, lines(130, 140))
    if is_truncated:
        assert Directory(data).bounds(["t"])["t", 0] == (130, 140)
    stream = planner(data)
    assert spans(stream, start, next_offset(stream, start, ALL)) == [("t", 0, 130, 140)]


def test_an_empty_topic_made_again_is_accepted_once(tmp_path):
    data = str(tmp_path / "data")
    made = write_data(tmp_path / "data", lines(0, 60), closed=False)
    start = read_all(tmp_path / "data")
    changed(made, data, lambda: topic_changes.submit(data, topic_changes.DELETE, "t", {}))
    changed(made, data, lambda: topics.declare(data, "t", 1))
    with pytest.raises(DataLossError, match="another topic has its name now"):
        next_offset(planner(data), start, ALL)
    accepted = next_offset(planner(data, failOnDataLoss="false"), start, ALL)
    append(made, lines(60, 70))
    stream = planner(data)
    assert spans(stream, accepted, next_offset(stream, accepted, ALL)) == [("t", 0, 60, 70)]


def test_a_lenient_stream_names_and_counts_each_range_that_it_skips(tmp_path, capfd):
    made, data, start = made_again(tmp_path)
    changed(made, data, lambda: topic_changes.begin_at(data, "t", None, {0: 110}))
    stream = planner(data, failOnDataLoss="false")
    assert spans(stream, start, next_offset(stream, start, ALL)) == [("t", 0, 110, 130)]
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "event=records_skipped" in line]
    assert f"broker={data} topic=t partition=0 first=60 last=109 count=50" in said


def test_a_start_beyond_the_end_is_an_error_until_there_are_records(tmp_path):
    made = write_data(tmp_path / "data", lines(0, 10), closed=False)
    options = {"startingOffsets": '{"t": {"0": 12}}'}
    start = through_json(planner(tmp_path / "data", **options).initialOffset())
    with pytest.raises(ConfigError, match=r"startingOffsets: .*t/0 ends at 10, which is before 12"):
        next_offset(planner(tmp_path / "data", **options), start)
    forgiving = planner(tmp_path / "data", failOnDataLoss="false", **options)
    assert numbers(next_offset(forgiving, start)) == {"0": 10}
    append(made, lines(10, 15))
    stream = planner(tmp_path / "data", **options)
    assert spans(stream, start, next_offset(stream, start)) == [("t", 0, 12, 15)]


def test_a_partition_made_again_in_the_same_inode_is_counted_anew(tmp_path):
    """As file systems do it for a topic that is deleted and comes again."""
    write_data(tmp_path / "data", lines(0, 100))
    write_data(tmp_path / "more", lines(0, 220))
    broker = Directory(str(tmp_path / "data"))
    assert broker.bounds(["t"])["t", 0] == (0, 100)
    old = tmp_path / "data/topics/t/0" / f"{0:020}.log"
    old.with_suffix(".idx").unlink()
    new = old.rename(old.with_name(f"{100:020}.log"))
    new.write_bytes((tmp_path / "more/topics/t/0" / f"{0:020}.log").read_bytes())
    assert broker.bounds(["t"])["t", 0] == (100, 320)


# --- how far a batch goes --------------------------------------------------------------------------------------------


def test_a_batch_ends_at_one_time_over_all_brokers(tmp_path, monkeypatch):
    for number, count in enumerate((300, 30)):
        made = write_data(tmp_path / f"b{number}", [], closed=False)
        for at in range(10):
            for module in (made_up, made_data):
                monkeypatch.setattr(module, "FIRST_TS", FIRST_TS + 1_000_000 * at)
            append(made, lines(0, count // 10))
    stream = planner(tmp_path / "b*", maxOffsetsPerTrigger="33")
    start, read = through_json(stream.initialOffset()), []
    while (end := next_offset(stream, start)) != start:
        read.append([end[broker]["t"]["0"] for broker in sorted(end)])
        start = end
    assert read == [[30 * n, 3 * n] for n in range(1, 11)]


def test_a_batch_waits_for_its_least_number_of_records_or_its_time(tmp_path):
    made = write_data(tmp_path / "data", lines(0, 10), closed=False)
    options = {"minOffsetsPerTrigger": "20", "maxTriggerDelay": "1s"}
    stream = planner(tmp_path / "data", **options)
    assert stream.getDefaultReadLimit() == ReadMinRows(20)
    start = next_offset(stream, through_json(stream.initialOffset()))  # as Kafka's, the first one does not wait
    began = time.monotonic()
    assert numbers(start) == {"0": 10}
    append(made, lines(10, 25))
    waited = next_offset(stream, start)
    if time.monotonic() - began < 1:
        assert waited == start
    assert numbers(next_offset(stream, start, ALL)) == {"0": 25}  # Trigger.Once
    append(made, lines(25, 35))
    assert numbers(next_offset(stream, start)) == {"0": 35}
    append(made, lines(35, 36))
    start = next_offset(planner(tmp_path / "data"), start)
    append(made, lines(36, 37))
    until(lambda: next_offset(stream, start) != start)
    available_now = planner(tmp_path / "data", **options)
    next_offset(available_now, start)
    available_now.prepareForTriggerAvailableNow()
    assert numbers(next_offset(available_now, start)) == {"0": 37}


def test_tasks_have_no_more_records_than_max_records_per_partition(tmp_path):
    write_data(tmp_path / "data", lines(0, 100), {"t": 2})
    stream = planner(tmp_path / "data", maxRecordsPerPartition="15")
    start = through_json(stream.initialOffset())
    sizes = [end - start for *_, start, end in spans(stream, start, next_offset(stream, start, ALL))]
    assert sum(sizes) == 100 and max(sizes) <= 15


def test_a_session_says_how_many_cores_there_are(tmp_path):
    """A topic of 20 MiB is cut so that each of them has two tasks."""
    from pyspark.serializers import CloudPickleSerializer

    from kmq.spark.format import source_for

    path = write_data(tmp_path / "data", [b"t|0|%d|%b" % (n, b"x" * 10_000) for n in range(2000)])
    for cores, tasks in ((1, 2), (2, 3), (64, 5)):
        serializer = CloudPickleSerializer()
        source = serializer.loads(serializer.dumps(source_for(cores)))({"path": path, "subscribe": "t"})
        assert len(source.reader(StructType([])).partitions()) == tasks


def test_small_partitions_share_tasks_and_a_replay_has_the_same_ones(tmp_path):
    """Whatever options and retention say by then: the sink takes its ids from the number of the task."""
    many = [b"t.@%d|0|%d|x" % (n % 40, n) for n in range(4000)]
    made = write_data(tmp_path / "data", many[:2000], {"t": 40}, closed=False)
    stream = planner(tmp_path / "data", maxOffsetsPerTrigger="1500", minPartitions="3")
    begin = through_json(stream.initialOffset())
    offsets = [begin, first := next_offset(stream, begin)]
    planned = [tasks(stream, begin, first)]
    append(made, many[2000:])
    offsets.append(next_offset(stream, first))
    planned.append(tasks(stream, *offsets[1:]))
    for found, records in zip(planned, (1500, 1500), strict=True):
        assert 3 <= len(found) <= 6 and sum(end - start for task in found for *_, start, end in task) == records
    for options in ({}, {"minPartitions": "60"}, {"maxRecordsPerPartition": "10", "maxOffsetsPerTrigger": "7"}):
        stream = planner(tmp_path / "data", **options)
        assert [tasks(stream, *offsets[at : at + 2]) for at in (0, 1)] == planned


def tasks(stream, start, end):
    return [[(*span.key[1:], span.start, span.end) for span in task.spans] for task in stream.partitions(start, end)]


def test_a_shared_task_reads_its_ranges_one_after_the_other(tmp_path):
    write_data(tmp_path / "data", [b"t.@%d|0|%d|x" % (n % 40, n) for n in range(400)], {"t": 40})
    options = ReadOptions({"path": f"{tmp_path}/data", "subscribe": "t"})
    reader = BatchReader(
        StructType([StructField("partition", IntegerType()), StructField("offset", LongType())]), options
    )
    (task,) = reader.partitions()
    rows = [row for batch in reader.read(task) for row in zip(*batch.to_pydict().values(), strict=True)]
    assert rows == [(number, offset) for number in range(40) for offset in range(10)]
