"""Healing: each record is on disk twice, in the WAL and in its queue, byte for byte the same.

A record is believed when a block with a right crc holds it, or when both copies say the same. So a damaged stretch of the
WAL is written again from the queues, a stretch of a queue from the WAL, and the index from the data. Where the other copy
is not there (not routed yet, retained, dropped) the crc itself may still tell: which single flipped bit explains it, in the
block or in the index line. The WAL comes first, then the queues from it.

What cannot be healed goes to `quarantine/<segment>.<byte>`, as it was found, and is named in `quarantine/log` by file, byte and
seqs. In a queue each such record leaves a bare newline, as compaction does, so every offset stays; in the WAL, where a
record brings its number, it leaves nothing. The alternative, to leave the block in place and have every reader refuse it for
ever, ends no incident: consumers stand still before it, a router that has to replay over it never starts. So the loss is
told once, by name, the bytes are kept, and the broker goes on.

Owner       the caller holds append/.owner and topics/.owner: the broker is down.
Crash       Each file is written anew, synced, and renamed, the index before its log: whatever is there after a crash, the next
            repair finds the rest of the damage again and heals it the same way.
"""

import heapq
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq import record, routing
from kmq.log import checkpoint, compaction, dropped, identity, reader, segment, topics
from kmq.log.disk import replace_file, sync_directory
from kmq.log.index import Entry, IndexWriter
from kmq.log.reader import bad_line
from kmq.log.segment import LIMITS
from kmq.log.verify import (
    QUARANTINE,
    Directory,
    Part,
    Scan,
    dropped_faults,
    producers_fault,
    scan,
)
from kmq.routing import Topic

_CHUNK = 1 << 20
Lines = dict[int, bytes]  # seq → line with its newline


class Healed(NamedTuple):
    """What was done to a file."""

    path: str
    what: str
    lost: list[tuple[int, int]] = []  # ranges of seqs that could not be healed


class Stretch(NamedTuple):
    """A part of a segment to be written again: records between two good ones."""

    position: int  # bytes of it as they are now
    end: int
    first_seq: int  # the records to be found, at most
    last_seq: int
    parts: list[Part]
    offset: int  # of its first record, in a queue
    records: int  # in a queue; -1: as many as there are
    is_end: bool = False  # of a queue, with nothing behind it


def one_bit(data: bytes, crc: int) -> bytes | None:
    """`data` with the one bit flipped that makes its crc32 right; None where there is no such bit.

    The crc is linear: a flipped bit changes it by a pattern that depends only on how far the bit is from the end. So the
    difference is taken back byte by byte until it is that of one bit.
    """
    table = [zlib.crc32(bytes([n]), 0xFFFFFFFF) ^ 0xFFFFFFFF for n in range(256)]
    back = {value >> 24: n for n, value in enumerate(table)}
    bits = {table[1 << bit]: 1 << bit for bit in range(8)}
    difference = zlib.crc32(data) ^ crc
    for at in range(len(data) - 1, -1, -1):
        if difference in bits:
            return data[:at] + bytes([data[at] ^ bits[difference]]) + data[at + 1 :]
        low = back[difference >> 24]
        difference = ((difference ^ table[low]) << 8 | low) & 0xFFFFFFFF
    return None


def explained(data: bytes, entry: Entry | None) -> bytes | None:
    """The block that `entry` spoke of, if one flipped bit, in it or in the crc of its index line, explains why they differ."""
    if entry is None or not data:
        return None
    found, text = zlib.crc32(data), b"%d" % entry.crc
    for at, bit in ((at, 1 << bit) for at in range(len(text)) for bit in range(8)):
        if text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :] == b"%d" % found and bad_line(data) < 0:
            return data
    mended = one_bit(data, entry.crc)
    return mended if mended is not None and mended.endswith(b"\n") and bad_line(mended) < 0 else None


