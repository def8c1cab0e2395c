"""G6 and G9: stages start in any order; a ring left by another directory, size or version is never read as ours."""

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.checker import Stream
from chaos.load import FifoLoad, Lines, Load
from chaos.pod import STAGES, Pod
from kmq.broker import status
from kmq.config.settings import Settings, load

ORDERS = list(itertools.permutations(STAGES))
PEER = {"durability": "framer", "router": "durability"}  # who makes the ring that it reads

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def ring(pod: Pod, name: str = "framed") -> Path:
    return Path(f"/dev/shm/{pod.instance}.{name}")


def starts_in_order(pod: Pod, order: tuple[str, ...]) -> None:
    """One after the other, each as far as it gets without those that are still to come."""
    lines, said = Lines("fifo"), Stream("fifo", Lines("fifo").line, 4)
    for nth, name in enumerate(order):
        pod.start(name)
        alone = name in PEER and PEER[name] not in order[:nth]
        waits = alone or (name == "router" and "framer" not in order[:nth])
        pod.wait(lambda name=name, waits=waits: pod.state(name) == ("waiting" if waits else "ready"), f"{name} is up")
        if waits:
            assert any(f"stage={name} event=waiting" in line for line in pod.log().splitlines())
        (pod.pipes / "raw").write_bytes(lines.line(nth) + b"\n")  # the FIFO lives while any stage lives
    pod.judge([said])


@pytest.mark.parametrize("order", random.Random(4).sample(ORDERS, 4), ids="-".join)
def test_stages_start_in_any_order(make_pod: Make, order: tuple[str, ...]) -> None:
    starts_in_order(make_pod(), order)


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_soak_stages_start_in_every_order(make_pod: Make, order: tuple[str, ...]) -> None:
    starts_in_order(make_pod(), order)


def with_backlog(pod: Pod, count: int = 1000) -> Stream:
    """Killed with so many messages in the ring `framed`."""
    lines = Lines("old")
    pod.start("framer", "ingress")
    pod.wait_ready("framer", "ingress")
    with (pod.pipes / "raw").open("wb", buffering=0) as raw:
        for number in range(count):
            raw.write(lines.line(number) + b"\n")
    pod.wait(lambda: pod.seq("framer") == count, "a backlog")
    pod.kill("framer", "ingress")
    return Stream("old", lines.line, count)


def test_a_ring_of_another_data_directory_is_recreated(make_pod: Make) -> None:
    """Its messages are another broker's: they must not appear in ours."""
    pod = make_pod()
    with_backlog(pod)
    pod.data = pod.settings["KMQ_DATA"] = pod.root / "other"
    pod.start()
    pod.wait_ready()
    assert any("ring=framed" in line for line in pod.events("ring_recreated"))
    lines = Lines("new")
    (pod.pipes / "raw").write_bytes(lines.line(0) + b"\n")
    pod.wait(lambda: pod.seq("router") == 1, "the first message of this directory")
    assert pod.judge([Stream("new", lines.line, 1)]).records == 1


@pytest.mark.parametrize(
    "other",
    [{"RB_BYTES": 8 << 20}, {"RB_SLOTS": 64}, {"RB_OVERFLOW_POLICY": "drop_oldest"}, {"KMQ_MAX_LINE": 1 << 19}],
    ids=lambda other: next(iter(other)),
)
def test_a_ring_of_other_settings_that_holds_messages_is_refused_and_kept(
    make_pod: Make, other: dict[str, object]
) -> None:
    pod = make_pod()
    sent = with_backlog(pod)
    ours, before = dict(pod.settings), ring(pod).read_bytes()
    pod.settings |= other
    pod.start("framer")
    assert pod.wait_exit("framer") == 78
    assert "under other settings" in pod.tail()
    assert ring(pod).read_bytes()[8192:] == before[8192:], "what it holds has been touched"
    pod.settings = ours
    pod.start()
    pod.judge([sent])


