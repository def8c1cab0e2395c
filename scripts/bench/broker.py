"""The parts of the benchmark of the broker.

    scripts/bench [burst sustained acked acked-latency connections redis syscalls latency idle memory
                   partitions startup startup-topics] [--quick] [--json FILE] [--dir DIR] [--cache DIR]

The broker is what `kmq up` starts, with a private instance, free ports and a new directory on a real disk; fdatasync is on. Other
settings (RB_SLOTS=32768 scripts/bench sustained) come from the environment and are named in the result. The end of a run is seen
in the queue file itself (its size, by stat every 0.2 ms), because that is what a consumer can see.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.gauges import cpu_exact, memory_figures, rest_of_machine
from bench.latency import latency
from bench.lines import KEY, line
from bench.partitions import partitions
from bench.pod import Pod, pod, wait_until
from bench.redis import redis
from bench.replies import acked_latency, connections
from bench.report import Figure, Measure, run, say
from bench.scale import Scale
from bench.startup import startup, startup_topics
from bench.syscalls import syscalls
from bench.throughput import acked, sustained
from kmq.config.settings import STAGES

POLL_S = 0.0002  # between two looks at a queue file


def burst(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Time from the first byte sent until the last line is in test.log."""
    bars = {50_000: "≥ 1400000"}
    with pod(directory) as running:
        running.load("count", KEY, 1000, 36)
        for count in (1_000, 10_000, 50_000):
            say(f"burst of {count:,}: {scale.bursts} runs")
            with rest_of_machine(running) as rest:
                rates = [count / one_burst(running, count) for _ in range(scale.bursts)]
            yield Figure("burst", f"{count:,} x 36 B, best of {scale.bursts}", max(rates), "msg/s", bars.get(count, ""))
            yield Figure(
                "burst",
                f"{count:,} x 36 B, median",
                statistics.median(rates),
                "msg/s",
                note=f"worst {min(rates):,.0f}; {rest[0]}",
            )


def one_burst(running: Pod, count: int) -> float:
    """Return the seconds that one burst took."""
    log = str(running.log())
    first = running.last_seq() + 1
    stamp = len("|1700000000.000000|")
    grown = sum(map(len, map(str, range(first, first + count)))) + count * (stamp + 36)
    expected = os.stat(log).st_size + grown
    sending = running.send("count", KEY, count, 36)
    time.sleep(0.05)  # let the producer's start-up cool down before the timed part
    sending.go()
    wait_until(lambda: os.stat(log).st_size >= expected, POLL_S)
    end = time.monotonic()
    begin, _ = sending.result()
    with open(log, "rb") as file:
        file.seek(-36, os.SEEK_END)
        assert file.read() == line(KEY, count - 1, 36), "the last line of the queue is not the last one sent"
    return end - begin


def idle(directory: Path, scale: Scale) -> Iterator[Figure]:
    """CPU time while idle, in percent of one core."""
    with pod(directory) as running:
        running.load("count", KEY, 10_000, 36)
        time.sleep(2)  # the last provisional index lines are written
        say(f"idle: {scale.idle_s:.0f} s")
        pids = running.pids() | {"supervisor": running.supervisor}
        before = {stage: cpu_exact(pid) for stage, pid in pids.items()}
        time.sleep(scale.idle_s)
        used = {stage: (cpu_exact(pid) - before[stage]) / scale.idle_s * 100 for stage, pid in pids.items()}
        each = ", ".join(f"{stage} {percent:.2f}" for stage, percent in used.items())
        yield Figure("idle", "four stages", sum(used[stage] for stage in STAGES), "% of a core", "< 1", each)


def memory(directory: Path, scale: Scale) -> Iterator[Figure]:
    """PSS with the rings in it, after a burst. After sustained load it is measured there."""
    del scale
    with pod(directory) as running:
        say("memory after a burst of 10,000")
        running.load("count", KEY, 10_000, 36)
        yield from memory_figures(running, "after a burst of 10,000")


PARTS: dict[str, Callable[[Path, Scale], Iterator[Figure]]] = {
    "burst": burst,
    "sustained": sustained,
    "acked": acked,
    "acked-latency": acked_latency,
    "connections": connections,
    "redis": redis,
    "syscalls": syscalls,
    "latency": latency,
    "idle": idle,
    "memory": memory,
    "partitions": partitions,
    "startup": startup,
    "startup-topics": startup_topics,
}


def run_part(part: str, directory: Path, cache: Path | None, scale: Scale) -> Iterator[Figure]:
    if part.startswith("startup") and cache:
        cache.mkdir(parents=True, exist_ok=True)
        yield from PARTS[part](cache, scale)
        return
    temporary = Path(tempfile.mkdtemp(prefix=f"{part}-", dir=directory))
    try:
        yield from PARTS[part](temporary, scale)
    finally:
        shutil.rmtree(temporary)


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    scale = Scale(options.quick)
    yield lambda part: run_part(part, options.dir, options.cache, scale)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the broker: speed, latency, idle CPU, memory, start-up.",
        epilog="examples: python scripts/bench --quick; python scripts/bench burst idle --json /tmp/kmq-bench.json",
    )
    parser.add_argument(
        "--cache", type=Path, help="keep the big directories of the start-up parts there for the next time"
    )
    return run(parser, tuple(PARTS), "a few seconds for each part; too short to judge by", prepare)
