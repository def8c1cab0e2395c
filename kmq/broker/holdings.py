"""What a stage holds under a name: lock files, and ends of rings. Other processes find the stage by these names.

Invariant   A stage whose lock file, ring or bell was removed always ends (exit code 75). If it went on, no process could find
            it, and a second stage of its kind could start beside it.
            A stage that gives way to a lock ends (exit code 69) once another broker holds that one. So where two
            brokers meet on one directory, one of them gets all of it.
"""

import contextlib
import os
import time

from kmq.errors import BusyError, ConfigError
from kmq.links.doorbell import RemovedError
from kmq.links.ownership import LOOK_S, FileLock, is_of_another_broker
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
        self._first: tuple[FileLock, str] | None = None

    def add(self, lock: FileLock) -> None:
        """Watch a lock file from now on."""
        self._held.append(lock)

    def add_ring(self, ring: "End") -> None:
        """Watch a ring from now on."""
        self._held.append(ring)
        self._rings.append(ring)

    def give_way(self, path: str, who: str) -> None:
        """Hold nothing beside another broker that holds the lock file `path`. `who`: this stage, as locks name it."""
        self._first = FileLock(path), who

    def check(self) -> None:
        """Raise RemovedError if something was removed or replaced, BusyError if this stage has to give way."""
        if self._first is not None:
            lock, who = self._first
            if is_of_another_broker(holder := lock.holder(), who) and lock.is_held():
                raise BusyError(f"{lock.path} is held by {holder}: one broker per directory")
        for held in self._held:
            if not held.is_in_place():
                raise RemovedError(
                    f"{held.path}: it, or a bell of it, was removed or replaced while this broker used it;"
                    " nothing acknowledged is lost"
                )

    def rewrite_rings(self) -> None:
        """Write removed rings again, with their messages, for the stages that start next.

        Whoever removes them may be in the middle of it: systemd's RemoveIPC takes the semaphores first.
        """
        time.sleep(LOOK_S)
        for ring in self._rings:
            if not os.path.exists(ring.path) and ring.may_write_again():
                with contextlib.suppress(OSError, ConfigError):  # no space: what was acknowledged is in the WAL
                    ring.write_again()
                    self._log.warn("ring_written_again", ring=ring.name, reason="its file was removed")
