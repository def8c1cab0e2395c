"""The link from ingress to the framer: the lines lie in the ring `received`, and the FIFO `raw` says where.

Links       /dev/shm/<instance>.received, made by ingress, its only writer. The framer is its only reader.
Layout      As in layout.py, but between head and tail there are no blocks: only bytes, where the control lines of the
            FIFO say (fifo.py). The first word of the record is the head, the last is begin, and its counter stays 0.
            Head and begin are two stores: begin comes second, so it never lies beyond the head. BASE_SEQ holds the
            birth: the time in ns at which the ring was made. Control lines name it, so a control line for an older ring
            is never applied to this ring.

Invariant   The bytes between tail and head are never overwritten, and keep their order. The head moves before the FIFO
            gets the control line that names these bytes. The tail moves only past bytes whose lines are committed in
            the ring `framed`, which holds that position in the same commit (layout.py, invariant 2).
            A write to the FIFO is whole lines, at most PIPE_BUF bytes.
Crash       Ingress killed before it moved the head: nothing happened. Killed before it wrote the line: the bytes have
            no owner; they are free once the framer has read a later line, and the first line of the next ingress is
            such a line.
            Framer killed: the position in the record of `framed` is in force. The lines after it are in the staging
            area or in the FIFO, and their bytes are still here. The start moves the tail to that position.
            FIFO gone, because all stages died: the bytes that no control line names are freed in the same way.
Full        Ingress asks for an empty line in the FIFO `acks` once there is room, and reads no producer until then.
Memory      While anything waits in a Handover, nothing more may be received (`clogged`): so at most one receive waits.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from kmq.config.values import KIB, MIB, PIPE_BUF
from kmq.links import fifo, layout
from kmq.links.doorbell import fence
from kmq.links.fifo import Sender
from kmq.links.layout import (
    BASE_SEQ,
    BEGIN,
    BLOCKS,
    IDENTITY,
    READER,
    RECORD,
    TAIL,
    WRITER,
    WRITER_SLEEPS,
    Identity,
    SharedFile,
    make_identity,
    open_existing,
    read_text,
    shm_path,
)
from kmq.links.ownership import RingLock, field, is_same_file
from kmq.links.ring import RingFile
from kmq.logfmt import Logger

NAME = "received"
_HEAD = RECORD[0]
_BEGIN = _HEAD + BEGIN
_LEAST_BYTES = MIB


def ring_bytes(max_line: int) -> int:
    """Return the size of the ring: twice the longest line plus what one receive brings, so all fits on one side.

    Not more: lines in the ring are accepted, and the disk must have room for them (kmq/broker/admission.py).
    """
    return max(_LEAST_BYTES, 2 * (max_line + 260 * KIB))


def identity(data_id: str, max_line: int) -> Identity:
    """Return the Identity of the ring under these settings."""
    return make_identity(data_id, 0, ring_bytes(max_line), 0, "block")


def waiting_bytes(instance: str) -> int:
    """Return how many bytes wait in the ring now; 0 if there is no ring."""
    nbytes: int = layout.filling(instance, NAME).nbytes
    return nbytes


class ReceivedWriter(SharedFile):
    """Ingress' end. The constructor takes the lock and finds or makes the ring."""

    def __init__(
        self, instance: str, identity: Identity, who: str, log: Logger, before_make: Callable[[], None] = lambda: None
    ) -> None:
        """`before_make` is called only if the ring is made anew."""
        super().__init__(instance, NAME)

        def birth() -> tuple[int, int]:
            before_make()
            return time.time_ns(), 0

        fd, is_created = RingFile(self.path, f"{instance}.{NAME}", identity, log).open(birth)
        if is_created:
            log.info("ring_created", ring=NAME, bytes=identity.ring_bytes)
        self._map(fd, identity, WRITER, READER)
        self._sign(WRITER, who)
        self.birth: int = self.cells[BASE_SEQ]
        self.head: int = self.cells[_HEAD]
        self._begin: int = self.cells[_BEGIN]
        self._asks = 1  # 1: we ask to be told of room; an earlier ingress may have asked

    def may_write_again(self) -> bool:
        """Return True: while the writer is here, the reader changes only its own cells."""
        return True

    def put(self, parts: Sequence[bytes | bytearray | memoryview], nbytes: int) -> int:
        """Copy `parts`, together `nbytes`, into the ring; return their position, or -1 if there is no room.

        They lie in one piece. `publish` makes them visible.
        """
        position = self._position_for(nbytes)
        if position < 0:
            self._asks = self.cells[WRITER_SLEEPS] = 1
            fence()
            position = self._position_for(nbytes)
            if position < 0:
                return -1
        if self._asks:
            self._asks = self.cells[WRITER_SLEEPS] = 0
        if self._is_empty():
            self._begin = position
        at = BLOCKS + position % self.size
        for part in parts:
            end = at + len(part)
            self.mm[at:end] = part
            at = end
        self.head = position + nbytes
        return position

    def has_room(self, nbytes: int) -> bool:
        """Return True if `put` would take so many bytes now."""
        return self._position_for(nbytes) >= 0

    def _position_for(self, nbytes: int) -> int:
        is_empty, position, size = self._is_empty(), self.head, self.size
        at = position % size
        if at and (is_empty or at + nbytes > size):  # an empty ring is begun anew (layout.py)
            position += size - at
        tail = position if is_empty else max(self.cells[TAIL], self._begin)
        return position if position + nbytes - tail <= size else -1

    def _is_empty(self) -> bool:
        return self.cells[TAIL] == self.head

    def publish(self) -> None:
        """Move the head. Call before the FIFO gets a control line that names the bytes that were put."""
        self.cells[_HEAD] = self.head
        self.cells[_BEGIN] = self._begin


