"""Notice that a file (certificates, tokens) has changed while a process runs, or that a path leads to another file.

Kubernetes swaps a symlink and people write in place: `stat` shows both. Nothing wakes a process when a file changes. A
process asks before each use of what it has read from the file.
"""

import os
import time

_LOOK_S = 1.0  # between two looks: the longest time that a change stays unseen


def file_id(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file that `path` leads to now; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Watch:
    """Some files, watched for changes."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self._seen = self._look()
        self._due = time.monotonic() + _LOOK_S

    def _look(self) -> list[tuple[int, ...]]:
        return [_signature(path) for path in self.paths]

    def changed(self) -> bool:
        """Return True if a file has changed since the last True. Read the files after this call, never before."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _LOOK_S
        before, self._seen = self._seen, self._look()
        return self._seen != before


def _signature(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
