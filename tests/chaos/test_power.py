"""G1: what was acknowledged survives a power cut, whatever the disk was doing, and the broker goes on behind it.

A power cut takes the page cache, every process and /dev/shm at once. The file system stops first, under stages at work.
"""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from brokers import Broker
from waiting import comes

from chaos.acked import AckedLoad, account, read_wal
from chaos.directories import everything, findings
from chaos.hurry import hurried
from chaos.load import Load
from chaos.loopfs import LoopFs, disk_of
from chaos.pod import RINGS, SHM, Pod
from kmq.links import layout
from kmq.log import checkpoint, show

pytestmark = pytest.mark.root
CUTS, SOAK_CUTS, MOST_CUTS = 8, 20, 60


def a_moment(pod: Pod, rng: random.Random) -> Callable[[], object]:
    """Any."""
    end = time.monotonic() + rng.uniform(0.0, 0.5)
    return lambda: time.monotonic() > end


def a_roll(pod: Pod, rng: random.Random) -> Callable[[], object]:
    """The WAL has just gone on in a new segment."""
    before = len(list((pod.data / "append").glob("*.log")))
    return lambda: len(list((pod.data / "append").glob("*.log"))) > before


def a_checkpoint_of_producers(pod: Pod, rng: random.Random) -> Callable[[], object]:
    """It is being written."""
    return (pod.data / "producers.ckpt.new").exists


def a_checkpoint_of_the_router(pod: Pod, rng: random.Random) -> Callable[[], object]:
    """It is being written."""
    return (pod.data / "router.ckpt.new").exists


def behind_a_checkpoint(pod: Pod, rng: random.Random) -> Callable[[], object]:
    """One of the router's is complete, so the next start goes on from there."""
    path = pod.data / "router.ckpt"
    before = path.stat().st_mtime_ns if path.exists() else 0
    return lambda: path.exists() and path.stat().st_mtime_ns > before


MOMENTS = (a_moment, a_roll, a_checkpoint_of_producers, a_moment, a_checkpoint_of_the_router, behind_a_checkpoint)


def cut_power(pod: Pod, disk: LoopFs, producers: list[AckedLoad]) -> int:
    """Everything is gone at once but the disk; returns the seq up to which GET_ACK has said ACK.

    What is told once the file system goes down does not count: an fdatasync that meets the shutdown may return 0 with
    nothing written (2 of 200 on ext4 and 1 of 200 on XFS, a loop of write and fdatasync alone). Power leaves no time to tell.
    """
    for load in producers:
        load.deafen()
    promised = pod.seq_left("durability")
    disk.cut_power()
    for process in pod.processes.values():
        process.kill()
        process.wait()
    for ring in RINGS:
        layout.remove(pod.instance, ring)
    Path(f"/dev/shm/{pod.instance}.stats").unlink()
    disk.power_on()
    return promised


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("ext4", 0),
        *(pytest.param("ext4", n, marks=pytest.mark.soak) for n in range(1, 17)),
        *(pytest.param("xfs", n, marks=pytest.mark.soak) for n in range(4)),
    ],
)
def test_nothing_acknowledged_is_lost_in_power_cuts(
    make_pod: Callable[..., Pod],
    loads: Callable[[Load], Load],
    tmp_path: Path,
    cleanup: ExitStack,
    rng: random.Random,
    kind: str,
    run: int,
) -> None:
    disk = disk_of(kind, 512 << 20, tmp_path, cleanup)
    pod = make_pod(KMQ_DATA=disk.path / "data", KMQ_SEGMENT_BYTES="2 MiB", PYTHONPATH=hurried(tmp_path))
    pod.data = disk.path / "data"
    producers = [AckedLoad(pod.pipes, f"{kind}-{run}-{n}", seed=rng.randrange(1 << 32), window=500) for n in range(2)]
    for load in producers:
        loads(load)
    met: Counter[str] = Counter()
    for cuts, moment in enumerate(itertools.islice(itertools.cycle(MOMENTS), MOST_CUTS)):
        if cuts >= (SOAK_CUTS if run else CUTS) and all(load.duplicates for load in producers):
            break  # not before a reply of each went down with the power: its message was not stored again
        told = [len(load.seqs) for load in producers]
        pod.start()
        pod.wait(
            lambda told=told: all(map(AckedLoad.has, producers, [n + 1 for n in told])), "messages are acknowledged"
        )
        # Some of them are short. What does not come within this time is not waited for.
        met[moment.__name__] += comes(moment(pod, rng), 1.0, every_s=0.0005)
        promised = cut_power(pod, disk, producers)
        account(pod.data, *producers)  # before a recovery touches the files
        assert int(read_wal(pod.data)[-1].split(b"|", 1)[0]) >= promised
        met["a NUL tail"] += any(path.read_bytes().endswith(b"\0") for path in pod.data.glob("*/**/*.log"))
    pod.start()
    for load in producers:
        load.finish()
        assert load.is_finished
    pod.judge()
    account(pod.data, *producers)
    print(f"fs={kind} cuts={cuts} acked={sum(len(load.seqs) for load in producers)} met={dict(met)}")
    assert all(load.duplicates for load in producers)


