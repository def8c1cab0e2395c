"""Audits one task: compares a range of the WAL's seqs with the offsets of all queues that belong to it.

    audit_task(broker, snapshot, task, bucket)   → [EvidenceRow(what="lost", first_seq=17, records=4, …), …]

Exact       In a task without errors, the bytes of a queue are the lines of the WAL that route there, one after another.
            They are compared as bytes, block by block, without Python code per record. Only for queues that differ are
            lines compared one by one (QueueAuditor): lost, duplicate, out of order, altered, misplaced,
            foreign.
Not audited Records of deleted topics. Queue records below the first seq of the WAL: only their crc, format and order
            are checked. WAL records below the first record that a queue still has. All of these are counted as notes.
            In a compacted queue there must be as many bare newlines between two records as records are missing there;
            which records they stand for is unknown. Bare newlines at a cut between two tasks count for both.
Memory      One block of the WAL and of each queue. Of queues that differ, all their lines in the task.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kmq.log.damage import DamageError
from kmq.log.dropped import without
from kmq.spark.audit.comparison import (
    Arrivals,
    AuditReader,
    Comparison,
    SeqRanges,
    UnreadableOffsets,
    concatenated,
    is_first_time,
    target_of_seq,
)
from kmq.spark.audit.findings import THE_WAL, Evidence, EvidenceRow, OffsetRange, TopicPartition
from kmq.spark.audit.snapshot import AuditTask, BrokerSnapshot, OlderTask
from kmq.spark.source.broker import Broker
from kmq.spark.source.columns import Block, Numbers

# --- one queue, line by line -----------------------------------------------------------------------------------------


class QueueAuditor:
    """The records of one queue in a task, and those that it should have (`seqs`, sorted, and their `lines`)."""

    def __init__(self, comparison: Comparison, target: int, seqs: Numbers, lines: pa.ChunkedArray) -> None:
        self._with, self.target, self.place = comparison, target, comparison.routes.places[target]
        self._expected, self._expected_lines = seqs, lines
        self._first, self._end = comparison.snapshot.queues.get(self.place, (0, 0))
        self._start, self._stop = comparison.task.queues.get(self.place, (0, 0))
        self._unreadable: list[OffsetRange] = []
        self._read()

    def _read(self) -> None:
        seqs: list[Numbers] = []
        offsets: list[Numbers] = []
        lines: list[pa.Array] = []
        blanks: list[Numbers] = []
        at = self._start
        reader = self._with.reader
        for block in reader.read(self.place, (self._start, self._stop)):
            if isinstance(block, UnreadableOffsets):
                at = min(block.end, self._stop)
                self._unreadable.append((block.first, at))
                continue
            if block.offset > at:  # retention has removed the start since the snapshot
                self._start = self._first = block.offset
            total = block.lines.count(b"\n")
            at = block.offset + total
            if block.places is not None:
                blanks.append(block.offset + np.setdiff1d(np.arange(total), block.places))
            if block.count:
                seqs.append(block.seqs)
                offsets.append(block.offsets())
                lines.append(block.line())
        self._seqs, self._offsets = concatenated(seqs), concatenated(offsets)
        self._blanks = np.setdiff1d(concatenated(blanks), reader.malformed[self.place])
        self._lines = pa.chunked_array(lines, pa.binary())

    def classify(self, belongs: Callable[[Numbers], Numbers], elsewhere: dict[int, list[int]]) -> None:
        """Add records that are wrong or in the wrong place to the evidence; note which records are missing."""
        seqs, expected = self._seqs, self._expected
        at = np.searchsorted(expected, seqs)
        is_ours = np.zeros(len(seqs), bool)
        inside = at < len(expected)
        is_ours[inside] = expected[at[inside]] == seqs[inside]
        first_time = is_first_time(seqs)
        hits = np.flatnonzero(is_ours & first_time)
        self._add("duplicate", is_ours & ~first_time)

        is_late = np.zeros(len(seqs), bool)
        is_late[hits] = at[hits] < np.maximum.accumulate(at[hits])
        self._add("out_of_order", is_late)

        is_altered = np.zeros(len(seqs), bool)
        here, there = self._lines.take(pa.array(hits)), self._expected_lines.take(pa.array(at[hits]))
        is_altered[hits] = pc.not_equal(here, there).to_numpy()
        self._add("altered", is_altered)
        self._add("undropped", is_ours & self._with.dropped.hold(seqs))
        self._misplaced(~is_ours, belongs, elsewhere)

        self._missing = np.ones(len(expected), bool)
        self._missing[at[hits]] = False
        self._missing &= ~self._with.dropped.hold(expected)
        steady = hits[~is_late[hits]]
        self._marks, self._mark_offsets = at[steady], self._offsets[steady]

    def _misplaced(
        self, chosen: Numbers, belongs: Callable[[Numbers], Numbers], elsewhere: dict[int, list[int]]
    ) -> None:
        """Add the records that do not belong in this part of this queue: misplaced, out of order, or foreign."""
        task, seqs, places = self._with, self._seqs, self._with.routes.places
        wal_first, wal_end = task.snapshot.wal
        targets = belongs(seqs)
        at = np.flatnonzero(chosen & (targets >= 0))
        for seq, target in zip(seqs[at].tolist(), targets[at].tolist(), strict=True):
            elsewhere[target].append(seq)
        names = ["belongs to {}/{}".format(*places[target]) for target in targets[at].tolist()]
        task.evidence.add_runs("wrong_queue", self.place, seqs, at, self._offsets, names)
        rest = chosen & (targets < 0)
        is_old = rest & (seqs < task.low) & (task.low == wal_first)
        is_old |= rest & (seqs < task.low) & (task.low > task.task.low)  # retention of the WAL during the audit
        is_hidden = rest & SeqRanges(task.unreadable).hold(seqs)
        in_wal = (seqs >= wal_first) & (seqs < wal_end)
        is_late = rest & ~is_old & ~is_hidden & in_wal & ~task.is_inside(seqs)
        self._note("older", int(is_old.sum()))
        self._note("unreadable", int(is_hidden.sum()))
        self._add("out_of_order", is_late)
        self._add("foreign", rest & ~is_old & ~is_hidden & ~is_late)

    def account(self, elsewhere: Numbers) -> None:
        """Add the records missing between each two that are here, as excused or as lost.

        Compaction leaves a bare newline for each record that it removes. Damage hides a record for each of its offsets.
        Which records these are is unknown.
        """
        expected = self._expected
        missing = self._missing & ~np.isin(expected, elsewhere)
        hidden = concatenated(np.arange(*offsets) for offsets in self._unreadable)
        marks = np.concatenate([[-1], self._marks, [len(expected)]])
        edges = np.concatenate([[self._start - 1], self._mark_offsets, [self._stop]])
        sums = np.concatenate([[0], np.cumsum(missing)])
        absent = sums[marks[1:]] - sums[marks[:-1] + 1]
        blanks = np.diff(np.searchsorted(self._blanks, edges))
        if absent[0] and self._start > self._first:
            blanks[0] += self._blanks_before(int(absent[0]))
        unreadable = np.diff(np.searchsorted(hidden, edges))
        by_blank = np.minimum(absent, blanks)
        by_damage = np.minimum(absent - by_blank, unreadable)
        self._note("unreadable", int(by_damage.sum()))
        is_compacted = self.place[0] in self._with.snapshot.compacted
        self._note("compacted" if is_compacted else "blank", int(by_blank.sum()))
        self._note("blank", int((blanks - by_blank)[1:-1][unreadable[1:-1] == 0].sum()))
        lost = absent - by_blank - by_damage
        for at in np.flatnonzero(lost).tolist():
            between = slice(int(marks[at]) + 1, int(marks[at + 1]))
            seqs, count = expected[between][missing[between]], int(lost[at])
            if at == 0 and self._start == self._first > 0:
                self._note("retained", count, seqs)
            elif self._is_deleted_meanwhile():
                self._note("deleted", count, seqs)
            else:
                self._lost(at == len(lost) - 1, seqs, count, int(edges[at]) + 1)

    def _lost(self, is_last: bool, seqs: Numbers, count: int, offset: int) -> None:
        """Add `count` of `seqs` as lost, except records at the queue's end that were not routed yet."""
        if is_last and self._stop == self._end:
            late = seqs[seqs > self._with.snapshot.routed]
            self._note("unrouted", len(late), late)
            seqs, count = seqs[: len(seqs) - len(late)], count - len(late)
        if count > 0:
            some = "" if count == len(seqs) else f"{count} of {len(seqs)}"
            row = EvidenceRow.of("lost", self.place, count, (int(seqs[0]), int(seqs[-1])), offset)
            self._with.evidence.add(row._replace(detail=some))

    def _is_deleted_meanwhile(self) -> bool:
        """Return True if none of the queue's records in the snapshot is left.

        A later topic of the same name begins after them.
        """
        if self.place not in self._with.snapshot.queues:
            return False
        try:
            now = self._with.reader.broker.bounds([self.place[0]]).get(self.place)
        except DamageError:
            return False
        return now is None or now[0] >= self._end > self._first

    def _blanks_before(self, count: int) -> int:
        """Return how many bare newlines, at most `count`, end the offsets before the task.

        The task itself begins with a record, so the bare newlines of its first missing records lie before it.
        """
        try:
            first = max(self._first, self._start - count)
            lines = b"".join(lines for _, lines in self._with.reader.broker.read(*self.place, first, self._start))
        except DamageError:
            return 0
        records = lines.rstrip(b"\n")
        return len(lines) - len(records) - bool(records)

    def _add(self, what: str, chosen: Numbers) -> None:
        self._with.evidence.add_runs(what, self.place, self._seqs, np.flatnonzero(chosen), self._offsets)

    def _note(self, what: str, count: int, seqs: Numbers | None = None) -> None:
        if count > 0:
            ends = (int(seqs[0]), int(seqs[-1])) if seqs is not None and len(seqs) else None
            self._with.evidence.add(EvidenceRow.of(what, self.place, count, ends))


