"""Collects the rows of one task of an audit; above a limit, rows of one kind are combined into one."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kmq.spark.audit.findings import Place, Row
from kmq.spark.source.columns import Numbers

MAX_ROWS = 1000  # of one kind and log in a task; one further row counts the rest


class Evidence:
    """Rows in the order in which they were added.

    Memory      At most MAX_ROWS rows of a kind for each log, and one more.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._added: Counter[tuple[str, Place]] = Counter()
        self._more: dict[tuple[str, Place], Row] = {}

    def rows(self) -> list[Row]:
        return [*self._rows, *self._more.values()]

    def count(self, row: Row) -> None:
        """Add a row that sums up a log or a moment; these are not limited."""
        self._rows.append(row)

    def add(self, row: Row) -> None:
        """Add a finding or a note."""
        key = row.what, row.place
        self._added[key] += 1
        if self._added[key] <= MAX_ROWS:
            self._rows.append(row)
            return
        more = self._more.get(key, Row(row.what, *row.place, 0, row.first_seq, detail="and more like these"))
        self._more[key] = more._replace(records=more.records + row.records, last_seq=max(more.last_seq, row.last_seq))

    def add_runs(
        self,
        what: str,
        place: Place,
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
            row = Row.of(what, place, high - low, (int(mine.min()), int(mine.max())), offset)
            self.add(row._replace(detail=details[low]) if details else row)
