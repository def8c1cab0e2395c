"""The files that `kmq ship` follows, as `tail -F` does: found by patterns, known by identity, read in blocks of whole lines.

Identity    Device and inode, and a mark: a checksum of the first and the last 1,024 bytes that were read, because inodes
            are used again. Without the number of the device, which a start of the machine may change: inode and mark, or
            inode and name. The name may change: a file that was renamed is read to its end before a new one of its old name.
Truncated   A file that is shorter than what was read, or has another mark, has new content, and is read from its start. So
            is a file that got the inode of a deleted one. Marks are compared when size or time of change are new.
Away        A file that no pattern leads to, but that is in its place, or whose directory is missing or empty, as before a
            volume is mounted, is not read and not forgotten: it goes on at its offset.
Invariant   `offset` always follows a newline, or is 0, but where a renamed file has ended without one. Half a line waits for
            its newline, in a renamed file for LINGER_S.
Memory      One block at a time, of at most _BLOCK bytes or one longest line. Of a line that is too long, its first bytes.
            At most MOST_OPEN descriptors: files that are read to their end are closed, and opened again when they grow.
            At most MOST_FILES files, with those that are only known because they may come back.
Not covered New content with the same first and last 1,024 bytes up to the offset.
            A file that was renamed so that no pattern fits, was idle for LINGER_S, and is renamed back: it is sent again.
            Lines that are unread when their file is deleted, or that copytruncate cuts off. A copy of copytruncate that a
            pattern finds: it is sent from its start, because another file may well begin with the same lines.
"""

import contextlib
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote_to_bytes
from zlib import crc32

from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError, CorruptError
from kmq.files import replace_file

MOST_OPEN = 256
MOST_FILES = 10_000
_BLOCK = MIB
_BLOCK_LINES = 25_000
_SCAN_BLOCKS = 64  # read at once of a line that is too long, while its end is looked for
_MARK = (
    KIB  # bytes at the start, and before the end of what was read, that a mark covers; of a first line, in older states
)
_CLOCK_NS = 2_000_000_000  # a file may change again within this time, and have the same time of change
LINGER_S = 30.0  # how long a file that was renamed or deleted stays open at its end: its writer may still have it


class FileBlock(NamedTuple):
    """Whole lines of a file, without their newlines. `length`: of a single line that is too long for a block."""

    lines: list[bytes]
    length: int | None = None


