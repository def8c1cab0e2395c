"""A Delta table: Spark's tasks write the Parquet files, and one entry of the table's log names the files of a batch.

Invariant   The entry of a batch always holds the stream's id and the batch's number, as an application transaction of
            Delta, and its offsets. A batch is never entered unless its number is above the last one of its stream.
Crash       before the entry    no entry names the files in the table; the next start enters the sealed batch
            after the entry     the log has the batch's number, and nothing is entered again
            In an object store the entry is stored only if its number is still free (deltalake does that).
Merging     optimize merges small files. vacuum deletes files that have not been part of the table for a week: at the
            end of a run, and every hour.
"""

import json
import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kmq.errors import RetryError
from kmq.files import sync_directory
from kmq.spark.tables import base, checks, disk
from kmq.spark.tables.base import Table
from kmq.spark.tables.bound import Offsets
from kmq.spark.tables.places import S3, Directory, endpoint

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_QUERY, _BATCH, _OFFSETS = "kmq.query", "kmq.batch", "kmq.offsets"  # of an entry's commitInfo
VACUUM_EVERY_S = 3600.0
VACUUM_HOURS = 7 * 24  # how long readers may keep using a version that is not the newest


class Delta(Table):
    """A Delta table; see the module. Only the files' names pass through the driver, not their content."""

    format = checks.DELTA
    _vacuumed = 0.0

    def table(self) -> "DeltaTable":
        from deltalake import DeltaTable

        return DeltaTable(self.path, storage_options=self._options)

    @property
    def _options(self) -> dict[str, str] | None:
        """Storage options that deltalake does not take from the environment itself."""
        return {"AWS_ALLOW_HTTP": "true"} if isinstance(self.place, S3) and endpoint().startswith("http:") else None

    def known_columns(self) -> dict[str, str] | None:
        import pyarrow as pa

        if not self.place.has("_delta_log"):
            return None
        table = self.table()
        checks.same_partitions(self.path, table.metadata().partition_columns, self.partition_by)
        return self._describe(pa.schema(table.schema()))

    def create(self, schema: "pa.Schema") -> None:
        from deltalake import DeltaTable

        DeltaTable.create(self.path, schema, partition_by=self.partition_by, storage_options=self._options)

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        if not self.place.has("_delta_log"):
            return -1, None
        table, query = self.table(), self.stream.query
        last = table.transaction_version(query)
        if last is None or batch_id > last:
            return -1 if last is None else last, None
        wanted = {_QUERY: query, _BATCH: str(batch_id)}.items()
        entry: dict[str, Any] = next((entry for entry in table.history() if wanted <= entry.items()), {})
        return last, json.loads(entry.get(_OFFSETS, "null"))

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
                    disk.partition_values(file["to"]),
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
        if isinstance(self.place, Directory):
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
