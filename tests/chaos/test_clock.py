"""The time of day is set while the broker runs: nobody waits by it, nothing is deleted or forgotten because of it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from line_client import LineClient

from chaos.by_hand import Client, message
from chaos.pod import STAGES, Pod
from chaos.wall_clock import WallClock
from kmq.broker import clock

Make = Callable[..., Pod]


@pytest.mark.parametrize("name", ["framer", "durability", "router"])
def test_no_stage_sleeps_by_a_clock_that_can_be_set(make_pod: Make, strace: str, tmp_path: Path, name: str) -> None:
    """A wait until a time of day lasts an hour longer when the clock is set back by an hour, and has no heartbeat meanwhile."""
    pod = make_pod()
    trace = tmp_path / "trace"
    pod.start(*[other for other in ("framer", "durability", "router", "ingress") if other != name])
    pod.start(name, under=[strace, "-f", "-qq", "-o", str(trace), "-e", "trace=futex,poll,semtimedop,clock_nanosleep"])
    pod.wait_ready()
    (pod.pipes / "raw").write_bytes(b"test|0|1|x\n")
    pod.wait(lambda: pod.seq("router") == 1, "a message")
    waits = ("FUTEX_WAIT_BITSET", "poll(", "semtimedop(")
    pod.wait(
        lambda: sum(any(wait in line for wait in waits) for line in trace.read_text().splitlines()) > 5, "some sleeps"
    )
    by_time_of_day = [line for line in trace.read_text().splitlines() if "CLOCK_REALTIME" in line]
    assert not by_time_of_day, by_time_of_day[:3]


@pytest.fixture
def wall(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path / "offset")


def test_a_clock_that_is_ahead_for_some_seconds_deletes_nothing(make_pod: Make, wall: WallClock) -> None:
    pod = make_pod(KMQ_SEGMENT_BYTES=64 << 10, KMQ_RETENTION_AGE="1h")
    pod.start(under=wall.under)
    pod.wait_ready()
    with socket.create_connection(("127.0.0.1", int((pod.pipes / "ingress.port").read_text()))) as sock:
        for first in range(0, 800, 80):  # a segment ends with what comes together
            sock.sendall(b"".join(b"test|0|%d|%b\n" % (n, b"x" * 900) for n in range(first, first + 80)))
            pod.wait(lambda first=first: pod.seq("router") == first + 80, "all are routed")
    before = segments_of(pod)
    assert len(before) > 8

    def stage_of(line: str) -> str:
        return line.partition(" stage=")[2].split()[0]

    wall.set(7200)
    distrust = {"durability", "router"}
    pod.wait(lambda: {stage_of(line) for line in pod.events("clock_not_trusted")} >= distrust, "both notice the jump")
    assert not pod.events("segment_deleted") and segments_of(pod) == before
    found = kmq(pod, wall, "clock")
    assert found.returncode == 1 and "7,200 s ahead" in found.stdout and "kmq clock --trust" in found.stdout

    wall.set(0)
    (pod.pipes / "raw").write_bytes(b"test|0|800|x\n")
    pod.wait(lambda: pod.seq("router") == 801, "it goes on")
    assert not pod.events("segment_deleted") and segments_of(pod)[: len(before)] == before

    wall.set(7200)
    rows = [row for name in ("framer", "durability", "router") if (row := pod.row(name))]
    pod.wait(lambda: all(map(clock.steady_in_s, rows)), "all notice it again, so that trust comes after it")
    done = kmq(pod, wall, "clock", "--trust")
    assert done.returncode == 0, done.stderr
    pod.wait(lambda: len(segments_of(pod)) < len(before) / 2, "an operator who says that it is right is believed")


@pytest.mark.parametrize("rings_too", [False, True], ids=["the pod restarts", "the machine does"])
def test_a_clock_that_is_a_month_ahead_at_a_start_forgets_no_id(
    make_pod: Make, wall: WallClock, rings_too: bool
) -> None:
    """The second start meets what the first one forgot when it was stopped."""
    pod = make_pod()
    for ahead_s in (0, 31 * 86_400, 31 * 86_400):
        wall.set(ahead_s)
        if rings_too:
            for file in Path("/dev/shm").glob(f"{pod.instance}.*"):
                file.unlink()
        pod.start(under=wall.under)
        pod.wait_ready()
        word = "dup" if ahead_s else "ack"
        for seq, hello in ((1, "producer=me"), (2, "window=me")):
            with Client(pod, hello) as client:
                assert client.send(message(7)) == [f"{word} {seq}"], (hello, ahead_s)
        pod.stop()


def test_a_clock_that_is_set_back_is_said_once_while_times_are_held(make_pod: Make, wall: WallClock) -> None:
    pod = make_pod()
    pod.start(under=wall.under)
    pod.wait_ready()

    def send(seq: int) -> None:
        (pod.pipes / "raw").write_bytes(b"test|0|%d|x\n" % seq)
        pod.wait(lambda: pod.seq("router") == seq, f"seq {seq} is routed")

    send(1)
    wall.set(-7200)
    pod.wait(lambda: pod.events("clock_behind"), "the framer notices")
    for seq in (2, 3):
        send(seq)
    wall.set(0)
    pod.wait(lambda: pod.events("clock_caught_up"), "and that it is over")
    send(4)
    pod.stop()
    times = [line.split("|")[1] for line in (pod.data / "append.log").read_text().splitlines()]
    assert times[0] == times[1] == times[2] < times[3]
    (behind,), (caught_up,) = pod.events("clock_behind"), pod.events("clock_caught_up")
    assert "level=warn stage=framer" in behind and f'effect="recv_ts stays at {times[0]} ' in behind
    assert 7190 <= int(behind.partition(" behind_s=")[2].split()[0]) <= 7200
    assert "stage=framer" in caught_up


@pytest.mark.parametrize("restarts", [False, True], ids=["", "the gateway is started again"])
def test_what_is_given_back_is_due_by_a_clock_that_does_not_jump(
    make_pod: Make, wall: WallClock, restarts: bool
) -> None:
    """Set back by two hours, nothing waits two hours longer; set ahead, nothing comes too early."""
    pod = make_pod(**dict.fromkeys((f"KMQ_{name}_PORT" for name in ("HTTP", "GRPC", "EGRESS", "STATUS", "METRICS")), 0))
    port = pod.pipes / "egress.port"
    pod.start(*STAGES, "gateway", under=wall.under)
    pod.wait_ready()
    (pod.pipes / "raw").write_bytes(b"".join(b"test|0|%d|x\n" % n for n in range(3)))
    pod.wait(lambda: pod.seq("router") == 3, "three messages")

    def read(member: LineClient) -> int | None:
        place, offset, _ = member.fetch(10_000, 200)
        return None if place is None else offset

    starts = 0

    def joined() -> LineClient:
        """A member of the next gateway."""
        nonlocal starts
        pod.wait(lambda: len(pod.events("offsets_loaded")) > starts and port.exists(), "a gateway")
        starts += 1
        while True:
            client = LineClient(int(port.read_text()))
            client.send("GROUP g member=m topics=test")
            if client.line().startswith(b"!assign "):
                return client
            client.close()  # not ready yet

    def start_again() -> LineClient:
        pod.kill("gateway")
        port.unlink()
        pod.start("gateway", under=wall.under)
        return joined()

    member = joined()
    assert read(member) == 0
    member.send("!commit test/0 3", "!nack test/0 0 delay=1500", "!nack test/0 1 delay=3000000")
    assert [member.line().split()[0] for _ in range(3)] == [b"!committed", b"!nacked", b"!nacked"]
    wall.set(-7200)
    if restarts:
        member.close()
        member = start_again()
    pod.wait(lambda: read(member) == 0, "the message that is due")
    member.send("!commit again test/0 0")
    assert member.line().startswith(b"!committed again")
    wall.set(7200)
    for _ in range(8):
        assert read(member) is None, "it is due in fifty minutes"
    member.close()


def segments_of(pod: Pod) -> list[Path]:
    return sorted((pod.data / "topics/test/0").glob("*.log"))  # the WAL's wait for a checkpoint, twice a minute


def kmq(pod: Pod, wall: WallClock, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {name: str(value) for name, value in pod.settings.items()}
    command = [*wall.under, sys.executable, "-m", "kmq", *arguments]
    return subprocess.run(command, env=env, cwd=pod.root, capture_output=True, text=True, timeout=60)
