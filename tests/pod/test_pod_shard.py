"""Overlay `cluster-dev` as real pods: a rolling upgrade under load loses no acknowledged message."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from load import PORT
from play import Pod, Pods
from waiting import until

import kmq

NAMES = ("kmq-0", "kmq-1", "kmq-2")
PATIENCE_S = 300.0  # each pod makes seven processes anew, on a machine that may be busy


@pytest.fixture(scope="module")
def shard(play_all_once: Callable[..., Pods]) -> Iterator[Pods]:
    """Played once; what ends stays ended, so that the test is the StatefulSet's controller."""
    yield play_all_once("cluster-dev", restart_policy="Never", KMQ_RETENTION_BYTES="none")


def wal(pod: Pod) -> bytes:
    segments = (pod.volume("data") / "append").glob("*.log")
    return b"".join(path.read_bytes() for path in sorted(segments, key=lambda path: int(path.stem.split("-")[0])))


class Load:
    """A producer with ids, which knows the addresses of all three pods."""

    def __init__(self, pods: list[Pod]) -> None:
        self.acked: set[str] = set()
        self.errors: list[str] = []
        self._hosts = ",".join(f"{pod.ip}:{PORT}" for pod in pods)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        def answered(text: str) -> Callable[[Any], None]:
            return lambda reply: self.errors.append(str(reply.error)) if reply.error else self.acked.add(text)

        with kmq.Producer(self._hosts, producer="upgrade", timeout_s=PATIENCE_S) as producer:
            number = 0
            while not self._is_over.is_set():
                number += 1
                producer.send("orders", f"m-{number}", id=number, callback=answered(f"m-{number}"))
                time.sleep(0.002)
            producer.flush(PATIENCE_S)

    def finish(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive() and not self.errors, self.errors


def test_a_rolling_upgrade_under_load_loses_no_acknowledged_message(shard: Pods) -> None:
    pods = [shard[name] for name in NAMES]
    load = Load(pods)
    until(lambda: len(load.acked) > 100, "messages before the upgrade")
    for pod in reversed(pods):  # as a StatefulSet does it: the last one first, each waits until the one before is ready
        codes = pod.terminate()
        assert set(codes.values()) == {0}, (pod.role, codes, pod.logs("replica")[-2000:])
        before = len(load.acked)
        until(lambda before=before: len(load.acked) > before, f"acknowledgements while {pod.role} is away")
        pod.start()
        pod.wait_ready(PATIENCE_S)
    load.finish()
    until(lambda: len({wal(pod) for pod in pods}) == 1, "the same records on all three")
    stored = Counter(text.decode() for text in re.findall(rb"(?m)\|(m-\d+)$", wal(pods[0])))
    assert load.acked <= stored.keys() and max(stored.values()) == 1
