"""A time of day that a test can set."""

import os
from pathlib import Path


class WallClock:
    """The time of day of the processes that run `under` it; the monotonic clock goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)
        paths = f"{Path(__file__).with_name('wallclock')}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        self.env = {"PYTHONPATH": paths, "WALL_OFFSET": str(path)}
        self.under = ["env", *(f"{name}={value}" for name, value in self.env.items())]

    def set(self, ahead_s: int) -> None:
        making = self._path.with_suffix(".new")
        making.write_text(f"{ahead_s}\n")
        making.rename(self._path)
