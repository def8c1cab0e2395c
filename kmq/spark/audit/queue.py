"""Compares one queue with the WAL line by line: which records are missing, duplicate, late, altered or foreign."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kmq.log.damage import DamageError
from kmq.spark.audit.comparison import Comparison
from kmq.spark.audit.findings import OffsetRange, Row
from kmq.spark.audit.reading import Unreadable
from kmq.spark.audit.seqs import SeqRanges, TargetOfSeq, concatenated, is_first_time
from kmq.spark.source.columns import Numbers


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
            if isinstance(block, Unreadable):
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
                seqs.append(block.seq().to_numpy())
                offsets.append(block.offsets())
                lines.append(block.line())
        self._seqs, self._offsets = concatenated(seqs), concatenated(offsets)
        self._blanks = np.setdiff1d(concatenated(blanks), reader.malformed[self.place])
        self._lines = pa.chunked_array(lines, pa.binary())

    def classify(self, belongs: TargetOfSeq, elsewhere: dict[int, list[int]]) -> None:
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

        is_other = np.zeros(len(seqs), bool)
        here, there = self._lines.take(pa.array(hits)), self._expected_lines.take(pa.array(at[hits]))
        is_other[hits] = pc.not_equal(here, there).to_numpy()
        self._add("altered", is_other)
        self._add("undropped", is_ours & self._with.dropped.hold(seqs))
        self._strangers(~is_ours, belongs, elsewhere)

        self._missing = np.ones(len(expected), bool)
        self._missing[at[hits]] = False
        self._missing &= ~self._with.dropped.hold(expected)
        steady = hits[~is_late[hits]]
        self._marks, self._mark_offsets = at[steady], self._offsets[steady]

    def _strangers(self, chosen: Numbers, belongs: TargetOfSeq, elsewhere: dict[int, list[int]]) -> None:
        """Add the records that do not belong in this part of this queue."""
        task, seqs, places = self._with, self._seqs, self._with.routes.places
        wal_first, wal_end = task.snapshot.wal
        targets = belongs.get(seqs)
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
        is_astray = rest & ~is_old & ~is_hidden & in_wal & ~task.is_inside(seqs)
        self._note("older", int(is_old.sum()))
        self._note("unreadable", int(is_hidden.sum()))
        self._add("out_of_order", is_astray)
        self._add("foreign", rest & ~is_old & ~is_hidden & ~is_astray)

    def account(self, elsewhere: Numbers) -> None:
        """Add the records missing between each two that are here, as excused or as lost.

        Compaction leaves a bare newline for each record that it removes. Damage hides a record for each of its offsets.
        Which records they are is unknown.
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
            if not self._is_excused(at == 0, seqs, count):
                self._lost(at == len(lost) - 1, seqs, count, int(edges[at]) + 1)

    def _is_excused(self, is_first: bool, seqs: Numbers, count: int) -> bool:
        """Return True if retention or a deletion of the topic removed the missing records; add a note about them."""
        if is_first and self._start == self._first > 0:
            self._note("retained", count, seqs)
        elif self._is_deleted_meanwhile():
            self._note("deleted", count, seqs)
        else:
            return False
        return True

    def _lost(self, is_last: bool, seqs: Numbers, count: int, offset: int) -> None:
        """Add `count` of `seqs` as lost, except records at the queue's end that were not routed yet."""
        if is_last and self._stop == self._end:
            late = seqs[seqs > self._with.snapshot.routed]
            self._note("unrouted", len(late), late)
            seqs, count = seqs[: len(seqs) - len(late)], count - len(late)
        if count > 0:
            some = "" if count == len(seqs) else f"{count} of {len(seqs)}"
            row = Row.of("lost", self.place, count, (int(seqs[0]), int(seqs[-1])), offset)
            self._with.evidence.add(row._replace(detail=some))

    def _is_deleted_meanwhile(self) -> bool:
        """Return True if nothing is left of what the snapshot saw here.

        A later topic of the same name begins after it.
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
            self._with.evidence.add(Row.of(what, self.place, count, ends))
