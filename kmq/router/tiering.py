"""The rows of partitions, whose old records lie in KMQ_TIER: the router's side.

    topics/.tiered/orders-3 says `184 add orders/3 … base=1000 next=1512 …`     → a line in topics/orders/3/tier
    topics/orders/3 has segments from 1000 on, its local limits have room for less, `tier` has rows up to 1512
                                                                  → the segments that end at or before 1512 may go

Owner       the router process. kmq.tier lays lines out; this module alone writes the files `tier` (kmq/log/rows.py).
Invariant   Nothing is deleted by local limits, or for room, that `tier` on disk does not have. Total limits are decided
            over rows and segments as one list, oldest first, by offsets: no byte counts twice, and a segment never goes
            before a row that is older. `start` is on disk before a segment goes that no row has.
Crash       Lines that were taken are not taken again. What is laid out stays until it is installed.
Memory      The parsed file of each partition that has one.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

from kmq.files import make_directory, with_room
from kmq.log import gaps, identity, rows, segment
from kmq.log.index import lineage_of
from kmq.log.partition import PartitionState, directory_of
from kmq.log.rows import TierFile
from kmq.log.segment import Limits, Segment
from kmq.message.routing import Topic
from kmq.router.in_force import Context, TopicsInForce

OUTBOX = "topics/.tiered"  # in which kmq.tier lays out lines
_PLACE = re.compile(r"(.+)-(\d{1,4})")
_NOTHING = rows.empty("", "", 0)  # of a partition without the file
_WHAT = "that old records of partitions lie in KMQ_TIER"


class Tiering:
    """What the router knows of the rows of partitions."""

    def __init__(
        self, context: Context, in_force: TopicsInForce, states: Mapping[tuple[str, int], PartitionState]
    ) -> None:
        """`states`: of all partitions."""
        self._context, self._in_force, self._states = context, in_force, states
        self._files: dict[tuple[str, int], TierFile] = {}
        self._unknown: dict[tuple[str, int], int] = {}  # damaged files: the start that waits for the rows
        self._is_writing = False  # a file, which may wait for room

    def load(self, topic: Topic, number: int, known: PartitionState | None) -> TierFile | None:
        """Read the file of a partition, at a start. Return it if it has rows. `known`: what router.ckpt says."""
        directory = directory_of(self._context.data, topic.name, number)
        content = rows.content_of(directory)
        if content is None and self._is_lost(topic, number, directory, known):
            make_directory(directory)
            self._context.replace(rows.path_of(directory), content := rows.UNKNOWN)
        if content is None:
            return None
        found = rows.parse(content, f"{topic.name}/{number}")
        if found is not None and found.life == topic.from_seq:
            self._files[topic.name, number] = found
            return found if found.rows else None
        if found is None:
            self._unknown.setdefault((topic.name, number), 0)
            with contextlib.suppress(FileNotFoundError):  # it has only what followed the lost rows
                os.unlink(f"{self._context.data}/{OUTBOX}/{topic.name}-{number}")
            effect = "readers are refused offsets before its segments until kmq.tier has laid out its rows again"
            self._context.logger.error("rows_damaged", file=rows.path_of(directory), effect=effect)
        return None

    def _is_lost(self, topic: Topic, number: int, directory: str, known: PartitionState | None) -> bool:
        """Return True if a partition without the file may have rows: records were deleted here, and others have rows."""
        if not self.may_be_lost(topic.name, number):
            return False
        listed = segment.listing(directory)
        start = known.start if known else listed[0][0] if listed else 0
        return start > self._in_force.first_state(topic.name, number).start

    def may_be_lost(self, name: str, number: int) -> bool:
        """Return True if a partition has no file, although it may have had one: of a topic with tier=on, as others have."""
        data = self._context.data
        has_file = os.path.exists(rows.path_of(directory_of(data, name, number)))
        if has_file or not (self._in_force.limits_of(name).is_tiered and rows.may_exist(data)):
            return False
        version = identity.version(data)
        return version is not None and version[0] >= identity.FORKED

    def is_unknown(self, name: str, number: int) -> bool:
        """Return True if the file of a partition is damaged, or was lost."""
        return (name, number) in self._unknown

    def of(self, name: str, number: int) -> TierFile | None:
        """Return the rows of a partition; None if it has never had any."""
        found = self._file(name, number)
        return found if found is not None and found.end is not None else None

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def _file(self, name: str, number: int) -> TierFile | None:
        found = self._files.get((name, number))
        if found is None:
            return None
        topic, state = self._in_force_of(name, number)
        if topic is None or found.life != topic.from_seq:
            return None  # of a deleted topic
        if state is not None and len(state.gaps) > len(found.gaps):  # written by an append
            found = self._files[name, number] = found.copy()
            found.gaps = tuple((gap.first, gap.to) for gap in state.gaps)
        return found

    def _in_force_of(self, name: str, number: int) -> tuple[Topic | None, PartitionState | None]:
        topic: Topic | None = self._in_force.table.get(name.encode())
        is_there = topic is not None and not topic.is_gone and number < topic.partitions
        return topic if is_there else None, self._states.get((name, number))

    # --- lines that are laid out -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the lines that kmq.tier has laid out."""
        try:
            names = [
                match for name in os.listdir(f"{self._context.data}/{OUTBOX}") if (match := _PLACE.fullmatch(name))
            ]
        except FileNotFoundError:
            return
        for name in names:
            path = f"{self._context.data}/{OUTBOX}/{name[0]}"
            with open(path, "rb") as file:
                laid_out = file.read()
            self._install(name[1], int(name[2]), laid_out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _install(self, name: str, number: int, laid_out: bytes) -> None:
        topic, _ = self._in_force_of(name, number)
        head = laid_out[: laid_out.find(b"\n") + 1]
        coming = rows.parse(head, f"{name}/{number}")  # whether its lines follow is asked below
        if topic is None or coming is None or coming.life != topic.from_seq:
            self._context.logger.warn("rows_discarded", topic=name, partition=number, reason="of another life")
            return
        try:
            lines = laid_out.decode("ascii").splitlines()[1:]
            if (name, number) in self._unknown:
                lines += self._missed(topic, number, laid_out)
            after = self._append(topic, number, lines)
        except ValueError as err:
            self._context.logger.warn("rows_discarded", topic=name, partition=number, reason=err)
            return
        names = {"topic": name, "partition": number, "end_offset": after.end}
        self._context.logger.info("rows_installed", **names, rows=len(after.rows))

    def _missed(self, topic: Topic, number: int, laid_out: bytes) -> list[str]:
        """Return what the commits do not say of a partition whose file was lost: the gap after its rows, and its start."""
        at, directory = (topic.name, number), directory_of(self._context.data, topic.name, number)
        coming = rows.parse(laid_out)
        end, forks = coming.end or 0 if coming else None, self._in_force.forks_of(topic.name)
        found = tuple(gaps.between(segment.survey(directory), forks, end)) if forks else ()
        self._states[at].gaps = tuple(sorted({*self._states[at].gaps, *found}))
        where, start = f"{topic.name}/{number} life={topic.from_seq}", self._unknown[at]
        lines = [f"0 gap {where} from={gap.first} to={gap.to} why=fork" for gap in found]
        return [*lines, f"start {start}"] if start else lines

    def _append(self, topic: Topic, number: int, lines: list[str]) -> TierFile:
        """Add lines to the file of a partition. It is on disk when this returns."""
        at, directory = (topic.name, number), directory_of(self._context.data, topic.name, number)
        before = self._file(*at)
        is_new = before is None
        if before is None:
            self._in_force.raise_format(identity.FORKED, topic, _WHAT)
            before = rows.empty(lineage_of(self._context.data), f"{topic.name}/{number}", topic.from_seq)
            before.gaps = tuple((gap.first, gap.to) for gap in self._states[at].gaps)
        base = before
        self._is_writing = True
        try:
            found = with_room(
                rows.path_of(directory),
                self._context.wait_for_room,
                lambda: rows.append(directory, base, lines, is_new),
            )
        finally:
            self._is_writing = False
        assert isinstance(found, TierFile)
        self._files[at] = found
        self._unknown.pop(at, None)
        return found

    # --- starts and limits -------------------------------------------------------------------------------------------

    def set_start(self, name: str, number: int, offset: int) -> None:
        """Let a partition begin at `offset` for readers, if it has rows or may get some; it may begin later already.

        A row may be on its way: without the start it would bring back what was deleted.
        """
        found, (topic, state) = self.of(name, number), self._in_force_of(name, number)
        if (name, number) in self._unknown and (state is None or offset < state.start):
            self._unknown[name, number] = max(self._unknown[name, number], offset)
            return
        may_have_rows = found is not None or self._in_force.limits_of(name).is_tiered
        found = found or self._file(name, number) or _NOTHING
        if topic is not None and may_have_rows and found.start < offset:
            self._append(topic, number, [f"start {offset}"])

    def end_at(self, name: str, number: int, seq: int) -> int | None:
        """Return an offset at or before the end that a partition had at record `seq`; None if no row has that record."""
        found = self.of(name, number)
        row = next((row for row in found.rows if row.seqs[1] >= seq), None) if found else None
        return row.base if row else None

    def due(self, at: tuple[str, int], state: PartitionState, limits: Limits, now_s: float, most: int) -> int:
        """Return how many of the oldest sealed segments of a partition may go; let it begin later if rows are due."""
        found = self.of(*at) or (_NOTHING if limits.is_tiered else None)
        if found is None:
            return limits.expired(state.sealed, state.active_bytes, now_s, most)
        if self._is_writing:  # room is made for this file itself: its start cannot move now
            return self._due_here(found, state, limits, now_s, most)
        start, count = self._due_in_all(found, state, limits, now_s, most)
        if start > found.begin(state.start):
            sealed = state.sealed
            self.set_start(*at, start)
            if state.sealed is not sealed:  # it waited for room, and segments went meanwhile: the next tick looks again
                return 0
        return max(count, self._due_here(found, state, limits, now_s, most))

    def _due_in_all(
        self, found: TierFile, state: PartitionState, limits: Limits, now_s: float, most: int
    ) -> tuple[int, int]:
        """Return where the partition begins by its total limits, and how many segments may go by them."""
        cold = found.cold(state.start)
        begin = found.begin(state.start)
        total = found.cold_bytes(state.start) + state.size
        for row in cold:
            is_too_large = bool(limits.retention_bytes) and total > limits.retention_bytes
            if not (is_too_large or row.times[1] <= (now_s - limits.retention_age) * 1e6):
                return begin, 0
            total -= rows.nbytes_before([row], state.start) - rows.nbytes_before([row], begin)
            begin = min(row.next, state.start)
        count = limits.expired(state.sealed, state.active_bytes, now_s, most)
        if count and count == len(state.sealed) and not state.active_bytes:
            return state.sealed_ends()[-1] - 1, count  # the last record of a log stays
        return ([*(part.first for part in state.sealed), state.base][count] if count else begin), count

    def _due_here(self, found: TierFile, state: PartitionState, limits: Limits, now_s: float, most: int) -> int:
        """Return how many segments may go by local limits. Without KMQ_TIER nobody could read what they hold."""
        if not (limits.is_tiered and self._context.has_store):
            return 0
        covered = sum(end <= (found.end or 0) for end in state.sealed_ends()[:most])
        return min(covered, limits.local().expired(state.sealed, state.active_bytes, now_s, most)) if covered else 0

    def covered(self) -> Iterator[tuple[tuple[str, int], list[Segment]]]:
        """Yield each partition of topics with tier=on, and its oldest segments that the store has, without the last record."""
        for at in self._files:
            found, state = self.of(*at), self._states.get(at)
            is_tiered = self._context.has_store and self._in_force.limits_of(at[0]).is_tiered
            if found is not None and state is not None and is_tiered:
                count = sum(end <= (found.end or 0) for end in state.sealed_ends())
                if parts := [*state.sealed[: count - (count == len(state.sealed) and not state.active_bytes)]]:
                    yield at, parts


def floor(found: TierFile | None) -> PartitionState | None:
    """Return where a partition whose segments are lost begins again: after its rows; None without any row."""
    if found is None or not found.rows or found.end != (end := found.rows[-1].next):
        return None
    return PartitionState(end, found.last_seq, 0, end)
