"""The cost of processes: CPU, memory, and the CPU that the rest of the machine used meanwhile."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.pod import Pod
from bench.report import Figure


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_exact(pid: int) -> float:
    """Time on a CPU of the threads that a process has now, to 1 ns."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def pss(pid: int) -> int:
    """Return the proportional set size in bytes: private memory plus a fair share of shared memory, such as the
    rings.
    """
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1]) * 1024
    raise SystemExit("bench: this kernel has no Pss in smaps_rollup")


def memory_figures(running: Pod, when: str) -> Iterator[Figure]:
    found = {stage: pss(pid) for stage, pid in running.pids().items()}
    each = ", ".join(f"{stage} {nbytes / 1e6:.1f}" for stage, nbytes in found.items())
    yield Figure("memory", when, sum(found.values()) / 1e6, "MB PSS", "≤ 45", each)


@contextmanager
def stage_cpu(running: Pod) -> Iterator[dict[str, float]]:
    """Yield a dict that has, after the block, the CPU seconds of each stage within the block."""
    taken: dict[str, float] = {}
    pids = running.pids()
    before = {stage: cpu_seconds(pid) for stage, pid in pids.items()}
    yield taken
    taken |= {stage: cpu_seconds(pid) - before[stage] for stage, pid in pids.items()}


@contextmanager
def rest_of_machine(running: Pod) -> Iterator[list[str]]:
    """Yield a list that tells, after the block, how many cores went to neither the pod, the producer nor this process.

    These are other programs and the kernel's own writing to the disk. A figure from a busy machine should show it.
    """

    def rest() -> float:
        busy = psutil.cpu_times()
        children, us = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        ours = sum(map(cpu_seconds, running.pids().values())) + cpu_seconds(running.supervisor)
        ours += children.ru_utime + children.ru_stime + us.ru_utime + us.ru_stime
        return float(busy.user + busy.nice + busy.system + busy.irq + busy.softirq + busy.steal - ours)

    said: list[str] = []
    begin, before = time.monotonic(), rest()
    yield said
    cores = max(0.0, rest() - before) / (time.monotonic() - begin)
    said.append(f"the rest of the machine took {cores:.2f} cores meanwhile")
