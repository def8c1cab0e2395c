"""Where the files of a table lie: in a directory, or under a prefix in an S3 object store; lists files and columns.

    store.adopt(".kmq/sealed", files)   # <sealed>/topic=orders/rows-000.parquet → <table>/topic=orders/…

Invariant   The files of a sealed batch can be adopted again until that succeeds, with the same result: each file is
            there once, complete, under its name in the manifest. A directory renames the file. S3 stores the same bytes
            under the same key again, and an object becomes visible only when all of it is stored. The sealed batch
            stays on disk, in the stream's checkpoint, until the table has all of it.
S3          Keys and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN (or
            a role of the machine), AWS_REGION, AWS_ENDPOINT_URL. They are passed to the libraries and never written.
Price       The bytes pass through the driver's machine, WORKERS files at a time, and use its disk until they are
            stored.
"""

import ctypes
import errno
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from kmq.errors import ConfigError, KmqError, RetryError, quotation
from kmq.files import replace_file, sync_directory, sync_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import S3FileSystem
    from pyspark.sql.types import StructType


# --- files -----------------------------------------------------------------------------------------------------------

_NULL = "__HIVE_DEFAULT_PARTITION__"  # Spark's name of the directory for null
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def read(path: str) -> str:
    """Return the text of a small file; "" if the file does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def directories(path: str) -> dict[str, dict[str, int]]:
    """Return directory below `path` → file → size in bytes, of Parquet files.

    Ignores names that begin with a dot or an underscore.
    """
    found: dict[str, dict[str, int]] = {}
    for directory, below, names in os.walk(path):
        below[:] = sorted(name for name in below if name[0] not in "._")
        files = {name: os.path.getsize(f"{directory}/{name}") for name in sorted(names) if _is_data(name)}
        if files:
            found[os.path.relpath(directory, path).removeprefix(".")] = files
    return found


def _is_data(name: str) -> bool:
    return name.endswith(".parquet") and name[0] not in "._"


def parquet_files(path: str) -> list[str]:
    """Return the sorted names of the Parquet files below `path`, with their directories."""
    return sorted(f"{directory}/{name}".lstrip("/") for directory, files in directories(path).items() for name in files)


def for_spark(path: str) -> str:
    """Return a path that Spark does not read as a pattern."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", path)


def live_files(root: str, below: str = "") -> Iterator[str]:
    """Yield the names of a table's Parquet files, with their directories, while its writer may exchange directories.

    A directory is listed again if it was replaced meanwhile: the writer deletes the one that was listed.
    """
    path = os.path.join(root, below)
    while True:
        listed = os.stat(path).st_ino
        names = sorted(os.listdir(path))
        if os.stat(path).st_ino == listed:
            break
    for name in names:
        if _is_data(name):
            yield os.path.join(below, name)
        elif name[0] not in "._" and os.path.isdir(f"{path}/{name}"):
            yield from live_files(root, os.path.join(below, name))


def describe(root: str, name: str, directory: str, stem: str) -> dict[str, Any]:
    """Sync a file; return its manifest entry: `from`, `to` (named `stem`, in `directory`), rows, size in bytes."""
    from pyarrow import parquet

    path = f"{root}/{name}"
    sync_file(path)
    to = os.path.join(directory, f"{stem}.parquet")
    return {"from": name, "to": to, "rows": parquet.read_metadata(path).num_rows, "size": os.path.getsize(path)}


def sync_up(root: str, directory: str) -> None:
    """Sync a directory and its parents up to `root`, because each of them may be new."""
    while True:
        sync_directory(f"{root}/{directory}")
        if not directory:
            return
        directory = os.path.dirname(directory)


