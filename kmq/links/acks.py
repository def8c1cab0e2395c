"""The FIFO `acks`: replies from durability to ingress, sent once the records they confirm are on disk.

Line        `<connection> <first n> <reply>`: <reply> goes to the producer as it is; it is for messages from <first n>
            on. An empty line, from the framer: the ring `received` has room again.
Invariant   Every write is whole lines, at most PIPE_BUF at once. A stopped ingress never stops the WAL: replies that
            the FIFO does not take wait here, up to KEEP_BYTES, and are lost beyond that.
Crash       Durability killed before a block is released: its next start sends the replies again, and ingress skips
            those it knows. Replies that waited here, or were lost, never come: ingress sees the gap by <first n> and
            breaks that connection. Its producer sends again what has no reply, and gets `!dup`.
            Ingress killed: its connections are gone, and the next ingress skips replies to connections of another
            start.
"""

import contextlib
import fcntl
import os
from collections import deque

from kmq.config.values import MIB, PIPE_BUF

KEEP_BYTES = 8 * MIB
_CAPACITY = MIB  # what the two rings and the FIFO `raw` may hold unanswered fits
_READ_BYTES = 1 << 16


class AckWriter:
    """Durability's end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self.lost = 0  # bytes of replies
        with contextlib.suppress(OSError):  # over the user's limit: a smaller FIFO works
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _CAPACITY)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def put(self, replies: bytes) -> None:
        """Send these lines, now or when there is room."""
        if self._bytes + len(replies) > KEEP_BYTES:
            self.lost += len(replies)
            return
        self._waiting.append(replies)
        self._bytes += len(replies)
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        while self._waiting:
            replies = self._waiting[0]
            cut = len(replies) if len(replies) <= PIPE_BUF else replies.rfind(b"\n", 0, PIPE_BUF) + 1
            try:
                os.write(self.fd, replies[:cut])
            except BlockingIOError:
                return
            self._bytes -= cut
            if cut == len(replies):
                self._waiting.popleft()
            else:
                self._waiting[0] = replies[cut:]


class AckReader:
    """Ingress' end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def take(self) -> list[bytes]:
        """Return the replies that have come, without newline."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line]
