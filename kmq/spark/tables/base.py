"""What tables of every format have in common: one writer, and batches that are staged, sealed, given their places, committed.

Invariant, Crash: see the package. A format says what beside the files' being there makes them part of the table (_record), which
columns it has (known_columns, create), and how small files become few (merge).
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kmq.errors import ConfigError
from kmq.links.ownership import FileLock, describe
from kmq.log.disk import FULL, replace_file, sync_directory, sync_file
from kmq.spark.pinned import pinned
from kmq.spark.tables import checks, columns, disk
from kmq.spark.tables.places import S3, Directory, Place

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

TARGET_BYTES = 128 << 20  # of a merged file; smaller than half of it is small
MERGE_FILES = 8  # so many small files in one directory are merged
PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
MARKS = {PARQUET: "", DELTA: "_delta_log", ICEBERG: "metadata"}  # format → the directory that only its tables have


class Table:
    """Files in a place, and the ways to add to them."""

    format = ""  # among MARKS

    def __init__(self, path: str, partition_by: Sequence[str], state: str = "") -> None:
        """`state`: the directory of what is between two starts; for s3://…, which has none of its own."""
        self.path, self.partition_by = path, list(partition_by)
        self.state = state or f"{path}/.kmq"
        self._option = "--checkpoint" if state else "--to"
        self.place: Place = S3(path) if state else Directory(path)
        self._making, self._sealed, self._merging = (f"{self.state}/{name}" for name in ("making", "sealed", "merging"))
        self._attempt = ""  # directory of the batch that is being written
        self._written: set[str] = set()  # directories that the last batch added to
        self._lock = FileLock(f"{self.state}/owner")

    def __enter__(self) -> "Table":
        checks.usable(self._option, self.state)
        self._lock.acquire(f"--to {self.path}", describe("pipeline", self.path))
        try:
            if isinstance(self.place, S3):
                self.place.check()
            self._check_format()
            for left in (self._making, self._merging):
                shutil.rmtree(left, ignore_errors=True)
            if os.path.isdir(self._sealed):
                self._publish()
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
        sync: Iterable[str] = (),
    ) -> int | None:
        """Add a batch of a stream, in its turn: how many rows that is, None where it was added before. See follow, commit."""
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
        self.bind(query, batch_id)
        if self.has(batch_id):
            return None
        try:
            prepare(batch, query)
            return self.commit(batch_id, sync)
        except OSError as err:
            if err.errno not in FULL:
                raise
            raise checks.explained("--to", self.path, err) from err

    def bind(self, query: str, batch_id: int) -> None:
        """Say which stream the batches are of. Raises ConfigError where the table is another one's."""
        known = disk.read(f"{self.state}/query")
        if not known and batch_id == 0:
            self._own(query)
            replace_file(f"{self.state}/query", query.encode())
        elif known != query:
            was = "of another checkpoint" if known else "not this checkpoint's: it begins in the middle"
            raise ConfigError(f"--to {self.path}: its rows are {was}; give each table a checkpoint of its own")

    def _own(self, query: str) -> None:
        """In an object store nothing but a note keeps two checkpoints apart."""
        if isinstance(self.place, S3):
            if (owner := self.place.owner()) and owner != query:
                raise ConfigError(f"--to {self.path}: its rows are of another checkpoint; name another --to")
            self.place.own(query)

    def has(self, batch_id: int) -> bool:
        """Whether the batch was added before."""
        return batch_id <= int(disk.read(f"{self.state}/batch") or -1)

    def expect(self, rows: "DataFrame") -> bool:
        """Raise ConfigError where such rows cannot be added: their columns are not those of the table, or of partition_by.

        Returns whether there is a table yet.
        """
        checks.partition_by(self.partition_by, rows.columns)
        found = self.known_columns()
        if found is not None:
            columns.compare(self.path, found, self._describe(columns.arrow_schema(rows)))
        return found is not None

    def known_columns(self) -> dict[str, str] | None:
        """The table's, by name; None where it has none yet. Raises ConfigError where it has other partitions."""
        raise NotImplementedError

    def _describe(self, schema: "pa.Schema") -> dict[str, str]:
        return columns.described(schema)

    def create(self, schema: "pa.Schema") -> None:
        """Make the table, with these columns."""
        raise NotImplementedError

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError where a stream with this checkpoint cannot be the table's."""
        checks.checkpoint(path, self.path, disk.read(f"{self.state}/query"))

    def stage(self, rows: "DataFrame") -> None:
        """Write the rows of a batch; nobody sees them yet."""
        if not self.expect(rows):
            self.create(columns.arrow_schema(rows))
        self._write(rows, self.partition_by)

    def _write(self, rows: "DataFrame", partition_by: list[str]) -> None:
        self._attempt = f"{self._making}/{uuid4().hex[:12]}"
        try:
            with pinned(rows.sparkSession):
                writer(rows).partitionBy(*partition_by).parquet(self._attempt)
        except Exception as err:  # of the JVM, with the errno as words
            if os.strerror(errno.ENOSPC) in str(err):
                raise checks.explained("--to", self.path, OSError(errno.ENOSPC, "")) from err
            raise

    def _place(self, directory: str) -> str:
        """Where in the table the files of a directory that Spark wrote belong."""
        return directory

    def commit(self, batch_id: int, sync: Iterable[str] = ()) -> int:
        """Add what was staged, and return how many rows that is. Files named in `sync` are to be on disk before."""
        files = [
            disk.describe(self._attempt, name, self._place(os.path.dirname(name)), f"{batch_id:010}-{number:04}")
            for number, name in enumerate(disk.parquet_files(self._attempt))
        ]
        for path in sync:
            sync_file(path)
        manifest = {"batch": batch_id, "files": [file for file in files if file["rows"]]}
        replace_file(f"{self._attempt}/manifest.json", json.dumps(manifest).encode())
        os.rename(self._attempt, self._sealed)  # the commit point
        sync_directory(self.state)
        self._written = {os.path.dirname(file["to"]) for file in files}
        self._publish()
        return sum(file["rows"] for file in files)

    def _publish(self) -> None:
        """Move the files of the sealed batch to their places; may be repeated until it is through."""
        with open(f"{self._sealed}/manifest.json", "rb") as file:
            manifest = json.load(file)
        self.place.take(self._sealed, manifest["files"])
        self._record(manifest["batch"], manifest["files"])
        replace_file(f"{self.state}/batch", b"%d" % manifest["batch"])
        os.makedirs(self._making, exist_ok=True)
        os.rename(self._sealed, f"{self._making}/done")  # it goes as a whole: nobody finds it half deleted
        shutil.rmtree(self._making)

    def _record(self, batch_id: int, files: list[dict[str, Any]]) -> None:
        """What beside the files' being there makes them part of the table."""

    def _settle(self) -> None:
        """Do what a writer that died behind its commit has left undone."""

    def _check_format(self) -> None:
        """Refuse a directory that holds another kind of table, and a store that cannot be reached."""
        found = next((name for name, mark in MARKS.items() if mark and self.place.has(mark)), "")
        if not found and (os.path.exists(f"{self.state}/batch") or disk.directories(self.path)):
            found = PARQUET
        if found and found != self.format:
            raise ConfigError(f"--to {self.path}: holds a {found} table, not {self.format}; name another --to")

    def _other_partitions(self, names: Sequence[str]) -> ConfigError:
        had, have = (", ".join(each) or "nothing" for each in (names, self.partition_by))
        return ConfigError(f"--to {self.path}: the table is partitioned by {had}, not by {have}; name another --to")

    # --- small files ---------------------------------------------------------------------------------------------

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        """Make few files of many small ones; returns how many went. `all`: also where the last batch added some."""
        raise NotImplementedError


def writer(rows: "DataFrame") -> "DataFrameWriter":
    """How Spark writes the files of a table, where its confs are pinned."""
    return rows.write.option("compression", "zstd")
