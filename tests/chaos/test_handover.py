"""G2 on the way from ingress to the framer: the ring `received` full, its ends killed and stopped, and what a start finds there.

A message counts from the moment at which the FIFO has the control line that speaks of it: from then on nothing is lost
and nothing doubled. What ingress had put into the ring without such a line is unacknowledged, and its room comes back.
"""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from waiting import comes

from chaos.checker import Stream
from chaos.load import FifoLoad, Load, TcpLoad, fill_up
from chaos.pod import SHM, STAGES, Pod
from kmq.links import layout, received

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def room_left(pod: Pod) -> int:
    identity = received.identity("", 1 << 20)
    return identity.ring_bytes - received.waiting_bytes(pod.instance)


def is_full(pod: Pod) -> bool:
    """Ingress has asked for room and does not get it."""
    with (SHM / f"{pod.instance}.received").open("rb") as ring:
        cells = memoryview(ring.read(layout.BLOCKS)[layout.CELLS :]).cast("Q")
    return bool(cells[layout.WRITER_SLEEPS])


def bytes_taken(pod: Pod) -> int:
    row = pod.row("ingress")
    assert row is not None
    return row.bytes


def until_full(pod: Pod, loads: list[TcpLoad]) -> None:
    """The ring has no room, and ingress reads nobody any more."""
    pod.wait(lambda: is_full(pod), "the ring is full")
    taken, sent = -1, -1

    def stands_still() -> bool:
        nonlocal taken, sent
        before = taken, sent
        taken, sent = bytes_taken(pod), sum(load.count for load in loads)
        return before == (taken, sent) and not comes(lambda: bytes_taken(pod) != taken, 0.3)

    pod.wait(stands_still, "ingress reads nobody")
    assert is_full(pod)


def with_full_ring(pod: Pod, start: Start, count: int = 3) -> list[TcpLoad]:
    """A pod whose framer is stopped, and producers who send until the ring is full."""
    loads = [TcpLoad(pod.pipes, f"tcp{n}", seed=n, rest_s=0) for n in range(count)]
    pod.start()
    pod.wait_ready()
    pod.pause("framer")
    for load in loads:
        start(load)
    until_full(pod, loads)
    return loads


def goes_on(pod: Pod) -> None:
    taken, seq = bytes_taken(pod), pod.seq("durability")
    pod.wait(lambda: bytes_taken(pod) > taken + (4 << 20), "ingress reads again")
    pod.wait(lambda: pod.seq("durability") > seq, "messages are stored")


def finish(pod: Pod, loads: list[TcpLoad]) -> list[Stream]:
    for load in loads:
        load.finish()
    return [stream for load in loads for stream in load.sent]


def test_a_full_ring_is_backpressure_and_nothing_else(make_pod: Make, loads: Start) -> None:
    pod = make_pod()
    producers = with_full_ring(pod, loads)
    pod.resume("framer")
    goes_on(pod)
    sent = finish(pod, producers)
    assert {stream.mode for stream in sent} == {"all"}, "a producer's connection broke"
    pod.judge(sent)


def test_shells_are_heard_and_acknowledgements_sent_while_the_ring_is_full(make_pod: Make, loads: Start) -> None:
    """Durability alone stops: what the framer takes goes into the ring `framed`, and then the ring `received` fills."""
    pod = make_pod()
    producers = [TcpLoad(pod.pipes, f"tcp{n}", seed=n, rest_s=0) for n in range(2)]
    fifo = FifoLoad(pod.pipes, "fifo", seed=9)
    pod.start()
    pod.wait_ready()
    pod.pause("durability")
    for load in (*producers, fifo):
        loads(load)
    until_full(pod, producers)
    pod.resume("durability")
    goes_on(pod)
    sent = finish(pod, producers)
    fifo.finish()
    pod.judge([*sent, *fifo.sent])


@pytest.mark.parametrize("victims", [("framer",), ("framer", "durability"), STAGES[1:]], ids="+".join)
def test_ingress_that_waits_for_room_goes_on_once_the_killed_are_back(
    make_pod: Make, loads: Start, victims: tuple[str, ...]
) -> None:
    pod = make_pod()
    producers = with_full_ring(pod, loads)
    for _ in range(2):
        pod.kill(*victims)
        pod.start(*victims)
        pod.wait_ready(*victims)
        goes_on(pod)
        pod.pause("framer")
        until_full(pod, producers)
    pod.resume("framer")
    sent = finish(pod, producers)
    assert {stream.mode for stream in sent} == {"all"}, "a producer's connection broke"
    pod.judge(sent)


