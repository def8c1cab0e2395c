"""Writer and reader of a ring as two processes that are killed at random: the outcomes that are allowed, and no others.

block           every seq exactly once, in order; no jump
drop_oldest     every seq at most once, in order; what is missing lies before a block that the ring called a jump
both            every block is byte for byte what its writer appended
"""

import os
import random
import signal

import pytest
from waiting import until

KILLS, SOAK_KILLS = 24, 600


def said(path):
    """What the reader wrote: (how, first seq, last seq) of each block."""
    with open(path) as file:
        return [(how, int(first), int(last)) for how, first, last in map(str.split, file)]


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def stress(start, path, policy, kills):
    """Kill one end or both, whenever the reader has got a little further."""
    rng = random.Random(kills)
    ends = {role: start(role, policy) for role in ("writer", "reader")}
    for _ in range(kills):
        target = size(path) + rng.choice([1, 500, 3000, 20_000])
        until(lambda: alive(ends) and size(path) >= target, "the reader gets further", every_s=0.002)  # noqa: B023
        for role in rng.choice([["writer"], ["reader"], ["reader", "writer"]]):
            ends[role].send_signal(signal.SIGKILL)
            ends[role].communicate()
            ends[role] = start(role, policy)
    target = size(path) + 1000
    until(lambda: alive(ends) and size(path) >= target, "the reader gets further after the last kill")
    with open(f"{path}.stop", "w"):
        pass
    for role in ("writer", "reader"):
        _, errors = ends[role].communicate(timeout=60)
        assert ends[role].returncode == 0, errors
    return said(path)


def alive(ends):
    for role, process in ends.items():
        assert process.poll() is None, f"{role}: {process.communicate()[1]}"
    return True


def check_block(blocks):
    expected = 1
    for how, first, last in blocks:
        assert (how, first) == ("next", expected)
        expected = last + 1


def check_drop_oldest(blocks):
    expected, jumps = 1, 0
    for how, first, last in blocks:
        assert first == expected or (how == "jumped" and first > expected), (how, first, expected)
        jumps += first > expected
        expected = last + 1
    assert jumps, "nothing was dropped: the run shows nothing"


CHECKS = {"block": check_block, "drop_oldest": check_drop_oldest}


@pytest.mark.parametrize("policy", CHECKS)
def test_ends_that_are_killed_at_random_lose_double_and_tear_nothing(start, tmp_path, policy):
    CHECKS[policy](stress(start, f"{tmp_path}/out", policy, KILLS))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", CHECKS)
def test_ends_that_are_killed_at_random_for_a_long_time(start, tmp_path, policy):
    CHECKS[policy](stress(start, f"{tmp_path}/out", policy, SOAK_KILLS))


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        ("block", [("next", 1, 3), ("next", 5, 6)]),
        ("block", [("next", 1, 3), ("jumped", 5, 6)]),
        ("block", [("next", 1, 3), ("next", 1, 3)]),
        ("block", [("next", 2, 3)]),
        ("drop_oldest", [("next", 1, 3), ("next", 5, 6)]),
        ("drop_oldest", [("next", 1, 3), ("jumped", 2, 6)]),
        ("drop_oldest", [("next", 1, 3), ("next", 4, 6)]),
    ],
)
def test_the_checks_see_what_is_not_allowed(policy, blocks):
    with pytest.raises(AssertionError):
        CHECKS[policy](blocks)
