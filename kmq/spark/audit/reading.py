"""Reads logs for an audit: blocks of stored lines; damage and malformed lines become evidence.

Checked     The broker's reader compares the crc of every block with the index. Damage is a finding. The records in it,
            and those that a damaged index hides, are not audited further, and are counted as such.
Limit       A block of the WAL that begins with a seq out of order misleads lookups: it is found, but reported as a gap.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.audit.evidence import Evidence
from kmq.spark.audit.findings import THE_WAL, Damage, OffsetRange, Place, Row
from kmq.spark.source.blocks import Lines
from kmq.spark.source.broker import Broker
from kmq.spark.source.columns import Block


class Unreadable(NamedTuple):
    """Offsets first…end-1 that cannot be read."""

    first: int
    end: int


class LogReader:
    """Reads the logs of a broker, and adds errors in their bytes to the evidence."""

    def __init__(self, broker: Broker, evidence: Evidence) -> None:
        self.broker, self._evidence = broker, evidence
        self.malformed: defaultdict[Place, list[int]] = defaultdict(list)  # offsets

    def read(self, place: Place, offsets: OffsetRange, is_second: bool = False) -> Iterator[Block | Unreadable]:
        """Yield blocks in order, and Unreadable for damage. Resume after the damage if its end is known.

        `is_second`: the bytes are read again, and their errors are in the evidence already.
        """
        at, end = offsets
        resumed = at
        while at < end:
            led_back = False
            try:
                for lines in self.broker.blocks(*place, at, end):
                    block = self._block(place, lines, is_second)
                    if place != THE_WAL:
                        at = lines.next_offset
                    elif block.count:
                        seqs = block.offsets()
                        led_back = at != resumed and int(seqs[0]) < at
                        if led_back:
                            break  # a seq out of order at the end of the last read misled the lookup; do not repeat it
                        at = max(at, int(seqs.max()) + 1)
                    yield block
            except DamageError as err:
                after = err.next_offset if err.next_offset > at else end
                if not is_second:
                    self._evidence.add(Row.of_damage(place, Damage.of(err)))
                yield Unreadable(at, after)
                at = after
            else:
                if not led_back:
                    return
            resumed = at

    def _block(self, place: Place, lines: Lines, is_second: bool) -> Block:
        """Return lines as a block without malformed ones. A crc proves only that the bytes are as they were written."""
        topic, is_wal = place[0], place[0] == WAL
        try:
            block = Block.of(lines, topic, is_wal)
            if not block.count or _is_sound(block):
                return block
        except (IndexError, pa.ArrowInvalid):
            pass
        kept = []
        for number, line in enumerate(lines.data.split(b"\n")[:-1]):
            is_good = not line or record.parse_stored(line) is not None
            kept.append(line if is_good else b"")
            if not is_good and not is_second:
                offset = -1 if is_wal else lines.offset + number
                self.malformed[place].append(offset)
                self._evidence.add(Row.of_malformed(place, offset, line))
        return Block(b"\n".join([*kept, b""]), lines.offset, topic, is_wal)


def _is_sound(block: Block) -> bool:
    """Return True if each line has its five bars and begins with a number."""
    block.seq()
    begins, ends = block.starts, block.ends
    return bool((begins[1] > begins[0]).all() and (begins[5] <= ends[5]).all())
