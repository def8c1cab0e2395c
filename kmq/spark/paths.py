"""Paths that options name, with or without a scheme.

data, /data, file:/data, file:///data           on this machine, or on a volume that is mounted here
s3://bucket/kmq, file:///mnt/nfs/kmq            a store with the copy of a broker (docs/tier.md), where that is asked for
hdfs://host/data, s3a://bucket/data, dbfs:/data  in another file system, which Spark reaches, and this process does not
"""

import os
import re

from kmq.errors import ConfigError, quotation

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
_STORES = ("s3", "s3a", "gs", "az")
_FILE = re.compile(r"file:(?://(?:localhost)?(?=/))?(/.*)", re.DOTALL)


def scheme(path: str) -> str:
    """Return the scheme of a path, in lower case; "" without one."""
    found = _SCHEME.match(path)
    return found[1].lower() if found else ""


def local_path(path: str) -> str | None:
    """Return a path without its scheme; None if it is in another file system. Raises ConfigError."""
    if not path.lower().startswith("file:"):
        return None if scheme(path) else path
    found = _FILE.fullmatch(f"file:{path[5:]}")
    if found is None or found[1].startswith("//"):
        raise ConfigError(
            f"{quotation(path, is_path=True)}: after file: an absolute path must follow, as in file:/data"
        )
    return found[1]


def store_url(path: str) -> str:
    """Return the URL of the store that a path names; "" if it names a data directory, or nothing that is there.

    A URL with file: is a store if it leads to a directory that has not what each data directory has.
    """
    if scheme(path) in _STORES:
        return path.rstrip("/")
    if scheme(path) != "file":
        return ""
    found = local_path(path)
    if found is None or not os.path.isdir(found) or any(os.path.exists(f"{found}/{name}") for name in ("id", "append")):
        return ""
    return f"file://{found.rstrip('/')}"


def directory_here(path: str, option: str = "", also: str = "") -> str:
    """Return the path of a directory that this process reads itself. Raises ConfigError, also for another file system.

    `also`: for the error, other values that the option accepts.
    """
    found = local_path(path)
    if found is not None:
        return found
    named = f"{option} {quotation(path, is_path=True)}" if option else quotation(path, is_path=True)
    mounted = "; DBFS is mounted at /dbfs" if scheme(path) == "dbfs" else ""
    raise ConfigError(
        f"{named}: {scheme(path)}: is another file system; must be a directory, here or on a shared volume{also}{mounted}"
    )
