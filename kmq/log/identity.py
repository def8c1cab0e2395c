"""Who a data directory is: `id` names it for ever, `format` says which version of the formats is in it.

Rings carry the id, so that one left by another directory is never read as this one's (G9).
"""

import contextlib
import errno
import os

from kmq.errors import ConfigError, RetryError
from kmq.log.disk import FULL, sync_directory

FORMAT = "1"


def open_data(path: str) -> str:
    """Make `path` a data directory if it is none, and return its id.

    Raises ConfigError where it cannot be one, RetryError where the disk is at fault.
    """
    try:
        os.makedirs(f"{path}/append", exist_ok=True)
        os.makedirs(f"{path}/topics", exist_ok=True)
        _write_once(path, "format", FORMAT)
        _write_once(path, "id", os.urandom(16).hex())
    except OSError as err:
        kind = RetryError if err.errno in (errno.EIO, *FULL) else ConfigError
        raise kind(f"KMQ_DATA={path!r}: cannot be written: {err.strerror} ({err.filename})") from err
    found = read(path, "format")
    if found != FORMAT:
        raise ConfigError(f"KMQ_DATA={path!r}: format {found!r} is not the one this version writes ({FORMAT})")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"KMQ_DATA={path!r}: cannot be written")
    return read(path, "id")


def read(path: str, name: str) -> str:
    """The text of `id` or `format`."""
    with open(f"{path}/{name}", encoding="ascii", errors="replace") as file:
        return file.read().strip()


def _write_once(path: str, name: str, text: str) -> None:
    """Several stages start at once: the first one's file wins, whole."""
    if os.path.exists(f"{path}/{name}"):
        return
    making = f"{path}/{name}.{os.urandom(8).hex()}"  # not our pid: in a container of its own each has the same
    with open(making, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(making, f"{path}/{name}")
    os.unlink(making)
    sync_directory(path)
