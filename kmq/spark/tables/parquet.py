"""A table of Parquet files in directories named after the partitions' values; small files are merged.

Invariant   Every file under the table's directory belongs to a committed batch, or replaces such files with the same
            rows.
Merging     A directory with many small files is rewritten to .kmq/merging/. One system call (renameat2,
            RENAME_EXCHANGE) exchanges the two directories, so that readers list either the old or the new one. A reader
            that had listed the old names gets an error, never a wrong result. Therefore, while a stream runs, only
            directories that the last batch did not write to are merged.
Crash       A kill leaves one of the two directories in merging/. The next start deletes it, and the other has the same
            rows.
Not covered Files stay small on file systems that cannot exchange directories (NFS), in object stores, and in tables
            without partitions.
"""

import json
import os
import shutil
from math import ceil
from typing import TYPE_CHECKING, Any

from kmq.files import replace_file, sync_directory, sync_file
from kmq.spark.pinned import pinned
from kmq.spark.tables import base, checks, disk
from kmq.spark.tables.base import Table
from kmq.spark.tables.bound import Offsets
from kmq.spark.tables.places import S3

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


_LAST = "_kmq/batch.json"  # of a table in an object store: number and offsets of the last batch


class Parquet(Table):
    """A table of Parquet files; see the module."""

    format = checks.PARQUET

    def known_columns(self) -> dict[str, str] | None:
        known = disk.read(f"{self.state}/columns.json")
        if not known:
            return None
        found = json.loads(known)
        checks.same_partitions(self.path, found["partition_by"], self.partition_by)
        types: dict[str, str] = found["columns"]
        return types

    def create(self, schema: "pa.Schema") -> None:
        about = {"columns": self._describe(schema), "partition_by": self.partition_by}
        replace_file(f"{self.state}/columns.json", json.dumps(about, indent=1).encode())

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        note = self.place.note(_LAST) if isinstance(self.place, S3) else {}
        last = int(note.get("batch", -1))
        return last, note.get("offsets") if last == batch_id else None

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        if isinstance(self.place, S3):  # else the files lie beside the state, and are restored with it
            self.place.replace(_LAST, json.dumps({"batch": batch_id, "offsets": offsets}).encode())

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        merged = 0
        if isinstance(self.place, S3) or not self.partition_by or not disk.can_exchange(self.state):
            return merged
        for directory, files in disk.directories(self.path).items():
            if directory and (all or directory not in self._written):
                small = [name for name, size in files.items() if size < base.TARGET_BYTES // 2]
                if len(small) >= base.MERGE_FILES:
                    merged += self._merge(spark, directory, small, files)
        return merged

    def _merge(self, spark: "SparkSession", directory: str, small: list[str], files: dict[str, int]) -> int:
        live, made = f"{self.path}/{directory}", f"{self.merging}/rows"
        shutil.rmtree(self.merging, ignore_errors=True)
        # Without mergeSchema Spark takes the schema of one file, and a column that only later files have is lost.
        rows = spark.read.option("mergeSchema", "true").parquet(*(f"{live}/{name}" for name in small))
        few = rows.coalesce(ceil(sum(files[name] for name in small) / base.TARGET_BYTES))
        with pinned(spark):
            base.writer(few).parquet(made)
        stem = max(small).removesuffix(".parquet").split("+")[0]  # of the newest file: no earlier merge used it
        new = f"{self.merging}/directory"
        os.mkdir(new)
        for number, name in enumerate(disk.parquet_files(made)):
            sync_file(f"{made}/{name}")
            os.rename(f"{made}/{name}", f"{new}/{stem}+{number}.parquet")
        for name in files.keys() - set(small):
            os.link(f"{live}/{name}", f"{new}/{name}")
        sync_directory(new)
        disk.exchange(new, live)
        sync_directory(os.path.dirname(live))
        sync_directory(self.merging)
        shutil.rmtree(self.merging)
        return len(small)
