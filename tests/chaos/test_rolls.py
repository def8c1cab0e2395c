"""G2, G3 among segments of 64 KiB: kills land in rolls all the time, and in the removal of what retention takes."""

import random
from collections.abc import Callable
from pathlib import Path

from chaos.load import FifoLoad, Load
from chaos.pod import STAGES, Pod

SMALL = {"KMQ_SEGMENT_BYTES": 64 << 10, "RB_SLOTS": 1024}
Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def storm(pod: Pod, rng: random.Random, load: Load, kills: int, event: str = "ready") -> None:
    """SIGKILL one of the two that write, or all, every few thousand messages, and when `event` was said once more."""
    pod.start()
    pod.wait_ready()
    for _ in range(kills):
        goal, said = pod.seq("durability") + rng.randrange(8000), len(pod.events(event)) - (event == "ready")
        pod.wait(lambda goal=goal: pod.seq("durability") > goal, "messages flow")
        pod.wait(lambda said=said: len(pod.events(event)) > said, event)
        victims = rng.choice([("durability",), ("router",), ("durability", "router"), STAGES])
        pod.kill(*victims)
        pod.start(*victims)
        pod.wait_ready(*victims)
    load.finish()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def seqs_of(path: Path) -> list[int]:
    return [int(line.split(b"|", 1)[0]) for line in path.read_bytes().splitlines()]


def test_kills_among_rolls_lose_and_double_nothing(make_pod: Make, rng: random.Random, loads: Start) -> None:
    pod = make_pod(**SMALL)
    load = loads(FifoLoad(pod.pipes, "fifo", rng.randrange(1 << 30), rest_s=0.01))
    assert isinstance(load, FifoLoad)
    storm(pod, rng, load, 12)
    pod.judge(load.sent)
    assert len(segments(pod.data / "append")) > 12
    sizes = [path.stat().st_size for path in segments(pod.data / "topics/jobs/0")[:-1]]
    assert len(sizes) > 5 and min(sizes) >= 64 << 10


def test_kills_among_removals_leave_dense_logs_with_their_last_records(
    make_pod: Make, rng: random.Random, loads: Start
) -> None:
    pod = make_pod(**SMALL, KMQ_RETENTION_BYTES=1 << 20)
    load = loads(FifoLoad(pod.pipes, "fifo", rng.randrange(1 << 30), rest_s=0.01))
    storm(pod, rng, load, 6, "segment_deleted")
    pod.settle()
    last = pod.seq("durability")
    pod.kill()
    pod.start()
    pod.settle()
    pod.stop()  # leaves checkpoints of everything: what is old is needed no more
    pod.start()
    pod.wait_ready()
    pod.wait(lambda: int(segments(pod.data / "append")[0].stem) > 1, "the WAL's first segment has gone")
    pod.stop()
    wal = [seq for path in segments(pod.data / "append") for seq in seqs_of(path)]
    assert wal == list(range(wal[0], last + 1))
    queues = sorted({path.parent for path in (pod.data / "topics").glob("*/*/*.log")})
    newest: set[int] = set()
    for directory in queues:
        seqs: list[int] = []
        first = int(segments(directory)[0].stem)
        for path in segments(directory):
            assert int(path.stem) == first + len(seqs), f"{path} does not begin where the one before it ends"
            seqs += seqs_of(path)
        assert seqs == sorted(set(seqs))
        newest |= set(seqs)
    assert newest >= set(range(last - 1000, last + 1))
    assert not pod.events("unrecoverable") and pod.events("segment_deleted")
