"""Which records of a partition compaction may remove: the plan, in plain Python, in little memory.

kmq/log/compaction.py says how a segment is laid out and swapped. kmq/spark/pipelines/compact.py plans the same for
topics that outgrow one process.

Invariant   These records are never in a plan: the latest record of each key up to `end`; records without a key; the
            first and the last record of each segment; the active segment. A tombstone is in it only if it is older than
            `Horizon.before_us`, no other record of its key is left, and the WAL begins after it.
Memory      At most MAX_KEYS keys at once, some 200 bytes each (a longer key counts as its digest), and one bit for each
            record. If there are more keys, the log is read several times, each time for a part of them.
Damage      DamageError: nothing of that partition is planned.
"""

import re
from array import array
from bisect import bisect_right
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from kmq import record, routing
from kmq.log import compaction, reader
from kmq.log.compaction import Sealed

MAX_KEYS = 100_000
_DIGEST = 32  # bytes; a key that is shorter stands for itself, so no key is taken for another's digest
_READ_BYTES = 1 << 20
_LINE = re.compile(rb"[^\n]+")
_DELETES, _AGAIN = 1, 2  # flags: a tombstone that may be removed; not the first record of its key
_LENGTH_BITS = 30


class Horizon(NamedTuple):
    """What may be removed of tombstones: those received before `before_us` (µs), with a seq below `wal_first`."""

    before_us: int
    wal_first: int


class Removable(NamedTuple):
    """The records of a sealed segment that may be removed: their offsets, ascending, and their bytes."""

    segment: Sealed
    offsets: "array[int]"
    nbytes: int


def plan(data: str, topic: str, partition: int, end: int, horizon: Horizon, marks_from: int) -> list[Removable]:
    """Return what may be removed from sealed segments because of records before the offset `end`.

    `end`: up to where the queue is on disk (compaction.synced_ends).
    """
    sealed = compaction.sealed(data, topic, partition, end)
    if not sealed:
        return []
    found = _Search(data, topic, partition, end, horizon, marks_from)
    waiting = [(0, 0)]
    while waiting:
        found.search(*waiting.pop(), waiting)
    return [removable for segment in sealed if (removable := found.in_segment(segment)).offsets]


class _Search:
    """The search in one partition: a bit for each record that a later one replaces."""

    def __init__(self, data: str, topic: str, partition: int, end: int, horizon: Horizon, marks_from: int) -> None:
        self._log = reader.partition(data, topic, partition)
        self._topic, self._end, self._horizon, self._marks_from = topic.encode(), end, horizon, marks_from
        segments = compaction.sealed(data, topic, partition, end)
        self._start = segments[0].first
        self._firsts = [segment.first for segment in segments]
        self._nbytes = [0] * len(segments)
        self._lasts = [segment.end - 1 for segment in segments]
        self._bits = bytearray((end - self._start) // 8 + 1)

    def search(self, bits: int, part: int, waiting: list[tuple[int, int]]) -> None:
        """Mark replaced records of the keys whose crc ends in the `bits` bits of `part`.

        If these are too many keys, the rest goes to `waiting`. What was marked before stays right: a record that has
        been replaced is replaced.
        """
        latest: dict[bytes, int] = {}
        offset = self._start
        while offset < self._end:
            first, lines = self._log.read(offset, _READ_BYTES)
            if not lines:
                break
            number, at = first, 0
            for match in _LINE.finditer(lines):  # skips the newlines of removed records without a step for each
                number, at = number + lines.count(b"\n", at, match.start()), match.start()
                if number >= self._end:
                    break
                line = match[0]
                key = self._key_of(line)
                if key is None or crc32(key) & ((1 << bits) - 1) != part:
                    continue
                before = latest.get(key)
                flags = _DELETES if self._deletes(line) else 0
                if before is not None:
                    self._mark(before)
                    flags |= _AGAIN
                latest[key] = number << (_LENGTH_BITS + 2) | len(line) << 2 | flags
                if len(latest) > MAX_KEYS:
                    waiting.append((bits + 1, part | 1 << bits))
                    latest = {kept: value for kept, value in latest.items() if not crc32(kept) >> bits & 1}
                    bits += 1
            offset = first + lines.count(b"\n")
        for value in latest.values():
            if value & (_DELETES | _AGAIN) == _DELETES:
                self._mark(value)

    def _key_of(self, line: bytes) -> bytes | None:
        seq, _, routing_key, _ = line.split(b"|", 3)
        key = routing.key_behind(self._topic, routing_key, int(seq) >= self._marks_from)
        return key if key is None or len(key) < _DIGEST else blake2b(key, digest_size=_DIGEST).digest()

    def _deletes(self, line: bytes) -> bool:
        """Return True if this is a tombstone that may be removed when nothing else of its key is left."""
        if not line.endswith(b"|"):
            return False
        seq, recv_ts, _, _, id, payload = line.split(b"|", 5)
        is_tombstone = not payload and b"enc=b64" not in id.split(b";")[1:]
        is_old = record.parse_ts(recv_ts) < self._horizon.before_us and int(seq) < self._horizon.wal_first
        return is_tombstone and is_old

    def _mark(self, value: int) -> None:
        offset, length = value >> (_LENGTH_BITS + 2), value >> 2 & ((1 << _LENGTH_BITS) - 1)
        at = bisect_right(self._firsts, offset) - 1
        if self._firsts[at] < offset < self._lasts[at]:
            byte, bit = offset - self._start >> 3, 1 << (offset - self._start & 7)
            if not self._bits[byte] & bit:  # else an earlier search, with keys that it could not keep, has marked it
                self._bits[byte] |= bit
                self._nbytes[at] += length

    def in_segment(self, segment: Sealed) -> Removable:
        low, high = segment.first - self._start, segment.end - self._start
        offsets = array(
            "q",
            (
                self._start + place
                for byte in range(low >> 3, (high - 1 >> 3) + 1)
                if self._bits[byte]
                for place in range(byte << 3, (byte << 3) + 8)
                if self._bits[byte] >> (place & 7) & 1 and low <= place < high
            ),
        )
        return Removable(segment, offsets, self._nbytes[self._firsts.index(segment.first)])
