"""What Spark plans and reads in a directory that was put back and forked: nothing twice, nothing skipped, no empty range."""

import json
import shutil

import pytest
from forked import forked, send
from made_data import write_data
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.log.reader import WAL
from kmq.spark.source.batch_reader import BatchReader
from kmq.spark.source.batches import blocks
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.planner import QueryLogs
from kmq.spark.source.stream_reader import StreamReader

pytestmark = pytest.mark.usefixtures("small_blocks")
ALL = ReadAllAvailable()


def lines(low, high):
    return [b"t.k%d|0|%d|payload %d" % (n % 5, n, n) for n in range(low, high)]


@pytest.fixture
def lost(tmp_path):
    """(directory, offset of a stream): ten records were copied, five more were read, and the copy was put back."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    write_data(data, lines(0, 10))
    shutil.copytree(data, copy, symlinks=True)
    send(str(data), lines(10, 15))
    read = after(data, planner(data).initialOffset(), ALL)[1]
    shutil.rmtree(data)
    copy.rename(data)
    return data, read


def planner(path, **options):
    given = {"path": str(path), "subscribe": "t", "startingOffsets": "earliest"} | options
    return StreamReader(StructType([]), ReadOptions(given))


def after(path, start, limit=None, **options):
    """One micro-batch from `start` on: (its ranges, the offset after it)."""
    stream, start = planner(path, **options), json.loads(json.dumps(start))
    end = json.loads(json.dumps(stream.latestOffset(start, limit or stream.getDefaultReadLimit())))
    if end == start:  # Spark plans no batch
        return [], end
    return [(span.start, span.end) for task in stream.partitions(start, end) for span in task.spans], end


def payloads(path, reader, *offsets):
    """The payloads that the planned tasks read, in order; raises DataLossError as a task does."""
    logs, found = QueryLogs(ReadOptions({"path": str(path), "subscribe": "t"})), []
    for task in reader.partitions(*offsets):
        for read, _ in blocks(logs.brokers[task.broker], task.spans, ["payload"]):
            found += [line.rpartition(b"|")[2] for line in bytes(read.lines).split(b"\n")[:-1]]
    return found


def test_a_stream_that_has_read_what_is_lost_reads_the_new_records_and_no_gap(lost):
    data, read = lost
    made, _ = forked(str(data))
    assert after(data, read, ALL) == ([], read), "nothing new yet, and no data loss"
    send(str(data), lines(20, 25))
    ranges, end = after(data, read, ALL)
    assert ranges == [(made.offset, made.offset + 5)]
    assert payloads(data, planner(data), read, end) == [b"payload %d" % n for n in range(20, 25)]
    assert after(data, end, ALL) == ([], end)


def test_another_directory_is_refused_as_before(lost, tmp_path):
    data, _ = lost
    other = tmp_path / "other"
    write_data(other, lines(0, 10))
    read = after(other, planner(other).initialOffset(), ALL)[1]
    forked(str(data))
    shutil.rmtree(other)
    data.rename(other)
    with pytest.raises(ConfigError, match="has another data directory"):
        after(other, read, ALL)


@pytest.mark.parametrize("options", [{}, {"maxOffsetsPerTrigger": "4"}, {"maxBytesPerTrigger": "100"}])
def test_a_micro_batch_ends_before_a_gap_and_the_next_one_begins_after_it(lost, options):
    data, _ = lost
    made, _ = forked(str(data))
    send(str(data), lines(20, 25))
    offset, seen = planner(data).initialOffset(), []
    for _ in range(20):
        ranges, end = after(data, offset, **options)
        if not ranges:
            break
        seen += ranges
        assert payloads(data, planner(data), offset, end)
        offset = end
    assert [at for low, high in seen for at in range(low, high)] == [*range(10), *range(made.offset, made.offset + 5)]


def test_a_batch_reads_both_sides_of_the_gap(lost):
    data, _ = lost
    forked(str(data))
    send(str(data), lines(20, 25))
    batch = BatchReader(StructType([]), ReadOptions({"path": str(data), "subscribe": "t", "minPartitions": "7"}))
    assert payloads(data, batch) == [b"payload %d" % n for n in (*range(10), *range(20, 25))]


def test_the_wal_has_a_gap_of_seqs_that_counts_as_no_record(lost):
    data, _ = lost
    made, _ = forked(str(data))
    send(str(data), lines(20, 25))
    options = {"subscribe": WAL, "maxOffsetsPerTrigger": "6"}
    offset, seen = planner(data, **options).initialOffset(), []
    for _ in range(20):
        ranges, end = after(data, offset, **options)
        if end == offset:
            break
        seen, offset = seen + ranges, end
    assert [at for low, high in seen for at in range(low, high)] == [
        *range(1, 11),
        *range(made.next_seq, made.next_seq + 5),
    ]
