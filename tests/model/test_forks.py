"""Random lives of a data directory that is copied, put back and forked, with kills, losses, retention and truncation.

What must hold for every partition, over all time lines: an offset is given to one message only; a consumer that reads on
from where it stands gets every message that is there and was acknowledged after it had stood there, in order.
"""

import os
import random
import shutil
import time

import pytest
from fake_logger import FakeLogger
from forked import forked
from made_up import no_room

from kmq.links.layout import Block
from kmq.log import dropped, identity, reader, rows
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.message import record
from kmq.repair.verify import Verifier
from kmq.router.queues import Queues

LIMITS = Limits(segment_bytes=400)


class Life:
    """A broker's WAL and router, a copy of its directory, what was given out, and a consumer of each topic."""

    def __init__(self, data, seed):
        self.data, self.chance, self.number = data, random.Random(seed), 0
        self.given = {}  # (topic, offset) → payload, over all time lines
        self.stands = {}  # topic → next offset of its consumer
        self.copy = f"{data}-copy"
        identity.open_data(data)
        self.up()

    def up(self):
        self.wal = Wal(self.data, no_room, 1 << 20, LIMITS)
        self.seq = max([self.wal.last_seq, *(gone.last for gone in dropped.accounted(self.data))]) + 1
        self.queues = Queues(self.data, no_room, FakeLogger(), LIMITS)
        self.queues.recover(self.wal.last_seq)

    def down(self):
        self.queues.close()
        self.wal.close()

    def records(self, topic, offset=0):
        found = {}
        for first, lines in reader.partition(self.data, topic, 0).chunks(offset):
            found |= dict(enumerate(lines.split(b"\n")[:-1], first))
        return found

    # --- what happens ------------------------------------------------------------------------------------------------

    def send(self):
        topic = self.chance.choice([b"a", b"b", b"c"])
        lines = [b"%b|1||%d" % (topic, self.number + n) for n in range(self.chance.randint(1, 9))]
        self.number += len(lines)
        ts = time.time_ns() // 1000  # a jump grows with the age of the copy
        text, key = record.number(lines, self.seq, record.format_ts(ts))[0], len(record.common_key(lines))
        self.wal.append([(text, self.seq, len(lines), ts)])
        self.wal.sync()
        self.queues.route([Block(text, 0, [len(text), self.seq, len(lines), key, ts, 0, 0])])
        self.queues.make_topics()
        self.seq += len(lines)

    def consume(self):
        for topic in ("a", "b", "c"):
            if os.path.isdir(f"{self.data}/topics/{topic}/0"):
                stands = self.stands.get(topic, 0)
                found = self.records(topic, stands)
                there = [offset for offset in self.records(topic) if offset >= stands]
                assert [*found] == there, "in order, and nothing left out"
                self.stands[topic] = max([stands, *(offset + 1 for offset in found)])

    def save(self):
        self.down()
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.data, self.copy, symlinks=True)
        self.up()

    def put_back(self):
        if os.path.isdir(self.copy):
            self.down()
            shutil.rmtree(self.data)
            shutil.copytree(self.copy, self.data, symlinks=True)
            forked(self.data)
            self.up()

    def restart(self):
        self.down()
        self.up()

    def kill(self):
        self.wal.close()
        self.up()

    def lose(self):
        """A kill, and a file that is gone: the WAL has all that it held."""
        self.down()
        topic = self.chance.choice("abc")
        directory = f"{self.data}/topics/{topic}/0"
        what = self.chance.choice(["queue", "tier", "checkpoint", "queue and checkpoint"])
        if "queue" in what:
            shutil.rmtree(directory, ignore_errors=True)
        if what == "tier" and os.path.exists(rows.path_of(directory)):
            os.unlink(rows.path_of(directory))
        if "checkpoint" in what and os.path.exists(f"{self.data}/router.ckpt"):
            os.unlink(f"{self.data}/router.ckpt")
        self.up()

    def checkpoint(self):
        self.queues.checkpoints.start()
        self.queues.settle()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self):
        for topic in ("a", "b", "c"):
            if os.path.isdir(f"{self.data}/topics/{topic}/0"):
                for offset, line in self.records(topic).items():
                    payload = line.rpartition(b"|")[2]
                    assert self.given.setdefault((topic, offset), payload) == payload, (
                        f"{topic} {offset} is given again"
                    )
                end = reader.partition(self.data, topic, 0).end_offset()
                assert self.stands.get(topic, 0) <= end, "a consumer never stands above the end"


STEPS = ["send"] * 8 + ["consume"] * 4 + ["save"] * 2 + ["put_back", "restart", "kill", "lose", "checkpoint"]


@pytest.mark.parametrize("number", range(12))
def test_no_offset_is_given_twice_and_no_consumer_skips_a_message(tmp_path, number):
    life = Life(str(tmp_path / "data"), f"forks {number}")
    for _ in range(60):
        getattr(life, life.chance.choice(STEPS))()
        life.check()
    life.down()
    assert not [finding for finding in Verifier(life.data, False).findings() if finding.is_damage]
