"""The benchmark of consumers: what comes out of the consumer port and HTTP, how soon, and how fast Python takes it.

    python scripts/bench_consumers [PART …] [--only PART] [--quick] [--json FILE] [--dir DIR]

The broker is what `kmq up` starts, with the gateway, free ports and a new directory on a real disk. Each reader is a
process of its own, so its CPU time is that of the consumer alone. The page cache holds what is read.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `bench_consumers`

from bench.report import Figure, Measure, run  # noqa: E402
from bench_consumers import parts, reading, together  # noqa: E402

PARTS: dict[str, Callable[[parts.Bench], Iterator[Figure]]] = {
    "records": parts.records,
    "bytes": parts.large,
    "async": parts.by_asyncio,
    "commits": parts.commits,
    "redis": parts.beside_redis,
    "lines": parts.lines,
    "latency": parts.latency,
    "together": together.together,
    "paced": together.paced,
    "http": together.http,
    "wakeup": together.wakeup,
    "members": together.members,
    "groups": together.groups,
}


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    with parts.pod_with_gateway(options.dir) as running:
        bench = parts.Bench(running, options.quick)
        yield lambda part: PARTS[part](bench)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in reading.ROLES:
        reading.run(*sys.argv[1:])
        return 0
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench_consumers",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run(parser, tuple(PARTS), "a tenth of everything", prepare)


if __name__ == "__main__":
    sys.exit(main())
