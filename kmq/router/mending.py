"""One log that is not as the checkpoint says: cutting what is torn, and writing from the WAL what is missing.

Owner       the router process, at a start.
Invariant   A record gets the offset it had: where records are lost for good, their offsets stay empty, and the log of
            the router names them (`unrecoverable`). Nothing is cut but torn ends where damage, and not a power cut, may
            be the cause.
Crash       What was mended is not synced yet, so a kill or a power cut leaves a log that the next start mends again.
"""

from collections.abc import Iterator

from kmq import record
from kmq.log import reader, segment, wal
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.index import IndexWriter
from kmq.log.partition import PartitionLog, PartitionPlace, State, directory_of
from kmq.log.partition_recovery import Gap, Remains, WalRange, recover
from kmq.log.segment import Segment
from kmq.router.context import Context
from kmq.router.in_force import TopicsInForce
from kmq.router.wal_records import WalRecords
from kmq.routing import Topic


class Row:
    """A partition and what the checkpoint says of it."""

    __slots__ = ("known", "number", "topic")

    def __init__(self, topic: Topic, number: int, known: State) -> None:
        self.topic, self.number, self.known = topic, number, known


class Mended:
    """A mended log: its state, the seq from which it needs the WAL (None: not at all), files to be synced."""

    __slots__ = ("dirty", "needed", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.needed: int | None = None
        self.dirty: list[str] = []


class Mender:
    """See the module."""

    def __init__(self, context: Context, in_force: TopicsInForce, records: WalRecords) -> None:
        self._context, self._in_force, self._records = context, in_force, records

    def mend(self, row: Row, segments: list[Segment], wal_range: WalRange) -> Mended:
        """Cut what is torn and fill what is missing in front of something good."""
        for each in segments:
            reader.check_place(each.path, each.first, by_seq=False)
        known = row.known
        # Without a checkpoint nothing says whether retention took the front; the WAL may still have it then.
        may_begin = known.last_seq or not segments or wal_range.first <= row.topic.from_seq
        remains = recover(segments, known, wal_range, known.start if may_begin else segments[0].first)
        mended = Mended(remains.state)
        where = self._path_of(row, remains)
        if remains.cut:
            self._context.logger.warn("torn_tail_cut", file=where, bytes=remains.cut, last_seq=remains.state.last_seq)
        mended.dirty += self._complete_indexes(remains.touched)
        self._find_missing_end(row, remains, mended, wal_range)
        for gap in remains.gaps:
            mended.dirty += self._fill(row, gap, is_end=gap.end == mended.state.end_offset)
        if remains.gaps:
            segments = segment.survey(directory_of(self._context.data, row.topic.name, row.number))
            mended.state.start, mended.state.size = segments[0].first, sum(each.size for each in segments)
        return mended

    def _path_of(self, row: Row, remains: Remains) -> str:
        """The file that a warning about a log names."""
        if remains.segments:
            return remains.segments[-1].path
        directory = directory_of(self._context.data, row.topic.name, row.number)
        return f"{directory}/{segment.name(row.known.start)}"

    def _complete_indexes(self, touched: list[Segment]) -> list[str]:
        """Make the indexes of sealed segments whole; returns the files to be synced."""
        dirty = []
        for each in touched:
            try:  # a segment that differs from its index gets no new crc: readers refuse it until it is repaired
                reader.indexed_end(each.path, each.first, by_seq=False)
            except DamageError as err:
                self._context.logger.error("damaged", file=each.path, reason=err)
                continue
            IndexWriter.complete(each.path, each.first, self._context.wait_for_room, self._context.check)
            dirty += [each.path, segment.index_path(each.path)]
        return dirty

    def _find_missing_end(self, row: Row, remains: Remains, mended: Mended, wal_range: WalRange) -> None:
        """Decide how the end that a short log lacks comes back: by the replay (`needed`), or as one more gap."""
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
            # A replay would begin with the next record that the WAL has, and number it wrongly: count back from the
            # end.
            into = remains.segments[-1] if remains.segments else None
            remains.gaps.append(Gap(state.end_offset, known.end_offset, SeqRange(needed, known.last_seq), into))
            state.end_offset, state.last_seq = known.end_offset, known.last_seq
            return
        mended.needed = needed
        if not remains.segments:  # from its first record on, also what retention had taken
            mended.state = self._in_force.first_state(row.topic.name, row.number)

    def _fill(self, row: Row, gap: Gap, is_end: bool) -> list[str]:
        """Write from the WAL what is missing between two segments; returns the files to be synced.

        What the WAL no longer has is reported.
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
        for lines in _without_first(blocks(), skip):  # retention had taken them
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
        """A log that writes into a gap: on in the segment that was cut, else in a new one behind the lost records."""
        begin = gap.first + lost
        state = State(begin, gap.seqs.first - 1, 0, begin)
        if gap.into is not None and not lost:
            state = State(gap.first, gap.seqs.first - 1, gap.into.size, gap.into.first)
        place = PartitionPlace(self._context.data, row.topic.name, row.number)
        limits = self._in_force.limits_of(row.topic.name)
        return PartitionLog(place, state, self._context.wait_for_room, limits)


def _without_first(blocks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Blocks of whole lines without their first `skip` lines."""
    for lines in blocks:
        count = lines.count(b"\n")
        if skip < count:
            yield lines if not skip else b"\n".join(lines.split(b"\n")[skip:])
        skip = max(0, skip - count)
