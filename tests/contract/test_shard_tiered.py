"""A topic in the tier of a shard, with a real Consul: kills, a new replica, each broker as leader, and the loss of all disks."""

import contextlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from test_shard import BROKERS
from test_shard_copy import MESSAGES, Copied, lines
from waiting import until

from kmq.log import identity, reader, rows, segment
from kmq.log.rows import NotHereError
from kmq.tier.cache import TierCache
from kmq.tier.commits import CommitLog
from kmq.tier.store import open_store

PARTITIONS = 2
SEGMENTS = dict(zip(BROKERS, ("256 KiB", "300 KiB", "200 KiB"), strict=True))  # their borders differ
OPTIONS = ("--partitions", str(PARTITIONS), "--set", "tier=on", "--set", "local_retention_bytes=1MiB")


class Tiered(Copied):
    """Whole brokers, whose topic `orders` lies in the tier but for its end."""

    def environment(self, name, **more):
        own = {"KMQ_SEGMENT_BYTES": SEGMENTS[name[0]]}
        return super().environment(name, **own | more)

    def is_up(self, name, **more):
        started = self.kmq(name, "up", **more)
        assert started.returncode in (0, 75), started.stderr
        return started.returncode == 0

    def directory(self, name, number):
        return f"{self.data(name)}/topics/orders/{number}"

    def rows(self, name, number):
        """(base, next) of the rows in the file `tier`."""
        with contextlib.suppress(FileNotFoundError):
            return [(row.base, row.next) for row in rows.of(self.directory(name, number)).rows]

    def committed_rows(self, name, number):
        store, lineage = open_store(f"file://{self.root}/store"), identity.lineage(self.data(name))
        found = CommitLog(store, lineage, "reader@here").read().logs
        return [
            (row.base, row.next) for (log, _), each in found.items() if log == f"orders/{number}" for row in each.rows
        ]

    def is_cold(self, name):
        """It has all rows, and its local limit has deleted what they have."""
        return all(
            (mine := self.rows(name, number))
            and mine == self.committed_rows(name, number)
            and segment.listing(self.directory(name, number))[0][0] > 0
            for number in range(PARTITIONS)
        )

    def await_cold(self, *names):
        for name in names:
            said = Path(self.root, name, "pipes/kmq.log").read_text
            until(lambda name=name: self.is_cold(name), f"{name} has the rows, and few segments", said)

    def stored(self, name, number):
        """The lines of a partition, as this broker has them, and what it lacks fetched in."""
        store, found, offset = open_store(f"file://{self.root}/store"), b"", 0
        log, cache = reader.partition(self.data(name), "orders", number), TierCache(self.data(name), store, 1 << 30)
        assert log.first_offset == 0
        while offset < log.end_offset():
            try:
                first, text = log.read(offset, 1 << 20)
            except NotHereError as err:
                cache.fetch(err.directory, err.life, err.row)
                continue
            assert first == offset
            found, offset = found + text, first + text.count(b"\n")
        return found

    def consumed(self, name, **more):
        """(partition, offset) → (seq, value), by the doors of the leader."""
        shutil.rmtree(f"{self.data(name)}/tier/cache", ignore_errors=True)
        done = self.kmq(name, "consume", "orders", "--json", **more)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return {(each["partition"], each["offset"]): (each["seq"], each["value"]) for each in found}

    def resign(self):
        """Let another broker lead, and return its name."""
        before, epoch = self.leader(), self.register().epoch
        until(lambda: self.kmq(before, "cluster", "resign", "--wait").returncode == 0, f"{before} resigns")
        until(lambda: self.register().epoch > epoch and self.leader() != before, "another leader")
        return self.leader()


@pytest.fixture
def shard(consul, tmp_path):
    made = Tiered(consul.address, tmp_path)
    yield made
    made.close()


@pytest.mark.sampled(0.5)
def test_old_records_are_the_same_on_every_broker_whichever_leads_and_after_the_loss_of_all(shard):
    shard.up()
    shard.init()
    shard.await_whole()
    first = shard.leader()
    made = shard.kmq(first, "topics", "create", "orders", *OPTIONS)
    assert made.returncode == 0, made.stderr
    sending = threading.Thread(target=shard.send, args=(first, lines()))
    sending.start()
    until(lambda: len(shard.committed_rows(first, 0)) > 1, "some rows")
    shard.kill(first)  # in the middle of an upload
    sending.join()
    others = [name for name in BROKERS if name != first]
    until(lambda: shard.register().epoch >= 2 and shard.leader() != first, "another leader")
    shard.produce(others[0], lines())  # those that it has are known
    shutil.rmtree(shard.data(first))
    shard.await_cold(*others)
    until(lambda: shard.is_up(first), f"{first} is up, with an empty disk")
    shard.await_whole()
    shard.await_cold(*BROKERS)

    def are_even():
        ends = {
            tuple(reader.partition(shard.data(name), "orders", number).end_offset() for number in range(PARTITIONS))
            for name in BROKERS
        }
        return len(ends) == 1 and sum(ends.pop()) == MESSAGES

    until(are_even, "all have all messages")
    reference = [shard.stored(shard.leader(), number) for number in range(PARTITIONS)]
    assert all([shard.stored(name, number) for number in range(PARTITIONS)] == reference for name in BROKERS)
    kept = shard.wal(first).splitlines()
    sent = {int(line.split(b"|")[0]): line.rpartition(b"|")[2].decode() for line in kept if b"|orders." in line}
    assert len(sent) == MESSAGES == sum(text.count(b"\n") for text in reference)

    equal = shard.command("verify")  # what all of them have on their disks
    assert equal.returncode == 0 and "append: 1 to " in equal.stdout, equal
    led = [shard.leader()]
    while True:
        found = shard.consumed(led[-1])
        assert sorted(found) == [(n, at) for n in range(PARTITIONS) for at in range(reference[n].count(b"\n"))]
        assert dict(found.values()) == sent
        if len(led) == len(BROKERS):
            break
        if len(led) == 2:  # so that the one that has not led is next
            assert shard.kmq(led[0], "down").returncode == 0
        led.append(shard.resign())
    assert {*led} == {*BROKERS}
    follows = f"follows: broker {led[2]} leads the shard s"
    until(lambda: follows in shard.kmq(led[1], "tier", "status", "--json").stdout, "the status of a follower says so")
    assert not [each for each in shard.status(led[1])["warnings"] if each["code"].startswith("tier")]
    for name in BROKERS:
        assert shard.kmq(name, "verify").returncode == 0

    until(lambda: shard.is_copied(shard.leader()), "the copy is whole")
    for name in BROKERS:
        shard.kill(name)
        shutil.rmtree(shard.root / name / "data")
    new = {"KMQ_SHARD": "s2"}
    restored = shard.kmq("a", "restore", "--yes", **new)
    assert restored.returncode == 0, restored.stderr
    assert shard.rows("a", 0) and segment.listing(shard.directory("a", 0))[0][0] > 0
    shard.up(**new)

    def begun():
        done = shard.command("init", "--shard", "s2", "--brokers", "a,b,c", "--from", "a", **new)
        return done.returncode != 75 and done

    done = until(begun, "all brokers of the new shard")
    assert done.returncode == 0, done.stderr
    shard.produce("b", "orders.k1|0|9000000|new\n", **new)
    for name in BROKERS:
        until(lambda name=name: os.path.exists(rows.path_of(shard.directory(name, 0))), f"rows of {name}")
    found = shard.consumed("c", **new)
    assert {**sent, max(found.values())[0]: "new"} == dict(found.values())
