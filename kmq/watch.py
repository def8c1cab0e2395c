"""Files that change while a process runs: certificates and tokens; and whether a name still leads to the same file.

Kubernetes swaps a symlink, people write in place: both show in what `stat` says. Nobody is woken by it; whoever is about to
use what was read from the files asks first.
"""

import os
import time

_LOOK_S = 1.0  # between two looks at most so much happens unseen, and at most so often it costs a stat


def file_id(path: str) -> tuple[int, int] | None:
    """Which file `path` leads to now, as device and inode; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Watch:
    """Some files, and whether one of them is another than it was."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self._seen = self._look()
        self._due = time.monotonic() + _LOOK_S

    def _look(self) -> list[tuple[int, ...]]:
        return [_signature(path) for path in self.paths]

    def changed(self) -> bool:
        """Whether a file has changed since the last True. Read the files after asking: what changes then is seen next time."""
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
