"""A time of day that can be set: Python imports this at its start where this directory is on PYTHONPATH (test_clock.py).

WALL_OFFSET names a file with the seconds that the time of day is ahead. The monotonic clock goes on as it is.
"""

import os
import time

_time, _time_ns, _path = time.time, time.time_ns, os.environ["WALL_OFFSET"]


def _offset_s() -> int:
    with open(_path) as file:
        return int(file.read())


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 1_000_000_000
