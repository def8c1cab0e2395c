"""Kills at random moments: the instant of a kill is what the tests try."""

import itertools
import random
import time

from chaos.pod import STAGES, Pod

PAIRS = list(itertools.combinations(STAGES, 2))


SMALL = {
    "RB_SLOTS": 256,
    "RB_BYTES": 256 << 10,
    "KMQ_MAX_LINE": 64 << 10,
}  # rings that are full, and wrap, all the time


def moment(rng: random.Random, longest_s: float) -> None:
    """Let a random time pass: the instant of the next blow is what these tests try."""
    time.sleep(rng.random() ** 2 * longest_s)


def blow(pod: Pod, rng: random.Random, victims: tuple[str, ...]) -> None:
    """Kill them at once, start them in any order, and sometimes kill them again while they recover."""
    moment(rng, 0.15)
    pod.kill(*victims)
    for _ in range(rng.choice([0, 0, 1, 3])):
        pod.start(*rng.sample(victims, len(victims)))
        moment(rng, 0.3)
        pod.kill(*victims)
    moment(rng, 0.1)
    pod.start(*rng.sample(victims, len(victims)))
    if rng.random() < 0.7:
        pod.wait_ready(*victims)
