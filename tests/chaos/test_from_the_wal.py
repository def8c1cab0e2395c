"""From append/ alone: queues, topics, their limits, growth, deletions and second lives come back byte for byte.

Also after a kill at every line that has to do with a change of a topic.
"""

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import no_room

from chaos.checker import check
from chaos.load import FifoLoad, Load
from chaos.pod import Pod
from chaos.test_crash_points import Bench
from chaos.traces import Point, few, traced
from kmq.framing import topics as declarations
from kmq.log import segment, topics, wal
from kmq.log import topic_changes as requests
from kmq.log import topic_changes as topic_records
from kmq.router import topic_changes
from kmq.router.queues import Queues

Make = Callable[..., Pod]
Start = Callable[[Load], Load]
CHANGES = ("framing/topics.py", "declarations.py", "topic_changes.py", "deletions.py", "in_force.py")


def content(data: Path) -> dict[str, bytes | str]:
    """All that a replay has to bring back."""
    files = [path for path in data.glob("topics/*/*/*.log") if not path.parts[-3].startswith(".")]
    files += [*data.glob("topics/*/topic.toml"), *data.glob("deletions"), *data.glob("topics/.deletions")]
    links = {path.name: os.readlink(path) for path in data.iterdir() if path.is_symlink()}
    return {str(path.relative_to(data)): path.read_bytes() for path in files} | links


def from_the_wal(data: Path) -> dict[str, bytes | str]:
    """Return the content of a directory that had nothing but the WAL, and who it is."""
    again = data.with_name(f"{data.name}-again")
    shutil.rmtree(again, ignore_errors=True)
    (again / "topics").mkdir(parents=True)
    shutil.copytree(data / "append", again / "append", symlinks=True)
    (again / "append.log").symlink_to(os.readlink(data / "append.log"))
    for name in ("id", "lineage", "format"):
        shutil.copy(data / name, again / name)
    queues = Queues(str(again), no_room, FakeLogger(), are_recorded=True)
    queues.recover(wal.last_numbered(str(again))[0])
    queues.close()
    return content(again)


def ask(data: Path, verb: str, topic: str, **texts: str) -> None:
    requests.submit(str(data), verb, topic, texts)


def judge(data: Path, what: object = "") -> None:
    left = [name for name in os.listdir(data / "topics") if name.startswith(".request")]
    assert not left, f"{what}: {left}"
    wanted, found = content(data), from_the_wal(data)
    assert sorted(found) == sorted(wanted), f"{what}: {sorted(found)} {sorted(wanted)}"
    differ = {name: (wanted[name], found[name]) for name in wanted if found[name] != wanted[name]}
    assert not differ, f"{what}: {differ}"


def test_what_was_declared_grown_and_deleted_comes_back_from_the_wal_alone(make_pod: Make, loads: Start) -> None:
    pod = make_pod()
    data = str(pod.data)
    pod.start()
    pod.wait_ready()
    load = FifoLoad(pod.pipes, "w", seed=1)
    loads(load)

    def come(count: int = 300) -> None:
        had = load.count
        pod.wait(lambda: load.count > had + count, "messages come")

    def carried_out() -> None:
        pod.wait(lambda: not requests.waiting(data), "all is carried out")

    come()
    topics.declare(data, "second", 3, {"retention_age": "30d", "segment_bytes": "1 GiB"})
    topics.declare(data, "jobs.eu", 2, partitioner="crc32")
    carried_out()
    pod.kill("router")
    ask(pod.data, requests.GROW, "wide", partitions="4")
    ask(pod.data, requests.SET, "second", retention_age="", retention_bytes="10 GiB")
    requests.begin_at(data, "wide", None, {0: 7, 1: 1 << 40})
    come()
    pod.kill("framer")
    pod.start("framer", "router")
    carried_out()
    ask(pod.data, requests.DELETE, "second")
    ask(pod.data, requests.DELETE, "jobs")
    carried_out()
    topics.declare(data, "second", 2, {"max_deliveries": "5"})
    come()
    carried_out()
    pod.kill("durability", "router")
    ask(pod.data, requests.GROW, "second", partitions="5")
    pod.start("durability", "router")
    come()
    carried_out()
    load.finish()
    pod.settle()
    pod.stop()
    assert (pod.data / "__kmq.log").read_bytes().count(b"|__kmq.topic|") == 8
    judge(pod.data)
    assert (pod.data / "__kmq.log").read_bytes().count(b"|__kmq.start|") == 1
    firsts = [segment.listing(f"{data}/topics/wide/{number}")[0][0] for number in range(3)]
    assert firsts[0] == 7 and firsts[1] > 7 and firsts[2] == 0
    assert topics.read(data, "second").limits == {"max_deliveries": "5"}
    pod.start()
    pod.settle()
    pod.stop()
    judge(pod.data)


