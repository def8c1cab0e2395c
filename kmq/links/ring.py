"""The two ends of a ring; layout.py has the bytes and the invariants."""

import mmap
import os
from collections.abc import Callable

from kmq.errors import ConfigError, CorruptError
from kmq.links.doorbell import fence
from kmq.links.layout import (
    BASE_SEQ,
    BLOCKS,
    CELLS,
    COUNTER,
    FLOOR,
    FLOOR_MESSAGES,
    HEADER,
    IDENTITY,
    LAYOUT,
    PIPE_MARKED,
    READER,
    READER_SLEEPS,
    RECORD,
    SKIP,
    SYNC_FAILED,
    SYNCED,
    TAIL,
    TAIL_MESSAGES,
    WRITER,
    WRITER_SLEEPS,
    Block,
    Commit,
    Identity,
    Ring,
    block_bytes,
    field,
    first_waiting,
    give_name,
    make_file,
    read_text,
    shm_path,
    waiting_bytes,
)
from kmq.links.ownership import RingLock, is_same_file
from kmq.logfmt import Log


class RingWriter(Ring):
    """The writing end. `open` takes the lock, finds or makes the ring, and leaves it ready to append to."""

    def __init__(
        self, instance: str, name: str, identity: Identity, who: str, first_seq: Callable[[], tuple[int, int]], log: Log
    ) -> None:
        """`first_seq` is called only where the ring is made anew, for the next seq and the last recv_ts (µs)."""
        super().__init__(instance, name)
        fd, self.created = self._existing(identity, log), False
        while fd < 0:
            fd, self.created = self._create(identity, *first_seq()), True
            if fd < 0:  # somebody else has given a ring this name meanwhile
                fd, self.created = self._existing(identity, log), False
        if self.created:
            log.info("ring_created", ring=name, slots=identity.slots, bytes=identity.ring_bytes, policy=identity.policy)
        self._map(fd, identity, WRITER, READER)
        self._sign(WRITER, who)
        self._last = self.committed()
        self._counter: int = self.cells[COUNTER]
        self._floor: int = self.cells[FLOOR]
        self._floor_messages: int = self.cells[FLOOR_MESSAGES]

    def _existing(self, wanted: Identity, log: Log) -> int:
        """A descriptor of the ring that is there and is ours, locked; -1 after removing one that is not (invariant 5)."""
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return -1
            except PermissionError:
                raise ConfigError(f"{self.path}: belongs to another user; use another KMQ_INSTANCE") from None
            is_ours = False
            try:
                self._lock_writer(fd)
                if not is_same_file(fd, self.path):
                    continue  # made anew while we waited
                is_ours = read_text(fd, IDENTITY) == wanted.text() and os.fstat(fd).st_size == wanted.file_bytes
                if is_ours:
                    return fd
                self._remove(fd, wanted, log)
                return -1
            finally:
                if not is_ours:
                    os.close(fd)  # and with it the lock

    def _lock_writer(self, fd: int) -> None:
        RingLock(fd, WRITER).acquire(f"ring {self.instance}.{self.name} (writer)", read_text(fd, WRITER))

    def _remove(self, fd: int, wanted: Identity, log: Log) -> None:
        """Remove a ring that is not ours, unless somebody reads it, or it is of other settings and holds messages."""
        found = read_text(fd, IDENTITY)
        reader = RingLock(fd, READER)
        try:
            reader.acquire(f"ring {self.instance}.{self.name} (reader)", read_text(fd, READER))
            ours = field(found, "data_id") == wanted.data_id and field(found, "layout") == str(LAYOUT)
            waiting = waiting_bytes(fd)
            if ours and waiting:
                raise ConfigError(
                    f"{self.path} holds {waiting} bytes of messages under other settings ({found});"
                    f" start once with those settings to drain it, or remove the file to give them up"
                )
            log.warn("ring_recreated", ring=self.name, found=found, discarded_bytes=waiting)
            os.unlink(self.path)
        finally:
            reader.release()

    def _create(self, identity: Identity, next_seq: int, last_ts: int) -> int:
        """Make the ring, locked; its descriptor, or -1 where there is one by now."""
        fd = make_file(f"{self.path}.new", identity.file_bytes)
        self._lock_writer(fd)
        os.pwrite(fd, identity.text().encode(), IDENTITY)
        cells = mmap.mmap(fd, BLOCKS)
        words = memoryview(cells).cast("Q")
        words[CELLS // 8 + RECORD[0] + 2] = next_seq
        words[CELLS // 8 + RECORD[0] + 3] = last_ts
        words[CELLS // 8 + BASE_SEQ] = next_seq
        words.release()
        cells.close()
        if give_name(f"{self.path}.new", self.path):
            return fd
        os.close(fd)
        return -1

    def may_write_again(self) -> bool:
        """Whether nobody else changes what is in the ring but the reader its cells."""
        return True

    @property
    def last(self) -> Commit:
        """The record in force, as this writer last committed it."""
        return self._last

    @property
    def max_count(self) -> int:
        """Messages one block may have: a quarter of the ring, so that both ends always have something to do."""
        return max(1, self.identity.slots // 4)

    @property
    def max_bytes(self) -> int:
        """Bytes one block may have: half of the ring less its header, so that it always fits on one side."""
        return self.size // 2 - HEADER

    def has_room(self, nbytes: int, count: int) -> bool:
        """Whether a block of this size can be appended now. Under drop_oldest makes room, so always True."""
        place, total = self._place(nbytes)
        while not self._fits(place + total - self._last.head, count):
            if not self.drops:
                return False
            self._drop_oldest()
        return True

    def _place(self, nbytes: int) -> tuple[int, int]:
        """(position where a block of `nbytes` begins, bytes it takes): the head, or the start of the ring after a skip.

        It skips where the block does not fit before the end, and under `block` whenever the ring is empty: a reader that keeps
        up then works on the same few pages again and again, which stay in the cache and keep the memory small. Should it
        stop right then, the ring holds only what fits before the place where it was empty; under drop_oldest that would
        be messages thrown away early.
        """
        total, head = block_bytes(nbytes), self._last.head
        at = head % self.size
        is_empty = max(self.cells[TAIL], self._floor) == head
        if at + total > self.size or (is_empty and total <= at and not self.drops):
            return head + self.size - at, total
        return head, total

    def _fits(self, total: int, count: int) -> bool:
        cells = self.cells
        tail = max(cells[TAIL], self._floor)
        messages = max(cells[TAIL_MESSAGES], self._floor_messages)
        waiting = self._last.messages - messages
        return self._last.head + total - tail <= self.size and (waiting + count <= self.identity.slots or waiting <= 0)

    def _drop_oldest(self) -> None:
        """Give up the oldest block: publish the floor before its bytes are overwritten (invariant 4)."""
        cells = self.cells
        if cells[TAIL] > self._floor:
            # Look again first: the reader may have released everything meanwhile, and there is no block at the head.
            self._floor, self._floor_messages = cells[TAIL], cells[TAIL_MESSAGES]
            return
        at = BLOCKS // 8 + self._floor % self.size // 8
        nbytes = self.words[at]
        if nbytes == SKIP:
            self._floor += self.size - self._floor % self.size
        else:
            self._floor_messages = self.words[at + 5]
            self._floor += block_bytes(nbytes)
        cells[FLOOR_MESSAGES] = self._floor_messages
        cells[FLOOR] = self._floor
        fence()

    def append(
        self,
        data: bytes | memoryview,
        first_seq: int,
        count: int,
        key_length: int,
        recv_ts: int,
        area: int = 0,
        consumed: int = 0,
        replies: bytes = b"",
    ) -> None:
        """Append a block that has_room said fits (data and replies), and commit it with the framer's two staging cells."""
        last = self._last
        nbytes = len(data) + len(replies)
        start, total = self._place(nbytes)
        words = self.words
        if start != last.head:
            words[BLOCKS // 8 + last.head % self.size // 8] = SKIP
        at = BLOCKS + start % self.size
        self.mm[at + HEADER : at + HEADER + len(data)] = data
        if replies:
            self.mm[at + HEADER + len(data) : at + HEADER + nbytes] = replies
        header = at // 8
        words[header] = nbytes
        words[header + 1] = first_seq
        words[header + 2] = count
        words[header + 3] = key_length
        words[header + 4] = recv_ts
        words[header + 5] = last.messages + count
        words[header + 6] = len(replies)
        self.commit(Commit(start + total, last.messages + count, first_seq + count, recv_ts, area, consumed))

    def commit(self, record: Commit) -> None:
        """Put `record` in force: the spare first, then the counter, which is the instant it happens."""
        cells = self.cells
        counter = self._counter + 1
        at = RECORD[counter & 1]
        cells[at] = record.head
        cells[at + 1] = record.messages
        cells[at + 2] = record.next_seq
        cells[at + 3] = record.last_ts
        cells[at + 4] = record.area
        cells[at + 5] = record.consumed
        fence()
        cells[COUNTER] = counter
        self._counter = counter
        self._last = record
        fence()
        if cells[READER_SLEEPS]:
            self.reader_bell.ring()

    def wait_room(self, nbytes: int, count: int) -> bool:
        """Sleep until the reader frees something (at most WAIT_S); whether the block fits now."""
        self.cells[WRITER_SLEEPS] = 1
        fence()
        if not self.has_room(nbytes, count):
            self.writer_bell.wait()
        self.cells[WRITER_SLEEPS] = 0
        return self.has_room(nbytes, count)

    def reader_is_gone(self) -> bool:
        """Whether no process holds the reading end: a snapshot."""
        return not self._peer.is_held()

    @property
    def pipe_marked(self) -> bool:
        return bool(self.cells[PIPE_MARKED])

    @pipe_marked.setter
    def pipe_marked(self, marked: bool) -> None:
        self.cells[PIPE_MARKED] = int(marked)

    def first_waiting_seq(self) -> int:
        """Seq of the oldest block the reader has not released, or next_seq where there is none."""
        return first_waiting(self, self.tail, self._last)

    def waiting(self) -> list[Block]:
        """The blocks the reader has not released, as it may go on doing: only the writer overwrites them, and it is here."""
        blocks, position = [], self.tail
        while position < self._last.head:
            block, position = _block_at(self, position, self._last.head)
            if block is not None:
                blocks.append(block)
        return blocks


class RingReader(Ring):
    """The reading end. Waits for nothing: `attach` answers None until the ring is there and is ours."""

    def __init__(self, instance: str, name: str, fd: int, identity: Identity, who: str) -> None:
        super().__init__(instance, name)
        self._map(fd, identity, READER, WRITER)
        self._sign(READER, who)
        self.position: int = self.tail
        self.jumped = False
        self._jump_untold = bool(self.cells[FLOOR] > self.cells[TAIL])  # dropped while nobody read

    @classmethod
    def attach(cls, instance: str, name: str, identity: Identity, who: str) -> "RingReader | None":
        """The ring, or None while the writer has not made it. Raises BusyError where another process reads it."""
        path = shm_path(instance, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise ConfigError(f"{path}: belongs to another user; use another KMQ_INSTANCE") from None
        reader = None
        try:
            if read_text(fd, IDENTITY) == identity.text() and os.fstat(fd).st_size == identity.file_bytes:
                RingLock(fd, READER).acquire(f"ring {instance}.{name} (reader)", read_text(fd, READER))
                if is_same_file(fd, path):  # else it was made anew between the two looks
                    reader = cls(instance, name, fd, identity, who)
            return reader
        finally:
            if reader is None:
                os.close(fd)

    def take(self) -> list[Block]:
        """All blocks committed since the last take, oldest first; [] when there are none.

        Under drop_oldest the list may begin later than the last one ended; `jumped` says that what lies between was dropped.
        """
        head = self.committed().head
        blocks: list[Block] = []
        jumped = self._jump_untold
        while self.position < head:
            if self.drops and self.cells[FLOOR] > self.position:
                if blocks:
                    break  # a gap begins a list of its own
                self.position = self.cells[FLOOR]
                jumped = True
                continue
            block, self.position = _block_at(self, self.position, head)
            if block is not None:
                blocks.append(block)
        self.jumped = jumped and bool(blocks)
        self._jump_untold = jumped and not blocks
        return blocks

    def release(self, block: Block) -> None:
        """Everything up to and with `block` is durable: give its room back (invariant 3)."""
        cells = self.cells
        cells[TAIL_MESSAGES] = block.messages
        cells[TAIL] = block.end
        fence()
        if cells[WRITER_SLEEPS]:
            self.writer_bell.ring()

    def wait(self) -> None:
        """Sleep until the writer appends something, at most WAIT_S."""
        self.cells[READER_SLEEPS] = 1
        fence()
        if self.committed().head <= self.position:
            self.reader_bell.wait()
        self.cells[READER_SLEEPS] = 0

    def set_synced(self, seq: int) -> None:
        """Durability: `seq` and all before it are on disk."""
        self.cells[SYNCED] = seq + 1

    @property
    def sync_failed(self) -> bool:
        return bool(self.cells[SYNC_FAILED])

    @sync_failed.setter
    def sync_failed(self, failed: bool) -> None:
        self.cells[SYNC_FAILED] = int(failed)

    def first_waiting_seq(self) -> int:
        """Seq of the oldest block not yet taken, or next_seq where there is none."""
        return first_waiting(self, max(self.position, self.tail), self.committed())

    def writer_is_gone(self) -> bool:
        """Whether no process holds the writing end: a snapshot, for draining."""
        return not self._peer.is_held()

    def may_write_again(self) -> bool:
        """A living writer does it, or goes on writing meanwhile."""
        return self.writer_is_gone()


def _block_at(ring: Ring, position: int, head: int) -> tuple[Block | None, int]:
    """(block at `position`, where the next one begins); no block where it was a skip or, not moving on, just dropped."""
    at = BLOCKS + position % ring.size
    header = ring.words[at // 8 : at // 8 + 7].tolist()
    nbytes = header[0]
    end = position + block_bytes(nbytes) if nbytes != SKIP else position + ring.size - position % ring.size
    damaged = end > head or (nbytes != SKIP and at + end - position > BLOCKS + ring.size)
    payload: memoryview | bytes = b""
    if not damaged and nbytes != SKIP:
        payload = ring.view[at + HEADER : at + HEADER + nbytes]
        if ring.drops:
            payload = bytes(payload)
    if ring.drops:
        fence()
        if ring.cells[FLOOR] > position:
            return None, position
    if damaged:
        raise CorruptError(f"{ring.path}: block header at position {position} runs past the head {head}")
    return (None if nbytes == SKIP else Block(payload, end, header)), end
