"""Tables of Delta and of plain Parquet: Spark's tasks write the Parquet files, and a batch becomes part of the table.

Delta       One entry of the table's log names the files of a batch. It always holds the stream's id and the batch's
            number, as an application transaction of Delta, and its offsets. A batch is never entered unless its number
            is above the last one of its stream.
            optimize merges small files. vacuum deletes files that have not been part of the table for a week: at the
            end of a run, and every hour.
  Crash     before the entry    no entry names the files in the table; the next start enters the sealed batch
            after the entry     the log has the batch's number, and nothing is entered again
            In an object store the entry is stored only if its number is still free (deltalake does that).

Parquet     Files in directories named after the partitions' values. Every file under the table's directory always
            belongs to a committed batch, or replaces such files with the same rows.
            A directory with many small files is rewritten to .kmq/merging/. One system call (renameat2,
            RENAME_EXCHANGE) exchanges the two directories, so that readers list either the old or the new one. A reader
            that had listed the old names gets an error, never a wrong result. Therefore, while a stream runs, only
            directories that the last batch did not write to are merged.
  Crash     A kill leaves one of the two directories in merging/. The next start deletes it, and the other has the same
            rows.
  Not covered Files stay small on file systems that cannot exchange directories (NFS), in object stores, and in tables
            without partitions.
"""

import json
import os
import re
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

from kmq.errors import ConfigError, RetryError
from kmq.files import replace_file, sync_directory
from kmq.spark.tables import base, stores
from kmq.spark.tables.base import Offsets, Table, TableContent
from kmq.spark.tables.stores import S3, TableDirectory, endpoint

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession


# --- Delta -----------------------------------------------------------------------------------------------------------

_QUERY, _BATCH, _OFFSETS = "kmq.query", "kmq.batch", "kmq.offsets"  # of an entry's commitInfo
VACUUM_EVERY_S = 3600.0
VACUUM_HOURS = 7 * 24  # how long readers may keep using a version that is not the newest


class Delta(Table):
    """A Delta table; see the module. Only the files' names pass through the driver, not their content."""

    format = base.DELTA
    _vacuumed = 0.0

    def table(self) -> "DeltaTable":
        from deltalake import DeltaTable

        return DeltaTable(self.path, storage_options=self._options)

    @property
    def _options(self) -> dict[str, str] | None:
        """Return the storage options that deltalake does not read from the environment itself."""
        return {"AWS_ALLOW_HTTP": "true"} if isinstance(self.store, S3) and endpoint().startswith("http:") else None

    def known_columns(self) -> dict[str, str] | None:
        import pyarrow as pa

        if not self.store.has("_delta_log"):
            return None
        table = self.table()
        base.same_partitions(self.path, table.metadata().partition_columns, self.partition_by)
        return self._describe(pa.schema(table.schema()))

    def create(self, schema: "pa.Schema") -> None:
        from deltalake import DeltaTable

        DeltaTable.create(self.path, schema, partition_by=self.partition_by, storage_options=self._options)

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        if not self.store.has("_delta_log"):
            return -1, None
        table = self.table()
        last = table.transaction_version(self.stream.query)
        if last is None or batch_id > last:
            return -1 if last is None else last, None
        return last, self._entered(table, batch_id)

    def _entered(self, table: "DeltaTable", batch_id: int) -> Offsets | None:
        """Return the offsets of a batch from its entry in the table's log."""
        wanted = {_QUERY: self.stream.query, _BATCH: str(batch_id)}.items()
        entry: dict[str, Any] = next((entry for entry in table.history() if wanted <= entry.items()), {})
        offsets: Offsets | None = json.loads(entry.get(_OFFSETS, "null"))
        return offsets

    def snapshot(self) -> TableContent:
        import pyarrow as pa

        table = self.table()
        if (last := table.transaction_version(self.stream.query)) is None:
            raise ConfigError(f"{self.path}: its log has no batch of its archive")
        offsets = self.stream.offsets(last) or self._entered(table, last)
        added = table.get_add_actions(flatten=True).to_struct_array().to_pylist()
        files = sorted(f"{self.path}/{unquote(file['path'])}" for file in added)
        columns, names = self._describe(pa.schema(table.schema())), table.metadata().partition_columns
        return TableContent(self.path, self.format, offsets, self.stream.offsets(0), files, columns, names)

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        table, query = self.table(), self.stream.query
        version = table.transaction_version(query)
        if version is not None and batch_id <= version:
            raise RetryError(f"--to {self.path}: another writer has added batch {batch_id} meanwhile")
        now = int(time.time() * 1000)
        table.create_write_transaction(
            [
                AddAction(
                    file["to"],
                    file["size"],
                    stores.partition_values(file["to"]),
                    now,
                    True,
                    json.dumps({"numRecords": file["rows"]}),
                )
                for file in files
            ],
            mode="append",
            schema=table.schema(),
            partition_by=self.partition_by,
            commit_properties=CommitProperties(
                {_QUERY: query, _BATCH: str(batch_id), _OFFSETS: json.dumps(offsets)},
                app_transactions=[Transaction(query, batch_id)],
            ),
        )
        if isinstance(self.store, TableDirectory):
            sync_directory(f"{self.path}/_delta_log")

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        table = self.table()
        if all or time.monotonic() - self._vacuumed > VACUUM_EVERY_S:  # rarely, because it lists the whole table
            table.vacuum(VACUUM_HOURS, dry_run=False)
            self._vacuumed = time.monotonic()
        counts: dict[str, int] = {}
        for file in table.get_add_actions(flatten=True).to_struct_array().to_pylist():
            if file["size_bytes"] < base.TARGET_BYTES // 2:
                directory = os.path.dirname(unquote(file["path"]))
                counts[directory] = counts.get(directory, 0) + 1
        if not any(n >= base.MERGE_FILES and (all or name not in self._written) for name, n in counts.items()):
            return 0
        return int(table.optimize.compact(target_size=base.TARGET_BYTES)["numFilesRemoved"])


