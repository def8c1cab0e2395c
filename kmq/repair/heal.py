"""Healing: restores each damaged record from its other copy. The WAL and the queue have the same bytes.

Example: a flipped bit in the queue block with records 5-9 of topic a: the block is written again from the WAL.

The order is: the list of deleted topics; id, lineage and format; misplaced segments; checkpoints and declarations; the
WAL from the queues; the queues from the WAL. If both copies of a seq are whole but differ, both are kept.

Bytes that cannot be healed go unchanged to `quarantine/<segment>.<byte>`, and `quarantine/log` names their records by
file, byte and seqs. In a queue each lost record leaves a bare newline, as in compaction, so every offset stays. In the
WAL, where a record has its seq, nothing is left. The alternative was to leave the block in place, where every reader
would refuse it for ever: consumers would stop before it, and a router that must replay it would never start. So the
loss is reported once, by name, the bytes are kept, and the broker runs. Where old records of a partition lie in KMQ_TIER,
its objects are the third copy (objects.py), and nothing is left in a queue that they do not have.

Owner       The caller holds append/.owner and topics/.owner: the broker is down.
Crash       The next repair continues with the rest; see rewriting.py and places.py. If both copies of a record change,
            the queue is written before the WAL. After a crash between the two, the next repair finds a record with a
            mark in the queue and without one in the WAL, and writes the WAL.
"""

import heapq
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

from kmq.errors import CorruptError, KmqError
from kmq.files import QUARANTINE, replace_file
from kmq.log import checkpoint, dedupe_file, deletions, dropped, gaps, reader, rows, segment, topics, wal
from kmq.log.partition import EMPTY, PartitionState, directory_of
from kmq.log.partition_recovery import find_gaps
from kmq.log.reader import FoundRecord
from kmq.log.segment import SEQ
from kmq.log.wal import RING_BYTES
from kmq.message import record, routing
from kmq.message.routing import Topic
from kmq.repair import small_files
from kmq.repair.copies import Copies, Difference
from kmq.repair.directory import At, DataDirectory
from kmq.repair.objects import NO_TIER, TierAccess, TierObjects
from kmq.repair.places import SegmentLocator
from kmq.repair.rewriting import Healed, Line, Patch, Rewriter, ranges
from kmq.repair.scan import Candidates, Records, Scan, ScannedBlock, confirmed_lines

# --- the WAL from the queues -----------------------------------------------------------------------------------------
# A record is trusted if it lies in a block with a right crc, or if both copies are the same. So damaged parts of the
# WAL are written again from the queues. Bytes that no index line covers (the index was lost) are compared with the
# queues, record by record. If the queues lack the records, the bytes are kept as they are and reported as not
# confirmed.


