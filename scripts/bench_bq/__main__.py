"""The benchmark of the Broadcast Queue on three real Consul servers.

    python scripts/bench_bq [publish delivery catch-up watches idle] [--only PART] [--quick] [--json FILE] [--dir DIR]

The servers have loopback addresses of their own, and their data on a real disk. KMQ asks the first of them, which need
not be the leader. Nodes are processes; 100 nodes are threads of four.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `bench_bq`

from bench.report import Figure, Measure, run  # noqa: E402
from bench_bq import node, parts  # noqa: E402
from bench_bq.servers import servers_in  # noqa: E402

PARTS: dict[str, Callable[[parts.Bench], Iterator[Figure]]] = {
    "publish": parts.publish,
    "delivery": parts.delivery,
    "catch-up": parts.catch_up,
    "watches": parts.watches,
    "idle": parts.idle,
}


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory(dir=options.dir) as home, servers_in(Path(home)) as servers:
        bench = parts.Bench(servers, Path(home), options.quick)
        yield lambda part: PARTS[part](bench)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in node.ROLES:
        node.run(*sys.argv[1:])
        return 0
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench_bq", description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return run(parser, tuple(PARTS), "a tenth of everything", prepare)


if __name__ == "__main__":
    sys.exit(main())
