"""A ring in POSIX shared memory: it passes blocks of whole lines from one writer process to one reader process.

Links       /dev/shm/<instance>.<name>; two doorbells, which the header names (doorbell.py).
Owners      the writer end and the reader end each belong to one process (ownership.RingLock, a lock on the first byte
            of the text in the header that names the process).

Layout (bytes; every cell is one aligned 8-byte word)

      0  identity    text, written once before the file gets its name: what this ring is (Identity)
   1024  writer      text: the process that writes
   2048  reader      text: the process that reads
   3072  bells       text: the doorbells, written by the writer
   4096  cells       see the constants below; every cell has exactly one writer process
   8192  blocks      ring_bytes of them, then, where asked for, the extra bytes (the framer's staging areas)

    a block: 64 bytes of header, its lines, padding to 64. Blocks are contiguous: one that does not fit before the
    end is preceded by a header whose length is SKIP.

Positions are byte counts that only grow; a place is position % ring_bytes. `head` is where the writer continues, `tail`
where the reader continues. `floor` (drop_oldest) is up to where the writer has dropped blocks. `begin` is where the
writer began the ring anew: an empty ring is begun at place 0 again, so that a reader that keeps up works on a few pages
that stay in the cache. Nothing lies between the head of the empty ring and `begin`, so the effective tail is the
largest of tail, floor and begin. So wherever the reader stops, the ring holds ring_bytes, less the gaps at its end and
before the oldest block that are too small for a block.

Invariants
  1  A block is visible only when all its bytes are written: the commit record that covers it comes last.
  2  A commit is one 8-byte store. The record (head, next seq, begin, and up to where the framer has framed) is kept
     twice: the writer fills the spare record, then increments the counter that chooses between the two. A reader
     accepts a record only if the counter was the same before and after, so it never acts on a record that a dying
     writer had not committed.
  3  The reader publishes its tail only after its work on the blocks before that tail is durable, so it sees a block at
     least once.
  4  Under `drop_oldest` the floor is published before the bytes below it are overwritten; the reader copies, then
     re-reads the floor before it trusts its copy. Under `block` nothing between tail and head is ever overwritten, so
     the reader may use the bytes in place.
  5  A ring of another data directory, version, size or policy is never read: the writer recreates it, or refuses to
     start if that would lose messages. The reader waits until the ring matches.

Crash       Writer killed before the counter store: nothing happened; after it: the blocks are there. Reader killed
            anywhere: its next start sees the blocks from the last published tail again. Nothing else is shared.
Assumed     x86-64 or a machine whose aligned 8-byte stores are atomic; on weaker ordering the fences in doorbell.py
            and around the commit do the rest. Stores go through a memoryview of format "Q": one 8-byte move
            (struct.pack_into with a byte order stores byte by byte and would tear).
"""

import contextlib
import mmap
import os
from collections import namedtuple
from collections.abc import Iterator

import posix_ipc

from kmq.config.settings import SHM
from kmq.errors import BusyError, ConfigError
from kmq.links import doorbell
from kmq.links.doorbell import Bells, fence
from kmq.links.ownership import RingLock, field, is_same_file

LAYOUT = 4  # version of the layout on this page
RINGS = ("framed", "durable")  # of blocks, which are counted in messages; each has two bells

IDENTITY, WRITER, READER, BELLS, TEXT = 0, 1024, 2048, 3072, 1024
CELLS, BLOCKS = 4096, 8192
_COPY_BYTES = 1 << 20

