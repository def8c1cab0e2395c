"""Reading one index file: its label, and its lines by binary search or in order. The format is in index.py.

Owner       none: read-only, needs no lock.
Invariant   A line that is still being written is never read. A line that is no index line, or does not fit the line
            before it, raises DamageError when it is reached.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from kmq.log.damage import DamageError
from kmq.log.index import MAX_LABEL, Entry, parse_line, read_label

_LINE_BYTES = 256  # an index line is shorter
_WINDOW = 1 << 14  # bytes read at once in order: some 300 blocks


class IndexLine:
    """An entry and where its line lies in the index file: the bytes start…end-1."""

    __slots__ = ("end", "entry", "start")

    def __init__(self, start: int, end: int, entry: Entry) -> None:
        self.start, self.end, self.entry = start, end, entry


class IndexReader:
    """The lines of one index file as they are when it is opened; a missing file is an empty one."""

    def __init__(self, path: str) -> None:
        self.path, self.fd, self.size = path, -1, 0
        self.label = b""  # the line that says which segment it belongs to
        with contextlib.suppress(FileNotFoundError):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self.fd).st_size
            start = max(0, size - _LINE_BYTES)
            whole = start + os.pread(self.fd, _LINE_BYTES, start).rfind(b"\n") + 1
            # Without a newline there the last line is too long: reading it will raise DamageError.
            self.size = whole if whole > start or not start else size
            self.label = read_label(os.pread(self.fd, MAX_LABEL, 0))
        self.begin = min(len(self.label), self.size)  # of the first entry

    @property
    def is_empty(self) -> bool:
        return self.size <= self.begin

    def is_in_force(self) -> bool:
        """Return True if the path still leads to this index, or still to no index."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return self.fd < 0
        return self.fd >= 0 and os.path.samestat(now, os.fstat(self.fd))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def line(self, at: int) -> IndexLine:
        """Return the line that holds byte `at`. Raises DamageError if it is no index line."""
        base = max(0, at - _LINE_BYTES)
        data = os.pread(self.fd, 2 * _LINE_BYTES, base)
        start = data.rfind(b"\n", 0, at - base) + 1
        stop = data.find(b"\n", at - base)
        entry = self._entry(data[start:stop] if stop >= 0 else b"", base + start)
        return IndexLine(base + start, base + stop + 1, entry)

    def _entry(self, line: bytes, at: int) -> Entry:
        entry = parse_line(line)
        if entry is None:
            raise self.damage(at, f"not an index line: {line[:40]!r}")
        return entry

    def damage(self, at: int, what: str) -> DamageError:
        return DamageError(self.path, at, self.size, 0, 0, what)

    def last(self, holds: Callable[[Entry], bool]) -> IndexLine | None:
        """Return the last line for whose entry `holds` is true; it must be true up to some line, and false after it."""
        best, low, high = None, self.begin, self.size
        if low < high:  # most often who reads is at the end
            line = self.line(high - 1)
            if holds(line.entry):
                return line
            high = line.start
        while low < high:
            line = self.line((low + high) // 2)
            if holds(line.entry):
                best, low = line, line.end
            else:
                high = line.start
        return best

    def entries(self, at: int = 0) -> Iterator[tuple[int, Entry]]:
        """Yield (byte, entry) of the lines in force, the last for each offset, from the line at byte `at` on."""
        pending: tuple[int, Entry] | None = None
        at = max(at, self.begin)
        while at < self.size:
            data = os.pread(self.fd, min(_WINDOW, self.size - at), at)
            whole = data.rfind(b"\n") + 1
            if not whole:
                raise self.damage(at, "no end of line")
            for line in data[: whole - 1].split(b"\n"):
                entry = self._entry(line, at)
                if pending is not None:
                    if not _may_follow(pending[1], entry):
                        raise self.damage(at, "does not follow from the line before it")
                    if entry.offset > pending[1].offset:
                        yield pending
                pending = at, entry
                at += len(line) + 1
        if pending is not None:
            yield pending


def _may_follow(before: Entry, entry: Entry) -> bool:
    """Return True if `entry` is of the same block as the line before it, or of a later one."""
    is_later = entry.offset > before.offset
    return entry.offset >= before.offset and is_later == (entry.position > before.position)
