"""What `kmq up`, `kmq status`, `kmq doctor` and /readyz say of a broker's replica, with a real Consul."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from brokers import FREE_PORTS
from test_shard import BROKERS, PATIENCE_S, Shard, wait_for

PORTS = FREE_PORTS | {"KMQ_METRICS_PORT": "0"}


class Brokers(Shard):
    """Whole brokers, by `kmq up`."""

    def kmq(self, name, *arguments, **more):
        (self.root / name).mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "kmq", *arguments]
        environment = self.environment(name, **PORTS | more)
        return subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=self.root / name, timeout=120)

    def status(self, name):
        return json.loads(self.kmq(name, "status", "--json").stdout)

    def reasons(self, name):
        return [reason["code"] for reason in self.status(name)["reasons"]]

    def view(self, name, port="metrics"):
        number = (self.root / name / "pipes" / f"{port}.port").read_text().strip()
        return httpx.get(f"http://127.0.0.1:{number}/v1/cluster", trust_env=False, timeout=PATIENCE_S).json()

    def readyz(self, name):
        port = (self.root / name / "pipes" / "http.port").read_text().strip()
        response = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=PATIENCE_S)
        return response.status_code, response.json()

    def kill(self, name):
        """SIGKILL all of a broker, until nothing is left: its supervisor may have started a stage just now."""
        while left := [process for process in psutil.process_iter() if self._is_of(process, name)]:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, PATIENCE_S)

    def _is_of(self, process, name):
        with contextlib.suppress(psutil.Error):
            return process.environ().get("KMQ_INSTANCE") == f"{self.cluster}-{name}"
        return False

    def close(self):
        for name in BROKERS:
            self.kmq(name, "down")
        super().close()


@pytest.fixture
def brokers(consul, tmp_path):
    made = Brokers(consul.address, tmp_path)
    yield made
    made.close()


def test_a_register_that_went_back_is_said_wherever_a_user_looks_and_its_return_too(brokers):
    started = [brokers.kmq(name, "up", *(["--no-gateway"] if name != "a" else [])) for name in BROKERS]
    assert [each.returncode for each in started] == [0, 0, 0], [each.stderr for each in started]
    assert all("kmq: shard s: waiting" in each.stdout for each in started), started[0].stdout
    brokers.init()
    brokers.await_whole()
    for name in BROKERS:
        wait_for(f"readiness of {name}", lambda name=name: brokers.status(name)["ready"])
    shown = brokers.kmq("a", "status")
    assert shown.returncode == 0 and "leading, epoch 1, ISR 3/3" in shown.stdout, shown.stdout
    wait_for("200", lambda: brokers.readyz("a")[0] == 200)

    def whole():
        page = brokers.view("a")
        return page["isr"] == ["a", "b", "c"] and page["brokers"]["a"]["role"] == "leader" and page

    found = wait_for("the whole ISR and open doors", whole)
    assert (found["shard"], found["broker"], found["role"], found["leader"]) == ("s", "a", "leader", "a")
    assert (found["epoch"], found["version"], found["problem"]) == (1, brokers.register().version.number, "")
    assert [found["brokers"][name]["role"] for name in BROKERS] == ["leader", "follower", "follower"]
    states = {each["name"]: each["state"] for each in brokers.status("b")["stages"]}
    assert states["ingress"] == states["framer"] == "following" and states["router"] == states["replica"] == "ready"

    register = brokers.register()
    brokers.client.delete("register").raise_for_status()
    for name in BROKERS:
        wait_for(f"a reason of {name}", lambda name=name: "register_went_back" in brokers.reasons(name))
    body = wait_for("503", lambda: (found := brokers.readyz("a"))[0] == 503 and found[1])
    assert "register_went_back" in body["reason"] and "bring Consul's data back" in body["advice"], body
    assert brokers.view("a", "http")["problem"] == "register_went_back"
    doctor = brokers.kmq("a", "doctor").stdout
    assert "error   broker: register_went_back" in doctor and "KMQ_REPLICA_PORT: replica of this broker" in doctor
    assert brokers.kmq("a", "down").returncode == 0
    again = brokers.kmq("a", "up")
    assert again.returncode == 0 and "kmq: register_went_back: the register of the shard s is" in again.stderr, again

    brokers.put(register.encode())
    for name in BROKERS:
        wait_for(f"readiness of {name}", lambda name=name: brokers.status(name)["ready"])


def test_no_process_begins_in_a_role_that_a_kill_has_left(brokers):
    """The others start faster than `replica`: for seconds they would take lines and serve old ends as the leader."""
    path = Path(f"/dev/shm/{brokers.cluster}-a.role")
    assert brokers.kmq("a", "up", "--no-gateway").returncode == 0
    left = path.stat().st_ino
    with path.open("rb") as kept:  # so that its number is not given to another file
        brokers.kill("a")
        assert path.stat().st_ino == left
        assert brokers.kmq("a", "up", "--no-gateway").returncode == 0
        assert path.stat().st_ino != left, kept
    assert brokers.kmq("a", "down").returncode == 0
    assert not path.exists()


def test_up_prints_why_a_replica_has_ended_and_ends_with_its_code(brokers):
    assert brokers.kmq("a", "up", "--no-gateway").returncode == 0
    assert brokers.kmq("a", "down").returncode == 0
    register = brokers.root / "a" / "data" / "register"
    register.write_text("nothing\n")
    ended = brokers.kmq("a", "up", "--no-gateway")
    assert ended.returncode == 65, ended
    assert str(register) in ended.stderr and "is no promise, or damaged" in ended.stderr
    assert "the replica could not start: this broker is no member of its shard; the stages run" in ended.stderr
    assert brokers.reasons("a") == ["stopped", "no_leader"]
    [row] = [each for each in brokers.status("a")["stages"] if each["name"] == "replica"]
    assert (row["state"], row["exit_code"]) == ("stopped", 65)


def test_a_survivor_that_is_detached_serves_its_records_alone_and_a_new_shard_begins_with_them(brokers):
    assert brokers.kmq("a", "up", "--no-gateway").returncode == 0
    brokers.init(brokers="a")
    wait_for("a leader", lambda: brokers.status("a").get("ready"))
    sent = brokers.kmq("a", "produce", "t", "-m", "kept", "--acks")
    assert sent.returncode == 0, sent.stderr
    running = brokers.kmq("a", "cluster", "detach", "--yes")
    assert running.returncode == 69 and "the broker must be down" in running.stderr
    assert brokers.kmq("a", "down").returncode == 0
    dry = brokers.kmq("a", "cluster", "detach", "--dry-run")
    assert dry.returncode == 0 and "nothing was changed" in dry.stdout and "in the ISR of version" in dry.stdout, dry
    done = brokers.kmq("a", "cluster", "detach", "--yes")
    assert done.returncode == 0 and "start it without KMQ_SHARD" in done.stdout, done.stderr

    alone = {"KMQ_SHARD": ""}
    assert brokers.kmq("a", "up", "--no-gateway", **alone).returncode == 0
    assert brokers.kmq("a", "produce", "t", "-m", "new", "--acks", **alone).returncode == 0
    assert brokers.kmq("a", "down", **alone).returncode == 0
    assert brokers.kmq("a", "verify", **alone).returncode == 0
    lines = (brokers.root / "a" / "data" / "t.log").read_text().splitlines()
    assert [line.rpartition("|")[2] for line in lines] == ["kept", "new"]

    another = {"KMQ_SHARD": "s2"}
    assert brokers.kmq("a", "up", "--no-gateway", **another).returncode == 0
    made = brokers.kmq("a", "cluster", "init", "--brokers", "a", "--from", "a", **another)
    assert made.returncode == 0 and "a leads first" in made.stdout, made.stderr


def test_a_broker_that_was_reset_is_a_new_replica_of_its_shard(brokers):
    assert brokers.kmq("b", "up", "--no-gateway").returncode == 0
    before = wait_for("an entry", lambda: brokers.files("b").identity.starts and brokers.files("b").identity.id)
    assert brokers.kmq("b", "cluster", "reset", "--yes").returncode == 69
    assert brokers.kmq("b", "down").returncode == 0
    asked = brokers.kmq("b", "cluster", "reset")
    assert asked.returncode == 78 and "give --yes to do it" in asked.stderr
    done = brokers.kmq("b", "cluster", "reset", "--yes")
    assert done.returncode == 0 and "is empty; what it had is in " in done.stdout, done.stderr
    assert brokers.kmq("b", "cluster", "reset", "--yes").returncode == 78, "there is no replica any more"
    assert brokers.kmq("b", "up", "--no-gateway").returncode == 0
    wait_for("a new replica", lambda: brokers.files("b").identity.starts and brokers.files("b").identity.id != before)


def test_a_leader_that_is_left_alone_refuses_with_not_enough_replicas_and_says_so(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", "--no-gateway").returncode == 0
    brokers.init()
    wait_for("a ready leader", lambda: brokers.status("a")["ready"])
    brokers.await_whole()
    for name in ("b", "c"):
        assert brokers.kmq(name, "down").returncode == 0
    wait_for("the warning", lambda: "not_enough_replicas" in [each["code"] for each in brokers.status("a")["warnings"]])
    shown = brokers.kmq("a", "status")
    assert shown.returncode == 0 and "not_enough_replicas" in shown.stdout, shown
    refused = brokers.kmq("a", "produce", "t.k", "-m", "x", "--timeout", "5")
    assert refused.returncode == 75 and "not_enough_replicas" in refused.stderr, refused


def test_a_client_of_a_follower_is_served_by_whoever_leads(brokers):
    started = [brokers.kmq(name, "up", *(["--no-gateway"] if name == "c" else [])) for name in BROKERS]
    assert [each.returncode for each in started] == [0, 0, 0], [each.stderr for each in started]
    brokers.init()
    brokers.await_whole()
    for name in BROKERS:
        wait_for(f"readiness of {name}", lambda name=name: brokers.status(name)["ready"])

    def is_acked(n):
        port = int((brokers.root / "b/pipes/ingress.port").read_text())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 20) as sock:
            sock.sendall(b"!hello acks=1 producer=p\nt.k|1|%d|x\n" % n)
            sock.shutdown(socket.SHUT_WR)
            return any(word in sock.makefile("rb").read() for word in (b"\n!ack 1 ", b"\n!dup 1 "))

    wait_for("an ack through b", lambda: is_acked(1))
    assert brokers.view("b", "http")["broker"] == "a" and brokers.view("b")["broker"] == "b"
    assert brokers.kmq("a", "down").returncode == 0
    wait_for("an ack of the next leader", lambda: is_acked(2))

    def next_leader():
        with contextlib.suppress(httpx.TransportError):  # where ports are free ones, each role has its own
            return brokers.view("b")["leader"] in ("b", "c")
        return False

    wait_for("the next leader", next_leader)
