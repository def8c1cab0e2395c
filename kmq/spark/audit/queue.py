"""One queue, line by line, where its bytes are not those of the WAL: what is missing, doubled, late, altered or foreign."""

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
    """The records of one queue in a task, and the ones that it should have (`seqs`, rising, and `lines`)."""

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
            if block.offset > at:  # retention was faster
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
        """Add what is here and should not be, or not so, to the evidence; remember what is missing."""
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
        """Add the records that do not belong into this part of this queue."""
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
        is_old |= rest & (seqs < task.low) & (task.low > task.task.low)  # the WAL's retention was faster
        is_hidden = rest & SeqRanges(task.unreadable).hold(seqs)
        in_wal = (seqs >= wal_first) & (seqs < wal_end)
        is_astray = rest & ~is_old & ~is_hidden & in_wal & ~task.is_inside(seqs)
        self._note("older", int(is_old.sum()))
        self._note("unreadable", int(is_hidden.sum()))
        self._add("out_of_order", is_astray)
        self._add("foreign", rest & ~is_old & ~is_hidden & ~is_astray)

    def account(self, elsewhere: Numbers) -> None:
        """Add the missing records between each two that are here: excused, or lost.

        Compaction leaves a bare newline for each, damage hides one for each of its offsets; which ones is unknown.
        """
        expected = self._expected
        missing = self._missing & ~np.isin(expected, elsewhere)
        hidden = concatenated(np.arange(*offsets) for offsets in self._unreadable)
        marks = np.concatenate([[-1], self._marks, [len(expected)]])
        edges = np.concatenate([[self._start - 1], self._mark_offsets, [self._stop]])
        sums = np.concatenate([[0], np.cumsum(missing)])
        gone = sums[marks[1:]] - sums[marks[:-1] + 1]
        blanks = np.diff(np.searchsorted(self._blanks, edges))
        if gone[0] and self._start > self._first:
            blanks[0] += self._blanks_before(int(gone[0]))
        unreadable = np.diff(np.searchsorted(hidden, edges))
        by_blank = np.minimum(gone, blanks)
        by_damage = np.minimum(gone - by_blank, unreadable)
        self._note("unreadable", int(by_damage.sum()))
        is_compacted = self.place[0] in self._with.snapshot.compacted
        self._note("compacted" if is_compacted else "blank", int(by_blank.sum()))
        self._note("blank", int((blanks - by_blank)[1:-1][unreadable[1:-1] == 0].sum()))
        lost = gone - by_blank - by_damage
        for at in np.flatnonzero(lost).tolist():
            between = slice(int(marks[at]) + 1, int(marks[at + 1]))
            seqs, count = expected[between][missing[between]], int(lost[at])
            if not self._is_excused(at == 0, seqs, count):
                self._lost(at == len(lost) - 1, seqs, count, int(edges[at]) + 1)

    def _is_excused(self, is_first: bool, seqs: Numbers, count: int) -> bool:
        """Note missing records that retention or a deletion of the topic took."""
        if is_first and self._start == self._first > 0:
            self._note("retained", count, seqs)
        elif self._is_deleted_meanwhile():
            self._note("deleted", count, seqs)
        else:
            return False
        return True

    def _lost(self, is_last: bool, seqs: Numbers, count: int, offset: int) -> None:
        """Add `count` of `seqs` as lost, except at the queue's end those that were not routed yet."""
        if is_last and self._stop == self._end:
            late = seqs[seqs > self._with.snapshot.routed]
            self._note("unrouted", len(late), late)
            seqs, count = seqs[: len(seqs) - len(late)], count - len(late)
        if count > 0:
            some = "" if count == len(seqs) else f"{count} of {len(seqs)}"
            row = Row.of("lost", self.place, count, (int(seqs[0]), int(seqs[-1])), offset)
            self._with.evidence.add(row._replace(detail=some))

    def _is_deleted_meanwhile(self) -> bool:
        """Return True if nothing is left of what the snapshot saw here; a later topic of this name begins behind it."""
        if self.place not in self._with.snapshot.queues:
            return False
        try:
            now = self._with.reader.broker.bounds([self.place[0]]).get(self.place)
        except DamageError:
            return False
        return now is None or now[0] >= self._end > self._first

    def _blanks_before(self, count: int) -> int:
        """Return how many bare newlines, up to `count`, lie before the task: it begins with a record that is there."""
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
