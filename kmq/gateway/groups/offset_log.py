"""Reading the log of topic `__consumer_offsets` at a start: the last record of each key, and how many there were.

Damage      A record that is no commit is skipped, counted and named in a log line. Damaged bytes raise DamageError: what
            is lost in them may be all that a group has committed, and a group that is not known begins anew: it reads
            everything again, or with `latest` skips what waits for it.
"""

import os
import re
from collections.abc import Iterator

from kmq.config.values import MIB
from kmq.gateway.groups.offset_records import TOPIC, Nack, Place, Row, decode_key, decode_payload, scan
from kmq.log import reader
from kmq.logfmt import Logger

_READ_BYTES = 4 * MIB
_REMOVED = re.compile(rb"(?m)^\n+")  # the newlines of records that compaction removed


class OffsetLog:
    """The log as it is now. Reads files: call it in a thread."""

    def __init__(self, data: str, log: Logger) -> None:
        self._data, self._log = data, log
        self.records = 0  # read, with those that were skipped
        self._skipped, self._example = 0, ""

    def read(self) -> list[tuple[Place, Row]]:
        """Return the rows in force: the last of each place, without those that a tombstone deleted.

        Raises DamageError.
        """
        latest: dict[bytes, tuple[int, bytes]] = {}
        for lines in self._blocks():
            lines = _REMOVED.sub(b"", lines)
            count = lines.count(b"\n")
            found = [(key, (seq, payload)) for seq, key, payload in scan(lines)]
            latest.update(found)
            self.records += count
            if len(found) != count:
                self._skip(count - len(found), _first_foreign(lines))
        rows = [row for key, (seq, payload) in latest.items() if payload for row in self._decoded(key, payload, seq)]
        if self._skipped:
            effect = "skipped: they are no commits of this release"
            self._log.warn("offset_records_skipped", count=self._skipped, first=self._example[:200], effect=effect)
        return rows

    def _skip(self, count: int, example: str) -> None:
        self._skipped += count
        self._example = self._example or example

    def _decoded(self, key: bytes, payload: bytes, seq: int) -> Iterator[tuple[Place, Row]]:
        try:
            place, row = decode_key(key), decode_payload(payload, seq)
        except ValueError as err:
            self._skip(1, f"seq {seq}: {err}")
            return
        if isinstance(row, Nack) == (place.offset is not None):
            yield place, row

    def _blocks(self) -> Iterator[bytes]:
        """Yield the lines of the log."""
        if not os.path.isdir(f"{self._data}/topics/{TOPIC}"):
            return
        log, offset = reader.partition(self._data, TOPIC, 0), 0
        while True:
            first, lines = log.read(offset, _READ_BYTES)
            if not lines:
                return
            yield lines
            offset = first + lines.count(b"\n")


def _first_foreign(lines: bytes) -> str:
    """Return the first line that is no record of this topic as `scan` knows them."""
    return next((line.decode(errors="replace") for line in lines.split(b"\n") if line and not list(scan(line))), "")