class Repair:
    """One run over a data directory."""

    def __init__(self, data: str, progress: Callable[[int], None] = lambda _: None) -> None:
        self.data, self._progress = data, progress
        self.directory = Directory(data, is_live=False)
        self.healed: list[Healed] = []
        self._scans: dict[str, Scan] = {}

    def run(self) -> list[Healed]:
        """Heal everything; what was done, file by file."""
        self._small_files()
        self._dropped()
        self._wal()
        for topic, number in self.directory.queues():
            self._queue(topic, number)
        return self.healed

    def _report(self, path: str, what: str, lost: list[tuple[int, int]] | None = None) -> None:
        self.healed.append(Healed(os.path.relpath(path, self.data), what, lost or []))

    def _scan(self, log: reader.Log) -> list[Scan]:
        segments = log.segments()
        found = []
        for number, (first, path) in enumerate(segments):
            if path not in self._scans:
                sealed = number + 1 < len(segments)
                self._scans[path] = scan(first, path, log.by_seq, sealed, self._progress)
            found.append(self._scans[path])
        return found

    # --- the WAL from the queues ---------------------------------------------------------------------------------------

    def _wal(self) -> None:
        log = reader.wal(self.data)
        scans = self._scan(log)
        queues = [reader.partition(self.data, *at) for at in self.directory.queues()]
        routed, rows, _ = self.directory.load_checkpoint()
        had = max([routed, *(row.last_seq for row in rows.values()), *map(self._last_seq, queues)])
        if not scans and had:
            path = f"{self.data}/append/{segment.name(1)}"
            replace_file(path, b"")
            scans = [Scan(path, 1, 0, [], [], 0, 0)]
        for number, found in enumerate(scans):
            is_last = number + 1 == len(scans)
            until = max(had, found.first - 1) if is_last else scans[number + 1].first - 1
            stretches = self._wal_stretches(found, until)
            if stretches or found.wrong or found.unindexed:
                self._rewrite(found, stretches, self._wal_lines, by_seq=True)
                del self._scans[found.path]

    def _last_seq(self, log: reader.Log) -> int:
        return max([0, *(part.last_seq for each in self._scan(log) for part in each.parts)])

    def _wal_stretches(self, found: Scan, until: int) -> list[Stretch]:
        """What of a segment is not good, and what is missing at its end: its records go up to seq `until`."""
        stretches: list[Stretch] = []
        before, bad = found.first - 1, list[Part]()
        for part in [*found.parts, None]:
            if part is not None and not part.is_good:
                bad.append(part)
                continue
            position = part.position if part else found.size - found.torn
            # A damaged digit must not say that there were a million more.
            at_most = before + sum(_bytes(found, each).count(b"\n") for each in bad) + 1
            last = part.first_seq - 1 if part else max(until, self._last_in(found, bad, before, at_most))
            if bad or (last > before and self._unnamed(before + 1, last)):
                start = bad[0].position if bad else position
                stretches.append(Stretch(min(start, found.size), position, before + 1, last, bad, 0, -1))
            before, bad = part.last_seq if part else last, []
        return stretches

    def _last_in(self, found: Scan, bad: list[Part], before: int, at_most: int) -> int:
        """The last seq that a damaged end speaks of, as far as that can be read."""
        own, doubtful = self._own(found, bad, before + 1, 1 << 62)
        return max([before, *own, *(seq for seq in doubtful if seq <= at_most)])

    def _unnamed(self, first: int, last: int) -> list[tuple[int, int]]:
        ranges = [dropped.Range("", a, b) for a, b in self.directory.named_gaps()]
        return dropped.without(first, last, ranges)

    def _wal_lines(self, found: Scan, stretch: Stretch) -> Iterator[tuple[int, bytes | None]]:
        """(seq, line) of the records of a stretch, in order; None for what cannot be healed."""
        own, doubtful = self._own(found, stretch.parts, stretch.first_seq, stretch.last_seq)
        low, high = stretch.first_seq, stretch.last_seq
        logs = [reader.partition(self.data, *at) for at in self.directory.queues()]
        others = heapq.merge(*(self._lines_between(log, low, high) for log in logs))
        found_lines = self._merged(stretch, others, own, doubtful)
        if not stretch.parts:
            yield from found_lines
            return
        lines = list(found_lines)
        agreed = _agreed(stretch, [(seq, line or doubtful.get(seq)) for seq, line in lines])
        yield from ((seq, line or agreed.get(seq)) for seq, line in lines)

    def _merged(
        self, stretch: Stretch, others: Iterator[tuple[int, bytes, bool]], own: Lines, doubtful: Lines
    ) -> Iterator[tuple[int, bytes | None]]:
        following = next(others, None)
        for first, last in self._unnamed(stretch.first_seq, stretch.last_seq):
            for seq in range(first, last + 1):
                line = own.get(seq)
                while following is not None and following[0] <= seq:
                    if following[0] == seq and (following[2] or doubtful.get(seq) == following[1]):
                        line = following[1]
                    following = next(others, None)
                yield seq, line

    def _own(self, found: Scan, parts: list[Part], low: int, high: int) -> tuple[Lines, Lines]:
        """The records low…high in bad parts: those of blocks that their own crc explains, and those that only look good."""
        own: Lines = {}
        doubtful: Lines = {}
        for part in parts:
            data = _bytes(found, part)
            block = explained(data, part.entry)
            for line in (block or data).split(b"\n"):
                stamp = record.parse_stored(line)
                if stamp and low <= stamp[0] <= high:
                    (own if block else doubtful)[stamp[0]] = line + b"\n"
        return own, doubtful

    def _lines_between(self, log: reader.Log, low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """(seq, line, whether its block is good) of the records low…high of a queue, in order."""
        for found in self._scan(log):
            before = 0
            for number, part in enumerate(found.parts):
                if part.is_good and (part.last_seq < low or part.first_seq > high):
                    before = max(before, part.last_seq)
                    continue
                ahead = next((each.first_seq for each in found.parts[number + 1 :] if each.first_seq), 1 << 63)
                if ahead <= low or before >= high:
                    continue
                for line in _bytes(found, part).split(b"\n"):
                    stamp = record.parse_stored(line) if line else None
                    if stamp and before < stamp[0] < ahead:
                        if low <= stamp[0] <= high:
                            yield stamp[0], line + b"\n", part.is_good
                        before = stamp[0]

    # --- a queue from the WAL ------------------------------------------------------------------------------------------

    def _queue(self, topic: str, number: int) -> None:
        log = reader.partition(self.data, topic, number)
        scans = self._scan(log)
        row = self.directory.load_checkpoint()[1].get((topic, number))
        table = self._topics()

        def lines(found: Scan, stretch: Stretch) -> Iterator[tuple[int, bytes | None]]:
            return self._queue_lines(found, stretch, table[topic.encode()], number, table)

        for at in range(len(scans)):
            scans = self._scan(log)  # anew: what has been healed says where what follows begins
            found = scans[at]
            stretches = self._queue_stretches(scans, at, row.last_seq if row else 0)
            if stretches or found.wrong or found.unindexed:
                self._rewrite(found, stretches, lines, by_seq=False)
                del self._scans[found.path]

    def _queue_stretches(self, scans: list[Scan], at: int, had: int) -> list[Stretch]:
        """The same for a queue. `had`: the seq that its last record had by the checkpoint."""
        found, stretches = scans[at], list[Stretch]()
        following = scans[at + 1].first if at + 1 < len(scans) else -1
        before = max([0, *(part.last_seq for each in scans[:at] for part in each.parts)])
        later = next((part.first_seq for each in scans[at + 1 :] for part in each.parts if part.first_seq), 0)
        wal_end = reader.wal(self.data).end_offset() - 1
        offset, bad = found.first, list[Part]()  # of the next record; -1: not known
        for number, part in enumerate([*found.parts, None]):
            if part is not None and not part.is_good:
                bad.append(part)
                continue
            ahead = next((each.first_seq for each in found.parts[number:] if each.first_seq), later)
            if part is None:
                next_offset = following
            else:  # a line of a damaged index is not asked: it would invent records, or lose them
                next_offset = part.entry.offset if part.entry is not None and not found.wrong else -1
            is_short = (
                part is None and not bad and ((offset >= 0 and following > offset) or (following < 0 and had > before))
            )
            if bad or is_short:
                position = part.position if part else found.size - found.torn
                start = min(bad[0].position, found.size) if bad else position
                last = ahead - 1 if ahead else max(had, self._last_in(found, bad, before, wal_end))
                records = next_offset - offset if next_offset >= 0 and offset >= 0 else -1
                stretches.append(Stretch(start, position, before + 1, last, bad, offset, records, not ahead))
                offset = next_offset
            if part is not None:
                offset = offset + part.records if offset >= 0 else -1
                before, bad = part.last_seq or before, []
        return stretches

    def _topics(self) -> dict[bytes, Topic]:
        return {
            name.encode(): Topic(name, partitions, since)
            for name, partitions, since in topics.listing(self.data)
            if since is not None
        }

    def _queue_lines(
        self, found: Scan, stretch: Stretch, topic: Topic, number: int, table: dict[bytes, Topic]
    ) -> Iterator[tuple[int, bytes | None]]:
        own, doubtful = self._own(
            found, stretch.parts, stretch.first_seq, 1 << 62 if stretch.is_end else stretch.last_seq
        )
        wal_end = reader.wal(self.data).end_offset() - 1
        high = wal_end if stretch.is_end else min(stretch.last_seq, wal_end)
        records: Lines = dict(own)
        has = max(stretch.first_seq, reader.first_seq(self.data))
        for first, last in dropped.without(has, high, dropped.read(self.data, "durable")):
            for block in reader.read(self.data, first, last):
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    name, key = routing.resolve(table, line.split(b"|", 3)[2], seq)
                    if name == topic.name.encode() and topic.partition_of(key, seq) == number:
                        records[seq] = line + b"\n"
        seqs = sorted(records)
        if stretch.is_end:
            seqs = self._end(stretch, seqs, records)
        elif stretch.records >= 0:
            # The WAL may have more: of what retention took here, or of a bad end in the next segment.
            at_front = stretch.first_seq == 1 and found.first > 0
            before, behind = _bare_lines(found, stretch)  # the WAL has those as well that compaction took on both sides
            if at_front or has > stretch.first_seq:
                end = max(0, len(seqs) - behind)
                seqs = seqs[max(0, end - stretch.records) : end]
            else:
                seqs = seqs[before : before + stretch.records]
        if stretch.records > len(seqs):
            taken = b"\n" if compaction.is_compacted(self.data, topic.name) else None
            yield from self._with_holes(found, stretch, {seq: records[seq] for seq in seqs}, doubtful, taken)
        else:
            yield from ((seq, records[seq]) for seq in seqs)

    def _with_holes(
        self, found: Scan, stretch: Stretch, records: Lines, doubtful: Lines, taken: bytes | None
    ) -> Iterator[tuple[int, bytes | None]]:
        """The records of a stretch, and a None in the place of each that nobody has.

        `taken`: what stands for a bare newline, which is no loss where compaction left it.
        """
        both = {**doubtful, **records}
        agreed = _agreed(stretch, [(seq, both[seq]) for seq in sorted(both)])
        missing = stretch.records - len({**records, **agreed})
        slots: list[tuple[int, bytes | None]] = []
        for part in stretch.parts:
            for line in _bytes(found, part).split(b"\n")[:-1]:
                stamp = record.parse_stored(line)
                seq = stamp[0] if stamp else 0
                slots.append((seq, records.get(seq) or agreed.get(seq) or (None if line else taken)))
        there = sum(line is not None and line != b"\n" for _, line in slots)
        if len(slots) != stretch.records or there != stretch.records - missing:
            slots = [(0, None)] * missing + [(seq, each) for seq, each in sorted({**records, **agreed}.items())]
        yield from slots

    def _end(self, stretch: Stretch, seqs: list[int], lines: Lines) -> list[int]:
        """Those that the end of a queue had: as far as its index line says, else as far as can be told."""
        entry = stretch.parts[-1].entry if stretch.parts else None
        crc, at = 0, stretch.position
        for count, seq in enumerate(seqs if entry is not None else [], 1):
            if entry is not None and at >= entry.position:
                crc = zlib.crc32(lines[seq], crc)
                if crc == entry.crc:
                    return seqs[:count]
            at += len(lines[seq])
        return [seq for seq in seqs if seq <= stretch.last_seq]

    # --- writing -------------------------------------------------------------------------------------------------------

    def _rewrite(
        self,
        found: Scan,
        stretches: list[Stretch],
        lines: Callable[[Scan, Stretch], Iterator[tuple[int, bytes | None]]],
        by_seq: bool,
    ) -> None:
        """Give a segment its stretches back, and its index."""
        if not stretches and not found.torn:
            self._reindex(found, found.path, by_seq)
            self._report(segment.index_path(found.path), "rebuilt from the log")
            return
        making = f"{found.path}.repaired"
        lost: list[tuple[int, int]] = []
        with open(found.path, "rb") as old, open(making, "wb") as new:
            at = 0
            for stretch in stretches:
                _copy(old, new, at, stretch.position)
                gone: list[int] = []
                for seq, line in lines(found, stretch):
                    if line is not None:
                        new.write(line)
                    else:
                        gone.append(seq)
                        if not by_seq:
                            new.write(b"\n")
                if gone:
                    lost += self._quarantine(found, stretch, gone)
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
        self._report(path, "rebuilt from the log" if is_same else "healed" if not lost else "healed in part", lost)

    def _reindex(self, found: Scan, log_path: str, by_seq: bool) -> None:
        """A new index for what is now in `log_path`."""
        path = segment.index_path(found.path)
        making = f"{path}.repaired"
        if os.path.exists(making):
            os.unlink(making)
        replace_file(making, b"")
        fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = IndexWriter(making, _no_room, by_seq)
            writer.resume(fd, os.fstat(fd).st_size, found.first)
            writer.seal()
        finally:
            os.close(fd)
        with open(making, "rb") as file:
            os.fsync(file.fileno())
        os.rename(making, path)

    def _quarantine(self, found: Scan, stretch: Stretch, gone: list[int]) -> list[tuple[int, int]]:
        """Keep the bytes of a stretch that could not be healed, and name its records."""
        name = os.path.relpath(found.path, self.data)
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        with open(found.path, "rb") as file:
            file.seek(stretch.position)
            kept = file.read(stretch.end - stretch.position)
        replace_file(f"{self.data}/{QUARANTINE}/{name.replace('/', '.')}.{stretch.position}", kept)
        ranges = _ranges(gone) if all(gone) else [(stretch.first_seq, stretch.last_seq)]
        stamp = record.format_ts(time.time_ns() // 1000).decode()
        rows = [
            f"{name}|{stretch.position}|{a}|{b}|{b - a + 1 if all(gone) else len(gone)}|{stamp}\n" for a, b in ranges
        ]
        path = f"{self.data}/{QUARANTINE}/log"
        before = _text(path)
        replace_file(path, (before + "".join(row for row in rows if row.rpartition("|")[0] not in before)).encode())
        return ranges

    # --- small files ---------------------------------------------------------------------------------------------------

    def _small_files(self) -> None:
        data = self.data
        if not re.fullmatch(r"\d+\n", _text(f"{data}/format")):  # a number may be that of another version
            replace_file(f"{data}/format", identity.FORMAT.encode() + b"\n")
            self._report(f"{data}/format", "written again")
        if not re.fullmatch(r"[0-9a-f]{32}\n", _text(f"{data}/id")):
            replace_file(f"{data}/id", os.urandom(16).hex().encode() + b"\n")
            self._report(
                f"{data}/id", "a new id: rings that are left in shared memory are not this directory's any more"
            )
        try:
            checkpoint.load(data)
        except (ValueError, LookupError):
            self._set_aside("router.ckpt", "the next start finds out by the queues and the WAL")
        if producers_fault(data):
            oldest = reader.first_seq(data)
            forgotten = f"; who stored something before seq {oldest} is forgotten" if oldest > 1 else ""
            self._set_aside("producers.ckpt", f"the next start reads the whole WAL instead{forgotten}")
        since = self.directory.load_checkpoint()[2]
        for name in topics.names(data):
            if topics.fault(data, name, since.get(name)):
                self._topic(name, since.get(name))

    def _set_aside(self, name: str, what: str) -> None:
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        os.rename(f"{self.data}/{name}", f"{self.data}/{QUARANTINE}/{name}")
        sync_directory(self.data)
        self._report(f"{self.data}/{name}", what)

    def _topic(self, name: str, since: int | None) -> None:
        """A declaration from its partitions, the checkpoint, and what can still be read of it."""
        path = topics.toml_path(self.data, name)
        text = _text(path)
        found = sum(entry.isdigit() for entry in os.listdir(f"{self.data}/topics/{name}"))
        if since is None:
            line = re.search(r"(?m)^from_seq = (\d+)\n", text)
            since = int(line[1]) if line else self._first_seq(name, found)
        limits = dict(re.findall(rf'(?m)^({"|".join(LIMITS)}) = "?([\w ]+?)"?$', text))
        replace_file(path, topics.Declaration(max(1, found), since, limits).text())
        self._report(path, f"partitions = {max(1, found)}, from_seq = {since}")

    def _first_seq(self, name: str, partitions: int) -> int:
        heads = [reader.partition(self.data, name, number).find(0, 0) for number in range(partitions)]
        return min([record.seq_of(line) for *_, line in heads if line], default=1)

    def _dropped(self) -> None:
        """A line of dropped.log from two of its three numbers: those that name what really is missing."""
        path = f"{self.data}/dropped.log"
        faults = dict(dropped_faults(self.data))
        if not faults:
            return
        with open(path, "rb") as file:
            text = file.read()
        lines, at = [], 0
        for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
            if at not in faults:
                lines.append(line)
            elif (mended := self._range(line)) is not None:
                lines.append(mended)
            at += len(line) + 1
        self._set_aside("dropped.log", "mended by what is missing")
        replace_file(path, b"".join(line + b"\n" for line in lines))

    def _range(self, line: bytes) -> bytes | None:
        numbers = [int(each) for each in re.findall(rb"(?<=\|)\d+(?=\|)", line)]
        candidates = {(a, b) for a in numbers for b in numbers if a <= b}
        candidates |= {(a, a + n - 1) for a in numbers for n in numbers} | {
            (b - n + 1, b) for b in numbers for n in numbers
        }
        for ring, logs in (
            ("framed", [reader.wal(self.data)]),
            ("durable", [reader.partition(self.data, *at) for at in self.directory.queues()]),
        ):
            for first, last in sorted(candidates, key=lambda each: each[0] - each[1]):
                if 0 < first <= last and self._is_gap(logs, first, last):
                    stamp = re.search(rb"\d+\.\d{6}$", line)
                    when = stamp[0] if stamp else record.format_ts(time.time_ns() // 1000)
                    return b"%b|%d|%d|%d|%b" % (ring.encode(), first, last, last - first + 1, when)
        return None

    def _is_gap(self, logs: list[reader.Log], first: int, last: int) -> bool:
        """Whether first…last are missing, and no more than they."""
        try:
            after = [record.seq_of(found[3]) for log in logs if (found := log.find(first, 0))[3]]
            before = [record.seq_of(found[3]) for log in logs if (found := log.find(first - 1, 0))[3]]
        except reader.DamageError:
            return False
        return min(after, default=last + 1) == last + 1 and (first == 1 or min(before, default=0) == first - 1)


def _agreed(stretch: Stretch, lines: list[tuple[int, bytes | None]]) -> Lines:
    """Those of `lines`, the whole stretch as far as anybody can tell, that lie in blocks whose crc is right so."""
    agreed: Lines = {}
    for part in stretch.parts:
        at, crc, inside = stretch.position, 0, Lines()
        for seq, line in lines:
            if line is None:
                break
            if part.position <= at < part.end:
                crc = zlib.crc32(line, crc)
                inside[seq] = line
            at += len(line)
        if part.entry is not None and crc == part.entry.crc:
            agreed.update(inside)
    return agreed


def _bare_lines(found: Scan, stretch: Stretch) -> tuple[int, int]:
    """How many bare newlines lie right before a stretch, and right behind it; compaction leaves a segment's ends as they are."""
    before = behind = 0
    with open(found.path, "rb") as file:
        at = stretch.position
        while at > 1 and os.pread(file.fileno(), 2, at - 2) == b"\n\n":
            before, at = before + 1, at - 1
        while os.pread(file.fileno(), 1, stretch.end + behind) == b"\n":
            behind += 1
    return before, behind


def _no_room(path: str) -> None:
    raise OSError(f"{path}: no room on the disk; nothing was changed")


def _bytes(found: Scan, part: Part) -> bytes:
    with open(found.path, "rb") as file:
        file.seek(part.position)
        return file.read(part.end - part.position)


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _copy(old, new, start: int, end: int) -> None:  # type: ignore[no-untyped-def]
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


def _ranges(seqs: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for seq in seqs:
        if ranges and ranges[-1][1] + 1 == seq:
            ranges[-1] = ranges[-1][0], seq
        else:
            ranges.append((seq, seq))
    return ranges
