"""The files that `kmq ship` follows: they are found by patterns, recognized after a rename, held open and released.

    patterns ["/var/log/*.log"], and logrotate renames app.log to app.log.1
    → one LogFile: path=/var/log/app.log, real=/var/log/app.log.1, read to its end before the new app.log

Place       The name that a pattern finds may be a link, and a rotation renames the file. `real` is where the file lies.
            If it is not there any more, it is searched by its inode: in that directory, in those directly below, in the
            directory of its name, and where a directory above it was renamed to.
Held        Files with unread bytes stay open, even while nothing can be sent, so a rotation that deletes them loses
            nothing. A renamed file is followed under its new name. A deleted file is released when it is read to its
            end and no process has it open for writing (a lease tells), or after LINGER_S if that cannot be told.
Lost        The unread bytes of a file that is deleted or cut off are counted and reported, as far as its size was seen.
            If a file was deleted while no ship ran, its size is the one in the state, and more bytes may be lost.
Inode       A new file may get the inode of a deleted one. At a start, a file that has another place than before, or had
            no name, is the same file only if it begins with what was read. Else the old file is lost, and reported.
Away        A file may be excluded by the patterns but still be in its place, or its directory may be missing or empty,
            as before a volume is mounted. Such a file is not read and not forgotten: it continues at its offset.
Memory      At most MOST_OPEN descriptors: files that are read to their end are closed, and opened again when they grow.
            Deleted files with unread bytes are never closed; other files then wait for a descriptor.
            At most MOST_FILES files, including those that are only remembered because they may return.
Not covered A renamed file of which nothing was read, not even its first bytes, is found only under a name that begins
            like its old name: the inode alone may belong to another file.
"""

import contextlib
import fcntl
import fnmatch
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kmq.shipping.files import LogFile

MOST_OPEN = 256
MOST_FILES = 10_000
LINGER_S = 30.0  # a renamed file is silent this long: its unfinished last line is sent; a deleted one: released
_SEARCH_S = 5.0  # between two searches for a file that was not found
_MOST_FOLDERS = 100  # below a directory, that are searched
_PARENTS = 3  # directories above a file that are known by their inode


@dataclass
class FollowedFiles:
    """The patterns, the files in the order in which they are read, and what was reported about them."""

    patterns: list[str]
    not_these: set[str]  # paths of the state file, which is never a log
    report: Callable[[str], None]
    files: list[LogFile] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # path → why it is not read
    tried: set[str] = field(default_factory=set)  # patterns
    exclude: list[str] = field(default_factory=list)  # patterns of files that are left out
    changes: int = 0  # files that are new, gone, renamed or forgotten
    truncated: int = 0
    lost: int = 0  # bytes that were unread when their file was deleted or cut off
    let_go: int = 0  # deleted files still open for writing that were closed to free a descriptor
    compressed: set[tuple[int, int]] = field(default_factory=set)  # device and inode of files without lines


_Found = dict[tuple[int, int], tuple[str, os.stat_result]]  # device and inode → path and status


def look(watched: FollowedFiles) -> list[LogFile]:
    """Find files that are new, renamed, gone or larger. Return the new ones; they are added to `watched.files` too."""
    found: _Found = {}
    for path, status in _matches(watched):
        found.setdefault((status.st_dev, status.st_ino), (path, status))
    now = time.monotonic()
    places = [_pop_same(found, file) for file in watched.files]
    for file, place in zip(watched.files, places, strict=True):
        here = place or _pop_renumbered(found, file)
        if here is not None:
            if here[0] != file.path:
                file.was, file.grown_at = file.path, now
            elif file.gone_at is not None:
                file.was = ""
            if here[0] != file.path or file.gone_at is not None or not file.parents:
                file.path, file.gone_at = here[0], None
                _note_place(file, os.path.realpath(here[0]))
                watched.changes += 1
            _see(watched, file, here[1])
        elif file.gone_at is None:
            file.gone_at, file.was = now, file.path
            watched.changes += 1
    new: list[LogFile] = []
    born = max((file.born for file in watched.files), default=0) if found else 0
    oldest_first = sorted(found.items(), key=lambda each: each[1][1].st_mtime_ns)
    for (device, inode), (path, status) in oldest_first:
        if len(watched.files) >= MOST_FILES:
            refuse(watched, path, f"is not followed: {MOST_FILES:,} files are already")
            continue
        born += 1
        file = LogFile(path, device, inode, grown_at=now, origin=path, born=born)
        _note_place(file, os.path.realpath(path))
        file.see(status)
        new.append(file)
        watched.files.append(file)
        watched.changes += 1
    return new


def _see(watched: FollowedFiles, file: LogFile, status: os.stat_result) -> None:
    """Note the size of a file. Count and report bytes that were cut off before they were read."""
    read = max(file.offset, file.end) if not file.is_stale else 0
    if cut := file.see(status):
        watched.lost += cut
        watched.report(f"{file.path} was cut off: {cut:,} bytes after byte {read:,} were not read, and are lost")


