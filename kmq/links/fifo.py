"""The FIFO `raw`: text lines from ingress, and from any shell of the pod, to the framer; raw.py has their format.

Invariant   Ingress writes whole lines, at most PIPE_BUF bytes at once, so its lines never mix with those of other
            writers. The messages of producers do not go through the FIFO: they lie in the ring `received`, and a line
            says where (handover.py).
Crash       Every stage holds the FIFO open for reading and writing. So its content lives while any stage lives, a
            writer never gets EPIPE and the reader never sees end-of-file. When all stages die, the pipe behind the name
            dies with its content, and the next start gets another pipe: `mark` lets the framer tell the two apart.
"""

import contextlib
import fcntl
import os
import stat

from kmq.config.values import MIB
from kmq.errors import ConfigError

CAPACITY = MIB  # of a marked pipe; Linux lets an unprivileged process have this much by default


def open_fifo(directory: str, name: str) -> int:
    """Return a non-blocking read-write descriptor of the FIFO `directory`/`name`; make the FIFO if it is missing."""
    path = f"{directory}/{name}"
    try:
        os.makedirs(directory, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o660)
            os.chmod(path, 0o660)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise ConfigError(f"KMQ_PIPES={directory!r}: cannot use {path}: {err.strerror}") from err
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is not a FIFO; move it away")
    return fd


def is_marked(fd: int) -> bool:
    """Return True if a framer has used this very pipe before: only the capacity lives and dies with a pipe."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) == CAPACITY


def mark(fd: int) -> bool:
    """Give the pipe its capacity; return False if that is over the user's limit: it works, slower and unmarked."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CAPACITY)
    except OSError:
        return False
    return True


def waiting_bytes(fd: int) -> int:
    """Return how many bytes the FIFO holds now."""
    import array
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def capacity(fd: int) -> int:
    """Return how many bytes the FIFO holds at most."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