# --- Parquet ---------------------------------------------------------------------------------------------------------

_LAST = "_kmq/batch.json"  # in an object store: number and offsets of the table's last batch
_NAME = re.compile(
    r"(?:^|/)(?P<batch>\d{10})-\d+(?P<merged>(?:\+\d+)?)\.parquet$"
)  # merged: of this batch and older ones
_LOOKS = 10  # most attempts to list a table whose files are being merged


class Parquet(Table):
    """A table of Parquet files; see the module."""

    format = base.PARQUET

    def known_columns(self) -> dict[str, str] | None:
        text = stores.read(f"{self.state}/columns.json")
        if not text:
            return None
        found = json.loads(text)
        base.same_partitions(self.path, found["partition_by"], self.partition_by)
        types: dict[str, str] = found["columns"]
        return types

    def snapshot(self) -> TableContent:
        about = json.loads(stores.read(f"{self.state}/columns.json"))
        for _ in range(_LOOKS):
            last = self.stream.last_batch
            offsets = self.stream.offsets(last)
            found = [(name, _NAME.search(name)) for name in stores.live_files(self.path)]
            newer = {name: match["merged"] for name, match in found if match and int(match["batch"]) > last}
            if not any(newer.values()):
                break
            # Rows of a later batch were merged with older ones. That batch is committed, so `last` has moved.
        else:
            raise RetryError(f"{self.path}: its files are merged again and again; read it again")
        files = [f"{self.path}/{name}" for name, _ in found if name not in newer]
        first, columns = self.stream.offsets(0), about["columns"]
        return TableContent(self.path, self.format, offsets, first, files, columns, about["partition_by"])

    def create(self, schema: "pa.Schema") -> None:
        about = {"columns": self._describe(schema), "partition_by": self.partition_by}
        replace_file(f"{self.state}/columns.json", json.dumps(about, indent=1).encode())

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        note = self.store.note(_LAST) if isinstance(self.store, S3) else {}
        last = int(note.get("batch", -1))
        return last, note.get("offsets") if last == batch_id else None

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        if isinstance(self.store, S3):  # else the files lie beside the state, and are restored with it
            self.store.replace(_LAST, json.dumps({"batch": batch_id, "offsets": offsets}).encode())

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        merged = 0
        if isinstance(self.store, S3) or not self.partition_by or not stores.can_exchange(self.state):
            return merged
        for directory, files in stores.directories(self.path).items():
            if directory and (all or directory not in self._written):
                small = [name for name, size in files.items() if size < base.TARGET_BYTES // 2]
                if len(small) >= base.MERGE_FILES:
                    merged += self._merge(spark, directory, small, files)
        return merged

    def _merge(self, spark: "SparkSession", directory: str, small: list[str], files: dict[str, int]) -> int:
        live, made = f"{self.path}/{directory}", f"{self.merging}/rows"
        shutil.rmtree(self.merging, ignore_errors=True)
        shares: list[list[str]] = []
        nbytes = 0
        for name in small:
            if nbytes >= len(shares) * base.TARGET_BYTES:
                shares.append([])
            shares[-1].append(f"{live}/{name}")
            nbytes += files[name]
        # By Python workers: the JVM takes several times the CPU to decode and encode the same rows.
        written = spark.sparkContext.parallelize(shares, len(shares)).flatMap(partial(_merged, made)).collect()
        # Named after the newest file, with numbers that no earlier merge used: a reader may have listed its files.
        stem = max(small).removesuffix(".parquet").split("+")[0]
        used = [int(name.removesuffix(".parquet").split("+")[1]) for name in files if name.startswith(f"{stem}+")]
        new = f"{self.merging}/directory"
        os.makedirs(new)
        for number, path in enumerate(written, max(used, default=-1) + 1):
            os.rename(path, f"{new}/{stem}+{number}.parquet")
        for name in files.keys() - set(small):
            os.link(f"{live}/{name}", f"{new}/{name}")
        sync_directory(new)
        stores.exchange(new, live)
        sync_directory(os.path.dirname(live))
        sync_directory(self.merging)
        shutil.rmtree(self.merging, ignore_errors=True)  # an attempt that is being killed may still write there
        return len(small)


def _merged(directory: str, sources: list[str]) -> list[str]:
    """Merge the files of a task into one, below a directory; return its path. Without rows there is no file.

    Each attempt has a directory of its own: Spark may run a task twice at a time, and kill one of the two.
    """
    # Not at the top, because it imports pyspark and pyarrow.
    from kmq.spark.tables import parquet_files

    to = f"{directory}/{uuid4().hex}"
    parquet_files.merge(sources, to)
    return [f"{to}/{name}" for name in stores.parquet_files(to)]