def _note_place(file: LogFile, real: str) -> None:
    """Note where a file lies, and the inodes of the directories above it."""
    above: list[int] = []
    file.real, folder = real, os.path.dirname(real)
    with contextlib.suppress(OSError):
        while len(above) < _PARENTS and len(folder) > 1:
            above.append(os.stat(folder).st_ino)
            folder = os.path.dirname(folder)
    file.parents = tuple(above)


def _pop_same(found: _Found, file: LogFile) -> tuple[str, os.stat_result] | None:
    """Remove a file's place from `found` and return it. Return None if a new file has the inode of the old one."""
    key = file.device, file.inode
    place = found.get(key)
    was_elsewhere = place and file.fd < 0 and (place[0] not in (file.path, file.real) or file.gone_at is not None)
    if place and was_elsewhere and not file.is_unknown:
        with contextlib.suppress(OSError):  # reported when it is read
            if not file.is_at(place[0]):
                file.inode = 0  # the old file is found nowhere
                return None
    return found.pop(key, None)


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
        elif (status.st_dev, status.st_ino) not in own and not _is_excluded(watched, path):
            yield path, status


def _is_excluded(watched: FollowedFiles, path: str) -> bool:
    """Return True if --exclude matches a path. A pattern with a slash matches whole paths, else the last name."""
    name = os.path.basename(path)
    return any(
        fnmatch.fnmatchcase(path if "/" in each else name, os.path.abspath(each) if "/" in each else each)
        for each in watched.exclude
    )


def _paths(watched: FollowedFiles) -> Iterator[str]:
    """Yield the paths that the patterns match. A pattern that exists as a path, as from a shell, is that path."""
    for pattern in watched.patterns:
        paths = [pattern] if os.path.lexists(pattern) else list(_expand(pattern))
        if not paths and pattern not in watched.tried:
            watched.report(f"no file matches {pattern}")
        watched.tried.add(pattern)
        yield from paths


def _expand(pattern: str) -> Iterator[str]:
    """Yield the matching paths. `**` is a directory at any depth; links to directories are not followed: they may
    loop.
    """
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
    """Return True if a file was renamed or deleted, and was not written to for `linger_s`."""
    return bool(file.was) and time.monotonic() - max(file.grown_at, file.gone_at or 0.0) >= linger_s


def forget_ended(watched: FollowedFiles, linger_s: float = LINGER_S) -> None:
    """Check the files that no pattern matches. Forget a file that is deleted and read, or cannot be found.

    Files that may return are remembered as long as there is room: if they were sent again from the start, lines would
    double.
    """
    remaining = []
    for file in watched.files:
        if file.gone_at is None or file.lines or _is_kept(watched, file, linger_s):
            remaining.append(file)
        else:
            file.close()
            watched.changes += 1
    watched.files[:] = remaining


def _is_kept(watched: FollowedFiles, file: LogFile, linger_s: float) -> bool:
    """Check a file that no pattern matches. Return False if it can have no more lines to send."""
    has_room = len(watched.files) < MOST_FILES
    if _is_in_place(file):  # the patterns of this start exclude it
        file.close()
        file.size, file.has_more, file.was = file.offset, False, file.path
        return has_room
    if not (status := _status_of(watched, file)):
        if is_away(file) and has_room:
            if file.size != file.offset or not file.is_seen:
                what = f"is away with its directory; when it is back, it goes on at byte {file.offset:,}"
                watched.report(f"{file.path} {what}")
            file.size, file.has_more, file.is_seen = file.offset, False, True
            return True
        if file.unread:
            watched.lost += file.unread
            more = "" if file.is_seen else ", and what came after the last look, if anything"
            watched.report(f"{file.path} is gone: {file.unread:,} bytes after byte {file.offset:,} are lost{more}")
        elif not file.is_seen:
            watched.report(f"{file.path} is gone; what came after byte {file.offset:,}, if anything, is not sent")
        return False
    _see(watched, file, status)
    file.is_deleted = not status.st_nlink
    if file.unread or not file.is_deleted:
        return has_room or file.unread > 0
    is_written = has_writer(file.fd)
    return is_written or (is_written is None and not has_ended(file, linger_s))


