"""The store of a tier (docs/tier.md), as queries read it: the objects of rows, and a lineage without its broker.

    StoreReader("s3://bucket/kmq").lines(row, 1000, 1200)   → the records 1000…1199, which lie in the object of a row
    Lineage("s3://bucket/kmq").bounds(["orders"])           → {("orders", 0): (first offset, next offset), …}

Invariant   No line is handed out before its whole object was compared with its row: size, sha256, number of records.
Lineage     As of its last commit when the query was planned; no later commit changes what a query reads. It has:
            topics with rows   from where commits let them begin up to the end of their last row
            tables             topics of KMQ itself and compacted topics, as they were copied last
            __append           the WAL: also what is newer than rows and tables, and topics that have neither
            A record that is only in the WAL has no offset here: which one it has is for the router to say (kmq restore).
Missing     A row may have been dropped since, and its object deleted an hour later. So the rows are asked for again: if
            they begin later, the records are gone by retention. If they still name the object, it is damage.
Memory      One object as it is stored, which stays for the next read, and one member of lines.
Library     obstore is imported when a bucket is opened, which is in a task or in the planner of one query: it does not
            survive the fork of a process that has it.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq.errors import ConfigError, CorruptError, RetryError, quotation
from kmq.files import replace_file
from kmq.log import gaps, identity
from kmq.log.damage import EXAMINE_COPY, DamageError
from kmq.log.gaps import Gap, Gaps
from kmq.log.reader import WAL
from kmq.log.rows import LogRows, NotHereError, TierRow, full_key
from kmq.log.segment import RECV_TS, SEQ, first_at
from kmq.message import record
from kmq.spark.connections import PATIENCE_S
from kmq.spark.source.broker import Broker, Layout, LogBounds

if TYPE_CHECKING:
    from kmq.spark.source.columns import Lines
    from kmq.spark.source.plan import OffsetSpan
    from kmq.tier.commits import CommitLine, TierState
    from kmq.tier.store import Store

_PAUSES_S = (0.1, 5.0)  # before a store is asked again: the first pause, the longest one
_LINEAGE = re.compile(r"(.+)/([0-9a-f]{32})/?")
_FIRST_COMMIT = f"commits/{1:020d}"


class StoreReader:
    """Reads objects. `option`: the option that names the store, for errors."""

    def __init__(self, url: str, option: str = "tier", patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long a store may be away."""
        self.url, self._option, self._patience_s = url, option, patience_s
        self._opened: Store | None = None
        self._last: tuple[str, bytes | bytearray] = ("", b"")  # the object that was read last: its key and its content

    def store(self) -> "Store":
        """Raises ConfigError if the URL names no store, or its library is not installed."""
        if self._opened is None:
            from kmq.tier.store import open_store

            self._opened = open_store(self.url, self._option)
        return self._opened

    def lines(
        self, row: TierRow, start: int, end: int, by_seq: bool = False, found_gaps: Gaps = ()
    ) -> "Iterator[Lines]":
        """Yield the records start…end-1 of a row in blocks. Raises MissingError, StoreError; DamageError.

        `found_gaps`: of the log. The row of a table may have some inside; no member of an object spans one.
        """
        from kmq.spark.source import columns
        from kmq.tier import objects

        inside = tuple(gap for gap in found_gaps if gap.to <= row.next)
        offset = gaps.passed(inside, row.base)
        try:
            for data in objects.unpack([self.content(row)], row.key):
                lines = columns.of_bytes(record.seq_of(data) if by_seq else offset, data, by_seq)
                offset = gaps.passed(inside, lines.next_offset)
                if offset > start and (found := lines.within(start, end, by_seq)):
                    yield found
                if end <= offset < row.next:
                    return
            if offset != row.next:
                raise objects.ObjectError(f"{row.key}: has {offset - row.base} records, not {row.next - row.base}")
        except objects.ObjectError as err:
            raise self.damage(row, err) from err

    def damage(self, row: TierRow, err: Exception) -> DamageError:
        return DamageError(f"{self.url}/{row.key}", 0, row.size, row.base, row.next, str(err), EXAMINE_COPY)

    def offset_of(
        self, row: TierRow, target: int, field: int, by_seq: bool = False, found_gaps: Gaps = ()
    ) -> int | None:
        """Return the offset of the first record of a row whose SEQ or RECV_TS is at least `target`; None without one."""
        for found in self.lines(row, row.base, row.next, by_seq, found_gaps):
            lines = found.data.split(b"\n")[:-1]
            if (at := first_at(lines, target, field)) is not None:
                return record.seq_of(lines[at]) if by_seq else found.offset + at
        return None

    def content(self, row: TierRow) -> bytes | bytearray:
        """Return the object of a row as it is stored, compared with the row. Raises ObjectError, MissingError, StoreError."""
        from kmq.tier.objects import CheckedPieces
        from kmq.tier.store import MissingError, StoreError

        last = self._last  # several threads may read
        if last[0] == row.key:
            return last[1]
        self._last = last = "", b""  # one object at a time
        pause, deadline = _PAUSES_S[0], time.monotonic() + self._patience_s
        while True:
            try:
                found = bytearray()  # not joined: that would be the object twice
                for piece in CheckedPieces(self.store().get(row.key), row.key, row.size, row.sha256):
                    found += piece
                self._last = row.key, found
                return found
            except MissingError:
                self._check_store(row.key.partition("/")[0])
                raise
            except StoreError as err:
                if time.monotonic() + pause > deadline:
                    raise StoreError(f"{self.url}: {err}; nothing else for {self._patience_s:g} s") from err
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def _check_store(self, lineage: str) -> None:
        """Raise ConfigError if the store has not even the first commit of a lineage."""
        from kmq.tier.store import MissingError, get

        try:
            get(self.store(), f"{lineage}/{_FIRST_COMMIT}")
        except MissingError:
            raise ConfigError(
                f"{self._option}={self.url}: has no copy of the lineage {lineage}: it is the store of another broker, or is not"
                " mounted"
            ) from None


