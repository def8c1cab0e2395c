"""How long `kmq up` takes on a directory that was used before."""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

from bench.pod import Pod, pod_in
from bench.report import Figure, say
from bench.scale import Scale
from kmq.config.settings import STAGES


def startup(directory: Path, scale: Scale) -> Iterator[Figure]:
    """`kmq up` until all stages are ready, on a used directory: after a clean stop, and after SIGKILL of everything."""
    with pod_in(used_directory(directory, f"records-{scale.records}"), up=False) as running:
        fill(running, scale.records, "count", ",".join(f"topic{n}.k" for n in range(10)), 500_000, 36)
        unsaved = min(1_000_000, scale.records)
        more = partial(running.load, "count", "topic1.k", unsaved, 36)
        yield from start_figures(running, scale.starts, "10 topics", "< 1", more)
        yield from full_load_figure(running, scale, "< 1")


def startup_topics(directory: Path, scale: Scale) -> Iterator[Figure]:
    """The same with many topics of one record each."""
    with pod_in(used_directory(directory, f"topics-{scale.topics}"), up=False) as running:
        fill(running, scale.topics, "topics", scale.topics)
        more = partial(running.load, "topics", scale.topics)
        yield from start_figures(running, scale.starts, f"{scale.topics:,} topics", "< 5", more)


def used_directory(directory: Path, name: str) -> Path:
    home = directory / name
    home.mkdir(exist_ok=True)
    return home


def fill(running: Pod, records: int, *load_arguments: object) -> None:
    """Store at least `records` in the WAL, and stop the broker cleanly."""
    if (have := running.last_seq()) >= records:
        return
    running.up()
    while have < records:
        say(f"building a directory: {have:,} of {records:,} records")
        running.load(str(load_arguments[0]), *load_arguments[1:])
        have = running.last_seq()
    running.down()


def start_figures(running: Pod, starts: int, what: str, bar: str, more: Callable[[], None]) -> Iterator[Figure]:
    name = f"{running.last_seq():,} records, {what}"
    say(f"start-up with {name}: after a clean stop")
    times = []
    for _ in range(starts):
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


def full_load_figure(running: Pod, scale: Scale, bar: str) -> Iterator[Figure]:
    """Everything is killed while a producer sends as fast as it can."""
    running.up()
    name = f"{running.last_seq():,} records"
    say(f"start-up with {name}: after kill -9 under full load")
    sending = running.send("endless", "topic1.k", 100).go()
    time.sleep(scale.load_s)
    running.kill()
    _, sent = sending.result()
    note = f"up to {sent:,} new; "
    yield Figure("startup", f"{name}, kill -9 at full load", running.up(), "s", bar, note + stage_starts(running))
    running.down()


def stage_starts(running: Pod) -> str:
    """Return when each stage was ready, in seconds since the call of `kmq up`, according to its own log."""
    ready: dict[str, float] = {}
    for row in (running.home / "pipes" / "kmq.log").read_text(errors="replace").splitlines():
        if match := re.match(r"ts=(\S+)Z level=info stage=(\w+) event=ready ", row):
            ready[match[2]] = datetime.fromisoformat(match[1] + "+00:00").timestamp() - running.began
    return ", ".join(f"{stage} {ready[stage]:.2f}" for stage in STAGES)
