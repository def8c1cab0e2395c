"""The copy of a shard off its machines, with a real Consul: a leader killed in mid copy, and a shard whose disks are lost."""

import gzip
import json
import shutil
import subprocess
import sys
import threading

import pytest
from test_shard import BROKERS
from test_shard_status import PORTS, Brokers
from waiting import until

from kmq.log import committed, identity, reader
from kmq.log.rows import full_key
from kmq.tier.commits import CommitLog, decode
from kmq.tier.store import get, open_store

MESSAGES = 20_000


class Copied(Brokers):
    """Brokers whose copy is in a directory beside them, in small objects."""

    def environment(self, name, **more):
        tier = {"KMQ_TIER": f"file://{self.root}/store", "KMQ_TIER_EVERY": "100ms", "KMQ_TIER_OBJECT": "1 MiB"}
        return super().environment(name, **tier | more)

    def up(self, **more):
        for name in BROKERS:
            until(lambda name=name: self.is_up(name, **more), f"{name} is up")

    def is_up(self, name, **more):
        """Start it. Some seconds after a kill another data directory is refused in its place (75)."""
        started = self.kmq(name, "up", "--no-gateway", **more)
        assert started.returncode in (0, 75), started.stderr
        return started.returncode == 0

    def produce(self, name, text, **more):
        """Send lines; the leader may be changing."""

        def done():
            sent = self.send(name, text, **more)
            return sent.returncode == 0 and sent

        return until(done, f"messages by {name}")

    def send(self, name, text, **more):
        argv = [sys.executable, "-m", "kmq", "produce", "--raw", "--producer", "p"]
        env = self.environment(name, **PORTS | more)
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, env=env, cwd=self.root / name, timeout=120
        )

    def data(self, name):
        return str(self.root / name / "data")

    def wal(self, name):
        data = self.data(name)
        last = committed.shown_seq(data)
        return b"".join(reader.read(data, reader.first_seq(data), last))

    def copy(self, name):
        """What the store has of the lineage of this broker."""
        store, lineage = open_store(f"file://{self.root}/store"), identity.lineage(self.data(name))
        rows = CommitLog(store, lineage, "reader@here").read().wal
        return b"".join(gzip.decompress(get(store, full_key(lineage, row.values["key"]))) for row in rows)

    def epochs(self, name):
        """The epochs of the claims, in order; 0 for that of a restore."""
        store, lineage = open_store(f"file://{self.root}/store"), identity.lineage(self.data(name))
        commits = [decode(get(store, key), int(key[-20:])) for key in store.names(f"{lineage}/commits")]
        return [int(each.values.get("epoch", 0)) for commit in commits for each in commit.lines if each.verb == "claim"]

    def is_copied(self, name):
        return len(self.wal(name)) > 0 and self.copy(name) == self.wal(name)


@pytest.fixture
def shard(consul, tmp_path):
    made = Copied(consul.address, tmp_path)
    yield made
    made.close()


def lines():
    return "".join(f"orders.k{n % 7}|0|{n}|{'x' * 300} {n}\n" for n in range(1, MESSAGES + 1))


def test_a_leader_killed_in_mid_copy_is_followed_and_a_lost_shard_comes_back(shard):
    shard.up()
    shard.init()
    shard.await_whole()
    leader = shard.leader()
    sending = threading.Thread(target=shard.send, args=(leader, lines()))
    sending.start()
    until(lambda: len(shard.copy(leader)) > 1 << 20, "some objects of the copy")
    shard.kill(leader)
    sending.join()
    other = next(name for name in BROKERS if name != leader)
    until(lambda: shard.register().epoch >= 2 and shard.leader() != leader, "another leader")
    shard.produce(other, lines())  # those that it has are known
    until(lambda: shard.is_copied(shard.leader()), "the copy is whole")
    assert shard.copy(other).count(b"|orders.") == MESSAGES
    epochs = shard.epochs(other)
    assert epochs == sorted(epochs) and epochs[-1] >= 2
    assert shard.kmq(leader, "up", "--no-gateway").returncode == 0
    shard.await_whole()
    until(lambda: "event=tier_follows" in (shard.root / leader / "pipes/kmq.log").read_text(), "it follows")
    assert not [each for each in shard.status(leader)["warnings"] if each["code"].startswith("tier")]
    assert shard.kmq(other, "tier", "verify", "--deep").returncode == 0
    shown = json.loads(shard.kmq(leader, "tier", "status", "--json").stdout)
    assert shown["problem"].startswith("follows: ")

    before = shard.copy(other)
    for name in BROKERS:
        shard.kill(name)
        shutil.rmtree(shard.root / name / "data")
    new = {"KMQ_SHARD": "s2"}
    restored = shard.kmq("a", "restore", "--yes", **new)
    assert restored.returncode == 0 and "kmq cluster init --from" in restored.stdout, restored.stderr
    shard.up(**new)

    def begun():
        done = shard.command("init", "--shard", "s2", "--brokers", "a,b,c", "--from", "a", **new)
        return done.returncode != 75 and done

    done = until(begun, "all brokers of the new shard")
    assert done.returncode == 0, done.stderr
    shard.produce("b", lines(), **new)  # each id is known
    shard.produce("b", "orders.k1|0|9000000|new\n", **new)
    until(lambda: b"|new\n" in shard.wal("c"), "the new message, at a follower")
    found = shard.wal("c")
    assert found.startswith(before) and found.count(b"|orders.") == before.count(b"|orders.") + 1
    until(lambda: shard.is_copied("a"), "the new shard is copied", lambda: (shard.root / "a/pipes/kmq.log").read_text())
    assert shard.epochs("a")[-1] > epochs[-1]