def blocks(
    reader: StoreReader,
    rows_of: Callable[[int, int, str], LogRows],
    local: "Callable[[int, int], Iterator[Lines]]",
    start: int,
    end: int,
    by_seq: bool = False,
    found_gaps: Gaps = (),
) -> "Iterator[Lines]":
    """Yield the records start…end-1 of a log in blocks: those of its rows from the store, later ones by `local`.

    `rows_of(low, high, missing)` returns the rows with these records; `missing` is the key of an object that was not there,
    or "". Raises DamageError if the rows still name that object.
    """
    from kmq.tier.store import MissingError

    offset, missing = start, ""
    while offset < end:
        found = rows_of(offset, end, missing)
        offset, cold = max(offset, found.first_offset), min(end, found.local_offset)
        try:
            for row in found.rows:
                if row.next <= offset or row.base >= cold:
                    continue
                missing = row.key if row.key == missing else ""
                for lines in reader.lines(row, offset, min(cold, row.next), by_seq, found_gaps):
                    yield lines
                    offset = lines.next_offset
            offset = max(offset, cold)
            for lines in local(offset, end):
                yield lines
                offset = lines.next_offset
            return
        except MissingError as err:
            if missing:
                raise reader.damage(row, err) from err
            missing = row.key
        except NotHereError:  # local limits have just deleted its segment
            continue


# --- a lineage -------------------------------------------------------------------------------------------------------


class LineageLogs(NamedTuple):
    """What the commits of a lineage say. `logs`: by topic and partition; their `local_offset` is their end."""

    lineage: str
    marks_from: int
    logs: dict[tuple[str, int], LogRows]
    gaps: dict[tuple[str, int], Gaps]
    tables: frozenset[str]


