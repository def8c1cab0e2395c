"""Streams of Spark's, run to their end: what every pipeline that follows topics does in the same way."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

EVERY = "10 seconds"


def run(stream: "DataStreamWriter", once: bool = True, every: str = EVERY) -> None:
    """`once`: all there is now, then return. Else on and on, a batch `every` so often, until the stream is stopped."""
    query = (stream.trigger(availableNow=True) if once else stream.trigger(processingTime=every)).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def follow(
    rows: "DataFrame",
    add: "Callable[[DataFrame, int], None]",
    name: str,
    checkpoint: str,
    once: bool = True,
    every: str = EVERY,
) -> None:
    """Hand a stream to `add(batch, batch id)`, batch by batch; none is at work any more on return."""
    turn = threading.Lock()

    def in_turn(batch: "DataFrame", batch_id: int) -> None:
        with turn:
            add(batch, batch_id)

    stream = rows.writeStream.queryName(name).foreachBatch(in_turn).option("checkpointLocation", checkpoint)
    try:
        run(stream, once, every)
    finally:
        turn.acquire()  # a batch that Spark does not wait for any more may still be in its commit
