"""G7: on a full disk writing pauses, says so, and resumes by itself when there is room; nothing is lost or torn."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.checker import check
from chaos.load import FifoLoad, Load, TcpLoad
from chaos.pod import PATIENCE_S, STAGES, Pod

pytestmark = pytest.mark.root
DISK = 256 << 20
LEFT = 12 << 20  # room for some seconds of load
RESUME_S = 60.0  # a fraction of a second where the machine has nothing else to do

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


def test_a_line_longer_than_the_room_left_waits_whole_and_a_look_writes_nothing(pod: Pod, disk: Path) -> None:
    """It was accepted while there was room; others took the room before it was written."""
    pod.start()
    pod.wait_ready()
    lines = [b"test.long|0|%d|%b" % (n, b"%d" % n * ((1 << 20) - 100)) for n in (1, 2)]
    sock = socket.create_connection(("127.0.0.1", int((pod.pipes / "ingress.port").read_text())), timeout=PATIENCE_S)
    with sock, sock.makefile("rb") as replies:
        sock.sendall(b"!hello acks=1 producer=long\n" + lines[0] + b"\n")
        assert [replies.readline().split()[0] for _ in range(2)] == [b"!ok", b"!ack"]
        pod.settle()
        pod.pause("durability")
        sock.sendall(lines[1] + b"\n")
        pod.wait(lambda: pod.seq("framer") == 2, "it is on its way")
        ballast = fill(disk, 700 << 10)
        pod.resume("durability")
        pod.wait(lambda: pod.state("durability") == "disk_full", "it waits")
        looked_at = [look(pod, *command) for command in LOOKS]
        assert [code for code, _ in looked_at] == [0, 0, 0] and looked_at[1][1].count(b"\n") == 1, "half a line"
        sock.sendall(b"test.probe|0|3|x\n")  # whoever is refused is told, whoever waits is not torn
        ballast.unlink()
        assert replies.readline() == b"!ack 2 2\n"
    pod.wait_ready()
    pod.settle()  # a reply does not say that the router has written the line: it needs room for that
    ballast = fill(disk)
    pod.stop()
    before = seen(pod.data)
    assert all(look(pod, *command)[0] == 0 for command in LOOKS) and seen(pod.data) == before
    ballast.unlink()
    report = check(pod.data)
    assert not report.counts, report
    stored = [line.split(b"|", 2)[2] for line in (pod.data / f"append/{1:020d}.log").read_bytes().splitlines()]
    assert stored[:2] == [line.replace(b"|%d|" % n, b"|%d;p=long|" % n, 1) for n, line in enumerate(lines, start=1)]


LOOKS = (("log", "stat"), ("log", "cat", "append", "--from-seq", "1"), ("verify",))


def look(pod: Pod, *command: str) -> tuple[int, bytes]:
    env = os.environ | {name: str(value) for name, value in pod.settings.items()}
    result = subprocess.run([sys.executable, "-m", "kmq", *command], env=env, cwd=pod.root, capture_output=True)
    return result.returncode, result.stdout


def seen(data: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in [data, *data.rglob("*")]}
