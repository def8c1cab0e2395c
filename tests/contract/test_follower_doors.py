"""Ingress and gateway of a follower: their ports are those of the leader, until their own broker leads, or ends.

The leader is a broker without a shard, and the test is the replica of the follower: it writes the role page.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kmq.broker.door import addresses
from kmq.broker.stats import peek
from kmq.links.role import FOLLOWING, LEADING, STARTING, RolePage
from tests.brokers import PATIENCE_S, ROOT, STAGES, Broker

HOST = "127.0.0.1"


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Follower(Broker):
    """A broker of a shard whose processes the test starts one by one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        secret = root / "secret"
        secret.write_text("0123456789" * 5)
        self.env |= {
            "KMQ_SHARD": "s",
            "KMQ_CLUSTER": "c",
            "KMQ_BROKER": "b",
            "KMQ_CONSUL": f"{HOST}:1",
            "KMQ_REPLICA_SECRET": str(secret),
            "KMQ_METRICS_HOST": HOST,
            "KMQ_METRICS_PORT": "0",
        }
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            module = "kmq.gateway" if name == "gateway" else f"stages.{name}"
            with open(self.root / f"{name}.err", "wb") as errors:
                self.started[name] = subprocess.Popen(
                    [sys.executable, "-m", module], cwd=ROOT, env=self.env, stderr=errors
                )

    def become(self, role: int, leader: dict[str, str]) -> RolePage:
        """Do as the process `replica` does."""
        until(lambda: (self.data / "id").exists(), "no data directory")
        page = RolePage.make(self.instance, (self.data / "id").read_text().strip())
        page.show_leader(leader)
        page.take(role, 1, 1, 0)
        return page

    def state(self, name: str) -> str:
        page = peek(self.instance)
        return page.rows[name].state_name if page is not None else ""

    def await_state(self, name: str, state: str) -> None:
        until(
            lambda: self.state(name) == state,
            f"{name} is {self.state(name)}, not {state}: {(self.root / f'{name}.err').read_text()[-2000:]}",
        )

    def port(self, name: str) -> int:
        file = self.pipes / f"{name}.port"
        until(file.exists, f"no port of {name}")  # the state comes first
        return int(file.read_text())

    def close(self) -> None:
        for process in self.started.values():
            process.send_signal(signal.SIGTERM)
        for process in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.instance}.role")
        super().close()


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "leader")
    try:
        broker.up()
        yield broker
    finally:
        broker.close()


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    broker = Follower(tmp_path / "follower")
    try:
        yield broker
    finally:
        broker.close()


def say(port: int, text: bytes) -> bytes:
    """Send, end, and return all that came until the end; `…RESET` after a reset."""
    with socket.create_connection((HOST, port), PATIENCE_S) as sock:
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                answer += piece
            return answer
        return answer + b"RESET"


def test_a_follower_passes_lines_consumers_and_http_to_the_leader(leader, follower):
    follower.start("ingress", "gateway")
    follower.become(FOLLOWING, {"broker": "a"} | addresses(str(leader.pipes), HOST))
    follower.await_state("ingress", "following")
    follower.await_state("gateway", "following")
    assert say(follower.port("ingress"), b"!hello acks=1\nt.k|1|one\n").endswith(b"\n!ack 1 1\n")
    assert say(follower.port("ack"), b"GET_ACK 1\n") == b"ACK\n"
    leader.wait_routed(1)
    assert b"|t.k|1|one|\n" in say(follower.port("egress"), b"CONSUME t max=1\n")
    status, body = follower.get("/readyz")
    assert (status, json.loads(body)["stages"]["ingress"]["state"]) == (200, "ready")  # the leader's answer
    status, body = follower.get("/healthz", "metrics")
    assert json.loads(body)["stages"]["ingress"]["state"] == "following"  # its own
    assert "kmq_ready 0" in follower.get("/metrics", "metrics")[1]


def test_without_a_leader_lines_are_refused_and_the_health_port_answers(follower):
    follower.start("ingress", "gateway")
    follower.become(FOLLOWING, {})
    follower.await_state("gateway", "following")
    began = time.monotonic()
    assert say(follower.port("ingress"), b"t.k|1|one\n").startswith(b"!err 0 no_leader ")
    assert time.monotonic() - began >= 5
    assert follower.get("/readyz")[0] == 503
    assert follower.get("/healthz", "metrics")[0] in (200, 503)


def test_a_role_changes_in_place_and_each_port_is_served_by_who_leads(leader, follower):
    follower.start(*STAGES, "gateway")
    there = addresses(str(leader.pipes), HOST)
    page = follower.become(FOLLOWING, {"broker": "a"} | there)
    follower.await_state("ingress", "following")
    follower.await_state("gateway", "following")
    page.leave()
    page.show_leader({})
    page.take(LEADING, 2, 2, 100)  # all that it numbers is committed
    for name in (*STAGES, "gateway"):
        follower.await_state(name, "ready")
    assert say(follower.port("ingress"), b"t.k|1|mine\n") == b""
    until(lambda: b"|t.k|1|mine|" in b"".join(follower.lines("t")), "it does not lead")
    assert json.loads(follower.get("/readyz")[1])["stages"]["ingress"]["state"] == "ready"
    page.leave()
    page.show_leader({"broker": "a"} | there)
    page.take(FOLLOWING, 3, 3, 0)
    follower.await_state("ingress", "following")
    follower.await_state("gateway", "following")
    assert say(follower.port("ingress"), b"!hello acks=1\nt.k|1|theirs\n").endswith(b"!ack 1 1\n")
    rows = peek(follower.instance).rows
    for name in ("ingress", "gateway"):
        assert (rows[name].starts, rows[name].pid) == (1, follower.started[name].pid)
    for name in ("ingress", "gateway"):
        follower.started[name].send_signal(signal.SIGTERM)
        assert follower.started[name].wait(20) == 0
        assert follower.state(name) == "stopped"


def test_a_leader_whose_epoch_was_never_committed_ends_in_order(follower):
    follower.start("framer", "durability")
    follower.become(STARTING, {})
    follower.await_state("durability", "ready")
    until(lambda: b"__kmq.epoch|" in (follower.data / "append.log").read_bytes(), "no record of the epoch")
    for name in ("framer", "durability"):
        follower.started[name].send_signal(signal.SIGTERM)
        assert follower.started[name].wait(PATIENCE_S) == 0, (follower.root / f"{name}.err").read_text()
