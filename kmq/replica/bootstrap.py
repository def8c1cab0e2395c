"""Bootstrap: copies the leader's files to a follower that the leader's WAL cannot serve, like a backup over the wire.

    follower    got !gone, because its directory is empty or ends before the leader's WAL       → !files got=0
    leader      links its files into bootstrap-<replica id>/, and sends them in pieces          ← !piece name=…
    follower    writes them into bootstrap/, syncs, puts them in place, and fetches the later records

Consistent  The linked files are in a state as after kill -9, from which every start can continue. The files that tell
            how far others are (router.ckpt, producers.ckpt) are linked first, then the queues, the WAL last; of each
            log the index first. All names and inodes are compared afterwards. If retention, a roll, compaction or a
            checkpoint changed one, the leader links again. A growing file is sent up to the length that it had then.
Owner       The process `replica` of either side. The leader's links keep files that retention deletes until they are
            sent.
Invariant   Only an empty directory, or one of the same lineage, is ever replaced. It is changed only once all pieces
            are on disk, and while the stages hold nothing. `id`, `replica`, `register` and the locks are never
            replaced.
Crash       Without bootstrap/whole the directory is unchanged, and the next start removes the pieces. With it the next
            start finishes the replacement before anything else reads the directory. `settle` does both.
Memory      WINDOW pieces of wire.PIECE_BYTES. The follower's disk has the old and the new files at the same time.
"""

import asyncio
import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from kmq.errors import CorruptError, RetryError
from kmq.files import AppendFile, give_up, make_directory, point_symlink, replace_file, sync_directory
from kmq.log import identity, segment
from kmq.replica.wire import PIECE_BYTES, FilesText, Link, PieceText, RefusedText, WireError

T = TypeVar("T")

WINDOW = 8  # pieces in flight
_SILENT_S = 60.0  # longest silence of the follower, which may be syncing; then its links are removed
_TRIES = 50  # attempts to link files of one moment

# A replica's own files (id, replica, register, cut/, cluster/, locks, tokens) are in neither list.
_FILES = (
    *("router.ckpt", "producers.ckpt", "format", "committed", "deletions", "restored"),
    *("dropped.log", "quarantine/log"),
)
_LOGS = ("topics", "append")  # in this order: the WAL has every record that another file refers to
_OF_TOPICS = (
    r"topics/(?:\.deletions|\.restored|[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}/"
    r"(?:topic\.toml|\d{1,4}/(?:tier|\d{20}\.(?:idx|log|log\.kept))))"
)
_KNOWN = re.compile(f"{'|'.join(map(re.escape, _FILES))}|{_OF_TOPICS}" r"|append/\d{20}\.(?:idx|log|log\.kept)")
_CHANGES = ("committed",)  # replaced each second; any version of it is good


async def in_thread(do: Callable[..., T], *arguments: object) -> T:
    """Run a function in a thread. If cancelled, still wait for its end: nobody may touch its files meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(do, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


# --- the leader ------------------------------------------------------------------------------------------------------


class LinkedFile(NamedTuple):
    """A file, and how many of its bytes are sent."""

    name: str
    size: int


def link_files(data: str, place: str) -> list[LinkedFile]:
    """Link the files of one moment into directory `place`, and return them. Raises RetryError if they keep changing."""
    for _ in range(_TRIES):
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place)
        try:
            before = _survey(data)
            found = [_link(data, place, name) for name in before]
            if _survey(data) == before:
                return found
        except FileNotFoundError:  # a file was removed meanwhile
            continue
    raise RetryError(f"KMQ_DATA={data!r}: its files changed {_TRIES} times while they were linked")


def _survey(data: str) -> dict[str, int]:
    """Return the inode of each file to be sent, in the order in which they are linked."""
    found = {name: 0 for name in _FILES if os.path.exists(f"{data}/{name}")}
    for top in _LOGS:
        for directory, _, names in os.walk(f"{data}/{top}"):
            under = os.path.relpath(directory, data)
            for name in sorted(names, key=lambda name: (not name.endswith(".idx"), name)):
                if _KNOWN.fullmatch(f"{under}/{name}"):
                    found[f"{under}/{name}"] = 0
    return {name: 0 if name in _CHANGES else os.stat(f"{data}/{name}").st_ino for name in found}


def _link(data: str, place: str, name: str) -> LinkedFile:
    os.makedirs(os.path.dirname(f"{place}/{name}"), exist_ok=True)
    os.link(f"{data}/{name}", f"{place}/{name}")
    return LinkedFile(name, os.stat(f"{place}/{name}").st_size)


def _pieces(files: list[LinkedFile]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, length) of all pieces."""
    for name, size in files:
        for offset in range(0, size or 1, PIECE_BYTES):
            yield name, offset, min(PIECE_BYTES, size - offset)


def _read(place: str, name: str, offset: int, length: int, left: int) -> PieceText:
    with open(f"{place}/{name}", "rb") as file:
        content = os.pread(file.fileno(), length, offset)
    return PieceText(name, offset, left, zlib.crc32(content), content)


