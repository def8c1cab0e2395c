"""A little room that is ours, given up where the disk has none left: to make room takes some first.

Retention deletes what a checkpoint does not need any more, and a checkpoint is a new file; an active segment is sealed
by beginning another one. What is kept free (kmq/broker/admission.py) is not ours: other programs fill the disk as
well, and who writes into the FIFO asks nobody.

Owner       durability claims it while there is plenty; each stage that finds no room for what makes room releases it.
            Never for messages: with that it would be used up before it could help.
"""

import contextlib
import os

from kmq.settings import MIB

BYTES = 1 * MIB  # checkpoints of thousands of topics, or new segments of hundreds
_PLENTY = 16 * BYTES


def path_of(data: str) -> str:
    return f"{data}/.spare"


def claim(data: str) -> None:
    """Take it, where it is not there and the disk has plenty."""
    path, disk = path_of(data), os.statvfs(data)
    if disk.f_bavail * disk.f_frsize < _PLENTY or os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, BYTES)
        finally:
            os.close(fd)


def release(data: str) -> bool:
    """Give it up; True where it was there, so that it is worth trying again at once."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(data))
        return True
    return False
