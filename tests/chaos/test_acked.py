"""G1 through the whole chain, kmq.Producer included: what was said to be stored is stored, once, under the seq that was said.

Producers of all three kinds send while stages are killed in every order. Judged from the WAL alone: each payload is unique.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kmq
from chaos.load import TOPICS, Load
from chaos.pod import STAGES, Pod
from chaos.test_kill import PAIRS, SMALL, blow, moment

KINDS = {"ids": {}, "named": {"producer": "named"}, "window": {"window": "chaos"}, "none": {"dedupe": False}}
ORDERS = list(itertools.permutations(STAGES))

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


class ProducerLoad(Load):
    """A kmq.Producer that sends messages and lists of them, until told to stop; `sent` is what it was told about each."""

    def __init__(self, pipes: Path, name: str, seed: int, **options: object) -> None:
        super().__init__(seed)
        self.prefix, self.count = name, 0
        self.sent: list[tuple[list[bytes], kmq.Delivery]] = []
        port_file = pipes / "ingress.port"
        self.producer = kmq.Producer(
            port=lambda: int(port_file.read_text() or 0), max_in_flight=self.rng.choice([50, 5000]), **options
        )

    def work(self) -> None:
        with self.producer:
            while not self.enough.is_set():
                topic = self.rng.choice(TOPICS).partition(".")[0]
                if self.rng.random() < 0.1:
                    payloads = self._payloads(self.rng.randrange(1, 50))
                    self.sent.append((payloads, self.producer.send_many(topic, payloads)))
                else:
                    payloads = self._payloads(1)
                    self.sent.append((payloads, self.producer.send(topic, payloads[0], key=str(self.count))))
                if self.rng.random() < 0.01:
                    self.sent[-1][1].result()
                    self.rest()

    def _payloads(self, count: int) -> list[bytes]:
        first, self.count = self.count, self.count + count
        filler = b"x" * self.rng.choice([0, 30, 30, 2000])
        return [b"%b-%d %b" % (self.prefix.encode(), n, filler) for n in range(first, self.count)]


def judge(data: Path, loads: list[ProducerLoad]) -> None:
    """Acked is stored where it was said; with a memory behind it once, else at least once. Nothing was given up."""
    places = defaultdict(list)
    for path in sorted((data / "append").glob("*.log")):
        for line in path.read_bytes().splitlines():
            seq, _, _, _, _, payload = line.split(b"|", 5)
            places[payload].append(int(seq))
    for load in loads:
        assert load.sent, f"{load.prefix} sent nothing"
        lost, elsewhere, twice = [], [], []
        for payloads, delivery in load.sent:
            assert delivery.done and delivery.error is None, delivery.error
            for payload, seq in zip(payloads, delivery.seqs, strict=True):
                found = places[payload]
                if not found:
                    lost.append((payload, seq))
                elif seq not in found:
                    elsewhere.append((payload, seq, found))
                elif len(found) > 1 and load.prefix != "none":
                    twice.append((payload, found))
        assert not lost, f"{load.prefix}: {len(lost)} acked and not stored: {lost[:3]}"
        assert not elsewhere, f"{load.prefix}: {len(elsewhere)} not where the ack said: {elsewhere[:3]}"
        assert not twice, f"{load.prefix}: {len(twice)} stored twice: {twice[:3]}"


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
    if pod.comes(lambda: pod.seq("framer") > base + 10, 0.5):
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
