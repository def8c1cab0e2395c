"""Removes from a stream of lines the tracebacks of Spark's Python workers whose JVM has closed their connection.

The JVM closes it when a stream ends. A Unix socket, unlike TCP, reports that to the worker at once, and the worker
prints it. Several workers share one stderr, so that their tracebacks may interleave line by line.

Invariant   A line of any other error is never removed. Which line belongs to which of several interleaved tracebacks
            cannot be told, so they are removed together, and only if each of them is proven to be of a closed
            connection. Interleaved with any other error all of them are passed on, in the order in which their lines
            came.
Delay       A traceback is held back until the line that names its exception, and at most MAX_LINES. All other lines are
            passed on at once.
Not covered Tracebacks that cut each other in the middle of a line: they are passed on.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

MAX_LINES = 1000  # of tracebacks that interleave: the ones of 50 workers
_HEADER = b"Traceback (most recent call last)"
_CHAINED = b"During handling of the above exception"
# The name of an exception, and its message. A log line has a space or a `=` before its first colon.
_ENDING = re.compile(rb"[^\s:=|]+(?:: .*)?$")
_CLOSED = (b"BrokenPipeError", b"EOFError")
# Frames of the loops in which a worker talks to the JVM. No traceback has two frames of the same function there.
_FRAME = re.compile(
    rb'  File "[^"]*/pyspark/(daemon|sql/streaming/python_streaming_source_runner)\.py", line \d+, in (\S+)'
)


class _Tracebacks:
    """Tracebacks that interleave, from the first header until each of them has named its exception."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._count = self._begun = self._ended = 0
        self._frames: Counter[tuple[bytes, bytes]] = Counter()
        self._has_other = False  # an error that is not a closed connection: all lines are passed on
        self.is_over = False

    @staticmethod
    def begin_with(line: bytes) -> bool:
        return line.startswith((_HEADER, _CHAINED))

    def include(self, line: bytes) -> bool:
        """Return True if a line may be part of them."""
        return line.startswith((b" ", b"\n", _CHAINED)) or _HEADER in line or _ENDING.match(line) is not None

    def add(self, line: bytes) -> None:
        self._held.append(line)
        self._count += 1
        self._begun += line.count(_HEADER)
        if frame := _FRAME.match(line):
            self._frames[frame[1], frame[2]] += 1
        elif _ENDING.match(line):
            self._ended += 1
            self._has_other |= not line.startswith(_CLOSED)
            self.is_over = self._ended >= self._begun
            self._has_other |= self.is_over and not self._are_all_of_workers()
        if self._count >= MAX_LINES:
            self.is_over = self._has_other = True

    def _are_all_of_workers(self) -> bool:
        """Return True if each traceback is proven to have a frame of a worker's loop.

        Two frames of one function are of two tracebacks; frames of two functions may be of one.
        """
        files = {file for file, _ in self._frames}
        proven = sum(max(count for (file, _), count in self._frames.items() if file == each) for each in files)
        return 0 < self._begun <= proven

    def released(self) -> list[bytes]:
        """Return the lines that are to be passed on by now, each of them once."""
        if not self._has_other:
            return []
        released, self._held = self._held, []
        return released

    def rest(self) -> list[bytes]:
        return self._held


def without_disconnects(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, except tracebacks of workers whose connection was closed, and blank lines right after these."""
    tracebacks: _Tracebacks | None = None
    has_removed = False
    for line in lines:
        if has_removed and line == b"\n":
            continue
        has_removed = False
        if tracebacks is None and _Tracebacks.begin_with(line):
            tracebacks = _Tracebacks()
        if tracebacks is None or not tracebacks.include(line):
            yield line
            continue
        tracebacks.add(line)
        yield from tracebacks.released()
        if tracebacks.is_over:
            has_removed = bool(tracebacks.rest())
            tracebacks = None
    if tracebacks is not None:
        yield from tracebacks.rest()
