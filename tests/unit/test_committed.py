"""What of the WAL is committed: records of epochs, where each begins, the file `committed`."""

import os
import random
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import block, no_room, stored, write_wal
from model import cluster_model

from kmq.errors import CorruptError
from kmq.log import checkpoint, committed, identity, reader, segment, topic_changes, wal
from kmq.log.committed import EPOCH_KEY, Epochs, decode_epoch, encode_epoch
from kmq.router.queues import Queues

CHANGE = topic_changes.encode(topic_changes.TopicChange("create", "orders", 0, {"partitions": "3"}, "0001-2"), b"1.0")


@pytest.fixture
def data(tmp_path):
    identity.open_data(str(tmp_path / "data"))
    return str(tmp_path / "data")


def epoch(number):
    return encode_epoch(number, 0x0C1D << 48 | number, "b", 1, b"1.000000")


def mixed(*epochs_at, count=60):
    """Lines as sent; those at the seqs of `epochs_at` begin the epochs 1, 2, …"""
    lines = [b"t%d|1.0|%d|%b" % (n % 3, n, b"x" * (n % 50)) for n in range(1, count + 1)]
    for number, seq in enumerate(epochs_at, 1):
        lines[seq - 1] = epoch(number)
    return lines


def queues(data, **options):
    return Queues(data, no_room, FakeLogger(), are_recorded=True, **options)


def routed(data, high):
    """Route the WAL up to `high`, as a router does that is then stopped cleanly."""
    made = queues(data)
    made.recover(high)
    made.close()


# --- records ---------------------------------------------------------------------------------------------------------


def test_the_record_of_an_epoch_is_read_as_it_was_written():
    [line] = stored([encode_epoch(8, 0x0C1D2E3F, "b-1", 1, b"1.000000")], 31)
    assert line.endswith(b"|__kmq.epoch|1.000000||epoch=8 mark=000000000c1d2e3f broker=b-1 level=1\n")
    assert decode_epoch(line) == (8, 0x0C1D2E3F, "b-1", 1, 31)


@pytest.mark.parametrize(
    "sent",
    [
        CHANGE,
        b"t|1|1|epoch=8 mark=000000000c1d2e3f broker=b level=1",
        b"__kmq.epoch|1||epoch=8 mark=0c1d broker=b level=1",
        b"__kmq.epoch|1||epoch=x mark=000000000c1d2e3f broker=b level=1",
        b"__kmq.epoch|1||",
    ],
)
def test_no_other_record_begins_an_epoch(sent):
    with pytest.raises(ValueError, match="begins no epoch"):
        decode_epoch(stored([sent])[0])


def test_lines_are_cut_around_every_record_of_the_framers_own():
    lines = stored([b"a|1|1|x", epoch(1), CHANGE, b"a|1|1|x|__kmq.epoch|", b"a|1|1|y", epoch(2)], 10)
    assert list(topic_changes.parts(b"".join(lines))) == [
        (lines[0], b""),
        (lines[1], EPOCH_KEY),
        (lines[2], topic_changes.KEY),
        (lines[3] + lines[4], b""),
        (lines[5], EPOCH_KEY),
    ]


# --- the router ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ring", "wal"])
def test_the_router_puts_epochs_and_changes_into_the_queue_of_the_framers_own(data, way):
    lines = [epoch(1), b"a|1|1|x", CHANGE, b"orders.k|1|2|y", epoch(2)]
    write_wal(data, lines).close()
    log = FakeLogger()
    made = Queues(data, no_room, log, are_recorded=True)
    made.recover(0 if way == "ring" else 5)
    if way == "ring":
        made.route([block([line], seq) for seq, line in enumerate(lines, 1)])
    made.close()
    assert not [event for event, _ in log.events if event == "request_refused"]
    assert reader.partition(data, "__kmq", 0).read(0)[1] == b"".join(stored(lines)[i] for i in (0, 2, 4))
    assert [each.topic for each in topic_changes.changes(b"".join(stored(lines)))] == ["orders"]
    assert checkpoint.recorded_topics(data).keys() == {("orders", 3)}


# --- where epochs begin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [0, 1, 20, 35, 60])
def test_epochs_are_known_from_the_queue_and_the_end_of_the_wal(data, high):
    write_wal(data, mixed(1, 21, 22, 41)).close()
    if high:
        routed(data, high)
    assert checkpoint.routed_seq(data) == high
    assert list(Epochs.load(data, high)) == list(Epochs.load(data)) == [(1, 1), (2, 21), (3, 22), (4, 41)]


