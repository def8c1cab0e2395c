"""An Iceberg table: Spark's tasks write the Parquet files, and pyiceberg adds them to the table in one catalog commit.

    open_table("lake/orders", "iceberg", ["topic", "date"])                                # a catalog of its own
    open_table("lake/orders", "iceberg", ["topic", "date"], catalog="prod.sales.orders")   # pyiceberg's catalog "prod"

Catalog     Without a name: SQLite in `.kmq/catalog.db` beside the table, and metadata/version-hint.text for readers
            that accept a directory (pyiceberg's StaticTable, DuckDB). With a name: the catalog that pyiceberg finds
            under it in ~/.pyiceberg.yaml or in PYICEBERG_CATALOG__<NAME>__… (REST, SQL, Hive, Glue).
            name.namespace.table also names the table.
Invariant   The snapshot of a batch and the properties kmq.<query>.batch and .offsets, the number and the end of the
            last batch, always come in the same commit. A batch whose number is not above the property is never
            committed again, even after its snapshot has expired. The snapshot's summary holds kmq.query and kmq.batch
            too, for people.
Crash       before the commit    no snapshot names the files in data/; the next start finds the sealed batch
            during the commit    the catalog changes one pointer (SQLite: one row, in a transaction), so the crash
                                 is one of the other two cases
            after the commit     the next start finds the property, and only writes `batch`
            power                with the catalog of its own, metadata is synced before the pointer changes
Files       Files hold every column, also the partition's, as other Iceberg writers do. Readers find fields by the
            table's name mapping. A directory's name holds the partition's value, from a copy of the column that Spark
            puts there.
Not covered Small files stay small, and files that only expired snapshots named stay on disk; use an engine's
            rewrite_data_files and remove_orphan_files. Snapshots above KEEP_SNAPSHOTS are expired, oldest first,
            because each commit writes the list of all snapshots.
"""

import json
import logging
import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kmq.errors import ConfigError, RetryError, pip_install
from kmq.spark.paths import local_path
from kmq.spark.tables import base, stores
from kmq.spark.tables.base import Offsets, Table, TableContent
from kmq.spark.tables.stores import S3, endpoint, region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table as IcebergTable
    from pyspark.sql import DataFrame, SparkSession

KEEP_SNAPSHOTS = 100  # a commit reads and writes the list of all: 1 ms of CPU for each snapshot
EXPIRE = 50  # snapshots above KEEP_SNAPSHOTS that are expired together, because that takes a commit too
_COPY = "of__"  # prefix of the copy of a partition column that names the directory
_MAPPING = "schema.name-mapping.default"  # readers use it because Spark's files have no field ids
_OWN = "kmq"  # the catalog beside the table, and its namespace


