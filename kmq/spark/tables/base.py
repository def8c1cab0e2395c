"""What tables of every format share: one writer, and batches that are staged, sealed, published and committed.

Invariant, Crash: see the package. A format adds how files in their places become part of the table (_record), the
columns of the table (known_columns, create), and how small files are merged (merge).
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kmq.files import FULL
from kmq.links.ownership import FileLock, describe
from kmq.spark.pinned import pinned
from kmq.spark.tables import checks, columns
from kmq.spark.tables.bound import BoundStream, Offsets
from kmq.spark.tables.places import S3, Directory, Place
from kmq.spark.tables.staging import Staging

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

TARGET_BYTES = 128 << 20  # of a merged file; a file below half of this is small
MERGE_FILES = 8  # a directory with at least so many small files is merged


class Table:
    """A table of files; a context that owns it. Subclasses implement the formats."""

    format = ""  # among checks.MARKS

    def __init__(self, path: str, partition_by: Sequence[str], state: str = "") -> None:
        """`state`: the directory of what is kept between two starts, for s3://…; a directory `path` has its own."""
        self.path, self.partition_by = path, list(partition_by)
        self.state = state or f"{path}/.kmq"
        self._option = "--checkpoint" if state else "--to"
        self.place: Place = S3(path) if state else Directory(path)
        self.staging = Staging(self.state)
        self.stream = BoundStream(path, self.state, self.place)
        self.merging = f"{self.state}/merging"
        self._written: set[str] = set()  # directories that the last batch added to
        self._lock = FileLock(f"{self.state}/owner")

    def __enter__(self) -> "Table":
        checks.usable(self._option, self.state)
        self._lock.acquire(f"--to {self.path}", describe("pipeline", self.path))
        try:
            if isinstance(self.place, S3):
                self.place.check()
            checks.format_is(self.format, self.path, self.state, self.place)
            self.staging.discard()
            shutil.rmtree(self.merging, ignore_errors=True)
            if self.staging.is_sealed:
                self._resume()
            self._settle()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        self._lock.release()

    # --- one batch -----------------------------------------------------------------------------------------------

    def add(
        self,
        batch: "DataFrame",
        batch_id: int,
        prepare: "Callable[[DataFrame, str], None]",
        offsets: Offsets | None = None,
        sync: Iterable[str] = (),
    ) -> int | None:
        """Add a batch of a stream; return its number of rows, or None if it was added before.

        `prepare(batch, query)`: stages the batch; `query`: id of the stream. `offsets`: where the batch ends, from the
        stream's checkpoint; None if that cannot be read. `sync`: see commit. Raises ConfigError if the table belongs to
        another stream, or took other records under this number; RetryError if the disk is full.
        """
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
        self.stream.bind(query, batch_id)
        if self.has(batch_id, offsets):
            return None
        try:
            prepare(batch, query)
            return self.commit(batch_id, offsets, sync)
        except OSError as err:
            if err.errno not in FULL:
                raise
            raise checks.explained("--to", self.path, err) from err

    def has(self, batch_id: int, offsets: Offsets | None = None) -> bool:
        """Return True if the batch was added before. Raises ConfigError if another one was, with this number."""
        recorded, recorded_offsets = self._recorded(batch_id)
        last = max(self.stream.last_batch, recorded)
        if batch_id > last:
            return False
        self.stream.check_same(batch_id, offsets, self.stream.offsets(batch_id) or recorded_offsets, last)
        return True

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        """Return the number of the last batch of the stream in the format's own commits, -1 if there is none, and the
        offsets of `batch_id` there, if it has them. The state of a table may have been restored without its table.
        """
        return -1, None

    def expect(self, rows: "DataFrame") -> bool:
        """Raise ConfigError if rows with these columns cannot be added to the table.

        Returns True if the table exists.
        """
        checks.partition_by(self.partition_by, rows.columns)
        found = self.known_columns()
        if found is not None:
            columns.compare(self.path, found, self._describe(columns.arrow_schema(rows)))
        return found is not None

    def known_columns(self) -> dict[str, str] | None:
        """Return column name → type of the table; None if it does not exist yet.

        Raises ConfigError if the table is partitioned by other columns.
        """
        raise NotImplementedError

    def _describe(self, schema: "pa.Schema") -> dict[str, str]:
        return columns.described(schema)

    def create(self, schema: "pa.Schema") -> None:
        """Create the table with these columns."""
        raise NotImplementedError

    def stage(self, rows: "DataFrame") -> None:
        """Write the rows of a batch where no reader sees them yet; create the table if it does not exist."""
        if not self.expect(rows):
            self.create(columns.arrow_schema(rows))
        self._write(rows, self.partition_by)

    def _write(self, rows: "DataFrame", partition_by: list[str]) -> None:
        attempt = self.staging.begin()
        try:
            with pinned(rows.sparkSession):
                writer(rows).partitionBy(*partition_by).parquet(attempt)
        except Exception as err:  # from the JVM: only the text names the errno
            if os.strerror(errno.ENOSPC) in str(err):
                raise checks.explained("--to", self.path, OSError(errno.ENOSPC, "")) from err
            raise

    def _place(self, directory: str) -> str:
        """Return the table's directory for the files of a directory that Spark wrote."""
        return directory

    def commit(self, batch_id: int, offsets: Offsets | None = None, sync: Iterable[str] = ()) -> int:
        """Add the staged batch; return its number of rows. Files named in `sync` are synced before it is sealed."""
        files = self.staging.seal(batch_id, offsets, self._place, sync)
        self._written = {os.path.dirname(file["to"]) for file in files}
        self._publish()
        return sum(file["rows"] for file in files)

    def _publish(self) -> None:
        """Move the files of the sealed batch to their places, and commit it. May be repeated until it succeeds."""
        batch_id, offsets, files = self.staging.manifest()
        self.place.adopt(self.staging.sealed, files)
        self._record(batch_id, offsets, files)
        self.stream.committed(batch_id, offsets)
        self.staging.finish()

    def _resume(self) -> None:
        """Finish a sealed batch whose writer died. Raises ConfigError if the table took another one meanwhile."""
        batch_id, offsets, _ = self.staging.manifest()
        if not self.has(batch_id, offsets):
            self._publish()
            return
        self.stream.committed(batch_id, offsets)
        self.staging.finish()

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        """Make files that are in their places part of the table, where the format needs a commit of its own.

        Raises RetryError if the format's last commit has this batch, or a later one.
        """

    def _settle(self) -> None:
        """Finish what a writer that died after its commit has left undone."""

    # --- small files ---------------------------------------------------------------------------------------------

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        """Merge small files; return how many were replaced. `all`: also in directories that the last batch wrote to."""
        raise NotImplementedError


def writer(rows: "DataFrame") -> "DataFrameWriter":
    """Return Spark's writer for the files of a table; to be used where the confs are pinned."""
    return rows.write.option("compression", "zstd")
