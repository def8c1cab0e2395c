"""Segments: a log is files `<first record, 20 digits>.log`, so that text order is record order.

The last segment is active: it grows. The others are sealed: they never change again (except by compaction), and each
has a complete index. A log continues in a new segment when the active one has reached `segment_bytes`, or when its
first record is `segment_age` older than the next record. An idle segment is sealed too, once it has its size or all its
records are due by age (`is_over`): otherwise a log that no producer writes to would fill the disk for ever. While the
disk is full it is also sealed at `retention_bytes`. Retention deletes whole sealed segments, oldest first, but never the
last record of a log (remnant.py).
"""

import contextlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from kmq.config.settings import SETTINGS, Settings
from kmq.config.values import FOREVER, GIB, parse_duration
from kmq.errors import ConfigError
from kmq.files import FULL, AppendFile, WaitForRoom, find_tail, sync_directory
from kmq.log.index import IndexWriter, last_before
from kmq.log.rows import FILE
from kmq.message import record

COMPACT = "compact"
DELETE_RETENTION_S = 86400.0
CREATE_TIME, LOG_APPEND_TIME = "CreateTime", "LogAppendTime"
_RETENTION = ("retention_age", "retention_bytes")
_OF_GATEWAY = ("max_deliveries", "message_timestamp_type", "kafka_settings")
_LOCAL = ("local_retention_age", "local_retention_bytes")
LIMITS = ("segment_bytes", "segment_age", *_RETENTION, "cleanup", "delete_retention", *_OF_GATEWAY, "tier", *_LOCAL)


COPY_SUFFIX = ".kept"  # suffix of a copy that is not in force yet
_NAME = re.compile(r"([0-9]{20})\.log(\.kept)?")


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
    return log_path.removesuffix(COPY_SUFFIX).removesuffix(".log") + ".idx"


def listing(directory: str) -> list[tuple[int, str]]:
    """Return (first record, path) of the segments in `directory`, in order; [] if it does not exist.

    A kept copy (remnant.py) counts as the first segment once its original is deleted, even before it has its name. So
    no reader finds its records twice, or misses them.
    """
    return look(directory)[0]


def look(directory: str) -> tuple[list[tuple[int, str]], bool]:
    """Return what `listing` returns, and whether the partition has a file `tier` (rows.py)."""
    found, copies, has_tier = _found(directory)
    return [*(each for each in copies if each < found[0]), *found] if copies and found else copies or found, has_tier


def copies(directory: str) -> list[str]:
    """Return the paths of the copies in `directory` that have no name yet; [] if it does not exist."""
    return [path for _, path in _found(directory)[1]]


