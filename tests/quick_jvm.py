"""Write an archive of classes for the JVMs of the tests: python tests/quick_jvm.py ARCHIVE

Most of those JVMs live for seconds, and each loads some 12,000 classes of Spark. With the archive Java maps them, parsed
and verified (application class-data sharing). A JVM starts as before where the archive is missing, or of another Java
or Spark. `scripts/test` hands it to all JVMs that spark-submit starts.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from made_data import write_data

from kmq.errors import ConfigError
from kmq.spark.sessions import find_java, session


def use_spark(scratch: Path, options: str) -> None:
    """Load the classes of reading a log, of SQL, Parquet and a stream."""
    data = write_data(scratch / "data", [b"orders.new|0|%d|%d" % (number, number) for number in range(100)])
    spark = session("local[2]", "classes", {"spark.driver.extraJavaOptions": options})
    source = {"path": data, "subscribe": "orders", "startingOffsets": "earliest"}
    rows = spark.read.format("kmq").options(**source).load()
    rows.createOrReplaceTempView("orders")
    counted = spark.sql("select id, count(*) as n, max(seq) as last from orders where seq > 10 group by id order by id")
    counted.write.parquet(f"{scratch}/parquet")
    assert spark.read.parquet(f"{scratch}/parquet").count() == 90
    stream = spark.readStream.format("kmq").options(**source).load()
    query = stream.writeStream.format("parquet").option("path", f"{scratch}/stream")
    query.option("checkpointLocation", f"{scratch}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def main(archive: Path) -> int:
    from pyspark import SparkContext

    try:
        find_java()
    except ConfigError as error:
        print(f"quick_jvm: {error}", file=sys.stderr)
        return 0
    made = archive.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as scratch:
        use_spark(Path(scratch), f"-XX:ArchiveClassesAtExit={made} -Xlog:disable -Xlog:all=error:stderr")
        gateway: Any = SparkContext._gateway
        jvm = gateway.proc
        jvm.stdin.close()  # with it the JVM ends, and writes the archive
        jvm.wait()
    made.rename(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
