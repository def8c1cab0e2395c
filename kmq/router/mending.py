"""Mends a log that differs from the checkpoint: cuts torn ends, and writes missing records from the WAL.

Owner       the router process, at a start.
Invariant   A record gets the offset it had. Where records are lost for good, their offsets stay empty, and the router
            logs them (`unrecoverable`). If damage rather than a power cut may be the cause, only torn ends are cut.
Crash       What was mended is not synced yet, so after a kill or a power cut the next start mends the log again.
"""

from collections.abc import Iterator, Sequence

from kmq.log import lost_index, reader, segment, wal
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.index import IndexWriter
from kmq.log.partition import PartitionLog, PartitionPlace, State, directory_of
from kmq.log.partition_recovery import Gap, Remains, WalRange, recover
from kmq.log.segment import Segment
from kmq.message import record
from kmq.message.routing import Topic, resolve
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.wal_records import WalRecords


class Row:
    """A partition, and what the checkpoint says of it (`known`)."""

    __slots__ = ("known", "number", "topic")

    def __init__(self, topic: Topic, number: int, known: State) -> None:
        self.topic, self.number, self.known = topic, number, known


class Mended:
    """A mended log: its state, the seq from which it needs a replay (None: it needs none), files to be synced."""

    __slots__ = ("dirty", "needed", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.needed: int | None = None
        self.dirty: list[str] = []


class Mender:
    """Mends logs at a start."""

    def __init__(self, context: Context, in_force: TopicsInForce, records: WalRecords) -> None:
        self._context, self._in_force, self._records = context, in_force, records

    def mend(self, row: Row, segments: list[Segment], wal_range: WalRange) -> Mended:
        """Cut torn ends, and fill gaps in front of whole segments."""
        for part in segments:
            reader.check_place(part.path, part.first, by_seq=False)
        known = row.known
        # Without a checkpoint, retention may have deleted the front, or it was lost; the WAL may still have it.
        may_begin = known.last_seq or not segments or wal_range.first <= row.topic.from_seq
        remains = recover(segments, known, wal_range, known.start if may_begin else segments[0].first)
        mended = Mended(remains.state)
        where = self._path_of(row, remains)
        if remains.cut:
            self._context.logger.warn("torn_tail_cut", file=where, bytes=remains.cut, last_seq=remains.state.last_seq)
        mended.dirty += self._complete_indexes(remains.touched)
        self._find_missing_end(row, remains, mended, wal_range)
        for gap in remains.gaps:
            mended.dirty += self.fill(row, gap, is_end=gap.end == mended.state.end_offset)
        if remains.gaps:
            segments = segment.survey(directory_of(self._context.data, row.topic.name, row.number))
            mended.state.start, mended.state.size = segments[0].first, sum(part.size for part in segments)
        return mended

    def _path_of(self, row: Row, remains: Remains) -> str:
        """Return the file that a warning about a log names."""
        if remains.segments:
            return remains.segments[-1].path
        directory = directory_of(self._context.data, row.topic.name, row.number)
        return f"{directory}/{segment.name(row.known.start)}"

    def _complete_indexes(self, touched: list[Segment]) -> list[str]:
        """Complete the indexes of sealed segments; return the files to be synced."""
        dirty = [part.path for part in touched]
        for part in touched:
            if not lost_index.is_whole(part.path):
                continue  # whether it may get one again is for `may_have_index` to say
            try:  # a damaged segment must not get a new crc: readers refuse it until it is repaired
                reader.indexed_end(part.path, part.first, by_seq=False)
            except DamageError as err:
                self._context.logger.error("damaged", file=part.path, reason=err)
                self._context.damaged(err)
                continue
            IndexWriter.complete(part.path, part.first, self._context.wait_for_room, self._context.check)
            dirty.append(segment.index_path(part.path))
        return dirty

    def may_have_index(self, row: Row, segments: Sequence[Segment], number: int, end: int) -> None:
        """Check that a segment that has lost its index may get one again; raises DamageError if not. `end`: its end."""
        table, name, data = self._in_force.table, row.topic.name.encode(), self._context.data

        def contradiction(line: bytes) -> str:
            seq = record.seq_of(line)
            route = resolve(table, record.routing_key_of(line), seq)
            if route.topic != name or row.topic.partition_of(route, seq) != row.number:
                return f"its record {seq} belongs to another queue"
            return lost_index.wal_contradiction(data, line)

        lost_index.check(segments, number, False, end, contradiction, self._context.check)

    def _find_missing_end(self, row: Row, remains: Remains, mended: Mended, wal_range: WalRange) -> None:
        """Decide how a short log gets its missing end: from the replay (`needed`), or as one more gap."""
        state, known = remains.state, row.known
        is_short = state.end_offset < known.end_offset
        needed = state.last_seq + 1 if state.last_seq else row.topic.from_seq
        if is_short or remains.gaps:
            starts = [gap.seqs.first for gap in remains.gaps]
            self._context.logger.warn(
                "queue_short",
                file=self._path_of(row, remains),
                bytes=state.size,
                expected_bytes=known.size,
                rebuilt_from_seq=min([*starts, needed] if is_short else starts),
            )
        if not is_short:
            return
        if needed < wal_range.first:
            # A replay would begin with the oldest record of the WAL, and give it a wrong offset. As a gap, the records
            # are numbered from its end.
            into = remains.segments[-1] if remains.segments else None
            remains.gaps.append(Gap(state.end_offset, known.end_offset, SeqRange(needed, known.last_seq), into))
            state.end_offset, state.last_seq = known.end_offset, known.last_seq
            return
        mended.needed = needed
        if not remains.segments:  # rebuild from the first record on, also records that retention had deleted
            mended.state = self._in_force.first_state(row.topic.name, row.number)

    def fill(self, row: Row, gap: Gap, is_end: bool) -> list[str]:
        """Write the records of a gap from the WAL; return the files to be synced.

        Records that the WAL no longer has are reported.
        """

        def blocks() -> Iterator[bytes]:
            return self._records.of_partition(row.topic, row.number, gap.seqs)

        has = sum(lines.count(b"\n") for lines in blocks())
        missing = gap.end - gap.first
        lost, skip = max(0, missing - has), max(0, has - missing)
        if lost:
            has_from = next((record.seq_of(lines) for lines in blocks()), gap.seqs.last + 1)
            self._report_lost(row, gap, lost, has_from)
        if lost == missing and not is_end:
            return []
        log = self._log_into(row, gap, lost)
        log.open(self._context.logger.warn, was_cut=True)
        for lines in _without_first(blocks(), skip):  # retention had deleted the first ones
            log.append(lines, lines.count(b"\n"), record.seq_of(lines), record.seq_of(wal.last_line(lines)))
        log.seal()
        log.close()
        return log.unsynced

    def _report_lost(self, row: Row, gap: Gap, lost: int, has_from: int) -> None:
        self._context.logger.error(
            "unrecoverable",
            topic=row.topic.name,
            partition=row.number,
            first_offset=gap.first,
            last_offset=gap.first + lost - 1,
            first_seq=gap.seqs.first,
            last_seq=has_from - 1,
            reason="no longer in the WAL",
        )

    def _log_into(self, row: Row, gap: Gap, lost: int) -> PartitionLog:
        """Return a log that writes into a gap: the segment that was cut, else a new one behind the lost records."""
        begin = gap.first + lost
        state = State(begin, gap.seqs.first - 1, 0, begin)
        if gap.into is not None and not lost:
            state = State(gap.first, gap.seqs.first - 1, gap.into.size, gap.into.first)
        place = PartitionPlace(self._context.data, row.topic.name, row.number)
        limits = self._in_force.limits_of(row.topic.name)
        return PartitionLog(place, state, self._context.wait_for_room, limits)


def _without_first(blocks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, without the first `skip` lines."""
    for lines in blocks:
        count = lines.count(b"\n")
        if skip < count:
            yield lines if not skip else b"\n".join(lines.split(b"\n")[skip:])
        skip = max(0, skip - count)
