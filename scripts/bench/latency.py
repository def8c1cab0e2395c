"""How long a line takes from the producer to a reader of the queue file."""

import ctypes
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

from bench.lines import KEY
from bench.pod import Pod, pod
from bench.report import Figure, say
from bench.scale import Scale
from bench.sending import WAIT_S
from kmq.config.values import MIB


def latency(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Time from just before the send until a reader, woken by inotify, has read the bytes from the queue file."""
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        for rate in (1_000, 50_000):
            say(f"latency at {rate:,} msg/s: {scale.latency_s:.0f} s")
            micros = one_latency(running, rate, scale.latency_s)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
                value = micros[int(share * len(micros))] / 1000
                yield Figure("latency", f"{rate:,} msg/s of 100 B, {name}", value, "ms")


def one_latency(running: Pod, rate: int, seconds: float) -> list[float]:
    """Return sorted latencies in microseconds. The reader only collects bytes, and parses them afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    notify = libc.inotify_init1(os.O_CLOEXEC)
    path = str(running.log().resolve())
    libc.inotify_add_watch(notify, path.encode(), 0x2)  # IN_MODIFY
    queue = os.open(path, os.O_RDONLY)
    os.lseek(queue, 0, os.SEEK_END)
    seen: list[tuple[float, bytes]] = []
    sending = running.send("paced", rate, seconds).go()
    missing = int(rate * seconds)
    while missing > 0:
        if not select.select([notify], [], [], WAIT_S)[0]:
            raise SystemExit(f"bench: {missing} messages did not come through")
        os.read(notify, 4096)
        data = os.read(queue, MIB)
        seen.append((time.time(), data))
        missing -= data.count(b"\n")
    sending.result()
    os.close(queue)
    os.close(notify)
    found, rest = [], b""
    for at, data in seen:
        *rows, rest = (rest + data).split(b"\n")
        found += [(at - float(row.split(b"|", 4)[3])) * 1e6 for row in rows]
    return sorted(found)
