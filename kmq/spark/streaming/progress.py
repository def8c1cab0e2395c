"""Shows Spark's progress on stderr: a bar on a terminal, else a logfmt line every few seconds.

    with Progress(spark, "audit") as progress:
        progress.describe("reading the WAL")
        …

A thread asks Spark a few times a second which stages run, how many of their tasks are done, and what each streaming
query did in its last batch. The job itself is not involved and not slowed down.
"""

import json
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kmq.logfmt import Logger
from kmq.spark.streaming.lag import batch_figures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.3  # between two polls, each of a few calls that take a millisecond
_LOG_S = 5.0  # between two log lines, without a terminal


class Progress:
    """Shows the jobs and streams of a session while the `with` block runs."""

    def __init__(
        self, spark: "SparkSession", name: str = "spark", console: Console | None = None, log_s: float = _LOG_S
    ) -> None:
        """`name`: of the step and of the logger. `log_s`: seconds between two log lines, without a terminal."""
        self._spark, self._log_s = spark, log_s
        self.console = console or Console(stderr=True, highlight=False)
        self._log = Logger(name)
        self._what = name
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[done]}"))
        self._bars = Bars(
            *columns, TimeElapsedColumn(), console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self._bar = self._bars.add_task(name, total=None, done="")
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._run, daemon=True)

    def describe(self, what: str) -> None:
        """Set a short description of the current step, such as `reading the WAL`. Spark's list of jobs shows it too."""
        self._what = what
        self._spark.sparkContext.setJobDescription(what)
        if not self.console.is_terminal:
            self._log.info("step", what=what)

    def print(self, *objects: Any) -> None:
        """Print on the same console, above the bar."""
        self.console.print(*objects)

    def stop(self) -> None:
        """Remove the bar, before a result is printed on stdout. The end of the `with` block does it too."""
        self._ended.set()
        if self._watch.is_alive():
            self._watch.join()
        self._bars.stop()

    def __enter__(self) -> "Progress":
        self._bars.start()
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # --- the watching thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        logged = time.monotonic()
        while not self._ended.wait(_POLL_S):
            try:
                done, total = self._tasks()
                streams = self._streams()
            except Exception:  # the session or its JVM ends: the job will report that
                continue
            if self.console.is_terminal:
                self._show(done, total, streams)
            elif (total or streams) and time.monotonic() - logged >= self._log_s:
                logged = time.monotonic()
                self._log_figures(done, total, streams)

    def _tasks(self) -> tuple[int, int]:
        """Return (tasks done, all tasks) of the running stages."""
        tracker = self._spark.sparkContext.statusTracker()
        infos = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info]
        return sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos)

    def _streams(self) -> list[dict[str, Any]]:
        """Return the figures of the last batch of each streaming query."""
        return [
            batch_figures(query.name or "stream", json.loads(progress.json()))
            for query in self._spark.streams.active
            if (progress := query._jsq.lastProgress())
        ]

    def _show(self, done: int, total: int, streams: list[dict[str, Any]]) -> None:
        parts = [f"{done}/{total} tasks"] if total else []
        for s in streams:
            behind = f", {s['behind']:,} behind" if s["behind"] is not None else ""
            dropped = f", {s['late']:,} late: dropped" if s["late"] else ""
            parts.append(f"batch {s['batch']}: {s['rows']:,} rows, {s['rows_per_s']:,}/s{behind}{dropped}")
        self._bars.update(self._bar, description=self._what, completed=done, total=total or None, done="; ".join(parts))

    def _log_figures(self, done: int, total: int, streams: list[dict[str, Any]]) -> None:
        if total:
            self._log.info("progress", what=self._what, tasks_done=done, tasks=total)
        for figures in streams:
            self._log.info("batch", **{name: value for name, value in figures.items() if value is not None})
