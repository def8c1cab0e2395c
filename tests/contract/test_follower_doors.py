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
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import ROOT, STAGES, Broker
from waiting import PATIENCE_S, until

from kmq.broker.door import addresses
from kmq.broker.stats import peek
from kmq.links.role import FOLLOWING, LEADING, STARTING, RolePage

HOST = "127.0.0.1"
LONG_S = 3600.0


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
        until((self.data / "id").exists, "a data directory")
        page = RolePage.make(self.instance, (self.data / "id").read_text().strip())
        page.show_leader(leader)
        page.enter(role, 1, 1, 0)
        page.lead_until(time.monotonic() + LONG_S, time.monotonic() + LONG_S)
        return page

    def state(self, name: str) -> str:
        page = peek(self.instance)
        return page.rows[name].state_name if page is not None else ""

    def await_state(self, name: str, state: str) -> None:
        said = self.root / f"{name}.err"
        until(lambda: self.state(name) == state, f"{name} is {state}", lambda: self.state(name) + said.read_text())

    def port(self, name: str) -> int:
        file = self.pipes / f"{name}.port"
        until(file.exists, f"a port of {name}")  # the state comes first
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
    page.enter(LEADING, 2, 2, 100)  # all that it numbers is committed
    page.lead_until(time.monotonic() + LONG_S, time.monotonic() + LONG_S)
    for name in (*STAGES, "gateway"):
        follower.await_state(name, "ready")
    assert say(follower.port("ingress"), b"t.k|1|mine\n") == b""
    until(lambda: b"|t.k|1|mine|" in b"".join(follower.lines("t")), "its own line, as it leads")
    assert json.loads(follower.get("/readyz")[1])["stages"]["ingress"]["state"] == "ready"
    page.leave()
    page.show_leader({"broker": "a"} | there)
    page.enter(FOLLOWING, 3, 3, 0)
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


class Client:
    """A connection on which the client has said something, and waits."""

    def __init__(self, port: int, text: bytes = b"") -> None:
        self.sock = socket.create_connection((HOST, port), PATIENCE_S)
        self.sock.sendall(text)

    def read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (piece := self.sock.recv(1)):
            line += piece
        return line

    def is_reset(self) -> bool:
        """Wait for the end of the connection; return True if that was a reset."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        finally:
            self.sock.close()
        return False


API_VERSIONS = bytes.fromhex("0000000f 0012 0000 00000001 0005 7465737431".replace(" ", ""))


def test_a_leader_that_cannot_prove_it_resets_its_clients_and_sends_new_ones_elsewhere(follower):
    """As after a cut, and after a stop of all its processes: nobody else has to tell ingress and gateway."""
    follower.start(*STAGES, "gateway")
    page = follower.become(LEADING, {})
    page.raise_hw(100)
    for name in (*STAGES, "gateway"):
        follower.await_state(name, "ready")
    lines = Client(follower.port("ingress"), b"!hello acks=1\n")
    assert lines.read_line().startswith(b"!ok ")
    poll = b"GET /v1/logs/t/0?offset=0&wait_ms=60000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    waiting = {
        "egress": Client(follower.port("egress")),
        "http": Client(follower.port("http"), poll),
        "grpc": Client(
            follower.port("grpc"), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
        ),
        "kafka": Client(follower.port("kafka"), API_VERSIONS),
    }
    for name in ("grpc", "kafka"):
        assert waiting[name].sock.recv(1 << 16), name
    page.lead_until(time.monotonic(), time.monotonic())
    assert lines.is_reset()
    for name, client in waiting.items():
        assert client.is_reset(), name
    page.close_doors()  # what the replica does too, if it runs
    for name in ("ingress", "gateway"):
        follower.await_state(name, "following")
    began = time.monotonic()
    assert say(follower.port("ingress"), b"!hello acks=1\n").startswith(b"!err 0 no_leader ")
    assert say(follower.port("egress"), b"CONSUME t max=1\n").startswith(b"!err no_leader ")
    assert (follower.get("/readyz")[0], say(follower.port("kafka"), API_VERSIONS).removesuffix(b"RESET")) == (503, b"")
    assert time.monotonic() - began < 5, "what waited for a leader, though none is known to be reached"
    page.lead_until(time.monotonic() + LONG_S, time.monotonic() + LONG_S)
    page.open_doors()
    for name in ("ingress", "gateway"):
        follower.await_state(name, "ready")
    assert say(follower.port("ingress"), b"!hello acks=1\nt|1|one\n").endswith(b"\n!ack 1 1\n")


def test_what_a_deposed_gateway_sends_is_not_taken_by_the_next_leader(leader, follower):
    """Its own port leads there by then. It was told 401, and its connection fenced the client that had gone on itself."""
    follower.start("ingress")
    follower.become(FOLLOWING, {"broker": "a"} | addresses(str(leader.pipes), HOST))
    follower.await_state("ingress", "following")
    own = Client(int((leader.pipes / "ingress.port").read_text()), b"!hello acks=1 producer=p\n")
    assert own.read_line().startswith(b"!ok ")
    through = follower.port("ingress")
    for hello in (b"producer=p epoch=7", b"producer=__kafka reserved=1 epoch=7 token=another"):
        assert say(through, b"!hello acks=1 " + hello + b"\n").startswith(b"!err 0 no_leader "), hello
    own.sock.sendall(b"t|1|1|one\n")
    assert own.read_line() == b"!ack 1 1\n"
    assert say(through, b"!hello acks=1 producer=p epoch=x\n").startswith(b"!err 0 bad_hello epoch= ")
    own.sock.close()


def test_a_leader_whose_epoch_was_never_committed_ends_in_order(follower):
    follower.start("framer", "durability")
    follower.become(STARTING, {})
    follower.await_state("durability", "ready")
    until(lambda: b"__kmq.epoch|" in (follower.data / "append.log").read_bytes(), "a record of the epoch")
    for name in ("framer", "durability"):
        follower.started[name].send_signal(signal.SIGTERM)
        assert follower.started[name].wait(PATIENCE_S) == 0, (follower.root / f"{name}.err").read_text()
