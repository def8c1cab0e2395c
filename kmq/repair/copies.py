"""Copies: compares the two copies of each record, in the WAL and in its queue. No crc shows a difference between them.

Example: the WAL has `7|…|a|||x` and queue a/0 has `7|…|a|||y`. Both have a right crc; the result is seq 7, `altered`.

The WAL is read in windows of seqs, and each line is reduced to its crc32 and the partition it belongs to. Then the
records of each queue in that window are read and compared. So every byte is read once, and a queue is read only if it
has records to compare.

Invariant   Copies never writes.
Memory      12 bytes per record of a window, and some numbers per queue.
Live        Only records that router.ckpt covered at the start are compared, because the router no longer writes there.
            Retention and compaction may remove records meanwhile, so on a live directory a missing record does not
            count as a difference.
Not covered Blocks that a reader refuses as damaged are skipped here; verify reports each of them.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq.log import checkpoint, dropped, reader, topics
from kmq.log.damage import DamageError
from kmq.log.reader import LogReader
from kmq.log.segment import last_line
from kmq.message import record, routing
from kmq.message.routing import Topic
from kmq.repair.directory import At, DataDirectory

WINDOW_BYTES = 32 << 20  # of the WAL
_READ = 1 << 20
_LARGE_GAP = 1 << 16  # seqs without a record, after which a window ends
_NOWHERE = -1  # no record in the WAL
_NEVER = 1 << 62


# The words for faults, here and in the audit (kmq/spark/audit/findings.py):
#
#     gap         a seq that the WAL lacks, and that nothing names
#     dropped     a record that dropped.log names
#     lost        a record that no queue has, or, after a repair, no copy
#     altered     two copies of a record that differ
#     misplaced   a record in a queue, or a segment in a place, where it does not belong


class Difference(NamedTuple):
    """A seq whose two copies differ."""

    seq: int
    kind: str  # a key of WHAT
    topic: str
    partition: int
    offset: int  # in that queue; -1: it is missing there


WHAT = {
    "altered": "another record than the WAL has under this seq",
    "foreign": "a record that the WAL does not have",
    "misplaced": "a record that belongs in another queue",
    "lost": "missing here, but the WAL has it",
}


class _SeqWindow(NamedTuple):
    """Consecutive seqs of the WAL, from `base` on."""

    base: int
    crcs: "array[int]"  # crc32 of each record; 0: no record
    queues: "array[int]"  # number of the queue that each record belongs to, or _NOWHERE
    since: int  # at most `base`: the WAL has no record of the seqs since…base-1

    @property
    def end(self) -> int:
        return self.base + len(self.crcs)


class _QueueCursor:
    """How far a queue has been compared."""

    def __init__(self, data: str, at: At) -> None:
        self.at, self.log = at, reader.local(data, *at)
        self.offset = self.log.first_offset
        self.first_seq = 0  # of its oldest record; 0: none was read yet
        self.next_seq = 0  # at most the seq of its next record


class Copies:
    """One comparison of a data directory."""

    def __init__(
        self,
        data: str,
        upto: int,
        gaps: list[dropped.SeqRange],
        is_live: bool,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Compare up to seq `upto`. `gaps`: seqs that a queue may lack, in order."""
        self.data, self._upto, self._is_live, self._progress = data, upto, is_live, progress
        self._table = checkpoint.next_table(data)
        changes = (seq for topic in self._table.values() for seq in topic.changes())
        self._cuts = sorted([self._table.marks_from, *changes])
        self._cursors = {at: _QueueCursor(data, at) for at in DataDirectory(data).queues()}
        self._numbers = {at: number for number, at in enumerate(self._cursors)}
        self._targets: dict[bytes, int | Topic] = {}
        self._gaps = gaps
        self.damaged: set[At] = set()  # queues with blocks that a reader refuses
        self._compacted = {name for name in topics.names(data) if topics.is_compacted(data, name)}

    def differences(self, routed: int) -> Iterator[Difference]:
        """Yield the seqs whose copies differ. `routed`: up to this seq every record must be in its queue."""
        for window in self._windows():
            seen = bytearray(len(window.crcs))
            for cursor in self._cursors.values():
                if cursor.next_seq < window.end:
                    yield from self._compare(cursor, window, seen)
            if not self._is_live:
                yield from self._lost(window, seen, min(window.end - 1, routed))

    # --- the WAL -----------------------------------------------------------------------------------------------------

    def _windows(self) -> Iterator[_SeqWindow]:
        log = reader.wal(self.data)
        base, crcs, numbers, size = log.first_offset, array("I"), array("i"), 0
        since = base
        for lines in _all_lines(log, base, self._upto):
            for line in lines:
                seq_text, _, key, _ = line.split(b"|", 3)  # hot loop: seq and routing key of every record
                seq = int(seq_text)
                if seq > self._upto:
                    break
                gap = seq - base - len(crcs)
                if gap > _LARGE_GAP and crcs:  # after a fork it has 10^9 seqs
                    yield _SeqWindow(base, crcs, numbers, since)
                    since, crcs, numbers, size = base + len(crcs), array("I"), array("i"), 0
                if gap > 0 and not crcs:
                    base, gap = seq, 0
                crcs.extend([0] * gap)
                numbers.extend([_NOWHERE] * gap)
                crcs.append(zlib.crc32(line))
                numbers.append(self._number_of(key, seq))
                size += len(line)
            self._progress(sum(map(len, lines)))
            if size >= WINDOW_BYTES:
                yield _SeqWindow(base, crcs, numbers, since)
                base, crcs, numbers, size = base + len(crcs), array("I"), array("i"), 0
                since = base
        if crcs:
            yield _SeqWindow(base, crcs, numbers, since)

    def _number_of(self, key: bytes, seq: int) -> int:
        # A topic came into force, which may take keys from a shorter one; or marks came into force.
        while self._cuts and seq >= self._cuts[0]:
            del self._cuts[0]
            self._targets.clear()
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._target(key, seq)
            if len(self._targets) > 1 << 16:
                self._targets.clear()
        if isinstance(target, Topic):
            return self._numbers.get((target.name, target.turn_of(seq)), _NOWHERE)
        return target

    def _target(self, key: bytes, seq: int) -> int | Topic:
        route = routing.resolve(self._table, key, seq)
        topic = self._table.get(route.topic)
        if topic is None:
            return _NOWHERE
        if topic.partitions > 1 and route.is_spread:
            return topic
        return self._numbers.get((topic.name, topic.partition_of(route, seq)), _NOWHERE)

    # --- a queue -----------------------------------------------------------------------------------------------------

    def _compare(self, cursor: _QueueCursor, window: _SeqWindow, seen: bytearray) -> Iterator[Difference]:
        """Compare everything in the queue up to the end of the window."""
        number, base, end = self._numbers[cursor.at], window.base, window.end
        while True:
            try:
                first, text = cursor.log.read(cursor.offset, _READ)
            except DamageError as err:
                self.damaged.add(cursor.at)
                if err.next_offset <= cursor.offset:
                    cursor.next_seq = _NEVER
                    return
                cursor.offset = err.next_offset
                continue
            if not text:
                cursor.next_seq = _NEVER
                return
            for offset, line in enumerate(text.split(b"\n")[:-1], first):
                if line:
                    seq = record.seq_of(line)
                    cursor.first_seq = cursor.first_seq or seq
                    if seq >= end:
                        cursor.offset, cursor.next_seq = offset, seq
                        return
                    if seq >= window.since:
                        kind = self._kind(line, seq - base, number, window) if seq >= base else "foreign"
                        if kind not in ("foreign", "misplaced"):
                            seen[seq - base] = True
                        if kind:
                            yield Difference(seq, kind, *cursor.at, offset)
            cursor.offset = first + text.count(b"\n")
            self._progress(len(text))

    @staticmethod
    def _kind(line: bytes, at: int, number: int, window: _SeqWindow) -> str:
        """Return how a record of queue `number` differs from record `at` of the window; "" if it does not."""
        if window.queues[at] == number:
            return "" if window.crcs[at] == zlib.crc32(line) else "altered"
        if window.crcs[at] == zlib.crc32(line):
            return "misplaced"
        return "altered" if window.crcs[at] else "foreign"

    def _lost(self, window: _SeqWindow, seen: bytearray, high: int) -> Iterator[Difference]:
        """Yield the records that the WAL has and the queue lacks, although no process removed them."""
        if 0 not in seen:
            return
        by_number, base = list(self._cursors.values()), window.base
        for low, last in dropped.without(base, high, self._gaps):
            at = seen.find(0, low - base, last - base + 1)
            while at >= 0:
                number = window.queues[at]
                if number != _NOWHERE:
                    cursor = by_number[number]
                    starts = cursor.first_seq if cursor.first_seq else (_NEVER if cursor.log.first_offset else 0)
                    if base + at >= starts and cursor.at[0] not in self._compacted:
                        yield Difference(base + at, "lost", *cursor.at, -1)
                at = seen.find(0, at + 1, last - base + 1)


def _all_lines(log: LogReader, offset: int, upto: int) -> Iterator[list[bytes]]:
    """Yield the records of the WAL; a damaged block is skipped."""
    while offset <= upto:
        try:
            _, text = log.read(offset, _READ)
        except DamageError as err:
            if err.next_offset <= offset:
                return
            offset = err.next_offset
            continue
        if not text:
            return
        yield text.split(b"\n")[:-1]
        offset = record.seq_of(last_line(text)) + 1
