"""The WAL read as a whole: audited against the queues, and sorted into queues or a table."""

import subprocess
import sys
import time
from collections.abc import Iterator

from bench.report import Figure, say
from bench_spark.gauges import median
from bench_spark.session import MASTER, SIZES, Bench, directory_in


def audit(bench: Bench) -> Iterator[Figure]:
    """Measure the audit of every record; a large WAL is audited by the command, including the start of its session."""
    from kmq.spark.audit import audit as pipeline
    from kmq.spark.audit.snapshot import sources

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        say(f"auditing {records:,} records of {name}")

        def audited(data: str = data) -> None:
            result = pipeline.audit(bench.spark, sources({"path": data}))
            assert result.is_good, data

        cost = median(bench.in_turns({"audit": audited}, 3)["audit"])
        note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
        yield Figure("audit", name, records / cost.wall / 1e6, "M rows/s", "", note)
    if bench.quick:
        return
    keys = ",".join(f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "alerts", "metrics") for key in range(4))
    for what, chosen in (("one key", "test.probe"), ("20 keys, 5 topics", keys)):
        data, records = bench.data(100, 10_000_000, chosen)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "kmq", "pipeline", "run", "audit", "--path", data, "--master", MASTER]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=bench.directory)
        seconds = time.perf_counter() - begin
        yield Figure("audit", f"{records:,} records, {what}, as a command", seconds, "s", "< 30")


def route(bench: Bench) -> Iterator[Figure]:
    """Measure sorting the WAL into queues, and into a table."""
    from kmq.spark.pipelines import route as pipeline

    for name, nbytes in SIZES.items():
        data, records = bench.data(nbytes)
        for kind in ("log", "parquet"):
            say(f"routing {records:,} records of {name} as {kind}")

            def routed(kind: str = kind, data: str = data) -> None:
                with directory_in(bench) as to:
                    pipeline.run(bench.spark, {"path": data}, f"{to}/out", kind)

            cost = median(bench.in_turns({kind: routed}, 1)[kind])
            note = f"CPU {cost.jvm:.2f} JVM + {cost.python:.2f} Python s"
            yield Figure("route", f"{name}, {kind}", records / cost.wall / 1e6, "M rows/s", "", note)
