"""G3: files that are torn, cut, deleted or garbage are brought back from the WAL, and the log says so."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.checker import Stream
from chaos.load import FifoLoad, Lines, Load
from chaos.pod import Pod

MESSAGES = 20_000
WAL = f"append/{1:020d}.log"
QUEUE = f"topics/jobs/0/{0:020d}.log"
WIDE = f"topics/wide/1/{0:020d}.log"

Make = Callable[..., Pod]
Start = Callable[[Load], Load]
Damage = Callable[[Path], None]


def append(name: str, text: bytes) -> Damage:
    def damage(data: Path) -> None:
        with (data / name).open("ab") as file:
            file.write(text)

    return damage


def cut(name: str, part: float, at_line: bool = False) -> Damage:
    """Keep this part of the file, up to the middle of some line or to the end of one."""

    def damage(data: Path) -> None:
        text = (data / name).read_bytes()
        size = int(len(text) * part)
        end = text.rindex(b"\n", 0, size) + 1 if size else 0
        os.truncate(data / name, end if at_line else min(size, end + 5))

    return damage


def zero_tail(name: str, nbytes: int) -> Damage:
    """The end of a file as ext4 leaves it when the size got to the disk and the data did not."""

    def damage(data: Path) -> None:
        size = (data / name).stat().st_size
        os.truncate(data / name, size - nbytes)
        os.truncate(data / name, size)

    return damage


def nuls(name: str) -> Damage:
    """A small file as a power cut leaves it when its size got to the disk and its text did not."""

    def damage(data: Path) -> None:
        (data / name).write_bytes(b"\0" * (data / name).stat().st_size)

    return damage


def unlink(*names: str) -> Damage:
    def damage(data: Path) -> None:
        for name in names:
            (data / name).unlink(missing_ok=True)

    return damage


def both(*damages: Damage) -> Damage:
    def damage(data: Path) -> None:
        for each in damages:
            each(data)

    return damage


# what was done: (how, the event that must say so, or "" where nothing is lost that anybody must hear of)
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a torn last line in the WAL": (append(WAL, b"20001|1700000000.00"), "torn_tail_cut"),
    "a torn first field in the WAL": (append(WAL, b"2"), "torn_tail_cut"),
    "a NUL tail in the WAL": (append(WAL, b"\0" * 5000), "torn_tail_cut"),
    "a torn line and a NUL tail in the WAL": (append(WAL, b"20001|17\0\0\0\0"), "torn_tail_cut"),
    "a line with NULs inside at the end of the WAL": (append(WAL, b"20001|1\0\0\n"), "torn_tail_cut"),
    "a torn last line in a queue": (append(QUEUE, b"20001|1700000000.00"), "torn_tail_cut"),
    "a NUL tail beyond the end of a queue": (append(QUEUE, b"\0" * 5000), "torn_tail_cut"),
    "a NUL tail in place of the end of a queue": (zero_tail(QUEUE, 5000), "torn_tail_cut"),
    "a deleted queue file": (unlink(QUEUE), "queue_short"),
    "a deleted partition": (unlink(WIDE), "queue_short"),
    "a queue file deleted with its index": (unlink(QUEUE, QUEUE.replace(".log", ".idx")), "queue_short"),
    "a queue file cut inside a line": (cut(QUEUE, 0.4), "queue_short"),
    "a queue file shortened by whole lines": (cut(QUEUE, 0.7, at_line=True), "queue_short"),
    "an empty queue file": (cut(QUEUE, 0.0), "queue_short"),
    "several short queues": (both(cut(QUEUE, 0.3), cut(WIDE, 0.6), unlink("test.log")), "queue_short"),
    "a deleted topic directory": (lambda data: shutil.rmtree(data / "topics" / "jobs"), "topic_missing"),
    "a deleted topic directory with partitions": (
        lambda data: shutil.rmtree(data / "topics" / "wide"),
        "topic_missing",
    ),
    "no checkpoint": (unlink("router.ckpt"), ""),
    "no checkpoint and a cut queue": (both(unlink("router.ckpt"), cut(QUEUE, 0.5)), ""),
    "a garbage checkpoint": (lambda data: garbage(data / "router.ckpt"), "checkpoint_unreadable"),
    "an empty checkpoint": (cut("router.ckpt", 0.0), "checkpoint_unreadable"),
    "a checkpoint cut in a row": (lambda data: os.truncate(data / "router.ckpt", 20), "checkpoint_unreadable"),
    "no index of the WAL": (unlink(WAL.replace(".log", ".idx")), ""),
    "no index of a queue": (unlink(QUEUE.replace(".log", ".idx")), ""),
    "an index cut inside a line": (cut(WAL.replace(".log", ".idx"), 0.5), ""),
    "NULs in place of a topic's file that no checkpoint knows": (
        both(unlink("router.ckpt"), nuls("topics/jobs/topic.toml")),
        "",
    ),
    "symlinks gone": (unlink("append.log", "jobs.log", "wide-1.log"), ""),
}


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def filled(pod: Pod, start: Start) -> FifoLoad:
    """A pod at rest whose queues hold MESSAGES messages, `wide` in three partitions."""
    (pod.data / "topics" / "wide").mkdir(parents=True)
    (pod.data / "topics" / "wide" / "topic.toml").write_text("partitions = 3\n")
    load = start(FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.001))
    pod.start()
    pod.wait(lambda: load.count > MESSAGES, "all is sent")
    load.finish()
    pod.settle()
    return load


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FifoLoad]]:
    """A directory as an orderly stop leaves it: the checkpoint speaks of everything. Made once, copied for each test."""
    pod = Pod(tmp_path_factory.mktemp("stopped"))
    try:
        load = filled(pod, started)
        pod.stop()
    finally:
        pod.close()
    yield pod.data, load


def started(load: Load) -> Load:
    load.start()
    return load


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_mended_from_the_wal(make_pod: Make, stopped: tuple[Path, FifoLoad], case: str) -> None:
    data, load = stopped
    pod = make_pod()
    shutil.copytree(data, pod.data, symlinks=True)
    damage_and_go_on(pod, case, load.sent)


@pytest.mark.soak
@pytest.mark.parametrize("case", DAMAGES)
def test_soak_damage_after_a_kill_is_mended_from_the_wal(make_pod: Make, loads: Start, case: str) -> None:
    """The rings are still there, and the checkpoint does not know the last messages."""
    pod = make_pod()
    load = filled(pod, loads)
    pod.stop()
    pod.start()
    more = loads(FifoLoad(pod.pipes, "more", seed=2))
    pod.wait(lambda: more.count > 1000, "some more is sent")
    more.finish()
    pod.settle()
    pod.kill()
    damage_and_go_on(pod, case, [*load.sent, *more.sent])


def damage_and_go_on(pod: Pod, case: str, sent: list[Stream]) -> None:
    damage, event = DAMAGES[case]
    damage(pod.data)
    before = len(pod.events(event))
    pod.start()
    pod.wait_ready()
    assert not event or len(pod.events(event)) > before, f"nobody said {event}"
    after = Lines("after")
    (pod.pipes / "raw").write_bytes(after.line(0) + b"\n")  # and it goes on
    pod.wait(lambda: pod.seq("router") > sum(stream.count for stream in sent), "the message after it")
    pod.judge([*sent, Stream("after", after.line, 1)])


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_a_queue_damaged_while_the_router_runs_is_rebuilt_by_a_restart(make_pod: Make, loads: Start, how: str) -> None:
    pod = make_pod()
    load = filled(pod, loads)
    (unlink(QUEUE) if how == "deleted" else cut(QUEUE, 0.5))(pod.data)
    more = loads(FifoLoad(pod.pipes, "more", seed=2))
    assert pod.wait_exit("router") == 75  # "restart helps"
    pod.start("router")
    pod.wait(lambda: more.count > 1000, "some more is sent")
    more.finish()
    pod.judge([*load.sent, *more.sent])


def test_a_topic_declared_just_before_its_first_message_has_its_partitions_at_once(make_pod: Make) -> None:
    pod = make_pod()
    pod.start()
    pod.settle()
    pod.pause("router")
    (pod.data / "topics" / "wide").mkdir()
    (pod.data / "topics" / "wide" / "topic.toml").write_text("partitions = 3\n")
    lines = Lines("fifo")
    text = b"".join(lines.line(n) + b"\n" for n in range(30))
    assert len(text) < 4096
    (pod.pipes / "raw").write_bytes(text)
    pod.wait(lambda: pod.seq("durability") == 30, "they wait in front of the router")
    pod.resume("router")
    pod.judge([Stream("fifo", lines.line, 30)])
