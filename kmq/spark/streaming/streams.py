"""Streams of Spark in one command: run to their end, shown while they run, and stopped by Ctrl-C or SIGTERM.

Restart     A stream that could not get a Python worker in time is restarted from its checkpoint. The JVM waits 10
            seconds for a new Python interpreter. No setting changes that, and on a busy machine it is not enough.
            Nothing is lost: the batch runs again, as after a kill.
Progress    A bar on a terminal, else a logfmt line every few seconds, on stderr. A thread asks Spark a few times a
            second which stages run, how many of their tasks are done, and what each streaming query did in its last
            batch. The job itself is not involved and not slowed down.
Owner       of the handlers of both signals, while the command runs: StopSignals.
Invariant   The process always ends at most STOP_S after the first signal, whatever Spark, its JVM or a planner is
            doing. Unfinished work is done again at the next start, as after a kill.
Stop        before the session exists      the process ends at once, and the JVM with it, because its stdin closes
            before the query is active     it is stopped as soon as it is active, and no other query is started
                                           (`stopping`)
            while a stream runs            query.stop() is repeated, because the code that it interrupts may lose the
                                           interrupt
            in a job without a stream      its jobs are cancelled repeatedly, because another job may follow
            a second signal                the process ends at once
            Both signals always have a handler: the first process of a container would ignore a signal without one.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kmq.errors import ConfigError
from kmq.logfmt import Logger
from kmq.spark import failures
from kmq.spark.paths import local_path
from kmq.spark.streaming.checkpoint import (
    DROP,
    FAIL,
    Checkpoint,
    LateError,
    batch_figures,
    batch_text,
    dropped,
    is_checkpoint,
    is_ours,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


EVERY = "10 seconds"
STARTS = 8  # starts of a stream in a row without a finished batch
_PAUSE_S = 1.0  # before the second start; it doubles before each further one: two minutes in all
_POLL_S = 1  # between two checks of a running stream for late rows

stopping = threading.Event()  # set: this process is stopping and starts no further stream


class Trigger(NamedTuple):
    """When the batches of a stream run, and where Spark keeps its checkpoint."""

    once: bool = True  # process all records that exist now, then return; else run until the stream is stopped
    every: str = EVERY  # between two batches of a stream that runs until it is stopped
    checkpoint: str = ""  # a directory; "": the pipeline's default

    def at(self, checkpoint: str) -> "Trigger":
        """Return a copy with this checkpoint, unless one is set already. A path of this machine loses its scheme."""
        given = self.checkpoint or checkpoint
        return self._replace(checkpoint=local_path(given) or given)


ONCE = Trigger()


def run(stream: "DataStreamWriter", trigger: Trigger = ONCE, on_late: str = FAIL) -> None:
    """Run a stream to its end. Raises LateError if a batch has dropped late rows, unless `on_late` is `drop`."""
    from kmq.spark.streaming.listener import settle  # not at the top, because it needs pyspark

    triggered = stream.trigger(availableNow=True) if trigger.once else stream.trigger(processingTime=trigger.every)
    starts, pause = 0, _PAUSE_S
    while not stopping.is_set():
        starts += 1
        query = triggered.start()
        try:
            _to_its_end(query, on_late)
            return
        except Exception as error:
            if not failures.is_worker_timeout(error):
                raise
            if query.lastProgress is not None:  # this start has finished a batch
                starts, pause = 1, _PAUSE_S
            if starts >= STARTS:
                raise
            Logger("spark").warn(
                "stream_restarted",
                query=query.name or "stream",
                start=starts + 1,
                of=STARTS,
                reason="no Python worker started within the 10 s that Spark waits: the machine is busy",
                effect="resumes from its checkpoint",
            )
            stopping.wait(pause)
            pause *= 2
        finally:
            query.stop()
            settle(stream._spark, str(query.runId))


def _to_its_end(query: "StreamingQuery", on_late: str) -> None:
    """Wait for a query to end. Check its last batch while it runs, and at the end all batches that Spark remembers."""
    while not query.awaitTermination(_POLL_S):
        _check(query, [query._jsq.lastProgress()], on_late)
    _check(query, query._jsq.recentProgress(), on_late)


def _check(query: "StreamingQuery", batches: Any, on_late: str) -> None:
    for batch in batches if on_late == FAIL else ():
        progress = json.loads(batch.json()) if batch is not None else {}
        if missing := dropped(progress):
            effect = "its other rows were sent already"
            raise LateError(query.name or "stream", progress["batchId"], missing, effect)


def check_checkpoint(path: str, name: str) -> None:
    """Raise ConfigError if a checkpoint cannot be written or belongs to another query. Starts nothing.

    `name`: of the query.
    """
    local = local_path(path)
    if local is None:
        return
    try:
        os.makedirs(local, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"--checkpoint {path}: must be a directory that can be written: {err.strerror}") from None
    if not os.access(local, os.W_OK | os.X_OK):
        raise ConfigError(f"--checkpoint {path}: must be a directory that can be written by user {os.getuid()}")
    if not is_checkpoint(local):
        return
    found = Checkpoint(local)
    writer = found.status().get("name")
    if writer and writer != name:
        raise ConfigError(
            f"--checkpoint {path}: was written by {writer}, not by {name}; give each pipeline one of its own"
        )
    _, logged = found.committed()
    if logged and not any(map(is_ours, logged.sources)):
        raise ConfigError(
            f"--checkpoint {path}: was written by a query that reads no topics; give {name} one of its own"
        )


def follow(rows: "DataFrame", add: "Callable[[DataFrame, int], None]", name: str, trigger: Trigger) -> None:
    """Pass a stream to `add(batch, batch id)`, batch by batch. On return no call of `add` is still running.

    If the stream keeps windows, `add` itself must check for late rows before it commits (checkpoint.dropped_so_far).
    """
    where = trigger.checkpoint
    check_checkpoint(where, name)
    turn = threading.Lock()

    def in_turn(batch: "DataFrame", batch_id: int) -> None:
        with turn:
            # Spark's own text has the ids of query and run, but does not say what the batch reads.
            text = batch_text(where, batch_id)
            context = batch.sparkSession.sparkContext
            context.setJobDescription(f"{name}, batch {batch_id}" + (f": {text}" if text else ""))
            add(batch, batch_id)

    stream = rows.writeStream.queryName(name).foreachBatch(in_turn).option("checkpointLocation", where)
    try:
        run(stream, trigger, DROP)
    finally:
        turn.acquire()  # a batch that Spark no longer waits for may still be committing


# --- progress --------------------------------------------------------------------------------------------------------

_WATCH_S = 0.3  # between two polls, each of a few calls that take a millisecond
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

    # --- the watching thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        logged = time.monotonic()
        while not self._ended.wait(_WATCH_S):
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
        parts += map(batch_line, streams)
        self._bars.update(self._bar, description=self._what, completed=done, total=total or None, done="; ".join(parts))

    def _log_figures(self, done: int, total: int, streams: list[dict[str, Any]]) -> None:
        if total:
            self._log.info("progress", what=self._what, tasks_done=done, tasks=total)
        for figures in streams:
            self._log.info("batch", **{name: value for name, value in figures.items() if value is not None})


def batch_line(figures: dict[str, Any]) -> str:
    """Return the figures of a batch (checkpoint.batch_figures) as a terminal shows them."""
    parts = [f"batch {figures['batch']}: {figures['rows']:,} rows"]
    parts += [f"{figures['bytes'] / 1e6:,.1f} MB"] if figures["bytes"] is not None else []
    parts += [f"{figures['rows_per_s']:,}/s"]
    parts += [f"{figures['behind']:,} behind"] if figures["behind"] is not None else []
    parts += [f"{figures['late']:,} late: dropped"] if figures["late"] else []
    return ", ".join(parts)


# --- stopping --------------------------------------------------------------------------------------------------------

STOP_S = 60.0  # longest time from the first signal to the end
_CANCEL_S = 0.2  # between two attempts to cancel jobs and stop streams
_AGAIN_S = 5  # how long Spark waits for a stream to end before query.stop() is repeated


class StopSignals:
    """Ends streams, or else jobs, from the first signal on, so that the main thread returns from Spark.

    Another thread does this, because a call of Spark in the main thread occupies the main thread's connection.
    """

    def __init__(self) -> None:
        self.number = 0
        self._spark: SparkSession | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._stoppers: dict[str, threading.Thread] = {}  # by run
        stopping.clear()
        self._handle()

    def begin(self, spark: "SparkSession") -> None:
        """Note that the session exists: from now on a signal ends it in order."""
        self._spark = spark
        self._handle()  # again, to replace Spark's own handler, which raises an exception anywhere

    def _handle(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.number or self._spark is None:
            _exit(number)
        self.number = number
        threading.Thread(target=stopping.set).start()  # the interrupted thread may hold the lock of the event
        # A thread of its own, because a call to the JVM may wait for ever.
        limit = threading.Timer(STOP_S, self._give_up)
        limit.daemon = True
        limit.start()
        self._thread = threading.Thread(target=self._end, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        assert self._spark is not None
        with contextlib.suppress(Exception):
            self._spark.conf.set("spark.sql.streaming.stopTimeout", f"{_AGAIN_S}s")
        while not self._done.wait(_CANCEL_S):
            with contextlib.suppress(Exception):  # the JVM is ending
                active = self._spark.streams.active
                for query in active:
                    self._request_stop(query)
                if not active:
                    self._spark.sparkContext.cancelAllJobs()

    def _request_stop(self, query: "StreamingQuery") -> None:
        """Stop a query in a thread, because query.stop() waits for its end."""
        stopper = self._stoppers.get(query.runId)
        if stopper is None or not stopper.is_alive():
            self._stoppers[query.runId] = threading.Thread(target=_stop, args=(query,), daemon=True)
            self._stoppers[query.runId].start()

    def _give_up(self) -> None:
        text = f"kmq: not stopped within {STOP_S:.0f} s; ended anyway; what was begun is done again at the next start"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        _exit(self.number)

    def done(self) -> None:
        """Note that the main thread has returned from Spark. After this the session may be closed.

        The time limit stays in force.
        """
        self._done.set()
        if self._thread:
            self._thread.join()
        self._spark = None  # nothing is left to stop in order: a signal ends the process at once


def _stop(query: "StreamingQuery") -> None:
    with contextlib.suppress(Exception):  # the thread that awaits the query gets its error
        query.stop()


def _exit(number: int) -> NoReturn:
    """End this process with the signal's exit code. Kill its JVM first, because a JVM that hangs would survive it."""
    with contextlib.suppress(Exception):
        from pyspark import SparkContext

        process = getattr(SparkContext._gateway, "proc", None)
        if process is not None:
            process.kill()
    os._exit(128 + number)
