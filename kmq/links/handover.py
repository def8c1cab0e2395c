"""Ingress' end of the way to the framer: bytes into the ring `received`, a line about them into the FIFO `raw`.

Invariant   What is put keeps its order. The FIFO gets a control line only after the ring shows the bytes. A write is
            whole lines, at most PIPE_BUF bytes.
Memory      While anything waits here, nothing more may be received (`clogged`): so at most one receive waits.
"""

import os
from collections import deque
from collections.abc import Sequence

from kmq.config.values import KIB, PIPE_BUF
from kmq.links import raw
from kmq.links.raw import Sender
from kmq.links.received import ReceivedWriter

Part = bytes | bytearray | memoryview
_CONTROL_LINE = -1
_PROMPT_BYTES = 128 * KIB  # put so much, and the framer is told at once: it works while ingress receives the next


class Handover:
    """Takes whole lines; `flush` tells the framer of them."""

    def __init__(self, fd: int, ring: ReceivedWriter) -> None:
        self.fd, self.ring = fd, ring
        # Put or said, but the ring had no room; a control line has the count -1.
        self._waiting: deque[tuple[bytes, Sender | None, int]] = deque()
        self._piece = 0, 0  # lines that nobody waits for, to be announced as one piece: start and end
        self._lines: list[bytes] = []  # control lines to be written
        self._unsaid = 0  # bytes put since the last flush
        self.is_full = False  # the FIFO has not taken all control lines

    @property
    def clogged(self) -> bool:
        """Return True if something waits for room. Nothing more may be received until `flush` has ended that."""
        return self.is_full or bool(self._waiting)

    def put(self, parts: Sequence[Part], sender: Sender | None = None, count: int = 0) -> None:
        """Hand over whole lines: `count` messages of `sender`, or lines that nobody waits for."""
        nbytes = sum(map(len, parts))
        start = -1 if self._waiting else self.ring.put(parts, nbytes)
        if start < 0:
            self._waiting.append((b"".join(parts), sender, count))
            return
        self._announce(start, start + nbytes, sender, count)
        self._unsaid += nbytes
        if self._unsaid > _PROMPT_BYTES:
            self.flush()

    def _announce(self, start: int, end: int, sender: Sender | None, count: int) -> None:
        if sender is not None:
            self._end_piece()
            self._lines.append(sender.messages(count, self.ring.birth, start, end))
        elif start == self._piece[1]:
            self._piece = self._piece[0], end
        else:
            self._end_piece()
            self._piece = start, end

    def _end_piece(self) -> None:
        start, end = self._piece
        if start < end:
            self._lines.append(raw.lines(self.ring.birth, start, end))
        self._piece = 0, 0

    def say(self, line: bytes) -> None:
        """Write a control line that speaks of no bytes, behind everything that was put."""
        if self._waiting:
            self._waiting.append((line, None, _CONTROL_LINE))
        else:
            self._end_piece()
            self._lines.append(line)

    def say_free(self) -> None:
        """Tell the framer that nothing before the head is spoken of any more but by the lines before this one."""
        self.say(raw.lines(self.ring.birth, self.ring.head, self.ring.head))

    def flush(self) -> None:
        """Tell the framer of everything that was put, as far as there is room."""
        while self._waiting and self._put_again(*self._waiting[0]):
            del self._waiting[0]
        self._end_piece()
        if self._lines:
            self.ring.publish()
            self._unsaid = 0
            text = b"".join(self._lines)
            done = self._write(text)
            self.is_full = done < len(text)
            self._lines = [text[done:]] if self.is_full else []

    def _put_again(self, data: bytes, sender: Sender | None, count: int) -> bool:
        if count == _CONTROL_LINE:
            self._end_piece()
            self._lines.append(data)
            return True
        start = self.ring.put([data], len(data))
        if start < 0:
            return False
        self._announce(start, start + len(data), sender, count)
        return True

    def _write(self, text: bytes) -> int:
        """Write whole lines, as many as the FIFO takes; return how many bytes."""
        done, end = 0, len(text)
        try:
            while done < end:
                cut = end if end - done <= PIPE_BUF else text.rindex(b"\n", done, done + PIPE_BUF) + 1
                os.write(self.fd, text[done:cut])
                done = cut
        except BlockingIOError:
            pass
        return done
