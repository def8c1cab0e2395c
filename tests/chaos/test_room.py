"""G7 with acks: no room is a reason for acknowledged producers and backpressure for plain ones; room resumes both by itself.

KMQ_DATA_QUOTA is such a lack of room, before the limit of an emptyDir would evict the pod.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from waiting import meanwhile

from chaos.acked import AckedLoad, account
from chaos.hurry import hurried
from chaos.load import FifoLoad, Load, TcpLoad
from chaos.loopfs import disk_of
from chaos.pod import STAGES, Pod

RESUME_S = 60.0  # 2 s where the machine has nothing else to do
MIB = 1 << 20
QUOTA = 96 * MIB
SMALL = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}  # little is on the way, and kept room for

Start = Callable[[Load], Load]


def stays(look: Callable[[], object], seconds: float) -> bool:
    before = look()
    time.sleep(seconds)
    return look() == before


def stand_still(*loads: Load) -> bool:
    """Whether nobody got anything accepted for a while; an acknowledged one tries all the time."""
    return stays(lambda: [count(load) for load in loads], seconds=0.3)


def count(load: Load) -> int:
    return len(load.seqs) if isinstance(load, AckedLoad) else load.count


def refused_with(load: AckedLoad, code: str) -> bool:
    load.has(0)
    return load.codes[code] > 0 and load.codes[f"hello {code}"] > 0


def wait_resumed(pod: Pod, *loads: Load) -> float:
    """Until everybody gets on; how long it took."""
    started, before = time.monotonic(), [count(load) for load in loads]
    for load, had in zip(loads, before, strict=True):
        pod.wait(lambda load=load, had=had: count(load) > had, f"{type(load).__name__} goes on", RESUME_S)
    return time.monotonic() - started


@pytest.mark.root
def test_a_full_disk_is_reported_to_acked_producers_and_felt_by_plain_ones(
    make_pod: Callable[..., Pod], loads: Start, tmp_path: Path, cleanup: ExitStack
) -> None:
    disk = disk_of("ext4", 256 * MIB, tmp_path, cleanup)
    pod = make_pod(KMQ_DATA=disk.path / "data")
    pod.data = disk.path / "data"
    pod.start()
    plain = TcpLoad(pod.pipes, "plain", seed=1, longest=5_000)
    acked = [AckedLoad(pod.pipes, f"acked-{n}", seed=n) for n in range(2)]
    for load in (plain, *acked):
        loads(load)
    pod.wait(lambda: all(map(count, (plain, *acked))), "they are served")
    ballast = disk.fill(40 * MIB)  # what comes soon reaches the reserve
    for load in acked:
        pod.wait(lambda load=load: refused_with(load, "disk_full"), "acknowledged producers are told")
    pod.wait(lambda: stand_still(plain, *acked), "nobody gets on")
    assert disk.free() > 4 * MIB, "what was on the way did not need all of the reserve"
    ballast.unlink()
    resumed = [wait_resumed(pod, plain, *acked)]

    ballast = disk.fill(0)  # somebody else takes even the reserve: what is on the way has to wait, and the FIFO is full
    pod.wait(lambda: stand_still(plain, *acked), "nobody gets on")
    late = AckedLoad(pod.pipes, "late", seed=3)
    loads(late)
    pod.wait(lambda: late.codes["hello disk_full"], "who comes now is told")
    ballast.unlink()
    resumed.append(wait_resumed(pod, plain, late, *acked))
    print("resumed_s=" + ",".join(f"{seconds:.2f}" for seconds in resumed))
    assert all(map(pod.is_alive, STAGES))
    for load in (plain, late, *acked):
        load.finish()
    pod.judge()
    account(pod.data, late, *acked, plain=plain.sent)


def du(directory: Path) -> int:
    """Bytes that everything under `directory` takes."""
    total = 0
    for path, names, files in os.walk(directory):
        for name in (*names, *files):
            try:
                total += os.lstat(f"{path}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """What `directory` takes, again and again."""
    sizes = [0]
    with meanwhile(lambda: sizes.append(du(directory))):
        yield sizes


def ballast_in(pod: Pod, n: int) -> Path:
    """Something that takes a quarter of the quota, and can go."""
    path = pod.data / f"ballast-{n}"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, QUOTA // 4)
    return path


def test_the_quota_is_never_passed_whoever_writes_and_room_under_it_resumes_all(
    make_pod: Callable[..., Pod], loads: Start
) -> None:
    pod = make_pod(KMQ_DATA_QUOTA=QUOTA, **SMALL)
    pod.data.mkdir()
    ballasts = [ballast_in(pod, n) for n in range(3)]
    plain = TcpLoad(pod.pipes, "plain", seed=1, longest=5_000)
    shell = FifoLoad(pod.pipes, "shell", seed=2)  # asks nobody
    acked = AckedLoad(pod.pipes, "acked", seed=3)
    with watched(pod.data) as sizes:
        pod.start()
        for load in (plain, acked, shell):
            loads(load)
        pod.wait_ready()  # before that nobody gets on either
        pod.wait(lambda: stand_still(plain, acked, shell), "nobody gets on")
        shell.finish()  # with it there would never be more room than for itself
        for ballast in ballasts[:2]:
            pod.wait(lambda: refused_with(acked, "quota"), "the acknowledged producer is told")
            acked.codes.clear()
            pod.wait(lambda: stand_still(plain, acked), "nobody gets on")
            ballast.unlink()
            print(f"used={du(pod.data)} resumed_s={wait_resumed(pod, plain, acked):.2f}")
        for load in (plain, acked):
            load.enough.set()
        ballasts[2].unlink()
        for load in (plain, acked):
            load.finish()
        pod.judge()
    print(f"quota={QUOTA} most_used={max(sizes)} looks={len(sizes)}")
    assert QUOTA * 3 // 4 < max(sizes) <= QUOTA
    account(pod.data, acked, plain=[*plain.sent, *shell.sent])


def test_retention_makes_room_also_while_writing_waits_for_it(
    make_pod: Callable[..., Pod], loads: Start, tmp_path: Path
) -> None:
    pod = make_pod(KMQ_DATA_QUOTA=64 * MIB, KMQ_SEGMENT_BYTES=MIB, PYTHONPATH=hurried(tmp_path))
    shell = FifoLoad(pod.pipes, "shell", seed=1)
    pod.start()
    loads(shell)
    pod.wait(lambda: pod.state("durability") == "disk_full" and stand_still(shell), "the quota is reached")
    had = count(shell)
    pod.kill("durability")
    pod.settings["KMQ_RETENTION_BYTES"] = MIB
    pod.start("durability")
    pod.wait(lambda: count(shell) > had, "the WAL's old segments have gone")
    shell.finish()


def test_messages_that_each_make_a_topic_do_not_pass_the_quota(make_pod: Callable[..., Pod]) -> None:
    """Tens of bytes in the WAL, four blocks in the queues: what waits in the rings would be several times the quota."""
    pod = make_pod(KMQ_DATA_QUOTA=64 * MIB)
    with watched(pod.data) as sizes:
        pod.start()
        pod.wait_ready()
        with (pod.pipes / "raw").open("wb", buffering=0) as raw:
            for first in range(0, 10_000, 100):
                raw.write(b"".join([b"topic%d|0|shell-%d|x\n" % (n, n) for n in range(first, first + 100)]))
        # What is kept free: 8 MiB, and 8 KiB a topic. How much a topic takes is up to the file system.
        pod.wait(lambda: max(sizes) + 8 * MIB + (8 << 10) * topics(pod) > 48 * MIB, "most of the quota is used")
        pod.wait(lambda: is_full(pod) and stays(lambda: topics(pod), seconds=1.5), "no more topics are made")
        assert pod.events("refusing"), "producers are told"
    print(f"topics={topics(pod)} most_used={max(sizes)}")
    assert max(sizes) <= 64 * MIB


def is_full(pod: Pod) -> bool:
    return "disk_full" in (pod.state("router"), pod.state("durability"))


def topics(pod: Pod) -> int:
    return len(os.listdir(pod.data / "topics"))