def _found(directory: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]], bool]:
    """Return (first record, path) of the files named as segments, and of those named as copies; and if `tier` is there."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return [], [], False
    matches = list(filter(None, map(_NAME.fullmatch, names)))
    found = sorted((int(match[1]), f"{directory}/{match[0]}") for match in matches if not match[2])
    copies = sorted((int(match[1]), f"{directory}/{match[0]}") for match in matches if match[2])
    return found, copies, FILE in names


class Segment:
    """A file of a log. It begins with record `first` and holds `size` bytes."""

    __slots__ = ("_newest", "first", "path", "size")

    def __init__(self, first: int, path: str, size: int) -> None:
        self.first, self.path, self.size = first, path, size
        self._newest = 0

    def newest_ts(self) -> int:
        """Return the recv_ts (µs) of the last record of a sealed segment. Reads the file at the first call only."""
        if not self._newest:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = record.parse_stored(find_tail(fd, self.size, is_stored).last)
            finally:
                os.close(fd)
            self._newest = found[1] if found else 1
        return self._newest


def survey(directory: str) -> list[Segment]:
    """Return the segments in `directory` with their sizes, in order."""
    return [Segment(first, path, os.stat(path).st_size) for first, path in listing(directory)]


def last_seq(of: Segment) -> int:
    """Return the seq of the last whole line of a segment; 0 if it has none."""
    with open(of.path, "rb") as file:
        tail = find_tail(file.fileno(), of.size, is_stored)
    return record.seq_of(tail.last) if tail.last else 0


def end_of(part: Segment) -> int:
    """Return the offset after the last whole line of a segment, from its index and the lines after that."""
    fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, position = last_before(index_path(part.path), part.size, 1 << 62)
        if offset < 0:
            offset, position = part.first, 0
        return offset + count_lines(fd, position, part.size)
    finally:
        os.close(fd)


def _cleanup(text: str) -> str:
    if text not in ("delete", COMPACT):
        raise ValueError(f"must be delete or {COMPACT}")
    return text


def _tier(text: str) -> str:
    if text not in ("on", "off"):
        raise ValueError("must be on or off")
    return text


def _delete_retention(text: str) -> float:
    return FOREVER if text.strip().lower() == "never" else parse_duration(text)


def _max_deliveries(text: str) -> int:
    if text == "none":
        return 0
    if not (text.isdecimal() and len(text) <= 9 and int(text)):
        raise ValueError("must be 1 to 999999999, or none")
    return int(text)


def _timestamp_type(text: str) -> str:
    if text not in (CREATE_TIME, LOG_APPEND_TIME):
        raise ValueError(f"must be {CREATE_TIME} or {LOG_APPEND_TIME}")
    return text


MOST_KAFKA_SETTINGS = 4096  # bytes of `kafka_settings`
_KAFKA_SETTING = r"[a-z]+(?:\.[a-z]+)*=[A-Za-z0-9._:*,+-]*"
_KAFKA_SETTINGS = re.compile(rf"{_KAFKA_SETTING}(?:;{_KAFKA_SETTING})*")


def _kafka_settings(text: str) -> str:
    if len(text) > MOST_KAFKA_SETTINGS or not _KAFKA_SETTINGS.fullmatch(text):
        raise ValueError(f"must be name=value;name=value… of at most {MOST_KAFKA_SETTINGS} bytes")
    return text


_PARSE = {row.attribute: row.parse for row in SETTINGS}
_PARSE |= {"cleanup": _cleanup, "delete_retention": _delete_retention, "max_deliveries": _max_deliveries}
_PARSE |= {"message_timestamp_type": _timestamp_type, "kafka_settings": _kafka_settings, "tier": _tier}
_PARSE |= {f"local_{name}": _PARSE[name] for name in _RETENTION}


class Limits:
    """When a log begins a new segment, and when its oldest segments are deleted. Ages in seconds; 0 bytes: no limit.

    `cleanup`: "compact" lets compaction remove records that a later record of the same key replaces (compaction.py).
    Such a topic is a table: retention deletes its oldest rows only if the topic has retention limits of its own.
    `delete_retention`: the age, in seconds, up to which compaction keeps a tombstone.
    `max_deliveries`: a message that was nacked so often becomes a dead letter; 0: no limit.
    `message_timestamp_type`: which time Kafka's consumers see: producer_ts or recv_ts.
    `kafka_settings`: settings from Kafka's clients that have no effect here, as `name=value;name=value`. Only the
    gateway uses these three; the log ignores them.
    `tier`: on, if old records go to KMQ_TIER. `local_retention_*`: what stays on the disk of them; as `retention_*`
    unless a topic says so.
    """

    __slots__ = LIMITS

    def __init__(
        self,
        segment_bytes: int = GIB,
        segment_age: float = FOREVER,
        retention_age: float = FOREVER,
        retention_bytes: int = 0,
        cleanup: str = "delete",
        delete_retention: float = DELETE_RETENTION_S,
        max_deliveries: int = 0,
        message_timestamp_type: str = CREATE_TIME,
        kafka_settings: str = "",
        tier: str = "off",
        local_retention_age: float | None = None,
        local_retention_bytes: int | None = None,
    ) -> None:
        self.segment_bytes, self.segment_age = segment_bytes, segment_age
        self.retention_age, self.retention_bytes = retention_age, retention_bytes
        self.cleanup, self.delete_retention, self.max_deliveries = cleanup, delete_retention, max_deliveries
        self.message_timestamp_type, self.kafka_settings, self.tier = message_timestamp_type, kafka_settings, tier
        self.local_retention_age = retention_age if local_retention_age is None else local_retention_age
        self.local_retention_bytes = retention_bytes if local_retention_bytes is None else local_retention_bytes

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        of_segments = settings.segment_bytes, settings.segment_age, settings.retention_age, settings.retention_bytes
        return cls(*of_segments, tier=settings.tier_topics)

    @property
    def is_tiered(self) -> bool:
        """Return True if old records go to KMQ_TIER: never those of a table, whose offsets lie in files that change."""
        return self.tier == "on" and self.cleanup != COMPACT

    def with_changes(self, texts: dict[str, str]) -> "Limits":
        """Return these limits with some replaced, as in topic.toml. Raises ConfigError if one is unknown or invalid."""
        limits = Limits(*(getattr(self, name) for name in LIMITS))
        for name, text in texts.items():
            if name not in LIMITS:
                raise ConfigError(f"{name}: unknown limit; expected one of {', '.join(LIMITS)}")
            try:
                setattr(limits, name, _PARSE[name](text))
            except ValueError as err:
                raise ConfigError(f"{name} = {text!r}: {err}") from None
        if limits.cleanup == COMPACT:
            if texts.get("tier") == "on":
                raise ConfigError("tier = 'on': not with cleanup=compact, whose records lie in files that change")
            limits.tier = "off"
            for name in set(_RETENTION) - set(texts):
                setattr(limits, name, getattr(Limits(), name))
        for name, total in zip(_LOCAL, _RETENTION, strict=True):
            if name not in texts and getattr(self, name) == getattr(self, total):
                setattr(limits, name, getattr(limits, total))
        return limits

    def is_full(self, size: int, first_ts: int, next_ts: int) -> bool:
        """Return True if a record received at `next_ts` needs a new segment.

        The active segment has `size` bytes; its first record was received at `first_ts`. Times in µs.
        """
        return size >= self.segment_bytes or (size > 0 and next_ts - first_ts >= self.segment_age * 1e6)

    def is_over(self, size: int, newest_ts: Callable[[], int], now_s: float, lacks_room: bool = False) -> bool:
        """Return True if an idle segment must be sealed. `newest_ts` returns the recv_ts (µs) of its last record.

        `lacks_room`: the disk or the quota is full. Then a segment larger than `retention_bytes` is sealed too.
        """
        most = min(filter(None, self._each("bytes")), default=0)
        if size >= self.segment_bytes or (lacks_room and most and size > most):
            return True
        age = min(self._each("age"))
        return size > 0 and age != FOREVER and newest_ts() <= (now_s - age) * 1e6

    def _each(self, what: str) -> list[float]:
        """Return the total limit, and the local one if old records go to KMQ_TIER."""
        names = [f"retention_{what}", *([f"local_retention_{what}"] if self.is_tiered else [])]
        return [getattr(self, name) for name in names]

    def local(self) -> "Limits":
        """Return these limits with the local ones as the only ones."""
        return Limits(retention_age=self.local_retention_age, retention_bytes=self.local_retention_bytes)

    def expired(self, sealed: Sequence[Segment], active_bytes: int, now_s: float, most: int) -> int:
        """Return how many of the oldest sealed segments are due, at most `most`, because each is a file to be read.

        `now_s`: of a trusted clock (kmq/broker/clock.py).
        """
        total = active_bytes + sum(segment.size for segment in sealed) if self.retention_bytes else 0
        youngest = (now_s - self.retention_age) * 1e6
        for count, segment in enumerate(sealed[:most]):
            is_too_old = self.retention_age != FOREVER and segment.newest_ts() <= youngest
            if total <= self.retention_bytes and not is_too_old:
                return count
            total -= segment.size
        return min(most, len(sealed))


def begin(path: str, wait_for_room: WaitForRoom, also: Callable[[], object] = lambda: None) -> None:
    """Make an empty segment with a labelled index, and call `also`. If the disk is full, undo everything and raise."""
    try:
        AppendFile(path, wait_for_room).close()
        IndexWriter(index_path(path), wait_for_room).begin()
        also()
    except OSError as err:
        if err.errno in FULL:
            remove([Segment(0, path, 0)])
        raise


def settle(directory: str) -> None:
    """Delete the indexes that `remove` has left, because a kill came between a log and its index."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    logs = {name.partition(".")[0] for name in names if ".log" in name}  # also a copy that remnant.py makes
    for name in names:
        if name.endswith(".idx") and name[:-4].isdigit() and name[:-4] not in logs:
            os.unlink(f"{directory}/{name}")


