"""Doorbells: semaphores with which a process wakes its idle peer.

Links       For each ring two System V semaphores, each a set of its own. The ring's header names them (BELLS in
            layout.py): processes use the id, and find it by the key. The key's upper bits come from the instance and
            its /dev/shm, so that its leftover sets can be told from the sets of others.
Invariant   A wake-up that is lost or extra costs time (at most WAIT_S), never a message: the cursors in the ring
            decide, the semaphore only says "look again".
            A set is removed as left over only if its key is of this instance, its owner is this user, and no ring of
            the instance names it (layout.remove_left_bells). A header always names a key before a set is made with it.
Crash       A bell that a process rang before it died still wakes the sleeper. A sleeper that dies leaves its flag set,
            which costs its peer one needless ring of the bell. A process that dies while it makes bells leaves a set
            that its ring names; the next process that makes bells for that ring removes it.
            A set that is removed (ipcrm, systemd's RemoveIPC) wakes its waiting process, with RemovedError.
Not covered Two instances of one user in one IPC namespace whose names and /dev/shm agree in 25 bits of crc32: one would
            remove the other's bells, which costs a restart, as ipcrm does.

A sleeper notes in its cell since when it sleeps, then re-reads the cursor; a publisher moves the cursor, then reads
that cell, and rings once for each sleep. Each needs a full fence between its store and its load, or both may read the
old value and the wake-up is lost. Python has no fence, but acquiring and releasing a lock is a locked instruction,
which is one on x86 and carries a barrier on ARM.
"""

import contextlib
import errno
import os
import threading
import zlib
from collections import namedtuple
from collections.abc import Callable, Sequence

import sysv_ipc

from kmq.config.settings import SHM
from kmq.errors import ConfigError, RetryError
from kmq.links.ownership import field

WAIT_S = 0.05  # longest sleep on a bell: bounds what a lost wake-up can cost
_SETS = 64  # keys of an instance: its rings need four, and crashes may leave some

_fence_lock = threading.Lock()


def fence() -> None:
    """Order every store before this call before every load after it."""
    _fence_lock.acquire()
    _fence_lock.release()


class RemovedError(RetryError):
    """Something that a process uses was removed: a lock file, a ring, or the semaphore on which it waits."""


class _TimedWait:
    """semtimedop of the C library, for a sysv_ipc built without it: its `acquire` has no timeout.

    The wheels of sysv_ipc 1.2 are built like that. A build from source (scripts/setup) has it, and saves a quarter of a
    sleep's CPU.
    """

    def __init__(self, id: int) -> None:
        import ctypes  # half a megabyte

        self._wait = ctypes.CDLL(None).semtimedop
        self._timespec = (ctypes.c_long * 2)()
        self._operation = (ctypes.c_short * 3)(0, -1, 0)  # struct sembuf: which semaphore, by how much, flags
        self._arguments = ctypes.c_int(id), self._operation, ctypes.c_size_t(1), self._timespec
        self._timeout_s = 0.0

    def __call__(self, timeout_s: float) -> None:
        """Do what `acquire` does, but raise the same error whatever the reason."""
        if timeout_s != self._timeout_s:
            self._timespec[0], self._timespec[1] = divmod(int(timeout_s * 1e9), 1_000_000_000)
            self._timeout_s = timeout_s
        if self._wait(*self._arguments):
            raise sysv_ipc.Error


class Doorbell:
    """A System V semaphore used as a bell; its value is 0 or 1."""

    def __init__(self, semaphore: sysv_ipc.Semaphore) -> None:
        self.semaphore = semaphore
        self._acquire = semaphore.acquire if sysv_ipc.SEMAPHORE_TIMEOUT_SUPPORTED else _TimedWait(semaphore.id)
        self._rung = 0  # the last sleep that we ended

    def ring(self, asleep_since: int) -> None:
        """Wake the sleeper, unless this sleep was ended already. A removed bell has no effect."""
        if asleep_since != self._rung:
            self._rung = asleep_since
            with contextlib.suppress(sysv_ipc.ExistentialError):
                self.semaphore.value = 1  # set, not increased: a sleeper that found work does not take its ring

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Sleep until rung, at most `timeout_s` by the monotonic clock; return False after that time or a signal.

        Raises RemovedError at once if the semaphore is gone.
        """
        try:
            self._acquire(timeout_s)
            return True
        except sysv_ipc.Error:
            pass
        if not self.is_in_place():
            raise RemovedError(
                f"semaphore {self.semaphore.id}: was removed while this broker used it; nothing acknowledged is lost"
            )
        return False

    def is_in_place(self) -> bool:
        """Return True if the semaphore is there."""
        try:
            return bool(self.semaphore.value >= 0)
        except sysv_ipc.Error:
            return False


class Bells(namedtuple("Bells", ("reader", "writer"))):
    """The two bells of a ring."""

    reader: Doorbell
    writer: Doorbell

    def are_in_place(self) -> bool:
        return self.reader.is_in_place() and self.writer.is_in_place()


# --- making, finding, removing ---------------------------------------------------------------------------------------


def namespace() -> int:
    """Return the number of this process' IPC namespace: semaphores of another one cannot be opened."""
    return os.stat("/proc/self/ns/ipc").st_ino


