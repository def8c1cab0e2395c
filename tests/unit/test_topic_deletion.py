"""Deleting a topic, killed at every line of it: it is deleted then, whatever the next start finds, and nothing else is."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.log import deletions, identity, requests, topics
from kmq.log.wal import Wal
from kmq.repair import rebuild, verify
from kmq.router.queues import Queues

TRACED = {
    "_carry_out",
    "_delete",
    "_write_deletions",
    "write",
    "replace_file",
    "_forget",
    "remove_files",
    "sweep",
    "remove",
}


class Broker:
    """A WAL and the queues of it, without processes."""

    def __init__(self, data, seq=1):
        self.data, self.seq = str(data), seq
        identity.open_data(self.data)
        self.wal = Wal(self.data, no_room, 1 << 20)
        self.start()

    def start(self):
        self.queues = Queues(self.data, no_room, FakeLogger())
        self.queues.recover(self.seq - 1, lambda: None)

    def send(self, *lines):
        made = block(list(lines), self.seq)
        self.wal.append([(made.data, self.seq, made.count, FIRST_TS + made.last_seq)])
        self.wal.sync()
        self.wal.note_open_block()
        self.queues.route([made])
        self.seq += made.count

    def delete(self, topic="orders"):
        requests.submit(self.data, requests.DELETE, topic, {})
        self.queues.tick()

    def findings(self):
        return [str(each) for each in verify.Verifier(self.data, is_live=False).findings() if each.is_damage]

    def segments(self, topic):
        found = sorted(Path(self.data, "topics", topic).glob("*/*.log"))
        return {f"{path.parent.name}/{int(path.stem)}": path.read_bytes().count(b"\n") for path in found}


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path / "data")
    topics.declare(made.data, "orders", 2)
    made.queues.tick()
    made.send(*(b"orders|0|%d|x" % n for n in range(10)), b"others|0|1|y")
    return made


def kill_at(data, seq, topic, nth):
    """Delete, in a child that is killed when it reaches its nth line; whether it got so far."""
    pid = os.fork()
    if not pid:
        reached = set()

        def trace(frame, event, _):
            if event == "line":
                reached.add((frame.f_code, frame.f_lineno))
                if len(reached) == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace if frame.f_code.co_name in TRACED else None

        broker = Broker(data, seq)
        requests.submit(data, requests.DELETE, topic, {})
        sys.settrace(trace)
        broker.queues.tick()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


LOSSES = ["router.ckpt", "topics/others", "topics/.deletions"]


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
    while kill_at(data, broker.seq, topic, nth):
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
    rebuild.Repair(broker.data).run()
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
    from kmq.deadletters import redrive
    from kmq.log import dropped

    dropped.append(broker.data, "durable", 3, 4, no_room)
    assert len(list(redrive.Dropped(broker.data).records())) == 2
    broker.delete()
    assert list(redrive.Dropped(broker.data).records()) == []


def test_a_repair_without_a_checkpoint_begins_a_queue_where_the_deleted_one_ended(broker):
    broker.delete()
    broker.send(b"orders.k|0|0|x")
    requests.submit(broker.data, requests.SET, "orders", {"segment_bytes": "64KiB"})
    broker.queues.tick()
    broker.send(*(b"orders.k|0|%d|%b" % (n, b"x" * 10_000) for n in range(1, 20)))
    broker.queues.close()
    whole = broker.segments("orders")
    assert len(whole) > 2 and min(whole.values()) > 0
    os.unlink(f"{broker.data}/router.ckpt")
    for path in Path(broker.data, "topics/orders/0").glob(f"{5:020d}.*"):
        path.unlink()
    rebuild.Repair(broker.data).run()
    assert broker.findings() == []
    assert broker.segments("orders") == whole