# --- one task --------------------------------------------------------------------------------------------------------

Seen = tuple[Numbers, Numbers]  # seqs and targets of the task's records, in the order of the WAL


def audit_task(broker: Broker, snapshot: BrokerSnapshot, task: AuditTask | OlderTask, bucket: int) -> list[EvidenceRow]:
    """Return the evidence of one task. `bucket`: µs of one moment."""
    evidence = Evidence()
    if isinstance(task, OlderTask):
        _check_older(AuditReader(broker, evidence), task, evidence)
    else:
        Auditor(Comparison(broker, snapshot, task, evidence), Arrivals(bucket)).run()
    return evidence.rows()


def _check_older(reader: AuditReader, task: OlderTask, evidence: Evidence) -> None:
    """Check the order of queue records that are no longer in the WAL."""
    count, before = 0, 0
    for block in reader.read(task.place, task.offsets):
        if isinstance(block, UnreadableOffsets):
            continue
        seqs = block.seqs if block.count else np.empty(0, np.int64)
        late = np.flatnonzero(np.diff(seqs, prepend=before) <= 0)
        evidence.add_runs("out_of_order", task.place, seqs, late, block.offsets())
        before = int(seqs.max(initial=before))
        count += block.count
    if count:
        evidence.add(EvidenceRow.of("older", task.place, count))


