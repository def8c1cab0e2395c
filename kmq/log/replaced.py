"""Which records of a partition compaction may remove: the plan, in plain Python, in bounded memory.

kmq/log/compaction.py says how a segment is laid out and swapped.

Invariant   These records are never in a plan: the latest record of each key up to `end`; records without a key; the
            first and the last record of each segment; the active segment. A tombstone is in it only if it is older than
            `Horizon.before_us`, no other record of its key is left, and the WAL begins after it.
Mechanism   A first read counts in a filter, by hash, which keys may have more than one record. Later reads compare these
            keys alone, at most MAX_KEYS at once: if there are more, the log is read again for each part of their hashes.
            So a table of up to some ten million keys, few of which change, is read twice.
Memory      At most MAX_KEYS keys, some 200 bytes each (a longer key counts as its digest); the filter, 20 MiB; one bit
            for each of _WINDOW records, or for each record of one larger segment; one read. Together about 60 MiB,
            whatever the size of the log. A log of more than _WINDOW records takes these reads once per window.
Damage      DamageError: nothing more of that partition is planned.
"""

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from kmq.config.values import MIB
from kmq.errors import CorruptError
from kmq.log import compaction, gaps, reader
from kmq.log.compaction import Sealed
from kmq.log.partition import directory_of
from kmq.message import record, routing

MAX_KEYS = 100_000
_FILTER_BITS = 1 << 27  # of the filter, at most, and a quarter more
_FILTER_LEAST = 1 << 12
_WINDOW = 1 << 27  # records
_CACHED_BYTES = 64 * MIB  # a larger log does not stay in the page cache, where it would displace what consumers read
_DIGEST = 32  # bytes; a key that is shorter stands for itself, so no key is taken for another's digest
_READ_BYTES = MIB
_DELETES, _AGAIN = 1, 2  # flags: a tombstone that may be removed; not the first record of its key
_LENGTH_BITS = 30
_ROW = re.compile(rb"(?:(\d+\|[^|\n]*+)\|([^|\n]*+)(\|[^\n]*+))?+\n")
_BAR = ord("|")
_PART_SHIFT = 32  # the part of a key comes from other bits of its hash than the filter's

Pace = Callable[[int], None]  # called with the bytes that were read or written; may wait, or raise to give up


def at_once(nbytes: int) -> None:
    """Continue without waiting."""


class Horizon(NamedTuple):
    """Which tombstones may be removed: those received before `before_us` (µs), with a seq below `wal_first`."""

    before_us: int
    wal_first: int


class Tombstone(NamedTuple):
    """When a tombstone was received (µs), and its seq."""

    recv_us: int
    seq: int


class SyncedPartition(NamedTuple):
    """A partition, and up to which offset it is on disk (compaction.synced_ends)."""

    data: str
    topic: str
    partition: int
    end: int


class Removable:
    """The records of a sealed segment that may be removed, and the bytes of their lines, without newlines."""

    def __init__(self, segment: Sealed) -> None:
        self.segment = segment
        self.count = self.nbytes = 0
        self._bits = bytearray((segment.end - segment.first >> 3) + 1)

    def add(self, offset: int, nbytes: int) -> None:
        """Add a record; a record that was added before is ignored."""
        byte, bit = offset - self.segment.first >> 3, 1 << (offset - self.segment.first & 7)
        if not self._bits[byte] & bit:
            self._bits[byte] |= bit
            self.count += 1
            self.nbytes += nbytes

    @property
    def offsets(self) -> Iterator[int]:
        """Yield the offsets, ascending."""
        for byte, bits in enumerate(self._bits):
            if bits:
                yield from (self.segment.first + (byte << 3) + bit for bit in range(8) if bits >> bit & 1)


