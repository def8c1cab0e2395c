"""format("kmq") as Spark sees it: batches and streams of topics and of the WAL, read and written.

    spark.read.format("kmq").option("path", "data").option("subscribe", "orders").load()
    spark.readStream.format("kmq").option("kmq.bootstrap.servers", "a:8082,b:8082").option("subscribePattern", "orders.*").load()

Writing     sink/sink.py.
Options     source/options.py. Columns: source/columns.py; a schema of yours is the projection. Spark prunes no columns of
            Python sources, so give one: columns that are not asked for are not made.

Invariant   A task is a range of offsets of one partition of one broker, and reading it gives the same rows each time: records
            never change their offset, and only compaction and retention take any away. Where something that was to be read is
            gone, the query stops with its name, or skips it with failOnDataLoss=false. Damage always stops it.
Crash       All state is in Spark's checkpoint: the offsets up to which each batch goes are written there before it is read.
            After a kill the last batch is read again, as the same tasks with the same rows in the same order.
Where       Planning runs in a Python process of the driver, reading in those of the executors: nothing is shared but what is
            pickled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.spark.connections import SECRETS
from kmq.spark.source import columns
from kmq.spark.source.batch_reader import BatchReader, PushdownReader
from kmq.spark.source.options import Options
from kmq.spark.source.stream_reader import StreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_TABLES = {"location", "provider", "owner", "external", "is_managed_location"}  # added by CREATE TABLE
NO_OPTIONS = (
    'format("kmq") got no options: it needs `path` or `kmq.bootstrap.servers`, and `subscribe`. In SQL: CREATE TABLE does not'
    " hand its options to Python data sources; use CREATE TEMPORARY VIEW … USING kmq OPTIONS (path '…', subscribe '…'), or"
    " SELECT … FROM table WITH (path '…', subscribe '…')"
)


class KmqDataSource(DataSource):
    """See the module."""

    cores = 0  # of the session, where `register` has said it: a planner has no other way to know

    @classmethod
    def name(cls) -> str:
        return "kmq"

    def _given(self) -> Mapping[str, str]:
        """The options; ConfigError says what to do in SQL where none came, and where CREATE TABLE asks for the schema."""
        if not self.options or not _OF_TABLES.isdisjoint(map(str.lower, self.options)):
            raise ConfigError(NO_OPTIONS)
        return self.options

    def schema(self) -> str:
        options = Options(self._given())
        return columns.ddl(options.include_headers, options.include_origin)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._checked(schema)
        options.check_batch()
        return BatchReader(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._checked(schema)
        options.check_stream()
        return StreamReader(schema, options)

    def _checked(self, schema: StructType) -> Options:
        options = Options(self._given())
        options.check_schema(schema.fieldNames())
        options.cores = self.cores
        return options

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink.sink import KmqWriter

        return KmqWriter(schema, self._given(), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from kmq.spark.sink.sink import KmqStreamWriter

        return KmqStreamWriter(schema, self._given(), overwrite)


class PushdownSource(KmqDataSource):
    """For sessions whose conf has Spark push filters down to Python sources: elsewhere a reader that takes any is refused."""

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._checked(schema)
        options.check_batch()
        return PushdownReader(schema, options)


def source_for(cores: int) -> type[PushdownSource]:
    """The source for a session of so many cores. A class made here is sent to Spark's processes as it is, not by its name."""

    class SessionSource(PushdownSource):
        pass

    SessionSource.cores = cores
    return SessionSource


def register(spark: "SparkSession") -> None:
    """See kmq.spark.register."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    # Spark's own pattern (spark.redaction.regex) covers both, but a pattern of the user's may not.
    redacted = spark.conf.get("spark.sql.redaction.options.regex") or ""
    if SECRETS not in redacted:
        spark.conf.set("spark.sql.redaction.options.regex", f"{redacted}|{SECRETS}" if redacted else SECRETS)
    try:
        cores = spark.sparkContext.defaultParallelism
    except AttributeError:  # Spark Connect does not tell
        cores = 0
    spark.dataSource.register(source_for(cores))
