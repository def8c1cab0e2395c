"""Computes the figures of a micro-batch: how far the query is, how far behind, and how many rows it dropped.

Works on the JSON of Spark's StreamingQueryProgress and of its checkpoints. Needs neither pyspark nor a JVM.
"""

import json
from collections.abc import Mapping
from typing import Any

from kmq.log.reader import WAL
from kmq.spark.source.plan import Key
from kmq.spark.streaming import late


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


def batch_figures(query: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a batch: query, batch, rows, rows_per_s, ms, behind, late.

    `behind`: records that are not read yet; None: unknown. `late`: rows that were dropped; None: no rows.
    """
    gaps = [behind(source.get("latestOffset"), source.get("endOffset")) for source in progress.get("sources", ())]
    known = [gap for gap in gaps if gap is not None]
    return {
        "query": query,
        "batch": progress["batchId"],
        "rows": progress["numInputRows"],
        "rows_per_s": round(progress.get("processedRowsPerSecond") or 0),
        "ms": progress["batchDuration"],
        "behind": sum(known) if known else None,
        "late": late.dropped(progress) or None,
    }
