"""What all parts share: the session, directories that a broker has filled, and the figures of a ratio."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.pod import Pod, pod_in
from bench.report import Figure, say
from bench.startup import fill
from bench_spark.gauges import Cost, in_turns, jvm_of, median, ratio
from kmq.spark.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = {"100 B": 100, "1 KB": 1000}
MASTER = "local[2]"
ROUNDS = 5


class Bench:
    """The Spark session, and the directories that brokers have filled."""

    def __init__(self, directory: Path, quick: bool, memory: str) -> None:
        self.directory, self.quick, self.memory = directory, quick, memory
        self._spark: SparkSession | None = None

    @property
    def spark(self) -> "SparkSession":
        if self._spark is None:
            self._spark = session(MASTER, "bench", {"spark.driver.memory": self.memory}, "fatal", listen=False)
        return self._spark

    def records(self, nbytes: int) -> int:
        return (1_000_000 if self.quick else 4_000_000) * 100 // nbytes

    def data(self, nbytes: int, records: int = 0, keys: str = "test.probe", kind: str = "count") -> tuple[str, int]:
        """Return (data directory, its number of records) of a stopped broker that was sent messages of `nbytes`
        bytes.
        """
        wanted = records or self.records(nbytes)
        home = self.directory / f"{kind}-{nbytes}-{wanted}-{keys.count(',')}"
        home.mkdir(exist_ok=True)
        with pod_in(home, up=False) as running:
            fill(running, wanted, kind, keys, min(wanted, 50_000_000 // nbytes), nbytes)
            return str(home / "data"), Pod(home).last_seq()

    def in_turns(self, works: dict[str, Callable[[], object]], rounds: int = 0) -> dict[str, list[Cost]]:
        return in_turns(jvm_of(self.spark), works, rounds or (3 if self.quick else ROUNDS), say)


def figures(
    part: str, name: str, records: int, ours: list[Cost], theirs: list[Cost], other: str, bar: str = ""
) -> Iterator[Figure]:
    """Yield the ratios of KMQ to `other`: CPU and wall time."""
    mine, its = median(ours), median(theirs)
    note = f"kmq {mine.jvm:.2f} JVM + {mine.python:.2f} Python s; {other} {its.jvm:.2f} + {its.python:.2f}"
    yield Figure(part, f"{name}, CPU : {other}", ratio(ours, theirs, lambda cost: cost.cpu), "x", bar, note)
    note = f"kmq {records / mine.wall / 1e6:.2f} M rows/s; {other} {records / its.wall / 1e6:.2f}"
    yield Figure(part, f"{name}, wall : {other}", ratio(ours, theirs, lambda cost: cost.wall), "x", bar, note)


@contextmanager
def directory_in(bench: Bench) -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="table-", dir=bench.directory)
    try:
        yield made
    finally:
        shutil.rmtree(made)
