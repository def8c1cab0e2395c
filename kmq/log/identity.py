"""The identity of a data directory, and the version of its files: three small files, each written atomically.

    id         names the directory for ever. Rings carry it, so that a ring of another directory is never read as this
               directory's.
    lineage    names the records: the id of the directory in which they began. Equal to `id`, unless this directory was
               copied from another one and then diverged. Every index carries it, so that a segment with records of
               another lineage is never accepted.
    format     `<version> from_seq=<n> marks_from=<m> crc32=<of the text before it>`: the version of all formats for
               records from seq n on, and the first seq whose routing key may have a mark.

Version 2 (its lines look like those of version 1): an index begins with a label (index.py). Indexes of segments before
`from_seq` may have none. In a routing key `.@` is a mark (record.py): records before `marks_from` were routed without
marks, and stay in their partitions. Durability raises a directory of version 1 to 2, because it knows where the WAL
ends. It does the same for an early version 2, which has no `marks_from`.

Version 3: a topic has another partitioner than crc32, or has grown. Releases that know neither would route its records
to other partitions, so this number makes them refuse the directory. The router raises version 2 to 3 before it puts
the first such topic in force. docs/decisions/topic-growth.md

Version 4: a record sets where partitions begin. Releases without such records would bring back deleted records, and
number those after an empty start wrongly. The router raises older versions to 4 before it carries out the first one.
docs/decisions/starts.md

Version 5: the directory was put back from an older copy, and partitions have gaps (gaps.py). Releases without gaps would
take them for lost records. `kmq tier fork` raises older versions to 5 first of all. While the file `forking` is there
the command has not finished, and no process starts with the directory. Or old records of partitions lie in KMQ_TIER
(rows.py): releases without rows would begin where the disk begins. The router raises older versions with the first row.
"""

import contextlib
import errno
import os
import re
import zlib

from kmq.errors import WRONG_KIND, ConfigError, CorruptError, RetryError
from kmq.files import FULL, replace_file, sync_directory

LABELLED = 2  # indexes have labels, and keys may have marks
ROUTED = 3  # topics may have another partitioner than crc32, or have grown
STARTED = 4  # partitions may begin where a record says
FORKED = 5  # partitions may have gaps, or rows
FORMAT = FORKED
FORKING = "forking"  # the plan of a fork, until it is done (kmq/router/fork.py)
RESTORING = "restoring"  # below a data directory that kmq restore has not finished (kmq/tier/restore.py)
NEVER = 1 << 62  # a seq that no record has
_LONGEST = 128  # bytes of `format`, and of `replica` up to its shard
_SHARD = re.compile(r" shard=(\S+) ")
_NAME = re.compile(r"[0-9a-f]{32}")
_FORMAT = re.compile(r"(\d{1,9}) from_seq=(\d{1,18})(?: marks_from=(\d{1,18}))? crc32=\d{1,10}")


class DataMissingError(RetryError):
    """The data directory of a running broker is not where it was, or cannot be used."""


def open_data(path: str, expected_id: str = "", shard: str = "") -> str:
    """Make `path` a data directory unless it is one, and return its id.

    `shard`: KMQ_SHARD. Raises ConfigError for a replica of another shard, or of any shard if `shard` is empty: it would
    diverge.

    `expected_id`: the id of the directory that is in use there. Then nothing is made. Raises DataMissingError while
    `path` is not that directory, or cannot be read and written.
    Raises ConfigError if `path` cannot be a data directory, RetryError if the disk is full or fails.
    """
    if expected_id:
        _check_id(path, expected_id)
    try:
        _check_shard(path, shard)
        _check_restored(path)
        _check_forked(path)
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
        raise ConfigError(f"KMQ_DATA={path!r}: unknown format {found!r}; this release reads 1 to {FORMAT}")
    for name in ("id", "lineage"):
        if not _NAME.fullmatch(read(path, name)):
            raise CorruptError(f"{path}/{name}: must be 32 hex digits; run kmq verify --repair")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"KMQ_DATA={path!r}: cannot be written")
    return read(path, "id")


def _check_id(path: str, expected_id: str) -> None:
    """Raise DataMissingError unless `path` is the data directory with this id, and may be written."""
    try:
        found = read(path, "id")
        why = "" if os.access(path, os.R_OK | os.W_OK | os.X_OK) else "it cannot be read and written"
    except OSError as err:
        why = f"{err.strerror} ({err.filename})"
    else:
        why = f"it is another one, with the id {found!r}" if found != expected_id else why
    if why:
        raise DataMissingError(
            f"KMQ_DATA={path!r}: is not the data directory with which this broker runs, or has run until a few seconds ago:"
            f" {why}; put it back, or, to begin with a new one: kmq down, and kmq up some 5 s later"
        )


def _check_shard(path: str, shard: str) -> None:
    """Raise ConfigError if the directory is a replica (kmq/replica/files.py) of another shard than this one."""
    try:
        with open(f"{path}/replica", encoding="latin-1") as file:
            found = _SHARD.search(file.read(_LONGEST))
    except (FileNotFoundError, NotADirectoryError):  # other errors do not tell if it is a replica
        return
    name = found[1] if found else "one that its file `replica` does not name (a reset or a detach may not be finished)"
    if name != shard:
        given = f"KMQ_SHARD={shard}" if shard else "KMQ_SHARD is not set"
        raise ConfigError(f"{given}: KMQ_DATA={path!r} is a replica of the shard {name}, and stays one")


