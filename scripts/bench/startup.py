"""How long `kmq up` takes on a directory that was used before."""

import re
import statistics
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from bench.pod import Pod, pod_in
from bench.report import Figure, say
from bench.scale import Scale
from kmq.settings import STAGES

STARTS = 5  # of which the median counts


def startup(directory: Path, scale: Scale) -> Iterator[Figure]:
    """`kmq up` until all stages are ready, on a used directory: after a clean stop, and after SIGKILL of everything."""
    with pod_in(used_directory(directory, f"records-{scale.records}"), up=False) as running:
        fill(running, scale.records, "count", ",".join(f"topic{n}.k" for n in range(10)), 500_000, 36)
        unsaved = min(1_000_000, scale.records)
        yield from start_figures(running, "10 topics", "< 1", lambda: running.load("count", "topic1.k", unsaved, 36))
    with pod_in(used_directory(directory, f"topics-{scale.topics}"), up=False) as running:
        fill(running, scale.topics, "topics", scale.topics)
        yield from start_figures(
            running, f"{scale.topics:,} topics", "< 5", lambda: running.load("topics", scale.topics)
        )


def used_directory(directory: Path, name: str) -> Path:
    home = directory / name
    home.mkdir(exist_ok=True)
    return home


def fill(running: Pod, records: int, *load_arguments: object) -> None:
    """Have at least `records` in the WAL, cleanly stopped."""
    if (have := running.last_seq()) >= records:
        return
    running.up()
    while have < records:
        say(f"building a directory: {have:,} of {records:,} records")
        running.load(str(load_arguments[0]), *load_arguments[1:])
        have = running.last_seq()
    running.down()


def start_figures(running: Pod, what: str, bar: str, more: Callable[[], None]) -> Iterator[Figure]:
    name = f"{running.last_seq():,} records, {what}"
    say(f"start-up with {name}: after a clean stop")
    times = []
    for _ in range(STARTS):
        running.down()
        times.append(running.up())
    note = f"best {min(times):.2f}; the last: {stage_starts(running)}"
    yield Figure("startup", f"{name}, clean stop", statistics.median(times), "s", bar, note)
    before = running.last_seq()
    more()
    replayed = running.last_seq() - before
    running.kill()
    say(f"start-up with {name}: after kill -9")
    seconds = running.up()
    yield Figure("startup", f"{name}, kill -9", seconds, "s", bar, f"{replayed:,} new; {stage_starts(running)}")
    running.down()


def stage_starts(running: Pod) -> str:
    """When each stage was ready, in seconds since `kmq up` was called, by its own log."""
    ready: dict[str, float] = {}
    for row in (running.home / "pipes" / "kmq.log").read_text(errors="replace").splitlines():
        if match := re.match(r"ts=(\S+)Z level=info stage=(\w+) event=ready ", row):
            ready[match[2]] = datetime.fromisoformat(match[1] + "+00:00").timestamp() - running.began
    return ", ".join(f"{stage} {ready[stage]:.2f}" for stage in STAGES)
