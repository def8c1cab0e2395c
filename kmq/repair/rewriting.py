"""Rewriting: writes healed segments, and collects the report of what was done, for example `Healed(path, what, lost)`.

Crash       Each file is written beside the old one, synced, and renamed, the index before its log. So after a crash the
            next repair finds the rest of the damage again and heals it the same way.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from kmq.errors import KmqError
from kmq.files import replace_file, sync_directory
from kmq.log import reader, segment
from kmq.log.dropped import SeqRange
from kmq.log.index import IndexWriter
from kmq.repair.directory import Quarantine
from kmq.repair.scan import Scan, ScannedBlock, scan_segment

_CHUNK = 1 << 20


class Healed(NamedTuple):
    """What was done to a file. The fields are the keys of `kmq verify --repair --json`."""

    path: str
    what: str
    lost: list[SeqRange] = []  # seqs that could not be healed
    unwitnessed: list[SeqRange] = []  # seqs kept, although neither a checksum nor a second copy confirms them


class Patch(NamedTuple):
    """A damaged part of a segment, between two good ones, to be replaced by the records that belong there."""

    position: int  # of the bytes to be replaced
    end: int
    first_seq: int  # no record that belongs there has a lower seq
    last_seq: int  # no record that belongs there has a higher seq
    blocks: list[ScannedBlock]  # the blocks that are there now
    offset: int | None = None  # of the first record, in a queue; None: unknown
    records: int | None = None  # how many records belong there, in a queue; None: unknown
    is_end: bool = False  # True: the end of a queue, nothing follows


class Line(NamedTuple):
    """A record of a patch as it is to be written."""

    seq: int
    text: bytes | None  # None: no copy of it is left


Lines = Callable[[Scan, Patch], Iterator[Line]]


class Rewriter:
    """The segments of a data directory under repair: their scans, their rewriting, and the report."""

    def __init__(self, data: str, progress: Callable[[int], None], ring_bytes: int) -> None:
        self.data, self._progress, self._ring_bytes = data, progress, ring_bytes
        self._scans: dict[str, Scan] = {}  # each segment is scanned once until it changes
        self.healed: list[Healed] = []
        self.has_left = False  # damage that is not healed: no other step may rewrite these files
        self.quarantine = Quarantine(data)

    def report(self, path: str, what: str, lost: Sequence[SeqRange] = (), unwitnessed: Sequence[SeqRange] = ()) -> None:
        """Note what was done to a file."""
        self.healed.append(Healed(os.path.relpath(path, self.data), what, list(lost), list(unwitnessed)))

    def leave(self, path: str, why: str) -> None:
        """Note that a file stays damaged, and why."""
        self.has_left = True
        self.report(path, f"not healed: {why}")

    def scans(self, log: reader.LogReader) -> list[Scan]:
        """Return the scan of each segment of a log."""
        return [self.scan(path, log.by_seq) for _, path in log.segments()]

    def scan(self, path: str, by_seq: bool) -> Scan:
        if path not in self._scans:
            paths = [path for _, path in segment.listing(os.path.dirname(path))]
            first, is_sealed = int(os.path.basename(path)[:20]), path != paths[-1]
            self._scans[path] = scan_segment(first, path, by_seq, is_sealed, self._progress, self._ring_bytes)
        return self._scans[path]

    def last_seq(self, log: reader.LogReader) -> int:
        """Return the last seq of a log that a checksum confirms, or 0."""
        blocks = (block for scan in self.scans(log) if not scan.misplaced for block in scan.blocks)
        return max([0, *(block.last_seq for block in blocks if block.is_witnessed)])

    def forget(self, path: str = "") -> None:
        """Drop the scan of a segment that changed, or all scans."""
        for each in [path] if path else [*self._scans]:
            self._scans.pop(each, None)

    def rewrite(self, scan: Scan, patches: list[Patch], lines: Lines, unwitnessed: Sequence[int] = ()) -> None:
        """Apply the patches to a segment and rebuild its index. `unwitnessed`: seqs kept without any confirmation.

        What `lines` raises leaves the segment as it was.
        """
        self.forget(scan.path)
        index_path = segment.index_path(scan.path)
        if not patches and not scan.torn:
            _reindex(scan, scan.path)
            self.report(index_path, "rebuilt from the log", unwitnessed=ranges(unwitnessed))
            return
        new_path = f"{scan.path}.repaired"
        try:
            lost = self._write(scan, new_path, patches, lines)
        except KmqError:  # a copy that cannot be had now; nothing was changed
            os.unlink(new_path)
            raise
        _reindex(scan, new_path)
        is_same = _is_same(scan.path, new_path)
        if is_same:
            os.unlink(new_path)
        else:
            os.rename(new_path, scan.path)
        sync_directory(os.path.dirname(scan.path))
        what = "rebuilt from the log" if is_same else "healed" if not lost else "healed in part"
        self.report(index_path if is_same else scan.path, what, lost, ranges(unwitnessed))

    def _write(self, scan: Scan, new_path: str, patches: list[Patch], lines: Lines) -> list[SeqRange]:
        """Write the patched segment to `new_path`; return the seqs that are lost."""
        given_up: list[tuple[Patch, list[int]]] = []
        with open(scan.path, "rb") as old, open(new_path, "wb") as new:
            copied = 0
            for patch in patches:
                _copy(old, new, copied, patch.position)
                lost_here: list[int] = []
                begin = new.tell()
                for seq, text in lines(scan, patch):
                    if text is not None:
                        new.write(text)
                    else:
                        lost_here.append(seq)
                        if not scan.by_seq:
                            new.write(b"\n")  # so that the offsets after it stay
                if lost_here:
                    given_up.append((patch, lost_here))
                elif new.tell() == begin and patch.end > patch.position:  # no record replaces these bytes
                    self.quarantine.copy(scan.path, patch.position, patch.end)
                copied = patch.end
            _copy(old, new, copied, max(copied, scan.size - scan.torn))
            new.flush()
            os.fsync(new.fileno())
        return [gone for patch, lost_here in given_up for gone in self._give_up(scan, patch, lost_here)]

    def _give_up(self, scan: Scan, patch: Patch, lost: list[int]) -> list[SeqRange]:
        """Keep the bytes of a patch that could not be healed, and name its lost records.

        `lost`: their seqs; 0 where a seq is unknown.
        """
        self.quarantine.copy(scan.path, patch.position, patch.end)
        if all(lost):
            seqs = ranges(lost)
            self.quarantine.name_lost(scan.path, patch.position, seqs)
        else:
            seqs = [SeqRange(patch.first_seq, patch.last_seq)]
            self.quarantine.name_lost(scan.path, patch.position, seqs, count=len(lost))
        return seqs


def _reindex(scan: Scan, log_path: str) -> None:
    """Rebuild the index of a segment from the content of `log_path`."""
    path = segment.index_path(scan.path)
    new_path = f"{path}.repaired"
    if os.path.exists(new_path):
        os.unlink(new_path)
    replace_file(new_path, b"")
    fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = IndexWriter(new_path, _no_space, scan.by_seq, label_of=scan.path)
        writer.resume(fd, os.fstat(fd).st_size, scan.first)
        writer.seal()
    finally:
        os.close(fd)
    with open(new_path, "rb") as file:
        os.fsync(file.fileno())
    os.rename(new_path, path)


def _no_space(path: str) -> None:
    raise OSError(f"{path}: no space on the disk; nothing was changed")


def ranges(seqs: Iterable[int]) -> list[SeqRange]:
    """Return runs of consecutive seqs."""
    found: list[SeqRange] = []
    for seq in seqs:
        if found and found[-1].last + 1 == seq:
            found[-1] = SeqRange(found[-1].first, seq)
        else:
            found.append(SeqRange(seq, seq))
    return found


def _copy(old: BinaryIO, new: BinaryIO, start: int, end: int) -> None:
    old.seek(start)
    while start < end:
        data = old.read(min(_CHUNK, end - start))
        if not data:
            return
        new.write(data)
        start += len(data)


def _is_same(one: str, other: str) -> bool:
    if os.path.getsize(one) != os.path.getsize(other):
        return False
    with open(one, "rb") as a, open(other, "rb") as b:
        while block := a.read(_CHUNK):
            if block != b.read(_CHUNK):
                return False
    return True
