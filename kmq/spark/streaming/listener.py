"""Keeps each streaming query's status beside its checkpoint, for `kmq pipeline status`; warns if a query drops rows.

    <checkpoint>/kmq-status.json   {"name": "archive", "rows_per_s": …, …}

Owns        In the directory of a checkpoint on a local file system: kmq-status.json, a few KiB, replaced as a whole at
            most once a second; and the lock kmq-owner, held while the query runs (`kmq pipeline reset` takes it too).
Invariant   The listener never fails or delays a query: it ignores an error, and then only the status is missing. The
            position that counts is always Spark's own, in the checkpoint. The status adds what the checkpoint lacks:
            rates, records that can be read, rows that were dropped, and the process that runs the query.
Crash       A kill leaves the last status, and releases the lock. Nothing is synced to disk.
Commits     of queries with option groupId, where the source cannot commit in time: the source commits a batch when
            Spark asks for the next one (kmq/spark/source/group.py). That never happens after `query.stop()` and with
            Trigger.Once, and happens an hour late with a trigger of an hour. So the listener commits a query that is
            idle for IDLE_S, and a query that has ended: only ends of batches that Spark has reported as finished.
Memory      The last status of each running query; with a groupId also the end of its last batch.
Cost        Two calls to the JVM for each batch, instead of the fifty that pyspark's own events take. With a groupId, a
            commit after each batch that is not soon followed by another one.
Not covered Checkpoints in object stores, and sessions over Spark Connect. Commits of programs that end before Spark
            reports the end of their query: the next start commits from the checkpoint.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.sql.streaming.listener import StreamingQueryListener

from kmq.links.ownership import FileLock
from kmq.logfmt import Logger
from kmq.spark.paths import local_path
from kmq.spark.source.group import GroupOffsets
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming import checkpoint
from kmq.spark.streaming.checkpoint import OWNER, STATUS, batch_figures, positions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- commits of a groupId --------------------------------------------------------------------------------------------

IDLE_S = 1.0  # without another batch: then the source will not commit soon
_RELATION = "StreamingDataSourceV2ScanRelation"


class Committer:
    """Commits for one run of a query. `execution`: the JVM's StreamExecution."""

    def __init__(self, execution: Any) -> None:
        self._execution = execution
        self._groups: list[GroupOffsets | None] | None = None  # of each source; None: not looked up yet
        self._ends: list[Any] = []  # of each source, of the last batch
        self._timer: threading.Timer | None = None
        self._turn = threading.Lock()

    def finished(self, sources: list[Mapping[str, Any]]) -> None:
        """Note that a batch has finished. `sources`: of the query's progress."""
        if self._groups is None:
            self._groups = groups_of(self._execution)
        if not any(self._groups) or len(self._groups) != len(sources):
            return
        self._ends = [source.get("endOffset") for source in sources]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(IDLE_S, self._commit)
        self._timer.daemon = True
        self._timer.start()

    def ended(self) -> None:
        """Commit the last batch; takes a few seconds at most."""
        if self._timer is not None:
            self._timer.cancel()
            self._commit(is_last=True)

    def _commit(self, is_last: bool = False) -> None:
        with self._turn:
            for group, end in zip(self._groups or (), self._ends, strict=True):
                if group is not None:
                    group.commit(positions(end), is_last)


def groups_of(execution: Any) -> list[GroupOffsets | None]:
    """Return the group of each source of a query, in the order of its progress; None for a source without one."""
    leaves = execution.logicalPlan().collectLeaves()
    found: dict[int, GroupOffsets | None] = {}
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if not leaf.isStreaming():
            continue
        if leaf.getClass().getSimpleName() != _RELATION:
            return []  # a source of Spark's first interface: the order of sources is unknown
        stream = leaf.stream().hashCode()  # a source that is read twice is two leaves and one stream
        if stream not in found:
            found[stream] = _group_of(dict(leaf.relation().options().asCaseSensitiveMap()))
    return list(found.values())


def _group_of(given: Mapping[str, str]) -> GroupOffsets | None:
    if "groupid" not in map(str.lower, given):
        return None
    with suppress(Exception):  # another source's option of this name
        options = ReadOptions(given)
        return GroupOffsets(options.group_id, options.servers, options.access, is_second=True)
    return None


# --- status ----------------------------------------------------------------------------------------------------------

WRITE_S = 1.0  # between two writes of one query's status
_SETTLE_S = 5.0  # longest wait for the last status of a query that has ended
_MAX_ERROR = 500  # characters of an error that are kept


def listen(spark: "SparkSession") -> None:
    """Add a listener to a session unless it has one. Never fails."""
    with suppress(Exception):
        if getattr(spark, "_kmq_listener", None) is None:
            listener = StatusListener(spark)
            spark.streams.addListener(listener)
            spark._kmq_listener = listener  # type: ignore[attr-defined]


