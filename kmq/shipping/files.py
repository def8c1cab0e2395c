"""A file that `kmq ship` follows, as `tail -F` does. It is known by its identity and read in blocks of whole lines.

    a file with the lines `one`, `two` and an unfinished `thr`  →  FileBlock([b"one", b"two"]); `thr` waits

Identity    Device and inode, and a mark: a checksum of the first and the last 1,024 bytes that were read, because
            inodes are reused. A reboot may change the device number: then inode and mark, or inode and name, identify
            the file. The name may change: a renamed file is read to its end before the new file of its old name.
Unread      If nothing of a file was sent yet, `head` keeps a checksum of its first bytes, so that it can be found
again.
Truncated   A file that is shorter than what was read, or has another mark, has new content and is read from its start.
            So is a file that got the inode of a deleted one. Marks are compared when size or modification time changed.
            A writer without O_APPEND continues at its old offset: NUL bytes at the start of new content are skipped and
            counted.
Compressed  A file whose first bytes are those of gzip, xz, zstd, bzip2, lz4 or compress has no lines.
Invariant   `offset` is always 0 or just after a newline, except after a renamed file that ended without a newline, and
            after skipped NUL bytes. An unfinished line waits for its newline; in a renamed file for LINGER_S
            (finding.py).
Memory      One block at a time, of at most _BLOCK bytes or one longest line. Of a line that is too long, its first
bytes.
Not covered New content with the same first and last 1,024 bytes up to the offset.
"""

import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from kmq.config.values import KIB, MIB

_BLOCK = MIB
_BLOCK_LINES = 25_000
_SCAN_BLOCKS = 64  # read in one call while looking for the end of a line that is too long
_MARK = (
    KIB  # bytes at the start, and before the end of what was read, that a mark covers; of a first line, in older states
)
_COMPRESSED = re.compile(  # gzip, xz, zstd, bzip2, lz4 (new and old), compress
    rb"\x1f\x8b\x08|\xfd7zXZ\0|\x28\xb5\x2f\xfd|BZh[1-9](?:1AY&SY|\x17rE8P\x90)|\x04\x22\x4d\x18|\x02\x21\x4c\x18|\x1f\x9d"
)
_CLOCK_NS = 2_000_000_000  # two changes within this time may have the same modification time


class FileBlock(NamedTuple):
    """Whole lines of a file, without their newlines. `length` is set if the block is the start of one line that is
    too long.
    """

    lines: list[bytes]
    length: int | None = None


