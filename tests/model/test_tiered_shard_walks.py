"""A partition in the tier of a shard on random walks: elections, zombies, followers that are behind, a store that lies, lost
files. Every replica shows the same bytes, whichever leads."""

import contextlib
import os
import random
from itertools import groupby, pairwise

import pytest
from tiered import TieredReplica, lines

from kmq.errors import KmqError
from kmq.log import segment
from kmq.log.segment import Limits
from kmq.router.tiering import Tiering
from kmq.tier.commits import FencedError
from kmq.tier.partitions import PartitionCopier
from kmq.tier.store import StoreError
from kmq.tier.turn import FollowsError

pytestmark = pytest.mark.usefixtures("small_blocks")

STEPS, WALKS, MUTANT_WALKS = 50, 4, 30
SEGMENT = 1024
BLOCK_BYTES = 256  # of the index, see small_blocks


class ShardWalk:
    """`sent`: what is committed, as sent. A replica has the first of these."""

    def __init__(self, path, seed):
        self.rnd = random.Random(seed)
        self.sent, self.begin, self.epoch = [], 0, 1
        size = self.rnd.choice([1500, 4000])
        self.replicas = [TieredReplica(path, name, self._limits(), size) for name in "abc"]
        self.count = [0, 0, 0]  # how many of `sent` each replica has
        self.zombies = set()
        self.leader = 0
        self.replicas[0].lead(1)

    def _limits(self):
        return Limits(
            segment_bytes=self.rnd.choice([700, SEGMENT, 2000]),
            tier="on",
            local_retention_bytes=self.rnd.choice([SEGMENT, 3 * SEGMENT]),
        )

    def step(self):
        rnd = self.rnd
        what = rnd.choices(
            ["send", "follow", "turn", "tick", "copier", "restart", "kill", "elect", "start", "lose"],
            [20, 25, 40, 10, 5, 4, 4, 8, 4, 6],
        )[0]
        at = rnd.randrange(3)
        made = self.replicas[at]
        if what == "send":
            self.sent += lines(rnd.randint(1, 40), begin=len(self.sent), size=rnd.choice([5, 60]))
            self._bring(self.leader, len(self.sent))
        elif what == "follow":
            self._bring(at, rnd.randint(self.count[at], len(self.sent)))
        elif what == "turn":
            self._turn(at)
        elif what == "tick":
            made.tick()
        elif what == "copier":
            made.kill_copier()
        elif what in ("restart", "kill"):
            made.stop() if what == "restart" else made.kill()
            made.start()
        elif what == "elect":
            self._elect(at)
        elif what == "start" and self.sent:
            begin = rnd.randint(0, sum(not line.startswith(b"__") for line in self.sent))
            self.sent.append(b"__kmq.start|1|;request=r|t incarnation=1 0=%d" % begin)
            self._bring(self.leader, len(self.sent))
        elif what == "lose":
            self._lose(at)
        self.check(what, at)

    def _bring(self, at, count):
        if at in self.zombies:
            return
        some = self.sent[self.count[at] : count]
        self.count[at] = max(self.count[at], count)
        for is_start, group in groupby(some, lambda line: line.startswith(b"__")):  # a change is a block of its own
            self.replicas[at].send(*group, group=1 if is_start else 10)

    def _elect(self, at):
        if at == self.leader or at in self.zombies:
            return
        self._bring(at, len(self.sent))
        self.epoch += 1
        old, self.leader = self.leader, at
        self.zombies.discard(at)
        if self.rnd.random() < 0.5:
            self.zombies.add(old)
        else:
            self.replicas[old].follow(self.epoch)
        self.replicas[at].lead(self.epoch)

    def _turn(self, at):
        made, rnd = self.replicas[at], self.rnd
        if rnd.random() < 0.7:
            made.checkpoint()
        made.store.plan = [rnd.choice(["", "", "", "", "lost", "done", "late"]) for _ in range(rnd.randint(0, 8))]
        try:
            made.copier.turn()
        except FencedError:
            if self.rnd.random() < 0.5 and at in self.zombies:  # it hears of it
                self.zombies.discard(at)
                made.follow(self.epoch)
        except (StoreError, FollowsError):
            pass
        made.store.plan = []
        if rnd.random() < 0.3:
            made.store.deliver()
        if rnd.random() < 0.8:
            made.tick()

    def _lose(self, at):
        """Files are lost while the broker is down; the WAL has all."""
        made = self.replicas[at]
        made.stop()
        kind = self.rnd.choice(["ckpt", "tier", "first", "all"])
        listed = segment.listing(made.directory())
        paths = {
            "ckpt": [f"{made.data}/router.ckpt"],
            "tier": [f"{made.directory()}/tier"] if listed and listed[0][0] == 0 else [],
            "first": [path for _, path in listed[:1]],
            "all": [path for _, path in listed],
        }
        for path in paths[kind]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        made.start()

    def check(self, what, at):
        for number, made in enumerate(self.replicas):
            if number not in (at, self.leader):
                continue
            mine = [line for line in made.sent if line.split(b"|")[2].startswith(b"t")]
            begin = made.begin()
            assert made.read(begin) == b"".join(mine[begin:]), f"after {what}: {made.name} has other records"
            ends = [row[1] for row in made.rows() if row[1] > len(mine)]
            assert not ends, f"after {what}: {made.name} has rows up to {ends}, and records up to {len(mine)}"
        found = [(row.base, row.next) for log in made.state.logs.values() for row in log.rows]
        assert all(a[1] == b[0] for a, b in pairwise(found)), f"after {what}: {found}"

    def end(self):
        """All have all, and each is made the leader."""
        for at, made in enumerate(self.replicas):
            if at in self.zombies:
                self.zombies.discard(at)
                made.follow(self.epoch)
            self._bring(at, len(self.sent))
            made.store.deliver()
        for at in range(3):
            self._elect(at)
            for old in [*self.zombies]:
                self.zombies.discard(old)
                self.replicas[old].follow(self.epoch)
            for made in [self.replicas[self.leader], *self.replicas]:
                made.turn()
            for number in range(3):
                self.check("all", number)
        begins = {made.begin() for made in self.replicas}
        assert len(begins) == 1, f"they begin with {begins}"

    def close(self):
        for made in self.replicas:
            with contextlib.suppress(Exception):
                made.close()