async def send_files(link: Link, data: str) -> int:
    """Send the leader's files to a follower that has asked for them; return how many bytes they have."""
    place = f"{data}/bootstrap-{link.peer.replica}"
    try:
        files = await in_thread(link_files, data, place)
        left = total = sum(1 for _ in _pieces(files))
        got = 0
        for piece in _pieces(files):
            left -= 1
            link.send(await in_thread(_read, place, *piece, left))
            while total - left - got >= WINDOW or (not left and got < total):
                async with asyncio.timeout(_SILENT_S):
                    message = await link.read()
                if not isinstance(message, FilesText) or not got < message.got <= total - left:
                    raise WireError(f"{message!r:.200} came while files were sent")
                got = message.got
        return sum(size for _, size in files)
    finally:
        await in_thread(shutil.rmtree, place, True)


# --- the follower ----------------------------------------------------------------------------------------------------


class Incoming:
    """The directory bootstrap/, filled piece by piece."""

    def __init__(self, data: str) -> None:
        self.path = f"{data}/bootstrap"
        self.nbytes = 0
        self._file: AppendFile | None = None
        shutil.rmtree(self.path, ignore_errors=True)
        os.mkdir(self.path)

    def write(self, piece: PieceText) -> None:
        """Write a piece. Raises WireError if a bootstrap has no such file, or the piece is out of order."""
        path = f"{self.path}/{piece.name}"
        if not _KNOWN.fullmatch(piece.name):
            raise WireError(f"{piece.name}: is no file that a bootstrap brings")
        if not piece.offset:
            self.close()
            if os.path.lexists(path):
                raise WireError(f"{piece.name}: came twice")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._file = AppendFile(path, give_up)
        elif self._file is None or (self._file.path, self._file.size) != (path, piece.offset):
            raise WireError(f"{piece.name}: its byte {piece.offset} does not follow what came before")
        if piece.content:
            self._file.append([bytes(piece.content)], len(piece.content))
        self.nbytes += len(piece.content)

    def close(self) -> None:
        """Sync and close the last file."""
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Mark the bootstrap as whole, once all of it is on disk. Raises WireError if it is no data directory."""
        self.close()
        if identity.version(self.path) is None:
            raise WireError("the leader's files have no `format` that this release knows; install the leader's release")
        if not segment.listing(f"{self.path}/append"):
            raise WireError("the leader's files came without a WAL")
        for directory, _, _ in os.walk(self.path):
            sync_directory(directory)
        sync_directory(os.path.dirname(self.path))
        replace_file(f"{self.path}/whole", "\n".join(_entries(self.path)).encode())


async def receive_files(link: Link, data: str, lineage: str) -> int:
    """Receive the leader's files into bootstrap/, and return how many bytes arrived. `settle` puts them in place.

    `lineage`: of the shard. Raises CorruptError if the directory is no replica of that lineage, WireError, OSError.
    """
    if identity.lineage(data) != lineage:
        raise CorruptError(f"KMQ_DATA={data!r}: is of another lineage than the shard's {lineage}: it is never replaced")
    incoming = await in_thread(Incoming, data)
    try:
        link.send(FilesText(0))
        got = 0
        while True:
            piece = await link.read()
            if isinstance(piece, RefusedText):
                raise WireError(f"refused: {piece.reason}")
            if not isinstance(piece, PieceText):
                raise WireError(f"{type(piece).__name__} came in place of a file")
            await in_thread(incoming.write, piece)
            got += 1
            if not piece.left:
                break
            link.send(FilesText(got))
        await in_thread(incoming.finish)
        link.send(FilesText(got))
        return incoming.nbytes
    except BaseException:  # the pieces would fill the disk for nothing
        await in_thread(shutil.rmtree, incoming.path, True)
        raise


def _entries(root: str) -> Iterator[str]:
    """Yield the entries that are replaced as a whole: files, topics, and segments with their indexes."""
    for name in _FILES:
        if os.path.lexists(f"{root}/{name}"):
            yield name
    for top in _LOGS:
        with contextlib.suppress(FileNotFoundError):
            yield from (f"{top}/{name}" for name in os.listdir(f"{root}/{top}") if name != ".owner")


def settle(data: str) -> bool:
    """Put a whole bootstrap in place, and remove incomplete ones. Return True if one was put in place.

    Call it while the stages hold nothing. It can be repeated after a crash: entries that bootstrap/whole names and
    bootstrap/ lacks are in place already.
    """
    coming, is_whole = f"{data}/bootstrap", os.path.exists(f"{data}/bootstrap/whole")
    if is_whole:
        with open(f"{coming}/whole", encoding="ascii") as file:
            names = file.read().split("\n")
        for name in {*_entries(data)} - {*names}:
            _remove(f"{data}/{name}")
        for name in names:
            if os.path.lexists(f"{coming}/{name}"):
                if os.path.isdir(f"{coming}/{name}"):
                    _remove(f"{data}/{name}")
                make_directory(os.path.dirname(f"{data}/{name}"))
                os.rename(f"{coming}/{name}", f"{data}/{name}")
        for link in (f"{data}/{name}" for name in os.listdir(data)):
            if os.path.islink(link):  # a symlink of a topic; the router makes those that it needs
                os.unlink(link)
        point_symlink(f"{data}/append.log", f"append/{segment.name(segment.listing(f'{data}/append')[-1][0])}")
        for name in ("", "append", "topics", *(["quarantine"] if "quarantine/log" in names else [])):
            sync_directory(f"{data}/{name}")
        os.unlink(f"{coming}/whole")
        sync_directory(coming)
    for name in os.listdir(data):
        if name == "bootstrap" or name.startswith("bootstrap-"):
            shutil.rmtree(f"{data}/{name}")
    return is_whole


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
