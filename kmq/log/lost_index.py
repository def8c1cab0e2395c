"""Rewrites the lost index of a segment (a power cut or a person removed it) if its records belong where they lie.

A reader does not trust a segment without the first line of its index (segment_reader.py). So a start looks at the index
of every segment. An index that is missing, empty, all NULs, or cut in its first or last line is rewritten from the
records.

Owner       the owner of the log at its start: durability for the WAL, the router for a queue.
Invariant   A segment gets a label only if its records are whole and belong there: stored lines with rising seqs, between
            those of its neighbours, as many as its place has room for; and the other copy (WAL and queue) has nothing
            else under the seqs of its first and last record. Otherwise it stays as it is, and no reader trusts it. An
            existing label is never changed: a label of another place is damage.
Crash       Repeated by the next start. The next checkpoint, or the caller, syncs what was written.
Cost        One small read for each segment whose index is whole.
"""

import contextlib
import os
from collections.abc import Callable, Sequence

from kmq.files import WaitForRoom
from kmq.log import dropped, reader, segment, topics
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.index import MAX_LABEL, IndexWriter, must_have_label, read_entries, read_label
from kmq.log.segment import SEQ, Segment
from kmq.log.segment_reader import SegmentReader
from kmq.message import record
from kmq.message.routing import Table, resolve

# Returns how the other copy contradicts a stored line, without its newline; "" if it does not.
Contradiction = Callable[[bytes], str]


def is_whole(log_path: str) -> bool:
    """Return True if the index of a log that has records has a label, if it needs one, and ends with a whole line."""
    try:
        fd = os.open(segment.index_path(log_path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        head, size = os.pread(fd, MAX_LABEL, 0), os.fstat(fd).st_size
        end = os.pread(fd, 1, size - 1) if size > MAX_LABEL else head[-1:]
    finally:
        os.close(fd)
    if end != b"\n":
        return False
    if label := read_label(head):
        return size > len(label)
    with open(log_path, "rb") as log:
        return not must_have_label(log_path, log.fileno())


def check(
    segments: Sequence[Segment],
    number: int,
    by_seq: bool,
    end: int,
    contradiction: Contradiction,
    sign: Callable[[], None],
) -> None:
    """Raise DamageError unless the index of this segment may be rewritten. An index with a label always may.

    `segments`: of the log, in order. `end`: the offset at which the segment ends; in the WAL the first seq of the next
    segment. `sign` is called during long work.
    """
    part, before = segments[number], segments[number - 1] if number else None
    path = segment.index_path(part.path)
    reader.check_place(part.path, part.first, by_seq)
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if read_label(file.read(MAX_LABEL)):
            return
    if not read_entries(path, part.size):  # no entry describes a record
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    with SegmentReader(part.path, part.first, by_seq, sealed=False, owner=True) as opened:
        last, following, position = b"", part.first, 0
        for checked in opened.checked_lines(part.first):
            sign()
            lines = checked.lines.rstrip(b"\n")
            last, following, position = lines[lines.rfind(b"\n") + 1 :] or last, checked.next_offset, checked.end
        what = "its end is torn" if position < part.size else _misfit(following, end, by_seq, part.path)
        first = opened.stamp_at(0)
        if not what and first is not None:
            after = segments[number + 1] if number + 1 < len(segments) else None
            seqs = first[0], record.seq_of(last)
            what = _disorder(*seqs, before, after) or contradiction(_first_line(opened)) or contradiction(last)
        if what:
            what = f"no index says which segment it is, and {what}"
            raise MisplacedError(part.path, 0, part.size, part.first, end, what)


def _misfit(following: int, end: int, by_seq: bool, path: str) -> str:
    """Return how a segment whose last record is before `following` contradicts its `end`; "" if it does not."""
    if by_seq:
        data = os.path.dirname(os.path.dirname(path))
        is_short = following < end and dropped.without(following, end - 1, dropped.accounted(data))
        return f"ends with seq {following - 1}" if following > end or is_short else ""
    return f"ends with record {following - 1}, not {end - 1}" if following != end else ""


def _disorder(first: int, last: int, before: Segment | None, after: Segment | None) -> str:
    """Return how the seqs first…last overlap those of the segments `before` and `after`; "" if they lie between."""
    if before is not None and (seq := segment.last_seq(before)) >= first:
        return f"begins with seq {first}, but the segment before it ends with seq {seq}"
    if after is not None:
        with open(after.path, "rb") as file:
            seq = record.stamp(file.read(64).lstrip(b"\n"))[0]
        if 0 < seq <= last:
            return f"ends with seq {last}, but the segment after it begins with seq {seq}"
    return ""


def _first_line(opened: SegmentReader) -> bytes:
    """Return the first record of a segment whose lines were checked."""
    data, want = b"", 1 << 12
    while not data.lstrip(b"\n").partition(b"\n")[1] and len(data) < opened.size:
        data, want = os.pread(opened.fd, want, 0), want * 4
    return data.lstrip(b"\n").partition(b"\n")[0]


def write(part: Segment, by_seq: bool, wait_for_room: WaitForRoom, sign: Callable[[], None]) -> str:
    """Rewrite the index of a sealed segment; return its path. Raises DamageError if the old entries differ."""
    path = segment.index_path(part.path)
    reader.indexed_end(part.path, part.first, by_seq)  # the damage must not get a new crc
    fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        index = IndexWriter(path, wait_for_room, by_seq)
        index.resume(fd, part.size, part.first, sign)
        index.seal()
    finally:
        os.close(fd)
    return path


# --- what the other copy says ----------------------------------------------------------------------------------------


def queue_contradiction(data: str, table: Table, line: bytes) -> str:
    """Return how the queues contradict a record of the WAL; "" if they do not, or cannot say. `table`: all topics."""
    seq = record.seq_of(line)
    route = resolve(table, record.routing_key_of(line), seq)
    topic = table.get(route.topic)
    if topic is None or topic.is_gone or dropped.without(seq, seq, dropped.read(data, "durable")) == []:
        return ""
    log = reader.local(data, topic.name, topic.partition_of(route, seq))
    try:
        found = log.find(seq, SEQ)
        others = found is not None and found.offset > log.first_offset
        if found is None or (record.seq_of(found.line) > seq and not others):
            return ""  # the queue ends before it, or begins after it
    except (DamageError, FileNotFoundError):
        return ""
    if found.line == line or (record.seq_of(found.line) > seq and topics.is_compacted(data, topic.name)):
        return ""
    return f"its record {seq} is not the one that {topic.name} has"


def wal_contradiction(data: str, line: bytes) -> str:
    """Return how the WAL contradicts a record of a queue; "" if it does not, or does not have the seq any more."""
    seq = record.seq_of(line)
    if seq < reader.first_seq(data) or not dropped.without(seq, seq, dropped.accounted(data)):
        return ""
    try:
        found = reader.wal(data).read(seq, 1)[1]
    except DamageError:
        return ""
    return "" if found.partition(b"\n")[0] == line else f"the WAL has another record under seq {seq}"