def oldest(pod: Pod) -> int:
    return min((int(path.stem) for path in (pod.data / "append").glob("*.log")), default=0)


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.soak)])
def test_power_cuts_while_retention_deletes_leave_no_gap(
    make_pod: Callable[..., Pod], loads: Callable[[Load], Load], tmp_path: Path, cleanup: ExitStack, kind: str
) -> None:
    """What is still there has no gap, is what was acknowledged, and every reader gets it."""
    disk = disk_of(kind, 512 << 20, tmp_path, cleanup)
    limits = {"KMQ_SEGMENT_BYTES": "64 KiB", "KMQ_RETENTION_BYTES": "1 MiB"}
    pod = make_pod(KMQ_DATA=disk.path / "data", PYTHONPATH=hurried(tmp_path), **limits)
    pod.data = disk.path / "data"
    load = AckedLoad(pod.pipes, "retained", seed=1, window=500)
    loads(load)
    for _ in range(3):
        before = oldest(pod)
        pod.start()
        pod.wait(lambda before=before: load.has(0) and oldest(pod) > max(before, 1), "retention has deleted")
        cut_power(pod, disk, [load])
    pod.start()
    load.finish()
    pod.settle()
    pod.stop()
    told = {seq: number for number, seq in enumerate(load.seqs, start=1)}
    for name, log in show.logs(str(pod.data), ""):
        found = everything(log)
        assert found and list(found) == list(range(min(found), max(found) + 1)), name
        stored = {int(line.split(b"|", 1)[0]): line for line in found.values()}
        assert all(line.endswith(load.stored(told[seq])) for seq, line in stored.items()), name
        assert not log.by_seq or max(stored) == max(told)
    assert not findings(pod.data) and not pod.events("unrecoverable")


# --- topics that nobody writes to ------------------------------------------------------------------------------------

TOPICS = 100


def values_of(broker: Broker, topic: str) -> list[str]:
    shown = broker.kmq("consume", topic)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def cut_the_power_of(broker: Broker, disk: LoopFs) -> None:
    disk.cut_power()
    broker.kill_all()
    for path in SHM.glob(f"{broker.instance}.*"):
        path.unlink()
    disk.power_on()


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.soak)])
@pytest.mark.parametrize("moment", ["after kmq down", "after a checkpoint"])
def test_idle_topics_and_offsets_are_read_after_a_power_cut(
    new_broker: Callable[..., Broker], tmp_path: Path, cleanup: ExitStack, kind: str, moment: str
) -> None:
    """What router.ckpt vouches for is on disk with all that a reader needs for it; nothing is written to it again."""
    disk = disk_of(kind, 512 << 20, tmp_path, cleanup)
    broker = new_broker(disk.path / "data")
    broker.env["PYTHONPATH"] = hurried(tmp_path)
    broker.up()
    broker.send_lines(
        [b"idle%d|0|%d|value %d" % (n, n, n) for n in range(TOPICS)] + [b"orders|0||%d" % n for n in range(100)]
    )
    broker.wait_routed(TOPICS + 100)
    read = broker.kmq("consume", "orders", "--group", "readers", "--count", "40")
    assert read.stdout.split() == [str(n) for n in range(40)], read.stderr
    last = int(broker.wal()[-1].split(b"|")[0])
    if moment == "after kmq down":
        broker.down()
    else:
        broker.wait(lambda: checkpoint.routed_seq(str(broker.data)) >= last, "a checkpoint")
    cut_the_power_of(broker, disk)

    broker.up()
    shown = broker.kmq("status")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for name, log in show.logs(str(broker.data), ""):
        assert everything(log), name
    assert values_of(broker, f"idle{TOPICS - 1}") == [f"value {TOPICS - 1}"]
    groups = json.loads(broker.kmq("groups", "describe", "readers", "--json").stdout)
    assert [row["committed"] for row in groups["partitions"]] == [40]
    rest = broker.kmq("consume", "orders", "--group", "readers", "--from", "latest")
    assert rest.stdout.split() == [str(n) for n in range(40, 100)], rest.stderr + broker.log()
    broker.down()
    verified = broker.kmq("verify")
    assert verified.returncode == 0, verified.stdout
