"""The parts of the benchmark of the Broadcast Queue."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gauges import cpu_seconds
from bench.pod import wait_until
from bench.report import Figure, say
from bench_bq.servers import Servers
from kmq.cluster.consul import ConsulAddress, Steps
from kmq.cluster.publisher import KEPT, Message, Publisher
from kmq.cluster.queue import BroadcastQueue, Place

PAYLOAD = b"x" * 100
POLL_S = 0.02
TTL_S = 10.0  # a machine busy with a hundred nodes beats late
PROCESSES = 4  # for many nodes


class Nodes:
    """Processes of nodes, and what they have printed."""

    def __init__(self, stack: ExitStack, home: Path) -> None:
        self._stack, self._home = stack, home
        self._files: list[Path] = []
        self.pids: list[int] = []

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        file = self._home / f"node-{len(self._files)}-{time.monotonic_ns()}"
        with open(file, "wb") as out:
            process = subprocess.Popen(command, stdout=out, env=os.environ | environment, cwd=self._home)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._files.append(file)
        self.pids.append(process.pid)

    def seen(self) -> dict[tuple[str, int], float]:
        """Return when each broker received each epoch, in Unix time."""
        found: dict[tuple[str, int], float] = {}
        for file in self._files:
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    broker, epoch, ts = line.split()
                    found.setdefault((broker, int(epoch)), float(ts))
        return found

    def wait(self, brokers: int, epoch: int) -> None:
        """Wait until this many brokers have this epoch."""
        wait_until(lambda: sum(seen == epoch for _, seen in self.seen()) >= brokers, POLL_S)


class Bench:
    """The servers, and the size of every measurement."""

    def __init__(self, servers: Servers, home: Path, quick: bool) -> None:
        self.servers, self.home = servers, home
        self.messages = 200 if quick else 2_000
        self.latencies = 100 if quick else 1_000
        self.waiting = 500 if quick else 2_000
        self.nodes = 20 if quick else 100
        self.watched = 20 if quick else 100
        self.idle_s = 5.0 if quick else 30.0
        self._clusters = 0

    def place(self, broker: str = "bench") -> Place:
        """Return a place in a cluster of its own."""
        self._clusters += 1
        return Place(ConsulAddress.of(self.servers.addresses), f"bench-{self._clusters}", broker, TTL_S)

    @contextmanager
    def running(self, place: Place, role: str, brokers: int, processes: int) -> Iterator[Nodes]:
        """Run nodes of this role, named n0, n1, …, until they have seen the last message."""
        environment = {
            "KMQ_CONSUL": self.servers.addresses,
            "KMQ_CLUSTER": place.cluster,
            "KMQ_SESSION_TTL": f"{place.ttl_s:.0f}s",
        }
        names = [f"n{number}" for number in range(brokers)]
        with ExitStack() as stack:
            nodes = Nodes(stack, self.home)
            for at in range(processes):
                main = str(Path(__file__).with_name("__main__.py"))
                nodes.start([sys.executable, main, role, ",".join(names[at::processes])], environment)
            with BroadcastQueue(place) as queue:
                nodes.wait(brokers, queue.status().epoch)
            yield nodes


# --- publishing and receiving -----------------------------------------------------------------------------------------


def publish(bench: Bench) -> Iterator[Figure]:
    """One publisher, one message after the other: taking the lock for each, and keeping it as a coordinator does."""
    say(f"publish: {bench.messages:,} messages")
    with BroadcastQueue(bench.place()) as queue:
        queue.publish("bench", PAYLOAD)
        times = timed(bench.messages, lambda: queue.publish("bench", PAYLOAD))
    note = f"p99 {p99(times):.1f} ms; one write of Consul"
    yield Figure("publish", "the lock taken and given back, p50", statistics.median(times), "ms", "≤ 3", note)

    def hold(publisher: Publisher) -> Steps[list[float]]:
        times = []
        for _ in range(bench.messages):
            began = time.perf_counter()
            yield from publisher.publish(Message.new("bench", PAYLOAD))
            times.append((time.perf_counter() - began) * 1000)
        return times

    with BroadcastQueue(bench.place()) as queue:
        times = queue.as_publisher(hold)
    note = f"p99 {p99(times):.1f} ms; one write of Consul"
    yield Figure("publish", "the lock held, p50", statistics.median(times), "ms", "≤ 3", note)


def timed(count: int, action: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each of `count` calls."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1000)
    return times


def delivery(bench: Bench) -> Iterator[Figure]:
    """Time from the call of publish until the last of three nodes has processed the message."""
    say(f"delivery: {bench.latencies:,} messages to 3 nodes")
    place, began = bench.place(), {}
    with bench.running(place, "_receive", 3, 3) as nodes, BroadcastQueue(place) as queue:
        for _ in range(bench.latencies):
            before = time.time()
            began[queue.publish("bench", PAYLOAD)] = before
            time.sleep(0.02)
        last = max(began)
        nodes.wait(3, last)
        seen = nodes.seen()
    missed = [1 for epoch in began for node in range(3) if (f"n{node}", epoch) not in seen]
    times = [
        1000 * (max(seen.get((f"n{node}", epoch), began[epoch]) for node in range(3)) - began[epoch]) for epoch in began
    ]
    note = f"p50 {statistics.median(times):.1f} ms, worst {max(times):.1f} ms, not received {len(missed)}"
    yield Figure("delivery", "publish to processed on 3 nodes, p99", p99(times), "ms", "≤ 20", note)


def catch_up(bench: Bench) -> Iterator[Figure]:
    """A node was away and returns: time from the call until all is processed and marked."""
    say(f"catch-up: {bench.waiting:,} messages")
    place = bench.place()
    with BroadcastQueue(place) as queue:
        next(iter(queue.receive(timeout=1)))
        for _ in queue.receive(timeout=0.1):
            pass
        for _ in range(bench.waiting):
            queue.publish("bench", PAYLOAD)
        began, cpu = time.perf_counter(), time.process_time()
        received = 0
        for item in queue.receive():
            received += isinstance(item, Message)
            if item.epoch >= bench.waiting:
                break
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    note = f"{received:,} messages in {took:.2f} s, of which {cpu:.2f} s CPU of the node; session and lock are in it"
    yield Figure("catch-up", "one node that was away", received / took, "msg/s", "≥ 2000", note)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


# --- what it costs ----------------------------------------------------------------------------------------------------


def watches(bench: Bench) -> Iterator[Figure]:
    """Consul's CPU for one message to many nodes, with KMQ and with `consul watch`."""
    rounds: dict[str, list[float]] = {"nobody": [], "kmq": [], "consul": [], "full": []}
    for _ in range(2):
        for who, costs in rounds.items():
            say(f"watches: {bench.watched} messages to {bench.nodes} nodes: {who}")
            costs.append(_cost(bench, who))
    nobody, kmq, own, full = (statistics.mean(costs) for costs in rounds.values())
    nodes = f"{bench.nodes} nodes"
    yield Figure("watches", "Consul's CPU for a message, no watch", nobody, "ms")
    yield Figure("watches", f"{nodes}, watch of KMQ", kmq, "ms")
    yield Figure("watches", f"{nodes}, consul watch", own, "ms")
    yield Figure("watches", f"{nodes}, watch of KMQ / consul watch", kmq / own, "", "≤ 1")
    yield Figure("watches", f"{nodes}, receiving with sessions and marks", full, "ms")


