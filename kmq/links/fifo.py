"""The FIFO `raw`: text lines from ingress, and from any shell of the pod, to the framer; raw.py has their format.

Invariant   Every write is one atomic write of at most PIPE_BUF bytes made of whole lines, so lines of different writers
            never mix. A line longer than PIPE_BUF goes in fragments.
Crash       Every stage holds the FIFO open for reading and writing. So its content lives while any stage lives, a
            writer never gets EPIPE and the reader never sees end-of-file. When all stages die, the pipe behind the name
            dies with its content, and the next start gets another pipe: `mark` lets the framer tell the two apart.
"""

import contextlib
import fcntl
import os
import stat

from kmq.errors import ConfigError
from kmq.links.raw import Sender, fragments
from kmq.settings import MIB, PIPE_BUF

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


class FifoWriter:
    """Ingress' end: takes whole lines, writes as much as fits, keeps the rest in order.

    Lines of a Sender are written as groups, each with its header in the same write.
    """

    def __init__(self, fd: int, max_group: int = 1) -> None:
        self.fd, self.max_group = fd, max_group
        # (data, start, end, sender) still to be written
        self._queue: list[tuple[bytes | bytearray, int, int, Sender | None]] = []

    @property
    def clogged(self) -> bool:
        """Whether lines wait for room. Their bytes must not change, so nothing more may be received."""
        return bool(self._queue)

    def put(self, data: bytes | bytearray, start: int, end: int, sender: Sender | None = None) -> None:
        """Write the whole lines data[start:end], of any length. What does not fit waits for `flush`."""
        self._queue.append((data, start, end, sender))
        if len(self._queue) == 1:
            self.flush()

    def copy(self) -> None:
        """Copy what waits, so that the caller's buffers may change from now on."""
        self._queue = [
            (bytes(data[start:end]), 0, end - start, sender)
            if isinstance(data, bytearray)
            else (data, start, end, sender)
            for data, start, end, sender in self._queue
        ]

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        while self._queue:
            data, start, end, sender = self._queue[0]
            done, full = self._write_groups(data, start, end, sender) if sender else self._write(data, start, end)
            if full:
                self._queue[0] = (data, done, end, sender)
                return
            del self._queue[0]
            if done < end:  # a line that one write cannot take: its fragments, then the rest
                line_end = data.index(b"\n", done)
                text = fragments(bytes(data[done:line_end]), sender.header_room if sender else 0)
                last = text.rfind(b"\n", 0, -1) + 1
                self._queue[:0] = [
                    (text, 0, last, None),
                    (text, last, len(text), sender),
                    (data, line_end + 1, end, sender),
                ]

    def _write(self, data: bytes | bytearray, at: int, end: int) -> tuple[int, bool]:
        """Write data[at:end] in atomic writes. Return (where it stopped, whether because the FIFO is full).

        If the FIFO is not full, it stops early only before a line longer than PIPE_BUF.
        """
        write, fd, rfind = os.write, self.fd, data.rfind
        with memoryview(data) as view:
            try:
                while end - at > PIPE_BUF:
                    cut = rfind(b"\n", at, at + PIPE_BUF) + 1
                    if not cut:
                        return at, False
                    write(fd, view[at:cut])
                    at = cut
                if at < end:
                    write(fd, view[at:end])
            except BlockingIOError:
                return at, True
        return end, False

    def _write_groups(self, data: bytes | bytearray, at: int, end: int, sender: Sender) -> tuple[int, bool]:
        """Like _write, each write with the header of its group."""
        room, most = PIPE_BUF - sender.header_room, self.max_group
        with memoryview(data) as view:
            try:
                while at < end:
                    cut = end if end - at <= room else data.rfind(b"\n", at, at + room) + 1
                    if not cut:
                        return at, False
                    count = data.count(b"\n", at, cut)
                    if count > most:
                        cut, count = _after_lines(data, at, most), most
                    os.writev(self.fd, [sender.header(count, cut - at), view[at:cut]])
                    sender.sent += count
                    at = cut
            except BlockingIOError:
                return at, True
        return end, False


def _after_lines(data: bytes | bytearray, at: int, count: int) -> int:
    for _ in range(count):
        at = data.index(b"\n", at) + 1
    return at