@dataclass(slots=True, eq=False)
class LogFile:
    """A file and how much of it is stored. The bytes from `offset` to `end` are sent but not acknowledged: `lines`
    lines.
    """

    path: str
    device: int
    inode: int
    offset: int = 0
    end: int = 0
    lines: int = 0
    mark: int | None = None  # of the bytes before `end`; None if unknown
    first_line: int | None = None  # checksum of the first line, in place of a mark, from a state of an earlier release
    size: int = 0  # at the last look
    has_more: bool = True  # there may be a whole line to read, or new content
    fd: int = -1
    gone_at: float | None = None  # time since which no pattern matches it
    was: str = ""  # its name before it was renamed or lost that name
    origin: str = ""  # its name when it was found; of files with the same origin the older is read first
    born: int = 0  # the number of files that were found before it
    grown_at: float = 0.0
    real: str = ""  # its location: the target of a link, or where it was renamed to
    parents: tuple[int, ...] = ()  # inodes of the directories above `real`, the nearest first
    head: tuple[int, int] | None = None  # (length, checksum) of its first bytes, of a file of which nothing was sent
    verified: int = 0  # its size when its content was last found unchanged
    is_stale: bool = False  # it has new content, which was not read from its start yet
    is_compressed: bool = False
    is_deleted: bool = False  # it has no name any more, only its descriptor leads to it
    is_seen: bool = False  # it was seen since the state was read
    search_at: float = 0.0  # earliest time of the next search, for a file that was not found
    skipped: int = 0  # NUL bytes skipped and not yet reported
    _is_new: bool = False  # its content is new: NUL bytes at its start are no line
    _changed_at: int = -1  # modification time in ns at the last look; -1: a later change may have the same time
    _scanned: int = 0  # between `offset` and here there is no newline, or nothing but NUL

    def open(self, path: str) -> bool:
        """Open the file at `path`. Return False if another file is there now. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        found = os.fstat(fd)
        is_it = found.st_ino == self.inode
        if is_it and path not in (self.path, self.real):
            is_it = found.st_dev == self.device if self.is_unknown else self._fits(fd, found.st_size)
        if not is_it:
            os.close(fd)
            return False
        self.fd, self.device = fd, found.st_dev
        self.note_head()
        return True

    def is_at(self, path: str) -> bool:
        """Return True if the file at `path` begins with the bytes that were read of this file. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return self._fits(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    @property
    def is_unknown(self) -> bool:
        """Return True if nothing is known of the file's content."""
        return self.mark is None and self.first_line is None and self.head is None

    def note_head(self) -> None:
        """Keep a checksum of the file's first bytes, as long as nothing of it was sent."""
        if self.end or self.is_stale or (self.head and self.head[0] >= _MARK):
            return
        data = os.pread(self.fd, _MARK, 0)
        if data and self._fits(self.fd, len(data)):
            self.head = len(data), crc32(data)
            self.is_compressed = bool(_COMPRESSED.match(data))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def unread(self) -> int:
        """Return how many bytes were not sent yet."""
        if self.is_compressed:
            return 0
        return self.size if self.is_stale else max(0, self.size - max(self.offset, self.end))

    def see(self, found: os.stat_result) -> int:
        """Note the size of the file, and whether it may have changed. Return how many unread bytes were cut off."""
        self.is_seen = True
        if found.st_size != self.size:
            self.grown_at = time.monotonic()
        if found.st_size < self.size:
            self._scanned = 0
        if (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
            self.size, self._changed_at, self.has_more = found.st_size, found.st_mtime_ns, True
        elif self.verified == self.size:
            return 0
        return self.verify() if self.fd >= 0 else 0

    def verify(self) -> int:
        """Check whether the open file has new content. Return how many bytes of the old content were not read."""
        read, before = max(self.offset, self.end), self.verified
        self.verified = self.size
        if self.is_stale:
            return max(0, before - self.size)  # cut off once more
        if self._fits(self.fd, self.size):
            self.note_head()
            return 0 if self.is_compressed else max(0, before - max(read, self.size))
        self.is_stale = True
        return 0 if self.is_compressed else max(0, before - read)

    def rest(self) -> None:
        """Mark the file as read until it changes."""
        self.has_more = False
        if time.time_ns() - self._changed_at < _CLOCK_NS:
            self._changed_at = -1

    def is_replaced(self) -> bool:
        """Return True if the content of the open file differs from what was read of it."""
        return self.is_stale or not self._fits(self.fd, self.size)

    def _fits(self, fd: int, size: int) -> bool:
        """Return True if an open file begins with the bytes that were read of this file."""
        if self.mark is None and self.first_line is not None:
            return size >= self.end and self.first_line == crc32(os.pread(fd, _MARK, 0).partition(b"\n")[0])
        if self.head is not None and not self.end:
            count, crc = self.head
            return size >= count and crc32(os.pread(fd, count, 0)) == crc
        return size >= self.end and self.mark in (None, _mark(*_ends(fd, self.end)))

    def restart(self) -> None:
        """Read from the start again: the content is new, and was never renamed."""
        self.offset = self.end = self.lines = self._scanned = 0
        self.mark, self.first_line, self.head, self.has_more = None, None, None, True
        self.is_stale, self.is_compressed, self._is_new = False, False, True
        if self.gone_at is None:
            self.was = ""
        self.note_head()

    def _advance(self, end: int, lines: int, mark: int | None = None) -> None:
        """Note that `lines` lines, up to `end`, are being sent. `mark`: of the bytes that were read, if known."""
        if mark is None and self.fd >= 0:
            mark = _mark(*_ends(self.fd, end))
        self.end, self.lines, self.mark = end, lines, mark

    def read(self, longest: int, is_final: bool) -> FileBlock | None:
        """Return the next whole lines, or None.

        `longest`: a line of up to this many bytes is sent whole. `is_final`: a last line without a newline will not get
        one.
        """
        if not self.offset and not self._skip_nuls():
            return None
        room = max(_BLOCK, longest + 1)
        data = os.pread(self.fd, _BLOCK, self.offset)
        if b"\n" not in data and len(data) == _BLOCK < room:
            data = os.pread(self.fd, room, self.offset)
        first, last = _ends(self.fd, self.offset)
        if self.mark not in (None, _mark(first, last)):
            return None  # cut off and rewritten just now: the data may be of the old or the new content
        cut = data.rfind(b"\n")
        if cut < 0:
            if len(data) == room:
                return self._read_long(data[:longest], is_final)
            self._scanned = 0
            if is_final and data:
                self._advance(self.offset + len(data), 1)
                return FileBlock([data])
            self.rest()
            return None
        self._scanned = 0
        lines = data[:cut].split(b"\n", _BLOCK_LINES)
        if len(lines) > _BLOCK_LINES:
            cut -= len(lines.pop()) + 1
        # The mark is made from `data`, not read again: a file that is cut off just now would get the mark of its new
        # content.
        start, end = data[: cut + 1][:_MARK], data[max(0, cut + 1 - _MARK) : cut + 1]
        self._advance(self.offset + cut + 1, len(lines), _mark((first + start)[:_MARK], (last + end)[-_MARK:]))
        return FileBlock(lines)

    def _skip_nuls(self) -> bool:
        """Skip NUL bytes at the start of new content. Return False if there is nothing else yet.

        A hole at the start also means a writer without O_APPEND, whose file was cut off before this process saw it.
        """
        if os.pread(self.fd, 1, 0) != b"\0":
            return True
        at = 0
        with contextlib.suppress(OSError):  # the file is only a hole, or the file system has no holes
            at = os.lseek(self.fd, 0, os.SEEK_DATA)
        if not at and not self._is_new:
            return True
        at = max(at, self._scanned)
        for _ in range(_SCAN_BLOCKS):
            data = os.pread(self.fd, _BLOCK, at)
            at += len(data) - len(data.lstrip(b"\0"))
            if data.strip(b"\0"):
                self._advance(at, 0)
                self.offset, self._scanned, self._is_new = at, 0, False
                self.skipped += at
                return True
            self._scanned = at
            if len(data) < _BLOCK:
                self.rest()
                break
        return False

    def _read_long(self, start: bytes, is_final: bool) -> FileBlock | None:
        """Find the end of a line that is longer than a block."""
        at = max(self._scanned, self.offset + len(start))
        for _ in range(_SCAN_BLOCKS):
            data = os.pread(self.fd, _BLOCK, at)
            if (found := data.find(b"\n")) >= 0:
                self._scanned = 0
                self._advance(at + found + 1, 1)
                return FileBlock([start], at + found - self.offset)
            at = self._scanned = at + len(data)
            if len(data) < _BLOCK:
                if is_final:
                    self._advance(at, 1)
                    return FileBlock([start], at - self.offset)
                self.rest()
                break
        return None

    def start_at_end(self) -> None:
        """Begin after the file's last newline, or at the start if it has no newline."""
        at = os.fstat(self.fd).st_size
        while at:
            start = max(0, at - _BLOCK)
            found = os.pread(self.fd, at - start, start).rfind(b"\n")
            if found >= 0:
                self.offset = start + found + 1
                return self._advance(self.offset, 0)
            at = start

    def take_back(self, count: int) -> None:
        """Note that only the first `count` of the lines that were sent are stored."""
        if count < self.lines:
            end, left = self.offset, count
            while left and (data := os.pread(self.fd, _BLOCK, end) if self.fd >= 0 else b""):
                lines = data.split(b"\n", left)
                end += len(data) - len(lines[-1]) if len(lines) > left else len(data)
                left -= len(lines) - 1
            self._advance(end, 0)
        self.offset, self.lines = self.end, 0


def _ends(fd: int, end: int) -> tuple[bytes, bytes]:
    """Return the first and the last bytes before `end`, which a mark covers."""
    count = min(end, _MARK)
    return os.pread(fd, count, 0), os.pread(fd, count, end - count)


def _mark(first: bytes, last: bytes) -> int:
    return crc32(first + last)