@dataclass(slots=True, eq=False)
class LogFile:
    """A file, and how much of it is stored. What lies between `offset` and `end` is on its way: `lines` lines."""

    path: str
    device: int
    inode: int
    offset: int = 0
    end: int = 0
    lines: int = 0
    mark: int | None = None  # of what lies before `end`; None: not known
    first_line: int | None = None  # checksum, in place of a mark, from a state of an earlier release
    size: int = 0  # at the last look
    has_more: bool = True  # there may be a whole line to read, or new content
    fd: int = -1
    gone_at: float | None = None  # since when no pattern leads to it
    was: str = ""  # its name before it was renamed: a new file of that name is read after this one
    grown_at: float = 0.0
    _changed_at: int = -1  # time of change at the last look, in ns; -1: it may have changed since, and not have another
    _scanned: int = 0  # up to here there is no newline after `offset`

    def open(self, path: str) -> bool:
        """Open the file at `path`. Returns False if another one is there now. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        found = os.fstat(fd)
        is_it = found.st_ino == self.inode
        if is_it and path != self.path:
            is_unknown = self.mark is None and self.first_line is None
            is_it = found.st_dev == self.device if is_unknown else self._fits(fd, found.st_size)
        if not is_it:
            os.close(fd)
            return False
        self.fd, self.device = fd, found.st_dev
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def unread(self) -> int:
        """Return how many bytes are not on their way yet."""
        return max(0, self.size - max(self.offset, self.end))

    def see(self, found: os.stat_result) -> None:
        """Note the size of the file, and whether it may have changed."""
        if found.st_size != self.size:
            self.grown_at = time.monotonic()
        if found.st_size < self.size:
            self._scanned = 0
        if (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
            self.size, self._changed_at, self.has_more = found.st_size, found.st_mtime_ns, True

    def rest(self) -> None:
        """Note that there is nothing to read until the file changes."""
        self.has_more = False
        if time.time_ns() - self._changed_at < _CLOCK_NS:
            self._changed_at = -1

    def is_replaced(self) -> bool:
        """Return True if the open file has other content than what was read of it."""
        self.see(os.fstat(self.fd))
        return not self._fits(self.fd, self.size)

    def _fits(self, fd: int, size: int) -> bool:
        """Return True if an open file begins with what was read of this one."""
        if self.mark is None and self.first_line is not None:
            return size >= self.end and self.first_line == crc32(os.pread(fd, _MARK, 0).partition(b"\n")[0])
        return size >= self.end and self.mark in (None, _mark(*_ends(fd, self.end)))

    def restart(self) -> None:
        """Read from the start again: the content is new, and was never renamed."""
        self.offset = self.end = self.lines = self._scanned = 0
        self.mark, self.first_line, self.has_more = None, None, True
        if self.gone_at is None:
            self.was = ""

    def _take(self, end: int, lines: int, mark: int | None = None) -> None:
        """Note that `lines` lines, up to `end`, are on their way. `mark`: of what was read, if it is known."""
        if mark is None and self.fd >= 0:
            mark = _mark(*_ends(self.fd, end))
        self.end, self.lines, self.mark = end, lines, mark

    def read(self, longest: int, is_final: bool) -> FileBlock | None:
        """Return the whole lines that come next; None if there are none.

        `longest`: bytes of a line that is sent whole. `is_final`: a line without a newline will not get one.
        """
        room = max(_BLOCK, longest + 1)
        data = os.pread(self.fd, _BLOCK, self.offset)
        if b"\n" not in data and len(data) == _BLOCK < room:
            data = os.pread(self.fd, room, self.offset)
        first, last = _ends(self.fd, self.offset)
        if self.mark not in (None, _mark(first, last)):
            return None  # cut off and written anew just now: what was read may be of either content
        cut = data.rfind(b"\n")
        if cut < 0:
            if len(data) == room:
                return self._read_long(data[:longest], is_final)
            self._scanned = 0
            if is_final and data:
                self._take(self.offset + len(data), 1)
                return FileBlock([data])
            self.rest()
            return None
        self._scanned = 0
        lines = data[:cut].split(b"\n", _BLOCK_LINES)
        if len(lines) > _BLOCK_LINES:
            cut -= len(lines.pop()) + 1
        # Not read again: a file that is cut off just now would have the mark of its new content.
        start, end = data[: cut + 1][:_MARK], data[max(0, cut + 1 - _MARK) : cut + 1]
        self._take(self.offset + cut + 1, len(lines), _mark((first + start)[:_MARK], (last + end)[-_MARK:]))
        return FileBlock(lines)

    def _read_long(self, start: bytes, is_final: bool) -> FileBlock | None:
        """Look for the end of a line that is longer than a block."""
        at = max(self._scanned, self.offset + len(start))
        for _ in range(_SCAN_BLOCKS):
            data = os.pread(self.fd, _BLOCK, at)
            if (found := data.find(b"\n")) >= 0:
                self._scanned = 0
                self._take(at + found + 1, 1)
                return FileBlock([start], at + found - self.offset)
            at = self._scanned = at + len(data)
            if len(data) < _BLOCK:
                if is_final:
                    self._take(at, 1)
                    return FileBlock([start], at - self.offset)
                self.rest()
                break
        return None

    def start_at_end(self) -> None:
        """Begin behind the last newline there is now, or at the start if there is none."""
        at = os.fstat(self.fd).st_size
        while at:
            start = max(0, at - _BLOCK)
            found = os.pread(self.fd, at - start, start).rfind(b"\n")
            if found >= 0:
                self.offset = start + found + 1
                return self._take(self.offset, 0)
            at = start

    def take_back(self, count: int) -> None:
        """Note that only the first `count` of the lines on their way are stored."""
        if count < self.lines:
            end, left = self.offset, count
            while left and (data := os.pread(self.fd, _BLOCK, end) if self.fd >= 0 else b""):
                lines = data.split(b"\n", left)
                end += len(data) - len(lines[-1]) if len(lines) > left else len(data)
                left -= len(lines) - 1
            self._take(end, 0)
        self.offset, self.lines = self.end, 0


def _ends(fd: int, end: int) -> tuple[bytes, bytes]:
    """Return the first and the last bytes before `end`, which a mark covers."""
    count = min(end, _MARK)
    return os.pread(fd, count, 0), os.pread(fd, count, end - count)


def _mark(first: bytes, last: bytes) -> int:
    return crc32(first + last)


# --- finding ---------------------------------------------------------------------------------------------------------


@dataclass
class FollowedFiles:
    """The patterns, the files in the order in which they are read, and what was said of paths and files."""

    patterns: list[str]
    not_these: set[str]  # the state is no log, under any name
    report: Callable[[str], None]
    files: list[LogFile] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # path → why it is not read
    tried: set[str] = field(default_factory=set)  # patterns
    truncated: int = 0
    lost: int = 0  # bytes that were unread when their file was deleted


_Found = dict[tuple[int, int], tuple[str, os.stat_result]]  # device and inode → path and status


def look(watched: FollowedFiles) -> list[LogFile]:
    """Find files that are new, renamed, gone or grown. Returns the new ones, which are among the files already."""
    found: _Found = {}
    for path, status in _matches(watched):
        found.setdefault((status.st_dev, status.st_ino), (path, status))
    now = time.monotonic()
    places = [found.pop((file.device, file.inode), None) for file in watched.files]
    for file, place in zip(watched.files, places, strict=True):
        here = place or _pop_renumbered(found, file)
        if here is not None:
            if here[0] != file.path:
                file.was, file.grown_at = file.path, now
            elif file.gone_at is not None:
                file.was = ""
            file.path, file.gone_at = here[0], None
            file.see(here[1])
        elif file.gone_at is None:
            file.gone_at, file.was = now, file.path
    new = []
    for (device, inode), (path, status) in found.items():
        if len(watched.files) >= MOST_FILES:
            refuse(watched, path, f"is not followed: {MOST_FILES:,} files are already")
            continue
        new.append(LogFile(path, device, inode, grown_at=now))
        new[-1].see(status)
        watched.files.append(new[-1])
    return new


def _pop_renumbered(found: _Found, file: LogFile) -> tuple[str, os.stat_result] | None:
    """Remove from `found` and return the place of a file whose device got another number."""
    for key, (path, _) in found.items():
        if key[1] == file.inode and file.fd < 0:
            with contextlib.suppress(OSError):
                if file.open(path):
                    file.close()
                    return found.pop(key)
    return None


def _matches(watched: FollowedFiles) -> Iterator[tuple[str, os.stat_result]]:
    own = set()
    for path in watched.not_these:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            own.add((status.st_dev, status.st_ino))
    for path in dict.fromkeys(map(os.path.abspath, _paths(watched))):
        try:
            status = os.stat(path)
        except FileNotFoundError:  # removed just now, or a link that leads nowhere
            continue
        except OSError as err:
            refuse(watched, path, f"is not read: {err.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            refuse(watched, path, f"is not read: it is {kind}")
        elif (status.st_dev, status.st_ino) not in own:
            yield path, status


def _paths(watched: FollowedFiles) -> Iterator[str]:
    """Yield what the patterns match. A pattern that exists as a path, as from a shell, is that path."""
    for pattern in watched.patterns:
        paths = [pattern] if os.path.lexists(pattern) else list(_expand(pattern))
        if not paths and pattern not in watched.tried:
            watched.report(f"no file matches {pattern}")
        watched.tried.add(pattern)
        yield from paths


def _expand(pattern: str) -> Iterator[str]:
    """Yield the paths that match. `**` is a directory at any depth; links to directories may have no end."""
    top, *rest = re.split(r"(?<![^/])\*\*(?:/+|$)", pattern, maxsplit=1)
    if not rest:
        yield from glob.iglob(pattern)
        return
    for start in glob.iglob(top) if top else ["."]:
        for folder, folders, _ in os.walk(start):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from _expand(os.path.join(glob.escape(folder), rest[0] or "*"))


def refuse(watched: FollowedFiles, path: str, why: str) -> None:
    """Report once why a path is not read."""
    if watched.refused.get(path) != why and len(watched.refused) < MOST_FILES:
        watched.refused[path] = why
        watched.report(f"{path} {why}")


def has_ended(file: LogFile, linger_s: float = LINGER_S) -> bool:
    """Return True if a file was renamed or deleted, and nobody has written to it for a while."""
    return bool(file.was) and time.monotonic() - max(file.grown_at, file.gone_at or 0.0) >= linger_s


def forget_ended(watched: FollowedFiles, linger_s: float = LINGER_S) -> None:
    """Forget files that no pattern leads to, once they are read to their end, or are found nowhere.

    Those that may come back are known as long as there is room for them: sent again from the start they would be doubled.
    """
    kept = []
    for file in watched.files:
        if file.gone_at is None:
            kept.append(file)
            continue
        is_left_out = _is_in_place(file)
        is_found = is_left_out or make_ready(watched, file)
        if is_found and not is_left_out and (file.size != file.offset or not has_ended(file, linger_s)):
            kept.append(file)
            continue
        if (is_left_out or is_away(file)) and len(watched.files) < MOST_FILES:
            if file.size != file.offset and not is_left_out:
                what = f"is away with its directory; when it is back, it goes on at byte {file.offset:,}"
                watched.report(f"{file.path} {what}")
            file.close()
            file.size, file.has_more = file.offset, False
            kept.append(file)
            continue
        if not is_found and file.size != file.offset:
            watched.lost += file.unread
            watched.report(f"{file.path} is gone; what came after byte {file.offset:,}, if anything, is not sent")
        file.close()
    watched.files[:] = kept


def _is_in_place(file: LogFile) -> bool:
    """Return True if a file is where it was, or that cannot be told."""
    try:
        return os.stat(file.path).st_ino == file.inode
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_away(file: LogFile) -> bool:
    """Return True if the directory of a file cannot be read, or is empty, as if a volume were not mounted yet."""
    if file.fd >= 0 and not os.fstat(file.fd).st_nlink:
        return False  # deleted: a new file may get its inode
    try:
        with os.scandir(os.path.dirname(file.path)) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def make_ready(watched: FollowedFiles, file: LogFile) -> bool:
    """Open a file and find out whether its content is new. Returns False if it cannot be read now."""
    try:
        if file.fd < 0:
            _make_room(watched.files)
            if not _open(file):
                return False
        is_replaced = file.is_replaced()
    except FileNotFoundError:
        return False
    except OSError as err:
        refuse(watched, file.path, f"is not read: {err.strerror}")
        return False
    if is_replaced:
        if file.offset:
            watched.truncated += 1
            watched.report(f"{file.path} has new content, so it is read from its start; byte {file.offset:,} was next")
        file.restart()
    return True


def _open(file: LogFile) -> bool:
    """Open a file where it is, or where it was renamed to in its directory."""
    if file.gone_at is None:
        return file.open(file.path)
    with os.scandir(os.path.dirname(file.path)) as entries:
        for entry in entries:
            if entry.inode() == file.inode and entry.is_file() and file.open(entry.path):
                return True
    return False


def _make_room(files: Iterable[LogFile]) -> None:
    opened = [file for file in files if file.fd >= 0]
    if len(opened) >= MOST_OPEN:
        idle = [file for file in opened if file.gone_at is None and not file.lines]
        min(idle or opened, key=lambda file: (file.has_more, file.grown_at)).close()


# --- state -----------------------------------------------------------------------------------------------------------
#
#     kmq-ship 1 name=ship-3f9a41c2 topic=app next=4711
#     offset=120 end=240 lines=3 mark=9e107d9d file=fd01:1a2b: path=/var/log/app.log
#     crc32=0badcafe
#
# `next` is the id of the first line on its way; the files are in the order in which their lines were sent. Older rows have
# no mark, and a checksum of the first line at the end of `file`.

VERSION = 1


class ShipState(NamedTuple):
    """What a state file says."""

    name: str
    topic: str
    next_id: int
    files: list[LogFile]


def save_state(path: str, state: ShipState) -> None:
    """Replace the state. Raises ConfigError if it cannot be written there."""
    rows = [f"kmq-ship {VERSION} name={state.name} topic={state.topic} next={state.next_id}\n".encode()]
    for file in state.files:
        if file.offset or file.end:
            mark = "" if file.mark is None else f" mark={file.mark:08x}"
            place = f"offset={file.offset} end={file.end} lines={file.lines}{mark}"
            quoted = os.fsencode(file.path).replace(b"%", b"%25").replace(b"\n", b"%0A")
            known = b"" if file.first_line is None else b"%08x" % file.first_line
            rows.append(b"%b file=%x:%x:%b path=%b\n" % (place.encode(), file.device, file.inode, known, quoted))
    text = b"".join(rows)
    replace_file(path, text, b"crc32=%08x\n" % crc32(text))


def load_state(path: str) -> ShipState | None:
    """Read the state; None if there is none. Raises CorruptError if it is damaged, ConfigError for another version."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    if text.startswith(b"kmq-ship ") and not text.startswith(b"kmq-ship %d " % VERSION):
        raise ConfigError(f"--state {path}: its version is not {VERSION}; use the release of KMQ that wrote it")
    body, _, check = text.rpartition(b"crc32=")
    try:
        if check != b"%08x\n" % crc32(body):
            raise ValueError
        head, *rows = body.decode(errors="surrogateescape").split("\n")[:-1]
        fields = dict(part.split("=", 1) for part in head.split()[2:])
        files = [_parse_row(row) for row in rows]
        return ShipState(fields["name"], fields["topic"], int(fields["next"]), files)
    except (ValueError, KeyError):
        raise CorruptError(
            f"--state {path}: damaged, and nothing was sent; restore the file, or remove it, and then"
            " begin at the end of the files, or with --from-start, which sends all of their lines again"
        ) from None


def _parse_row(row: str) -> LogFile:
    place, _, path = row.partition(" path=")
    fields = dict(part.split("=", 1) for part in place.split())
    device, inode, first_line = fields["file"].split(":")
    return LogFile(
        os.fsdecode(unquote_to_bytes(os.fsencode(path))),
        int(device, 16),
        int(inode, 16),
        int(fields["offset"]),
        int(fields["end"]),
        int(fields["lines"]),
        int(fields["mark"], 16) if "mark" in fields else None,
        int(first_line, 16) if first_line else None,
    )
