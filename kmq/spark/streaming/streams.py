"""Runs streams of Spark to their end, for all pipelines that follow topics.

A stream that could not get a Python worker in time is restarted from its checkpoint. The JVM waits 10 seconds for a new
Python interpreter. No setting changes that, and on a busy machine it is not enough. Nothing is lost: the batch runs
again, as after a kill.
"""

import json
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq.errors import ConfigError
from kmq.logfmt import Logger
from kmq.spark import failures
from kmq.spark.streaming import checkpoint, late

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
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
        """Return a copy with this checkpoint, unless one is set already."""
        return self if self.checkpoint else self._replace(checkpoint=checkpoint)


ONCE = Trigger()


def run(stream: "DataStreamWriter", trigger: Trigger = ONCE, on_late: str = late.FAIL) -> None:
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
    for batch in batches if on_late == late.FAIL else ():
        progress = json.loads(batch.json()) if batch is not None else {}
        if missing := late.dropped(progress):
            kept = "its other rows were sent already"
            raise late.LateError(query.name or "stream", progress["batchId"], missing, kept)


def check_checkpoint(path: str, name: str) -> None:
    """Raise ConfigError if a checkpoint cannot be written or belongs to another query. Starts nothing.

    `name`: of the query.
    """
    local = path.removeprefix("file://")
    if "://" in local:
        return
    try:
        os.makedirs(local, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"--checkpoint {path}: must be a directory that can be written: {err.strerror}") from None
    if not os.access(local, os.W_OK | os.X_OK):
        raise ConfigError(f"--checkpoint {path}: must be a directory that can be written by user {os.getuid()}")
    if not checkpoint.is_checkpoint(local):
        return
    found = checkpoint.Checkpoint(local)
    writer = found.status().get("name")
    if writer and writer != name:
        raise ConfigError(
            f"--checkpoint {path}: was written by {writer}, not by {name}; give each pipeline one of its own"
        )
    _, logged = found.committed()
    if logged and not any(map(checkpoint.is_ours, logged.sources)):
        raise ConfigError(
            f"--checkpoint {path}: was written by a query that reads no topics; give {name} one of its own"
        )


def follow(rows: "DataFrame", add: "Callable[[DataFrame, int], None]", name: str, trigger: Trigger) -> None:
    """Hand a stream to `add(batch, batch id)`, batch by batch. On return no call of `add` is still running.

    If the stream keeps windows, `add` itself must check for late rows before it commits (late.dropped_so_far).
    """
    where = trigger.checkpoint
    check_checkpoint(where, name)
    turn = threading.Lock()

    def in_turn(batch: "DataFrame", batch_id: int) -> None:
        with turn:
            # Spark's own text has the ids of query and run, but does not say what the batch reads.
            text = checkpoint.batch_text(where, batch_id)
            context = batch.sparkSession.sparkContext
            context.setJobDescription(f"{name}, batch {batch_id}" + (f": {text}" if text else ""))
            add(batch, batch_id)

    stream = rows.writeStream.queryName(name).foreachBatch(in_turn).option("checkpointLocation", where)
    try:
        run(stream, trigger, late.DROP)
    finally:
        turn.acquire()  # a batch that Spark no longer waits for may still be committing
