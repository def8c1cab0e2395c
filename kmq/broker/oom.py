"""How often the kernel has killed a process of this cgroup for lack of memory.

Version 2 counts it in memory.events, version 1 in memory.oom_control. A container sees its own cgroup at the top.
Not covered Kills before the stats page was made, and a kill that ends the whole container: its cgroup is gone then.
"""

import contextlib
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq.broker.stats import Row

_TOP = "/sys/fs/cgroup"
_LOOK_S = 10.0


def _files(proc: str, top: str) -> "Iterator[str]":
    """Yield where the count may be, the nearest file first."""
    with contextlib.suppress(OSError), open(f"{proc}/self/cgroup", encoding="ascii", errors="replace") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            path = path.rstrip("/")
            if not controllers:
                yield f"{top}{path}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"{top}/memory{path}/memory.oom_control"
    yield f"{top}/memory.events"
    yield f"{top}/memory/memory.oom_control"


def _count(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


class OomKills:
    """The words `oom_kills`, `oom_at` and `oom_seen` of one row. `look` reads one small file, at most once in 10 s."""

    def __init__(self, row: "Row", proc: str = "/proc", top: str = _TOP) -> None:
        self._row, self._due = row, 0.0
        self._path = next((path for path in _files(proc, top) if _count(path) is not None), "")

    def look(self) -> None:
        """Bring the row up to the kernel's count. The kernel begins at 0 again with a new container."""
        now = time.monotonic()
        if not self._path or now < self._due:
            return
        self._due = now + _LOOK_S
        count, row = _count(self._path), self._row
        if count is None:
            return
        seen = row.oom_seen - 1 if row.oom_seen else count  # the first look only learns where the kernel is
        new = count - seen if count >= seen else count
        if new:
            row.oom_kills += new
            row.oom_at = int(time.time())
        row.oom_seen = count + 1
