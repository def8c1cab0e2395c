"""Shared by the pipelines that follow topics: they add a stream to a table, with common options for the stream."""

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kmq.log import topics
from kmq.spark.pipelines.options import BATCH_BYTES
from kmq.spark.streaming import streams
from kmq.spark.streaming.checkpoint import Checkpoint
from kmq.spark.streaming.streams import ONCE, Trigger
from kmq.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Followed(NamedTuple):
    """The result of a run of a stream."""

    rows: int
    batches: int
    merged: int  # small files that were merged


def follow(
    table: Table,
    rows: "DataFrame",
    prepare: "Callable[[DataFrame, str], None]",
    name: str,
    trigger: Trigger = ONCE,
) -> Followed:
    """Add a stream to a table, batch by batch. `prepare(batch, query id)` stages the rows to add.

    The checkpoint is the table's own unless the trigger names one.
    """
    trigger = trigger.at(f"{table.state}/checkpoint")
    where = trigger.checkpoint
    table.stream.check_checkpoint(where)
    added = batches = merged = 0

    def add(batch: "DataFrame", batch_id: int) -> None:
        nonlocal added, batches, merged
        note, offsets = f"{where}/offsets/{batch_id}", None
        if os.path.exists(note):  # not in an object store: there the batch is known by its number
            offsets = Checkpoint(where).logged(batch_id).sources
        count = table.add(batch, batch_id, prepare, offsets, [note] if offsets is not None else [])
        if count is not None:
            added += count
            batches += 1
            merged += table.merge(batch.sparkSession)

    streams.follow(rows, add, name, trigger)
    return Followed(added, batches, merged + table.merge(rows.sparkSession, all=True))


# --- options of the stream -------------------------------------------------------------------------------------------

ADOPT_S = 30.0  # how long a router may take to adopt a new topic


def starting(where: Mapping[str, str], batch_bytes: str = BATCH_BYTES, takes_letters: bool = False) -> dict[str, str]:
    """Return the options of a stream from the first record on. A pattern matches dead letters only if `takes_letters`.

    `batch_bytes`: of lines in a micro-batch.
    """
    lower = {name.lower(): text for name, text in where.items()}
    options = dict(where)
    if "subscribepattern" in lower and not takes_letters:
        options = {name: text for name, text in where.items() if name.lower() != "subscribepattern"}
        options["subscribePattern"] = rf"(?!.*\.dlq$)(?:{lower['subscribepattern']})"
    if not {"startingoffsets", "startingtimestamp"} & lower.keys():
        options["startingOffsets"] = "earliest"
    if not {"maxbytespertrigger", "maxoffsetspertrigger"} & lower.keys():
        options["maxBytesPerTrigger"] = batch_bytes
    return options


def is_adopted(data: str, topic: str) -> bool:
    """Wait until the router of a data directory has adopted a declared topic. Return False if it has not in ADOPT_S."""
    deadline = time.monotonic() + ADOPT_S
    while topics.load(data, topic)[1] is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
