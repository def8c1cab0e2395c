"""G1 through the whole chain, kmq.Producer included: what was said to be stored is stored, once, under the seq that was said.

Producers of all three kinds send while stages are killed in every order. Judged from the WAL alone: each payload is unique.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import comes

from chaos.kills import PAIRS, SMALL, blow, moment
from chaos.load import Load
from chaos.pod import STAGES, Pod
from chaos.producer_load import ProducerLoad, judge

KINDS = {"ids": {}, "named": {"producer": "named"}, "window": {"window": "chaos"}, "none": {"dedupe": False}}
ORDERS = list(itertools.permutations(STAGES))

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


@contextmanager
def producing(pod: Pod, rng: random.Random, start: Start) -> Iterator[list[ProducerLoad]]:
    """A started pod with a producer of each kind; afterwards everything that was acked is there."""
    pod.start()
    loads = [ProducerLoad(pod.pipes, name, rng.randrange(1 << 30), **options) for name, options in KINDS.items()]
    for load in loads:
        start(load)
    pod.wait(lambda: all(load.count > 500 and load.producer.connections for load in loads), "every producer got going")
    yield loads
    pod.wait_ready()
    before = [load.count for load in loads]
    pod.wait(
        lambda: all(load.count > n for load, n in zip(loads, before, strict=True)), "all go on after the last blow"
    )
    pod.wait(
        lambda: all(load.producer.connections > 1 for load in loads),
        "every producer lost a connection and made another",
    )
    for load in loads:
        load.finish()
    pod.judge()
    judge(pod.data, loads)


@pytest.mark.parametrize("small", [False, True], ids=["rings", "small rings"])
def test_acked_is_stored_once_whichever_stage_is_killed_after_which(
    make_pod: Make, rng: random.Random, loads: Start, small: bool
) -> None:
    storm(make_pod(**SMALL if small else {}), rng, loads, [(stage,) for _ in range(3) for stage in rng.choice(ORDERS)])


def test_acked_is_stored_once_when_stages_die_together(make_pod: Make, rng: random.Random, loads: Start) -> None:
    storm(make_pod(), rng, loads, [*rng.sample(PAIRS, 3), STAGES, STAGES])


def test_what_was_framed_and_not_yet_on_disk_is_known_to_the_next_framer(
    make_pod: Make, rng: random.Random, loads: Start
) -> None:
    """Its producers send it again, while the first copies still wait in the ring."""
    pod = make_pod()
    with producing(pod, rng, loads) as producers:
        for _ in range(4):
            pod.wait_ready()
            pod.wait(lambda: is_paused_with_a_backlog(pod), "messages wait in the ring")
            pod.kill("ingress", "framer")
            pod.start("ingress", "framer")
            pod.wait_ready("framer")
            pod.resume("durability")
    assert sum(load.producer.duplicates for load in producers) > 0


def is_paused_with_a_backlog(pod: Pod) -> bool:
    """Pause durability. Between a sync and its replies that may leave all producers waiting, their windows full: then nothing
    comes, and it goes on.
    """
    pod.pause("durability")
    base = pod.seq("durability")
    if comes(lambda: pod.seq("framer") > base + 10, 0.5):
        return True
    pod.resume("durability")
    return False


def storm(pod: Pod, rng: random.Random, start: Start, blows: list[tuple[str, ...]]) -> None:
    with producing(pod, rng, start):
        for victims in blows:
            blow(pod, rng, victims)


def test_acked_survives_the_death_of_everything_and_of_the_rings(
    make_pod: Make, rng: random.Random, loads: Start
) -> None:
    """As when the pod is gone: the memory of producers comes from disk alone."""
    all_at_once(make_pod(), rng, loads, 3)


def all_at_once(pod: Pod, rng: random.Random, start: Start, rounds: int) -> None:
    with producing(pod, rng, start):
        for _ in range(rounds):
            pod.wait_ready()
            base = pod.seq("durability")
            pod.wait(lambda base=base: pod.seq("durability") > base + 1000, "messages become durable")
            moment(rng, 0.2)
            if rng.random() < 0.5:  # a backlog in the links
                pod.pause(rng.choice(STAGES[1:]))
                moment(rng, 0.2)
            pod.kill()
            for ring in Path("/dev/shm").glob(f"{pod.instance}.*"):
                ring.unlink()
            pod.start(*rng.sample(STAGES, 4))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("small", [False, True], ids=["rings", "small rings"])
def test_soak_acked_in_every_order_of_kills(make_pod: Make, rng: random.Random, loads: Start, small: bool) -> None:
    blows = [(stage,) for order in ORDERS for stage in order] + PAIRS * 4 + [STAGES] * 8
    for at in range(0, len(blows), 32):  # in parts: a run keeps everything it has sent
        storm(make_pod(**SMALL if small else {}), rng, loads, blows[at : at + 32])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_acked_survives_the_death_of_everything(make_pod: Make, rng: random.Random, loads: Start) -> None:
    for _ in range(4):
        all_at_once(make_pod(), rng, loads, 15)
