"""Tables that the batches of a stream are added to exactly once: directories of Parquet files, and Delta tables.

    with open_table("archive", "parquet", ["topic", "date"]) as table:
        follow(table, stream, lambda batch, query: table.stage(batch))      # until all is added, or for ever

Owns        the directory `to`: one writer at a time, under an exclusive lock. Beside the table's files it holds .kmq/, which
            readers pass over (Spark, pandas, pyarrow, Delta: a name with a dot; as a glob: to/*=*/**/*.parquet):
                owner          who writes here now          query, batch   the stream it is of, its last committed batch
                making/<id>/   a batch that Spark writes    sealed/        a batch that is whole, with manifest.json
                merging/       small files as larger ones   checkpoint/, schema.json: the pipeline's

Invariant   What a reader finds are rows of committed batches, each once. Parquet: every file that has its place in the table is
            of a sealed batch: one rename is the commit point. (A reader may see part of it while its files are moved, one
            rename each; never more than there is.) Delta: what its log names; the entry of a batch holds its number.
Crash       before the seal      making/ is thrown away, the batch is written again under another id, so that tasks which
                                 outlive their driver on a cluster write to nobody;
            after it             what was not yet moved is moved at the next start, before anything else, and `batch` written;
            after `batch`        Spark runs the batch again, as it never heard of the end: has() says it is there.
            Delta                the log entry is the commit point: files moved before it are in no reader's way.
            Power                files, names and the stream's own note of what the batch is are synced before the seal, in this
                                 order. (On a cluster, what the shared file system promises to the driver holds.)
            Another checkpoint would number its batches anew: it is refused, as is an old one for a new table.
Merging     A directory of a Parquet table with many small files is rewritten to .kmq/merging/ and changes places with the
            rewritten one in a single system call (renameat2, RENAME_EXCHANGE): readers list the one or the other. A kill leaves
            either of them in merging/, which the next start throws away: the other has the same rows. A reader that had listed
            the old names gets an error, not a wrong result; so while a stream runs, only directories that the last batch did
            not write to are merged. Where a file system cannot exchange (NFS), and without partitions, files stay small.
            Delta: optimize, then vacuum of what has not been part of the table for a week.
Not covered Object stores: they have no rename. Readers that ignore what a name with a dot means.
"""

import ctypes
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote
from uuid import uuid4

from kmq.errors import ConfigError
from kmq.links.ownership import FileLock, describe
from kmq.log.disk import replace_file, sync_directory
from kmq.spark import streams

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

FORMATS = ("parquet", "delta")
TARGET_BYTES = 128 << 20  # of a merged file; smaller than half of it is small
MERGE_FILES = 8  # so many small files in one directory are merged
VACUUM_HOURS = 7 * 24  # Delta: how long readers may go on with a version that is not the newest
_NULL = "__HIVE_DEFAULT_PARTITION__"  # Spark's name of the directory for null
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Followed(NamedTuple):
    """What a run of a stream added."""

    rows: int
    batches: int
    merged: int  # small files that became few


def follow(
    table: "Table",
    rows: "DataFrame",
    prepare: "Callable[[DataFrame, str], None]",
    name: str,
    once: bool = True,
    every: str = streams.EVERY,
    checkpoint: str = "",
) -> Followed:
    """Add a stream to a table, batch by batch. `prepare(batch, query id)` stages what is to be added.

    `once`: all there is now, then return. The checkpoint is the table's own where none is named.
    """
    where = (checkpoint or f"{table.state}/checkpoint").removeprefix("file://")
    added = batches = merged = 0

    def add(batch: "DataFrame", batch_id: int) -> None:
        nonlocal added, batches, merged
        offsets = f"{where}/offsets/{batch_id}"
        count = table.add(batch, batch_id, prepare, [offsets] if os.path.exists(offsets) else [])
        if count is not None:
            added += count
            batches += 1
            merged += table.merge(batch.sparkSession)

    streams.follow(rows, add, name, where, once, every)
    return Followed(added, batches, merged + table.merge(rows.sparkSession, all=True))


def open_table(to: str, format: str, partition_by: Sequence[str]) -> "Table":
    """The table at `to`, made if need be; a context that owns it."""
    if format not in FORMATS:
        raise ConfigError(f"--format {format!r}: is {' or '.join(FORMATS)}")
    path = to.removeprefix("file://")
    if "://" in path:
        raise ConfigError(f"--to {to!r}: is a directory here or on a shared volume; object stores have no rename")
    return (Delta if format == "delta" else Parquet)(os.path.abspath(path), partition_by)