class Iceberg(Table):
    """An Iceberg table; see the module."""

    format = base.ICEBERG
    keeps_partitions = True

    def __init__(self, path: str, partition_by: "Sequence[str]", state: str = "", catalog: str = "") -> None:
        super().__init__(path, partition_by, state)
        if not find_spec("pyiceberg") or not find_spec("sqlalchemy"):
            raise ConfigError(f"--format iceberg needs pyiceberg: {pip_install('iceberg')}")
        if set("#?") & set(path):
            raise ConfigError(f"--to {path!r}: must contain no # and no ?, because Iceberg names files by URL")
        self._name, _, name = catalog.partition(".")
        self._identifier = name or f"{_OWN}.{re.sub('[^A-Za-z0-9_]', '_', os.path.basename(path))}"
        self._opened: Catalog | None = None
        # This logger warns of each column without statistics, such as long payloads.
        logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)

    def _release(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        super()._release()

    # --- the catalog -------------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> "Catalog":
        """The catalog that names the table."""
        if self._opened is None:
            self._opened = self._open_catalog()
        return self._opened

    def _open_catalog(self) -> "Catalog":
        from pyiceberg.catalog import load_catalog

        if not self._name:
            uri, io = f"sqlite:///{self.state}/catalog.db", "kmq.spark.tables.synced.SyncedIO"
            store = {}
            if isinstance(self.store, S3):
                io = "pyiceberg.io.pyarrow.PyArrowFileIO"
                store = {"s3.endpoint": endpoint() or None, "s3.region": region() or None}
            return load_catalog(_OWN, type="sql", uri=uri, warehouse=self.store.url, **{"py-io-impl": io}, **store)
        try:
            return load_catalog(self._name)
        except Exception as err:  # from pyiceberg, SQLAlchemy, requests, boto3 or another library of the catalog
            raise ConfigError(
                f"--catalog {self._name}: {err}; describe it in ~/.pyiceberg.yaml"
                f" or in PYICEBERG_CATALOG__{self._name.upper()}__URI"
            ) from err

    def table(self) -> "IcebergTable | None":
        """Return the table as it is now; None before the first batch."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return self.catalog.load_table(self._identifier)
        except NoSuchTableError:
            return None

    def create(self, schema: "pa.Schema") -> None:
        self.catalog.create_namespace_if_not_exists(self._identifier.rpartition(".")[0])
        with self.catalog.create_table_transaction(self._identifier, schema, self.store.url) as made:
            with made.update_spec() as spec:
                for name in self.partition_by:
                    spec.add_identity(name)
            made.set_properties(
                {"commit.manifest-merge.enabled": "true", "write.metadata.delete-after-commit.enabled": "true"}
            )

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        table = self.table()
        if table is None:
            return -1, None
        return self._last_batch(table), self._offsets(table, batch_id)

    def _offsets(self, table: "IcebergTable", batch_id: int) -> Offsets | None:
        # The offsets name their batch, because a release before them leaves the property as it is.
        ends = json.loads(table.properties.get(self._property("offsets"), "{}"))
        return ends["offsets"] if ends.get("batch") == batch_id else None

    def snapshot(self) -> TableContent:
        from pyiceberg.table import StaticTable

        try:
            table = self.table() if self._name else StaticTable.from_metadata(self.path)
        except FileNotFoundError:
            table = None
        if table is None:
            raise ConfigError(f"{self.path}: no Iceberg table is found; name the catalog that it is in")
        tasks = list(table.scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise ConfigError(
                f"{self.path}: rows were deleted by files of deletes, which are not read here; rewrite it"
            )
        files = sorted(local_path(found := task.file.file_path) or found for task in tasks)
        offsets, columns = self._offsets(table, self._last_batch(table)), self._describe(table.schema().as_arrow())
        names = [table.schema().find_column_name(field.source_id) or "" for field in table.spec().fields]
        return TableContent(self.path, self.format, offsets, self.stream.offsets(0), files, columns, names)

    def _last_batch(self, table: "IcebergTable") -> int:
        return int(table.properties.get(self._property("batch"), -1))

    def _property(self, name: str) -> str:
        return f"kmq.{self.stream.query}.{name}"

    def known_columns(self) -> dict[str, str] | None:
        from pyiceberg.transforms import IdentityTransform

        table = self.table()
        if table is None:
            return None
        if (location := local_path(found := table.location().rstrip("/")) or found) != self.path:
            raise ConfigError(
                f"--catalog {self._name}: its table {self._identifier} is at {location}; use that as --to"
            )
        fields = table.spec().fields
        names = [table.schema().find_column_name(field.source_id) for field in fields]
        if names != self.partition_by or not all(isinstance(field.transform, IdentityTransform) for field in fields):
            transforms = [f"{field.transform}({field.name})" for field in fields]
            base.same_partitions(self.path, transforms, self.partition_by)
        return self._describe(table.schema().as_arrow())

    def _describe(self, schema: "pa.Schema") -> dict[str, str]:
        return stores.described(schema, widened=True)

    def _laid_out(self, rows: "DataFrame") -> "tuple[DataFrame, list[str]]":
        from pyspark.sql import functions as F

        copies = {f"{_COPY}{name}": F.col(name) for name in self.partition_by}
        return rows.withColumns(copies), list(copies)

    def _directory_of(self, directory: str) -> str:
        parts = (part.removeprefix(_COPY) for part in directory.split("/") if part)
        return "/".join(["data", *parts])

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        from pyiceberg.exceptions import CommitFailedException

        table = self.table()
        if table is None:
            raise ConfigError(f"--to {self.path}: table {self._identifier} is no longer in the catalog")
        if batch_id <= self._last_batch(table):
            raise RetryError(f"--to {self.path}: another writer has added batch {batch_id} meanwhile")
        properties = {self._property("batch"): str(batch_id)}
        if offsets is not None:
            properties[self._property("offsets")] = json.dumps({"batch": batch_id, "offsets": offsets})
        if _MAPPING not in table.properties:
            properties[_MAPPING] = table.schema().name_mapping.model_dump_json()
        try:
            with table.transaction() as change:
                change.set_properties(properties)
                if files:
                    about = {"kmq.query": self.stream.query, "kmq.batch": str(batch_id)}
                    with change.update_snapshot(about).merge_append() as append:
                        for file in files:
                            append.append_data_file(self._data_file(table, file))
        except CommitFailedException as err:
            raise RetryError(f"--to {self.path}: another writer has changed the table meanwhile: {err}") from err
        self._write_hint(table)

    def _data_file(self, table: "IcebergTable", file: dict[str, Any]) -> "DataFile":
        from pyarrow import parquet
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=parquet.read_metadata(self.store.local_path(self.staging.sealed, file)),
            stats_columns=compute_statistics_plan(table.schema(), table.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(table.schema()),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.store.url}/{file['to']}",
            file_format=FileFormat.PARQUET,
            partition=_partition(table, stores.partition_values(file["to"])),
            file_size_in_bytes=file["size"],
            sort_order_id=None,
            spec_id=table.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def _settle(self) -> None:
        if not self._name and (table := self.table()) is not None:
            self._write_hint(table)

    def _write_hint(self, table: "IcebergTable") -> None:
        """Name the newest metadata file, for readers that know only the directory."""
        if not self._name:
            version = os.path.basename(table.metadata_location).removesuffix(".metadata.json")
            self.store.replace("metadata/version-hint.text", version.encode())

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        """Expire the oldest snapshots if there are too many. Files stay as they are; returns 0."""
        table = self.table()
        if table is not None and len(table.metadata.snapshots) >= KEEP_SNAPSHOTS + EXPIRE:
            heads = {ref.snapshot_id for ref in table.metadata.refs.values()}
            by_age = sorted(table.metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms)
            old = [snapshot.snapshot_id for snapshot in by_age[:-KEEP_SNAPSHOTS] if snapshot.snapshot_id not in heads]
            table.maintenance.expire_snapshots().by_ids(old).commit()
            self._write_hint(table)
        return 0


def _partition(table: "IcebergTable", values: dict[str, str | None]) -> Any:
    """Return the partition's values from the directories' names, in Iceberg's form (a date is a number of days)."""
    from pyiceberg.expressions.literals import literal
    from pyiceberg.typedef import Record
    from pyiceberg.types import TimestampType, TimestamptzType

    found: list[Any] = []
    for field in table.spec().fields:
        column, text = table.schema().find_field(field.source_id), values[field.name]
        if text is not None and column.field_type in (TimestampType(), TimestamptzType()):  # Spark wrote it in UTC
            text = text.replace(" ", "T") + ("+00:00" if column.field_type == TimestamptzType() else "")
        found.append(None if text is None else literal(text).to(column.field_type).value)
    return Record(*found)
