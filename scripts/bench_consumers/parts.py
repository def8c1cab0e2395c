"""The parts of the benchmark of consumers."""

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench import redis
from bench.pod import Pod
from bench.report import Figure, say
from bench.sending import WAIT_S
from kmq.client.lines import read_port
from kmq.client.producer import Producer

COMMAND = [sys.executable, str(Path(__file__).resolve().parent)]
SMALL, LARGE = ("small", 100), ("large", 1024)  # topics: name, bytes of a value


@contextmanager
def pod_with_gateway(directory: Path) -> Iterator[Pod]:
    """Yield a pod with a gateway in a new directory, and remove everything of it after the block."""
    home = Path(tempfile.mkdtemp(prefix="consumers-", dir=directory))
    running = Pod(home, gateway=True)
    try:
        running.up()
        yield running
    finally:
        running.down()
        shutil.rmtree(home)
        for left in Path("/dev/shm").glob(f"*{running.settings.instance}.*"):
            left.unlink()


class Bench:
    """A pod, the messages that it has stored, and the size of every measurement."""

    def __init__(self, running: Pod, quick: bool) -> None:
        self.running, self.quick = running, quick
        self.runs = 2 if quick else 5
        self._counts: dict[str, int] = {}

    def filled(self, topic: str, nbytes: int) -> int:
        """Return how many messages of that size the topic has; the first call stores them."""
        if topic not in self._counts:
            count = (50_000_000 if self.quick else 400_000_000) // (nbytes + 70)
            say(f"storing {count:,} messages of {nbytes} bytes")
            with Producer(port=self.running.port) as producer:
                for begin in range(0, count, 5000):
                    producer.send_many(topic, [b"x" * nbytes] * min(5000, count - begin))
            self.running.settle()
            self._counts[topic] = count
        return self._counts[topic]

    def port(self, name: str) -> int:
        """Return the port of the gateway for egress or http."""
        return read_port(self.running.settings, name, 0)

    def read(self, role: str, topic: str, count: int) -> dict[str, float]:
        """Return the measurements of a reader in another process: of several runs the one with the best rate."""
        return min((self.once(role, self.port("egress"), topic, count) for _ in range(self.runs)), key=_seconds)

    def once(self, role: str, port: int, topic: str, count: int) -> dict[str, float]:
        argv = [*COMMAND, role, str(port), topic, str(count)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
        if done.returncode:
            raise SystemExit("bench: the reader failed")
        found: dict[str, float] = json.loads(done.stdout)
        return found


def _seconds(run: dict[str, float]) -> float:
    return run["seconds"]


def _figures(bench: Bench, part: str, role: str, what: str, topic: tuple[str, int], bar: str) -> Iterator[Figure]:
    """Yield the rate of a reader by the clock, with the bar, and by the CPU time of the reader alone."""
    count = bench.filled(*topic)
    best = bench.read(role, topic[0], count)
    unit, amount = ("msg/s", best["count"]) if topic is SMALL else ("MB/s", best["nbytes"] / 1e6)
    yield Figure(part, f"{what}, {topic[1]} B", amount / best["seconds"], unit, bar)
    yield Figure(part, f"{what}, {topic[1]} B, by its CPU time", amount / best["cpu"], unit, bar)


def records(bench: Bench) -> Iterator[Figure]:
    """How many small messages a consumer reads."""
    yield from _figures(bench, "records", "_iterate", "Consumer, iteration", SMALL, "≥ 500000")
    yield from _figures(bench, "records", "_poll", "Consumer, poll", SMALL, "≥ 500000")


def large(bench: Bench) -> Iterator[Figure]:
    """How many bytes a consumer reads."""
    yield from _figures(bench, "bytes", "_iterate", "Consumer, iteration", LARGE, "≥ 250")


def by_asyncio(bench: Bench) -> Iterator[Figure]:
    yield from _figures(bench, "async", "_async", "AsyncConsumer", SMALL, "")
    yield from _figures(bench, "async", "_async", "AsyncConsumer", LARGE, "")


def commits(bench: Bench) -> Iterator[Figure]:
    """A group that commits every 500 messages, and the gateway's CPU for it."""
    gateway = psutil.Process(bench.running.page().rows["gateway"].pid)
    for topic in (SMALL, LARGE):
        count = bench.filled(*topic)
        before = sum(gateway.cpu_times()[:2])
        best = bench.read("_commit", topic[0], count)
        used = (sum(gateway.cpu_times()[:2]) - before) / (count * bench.runs)
        what = f"a group, {topic[1]} B, commit per 500"
        yield Figure("commits", what, best["count"] / best["seconds"], "msg/s")
        yield Figure("commits", f"{what}, gateway", used * 1e6, "µs/msg", "≤ 2.4" if topic is LARGE else "")


def beside_redis(bench: Bench) -> Iterator[Figure]:
    """The same group, and one of Redis Streams by redis-py (XREADGROUP and XACK of 500), in turns."""
    with redis.server(bench.running.home / "redis") as peer:
        for topic, bar in ((SMALL, "≥ 1.5"), (LARGE, "≥ 1")):
            what = f"a group, {topic[1]} B, commit per 500: kmq / Redis"
            if not peer or not importlib.util.find_spec("redis"):
                yield Figure("redis", what, None, "x", bar, "redis-server or redis-py not installed")
                continue
            count = bench.filled(*topic)
            least = min(count, 100_000 if bench.quick else 300_000)
            bench.once("_redis_fill", peer.port, f"{topic[0]}:{topic[1]}", least)
            turns = []
            for _ in range(bench.runs):
                ours = bench.once("_commit", bench.port("egress"), topic[0], count)
                turns.append((ours, bench.once("_redis", peer.port, f"{topic[0]}:{topic[1]}", least)))
            rates = [[run["count"] / run["seconds"] for run in turn] for turn in turns]
            note = "medians: kmq {:,.0f}, Redis {:,.0f} msg/s".format(*map(statistics.median, zip(*rates, strict=True)))
            yield Figure("redis", what, statistics.median(ours / theirs for ours, theirs in rates), "x", bar, note)


def lines(bench: Bench) -> Iterator[Figure]:
    """The rate of the consumer port for a reader that discards everything."""
    yield from _figures(bench, "lines", "_lines", "CONSUME raw", LARGE, "")


def latency(bench: Bench) -> Iterator[Figure]:
    """From the producer's call to the message in the application, one message at a time."""
    count = 200 if bench.quick else 2000
    with Producer(port=bench.running.port) as producer:
        producer.send("waited", b"x").result()
        bench.running.settle()
        argv = [*COMMAND, "_wait", str(bench.port("egress")), "waited", str(count)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
            for _ in range(count):
                producer.send("waited", b"x").result()
                time.sleep(0.002)
            shares = json.loads(reader.stdout.read())
    yield Figure("latency", "producer to consumer, p50", shares["p50"], "ms")
    yield Figure("latency", "producer to consumer, p99", shares["p99"], "ms", "", f"longest {shares['max']:.1f} ms")
