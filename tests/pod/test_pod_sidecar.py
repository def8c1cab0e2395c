"""The sidecar overlay as a real pod: an application, its broker and its consumer in one, each of which may die.

The application is the loop of the manifest, which writes `{"order": n}` into /pipes/raw ten times a second.
"""

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator

import pytest
from load import connect, judge_files
from play import ROOT, Pod, podman
from waiting import meanwhile, until

from kmq.config.settings import STAGES

SIDECAR = "k8s/overlays/sidecar"
OURS = [f"kmq-{name}" for name in STAGES]


@pytest.fixture(scope="module")
def pod(play_once: Callable[..., Pod], tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """The example with the monitoring component, and an application that is not of our uid.

    What ends stays so: podman would start again also what is told to end (kill() does as the kubelet).
    """
    directory = tmp_path_factory.mktemp("sidecar")
    there = os.path.relpath(ROOT / "k8s", directory)
    other = {"op": "add", "path": "/spec/template/spec/containers/0/securityContext/runAsUser", "value": 20001}
    kustomization = {
        "resources": [f"{there}/overlays/sidecar"],
        "components": [f"{there}/components/sidecar-monitoring"],
        "patches": [{"target": {"kind": "StatefulSet"}, "patch": json.dumps([other])}],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    return play_once(directory, restart_policy="Never")


def offset(pod: Pod) -> int:
    """What the consumer will go on with, by its file; 0 while there is none."""
    path = pod.volume("consumed") / "offset.txt"
    return int(path.read_text()) if path.exists() else 0


def consumed(pod: Pod) -> list[tuple[int, bytes]]:
    """(offset, payload) in the order in which the consumer was done with them."""
    lines = (pod.volume("consumed") / "records.txt").read_text().split("\n")[:-1]
    return [(int(at), b64decode(text)) for at, text in (line.split(" ") for line in lines)]


def queued(pod: Pod) -> list[tuple[int, bytes]]:
    """(seq, payload) of topic orders: a PodBus offset is a seq."""
    lines = (pod.volume("kmq-data") / "orders.log").read_bytes().split(b"\n")[:-1]
    return [(int(fields[0]), fields[5]) for fields in (line.split(b"|", 5) for line in lines)]


def judge(pod: Pod, kills: int = 0) -> None:
    """The consumer has had each record in order; again only the one that it had not saved when it was killed."""
    saved, seen, queue = offset(pod), consumed(pod), queued(pod)
    once = [record for before, record in zip([None, *seen], seen, strict=False) if record != before]
    assert len(seen) - len(once) <= kills
    assert once == queue[: len(once)], "a gap, a duplicate, or another record than the queue has"
    assert saved - 1 in [seq for seq, _ in once], "it has saved what it has not done"


def orders(pod: Pod) -> list[int]:
    """What the application has written, by its own count."""
    return [json.loads(payload)["order"] for _, payload in queued(pod) if payload.startswith(b"{")]


def test_what_the_application_writes_comes_to_the_consumer(pod: Pod) -> None:
    until(lambda: offset(pod) > 10, "the consumer follows")
    assert orders(pod)[:10] == list(range(1, 11))
    judge(pod)


def test_the_application_may_also_ask_for_acknowledgements(pod: Pod) -> None:
    """On 5673, which is open to this pod alone."""
    script = "import kmq; print(kmq.Producer().send('orders', b'acked').result())"
    answer = pod.exec("application", "python", "-c", script)
    assert answer.returncode == 0, answer
    assert int(answer.stdout) > 0
    until(lambda: b"acked" in [payload for _, payload in consumed(pod)], "the consumer gets it")
    with pytest.raises(ConnectionRefusedError):
        connect(pod)


def test_metrics_can_be_scraped_from_outside_and_nothing_else_be_reached(pod: Pod) -> None:
    address = f"http://{pod.ip}:{pod.port('kmq-metrics')}"
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        assert 'kmq_end_offset{partition="0",topic="orders"}' in response.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/v1/logs", timeout=60)
    for port in (5673, 5675, 8080, 8082, 9092):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((pod.ip, port), 5)


@pytest.fixture
def offsets(pod: Pod) -> Iterator[list[int]]:
    """Every value that the offset file is seen to have."""
    seen = [offset(pod)]
    with meanwhile(lambda: seen.append(offset(pod)), every_s=0.005):
        yield seen


def kill(pod: Pod, *names: str) -> None:
    """SIGKILL them at once and start them again; the consumer goes on."""
    for pid in [pod.pid(name) for name in names]:
        os.kill(pid, signal.SIGKILL)
    podman("wait", *(f"{pod.name}-{name}" for name in names))
    podman("start", *(f"{pod.name}-{name}" for name in names))
    now = offset(pod)
    until(lambda: offset(pod) > now + 5, f"the consumer goes on after {names}")


def test_consumer_and_broker_go_on_where_they_were_when_killed(pod: Pod, offsets: list[int]) -> None:
    kill(pod, "consumer")
    kill(pod, "kmq-router")
    kill(pod, "kmq-router", "consumer")
    written = orders(pod)
    assert written == list(range(1, len(written) + 1)), "lost or doubled though the FIFO lived"
    kill(pod, "consumer", "kmq-gateway", *OURS)
    assert offsets == sorted(offsets), "the offset went back"
    judge(pod, kills=3)
    written = orders(pod)
    assert written == sorted(set(written))


def end_as_the_kubelet_does(pod: Pod) -> dict[str, int]:
    """The application first, then the sidecars, one after the other, backwards; the exit codes, in this order."""
    codes = {}
    for name in reversed(pod.containers):
        pod.signal(name, signal.SIGTERM)
        codes[name] = int(podman("wait", f"{pod.name}-{name}", patience_s=pod.grace_s))
    return codes


def test_the_end_comes_in_the_order_in_which_messages_pass(pod: Pod) -> None:
    kills = len(consumed(pod)) - len(set(consumed(pod)))
    now, written = offset(pod), orders(pod)
    until(lambda: offset(pod) > now + 10, "messages are on their way")
    began = time.monotonic()
    codes = end_as_the_kubelet_does(pod)
    assert time.monotonic() - began < pod.grace_s
    assert list(codes) == ["application", *OURS, "consumer", "kmq-gateway"]
    assert codes == dict.fromkeys(codes, 0)
    judge_files(pod.volume("kmq-data"))
    since = orders(pod)[len(written) :]
    assert since == list(range(since[0], since[0] + len(since))), "something was lost on its way"
    judge(pod, kills)