class Table:
    """A directory of Parquet files, and the ways to add to it."""

    def __init__(self, path: str, partition_by: Sequence[str]) -> None:
        self.path, self.partition_by = path, list(partition_by)
        self.state = f"{path}/.kmq"
        self._making, self._sealed, self._merging = (f"{self.state}/{name}" for name in ("making", "sealed", "merging"))
        self._attempt = ""  # directory of the batch that is being written
        self._written: set[str] = set()  # directories that the last batch added to
        self._lock = FileLock(f"{self.state}/owner")

    def __enter__(self) -> "Table":
        os.makedirs(self.state, exist_ok=True)
        self._lock.acquire(f"--to {self.path}", describe("pipeline", self.path))
        try:
            self._check_format()
            for left in (self._making, self._merging):
                shutil.rmtree(left, ignore_errors=True)
            if os.path.isdir(self._sealed):
                self._publish()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
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
        prepare(batch, query)
        return self.commit(batch_id, sync)

    def bind(self, query: str, batch_id: int) -> None:
        """Say which stream the batches are of. Raises ConfigError where the table is another one's."""
        known = _read(f"{self.state}/query")
        if not known and batch_id == 0:
            replace_file(f"{self.state}/query", query.encode())
        elif known != query:
            was = "of another checkpoint" if known else "not this checkpoint's: it begins in the middle"
            raise ConfigError(f"--to {self.path}: its rows are {was}; give each table a checkpoint of its own")

    def has(self, batch_id: int) -> bool:
        """Whether the batch was added before."""
        return batch_id <= int(_read(f"{self.state}/batch") or -1)

    def stage(self, rows: "DataFrame") -> None:
        """Write the rows of a batch; nobody sees them yet."""
        writer = _writer(rows)
        self._attempt = f"{self._making}/{uuid4().hex[:12]}"
        writer.partitionBy(*self.partition_by).parquet(self._attempt)

    def commit(self, batch_id: int, sync: Iterable[str] = ()) -> int:
        """Add what was staged, and return how many rows that is. Files named in `sync` are to be on disk before."""
        files = [
            _file(self._attempt, name, f"{batch_id:010}-{number:04}")
            for number, name in enumerate(_parquet_files(self._attempt))
        ]
        for path in sync:
            _sync(path)
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
        for entry in manifest["files"]:
            place, waiting = f"{self.path}/{entry['to']}", f"{self._sealed}/{entry['from']}"
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.exists(waiting):
                os.rename(waiting, place)
        for directory in {os.path.dirname(entry["to"]) for entry in manifest["files"]}:
            _sync_up(self.path, directory)
        self._record(manifest["batch"], manifest["files"])
        replace_file(f"{self.state}/batch", b"%d" % manifest["batch"])
        os.makedirs(self._making, exist_ok=True)
        os.rename(self._sealed, f"{self._making}/done")  # it goes as a whole: nobody finds it half deleted
        shutil.rmtree(self._making)

    def _record(self, batch_id: int, files: list[dict[str, Any]]) -> None:
        """What beside the files' being there makes them part of the table."""

    def _check_format(self) -> None:
        """Refuse a directory that holds another kind of table."""
        if os.path.isdir(f"{self.path}/_delta_log") != isinstance(self, Delta) and self._is_begun():
            raise ConfigError(f"--to {self.path}: holds a table of the other format")

    def _is_begun(self) -> bool:
        return os.path.exists(f"{self.state}/batch") or os.path.isdir(f"{self.path}/_delta_log")

    # --- small files ---------------------------------------------------------------------------------------------

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        """Make few files of many small ones; returns how many went. `all`: also where the last batch added some."""
        raise NotImplementedError


