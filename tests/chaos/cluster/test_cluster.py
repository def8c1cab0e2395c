"""A shard under load while everything that can befall it does: nothing acknowledged is lost, and nothing contradicts itself.

The load knows one address (service.py), behind which the doors of all brokers take turns. The judge reads what clients
were told, and files.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from brokers import STAGES

from chaos.cluster.direct import TOPIC as TOPIC_OF_DIRECT
from chaos.cluster.judge import Store, Verdict, judge, load_replica
from chaos.cluster.load import PARTITIONS, TESTS, TOPIC, Clients
from chaos.cluster.shard import BROKERS, SERVERS, TTL_S, Shard, open_shard
from chaos.history import encode
from chaos.network import NET

SEED = 30
LAG_S = 2.0  # KMQ_REPLICA_LAG of the shard
AWAY_S = 25.0  # on a busy machine; alone it takes 3
# Not together with another fault, and of a whole shard: with a second disk what only they had would be gone, and Consul
# cannot be restored while it is away.
ALONE = {"wipe", "restore", "clone", "Consul restored", "Consul emptied"}


class Trial:
    """A shard under load, and what befalls it: FAULTS. `heal` ends them all."""

    def __init__(self, shard: Shard, rng: random.Random, cleanup: ExitStack, strace: str) -> None:
        self.shard, self.rng, self.strace, self.began = shard, rng, strace, time.monotonic()
        made = shard.brokers[shard.leader()].kmq("topics", "create", TOPIC, "--partitions", str(PARTITIONS))
        assert made.returncode == 0, made.stderr
        namespace = shard.network.namespace(shard.consul.client())
        addresses = [f"{NET}.{number}" for number in BROKERS.values()]
        self.clients = cleanup.enter_context(closing(Clients(shard.root / "clients", namespace, addresses, rng)))
        self.faults: Counter[str] = Counter()
        shard.wait(lambda: self.clients.acked_since(0.0), "a first acknowledgement")

    def others(self, name: str) -> list[int]:
        """The numbers of the brokers that this one is not."""
        return [BROKERS[other] for other in self.shard.others(name)]

    def kill(self, name: str, module: str) -> None:
        self.shard.brokers[name].signal(signal.SIGKILL, module)  # it may be away already, by another fault

    def restore(self, name: str) -> None:
        self.shard.copy(name)
        self.shard.wait_whole()
        since = time.monotonic()
        self.shard.wait(lambda: self.clients.acked_since(since), "an acknowledgement that the copy does not have")
        self.shard.restore(name)

    def restart_agent(self, name: str) -> None:
        self.shard.agent(name).kill()
        self.shard.agent(name).start()

    def lose(self, one: int, other: int) -> None:
        self.shard.network.lose(one, other, 0.2)
        self.shard.network.lose(other, one, 0.2)

    def befall(self, fault: str, name: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} {fault} {name}", flush=True)
        self.faults[fault] += 1
        FAULTS[fault](self, name)

    def something(self) -> None:
        """One fault or two at once, for some seconds; then all is healed, and a new message acknowledged."""
        leader = self.shard.leader()
        names = [leader] if self.rng.random() < 0.6 else [self.rng.choice(self.shard.others(leader))]
        if self.rng.random() < 0.3:
            names.append(self.rng.choice(sorted(BROKERS)))
        faults = self.rng.choices(sorted(FAULTS), k=len(names))
        if alone := ALONE.intersection(faults):
            self.shard.wait_whole()
            names, faults = names[:1], sorted(alone)[:1]
        for fault, name in zip(faults, names, strict=True):
            self.befall(fault, name)
        time.sleep(self.rng.uniform(0.5, 6.0))  # how long it lasts is what is tried
        self.heal(", ".join(f"{fault} {name}" for fault, name in zip(faults, names, strict=True)))

    def one(self, fault: str, of_leader: bool) -> None:
        """One fault of a whole shard, for longer than a session and the lag."""
        self.shard.wait_whole()
        leader, began = self.shard.leader(), time.monotonic()
        self.befall(fault, leader if of_leader else self.shard.others(leader)[0])
        time.sleep(5)
        self.heal(fault)
        print(f"no acknowledgement for {self.clients.longest_pause(began):.1f} s at most, from then on")

    def heal(self, what: str) -> None:
        shard = self.shard
        shard.heal(what)
        healed, now = shard.healed[-1].ended, time.monotonic()
        shard.wait(lambda: self.clients.acked_since(healed), f"an acknowledgement after {what}")
        took = self.clients.first_ack_since(shard.faults_ended) - shard.faults_ended
        ended, cost = shard.faults_ended, healed - shard.faults_ended
        print(
            f"{time.monotonic() - self.began:6.1f} healed, acked {took:.1f} s after the end of {what};"
            f" all had started after {now - ended:.1f} s, {cost:.1f} s of them computed, or waiting for a core",
            flush=True,
        )

    def end(self, healed_s: float = 10.0) -> None:
        """Let everything arrive everywhere; then nothing is wrong."""
        shard = self.shard
        shard.wait_whole()
        self.clients.finish_writing()
        leader = shard.brokers[shard.leader()]
        self.clients.finish_reading(lambda: load_replica(leader.name, leader.data))
        shard.wait(self._is_settled, "all of it on every broker")
        shard.stop()
        history = [*self.clients.history(), *shard.healed]
        (shard.root / "histories").mkdir()
        (shard.root / "histories" / "all").write_text("".join(f"{encode(each)}\n" for each in history))
        replicas = shard.replicas()
        verdict = judge(history, replicas, shard.witness.root, healed_s=healed_s)
        print(dict(self.faults), {each.name: f"{len(each.wal)} records, {len(each.cuts)} cuts" for each in replicas})
        print(verdict)
        assert not verdict.counts, f"{verdict}\n{shard.tail()}"
        assert not self.clients.wrong(), f"{self.clients.wrong()}\n{shard.tail()}"

    def _is_settled(self) -> bool:
        verdict = Verdict()
        Store(self.shard.replicas(), verdict).check_settled()
        return not verdict.counts


FAULTS: dict[str, Callable[[Trial, str], object]] = {  # what can befall this broker, or the shard around it
    "kill": lambda trial, name: trial.shard.kill(name),
    "kill all": lambda trial, name: trial.shard.kill(*BROKERS),
    "kill a stage": lambda trial, name: trial.kill(name, f"stages.{trial.rng.choice(STAGES)}"),
    "kill replica": lambda trial, name: trial.kill(name, "kmq.replica"),
    "pause": lambda trial, name: trial.shard.pause(name),
    "power cut": lambda trial, name: trial.shard.cut_power(name),
    "power cut of all": lambda trial, name: trial.shard.cut_power(*BROKERS),
    "full disk": lambda trial, name: trial.shard.fill(name),
    "failed syncs": lambda trial, name: trial.shard.fail_syncs(name, "stages.durability", trial.strace),
    "failed syncs of replica": lambda trial, name: trial.shard.fail_syncs(name, "kmq.replica", trial.strace),
    "wipe": lambda trial, name: trial.shard.wipe(name),
    "restore": lambda trial, name: trial.restore(name),
    "clone": lambda trial, name: trial.shard.clone(name),
    "clock ahead": lambda trial, name: trial.shard.clocks[name].set(7200),
    "clock back": lambda trial, name: trial.shard.clocks[name].set(-7200),
    "resign": lambda trial, name: trial.shard.brokers[name].kmq("cluster", "resign"),
    "restart": lambda trial, name: trial.shard.brokers[name].kmq("down"),
    "cut off": lambda trial, name: trial.shard.cut_off(name),
    "cut from the others": lambda trial, name: trial.shard.cut_off(name, consul=False),
    "cut from Consul": lambda trial, name: trial.shard.cut_from_consul(name),
    "one way out": lambda trial, name: [trial.shard.network.cut(BROKERS[name], other) for other in trial.others(name)],
    "one way in": lambda trial, name: [trial.shard.network.cut(other, BROKERS[name]) for other in trial.others(name)],
    "chain": lambda trial, name: trial.shard.network.split([BROKERS[name]], trial.others(name)[:1]),
    "loss": lambda trial, name: [trial.lose(BROKERS[name], other) for other in trial.others(name)],
    "delay": lambda trial, name: trial.shard.network.delay(
        BROKERS[name], [*trial.others(name), *SERVERS], trial.rng.choice([0.2, 0.5, 3.0])
    ),
    "kill a server of Consul": lambda trial, name: trial.rng.choice(trial.shard.consul.servers).kill(),
    "restart the agent of Consul": lambda trial, name: trial.restart_agent(name),
    "kill Consul": lambda trial, name: [each.kill() for each in trial.shard.consul.servers],
    "all without Consul": lambda trial, name: trial.shard.cut_from_consul(*BROKERS),
    "Consul restored": lambda trial, name: trial.shard.restore_consul(name),
    "Consul emptied": lambda trial, name: trial.shard.empty_consul(),
}


@pytest.fixture
def seeded() -> random.Random:
    """CHAOS_SEED=<n> replays another run, as far as the scheduler lets it."""
    seed = int(os.environ.get("CHAOS_SEED", SEED))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def trial(tmp_path: Path, seeded: random.Random, cleanup: ExitStack, strace: str) -> Iterator[Trial]:
    with open_shard(tmp_path / "shard") as shard, cleanup:
        yield Trial(shard, seeded, cleanup, strace)


@pytest.mark.sampled(2, group="trials")
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_contradicts_itself_for_90_seconds(trial: Trial) -> None:
    while time.monotonic() < trial.began + 90:
        trial.something()
    trial.end()


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_soak_nothing_is_lost_or_contradicts_itself(trial: Trial) -> None:
    while time.monotonic() < trial.began + 15 * 60:
        trial.something()
    trial.end()


@pytest.mark.sampled(2, group="trials")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cuts", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_nothing_acknowledged_is_lost_in_power_cuts_of_all_brokers(trial: Trial, cuts: int) -> None:
    for _ in range(cuts):
        time.sleep(trial.rng.uniform(0.0, 1.0))  # the moment is what is tried
        trial.befall("power cut of all", "a")
        trial.heal("power cut of all")
    trial.end()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("of_leader", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_by_itself_is_survived(trial: Trial, fault: str, of_leader: bool) -> None:
    trial.one(fault, of_leader)
    trial.end()


@pytest.mark.sampled(2, group="trials")
@pytest.mark.timeout(600)
def test_rolling_restarts_and_some_faults_lose_nothing(trial: Trial) -> None:
    """CHAOS_SEED chooses the faults."""
    began = time.monotonic()
    for name in sorted(BROKERS):
        trial.shard.wait_whole()
        trial.befall("restart", name)
        trial.heal(f"restart {name}")
    print(f"no acknowledgement for {trial.clients.longest_pause(began):.1f} s at most, while all were restarted")
    for number, fault in enumerate(trial.rng.sample(sorted(FAULTS), 3)):
        trial.one(fault, of_leader=number % 2 > 0)
    trial.end()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_wiped_and_restored_disks_come_back_as_new_replicas(trial: Trial) -> None:
    for name in sorted(BROKERS):
        trial.shard.wait_whole()
        trial.shard.wipe(name)
        trial.heal(f"wipe {name}")
        trial.shard.wait_whole()
        trial.shard.copy(name)
        trial.heal(f"copy {name}")
        trial.shard.wait_whole()
        since = time.monotonic()
        trial.shard.wait(lambda since=since: trial.clients.acked_since(since), "an acknowledgement")
        trial.shard.restore(name)
        trial.heal(f"restore {name}")
    trial.end()


@pytest.mark.sampled(2, group="trials")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["cut off", pytest.param("pause", marks=pytest.mark.soak)])
def test_clients_of_a_leader_that_is_away_are_answered_elsewhere(
    tmp_path: Path, cleanup: ExitStack, fault: str
) -> None:
    """The cut lasts longer than any of them waits. They know all addresses, and begin at the leader's."""
    with open_shard(tmp_path / "shard") as shard, cleanup:
        shard.network.add(101)
        leader = shard.leader()
        made = shard.brokers[leader].kmq("topics", "create", TOPIC_OF_DIRECT, "--partitions", "1")
        assert made.returncode == 0, made.stderr
        hosts = [f"{NET}.{BROKERS[name]}" for name in (leader, *shard.others(leader))]
        argv = [*shard.network.inside(101), sys.executable, "-m", "chaos.cluster.direct", "150", *hosts]
        path = f"{TESTS}{os.pathsep}{TESTS.parent}"
        said = tmp_path / "answers"
        with said.open("w") as out:
            clients = subprocess.Popen(argv, stdout=out, env=os.environ | {"PYTHONPATH": path})
        cleanup.callback(clients.wait)
        cleanup.callback(clients.kill)

        def answered_since(moment: float) -> set[str]:
            rows = [line.split() for line in said.read_text().splitlines()]
            return {row[0] for row in rows if len(row) == 2 and float(row[1]) > moment}

        kinds = {"producer", "consumer", "kafka"}
        shard.wait(lambda: answered_since(0.0) == kinds, f"an answer to each of {kinds}")
        began = time.monotonic()
        (shard.pause if fault == "pause" else shard.cut_off)(leader)
        # Within TTL and lag nothing may be decided; the rest is the machine's.
        awaited = (
            {"producer", "consumer"} if fault == "pause" else kinds
        )  # librdkafka asks a stopped broker for a minute
        shard.wait(lambda: shard.register().leader != leader, "another leader")
        elected = time.monotonic()
        shard.wait(lambda: answered_since(elected) >= awaited, f"{awaited}", lambda: answered_since(elected))
        print(
            f"{fault}: elected after {elected - began:.1f} s, all were answered after {time.monotonic() - began:.1f} s"
        )
        assert time.monotonic() - began < TTL_S + LAG_S + AWAY_S, said.read_text()[-2000:]
        shard.heal(fault)
        shard.wait_whole()
        assert shard.register().leader != leader
