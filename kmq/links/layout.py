"""A ring in POSIX shared memory: one writer process, one reader process, blocks of whole lines between them.

Links       /dev/shm/<instance>.<name>; doorbells /<instance>.<name>.reader and .writer.
Owners      the writer end and the reader end each belong to one process (ownership.RingLock, a lock on the byte where the header
            begins to name it).

Layout (bytes; every cell is one aligned 8-byte word)

      0  identity    text, written once before the file gets its name: what this ring is (Identity)
   1024  writer      text: who writes
   2048  reader      text: who reads
   4096  cells       see the constants below; every cell has exactly one writer process
   8192  blocks      ring_bytes of them, then, where asked for, the extra bytes (the framer's staging areas)

    a block: 64 bytes of header, its lines, padding to 64. Blocks are contiguous: one that does not fit before the
    end is preceded by a header whose length is SKIP.

Positions are byte counts that only grow; a place is position % ring_bytes. `head` is where the writer goes on, `tail`
where the reader goes on, `floor` (drop_oldest) up to where the writer has thrown away; the effective tail is the larger
of tail and floor.

Invariants
  1  A block is visible only when all its bytes are written: the commit record that covers it comes last.
  2  A commit is one 8-byte store. The record (head, next seq, and the framer's two staging cells) is kept twice; the
     spare is written, then the counter that chooses between them is bumped. A reader takes a record only if the counter
     was the same before and after, so it never acts on a record that a dying writer had not committed.
  3  The reader publishes its tail after its work on what lies before it is durable, so a block is seen at least once.
  4  Under `drop_oldest` the floor is published before the bytes below it are overwritten; the reader copies, then
     re-reads the floor before it trusts its copy. Under `block` nothing between tail and head is ever overwritten, so
     the reader may use the bytes in place.
  5  A ring of another data directory, version, size or policy is never read: the writer recreates it, or refuses
     where that would throw messages away; the reader waits until it matches.

Crash       Writer killed before the counter store: nothing happened; after it: the blocks are there. Reader killed
            anywhere: it sees the blocks from its last published tail again. Nothing else is shared.
Assumed     x86-64 or a machine whose aligned 8-byte stores are atomic; on weaker ordering the fences in doorbell.py
            and around the commit do the rest. Stores go through a memoryview of format "Q": one 8-byte move
            (struct.pack_into with a byte order stores byte by byte and would tear).
"""

import contextlib
import mmap
import os

from kmq.errors import BusyError, ConfigError
from kmq.links.doorbell import Doorbell, fence
from kmq.links.ownership import RingLock, is_same_file
from kmq.settings import SHM

LAYOUT = 2  # version of the layout on this page

IDENTITY, WRITER, READER, TEXT = 0, 1024, 2048, 1024
CELLS, BLOCKS = 4096, 8192
_COPY_BYTES = 1 << 20

# Cells, as word numbers from CELLS. Written by the writer process:
COUNTER = 0  # commits so far; the record in force is RECORD[counter & 1]
RECORD = (8, 16)  # six words: head, messages put in so far, next seq, last recv_ts, staging area, bytes of it consumed
FLOOR, FLOOR_MESSAGES = 24, 25  # thrown away: up to this position, this many messages
WRITER_SLEEPS = 32
BASE_SEQ = 33  # next seq when the ring was created
PIPE_MARKED = 34  # framer only: the FIFO that the staged bytes came from carries fifo.mark
# Written by the reader process:
TAIL, TAIL_MESSAGES = 64, 65  # done: up to this position, this many messages
READER_SLEEPS = 72
SYNCED = 73  # durability only: last seq known to be on disk, plus 1; 0: never said
SYNC_FAILED = 74  # durability only: an fsync has failed; what lies after SYNCED is not to be trusted

# Block header, words: payload bytes, first seq, messages, length of the routing key that all lines share (0: they differ),
# recv_ts in microseconds, messages put in so far with this block, bytes of replies at the end of the payload. The replies are
# what FIFO `acks` gets once the lines are durable; a block may have no lines and only replies. One word is free.
HEADER = 64
ALIGN = 63
SKIP = (1 << 64) - 1


