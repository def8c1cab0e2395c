"""What tables of every format share: one writer, and batches that are staged, sealed, published and committed.

    Spark's files → making/<id>/ → rename → sealed/ → the files' places → _record (Delta, Iceberg) → `batch`

A format adds how files in their places become part of the table (_record), the columns of the table (known_columns,
create), and how small files are merged (merge). The package states the promises of tables; this module keeps them.

Before      a stream starts, its table and its checkpoint are checked: a wrong directory gives an error of one line, not
            a stack trace in a batch.
Batches     are known by number and offsets, because a checkpoint that was restored from an older copy uses the numbers
            again for other records. Batches that were committed by a release without offsets are known by number:
            Spark can repeat only the last of them.
Invariant   A batch is never skipped unless the table has a batch with this number and these offsets. A batch is sealed
            by one rename, and never before all its files and the manifest are synced. Readers of the table never see
            files in making/ or sealed/.
Crash       Before the seal the next start deletes `making/`. After the seal it finds `sealed/` and resumes.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.files import FULL, replace_file, sync_directory, sync_file
from kmq.links.ownership import FileLock, describe
from kmq.spark.paths import local_path
from kmq.spark.pinned import pinned
from kmq.spark.tables import stores
from kmq.spark.tables.stores import S3, TableDirectory, TableStore

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


# --- checks ----------------------------------------------------------------------------------------------------------

PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
MARKS = {PARQUET: "", DELTA: "_delta_log", ICEBERG: "metadata"}  # format → the directory that only its tables have
_PROBE = ".kmq-probe"
_PROBE_BYTES = 4096


def usable(option: str, path: str) -> None:
    """Create a directory with its parents, and prove that files can be written there. Errors name the option."""
    probe = f"{path}/{_PROBE}"
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            if os.path.exists(probe):
                os.unlink(probe)
    except OSError as err:
        raise explained(option, path, err) from err


def explained(option: str, path: str, err: OSError) -> KmqError:
    """Return the error that says why files cannot be written below `path`."""
    if err.errno in FULL:
        return RetryError(f"{option} {path}: the disk is full; run again when there is room, nothing is lost")
    if file := _file_among(path):
        return ConfigError(f"{option} {path}: {file} is a file; name a directory")
    return ConfigError(f"{option} {path}: cannot be written: {err.strerror}")


def _file_among(path: str) -> str | None:
    """Return the part of a path that is a file, so that nothing can be below it; None if there is none."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path if path and not os.path.isdir(path) else None


