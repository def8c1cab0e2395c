"""A fleet of three brokers on a real Consul: what is said once reaches every broker, also one that was away."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from waiting import until

from kmq.broker.stats import peek
from kmq.cli.fleet import read as read_fleet
from kmq.cli.topics import describe
from kmq.cluster import consul as consul_api
from kmq.cluster.publisher import KEPT, Mark
from kmq.cluster.queue import BroadcastQueue, Place
from kmq.config.settings import load
from kmq.errors import EXIT_RETRY
from kmq.log import topics

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

NAMES = ("a", "b", "c")


class Fleet:
    """Brokers by name, and what is said to all."""

    def __init__(self, address, new_broker, **settings):
        cluster = f"fleet-{uuid.uuid4().hex[:12]}"
        self.brokers = {}
        for name in NAMES:
            self.brokers[name] = broker = new_broker()
            broker.gateway = False
            broker.env |= {"KMQ_CLUSTER": cluster, "KMQ_BROKER": name, "KMQ_CONSUL": address}
            broker.env |= {name: str(value) for name, value in settings.items()}
        self.a, self.b, self.c = self.brokers.values()

        self.queue = BroadcastQueue(Place.of(load(self.a.env, "")))

    def up(self):
        with ThreadPoolExecutor() as pool:
            [*pool.map(lambda broker: broker.up(), self.brokers.values())]

    def say(self, *arguments, code=0):
        """A command of `kmq fleet`, given where broker a is."""
        done = self.a.kmq("fleet", *arguments)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout

    def status(self):
        found = read_fleet(self.queue)
        return found | {"brokers": {row["broker"]: row for row in found["brokers"]}}

    def wait_read(self, *names):
        """Until these brokers, or all, have read every message, and say that they are well."""

        def have_read():
            rows = self.status()["brokers"]
            return all(name in rows and rows[name]["health"] == "ready" for name in names or NAMES)

        def said():
            return f"{self.status()}\n" + "".join(broker.log()[-1500:] for broker in self.brokers.values())

        until(have_read, "all messages read", said)

    def shown(self, broker, topic):
        """What `kmq topics show --json` prints; None: there is no such topic."""
        settings = load(broker.env, "")
        return describe(settings, topic) if topic in topics.names(settings.data) else None


def agent_of(broker):
    """The pid of a broker's agent, once it has a row."""
    page = peek(broker.instance)
    return page.rows["agent"].pid if page is not None else 0


def wait_agent(broker):
    return until(lambda: agent_of(broker), "an agent")


def agent_state(broker):
    page = peek(broker.instance)
    return page.rows["agent"].state_name if page is not None else ""


def events(broker, name):
    return broker.log().count(f" event={name} ")


@pytest.fixture
def fleet(consul, new_broker):
    fleet = Fleet(consul.address, new_broker)
    yield fleet
    fleet.queue.close()


def test_topics_and_settings_reach_every_broker_once_and_without_a_restart(fleet):
    fleet.up()
    agents = {name: wait_agent(broker) for name, broker in fleet.brokers.items()}
    assert fleet.say("topics", "create", "orders", "--partitions", "3", "--set", "segment_age=1d").startswith(
        "message 1:"
    )
    fleet.say("topics", "set", "orders", "retention_age=30d", "segment_age=")
    fleet.say("set", "retention=7d", "quota=1GiB")
    fleet.wait_read()
    for broker in fleet.brokers.values():
        until(lambda broker=broker: (fleet.shown(broker, "orders") or {}).get("from_seq"), "orders in force")
        shown = until(
            lambda broker=broker: (
                (found := fleet.shown(broker, "orders"))["limits"]["retention_age"]["value"] == 2592000 and found
            ),
            "the changed limit",
        )
        assert shown["partitions"] == 3 and shown["limits"]["segment_age"]["from"] == "KMQ_SEGMENT_AGE"
        assert events(broker, "topic_adopted") == 1 and events(broker, "state_applied") == 4
        assert agent_of(broker) == agents[broker.env["KMQ_BROKER"]]
    fleet.say("topics", "create", "other")
    fleet.wait_read()
    other = fleet.shown(fleet.b, "other")["limits"]["retention_age"]
    assert other == {"value": 604800, "from": "the fleet (settings/retention_age)"}
    found = fleet.status()
    assert found["epoch"] == 5 and found["settings"] == {"retention_age": "7d", "data_quota": "1GiB"}
    assert {row["read"] for row in found["brokers"].values()} == {5}


