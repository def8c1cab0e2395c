"""A reserve of 1 MiB on the disk, given up when the disk is full, because making room needs some room first.

Retention deletes what a checkpoint no longer needs, and a checkpoint is a new file. An active segment is sealed by
making another file. The free space that admission keeps (kmq/broker/admission.py) does not serve for this: other
programs may fill the disk, and producers that write to the FIFO do not ask for admission.

Owner       durability claims the reserve while the disk has plenty of room. Any stage that needs room in order to make
            room releases it. It is never released for messages: they would use it up before it could help.
"""

import contextlib
import os

from kmq.config.values import MIB

BYTES = 1 * MIB  # checkpoints of thousands of topics, or new segments of hundreds
_PLENTY = 16 * BYTES


def path_of(data: str) -> str:
    return f"{data}/.spare"


def claim(data: str) -> None:
    """Claim the reserve if it does not exist and the disk has plenty of room."""
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
    """Release the reserve; return True if there was one, so that an immediate retry may succeed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(data))
        return True
    return False
