"""Files and directories of tables."""

import ctypes
import errno
import os
from typing import Any
from urllib.parse import unquote

from kmq.files import sync_directory, sync_file

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
