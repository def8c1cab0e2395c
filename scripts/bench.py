#!/usr/bin/env python3
"""How fast, how small, how soon: measured against a pod of its own, never part of a test run.

    scripts/bench.py [burst sustained acked acked-latency latency idle memory startup]
                     [--quick] [--json FILE] [--dir DIR] [--cache DIR]

The pod is what `kmq up` starts, with a private instance, free ports and a new directory on a real disk; fdatasync is on.
Other settings (RB_SLOTS=32768 scripts/bench.py sustained) are taken from the environment and named in the result.
The producer is another process that sends blocks made beforehand, so that the broker is what is measured. The end of
a run is seen in the queue file itself (its size, by stat every 0.2 ms), for that is what a consumer can see.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console

from kmq.broker import status
from kmq.broker.stats import StatsPage, peek
from kmq.client.lines import read_port
from kmq.client.producer import Producer
from kmq.errors import EXIT_FAILED, EXIT_OK, KmqError
from kmq.log import wal
from kmq.settings import MIB, STAGES, Settings, load

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("burst", "sustained", "acked", "acked-latency", "latency", "idle", "memory", "startup")
BLOCK = 200_000  # bytes of one send
POLL_S = 0.0002  # between two looks at a queue file
STARTS = 5  # of which the median counts
WAIT_S = 300.0  # longest wait for anything
KEY = "test.probe"
MIXED = [f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "audit", "metrics") for key in range(4)]
PRIVATE = (
    "KMQ_INSTANCE",
    "KMQ_PORT",
    "KMQ_ACK_PORT",
    "KMQ_HTTP_PORT",
    "KMQ_GRPC_PORT",
    "KMQ_DATA",
    "KMQ_PIPES",
)  # set here, whatever the environment says
GIB_NEEDED = 25  # free disk space for the sustained runs

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Scale:
    """How much of everything: the full measure, or --quick."""

    def __init__(self, quick: bool) -> None:
        self.bursts = 3 if quick else 10
        self.sustained_s = 3.0 if quick else 20.0
        self.latency_s = 2.0 if quick else 10.0
        self.acked_s = 3.0 if quick else 10.0
        self.idle_s = 3.0 if quick else 10.0
        self.records = 500_000 if quick else 10_000_000
        self.topics = 500 if quick else 10_000


class Figure:
    """One measured value beside its bar. `bar` reads like "≥ 1400000"; "" where there is none."""

    def __init__(self, part: str, what: str, value: float, unit: str, bar: str = "", note: str = "") -> None:
        self.part, self.what, self.value, self.unit, self.bar, self.note = part, what, value, unit, bar, note

    @property
    def met(self) -> bool | None:
        if not self.bar:
            return None
        sign, _, limit = self.bar.partition(" ")
        if sign == "≥":
            return self.value >= float(limit)
        return self.value <= float(limit) if sign == "≤" else self.value < float(limit)


Measure = Callable[[str], Iterator[Figure]]  # a part's name → its figures


# --- lines as sent -----------------------------------------------------------------------------------------------


def line(key: str, number: int, nbytes: int) -> bytes:
    """A message of `nbytes`, its newline included."""
    head = f"{key}|0|{number}|"
    return (head + "x" * (nbytes - len(head) - 1) + "\n").encode()


def json_line(key: str, number: int, nbytes: int) -> bytes:
    """The same with a JSON object of four fields as payload; the last one, a text, makes it as long as is wanted."""
    head = f'{key}|0|{number}|{{"user":"u{number % 5000}","price":{number % 997 / 4},"n":{number % 1000},"t":"'
    return (head + "x" * (nbytes - len(head) - 3) + '"}\n').encode()


def blocks(keys: list[str], count: int, nbytes: int, make: Callable[[str, int, int], bytes] = line) -> list[bytes]:
    """`count` messages in blocks of about BLOCK bytes, the keys in turn."""
    per_block = max(1, BLOCK // nbytes)
    lines = [make(keys[n % len(keys)], n, nbytes) for n in range(count)]
    return [b"".join(lines[at : at + per_block]) for at in range(0, count, per_block)]


# --- the producer: this file again, as another process -------------------------------------------------------------


def sender(kind: str, address: str, arguments: list[str]) -> None:
    """Connect, say ready, wait for a line, send, close; then print when the first byte went and how many messages."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    send: Callable[[], int]
    if kind in ("count", "json"):
        keys, count, nbytes = arguments[0].split(","), int(arguments[1]), int(arguments[2])
        ready_made = blocks(keys, count, nbytes, line if kind == "count" else json_line)
        send = lambda: _send_all(sock, ready_made, count)  # noqa: E731
    elif kind == "seconds":
        keys, seconds, nbytes = arguments[0].split(","), float(arguments[1]), int(arguments[2])
        per_block = BLOCK // nbytes // len(keys) * len(keys)
        block = blocks(keys, per_block, nbytes)[0]
        send = lambda: _send_for(sock, block, per_block, seconds)  # noqa: E731
    elif kind == "topics":
        count = int(arguments[0])
        ready_made = [b"".join(line(f"t{n:05}.k", n, 36) for n in range(count))]
        send = lambda: _send_all(sock, ready_made, count)  # noqa: E731
    else:
        rate, seconds = int(arguments[0]), float(arguments[1])
        send = lambda: _send_paced(sock, rate, seconds)  # noqa: E731
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    count = send()
    sock.shutdown(socket.SHUT_WR)
    while sock.recv(4096):
        pass
    print(begin, count, flush=True)


