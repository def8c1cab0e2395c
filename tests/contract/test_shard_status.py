"""What `kmq up`, `kmq status`, `kmq doctor` and /readyz say of a broker's replica, with a real Consul."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from brokers import FREE_PORTS
from confluent_kafka import Producer
from test_shard import BROKERS, Shard
from waiting import PATIENCE_S, until

import kmq

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
        until(lambda name=name: brokers.status(name)["ready"], f"readiness of {name}")
    shown = brokers.kmq("a", "status")
    assert shown.returncode == 0 and "leading, epoch 1, ISR 3/3" in shown.stdout, shown.stdout
    until(lambda: brokers.readyz("a")[0] == 200, "200")

    def whole():
        page = brokers.view("a")
        return page["isr"] == ["a", "b", "c"] and page["brokers"]["a"]["role"] == "leader" and page

    found = until(whole, "the whole ISR and open doors")
    assert (found["shard"], found["broker"], found["role"], found["leader"]) == ("s", "a", "leader", "a")
    assert (found["epoch"], found["version"], found["problem"]) == (1, brokers.register().version.number, "")
    assert [found["brokers"][name]["role"] for name in BROKERS] == ["leader", "follower", "follower"]
    states = {each["name"]: each["state"] for each in brokers.status("b")["stages"]}
    assert states["ingress"] == states["framer"] == "following" and states["router"] == states["replica"] == "ready"

    register = brokers.register()
    brokers.client.delete("register").raise_for_status()
    for name in BROKERS:
        until(lambda name=name: "register_went_back" in brokers.reasons(name), f"a reason of {name}")
    body = until(lambda: (found := brokers.readyz("a"))[0] == 503 and found[1], "503")
    assert "register_went_back" in body["reason"] and "bring Consul's data back" in body["advice"], body
    assert brokers.view("a", "http")["problem"] == "register_went_back"
    doctor = brokers.kmq("a", "doctor").stdout
    assert "error   broker: register_went_back" in doctor and "KMQ_REPLICA_PORT: replica of this broker" in doctor
    assert brokers.kmq("a", "down").returncode == 0
    again = brokers.kmq("a", "up")
    assert again.returncode == 0 and "kmq: register_went_back: the register of the shard s is" in again.stderr, again

    brokers.put(register.encode())
    for name in BROKERS:
        until(lambda name=name: brokers.status(name)["ready"], f"readiness of {name}")


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
    until(lambda: brokers.status("a").get("ready"), "a leader")
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
    before = until(lambda: brokers.files("b").identity.starts and brokers.files("b").identity.id, "an entry")
    assert brokers.kmq("b", "cluster", "reset", "--yes").returncode == 69
    assert brokers.kmq("b", "down").returncode == 0
    asked = brokers.kmq("b", "cluster", "reset")
    assert asked.returncode == 78 and "give --yes to do it" in asked.stderr
    done = brokers.kmq("b", "cluster", "reset", "--yes")
    assert done.returncode == 0 and "is empty; what it had is in " in done.stdout, done.stderr
    assert brokers.kmq("b", "cluster", "reset", "--yes").returncode == 78, "there is no replica any more"
    assert brokers.kmq("b", "up", "--no-gateway").returncode == 0
    until(lambda: brokers.files("b").identity.starts and brokers.files("b").identity.id != before, "a new replica")


def test_a_leader_that_is_left_alone_refuses_and_as_a_follower_says_nothing_of_it(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", *(["--no-gateway"] if name != "a" else [])).returncode == 0
    brokers.init()
    brokers.await_whole()
    until(lambda: brokers.status("a")["ready"], "a ready leader")
    port = brokers.status("a")["kafka"]["port"]
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}", "enable.idempotence": True, "log_level": 0})
    producer.produce("t.k", b"x")
    assert producer.flush(PATIENCE_S) == 0
    for name in ("b", "c"):
        assert brokers.kmq(name, "down").returncode == 0
    until(lambda: "not_enough_replicas" in [each["code"] for each in brokers.status("a")["warnings"]], "the warning")
    shown = brokers.kmq("a", "status")
    assert shown.returncode == 0 and "not_enough_replicas" in shown.stdout, shown
    refused = brokers.kmq("a", "produce", "t.k", "-m", "x", "--timeout", "5")
    assert refused.returncode == 75 and "not_enough_replicas" in refused.stderr, refused
    leading = brokers.status("a")
    assert leading["kafka"]["producers"] == 1

    [replica] = [each["pid"] for each in leading["stages"] if each["name"] == "replica"]
    os.kill(replica, signal.SIGSTOP)  # so that it refuses until another one leads
    for name in ("b", "c"):
        assert brokers.kmq(name, "up", "--no-gateway").returncode == 0
    until(lambda: any(brokers.status(name)["followers"] for name in ("b", "c")), "another leader")
    os.kill(replica, signal.SIGCONT)

    def follows():
        found = brokers.status("a")
        states = {each["name"]: each["state"] for each in found["stages"]}
        return {states[name] for name in ("ingress", "framer", "gateway")} == {"following"} and found["ready"] and found

    found = until(follows, "a follower in the ISR")
    assert "not_enough_replicas" not in [each["code"] for each in found["warnings"]], found["warnings"]
    rows = {each["name"]: each for each in found["stages"]}
    assert [rows["framer"][name] for name in ("seq", "messages", "bytes")] == [0, 0, 0], rows["framer"]
    assert [rows["ingress"][name] for name in ("refused", "connections", "bytes")] == [0, 0, 0], rows["ingress"]
    assert found["kafka"]["producers"] == 0
    before = {each["name"]: (each["pid"], each["restarts"], each["started"]) for each in leading["stages"]}
    after = {each["name"]: (each["pid"], each["restarts"], each["started"]) for each in found["stages"]}
    assert {name: each[:2] for name, each in after.items()} == {name: each[:2] for name, each in before.items()}
    assert all(abs(after[name][2] - before[name][2]) < 1 for name in before)


def test_a_client_of_a_follower_is_served_by_whoever_leads(brokers):
    started = [brokers.kmq(name, "up", *(["--no-gateway"] if name == "c" else [])) for name in BROKERS]
    assert [each.returncode for each in started] == [0, 0, 0], [each.stderr for each in started]
    brokers.init()
    brokers.await_whole()
    for name in BROKERS:
        until(lambda name=name: brokers.status(name)["ready"], f"readiness of {name}")

    def is_acked(n):
        port = int((brokers.root / "b/pipes/ingress.port").read_text())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 20) as sock:
            sock.sendall(b"!hello acks=1 producer=p\nt.k|1|%d|x\n" % n)
            sock.shutdown(socket.SHUT_WR)
            return any(word in sock.makefile("rb").read() for word in (b"\n!ack 1 ", b"\n!dup 1 "))

    until(lambda: is_acked(1), "an ack through b")
    assert brokers.view("b", "http")["broker"] == "a" and brokers.view("b")["broker"] == "b"
    assert brokers.kmq("a", "down").returncode == 0
    until(lambda: is_acked(2), "an ack of the next leader")

    def next_leader():
        with contextlib.suppress(httpx.TransportError):  # where ports are free ones, each role has its own
            return brokers.view("b")["leader"] in ("b", "c")
        return False

    until(next_leader, "the next leader")


def test_a_follower_serves_by_its_other_ports_where_another_program_uses_one(brokers):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = brokers.kmq("b", "up", KMQ_KAFKA_PORT=str(port))
        assert started.returncode == 0, started
        assert f"door_closed: KMQ_KAFKA_PORT={port}" in started.stderr.splitlines()[-1], started
        assert brokers.view("b", "http")["code"] == "no_leader", "HTTP serves"
        assert "door_closed" in [each["code"] for each in brokers.status("b")["warnings"]]
        assert not (brokers.root / "b/pipes/kafka.port").exists()
    until(lambda: (brokers.status("b")["kafka"] or {}).get("port") == port, "the port")
    assert "door_closed" not in [each["code"] for each in brokers.status("b")["warnings"]]
    assert (brokers.root / "b/pipes/kafka.port").read_text().strip() == str(port)


SLOW_DISK = """
import os, time
quick = os.fdatasync
def fdatasync(fd):
    if os.path.exists("{flag}"):
        time.sleep(1.5)
    quick(fd)