def _keys(instance: str) -> range:
    """Return the keys that sets of this instance may have. A key has 31 bits; the upper 25 are the instance's."""
    shm = os.stat(SHM)  # containers may share the semaphores, and have a /dev/shm each
    first = (zlib.crc32(f"{instance} {shm.st_dev} {shm.st_ino}".encode()) >> 7) * _SETS
    return range(first + 1, first + _SETS)  # not 0, which is IPC_PRIVATE


def _opened(key: int) -> sysv_ipc.Semaphore | None:
    """Return the set that has this key, if we may use it."""
    try:
        return sysv_ipc.Semaphore(key)
    except (sysv_ipc.ExistentialError, sysv_ipc.PermissionsError, OSError):
        return None


def _text(sets: Sequence[tuple[int, int]]) -> str:
    named = " ".join(f"{end}={key}:{id}" for end, (key, id) in zip(("reader", "writer"), sets, strict=False))
    return f"kmq-bells ipc={namespace()} {named}"


def make(instance: str, announce: Callable[[str], None]) -> Bells:
    """Make the bells of a ring. `announce` writes their names into its header before each is made.

    Raises ConfigError if the kernel has no free semaphores, or does not support them.
    """
    made: list[sysv_ipc.Semaphore] = []

    def named() -> list[tuple[int, int]]:
        return [(each.key, each.id) for each in made]

    try:
        for key in _keys(instance):
            announce(_text([*named(), (key, -1)]))
            with contextlib.suppress(sysv_ipc.ExistentialError):  # this key is in use
                made.append(sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, 0o660, 0))
            if len(made) == 2:
                bells = Bells(*map(Doorbell, made))
                bells.writer.ring(1)
                if not bells.writer.wait(0.0):
                    raise OSError(errno.ENOSYS, "semtimedop")  # as in gVisor
                announce(_text(named()))
                return bells
        raise ConfigError(
            f"all {_SETS - 1} keys that doorbells of instance {instance} may have are in use; see: ipcs -s"
        )
    except (OSError, MemoryError) as err:
        for semaphore in made:
            semaphore.remove()
        raise ConfigError(f"no semaphore for a doorbell: {_reason(err)}") from err


def usage() -> tuple[int, int]:
    """Return how many sets this IPC namespace has, and how many it may have."""
    with open("/proc/sysvipc/sem", encoding="ascii") as file:
        used = sum(1 for _ in file) - 1
    return used, _limits()[3]


def _limits() -> list[int]:
    """Return kernel.sem: semaphores in a set, semaphores in all, operations in a call, sets."""
    with open("/proc/sys/kernel/sem", encoding="ascii") as file:
        return [int(number) for number in file.read().split()]


def advice() -> str:
    """Return what to do where the kernel has no more semaphores."""
    of_a_set, in_all, at_once, sets = _limits()
    return (
        "ipcs -s shows whose they are, ipcrm -s <id> removes one that nobody uses; or raise the limit, in a container that"
        f" of its IPC namespace: sysctl -w kernel.sem='{of_a_set} {max(in_all, 1024)} {at_once} {max(2 * sets, 128)}'"
    )


def _reason(err: OSError | MemoryError) -> str:
    if isinstance(err, OSError) and err.errno == errno.ENOSPC:
        numbers = " ".join(map(str, _limits()))
        return f"the limit of the kernel is reached (kernel.sem = {numbers}); {advice()}"
    if isinstance(err, OSError) and err.errno in (errno.ENOSYS, errno.EPERM):
        return (
            f"this kernel or container has no System V semaphores ({err.strerror}); its seccomp profile must allow"
            " semget, semop, semtimedop and semctl"
        )
    return str(err) or "no memory"


def find(text: str) -> Bells | None:
    """Return the bells that a ring's header names; None if one of them is missing."""
    found = []
    for end in ("reader", "writer"):
        key, _, id = field(text, end).partition(":")
        semaphore = _opened(int(key)) if key.isdecimal() and id.isdecimal() else None
        if semaphore is None or semaphore.id != int(id):
            return None
        found.append(Doorbell(semaphore))
    return Bells(*found)


def other_namespace(text: str) -> str:
    """Return the IPC namespace of the bells that a header names; "" if this process has the same."""
    other = field(text, "ipc")
    return other if other != str(namespace()) else ""


def sets_of(instance: str) -> list[sysv_ipc.Semaphore]:
    """Return the present sets of this instance, of all users."""
    return [semaphore for key in _keys(instance) if (semaphore := _opened(key)) is not None]


def remove_left(instance: str, read_headers: Callable[[], Sequence[str]]) -> int:
    """Remove this user's sets of this instance that no ring's header names; return how many."""
    sets = sets_of(instance)
    texts = " ".join(read_headers()) if sets else ""  # only now: a key is in a header before there is a set
    removed = 0
    for semaphore in sets:
        if f"={semaphore.key}:" not in texts and semaphore.uid == os.geteuid():
            with contextlib.suppress(sysv_ipc.Error, PermissionError):  # another process has just removed it
                semaphore.remove()
                removed += 1
    return removed
