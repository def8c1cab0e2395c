"""Tables that receive the batches of a stream exactly once: Parquet files in directories, Delta tables, Iceberg tables.

    with open_table("archive", "parquet", ["topic", "date"]) as table:
        table.add(batch, batch_id, lambda batch, query: table.stage(batch))   # None: the batch was added before

formats.py has Parquet and Delta, iceberg.py Iceberg. base.py has what they share: how a batch is staged, sealed,
published and committed, and the checks before a stream starts. stores.py: a directory or an S3 store.

Owns        The directory `to`, with one writer at a time under an exclusive lock. Beside the table's files lies .kmq/.
            Readers ignore it (Spark, pandas, pyarrow, Delta: because of the dot; as a glob: to/*=*/**/*.parquet):
                owner          the process that writes now  query, batch   the table's stream, its last committed batch
                offsets/<n>    where batch n ended (v1)
                making/<id>/   a batch that Spark writes    sealed/        a complete batch, with manifest.json
                merging/       small files being merged     checkpoint/, schema.json: of the pipeline
                columns.json   of a Parquet table           catalog.db     of an Iceberg table without another catalog
            For a table in an object store, .kmq/ lies in the stream's checkpoint.

Invariant   A reader finds only rows of committed batches, each row at most once. Parquet: every file in the table
            belongs to a sealed batch, and one rename is the commit point. While the files of a batch are moved one by
            one, a reader may see some of them, never other rows. Delta: the table is what its log names, and the entry
            of a batch holds the batch's number and offsets. Iceberg: the table is what its snapshot names, and number
            and offsets are in the same commit. A batch that Spark repeats is skipped if it has the same number and the
            same offsets; with other offsets it is an error (base.py).
Crash       before the seal      making/ is deleted, and the batch is written again under another id; tasks that outlive
                                 their driver on a cluster write to a directory that nothing reads
            after the seal       the next start first moves the remaining files to their places, and writes `batch`
            after `batch`        Spark runs the batch again, because it never saw the end; has() returns True
            Delta, Iceberg       the format's own commit decides; files before it are in no reader's view
            S3                   a stored file is stored again under the same name with the same bytes
            Power                the files, their names and the stream's own note of the batch's content are synced
                                 before the seal, in this order. (On a cluster this holds as far as the shared file
                                 system keeps its promises to the driver.)
            Another checkpoint would number its batches from 0 again, so it is refused. So is an old checkpoint for a
            new table.
Not covered Readers that read names with a leading dot or underscore. Two first starts on one S3 prefix in the
            same second from two checkpoints, because a store has no lock.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from kmq.errors import ConfigError, quotation
from kmq.spark.paths import directory_here, local_path, scheme
from kmq.spark.tables import base
from kmq.spark.tables.base import Table, TableContent
from kmq.spark.tables.formats import Delta, Parquet
from kmq.spark.tables.iceberg import Iceberg

__all__ = [
    "FORMATS",
    "PARQUET",
    "Delta",
    "Iceberg",
    "Parquet",
    "Table",
    "TableContent",
    "TableSpec",
    "open_table",
    "snapshot",
]

FORMATS = tuple(base.MARKS)
PARQUET = base.PARQUET


class TableSpec(NamedTuple):
    """A table as the user describes it."""

    to: str  # directory, here or on a shared volume, or s3://bucket/prefix
    format: str = PARQUET
    partition_by: Sequence[str] = ()
    catalog: str = ""  # for Iceberg: see iceberg.py

    def open(self, checkpoint: str = "") -> "Table":
        """Return the table as a context that owns it; see open_table."""
        return open_table(*self, checkpoint)


def open_table(to: str, format: str, partition_by: Sequence[str], catalog: str = "", checkpoint: str = "") -> "Table":
    """Return the table at `to` as a context that owns it. The table is created if it does not exist.

    `catalog`: for Iceberg, see iceberg.py. `checkpoint`: the directory of the stream's checkpoint. A table at s3://…
    needs it, because batches wait there until they are stored. Raises ConfigError.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format!r}: must be one of {', '.join(FORMATS)}")
    if catalog and format != "iceberg":
        raise ConfigError(f"--catalog {catalog!r}: applies to --format iceberg only")
    if scheme(to) in ("s3", "s3a"):
        if not (where := local_path(checkpoint)):
            raise ConfigError(f"--to {quotation(to)}: needs --checkpoint, a directory here or on a shared volume")
        path, state = f"s3:{to.partition(':')[2]}", f"{os.path.abspath(where)}/.kmq"
    else:
        path, state = os.path.abspath(directory_here(to, "--to", ", or s3://bucket/prefix")), ""
    if format == "iceberg":
        return Iceberg(path, partition_by, state, catalog)
    return (Delta if format == "delta" else Parquet)(path, partition_by, state)


def snapshot(path: str, catalog: str = "") -> TableContent:
    """Return the table's content now. Its writer may run. `catalog`: as for the writer. Raises ConfigError."""
    root = os.path.abspath(directory_here(path))
    if not os.path.isfile(f"{root}/.kmq/query"):
        raise ConfigError(f"{path}: is no table that a pipeline has written a batch to")
    if os.path.isdir(f"{root}/{base.MARKS[base.ICEBERG]}"):
        return Iceberg(root, (), "", catalog).snapshot()
    return (Delta if os.path.isdir(f"{root}/{base.MARKS[base.DELTA]}") else Parquet)(root, ()).snapshot()
