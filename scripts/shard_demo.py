"""A shard on this machine: three brokers and a Consul, with producers and a group, while one broker after the other
fails.

       s  leader  ISR         hw   acks/s
      12  b       abc     48,210    4,102  ████████

Faults      The leader is killed. A follower's replica is stopped for longer than KMQ_REPLICA_LAG, as if it were cut
            off. The disk of the other follower is wiped.
Drawn       A row each second: the leader, the ISR, the high watermark, and how much was acknowledged in that second.
Checked     Every acknowledged message is stored once, the group has read all of them, and the WALs of the three brokers
            have the same bytes.

Everything is on loopback and in a directory that is removed.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console

import kmq
from kmq.errors import EXIT_FAILED, EXIT_OK, ConfigError, KmqError, RetryError
from kmq.links import layout

ROOT = Path(__file__).resolve().parents[1]
NAMES = "abc"
TOPIC, GROUP = "orders", "billing"
PRODUCERS = 2
RATE = 2000  # messages of a producer in a second: faults are shown here, not speed
CALM_S = 4.0  # between two faults
CUT_S = 5.0  # longer than KMQ_REPLICA_LAG
WAIT_S = 120.0
BAR = 40
MOST_DRAWN = 2 * PRODUCERS * RATE  # a full bar; more is acknowledged when waiting messages get their replies
PORTS = ("PORT", "ACK_PORT", "HTTP_PORT", "GRPC_PORT", "EGRESS_PORT", "STATUS_PORT", "METRICS_PORT", "KAFKA_PORT")
OWN_PORTS = range(10_000, 32_768)  # from there on the kernel chooses ports for connections (ip_local_port_range)
SHM = Path("/dev/shm")

out = Console(highlight=False, soft_wrap=True)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that the kernel gives to no connection until they are used."""
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            with contextlib.suppress(OSError):  # in use
                server = socket.create_server(("127.0.0.1", random.choice(OWN_PORTS)))
                sockets.append(opened.enter_context(server))
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def consul(root: Path) -> Iterator[str]:
    """Run a Consul for development, and yield its address."""
    found = subprocess.run([ROOT / "scripts/consul-setup"], capture_output=True, text=True)
    if found.returncode:
        raise ConfigError(f"a shard needs a Consul: {found.stderr.strip()}")
    http, server, serf = free_ports(3)
    options = {"bind": "127.0.0.1", "http-port": http, "server-port": server, "serf-lan-port": serf}
    options |= {"serf-wan-port": -1, "dns-port": -1, "grpc-port": -1, "log-level": "warn"}
    command = [found.stdout.strip(), "agent", "-dev", *(f"-{name}={value}" for name, value in options.items())]
    with open(root / "consul.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"127.0.0.1:{http}"
    finally:
        process.kill()
        process.wait()


class ShardBroker:
    """One broker of the shard, with directories, ports and an instance name of its own."""

    def __init__(self, name: str, root: Path, address: str, **more: str) -> None:
        """`more`: settings without the prefix KMQ_."""
        self.name, self.data, self.pipes = name, root / name / "data", root / name / "pipes"
        self.instance = f"shard-demo-{os.getpid()}-{name}"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        settings: dict[str, Any] = {"INSTANCE": self.instance, "DATA": self.data, "PIPES": self.pipes}
        settings |= {"SHARD": "demo", "CLUSTER": "demo", "BROKER": name, "CONSUL": address, "REPLICA_PORT": 0}
        settings |= {"REPLICA_SECRET": root / "secret", "SESSION_TTL": "3s", "REPLICA_LAG": "3s"} | self.ports | more
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("KMQ_", "RB_"))}
        self._env = kept | {f"KMQ_{key}": str(value) for key, value in settings.items()}

    def kmq(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kmq", *arguments]
        return subprocess.run(command, env=self._env, capture_output=True, text=True)

    def up(self) -> None:
        done = self.kmq("up")
        if done.returncode:
            raise RetryError(f"{self.name}: {done.stderr.strip()}; its log: {self.pipes}/kmq.log")

    def kill(self) -> None:
        """Kill all processes of the broker, the supervisor first, so that nothing restarts them."""
        supervisor = psutil.Process(int(re.findall(r"\bpid=(\d+)", (self.pipes / "supervisor.owner").read_text())[0]))
        supervisor.suspend()  # else it may start a stage that is not seen
        for process in (supervisor, *supervisor.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def replica(self) -> int:
        """Return the pid of its replica."""
        return int(re.findall(r"\bpid=(\d+)", (self.pipes / "replica.owner").read_text())[0])

    def view(self) -> dict[str, Any]:
        """Return the broker's view of the shard; {} if it does not answer."""
        url = f"http://127.0.0.1:{self.ports['METRICS_PORT']}/v1/cluster"
        try:
            with urllib.request.urlopen(url, timeout=0.5) as reply:
                return dict(json.load(reply))
        except (OSError, ValueError):
            return {}

    def end(self) -> None:
        """End the broker, and remove what it leaves in shared memory for its next start."""
        self.kmq("down")
        for path in SHM.glob(f"{self.instance}.*"):
            path.unlink()
        layout.remove_left_bells(self.instance)


class Traffic(NamedTuple):
    """What was acknowledged to the producers, refused to them, and read by the group; and who is still at work."""

    acked: set[str]
    failed: list[str]
    read: Counter[str]
    is_over: threading.Event  # nothing more is sent
    has_all: threading.Event  # everything that was sent has a reply


def produce(traffic: Traffic, hosts: str, name: str) -> None:
    """Send with ids until told to end; return when every message has a reply. `hosts`: all three brokers."""

    def answered(payload: str) -> Callable[[Any], None]:
        return lambda reply: traffic.failed.append(str(reply.error)) if reply.error else traffic.acked.add(payload)

    with kmq.Producer(hosts, producer=name, timeout_s=WAIT_S, on_stall=lambda text: None) as producer:
        began, number = time.monotonic(), 0
        while not traffic.is_over.is_set():
            number += 1
            payload = f"{name}-{number}"
            producer.send(TOPIC, payload, id=number, callback=answered(payload))
            ahead = number / RATE - (time.monotonic() - began)
            if ahead > 0.01:
                traffic.is_over.wait(ahead)
            elif ahead < -1:  # after a pause do not send everything that was missed at once
                began = time.monotonic() - number / RATE
        producer.flush(WAIT_S)


def consume(traffic: Traffic, hosts: str) -> None:
    """Read with the group until it has read all acknowledged messages."""
    until = math.inf
    with kmq.Consumer(TOPIC, host=hosts, group_id=GROUP) as consumer:
        while time.monotonic() < until and not (traffic.has_all.is_set() and traffic.read.keys() >= traffic.acked):
            if traffic.has_all.is_set():
                until = min(until, time.monotonic() + WAIT_S)
            with contextlib.suppress(KmqError):  # another broker leads: uncommitted messages are delivered again
                batch = consumer.poll(timeout=0.5)
                traffic.read.update(message.value.decode() for message in batch if message.value)
                consumer.commit()


def draw(brokers: list[ShardBroker], traffic: Traffic, notes: list[str], is_over: threading.Event) -> None:
    """Print a row each second, with the notes that have come since the last one."""
    out.print(f"{'s':>4}  leader  ISR  {'hw':>9}  {'acks/s':>7}", style="bold")
    began = at = time.monotonic()
    before = len(traffic.acked)
    while not is_over.wait(1.0):
        count, now = len(traffic.acked), time.monotonic()
        rate = round((count - before) / (now - at))
        before, at = count, now
        views = [view for broker in brokers if (view := broker.view())]
        newest = max(views, key=lambda view: (view.get("version", 0), view.get("as_of", 0)), default={})
        hw = max((view.get("hw", 0) for view in views), default=0)
        bar = "█" * round(BAR * min(1.0, rate / MOST_DRAWN))
        text, notes[:] = "; ".join(notes), []
        isr = "".join(name if name in newest.get("isr", ()) else "·" for name in NAMES)
        row = f"{now - began:4.0f}  {newest.get('leader') or '-':<6}  {isr}  {hw:>9,}  {rate:>7,}  {bar:<{BAR}}"
        out.print(f"{row} {text}".rstrip())


def wait(brokers: list[ShardBroker], isr: str, *, at: str = "") -> dict[str, Any]:
    """Return a broker's view once the ISR is `isr`, and `at`, if given, does not lead."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for view in filter(None, (broker.view() for broker in brokers)):
            if sorted(view["isr"]) == sorted(isr) and view["leader"] not in (None, at) and not view["problem"]:
                return view
        time.sleep(0.1)
    raise RetryError(f"the ISR was not {isr} after {WAIT_S:.0f} s; see the logs in {brokers[0].pipes.parents[1]}")


def faults(brokers: dict[str, ShardBroker], notes: list[str]) -> None:
    """Let one broker after the other fail, and wait each time until all three are in the ISR again."""
    everybody = list(brokers.values())
    time.sleep(CALM_S)
    victim = wait(everybody, NAMES)["leader"]
    notes.append(f"kill -9 of {victim}, which leads")
    brokers[victim].kill()
    wait([broker for broker in everybody if broker.name != victim], NAMES.replace(victim, ""), at=victim)
    notes.append(f"{victim} is started again")
    brokers[victim].up()
    leader = wait(everybody, NAMES)["leader"]
    time.sleep(CALM_S)

    cut, wiped = (name for name in NAMES if name != leader)
    notes.append(f"{cut} is cut off")
    pid = brokers[cut].replica()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait([brokers[leader]], NAMES.replace(cut, ""))
        time.sleep(CUT_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    notes.append(f"{cut} is back")
    wait(everybody, NAMES)
    time.sleep(CALM_S)

    notes.append(f"the disk of {wiped} is wiped")
    brokers[wiped].end()
    shutil.rmtree(brokers[wiped].data)
    brokers[wiped].up()
    wait([brokers[leader]], NAMES)
    notes.append(f"{wiped} has all of it again")
    time.sleep(CALM_S)


def wal(broker: ShardBroker) -> bytes:
    """Return the records of a broker's WAL, whatever segments they are in."""
    segments = sorted((broker.data / "append").glob("*.log"), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
    return b"".join(path.read_bytes() for path in segments)


def compare(brokers: list[ShardBroker]) -> bool:
    """Print whether the WALs are the same bytes, once the last record is on all disks."""
    until = time.monotonic() + WAIT_S
    while len({len(wal(broker)) for broker in brokers}) > 1 and time.monotonic() < until:
        time.sleep(0.2)
    found = {broker.name: wal(broker) for broker in brokers}
    for name, text in found.items():
        count, digest = text.count(b"\n"), hashlib.sha256(text).hexdigest()[:16]
        out.print(f"cmp        {name}: {count:,} records, {len(text):,} bytes, sha256 {digest}…")
    is_same = len({*found.values()}) == 1 and bool(found[NAMES[0]])
    out.print(f"cmp        {'the same bytes on all three' if is_same else 'NOT the same bytes'}")
    return is_same


def judge(traffic: Traffic, broker: ShardBroker) -> bool:
    """Print whether every acknowledged message was stored and read."""
    pattern = re.compile(rb"\|(p\d+-\d+)$", re.M)
    stored = Counter(text.decode() for text in pattern.findall(wal(broker)))
    lost, twice = traffic.acked - stored.keys(), sum(1 for count in stored.values() if count > 1)
    kept = len(traffic.acked & stored.keys())
    out.print(f"acked      {len(traffic.acked):,}, stored {kept:,}, twice {twice}")
    again = sum(count - 1 for count in traffic.read.values())
    out.print(
        f"group      read {len(traffic.acked & traffic.read.keys()):,} of {len(traffic.acked):,}, {again:,} of them again"
    )
    for text in sorted({*traffic.failed}):
        out.print(f"refused    {text}")
    return bool(traffic.acked) and not (lost or twice or traffic.failed or traffic.acked - traffic.read.keys())


def run() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kmq-shard-") as name, contextlib.ExitStack() as stack:
        root = Path(name)
        address = stack.enter_context(consul(root))
        (root / "secret").write_text(os.urandom(24).hex())
        everybody = [ShardBroker("a", root, address), ShardBroker("b", root, address), ShardBroker("c", root, address)]
        for broker in everybody:
            (root / broker.name).mkdir()
            stack.callback(broker.end)
            broker.up()
        until = time.monotonic() + WAIT_S
        while (done := everybody[0].kmq("cluster", "init", "--brokers", ",".join(NAMES))).returncode:
            if time.monotonic() > until:
                raise RetryError(done.stderr.strip())
            time.sleep(0.2)
        out.print(f"shard      {', '.join(NAMES)} and a Consul on this machine, up in {time.monotonic() - began:.0f} s")
        wait(everybody, NAMES)
        traffic = Traffic(set(), [], Counter(), threading.Event(), threading.Event())
        lines, groups = (
            ",".join(f"127.0.0.1:{broker.ports[port]}" for broker in everybody) for port in ("PORT", "EGRESS_PORT")
        )
        notes: list[str] = []
        is_drawn = threading.Event()
        producers = [threading.Thread(target=produce, args=(traffic, lines, f"p{n}")) for n in range(1, PRODUCERS + 1)]
        group = threading.Thread(target=consume, args=(traffic, groups))
        picture = threading.Thread(target=draw, args=(everybody, traffic, notes, is_drawn), daemon=True)
        for thread in (*producers, group, picture):
            thread.start()
        try:
            faults({broker.name: broker for broker in everybody}, notes)
        finally:
            traffic.is_over.set()
            for thread in producers:
                thread.join()
            traffic.has_all.set()
            group.join()
            is_drawn.set()
            picture.join()
        good = compare(everybody)
        good &= judge(traffic, everybody[0])
    out.print(f"result     {'good' if good else 'NOT good'}, {time.monotonic() - began:.0f} s in all")
    return EXIT_OK if good else EXIT_FAILED


def main() -> int:
    try:
        return run()
    except KmqError as error:
        print(f"shard-demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
