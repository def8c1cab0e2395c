"""The data source format("kmq") as Spark sees it: reads and writes topics, and reads the WAL, in batches and streams.

    spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load()
    brokers = {"kmq.bootstrap.servers": "a:8082,b:8082", "subscribePattern": "orders.*"}
    spark.readStream.format("kmq").options(**brokers).load()

Writing     See sink/sink.py.
Options     See source/options.py.
Columns     See source/columns.py. Spark prunes no columns of Python sources. Give a schema with the columns that you
            need: only these are built.

Invariant   A task is a range of offsets of one partition, or several ranges of one broker. Reading it again always
            gives the same rows, because records never change their offset and only compaction and retention remove
            records. If records that were to be read are gone, the query stops with an error that names them, or skips
            them with failOnDataLoss=false. Damage always stops the query.
Crash       All state is in Spark's checkpoint: the end offsets of each batch are written there before it is read. After
            a kill the last batch is read again, as the same tasks with the same rows in the same order.
Where       Planning runs in a Python process of the driver, reading in Python processes of the executors. They share
            only what is pickled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.spark import failures
from kmq.spark.connections import SECRETS
from kmq.spark.source import columns
from kmq.spark.source.batch_reader import BatchReader, PushdownReader
from kmq.spark.source.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE_PROPERTIES = {"location", "provider", "owner", "external", "is_managed_location"}  # added by CREATE TABLE
NO_OPTIONS = (
    'format("kmq") got no options: it needs `path` or `kmq.bootstrap.servers`, and `subscribe`. In SQL: CREATE TABLE'
    " does not hand its options to Python data sources; use CREATE TEMPORARY VIEW … USING kmq OPTIONS (path '…',"
    " subscribe '…'), or SELECT … FROM table WITH (path '…', subscribe '…')"
)


class KmqDataSource(DataSource):
    """Implement Spark's interface of a data source; see the module."""

    cores = 0  # cores of the session, set by `source_for`: a planner has no other way to know; 0: unknown

    @classmethod
    def name(cls) -> str:
        return "kmq"

    def _given(self) -> Mapping[str, str]:
        """Return the options. Raises ConfigError if there are none, or if they are those of a CREATE TABLE.

        Spark passes a table's properties there, and drops its options.
        """
        if not self.options or not _TABLE_PROPERTIES.isdisjoint(map(str.lower, self.options)):
            raise ConfigError(NO_OPTIONS)
        return self.options

    def schema(self) -> str:
        options = ReadOptions(self._given())
        return columns.ddl(options.include_headers, options.include_origin)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._checked(schema)
        options.check_batch()
        return (PushdownReader if options.push_filters else BatchReader)(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._checked(schema)
        options.check_stream()
        failures.require_pyspark(failures.OLDEST_OF_STREAMS, "a stream of topics")
        from kmq.spark.source.stream_reader import StreamReader

        return StreamReader(schema, options)

    def _checked(self, schema: StructType) -> ReadOptions:
        options = ReadOptions(self._given())
        options.check_schema(schema.fieldNames())
        options.cores = self.cores
        return options

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink.sink import KmqWriter

        return KmqWriter(schema, self._given(), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink.sink import KmqStreamWriter

        return KmqStreamWriter(schema, self._given(), overwrite)


def source_for(cores: int) -> type[KmqDataSource]:
    """Return the source for a session with this many cores.

    Spark's processes receive the class with its attribute `cores`: a class made in a function is pickled by value, not
    by name.
    """

    class SessionSource(KmqDataSource):
        pass

    SessionSource.cores = cores
    return SessionSource


def register(spark: "SparkSession") -> None:
    """Make format("kmq") known to a session; see kmq.spark.register."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")  # for the option pushFilters
    # Spark's default pattern (spark.redaction.regex) covers both secrets, but a user's own pattern may not.
    redacted = spark.conf.get("spark.sql.redaction.options.regex") or ""
    if SECRETS not in redacted:
        spark.conf.set("spark.sql.redaction.options.regex", f"{redacted}|{SECRETS}" if redacted else SECRETS)
    try:
        cores = spark.sparkContext.defaultParallelism
    except AttributeError:  # Spark Connect does not expose it
        cores = 0
    spark.dataSource.register(source_for(cores))