class Parquet(Table):
    """See the module."""

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        gone = 0
        if not self.partition_by or not _can_exchange(self.state):
            return gone
        for directory, files in _directories(self.path).items():
            if directory and (all or directory not in self._written):
                small = [name for name, size in files.items() if size < TARGET_BYTES // 2]
                if len(small) >= MERGE_FILES:
                    gone += self._merge(spark, directory, small, files)
        return gone

    def _merge(self, spark: "SparkSession", directory: str, small: list[str], files: dict[str, int]) -> int:
        live, made = f"{self.path}/{directory}", f"{self._merging}/rows"
        shutil.rmtree(self._merging, ignore_errors=True)
        # The schema of one file at a time would lose a column that later ones have.
        rows = spark.read.option("mergeSchema", "true").parquet(*(f"{live}/{name}" for name in small))
        _writer(rows.coalesce(ceil(sum(files[name] for name in small) / TARGET_BYTES))).parquet(made)
        stem = max(small).removesuffix(".parquet").split("+")[0]  # of the newest: no merge before had it
        new = f"{self._merging}/directory"
        os.mkdir(new)
        for number, name in enumerate(_parquet_files(made)):
            _sync(f"{made}/{name}")
            os.rename(f"{made}/{name}", f"{new}/{stem}+{number}.parquet")
        for name in files.keys() - set(small):
            os.link(f"{live}/{name}", f"{new}/{name}")
        sync_directory(new)
        _exchange(new, live)
        sync_directory(os.path.dirname(live))
        sync_directory(self._merging)
        shutil.rmtree(self._merging)
        return len(small)


class Delta(Table):
    """See the module. Spark writes the files, in its tasks; only their names pass through the driver."""

    def table(self) -> "DeltaTable":
        from deltalake import DeltaTable

        return DeltaTable(self.path)

    def stage(self, rows: "DataFrame") -> None:
        from deltalake import DeltaTable, Schema

        schema = _arrow_schema(rows)
        if not os.path.isdir(f"{self.path}/_delta_log"):
            DeltaTable.create(self.path, schema, partition_by=self.partition_by)
        elif self.table().schema() != Schema.from_arrow(schema):
            raise ConfigError(f"--to {self.path}: the table has other columns than the rows that are to be added")
        super().stage(rows)

    def _record(self, batch_id: int, files: list[dict[str, Any]]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        table, query = self.table(), _read(f"{self.state}/query")
        version = table.transaction_version(query)
        if version is not None and batch_id <= version:
            return
        now = int(time.time() * 1000)
        table.create_write_transaction(
            [
                AddAction(
                    file["to"],
                    file["size"],
                    _values(file["to"]),
                    now,
                    True,
                    json.dumps({"numRecords": file["rows"]}),
                )
                for file in files
            ],
            mode="append",
            schema=table.schema(),
            partition_by=self.partition_by,
            commit_properties=CommitProperties(app_transactions=[Transaction(query, batch_id)]),
        )
        sync_directory(f"{self.path}/_delta_log")

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        table = self.table()
        table.vacuum(VACUUM_HOURS, dry_run=False)
        counts: dict[str, int] = {}
        for file in table.get_add_actions(flatten=True).to_struct_array().to_pylist():
            if file["size_bytes"] < TARGET_BYTES // 2:
                directory = os.path.dirname(unquote(file["path"]))
                counts[directory] = counts.get(directory, 0) + 1
        if not any(n >= MERGE_FILES and (all or name not in self._written) for name, n in counts.items()):
            return 0
        return int(table.optimize.compact(target_size=TARGET_BYTES)["numFilesRemoved"])


def _writer(rows: "DataFrame") -> "DataFrameWriter":
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # others know no INT96
    return rows.write.option("compression", "zstd")


# --- files ---------------------------------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _directories(path: str) -> dict[str, dict[str, int]]:
    """Directory below `path` → its Parquet files → their sizes. Passes over what a dot or underscore hides."""
    found: dict[str, dict[str, int]] = {}
    for directory, below, names in os.walk(path):
        below[:] = sorted(name for name in below if name[0] not in "._")
        files = {name: os.path.getsize(f"{directory}/{name}") for name in sorted(names) if _is_data(name)}
        if files:
            found[os.path.relpath(directory, path).removeprefix(".")] = files
    return found


def _is_data(name: str) -> bool:
    return name.endswith(".parquet") and name[0] not in "._"


def _parquet_files(path: str) -> list[str]:
    """Names of the Parquet files below `path`, with their directories, in order."""
    return sorted(
        f"{directory}/{name}".lstrip("/") for directory, files in _directories(path).items() for name in files
    )


def _file(root: str, name: str, stem: str) -> dict[str, Any]:
    """What the manifest says of a file, which is synced."""
    from pyarrow import parquet

    path = f"{root}/{name}"
    _sync(path)
    to = os.path.join(os.path.dirname(name), f"{stem}.parquet")
    return {"from": name, "to": to, "rows": parquet.read_metadata(path).num_rows, "size": os.path.getsize(path)}


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_up(root: str, directory: str) -> None:
    """Sync a directory below `root`, and those above it: each may be new."""
    while True:
        sync_directory(f"{root}/{directory}")
        if not directory:
            return
        directory = os.path.dirname(directory)


def _values(place: str) -> dict[str, str | None]:
    """Partition column → value, from the names of directories that Spark made."""
    pairs = (part.partition("=") for part in os.path.dirname(place).split("/") if part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def _arrow_schema(rows: "DataFrame") -> "pa.Schema":
    """For Delta. Whether Spark can tell that a column is never null is nothing that readers may rely on."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    schema = StructType()
    for field in rows.schema:
        schema.add(field.name, field.dataType, nullable=True)
    return to_arrow_schema(schema, timezone="UTC")


def _exchange(one: str, other: str) -> None:
    """Let two directories change places, at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot change places with {one}: {os.strerror(number)}", other)


def _can_exchange(directory: str) -> bool:
    """Whether this file system can: tried with two directories of our own, before anything is rewritten."""
    pair = [f"{directory}/exchange-{side}" for side in "ab"]
    for each in pair:
        os.makedirs(each, exist_ok=True)
    try:
        _exchange(*pair)
        return True
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
            raise
        return False
    finally:
        for each in pair:
            os.rmdir(each)
