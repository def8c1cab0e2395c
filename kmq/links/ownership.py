"""Who owns what: at most one living process holds each end of a link and each directory on disk.

Invariant   Two processes never write the same ring, log or FIFO end at once, whatever was killed before.
Crash       Both kinds of lock are given back by the kernel when the holder dies, however it dies:
            a System V semaphore taken with SEM_UNDO (rings: there is no file that both containers need to share),
            and flock (directories and the FIFO: the lock then lies with the data, also for a second pod on one volume).
            A holder must not fork: the child would share the flock.
Not covered flock across nodes on a network file system that does not carry it.

The semaphore is created with IPC_CREX only. Opening with IPC_CREAT and an initial value resets one that is held.
A creator that dies between creating and setting leaves value 0 and no operation ever done (o_time 0): such a one is
removed and made anew.
"""

import fcntl
import os
import socket
import time
import zlib

import sysv_ipc

from kmq.errors import BusyError, ConfigError
from kmq.settings import OWNER_WAIT_S

_POLL_S = 0.02  # while waiting for another holder to go; only ever for OWNER_WAIT_S


def describe(stage: str, data: str) -> str:
    """Text that names this process to whoever finds it holding something."""
    return f"pid={os.getpid()} host={socket.gethostname()} stage={stage} data={os.path.abspath(data)}"


def _semaphore(name: str) -> sysv_ipc.Semaphore:
    key = zlib.crc32(f"kmq:{name}".encode()) & 0x7FFFFFFF or 1
    while True:
        try:
            semaphore = sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, mode=0o660, initial_value=1)
        except sysv_ipc.ExistentialError:
            try:
                semaphore = sysv_ipc.Semaphore(key)
            except sysv_ipc.ExistentialError:
                continue  # removed between the two calls
        except sysv_ipc.PermissionsError:
            raise ConfigError(f"ring lock {name}: belongs to another user; use another KMQ_INSTANCE") from None
        semaphore.block = False
        semaphore.undo = True
        return semaphore


class RingLock:
    """One end (`writer` or `reader`) of one ring of one instance."""

    def __init__(self, instance: str, ring: str, end: str) -> None:
        self.name = f"{instance}.{ring}.{end}"
        self._held: sysv_ipc.Semaphore | None = None

    def try_acquire(self) -> bool:
        """Take it if nobody has it."""
        semaphore = _semaphore(self.name)
        try:
            semaphore.acquire()
        except sysv_ipc.BusyError:
            if semaphore.value == 0 and semaphore.o_time == 0:
                time.sleep(_POLL_S)  # its creator may be between the two calls
                if semaphore.o_time == 0:
                    semaphore.remove()
            return False
        except sysv_ipc.ExistentialError:
            return False  # removed under us: the caller tries again
        self._held = semaphore
        return True

    def acquire(self, what: str, holder: str) -> None:
        """Take it, waiting OWNER_WAIT_S for another holder to go. Raises BusyError naming `holder`."""
        deadline = time.monotonic() + OWNER_WAIT_S
        while not self.try_acquire():
            if time.monotonic() > deadline:
                raise BusyError(f"{what} is held by {holder or 'another process'}")
            time.sleep(_POLL_S)

    def is_held(self) -> bool:
        """Whether some process has it now: a snapshot."""
        return bool(_semaphore(self.name).value == 0)

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def remove(self) -> None:
        """Delete the semaphore itself; only when the instance is down."""
        _semaphore(self.name).remove()


class FileLock:
    """flock on a file of its own, which names the holder in its text."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def try_acquire(self, who: str) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, who.encode() + b"\n", 0)
        self._fd = fd
        return True

    def acquire(self, what: str, who: str) -> None:
        """Take it, waiting OWNER_WAIT_S for another holder to go. Raises BusyError naming the holder."""
        deadline = time.monotonic() + OWNER_WAIT_S
        while not self.try_acquire(who):
            if time.monotonic() > deadline:
                raise BusyError(f"{what} is held by {self.holder() or 'another process'}")
            time.sleep(_POLL_S)

    def holder(self) -> str:
        """What the last holder wrote about itself."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""

    def is_held(self) -> bool:
        """Whether some process has it now: a snapshot."""
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

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