def remove(segments: Sequence[Segment]) -> None:
    """Delete segments, each log before its index, because readers ignore an index without a log."""
    for segment in segments:
        for path in (segment.path, index_path(segment.path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    if segments:
        sync_directory(os.path.dirname(segments[0].path))


# --- lines -----------------------------------------------------------------------------------------------------------
# Checks of whole stored lines without an index. A line is good when it has the syntax of a stored line, without NUL, and
# its seq is above the seq before it. A bare newline is a record that compaction removed.

SEQ, RECV_TS = 0, 1  # the fields of a stamp, (seq, recv_ts in µs), by which a record is looked up
_CHUNK = 1 << 20

# Possessive: a bad line must not be tried twice. The dot is several times as fast as a set of characters, and most
# bytes are payload; so NUL is searched for separately, before.
_LINES = re.compile(rb"(?:(?:\d{1,19}\|\d{1,12}\.\d{6}\|[^|\n]++\|[^|\n]*+\|[^|\n]*+\|.*+)?+\n)*+")
_SEQS = re.compile(rb"(?m)^(\d+)\|")


class CheckedLines:
    """Checked whole lines of a segment: the records from `offset` to before `next_offset`, at byte `position`."""

    __slots__ = ("lines", "next_offset", "offset", "position")

    def __init__(self, offset: int, position: int, lines: bytes, next_offset: int) -> None:
        self.offset, self.position, self.lines, self.next_offset = offset, position, lines, next_offset

    @property
    def end(self) -> int:
        """Return the byte after the lines."""
        return self.position + len(self.lines)


def is_stored(line: bytes) -> bool:
    """Return True if this is a stored line, without its newline."""
    return record.parse_stored(line) is not None


def seqs_of(lines: bytes) -> list[int]:
    """Return the seqs of whole stored lines, without the records that compaction removed."""
    # hot loop: record.seq_of, without the call
    return [int(line[: line.index(b"|")]) for line in lines.split(b"\n") if line]


def bad_line(lines: bytes, after: int = 0) -> int | None:
    """Return the byte at which the first line begins that is not a stored line, or whose seq does not rise.

    None if all are good. `after` is the seq before them.
    """
    nul = lines.find(b"\0")
    match = _LINES.match(lines, 0, len(lines) if nul < 0 else lines.rfind(b"\n", 0, nul) + 1)
    end = match.end() if match else 0
    seqs = [after, *seqs_of(lines[:end])]
    if any(a >= b for a, b in pairwise(seqs)):
        last = after
        for number in _SEQS.finditer(lines):
            if int(number[1]) <= last:
                return number.start()
            last = int(number[1])
    return end if end < len(lines) else None


def last_line(lines: bytes) -> bytes:
    """Return the last of whole `lines`."""
    return lines[lines.rfind(b"\n", 0, -1) + 1 :]


def within(lines: bytes, low: int, high: int) -> bytes:
    """Return the lines with seqs low…high. `lines` must be whole and in order of seq."""
    if not lines or (record.seq_of(lines) >= low and record.seq_of(last_line(lines)) <= high):
        return lines
    inside = [line for line in lines.split(b"\n")[:-1] if low <= record.seq_of(line) <= high]
    return b"\n".join(inside) + b"\n" if inside else b""


def start_of(lines: bytes, seq: int, low: tuple[int, int], high: tuple[int, int]) -> int:
    """Return the byte at which record `seq` begins, in whole lines with consecutive seqs.

    `low`, `high`: (byte, seq) of known beginnings, low at or before it and high at or after it. Lines of equal length
    are found at once, others by interpolation; splitting all lines would take many times as long.
    """
    (begin, first), (end, after) = low, high
    if seq == after:
        return end
    while first < seq:
        guess = begin + (end - begin) * (seq - first) // (after - first)
        at = max(begin, lines.rfind(b"\n", begin, guess) + 1)
        there = record.seq_of(lines[at : at + 20])
        if there > seq:
            end, after = at, there
        elif there > first:
            begin, first = at, there
        else:
            begin, first = lines.index(b"\n", begin) + 1, first + 1
    return begin


def first_at(lines: list[bytes], target: int, field: int) -> int | None:
    """Return the first of checked lines whose SEQ or RECV_TS is at least `target`; None if there is none."""

    def stamp(at: int) -> int:
        parsed = record.parse_stored(lines[at])
        return parsed[field] if parsed else -1

    present = [at for at, line in enumerate(lines) if line]
    first = bisect_left(present, target, key=stamp)
    return present[first] if first < len(present) else None


def count_lines(fd: int, position: int, end: int) -> int:
    """Return how many lines end between two bytes of a file."""
    return sum(os.pread(fd, min(_CHUNK, end - at), at).count(b"\n") for at in range(position, end, _CHUNK))