def partition_values(place: str) -> dict[str, str | None]:
    """Return partition column → value, from the names of directories that Spark made."""
    pairs = (part.partition("=") for part in os.path.dirname(place).split("/") if "=" in part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def exchange(one: str, other: str) -> None:
    """Exchange two directories in one system call. Raises OSError, also if the file system cannot do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot change places with {one}: {os.strerror(number)}", other)


def can_exchange(directory: str) -> bool:
    """Return True if this file system can exchange directories. Tries it with two empty ones below `directory`."""
    pair = [f"{directory}/exchange-{side}" for side in "ab"]
    for path in pair:
        os.makedirs(path, exist_ok=True)
    try:
        exchange(*pair)
        return True
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
            raise
        return False
    finally:
        for path in pair:
            os.rmdir(path)


# --- stores ----------------------------------------------------------------------------------------------------------

SCHEME = "s3://"
WORKERS = 8
_CHUNK = 8 << 20
_OWNER, _WRITER = "_kmq/owner.json", "_kmq/writer.json"  # readers ignore names with an underscore
_TRANSIENT = ("NETWORK_CONNECTION", "SLOW_DOWN", "SERVICE_UNAVAILABLE", "REQUEST_TIMEOUT", "curlCode")


class TableStore(Protocol):
    """Where a table's files are; see the module. Names are relative to the table."""

    url: str

    def has(self, directory: str) -> bool:
        """Return True if the directory exists, or if a store has any object below it."""
        ...

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        """Move the files of the manifest from `sealed` to their places, so that they survive a power cut."""
        ...

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        """Return the path on this machine where an adopted file can be read."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace the content of a small file, all of it or nothing."""
        ...


class TableDirectory:
    """A directory on this machine or on a shared volume."""

    def __init__(self, path: str) -> None:
        self.path, self.url = path, f"file://{path}"

    def has(self, directory: str) -> bool:
        return os.path.isdir(f"{self.path}/{directory}")

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        for file in files:
            place, waiting = f"{self.path}/{file['to']}", f"{sealed}/{file['from']}"
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.exists(waiting):
                os.rename(waiting, place)
        for directory in {os.path.dirname(file["to"]) for file in files}:
            sync_up(self.path, directory)

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        return f"{self.path}/{file['to']}"

    def replace(self, name: str, content: bytes) -> None:
        path = f"{self.path}/{name}"
        replace_file(path, content)
        sync_directory(os.path.dirname(path))


class S3:
    """A prefix of a bucket."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._prefix = self.url.removeprefix(SCHEME)
        bucket, *prefix = self._prefix.split("/")
        if not all((bucket, prefix, *prefix)) or {*"@:"} & {*bucket}:
            raise ConfigError(f"--to {quotation(url)}: must be s3://bucket/prefix")

    @cached_property
    def _fs(self) -> "S3FileSystem":
        from pyarrow.fs import S3FileSystem

        return S3FileSystem(
            endpoint_override=endpoint() or None, region=region() or None, connect_timeout=10, request_timeout=60
        )

    def owner(self) -> str:
        """Return the id of the stream whose rows are here; "" for none. Raises KmqError if the store cannot be read."""
        return str(self.note(_OWNER).get("query", ""))

    def note(self, name: str) -> dict[str, Any]:
        """Return the content of a small JSON file; empty if it does not exist. Raises KmqError if it cannot be read."""
        try:
            with self._fs.open_input_stream(f"{self._prefix}/{name}") as file:
                return dict(json.loads(file.read()))
        except FileNotFoundError:
            return {}
        except OSError as err:
            raise self._explained(err) from err

    def own(self, query: str) -> None:
        """Note the stream whose rows are here."""
        self.replace(_OWNER, json.dumps({"query": query}).encode())

    def check(self) -> None:
        """Prove that files can be stored here, with a note that names this process."""
        self.replace(_WRITER, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    def has(self, directory: str) -> bool:
        from pyarrow.fs import FileSelector

        try:
            return bool(self._fs.get_file_info(FileSelector(f"{self._prefix}/{directory}", allow_not_found=True)))
        except OSError as err:
            raise self._explained(err) from err

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(self._store, f"{sealed}/{file['from']}", file["to"]) for file in files]:
                done.result()

    def _store(self, path: str, name: str) -> None:
        try:
            with open(path, "rb") as file, self._fs.open_output_stream(f"{self._prefix}/{name}") as out:
                while chunk := file.read(_CHUNK):
                    out.write(chunk)
        except OSError as err:
            raise self._explained(err) from err

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        return f"{sealed}/{file['from']}"

    def replace(self, name: str, content: bytes) -> None:
        try:
            with self._fs.open_output_stream(f"{self._prefix}/{name}") as out:
                out.write(content)
        except OSError as err:
            raise self._explained(err) from err

    def _explained(self, err: OSError) -> KmqError:
        text = " ".join(str(err).split())[:300]
        if any(sign in text for sign in _TRANSIENT):
            return RetryError(f"--to {self.url}: {text}; run again when the store is reachable, nothing is lost")
        return ConfigError(f"--to {self.url}: {text}; see AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL")


def endpoint() -> str:
    """Return the URL of an object store other than Amazon's; "" for Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def region() -> str:
    """Return the store's region from the environment; "" if it names none."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")


# --- columns ---------------------------------------------------------------------------------------------------------

_NAMES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "halffloat": "float",
    "large_string": "string",
    "string_view": "string",
    "large_binary": "binary",
    "binary_view": "binary",
    "date32[day]": "date",
}


def arrow_schema(schema: "StructType") -> "pa.Schema":
    """Return the Arrow schema of rows, with every column nullable.

    Spark infers for some columns that they are never null. A table's schema must not depend on that.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    nullable = StructType()
    for field in schema:
        nullable.add(field.name, field.dataType, nullable=True)
    return to_arrow_schema(nullable, timezone="UTC")


def described(schema: "pa.Schema", widened: bool = False) -> dict[str, str]:
    """Return column name → SQL type. `widened`: for a format without integers below 32 bits."""
    return {field.name: _sql(field.type, widened) for field in schema}


def compare(to: str, table: Mapping[str, str], rows: Mapping[str, str]) -> None:
    """Raise ConfigError, naming the columns, if a table and the rows differ in columns. Their order does not matter."""
    if found := differing(table, rows):
        raise ConfigError(f"--to {to}: holds a table of other columns: {found}; name another --to")


def differing(table: Mapping[str, str], rows: Mapping[str, str]) -> str:
    """Return in which columns a table and rows differ; "" if in none."""
    found = [f"the table has no column {name}" for name in rows if name not in table]
    found += [f"the rows have no column {name}" for name in table if name not in rows]
    both = (name for name in rows if name in table)
    found += [
        f"{name} is {table[name]} in the table, {rows[name]} in the rows" for name in both if table[name] != rows[name]
    ]
    return "; ".join(found)


def _sql(kind: "pa.DataType", widened: bool) -> str:
    """Return a type as Spark writes it, for each of Arrow's variants of the type."""
    from pyarrow import types

    if types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_sql(field.type, widened)}' for field in kind)}>"
    if types.is_map(kind):
        return f"map<{_sql(kind.key_type, widened)},{_sql(kind.item_type, widened)}>"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"array<{_sql(kind.value_type, widened)}>"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if types.is_dictionary(kind):
        return _sql(kind.value_type, widened)
    name = str(kind)
    return "int" if widened and name in ("int8", "int16") else _NAMES.get(name, name)
