"""A ring's file, and the two ends of a ring of blocks; layout.py has the bytes and the invariants.

Invariant   A ring of another data directory, version, size or policy is never written: it is removed and made anew, or
            the writer refuses to start (layout.py, 5).
Crash       A ring gets its name only when all of it is there, locked. Killed before: the next start removes what is
            left.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kmq.errors import ConfigError, CorruptError
from kmq.links import doorbell
from kmq.links.doorbell import Bells, fence
from kmq.links.layout import (
    BASE_SEQ,
    BELLS,
    BLOCKS,
    CELLS,
    COUNTER,
    FLOOR,
    FLOOR_MESSAGES,
    HEADER,
    IDENTITY,
    LAYOUT,
    NOTHING_STAGED,
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
    BlockLimits,
    Consumed,
    Framed,
    Identity,
    Ring,
    RingCommit,
    block_bytes,
    first_waiting,
    give_name,
    make_file,
    open_existing,
    read_text,
    remove_left_bells,
    shm_path,
    waiting_bytes,
)
from kmq.links.ownership import LOOK_S, RingLock, field, is_same_file
from kmq.logfmt import Logger


class RingFile:
    """The file under a ring's name, as the writer opens it."""

    def __init__(self, path: str, name: str, wanted: Identity, log: Logger) -> None:
        self.path, self.name, self.wanted, self.log = path, name, wanted, log

    def open(self, first: Callable[[], tuple[int, int]]) -> tuple[int, bool]:
        """Return a descriptor of our ring, locked, and whether the ring was made now.

        `first` is called only if the ring is made: it returns the next seq and the last recv_ts (µs) to begin with.
        """
        while (fd := self._existing()) is None:
            fd = self._create(*first())
            if fd is not None:
                return fd, True
        return fd, False

    def _existing(self) -> int | None:
        """Return a descriptor of our ring, locked; None if there is none. Remove a ring that is not ours."""
        while True:
            fd = open_existing(self.path)
            if fd is None:
                return None
            is_ours = False
            try:
                self._lock_writer(fd)
                if not is_same_file(fd, self.path):
                    continue  # replaced while we waited
                is_ours = (
                    read_text(fd, IDENTITY) == self.wanted.text() and os.fstat(fd).st_size == self.wanted.file_bytes
                )
                if is_ours:
                    return fd
                self._remove(fd)
                return None
            finally:
                if not is_ours:
                    os.close(fd)  # and with it the lock

    def _create(self, next_seq: int, last_ts: int) -> int | None:
        """Make the ring; return its descriptor, locked, or None if another ring has taken the name."""
        fd = make_file(f"{self.path}.new", self.wanted.file_bytes)
        self._lock_writer(fd)
        os.pwrite(fd, self.wanted.text().encode(), IDENTITY)
        mapped = mmap.mmap(fd, BLOCKS)
        words = memoryview(mapped).cast("Q")
        words[CELLS // 8 + RECORD[0] + 2] = next_seq
        words[CELLS // 8 + RECORD[0] + 3] = last_ts
        words[CELLS // 8 + BASE_SEQ] = next_seq
        words.release()
        mapped.close()
        if give_name(f"{self.path}.new", self.path):
            return fd
        os.close(fd)
        return None

    def _lock_writer(self, fd: int) -> None:
        RingLock(fd, WRITER).acquire(f"ring {self.name} (writer)", read_text(fd, WRITER))

    def _remove(self, fd: int) -> None:
        """Remove a ring that is not ours, unless it has a reader or holds messages of our data directory."""
        found = read_text(fd, IDENTITY)
        reader = RingLock(fd, READER)
        try:
            reader.acquire(f"ring {self.name} (reader)", read_text(fd, READER))
            is_our_data = field(found, "data_id") == self.wanted.data_id and field(found, "layout") == str(LAYOUT)
            waiting = waiting_bytes(fd)
            if is_our_data and waiting:
                raise ConfigError(
                    f"{self.path} holds {waiting} bytes of messages under other settings ({found});"
                    f" start once with those settings to drain it, or remove the file to give them up"
                )
            ring = self.name.rpartition(".")[2]
            self.log.warn("ring_recreated", ring=ring, found=found, discarded_bytes=waiting)
            os.unlink(self.path)
        finally:
            reader.release()


# --- ends ------------------------------------------------------------------------------------------------------------


class RingWriter(Ring):
    """The writing end. The constructor takes the lock and finds or makes the ring, ready to append to."""

    def __init__(
        self,
        instance: str,
        name: str,
        identity: Identity,
        who: str,
        first_seq: Callable[[], tuple[int, int]],
        log: Logger,
    ) -> None:
        """`first_seq` is called only if the ring is made anew; it returns the next seq and the last recv_ts (µs)."""
        super().__init__(instance, name)
        fd, self.created = RingFile(self.path, f"{instance}.{name}", identity, log).open(first_seq)
        if self.created:
            log.info("ring_created", ring=name, slots=identity.slots, bytes=identity.ring_bytes, policy=identity.policy)
        self._map(fd, identity, WRITER, READER)
        self._sign(WRITER, who)
        bells = doorbell.find(read_text(fd, BELLS))
        if bells is None:  # a new ring, or a bell was removed
            self._sign(BELLS, "")
            remove_left_bells(instance)
            bells = doorbell.make(instance, partial(self._sign, BELLS))
        self._take_bells(bells)
        self._last = self.committed()
        self._counter: int = self.cells[COUNTER]
        self._floor: int = self.cells[FLOOR]
        self._floor_messages: int = self.cells[FLOOR_MESSAGES]
        # At most a quarter of the messages, so that both ends always have something to do, and half of the bytes less
        # the header, so that a block always fits on one side.
        self.limits = BlockLimits(max(1, identity.slots // 4), self.size // 2 - HEADER)

    def may_write_again(self) -> bool:
        """Return True: while the writer is here, only the reader changes the ring, and only its own cells."""
        return True

    @property
    def last(self) -> RingCommit:
        """The record in force, as this writer last committed it."""
        return self._last

    def has_room(self, nbytes: int, count: int) -> bool:
        """Return True if a block of this size fits now; under drop_oldest drop blocks until it fits."""
        start, total = self._position_for(nbytes)
        while not self.fits(start + total, count):
            if not self.drops:
                return False
            self._drop_oldest()
        return True

    def _position_for(self, nbytes: int) -> tuple[int, int]:
        """Return (position where a block of `nbytes` begins, bytes it takes): the head, or the start of the ring if
        the block does not fit before the end, or the ring is empty.
        """
        total, head = block_bytes(nbytes), self._last.head
        at = head % self.size
        if at and (at + total > self.size or self._is_empty()):
            return head + self.size - at, total
        return head, total

    def _is_empty(self) -> bool:
        return max(self.cells[TAIL], self._floor) == self._last.head  # begin: a block follows it in the same commit

    def fits(self, end: int, count: int) -> bool:
        """Return True if a block that ends at `end` and holds `count` messages fits without dropping any."""
        if self._is_empty():
            return True
        cells, last = self.cells, self._last
        tail = max(cells[TAIL], self._floor, last.begin)
        waiting = last.messages - max(cells[TAIL_MESSAGES], self._floor_messages)
        return end - tail <= self.size and (waiting + count <= self.identity.slots or waiting <= 0)

    def _drop_oldest(self) -> None:
        """Drop the oldest block: publish the floor before its bytes are overwritten (invariant 4)."""
        cells = self.cells
        tail = max(cells[TAIL], self._last.begin)
        if tail > self._floor:
            # The reader has moved on, or the ring was begun anew. Look again first: the reader may have released
            # everything, and there is no block at the head.
            self._floor, self._floor_messages = tail, max(cells[TAIL_MESSAGES], self._floor_messages)
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

    def append(self, framed: Framed, consumed: Consumed = NOTHING_STAGED) -> None:
        """Append a block that fits, and commit it together with the framer's cells."""
        last, lines, replies = self._last, framed.lines, framed.replies
        first_seq, count, key_length, recv_ts = framed.stamp
        nbytes = len(lines) + len(replies)
        start, total = self._position_for(nbytes)
        words, begin = self.words, last.begin
        if start != last.head:
            if self._is_empty():
                begin = start
            else:
                words[BLOCKS // 8 + last.head % self.size // 8] = SKIP
        at = BLOCKS + start % self.size
        self.mm[at + HEADER : at + HEADER + len(lines)] = lines
        if replies:
            self.mm[at + HEADER + len(lines) : at + HEADER + nbytes] = replies
        header = at // 8
        words[header] = nbytes
        words[header + 1] = first_seq
        words[header + 2] = count
        words[header + 3] = key_length
        words[header + 4] = recv_ts
        words[header + 5] = last.messages + count
        words[header + 6] = len(replies)
        self.commit(RingCommit(start + total, last.messages + count, first_seq + count, recv_ts, *consumed, begin))

    def commit(self, record: RingCommit) -> None:
        """Put `record` in force: fill the spare record, then store the counter. That store is the commit."""
        cells = self.cells
        counter = self._counter + 1
        at = RECORD[counter & 1]
        cells[at] = record.head
        cells[at + 1] = record.messages
        cells[at + 2] = record.next_seq
        cells[at + 3] = record.last_ts
        cells[at + 4] = record.area
        cells[at + 5] = record.consumed
        cells[at + 6] = record.birth
        cells[at + 7] = record.position
        cells[at + 8] = record.begin
        fence()
        cells[COUNTER] = counter
        self._counter = counter
        self._last = record
        fence()
        if asleep := cells[READER_SLEEPS]:
            self.reader_bell.ring(asleep)

    def wait_for_room(self, nbytes: int, count: int, check: Callable[[], None]) -> None:
        """Return when a block of this size fits. While it does not, call `check` now and then."""
        if not self.has_room(nbytes, count):
            while not self.wait_room(nbytes, count):
                check()

    def wait_room(self, nbytes: int, count: int) -> bool:
        """Sleep until the reader releases something, at most WAIT_S; return True if the block fits now."""
        self.cells[WRITER_SLEEPS] = time.monotonic_ns()
        fence()
        if not self.has_room(nbytes, count):
            self.writer_bell.wait()
        self.cells[WRITER_SLEEPS] = 0
        return self.has_room(nbytes, count)

    def reader_is_gone(self) -> bool:
        """Return True if no process holds the reading end now."""
        return not self._peer.is_held()

    @property
    def pipe_marked(self) -> bool:
        return bool(self.cells[PIPE_MARKED])

    @pipe_marked.setter
    def pipe_marked(self, marked: bool) -> None:
        self.cells[PIPE_MARKED] = int(marked)

    def first_waiting_seq(self) -> int:
        """Return the seq of the oldest block that the reader has not released; next_seq if it has released all."""
        return first_waiting(self, self.tail, self._last)

    def waiting(self) -> list[Block]:
        """Return the blocks that the reader has not released. They stay valid until this writer appends."""
        blocks, position = [], self.tail
        while position < self._last.head:
            block, position = block_at(self, position, self._last.head)
            if block is not None:
                blocks.append(block)
        return blocks


class RingReader(Ring):
    """The reading end. It never waits for a writer: `attach` returns None until the ring exists and is ours."""

    def __init__(self, instance: str, name: str, fd: int, identity: Identity, who: str, bells: Bells) -> None:
        super().__init__(instance, name)
        self._map(fd, identity, READER, WRITER)
        self._sign(READER, who)
        self._take_bells(bells)
        self.position: int = self.tail
        self.jumped = False
        self._jump_unreported = bool(self.cells[FLOOR] > self.cells[TAIL])  # dropped while there was no reader

    @classmethod
    def attach(cls, instance: str, name: str, identity: Identity, who: str) -> "RingReader | None":
        """Return the ring; None while the writer has not made it, or its bells. Raises BusyError if it has a reader."""
        path = shm_path(instance, name)
        fd = open_existing(path)
        if fd is None:
            return None
        reader = None
        try:
            if read_text(fd, IDENTITY) == identity.text() and os.fstat(fd).st_size == identity.file_bytes:
                RingLock(fd, READER).acquire(f"ring {instance}.{name} (reader)", read_text(fd, READER))
                cls._check_namespace(fd, path)
                bells = doorbell.find(read_text(fd, BELLS))
                if bells is not None and is_same_file(fd, path):  # else it was replaced between the two looks
                    reader = cls(instance, name, fd, identity, who, bells)
            return reader
        finally:
            if reader is None:
                os.close(fd)

    @staticmethod
    def _check_namespace(fd: int, path: str) -> None:
        """Raise ConfigError if the writer lives in another IPC namespace, so that neither could ever wake the other."""
        if doorbell.other_namespace(read_text(fd, BELLS)) and RingLock(fd, WRITER).is_held():
            time.sleep(LOOK_S)  # a writer that has just begun in our namespace says so after it has the lock
            if other := doorbell.other_namespace(read_text(fd, BELLS)):
                raise ConfigError(
                    f"{path}: its doorbells are in another IPC namespace (ipc:[{other}]); all stages of a broker share"
                    " one: the containers of a pod do, those of docker and podman with --ipc=container:<the first>"
                )

    def take(self, most: int = sys.maxsize) -> list[Block]:
        """Return the blocks committed since the last call, the oldest first: all, or about `most` bytes of them.

        Under drop_oldest the list may begin later than the last list ended; `jumped` tells that the blocks between were
        dropped.
        """
        record = self.committed()
        head = record.head
        blocks: list[Block] = []
        jumped = self._jump_unreported
        while self.position < head and most > 0:
            if self.drops and self.cells[FLOOR] > self.position:
                if blocks:
                    break  # a gap begins a list of its own
                self.position = self.cells[FLOOR]
                jumped = True
                continue
            if self.position < record.begin:
                self.position = record.begin
                continue
            block, self.position = block_at(self, self.position, head)
            if block is not None:
                blocks.append(block)
                most -= len(block.data)
        self.jumped = jumped and bool(blocks)
        self._jump_unreported = jumped and not blocks
        return blocks

    def release(self, block: Block) -> None:
        """Free all blocks up to `block`, which are durable (invariant 3)."""
        cells = self.cells
        cells[TAIL_MESSAGES] = block.messages
        cells[TAIL] = block.end
        fence()
        if asleep := cells[WRITER_SLEEPS]:
            self.writer_bell.ring(asleep)

    def wait(self, is_news: Callable[[], bool] = lambda: False) -> None:
        """Sleep until the writer appends a block, or rings because `is_news` became true; at most WAIT_S."""
        self.cells[READER_SLEEPS] = time.monotonic_ns()
        fence()
        if self.committed().head <= self.position and not is_news():
            self.reader_bell.wait()
        self.cells[READER_SLEEPS] = 0

    def set_synced(self, seq: int) -> None:
        """Tell the framer that all records up to `seq` are on disk; for durability only."""
        self.cells[SYNCED] = seq + 1

    @property
    def sync_failed(self) -> bool:
        return bool(self.cells[SYNC_FAILED])

    @sync_failed.setter
    def sync_failed(self, failed: bool) -> None:
        self.cells[SYNC_FAILED] = int(failed)

    def first_waiting_seq(self) -> int:
        """Return the seq of the oldest block not yet taken; next_seq if all are taken."""
        return first_waiting(self, max(self.position, self.tail), self.committed())

    def writer_is_gone(self) -> bool:
        """Return True if no process holds the writing end now; for draining."""
        return not self._peer.is_held()

    def may_write_again(self) -> bool:
        """Return True if the writer is gone: a living writer makes the copy itself, or would keep writing meanwhile."""
        return self.writer_is_gone()


class RingObserver(Ring):
    """A third process that reads the blocks that the reader has not released, under `block`. It holds no lock."""

    @classmethod
    def find(cls, instance: str, name: str, identity: Identity) -> "RingObserver | None":
        """Return the ring, observed from its tail on; None while no ring has this identity, or it has no bells."""
        path = shm_path(instance, name)
        fd = open_existing(path)
        if fd is None:
            return None
        bells = None
        if read_text(fd, IDENTITY) == identity.text() and os.fstat(fd).st_size == identity.file_bytes:
            bells = doorbell.find(read_text(fd, BELLS))
        if bells is None or not is_same_file(fd, path):
            os.close(fd)
            return None
        ring = cls(instance, name)
        ring._map(fd, identity, WRITER, READER)
        ring._take_bells(bells)
        ring.position = ring.tail
        return ring

    position: int

    def close(self) -> None:
        with suppress(
            BufferError
        ):  # a connection that breaks while a block is sent has a view of it until it has ended
            super().close()

    def take(self) -> list[tuple[int, Block]]:
        """Return the blocks that were committed since the last call, each with its position. See `has`.

        If the reader has released blocks meanwhile, the list begins later than the last one ended.
        """
        record = self.committed()
        found: list[tuple[int, Block]] = []
        while self.position < record.head:
            self.position = max(self.position, self.tail)
            if self.position >= record.head:
                break
            at = self.position
            try:
                block, end = block_at(self, at, record.head)
            except CorruptError:
                if not self.has(at):  # overwritten while we looked
                    continue
                raise
            if not self.has(at):
                continue
            self.position = end
            if block is not None:
                found.append((at, block))
        return found

    def has(self, position: int) -> bool:
        """Return True if the reader has not released the block there: so bytes read before this call are valid."""
        fence()
        return bool(self.cells[TAIL] <= position)


def block_at(ring: Ring, position: int, head: int) -> tuple[Block | None, int]:
    """Return (block at `position`, position of the next block); None for a skip, or for a block just dropped."""
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
