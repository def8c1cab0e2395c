"""The cost of 32 partitions: the same lines to a topic of one partition and to one of many, in turns on one broker."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gauges import rest_of_machine
from bench.pod import Pod, pod
from bench.report import Figure, say
from bench.scale import Scale
from bench.throughput import Sums, run_plain

MANY, KEYS = 32, 200


def partitions(directory: Path, scale: Scale) -> Iterator[Figure]:
    """The ratios are those of the sums of all turns, so that other load on the machine affects both alike."""
    for nbytes in (100, 1000):
        for what, count in (("no key", 0), (f"{KEYS:,} keys", KEYS)):
            with pod(directory) as running:
                running.declare("one", 1)
                running.declare("many", MANY)
                say(f"{nbytes} B, {what}: {scale.rounds} turns of 1 and {MANY} partitions, {scale.acked_s:.0f} s each")
                with rest_of_machine(running) as rest:
                    one, many = _in_turns(running, count, nbytes, scale)
            name = f"{nbytes} B, {what}"
            yield Figure("partitions", f"{name}, 1 partition", one.rate, "msg/s", note=rest[0])
            yield Figure("partitions", f"{name}, {MANY} partitions", many.rate, "msg/s", note=many.each())
            yield Figure("partitions", f"{name}, {MANY} / 1", many.rate / one.rate, "x", "≥ 0.7")
            by_cpu = one.per_million / many.per_million
            yield Figure("partitions", f"{name}, {MANY} / 1 by CPU time", by_cpu, "x", note=one.each())


def _in_turns(running: Pod, count: int, nbytes: int, scale: Scale) -> tuple[Sums, Sums]:
    one, many = Sums(), Sums()
    for _ in range(scale.rounds):
        for sums, topic in ((one, "one"), (many, "many")):
            keys = [f"{topic}.@.k{number}" for number in range(count)] or [topic]
            sums.add(running, partial(run_plain, running, keys, nbytes, scale.acked_s))
    return one, many