class ChangedBench(Bench):
    """Between the lines, topics are declared, changed, grown, deleted, and declared again."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.sends = 0

    def wide(self) -> None:
        topics.declare(str(self.root / "data"), "wide", 3)

    def long(self, n: int) -> bytes:
        """None: more generations than usual have to fit into the ring, each with less than the one before."""
        return self.lines.line(n)

    def generation(self, watch: Callable[[str], object] = lambda name: None) -> None:
        declarations._COARSE_NS = topic_changes._COARSE_NS = 1 << 62  # or the clock decides which lines are reached
        super().generation(watch)

    def send(self, count: int) -> None:
        super().send(count // 2)
        data, self.sends = self.root / "data", self.sends + 1
        if self.sends == 1:
            topics.declare(str(data), "early", 2, {"retention_age": "30d"})
            topics.declare(str(data), "doomed", 2)
            ask(data, requests.SET, "wide", retention_age="9d")
        elif self.sends == 2:
            topics.declare(str(data), "late", 3)
            ask(data, requests.GROW, "early", partitions="4")
            ask(data, requests.SET, "early", segment_age="2d")
            ask(data, requests.DELETE, "doomed")
            ask(data, requests.GROW, "wide", partitions="5")
        super().send(count - count // 2)


def prepared(policy: str) -> ChangedBench:
    """What is disturbed is the second generation: there is something to grow and to delete."""
    bench = ChangedBench(policy)
    bench.send(60)
    assert bench.child(bench.generation) == 0, bench.log()
    bench.send(30)
    return bench


def points(policy: str, victim: str) -> list[Point]:
    """All points of a change that an undisturbed generation passes."""
    bench = prepared(policy)
    found: list[Point] = []

    def record() -> None:
        bench.generation(traced(victim, found.append))
        (bench.root / "points").write_text("\n".join(f"{point.file} {point.line} {point.nth}" for point in found))

    try:
        assert bench.child(record) == 0, bench.log()
        rows = (line.split() for line in (bench.root / "points").read_text().splitlines())
        return [Point(file, int(line), int(nth)) for file, line, nth in rows if file.endswith(CHANGES)]
    finally:
        bench.close()


def survives_kill(policy: str, victim: str, point: Point) -> None:
    def reached(here: Point) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        bench = prepared(policy)
        stack.callback(bench.close)
        code = bench.child(lambda: bench.generation(traced(victim, reached)))
        assert code == -signal.SIGKILL, f"{point} was not reached\n{bench.log()}"
        data = bench.root / "data"
        for count in (15, 8, 5, 4, 3):  # records of one topic are numbered one after the other, a generation each
            bench.send(count)
            assert bench.child(bench.generation) == 0, f"killed at {point}\n{bench.log()}"
        report = check(data, bench.streams())
        assert not report.counts, f"killed at {point}\n{report}\n{bench.log()}"
        declared = topics.read(str(data), "early")
        assert (declared.partitions, declared.limits) == (4, {"retention_age": "30d", "segment_age": "2d"}), point
        assert (data / "deletions").read_text().startswith("doomed|"), point
        assert {"late", "wide"} <= {*topics.names(str(data))} and "doomed" not in topics.names(str(data)), point
        assert topics.read(str(data), "wide").partitions == 5, point
        judge(data, point)


@pytest.fixture(scope="module")
def processors() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ["framer", "router"])
def test_a_kill_at_a_line_of_a_change_leaves_a_wal_that_brings_all_back(
    victim: str, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    found = few(processors.submit(points, "block", victim).result())
    assert found
    tried = rng.sample(found, max(1, len(found) // 8))
    list(processors.map(partial(survives_kill, "block", victim), tried))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["block", "lax"])
@pytest.mark.parametrize("victim", ["framer", "router"])
def test_soak_a_kill_at_any_line_of_a_change(policy: str, victim: str, processors: ProcessPoolExecutor) -> None:
    found = few(processors.submit(points, policy, victim).result())
    list(processors.map(partial(survives_kill, policy, victim), found))


def test_a_change_of_another_kind_of_text_is_read_as_it_was_written() -> None:
    values = {"partitions": "4", "segment_bytes": "1 GiB", "retention_age": "", "x": "ä=%|\n;"}
    change = topic_records.TopicChange(topic_records.SET, "a.b-c", 17, values, "0001-2")
    line = b"21|1732190000.000001|%b\n" % topic_records.encode(change, b"1.000000")
    assert line.count(b"|") == 5 and line.count(b"\n") == 1
    assert topic_records.decode(line) == change._replace(seq=21, ts="1732190000.000001")
    other = b"20|1.000000|a|0|1|x|__kmq.topic|\n"
    assert list(topic_records.parts(other + line + other)) == [
        (other, b""),
        (line, topic_records.KEY),
        (other, b""),
    ]
