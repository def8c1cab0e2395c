"""`quarantine/` of a data directory: bytes that could not be healed, and files that belong nowhere here.

A repair deletes nothing. The files are:

<segment>.<byte>           bytes of a segment, under its path with dots for slashes
<path>.misplaced …         whole files
log                        lost records: path|byte|first_seq|last_seq|count|ts
"""

import os
import time

from kmq.files import QUARANTINE, replace_file, sync_directory
from kmq.message import record
from kmq.repair.directory import read_text

SeqRange = tuple[int, int]  # first, last


class Quarantine:
    """The quarantine of one data directory."""

    def __init__(self, data: str) -> None:
        self._data, self._path = data, f"{data}/{QUARANTINE}"

    def keep(self, path: str, begin: int, end: int) -> None:
        """Copy the bytes begin…end-1 of a file into the quarantine."""
        os.makedirs(self._path, exist_ok=True)
        with open(path, "rb") as file:
            file.seek(begin)
            kept = file.read(end - begin)
        replace_file(f"{self._path}/{self.flat(path)}.{begin}", kept)

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
    """Return `path`, or `path` with a number behind it if the file exists."""
    number, name = 1, path
    while os.path.exists(name):
        number, name = number + 1, f"{path}.{number + 1}"
    return name