class KeyComparison:
    """The comparison of all records of one partition."""

    def __init__(self, place: SyncedPartition, horizon: Horizon, marks_from: int, pace: Pace = at_once) -> None:
        self._place, self._horizon, self._marks_from, self._pace = place, horizon, marks_from, pace
        self._topic, self._marked = place.topic.encode(), place.topic.encode() + b".@."
        self._log = reader.partition(place.data, place.topic, place.partition)
        self.sealed = compaction.sealed(*place)
        self._start = self.sealed[0].first if self.sealed else place.end
        self._window = _RecordWindow([])
        found = gaps.read(directory_of(place.data, place.topic, place.partition))
        self._filter = _Filter(place.end - self._start - gaps.count(found, self._start, place.end))
        self.young: Tombstone | None = None  # the first one that the horizon has kept
        self.records = self.nbytes = 0  # records that were read, and the bytes of their lines

    def removable(self) -> Iterator[Removable]:
        """Yield the segments that have removable records, in order; each is valid until the next one is taken."""
        if not self.sealed:
            return
        self._count()
        for window in _windows(self.sealed):
            self._window = window
            waiting = [(0, 0)]
            while waiting:
                self._compare(*waiting.pop(), waiting)
            yield from window.taken()

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset of the first line, whole lines) of all records up to the end."""
        offset, end, segments = self._start, self._place.end, iter(self.sealed)
        is_large = sum(os.path.getsize(segment.path(self._place.data)) for segment in self.sealed) > _CACHED_BYTES
        segment = next(segments, None)
        while offset < end:
            first, lines = self._log.read(offset, _READ_BYTES)
            if not lines:
                return
            offset = first + lines.count(b"\n")
            if offset > end:  # what follows is not known to be on disk
                lines = b"".join(line + b"\n" for line in lines.split(b"\n")[: max(0, end - first)])
            self._pace(len(lines))
            yield first, lines
            while is_large and segment is not None and segment.end <= offset:
                _forget(segment.path(self._place.data))
                segment = next(segments, None)

    def _rows(self, lines: bytes) -> list[tuple[bytes, bytes, bytes]]:
        """Return (seq and time, routing key, the rest) of each line; three times b"" for a bare newline."""
        rows = _ROW.findall(lines)
        if len(rows) != lines.count(b"\n"):
            raise CorruptError(f"{self._log.directory}: has lines that are not records; run kmq verify")
        return rows

    def _key_of(self, head: bytes, routing_key: bytes) -> bytes | None:
        """Return what stands for the key of a record; None if it has no key."""
        key: bytes | None
        if routing_key.startswith(self._marked) and self._marks_from <= 1:
            key = routing_key[len(self._marked) :]
        elif b".@" in routing_key:
            has_marks = record.seq_of(head) >= self._marks_from
            key = routing.key_behind(self._topic, routing_key, has_marks)
        else:
            key = routing_key[len(self._topic) + 1 :] or None
        if key is not None and len(key) >= _DIGEST:
            return blake2b(key, digest_size=_DIGEST).digest()
        return key

    def _count(self) -> None:
        add, key_of = self._filter.add, self._key_of
        for _, lines in self._chunks():
            rows = self._rows(lines)
            self.nbytes += len(lines) - len(rows)
            looks = self.young is None and b"|\n" in lines
            for head, routing_key, rest in rows:
                if not head:
                    continue
                self.records += 1
                key = key_of(head, routing_key)
                if key is not None:
                    add(hash(key))  # not a crc: a client could choose many keys of one crc and make this slow
                if looks and self.young is None and rest[-1] == _BAR and (found := _tombstone(head, rest)):
                    self.young = None if self._goes(found) else found

    def _goes(self, tombstone: Tombstone) -> bool:
        return tombstone.recv_us < self._horizon.before_us and tombstone.seq < self._horizon.wal_first

    def _compare(self, bits: int, part: int, waiting: list[tuple[int, int]]) -> None:
        """Mark what is removable of the keys whose hash ends in the `bits` bits of `part`.

        If these are too many keys, the rest goes to `waiting`. Records marked before stay marked, because a replaced
        record stays replaced.
        """
        latest: dict[bytes, int] = {}
        mask = (1 << bits) - 1
        key_of, may_be_again = self._key_of, self._filter.may_be_again
        for first, lines in self._chunks():
            for offset, (head, routing_key, rest) in enumerate(self._rows(lines), first):
                if not head or (key := key_of(head, routing_key)) is None:
                    continue
                hashed = hash(key)
                if hashed >> _PART_SHIFT & mask != part:
                    continue
                is_again = may_be_again(hashed)
                deletes = rest[-1] == _BAR and (found := _tombstone(head, rest)) is not None and self._goes(found)
                if not is_again and not deletes:
                    continue
                length = len(head) + 1 + len(routing_key) + len(rest)
                value = offset << (_LENGTH_BITS + 2) | length << 2 | deletes * _DELETES
                if not is_again:
                    self._mark(value)
                    continue
                before = latest.get(key)
                if before is not None:
                    self._mark(before)
                    value |= _AGAIN
                latest[key] = value
                if len(latest) > MAX_KEYS:
                    waiting.append((bits + 1, part | 1 << bits))
                    latest = {key: value for key, value in latest.items() if not hash(key) >> _PART_SHIFT + bits & 1}
                    bits, mask = bits + 1, mask << 1 | 1
        for value in latest.values():
            if value & (_DELETES | _AGAIN) == _DELETES:
                self._mark(value)

    def _mark(self, value: int) -> None:
        self._window.mark(value >> (_LENGTH_BITS + 2), value >> 2 & ((1 << _LENGTH_BITS) - 1))


def plan(place: SyncedPartition, horizon: Horizon, marks_from: int) -> Iterator[Removable]:
    """Yield what may be removed from sealed segments because of records before `place.end`."""
    return KeyComparison(place, horizon, marks_from).removable()


class _RecordWindow:
    """Consecutive segments whose removable records are found together."""

    def __init__(self, segments: list[Sealed]) -> None:
        self._segments = segments
        self._firsts = [segment.first for segment in segments]
        self._found: dict[int, Removable] = {}  # by number of the segment

    def mark(self, offset: int, nbytes: int) -> None:
        """Note that a record is removable, unless it is in no segment of the window, or the first or last of one."""
        number = bisect_right(self._firsts, offset) - 1
        if number < 0:
            return
        segment = self._segments[number]
        if segment.first < offset < segment.end - 1:
            if number not in self._found:
                self._found[number] = Removable(segment)
            self._found[number].add(offset, nbytes)

    def taken(self) -> Iterator[Removable]:
        """Yield the segments with removable records, in order, and forget each."""
        for number in sorted(self._found):
            yield self._found.pop(number)


def _windows(segments: list[Sealed]) -> Iterator[_RecordWindow]:
    window: list[Sealed] = []
    for segment in segments:
        if window and segment.end - window[0].first > _WINDOW:
            yield _RecordWindow(window)
            window = []
        window.append(segment)
    yield _RecordWindow(window)


class _Filter:
    """Which hashes were added at least twice. It may name others too, but never misses one.

    A hash has three bits in `_seen`. If all of them were set before, it gets one in `_again`.
    """

    def __init__(self, records: int) -> None:
        wanted = 1 << max(0, 16 * records - 1).bit_length()
        size = min(_FILTER_BITS, max(_FILTER_LEAST, wanted))
        self._mask, self._again_mask = size - 1, (size >> 2) - 1
        self._seen, self._again = bytearray((size >> 3) + 1), bytearray((size >> 5) + 1)

    def add(self, hashed: int) -> None:
        seen, mask, step = self._seen, self._mask, hashed >> 32 | 1
        is_new = False
        for at in (hashed & mask, hashed + step & mask, hashed + 2 * step & mask):
            byte, bit = at >> 3, 1 << (at & 7)
            if not seen[byte] & bit:
                seen[byte] |= bit
                is_new = True
        if not is_new:
            at = hashed & self._again_mask
            self._again[at >> 3] |= 1 << (at & 7)

    def may_be_again(self, hashed: int) -> bool:
        at = hashed & self._again_mask
        return bool(self._again[at >> 3] >> (at & 7) & 1)


def _tombstone(head: bytes, rest: bytes) -> Tombstone | None:
    """Return the record as a tombstone; None if it is no tombstone, such as a record with an empty value."""
    # Hot loop: _ROW has cut the line. An invalid stamp must raise: with time 0 the tombstone would look old enough.
    _, _, id, payload = rest.split(b"|", 3)
    if payload or b"enc=b64" in id.split(b";")[1:]:
        return None
    seq, recv_ts = head.split(b"|")
    return Tombstone(record.parse_ts(recv_ts), int(seq))


def _forget(path: str) -> None:
    """Drop a segment from the page cache."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
