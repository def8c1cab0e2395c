"""Lines of our code as places to be killed at: which ones a process comes to, and a FIFO read to its end."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

TRACED = ("/kmq/files.py", "/kmq/links/", "/kmq/log/", "/kmq/framing/", "/kmq/router/", "/stages/")


class Point(NamedTuple):
    """The nth time that a line is reached."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} (time {self.nth})"


def traced(victim: str, reached: Callable[[Point], None]) -> Callable[[str], None]:
    """A `watch` that calls `reached` for every line of our code that the victim comes to."""
    counts: Counter[tuple[str, int]] = Counter()
    wanted: dict[Any, str] = {}

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            place = wanted[frame.f_code], frame.f_lineno
            counts[place] += 1
            reached(Point(*place, counts[place]))
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in wanted:
            name = code.co_filename
            wanted[code] = next((name[name.rindex(part) :] for part in TRACED if part in name), "")
        return local if wanted[code] else None

    return lambda name: sys.settrace(begin if name == victim else None)


def few(found: list[Point]) -> list[Point]:
    """Every line once, at the second time where there is one: by then there is something to lose."""
    last = {(point.file, point.line): point for point in found if point.nth <= 2}
    return list(last.values())


def read_all(fd: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            data += os.read(fd, 1 << 20)
    return data
