"""What `kmq log` shows of a log: its lines, where a record lies, and sizes. Read-only, also while the broker writes.

A log is `append` (the WAL), `<topic>` or `<topic>/<partition>`. All partitions of a topic are shown in order of seq.
In a shard only the committed part of the WAL is shown (kmq/log/committed.py).
"""

import heapq
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import NamedTuple

from kmq.config.values import parse_duration
from kmq.errors import ConfigError
from kmq.files import find_tail
from kmq.log import reader, segment, topics
from kmq.log.committed import readable_seq
from kmq.log.reader import FoundRecord, LogReader
from kmq.log.segment import RECV_TS, SEQ, is_stored
from kmq.log.segment_reader import SegmentReader
from kmq.message import record


def logs(data: str, what: str) -> list[tuple[str, LogReader]]:
    """Return (name, reader) of each log that a user names; all logs for "". Raises ConfigError if it is unknown."""
    if not what:
        every = [each for topic in topics.names(data) for each in logs(data, topic)]
        return [("append", reader.wal(data)), *every]
    if what == "append":
        return [("append", reader.wal(data))]
    topic, _, number = what.partition("/")
    if not os.path.isdir(f"{data}/topics/{topic}") or topic in ("", ".", ".."):
        raise topics.unknown(topic, topics.names(data))
    partitions = topics.load(data, topic)[0]
    if number and not (number.isdigit() and int(number) < partitions):
        raise ConfigError(f"{what!r}: unknown partition; topic {topic} has 0 to {partitions - 1}")
    wanted = [int(number)] if number else range(partitions)
    return [(f"{topic}/{each}", reader.local(data, topic, each)) for each in wanted]


def single_log(data: str, what: str) -> LogReader:
    """Return the one log that a user names. Raises ConfigError if there are several, because each has own offsets."""
    found = logs(data, what)
    if len(found) > 1:
        raise ConfigError(
            f"{what!r} has {len(found)} partitions, each with offsets of its own; name one: {what}/<partition>"
        )
    return found[0][1]


_MOST_SECONDS = 253_402_300_800  # the end of the year 9999


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < _MOST_SECONDS:  # -1 is no time: the user may mean the end, or the last record
        raise ValueError
    return seconds


def parse_time(text: str) -> int:
    """Return µs since the epoch for `2024-05-01T12:00`, `1714564800.5` or `10m` (ago)."""
    ways: list[Callable[[], float]] = [
        lambda: time.time() - parse_duration(text),
        lambda: _seconds(text),
        lambda: datetime.fromisoformat(text).timestamp(),
    ]
    for parse in ways:
        try:
            return round(parse() * 1e6)
        except ValueError:
            continue
    raise ConfigError(f"{text!r}: not a time; expected 2024-05-01T12:00, seconds since the epoch, or 30s, 10m, 24h ago")


def records(log: LogReader, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (seq, recv_ts, line) from `offset` on, up to the end of the log at the time it is reached."""
    for _, lines in log.chunks(offset):
        for line in lines.split(b"\n")[:-1]:
            stamp = record.parse_stored(line) if line else None
            if stamp is not None:
                yield *stamp, line


def _last_shown(data: str, log: LogReader) -> int:
    """Return the last seq that may be shown of this log. Every record of a partition is committed."""
    last = readable_seq(data) if log.by_seq else None
    return 1 << 63 if last is None else last


def cat(
    data: str, what: str, from_seq: int = 0, offset: int | None = None, since: str = "", until: str = ""
) -> Iterator[bytes]:
    """Yield the stored lines of a log, from a seq, an offset or a time on, until a time."""
    if offset is not None:
        begin = [(single_log(data, what), offset)]
    elif since:
        begin = [(log, log.offset_of_time(parse_time(since))) for _, log in logs(data, what)]
    else:
        begin = [(log, log.offset_of_seq(from_seq)) for _, log in logs(data, what)]
    end = parse_time(until) if until else 1 << 63
    last = _last_shown(data, begin[0][0])
    for seq, recv_ts, line in heapq.merge(*(records(log, start) for log, start in begin)):
        if recv_ts >= end or seq > last:
            return
        yield line


def find(data: str, what: str, seq: int | None, offset: int | None, at: str) -> Iterator[tuple[str, FoundRecord]]:
    """Yield the first record with at least this seq, offset or time, in each log that `what` names, and the log's name."""
    for name, log in [(what, single_log(data, what))] if offset is not None else logs(data, what):
        if offset is not None:
            seq = record.seq_of(log.read(offset, 1)[1].lstrip(b"\n") or b"9" * 18)
        found = log.find(parse_time(at), RECV_TS) if at else log.find(seq or 0, SEQ)
        if found is not None and record.seq_of(found.line) <= _last_shown(data, log):
            yield name, found


class Stat(NamedTuple):
    """Size and age of a log. `first`, `end`: seqs of the WAL, offsets of a partition. Ages: -1 if it has no record."""

    name: str
    segments: int
    first: int
    end: int
    bytes: int
    blocks: int
    oldest_s: float
    newest_s: float


def stat(data: str, what: str) -> Iterator[Stat]:
    """Yield the size and age of each log that `what` names."""
    for name, log in logs(data, what):
        listed = log.segments()
        size = blocks = 0
        for number, (first, path) in enumerate(listed):
            with SegmentReader(path, first, log.by_seq, number + 1 < len(listed)) as segment_reader:
                size += segment_reader.size
                blocks += sum(1 for _ in segment_reader.index.entries())
        oldest = log.find(0, SEQ)
        ages = _age_s(oldest.line if oldest else b""), _age_s(_last(listed[-1][1]) if listed else b"")
        end = min(log.end_offset(), _last_shown(data, log) + 1)
        yield Stat(name, len(listed), log.first_offset, end, size, blocks, *ages)


def _age_s(line: bytes) -> float:
    stamp = record.parse_stored(line)
    return -1.0 if stamp is None else time.time() - stamp[1] / 1e6


def _last(path: str) -> bytes:
    """Return the last record up to the end of a segment, which may lie in an earlier one; b"" if there is none."""
    for _, earlier in reversed([listed for listed in segment.listing(os.path.dirname(path)) if listed[1] <= path]):
        with open(earlier, "rb") as file:
            tail = find_tail(file.fileno(), os.fstat(file.fileno()).st_size, is_stored)
        if tail.last:
            return tail.last
    return b""
