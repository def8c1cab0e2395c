"""What a session sets up beside Spark, and leaves behind: nothing."""

import subprocess
import sys
from pathlib import Path

from made_data import write_data

STREAM = """
import os, sys
from kmq.spark.sessions import session
spark = session("local[2]", "test")
place = spark.conf.get("spark.python.unix.domain.socket.dir")
rows = spark.readStream.format("kmq").option("path", sys.argv[1]).option("subscribe", "t").option("startingOffsets", "earliest")
query = rows.load().writeStream.format("noop").option("checkpointLocation", sys.argv[2]).start()
query.processAllAvailable()
print(place, oct(os.stat(place).st_mode & 0o777), len(os.listdir(place)) > 0, query.lastProgress.numInputRows)
query.stop()
spark.stop()
"""


def test_workers_use_private_unix_sockets_that_are_gone_at_the_end(tmp_path):
    data = write_data(tmp_path / "data", [b"t|0|%d|x" % n for n in range(10)], {"t": 1})
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(data), str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    place, mode, is_used, rows = done.stdout.split()
    assert (mode, is_used, rows) == ("0o700", "True", "10")
    assert not Path(place).exists()
    assert done.stderr == ""


SIMPLE = """
import sys
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from kmq.spark.sessions import session

class Reader(SimpleDataSourceStreamReader):
    def initialOffset(self):
        return {"at": 0, "loaded": "pyarrow" in sys.modules}
    def read(self, start):
        rows = [(n, str(start["loaded"])) for n in range(start["at"], 3)]
        return iter(rows), {"at": 3, "loaded": start["loaded"]}
    def readBetweenOffsets(self, start, end):
        return iter([(n, str(start["loaded"])) for n in range(start["at"], end["at"])])

class Source(DataSource):
    @classmethod
    def name(cls):
        return "simple"
    def schema(self):
        return "n int, loaded string"
    def simpleStreamReader(self, schema):
        return Reader()

spark = session("local[2]", "test")
spark.dataSource.register(Source)
rows = []
query = spark.readStream.format("simple").load().writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
query = query.option("checkpointLocation", sys.argv[1]).start()
query.processAllAvailable()
print([tuple(row) for row in rows])
query.stop()
spark.stop()
"""


def test_a_planner_loads_arrow_when_its_source_reads_rows_and_not_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SIMPLE, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(0, 'False'), (1, 'False'), (2, 'False')]", done.stderr
