"""What a stage holds under a name: lock files, and ends of rings. Other processes find the stage by these names.

Invariant   A stage whose lock file or ring was removed always ends (exit code 75). If it went on, no process could find
            it, and a second stage of its kind could start beside it.
"""

import contextlib
import os

from kmq.errors import ConfigError, RetryError
from kmq.links.ownership import FileLock
from kmq.logfmt import Logger

TYPE_CHECKING = False
if TYPE_CHECKING:  # each stage imports what it uses
    from kmq.links.received import ReceivedReader, ReceivedWriter
    from kmq.links.ring import RingReader, RingWriter

    End = RingWriter | RingReader | ReceivedWriter | ReceivedReader


class Holdings:
    """The lock files and rings of one stage."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._held: list[FileLock | End] = []
        self._rings: list[End] = []

    def add(self, lock: FileLock) -> None:
        """Watch a lock file from now on."""
        self._held.append(lock)

    def add_ring(self, ring: "End") -> None:
        """Watch a ring from now on."""
        self._held.append(ring)
        self._rings.append(ring)

    def check(self) -> None:
        """Raise RetryError if something was removed or replaced."""
        for held in self._held:
            if not held.is_in_place():
                self._rewrite_rings()
                raise RetryError(
                    f"{held.path}: was removed, or replaced, while this broker used it; nothing acknowledged is lost"
                )

    def _rewrite_rings(self) -> None:
        """Write removed rings again, with their messages, for the stages that start next."""
        for ring in self._rings:
            if not os.path.exists(ring.path) and ring.may_write_again():
                with contextlib.suppress(OSError, ConfigError):  # no space: what was acknowledged is in the WAL
                    ring.write_again()
                    self._log.warn("ring_written_again", ring=ring.name, reason="its file was removed")
