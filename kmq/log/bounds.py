"""How large a topic is: offsets, bytes and segments of each partition. Reads files, changes nothing.

    Bounds(data).of("orders", 0) → (4711, 9000): the first offset, and the offset of the next record

Memory      `Bounds`, for listings of thousands of topics, has a few hundred bytes for each partition. A listing of all
            topics removes deleted topics from it.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from kmq.files import Signature, is_settled, signature, signatures
from kmq.log import gaps, reader, rows, segment, topics
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps
from kmq.log.partition import directory_of
from kmq.log.topics import Declaration


class TieredSize(NamedTuple):
    """What KMQ_TIER has of a partition: `rows` with `nbytes` of lines, which end at offset `end`.

    `local_start`: the first offset on this disk.
    """

    local_start: int
    end: int
    rows: int
    nbytes: int


class PartitionSize(NamedTuple):
    """One partition: its first offset, the offset of its next record, and what is on disk.

    `tier`: None where no record was ever copied there.
    """

    partition: int
    first_offset: int
    end_offset: int
    nbytes: int
    segments: int
    gaps: Gaps = ()
    tier: TieredSize | None = None

    @property
    def messages(self) -> int:
        return self.end_offset - self.first_offset - gaps.count(self.gaps, self.first_offset, self.end_offset)


def measure(data: str, topic: str, partitions: int) -> list[PartitionSize]:
    """Return the size of each partition of a topic, in order."""
    sizes = []
    for number in range(partitions):
        log = reader.partition(data, topic, number)
        end = log.end_offset()  # before first_offset: retention may delete segments between the two
        first = min(log.first_offset, end)
        found = segment.survey(log.directory)
        size = sum(part.size for part in found)
        tier = tiered_size(log.directory, found[0].first if found else end)
        sizes.append(PartitionSize(number, first, end, size, len(found), log.gaps(), tier))
    return sizes


def tiered_size(directory: str, local_start: int) -> TieredSize | None:
    """Return what KMQ_TIER has of a partition; None without any. `local_start`: its first offset on this disk."""
    try:
        found = rows.of(directory)
    except DamageError:  # it is laid out again within a minute
        return None
    if found.end is None:
        return None
    return TieredSize(local_start, found.end, len(found.rows), sum(row.nbytes for row in found.rows))


# --- cached ----------------------------------------------------------------------------------------------------------


def _active(directory: str) -> tuple[list[str], Signature] | None:
    """Return the files that tell where a partition begins and ends, and their signature: a record, a roll or a row changes it.

    These are its directory, its last segment, and the file `tier` if it has one.
    """
    try:
        seen = signature(directory)
        segments, has_tier = segment.look(directory)
        if not is_settled(seen) or not segments:
            return None
        paths = [directory, segments[-1][1], *([rows.path_of(directory)] if has_tier else [])]
        return paths, seen + signatures(paths[1:])
    except FileNotFoundError:
        return None


class Bounds:
    """First and end offsets of partitions, cached until a file that they were read from changes."""

    def __init__(self, data: str, is_strict: bool = False) -> None:
        """`is_strict`: where `tier` is damaged there is no first offset, because readers would begin there."""
        self._data, self._is_strict = data, is_strict
        self._declared: dict[str, tuple[Signature, Declaration]] = {}
        # directory → files, their signature, offsets
        self._bounds: dict[str, tuple[list[str], Signature, tuple[int, int]]] = {}
        self._gaps: dict[str, tuple[Signature, Gaps]] = {}  # directory → its signature, which a new gap changes
        # directory → signature and end offset, and the record before that end
        self._stamps: dict[str, tuple[tuple[Signature, int], tuple[int, int] | None]] = {}
        self._listed: tuple[Signature, list[str]] = ((), [])

    def names(self) -> list[str]:
        """Return the names of all topics, in order; none without a data directory."""
        try:
            now = signature(f"{self._data}/topics")
            if now != self._listed[0]:
                self._listed = now if is_settled(now) else (), topics.names(self._data)
                self.evict_except(self._listed[1])
        except FileNotFoundError:
            return []
        return self._listed[1]

    def evict_except(self, names: list[str]) -> None:
        """Forget all topics except these: the others were deleted."""
        if len(self._declared) <= len(names):
            return
        gone = {*self._declared} - {*names}
        caches: tuple[dict[str, Any], ...] = self._bounds, self._stamps, self._gaps
        for cache in caches:
            for directory in [each for each in [*cache] if each.split("/")[-2] in gone]:
                cache.pop(directory, None)
        for topic in gone:
            self._declared.pop(topic, None)

    def declared(self, topic: str) -> tuple[int, int | None]:
        """Return (partitions, from_seq) of a topic; from_seq is None while the router has not written it."""
        found = self.declaration(topic)
        return found.partitions, None if found.is_guessed else found.from_seq

    def declaration(self, topic: str) -> Declaration:
        """Return what a topic's file says."""
        try:
            now = signature(topics.toml_path(self._data, topic))
        except FileNotFoundError:
            return topics.read(self._data, topic)
        cached = self._declared.get(topic)
        if cached is None or cached[0] != now:
            cached = self._declared[topic] = now, topics.read(self._data, topic)
        return cached[1]

    def of(self, topic: str, partition: int) -> tuple[int, int]:
        """Return (first offset, end offset) of a partition."""
        directory = directory_of(self._data, topic, partition)
        cached = self._bounds.get(directory)
        if cached is not None:
            try:
                if signatures(cached[0]) == cached[1]:
                    return cached[2]
            except FileNotFoundError:
                pass
        log = reader.partition(self._data, topic, partition)
        active = _active(directory)  # before the read, so that a write during the read counts as a change
        end = log.end_offset()
        bounds = min(log.first_offset if self._is_strict else log.first_readable(), end), end
        if active is not None:
            self._bounds[directory] = *active, bounds
        else:
            self._bounds.pop(directory, None)
        return bounds

    def gaps(self, topic: str, partition: int) -> Gaps:
        """Return the gaps of a partition. In a data directory that was never forked this reads one name."""
        if not os.path.exists(f"{self._data}/{gaps.NAME}"):
            return ()
        directory = directory_of(self._data, topic, partition)
        try:
            now = signature(directory)
        except FileNotFoundError:
            return ()
        cached = self._gaps.get(directory)
        if cached is None or cached[0] != now:
            cached = now if is_settled(now) else (), gaps.read(directory)
            self._gaps[directory] = cached
        return cached[1]

    def stamp(self, topic: str, partition: int, end: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts) of the record before `end`, which `of` has returned; None if it is not known."""
        directory = directory_of(self._data, topic, partition)
        _, seen, _ = self._bounds.get(directory, ([], (), ()))  # another thread may have replaced it
        cached = self._stamps.get(directory)
        if not seen or cached is None or cached[0] != (seen, end):
            last = gaps.before(self.gaps(topic, partition), end) - 1
            cached = (seen, end), reader.partition(self._data, topic, partition).stamp_of(last)
            self._stamps[directory] = cached
        return cached[1]

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        """Return (first offset, end offset) of each partition of a topic, in order."""
        return [self.of(topic, number) for number in range(self.declared(topic)[0])]

    def rows(self, names: list[str]) -> Iterator[dict[str, object]]:
        """Yield the rows of these topics, ready for JSON."""
        for name in names:
            partitions, from_seq = self.declared(name)
            partitioner = self.declaration(name).partitioner
            firsts, ends = zip(*(self.of(name, number) for number in range(partitions)), strict=True)
            row = {"name": name, "partitions": partitions, "partitioner": partitioner, "from_seq": from_seq}
            yield row | {"first_offsets": firsts, "end_offsets": ends}