def test_ingress_killed_again_and_again_with_a_full_ring(make_pod: Make, loads: Start) -> None:
    pod = make_pod()
    producers = with_full_ring(pod, loads)
    keeper = os.open(pod.pipes / "raw", os.O_RDWR | os.O_NONBLOCK)
    try:
        for _ in range(4):
            pod.kill("ingress")
            pod.start("ingress")
            pod.wait_ready("ingress")
        pod.resume("framer")
        goes_on(pod)
        pod.judge(finish(pod, producers))
    finally:
        os.close(keeper)


def test_ingress_killed_again_and_again_under_full_load(make_pod: Make, rng: random.Random, loads: Start) -> None:
    pod = make_pod(RB_BYTES=1 << 20, KMQ_MAX_LINE=1 << 16)
    producers = [TcpLoad(pod.pipes, f"tcp{n}", seed=n, rest_s=0, longest=60_000) for n in range(4)]
    pod.start()
    pod.wait_ready()
    for load in producers:
        loads(load)
    for _ in range(15):
        taken = bytes_taken(pod)
        pod.wait(lambda taken=taken: bytes_taken(pod) > taken + rng.randrange(1 << 21), "it takes messages")
        pod.kill("ingress")
        pod.start("ingress")
        pod.wait_ready("ingress")
    pod.judge(finish(pod, producers))


def test_what_a_killed_ingress_put_and_never_spoke_of_is_free_again(make_pod: Make, loads: Start) -> None:
    """The FIFO is full, so that it takes no control line, and then the ring is full of bytes that nobody speaks of."""
    pod = make_pod()
    filler = FifoLoad(pod.pipes, "filler", seed=1, rest_s=0)
    producers = [TcpLoad(pod.pipes, f"tcp{n}", seed=n, rest_s=0) for n in range(3)]
    pod.start()
    pod.wait_ready()
    pod.pause("framer")
    loads(filler)
    pod.wait(filler.blocked.is_set, "the FIFO is nearly full")
    brim = fill_up(pod.pipes, "brim")
    filler.finish()
    for load in producers:
        loads(load)
    pod.wait(lambda: bytes_taken(pod) > 0, "ingress has taken some")
    pod.kill("ingress")
    pod.start("ingress")
    pod.resume("framer")
    pod.wait_ready()
    goes_on(pod)
    pod.judge([*finish(pod, producers), *filler.sent, brim])


@pytest.mark.parametrize("keeps_fifo", [True, False], ids=["the FIFO lives", "the FIFO dies"])
def test_a_full_ring_whose_stages_have_all_died_is_not_stuck(make_pod: Make, loads: Start, keeps_fifo: bool) -> None:
    pod = make_pod()
    producers = with_full_ring(pod, loads)
    with ExitStack() as stack:
        if keeps_fifo:
            stack.callback(os.close, os.open(pod.pipes / "raw", os.O_RDWR | os.O_NONBLOCK))
        pod.kill()
        cut = [len(load.sent) for load in producers]
        pod.start()
        pod.wait_ready()
        goes_on(pod)
        sent = finish(pod, producers)
        if not keeps_fifo:  # those whose connection had ended in order may have lost their last lines, too
            sent = [
                stream._replace(mode="prefix") if at < before else stream
                for load, before in zip(producers, cut, strict=True)
                for at, stream in enumerate(load.sent)
            ]
        pod.judge(sent)


def test_a_ring_made_anew_is_read_from_its_start(make_pod: Make, loads: Start) -> None:
    """The framer, there first, still knows how far it had come in the ring that is gone."""
    pod = make_pod()
    before, after = TcpLoad(pod.pipes, "before", seed=1), TcpLoad(pod.pipes, "after", seed=2)
    loads(before)
    pod.start()
    pod.wait(lambda: before.count > 20_000, "some messages")
    before.finish()
    pod.settle()
    pod.kill()
    (SHM / f"{pod.instance}.received").unlink()
    pod.start("framer")
    pod.wait_ready("framer")
    pod.start(*(name for name in STAGES if name != "framer"))
    pod.wait_ready()
    loads(after)
    pod.wait(lambda: after.count > 1000, "more messages")
    pod.judge(finish(pod, [before, after]))
