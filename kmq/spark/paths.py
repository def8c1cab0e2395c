"""Paths that options name, with or without a scheme.

data, /data, file:/data, file:///data           on this machine, or on a volume that is mounted here
hdfs://host/data, s3a://bucket/data, dbfs:/data  in another file system, which Spark reaches, and this process does not
"""

import re

from kmq.errors import ConfigError, quotation

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
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
