"""A partition log after a crash: what of it is whole, and where it has to go on."""

import os

import pytest
from made_up import no_room, stored

from kmq.errors import RetryError
from kmq.log import index, partition, partition_recovery, segment
from kmq.log.partition import EMPTY, PartitionLog, PartitionPlace, PartitionState
from kmq.log.partition_recovery import WalRange

LINES = stored([b"t|1|%d|%b" % (n, b"x" * (n % 50)) for n in range(1, 101)], 11)
ENDS = [sum(map(len, LINES[:n])) for n in range(101)]
KNOWN = PartitionState(60, 70, ENDS[60])  # what the checkpoint saw: 60 records, the last of them seq 70


@pytest.fixture
def path(data, monkeypatch):
    """A log of 100 records, seqs 11 to 110, with its index."""
    monkeypatch.setattr(index, "BLOCK_BYTES", 512)
    log = PartitionLog(PartitionPlace(data, "t", 0, "t.log"), PartitionState(0, 0, 0), no_room)
    log.open(no_warning)
    for at in range(0, 100, 10):
        log.append(b"".join(LINES[at : at + 10]), 10, at + 11, at + 20)
    log.note_open_block()
    log.close()
    return log.path


def copy_of(state):
    return PartitionState(*state.values())


def no_warning(*args, **fields):
    raise AssertionError(fields)


ALL = PartitionState(100, 110, ENDS[100])
DAMAGED = [
    (ENDS[100], b"", 100),
    (ENDS[100], b"111|17", 100),
    (ENDS[100], b"\0" * 3000, 100),
    (ENDS[100], b"no record\n\n", 100),
    (ENDS[100] - 1, b"", 99),
    (ENDS[80], b"", 80),
    (ENDS[80], b"\0" * 9 + LINES[80], 80),
    (ENDS[80] + 5, b"", 80),
    (ENDS[60], b"", 60),
    (ENDS[59] + 5, b"", 59),
    (ENDS[30], b"", 30),
    (7, b"", 0),
    (0, b"", 0),
    (0, b"\0" * 100, 0),
]


def recover(path, known, high):
    """Of a log in one segment, with a WAL that has everything: (state, bytes cut)."""
    here = segment.Segment(0, path, os.path.getsize(path))
    found = partition_recovery.recover([here], known, WalRange(1, high, has_rest=True), 0)
    return found.state, found.cut


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("known", "size", "tail", "whole"),
    # A file of exactly the size that the checkpoint saw is not looked at again.
    [(known, *row) for known in (EMPTY, KNOWN, ALL) for row in DAMAGED if known.size != row[0] + len(row[1])],
)
def test_recover_keeps_what_is_whole(path, known, size, tail, whole, has_index):
    os.truncate(path, size)
    with open(path, "ab") as file:
        file.write(tail)
    if not has_index:
        os.unlink(segment.index_path(path))
    state, cut = recover(path, known, 110)
    assert state.values() == (whole, 10 + whole if whole else 0, ENDS[whole], 0)
    assert cut == size + len(tail) - ENDS[whole]
    with open(path, "rb") as file:
        assert file.read() == b"".join(LINES[:whole])


def test_nuls_below_the_checkpoint_are_damage_and_not_a_torn_end(path):
    with open(path, "r+b") as file:
        file.seek(ENDS[20])
        file.write(b"\0" * 30)
    state, cut = recover(path, KNOWN, 110)
    assert (state.values(), cut) == ((100, 110, ENDS[100], 0), 0)


def test_lines_that_the_wal_does_not_have_are_not_ours(path):
    state, cut = recover(path, KNOWN, 95)
    assert (state.values(), cut) == ((85, 95, ENDS[85], 0), ENDS[100] - ENDS[85])


def test_a_line_that_is_there_already_is_passed_over(data, path):
    log = PartitionLog(PartitionPlace(data, "t", 0, "t.log"), copy_of(ALL), no_room)
    log.open(no_warning)
    more = stored([b"t|||more"], 111)[0]
    assert log.append(b"".join(LINES[90:]) + more, 11, 101, 111) == len(more)
    assert log.append(more, 1, 111, 111) == 0
    assert log.state.values() == (101, 111, ENDS[100] + len(more), 0)
    log.close()
    assert partition.end_offset(data, "t", 0) == (101, ENDS[100] + len(more))


def test_the_index_is_written_when_a_few_blocks_are_complete_and_not_only_once_a_second(data, monkeypatch):
    """What it does not speak of is checked line by line, by everyone who reads the end of a log."""
    monkeypatch.setattr(index, "BLOCK_BYTES", 512)
    log = PartitionLog(PartitionPlace(data, "t", 0, "t.log"), PartitionState(0, 0, 0), no_room)
    log.open(no_warning)
    states, flush = [], index.IndexWriter.flush
    monkeypatch.setattr(index.IndexWriter, "flush", lambda self: states.append(log.state.values()) or flush(self))
    for seq in range(11, 1011):
        log.append(stored([b"t|||%b" % (b"x" * 50)], seq)[0], 1, seq, seq)
    entries = index.read_entries(segment.index_path(log.path), 1 << 62)
    assert log.state.size - entries[-1].position < 20 * 512 and len(entries) < log.state.size // 512
    # Where it waits for room, a checkpoint may be written.
    assert len(states) > 3 and all(last_seq - end_offset == 10 for end_offset, last_seq, *_ in states)
    log.close()


@pytest.mark.parametrize("while_open", [True, False])
def test_a_log_that_somebody_cut_is_not_written_on(data, path, while_open):
    """Going on would leave a hole that no restart could see: its size would fit its checkpoint again."""
    log = PartitionLog(PartitionPlace(data, "t", 0, "t.log"), copy_of(ALL), no_room)
    if while_open:
        log.open(no_warning)
    os.truncate(path, ENDS[50])
    with pytest.raises(RetryError, match="changed by another process"):
        if not while_open:
            log.open(no_warning)
        log.append(stored([b"t|||more"], 111)[0], 1, 111, 111)
    assert os.path.getsize(path) == ENDS[50]
    log.close()


def test_a_symlink_that_leads_elsewhere_is_left_alone_and_told(data, path):
    warned = []
    os.unlink(f"{data}/t.log")
    os.symlink("elsewhere", f"{data}/t.log")
    log = PartitionLog(PartitionPlace(data, "t", 0, "t.log"), copy_of(ALL), no_room)
    log.open(lambda event, **fields: warned.append((event, fields["symlink"])))
    log.close()
    assert warned == [("symlink_taken", "t.log")] and os.readlink(f"{data}/t.log") == "elsewhere"


def test_segment_names_sort_by_offset(tmp_path):
    for first in (10**19, 5, 123, 0):
        (tmp_path / segment.name(first)).touch()
    for other in ("00000000000000000005.idx", "x.log", ".owner"):
        (tmp_path / other).touch()
    assert [first for first, _ in segment.listing(str(tmp_path))] == [0, 5, 123, 10**19]
    assert segment.listing(f"{tmp_path}/none") == []
    assert len(segment.name(7)) == len("00000000000000000007.log")
