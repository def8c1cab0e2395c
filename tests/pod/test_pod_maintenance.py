"""The Jobs for a broker that is down, on the volume of a pod that was played: repair, backup, restore."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from play import Pod
from waiting import until

import kmq

COUNT = 3000
BUSY, NOT_EMPTY = 69, 1


@pytest.fixture(scope="module")
def pod(play_once: Callable[..., Pod]) -> Pod:
    """A broker with messages. What ends stays so, until it is started again: a StatefulSet scaled to 0 and to 1."""
    pod = play_once(restart_policy="Never")
    send(pod, range(1, COUNT + 1))
    until(lambda: len(queue(pod)) == COUNT, "all are in their queue")
    return pod


@pytest.fixture(scope="module")
def backups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The claim kmq-backup, as a kubelet gives it to the group."""
    path = tmp_path_factory.mktemp("backups")
    path.chmod(0o2777)
    return path


@pytest.fixture
def job(play: Callable[..., Pod], pod: Pod, backups: Path) -> Callable[[str], tuple[int, str]]:
    """Plays the Job of an overlay on the pod's volume: its exit code and what it says."""

    def run(name: str) -> tuple[int, str]:
        volumes = {"data": pod.volume("data"), "backup": backups}
        return play(f"k8s/overlays/{name}", ready=False, restart_policy="Never", volumes=volumes).finish()

    return run


def send(pod: Pod, ids: range) -> list[int]:
    """The seqs of messages with these ids, by a producer of one name, who may send them again."""
    with kmq.Producer(pod.ip, 5673, producer="till") as producer:
        sent = [producer.send("orders", b"order %d" % n, id=n) for n in ids]
    return [each.result() for each in sent]


def queue(pod: Pod) -> list[bytes]:
    path = pod.volume("data") / "orders.log"
    return path.read_bytes().splitlines() if path.exists() else []


def test_no_job_touches_the_volume_of_a_running_broker(
    pod: Pod, job: Callable[[str], tuple[int, str]], backups: Path
) -> None:
    before = queue(pod)
    assert [job("repair")[0], job("backup")[0], job("restore")[0]] == [BUSY, BUSY, NOT_EMPTY]
    assert queue(pod) == before and not list(backups.iterdir())


def test_a_damaged_queue_is_repaired_by_the_job_and_the_pod_goes_on(
    pod: Pod, job: Callable[[str], tuple[int, str]]
) -> None:
    before = queue(pod)
    assert len(before) == COUNT
    assert set(pod.terminate().values()) == {0}
    log = (pod.volume("data") / "orders.log").resolve()
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    code, said = job("repair")
    assert code == 0, said
    assert "orders" in said
    pod.start()
    pod.wait_ready()
    assert queue(pod) == before
    assert send(pod, range(COUNT + 1, COUNT + 2)) == [COUNT + 1]
    until(lambda: len(queue(pod)) == COUNT + 1, "it is in its queue")


def test_a_volume_that_is_lost_is_restored_from_its_backup(
    pod: Pod, job: Callable[[str], tuple[int, str]], backups: Path
) -> None:
    before = queue(pod)
    pod.terminate()
    code, said = job("backup")
    assert code == 0, said
    (copy,) = backups.iterdir()
    assert copy.name in said and copy.suffix == ".tar"
    for entry in pod.volume("data").iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (pod.volume("data") / "lost+found").mkdir(mode=0o700)
    code, said = job("restore")
    assert code == 0, said
    pod.start()
    pod.wait_ready()
    assert queue(pod) == before
    assert send(pod, range(COUNT, COUNT + 3)) == [COUNT, COUNT + 1, COUNT + 2], "what was stored is known again"
    until(lambda: len(queue(pod)) == COUNT + 2, "the new one, once")
