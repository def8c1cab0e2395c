#!/usr/bin/env python3
"""Measure CPU, memory and disk of a real pod at a rate of messages.

    scripts/bench_pod.py [idle steady most] [--quick] [--json FILE]

The pod is k8s/overlays/dev as scripts/play plays it, and messages come from outside the pod. Its data is on this
machine's disk and fdatasync is on. CPU is the time that the containers' cgroups count, including the probes, which run
as often as the manifests say. Memory is the working set, by which a kubelet evicts. Needs root; scripts/pod-setup
prepares the machine.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import play

from bench.lines import KEY
from bench.pod import wait_until
from bench.report import Figure, Measure, run, say
from bench.sending import Sending
from kmq.broker.stats import peek
from kmq.config.settings import STAGES
from kmq.config.values import MIB
from kmq.errors import KmqError

PARTS = ("idle", "steady", "most")
# Rates of 100-byte messages per second; those of one millisecond are sent together.
RATES = (1_000, 10_000, 100_000)
# At full speed the dev overlay's retention would delete records, and its quota would refuse messages.
UNLIMITED = {"KMQ_DATA_QUOTA": "none", "KMQ_RETENTION_BYTES": "none", "KMQ_SEGMENT_BYTES": "64 MiB"}
CGROUPS = Path("/sys/fs/cgroup")
SETTLE_S = 3.0  # after the load: index notes are written, memory has settled


class Bench:
    """The pod, and its gauges."""

    def __init__(self, pod: play.Pod, quick: bool) -> None:
        self.pod, self.seconds = pod, 3.0 if quick else 20.0
        self.groups = {name: pod.cgroup(name) for name in pod.containers}

    def cpu_s(self) -> dict[str, float]:
        """Return container → seconds of CPU so far."""
        found = {}
        for name, group in self.groups.items():
            old = CGROUPS / "cpuacct" / group / "cpuacct.usage"
            if old.exists():
                found[name] = int(old.read_text()) / 1e9
            else:
                found[name] = _words(CGROUPS / group / "cpu.stat")["usage_usec"] / 1e6
        return found

    def working_set(self) -> dict[str, int]:
        """Return container → bytes charged to it, without those that the kernel can reclaim at once."""
        found = {}
        for name, group in self.groups.items():
            old = CGROUPS / "memory" / group
            if old.exists():
                used, idle = (
                    int((old / "memory.usage_in_bytes").read_text()),
                    _words(old / "memory.stat")["total_inactive_file"],
                )
            else:
                used = int((CGROUPS / group / "memory.current").read_text())
                idle = _words(CGROUPS / group / "memory.stat")["inactive_file"]
            found[name] = max(0, used - idle)
        return found

    def disk(self) -> int:
        """Return the bytes of the data volume, as `du` counts them."""
        return sum(path.lstat().st_blocks * 512 for path in self.pod.volume("data").rglob("*"))

    def routed(self) -> int:
        """Return the last routed seq. Read from outside the pod: a command inside would be measured too."""
        page = peek("kmq", str(self.pod.volume("shm")))
        assert page is not None
        return page.rows["router"].seq

    def figures(self, part: str, what: str, kind: str, *arguments: object) -> Iterator[Figure]:
        """Measure the pod under one load: CPU of stages and gateway, memory, disk."""
        say(f"{part}: {what}")
        before, disk, seq, begin = self.cpu_s(), self.disk(), self.routed(), time.monotonic()
        if kind:
            count = Sending(kind, f"{self.pod.ip}:5673", *arguments).go().result()[1]
            wait_until(lambda: self.routed() >= seq + count, 0.01)
        else:
            count = 0
            time.sleep(self.seconds)
        seconds = time.monotonic() - begin
        memory = self.working_set()
        used = {name: now - before[name] for name, now in self.cpu_s().items()}
        each = ", ".join(f"{name} {spent / seconds:.3f}" for name, spent in used.items())
        yield Figure(
            part, f"{what}: CPU of the stages", sum(used[name] for name in STAGES) / seconds, "cores", note=each
        )
        if count:
            yield Figure(part, f"{what}: rate", count / seconds, "msg/s")
            yield Figure(part, f"{what}: CPU", sum(used.values()) / count * 1e6, "µs/msg")
            time.sleep(SETTLE_S)
            yield Figure(part, f"{what}: disk", (self.disk() - disk) / count, "B/msg")
        each = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in memory.items())
        yield Figure(
            part, f"{what}: memory of the stages", sum(memory[name] for name in STAGES) / MIB, "MiB", note=each
        )
        yield Figure(part, f"{what}: memory of the gateway", memory["gateway"] / MIB, "MiB")


def idle(bench: Bench) -> Iterator[Figure]:
    """Measure a pod that only gets probes."""
    yield from bench.figures("idle", "probed", "")


def steady(bench: Bench) -> Iterator[Figure]:
    """Measure 100-byte messages at a rate, from one producer without acknowledgements."""
    for rate in RATES:
        yield from bench.figures("steady", f"{rate:,}/s", "paced", rate, bench.seconds)


def most(bench: Bench) -> Iterator[Figure]:
    """Measure the maximum rate, with messages of 100 bytes and of 1 KB."""
    for nbytes in (100, 1000):
        yield from bench.figures("most", f"{nbytes} B", "seconds", KEY, bench.seconds, nbytes)


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    measures = {"idle": idle, "steady": steady, "most": most}
    try:
        with play.Pod(play.render("k8s/overlays/dev"), UNLIMITED) as pod, play.Kubelet(pod):
            pod.wait_ready()
            bench = Bench(pod, options.quick)
            yield lambda part: measures[part](bench)
    except play.PlayError as err:
        raise KmqError(str(err)) from err


def _words(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (row.split() for row in path.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure what a pod uses: CPU, memory, disk.",
        epilog="example: scripts/bench_pod.py steady --quick",
    )
    return run(parser, PARTS, "three seconds for each load", prepare)


if __name__ == "__main__":
    sys.exit(main())
