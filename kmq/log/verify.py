"""Is everything on disk as it was written? What `kmq verify` looks at, and what `--repair` starts from.

Every segment of the WAL and of the queues, block by block: its crc, its index line, the syntax of its lines, seqs (without
a gap in the WAL but for those that have a name, rising in a queue), offsets from segment to segment, the end of the WAL
against what queues and checkpoints say was there. Then the small files. Read-only; on a live directory what is being
written meanwhile is tolerated: an index that is behind, a torn end.

A finding names the file, the byte and the seqs. Harmless ones (a torn end that the next start cuts, an index that a start
completes) are notes and no damage.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kmq import record
from kmq.log import checkpoint, dropped, identity, producers, reader, segment, topics
from kmq.log.index import Entry, parse_line
from kmq.log.reader import Log, Segment, bad_line, seqs_of

_CHUNK = 1 << 20
QUARANTINE = "quarantine"  # directory of what could not be healed; its `log`: file|byte|first_seq|last_seq|count|ts


class Finding(NamedTuple):
    """Something that is not as it was written: bytes from `byte` on of `path` (under the data directory)."""

    path: str
    byte: int
    first_seq: int  # 0: no record's
    last_seq: int
    what: str
    is_damage: bool = True

    def __str__(self) -> str:
        seqs = f"seq {self.first_seq} to {self.last_seq}: " if self.first_seq else ""
        return f"{self.path}: byte {self.byte}: {seqs}{self.what}"


class Part(NamedTuple):
    """A stretch of a segment, one block of its index or what the index does not speak of."""

    position: int
    end: int
    is_good: bool
    first_seq: int  # of a good one; 0 where it has no record
    last_seq: int
    records: int  # of a good one, with those that compaction took
    what: str = ""
    entry: Entry | None = None  # its index line


class Scan(NamedTuple):
    """What was found in one segment."""

    path: str
    first: int  # by its name
    size: int
    parts: list[Part]  # in order, without a hole; they may reach beyond `size` where the log has been cut
    wrong: list[tuple[int, str]]  # (byte, what) of each line of its index that is
    torn: int  # bytes of a torn end
    unindexed: int  # good bytes that the index does not speak of


def scan(first: int, path: str, by_seq: bool, sealed: bool, progress: Callable[[int], None] = lambda _: None) -> Scan:
    """Look at every byte of a segment."""
    with Segment(path, first, by_seq, sealed) as held:
        entries, wrong = _entries(held)
        found = Scan(path, first, held.size, [], wrong, 0, 0)
        if entries and entries[0][1].offset != first and not by_seq:
            wrong.append((entries[0][0], f"does not begin with record {first}"))
        end = 0
        for number, (at, entry) in enumerate(entries):
            if entry.position != end:
                found.parts.append(Part(end, entry.position, False, 0, 0, 0, "no index line for it"))
            following = entries[number + 1][1] if number + 1 < len(entries) else None
            part = _block(held, entry, following, found, at)
            found.parts.append(part)
            end = part.end
            progress(part.end - part.position)
        return _rest(held, end, found, progress)


def _entries(held: Segment) -> tuple[list[tuple[int, Entry]], list[tuple[int, str]]]:
    """((byte, entry) of the index lines in force, in order; (byte, what) of those that make no sense)."""
    with open(held.index.path, "rb") if held.index.fd >= 0 else open(os.devnull, "rb") as file:
        text = file.read()
    kept: list[tuple[int, Entry]] = []
    wrong: list[tuple[int, str]] = []
    at = 0
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        entry = parse_line(line)
        if entry is None:
            wrong.append((at, "not an index line"))
        else:
            here = at, entry
            if kept and not _follows(kept[-1][1], entry):
                # One of the two has been damaged: the one that does not fit between its neighbours.
                if len(kept) == 1 or _follows(kept[-2][1], entry):
                    wrong.append((kept.pop()[0], "does not fit between its neighbours"))
                else:
                    wrong.append((at, "does not follow from the line before it"))
                    at += len(line) + 1
                    continue
            if kept and kept[-1][1].offset == entry.offset:
                kept.pop()  # provisional
            kept.append(here)
        at += len(line) + 1
    if text[at:].strip(b"0123456789.|"):  # else a line that is being written, or torn by a kill
        wrong.append((at, "not an index line"))
    return kept, wrong


def _follows(before: Entry, entry: Entry) -> bool:
    up = (entry.offset > before.offset) == (entry.position > before.position)
    return up and entry.offset >= before.offset and entry.position >= before.position


def _block(held: Segment, entry: Entry, following: Entry | None, found: Scan, at: int) -> Part:
    """The block of an index line."""
    if following is not None:
        end = following.position
    else:
        try:
            end = held.covered(entry)
        except reader.DamageError as err:
            end = max(err.end, entry.position)
            if b"\n" not in os.pread(held.fd, _CHUNK, end):  # its last newline may be what has been damaged
                end = max(end, held.size)
            return Part(entry.position, end, False, 0, 0, 0, err.what, entry)
    data = os.pread(held.fd, max(0, min(end, held.size) - entry.position), entry.position)
    if zlib.crc32(data) != entry.crc or len(data) < end - entry.position:
        return Part(entry.position, end, False, 0, 0, 0, _where(data, entry.position), entry)
    bad = bad_line(data)
    if bad >= 0:  # the crc is right: it was written so
        what = f"byte {entry.position + bad}: not a stored line in order of seq"
        return Part(entry.position, end, False, 0, 0, 0, what, entry)
    seqs = seqs_of(data)
    what = held.fault(entry, data, following.offset if following else 0)
    if what:
        found.wrong.append((at, what))
    return Part(
        entry.position, end, True, seqs[0] if seqs else 0, seqs[-1] if seqs else 0, data.count(b"\n"), "", entry
    )


def _where(data: bytes, position: int) -> str:
    """What is wrong with a block whose crc is: the line, where its syntax tells."""
    bad = bad_line(data) if data else -1
    return f"crc mismatch, and byte {position + bad} begins no stored line" if bad >= 0 else "crc mismatch"


def _rest(held: Segment, end: int, found: Scan, progress: Callable[[int], None]) -> Scan:
    """What the index does not speak of, from byte `end` on."""
    unindexed = torn = 0
    want, after = _CHUNK, max([0, *(part.last_seq for part in found.parts)])
    while end < held.size:
        data = os.pread(held.fd, min(want, held.size - end), end)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and want < held.size - end:
            want *= 2
            continue
        bad = bad_line(whole, after)
        good = whole[:bad] if bad >= 0 else whole
        if good:
            seqs = seqs_of(good) or [0]
            found.parts.append(Part(end, end + len(good), True, seqs[0], seqs[-1], good.count(b"\n")))
            after = max(after, seqs[-1])
            unindexed += len(good)
            end += len(good)
            progress(len(good))
        if bad >= 0 or not whole:
            rest = os.pread(held.fd, held.size - end, end)
            if held.sealed or _holds_records(rest):
                found.parts.append(Part(end, held.size, False, 0, 0, 0, "not a stored line in order of seq"))
            else:
                torn = held.size - end
            break
    return found._replace(torn=torn, unindexed=unindexed)


def _holds_records(rest: bytes) -> bool:
    """Whether good lines follow a bad place, which is no torn end then."""
    return any(record.parse_stored(line) for line in rest.rstrip(b"\0").split(b"\n")[1:-1])


class Directory:
    """A data directory and what is wrong with it."""

    def __init__(self, data: str, is_live: bool, progress: Callable[[int], None] = lambda _: None) -> None:
        self.data, self.is_live, self._progress = data, is_live, progress
        self._named: list[tuple[int, int]] | None = None

    # --- what is there -----------------------------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """(topic, partition) of all partition logs."""
        found = []
        for name in topics.names(self.data):
            numbers = [entry for entry in os.listdir(f"{self.data}/topics/{name}") if entry.isdigit()]
            found += [(name, int(number)) for number in sorted(numbers, key=int)]
        return found

    def total_bytes(self, logs: list[Log]) -> int:
        return sum(each.size for log in logs for each in segment.survey(log.directory))

    def named_gaps(self) -> list[tuple[int, int]]:
        """Ranges of seqs that the WAL need not have: dropped by name, or lost and reported as such."""
        if self._named is None:
            lines = [line for line in _read(f"{self.data}/dropped.log").split(b"\n")[:-1] if dropped.is_range(line)]
            gone = [line.split(b"|") for line in lines if line.startswith(b"framed|")]
            self._named = sorted([*((int(row[1]), int(row[2])) for row in gone), *quarantined(self.data)])
        return self._named

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.data)

    # --- logs --------------------------------------------------------------------------------------------------------

    def log(self, log: Log) -> Iterator[tuple[Scan, list[Finding]]]:
        """Each segment of a log with what is wrong in it."""
        segments = log.segments()
        before, counted = 0, -1  # last seq so far, offset that comes next (-1: not known)
        for number, (first, path) in enumerate(segments):
            sealed = number + 1 < len(segments)
            try:
                found = scan(first, path, log.by_seq, sealed, self._progress)
            except FileNotFoundError:  # retention was faster
                continue
            findings = list(self._of_parts(found, log.by_seq, before))
            findings += [self._index_finding(found, at, what) for at, what in found.wrong]
            if found.torn and not self.is_live:
                what = "a torn end, which the next start cuts"
                findings.append(Finding(self.relative(path), found.size - found.torn, 0, 0, what, False))
            if found.unindexed and (sealed or not self.is_live):
                what = f"{found.unindexed} bytes of the log are not in it"
                findings.append(Finding(self.relative(segment.index_path(path)), 0, 0, 0, what, sealed))
            good = all(part.is_good for part in found.parts)
            if not log.by_seq and counted >= 0 and first != counted:
                findings.append(Finding(self.relative(path), 0, 0, 0, f"begins with offset {first}, not {counted}"))
            counted = first + sum(part.records for part in found.parts) if good else -1
            before = max([before, *(part.last_seq for part in found.parts)])
            yield found, findings

    def _of_parts(self, found: Scan, by_seq: bool, before: int) -> Iterator[Finding]:
        path = self.relative(found.path)
        if by_seq and found.first > before + 1 and before:
            yield from self._gaps(path, 0, before + 1, found.first - 1)
        before = max(before, found.first - 1) if by_seq else before
        is_after_bad = False
        for number, part in enumerate(found.parts):
            if not part.is_good:
                ahead = next((each.first_seq for each in found.parts[number + 1 :] if each.first_seq), 0)
                yield Finding(path, part.position, before + 1, max(ahead - 1, before + 1) if ahead else 0, part.what)
            elif part.first_seq:
                if part.first_seq <= before:
                    yield Finding(path, part.position, part.first_seq, part.last_seq, f"follows seq {before}")
                elif by_seq and not is_after_bad and part.first_seq > before + 1:
                    yield from self._gaps(path, part.position, before + 1, part.first_seq - 1)
                if by_seq and part.last_seq - part.first_seq + 1 != part.records:
                    yield from self._gaps_within(path, found, part)
                before = part.last_seq
            is_after_bad = not part.is_good

    def _gaps_within(self, path: str, found: Scan, part: Part) -> Iterator[Finding]:
        with open(found.path, "rb") as file:
            file.seek(part.position)
            seqs = seqs_of(file.read(part.end - part.position))
        for a, b in pairwise(seqs):
            if b > a + 1:
                yield from self._gaps(path, part.position, a + 1, b - 1)

    def _gaps(self, path: str, byte: int, first: int, last: int) -> Iterator[Finding]:
        """Seqs that the WAL lacks and nobody has named."""
        ranges = [dropped.Range("", a, b) for a, b in self.named_gaps()]
        for low, high in dropped.without(first, last, ranges):
            yield Finding(path, byte, low, high, "missing, and not named in dropped.log")

    def _index_finding(self, found: Scan, at: int, what: str) -> Finding:
        return Finding(self.relative(segment.index_path(found.path)), at, 0, 0, what)

    # --- what they say of each other ---------------------------------------------------------------------------------

    def load_checkpoint(self) -> tuple[int, checkpoint.Rows, dict[str, int]]:
        try:
            return checkpoint.load(self.data)
        except (ValueError, LookupError):
            return 0, {}, {}

    def ends(
        self, routed: int, rows: checkpoint.Rows, queue_ends: dict[tuple[str, int], int], wal_end: int
    ) -> Iterator[Finding]:
        """The end of the WAL against queues and checkpoint; of the queues against the checkpoint. `…end`: last seqs."""
        segments = reader.wal(self.data).segments()
        active = self.relative(segments[-1][1]) if segments else "append"
        size = os.stat(f"{self.data}/{active}").st_size
        had = max([routed, *queue_ends.values()])
        named = [dropped.Range("", a, b) for a, b in self.named_gaps()]
        for low, high in dropped.without(wal_end + 1, had, named):
            yield Finding(active, size, low, high, "cut off: the queues or router.ckpt have had it")
        for (topic, number), row in rows.items():
            has = queue_ends.get((topic, number), 0)
            if has < row.last_seq:
                path = f"topics/{topic}/{number}"
                yield Finding(path, 0, has + 1, row.last_seq, "cut off or missing: router.ckpt has had it")

    # --- small files -------------------------------------------------------------------------------------------------

    def small_files(self) -> Iterator[Finding]:
        """id, format, topic.toml, checkpoints, dropped.log."""
        text = _read(f"{self.data}/format").decode(errors="replace")
        if re.fullmatch(r"\d+\n", text) and text != f"{identity.FORMAT}\n":
            what = f"says {text.strip()}: damaged, or of another version; if this one wrote it, write {identity.FORMAT} there"
            yield Finding("format", 0, 0, 0, what)
        elif text != f"{identity.FORMAT}\n":
            yield Finding("format", 0, 0, 0, f"holds {text[:40]!r}")
        text = _read(f"{self.data}/id").decode(errors="replace")
        if not re.fullmatch(r"[0-9a-f]{32}\n", text):
            yield Finding("id", 0, 0, 0, f"holds {text[:40]!r}")
        since = self.load_checkpoint()[2]
        for topic in topics.names(self.data):
            what = topics.fault(self.data, topic, since.get(topic))
            if what:
                yield Finding(f"topics/{topic}/topic.toml", 0, 0, 0, what)
        try:
            checkpoint.load(self.data)
        except (ValueError, LookupError) as err:
            yield Finding("router.ckpt", 0, 0, 0, f"cannot be read: {err}")
        what = producers_fault(self.data)
        if what:
            yield Finding("producers.ckpt", 0, 0, 0, what)
        for at, line in dropped_faults(self.data):
            yield Finding("dropped.log", at, 0, 0, f"not a range: {line[:60]!r}")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def producers_fault(data: str) -> str:
    """Why producers.ckpt cannot be used, if it cannot."""
    return producers.Producers(1 << 62, float("inf"), 1 << 62, float("inf")).load(data, 1 << 62)[1]


def dropped_faults(data: str) -> list[tuple[int, bytes]]:
    """(byte, line) of the lines of dropped.log that are not one; a torn last line is none."""
    text, at, found = _read(f"{data}/dropped.log"), 0, []
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if not dropped.is_range(line):
            found.append((at, line))
        at += len(line) + 1
    return found


def quarantined(data: str) -> list[tuple[int, int]]:
    """(first seq, last seq) of what the WAL lost for good."""
    rows = [line.split(b"|") for line in _read(f"{data}/{QUARANTINE}/log").splitlines()]
    return [(int(row[2]), int(row[3])) for row in rows if row[0].startswith(b"append/")]


def verify(directory: Directory, only: list[str]) -> Iterator[Finding]:
    """Everything that is wrong, or only what concerns these topics (`append`: the WAL)."""
    queue_ends: dict[tuple[str, int], int] = {}
    routed, rows, _ = directory.load_checkpoint()
    for topic, number in directory.queues():  # before the WAL, which is ahead of them
        if only and topic not in only:
            continue
        queue_ends[topic, number] = 0
        for found, findings in directory.log(reader.partition(directory.data, topic, number)):
            yield from findings
            queue_ends[topic, number] = max([queue_ends[topic, number], *(part.last_seq for part in found.parts)])
    wal_end = 0
    if not only or "append" in only:
        for found, findings in directory.log(reader.wal(directory.data)):
            yield from findings
            wal_end = max([wal_end, found.first - 1, *(part.last_seq for part in found.parts)])
    if not only:
        yield from directory.ends(routed, rows, queue_ends, wal_end)
        yield from directory.small_files()
