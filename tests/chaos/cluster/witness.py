"""Reads the WALs of a shard while it works, as `tail -F` does, and notes every record that ever was in one.

One file a broker in its directory: a line `<seq> <crc32 of the record>` for each record, and `forget` where the broker
was given an empty directory, or lost power: what was there before need not be accounted for. What a broker has cut is
copied into `<broker>.cut/`, because brokers keep only the last few.
"""

import os
import shutil
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TextIO

LOOKS_S = 0.05  # between two looks


def _copy(source: Path, copy: Path) -> bool:
    """Copy a file that is new, or has grown since it was copied; return whether it was."""
    is_new = not copy.exists() or copy.stat().st_size != source.stat().st_size
    if is_new:
        shutil.copyfile(source, copy)
    return is_new


class _Tail:
    """How far one WAL was read. A segment that became shorter, or goes on with another seq, is read again."""

    def __init__(self, data: Path, notes: TextIO) -> None:
        self.data, self._notes = data, notes
        self._read: dict[Path, tuple[int, int]] = {}  # segment → bytes, and the last seq in them
        self._seen: dict[int, int] = {}  # seq → crc of what was there last

    def look(self) -> None:
        for path in sorted((self.data / "append").glob("*.log"), key=lambda path: int(path.stem)):
            with suppress(FileNotFoundError):
                self._look_at(path)

    def _look_at(self, path: Path) -> None:
        at, last = self._read.get(path, (0, 0))
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == at:
                return
            file.seek(max(at - 1, 0))
            text = file.read()
        if at:
            newline, text = text[:1], text[1:]
            if size < at or newline != b"\n" or (b"\n" in text and not text.startswith(b"%d|" % (last + 1))):
                self._read[path] = 0, 0
                return self._look_at(path)
        *lines, rest = text.split(b"\n")
        for line in lines:
            if line.split(b"|", 1)[0].isdigit() and b"\0" not in line:
                last = int(line.split(b"|", 1)[0])
                self._note(last, zlib.crc32(line))
        self._read[path] = at + len(text) - len(rest), last

    def _note(self, seq: int, crc: int) -> None:
        if self._seen.get(seq) != crc:
            self._seen[seq] = crc
            self._notes.write(f"{seq} {crc}\n")

    def start_over(self) -> None:
        """Read all of it again: other records may have come in the place of some."""
        self._read.clear()

    def forget(self) -> None:
        self.start_over()
        self._seen.clear()
        self._notes.write("forget\n")

    def flush(self) -> None:
        self._notes.flush()


class Witness(threading.Thread):
    """`directories`: the data directories by broker."""

    def __init__(self, root: Path, directories: dict[str, Path]) -> None:
        super().__init__(daemon=True)
        self.root, self._enough, self._lock = root, threading.Event(), threading.Lock()
        root.mkdir()
        self._files = {name: (root / name).open("w") for name in directories}
        self._tails = {name: _Tail(data, self._files[name]) for name, data in directories.items()}
        for name in directories:
            (root / f"{name}.cut").mkdir()

    def run(self) -> None:
        while not self._enough.wait(LOOKS_S):
            self.look()

    def look(self) -> None:
        with self._lock:
            for name, tail in self._tails.items():
                with suppress(OSError):  # its disk has lost its power
                    self._look_at(name, tail)
                tail.flush()

    def _look_at(self, name: str, tail: _Tail) -> None:
        for path in (tail.data / "cut").glob("*.log"):
            with suppress(FileNotFoundError):
                if _copy(path, self.root / f"{name}.cut" / path.name):
                    tail.start_over()
        tail.look()

    def forget(self, name: str) -> None:
        """This broker does not run, and will go on without what it had, or with less of it."""
        with self._lock:
            self._tails[name].forget()

    def finish(self) -> None:
        self._enough.set()
        if self.is_alive():
            self.join()
            self.look()
        for file in self._files.values():
            file.close()