def _query_id(path: str) -> str:
    try:
        with open(f"{path}/metadata", encoding="utf-8") as file:
            return str(json.load(file)["id"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError, OSError) as err:
        raise ConfigError(f"--checkpoint {path}: its file metadata must be one that Spark wrote: {err}") from err


def _names(path: str) -> Sequence[str]:
    try:
        return os.listdir(path)
    except OSError:
        return ()


def partition_by(names: Iterable[str], columns: Sequence[str]) -> None:
    """Raise ConfigError if a name is not a column of the rows, or if the names leave no other column."""
    lowered = {column.lower() for column in columns}  # as Spark looks for them
    for name in names:
        if name.lower() not in lowered:
            near = get_close_matches(name, columns, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(columns)}"
            raise ConfigError(f"--partition-by {name!r}: the rows have no such column{hint}")
    if {name.lower() for name in names} >= lowered:
        raise ConfigError("--partition-by: names all columns; at least one must be left for the files")


def format_is(wanted: str, to: str, state: str, store: TableStore) -> None:
    """Raise ConfigError if the store holds a table of another format, or an error if it cannot be reached."""
    found = next((name for name, mark in MARKS.items() if mark and store.has(mark)), "")
    if not found and (os.path.exists(f"{state}/batch") or stores.directories(to)):
        found = PARQUET
    if found and found != wanted:
        raise ConfigError(f"--to {to}: holds a {found} table, not {wanted}; name another --to")


def same_partitions(to: str, table: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise ConfigError if a table is partitioned by columns other than `wanted`."""
    if list(table) != list(wanted):
        had, have = (", ".join(names) or "nothing" for names in (table, wanted))
        raise ConfigError(f"--to {to}: the table is partitioned by {had}, not by {have}; name another --to")


# --- the table's stream ----------------------------------------------------------------------------------------------

Offsets = list[str]  # where a batch ends: the line of each source, as in Spark's own note of the batch

KEEP = 100  # batches whose offsets are kept, as Spark keeps its own notes
_VERSION = "v1"
_MAX_SHOWN = 5  # partitions in an error


class BoundStream:
    """The files `query`, `batch` and offsets/<batch> of a table's state; in an object store a note beside the table."""

    def __init__(self, to: str, state: str, store: TableStore) -> None:
        self._to, self._state, self._store = to, state, store

    @property
    def query(self) -> str:
        """The stream's id; "" before the first batch."""
        return stores.read(f"{self._state}/query")

    @property
    def last_batch(self) -> int:
        """The number of the last committed batch, -1 before the first."""
        return int(stores.read(f"{self._state}/batch") or -1)

    def bind(self, query: str, batch_id: int) -> None:
        """Bind the table to a stream at its first batch. Raises ConfigError if the table belongs to another stream."""
        bound = self.query
        if not bound and batch_id == 0:
            if isinstance(self._store, S3):  # there only this note keeps two checkpoints apart
                if (owner := self._store.owner()) and owner != query:
                    raise ConfigError(f"--to {self._to}: holds rows of another checkpoint; name another --to")
                self._store.own(query)
            replace_file(f"{self._state}/query", query.encode())
        elif bound != query:
            why = "holds rows of another checkpoint" if bound else "is new, but the checkpoint is not"
            raise ConfigError(f"--to {self._to}: {why}; give each table a checkpoint of its own")

    def offsets(self, batch_id: int) -> Offsets | None:
        """Return the offsets of a committed batch; None if they were never kept, or no longer are."""
        version, *lines = stores.read(f"{self._state}/offsets/{batch_id}").split("\n")
        if version not in ("", _VERSION):
            raise ConfigError(f"{self._state}/offsets/{batch_id}: unknown format {version!r}; expected {_VERSION}")
        return lines if version else None

    def committed(self, batch_id: int, offsets: Offsets | None) -> None:
        """Note the last batch. Its offsets are written first: without them its number alone would decide."""
        if offsets is not None:
            directory = f"{self._state}/offsets"
            os.makedirs(directory, exist_ok=True)
            replace_file(f"{directory}/{batch_id}", "\n".join((_VERSION, *offsets)).encode())
            for name in os.listdir(directory):
                if name.isdecimal() and 0 < int(name) <= batch_id - KEEP:  # keep 0: where the table begins
                    os.unlink(f"{directory}/{name}")
        replace_file(f"{self._state}/batch", b"%d" % batch_id)

    def check_same(self, batch_id: int, offsets: Offsets | None, taken: Offsets | None, last: int) -> None:
        """Raise ConfigError if the batch is not the one that the table has under this number.

        `taken`: the offsets of the table's batch; `last`: the number of the table's last batch.
        """
        if offsets is None or (taken is None and batch_id == last):
            return  # by number only: the checkpoint cannot be read here, or an earlier release committed the batch
        if taken is None:
            why = f"took a batch of this number long ago, and is at batch {last}"
        elif differing := _differing(offsets, taken):
            why = f"took a batch of this number with other offsets: {differing}"
        else:
            return
        raise ConfigError(
            f"--to {self._to}: batch {batch_id} of the checkpoint is not in the table, which {why}; was the checkpoint"
            " restored from an older copy? Nothing was added. Go on with the newest copy of the checkpoint, or begin a"
            " new table with a new checkpoint"
        )

    def check_checkpoint(self, path: str) -> None:
        """Raise an error if a stream's checkpoint cannot be used, or belongs to another table."""
        if (local := local_path(path)) is None:  # Spark checks these
            return
        path = local
        usable("--checkpoint", path)
        query, found = self.query, _query_id(path)
        advice = "give each table a checkpoint of its own"
        if query and not found:
            raise ConfigError(
                f"--checkpoint {path}: is new, but the rows of --to {self._to} are of another checkpoint; {advice}"
            )
        if query and found != query:
            raise ConfigError(
                f"--checkpoint {path}: belongs to another query than the rows of --to {self._to}; {advice}"
            )
        if not query and found and any(name.isdigit() for name in _names(f"{path}/commits")):
            raise ConfigError(
                f"--checkpoint {path}: has written batches to another table, and --to {self._to} is new; {advice}"
            )


def _differing(offsets: Offsets, taken: Offsets) -> str:
    """Return the partitions whose offsets differ, for an error; "" if none does."""
    ours, theirs = (dict(_leaves([_parsed(line) for line in lines])) for lines in (offsets, taken))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (
        ", ".join(
            f"{'/'.join(name[1:]) or 'source'} {ours.get(name, 'none')} now, {theirs.get(name, 'none')} in the table"
            for name in names[:_MAX_SHOWN]
        )
        + more
    )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _leaves(value: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names of the keys, value) of everything within a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*name, str(key)))
    else:
        yield name, value


