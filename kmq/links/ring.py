"""A ring in POSIX shared memory: one writer process, one reader process, blocks of whole lines between them.

Links       /dev/shm/<instance>.<name>; doorbells /<instance>.<name>.reader and .writer.
Owners      the writer end and the reader end each belong to one process (ownership.RingLock).

Layout (bytes; every cell is one aligned 8-byte word)

      0  identity    text, written once before the file gets its name: what this ring is (Identity)
   1024  writer      text: who writes
   2048  reader      text: who reads
   4096  cells       see the constants below; every cell has exactly one writer process
   8192  blocks      ring_bytes of them, then, where asked for, the extra bytes (the framer's staging areas)

    a block: 64 bytes of header (BLOCK), its lines, padding to 64. Blocks are contiguous: one that does not fit before the
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
  5  A ring of another data directory, version, size or policy is never read (G9): the writer recreates it, or refuses
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

from kmq.errors import BusyError, ConfigError, CorruptError
from kmq.links.doorbell import Doorbell, fence
from kmq.links.ownership import RingLock

SHM = "/dev/shm"  # where Linux keeps POSIX shared memory
LAYOUT = 1  # version of the layout on this page

_IDENTITY, _WRITER, _READER, _TEXT = 0, 1024, 2048, 1024
_CELLS, BLOCKS = 4096, 8192

# Cells, as word numbers from _CELLS. Written by the writer process:
_COUNTER = 0  # commits so far; the record in force is _RECORD[counter & 1]
_RECORD = (8, 16)  # six words: head, messages put in so far, next seq, last recv_ts, staging area, bytes of it consumed
_FLOOR, _FLOOR_MESSAGES = 24, 25  # thrown away: up to this position, this many messages
_WRITER_SLEEPS = 32
_BASE_SEQ = 33  # next seq when the ring was created
# Written by the reader process:
_TAIL, _TAIL_MESSAGES = 64, 65  # done: up to this position, this many messages
_READER_SLEEPS = 72
_SYNCED = 73  # durability only: last seq known to be on disk, plus 1; 0: never said
_SYNC_FAILED = 74  # durability only: an fsync has failed; what lies after _SYNCED is not to be trusted

# Block header, words: payload bytes, first seq, messages, length of the routing key that all lines share (0: they differ),
# recv_ts in microseconds, messages put in so far with this block. Two words are free for the acknowledged protocol.
_HEADER = 64
_ALIGN = 63
SKIP = (1 << 64) - 1


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

    __slots__ = ("count", "data", "end", "first_seq", "key_length", "messages", "recv_ts")

    def __init__(self, data: memoryview | bytes, end: int, header: list[int]) -> None:
        self.data, self.end = data, end
        _, self.first_seq, self.count, self.key_length, self.recv_ts, self.messages = header

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


class _Ring:
    """What both ends share: the mapping, the cells, the consistent reading of them."""

    def __init__(self, instance: str, name: str) -> None:
        self.instance, self.name = instance, name
        self.path = f"{SHM}/{instance}.{name}"
        self.reader_bell = Doorbell(f"/{instance}.{name}.reader")
        self.writer_bell = Doorbell(f"/{instance}.{name}.writer")

    def _map(self, fd: int, identity: Identity) -> None:
        self.identity = identity
        self.size = identity.ring_bytes
        self.drops = identity.policy == "drop_oldest"
        self.mm = mmap.mmap(fd, identity.file_bytes)
        self.view = memoryview(self.mm)
        self.words = self.view.cast("Q")
        self.cells = self.words[_CELLS // 8 : BLOCKS // 8]

    def committed(self) -> Commit:
        """The writer's record in force (invariant 2)."""
        cells = self.cells
        while True:
            counter = cells[_COUNTER]
            at = _RECORD[counter & 1]
            record = cells[at : at + 6].tolist()
            fence()
            if cells[_COUNTER] == counter:
                return Commit(*record)

    @property
    def synced_seq(self) -> int | None:
        """Last seq that durability knows to be on disk, or None where it has not said since the ring was made."""
        value = self.cells[_SYNCED]
        return value - 1 if value else None

    @property
    def base_seq(self) -> int:
        """What the next seq was when the ring was made."""
        return self.cells[_BASE_SEQ]

    @property
    def tail(self) -> int:
        return max(self.cells[_TAIL], self.cells[_FLOOR])

    def _sign(self, at: int, who: str) -> None:
        self.mm[at : at + _TEXT] = who.encode()[: _TEXT - 1].ljust(_TEXT, b"\0")

    def close(self) -> None:
        """Drop the mapping; the ring itself stays."""
        for view in (self.cells, self.words, self.view):
            view.release()
        self.mm.close()


def _read_text(fd: int, at: int) -> str:
    return os.pread(fd, _TEXT, at).rstrip(b"\0").decode(errors="replace")