def walk(path, seed, steps=STEPS):
    made = ShardWalk(path, seed)
    try:
        for _ in range(steps):
            made.step()
        made.end()
    finally:
        made.close()


@pytest.mark.parametrize("number", range(WALKS))
def test_every_replica_shows_the_same_on_a_random_walk(tmp_path, number):
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    walk(tmp_path, seed)


def without_own_end(monkeypatch):
    """A follower takes rows of what it does not have."""
    real = PartitionCopier.lay_out

    def lay_out(self, state, states, lives):
        for at in states.values():
            at.end_offset = 1 << 40
        real(self, state, states, lives)

    monkeypatch.setattr(PartitionCopier, "lay_out", lay_out)


def without_cover(monkeypatch):
    """Local limits do not ask what the file `tier` has."""
    monkeypatch.setattr(
        Tiering, "_due_here", lambda self, found, state, limits, now_s, most: min(most, len(state.sealed))
    )


@pytest.mark.parametrize("mutant", [without_own_end, without_cover], ids=lambda mutant: mutant.__name__)
def test_a_guard_that_is_missing_is_seen(tmp_path, monkeypatch, mutant):
    mutant(monkeypatch)
    for seed in range(MUTANT_WALKS):
        try:
            walk(tmp_path / str(seed), seed)
        except (AssertionError, KmqError):
            return
    raise AssertionError(f"nothing was seen in {MUTANT_WALKS} walks")
