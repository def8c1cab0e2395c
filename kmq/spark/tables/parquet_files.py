"""Parquet files of a table, written and merged by Python workers. No row enters the JVM.

    files = ParquetFiles(schema)
    files.add(rows, directory)    # a batch, to <directory>/rows-000.parquet
    files.close()

Invariant   A file is complete and synced before `close` or `merge` returns.
            A merged file always has all rows and all columns of its sources, and Spark's note of the columns if a
            source has one. Spark needs that note to know its own types, such as a variant.
Memory      At most GROUP_BYTES of rows of a file, and one batch.
"""

import json
import os
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from kmq.files import sync_file

GROUP_BYTES = 64 << 20  # of a row group, in Arrow's memory
_LEVEL = 3  # of zstd, as Spark has it
_RISING = ("offset", "seq", "recv_ts")  # columns that are stored as differences
_SPARK = b"org.apache.spark.sql.parquet.row.metadata"  # Spark's note of the columns, in the files that it writes
_ROWS = 16_384  # of a batch of a file that is merged, at most


class ParquetFiles:
    """Parquet files of one schema, written one after the other."""

    def __init__(self, schema: pa.Schema, notes: dict[bytes, str] | None = None) -> None:
        """`notes`: key → value, in the footer of each file."""
        self._schema, self._notes = schema, notes
        self._directory, self._number, self._count = "", 0, 0
        self._writer: pq.ParquetWriter | None = None
        self._group: list[pa.RecordBatch] = []
        self._group_bytes = 0

    def add(self, rows: pa.RecordBatch, directory: str) -> None:
        """Add rows to the file in a directory. Another directory than before ends the previous file."""
        if directory != self._directory:
            self._finish()
            os.makedirs(directory, exist_ok=True)
            self._directory = directory
        self._group.append(rows)
        self._group_bytes += rows.nbytes
        if self._group_bytes >= GROUP_BYTES:
            self._write()

    def close(self) -> int:
        """Finish the last file; return the number of all rows. Only then the files are complete and synced."""
        self._finish()
        return self._count

    def _write(self) -> None:
        rows = pa.Table.from_batches(self._group)
        if self._writer is None:
            path = f"{self._directory}/rows-{self._number:03}.parquet"
            leaves = [leaf for field in self._schema for leaf in _leaves(field.name, field.type)]
            self._writer = pq.ParquetWriter(
                path,
                self._schema,
                compression="zstd",
                compression_level=_LEVEL,
                use_dictionary=[leaf for leaf in leaves if leaf not in _RISING],
                column_encoding={leaf: "DELTA_BINARY_PACKED" for leaf in leaves if leaf in _RISING},
                store_schema=False,  # Spark's files have no such schema either
            )
            if self._notes:
                self._writer.add_key_value_metadata(self._notes)
            self._number += 1
            self._path = path
        self._writer.write_table(rows, row_group_size=len(rows))
        self._count += len(rows)
        self._group, self._group_bytes = [], 0

    def _finish(self) -> None:
        if self._group:
            self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            sync_file(self._path)


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the paths of a column's leaves in a Parquet file."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_map(kind):
        yield f"{path}.key_value.key"
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    else:
        yield path


# --- merging ---------------------------------------------------------------------------------------------------------


def merge(sources: Sequence[str], directory: str) -> None:
    """Write the rows of these files to one file in a new directory, in their order. Columns that a file lacks are null."""
    pa.set_cpu_count(1)  # there may be as many tasks as cores
    schema, notes = _columns_of(sources)
    files = ParquetFiles(schema, notes)
    for source in sources:
        with pq.ParquetFile(source) as file:
            about = file.metadata
            nbytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            count = max(1, min(_ROWS, about.num_rows * GROUP_BYTES // (nbytes + 1)))  # of a batch
            for rows in file.iter_batches(count, use_threads=False):
                columns = dict(zip(rows.schema.names, rows.columns, strict=True))
                made = [
                    columns[field.name].cast(field.type) if field.name in columns else pa.nulls(len(rows), field.type)
                    for field in schema
                ]
                files.add(pa.RecordBatch.from_arrays(made, schema=schema), directory)
    files.close()


def _columns_of(sources: Sequence[str]) -> tuple[pa.Schema, dict[bytes, str]]:
    """Return the columns of these files, and Spark's note of them, if a file has one."""
    schemas: list[pa.Schema] = []
    derived: dict[str, StructField] = {}
    noted: dict[str, StructField] = {}
    for source in sources:
        about = pq.read_metadata(source)
        schemas.append(pa.schema([_of_today(field) for field in about.schema.to_arrow_schema()]))
        if note := (about.metadata or {}).get(_SPARK):
            noted |= {field.name: field for field in StructType.fromJson(json.loads(note))}
        else:
            derived |= {field.name: field for field in from_arrow_schema(schemas[-1], prefer_timestamp_ntz=True)}
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    types = derived | noted
    return schema, {_SPARK: StructType([types[name] for name in schema.names]).json()} if noted else {}


def _of_today(column: pa.Field) -> pa.Field:
    """Return the column with its current type. Spark's own form of a timestamp, INT96, is read as nanoseconds."""
    is_int96 = pa.types.is_timestamp(column.type) and column.type.unit == "ns"
    return column.with_type(pa.timestamp("us", "UTC")) if is_int96 else column