# Cells, as word numbers from CELLS. Written by the writer process:
COUNTER = 0  # commits so far; the record in force is RECORD[counter & 1]
# Nine words: head, messages put in so far, next seq, last recv_ts; of the framer also: staging area, bytes of it
# consumed, the birth of `received`, and up to which position the lines there are framed; last: begin.
RECORD = (8, 24)
BEGIN = 8  # its word in the record
FLOOR, FLOOR_MESSAGES = 40, 41  # dropped: up to this position, this many messages
WRITER_SLEEPS = 48
BASE_SEQ = 49  # next seq when the ring was created
PIPE_MARKED = 50  # framer only: the FIFO that the staged bytes came from carries fifo.mark
# Written by the reader process:
TAIL, TAIL_MESSAGES = 64, 65  # done: up to this position, this many messages
READER_SLEEPS = 72
SYNCED = 73  # durability only: last seq known to be on disk, plus 1; 0: not known yet
SYNC_FAILED = 74  # durability only: an fsync has failed, so records after SYNCED may not be on disk

# Block header, words: payload bytes, first seq, messages, length of the routing key that all lines share (0: they
# differ), recv_ts in microseconds, messages put in so far with this block, bytes of replies at the end of the payload.
# The replies go to the FIFO `acks` once the lines are durable; a block may have replies and no lines. One word is free.
HEADER = 64
ALIGN = 63
SKIP = (1 << 64) - 1


def shm_path(instance: str, name: str) -> str:
    """Return the path of the ring."""
    return f"{SHM}/{instance}.{name}"


def block_bytes(nbytes: int) -> int:
    """Return the bytes that a block with `nbytes` of payload takes."""
    return HEADER + (nbytes + ALIGN & ~ALIGN)


class Identity:
    """What a ring is. Two rings are the same ring only if all of this is equal."""

    def __init__(self, data_id: str, slots: int, ring_bytes: int, extra: int, policy: str) -> None:
        self.data_id, self.slots, self.ring_bytes, self.extra, self.policy = data_id, slots, ring_bytes, extra, policy

    def text(self) -> str:
        return (
            f"kmq-ring layout={LAYOUT} data_id={self.data_id} slots={self.slots} bytes={self.ring_bytes}"
            f" extra={self.extra} policy={self.policy}"
        )

    @property
    def file_bytes(self) -> int:
        return BLOCKS + self.ring_bytes + self.extra


class Received(namedtuple("Received", ("birth", "position"))):
    """The position up to which the lines of a ring `received` are framed, and the ring's birth (received.py)."""

    __slots__ = ()


NOTHING_RECEIVED = Received(0, 0)


class Consumed(namedtuple("Consumed", ("area", "offset", "birth", "position"))):
    """How far the framer has framed: the staging area in use, how many of its bytes are done, and Received."""

    __slots__ = ()


NOTHING_STAGED = Consumed(0, 0, 0, 0)  # of a ring without staging areas


class RingCommit:
    """One consistent reading of the writer's record."""

    __slots__ = ("area", "begin", "birth", "consumed", "head", "last_ts", "messages", "next_seq", "position")

    def __init__(
        self,
        head: int,
        messages: int,
        next_seq: int,
        last_ts: int,
        area: int,
        consumed: int,
        birth: int,
        position: int,
        begin: int,
    ) -> None:
        self.head, self.messages, self.next_seq, self.last_ts = head, messages, next_seq, last_ts
        self.area, self.consumed, self.birth, self.position = area, consumed, birth, position
        self.begin = begin

    def consuming(self, consumed: Consumed) -> "RingCommit":
        """Return this record with `consumed` in the framer's cells."""
        return RingCommit(self.head, self.messages, self.next_seq, self.last_ts, *consumed, self.begin)


class Stamp(namedtuple("Stamp", ("first_seq", "count", "key_length", "recv_ts"))):
    """What a block's header says of its lines."""

    __slots__ = ()


class Framed:
    """A block for the writer: numbered lines, their stamp, and the replies to send once the lines are durable."""

    __slots__ = ("consumed", "lines", "received", "replies", "stamp")

    def __init__(
        self,
        lines: bytes | memoryview,
        stamp: Stamp,
        replies: bytes = b"",
        consumed: int = 0,
        received: Received = NOTHING_RECEIVED,
    ) -> None:
        self.lines, self.stamp, self.replies = lines, stamp, replies
        self.consumed, self.received = consumed, received  # done with this block: staged bytes; lines in `received`


