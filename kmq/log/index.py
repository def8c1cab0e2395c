"""The sparse index beside a log, as text: a label, then `offset|byte_position|crc32|recv_ts` per ~64 KiB block.

    kmq-idx 2 lineage=<hex> log=append|<topic>/<partition> base=<first seq or offset>

The first line, the label (format 2), says which records the segment holds: the lineage (identity.py), the log, and the
first record. A segment is trusted only if the label names its place and its first record belongs there (segment_reader.py):
a file that a restore has put in a wrong place is damage, not data. Indexes of format 1 begin with the first block.

A line describes the block that begins at `byte_position` with record `offset`, received at `recv_ts`; the block ends
where the next one begins, and `crc32` (zlib) covers its bytes. The open block gets a provisional line now and then,
whose crc covers the block up to the end of some line. The last line for an offset counts. In a sealed segment it covers
the whole block.

Invariant   An index never says more than the log holds: it is written after the log, cut when the log is cut, and
            can be thrown away, because everything in it follows from the log.
Crash       A torn last line is cut at open; the open block is read again (at most ~64 KiB and one group) to
            continue its crc.
"""

import os
import re
import zlib
from collections.abc import Callable
from functools import lru_cache

from kmq.files import AppendFile, Buffer, WaitForRoom, replace_file, with_room
from kmq.log import identity
from kmq.message import record

BLOCK_BYTES = 64 << 10
_MOST_PENDING = 16  # final lines not written yet: a reader checks the records without an index line one by one
_HEAD_BYTES = 64  # a seq and a time are shorter
_WINDOW = 4 << 10  # bytes looked through at once for the end of a line


class IndexEntry:
    """One index line."""

    __slots__ = ("crc", "offset", "position", "recv_ts")

    def __init__(self, offset: int, position: int, crc: int, recv_ts: bytes) -> None:
        self.offset, self.position, self.crc, self.recv_ts = offset, position, crc, recv_ts

    def line(self) -> bytes:
        return b"%d|%d|%d|%b\n" % (self.offset, self.position, self.crc, self.recv_ts)


LABEL = b"kmq-idx "
MAX_LABEL = 512  # bytes; a topic's name has at most 200
_lineages: dict[str, tuple[tuple[int, int], str]] = {}  # by directory: inode and mtime of the file, and what it says


@lru_cache(1024)
def place_of(log_path: str) -> tuple[str, str, int] | None:
    """Return (data directory, log, first record) of the path of a segment or index; None if it is elsewhere."""
    directory, name = os.path.split(log_path)
    parent, last = os.path.split(directory)
    if last == "append":
        return parent, last, int(name[:20])
    if last.isdigit() and os.path.basename(os.path.dirname(parent)) == "topics":
        return os.path.dirname(os.path.dirname(parent)), f"{os.path.basename(parent)}/{last}", int(name[:20])
    return None


def label(log_path: str) -> bytes:
    """Return the label that the index of the log at `log_path` must have; b"" outside a data directory."""
    place = place_of(log_path)
    if place is None:
        return b""
    root, log, base = place
    return f"kmq-idx 2 lineage={lineage_of(root)} log={log} base={base}\n".encode()


def lineage_of(root: str) -> str:
    """Return the lineage of a data directory, cached until its file changes."""
    try:
        status = os.stat(f"{root}/lineage")
    except FileNotFoundError:
        return identity.lineage(root)
    version = status.st_ino, status.st_mtime_ns
    found = _lineages.get(root)
    if found is None or found[0] != version:
        found = _lineages[root] = version, identity.lineage(root)
    return found[1]


_PARSED = re.compile(rb"kmq-idx 2 lineage=([0-9a-f]*) log=(append|[A-Za-z0-9_.-]+/\d{1,4}) base=(\d{1,19})\n")


def relabel(path: str, lineage: str) -> None:
    """Put another lineage into the label of an index; an index without a label stays as it is."""
    with open(path, "rb") as file:
        text = file.read()
    head = read_label(text)
    fields = parse_label(head)
    if fields is not None and fields[0] != lineage:
        replace_file(path, head.replace(fields[0].encode(), lineage.encode(), 1), text[len(head) :])


def parse_label(line: bytes) -> tuple[str, str, int] | None:
    """Return (lineage, log, base) of a label; None if `line` is no label."""
    match = _PARSED.fullmatch(line)
    return (match[1].decode(), match[2].decode(), int(match[3])) if match else None


def read_label(text: bytes) -> bytes:
    """Return the label of an index, with its newline; b"" if it has no label."""
    return text[: text.find(b"\n") + 1] if text.startswith(LABEL) else b""


def parse_line(line: bytes) -> IndexEntry | None:
    """Return an index line as an IndexEntry; None if it is no index line."""
    try:
        offset, position, crc, recv_ts = line.split(b"|")
        record.parse_ts(recv_ts)
        return IndexEntry(int(offset), int(position), int(crc), recv_ts)
    except ValueError:
        return None


