"""Is everything on disk as it was written? What `kmq verify` looks at, and what `--repair` starts from.

Every segment of the WAL and of the queues, block by block: whether it is the segment that its place says, its crc, its index
line, the syntax of its lines, seqs (without a gap in the WAL but for those that have a name, rising in a queue), offsets from
segment to segment, the end of the WAL against what queues and checkpoints say was there. Then the two copies of each record
against one another, and the small files. Read-only; on a live directory what is being written meanwhile is tolerated: an index
that is behind, a torn end.

A finding names the file, the byte and the seqs. Harmless ones (a torn end that the next start cuts, an index that a start
completes) are notes and no damage.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kmq.log import checkpoint, dedupe_file, deletions, dropped, identity, index, reader, segment, topics
from kmq.log.reader import Log, seqs_of
from kmq.repair import copies
from kmq.repair.scan import Part, Scan, scan


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


class Directory:
    """A data directory and what is wrong with it."""

    def __init__(self, data: str, is_live: bool, progress: Callable[[int], None] = lambda _: None) -> None:
        self.data, self.is_live, self._progress = data, is_live, progress
        self._named: dict[str, list[dropped.Range]] = {}  # by ring

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

    def named_gaps(self, ring: str = "framed") -> list[dropped.Range]:
        """Ranges of seqs that the WAL (of the ring durable: a queue) need not have, in order: dropped by name, or lost for good.

        What is damaged in dropped.log names nothing.
        """
        found = self._named.get(ring)
        if found is None:
            lines = [line for line in _read(f"{self.data}/dropped.log").split(b"\n")[:-1] if dropped.is_range(line)]
            rows = [line.split(b"|") for line in lines if line.startswith(ring.encode())]
            lost = dropped.quarantined(self.data, "append/" if ring == "framed" else "topics/")
            every = [*(dropped.Range(ring, int(row[1]), int(row[2])) for row in rows), *lost]
            found = self._named[ring] = sorted(every, key=lambda gone: gone.first)
        return found

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
            if found.misplaced:
                yield found, [Finding(self.relative(path), 0, 0, 0, found.misplaced)]
                counted = -1
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
        for low, high in dropped.without(first, last, self.named_gaps()):
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
        had = max([routed, deletions.last_seq(self.data), *queue_ends.values()])
        for low, high in dropped.without(wal_end + 1, had, self.named_gaps()):
            yield Finding(active, size, low, high, "cut off: the queues, router.ckpt or deletions have had it")
        still = self.load_checkpoint()[1].keys()  # a topic may have been deleted meanwhile
        for (topic, number), row in rows.items():
            if (topic, number) not in still:
                continue
            has = queue_ends.get((topic, number), 0)
            if has < row.last_seq:
                path = f"topics/{topic}/{number}"
                yield Finding(path, 0, has + 1, row.last_seq, "cut off or missing: router.ckpt has had it")

    def copies(self, routed: int, wal_end: int, damaged: set[tuple[str, int]]) -> Iterator[Finding]:
        """The two copies of each record against one another; what is missing in `damaged` queues has been said."""
        counts: dict[tuple[str, str, int], tuple[int, int, int]] = {}
        upto = routed if self.is_live else wal_end
        gone = self.named_gaps("durable")
        for each in copies.Copies(self.data, upto, gone, self.is_live, self._progress).differences(routed):
            key = each.kind, each.topic, each.partition
            first, last, count = counts.get(key, (each.seq, each.seq, 0))
            counts[key] = min(first, each.seq), max(last, each.seq), count + 1
        for (kind, topic, partition), (first, last, count) in counts.items():
            if kind != "missing" or (topic, partition) not in damaged:
                what = f"{count} records: {copies.WHAT[kind]}"
                yield Finding(f"topics/{topic}/{partition}", 0, first, last, what)

    # --- small files -------------------------------------------------------------------------------------------------

    def small_files(self) -> Iterator[Finding]:
        """id, format, topic.toml, checkpoints, dropped.log."""
        if identity.version(self.data) is None:
            text = _read(f"{self.data}/format").decode(errors="replace")
            what = f"holds {text[:40]!r}"
            if re.fullmatch(r"\d+[ \n].*", text):
                what = (
                    f"says {text.strip()!r}: damaged, or of another version; if this one wrote it: kmq verify --repair"
                )
            yield Finding("format", 0, 0, 0, what)
        labels = label_lineages(self.data).most_common(1)
        for name in ("id", "lineage"):
            if name == "lineage" and not identity.is_newest(self.data) and not os.path.exists(f"{self.data}/{name}"):
                continue  # there was none in version 1
            text = _read(f"{self.data}/{name}").decode(errors="replace")
            if not re.fullmatch(r"[0-9a-f]{32}\n", text):
                yield Finding(name, 0, 0, 0, f"holds {text[:40]!r}")
            elif name == "lineage" and labels and labels[0][0] not in ("", text.strip()):
                yield Finding(name, 0, 0, 0, f"names {text.strip()}, but most indexes name {labels[0][0]}")
        for name in topics.misnamed(self.data):
            yield Finding(f"topics/{topics.printable(name)}", 0, 0, 0, "is not a topic's name")
        since = self.load_checkpoint()[2]
        for topic in topics.names(self.data):
            what = topics.fault(self.data, topic, since.get(topic))
            if what:
                yield Finding(f"topics/{topic}/topic.toml", 0, 0, 0, what)
        try:
            checkpoint.load(self.data)
        except (ValueError, LookupError) as err:
            yield Finding("router.ckpt", 0, 0, 0, f"cannot be read: {err}")
        for name, what in deletions.faults(self.data).items():
            yield Finding(name, 0, 0, 0, what, not self.is_live)
        what = dedupe_file.fault(self.data)
        if what:
            yield Finding("producers.ckpt", 0, 0, 0, what)
        for at, line in dropped_faults(self.data):
            yield Finding("dropped.log", at, 0, 0, f"not a range: {line[:60]!r}")


def _read(path: str, nbytes: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except FileNotFoundError:
        return b""


def label_lineages(data: str) -> Counter[str]:
    """How many indexes name which lineage; "": how many that hold something name none."""
    found: Counter[str] = Counter()
    logs = [reader.wal(data), *(reader.partition(data, *at) for at in Directory(data, False).queues())]
    for path in (path for log in logs for _, path in log.segments()):
        text = _read(segment.index_path(path), index.MAX_LABEL)
        fields = index.parse_label(index.read_label(text))
        if fields or text:
            found[fields[0] if fields else ""] += 1
    return found


def dropped_faults(data: str) -> list[tuple[int, bytes]]:
    """(byte, line) of the lines of dropped.log that are not one; a torn last line is none."""
    text, at, found = _read(f"{data}/dropped.log"), 0, []
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if not dropped.is_range(line):
            found.append((at, line))
        at += len(line) + 1
    return found


def verify(directory: Directory, only: list[str]) -> Iterator[Finding]:
    """Everything that is wrong, or only what concerns these topics (`append`: the WAL)."""
    queue_ends: dict[tuple[str, int], int] = {}
    damaged: set[tuple[str, int]] = set()
    routed, rows, _ = directory.load_checkpoint()
    for at in directory.queues():  # before the WAL, which is ahead of them
        if only and at[0] not in only:
            continue
        queue_ends[at] = 0
        for found, findings in directory.log(reader.partition(directory.data, *at)):
            yield from findings
            damaged |= {at for each in findings if each.is_damage}
            queue_ends[at] = max([queue_ends[at], *(part.last_seq for part in found.parts)])
    wal_end = 0
    if not only or "append" in only:
        for found, findings in directory.log(reader.wal(directory.data)):
            yield from findings
            wal_end = max([wal_end, found.first - 1, *(part.last_seq for part in found.parts)])
    if not only:
        ends = list(directory.ends(routed, rows, queue_ends, wal_end))
        yield from ends
        damaged |= {at for at in queue_ends if any(each.path == f"topics/{at[0]}/{at[1]}" for each in ends)}
        yield from directory.copies(routed, wal_end, damaged)
        yield from directory.small_files()
