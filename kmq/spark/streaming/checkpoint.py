"""A query's checkpoint and its batches: how far the query is, its lag, and how many late rows it dropped.

    Checkpoint("archive/.kmq/checkpoint").committed()   → (41, the content of offsets/41)

Reads Spark's checkpoint as plain files, and the JSON of its StreamingQueryProgress. Needs neither pyspark nor Java.

    offsets/<n>     where batch n ends, written before the batch runs: a line with the version, a line of JSON about the
                    batch, and a line for each source
    commits/<n>     written when batch n is finished
    state/          the state of windows and similar operators, a version for each batch
    metadata        the query's id

Beside them are the files of kmq/spark/streaming/listener.py. A batch with a file in offsets/ but not in commits/ is
run again at the next start.

Late        Spark drops rows that arrive later than the watermark, counts them per operator (numRowsDroppedByWatermark)
            and continues, so that the result is silently wrong. In a pipeline that is an error. Of the counters that
            Spark 4.3 has for operators with state, only this one means lost rows. numDroppedDuplicateRows counts rows
            that the query was told to drop. skippedNullValueCount counts nulls in a join, which never match anything.
            Rows may be aggregates of several records (of one task, topic and window). The number is Spark's count of
            rows, so at least so many records were dropped.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq.errors import ConfigError, KmqError
from kmq.links.ownership import FileLock
from kmq.log.reader import WAL
from kmq.spark.paths import directory_here
from kmq.spark.source.plan import IDENTITY, Key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- late rows -------------------------------------------------------------------------------------------------------

DROPPED = "numRowsDroppedByWatermark"
FAIL, DROP = "fail", "drop"  # what a pipeline does about late rows
ADVICE = (
    "begin again with a new table or topic, a new checkpoint and a longer --watermark,"
    " or leave them out with --late drop"
)


class LateError(KmqError):
    """Raised when rows arrived later than the watermark, so that they are in no result."""

    def __init__(self, query: str, batch: int, rows: int, effect: str) -> None:
        super().__init__(
            f"{query}: batch {batch} has records that came later than the watermark ({rows} or more): {effect}; {ADVICE}"
        )


def check_mode(mode: str) -> None:
    """Raise ConfigError if --late is neither `fail` nor `drop`."""
    if mode not in (FAIL, DROP):
        raise ConfigError(f"--late {mode!r}: must be {FAIL} or {DROP}")


def dropped(progress: Mapping[str, Any]) -> int:
    """Return how many late rows a batch has dropped. `progress`: a StreamingQueryProgress, parsed from JSON."""
    return sum(int(operator.get(DROPPED, 0)) for operator in progress.get("stateOperators", ()))


def dropped_so_far(spark: "SparkSession", query: str) -> int:
    """Return how many late rows the batch in `foreachBatch` has dropped, as far as its jobs have ended.

    Call it after all rows of the batch were written and before they are committed. It asks the JVM, because Python
    gets the number only after the batch, when it is too late to hold the commit back.
    """
    running = spark._jsparkSession.streams().get(query)
    return _dropped_in(running.streamingQuery().lastExecution().executedPlan())


def _dropped_in(plan: Any) -> int:
    metric, below = plan.metrics().get(DROPPED), plan.children()
    mine = int(metric.get().value()) if metric.isDefined() else 0
    return mine + sum(_dropped_in(below.apply(number)) for number in range(below.size()))


# --- figures of a batch ----------------------------------------------------------------------------------------------


def positions(offsets: Any) -> dict[Key, int]:
    """Return (broker, topic, partition) → next offset from the JSON of a stream of format("kmq"); else nothing.

    Other entries of a broker are ignored: their names begin with __, such as that of its identity.
    """
    if isinstance(offsets, str):
        offsets = json.loads(offsets)
    return {
        (broker, topic, int(number)): offset
        for broker, topics in (offsets.items() if isinstance(offsets, dict) else ())
        if isinstance(topics, dict)
        for topic, numbers in topics.items()
        if isinstance(numbers, dict) and (topic == WAL or not topic.startswith("__"))
        for number, offset in numbers.items()
        if number.isdecimal() and type(offset) is int
    }


def behind(latest: Any, end: Any) -> int | None:
    """Return how many records lie between two positions; None if that is unknown."""
    if not latest or not end:
        return None
    reached = positions(end)
    return sum(max(0, stop - reached.get(key, 0)) for key, stop in positions(latest).items())


RECORDS = "kmq.records"  # an observation of the stream where a row is not a record: `rows` (records) and their `bytes`


def batch_figures(query: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a batch: query, batch, rows, bytes, rows_per_s, ms, behind, late.

    `bytes`: of the stored lines; `behind`: the lag in records, None if unknown. `late`: rows that were dropped, None
    without rows.
    """
    gaps = [behind(source.get("latestOffset"), source.get("endOffset")) for source in progress.get("sources", ())]
    distances = [gap for gap in gaps if gap is not None]
    rows, nbytes, rate = progress["numInputRows"], None, progress.get("processedRowsPerSecond") or 0
    if (observed := progress.get("observedMetrics", {}).get(RECORDS)) is not None:
        rows, nbytes = observed["rows"] or 0, observed["bytes"] or 0
        rate = 1000 * rows / max(1, progress["batchDuration"])
    return {
        "query": query,
        "batch": progress["batchId"],
        "rows": rows,
        "bytes": nbytes,
        "rows_per_s": round(rate),
        "ms": progress["batchDuration"],
        "behind": sum(distances) if distances else None,
        "late": dropped(progress) or None,
    }