def has_writer(fd: int) -> bool | None:
    """Return True if a process has a deleted file open for writing; None if that cannot be told."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:  # the file of another user, or a file system without leases
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _status_of(watched: FollowedFiles, file: LogFile) -> os.stat_result | None:
    """Return the status of a file that no pattern matches; None if it is not found."""
    if file.fd >= 0:
        return os.fstat(file.fd)
    with contextlib.suppress(OSError):
        status = os.stat(file.real)
        if status.st_ino == file.inode:
            return status
    if time.monotonic() >= file.search_at and _can_open(watched) and _search(file):
        return os.fstat(file.fd)
    return None


def _search(file: LogFile) -> bool:
    """Search a file by its inode and open it. Return False if it is not found."""
    file.search_at = time.monotonic() + _SEARCH_S
    stem = os.path.basename(file.path).partition(".")[0]
    for folder in _folders(file):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                is_likely = not file.is_unknown or entry.name.startswith(stem)
                if entry.inode() == file.inode and is_likely and entry.is_file() and file.open(entry.path):
                    _note_place(file, entry.path)
                    file.search_at = 0.0
                    return True
    return False


def _folders(file: LogFile) -> Iterator[str]:
    """Yield the directories in which a file that was moved may lie."""
    top = os.path.dirname(file.real or file.path)
    yield top
    if os.path.dirname(file.path) != top:
        yield os.path.dirname(file.path)
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield from folders[:_MOST_FOLDERS]
    folder, below = top, ""
    for inode in file.parents:
        above = os.path.dirname(folder)
        with contextlib.suppress(OSError), os.scandir(above) as entries:
            found = [entry.path for entry in entries if entry.inode() == inode and entry.path != folder]
            yield from (os.path.join(path, below) for path in found)
        folder, below = above, os.path.join(os.path.basename(folder), below)


def _is_in_place(file: LogFile) -> bool:
    """Return True if a file is in its place, or if that cannot be told."""
    try:
        return os.stat(file.path).st_ino == file.inode
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_away(file: LogFile) -> bool:
    """Return True if the directory of a file cannot be read or is empty, as before a volume is mounted."""
    if file.fd >= 0 and not os.fstat(file.fd).st_nlink:
        return False  # deleted: a new file may get its inode
    for folder in {os.path.dirname(file.path), os.path.dirname(file.real or file.path)}:
        try:
            with os.scandir(folder) as entries:
                if next(entries, None) is None:
                    return True
        except OSError:
            return True
    return False


def hold(watched: FollowedFiles) -> None:
    """Open the files with unread bytes, so that they can still be read after they are deleted."""
    free = MOST_OPEN - sum(file.fd >= 0 for file in watched.files)
    for file in watched.files:
        if file.fd >= 0 or not (file.unread or file.lines) or file.path in watched.refused:
            continue
        if file.gone_at is None and free <= 0:
            continue  # a file in its place does not take a descriptor from another file
        free -= 1
        with contextlib.suppress(OSError):  # if the fault stays, it is reported when the file is read
            if _open(watched, file):
                _see(watched, file, os.fstat(file.fd))


def count_unread(watched: FollowedFiles) -> None:
    """Count and report bytes that are lost because this process ends: the unread bytes of deleted files."""
    for file in watched.files:
        left = 0 if file.is_compressed else file.size - file.offset
        if file.fd >= 0 and left > 0 and not os.fstat(file.fd).st_nlink:
            watched.lost += left
            watched.report(f"{file.path} is deleted: {left:,} bytes after byte {file.offset:,} are lost with this end")


def make_ready(watched: FollowedFiles, file: LogFile) -> bool:
    """Open a file and check whether its content is new. Return False if it cannot be read now."""
    try:
        if file.fd < 0 and not _open(watched, file):
            return False
        _see(watched, file, os.fstat(file.fd))
        is_replaced = file.is_replaced()
    except FileNotFoundError:
        return False
    except OSError as err:
        refuse(watched, file.path, f"is not read: {err.strerror}")
        return False
    if is_replaced:
        if file.lines:  # these lines belong to the plan in the state: the broker has at most a part of them
            left = file.end - file.offset
            watched.lost += left
            what = f"up to {left:,} bytes after byte {file.offset:,} were on their way, and are lost"
            watched.report(f"{file.path} was cut off: {what}")
        if file.offset:
            watched.truncated += 1
            what = f"byte {file.offset:,} was next, and what came after the last look, if anything, is lost"
            watched.report(f"{file.path} has new content, so it is read from its start; {what}")
        file.restart()
    if file.is_compressed:
        if len(watched.compressed) < MOST_FILES:
            watched.compressed.add((file.device, file.inode))
        file.rest()
        file.close()
        return False
    return True


def _open(watched: FollowedFiles, file: LogFile) -> bool:
    """Open a file at its place, or where it was renamed to. Return False if it is not found or no descriptor is
    free.
    """
    if not _can_open(watched):
        return False
    if file.gone_at is None:
        return file.open(file.path)
    with contextlib.suppress(FileNotFoundError):
        if file.open(file.real):
            return True
    return _search(file)


def _can_open(watched: FollowedFiles) -> bool:
    """Close a file if too many are open. Return False if closing any of them would lose data."""
    opened = [file for file in watched.files if file.fd >= 0]
    if len(opened) < MOST_OPEN:
        return True
    idle = [file for file in opened if not file.lines and not (file.is_deleted and file.unread)]
    if not idle:
        return False
    least = min(idle, key=lambda file: (file.is_deleted, file.gone_at is not None, file.has_more, file.grown_at))
    if least.is_deleted:
        watched.let_go += 1
        watched.report(f"{least.path} is deleted, and is let go for another file: what is still written to it is lost")
    least.close()
    return True
