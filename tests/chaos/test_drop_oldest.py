"""G4: under drop_oldest producers never block, and dropped.log names exactly what is missing, whatever is killed."""

import random
from collections.abc import Callable

import pytest

from chaos.checker import Report
from chaos.load import FifoLoad, Load
from chaos.pod import STAGES, Pod

AT_LEAST = 80_000  # half of them are more than the FIFO and both rings hold
SMALL = {"RB_SLOTS": 512, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}
READER = {"framed": "durability", "durable": "router"}

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def dropping(make_pod: Make, *rings: str, **settings: object) -> Pod:
    policies = {f"RB_OVERFLOW_POLICY_{ring.upper()}": "drop_oldest" for ring in rings}
    return make_pod(**policies, **settings)


def sent_while_stopped(pod: Pod, load: FifoLoad, reader: str, count: int) -> None:
    """The ring's reader stands still, and the writer does not notice."""
    pod.pause(reader)
    goal = load.count + count
    pod.wait(lambda: load.count > goal, "the writer is not held up")
    pod.resume(reader)


@pytest.mark.parametrize("ring", ["framed", "durable"])
def test_a_stopped_reader_blocks_nobody_and_every_loss_is_named(make_pod: Make, loads: Start, ring: str) -> None:
    pod = dropping(make_pod, ring)
    load = loads(FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.01))
    pod.start()
    pod.wait_ready()
    for _ in range(2):
        sent_while_stopped(pod, load, READER[ring], AT_LEAST // 2)
        pod.wait(lambda: pod.state(READER[ring]) == "ready", "it goes on")
    load.finish()
    assert_some_were_dropped(pod.judge(load.sent), load)


def assert_some_were_dropped(report: Report, load: Load) -> None:
    assert report.dropped > 1000
    assert load.count >= AT_LEAST


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rings", [("framed",), ("durable",), ("framed", "durable")], ids="+".join)
def test_kills_and_stops_under_drop_oldest_leave_no_loss_unnamed(
    make_pod: Make, loads: Start, rng: random.Random, rings: tuple[str, ...]
) -> None:
    kills_and_stops(dropping(make_pod, *rings, **SMALL), loads, rng, rings, rounds=8)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rings", [("framed",), ("durable",), ("framed", "durable")], ids="+".join)
def test_soak_kills_and_stops_under_drop_oldest(
    make_pod: Make, loads: Start, rng: random.Random, rings: tuple[str, ...]
) -> None:
    kills_and_stops(dropping(make_pod, *rings, **SMALL), loads, rng, rings, rounds=60)


def kills_and_stops(pod: Pod, loads: Start, rng: random.Random, rings: tuple[str, ...], rounds: int) -> None:
    load = loads(FifoLoad(pod.pipes, "fifo", rng.randrange(1 << 30), rest_s=0.005))
    pod.start()
    for _ in range(rounds):
        pod.wait_ready()
        reader = READER[rng.choice(rings)]
        sent_while_stopped(pod, load, reader, rng.randrange(1_000, 20_000))
        for _ in range(rng.randrange(3)):
            victims = rng.sample(STAGES[1:], rng.randrange(1, 4))
            goal = load.count + rng.randrange(5_000)
            pod.wait(lambda goal=goal: load.count > goal, "a random moment")
            pod.kill(*victims)
            if rng.random() < 0.5 and "framer" not in victims:
                goal = load.count + 5_000  # what is dropped while nobody reads
                pod.wait(lambda goal=goal: load.count > goal or pod.fifo_bytes() > 500_000, "some more")
            pod.start(*victims)
    pod.wait_ready()
    pod.wait(lambda: load.count > AT_LEAST, f"{AT_LEAST} messages")
    load.finish()
    assert_some_were_dropped(pod.judge(load.sent), load)


def test_a_torn_last_line_of_dropped_log_is_mended_by_the_next_range(make_pod: Make, loads: Start) -> None:
    pod = dropping(make_pod, "durable")
    load = loads(FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.01))
    pod.start()
    pod.wait_ready()
    sent_while_stopped(pod, load, "router", AT_LEAST // 2)
    pod.wait(lambda: pod.events("dropped"), "the range has its name")
    pod.kill("router")
    with (pod.data / "dropped.log").open("ab") as file:
        file.write(b"durable|10")  # as a kill in the middle of the write leaves it
    pod.start("router")
    pod.wait_ready()
    sent_while_stopped(pod, load, "router", AT_LEAST // 2)
    pod.wait(lambda: len(pod.events("dropped")) > 1, "the next range has its name")
    load.finish()
    assert_some_were_dropped(pod.judge(load.sent), load)
