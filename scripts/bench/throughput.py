"""The rate of producers that never stop, and its cost in each stage: plain, and acknowledged beside plain."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.gauges import memory_figures, rest_of_machine, stage_cpu
from bench.lines import KEY, MIXED
from bench.pod import Pod, pod
from bench.report import Figure, say
from bench.requests import Requests
from bench.scale import Scale

GIB_NEEDED = 25  # free disk space for the sustained runs


def sustained(directory: Path, scale: Scale) -> Iterator[Figure]:
    """A producer that never stops, until the last of its lines is routed; and the CPU of each stage for it."""
    if shutil.disk_usage(directory).free < GIB_NEEDED << 30 and scale.sustained_s > 5:
        raise SystemExit(f"bench: the sustained runs need {GIB_NEEDED} GiB free in {directory}; or use --quick, --dir")
    runs = (
        ("100 B, one key", [KEY], 100, "≥ 1000000", ""),
        ("1 KB, one key", [KEY], 1000, "", "≥ 180"),
        ("100 B, 20 keys over 5 topics", MIXED, 100, "≥ 1500000", ""),
    )
    for name, keys, nbytes, bar_messages, bar_mb in runs:
        with pod(directory) as running:
            running.load("count", ",".join(keys), 10_000, nbytes)
            say(f"sustained {name}: {scale.sustained_s:.0f} s")
            sums = Sums()
            with rest_of_machine(running) as rest:
                sums.add(running, partial(run_plain, running, keys, nbytes, scale.sustained_s))
            yield Figure("sustained", name, sums.rate, "msg/s", bar_messages, rest[0])
            yield Figure("sustained", name, sums.rate * nbytes / 1e6, "MB/s", bar_mb)
            yield Figure("sustained", f"{name}: CPU", sums.per_million, "s/M msg", note=sums.each())
            yield from memory_figures(running, f"after sustained {name}")


def acked(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Plain lines, acknowledged lines without ids, and kmq.Producer with its ids, in turns on one broker.

    The ratios are those of the sums of all turns, so that other load on the machine affects all three alike.
    """
    runs = (
        ("100 B", 100, "≤ 1.6", "≥ 500000", "≥ 0.6"),
        ("1 KB", 1000, "≤ 1.4", "≥ 100000", "≥ 0.8"),
    )
    for name, nbytes, bar_cpu, bar_rate, bar_ratio in runs:
        with pod(directory) as running:
            running.load("count", KEY, 10_000, nbytes)
            say(f"acked {name}: {scale.rounds} turns of plain, acks=1, kmq.Producer, {scale.acked_s:.0f} s each")
            with rest_of_machine(running) as rest:
                plain, lines, producer = in_turns(running, nbytes, scale)
            memory = list(memory_figures(running, f"after acked {name}"))
            yield Figure("acked", f"{name}, plain", plain.rate, "msg/s", note=rest[0])
            yield Figure("acked", f"{name}, plain: CPU", plain.per_million, "s/M msg", note=plain.each())
            for way, sums in (("acks=1", lines), ("kmq.Producer", producer)):
                rate_bars = (bar_rate, bar_ratio) if sums is producer else ("", "")
                yield Figure("acked", f"{name}, {way}", sums.rate, "msg/s", rate_bars[0])
                yield Figure("acked", f"{name}, {way}: rate / plain", sums.rate / plain.rate, "x", rate_bars[1])
                note = f"the producer took {sums.sender / sums.count * 1e6:.2f}; {sums.each()}"
                yield Figure("acked", f"{name}, {way}: CPU", sums.per_million, "s/M msg", note=note)
                ratio = sums.per_million / plain.per_million
                yield Figure("acked", f"{name}, {way}: CPU / plain", ratio, "x", bar_cpu)
            yield from memory


class Sums:
    """Messages, seconds, CPU seconds of each stage and of the producer, over several runs."""

    def __init__(self) -> None:
        self.count, self.seconds, self.sender = 0.0, 0.0, 0.0
        self.cpu: dict[str, float] = {}

    def add(self, running: Pod, run: Callable[[], tuple[float, float, float]]) -> None:
        """Add a run. It returns (messages, seconds, CPU seconds of the producer). Stages are measured until all is
        routed.
        """
        with stage_cpu(running) as taken:
            count, seconds, sender = run()
            running.settle()
        self.count, self.seconds, self.sender = self.count + count, self.seconds + seconds, self.sender + sender
        self.cpu = {stage: self.cpu.get(stage, 0.0) + cpu for stage, cpu in taken.items()}

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def per_million(self) -> float:
        """Return the CPU seconds of the four stages for a million messages."""
        return sum(self.cpu.values()) / self.count * 1e6

    def each(self) -> str:
        return ", ".join(f"{stage} {cpu / self.count * 1e6:.2f}" for stage, cpu in self.cpu.items())


def in_turns(running: Pod, nbytes: int, scale: Scale) -> tuple[Sums, Sums, Sums]:
    """Return the sums of (plain lines, acknowledged lines, kmq.Producer)."""
    plain, lines, producer = Sums(), Sums(), Sums()
    for _ in range(scale.rounds):
        plain.add(running, partial(run_plain, running, [KEY], nbytes, scale.acked_s))
        lines.add(running, partial(run_lines, running, nbytes, scale.acked_s))
        producer.add(running, partial(run_producer, running, nbytes, scale.acked_s))
    return plain, lines, producer


def run_plain(running: Pod, keys: list[str], nbytes: int, duration: float) -> tuple[float, float, float]:
    """Send plain lines until the last one is routed."""
    before = running.last_seq()
    begin, count = running.send("seconds", ",".join(keys), duration, nbytes).go().result()
    return count, running.wait_routed(before + count) - begin, 0.0


def run_lines(running: Pod, nbytes: int, duration: float) -> tuple[float, float, float]:
    """Send acknowledged lines until the reply to the last one."""
    found = Requests("kmq", "flood", running.port, nbytes, duration).go().result()
    seconds = found["count"] / found["rate"]
    return found["count"], seconds, found["cores"] * seconds


def run_producer(running: Pod, nbytes: int, duration: float) -> tuple[float, float, float]:
    """Send with kmq.Producer until the reply to the last message."""
    found = running.produce("many", nbytes, duration)
    return found["count"], found["count"] / found["rate"], found["cpu"] * found["count"] / 1e6
