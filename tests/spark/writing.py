"""Writes to format("kmq"), batch and stream, to one broker. An option's dots are underscores: kmq_producer."""

from pathlib import Path

import fixed_port
from brokers import Broker
from pyspark.sql import DataFrame, DataFrameWriter
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter


def writer(df: DataFrame, broker: Broker, **options: str) -> DataFrameWriter:
    options = {
        "kmq.producers": fixed_port.address(broker),
        **{name.replace("_", "."): v for name, v in options.items()},
    }
    return df.write.format("kmq").mode("append").options(**options)


def stream(df: DataFrame, broker: Broker, checkpoint: Path, **options: str) -> DataStreamWriter:
    options = {
        "kmq.producers": fixed_port.address(broker),
        **{name.replace("_", "."): v for name, v in options.items()},
    }
    query = df.writeStream.format("kmq").option("checkpointLocation", str(checkpoint)).options(**options)
    return query.trigger(availableNow=True)


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(200)
    assert query.exception() is None


def forget_last_commit(checkpoint: Path) -> None:
    """What is left when the driver is killed between the sink and Spark's commit: the last batch comes again."""
    last = max(
        (path for path in checkpoint.joinpath("commits").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