class BlockLimits(namedtuple("BlockLimits", ("count", "nbytes"))):
    """The most messages, and the most bytes of lines and replies, that one block may have."""

    __slots__ = ()


class Block:
    """A block for the reader. `data` is valid until `release` under `block`; under `drop_oldest` it is a copy."""

    __slots__ = ("count", "data", "end", "first_seq", "key_length", "messages", "recv_ts", "replies")

    def __init__(self, payload: memoryview | bytes, end: int, header: list[int]) -> None:
        nbytes, self.first_seq, self.count, self.key_length, self.recv_ts, self.messages, replies = header
        self.end = end
        self.data = payload[: nbytes - replies] if replies else payload
        self.replies = bytes(payload[nbytes - replies :]) if replies else b""

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.first_seq, self.count, self.key_length, self.recv_ts)


class SharedFile:
    """One end of a ring as a file: its mapping, its cells, the locks of both ends."""

    def __init__(self, instance: str, name: str) -> None:
        self.instance, self.name = instance, name
        self.path = shm_path(instance, name)

    def _map(self, fd: int, identity: Identity, mine: int, other: int) -> None:
        """`mine` and `other`: where the header names the holder of our end, which is locked, and of the other end."""
        self._fd = fd
        self.lock, self._peer = RingLock(fd, mine), RingLock(fd, other)
        self.identity = identity
        self.size = identity.ring_bytes
        self.drops = identity.policy == "drop_oldest"
        self.mm = mmap.mmap(fd, identity.file_bytes)
        self.view = memoryview(self.mm)
        self.words = self.view.cast("Q")
        self.cells = self.words[CELLS // 8 : BLOCKS // 8]

    def _sign(self, at: int, who: str) -> None:
        self.mm[at : at + TEXT] = who.encode()[: TEXT - 1].ljust(TEXT, b"\0")

    def is_in_place(self) -> bool:
        """Return True if the ring still has its name, by which the other end finds it, or this end is closed."""
        return self._fd < 0 or is_same_file(self._fd, self.path)

    def write_again(self) -> bool:
        """Copy a ring whose file was removed to a new file under its name, so that the waiting blocks are not lost.

        Call only if `may_write_again`, and do not use the ring afterwards. The other end may still work on the removed
        file. Blocks that durability stores meanwhile are in the copy too; it recognizes them by the WAL. Return False
        if the name is taken already. Raises OSError if the copy cannot be made.
        """
        making = f"{self.path}.again"
        fd = make_file(making, len(self.mm))
        try:
            for at in range(0, len(self.view), _COPY_BYTES):
                os.pwrite(fd, self.view[at : at + _COPY_BYTES], at)
            for cell in (TAIL, TAIL_MESSAGES, SYNCED, SYNC_FAILED):  # the reader may be writing them: whole words
                os.pwrite(fd, self.cells[cell : cell + 1], (CELLS // 8 + cell) * 8)
        finally:
            os.close(fd)
        return give_name(making, self.path)

    def close(self) -> None:
        """Give back the mapping and this end; the ring itself stays."""
        for view in (self.cells, self.words, self.view):
            view.release()
        try:
            self.mm.close()
        finally:  # also if a view of it is left: the mapping ends with that view
            os.close(self._fd)  # and with it the lock
            self._fd = -1


class Ring(SharedFile):
    """What both ends share: the file, the bells, the consistent reading of the writer's record."""

    def _take_bells(self, bells: Bells) -> None:
        self.reader_bell, self.writer_bell = self._bells = bells
        self._bells_text = self.mm[BELLS : BELLS + TEXT]

    def committed(self) -> RingCommit:
        """The writer's record in force (invariant 2)."""
        cells = self.cells
        while True:
            counter = cells[COUNTER]
            at = RECORD[counter & 1]
            record = cells[at : at + 9].tolist()
            fence()
            if cells[COUNTER] == counter:
                return RingCommit(*record)

    def wake_reader(self) -> None:
        """Wake the reader if it sleeps, because of something that is not in the ring."""
        fence()
        if asleep := self.cells[READER_SLEEPS]:
            self.reader_bell.ring(asleep)

    @property
    def synced_seq(self) -> int | None:
        """Last seq that durability knows to be on disk; None if it has not reported any since the ring was made."""
        value = self.cells[SYNCED]
        return value - 1 if value else None

    @property
    def base_seq(self) -> int:
        """The next seq at the time when the ring was made."""
        return self.cells[BASE_SEQ]

    @property
    def tail(self) -> int:
        """The position of the first block that the reader has not released."""
        return max(self.cells[TAIL], self.cells[FLOOR], self.committed().begin)

    def is_in_place(self) -> bool:
        """Return True if the ring still has its name, and both ends use the same bells, which exist."""
        if self._fd < 0:
            return True  # closed
        is_ours = self.mm[BELLS : BELLS + TEXT] == self._bells_text
        return is_ours and super().is_in_place() and self._bells.are_in_place()


def open_existing(path: str) -> int | None:
    """Return a descriptor of the ring at `path`; None if there is none."""
    try:
        fd: int = posix_ipc.SharedMemory(path.removeprefix(SHM)).fd
    except posix_ipc.ExistentialError:
        return None
    except posix_ipc.PermissionsError:
        raise ConfigError(f"{path}: belongs to another user; use another KMQ_INSTANCE") from None
    return fd


def make_file(path: str, nbytes: int) -> int:
    """Make a file in shared memory, all its bytes allocated: a sparse file on a full /dev/shm ends in SIGBUS later."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by a killed process; the same file may have its final name already
    fd: int = posix_ipc.SharedMemory(path.removeprefix(SHM), posix_ipc.O_CREX, mode=0o660).fd
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        os.close(fd)
        os.unlink(path)
        raise ConfigError(
            f"{path}: no room in {SHM} for {nbytes} bytes ({err.strerror});"
            " enlarge it or lower RB_BYTES and KMQ_MAX_LINE"
        ) from err
    os.fchmod(fd, 0o660)
    return fd


def give_name(making: str, path: str) -> bool:
    """Give a finished file its name; return False if another file has it."""
    try:
        os.link(making, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(making)
    return True


def read_text(fd: int, at: int) -> str:
    return os.pread(fd, TEXT, at).rstrip(b"\0").decode(errors="replace")


def first_waiting(ring: Ring, position: int, record: RingCommit) -> int:
    position = max(position, record.begin)
    if position < record.head and ring.words[BLOCKS // 8 + position % ring.size // 8] == SKIP:
        position += ring.size - position % ring.size
    return ring.words[BLOCKS // 8 + position % ring.size // 8 + 1] if position < record.head else record.next_seq


def waiting_bytes(fd: int) -> int:
    """Return how many bytes a ring, with any settings, still holds: blocks from tail to head, and staged lines."""
    raw = os.pread(fd, BLOCKS - CELLS, CELLS)
    if len(raw) < BLOCKS - CELLS:
        return 0
    words = memoryview(raw).cast("Q")
    at = RECORD[words[COUNTER] & 1]
    identity = read_text(fd, IDENTITY)
    ring_bytes, area_bytes = (int(field(identity, name) or 0) for name in ("bytes", "extra"))
    area_bytes //= 2
    staged = os.pread(fd, area_bytes, BLOCKS + ring_bytes + words[at + 4] * area_bytes).rstrip(b"\0")
    return _used_bytes(words) + max(0, len(staged) - words[at + 5])


def _used_bytes(cells: "memoryview[int]") -> int:
    """Return how many bytes lie between the effective tail and the head."""
    at = RECORD[cells[COUNTER] & 1]
    return max(0, cells[at] - max(cells[TAIL], cells[FLOOR], cells[at + BEGIN]))


def make_identity(data_id: str, slots: int, ring_bytes: int, extra: int, policy: str) -> Identity:
    """Return an Identity whose sizes are rounded to what the layout needs."""
    return Identity(data_id, slots, ring_bytes + ALIGN & ~ALIGN, extra, policy)


@contextlib.contextmanager
def _existing(instance: str, name: str) -> Iterator[int | None]:
    """Open a ring to look at it; yield None if it does not exist."""
    try:
        fd = os.open(shm_path(instance, name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _cells(fd: int) -> "memoryview[int]":
    return memoryview(os.pread(fd, BLOCKS - CELLS, CELLS)).cast("Q")


def is_drained(instance: str, *names: str) -> bool:
    """Return True if these rings hold nothing, or do not exist."""
    for name in names:
        with _existing(instance, name) as fd:
            if fd is not None and waiting_bytes(fd):
                return False
    return True


def backlog(instance: str, name: str) -> int:
    """Return how many messages wait in a ring now; 0 if there is no ring."""
    messages: int = filling(instance, name).messages
    return messages


class Filling(namedtuple("Filling", ("nbytes", "capacity", "messages", "slots", "is_full"))):
    """How full a ring is: bytes from tail to head, and messages, each with its limit; `slots` 0: only bytes count.
    `is_full`: its writer waits, because the next block does not fit.
    """

    __slots__ = ()


def filling(instance: str, name: str) -> Filling:
    """Return how full a ring is now; all 0 if it does not exist."""
    with _existing(instance, name) as fd:
        if fd is None:
            return Filling(0, 0, 0, 0, False)
        cells, identity = _cells(fd), read_text(fd, IDENTITY)
        put = cells[RECORD[cells[COUNTER] & 1] + 1]
        size, slots = int(field(identity, "bytes") or 0), int(field(identity, "slots") or 0)
        messages = max(0, put - max(cells[TAIL_MESSAGES], cells[FLOOR_MESSAGES]))
        used = _used_bytes(cells)
        return Filling(used, size, messages, slots, used > 0 and cells[WRITER_SLEEPS] > 0)


def last_seq(instance: str, name: str, identity: Identity) -> int:
    """Return the last seq that a ring has been given so far; 0 if there is no ring of this identity."""
    with _existing(instance, name) as fd:
        if fd is None or read_text(fd, IDENTITY) != identity.text() or os.fstat(fd).st_size != identity.file_bytes:
            return 0
        cells = _cells(fd)
        return max(0, cells[RECORD[cells[COUNTER] & 1] + 2] - 1)


def is_held(instance: str, name: str) -> bool:
    """Return True if a process holds an end of this ring."""
    with _existing(instance, name) as fd:
        return fd is not None and any(RingLock(fd, at).is_held() for at in (WRITER, READER))


def remove(instance: str, name: str) -> None:
    """Delete a ring, and the bells that no ring uses any more. Raises BusyError if a process holds one of its ends."""
    path = shm_path(instance, name)
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for at, end in ((WRITER, "writer"), (READER, "reader")):
                if RingLock(fd, at).is_held():
                    raise BusyError(f"ring {instance}.{name} ({end}) is still held by {read_text(fd, at)}")
        finally:
            os.close(fd)
        os.unlink(path)
    for unfinished in (f"{path}.new", f"{path}.again"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
    remove_left_bells(instance)


def remove_left_bells(instance: str) -> int:
    """Remove doorbells of this instance and this user that no ring uses any more; return how many."""

    def read_headers() -> list[str]:
        texts = []
        # A ring gets its final name before it loses its temporary one, so it is seen under one of them.
        for path in (shm_path(instance, name) + suffix for name in RINGS for suffix in (".new", ".again", "")):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                texts.append(read_text(file.fileno(), BELLS))
        return texts

    return doorbell.remove_left(instance, read_headers)
