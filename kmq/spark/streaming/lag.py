"""What a micro-batch says of itself, in figures: how far a query is, how far behind, and what it has left out.

Works on the JSON of Spark's StreamingQueryProgress and of its checkpoints. Needs neither pyspark nor a JVM.
"""

import json
from collections.abc import Mapping
from typing import Any

from kmq.spark.source.options import WAL
from kmq.spark.source.plan import Key
from kmq.spark.streaming import late


def positions(offsets: Any) -> dict[Key, int]:
    """Return (broker, topic, partition) → next offset, of the JSON of a stream of format("kmq"); else nothing.

    What else a broker's part holds (names that begin with __, such as its identity) is ignored.
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
    """Return how many records lie between two positions; None where that is unknown."""
    if not latest or not end:
        return None
    reached = positions(end)
    return sum(max(0, stop - reached.get(key, 0)) for key, stop in positions(latest).items())


def batch_figures(query: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a batch says: query, batch, rows, rows_per_s, ms, behind (records; None: unknown), late (rows left out)."""
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
