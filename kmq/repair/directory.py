"""A data directory as verify and repair read it: logs, checkpoint and named gaps. And its quarantine."""

import os
import time

from kmq.files import QUARANTINE, replace_file, sync_directory
from kmq.log import checkpoint, dropped, reader, topics
from kmq.log.dropped import SeqRange
from kmq.log.topics import Since
from kmq.message import record

At = tuple[str, int]  # topic, partition


class DataDirectory:
    """A data directory. Nothing here changes it."""

    def __init__(self, data: str) -> None:
        self.data = data
        self._gaps: dict[str, list[SeqRange]] = {}  # by ring

    def queues(self) -> list[At]:
        """Return (topic, partition) of all partition logs."""
        names = topics.names(self.data)
        entries = {topic: os.listdir(f"{self.data}/topics/{topic}") for topic in names}
        return [
            (topic, number) for topic in entries for number in sorted(map(int, filter(str.isdigit, entries[topic])))
        ]

    def wal(self) -> reader.LogReader:
        return reader.wal(self.data)

    def queue(self, at: At) -> reader.LogReader:
        return reader.local(self.data, *at)

    def logs(self) -> list[reader.LogReader]:
        """Return the WAL and all partition logs."""
        return [self.wal(), *map(self.queue, self.queues())]

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.data)

    def read(self, name: str) -> bytes:
        """Return the bytes of one file; a missing file reads as empty."""
        return read_file(f"{self.data}/{name}")

    def load_checkpoint(self) -> tuple[int, checkpoint.Rows, dict[str, Since]]:
        """Return what router.ckpt holds; a damaged checkpoint reads as empty."""
        try:
            return checkpoint.load(self.data)
        except (ValueError, LookupError):
            return 0, {}, {}

    def named_gaps(self, ring: str = "framed") -> list[SeqRange]:
        """Return the ranges of seqs that may be missing, in order: named as dropped, or as lost for good.

        Ranges of the ring `framed` may be missing in the WAL, and those of `durable` in a queue. A damaged line of
        dropped.log is skipped.
        """
        if ring not in self._gaps:
            gaps = dropped.read(self.data, ring, skips_damaged=True)
            gaps += dropped.quarantined(self.data, "append/" if ring == "framed" else "topics/")
            self._gaps[ring] = sorted(gaps, key=lambda gap: gap.first)
        return self._gaps[ring]


def read_file(path: str, nbytes: int = -1) -> bytes:
    """Return the bytes of a file, or its first `nbytes`; a missing file reads as empty."""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except FileNotFoundError:
        return b""


def read_text(path: str) -> str:
    """Return the text of a file. A missing file reads as empty, and bytes that are not UTF-8 are replaced."""
    return read_file(path).decode(errors="replace")


# --- quarantine ------------------------------------------------------------------------------------------------------
# A repair deletes nothing. Bytes that cannot be healed, and files that do not belong here, go to `quarantine/`:
#
#     <segment>.<byte>           bytes of a segment, under its path with dots for slashes
#     <path>.misplaced …         whole files
#     log                        lost records: path|byte|first_seq|last_seq|count|ts


class Quarantine:
    """The quarantine of one data directory."""

    def __init__(self, data: str) -> None:
        self._data, self._path = data, f"{data}/{QUARANTINE}"

    def copy(self, path: str, begin: int, end: int) -> None:
        """Copy the bytes begin…end-1 of a file into the quarantine."""
        os.makedirs(self._path, exist_ok=True)
        with open(path, "rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        replace_file(f"{self._path}/{self.flat(path)}.{begin}", content)

    def name_lost(self, path: str, byte: int, seqs: list[SeqRange], count: int | None = None) -> None:
        """Name lost seqs in quarantine/log; a repeated call adds nothing.

        `count`: of the records, if not all of each range.
        """
        os.makedirs(self._path, exist_ok=True)
        stamp = record.format_ts(time.time_ns() // 1000).decode()
        name = os.path.relpath(path, self._data)
        rows = [f"{name}|{byte}|{a}|{b}|{b - a + 1 if count is None else count}|{stamp}\n" for a, b in seqs]
        before = read_text(f"{self._path}/log")
        new = [row for row in rows if row.rpartition("|")[0] not in before]
        replace_file(f"{self._path}/log", (before + "".join(new)).encode())

    def set_aside(self, path: str, name: str) -> str:
        """Move a file or directory into the quarantine as `name`, or `name` with a number; return its new path."""
        os.makedirs(self._path, exist_ok=True)
        target = _free_name(f"{self._path}/{name}")
        os.rename(path, target)
        sync_directory(os.path.dirname(path))
        sync_directory(self._path)
        return target

    def replace(self, name: str) -> None:
        """Move a small file into the quarantine; it replaces an older one of the same name."""
        os.makedirs(self._path, exist_ok=True)
        os.rename(f"{self._data}/{name}", f"{self._path}/{os.path.basename(name)}")
        sync_directory(self._data)

    def flat(self, path: str) -> str:
        """Return the path of a file as one name."""
        return os.path.relpath(path, self._data).replace("/", ".")


def _free_name(path: str) -> str:
    """Return `path`, or if the file exists `path` with a number appended."""
    number, name = 1, path
    while os.path.exists(name):
        number, name = number + 1, f"{path}.{number + 1}"
    return name