# --- staging ---------------------------------------------------------------------------------------------------------

File = dict[str, Any]  # from, to, rows, size: see stores.describe


_PARTS = "_parts"


class Staging:
    """The directories `making` and `sealed` of a table's state.

    A batch is written to one directory, or in parts: each to a directory of its own, which becomes part of the batch
    when it is accepted. Readers of the batch never see other parts, such as those of tasks that failed.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._making = f"{state}/making"
        self.sealed = f"{state}/sealed"
        self._attempt = ""  # directory of the batch that is being written

    @property
    def is_sealed(self) -> bool:
        return os.path.isdir(self.sealed)

    def discard(self) -> None:
        """Delete batches that were not sealed."""
        shutil.rmtree(self._making, ignore_errors=True)

    def begin(self) -> str:
        """Return a new directory for a batch. Tasks that outlive their driver keep writing to an older directory."""
        self._attempt = f"{self._making}/{uuid4().hex[:12]}"
        return self._attempt

    def begin_parts(self) -> str:
        """Create and return a new directory for the parts of a batch. A part left over from another attempt has
        another one.
        """
        parts = f"{self.begin()}/{_PARTS}"
        os.makedirs(parts)
        return parts

    def accept(self, part: str) -> None:
        """Add the files of a part to the batch, except those whose names begin with an underscore."""
        for name in stores.parquet_files(f"{self._attempt}/{_PARTS}/{part}"):
            directory, file = os.path.split(name)
            os.makedirs(f"{self._attempt}/{directory}", exist_ok=True)
            os.rename(
                f"{self._attempt}/{_PARTS}/{part}/{name}", os.path.join(self._attempt, directory, f"{part}-{file}")
            )

    def seal(
        self, batch_id: int, offsets: Offsets | None, place: Callable[[str], str], sync: Iterable[str]
    ) -> list[File]:
        """Seal the batch that was written; return all its files.

        `place`: maps a directory of the batch to the table's directory for its files.
        `sync`: paths of other files, synced before the batch is sealed.
        """
        files = [
            stores.describe(self._attempt, name, place(os.path.dirname(name)), f"{batch_id:010}-{number:04}")
            for number, name in enumerate(stores.parquet_files(self._attempt))
        ]
        for path in sync:
            sync_file(path)
        manifest = {"batch": batch_id, "files": [file for file in files if file["rows"]], "offsets": offsets}
        replace_file(f"{self._attempt}/manifest.json", json.dumps(manifest).encode())
        os.rename(self._attempt, self.sealed)  # the commit point
        sync_directory(self._state)
        return files

    def manifest(self) -> tuple[int, Offsets | None, list[File]]:
        """Return (number, offsets, files) of the sealed batch. Earlier releases sealed batches without offsets."""
        with open(f"{self.sealed}/manifest.json", "rb") as file:
            manifest = json.load(file)
        return manifest["batch"], manifest.get("offsets"), manifest["files"]

    def finish(self) -> None:
        """Remove the sealed batch as a whole: a rename first, so that a crash never leaves it half deleted."""
        os.makedirs(self._making, exist_ok=True)
        os.rename(self.sealed, f"{self._making}/done")
        shutil.rmtree(self._making)


# --- what readers see ------------------------------------------------------------------------------------------------


class TableContent(NamedTuple):
    """A table at one moment: the files of its batches up to the last committed one, and no others."""

    path: str
    format: str
    offsets: Offsets | None  # where the last batch ends; None if that was not kept
    first: Offsets | None  # where batch 0 ends, which tells where it begins; None if that was not kept
    files: list[str]
    columns: dict[str, str]  # name → SQL type
    partition_by: list[str]


# --- table -----------------------------------------------------------------------------------------------------------

TARGET_BYTES = 128 << 20  # of a merged file; a file below half of this is small
MERGE_FILES = 8  # a directory with at least so many small files is merged


class Table:
    """A table of files; a context that owns it. Subclasses implement the formats."""

    format = ""  # a key of MARKS
    keeps_partitions = False  # files also have the columns that name their directories

    def __init__(self, path: str, partition_by: Sequence[str], state: str = "") -> None:
        """`state`: for s3://…, a directory for what is kept between two starts; a local `path` has its own."""
        self.path, self.partition_by = path, list(partition_by)
        self.state = state or f"{path}/.kmq"
        self._option = "--checkpoint" if state else "--to"
        self.store: TableStore = S3(path) if state else TableDirectory(path)
        self.staging = Staging(self.state)
        self.stream = BoundStream(path, self.state, self.store)
        self.merging = f"{self.state}/merging"
        self._written: set[str] = set()  # directories that the last batch added to
        self._lock = FileLock(f"{self.state}/owner")

    def __enter__(self) -> "Table":
        usable(self._option, self.state)
        self._lock.acquire(f"--to {self.path}", describe("pipeline", self.path))
        try:
            if isinstance(self.store, S3):
                self.store.check()
            format_is(self.format, self.path, self.state, self.store)
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

    # --- one batch ---------------------------------------------------------------------------------------------------

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
        another stream, or has other records under this number; RetryError if the disk is full.
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
            raise explained("--to", self.path, err) from err

    def has(self, batch_id: int, offsets: Offsets | None = None) -> bool:
        """Return True if the batch was added before. Raises ConfigError if another batch was, with this number."""
        recorded, recorded_offsets = self._recorded(batch_id)
        last = max(self.stream.last_batch, recorded)
        if batch_id > last:
            return False
        self.stream.check_same(batch_id, offsets, self.stream.offsets(batch_id) or recorded_offsets, last)
        return True

    def _recorded(self, batch_id: int) -> tuple[int, Offsets | None]:
        """Return, from the format's own commits, the number of the stream's last batch, or -1, and the offsets of
        `batch_id`.

        The offsets are None if they are not there. Needed because a table's state may have been restored without its
        table.
        """
        return -1, None

    def expect(self, schema: "StructType") -> bool:
        """Raise ConfigError if rows with these columns cannot be added to the table.

        Returns True if the table exists.
        """
        partition_by(self.partition_by, schema.names)
        found = self.known_columns()
        if found is not None:
            stores.compare(self.path, found, self._describe(stores.arrow_schema(schema)))
        return found is not None

    def known_columns(self) -> dict[str, str] | None:
        """Return column name → type of the table; None if it does not exist yet.

        Raises ConfigError if the table is partitioned by other columns.
        """
        raise NotImplementedError

    def _describe(self, schema: "pa.Schema") -> dict[str, str]:
        return stores.described(schema)

    def snapshot(self) -> TableContent:
        """Return what readers see now. Needs no ownership: the table's writer may run. Raises ConfigError."""
        raise NotImplementedError

    def create(self, schema: "pa.Schema") -> None:
        """Create the table with these columns."""
        raise NotImplementedError

    def stage(self, rows: "DataFrame") -> None:
        """Write the rows of a batch where no reader sees them yet; create the table if it does not exist."""
        self._exist_for(rows.schema)
        self.write(rows, self.staging.begin())

    def begin_parts(self, schema: "StructType") -> str:
        """Return a new directory for the parts of a batch (Staging); create the table if it does not exist."""
        self._exist_for(schema)
        return self.staging.begin_parts()

    def _exist_for(self, schema: "StructType") -> None:
        if not self.expect(schema):
            self.create(stores.arrow_schema(schema))

    def write(self, rows: "DataFrame", to: str) -> None:
        """Write rows to a directory of the staged batch."""
        laid_out, names = self._laid_out(rows)
        with self.writing(rows.sparkSession):
            laid_out.write.option("compression", "zstd").partitionBy(*names).parquet(to)

    def _laid_out(self, rows: "DataFrame") -> "tuple[DataFrame, list[str]]":
        """Return the rows with the columns that files have, and the columns that name directories."""
        return rows, self.partition_by

    @contextmanager
    def writing(self, spark: "SparkSession") -> Iterator[None]:
        """Pin the confs of the session while its tasks write files. Raises RetryError if the disk is full."""
        try:
            with pinned(spark):
                yield
        except Exception as err:  # from the JVM: only the text names the errno
            if os.strerror(errno.ENOSPC) in str(err):
                raise explained("--to", self.path, OSError(errno.ENOSPC, "")) from err
            raise

    def _directory_of(self, directory: str) -> str:
        """Return the table's directory for the files of a directory that Spark wrote."""
        return directory

    def commit(self, batch_id: int, offsets: Offsets | None = None, sync: Iterable[str] = ()) -> int:
        """Add the staged batch; return its number of rows. Files named in `sync` are synced before it is sealed."""
        files = self.staging.seal(batch_id, offsets, self._directory_of, sync)
        self._written = {os.path.dirname(file["to"]) for file in files}
        self._publish()
        return sum(file["rows"] for file in files)

    def _publish(self) -> None:
        """Move the files of the sealed batch to their places, and commit it. May be repeated until it succeeds."""
        batch_id, offsets, files = self.staging.manifest()
        self.store.adopt(self.staging.sealed, files)
        self._record(batch_id, offsets, files)
        self.stream.committed(batch_id, offsets)
        self.staging.finish()

    def _resume(self) -> None:
        """Finish a sealed batch whose writer died. Raises ConfigError if the table got another batch meanwhile."""
        batch_id, offsets, _ = self.staging.manifest()
        if not self.has(batch_id, offsets):
            self._publish()
            return
        self.stream.committed(batch_id, offsets)
        self.staging.finish()

    def _record(self, batch_id: int, offsets: Offsets | None, files: list[dict[str, Any]]) -> None:
        """Make files that are in their places part of the table, if the format needs a commit of its own.

        Raises RetryError if the format's last commit has this batch, or a later one.
        """

    def _settle(self) -> None:
        """Finish the work of a writer that died after its commit."""

    # --- small files -------------------------------------------------------------------------------------------------

    def merge(self, spark: "SparkSession", all: bool = False) -> int:
        """Merge small files; return how many were replaced. `all`: also in directories that the last batch wrote to."""
        raise NotImplementedError