os.fdatasync = fdatasync
"""


def test_a_slow_disk_leaves_the_isr_and_is_named_until_it_is_quick_again(brokers):
    """One of three syncs in 1.5 s: no acknowledgement waits for it for long, and the leader says whose disk it is."""
    flag, lag = brokers.root / "slow", {"KMQ_REPLICA_LAG": "3s"}
    flag.touch()
    (brokers.root / "sitecustomize.py").write_text(SLOW_DISK.format(flag=flag))
    for name in BROKERS:
        slow = {"PYTHONPATH": f"{brokers.root}"} if name == "c" else {}
        assert brokers.kmq(name, "up", *(["--no-gateway"] if name == "b" else []), **lag | slow).returncode == 0
    brokers.init()
    brokers.await_whole()
    until(lambda: brokers.status("a")["ready"], "readiness of a")
    times, numbers = [], itertools.count()
    port = (brokers.root / "a/pipes/ingress.port").read_text().strip()
    with kmq.Producer(f"127.0.0.1:{port}", timeout_s=PATIENCE_S) as producer:

        def is_quick():
            began = time.monotonic()
            producer.send("t", b"%d" % next(numbers), key="k").result()
            times.append(time.monotonic() - began)
            return len(times) > 20 and max(times[-20:]) < 1.2 <= max(times)

        until(is_quick, "quick acknowledgements")
        ids = brokers.ids()
        assert {*brokers.register().isr} == {ids["a"], ids["b"]}
        log = (brokers.root / "a/pipes/kmq.log").read_text()
        assert re.findall(r"event=replica_isr .*broker=(\w) change=out reason=(\w+)", log)[-1:] == [("c", "slow")]
        warning = next(each for each in brokers.status("a")["warnings"] if each["code"] == "follower_slow")
        assert "broker c takes 1." in warning["why"] or "broker c takes 2." in warning["why"], warning
        assert "out of the ISR" in warning["why"]
        shown = {each["broker"]: each for each in brokers.status("a")["followers"]}
        assert shown["c"]["slow"] and not shown["b"]["slow"] and shown["c"]["ack_delay"] > shown["b"]["ack_delay"]
        assert "follower c   out of the ISR   ack delay: " in brokers.kmq("a", "status").stdout
        http = (brokers.root / "a/pipes/http.port").read_text().strip()
        metrics = httpx.get(f"http://127.0.0.1:{http}/metrics", trust_env=False, timeout=PATIENCE_S).text
        [delay] = re.findall(r'kmq_replica_ack_delay_seconds\{broker="c"\} (\S+)', metrics)
        assert float(delay) > 1
        flag.unlink()
        until(lambda: is_quick() is not None and {*brokers.register().isr} == {*ids.values()}, "the whole ISR")
    until(
        lambda: "follower_slow" not in [each["code"] for each in brokers.status("a")["warnings"]], "no warning is left"
    )


def test_a_shard_whose_volumes_were_all_restored_from_one_backup_says_what_to_type(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", "--no-gateway").returncode == 0
    brokers.init()
    brokers.await_whole()
    until(lambda: brokers.status("a")["ready"], "a ready leader")
    assert brokers.kmq("a", "produce", "t", "-m", "kept", "--acks").returncode == 0
    assert brokers.kmq("c", "down").returncode == 0
    shutil.copytree(brokers.root / "c/data", brokers.root / "backup", symlinks=True)
    assert brokers.kmq("c", "up", "--no-gateway").returncode == 0
    assert brokers.kmq("a", "produce", "t", "-m", "lost", "--acks").returncode == 0
    brokers.await_whole()
    for name in BROKERS:
        assert brokers.kmq(name, "down").returncode == 0
    for name in BROKERS:
        shutil.rmtree(brokers.root / name / "data")
        shutil.copytree(brokers.root / "backup", brokers.root / name / "data", symlinks=True)
        assert brokers.kmq(name, "up", "--no-gateway").returncode == 0

    def is_named():
        found = brokers.kmq("a", "cluster", "status")
        return (
            found.returncode == 1 and "problem: isr_replaced" in found.stdout and "kmq cluster recover" in found.stdout
        )

    until(is_named, "the problem")
    [reason] = until(
        lambda: [each for each in brokers.status("b")["reasons"] if "another" in each["why"]], "the reason"
    )
    assert reason["code"] == "no_leader" and "waiting does not help" in reason["advice"]
    told = brokers.kmq("a", "cluster", "recover", "--yes")
    assert told.returncode == 1 and "nothing was changed" not in told.stdout, told
    for words in (
        "kmq cluster detach",
        "kmq cluster reset",
        "kmq cluster init --shard <new name> --brokers a,b,c --from",
    ):
        assert words in told.stderr, told.stderr

    for name, command in zip(BROKERS, ("detach", "reset", "reset"), strict=True):
        assert brokers.kmq(name, "down").returncode == 0
        done = brokers.kmq(name, "cluster", command, "--yes")
        assert done.returncode == 0, done.stderr
    new = {"KMQ_SHARD": "s2"}
    for name in BROKERS:
        assert brokers.kmq(name, "up", "--no-gateway", **new).returncode == 0
    begun = ("cluster", "init", "--shard", "s2", "--brokers", "a,b,c", "--from", "a")
    until(lambda: brokers.kmq("a", *begun, **new).returncode == 0, "the new shard")

    def sent():
        return brokers.kmq("b", "produce", "t", "-m", "new", "--acks", "--timeout", "5", **new).returncode == 0

    until(sent, "an acknowledgement of the new shard")
    until(lambda: "ISR a,b,c" in brokers.kmq("a", "cluster", "status", **new).stdout, "the whole ISR")
    lines = (brokers.root / "c/data/t.log").read_text().splitlines()
    assert [line.rpartition("|")[2] for line in lines][:2] == ["kept", "new"], lines
