"""Queues from the WAL, which has been healed by now.

What of a queue is not good is written again from the WAL: its records between the good ones on both sides. Offsets
stay, so each record that nobody has leaves a bare newline, as compaction does. What no index line speaks of is compared
with the WAL, record by record; where retention has taken the WAL's copy, it is kept as it is, and said to have no
second witness.
"""

import os
import zlib
from collections.abc import Iterator

from kmq import record, routing
from kmq.log import compaction, deletions, dropped, reader, segment, topics
from kmq.log.disk import replace_file
from kmq.log.partition import EMPTY, State, directory_of
from kmq.repair.evidence import Evidence, agreed, bytes_of
from kmq.repair.evidence import Lines as Records
from kmq.repair.rewriting import Line, Rewriter, Stretch
from kmq.repair.scan import Part, Scan
from kmq.repair.verify import Directory
from kmq.routing import Topic


class QueueHealer:
    """One partition."""

    def __init__(self, directory: Directory, rewriter: Rewriter, topic: str, number: int) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self.number = number
        self.log = reader.partition(self.data, topic, number)
        self.table = topics.table(self.data)
        self.topic = self.table.get(topic.encode()) or Topic(topic, 1, 1)
        self.wal_first, self.wal_end = reader.first_seq(self.data), reader.wal(self.data).end_offset() - 1

    def heal(self) -> None:
        row = self.directory.load_checkpoint()[1].get((self.topic.name, self.number))
        self._make_front(row)
        for at in range(len(self.rewriter.scan(self.log))):
            scans = self.rewriter.scan(self.log)  # anew: what has been healed says where what follows begins
            scans[at], unwitnessed = self._compared(scans[at])
            found = scans[at]
            stretches = self._stretches(scans, at, row or EMPTY)
            if stretches or found.wrong or found.unindexed:
                self.rewriter.rewrite(found, stretches, self._lines, by_seq=False, unwitnessed=unwitnessed)

    def _make_front(self, row: State | None) -> None:
        """Where the first segments are missing, one to be filled. `row`: what the checkpoint says of the queue."""
        segments = self.log.segments()
        has_rest = self.wal_first <= self.topic.from_seq  # else retention may have taken them here, too
        begins = deletions.Deleted.of(self.data).first_offset(self.topic.name, self.number)
        start = row.start if row else begins if has_rest or not segments else segments[0][0]
        if (segments and segments[0][0] > start) or (not segments and row and row.end_offset > start):
            replace_file(f"{directory_of(self.data, self.topic.name, self.number)}/{segment.name(start)}", b"")

    def _compared(self, found: Scan) -> tuple[Scan, list[int]]:
        """What no index line speaks of, compared with the WAL: good where it says the same, else to be written again.

        Also the seqs for which there is no WAL any more.
        """
        parts: list[Part] = []
        alone: list[int] = []
        taken_may_lack = compaction.is_compacted(self.data, self.topic.name)
        for part in found.parts:
            if part.is_good and part.entry is None and part.first_seq:
                ours = Evidence(found, [part], 1, 1 << 62).unindexed
                theirs = self._from_wal(max(part.first_seq, self.wal_first), min(part.last_seq, self.wal_end))
                alone += [seq for seq in ours if seq < self.wal_first]
                both = {seq: line for seq, line in ours.items() if seq >= self.wal_first}
                is_same = both.items() <= theirs.items() and (taken_may_lack or len(both) == len(theirs))
                part = part if is_same else part._replace(is_good=False)
            parts.append(part)
        return found._replace(parts=parts), alone

    def _stretches(self, scans: list[Scan], at: int, row: State) -> list[Stretch]:
        """What of a segment has to be written again. `row`: what the queue held by the checkpoint."""
        had = row.last_seq
        found, stretches = scans[at], list[Stretch]()
        following = scans[at + 1].first if at + 1 < len(scans) else -1
        before = max([0, *(part.last_seq for each in scans[:at] for part in each.parts)])
        later = next((part.first_seq for each in scans[at + 1 :] for part in each.parts if part.first_seq), 0)
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
                last = ahead - 1 if ahead else max(had, self._last_in(found, bad, before))
                records = next_offset - offset if next_offset >= 0 and offset >= 0 else -1
                is_end = not ahead and following < 0
                if is_end and not bad and offset >= 0 and row.end_offset > offset:
                    records = row.end_offset - offset
                stretches.append(Stretch(start, position, before + 1, last, bad, offset, records, is_end))
                offset = next_offset
            if part is not None:
                offset = offset + part.records if offset >= 0 else -1
                before, bad = part.last_seq or before, []
        return stretches

    def _last_in(self, found: Scan, bad: list[Part], before: int) -> int:
        """The last seq that a damaged end speaks of, as far as that can be read."""
        evidence = Evidence(found, bad, before + 1, 1 << 62)
        return max([before, *evidence.own, *(seq for seq in evidence.doubtful if seq <= self.wal_end)])

    def _lines(self, found: Scan, stretch: Stretch) -> Iterator[Line]:
        """The records of a stretch, in order."""
        evidence = Evidence(found, stretch.parts, stretch.first_seq, 1 << 62 if stretch.is_end else stretch.last_seq)
        high = self.wal_end if stretch.is_end else min(stretch.last_seq, self.wal_end)
        has = max(stretch.first_seq, self.wal_first)
        records = evidence.own | self._from_wal(has, high)
        seqs = sorted(records)
        if stretch.is_end:
            seqs = self._end(stretch, seqs, records)
            if stretch.first_seq == 1 and found.first and stretch.records >= 0:
                seqs = seqs[max(0, len(seqs) - stretch.records) :]  # retention took those before
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
            yield from self._with_holes(found, stretch, {seq: records[seq] for seq in seqs}, evidence)
        else:
            yield from (Line(seq, records[seq]) for seq in seqs)

    def _from_wal(self, low: int, high: int) -> Records:
        """The records low…high of this partition, less those that drop_oldest took."""
        records: Records = {}
        for first, last in dropped.without(low, high, dropped.read(self.data, "durable")):
            for block in reader.read(self.data, first, last):
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = routing.resolve(self.table, record.routing_key_of(line), seq)
                    if route.topic == self.topic.name.encode() and self.topic.partition_of(route, seq) == self.number:
                        records[seq] = line + b"\n"
        return records

    def _with_holes(self, found: Scan, stretch: Stretch, records: Records, evidence: Evidence) -> Iterator[Line]:
        """The records of a stretch, and a None in the place of each that nobody has.

        A bare newline is no loss where compaction left it.
        """
        taken = b"\n" if compaction.is_compacted(self.data, self.topic.name) else None
        both = {**evidence.doubtful, **records}
        known = records | agreed(stretch.parts, stretch.position, ((seq, both[seq]) for seq in sorted(both)))
        missing = stretch.records - len(known)
        slots: list[Line] = []
        for part in stretch.parts:
            for line in bytes_of(found, part).split(b"\n")[:-1]:
                stamp = record.parse_stored(line)
                seq = stamp[0] if stamp else 0
                slots.append(Line(seq, known.get(seq) or (None if line else taken)))
        there = sum(text is not None and text != b"\n" for _, text in slots)
        if len(slots) != stretch.records or there != stretch.records - missing:
            slots = [*[Line(0, None)] * missing, *(Line(seq, text) for seq, text in sorted(known.items()))]
        yield from slots

    def _end(self, stretch: Stretch, seqs: list[int], lines: Records) -> list[int]:
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
