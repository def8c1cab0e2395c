"""Files and directories of tables."""

import ctypes
import errno
import os
from typing import Any
from urllib.parse import unquote

from kmq.log.disk import sync_directory, sync_file

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
    """Directory below `path` → its Parquet files → their sizes. Ignores names that begin with a dot or an underscore."""
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
    """Names of the Parquet files below `path`, with their directories, in order."""
    return sorted(f"{directory}/{name}".lstrip("/") for directory, files in directories(path).items() for name in files)


def describe(root: str, name: str, directory: str, stem: str) -> dict[str, Any]:
    """What the manifest says of a file that is to go to `directory` as `stem`; it is synced."""
    from pyarrow import parquet

    path = f"{root}/{name}"
    sync_file(path)
    to = os.path.join(directory, f"{stem}.parquet")
    return {"from": name, "to": to, "rows": parquet.read_metadata(path).num_rows, "size": os.path.getsize(path)}


def sync_up(root: str, directory: str) -> None:
    """Sync a directory below `root`, and those above it: each may be new."""
    while True:
        sync_directory(f"{root}/{directory}")
        if not directory:
            return
        directory = os.path.dirname(directory)


def partition_values(place: str) -> dict[str, str | None]:
    """Partition column → value, from the names of directories that Spark made."""
    pairs = (part.partition("=") for part in os.path.dirname(place).split("/") if "=" in part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def exchange(one: str, other: str) -> None:
    """Let two directories change places, at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot change places with {one}: {os.strerror(number)}", other)


def can_exchange(directory: str) -> bool:
    """Whether this file system can: tried with two directories of our own, before anything is rewritten."""
    pair = [f"{directory}/exchange-{side}" for side in "ab"]
    for each in pair:
        os.makedirs(each, exist_ok=True)
    try:
        exchange(*pair)
        return True
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
            raise
        return False
    finally:
        for each in pair:
            os.rmdir(each)
