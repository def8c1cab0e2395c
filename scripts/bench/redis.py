"""A peer beside the broker: Redis Streams that sync every write, on the same disk, with the same generator of messages."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.gauges import cpu_seconds
from bench.lines import KEY
from bench.pod import pod, wait_until
from bench.replies import CONNECTIONS, requests
from bench.report import Figure, say
from bench.requests import Requests
from bench.scale import Scale

SERVER = "redis-server"
MISSING = f"{SERVER} not installed"
OPTIONS = "--bind 127.0.0.1 --daemonize no --appendonly yes --appendfsync always --auto-aof-rewrite-percentage 0"


class Server(NamedTuple):
    port: int
    pid: int


Row = tuple[str, str, str, tuple[float, ...]]  # its name, its unit, the kind of requests, their arguments
ROWS: list[Row] = [
    ("1 in flight, p50", "µs", "one", ()),
    ("64 in flight", "msg/s", "window", ()),
    (f"{CONNECTIONS:,} connections, 1 each", "msg/s", "connections", (CONNECTIONS,)),
]


def redis(directory: Path, scale: Scale) -> Iterator[Figure]:
    """XADD with `appendfsync always` beside acknowledged lines of 100 B: the same three loads, in turns."""
    with pod(directory) as running, server(directory / "redis") as peer:
        running.load("count", KEY, 1000, 100)
        for name, unit, kind, arguments in ROWS:
            say(f"{name}: {scale.peer_s:.1f} s of kmq, then of Redis")
            figures, note = requests(running, kind, *arguments, scale.peer_s)
            ours = value(figures, unit)
            yield Figure("redis", f"kmq: {name}", ours, unit, note=note)
            if not peer:
                yield Figure("redis", f"Redis: {name}", None, unit, note=MISSING)
                continue
            figures, note = peer_requests(peer, kind, *arguments, scale.peer_s)
            theirs = value(figures, unit)
            yield Figure("redis", f"Redis: {name}", theirs, unit, note=note)
            yield Figure("redis", f"kmq / Redis: {name}", ours / theirs, "x")


def value(figures: dict[str, float], unit: str) -> float:
    return figures["p50" if unit == "µs" else "rate"]


def peer_requests(peer: Server, kind: str, *arguments: float) -> tuple[dict[str, float], str]:
    generator = Requests("redis", kind, peer.port, *arguments)
    before, seconds = cpu_seconds(peer.pid), arguments[-1]
    found = generator.go().result()
    taken = (cpu_seconds(peer.pid) - before) / seconds
    return found, f"cores: generator {found['cores']:.2f}, {SERVER} {taken:.2f}"


@contextmanager
def server(home: Path) -> Iterator[Server | None]:
    """Yield a server with its files in `home`, without the machine's own configuration; None if Redis is not
    installed.
    """
    if not shutil.which(SERVER):
        yield None
        return
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [SERVER, *OPTIONS.split(), "--save", "", "--dir", str(home), "--port", str(port)]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or answers(port), 0.02)
        if process.returncode is not None:
            raise SystemExit(f"bench: {SERVER} did not start: {(home / 'log').read_text()[-300:]}")
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