def test_an_empty_ring_of_other_settings_is_recreated(make_pod: Make, loads: Start) -> None:
    pod = make_pod()
    load = loads(FifoLoad(pod.pipes, "old", seed=1))
    pod.start()
    pod.wait(lambda: load.count > 1000, "some messages")
    load.finish()
    pod.settle()
    pod.stop()
    pod.settings |= {"RB_BYTES": 8 << 20}
    pod.start()
    pod.wait_ready()
    assert len(pod.events("ring_recreated")) == 2
    pod.judge(load.sent)


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "another layout version": lambda text: text.replace(b"layout=", b"layout=9"),
    "garbage": lambda text: os.urandom(1024),
    "zeros": lambda text: bytes(1024),
    "nothing": lambda text: b"",
}


@pytest.mark.parametrize("name", ["framed", "durable"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_ring_with_a_foreign_header_is_recreated(make_pod: Make, loads: Start, header: str, name: str) -> None:
    """What is durable survives; what was only in that ring is lost with it, for nobody can read it."""
    pod = make_pod()
    load = loads(FifoLoad(pod.pipes, "old", seed=1))
    pod.start()
    pod.wait(lambda: load.count > 1000, "some messages")
    load.finish()
    pod.settle()
    pod.kill()
    text = ring(pod, name).read_bytes()
    changed = HEADERS[header](text[:1024])
    ring(pod, name).write_bytes(changed + text[1024:] if changed else b"")
    pod.start()
    pod.wait_ready()
    assert any(f"ring={name}" in line for line in pod.events("ring_recreated"))
    lines = Lines("new")
    (pod.pipes / "raw").write_bytes(lines.line(0) + b"\n")
    pod.wait(lambda: pod.seq("router") == load.count + 1, "the next message")
    pod.judge([*load.sent, Stream("new", lines.line, 1)])


def settings_of(pod: Pod) -> Settings:
    return load({name: str(value) for name, value in pod.settings.items()}, toml="")


def flooded(pod: Pod, halted: str) -> Stream:
    """A hundred lines at once, all of them read, then a stage stops, and lines come until those before it wait for room."""
    lines, sent, raw = Lines("fifo"), 100, os.open(pod.pipes / "raw", os.O_WRONLY | os.O_NONBLOCK)
    os.write(raw, b"".join(lines.line(number) + b"\n" for number in range(sent)))
    pod.wait(lambda: pod.seq("router") == sent, "all of them are in their queues")
    pod.pause(halted)
    os.write(raw, lines.line(sent) + b"\n")  # the ring was empty, and is begun with a short block
    sent += 1
    pod.wait(lambda: pod.seq("framer") == sent, "that one is framed")
    waiting = ("framer",) if halted == "durability" else ("framer", "durability")

    def stand() -> bool:
        nonlocal sent
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                os.write(raw, lines.line(sent) + b"\n")
                sent += 1
        return all(pod.row(name).waits_since for name in waiting)

    pod.wait(stand, "all before it wait for room")
    os.close(raw)
    return Stream("fifo", lines.line, sent)


@pytest.mark.parametrize("halted", ["router", "durability"])
def test_a_ring_is_full_when_it_has_taken_what_its_settings_say(make_pod: Make, halted: str) -> None:
    """Wherever its reader stops; and what is shown of it is how much of that is used."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    stream = flooded(pod, halted)
    settings = settings_of(pod)
    full = {"framed"} if halted == "durability" else {"framed", "durable"}

    def rings() -> list[status.LinkStatus]:
        return [link for link in status.look(settings) if link.name in full]

    for link in rings():
        assert link.messages is not None
        assert link.messages >= settings.ring_slots * 3 // 4, f"{link.name}: {link.messages} messages, {link.fill}"
    pod.wait(lambda: all(link.fill == 1 for link in rings()), "they are shown as full")
    pod.resume(halted)
    pod.judge([stream])
