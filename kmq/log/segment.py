"""Segments: a log is files `<first record, 20 digits>.log`, so that text order is record order.

The last one is active: it grows. The others are sealed: they never change again, and each has a whole index. A log goes
on in a new segment when the active one has reached `segment_bytes`, or when its first record is `segment_age` older
than what comes next. Where nothing comes, its owner seals it as well once it has its size or all of it is due by age
(`is_over`): what nobody writes to any more must not fill a disk for ever. Retention takes whole sealed segments, oldest
first, but never the last record of a log (remnant.py).
"""

import contextlib
import os
from collections.abc import Callable, Sequence

from kmq import record
from kmq.errors import ConfigError
from kmq.log.disk import FULL, AppendFile, WaitForRoom, find_tail, sync_directory
from kmq.log.index import IndexWriter
from kmq.settings import FOREVER, GIB, SETTINGS, Settings

_STAMP_BYTES = 64  # a seq and a time are shorter
COMPACT = "compact"
_RETENTION = ("retention_age", "retention_bytes")
LIMITS = ("segment_bytes", "segment_age", *_RETENTION, "cleanup")


def name(first: int) -> str:
    return f"{first:020d}.log"


def is_being_swapped(log_path: str) -> bool:
    """Return True while compaction replaces a queue's segment, or if a crash interrupted that (compaction.py)."""
    directory, file = os.path.split(log_path)
    topic_directory, partition = os.path.split(directory)
    topics, topic = os.path.split(topic_directory)
    prefix = f"{topic}-{partition}-{int(file[:20])}-"
    try:
        return any(entry.startswith(prefix) for entry in os.listdir(f"{topics}/.compacted"))
    except FileNotFoundError:
        return False


def index_path(log_path: str) -> str:
    return log_path.removesuffix(".log") + ".idx"


def listing(directory: str) -> list[tuple[int, str]]:
    """(first record, path) of the segments in `directory`, in order; [] where there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(n[:20]), f"{directory}/{n}") for n in names if n.endswith(".log") and n[:-4].isdigit())


class Segment:
    """One file of a log: record `first` is its first one, `size` bytes lie in it."""

    __slots__ = ("_newest", "first", "path", "size")

    def __init__(self, first: int, path: str, size: int) -> None:
        self.first, self.path, self.size = first, path, size
        self._newest = 0

    def newest_ts(self) -> int:
        """recv_ts of the last record of a sealed segment, in µs: looked up once, when its age begins to matter."""
        if not self._newest:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = record.parse_stored(find_tail(fd, self.size, _is_stored).last)
            finally:
                os.close(fd)
            self._newest = found[1] if found else 1
        return self._newest


def _is_stored(line: bytes) -> bool:
    return record.parse_stored(line) is not None


def survey(directory: str) -> list[Segment]:
    """The segments in `directory` with their sizes, in order."""
    return [Segment(first, path, os.stat(path).st_size) for first, path in listing(directory)]


def stamp(data: bytes | memoryview) -> tuple[int, int]:
    """(seq, recv_ts in µs) of the first line of `data`; (0, 0) where there is none."""
    fields = bytes(data[:_STAMP_BYTES]).split(b"|", 2)
    try:
        return int(fields[0]), record.parse_ts(fields[1])
    except (ValueError, IndexError):
        return 0, 0


def _cleanup(text: str) -> str:
    if text not in ("delete", COMPACT):
        raise ValueError(f"must be delete or {COMPACT}")
    return text


_PARSE = {row.attribute: row.parse for row in SETTINGS} | {"cleanup": _cleanup}


class Limits:
    """When a log begins a new segment, and when its oldest segments are deleted. Ages in seconds; 0 bytes: no limit.

    `cleanup`: "compact" lets compaction take what a later record of the same key replaces (compaction.py). Such a topic
    is a table: retention takes its oldest rows only where it has limits of its own.
    """

    __slots__ = LIMITS

    def __init__(
        self,
        segment_bytes: int = GIB,
        segment_age: float = FOREVER,
        retention_age: float = FOREVER,
        retention_bytes: int = 0,
        cleanup: str = "delete",
    ) -> None:
        self.segment_bytes, self.segment_age = segment_bytes, segment_age
        self.retention_age, self.retention_bytes, self.cleanup = retention_age, retention_bytes, cleanup

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        return cls(settings.segment_bytes, settings.segment_age, settings.retention_age, settings.retention_bytes)

    def but(self, texts: dict[str, str]) -> "Limits":
        """These limits with some of them replaced, as in topic.toml. Raises ConfigError naming what is wrong."""
        limits = Limits(*(getattr(self, name) for name in LIMITS))
        for name, text in texts.items():
            if name not in LIMITS:
                raise ConfigError(f"{name}: unknown limit; expected one of {', '.join(LIMITS)}")
            try:
                setattr(limits, name, _PARSE[name](text))
            except ValueError as err:
                raise ConfigError(f"{name} = {text!r}: {err}") from None
        if limits.cleanup == COMPACT:
            for name in set(_RETENTION) - set(texts):
                setattr(limits, name, getattr(Limits(), name))
        return limits

    def is_full(self, size: int, first_ts: int, next_ts: int) -> bool:
        """Return True if a record of `next_ts` µs needs a new segment.

        This one has `size` bytes; its first record came at `first_ts` µs.
        """
        return size >= self.segment_bytes or (size > 0 and next_ts - first_ts >= self.segment_age * 1e6)

    def is_over(self, size: int, newest_ts: Callable[[], int], now_s: float) -> bool:
        """Return True if an idle segment of `size` bytes has to be sealed. `newest_ts`: of its last record, in µs."""
        if size >= self.segment_bytes:
            return True
        return size > 0 and self.retention_age != FOREVER and newest_ts() <= (now_s - self.retention_age) * 1e6

    def expired(self, sealed: Sequence[Segment], active_bytes: int, now_s: float) -> int:
        """How many of the oldest sealed segments have to go. `now_s`: by a trusted clock (kmq/broker/clock.py)."""
        total = active_bytes + sum(each.size for each in sealed) if self.retention_bytes else 0
        youngest = (now_s - self.retention_age) * 1e6
        for count, each in enumerate(sealed):
            too_old = self.retention_age != FOREVER and each.newest_ts() <= youngest
            if total <= self.retention_bytes and not too_old:
                return count
            total -= each.size
        return len(sealed)


def begin(path: str, wait_for_room: WaitForRoom, also: Callable[[], object] = lambda: None) -> None:
    """Make an empty segment with a labelled index, and do `also`. Where the disk is full, undo all of it and raise."""
    try:
        AppendFile(path, wait_for_room).close()
        IndexWriter(index_path(path), wait_for_room).begin()
        also()
    except OSError as err:
        if err.errno in FULL:
            remove([Segment(0, path, 0)])
        raise


def remove(segments: Sequence[Segment]) -> None:
    """Delete segments, the log before its index: an index alone says nothing."""
    for each in segments:
        for path in (each.path, index_path(each.path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    if segments:
        sync_directory(os.path.dirname(segments[0].path))
