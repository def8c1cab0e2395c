"""Kills of driver, workers and stages, mixed with plans that change from driver to driver: nothing lost, nothing twice.

replay_driver.py takes a topic into the sink or into a table. From one driver to the next the filter, minPartitions and
cores change, the source is compacted, its oldest segments are deleted, or an older copy takes its place. The files alone
judge it: what is still in the source and passes every filter is in the target once, and nothing is there twice.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import fixed_port
import psutil
import pyarrow.parquet as pq
import pytest
from waiting import until

DRIVER = Path(__file__).with_name("replay_driver.py")
DRIVER_S = 300.0  # of one driver, its JVM's start included
PARTITIONS, KEYS, ROUND = 3, 300, 3000  # of `from`; messages produced before each driver
TARGETS = ("sink", "parquet", "delta", "iceberg")
FAULTS = ("driver", "worker", "stage", "none")
FILL = b"x" * 900
CHANGES = ("compaction", "retention", "restored", "none")


def number_of(payload):
    return int(payload.split()[0])


class Replays:
    """A source, a target, and the drivers between them."""

    def __init__(self, source, sink, root, target, seed):
        self.source, self.sink, self.root, self.target = source, sink, root, target
        self.rng = random.Random(f"{target} {seed}")
        self.sent, self.plans, self.drivers, self.lossy = 0, [], [], False
        self.said = [f"target={target} seed={seed}"]
        fixed_port.up(source, KMQ_SEGMENT_BYTES="64KiB")
        declared = source.kmq("topics", "create", "from", "-p", str(PARTITIONS), "--set", "cleanup=compact")
        assert declared.returncode == 0, declared.stderr
        fixed_port.up(sink)

    # --- the source ----------------------------------------------------------------------------------------------

    def produce(self, count=ROUND, first=None):
        """Messages whose payload is their number; without `first` they go on where the last ones ended."""
        begin = self.sent if first is None else first
        keys = [self.rng.randrange(KEYS) for _ in range(count)]
        before = int(self.source.status()["framer"]["seq"])
        self.source.send_lines([b"from.@.k%d|1|%d|%d %s" % (key, n, n, FILL) for n, key in enumerate(keys, begin)])
        self.source.wait_routed(before + count)
        self.sent += count if first is None else 0

    def numbers(self):
        """The messages that the source still has."""
        return {number_of(line.rsplit(b"|", 1)[1]) for line in self.source.lines("from") if line}

    def compact(self):
        self.source.down()  # its router writes its checkpoint, up to which segments may be compacted
        fixed_port.up(self.source, KMQ_SEGMENT_BYTES="64KiB")
        compactor = "kmq.gateway.core.compactor"
        done = self.source.run(sys.executable, "-m", compactor, "--now", patience_s=DRIVER_S)
        assert done.returncode == 0 and "event=segment_compacted" in self.source.log(), done.stderr

    def retain(self):
        """Delete the oldest segments."""
        before = len(self.numbers())
        for change in ("retention_bytes=1MiB", "retention_bytes=none"):
            done = self.source.kmq("topics", "set", "from", change)
            assert done.returncode == 0, done.stderr
            if self.is_over(1 << 20):
                self.source.wait(lambda: len(self.numbers()) < before, "a deleted segment")
        self.lossy = True

    def is_over(self, nbytes):
        """Whether a partition is certainly larger than that."""
        sizes = Counter()
        for path in (self.source.data / "topics/from").glob("*/*.log"):
            sizes[path.parent] += path.stat().st_size
        return max(sizes.values()) > nbytes + (1 << 18)

    def refuse_older_copy(self):
        """Put an older copy of the source in its place: the next driver must stop, and store nothing of it."""
        self.drive("none")
        plan = self.plans[-1]
        self.source.down()
        copy, newer = self.root / "older", self.root / "newer"
        shutil.copytree(self.source.data, copy, symlinks=True)
        fixed_port.up(self.source, KMQ_SEGMENT_BYTES="64KiB")
        self.produce()
        assert self.run(plan, "none") == 0, self.log()
        self.source.down()
        os.rename(self.source.data, newer)
        os.rename(copy, self.source.data)
        fixed_port.up(self.source, KMQ_SEGMENT_BYTES="64KiB")
        self.produce(2 * ROUND, first=10_000_000)
        before = self.stored()
        assert self.run({**plan, "lossy": False}, "none") not in (0, -signal.SIGKILL), "an older copy was read"
        assert "cop" in self.log() and self.stored() == before, self.log()
        self.source.down()
        shutil.rmtree(self.source.data)
        os.rename(newer, self.source.data)
        fixed_port.up(self.source, KMQ_SEGMENT_BYTES="64KiB")

    # --- drivers -------------------------------------------------------------------------------------------------

    def plan(self):
        rng = self.rng
        plan = {
            "modulo": rng.choice((7, 11, 13)),
            "cores": rng.choice((1, 2, 3)),
            "min_partitions": rng.choice((1, 4, 9)),
        }
        plan |= {"rest": rng.randrange(3), "replay": "stop", "lossy": self.lossy, "target": self.target}
        plan |= {"data": str(self.source.data), "checkpoint": str(self.root / "checkpoint")}
        plan |= {"to": str(self.root / "table"), "compare": ""}
        if self.target == "sink":
            plan |= {"to": fixed_port.address(self.sink), "compare": str(self.sink.data)}
        return plan

    def drive(self, fault):
        """One driver with a plan of its own. Where a batch comes again with other rows, the sink asks what to do with them."""
        plan = self.plan()
        code = self.run(plan, fault)
        if code == 1 and self.target == "sink" and "kmq.replay=again" in self.log():
            code = self.run({**plan, "replay": "again"}, "none")
        assert code in ((0, -signal.SIGKILL) if fault == "driver" else (0,)), self.log()

    def run(self, plan, fault):
        """One driver, to its end or until the fault; the exit code."""
        self.plans.append(plan)
        self.said.append(
            f"{fault} cores={plan['cores']} parts={plan['min_partitions']} filter={plan['modulo']},{plan['rest']}"
        )
        number = len(self.drivers)
        plan = {**plan, "pids": str(self.root / f"pids{number}")}
        begun = self.batches()
        with open(self.root / f"driver{number}.log", "wb") as log:
            command = [sys.executable, str(DRIVER), json.dumps(plan)]
            driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.drivers.append(driver)
        if fault != "none":
            self.wait_begun(driver, begun + 1 + self.rng.randrange(3))
            threading.Event().wait(self.rng.random())  # anywhere in a batch
            getattr(self, f"kill_{fault}")(driver)
        return driver.wait(DRIVER_S)

    def batches(self):
        return sum(1 for path in (self.root / "checkpoint/offsets").glob("*") if path.name.isdecimal())

    def wait_begun(self, driver, count):
        """Until that many micro-batches are planned, or the driver has ended before."""
        until(lambda: self.batches() >= count or driver.poll() is not None, "them", self.log, seconds=DRIVER_S)

    def kill_driver(self, driver):
        """The driver and its JVM, and perhaps the workers, which else find out by themselves."""
        pids = Path(self.root / f"pids{len(self.drivers) - 1}")
        known = [*map(int, pids.read_text().split())] if pids.exists() else [driver.pid]
        workers = [process.pid for process in self.workers(driver)] if self.rng.random() < 0.5 else []
        for pid in [*known[::-1], *workers]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def kill_worker(self, driver):
        for process in self.workers(driver)[:2]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass

    def kill_stage(self, driver):
        broker = self.sink if self.target == "sink" else self.source
        broker.kill(self.rng.choice(("ingress", "framer", "durability", "router")))

    def workers(self, driver):
        """The Python processes below the JVM."""
        found = []
        for process in psutil.process_iter(["pid", "name"]):
            try:
                if os.getsid(process.pid) == driver.pid and process.pid != driver.pid and "python" in process.name():
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found

    def log(self):
        return "\n".join(self.said) + (self.root / f"driver{len(self.drivers) - 1}.log").read_text()[-3000:]

    # --- the judgement -------------------------------------------------------------------------------------------

    def stored(self):
        """Number of a message → how often it is in the target."""
        if self.target == "sink":
            return Counter(map(number_of, fixed_port.payloads(self.sink, "to")))
        files = {"parquet": self.parquet, "delta": self.delta, "iceberg": self.iceberg}[self.target]()
        found = Counter()
        for path in files:
            values = pq.read_table(path, columns=["value_text"], partitioning=None).column(0)
            found.update(map(number_of, values.to_pylist()))
        return found

    def parquet(self):
        return [path for path in (self.root / "table").rglob("*.parquet") if ".kmq" not in path.parts]

    def delta(self):
        live = {}
        for log in sorted((self.root / "table/_delta_log").glob("*.json")):
            for line in log.read_text().splitlines():
                action = json.loads(line)
                if "add" in action:
                    live[action["add"]["path"]] = True
                if "remove" in action:
                    live.pop(action["remove"]["path"], None)
        return [self.root / "table" / name for name in live]

    def iceberg(self):
        from pyiceberg.table import StaticTable

        tasks = StaticTable.from_metadata(str(self.root / "table")).scan().plan_files()
        return [task.file.file_path.removeprefix("file://") for task in tasks]

    def judge(self):
        found, there = self.stored(), self.numbers()
        twice = [n for n, count in found.items() if count > 1]
        assert not twice, f"{len(twice)} twice, such as {twice[:3]}\n{self.log()}"
        passes = [{n for n in range(self.sent) if n % plan["modulo"] != plan["rest"]} for plan in self.plans]
        lost = (set.intersection(*passes) & there) - found.keys()
        assert not lost, f"{len(lost)} of {len(there)} lost, such as {sorted(lost)[:3]}\n{self.log()}"
        assert found.keys() <= set.union(*passes), self.log()

    def close(self):
        for driver in self.drivers:
            for process in [*self.workers(driver), driver]:
                try:
                    process.kill()
                except (ProcessLookupError, psutil.NoSuchProcess):
                    pass
            driver.wait(10)


@pytest.fixture
def replays(new_broker, tmp_path):
    made = []

    def make(target, seed):
        source, sink = new_broker(), new_broker()
        source.gateway = sink.gateway = False
        made.append(Replays(source, sink, tmp_path, target, seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", TARGETS)
def test_soak_changed_plans_and_kills_lose_and_double_nothing(replays, target, seed):
    run = replays(target, seed)
    for change in run.rng.sample(CHANGES, len(CHANGES)):
        run.produce()
        fault = run.rng.choice(FAULTS)
        run.drive(fault)
        if change == "compaction":
            run.compact()
        elif change == "retention":
            run.retain()
        elif change == "restored":
            run.refuse_older_copy()
    run.drive("none")
    run.judge()
