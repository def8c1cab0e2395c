"""The partitions that consumers read: their offsets, and records as checked bytes of the files.

    partition = partitions.open("orders", 0)
    partition.bounds()            → (0, 20)
    partition.read(17, MIB)       → (17, b"…three lines…")

Owner       None: it only reads, without a lock. Everything here reads files, so call it in a thread. A range or a
            partition is used by one thread at a time.
Invariant   Only durable and routed records are shown: the router writes a record to its partition after durability has
            synced it. A span is returned only after each of its blocks was read and checked (kmq.log.reader). It holds
            whole lines, in order. All spans of a range together are the records first_offset…next_offset-1, `length`
            bytes. A batch is one span.
End         The end of a range is fixed at its start. If damage hides the end, the range ends with the good records
            before the damage. A reader that resumes at next_offset then reaches the damage.
Deletion    No offset ever means two records, even if a topic is deleted and declared again (kmq/log/deletions.py). A
            partition that was opened before belongs to the deleted topic, and raises RequestRefused from then on.
Files       One segment is open at a time, so a range of any length, and a batch while it has a file, costs two
            descriptors. An open segment is read to its end even if retention deletes it. A segment that is deleted, or
            replaced by compaction, before its turn raises FileNotFoundError.
Memory      A number for each partition that was read; times.py for those that were searched by time.
Not covered Access rights, and offsets of groups. A disk that returns other bytes the second time: checked bytes are
            sent from the page cache a moment later.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple, TypeVar

from kmq.files import is_settled
from kmq.gateway.core.broker import RequestRefused, check_data
from kmq.gateway.core.times import DatedRecord, ShownTimes
from kmq.log import deletions, gaps, identity, reader
from kmq.log.bounds import Bounds
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps
from kmq.log.reader import LogReader
from kmq.log.rows import CACHE, NotHereError
from kmq.log.segment import COMPACT, LOG_APPEND_TIME, RECV_TS, CheckedLines, within
from kmq.log.segment_reader import LineStart, SegmentReader
from kmq.message import record
from kmq.message.message import Message, messages
from kmq.wire.requests import Position

# --- ranges of records -----------------------------------------------------------------------------------------------

PIECE_BYTES = 2 << 20  # in a span: checking takes a few milliseconds
_NEVER = reader.NEVER


class Span(NamedTuple):
    """`nbytes` bytes from byte `begin` of the file that is open as `fd` until the next span is taken."""

    fd: int
    begin: int
    nbytes: int

    def read(self) -> bytes:
        """Return the bytes. Raises ConnectionAbortedError if there are fewer: their number may have been sent."""
        data = os.pread(self.fd, self.nbytes, self.begin)
        if len(data) != self.nbytes:
            raise ConnectionAbortedError("the file has been cut")
        return data


class _Part(NamedTuple):
    """The bytes begin…stop-1 of one segment: the records offset…next_offset-1."""

    first: int
    path: str
    is_sealed: bool
    file: tuple[int, int]  # inode, size: in a sealed segment they change only if it is replaced
    offset: int
    begin: int
    next_offset: int
    stop: int


class Range:
    """The records start…end-1 of a log, as far as they exist."""

    def __init__(self, log: LogReader, start: int, end: int, max_bytes: int = 0) -> None:
        """`max_bytes`: end with a block after about that many bytes of one segment; 0: no limit."""
        self.first_offset = self.next_offset = start
        self._log = log
        self._parts: list[_Part] = []
        self._locate(end, max_bytes)
        self.length = sum(part.stop - part.begin for part in self._parts)
        self.reached = self.first_offset  # offset after the spans that were taken
        self._spans = self._check()
        self._lock = threading.Lock()  # a request that is cancelled closes while a thread may be taking a span still

    def next_span(self) -> Span | None:
        """Return the next span; None at the end. Raises DamageError once all earlier good records are taken."""
        with self._lock:
            return next(self._spans, None)

    def close(self) -> None:
        """End the range, after a span that is being taken. Python 3.11 crashes if a generator is closed as it runs."""
        with self._lock:
            self._spans.close()

    # --- locating ----------------------------------------------------------------------------------------------------

    def _locate(self, end: int, max_bytes: int) -> None:
        begins, listed = self._log.listed(self.first_offset)
        for found in listed:
            first, following = found.first, found.end
            if first >= end:
                return
            try:
                segment = found.open()
            except (DamageError, NotHereError):
                if self._parts:
                    return  # a shorter range: the good records before the damage
                raise
            with segment:
                offset, begin, piece = first, 0, None
                if not self._parts:
                    begin_at = max(begins, first)
                    piece = _holding(segment, begin_at, self._log.resume_point(segment, begin_at))
                    if piece is None:
                        _check_whole(segment, begin_at, following)
                        continue
                    offset, begin = piece.offset, piece.position
                    self.first_offset = self.next_offset = offset
                    if max_bytes:
                        end = min(end, following, _last_block_end(segment, piece, begin + max_bytes))
                    if offset >= end:
                        return
                stop, self.next_offset = segment.size, following
                if piece is not None and piece.end == segment.size and piece.next_offset <= end < following:
                    self.next_offset = piece.next_offset  # a follower gets few lines, which need no second look
                elif end < following:
                    stop, self.next_offset = _end(segment, LineStart(offset, begin), end)
                if stop > begin or segment.sealed:
                    file = segment.inode, segment.size
                    part = _Part(first, found.path, segment.sealed, file, offset, begin, self.next_offset, stop)
                    self._parts.append(part)
                if found.is_last:
                    return

    # --- checking ----------------------------------------------------------------------------------------------------

    def _check(self) -> Generator[Span, None, None]:
        for part in self._parts:
            with SegmentReader(part.path, part.first, self._log.by_seq, part.is_sealed) as segment:
                if part.is_sealed and (segment.inode, segment.size) != part.file:
                    raise FileNotFoundError(f"{part.path}: has been replaced")
                yield from self._check_part(segment, part)

    def _check_part(self, segment: SegmentReader, part: _Part) -> Generator[Span, None, None]:
        at, offset = part.begin, part.offset
        is_over = False
        while not is_over:
            end, offset, is_over, damage = _checked(segment, LineStart(offset, at), part.stop)
            if end > at:
                self.reached = part.next_offset if end == part.stop else offset
                if damage is None:
                    self._log.note_read(segment, LineStart(self.reached, end))
                yield Span(segment.fd, at, end - at)
                at = end
            if damage is not None:
                raise damage
        if at < part.stop:
            raise segment.damage(at, part.stop, offset, offset + 1, "the log ends inside the block")
        _check_whole(segment, offset, part.next_offset)


def _checked(segment: SegmentReader, start: LineStart, stop: int) -> tuple[int, int, bool, DamageError | None]:
    """Check the lines from `start` on, at most a span. Return (byte, offset) of their end, and the error there, if any.

    No line is kept, because a client may take its time to read a span, and a line may have KMQ_MAX_LINE.
    """
    offset, end = start
    try:
        for piece in segment.checked_lines(start.offset, start):
            following = min(piece.position + len(piece.lines), stop)
            if following <= start.position:
                continue  # the block before, against which an unindexed start is checked
            end, offset = following, piece.next_offset
            if end == stop or end - start.position >= PIECE_BYTES:
                return end, offset, end == stop, None
    except DamageError as err:
        return end, offset, True, err
    return end, offset, True, None


def _check_whole(segment: SegmentReader, offset: int, following: int) -> None:
    """Raise DamageError if the end of a sealed segment is missing. The WAL may have gaps, from drop_oldest."""
    if segment.sealed and not segment.by_seq and offset < following:
        raise segment.damage(segment.size, segment.size, offset, following, "the log ends before the next segment")


def _holding(segment: SegmentReader, offset: int, near: LineStart) -> CheckedLines | None:
    """Return the lines of the block with the first record at `offset` or later, from that record on."""
    for piece in segment.checked_lines(offset, near):
        if piece.next_offset > offset:
            lines = _rest(piece, offset, segment.by_seq)
            first = record.seq_of(lines) if segment.by_seq else max(offset, piece.offset)
            return CheckedLines(first, piece.position + len(piece.lines) - len(lines), lines, piece.next_offset)
    return None


def _rest(piece: CheckedLines, offset: int, by_seq: bool) -> bytes:
    """Return the lines of a block from record `offset` on."""
    if by_seq:
        return within(piece.lines, offset, _NEVER)
    ahead = offset - piece.offset
    return piece.lines.split(b"\n", ahead)[ahead] if ahead > 0 else piece.lines


def _last_block_end(segment: SegmentReader, piece: CheckedLines, limit: int) -> int:
    """Return the offset after the last block up to byte `limit`, or after `piece` if that is later."""
    if limit >= segment.size:
        return _NEVER
    with suppress(DamageError):
        last = segment.index.last(lambda entry: entry.position <= limit)
        return max(piece.next_offset, last.entry.offset if last else 0)
    return piece.next_offset


def _end(segment: SegmentReader, near: LineStart, end: int) -> tuple[int, int]:
    """Return (byte, offset) where the records before `end` stop, given the start of an earlier line."""
    with suppress(DamageError):
        return _stop(segment, end, near, end)
    return _stop(segment, near[0], near, end, near[1] + PIECE_BYTES)


def _stop(segment: SegmentReader, offset: int, near: LineStart, end: int, limit: int = _NEVER) -> tuple[int, int]:
    """Return the same as `_end` by reading from record `offset` on, at most to byte `limit` or to damage."""
    following, stop = near
    found = False
    try:
        for piece in segment.checked_lines(offset, near):
            found, following, stop = True, piece.next_offset, piece.position + len(piece.lines)
            if following >= end:
                return stop - (len(_rest(piece, end, segment.by_seq)) if following > end else 0), end
            if stop >= limit:
                break
    except DamageError:
        if not found:
            raise
    return stop, following


# --- partitions ------------------------------------------------------------------------------------------------------

END = (1 << 63) - 1  # beyond any offset
_MOST_TIMES = 10_000  # partitions whose shown times are kept
_DAMAGED_S = 600.0  # an object of the cache that is damaged again so soon is not fetched in again
MAX_BATCH = PIECE_BYTES  # bytes: so a batch is always one span
Signature = tuple[int, ...]
T = TypeVar("T")


IN_MEMORY = 1 << 16  # bytes of a batch that is cheaper to hold than an open file


class Batch(NamedTuple):
    """`lines` records from `offset` on, the bytes of `span`. Close `segment` when they have been sent.

    For a batch of at most IN_MEMORY bytes `segment` is closed already, and None. `text` has the bytes.
    """

    segment: SegmentReader | None
    offset: int
    lines: int
    span: Span
    text: bytes = b""


def _read_batch(log: LogReader, start: int, end: int, max_bytes: int) -> Batch | None:
    """Return records from `start` on and before `end`, of one segment; None if there are none.

    The segment is opened once, and each block is checked once. Raises FileNotFoundError if a segment has gone
    meanwhile, NotHereError if they lie in the store alone.
    """
    start, listed = log.listed(start)
    for found in listed:
        first, following = found.first, found.end
        if first >= end:
            return None
        with ExitStack() as opened:
            segment = opened.enter_context(found.open())
            batch = _first_of(segment, log, max(start, first), end, max_bytes)
            if batch is not None and batch.span.nbytes <= IN_MEMORY:
                return batch._replace(segment=None, text=batch.span.read())
            if batch is not None:
                opened.pop_all()
                return batch
            _check_whole(segment, max(start, first), following)
    return None


def _first_of(segment: SegmentReader, log: LogReader, start: int, end: int, max_bytes: int) -> Batch | None:
    """Return a batch of one segment. Blocks are taken until they are enough, the last one only as far as it fits."""
    begin, last = -1, None
    try:
        for piece in segment.checked_lines(start, log.resume_point(segment, start), log.near_in(segment)):
            if piece.next_offset <= start:
                continue
            if last is None:
                begin, start = piece.end - len(_rest(piece, start, False)), max(start, piece.offset)
            last = piece
            if piece.end - begin >= max_bytes or piece.next_offset >= end:
                break
    except DamageError:
        if last is None:
            raise
    if last is None:
        return None
    stop, reached = last.end, last.next_offset
    if reached > end:
        stop, reached = stop - len(_rest(last, end, False)), end
    if stop - begin > max_bytes:
        at = max(begin, last.position)  # everything before it fits
        lines = last.lines[at - last.position : stop - last.position]
        keep = lines.rfind(b"\n", 0, max_bytes - (at - begin)) + 1
        if not keep and at == begin:
            keep = lines.find(b"\n") + 1
        stop, reached = at + keep, max(start, last.offset) + record.count_lines(lines[:keep])
    log.note_read(segment, LineStart(reached, stop))
    return Batch(segment, start, reached - start, Span(segment.fd, begin, stop - begin))


def moment(position: Position) -> Position:
    """Return a position for later use. `latest` becomes the present time: damage hides the end."""
    return Position("received", time.time_ns() // 1000) if position.kind == "latest" else position


class Partition:
    """One partition of a topic. One thread at a time may use it."""

    def __init__(self, owner: "Partitions", topic: str, number: int) -> None:
        self.topic, self.number = topic, number
        self._owner, self._from_seq = owner, owner.from_seq(topic)
        self._log = reader.partition(owner.data, topic, number)
        self._active: tuple[Signature, str] = ((), "")  # signature of the directory, path of the active segment

    @property
    def directory(self) -> str:
        return self._log.directory

    @property
    def from_seq(self) -> int | None:
        """Return the seq from which on its topic is in force; None while the declaration is pending."""
        return self._from_seq

    def signature(self) -> Signature:
        """Return numbers that change when records are added. Cheap. Take them before a read that may find nothing."""
        with suppress(FileNotFoundError):
            found = os.stat(self.directory)
            seen = found.st_ino, found.st_mtime_ns
            cached, active = self._active
            if cached != seen:
                segments = self._log.segments()
                active = segments[-1][1] if segments else ""
                self._active = seen if is_settled(seen) else (), active
            return (*seen, os.stat(active).st_size) if active else seen
        return ()

    def check(self) -> None:
        """Raise RequestRefused if the topic has been deleted since this partition was opened."""
        now = self._owner.from_seq(self.topic)
        if self._from_seq is None:
            self._from_seq = now
        if now != self._from_seq:
            raise RequestRefused("unknown_topic", f"topic {self.topic} was deleted; what has its name now is another")

    def is_current(self) -> bool:
        """Return False if the topic has been deleted since this partition was opened."""
        try:
            self.check()
        except RequestRefused as err:
            return err.code == "not_ready"
        return True

    def start(self) -> int:
        """Return the offset of the first record that is left; without records, of the next one."""
        return self.bounds()[0]

    def end(self) -> int:
        """Return the offset that the next record gets. It never falls: when the disk is full the router cuts off
        half-written records, and writes the same ones there when it has room.
        """
        return self.bounds()[1]

    def bounds(self) -> tuple[int, int]:
        """Return (start, end)."""
        if not self._log.segments():
            empty = self._owner.empty_at(self)
            return empty, self._owner.reach(self, empty)
        end = self._log.end_offset()
        return min(self._log.first_readable(), end), self._owner.reach(self, end)

    def begin(self, offset: int = 0) -> int:
        """Return the start for a reader of `offset`. Raises DamageError if `tier` does not say what lies before it."""
        return self._checked_start(self.start(), offset)

    def _checked_start(self, start: int, offset: int) -> int:
        if offset < start:
            self._log.listed(offset)
        return start

    def gaps(self) -> Gaps:
        """Return the gaps of the partition (kmq/log/gaps.py)."""
        return self._log.gaps()

    def first_after(self, offset: int) -> int:
        """Return the first offset of the partition, or after a gap in which `offset` lies."""
        return max(self.begin(offset), self.passed(offset))

    def passed(self, offset: int) -> int:
        """Return the offset at which a reader at `offset` resumes: the end of the gap that it lies in, else itself."""
        return gaps.passed(self._log.gaps(), offset)

    def nearest(self, offset: int) -> int:
        """Return this offset, or the first or the end offset if it lies outside. Raises DamageError as `begin` does."""
        end = self.end()
        start = min(self._log.first_readable(), end) if self._log.segments() else end
        return min(max(self._checked_start(start, offset), offset), end)

    def first_left(self, offset: int) -> int:
        """Return this offset, or the first of the partition if that is higher. Reads no record. Raises as `begin` does."""
        first = self._log.first_readable() if self._log.segments() else self._owner.empty_at(self)
        return max(offset, self._checked_start(first, offset))

    def locate(self, position: Position) -> int:
        """Return the present offset of a position. Raises RequestRefused for an offset beyond the end."""
        if position.kind == "earliest":
            return self.begin()
        if position.kind == "latest":
            return self.end()
        if position.kind == "time":
            shown = self.first_shown(-(-position.value // 1000))
            return self.end() if shown is None else shown.offset
        if position.kind == "received":
            return self._owner.look(self._log.offset_of_time, position.value)
        if position.kind == "seq":  # of the WAL: the first record with this seq or a later one
            return self._owner.look(self._log.offset_of_seq, position.value)
        start, end = self.begin(position.value), self.end()
        if position.value > end:
            self._owner.check_ends()
            text = f"{self.topic}/{self.number}: offset {position.value} is beyond first={start} end={end}"
            raise RequestRefused("out_of_range", text, field="offset", first=start, end=end)
        return max(start, position.value)

    def first_shown(self, target: int) -> DatedRecord | None:
        """Return the first message that is shown with `target` (ms) or a later time; None if there is none.

        Of records that lie in rows the time of receipt counts: it is known without reading them.
        """
        cold = self._log.last_cold()
        if not self._owner.shows_receipt(self.topic) and (cold is None or cold[0] < target * 1000):
            return self._owner.times_of(self).first(self.start() if cold is None else cold[1], self.read, target)
        found = self._owner.look(self._log.find, target * 1000, RECV_TS)
        return None if found is None else DatedRecord(record.stamp(found.line)[1] // 1000, found.offset)

    def highest_shown(self) -> DatedRecord | None:
        """Return the first of the messages that are shown with the highest time; None if the partition is empty.

        Records that lie in rows do not count, because they are older than what the disk has; unless it has none.
        """
        if not self._owner.shows_receipt(self.topic):
            cold = self._log.last_cold()
            found = self._owner.times_of(self).highest(self.start() if cold is None else cold[1], self.read)
            if found is not None or cold is None:
                return found
        start, end = self.bounds()  # the last record of a partition is never compacted
        end = gaps.before(self.gaps(), end)
        last = self._log.stamp_of(end - 1) if start < end else None
        return None if last is None else self.first_shown(last[1] // 1000)

    def range(self, start: int, end: int = END) -> Range:
        """Return the records start…end-1, as far as they exist. Raises DamageError."""
        self.check()
        return self._owner.look(Range, self._log, start, end)

    def next_span(self, selection: Range) -> Span | None:
        """Return the next span of a range. Raises DamageError; FileNotFoundError if a new range has to be asked for."""
        try:
            return selection.next_span()
        except DamageError as err:
            if self._owner.removed_from_cache(err):
                raise FileNotFoundError(f"{err.path}: has to be fetched in again") from err
            raise

    def batch(self, offset: int, max_bytes: int, most: int = END) -> Batch | None:
        """Return the next records from `offset` on: at most `max_bytes`, or one longer line. None: there are none.

        `most`: the most offsets. If the first records are gone, the batch begins at the first offset that is left.
        Raises DamageError once all good records before the damage were returned.
        """
        self.check()
        while True:
            end = min(END, offset + most)
            batch = self._owner.look(_read_batch, self._log, offset, end, min(max_bytes, MAX_BATCH))
            if batch is not None:
                self._owner.reach(self, batch.offset + batch.lines)
                return batch
            if most == END or (first := self.first_after(offset)) <= offset:
                return None
            offset = first  # more than `most` offsets are gone, or in a gap

    def read(self, offset: int, max_bytes: int) -> tuple[int, bytes]:
        """Return (offset of the first line, whole checked lines): as `batch` does, in memory."""
        self.check()
        first, lines = self._owner.look(self._log.read, offset, max_bytes)
        self._owner.reach(self, first + record.count_lines(lines))
        return first, lines

    def chunks(self, offset: int, max_bytes: int) -> Iterator[tuple[list[Message], int]]:
        """Yield the messages from `offset` on, at most `max_bytes` at once, each time with the offset after them."""
        while (found := self.read(offset, max_bytes))[1]:
            first, lines = found
            offset = first + lines.count(b"\n")
            yield messages(self.topic, self.number, first, lines, self._owner.marks_from), offset

    def back(self, end: int, nbytes: int) -> int:
        """Return the offset where the last `nbytes` before `end` begin: at least a record, at most all its segment."""
        return min(end - 1, self._owner.look(self._log.back, end, nbytes))

    def received_at(self, offset: int) -> float | None:
        """Return when the record at `offset`, or the next one that is left, was received, in unix seconds."""
        first, lines = self.read(offset, 1)
        line = next((line for line in lines.split(b"\n") if line), b"")
        return Message(self.topic, self.number, first, line).recv_timestamp if line else None


class Partitions:
    """All partitions of a data directory."""

    def __init__(self, data: str, is_unsure: Callable[[], bool] = lambda: False) -> None:
        """`is_unsure`: another broker of our shard may lead, and may have later records."""
        self.data, self.marks_from, self._is_unsure = data, identity.marks_from(data), is_unsure
        self._bounds = Bounds(data)
        self.gaps = self._bounds.gaps  # (topic, number) → the gaps of a partition, cached as `bounds` are
        self._reached: dict[tuple[str, int], int] = {}
        self._removed: dict[str, float] = {}  # directories of the cache that were damaged, and when (monotonic)
        self._removing = threading.Lock()
        # by partition, with its topic's from_seq; most recently used last
        self._times: dict[tuple[str, int], tuple[int | None, ShownTimes]] = {}
        self._times_lock = threading.Lock()

    def times_of(self, partition: Partition) -> ShownTimes:
        """Return the index of a partition's shown times."""
        place, name = (partition.topic, partition.number), f"{partition.topic}/{partition.number}"
        with self._times_lock:
            from_seq, times = self._times.pop(place, (partition.from_seq, ShownTimes(name)))
            if from_seq != partition.from_seq:  # of a deleted topic of that name
                times = ShownTimes(name)
            self._times[place] = partition.from_seq, times
            if len(self._times) > _MOST_TIMES:
                del self._times[next(iter(self._times))]
            return times

    def look(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what work that reads files returns.

        It runs again if retention or compaction removed a segment meanwhile, or if an object of the cache was damaged.
        """
        while True:
            with suppress(FileNotFoundError):
                try:
                    return work(*arguments)
                except DamageError as err:
                    if not self.removed_from_cache(err):
                        raise

    def removed_from_cache(self, damage: DamageError) -> bool:
        """Remove a damaged object of the cache, to be fetched in once more. Return False if it is not one.

        Also if it was damaged a moment ago: a disk that harms each copy is damage, and costs a fetch in ten minutes.
        """
        directory, root = os.path.dirname(damage.path), f"{os.path.abspath(self.data)}/{CACHE}"
        if not directory.startswith(f"{root}/"):
            return False
        from kmq.tier.cache import remove_object

        with self._removing:
            now = time.monotonic()
            if not os.path.exists(directory):
                return True  # another reader of it has removed it
            self._removed = {path: at for path, at in self._removed.items() if now - at < _DAMAGED_S}
            if directory in self._removed:
                return False
            self._removed[directory] = now
            try:
                remove_object(root, directory)
            except OSError:  # another user's
                return False
        return True

    def reach(self, partition: Partition, end: int) -> int:
        """Note that a partition has records up to `end`. Return the highest end it ever had. Ends only grow, even in a
        second life of a topic.
        """
        place = partition.topic, partition.number
        reached = self._reached.get(place, 0)
        if end > reached:
            self._reached[place] = reached = end
        return reached

    def check_ends(self) -> None:
        """Raise RequestRefused if an offset beyond the end may be one that another broker has shown."""
        if self._is_unsure():
            text = "too few replicas answer: another broker may lead, and know a later end; ask again"
            raise RequestRefused("not_ready", text)

    def reached(self, place: tuple[str, int]) -> int:
        """Return the offset up to which a partition is known to have records, without a look at its files."""
        return self._reached.get(place, 0)

    def count(self, topic: str) -> int:
        """Return how many partitions a topic has. Raises RequestRefused if there is no such topic."""
        return self.declared(topic)[0]

    def declared(self, topic: str) -> tuple[int, int | None]:
        """Return (partitions, from_seq) of a topic; from_seq is None while its declaration is pending.

        Raises RequestRefused if there is no such topic.
        """
        if record.is_topic_name(topic):
            found = self._bounds.declared(topic)
            # After the read: if the data directory goes meanwhile, the declaration reads as another topic's.
            if os.path.isdir(f"{self.data}/topics/{topic}"):
                return found
        check_data(self.data)
        raise RequestRefused("unknown_topic", f"there is no topic {topic}; a first message makes it")

    def declared_of(self, topics: Iterable[str]) -> dict[str, tuple[int, int | None]]:
        """Return `declared` of each of these topics that exists. Raises RequestRefused if there are no topics."""
        found = {}
        for topic in topics:
            try:
                found[topic] = self.declared(topic)
            except RequestRefused as err:
                if err.code != "unknown_topic":
                    raise
        return found

    def first_count(self, topic: str) -> int:
        """Return how many partitions a topic that exists had before it grew for the first time."""
        found = self._bounds.declaration(topic)
        return found.grown[0][1] if found.grown else found.partitions

    def is_compacted(self, topic: str) -> bool:
        """Return True if an existing topic keeps only the last record of each key."""
        return dict(self._bounds.declaration(topic).limits).get("cleanup") == COMPACT

    def shows_receipt(self, topic: str) -> bool:
        """Return True if Kafka consumers of an existing topic are shown the time of receipt."""
        return dict(self._bounds.declaration(topic).limits).get("message_timestamp_type") == LOG_APPEND_TIME

    def from_seq(self, topic: str) -> int | None:
        """Return the seq from which on the topic is in force; None while its declaration is pending."""
        return self.declared(topic)[1]

    def open(self, topic: str, number: int) -> Partition:
        """Return a partition. Raises RequestRefused if it does not exist."""
        self._check(topic, number)
        return Partition(self, topic, number)

    def first_beyond(self, offsets: Iterable[tuple[tuple[str, int], int]]) -> RequestRefused | None:
        """Return the refusal of the first of these offsets that is beyond its partition's end; None if none is."""
        for place, offset in offsets:
            try:
                self.open(*place).locate(Position("offset", offset))
            except RequestRefused as err:
                if err.code in ("out_of_range", "not_ready"):
                    return err
            except DamageError:
                pass  # its end is unknown
        return None

    def bounds(self, topic: str, number: int) -> tuple[int, int]:
        """Return (first offset, end offset), cached until a file changes. Refuses what `open` refuses."""
        self._check(topic, number)
        found = self._bounds.of(topic, number)
        return found if found[1] else (self.empty_at(Partition(self, topic, number)),) * 2

    def _check(self, topic: str, number: int) -> None:
        count = self.count(topic)
        if not 0 <= number < count:
            raise RequestRefused("unknown_partition", f"topic {topic} has {count} partitions, so there is no {number}")

    def empty_at(self, partition: Partition) -> int:
        """Return the offset at which a partition without segments begins."""
        check_data(self.data)
        first = deletions.Deleted.of(self.data).first_offset(partition.topic, partition.number)
        if forks := gaps.forks(self.data):
            declared = self._bounds.declaration(partition.topic)
            born = identity.NEVER if declared.from_seq is None else declared.topic("").exists_since(partition.number)
            first = max(first, gaps.least_offset(forks, partition.topic, born))
        return first