class ReceivedReader(SharedFile):
    """The framer's end."""

    def __init__(self, instance: str, fd: int, found: Identity, who: str, acks: int) -> None:
        """`acks`: the FIFO that wakes ingress."""
        super().__init__(instance, NAME)
        self._map(fd, found, READER, WRITER)
        self._sign(READER, who)
        self._acks = acks
        self.birth: int = self.cells[BASE_SEQ]

    @classmethod
    def attach(cls, instance: str, data_id: str, who: str, acks: int) -> "ReceivedReader | None":
        """Return the ring; None if it is missing or of another data directory. Raises BusyError if it has a reader."""
        path = shm_path(instance, NAME)
        fd = open_existing(path)
        if fd is None:
            return None
        reader = None
        try:
            text = read_text(fd, IDENTITY)
            found = make_identity(data_id, 0, int(field(text, "bytes") or 0), 0, "block")
            if text == found.text() and os.fstat(fd).st_size == found.file_bytes:
                RingLock(fd, READER).acquire(f"ring {instance}.{NAME} (reader)", read_text(fd, READER))
                if is_same_file(fd, path):  # else it was replaced between the two looks
                    reader = cls(instance, fd, found, who, acks)
            return reader
        finally:
            if reader is None:
                os.close(fd)

    def may_write_again(self) -> bool:
        """Return True if the writer is gone: a living writer makes the copy itself."""
        return not self._peer.is_held()

    def holds(self, start: int, end: int) -> bool:
        """Return True if a control line may name these positions: put by ingress, and in one piece."""
        return start <= end <= self.cells[_HEAD] and start % self.size + end - start <= self.size

    def text(self, start: int, end: int) -> bytes:
        """Return the bytes between two positions that the ring holds."""
        at = BLOCKS + start % self.size
        return self.mm[at : at + end - start]

    def release(self, position: int) -> None:
        """Free everything before `position`, which is committed in the ring `framed`."""
        cells = self.cells
        if position > cells[TAIL]:
            cells[TAIL] = position
            fence()
            if cells[WRITER_SLEEPS]:
                with contextlib.suppress(BlockingIOError):  # full: ingress is awake anyway
                    os.write(self._acks, b"\n")


# --- handover --------------------------------------------------------------------------------------------------------

Part = bytes | bytearray | memoryview
_CONTROL_LINE = -1
_PROMPT_BYTES = 128 * KIB  # after so many bytes the framer is told at once, to work while ingress receives more


class Handover:
    """Ingress' end of ring and FIFO together: it takes whole lines, and `flush` tells the framer of them."""

    def __init__(self, fd: int, ring: ReceivedWriter) -> None:
        self.fd, self.ring = fd, ring
        # Calls of `put` and `say` for which the ring had no room; a control line has the count -1.
        self._waiting: deque[tuple[bytes, Sender | None, int, bytes]] = deque()
        self._piece = 0, 0  # lines without replies, to be announced as one piece: start and end
        self._lines: list[bytes] = []  # control lines to be written
        self._unsaid = 0  # bytes put since the last flush
        self.is_full = False  # the FIFO has not taken all control lines

    @property
    def clogged(self) -> bool:
        """Return True if lines wait for room. Nothing more may be received until `flush` has passed them on."""
        return self.is_full or bool(self._waiting)

    def put(self, parts: Sequence[Part], sender: Sender | None = None, count: int = 0, origin: bytes = b"") -> None:
        """Hand over whole lines: `count` messages of `sender`, or lines without replies.

        `origin`: their producer if it is not the sender's name, and the id after which they are stored (fifo.py).
        """
        nbytes = sum(map(len, parts))
        start = -1 if self._waiting else self.ring.put(parts, nbytes)
        if start < 0:
            self._waiting.append((b"".join(parts), sender, count, origin))
            return
        self._announce(start, start + nbytes, sender, count, origin)
        self._unsaid += nbytes
        if self._unsaid > _PROMPT_BYTES:
            self.flush()

    def _announce(self, start: int, end: int, sender: Sender | None, count: int, origin: bytes) -> None:
        if sender is not None:
            self._end_piece()
            self._lines.append(sender.messages(count, self.ring.birth, start, end, origin))
        elif start == self._piece[1]:
            self._piece = self._piece[0], end
        else:
            self._end_piece()
            self._piece = start, end

    def _end_piece(self) -> None:
        start, end = self._piece
        if start < end:
            self._lines.append(fifo.lines(self.ring.birth, start, end))
        self._piece = 0, 0

    def say(self, line: bytes) -> None:
        """Write a control line that names no bytes, after everything that was put."""
        if self._waiting:
            self._waiting.append((line, None, _CONTROL_LINE, b""))
        else:
            self._end_piece()
            self._lines.append(line)

    def say_free(self) -> None:
        """Tell the framer that only the control lines before this one name bytes before the head."""
        self.say(fifo.lines(self.ring.birth, self.ring.head, self.ring.head))

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

    def _put_again(self, data: bytes, sender: Sender | None, count: int, origin: bytes) -> bool:
        if count == _CONTROL_LINE:
            self._end_piece()
            self._lines.append(data)
            return True
        start = self.ring.put([data], len(data))
        if start < 0:
            return False
        self._announce(start, start + len(data), sender, count, origin)
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