class Lineage(Broker):
    """The records of a broker in its store, `s3://bucket/prefix`, or `…/prefix/<lineage>` if the prefix has several."""

    def __init__(self, name: str, found: LineageLogs | None = None) -> None:
        """`found`: what its commits say; None: they are read once it is needed."""
        self.name, self._found = name, found
        named = _LINEAGE.fullmatch(name)
        url, self._named = named.groups() if named else (name, "")
        self._reader = StoreReader(url, "path")
        self.gaps: dict[tuple[str, int], Gaps] = {}

    def __reduce__(self) -> tuple[type["Lineage"], tuple[str, LineageLogs | None]]:
        return Lineage, (self.name, self._found)

    def only(self, spans: "Sequence[OffsetSpan]") -> "Lineage":
        """Return this lineage for a task: with the rows of these ranges alone."""
        found = self._read()
        logs: dict[tuple[str, int], LogRows] = {}
        for log in {span.key[1:] for span in spans}:
            mine = [span for span in spans if span.key[1:] == log]
            rows = [row for row in found.logs[log].rows if any(row.base < s.end and row.next > s.start for s in mine)]
            logs[log] = found.logs[log]._replace(rows=rows)
        its_gaps = {log: each for log, each in found.gaps.items() if log in logs}
        return Lineage(self.name, found._replace(logs=logs, gaps=its_gaps))

    # --- the interface -----------------------------------------------------------------------------------------------

    def ancestors(self) -> list[str]:
        return []

    def identity(self) -> str:
        return self._read().lineage

    def marks_from(self) -> int:
        return self._read().marks_from

    def topics(self) -> dict[str, Layout]:
        found = self._read()
        counts: dict[str, int] = {}
        for topic, number in found.logs:
            if topic != WAL:
                counts[topic] = max(counts.get(topic, 0), number + 1)
        return {
            topic: Layout(count, "", topic in found.tables and not topic.startswith(gaps.INTERNAL))
            for topic, count in counts.items()
        }

    def bounds(self, topics: Sequence[str]) -> LogBounds:
        found = self._read()
        self.gaps = found.gaps
        return {
            log: (rows.first_offset, rows.local_offset) for log, rows in sorted(found.logs.items()) if log[0] in topics
        }

    def survey(self, topics: Sequence[str], wants: Callable[[str], bool]) -> tuple[str, Callable[[], LogBounds]]:
        def bounds() -> LogBounds:
            return self.bounds(topics or [topic for topic in [*self.topics(), WAL] if wants(topic)])

        return self.identity(), bounds

    def stamp_at_end(self, topic: str, partition: int, offset: int) -> tuple[int, int] | None:
        return None

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        return self._offset_of(topic, partition, micros, RECV_TS)

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        return self._offset_of(topic, partition, seq, SEQ)

    def _offset_of(self, topic: str, partition: int, target: int, field: int) -> int:
        log = self._read().logs[topic, partition]
        for row in log.rows:
            if (row.seqs[1], row.times[1])[field] >= target:
                found_gaps = self._read().gaps.get((topic, partition), ())
                found = self._reader.offset_of(row, target, field, topic == WAL, found_gaps)
                if found is not None:
                    return int(max(found, log.first_offset))
        return int(log.local_offset)

    def ledger(self) -> dict[str, Any]:
        raise ConfigError(
            f"path={quotation(self.name, is_path=True)}: a copy has records, and no accounts of its broker: kmq restore, or give"
            " its data directory or gateway"
        )

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        offsets, seen = [], 0
        for row in self._read().logs[topic, partition].rows:
            if row.base < end and row.next > start:
                if seen and seen + row.nbytes > nbytes:
                    offsets.append(row.base)
                    seen = 0
                seen += row.nbytes
        return offsets

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        nothing: Iterator[Lines] = iter(())
        rows_of = partial(self._rows, topic, partition)
        found_gaps = self._read().gaps.get((topic, partition), ())
        return blocks(self._reader, rows_of, lambda low, high: nothing, start, end, topic == WAL, found_gaps)

    def _rows(self, topic: str, partition: int, start: int, end: int, missing: str) -> LogRows:
        if missing:  # retention may have dropped the row after the query was planned
            self._found = None
        return self._read().logs.get((topic, partition), LogRows(0, end, end, []))

    # --- commits -----------------------------------------------------------------------------------------------------

    def _read(self) -> LineageLogs:
        if self._found is None:
            self._found = self._read_commits()
        return self._found

    def _read_commits(self) -> LineageLogs:
        from kmq.tier.commits import copies
        from kmq.tier.store import StoreError

        where = f"path={quotation(self.name, is_path=True)}"
        try:
            found = copies(self._reader.store(), lineage=self._named)
        except StoreError as err:
            raise RetryError(f"{where}: the store does not answer, or refuses: {err}") from err
        except CorruptError as err:
            raise CorruptError(f"{where}: its commits are damaged: {err}") from err
        if not found:
            what = f"no lineage {self._named}" if self._named else "no copy of a broker"
            raise ConfigError(f"{where}: the store has {what}")
        if len(found) > 1:
            names = ", ".join(f"{each.lineage} (last commit at {each.state.ts})" for each in found)
            first = f"{self._reader.url.rstrip('/')}/{found[0].lineage}"
            raise ConfigError(f"{where}: the store has several lineages: {names}; choose one, as in path={first}")
        state, lineage = found[0].state, found[0].lineage
        gaps_of = {
            _log_of(name): tuple(Gap(*pair) for pair in log.gaps) for (name, _), log in state.logs.items() if log.gaps
        }
        gaps_of |= {_log_of(name): line.gaps for name, line in state.tables.items() if line.gaps}
        tables = frozenset(_log_of(name)[0] for name in state.tables)
        if of_wal := self._gaps_of_wal(state, lineage):
            gaps_of[WAL, 0] = of_wal
        form = self._file(state, lineage, "format")
        marks_from = 1 if form is None else identity.marks_in(form.decode())  # without it all keys may have marks
        return LineageLogs(lineage, marks_from, _logs_of(state, lineage), gaps_of, tables)

    def _gaps_of_wal(self, state: "TierState", lineage: str) -> Gaps:
        """Return the gaps that the copies of two small files name, which only a forked or restored broker has."""
        if gaps.NAME not in state.files:
            return ()
        with TemporaryDirectory(prefix="kmq-") as directory:
            for name in (gaps.NAME, "dropped.log"):
                if (content := self._file(state, lineage, name)) is not None:
                    replace_file(f"{directory}/{name}", content)
            return gaps.of_wal(directory)

    def _file(self, state: "TierState", lineage: str, name: str) -> bytes | None:
        """Return the copy of a small file; None without one."""
        from kmq.tier import objects

        line = state.files.get(name)
        if line is None:
            return None
        row = _row(line, lineage, 0, 1)
        return b"".join(objects.unpack([self._reader.content(row)], row.key))


