"""Parts of the benchmark in which messages are read while they arrive, or with many members and groups."""

import json
import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import psutil

from bench.report import Figure, say
from bench.sending import WAIT_S
from bench_consumers.parts import COMMAND, SMALL, Bench
from kmq.client.producer import Producer

PARTITIONS = 32
MEMBERS = 1000
GROUPS = 10_000
COMMITTERS = 16  # connections that commit at the same time


class Role:
    """A process that measures something. When the object exists the process has said ready."""

    def __init__(self, *words: object) -> None:
        self._process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("bench: a reader or writer could not start")

    def result(self) -> dict[str, float]:
        output, _ = self._process.communicate(timeout=WAIT_S)
        if self._process.returncode:
            raise SystemExit("bench: a reader or writer failed")
        found: dict[str, float] = json.loads(output)
        return found


class Http:
    """A connection to the HTTP API."""

    def __init__(self, bench: Bench) -> None:
        self._connection = HTTPConnection("127.0.0.1", bench.port("http"), timeout=WAIT_S)

    def call(self, method: str, target: str, body: Any = None, kind: str = "application/json") -> bytes:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, target, data, {"Content-Type": kind, "Accept": kind})
        response = self._connection.getresponse()
        text = response.read()
        if response.status >= 300:
            raise SystemExit(f"bench: {method} {target}: {response.status} {text[:200]!r}")
        return text

    def declare(self, topic: str, partitions: int) -> None:
        self.call("POST", "/api/admin/topics", {"name": topic, "partitions": partitions})


# --- produced and consumed at the same time --------------------------------------------------------------------------


def together(bench: Bench) -> Iterator[Figure]:
    """Messages of 1 KB, acknowledged, to many partitions, and a group that reads them meanwhile."""
    count = 100_000 if bench.quick else 1_000_000
    Http(bench).declare("together", PARTITIONS)
    reader = Role("_follow", bench.port("egress"), "together", count)
    writer = Role("_fill", bench.running.port, "together", count, 1024)
    sent, taken = writer.result(), reader.result()
    what = f"of 1 KB, {PARTITIONS} partitions"
    yield Figure("together", f"produced {what}", count / sent["seconds"], "msg/s", "≥ 100000")
    seconds = taken["end"] - sent["begin"]
    yield Figure("together", "consumed by a group, from the first send", count / seconds, "msg/s", "≥ 100000")


def paced(bench: Bench) -> Iterator[Figure]:
    """Time from the producer's clock to the arrival at the application, at 10,000 messages a second."""
    seconds = 2 if bench.quick else 10
    with Producer(port=bench.running.port) as producer:
        producer.send("paced", b"x").result()
    bench.running.settle()
    reader = Role("_wait", bench.port("egress"), "paced", seconds * 10_000)
    writer = Role("_pace", bench.running.port, "paced", 10_000, seconds)
    shares, sent = reader.result(), writer.result()
    yield Figure("paced", "sent", sent["rate"], "msg/s", "≥ 9900")
    yield Figure("paced", "send to delivered, p50", shares["p50"], "ms")
    yield Figure("paced", "send to delivered, p99", shares["p99"], "ms", "≤ 20", f"longest {shares['max']:.1f} ms")


# --- HTTP ------------------------------------------------------------------------------------------------------------


def http(bench: Bench) -> Iterator[Figure]:
    """Batches of one message of 100 bytes a line, one request at a time."""
    batch, batches = 5000, 4 if bench.quick else 40
    api, kind = Http(bench), "application/x-ndjson"
    body = b'{"value":"%b"}\n' % (b"x" * SMALL[1]) * batch
    api.call("POST", "/api/topics/by-http/produce?format=text", body, kind)
    begin = time.monotonic()
    for _ in range(batches):
        api.call("POST", "/api/topics/by-http/produce?format=text", body, kind)
    yield Figure("http", "produce, NDJSON, 100 B", batch * batches / (time.monotonic() - begin), "msg/s", "≥ 50000")
    count = min(bench.filled(*SMALL), batch * batches)
    begin, offset = time.monotonic(), 0
    where = f"/api/topics/{SMALL[0]}/consume?format=text&maxMessages={batch}&maxBytes=8000000"
    while offset < count:
        offset += api.call("GET", f"{where}&offset={offset}", kind=kind).count(b"\n")
    yield Figure("http", "consume, NDJSON, 100 B", offset / (time.monotonic() - begin), "msg/s", "≥ 50000")