def _field(text: str, name: str) -> str:
    return dict(part.partition("=")[::2] for part in text.split()).get(name, "")


class RingWriter(_Ring):
    """The writing end. `open` takes the lock, finds or makes the ring, and leaves it ready to append to."""

    @classmethod
    def open(cls, instance: str, name: str, identity: Identity, who: str, first_seq, log) -> "RingWriter":  # type: ignore[no-untyped-def]
        """`first_seq` is called only where the ring is made anew, for the next seq and the last recv_ts (µs)."""
        self = cls(instance, name)
        self.lock = RingLock(instance, name, "writer")
        self.lock.acquire(f"ring {instance}.{name} (writer)", self._holder(_WRITER))
        fd = self._existing(identity, log)
        self.created = fd < 0
        if self.created:
            fd = self._create(identity, *first_seq())
            log.info("ring_created", ring=name, slots=identity.slots, bytes=identity.ring_bytes, policy=identity.policy)
        self._map(fd, identity)
        os.close(fd)
        self._sign(_WRITER, who)
        self._last = self.committed()
        self._counter = self.cells[_COUNTER]
        self._floor, self._floor_messages = self.cells[_FLOOR], self.cells[_FLOOR_MESSAGES]
        return self

    def _holder(self, at: int) -> str:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError:
            return ""
        try:
            return _read_text(fd, at)
        finally:
            os.close(fd)

    def _existing(self, wanted: Identity, log) -> int:  # type: ignore[no-untyped-def]
        """A descriptor of the ring that is there and is ours, or -1 after removing one that is not (invariant 5)."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        except PermissionError:
            raise ConfigError(f"{self.path}: belongs to another user; use another KMQ_INSTANCE") from None
        found = _read_text(fd, _IDENTITY)
        if found == wanted.text() and os.fstat(fd).st_size == wanted.file_bytes:
            return fd
        reader = RingLock(self.instance, self.name, "reader")
        try:
            reader.acquire(f"ring {self.instance}.{self.name} (reader)", _read_text(fd, _READER))
            ours = _field(found, "data_id") == wanted.data_id and _field(found, "layout") == str(LAYOUT)
            waiting = _waiting(fd)
            if ours and waiting:
                raise ConfigError(
                    f"{self.path} holds {waiting} bytes of messages under other settings ({found});"
                    f" start once with those settings to drain it, or remove the file to give them up"
                )
            log.warn("ring_recreated", ring=self.name, found=found, discarded_bytes=waiting)
            os.unlink(self.path)
        finally:
            reader.release()
            os.close(fd)
        return -1

    def _create(self, identity: Identity, next_seq: int, last_ts: int) -> int:
        """Make the ring under a name of its own and give it its name when it is whole."""
        making = f"{self.path}.new"
        fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o660)
        try:
            os.posix_fallocate(fd, 0, identity.file_bytes)  # a sparse file on a small /dev/shm ends in SIGBUS later
        except OSError as err:
            os.unlink(making)
            raise ConfigError(
                f"{SHM}: no room for {self.name} ({identity.file_bytes} bytes: {err.strerror});"
                " enlarge it or lower RB_BYTES and KMQ_MAX_LINE"
            ) from err
        os.fchmod(fd, 0o660)
        os.pwrite(fd, identity.text().encode(), _IDENTITY)
        cells = mmap.mmap(fd, BLOCKS)
        words = memoryview(cells).cast("Q")
        words[_CELLS // 8 + _RECORD[0] + 2] = next_seq
        words[_CELLS // 8 + _RECORD[0] + 3] = last_ts
        words[_CELLS // 8 + _BASE_SEQ] = next_seq
        words.release()
        cells.close()
        os.rename(making, self.path)
        return fd

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
        return self.size // 2 - _HEADER

    def has_room(self, nbytes: int, count: int) -> bool:
        """Whether a block of this size can be appended now. Under drop_oldest makes room, so always True."""
        place, total = self._place(nbytes)
        while not self._fits(place + total - self._last.head, count):
            if not self.drops:
                return False
            self._drop_oldest()
        return True

    def _place(self, nbytes: int) -> tuple[int, int]:
        """(bytes to skip to reach a contiguous place, bytes the block takes there), both added to head."""
        total = _HEADER + (nbytes + _ALIGN & ~_ALIGN)
        at = self._last.head % self.size
        return (self._last.head + self.size - at if at + total > self.size else self._last.head), total

    def _fits(self, total: int, count: int) -> bool:
        cells = self.cells
        tail = max(cells[_TAIL], self._floor)
        messages = max(cells[_TAIL_MESSAGES], self._floor_messages)
        waiting = self._last.messages - messages
        return self._last.head + total - tail <= self.size and (waiting + count <= self.identity.slots or waiting <= 0)

    def _drop_oldest(self) -> None:
        """Give up the oldest block: publish the floor before its bytes are overwritten (invariant 4)."""
        cells = self.cells
        if cells[_TAIL] > self._floor:
            self._floor, self._floor_messages = cells[_TAIL], cells[_TAIL_MESSAGES]
        at = BLOCKS // 8 + self._floor % self.size // 8
        nbytes = self.words[at]
        if nbytes == SKIP:
            self._floor += self.size - self._floor % self.size
        else:
            self._floor_messages = self.words[at + 5]
            self._floor += _HEADER + (nbytes + _ALIGN & ~_ALIGN)
        cells[_FLOOR_MESSAGES] = self._floor_messages
        cells[_FLOOR] = self._floor
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
    ) -> None:
        """Append a block that has_room said fits, and commit it together with the framer's two staging cells."""
        last = self._last
        start, total = self._place(len(data))
        words = self.words
        if start != last.head:
            words[BLOCKS // 8 + last.head % self.size // 8] = SKIP
        at = BLOCKS + start % self.size
        self.mm[at + _HEADER : at + _HEADER + len(data)] = data
        header = at // 8
        words[header] = len(data)
        words[header + 1] = first_seq
        words[header + 2] = count
        words[header + 3] = key_length
        words[header + 4] = recv_ts
        words[header + 5] = last.messages + count
        self.commit(Commit(start + total, last.messages + count, first_seq + count, recv_ts, area, consumed))

    def commit(self, record: Commit) -> None:
        """Put `record` in force: the spare first, then the counter, which is the instant it happens."""
        cells = self.cells
        counter = self._counter + 1
        at = _RECORD[counter & 1]
        cells[at] = record.head
        cells[at + 1] = record.messages
        cells[at + 2] = record.next_seq
        cells[at + 3] = record.last_ts
        cells[at + 4] = record.area
        cells[at + 5] = record.consumed
        fence()
        cells[_COUNTER] = counter
        self._counter = counter
        self._last = record
        fence()
        if cells[_READER_SLEEPS]:
            self.reader_bell.ring()

    def wait_room(self, nbytes: int, count: int) -> bool:
        """Sleep until the reader frees something (at most WAIT_S); whether the block fits now."""
        self.cells[_WRITER_SLEEPS] = 1
        fence()
        if not self.has_room(nbytes, count):
            self.writer_bell.wait()
        self.cells[_WRITER_SLEEPS] = 0
        return self.has_room(nbytes, count)

    def first_waiting_seq(self) -> int:
        """Seq of the oldest block the reader has not released, or next_seq where there is none."""
        return _first_waiting(self, self.tail, self._last)


def _first_waiting(ring: _Ring, position: int, record: Commit) -> int:
    if position < record.head and ring.words[BLOCKS // 8 + position % ring.size // 8] == SKIP:
        position += ring.size - position % ring.size
    return ring.words[BLOCKS // 8 + position % ring.size // 8 + 1] if position < record.head else record.next_seq


def _waiting(fd: int) -> int:
    """Bytes that a ring of other settings still holds: blocks between tail and head, and staged lines not yet framed."""
    raw = os.pread(fd, BLOCKS - _CELLS, _CELLS)
    if len(raw) < BLOCKS - _CELLS:
        return 0
    words = memoryview(raw).cast("Q")
    at = _RECORD[words[_COUNTER] & 1]
    identity = _read_text(fd, _IDENTITY)
    ring_bytes, area_bytes = (int(_field(identity, name) or 0) for name in ("bytes", "extra"))
    area_bytes //= 2
    staged = os.pread(fd, area_bytes, BLOCKS + ring_bytes + words[at + 4] * area_bytes).rstrip(b"\0")
    return max(0, words[at] - max(words[_TAIL], words[_FLOOR])) + max(0, len(staged) - words[at + 5])


class RingReader(_Ring):
    """The reading end. `attach` waits for nothing: it answers None until the ring is there and is ours."""

    @classmethod
    def attach(cls, instance: str, name: str, identity: Identity, who: str) -> "RingReader | None":
        """The ring, or None while the writer has not made it. Raises BusyError where another process reads it."""
        self = cls(instance, name)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise ConfigError(f"{self.path}: belongs to another user; use another KMQ_INSTANCE") from None
        try:
            if _read_text(fd, _IDENTITY) != identity.text() or os.fstat(fd).st_size != identity.file_bytes:
                return None
            self.lock = RingLock(instance, name, "reader")
            self.lock.acquire(f"ring {instance}.{name} (reader)", _read_text(fd, _READER))
            if not _same_file(fd, self.path):
                self.lock.release()  # recreated between the two looks
                return None
            self._map(fd, identity)
        finally:
            os.close(fd)
        self._sign(_READER, who)
        self.position = self.tail
        self.jumped = False
        return self

    def take(self) -> list[Block]:
        """All blocks committed since the last take, oldest first; [] when there are none.

        Under drop_oldest the list may begin later than the last one ended; `jumped` then says that what lies between was
        dropped.
        """
        head = self.committed().head
        blocks: list[Block] = []
        self.jumped = False
        while self.position < head:
            if self.drops and self.cells[_FLOOR] > self.position:
                if blocks:
                    break  # a gap begins a list of its own
                self.position = self.cells[_FLOOR]
                self.jumped = True
                continue
            block = self._block_at(self.position, head)
            if block is not None:
                blocks.append(block)
        return blocks

    def _block_at(self, position: int, head: int) -> Block | None:
        """The block at `position`, which moves on; None where it was a skip or has just been dropped."""
        at = BLOCKS + position % self.size
        header = self.words[at // 8 : at // 8 + 6].tolist()
        nbytes = header[0]
        if nbytes == SKIP:
            end = position + self.size - position % self.size
        else:
            end = position + _HEADER + (nbytes + _ALIGN & ~_ALIGN)
        damaged = end > head or (nbytes != SKIP and at + end - position > BLOCKS + self.size)
        data: memoryview | bytes = b""
        if not damaged and nbytes != SKIP:
            data = self.view[at + _HEADER : at + _HEADER + nbytes]
            if self.drops:
                data = bytes(data)
        if self.drops:
            fence()
            if self.cells[_FLOOR] > position:
                return None
        if damaged:
            raise CorruptError(f"{self.path}: block header at position {position} runs past the head {head}")
        self.position = end
        return None if nbytes == SKIP else Block(data, end, header)

    def release(self, block: Block) -> None:
        """Everything up to and with `block` is durable: give its room back (invariant 3)."""
        cells = self.cells
        cells[_TAIL_MESSAGES] = block.messages
        cells[_TAIL] = block.end
        fence()
        if cells[_WRITER_SLEEPS]:
            self.writer_bell.ring()

    def wait(self) -> None:
        """Sleep until the writer appends something, at most WAIT_S."""
        self.cells[_READER_SLEEPS] = 1
        fence()
        if self.committed().head <= self.position:
            self.reader_bell.wait()
        self.cells[_READER_SLEEPS] = 0

    def set_synced(self, seq: int) -> None:
        """Durability: `seq` and all before it are on disk."""
        self.cells[_SYNCED] = seq + 1

    @property
    def sync_failed(self) -> bool:
        return bool(self.cells[_SYNC_FAILED])

    @sync_failed.setter
    def sync_failed(self, failed: bool) -> None:
        self.cells[_SYNC_FAILED] = int(failed)

    def first_waiting_seq(self) -> int:
        """Seq of the oldest block not yet taken, or next_seq where there is none."""
        return _first_waiting(self, max(self.position, self.tail), self.committed())

    def writer_is_gone(self) -> bool:
        """Whether no process holds the writing end: a snapshot, for draining."""
        return not RingLock(self.instance, self.name, "writer").is_held()


def _same_file(fd: int, path: str) -> bool:
    try:
        there, here = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def make_identity(data_id: str, slots: int, ring_bytes: int, extra: int, policy: str) -> Identity:
    """An Identity with its sizes rounded to what the layout needs."""
    return Identity(data_id, slots, ring_bytes + _ALIGN & ~_ALIGN, extra, policy)


def is_drained(instance: str, *names: str) -> bool:
    """Whether these rings, where they exist, hold nothing any more."""
    for name in names:
        try:
            fd = os.open(f"{SHM}/{instance}.{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if _waiting(fd):
                return False
        finally:
            os.close(fd)
    return True


def backlog(instance: str, name: str) -> int:
    """Messages that wait in a ring: a snapshot; 0 where there is no ring."""
    try:
        fd = os.open(f"{SHM}/{instance}.{name}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        words = memoryview(os.pread(fd, BLOCKS - _CELLS, _CELLS)).cast("Q")
        put = words[_RECORD[words[_COUNTER] & 1] + 1]
        return max(0, put - max(words[_TAIL_MESSAGES], words[_FLOOR_MESSAGES]))
    finally:
        os.close(fd)


def remove(instance: str, name: str) -> None:
    """Delete a ring, its bells and its locks; only while nobody holds either end."""
    locks = [RingLock(instance, name, end) for end in ("writer", "reader")]
    for lock in locks:
        if lock.is_held():
            raise BusyError(f"{lock.name} is still held")
    for path in (f"{SHM}/{instance}.{name}", f"{SHM}/{instance}.{name}.new"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for lock in locks:
        lock.remove()
        Doorbell.remove(f"/{lock.name}")
