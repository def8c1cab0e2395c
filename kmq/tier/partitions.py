"""Old records of topics: uploads the missing ones of partitions with tier=on, and lays out rows for the router.

    orders/3 ends with offset 1512 in router.ckpt, its rows with 1000
        → an object topics/orders/130/3/1000-1512…, and `add orders/3 life=130 base=1000 next=1512 …` in a commit
        → topics/.tiered/orders-3, the same line, from which the router makes topics/orders/3/tier (kmq/log/rows.py)

When        KMQ_TIER_OBJECT bytes are there (sealed or not: what a checkpoint covers never changes), or a sealed segment
            is due by local limits, or a WAL object waits for the records: a thousand idle partitions cost nothing.
Owner       the process `kmq.tier`. It holds no plan: a turn compares rows, router.ckpt and the files `tier`.
Invariant   A row ends at or before what router.ckpt covers, where it is made and where it is laid out: so a partition has
            each record itself before it may delete it, and a rebuild never begins after its own end. A row has what the
            local file has, byte for byte, read block by block; a damaged block ends the rows of its partition until it
            is healed. Rows follow one another; what went before it was copied is skipped by a `drop … before`.
Shard       The leader makes rows. Each replica lays out all of them for its own router, whatever the borders of its own
            segments are; a row that ends after its router.ckpt waits.
Crash       after a commit   the next turn lays out what the file `tier` lacks;
            after a layout   the router takes only lines that it does not have.
Memory      One object as it is stored.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from kmq.config.values import FOREVER
from kmq.errors import ConfigError
from kmq.files import make_directory, replace_file
from kmq.log import deletions, gaps, identity, reader, rows, segment
from kmq.log.bounds import Bounds
from kmq.log.damage import DamageError
from kmq.log.partition import PartitionState, directory_of
from kmq.log.reader import LogReader
from kmq.log.rows import TierFile
from kmq.log.segment import Limits, Segment
from kmq.logfmt import Logger
from kmq.message import record
from kmq.tier import objects
from kmq.tier.commits import AheadError, CommitLine, TierState, line, numbered
from kmq.tier.objects import MEMBER_BYTES, Packed

OUTBOX = "topics/.tiered"  # what is laid out for the router


class Uploads(NamedTuple):
    """What a turn does with an object. `key` makes a key unique; `upload` returns what the row says of the object."""

    key: Callable[[str], str]
    upload: Callable[[str, Packed], dict[str, object]]
    commit: Callable[..., None]
    rest: Callable[[int], None]


class TieredPartition(NamedTuple):
    """A partition by router.ckpt, with the limits of its topic. `logs`: what the commits say of all partitions."""

    topic: str
    number: int
    life: int
    state: PartitionState
    limits: Limits
    logs: Mapping[tuple[str, int], TierFile]

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.number}"

    @property
    def log(self) -> TierFile:
        """The rows of the partition."""
        return self.logs.get((self.name, self.life)) or rows.empty("", self.name, self.life)

    @property
    def is_behind(self) -> bool:
        end = self.log.end
        return self.limits.is_tiered and (end is None or end < self.state.end_offset)


class TierTotals(NamedTuple):
    """What the store has of partitions: `rows`, with `row_bytes` of lines.

    `behind_bytes`: of segments that local limits would delete, and that are not in the store. `local_limit`: the sum of
    local_retention_bytes of partitions whose old records go there.
    """

    rows: int
    row_bytes: int
    behind_bytes: int
    local_limit: int


class PartitionCopier:
    """Copies partitions, and drops and lays out their rows."""

    def __init__(
        self, data: str, limits: Callable[[], Limits], object_bytes: int, uploads: Uploads, logger: Logger
    ) -> None:
        self._data, self._limits, self._object_bytes = data, limits, object_bytes
        self._bounds = Bounds(data)  # it parses a declaration once
        self._uploads, self._logger = uploads, logger
        self._damaged: dict[str, str] = {}  # by partition: the last logged reason
        self._idle: dict[str, tuple[object, ...]] = {}  # by partition: its state when nothing was due
        self._waiting: dict[str, tuple[object, int]] = {}  # by partition: `waiting_seq`, and for what it holds
        self._compared: set[tuple[str, int]] = set()  # partitions whose last row matches the disk

    def found(
        self, state: TierState, states: Mapping[tuple[str, int], PartitionState], lives: Mapping[str, int]
    ) -> list[TieredPartition]:
        """Return the partitions that have rows, or whose topics say tier=on; first those that have waited longest."""
        usual, found = self._limits(), []
        of_topic: dict[str, Limits] = {}
        for (topic, number), at in states.items():
            if topic.startswith(gaps.INTERNAL) or topic not in lives:
                continue
            if topic not in of_topic:
                of_topic[topic] = self._limits_of(usual, topic)
            each = TieredPartition(topic, number, lives[topic], at, of_topic[topic], state.logs)
            if each.limits.is_tiered or each.log.end is not None or self._adopted(each):
                found.append(each)
        return sorted(found, key=lambda each: each.log.last_seq)

    def _limits_of(self, usual: Limits, topic: str) -> Limits:
        """Return the limits of a topic; the usual ones where its file is wrong, as the router has them."""
        try:
            return usual.with_changes(self._bounds.declaration(topic).limits)
        except ConfigError:
            return usual

    # --- copies ------------------------------------------------------------------------------------------------------

    def copy(self, which: TieredPartition, needed_seq: int, now_s: float) -> Iterator[None]:
        """Copy what is due, and yield after each object. `needed_seq`: objects of the WAL up to it wait for the copy."""
        if which.log.end is None and (lines := self._adopted(which)):
            self._uploads.commit(*lines)
        seen = which.state.values(), which.log.end, needed_seq, which.limits
        if self._idle.get(which.name) == seen:
            return
        while which.is_behind:
            try:
                lines = self._next(which, needed_seq, now_s)
            except DamageError as err:
                self._say_damaged(which, err)
                return
            if not lines:
                if which.limits.local_retention_age == FOREVER:  # else time alone makes a segment due
                    self._idle[which.name] = seen
                return
            self._damaged.pop(which.name, None)
            self._uploads.commit(*lines)
            yield

    def _adopted(self, which: TieredPartition) -> list[CommitLine]:
        """Return the rows of the file `tier` that no commit has: the directory was forked, and has a new lineage."""
        try:
            found = rows.of(directory_of(self._data, which.topic, which.number))
        except DamageError:
            return []
        return numbered(found.lines()) if found.rows and found.life == which.life else []

    def _say_damaged(self, which: TieredPartition, err: DamageError) -> None:
        if self._damaged.get(which.name) != str(err):
            self._damaged[which.name] = str(err)
            names = {"topic": which.topic, "partition": which.number}
            effect = "its records from there on stay on this disk only; kmq verify --repair"
            self._logger.error("tier_partition_damaged", **names, reason=err, effect=effect)

    def _next(self, which: TieredPartition, needed_seq: int, now_s: float) -> list[CommitLine]:
        """Make the next object of a partition, if it is due; return the lines of its commit."""
        segments = segment.survey(directory_of(self._data, which.topic, which.number))
        if not segments:
            return []
        self._compare(which, segments[0].first)
        lines, begin = self._skipped(which, segments[0].first)
        log = reader.local(self._data, which.topic, which.number)
        end = next((gap.first for gap in log.gaps() if begin < gap.first), which.state.end_offset)
        end = min(end, which.state.end_offset)
        first = log.stamp_of(begin) if begin < end else None
        if first is None or not (first[0] <= needed_seq or self._is_due(which, segments, begin, end, now_s)):
            return []
        taken = [begin]
        packed = objects.pack(self._blocks(log, begin, end, taken))
        if not packed.nbytes:
            return []
        seq, ts = record.stamp(packed.last)
        row: dict[str, object] = {
            "life": which.life,
            "base": begin,
            "next": taken[0],
            "seq": f"{first[0]}-{seq}",
            "ts": f"{record.format_ts(first[1]).decode()}-{record.format_ts(ts).decode()}",
        }
        path = f"topics/{which.topic}/{which.life}/{which.number}/{begin}-{taken[0]}"
        made = self._uploads.upload(f"{self._uploads.key(path)}.log.gz", packed)
        row |= {name: made[name] for name in ("bytes", "size", "sha256")}
        self._uploads.rest(packed.nbytes)
        return [*lines, line("add", which.name, **row, last=zlib.crc32(packed.last), key=made["key"])]

    def _compare(self, which: TieredPartition, local: int) -> None:
        """Raise AheadError unless the last row says what the disk says, as far as the disk still has it."""
        at, log = (which.name, which.life), which.log
        if at in self._compared or not log.rows or log.end is None:
            return
        last = log.rows[-1]
        if which.state.end_offset < log.end:
            raise AheadError(f"the store has {which.name} up to offset {log.end}, this directory less: an older state")
        if last.next > local:
            first, lines = reader.local(self._data, which.topic, which.number).read(last.next - 1, 1)
            if first != last.next - 1 or zlib.crc32(lines) != last.last:
                raise AheadError(f"the store has another record {last.next - 1} of {which.name}: it went on elsewhere")
        self._compared.add(at)

    def _skipped(self, which: TieredPartition, local: int) -> tuple[list[CommitLine], int]:
        """Return the lines that say what is never copied, and the offset with which the next row begins.

        A segment that is missing is no reason: nothing is skipped that neither router.ckpt nor `tier` say was deleted.
        """
        directory = directory_of(self._data, which.topic, which.number)
        found = gaps.read(directory)
        begin = max(which.state.start, rows.of(directory).start)
        start = gaps.passed(found, max(local, begin))
        end, lines = which.log.end, []
        if gaps.passed(found, begin) < start:
            return [], begin if end is None else end
        if end is None:
            return [], start
        for gap in found:
            if gap.first == end:
                values = {"life": which.life, "from": gap.first, "to": gap.to, "why": "fork"}
                lines.append(line("gap", which.name, **values))
                end = gap.to
        if end < start:
            why = "start" if start > local else "retention"
            lines, end = [line("drop", which.name, life=which.life, before=start, why=why)], start
        return lines, end

    def _is_due(self, which: TieredPartition, segments: list[Segment], begin: int, end: int, now_s: float) -> bool:
        """Return True if the records begin…end-1 fill an object, or a sealed segment with some is due by local limits."""
        *sealed, active = segments
        whole = [part.size for part, after in pairwise(segments) if begin <= part.first and after.first <= end]
        if sum(whole) >= self._object_bytes:  # a long backlog is not searched for each of its objects
            return True
        rest = [part for part, after in pairwise(segments) if after.first > begin]
        if sum(part.size for part in rest) + active.size >= self._object_bytes:
            log = reader.local(self._data, which.topic, which.number)
            if log.cuts(begin, end, self._object_bytes):
                return True
        due = which.limits.local().expired(sealed, active.size, now_s, len(sealed))
        return bool(due) and segments[due].first > begin

    def totals(self, found: list[TieredPartition], now_s: float) -> TierTotals:
        """Return what there is of these partitions, and what waits. The store is not asked."""
        logs = [each.log if each.log.end is not None else self._file_of(each) for each in found]
        sizes = [row.nbytes for log in logs for row in log.rows]
        behind = sum(self._behind_bytes(each, log.end or 0, now_s) for each, log in zip(found, logs, strict=True))
        limit = sum(each.limits.local_retention_bytes for each in found if each.limits.is_tiered)
        return TierTotals(len(sizes), sum(sizes), behind, limit)

    def _file_of(self, which: TieredPartition) -> TierFile:
        """Return what the file `tier` says of a partition: before the commits were read, nothing else is known."""
        with contextlib.suppress(DamageError):
            found = rows.of(directory_of(self._data, which.topic, which.number))
            if found.life == which.life:
                return found
        return which.log

    def _behind_bytes(self, which: TieredPartition, end: int, now_s: float) -> int:
        """Return the bytes of segments that local limits would delete, if the store had them: rows end at `end`."""
        idle = self._idle.get(which.name)
        if not which.limits.is_tiered or end >= which.state.end_offset:
            return 0
        if idle is not None and idle[:2] == (which.state.values(), which.log.end):
            return 0  # nothing was due at the last look, and nothing has changed
        segments = segment.survey(directory_of(self._data, which.topic, which.number))
        if not segments:
            return 0
        *sealed, active = segments
        due = which.limits.local().expired(sealed, active.size, now_s, len(sealed))
        ends = [after.first for after in segments[1:]]
        is_copyable = [end < each <= which.state.end_offset for each in ends[:due]]
        return sum(part.size for part, copyable in zip(sealed, is_copyable, strict=False) if copyable)

    def waiting_seq(self, which: TieredPartition) -> int:
        """Return the seq of the first record that waits for its copy. Objects of the WAL from there on are needed."""
        if not which.is_behind or which.state.start >= which.state.end_offset:  # it has no record
            return identity.NEVER
        seen = which.log.end, which.state.start
        cached = self._waiting.get(which.name)
        if cached is None or cached[0] != seen:
            cached = self._waiting[which.name] = seen, self._first_waiting(which)
        return cached[1]

    def _first_waiting(self, which: TieredPartition) -> int:
        log = reader.local(self._data, which.topic, which.number)
        segments = log.segments()
        try:
            begin = self._skipped(which, segments[0][0])[1] if segments else 0
            found = log.stamp_of(begin)
        except DamageError:
            found = None
        return found[0] if found else which.log.last_seq + 1

    def _blocks(self, log: LogReader, begin: int, end: int, taken: list[int]) -> Iterator[bytes]:
        """Yield lines from `begin` on, up to `end` or KMQ_TIER_OBJECT bytes. `taken[0]`: the offset after them."""
        nbytes = 0
        for first, lines in log.chunks(begin, MEMBER_BYTES):
            if first != taken[0]:  # a gap, or retention
                return
            room = self._object_bytes - nbytes
            is_full = len(lines) > room
            if is_full:
                fits = lines.rfind(b"\n", 0, room) + 1
                lines = lines[: fits or (0 if nbytes else lines.find(b"\n") + 1)]  # one line may be larger
            count = record.count_lines(lines)
            if first + count > end:
                count = end - first
                lines = record.first_lines(lines, count)
            if lines:
                yield lines
                nbytes, taken[0] = nbytes + len(lines), first + count
                self._uploads.rest(0)
            if taken[0] >= end or is_full or nbytes >= self._object_bytes:
                return

    # --- what is no longer needed ------------------------------------------------------------------------------------

    def drops(self, state: TierState, found: list[TieredPartition]) -> list[CommitLine]:
        """Return the drops that are due: rows before the start of their partition, and rows of deleted topics.

        A start inside of a row is said too, although the row stays: who reads the store alone begins there.
        """
        lines = []
        for each in found:
            if not each.log.rows:
                continue
            try:
                start = rows.of(directory_of(self._data, each.topic, each.number)).start
            except DamageError:
                continue  # it is laid out again
            is_inside = any(row.base < start < row.next for row in each.log.rows)
            before = start if is_inside else max((row.next for row in each.log.rows if row.next <= start), default=0)
            if before > each.log.before:
                lines.append(line("drop", each.name, life=each.life, before=before, why="retention"))
        deleted = {(each.topic, each.from_seq) for each in deletions.read(self._data)} if state.logs else set()
        for (name, life), log in state.logs.items():
            if (name.rpartition("/")[0], life) in deleted and log.end is not None:
                lines.append(line("drop", name, life=life, before=log.end, why="deleted"))
        return lines

    # --- the router's side -------------------------------------------------------------------------------------------

    def lay_out(
        self, state: TierState, states: Mapping[tuple[str, int], PartitionState], lives: Mapping[str, int]
    ) -> None:
        """Lay out for the router which lines each file `tier` lacks, up to what router.ckpt covers.

        Of a damaged file all, also if there are none.
        """
        for (topic, number), here in states.items():
            life = lives.get(topic)
            if life is None or topic.startswith(gaps.INTERNAL):
                continue
            name, is_damaged = f"{topic}/{number}", False
            log = state.logs.get((name, life)) or rows.empty("", name, life)
            try:
                there = rows.of(directory_of(self._data, topic, number))
                end, before = (there.end or 0, there.before) if there.life in (0, life) else (0, 0)
            except DamageError:
                end, before, is_damaged = 0, 0, True
                if log.end is None and gaps.forks(self._data):
                    continue  # the rows of the lineage before the fork are not known here
            lines = [log.drop] if log.before > before else []
            missing = [row for row in log.rows if end < row.next <= here.end_offset]
            lines += [f"{row.commit} add {name} life={life} {row.text()}" for row in missing]
            if not (lines or is_damaged):
                continue
            gaps_of_log = [text for text in log.lines() if " gap " in text]
            head = rows.empty(identity.lineage(self._data), name, life).head
            make_directory(f"{self._data}/{OUTBOX}")
            content = "".join(f"{text}\n" for text in [head, *gaps_of_log, *lines])
            replace_file(f"{self._data}/{OUTBOX}/{topic}-{number}", content.encode())
