"""Heals the end of a log that differs from its index, because of damage or because a power cut left the index ahead.
The lines are written again from the WAL.

Owner       the router process.
Invariant   Only what the WAL can restore is cut. The exception is a log that was not synced: a power cut may have torn
            its end.
Crash       The lines are written in place, then the index. If a kill leaves either half done, the next start heals the
            log again.
"""

import os
from collections.abc import Sequence
from itertools import pairwise

from kmq.files import find_tail, replace_file
from kmq.log import segment, wal
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange
from kmq.log.index import Entry, read_entries
from kmq.log.lines import is_stored
from kmq.log.partition import PartitionLog, State
from kmq.message import record
from kmq.message.routing import Table
from kmq.router.context import Context
from kmq.router.wal_records import WalRecords


class GoodEnd:
    """Where an active segment stops being whole: byte, next offset, last line, index entries of the blocks before."""

    __slots__ = ("entries", "last", "offset", "position")

    def __init__(self, position: int, offset: int, last: bytes, entries: Sequence[Entry]) -> None:
        self.position, self.offset, self.last, self.entries = position, offset, last, entries


class EndHealer:
    """Heals ends of logs from the WAL."""

    def __init__(self, context: Context, records: WalRecords, table: Table) -> None:
        self._context, self._records, self._table = context, records, table

    def heal(self, log: PartitionLog, damage: DamageError, is_unsynced: bool) -> None:
        """Write the end of the active segment again, from the WAL. Raises `damage` if the WAL lacks those records.

        `is_unsynced`: the log was written since its last sync, so a power cut explains the damage, which is then no
        error even if the WAL lacks the records.
        """
        state, path, topic = log.state, log.path, self._table[log.topic.encode()]
        with open(path, "r+b") as file:
            end = _good_end(file.fileno(), path, state, damage.byte)
            low = record.seq_of(end.last) + 1 if end.last else topic.from_seq
            if wal.first_seq(self._context.data) <= low:
                lost = SeqRange(low, state.last_seq)
                lines = b"".join(self._records.of_partition(topic, log.number, lost))
                file.seek(end.position)
                if file.read() != lines:
                    self._context.logger.warn(
                        "queue_healed", file=path, byte=end.position, first_seq=lost.first, last_seq=lost.last
                    )
                    file.seek(end.position)
                    file.write(lines)
                    file.truncate()
                state.size += end.position + len(lines) - state.active_bytes
                state.end_offset = end.offset + lines.count(b"\n")
            elif not is_unsynced:
                raise damage
        replace_file(segment.index_path(path), b"".join(entry.line() for entry in end.entries))


def _good_end(fd: int, path: str, state: State, damaged_at: int) -> GoodEnd:
    tail = find_tail(fd, min(damaged_at, state.active_bytes), is_stored)
    last = tail.last
    indexed = read_entries(segment.index_path(path), 1 << 62)
    entries = [entry for entry, following in pairwise(indexed) if following.position <= tail.size]
    offset, start = (entries[-1].offset, entries[-1].position) if entries else (state.base, 0)
    offset += os.pread(fd, tail.size - start, start).count(b"\n")
    if not last and state.sealed:
        with open(state.sealed[-1].path, "rb") as sealed:
            last = find_tail(sealed.fileno(), state.sealed[-1].size, is_stored).last
    return GoodEnd(tail.size, offset, last, entries)
