"""kill -9 of the driver in the source, in the sink, between sink and commit: every row is there once, in order.

copy_driver.py copies a topic and kills itself at a given place; the next driver goes on from the same checkpoint. Some drivers
leave Python workers behind, who go on writing what they have.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import fixed_port
import psutil
import pytest
from waiting import until

import kmq

DRIVER = Path(__file__).with_name("copy_driver.py")
DRIVER_S = 240.0  # of one driver, its JVM's start included
COUNT, PARTITIONS, EACH = 3000, 3, 1000  # messages of `from`, its partitions, messages in a micro-batch
POINTS = ("read", "write", "written", "commit", "plan")


class Copy:
    """A broker with the topic `from`, and drivers that copy it."""

    def __init__(self, broker, root):
        self.broker, self.root = broker, root
        self.drivers, self._numbers = [], count()
        fixed_port.up(broker)

    def produce(self, total):
        assert self.broker.kmq("topics", "create", "from", "--partitions", str(PARTITIONS)).returncode == 0
        self.broker.send_lines([b"from.k%d|1|%d|message %d" % (n % 50, n, n) for n in range(total)])
        self.broker.wait_routed(self.changes() + total)

    def changes(self):
        """How many records are of the broker's own: declarations of topics."""
        return sum(b"|__kmq.topic|" in line for line in self.broker.wal())

    def start(self, **plan):
        number = next(self._numbers)
        plan |= {"data": str(self.broker.data), "producers": fixed_port.address(self.broker), "max": EACH}
        plan |= {"checkpoint": str(self.root / "checkpoint"), "pids": str(self.root / f"pids{number}")}
        with open(self.root / f"driver{number}.log", "wb") as log:
            command = [sys.executable, str(DRIVER), json.dumps(plan)]
            driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.drivers.append((driver, Path(plan["pids"])))
        return driver

    def run(self, fails=False, **plan):
        """One driver to its end; an error with the end of its log where it is killed, or fails, otherwise than told."""
        driver = self.start(**plan)
        expected = -signal.SIGKILL if plan.get("point") in POINTS else int(fails)
        try:
            code = driver.wait(DRIVER_S)
        except subprocess.TimeoutExpired:
            code = None
        assert code == expected, (plan, code, (self.root / f"driver{len(self.drivers) - 1}.log").read_text()[-3000:])

    def kill_driver(self, driver):
        """The driver and its JVM, from outside; Python workers find out by themselves."""
        for pid in self._pids(driver):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        driver.wait(60)

    def _pids(self, driver):
        file = next(file for each, file in self.drivers if each is driver)
        return [*map(int, file.read_text().split())][::-1] if file.exists() else [driver.pid]

    def wait_copied(self, total):
        """Until `total` messages have been copied; a JVM may have to start before."""
        copies = partial(self.broker.lines, "to")
        until(lambda: len(copies()) >= total, f"{total} copies", lambda: len(copies()), seconds=DRIVER_S)

    def judge(self, total):
        """What was copied is what was there: nothing lost, nothing twice, and of each partition in order."""
        self.wait_copied(total)
        routed = int(self.broker.status()["framer"]["seq"])
        self.broker.wait_routed(routed)
        copies = fixed_port.payloads(self.broker, "to")
        assert len(copies) == len(set(copies)) == total, f"{len(copies)} copies of {len(set(copies))} messages"
        place = {payload: at for at, payload in enumerate(copies)}
        for path in sorted((self.broker.data / "topics/from").glob("*/*.log")):
            order = [place[line.split(b"|", 5)[5]] for line in path.read_bytes().splitlines()]
            assert order == sorted(order), f"{path}: copied out of order"
        assert routed == self.changes() + total + len(self.broker.lines("from"))

    def log(self):
        """What the last driver said."""
        return (self.root / f"driver{len(self.drivers) - 1}.log").read_text()

    def close(self):
        for driver, _ in self.drivers:
            for process in psutil.process_iter():
                try:
                    if os.getsid(process.pid) == driver.pid:
                        process.kill()
                except (ProcessLookupError, psutil.NoSuchProcess):
                    pass
            driver.wait(10)


@pytest.fixture
def copy(broker, tmp_path):
    made = Copy(broker, tmp_path)
    yield made
    made.close()


@pytest.mark.sampled(0.5)
@pytest.mark.timeout(900)  # three JVMs, which have to start on a machine that may be busy
def test_drivers_killed_in_the_sink_and_before_the_commit_lose_and_double_nothing(copy):
    copy.produce(COUNT)
    copy.run(point="write", batch=1, rows=100, orphans=True)  # its workers live on, and write
    copy.run(point="commit", batch=2, replay="stop")  # between sink and commit
    copy.run(replay="stop")
    copy.judge(COUNT)


