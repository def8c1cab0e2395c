"""What an audit can report: its findings, its notes, and the evidence, a row for each of them."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq.log.reader import WAL
from kmq.spark.source.columns import Numbers

if TYPE_CHECKING:
    from kmq.log.damage import DamageError


TopicPartition = tuple[str, int]  # topic, partition
OffsetRange = tuple[int, int]  # first, and the one after the last
SeqRange = tuple[int, int]  # first and last

THE_WAL: TopicPartition = (WAL, 0)
# The words for faults are those of `kmq verify` (kmq/repair/copies.py), except "wrong_queue", which is misplaced there:
# these keys are in tables that users have.
FINDINGS = {
    "gap": "seqs missing in the WAL that dropped.log does not name",
    "duplicate": "stored more than once",
    "out_of_order": "stored after a later record",
    "clock_back": "recv_ts before that of the previous record",
    "damage": "bytes that differ from what was written",
    "malformed": "not a stored line",
    "lost": "in the WAL, not in its queue",
    "wrong_queue": "in a queue where it does not belong",
    "altered": "bytes that differ from the WAL",
    "foreign": "in a queue, not in the WAL",
    "undropped": "in the queue, although dropped.log names it",
    "blank": "bare newlines in a queue that is not compacted",
}
NOTES = {
    "dropped_framed": "seqs that dropped.log names for ring framed, or that a repair named as lost",
    "dropped_durable": "records that dropped.log names for ring durable",
    "compacted": "records that compaction removed from their queue",
    "retained": "records that retention removed from their queue: not audited",
    "deleted": "records of topics that were deleted",
    "older": "queue records from before the WAL's first seq: crc and order checked only",
    "unrouted": "durable, not routed yet",
    "unreadable": "records in or after damage: not audited",
}
_MAX_SHOWN = 60  # bytes of a line that is not a stored line


class DamagedBytes(NamedTuple):
    """A place in a file where the bytes differ from what was written."""

    path: str
    byte: int
    what: str

    @classmethod
    def of(cls, err: "DamageError") -> "DamagedBytes":
        return cls(err.path, err.byte, err.what)


class EvidenceRow(NamedTuple):
    """A row of evidence. `what`: a finding, a note, `records` (of a topic and moment) or `queue` (records compared)."""

    what: str
    topic: str = WAL
    partition: int = 0
    records: int = 1
    first_seq: int = 0  # 0: unknown
    last_seq: int = 0
    offset: int = -1  # in the queue, -1: none
    time: int = 0  # µs since the epoch
    nbytes: int = 0
    path: str = ""
    byte: int = 0
    detail: str = ""

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

    @classmethod
    def of(
        cls, what: str, place: TopicPartition, records: int, seqs: SeqRange | None = None, offset: int = -1
    ) -> "EvidenceRow":
        """Return a row about `records` records of a log. `seqs`: None if they are unknown."""
        first, last = seqs or (0, 0)
        return cls(what, *place, records, first, last, offset)

    @classmethod
    def of_wal(cls, what: str, seqs: SeqRange, records: int) -> "EvidenceRow":
        """Return a row about `records` records of the WAL."""
        return cls.of(what, THE_WAL, records, seqs)

    @classmethod
    def of_damage(cls, place: TopicPartition, damage: DamagedBytes) -> "EvidenceRow":
        return cls("damage", *place, path=damage.path, byte=damage.byte, detail=damage.what)

    @classmethod
    def of_malformed(cls, place: TopicPartition, offset: int, line: bytes) -> "EvidenceRow":
        return cls("malformed", *place, offset=offset, detail=repr(line[:_MAX_SHOWN]))


# --- evidence --------------------------------------------------------------------------------------------------------

MAX_ROWS = 1000  # of one kind and log in a task; one further row counts the rest


class Evidence:
    """The rows of one task, in the order in which they were added.

    Memory      At most MAX_ROWS rows of a kind for each log, and one more that combines the rest.
    """

    def __init__(self) -> None:
        self._rows: list[EvidenceRow] = []
        self._added: Counter[tuple[str, TopicPartition]] = Counter()
        self._more: dict[tuple[str, TopicPartition], EvidenceRow] = {}

    def rows(self) -> list[EvidenceRow]:
        return [*self._rows, *self._more.values()]

    def count(self, row: EvidenceRow) -> None:
        """Add a row that sums up a log or a moment; these are not limited."""
        self._rows.append(row)

    def add(self, row: EvidenceRow) -> None:
        """Add a finding or a note."""
        key = row.what, row.place
        self._added[key] += 1
        if self._added[key] <= MAX_ROWS:
            self._rows.append(row)
            return
        more = self._more.get(key, EvidenceRow(row.what, *row.place, 0, row.first_seq, detail="and more like these"))
        self._more[key] = more._replace(records=more.records + row.records, last_seq=max(more.last_seq, row.last_seq))

    def add_runs(
        self,
        what: str,
        place: TopicPartition,
        seqs: Numbers,
        at: Numbers,
        offsets: Numbers | None = None,
        details: Sequence[str] = (),
    ) -> None:
        """Add a row for each run of consecutive positions in `at`. They are positions in `seqs` and `offsets`."""
        if not len(at):
            return
        starts = np.concatenate([[0], np.flatnonzero(np.diff(at) != 1) + 1])
        for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(at)], strict=True):
            mine = seqs[at[low:high]]
            offset = -1 if offsets is None else int(offsets[at[low]])
            row = EvidenceRow.of(what, place, high - low, (int(mine.min()), int(mine.max())), offset)
            self.add(row._replace(detail=details[low]) if details else row)
