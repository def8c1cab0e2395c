"""The FIFO `raw`: text lines from ingress, and from any shell of the pod, to the framer.

Invariant   Every write is one atomic write of at most PIPE_BUF bytes made of whole lines, so lines of different writers
            never mix. A line longer than that goes as pieces, `+<bytes>` … `-<bytes>`, each a line of its own.
Crash       Every stage holds the FIFO open for reading and writing: what it holds lives while any stage lives, a
            writer never gets EPIPE and the reader never sees end-of-file. When all die, the pipe behind the name dies
            with what it holds, and the next one is another: `mark` lets the framer tell.
"""

import contextlib
import fcntl
import os
import stat

from kmq.errors import ConfigError
from kmq.settings import MIB, PIPE_BUF

CAPACITY = MIB  # of a marked pipe; Linux lets an unprivileged process have this much by default
_PIECE = PIPE_BUF - 2  # bytes of a long line in one write, beside its mark and its newline


def open_fifo(directory: str, name: str) -> int:
    """A non-blocking read-write descriptor of the FIFO `directory`/`name`, made if it is not there."""
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
    """Whether a framer has had this very pipe before: the capacity is all that lives and dies with it."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) == CAPACITY


def mark(fd: int) -> bool:
    """Give the pipe its capacity; False over the user's limit, where a smaller FIFO works, only slower and unmarked."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CAPACITY)
    except OSError:
        return False
    return True


def waiting_bytes(fd: int) -> int:
    """Bytes in the FIFO: a snapshot."""
    import array
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


class FifoWriter:
    """Ingress' end: takes whole lines, writes as much as fits, keeps the rest in order."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._queue: list[tuple[bytes | bytearray, int, int]] = []  # (data, start, end) still to be written

    @property
    def clogged(self) -> bool:
        """Whether something waits for room; its bytes must not change, so nothing more may be received."""
        return bool(self._queue)

    def put(self, data: bytes | bytearray, start: int, end: int) -> None:
        """Write the whole lines data[start:end], of any length; what does not fit waits for flush."""
        self._queue.append((data, start, end))
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        while self._queue:
            data, start, end = self._queue[0]
            done, full = self._write(data, start, end)
            if full:
                self._queue[0] = (data, done, end)
                return
            del self._queue[0]
            if done < end:  # a line that one write cannot take: as pieces, then the rest
                line_end = data.index(b"\n", done)
                cut = pieces(bytes(data[done:line_end]))
                self._queue[:0] = [(cut, 0, len(cut)), (data, line_end + 1, end)]

    def _write(self, data: bytes | bytearray, at: int, end: int) -> tuple[int, bool]:
        """Write data[at:end] in atomic writes. Returns (up to where it got, whether for lack of room).

        Without lack of room it stops short only before a line longer than PIPE_BUF.
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


def pieces(line: bytes) -> bytes:
    """`line` (without newline), longer than one write may be, as the lines that carry it through the FIFO."""
    cuts = [line[at : at + _PIECE] for at in range(0, len(line), _PIECE)]
    return b"".join(b"+%b\n" % piece for piece in cuts[:-1]) + b"-%b\n" % cuts[-1]
