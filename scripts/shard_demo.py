"""A shard on this machine: three brokers and a Consul, with producers and a group, while one broker after the other is lost.

Faults      The leader is killed. A follower's replica is stopped for longer than KMQ_REPLICA_LAG, as if it were cut off. The
            disk of the other follower is wiped.
Drawn       A row each second: who leads, the ISR, the high watermark, and what was acknowledged in that second.
Checked     Every acknowledged message is stored once, the group has read all of them, and the WALs of the three brokers are
            the same bytes.

Everything is on loopback and in a directory that is removed.
"""

import contextlib
import hashlib
import json
import os
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
from typing import Any

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
MOST_DRAWN = 2 * PRODUCERS * RATE  # a full bar; more comes when what has waited is answered
PORTS = ("PORT", "ACK_PORT", "HTTP_PORT", "GRPC_PORT", "EGRESS_PORT", "STATUS_PORT", "METRICS_PORT")
SHM = Path("/dev/shm")

out = Console(highlight=False, soft_wrap=True)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextlib.contextmanager
def consul(root: Path) -> Iterator[str]:
    """A Consul for development; its address."""
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


class Broker:
    """One broker of the shard, with directories, ports and an instance name of its own."""

    def __init__(self, name: str, root: Path, address: str) -> None:
        self.name, self.data, self.pipes = name, root / name / "data", root / name / "pipes"
        self._instance = f"shard-demo-{os.getpid()}-{name}"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        settings: dict[str, Any] = {"INSTANCE": self._instance, "DATA": self.data, "PIPES": self.pipes}
        settings |= {"SHARD": "demo", "CLUSTER": "demo", "BROKER": name, "CONSUL": address, "REPLICA_PORT": 0}
        settings |= {"REPLICA_SECRET": root / "secret", "SESSION_TTL": "3s", "REPLICA_LAG": "3s"} | self.ports
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
        """Kill all of its processes, the supervisor first: nothing starts them again."""
        paths = sorted(self.pipes.glob("*.owner"), key=lambda path: path.name != "supervisor.owner")
        pids = [int(pid) for path in paths for pid in re.findall(r"\bpid=(\d+)", path.read_text())]
        for pid in dict.fromkeys(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def replica(self) -> int:
        """Return the pid of its replica."""
        return int(re.findall(r"\bpid=(\d+)", (self.pipes / "replica.owner").read_text())[0])

    def view(self) -> dict[str, Any]:
        """Return what it knows of the shard; {} if it does not answer."""
        url = f"http://127.0.0.1:{self.ports['METRICS_PORT']}/v1/cluster"
        try:
            with urllib.request.urlopen(url, timeout=0.5) as reply:
                return dict(json.load(reply))
        except (OSError, ValueError):
            return {}

    def end(self) -> None:
        """End it, and remove what a broker leaves in memory for its next start."""
        self.kmq("down")
        for path in SHM.glob(f"{self._instance}.*"):
            path.unlink()
        layout.remove_left_bells(self._instance)


class Load:
    """Producers with ids, and a consumer of a group. They know all three brokers, and use whichever serves."""

    def __init__(self, brokers: list[Broker]) -> None:
        self._hosts = {
            port: ",".join(f"127.0.0.1:{broker.ports[port]}" for broker in brokers) for port in ("PORT", "EGRESS_PORT")
        }
        self.acked: set[str] = set()
        self.read: Counter[str] = Counter()
        self.failed: list[str] = []
        self._is_over, self._has_all = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._produce, args=(f"p{n}",)) for n in range(1, PRODUCERS + 1)]
        self._consumer = threading.Thread(target=self._consume)
        for thread in (*self._threads, self._consumer):
            thread.start()

    def _produce(self, name: str) -> None:
        def answered(payload: str) -> Callable[[Any], None]:
            return lambda reply: self.failed.append(str(reply.error)) if reply.error else self.acked.add(payload)

        with kmq.Producer(self._hosts["PORT"], producer=name, timeout_s=WAIT_S, on_stall=lambda text: None) as producer:
            began, number = time.monotonic(), 0
            while not self._is_over.is_set():
                number += 1
                payload = f"{name}-{number}"
                producer.send(TOPIC, payload, id=number, callback=answered(payload))
                ahead = number / RATE - (time.monotonic() - began)
                if ahead > 0.01:
                    self._is_over.wait(ahead)
                elif ahead < -1:  # after a pause: not all that was missed at once
                    began = time.monotonic() - number / RATE
            producer.flush(WAIT_S)

    def _consume(self) -> None:
        with kmq.Consumer(TOPIC, host=self._hosts["EGRESS_PORT"], group_id=GROUP) as consumer:
            until = None
            while not (self._has_all.is_set() and self.read.keys() >= self.acked):
                if self._has_all.is_set():
                    until = until or time.monotonic() + WAIT_S
                    if time.monotonic() > until:
                        return
                with contextlib.suppress(KmqError):  # another broker leads: what was not committed comes again
                    batch = consumer.poll(timeout=0.5)
                    self.read.update(message.value.decode() for message in batch if message.value)
                    consumer.commit()

    def finish(self) -> None:
        """Return when every message is answered, and the group has read all of them."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._has_all.set()
        self._consumer.join()


class Picture(threading.Thread):
    """A row each second, until closed."""

    def __init__(self, brokers: list[Broker], load: Load) -> None:
        super().__init__(daemon=True)
        self._brokers, self._load = brokers, load
        self._notes: list[str] = []
        self._is_over = threading.Event()
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        self._notes.append(text)

    def run(self) -> None:
        out.print(f"{'s':>4}  leader  ISR  {'hw':>9}  {'acks/s':>7}", style="bold")
        before, at = len(self._load.acked), time.monotonic()
        while not self._is_over.wait(1.0):
            count, now = len(self._load.acked), time.monotonic()
            rate = round((count - before) / (now - at))
            before, at = count, now
            views = [view for broker in self._brokers if (view := broker.view())]
            newest = max(views, key=lambda view: (view.get("version", 0), view.get("as_of", 0)), default={})
            hw = max((view.get("hw", 0) for view in views), default=0)
            bar = "█" * round(BAR * min(1.0, rate / MOST_DRAWN))
            notes, self._notes = "; ".join(self._notes), []
            isr = "".join(name if name in newest.get("isr", ()) else "·" for name in NAMES)
            row = (
                f"{now - self._began:4.0f}  {newest.get('leader') or '-':<6}  {isr}  {hw:>9,}  {rate:>7,}  {bar:<{BAR}}"
            )
            out.print(f"{row} {notes}".rstrip())

    def close(self) -> None:
        self._is_over.set()
        self.join()


def wait(brokers: list[Broker], isr: str, *, at: str = "") -> dict[str, Any]:
    """Return what a broker says once the ISR is this, and `at`, if given, does not lead."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for view in filter(None, (broker.view() for broker in brokers)):
            if sorted(view["isr"]) == sorted(isr) and view["leader"] not in (None, at) and not view["problem"]:
                return view
        time.sleep(0.1)
    raise RetryError(f"the ISR was not {isr} after {WAIT_S:.0f} s; see the logs in {brokers[0].pipes.parents[1]}")