def shm_path(instance: str, name: str) -> str:
    """Where the ring lies."""
    return f"{SHM}/{instance}.{name}"


def block_bytes(nbytes: int) -> int:
    """Bytes a block with `nbytes` of lines takes."""
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


class Commit:
    """One consistent reading of the writer's record."""

    def __init__(self, head: int, messages: int, next_seq: int, last_ts: int, area: int, consumed: int) -> None:
        self.head, self.messages, self.next_seq, self.last_ts = head, messages, next_seq, last_ts
        self.area, self.consumed = area, consumed


class Block:
    """A block as the reader gets it. `data` is valid until release() under `block`, a copy under `drop_oldest`."""

    __slots__ = ("count", "data", "end", "first_seq", "key_length", "messages", "recv_ts", "replies")

    def __init__(self, payload: memoryview | bytes, end: int, header: list[int]) -> None:
        nbytes, self.first_seq, self.count, self.key_length, self.recv_ts, self.messages, replies = header
        self.end = end
        self.data = payload[: nbytes - replies] if replies else payload
        self.replies = bytes(payload[nbytes - replies :]) if replies else b""

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


class Ring:
    """What both ends share: the mapping, the cells, the consistent reading of them."""

    def __init__(self, instance: str, name: str) -> None:
        self.instance, self.name = instance, name
        self.path = shm_path(instance, name)
        self.reader_bell = Doorbell(f"/{instance}.{name}.reader")
        self.writer_bell = Doorbell(f"/{instance}.{name}.writer")

    def _map(self, fd: int, identity: Identity, mine: int, other: int) -> None:
        """`mine` and `other`: where the header names who holds our end, which is locked, and the other one."""
        self._fd = fd
        self.lock, self._peer = RingLock(fd, mine), RingLock(fd, other)
        self.identity = identity
        self.size = identity.ring_bytes
        self.drops = identity.policy == "drop_oldest"
        self.mm = mmap.mmap(fd, identity.file_bytes)
        self.view = memoryview(self.mm)
        self.words = self.view.cast("Q")
        self.cells = self.words[CELLS // 8 : BLOCKS // 8]

    def committed(self) -> Commit:
        """The writer's record in force (invariant 2)."""
        cells = self.cells
        while True:
            counter = cells[COUNTER]
            at = RECORD[counter & 1]
            record = cells[at : at + 6].tolist()
            fence()
            if cells[COUNTER] == counter:
                return Commit(*record)

    @property
    def synced_seq(self) -> int | None:
        """Last seq that durability knows to be on disk, or None where it has not said since the ring was made."""
        value = self.cells[SYNCED]
        return value - 1 if value else None

    @property
    def base_seq(self) -> int:
        """What the next seq was when the ring was made."""
        return self.cells[BASE_SEQ]

    @property
    def tail(self) -> int:
        return max(self.cells[TAIL], self.cells[FLOOR])

    def _sign(self, at: int, who: str) -> None:
        self.mm[at : at + TEXT] = who.encode()[: TEXT - 1].ljust(TEXT, b"\0")

    def is_in_place(self) -> bool:
        """Whether ring and bells are still there under their names: else the other end may be on others, and we never meet."""
        if self._fd < 0:
            return True  # given back
        return is_same_file(self._fd, self.path) and self.reader_bell.is_in_place() and self.writer_bell.is_in_place()

    def write_again(self) -> bool:
        """Somebody has removed the ring's file: make a copy under its name, so that what waits in it is not lost.

        Only where `may_write_again`. The other end may still work on the old one. What durability stores of it meanwhile it
        finds in the copy again, and knows it by the WAL. Whoever calls this uses the ring no more. False where there is
        one by that name already; raises OSError where it cannot be made.
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
        """Give the mapping and this end back; the ring itself stays."""
        for view in (self.cells, self.words, self.view):
            view.release()
        self.mm.close()
        os.close(self._fd)  # and with it the lock
        self._fd = -1


def make_file(path: str, nbytes: int) -> int:
    """A new file in shared memory with all its bytes allocated: a sparse one on a small /dev/shm ends in SIGBUS later."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of one who was killed; it may be the file that has its name by now
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        os.close(fd)
        os.unlink(path)
        raise ConfigError(
            f"{path}: no room in {SHM} for {nbytes} bytes ({err.strerror}); enlarge it or lower RB_BYTES and KMQ_MAX_LINE"
        ) from err
    os.fchmod(fd, 0o660)
    return fd


def give_name(making: str, path: str) -> bool:
    """Let the file that was made, and is whole, have its name; False where another one has it."""
    try:
        os.link(making, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(making)
    return True


def read_text(fd: int, at: int) -> str:
    return os.pread(fd, TEXT, at).rstrip(b"\0").decode(errors="replace")


def field(text: str, name: str) -> str:
    return dict(part.partition("=")[::2] for part in text.split()).get(name, "")


def first_waiting(ring: Ring, position: int, record: Commit) -> int:
    if position < record.head and ring.words[BLOCKS // 8 + position % ring.size // 8] == SKIP:
        position += ring.size - position % ring.size
    return ring.words[BLOCKS // 8 + position % ring.size // 8 + 1] if position < record.head else record.next_seq


def waiting_bytes(fd: int) -> int:
    """Bytes that a ring of other settings still holds: blocks between tail and head, and staged lines not yet framed."""
    raw = os.pread(fd, BLOCKS - CELLS, CELLS)
    if len(raw) < BLOCKS - CELLS:
        return 0
    words = memoryview(raw).cast("Q")
    at = RECORD[words[COUNTER] & 1]
    identity = read_text(fd, IDENTITY)
    ring_bytes, area_bytes = (int(field(identity, name) or 0) for name in ("bytes", "extra"))
    area_bytes //= 2
    staged = os.pread(fd, area_bytes, BLOCKS + ring_bytes + words[at + 4] * area_bytes).rstrip(b"\0")
    return max(0, words[at] - max(words[TAIL], words[FLOOR])) + max(0, len(staged) - words[at + 5])


def make_identity(data_id: str, slots: int, ring_bytes: int, extra: int, policy: str) -> Identity:
    """An Identity with its sizes rounded to what the layout needs."""
    return Identity(data_id, slots, ring_bytes + ALIGN & ~ALIGN, extra, policy)


def is_drained(instance: str, *names: str) -> bool:
    """Whether these rings, where they exist, hold nothing any more."""
    for name in names:
        try:
            fd = os.open(shm_path(instance, name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if waiting_bytes(fd):
                return False
        finally:
            os.close(fd)
    return True


def backlog(instance: str, name: str) -> int:
    """Messages that wait in a ring: a snapshot; 0 where there is no ring."""
    try:
        fd = os.open(shm_path(instance, name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        words = memoryview(os.pread(fd, BLOCKS - CELLS, CELLS)).cast("Q")
        put = words[RECORD[words[COUNTER] & 1] + 1]
        return max(0, put - max(words[TAIL_MESSAGES], words[FLOOR_MESSAGES]))
    finally:
        os.close(fd)


def last_seq(instance: str, name: str, identity: Identity) -> int:
    """The last seq that a ring has been given: a snapshot; 0 where there is no ring, or not this one."""
    try:
        fd = os.open(shm_path(instance, name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        if read_text(fd, IDENTITY) != identity.text() or os.fstat(fd).st_size != identity.file_bytes:
            return 0
        words = memoryview(os.pread(fd, BLOCKS - CELLS, CELLS)).cast("Q")
        return max(0, words[RECORD[words[COUNTER] & 1] + 2] - 1)
    finally:
        os.close(fd)


def remove(instance: str, name: str) -> None:
    """Delete a ring and its bells; only while nobody holds either end."""
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
    for end in ("writer", "reader"):
        Doorbell.remove(f"/{instance}.{name}.{end}")
