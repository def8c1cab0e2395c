"""The protocol of queues: its model keeps every promise, and a model without one of its guards breaks one.

The bounds here are small, for a run of every test; the soak has all of them.
"""

import os
import random

import pytest
from queue_model import ALONE, CONFIGS, DELIVERIES, DONE, IN_HAND, Model, explore, walk
from queue_mutants import MUTANTS, breaks

STATES, WALKS = 8_000, 1000


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_interleaving_within_small_bounds_keeps_every_promise(config):
    is_complete, states = explore(CONFIGS[config], STATES)
    assert is_complete or states > STATES


def test_every_promise_of_queues_holds_on_random_walks():
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    ends = [walk(seed + number) for number in range(WALKS)]
    assert sum(len(end.acked) for end in ends) > WALKS / 2, "the walks lead nowhere"
    assert sum(end.kills for end in ends) > WALKS / 2, "nothing is killed"


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_model_without_this_guard_breaks_a_promise(mutant):
    assert breaks(mutant)


def killed_each_time(fault, kills):
    """Return the last state where this happens whenever message 0 is shown, and worker 0 has all that it can get."""
    model = Model(kills=kills if fault == "kill" else 0, deaths=kills if fault == "worker 0" else 0)
    state, done = model.first(), []
    wishes = ["sync", "start", "grace", "take 0 by 0", "take 0 in doubt by 0", "take 0 alone by 0", "0 is spent"]
    wishes += ["take 1 by 0", "take 1 in doubt by 0", "take 1 alone by 0", "ack 1 by 0", "grow"]
    while state.memory is None or {message.state for message in state.memory} != {DONE} or state.pending:
        following, memory = model.next(state), state.memory
        is_shown = memory and memory[0].state == IN_HAND and not state.pending
        is_full = is_shown and (memory[0].is_alone or memory[1].state in (IN_HAND, DONE))
        chosen = [fault] if is_full else ["take 1 by 0", "take 1 in doubt by 0"] if is_shown else wishes
        name, state = next((name, other) for wish in chosen for name, other in following if name.startswith(wish))
        done.append(name)
    return state, done


@pytest.mark.parametrize("fault", ["kill", "worker 0"])
def test_a_message_that_kills_each_time_is_a_letter_after_two_deliveries_more_and_its_neighbour_is_not_counted(fault):
    state, done = killed_each_time(fault, kills=9)
    assert state.shown[0] == DELIVERIES + ALONE and state.disk.letters == (0, -1), done
    assert state.blame[1] == 0 and {offset for _, offset, _ in state.acked} == {1}, done


@pytest.mark.parametrize("fault", ["kill", "worker 0"])
def test_after_one_kill_nothing_is_delivered_alone(fault):
    model = Model(3, kills=1 if fault == "kill" else 0, deaths=1 if fault == "worker 0" else 0)
    state, alone = model.first(), []
    for wish in ("grow", "sync", "take 0 by 0", "take 1 by 0", "grow", "sync", "take 2 by 0", fault):
        state = next(other for name, other in model.next(state) if name.startswith(wish))
    for _ in range(60):
        following = [step for step in model.next(state) if "back" not in step[0] and "ack" not in step[0]]
        if not following:
            break
        name, state = following[-1 if following[-1][0].startswith("grace") else 0]
        alone += [name] if "alone" in name else []
    assert not alone and [message.state for message in state.memory] == [IN_HAND] * 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_interleaving_keeps_every_promise(config):
    is_complete, _ = explore(CONFIGS[config], 5_000_000)
    assert is_complete


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 200_000, 10_000))
def test_every_promise_of_queues_holds_on_thousands_of_walks(first):
    for seed in range(first, first + 10_000):
        walk(seed, 300)