class WalHealer:
    """One run over the WAL."""

    def __init__(self, directory: DataDirectory, rewriter: Rewriter, objects: TierObjects) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self.objects = objects
        self._unwitnessed: list[int] = []  # seqs of the current segment that no other copy or crc confirms

    def heal(self, end: int) -> None:
        """Rewrite each segment that is damaged or not indexed. `end`: the last seq in any other file."""
        log = self.directory.wal()
        if not log.segments() and end:
            replace_file(f"{self.data}/append/{segment.name(self._oldest())}", b"")
        scans = self.rewriter.scans(log)
        for number, scan in enumerate(scans):
            is_last = number + 1 == len(scans)
            until = max(end, scan.first - 1) if is_last else scans[number + 1].first - 1
            patches = self._patches(scan, until)
            if patches or scan.wrong or scan.unindexed:
                self._unwitnessed = []
                try:
                    self.rewriter.rewrite(scan, patches, self._lines, unwitnessed=self._unwitnessed)
                except KmqError as err:
                    self.rewriter.leave(scan.path, str(err))

    def _oldest(self) -> int:
        """Return the first seq of a WAL that has no readable record.

        That is 1, unless retention has deleted the first records of a queue.
        """
        logs = map(self.directory.queue, self.directory.queues())
        scans = [scan for log in logs for scan in self.rewriter.scans(log)[:1]]
        return min([scan.seq_from(0) or 1 for scan in scans], default=1) if any(scan.first for scan in scans) else 1

    def _patches(self, scan: Scan, until: int) -> list[Patch]:
        """Return the parts of a segment that must be written again: damaged or missing records.

        `until`: the last record of the segment has at least this seq.
        """
        patches: list[Patch] = []
        last_seq, bad = scan.first - 1, list[ScannedBlock]()
        for block in [*scan.blocks, None]:
            if block is not None and not block.is_good:
                bad.append(block)
                continue
            position = block.position if block else scan.size - scan.torn
            # A damaged digit must not make the segment appear a million records longer.
            at_most = last_seq + sum(scan.read(damaged).count(b"\n") for damaged in bad) + 1
            last = block.first_seq - 1 if block else max(until, _last_in(scan, bad, last_seq, at_most))
            if bad or (last > last_seq and self._unnamed(last_seq + 1, last)):
                start = bad[0].position if bad else position
                patches.append(Patch(min(start, scan.size), position, last_seq + 1, last, bad))
            if block is not None and not block.is_witnessed:
                first = max(last_seq + 1, block.first_seq)
                patches.append(Patch(position, block.end, first, block.last_seq, [block]))
            last_seq, bad = block.last_seq if block else last, []
        return patches

    def _unnamed(self, first: int, last: int) -> list[dropped.SeqRange]:
        return dropped.without(first, last, self.directory.named_gaps())

    def _lines(self, scan: Scan, patch: Patch) -> Iterator[Line]:
        """Yield the records of a patch, in order."""
        low, high = patch.first_seq, patch.last_seq
        evidence = Candidates(scan, patch.blocks, low, high)
        copies = [self._between(self.directory.queue(at), low, high) for at in self.directory.queues()]
        unnamed = (seq for first, last in self._unnamed(low, high) for seq in range(first, last + 1))
        if not all(seq in evidence.proven for seq in unnamed):
            copies += [self._in_objects(at, low, high) for at in self.directory.queues()]
        merged = self._merged(patch, heapq.merge(*copies), evidence)
        if not patch.blocks:
            yield from merged
            return
        lines = list(merged)
        candidates = ((seq, text or evidence.doubtful.get(seq)) for seq, text in lines)
        confirmed = confirmed_lines(patch.blocks, patch.position, candidates)
        yield from (Line(seq, text or confirmed.get(seq)) for seq, text in lines)

    def _merged(self, patch: Patch, copies: Iterator[tuple[int, bytes, bool]], evidence: Candidates) -> Iterator[Line]:
        """Yield each record from its best remaining copy.

        `copies`: the records of the queues, as `_between` yields them.
        """
        copy, unsure = next(copies, None), evidence.unsure
        for first, last in self._unnamed(patch.first_seq, patch.last_seq):
            for seq in range(first, last + 1):
                text = evidence.proven.get(seq)
                while copy is not None and copy[0] <= seq:
                    if copy[0] == seq and (copy[2] or unsure.get(seq) == copy[1]):
                        text = copy[1]
                    copy = next(copies, None)
                if text is None and seq in evidence.unindexed:
                    text = evidence.unindexed[seq]
                    self._unwitnessed.append(seq)
                yield Line(seq, text)

    def _in_objects(self, at: At, low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the same of the records that only an object has."""
        return self.objects.lacking(at, self.rewriter.scans(self.directory.queue(at)), low, high)

    def _between(self, log: reader.LogReader, low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield (seq, line, True if a checksum confirms it) of the records low…high of a queue, in order."""
        for scan in self.rewriter.scans(log):
            last_seq = 0
            for number, block in enumerate(scan.blocks):
                if block.is_good and (block.last_seq < low or block.first_seq > high):
                    last_seq = max(last_seq, block.last_seq)
                    continue
                ahead = scan.seq_from(number + 1) or 1 << 63
                if ahead <= low or last_seq >= high:
                    continue
                for line in scan.read(block).split(b"\n"):
                    stamp = record.parse_stored(line) if line else None
                    if stamp and last_seq < stamp[0] < ahead:
                        if low <= stamp[0] <= high:
                            yield stamp[0], line + b"\n", block.is_witnessed
                        last_seq = stamp[0]


def _last_in(scan: Scan, bad: list[ScannedBlock], last_seq: int, at_most: int) -> int:
    """Return the last seq in a damaged end, as far as it is readable. `at_most`: bound for records no crc confirms."""
    evidence = Candidates(scan, bad, last_seq + 1, 1 << 62)
    return max([last_seq, *evidence.proven, *(seq for seq in evidence.doubtful if seq <= at_most)])


# --- the queues from the WAL, which has been healed before -----------------------------------------------------------
# Damaged parts of a queue are written again from the WAL: the records between the good ones on both sides. Offsets
# stay, so each record without any copy leaves a bare newline, as in compaction. Bytes that no index line covers are
# compared with the WAL, record by record. If retention has deleted the WAL's copy, they are kept as they are and
# reported as not confirmed.


class QueueHealer:
    """Heals one partition."""

    def __init__(
        self, directory: DataDirectory, rewriter: Rewriter, objects: TierObjects, topic: str, number: int
    ) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self.objects, self.number, self.at = objects, number, (topic, number)
        self.log = reader.local(self.data, topic, number)
        self.table = topics.table(self.data)
        self.topic = self.table.get(topic.encode()) or Topic(topic, 1, 1)
        self.wal_first, self.wal_end = reader.first_seq(self.data), reader.wal(self.data).end_offset() - 1
        self.has_rest = self.wal_first <= self.topic.from_seq  # if not, retention may have deleted the records here too
        self.begins = deletions.Deleted.of(self.data).first_offset(topic, number)
        self.forks = gaps.forks_of(gaps.forks(self.data), topic)
        self.begins = max(self.begins, gaps.least_offset(self.forks, topic, self.topic.exists_since(number)))
        self.gaps, _ = find_gaps(self.log.directory, segment.survey(self.log.directory), self.forks)

    def heal(self) -> None:
        """Rewrite each segment that is damaged or not indexed."""
        row = self.directory.load_checkpoint()[1].get((self.topic.name, self.number))
        is_lost = not rows.is_known(self.log.directory) and not rows.may_exist(self.data)
        if is_lost or self.gaps != self.log.gaps():
            gaps.write(self.log.directory, self.topic.from_seq, self.gaps)
            self.rewriter.report(rows.path_of(self.log.directory), "written again")
        self._make_front(row)
        self._make_after_gap(row)
        for at in range(len(self.rewriter.scans(self.log))):
            scans = self.rewriter.scans(self.log)  # scan again: a healed segment tells where the next one begins
            try:
                self._heal_segment(scans, at, row or EMPTY)
            except KmqError as err:  # of the WAL, if that could not be healed, or of the store
                self.rewriter.leave(scans[at].path, str(err))

    def _heal_segment(self, scans: list[Scan], at: int, row: PartitionState) -> None:
        scans[at], unwitnessed = self._compared(scans[at])
        scan, patches = scans[at], self._patches(scans, at, row)
        if patches is None:
            what = "not healed: neither router.ckpt nor a start says which record of the WAL is its first"
            self.rewriter.report(scan.path, what)
        elif patches or scan.wrong or scan.unindexed:
            self.rewriter.rewrite(scan, patches, self._lines, unwitnessed=unwitnessed)

    def _make_front(self, row: PartitionState | None) -> None:
        """Make an empty segment, to be filled, if the first segments are missing. `row`: the queue in router.ckpt."""
        segments = self.log.segments()
        start = row.start if row else self.begins if self.has_rest or not segments else segments[0][0]
        if not row and segments:
            start = max(start, min(checkpoint.highest(self._starts()), segments[0][0]))
        if self.objects.file(self.at) is None:  # nothing is rebuilt of which it is not known whether rows have it
            start = max(start, min(segments[0][0] if segments else start, row.start if row else start))
        elif (end := self.objects.end(self.at)) and (segments or row):  # what rows have is not rebuilt
            start = max(start, min(end, segments[0][0] if segments else row.end_offset if row else 0))
        if (segments and segments[0][0] > start) or (not segments and row and row.end_offset > start):
            replace_file(f"{directory_of(self.data, self.topic.name, self.number)}/{segment.name(start)}", b"")

    def _make_after_gap(self, row: PartitionState | None) -> None:
        """Make an empty segment, to be filled, if all segments after the last gap are missing."""
        segments, last = self.log.segments(), self.gaps[-1] if self.gaps else None
        if last is not None and row and row.end_offset >= last.to and segments and segments[-1][0] < last.to:
            replace_file(f"{self.log.directory}/{segment.name(last.to)}", b"")

    def _starts(self) -> list[checkpoint.RecordedStart]:
        return checkpoint.recorded_starts(self.data).get((self.topic.name, self.topic.from_seq, self.number), [])

    def _compared(self, scan: Scan) -> tuple[Scan, list[int]]:
        """Compare the blocks that no index line covers with the WAL, and mark those that differ as bad.

        Return the scan with these blocks, and the seqs that the WAL no longer has.
        """
        blocks: list[ScannedBlock] = []
        unwitnessed: list[int] = []
        may_lack_records = topics.is_compacted(self.data, self.topic.name)
        for block in scan.blocks:
            if block.is_good and block.entry is None and block.first_seq:
                here = Candidates(scan, [block], 1, 1 << 62).unindexed
                wal = self._from_wal(max(block.first_seq, self.wal_first), min(block.last_seq, self.wal_end))
                unwitnessed += [seq for seq in here if seq < self.wal_first]
                both = {seq: line for seq, line in here.items() if seq >= self.wal_first}
                is_same = both.items() <= wal.items() and (may_lack_records or len(both) == len(wal))
                block = block if is_same else block._replace(is_good=False)
            blocks.append(block)
        return scan._replace(blocks=blocks), unwitnessed

    def _patches(self, scans: list[Scan], at: int, row: PartitionState) -> list[Patch] | None:
        """Return the parts of segment `at` that must be written again; None if their records are unknown.

        `row`: the queue in router.ckpt.
        """
        scan, patches = scans[at], list[Patch]()
        next_base = gaps.ends([scans[at + 1].first], self.gaps)[0] if at + 1 < len(scans) else None
        last_seq = max([0, *(before.last_seq for before in scans[:at])])
        later = next(filter(None, (after.seq_from(0) for after in scans[at + 1 :])), 0)
        offset: int | None = scan.first  # of the next record; None: unknown
        bad: list[ScannedBlock] = []
        for number, block in enumerate([*scan.blocks, None]):
            if block is not None and not block.is_good:
                bad.append(block)
                continue
            next_offset = next_base if block is None else _offset_by_index(scan, block)
            if bad or (block is None and self._is_short(offset, next_base, last_seq, row)):
                position = block.position if block else scan.size - scan.torn
                start = min(bad[0].position, scan.size) if bad else position
                ahead = scan.seq_from(number) or later
                last = ahead - 1 if ahead else max(row.last_seq, _last_in(scan, bad, last_seq, self.wal_end))
                records: int | None = None
                if offset is not None and next_offset is not None and next_offset >= offset:
                    records = next_offset - offset
                is_end = not ahead and next_base is None
                if is_end and not bad and offset is not None and row.end_offset > offset:
                    records = row.end_offset - offset
                if records is None and not last_seq and scan.first > self.begins:
                    before = self._seq_before(scan.first, row, bad)
                    if before is None:
                        return None
                    last_seq = before
                patches.append(Patch(start, position, last_seq + 1, last, bad, offset, records, is_end))
                offset = next_offset
            if block is not None:
                offset = offset + block.records if offset is not None else None
                last_seq, bad = block.last_seq or last_seq, []
        return patches

    def _seq_before(self, first: int, row: PartitionState, bad: list[ScannedBlock]) -> int | None:
        """Return the seq before the record at offset `first`, where the queue and `bad` begin.

        0: the WAL has no such record. None: it is unknown whether it has one.
        """
        if self.has_rest:
            seqs = sorted(self._from_wal(self.topic.from_seq, self.wal_end))
            return next(iter(seqs[first - self.begins - 1 :]), 0)
        count = row.end_offset - first
        if count == 0:  # a start had deleted all records that the queue had
            return row.last_seq
        if count > 0:
            seqs = sorted(self._from_wal(self.wal_first, row.last_seq))
            return seqs[-count - 1] if count < len(seqs) else 0
        seq = checkpoint.emptied_at(self._starts(), first)  # unless these records were older than that start
        lines = self._from_wal(max(seq + 1, self.wal_first), self.wal_end).values()
        crcs = accumulate(lines, lambda crc, line: zlib.crc32(line, crc), initial=0)
        return seq if bad and bad[0].entry is not None and bad[0].entry.crc in crcs else None

    @staticmethod
    def _is_short(offset: int | None, next_base: int | None, last_seq: int, row: PartitionState) -> bool:
        """Return True if records are missing at the end of a segment that ends at `offset` and `last_seq`."""
        if next_base is None:
            return row.last_seq > last_seq and row.end_offset > row.start  # else a start has deleted all its records
        return offset is not None and next_base > offset

    def _lines(self, scan: Scan, patch: Patch) -> Iterator[Line]:
        """Yield the records of a patch, in order."""
        evidence = Candidates(scan, patch.blocks, patch.first_seq, 1 << 62 if patch.is_end else patch.last_seq)
        high = self.wal_end if patch.is_end else min(patch.last_seq, self.wal_end)
        low = max(patch.first_seq, self.wal_first)
        records = evidence.proven | self._from_wal(low, high)
        seqs = self._wanted(scan, patch, records)
        lacks_some = low > patch.first_seq if patch.records is None else len(seqs) < patch.records
        if lacks_some and (begin := scan.first if patch.offset is None else patch.offset) < self.objects.end(self.at):
            end = reader.NEVER if patch.offset is None or patch.records is None else begin + patch.records
            records |= self.objects.records(self.at, begin, end)
            seqs = self._wanted(scan, patch, records)
        if patch.records is not None and patch.records > len(seqs):
            yield from self._with_holes(scan, patch, {seq: records[seq] for seq in seqs}, evidence.doubtful)
        else:
            yield from (Line(seq, records[seq]) for seq in seqs)

    def _wanted(self, scan: Scan, patch: Patch, records: Records) -> list[int]:
        """Return the seqs of the records that belong into a patch, in order."""
        seqs = sorted(records)
        if patch.is_end:
            seqs = self._end(patch, seqs, records)
            if patch.first_seq == 1 and scan.first and patch.records is not None:
                seqs = seqs[max(0, len(seqs) - patch.records) :]  # retention deleted the records before
        elif patch.records is not None:
            # The WAL may have more: records that retention has deleted here, or of a bad end in the next segment.
            at_front = patch.first_seq == 1 and scan.first > 0
            before, behind = _bare_lines(scan, patch)  # the WAL also has what compaction removed on both sides
            if at_front or self.wal_first > patch.first_seq:
                end = max(0, len(seqs) - behind)
                seqs = seqs[max(0, end - patch.records) : end]
            else:
                seqs = seqs[before : before + patch.records]
        return seqs

    def _from_wal(self, low: int, high: int) -> Records:
        """Return the records low…high of this partition, without those that drop_oldest dropped."""
        records: Records = {}
        for first, last in dropped.without(low, high, dropped.read(self.data, "durable")):
            for block in reader.read(self.data, first, last):
                for line in block.split(b"\n")[:-1]:
                    seq = record.seq_of(line)
                    route = routing.resolve(self.table, record.routing_key_of(line), seq)
                    if route.topic == self.topic.name.encode() and self.topic.partition_of(route, seq) == self.number:
                        records[seq] = line + b"\n"
        return records

    def _with_holes(self, scan: Scan, patch: Patch, records: Records, doubtful: Records) -> Iterator[Line]:
        """Yield the records of a patch, and None for each record without any copy. `patch.records` is known.

        In a compacted topic a bare newline stays a bare newline, because it is not a loss.
        """
        compacted = b"\n" if topics.is_compacted(self.data, self.topic.name) else None
        candidates = {**doubtful, **records}
        in_order = ((seq, candidates[seq]) for seq in sorted(candidates))
        readable = records | confirmed_lines(patch.blocks, patch.position, in_order)
        count = patch.records or 0
        lost = count - len(readable)
        slots: list[Line] = []
        for block in patch.blocks:
            for line in scan.read(block).split(b"\n")[:-1]:
                stamp = record.parse_stored(line)
                seq = stamp[0] if stamp else 0
                slots.append(Line(seq, readable.get(seq) or (None if line else compacted)))
        filled = sum(text is not None and text != b"\n" for _, text in slots)
        if len(slots) != count or filled != count - lost:
            cold = max(0, self.objects.end(self.at) - patch.offset) if patch.offset is not None else 0
            there = [Line(seq, text) for seq, text in sorted(readable.items())]
            slots = [*there[:cold], *[Line(0, None)] * lost, *there[cold:]]  # an object has all records before it ends
        yield from slots

    def _end(self, patch: Patch, seqs: list[int], lines: Records) -> list[int]:
        """Return the seqs at the end of a queue: up to the crc of its index line, else up to the end of the patch."""
        entry = patch.blocks[-1].entry if patch.blocks else None
        crc, position = 0, patch.position
        for count, seq in enumerate(seqs if entry is not None else [], 1):
            if entry is not None and position >= entry.position:
                crc = zlib.crc32(lines[seq], crc)
                if crc == entry.crc:
                    return seqs[:count]
            position += len(lines[seq])
        return [seq for seq in seqs if seq <= patch.last_seq]


def _offset_by_index(scan: Scan, block: ScannedBlock) -> int | None:
    """Return the offset of a block's first record.

    A damaged index is not used, because a wrong offset would invent or lose records.
    """
    return block.entry.offset if block.entry is not None and not scan.wrong else None


def _bare_lines(scan: Scan, patch: Patch) -> tuple[int, int]:
    """Return the number of bare newlines directly before a patch, and directly after it.

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


# --- two records under one seq ---------------------------------------------------------------------------------------
# This happens when a WAL has lost its end and its seqs were assigned again (`checkpoint.agreed_end` refuses that
# today). Both records may have been acknowledged, so both are kept. The record in the queue keeps its seq, because
# consumers may have it and offsets must not change; it is written into the WAL under that seq. The record that the WAL
# had gets a new seq at the end of the WAL, and the next start of the router brings it to its queue.
#
# If the WAL lacks most records of a queue under their seqs, the queue was never written from this WAL: its segments are
# set aside, and the queue is rebuilt.
#
# A misplaced record lies in another queue than the one its topic gives. An older release that did not know the
# partitioner or the growth of the topic put it there. Offsets do not change here either:
#
#     in no other queue      the record stays. In both copies its routing key gets a mark with that partition, so it
#                            belongs there from now on
#     in its queue too       the copy in the wrong queue leaves a bare newline. At the end of a queue the next record
#                            would get the offset of a newline, so there the copy becomes a record of its own
#     in no queue at all     a copy gets a new seq at the end of the WAL; quarantine/log names the old one


_Edits = defaultdict[str, list[tuple[FoundRecord, bytes]]]  # by path: records, and the lines that replace them


def _settle(rewriter: Rewriter, objects: TierObjects, progress: Callable[[int], None]) -> bool:
    """Keep every record, once; return True if anything changed and the logs must be healed again.

    All blocks match their indexes. Records before the end of rows stay as they are: the store has them like that.
    """
    end = reader.wal(rewriter.data).end_offset() - 1
    found: defaultdict[At, list[Difference]] = defaultdict(list)
    named = DataDirectory(rewriter.data).named_gaps("durable")
    compared = Copies(rewriter.data, end, named, is_live=False, progress=progress)
    for difference in compared.differences(checkpoint.routed_seq(rewriter.data)):
        found[difference.topic, difference.partition].append(difference)
    misplaced, lost = list[Difference](), list[Difference]()
    differing: list[Difference] = []
    for at, differences in found.items():
        log, end_of_rows = reader.local(rewriter.data, *at), objects.end(at)
        if fixed := [each for each in differences if 0 <= each.offset < end_of_rows]:
            differences = [each for each in differences if each not in fixed]
            what = f"not healed: {len(fixed)} records differ from the WAL; they stay as KMQ_TIER has them"
            rewriter.report(log.directory, what)
        in_doubt = [each for each in differences if each.kind in ("altered", "foreign")]
        begin, stop = log.first_offset, log.end_offset()
        if 2 * len(in_doubt) > stop - begin - gaps.count(log.gaps(), begin, stop):
            _set_aside(rewriter, at)
            continue
        differing += in_doubt
        misplaced += [each for each in differences if each.kind == "misplaced"]
        if at not in compared.damaged:
            lost += [each for each in differences if each.kind == "lost"]
    if differing or misplaced or lost:
        _refuse_in_shard(rewriter.data, [*differing, *misplaced, *lost])
    if differing:
        _keep_both(rewriter, differing)
    placed, copied = _keep_place(rewriter, misplaced)
    _send_again(rewriter, [each for each in lost if each.seq not in placed], copied)
    return bool(found)


def _refuse_in_shard(data: str, found: list[Difference]) -> None:
    """Raise CorruptError in a shard: a record without a seq from the leader would stand in another record's place."""
    if os.path.exists(f"{data}/replica"):
        first = found[0]
        raise CorruptError(
            f"{data}: WAL and queues differ in {len(found)} records, seq {first.seq} of {first.topic}/{first.partition}"
            f" first ({first.kind}); a repair would number them anew, and in a shard only the leader numbers:"
            " run kmq cluster reset, then kmq up copies all from the leader"
        )


def _set_aside(rewriter: Rewriter, at: At) -> None:
    directory = directory_of(rewriter.data, *at)
    quarantine = rewriter.quarantine
    for _, log_path in segment.listing(directory):
        rewriter.forget(log_path)
        for path in filter(os.path.exists, (log_path, segment.index_path(log_path))):
            quarantine.set_aside(path, f"{quarantine.flat(path)}.unknown")
    what = f"most of its records are not this WAL's: set aside in {QUARANTINE}/, and rebuilt"
    rewriter.report(directory, what)


def _keep_both(rewriter: Rewriter, differences: list[Difference]) -> None:
    wal_log = reader.wal(rewriter.data)
    renumbered: list[bytes] = []  # records that get a new seq
    edits = _Edits(list)
    for seq, _, topic, partition, _ in differences:
        queued = reader.local(rewriter.data, topic, partition).find(seq, SEQ)
        logged = wal_log.find(seq, SEQ)
        assert queued is not None  # it was read from there
        if logged is not None and _marked(logged.line, topic, partition) == queued.line:
            edits[logged.path].append((logged, queued.line + b"\n"))
        elif logged is None or not logged.line.startswith(b"%d|" % seq) or _is_in_its_queue(rewriter.data, logged.line):
            edits[queued.path].append((queued, b"\n"))
            renumbered.append(queued.line)
        else:
            edits[logged.path].append((logged, queued.line + b"\n"))
            renumbered.append(logged.line)
    _edit(rewriter, edits)
    _append(rewriter, sorted(renumbered, key=record.seq_of))


def _keep_place(rewriter: Rewriter, differences: list[Difference]) -> tuple[set[int], set[int]]:
    """Give each misplaced record a mark, unless its own queue has it too.

    Return the seqs of these exceptions, and of the records that now have a copy of their own.
    """
    wal_log, table = reader.wal(rewriter.data), topics.table(rewriter.data)
    queue_edits, wal_edits = _Edits(list), _Edits(list)
    doubled: defaultdict[At, list[Difference]] = defaultdict(list)
    placed, settled, copied = defaultdict[At, list[int]](list), set[int](), set[int]()
    for difference in differences:
        seq, _, topic, partition, _ = difference
        at = topic, partition
        queued, logged = reader.local(rewriter.data, *at).find(seq, SEQ), wal_log.find(seq, SEQ)
        assert queued is not None and logged is not None  # they were compared
        line = _marked(queued.line, topic, partition)
        is_theirs = _queue_of(table, line) == at and record.routing_key_of(queued.line).startswith(topic.encode())
        if seq in settled or not is_theirs or _is_in_its_queue(rewriter.data, queued.line):
            doubled[at].append(difference)
        else:
            queue_edits[queued.path].append((queued, line + b"\n"))
            wal_edits[logged.path].append((logged, line + b"\n"))
            placed[at].append(seq)
            settled.add(seq)
    _edit(rewriter, queue_edits)  # before the WAL: see the head of the module
    _edit(rewriter, wal_edits)
    for at, seqs in placed.items():
        what = f"{len(seqs)} records belonged to another partition: they stay, and their routing keys say so now"
        rewriter.report(directory_of(rewriter.data, *at), what)
    for at, extra in doubled.items():
        copied |= _remove_doubles(rewriter, at, extra)
    return settled, copied


def _remove_doubles(rewriter: Rewriter, at: At, doubled: list[Difference]) -> set[int]:
    """Remove misplaced records from a queue; return the seqs of those that became records of their own."""
    log = reader.local(rewriter.data, *at)
    offsets, end = {each.offset for each in doubled}, log.end_offset()
    while end - 1 in offsets:
        end -= 1
    found = [(each.offset, log.find(each.seq, SEQ)) for each in doubled]
    lines = {offset: place for offset, place in found if place is not None}
    last = [lines[offset] for offset in sorted(lines) if offset >= end]
    texts = {
        place.line: text
        for place, text in zip(last, _append(rewriter, [_marked(place.line, *at) for place in last]), strict=True)
    }
    edits = _Edits(list)
    for place in lines.values():
        edits[place.path].append((place, texts.get(place.line, b"\n")))
    _edit(rewriter, edits)
    what = f"{len(lines)} records were in their own partition too: removed here, or records of their own"
    rewriter.report(directory_of(rewriter.data, *at), what)
    return {record.seq_of(place.line) for place in last}


def _send_again(rewriter: Rewriter, lost: list[Difference], copied: set[int]) -> None:
    """Append records that no queue has to the WAL, under new seqs. `copied`: seqs that have been appended before."""
    by_queue: defaultdict[At, list[int]] = defaultdict(list)
    lines = []
    for seq, _, topic, partition, _ in lost:
        logged = reader.wal(rewriter.data).find(seq, SEQ)
        if logged is not None and record.seq_of(logged.line) == seq:
            by_queue[topic, partition].append(seq)
            lines += [] if seq in copied else [logged.line]
    _append(rewriter, sorted(lines, key=record.seq_of))
    for at, seqs in by_queue.items():
        directory = directory_of(rewriter.data, *at)
        rewriter.quarantine.name_lost(f"{directory}/{segment.name(0)}", 0, ranges(sorted(seqs)))
        what = f"{len(seqs)} records were in no queue: they have new seqs, and {QUARANTINE}/log names the old ones"
        rewriter.report(directory, what)


def _is_in_its_queue(data: str, line: bytes) -> bool:
    at = _queue_of(topics.table(data), line)
    found = reader.local(data, *at).find(record.seq_of(line), SEQ) if at else None
    return found is not None and found.line == line


def _edit(rewriter: Rewriter, edits: _Edits) -> None:
    """Replace some lines of segments."""
    for path, changes in edits.items():
        by_seq = os.path.basename(os.path.dirname(path)) == "append"
        seqs = {found.byte: record.seq_of(found.line) for found, _ in changes}
        ends = sorted((found.byte, found.byte + len(found.line) + 1) for found, _ in changes)
        patches = [Patch(byte, end, seqs[byte], seqs[byte], []) for byte, end in ends]
        new = {seqs[found.byte]: line for found, line in changes}
        rewriter.rewrite(rewriter.scan(path, by_seq), patches, partial(_new_line, new))


def _append(rewriter: Rewriter, lines: list[bytes]) -> list[bytes]:
    """Append records to the WAL, each under a new seq; return them as stored, with their newlines."""
    if not lines:
        return []
    seq, recv_ts = wal.last_numbered(rewriter.data)
    stamp = record.format_ts(recv_ts)
    moved = (record.fields(line)._replace(seq=b"%d" % (seq + n), recv_ts=stamp) for n, line in enumerate(lines, 1))
    renumbered = [b"|".join(fields) + b"\n" for fields in moved]
    path = segment.listing(f"{rewriter.data}/append")[-1][1]
    scan = rewriter.scan(path, by_seq=True)
    end = Patch(scan.size, scan.size, seq + 1, seq + len(lines), [])
    rewriter.rewrite(scan, [end], lambda *_: (Line(seq + n, text) for n, text in enumerate(renumbered, 1)))
    seqs = f"seq {seq + 1} to {seq + len(lines)}"
    rewriter.report(path, f"{len(lines)} records could not keep their seqs: they are {seqs} now")
    return renumbered


def _new_line(new: Records, scan: Scan, patch: Patch) -> Iterator[Line]:
    """Yield the new content of a patch of one record."""
    yield Line(patch.first_seq, new[patch.first_seq])


def _queue_of(table: routing.Table, line: bytes) -> At | None:
    """Return the queue that a stored line belongs to; None if there is none."""
    seq = record.seq_of(line)
    route = routing.resolve(table, record.routing_key_of(line), seq)
    topic = table.get(route.topic)
    return None if topic is None else (topic.name, topic.partition_of(route, seq))


def _marked(line: bytes, topic: str, partition: int) -> bytes:
    """Return a stored line with a routing key that leads to this partition, whatever its key."""
    fields = record.fields(line)
    key = routing.key_behind(topic.encode(), fields.routing_key)
    mark = b"%b.@%d" % (topic.encode(), partition) + (b"" if key is None else b"." + key)
    return b"|".join(fields._replace(routing_key=mark))


# --- the order of healing --------------------------------------------------------------------------------------------


def repair(
    data: str,
    progress: Callable[[int], None] = lambda _: None,
    ring_bytes: int = RING_BYTES,
    access: TierAccess = NO_TIER,
) -> list[Healed]:
    """Heal a data directory; return the report, file by file. `ring_bytes`: RB_BYTES of its broker."""
    directory, rewriter, objects = DataDirectory(data), Rewriter(data, progress, ring_bytes), TierObjects(data, access)
    small_files.heal_deletions(rewriter)
    small_files.heal_forks(rewriter)
    small_files.heal_identity(directory, rewriter)
    for path, what in SegmentLocator(
        data, _last_seq_outside_wal(directory, rewriter), directory.load_checkpoint()[1]
    ).tidy():
        rewriter.report(path, what)
    rewriter.forget()
    small_files.heal(directory, rewriter)
    small_files.heal_dropped(directory, rewriter)
    objects.heal_files(rewriter)
    _heal_logs(data, rewriter, objects)
    if not rewriter.has_left and _settle(rewriter, objects, progress):
        _heal_logs(data, rewriter, objects)
    return rewriter.healed


def _heal_logs(data: str, rewriter: Rewriter, objects: TierObjects) -> None:
    directory = DataDirectory(
        data
    )  # a new one, because it caches the named gaps, and the steps before may have named more
    WalHealer(directory, rewriter, objects).heal(_last_seq_outside_wal(directory, rewriter))
    for topic, number in directory.queues():
        QueueHealer(directory, rewriter, objects, topic, number).heal()


def _last_seq_outside_wal(directory: DataDirectory, rewriter: Rewriter) -> int:
    """Return the last seq in any file except the WAL."""
    routed, rows, _ = directory.load_checkpoint()
    others = [routed, deletions.last_seq(directory.data), dedupe_file.checkpoint_seq(directory.data)]
    queues = [rewriter.last_seq(directory.queue(at)) for at in directory.queues()]
    return max([*others, *(row.last_seq for row in rows.values()), *queues])
