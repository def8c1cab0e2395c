"""The state file of `kmq ship`: how much of each file is stored, and which bytes are sent under which ids.

    kmq-ship 2 name=ship-3f9a41c2 topic=app next=4711
    offset=120 end=240 lines=3 mark=9e107d9d size=300 file=fd01:1a2b: dirs=1a2a,2 born=1 path=/var/log/app.log
    offset=0 end=0 lines=0 head=40:1c291ca3 size=40 file=fd01:1a2c: dirs=1a2a,2 born=2 gone=1 real=/logs/b.1
    path=/logs/b.log
    crc32=0badcafe

`next` is the id of the first line that is not acknowledged. The files are in the order in which their lines were sent.
`mark` is a checksum of the bytes that were read; `head` is a checksum of the first bytes of a file of which nothing was
read. `size` is the file's size at the last look. `real` is the file's location if it is not `path`, `dirs` are the
inodes of the directories above it. `gone` means that no pattern matches the file any more. `origin` is the name that a
file had when it was found; files with the same origin are read in the order of `born`. Version 1 has no head, size,
dirs, born, gone, real and origin, and no row for a file of which nothing was read. Its first rows had no mark, and a
checksum of the first line at the end of `file`. Version 1 is read, and written as version 2.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote_to_bytes
from zlib import crc32

from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.files import FULL, replace_file
from kmq.links import ownership
from kmq.shipping.files import LogFile

VERSION = 2
_READ = (1, 2)


class ShipState(NamedTuple):
    """The content of a state file."""

    name: str
    topic: str
    next_id: int
    files: list[LogFile]


def save_state(path: str, state: ShipState) -> None:
    """Replace the state file. Raises ConfigError if the file cannot be written."""
    rows = [f"kmq-ship {VERSION} name={state.name} topic={state.topic} next={state.next_id}\n".encode()]
    for file in state.files:
        if not file.is_compressed:
            rows.append(_row(file))
    text = b"".join(rows)
    replace_file(path, text, b"crc32=%08x\n" % crc32(text))


def _row(file: LogFile) -> bytes:
    crc = "" if file.first_line is None else f"{file.first_line:08x}"
    fields = {
        "offset": file.offset,
        "end": file.end,
        "lines": file.lines,
        "mark": None if file.mark is None else f"{file.mark:08x}",
        "head": None if file.head is None or file.end else f"{file.head[0]}:{file.head[1]:08x}",
        "size": file.size,
        "file": f"{file.device:x}:{file.inode:x}:{crc}",
        "dirs": ",".join(f"{inode:x}" for inode in file.parents) or None,
        "born": file.born,
        "gone": None if file.gone_at is None else 1,
        "real": None if file.real in ("", file.path) else _word(file.real),
        "origin": None if file.origin in ("", file.path) else _word(file.origin),
    }
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return b"%b path=%b\n" % (text.encode(errors="surrogateescape"), _quote(file.path))


def _quote(path: str) -> bytes:
    return os.fsencode(path).replace(b"%", b"%25").replace(b"\n", b"%0A")


def _word(path: str) -> str:
    return _quote(path).replace(b" ", b"%20").decode(errors="surrogateescape")


def load_state(path: str) -> ShipState | None:
    """Read the state; None without a file. Raises CorruptError if it is damaged, ConfigError for another version."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    if text.startswith(b"kmq-ship ") and not text.startswith(tuple(b"kmq-ship %d " % version for version in _READ)):
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
    fields = dict(part.split("=", 1) for part in place.split(" "))
    device, inode, first_line = fields["file"].split(":")
    file = LogFile(
        _unquote(path),
        int(device, 16),
        int(inode, 16),
        int(fields["offset"]),
        int(fields["end"]),
        int(fields["lines"]),
        int(fields["mark"], 16) if "mark" in fields else None,
        int(first_line, 16) if first_line else None,
    )
    count, _, crc = fields.get("head", "").partition(":")
    file.head = (int(count), int(crc, 16)) if count else None
    file.size = file.verified = int(fields.get("size", 0))
    file.real = _unquote(fields["real"]) if "real" in fields else file.path
    file.parents = tuple(int(inode, 16) for inode in fields.get("dirs", "").split(",") if inode)
    file.origin, file.born = _unquote(fields["origin"]) if "origin" in fields else file.path, int(fields.get("born", 0))
    if "gone" in fields:
        file.gone_at, file.was = time.monotonic(), file.path
    return file


def _unquote(path: str) -> str:
    return os.fsdecode(unquote_to_bytes(os.fsencode(path)))


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a state file. Raises BusyError, which names the holder."""
    lock = ownership.FileLock(f"{path}.lock")
    with naming(path):
        lock.acquire(f"--state {path}", ownership.describe("ship", path))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn an OSError of a state file into an error that names --state."""
    try:
        yield
    except OSError as err:
        if err.errno in FULL:
            raise RetryError(f"--state {path}: {err.strerror}; make room") from err
        raise ConfigError(f"--state {path}: {err.strerror}") from err