def _cost(bench: Bench, who: str) -> float:
    """Return the CPU milliseconds of Consul for a message, at ten messages a second; one a second with marks."""
    place = bench.place()
    messages, rate = (bench.watched // 10, 1) if who == "full" else (bench.watched, 10)
    with ExitStack() as stack:
        queue = stack.enter_context(BroadcastQueue(place))
        for _ in range(KEPT):  # each watch returns all kept messages
            queue.publish("bench", PAYLOAD)
        if who in ("kmq", "full"):
            role = "_watch" if who == "kmq" else "_receive"
            stack.enter_context(bench.running(place, role, bench.nodes, PROCESSES))
        elif who == "consul":
            nodes = Nodes(stack, bench.home)
            address = bench.servers.addresses.split(",")[0]
            for _ in range(bench.nodes):
                watch = ["watch", "-type=keyprefix", f"-prefix={queue.keys.messages}", "true"]
                nodes.start([bench.servers.program, *watch], {"CONSUL_HTTP_ADDR": address})
            time.sleep(5)  # it prints nothing that could be waited for
        cpu, began = bench.servers.cpu_s(), time.monotonic()
        for number in range(messages):
            queue.publish("bench", PAYLOAD)
            time.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
        return 1000 * (bench.servers.cpu_s() - cpu) / messages


def idle(bench: Bench) -> Iterator[Figure]:
    """An idle subscriber: its watch, and the beats of its session."""
    say(f"idle: {bench.idle_s:.0f} s")
    with bench.running(
        bench.place()._replace(ttl_s=2.0), "_receive", 1, 1
    ) as nodes:  # the default: it beats most often
        time.sleep(2)  # it has marked
        (pid,) = nodes.pids
        before = cpu_seconds(pid)
        time.sleep(bench.idle_s)
        share = 100 * (cpu_seconds(pid) - before) / bench.idle_s
    yield Figure("idle", "one subscriber without messages", share, "% of core", "< 0.5")