class Auditor:
    """Compares the WAL with the queues in one task."""

    def __init__(self, comparison: Comparison, arrivals: Arrivals) -> None:
        self._with, self._arrivals = comparison, arrivals
        self._evidence, self._routes = comparison.evidence, comparison.routes

    def run(self) -> None:
        """Audit the task, and add everything found to the evidence."""
        task = self._with.task
        if task.low == self._with.snapshot.wal[0]:
            for topic, damage in self._with.snapshot.hidden.items():
                self._evidence.add(EvidenceRow.of_damage((topic, 0), damage))
        differing = self._compare_bytes()
        if differing:
            self._compare_lines(differing)
        for place, (start, end) in task.queues.items():
            if end > start:
                self._evidence.count(EvidenceRow.of("queue", place, end - start))

    # --- the fast comparison: bytes ----------------------------------------------------------------------------------

    def _compare_bytes(self) -> list[int]:
        """Read the WAL and all queues side by side; return the queues whose bytes differ from the WAL's."""
        seen: list[Numbers] = []
        streams: dict[int, _Stream] = {}
        before = 0  # recv_ts
        for block in self._with.reader.read(THE_WAL, (self._with.low, self._with.high)):
            if isinstance(block, UnreadableOffsets):
                self._with.unreadable.append((block.first, block.end - 1))
                continue
            if not block.count:
                continue
            seqs, times = block.offsets(), block.recv_micros()
            targets = self._routes.targets(block, seqs)
            self._arrivals.add(block, times, targets, self._routes.places)
            before = self._check_clock(seqs, times, before)
            for target, lines in self._lines_by_target(block, seqs, targets):
                if target not in streams:
                    streams[target] = self._stream(target)
                streams[target].compare(lines)
            seen.append(seqs)
        self._follow_retention(seen)
        self._check_order(concatenated(seen))
        self._count_arrivals()
        differing = {target for target, stream in streams.items() if not stream.ended()}
        for place, (start, end) in self._with.task.queues.items():
            if end > start and self._routes.number_of(place) not in streams:
                differing.add(self._routes.number_of(place))
        return sorted(differing)

    def _stream(self, target: int) -> "_Stream":
        place = self._routes.places[target]
        start, end = self._with.task.queues.get(place, (0, 0))
        return _Stream(self._with.reader.broker.read(*place, start, end) if end > start else ())

    def _lines_by_target(self, block: Block, seqs: Numbers, targets: Numbers) -> Iterator[tuple[int, pa.Buffer]]:
        """Yield for each queue the bytes of a block that it should hold, except for queues that cannot be compared."""
        inside = self._with.is_inside(seqs)
        for target, lines in self._by_target(block, seqs, targets, inside):
            place = self._routes.places[target]
            if target == self._routes.deleted:
                self._note("deleted", place, seqs[(targets == target) & inside])
            elif place[0] not in self._with.snapshot.hidden:
                yield target, lines

    def _by_target(
        self, block: Block, seqs: Numbers, targets: Numbers, inside: Numbers
    ) -> Iterator[tuple[int, pa.Buffer]]:
        dropped = self._with.dropped.hold(seqs)
        if dropped.any():
            for target in np.unique(targets[dropped]).tolist():
                self._note("dropped_durable", self._routes.places[target], seqs[dropped & (targets == target)])
        wanted = ~dropped & inside
        is_all = bool(wanted.all())
        if is_all and block.places is None and (targets == targets[0]).all():
            yield int(targets[0]), pa.py_buffer(block.lines)
            return
        order = np.argsort(targets.astype(np.int16) if len(self._routes.places) < 1 << 15 else targets, kind="stable")
        if not is_all:
            order = order[wanted[order]]
        lines = block.span(block.starts[0], block.ends[-1] + 1, order)  # with their newlines
        offsets = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines) + 1]
        each, firsts = np.unique(targets[order], return_index=True)
        for target, (low, high) in zip(each.tolist(), pairwise([*firsts.tolist(), len(order)]), strict=True):
            yield target, lines.buffers()[2].slice(int(offsets[low]), int(offsets[high] - offsets[low]))

    def _note(self, what: str, place: TopicPartition, seqs: Numbers) -> None:
        self._evidence.add(EvidenceRow.of(what, place, len(seqs), (int(seqs[0]), int(seqs[-1]))))

    def _count_arrivals(self) -> None:
        for row in self._arrivals.rows():
            if row.topic in self._with.snapshot.hidden:
                self._evidence.add(EvidenceRow("unreadable", row.topic, records=row.records))
            self._evidence.count(row)

    # --- the WAL by itself -------------------------------------------------------------------------------------------

    def _check_clock(self, seqs: Numbers, times: Numbers, before: int) -> int:
        """Check that the times never decrease; return the latest time. `before`: the latest time so far."""
        back = np.flatnonzero(np.diff(times, prepend=before) < 0)
        self._evidence.add_runs("clock_back", THE_WAL, seqs, back)
        return int(times.max(initial=before))

    def _follow_retention(self, seen: list[Numbers]) -> None:
        """Treat records that retention removed from the WAL during the read as removed before the audit."""
        task = self._with
        first = int(seen[0][0]) if seen else task.high
        if first > task.low and not task.unreadable:
            retained = task.reader.broker.bounds([THE_WAL[0]])[THE_WAL][0]
            task.low = max(task.low, min(task.high, retained))

    def _check_order(self, seqs: Numbers) -> None:
        """Add gaps, duplicates and records out of order to the evidence."""
        task = self._with
        if len(seqs) == task.high - task.low and (np.diff(seqs) == 1).all() and seqs[0] == task.low:
            return
        inside, first_time = task.is_inside(seqs), is_first_time(seqs)
        is_late = seqs <= np.concatenate([[task.low - 1], np.maximum.accumulate(seqs)[:-1]])
        self._evidence.add_runs("duplicate", THE_WAL, seqs, np.flatnonzero(~first_time))
        self._evidence.add_runs("out_of_order", THE_WAL, seqs, np.flatnonzero(first_time & (is_late | ~inside)))
        present = np.concatenate([[task.low - 1], np.unique(seqs[inside]), [task.high]])
        left_out = [(gap.first, gap.to - 1) for gap in task.snapshot.wal_gaps]
        unreadable = SeqRanges([*task.unreadable, *left_out]).ranges
        named = SeqRanges(task.snapshot.dropped["framed"]).ranges
        for at in np.flatnonzero(np.diff(present) > 1).tolist():
            for first, last in without(int(present[at]) + 1, int(present[at + 1]) - 1, unreadable):
                gaps = without(first, last, named)
                for low, high in gaps:
                    self._evidence.add(EvidenceRow.of_wal("gap", (low, high), high - low + 1))
                count = last - first + 1 - sum(high - low + 1 for low, high in gaps)
                if count:
                    self._evidence.add(EvidenceRow.of_wal("dropped_framed", (first, last), count))

    # --- the exact comparison: lines ---------------------------------------------------------------------------------

    def _compare_lines(self, differing: list[int]) -> None:
        """Add the errors of these queues to the evidence."""
        expected, (seqs, targets) = self._expected(differing)
        belongs = target_of_seq(seqs, targets)
        queues = [QueueAuditor(self._with, target, *expected[target]) for target in differing]
        elsewhere: defaultdict[int, list[int]] = defaultdict(list)  # a record in another queue is not lost
        for queue in queues:
            queue.classify(belongs, elsewhere)
        for queue in queues:
            queue.account(np.array(elsewhere[queue.target], np.int64))

    def _expected(self, differing: list[int]) -> tuple[dict[int, tuple[Numbers, pa.Array]], Seen]:
        """Read the WAL again; return (seqs, lines) of each of these queues, and seqs and targets of all records.

        The seqs of a queue are sorted, each once.
        """
        chosen = np.array(differing)
        parts: dict[int, list[tuple[Numbers, pa.Array]]] = {target: [] for target in differing}
        seen: list[Seen] = []
        for block in self._with.reader.read(THE_WAL, (self._with.low, self._with.high), is_second=True):
            if isinstance(block, UnreadableOffsets) or not block.count:
                continue
            seqs = block.offsets()
            targets = self._routes.targets(block, seqs)
            inside = self._with.is_inside(seqs)
            seen.append((seqs[inside], targets[inside]))
            lines = block.line()
            for target in np.intersect1d(targets, chosen).tolist():
                mine = np.flatnonzero((targets == target) & inside)
                parts[target].append((seqs[mine], lines.take(pa.array(mine))))
        expected = {}
        for target, read in parts.items():
            texts = pa.chunked_array([lines for _, lines in read], pa.binary())
            once, at = np.unique(concatenated(seqs for seqs, _ in read), return_index=True)
            expected[target] = once, texts.take(pa.array(at))
        return expected, (concatenated(seqs for seqs, _ in seen), concatenated(targets for _, targets in seen))


class _Stream:
    """The bytes of a queue, compared in order. After the first difference nothing more is read."""

    def __init__(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        self._blocks = iter(blocks)
        self._rest = pa.py_buffer(b"")
        self._is_same = True

    def compare(self, expected: pa.Buffer) -> None:
        """Compare the next bytes with `expected`."""
        while self._is_same and expected.size:
            if not self._rest.size:
                self._rest = self._next()
            size = min(expected.size, self._rest.size)
            self._is_same = size > 0 and expected.slice(0, size).equals(self._rest.slice(0, size))
            expected, self._rest = expected.slice(size), self._rest.slice(size)

    def ended(self) -> bool:
        """Return True if all bytes were the same, and the queue has no more."""
        return self._is_same and not self._rest.size and not self._next().size and self._is_same

    def _next(self) -> pa.Buffer:
        try:
            return pa.py_buffer(next(self._blocks, (0, b""))[1])
        except DamageError:
            self._is_same = False
            return pa.py_buffer(b"")