# --- the files -------------------------------------------------------------------------------------------------------

STATUS, OWNER = "kmq-status.json", "kmq-owner"
_VERSION = "v1"
_MAX_TOPICS = 5  # named in the description of a batch


class Logged(NamedTuple):
    """One file of offsets/."""

    version: str
    about: dict[str, Any]  # watermark, time, confs
    sources: list[str]  # the line of each source, as written


class Checkpoint:
    """The checkpoint in a directory, of a query that may be running."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(directory_here(str(path)))
        if not is_checkpoint(self.path):
            raise ConfigError(f"{path}: not found, or not a checkpoint of a stream (it has no metadata and offsets)")
        # A table's own checkpoint is in <table>/.kmq, beside the lock of its writer.
        above = os.path.dirname(self.path)
        self.table = os.path.dirname(above) if os.path.basename(above) == ".kmq" else ""

    def id(self) -> str:
        with open(f"{self.path}/metadata", encoding="utf-8") as file:
            return str(json.load(file)["id"])

    def status(self) -> dict[str, Any]:
        """Return the status that the listener of the last run wrote; empty if there is none."""
        try:
            with open(f"{self.path}/{STATUS}", encoding="utf-8") as file:
                status = json.load(file)
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def seen_age_s(self) -> float | None:
        """Return the seconds since the listener last wrote the status; None if it never did.

        It writes with each batch, and about every ten seconds while there are no batches.
        """
        try:
            return max(0.0, time.time() - os.stat(f"{self.path}/{STATUS}").st_mtime)
        except FileNotFoundError:
            return None

    def locks(self) -> list[FileLock]:
        """Return the locks that a process of this query holds while it runs."""
        return [FileLock(f"{self.path}/{OWNER}"), *([FileLock(f"{self.table}/.kmq/owner")] if self.table else [])]

    def holder(self) -> str:
        """Return the process that runs the query now; "" if none of its locks is held."""
        return next((lock.holder() or "another process" for lock in self.locks() if lock.is_held()), "")

    def batches(self, log: str) -> list[int]:
        """Return the sorted batch numbers in a log, `offsets` or `commits`."""
        try:
            names = os.listdir(f"{self.path}/{log}")
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def logged(self, batch: int) -> Logged:
        """Return one file of offsets/. Raises ConfigError if its format is unknown."""
        with open(f"{self.path}/offsets/{batch}", encoding="utf-8") as file:
            version, *lines = file.read().removesuffix("\n").split("\n")
        if version != _VERSION or not lines:
            raise ConfigError(f"{self.path}/offsets/{batch}: unknown format {version!r}; expected {_VERSION}")
        return Logged(version, json.loads(lines[0]) if lines[0] else {}, lines[1:])

    def committed(self) -> tuple[int, Logged | None]:
        """Return (number, offsets) of the last committed batch; (-1, None) if no batch was committed."""
        committed = set(self.batches("commits"))
        last = max((number for number in self.batches("offsets") if number in committed), default=-1)
        return (last, self.logged(last)) if last >= 0 else (-1, None)

    def unfinished(self) -> int | None:
        """Return the number of the batch that was begun and will be run again; None if there is none."""
        planned = self.batches("offsets")
        return planned[-1] if planned and planned[-1] not in self.batches("commits") else None

    def has_state(self) -> bool:
        """Return True if the query keeps state from batch to batch."""
        return os.path.isdir(f"{self.path}/state") and bool(os.listdir(f"{self.path}/state"))

    def commit_age_s(self) -> float | None:
        """Return the seconds since the last commit of a batch; None if no batch was committed."""
        committed = self.batches("commits")
        if not committed:
            return None
        return max(0.0, time.time() - os.stat(f"{self.path}/commits/{committed[-1]}").st_mtime)

    def size(self) -> tuple[int, int]:
        """Return (files, bytes) of the checkpoint."""
        sizes = []
        for directory, _, names in os.walk(self.path):
            for name in names:
                try:
                    sizes.append(os.stat(f"{directory}/{name}").st_size)
                except FileNotFoundError:
                    pass  # a running query deletes old files
        return len(sizes), sum(sizes)


def is_checkpoint(path: str) -> bool:
    return os.path.isfile(f"{path}/metadata") and os.path.isdir(f"{path}/offsets")


def find(paths: list[str]) -> list[Checkpoint]:
    """Return the checkpoints at these paths.

    A path is a checkpoint, or a table with its own checkpoint, or a directory with some of these directly below it.
    Raises ConfigError for a path without any.
    """
    checkpoints: list[Checkpoint] = []
    for path in paths:
        at_path = list(_at(directory_here(path)))
        if not at_path:
            raise ConfigError(
                f"{path}: not found, or not a checkpoint, a pipeline's table with its own checkpoint, or a directory of"
                " these; for a table written with --checkpoint give that directory"
            )
        checkpoints += at_path
    return checkpoints


def _at(path: str) -> Iterator[Checkpoint]:
    for candidate in (path, f"{path}/.kmq/checkpoint"):
        if is_checkpoint(candidate):
            yield Checkpoint(candidate)
            return
    for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
        for candidate in (f"{path}/{name}", f"{path}/{name}/.kmq/checkpoint"):
            if is_checkpoint(candidate):
                yield Checkpoint(candidate)


def identities(source: str) -> dict[str, str]:
    """Return broker → data id from one source's line; empty if the source is not format("kmq")."""
    try:
        table = json.loads(source)
    except ValueError:
        return {}
    topics = table.items() if isinstance(table, dict) else ()
    return {broker: part[IDENTITY] for broker, part in topics if isinstance(part, dict) and IDENTITY in part}


