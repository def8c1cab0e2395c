"""The two FIFOs: `raw`, lines from ingress and any shell of the pod to the framer; `acks`, replies to ingress.

Invariant   Every write is whole lines, at most PIPE_BUF bytes at once, so lines of two writers never mix. The messages
            of producers do not go through `raw`: they lie in the ring `received`, and a control line says where
            (received.py).
            A control line is read whole or not at all. Its order among all lines of `raw` is the order in which the
            messages get their seqs. A control line that names bytes outside the ring's contents is a malformed message.
            A line from any other writer may not name a reserved topic. The FIFO cannot tell which process wrote a line,
            so only what ingress says of a connection counts: a typing mistake (`echo … > raw`) changes no group's
            offsets.
            A stopped ingress never stops the WAL.
Memory      Replies for which `acks` has no room wait in durability, up to KEEP_BYTES; further replies are lost.
Crash       Every stage holds both FIFOs open for reading and writing. So their content lives while any stage lives, a
            writer never gets EPIPE and a reader never sees end-of-file. When all stages die, the pipe with this name
            dies with its content, and the next start gets another pipe: `mark` lets the framer tell the two apart.
            Durability killed before a block is released: its next start sends the replies again, and ingress skips
            those it knows. Replies that waited there, or were lost, never arrive: ingress sees the gap by <first n> and
            closes that connection. Its producer resends messages without a reply, and gets `!dup`.
            Ingress killed: its connections are gone, and the next ingress skips replies to connections of another
            start.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections import deque

from kmq.config.values import MIB, PIPE_BUF
from kmq.errors import ConfigError
from kmq.message.ids import NAME_PATTERN

CAPACITY = MIB  # of `acks`, and of a marked `raw`; Linux lets an unprivileged process have this much by default


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
    """Return True if a framer has used this very pipe before: the mark is its capacity, which is lost with the pipe."""
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


# --- raw -------------------------------------------------------------------------------------------------------------
#     <message>                          a line from any writer in the pod, who gets no reply
#     !r <birth> <start> <end>           lines of producers that wait for no reply: in the ring `received`, from
#                                        position <start> to <end>; an empty piece means: all before it is free
#     !c <connection> <n> <k> <birth> <start> <end> [p=<producer> [after=<id>]|w=<scope>] [reserved]
#                                        there are the k messages n… of an acknowledged connection; `after`: they are
#                                        refused unless this id of the producer, or a later one, is stored; `reserved`:
#                                        the client has shown the pod's token, and may write to the topics of KMQ itself
#     !l <connection> <q> p=<producer>   question q of a connection, from 0: the last id stored of a producer
#
# <birth> names the ring (received.py). A control line is shorter than PIPE_BUF, and so is written at once.

CONTROL = b"!"
_CONNECTION, _NAME, _NUMBER = rb"\d{1,20}\.\d{1,20}", NAME_PATTERN.encode(), rb"\d{1,19}"
_PIECE = rb"(%b) (%b) (%b)" % (_NUMBER, _NUMBER, _NUMBER)
LINES = re.compile(rb"!r %b\n" % _PIECE)  # birth, start, end
# connection, n, k, birth, start, end, `p` or `w`, producer or scope, after, ` reserved`
_COUNTED = rb"(%b) (\d{1,18}) (\d{1,9}) %b" % (_CONNECTION, _PIECE)
MESSAGES = re.compile(rb"!c %b(?: ([pw])=(%b)(?: after=(\d{1,18}))?)?( reserved)?\n" % (_COUNTED, _NAME))
# one message of a connection without a name: connection, n, birth, start, end
SINGLE = re.compile(rb"!c (%b) (\d{1,18}) 1 %b\n" % (_CONNECTION, _PIECE))
LAST_ID = re.compile(rb"!l (%b) (\d{1,18}) p=(%b)\n" % (_CONNECTION, _NAME))  # connection, q, producer


def lines(birth: int, start: int, end: int) -> bytes:
    """Return the control line for lines without replies."""
    return b"!r %d %d %d\n" % (birth, start, end)


class Sender:
    """A connection as the source of messages: the name that replies carry, and how many messages it has sent."""

    __slots__ = ("name", "right", "sent", "tag")

    def __init__(self, name: bytes, tag: bytes = b"", reserved: bool = False) -> None:
        self.name = name
        self.right = b" reserved" if reserved else b""
        self.tag = b" " + tag if tag else b""  # ` p=<producer>` or ` w=<scope>`
        self.sent = 0  # messages announced in the FIFO: also the n of the last one

    def messages(self, count: int, birth: int, start: int, end: int, origin: bytes = b"") -> bytes:
        """Return the control line for the next `count` messages. `origin`: after `p=`; b"": as the connection's hello."""
        first = self.sent + 1
        self.sent += count
        tag = b" p=" + origin if origin else self.tag
        return b"!c %b %d %d %d %d %d%b%b\n" % (self.name, first, count, birth, start, end, tag, self.right)

    def question(self, number: int, producer: bytes = b"") -> bytes:
        """Return the line that asks the framer for the last id of a producer, else of the connection's own name."""
        return b"!l %b %d%b\n" % (self.name, number, b" p=" + producer if producer else self.tag)


# --- acks ------------------------------------------------------------------------------------------------------------
# Durability sends a reply once the records that it confirms are on disk. A line is `<connection> <first n> <reply>`:
# <reply> is passed to the producer unchanged, for the messages from <first n> on. An empty line, from the framer: the
# ring `received` has room again.

# A flood of empty lines causes refusals of 26 times its size, which the framer makes faster than ingress reads them. If
# they did not fit, other connections would lose their replies.
KEEP_BYTES = 32 * MIB
_READ_BYTES = 1 << 16


class AckWriter:
    """Durability's end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self.lost = 0  # bytes of replies
        with contextlib.suppress(OSError):  # over the user's limit: a smaller FIFO works
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CAPACITY)  # fits the replies to all that is in flight

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def put(self, replies: bytes) -> None:
        """Send these lines now, or once there is room."""
        if self._bytes + len(replies) > KEEP_BYTES:
            self.lost += len(replies)
            return
        self._waiting.append(replies)
        self._bytes += len(replies)
        self.flush()

    def flush(self) -> None:
        """Write waiting lines, as far as there is room."""
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
