"""Kills of kmq.tier and of the router at each of their steps with files and with the store: readers see every record."""

import gzip
import os
import random
import shutil
import threading
from contextlib import suppress

import pytest
from tier_stores import LyingStore
from tiered import TieredBroker, lines, read_all

from kmq.log import rows
from kmq.log.segment import Limits
from kmq.tier import turn
from kmq.tier.store import get

pytestmark = pytest.mark.usefixtures("small_blocks")

LIMITS = Limits(segment_bytes=2048, tier="on", local_retention_bytes=2 * 2048)
STEP = 9  # every ninth step is one to be killed at; each run begins with another one


class Killed(BaseException):
    pass


class Steps:
    """Counts what the main thread changes on disk and in the store, and kills it at one of these steps."""

    def __init__(self, monkeypatch):
        self.left = 0
        for name in ("rename", "replace", "link", "unlink", "fsync", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        for name in ("create", "delete"):
            monkeypatch.setattr(LyingStore, name, self._counted(getattr(LyingStore, name)))
        monkeypatch.setattr(turn, "_DELETE_S", 0.0)

    def _counted(self, real):
        def call(*arguments, **more):
            if threading.current_thread() is threading.main_thread() and self.left:
                self.left -= 1
                if not self.left:
                    raise Killed
            return real(*arguments, **more)

        return call


def story(broker):
    """Copies, installs, deletes, a start inside an object, drops."""
    log = broker.queues.logs.log_of(broker.queues.in_force.table[b"t"], 0)
    broker.queues.retention.begin_at([(log, broker.rows()[1][0] + 7)])
    broker.queues.settle()
    for _ in range(2):
        broker.checkpoint()
        broker.copier.turn()
        broker.tick()


def begin_again(broker):
    with suppress(Exception):
        broker.queues.checkpoints.finish()  # its thread would have ended with the process
    broker.kill()
    broker.start()
    broker.kill_copier()


@pytest.fixture
def broker(tmp_path):
    made = TieredBroker(tmp_path, LIMITS, object_bytes=4096)
    made.send(*lines(200))
    made.turn()
    made.tick()
    made.send(*lines(100, 200))
    made.stop()
    for name in ("data", "store"):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}.before", symlinks=True)
    made.start()
    yield made
    made.kill()


def test_a_kill_at_each_step_loses_no_record_and_no_object(broker, tmp_path, monkeypatch):
    steps = Steps(monkeypatch)
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    start, killed = broker.rows()[1][0] + 7, 0
    expected = dict(enumerate(broker.sent))
    for at in range(1 + seed % STEP, 10_000, STEP):
        steps.left = at
        try:
            story(broker)
            is_over = bool(steps.left)
        except Killed:
            is_over = False
        steps.left = 0
        killed += not is_over
        begin_again(broker)
        found = read_all(broker)
        begin = min(found)
        assert begin in (0, start) and found == {offset: expected[offset] for offset in range(begin, 300)}, at
        for _ in range(3):
            broker.turn()
        log = broker.state.logs["t/0", rows.of(broker.directory()).life]
        texts = [gzip.decompress(get(broker.store, f"{broker.copier.lineage}/{row.key}")) for row in log.rows]
        assert b"".join(texts) == b"".join(broker.sent[log.rows[0].base : log.rows[-1].next]), at
        assert read_all(broker) == found and broker.local()[0] > 0
        named = {f"{broker.copier.lineage}/{row.values['key']}" for row in broker.state.rows() if "key" in row.values}
        assert named <= {*broker.store.names("")}, at
        if is_over:
            break
        broker.kill()
        for name in ("data", "store"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(tmp_path / f"{name}.before", tmp_path / name, symlinks=True)
        broker.start()
        broker.kill_copier()
    assert killed > 5
