"""Objects of KMQ_TIER as the third copy of a record, for a repair.

    offsets 1100…1119 of topics/orders/3 are damaged, and the WAL does not go back so far
        → the object with the row 1000…1511 is fetched in, and its lines 1100…1119 are written

Owner       the repair: the broker is down, so its gateway does not use the cache (kmq/tier/cache.py).
Invariant   Below the end of its rows a partition gets nothing from a repair but what an object has: no bare newline for a
            lost record, no mark in a key. So the bytes of a record do not depend on where it lies. If the object cannot
            be had, or the rows are not known, the damaged block stays as it is, and the report says why.
Order       The WAL comes first; an object is fetched only if the WAL does not have all records. A file `tier` that is lost
            or damaged is written again from the commits before anything else is, up to what router.ckpt covers: an older
            state that was put back has no later records, and may go on with others.
Away        While the store does not answer, what needs it stays as it is, and everything else is healed.
Memory      The lines of one segment; of an object a line.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kmq.errors import ConfigError, CorruptError, KmqError
from kmq.files import replace_file
from kmq.log import gaps, identity, index, rows, segment, topics
from kmq.log.damage import DamageError
from kmq.log.partition import directory_of
from kmq.log.rows import TierFile, TierRow
from kmq.message import record
from kmq.repair.directory import At, DataDirectory
from kmq.repair.rewriting import Rewriter
from kmq.repair.scan import Records, Scan


class TierAccess(NamedTuple):
    """What a repair needs of KMQ_TIER.

    `fetch` brings the object of a row into the cache. Raises CorruptError if it is missing or not what its row says;
    another KmqError if the store does not answer. `logs` returns what the commits say of all partitions.
    """

    fetch: Callable[[str, int, TierRow], object]
    logs: Callable[[], Mapping[tuple[str, int], TierFile]]


def _not_set(*_: object) -> Mapping[tuple[str, int], TierFile]:
    raise ConfigError("KMQ_TIER is not set, and what is lost here lies there: set it")


NO_TIER = TierAccess(_not_set, _not_set)


class TierObjects:
    """The rows of a data directory, and the objects that they name."""

    def __init__(self, data: str, access: TierAccess = NO_TIER) -> None:
        self._data, self._access = data, access
        self._unsure: dict[At, str] = {}  # partitions whose file may be lost, and why the commits cannot be asked

    def file(self, at: At) -> TierFile | None:
        """Return what the file `tier` of a partition says; None if it is damaged, or may be lost."""
        if at in self._unsure:
            return None
        try:
            return rows.of(directory_of(self._data, *at))
        except DamageError:
            return None

    def _known_file(self, at: At) -> TierFile:
        if (found := self.file(at)) is None:
            what = f"which records lie in KMQ_TIER is not known: {self._unsure.get(at) or 'set KMQ_TIER'}"
            state = "may be lost" if at in self._unsure else "is damaged"
            raise CorruptError(f"{rows.path_of(f'topics/{at[0]}/{at[1]}')} {state}, so {what}")
        return found

    def end(self, at: At) -> int:
        """Return the offset at which the rows of a partition end; 0 without any. It is not known: after every offset."""
        found = self.file(at)
        if found is None:
            return identity.NEVER
        return found.rows[-1].next if found.rows else 0

    def records(self, at: At, begin: int, end: int) -> Records:
        """Return the records begin…end-1, by offset, as far as rows have them. Raises KmqError if one cannot be had."""
        found = self._known_file(at)
        mine = [row for row in found.rows if row.base < end and begin < row.next]
        return {seq: line for row in mine for offset, seq, line in self._lines(at, found, row) if begin <= offset < end}

    def lacking(self, at: At, scans: Sequence[Scan], low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield (seq, line, True) of the records low…high that rows have and the segments do not, in order.

        An object that is missing or damaged has none. Raises KmqError if the store does not answer, or the rows are not
        known.
        """
        for begin, end in _between_good(scans) if rows.may_exist(self._data) else ():
            first, last = max(begin, low), min(end, high)
            for row in self._known_file(at).rows if first <= last else ():
                if row.seqs[0] <= last and first <= row.seqs[1]:
                    with suppress(CorruptError):
                        lines = ((seq, line) for _, seq, line in self._lines(at, self._known_file(at), row))
                        yield from ((seq, line, True) for seq, line in lines if first <= seq <= last)

    def _lines(self, at: At, found: TierFile, row: TierRow) -> Iterator[tuple[int, int, bytes]]:
        """Yield (offset, seq, line) of all records of a row. Nothing is yielded before the object was found good."""
        directory = directory_of(self._data, *at)
        self._access.fetch(directory, found.life, row)
        path = rows.cached_path(directory, found.life, row)
        with open(path, "rb") as file:
            os.utime(os.path.dirname(path))  # it was read, so it may give way to the next one
            for offset, line in enumerate(file, row.base):
                yield offset, record.seq_of(line), line

    # --- the files `tier` --------------------------------------------------------------------------------------------

    def heal_files(self, rewriter: Rewriter) -> None:
        """Write each lost or damaged file `tier` again, from the commits."""
        if not rows.may_exist(self._data):  # then it has gaps only, which `restored` has too
            return
        wrong = [at for at in DataDirectory(self._data).queues() if self._may_be_lost(at)]
        try:
            logs = self._access.logs() if wrong else {}
        except KmqError as err:
            for at in wrong:
                if self.file(at) is None:
                    rewriter.leave(rows.path_of(directory_of(self._data, *at)), str(err))
                elif self._may_have_rows() and not at[0].startswith(gaps.INTERNAL):
                    self._unsure[at] = str(err)
            return
        table, is_forked = topics.table(self._data), bool(gaps.forks(self._data))
        states = DataDirectory(self._data).load_checkpoint()[1]
        for at in wrong:
            directory, path = directory_of(self._data, *at), rows.path_of(directory_of(self._data, *at))
            blank = rows.empty(index.lineage_of(self._data), f"{at[0]}/{at[1]}", table[at[0].encode()].from_seq)
            found = logs.get((blank.log, blank.life))
            if found is None and is_forked:
                if self.file(at) is None:
                    rewriter.leave(path, "the commits since the fork do not say which rows it had before")
            elif found is not None or self.file(at) is None or not segment.listing(directory):
                made = (found or blank).up_to(states[at].end_offset if at in states else identity.NEVER)
                made.head = blank.head
                replace_file(path, made.text())
                rewriter.report(path, "written again, as the commits in KMQ_TIER have it")

    def _may_be_lost(self, at: At) -> bool:
        """Return True if the file `tier` of a partition is damaged, or missing although there may be rows."""
        directory = directory_of(self._data, *at)
        if os.path.exists(rows.path_of(directory)):
            return self.file(at) is None
        segments = segment.listing(directory)
        return not segments or segments[0][0] > 0

    def _may_have_rows(self) -> bool:
        """Return False if no partition has ever had rows: the first one raises `format`."""
        version = identity.version(self._data)
        return version is not None and version[0] >= identity.FORKED


def _between_good(scans: Sequence[Scan]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of seqs that the good blocks of a queue leave: before them, between them, and after them."""
    last, is_whole = 0, False
    for block in (block for scan in scans for block in scan.blocks):
        if block.is_good and block.first_seq:
            if not is_whole:
                yield last + 1, block.first_seq - 1
            last, is_whole = block.last_seq, True
        is_whole = is_whole and block.is_good
    yield last + 1, identity.NEVER