def read_entries(path: str, log_size: int) -> list[IndexEntry]:
    """Return the entries in force for a log of `log_size` bytes, in order; [] if there is no index."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return []
    entries: list[IndexEntry] = []
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        entry = parse_line(line)
        if entry is None or entry.position >= log_size:
            continue
        while entries and entries[-1].offset >= entry.offset:
            entries.pop()
        entries.append(entry)
    return entries


def is_whole(path: str) -> bool:
    """Return True if the log at `path` ends where its index says, as a sealed segment must."""
    size = os.stat(path).st_size
    entries = read_entries(path.removesuffix(".log") + ".idx", 1 << 62)
    if not entries or entries[-1].position >= size:
        return False
    with open(path, "rb") as file:
        file.seek(entries[-1].position)
        return zlib.crc32(file.read()) == entries[-1].crc


def last_before(path: str, log_size: int, offset: int) -> tuple[int, int]:
    """Return (offset, byte position) of the last indexed line start at or before `offset`: O(log n) reads."""
    best = (-1, 0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return best
    try:
        low, high = 0, os.fstat(fd).st_size
        while low < high:
            middle = (low + high) // 2
            start, line = _line_at(fd, middle, high)
            entry = parse_line(line)
            if entry is not None and entry.offset <= offset and entry.position < log_size:
                best = max(best, (entry.offset, entry.position))
                low = start + len(line) + 1
            else:
                high = min(middle, start)
    finally:
        os.close(fd)
    return best


def _line_at(fd: int, at: int, end: int) -> tuple[int, bytes]:
    """Return (start, text) of the line that holds byte `at`."""
    window = 256  # an index line is shorter
    base = max(0, at - window)
    data = os.pread(fd, window * 2, base)
    start = data.rfind(b"\n", 0, at - base) + 1
    stop = data.find(b"\n", at - base)
    return base + start, data[start : stop if stop >= 0 else min(len(data), end - base)]


def line_end(data: Buffer, at: int) -> int:
    """Return where the line that holds byte `at` ends, with its newline. In windows: a memoryview has no find."""
    while True:
        found = bytes(data[at : at + _WINDOW]).find(b"\n")
        if found >= 0:
            return at + found + 1
        at += _WINDOW


def _first_fields(data: Buffer, at: int) -> list[bytes]:
    """Return seq and recv_ts of the first record from the line start `at` on, skipping compacted records."""
    while True:
        head = bytes(data[at : at + _HEAD_BYTES])
        record_at = at + len(head) - len(head.lstrip(b"\n"))
        if record_at == at:
            # hot loop: record.stamp would parse the time, which the index takes as it is stored
            return head.split(b"|", 2) if head else [b"0", b"0.000000"]
        at = record_at


def must_have_label(log_path: str, log_fd: int) -> bool:
    """Return True if the index needs a label, by the first seq of its log: a power cut may have taken the label."""
    seq = os.pread(log_fd, _HEAD_BYTES, 0).lstrip(b"\n").split(b"|")[0]
    return bool(label(log_path)) and seq.isdigit() and int(seq) >= identity.labelled_from(log_path)


class IndexWriter:
    """Follows what is appended to one log file and writes its index.

    In memory only: where the open block began, its bytes so far and their crc.
    """

    def __init__(self, path: str, wait_for_room: WaitForRoom, by_seq: bool = False, label_of: str = "") -> None:
        """Write the index at `path`. `by_seq`: offsets are the seqs in the lines (the WAL, where drop_oldest leaves
        gaps).

        `label_of`: path of the log that the index describes, if it is not beside `path`.
        """
        self.path = path
        self._label_of = label_of or path
        self._by_seq = by_seq
        self._wait_for_room = wait_for_room
        self._pending: list[bytes] = []
        self._open: IndexEntry | None = None
        self._length = 0  # bytes of the open block
        self._noted = 0  # of them, bytes that a provisional line covers

    def resume(self, log_fd: int, log_size: int, first_offset: int, check: Callable[[], None] = lambda: None) -> None:
        """Cut what the log no longer holds, and pick up the open block of a log of `log_size` bytes.

        If the index is missing or incomplete, the lines after its last entry are indexed now; `check` is called
        meanwhile.
        """
        entries = read_entries(self.path, log_size)
        self._rewrite_if_damaged(entries, log_size, log_fd)
        self._pending = []  # they may describe bytes that were cut
        self._open, self._length, self._noted = None, 0, 0
        if entries:
            offset, position = entries[-1].offset, entries[-1].position
        else:
            offset, position = first_offset, 0
        length = BLOCK_BYTES * 16
        while position < log_size:
            check()
            data = os.pread(log_fd, min(length, log_size - position), position)
            data = data[: data.rfind(b"\n") + 1]
            if not data:  # one line longer than a read
                if length >= log_size - position:
                    break
                length *= 2
                continue
            # first_seq is not given: after a drop the seqs have gaps
            self.extend(data, position, offset)
            offset += data.count(b"\n")
            position += len(data)
        if not entries:
            self.begin()
        # If the log was cut inside its last block, the crc of the longer block must not stay in force.
        if entries and self._open_line() == entries[-1].line():
            self._noted = self._length
        self.note_open()  # at once, because readers would take the old line, which covers cut bytes, for damage
        self.flush()

    def begin(self) -> None:
        """Write the label before the log has a record, because readers do not trust an index without a label."""
        file = AppendFile(self.path, self._wait_for_room)
        try:
            if not file.size and (head := label(self._label_of)):
                file.append([head], len(head))
        finally:
            file.close()

    def _rewrite_if_damaged(self, entries: list[IndexEntry], log_size: int, log_fd: int) -> None:
        try:
            with open(self.path, "rb") as file:
                text = file.read()
        except FileNotFoundError:
            return
        head = read_label(text)
        on_disk = [parse_line(line) for line in text[len(head) :].splitlines()]
        whole = text.endswith(b"\n") or not text
        needs_label = not head and bool(entries) and must_have_label(self._label_of, log_fd)
        if whole and not needs_label and all(entry is not None and entry.position < log_size for entry in on_disk):
            return
        self._rewrite(label(self._label_of) if needs_label else head, entries)

    def _rewrite(self, head: bytes, entries: list[IndexEntry]) -> None:
        """Rewrite the index as `head` and `entries`; without entries empty it, so that it gets a new label."""
        text = head + b"".join(entry.line() for entry in entries) if entries else b""

        def rewrite() -> None:
            with open(f"{self.path}.new", "wb") as file:
                file.write(text)
            os.rename(f"{self.path}.new", self.path)

        with_room(self.path, self._wait_for_room, rewrite)

    def cut(self, size: int) -> None:
        """Remove the blocks that reach beyond byte `size`, before the log is cut there; call `resume` afterwards."""
        try:
            with open(self.path, "rb") as file:
                head = read_label(file.read(MAX_LABEL))
        except FileNotFoundError:
            head = b""
        self._rewrite(head, read_entries(self.path, size)[:-1])

    @classmethod
    def complete(
        cls, log_path: str, first_offset: int, wait_for_room: WaitForRoom, check: Callable[[], None] = lambda: None
    ) -> None:
        """Complete the index of a sealed log if a crash left it incomplete."""
        if is_whole(log_path):
            return
        fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = cls(log_path.removesuffix(".log") + ".idx", wait_for_room)
            writer.resume(fd, os.fstat(fd).st_size, first_offset, check)
            writer.seal()
        finally:
            os.close(fd)

    def extend(self, data: Buffer, position: int, offset: int, first_seq: int = 0) -> None:
        """Note that `data`, whole lines, now lies at `position` of the log; its first line is record `offset`.

        `first_seq`: if given, the seqs in `data` are consecutive from there, so a line's offset follows from its seq.
        Otherwise lines are counted, each byte once, however many blocks `data` begins.
        """
        at, size = 0, len(data)
        counted, lines = 0, 0
        while at < size:
            if self._open is None:
                fields = _first_fields(data, at)
                if self._by_seq:
                    here = int(fields[0])
                elif first_seq:
                    here = offset + int(fields[0]) - first_seq
                else:
                    lines += bytes(data[counted:at]).count(b"\n")
                    counted = at
                    here = offset + lines
                self._open = IndexEntry(here, position + at, 0, fields[1])
                self._length = self._noted = 0
            want = BLOCK_BYTES - self._length
            end = size if size - at <= want else line_end(data, at + want - 1)
            self._open.crc = zlib.crc32(data[at:end] if at or end < size else data, self._open.crc)
            self._length += end - at
            if self._length >= BLOCK_BYTES:
                self._pending.append(self._open.line())
                self._open = None
            at = end

    def _open_line(self) -> bytes:
        return self._open.line() if self._open is not None else b""

    def note_open(self) -> None:
        """Give the open block a provisional line, if it has grown since the last one."""
        if self._open is not None and self._length > self._noted:
            self._pending.append(self._open.line())
            self._noted = self._length

    @property
    def has_open_news(self) -> bool:
        return self._open is not None and self._length > self._noted

    @property
    def is_behind(self) -> bool:
        """Return True if so many blocks lack their line in the index file that `flush` is due."""
        return len(self._pending) >= _MOST_PENDING

    def seal(self, wait_for_room: WaitForRoom | None = None) -> None:
        """Complete the index of a complete log: each block gets its final line."""
        self.note_open()
        self.flush(wait_for_room)

    def flush(self, wait_for_room: WaitForRoom | None = None) -> None:
        """Write the pending lines; keep them for later if `wait_for_room` gives up."""
        if self._pending:
            text = b"".join(self._pending)
            file = AppendFile(self.path, wait_for_room or self._wait_for_room)
            try:
                if not file.size:
                    text = label(self._label_of) + text
                file.append([text], len(text))
                self._pending = []
            finally:
                file.close()