def test_of_what_is_routed_the_wal_is_not_read(data):
    write_wal(data, mixed(1, 21)).close()
    routed(data, 30)
    path = Path(f"{data}/append/{segment.name(1)}")
    text = path.read_bytes()
    path.write_bytes(text[:100] + b"?" * 20 + text[120:])
    with pytest.raises(CorruptError, match="damaged"):
        list(wal.read(data, 1, 60))
    assert list(Epochs.load(data, 60)) == [(1, 1), (2, 21)]


@pytest.mark.parametrize("harm", ["gone", "short", "torn"])
def test_what_the_queue_has_lost_is_read_from_the_wal(data, harm):
    write_wal(data, mixed(1, 21, 22, 41)).close()
    routed(data, 60)
    path = Path(f"{data}/topics/__kmq/0/{segment.name(0)}")
    text = path.read_bytes()
    if harm == "gone":
        path.unlink()
        path.with_suffix(".idx").unlink()
    else:
        first = text.index(b"\n") + 1
        path.write_bytes(text[:first] + (bytes(len(text) - first) if harm == "torn" else b""))
        path.with_suffix(".idx").unlink()
    assert list(Epochs.load(data, 60)) == [(1, 1), (2, 21), (3, 22), (4, 41)]
    os.unlink(f"{data}/append/{segment.name(1)}")
    with pytest.raises(CorruptError, match="nobody knows where the epochs begin"):
        Path(f"{data}/append/{segment.name(58)}").write_bytes(b"".join(stored(mixed()[57:], 58)))
        Epochs.load(data, 60)


def test_epochs_agree_with_the_model():
    choice = random.Random(30)
    for _ in range(300):
        epochs, log = Epochs(), []
        for number in sorted(choice.sample(range(1, 9), choice.randrange(5))):
            log += [16 * number] * choice.randrange(0 if log else 1, 5)
            if log and log[-1] == 16 * number:
                epochs.add(number, log.index(16 * number) + 1)
        for n in range(len(log) + 1):
            assert epochs.epoch_at(n) == cluster_model.epoch_at(tuple(log), n)
        for number in range(10):
            assert epochs.end_of(number, len(log)) == cluster_model.end_of_epoch(tuple(log), number)
        assert epochs.last == cluster_model.epoch_at(tuple(log), len(log))
        end = choice.randrange(len(log) + 1)
        epochs.cut(end)
        assert epochs.last == cluster_model.epoch_at(tuple(log[:end]), end)


def test_an_epoch_is_never_added_behind_a_later_one():
    epochs = Epochs()
    epochs.add(3, 10)
    epochs.add(5, 20)
    epochs.add(3, 10)
    for wrong in [(4, 30), (5, 21), (6, 20), (3, 11)]:
        with pytest.raises(ValueError, match="is not after epoch 5"):
            epochs.add(*wrong)
    epochs.cut(19)
    epochs.add(4, 20)
    assert list(epochs) == [(3, 10), (4, 20)] and epochs.last == 4


# --- the file `committed` --------------------------------------------------------------------------------------------


def test_what_is_not_whole_says_that_nothing_is_committed(data):
    assert committed.read_committed(data) == 0
    committed.write_committed(data, 1026770)
    assert committed.read_committed(data) == 1026770
    path = Path(f"{data}/committed")
    text = path.read_bytes()
    for harm in [b"", bytes(len(text)), text[:-1], text[:-4], b"2" + text[1:], text * 2, b"7 crc32=\n"]:
        path.write_bytes(harm)
        assert committed.read_committed(data) == 0
    committed.write_committed(data, 7)
    assert committed.read_committed(data) == 7 and not os.path.exists(f"{path}.new")


def test_what_any_reader_may_have_seen_is_shown_and_never_more_than_the_wal_has(data):
    assert committed.shown_seq(data) == 0
    write_wal(data, mixed()).close()
    assert committed.shown_seq(data) == 0
    committed.write_committed(data, 5)
    assert committed.shown_seq(data) == 5
    routed(data, 10)
    assert committed.shown_seq(data) == 10
    made = queues(data)
    made.recover(10)
    made.replay(11, 25)  # killed before the next checkpoint
    assert checkpoint.routed_seq(data) == 10 and committed.shown_seq(data) == 25
    committed.write_committed(data, 61)
    assert committed.shown_seq(data) == 60 == wal.last_stored(data)[0]
