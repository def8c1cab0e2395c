"""The copy off the machine on random walks: clones, states that were put back, zombies, kills, a store that lies. And mutants."""

import os
import random

import pytest
from s3_proxy import FATES
from tier_shard_world import ShardWorld
from tier_stores import SERVERS, ProxiedStore, s3_behind_proxy
from tier_world import Violated, World

from kmq.links.role import RolePage
from kmq.router.tiering import Tiering
from kmq.tier import turn as turn_module
from kmq.tier.turn import Copier

STEPS, WALKS, MUTANT_WALKS = 40, 4, 40


@pytest.fixture(autouse=True)
def swept(monkeypatch):
    """Each turn looks at all names."""
    for name in ("_SWEEP_FIRST_S", "_SWEEP_S"):
        monkeypatch.setattr(turn_module, name, 0.0)


def walk(path, seed, store=None):
    world = World(path, random.Random(seed), store)
    for _ in range(STEPS):
        world.step()
    return world


def walk_of_shard(path, seed):
    world = ShardWorld(path, random.Random(seed))
    try:
        for _ in range(3 * STEPS):
            world.step()
    finally:
        world.close()


@pytest.mark.parametrize("number", range(WALKS))
def test_no_promise_is_broken_on_a_random_walk(tmp_path, number):
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    walk(tmp_path, seed)


@pytest.mark.parametrize("server", SERVERS)
def test_no_promise_is_broken_where_a_proxy_lies_before_a_bucket(tmp_path, server):
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    rnd = random.Random(seed)
    with s3_behind_proxy(server, tmp_path / "s3") as (url, proxy):
        weights = [1 if fate in ("slow", "silent", "mute") else 4 for fate in FATES]
        proxy.fate = lambda method, path: rnd.choices(("", *FATES), (150, *weights))[0]
        walk(tmp_path, seed, ProxiedStore(url, proxy))
        assert {fate for _, _, fate in proxy.seen} > {""}


def without_reading_back(monkeypatch):
    monkeypatch.setattr(turn_module, "holds", lambda store, key, content: True)


def without_order(monkeypatch):
    """Tables and files go up before the WAL."""

    def turn(self):
        if not self.is_claimed:
            self.claim()
        self.commits.catch_up()
        self.commits.check_claim()
        found = turn_module.SmallFiles.of(self.data, True)
        self._copy_tables(found)
        self._copy_files(found)
        self._copy_wal(self._options.durable())

    monkeypatch.setattr(Copier, "turn", turn)


def without_cover(monkeypatch):
    """Local limits do not ask what the file `tier` has."""
    due = Tiering.due

    def deletes(self, at, state, limits, now_s, most):
        known = due(self, at, state, limits, now_s, most)
        return known if self.of(*at) is None else max(known, limits.local().expired(state.sealed, 0, now_s, most))

    monkeypatch.setattr(Tiering, "due", deletes)


MUTANTS = [
    without_reading_back,
    without_order,
    without_cover,
]  # for the other guards tests/unit/test_tier_turn.py has a story each


def is_broken(walk, path):
    """Return whether one of the walks breaks a promise."""
    for seed in range(MUTANT_WALKS):
        try:
            walk(path / str(seed), seed)
        except Violated:
            return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_guard_that_is_missing_breaks_a_promise(tmp_path, monkeypatch, mutant):
    mutant(monkeypatch)
    assert is_broken(walk, tmp_path), f"no promise was broken in {MUTANT_WALKS} walks"


# --- a shard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(WALKS))
def test_no_promise_is_broken_by_the_replicas_of_a_shard(tmp_path, number):
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    walk_of_shard(tmp_path, seed)


def beyond_hw(monkeypatch):
    monkeypatch.setattr(RolePage, "hw", property(lambda self: 1 << 40))


def any_epoch(monkeypatch):
    monkeypatch.setattr(turn_module, "check_may_claim", lambda *arguments: None)


@pytest.mark.parametrize("mutant", [beyond_hw, any_epoch], ids=lambda mutant: mutant.__name__)
def test_a_guard_of_a_shard_that_is_missing_breaks_a_promise(tmp_path, monkeypatch, mutant):
    mutant(monkeypatch)
    assert is_broken(walk_of_shard, tmp_path), f"no promise was broken in {MUTANT_WALKS} walks"
