"""How many system calls each stage makes for acknowledged messages, counted by strace. The rate under strace means nothing."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.lines import KEY
from bench.pod import Pod, pod
from bench.report import Figure, say
from bench.requests import IN_FLIGHT, Requests
from bench.scale import Scale
from kmq.config.settings import STAGES

TRACER = "strace"
MISSING = f"{TRACER} not installed"
SETTLE_S = 0.5  # time for strace to attach to all threads of a process


def syscalls(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Calls of each stage for one train: the messages that one reply acknowledges, 100 B each, 64 in flight."""
    if not shutil.which(TRACER):
        yield Figure("syscalls", f"{IN_FLIGHT} in flight", None, "per train", note=MISSING)
        return
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        say(f"syscalls, {IN_FLIGHT} in flight: {scale.latency_s:.0f} s under strace")
        generator = Requests("kmq", "window", running.port, scale.latency_s)
        with traced(running, directory) as summaries:
            found = generator.go().result()
            running.settle()
    trains, messages = found["replies"], found["count"]
    yield Figure("syscalls", "messages in a train", messages / trains, "msg", note=f"{trains:,.0f} trains")
    for stage in STAGES:
        calls = parse(summaries[stage].read_text())
        total = sum(calls.values())
        note = f"{total / messages:.3f} per message"
        yield Figure("syscalls", f"{stage}: all", total / trains, "per train", note=note)
        for name, count in sorted(calls.items(), key=lambda call: -call[1]):
            if count / trains >= 0.01:
                yield Figure("syscalls", f"{stage}: {name}", count / trains, "per train")


@contextmanager
def traced(running: Pod, directory: Path) -> Iterator[dict[str, Path]]:
    """Run strace on each stage. After the block each stage's file has its summary."""
    summaries = {stage: directory / f"strace-{stage}" for stage in STAGES}
    pids = running.pids()
    tracers: list[subprocess.Popen[str]] = []
    try:
        for stage, summary in summaries.items():
            command = [TRACER, "-c", "-f", "-p", str(pids[stage]), "-o", str(summary)]
            tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            tracers.append(tracer)
            assert tracer.stderr is not None
            if "attached" not in (said := tracer.stderr.readline()):
                raise SystemExit(f"bench: {said.strip()}; run as root, or allow it in kernel.yama.ptrace_scope")
        time.sleep(SETTLE_S)
        yield summaries
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate()


def parse(summary: str) -> dict[str, int]:
    """Return system call → count, from the table of `strace -c`: % time, seconds, usecs/call, calls, [errors,]
    syscall.
    """
    rows = [row.split() for row in summary.splitlines()]
    return {row[-1]: int(row[3]) for row in rows if len(row) >= 5 and row[3].isdigit() and row[-1] != "total"}