def _send_all(sock: socket.socket, ready_made: list[bytes], count: int) -> int:
    for block in ready_made:
        sock.sendall(block)
    return count


def _send_for(sock: socket.socket, block: bytes, per_block: int, seconds: float) -> int:
    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        sock.sendall(block)
        sent += per_block
    return sent


def _send_paced(sock: socket.socket, rate: int, seconds: float) -> int:
    """`rate` messages a second of 100 bytes: one by one, or as many as fall into a millisecond. Each says when it was sent."""
    step = max(1, rate // 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin, total = time.monotonic(), int(rate * seconds)
    payload = "x" * (100 - len(f"{KEY}|1700000000.000000||\n"))
    for sent in range(0, total, step):
        wait = begin + sent / rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        sock.sendall(f"{KEY}|{time.time():.6f}||{payload}\n".encode() * step)
    return total


# --- the producer with acks: kmq.Producer in another process, fsync always -------------------------------------------

ONE_BATCH = 200_000  # bytes of a list of messages
BATCHES = 40  # of them without reply


def produce(kind: str, port: int, arguments: list[str]) -> None:
    """Print what one kind of use gives, as JSON."""
    measured: dict[str, Callable[..., dict[str, float]]] = {
        "many": _produce_many,
        "one": _produce_one,
        "window": _produce_window,
        "paced": _produce_paced,
    }
    print(json.dumps(measured[kind](port, *map(float, arguments))))


def _payload(nbytes: float) -> bytes:
    """Of a message whose line has so many bytes, with an id of seven digits."""
    return b"x" * (int(nbytes) - len(line(KEY + "|1700000000.000000", 1_000_000, 0)))


def _produce_many(port: int, nbytes: float, seconds: float) -> dict[str, float]:
    """Lists of messages, a bounded number of them without reply; until the last reply."""
    payloads = [_payload(nbytes)] * int(ONE_BATCH / nbytes)
    with Producer(port=port, max_in_flight=BATCHES * len(payloads)) as producer:
        producer.send_many(KEY, payloads).result()
        begin, count, cpu = time.monotonic(), 0, time.process_time()
        while time.monotonic() < begin + seconds:
            producer.send_many(KEY, payloads)
            count += len(payloads)
        producer.flush()
        return {"rate": count / (time.monotonic() - begin), "cpu": (time.process_time() - cpu) / count * 1e6}


def _produce_one(port: int, seconds: float) -> dict[str, float]:
    """One message without reply at a time."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port) as producer:
        producer.send(KEY, payload).result()
        until = time.monotonic() + seconds
        while (begin := time.monotonic()) < until:
            producer.send(KEY, payload).result()
            taken.append(time.monotonic() - begin)
    return _shares(taken)


def _produce_window(port: int, seconds: float) -> dict[str, float]:
    """Message after message, 64 without reply."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port, max_in_flight=64) as producer:
        producer.send(KEY, payload).result()
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            for _ in range(1000):
                producer.send(KEY, payload, callback=lambda d: taken.append(time.monotonic() - d.since))
        producer.flush()
        return {"rate": len(taken) / (time.monotonic() - begin)} | _shares(taken)


def _produce_paced(port: int, rate: float, seconds: float) -> dict[str, float]:
    """One message after the other at an even pace, whose replies nobody waits for."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port) as producer:
        producer.send(KEY, payload).result()
        begin = time.monotonic()
        for n in range(int(rate * seconds)):
            wait = begin + n / rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            producer.send(KEY, payload, callback=lambda d: taken.append(time.monotonic() - d.since))
    return _shares(taken)


def _shares(seconds: list[float]) -> dict[str, float]:
    taken = sorted(seconds)
    return {name: taken[int(share * len(taken))] * 1e6 for name, share in (("p50", 0.5), ("p99", 0.99))}


# --- the pod -----------------------------------------------------------------------------------------------------


class Pod:
    """Four stages and their supervisor in `home`, as `kmq up` starts them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = dict(os.environ) | {
            "KMQ_INSTANCE": f"bench{os.getpid()}",
            "KMQ_PORT": "0",
            "KMQ_ACK_PORT": "0",
            "KMQ_HTTP_PORT": "0",
            "KMQ_GRPC_PORT": "0",
            "KMQ_DATA": str(home / "data"),
            "KMQ_PIPES": str(home / "pipes"),
        }
        self.settings: Settings = load(self.environment)
        self.supervisor = 0
        self.began = 0.0  # when `kmq up` was called

    def up(self) -> float:
        """Start it; returns the seconds that `kmq up` took, until all stages were ready."""
        begin, self.began = time.monotonic(), time.time()
        self._kmq("up", "--no-gateway")  # the four stages are what is measured
        seconds = time.monotonic() - begin
        holder = (self.home / "pipes" / "supervisor.owner").read_text()
        self.supervisor = int(holder.split()[0].removeprefix("pid="))
        return seconds

    def down(self) -> None:
        if self.supervisor:
            self.supervisor = 0
            self._kmq("down")

    def kill(self) -> None:
        """SIGKILL everything at once; the supervisor first, so that it restarts nobody."""
        processes = [psutil.Process(pid) for pid in (self.supervisor, *self.pids().values())]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=WAIT_S)
        self.supervisor = 0

    def _kmq(self, *command: str) -> None:
        argv = [sys.executable, "-m", "kmq", *command]
        done = subprocess.run(argv, env=self.environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)

    def page(self) -> StatsPage:
        page = peek(self.settings.instance)
        assert page is not None
        return page

    def pids(self) -> dict[str, int]:
        return {stage.name: stage.pid for stage in status.collect(self.settings).stages}

    def send(self, kind: str, *arguments: object) -> "Sending":
        return Sending(kind, f"127.0.0.1:{read_port(self.settings, 'ingress', 0)}", *arguments)

    def produce(self, kind: str, *arguments: float) -> dict[str, float]:
        """What kmq.Producer, in another process, does here."""
        argv = [
            sys.executable,
            __file__,
            "_produce",
            kind,
            str(read_port(self.settings, "ingress", 0)),
            *map(str, arguments),
        ]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
        if done.returncode:
            raise SystemExit("bench: the producer failed")
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def log(self, topic: str = "test") -> Path:
        return self.home / "data" / f"{topic}.log"

    def wait_routed(self, seq: int) -> float:
        """Wait until everything up to `seq` is in its queue; returns when it was."""
        router = self.page().rows["router"]
        wait_until(lambda: router.seq >= seq, 0.002)
        return time.monotonic()

    def last_seq(self) -> int:
        return wal.last_stored(self.settings.data)[0]

    def load(self, kind: str, *arguments: object) -> None:
        """Send and wait until all of it is routed; nothing is measured."""
        before = self.last_seq()
        _, count = self.send(kind, *arguments).go().result()
        self.wait_routed(before + count)