def wakeup(bench: Bench) -> Iterator[Figure]:
    """Time from the ack in the producer to the response of a long poll, one message at a time."""
    api, count = Http(bench), 100 if bench.quick else 1000
    acked: queue.SimpleQueue[float] = queue.SimpleQueue()
    with Producer(port=bench.running.port) as producer:
        producer.send("woken", b"x").result()
        bench.running.settle()

        def send(delay_s: float) -> None:
            time.sleep(delay_s)  # so that the poll waits
            producer.send("woken", b"x").result()
            acked.put(time.monotonic())

        taken = []
        for offset in range(1, count + 1):
            sender = threading.Thread(target=send, args=(0.005,))
            sender.start()
            api.call("GET", f"/api/topics/woken/consume?offset={offset}&timeoutMs=30000")
            answered = time.monotonic()
            taken.append(max(0.0, answered - acked.get()) * 1000)
            sender.join()
    taken.sort()
    yield Figure("wakeup", "long poll, ack to answer, p50", taken[len(taken) // 2], "ms")
    yield Figure("wakeup", "long poll, ack to answer, p99", taken[len(taken) * 99 // 100], "ms", "≤ 5")


# --- many ------------------------------------------------------------------------------------------------------------


def members(bench: Bench) -> Iterator[Figure]:
    """The cost of members that wait for records while no records arrive."""
    count, seconds = (200, 5) if bench.quick else (MEMBERS, 20)
    Http(bench).declare("idle", PARTITIONS)
    idle = Role("_idle", bench.port("egress"), "idle", count, seconds + 5)
    gateway = psutil.Process(bench.running.page().rows["gateway"].pid)
    time.sleep(3)  # the last rebalances are over
    before, begin = sum(gateway.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    used = (sum(gateway.cpu_times()[:2]) - before) / (time.monotonic() - begin)
    idle.result()
    yield Figure("members", f"gateway with {count:,} idle members", used * 100, "% of a core", "< 2")


def groups(bench: Bench) -> Iterator[Figure]:
    """How long the offsets of many groups take to load after everything was killed."""
    count = 1000 if bench.quick else GROUPS
    api = Http(bench)
    api.call("POST", "/api/topics/grouped/produce?format=text", {"value": "x"})
    say(f"committing for {count:,} groups")
    left = iter(range(count))
    lock = threading.Lock()

    def commit() -> None:
        mine = Http(bench)
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            rows = [{"partition": 0, "offset": 1}]
            mine.call("POST", "/api/topics/grouped/commit", {"group": f"group-{number}", "offsets": rows})

    threads = [threading.Thread(target=commit) for _ in range(COMMITTERS)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield Figure(
        "groups", f"commits over HTTP, {COMMITTERS} at a time", count / (time.monotonic() - begin), "commits/s"
    )
    bench.running.kill()
    bench.running.up()
    loaded = _loaded(bench, count)
    yield Figure("groups", f"offsets of {count:,} groups loaded after kill -9", loaded, "s", "< 1")


def _loaded(bench: Bench, least: int) -> float:
    """Return the gateway's time for its last load of offsets."""
    deadline = time.monotonic() + WAIT_S
    log = bench.running.home / "pipes" / "kmq.log"
    while time.monotonic() < deadline:
        found = re.findall(r"event=offsets_loaded groups=(\d+) records=\d+ seconds=(\S+)", log.read_text())
        if len(found) > 1 and int(found[-1][0]) >= least:
            return float(found[-1][1])
        time.sleep(0.05)
    raise SystemExit("bench: the gateway did not load its offsets in time")
