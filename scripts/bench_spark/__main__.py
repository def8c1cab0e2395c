"""The benchmark of the data pipeline: reading, archive, micro-batches, sink, what each pipeline costs, beside Spark's own source.

    python scripts/bench_spark [start read batch archive sink memory audit costs] [--only PART] [--quick] [--json FILE]
                               [--dir DIR] [--memory 1g]

Each part works on directories that a broker of its own has filled over its socket: messages of 100 bytes and of 1 KB,
one key. Both sides of a ratio run in turn, after one turn to warm up, and the median of the turns' ratios counts: on a
noisy machine a disturbance then hits both sides. CPU is that of the JVM and of all Python processes.
`text + split` is what a user would do without KMQ's source: spark.read.text on the same files, split at the bars,
without crc checks and without offsets.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `bench_spark`

from bench.report import Figure, Measure, run  # noqa: E402
from bench_spark import reading, writing  # noqa: E402
from bench_spark.session import Bench  # noqa: E402

PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "start": reading.start,
    "read": reading.read,
    "batch": reading.batch,
    "archive": writing.archive,
    "sink": writing.sink,
    "memory": reading.memory,
    "audit": writing.audit,
    "costs": writing.costs,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench_spark",
        description="Measure the data pipeline on Spark, beside Spark's own text source.",
        epilog="examples: make bench-spark ARGS=--quick; python scripts/bench_spark --only read --json figures.json",
    )
    parser.add_argument("--memory", default="1g", help="of the driver's JVM (default: 1g)")
    return run(parser, tuple(PARTS), "a million records, not four or ten", prepare)


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    directory = Path(tempfile.mkdtemp(prefix="spark-", dir=options.dir))
    bench = Bench(directory, options.quick, options.memory)

    def measure(part: str) -> Iterator[Figure]:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # what the pipelines print
            yield from PARTS[part](bench)

    try:
        yield measure
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
