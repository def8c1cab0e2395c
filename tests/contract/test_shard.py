"""Elections of a shard with a real Consul: three processes that are killed, paused, copied, and cut off from it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
from brokers import environment
from certificates import Authority
from consuls import Consul, free_ports
from made_data import write_data
from waiting import PATIENCE_S, until

from kmq.cluster.register import begin, decode
from kmq.log import committed, reader, wal
from kmq.replica.files import ReplicaFiles

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

TTL_S = 5.0  # on a busy machine a replica that runs is silent for a second, and another one is elected
BROKERS = ("a", "b", "c")


class Shard:
    """Three replicas as processes. What they log is kept by broker, over all their starts."""

    def __init__(self, address, root):
        self.address, self.root, self.cluster = address, root, f"s{uuid.uuid4().hex[:8]}"
        (root / "secret").write_text(uuid.uuid4().hex)
        url = f"http://{address}/v1/kv/kmq/{self.cluster}/replicas/s/"
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S)
        self.processes = {}
        self.stages = {}  # by name and stage; they outlive their replica

    def environment(self, name, **more):
        own = {"KMQ_DATA": f"{self.root}/{name}/data", "KMQ_PIPES": f"{self.root}/{name}/pipes"}
        own |= {"KMQ_INSTANCE": f"{self.cluster}-{name}", "KMQ_BROKER": name[0], "KMQ_SHARD": "s"}
        own |= {"KMQ_CONSUL": self.address, "KMQ_CLUSTER": self.cluster, "KMQ_REPLICA_SECRET": f"{self.root}/secret"}
        own |= {"KMQ_REPLICA_PORT": "0", "KMQ_SESSION_TTL": f"{TTL_S:g}s", "KMQ_REPLICA_LAG": f"{TTL_S:g}s"}
        return environment(**own | more)

    def start(self, *names, **more):
        """Start replicas, and the stages that they need. The first letter of a name is its broker."""
        for name in names:
            (self.root / name).mkdir(exist_ok=True)
            self.processes[name] = self._start(name, "kmq.replica", more)
            for stage in ("framer", "durability", "router"):
                if (name, stage) not in self.stages or self.stages[name, stage].poll() is not None:
                    self.stages[name, stage] = self._start(name, f"stages.{stage}", more)

    def _start(self, name, module, more):
        with open(self.root / name / "log", "ab") as log:
            argv, environment = [sys.executable, "-m", module], self.environment(name, **more)
            environment["PYTHONPATH"] = str(Path(__file__).parents[2])
            return subprocess.Popen(argv, stderr=log, cwd=self.root / name, env=environment)

    def end(self, name, number=signal.SIGKILL):
        self.processes[name].send_signal(number)
        return self.processes[name].wait(timeout=PATIENCE_S)

    def command(self, *arguments, group="cluster", broker="a", **more):
        argv = [sys.executable, "-m", "kmq", *group.split(), *arguments]
        environment = self.environment(broker, **more)
        return subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=self.root, timeout=120)

    def begin(self, **more):
        """Start all three, and the shard."""
        self.start(*BROKERS, **more)
        for name in BROKERS:
            self.await_event(name, "replica_entered")
        assert "a leads first" in self.init().stdout
        self.await_whole()

    def init(self, *arguments, brokers="a,b,c"):
        """Begin the shard as soon as all of them are there. On a busy machine one may be between two sessions."""

        def ran():
            done = self.command("init", "--brokers", brokers, *arguments)
            return done.returncode != 75 and done

        done = until(ran, "all brokers of the shard")
        assert done.returncode == 0, done.stderr
        return done

    def register(self):
        response = self.client.get("register", params={"raw": ""})
        return decode(response.content, "register") if response.status_code == 200 else None

    def put(self, text):
        self.client.put("register", content=text).raise_for_status()

    def files(self, name):
        return ReplicaFiles(f"{self.root}/{name}/data", "s")

    def ids(self):
        return {name: self.files(name).identity.id for name in BROKERS}

    def events(self, name, event):
        """The fields of each line with this event."""
        lines = (self.root / name / "log").read_text().splitlines()
        found = [line for line in lines if f"event={event} " in line + " "]
        return [dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line)) for line in found]

    def await_event(self, name, event, count=1):
        return until(lambda: len(self.events(name, event)) >= count and self.events(name, event), f"{event} of {name}")

    def alive(self):
        """The brokers whose key is locked."""
        found = self.client.get("", params={"recurse": ""}).json()
        locked = {item["Key"].rpartition("/")[2] for item in found if item.get("Session")}
        return {name for name, id in self.ids().items() if id in locked}

    def await_whole(self):
        """Wait until the leader is there, all are in the ISR, and all have promised that."""

        def is_whole():
            register = self.register()
            return register is not None and {*register.isr} == {*self.ids().values()} and all(
                self.files(name).promised == register for name in BROKERS
            )  # fmt: skip

        try:
            until(is_whole, "a whole shard")
        except AssertionError as error:
            found = [f"{error}; the register: {self.register()}"]
            for name in BROKERS:
                logs = (self.root / name / "log", self.root / name / "pipes/kmq.log")
                said = [line for path in logs if path.exists() for line in path.read_text().splitlines()[-30:]]
                found += [f"{name}, {self.files(name).identity.id}, promised {self.files(name).promised}", *said]
            raise AssertionError("\n".join(found)) from error

    def leader(self):
        register = self.register()
        return next(name for name, id in self.ids().items() if id == register.leader)

    def check(self):
        """Each epoch was led by one broker, and no replica ever promised a lower epoch than before."""
        led = defaultdict(set)
        for name in BROKERS:
            epochs = [int(each["epoch"]) for each in self.events(name, "replica_role")]
            assert epochs == sorted(epochs), (name, epochs)
            for each in self.events(name, "replica_role"):
                if each["role"] == "leading":
                    led[each["epoch"]].add(name)
        assert led and all(len(names) == 1 for names in led.values()), led

    def close(self):
        for process in (*self.processes.values(), *self.stages.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        self.client.close()
        for path in Path("/dev/shm").glob(f"{self.cluster}-*"):
            path.unlink()


@pytest.fixture
def shard(consul, tmp_path):
    made = Shard(consul.address, tmp_path)
    yield made
    made.close()


def test_three_brokers_elect_and_a_killed_leader_is_followed_and_comes_back(shard):
    shard.begin()
    assert shard.leader() == "a" and shard.register().epoch == 1
    began = time.monotonic()
    shard.end("a")
    until(lambda: shard.register().epoch >= 2, "another leader")
    assert time.monotonic() - began < TTL_S + 3.0 + 30.0  # the last number is for a busy machine
    shard.start("a")
    shard.await_whole()
    assert shard.leader() in ("b", "c")
    shard.check()


def test_a_leader_that_is_started_again_at_once_hands_its_epoch_over(shard):
    shard.begin()
    shard.end("a")
    shard.start("a")
    until(lambda: shard.register().epoch >= 2, "another epoch")
    shard.await_whole()
    shard.check()


def test_a_leader_paused_past_its_session_follows_when_it_goes_on(shard):
    shard.begin()
    ids = shard.ids()
    shard.processes["a"].send_signal(signal.SIGSTOP)
    until(lambda: shard.register().epoch >= 2, "another leader")
    assert shard.leader() != "a"
    shard.processes["a"].send_signal(signal.SIGCONT)
    shard.await_whole()
    until(lambda: shard.files("a").promised.epoch == shard.register().epoch, "its promise")
    assert shard.ids() == ids
    shard.check()


def test_where_consul_was_killed_and_is_empty_all_say_so_and_keep_id_and_promise(tmp_path):
    consul = Consul(tmp_path / "consul.log")
    shard = Shard(consul.address, tmp_path)
    try:
        shard.begin()
        ids, register = shard.ids(), shard.register()
        consul.close()
        for name in BROKERS:
            shard.await_event(name, "replica_consul_lost")
        consul.start()
        for name in BROKERS:
            shard.await_event(name, "register_went_back")
        assert shard.ids() == ids and all(shard.files(name).promised == register for name in BROKERS)
        assert shard.register() is None
        found = json.loads(shard.command("status", "--json").stdout)
        assert found["problem"] == "register_went_back" and found["leader"] is None
        refused = shard.command("init", "--brokers", "a,b,c")
        assert refused.returncode == 78 and "Consul was emptied, or restored" in refused.stderr
        shard.put(register.encode())
        for name in BROKERS:
            shard.await_event(name, "register_found_again")
        shard.await_whole()
        shard.check()
    finally:
        shard.close()
        consul.close()


def test_an_emptied_consul_gets_its_register_back_by_recover(shard):
    shard.begin()
    ids, register = shard.ids(), shard.register()
    shard.end("c")
    shard.client.delete("", params={"recurse": ""}).raise_for_status()
    for name in ("a", "b"):
        shard.await_event(name, "register_went_back")
    until(lambda: shard.client.get("", params={"keys": ""}).text.count("/promise") == 2, "both promises")
    dry = shard.command("recover", "--dry-run")
    assert dry.returncode == 0 and f"a, b can go on from version {register.version.number}" in dry.stdout, dry.stderr
    assert "not here: c" in dry.stdout and "nothing was changed" in dry.stdout and shard.register() is None
    asked = shard.command("recover")
    assert asked.returncode == 78 and "give --yes to do it" in asked.stderr and shard.register() is None
    done = shard.command("recover", "--yes")
    assert done.returncode == 0 and "recovered: " in done.stdout, done.stderr
    shard.start("c")
    shard.await_whole()
    assert register.marks == shard.register().marks[: len(register.marks)] and shard.register().epoch >= 3
    assert [shard.ids()[name] for name in ("a", "b")] == [ids["a"], ids["b"]]
    until(lambda: "promise" not in shard.client.get("", params={"keys": ""}).text, "no promise in Consul")
    again = shard.command("recover", "--yes")
    assert again.returncode == 0 and "nothing was changed" in again.stdout
    shard.check()


def test_recover_names_what_each_has_where_too_few_are_there_and_goes_on_from_a_hold(shard):
    shard.begin()
    former = shard.register()
    shard.end("a")
    until(lambda: shard.register().epoch >= 2, "another leader")
    shard.start("a")
    shard.await_whole()
    last = shard.register()
    for name in ("b", "c"):
        shard.end(name)
    shard.put(former.encode())
    shard.await_event("a", "register_went_back")
    until(lambda: shard.alive() == {"a"}, "others to be gone")
    few = shard.command("recover", "--yes")
    assert few.returncode == 1 and "1 of its replicas have promised it, 2 are needed" in few.stderr
    assert all(re.search(f"{name} +{id}", few.stderr) for name, id in shard.ids().items()), few.stderr
    shard.put(last.hold().encode())  # as a run that was killed leaves it
    until(lambda: shard.files("a").promised == shard.register(), "a promise of the hold")
    shard.start("b")
    until(lambda: shard.alive() == {"a", "b"} and shard.files("b").promised == shard.register(), "b")
    done = shard.command("recover", "--yes")
    assert done.returncode == 0, done.stderr
    shard.start("c")
    shard.await_whole()
    shard.check()


def test_a_consul_restored_to_before_a_restart_keeps_nobody_out(tmp_path):
    """It holds the key of the restarted one by a session that died long ago, and whose check passes again."""
    consul = Consul(tmp_path / "consul.log")
    shard = Shard(consul.address, tmp_path)
    try:
        shard.begin()
        ids = shard.ids()
        url = f"http://{consul.address}/v1/snapshot"
        snapshot = httpx.get(url, trust_env=False, timeout=PATIENCE_S).raise_for_status().content
        shard.end("a")
        until(lambda: shard.register().epoch >= 2, "another leader")
        shard.start("a")
        shard.await_whole()
        httpx.put(url, content=snapshot, trust_env=False, timeout=PATIENCE_S).raise_for_status()
        for name in BROKERS:
            shard.await_event(name, "register_went_back")
        shard.await_event("a", "replica_entered", 3)
        assert len(shard.events("a", "replica_own_session_found")) == 1
        done = shard.command("recover", "--yes")
        assert done.returncode == 0, done.stderr
        shard.await_whole()
        assert shard.ids() == ids and all(shard.processes[name].poll() is None for name in BROKERS)
        shard.check()
    finally:
        shard.close()
        consul.close()


def test_a_replica_that_was_away_when_consul_was_restored_waits_for_its_own_session(tmp_path):
    """Consul has it again, under the last mark, and forgets it within two minutes: here a request does, unless it was faster."""
    consul = Consul(tmp_path / "consul.log")
    shard = Shard(consul.address, tmp_path)
    url = f"http://{consul.address}/v1"

    def found():
        return shard.events("a", "replica_own_session_found")

    try:
        shard.begin()
        ids, place = shard.ids(), {"KMQ_REPLICA_PORT": str(free_ports(1)[0])}
        shard.end("a", signal.SIGTERM)
        shard.start("a", **place)
        shard.await_event("a", "replica_entered", 2)
        shard.await_whole()
        snapshot = httpx.get(f"{url}/snapshot", trust_env=False).raise_for_status().content
        shard.end("a")
        until(lambda: ids["a"] not in shard.register().isr, "an ISR without a")
        httpx.put(f"{url}/snapshot", content=snapshot, trust_env=False, timeout=PATIENCE_S).raise_for_status()
        until(lambda: ids["a"] in shard.register().isr and "a" in shard.alive(), "what is restored")
        entered = len(shard.events("a", "replica_entered"))
        shard.start("a", **place)
        until(lambda: found() or len(shard.events("a", "replica_entered")) > entered, "a")
        for each in found():
            httpx.put(f"{url}/session/destroy/{each['session']}", trust_env=False).raise_for_status()
        shard.await_event("a", "replica_entered", entered + 1)
        assert shard.command("recover", "--yes").returncode == 0
        shard.await_whole()
        assert shard.ids() == ids
        shard.check()
    finally:
        shard.close()
        consul.close()


def test_a_register_with_a_former_value_is_obeyed_by_nobody_until_it_is_the_last_again(shard):
    shard.begin()
    former = shard.register().encode()
    shard.end("a")
    until(lambda: shard.register().epoch >= 2, "another leader")
    shard.start("a")
    shard.await_whole()
    last, ids = shard.register(), shard.ids()
    shard.put(former)
    for name in BROKERS:
        shard.await_event(name, "register_went_back")
    assert shard.register().encode() == former and all(shard.files(name).promised == last for name in BROKERS)
    shard.put(last.encode())
    for name in BROKERS:
        shard.await_event(name, "register_found_again")
    shard.await_whole()
    assert shard.ids() == ids
    shard.check()


def test_starts_without_consul_cost_nobody_its_id(shard):
    shard.begin()
    ids = shard.ids()
    for name in BROKERS:
        shard.end(name)
    for start in (1, 2, 3):
        shard.start(*BROKERS, KMQ_CONSUL="127.0.0.1:1")
        for name in BROKERS:
            until(lambda name=name: shard.files(name).identity.coming, "the mark of a start")
            lost = shard.await_event(name, "replica_consul_lost", start)  # once a start, or nobody would know
            assert len(lost) == start
            shard.end(name)
    coming = {shard.files(name).identity.coming for name in BROKERS}
    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered", 2)
    shard.await_whole()
    assert coming == {shard.files(name).identity.starts[-1] for name in BROKERS}, "a start goes on with the mark"
    assert shard.ids() == ids
    shard.check()


def test_a_copy_of_a_running_replica_ends_with_69_and_names_the_holder(shard):
    shard.begin()
    shutil.copytree(f"{shard.root}/b/data", f"{shard.root}/b2/data", ignore=shutil.ignore_patterns("*.new"))
    shard.start("b2")
    assert shard.processes["b2"].wait(timeout=PATIENCE_S) == 69
    [failed] = shard.events("b2", "failed")
    assert "is held by another process (broker b, session" in failed["reason"]
    assert shard.processes["b"].poll() is None


def test_a_second_machine_with_the_name_of_a_running_broker_ends_with_69_and_names_its_place(shard):
    shard.begin()
    register, id = shard.register(), shard.ids()["b"]
    shard.start("b2")
    assert shard.processes["b2"].wait(timeout=PATIENCE_S) == 69
    [failed] = shard.events("b2", "failed")
    assert f"broker b of the shard s runs already (replica {id}, at 127.0.0.1:" in failed["reason"]
    assert shard.processes["b"].poll() is None and shard.register() == register
    assert json.loads(shard.command("status", "--json").stdout)["brokers"]["b"]["replica"] == id


def test_a_copy_that_starts_when_its_original_has_gone_on_is_a_new_replica(shard):
    shard.begin()
    ids = shard.ids()
    shutil.copytree(f"{shard.root}/b/data", f"{shard.root}/b2/data", ignore=shutil.ignore_patterns("*.new"))
    shard.end("b", signal.SIGTERM)
    shard.start("b")
    shard.await_event("b", "replica_entered", 2)
    assert shard.end("b", signal.SIGTERM) == 0
    shard.start("b2")
    [new] = shard.await_event("b2", "replica_new_id")
    assert new["before"] == ids["b"] != new["id"]
    until(lambda: new["id"] in shard.register().isr, "the new replica in the ISR")
    assert ids["b"] not in shard.register().isr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"leader=me", "is no register of a shard; KMQ did not write it"),
        (b"lineage=" + b"0" * 32 + b" level=4 brokers=x\n", "level 4; this release understands 3"),
    ],
)
def test_a_register_that_kmq_did_not_write_stops_all_decisions_and_is_named(shard, text, said):
    shard.begin()
    promised = shard.register()
    shard.put(text)
    for name in BROKERS:
        [found] = shard.await_event(name, "register_unreadable")
        assert (
            said in found["reason"]
            and "replicas/s/register" in found["reason"]
            and repr(text[:40])[2:-1] in found["reason"]
        )
    shown = shard.command("status")
    assert shown.returncode == 1 and said.split(";")[0] in " ".join(shown.stdout.split())
    assert all(shard.files(name).promised == promised for name in BROKERS)
    shard.put(promised.encode())
    shard.await_whole()


def test_records_of_another_lineage_are_never_made_a_replica(shard):
    shard.begin()
    shard.end("c")
    data = f"{shard.root}/c2/data"
    write_data(data, [b"t|0||x"])
    before = sorted(os.listdir(data))
    shard.start("c2")
    code = shard.processes["c2"].wait(timeout=PATIENCE_S)
    [failed] = shard.events("c2", "failed")
    assert code == 65 and "is no replica of this shard; nothing was changed" in failed["reason"]
    assert {*os.listdir(data)} == {*before, "replica"}


def test_a_directory_of_another_shard_and_a_shard_without_consul_end_with_78(shard):
    shard.start("a")
    shard.await_event("a", "replica_entered")
    shard.end("a", signal.SIGTERM)
    for more, said in (
        ({"KMQ_SHARD": "t"}, "is a replica of the shard s"),
        ({"KMQ_CONSUL": ""}, "KMQ_CONSUL is not set; KMQ_SHARD=s needs it"),
        ({"KMQ_REPLICA_SECRET": ""}, "KMQ_REPLICA_SECRET is not set; KMQ_SHARD=s needs it"),
        ({"KMQ_SHARD": ""}, "KMQ_SHARD is not set"),
    ):
        before = len(shard.events("a", "failed"))
        shard.start("a", **more)
        assert shard.processes["a"].wait(timeout=PATIENCE_S) == 78
        assert said in shard.events("a", "failed")[before]["reason"]


def test_resign_hands_the_lead_over_and_does_nothing_elsewhere(shard):
    shard.begin()
    elsewhere = shard.command("resign", broker="b")
    assert elsewhere.returncode == 0 and "b does not lead; nothing was changed" in elsewhere.stdout
    done = shard.command("resign", broker="a")
    successor = done.stdout.split()[0]
    assert done.returncode == 0 and successor in ("b", "c"), done.stderr
    shard.await_whole()
    assert shard.leader() == successor
    shard.check()


def test_resign_waits_until_the_doors_of_another_broker_are_open(shard):
    shard.begin(KMQ_SESSION_TTL="8s", KMQ_REPLICA_LAG="8s")  # on a busy machine nobody else is elected meanwhile
    shard.await_event("a", "doors_opened")
    elsewhere = shard.command("resign", "--wait", broker="b")
    assert elsewhere.returncode == 0 and "b does not lead; nothing was changed" in elsewhere.stdout
    done = shard.command("resign", "--wait", "--timeout", "100s", broker="a")
    assert done.returncode == 0, done.stderr
    successor = done.stdout.split()[0]
    epoch = str(shard.register().epoch)
    assert successor != "a" and [each["epoch"] for each in shard.events(successor, "doors_opened")] == [epoch]
    shard.await_whole()
    for name in {*BROKERS} - {successor}:  # without it nobody puts the record of the epoch into the WAL
        shard.stages[name, "framer"].kill()
        shard.stages[name, "framer"].wait()
    late = shard.command("resign", "--wait", "--timeout", "1s", broker=successor)
    assert late.returncode == 75 and "are not open" in late.stderr, (late.stdout, late.stderr)


def test_init_names_who_is_missing_and_refuses_two_brokers_and_two_full_directories(shard):
    for arguments, said in (
        (["--brokers", "a,b"], "1, 3 or 5 brokers, not 2"),
        (["--brokers", "a,b,c,d"], "1, 3 or 5 brokers, not 4"),
        (["--brokers", "a,b,c", "--min-insync", "1"], "must be between 2 and 3 of 3"),
        (["--brokers", "a,b,c", "--min-insync", "4"], "must be between 2 and 3 of 3"),
    ):
        refused = shard.command("init", *arguments)
        assert refused.returncode == 2 and said in " ".join(refused.stderr.replace("│", "").split()), refused.stderr
    shard.start("a", "b")
    for name in ("a", "b"):
        shard.await_event(name, "replica_entered")
    missing = shard.command("init", "--brokers", "a,b,c")
    assert missing.returncode == 75 and "not there: c;" in missing.stderr
    dry = shard.command("init", "--brokers", "a", "--dry-run")
    assert dry.returncode == 0 and "would be begun" in dry.stdout and shard.register() is None


def test_init_refuses_where_more_than_one_directory_has_records(shard):
    for name in ("a", "b"):
        write_data(f"{shard.root}/{name}/data", [b"t|0||x"])
    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered")
    refused = shard.command("init", "--brokers", "a,b,c")
    assert refused.returncode == 65 and "the directories of a and b have records" in refused.stderr


def test_init_begins_with_the_directory_that_was_named_or_not_at_all(shard):
    write_data(f"{shard.root}/b/data", [b"t|0||x"])
    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered")
    for origin, code, said in (("a", 65, "not a, but b has records"), ("d", 78, "must be one of --brokers a,b,c")):
        refused = shard.command("init", "--brokers", "a,b,c", "--from", origin)
        assert refused.returncode == code and said in refused.stderr and shard.register() is None
    begun = shard.init("--from", "b")
    assert "b leads first" in begun.stdout and shard.register().leader == shard.ids()["b"]


def test_every_example_in_the_help_works_when_pasted(shard):
    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered")
    helps = [
        shard.command(*path, "--help", COLUMNS="80").stdout
        for path in ([], ["init"], ["status"], ["resign"], ["recover"])
    ]
    found = [line.strip() for text in helps for line in text.partition("Examples:")[2].splitlines() if line.strip()]
    lines = sorted(dict.fromkeys(found), key=lambda line: ("init" not in line, "--dry-run" not in line))
    assert len(lines) >= 6 and all(line.startswith("kmq cluster ") for line in lines)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    for line in lines:
        if "status" in line:  # after a resignation the next leader is starting for a moment
            until(lambda: shard.command("status").returncode == 0, "open doors")
        environment = shard.environment("a", PATH=path)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=shard.root)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout, f"{line}: {done.stdout}{done.stderr}"
        if "init" in line and "--dry-run" not in line:
            shard.await_whole()
            until(lambda: shard.command("status").returncode == 0, "open doors")


def test_status_shows_each_replica_and_a_shard_that_was_not_begun(shard):
    shown = shard.command("status")
    assert shown.returncode == 1 and "problem: not begun" in shown.stdout
    shard.begin()
    shown = until(lambda: (found := shard.command("status")).returncode == 0 and found, "a status without a problem")
    assert "led by a since epoch 1; ISR" in shown.stdout, shown.stdout
    found = json.loads(shard.command("status", "--json", broker="b").stdout)
    assert (found["leader"], found["role"], sorted(found["isr"])) == ("a", "following", ["a", "b", "c"])
    assert found["lineage"] == shard.register().lineage
    assert begin(found["lineage"], ["a"], None, "0" * 16).min_insync == 1
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # it accepts and answers nothing
        began = time.monotonic()
        known = shard.command("status", KMQ_CONSUL=f"127.0.0.1:{hanging.getsockname()[1]}")
        assert time.monotonic() - began < 25, "a hanging Consul is waited for"
    assert known.returncode == 1 and "led by a since epoch 1" in known.stdout, known
    assert "problem: consul_unreachable: no answer within 3 s" in " ".join(known.stdout.split()), known.stdout
    shard.end("c")

    def lacks_c():
        shown = shard.command("status")
        return shown.returncode == 1 and "broker_away: c" in shown.stdout

    until(lacks_c, "c named as away")


def test_status_says_how_old_each_row_is_and_who_has_no_way_to_the_leader(shard):
    shard.begin()

    def found():
        return json.loads(shard.command("status", "--json").stdout)

    def are_young():
        return all(time.time() - each["as_of"] < 60 for each in found()["brokers"].values())

    until(are_young, "rows that are not old")
    before = found()["brokers"]["b"]["as_of"]
    until(lambda: found()["brokers"]["b"]["as_of"] > before, "a row that is said anew although nothing has moved")
    until(lambda: [found()["brokers"][name]["role"] for name in "bc"] == ["following"] * 2, "two that follow")
    shard.end("c")
    (shard.root / "other").write_text(uuid.uuid4().hex)  # the leader refuses its connections; Consul does not
    shard.start("c", KMQ_REPLICA_SECRET=f"{shard.root}/other")
    shard.await_event("c", "replica_entered", 2)
    shown = until(lambda: (done := shard.command("status")).stdout.count("not_following: c") and done, "c named")
    assert shown.returncode == 1 and re.search(r"^c +\w+ +waiting +\d+ +\d+ +\d+ s ago", shown.stdout, re.M), (
        shown.stdout
    )
    assert "not_following: b" not in shown.stdout


def test_status_says_leading_only_when_the_doors_are_open(shard):
    def role():
        return json.loads(shard.command("status", "--json").stdout)["role"]

    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered")
    shard.stages["a", "router"].kill()  # so that the first record of the epoch is not routed
    shard.stages["a", "router"].wait()
    assert shard.command("init", "--brokers", "a,b,c").returncode == 0
    assert role() == "starting"
    shard.stages["a", "router"] = shard._start("a", "stages.router", {})
    until(lambda: role() == "leading", "open doors")
    assert shard.events("a", "doors_opened")


def test_a_leader_that_hears_nobody_lets_another_one_lead_although_nothing_was_sent(shard):
    shard.begin(KMQ_SESSION_TTL="12s", KMQ_REPLICA_LAG="2s")
    until(lambda: shard.events("a", "doors_opened"), "open doors")
    for name in ("b", "c"):  # their sessions last longer than the lag: as if only their connections were cut
        shard.processes[name].send_signal(signal.SIGSTOP)
    assert until(lambda: shard.leader() != "a", "another leader")


@pytest.mark.parametrize("what", ["role", "framed"])
def test_a_follower_whose_page_or_ring_was_removed_follows_anew(shard, what):
    shard.begin()
    shard.await_event("b", "leader_followed")
    Path(f"/dev/shm/{shard.cluster}-b.{what}").unlink()
    assert shard.processes["b"].wait(timeout=PATIENCE_S) == 75
    shard.start("b")

    def follows():
        for stage in ("framer", "durability", "router"):  # as their supervisor does
            if shard.stages["b", stage].poll() is not None:
                shard.stages["b", stage] = shard._start("b", f"stages.{stage}", {})
        return len(shard.events("b", "leader_followed")) > 1

    until(follows, "a follower again")


def test_a_renewed_certificate_is_shown_to_new_connections_without_a_restart(shard, tmp_path):
    cert, key = Authority(tmp_path / "tls").issue("shared")
    shard.begin(KMQ_TLS_CERT=str(cert), KMQ_TLS_KEY=str(key), KMQ_TLS_HOST="127.0.0.1")
    ids, pid = shard.ids(), shard.processes["b"].pid

    def shown(name):
        note = shard.client.get(ids[name], params={"raw": ""}).text
        host, _, port = re.search(r"replica=(\S+)", note)[1].rpartition(":")
        with contextlib.suppress(OSError):  # the port before its start
            return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S)

    before = shown("a")
    assert before == cert.read_text()
    good = key.read_bytes()
    key.write_text("half of a key\n")
    for name in BROKERS:
        shard.await_event(name, "certificates_kept")
    followed = {name: len(shard.events(name, "leader_followed")) for name in "bc"}
    shard.end("a")
    until(lambda: shard.register().epoch > 1, "another leader")
    follower = "b" if shard.leader() == "c" else "c"
    shard.await_event(follower, "leader_followed", followed[follower] + 1)
    key.write_bytes(good)
    shard.start("a", KMQ_TLS_CERT=str(cert), KMQ_TLS_KEY=str(key), KMQ_TLS_HOST="127.0.0.1")
    Authority(tmp_path / "tls").issue("shared")
    for name in BROKERS:
        until(lambda name=name: shown(name) == cert.read_text() != before, "the new certificate")
    shard.await_whole()
    assert shard.processes["b"].poll() is None and shard.processes["b"].pid == pid


def test_where_all_must_have_a_message_a_lost_leader_is_followed_but_nothing_is_committed_until_it_is_back(shard):
    shard.start(*BROKERS)
    for name in BROKERS:
        shard.await_event(name, "replica_entered")
    shard.init("--min-insync", "3")
    shard.await_whole()
    shard.await_event("a", "doors_opened")
    with open(shard.root / "a" / "pipes" / "raw", "wb") as raw:
        raw.write(b"t|0||kept\n")
    data = {name: f"{shard.root}/{name}/data" for name in BROKERS}
    until(lambda: {committed.shown_seq(each) for each in data.values()} == {2}, "the line, committed, on all disks")
    shard.end("a")
    until(lambda: shard.register().epoch > 1 and shard.leader() in "bc", "another leader")
    for name in "bc":
        until(lambda name=name: wal.last_stored(data[name])[0] > 2, "the record of another epoch")
        assert committed.shown_seq(data[name]) == 2, "it is not committed"
        assert not shard.events(name, "doors_opened")
    assert len(shard.register().isr) == 3, "who is away may have what others lack"
    shard.start("a")

    def is_open():
        return [each for name in BROKERS for each in shard.events(name, "doors_opened") if int(each["epoch"]) > 1]

    until(is_open, "an open door")
    shard.await_whole()
    for each in data.values():
        until(lambda each=each: committed.shown_seq(each) > 2, "more in its queues")
        assert b"||kept\n" in next(reader.read(each, 2, 2))
    shard.check()


@pytest.fixture
def small_disk(shard):
    """The data directory of broker c on a disk of its own. Yields a file that fills it when it is written."""
    data = shard.root / "c" / "data"
    data.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", data], capture_output=True, text=True)
    if done.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no mount here (needs root): {done.stderr}")
    yield data / "filler"
    shard.close()
    subprocess.run(["umount", "-l", data], check=True)


@pytest.mark.root
def test_a_replica_without_room_for_its_promise_gives_its_key_back_and_returns(shard, small_disk):
    shard.begin()
    ids = shard.ids()
    with contextlib.suppress(OSError), small_disk.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    shard.end("a")
    [full] = shard.await_event("c", "disk_full")
    assert full["file"].startswith(str(small_disk.parent)) and full["effect"]
    until(lambda: "c" not in shard.alive(), "its key to be free")
    shard.start("a")
    until(lambda: shard.leader() in "ab" and {"a", "b"} <= shard.alive(), "a leader with room")
    assert shard.processes["c"].poll() is None and len(shard.events("c", "disk_full")) == 1
    status = json.loads(shard.command("status", "--json", group="", broker="c").stdout)
    assert "disk_full" in {reason["code"] for reason in status["reasons"]}, status["reasons"]
    small_disk.unlink()
    shard.await_event("c", "disk_space_recovered")
    shard.await_whole()
    assert shard.ids() == ids and shard.processes["c"].poll() is None
    shard.check()
