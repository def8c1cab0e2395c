"""A shard under load while everything that can befall it does: nothing acknowledged is lost, and nothing contradicts itself.

The load knows one address (service.py), behind which the doors of all brokers take turns. The judge reads what clients
were told, and files.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from brokers import STAGES

from chaos.cluster.judge import Store, Verdict, judge, load_replica
from chaos.cluster.load import PARTITIONS, TOPIC, Clients
from chaos.cluster.shard import BROKERS, Shard, open_shard
from chaos.history import encode
from chaos.network import NET

SEED = 30


class Trial:
    """A shard under load, and what befalls it. Each fault is a method; `heal` ends them all."""

    def __init__(self, shard: Shard, rng: random.Random, cleanup: ExitStack) -> None:
        self.shard, self.rng, self.began = shard, rng, time.monotonic()
        made = shard.brokers[shard.leader()].kmq("topics", "create", TOPIC, "--partitions", str(PARTITIONS))
        assert made.returncode == 0, made.stderr
        namespace = shard.network.namespace(shard.consul.client())
        addresses = [f"{NET}.{number}" for number in BROKERS.values()]
        self.clients = cleanup.enter_context(closing(Clients(shard.root / "clients", namespace, addresses, rng)))
        self.faults: Counter[str] = Counter()
        shard.wait(lambda: self.clients.acked_since(0.0), "a first acknowledgement")

    def faults_of(self, name: str) -> dict[str, Callable[[], None]]:
        """What can befall this broker, or the shard around it."""
        shard, number = self.shard, BROKERS[name]
        others = [BROKERS[other] for other in shard.others(name)]
        server = self.rng.choice(shard.consul.servers)
        return {
            "kill": lambda: shard.kill(name),
            "kill all": lambda: shard.kill(*BROKERS),
            "kill a stage": lambda: self._kill(name, f"stages.{self.rng.choice(STAGES)}"),
            "kill replica": lambda: self._kill(name, "kmq.replica"),
            "pause": lambda: shard.pause(name),
            "power cut": lambda: shard.cut_power(name),
            "power cut of all": lambda: shard.cut_power(*BROKERS),
            "full disk": lambda: shard.fill(name),
            "resign": lambda: shard.brokers[name].kmq("cluster", "resign"),
            "restart": lambda: shard.brokers[name].kmq("down"),
            "cut off": lambda: shard.cut_off(name),
            "cut from the others": lambda: shard.cut_off(name, consul=False),
            "cut from Consul": lambda: shard.cut_from_consul(name),
            "one way out": lambda: [shard.network.cut(number, other) for other in others],
            "one way in": lambda: [shard.network.cut(other, number) for other in others],
            "chain": lambda: shard.network.split([number], others[:1]),
            "loss": lambda: [self._lose(number, other) for other in others],
            "kill a server of Consul": server.kill,
            "kill Consul": lambda: [each.kill() for each in shard.consul.servers],
            "all without Consul": lambda: shard.cut_from_consul(*BROKERS),
        }

    def _kill(self, name: str, module: str) -> None:
        self.shard.brokers[name].signal(signal.SIGKILL, module)  # it may be away already, by another fault

    def _lose(self, one: int, other: int) -> None:
        self.shard.network.lose(one, other, 0.2)
        self.shard.network.lose(other, one, 0.2)

    def befall(self, fault: str, name: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} {fault} {name}", flush=True)
        self.faults[fault] += 1
        self.faults_of(name)[fault]()

    def something(self) -> None:
        """One fault or two at once, for some seconds; then all is healed, and a new message acknowledged."""
        leader = self.shard.leader()
        names = [leader] if self.rng.random() < 0.6 else [self.rng.choice(self.shard.others(leader))]
        if self.rng.random() < 0.3:
            names.append(self.rng.choice(sorted(BROKERS)))
        what = []
        for name in names:
            fault = self.rng.choice(sorted(self.faults_of(name)))
            what.append(f"{fault} {name}")
            self.befall(fault, name)
        time.sleep(self.rng.uniform(0.5, 6.0))  # how long it lasts is what is tried
        self.heal(", ".join(what))

    def one(self, fault: str, of_leader: bool) -> None:
        """One fault of a whole shard, for longer than a session and the lag."""
        self.shard.wait_whole()
        leader = self.shard.leader()
        self.befall(fault, leader if of_leader else self.shard.others(leader)[0])
        time.sleep(5)
        self.heal(fault)

    def heal(self, what: str) -> None:
        self.shard.heal(what)
        healed = self.shard.healed[-1].ended
        self.shard.wait(lambda: self.clients.acked_since(healed), f"an acknowledgement after {what}")
        ended = (
            self.shard.faults_ended
        )  # here dead brokers begin to start; the judge counts from the end of their starts
        took = self.clients.first_ack_since(ended) - ended
        print(f"{time.monotonic() - self.began:6.1f} healed, acked {took:.1f} s after the end of {what}", flush=True)

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

    def _is_settled(self) -> bool:
        verdict = Verdict()
        Store(self.shard.replicas(), verdict).check_settled()
        return not verdict.counts


@pytest.fixture
def seeded() -> random.Random:
    """CHAOS_SEED=<n> replays another run, as far as the scheduler lets it."""
    seed = int(os.environ.get("CHAOS_SEED", SEED))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def trial(tmp_path: Path, seeded: random.Random, cleanup: ExitStack) -> Iterator[Trial]:
    with open_shard(tmp_path / "shard") as shard, cleanup:
        yield Trial(shard, seeded, cleanup)


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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cuts", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_nothing_acknowledged_is_lost_in_power_cuts_of_all_brokers(trial: Trial, cuts: int) -> None:
    for _ in range(cuts):
        time.sleep(trial.rng.uniform(0.0, 1.0))  # the moment is what is tried
        trial.befall("power cut of all", "a")
        trial.heal("power cut of all")
    trial.end()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("of_leader", [True, False], ids=["leader", "follower"])
def test_each_fault_by_itself_is_survived(trial: Trial, of_leader: bool) -> None:
    for fault in sorted(trial.faults_of("a")):
        trial.one(fault, of_leader)
    trial.end()


@pytest.mark.timeout(600)
def test_rolling_restarts_and_some_faults_of_a_follower_lose_nothing(trial: Trial) -> None:
    """CHAOS_SEED chooses the faults."""
    began = time.monotonic()
    for name in sorted(BROKERS):
        trial.shard.wait_whole()
        trial.befall("restart", name)
        trial.heal(f"restart {name}")
    print(f"no acknowledgement for {trial.clients.longest_pause(began):.1f} s at most, while all were restarted")
    for fault in trial.rng.sample(sorted(trial.faults_of("a")), 2):
        trial.one(fault, of_leader=False)
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


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loss", ["restored", "emptied"])
def test_a_register_that_went_back_loses_nothing_and_recover_rebuilds_it(trial: Trial, loss: str) -> None:
    shard, leader = trial.shard, trial.shard.leader()
    shard.consul.snapshot("save", shard.root / "consul.snapshot")
    trial.befall("kill", leader)
    shard.wait(lambda: shard.register().leader != leader, "another leader")
    trial.heal("kill")
    shard.wait_whole()
    if loss == "restored":
        shard.consul.snapshot("restore", shard.root / "consul.snapshot")
    else:
        shard.empty_consul()
    for broker in shard.brokers.values():
        shard.wait(lambda broker=broker: "event=register_went_back" in broker.log(), f"{broker.name} says so")
    recovered = shard.brokers["a"].kmq("cluster", "recover", "--shard", "s", "--yes")
    assert recovered.returncode == 0, recovered.stderr
    trial.heal(f"Consul {loss}")
    trial.end()
