"""Segments written anew, and what is said of it.

Crash       Each file is written anew, synced, and renamed, the index before its log: whatever is there after a crash,
            the next repair finds the rest of the damage again and heals it the same way.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from kmq import record
from kmq.log import reader, segment
from kmq.log.disk import QUARANTINE, replace_file, sync_directory
from kmq.log.index import IndexWriter
from kmq.repair.scan import Part, Scan, scan

_CHUNK = 1 << 20
Span = tuple[int, int]  # first and last seq


class Healed(NamedTuple):
    """What was done to a file."""

    path: str
    what: str
    lost: list[Span] = []  # seqs that could not be healed
    unwitnessed: list[
        Span
    ] = []  # seqs that are kept as they are, for no checksum and no second copy speaks for or against them


class Stretch(NamedTuple):
    """A part of a segment to be written again: records between two good ones."""

    position: int  # bytes of it as they are now
    end: int
    first_seq: int  # the records to be found, at most
    last_seq: int
    parts: list[Part]
    offset: int = 0  # of its first record, in a queue
    records: int = -1  # in a queue; -1: as many as there are
    is_end: bool = False  # of a queue, with nothing behind it


class Line(NamedTuple):
    """A record of a stretch as it is to be written."""

    seq: int
    text: bytes | None  # None: it cannot be healed


Lines = Callable[[Scan, Stretch], Iterator[Line]]


class Rewriter:
    """The segments of a data directory: scanned once, and written anew where something is wrong."""

    def __init__(self, data: str, progress: Callable[[int], None]) -> None:
        self.data, self._progress = data, progress
        self.healed: list[Healed] = []
        self._scans: dict[str, Scan] = {}

    def report(self, path: str, what: str, lost: Iterable[Span] = (), unwitnessed: Iterable[Span] = ()) -> None:
        self.healed.append(Healed(os.path.relpath(path, self.data), what, list(lost), list(unwitnessed)))

    def scan(self, log: reader.Log) -> list[Scan]:
        """Each segment of a log as it is now."""
        paths = [path for _, path in log.segments()]
        return [self._scan(path, log.by_seq, sealed=path != paths[-1]) for path in paths]

    def scan_of(self, path: str, by_seq: bool) -> Scan:
        """One segment of a log as it is now."""
        paths = [path for _, path in segment.listing(os.path.dirname(path))]
        return self._scan(path, by_seq, sealed=path != paths[-1])

    def _scan(self, path: str, by_seq: bool, sealed: bool) -> Scan:
        if path not in self._scans:
            first = int(os.path.basename(path)[:20])
            self._scans[path] = scan(first, path, by_seq, sealed, self._progress)
        return self._scans[path]

    def last_seq(self, log: reader.Log) -> int:
        """Of the records that a checksum vouches for."""
        parts = (part for each in self.scan(log) if not each.misplaced for part in each.parts)
        return max([0, *(part.last_seq for part in parts if part.is_witnessed)])

    def forget(self, path: str = "") -> None:
        """A segment has changed; all of them may have."""
        if path:
            self._scans.pop(path, None)
        else:
            self._scans.clear()

    def rewrite(
        self, found: Scan, stretches: list[Stretch], lines: Lines, by_seq: bool, unwitnessed: Sequence[int] = ()
    ) -> None:
        """Give a segment its stretches back, and its index. `unwitnessed`: seqs that it keeps on its own word alone."""
        self.forget(found.path)
        if not stretches and not found.torn:
            self._reindex(found, found.path, by_seq)
            self.report(segment.index_path(found.path), "rebuilt from the log", (), ranges(unwitnessed))
            return
        making = f"{found.path}.repaired"
        lost: list[Span] = []
        with open(found.path, "rb") as old, open(making, "wb") as new:
            at = 0
            for stretch in stretches:
                _copy(old, new, at, stretch.position)
                gone: list[int] = []
                for seq, text in lines(found, stretch):
                    if text is not None:
                        new.write(text)
                    else:
                        gone.append(seq)
                        if not by_seq:
                            new.write(b"\n")
                if gone:
                    lost += self.quarantine(found.path, (stretch.position, stretch.end), stretch, gone)
                at = stretch.end
            _copy(old, new, at, max(at, found.size - found.torn))
            new.flush()
            os.fsync(new.fileno())
        self._reindex(found, making, by_seq)
        is_same = _same(found.path, making)
        if is_same:
            os.unlink(making)
        else:
            os.rename(making, found.path)
        sync_directory(os.path.dirname(found.path))
        path = segment.index_path(found.path) if is_same else found.path
        what = "rebuilt from the log" if is_same else "healed" if not lost else "healed in part"
        self.report(path, what, lost, ranges(unwitnessed))

    def _reindex(self, found: Scan, log_path: str, by_seq: bool) -> None:
        """A new index for what is now in `log_path`."""
        path = segment.index_path(found.path)
        making = f"{path}.repaired"
        if os.path.exists(making):
            os.unlink(making)
        replace_file(making, b"")
        fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = IndexWriter(making, no_room, by_seq, label_of=found.path)
            writer.resume(fd, os.fstat(fd).st_size, found.first)
            writer.seal()
        finally:
            os.close(fd)
        with open(making, "rb") as file:
            os.fsync(file.fileno())
        os.rename(making, path)

    def quarantine(self, path: str, extent: tuple[int, int], stretch: Stretch, gone: list[int]) -> list[Span]:
        """Keep the bytes of a stretch that could not be healed, and name its records."""
        name, (begin, end) = os.path.relpath(path, self.data), extent
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        with open(path, "rb") as file:
            file.seek(begin)
            kept = file.read(end - begin)
        replace_file(f"{self.data}/{QUARANTINE}/{name.replace('/', '.')}.{begin}", kept)
        spans = ranges(gone) if all(gone) else [(stretch.first_seq, stretch.last_seq)]
        stamp = record.format_ts(time.time_ns() // 1000).decode()
        rows = [f"{name}|{begin}|{a}|{b}|{b - a + 1 if all(gone) else len(gone)}|{stamp}\n" for a, b in spans]
        log = f"{self.data}/{QUARANTINE}/log"
        before = text_of(log)
        replace_file(log, (before + "".join(row for row in rows if row.rpartition("|")[0] not in before)).encode())
        return spans


def no_room(path: str) -> None:
    raise OSError(f"{path}: no room on the disk; nothing was changed")


def text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def ranges(seqs: Iterable[int]) -> list[Span]:
    """Numbers that follow one another as (first, last)."""
    spans: list[Span] = []
    for seq in seqs:
        if spans and spans[-1][1] + 1 == seq:
            spans[-1] = spans[-1][0], seq
        else:
            spans.append((seq, seq))
    return spans


def _copy(old: BinaryIO, new: BinaryIO, start: int, end: int) -> None:
    old.seek(start)
    while start < end:
        data = old.read(min(_CHUNK, end - start))
        if not data:
            return
        new.write(data)
        start += len(data)


def _same(one: str, other: str) -> bool:
    if os.path.getsize(one) != os.path.getsize(other):
        return False
    with open(one, "rb") as a, open(other, "rb") as b:
        while block := a.read(_CHUNK):
            if block != b.read(_CHUNK):
                return False
    return True
