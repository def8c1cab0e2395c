"""Locks: at most one living process holds each end of a link and each directory on disk.

    pid=4711 host=node-1 stage=router pod=0f4be2a6-1a-2 data=/data    the text in the lock of a router

Invariant   Two processes never write the same ring, log or FIFO end at once, whatever was killed before.
Mechanism   Two kinds of lock. The kernel gives both back when the holder dies, however it dies.
            RingLock: a byte of the ring itself, an open file description lock. It lives and dies with the ring, so it
            cannot be removed while the ring stays (System V semaphores can: systemd's RemoveIPC takes them all at a
            logout).
            FileLock: flock on a file beside the data, so that a second pod on the same volume sees it too.
Crash       A lock file that is deleted protects nothing any more: the next process makes a new one. So its holder
            checks now and then that the file still exists (`is_in_place`), and ends if not. A process that has to make
            the lock file of a used directory waits NOTICE_S, longer than a holder takes to notice (both in
            broker/stage.py). A holder must not fork: the child would share its locks.
Order       A broker holds two directories of its data: append/ (durability) and topics/ (router). If two brokers use
            one directory, each could get one of the two, and both would end. So append/ decides: a router ends as soon
            as another broker holds append/ (broker/stage.py).
Not covered flock across nodes on a network file system that does not support it.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable

from kmq.config.settings import OWNER_WAIT_S, SHM
from kmq.errors import BusyError
from kmq.files import file_id

LOOK_S = 0.25  # how often a holder checks that its lock file exists
NOTICE_S = 4 * LOOK_S  # by then a holder has noticed, unless it is stopped
_POLL_S = 0.02  # while waiting for another holder to end, for at most OWNER_WAIT_S
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid


def describe(stage: str, data: str, instance: str = "") -> str:
    """Return the text that names this process in the locks it holds. `instance`: its broker, if locks need it."""
    who = f"pid={os.getpid()} host={os.uname().nodename} stage={stage} pod={_pod()}"
    broker = f" instance={instance}" if instance else ""
    return f"{who}{broker} data={os.path.abspath(data)}"  # at the end: a path may hold spaces


def _pod() -> str:
    """Return an identity that all processes of this pod share, and no other pod has: the node's boot, and /dev/shm.

    The host name is no such identity: a pod of a StatefulSet has the name of the pod that it replaces.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read(8)
    shm = os.stat(SHM)
    return f"{boot}-{shm.st_dev:x}-{shm.st_ino:x}"


def is_of_another_pod(holder: str, ours: str) -> bool:
    """Return True if the process that `holder` names is of another pod than the one that `ours` names."""
    name = "pod" if field(holder, "pod") else "host"  # the release before wrote no pod
    return field(holder, name) not in ("", field(ours, name))


def is_of_another_broker(holder: str, ours: str) -> bool:
    """Return True if the stage that `holder` names is of another broker than the one that `ours` names."""
    other = field(holder, "instance")  # the release before wrote no instance
    return is_of_another_pod(holder, ours) or other not in ("", field(ours, "instance"))


def field(text: str, name: str) -> str:
    """Return a value of such a text; "" if it is missing."""
    return dict(part.partition("=")[::2] for part in text.split()).get(name, "")


def is_same_file(fd: int, path: str) -> bool:
    """Return True if `path` leads to the file that is open as `fd`."""
    found = os.fstat(fd)
    return file_id(path) == (found.st_dev, found.st_ino)


def _acquire(attempt: Callable[[], bool], what: str, holder: Callable[[], str]) -> None:
    """Take a lock, waiting OWNER_WAIT_S for another holder to end. Raises BusyError naming the holder."""
    deadline = time.monotonic() + OWNER_WAIT_S
    while not attempt():
        if time.monotonic() > deadline:
            raise BusyError(f"{what} is held by {holder() or 'another process'}")
        time.sleep(_POLL_S)


class RingLock:
    """One end of the ring that is open as `fd`: a lock on the first byte of the text that names the holder."""

    def __init__(self, fd: int, at: int) -> None:
        """`fd` stays the caller's. The lock belongs to the open file: closing its last duplicate gives it back."""
        self._fd, self._at = fd, at

    def _fcntl(self, command: int, kind: int) -> int:
        result = fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, self._at, 1, 0))
        return int(_FLOCK.unpack(result)[0])

    def try_acquire(self) -> bool:
        """Take the lock if it is free; return False if not."""
        try:
            self._fcntl(fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        return True

    def acquire(self, what: str, holder: str) -> None:
        """Take the lock, waiting OWNER_WAIT_S for another holder to go. Raises BusyError naming `holder`."""
        _acquire(self.try_acquire, what, lambda: holder)

    def is_held(self) -> bool:
        """Return True if another process holds the lock now."""
        return self._fcntl(fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK

    def release(self) -> None:
        """Release the lock, if we hold it."""
        self._fcntl(fcntl.F_OFD_SETLK, fcntl.F_UNLCK)


class FileLock:
    """flock on a file of its own, which names the holder in its text."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_new = False  # whether `acquire` had to make the file
        self._fd = -1

    def try_acquire(self, who: str) -> bool:
        self.is_new = not os.path.exists(self.path)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if not is_same_file(fd, self.path):  # deleted, or replaced, between the two calls
            os.close(fd)
            return False
        try:
            # In this order the text needs no new block: on a full disk another process would take the one given back.
            os.ftruncate(fd, os.pwrite(fd, who.encode() + b"\n", 0))
        except OSError:
            os.close(fd)  # and with it the lock
            raise
        self._fd = fd
        return True

    def acquire(self, what: str, who: str) -> None:
        """Take the lock, waiting OWNER_WAIT_S for another holder to go. Raises BusyError naming the holder."""
        _acquire(lambda: self.try_acquire(who), what, self.holder)

    def holder(self) -> str:
        """Return what the last holder wrote about itself; "" if there is no file."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.readline().strip()  # further lines are left by a longer text, for a moment
        except OSError:
            return ""

    def is_held(self) -> bool:
        """Return True if some process holds the lock now."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def is_in_place(self) -> bool:
        """Return True if the lock file that we hold still has its name, or if we hold none."""
        return self._fd < 0 or is_same_file(self._fd, self.path)

    def replace(self, other: "FileLock") -> None:
        """Hold what `other` holds, a lock on a file of the same name, in place of our own."""
        self.release()
        self._fd, other._fd = other._fd, -1

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
