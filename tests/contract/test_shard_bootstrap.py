"""Followers that need the leader's files: brokers by `kmq up`, a real Consul, directories compared byte by byte."""

import contextlib
import os
import re
import shutil
import signal
import socket
import threading

import pytest
from comparing import compared
from made_data import append, write_data
from made_up import no_room
from test_shard import BROKERS
from test_shard_status import Brokers
from waiting import until

from kmq.log import checkpoint, committed, dropped, index, wal

ALONE = {"KMQ_SHARD": ""}
SMALL = {"KMQ_SEGMENT_BYTES": "64KiB"}
SLOW = {"KMQ_REPLICA_LAG": "6s", "KMQ_SESSION_TTL": "6s"}  # a busy machine elects nobody


class Copies(Brokers):
    """Brokers of which one begins with records, or loses them."""

    def data(self, name):
        return self.root / name / "data"

    def up(self, *names, **more):
        for name in names:
            started = self.kmq(name, "up", "--no-gateway", **SMALL | SLOW | more)
            assert started.returncode == 0, started.stderr

    def send(self, name, topic, count, payload="x" * 200):
        """Send plain lines; once more, from the first on, where a change of role ends the connection."""
        lines = "".join(f"{topic}|0||{payload}{number}\n" for number in range(count)).encode()
        until(lambda: self._sent(name, lines), "lines to be taken")

    def _sent(self, name, lines):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self.port(name)))) as sock:
            sock.sendall(lines)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
            return True

    def port(self, name):
        return until(lambda: (self.root / name / "pipes" / "ingress.port").read_text().strip(), "a port")

    def events(self, name, event):
        log = self.root / name / "pipes" / "kmq.log"
        if not log.exists():
            return []
        found = [line for line in log.read_text().splitlines() if f"event={event} " in line + " "]
        return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in found]

    def tell_replica(self, name, number):
        """Send a signal to the process `replica` of a broker, without a look at all processes: that takes too long here."""
        owner = (self.root / name / "pipes" / "replica.owner").read_text()
        os.kill(int(re.search(r"pid=(\d+)", owner)[1]), number)

    def await_same(self, *names):
        """Wait until all have all records, then compare WALs and queues; return the ends of what was compared."""
        names = names or BROKERS
        directories = [str(self.data(name)) for name in names]

        def are_even():
            ends = {wal.last_stored(each)[0] for each in directories}
            routed = {max(checkpoint.routed_seq(each), *checkpoint.queue_end(each).values()) for each in directories}
            return len(ends) == 1 and ends == routed == {committed.shown_seq(each) for each in directories}

        until(are_even, "the same end")
        found = compared(*directories)
        assert not [each.difference for each in found.values() if each.difference]
        return {log: (each.first, each.last) for log, each in found.items()}


@pytest.fixture
def copies(consul, tmp_path):
    made = Copies(consul.address, tmp_path)
    yield made
    made.close()


def layout(data):
    """What routing depends on beside the WAL."""
    names = ["format", "lineage", "deletions", "topics/.deletions", "dropped.log"]
    found = {name: (data / name).read_bytes() for name in names if (data / name).exists()}
    return found | {str(path.relative_to(data)): path.read_bytes() for path in data.glob("topics/*/topic.toml")}


def test_what_a_directory_has_without_a_record_is_on_all_brokers_of_its_shard(copies):
    (copies.root / "a").mkdir()
    made = write_data(copies.data("a"), [b"t.k%d|0||x" % n for n in range(300)], {"t": 3}, 4096, closed=False)
    dropped.append(str(copies.data("a")), "framed", made[2], made[2] + 9, no_room)
    made[2] += 10
    append(made, [b"t.k%d|0||y" % n for n in range(300)])
    made[0].close(), made[1].close()
    copies.up("a", **ALONE)
    for arguments in (
        ("topics", "create", "grown", "--partitions", "2"),
        ("produce", "grown", "-m", "one", "--acks"),
        ("topics", "set", "grown", "--partitions", "4"),
        ("topics", "create", "gone"),
        ("produce", "gone", "-m", "one", "--acks"),
        ("topics", "delete", "gone", "--yes"),
        ("topics", "create", "empty", "--partitions", "5"),
        ("down",),
    ):
        done = copies.kmq("a", *arguments, **SMALL | ALONE)
        assert done.returncode == 0, (arguments, done.stderr)
    assert (copies.data("a") / "deletions").exists()
    copies.up(*BROKERS)
    copies.init("--from", "a")
    copies.await_whole()
    copies.send("a", "gone", 50)
    copies.send("a", "grown", 50)
    ends = copies.await_same()
    assert {"append", "t/0", "t/1", "t/2", "grown/3", "gone/0"} <= ends.keys() and ends["append"][0] == 1
    assert ends["gone/0"] == (1, 50), "offsets of a deleted topic are not used again"
    assert layout(copies.data("a")) == layout(copies.data("b")) == layout(copies.data("c"))
    for name in BROKERS:
        assert copies.kmq(name, "down").returncode == 0
    for name in BROKERS:
        verified = copies.kmq(name, "verify")
        assert verified.returncode == 0, verified.stdout


