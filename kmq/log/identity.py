"""Who a data directory is, and in which version its files are written. Three small files, written once and whole.

    id         names the directory for ever. Rings carry it, so that one left by another directory is never read as this
               one's.
    lineage    names the records: what the directory was called where they began. Equal to `id` unless it is a copy of
               another one that goes its own way. Every index carries it, so that a segment of other records is never
               taken for one of these.
    format     `<version> from_seq=<n> marks_from=<m> crc32=<of what stands before it>`: the version of all formats,
               for records from seq n on; and from which seq on routing keys have marks.

Version 2 (from version 1: lines look alike): an index begins with a line that says whose it is (index.py). What lies
before `from_seq` may be without. In a routing key `.@` is a mark (record.py): what lies before `marks_from` was routed
without, and keeps its place. A directory of version 1 is raised to 2 by durability, which knows where its WAL ends; so
is one of an early version 2, which does not say `marks_from`.
"""

import contextlib
import errno
import os
import re
import zlib

from kmq.errors import WRONG_KIND, ConfigError, CorruptError, RetryError
from kmq.log.disk import FULL, replace_file, sync_directory

FORMAT = 2
NEVER = 1 << 62  # a seq that no record has
_LONGEST = 128  # bytes of `format`
_NAME = re.compile(r"[0-9a-f]{32}")
_FORMAT = re.compile(r"(\d{1,9}) from_seq=(\d{1,18})(?: marks_from=(\d{1,18}))? crc32=\d{1,10}")


def open_data(path: str) -> str:
    """Make `path` a data directory if it is none, and return its id.

    Raises ConfigError where it cannot be one, RetryError where the disk is at fault.
    """
    try:
        os.makedirs(f"{path}/append", exist_ok=True)
        os.makedirs(f"{path}/topics", exist_ok=True)
        _write_once(path, "id", os.urandom(16).hex())
        _write_once(path, "lineage", read(path, "id"))
        _write_once(path, "format", format_text(1, 1))
    except OSError as err:
        kind = RetryError if err.errno in (errno.EIO, *FULL) else ConfigError
        advice = "; move it away" if err.errno in WRONG_KIND else ""
        raise kind(f"KMQ_DATA={path!r}: cannot be written: {err.strerror} ({err.filename}){advice}") from err
    if version(path) is None:
        found = read(path, "format")
        raise ConfigError(f"KMQ_DATA={path!r}: format {found!r} is none that this version reads (1, {FORMAT})")
    for name in ("id", "lineage"):
        if not _NAME.fullmatch(read(path, name)):
            raise CorruptError(f"{path}/{name}: must be 32 hex digits; run kmq verify --repair")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"KMQ_DATA={path!r}: cannot be written")
    return read(path, "id")


def read(path: str, name: str) -> str:
    """The text of `id`, `lineage` or `format`."""
    with open(f"{path}/{name}", encoding="ascii", errors="replace") as file:
        return file.read().strip()


def version(path: str) -> tuple[int, int] | None:
    """(version, first seq for which it holds) of the formats; None where there is none, or an unknown one."""
    try:
        text = read(path, "format")
    except FileNotFoundError:
        return None
    if text == "1":
        return 1, 0
    said = _parse(text)
    return (FORMAT, said[1]) if said and said[0] == FORMAT else None


def _parse(text: str) -> tuple[int, int, int | None] | None:
    """(version, from_seq, marks_from) of a well made format, of whatever version."""
    match = _FORMAT.fullmatch(text)
    if match is None:
        return None
    number, from_seq, marks_from = (int(group) if group else None for group in match.groups())
    assert number is not None and from_seq is not None
    return (number, from_seq, marks_from) if text == format_text(from_seq, marks_from, number) else None


def marks_from(path: str) -> int:
    """The first seq whose routing key may have a mark; NEVER where the directory has not been raised to marks."""
    try:
        said = _parse(read(path, "format"))
    except FileNotFoundError:
        return NEVER
    return NEVER if said is None or said[2] is None else said[2]


def is_of_another_version(path: str) -> bool:
    """Whether `format` is as another version may have written it: damaged, it would not be so well made."""
    text = read(path, "format")
    return text.isdigit() or _parse(text) is not None


def mended(path: str) -> str:
    """The text of a `format` with one flipped bit, which its crc tells; "" where that is not what happened."""
    with contextlib.suppress(FileNotFoundError), open(f"{path}/format", "rb") as file:
        damaged = file.read(_LONGEST).rstrip(b"\n")
        for bit in range(8 * len(damaged)):
            text = bytearray(damaged)
            text[bit // 8] ^= 1 << bit % 8
            said = _parse(text.decode("latin-1").strip())
            if said is not None and said[0] == FORMAT:
                return text.decode("latin-1").strip()
    return ""


def labelled_from(log_path: str) -> int:
    """The first seq whose segment must say whose it is, for a log in append/ or topics/<topic>/<partition>/."""
    parent = os.path.dirname(os.path.dirname(log_path))
    for root in (parent, os.path.dirname(os.path.dirname(parent))):
        found = version(root)
        if found is not None:
            return found[1] if found[0] == FORMAT else NEVER
    return NEVER


def is_newest(path: str) -> bool:
    """Whether everything that is written from now on is of the newest version."""
    return version(path) is not None and marks_from(path) < NEVER


def raise_version(path: str, next_seq: int) -> bool:
    """From `next_seq` on everything is written by the newest version; whether it was not before."""
    found = version(path)
    if found is None or is_newest(path):
        return False
    from_seq = found[1] if found[0] == FORMAT else next_seq
    replace_file(f"{path}/format", f"{format_text(from_seq, next_seq)}\n".encode())
    return True


def format_text(from_seq: int, marks_from: int | None = None, number: int = FORMAT) -> str:
    """What `format` holds; without `marks_from` as an early version 2 wrote it."""
    text = f"{number} from_seq={from_seq}" + ("" if marks_from is None else f" marks_from={marks_from}")
    return f"{text} crc32={zlib.crc32(text.encode())}"


def lineage(path: str) -> str:
    """The name of the records of this directory: `lineage`, else its id; "" where it has neither."""
    for name in ("lineage", "id"):
        with contextlib.suppress(FileNotFoundError):
            return read(path, name)
    return ""


def _write_once(path: str, name: str, text: str) -> None:
    """Several stages start at once: the first one's file wins, whole."""
    if os.path.exists(f"{path}/{name}"):
        return
    making = f"{path}/{name}.{os.urandom(8).hex()}"  # not our pid: in a container of its own each has the same
    with open(making, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(making, f"{path}/{name}")
    os.unlink(making)
    sync_directory(path)