def settle(spark: "SparkSession", run_id: str) -> None:
    """Wait until the end of a run is written and its lock is released.

    After that its directory can be read, reset or removed. The JVM reports the end of a run some time after the
    query has ended. Never fails; gives up after a few seconds.
    """
    with suppress(Exception):
        spark._kmq_listener.wait_for_end(run_id)  # type: ignore[attr-defined]


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def call(self: Any, event: Any) -> None:
        with suppress(Exception):
            method(self, event)

    return call


class _Query:
    """One run of a query."""

    def __init__(self, event: Any, root: str) -> None:
        self.directory = root if os.path.isdir(root) else ""
        self.written = 0.0
        self.committer: Committer | None = None
        self.status: dict[str, Any] = {
            **{"name": event.name(), "id": str(event.id()), "run_id": str(event.runId()), "state": "running"},
            **{"pid": os.getpid(), "host": socket.gethostname(), "cwd": os.getcwd(), "started": _now(), "late": 0},
        }

    def write(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not self.directory or (not at_once and now - self.written < WRITE_S):
            return
        self.written = now
        new = f"{self.directory}/.{STATUS}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(self.status, file)
        os.replace(new, f"{self.directory}/{STATUS}")


class StatusListener(StreamingQueryListener):
    """Keep the status of a session's queries; see the module. The JVM calls it with one event after the other."""

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)

    def __init__(self, spark: "SparkSession") -> None:
        self._session = spark
        self._log = Logger("spark")
        self._queries: dict[str, _Query] = {}  # by run
        self._locks: dict[str, FileLock] = {}  # by directory: a run may begin before the end of the last is reported
        self._turn = threading.Condition()  # notified when a run is removed

    @property
    def _jlistener(self) -> Any:
        """Return the JVM's listener, which passes events on as they are.

        pyspark's own listener would fetch each field of each event by a call to the JVM.
        """
        from pyspark import SparkContext

        if not hasattr(self, "_jlistenerobj"):
            assert SparkContext._jvm is not None
            self._jlistenerobj = SparkContext._jvm.PythonStreamingQueryListenerWrapper(self)
        return self._jlistenerobj

    @_harmless
    def onQueryStarted(self, event: Any) -> None:
        """Take the query's lock and write its first status. The query's start waits for this."""
        running = self._session._jsparkSession.streams().get(str(event.id()))
        root = str(running.streamingQuery().resolvedCheckpointRoot())
        query = _Query(event, unquote(local_path(root) or ""))
        query.committer = Committer(running.streamingQuery())
        with self._turn:
            self._queries[query.status["run_id"]] = query
            if query.directory and query.directory not in self._locks:
                lock = FileLock(f"{query.directory}/{OWNER}")
                if lock.try_acquire(f"pid={os.getpid()} host={socket.gethostname()}"):
                    self._locks[query.directory] = lock
        query.write(at_once=True)

    @_harmless
    def onQueryProgress(self, event: Any) -> None:
        progress = json.loads(event.progress().json())
        query = self._queries[progress["runId"]]
        figures = batch_figures(query.status["name"] or "stream", progress)
        if missing := checkpoint.dropped(progress):
            self._warn(figures["query"], progress, missing)
        query.status["late"] += missing
        query.status |= {
            **{name: figures[name] for name in ("batch", "rows", "bytes", "rows_per_s", "ms", "behind")},
            **{"batch_at": _now(), "watermark": progress.get("eventTime", {}).get("watermark")},
            "sources": [
                {"end": source.get("endOffset"), "latest": source.get("latestOffset")} for source in progress["sources"]
            ],
        }
        query.write()
        if query.committer is not None and any(positions(source.get("endOffset")) for source in progress["sources"]):
            query.committer.finished(progress["sources"])

    @_harmless
    def onQueryIdle(self, event: Any) -> None:
        self._queries[str(event.runId())].write()

    @_harmless
    def onQueryTerminated(self, event: Any) -> None:
        run_id = str(event.runId())
        query = self._queries[run_id]
        error = event.exception()
        query.status |= {
            "state": "failed" if error.isDefined() else "ended",
            "ended": _now(),
            "error": str(error.get())[:_MAX_ERROR] if error.isDefined() else None,
        }
        try:
            query.write(at_once=True)
            if query.committer is not None:
                query.committer.ended()
        finally:
            with self._turn:
                del self._queries[run_id]
                if not any(other.directory == query.directory for other in self._queries.values()):
                    lock = self._locks.pop(query.directory, None)
                    if lock is not None:
                        lock.release()
                self._turn.notify_all()

    def wait_for_end(self, run_id: str) -> None:
        """Wait until `onQueryTerminated` has finished with a run, or a few seconds have passed."""
        with self._turn:
            self._turn.wait_for(lambda: run_id not in self._queries, _SETTLE_S)

    def _warn(self, name: str, progress: dict[str, Any], missing: int) -> None:
        self._log.warn(
            "rows_dropped",
            query=name,
            batch=progress["batchId"],
            rows=missing,
            watermark=progress.get("eventTime", {}).get("watermark"),
            effect="they came later than the watermark and are in no result; a longer one in withWatermark keeps them",
        )


def _now() -> float:
    return round(time.time(), 3)
