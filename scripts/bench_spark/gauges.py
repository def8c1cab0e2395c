"""What a Spark job costs: wall time, CPU of the JVM and of Python separately, and the memory of its Python workers."""

import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.05  # between two looks at the memory of the workers


class Cost(NamedTuple):
    """Seconds: the cost of one run, or the use of some processes since they began."""

    wall: float
    jvm: float  # of CPU
    python: float  # of CPU: this process, the workers, and what they have started

    @property
    def cpu(self) -> float:
        return self.jvm + self.python

    def __sub__(self, other: tuple[float, ...]) -> "Cost":
        return Cost(*(a - b for a, b in zip(self, other, strict=True)))


def jvm_of(spark: "SparkSession") -> psutil.Process:
    """Return the Java process of this session."""
    return psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]


def until_now(jvm: psutil.Process) -> Cost:
    """Return what these processes have used since they began; a process that has ended counts through its parent."""
    own, java = psutil.Process().cpu_times(), jvm.cpu_times()
    python = own.user + own.system + java.children_user + java.children_system
    for child in jvm.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            python += sum(child.cpu_times()[:4])
    return Cost(time.perf_counter(), java.user + java.system, python)


def cost_of(jvm: psutil.Process, work: Callable[[], object]) -> Cost:
    before = until_now(jvm)
    work()
    return until_now(jvm) - before


def in_turns(
    jvm: psutil.Process, works: Mapping[str, Callable[[], object]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Cost]]:
    """Return the costs of each work, turn by turn, so that a disturbance hits both sides of a ratio. Warms up first."""
    costs: dict[str, list[Cost]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            cost = cost_of(jvm, work)
            turn = f"turn {number} of {rounds}" if number else "warm-up"
            say(f"  {turn}: {name}: {cost.wall:.2f} s, CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python")
            if number:
                costs[name].append(cost)
    return costs


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(each) for each in zip(*costs, strict=True)))


def ratio(ours: list[Cost], theirs: list[Cost], of: Callable[[Cost], float]) -> float:
    """Return the median over the turns of the ratio within a turn."""
    return statistics.median(of(a) / of(b) for a, b in zip(ours, theirs, strict=True))


# --- memory ----------------------------------------------------------------------------------------------------------


class Peak:
    """The peak of the largest Python worker, in bytes: resident set, and proportional set (PSS)."""

    def __init__(self) -> None:
        self.rss = self.pss = self.workers = 0


@contextmanager
def peak_of_workers(jvm: psutil.Process) -> Iterator[Peak]:
    """Watch the Python workers of a JVM."""
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            _look(jvm, peak)

    for child in jvm.children(recursive=True):
        with contextlib.suppress(OSError):
            Path(f"/proc/{child.pid}/clear_refs").write_text("5")  # resets VmHWM, the peak so far
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        _look(jvm, peak)


def _look(jvm: psutil.Process, peak: Peak) -> None:
    children = jvm.children(recursive=True)
    peak.workers = max(peak.workers, len(children))
    for child in children:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{child.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                peak.rss = max(peak.rss, 1024 * int(found[1]))
            rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
            if found := re.search(r"\nPss:\s+(\d+) kB", rollup):
                peak.pss = max(peak.pss, 1024 * int(found[1]))
