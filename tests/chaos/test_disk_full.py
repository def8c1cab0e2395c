"""G7: on a full disk writing pauses, says so, and resumes by itself when there is room; nothing is lost or torn."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.load import FifoLoad, Load, TcpLoad
from chaos.pod import STAGES, Pod

pytestmark = pytest.mark.root
DISK = 256 << 20
LEFT = 12 << 20  # room for some seconds of load
RESUME_S = 10.0  # a fraction of a second where the machine has nothing else to do

Start = Callable[[Load], Load]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 of our own."""
    image, mounted = tmp_path / "image", tmp_path / "disk"
    mounted.mkdir()
    with ExitStack() as stack:
        try:
            with image.open("wb") as file:
                file.truncate(DISK)
            run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            run("mount", "-o", "loop", str(image), str(mounted))
            stack.callback(run, "umount", "-l", str(mounted))
        except (OSError, subprocess.CalledProcessError) as err:
            reason = f"no loop mount here (needs root): {err}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        yield mounted


def fill(disk: Path, left: int = 0) -> Path:
    """Take all room of the disk but `left` bytes."""
    ballast = disk / f"ballast-{left}"
    with ballast.open("wb") as file:
        free = shutil.disk_usage(disk).free
        if left:
            os.posix_fallocate(file.fileno(), 0, free - left)
        else:
            size = 1 << 20
            while free := shutil.disk_usage(disk).free:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, 2), min(free, size))
                except OSError as err:  # the pod was faster
                    assert err.errno == errno.ENOSPC
                    if size < 4096:
                        break
                    size //= 2
    return ballast


@pytest.fixture
def pod(disk: Path, make_pod: Callable[..., Pod]) -> Pod:
    pod = make_pod(KMQ_DATA=disk / "data")
    pod.data = disk / "data"
    return pod


def test_a_full_disk_pauses_everything_and_room_resumes_it(pod: Pod, disk: Path, loads: Start) -> None:
    ballast = fill(disk, LEFT)
    fifo = loads(FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.02))
    pod.start()
    tcp = loads(TcpLoad(pod.pipes, "tcp", seed=2, longest=20_000))
    for round in range(2):
        pod.wait(lambda: "disk_full" in states(pod), "the disk is full")
        pod.wait(lambda: stands_still(fifo, tcp), "the writers feel it")
        assert pod.events("disk_full")
        assert all(map(pod.is_alive, STAGES))
        before = pod.seq("durability")
        freed = time.monotonic()
        if round:
            ballast.unlink()
        else:
            os.truncate(ballast, ballast.stat().st_size - LEFT)
        pod.wait(lambda before=before: pod.seq("durability") > before + 100, "messages become durable again", RESUME_S)
        print(f"resumed after {time.monotonic() - freed:.2f} s")
    pod.wait_ready()
    goal = fifo.count + tcp.count + 20_000
    pod.wait(lambda: fifo.count + tcp.count > goal, "it goes on")
    fifo.finish()
    tcp.finish()
    pod.judge([*fifo.sent, *tcp.sent])


def states(pod: Pod) -> set[str]:
    return {pod.state(name) for name in STAGES}


def stands_still(*loads: Load) -> bool:
    """Whether nobody could write anything for a while."""
    before = [load.count for load in loads]
    time.sleep(0.3)
    return before == [load.count for load in loads]


@pytest.mark.parametrize("victims", [("durability",), ("router",), STAGES], ids="+".join)
def test_stages_killed_on_a_full_disk_start_again_and_lose_nothing(
    pod: Pod, disk: Path, loads: Start, victims: tuple[str, ...]
) -> None:
    """A start on a full disk waits for room as well; what a kill has torn is mended."""
    ballast = fill(disk, LEFT)
    load = loads(FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.02))
    pod.start()
    pod.wait(lambda: "disk_full" in states(pod), "the disk is full")
    fill(disk)
    for _ in range(3):
        pod.kill(*victims)
        pod.start(*victims)
        pod.wait(lambda: all(pod.state(name) not in ("", "starting", "recovering") for name in victims), "they are up")
    assert all(map(pod.is_alive, STAGES))
    ballast.unlink()
    pod.wait_ready()
    load.finish()
    pod.judge(load.sent)
