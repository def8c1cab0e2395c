"""Objects that were fetched in: old records of partitions, as segments with an index, on the disk of the broker.

    data/tier/cache/orders/130/3/1000/log        the lines of the row 1000…1511 of orders/3, byte for byte
    data/tier/cache/orders/130/3/1000/log.idx    made here, so that crcs, lookups, sendfile and damage work as they do

Owner       the gateway. Readers open what is there (kmq/log/segment_reader.py), and note each use in the mtime of the
            directory.
Invariant   An object gets its name when it is whole: size, sha256, number of records and last line are those of its row.
            The cache holds at most KMQ_TIER_CACHE bytes. The least recently used object goes first; one that was fetched
            in for a reader stays until it was read, or for 30 s. At most half of the bytes are of such objects, so that
            readers who wait never push one another out: the others wait their turn.
Crash       A directory `.making-…` is left; the next start removes it. Nothing is synced: what a power cut harms fails its
            crc, is removed, and is fetched in once more.
Disk        Counts for KMQ_DATA_QUOTA, and gives way first: while the disk lacks room nothing stays but what is waited for.
Memory      A piece and a member of an object, for each thread; some hundred bytes an object.
"""

import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

from kmq.errors import CorruptError
from kmq.files import FULL, give_up
from kmq.log import identity, rows
from kmq.log.index import IndexWriter
from kmq.log.rows import TierRow, full_key
from kmq.log.segment import last_line
from kmq.message import record
from kmq.tier import objects
from kmq.tier.objects import CheckedPieces, ObjectError
from kmq.tier.store import MissingError, Store, StoreError, get

_MAKING = ".making-"
_UNREAD_S = 30.0  # so long an object stays that nobody has read
_POLL_S = 0.1


class ClosedError(CorruptError):
    """The gateway stops."""


