"""The file of a ring: the writer finds the ring of its identity under the ring's name, or makes it.

Invariant   A ring of another data directory, version, size or policy is never written: it is removed and made anew, or
            the writer refuses to start (layout.py, 5).
Crash       A ring gets its name only when all of it is there, locked. Killed before: the next start removes what is
            left.
"""

import mmap
import os

from kmq.errors import ConfigError
from kmq.links.layout import (
    BASE_SEQ,
    BLOCKS,
    CELLS,
    IDENTITY,
    LAYOUT,
    READER,
    RECORD,
    WRITER,
    Identity,
    give_name,
    make_file,
    open_existing,
    read_text,
    waiting_bytes,
)
from kmq.links.ownership import RingLock, field, is_same_file
from kmq.logfmt import Logger


class RingFile:
    """The file under a ring's name, as the writer opens it."""

    def __init__(self, path: str, name: str, wanted: Identity, log: Logger) -> None:
        self.path, self.name, self.wanted, self.log = path, name, wanted, log

    def existing(self) -> int | None:
        """Return a descriptor of our ring, locked; None if there is none. Remove a ring that is not ours."""
        while True:
            fd = open_existing(self.path)
            if fd is None:
                return None
            is_ours = False
            try:
                self._lock_writer(fd)
                if not is_same_file(fd, self.path):
                    continue  # made anew while we waited
                is_ours = (
                    read_text(fd, IDENTITY) == self.wanted.text() and os.fstat(fd).st_size == self.wanted.file_bytes
                )
                if is_ours:
                    return fd
                self._remove(fd)
                return None
            finally:
                if not is_ours:
                    os.close(fd)  # and with it the lock

    def create(self, next_seq: int, last_ts: int) -> int | None:
        """Make the ring; return its descriptor, locked, or None if a ring has the name by now."""
        fd = make_file(f"{self.path}.new", self.wanted.file_bytes)
        self._lock_writer(fd)
        os.pwrite(fd, self.wanted.text().encode(), IDENTITY)
        mapped = mmap.mmap(fd, BLOCKS)
        words = memoryview(mapped).cast("Q")
        words[CELLS // 8 + RECORD[0] + 2] = next_seq
        words[CELLS // 8 + RECORD[0] + 3] = last_ts
        words[CELLS // 8 + BASE_SEQ] = next_seq
        words.release()
        mapped.close()
        if give_name(f"{self.path}.new", self.path):
            return fd
        os.close(fd)
        return None

    def _lock_writer(self, fd: int) -> None:
        RingLock(fd, WRITER).acquire(f"ring {self.name} (writer)", read_text(fd, WRITER))

    def _remove(self, fd: int) -> None:
        """Remove a ring that is not ours, unless it has a reader or holds messages of our data directory."""
        found = read_text(fd, IDENTITY)
        reader = RingLock(fd, READER)
        try:
            reader.acquire(f"ring {self.name} (reader)", read_text(fd, READER))
            is_our_data = field(found, "data_id") == self.wanted.data_id and field(found, "layout") == str(LAYOUT)
            waiting = waiting_bytes(fd)
            if is_our_data and waiting:
                raise ConfigError(
                    f"{self.path} holds {waiting} bytes of messages under other settings ({found});"
                    f" start once with those settings to drain it, or remove the file to give them up"
                )
            ring = self.name.rpartition(".")[2]
            self.log.warn("ring_recreated", ring=ring, found=found, discarded_bytes=waiting)
            os.unlink(self.path)
        finally:
            reader.release()
