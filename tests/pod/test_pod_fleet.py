"""Overlay `fleet` as real pods: three brokers and a Consul in memory. What is said once reaches each of them, once.

One fleet serves all tests, so each topic here has a name of its own, and what is counted is counted for it.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from load import PORT, rows
from play import ROOT, Kubelet, Pod, Pods
from waiting import until

import kmq
from kmq.access import tokens
from kmq.cli.fleet import read as read_fleet
from kmq.cluster.consul import ConsulError
from kmq.cluster.queue import BroadcastQueue, Place
from kmq.config.settings import load

NAMES = ("kmq-0", "kmq-1", "kmq-2")


class Fleet:
    """The brokers by name, their Consul, and a token for each of TOKENS."""

    def __init__(self, pods: Pods, given: dict[str, str]) -> None:
        self.consul, self.tokens = pods["kmq-consul"], given
        self.brokers = {name: pods[name] for name in NAMES}

    @property
    def pods(self) -> list[Pod]:
        return list(self.brokers.values())

    def say(self, *arguments: str, at: str = "kmq-0", code: int = 0) -> str:
        """A command of `kmq fleet`, given inside a pod."""
        done = self.brokers[at].exec("agent", "kmq", "fleet", *arguments)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout

    def status(self) -> dict[str, dict]:
        """Broker → its row of `kmq fleet status --json`, asked from outside; none while Consul does not answer."""
        where = {"KMQ_CONSUL": f"{self.consul.ip}:8500", "KMQ_CLUSTER": "dev", "KMQ_BROKER": "outside"}
        try:
            with BroadcastQueue(Place.of(load(where, "/nonexistent.toml"))) as queue:
                return {row["broker"]: row for row in read_fleet(queue)["brokers"]}
        except ConsulError:
            return {}

    def wait_health(self, **wanted: str) -> None:
        """Until these brokers have this health; without arguments, until all are ready and have read everything."""
        health = {name.replace("_", "-"): state for name, state in wanted.items()} or dict.fromkeys(NAMES, "ready")

        def is_so() -> bool:
            found = self.status()
            return all(name in found and found[name]["health"] == state for name, state in health.items())

        until(is_so, f"{health}", self.status)


@pytest.fixture(scope="module")
def fleet(play_all_once: Callable[..., Pods], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The overlay with the component `tokens`, and an age of retention that is left to the fleet."""
    directory = tmp_path_factory.mktemp("fleet")
    there = os.path.relpath(ROOT / "k8s", directory)
    left = {"name": "kmq-settings", "behavior": "merge", "literals": ["KMQ_RETENTION_AGE="]}
    kustomization = {
        "resources": [f"{there}/overlays/fleet"],
        "components": [f"{there}/components/tokens"],
        "configMapGenerator": [left],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    file = directory / "tokens"
    given = {name: tokens.new(str(file), name) for name in ("orders", "metrics")}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kmq-tokens"}}
    pods = play_all_once(directory, secret | {"stringData": {"tokens": file.read_text()}})
    made = Fleet(pods, given)
    made.wait_health()
    return made


def said(pod: Pod, container: str, *words: str) -> int:
    """How many lines of a container's log have all these words."""
    return sum(all(word in line for word in words) for line in pod.logs(container).splitlines())


def topic(pod: Pod, name: str) -> dict:
    """What `kmq topics show` says in a container that never speaks to Consul, once there is such a topic."""
    shown: list[str] = []

    def is_there() -> bool:
        done = pod.exec("gateway", "kmq", "topics", "show", name, "--json")
        shown.append(done.stdout)
        return done.returncode == 0

    until(is_there, f"the topic {name}")
    return json.loads(shown[-1])


def has_topics(pod: Pod, *names: str) -> bool:
    return all((pod.volume("data") / "topics" / name).is_dir() for name in names)


def agent_pid(pod: Pod) -> int:
    """Of the agent, as its own pod counts; 0 while there is none."""
    return rows(pod)["agent"].pid if rows(pod) else 0


# --- what is said -----------------------------------------------------------------------------------------------------


def test_each_broker_has_the_name_of_its_pod_and_status_shows_all(fleet: Fleet) -> None:
    for name, pod in fleet.brokers.items():
        assert pod.exec("gateway", "hostname").stdout.strip() == name
        shown = fleet.say("status", at=name)
        assert [line.split()[0] for line in shown.splitlines()[2:5]] == [*NAMES] and shown.count(" ready") == 3
        answers = {container: pod.probe(container, "liveness") for container in pod.containers}
        assert not any(answers.values()), answers
        assert [*answers][-1] == "agent"


def test_a_topic_said_in_one_pod_is_declared_once_in_each(fleet: Fleet) -> None:
    fleet.say("topics", "create", "once", "--partitions", "3", at="kmq-1")
    fleet.wait_health()
    for pod in fleet.pods:
        until(lambda pod=pod: said(pod, "router", "event=topic_adopted", "topic=once"), "the router's topic")
        assert topic(pod, "once")["partitions"] == 3
        assert said(pod, "router", "event=topic_adopted", "topic=once") == 1
        assert said(pod, "agent", "event=state_applied", "state=topics/once") == 1


def test_retention_of_the_fleet_holds_where_the_pod_leaves_it(fleet: Fleet) -> None:
    """The pods leave the age to it, and were given bytes of their own."""
    fleet.say("topics", "create", "kept")
    fleet.say("set", "retention=3d", "retention_bytes=1GiB")
    fleet.wait_health()
    for pod in fleet.pods:
        limits = topic(pod, "kept")["limits"]
        assert limits["retention_age"] == {"value": 259200, "from": "the fleet (settings/retention_age)"}
        assert limits["retention_bytes"] == {"value": 50 << 20, "from": "KMQ_RETENTION_BYTES"}
    shown = fleet.say("status")
    for name in NAMES:
        assert f"{name}: retention_bytes=50 MiB was set there, and wins over the fleet" in shown


def test_a_command_names_each_pod(fleet: Fleet) -> None:
    done = {name: said(pod, "agent", "event=command_done", "command=verify") for name, pod in fleet.brokers.items()}
    shown = fleet.say("run", "verify", "--wait", at="kmq-2")
    assert shown.splitlines()[1:] == [f"{name}: ok" for name in NAMES]
    for name, pod in fleet.brokers.items():
        told = lambda pod=pod: said(pod, "agent", "event=command_done", "command=verify")  # noqa: E731
        until(lambda told=told, name=name: told() > done[name], "a line of it")
        assert told() == done[name] + 1


def greeting(pod: Pod, token: str) -> bytes:
    """What ingress answers to a hello with this token."""
    with socket.create_connection((pod.ip, PORT), timeout=30) as sock:
        sock.sendall(f"!hello acks=1 token={token}\n".encode())
        return sock.recv(200)


def status_of(pod: Pod, path: str, token: str = "") -> int:
    """The status of GET `path` at the gateway."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{pod.ip}:{pod.port('http')}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


def test_a_revoked_token_is_refused_by_each_ingress_and_gateway(fleet: Fleet) -> None:
    revoked, other = fleet.tokens["metrics"], fleet.tokens["orders"]
    for pod in fleet.pods:
        assert greeting(pod, revoked).startswith(b"!ok") and status_of(pod, "/metrics", revoked) == 200
    fleet.say("token", "revoke", "metrics")
    for pod in fleet.pods:
        until(lambda pod=pod: b"unauthorized" in greeting(pod, revoked), "the refusal of ingress")
        until(lambda pod=pod: status_of(pod, "/metrics", revoked) == 401, "the refusal of the gateway")
        assert greeting(pod, other).startswith(b"!ok") and status_of(pod, "/metrics", other) == 200


# --- what fails ---------------------------------------------------------------------------------------------------------


def test_a_pod_that_was_away_learns_it_when_it_comes_back(fleet: Fleet) -> None:
    away = fleet.brokers["kmq-2"]
    away.kill()
    fleet.wait_health(kmq_2="away")
    fleet.say("topics", "create", "missed")
    fleet.say("topics", "set", "missed", "segment_age=1d")
    assert "kmq-2: away" in fleet.say("run", "retain", "--wait")  # named, and not waited for
    fleet.wait_health(kmq_0="ready", kmq_1="ready")
    assert not has_topics(away, "missed")
    away.start()
    fleet.wait_health()
    away.wait_ready()
    until(lambda: topic(away, "missed")["limits"]["segment_age"]["from"] == "topic.toml", "the limit")
    until(lambda: said(away, "agent", "event=state_applied", "state=topics/missed") == 2, "a line for each")
    until(lambda: fleet.status()["kmq-2"]["results"]["retain"]["outcome"] == "ok", "the command")


def kill_agent(pod: Pod) -> None:
    with contextlib.suppress(ProcessLookupError, OSError):
        if (pid := pod.pid("agent")) > 0:
            os.kill(pid, signal.SIGKILL)


def judge_kills(fleet: Fleet, pod: Pod, names: list[str]) -> None:
    fleet.wait_health()
    until(lambda: has_topics(pod, *names), "all topics")
    assert all(topic(pod, name)["partitions"] == 2 for name in names[:3])
    for other in fleet.pods:
        if other is not pod:
            assert {said(other, "agent", "event=state_applied", f"state=topics/{name} ") for name in names} == {1}


def test_an_agent_killed_while_states_come_misses_none(fleet: Fleet) -> None:
    victim = fleet.brokers["kmq-1"]
    before, others = victim.restarts("agent"), {name: victim.restarts(name) for name in victim.containers[:-1]}
    names = [f"killed{number}" for number in range(3)]
    for number, name in enumerate(names):
        if number != 1:
            kill_agent(victim)
        fleet.say("topics", "create", name, "--partitions", "2")
    judge_kills(fleet, victim, names)
    assert victim.restarts("agent") > before
    assert {name: victim.restarts(name) for name in victim.containers[:-1]} == others


@pytest.mark.soak
def test_soak_agents_killed_all_the_time_miss_nothing(fleet: Fleet) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    names = [f"soak{number}" for number in range(60)]
    for name in names:
        if rng.random() < 0.5:
            kill_agent(rng.choice(fleet.pods[1:]))  # commands are given in the first
        time.sleep(rng.random())
        fleet.say("topics", "create", name, "--partitions", "2")
    fleet.wait_health()
    for pod in fleet.pods:
        until(lambda pod=pod: has_topics(pod, *names), "all topics")


def test_a_stopped_agent_is_killed_by_its_probe_and_misses_nothing(fleet: Fleet) -> None:
    victim = fleet.brokers["kmq-0"]
    before = {name: victim.restarts(name) for name in victim.containers}
    stopped = agent_pid(victim)
    with Kubelet(victim) as kubelet:
        victim.signal("agent", signal.SIGSTOP)
        fleet.wait_health(kmq_0="away")
        fleet.say("topics", "create", "unheard", at="kmq-1")
        assert status_of(victim, "/readyz") == 200, "messages do not need the agent"
        until(lambda: agent_pid(victim) != stopped, "it is replaced", lambda: kubelet.events)
        fleet.wait_health()
    assert has_topics(victim, "unheard")
    assert any(event.startswith("agent liveness failed: agent has given no sign") for event in kubelet.events)
    assert [event for event in kubelet.events if event.endswith("killed")] == ["agent killed"]
    assert {name: victim.restarts(name) for name in victim.containers} == before | {"agent": before["agent"] + 1}


@contextlib.contextmanager
def consul_away(fleet: Fleet) -> Iterator[None]:
    """Consul's pod is gone for a while. The one that follows has nothing of it."""
    fleet.consul.kill()
    try:
        yield
    finally:
        fleet.consul.start()


def test_without_consul_brokers_serve_say_so_once_and_catch_up(fleet: Fleet) -> None:
    revoked = fleet.tokens["metrics"]
    fleet.say("topics", "create", "before")
    fleet.say("token", "revoke", "metrics")
    fleet.wait_health()
    lost = [said(pod, "agent", "event=consul_lost") for pod in fleet.pods]
    with consul_away(fleet):
        for pod, count in zip(fleet.pods, lost, strict=True):
            until(lambda pod=pod, count=count: said(pod, "agent", "event=consul_lost") > count, "the loss")
            with kmq.Producer(pod.ip, PORT, token=fleet.tokens["orders"]) as producer:
                assert producer.send("before", b"without Consul").result(30) > 0
            assert status_of(pod, "/readyz") == 200
            assert b"unauthorized" in greeting(pod, revoked)
            assert not pod.probe("agent", "liveness")
    fleet.consul.wait_ready()
    fleet.wait_health()
    assert {row["read"] for row in fleet.status().values()} == {0}, "it is empty"
    fleet.say("topics", "create", "after")
    fleet.wait_health()
    for pod, count in zip(fleet.pods, lost, strict=True):
        assert said(pod, "agent", "event=consul_lost") == said(pod, "agent", "event=consul_found") == count + 1
        assert has_topics(pod, "before", "after"), "topics stay"
        until(lambda pod=pod: greeting(pod, revoked).startswith(b"!ok"), "tokens are as Consul has them now")


@pytest.mark.soak
def test_a_broker_beside_an_application_does_what_the_fleet_says(
    play_all_once: Callable[..., Pods], tmp_path: Path
) -> None:
    """Overlay `sidecar` with the component `sidecar-fleet`, and the Consul of overlay `fleet`."""
    there = os.path.relpath(ROOT / "k8s", tmp_path)
    shutil.copy(ROOT / "k8s/overlays/fleet/consul.yaml", tmp_path)
    kustomization = {
        "resources": [f"{there}/overlays/sidecar", "consul.yaml"],
        "components": [f"{there}/components/sidecar-fleet"],
        "secretGenerator": [{"name": "kmq-consul", "literals": ["address=kmq-consul:8500"]}],
        "images": [{"name": "kmq", "newName": "localhost/kmq", "newTag": "dev"}],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    pod = play_all_once(tmp_path)["orders-0"]

    def fleet(*arguments: str) -> str:
        return pod.exec("kmq-agent", "kmq", "fleet", *arguments).stdout

    until(lambda: "orders-0" in fleet("status"), "the broker in its fleet")
    fleet("topics", "create", "beside")
    until(lambda: (pod.volume("kmq-data") / "topics/beside").is_dir(), "the topic")
    assert "orders-0: ok" in fleet("run", "verify", "--wait")
    assert not pod.probe("kmq-agent", "liveness")
