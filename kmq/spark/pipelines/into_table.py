"""Add a stream to a table, batch by batch."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kmq.spark.streaming import streams
from kmq.spark.streaming.checkpoint import Checkpoint
from kmq.spark.streaming.streams import ONCE, Trigger
from kmq.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Followed(NamedTuple):
    """What a run of a stream added."""

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
    where = trigger.checkpoint.removeprefix("file://")
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

    streams.follow(rows, add, name, trigger._replace(checkpoint=where))
    return Followed(added, batches, merged + table.merge(rows.sparkSession, all=True))
