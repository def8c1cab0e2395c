"""Whole segments where they do not belong, as a bad restore leaves them: never served, and put right by a repair.

The directory was written by a real broker in many segments. Each case takes files of the WAL or of a queue and swaps
them, copies one over another, brings one from another topic or another broker, or lets some vanish; with their indexes,
without, or leaving the indexes behind.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.checker import Stream, check
from chaos.directories import everything, findings, goes_on
from chaos.load import FifoLoad, Lines
from chaos.pod import Pod
from chaos.restores import CASES, OTHER, QUEUE, SEGMENT_BYTES, WAL, Restore
from kmq.log import show
from kmq.repair import heal

MESSAGES = 40_000
AFTER = Stream("after", Lines("after").line, 1)

Make = Callable[..., Pod]


class Original(NamedTuple):
    data: Path
    foreign: Path  # another broker's, with the same topics
    sent: list[Stream]
    logs: dict[str, dict[int, bytes]]


def written_by_a_broker(root: Path, name: str, seed: int) -> tuple[Path, list[Stream]]:
    pod = Pod(root, KMQ_SEGMENT_BYTES=SEGMENT_BYTES)
    try:
        load = FifoLoad(pod.pipes, name, seed, rest_s=0.001)
        load.start()
        pod.start()
        pod.wait(lambda: load.count > MESSAGES, "all is sent")
        load.finish()
        pod.settle()
        pod.stop()
    finally:
        pod.close()
    return pod.data, load.sent


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    root = tmp_path_factory.mktemp("original")
    data, sent = written_by_a_broker(root / "ours", "fifo", 1)
    foreign, _ = written_by_a_broker(root / "theirs", "other", 2)
    logs = {name: everything(log) for name, log in show.logs(str(data), "")}
    for place in (QUEUE, OTHER, WAL):
        assert len(list((data / place).glob("*.log"))) > 3, f"{place} has too few segments for these tests"
    yield Original(data, foreign, sent, logs)


# --- what can go wrong -------------------------------------------------------------------------------------------------


EVERY = list(product(CASES, ("along", "behind", "lost")))
# All of them: the soak. Only the index tells another broker's first segment from ours: it has the same place and numbers.
SAMPLE = [
    *random.Random(7).sample(EVERY, 20),
    *((f"another broker's first segment in {name}", "along") for name in ("the WAL", "a queue")),
]


def misplaced(original: Original, data: Path, case: str, indexes: str) -> None:
    shutil.copytree(original.data, data, symlinks=True)
    CASES[case](Restore(data, original.foreign, indexes))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("case", "indexes"), SAMPLE)
def test_a_misplaced_segment_is_never_served_and_put_right(
    original: Original, tmp_path: Path, case: str, indexes: str
) -> None:
    never_served_and_put_right(original, tmp_path / "data", case, indexes)


def never_served_and_put_right(original: Original, data: Path, case: str, indexes: str) -> None:
    misplaced(original, data, case, indexes)
    for name, log in show.logs(str(data), ""):
        for number, line in everything(log).items():
            assert original.logs[name].get(number) == line, f"served as {name} {number}: {line[:80]!r}"
    assert findings(data), "verify finds nothing"
    put_right(original, data)


def put_right(original: Original, data: Path) -> None:
    done = heal.repair(str(data))
    left = findings(data)
    assert not left, f"{left[:3]} after {done}"
    for name, log in show.logs(str(data), ""):
        assert everything(log) == original.logs[name], f"{name} after {done}"
    assert not [each for each in done if each.lost], done


@pytest.mark.parametrize(("case", "indexes"), SAMPLE[:4])
def test_no_broker_goes_on_with_a_misplaced_segment(
    original: Original, make_pod: Make, case: str, indexes: str
) -> None:
    no_broker_goes_on(original, make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES), case, indexes)


def no_broker_goes_on(original: Original, pod: Pod, case: str, indexes: str) -> None:
    """It refuses to start, naming the repair, or nothing is wrong then; and after the repair it goes on."""
    misplaced(original, pod.data, case, indexes)
    sent = original.sent
    if goes_on(pod, sent):
        sent = [*sent, AFTER]
    heal.repair(str(pod.data))
    assert not findings(pod.data)
    if sent is original.sent:
        assert goes_on(pod, sent), pod.tail()
        sent = [*sent, AFTER]
    report = check(pod.data, sent)
    assert not report.counts, report


@pytest.mark.soak
@pytest.mark.parametrize(("case", "indexes"), EVERY)
def test_soak_every_misplaced_segment(
    original: Original, make_pod: Make, tmp_path: Path, case: str, indexes: str
) -> None:
    never_served_and_put_right(original, tmp_path / "data", case, indexes)
    no_broker_goes_on(original, make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES), case, indexes)


def test_seqs_are_not_given_out_again_when_the_end_of_the_wal_is_lost(original: Original, make_pod: Make) -> None:
    """Producers wait, the WAL's last segment is gone: nobody is acknowledged, and the refusal names what restores it."""
    pod = make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES)
    shutil.copytree(original.data, pod.data, symlinks=True)
    for path in sorted((pod.data / "append").glob("*"))[-2:]:
        path.unlink()
    os.makedirs(pod.pipes, exist_ok=True)
    pod.start("framer")
    assert pod.wait_exit("framer") == 65
    assert "kmq verify --repair, which restores it from the queues" in pod.tail()
    put_right(original, pod.data)
    assert goes_on(pod, original.sent), pod.tail()