class TierCache:
    """The objects of one data directory that are here. Several threads may fetch in."""

    def __init__(self, data: str, store: Store, most_bytes: int) -> None:
        self._data, self._store, self._most = data, store, most_bytes
        self._root = f"{data}/{rows.CACHE}"
        self._lineage = identity.lineage(data)
        self._sizes: dict[str, int] = {}  # by directory
        self._fetched: dict[str, tuple[float, int]] = {}  # when (monotonic), and the mtime that a use changes
        self._coming: dict[str, int] = {}  # bytes of objects that have room and are not here yet
        self._lock = threading.Lock()  # of room
        self.is_closed = False
        self.waits = 0  # objects that had to wait for room
        self.full_at: float | None = None  # monotonic: when an object last had no room
        self._find()

    @property
    def nbytes(self) -> int:
        return sum([*self._sizes.values()])

    def _find(self) -> None:
        for directory, inner, names in os.walk(self._root):
            for name in [name for name in inner if name.startswith(_MAKING)]:
                shutil.rmtree(f"{directory}/{name}", ignore_errors=True)
                inner.remove(name)
            if "log" in names:
                with suppress(FileNotFoundError):  # it was damaged, and a reader has just removed it
                    self._sizes[directory] = sum(os.path.getsize(f"{directory}/{name}") for name in names)

    def fetch(self, directory: str, life: int, row: TierRow) -> None:
        """Fetch the object of a row in; wait while readers have not read what they waited for.

        `directory`: of the partition. Raises StoreError; ObjectError if the object is not what its row says.
        """
        path = os.path.dirname(rows.cached_path(directory, life, row))
        if os.path.exists(f"{path}/log"):
            return
        is_waiting = False
        while not self._reserve(path, row.nbytes):
            if self.is_closed:
                raise ClosedError("the gateway stops")
            self.waits += not is_waiting
            is_waiting, self.full_at = True, time.monotonic()
            time.sleep(_POLL_S)
        making = f"{self._root}/{_MAKING}{os.urandom(8).hex()}"
        try:
            os.makedirs(making)
            try:
                self._write(making, row)
            except MissingError:
                self._check_store()
                raise
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(making, path)
        except OSError as err:
            if err.errno in FULL:
                self.give_way()
            raise StoreError(f"{path}: {err.strerror}") from err
        else:
            self._sizes[path] = sum(entry.stat().st_size for entry in os.scandir(path))
            self._fetched[path] = time.monotonic(), os.stat(path).st_mtime_ns
        finally:
            shutil.rmtree(making, ignore_errors=True)
            del self._coming[path]

    def _check_store(self) -> None:
        """Raise StoreError if the store has not even the first commit: it is another store, or it is not mounted."""
        try:
            get(self._store, f"{self._lineage}/commits/{1:020d}")
        except MissingError:
            raise StoreError("the store has no commit of this broker: it is another store, or is not mounted") from None

    def _write(self, making: str, row: TierRow) -> None:
        with open(f"{making}/log", "wb") as file:
            for lines in lines_of(self._store, self._lineage, row):
                if self.is_closed:
                    raise ClosedError("the gateway stops")
                file.write(lines)
        writer = IndexWriter(f"{making}/log.idx", give_up)
        fd = os.open(f"{making}/log", os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer.begin()
            writer.resume(fd, row.nbytes, row.base)
            writer.seal()
        finally:
            os.close(fd)

    # --- room --------------------------------------------------------------------------------------------------------

    def was_read(self, path: str) -> bool:
        """Return True if the object in a directory was read since it was fetched in, or is gone."""
        fetched = self._fetched.get(path)
        try:
            return fetched is None or os.stat(path).st_mtime_ns != fetched[1]
        except FileNotFoundError:
            return True

    def _is_waited_for(self, path: str) -> bool:
        fetched = self._fetched.get(path)
        return fetched is not None and time.monotonic() - fetched[0] < _UNREAD_S and not self.was_read(path)

    def _reserve(self, path: str, nbytes: int) -> bool:
        with self._lock:  # another thread that looks at the same time would find the same room
            if has_room := self.make_room(nbytes):
                self._coming[path] = nbytes
            return has_room

    def make_room(self, nbytes: int) -> bool:
        """Remove the least recently used objects until so many bytes fit. Return False if readers have to read first."""
        waited_for = [path for path in [*self._sizes] if self._is_waited_for(path)]
        coming = sum(self._coming.values())
        wanted = coming + sum(self._sizes.get(path, 0) for path in waited_for)
        if wanted and wanted + nbytes > self._most // 2:
            return False
        for path in sorted({*self._sizes} - {*waited_for}, key=_used_at):
            if self.nbytes + coming + nbytes <= self._most:
                break
            self.remove(path)
        return True

    def give_way(self) -> None:
        """Remove everything that nobody waits for, because the disk lacks room."""
        for path in [*self._sizes]:
            if not self._is_waited_for(path):
                self.remove(path)

    def remove(self, path: str) -> None:
        """Remove the object in a directory; a reader that has it open reads on."""
        remove_object(self._root, path)
        self._sizes.pop(path, None)
        self._fetched.pop(path, None)


def lines_of(store: Store, lineage: str, row: TierRow) -> Iterator[bytes]:
    """Yield the lines of a row's object in pieces. Raises ObjectError, at the latest at the end, if it is another one."""
    key = full_key(lineage, row.key)
    pieces = CheckedPieces(store.get(key), key, row.size, row.sha256)
    nbytes = count = 0
    last = b""
    for lines in objects.unpack(pieces, key):
        nbytes, count, last = nbytes + len(lines), count + record.count_lines(lines), last_line(lines)
        yield lines
    if (nbytes, count, zlib.crc32(last)) != (row.nbytes, row.next - row.base, row.last):
        raise ObjectError(f"{key}: has other records than its commit says")


def remove_object(root: str, path: str) -> None:
    """Remove the object in a directory of the cache at once: a reader finds both files, or none."""
    hidden = f"{root}/{_MAKING}{os.urandom(8).hex()}"
    try:
        os.rename(path, hidden)
    except FileNotFoundError:
        pass
    shutil.rmtree(hidden, ignore_errors=True)


def _used_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
