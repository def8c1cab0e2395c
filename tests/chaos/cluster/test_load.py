"""Load and judge together, on what is not replicated: one broker that is killed is found good, two brokers are no shard."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from chaos.cluster.judge import judge, load_replica
from chaos.cluster.load import PARTITIONS, TOPIC, Clients
from chaos.cluster.shard import ShardBroker
from chaos.cluster.witness import Witness
from chaos.network import NET, Network, open_network


@pytest.fixture
def network() -> Iterator[Network]:
    with open_network() as made:
        yield made


@pytest.fixture
def brokers(network: Network, tmp_path: Path, cleanup: ExitStack) -> Iterator[list[ShardBroker]]:
    """Two brokers that know nothing of each other, up, with the topic."""
    made = []
    for name, number in (("a", 11), ("b", 12)):
        network.add(number)
        broker = ShardBroker(tmp_path / name, name, network.inside(number), {})
        cleanup.callback(broker.close)
        broker.up()
        declared = broker.kmq("topics", "create", TOPIC, "--partitions", str(PARTITIONS))
        assert declared.returncode == 0, declared.stderr
        made.append(broker)
    network.add(101)
    yield made


def test_one_broker_that_is_killed_under_load_is_found_good(
    network: Network, brokers: list[ShardBroker], tmp_path: Path, rng: random.Random
) -> None:
    broker = brokers[0]
    witness = Witness(tmp_path / "witness", {"a": broker.data})
    witness.start()
    with closing(Clients(tmp_path / "clients", network.namespace(101), [f"{NET}.11"], rng)) as clients:
        for _ in range(3):
            since = time.monotonic()
            broker.wait(lambda since=since: clients.acked_since(since), "acknowledgements")
            broker.kill_all()
            broker.up()
        clients.finish_writing()
        broker.wait_routed(int(broker.wal()[-1].split(b"|", 1)[0]))
        clients.finish_reading(lambda: load_replica("a", broker.data))
        broker.kill_all()
        witness.finish()
        verdict = judge(clients.history(), [load_replica("a", broker.data)], witness.root)
    print(verdict)
    assert not verdict.counts and {"Answer", "Poll", "Ends", "Commit"} <= verdict.operations.keys()


def test_two_brokers_that_do_not_replicate_are_found_out(
    network: Network, brokers: list[ShardBroker], tmp_path: Path, rng: random.Random
) -> None:
    """The doors take turns, so every claim about one log of all is broken, and the judge sees it."""
    addresses = [f"{NET}.11", f"{NET}.12"]
    with closing(Clients(tmp_path / "clients", network.namespace(101), addresses, rng)) as clients:
        brokers[0].wait(lambda: all(len(broker.wal()) > 200 for broker in brokers), "records on both")
        clients.finish_writing()
    replicas = [load_replica(broker.name, broker.data) for broker in brokers]
    verdict = judge(clients.history(), replicas, settled=False)
    print(verdict)
    assert {"WALs differ", "logs differ", "answered twice", "lost ack"} <= verdict.kinds