def spoil(index: Path, how: str) -> None:
    """Leave of an index what a power cut may leave of it."""
    label = index.read_bytes().partition(b"\n")[0]
    size = index.stat().st_size
    if how == "removed":
        index.unlink()
    elif how == "zeroed":
        index.write_bytes(b"\0" * size)
    elif how == "with a zeroed end":
        index.write_bytes(index.read_bytes()[: len(label) + 1 + 30] + b"\0" * 4000)
    else:
        os.truncate(index, {"emptied": 0, "cut in its label": 40, "left with its label": len(label) + 1}[how])


HOW = ["removed", "emptied", "zeroed", "with a zeroed end", "cut in its label", "left with its label"]


@pytest.mark.parametrize("how", HOW)
def test_a_start_writes_every_index_again_that_a_power_cut_has_taken(
    original: Original, make_pod: Make, how: str
) -> None:
    """Of sealed and active segments, in the WAL and in the queues; nothing has to be written to them."""
    pod = make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES)
    shutil.copytree(original.data, pod.data, symlinks=True)
    for index in [*pod.data.glob("append/*.idx"), *pod.data.glob("topics/*/*/*.idx")]:
        spoil(index, how)
    pod.start()
    pod.wait_ready()
    for name, log in show.logs(str(pod.data), ""):
        assert everything(log) == original.logs[name], name
    pod.judge(original.sent)
    assert not findings(pod.data, notes=True)


@pytest.mark.parametrize(
    "case",
    [
        *(f"another broker's first segment in {name}" for name in ("the WAL", "a queue")),
        "two sealed segments of a queue swapped",
        "active segments of two queues swapped",
        *(pytest.param(case, marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_no_start_gives_an_index_to_a_segment_that_belongs_elsewhere(
    original: Original, make_pod: Make, case: str
) -> None:
    pod = make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES)
    misplaced(original, pod.data, case, "lost")
    goes_on(pod, original.sent)
    for name, log in show.logs(str(pod.data), ""):
        for number, line in everything(log).items():
            known = original.logs[name].get(number)
            assert line == known or (known is None and line.endswith(AFTER.line(0))), f"{name} {number}: {line[:80]!r}"


@pytest.mark.parametrize("lost", ["emptied", "removed", "zeroed"])
def test_a_start_goes_on_where_a_power_cut_took_the_index_of_the_wal(
    original: Original, make_pod: Make, lost: str
) -> None:
    """Durability writes it again. A framer that comes first waits for that."""
    pod = make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES)
    shutil.copytree(original.data, pod.data, symlinks=True)
    (pod.data / "producers.ckpt").unlink(missing_ok=True)
    index = max((pod.data / "append").glob("*.idx"))
    if lost == "removed":
        index.unlink()
    else:
        size = index.stat().st_size
        os.truncate(index, 0 if lost == "emptied" else size - 10)
        os.truncate(index, 0 if lost == "emptied" else size + 300)
    os.makedirs(pod.pipes, exist_ok=True)
    pod.start("framer")
    pod.wait(lambda: pod.state("framer") == "waiting", "the framer waits for durability")
    pod.start("durability", "router", "ingress")
    pod.wait_ready()
    pod.judge(original.sent)
