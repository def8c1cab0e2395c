"""The parts of the benchmark of the broker.

    scripts/bench [burst sustained acked acked-latency latency idle memory startup]
                  [--quick] [--json FILE] [--dir DIR] [--cache DIR]

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

from bench.acked import BATCHES, ONE_BATCH
from bench.gauges import cpu_exact, cpu_seconds, pss, rest_of_machine
from bench.latency import latency
from bench.lines import KEY, MIXED, line
from bench.pod import Pod, pod, wait_until
from bench.report import Figure, Measure, run, say
from bench.scale import Scale
from bench.startup import startup
from kmq.settings import STAGES

POLL_S = 0.0002  # between two looks at a queue file
GIB_NEEDED = 25  # free disk space for the sustained runs


def burst(directory: Path, scale: Scale) -> Iterator[Figure]:
    """First byte sent until the last line is in test.log."""
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
    """Seconds that one burst took."""
    log = str(running.log())
    first = running.last_seq() + 1
    stamp = len("|1700000000.000000|")
    grown = sum(map(len, map(str, range(first, first + count)))) + count * (stamp + 36)
    expected = os.stat(log).st_size + grown
    sending = running.send("count", KEY, count, 36)
    time.sleep(0.05)  # let the producer's start-up cool down: what follows is timed
    sending.go()
    wait_until(lambda: os.stat(log).st_size >= expected, POLL_S)
    end = time.monotonic()
    begin, _ = sending.result()
    with open(log, "rb") as file:
        file.seek(-36, os.SEEK_END)
        assert file.read() == line(KEY, count - 1, 36), "the last line of the queue is not the last one sent"
    return end - begin


def sustained(directory: Path, scale: Scale) -> Iterator[Figure]:
    """A producer that never stops, until the last of its lines is routed; and what each stage paid for it."""
    if shutil.disk_usage(directory).free < GIB_NEEDED << 30 and scale.sustained_s > 5:
        raise SystemExit(f"bench: the sustained runs need {GIB_NEEDED} GiB free in {directory}; or use --quick, --dir")
    runs = (
        ("100 B, one key", [KEY], 100, "≥ 1000000", ""),
        ("1 KB, one key", [KEY], 1000, "", "≥ 180"),
        ("100 B, 20 keys over 5 topics", MIXED, 100, "", ""),
    )
    for name, keys, nbytes, bar_messages, bar_mb in runs:
        with pod(directory) as running:
            running.load("count", ",".join(keys), 10_000, nbytes)
            say(f"sustained {name}: {scale.sustained_s:.0f} s")
            with rest_of_machine(running) as rest:
                seconds, count, cost = one_sustained(running, keys, nbytes, scale.sustained_s)
            per_million = {stage: cpu / count * 1e6 for stage, cpu in cost.items()}
            each = ", ".join(f"{stage} {cpu:.2f}" for stage, cpu in per_million.items())
            yield Figure("sustained", name, count / seconds, "msg/s", bar_messages, rest[0])
            yield Figure("sustained", name, count * nbytes / seconds / 1e6, "MB/s", bar_mb)
            yield Figure("sustained", f"{name}: CPU", sum(per_million.values()), "s/M msg", note=each)
            yield from memory_figures(running, f"after sustained {name}")


def one_sustained(running: Pod, keys: list[str], nbytes: int, duration: float) -> tuple[float, int, dict[str, float]]:
    """(seconds end to end, messages, CPU seconds by stage)."""
    before, pids = running.last_seq(), running.pids()
    paid = {stage: cpu_seconds(pid) for stage, pid in pids.items()}
    sending = running.send("seconds", ",".join(keys), duration, nbytes).go()
    begin, count = sending.result()
    end = running.wait_routed(before + count)
    return end - begin, count, {stage: cpu_seconds(pid) - paid[stage] for stage, pid in pids.items()}


def acked(directory: Path, scale: Scale) -> Iterator[Figure]:
    """kmq.Producer with ids, so that a retry would store nothing twice: until the reply to the last message."""
    for name, nbytes, bar in (("100 B", 100, "≥ 500000"), ("1 KB", 1000, "≥ 100000")):
        with pod(directory) as running:
            running.load("count", KEY, 10_000, nbytes)
            say(f"acked {name}: {scale.acked_s:.0f} s")
            with rest_of_machine(running) as rest:
                found = running.produce("many", nbytes, scale.acked_s)
            note = f"the producer took {found['cpu']:.2f} s CPU per M msg; {rest[0]}"
            yield Figure(
                "acked",
                f"{name}, {BATCHES} lists of {ONE_BATCH // nbytes:,} in flight",
                found["rate"],
                "msg/s",
                bar,
                note,
            )


def acked_latency(directory: Path, scale: Scale) -> Iterator[Figure]:
    """From send() until its caller has the reply, which says that the message is on disk."""
    runs = (
        ("one", (), "1 in flight", "≤ 500", ""),
        ("window", (), "64 in flight", "", ""),
        ("paced", (10_000.0,), "10,000 msg/s", "", "≤ 5000"),
    )
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        for kind, arguments, name, p50, p99 in runs:
            say(f"acked latency, {name}: {scale.latency_s:.0f} s")
            with rest_of_machine(running) as rest:
                found = running.produce(kind, *arguments, scale.latency_s)
            if "rate" in found:
                yield Figure("acked-latency", name, found["rate"], "msg/s", "≥ 100000")
            yield Figure("acked-latency", f"{name}, p50", found["p50"], "µs", p50)
            yield Figure("acked-latency", f"{name}, p99", found["p99"], "µs", p99, rest[0])


def idle(directory: Path, scale: Scale) -> Iterator[Figure]:
    """CPU time while nothing happens, in percent of one core."""
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
    """PSS with the rings in it, after a burst; after sustained load it is measured there."""
    del scale
    with pod(directory) as running:
        say("memory after a burst of 10,000")
        running.load("count", KEY, 10_000, 36)
        yield from memory_figures(running, "after a burst of 10,000")


def memory_figures(running: Pod, when: str) -> Iterator[Figure]:
    found = {stage: pss(pid) for stage, pid in running.pids().items()}
    each = ", ".join(f"{stage} {nbytes / 1e6:.1f}" for stage, nbytes in found.items())
    yield Figure("memory", when, sum(found.values()) / 1e6, "MB PSS", "< 50", each)


PARTS: dict[str, Callable[[Path, Scale], Iterator[Figure]]] = {
    "burst": burst,
    "sustained": sustained,
    "acked": acked,
    "acked-latency": acked_latency,
    "latency": latency,
    "idle": idle,
    "memory": memory,
    "startup": startup,
}


def run_part(part: str, directory: Path, cache: Path | None, scale: Scale) -> Iterator[Figure]:
    if part == "startup" and cache:
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
    parser.add_argument("--cache", type=Path, help="keep the big directories of `startup` there for the next time")
    return run(parser, tuple(PARTS), "a few seconds for each part; too short to judge by", prepare)