def faults(brokers: dict[str, Broker], picture: Picture) -> None:
    """Lose one broker after the other, and wait each time until all three are in the ISR again."""
    everybody = list(brokers.values())
    time.sleep(CALM_S)
    victim = wait(everybody, NAMES)["leader"]
    picture.note(f"kill -9 of {victim}, which leads")
    brokers[victim].kill()
    wait([broker for broker in everybody if broker.name != victim], NAMES.replace(victim, ""), at=victim)
    picture.note(f"{victim} is started again")
    brokers[victim].up()
    leader = wait(everybody, NAMES)["leader"]
    time.sleep(CALM_S)

    cut, wiped = (name for name in NAMES if name != leader)
    picture.note(f"{cut} is cut off")
    pid = brokers[cut].replica()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait([brokers[leader]], NAMES.replace(cut, ""))
        time.sleep(CUT_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    picture.note(f"{cut} is back")
    wait(everybody, NAMES)
    time.sleep(CALM_S)

    picture.note(f"the disk of {wiped} is wiped")
    brokers[wiped].end()
    shutil.rmtree(brokers[wiped].data)
    brokers[wiped].up()
    wait([brokers[leader]], NAMES)
    picture.note(f"{wiped} has all of it again")
    time.sleep(CALM_S)


def wal(broker: Broker) -> bytes:
    """Return the records of its WAL, whatever segments they are in."""
    segments = sorted((broker.data / "append").glob("*.log"), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
    return b"".join(path.read_bytes() for path in segments)


def compare(brokers: list[Broker]) -> bool:
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


def judge(load: Load, broker: Broker) -> bool:
    """Print what came of what was acknowledged."""
    pattern = re.compile(rb"\|(p\d+-\d+)$", re.M)
    stored = Counter(text.decode() for text in pattern.findall(wal(broker)))
    lost, twice = load.acked - stored.keys(), sum(1 for count in stored.values() if count > 1)
    kept = len(load.acked & stored.keys())
    out.print(f"acked      {len(load.acked):,}, stored {kept:,}, twice {twice}")
    again = sum(count - 1 for count in load.read.values())
    out.print(f"group      read {len(load.acked & load.read.keys()):,} of {len(load.acked):,}, {again:,} of them again")
    for text in sorted({*load.failed}):
        out.print(f"refused    {text}")
    return bool(load.acked) and not (lost or twice or load.failed or load.acked - load.read.keys())


def run() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kmq-shard-") as name, contextlib.ExitStack() as stack:
        root = Path(name)
        address = stack.enter_context(consul(root))
        (root / "secret").write_text(os.urandom(24).hex())
        brokers = {name: Broker(name, root, address) for name in NAMES}
        everybody = list(brokers.values())
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
        load = Load(everybody)
        picture = Picture(everybody, load)
        picture.start()
        try:
            faults(brokers, picture)
        finally:
            load.finish()
            picture.close()
        good = compare(everybody)
        good &= judge(load, everybody[0])
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
