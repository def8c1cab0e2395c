"""A ring `received` of a test's own, with both ends, and the text of the FIFO that speaks of it."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fake_logger import FakeLogger

from kmq.links import fifo, layout
from kmq.links.fifo import Sender
from kmq.links.layout import BLOCKS, TAIL, Identity
from kmq.links.received import NAME, ReceivedReader, ReceivedWriter

ME = b"17.1"  # a connection
DATA_ID = "unit"
_numbers = itertools.count()
_open: list["Way"] = []


class Messages(NamedTuple):
    """Messages n… of an acknowledged connection, put as one piece."""

    lines: Sequence[bytes]
    n: int
    tag: bytes
    conn: bytes
    reserved: bool = False


class Lines(NamedTuple):
    """Lines that nobody waits for, put as one piece."""

    lines: Sequence[bytes]


def messages(
    lines: Sequence[bytes], n: int = 1, tag: bytes = b"", conn: bytes = ME, reserved: bool = False
) -> Messages:
    return Messages(lines, n, tag, conn, reserved)


def plain(*lines: bytes) -> Lines:
    return Lines(lines)


def joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def identity(nbytes: int) -> Identity:
    return layout.make_identity(DATA_ID, 0, nbytes, 0, "block")


class Way:
    """The way from ingress to the framer. It is gone after the test (conftest.py)."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.instance = f"unit-{os.getpid()}-way{next(_numbers)}"
        self.identity = identity(nbytes)
        self.signs, self.acks = os.pipe2(os.O_NONBLOCK)  # the FIFO `acks`: what ingress reads, what the framer writes
        self.reader: ReceivedReader | None = None
        self.writer = self.new_writer()
        _open.append(self)

    def new_writer(self) -> ReceivedWriter:
        """Return the writing end as an ingress that starts now gets it."""
        return ReceivedWriter(self.instance, self.identity, "ingress", FakeLogger())

    def attach(self) -> ReceivedReader | None:
        """Return the reading end as a framer that starts now gets it; the framer before is dead."""
        if self.reader is not None:
            self.reader.close()
        self.reader = ReceivedReader.attach(self.instance, DATA_ID, "framer", self.acks)
        return self.reader

    def restart_ingress(self) -> None:
        self.writer.close()
        self.writer = self.new_writer()

    def put(self, lines: Sequence[bytes]) -> tuple[int, int]:
        """Put these lines as one piece and show them; return where they lie."""
        data = joined(lines)
        start = self.writer.put([data], len(data))
        assert start >= 0, "the ring of this test is too small"
        self.writer.publish()
        return start, start + len(data)

    def text(self, *parts: bytes | Messages | Lines) -> bytes:
        """Put Messages and Lines; return the text of the FIFO, where bytes stand as they are."""
        return b"".join(part if isinstance(part, bytes) else self._control_line(part) for part in parts)

    def _control_line(self, part: Messages | Lines) -> bytes:
        place = self.writer.birth, *self.put(part.lines)
        if isinstance(part, Lines):
            return fifo.lines(*place)
        sender = Sender(part.conn, part.tag, part.reserved)
        sender.sent = part.n - 1
        return sender.messages(len(part.lines), *place)

    def spoil(self) -> None:
        """Overwrite all that is free, as ingress may do at any time."""
        tail, head, size = self.writer.cells[TAIL], self.writer.head, self.writer.size
        tail = max(tail, self.writer._begin)
        low, high = tail % size, head % size
        free = [(high, low)] if high < low else [(0, low), (high, size)]
        if head - tail < size:
            for start, end in free:
                self.writer.mm[BLOCKS + start : BLOCKS + end] = b"?" * (end - start)

    def close(self) -> None:
        for end in (self.reader, self.writer):
            if end is not None:
                end.close()
        layout.remove(self.instance, NAME)
        os.close(self.signs)
        os.close(self.acks)


def close_all() -> None:
    while _open:
        _open.pop().close()
