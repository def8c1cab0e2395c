"""Ten faults, staged for real on one broker and healed again, and the surfaces on which an operator may look.

Each of FAULTS is a context manager: inside it the fault is there. What it must be called is in the table of
test_ten_faults.py. Each of SURFACES returns code → what to do ("" where a surface has the code alone).
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from brokers import Broker
from certificates import Authority
from chaos.loopfs import LoopFs, disk_of
from chaos.wall_clock import WallClock

from kmq.access import tokens

MIB = 1 << 20
SMALL = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}  # little is on the way, and kept room for
_DISK, _QUOTA, _BALLAST = 240 * MIB, 80 * MIB, 70 * MIB
_SLOW_SYNC_US = 1_200_000


class Staged:
    """A broker, up, with tokens, certificates, a quota, a clock of its own and, for root, a small disk of its own."""

    def __init__(self, broker: Broker, directory: Path, authority: Authority, cleanup: ExitStack) -> None:
        self.broker, self._authority = broker, authority
        self.disk: LoopFs | None = None
        if os.geteuid() == 0 and shutil.which("mkfs.ext4"):
            self.disk = disk_of("ext4", _DISK, directory, cleanup)
            broker.data = self.disk.path / "data"
        self.clock = WallClock(directory / "offset")
        self.tokens, self.cert, self.key = directory / "tokens", directory / "cert.pem", directory / "key.pem"
        tokens.new(str(self.tokens), "operator")
        self.put_certificate(60)
        ports = dict.fromkeys(("KMQ_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT", "KMQ_EGRESS_TLS_PORT"), 0)
        files = {"KMQ_TLS_CERT": self.cert, "KMQ_TLS_KEY": self.key, "KMQ_TOKENS": self.tokens}
        limits = {"KMQ_DATA": broker.data, "KMQ_DATA_QUOTA": _QUOTA, "KMQ_GROUP_STALLED": "1s"}
        settings = {**limits, "KMQ_TLS_HOST": "127.0.0.1", **files, **ports}
        broker.env |= {name: str(value) for name, value in (settings | SMALL).items()}
        broker.env |= dict(part.split("=", 1) for part in self.clock.under[1:])
        broker.up()
        self.produce(1)

    def put_certificate(self, until: float) -> None:
        """Put a certificate in place that expires in `until` days."""
        cert, key = self._authority.issue("server", until=until)
        shutil.copy(key, self.key)
        shutil.copy(cert, self.cert)

    def produce(self, count: int, size: int = 1, topic: str = "test", patience_s: float = 60) -> str:
        """Send messages one after the other, each when the one before is on disk; stop at a refusal and return it."""
        port = int((self.broker.pipes / "ingress.port").read_text())
        token = (self.broker.pipes / "local.token").read_text().strip()
        with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as sock, sock.makefile("rb") as replies:
            sock.sendall(f"!hello acks=1 token={token}\n".encode())
            assert replies.readline().startswith(b"!ok ")
            for number in range(count):
                sock.sendall(f"{topic}.k|{number}||{'x' * size}\n".encode())
                reply = replies.readline().decode()
                if reply.startswith("!err "):
                    return reply.split()[2]
                assert reply.startswith("!ack "), reply
        return ""

    def get(self, path: str) -> str:
        """Return the body of an HTTP request to the gateway, with the token of the pod."""
        port = (self.broker.pipes / "http.port").read_text().strip()
        token = (self.broker.pipes / "local.token").read_text().strip()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()


# --- the faults --------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(staged: Staged) -> Iterator[None]:
    """The disk of KMQ_DATA is filled by somebody else."""
    if staged.disk is None:
        pytest.skip("loop mounts need root and mkfs.ext4")
    ballast = staged.disk.fill(4 * MIB)
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def reached_quota(staged: Staged) -> Iterator[None]:
    """The data directory is filled, and messages come until they are refused."""
    ballast = staged.broker.data / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _BALLAST)

    def is_refused() -> bool:
        """Without a reply the message waits until the quota has room for it."""
        with contextlib.suppress(TimeoutError):
            staged.produce(200, size=30_000, patience_s=5)
        return "quota" in readyz(staged)

    try:
        staged.broker.wait(is_refused, "the quota")
        yield
    finally:
        ballast.unlink()


@contextmanager
def stopped_stage(staged: Staged) -> Iterator[None]:
    pid = staged.broker.pids()["router"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def crash_loop(staged: Staged) -> Iterator[None]:
    """A stage is killed again as soon as it is there again."""
    for _ in range(3):
        staged.broker.kill("router")
    yield


@contextmanager
def damaged_block(staged: Staged) -> Iterator[None]:
    """A byte of a stored message is another one, and a consumer reads it."""
    with _damaged(staged):
        done = staged.broker.kmq("consume", "test", "--from", "earliest")
        assert done.returncode != 0 and "damaged" in done.stderr, done.stderr
        yield


@contextmanager
def damage_verified(staged: Staged) -> Iterator[None]:
    """A byte of a stored message is another one, and somebody verifies the files."""
    with _damaged(staged):
        assert staged.broker.kmq("verify", "test").returncode == 1
        yield


@contextmanager
def _damaged(staged: Staged) -> Iterator[None]:
    """Change a byte of the first message of the topic test; put it back and verify everything afterwards."""
    path = next((staged.broker.data / "topics/test").glob("*/*.log")).resolve()
    before = path.read_bytes()
    at = before.index(b"\n") - 1
    _put(path, at, b"#")
    try:
        yield
    finally:
        _put(path, at, before[at : at + 1])
        done = staged.broker.kmq("verify")
        assert done.returncode == 0, done.stdout


def _put(path: Path, at: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)


@contextmanager
def expired_certificate(staged: Staged) -> Iterator[None]:
    staged.put_certificate(-0.5)
    try:
        yield
    finally:
        staged.put_certificate(60)


@contextmanager
def missing_tokens(staged: Staged) -> Iterator[None]:
    away = staged.tokens.rename(staged.tokens.with_suffix(".away"))
    try:
        yield
    finally:
        away.rename(staged.tokens)


@contextmanager
def clock_set_back(staged: Staged) -> Iterator[None]:
    """The time of day is an hour less. Afterwards an operator says that it is right again."""
    staged.clock.set(-3600)
    try:
        yield
    finally:
        staged.clock.set(0)
        broker = staged.broker

        def is_trusted() -> bool:
            assert broker.kmq("clock", "--trust").returncode == 0
            return broker.kmq("clock").returncode == 0

        broker.wait(is_trusted, "a clock that is trusted")


@contextmanager
def growing_lag(staged: Staged) -> Iterator[None]:
    """A consumer of a group has ended, and messages go on coming."""
    broker = staged.broker
    staged.produce(2, topic="orders")
    done = broker.kmq("consume", "orders", "--group", "billing", "--from", "earliest", "--count", "1")
    assert done.returncode == 0, done.stderr
    try:
        staged.produce(3, topic="orders")
        yield
    finally:
        done = broker.kmq("groups", "delete", "billing", "--yes")
        assert done.returncode == 0, done.stderr


@contextmanager
def slow_sync(staged: Staged) -> Iterator[None]:
    """Each fdatasync of durability takes longer, as on a disk that somebody else keeps busy."""
    strace = shutil.which("strace")
    if strace is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("strace is not installed")
    pid = staged.broker.pids()["durability"]
    inject = f"inject=fdatasync:delay_enter={_SLOW_SYNC_US}"
    command = [strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e", inject, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        try:
            staged.broker.wait(lambda: _tracer(pid), "a tracer")
            assert staged.produce(4) == ""
            yield
        finally:
            tracer.terminate()


def _tracer(pid: int) -> bool:
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()


Fault = Callable[[Staged], AbstractContextManager[None]]

# --- the surfaces ------------------------------------------------------------------------------------------------------


def status_text(staged: Staged) -> dict[str, str]:
    shown = staged.broker.kmq("status").stdout
    return dict(re.findall(r"^(?:not ready: )?([a-z_]+): [^;]+(?:;[^;]+)*?; (.+)$", shown, re.MULTILINE))


def status_json(staged: Staged) -> dict[str, str]:
    return _advices(json.loads(staged.broker.kmq("status", "--json").stdout))


def readyz(staged: Staged) -> dict[str, str]:
    return _advices(json.loads(staged.get("/readyz")))


def metrics(staged: Staged) -> dict[str, str]:
    shown = re.findall(r'^kmq_(?:not_ready|warning){reason="(\w+)"} 1.0$', staged.get("/metrics"), re.MULTILINE)
    return dict.fromkeys(shown, "")


def top(staged: Staged) -> dict[str, str]:
    shown = staged.broker.kmq("top", "--once", COLUMNS="1000").stdout
    return dict(re.findall(r"^([a-z_]+): .+\n  do: (.+)$", shown, re.MULTILINE))


def doctor(staged: Staged) -> dict[str, str]:
    return _advices(json.loads(staged.broker.kmq("doctor", "--json").stdout))


def _advices(document: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {finding["code"]: finding["advice"] for finding in document["findings"]}


def overview(staged: Staged) -> dict[str, str]:
    """What the console's page shows."""
    document: dict[str, dict[str, list[dict[str, str]]]] = json.loads(staged.get("/api/overview"))
    return _advices(document["status"])


Surface = Callable[[Staged], dict[str, str]]
SURFACES: dict[str, Surface] = {
    "status": status_text,
    "status --json": status_json,
    "readyz": readyz,
    "metrics": metrics,
    "top": top,
    "doctor": doctor,
    "console": overview,
}


def wait_named(staged: Staged, advices: dict[str, str], patience_s: float) -> float:
    """Until each surface has each code with its advice; return how long that took. Fails with what was missing."""
    began = time.monotonic()

    def wait(name: str, surface: Surface) -> str:
        while True:
            shown: dict[str, str] = {}
            with contextlib.suppress(OSError, json.JSONDecodeError):
                shown = surface(staged)
            if all(code in shown and (not shown[code] or text in shown[code]) for code, text in advices.items()):
                return ""
            if time.monotonic() > began + patience_s:
                return f"{name} shows {shown}, not {advices}"

    wait("readyz", readyz)  # the cheapest: commands that ask again and again would slow down what they wait for
    with ThreadPoolExecutor(len(SURFACES)) as pool:
        missing = [text for text in pool.map(wait, SURFACES.keys(), SURFACES.values()) if text]
    assert not missing, "\n".join([*missing, staged.broker.log()[-2000:]])
    return time.monotonic() - began