@pytest.mark.soak  # waits for ages to pass
def test_retention_of_the_fleet_deletes_and_a_brokers_own_wins(fleet):
    fleet.b.env["KMQ_RETENTION_BYTES"] = "none"  # given, though it is the default
    for broker in fleet.brokers.values():
        broker.env["KMQ_SEGMENT_BYTES"] = "64 KiB"
    fleet.up()
    for broker in fleet.brokers.values():
        broker.send_lines([b"big|" + b"x" * 1000] * 3000)
        broker.wait_routed(3000)
    fleet.say("set", "retention=1MiB")
    fleet.wait_read()

    def queue_bytes(broker, log="topics/big/0"):
        return sum(path.stat().st_size for path in (broker.data / log).glob("*.log"))

    for broker in (fleet.a, fleet.c):
        for log in ("topics/big/0", "append"):
            until(lambda broker=broker, log=log: queue_bytes(broker, log) <= 1 << 20, f"retention of {log}")
    fleet.say("run", "retain", "--wait")
    assert queue_bytes(fleet.b) > 3_000_000
    rows = fleet.status()["brokers"]
    assert rows["b"]["own"] == {"retention_bytes": "none"} and rows["a"]["own"] == {}
    assert "b: retention_bytes=none was set there, and wins over the fleet" in fleet.say("status")


