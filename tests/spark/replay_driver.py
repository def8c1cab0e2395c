"""A Spark driver that takes topic `from` into a sink, or into a table, by a plan that the next driver may change.

Its argument is the plan, as JSON:

data, checkpoint, pids    of the source; where the stream is written down; a file for the pids of driver and JVM
target                    sink, or the format of a table
to                        the table's directory; the sink's broker, host:port
compare                   the sink's data directory
cores, min_partitions     how the work is cut
modulo, rest              the filter: numbers whose remainder is `rest` are left out
lossy                     failOnDataLoss=false
replay                    kmq.replay of the sink
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kmq.spark.pipelines import archive
from kmq.spark.sessions import session
from kmq.spark.streaming import streams

EACH = 700  # records of a micro-batch
plan: dict[str, Any] = json.loads(sys.argv[1])


def keep(rows: DataFrame) -> DataFrame:
    """The rows that this plan's filter lets pass; what `archive` calls for each batch."""
    number = F.split("value_text", " ")[0].cast("bigint")
    return rows.where(number % plan["modulo"] != plan["rest"])


def main() -> None:
    where = {"path": plan["data"], "subscribe": "from", "startingOffsets": "earliest"}
    where |= {"maxOffsetsPerTrigger": str(EACH), "minPartitions": str(plan["min_partitions"])}
    where |= {"failOnDataLoss": "false"} if plan["lossy"] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A JVM that lives for some seconds is better off without its second compiler. A task may fail three times.
        conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
        conf |= {"spark.sql.execution.arrow.maxRecordsPerBatch": "50"}
        spark = session(f"local[{plan['cores']},4]", conf=conf)
    jvm = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    Path(plan["pids"]).write_text(f"{os.getpid()} {jvm}")
    if plan["target"] != "sink":
        sys.modules["replay_driver"] = sys.modules["__main__"]  # by that name `archive` finds `keep`
        to, kind, checkpoint = plan["to"], plan["target"], plan["checkpoint"]
        archive.run(spark, where, to, kind, schema="none", enrich_with="replay_driver:keep", checkpoint=checkpoint)
        return
    rows = spark.readStream.format("kmq").options(**where).option("includeOrigin", "true").load()
    found = keep(rows)
    beside = [name for name in found.columns if name.startswith("origin_")]
    found = found.select("key", "value", *beside)
    sink = found.writeStream.format("kmq").option("kmq.producers", plan["to"]).option("topic", "to")
    sink = sink.option("path", plan["compare"]).option("kmq.replay", plan["replay"])
    streams.run(sink.option("checkpointLocation", plan["checkpoint"]))


if __name__ == "__main__":
    main()
