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
from chaos.load import FifoLoad, Lines
from chaos.pod import Pod
from chaos.test_damage import everything, findings, goes_on
from kmq.log import show
from kmq.repair import rebuild

MESSAGES = 40_000
AFTER = Stream("after", Lines("after").line, 1)
QUEUE, OTHER, WAL = "topics/jobs/0", "topics/test/0", "append"
SEGMENT_BYTES = 128 << 10

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


class Restore:
    """A clumsy hand. `indexes`: whether they go "along" with their logs, stay "behind", or are "lost"."""

    def __init__(self, data: Path, foreign: Path, indexes: str) -> None:
        self.data, self.foreign, self.indexes = data, foreign, indexes

    def segment(self, place: str, number: int) -> Path:
        return sorted((self.data / place).glob("*.log"))[number]

    def swap(self, one: Path, other: Path) -> None:
        for a, b in self._files(one, other):
            spare = a.with_suffix(".spare")
            a.rename(spare)
            b.rename(a)
            spare.rename(b)
        self._lose(one, other)

    def copy(self, source: Path, target: Path) -> None:
        for a, b in self._files(source, target):
            shutil.copyfile(a, b)
        self._lose(target)

    def move(self, source: Path, target: Path) -> None:
        for a, b in self._files(source, target):
            a.rename(b)
        self._lose(target)

    def delete(self, *paths: Path) -> None:
        for path in paths:
            for file, _ in self._files(path, path):
                file.unlink()
            self._lose(path)

    def _files(self, one: Path, other: Path) -> list[tuple[Path, Path]]:
        suffixes = (".log", ".idx") if self.indexes == "along" else (".log",)
        return [(one.with_suffix(suffix), other.with_suffix(suffix)) for suffix in suffixes]

    def _lose(self, *paths: Path) -> None:
        for path in paths:
            if self.indexes == "lost":
                path.with_suffix(".idx").unlink(missing_ok=True)


CASES: dict[str, Callable[[Restore], object]] = {}
for _place, _name in ((WAL, "the WAL"), (QUEUE, "a queue")):
    CASES |= {
        f"two sealed segments of {_name} swapped": lambda r, p=_place: r.swap(r.segment(p, 0), r.segment(p, 2)),
        f"a sealed and the active segment of {_name} swapped": lambda r, p=_place: r.swap(
            r.segment(p, 1), r.segment(p, -1)
        ),
        f"a segment of {_name} copied over the next": lambda r, p=_place: r.copy(r.segment(p, 1), r.segment(p, 2)),
        f"a segment of {_name} copied over the active one": lambda r, p=_place: r.copy(
            r.segment(p, 1), r.segment(p, -1)
        ),
        f"the active segment of {_name} copied over the first": lambda r, p=_place: r.copy(
            r.segment(p, -1), r.segment(p, 0)
        ),
        f"a segment of another topic in {_name}": lambda r, p=_place: r.copy(r.segment(OTHER, 1), r.segment(p, 1)),
        f"the active segment of another topic in {_name}": lambda r, p=_place: r.copy(
            r.segment(OTHER, -1), r.segment(p, -1)
        ),
        f"another broker's segment in {_name}": lambda r, p=_place: r.copy(
            sorted((r.foreign / p).glob("*.log"))[1], r.segment(p, 1)
        ),
        f"another broker's first segment in {_name}": lambda r, p=_place: r.copy(
            min((r.foreign / p).glob("*.log")), r.segment(p, 0)
        ),
        f"another broker's active segment in {_name}": lambda r, p=_place: r.copy(
            sorted((r.foreign / p).glob("*.log"))[-1], r.segment(p, -1)
        ),
        f"a segment of {_name} under a later number": lambda r, p=_place: r.copy(
            r.segment(p, 1), r.data / p / f"{9_000_000:020d}.log"
        ),
        f"a segment of {_name} renamed to a later number": lambda r, p=_place: r.move(
            r.segment(p, 1), r.data / p / f"{9_000_000:020d}.log"
        ),
        f"another broker's segment behind {_name}": lambda r, p=_place: r.copy(
            sorted((r.foreign / p).glob("*.log"))[2], r.data / p / f"{9_000_000:020d}.log"
        ),
        f"a segment of {_name} deleted": lambda r, p=_place: r.delete(r.segment(p, 1)),
        f"the last two segments of {_name} deleted": lambda r, p=_place: r.delete(r.segment(p, -2), r.segment(p, -1)),
        f"all segments of {_name} deleted": lambda r, p=_place: r.delete(*(r.data / p).glob("*.log")),
    }
CASES |= {
    "a segment of the WAL in a queue": lambda r: r.copy(r.segment(WAL, 1), r.segment(QUEUE, 1)),
    "a segment of a queue in the WAL": lambda r: r.copy(r.segment(QUEUE, 1), r.segment(WAL, 1)),
    "segments of two queues swapped": lambda r: r.swap(r.segment(QUEUE, 1), r.segment(OTHER, 1)),
    "active segments of two queues swapped": lambda r: r.swap(r.segment(QUEUE, -1), r.segment(OTHER, -1)),
    "an empty file under a later number of the WAL": lambda r: (r.data / WAL / f"{9_000_000:020d}.log").touch(),
}
EVERY = list(product(CASES, ("along", "behind", "lost")))
# All of them: the soak. Only the index tells another broker's first segment from ours: it has the same place and numbers.
SAMPLE = [
    *random.Random(7).sample(EVERY, 20),
    *((f"another broker's first segment in {name}", "along") for name in ("the WAL", "a queue")),
]


def misplaced(original: Original, data: Path, case: str, indexes: str) -> None:
    shutil.copytree(original.data, data, symlinks=True)
    CASES[case](Restore(data, original.foreign, indexes))


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
    done = rebuild.Repair(str(data)).run()
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
    rebuild.Repair(str(pod.data)).run()
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
