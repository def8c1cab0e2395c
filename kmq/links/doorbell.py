"""Doorbells: how a process that has nothing to do is woken by its peer.

Invariant   A wake-up that is lost or extra costs time (at most WAIT_S), never a message: the cursors in the ring are
            the truth, the semaphore only says "look again".
Crash       A bell that a process rang before it died still wakes the sleeper. A sleeper that dies leaves its flag set,
            which costs its peer one needless post.

A sleeper sets its flag, then re-reads the cursor; a publisher moves the cursor, then reads the flag. Each needs a
full fence between its store and its load, or both may read the old value and the wake-up is lost. Python has no fence,
but acquiring and releasing a lock is a locked instruction, which is one on x86 and carries a barrier on ARM.
"""

import threading
import time
from collections.abc import Callable

import posix_ipc

from kmq.settings import SHM
from kmq.watch import file_id

WAIT_S = 0.05  # longest sleep on a bell: bounds what a lost wake-up can cost

_fence_lock = threading.Lock()


def fence() -> None:
    """Order every store before this call before every load after it."""
    _fence_lock.acquire()
    _fence_lock.release()


class _ClockWait:
    """sem_clockwait of the C library: posix_ipc has only sem_timedwait, which waits until a time of day.

    When the clock is set back by an hour, such a wait lasts an hour, without a heartbeat. Through ctypes a sleep costs
    about 1.4 µs of CPU more. semtimedop, the relative wait of System V semaphores, costs 2.3 µs, because each of its
    posts is a system call. Raises AttributeError if the C library is not glibc 2.30 (2019) or later.
    """

    def __init__(self, name: str) -> None:
        import ctypes  # half a megabyte, and not every stage has a bell

        libc = ctypes.CDLL(None)
        self._wait = libc.sem_clockwait
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        libc.sem_open.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(libc.sem_open(name.encode(), 0))
        if not self._handle:
            raise OSError(f"semaphore {name}: cannot be opened")
        timespec = bytearray(16)  # on a 64-bit machine
        self._deadline = memoryview(timespec).cast("q")
        self._timespec = ctypes.byref((ctypes.c_char * len(timespec)).from_buffer(timespec))

    def __call__(self, timeout_s: float) -> bool:
        self._deadline[0], self._deadline[1] = divmod(time.monotonic_ns() + int(timeout_s * 1e9), 1_000_000_000)
        return not self._wait(self._handle, time.CLOCK_MONOTONIC, self._timespec)


class Doorbell:
    """A named POSIX semaphore used as a bell; its value is 0 or 1."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREAT, mode=0o660, initial_value=0)
        self._wait: Callable[[float], bool]
        try:
            self._wait = _ClockWait(name)
        except AttributeError:
            self._wait = self._wait_by_wall_clock
        self._path = f"{SHM}/sem.{name.removeprefix('/')}"
        self._file = file_id(self._path)

    def ring(self) -> None:
        """Wake the sleeper, unless the bell has been rung already."""
        if self._semaphore.value == 0:
            self._semaphore.release()

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Sleep until rung, at most `timeout_s` by the monotonic clock; return False after that time or a signal."""
        return self._wait(timeout_s)

    def _wait_by_wall_clock(self, timeout_s: float) -> bool:
        try:
            self._semaphore.acquire(timeout_s)
            return True
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False

    def is_in_place(self) -> bool:
        """Return True if the semaphore still has its name."""
        return file_id(self._path) == self._file

    @staticmethod
    def remove(name: str) -> None:
        try:
            posix_ipc.unlink_semaphore(name)
        except posix_ipc.ExistentialError:
            pass
