"""The overlay podbus as a real pod: the image takes `args` and no command, and is a whole broker in one container."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from play import ROOT, Pod, podman
from waiting import until

CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
PAGE = ROOT / "docs/kubernetes-pod.md"


@pytest.fixture(scope="module")
def pod(play_once: Callable[..., Pod]) -> Pod:
    return play_once("k8s/overlays/podbus")


def consumed(pod: Pod) -> list[int]:
    """The numbers of the orders that the consumer has printed."""
    return [int(number) for number in re.findall(r"(?m)^order (\d+)$", pod.logs("consumer"))]


def test_the_consumer_prints_what_the_application_sends_in_order(pod: Pod) -> None:
    until(lambda: len(consumed(pod)) >= 20, "20 orders", lambda: pod.logs("kmq")[-2000:])
    assert consumed(pod)[:20] == list(range(1, 21))


def test_nothing_of_it_is_reached_from_outside_of_the_pod(pod: Pod) -> None:
    for port in (5673, 5674, 5675, 8080, 8082, 9092):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((pod.ip, port), 5)


def held(pod: Pod) -> int:
    """Bytes that the broker's processes and rings take: no cache of files, which the kernel takes back at the limit."""
    group = pod.cgroup("kmq")
    (file,) = [each for each in (CGROUPS / "memory" / group, CGROUPS / group) if (each / "memory.stat").exists()]
    found = dict(line.split() for line in (file / "memory.stat").read_text().splitlines())
    names = ("anon", "shmem") if "anon" in found else ("total_rss", "total_shmem")  # of version 2, or 1
    return sum(int(found[name]) for name in names)


def test_its_memory_is_what_the_page_says_and_messages_that_are_stored_take_none_of_it(pod: Pod) -> None:
    stated, idle = (int(re.findall(pattern, PAGE.read_text())[0]) for pattern in (r"(\d+) MiB here", r"takes (\d+)\b"))
    assert pod.specs["kmq"]["resources"]["limits"]["memory"] == f"{stated}Mi"
    assert int(podman("inspect", "-f", "{{.HostConfig.Memory}}", f"{pod.name}-kmq")) == stated * MIB
    before, sent = held(pod), 50_000_000
    assert before < idle * MIB
    load = "import kmq\nwith kmq.Producer() as producer:\n for n in range(50_000): producer.send('load', bytes(1000))"
    done = pod.exec("application", "python", "-c", load)
    assert done.returncode == 0, done.stderr
    assert pod.restarts("kmq") == 0 and held(pod) < before + sent // 2


def test_a_broker_that_is_killed_as_a_whole_is_started_again_and_nothing_stored_is_lost(pod: Pod) -> None:
    until(lambda: consumed(pod), "orders")
    before = max(consumed(pod))
    pod.signal("kmq", signal.SIGKILL)
    until(lambda: pod.restarts("kmq") == 1, "another life of the container")
    until(lambda: max(consumed(pod)) > before + 20, "orders after the kill", lambda: pod.logs("kmq")[-3000:])
    found = consumed(pod)
    assert set(found) == set(range(1, max(found) + 1)), "an order that was stored has not come to the consumer"
    assert pod.restarts("application") == 0, "its producer has tried again until the broker was back"