def _log_of(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("/")
    return topic, int(number)


def _logs_of(state: "TierState", lineage: str) -> dict[tuple[str, int], LogRows]:
    found: dict[tuple[str, int], LogRows] = {}
    for (name, life), log in sorted(state.logs.items(), key=lambda item: item[0][1]):
        if log.end is not None:
            rows = [row._replace(key=full_key(lineage, row.key)) for row in log.rows]
            first, end = (max(log.before, rows[0].base), rows[-1].next) if rows else (log.end, log.end)
            found[_log_of(name)] = LogRows(life, first, end, rows)
    for name, line in state.tables.items():
        base, end = line.number("base"), line.number("end")
        rows = [_row(line, lineage, base, end)] if base < end else []
        found[_log_of(name)] = LogRows(line.number("life"), base, end, rows)
    for topic, number in [*found]:
        for lower in range(number):  # partitions without rows
            found.setdefault((topic, lower), LogRows(0, 0, 0, []))
    wal = [_row(line, lineage, line.number("first"), line.number("last") + 1) for line in state.wal]
    found[WAL, 0] = LogRows(0, state.wal_first, state.wal_end, wal)
    return found


def _row(line: "CommitLine", lineage: str, base: int, end: int) -> TierRow:
    """Return a line that names an object of the records base…end-1 as a row. A table says no seqs and times."""
    since, _, until = line.values.get("ts", f"0-{identity.NEVER}").partition("-")
    seqs = (base, end - 1) if line.verb == "wal" else (0, identity.NEVER)
    times = int(since.replace(".", "")), int(until.replace(".", ""))
    sizes = line.number("bytes"), line.number("size")
    return TierRow(0, base, end, seqs, times, *sizes, line.values["sha256"], 0, full_key(lineage, line.values["key"]))
