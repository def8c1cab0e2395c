"""The role page, /dev/shm/<instance>.role: by it the process `replica` tells the stages of its broker their role.

Only in a shard (KMQ_SHARD). Only `replica` writes it; any process reads it.

    waiting     no leader is known: the stages hold no lock or ring, and wait
    following   `replica` writes the ring `framed`; durability and router work, framer and ingress do not
    starting    framer, durability and router work, until the first record of the epoch is committed and routed
    leading     ingress too

Generation  rises with every change of role except from starting to leading. A stage works in one generation. When it
            sees another one, it releases its locks and rings, and re-executes itself (kmq/broker/stage.py).
hw          the high watermark: up to this seq every replica that can be elected has the records on disk. Within a
            generation it only rises. No record above it is acknowledged, routed or shown.
Leads until Time of the monotonic clock at which a leader closes its doors unless its leadership is proved again. A
            time, not a flag, so that a stage notices it even after it was stopped, or while `replica` hangs.
Away        This broker has reached no leader for longer than a session and the lag. Its doors send clients elsewhere at
            once.
Invariant   `replica` removes rings, empties the FIFO and cuts the WAL only while no stage holds a lock. A stage takes
            its first lock, then reads the generation; `replica` raises the generation, then looks at the locks. So one
            of the two always sees the other.
Crash       The page outlives `replica`: the stages continue, and hw does not rise. Each start of `replica` raises the
            generation.
"""

import contextlib
import mmap
import os
import time
from collections import namedtuple

from kmq.config.settings import SHM
from kmq.errors import ConfigError
from kmq.files import file_id
from kmq.links.doorbell import fence

WAITING, FOLLOWING, STARTING, LEADING = range(4)
ROLES = ("waiting", "following", "starting", "leading")
SYNCED = "synced"  # the FIFO into which durability writes a byte after each sync, to wake `replica`

_GENERATION, _ROLE, _EPOCH, _MARK, _HW, _REFUSES, _SURE_UNTIL, _LEADS_UNTIL, _AWAY = range(9)  # words
_DATA_ID, _LEADER = slice(1024, 2048), slice(2048, 16384)  # texts; a leader may have 26 ports, with a host of 253 bytes
_BYTES = _LEADER.stop


def remove(instance: str) -> None:
    """Remove the page while no process of the broker runs, so that no stage begins in a role before the replica."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(instance))


def _path(instance: str) -> str:
    return f"{SHM}/{instance}.role"


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o660)
    except PermissionError:
        raise ConfigError(f"{path}: belongs to another user; use another KMQ_INSTANCE") from None


class RoleReading(namedtuple("RoleReading", ("generation", "role", "epoch", "mark"))):
    """One consistent reading. `mark`: of the register version with which the epoch began."""

    __slots__ = ()


class RolePage:
    """The page. Only `replica` writes to it: it holds pipes/replica.owner and gets the page from `make`."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._mm = mmap.mmap(fd, _BYTES)
        self._file = file_id(path)
        self._words = memoryview(self._mm).cast("Q")

    @classmethod
    def find(cls, instance: str, data_id: str, current: "RolePage | None" = None) -> "RolePage | None":
        """Return the page of this data directory; None while `replica` has not made it.

        `current`: the page found before. It is returned again while it is in place, because that check costs less than
        mapping.
        """
        if current is not None and current.is_in_place() and current._text(_DATA_ID) == data_id:
            return current
        path = _path(instance)
        try:
            fd = _open(path, 0)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_size < _BYTES:
                return None
            page = cls(fd, path)
        finally:
            os.close(fd)
        return page if page._text(_DATA_ID) == data_id else None

    @classmethod
    def make(cls, instance: str, data_id: str) -> "RolePage":
        """Make the page, or adopt the existing one. The role is `waiting`, in a new generation."""
        path = _path(instance)
        fd = _open(path, os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, _BYTES)
            page = cls(fd, path)
        finally:
            os.close(fd)
        page.leave()
        page._put(_DATA_ID, data_id)
        page.show_leader({})
        return page

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    @property
    def hw(self) -> int:
        return self._words[_HW]

    @property
    def refuses(self) -> bool:
        """Return True if too few replicas answer to accept new messages."""
        return bool(self._words[_REFUSES])

    @property
    def is_unsure(self) -> bool:
        """Return True if so few replicas have answered lately that another broker may lead, and know later records."""
        return time.monotonic_ns() >= self._words[_SURE_UNTIL]

    @property
    def leads(self) -> bool:
        """Return True if this broker leads with open doors."""
        return self._words[_ROLE] == LEADING and time.monotonic_ns() < self._words[_LEADS_UNTIL]

    @property
    def leader(self) -> dict[str, str] | None:
        """Return the broker that leads: `broker=b`, and the address of each of its ports by name; {}: not known.

        None: no leader was reached for long, so clients should look elsewhere.
        """
        if self._words[_AWAY]:
            return None
        return dict(word.split("=", 1) for word in self._text(_LEADER).split(" ") if "=" in word)

    def read(self) -> RoleReading:
        """Return the role as it is now."""
        words = self._words
        while True:
            generation, role = words[_GENERATION], words[_ROLE]
            fence()
            found = RoleReading(generation, role, words[_EPOCH], words[_MARK])
            fence()
            if words[_GENERATION] == generation and words[_ROLE] == role:
                return found

    def is_in_place(self) -> bool:
        """Return True if the page still has its name, by which others find it."""
        return file_id(self.path) == self._file

    def _text(self, at: slice) -> str:
        return self._mm[at].rstrip(b"\0").decode(errors="replace")

    # --- of `replica` -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End the role: the stages release their locks and rings."""
        self._words[_ROLE] = WAITING
        fence()
        self._words[_GENERATION] += 1
        self._words[_REFUSES] = self._words[_SURE_UNTIL] = self._words[_LEADS_UNTIL] = self._words[_HW] = 0
        fence()

    def enter(self, role: int, epoch: int, mark: int, hw: int) -> None:
        """Enter a role, after `leave`."""
        self._words[_EPOCH], self._words[_MARK], self._words[_HW] = epoch, mark, hw
        fence()
        self._words[_ROLE] = role

    def open_doors(self) -> None:
        """Go from starting to leading."""
        self._words[_AWAY] = 0
        fence()
        self._words[_ROLE] = LEADING

    def close_doors(self) -> None:
        """Go from leading back to starting: another broker may lead. Clients are sent elsewhere."""
        self._words[_ROLE] = STARTING
        fence()
        self._words[_AWAY] = 1

    def raise_hw(self, seq: int) -> bool:
        """Set hw to `seq`; return False if it was not lower."""
        if seq <= self._words[_HW]:
            return False
        self._words[_HW] = seq
        fence()
        return True

    def refuse(self, refuses: bool) -> None:
        """Stop accepting new messages, or accept them again."""
        self._words[_REFUSES] = 1 if refuses else 0

    def lead_until(self, sure: float, leads: float) -> None:
        """Set until when no other broker can have later records, and until when the doors stay open (monotonic)."""
        self._words[_SURE_UNTIL], self._words[_LEADS_UNTIL] = int(sure * 1e9), int(leads * 1e9)

    def show_leader(self, fields: dict[str, str] | None) -> None:
        """Publish which broker leads; see `leader`."""
        self._words[_AWAY] = int(fields is None)
        self._put(_LEADER, " ".join(f"{name}={value}" for name, value in (fields or {}).items()))

    def _put(self, at: slice, text: str) -> None:
        room = at.stop - at.start
        self._mm[at] = text.encode()[: room - 1].ljust(room, b"\0")