@pytest.mark.soak
def test_soak_a_driver_killed_in_the_source_loses_and_doubles_nothing(copy):
    copy.produce(COUNT)
    copy.run(point="read", batch=1)
    copy.run()
    copy.judge(COUNT)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_soak_drivers_killed_anywhere_one_after_the_other(copy, seed):
    rng = random.Random(seed)
    copy.produce(COUNT)
    for batch in sorted(rng.sample(range(3), 2)):
        point = POINTS[(seed + batch) % len(POINTS)]
        copy.run(point=point, batch=batch, rows=50 * rng.randrange(6), orphans=rng.random() < 0.5)
    copy.run()
    copy.judge(COUNT)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["write", "written", "commit"])
@pytest.mark.parametrize("batch", [0, 1])
def test_soak_a_filter_mended_after_a_kill_stops_the_copy_and_loses_nothing(copy, point, batch):
    """Each partition has more rows than the broker remembers the content of, and only the first ones differ."""
    big = {"max": 20_000, "rows": 6000, "batch": batch}
    copy.produce(40_000)
    before, after = (f"offset % 10000 >= 1000 or offset % 2 = {odd}" for odd in (0, 1))
    copy.run(point=point, filter=before, replay="stop", **big)
    copy.run(fails=True, filter=after, replay="stop", **big)
    assert "kmq.replay=again" in copy.log()
    copy.run(point=point, filter=after, replay="again", **big)  # a replay of the replay
    copy.run(filter=after, replay="again", **big)
    copies = set(fixed_port.payloads(copy.broker, "to"))
    for path in sorted((copy.broker.data / "topics/from").glob("*/*.log")):
        records = [line.split(b"|", 5)[5] for line in path.read_bytes().splitlines()]
        kept = [payload for offset, payload in enumerate(records) if offset % 10_000 >= 1000 or offset % 2]
        first = 0 if not batch else len(records) // 2 + 1000  # what was committed was filtered as it was then
        assert not set(kept[first:]) - copies


@pytest.mark.soak
@pytest.mark.parametrize("changed", [{"slices": 7}, {"cores": 1}, {"slices": 5, "cores": 4}], ids=str)
def test_soak_a_copy_cut_otherwise_after_a_kill_loses_and_doubles_nothing(copy, changed):
    copy.produce(COUNT)
    copy.run(point="written", batch=1, slices=4, replay="stop")
    copy.run(replay="stop", **changed)
    copy.judge(COUNT)


@pytest.mark.soak
def test_soak_a_task_that_fails_and_is_tried_again_stores_nothing_twice(copy):
    copy.produce(COUNT)
    copy.run(point="fail", batch=1, rows=100)
    copy.judge(COUNT)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["write", "written", "commit"])
def test_soak_a_killed_batch_write_is_finished_by_the_next_run(copy, point, tmp_path):
    lines = [f"message {n}" for n in range(COUNT)]
    (tmp_path / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    copy.run(point=point, rows=500, lines=str(tmp_path / "lines.txt"))
    copy.run(lines=str(tmp_path / "lines.txt"))
    copy.judge(COUNT)
    assert sorted(fixed_port.payloads(copy.broker, "to")) == sorted(line.encode() for line in lines)


@pytest.mark.soak
@pytest.mark.parametrize(
    "killed", [("framer",), ("ingress",), ("durability", "router"), ()], ids=lambda k: "-".join(k) or "all"
)
def test_soak_a_copy_under_production_survives_kills_of_driver_and_broker(copy, killed):
    copy.produce(0)
    enough, sent = threading.Event(), []

    def produce():
        with kmq.Producer(port=int(copy.broker.env["KMQ_PORT"]), timeout_s=120) as producer:
            while not enough.is_set():
                payloads = [b"message %d" % n for n in range(len(sent), len(sent) + 20)]
                producer.send_many("from", payloads, key=str(len(sent) // 20 % 50))
                sent.extend(payloads)
                time.sleep(0.05)  # a rate, not a wait

    producing = threading.Thread(target=produce)
    producing.start()
    try:
        for _ in range(2):
            driver = copy.start(forever=True)
            copy.wait_copied(len(copy.broker.lines("to")) + 200)
            copy.broker.kill(*killed)
            if not killed:
                fixed_port.up(copy.broker)
            copy.wait_copied(len(copy.broker.lines("to")) + 200)
            copy.kill_driver(driver)
    finally:
        enough.set()
        producing.join()
    copy.broker.wait(lambda: len(copy.broker.lines("from")) == len(sent), "all that was sent")
    copy.run()
    copy.judge(len(sent))