def greeting(broker, token):
    """What ingress answers to a hello with this token."""
    port = int((broker.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(f"!hello acks=1 token={token}\n".encode())
        return sock.recv(200)


def reasons(broker):
    """Why this broker is not ready."""
    return json.loads(broker.kmq("status", "--json").stdout)["reasons"]


def test_a_revoked_token_is_turned_away_everywhere_though_the_file_has_it(fleet, tmp_path):
    for broker in fleet.brokers.values():
        broker.env["KMQ_TOKENS"] = str(tmp_path / "tokens")
    old, new, other = (fleet.a.kmq("token", "new", name).stdout.strip() for name in ("orders", "orders", "metrics"))
    ids = json.loads(fleet.a.kmq("token", "list", "--json").stdout)["tokens"][0]["ids"]
    fleet.up()
    assert all(greeting(broker, token).startswith(b"!ok") for broker in fleet.brokers.values() for token in (old, new))
    fleet.c.down()
    fleet.say("token", "revoke", ids[0])
    for broker in (fleet.a, fleet.b):
        until(lambda broker=broker: b"unauthorized" in greeting(broker, old), "the refusal of the revoked token")
        assert greeting(broker, new).startswith(b"!ok"), "another token of the same name"
    fleet.c.up()
    until(lambda: b"unauthorized" in greeting(fleet.c, old), "the refusal by the one that was away")
    fleet.say("token", "revoke", "orders")
    for broker in fleet.brokers.values():
        until(lambda broker=broker: b"unauthorized" in greeting(broker, new), "the refusal of the name")
        assert greeting(broker, other).startswith(b"!ok")
    assert fleet.status()["tokens"] == sorted(["orders", ids[0]])


def test_a_broker_that_was_away_past_a_trim_catches_up_and_starts_without_consul(fleet):
    fleet.up()
    fleet.say("topics", "create", "early")
    fleet.wait_read()
    fleet.c.down()
    fleet.say("topics", "create", "later", "--partitions", "2")
    fleet.say("set", "retention=9d")
    age_mark(fleet, "c")
    for _ in range(KEPT):
        fleet.queue.publish("filler")
    until(lambda: fleet.queue.publish("filler") and oldest_message(fleet) > 3, "the end of what c has missed")
    fleet.c.up()
    fleet.wait_read("c")
    assert events(fleet.c, "snapshot_applied") == 2 and fleet.shown(fleet.c, "later")["partitions"] == 2
    fleet.c.down()
    fleet.c.up(KMQ_CONSUL="127.0.0.1:1")
    until(lambda: events(fleet.c, "consul_lost") == 1, "the word that Consul is lost")
    limits = json.loads(fleet.c.kmq("topics", "show", "later", "--json").stdout)["limits"]
    assert limits["retention_age"]["value"] == 9 * 86400
    fleet.c.send_lines([b"later|hello"])
    fleet.c.wait_routed(1)


def age_mark(fleet, broker):
    """Let a broker look as if it had been away for two days."""
    key = fleet.queue.keys.delivered_to(broker)
    mark = Mark.decode(fleet.queue.run(consul_api.read(key)).value)
    fleet.queue.run(consul_api.txn([consul_api.KvOperation("set", key, mark._replace(ts=mark.ts - 172_800).encode())]))


def oldest_message(fleet):
    entries = fleet.queue.run(consul_api.watch(fleet.queue.keys.messages, 0, 0)).entries
    return min(fleet.queue.keys.epoch_of(entry.key) for entry in entries)


def test_what_a_broker_cannot_do_is_reported_by_its_name(fleet):
    assert fleet.b.kmq("topics", "create", "orders", "--partitions", "5").returncode == 0
    fleet.up()
    fleet.b.send_lines([b"t|1"] * 100)
    fleet.b.wait_routed(1 + 100)  # the declaration has a seq, too
    fleet.say("topics", "create", "orders", "--partitions", "2")
    fleet.wait_read()
    until(lambda: fleet.status()["brokers"]["b"]["findings"], "the finding of b")
    assert "b: topics/orders: has 5 partition(s) here, and the fleet says 2" in fleet.say("status", code=1)
    path = next((fleet.b.data / "topics/t/0").glob("*.log"))
    with open(path, "r+b") as file:  # in place: the router has it open
        file.seek(path.stat().st_size // 2)
        file.write(b"#")
    until(lambda: fleet.b.kmq("verify").returncode == 1, "the index line that covers it")
    fleet.c.down()
    shown = fleet.say("run", "verify", "--wait", code=1)
    assert "a: ok" in shown and "b: damage" in shown and "c: away" in shown and f"{path.name}: byte" in shown
    row = fleet.status()["brokers"]["b"]["results"]["verify"]
    assert row["outcome"] == "damage" and row["findings"]


def test_a_command_is_done_once_although_the_agent_is_killed(fleet):
    fleet.up()
    shown = fleet.say("run", "verify", "--wait")
    assert shown.count(": ok") == 3
    killed = {name: agent_of(broker) for name, broker in fleet.brokers.items()}
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    for name, broker in fleet.brokers.items():
        broker.wait(lambda broker=broker, name=name: agent_of(broker) not in (0, killed[name]), "the next agent")
        broker.wait(lambda broker=broker: agent_state(broker) == "ready", "its place in Consul")
        assert broker.status()["ingress"]["restarts"] == "0"
    fleet.say("run", "retain", "--wait")
    assert [events(broker, "command_done") for broker in fleet.brokers.values()] == [2, 2, 2]


def test_each_broker_compacts_at_once_what_is_not_due(fleet):
    for broker in fleet.brokers.values():  # of the four stages alone: nothing else compacts there
        broker.env |= {"KMQ_COMPACT": "off"}
    fleet.up()
    fleet.say("topics", "create", "users", "--set", "cleanup=compact", "--set", "segment_bytes=64KiB")
    fleet.wait_read()
    for broker in fleet.brokers.values():
        broker.send_lines([b"users.k%d|0|%d|%b" % (n % 9, n, b"v" * 200) for n in range(1000)])
        broker.wait(lambda broker=broker: len(broker.lines("users")) == 1000, "its queue")
        broker.down()  # a checkpoint, for which we would wait 30 s
    fleet.up()
    fleet.wait_read()
    for _ in range(2):  # the second time nothing is due, and it is compared again
        assert fleet.say("run", "compact", "--wait").count(": ok") == 3
    for broker in fleet.brokers.values():
        left = [line for line in broker.lines("users") if line]
        assert len(left) < 500 and {line.split(b"|")[2] for line in left} == {b"users.k%d" % n for n in range(9)}
    first = min((fleet.b.data / "topics/users/0").glob("*.log"))
    with open(first, "r+b") as file:  # in place: the router has it open
        file.seek(100)
        file.write(b"#")
    shown = fleet.say("run", "compact", "--wait", code=1)
    assert shown.count(": ok") == 2 and "b: not compacted" in shown and "users-0: " in shown, shown


def test_an_agent_that_is_killed_while_states_come_misses_none(fleet):
    fleet.up()
    for number in range(9):
        if number % 3 == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(wait_agent(fleet.b), signal.SIGKILL)  # not 0, our own group
        fleet.say("topics", "create", f"t{number}", "--partitions", str(number + 1))
    fleet.wait_read()
    for broker in fleet.brokers.values():
        until(lambda broker=broker: len([*(broker.data / "topics").glob("t*")]) == 9, "all topics")
        for number in range(9):
            assert fleet.shown(broker, f"t{number}")["partitions"] == number + 1


def test_a_second_agent_of_the_same_broker_ends_and_names_the_first(fleet, new_broker):
    fleet.a.up()
    fleet.a.wait(lambda: agent_state(fleet.a) == "ready", "the agent")
    twin = new_broker()
    twin.gateway = False
    twin.env |= {name: fleet.a.env[name] for name in ("KMQ_CLUSTER", "KMQ_BROKER", "KMQ_CONSUL")}
    twin.env["KMQ_BROKER"] = "a"
    twin.up()
    until(lambda: events(twin, "agent_not_restarted") == 1, "its event", twin.log)
    assert "event=failed exit_code=69" in twin.log() and f"/{agent_of(fleet.a)}" in twin.log()
    twin.send_lines([b"t|1"])
    twin.wait_routed(1)
    here = fleet.a.run("python", "-m", "kmq.cluster.agent")
    assert here.returncode == 69 and f"pid={agent_of(fleet.a)}" in here.stderr


def test_a_message_that_cannot_be_processed_makes_the_broker_unready(fleet):
    fleet.up()
    fleet.say("topics", "create", "first")
    fleet.wait_read()
    (fleet.b.data / "cluster/states.new").mkdir()
    fleet.say("topics", "create", "second")
    until(lambda: fleet.b.kmq("status").returncode == 1, "b not ready")
    row = until(lambda: (row := fleet.status()["brokers"]["b"])["reasons"] and row, "the reason")
    assert row["health"] == "not_ready" and row["read"] == 1 and "states.new" in row["error"]
    assert [reason["code"] for reason in reasons(fleet.b)] == ["message_not_processed"]
    fleet.wait_read("a", "c")
    (fleet.b.data / "cluster/states.new").rmdir()
    fleet.wait_read()
    assert events(fleet.b, "message_not_processed") == 1 and events(fleet.b, "message_processed") == 1
    assert fleet.b.kmq("status").returncode == 0


def test_consul_killed_and_back_is_said_once_and_brokers_go_on(new_broker, tmp_path):
    from consuls import Consul

    agent = Consul(tmp_path / "consul.log")
    try:
        fleet = Fleet(agent.address, new_broker)
        fleet.a.gateway = True
        fleet.up()
        fleet.say("topics", "create", "before")
        fleet.wait_read()
        until(lambda: "kmq_cluster_epoch 1.0" in fleet.a.get("/metrics")[1], "the message in the metrics")
        agent.close()
        for broker in fleet.brokers.values():
            until(lambda broker=broker: agent_state(broker) == "waiting", "the loss noticed")
            broker.send_lines([b"before|x"])
            broker.wait_routed(1)
            assert broker.kmq("status").returncode == 0
            for command in ("status", "doctor"):
                until(lambda broker=broker, command=command: "consul_lost" in broker.kmq(command).stdout, "the warning")
        until(lambda: "kmq_cluster_connected 0.0" in fleet.a.get("/metrics")[1], "the loss in the metrics")
        agent = Consul(tmp_path / "consul.log", address=agent.address)  # with nothing in it: all begins again
        fleet.say("topics", "create", "after")
        fleet.wait_read()
        for broker in fleet.brokers.values():
            assert events(broker, "consul_lost") == events(broker, "consul_found") == 1
            assert "consul_lost" not in broker.kmq("status").stdout
            assert fleet.shown(broker, "before") and fleet.shown(broker, "after")
        until(lambda: "kmq_cluster_lag 0.0" in fleet.a.get("/metrics")[1], "the same in the metrics")
        fleet.queue.close()
    finally:
        agent.close()


def test_an_agent_ends_in_order_and_gives_its_place_back_at_once(fleet):
    fleet.a.up()
    fleet.a.wait(lambda: agent_state(fleet.a) == "ready", "the agent")
    process = psutil.Process(agent_of(fleet.a))
    fleet.a.down()
    assert not process.is_running() and "stage=agent event=stopped exit_code=0" in fleet.a.log()
    assert [row["health"] for row in fleet.status()["brokers"].values()] == ["away"]


def test_a_broker_with_a_new_disk_reads_all_states_again(fleet):
    fleet.a.up()
    fleet.say("topics", "create", "orders", "--partitions", "3")
    fleet.wait_read("a")
    fleet.a.down()
    shutil.rmtree(fleet.a.data)
    fleet.a.up()
    until(lambda: fleet.shown(fleet.a, "orders"), "the topic")
    assert fleet.shown(fleet.a, "orders")["partitions"] == 3


def test_every_help_of_a_fleet_has_examples_and_all_of_them_work_when_pasted(fleet):
    fleet.a.up()
    fleet.wait_read("a")
    paths = [
        ("topics",),
        ("topics", "create"),
        ("topics", "set"),
        ("token",),
        ("token", "revoke"),
        ("set",),
        ("run",),
        ("forget",),
    ]
    lines = {}
    for path in [(), *paths, ("status",)]:
        shown = fleet.a.kmq("fleet", *path, "--help").stdout.partition("Examples:")[2]
        found = [line.strip() for line in shown.splitlines() if line.strip()]
        assert found, f"kmq fleet {path} has no examples"
        lines |= dict.fromkeys(found)
    created = [line for line in lines if " topics create " in line]
    said = [line for line in lines if line not in created and "status" not in line and " forget " not in line]
    for line in (*created, *said):
        done = fleet.a.run("bash", "-c", line)
        assert done.returncode == 0 and done.stdout.strip(), (line, done.stdout, done.stderr)
    fleet.wait_read("a")
    for line in [line for line in lines if "status" in line]:
        assert fleet.a.run("bash", "-c", line).returncode == 0


def test_without_a_cluster_there_is_no_agent_and_nothing_of_it(broker):
    broker.gateway = False
    broker.up(KMQ_CONSUL="127.0.0.1:1")
    assert not agent_of(broker) and not (broker.data / "cluster").exists()
    done = broker.kmq("fleet", "status")
    assert done.returncode == 78 and "KMQ_CONSUL and KMQ_CLUSTER not set" in done.stderr


def test_a_damaged_file_of_states_lets_no_revoked_token_in(fleet, tmp_path):
    fleet.a.env["KMQ_TOKENS"] = str(tmp_path / "tokens")
    token = fleet.a.kmq("token", "new", "orders").stdout.strip()
    fleet.a.up()
    fleet.say("token", "revoke", "orders")
    until(lambda: b"unauthorized" in greeting(fleet.a, token), "the refusal")
    path = fleet.a.data / "cluster/states"
    path.unlink()
    until(path.exists, "the file made again")
    fleet.a.down()
    path.write_bytes(b"")
    env = fleet.a.env | {"KMQ_CONSUL": "127.0.0.1:1"}
    with subprocess.Popen(["kmq", "up", "--no-gateway"], env=env, cwd=fleet.a.root) as up:  # ready once Consul is there
        until(
            lambda: [found["code"] for found in reasons(fleet.a)] == ["message_not_processed"], "what it is waiting for"
        )
        assert b"unauthorized" in greeting(fleet.a, token)
        fleet.a.down()
        assert up.wait(60) == EXIT_RETRY
    fleet.a.up()
    until(lambda: b"tokens/orders" in path.read_bytes(), "the file made from Consul")
    fleet.a.wait(lambda: fleet.a.kmq("status").returncode == 0, "ready")
    assert b"unauthorized" in greeting(fleet.a, token)


@pytest.mark.parametrize("is_published_since", [False, True])
def test_a_consul_restored_while_the_agent_was_down_leads_to_a_snapshot(fleet, is_published_since):
    fleet.a.up()
    for name in ("kept", "lost"):
        fleet.say("token", "revoke", name)
    fleet.wait_read("a")
    fleet.a.down()
    keys = fleet.queue.keys
    first = consul_api.read(keys.message(1))
    mark = Mark(1, fleet.queue.run(first).value.partition(b"id=")[2].partition(b" ")[0].decode(), time.time())
    changes = [consul_api.KvOperation("delete", key) for key in (keys.message(2), keys.root + "tokens/lost")]
    changes += [consul_api.KvOperation("set", keys.epoch, b"1")]
    changes += [consul_api.KvOperation("set", keys.delivered_to("a"), mark.encode())]
    fleet.queue.run(consul_api.txn(changes))
    if is_published_since:
        fleet.queue.publish("greeting")
    fleet.a.up()
    fleet.wait_read("a")
    until(lambda: b"tokens/lost" not in (fleet.a.data / "cluster/states").read_bytes(), "the states as they are now")


def test_a_broker_that_is_away_is_not_waited_for_and_can_be_forgotten(fleet):
    assert "must not be 0" in fleet.a.kmq("fleet", "run", "retain", "--within", "0s").stderr
    for broker in (fleet.a, fleet.b):
        broker.up()
    fleet.wait_read("a", "b")
    assert "b is here" in fleet.a.kmq("fleet", "forget", "b").stderr
    fleet.b.down()
    assert "b: away" in fleet.say("run", "verify", "--wait")
    fleet.say("status", code=1)
    fleet.say("forget", "b")
    fleet.say("status")
    key = fleet.queue.keys.results + "x/a"
    damage = json.dumps({"type": "verify", "outcome": "damage", "findings": [], "ts": time.time() + 60}).encode()
    fleet.queue.run(consul_api.txn([consul_api.KvOperation("set", key, damage)]))
    assert "a: verify: damage" in fleet.say("status", code=1)
