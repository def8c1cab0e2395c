"""Doorbells: how a process that has nothing to do is woken by its peer.

Invariant   A wake-up that is lost or extra costs time (at most WAIT_S), never a message: the cursors in the ring are
            the truth, the semaphore only says "look again".
Crash       A ring of the bell by a process that dies is still rung; a sleeper that dies leaves its flag set, which costs
            its peer one needless post.

A sleeper sets its flag, then re-reads the cursor; a publisher moves the cursor, then reads the flag. Each needs a
full fence between its store and its load, or both may read the old value and the wake-up is lost. Python has no fence,
but acquiring and releasing a lock is a locked instruction, which is one on x86 and carries a barrier on ARM.
"""

import threading

import posix_ipc

WAIT_S = 0.05  # longest sleep on a bell: bounds what a lost wake-up can cost

_fence_lock = threading.Lock()


def fence() -> None:
    """Order every store before this call before every load after it."""
    _fence_lock.acquire()
    _fence_lock.release()


class Doorbell:
    """A named POSIX semaphore used as a bell; its value is 0 or 1."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREAT, mode=0o660, initial_value=0)

    def ring(self) -> None:
        """Wake the sleeper, unless it has been told already."""
        if self._semaphore.value == 0:
            self._semaphore.release()

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Sleep until rung, at most `timeout_s`; False when the time was over or a signal came."""
        try:
            self._semaphore.acquire(timeout_s)
            return True
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False

    @staticmethod
    def remove(name: str) -> None:
        try:
            posix_ipc.unlink_semaphore(name)
        except posix_ipc.ExistentialError:
            pass
