"""The protocol of a replicated shard: its model keeps every promise, and a model without one of its guards breaks one.

The bounds here are small, for a run of every test; the soak has those of `cluster_model.py` itself.
"""

import argparse

import cluster_model as model
import pytest

STATES, WALKS, DEPTH, SEED = 12_000, 40, 160, 1
# Guards that only matter where more happens than the small bounds allow.
RARE = {
    "follower_no_fence",
    "leader_no_fence",
    "late_diverged",
    "ack_before_sync",
    "early_resume",
    "recover_few",
    "recover_outside",
    "expand_hw_only",
    "resume_epoch",
    "ckpt_synced",
    "min_below_majority",
    "late_record",
    "epoch_promise",
    "recover_no_hold",
    "doors_early",
    "repair_follows",
}


def bounds(config="", states=STATES, walks=WALKS):
    return argparse.Namespace(config=config, states=states, walks=walks, depth=DEPTH, seed=SEED, seconds=0)


def assert_explored(config, states):
    how, seen, _, _, violated, _ = model.bfs(model.Config(**model.CONFIGS[config]), states, 0, False)
    assert how in ("limit", "complete"), violated
    assert how == "complete" or seen > states


def assert_walked(config, walks):
    done = model.walk(model.Config(**model.RANDOM[config]), walks, DEPTH, SEED, 0)
    how, _, walked, committed, _, violated, steps = done
    assert how == "done", "\n".join([*steps, violated])
    assert walked == walks and committed > walks, "the walks lead nowhere"


@pytest.mark.parametrize("config", model.CONFIGS)
def test_every_interleaving_within_small_bounds_keeps_every_promise(config):
    assert_explored(config, STATES)


@pytest.mark.parametrize("config", model.RANDOM)
def test_random_walks_keep_every_promise_and_heal(config):
    assert_walked(config, WALKS)


def test_every_trouble_that_leaves_two_brokers_ends_with_a_new_message():
    done, violated = model.scenarios()
    assert (done, violated) == (len([*model.troubles()]), "")


def test_no_copy_goes_on_under_an_id_and_no_original_loses_it():
    states, violated = model.identity()
    assert states > 100_000 and not violated


@pytest.mark.parametrize("mutant", sorted(model.MUTANTS.keys() - RARE))
def test_a_model_without_this_guard_breaks_a_promise(mutant):
    assert model.hunt(mutant, bounds()) is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", model.MUTANTS)
def test_within_the_standard_bounds_each_guard_is_found_to_be_missing(mutant):
    assert model.hunt(mutant, bounds(states=400_000, walks=4_000)) is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", [*model.CONFIGS, *model.RANDOM])
def test_the_standard_bounds_keep_every_promise(config):
    if config in model.RANDOM:
        assert_walked(config, 4_000)
    else:
        assert_explored(config, 400_000)


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("config", model.DEEP)
def test_wider_bounds_keep_every_promise(config, monkeypatch):
    monkeypatch.setitem(model.CONFIGS, config, model.DEEP[config])
    assert_explored(config, 8_000_000)


def test_a_rare_guard_is_one_of_the_guards():
    assert model.MUTANTS.keys() > RARE