def _check_restored(path: str) -> None:
    """Raise ConfigError while a restore of the directory is not whole: its `id` comes last."""
    if not os.path.exists(f"{path}/id") and os.path.exists(f"{path}/{RESTORING}"):
        raise ConfigError(
            f"KMQ_DATA={path!r}: kmq restore was begun there and has not finished; run it again, or remove"
            f" {path}/{RESTORING} to begin anew"
        )


def _check_forked(path: str) -> None:
    """Raise ConfigError if `kmq tier fork` was begun in the directory and has not finished."""
    if os.path.exists(f"{path}/{FORKING}"):
        raise ConfigError(f"KMQ_DATA={path!r}: a fork was begun and has not finished; run kmq tier fork --yes again")


def read(path: str, name: str) -> str:
    """Return the text of `id`, `lineage` or `format`."""
    with open(f"{path}/{name}", encoding="ascii", errors="replace") as file:
        return file.read().strip()


def version(path: str) -> tuple[int, int] | None:
    """Return (version, first seq for which it holds) of the formats; None if missing or unknown."""
    try:
        text = read(path, "format")
    except FileNotFoundError:
        return None
    if text == "1":
        return 1, 0
    parsed = _parse(text)
    return parsed[:2] if parsed and LABELLED <= parsed[0] <= FORMAT else None


def _parse(text: str) -> tuple[int, int, int | None] | None:
    """Return (version, from_seq, marks_from) of a valid `format` of any version."""
    match = _FORMAT.fullmatch(text)
    if match is None:
        return None
    number, from_seq, marks_from = (int(group) if group else None for group in match.groups())
    assert number is not None and from_seq is not None
    return (number, from_seq, marks_from) if text == format_text(from_seq, marks_from, number) else None


def marks_from(path: str) -> int:
    """Return the first seq whose routing key may have a mark; NEVER if the directory has no marks yet."""
    try:
        return marks_in(read(path, "format"))
    except FileNotFoundError:
        return NEVER


def marks_in(text: str) -> int:
    """Return what `marks_from` returns for a directory with this `format`."""
    parsed = _parse(text.strip())
    return NEVER if parsed is None or parsed[2] is None else parsed[2]


def is_unknown(path: str) -> bool:
    """Return True if another release may have written `format`, in a version that this one does not know.

    Damage would break its syntax.
    """
    if version(path) is not None or not os.path.exists(f"{path}/format"):
        return False
    text = read(path, "format")
    return text.isdigit() or _parse(text) is not None


def mended(path: str) -> str:
    """Return the repaired text of a `format` with one flipped bit, found by its crc; "" if that does not fit."""
    with contextlib.suppress(FileNotFoundError), open(f"{path}/format", "rb") as file:
        damaged = file.read(_LONGEST).rstrip(b"\n")
        for bit in range(8 * len(damaged)):
            text = bytearray(damaged)
            text[bit // 8] ^= 1 << bit % 8
            parsed = _parse(text.decode("latin-1").strip())
            if parsed is not None and LABELLED <= parsed[0] <= FORMAT:
                return text.decode("latin-1").strip()
    return ""


def labelled_from(log_path: str) -> int:
    """Return the first seq whose segment needs a label, for a log in append/ or topics/<topic>/<partition>/."""
    parent = os.path.dirname(os.path.dirname(log_path))
    for root in (parent, os.path.dirname(os.path.dirname(parent))):
        found = version(root)
        if found is not None:
            return found[1] if found[0] >= LABELLED else NEVER
    return NEVER


def is_newest(path: str) -> bool:
    """Return True if new indexes have labels and new keys may have marks."""
    return version(path) is not None and marks_from(path) < NEVER


def raise_version(path: str, next_seq: int) -> bool:
    """Use labels and marks from `next_seq` on; return True if the directory was older."""
    found = version(path)
    if found is None or is_newest(path):
        return False
    from_seq = found[1] if found[0] >= LABELLED else next_seq
    replace_file(f"{path}/format", f"{format_text(from_seq, next_seq)}\n".encode())
    return True


def raised_text(path: str, number: int) -> str:
    """Return the content of `format` raised to this version; "" if its version is not lower, or it cannot be read."""
    with contextlib.suppress(FileNotFoundError):
        parsed = _parse(read(path, "format"))
        if parsed is not None and parsed[0] < number:
            return format_text(*parsed[1:], number)
    return ""


def format_text(from_seq: int, marks_from: int | None = None, number: int = LABELLED) -> str:
    """Return the content of `format`; without `marks_from`, as an early version 2 wrote it."""
    text = f"{number} from_seq={from_seq}" + ("" if marks_from is None else f" marks_from={marks_from}")
    return f"{text} crc32={zlib.crc32(text.encode())}"


def lineage(path: str) -> str:
    """Return the lineage of this directory's records: `lineage`, else the id; "" if it has neither."""
    for name in ("lineage", "id"):
        with contextlib.suppress(FileNotFoundError):
            return read(path, name)
    return ""


def of_records(path: str) -> str:
    """Return the name by which readers know these records: the id; in a shard the lineage, which all replicas share."""
    return lineage(path) if os.path.exists(f"{path}/replica") else read(path, "id")


def _write_once(path: str, name: str, text: str) -> None:
    """Write the file unless it exists: of several stages that start at once, the first one's file counts."""
    if os.path.exists(f"{path}/{name}"):
        return
    making = f"{path}/{name}.{os.urandom(8).hex()}"  # no pid: stages in containers of their own have the same pid
    with open(making, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(making, f"{path}/{name}")
    os.unlink(making)
    sync_directory(path)