def test_the_brokers_of_a_shard_are_compared_while_they_run(copies):
    copies.up(*BROKERS)
    copies.init()
    copies.await_whole()
    copies.send("b", "t", 200)
    copies.await_same()
    equal = copies.command("verify", broker="b")
    assert equal.returncode == 0 and re.search(r"^append: 1 to 2\d\d equal\n", equal.stdout), equal
    assert "t/0: 0 to 199 equal" in equal.stdout
    entered = copies.events("b", "leader_followed")
    [first, *_] = sorted((copies.data("c") / "topics" / "t" / "0").glob("*.log"))
    text = first.read_bytes()
    until(lambda: index.is_whole(str(first)), "checksums of all records")
    first.write_bytes(text.replace(b"x199", b"y199", 1))
    damaged = copies.command("verify")
    assert damaged.returncode == 65 and re.search(r"kmq: c: t/0 .* is damaged there; run kmq verify", damaged.stderr)
    first.write_bytes(text)
    assert copies.events("b", "leader_followed") == entered, "no follower has lost its connection"
    assert copies.kmq("c", "down").returncode == 0
    away = copies.command("verify")
    assert away.returncode == 75 and "kmq: c: is not there; start it; it was not compared" in away.stderr, away
    assert "t/0: 0 to 199 equal" in away.stdout
    other = copies.command("verify", KMQ_REPLICA_SECRET=__file__)
    assert other.returncode == 75 and "knows another secret than ours" in other.stderr, other


def test_a_wiped_follower_and_one_that_retention_has_left_behind_come_back(copies):
    copies.up(*BROKERS)
    copies.init()
    copies.await_whole()
    copies.send("a", "t", 500)
    copies.await_same()
    for name in ("b", "c"):
        assert copies.kmq(name, "down").returncode == 0
    shutil.rmtree(copies.data("b"))
    assert copies.kmq("a", "down").returncode == 0
    copies.up("a", "b", KMQ_RETENTION_BYTES="1MiB")
    until(lambda: copies.ids()["b"] in copies.register().isr, "the new replica in the ISR")
    leader = copies.leader()
    end = wal.last_stored(str(copies.data("c")))[0]
    for _ in range(200):
        copies.send(leader, "t", 500)
        if wal.first_seq(str(copies.data(leader))) > end + 1:
            break
    until(lambda: wal.first_seq(str(copies.data(leader))) > end + 1, "retention")
    copies.up("c")
    copies.await_whole()
    copies.await_same()
    assert copies.events("b", "bootstrapped") and copies.events("c", "bootstrapped")[-1]["leader"] == leader
    for name in BROKERS:
        assert not [*copies.data(name).glob("bootstrap*")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_a_kill_in_the_middle_begins_the_bootstrap_again(copies, killed):
    copies.up("a", "b", "c")
    copies.init()
    copies.await_whole()
    for _ in range(15):
        with contextlib.suppress(OSError):  # of a change of leader
            copies.send(copies.leader(), "t", 4000, "y" * 1000)
    leader = copies.leader()
    wiped = "c" if leader == "b" else "b"
    assert copies.kmq(wiped, "down").returncode == 0
    shutil.rmtree(copies.data(wiped))
    incoming, has_killed = copies.data(wiped) / "bootstrap", threading.Event()

    def strike():
        until((incoming / "topics/t/0").exists, "the first records", every_s=0.001)
        copies.tell_replica(leader, signal.SIGSTOP)  # so that it is in the middle for as long as this takes
        if incoming.exists() and not (incoming / "whole").exists():
            has_killed.set()
        copies.tell_replica(leader if killed == "leader" else wiped, signal.SIGKILL)
        if killed != "leader":
            copies.tell_replica(leader, signal.SIGCONT)

    striking = threading.Thread(target=strike)
    striking.start()
    copies.up(wiped)
    striking.join()
    assert has_killed.is_set()
    copies.await_whole()
    copies.send(copies.leader(), "t", 10)
    copies.await_same()
    assert not [*incoming.parent.glob("bootstrap*")] and copies.events(wiped, "bootstrapped")