class Sending:
    """One producer process. It has connected and made its blocks when this exists, and sends after go()."""

    def __init__(self, kind: str, address: str, *arguments: object) -> None:
        argv = [sys.executable, __file__, "_send", kind, address, *map(str, arguments)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("bench: the producer could not start")

    def go(self) -> "Sending":
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self

    def result(self) -> tuple[float, int]:
        """(when the first byte was sent, messages)."""
        output, _ = self._process.communicate(timeout=WAIT_S)
        begin, count = output.split()
        return float(begin), int(count)


@contextmanager
def pod(directory: Path, up: bool = True) -> Iterator[Pod]:
    """A pod in a new directory; nothing of it is left behind."""
    home = Path(tempfile.mkdtemp(prefix="pod-", dir=directory))
    with pod_in(home, up) as running:
        yield running
    shutil.rmtree(home)


@contextmanager
def pod_in(home: Path, up: bool = True) -> Iterator[Pod]:
    """A pod in `home`, whose files stay."""
    running = Pod(home)
    try:
        if up:
            running.up()
        yield running
    finally:
        running.down()
        instance = running.settings.instance
        for left in Path("/dev/shm").glob(f"*{instance}.*"):
            left.unlink()


def wait_until(condition: Callable[[], bool], poll_s: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("bench: the broker did not get there in time")
        time.sleep(poll_s)


# --- gauges ------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_exact(pid: int) -> float:
    """Time on a CPU of the threads that a process has now, to 1 ns."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def pss(pid: int) -> int:
    """Proportional set size in bytes: private memory plus a fair share of what is shared, the rings among it."""
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1]) * 1024
    raise SystemExit("bench: this kernel has no Pss in smaps_rollup")


@contextmanager
def rest_of_machine(running: Pod) -> Iterator[list[str]]:
    """Says, when it is over, how many cores went to neither the pod, the producer nor us: neighbours, and the kernel's
    own writing to the disk. A figure taken on a busy machine should show it."""

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


def machine(directory: Path) -> str:
    model = next((r.split(":", 1)[1].strip() for r in Path("/proc/cpuinfo").open() if r.startswith("model name")), "?")
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}
    mount = next(str(p) for p in (directory.resolve(), *directory.resolve().parents) if str(p) in mounts)
    memory = psutil.virtual_memory()
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}, {mounts[mount]},"
        f" {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free, load {os.getloadavg()[0]:.2f}"
    )


# --- the parts ---------------------------------------------------------------------------------------------------


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


def latency(directory: Path, scale: Scale) -> Iterator[Figure]:
    """From just before the send until a reader, woken by inotify, has the bytes of the queue file in hand."""
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        for rate in (1_000, 50_000):
            say(f"latency at {rate:,} msg/s: {scale.latency_s:.0f} s")
            micros = one_latency(running, rate, scale.latency_s)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
                value = micros[int(share * len(micros))] / 1000
                yield Figure("latency", f"{rate:,} msg/s of 100 B, {name}", value, "ms")


def one_latency(running: Pod, rate: int, seconds: float) -> list[float]:
    """Sorted latencies in microseconds. The reader only collects; it takes apart what it read afterwards."""
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


def startup(directory: Path, scale: Scale) -> Iterator[Figure]:
    """`kmq up` until all stages are ready, on a used directory: after a clean stop, and after SIGKILL of everything."""
    with pod_in(used_directory(directory, f"records-{scale.records}"), up=False) as running:
        fill(running, scale.records, "count", ",".join(f"topic{n}.k" for n in range(10)), 500_000, 36)
        unsaved = min(1_000_000, scale.records)
        yield from start_figures(running, "10 topics", "< 1", lambda: running.load("count", "topic1.k", unsaved, 36))
    with pod_in(used_directory(directory, f"topics-{scale.topics}"), up=False) as running:
        fill(running, scale.topics, "topics", scale.topics)
        yield from start_figures(
            running, f"{scale.topics:,} topics", "< 5", lambda: running.load("topics", scale.topics)
        )


def used_directory(directory: Path, name: str) -> Path:
    home = directory / name
    home.mkdir(exist_ok=True)
    return home


def fill(running: Pod, records: int, *load_arguments: object) -> None:
    """Have at least `records` in the WAL, cleanly stopped."""
    if (have := running.last_seq()) >= records:
        return
    running.up()
    while have < records:
        say(f"building a directory: {have:,} of {records:,} records")
        running.load(str(load_arguments[0]), *load_arguments[1:])
        have = running.last_seq()
    running.down()


def start_figures(running: Pod, what: str, bar: str, more: Callable[[], None]) -> Iterator[Figure]:
    name = f"{running.last_seq():,} records, {what}"
    say(f"start-up with {name}: after a clean stop")
    times = []
    for _ in range(STARTS):
        running.down()
        times.append(running.up())
    note = f"best {min(times):.2f}; the last: {stage_starts(running)}"
    yield Figure("startup", f"{name}, clean stop", statistics.median(times), "s", bar, note)
    before = running.last_seq()
    more()
    replayed = running.last_seq() - before
    running.kill()
    say(f"start-up with {name}: after kill -9")
    seconds = running.up()
    yield Figure("startup", f"{name}, kill -9", seconds, "s", bar, f"{replayed:,} new; {stage_starts(running)}")
    running.down()


def stage_starts(running: Pod) -> str:
    """When each stage was ready, in seconds since `kmq up` was called, by its own log."""
    ready: dict[str, float] = {}
    for row in (running.home / "pipes" / "kmq.log").read_text(errors="replace").splitlines():
        if match := re.match(r"ts=(\S+)Z level=info stage=(\w+) event=ready ", row):
            ready[match[2]] = datetime.fromisoformat(match[1] + "+00:00").timestamp() - running.began
    return ", ".join(f"{stage} {ready[stage]:.2f}" for stage in STAGES)


# --- what a person sees ------------------------------------------------------------------------------------------


def say(text: str) -> None:
    err.print(f"bench: {text}", markup=False)


def show(figures: list[Figure], where: str) -> None:
    out.print(where)
    changed = sorted(name for name in os.environ if name.startswith(("KMQ_", "RB_")) and name not in PRIVATE)
    if changed:
        out.print("settings changed: " + ", ".join(f"{name}={os.environ[name]}" for name in changed), markup=False)
    part = ""
    for figure in figures:
        digits = 0 if figure.value >= 1000 else 1 if figure.value >= 100 else 3
        verdict = {None: "", True: "[green]met[/]", False: "[red]not met[/]"}[figure.met]
        sign, _, limit = figure.bar.partition(" ")
        bar = f"{sign} {float(limit):,.{0 if float(limit).is_integer() else 1}f}" if limit else ""
        head = figure.part if figure.part != part else ""
        value = f"{figure.value:,.{digits}f}"
        out.print(f"{head:13} {figure.what:42} {value:>12} {figure.unit:11} {bar:>11} {verdict}".rstrip())
        if figure.note:
            out.print(f"{'':13}   [dim]{figure.note}[/]")
        part = figure.part
    barred = [figure for figure in figures if figure.bar]
    out.print(f"bars met: {sum(bool(figure.met) for figure in barred)} of {len(barred)}")
    if any(figure.part == "latency" for figure in figures):
        out.print(
            "latency: from time.time() before the send (in producer_ts) to time.time() after the read; the wake-up by"
            " inotify is in it (some 20 to 60 µs); at 50,000 msg/s 50 messages go with one send each millisecond"
        )


def main() -> int:
    if sys.argv[1:2] == ["_send"]:
        sender(sys.argv[2], sys.argv[3], sys.argv[4:])
        return EXIT_OK
    if sys.argv[1:2] == ["_produce"]:
        produce(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
        return EXIT_OK
    parser = argparse.ArgumentParser(
        description="Measure the broker: speed, latency, idle CPU, memory, start-up.",
        epilog="examples: scripts/bench.py --quick; scripts/bench.py burst idle --json /tmp/kmq-bench.json",
    )
    parser.add_argument("--cache", type=Path, help="keep the big directories of `startup` there for the next time")
    return run(parser, PARTS, "a few seconds for each part; no judgement", prepare)


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    scale = Scale(options.quick)
    yield lambda part: run_part(part, options.dir, options.cache, scale)


def run(
    parser: argparse.ArgumentParser,
    parts: Sequence[str],
    quick: str,
    prepare: Callable[[argparse.Namespace], AbstractContextManager[Measure]],
) -> int:
    """What every benchmark does around its measuring: options, the parts in turn, a table of what there is, also JSON."""
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of: {' '.join(parts)} (default: all)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="one part; may come again")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench", help="where the files lie (default: ./bench)")
    options = parser.parse_args()
    options.parts += options.only
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {' '.join(parts)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILED))  # so that what was started is stopped and removed
    options.dir.mkdir(parents=True, exist_ok=True)
    where = machine(options.dir)
    err.print(where)
    figures: list[Figure] = []
    code = EXIT_OK
    try:
        with prepare(options) as measure:
            for part in options.parts or parts:
                figures.extend(measure(part))
    except KmqError as error:
        print(f"bench: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        code = 130
    finally:
        show(figures, where)
    if options.json:
        rows = [vars(figure) | {"met": figure.met} for figure in figures]
        options.json.write_text(
            json.dumps({"machine": where, "quick": options.quick, "figures": rows}, indent=1) + "\n"
        )
    return code


def run_part(part: str, directory: Path, cache: Path | None, scale: Scale) -> Iterator[Figure]:
    measure: Callable[[Path, Scale], Iterator[Figure]] = globals()[part.replace("-", "_")]
    if part == "startup" and cache:
        cache.mkdir(parents=True, exist_ok=True)
        yield from measure(cache, scale)
        return
    temporary = Path(tempfile.mkdtemp(prefix=f"{part}-", dir=directory))
    try:
        yield from measure(temporary, scale)
    finally:
        shutil.rmtree(temporary)


if __name__ == "__main__":
    sys.exit(main())
