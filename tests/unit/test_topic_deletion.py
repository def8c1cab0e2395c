"""Deleting a topic, killed at every line of it: it is deleted then, whatever the next start finds, and nothing else is."""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from made_up import no_room
from traced_broker import Broker, kill_at

from kmq.log import deletions, topic_changes, topics
from kmq.repair import heal

TRACED = {
    "_carry_out",
    "_delete",
    "_write_deletions",
    "write",
    "replace_file",
    "_forget",
    "detach",
    "sweep",
    "remove",
}


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path / "data")
    topics.declare(made.data, "orders", 2, partitioner="crc32")
    made.queues.tick()
    made.send(*(b"orders|0|%d|x" % n for n in range(10)), b"others|0|1|y")
    return made


LOSSES = ["router.ckpt", "topics/others", "topics/.deletions"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("topic", "losses", "step"),  # of the lines, every step-th
    [
        ("orders", [], 2),
        ("empty", [], 3),
        ("orders", LOSSES, 3),
        pytest.param("orders", [], 1, marks=pytest.mark.soak),
        pytest.param("empty", [], 1, marks=pytest.mark.soak),
        pytest.param("orders", LOSSES, 1, marks=pytest.mark.soak),
    ],
)
def test_a_kill_at_any_line_leaves_it_deleted_and_all_others_whole(broker, topic, losses, step):
    topics.declare(broker.data, "empty", 3)
    broker.queues.close()
    data, before = broker.data, f"{broker.data}-before"
    shutil.copytree(data, before, symlinks=True)
    nth = 1
    while kill_at(data, broker.seq, nth, TRACED, topic_changes.DELETE, topic):
        for name in losses:
            path = Path(data, name)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        after = Broker(data, broker.seq)
        assert topics.names(data) == sorted({"orders", "empty", "others"} - {topic}), nth
        assert not [name for name in os.listdir(f"{data}/topics") if name.startswith((".request", ".deleted"))], nth
        after.queues.close()
        assert after.findings() == [], nth
        after = Broker(data, broker.seq)
        after.send(b"orders.k|0|11|x", b"others|0|2|y")
        after.queues.close()
        assert after.segments("others") == {"0/0": 2}, nth
        assert after.segments("orders") == ({"0/5": 1} if topic == "orders" else {"0/0": 5, "1/0": 6}), nth
        assert after.findings() == [], nth
        shutil.rmtree(data)
        shutil.copytree(before, data, symlinks=True)
        nth += step
    assert nth > 30


def test_a_repair_after_a_deletion_invents_nothing(broker):
    broker.delete()
    broker.send(b"orders|0|10|x", b"others|0|2|y")
    broker.queues.close()
    for path in Path(broker.data, "topics").glob("*/0/*"):
        path.unlink()
    os.unlink(f"{broker.data}/topics/.deletions")
    assert len(broker.findings()) > 2
    heal.repair(broker.data)
    assert broker.findings() == []
    assert broker.segments("orders") == {"0/5": 1} and broker.segments("others") == {"0/0": 2}


def test_a_wal_that_ends_before_a_deletion_is_refused(broker):
    broker.delete()
    broker.queues.close()
    every = deletions.read(broker.data)
    every[0].last_seq = 100
    deletions.write(broker.data, every, lambda _, action: action())
    assert any("100: cut off" in each for each in broker.findings())


def test_records_dropped_and_deleted_do_not_come_back_by_a_redrive(broker):
    from kmq.deadletters import selection
    from kmq.log import dropped

    dropped.append(broker.data, "durable", 3, 4, no_room)
    assert len(list(selection.Dropped(broker.data).records())) == 2
    broker.delete()
    assert list(selection.Dropped(broker.data).records()) == []


def test_a_repair_without_a_checkpoint_begins_a_queue_where_the_deleted_one_ended(broker):
    broker.delete()
    broker.send(b"orders.k|0|0|x")
    topic_changes.submit(broker.data, topic_changes.SET, "orders", {"segment_bytes": "64KiB"})
    broker.queues.tick()
    broker.send(*(b"orders.k|0|%d|%b" % (n, b"x" * 10_000) for n in range(1, 20)))
    broker.queues.close()
    whole = broker.segments("orders")
    assert len(whole) > 2 and min(whole.values()) > 0
    os.unlink(f"{broker.data}/router.ckpt")
    for path in Path(broker.data, "topics/orders/0").glob(f"{5:020d}.*"):
        path.unlink()
    heal.repair(broker.data)
    assert broker.findings() == []
    assert broker.segments("orders") == whole


def test_the_files_of_a_deleted_topic_go_some_at_a_time(broker):
    """Between two batches of lines: the router of a topic with 8,000 segments stood still until all were removed."""
    topic_changes.submit(broker.data, topic_changes.SET, "orders", {"segment_bytes": "64KiB"})
    broker.queues.tick()
    for n in range(100):
        broker.send(b"orders.k|0|%d|%b" % (n, b"x" * 40_000))

    def left():
        return sum(len(files) for path, _, files in os.walk(f"{broker.data}/topics") if ".deleted-" in path)

    segments = sum(len(files) for _, _, files in os.walk(f"{broker.data}/topics/orders"))
    assert segments > 100
    broker.delete()
    turns = [left()]
    assert topics.names(broker.data) == ["others"] and turns[0] > 0.8 * segments
    while broker.queues.changes.sweep():
        turns.append(left())
        broker.send(b"others|0|2|y")
    assert max(before - after for before, after in pairwise(turns)) == 16
    broker.queues.close()
    assert not [name for name in os.listdir(f"{broker.data}/topics") if ".deleted-" in name]
    assert broker.findings() == []
    assert broker.segments("others") == {"0/0": 1 + len(turns) - 1}


def test_what_a_deleted_topic_has_left_is_removed_before_anybody_waits_for_room(broker):
    topic_changes.submit(broker.data, topic_changes.SET, "orders", {"segment_bytes": "64KiB"})
    broker.queues.tick()
    for n in range(50):
        broker.send(b"orders.k|0|%d|%b" % (n, b"x" * 40_000))
    broker.delete()
    assert [name for name in os.listdir(f"{broker.data}/topics") if ".deleted-" in name]
    broker.queues.make_room()
    assert not [name for name in os.listdir(f"{broker.data}/topics") if ".deleted-" in name]
