"""G7, G3: on a full disk retention makes the room by itself, also where nothing comes: what is over its limits is sealed."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.acked import AckedLoad, read_wal
from chaos.hurry import hurried
from chaos.load import Load
from chaos.loopfs import FewInodes, LoopFs, disk_of, few_inodes
from chaos.pod import Pod

pytestmark = pytest.mark.root
MIB = 1 << 20
SMALL = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}
LIMITS = {"KMQ_RETENTION_BYTES": 4 * MIB, "KMQ_SEGMENT_BYTES": 2 * MIB}
WIDE = {"KMQ_RETENTION_BYTES": 4 * MIB}  # segments may be larger than all that is to be kept
FIRST = {"append": f"{1:020d}.log", "topics/wide/0": f"{0:020d}.log"}
RESUME_S = 60.0  # two or three seconds where the machine has nothing else to do
CHECK_GAP = Path(__file__).resolve().parents[2] / "scripts/check-gap"

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


@pytest.fixture
def disk(tmp_path: Path, cleanup: ExitStack) -> LoopFs:
    return disk_of("ext4", 64 * MIB, tmp_path, cleanup)


def pod_on(disk: LoopFs | FewInodes, make_pod: Make, **settings: object) -> Pod:
    pod = make_pod(KMQ_DATA=disk.path / "data", **SMALL, **settings)
    pod.data = disk.path / "data"
    pod.settings["PYTHONPATH"] = hurried(pod.root)  # the WAL is free soon, not in half a minute
    return pod


def filled(pod: Pod, loads: Start) -> AckedLoad:
    """A producer that is refused for lack of room, and goes on trying; nobody sends a plain line."""
    load = AckedLoad(pod.pipes, "acked", seed=1, longest=4000)
    pod.start()
    pod.wait_ready()
    loads(load)
    pod.wait(lambda: load.has(0) and load.codes["disk_full"] + load.codes["quota"], "it is refused")
    return load


def restarted_with_limits(pod: Pod, load: AckedLoad, **limits: object) -> None:
    """It is accepted again, soon and by itself."""
    pod.settings |= limits
    had = len(load.seqs)
    pod.start()
    pod.wait(lambda: load.has(had + 1000), "retention has made room", RESUME_S)
    for log in ("append", "topics/wide/0"):  # more than the limit
        pod.wait(
            lambda log=log: not (pod.data / log / FIRST[log]).exists(), f"the first segment of {log} has gone", RESUME_S
        )


def judge(pod: Pod, load: AckedLoad) -> None:
    """What is still there has no gap, is what was acknowledged, and is there once; verify finds nothing."""
    load.finish()
    pod.settle()
    last = pod.seq("durability")
    pod.stop()
    wal = {int(line.split(b"|", 1)[0]): line for line in read_wal(pod.data)}
    assert sorted(wal) == list(range(min(wal), last + 1)) and min(wal) > 1
    told = {seq: number for number, seq in enumerate(load.seqs, start=1)}
    assert len(told) == len(load.seqs) and all(wal[seq].endswith(load.stored(told[seq])) for seq in wal)
    queued = Counter(line for path in pod.data.glob("topics/*/*/*.log") for line in path.read_bytes().splitlines())
    assert set(queued.values()) == {1}
    assert all(wal[seq] in queued for seq in range(last - 20, last + 1))
    paths = sorted((pod.data / "append").glob("*.log"))
    subprocess.run([CHECK_GAP, *paths], check=True)
    env = {name: str(value) for name, value in pod.settings.items()}
    verify = [sys.executable, "-m", "kmq", "verify"]
    result = subprocess.run(verify, env=os.environ | env, cwd=pod.root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not pod.events("unrecoverable") and not pod.events("failed")


@pytest.mark.parametrize(
    ("is_killed", "limits"),
    [
        pytest.param(False, LIMITS, id="stopped, small segments"),
        pytest.param(True, LIMITS, id="killed, small segments", marks=pytest.mark.soak),
        pytest.param(False, WIDE, id="stopped, one segment", marks=pytest.mark.soak),
        pytest.param(True, WIDE, id="killed, one segment"),
    ],
)
def test_a_full_disk_frees_itself_when_it_is_started_with_smaller_limits(
    make_pod: Make, loads: Start, disk: LoopFs, is_killed: bool, limits: dict[str, int]
) -> None:
    pod = pod_on(disk, make_pod)
    load = filled(pod, loads)
    pod.kill() if is_killed else pod.stop()
    restarted_with_limits(pod, load, **limits)
    judge(pod, load)


def test_a_reached_quota_frees_itself_when_it_is_started_with_smaller_limits(make_pod: Make, loads: Start) -> None:
    pod = make_pod(KMQ_DATA_QUOTA=48 * MIB, **SMALL)
    load = filled(pod, loads)
    pod.stop()
    restarted_with_limits(pod, load, **LIMITS)
    judge(pod, load)


def test_records_that_are_too_old_go_though_nothing_comes_but_the_last_of_each_log(make_pod: Make) -> None:
    pod = make_pod(KMQ_RETENTION_AGE="2s", **SMALL)
    lines = [b"old.k%d|0|%d|x" % (n % 9, n) for n in range(101)]
    pod.start()
    pod.wait_ready()
    write(pod, lines[:100])
    pod.wait(lambda: pod.seq("router") == 100, "they are routed")
    pod.stop()  # what the framer remembers of them is on disk: the WAL is free
    pod.start()
    logs = {"append": 100, "topics/old/0": 99}
    for log, last in logs.items():
        pod.wait(lambda log=log, last=last: held(pod.data / log) == [last], f"{log} has its last record", RESUME_S)
    pod.kill()
    pod.start()
    pod.wait_ready()
    write(pod, lines[100:])
    pod.settle()
    pod.stop()
    for log, last in logs.items():
        assert set(held(pod.data / log)) <= {last, last + 1} and last + 1 in held(pod.data / log)


def write(pod: Pod, lines: list[bytes]) -> None:
    """As a shell does: less than PIPE_BUF at once."""
    with (pod.pipes / "raw").open("wb", buffering=0) as raw:
        raw.write(b"".join([line + b"\n" for line in lines]))


def held(log: Path) -> list[int]:
    """The records of a log, by the names of its segments and their lines."""
    paths = sorted(log.glob("*.log"))
    return [int(path.stem) + number for path in paths for number in range(path.read_bytes().count(b"\n"))]


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "active"])
def test_a_disk_without_a_byte_left_frees_itself_too(
    make_pod: Make, loads: Start, disk: LoopFs, is_sealed: bool
) -> None:
    """Others have taken even the reserve: neither a checkpoint of one block can be written nor a segment begun."""
    pod = pod_on(disk, make_pod, **{"KMQ_SEGMENT_BYTES": 2 * MIB} if is_sealed else {})
    load = filled(pod, loads)
    pod.kill()  # checkpoints are old
    disk.fill(0)
    assert disk.free() == 0
    restarted_with_limits(pod, load, **LIMITS)
    judge(pod, load)


def test_a_disk_without_an_inode_left_frees_itself_by_what_is_sealed(
    make_pod: Make, loads: Start, tmp_path: Path, cleanup: ExitStack
) -> None:
    disk = few_inodes(600, tmp_path, cleanup)
    pod = pod_on(disk, make_pod, KMQ_SEGMENT_BYTES=MIB)
    load = AckedLoad(pod.pipes, "acked", seed=1, longest=4000)
    pod.start()
    loads(load)
    pod.wait(lambda: load.has(12_000), "there is much to delete")
    pod.kill()  # checkpoints are old
    disk.fill(0)
    assert disk.free() == 0
    restarted_with_limits(pod, load, KMQ_SEGMENT_BYTES=MIB, KMQ_RETENTION_BYTES=2 * MIB)
    judge(pod, load)