def is_ours(source: str) -> bool:
    """Return True if a source's line is of format("kmq")."""
    return bool(identities(source))


def offsets_of(logged: Logged | None) -> dict[Key, int]:
    """Return the next offset of each partition, over all sources of format("kmq")."""
    lines = [line for line in logged.sources if is_ours(line)] if logged else []
    return {key: offset for line in lines for key, offset in positions(line).items()}


def batch_text(path: str, batch: int) -> str:
    """Describe what a batch reads: `orders/0,1 jobs/0: 1,234 records`; "" if its checkpoint cannot be read here."""
    try:
        log = Checkpoint(path)
        ends = offsets_of(log.logged(batch))
        begun = offsets_of(log.logged(batch - 1)) if batch else {}
    except (OSError, ValueError, ConfigError):
        return ""
    counts = {key: end - begun[key] if key in begun else end for key, end in ends.items()}
    read = sorted(key for key, count in counts.items() if count > 0)
    topics: dict[str, list[str]] = {}
    for _, topic, number in read:
        topics.setdefault(topic, []).append(str(number))
    named = [f"{topic}/{','.join(dict.fromkeys(numbers))}" for topic, numbers in topics.items()]
    more = f" and {len(named) - _MAX_TOPICS} more topics" if len(named) > _MAX_TOPICS else ""
    # The checkpoint does not say at which offset a new partition begins.
    about = "" if all(key in begun for key in read) else "up to "
    if not named:
        return ""
    return f"{' '.join(named[:_MAX_TOPICS])}{more}: {about}{sum(counts[key] for key in read):,} records"
