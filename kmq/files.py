"""The file operations that KMQ needs, each complete or without effect; watched files; and the limit of open files.

Watch       A file (certificates, tokens) may change while a process runs, or its path may lead to another file.
            Kubernetes swaps a symlink and people write in place: `stat` shows both. Nothing wakes a process when a file
            changes, so a process asks before each use of what it has read from the file.
Limit       A process asks at its start how many files it may have open, and never keeps more open. No code here uses
            select(), so the soft limit is raised to the hard limit. The caller divides it among its connections
            (ingress) or logs (router).
"""

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Sequence

from kmq.errors import ConfigError, RetryError

FULL = (errno.ENOSPC, errno.EDQUOT)
QUARANTINE = "quarantine"  # directory for files that a repair could not heal, or has set aside
_IOV_MAX = 1024  # buffers one writev takes (Linux)
_CHUNK = 1 << 18  # bytes read at once from the end of a file
_DROP_STEP = 4 << 20  # appended bytes after which old pages are dropped from the page cache
_KEEP = 16 << 20  # the end of a file that stays in the page cache, for readers that follow it

Buffer = bytes | memoryview
# Called with the path while the disk is full; returns when a retry may succeed, raises to give up.
WaitForRoom = Callable[[str], None]


def sync_directory(path: str) -> None:
    """Make the names in `path` survive a power cut. Raises OSError naming it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as err:
        raise OSError(err.errno, f"fsync failed: {err.strerror}", path) from err
    finally:
        os.close(fd)


def give_up(path: str) -> None:
    """Raise the error of a full disk instead of waiting for room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def sync_file(path: str) -> None:
    """Make the content of `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def with_room(path: str, wait_for_room: WaitForRoom, action: Callable[[], object]) -> object:
    """Run `action` and return its result; wait for room and repeat it while the disk is full."""
    while True:
        try:
            return action()
        except OSError as err:
            if err.errno not in FULL:
                raise
            wait_for_room(path)


def replace_file(path: str, *content: bytes) -> None:
    """Give `path` new content so that a crash at any instant leaves the old or the new, whole."""
    making = f"{path}.new"
    with open(making, "wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(making, path)
    sync_directory(os.path.dirname(path))


def make_directory(path: str) -> None:
    """Make a directory, and the one above it, if they are missing.

    Further parents are not made: if a data directory was moved or is not mounted, no empty one may appear in its place.
    """
    for each in (os.path.dirname(path), path):
        if not os.path.isdir(each):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each)


def keep_others_out() -> None:
    """Let only owner and group write the files that this process makes, whatever umask it was started with."""
    os.umask(os.umask(0o077) | 0o002)


def set_aside(path: str) -> str:
    """Move the file or directory at `path` into the directory quarantine beside it, and return its new path."""
    directory = f"{os.path.dirname(path)}/{QUARANTINE}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    place = f"{directory}/{os.path.basename(path)}.{time.time_ns()}"
    os.rename(path, place)
    return place


def point_symlink(path: str, target: str) -> str:
    """Make `path` a symlink to `target`; readers see the old one or the new one.

    Anything else at `path` (a backup that follows links leaves a copy) is moved away: returns its new path, or "".
    """
    with contextlib.suppress(OSError):
        if os.readlink(path) == target:
            return ""
    backup = set_aside(path) if os.path.lexists(path) and not os.path.islink(path) else ""
    making = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(making)
    os.symlink(target, making)
    os.rename(making, path)
    return backup


def write_some(fd: int, buffers: Sequence[Buffer]) -> int:
    """Write as much of `buffers` as one call takes, and return the number of bytes."""
    if len(buffers) == 1:
        return os.write(fd, buffers[0])
    return os.writev(fd, buffers[:_IOV_MAX])


class AppendFile:
    """A file that grows by whole appends.

    Invariant   Between calls the file ends where `size` says: an append that the disk had no room for is cut off again,
                then repeated when there is room, so nothing is torn and nothing is lost.
    Memory      A log is written once and read near its end, so all but the last _KEEP bytes are handed to the disk
                early and then dropped from the page cache. Filling memory never touched before costs several times
                as much as the write itself (267 against 1,347 MB/s in one run on a virtual machine), and in
                a container the cache counts against the pod's limit.
    """

    def __init__(self, path: str, wait_for_room: WaitForRoom) -> None:
        self.path = path
        self._wait_for_room = wait_for_room
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = with_room(path, wait_for_room, lambda: os.open(path, flags, 0o644))
        assert isinstance(fd, int)
        self.fd = fd
        self.size = os.fstat(self.fd).st_size
        self._dropped = self.size

    def append(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Append all of `buffers`, `nbytes` in total, waiting for room while the disk is full."""
        while True:
            try:
                written = write_some(self.fd, buffers)
                if written < nbytes:  # a full disk or a signal: writing the rest tells which
                    self._write_rest(b"".join(buffers), written)
                break
            except OSError as err:
                if err.errno not in FULL:
                    with contextlib.suppress(OSError):  # a failing disk may refuse that too; then the next start cuts
                        os.ftruncate(self.fd, self.size)
                    raise RetryError(f"{self.path}: write failed: {err.strerror}") from err
                os.ftruncate(self.fd, self.size)
                self._wait_for_room(self.path)
        self.size += nbytes
        if self.size - self._dropped >= _KEEP + _DROP_STEP:
            self._drop_behind()

    def _drop_behind(self) -> None:
        """Drop old pages from the page cache. Each byte is passed twice: first to write it out, then to drop it."""
        until = self.size - _KEEP
        start = max(0, self._dropped - 2 * _DROP_STEP)
        os.posix_fadvise(self.fd, start, until - start, os.POSIX_FADV_DONTNEED)
        self._dropped = until

    def _write_rest(self, data: bytes, written: int) -> None:
        while written < len(data):
            written += os.write(self.fd, memoryview(data)[written:])

    def sync(self) -> None:
        """Call fdatasync. Raises RetryError if it fails; this descriptor must never be synced again."""
        try:
            os.fdatasync(self.fd)
        except OSError as err:
            raise RetryError(f"{self.path}: fdatasync failed: {err.strerror}") from err

    def moved_under_us(self) -> bool:
        """Return True if another process cut or grew the file."""
        return os.lseek(self.fd, 0, os.SEEK_END) != self.size

    def is_unlinked(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0

    def truncate(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self.size = size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """Close the descriptor, because an unclosed one counts against the limit of open files. Writes nothing."""
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class Tail:
    """What recovery found at the end of a log: `size` is where the good bytes end, `last` the last good line."""

    __slots__ = ("cut", "last", "size")

    def __init__(self, size: int, last: bytes, cut: int) -> None:
        self.size, self.last, self.cut = size, last, cut


def find_tail(fd: int, size: int, is_good: Callable[[bytes], bool], floor: int = 0) -> Tail:
    """Return the end of the last whole, good line of a file, searching back from `size` to `floor` (a line start).

    A torn last line, a run of NULs, and lines that are not good are skipped; `last` is b"" if no good line is left.
    """
    data, start = b"", size
    until = 0  # end of the part of `data` still to be searched; cutting `data` at each bad line would copy it
    while True:
        if until and not data[until - 1]:
            until = len(data[:until].rstrip(b"\0"))
        cut = data.rfind(b"\n", 0, until)
        line_start = data.rfind(b"\n", 0, cut) + 1 if cut >= 0 else 0
        if line_start == 0 and start > floor:  # the line may begin before `data`
            step = min(_CHUNK, start - floor)
            start -= step
            data = os.pread(fd, step, start) + data[:until]
            until = len(data)
            continue
        if cut < 0:
            return Tail(floor, b"", size - floor)
        if is_good(data[line_start:cut]):
            return Tail(start + cut + 1, data[line_start:cut], size - start - cut - 1)
        until = line_start


def before_nuls(fd: int, size: int) -> int:
    """Return where the run of NULs begins that ends at byte `size`; `size` if there is none."""
    while size:
        start = max(0, size - _CHUNK)
        data = os.pread(fd, size - start, start).rstrip(b"\0")
        if data:
            return start + len(data)
        size = start
    return 0


def find_nul(fd: int, start: int, end: int) -> int:
    """Return the position of the first NUL byte in [start, end); -1 if there is none."""
    for at in range(start, end, _CHUNK):
        found = os.pread(fd, min(_CHUNK, end - at), at).find(b"\0")
        if found >= 0:
            return at + found
    return -1


# --- watch -----------------------------------------------------------------------------------------------------------

_LOOK_S = 1.0  # between two looks: the longest time that a change stays unseen


def file_id(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file that `path` leads to now; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Watch:
    """Some files, watched for changes."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self._seen = [_signature(path) for path in self.paths]
        self._due = time.monotonic() + _LOOK_S

    def changed(self) -> bool:
        """Return True if a file has changed since the last True. Read the files after this call, never before."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _LOOK_S
        before, self._seen = self._seen, [_signature(path) for path in self.paths]
        return self._seen != before


def _signature(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


# --- descriptors -----------------------------------------------------------------------------------------------------

OWN = 48  # for FIFOs, rings, listeners, epolls, locks and short-lived files; the rest is for logs or connections
LEAST = 64  # descriptors that a process needs: OWN, and some for its work


def claim(least: int = LEAST) -> int:
    """Raise the limit as far as the system allows, and return it. Raises ConfigError if that is less than `least`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < least:
        raise ConfigError(
            f"the limit on open files is {hard}; it must be at least {least} (ulimit -n, or LimitNOFILE of the unit)"
        )
    return hard


# --- changes of files ------------------------------------------------------------------------------------------------

Signature = tuple[int, ...]
_TICK_NS = 50_000_000  # of the clock of mtimes, at most


def signature(path: str) -> Signature:
    """Return a value that differs once a file or directory has changed, except within one clock tick (`is_settled`)."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def signatures(paths: Sequence[str]) -> Signature:
    """Return one value for several files."""
    return tuple(value for path in paths for value in signature(path))


def is_settled(directory: Signature) -> bool:
    """Return True if the next change of a directory gives it another mtime. Call before reading its list."""
    return time.time_ns() - directory[1] > _TICK_NS
