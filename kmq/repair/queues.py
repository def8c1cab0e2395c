"""Heals the queues from the WAL, which has been healed before.

Damaged parts of a queue are written again from the WAL: the records between the good ones on both sides. Offsets stay,
so each record that no copy has leaves a bare newline, as compaction does. Bytes that no index line covers are compared
with the WAL, record by record. If retention has deleted the WAL's copy, they are kept as they are and reported as not
confirmed.
"""

import os
import zlib
from collections.abc import Iterator

from kmq.files import replace_file
from kmq.log import compaction, deletions, dropped, reader, segment, topics
from kmq.log.partition import EMPTY, State, directory_of
from kmq.message import record, routing
from kmq.message.routing import Topic
from kmq.repair.directory import Directory
from kmq.repair.evidence import Evidence, confirmed_lines
from kmq.repair.evidence import Lines as Records
from kmq.repair.rewriting import Line, Patch, Rewriter
from kmq.repair.scan import Block, Scan


class QueueHealer:
    """Heals one partition."""

    def __init__(self, directory: Directory, rewriter: Rewriter, topic: str, number: int) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self.number = number
        self.log = reader.partition(self.data, topic, number)
        self.table = topics.table(self.data)
        self.topic = self.table.get(topic.encode()) or Topic(topic, 1, 1)
        self.wal_first, self.wal_end = reader.first_seq(self.data), reader.wal(self.data).end_offset() - 1

    def heal(self) -> None:
        """Rewrite each segment that is damaged or not indexed."""
        row = self.directory.load_checkpoint()[1].get((self.topic.name, self.number))
        self._make_front(row)
        for at in range(len(self.rewriter.scans.of_log(self.log))):
            scans = self.rewriter.scans.of_log(self.log)  # again: a healed segment tells where the next one begins
            scans[at], unwitnessed = self._compared(scans[at])
            scan = scans[at]
            patches = self._patches(scans, at, row or EMPTY)
            if patches or scan.wrong or scan.unindexed:
                self.rewriter.rewrite(scan, patches, self._lines, unwitnessed=unwitnessed)

    def _make_front(self, row: State | None) -> None:
        """Make an empty segment, to be filled, where the first segments are missing.

        `row`: the queue in router.ckpt.
        """
        segments = self.log.segments()
        has_rest = self.wal_first <= self.topic.from_seq  # else retention may have deleted the records here, too
        begins = deletions.Deleted.of(self.data).first_offset(self.topic.name, self.number)
        start = row.start if row else begins if has_rest or not segments else segments[0][0]
        if (segments and segments[0][0] > start) or (not segments and row and row.end_offset > start):
            replace_file(f"{directory_of(self.data, self.topic.name, self.number)}/{segment.name(start)}", b"")

    def _compared(self, scan: Scan) -> tuple[Scan, list[int]]:
        """Compare the blocks that no index line covers with the WAL, and mark those that differ as bad.

        Return the scan with these blocks, and the seqs that the WAL no longer has.
        """
        blocks: list[Block] = []
        unwitnessed: list[int] = []
        may_lack_records = compaction.is_compacted(self.data, self.topic.name)
        for block in scan.blocks:
            if block.is_good and block.entry is None and block.first_seq:
                here = Evidence(scan, [block], 1, 1 << 62).unindexed
                wal = self._from_wal(max(block.first_seq, self.wal_first), min(block.last_seq, self.wal_end))
                unwitnessed += [seq for seq in here if seq < self.wal_first]
                both = {seq: line for seq, line in here.items() if seq >= self.wal_first}
                is_same = both.items() <= wal.items() and (may_lack_records or len(both) == len(wal))
                block = block if is_same else block._replace(is_good=False)
            blocks.append(block)
        return scan._replace(blocks=blocks), unwitnessed

    def _patches(self, scans: list[Scan], at: int, row: State) -> list[Patch]:
        """Return the parts of segment `at` that must be written again. `row`: the queue in router.ckpt."""
        scan, patches = scans[at], list[Patch]()
        next_base = scans[at + 1].first if at + 1 < len(scans) else None
        last_seq = max([0, *(before.last_seq for before in scans[:at])])
        later = next(filter(None, (after.seq_from(0) for after in scans[at + 1 :])), 0)
        offset: int | None = scan.first  # of the next record; None: not known
        bad: list[Block] = []
        for number, block in enumerate([*scan.blocks, None]):
            if block is not None and not block.is_good:
                bad.append(block)
                continue
            next_offset = next_base if block is None else _offset_by_index(scan, block)
            if bad or (block is None and self._is_short(offset, next_base, last_seq, row)):
                position = block.position if block else scan.size - scan.torn
                start = min(bad[0].position, scan.size) if bad else position
                ahead = scan.seq_from(number) or later
                last = ahead - 1 if ahead else max(row.last_seq, self._last_in(scan, bad, last_seq))
                records: int | None = None
                if offset is not None and next_offset is not None and next_offset >= offset:
                    records = next_offset - offset
                is_end = not ahead and next_base is None
                if is_end and not bad and offset is not None and row.end_offset > offset:
                    records = row.end_offset - offset
                patches.append(Patch(start, position, last_seq + 1, last, bad, offset, records, is_end))
                offset = next_offset
            if block is not None:
                offset = offset + block.records if offset is not None else None
                last_seq, bad = block.last_seq or last_seq, []
        return patches

    @staticmethod
    def _is_short(offset: int | None, next_base: int | None, last_seq: int, row: State) -> bool:
        """Return True if records are missing at the end of a segment that ends at `offset` and `last_seq`."""
        if next_base is None:
            return row.last_seq > last_seq
        return offset is not None and next_base > offset

    def _last_in(self, scan: Scan, bad: list[Block], last_seq: int) -> int:
        """Return the last seq in a damaged end, as far as it can be read."""
        evidence = Evidence(scan, bad, last_seq + 1, 1 << 62)
        return max([last_seq, *evidence.proven, *(seq for seq in evidence.doubtful if seq <= self.wal_end)])

    def _lines(self, scan: Scan, patch: Patch) -> Iterator[Line]:
        """Yield the records of a patch, in order."""
        evidence = Evidence(scan, patch.blocks, patch.first_seq, 1 << 62 if patch.is_end else patch.last_seq)
        high = self.wal_end if patch.is_end else min(patch.last_seq, self.wal_end)
        low = max(patch.first_seq, self.wal_first)
        records = evidence.proven | self._from_wal(low, high)
        seqs = sorted(records)
        if patch.is_end:
            seqs = self._end(patch, seqs, records)
            if patch.first_seq == 1 and scan.first and patch.records is not None:
                seqs = seqs[max(0, len(seqs) - patch.records) :]  # retention deleted the records before
        elif patch.records is not None:
            # The WAL may have more: records that retention deleted here, or of a bad end in the next segment.
            at_front = patch.first_seq == 1 and scan.first > 0
            before, behind = _bare_lines(scan, patch)  # the WAL also has what compaction removed on both sides
            if at_front or low > patch.first_seq:
                end = max(0, len(seqs) - behind)
                seqs = seqs[max(0, end - patch.records) : end]
            else:
                seqs = seqs[before : before + patch.records]
        if patch.records is not None and patch.records > len(seqs):
            yield from self._with_holes(scan, patch, {seq: records[seq] for seq in seqs}, evidence.doubtful)
        else:
            yield from (Line(seq, records[seq]) for seq in seqs)

    def _from_wal(self, low: int, high: int) -> Records:
        """Return the records low…high of this partition, without those that drop_oldest dropped."""
        records: Records = {}
        for first, last in dropped.without(low, high, dropped.read(self.data, "durable")):
            for block in reader.read(self.data, first, last):
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = routing.resolve(self.table, line.split(b"|", 3)[2], seq)
                    if route.topic == self.topic.name.encode() and self.topic.partition_of(route, seq) == self.number:
                        records[seq] = line + b"\n"
        return records

    def _with_holes(self, scan: Scan, patch: Patch, records: Records, doubtful: Records) -> Iterator[Line]:
        """Yield the records of a patch, with None in the place of each that no copy has. `patch.records` is known.

        In a compacted topic a bare newline stays a bare newline, because it is no loss.
        """
        compacted = b"\n" if compaction.is_compacted(self.data, self.topic.name) else None
        candidates = {**doubtful, **records}
        in_order = ((seq, candidates[seq]) for seq in sorted(candidates))
        known = records | confirmed_lines(patch.blocks, patch.position, in_order)
        count = patch.records or 0
        missing = count - len(known)
        slots: list[Line] = []
        for block in patch.blocks:
            for line in scan.read(block).split(b"\n")[:-1]:
                stamp = record.parse_stored(line)
                seq = stamp[0] if stamp else 0
                slots.append(Line(seq, known.get(seq) or (None if line else compacted)))
        filled = sum(text is not None and text != b"\n" for _, text in slots)
        if len(slots) != count or filled != count - missing:
            slots = [*[Line(0, None)] * missing, *(Line(seq, text) for seq, text in sorted(known.items()))]
        yield from slots

    def _end(self, patch: Patch, seqs: list[int], lines: Records) -> list[int]:
        """Return the seqs that the end of a queue had: up to the crc of its index line, else up to the patch's last."""
        entry = patch.blocks[-1].entry if patch.blocks else None
        crc, position = 0, patch.position
        for count, seq in enumerate(seqs if entry is not None else [], 1):
            if entry is not None and position >= entry.position:
                crc = zlib.crc32(lines[seq], crc)
                if crc == entry.crc:
                    return seqs[:count]
            position += len(lines[seq])
        return [seq for seq in seqs if seq <= patch.last_seq]


def _offset_by_index(scan: Scan, block: Block) -> int | None:
    """Return the offset of a block's first record.

    A damaged index is not used, because a wrong offset would invent or lose records.
    """
    return block.entry.offset if block.entry is not None and not scan.wrong else None


def _bare_lines(scan: Scan, patch: Patch) -> tuple[int, int]:
    """Return how many bare newlines lie right before a patch, and right behind it.

    Compaction never removes the ends of a segment.
    """
    before = behind = 0
    with open(scan.path, "rb") as file:
        position = patch.position
        while position > 1 and os.pread(file.fileno(), 2, position - 2) == b"\n\n":
            before, position = before + 1, position - 1
        while os.pread(file.fileno(), 1, patch.end + behind) == b"\n":
            behind += 1
    return before, behind
