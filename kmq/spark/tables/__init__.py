"""Tables that the batches of a stream are added to exactly once: Parquet files in directories, Delta tables, Iceberg tables.

    with open_table("archive", "parquet", ["topic", "date"]) as table:
        table.add(batch, batch_id, lambda batch, query: table.stage(batch))   # None: it was added before

One file a format (parquet.py, delta.py, iceberg.py), on what they have in common (base.py: a batch is staged, sealed, given its
place, committed). places.py: a directory or an S3 store. checks.py, columns.py: what is refused before a stream starts.

Owns        the directory `to`: one writer at a time, under an exclusive lock. Beside the table's files it holds .kmq/, which
            readers ignore (Spark, pandas, pyarrow, Delta: a name with a dot; as a glob: to/*=*/**/*.parquet):
                owner          who writes here now          query, batch   the stream it is of, its last committed batch
                making/<id>/   a batch that Spark writes    sealed/        a batch that is whole, with manifest.json
                merging/       small files as larger ones   checkpoint/, schema.json: the pipeline's
                columns.json   of a Parquet table           catalog.db     of an Iceberg table without another catalog
            Of a table in an object store it lies in the stream's checkpoint.

Invariant   What a reader finds are rows of committed batches, each once. Parquet: every file that has its place in the table is
            of a sealed batch: one rename is the commit point. (A reader may see part of it while its files get their places,
            one by one; never more than there is.) Delta: what its log names; the entry of a batch holds its number. Iceberg:
            what the snapshot names; the number comes in the same commit.
Crash       before the seal      making/ is deleted, and the batch is written again under another id: tasks that outlive
                                 their driver on a cluster write where nothing is read;
            after it             what has no place yet gets it at the next start, before anything else, and `batch` is written;
            after `batch`        Spark runs the batch again, as it never heard of the end: has() says it is there.
            Delta, Iceberg       the commit is theirs: files with a place before it disturb no reader.
            S3                   a file that was stored is stored again under the same name with the same bytes.
            Power                files, names and the stream's own note of what the batch is are synced before the seal, in this
                                 order. (On a cluster, what the shared file system promises to the driver holds.)
            Another checkpoint would number its batches anew: it is refused, as is an old one for a new table.
Not covered Readers that ignore what a name with a dot or an underscore means. Two first starts on one S3 prefix in the same
            second, from two checkpoints: a store has no lock.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from kmq.errors import ConfigError
from kmq.spark.tables import checks
from kmq.spark.tables.base import Table
from kmq.spark.tables.delta import Delta
from kmq.spark.tables.iceberg import Iceberg
from kmq.spark.tables.parquet import Parquet

__all__ = ["FORMATS", "PARQUET", "Delta", "Iceberg", "Parquet", "Table", "TableSpec", "open_table"]

FORMATS = tuple(checks.MARKS)
PARQUET = checks.PARQUET


class TableSpec(NamedTuple):
    """A table as it is asked for."""

    to: str  # directory, here or on a shared volume, or s3://bucket/prefix
    format: str = PARQUET
    partition_by: Sequence[str] = ()
    catalog: str = ""  # of Iceberg: see iceberg.py

    def open(self, checkpoint: str = "") -> "Table":
        """Return the table, made if need be; a context that owns it. `checkpoint`: of the stream that it gets rows from."""
        return open_table(*self, checkpoint)


def open_table(to: str, format: str, partition_by: Sequence[str], catalog: str = "", checkpoint: str = "") -> "Table":
    """The table at `to`, made if need be; a context that owns it.

    `catalog`: of Iceberg, see there. `checkpoint`: the stream's, which s3://… needs: batches that are not there yet lie in it.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format!r}: must be one of {', '.join(FORMATS)}")
    if catalog and format != "iceberg":
        raise ConfigError(f"--catalog {catalog!r}: is for --format iceberg alone")
    path, state = to.removeprefix("file://"), ""
    if path.startswith(("s3://", "s3a://")):
        where = checkpoint.removeprefix("file://")
        if not where or "://" in where:
            raise ConfigError(f"--to {to}: needs --checkpoint, a directory here or on a shared volume")
        path, state = path.replace("s3a:", "s3:", 1), f"{os.path.abspath(where)}/.kmq"
    elif "://" in path:
        raise ConfigError(f"--to {to!r}: must be a directory, here or on a shared volume, or s3://bucket/prefix")
    else:
        path = os.path.abspath(path)
    if format == "iceberg":
        return Iceberg(path, partition_by, state, catalog)
    return (Delta if format == "delta" else Parquet)(path, partition_by, state)
