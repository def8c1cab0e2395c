"""The demo's input: files as lines, each source a topic of its own.

Files packed by gzip, xz or bzip2 are read unpacked. A file that cannot be read as lines is always reported.
"""

import bz2
import gzip
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import psutil

from kmq.errors import ConfigError
from kmq.message import record
from kmq.message.text import percent_encode

LOGS = Path("/var/log")
ENOUGH = 5000  # lines; with fewer, live process events are shipped as well
MOST_BYTES = 256 << 20  # of logs shipped by default: they take twice that on the disk
_HEAD = 8192  # bytes that decide whether a file is text
_PACKED = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "xz": re.compile(rb"\xfd7zXZ"),
    "bzip2": re.compile(rb"BZh[1-9]1AY&SY"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "zip": re.compile(rb"PK\x03\x04"),
}
_OPENERS: dict[str, Callable[..., IO[Any]]] = {"": open, "gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error)  # OSError says which file by itself, except these of the unpackers

# The class of a line is its message key: the event (dpkg), the program (syslog), or the severity.
_CLASSES = (
    re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*[\s\[-]+([A-Za-z][\w-]{0,31})"),
    re.compile(rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ ([A-Za-z][\w-]{0,31})"),
    re.compile(rb"\b(?i:(emerg|alert|crit|critical|fatal|error|warn|warning|notice|info|debug|trace))\b"),
)


class Unreadable(Exception):
    """A file cannot be shipped as lines, for this reason."""


class Source:
    """One input: a file in its current length, or lines in memory. Raises Unreadable if it is packed and damaged."""

    def __init__(self, name: str, path: Path | None = None, collected: list[bytes] | None = None) -> None:
        self.name, self.path, self._collected = name, path, collected or []
        self.topic = ""
        self.packing = packing(path) if path else ""
        self.bytes = sys.maxsize if self.packing or not path else path.stat().st_size
        self.count = self.nuls = length = 0
        try:
            for line in self._read():
                self.count, self.nuls, length = self.count + 1, self.nuls + (0 in line), length + len(line)
        except (*_DAMAGED, gzip.BadGzipFile) as error:
            raise Unreadable(f"damaged {self.packing}, {error}") from error
        self.bytes = length if path else 0
        self.sent = self.too_long = 0
        self.digest = sha256()  # of the payloads sent whole, each with a newline

    def lines(self) -> Iterator[bytes]:
        """Yield its lines without newlines. Lines that are appended meanwhile are left for the next run."""
        return (line.removesuffix(b"\n") for line in self._read())

    def _read(self) -> Iterator[bytes]:
        if self.path is None:
            yield from self._collected
            return
        left = self.bytes
        with _OPENERS[self.packing](self.path, "rb") as file:
            for line in file:
                line, left = line[:left], left - len(line)
                if line:
                    yield line
                if left <= 0:
                    return

    def routing_key(self, line: bytes) -> bytes:
        if self.path is None:
            return b"%b.%b" % (self.topic.encode(), line.partition(b" ")[0].removeprefix(b"name="))
        return b"%b.%b" % (self.topic.encode(), line_class(line))


def line_class(line: bytes) -> bytes:
    """Return one word for the kind of a log line."""
    for pattern in _CLASSES[:2]:
        if match := pattern.match(line):
            return match[1].lower()
    match = _CLASSES[2].search(line, 0, 200)
    return match[1].lower() if match else b"line"


# --- files -------------------------------------------------------------------------------------------------------


def head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError:
        raise Unreadable("unreadable") from None


def packing(path: Path) -> str:
    """Return how a file is packed, "" if it is not. Raises Unreadable if Python cannot unpack it."""
    start = head(path)
    name = next((name for name, magic in _PACKED.items() if magic.match(start)), "")
    if name not in _OPENERS:
        raise Unreadable(f"packed with {name}, which the demo does not unpack; unpack it first")
    return name


def files_under(directory: Path) -> Iterator[Path]:
    """Yield regular files, no symlinks: these lead to logs found elsewhere, or to a terminal."""
    for parent, _, names in os.walk(directory):
        yield from (path for name in sorted(names) if (path := Path(parent, name)).is_file() and not path.is_symlink())


def require_log(path: Path, room: int) -> None:
    """Raise Unreadable unless a file under /var/log is text of at most `room` bytes."""
    start = head(path)
    if not start:
        raise Unreadable("empty")
    if any(magic.match(start) for magic in _PACKED.values()):
        raise Unreadable("compressed")
    if 0 in start:
        raise Unreadable("binary")
    if path.stat().st_size > room:
        raise Unreadable("too large")


def machine_logs() -> tuple[list[Source], dict[Path, str]]:
    """Return the text files under /var/log, and why the others were left out."""
    chosen: list[Source] = []
    skipped: dict[Path, str] = {}
    room = MOST_BYTES
    for _, path in sorted((path.stat().st_size, path) for path in files_under(LOGS)):
        try:
            require_log(path, room)
            chosen.append(Source(str(path), path))
            room -= chosen[-1].bytes
        except Unreadable as error:
            skipped[path] = str(error)
    return sorted(chosen, key=lambda source: source.name), skipped


def named_files(names: list[str]) -> tuple[list[Source], dict[Path, str]]:
    """Return the files that the user named, whatever their content; of directories all readable files; and why not
    the others.
    """
    chosen: list[Source] = []
    skipped: dict[Path, str] = {}
    for name in names:
        path = Path(name)
        if not path.is_dir() and not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(f"INPUT {name!r}: not a readable file or directory")
        for file in files_under(path) if path.is_dir() else [path]:
            try:
                chosen.append(Source(str(file), file))
            except Unreadable as error:
                if file is path:
                    raise ConfigError(f"INPUT {name!r}: {error}") from error
                skipped[file] = str(error)
    return chosen, skipped


def process_events(wanted: int) -> Source:
    """Return lines about the processes of this machine, snapshot after snapshot, at least `wanted` of them."""
    lines: list[bytes] = []
    fields = ("pid", "ppid", "name", "status", "cpu_times", "memory_info", "num_threads")
    while len(lines) < wanted:
        for process in psutil.process_iter(fields):
            info = process.info
            cpu, memory = info["cpu_times"], info["memory_info"]
            cpu_s, rss = (cpu.user + cpu.system if cpu else 0.0), (memory.rss if memory else 0)
            name = percent_encode(info["name"] or "unknown").replace(".", "-")
            lines.append(
                f"name={name} pid={info['pid']} ppid={info['ppid']} status={info['status']}"
                f" cpu_s={cpu_s:.2f} rss={rss} threads={info['num_threads']} at={time.time():.6f}".encode()
            )
    return Source("process events", collected=lines[:wanted])


def name_topics(sources: list[Source]) -> None:
    """Give each source a topic of its own: the file's base name, with its directories where two are alike."""
    taken = {"dead"}  # the broker's topic for invalid lines
    for source in sources:
        parts = source.path.absolute().parts if source.path else ("process",)
        spellings = (topic_name("-".join(parts[-depth:])) for depth in range(1, len(parts) + 1))
        numbered = (f"{topic_name(parts[-1])}-{n}" for n in range(2, len(sources) + 3))
        source.topic = next(name for name in (*spellings, *numbered) if name not in taken)
        taken.add(source.topic)


def topic_name(text: str) -> str:
    """Return `text` as a valid topic: one label, so that no longer topic can catch its messages."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", text.removesuffix(".log")).strip("-")[-150:]
    return name if record.is_topic(name) else f"log-{name.strip('-_')}".rstrip("-")
